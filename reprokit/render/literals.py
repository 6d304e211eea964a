"""Tensors as Python source: the shortest expression that builds exactly the same bits, dtype and strides.

Every proposal is built next to its text and compared with the tensor bit for bit; the shortest that agrees wins. A
tensor that would need more than `MAX_LITERALS` numbers has no expression and goes to a side file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from reprokit.program.dataflow import same_bits
from reprokit.render.source import constant, float_text, text

MAX_LITERALS = 64
_LARGE = 65_536
_FEW = 4

_INFERRED = {bool: torch.bool, int: torch.int64, float: torch.float32, complex: torch.complex64}


@dataclass(frozen=True, slots=True)
class Literal:
    """A call that builds a tensor, and what follows it, such as ``.t()``."""

    function: str
    arguments: tuple[str, ...]
    suffix: str = ""

    @property
    def text(self) -> str:
        return f"torch.{self.function}({', '.join(self.arguments)}){self.suffix}"

    def requiring_grad(self) -> str:
        """The expression of the same tensor as a leaf that needs a gradient."""
        if self.suffix:
            return f"{self.text}.requires_grad_()"
        return replace(self, arguments=(*self.arguments, "requires_grad=True")).text

    def then(self, suffix: str) -> Literal:
        return replace(self, suffix=self.suffix + suffix)


Proposal = tuple[Literal, Callable[[], torch.Tensor]]


def literal(tensor: torch.Tensor, max_literals: int = MAX_LITERALS) -> Literal | None:
    """The shortest exact expression for ``tensor``, or ``None`` when it takes too many numbers."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return None
    dense = as_given(tensor)
    if dense.is_contiguous():
        return _contiguous(dense, max_literals)
    return _permuted(dense, max_literals)


