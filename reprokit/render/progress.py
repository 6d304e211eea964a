"""How a reduction went on: calls and elements left after so many checks, read from its log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reprokit.shrink.reduction import Reduction

_LINE = re.compile(r"(\d+): .*: (\d+) calls, (\d+) elements$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Progress:
    """What was left after a number of checks."""

    checks: int
    calls: int
    elements: int


def progress(reduction: Reduction) -> list[Progress]:
    """From the whole step to the minimum; empty when nothing was kept."""
    lines = [match for line in reduction.log if (match := _LINE.match(line))]
    if not lines:
        return []
    before = reduction.before
    steps = [Progress(int(line[1]), int(line[2]), int(line[3])) for line in lines]
    return [
        Progress(0, before["calls"], before["elements"]),
        *steps,
        Progress(max(reduction.checks, steps[-1].checks), steps[-1].calls, steps[-1].elements),
    ]
