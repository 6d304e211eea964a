"""Verifying: clean processes, agreement, and every way in which a script can end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reprokit.errors import NotASnapshot, UsageError
from reprokit.render import verify as verifying
from reprokit.render.verify import CleanProcesses, VerifyResult, side_files, verify
from reprokit.snapshot.format import save
from tests.render.programs import masked_softmax, snapshot_of

Write = Callable[[str], Path]


@pytest.fixture(autouse=True)
def verified_in_forks() -> None:
    """Nothing is put in place of Python here."""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_it(text: str) -> Path:
        path = tmp_path / "repro.py"
        path.write_text(text)
        return path

    return write_it


@pytest.fixture(scope="module")
def processes() -> Iterator[CleanProcesses]:
    """One server for all tests: whatever a script does, the next one finds it as it was."""
    with CleanProcesses() as opened:
        yield opened


@pytest.fixture
def run(write: Write, processes: CleanProcesses) -> Callable[..., VerifyResult]:
    """Run a text in the server; the first run is a new interpreter, the others are forked."""

    def run_it(text: str, times: int = 2, seconds: float = 60.0) -> VerifyResult:
        return processes.begin_file(write(text), times, seconds).result()

    return run_it


ENDS = [
    ("print('fine')", 0, ""),
    ("print('out'); assert False, 'bad'", 1, "AssertionError: bad"),
    ("import sys; sys.exit(7)", 7, ""),
    ("import sys; sys.exit('gone')", 1, "gone"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11, ""),
    ("import os, signal; os.killpg(0, signal.SIGTERM)", -15, ""),
    ("import reprokit", 1, "ModuleNotFoundError: import of reprokit halted; None in sys.modules"),
    ("import os; assert os.listdir() == ['repro.py'], os.listdir()", 0, ""),
    ("import os; assert 'SECRET' not in os.environ", 0, ""),
    ("assert __name__ == '__main__' and __file__.endswith('repro.py')", 0, ""),
    ("import sys; assert sys.stdin.read() == '' and len(sys.argv) == 1", 0, ""),
    ("import atexit; atexit.register(print, 'end')", 0, ""),
    ("import threading; threading.Timer(0.1, print, ['end']).start()", 0, ""),
    ("print('\u00e4')", 0, ""),
    ("def broken(:", 1, "SyntaxError: invalid syntax"),
]


@pytest.mark.parametrize(("text", "exit_code", "last"), ENDS)
def test_how_a_run_can_end(
    run: Callable[..., VerifyResult], monkeypatch: pytest.MonkeyPatch, text: str, exit_code: int, last: str
) -> None:
    monkeypatch.setenv("SECRET", "1")
    result = run(text)
    assert (result.exit_code, result.verified, result.is_unanimous) == (exit_code, "2/2", True)
    assert result.signature == f"exit code {exit_code}" + (f": {last}" if last else "")
    assert result.fails == (exit_code == 1)


def test_where_the_system_cannot_fork(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    result = verify(write("import os; print(os.urandom(8).hex()); assert False, 'bad'"), 2)
    assert (result.num_failed, result.verified, result.signature) == (2, "1/2", "exit code 1: AssertionError: bad")
    assert verify(write("import time; time.sleep(60)"), 2, seconds_per_run=0.2).signature == "timeout"


def test_a_run_that_takes_too_long_is_ended(run: Callable[..., VerifyResult]) -> None:
    result = run("import time; time.sleep(60)", 2, 0.3)
    assert (result.exit_code, result.signature, result.verified) == (None, "timeout", "2/2")
    assert result.seconds < 30


def test_runs_that_differ_do_not_agree(run: Callable[..., VerifyResult], processes: CleanProcesses) -> None:
    """A forked run has its parent's seed of hashes; the new interpreter has another one."""
    numbers = "os.urandom(8).hex(), random.random(), numpy.random.rand(), torch.rand(1).item(), hash('a')"
    result = run(f"import os, random, numpy, torch\nprint({numbers})", 4)
    assert (result.agreed, result.is_unanimous) == (1, False)
    *columns, hashes = zip(*(run.stdout.split() for run in list(processes._reports.values())[-1]), strict=True)
    assert [len(set(column)) for column in columns] == [4] * 4
    assert len(set(hashes)) == 2


def test_a_run_leaves_nothing_to_the_next(run: Callable[..., VerifyResult]) -> None:
    text = """
        import os, sys, torch
        print(getattr(torch, "left", None), torch.get_default_dtype(), os.environ.get("LEFT"))
        print(torch.get_num_threads(), torch.is_grad_enabled(), torch.ones(99999).sum())
        torch.left, os.environ["LEFT"] = 1, "1"
        torch.set_default_dtype(torch.float64), torch.manual_seed(1), torch.set_num_threads(3)
    """
    result = run("\n".join(line.strip() for line in text.splitlines()), 4)
    assert result.is_unanimous and result.output.startswith("None torch.float32 None\n")


def test_files_that_the_script_names_come_along(write: Write, tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text("12")
    (tmp_path / "other.txt").write_text("13")
    path = write("from pathlib import Path\nassert Path(__file__).with_name('numbers.txt').read_text() == '12'")
    assert side_files(path) == [tmp_path / "numbers.txt"]
    assert verify(path, 1).exit_code == 0


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are not forked here")
def test_what_still_runs_ends_with_the_server(write: Write, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    script = write(f"import os, time; open({str(begun)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    with CleanProcesses() as processes:
        processes.begin_file(script, 2)
        deadline = time.monotonic() + 60
        while not (begun.exists() and begun.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)
