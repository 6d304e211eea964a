"""Integers held in tensors that must fit a size: indexes, class labels, lengths of sequences.

Known from the functions that read them, so that they follow when the size shrinks, and so that a candidate in which
they do not fit never costs a check. Some kernels trust them and read foreign memory otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reprokit.program.functions import UnknownFunction, function_named
from reprokit.program.ir import Call, Ref

Tensors = Mapping[int, torch.Tensor]
_IGNORED = -100  # what losses skip unless told otherwise


@dataclass(frozen=True, slots=True)
class Use:
    """The tensor ``value`` holds indexes along one axis of the tensor ``bound``, or lengths up to its size.

    Elements that are ``ignored`` may be anything, none may be ``forbidden``.
    """

    value: int
    bound: int
    axis: int
    is_length: bool = False
    ignored: int | None = None
    forbidden: int | None = None


def uses_of(call: Call, tensors: Tensors) -> list[Use]:
    """What a call takes for indexes and lengths, of tensors that are known."""
    rule = _RULES.get(call.name)
    if rule is None:
        return []
    found = rule(call, _arguments(call), tensors)
    return [use for use in found if use.value in tensors and use.bound in tensors and _is_index(tensors[use.value])]


def fits(calls: Sequence[Call], tensors: Tensors) -> bool:
    """Whether all indexes and lengths are in range, and packed sequences complete."""
    return all(_fits_call(call, tensors) for call in calls)


def numbers_after(use: Use, tensor: torch.Tensor, size: int, indexes: Sequence[int]) -> torch.Tensor:
    """Indexes or lengths for a size of which only ``indexes`` are kept. Numbers that were out of range stay."""
    if use.is_length:
        table = [sum(index < length for index in indexes) for length in range(size + 1)]
    else:
        table = new_numbers(size, indexes)
        table = [number + (number == use.forbidden and old != use.forbidden) for old, number in enumerate(table)]
    is_known = (tensor >= 0) & (tensor < len(table))
    if use.ignored is not None:
        is_known &= tensor != use.ignored
    changed = torch.tensor(table, dtype=tensor.dtype)[tensor.clamp(0, len(table) - 1).long()]
    return torch.where(is_known, changed, tensor)


def new_numbers(size: int, indexes: Sequence[int]) -> list[int]:
    """For every index the place it has among the kept ones; one that goes gives way to the last."""
    places = {old: new for new, old in enumerate(indexes)}
    return [places.get(old, min(old, len(indexes) - 1)) for old in range(size)]


def _fits_call(call: Call, tensors: Tensors) -> bool:
    for use in uses_of(call, tensors):
        numbers, bound = tensors[use.value], tensors[use.bound]
        if use.axis >= bound.dim() or numbers.numel() == 0:
            continue
        counted = numbers if use.ignored is None else numbers[numbers != use.ignored]
        limit = bound.shape[use.axis] + use.is_length
        if bool((counted >= limit).any()) or bool((counted < (0 if use.is_length else -limit)).any()):
            return False
        if use.forbidden is not None and bool((counted == use.forbidden).any()):
            return False
    return True


def _arguments(call: Call) -> dict[str, Any]:
    """The arguments by the names that the rules use, as far as they can be told."""
    names = _NAMES.get(call.target) or _NAMES.get(call.name) or _parameters(call.target)
    return {**dict(zip(names, call.args, strict=False)), **dict(call.kwargs)}


def _parameters(target: str) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function_named(target)).parameters)
    except (UnknownFunction, TypeError, ValueError):
        return ()


def _row(_: Call, given: Mapping[str, Any], tensors: Tensors) -> Iterator[Use]:
    """Rows of a table."""
    yield from _use(given.get("input"), given.get("weight"), 0)


def _along(_: Call, given: Mapping[str, Any], tensors: Tensors) -> Iterator[Use]:
    """Places along a dimension."""
    source, dim = given.get("input"), given.get("dim")
    if isinstance(source, Ref) and source.value in tensors and isinstance(dim, int):
        yield from _use(given.get("index"), source, dim % max(tensors[source.value].dim(), 1))


def _class(_: Call, given: Mapping[str, Any], tensors: Tensors) -> Iterator[Use]:
    """Labels of classes, which lie along the second dimension, or the first when there is no other."""
    source = given.get("input")
    if isinstance(source, Ref) and source.value in tensors:
        axis = min(1, tensors[source.value].dim() - 1)
        yield from _use(given.get("target"), source, axis, ignored=given.get("ignore_index", _IGNORED))


def _item(call: Call, _: Mapping[str, Any], tensors: Tensors) -> Iterator[Use]:
    """Index tensors in brackets. Only without ``None`` and ``...``, which shift the dimensions."""
    index = call.args[1] if len(call.args) > 1 else None
    parts = index if isinstance(index, (tuple, list)) else (index,)
    if any(part is None or part is Ellipsis or isinstance(part, bool) for part in parts):
        return
    for axis, part in enumerate(parts):
        yield from _use(part, call.args[0], axis)


def _alignment(_: Call, given: Mapping[str, Any], tensors: Tensors) -> Iterator[Use]:
    """Labels, which are never the blank one, and lengths of sequences and of their labels."""
    source, labels = given.get("log_probs"), given.get("targets")
    if not (isinstance(source, Ref) and source.value in tensors and isinstance(labels, Ref)):
        return
    blank = given.get("blank", 0)
    yield from _use(labels, source, tensors[source.value].dim() - 1, forbidden=blank if isinstance(blank, int) else 0)
    yield from _use(given.get("input_lengths"), source, 0, is_length=True)
    if labels.value in tensors and tensors[labels.value].dim() == 2:
        yield from _use(given.get("target_lengths"), labels, 1, is_length=True)


def _use(
    index: Any,
    bound: Any,
    axis: int,
    *,
    is_length: bool = False,
    ignored: int | None = None,
    forbidden: int | None = None,
) -> Iterator[Use]:
    if isinstance(index, Ref) and isinstance(bound, Ref) and axis >= 0:
        yield Use(index.value, bound.value, axis, is_length, ignored, forbidden)


def _is_index(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32)


_Rule = Callable[[Call, Mapping[str, Any], Tensors], Iterator[Use]]
_ALONG = (
    "gather", "index_select", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_",
    "index_reduce", "index_reduce_", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce",
    "scatter_reduce_",
)  # fmt: skip
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_ALONG, _along),
    "embedding": _row,
    "embedding_bag": _row,
    "cross_entropy": _class,
    "nll_loss": _class,
    "nll_loss_nd": _class,
    "multi_margin_loss": _class,
    "__getitem__": _item,
    "__setitem__": _item,
    "ctc_loss": _alignment,
}
_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ALONG, ("input", "dim", "index")),
    "torch.embedding": ("weight", "input"),
    "ctc_loss": ("log_probs", "targets", "input_lengths", "target_lengths", "blank"),
    "cross_entropy": ("input", "target"),
    "nll_loss": ("input", "target"),
    "nll_loss_nd": ("input", "target"),
    "multi_margin_loss": ("input", "target"),
}
