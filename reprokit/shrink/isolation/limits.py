"""How much time and memory a candidate may take, both derived from the first run, which is the largest program."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

_LEAST_SECONDS = 10.0
_TIMES_FIRST = 10
_LEAST_BYTES = 1 << 30
_TIMES_PEAK = 2
_UNIT = 1 if sys.platform == "darwin" else 1024  # of what the system says about the peak


@dataclass(frozen=True, slots=True)
class Limits:
    """``seconds`` for a whole run, ``memory`` in bytes on top of what the process has when a run starts; ``None``: no
    limit."""

    seconds: float | None = None
    memory: int | None = None

    @classmethod
    def after(cls, seconds: float) -> Limits:
        """The limits after a first run that took so long and, at its peak, as much memory as the system remembers."""
        return cls(max(_LEAST_SECONDS, _TIMES_FIRST * seconds), max(_LEAST_BYTES, _TIMES_PEAK * peak_bytes()))

    def times(self, runs: int) -> Limits:
        """The limits for so many runs in a row."""
        return self if self.seconds is None else Limits(runs * self.seconds, self.memory)


def peak_bytes() -> int:
    """The most memory that this process, or any child that has ended, ever held."""
    if sys.platform == "win32":
        return 0
    import resource

    peaks = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(peaks) * _UNIT


def resident_bytes(pid: int) -> int:
    """The memory that a process holds; 0 where the system does not tell, or for a process that has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
