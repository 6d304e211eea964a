"""What people read about a failure, and what its repro asserts: a class of words for each kind.

Begin with `Words`, whose members are the places where a kind is described; `words_of` gives the
words of a failure, `parts_of` its repro. Of a softmax over a masked row they are:

    short       nan
    headline    torch.softmax returns nan                   the title, and the header of repro.py
    phase       in the forward pass
    observed    `torch.softmax` returns nan, although none of its inputs is nan.
    expected    A finite result.
    statement   assert not torch.isnan(p).any(), "p is nan"       made in `render/check.py`

What follows from a kind for locating and reducing is in `locate/kinds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from reprokit.locate import kinds
from reprokit.locate.failure import Failure, Predicate
from reprokit.locate.kinds import FailureKind
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Phase, Program
from reprokit.render import check
from reprokit.render.check import ScriptParts
from reprokit.render.wording import event_words, message, short_call, written
from reprokit.words import number_words

WriteParts = Callable[[Program, Tensors, Failure, Collection[int]], ScriptParts]
OUTSIDE = "outside of any module"
_CUSTOM = "the backward of a custom autograd function"
# The optimizer's step and a custom backward call functions that a forward pass calls too.
_CALLED_IN = {Phase.FORWARD: "", Phase.BACKWARD: _CUSTOM, Phase.OPTIMIZER: "the optimizer step"}
_DEFINITIONS = {
    "update": "the norm of the change of all parameters over their norm before the step",
    "gradient norm": "the L2 norm of all gradients together, before clipping",
}
# What a mismatch differs from, in a title and in a sentence.
_REFERENCES = {
    "fp64": ("float64", "in float64"),
    "compile": ("eager", "in eager mode"),
    "cpu-cuda": ("the other device", "on the other device"),
    "other": ("the same result made in another way", "made in the other way"),
}


@dataclass(frozen=True)
class Words:
    """The words of a failure of any kind; a kind with other ones has them in a class below."""

    failure: Failure
    # The failure is that of a smaller program, and so has another loss.
    is_reduced: bool = False
    # The bad value is a constant in the call itself.
    is_constant: bool = False

    @property
    def short(self) -> str:
        """``nan``, ``-inf``, the exception's type, or a number of an event."""
        event = self.failure.event
        if event is not None:
            return number_words(event.value)
        return {"+inf": "inf", "-inf": "-inf"}.get(self.failure.way, "nan")

    @property
    def headline(self) -> str:
        """One line without punctuation at its end."""
        failure, call = self.failure, short_call(self.failure)
        if failure.call is None:
            return f"{call} is {self.short} before the first call"
        if failure.is_derivative:
            return f"gradient of {call} is {self.short}"
        if failure.is_of_optimizer:
            return f"{call} makes a parameter {self.short}"
        return f"{call} {self._does}"

    @property
    def _does(self) -> str:
        """``returns nan``, of a call."""
        name = written(self.failure)
        return f"writes {self.short} into {name}" if name else f"returns {self.short}"

    @property
    def observed(self) -> str:
        """What happened, in a sentence."""
        failure, name, bad = self.failure, self._origin, self.short
        if failure.call is None:
            return f"The input {name} is already {bad} before the first call reads it."
        if failure.through is not None:
            return (
                f"{name} lets the {bad} of the input `{failure.marker}` through. "
                "In healthy steps before, which are given such values too, it drops them."
            )
        if failure.drop is not None:
            return self._dropped()
        if failure.is_derivative:
            node = _in_node(failure)
            return f"The backward pass of {name}{node} turns a finite gradient into {bad}."
        if failure.is_of_optimizer:
            return f"{name} turns a finite parameter with a finite gradient into {bad}."
        return self._result()

    def _result(self) -> str:
        """Of a call that returns or writes a bad value."""
        failure, name = self.failure, self._origin
        target = written(failure)
        does = f"writes {self.short} into `{target}`" if target else self._does
        if failure.call is not None and failure.call.endswith(".__setitem__"):
            name, does = "The index assignment", f"writes {self.short}"
        why = f"although none of its inputs is {failure.way or self.short}"
        if self.is_constant:
            why = f"because the code gives it {self.short}"
        place = _CALLED_IN[failure.phase]
        inside = f", called in {place}," if place else ""
        return f"{name}{inside} {does} {why}."

    def _dropped(self) -> str:
        """Of NaN values that a later call drops: the loss is finite, a gradient is not."""
        failure, drop = self.failure, self.failure.drop
        assert drop is not None, "a call drops them"
        node = _in_node(failure)
        if failure.input_name:
            holder = f"`{failure.input_name}` holds"
        else:
            holder = "The data holds" if drop.is_given else f"`{failure.call}` returns"
        if drop.is_given:
            node = f" of `{failure.call}`{node}"
        return (
            f"{holder} nan for elements that `{drop.call}` drops, so the loss is finite. "
            f"The backward pass{node} multiplies their gradient of zero with that nan, "
            "and the gradient becomes nan."
        )

    @property
    def expected(self) -> str:
        """The expectation as a sentence, without a claim that was not checked."""
        if self.failure.call is None:
            return "Inputs are free of such values, or are rejected where they enter."
        if self.failure.is_derivative:
            return "A finite gradient."
        if self.failure.in_update:
            return "A finite parameter after the step."
        return "A finite result."

    @property
    def phase(self) -> str:
        """The part of the step that fails."""
        if self.failure.is_of_whole_step and self.failure.event is None:
            return "over the whole step"
        if self.failure.in_update:
            return "in the optimizer step"
        return f"in the {self.failure.phase} pass"

    @property
    def _origin(self) -> str:
        """The call in full, or the input, as inline code."""
        return f"`{self.failure.call or short_call(self.failure)}`"


