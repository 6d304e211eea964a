"""A small file that asks for a lot is refused by a limit, at once."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from reprokit.errors import SnapshotError, UsageError
from reprokit.snapshot.format import load, read_file, save
from reprokit.snapshot.limits import VARIABLE
from tests.render.programs import masked_softmax, snapshot_of


def doubled(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found, found]
    return found


def nested(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save(snapshot_of(masked_softmax()), tmp_path / "x.pt")
    return tmp_path / "x.pt"


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        ({"command": doubled(40)}, "items"),
        ({"command": nested(100)}, "depth"),
        ({"tensors": {0: torch.zeros(1).expand(10**6, 10**6)}}, "elements"),
        ({"tensors": {0: torch.sparse_coo_tensor([[0]], [1.0], (10**9,), check_invariants=True)}}, "elements"),
    ],
)
def test_what_a_few_bytes_can_ask_for(file: Path, change: dict[str, Any], limit: str) -> None:
    content = read_file(file, "snapshot")
    torch.save({**content, **change}, file)
    assert file.stat().st_size < 50_000
    with pytest.raises(SnapshotError, match=f"has more than .* {limit}") as raised:
        load(file)
    assert VARIABLE in str(raised.value.hint)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning", "ignore:TypedStorage:UserWarning")
def test_a_quantized_tensor_is_one_that_torch_copies(file: Path) -> None:
    content, ones = read_file(file, "snapshot"), torch.ones(2)
    for zero_points, is_copied in ((torch.zeros(2, dtype=torch.int64), True), (torch.zeros(2), False)):
        odd = torch.quantize_per_channel(torch.eye(2), ones, zero_points, 0, torch.qint8)
        torch.save({**content, "tensors": {**content["tensors"], 999: odd}}, file)
        try:
            load(file)
            assert is_copied
        except SnapshotError as error:
            assert not is_copied and "quantized in a way that torch cannot copy" in str(error), error


def test_a_limit_can_be_raised(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = read_file(file, "snapshot")
    monkeypatch.setenv(VARIABLE, "calls=0")
    with pytest.raises(SnapshotError, match="has more than 0 calls"):
        load(file)
    monkeypatch.setenv(VARIABLE, f"calls={len(content['program']['calls'])} depth=99")
    load(file)


@pytest.mark.parametrize("words", ["calls", "calls=many", "colour=3"])
def test_a_limit_that_is_none(file: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, words)
    with pytest.raises(UsageError, match=VARIABLE):
        load(file)


def test_an_archive_that_unpacks_to_more_than_it_is(file: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry) + b"\0" * 10**6)
    with pytest.raises(SnapshotError, match="is damaged"):
        load(packed)


def shadowed() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.numel = torch.Size  # type: ignore[method-assign, assignment]
    return tensor


def outside(layout: torch.layout) -> torch.Tensor:
    """A sparse tensor whose indices lead outside of its memory."""
    indices = torch.tensor([0, 9]), torch.tensor([9**9])
    make = torch.sparse_csr_tensor if layout is torch.sparse_csr else torch.sparse_csc_tensor
    return make(*indices, torch.ones(1), (1, 1), check_invariants=False)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about kinds of tensors that are in beta
@pytest.mark.parametrize(
    "value",
    [{1, 2}, OrderedDict(a=1), torch.float32, torch.Size([1]), shadowed, lambda: outside(torch.sparse_csr),
     lambda: outside(torch.sparse_csc), lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])],
    ids=["set", "ordered", "dtype", "size", "attributes", "csr", "csc", "nested"],
)  # fmt: skip
def test_what_no_file_of_ours_holds(file: Path, value: Any) -> None:
    content = read_file(file, "snapshot")
    made = value() if isinstance(value, FunctionType) else value
    for place in ("tensors", "environment"):
        torch.save({**content, place: {**content[place], 0: made}}, file)
        with pytest.raises(SnapshotError, match=r"is damaged: |holds more than plain data"):
            load(file)


@pytest.mark.parametrize("number", [10**5000, -(2**70)], ids=["huge", "below"])
@pytest.mark.parametrize("place", ["step", "version", "timeline"])
def test_numbers_too_large_to_be_printed(file: Path, number: int, place: str) -> None:
    content = read_file(file, "snapshot")
    torch.save({**content, place: number if place != "timeline" else [{"step": 0, "loss": number}]}, file)
    with pytest.raises(SnapshotError, match=r"is damaged: |holds more than plain data"):
        load(file)


def test_tensors_that_share_what_is_stored_once(file: Path) -> None:
    content = read_file(file, "snapshot")
    stored = torch.zeros(2**20)
    tied = {number: stored[:] for number in range(5)}
    torch.save({**content, "tensors": {**content["tensors"], **tied}}, file)
    load(file)
    bomb = {number: stored[:] for number in range(90)}
    torch.save({**content, "tensors": {**content["tensors"], **bomb}}, file)
    with pytest.raises(SnapshotError, match=r"has more than .* elements"):
        load(file)


def test_an_archive_with_a_comment(file: Path) -> None:
    with zipfile.ZipFile(file, "a") as archive:
        archive.comment = b"PK"
    with pytest.raises(SnapshotError, match="is damaged"):
        load(file)


@pytest.mark.parametrize("field", ["kind", "origin"])
def test_a_file_of_another_kind_says_nothing_but_a_short_name(file: Path, field: str) -> None:
    content = read_file(file, "snapshot")
    text = "\x1b[2Jx\nreprokit: error: y" * 100
    kind = text if field == "kind" else "reduction"
    torch.save({**content, "kind": kind, "origin": {"file": text}}, file)
    with pytest.raises(SnapshotError) as raised:
        load(file)
    said = f"{raised.value.message}{raised.value.hint}"
    assert "\x1b" not in said and "\n" not in said and len(said) < 500
