"""The command line as a whole: help, errors in one line with a hint, exit codes, settings."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from reprokit.cli import main
from reprokit.cli.app import app
from reprokit.cli.capture import Capture, UserScript
from tests.conftest import Run, run_python_in

NAN_SCRIPT = """\
import torch

torch.manual_seed(0)
weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(5):
    scale = torch.tensor(0.0 if step == 3 else 1.0)
    loss = (weight / scale * scale).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step)
"""


SECRETS = {"argument": "abcdef1234567890", "variable": "hf_" + "a1" * 15}


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder with a snapshot of the script's failure, and what the command said."""
    folder = tmp_path_factory.mktemp("captured")
    (folder / "train.py").write_text(NAN_SCRIPT)
    words = ("capture", "--json", "train.py", "--api-key", SECRETS["argument"])
    return folder, run_python_in(folder, "-m", "reprokit", *words, HF_TOKEN=SECRETS["variable"])


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``reprokit *words`` in the test's own folder, in this process, which has loaded torch."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        code = main(words)
        said = capsys.readouterr()
        return subprocess.CompletedProcess(words, code, said.out, said.err)

    return run


def assert_one_error(result: subprocess.CompletedProcess[str], text: str, exit_code: int = 2) -> None:
    """One line of error, one of hint, nothing else but notes."""
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("reprokit: watching ", "note: "))]
    assert result.returncode == exit_code, result.stderr
    assert len(lines) == 2, result.stderr
    assert lines[0].startswith("reprokit: error: ")
    assert text in lines[0]
    assert lines[1].startswith("hint: ")
    assert result.stdout == ""


def test_help_and_version_without_torch(start_python: Run) -> None:
    asked = [["--help"], ["-h"], ["--version"], *([command, "-h"] for command in app.commands)]
    lines = (
        "import sys",
        "from reprokit.cli import main",
        f"assert [main(words) for words in {asked}] == [0] * {len(asked)}",
        "assert 'torch' not in sys.modules",
    )
    result = start_python("-c", "\n".join(lines))
    assert result.returncode == 0, result.stderr
    assert all(f"reprokit {command}" in result.stdout for command in app.commands)


