"""Views, budgets, Ctrl-C and going on from a result, with real snapshots; Ctrl-C with real processes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from reprokit.cli import main
from reprokit.errors import ReprokitError
from reprokit.render.script import NOT_VERIFIED
from reprokit.render.verify import CleanProcesses, Verification, VerifyResult
from reprokit.shrink.reduction import load
from reprokit.snapshot import files
from reprokit.snapshot.format import save
from tests.conftest import ROOT, run_python_in
from tests.shrink import failing

begin = CleanProcesses.begin
RESULTS = {"issue.md", "reduction.pt", "report.html", "repro.py", "test_repro.py"}


class Counted:
    """A verification without runs."""

    def __init__(self, times: int) -> None:
        self.times = times

    def result(self) -> VerifyResult:
        return VerifyResult(self.times, self.times, self.times, 1, "", "", "", 0.0)


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A snapshot whose reduction takes over 50 checks, in the current folder. Results count as verified."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CleanProcesses, "open", lambda self: None)
    monkeypatch.setattr(CleanProcesses, "begin", lambda self, script, times: Counted(times))
    path = tmp_path / "snap.pt"
    save(failing.loss_scaled_twice(), path)
    return path


@pytest.fixture
def really_verified(monkeypatch: pytest.MonkeyPatch, snapshot: Path) -> None:
    """Results are verified twice, in clean processes as ever."""

    def begin_twice(self: CleanProcesses, script: Any, times: int) -> Verification:
        return begin(self, script, 2)

    monkeypatch.setattr(CleanProcesses, "begin", begin_twice)


@pytest.fixture
def shrink(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Run ``reprokit shrink`` here; exit code, JSON and stderr."""

    def run(*words: str) -> tuple[int, dict[str, Any], str]:
        code = main(["shrink", "snap.pt", "--json", *words])
        said = capsys.readouterr()
        return code, json.loads(said.out) if said.out else {}, said.err

    return run


# -- budgets -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("really_verified")
@pytest.mark.parametrize(("option", "limit", "checks"), [("max-checks", "12", 12), ("max-time", "1e-9", 0)])
def test_a_budget_still_leaves_a_verified_result(option: str, limit: str, checks: int, shrink: Any) -> None:
    code, summary, err = shrink(f"--{option}", limit)
    assert code == 0
    assert (summary["checks"], summary["stopped"], summary["one_minimal"]) == (checks, option, False)
    assert summary["repro"]["verified"] == "2/2"
    assert f"stopped early by --{option}" in err
    assert f"<dt>Stopped early</dt><dd>{option}</dd>" in Path("snap", "report.html").read_text()
    assert all(not item["free"] and item["tried"] is False for item in summary["explain"])


