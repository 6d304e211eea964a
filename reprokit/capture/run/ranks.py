"""Training in several processes: finds the rank whose step failed, and stops all ranks together.

Nothing is exchanged while training with averaged gradients is healthy. A rank whose loss is bad writes that into the
store the process group was made with and goes on into its backward pass, because the others wait there. After the
all-reduce every rank holds the same bits, so all come to the same result about the gradients in the same step, and meet
at the store. A gradient that was good on another rank at the same check became bad after averaging: every rank writes
the number of its last good check into memory of the machine (`reports.py`). Where parameters are spread over the ranks,
every rank looks for reports once a step there instead: what a rank has reported before its last gradients are reduced
is there once everybody's backward pass is over. That holds on a CPU. A GPU is not waited for, so there a rank may look
before the report is written: it trains on, and those that have seen the report give up after `_PATIENCE`. The first
guilty rank then asks the others for their shards. In a tensor parallel model a backward pass may end without a
collective after the bad value: the others make their update, and the guilty rank stops alone.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import re
import sys
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import distributed

from reprokit.capture.rewind.meeting import AT_COPY, AT_END, CopyAnswer, Late, Meeting, Parted
from reprokit.capture.run.exchange import Exchange, Unanswered
from reprokit.capture.run.reports import Reports
from reprokit.capture.run.shards import Shards

# Words of gloo, NCCL and the store about a process that is not there any more.
_OF_PEER = re.compile(r"gloo|NCCL|Connection (?:closed|reset) by peer|Broken pipe|ProcessGroup", re.IGNORECASE)
_PATIENCE = 600.0  # seconds
_SHORT_PATIENCE = datetime.timedelta(seconds=20)  # between ranks that do the same
TO_SEE = 120.0  # seconds from one rank's optimizer to another's: both come from the same averaging
TO_KNOW = 5.0  # seconds from one tensor parallel rank's optimizer to another's: both come from the same collective
_FIRST_COPY = 2  # steps: a graph that a step may not use again is used again in the next one


def _stage_of(modules: Collection[torch.nn.Module]) -> Any:
    """The stage of a pipeline that one of the modules is; only a search through all objects finds it."""
    base = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", None)
    if base is None:
        return None
    found = (one for one in gc.get_objects() if issubclass(type(one), base))
    return next((stage for stage in found if any(stage.submod is module for module in modules)), None)


class Ranks:
    """The state of the other processes as seen from this one. ``is_parallel``: gradients are averaged over processes;
    ``is_sharded``: parameters are spread over them, so that even a forward needs all. ``meeting`` is where ranks with
    averaged gradients exchange answers; they take the next copy of the state after step ``due_at`` (a count of steps).
    ``goes_back``: all of them hold copies. ``num_steps`` of optimizers were made here, after ``num_checks`` of averaged
    gradients; ``parted`` says which rank has not answered. ``has_missed``: the last copy that was due was not made."""

    _runs = 0

    def __init__(self, shards_before: Callable[[int], dict[int, torch.Tensor]]) -> None:
        self.is_parallel = False
        self.is_sharded = False
        self.is_manual = False
        self.meeting: Meeting | None = None
        self.due_at = _FIRST_COPY
        self.goes_back = self.has_missed = False
        self.num_steps = self.num_checks = 0
        self.parted = ""
        self.rank: int | None = None
        self._stage: weakref.ref[Any] | None = None
        self.shards = Shards()
        self._shards_before = shards_before
        self._exchange: Exchange | None = None
        self._reports: Reports | None = None
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
        fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
        self.is_sharded = any(issubclass(kind, fsdp) for kind in kinds) or any(
            hasattr(parameter, "to_local") for module in modules for parameter in module.parameters()
        )
        if self.stage is None and (stage := _stage_of(modules)) is not None:
            self._stage = weakref.ref(stage)
        self._join()
        self._meet_shards(modules)

    def _join(self) -> None:
        if (not self.is_alone or self.stage is not None) and self._store is None:
            self.rank, self._size = distributed.get_rank(), distributed.get_world_size()
            self._store = distributed.distributed_c10d._get_default_store()
            self._store.set(self._key("watches", self.rank), "yes")
            if not self.is_sharded and self.stage is None:
                self.meeting = Meeting(self._store, f"{self._prefix}/meeting", self.rank, self._size)
                self.goes_back = True
        if self.is_sharded:
            self.part()
        if not self.is_alone and self._reports is None and self.rank is not None:
            self._reports = Reports(self._store, self._prefix, self.rank, self._size)

    def _meet_shards(self, modules: Collection[torch.nn.Module]) -> None:
        if self.is_sharded:
            self.shards.learn(modules)
            if self._exchange is None and self.rank is not None:
                self._exchange = Exchange(self._store, self._prefix, self.rank, self._shards_at)

    def meet_averaging(self, total: int) -> None:
        """The loop averages gradients by itself, first in the step that ``total`` counts."""
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
            texts = self.meeting.exchange_or_miss("copy", str(own), AT_END if is_end else AT_COPY)
        except (Parted, RuntimeError) as error:
            self.parted = str(error).partition("\n")[0]
            if isinstance(error, Late) and not (is_end or self.has_missed):
                self.has_missed, self.due_at = True, total + 1 + _FIRST_COPY
            else:
                self.part()
            return None
        self.has_missed = False
        answers = [CopyAnswer.read(text) for text in texts]
        self.goes_back = all(answer.holds for answer in answers)
        wanted, most = max(answer.wanted for answer in answers), min(answer.most for answer in answers)
        self.due_at = total + 1 + max(1, min(wanted, most))
        return answers

    @property
    def stage(self) -> Any:
        """The stage of a pipeline that this process trains."""
        return self._stage() if self._stage is not None else None

    @property
    def is_tensor_parallel(self) -> bool:
        """True if parameters are spread over processes and none are gathered by `fully_shard`."""
        return self.is_sharded and not self.shards.units and bool(self.shards.slots)

    @property
    def is_alone(self) -> bool:
        """True if this process trains by itself."""
        return not (self.is_parallel or self.is_sharded)

    def is_of_peer(self, error: BaseException) -> bool:
        """True for an exception of a collective whose other processes have gone: it says nothing about this one."""
        return not self.is_alone and isinstance(error, RuntimeError) and _OF_PEER.search(str(error)) is not None

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

    @property
    def is_ending(self) -> bool:
        """True if the launcher is about to end this process."""
        return self._exchange is not None and self._exchange.is_ending

    def gather(self, wanted: Collection[Any] | None = None) -> dict[int, torch.Tensor]:
        """The ``wanted`` or all whole parameters by the ``id`` of the spread ones, as this rank's step began; raises
        `Unanswered`."""
        if self._exchange is None or self._exchange.place is None or not self._are_all("watches"):
            raise Unanswered("not every process is watched, or an update was under way")
        return self.shards.gather(self._exchange, wanted)

    def _shards_at(self, place: int) -> dict[str, torch.Tensor]:
        """The shards of this rank after ``place`` updates; raises `CannotGoBack`."""
        is_now = self._exchange is not None and self._exchange.place == place
        return self.shards.local({} if is_now else self._shards_before(place))

    def report_bad(self, step: int, what: str, num_bad: int) -> None:
        """The loss, or a gradient, of this rank is bad in this step; ``num_bad`` gradients are known to be."""
        if self._store is not None:
            self._store.set(self._key("bad", self.rank), f"{num_bad} {what}")
            self._store.set(self._key("bad step", step), "yes")
            if self._reports is not None:
                self._reports.set(step)

    def claim(self) -> None:
        """This stage of a pipeline has made a bad value and saves its step."""
        self._store.set(self._key("saves", self.rank), "yes")

    def wait_for_claim(self) -> int | None:
        """The rank of the stage that saves its step; ``None`` if there is none within a short time."""
        ends_at = time.monotonic() + _SHORT_PATIENCE.total_seconds()
        while time.monotonic() < ends_at:
            for rank in range(self._size):
                if self._has("saves", rank):
                    return rank
            time.sleep(0.05)
        return None

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
            if self._reports is not None:
                self._reports.set(None)

    def is_bad_elsewhere(self, step: int) -> bool:
        """True if any rank has reported for this step."""
        is_known = self._reports.hold(step) if self._reports is not None else None
        return is_known if is_known is not None else self._store is not None and self._has("bad step", step)

    def culprits(self) -> dict[int, str]:
        """The ranks that have reported, each with what is bad there. A bad loss comes first, then the most bad
        gradients: in a tensor parallel model they reach other ranks only through a collective of the backward pass."""
        known = [rank for rank in range(self._size) if self._store is not None and self._has("bad", rank)]
        reports = {rank: str(self._store.get(self._key("bad", rank)), "utf-8").split() for rank in known}
        ordered = sorted(known, key=lambda rank: (reports[rank][1] != "loss", -int(reports[rank][0]), rank))
        return {rank: reports[rank][1] for rank in ordered}

    def see_bad(self, step: int) -> None:
        """This rank knows, before its update, that a gradient of ``step`` is bad, here or on another rank."""
        self._store.set(self._key(f"bad gradient {step}", self.rank), "yes")

    def is_seen_only_here(self, step: int) -> bool:
        """True if a gradient of ``step`` is bad on this rank, and not every rank knows within `TO_KNOW`; ``False``, at
        once, if a rank is not watched."""
        if not self._are_all("watches"):
            return False
        self.see_bad(step)
        return not self._wait_for_all(f"bad gradient {step}", TO_KNOW) and self._are_all("watches")

    def end_check(self, *, is_good: bool) -> None:
        """This rank has looked at averaged gradients."""
        self.num_checks += 1
        if is_good and self._reports is not None:
            self._reports.pass_check(self.num_checks)

    def is_bad_only_here(self, step: int) -> bool:
        """True if averaged gradients of ``step``, which are bad on this rank, were good on another one.

        Waits until every rank has checked them, `TO_SEE` seconds at most. Ranks that share no memory do not tell of
        good ones: there, those that have not reported bad ones by then had good ones. ``False``, at once, if a rank
        has reported a bad value of its own or is not watched.
        """
        what, ends_at = f"bad average {self.num_checks}", time.monotonic() + TO_SEE
        if self._store is None or self.rank is None:
            return False
        self._store.set(self._key(what, self.rank), "yes")
        while self._are_all("watches") and not self.is_bad_elsewhere(step):
            bad = {rank for rank in range(self._size) if self._has(what, rank)}
            # after a missed copy the ranks may make different numbers of steps, so that of a check says nothing
            is_even = self.meeting is not None and not self.has_missed
            good = self._reports.ranks_past(self.num_checks) if self._reports and is_even else None
            if len(bad | (good or set())) == self._size:
                return bool(good)
            if self._is_ending or time.monotonic() > ends_at:
                return bool(good) if good is not None else not self._is_ending
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

    def end(self) -> dict[int, int]:
        """The script ends here: how many steps of optimizers were made by each rank that had ended before."""
        if self._store is None or self.rank is None:
            return {}
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key("steps", self.rank), str(self.num_steps))
            ended = [rank for rank in range(self._size) if rank != self.rank and self._has("steps", rank)]
            return {rank: int(self._store.get(self._key("steps", rank))) for rank in ended}
        return {}

    def leave(self) -> None:
        """This rank goes on unwatched: nobody is to wait for it."""
        if self._store is not None:
            self._store.delete_key(self._key("watches", self.rank))
        self.part()
        self.close()

    def close(self) -> None:
        """Nobody asks this rank for anything any more."""
        if self._exchange is not None:
            self._exchange.close()
        if self._reports is not None:
            self._reports.close()
        self.shards = Shards()

    def describe(self) -> dict[str, Any]:
        """For the snapshot: the rank and the number of processes, nothing for a single process."""
        return {} if self.rank is None else {"rank": self.rank, "world_size": self._size}

    def _are_all(self, what: str) -> bool:
        return self._store is not None and all(self._has(what, rank) for rank in range(self._size))

    def _wait_for_all(self, what: str, seconds: float = _PATIENCE) -> bool:
        """Wait until every rank has written this; ``False`` if one goes on unwatched, or takes too long."""
        ends_at = time.monotonic() + seconds
        while not self._are_all(what):
            if self._is_ending or not self._are_all("watches") or time.monotonic() > ends_at:
                return self._are_all(what)
            time.sleep(0.05)
        return True

    def _has(self, what: str, which: int) -> bool:
        return bool(self._store.check([self._key(what, which)]))

    def _key(self, what: str, which: int | None) -> str:
        return f"{self._prefix}/{what}/{which}"
