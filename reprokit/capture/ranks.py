"""Training in several processes: whose loss went bad, and how all of them stop together.

Nothing is exchanged while training is healthy. A rank whose loss is bad writes that into the store the process group
was
made with and goes on into its backward pass, because the others wait there. After the all-reduce every rank holds the
same bits, so all come to the same verdict about the gradients in the same step, and meet at the store.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed

_PATIENCE = datetime.timedelta(minutes=10)


class Ranks:
    """What this process knows of the others. ``is_parallel``: gradients are averaged over processes; ``is_sharded``:
    parameters are spread over them, so that even a forward needs all."""

    _runs = 0

    def __init__(self) -> None:
        self.is_parallel = False
        self.is_sharded = False
        self._rank: int | None = None
        self._size = 1
        self._store: Any = None
        Ranks._runs += 1
        self._prefix = f"reprokit/{Ranks._runs}"

    def meet(self, modules: Iterable[torch.nn.Module]) -> None:
        """A new optimizer is about to step: look at what is trained."""
        if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
            return
        kinds = [type(part) for module in modules for part in module.modules()]
        self.is_parallel = any(issubclass(kind, torch.nn.parallel.DistributedDataParallel) for kind in kinds)
        self.is_sharded = any(kind.__name__.startswith(("FSDP", "FullySharded")) for kind in kinds)
        if self.is_parallel and self._store is None:
            self._rank, self._size = distributed.get_rank(), distributed.get_world_size()
            self._store = distributed.distributed_c10d._get_default_store()
            self._store.set(self._key("watches", self._rank), "yes")

    @property
    def is_alone(self) -> bool:
        """Whether this process trains by itself."""
        return not (self.is_parallel or self.is_sharded)

    def accuse(self, step: int) -> None:
        """The loss of this rank is bad."""
        if self._store is not None:
            self._store.set(self._key("guilty", self._rank), str(step))

    def guilty(self) -> list[int]:
        """The ranks whose loss was bad."""
        return [rank for rank in range(self._size) if self._store is not None and self._has("guilty", rank)]

    def meet_all(self) -> bool:
        """Wait until every rank has done its part; ``False``, at once, if some rank is not watched."""
        if self._store is None or not all(self._has("watches", rank) for rank in range(self._size)):
            return False
        self._store.set(self._key("done", self._rank), "yes")
        self._store.wait([self._key("done", rank) for rank in range(self._size)], _PATIENCE)
        return True

    def describe(self) -> dict[str, Any]:
        """For the snapshot: the rank and the number of processes, nothing for a single process."""
        return {} if self._rank is None else {"rank": self._rank, "world_size": self._size}

    def _has(self, what: str, rank: int) -> bool:
        return bool(self._store.check([self._key(what, rank)]))

    def _key(self, what: str, rank: int | None) -> str:
        return f"{self._prefix}/{what}/{rank}"
