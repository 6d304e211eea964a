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

Parameters of which each process holds a part (`fully_shard`), and how they are put together again in one of them.

Parts travel through the store of the process group, not by a collective: a rank whose step failed often finds the
others inside one, which they cannot leave. So each rank has a thread that waits in the store for questions. It sends
its shards while its training stands between the same two updates as that of the rank that asks. All waiting has a
limit, so that a rank that is gone stops nobody.
"""

from __future__ import annotations

import _thread
import contextlib
import datetime
import io
import json
import re
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import distributed
from torch.utils.weak import WeakIdKeyDictionary

from reprokit.capture.record.state import num_bytes
from reprokit.capture.rewind.meeting import AT_COPY, AT_END, CopyAnswer, Late, Meeting, Parted

_PIECE = 4 * 2**20  # bytes: the store refuses values over 8 MiB
_TO_ANSWER = 60.0  # seconds for another rank to come to the same step and to send a batch of shards
_FOR_A_QUESTION = datetime.timedelta(days=30)
_LOOKS_EVERY = 0.01  # seconds
_TO_END = 5.0  # seconds


class Unanswered(Exception):
    """Another process did not answer a request within its time limit."""


class Exchange:
    """Answers questions of other ranks with the parts of ``shards`` that this one holds, and asks them.

    ``place`` counts the updates that the parameters have had; ``None`` while an update writes them. ``store`` is a
    connection of its own, because a connection that waits is of no use to anybody else. ``is_ending``: the launcher
    ends all ranks, so those that have not answered yet may be gone.
    """

    def __init__(self, store: Any, prefix: str, rank: int, shards: Shards) -> None:
        self.place: int | None = 0
        self.is_ending = False
        self._store = store
        self._waiting = store.clone()
        self._prefix = f"{prefix}/exchange"
        self._rank = rank
        self._shards = shards
        self._num_asked = 0
        self._is_open = True
        self._has_ended = threading.Event()
        _thread.start_new_thread(self._serve, ())  # of which the hooks of the capture see nothing

    def ask(self, rank: int, names: Sequence[str]) -> list[torch.Tensor]:
        """The shards of another rank, as they are at this rank's place in the training; raises `Unanswered`."""
        self._num_asked += 1
        answer = f"{self._rank}-{self._num_asked}"
        self._send(rank, {"names": list(names), "place": self.place, "answer": answer})
        try:
            self._wait_for(rank, self._key("answer", answer))
            said = json.loads(self._store.get(self._key("answer", answer)))
            if "refused" in said:
                raise Unanswered(f"rank {rank} {said['refused']}")
            pieces = []
            for name in [self._key("answer", f"{answer}/{number}") for number in range(said["num_pieces"])]:
                pieces.append(self._store.get(name))
                self._store.delete_key(name)
            self._store.delete_key(self._key("answer", answer))
        except RuntimeError as error:  # of the store
            raise Unanswered(f"rank {rank} did not answer: the store has gone") from error
        loaded: list[torch.Tensor] = torch.load(io.BytesIO(b"".join(pieces)), weights_only=True)
        return loaded

    def _wait_for(self, rank: int, key: str) -> None:
        """Wait in Python, because a call of the store holds up signals."""
        started = time.monotonic()
        while not self._store.check([key]):
            limit = _TO_END if self.is_ending else 2 * _TO_ANSWER
            if time.monotonic() - started > limit:
                raise Unanswered(f"rank {rank} did not answer within {round(limit)} seconds")
            time.sleep(_LOOKS_EVERY)

    def close(self) -> None:
        """End the thread, which must not outlive Python; questions that come later are not answered."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(RuntimeError):  # without its host the store has ended the thread
                self._send(self._rank, {})
                self._has_ended.wait(_TO_END)

    def _send(self, rank: int, question: dict[str, Any]) -> None:
        number = self._store.add(self._key("questions", rank), 1)
        self._store.set(self._key("question", f"{rank}-{number}"), json.dumps(question))

    def _serve(self) -> None:
        number = 1
        with contextlib.suppress(Exception):  # the store has gone: nobody asks any more
            while self._is_open:
                key = self._key("question", f"{self._rank}-{number}")
                self._waiting.wait([key], _FOR_A_QUESTION)
                question = json.loads(self._waiting.get(key))
                self._waiting.delete_key(key)
                if question:
                    self._answer(**question)
                number += 1
        self._has_ended.set()

    def _answer(self, names: list[str], place: int, answer: str) -> None:
        try:
            content = self._content(names, place)
        except Exception as error:
            self._waiting.set(self._key("answer", answer), json.dumps({"refused": str(error)}))
            return
        pieces = [content[start : start + _PIECE] for start in range(0, len(content), _PIECE)]
        for number, piece in enumerate(pieces):
            self._waiting.set(self._key("answer", f"{answer}/{number}"), piece)
        self._waiting.set(self._key("answer", answer), json.dumps({"num_pieces": len(pieces)}))

    def _content(self, names: list[str], place: int) -> bytes:
        """The shards at that place; raises `Unanswered` if the training is not there within the limit."""
        deadline = time.monotonic() + _TO_ANSWER
        while (now := self.place) is None or now < place:
            if not self._is_open or time.monotonic() > deadline:
                raise Unanswered("is not at the same step")
            time.sleep(_LOOKS_EVERY)
        file = io.BytesIO()
        torch.save([shard.cpu().clone() for shard in self._shards.local(names)], file)
        if self.place != place:
            raise Unanswered("went on to the next step")
        return file.getvalue()

    def _key(self, what: str, which: object) -> str:
        return f"{self._prefix}/{what}/{which}"


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
