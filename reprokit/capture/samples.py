"""Which samples of a data set the tensors of a batch were made of.

A `DataLoader` draws its index batches in this process, workers or not, and its batches arrive in that order: batch
number n is made of index batch number n, however many workers draw ahead. Nothing is known of an iterator that began
unseen, that gives batches out of order, or whose data set has no indices.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, default_collate

from reprokit import native, torch_private
from reprokit.capture.stand_ins import as_called
from reprokit.capture.structure import tensors_in
from reprokit.capture.tape import Number, Op, Tape, version_of
from reprokit.locate.samples import KEEP_ROWS, Samples
from reprokit.own_work import passed_over
from reprokit.program.sites import kind_of_file, relative_path

_PARTS = ("dataset", "collate_fn", "sampler", "batch_sampler", "worker_init_fn")
_MOST_INDICES = 65_536  # of a batch; a larger one is no batch that a reader looks up


class _Batch(NamedTuple):
    """The index batch of a batch. ``are_rows``: those of a tensor with so many rows are the samples, in their order."""

    indices: tuple[int, ...]
    are_rows: bool


class SampleWatch:
    """Notes index batches as an iterator of a loader draws them, and the tensors of batches as they arrive.

    The hooks give each call as a function of torch with its arguments. A tensor is known by its ``id`` and its version
    as long as it is there, one that calls on the tape have made also by its number.
    """

    def __init__(self, tape: Tape, switch_off: Callable[[BaseException], None]) -> None:
        self._tape, self._switch_off = tape, switch_off
        # Whether rows are samples, and the index batches without a batch yet; ``None`` for one of other keys than ints.
        self._iterators: weakref.WeakKeyDictionary[Any, tuple[bool, deque[_Batch | None]]]
        self._iterators = weakref.WeakKeyDictionary()
        # What each iterator fetches with: data set, `collate_fn` and samplers.
        self.parts: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, _Batch | None, Any]] = {}

    def forget(self) -> None:
        """The hooks are gone: what iterators draw from here on is not seen."""
        self._iterators.clear()
        self.parts.clear()
        self._known.clear()

    @passed_over
    def begin(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An iterator begins an epoch of a loader."""
        with self._guarded():
            iterator, loader = args[:2] if len(args) > 1 else (args[0], kwargs["loader"])
            self._iterators.pop(iterator, None)
            self.parts[iterator] = tuple(getattr(loader, name, None) for name in _PARTS)
            is_in_order = loader.num_workers == 0 or getattr(loader, "in_order", True)
            if is_in_order and not isinstance(loader.dataset, IterableDataset):
                are_rows = loader.batch_sampler is not None and loader.collate_fn is default_collate
                self._iterators[iterator] = are_rows, deque()
        return as_called(target, args, kwargs)

    @passed_over
    def draw(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An iterator draws an index batch."""
        index = as_called(target, args, kwargs)
        with self._guarded():
            if args[0] in self._iterators:
                are_rows, waiting = self._iterators[args[0]]
                waiting.append(_batch_of(index, are_rows))
        return index

    @passed_over
    def arrive(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An iterator gives a batch."""
        try:
            data = as_called(target, args, kwargs)
        except BaseException:  # the end, or an error that leaves open whose batch comes next
            self._iterators.pop(args[0], None)
            raise
        with self._guarded():
            waiting = self._iterators.get(args[0], (False, None))[1]
            batch = waiting.popleft() if waiting else None
            for tensor in tensors_in(data) if batch is not None else ():
                number = self._tape.known(tensor)
                if number is not None:
                    number.batch = batch
                # Also then: a tensor that no kept call uses gets a new number with its first use.
                key = id(tensor)
                gone = weakref.ref(tensor, lambda _, key=key: self._known.pop(key, None))  # type: ignore[misc]
                self._known[key] = gone, version_of(tensor), batch, getattr(args[0], torch_private.COLLATE, None)
        return data

    def of(self, number: Number) -> _Batch | None:
        """The index batch of a tensor of the loop with this number, which no call has written since it arrived."""
        batch: _Batch | None = getattr(number, "batch", None)
        tensor = number()
        if batch is None and tensor is not None and id(tensor) in self._known:
            known, version, batch, _ = self._known[id(tensor)]
            return batch if known() is tensor and self._tape.stamps.get(number) == version else None
        return batch

    def collate(self, tensor: torch.Tensor | None) -> str:
        """The user's function that has put a tensor into a batch: `` `pad` (data.py:7) ``; else empty."""
        known, *_, function = self._known.get(id(tensor), (lambda: None, None))
        code = getattr(function, "__code__", None) if known() is tensor else None
        is_own = code is not None and kind_of_file(code.co_filename) == "user"
        return f"`{code.co_name}` ({relative_path(code.co_filename)}:{code.co_firstlineno})" if code and is_own else ""

    def samples(self, number: Number | None, name: str, num_rows: int) -> Samples | None:
        """The samples of a tensor with so many rows."""
        batch = self.of(number) if number is not None else None
        return Samples(name, batch.indices, batch.are_rows and num_rows == len(batch.indices)) if batch else None

    def words(self, number: Number | None, ops: Sequence[Op], rows: Sequence[int], num_rows: int) -> str:
        """The samples of some rows of a tensor that ``ops`` may have made of a batch; empty if they are not known."""
        makers = {out: op for op in ops for out in op.outs}
        while number is not None and self.of(number) is None:
            op = makers.pop(number, None)  # once: `to` returns its argument where it has nothing to do
            keeps = op is not None and len(op.ins) == 1 and getattr(op.target, "__name__", "").strip("_") in KEEP_ROWS
            number = op.ins[0] if op is not None and keeps else None
        found = self.samples(number, "", num_rows)
        return found.words(rows) if found is not None else ""

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with native.DisableTorchFunction():  # in any thread: nothing here is a call of the loop
                yield
        except BaseException as error:
            self._switch_off(error)


def _batch_of(index: Any, are_rows: bool) -> _Batch | None:
    is_single = not isinstance(index, Sequence) and getattr(index, "ndim", 0) == 0
    given = (index,) if is_single else index
    if isinstance(index, tuple) or len(given) > _MOST_INDICES:  # a tuple may be one key of several indices
        return None
    with contextlib.suppress(TypeError):  # keys of another kind, such as names
        indices = tuple(map(operator.index, given))
        return _Batch(indices, are_rows or len(indices) == 1) if indices else None
    return None
