"""The event of a run as a check: a quantity of the step, such as its loss, is not below the recorded threshold.

Any large number exceeds a threshold, so a candidate has to keep the cause as well: an odd row of the batch with its
recorded values, or the learning rate that jumped. Without such a cause there is no search and no repro.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from reprokit.locate.differences import results_of
from reprokit.locate.failure import Failure
from reprokit.locate.quantity import observed
from reprokit.locate.signs.off_course import rate_jump
from reprokit.program.ir import Program
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.signature import SignatureCheck
from reprokit.snapshot.format import Snapshot

_Rows = list[list[float]]


@dataclass(frozen=True)
class PredicateCheck(SignatureCheck):
    """An event of a run. ``event`` is the failure with the predicate; ``rows`` are the odd rows of inputs of the batch
    by value number, ``rate`` is the learning rate that jumped. ``given`` are the inputs of the whole step."""

    event: Failure | None = None
    rows: Mapping[int, _Rows] = field(default_factory=dict)
    rate: float | None = None
    given: frozenset[int] = frozenset()

    def recognises(self, failure: Failure) -> bool:
        """True if it is an event."""
        return failure.event is not None

    @property
    def spec(self) -> str:
        """The kind of the event."""
        assert self.event is not None, "the check has an event"
        return self.event.kind

    def observe(self, candidate: Candidate) -> Failure | None:
        """Run, and measure the quantity."""
        assert self.event is not None, "the check has an event"
        return observed(candidate.program, candidate.tensors, self.event)[0]

    def adopted(self, failure: Failure, whole: Candidate) -> Self:
        """This check for a whole step."""
        given = frozenset(item.value for item in whole.program.inputs)
        return replace(super().adopted(failure, whole), event=failure, given=given)

    def is_clean(self, candidate: Candidate) -> bool:
        """True if a candidate keeps the cause, and computes the quantity from inputs of the whole step; an update is
        computed from parameters and gradients alone."""
        given = {item.value for item in candidate.program.inputs}
        has_rows = all(
            value in given and any(row in rows for row in _rows_of(candidate.tensors[value]))
            for value, rows in self.rows.items()
        )
        is_computed = given <= self.given and given.isdisjoint(results_of(candidate.program))
        has_rate = self.rate is not None and self.rate in _rates(candidate.program)
        return (has_rate or (is_computed and has_rows and self.rate is None)) and super().is_clean(candidate)


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
    chosen = _numbers(event.rows) if event.rows else None
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
    return [row.detach().to_dense().flatten().tolist() for row in (tensor if tensor.dim() else [tensor])]


def _numbers(words: str) -> list[int]:
    """The numbers in ``rows 0-3, 6``."""
    found: list[int] = []
    for stretch in words.partition(" ")[2].split(","):
        first, _, last = stretch.strip().partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
