"""The cause of a failure, and interventions on the steps before it.

What is unlike the steps before is evidence; a cause is claimed only of an `Intervention` that removes the failure.
Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from reprokit.grammar import Count, Later, Line, Text, one_of, plain_of
from reprokit.series.usual import Divergence
from reprokit.words import number_words

TENTH = "a tenth of the learning rate"  # the change of an experiment
SMALLER_RATES = {TENTH: 0.1, "a hundredth of the learning rate": 0.01}  # 50 for 0.5 diverges at 5 too
EVENTS = frozenset({"spike", "explosion"})


def rate_words(found: Divergence | None, update: float, low: float, high: float) -> str:
    """That a run diverged, or had a large update, at learning rates from ``low`` to ``high``."""
    says = f"An update changed the parameters by {number_words(update)} times their norm"
    rate = f"a learning rate of {number_words(low)}"
    rates = rate if low == high else f"learning rates of {number_words(low)} to {number_words(high)}"
    return f"{found.text if found is not None else says}, at {rates}."


@dataclass(frozen=True, slots=True)
class Intervention:
    """The steps before the failure, played again with one change."""

    change: Line
    removes: bool  # the failure
    loss: float | None = None  # of the failing step with the change
    steps: Count = 0  # that were played

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
    """The cause of a failure: its class, a sentence, the evidence for it, and the interventions."""

    kind: Annotated[str, one_of("data", "setting", "state", "numerics", "framework", "unknown")]
    text: Text
    evidence: tuple[Line, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    # Which experiments were not made and why; None if all were, or none is ever made. Then no class is claimed that
    # only a rule shows.
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
