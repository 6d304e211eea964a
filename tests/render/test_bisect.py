"""The repro and the test beside it as git, pytest and CI use them: they end well exactly when the bug is gone."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reprokit.cli import main
from reprokit.locate.blame import locate
from reprokit.program.ir import Call, Input, Program, Ref
from reprokit.render.texts import render_one
from reprokit.snapshot.format import Snapshot, save
from tests.conftest import Run

pytestmark = pytest.mark.slow

# What the interpreter loads at its start: the library of the repository replaces one function of torch.
STARTUP = "import library\n"
GOOD = """\
import torch
from torch.nn import functional

builtin = functional.softmax


def softmax(x, dim=None):
    result = builtin(x, dim=dim)
    return torch.where(torch.isneginf(x).all(dim, keepdim=True), torch.zeros_like(result), result)


functional.softmax = softmax
"""
BAD = GOOD.replace("torch.where(torch.isneginf(x).all(dim, keepdim=True), torch.zeros_like(result), result)", "result")
BROKEN = GOOD.replace("builtin(x, dim=dim)", "no_longer_there")
PAGE = Path(__file__).parents[2] / "docs" / "verify.md"


def masked_row() -> Snapshot:
    """A softmax over a row of nothing but ``-inf``."""
    call = Call("torch.nn.functional.softmax", (Ref(0),), {"dim": 0}, Ref(1))
    program = Program((call,), (Input(0, "scores"),), (Ref(1),))
    tensors = {0: torch.full((2,), float("-inf"))}
    failure = locate(program, tensors)
    assert failure is not None
    return Snapshot(program, tensors, failure, 0, 0, "loss")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with the repro, the test and nothing else."""
    save(masked_row(), tmp_path / "snap.repro.pt")
    folder = tmp_path / "results"
    folder.mkdir()
    for kind, name in (("repro", "repro.py"), ("test", "test_repro.py")):
        render_one(tmp_path / "snap.repro.pt", kind, out=folder / name)
    return folder


def git(folder: Path, *words: str, **variables: str) -> str:
    """Run git without anything of this machine's configuration."""
    environment = {
        **os.environ,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        **{f"GIT_{who}_{what}": "a@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        **variables,
    }
    done = subprocess.run(["git", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_repository(folder: Path, versions: list[str]) -> list[str]:
    """Commits to a library, the names of which are returned, oldest first."""
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "sitecustomize.py").write_text(STARTUP)
    commits = []
    for number, version in enumerate(versions):
        (folder / "library.py").write_text(f"{version}VERSION = {number}\n")
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", f"version {number}")
        commits.append(git(folder, "rev-parse", "HEAD").strip())
    return commits


def bisect(repository: Path, first: str, *command: str) -> str:
    """What git says in the end."""
    git(repository, "bisect", "start", "HEAD", first)
    variables = {"PYTHONPATH": str(repository), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return git(repository, "bisect", "run", *command, **variables)


def test_git_bisect_skips_what_does_not_run(results: Path, tmp_path: Path) -> None:
    commits = make_repository(tmp_path / "repository", [GOOD, GOOD, BROKEN, GOOD, BAD])
    documented = next(line for line in PAGE.read_text().splitlines() if line.startswith("    git bisect run sh -c "))
    script = documented.partition("sh -c ")[2].strip("'")
    script = script.replace("python repro.py", shlex.join([sys.executable, str(results / "repro.py")]))
    told = bisect(tmp_path / "repository", commits[0], "sh", "-c", script)
    assert f"{commits[4]} is the first bad commit" in told and "skip" in git(tmp_path / "repository", "bisect", "log")


def test_pytest_fails_while_the_bug_is_there(results: Path, start_python: Run) -> None:
    (results / "library.py").write_text(BAD)
    (results / "conftest.py").write_text(STARTUP)
    told = start_python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(results / "test_repro.py"))
    assert told.returncode == 1 and "1 failed" in told.stdout, told.stdout


def test_verify_tells_whether_it_is_fixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, code in (("bad", "assert False"), ("good", "print('fine')")):
        (tmp_path / f"{name}.py").write_text(code)
    assert main(["verify", "--expect-fixed", "--times", "2", str(tmp_path / "bad.py")]) == 1
    *_, told, following = capsys.readouterr().err.splitlines()
    assert told == "reprokit: the failure is still there" and "reprokit retry FILE SCRIPT" in following
    assert main(["verify", "--expect-fixed", "--times", "2", str(tmp_path / "good.py")]) == 0
    assert main(["verify", "--times", "2", str(tmp_path / "bad.py")]) == 0
