"""How a reduction went on: calls and elements left after so many checks, read from its log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reprokit.shrink.reduction import Reduction

_LINE = re.compile(r"(\d+): .*: ([\d,]+) calls?, ([\d,]+) elements?$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Progress:
    """What was left after a number of checks."""

    checks: int
    calls: int
    elements: int


def progress(reduction: Reduction) -> list[Progress]:
    """From the whole step to the minimum, one for every change of size; empty when nothing was kept."""
    lines = [match for line in reduction.log if (match := _LINE.match(line))]
    if not lines:
        return []
    before = reduction.before
    steps = [Progress(0, before["calls"], before["elements"])]
    for line in lines:
        calls, elements = (int(number.replace(",", "")) for number in line.groups()[1:])
        if (calls, elements) != (steps[-1].calls, steps[-1].elements):
            steps.append(Progress(int(line[1]), calls, elements))
    return [*steps, Progress(max(reduction.checks, int(lines[-1][1])), steps[-1].calls, steps[-1].elements)]
