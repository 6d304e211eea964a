"""Training in several processes: finds the rank whose step failed, and stops all ranks together.

Nothing is exchanged while training with averaged gradients is healthy. A rank whose loss is bad writes that into the
store the process group was made with and goes on into its backward pass, because the others wait there. After the
all-reduce every rank holds the same bits, so all come to the same result about the gradients in the same step, and meet
at the store. A gradient that the other ranks do not report became bad after averaging. Where parameters are spread over
the ranks, every rank looks for reports once a step: what a rank has reported before its last gradients are reduced
is in the store once everybody's backward pass is over. That holds on a CPU. A GPU is not waited for, so there a rank
may look before the report is written: it trains on, and those that have seen the report give up after `_PATIENCE`. The
first guilty rank then asks the others for their shards. Other ways to spread a model (tensor parallel modules, stages
of a pipeline, FSDP1) are not followed: there each rank saves what it sees itself, without a replay, and stops alone.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import torch
from torch import distributed

from reprokit.capture.rewind.meeting import AT_COPY, AT_END, CopyAnswer, Late, Meeting, Parted
from reprokit.capture.run.shards import Exchange, Shards, Unanswered

# Words of gloo, NCCL and the store about a process that is not there any more.
_OF_PEER = re.compile(r"gloo|NCCL|Connection (?:closed|reset) by peer|Broken pipe|ProcessGroup", re.IGNORECASE)
_PATIENCE = 600.0  # seconds
TO_SEE = 30.0  # seconds from one rank's optimizer to another's: both come from the same averaging
_FIRST_COPY = 2  # steps: a graph that a step may not use again is used again in the next one


def _is_apart(modules: Collection[torch.nn.Module], kinds: Collection[type]) -> bool:
    """True if one process holds a part of a model, and is no rank of `fully_shard`."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    return (
        "torch.distributed.pipelining.stage" in sys.modules
        or any(issubclass(kind, fsdp) for kind in kinds)
        or any(hasattr(parameter, "to_local") for module in modules for parameter in module.parameters())
    )


