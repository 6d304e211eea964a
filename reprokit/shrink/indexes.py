"""Integers held in tensors that must fit a size: indexes, class labels, lengths of sequences, parts of a flat tensor.

Known from the functions that read them, so that they follow when the size shrinks, and so that a candidate in which
they do not fit never costs a check. Some kernels trust them and read foreign memory otherwise.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reprokit.program.functions import UnknownFunction, function_named
from reprokit.program.ir import Call, Ref

Tensors = Mapping[int, torch.Tensor]
_IGNORED = -100  # the default `ignore_index` of losses


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


@dataclass(frozen=True, slots=True)
class FlatParts:
    """Consecutive parts of the tensor ``flat`` along its first axis, as in a batch of sequences that are not padded.

    The tensor ``counts`` holds the length of each part, or with ``are_offsets`` where each begins, and with ``has_end``
    where the last one ends.
    """

    flat: int
    counts: int
    are_offsets: bool = False
    has_end: bool = False

    def lengths(self, tensors: Tensors) -> list[int] | None:
        """The length of each part; ``None`` if they do not fill the flat tensor."""
        size = tensors[self.flat].shape[0]
        numbers = tensors[self.counts].tolist()
        if self.are_offsets:
            edges = numbers if self.has_end else [*numbers, size]
            if edges[0] != 0:
                return None
            numbers = [end - start for start, end in itertools.pairwise(edges)]
        return numbers if sum(numbers) == size and min(numbers, default=0) >= 0 else None

    def counts_for(self, lengths: Sequence[int], counts: torch.Tensor) -> torch.Tensor:
        """What ``counts`` holds for parts of these lengths."""
        numbers = list(lengths)
        if self.are_offsets:
            numbers = [0, *itertools.accumulate(numbers)][: None if self.has_end else -1]
        return torch.tensor(numbers, dtype=counts.dtype)


def parts_of(call: Call, tensors: Tensors) -> list[FlatParts]:
    """The tensors that a call takes in parts of different lengths."""
    rule = _PARTS.get(call.name)
    found = rule(_arguments(call)) if rule is not None else ()
    return [
        parts
        for parts in found
        if parts.flat in tensors
        and parts.counts in tensors
        and _is_index(tensors[parts.counts])
        and (tensors[parts.flat].dim(), tensors[parts.counts].dim()) == (1, 1)
        and tensors[parts.counts].numel()
    ]


def uses_of(call: Call, tensors: Tensors) -> list[Use]:
    """What a call takes for indexes and lengths, of tensors that are known."""
    rule = _RULES.get(call.name)
    if rule is None:
        return []
    found = rule(call, _arguments(call), tensors)
    return [use for use in found if use.value in tensors and use.bound in tensors and _is_index(tensors[use.value])]


def fits(calls: Sequence[Call], tensors: Tensors) -> bool:
    """True if all indexes and lengths are in range, and parts fill the tensor that they are parts of."""
    return all(_fits_call(call, tensors) for call in calls)


def numbers_after(
    use: Use, tensor: torch.Tensor, size: int, indexes: Sequence[int], renumber: bool = False
) -> torch.Tensor:
    """Indexes or lengths for a size of which only ``indexes`` are kept. Numbers that were out of range stay.

    With ``renumber`` the number that is forbidden changes as well, if it is out of range then.
    """
    few = len(indexes)
    if use.is_length:
        table = torch.tensor([sum(index < length for index in indexes) for length in range(size + 1)])
    else:
        table = new_numbers(size, indexes)
    if not use.is_length and use.forbidden is not None:
        is_moved = renumber and few <= use.forbidden < size
        forbidden = int(table[use.forbidden]) if is_moved else use.forbidden
        is_taken = (table == forbidden) & (torch.arange(size) != use.forbidden)
        table = torch.where(is_taken, (table + 1) % few, table)
    is_known = (tensor >= 0) & (tensor < len(table))
    if use.ignored is not None:
        is_known &= tensor != use.ignored
    changed = table.to(tensor.dtype)[tensor.clamp(0, len(table) - 1).long()]
    return torch.where(is_known, changed, tensor)


def new_numbers(size: int, indexes: Sequence[int]) -> torch.Tensor:
    """For every index the place it has among the kept ones; one that goes gives way to the last."""
    table = torch.arange(size).clamp(max=len(indexes) - 1)
    if indexes != range(len(indexes)):
        table[torch.tensor(list(indexes), dtype=torch.int64)] = torch.arange(len(indexes))
    return table


def _fits_call(call: Call, tensors: Tensors) -> bool:
    if any(parts.lengths(tensors) is None for parts in parts_of(call, tensors)):
        return False
    for use in uses_of(call, tensors):
        numbers, bound = tensors[use.value], tensors[use.bound]
        if use.axis >= bound.dim() or numbers.numel() == 0:
            continue
        counted = numbers if use.ignored is None else numbers[numbers != use.ignored]
        limit = bound.shape[use.axis] + use.is_length
        if bool((counted >= limit).any()) or bool((counted < (0 if use.is_length else -limit)).any()):
            return False
        if use.forbidden is not None and (use.forbidden >= limit or bool((counted == use.forbidden).any())):
            return False
    return True


def _arguments(call: Call) -> dict[str, Any]:
    """The arguments by the names that the rules use, as far as they are known."""
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


def _flat_labels(given: Mapping[str, Any]) -> Iterator[FlatParts]:
    """Labels of all samples in one row."""
    yield from _parts(given.get("targets"), given.get("target_lengths"))


def _bags(given: Mapping[str, Any]) -> Iterator[FlatParts]:
    """Indexes of all bags in one row, each with a weight if there are any."""
    for flat in (given.get("input"), given.get("per_sample_weights")):
        yield from _parts(flat, given.get("offsets"), True, given.get("include_last_offset") is True)


def _data_segments(given: Mapping[str, Any]) -> Iterator[FlatParts]:
    yield from _parts(given.get("data"), given.get("lengths"))
    yield from _parts(given.get("data"), given.get("offsets"), True, True)


def _parts(flat: Any, counts: Any, are_offsets: bool = False, has_end: bool = False) -> Iterator[FlatParts]:
    if isinstance(flat, Ref) and isinstance(counts, Ref):
        yield FlatParts(flat.value, counts.value, are_offsets, has_end)


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
_PARTS: dict[str, Callable[[Mapping[str, Any]], Iterator[FlatParts]]] = {
    "ctc_loss": _flat_labels,
    "embedding_bag": _bags,
    "segment_reduce": _data_segments,
}
_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ALONG, ("input", "dim", "index")),
    "torch.embedding": ("weight", "input"),
    "torch.embedding_bag": (
        "weight",
        "input",
        "offsets",
        "scale_grad_by_freq",
        "mode",
        "sparse",
        "per_sample_weights",
        "include_last_offset",
    ),
    "segment_reduce": ("data", "reduce"),
    "ctc_loss": ("log_probs", "targets", "input_lengths", "target_lengths", "blank"),
    "cross_entropy": ("input", "target"),
    "nll_loss": ("input", "target"),
    "nll_loss_nd": ("input", "target"),
    "multi_margin_loss": ("input", "target"),
}
