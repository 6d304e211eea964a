"""A file that is not what it should be gets one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reprokit.errors import SnapshotError
from reprokit.snapshot.format import Snapshot, load, read_file, save, write_file
from tests.render.programs import masked_softmax, snapshot_of

FIELDS = tuple(Snapshot.__dataclass_fields__)


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    save(snapshot_of(masked_softmax()), tmp_path / "whole.pt")
    return read_file(tmp_path / "whole.pt", "snapshot")


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_is_missing_or_something_else(content: dict[str, Any], name: str, tmp_path: Path) -> None:
    for changed in ({**content, name: 1.5}, {key: value for key, value in content.items() if key != name}):
        write_file(tmp_path / "broken.pt", "snapshot", changed)
        with pytest.raises(SnapshotError, match="is damaged"):
            load(tmp_path / "broken.pt")


def test_an_input_without_a_tensor(content: dict[str, Any], tmp_path: Path) -> None:
    for tensors in ({}, {0: "text"}):
        write_file(tmp_path / "broken.pt", "snapshot", {**content, "tensors": tensors})
        with pytest.raises(SnapshotError, match="has no tensor"):
            load(tmp_path / "broken.pt")
