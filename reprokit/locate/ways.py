"""In which ways a tensor is not finite: NaN, +inf, -inf are three different things.

A float32 sum screens (it is finite for nearly every healthy tensor and costs one pass); a hit is confirmed element by
element, because a sum of finite values may overflow by itself.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from reprokit import native, torch_private

NAN, PLUS, MINUS = "nan", "+inf", "-inf"
HALVES = (torch.float16, torch.bfloat16)


class Ways(frozenset[str]):
    """The ways in which a tensor is bad, with the index of the first element and the number of elements of each."""

    first: dict[str, tuple[int, ...]]
    count: dict[str, int]
    num_elements: int

    @classmethod
    def of(cls, first: dict[str, tuple[int, ...]], count: dict[str, int], num_elements: int) -> Ways:
        made = cls(first)
        made.first, made.count, made.num_elements = first, count, num_elements
        return made


CLEAN = Ways.of({}, {}, 0)


def ways_of(tensor: torch.Tensor) -> Ways:
    """The ways in which ``tensor`` is not finite; empty for finite, integer and empty tensors."""
    whole = _real_values(tensor)
    if whole is None or is_finite_sum(values := _once(whole)):
        return CLEAN
    first, count = dict[str, tuple[int, ...]](), dict[str, int]()
    times = native.numel(whole) // native.numel(values)
    for way in (NAN, PLUS, MINUS):
        mask = bad_mask(values, way)
        number = int(native.item(native.count_nonzero(mask)))
        if number:
            first_bad = native.argmax(native.to(native.reshape(mask, -1), torch.uint8))
            place = place_of(int(native.item(first_bad)), mask.shape)
            first[way] = place[: native.dim(tensor)]
            count[way] = number * times
    return Ways.of(first, count, native.numel(tensor))


def place_of(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The indexes of an element by its number; `torch.unravel_index` imports sympy, seconds in every forked child."""
    place: list[int] = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        place.insert(0, rest)
    return tuple(place)


def _once(values: torch.Tensor) -> torch.Tensor:
    """Every element once: an expanded view may have 2**51 elements of which one is stored."""
    for dim, stride in enumerate(native.stride(values)):
        if stride == 0:
            values = native.narrow(values, dim, 0, 1)
    return values


def is_bad(tensor: torch.Tensor) -> bool:
    """True if a tensor holds a NaN or an infinity."""
    if native.numel(tensor) == 1 and not native.is_complex(tensor) and tensor.layout is torch.strided:
        return not math.isfinite(native.item(tensor))
    return bool(ways_of(tensor))


def bad_tensor(tensors: Iterable[torch.Tensor]) -> int | None:
    """The position of the first tensor that holds a NaN or an infinity, or ``None``.

    One fused norm over all of them screens; a finite tensor whose norm overflows is a false hit and is cleared.
    """
    candidates = [local_part(tensor) for tensor in tensors]
    if not candidates or _are_finite(candidates):
        return None
    return next((number for number, tensor in enumerate(candidates) if ways_of(tensor)), None)


def _are_finite(tensors: list[torch.Tensor]) -> bool:
    """True if one norm over all tensors is finite; ``False`` also when torch cannot compute it (mixed kinds)."""
    dtype = torch.float32 if tensors[0].dtype in HALVES else None
    has_grad = native.is_grad_enabled()
    try:  # an exception that arrives inside `torch.no_grad` itself would leave gradients off
        torch_private.set_grad_enabled(False)
        norms = torch_private.foreach_norm(tensors, 2, dtype=dtype)
        return math.isfinite(native.item(native.sum(native.stack(list(norms)))))
    except (RuntimeError, NotImplementedError):
        return False
    finally:
        torch_private.set_grad_enabled(has_grad)


def bad_mask(values: torch.Tensor, way: str) -> torch.Tensor:
    """A mask of the elements that are bad in this way."""
    if way == NAN:
        return native.isnan(values)
    return native.eq(values, float("inf") if way == PLUS else float("-inf"))


def is_finite_sum(values: torch.Tensor) -> bool:
    """True if the float32 sum is finite, which means that every element is."""
    dtype = torch.float32 if values.dtype in HALVES else None
    return cmath.isfinite(native.item(native.sum(values, dtype=dtype)))


def largest_finite(tensor: torch.Tensor) -> float:
    """The largest finite magnitude of a floating-point tensor; 0 if no element is finite."""
    values = _real_values(tensor)
    if values is None or native.numel(values) == 0:
        return 0.0
    low, high = map(float, native.aminmax(values))  # NaN where there is one; a fraction of the passes below
    if math.isfinite(low) and math.isfinite(high):
        return max(abs(low), abs(high))
    return float(native.max(native.nan_to_num(native.abs(values), 0.0, 0.0, 0.0)))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a tensor that is spread over processes; any other tensor itself."""
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _real_values(tensor: torch.Tensor) -> torch.Tensor | None:
    if (
        not (native.is_floating_point(tensor) or native.is_complex(tensor))
        or native.numel(tensor) == 0
        or tensor.is_meta
    ):
        return None
    values = local_part(native.detach(tensor))
    if values.layout is not torch.strided:
        values = native.values(native.coalesce(values)) if values.layout is torch.sparse_coo else native.values(values)
    if native.is_complex(values):
        values = native.view_as_real(native.resolve_conj(values))
    return values if native.element_size(values) > 1 else native.float(values)
