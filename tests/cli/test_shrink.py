"""``reprokit shrink``: what it writes, says and returns for every way a reduction can end; budgets and Ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch

from reprokit.cli import main
from reprokit.cli.shrink import default_folder
from reprokit.errors import Flaky, ReprokitError
from reprokit.render.script import NOT_VERIFIED
from reprokit.render.verify import CleanProcesses, Verification, VerifyResult
from reprokit.shrink.reduction import load
from reprokit.snapshot import files
from reprokit.snapshot.format import save
from tests.conftest import run_python_in
from tests.shrink import failing
from tests.shrink.failing import record


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["shrink", "--resume"], "DIR/reduction.pt"),
        (["shrink", "--level", "module"], "repro_module.py"),
    ],
)
def test_a_removed_option_names_what_to_use_instead(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "x.pt"]) == 2
    error, said = capsys.readouterr().err.splitlines()
    assert error == f"reprokit: error: `{words[1]}` was removed" and hint in said


@pytest.mark.parametrize(
    ("snapshot", "folder"),
    [("train-step7.repro.pt", "train-step7"), ("/data/x.pt", "x"), ("snapshot", "snapshot.shrunk")],
)
def test_the_default_folder(snapshot: str, folder: str) -> None:
    assert default_folder(Path(snapshot)) == Path(folder)


def test_warnings_of_what_is_tried_are_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(record(lambda x: torch.std(x, 0).sum(), x=torch.ones(1, 3)), "std.pt")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert main(["shrink", "-q", "--max-checks", "5", "std.pt"]) == 0
    assert [str(item.message) for item in shown if "degrees of freedom" in str(item.message)] == []


begin = CleanProcesses.begin
RESULTS = {"issue.md", "reduction.pt", "report.html", "repro.py", "summary.md", "test_repro.py"}


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


def test_the_result_is_written_and_printed(shrink: Any) -> None:
    code, summary, err = shrink("--jobs", "2", "-v", "--source", "none")
    assert (code, summary["verdict"], summary["fidelity"]) == (0, "reduced", "exact")
    assert summary["before"]["calls"] == 26 and summary["repro"]["path"] == "snap/repro.py"
    assert {path.name for path in Path("snap").iterdir()} - {"repro_module.py"} == RESULTS
    assert ", check 1:" in err and "reprokit: 2 torch calls of 26, " in err
    assert err.splitlines()[-1] == "reprokit: next: python snap/repro.py"
    log = load("snap/reduction.pt").log
    assert [row.checks for row in log] == sorted(row.checks for row in log)
    assert (log[-1].calls, log[-1].elements) == (summary["calls"], summary["elements"])


def test_quiet(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shrink", "-q", "--fast", "--max-checks", "2", str(snapshot)]) == 0
    assert capsys.readouterr() == ("", "")


def test_what_does_not_fail_or_fails_too_seldom(shrink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, summary, err = shrink("--check", "exception")
    assert (code, summary["verdict"]) == (4, "not_reproduced") and "\nhint: " in err

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise Flaky("it failed in 2 of 5 runs", hint="set a seed", note="2/5")

    monkeypatch.setattr("reprokit.workflow.shrink", fail)
    code, summary, err = shrink()
    assert (code, summary["verdict"], summary["note"]) == (5, "flaky", "2/5") and "\nhint: set a seed\n" in err


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


def test_fast_writes_the_minimum_and_the_summary(shrink: Any) -> None:
    code, summary, err = shrink("--fast")
    assert (code, summary["calls"], summary["context"]) == (0, 2, None)
    assert {path.name for path in Path("snap").iterdir()} == {"reduction.pt", "repro.py", "summary.md"}
    lines = Path("snap", "summary.md").read_text().splitlines()
    assert 5 <= len(lines) <= 15 and lines[0].startswith("# ") and "to read: snap/summary.md" in err


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


@pytest.mark.parametrize("damage", ["cut off", "wrong form"])
def test_a_damaged_reduction_is_left_alone(damage: str, shrink: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shrink()
    file, whole = Path("snap", "reduction.pt"), Path("snap", "reduction.pt").read_bytes()
    content = torch.load(file, weights_only=True)
    content["checks"] = "no number"
    torch.save(content, "wrong.pt")
    contents = {"cut off": whole[:500], "wrong form": Path("wrong.pt").read_bytes()}
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
from reprokit.cli import main
from reprokit.render import verify
from reprokit.shrink import View

moment, pressed = sys.argv[1], []

def press():
    if not pressed:
        pressed.append(moment)
        os.kill(os.getpid(), signal.SIGINT)

View.say = View.show = lambda self, line: press() if moment in line else None
verify.CleanProcesses.open = lambda self: None  # what they would say
verify.CleanProcesses.begin_file = lambda self, script, times: verify.Verification(self, 0, script, times, 1.0)
verify.CleanProcesses.runs = lambda self, *job: [verify.CleanRun(1, "", "")]
judge = verify._judge
verify._judge = lambda *words: (moment == "judging" and press()) or judge(*words)
sys.exit(main(["shrink", "snap.pt", "-q"]))
"""


def interrupted(moment: str) -> subprocess.CompletedProcess[str]:
    """``reprokit shrink`` in a process of its own that gets SIGINT at a moment of its work."""
    return run_python_in(Path.cwd(), "-c", RUN, moment)


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


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limits")
def test_a_limit_on_the_size_of_files(snapshot: Path, shrink: Any) -> None:
    """One line, a documented exit code, and files that are whole or not there."""
    import resource

    save(failing.masked_softmax(), snapshot)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    try:
        code, _, errors = shrink("--no-whatif", "-q")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert (code, errors.splitlines()[0]) == (1, "reprokit: error: the system refuses: file too large")
    assert_whole(Path("snap"), {"reduction.pt", "repro.py"})


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


def test_interrupted_with_something_found(snapshot: Path) -> None:
    done = interrupted("check 30:")
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


def test_interrupted_while_the_results_are_written(snapshot: Path) -> None:
    done = interrupted("judging")
    assert done.returncode == 130 and done.stderr.count("\n") == 2
    assert_whole(Path("snap"), {"reduction.pt", "repro.py"})
    assert main(["shrink", "snap", "-q"]) == 0
    assert_whole(Path("snap"), RESULTS)
