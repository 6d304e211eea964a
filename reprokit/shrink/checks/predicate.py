"""Two predicates of a whole run as checks. That of an event: a quantity of the step, such as its loss, is not below the
recorded threshold.

Any large number exceeds a threshold, so a candidate has to keep the cause as well: an odd row of the batch with its
recorded values, or the learning rate that jumped. Without such a cause there is no search and no repro.

The user's own: a function that gets the outcome of a run and says whether the bug is in it. It sees what a whole step
left behind, so its failure has no origin among the calls. Two guards keep such a predicate from slipping to something
trivial: results must be computed, not given, and no input may hold a number larger than any that the snapshot was
given, so that a loss of 1e4 stays one that grew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from reprokit.compare.compiled import variable_of
from reprokit.compare.difference import results_of
from reprokit.compare.quantity import observed
from reprokit.errors import UsageError
from reprokit.locate.failure import Failure
from reprokit.locate.kinds import FUNCTION
from reprokit.program.dataflow import contents
from reprokit.program.interpreter import run
from reprokit.program.ir import Phase, Program
from reprokit.program.step import Step
from reprokit.rules.steps import rate_jump
from reprokit.shrink.checks.check import Check, Ruling
from reprokit.shrink.plainness import largest_of
from reprokit.snapshot.format import Snapshot
from reprokit.words import rows_in

_Rows = list[list[float]]


@dataclass(frozen=True)
class PredicateCheck(Check):
    """An event of a run."""

    event: Failure | None = None  # with the predicate
    rows: Mapping[int, _Rows] = field(default_factory=dict)  # the odd ones of inputs of the batch, by value number
    rate: float | None = None  # that jumped
    inputs: frozenset[int] = frozenset()  # of the whole step

    def recognises(self, failure: Failure) -> bool:
        """True if it is an event."""
        return failure.event is not None

    @property
    def spec(self) -> str:
        """The kind of the event."""
        assert self.event is not None, "the check has an event"
        return self.event.kind

    def observe(self, candidate: Step) -> Failure | None:
        """Run, and measure the quantity."""
        assert self.event is not None, "the check has an event"
        return observed(candidate.program, candidate.tensors, self.event)[0]

    def adopted(self, failure: Failure, whole: Step) -> Self:
        """This check for a whole step."""
        inputs = frozenset(item.value for item in whole.program.inputs)
        return replace(super().adopted(failure, whole), event=failure, inputs=inputs)

    def allows(self, step: Step) -> bool:
        """True if a step keeps the cause, and computes the quantity from inputs of the whole step; an update is
        computed from parameters and gradients alone."""
        given = {item.value for item in step.program.inputs}
        has_rows = all(
            value in given and any(row in rows for row in _rows_of(step.tensors[value]))
            for value, rows in self.rows.items()
        )
        is_computed = given <= self.inputs and given.isdisjoint(results_of(step.program))
        has_rate = self.rate is not None and self.rate in _rates(step.program)
        return (has_rate or (is_computed and has_rows and self.rate is None)) and super().allows(step)


def missing_cause(snapshot: Snapshot) -> str:
    """Why there is no repro of an event; empty if there can be one, and for every other failure."""
    if snapshot.failure.event is None or odd_rows(snapshot) or jumped_rate(snapshot) is not None:
        return ""
    return f"no row of the batch and no option of step {snapshot.step} stands out"


def odd_rows(snapshot: Snapshot) -> dict[int, _Rows]:
    """The rows that carry an event, of the input that does; of all inputs with such rows if it is not known."""
    event, found = snapshot.failure.event, {}
    if event is None or not (event.source or event.rows):
        return {}
    chosen = rows_in(event.rows) if event.rows else None
    for item in snapshot.program.inputs:
        if item.role == "batch" and event.source in (None, item.name):
            rows = _rows_of(snapshot.tensors[item.value])
            if chosen is None or max(chosen) < len(rows):
                found[item.value] = [rows[number] for number in chosen or range(len(rows))]
    return found


def jumped_rate(snapshot: Snapshot) -> float | None:
    """The learning rate of the step, if it jumped and the event is the update made with it."""
    event = snapshot.failure.event
    if event is None or event.quantity != "update" or rate_jump(snapshot.timeline, event.began_at) is None:
        return None
    return max(_rates(snapshot.program), default=None)


def _rates(program: Program) -> set[float]:
    options = [group for call in program.calls if call.is_optimizer_step for group in call.kwargs["options"]]
    return {float(group["lr"]) for group in options if "lr" in group}


def _rows_of(tensor: torch.Tensor) -> _Rows:
    return [contents(row).tolist() for row in (tensor if tensor.dim() else [tensor])]


NO_VERDICT = "no verdict"
_WORDS = {verdict.value: verdict for verdict in Ruling}
_LEAST_BOUND = 1.0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a user's function is called with."""

    outputs: tuple[torch.Tensor, ...]  # the tensors the program ends with
    loss: torch.Tensor | None  # what its first differentiation starts from, else the single output
    gradients: dict[str, torch.Tensor]  # ``.grad`` of leaf inputs by name
    exception: Exception | None  # what a call raised; then there is nothing else


