"""A file that is not what it should be gets one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from reprokit.errors import SnapshotError
from reprokit.grammar import known_fields
from reprokit.snapshot.format import Snapshot, load, read_file, save, write_file
from tests.render.programs import masked_softmax, snapshot_of

FIELDS = tuple(Snapshot.__dataclass_fields__)


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    save(snapshot_of(masked_softmax()), tmp_path / "whole.pt")
    return read_file(tmp_path / "whole.pt", "snapshot")


def test_a_field_that_is_missing_or_something_else(content: dict[str, Any], tmp_path: Path) -> None:
    files = [{**content, name: 1.5} for name in FIELDS]
    for name in FIELDS:
        if not known_fields(Snapshot)[name].is_left_out:  # it is not written while it is `None`
            files.append({key: value for key, value in content.items() if key != name})
    for changed in files:
        write_file(tmp_path / "broken.pt", "snapshot", changed)
        with pytest.raises(SnapshotError, match="is damaged"):
            load(tmp_path / "broken.pt")


def test_an_input_without_a_tensor(content: dict[str, Any], tmp_path: Path) -> None:
    for tensors in ({}, {0: "text"}):
        write_file(tmp_path / "broken.pt", "snapshot", {**content, "tensors": tensors})
        with pytest.raises(SnapshotError, match=r"is damaged: .*(has no tensor|is not a plain tensor)"):
            load(tmp_path / "broken.pt")


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_threads", "two"), ("num_threads", 0), ("deterministic_algorithms", 3), ("history_bytes", "many")],
)
def test_a_switch_of_another_kind(content: dict[str, Any], name: str, value: Any, tmp_path: Path) -> None:
    write_file(tmp_path / "broken.pt", "snapshot", {**content, "settings": {**content["settings"], name: value}})
    with pytest.raises(SnapshotError, match=f"is damaged: `settings`: `{name}`: it is"):
        load(tmp_path / "broken.pt")


@pytest.mark.parametrize("index", [-1, 1_000_000])
@pytest.mark.parametrize("place", ["failure", "drop", "cause"])
def test_a_failure_of_a_call_that_is_not_there(content: dict[str, Any], place: str, index: int, tmp_path: Path) -> None:
    fields = {
        "failure": {"call_index": index},
        "drop": {"drop": [index, "torch.where", 0, True]},
        "cause": {"cause": {**content["failure"], "call_index": index}},
    }
    failure = {**content["failure"], **fields[place]}
    write_file(tmp_path / "broken.pt", "snapshot", {**content, "failure": failure})
    with pytest.raises(SnapshotError, match=f"is damaged: .*(call {index} of|it is {index})"):
        load(tmp_path / "broken.pt")


@pytest.mark.parametrize(
    "fields",
    [
        {"call": 7},
        {"is_overflow": "yes"},
        {"spectrum": "none"},
        {"drop": 5},
        {"drop": [0, 7, 0, True]},
        {"drop": [0, "torch.where"]},
        {"cause": {}},
        {"cause": {"phase": "forward", "kind": 3}},
        {"element": 5},
    ],
)
def test_a_failure_with_a_field_of_another_kind(
    content: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    write_file(tmp_path / "broken.pt", "snapshot", {**content, "failure": {**content["failure"], **fields}})
    with pytest.raises(SnapshotError, match="is damaged"):
        load(tmp_path / "broken.pt")


def test_a_failure_of_an_earlier_version_is_read(content: dict[str, Any], tmp_path: Path) -> None:
    new = ("drop", "is_overflow", "spectrum", "cause")
    failure = {name: value for name, value in content["failure"].items() if name not in new}
    write_file(tmp_path / "old.pt", "snapshot", {**content, "failure": failure})
    assert load(tmp_path / "old.pt").failure == load(tmp_path / "whole.pt").failure


@pytest.mark.parametrize("more", [{}, {"source": "x"}, {"largest_usual": 2.0}, {"argument": "target of mse_loss"}])
def test_the_data_of_an_event_have_a_name_and_two_sizes(
    content: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    numbers = {"quantity": "loss", "value": 9.0, "threshold": 8.0, "reference_step": 1, "began_at": 2, "largest": 3.0}
    write_file(
        tmp_path / "x.pt", "snapshot", {**content, "failure": {**content["failure"], "event": {**numbers, **more}}}
    )
    with pytest.raises(SnapshotError, match="is damaged: the event has a `largest` without"):
        load(tmp_path / "x.pt")
    event = {**numbers, "source": "x", "largest_usual": 2.0, **more}
    write_file(tmp_path / "x.pt", "snapshot", {**content, "failure": {**content["failure"], "event": event}})
    assert load(tmp_path / "x.pt").summary()["failure"]["event"]["largest_usual"] == 2.0


def test_a_version_that_is_none(content: dict[str, Any], tmp_path: Path) -> None:
    torch.save({**content, "version": "1"}, tmp_path / "broken.pt")
    with pytest.raises(SnapshotError, match="is damaged: its version is '1'"):
        load(tmp_path / "broken.pt")
