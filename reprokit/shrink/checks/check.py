"""What a check is: it runs a step, knows its failure again by `Failure.key`, and says which steps may be run at all.

No input may be bad that was not bad in the snapshot, or every search ends with a NaN that is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from typing import Self

import torch

from reprokit.grammar import Later, Line, Name
from reprokit.locate.failure import Failure
from reprokit.locate.spelling import constant_ways
from reprokit.locate.ways import MINUS, NAN, PLUS, ways_of
from reprokit.own_work import ignored_warnings
from reprokit.program.ir import Phase
from reprokit.program.step import Step

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
    """What made two failures the same, in words, and the user's check if there was one."""

    phase: Phase
    kind: Name
    call: Name | None = None
    backward_node: Later[Name] = None
    input: Later[Name] = None
    drop: Later[Name] = None
    exception: Later[Line] = None
    check: Later[Line] = None


@dataclass(frozen=True)
class Check(ABC):
    """``wanted`` is the failure in question, ``None`` until it was seen; `adopted` gives a check that knows it.

    ``given`` is in which ways what the snapshot was given is bad; nothing else may be bad in a ``forbidden`` way.
    """

    wanted: Failure | None = None
    given: Given = frozenset()
    forbidden: frozenset[str] = ALL_WAYS

    @abstractmethod
    def recognises(self, failure: Failure) -> bool:
        """True if a failure is of the kind that this check is about."""

    @property
    @abstractmethod
    def spec(self) -> str:
        """The check as it is written on the command line."""

    @abstractmethod
    def observe(self, step: Step) -> Failure | None:
        """Run a step."""

    def __call__(self, step: Step) -> Failure | None:
        """Observe in silence and with gradients on."""
        with ignored_warnings(), torch.enable_grad():
            return self.observe(step)

    def adopted(self, failure: Failure, whole: Step) -> Self:
        """This check for the failure of a whole step."""
        given = given_by(whole)
        return replace(self, wanted=failure, given=given, forbidden=ALL_WAYS - {way for _, way in given})

    def judge(self, found: Failure | None) -> Ruling:
        """Whether a run showed the failure; an exception that is not the failure is a crash."""
        if found is None:
            return Ruling.PASSES
        if self.wanted is not None and found.key() == self.wanted.key():
            return Ruling.SAME
        return Ruling.INVALID if found.kind.raises else Ruling.OTHER

    def allows(self, step: Step) -> bool:
        """True if nothing is bad in a forbidden way that was not so in the snapshot; incoming gradients are finite."""
        gradients = {item.value for item in step.program.inputs if item.role == "gradient"}
        return not any(
            value in gradients or (way in self.forbidden and (value, way) not in self.given)
            for value, way in given_by(step)
        )

    def signed(self) -> Signed:
        """What has to stay the same, as a reduction keeps it."""
        key, failure = self.failure.key(), self.failure
        exception = failure.exception[0] if failure.exception is not None else None
        check = None if self.spec == failure.kind.check else self.spec  # the default for the snapshot's kind
        return Signed(key.phase, key.kind, failure.call, key.backward_node, key.input, key.drop, exception, check)

    @property
    def failure(self) -> Failure:
        """The failure in question; raises `LookupError` before it was seen."""
        if self.wanted is None:
            raise LookupError("the check has not seen its failure yet")
        return self.wanted


def given_by(step: Step) -> Given:
    """The ways in which inputs and constants are bad: of an input by its value number, of constants by the function."""
    inputs = ((item.value, way) for item in step.program.inputs for way in ways_of(step.tensors[item.value]))
    constants = ((call.target, way) for call in step.program.calls for way in constant_ways(call))
    return frozenset((*inputs, *constants))
