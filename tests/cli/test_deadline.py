"""A step that computes for hours ends with a line by a limit, or by Ctrl-C, although a kernel hears of neither."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import reprokit.cli.shrink
import reprokit.cli.whatif
from reprokit.cli.app import main
from reprokit.program.ir import Call, Program, Ref
from reprokit.snapshot.format import save
from tests.render.programs import masked_softmax, snapshot_of

COMMANDS = {
    "show": ["show", "--max-time", "0.5"],
    "verify": ["verify", "--max-time", "0.5"],
    "render": ["render", "--max-time", "0.5"],
    "issue": ["render", "--as", "issue", "--max-time", "0.5"],
    "whatif": ["whatif", "--max-time", "0.1"],
    "shrink": ["shrink", "--max-time", "0.1"],
}


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A snapshot whose step begins with a call that takes minutes, and whose result the failure depends on."""
    snapshot = snapshot_of(masked_softmax())
    ones = Call("torch.ones", (3000, 3000), {}, Ref(7))
    matrix = ones, Call("torch.linalg.matrix_power", (Ref(7), 2**40), {}, Ref(8))
    given = Ref(snapshot.program.inputs[0].value)
    used = Call("torch.sum", (Ref(8),), {}, Ref(9)), Call("torch.Tensor.add_", (given, Ref(9)), {}, given)
    program: Program = replace(snapshot.program, calls=(*matrix, *used, *snapshot.program.calls))
    failure = replace(snapshot.failure, call_index=4)
    save(replace(snapshot, program=program, failure=failure), tmp_path / "x.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reprokit.cli.shrink, "FIRST_SECONDS", 0.5)
    monkeypatch.setattr(reprokit.cli.whatif, "SECONDS_FOR_ALL", 0.5)
    return tmp_path / "x.pt"


def run(words: list[str], said: Path, meanwhile: Callable[[int], None] = lambda pid: None) -> tuple[int, str, float]:
    """Exit code, output and CPU seconds of a command in a forked child."""
    pid = os.fork()
    if pid == 0:
        file = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 2)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        os._exit(main(words))
    meanwhile(pid)
    _, status, used = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), said.read_text(), used.ru_utime + used.ru_stime


def wait_for_seconds(pid: int, seconds: float) -> None:
    """Wait until a process has computed for so long, however busy the machine is, or has ended."""
    used, state = 0.0, ""
    while used < seconds and state != "Z":
        time.sleep(0.02)
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used = (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs commands in forked children")
@pytest.mark.parametrize("name", COMMANDS)
def test_it_ends_with_a_line(name: str, endless: Path, tmp_path: Path) -> None:
    command, *options = COMMANDS[name]
    code, said, seconds = run([command, str(endless), *options], tmp_path / "said")
    assert code == 1 and seconds < 20
    line = r"reprokit: error: the step takes over [\d.]+ s to run\nhint: --max-time [\d.]+ waits longer"
    assert re.search(line, said)
    assert "Traceback" not in said


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="asks /proc how long the command has computed")
@pytest.mark.parametrize(("command", "times"), [("render", 1), ("render", 2), ("shrink", 2)])
def test_ctrl_c_ends_it_inside_a_kernel(
    command: str, times: int, endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(pid: int) -> None:
        for number in range(times):
            wait_for_seconds(pid, 1.0 + number)
            os.kill(pid, signal.SIGINT)

    monkeypatch.setattr(reprokit.cli.shrink, "FIRST_SECONDS", 60)
    code, said, seconds = run([command, str(endless)], tmp_path / "said", interrupt)
    assert (code, seconds < 15) == (130, True)
    assert said.endswith("reprokit: error: interrupted\n")
