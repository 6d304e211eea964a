"""Torch's functions by kind, and the arguments at which they, or their derivatives, are not finite.

The tables from which signs, rewrites, the search for dropped values and the texts of an issue take what they know.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

_CONVOLUTIONS = frozenset(["conv_tbc", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))])
_NORMALISATIONS = frozenset(["batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"])
_RECURRENT = frozenset(["gru", "lstm", "rnn_relu", "rnn_tanh"])
_ATTENTION = frozenset(["multi_head_attention_forward", "scaled_dot_product_attention"])
_MATRIX_PRODUCTS = _CONVOLUTIONS | {
    "addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "chain_matmul", "einsum", "linear", "matmul", "mm",
    "multi_dot", "mv", "tensordot",
}  # fmt: skip
WEIGHTED = _MATRIX_PRODUCTS | _RECURRENT  # layers of a network, one behind the other
SPREADING = WEIGHTED | _NORMALISATIONS | _ATTENTION | {f"{name}_cell" for name in _RECURRENT}  # over rows
# What overflows inside of a function whose result would fit: floating-point arithmetic, not a defect.
INNER = {
    **dict.fromkeys(_MATRIX_PRODUCTS | _ATTENTION | {"dot", "rnn_relu", "rnn_tanh"}, "products"),
    **dict.fromkeys(_NORMALISATIONS, "squares"),
    **dict.fromkeys(("norm", "vector_norm", "matrix_norm", "normalize", "mse_loss", "huber_loss", "cdist", "std", "var",
                     "pairwise_distance", "cosine_similarity", "std_mean", "var_mean"), "squares"),
    **dict.fromkeys(("sum", "mean", "nansum", "nanmean", "cumsum", "trace", "l1_loss", "embedding_bag",
                     "segment_reduce"), "sums"),
    **dict.fromkeys((f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)), "sums"),
    **dict.fromkeys(("prod", "cumprod"), "partial products"),
}  # fmt: skip

COMPARISONS: dict[str, Callable[[Any, float], Any]] = {
    "below": operator.lt, "at_most": operator.le, "above": operator.gt, "at_least": operator.ge, "equal": operator.eq,
    "not_equal": operator.ne,
}  # fmt: skip
INFINITE = ("+inf", "-inf")


def number_named(name: str | float, dtype: torch.dtype) -> float:
    """A number of the catalogue: itself, or a word for one that depends on the dtype."""
    if not isinstance(name, str):
        return float(name)
    limits = torch.finfo(dtype)
    eps = 10.0 ** math.ceil(math.log10(limits.eps))  # as people write it
    return {
        "eps": eps, "tiny": float(limits.tiny), "min": float(limits.min), "max": float(limits.max),
        "below_one": 1.0 - eps, "above_minus_one": eps - 1.0,
        "log_max": math.log(limits.max) - 1.0, "log_limit": math.log(limits.max), "log2_limit": math.log2(limits.max),
        "log_2_limit": math.log(limits.max) + math.log(2.0),
        "small": 1e-3 if dtype is torch.float16 else 1e-6,
    }[name]  # fmt: skip


def compare(values: torch.Tensor, wanted: dict[str, Any]) -> torch.Tensor:
    """A mask of the values that compare as wanted: ``below``, ``at_least``, ... a number, or a word for one."""
    dtype = values.dtype if values.is_floating_point() else torch.float32
    mask = torch.ones_like(values, dtype=torch.bool)
    for name, bound in wanted.items():
        mask &= COMPARISONS[name](values, number_named(bound, dtype))
    return mask


@dataclass(frozen=True, slots=True)
class Point:
    """Arguments for which a function, or its derivative, is not finite, but one of ``ways``.

    ``test`` and ``bound`` are as in the catalogue, ``size``: of the magnitude. ``words`` are for titles.
    """

    test: str
    bound: float | str
    words: str = ""
    fact: str = ""
    wanted: str = ""
    ways: tuple[str, ...] = ("nan", *INFINITE)
    size: bool = False

    def places(self, values: torch.Tensor) -> torch.Tensor:
        """True where an argument is one of these."""
        return compare(values.abs() if self.size else values, {self.test: self.bound})


@dataclass(frozen=True)
class Domain:
    """Arguments at which a function, or only its derivative, is not finite; ``harmless`` is outside of both."""

    forward: tuple[Point, ...] = ()
    backward: tuple[Point, ...] = ()
    harmless: float = 1.0
    operand: str = "x"

    @cached_property
    def edge(self) -> Point | None:
        """All points of the function and its derivative as one, ``None`` where they have several bounds."""
        points = (*self.forward, *self.backward)
        tests, bounds = {point.test for point in points}, {point.bound for point in points}
        test = {"below": "at_most", "above": "at_least"}[min(tests - {"equal"})] if len(tests) > 1 else points[0].test
        return Point(test, points[0].bound, size=points[0].size) if len(bounds) == 1 else None

    def places(self, values: torch.Tensor) -> torch.Tensor:
        """True where the function, or its derivative, is not finite."""
        return torch.stack([point.places(values) for point in (*self.forward, *self.backward)]).any(0)


_ABOVE, _INSIDE, _UNIT = "an argument above zero", "an argument inside (-1, 1)", "an argument within (0, 1)"
SLOPE_AT_ZERO = "its derivative is infinite at zero"
# fmt: off
_ROOT = Point("below", 0.0, "for a negative number", "a square root is not defined below zero",
              "an argument that is never negative", ("nan",))
_BEYOND_ONE = Point("above", 1.0, "outside of [-1, 1]", "it is not defined outside of [-1, 1]",
                    "an argument within [-1, 1]", ("nan",), size=True)
_ZERO = Point("equal", 0.0, "at zero", SLOPE_AT_ZERO, "an argument away from zero")
_ONE = Point("equal", 1.0, "at the edge of [-1, 1]", "its derivative is infinite at -1 and 1", _INSIDE, size=True)
_HUGE = Point("above", "log_limit", "where it overflows", "where it overflows its derivative is infinite too",
              "an argument small enough for the dtype, also where the result is not used")
DOMAINS = {
    **dict.fromkeys(("log", "log2", "log10"), Domain((
        Point("below", 0.0, "for a negative number", "a logarithm is not defined below zero", _ABOVE, ("nan",)),
        Point("equal", 0.0, "for zero", "the logarithm of zero is -inf", _ABOVE, ("-inf",))), (_ZERO,))),
    "log1p": Domain((
        Point("below", -1.0, "for a number below -1", "it is not defined below -1", "an argument above -1", ("nan",)),
        Point("equal", -1.0, "for -1", "log(1 + x) is -inf at -1", "an argument above -1", ("-inf",)))),
    "sqrt": Domain((_ROOT,), (_ZERO,)),
    "rsqrt": Domain((_ROOT, Point("equal", 0.0, "for zero", "1 / sqrt(0) is infinite", _ABOVE, ("+inf",))), (_ZERO,)),
    "reciprocal": Domain((
        Point("equal", 0.0, "for zero", "1 / 0 is infinite", "an argument that is never zero", INFINITE),), (_ZERO,)),
    **dict.fromkeys(("acos", "asin"), Domain((_BEYOND_ONE,), (_ONE,), harmless=0.0)),
    "atanh": Domain((_BEYOND_ONE, replace(_ONE, fact="it is infinite there", ways=INFINITE)), (_ONE,), harmless=0.0),
    "acosh": Domain(
        (Point("below", 1.0, "for a number below 1", "it is not defined there", "an argument from 1 on", ("nan",)),),
        (Point("equal", 1.0, "at one", "its derivative is infinite at one", "an argument above one"),), harmless=2.0),
    "logit": Domain((
        Point("below", 0.0, "outside of [0, 1]", "it is not defined there", _UNIT, ("nan",)),
        Point("above", 1.0, "outside of [0, 1]", "it is not defined there", _UNIT, ("nan",)),
        Point("equal", 0.0, "for 0 or 1", "it is infinite there", _UNIT, INFINITE),
        Point("equal", 1.0, "for 0 or 1", "it is infinite there", _UNIT, INFINITE)), harmless=0.5),
    **dict.fromkeys(("exp", "expm1"), Domain((), (_HUGE,), harmless=0.0)),
    "exp2": Domain((), (replace(_HUGE, bound="log2_limit"),), harmless=0.0),
    **dict.fromkeys(("sinh", "cosh"), Domain((), (replace(_HUGE, bound="log_2_limit", size=True),), harmless=0.0)),
    "div": Domain((Point("equal", 0.0),), operand="denominator"),
    "pow": Domain((Point("below", 0.0),), (Point("equal", 0.0),), operand="base"),
}


SPECTRA = {
    "eigh": ("eigenvalues", torch.linalg.eigvalsh),
    "eig": ("eigenvalues", torch.linalg.eigvals),
    **dict.fromkeys(("svd", "svd_lowrank"), ("singular values", torch.linalg.svdvals)),
}


def spectrum_of(name: str, matrix: torch.Tensor) -> str:
    """Why the derivative of a decomposition divides by zero: values are ``zero`` or ``repeated``; else ``""``."""
    if name not in SPECTRA or matrix.dim() < 2:
        return ""
    values = SPECTRA[name][1](matrix)
    if matrix.shape[-1] != matrix.shape[-2] and bool((values == 0).any()):
        return "zero"
    gaps = (values.unsqueeze(-1) - values.unsqueeze(-2)).abs()
    gaps.diagonal(dim1=-2, dim2=-1).fill_(float("inf"))
    return "repeated" if bool((gaps <= 1e-5 * values.abs().max().clamp(min=1e-30)).any()) else ""
