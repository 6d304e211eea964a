"""Views, budgets, Ctrl-C and resuming, with real snapshots; Ctrl-C and second Ctrl-C with real processes."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console

from reprokit.cli import main
from reprokit.cli.console import Verbosity
from reprokit.cli.interrupts import STAGING
from reprokit.cli.outputs import begin_anew
from reprokit.cli.views import LiveView, PlainView, ShrinkProgress, draw, open_view
from reprokit.errors import ReprokitError
from reprokit.render.script import NOT_VERIFIED
from reprokit.render.verify import CleanProcesses, Verification, VerifyResult
from reprokit.shrink.events import (
    Checked,
    ContextChecked,
    ContextStarted,
    Event,
    Finished,
    Improved,
    PassEnded,
    PassStarted,
    Replayed,
    Started,
    Writing,
    as_plain,
)
from reprokit.shrink.reduction import load
from reprokit.snapshot import files
from reprokit.snapshot.format import save
from tests.conftest import ROOT, run_python_in
from tests.shrink import failing

begin = CleanProcesses.begin
RESULTS = {"issue.md", "reduction.pt", "report.html", "repro.py", "test_repro.py"}
EVENTS: list[Event] = [
    Started(70, 41_230, 60.0, 100),
    Replayed(5, 5),
    PassStarted("cut", 0, 70, 41_230),
    Checked(1, 1, 12, "same", "only 1 of 70 calls"),
    Improved(1, 12, "only 1 of 70 calls"),
    PassEnded("cut", 0, 1, 1, 1, 12),
    PassStarted("sizes", 1, 1, 12),
    Checked(2, 1, 1, "passes", "all sizes 1"),
    PassEnded("sizes", 1, 1, 0, 1, 12),
]


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


# -- views ---------------------------------------------------------------------------------------------------------


def test_progress_adds_up() -> None:
    progress = ShrinkProgress()
    for event in EVENTS:
        progress.take(event)
    assert (progress.calls, progress.calls_before) == (1, 70)
    assert (progress.elements, progress.elements_before) == (12, 41_230)
    assert (progress.checks, dict(progress.verdicts)) == (2, {"same": 1, "passes": 1})
    assert progress.activity == "round 1, sizes"
    assert progress.spent(30.0) == 0.5  # of the time, which is more than 2 of 100 checks
    assert progress.spent(90.0) == 1.0


def test_the_live_view_shows_what_is_left() -> None:
    progress = ShrinkProgress()
    for event in EVENTS:
        progress.take(event)
    console = Console(file=io.StringIO(), width=100)
    console.print(draw(progress, 75.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in (
        "1 of 70",
        "12 of 41,230",
        "2 (1 with the same failure, 1 without a failure)",
        "round 1, sizes",
        "1:15",
        "budget",
        "100%",
    ):
        assert words in text


def test_the_live_view_gives_the_terminal_back() -> None:
    file = io.StringIO()
    view = LiveView(Console(file=file, force_terminal=True, width=100))
    for event in EVENTS:
        view.show(event)
    view.close()
    assert "12 of 41,230" in file.getvalue()
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


def test_the_plain_view_says_what_changed(capsys: pytest.CaptureFixture[str]) -> None:
    for event in EVENTS:
        PlainView(is_verbose=False).show(event)
    assert capsys.readouterr().err.splitlines() == [
        "reprokit: start: 70 calls, 41,230 elements, at most 60 s and 100 checks",
        "reprokit: replay: 5/5 runs fail as recorded",
        "reprokit: cut: 1 of 1 check kept, 1 call, 12 elements left",
    ]
    for event in EVENTS:
        PlainView(is_verbose=True).show(event)
    assert len(capsys.readouterr().err.splitlines()) == len(EVENTS)


def test_long_work_is_reported_in_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 100, 2))
    monkeypatch.setattr("reprokit.cli.views.time.monotonic", lambda: next(clock))
    view = PlainView(is_verbose=False)
    for number in range(1, 13):
        view.show(ContextChecked(number, "same", "without a module"))
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 5
    assert lines[0] == "reprokit: context 3: without a module: same"


def test_a_context_is_announced_with_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    event = ContextStarted(20.0)
    PlainView(is_verbose=True).show(event)
    assert "context: the piece of the model that shows the failure, for 20 s at most" in capsys.readouterr().err
    progress = ShrinkProgress()
    progress.take(event)
    assert progress.activity == "context"


def test_json_lines_are_the_events(capsys: pytest.CaptureFixture[str]) -> None:
    view = open_view("json", Verbosity.QUIET)
    for event in EVENTS:
        view.show(event)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert lines == [as_plain(event) for event in EVENTS]
    assert lines[2] == {"event": "pass_started", "name": "cut", "round": 0, "calls": 70, "elements": 41_230}


def test_off_a_terminal_the_view_is_plain_and_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(open_view("auto", Verbosity.NORMAL), PlainView)
    assert isinstance(open_view("live", Verbosity.NORMAL), PlainView)
    quiet = open_view("auto", Verbosity.QUIET)
    for event in EVENTS:
        quiet.show(event)
    assert capsys.readouterr() == ("", "")


def test_progress_as_json_leaves_stdout_to_the_result(shrink: Any) -> None:
    code, summary, err = shrink("--progress", "json")
    lines = [json.loads(line) for line in err.splitlines()]
    assert code == 0 and summary["verdict"] == "reduced"
    assert [line["event"] for line in lines[:2]] == ["started", "replayed"]
    assert [line["event"] for line in lines[-2:]] == ["finished", "writing"]
    assert sum(line["event"] == "checked" for line in lines) == summary["checks"]
    assert sum(line["event"] == "varied" for line in lines) == summary["explain_checks"]


# -- budgets and the table of passes -------------------------------------------------------------------------------


@pytest.mark.usefixtures("really_verified")
def test_a_number_of_checks(shrink: Any) -> None:
    code, summary, err = shrink("--max-checks", "12")
    assert code == 0
    assert summary["checks"] == 12 and summary["stopped"] == "max-checks" and not summary["one_minimal"]
    assert summary["untried"] == [
        "calls", "modes", "setting", "sizes", "dimensions", "values", "precision", "explain",
    ]  # fmt: skip
    assert summary["repro"]["verified"] == "2/2"
    assert "stopped early by --max-checks" in err
    assert "search incomplete in: calls, modes, setting, sizes, dimensions, values, precision, explain" in err
    assert all(not item["free"] and item["tried"] is False for item in summary["explain"])


def test_a_level_that_keeps_what_could_go_does_not_say_that_it_stopped(shrink: Any) -> None:
    code, summary, err = shrink("--level", "step")
    assert code == 0 and summary["stopped"] is None and not summary["one_minimal"]
    assert "stopped early" not in err and "may shrink further" not in err


def test_the_first_repro_is_there_before_it_is_verified(shrink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def result(self: Counted) -> VerifyResult:
        seen.append(Path("snap", "repro.py").read_text())
        return VerifyResult(self.times, self.times, self.times, 1, "", "", "", 0.0)

    monkeypatch.setattr(Counted, "result", result)
    Path("snap").mkdir()
    for name in (*RESULTS, "mine.txt"):
        Path("snap", name).write_text("old")
    code, summary, err = shrink("-f")
    lines = summary["repro"]["lines"]
    assert code == 0 and f"reprokit: {lines} lines, verification has not run yet -> snap/repro.py\n" in err
    header, _, rest = seen[0].partition(f"# {NOT_VERIFIED}\n")
    assert rest and Path("snap", "repro.py").read_text() == header + rest
    assert Path("snap", "mine.txt").read_text() == "old"


def test_the_first_files_are_never_those_of_two_runs(tmp_path: Path) -> None:
    folder, finished = tmp_path / "results", tmp_path / "finished"
    for where, names in ((folder, {*RESULTS, "repro_inputs.pt", "mine.py"}), (finished, {"repro.py", "check.py"})):
        where.mkdir()
        for name in names:
            (where / name).write_text(where.name)
    begin_anew(finished, folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        **dict.fromkeys(("reduction.pt", "mine.py"), "results"),
        **dict.fromkeys(("repro.py", "check.py"), "finished"),
    }
    for name in ("repro.py", "repro_inputs.pt"):
        (finished / name).write_text("again")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: None)  # ended before the first file is in place
        begin_anew(finished, folder)
    assert not (folder / "repro.py").exists()


def test_a_repro_that_cannot_be_verified_stays(shrink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def result(self: Counted) -> VerifyResult:
        raise ReprokitError("cannot start `python`", note="no memory")

    monkeypatch.setattr(Counted, "result", result)
    code, summary, err = shrink()
    assert (code, summary) == (1, {})
    assert "error: could not verify `snap/repro.py`: cannot start `python`\n" in err and err.count("error") == 1
    assert NOT_VERIFIED in Path("snap", "repro.py").read_text()
    assert {path.name for path in Path("snap").iterdir()} == {"reduction.pt", "repro.py"}


@pytest.mark.usefixtures("really_verified")
def test_no_time_at_all_still_leaves_a_verified_result(shrink: Any) -> None:
    code, summary, err = shrink("--max-time", "1e-9")
    assert code == 0
    assert (summary["stopped"], summary["checks"]) == ("max-time", 0)
    assert summary["repro"]["verified"] == "2/2"
    assert "stopped early by --max-time" in err


def test_the_table_of_passes(shrink: Any) -> None:
    _, summary, err = shrink("-v")
    rows = {row["name"]: row for row in summary["passes"]}
    assert next(iter(rows)) == "cut" and list(rows)[-1] == "explain"
    searched = [row for name, row in rows.items() if name != "explain"]
    assert sum(row["checks"] for row in searched) == summary["checks"]
    assert rows["explain"]["checks"] == summary["explain_checks"]
    for unit in ("calls", "elements"):
        assert sum(row[unit] for row in searched) == summary["before"][unit] - summary[unit]
    assert [asdict(row) for row in load("snap/reduction.pt").passes] == summary["passes"]
    assert re.search(r"^calls +\d+ +\d+ +24 +11 +\d+\.\d\d", err, re.MULTILINE)
    html = Path("snap", "report.html").read_text()
    assert f"<tr><th>calls</th><td>{rows['calls']['checks']}</td>" in html


def test_the_short_summary(shrink: Any) -> None:
    _, _, err = shrink()
    assert "reprokit: removed by calls: 24 calls and 11 elements; sizes: 15 elements" in err
    assert re.search(r"reprokit: passes with \w+ = \d+ instead of 60000\n", err)
    assert "pass  " not in err


def test_the_elements_that_passes_take_and_add_are_all_told(snapshot: Path, shrink: Any) -> None:
    """What is left of a step may read more elements than the whole of it did."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return ((x.unsqueeze(0) - x.unsqueeze(1)) - 1).sqrt()

    save(failing.record(step, x=torch.zeros(5)), snapshot)
    _, summary, err = shrink()
    (line,) = (line for line in err.splitlines() if line.startswith("reprokit: removed by"))
    taken = [int(number) for number in re.findall(r"(?<!\()(\b\d+) elements?(?! added)", line)]
    added = [int(number) for number in re.findall(r"\((\d+) elements added\)", line)]
    assert added and 5 + sum(added) - sum(taken) == summary["elements"]


