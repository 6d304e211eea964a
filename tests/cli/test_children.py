"""Processes that a script starts are watched, each with a file of its own; those of libraries are left alone."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import reprokit
from reprokit.capture.options import After
from reprokit.capture.session import Session
from reprokit.cli.capture import Capture, UserScript, run_started
from reprokit.cli.children import STARTED_IN, Children
from reprokit.cli.console import Verbosity
from reprokit.snapshot.format import load
from tests.capture.traps_checks import described_once, update
from tests.conftest import Run

WORKER = """
import torch

def train(rank, bad_rank=1):
    torch.manual_seed(rank)
    net = torch.nn.Linear(5, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for step in range(6):
        x = torch.rand(8, 5) - (2 if rank == bad_rank and step == 3 else 0)
        loss = (net(x).squeeze() - torch.log(x.sum(1))).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("rank", rank, "ends", flush=True)
    return rank

if __name__ == "__main__":
    import sys
    train(int(sys.argv[1]))
"""
STARTS = {  # forking saves the child from importing torch again
    "torch_spawn": """
    torch.multiprocessing.spawn(train, nprocs=2)
""",
    "processes": """
    children = [multiprocessing.Process(target=functools.partial(train, rank)) for rank in range(2)] + [Child()]
    for child in children:
        child.start()
        child.join()
    print([child.exitcode for child in children])
""",
    "executor": """
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        print(list(pool.map(train, [1])))
""",
    "command": """
    subprocess.Popen(args=(sys.executable, "-u", "worker.py", "1")).wait()
""",
}
HEAD = """
import concurrent.futures, functools, multiprocessing, subprocess, sys
import torch.multiprocessing
from worker import train

class Child(multiprocessing.Process):
    def run(self):
        train(0)

if __name__ == "__main__":
"""


@pytest.mark.parametrize("start", STARTS)
def test_a_child_is_watched(start: str, run_reprokit: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + STARTS[start])
    (tmp_path / "worker.py").write_text(WORKER)
    result = run_reprokit("capture", "train.py")
    assert result.returncode == 3, result.stderr
    assert "rank 1 ends" not in result.stdout
    (file,) = tmp_path.glob("*.pt")
    assert file.name.startswith(("train.pid", "worker.pid")) and file.name.endswith("-step3.repro.pt")
    *_, captured, _, _, _, following = result.stderr.splitlines()
    assert f"captured nan from `torch.log` at step 3 -> {file.name}" in captured
    assert following == f"reprokit: next: reprokit shrink {file.name}"


POOL = """
import multiprocessing
from worker import train

def healthy(rank):
    train(rank, None)

if __name__ == "__main__":
    child = multiprocessing.Process(target=healthy, args=(0,))
    child.start()
    child.join()
    with multiprocessing.Pool(1) as pool:
        print(pool.map(train, [1, 0]))
"""


def test_a_task_of_a_pool_is_saved_and_goes_on(run_reprokit: Run, tmp_path: Path) -> None:
    """A pool waits for ever for a task whose process has ended."""
    (tmp_path / "train.py").write_text(POOL)
    (tmp_path / "worker.py").write_text(WORKER)
    result = run_reprokit("capture", "train.py")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "[1, 0]")
    assert len(list(tmp_path.glob("train.pid*-step3.repro.pt"))) == len(list(tmp_path.glob("*.pt"))) == 1


def test_a_command_in_another_folder_writes_where_the_capture_was_told_to(run_reprokit: Run, tmp_path: Path) -> None:
    start = 'subprocess.Popen([sys.executable, "worker.py", "1"], cwd="inside").wait()'
    (tmp_path / "train.py").write_text(f"import os, subprocess, sys\n{start}\n")
    (tmp_path / "pyproject.toml").write_text('[tool.reprokit.capture]\noutput = "out/x.pt"\non = ["skipped"]\n')
    for folder in ("inside", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "inside" / "worker.py").write_text(WORKER)
    result = run_reprokit("capture", "train.py")
    assert result.returncode == 3, result.stderr
    (file,) = tmp_path.rglob("*.pt")
    assert file.parent.name == "out" and file.name.startswith("x.pid")
    assert load(file).command == ["worker.py", "1"]


# -- what is watched -------------------------------------------------------------------------------------------------


def children_of_nothing() -> Children:
    script = UserScript("train.py", False, ())
    return Children(Capture(script, Path.cwd(), None, False, None, False, Verbosity.QUIET, {"on": ("ranks",)}))


class Rows(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_workers_of_a_data_loader_are_left_alone() -> None:
    children, start = children_of_nothing(), BaseProcess.start
    with children.starting():
        assert [int(batch) for batch in DataLoader(Rows(), num_workers=1, multiprocessing_context="fork")] == [
            0,
            1,
            2,
            3,
        ]
    assert (children.num_watched, children.reports()) == (0, [])
    assert BaseProcess.start is start


@pytest.mark.parametrize(
    ("words", "environment", "is_watched"),
    [
        ([sys.executable, "own.py", "--lr", "1"], {}, True),
        ([sys.executable, "-u", "-Xdev", "own.py"], {}, True),
        ([sys.executable, "-m", "own"], {}, True),
        ([sys.executable, "-m", "json.tool"], {"RANK": "0"}, True),
        ([sys.executable, "-m", "json.tool"], {}, False),
        ([sys.executable, "-m", "reprokit", "capture", "own.py"], {}, False),
        ([sys.executable, "-c", "pass"], {}, False),
        ([sys.executable, "missing.py"], {}, False),
        ([sys.executable], {}, False),
        ([sys.executable, "-I", "own.py"], {}, False),
        (["git", "status"], {}, False),
        ("python own.py", {}, False),
        ([sys.executable, functools.__file__], {}, False),
    ],
)
def test_commands_that_are_watched(
    words: list[str], environment: dict[str, str], is_watched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own.py").write_text("")
    children = children_of_nothing()
    try:
        found = children.command(words, environment)
        assert (found is not None) == is_watched
        if found is not None:
            place = found.index("reprokit")
            assert found[:place] == [*words[: place - 1], "-m"]
            assert found[place + 1 : place + 3] == [STARTED_IN, str(children.folder)] and found[-1] == words[-1]
    finally:
        children.forget()


def test_a_command_runs_on_when_its_parent_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text("import sys; print(sys.argv[1:])")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("argv", "path"):
            patch.setattr(sys, name, [*getattr(sys, name)])
        patch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        assert run_started(tmp_path / "gone", [str(tmp_path / "own.py"), "1"]) == 0
    assert capsys.readouterr().out == "['1']\n"


class Terminated(torch.nn.Linear):
    """Gets a SIGTERM when its step 3 is replayed."""

    def __init__(self, runs: Iterator[int]) -> None:
        super().__init__(5, 1)
        self.runs = runs  # a number or list would be put back after the replay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if next(self.runs) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(x)


@pytest.mark.skipif(sys.platform == "win32", reason="terminating a process is no signal there")
@pytest.mark.parametrize("after", ["stop", "continue"])
def test_a_rank_that_is_terminated_while_it_saves_saves(
    after: After, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher terminates all ranks once the first one has ended."""
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    net, steps = Terminated(itertools.count()), []
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with described_once(), reprokit.capture(tmp_path / "x.pt", after=after):
        for step in range(6):
            loss = (net(torch.rand(8, 5)).squeeze() - torch.log(torch.tensor(1.0 if step != 3 else -1.0))).pow(2).mean()
            update(optimizer, loss)
            steps.append(step)
    assert load(tmp_path / "x.pt").failure.call == "torch.log"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert (raised, len(steps)) == (([], 3) if after == "stop" else ([signal.SIGTERM], 6))


def test_the_rank_is_known_when_the_step_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers such as `accelerate.debug_launcher` set the size for all processes, and the rank in each."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with described_once(), Session(directory=tmp_path, part=".pid1", after="continue"):
        monkeypatch.setenv("RANK", "1")
        torch.log(-torch.ones(1, requires_grad=True)).sum().backward()
    assert [path.name for path in tmp_path.iterdir()] == ["training.rank1-step0.repro.pt"]