def as_given(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a program gets for an input: a dense copy that keeps the order of the dimensions in memory."""
    plain = tensor.detach().cpu()
    if plain.layout is not torch.strided or plain.is_quantized:
        return plain.clone()
    return plain.resolve_conj().resolve_neg().clone(memory_format=torch.preserve_format)


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors agree in dtype, shape, strides and bits; any NaN equals any other."""
    return _strides(a) == _strides(b) and same_bits(a, b)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that matter: those of dimensions with more than one element, if there are elements at all."""
    if tensor.numel() == 0:
        return ()
    return tuple(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _permuted(tensor: torch.Tensor, max_literals: int) -> Literal | None:
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    base = tensor.permute(order)
    if not base.is_contiguous():
        return None
    inverse = [order.index(dim) for dim in range(tensor.dim())]
    found = _contiguous(base.contiguous(), max_literals)
    if found is None:
        return None
    moved = [dim for dim, place in enumerate(inverse) if dim != place]
    if tensor.dim() == 2:
        return found.then(".t()")
    if len(moved) == 2:
        return found.then(f".transpose({moved[0]}, {moved[1]})")
    return found.then(f".permute({', '.join(map(str, inverse))})")


def _contiguous(tensor: torch.Tensor, max_literals: int) -> Literal | None:
    best: Literal | None = None
    plain = _plain(tensor) if tensor.numel() > _FEW else None
    if plain is not None:
        return plain
    for proposal, build in _proposals(tensor, max_literals):
        if best is not None and len(proposal.text) >= len(best.text):
            continue
        try:
            agrees = is_same(build(), tensor)
        except (RuntimeError, TypeError, NotImplementedError):  # some dtypes lack some functions
            continue
        if agrees:
            best = proposal
    return best


def _plain(tensor: torch.Tensor) -> Literal | None:
    """``zeros`` or ``ones``, which are clearer than anything shorter."""
    proposals = (_factory(function, tensor) for function in ("zeros", "ones"))
    return next((found for found, build in proposals if is_same(build(), tensor)), None)


def _proposals(tensor: torch.Tensor, max_literals: int) -> Iterator[Proposal]:
    if tensor.numel() == 0:
        yield _factory("empty", tensor)
        return
    if _is_surely_irregular(tensor):
        return
    first = tensor.reshape(-1)[0].item()
    if tensor.numel() <= max_literals:
        yield _listed(tensor)
    if tensor.dim() > 0:
        yield _factory("zeros", tensor)
        yield _factory("ones", tensor)
        yield _full(tensor, first)
    yield from _ranges(tensor)
    yield from _matrices(tensor)


def _is_surely_irregular(tensor: torch.Tensor) -> bool:
    """True if the beginning of a large tensor already shows that no short expression makes it."""
    if tensor.numel() <= _LARGE or (tensor.dim() > 1 and tensor[0].numel() <= MAX_LITERALS):
        return False
    beginning = tensor.reshape(-1)[:256]
    magnitudes = (beginning.abs() if beginning.is_complex() else beginning).double().nan_to_num()
    return len(set(magnitudes.diff().tolist())) > 8


def _factory(function: str, tensor: torch.Tensor) -> Proposal:
    shape = tuple(tensor.shape)
    sizes = tuple(str(size) for size in shape) or ("()",)
    build = getattr(torch, function)
    return Literal(function, (*sizes, *_dtype(tensor, torch.float32))), lambda: build(shape, dtype=tensor.dtype)


def _full(tensor: torch.Tensor, value: Any) -> Proposal:
    shape = tuple(tensor.shape)
    arguments = (str(shape), number_text(value, tensor.dtype), *_dtype(tensor, _INFERRED[type(value)]))
    return Literal("full", arguments), lambda: torch.full(shape, value, dtype=tensor.dtype)


def _listed(tensor: torch.Tensor) -> Proposal:
    values = tensor.tolist()
    first = tensor.reshape(-1)[0].item()
    arguments = (_nested(values, tensor.dtype), *_dtype(tensor, _INFERRED[type(first)]))
    return Literal("tensor", arguments), lambda: torch.tensor(values, dtype=tensor.dtype)


def _ranges(tensor: torch.Tensor) -> Iterator[Proposal]:
    if tensor.numel() < 3 or tensor.dtype == torch.bool or tensor.dtype.is_complex:
        return
    flat = tensor.reshape(-1)
    start, second, last = (flat[place].item() for place in (0, 1, -1))
    if not all(map(math.isfinite, (start, second, last))):
        return
    step, count = second - start, tensor.numel()
    stop = start + step * count
    is_whole = start == int(start) and step == int(step)
    if step == 0 or not is_whole or abs(stop) > 2**53 or last != start + step * (count - 1):
        return
    is_float = tensor.dtype.is_floating_point
    write = str if not is_float or tensor.dtype != torch.float32 else lambda number: float_text(float(number))
    numbers = (int(start), int(stop), int(step))
    shown = (numbers[1:2] if numbers[0] == 0 else numbers[:2]) if step == 1 else numbers
    arguments = (*map(write, shown), *_dtype(tensor, torch.float32 if is_float else torch.int64))
    suffix = "" if tensor.dim() == 1 else f".reshape({', '.join(map(str, tensor.shape))})"
    yield Literal("arange", arguments, suffix), lambda: torch.arange(*numbers, dtype=tensor.dtype).reshape(tensor.shape)


def _matrices(tensor: torch.Tensor) -> Iterator[Proposal]:
    if tensor.dim() != 2 or min(tensor.shape) < 2:
        return
    rows, columns = tensor.shape
    sizes = (str(rows),) if rows == columns else (str(rows), str(columns))
    yield Literal("eye", (*sizes, *_dtype(tensor, torch.float32))), lambda: torch.eye(rows, columns, dtype=tensor.dtype)
    # Causal masks and their like: one value on one side of a diagonal, zero on the other.
    for side, corner in (("tril", tensor[-1, 0]), ("triu", tensor[0, -1])):
        filled = corner.expand(tensor.shape).contiguous()
        full = _plain(filled) or _full(filled, corner.item())[0]
        for diagonal in (0, 1, -1):
            suffix = f".{side}({diagonal or ''})"

            def build(side: str = side, diagonal: int = diagonal, corner: torch.Tensor = corner) -> torch.Tensor:
                made: torch.Tensor = getattr(corner.expand(tensor.shape).clone(), side)(diagonal)
                return made

            yield full.then(suffix), build


def _dtype(tensor: torch.Tensor, inferred: torch.dtype) -> tuple[str, ...]:
    return () if tensor.dtype == inferred else (f"dtype={tensor.dtype}",)


def _nested(values: Any, dtype: torch.dtype) -> str:
    if isinstance(values, list):
        return f"[{', '.join(_nested(value, dtype) for value in values)}]"
    return number_text(values, dtype)


def number_text(value: Any, dtype: torch.dtype) -> str:
    """The shortest text of a number that becomes the same bits in this dtype."""
    if isinstance(value, float):
        return float_text(_shortest(value, dtype))
    if isinstance(value, complex):
        part = torch.float64 if dtype == torch.complex128 else torch.float32
        return text(constant(complex(_shortest(value.real, part), _shortest(value.imag, part))))
    return repr(value)


def _shortest(value: float, dtype: torch.dtype) -> float:
    if value == 0 or value in (float("inf"), float("-inf")) or value != value:
        return value
    for digits in range(1, 17):
        shorter = float(f"{value:.{digits}g}")
        if torch.tensor(shorter, dtype=torch.float64).to(dtype).item() == value:
            return shorter
    return value