class NonFiniteWords(Words):
    """``softmax returns nan``."""

    @property
    def phase(self) -> str:
        """A backward pass calls functions only in a custom autograd function."""
        failure = self.failure
        if failure.in_backward and failure.call and not failure.is_derivative:
            return f"in {_CUSTOM}"
        return super().phase


class RaisedWords(Words):
    """``linalg.cholesky raises LinAlgError``."""

    @property
    def short(self) -> str:
        """The type."""
        return self.failure.exception[0] if self.failure.exception is not None else "nan"

    @property
    def headline(self) -> str:
        """The call and the type."""
        return f"{short_call(self.failure)} raises {self.short}"

    @property
    def observed(self) -> str:
        """The same, with the message."""
        said = message(self.failure)
        return f"{self._origin} raises `{self.short}`{f': {said}' if said else ''}."

    expected = "The call returns."

    @property
    def phase(self) -> str:
        """It may come long before the model is called, such as from the data."""
        if self.failure.in_forward and self.failure.module is None:
            return OUTSIDE
        return super().phase


class EventWords(Words):
    """``spike: the loss was 1.2e+09, 1e+08 times its median of 12.3``."""

    @property
    def headline(self) -> str:
        """The numbers alone, of a reduced program its own."""
        failure, event = self.failure, self._event
        if self.is_reduced:
            value = f"the {event.quantity} of this reduced program is {self.short}"
            usual = ""
            if event.usual is not None:
                usual = f"; its median in training was {number_words(event.usual)}"
            return f"{failure.kind}: {value}{usual}"
        # The rows and inputs are facts of their own.
        bare = replace(event, source=None, rows=None, samples=None, largest=None)
        return f"{failure.kind}: {event_words(replace(failure, event=bare))}"

    @property
    def observed(self) -> str:
        """The numbers, what they are, and the first call that is off."""
        failure, event = self.failure, self._event
        sentences = [f"In training step {event.began_at} {event_words(failure)}."]
        known = _DEFINITIONS.get(event.quantity)
        if known:
            sentences.append(f"The {event.quantity} is {known}.")
        if failure.call is not None and event.quantity != "update":
            compared = f"compared with step {event.reference_step}"
            sentences.append(f"The first call whose result is off, {compared}, is `{failure.call}`.")
        return " ".join(sentences)

    @property
    def expected(self) -> str:
        """The limit that the quantity has passed."""
        event = self._event
        if event.quantity == "share of zeros":
            name = f"`{event.source}`" if event.source else "the parameter"
            return f"A gradient that is not zero everywhere reaches {name}."
        limit = number_words(event.threshold, 4)
        usual = ""
        if event.usual is not None:
            usual = f", whose median before was {number_words(event.usual)}"
        quantity = event.quantity
        return f"The {quantity} is below {limit}, the limit of what was usual in this run{usual}."

    @property
    def _event(self) -> Predicate:
        assert self.failure.event is not None, "`words_of` has other words without one"
        return self.failure.event


class DeadWords(EventWords):
    """``dead: the gradient of `0.weight` is missing or zero from step 20 on``."""

    @property
    def headline(self) -> str:
        """With the parameter, in a reduced program too."""
        return f"{self.failure.kind}: {event_words(self.failure)}"

    @property
    def observed(self) -> str:
        """The same, with the call that keeps the gradient back."""
        words = event_words(self.failure).replace("the", "The", 1)
        return f"{words}. `{self.failure.call}` lets no gradient through."


