"""The event of a run as a check: a quantity of the step, such as its loss, is not below the recorded threshold.

It also keeps the scale of the event: a loss of 10^8 times its median is not one of 25, which some batch of ones and
zeros has. A dead layer is one as long as the same call lets no gradient through, between the call that reads its
parameter and the loss. If that is the only reason in training, it stays the only one: a gradient that the call passes
on unchanged reaches the parameter. A bias that keeps a ReLU below zero stays the reason, too. Three guards keep a
candidate from slipping to something trivial. What it asserts has to be computed, not given. An input of the step may
hold no larger numbers than in training, so a threshold that only wrong labels exceed still needs them. What a call of
the step computed may be given as an input only while its numbers are no larger than those of the inputs that do not
carry the event.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from reprokit.locate.calls import VIEWS, short_name
from reprokit.locate.differences import results_of
from reprokit.locate.failure import EVENTS, Failure
from reprokit.locate.gains import Step, blocked, blocking_bias, is_alive_without, zeroed
from reprokit.locate.quantity import measured_in, observed
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.plainness import constant_of, largest_of
from reprokit.shrink.signature import SignatureCheck

_LEAST_BOUND = 1.0
# in the place of the call of a failure
_NO_CALL, _NO_QUANTITY, _NO_SCALE, _NOT_ALONE = "no call", "no quantity", "no scale", "not alone"
_NO_BIAS = "no bias"


@dataclass(frozen=True)
class PredicateCheck(SignatureCheck):
    """An event of a run. ``event`` is the failure that has the predicate; ``largest`` bounds the inputs of the step,
    by value number, ``usual`` all other inputs; those in ``filled`` are not all zeros, and stay so. ``blocking`` is the
    call that lets no gradient through to a dead layer; with ``is_cut`` it does so whatever the values are, with
    ``is_alone`` nothing else keeps the gradient from it; without the ``bias`` (if any) the call blocks none."""

    event: Failure | None = None
    largest: Mapping[int, float] = field(default_factory=dict)
    usual: float = math.inf
    filled: frozenset[int] = frozenset()
    blocking: str | None = None
    is_cut: bool = False
    is_alone: bool = False
    bias: int | None = None

    def recognises(self, failure: Failure) -> bool:
        """True if it is an event."""
        return failure.event is not None

    @property
    def spec(self) -> str:
        """The kind of the event."""
        return self.event.kind if self.event is not None else EVENTS[0]

    def observe(self, candidate: Candidate) -> Failure | None:
        """Run, and measure the quantity. Without it, or with the gradient blocked elsewhere, it is another failure."""
        assert self.event is not None, "the check has an event"
        program, tensors = candidate.program, candidate.tensors
        found, outcome = observed(program, tensors, self.event)
        if found is None:
            is_measured = measured_in(outcome, program, tensors, self.event) is not None
            return None if is_measured else Failure(self.event.phase, self.event.kind, call=_NO_QUANTITY)
        if found.event is not None and found.event.value < self._least_value:
            return replace(found, call=_NO_SCALE)
        if self.blocking is None or found.exception is not None:
            return found
        step = Step(program, tensors)
        blocking = blocked(step, found)
        if blocking.call != self.blocking:
            return replace(found, call=blocking.call or _NO_CALL)
        if self.bias is not None and blocking_bias(step, blocking) != self.bias:
            return replace(found, call=_NO_BIAS)
        return replace(found, call=_NOT_ALONE) if self.is_alone and not is_alive_without(step, blocking) else found

    @property
    def _least_value(self) -> float:
        """What a candidate has to reach: half the way from the threshold to the value in training, in logarithms."""
        event = self.event.event if self.event is not None else None
        if event is None or not (0 < event.threshold <= event.value < math.inf):
            return -math.inf
        return math.sqrt(event.threshold) * math.sqrt(event.value)

    def adopted(self, failure: Failure, whole: Candidate) -> Self:
        """This check for a whole step."""
        items = [item for item in whole.program.inputs if item.role != "rng"]
        filled = frozenset(item.value for item in items if constant_of(whole.tensors[item.value]) != 0)
        largest = {item.value: largest_of(whole.tensors[item.value]) for item in items}
        source = failure.event.source if failure.event is not None else None
        usual = max((largest[item.value] for item in items if item.name != source), default=0.0)
        for call in whole.program.calls:  # a row of the data is as much an input of the step as the data
            if short_name(call) in VIEWS | {"getitem"} and (read := call.input_refs()) and read[0] in largest:
                largest.update((value, largest[read[0]]) for value in call.output_refs())
        made = super().adopted(failure, whole)
        blocking = self.event.call if self.event is not None and self.spec == "dead" else None
        if blocking is not None:
            step = Step(whole.program, whole.tensors)
            zeroing = zeroed(step, failure)
            is_alone = zeroing.call is not None and is_alive_without(step, zeroing)
            bias = blocking_bias(step, zeroing) if zeroing.call is not None else None
            made = replace(made, blocking=blocking, is_cut=zeroing.call is None, is_alone=is_alone, bias=bias)
        return replace(made, event=failure, largest=largest, usual=max(usual, _LEAST_BOUND), filled=filled)

    @property
    def may_bypass(self) -> bool:
        """True if a call cuts the graph: without a part of the model a step has another loss and other gradients, but
        no gradient stays none."""
        return self.is_cut

    def is_clean(self, candidate: Candidate) -> bool:
        """True if a candidate passes the three guards."""
        inputs = [item for item in candidate.program.inputs if item.role != "rng"]
        is_update = self.event is not None and self.event.call is not None  # made of parameters, which are given
        if not is_update and {item.value for item in inputs}.intersection(results_of(candidate.program)):
            return False
        for item in inputs:
            tensor, largest = candidate.tensors[item.value], self.largest.get(item.value)
            if largest_of(tensor) > (self.usual if largest is None else largest):
                return False
            if item.value in self.filled and constant_of(tensor) == 0 and self.spec == "dead":
                return False
        return super().is_clean(candidate)
