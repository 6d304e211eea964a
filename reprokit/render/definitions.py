"""The results that functions are defined to return at the edges of their domain, over the operands of a call.

Functions of one argument are data (`locate/domains.py`), and so are the others, by the signs of the catalogue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from reprokit.locate.calls import Slot, short_name
from reprokit.locate.domains import DOMAINS, INFINITE, SLOPE_AT_ZERO, SPECTRA, spectrum_of
from reprokit.locate.failure import Failure
from reprokit.locate.scene import ObservedCall, Scene
from reprokit.locate.signs import edges, labels, operands, seen
from reprokit.program.interpreter import bind_arguments
from reprokit.program.ir import Program, Ref, iter_refs
from reprokit.shrink.exact import OriginCall


class Defect(Enum):
    """The cause of a failure: ``DEFINED`` if the function is defined to give it, ``BETTER`` if its definition gives a
    finite number that fits the dtype, ``OPEN`` if float64 is not finite either and no rule says why."""

    DEFINED = "defined"
    BETTER = "better"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Edge:
    """The explanation of a failure.

    ``words`` go into a title, behind "log returns nan". ``fact`` is a sentence about the function without its
    ends, ``wanted`` what a finite result takes. ``values`` are the operands in question, and ``subject`` what of them.
    ``is_forward_finite``: True if a gradient is nan or inf and the forward result is finite.
    """

    words: str
    fact: str
    wanted: str
    values: tuple[int, ...] = ()
    subject: str = "values"
    verdict: Defect = Defect.DEFINED
    is_forward_finite: bool = True


def scene_of(origin: OriginCall, failure: Failure) -> Scene:
    """The origin alone, as the signs of the catalogue read it."""
    call, is_step = origin.call, origin.call.is_optimizer_step
    args, kwargs = bind_arguments(call, origin.given) if not is_step else ((), {})
    made = (ref.value for ref in iter_refs(call.kwargs["params"] if is_step else call.outputs))
    results = {value: origin.made[value] for value in made if value in origin.made}
    observed = ObservedCall(call, args, kwargs, results)
    return Scene(Program((call,), ()), {}, replace(failure, call_index=0), seen={0: observed})


_MODULES_OF_SIGNS = (edges, labels, operands)  # each registers its own
_INDEFINITE = "inf - inf and 0 * inf are NaN"
_NEVER_ZERO = "a divisor that is never zero"
_ANY = ("nan", *INFINITE)
_NO_SCORE = "a row in which every score is -inf holds nothing to normalise, so exp(-inf) / sum is 0 / 0"
_ALL_SCORES = ("softmax", "log_softmax")
_DEVIATIONS = ("std", "var", "std_mean", "var_mean")
_LOSSES = ("cross_entropy", "nll_loss", "kl_div", "binary_cross_entropy_with_logits")
_ZERO: Mapping[str, Any] = {"equal": 0.0}
_INFINITE: Mapping[str, Any] = {"size": True, "equal": math.inf}


@dataclass(frozen=True, slots=True)
class Definition:
    """A result that some functions are defined to give where the origin shows a sign.

    ``of_derivative``: of the function's derivative, or of either with ``None``. The rest is that of an `Edge`, with
    ``operands`` by the part they play.
    """

    calls: Sequence[str]
    words: str
    fact: str
    wanted: str
    sign: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ways: Sequence[str] = _ANY
    operands: Sequence[Slot] = ("x",)
    of_derivative: bool | None = False
    subject: str = "values"

    def edge(self, scene: Scene) -> Edge | None:
        """The edge of a failure that is as defined."""
        failure = scene.failure
        if short_name(scene.origin.call) not in self.calls or failure.way not in self.ways:
            return None
        is_meant = self.of_derivative in (None, failure.is_derivative)
        if not is_meant or seen(scene, self.sign, **self.parameters) is None:
            return None
        fact = with_zero(self.fact, failure) if self.of_derivative else self.fact
        return Edge(self.words, fact, self.wanted, _values(scene, *self.operands), self.subject)


_DEFINITIONS = (
    Definition(("div",), "for a divisor of zero", "its derivatives are infinite", _NEVER_ZERO,
               "has", {"operand": "denominator", **_ZERO}, operands=("denominator",), of_derivative=True),
    Definition(("div",), "for 0 / 0", "0 / 0 is NaN", _NEVER_ZERO,
               "meet", {"numerator": _ZERO, "denominator": _ZERO}, ("nan",), ("denominator",)),
    Definition(("div",), "for inf / inf", "inf / inf is NaN", "finite operands",
               "meet", {"numerator": _INFINITE, "denominator": _INFINITE}, ("nan",), ("numerator", "denominator")),
    Definition(("div",), "for a divisor of zero", "a number divided by zero is infinite", _NEVER_ZERO,
               "meet", {"numerator": {"not_equal": 0.0}, "denominator": _ZERO}, INFINITE, ("denominator",)),
    Definition(("pow",), "at zero", SLOPE_AT_ZERO, "a base away from zero",
               "meet", {"base": _ZERO, "exponent": {"below": 1.0, "not_equal": 0.0}}, operands=("base",),
               of_derivative=True),
    Definition(("pow",), "for a negative base", "a negative number has no real power with a fractional exponent",
               "a base that is never negative", "is_negative_to_a_fraction", ways=("nan",), operands=("base",)),
    Definition(("pow",), "for zero with a negative exponent", "0 to a negative power is infinite",
               "a base that is never zero", "meet", {"base": _ZERO, "exponent": {"below": 0.0}}, INFINITE, ("base",)),
    *(Definition(calls, "for a fully masked row", fact, "a finite score in every row",
                 "has_row_of", {"value": -math.inf}, of_derivative=None)
      for calls, fact in ((_ALL_SCORES, _NO_SCORE),
                          (("logsumexp",), "where every score is -inf the sum is zero, whose logarithm is -inf"))),
    *(Definition(calls, "for an empty tensor", fact, "at least one element", "reduces_nothing", subject="shape")
      for calls, fact in ((("mean", "nanmean"), "a mean over no elements is 0 / 0"),
                          (_DEVIATIONS, "no elements have no mean to deviate from"),
                          (("logsumexp",), "a sum of nothing is zero, whose logarithm is -inf"))),
    Definition(_DEVIATIONS, "for a single element",
               "with the default correction it divides by n - 1, which is zero for one element",
               "two elements or more", "reduces_one", subject="shape"),
    *(Definition(_LOSSES, "with a logit of -inf", fact, "finite logits wherever the target has weight",
                 "has", {"equal": -math.inf}, ways)
      for ways, fact in ((("nan",), _INDEFINITE),
                         (INFINITE, "a class whose logit is -inf has probability zero, and giving it any weight makes "
                                    "the loss infinite"))),
    Definition(("cross_entropy", "nll_loss"), "when every target is ignored", "a mean over no targets is 0 / 0",
               "at least one target that counts", "ignores_all_targets", operands=("y",)),
    Definition(("ctc_loss",), "for a target longer than its input",
               "a target has no alignment with an input that is shorter than the target and its repeats, so the loss "
               "is inf",
               "inputs at least as long as their targets with a blank between repeats, or `zero_infinity=True`",
               "target_is_longer", ways=("+inf",), operands=("input_lengths", "target_lengths")),
    Definition(("weight_norm",), "for a row of zeros", "g * v / ||v|| is 0 / 0 where v is zero",
               "a weight without rows of zeros", "weight_row_is_zero", ways=("nan",)),
)  # fmt: skip


def defined_edge(scene: Scene) -> Edge | None:
    """The edge of a failure that the function is defined to give by what it was given alone."""
    defined = (definition.edge(scene) for definition in _DEFINITIONS)
    last = _repeated_eigenvalues if scene.failure.is_derivative else _infinite_operand
    return _elementwise(scene) or next(filter(None, defined), None) or last(scene)


def _elementwise(scene: Scene) -> Edge | None:
    domain, x, failure = DOMAINS.get(short_name(scene.origin.call)), scene.tensor_if_given("x"), scene.failure
    if domain is None or domain.operand != "x" or x is None or x.is_complex():
        return None
    for point in domain.backward if failure.is_derivative else domain.forward:
        if failure.way in point.ways and bool(point.places(x).any()):
            return Edge(point.words, with_zero(point.fact, failure), point.wanted, _values(scene, "x"))
    return None


def with_zero(fact: str, failure: Failure) -> str:
    """The fact, with the product of an infinite derivative and a gradient of zero."""
    return f"{fact}, and 0 * inf is NaN" if failure.is_derivative and failure.way == "nan" else fact


def _values(scene: Scene, *operands: Slot) -> tuple[int, ...]:
    """The value numbers of operands of the origin; a number has none."""
    found = (scene.recorded_if_given(operand) for operand in operands)
    return tuple(dict.fromkeys(argument.value for argument in found if isinstance(argument, Ref)))


def _repeated_eigenvalues(scene: Scene) -> Edge | None:
    name, x = short_name(scene.origin.call), scene.tensor_if_given("x")
    spectrum = spectrum_of(name, x) if x is not None and x.numel() else ""
    if spectrum == "zero":
        fact = "its derivative divides by the singular values of a matrix that is not square"
        return Edge("for a singular value of zero", fact, "a matrix of full rank", _values(scene, "x"))
    if spectrum != "repeated":
        return None
    what = SPECTRA[name][0]
    fact = f"its derivative divides by the differences of {what}, and is documented to be unstable when two agree"
    return Edge(f"for repeated {what}", fact, f"a matrix with distinct {what}", _values(scene, "x"))


def _infinite_operand(scene: Scene) -> Edge | None:
    """The last rule before those that need another run."""
    call = scene.origin.call
    pairs = zip(iter_refs((call.args, call.kwargs)), scene.arguments(), strict=False)
    infinite = (ref.value for ref, tensor in pairs if bool(tensor.to_dense().isinf().any()))
    found = next(infinite, None) if scene.failure.way == "nan" else None
    return Edge("with an infinite operand", _INDEFINITE, "finite operands", (found,)) if found is not None else None
