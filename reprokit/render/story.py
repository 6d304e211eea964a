"""One paragraph: the step, the failure, the place where it was noticed, and the size of the result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from reprokit.render import facts, wording
from reprokit.render.issue import rate
from reprokit.snapshot.format import count_elements
from reprokit.words import counted

if TYPE_CHECKING:
    from reprokit.render.verify import VerifyResult
    from reprokit.shrink.reduction import Reduction
    from reprokit.snapshot.format import Snapshot


def sentences(snapshot: Snapshot, reduction: Reduction | None, verified: VerifyResult) -> list[str]:
    """The paragraph, sentence by sentence, in Markdown."""
    return [*_failure(snapshot), *_size(snapshot, reduction), rate(verified)]


def _failure(snapshot: Snapshot) -> Iterator[str]:
    failure = snapshot.failure
    said = wording.observed(failure)
    yield f"It happened at {facts.when(snapshot)} of the training run, {facts.where(snapshot)}. {said}"
    if facts.how_much(failure):
        yield f"{facts.how_much(failure)}."
    if facts.noticed_in(snapshot):
        yield f"It was noticed in {facts.noticed_in(snapshot)}."
    if facts.doubt(snapshot):
        yield facts.doubt(snapshot)


def _size(snapshot: Snapshot, reduction: Reduction | None) -> Iterator[str]:
    if reduction is None:
        yield f"The captured step has {counted(snapshot.program.num_calls, 'torch call')}; it was not reduced."
        return
    before, after = reduction.before, reduction.program.num_calls
    elements = count_elements(reduction.program, reduction.tensors)
    verb = "is" if after == 1 else "are"
    yield (
        f"Of {counted(before['calls'], 'torch call')} on {counted(before['elements'], 'input element')}, "
        f"{counted(after, 'call')} on {counted(elements, 'element')} {verb} enough to show it."
    )
    said = wording.message(reduction.failure)
    if said and said != wording.message(snapshot.failure):
        yield f"With these the message is: {said}."
