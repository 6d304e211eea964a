"""Checks of a user's that misbehave: importable by name, so that workers and executors can load them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from reprokit.locate.failure import Failure
from reprokit.program.step import Step
from reprokit.rules.match import with_rule
from reprokit.shrink.checks.recorded import NonfiniteCheck

FEW_CALLS = 3


def observe(candidate: Step) -> Failure | None:
    """The failure with its local rule, without knowing which one is wanted."""
    found = NonfiniteCheck()(candidate)
    return with_rule(found, candidate) if found is not None else None


@dataclass(frozen=True)
class NeedsBoth:
    """Fails only as long as the program has both a call of this name and the failure."""

    name: str = "exp"

    def __call__(self, candidate: Step) -> Failure | None:
        names = [call.name for call in candidate.program.calls]
        return observe(candidate) if self.name in names else None


@dataclass(frozen=True)
class Hostile(NeedsBoth):
    """The same, but half of the candidates with more than a few calls crash."""

    num_calls: int = 0

    def __call__(self, candidate: Step) -> Failure | None:
        if FEW_CALLS < candidate.num_calls < self.num_calls and int(candidate.digest, 16) % 2:
            crash()
        return super().__call__(candidate)


def crash() -> None:
    """Read where nothing is."""
    ctypes.string_at(0)


def hang() -> None:
    """Never come back."""
    while True:
        time.sleep(1)


def by_number(candidate: Step) -> Failure | None:
    """What the first element says: 0 fails, 1 passes, 2 crashes, 3 hangs, 4 eats memory, 5 raises, 6 exits."""
    number = int(candidate.tensors[0].flatten()[0])
    if number == 2:
        crash()
    elif number == 3:
        hang()
    elif number == 4:
        eat_memory()
    elif number == 5:
        raise ValueError("a check that raises")
    elif number == 6:
        sys.exit(3)
    return Failure("forward", "nan", call="torch.log", num_elements=os.getpid()) if number == 0 else None


def eat_memory() -> None:
    """Take more and more, up to 4 GiB."""
    taken = []
    for _ in range(256):
        taken.append(b"x" * (1 << 24))
        time.sleep(0.005)
    raise AssertionError("nobody minded")


def threads_and_draw(candidate: Step) -> Failure | None:
    """After a parallel loop and a backward pass: the number of threads, and what the generator says next."""
    leaf = torch.ones(1 << 20, requires_grad=True)
    (leaf.exp() * 2).sum().backward()
    return Failure("forward", "nan", num_bad=torch.get_num_threads(), num_elements=int(torch.randint(1 << 30, ())))


@dataclass(frozen=True)
class LeavesTraces:
    """Starts a process, writes both process ids into a folder, and hangs."""

    folder: str

    def __call__(self, candidate: Step) -> Failure | None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(self.folder, f"{os.getpid()}.{child.pid}").touch()
        hang()
        return None
