"""What happened, told in one paragraph: the step, the failure, where it was noticed, and how small it became."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from reprokit.render import wording
from reprokit.render.issue import rate
from reprokit.snapshot.format import count_elements

if TYPE_CHECKING:
    from reprokit.render.verify import VerifyResult
    from reprokit.shrink.reduction import Reduction
    from reprokit.snapshot.format import Snapshot

_NOTICED = {
    "loss": "the loss",
    "gradient": "a gradient",
    "parameter": "a parameter",
    "output": "an output of the model",
}


def sentences(snapshot: Snapshot, reduction: Reduction | None, verified: VerifyResult) -> list[str]:
    """The paragraph, sentence by sentence, in Markdown."""
    return [*_failure(snapshot), *_size(snapshot, reduction), rate(verified)]


def _failure(snapshot: Snapshot) -> Iterator[str]:
    failure = snapshot.failure
    said = wording.observed(failure)
    module = f", in module {wording.code_span(failure.module)}" if failure.module else ""
    step = f"step {snapshot.step}" + (f", micro-step {snapshot.micro_step}" if snapshot.micro_step else "")
    yield f"It happened at {step} of the training run, {wording.phase_words(failure)}{module}. {said}"
    if failure.num_elements > 1 and failure.num_bad:
        yield f"{failure.num_bad:,} of {failure.num_elements:,} elements are {failure.way}."
    if snapshot.observed_at in _NOTICED:
        yield f"It was noticed in {_NOTICED[snapshot.observed_at]}."
    if snapshot.fidelity != "exact":
        note = f": {snapshot.fidelity_note}" if snapshot.fidelity_note else ""
        yield f"The captured step replays {snapshot.fidelity}, not bit for bit{note}."


def _size(snapshot: Snapshot, reduction: Reduction | None) -> Iterator[str]:
    if reduction is None:
        yield f"The captured step has {snapshot.program.num_calls:,} torch calls; it was not reduced."
        return
    before, after = reduction.before, reduction.program.num_calls
    elements = count_elements(reduction.program, reduction.tensors)
    verb = "is" if after == 1 else "are"
    yield (
        f"Of {before['calls']:,} torch calls on {before['elements']:,} input elements, "
        f"{after:,} on {elements:,} {verb} enough to show it."
    )