# -- resuming ------------------------------------------------------------------------------------------------------


def numbers(log: list[str]) -> list[int]:
    return [int(line.partition(":")[0]) for line in log]


def test_resuming_goes_on_with_log_counts_and_verdicts(shrink: Any) -> None:
    whole = shrink("-o", "whole")[1]
    first = shrink("-o", "parts", "--max-checks", "12")[1]
    code, second, err = shrink("-o", "parts", "--resume")
    assert code == 0 and "resumed after 12 checks" in err
    assert first["checks"] == 12
    for name in ("calls", "elements", "signature", "one_minimal", "untried", "nearest"):
        assert second[name] == whole[name]
    searched = [row for row in second["passes"] if row["name"] != "explain"]
    assert sum(row["checks"] for row in searched) == second["checks"] == sum(second["verdicts"].values())
    assert 12 < second["checks"] < 12 + whole["checks"]
    before, after = load("whole/reduction.pt").log, load("parts/reduction.pt").log
    assert before[0] == after[0] and numbers(after) == sorted(numbers(after))
    assert sum(row["successes"] for row in searched) == len(after)
    assert Path("parts/repro.py").read_text() == Path("whole/repro.py").read_text()


def test_resuming_a_finished_reduction_checks_nothing_again(shrink: Any) -> None:
    first = shrink()[1]
    second = shrink("--resume")[1]
    assert (second["checks"], second["verdicts"]) == (first["checks"], first["verdicts"])
    assert second["one_minimal"]


