"""Verifying: clean processes, agreement, and every way in which a script can end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reprokit.errors import NotASnapshot, UsageError
from reprokit.render import verify as verifying
from reprokit.render.verify import side_files, verify
from reprokit.snapshot.format import save
from tests.render.programs import masked_softmax, snapshot_of

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_it(text: str) -> Path:
        path = tmp_path / "repro.py"
        path.write_text(text)
        return path

    return write_it


@pytest.fixture(params=["forked", "interpreters"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs forked from one clean interpreter, and runs in interpreters of their own."""
    if request.param == "interpreters":

        def nothing(*_: object) -> Iterator[verifying.Run]:
            return iter(())

        monkeypatch.setattr(verifying, "_forked_runs", nothing)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize(
    ("text", "exit_code", "last"),
    [
        ("print('fine')", 0, ""),
        ("print('out'); assert False, 'bad'", 1, "AssertionError: bad"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('gone')", 1, "gone"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import reprokit", 1, "ModuleNotFoundError: import of reprokit halted; None in sys.modules"),
        ("import os; assert os.listdir() == ['repro.py'], os.listdir()", 0, ""),
        ("import os; assert 'SECRET' not in os.environ", 0, ""),
        ("assert __name__ == '__main__' and __file__.endswith('repro.py')", 0, ""),
        ("def broken(:", 1, "SyntaxError: invalid syntax"),
    ],
)
def test_how_a_run_can_end(write: Write, monkeypatch: pytest.MonkeyPatch, text: str, exit_code: int, last: str) -> None:
    monkeypatch.setenv("SECRET", "1")
    result = verify(write(text), 2)
    assert (result.exit_code, result.verified, result.is_unanimous) == (exit_code, "2/2", True)
    assert result.signature == f"exit code {exit_code}" + (f": {last}" if last else "")
    assert result.fails == (exit_code == 1)


@pytest.mark.usefixtures("either_way")
def test_a_run_that_takes_too_long_is_ended(write: Write) -> None:
    result = verify(write("import time; time.sleep(60)"), 1, seconds_per_run=1.0)
    assert (result.exit_code, result.signature) == (None, "timeout")
    assert result.seconds < 30


@pytest.mark.usefixtures("either_way")
def test_runs_that_differ_do_not_agree(write: Write) -> None:
    result = verify(write("import os; print(os.urandom(8).hex())"), 3)
    assert (result.agreed, result.verified, result.is_unanimous) == (1, "1/3", False)


@pytest.mark.usefixtures("either_way")
def test_memory_addresses_and_folders_make_no_difference(write: Write) -> None:
    assert verify(write("import os; print(object(), os.getcwd())"), 3).is_unanimous


@pytest.mark.usefixtures("either_way")
def test_files_that_the_script_names_come_along(write: Write, tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text("12")
    (tmp_path / "other.txt").write_text("13")
    path = write("from pathlib import Path\nassert Path(__file__).with_name('numbers.txt').read_text() == '12'")
    assert side_files(path) == [tmp_path / "numbers.txt"]
    assert verify(path, 1).exit_code == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are not forked here")
def test_what_an_optimizer_loads_is_loaded_once(write: Write) -> None:
    result = verify(write("import sys; print('torch._dynamo' in sys.modules, 'torch.optim')"), 1)
    assert result.output == "True torch.optim\n"


def test_leaves_no_folders_behind(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(verifying.tempfile, "tempdir", str(folder))
    verify(write("print(1)"), 2)
    assert os.listdir(folder) == []


def test_a_snapshot_is_rendered_first(tmp_path: Path) -> None:
    save(snapshot_of(masked_softmax()), tmp_path / "snapshot.pt")
    result = verify(tmp_path / "snapshot.pt", 2)
    assert (result.fails, result.output) == (True, "out = tensor([nan])\n")
    assert result.summary()["verified"] == "2/2"


def test_what_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        verify(tmp_path / "missing.py", 1)
    (tmp_path / "repro.py").write_text("")
    with pytest.raises(UsageError, match="0 times"):
        verify(tmp_path / "repro.py", 0)
    (tmp_path / "text.pt").write_text("not a snapshot")
    with pytest.raises(NotASnapshot):
        verify(tmp_path / "text.pt", 1)
