"""Training in several processes: finds the rank whose step failed, and stops all ranks together.

Nothing is exchanged while training with averaged gradients is healthy. A rank whose loss is bad writes that into the
store the process group was made with and goes on into its backward pass, because the others wait there. After the
all-reduce every rank holds the same bits, so all come to the same verdict about the gradients in the same step, and
meet at the store. Where parameters are spread over the ranks, every rank asks the store once a step instead: what an
accuser has written there before its backward pass is there once everybody's backward pass is over.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import distributed

# Words of gloo, NCCL and the store about a process that is not there any more.
_OF_PEER = re.compile(r"gloo|NCCL|Connection (?:closed|reset) by peer|Broken pipe|ProcessGroup", re.IGNORECASE)
_PATIENCE = datetime.timedelta(minutes=10)


class Ranks:
    """The state of the other processes as seen from this one. ``is_parallel``: gradients are averaged over processes;
    ``is_sharded``: parameters are spread over them, so that even a forward needs all."""

    _runs = 0

    def __init__(self) -> None:
        self.is_parallel = False
        self.is_sharded = False
        self.rank: int | None = None
        self._size = 1
        self._store: Any = None
        self._has_told = False
        Ranks._runs += 1
        self._prefix = f"reprokit/{Ranks._runs}"

    def meet(self, modules: Collection[torch.nn.Module]) -> None:
        """A new root or optimizer was met: look at what is trained."""
        if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
            return
        kinds = {type(part) for module in modules for part in module.modules()}
        self.is_parallel = any(issubclass(kind, torch.nn.parallel.DistributedDataParallel) for kind in kinds)
        fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
        self.is_sharded = any(issubclass(kind, fsdp) for kind in kinds) or any(
            hasattr(parameter, "to_local") for module in modules for parameter in module.parameters()
        )
        if not self.is_alone and self._store is None:
            self.rank, self._size = distributed.get_rank(), distributed.get_world_size()
            self._store = distributed.distributed_c10d._get_default_store()
            self._store.set(self._key("watches", self.rank), "yes")

    @property
    def is_alone(self) -> bool:
        """True if this process trains by itself."""
        return not (self.is_parallel or self.is_sharded)

    def is_of_peer(self, error: BaseException) -> bool:
        """True for an exception of a collective whose other processes have gone: it says nothing about this one."""
        return not self.is_alone and isinstance(error, RuntimeError) and _OF_PEER.search(str(error)) is not None

    def accuse(self, step: int) -> None:
        """The loss of this rank is bad in this step."""
        if self._store is not None:
            self._store.set(self._key("guilty", self.rank), str(step))
            self._store.set(self._key("accused", step), "yes")

    def withdraw(self, step: int) -> None:
        """The loss of this rank was bad in this step, and the loop has skipped it."""
        if self._store is not None:
            self._store.delete_key(self._key("guilty", self.rank))
            self._store.delete_key(self._key("accused", step))

    def is_accused(self, step: int) -> bool:
        """True if the loss of any rank is bad in this step."""
        return self._store is not None and self._has("accused", step)

    def guilty(self) -> list[int]:
        """The ranks whose loss was bad."""
        return [rank for rank in range(self._size) if self._store is not None and self._has("guilty", rank)]

    def tell(self, is_guilty: bool) -> None:
        """After a bad gradient that all have seen: whether this rank's own step made it; the first answer counts."""
        if self._store is not None and not self._has_told:
            self._has_told = True
            self._store.set(self._key("finding", self.rank), "guilty" if is_guilty else "innocent")

    def hear(self) -> list[int]:
        """The ranks whose own steps made a bad gradient, once all have reported; none, at once, if some rank is not
        watched."""
        if not self._are_all("watches"):
            return []
        self._store.wait([self._key("finding", rank) for rank in range(self._size)], _PATIENCE)
        return [rank for rank in range(self._size) if self._store.get(self._key("finding", rank)) == b"guilty"]

    def meet_all(self) -> bool:
        """Wait until every rank has done its part; ``False``, at once, if some rank is not watched."""
        if not self._are_all("watches"):
            return False
        self._store.set(self._key("done", self.rank), "yes")
        with contextlib.suppress(distributed.DistNetworkError):  # the host of the store has gone, so it was done
            self._store.wait([self._key("done", rank) for rank in range(self._size)], _PATIENCE)
        return True

    def leave(self) -> None:
        """This rank goes on unwatched: nobody is to wait for it."""
        if self._store is not None:
            self._store.delete_key(self._key("watches", self.rank))

    def describe(self) -> dict[str, Any]:
        """For the snapshot: the rank and the number of processes, nothing for a single process."""
        return {} if self.rank is None else {"rank": self.rank, "world_size": self._size}

    def _are_all(self, what: str) -> bool:
        return self._store is not None and all(self._has(what, rank) for rank in range(self._size))

    def _has(self, what: str, which: int) -> bool:
        return bool(self._store.check([self._key(what, which)]))

    def _key(self, what: str, which: int | None) -> str:
        return f"{self._prefix}/{what}/{which}"