def test_the_first_repro_is_there_before_it_is_verified(shrink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def result(self: Counted) -> VerifyResult:
        seen.append(Path("snap", "repro.py").read_text())
        return VerifyResult(self.times, self.times, self.times, 1, "", "", "", 0.0)

    monkeypatch.setattr(Counted, "result", result)
    Path("snap").mkdir()
    for name in (*RESULTS, "repro_inputs.pt", "repro_module.py", "mine.txt"):
        Path("snap", name).write_text("old")
    code, summary, err = shrink("-f")
    lines = summary["repro"]["lines"]
    assert code == 0 and f"reprokit: {lines} lines, verification has not run yet -> snap/repro.py\n" in err
    header, _, rest = seen[0].partition(f"# {NOT_VERIFIED}\n")
    assert rest and Path("snap", "repro.py").read_text() == header + rest
    assert Path("snap", "mine.txt").read_text() == "old" and not Path("snap", "repro_inputs.pt").exists()


def test_a_repro_that_cannot_be_verified_stays(shrink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def result(self: Counted) -> VerifyResult:
        raise ReprokitError("cannot start `python`", note="no memory")

    monkeypatch.setattr(Counted, "result", result)
    code, summary, err = shrink()
    assert (code, summary) == (1, {})
    assert "error: could not verify `snap/repro.py`: cannot start `python`\n" in err and err.count("error") == 1
    assert NOT_VERIFIED in Path("snap", "repro.py").read_text()
    assert {path.name for path in Path("snap").iterdir()} == {"reduction.pt", "repro.py"}


def test_the_short_summary(shrink: Any) -> None:
    _, summary, err = shrink()
    assert re.search(r"reprokit: passes with \w+ = \d+ instead of 60000\n", err)
    assert re.search(r"reprokit: torch calls +26 +2\n", err)
    log = load("snap/reduction.pt").log
    assert [row.checks for row in log] == sorted(row.checks for row in log)
    assert (log[-1].calls, log[-1].elements) == (summary["calls"], summary["elements"])


# -- going on from a result ----------------------------------------------------------------------------------------


def test_the_search_goes_on_from_a_result(shrink: Any, capsys: pytest.CaptureFixture[str]) -> None:
    whole = shrink("-o", "whole")[1]
    shrink("-o", "parts", "--max-checks", "12")
    for file in ("parts/reduction.pt", "parts"):
        assert main(["shrink", file, "--json"]) == 0
        said = capsys.readouterr()
        summary = json.loads(said.out)
        assert "earlier reduction: " in said.err
        for name in ("calls", "elements", "signature", "one_minimal", "nearest", "before"):
            assert summary[name] == whole[name]
        assert Path("parts/repro.py").read_text() == Path("whole/repro.py").read_text()
    assert main(["shrink", "parts/reduction.pt", "-q", "-o", "elsewhere", "--max-checks", "1"]) == 0
    assert Path("elsewhere/repro.py").read_text() == Path("whole/repro.py").read_text()


@pytest.mark.parametrize("damage", ["cut off", "empty", "wrong form"])
def test_a_damaged_reduction_is_left_alone(damage: str, shrink: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shrink()
    file, whole = Path("snap", "reduction.pt"), Path("snap", "reduction.pt").read_bytes()
    content = torch.load(file, weights_only=True)
    content["checks"] = "no number"
    torch.save(content, "wrong.pt")
    contents = {"cut off": whole[:500], "empty": b"", "wrong form": Path("wrong.pt").read_bytes()}
    file.write_bytes(contents[damage])
    Path("snap", "repro.py").write_text("mine")
    assert main(["shrink", "snap/reduction.pt"]) in (1, 2)
    assert capsys.readouterr().err.count("error:") == 1
    assert file.read_bytes() == contents[damage]
    assert Path("snap", "repro.py").read_text() == "mine"


def test_a_reduction_without_its_snapshot_is_left_alone(shrink: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shrink()
    other = failing.loss_scaled_twice()
    other = replace(other, tensors={value: tensor.clone() for value, tensor in other.tensors.items()})
    item = next(item for item in other.program.inputs if other.tensors[item.value].is_floating_point())
    other.tensors[item.value].view(-1)[0] += 0.25
    save(other, "snap.pt")
    before = {path.name: path.read_bytes() for path in Path("snap").iterdir()}
    assert main(["shrink", "snap"]) == 2
    assert "the snapshot it came from is not beside it" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in Path("snap").iterdir()} == before


def test_a_reduction_goes_on_with_its_own_check_only(shrink: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shrink("--check", "nonfinite", "--max-checks", "1")
    assert main(["shrink", "snap"]) == 2
    assert "`snap` was made with the check `nonfinite`" in capsys.readouterr().err
    assert main(["shrink", "snap", "-q", "--check", "nonfinite"]) == 0


# -- Ctrl-C --------------------------------------------------------------------------------------------------------

RUN = """
import os, signal, sys
from collections import Counter
from reprokit.cli import main
from reprokit.render import verify
from reprokit.shrink import View

moment, times = sys.argv[1], int(sys.argv[2])
seen = Counter()

def press():
    for left in reversed(range(times)):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            if not left:
                raise

def show(self, line):
    seen.update(part for part in moment.split(";") if part in line)
    if any(part in line and seen[part] == 1 for part in moment.split(";")):
        press()

View.say = View.show = show
verify.CleanProcesses.open = lambda self: None  # what they would say
verify.CleanProcesses.begin_file = lambda self, script, times: verify.Verification(self, 0, script, times, 1.0)
verify.CleanProcesses.runs = lambda self, *job: [verify.CleanRun(1, "", "")]
judge = verify._judge
if moment == "judging":
    verify._judge = lambda *words: press() or judge(*words)
if moment == "placing":
    replace = os.replace
    def slow(source, target):
        replace(source, target)
        if os.path.basename(target) == "issue.md":
            press()
    os.replace = slow
sys.exit(main(["shrink", "snap.pt", "-q"]))
"""


def interrupted(moment: str, times: int = 1) -> subprocess.CompletedProcess[str]:
    """``reprokit shrink`` in a process of its own that gets SIGINT at a moment of its work."""
    return run_python_in(Path.cwd(), "-c", RUN, moment, str(times))


def assert_whole(folder: Path, names: set[str]) -> None:
    """The folder holds these files, perhaps the context, and nothing unfinished."""
    assert {path.name for path in folder.iterdir()} - {"repro_module.py"} == names
    if "reduction.pt" in names:
        assert load(folder / "reduction.pt").program.num_calls >= 1
    if "repro.py" in names:
        text = (folder / "repro.py").read_text()
        compile(text, "repro.py", "exec")
        assert (NOT_VERIFIED in text) == ("issue.md" not in names)
    if "report.html" in names:
        assert (folder / "report.html").read_text().rstrip().endswith("</html>")


KILLED = """
import os, signal, sys
from reprokit.cli import main
name, *words = sys.argv[1:]
replace = os.replace
def last(source, target):
    if os.path.basename(target) == name:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = last
sys.exit(main(words))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("snap/reduction.pt", ["shrink", "snap.pt", "-f", "-q", "--no-whatif"]),
        ("snap/issue.md", ["shrink", "snap.pt", "-f", "-q", "--no-whatif"]),
        ("x.md", ["render", "snap.pt", "--as", "issue", "-o", "x.md"]),
    ],
)
def test_a_killed_run_leaves_no_half_file(target: str, words: list[str], snapshot: Path) -> None:
    """SIGKILL right before a file is put in place: it is not there, and what is unfinished goes with the next run."""
    save(failing.masked_softmax(), snapshot)
    killed = run_python_in(Path.cwd(), "-c", KILLED, Path(target).name, *words)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = Path(target).parent
    assert not Path(target).exists() and list(folder.glob(".*"))
    for script in folder.glob("repro*.py"):
        compile(script.read_text(), script.name, "exec")
    if Path("snap", "reduction.pt").exists():
        assert load(Path("snap", "reduction.pt")).program.num_calls >= 1
    again = run_python_in(Path.cwd(), "-m", "reprokit", *words)
    assert (again.returncode, list(folder.glob(".*"))) == (0, []), again.stderr
    assert Path(target).exists()


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limits")
@pytest.mark.parametrize(("size", "left"), [(500, set()), (5_000, {"reduction.pt", "repro.py"})])
def test_a_limit_on_the_size_of_files(size: int, left: set[str], snapshot: Path, shrink: Any) -> None:
    """One line, a documented exit code, and files that are whole or not there."""
    import resource

    save(failing.masked_softmax(), snapshot)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        code, _, errors = shrink("--no-whatif", "-q")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert (code, errors.splitlines()[0]) == (1, "reprokit: error: the system refuses: file too large")
    assert Path("snap").is_dir() == bool(left)
    if left:
        assert_whole(Path("snap"), left)


def test_a_render_is_whole_or_not_there(snapshot: Path) -> None:
    save(failing.zero_by_zero(), snapshot)
    Path("x.py").write_text("old")
    with mock.patch.object(files.os, "fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        for name in ("x.py", "y.py"):
            assert main(["render", "snap.pt", "-f", "-o", name]) == 1
    assert Path("x.py").read_text() == "old" and not list(Path().glob("*y.py*"))
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDWR)
    files.write_text(Path("pipe"), "text")
    assert os.read(reader, 10) == b"text" and Path("pipe").is_fifo()
    os.close(reader)


def test_interrupted_before_anything_was_found(snapshot: Path) -> None:
    done = interrupted("check 1:")
    assert done.returncode == 130
    assert done.stderr == "reprokit: error: interrupted before anything smaller was found\n"
    assert not Path("snap").exists()


@pytest.mark.parametrize("moment", ["check 30:", "variant 2:"])
def test_interrupted_with_something_found(moment: str, snapshot: Path) -> None:
    done = interrupted(moment)
    assert done.returncode == 130
    line = (
        r"reprokit: error: interrupted; the best so far \(\d+ calls, \d+ elements\) is in `snap`\n"
        r"hint: `reprokit shrink snap/reduction.pt` goes on from there\n"
    )
    assert re.fullmatch(line, done.stderr), done.stderr
    assert_whole(Path("snap"), RESULTS)
    assert main(["shrink", "snap/reduction.pt", "-q"]) == 0
    found = load("snap/reduction.pt")
    assert found.one_minimal and found.program.num_calls == 2


@pytest.mark.parametrize(
    ("moment", "left"), [("judging", {"reduction.pt", "repro.py"}), ("placing", RESULTS - {"report.html"})]
)
def test_interrupted_while_the_results_are_written(moment: str, left: set[str], snapshot: Path) -> None:
    done = interrupted(moment)
    assert done.returncode == 130 and done.stderr.count("\n") == 2
    assert_whole(Path("snap"), left - ({"test_repro.py"} if moment == "placing" else set()))
    assert main(["shrink", "snap", "-q"]) == 0
    assert_whole(Path("snap"), RESULTS)


@pytest.mark.parametrize(("moment", "times"), [("check 30:;writing the best", 1), ("judging", 2)])
def test_a_second_interrupt_ends_it(moment: str, times: int, snapshot: Path) -> None:
    done = interrupted(moment, times)
    assert done.returncode == 130
    assert done.stderr.startswith("reprokit: error: interrupted") and "Traceback" not in done.stderr
    names = {path.name for path in Path("snap").iterdir()}
    assert_whole(Path("snap"), names & RESULTS)


LOAD = """
import sys
from reprokit.cli import main

class Bell:
    def find_spec(self, name, *words):
        if name == "torch":
            print("loading", flush=True)

sys.meta_path.insert(0, Bell())
sys.exit(main(["shrink", "snap.pt"]))
"""


def test_interrupted_while_torch_is_loaded(snapshot: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", LOAD]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "reprokit: error: interrupted\n")


WAIT = """
import sys, time
from reprokit.cli import main, shrink
from reprokit.render import verify

verify.CleanProcesses.open = lambda self: None
verify.CleanProcesses.begin_file = lambda self, script, times: verify.Verification(self, 0, script, times, 1.0)
verify.CleanProcesses.runs = lambda self, *job: [verify.CleanRun(1, "", "")]
show = shrink.LiveView.show
def wait(self, line):
    show(self, line)
    if "check 30:" in line:
        time.sleep(60)
shrink.LiveView.show = wait
shrink._SECONDS_BETWEEN_FRAMES = 0
sys.exit(main(["shrink", "snap.pt", "--max-checks", "60"]))
"""


def test_the_key_pressed_in_a_terminal(snapshot: Path) -> None:
    terminal, end = os.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen([sys.executable, "-c", WAIT], env=environment, preexec_fn=lambda: os.login_tty(end))
    os.close(end)
    shown = b""
    try:
        while b"check 30:" not in shown:
            shown += os.read(terminal, 4096)
        os.write(terminal, b"\x03")
        with contextlib.suppress(OSError):  # the terminal has gone with the process
            while piece := os.read(terminal, 4096):
                shown += piece
    finally:
        os.close(terminal)
    assert process.wait(timeout=120) == 130
    text = shown.decode()
    assert "start: 26 calls" in text and "round 1, " in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "reprokit: error: interrupted; the best so far (" in text.rstrip().splitlines()[-2]
    assert_whole(Path("snap"), RESULTS)


def test_ignored_interrupts_stay_ignored(snapshot: Path) -> None:
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + RUN
    done = run_python_in(Path.cwd(), "-c", ignoring, "check 3:", "2")
    assert done.returncode == 0, done.stderr
    assert_whole(Path("snap"), RESULTS)
