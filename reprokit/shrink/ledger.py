"""The books of one reduction: the log of what was kept, the table of passes, and what an earlier run had counted.

Numbers go on from the earlier run, so a log never counts backward.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from reprokit.shrink.candidate import Candidate
from reprokit.shrink.reduction import PassRow, Reduction
from reprokit.snapshot.format import count_elements
from reprokit.words import counted

_NUMBERS = ("checks", "successes", "calls", "elements", "seconds")


@dataclass
class Ledger:
    """Counts for one run of the reducer. Invariant: the numbers in ``log`` never fall.

    ``calls`` and ``elements`` are the sizes of the best candidate, ``settled`` the passes that changed nothing since it
    became the best, ``variants`` the runs made to explain it.
    """

    calls: int
    elements: int
    log: list[str] = field(default_factory=list)
    rows: dict[str, PassRow] = field(default_factory=dict)
    checks: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    variants: int = 0
    settled: set[str] = field(default_factory=set)
    _current: PassRow = field(default_factory=lambda: PassRow(""))
    _changes: dict[str, str] = field(default_factory=dict)

    def go_on(self, earlier: Reduction) -> None:
        """Count on from an earlier run."""
        self.calls = earlier.program.num_calls
        self.elements = count_elements(earlier.program, earlier.tensors)
        self.log = list(earlier.log)
        self.checks, self.verdicts, self.seconds = earlier.checks, dict(earlier.verdicts), earlier.seconds
        self.rows = {row.name: replace(row) for row in earlier.passes}

    @contextmanager
    def passing(self, name: str) -> Iterator[PassRow]:
        """Book what happens inside on this pass; gives a row that has, in the end, the numbers of this time alone."""
        row = self.rows.setdefault(name, PassRow(name))
        before, this_time = replace(row), PassRow(name)
        outer, self._current = self._current, row
        started = time.monotonic()
        try:
            yield this_time
        finally:
            row.seconds += time.monotonic() - started
            self._current = outer
            for number in _NUMBERS:
                setattr(this_time, number, getattr(row, number) - getattr(before, number))

    def checked(self, candidate: Candidate, verdict: str, change: str) -> None:
        """A candidate was run."""
        self.checks += 1
        self.verdicts[verdict] = self.verdicts.get(verdict, 0) + 1
        self._current.checks += 1
        self._changes[candidate.digest] = change

    def varied(self) -> None:
        """A variant of the result was run."""
        self.variants += 1
        self._current.checks += 1

    def accepted(self, candidate: Candidate) -> str:
        """A candidate became the best one; what was changed, in a few words."""
        change = self._changes.get(candidate.digest, "as known from before")
        row = self._current
        row.successes += 1
        row.calls += self.calls - candidate.num_calls
        row.elements += self.elements - candidate.num_elements
        self.calls, self.elements = candidate.num_calls, candidate.num_elements
        self.settled.clear()
        self.log.append(f"{self.checks}: {change}: {counted(self.calls, 'call')}, {counted(self.elements, 'element')}")
        return change

    def table(self) -> list[PassRow]:
        """The rows as a reduction keeps them."""
        return [replace(row, seconds=round(row.seconds, 4)) for row in self.rows.values()]