class UnlearnedWords(Words):
    """``no gradient has reached `0.weight` in 20 steps``."""

    @property
    def headline(self) -> str:
        """What capture said."""
        return self.failure.way

    @property
    def observed(self) -> str:
        """The same in a sentence."""
        return f"Something is not learned: {self.failure.way}."

    @property
    def expected(self) -> str:
        """That of an event, where one was found with it."""
        if self.failure.event is not None:
            return EventWords(self.failure).expected
        return super().expected


class MismatchWords(Words):
    """``exp differs from float64``."""

    short = "different"

    @property
    def headline(self) -> str:
        """The call, or the program, and what it differs from."""
        failure, reference = self.failure, self.failure.reference[0]
        what = "the result"
        if reference == "compile":
            what = "compiled code"
        elif failure.call is not None:
            what = short_call(failure)
        if failure.departure:
            return f"{what} differs between two runs"
        other = _REFERENCES.get(reference, (failure.way, ""))[0]
        return f"{what} differs from {other}"

    @property
    def observed(self) -> str:
        """Both ways to get the result."""
        failure, reference = self.failure, self.failure.reference[0]
        if reference == "other":
            found = "Two ways to make one result from the same inputs, which should agree, make"
            there = ""
            if failure.departure:
                there = f" In the runs, {self._origin}: {failure.departure}."
            return f"{found} different numbers.{there}"
        what = self._origin if failure.call is not None else "The program"
        way = "compiled" if reference == "compile" else "as it is"
        other = _REFERENCES.get(reference, ("", ""))[1]
        return f"{what} gives another result {way} than {other}."

    expected = "Equal results, within the tolerances of `torch.testing.assert_close`."

    @property
    def phase(self) -> str:
        """A program that makes a result in two ways has a forward pass only."""
        if self.failure.is_of_whole_step and self.failure.way == "other":
            return "in the forward pass"
        return super().phase


class RanksWords(MismatchWords):
    """``rank 1 differs from rank 0 in `0.weight` ``: a row of its own has that, and no repro."""

    @property
    def phase(self) -> str:
        """The optimizer whose step it was, or none, where a line is known."""
        failure = self.failure
        if failure.call is not None:
            return super().phase
        if failure.site is None:
            return "the call is not known"
        return "in the optimizer step" if failure.in_update else "outside of an optimizer"


class OwnCheckWords(Words):
    """``is_bad holds``."""

    short = "reported"

    @property
    def headline(self) -> str:
        """The function's name."""
        return f"{self.failure.check[1]} holds"

    @property
    def observed(self) -> str:
        """What the function was called with."""
        function = self.failure.check[1]
        return f"The check `{function}` holds for what the program leaves behind."

    expected = "The check does not hold."


# The words of each kind, and what writes its repro.
ROWS: dict[type[FailureKind], tuple[type[Words], WriteParts]] = {
    kinds.NonFinite: (NonFiniteWords, check.of_value),
    kinds.ExceptionRaised: (RaisedWords, check.of_value),
    kinds.Event: (EventWords, check.of_event),
    kinds.ScaleFell: (EventWords, check.of_event),
    kinds.Dead: (DeadWords, check.of_event),
    kinds.Unlearned: (UnlearnedWords, check.of_event),
    kinds.Mismatch: (MismatchWords, check.of_mismatch),
    kinds.RanksDiffer: (RanksWords, check.of_mismatch),
    kinds.OwnCheck: (OwnCheckWords, check.of_own_check),
    kinds.Healthy: (Words, check.of_value),
}


def words_of(failure: Failure, *, is_reduced: bool = False, is_constant: bool = False) -> Words:
    """The words of a failure."""
    words, _ = _row_of(failure)
    return words(failure, is_reduced, is_constant)


def parts_of(program: Program, tensors: Tensors, failure: Failure, aside: Collection[int]) -> ScriptParts:
    """The script that runs a program and asserts that its failure is not there.

    Inputs in ``aside`` go to a file beside it. Raises `NotReproduced`.
    """
    _, write = _row_of(failure)
    return write(program, tensors, failure, aside)


def _row_of(failure: Failure) -> tuple[type[Words], WriteParts]:
    if failure.event is None and isinstance(failure.kind, kinds.Event):
        # A dead layer whose step could not be played again has no numbers (`early_warning.py`).
        return ROWS[kinds.Healthy]
    return ROWS[type(failure.kind)]


def _in_node(failure: Failure) -> str:
    """`` (SqrtBackward0)``, the autograd node of a backward pass."""
    return f" ({failure.backward_node})" if failure.backward_node else ""
