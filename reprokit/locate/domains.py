"""Torch's functions by kind, and the arguments at which they, or their derivatives, are not finite.

The tables from which signs, rewrites, the search for dropped values and the texts of an issue take what they know.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from reprokit import native

_CONVOLUTIONS = frozenset(["conv_tbc", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))])
_NORMALISATIONS = frozenset(["batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"])
_RECURRENT = frozenset(["gru", "lstm", "rnn_relu", "rnn_tanh"])
_ATTENTION = frozenset(["multi_head_attention_forward", "scaled_dot_product_attention"])
_MATRIX_PRODUCTS = _CONVOLUTIONS | {
    "addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "chain_matmul", "einsum", "linear", "matmul", "mm",
    "multi_dot", "mv", "tensordot",
}  # fmt: skip
_CELLS = frozenset(f"{name}_cell" for name in _RECURRENT)
SPREADING = _MATRIX_PRODUCTS | _RECURRENT | _NORMALISATIONS | _ATTENTION | _CELLS  # over rows

COMPARISONS: dict[str, Callable[[Any, float], Any]] = {
    "below": operator.lt, "at_most": operator.le, "above": operator.gt, "at_least": operator.ge, "equal": operator.eq,
    "not_equal": operator.ne,
}  # fmt: skip


def number_named(name: str | float, dtype: torch.dtype) -> float:
    """A number of a rule: itself, or a word for one that depends on the dtype."""
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
    dtype = values.dtype if native.is_floating_point(values) else torch.float32
    mask = native.ones_like(values, dtype=torch.bool)
    for name, bound in wanted.items():
        mask &= COMPARISONS[name](values, number_named(bound, dtype))
    return mask


@dataclass(frozen=True, slots=True)
class Point:
    """Arguments for which a function, or its derivative, is not finite."""

    test: str  # and ``bound``: as in `compare`
    bound: float | str
    size: bool = False  # those of this magnitude

    def places(self, values: torch.Tensor) -> torch.Tensor:
        """True where an argument is one of these."""
        return compare(native.abs(values) if self.size else values, {self.test: self.bound})


@dataclass(frozen=True, slots=True)
class Domain:
    """Arguments at which a function, or only its derivative, is not finite; ``harmless`` is outside of them."""

    points: tuple[Point, ...]
    harmless: float = 1.0
    operand: str = "x"

    def places(self, values: torch.Tensor) -> torch.Tensor:
        """True where the function, or its derivative, is not finite."""
        return native.any(native.stack([point.places(values) for point in self.points]), 0)


_NEGATIVE, _ZERO = (Point("at_most", 0.0),), (Point("equal", 0.0),)
_UNIT = (Point("at_least", 1.0, size=True),)
DOMAINS = {
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt"), Domain(_NEGATIVE)),
    "log1p": Domain((Point("at_most", -1.0),)),
    "reciprocal": Domain(_ZERO),
    **dict.fromkeys(("acos", "asin", "atanh"), Domain(_UNIT, harmless=0.0)),
    "acosh": Domain((Point("at_most", 1.0),), harmless=2.0),
    "logit": Domain((*_NEGATIVE, Point("at_least", 1.0)), harmless=0.5),
    **dict.fromkeys(("exp", "expm1"), Domain((Point("above", "log_limit"),), harmless=0.0)),
    "exp2": Domain((Point("above", "log2_limit"),), harmless=0.0),
    **dict.fromkeys(("sinh", "cosh"), Domain((Point("above", "log_2_limit", size=True),), harmless=0.0)),
    "div": Domain(_ZERO, operand="denominator"),
    "pow": Domain(_NEGATIVE, operand="base"),
}


SPECTRA = {
    "eigh": ("eigenvalues", native.eigvalsh),
    "eig": ("eigenvalues", native.eigvals),
    **dict.fromkeys(("svd", "svd_lowrank"), ("singular values", native.svdvals)),
}


def spectrum_of(name: str, matrix: torch.Tensor) -> str:
    """Why the derivative of a decomposition divides by zero: values are ``zero`` or ``repeated``; else ``""``."""
    if name not in SPECTRA or native.dim(matrix) < 2:
        return ""
    values = SPECTRA[name][1](matrix)
    if matrix.shape[-1] != matrix.shape[-2] and bool(native.any(values == 0)):
        return "zero"
    gaps = native.abs(native.unsqueeze(values, -1) - native.unsqueeze(values, -2))
    native.fill_(native.diagonal(gaps, dim1=-2, dim2=-1), float("inf"))
    return (
        "repeated" if bool(native.any(gaps <= 1e-5 * native.clamp(native.max(native.abs(values)), min=1e-30))) else ""
    )
