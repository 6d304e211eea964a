"""Parameters of which each process holds a part (`fully_shard`), and how they are put together again in one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from reprokit.capture.record.state import num_bytes
from reprokit.capture.run.exchange import Exchange, Unanswered

_BATCH = 64 * 2**20  # bytes that one rank sends at once
_CANDIDATES = 8  # parameters, from the model's beginning
_SMALL = 65_536  # elements that take a few microseconds to sum


class Slot(NamedTuple):
    """A place in a module where a spread parameter lies."""

    part: torch.nn.Module
    name: str
    parameter: Any


_Known = tuple[str, str, Any]  # a spread parameter: its name in its module, its name in every process, and itself


class Shards:
    """Knows the spread parameters of the roots that are alive, by names that are the same in every process."""

    def __init__(self) -> None:
        self._parts: MutableMapping[torch.nn.Module, list[_Known]] = WeakIdKeyDictionary()
        self._roots: list[ref[torch.nn.Module]] = []
        self._units: list[ref[torch.nn.Module]] = []

    def learn(self, modules: Iterable[torch.nn.Module]) -> None:
        """Add the parameters of new roots. Between steps, when no unit is gathered."""
        for root in modules:
            if any(known() is root for known in self._roots):
                continue
            self._roots.append(ref(root))
            self._units += [ref(part) for part in root.modules() if hasattr(part, "_get_fsdp_state")]
            for path, part in root.named_modules():
                spread = [(name, p) for name, p in part._parameters.items() if hasattr(p, "to_local")]
                if spread:
                    known = self._parts.setdefault(part, [])
                    known += [(name, f"{len(self._roots)}/{path}/{name}", parameter) for name, parameter in spread]

    @property
    def units(self) -> list[Any]:
        """The modules given to `fully_shard`."""
        return [unit for known in self._units if (unit := known()) is not None]

    @property
    def slots(self) -> list[Slot]:
        """The places of the spread parameters."""
        return [Slot(part, name, parameter) for part, known in self._parts.items() for name, _, parameter in known]

    @property
    def _named(self) -> dict[str, Any]:
        return {name: parameter for known in self._parts.values() for _, name, parameter in known}

    def local(self, names: Iterable[str]) -> list[torch.Tensor]:
        """The parts of parameters that this process holds."""
        named = self._named
        return [named[name]._local_tensor.detach() for name in names]

    def early_parameter(self) -> torch.Tensor | None:
        """A small gathered parameter (`fully_shard`) of an early layer: its gradient is that of this process alone."""
        try:
            gathered = {id(unit.sharded_param): unit for part in self.units for unit in unit_parameters(part)}
        except Unanswered:
            return None
        found = [gathered[id(slot.parameter)] for slot in self.slots if id(slot.parameter) in gathered]
        early = [unit._unsharded_param for unit in found if hasattr(unit, "_unsharded_param")][:_CANDIDATES]
        trained = [parameter for parameter in early if parameter.requires_grad]
        small = (parameter for parameter in trained if parameter.numel() <= _SMALL)
        return next(small, min(trained, key=torch.Tensor.numel, default=None))

    @property
    def num_bytes(self) -> int:
        """The size of the whole parameters in bytes."""
        return num_bytes({id(slot.parameter): slot.parameter for slot in self.slots}.values())

    def gather(self, exchange: Exchange) -> dict[int, torch.Tensor]:
        """The whole parameters by the ``id`` of the spread ones, asked for batch by batch; raises `Unanswered`."""
        named, own = self._named, torch.distributed.get_rank()
        names = {id(p): name for name, p in named.items()}  # of shared ones the last
        rows: dict[tuple[int, ...], list[Any]] = {}
        for name in names.values():
            rows.setdefault(_row_of(named[name]), []).append(named[name])
        whole: dict[int, torch.Tensor] = {}
        for row, parameters in rows.items():
            for batch in _batches(parameters):
                asked = [names[id(parameter)] for parameter in batch]
                sent = [self.local(asked) if rank == own else exchange.ask(rank, asked) for rank in row]
                for parameter, *parts in zip(batch, *sent, strict=True):
                    dimension = parameter.placements[-1].dim
                    joined = torch.cat([part.to(parameter._local_tensor.device) for part in parts], dimension)
                    whole[id(parameter)] = joined.reshape(parameter.shape)
        return whole


def unit_parameters(unit: Any) -> Iterator[Any]:
    """The private records of torch for the parameters that a unit of `fully_shard` gathers; raises `Unanswered` if
    this version of torch keeps them elsewhere."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # of versions before 2.13, with one group or none
        if not hasattr(state, "_fsdp_param_group"):
            raise Unanswered(f"torch {torch.__version__} keeps the parameters of `fully_shard` in an unknown place")
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    for group in groups:
        yield from group.fsdp_params


def _batches(parameters: Sequence[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for parameter in parameters:
        if batch and num_bytes(batch) + num_bytes([parameter]) > _BATCH:
            yield batch
            batch = []
        batch.append(parameter)
    if batch:
        yield batch


def _row_of(parameter: Any) -> tuple[int, ...]:
    """The ranks that hold the parts of a parameter, in order: of a 2-D mesh (HSDP) the row of this rank."""
    *outer, inner = parameter.placements
    if not hasattr(inner, "dim") or not all(placement.is_replicate() for placement in outer):
        raise Unanswered(f"a parameter is placed as {parameter.placements}")
    ranks = parameter.device_mesh.mesh
    for place in parameter.device_mesh.get_coordinate()[:-1]:
        ranks = ranks[place]
    return tuple(ranks.tolist())
