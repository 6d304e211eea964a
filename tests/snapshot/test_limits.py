"""A small file that asks for a lot is refused by a limit, at once."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from reprokit.errors import SnapshotError, UsageError
from reprokit.snapshot.format import load, read_file, save, write_file
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
    ],
)
def test_what_a_few_bytes_can_ask_for(file: Path, change: dict[str, Any], limit: str) -> None:
    content = read_file(file, "snapshot")
    torch.save({**content, **change}, file)
    assert file.stat().st_size < 50_000
    with pytest.raises(SnapshotError, match=f"has more than .* {limit}") as raised:
        load(file)
    assert VARIABLE in str(raised.value.hint)


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


def test_nothing_is_lost_on_the_way(file: Path) -> None:
    once = load(file)
    write_file(file, "snapshot", read_file(file, "snapshot"))
    again = load(file)
    assert once.summary() == again.summary() and once.program == again.program
