"""The failure of a program: its origin, phase and kind, as the rest of reprokit uses it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from reprokit.grammar import Count, Digest, Later, Line, Name, Row, Rows, Text, one_of
from reprokit.locate.kinds import INF, MISMATCH, NAN, RANKS, SILENT, WORDS, FailureKind, Key, kind_named
from reprokit.program.ir import Call, Phase, Program, Site

QUANTITIES = ("loss", "gradient norm", "share of zeros", "update")


@dataclass(frozen=True, slots=True)
class Drop(Row):
    """The call that drops NaN values of the forward pass before the loss."""

    call_index: Count
    call: Name  # its public name
    value: int  # the first that holds them
    is_given: bool  # they came with the data or as a literal, and mark what is missing; else the origin made them


@dataclass(frozen=True, slots=True)
class Predicate:
    """An event of a run as data: the ``quantity`` of a step has a ``value`` that is not below the ``threshold``.

    The quantities are those of `compare.quantity`.
    """

    quantity: Annotated[str, one_of(*QUANTITIES)]
    value: float
    threshold: float
    reference_step: Count  # the last healthy one before it
    began_at: Count
    usual: Later[float] = None  # the median of the steps before
    source: Later[Name] = None  # the input of the step that carries it, if one does
    rows: Later[Rows] = None  # of the batch: ``rows 0-7``
    samples: Later[Line] = None  # of these rows, or the one that carries it: ``samples 12 and 30``
    argument: Later[Name] = None  # of a call: ``target of mse_loss``
    largest: Later[float] = None  # the magnitude of the source or argument
    largest_usual: Later[float] = None  # the same in the reference step

    @property
    def is_complete(self) -> bool:
        """True if ``largest`` comes with what it is compared with, and with a name."""
        return self.largest is None or (self.largest_usual is not None and bool(self.argument or self.source))


@dataclass(frozen=True, slots=True)
class RankDifference:
    """A ``parameter`` that every rank should hold a copy of, and that differs; ``num_parameters`` do in all.

    ``hashes`` and ``largest`` are of the first of ``ranks`` and of ``reference``, ``largest`` of a large parameter in
    its first piece that differs.
    """

    parameter: Name
    num_parameters: Count
    ranks: tuple[Count, ...]
    reference: Count
    num_alike: Count  # ranks that hold the same as the reference
    hashes: tuple[Digest, Digest]
    largest: float | None = None  # absolute difference
    equal_after: Count | None = None  # ``None``: never seen equal
    began_at: Count = 0  # unequal after this step
    is_exact: bool = False  # it differs since that very step
    cause: Line = ""  # as far as the step was played on all ranks


@dataclass(frozen=True, slots=True)
class Failure:
    """The origin of a failure in a program; ``kind`` says what the fields mean (`locate/kinds.py`).

    ``value`` is, for forward, the origin's bad output; for backward, the input of the forward call whose gradient is
    bad; for optimizer, the parameter that turned bad.
    ``marker`` is an input of which healthy steps hold such bad values too, for what is missing: ``call`` drops them
    there and lets them through here. Without a call that is not known, and ``marker`` is ``input_name``.
    """

    phase: Phase
    kind: Annotated[FailureKind, one_of(*WORDS)]
    way: Line = ""  # tells ``+inf`` from ``-inf``; the reference, or the function; what is not learned
    call: Name | None = None  # the origin; ``None`` for an input that was bad already, and for the whole step
    call_index: Count | None = None
    backward_node: Name | None = None
    module: Name | None = None
    site: Site | None = None
    value: int | None = None
    element: tuple[Count, ...] | None = None  # the first bad one of ``value``
    num_bad: Count = 0
    num_elements: Count = 0
    input_name: Name | None = None  # was bad already, or the origin wrote the bad value into it
    exception: tuple[Name, Text] | None = None
    drop: Drop | None = None  # a later call drops NaN values, and the backward pass multiplies zero with them
    is_overflow: Later[bool] = None  # read from files of 0.1.0; `rule` says it now, as for the next one
    spectrum: Later[Annotated[str, one_of("", "zero", "repeated")]] = None
    cause: Failure | None = None  # the origin of the bad value without which the call would not raise
    event: Later[Predicate] = None  # of an `Event`; ``call`` is the first one unlike the last healthy step
    marker: Later[Name] = None
    difference: Later[RankDifference] = None  # between ranks, which one process cannot show
    operand: Later[Line] = None  # the slot of the bad input: ``0``, ``weight``; of a marker: how many are read
    rule: Later[Name] = None  # the local rule that fits, if anybody asked: of the origin's operands only
    departure: Later[Line] = None  # how the result of ``call`` differs between two runs of a step

    def __post_init__(self) -> None:
        """Make a kind of its word, which files have and callers may give."""
        kind = RANKS if self.kind == MISMATCH and self.difference is not None else kind_named(self.kind)
        object.__setattr__(self, "kind", kind)

    def key(self) -> Key:
        """Two failures are the same if their keys are equal."""
        return self.kind.key(self)

    @property
    def wording(self) -> tuple[str, str] | None:
        """Type and first line of the exception, as `wording_of` has them."""
        return wording_of(*self.exception) if self.exception is not None else None

    @property
    def silence(self) -> str:
        """What is not learned, in words; empty for every other failure."""
        return self.way if self.kind == SILENT else ""

    @property
    def in_forward(self) -> bool:
        """True if the forward pass fails."""
        return self.phase == Phase.FORWARD

    @property
    def in_backward(self) -> bool:
        """True if the backward pass fails."""
        return self.phase == Phase.BACKWARD

    @property
    def in_update(self) -> bool:
        """True if the optimizer's step fails."""
        return self.phase == Phase.OPTIMIZER

    @property
    def is_of_optimizer(self) -> bool:
        """True if one of torch's optimizers makes the bad parameter, and not the user's own code for an update."""
        return self.in_update and self.call is not None and self.call.startswith("torch.optim.")

    @property
    def is_bad_gradient(self) -> bool:
        """True if the backward pass makes a bad value; it may raise instead."""
        return self.in_backward and not self.kind.raises

    @property
    def is_derivative(self) -> bool:
        """True if autograd made the bad value: not a call in the backward of a custom autograd function."""
        return self.in_backward and self.backward_node is not None

    @property
    def is_given(self) -> bool:
        """True if an input of the program is bad before the first call reads it."""
        return self.kind.is_nonfinite and self.call is None and self.input_name is not None

    @property
    def through(self) -> int | None:
        """The value in which the origin lets bad values of an input through; `None` for another origin."""
        return self.value if self.marker is not None and self.call is not None else None

    @property
    def reference(self) -> tuple[str, str]:
        """The reference of a mismatch (``fp64``, ``compile``, ``cpu-cuda``), and its option: a compiler's backend."""
        name, _, option = self.way.partition(",")[0].partition(":")
        return name, option

    @property
    def check(self) -> tuple[str, str]:
        """The file and the name of the user's own check, or of the compiler that the user wrote."""
        place = self.reference[1] if self.kind.compares else self.way
        file, _, function = place.rpartition(":")
        return file, function

    @property
    def is_of_whole_step(self) -> bool:
        """True if no single call or input shows it, so that there is no origin to follow it to."""
        begins = self.kind.is_local or self.call is not None or self.input_name is not None
        return self.kind.is_failure and not begins


