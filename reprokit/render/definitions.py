"""Rules for the results that functions are defined to return at the edges of their domain, over the operands of a call.

Functions of one argument are data (`locate/domains.py`), the rest one short function each. A rule returns an `Edge` or
``None``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from reprokit.locate.domains import DOMAINS, INFINITE, SLOPE_AT_ZERO, SPECTRA, spectrum_of
from reprokit.locate.failure import Failure
from reprokit.locate.signs.labels import too_long_target
from reprokit.locate.signs.operands import zero_rows
from reprokit.program.ir import Call, Ref, iter_refs
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


@dataclass(frozen=True, slots=True)
class Given:
    """The origin with what it was given and gave: ``args`` and those of ``call`` run in parallel."""

    name: str
    call: Call
    failure: Failure
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[torch.Tensor, ...]
    origin: OriginCall | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return [tensor for tensor in _tensors((self.args, dict(self.kwargs))) if tensor.numel()]

    def option(self, name: str, position: int, default: Any) -> Any:
        """An argument by its name or position."""
        return self.kwargs.get(name, self.args[position] if position < len(self.args) else default)

    def value(self, *positions: int) -> tuple[int, ...]:
        """The value numbers of arguments; a number has none."""
        arguments = [self.call.args[position] for position in positions if position < len(self.call.args)]
        return tuple(dict.fromkeys(argument.value for argument in arguments if isinstance(argument, Ref)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value if value.layout is torch.strided else value.to_dense()
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


Where = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_INDEFINITE = "inf - inf and 0 * inf are NaN"


def _elementwise(given: Given) -> Edge | None:
    domain = DOMAINS.get(given.name)
    if domain is None or domain.operand != "x" or not given.args:
        return None
    if not isinstance(given.args[0], torch.Tensor) or given.args[0].is_complex():
        return None
    for point in domain.backward if given.failure.is_derivative else domain.forward:
        if given.failure.way in point.ways and bool(point.places(given.args[0]).any()):
            return Edge(point.words, with_zero(point.fact, given), point.wanted, given.value(0))
    return None


def with_zero(fact: str, given: Given) -> str:
    """The fact, with the product of an infinite derivative and a gradient of zero."""
    return f"{fact}, and 0 * inf is NaN" if given.failure.is_derivative and given.failure.way == "nan" else fact


def _operands(given: Given) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both operands of a function of two, in a common shape."""
    if len(given.args) < 2 or not all(isinstance(item, (torch.Tensor, int, float)) for item in given.args[:2]):
        return None
    one, other = (torch.as_tensor(item) for item in given.args[:2])
    return tuple(torch.broadcast_tensors(one, other))  # type: ignore[no-untyped-call]


_NEVER_ZERO = "a divisor that is never zero"
_ANY = ("nan", *INFINITE)
# Of a function of two operands: whether of its derivative, in which ways, where, and the edge.
_ARITHMETIC: Mapping[str, Sequence[tuple[bool, Sequence[str], Where, str, str, str, tuple[int, ...]]]] = {
    "div": (
        (True, _ANY, lambda a, b: b == 0, "for a divisor of zero", "its derivatives are infinite", _NEVER_ZERO, (1,)),
        (False, ("nan",), lambda a, b: (a == 0) & (b == 0), "for 0 / 0", "0 / 0 is NaN", _NEVER_ZERO, (1,)),
        (False, ("nan",), lambda a, b: a.isinf() & b.isinf(), "for inf / inf", "inf / inf is NaN", "finite operands",
         (0, 1)),
        (False, INFINITE, lambda a, b: (a != 0) & (b == 0), "for a divisor of zero",
         "a number divided by zero is infinite", _NEVER_ZERO, (1,)),
    ),
    "pow": (
        (True, _ANY, lambda a, b: (a == 0) & (b < 1) & (b != 0), "at zero", SLOPE_AT_ZERO, "a base away from zero",
         (0,)),
        (False, ("nan",), lambda a, b: (a < 0) & (b != b.round()), "for a negative base",
         "a negative number has no real power with a fractional exponent", "a base that is never negative", (0,)),
        (False, INFINITE, lambda a, b: (a == 0) & (b < 0), "for zero with a negative exponent",
         "0 to a negative power is infinite", "a base that is never zero", (0,)),
    ),
}  # fmt: skip


def _arithmetic(given: Given) -> Edge | None:
    operands = _operands(given) if given.name in _ARITHMETIC else None
    for of_derivative, ways, where, words, fact, wanted, places in _ARITHMETIC.get(given.name, ()) if operands else ():
        is_meant = of_derivative == given.failure.is_derivative and given.failure.way in ways
        if operands is not None and is_meant and bool(where(*operands).any()):
            return Edge(words, with_zero(fact, given), wanted, given.value(*places))
    return None


_OVER_ROWS = {
    "softmax": "a row in which every score is -inf holds nothing to normalise, so exp(-inf) / sum is 0 / 0",
    "log_softmax": "a row in which every score is -inf holds nothing to normalise, so exp(-inf) / sum is 0 / 0",
    "logsumexp": "where every score is -inf the sum is zero, whose logarithm is -inf",
}
_DEVIATIONS = frozenset(("std", "var", "std_mean", "var_mean"))
_EMPTY = {
    **dict.fromkeys(("mean", "nanmean"), "a mean over no elements is 0 / 0"),
    **dict.fromkeys(_DEVIATIONS, "no elements have no mean to deviate from"),
    "logsumexp": "a sum of nothing is zero, whose logarithm is -inf",
}


