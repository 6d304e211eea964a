"""Parameters of which each process holds a part (DTensor), and how they are put together again in one of them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
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
    """A place in a module where a parameter lies, as a rule one that is spread over processes."""

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

    def local(self, before: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parts that this process holds; ``before`` has others for some parameters, by their ``id``."""
        return {name: before.get(id(parameter), parameter._local_tensor) for name, parameter in self._named.items()}

    def early_parameter(self) -> torch.Tensor | None:
        """A small gathered parameter (`fully_shard`) of an early layer: its gradient is that of this process alone."""
        try:
            gathered = {id(unit.sharded_param): unit for part in self.units for unit in unit_parameters(part)}
        except Unanswered:
            return None
        found = [gathered[id(slot.parameter)] for slot in self.slots if id(slot.parameter) in gathered]
        early = [unit._unsharded_param for unit in found if hasattr(unit, "_unsharded_param")][:_CANDIDATES]
        return _small([parameter for parameter in early if parameter.requires_grad])

    def early_gradient(self) -> torch.Tensor | None:
        """A small gradient of an early layer, spread or not."""
        parameters = (p for known in self._roots if (root := known()) is not None for p in root.parameters())
        gradients = (grad for p in parameters if (grad := p.grad) is not None and grad.layout is torch.strided)
        return _small(list(itertools.islice(gradients, _CANDIDATES)))

    @property
    def num_bytes(self) -> int:
        """The size of the whole parameters in bytes."""
        return num_bytes({id(slot.parameter): slot.parameter for slot in self.slots}.values())

    def gather(self, exchange: Exchange, wanted: Collection[Any] | None = None) -> dict[int, torch.Tensor]:
        """The ``wanted`` or all whole parameters by the ``id`` of the spread ones, asked for batch by batch; raises
        `Unanswered`."""
        if not self.slots:
            raise Unanswered("they are not spread by `fully_shard` or `parallelize_module`")
        named, ids = self._named, None if wanted is None else set(map(id, wanted))
        names = {id(p): name for name, p in named.items() if ids is None or id(p) in ids}  # of shared ones the last
        whole: dict[int, torch.Tensor] = {}
        for batch in _batches([named[name] for name in names.values()]):
            wanted = {rank: [p for p in batch if rank in _ranks_of(p)] for p in batch for rank in _ranks_of(p)}
            sent = {
                rank: dict(zip(map(id, asked), self._sent(exchange, rank, [names[id(p)] for p in asked]), strict=True))
                for rank, asked in wanted.items()
            }
            for parameter in batch:
                parts = {rank: sent[rank][id(parameter)] for rank in _ranks_of(parameter)}
                whole[id(parameter)] = _joined(parameter, parts)
        return whole

    def _sent(self, exchange: Exchange, rank: int, names: list[str]) -> list[torch.Tensor]:
        if rank == torch.distributed.get_rank():
            shards = self.local({})
            return [shards[name].detach() for name in names]
        return exchange.ask(rank, names)


def _small(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The first small one, or the smallest."""
    small = (tensor for tensor in tensors if tensor.numel() <= _SMALL)
    return next(small, min(tensors, key=torch.Tensor.numel, default=None))


def slots_of(modules: Iterable[torch.nn.Module]) -> Iterator[Slot]:
    """The places of all parameters of modules."""
    for part in {id(part): part for root in modules for part in root.modules()}.values():
        yield from (Slot(part, name, p) for name, p in part._parameters.items() if p is not None)


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


def _needed(parameter: Any) -> torch.Tensor:
    """The ranks of the mesh without those that hold copies: along a replicated dimension only this rank's row."""
    ranks: torch.Tensor = parameter.device_mesh.mesh
    here = parameter.device_mesh.get_coordinate()
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            ranks = ranks.narrow(dimension, here[dimension], 1)
        elif not _is_sharded(placement):
            raise ValueError(f"a parameter is placed as {placement}")
    return ranks


def _is_sharded(placement: Any) -> bool:
    return hasattr(placement, "dim")


def _ranks_of(parameter: Any) -> list[int]:
    found: list[int] = _needed(parameter).flatten().tolist()
    return found


def _joined(parameter: Any, parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The whole of a parameter from the ``parts`` of ranks.

    A mesh is cut dimension by dimension, the last one last; a strided dimension was cut after all others.
    """
    ranks = _needed(parameter)
    placements = list(enumerate(parameter.placements))
    order = sorted(placements, key=lambda item: (hasattr(item[1], "split_factor"), item[0]))
    grid: dict[tuple[int, ...], torch.Tensor] = {
        tuple(place): parts[int(ranks[tuple(place)])] for place in torch.nonzero(torch.ones_like(ranks)).tolist()
    }
    for dimension, placement in reversed(order):
        rows: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for place in sorted(grid):
            rows.setdefault((*place[:dimension], 0, *place[dimension + 1 :]), []).append(grid[place])
        is_cut = _is_sharded(placement)
        grid = {place: torch.cat(row, placement.dim) if is_cut else row[0] for place, row in rows.items()}
    (whole,) = grid.values()
    device = parameter._local_tensor.device
    return whole.reshape(parameter.shape).clone().to(device)
