"""Bad values that ranks report to each other in memory of their machine, without asking the store."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from torch.distributed import HashStore

from reprokit.capture.run import reports
from reprokit.capture.run.reports import Reports


class CountedStore(HashStore):
    """Counts the questions."""

    num_asked = 0

    def check(self, keys: list[str]) -> bool:
        self.num_asked += 1
        return super().check(keys)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file is made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_ranks_of_one_machine_need_no_store(folder: Path) -> None:
    store = CountedStore()
    first, second = (Reports(store, "run", rank, 2) for rank in range(2))
    assert first.hold(0) is None and list(folder.iterdir())
    second.set(0)
    assert second.hold(0) is True  # all have mapped it now
    assert first.hold(0) is True and not list(folder.iterdir())
    asked = store.num_asked
    assert (first.hold(1), second.hold(1)) == (False, False)
    first.set(1)
    assert (first.hold(1), second.hold(1), second.hold(0)) == (True, True, True)
    second.set(None)
    assert (first.hold(0), first.hold(1)) == (False, True)
    assert store.num_asked == asked


def test_good_gradients_are_known_where_memory_is_shared(folder: Path) -> None:
    store = CountedStore()
    first, second = (Reports(store, "run", rank, 2) for rank in range(2))
    first.pass_check(1)
    assert first.ranks_past(1) is None
    assert second.ranks_past(1) == {0}  # all have mapped it now, with what was written before
    second.pass_check(2)
    assert (first.ranks_past(2), first.ranks_past(1), first.ranks_past(3)) == ({1}, {0, 1}, frozenset())


def test_a_rank_of_another_machine_asks_the_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountedStore()
    first = Reports(store, "run", 0, 2)
    monkeypatch.setattr(reports, "_BOOT", folder / "boot")
    (folder / "boot").write_text("another")
    second = Reports(store, "run", 1, 2)
    second.set(3)
    for _ in range(2 * reports._ATTEMPTS):
        assert (first.hold(3), second.hold(3)) == (None, None)
    assert [path.name for path in folder.iterdir()] == ["boot"]
    assert store.num_asked < 4 * reports._ATTEMPTS


def test_a_folder_that_cannot_be_written_leaves_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    both = [Reports(CountedStore(), "run", rank, 2) for rank in range(2)]
    assert [one.hold(0) for one in both] == [None, None]


def test_a_file_that_never_serves_is_removed(folder: Path) -> None:
    alone = Reports(CountedStore(), "run", 0, 2)
    assert list(folder.iterdir())
    alone.close()
    assert not list(folder.iterdir())
