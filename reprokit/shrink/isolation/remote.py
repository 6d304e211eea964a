"""Candidates through any executor in the manner of ``concurrent.futures``: pools of processes, clusters.

On the other side each candidate runs in a child or worker of the process that the executor gave it, so that a crash
ends a candidate and not the executor.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from typing import Any, Protocol

from reprokit.shrink.candidate import Candidate
from reprokit.shrink.isolation.limits import Limits
from reprokit.shrink.isolation.task import Report, Task
from reprokit.shrink.isolation.transport import pack, pack_report, unpack, unpack_report

_here = threading.local()


class Future(Protocol):
    """What `Executor.submit` hands out."""

    def result(self) -> Any:
        """The result, once there is one; raises what the function raised."""

    def cancel(self) -> Any:
        """Do not start what has not started."""


class Executor(Protocol):
    """What runs functions somewhere else."""

    def submit(self, function: Any, /, *arguments: Any) -> Future:
        """Run the function with the arguments."""


def reports_from(
    executor: Executor, task: Task, candidates: Sequence[Candidate], limits: Limits
) -> Generator[Report, None, None]:
    """The reports on candidates in their order; raises what is wrong with the executor."""
    futures: list[Future] = []
    try:
        for candidate in candidates:
            futures.append(executor.submit(observe_packed, task, pack(candidate), limits))
        for future in futures:
            yield unpack_report(future.result())
    finally:
        for future in futures:
            future.cancel()


def observe_packed(task: Task, packed: bytes, limits: Limits) -> bytes:
    """The other side: the report on one candidate."""
    from reprokit.shrink.isolation.runner import Isolation

    isolation: Isolation | None = getattr(_here, "isolation", None)
    if isolation is None or isolation.task != task:
        isolation = _here.isolation = Isolation(task, always_apart=True)
    isolation.limits = limits
    candidate, _ = unpack(packed)
    return pack_report(isolation.report(candidate))
