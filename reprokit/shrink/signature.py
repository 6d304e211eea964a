"""What makes two failures the same: kind, origin, phase, and for gradients the node and which input's gradient.

Without the origin in it every reducer slips: "the output is not finite" is kept by a program of no calls and a NaN
input. Two more guards are needed for the same reason: no input may be bad that was not bad in the snapshot
(`is_clean`), and an exception keeps its type and the wording of its message, numbers aside.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Self

import torch

from reprokit.errors import ReprokitError
from reprokit.grammar import Line, Name, left_out
from reprokit.locate.failure import ACCUMULATION, EXCEPTION, Failure, wording_of
from reprokit.locate.spelling import constant_ways
from reprokit.locate.ways import MINUS, NAN, PLUS, ways_of
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Phase, Program, Ref
from reprokit.program.step import Step
from reprokit.shrink.leaves import leaves
from reprokit.shrink.recording import record

Given = frozenset[tuple[int | str, str]]
ALL_WAYS = frozenset({NAN, PLUS, MINUS})


class Ruling(Enum):
    """What a check can say. A crash is never taken for the bug, nor another failure for this one."""

    SAME = "same"
    OTHER = "other"
    PASSES = "passes"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Signed:
    """A signature in words: what made two failures the same, and the user's check if there was one."""

    phase: Phase
    kind: Name
    call: Name | None = None
    backward_node: Name | None = left_out()
    input: Name | None = left_out()
    drop: Name | None = left_out()
    exception: Name | None = left_out()
    check: Line | None = left_out()


@dataclass(frozen=True, slots=True)
class Signature:
    """What must stay the same. ``call`` is ``None`` when an input was bad already; then ``input`` says which.

    ``position`` is where in the origin's arguments the input with the bad gradient stands, or the one it wrote into.
    ``drop`` is ``given`` or ``made`` if the forward pass drops NaN values: they came with the data, or the origin made
    them. The node that multiplies zero with a NaN that the origin made may be another one in a smaller program.
    ``cause`` is kind and call of the bad value behind an exception, ``spectrum`` as in `Failure`. ``operands``: how
    many tensors a call reads that lets a bad one through (`Failure.marker`); ``nan[0]`` shows nothing of ``nan[mask]``.
    """

    phase: Phase
    kind: str
    call: str | None = None
    backward_node: str | None = None
    position: tuple[Any, ...] | None = None
    input: str | None = None
    exception: tuple[str, str] | None = None
    drop: str | None = None
    is_overflow: bool = False
    spectrum: str = ""
    cause: tuple[str, str | None] | None = None
    operands: int | None = None

    @classmethod
    def of(cls, failure: Failure, program: Program) -> Signature:
        """The signature of a failure of ``program``."""
        drop = ("given" if failure.drop.is_given else "made") if failure.drop else None
        return cls(
            failure.phase,
            failure.kind,
            failure.call,
            failure.backward_node if drop != "made" else None,
            _position(failure, program) if drop != "made" else None,
            failure.input_name if failure.call is None else None,
            wording_of(*failure.exception) if failure.exception else None,
            drop,
            failure.is_overflow,
            failure.spectrum,
            (failure.cause.kind, failure.cause.call) if failure.cause is not None else None,
            len(program.calls[failure.call_index or 0].input_refs()) if failure.through is not None else None,
        )

    def summary(self) -> Signed:
        """The signature as a reduction keeps it."""
        exception = self.exception[0] if self.exception is not None else None
        return Signed(self.phase, self.kind, self.call, self.backward_node, self.input, self.drop, exception)


def same(first: Signature, second: Signature) -> bool:
    """True if two failures are the same one.

    Gradients that overflow where they are added up have no origin among the calls; any reader of the leaf is named.
    """
    if first.backward_node == second.backward_node == ACCUMULATION:
        first, second = (replace(signature, call=ACCUMULATION, position=None) for signature in (first, second))
    return first == second