@dataclass(frozen=True)
class FunctionCheck(Check):
    """``FILE.py:function``. ``largest`` bounds what candidates are given; ``may_raise``: the snapshot raises too."""

    file: Path = Path()
    function: str = ""
    largest: float = float("inf")
    may_raise: bool = False

    @property
    def spec(self) -> str:
        """The file's name and the function; the folder is nobody's business."""
        return f"{self.file.name}:{self.function}"

    def observe(self, candidate: Step) -> Failure | None:
        """Run, and ask the function; that it has no answer is an observation too, as errors do not leave a worker."""
        outcome = outcome_of(candidate)
        error = outcome.exception
        raised = (type(error).__name__, str(error)) if error is not None else None
        try:
            verdict = _verdict_of(variable_of(str(self.file), self.function)(outcome))
        except Exception as trouble:  # the function is anybody's code
            said = f"{type(trouble).__name__}: {trouble}" if str(trouble) else type(trouble).__name__
            return Failure(Phase.FORWARD, FUNCTION, said, NO_VERDICT, exception=raised)
        if verdict is Ruling.PASSES:
            if raised is None:
                return None
            verdict = Ruling.INVALID  # nothing passes that does not run to its end
        return Failure(
            Phase.FORWARD, FUNCTION, self.spec, None if verdict is Ruling.SAME else verdict.value, exception=raised
        )

    def recognises(self, failure: Failure) -> bool:
        """True if the function said so, not that it saw another failure; `UsageError` if it said nothing."""
        if failure.call == NO_VERDICT:
            raise UsageError(
                f"`{self.spec}` has no verdict on the recorded step: {failure.way}",
                hint="it is called with .outputs, .loss, .gradients (by name) and .exception, and returns True, False, "
                f"or one of {', '.join(_WORDS)}",
            )
        return failure.call is None

    def adopted(self, failure: Failure, whole: Step) -> Self:
        """This check for a whole step; what it raised may have any words."""
        made = super().adopted(replace(failure, exception=None), whole)
        return replace(made, largest=_largest_given(whole), may_raise=failure.exception is not None)

    def judge(self, found: Failure | None) -> Ruling:
        """An exception is a crash unless the snapshot raised one too."""
        if found is None:
            return Ruling.PASSES
        is_crash = found.exception is not None and not self.may_raise
        if is_crash or found.call in (NO_VERDICT, Ruling.INVALID.value):
            return Ruling.INVALID
        return super().judge(replace(found, exception=None))

    def allows(self, step: Step) -> bool:
        """Nothing bad is given, nothing too large, and no result."""
        given = {item.value for item in step.program.inputs}
        is_computed = self.may_raise or not given.intersection(results_of(step.program))
        return is_computed and _largest_given(step) <= self.largest and super().allows(step)


def outcome_of(candidate: Step) -> StepOutcome:
    """Run a candidate and gather what a user's function is shown."""
    program = candidate.program
    outcome = run(program, candidate.tensors, keep=frozenset(results_of(program)))
    if outcome.error is not None:
        return StepOutcome((), None, {}, outcome.error)
    names = {item.value: item.name for item in program.inputs}
    outputs = tuple(outcome.values[ref.value] for ref in program.outputs if ref.value in outcome.values)
    place = loss_of(candidate)
    loss = outcome.values.get(place) if place is not None else None
    gradients = {names[value]: outcome.gradients[value] for value in names if value in outcome.gradients}
    return StepOutcome(outputs, loss, gradients, None)


def loss_of(candidate: Step) -> int | None:
    """The value that counts as the loss: the first start of a differentiation, else the single output."""
    program = candidate.program
    if any(call.is_differentiation for call in program.calls):
        ended = replace(program, outputs=())
        return next(iter(results_of(ended)), None)
    return program.outputs[0].value if len(program.outputs) == 1 else None


def _verdict_of(answer: Any) -> Ruling:
    if isinstance(answer, str):
        if answer not in _WORDS:
            raise ValueError(f"it returned {answer!r}")
        return _WORDS[answer]
    is_flag = isinstance(answer, bool) or (isinstance(answer, torch.Tensor) and answer.dtype is torch.bool)
    if is_flag or type(answer).__name__ in ("bool", "bool_"):  # the latter is NumPy's
        return Ruling.SAME if bool(answer) else Ruling.PASSES
    raise ValueError(f"it returned `{type(answer).__name__}`")


def _largest_given(candidate: Step) -> float:
    """The largest finite number among the inputs, at least one, so that ones are always plain enough."""
    return max([_LEAST_BOUND, *(largest_of(candidate.tensors[item.value]) for item in candidate.number_inputs)])
