"""The kinds of failures: a class for each, with what follows from a kind for locating and reducing.

Begin with `FailureKind`. ``failure.kind`` is a value of one of its classes, and as a text the word
that files and JSON have: of a loss that is NaN it is ``NonFinite("nan")``, equal to ``"nan"``.

    class            words             phase      the same if equal              reduced with
    NonFinite        nan, inf          any        origin, node, operand, rule    nonfinite
    ExceptionRaised  exception         any        call, wording, cause           exception
    Event            spike, explosion  any        call                           its threshold
    ScaleFell        scale             any        call                           its threshold
    Dead             dead              backward   call                           its threshold
    Unlearned        silent            backward   call                           nothing
    Mismatch         mismatch          any        call                           its reference
    RanksDiffer      mismatch          optimizer  call                           nothing
    OwnCheck         function          forward    the function's verdict         the function
    Healthy          none              forward    call                           nothing

The first two begin at a call or an input, to which a step is cut; of the others a cut keeps parts
of the step (`Failure.is_of_whole_step`).

How people read about a kind is in `render/kinds.py`; a test demands that each class is there too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from reprokit.errors import NotReproduced, ReprokitError, UsageError

if TYPE_CHECKING:
    from reprokit.locate.failure import Failure
    from reprokit.program.ir import Phase

ACCUMULATION = "AccumulateGrad"  # the node that adds a gradient into a leaf


@dataclass(frozen=True, slots=True)
class Key:
    """What makes two failures the same.

    Without the origin in it every reducer slips: "the output is not finite" is kept by a program of
    no calls and a NaN input.
    """

    phase: Phase
    kind: str
    call: str | None = None
    backward_node: str | None = None
    operand: str | None = None
    # An input that was bad already.
    input: str | None = None
    exception: tuple[str, str] | None = None
    # Where dropped NaN values came from.
    drop: str | None = None
    # FailureKind and call of the bad value behind an exception.
    cause: tuple[str, str | None] | None = None
    rule: str | None = None


class FailureKind(str):
    """A kind of failure; as a text its word in files."""

    # All words of this class in files.
    words: ClassVar[tuple[str, ...]] = ()
    # The `--check` of a reduction that is given none.
    check: ClassVar[str] = "nonfinite"
    # A value of the program is NaN or infinite.
    is_nonfinite: ClassVar[bool] = False
    # A call raised an exception.
    raises: ClassVar[bool] = False
    # Two results that should be equal are not.
    compares: ClassVar[bool] = False
    # False for a step that was asked for.
    is_failure: ClassVar[bool] = True
    # A number is unusual, and a change of the steps before can make it usual.
    is_unusual: ClassVar[bool] = False
    # The steps before are compared with the one that fails, to find what has led to it.
    has_cause: ClassVar[bool] = False
    # Those steps, played again, show the failure, so that a change of them can be tried.
    is_played: ClassVar[bool] = True
    # The end of the sentence "with this change ...".
    mended: ClassVar[str] = "finite"

    @property
    def is_local(self) -> bool:
        """True if it begins at a call, or at an input that is bad from the start."""
        return self.is_nonfinite or self.raises

    @property
    def is_infinite(self) -> bool:
        """True for an infinity, which large numbers lead to."""
        return self == "inf"

    def key(self, failure: Failure) -> Key:
        """What another failure has to have in common with this one to be the same."""
        return Key(
            failure.phase,
            self,
            failure.call,
            operand=failure.operand,
            input=failure.input_name if failure.call is None else None,
            exception=failure.wording,
        )

    def has_rules(self, failure: Failure) -> bool:
        """True if the rules of a diagnosis may fit."""
        return self.is_local

    def refusal(self, failure: Failure) -> ReprokitError | None:
        """Why the run of a program in one process cannot show it."""
        return None


class NonFinite(FailureKind):
    """NaN or infinity: begins at a call, or in an input that was bad already."""

    words = ("nan", "inf")
    is_nonfinite = True
    has_cause = True

    def key(self, failure: Failure) -> Key:
        """The origin, and the operand and the rule by which it fails.

        Gradients that overflow where they are added up have no origin among the calls: any reader
        of the leaf is named. The node that multiplies zero with a NaN that the origin made may be
        another one in a smaller program.
        """
        key = replace(super().key(failure), backward_node=failure.backward_node, rule=failure.rule)
        if key.backward_node == ACCUMULATION:
            key = replace(key, call=ACCUMULATION, operand=None, input=None)
        if failure.drop is None:
            return key
        if failure.drop.is_given:
            return replace(key, drop="given")
        return replace(key, drop="made", backward_node=None, operand=None)


class ExceptionRaised(FailureKind):
    """A call raised, or code around the calls did."""

    words = ("exception",)
    check = "exception"
    raises = True
    has_cause = True
    mended = "the call returns"

    def key(self, failure: Failure) -> Key:
        """The call, the wording of the exception, and the bad value that it is about."""
        cause = failure.cause
        key = super().key(failure)
        return key if cause is None else replace(key, cause=(cause.kind, cause.call))


class Event(FailureKind):
    """A quantity of the step, such as its loss, is out of what is usual; every value is finite."""

    words: ClassVar[tuple[str, ...]] = ("spike", "explosion")
    is_unusual = True
    has_cause = True

    def has_rules(self, failure: Failure) -> bool:
        """True: the call that an event begins with has rules as well."""
        return True


class ScaleFell(Event):
    """The factor of a grad scaler falls over many steps."""

    words = ("scale",)
    has_cause = False


class Dead(Event):
    """A parameter gets no gradient any more."""

    words = ("dead",)
    is_unusual = False
    is_played = False


class Unlearned(FailureKind):
    """Something is not learned, which ``failure.way`` says in words."""

    words = ("silent",)

    def has_rules(self, failure: Failure) -> bool:
        """True if a call is known that keeps the gradient back."""
        return failure.call is not None

    def refusal(self, failure: Failure) -> ReprokitError | None:
        """No value is bad, unless an event was found with it."""
        if failure.event is not None:
            return None
        hint = "`reprokit show` has the step"
        return NotReproduced(f"no value of the step is bad: {failure.way}", hint=hint)


class Mismatch(FailureKind):
    """A result differs from that of a reference: float64, a compiler, another device or way."""

    words: ClassVar[tuple[str, ...]] = ("mismatch",)
    check = "mismatch"
    compares = True


class RanksDiffer(Mismatch):
    """A parameter that every rank should hold a copy of differs between ranks."""

    # The word of `Mismatch`; a failure with a difference between ranks is one.
    words = ()

    def refusal(self, failure: Failure) -> ReprokitError | None:
        """There is one process."""
        return NotReproduced(
            "the parameters of the ranks differ, and one process cannot show that",
            hint="`reprokit show` has the step, the parameter and the ranks",
        )


class OwnCheck(FailureKind):
    """A function of the user's says that a step fails; ``failure.call`` is another verdict."""

    words = ("function",)


class Healthy(FailureKind):
    """No failure: the step was asked for with ``--at-step``."""

    words = ("none",)
    is_failure = False

    def refusal(self, failure: Failure) -> ReprokitError | None:
        """There is nothing to show."""
        return UsageError(
            "the step is healthy and was saved with `--at-step`, so there is no failure to shrink",
            hint="`reprokit trace FILE` shows its tensors; `--check` looks for a failure of your own",
        )


KINDS = (
    NonFinite,
    ExceptionRaised,
    Event,
    ScaleFell,
    Dead,
    Unlearned,
    Mismatch,
    RanksDiffer,
    OwnCheck,
    Healthy,
)
_BY_WORD = {word: kind(word) for kind in KINDS for word in kind.words}
WORDS = tuple(_BY_WORD)
NAN, INF, EXCEPTION, DEAD, SILENT, MISMATCH, FUNCTION, HEALTHY = map(
    _BY_WORD.__getitem__,
    ("nan", "inf", "exception", "dead", "silent", "mismatch", "function", "none"),
)
RANKS = RanksDiffer(MISMATCH)


def kind_named(word: str) -> FailureKind:
    """The kind of a word in a file."""
    return _BY_WORD[word]
