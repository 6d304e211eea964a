"""What a rule is: one thing that is known to make a training step go wrong, its words, and what to try against it.

Begin with `Rule`, and with a row of one of the tables, such as

    Rule("log-of-zero", "The logarithm of zero",
        phases="forward", calls="log log2 log10 xlogy", is_local=True, when=[has("logarithm", equal=0.0)],
        why="The logarithm of zero is `-inf`.", seen=["{count} of {total} arguments are exactly zero"],
        advice="Clamp the argument away from zero, or work with logarithms from the start.",
        fixes=[Fix("clamp the argument of {call} away from zero", clamp("logarithm", min="eps"))])

A rule holds functions of a scene: predicates, which return the numbers that the texts are worded with, and edits. Both
return ``None`` where they do not apply. With further arguments they are made by `of_scene`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from reprokit.locate.spelling import short_name
from reprokit.program.step import Step
from reprokit.rules.scene import Scene

T = TypeVar("T")
P = ParamSpec("P")
Numbers = dict[str, Any]
CONFIDENCES = ("certain", "likely", "possible")
TIERS = ("origin", "context", "general")


@dataclass(frozen=True, slots=True)
class OfScene(Generic[T]):
    """A function of a scene with its other arguments, which a rule can hold and compare."""

    function: Callable[..., T]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, scene: Scene) -> T:
        return self.function(scene, *self.args, **self.kwargs)

    @property
    def __name__(self) -> str:
        return self.function.__name__


def of_scene(function: Callable[Concatenate[Scene, P], T]) -> Callable[P, OfScene[T]]:
    """``function`` without its first argument, the scene, which comes later."""

    def wait(*args: P.args, **kwargs: P.kwargs) -> OfScene[T]:
        return OfScene(function, args, kwargs)

    return wait


def asked(function: Callable[[Scene], T | None], scene: Scene) -> T | None:
    """``function`` of a scene; ``None`` also where the origin does not have the arguments that it asks for, or has them
    in a form that it does not know, say of other shapes."""
    try:
        return function(scene)
    except (RuntimeError, LookupError, TypeError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Edited:
    """A step after an edit."""

    step: Step
    # Single calls were edited, and all others are the very same `Call` objects.
    is_local: bool = True


@dataclass(frozen=True, slots=True)
class Fix:
    """An edit to try, in words. ``{call}`` is the origin, ``{optimizer}`` its class."""

    text: str
    edit: OfScene[Edited | None]
    # Its Python where no line of the user's shows it, as with the options of an optimizer
    code: str = ""

    def words_for(self, scene: Scene) -> tuple[str, str]:
        """The sentence and the code, with the names of the step in them."""
        name = short_name(scene.call) if scene.call is not None else "the input"
        optimizer = scene.call.target.split(".")[-2] if scene.call is not None else ""
        return self.text.format(call=name), self.code.format(call=name, optimizer=optimizer)


@dataclass(frozen=True, slots=True)
class Rule:
    """One mechanism: what matches, what is said of it, what it shows, and what is tried.

    ``why``, ``seen`` and ``advice`` are templates over the numbers of the predicates ``when``.
    """

    name: str
    title: str
    _: KW_ONLY

    # All predicates have to hold. Kinds, phases and calls are words with spaces between them; none means any.
    when: Sequence[Callable[[Scene], Numbers | None]]
    kinds: str = "nan inf"
    phases: str = ""
    calls: str = ""
    # The predicates look at the origin's operands only, so that the rule is part of what a failure is.
    is_local: bool = False

    why: str
    # The evidence, a line each
    seen: Sequence[str]
    advice: str
    # What the function takes for a finite result, where it is defined to return the nan or inf
    expected: str = ""
    # Places below https://github.com/
    links: str = ""
    # An issue is one for PyTorch
    is_of_torch: bool = False

    confidence: str = "certain"
    # "context": the story before the origin; "general": fits so much that it is the last resort
    tier: str = "origin"
    # The class of a cause that the rule shows once a fix has helped; "" where its operands may be anybody's
    cause: str = "numerics"
    # A predicate has found the operand that the exception is about: no change has to show it.
    is_shown: bool = False

    fixes: Sequence[Fix] = ()
    # The change with which a predicate has run the step, and it did not fail
    trial: str = ""