def of_the_wrong_form(path: Path) -> bytes:
    content = torch.load(path, weights_only=True)
    content["known"] = {"x": "no verdict"}
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.mark.parametrize("damage", ["cut off", "empty", "wrong form"])
def test_a_damaged_reduction_is_left_alone(damage: str, shrink: Any) -> None:
    shrink()
    file = Path("snap", "reduction.pt")
    contents = {"cut off": file.read_bytes()[:500], "empty": b"", "wrong form": of_the_wrong_form(file)}
    file.write_bytes(contents[damage])
    Path("snap", "repro.py").write_text("mine")
    code, _, err = shrink("--resume")
    assert code == 1
    assert err.count("error:") == 1 and "cannot resume: `snap/reduction.pt` is" in err and "hint: shrink without" in err
    assert file.read_bytes() == contents[damage]
    assert Path("snap", "repro.py").read_text() == "mine"


def test_a_reduction_of_another_snapshot_is_left_alone(shrink: Any) -> None:
    shrink()
    other = failing.loss_scaled_twice()
    other = replace(other, tensors={value: tensor.clone() for value, tensor in other.tensors.items()})
    item = next(item for item in other.program.inputs if other.tensors[item.value].is_floating_point())
    other.tensors[item.value].view(-1)[0] += 0.25
    save(other, "snap.pt")
    before = {path.name: path.read_bytes() for path in Path("snap").iterdir()}
    code, _, err = shrink("--resume")
    assert code == 2
    assert "cannot resume: `snap/reduction.pt` was made from another snapshot" in err
    assert {path.name: path.read_bytes() for path in Path("snap").iterdir()} == before


