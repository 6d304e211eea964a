"""Mismatch: the results of a candidate differ from those of a reference (`compare.difference`).

A reference is the same program in float64 or on the other kind of device (compiled: `compare.compiled`). Each runs a
candidate twice, as it is and in the other way, on the same inputs. Random calls run as they were recorded in both, on
inputs cast for them, because another dtype or device draws other numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from reprokit.compare.difference import OTHER_WAY, Reference, first_difference
from reprokit.locate.failure import Failure
from reprokit.locate.kinds import MISMATCH
from reprokit.program.convert import default_dtype, in_dtype, on_device, require_cuda
from reprokit.program.interpreter import Outcome, run
from reprokit.program.step import HasProgram, Step
from reprokit.shrink.checks.check import Check, Ruling


@dataclass(frozen=True, slots=True)
class Double:
    """The same calls in float64."""

    @property
    def name(self) -> str:
        """``fp64``."""
        return "fp64"

    def require(self) -> None:
        """Every machine can."""

    def pair(self, step: HasProgram, keep: frozenset[int]) -> tuple[Outcome, Outcome]:
        """As it is, and in float64."""
        actual = run(step.program, step.tensors, keep=keep)
        other = in_dtype(step, torch.float64)
        with default_dtype(torch.float64):
            return actual, run(other.program, other.tensors, keep=keep)


@dataclass(frozen=True, slots=True)
class OtherDevice:
    """The same calls on CUDA when they ran on the CPU, and the other way round."""

    @property
    def name(self) -> str:
        """``cpu-cuda``."""
        return "cpu-cuda"

    def require(self) -> None:
        """Look for a GPU."""
        require_cuda()

    def pair(self, step: HasProgram, keep: frozenset[int]) -> tuple[Outcome, Outcome]:
        """On CUDA, and on the CPU."""
        first, second = (on_device(step, kind) for kind in ("cuda", "cpu"))
        return run(first.program, first.tensors, keep=keep), run(second.program, second.tensors, keep=keep)


@dataclass(frozen=True, slots=True)
class OtherWay:
    """The first output of the program; the last one is the same result in another way, or the other way round.

    A candidate keeps the ``structure``: its calls, and what each is given. One side could become a constant otherwise.
    """

    structure: tuple[Any, ...] | None = None

    @property
    def name(self) -> str:
        """``other``."""
        return OTHER_WAY

    def require(self) -> None:
        """Every machine can."""

    def pair(self, step: HasProgram, keep: frozenset[int]) -> tuple[Outcome, Outcome]:
        """Both from one run."""
        if self.structure is not None and structure_of(step) != self.structure:
            return Outcome(), Outcome()
        outcome = run(step.program, step.tensors, keep=keep)
        first, second = (ref.value for ref in step.program.outputs)
        if outcome.error is not None:
            return outcome, outcome
        return Outcome({second: outcome.values[second]}), Outcome({second: outcome.values[first]})


def structure_of(step: HasProgram) -> tuple[Any, ...]:
    """The functions that a program calls, the names of their options, and where their tensors come from. Of a program
    whose first output is recorded, also the numbers of its inputs: another input has another result."""
    program = step.program
    made: dict[int, Any] = {item.value: item.name for item in program.inputs}
    recorded = [item.value for item in program.inputs if program.outputs and item.value == program.outputs[0].value]
    found: list[Any] = [Step(program, step.tensors).digest] if recorded else []
    for index, call in enumerate(program.calls):
        found.append((call.target, tuple(call.kwargs), tuple(made.get(value) for value in call.input_refs())))
        made.update((value, (index, place)) for place, value in enumerate(call.output_refs()))
    return (*found, tuple(made.get(ref.value) for ref in program.outputs))


@dataclass(frozen=True)
class MismatchCheck(Check):
    """A difference from a reference, which ``departure`` has in words. ``way`` of its failures is the reference's name,
    and whether numbers differ or one side has a NaN or infinity in their place: these are different failures."""

    reference: Reference = field(default_factory=Double)
    way: str = ""
    departure: str | None = None

    def recognises(self, failure: Failure) -> bool:
        """True if results differ."""
        return failure.kind.compares

    @property
    def spec(self) -> str:
        """``mismatch:fp64``."""
        return f"{MISMATCH}:{self.reference.name}"

    def observe(self, candidate: Step) -> Failure | None:
        """Compare the whole program, then single calls."""
        target = self.wanted.call if self.wanted is not None else None
        is_whole = self.wanted is not None and target is None
        found = first_difference(candidate, self.reference, self.way or None, is_whole=is_whole, target=target)
        return replace(found, departure=self.departure) if found is not None and self.departure else found

    def adopted(self, failure: Failure, whole: Step) -> Self:
        """This check for the failure of a whole program."""
        reference = OtherWay(structure_of(whole)) if isinstance(self.reference, OtherWay) else self.reference
        return replace(super().adopted(failure, whole), way=failure.way, reference=reference)

    def judge(self, found: Failure | None) -> Ruling:
        """Like any check, and different numbers stay different numbers."""
        ruling = super().judge(found)
        is_other_way = found is not None and found.way != self.way
        return Ruling.OTHER if ruling is Ruling.SAME and is_other_way else ruling
