"""Limits of work that nobody asked for, such as experiments: in CPU seconds, so that a busy machine changes how long it
takes and never what is found.

A limit that the user gives, such as ``--max-time``, is in seconds of the clock and is none of these.
"""

from __future__ import annotations

from collections.abc import Callable

from reprokit import native
from reprokit.native import clock

Moment = tuple[float, float]  # CPU seconds of this thread, and of all threads as if they had shared the work evenly


def moment() -> Moment:
    """The CPU time so far, by this thread and by the process."""
    return clock.thread_time(), clock.process_time() / native.get_num_threads()


class CpuLimit:
    """So many CPU ``seconds``, counted from when it is made, by the thread that makes it.

    The thread alone would miss a backward pass on a GPU, which autograd runs in a thread of its own. The process alone
    would count a step on sixteen threads sixteenfold. So it is the larger one of the thread's own time and of the time
    of the process divided by torch's threads: about what the work takes on an idle machine, with one thread or with
    many. ``wall`` seconds of the clock, if given, end what waits for another process and burns no CPU time.
    """

    def __init__(
        self,
        seconds: float,
        *,
        wall: float | None = None,
        now: Callable[[], Moment] = moment,
        wall_now: Callable[[], float] = clock.monotonic,
    ) -> None:
        self.seconds, self.wall = seconds, wall
        self._now, self._wall_now = now, wall_now
        self._started, self._wall_started = now(), wall_now()

    @property
    def used(self) -> float:
        """The CPU seconds so far."""
        return max(end - start for start, end in zip(self._started, self._now(), strict=True))

    @property
    def left(self) -> float:
        """The CPU seconds that are left; 0 if the work has waited for too long."""
        if self.wall is not None and self._wall_now() - self._wall_started >= self.wall:
            return 0.0
        return max(0.0, self.seconds - self.used)

    @property
    def is_spent(self) -> bool:
        """True if nothing more may begin."""
        return self.left <= 0