def is_clean(program: Program, tensors: Tensors, signature: Signature, ways: frozenset[str], given: Given) -> bool:
    """True if no input or constant is bad in the ways of the failure, other than those that the snapshot was ``given``.

    An incoming gradient has to be finite. A new NaN is never fine; a new infinity of another way than the failure's,
    such as a mask filled with ``-inf``, is a legal value.
    """
    forbidden = {NAN} if signature.phase == Phase.BACKWARD else {NAN, *ways}
    gradients = (item for item in program.inputs if item.role == "gradient")
    if any(ways_of(tensors[item.value]) for item in gradients):
        return False
    return not any(way in forbidden for _, way in given_by(program, tensors) - given)


def given_by(program: Program, tensors: Tensors) -> Given:
    """The ways in which inputs and constants are bad: of an input by its value number, of constants by the function."""
    inputs = ((item.value, way) for item in program.inputs for way in ways_of(tensors[item.value]))
    constants = ((call.target, way) for call in program.calls for way in constant_ways(call))
    return frozenset((*inputs, *constants))


def ways_given(program: Program, tensors: Tensors) -> frozenset[str]:
    """All ways in which anything that the program is given is bad."""
    return frozenset(way for _, way in given_by(program, tensors))


def _position(failure: Failure, program: Program) -> tuple[Any, ...] | None:
    if failure.phase not in (Phase.FORWARD, Phase.BACKWARD) or failure.call_index is None or failure.value is None:
        return None
    call = program.calls[failure.call_index]
    if call.is_differentiation or (failure.phase == Phase.FORWARD and failure.value in call.output_refs()):
        return None  # in a second derivative its arguments are no operands; a result has no place among them
    return next((path for path, leaf in leaves(call) if leaf == Ref(failure.value)), None)


@dataclass(frozen=True)
class SignatureCheck(ABC):
    """A check that knows its failure by a signature. ``forbidden`` are the ways in which no input may be bad.

    A check without a signature has not seen its failure yet; `adopted` gives one that has.
    """

    wanted: Signature | None = None
    forbidden: frozenset[str] = frozenset()

    @property
    def is_settled(self) -> bool:
        """True if the failure in question is known."""
        return self.wanted is not None

    def complaint(self, observation: Failure | None) -> ReprokitError | None:
        """What to say when a run of the snapshot shows that the check itself does not work."""
        return None

    @abstractmethod
    def recognises(self, failure: Failure) -> bool:
        """True if a failure is of the kind that this check is about."""

    @property
    @abstractmethod
    def spec(self) -> str:
        """The check as it is written on the command line."""

    @abstractmethod
    def observe(self, candidate: Step) -> Failure | None:
        """Run a candidate."""

    def __call__(self, candidate: Step) -> Failure | None:
        """Observe in silence and with gradients on."""
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            return self.observe(candidate)

    @property
    def signature(self) -> Signature:
        """What must stay the same."""
        if self.wanted is None:
            raise LookupError("the check has not seen its failure yet")
        return self.wanted

    def adopted(self, failure: Failure, whole: Step) -> Self:
        """This check for the failure of a whole program."""
        forbidden = ALL_WAYS - _ways_that_reach(whole, failure)
        return replace(self, wanted=Signature.of(failure, whole.program), forbidden=forbidden)

    def judge(self, observation: Failure | None, candidate: Step) -> Ruling:
        """Compare signatures; an exception that is not the failure is a crash."""
        if observation is None:
            return Ruling.PASSES
        if self.wanted is not None and same(Signature.of(observation, candidate.program), self.wanted):
            return Ruling.SAME
        return Ruling.INVALID if observation.kind == EXCEPTION else Ruling.OTHER

    def is_clean(self, candidate: Step) -> bool:
        """True if no input or constant is bad in a forbidden way."""
        return not ways_given(candidate.program, candidate.tensors) & self.forbidden

    def summary(self) -> Signed:
        """The signature, and the check that it belongs to."""
        return replace(self.signature.summary(), check=self.spec)


def _ways_that_reach(whole: Step, failure: Failure) -> frozenset[str]:
    """Ways in which the snapshot's inputs are bad, or what its origin call reads."""
    ways = ways_given(whole.program, whole.tensors)
    if failure.call_index is None:
        return ways
    recording = record(whole, frozenset({failure.call_index}))
    return ways.union(*(ways_of(tensor) for tensor in recording.inputs.values()))
