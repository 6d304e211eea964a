"""A step that computes for hours ends with a line by a limit, although a kernel hears of no signal."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import reprokit.cli.whatif
from reprokit.cli import console
from reprokit.cli.app import main
from reprokit.program.ir import Call, Ref
from reprokit.snapshot.format import save
from tests.render.programs import masked_softmax, snapshot_of


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A snapshot whose step begins with a call that takes minutes, and whose result the failure depends on."""
    snapshot = snapshot_of(masked_softmax())
    ones = Call("torch.ones", (3000, 3000), {}, Ref(7))
    matrix = ones, Call("torch.linalg.matrix_power", (Ref(7), 2**40), {}, Ref(8))
    given = Ref(snapshot.program.inputs[0].value)
    used = Call("torch.sum", (Ref(8),), {}, Ref(9)), Call("torch.Tensor.add_", (given, Ref(9)), {}, given)
    program = replace(snapshot.program, calls=(*matrix, *used, *snapshot.program.calls))
    failure = replace(snapshot.failure, call_index=4)
    save(replace(snapshot, program=program, failure=failure), tmp_path / "x.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "SECONDS", 0.5)
    monkeypatch.setattr(reprokit.cli.whatif, "SECONDS_FOR_ALL", 0.5)
    return tmp_path / "x.pt"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs commands in forked children")
@pytest.mark.parametrize("words", ["show --max-time 0.5", "render --max-time 0.5", "shrink --max-time 0.1"])
def test_it_ends_with_a_line(words: str, endless: Path, tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(tmp_path / "said", os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        torch.set_num_threads(1)
        os._exit(main([*words.split(), str(endless)]))
    _, status, used = os.wait4(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1 and used.ru_utime + used.ru_stime < 20
    said = (tmp_path / "said").read_text()
    line = r"reprokit: error: the step takes over [\d.]+ s to run\nhint: --max-time [\d.]+ waits longer"
    assert re.search(line, said) and "Traceback" not in said