def test_a_reduction_of_an_earlier_version_loads_and_is_gone_on_from(shrink: Any) -> None:
    shrink("--max-checks", "12")
    file = Path("snap", "reduction.pt")
    content = torch.load(file, weights_only=True)
    for name in ("passes", "constants", "nearest", "explain_checks", "stopped", "untried", "origin", "known"):
        del content[name]
    torch.save(content, file)
    old = load(file)
    assert (old.passes, old.known, old.nearest) == ([], {}, None)
    code, summary, _ = shrink("--resume")
    assert code == 0 and summary["one_minimal"] and summary["calls"] == 2


def test_results_of_another_run_do_not_stay_behind(shrink: Any) -> None:
    Path("snap").mkdir()
    for name in ("repro_inputs.pt", "repro_module.py", "mine.txt"):
        Path("snap", name).write_text("old")
    assert shrink("-f")[0] == 0
    assert not Path("snap", "repro_inputs.pt").exists() and Path("snap", "mine.txt").read_text() == "old"


# -- Ctrl-C --------------------------------------------------------------------------------------------------------

RUN = """
import os, signal, sys
from collections import Counter
from reprokit.cli import main, views
from reprokit.render import verify

moment, times = sys.argv[1], int(sys.argv[2])
seen = Counter()

def press():
    for left in reversed(range(times)):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            if not left:
                raise

def show(self, event):
    name = type(event).__name__
    seen[name] += 1
    if f"{name}:{seen[name]}" in moment.split(","):
        press()

views.View.show = show
verify.CleanProcesses.open = lambda self: None  # what they would say
verify.CleanProcesses.begin_file = lambda self, script, times: verify.Verification(self, 0, script, times, 1.0)
verify.CleanProcesses.runs = lambda self, *job: [verify.CleanRun(1, "", "")]
judge = verify._judge
if moment == "verification:1":
    verify._judge = lambda *words: press() or judge(*words)
if moment == "saving:1":
    import torch
    from reprokit.shrink import reduction
    write = reduction.storable
    reduction.storable = lambda tensor: press() or write(tensor)
if moment == "placing:1":
    replace = os.replace
    def slow(source, target):
        replace(source, target)
        if str(target) == os.path.join("snap", "issue.md"):
            press()
    os.replace = slow
sys.exit(main(["shrink", "snap.pt", "--progress", "none"]))
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


def test_what_a_killed_run_leaves_goes_with_the_next_one(snapshot: Path, shrink: Any) -> None:
    save(failing.masked_softmax(), snapshot)
    for target, words in (
        (Path("snap", "reduction.pt"), ["shrink", "snap.pt", "-f", "-q", "--no-whatif", "--max-checks", "1"]),
        (Path("x.md"), ["render", "snap", "--as", "issue", "-o", "x.md"]),
    ):
        Path("snap").mkdir(exist_ok=True)
        with files.replaced(target):
            (left,) = files.unfinished(target)
        left.touch()
        target.unlink()
        Path("snap", f"{STAGING}x", "y").mkdir(parents=True)
        assert main(words) == 0
        assert not left.exists() and target.exists()
    assert [path.name for path in Path("snap").glob(".*")] == [f"{STAGING}x"], "of a shrink that may still run"


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


@pytest.mark.parametrize("moment", ["Replayed:1", "Checked:1"])
def test_interrupted_before_anything_was_found(moment: str, snapshot: Path) -> None:
    done = interrupted(moment)
    assert done.returncode == 130
    assert done.stderr == "reprokit: error: interrupted before anything smaller was found\n"
    assert not Path("snap").exists()


@pytest.mark.parametrize("moment", ["Improved:2", "Checked:30", "Varied:2"])
def test_interrupted_with_something_found(moment: str, snapshot: Path, shrink: Any) -> None:
    done = interrupted(moment)
    assert done.returncode == 130
    line = (
        r"reprokit: error: interrupted; the best so far \(\d+ calls, \d+ elements\) is in `snap`, and `--resume` .*\n"
    )
    assert re.fullmatch(line, done.stderr), done.stderr
    assert_whole(Path("snap"), RESULTS)
    code, summary, _ = shrink("--resume")
    assert code == 0 and summary["one_minimal"] and summary["calls"] == 2
    log = load("snap/reduction.pt").log
    assert numbers(log) == sorted(numbers(log))


@pytest.mark.parametrize(("moment", "left"), [("verification:1", {"reduction.pt", "repro.py"}), ("placing:1", RESULTS)])
def test_interrupted_while_the_results_are_written(moment: str, left: set[str], snapshot: Path, shrink: Any) -> None:
    done = interrupted(moment)
    assert done.returncode == 130 and done.stderr.count("\n") == 1
    assert_whole(Path("snap"), left)
    assert shrink("--resume")[0] == 0
    assert_whole(Path("snap"), RESULTS)


def test_interrupted_while_the_best_is_saved(snapshot: Path) -> None:
    done = interrupted("saving:1")
    assert done.returncode == 130 and done.stderr.count("\n") == 1
    assert {path.name for path in Path("snap").iterdir()} <= RESULTS


@pytest.mark.parametrize(
    ("moment", "times"), [("Checked:30", 2), ("Checked:30,Writing:1", 1), ("verification:1", 2), ("saving:1", 2)]
)
def test_a_second_interrupt_ends_at_once(moment: str, times: int, snapshot: Path) -> None:
    done = interrupted(moment, times)
    assert done.returncode == 130
    assert done.stderr == "reprokit: error: interrupted\n"
    names = {path.name for path in Path("snap").iterdir()}
    assert_whole(Path("snap"), names & {"reduction.pt", "repro.py"})


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
from reprokit.cli import main, views
from reprokit.render import verify

verify.CleanProcesses.open = lambda self: None
verify.CleanProcesses.begin_file = lambda self, script, times: verify.Verification(self, 0, script, times, 1.0)
verify.CleanProcesses.runs = lambda self, *job: [verify.CleanRun(1, "", "")]
show = views.LiveView.show
def wait(self, event):
    show(self, event)
    if type(event).__name__ == "Checked" and event.number == 30:
        time.sleep(60)
views.LiveView.show = wait
views._SECONDS_BETWEEN_FRAMES = 0
sys.exit(main(["shrink", "snap.pt", "--max-checks", "60"]))
"""


