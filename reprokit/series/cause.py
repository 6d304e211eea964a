"""The cause of a failure, and interventions on the steps before it.

What is unlike the steps before is evidence; a cause is claimed only of an `Intervention` that removes the failure.
Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

from reprokit.grammar import Count, Later, Line, Text, one_of, plain_of
from reprokit.words import counted, number_words

_DIVERGED = 10.0  # times the loss of before: where a run is on its course the loss varies by less
_RISES = 1.5  # times the loss of the step before, in every step of a divergence
_USUAL = 3.0  # times the largest loss of the usual steps
TENTH = "a tenth of the learning rate"  # the change of an experiment
SMALLER_RATES = {TENTH: 0.1, "a hundredth of the learning rate": 0.01}  # 50 for 0.5 diverges at 5 too
EVENTS = frozenset({"spike", "explosion"})


@dataclass(frozen=True, slots=True)
class Divergence:
    """The losses of a run that has left its course: the last usual one at ``step``, and the last one."""

    step: int
    usual: float
    last_step: int
    last: float

    @property
    def text(self) -> str:
        """In words, without a full stop."""
        steps = counted(self.last_step - self.step, "step")
        rise = f"the loss rose from {number_words(self.usual)} to {number_words(self.last)} in {steps}"
        return f"The run diverged before: {rise}"


def divergence(losses: Sequence[tuple[int, float]]) -> Divergence | None:
    """Where the losses before the failing step began to rise to many times the usual ones, ``None`` if they did not."""
    known = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    if len(known) < 2:
        return None
    last_step, last = known[-1]
    place = len(known) - 1
    while place and known[place][1] > _RISES * abs(known[place - 1][1]):
        place -= 1
    step, usual = known[place]
    return Divergence(step, usual, last_step, last) if last > _DIVERGED * abs(usual) else None


def rate_words(found: Divergence | None, update: float, low: float, high: float) -> str:
    """That a run diverged, or had a large update, at learning rates from ``low`` to ``high``."""
    says = f"An update changed the parameters by {number_words(update)} times their norm"
    rate = f"a learning rate of {number_words(low)}"
    rates = rate if low == high else f"learning rates of {number_words(low)} to {number_words(high)}"
    return f"{found.text if found is not None else says}, at {rates}."


def usual_limits(losses: Sequence[tuple[int, float]], *, least: float = 0.0) -> tuple[float, float]:
    """The lowest and highest loss that is usual: of the steps before those in which it left its course. Smaller losses
    than ``least`` are no measure."""
    found = divergence(losses)
    known = [loss for step, loss in losses if math.isfinite(loss) and (found is None or step <= found.step)]
    if not known:
        return -math.inf, math.inf
    sizes = list(map(abs, known))
    return -_USUAL * max(*sizes, least), _USUAL * max(median(sizes), sizes[-1], least)


@dataclass(frozen=True, slots=True)
class Intervention:
    """The steps before the failure, played again with one ``change``: whether that ``removes`` it, the ``loss`` of the
    failing step then, and how many ``steps`` were played."""

    change: Line
    removes: bool
    loss: float | None = None
    steps: Count = 0

    def words(self, kind: str) -> str:
        """What it has shown of a failure of a kind; of an event no value was bad before."""
        steps = "the step" if self.steps == 1 else f"the same {self.steps} steps"
        ending = "" if self.steps > 1 else "s"
        shown, loss = f"stay{ending} finite", f" (loss {number_words(self.loss)})" if self.loss is not None else ""
        if kind == "exception":
            shown = f"end{ending} without the exception"
        elif kind in EVENTS and self.loss is not None:
            shown, loss = f"end{ending} with a usual loss", f" ({number_words(self.loss)})"
        return f"With {self.change} {steps} {shown}{loss}."


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of a failure: its class (``kind``), a sentence, the evidence for it, and the interventions.

    ``why_not`` says which experiments were not made and why; ``None`` if all were, or none is ever made. Then no class
    is claimed that only a rule shows.
    """

    kind: Annotated[str, one_of("data", "setting", "state", "numerics", "framework", "unknown")]
    text: Text
    evidence: tuple[Line, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    why_not: Later[Line] = None

    @property
    def removing(self) -> Intervention | None:
        """The first change that removes the failure."""
        return next((one for one in self.interventions if one.removes), None)

    def described(self) -> dict[str, Any]:
        """As ``show --json`` has it."""
        tried = [plain_of(one) for one in self.interventions]
        missed = {"why_not": self.why_not} if self.why_not is not None else {}
        return {
            "class": self.kind,
            "text": self.text,
            "evidence": list(self.evidence),
            "interventions": tried,
            "tried": bool(tried),
            **missed,
        }