@pytest.mark.parametrize(
    ("words", "text", "hint"),
    [
        ("", "missing command", "reprokit --help"),
        ("shrunk", "no such command `shrunk`", "reprokit --help"),
        ("--watch", "no such option", "see `reprokit --help`"),
        ("capture", "no script given", "capture train.py"),
        ("capture -m", "no module given", ""),
        ("capture --watch", "requires an argument", "see `reprokit capture --help`"),
        ("capture --after-capture explode x.py", "invalid value", ""),
        ("capture --history 50% x.py", "`50%` is no number above 0, nor auto or off", ""),
        ("capture --colour x.py", "no such option", ""),
        ("capture nowhere.py", "`nowhere.py` does not exist", ""),
        ("capture .", "`.` is a folder", "-m"),
        ("capture -m no_such_module_here", "no module named `no_such_module_here`", ""),
        ("capture -m .relative", "no module named `.relative`", ""),
        ("capture -m train.py", "no module named `train.py`", "leave out `-m`"),
        ("capture torchrun --nproc 2 train.py", "is a command, not a script", "-m reprokit capture train.py [ARGS]"),
        ("capture x.pt", "`x.pt` is an archive, not a script", "reprokit show"),
        ("capture -o nowhere/out.pt train.py", "does not exist", "create it"),
        ("capture -o train.py/out.pt train.py", "is not a folder", "-o"),
        ("capture -o . train.py", "is a folder", ""),
        ("show", "missing argument", ""),
        ("show train-step4.repro.pt", "does not exist", "there is train-step3.repro.pt"),
        ("show x.pt", "is a reduction, not a snapshot", ""),
        ("shrink x.pt", "is a reduction, not a snapshot", ""),
        ("render results/repro.py", "was not written by reprokit", "give the folder that it is in: results"),
        ("verify nowhere.py", "`nowhere.py` does not exist", ""),
        ("verify --times 0 x.py", "invalid value", ""),
    ],
)
def test_what_cannot_work_is_said_in_one_line(words: str, text: str, hint: str, run_here: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise RuntimeError('it ran')\n")
    (tmp_path / "train-step3.repro.pt").touch()
    (tmp_path / "results").mkdir()
    for name in ("reduction.pt", "repro.py"):
        (tmp_path / "results" / name).write_text("pass")
    torch.save({"format": "reprokit", "kind": "reduction", "version": 1}, tmp_path / "x.pt")
    result = run_here(*words.split())
    assert_one_error(result, text)
    assert hint in result.stderr.partition("hint: ")[2]


def test_an_output_that_exists(run_reprokit: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')\n")
    (tmp_path / "out.pt").write_text("precious")
    assert_one_error(run_reprokit("capture", "-o", "out.pt", "script.py"), "exists already")
    assert (tmp_path / "out.pt").read_text() == "precious"
    assert run_reprokit("capture", "-f", "-o", "out.pt", "script.py").stdout == "ran\n"
    assert (tmp_path / "out.pt").read_text() == "precious"


def test_a_syntax_error_is_shown_as_python_shows_it(run_reprokit: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("if True\n    print(1)\n")
    result = run_reprokit("capture", "-q", "script.py")
    assert result.returncode == 1
    assert result.stderr.endswith("SyntaxError: expected ':'\n")
    assert "reprokit" not in result.stderr


def test_a_failure_is_captured(captured: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, result = captured
    assert result.returncode == 3, result.stderr
    *printed, summary = result.stdout.splitlines()
    assert printed == ["0", "1", "2"]
    assert json.loads(summary)["path"] == str(folder / "train-step3.repro.pt")
    first, found, told, place, losses, cause, following = result.stderr.splitlines()
    assert found == "reprokit: the loss is nan at step 3; replaying the step"
    assert first == "reprokit: watching `train.py`; a failing step goes to train-step<N>.repro.pt"
    assert told.startswith("reprokit: captured ")
    assert told.endswith(" -> train-step3.repro.pt")
    assert place == "reprokit:   train.py:8: loss = (weight / scale * scale).sum()"
    assert losses == "reprokit:   loss  3  2.7  2.4  nan"
    assert "of step 2 in its place the same 4 steps stay finite" in cause
    assert following == "reprokit: next: reprokit shrink train-step3.repro.pt"


def test_secrets_of_the_command_line_stay_out_of_the_file(
    captured: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    content = (captured[0] / "train-step3.repro.pt").read_bytes()
    assert b"--api-key" in content
    assert not any(secret.encode() in content for secret in SECRETS.values())


def test_the_path_is_the_last_thing_said_and_automatic_names_never_overwrite(run_reprokit: Run, tmp_path: Path) -> None:
    ending = "import atexit, os, sys\natexit.register(lambda: print('bye', file=sys.stderr))\n"
    (tmp_path / "train.py").write_text(ending + NAN_SCRIPT + "os.chdir('/')\n")
    (tmp_path / "train-step3.repro.pt").write_text("precious")
    result = run_reprokit("capture", "train.py")
    first, found, bye, *told = [line.split(":")[0] for line in result.stderr.splitlines()]
    assert (first, found, bye, set(told)) == ("reprokit", "reprokit", "bye", {"reprokit"})
    assert (tmp_path / "train-step3.repro.pt").read_text() == "precious"
    assert (tmp_path / "train-step3-1.repro.pt").is_file()


def test_going_on_after_a_capture(run_reprokit: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NAN_SCRIPT + "import sys; sys.exit(6)\n")
    result = run_reprokit("capture", "--after-capture", "continue", "train.py")
    assert result.returncode == 6, result.stderr
    assert result.stdout.split() == ["0", "1", "2", "3", "4"]
    assert (tmp_path / "train-step3.repro.pt").is_file()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Capture]:
    """The captures that command lines ask for, in a folder of the test's own; none is executed."""
    plans: list[Capture] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Capture, "__call__", lambda plan: plans.append(plan) or 0)
    return plans


def test_each_rank_has_its_own_file(planned: list[Capture], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for output, file in ((None, None), ("x.repro.pt", "x.rank1.repro.pt"), ("x.pt", "x.rank1.pt")):
        assert main(["capture", *(["-o", output] if output else []), "-m", "package.train"]) == 0
        plan = planned.pop()
        assert (plan.file(plan.output), plan.script.stem) == (Path.cwd() / file if file else None, "train")


def test_show(captured: tuple[Path, subprocess.CompletedProcess[str]], run_here: Run) -> None:
    path = str(captured[0] / "train-step3.repro.pt")
    shown = run_here("show", path)
    assert shown.returncode == 0
    assert shown.stdout == ""
    assert "train.py:8" in shown.stderr
    assert shown.stderr.rstrip().endswith(f"next: reprokit shrink {path}")
    assert run_here("show", str(captured[0])).stderr == shown.stderr  # the only one in the folder
    as_json = run_here("show", "--json", path)
    assert as_json.stderr == ""
    summary = json.loads(as_json.stdout)
    assert summary["schema"] == 1
    assert summary["failure"]["step"] == 3
    assert summary["failure"]["site"]["file"] == "train.py"
    assert set(summary) >= {"failure", "fidelity", "program", "environment", "git", "rng", "timeline"}
    assert "PyTorch version" not in shown.stderr
    assert "PyTorch version" in run_here("show", "-v", path).stderr


def newer(folder: Path) -> None:
    torch.save({"format": "reprokit", "kind": "snapshot", "version": 99}, folder / "x.pt")


def damaged(folder: Path) -> None:
    torch.save({"format": "reprokit", "kind": "snapshot", "version": 1}, folder / "x.pt")


READERS = ["show", "shrink", "render", "whatif", "verify"]
# What is wrong: how it comes to be, what is given, what is said, and the exit code of every command.
MISTAKES: dict[str, tuple[Callable[[Path], object], str, str, int]] = {
    "missing": (lambda folder: None, "x.pt", "`x.pt` does not exist", 2),
    "below a file": (lambda folder: (folder / "x").write_text(""), "x/y.pt", "`x/y.pt` does not exist", 2),
    "no name": (lambda folder: None, "x" * 300, "cannot read", 2),
    "device": (lambda folder: None, os.devnull, "is not a file", 2),
    "folder": (lambda folder: (folder / "x").mkdir(), "x", "folder", 2),
    "text": (lambda folder: (folder / "x.pt").write_text("text"), "x.pt", "was not written by reprokit", 2),
    "checkpoint": (lambda folder: torch.save([], folder / "x.pt"), "x.pt", "was not written by reprokit", 2),
    "pickle": (lambda folder: torch.save(print, folder / "x.pt"), "x.pt", "holds more than plain data", 2),
    "empty": (lambda folder: (folder / "x.pt").touch(), "x.pt", "is empty", 1),
    "cut": (lambda folder: (folder / "x.pt").write_bytes(b"PK\x03\x04" + bytes(100)), "x.pt", "is cut off", 1),
    "newer": (newer, "x.pt", "has format version 99", 1),
    "damaged": (damaged, "x.pt", "is damaged", 1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_mistake_has_one_answer_in_every_command(mistake: str, run_here: Run, tmp_path: Path) -> None:
    make, given, text, exit_code = MISTAKES[mistake]
    make(tmp_path)
    before = sorted(tmp_path.iterdir())
    for command in READERS:
        assert_one_error(run_here(command, given), text, exit_code)
    assert sorted(tmp_path.iterdir()) == before


def test_the_hint_for_a_folder_names_the_snapshots_in_it(run_here: Run, tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"train-step{number}.repro.pt").touch()
    shown = ", ".join(f"train-step{number}.repro.pt" for number in range(5))
    for command in READERS:
        hint = run_here(command, ".").stderr.splitlines()[1]
        assert hint == f"hint: name a snapshot in it: {shown} and 2 more"
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "reduction.pt").touch()
    assert "beside it there are train-step0.repro.pt" in run_here("timeline", "results").stderr.splitlines()[1]


@pytest.mark.parametrize(
    ("output", "text"), [("x" * 300, "cannot write"), ("results", "the folder `results` is not empty")]
)
def test_a_place_that_shrink_cannot_write_to(
    output: str, text: str, captured: tuple[Path, subprocess.CompletedProcess[str]], run_here: Run, tmp_path: Path
) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "precious.txt").write_text("")
    assert_one_error(run_here("shrink", str(captured[0] / "train-step3.repro.pt"), "-o", output), text)


def test_a_reduction_that_failed_leaves_no_empty_folder(
    captured: tuple[Path, subprocess.CompletedProcess[str]], run_here: Run, tmp_path: Path
) -> None:
    words = ("shrink", str(captured[0] / "train-step3.repro.pt"), "--check", "exception", "-q", "-o")
    assert run_here(*words, "made").returncode == 4
    assert not (tmp_path / "made").exists()
    (tmp_path / "there").mkdir()
    assert run_here(*words, "there").returncode == 4
    assert (tmp_path / "there").is_dir()


def test_a_disk_that_is_full(
    captured: tuple[Path, subprocess.CompletedProcess[str]], run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    path = str(captured[0] / "train-step3.repro.pt")
    result = run_here("render", path, "-o", "x.py")
    assert_one_error(result, "the system refuses: no space left on device", exit_code=1)
    assert result.stderr.splitlines()[2] == "note: it was about `x.py`"


def test_a_memory_that_is_full(
    captured: tuple[Path, subprocess.CompletedProcess[str]], run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(captured[0] / "train-step3.repro.pt")
    for allocate in (lambda _: torch.empty(2**50), lambda _: bytearray(2**60)):
        monkeypatch.setattr(os, "fsync", allocate)
        result = run_here("render", path, "-o", "x.py")
        assert_one_error(result, "not enough memory for this step", exit_code=1)


def test_verify_takes_the_repro_in_a_folder(run_here: Run, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "repro.py").write_text("print('out'); assert False, 'bad'")
    result = run_here("verify", "x", "--times", "2", "--json")
    assert result.returncode == 0
    said = json.loads(result.stdout)
    assert (said["failed"], said["output"], said["signature"]) == (2, "out\n", "exit code 1: AssertionError: bad")
    (tmp_path / "x" / "repro.py").unlink()
    assert_one_error(run_here("verify", "x"), "`x` is a folder, not a repro")


@pytest.mark.parametrize(
    ("error", "exit_code", "last"),
    [(ZeroDivisionError(), 1, "reprokit: this is an error in reprokit"), (KeyboardInterrupt(), 130, "reprokit: error")],
)
def test_what_stops_our_own_work(
    error: BaseException, exit_code: int, last: str, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, **options: object) -> NoReturn:
        raise error

    monkeypatch.setattr("reprokit.cli.console.check_file", fail)
    result = run_here("render", "x.pt", "-o", "y")
    assert result.returncode == exit_code and result.stderr.splitlines()[-1].startswith(last)
    assert ("Traceback" in result.stderr) == (exit_code == 1)


def test_settings_file_environment_and_command_line(
    planned: list[Capture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.reprokit.capture]\nafter-capture = "continue"\noutput = "file.pt"\n'
    )
    main(["capture", "train.py"])
    monkeypatch.setenv("REPROKIT_CAPTURE_OUTPUT", "variable.pt")
    main(["capture", "train.py"])
    main(["capture", "--after-capture", "stop", "-o", "line.pt", "train.py"])
    assert [(plan.output and plan.output.name, plan.options["after"]) for plan in planned] == [
        ("file.pt", "continue"), ("variable.pt", "continue"), ("line.pt", "stop"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "verbosity"), [("quiet = true", "quiet"), ("verbose = true", "verbose"), ("quiet = false", "normal")]
)
def test_switches_and_lists_are_settings_too(
    setting: str, verbosity: str, planned: list[Capture], tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[tool.reprokit.capture]\non = ["spike", "dead"]\n{setting}\n')
    assert main(["capture", "train.py"]) == 0
    assert (planned[0].verbosity.value, planned[0].options["on"]) == (verbosity, ("spike", "dead"))


def test_short_flags_together(planned: list[Capture]) -> None:
    assert main(["capture", "-qm", "package.train", "-v"]) == 0
    assert planned[0].script == UserScript("package.train", True, ("-v",)) and planned[0].verbosity.value == "quiet"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[tool.reprokit.capture]\ncolour = 1\n", "sets `colour`"),
        ("[tool.reprokit.shoot]\nx = 1\n", "settings for `shoot`"),
    ],
)
def test_settings_that_mean_nothing(text: str, complaint: str, run_here: Run, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert_one_error(run_here("show", "x.pt"), complaint)


@pytest.mark.parametrize("text", ["[tool.other]\n", "not toml at all [", "[tool]\nreprokit = 3\n"])
def test_a_project_file_of_others_is_none_of_our_business(text: str, planned: list[Capture], tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert main(["capture", "script.py"]) == 0 and planned
