"""Known patterns of gradient norms in the last recorded step, against the run's own earlier steps.

The patterns and the usual ranges are those of common advice on gradient monitoring. A usual range is shown beside a
finding and is never the rule: a pattern is reported only if the run itself was different before.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from reprokit.series.story import RecordedStep

LEAST_HISTORY = 5  # recorded steps, of which a median means something
FACTOR = 10.0  # times its own median: ordinary noise of small batches stays below
MOST_TOTAL = 100.0  # the advice's limit of the norm of all gradients
_OTHERS_FACTOR = 3.0  # the other layers of a single abnormal one keep below this
_LEAST_LAYERS = 3  # so that early, middle and late differ
RANGES = {"embedding": (0.01, 0.5), "middle": (0.001, 0.1), "head": (0.01, 1.0), "total": (0.1, 5.0)}

_EMBEDDING = re.compile(r"(?:^|[._])(?:\w*emb\w*|wte|wpe|shared)(?:[._]|$)", re.IGNORECASE)
_HEAD = re.compile(r"(?:^|[._])(?:\w*head|classifier|fc_?out|output|logits|unembed\w*)(?:[._]|$)", re.IGNORECASE)
Quantity = Callable[[RecordedStep], float | None]


@dataclass(frozen=True, slots=True)
class GradientPattern:
    """A pattern with its evidence: the value now, the median of the run before, and the usual range where there is
    one."""

    name: str
    step: int
    value: float
    median: float
    part: str
    usual: tuple[float, float] | None = None

    @property
    def text(self) -> str:
        """One line: ``total gradient norm 312 at step 9; 2.1 before, usually 0.1 to 5``."""
        usual = f", usually {self.usual[0]:g} to {self.usual[1]:g}" if self.usual is not None else ""
        return f"{self.name}: {self.part} {self.value:.3g} at step {self.step}, {self.median:.3g} before{usual}"


def gradient_patterns(rows: Sequence[RecordedStep]) -> list[GradientPattern]:
    """The patterns that the last row shows; none without enough rows before it."""
    whole = [row for row in rows if row.grad_norm]
    if len(whole) <= LEAST_HISTORY:
        return []
    return list(_found(whole[:-1], whole[-1]))


def _found(before: Sequence[RecordedStep], last: RecordedStep) -> Iterator[GradientPattern]:
    total, usual_total = last.total, statistics.median(row.total for row in before)
    if total > MOST_TOTAL and total >= FACTOR * usual_total:
        yield GradientPattern("total over 100", last.step, total, usual_total, "gradient norm", RANGES["total"])
    if total * FACTOR**2 <= usual_total:  # a schedule or convergence may make gradients ten times smaller
        yield GradientPattern("all near zero", last.step, total, usual_total, "gradient norm", RANGES["total"])
    ratios: tuple[tuple[str, str, Quantity], ...] = (
        ("embedding far above the others", "embedding over the median of the others", _embedding_ratio),
        ("late layers far above early ones", "last third over first third", _late_ratio),
    )
    for name, part, quantity in ratios:
        value = quantity(last)
        known = [number for row in before if (number := quantity(row)) is not None]
        if value is not None and len(known) >= LEAST_HISTORY and value > 1:
            median = statistics.median(known)
            if value >= FACTOR * median:
                yield GradientPattern(name, last.step, value, median, part)
    yield from _abnormal_layer(before, last)


def _abnormal_layer(before: Sequence[RecordedStep], last: RecordedStep) -> Iterator[GradientPattern]:
    """One parameter that has left its own course while the others keep theirs."""
    medians = {
        name: statistics.median(values)
        for name in last.grad_norm
        if len(values := [row.grad_norm[name] for row in before if name in row.grad_norm]) >= LEAST_HISTORY
    }
    growth = {name: last.grad_norm[name] / median for name, median in medians.items() if median > 0}
    if len(growth) < _LEAST_LAYERS:
        return
    name = max(growth, key=growth.__getitem__)
    layer = name.rpartition(".")[0]
    others = [value for other, value in growth.items() if other.rpartition(".")[0] != layer]
    if growth[name] >= FACTOR and others and max(others) <= _OTHERS_FACTOR:
        usual = RANGES[_kind(name)]
        yield GradientPattern("one abnormal layer", last.step, last.grad_norm[name], medians[name], f"`{name}`", usual)


def _kind(name: str) -> str:
    return "embedding" if _EMBEDDING.search(name) else "head" if _HEAD.search(name) else "middle"


def _embedding_ratio(row: RecordedStep) -> float | None:
    """The largest embedding's norm over the median of the other parameters."""
    own = [value for name, value in row.grad_norm.items() if _EMBEDDING.search(name)]
    others = [value for name, value in row.grad_norm.items() if not _EMBEDDING.search(name)]
    middle = statistics.median(others) if others else 0.0
    return max(own) / middle if own and middle > 0 else None


def _late_ratio(row: RecordedStep) -> float | None:
    """The median norm of the last third of the parameters over that of the first third, embedding and head left
    out."""
    values = [value for name, value in row.grad_norm.items() if _kind(name) == "middle"]
    third = len(values) // 3
    if third < 1:
        return None
    early, late = statistics.median(values[:third]), statistics.median(values[-third:])
    return late / early if early > 0 else None