class Ranks:
    """The state of the other processes as seen from this one."""

    _runs = 0

    def __init__(self) -> None:
        self.is_parallel = False  # gradients are averaged over processes
        self.is_manual = False  # by the loop itself
        self.is_sharded = False  # parameters are spread by `fully_shard`, so that even a forward pass needs all
        self.is_apart = False  # the model is spread in another way, so that nothing is replayed
        self.meeting: Meeting | None = None  # where ranks with averaged gradients exchange answers
        self.due_at = _FIRST_COPY  # the count of steps after which they copy their state next
        self.goes_back = False  # all of them hold copies
        self.has_missed = False  # the last copy that was due was not made
        self.num_steps = 0  # of optimizers
        self.num_checks = 0  # of averaged gradients
        self.parted = ""  # which rank has not answered
        self.rank: int | None = None
        self.shards = Shards()
        self._exchange: Exchange | None = None
        self._size = 1
        self._store: Any = None
        self._has_reported = False
        self._is_ending = False
        Ranks._runs += 1
        self._prefix = f"reprokit/{Ranks._runs}"

    def meet(self, modules: Collection[torch.nn.Module]) -> None:
        """A new root or optimizer was met: look at what is trained."""
        if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
            return
        kinds = {type(part) for module in modules for part in module.modules()}
        wrapper = torch.nn.parallel.DistributedDataParallel
        self.is_parallel = self.is_manual or any(issubclass(kind, wrapper) for kind in kinds)
        self.is_sharded = any(hasattr(kind, "_get_fsdp_state") for kind in kinds)
        if not (self.is_sharded or self._store is not None) and _is_apart(modules, kinds):
            self.is_apart, self.is_parallel, self.rank = True, False, distributed.get_rank()
            self._size = distributed.get_world_size()
        self._join()
        if self.is_sharded:
            self.shards.learn(modules)
            if self._exchange is None and self.rank is not None:
                self._exchange = Exchange(self._store, self._prefix, self.rank, self.shards)

    def _join(self) -> None:
        if not self.is_alone and self._store is None:
            self.rank, self._size = distributed.get_rank(), distributed.get_world_size()
            self._store = distributed.distributed_c10d._get_default_store()
            self._store.set(self._key("watches", self.rank), "yes")
            if not self.is_sharded:
                self.meeting = Meeting(self._store, f"{self._prefix}/meeting", self.rank, self._size)
                self.goes_back = True
        if self.is_sharded:
            self.part()

    def meet_averaging(self, total: int) -> None:
        """The loop averages gradients by itself, first in the step that ``total`` counts."""
        if self.is_apart:
            return
        self.is_manual = self.is_parallel = True
        self.due_at = total + _FIRST_COPY
        self._join()

    def part(self) -> None:
        """No copies at one step and no going back together any more."""
        if self.meeting is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that keeps it
                self.meeting.end(self.num_steps)
        self.meeting, self.goes_back, self.has_missed = None, False, False

    def meet_for_copy(self, own: CopyAnswer, total: int, *, is_end: bool) -> list[CopyAnswer] | None:
        """The ranks' answers when a copy is due after step ``total``, and when the next one is; ``None`` if a rank is
        gone or late. After one copy that was missed the ranks meet for the next, after two in a row no more.
        ``is_end``: that step was over before."""
        if self.meeting is None:
            return None
        self.num_steps = total + (not is_end)
        try:
            texts = self.meeting.exchange_or_miss("copy", json.dumps(asdict(own)), AT_END if is_end else AT_COPY)
        except (Parted, RuntimeError) as error:
            self.parted = str(error).partition("\n")[0]
            if isinstance(error, Late) and not (is_end or self.has_missed):
                self.has_missed, self.due_at = True, total + 1 + _FIRST_COPY
            else:
                self.part()
            return None
        self.has_missed = False
        answers = [CopyAnswer(**json.loads(text)) for text in texts]
        self.goes_back = all(answer.holds for answer in answers)
        wanted, most = max(answer.wanted for answer in answers), min(answer.most for answer in answers)
        self.due_at = total + 1 + max(1, min(wanted, most))
        return answers

    @property
    def is_alone(self) -> bool:
        """True if this process trains by itself."""
        return not (self.is_parallel or self.is_sharded)

    def is_of_peer(self, error: BaseException) -> bool:
        """True for an exception of a collective whose other processes have gone: it says nothing about this one."""
        return self.rank is not None and isinstance(error, RuntimeError) and _OF_PEER.search(str(error)) is not None

    def begin_update(self) -> None:
        """An optimizer is about to write the parameters: what this rank would send of them is no state of a step."""
        if self._exchange is not None:
            self._exchange.place = None

    def end_update(self, num_updates: int) -> None:
        """The parameters have had so many updates."""
        self.num_steps = num_updates
        if self._exchange is not None:
            self._exchange.place = num_updates

    def hurry(self) -> None:
        """The launcher is about to end this process, and maybe has ended others: wait for nobody any more."""
        self._is_ending = True
        if self.meeting is not None:
            self.meeting.is_ending = True
        if self._exchange is not None:
            self._exchange.is_ending = True

    def gather(self) -> dict[int, torch.Tensor]:
        """All whole parameters by the ``id`` of the spread ones, as this rank's step began; raises `Unanswered`."""
        if self._exchange is None or self._exchange.place is None or not self._are_all("watches"):
            raise Unanswered("not every process is watched, or an update was under way")
        return self.shards.gather(self._exchange)

    def report_bad(self, step: int, what: str) -> None:
        """The loss, or a gradient, of this rank is bad in this step."""
        if self._store is not None:
            self._store.set(self._key("bad", self.rank), what)
            self._store.set(self._key("bad step", step), "yes")

    def compare(self, step: int | None) -> dict[int, int]:
        """The step that each rank has found, without those that found none; nothing if not all can say."""
        if not self._are_all("watches"):
            return {}
        self._store.set(self._key("found", self.rank), "" if step is None else str(step))
        try:
            if not self._wait_for_all("found"):
                return {}
        except RuntimeError:  # the store is gone
            return {}
        found = [str(self._store.get(self._key("found", rank)), "utf-8") for rank in range(self._size)]
        return {rank: int(text) for rank, text in enumerate(found) if text}

    def withdraw(self, step: int) -> None:
        """The loss or gradient of this rank was bad in this step, and the loop has skipped it."""
        if self._store is not None:
            self._store.delete_key(self._key("bad", self.rank))
            self._store.delete_key(self._key("bad step", step))

    def is_bad_elsewhere(self, step: int) -> bool:
        """True if any rank has reported for this step."""
        return self._store is not None and self._has("bad step", step)

    def culprits(self) -> dict[int, str]:
        """The ranks that have reported, each with what is bad there; those with a bad loss come first."""
        known = [rank for rank in range(self._size) if self._store is not None and self._has("bad", rank)]
        reports = {rank: str(self._store.get(self._key("bad", rank)), "utf-8") for rank in known}
        return dict(sorted(reports.items(), key=lambda report: (report[1] != "loss", report[0])))

    def is_bad_only_here(self, step: int) -> bool:
        """True if averaged gradients of ``step``, which are bad on this rank, were good on another one, which has not
        reported bad ones within `TO_SEE` seconds.

        ``False``, at once, if a rank has reported a bad value of its own or is not watched.
        """
        what, ends_at = f"bad average {self.num_checks}", time.monotonic() + TO_SEE
        if self._store is None:
            return False
        self._store.set(self._key(what, self.rank), "yes")
        while self._are_all("watches") and not (self.is_bad_elsewhere(step) or self._are_all(what) or self._is_ending):
            if time.monotonic() > ends_at:
                return True
            time.sleep(0.05)
        return False

    def report_finding(self, is_culprit: bool) -> None:
        """After a bad gradient that all have seen: whether this rank's own step made it; the first answer counts."""
        if self._store is not None and not self._has_reported:
            self._has_reported = True
            self._store.set(self._key("finding", self.rank), "culprit" if is_culprit else "good")

    def wait_for_findings(self) -> list[int]:
        """The ranks whose own steps made a bad gradient, once all have reported; none, at once, if some rank is not
        watched."""
        if not self._are_all("watches") or not self._wait_for_all("finding"):
            return []
        return [rank for rank in range(self._size) if self._store.get(self._key("finding", rank)) == b"culprit"]

    def meet_all(self) -> bool:
        """Wait until every rank has done its part; ``False`` as soon as some rank is not watched."""
        if not self._are_all("watches"):
            return False
        self._store.set(self._key("done", self.rank), "yes")
        try:
            return self._wait_for_all("done")
        except distributed.DistNetworkError:  # the host of the store has gone, so it was done
            return True

    def leave(self) -> None:
        """This rank goes on unwatched: nobody is to wait for it."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that keeps it
                self._store.delete_key(self._key("watches", self.rank))
        self.part()
        self.close()

    def close(self) -> None:
        """Nobody asks this rank for anything any more."""
        if self._exchange is not None:
            self._exchange.close()
        self.shards = Shards()

    def describe(self) -> dict[str, Any]:
        """For the snapshot: the rank and the number of processes, nothing for a single process."""
        return {} if self.rank is None else {"rank": self.rank, "world_size": self._size}

    def _are_all(self, what: str) -> bool:
        return self._store is not None and all(self._has(what, rank) for rank in range(self._size))

    def _wait_for_all(self, what: str) -> bool:
        """Wait until every rank has written this; ``False`` if one goes on unwatched, or takes too long."""
        ends_at = time.monotonic() + _PATIENCE
        while not self._are_all(what):
            if self._is_ending or not self._are_all("watches") or time.monotonic() > ends_at:
                return self._are_all(what)
            time.sleep(0.05)
        return True

    def _has(self, what: str, which: int) -> bool:
        return bool(self._store.check([self._key(what, which)]))

    def _key(self, what: str, which: int | None) -> str:
        return f"{self._prefix}/{what}/{which}"