def _masked_row(given: Given) -> Edge | None:
    if given.name not in _OVER_ROWS or not given.tensors:
        return None
    scores = given.tensors[0]
    dim = given.option("dim", 1, -1)
    is_masked = scores == float("-inf")
    if scores.dim():
        is_masked = is_masked.all(dim if isinstance(dim, (int, tuple)) else -1)
    if not bool(is_masked.any()):
        return None
    return Edge("for a fully masked row", _OVER_ROWS[given.name], "a finite score in every row", given.value(0))


def _deviation(given: Given) -> Edge | None:
    if given.name not in _DEVIATIONS or not given.tensors:
        return None
    sizes = tuple(given.tensors[0].shape) or (1,)  # a number takes `dim=0`
    flags = [item for item in given.args[1:] if isinstance(item, bool)]
    is_unbiased = given.kwargs.get("unbiased", flags[0] if flags else True)
    correction = given.kwargs.get("correction", int(is_unbiased))
    dims = given.option("dim", 1, None)
    chosen = [dims] if type(dims) is int else dims if isinstance(dims, (list, tuple)) and dims else range(len(sizes))
    if correction not in (None, 1) or math.prod(sizes[dim] for dim in chosen) != 1:
        return None
    fact = "with the default correction it divides by n - 1, which is zero for one element"
    return Edge("for a single element", fact, "two elements or more", given.value(0), "shape")


def _empty(given: Given) -> Edge | None:
    first = next((item for item in given.args if isinstance(item, torch.Tensor)), None)
    if first is None or first.numel() or given.name not in _EMPTY:
        return None
    return Edge("for an empty tensor", _EMPTY[given.name], "at least one element", given.value(0), "shape")


def _losses(given: Given) -> Edge | None:
    if given.name not in ("cross_entropy", "nll_loss", "kl_div", "binary_cross_entropy_with_logits"):
        return None
    if given.tensors and bool((given.tensors[0] == float("-inf")).any()):
        fact = "a class whose logit is -inf has probability zero, and giving it any weight makes the loss infinite"
        fact = _INDEFINITE if given.failure.way == "nan" else fact
        return Edge("with a logit of -inf", fact, "finite logits wherever the target has weight", given.value(0))
    targets, ignored = given.option("target", 1, None), given.option("ignore_index", 4, -100)
    if not isinstance(targets, torch.Tensor) or targets.is_floating_point() or not bool((targets == ignored).all()):
        return None
    wanted = "at least one target that counts"
    return Edge("when every target is ignored", "a mean over no targets is 0 / 0", wanted, given.value(1))


def _too_long_targets(given: Given) -> Edge | None:
    names = ("targets", "input_lengths", "target_lengths")
    found = [given.option(name, position, None) for position, name in enumerate(names, 1)]
    if given.name != "ctc_loss" or given.failure.way != "+inf" or too_long_target(*found) is None:
        return None
    fact = "a target has no alignment with an input that is shorter than the target and its repeats, so the loss is inf"
    wanted = "inputs at least as long as their targets with a blank between repeats, or `zero_infinity=True`"
    return Edge("for a target longer than its input", fact, wanted, given.value(2, 3))


def _weight_norm(given: Given) -> Edge | None:
    if given.name != "weight_norm" or not given.tensors:
        return None
    if given.failure.way != "nan" or not bool(zero_rows(given.tensors[0], given.option("dim", 2, 0)).any()):
        return None
    fact = "g * v / ||v|| is 0 / 0 where v is zero"
    return Edge("for a row of zeros", fact, "a weight without rows of zeros", given.value(0))


def _repeated_eigenvalues(given: Given) -> Edge | None:
    spectrum = spectrum_of(given.name, given.tensors[0]) if given.tensors else ""
    if spectrum == "zero":
        fact = "its derivative divides by the singular values of a matrix that is not square"
        return Edge("for a singular value of zero", fact, "a matrix of full rank", given.value(0))
    if spectrum != "repeated":
        return None
    what = SPECTRA[given.name][0]
    fact = f"its derivative divides by the differences of {what}, and is documented to be unstable when two agree"
    return Edge(f"for repeated {what}", fact, f"a matrix with distinct {what}", given.value(0))


def _infinite_operand(given: Given) -> Edge | None:
    """The last rule before those that need another run."""
    tensors, refs = _tensors((given.args, given.kwargs)), iter_refs((given.call.args, given.call.kwargs))
    infinite = (ref for ref, tensor in zip(refs, tensors, strict=False) if bool(tensor.isinf().any()))
    found = next(infinite, None) if given.failure.way == "nan" else None
    return Edge("with an infinite operand", _INDEFINITE, "finite operands", (found.value,)) if found else None


FORWARD_RULES = (
    _elementwise, _arithmetic, _masked_row, _empty, _deviation, _losses, _too_long_targets, _weight_norm,
    _infinite_operand,
)  # fmt: skip
BACKWARD_RULES = (_elementwise, _arithmetic, _masked_row, _repeated_eigenvalues)
