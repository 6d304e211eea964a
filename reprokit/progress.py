"""Lines that show how far long work has come: none in the first five seconds, then fewer and fewer."""

from __future__ import annotations

from collections.abc import Callable

from reprokit.native import clock
from reprokit.words import counted

_PATIENCE = 5.0  # seconds that most people wait without a doubt


class Progress:
    """Says ``<what> ... (N of M calls)`` five seconds after the first call, and then at twice the time."""

    def __init__(self, say: Callable[[str], None], what: str, now: Callable[[], float] = clock.monotonic) -> None:
        self._say, self._what, self._now = say, what, now
        self._started: float | None = None
        self._next = 0.0

    def at(self, done: int, total: int) -> None:
        """So many calls of all are done."""
        now = self._now()
        if self._started is None:
            self._started, self._next = now, now + _PATIENCE
        if now >= self._next:
            self._next = now + (now - self._started)
            self._say(f"{self._what} ... ({done:,} of {counted(total, 'call')})")