def test_the_key_pressed_in_a_terminal(snapshot: Path) -> None:
    terminal, end = os.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen([sys.executable, "-c", WAIT], env=environment, preexec_fn=lambda: os.login_tty(end))
    os.close(end)
    shown = b""
    try:
        while b"30 (" not in shown:
            shown += os.read(terminal, 4096)
        os.write(terminal, b"\x03")
        with contextlib.suppress(OSError):  # the terminal has gone with the process
            while piece := os.read(terminal, 4096):
                shown += piece
    finally:
        os.close(terminal)
    assert process.wait(timeout=120) == 130
    text = shown.decode()
    for words in ("calls left", "of 26", "elements left", "round 1, ", "budget"):
        assert words in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "reprokit: error: interrupted; the best so far (" in text.rstrip().splitlines()[-1]
    assert_whole(Path("snap"), RESULTS)


def test_ignored_interrupts_stay_ignored(snapshot: Path) -> None:
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + RUN
    done = run_python_in(Path.cwd(), "-c", ignoring, "Checked:3", "2")
    assert done.returncode == 0, done.stderr
    assert_whole(Path("snap"), RESULTS)


def test_a_finished_event_and_a_writing_event_read_well() -> None:
    assert str(Finished(2, 5, 11, True)) == "nothing more can go: 2 calls, 5 elements after 11 checks"
    assert str(Finished(2, 5, 11, False, "max-time")).startswith("stopped early: ")
    assert str(Finished(2, 5, 11, False)).startswith("done: ")  # at level `module` more could go, and is to stay
    assert "Ctrl-C again" in str(Writing(True))


def test_a_reduction_that_comes_to_nothing_leaves_no_folders(tmp_path: Path) -> None:
    save(failing.zero_by_zero(), tmp_path / "snap.pt")
    (tmp_path / "check.py").write_text("def never(run):\n    return False\n")
    (tmp_path / "kept").mkdir()
    words = ["shrink", str(tmp_path / "snap.pt"), "--check", f"{tmp_path / 'check.py'}:never", "--no-whatif", "-q"]
    assert main([*words, "-o", str(tmp_path / "kept" / "made" / "out")]) == 4
    assert main([*words, "-o", str(tmp_path / "kept")]) == 4
    assert (tmp_path / "kept").is_dir() and not any((tmp_path / "kept").iterdir())
