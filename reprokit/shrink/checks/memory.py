"""Out of memory: an allocation that is refused. Whether it is depends on its size and on the machine.

A request that no machine could grant can be reduced: a candidate has to make such a request as well. Any other request
is granted on the next machine, or on this one an hour later, so it is not reduced. Candidates run with little address
space, so that a request that could be granted is refused before it is paid for.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from reprokit.errors import NotReproduced
from reprokit.locate.failure import Failure
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.exception import ExceptionCheck
from reprokit.shrink.oracle import Verdict

_POWERS = "bkmgt"
_SIZE = r"(\d[\d,]{0,30}(?:\.\d+)?) ?(bytes|B|[KMGT]i?B)\b"
_REQUEST = re.compile(rf"(?:tried to allocate|invalid buffer size:) {_SIZE}", re.IGNORECASE)
_CAPACITY = re.compile(rf"total capacity of {_SIZE}", re.IGNORECASE)
_BEYOND_MACHINES = 2**40
_TIMES_MEMORY = 4  # overcommitting systems grant more than there is, and in half precision half is asked for
_LEAST_SPACE = 2**30


@dataclass(frozen=True)
class OutOfMemoryCheck(ExceptionCheck):
    """The same exception of the same call for a request of ``least`` bytes or more."""

    least: int = 0

    def adopted(self, failure: Failure, whole: Candidate) -> Self:
        """This check for a refused allocation; raises `NotReproduced` for one that another machine may grant."""
        request, memory = requested_bytes(failure), _memory_of(failure)
        if request is None or memory is None or request < _TIMES_MEMORY * memory or not _can_limit(failure):
            raise NotReproduced(
                "out of memory depends on the machine; not reduced",
                hint="look at what is held at the failing line, on a GPU with `torch.cuda.memory_summary()`",
                note=f"`{failure.call}` asked for {_in_words(request)}; the memory there is {_in_words(memory)}",
            )
        return replace(super().adopted(failure, whole), least=min(request, _BEYOND_MACHINES))

    def observe(self, candidate: Candidate) -> Failure | None:
        """Run until a call raises, with little address space."""
        with _little_space():
            return super().observe(candidate)

    def judge(self, observation: Failure | None, candidate: Candidate) -> Verdict:
        """Compare signatures; a smaller request could be granted, so its refusal says nothing."""
        verdict = super().judge(observation, candidate)
        if verdict is Verdict.SAME and observation is not None and (requested_bytes(observation) or 0) < self.least:
            return Verdict.PASSES
        return verdict


def requested_bytes(failure: Failure) -> int | None:
    """How much was asked for by an allocation that was refused, ``None`` for any other failure."""
    return _bytes_in(_REQUEST, failure)


def _bytes_in(pattern: re.Pattern[str], failure: Failure) -> int | None:
    found = pattern.search(failure.exception[1]) if failure.exception is not None else None
    return int(float(found[1].replace(",", "")) * 1024 ** _POWERS.index(found[2][0].lower())) if found else None


def _memory_of(failure: Failure) -> int | None:
    """The memory of the device that refused: CUDA names it, else this machine's; ``None`` where the system has no name
    for it."""
    named = _bytes_in(_CAPACITY, failure)
    if named is None and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return named


def _can_limit(failure: Failure) -> bool:
    """True if a request that could be granted costs little: on Linux, and on a GPU, which has what it has."""
    return sys.platform == "linux" or _bytes_in(_CAPACITY, failure) is not None


@contextlib.contextmanager
def _little_space() -> Iterator[None]:
    """A quarter of the memory that is available on top of what the process holds."""
    import torch

    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if sys.platform != "linux" or is_on_gpu:  # CUDA reserves addresses as it likes
        yield
        return
    import resource  # where there is one

    before, most = resource.getrlimit(resource.RLIMIT_AS)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _address_space() + max(_LEAST_SPACE, available // 4)
    resource.setrlimit(resource.RLIMIT_AS, (limit if before < 0 else min(limit, before), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _in_words(size: int | None) -> str:
    if size is None:
        return "an unknown size"
    return f"{size / 2**40:,.1f} TiB" if size >= 2**40 else f"{size / 2**30:,.1f} GiB"
