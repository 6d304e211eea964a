"""Parameters of which each process holds a part (`fully_shard`), and how they are put together again in one of them.

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
import threading
import time
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from reprokit.capture.record.state import num_bytes

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
