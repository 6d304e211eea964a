"""The replay of a step whose whole parameters do not fit in memory: from one unit of `fully_shard` on.

The forward pass runs once with the parameters of one unit at a time, and the output of every unit is recorded. Then the
step is replayed from a unit on: the units before it return what was recorded, and nothing before that is part of the
program.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakIdKeyDictionary

from reprokit.arrivals import pass_on
from reprokit.capture.record.screens import bad_tensor
from reprokit.capture.record.state import num_bytes
from reprokit.capture.record.structure import iter_tensors, map_tensors
from reprokit.capture.run.exchange import Unanswered
from reprokit.capture.run.ranks import Ranks
from reprokit.program.trace import InputName, Tracer
from reprokit.snapshot.rng import Generators, get_rng_state, set_rng_state
from reprokit.words import counted, user_path

Describe = Callable[[torch.Tensor], InputName | None]
_NODE, _CAST = re.compile(r"Backward\d*$"), "ToCopyBackward"  # of autograd
_SECONDS = 300.0  # to gather; the other ranks wait in a collective, which gives up after 10 minutes with NCCL
_SECONDS_TO_END = 10.0  # the same once the launcher ends all ranks


class _Recorded(NamedTuple):
    """A call of a unit: its output, and the states of the generators after it."""

    name: str
    output: Any
    generators: Generators


class _IsBad(Exception):
    """A unit has returned a nan or inf."""


class UnitByUnit:
    """Gathers the units of ``roots`` when they are called, up to ``limit`` bytes at once.

    A unit is one that holds no other unit; the parameters outside of these are always there. Calls of units with a
    number below ``first`` return what `record` has seen.
    """

    def __init__(self, roots: Iterable[torch.nn.Module], ranks: Ranks, limit: int) -> None:
        self.first = 0
        self._ranks = ranks
        self._limit = limit
        self._names = {part: user_path(path) for root in roots for path, part in root.named_modules()}
        units = [unit for unit in ranks.shards.units if unit in self._names]
        self._units = [unit for unit in units if not any(part in units for part in list(unit.modules())[1:])]
        self._parameters = {id(slot.parameter): slot.parameter for slot in ranks.shards.slots}
        self._own: dict[Any, list[int]] = {unit: self._only_in(unit) for unit in self._units}
        in_units = {key for keys in self._own.values() for key in keys}
        self._own[None] = [key for key in self._parameters if key not in in_units]
        self._held: set[Any] = set()
        self._recorded: list[_Recorded] = []
        self._is_recording = self._stops_at_bad = False
        self._num_calls = 0
        self._tracer: Tracer | None = None
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._given: MutableMapping[torch.Tensor, InputName] = WeakIdKeyDictionary()
        self._started = time.monotonic()

    def _only_in(self, unit: torch.nn.Module) -> list[int]:
        """The parameters of a unit that no other module has."""
        parts = set(unit.modules())
        elsewhere = {id(slot.parameter) for slot in self._ranks.shards.slots if slot.part not in parts}
        return list(dict.fromkeys(id(p) for p in unit.parameters() if id(p) in self._parameters.keys() - elsewhere))

    @property
    def num_recorded(self) -> int:
        """Calls of units whose outputs are recorded."""
        return len(self._recorded)

    def placeholders(self) -> dict[int, torch.Tensor]:
        """Empty tensors for all spread parameters, by the ``id`` of these."""
        return {
            key: torch.empty(0, dtype=parameter.dtype, device=parameter._local_tensor.device)
            for key, parameter in self._parameters.items()
        }

    @contextlib.contextmanager
    def gathering(self, stand_ins: dict[int, torch.Tensor]) -> Iterator[None]:
        """Gather units into ``stand_ins`` when they are called; all that is outside of units at once."""
        self._stand_ins = stand_ins
        self._hold(None)
        with contextlib.ExitStack() as stack:
            for unit in self._units:
                stack.callback(setattr, unit, "__class__", type(unit))
                unit.__class__ = self._class_for(type(unit))
            yield

    def _class_for(self, cls: Any) -> Any:
        """A class whose instances are units that call us."""

        def call(unit: Any, *args: Any, **kwargs: Any) -> Any:
            now, unit.__class__ = type(unit), cls
            try:
                return self._call(unit, args, kwargs)
            finally:
                unit.__class__ = now

        return type(cls)(cls.__name__, (cls,), {"__call__": call})

    def record(self, play: Callable[[], None], *, stops_at_bad: bool) -> None:
        """Record the outputs of the units in a forward pass, which ``play`` runs; up to the first nan or inf if wanted.

        `first` is the number of the call that has made it or that has raised, else of those recorded.
        """
        self._is_recording, self._stops_at_bad = True, stops_at_bad
        self._num_calls = 0
        try:
            play()
        except Unanswered:
            raise
        except Exception as error:  # the replay raises it again
            pass_on(error)
        finally:
            self._is_recording = False
        self.first = self.num_recorded

    def begin(self, tracer: Tracer) -> None:
        """A replay begins; nothing is part of its program until the last recorded output is used."""
        self._tracer, self._num_calls = tracer, 0
        tracer.is_silent = self.first > 0

    def naming(self, describe: Describe) -> Describe:
        """``describe`` with names for what the part before the program has made: recorded outputs, casts of parameters,
        and results of calls outside of units."""

        def name(tensor: torch.Tensor) -> InputName | None:
            node, known = tensor.grad_fn, self._given.get(tensor) or describe(tensor)
            is_named = known is not None and known.role != "opaque"
            if is_named or node is None or isinstance(node, BackwardCFunction):
                return known
            leaves = [getattr(following, "variable", None) for following, _ in node.next_functions]
            if _CAST in node.name() and leaves[0] is not None:
                return describe(leaves[0])
            return InputName(f"{_NODE.sub('', node.name())}_output")

        return name

    def summary(self) -> dict[str, Any]:
        """For the snapshot: the units that are not replayed, and the last of them."""
        names = [recorded.name for recorded in self._recorded[: self.first]]
        return {"num_recorded_units": len(names), "last_recorded_unit": names[-1] if names else None}

    def _call(self, unit: Any, args: Any, kwargs: Any) -> Any:
        number = self._num_calls
        self._num_calls += 1
        if not self._is_recording:
            if number < self.first:
                return self._again(number)
            self._hold(unit)
            return unit(*args, **kwargs)
        self._hold(unit)
        output = map_tensors(unit(*args, **kwargs), _copy)
        self._release(unit)
        floating = (tensor for tensor in iter_tensors(output) if tensor.is_floating_point())
        if self._stops_at_bad and bad_tensor(floating) is not None:
            raise _IsBad
        self._recorded.append(_Recorded(self._names[unit], output, get_rng_state()))
        return map_tensors(output, lambda tensor: _writable(_copy(tensor)))

    def _again(self, number: int) -> Any:
        """The recorded output of a call, as tensors that the loop may write in place."""
        assert self._tracer is not None
        recorded = self._recorded[number]
        set_rng_state(recorded.generators)
        name = InputName(f"{recorded.name}_output")
        is_last = number == self.first - 1
        if is_last:
            self._tracer.is_silent = False

        def give(tensor: torch.Tensor) -> torch.Tensor:
            with torch._C.DisableTorchFunction():
                copy = _copy(tensor)
            self._given[copy] = name
            output = _writable(copy)
            if not is_last:
                self._given[output] = name
            return output

        return map_tensors(recorded.output, give)

    def _hold(self, unit: Any) -> None:
        """Gather the parameters of a unit, or those outside of units for ``None``; raises `Unanswered`."""
        if unit in self._held:
            return
        seconds = _SECONDS_TO_END if self._ranks.is_ending else _SECONDS
        if time.monotonic() - self._started > seconds:
            raise Unanswered(f"they were not gathered within {seconds:.0f} seconds")
        held = {*self._held, unit}
        if num_bytes(self._parameters[key] for one in held for key in self._own[one]) > self._limit:
            num_units = len(held - {None})
            which = f"of {counted(num_units, 'unit')} and those outside of units" if num_units else "outside of units"
            raise Unanswered(f"the parameters {which} take over {self._limit // 2**30} GiB")
        with torch._C.DisableTorchFunction(), torch.no_grad():
            whole = self._ranks.gather([self._parameters[key] for key in self._own[unit]])
            for key in self._own[unit]:
                self._stand_ins[key].data = whole[key]
        self._held.add(unit)

    def _release(self, unit: Any) -> None:
        self._held.discard(unit)
        for key in self._own[unit]:
            self._stand_ins[key].data = self._stand_ins[key].new_empty(0)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without the graph that made the tensor."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _writable(copy: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a result computed from it: a leaf cannot be written in place."""
    return copy.clone() if copy.requires_grad else copy