def wording_of(kind: str, message: str) -> tuple[str, str]:
    """An exception's type and first line without shapes, addresses, numbers and names of types."""
    first = re.sub(r"\b(torch\.)?\w+(Tensor|Type) (?=\[)", "", message.strip().split("\n")[0])
    first = re.sub(r"\b(Complex)?(Double|Float|Half|BFloat16)\b", "#", first)
    first = re.sub(r"\b0x[0-9a-fA-F]+", "#", first)
    first = re.sub(r"[\[(][\d\s,x.-]*[\])]", "#", first)
    return kind, re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", first)


def kind_of(way: str) -> FailureKind:
    """``nan`` or ``inf``."""
    return NAN if way == NAN else INF


def module_of(call: Call) -> str | None:
    """The innermost module a call ran in: its path, a root's class in angle brackets, or ``None`` for the loop
    itself."""
    if not call.scope:
        return None
    level = call.scope[-1]
    return level.path or f"<{level.cls}>"


def is_vacuous(failure: Failure, program: Program) -> bool:
    """True if the program only starts a backward pass from an input that is bad: it shows nothing about the cause."""
    if failure.call is not None or failure.kind.raises or failure.value is None:
        return False
    if any(call.kwargs.get("is_compiled") and failure.value in call.output_refs() for call in program.calls):
        return True
    readers = [call for call in program.calls if failure.value in call.input_refs()]
    return bool(readers) and all(call.is_differentiation for call in readers)


def label_of(call: Call) -> str | None:
    """`module_of` as people read it: with the root's name in front where there are several roots."""
    return call.scope[-1].label if call.scope else None


def root_of(failure: Failure, program: Program) -> str | None:
    """The name of the root in which a step failed, where there are several."""
    scope = program.calls[failure.call_index].scope if failure.call_index is not None else ()
    return (scope[-1].root or None) if scope and failure.module is not None else None
