"""The ranks of a training with averaged gradients write to one another in the store: copies at one step, going back.

Every rank answers the same question and reads the others' answers. Nobody waits for a rank for ever: one that has ended
says so, and for any other there is a time limit. Collectives run only right after an exchange in which all were ready.

The parameters that every rank holds a copy of, compared by hashes (`--on ranks`).

Averaged gradients give every rank the same bits, so hashes of equal parameters are equal. One hash of all travels with
the answer that ranks exchange before each copy of their state. Only when these differ the ranks exchange one hash for
each parameter, and the values of the first one that differs. No collective is called. `RankMeter` finds the first step
after which they differ: every rank plays its own steps, and hashes are exchanged after each.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import functools
import hashlib
import io
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import distributed
from torch.nn.parameter import is_lazy

from reprokit.capture.record import kinds
from reprokit.capture.record.compact_steps import PastStep
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.tensor_names import parameter_names
from reprokit.locate.failure import RankDifference
from reprokit.program.ir import Site
from reprokit.program.sites import make_site
from reprokit.words import counted

PATIENCE = 120.0  # seconds for an answer while ranks play their steps
AT_COPY = 10.0  # seconds; all ranks come from the same averaging, or one makes more steps than another
_MET = "met"
AT_END = 20.0  # seconds; one rank may evaluate or save the model while the others have nothing to do any more
_IN_COLLECTIVE = datetime.timedelta(seconds=60)  # for a rank that was ready a moment ago
_SHORTEST, _LONGEST = 0.0002, 0.02  # seconds between looks
READY = "ready"
FAILED = "failed"  # a rank cannot play its steps
NOTHING = "nothing"  # was found in the steps that were played
GOOD = "good"  # of the state of a rank, where a bad one is called by what is bad: `parameter`


class Parted(Exception):
    """A rank has not answered, as the text says; going back or copying at one step is over."""


class Late(Parted):
    """A rank has not answered in time, and may do so later."""


class Stopped(Exception):
    """A rank plays no further; the text says what every rank has found."""


class SavedElsewhere(Exception):
    """Going back has shown that ``rank`` made the bad value, at ``what``; that rank saves its step."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(f"rank {rank} saves its step")
        self.rank = rank
        self.what = what


@dataclass(frozen=True)
class CopyAnswer:
    """The message of a rank before all ranks copy their states: whether its own is bad, and when to copy again.

    ``most`` is for the memory that steps take, ``wanted`` for what a copy costs. ``holds``: it takes copies at all.
    ``digest`` is that of its parameters, empty if they are not compared.
    """

    bad: str
    wanted: int
    most: int
    holds: bool
    digest: str = ""


class Meeting:
    """Exchanges answers through the ``store`` under keys that begin with ``prefix``."""

    def __init__(self, store: Any, prefix: str, rank: int, size: int) -> None:
        self.rank = rank
        self.is_ending = False  # the launcher ends this process
        self._store = store
        self._prefix = prefix
        self._size = size
        self._num_asked = 0
        self._old: list[str] = []

    def exchange(self, what: str, answer: str, patience: float = PATIENCE) -> list[str]:
        """The answers of all ranks, in their order, to the next question. Raises `Parted` if one does not come in
        ``patience`` seconds."""
        self._num_asked += 1
        keys = self._keys(what)
        self._store.set(keys[self.rank], answer)
        self._wait(keys, patience)
        answers = self._answers(what)
        for key in self._old:
            self._store.delete_key(key)  # all have answered this question, so all have read the one before
        self._old = [keys[self.rank]]
        return answers

    def exchange_or_miss(self, what: str, answer: str, patience: float) -> list[str]:
        """Like `exchange`, but if an answer does not come in time all ranks raise `Late`, those that were late too."""
        answers, seen = [], _MET
        try:
            answers = self.exchange(what, answer, patience)
        except Late as late:
            seen = str(late)
        key = f"{self._prefix}/{self._num_asked}/{what}"
        decision = self._store.compare_set(key, "", seen).decode()  # that of the first rank is that of all
        if decision != _MET:
            raise Late(decision)
        if self.rank == 0:
            self._old.append(key)
        return answers or self._answers(what)

    def _keys(self, what: str) -> list[str]:
        return [f"{self._prefix}/{self._num_asked}/{what}/{rank}" for rank in range(self._size)]

    def _answers(self, what: str) -> list[str]:
        return [self._store.get(key).decode() for key in self._keys(what)]

    def _wait(self, keys: list[str], patience: float) -> None:
        started = time.monotonic()
        while not self._store.check(keys):
            waited = time.monotonic() - started
            missing = [rank for rank, key in enumerate(keys) if waited > 1 and not self._store.check([key])]
            ended = [rank for rank in missing if self._store.check([self._end(rank)])]
            if ended:
                steps = self._store.get(self._end(ended[0])).decode()
                raise Parted(f"rank {ended[0]} answers no more after {counted(int(steps), 'optimizer step')}")
            if self.is_ending:
                raise Parted("the launcher ends this process")
            if missing and waited > patience:
                raise Late(f"rank {missing[0]} did not answer within {patience:.0f} seconds")
            time.sleep(min(_LONGEST, _SHORTEST + waited / 10))

    def end(self, num_steps: int) -> None:
        """This rank answers no more, after so many steps of optimizers."""
        self._store.set(self._end(self.rank), str(num_steps))

    def _end(self, rank: int) -> str:
        return f"{self._prefix}/ended/{rank}"

    # All ranks play the same steps again, so that gradients are averaged as they were in training. Before each call
    # that needs the others they meet. One that has found something, or has failed, plays no further; nor do the others.

    def meet(self, what: str) -> None:
        """All ranks are about to do the same thing; raises `Stopped` if they are not, `Parted` if one is gone."""
        if set(self.tell(what)) != {what}:
            raise Stopped("the ranks play different calls")

    def tell(self, text: str) -> Sequence[str]:
        """The texts of all ranks at the same place of the steps that they play; raises `Stopped`, `Parted`."""
        answers = self.exchange("play", f"{READY} {text}")
        if not all(answer.startswith(READY) for answer in answers):
            found = [READY if answer.startswith(READY) else answer for answer in answers]
            raise Stopped(", ".join(f"rank {rank}: {answer}" for rank, answer in enumerate(found)))
        return [answer.removeprefix(f"{READY} ") for answer in answers]

    def stop(self, found: str) -> None:
        """This rank plays no further."""
        self.exchange("play", found)

    def agree(self, answer: str) -> Sequence[str]:
        """The answers of all to a question between two rounds of playing."""
        return self.exchange("round", answer)


@contextlib.contextmanager
def short_collectives() -> Iterator[None]:
    """In this context a collective of gloo waits a minute for the others, not half an hour."""
    group = distributed.distributed_c10d._get_default_group()
    kind = getattr(distributed, "ProcessGroupGloo", ())
    backend = group._get_backend(torch.device("cpu")) if torch.device("cpu") in group._device_types else None
    if not isinstance(backend, kind):
        yield
        return
    before = backend.options._timeout
    backend._set_default_timeout(_IN_COLLECTIVE)
    try:
        yield
    finally:
        backend._set_default_timeout(before)


_PIECE = 2**18  # elements that one number stands for; as text their values take up to 5.4 MiB, a store refuses 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # two for each of eight bytes
_IGNORED = "_ddp_params_and_buffers_to_ignore"
Ask = Callable[[str], Sequence[str]]  # gives the others a text, returns those of all ranks in their order


class Replicas:
    """The replicated parameters of ``modules``. ``num_compared`` counts comparisons; the parameters were equal last
    after step ``equal_after``, and are not after ``different_after``. ``is_off``: gradients are averaged over a part of
    the ranks only."""

    def __init__(self, modules: Callable[[], list[torch.nn.Module]]) -> None:
        self.num_compared = 0
        self.equal_after: int | None = None
        self.different_after = 0
        self.is_off = False
        self._modules = modules

    def parameters(self) -> list[torch.Tensor]:
        """Those of modules in `DistributedDataParallel` that it averages the gradients of, over all ranks.

        Without any, all that are trained: then the loop averages by itself. Buffers are left out: DDP writes those of
        rank 0 into the others before each forward pass, or leaves them different on purpose.
        """
        wrapper = torch.nn.parallel.DistributedDataParallel
        roots = self._modules()
        wrapped = [part for root in roots for part in root.modules() if isinstance(part, wrapper)]
        averaged = [
            part for part in wrapped if distributed.get_world_size(part.process_group) == distributed.get_world_size()
        ]
        found = [
            parameter
            for part in averaged
            for name, parameter in part.module.named_parameters()
            if name not in part.parameters_to_ignore
        ]
        if not wrapped:
            found = [
                parameter
                for root in roots
                for name, parameter in root.named_parameters()
                if parameter.requires_grad and name not in getattr(root, _IGNORED, ())
            ]
        return [parameter for parameter in found if _is_plain(parameter)]

    def digest(self) -> str:
        """The number of parameters and one hash of all; empty if there is nothing to compare."""
        parameters = [] if self.is_off else self.parameters()
        return f"{len(parameters)}-{digest(parameters)}" if parameters else ""

    def differ(self, digests: Sequence[str], step: int) -> bool:
        """True if the digests of the ranks after ``step`` are those of different parameters."""
        if len({text.partition("-")[0] for text in digests}) > 1 or not digests[0]:
            return False  # some rank trains something else, or compares nothing
        self.num_compared += 1
        if len(set(digests)) == 1:
            self.equal_after = step
            return False
        self.different_after = step
        return True

    def compare(self, ask: Ask, rank: int, frame: FrameType | None) -> RankDifference | None:
        """The first parameter that differs, which all ranks look for at the same place; ``None`` if all are equal.

        ``rank`` is that of this process; ``frame`` is where the loop stands, for the names of its models.
        """
        parameters = self.parameters()
        hashes = [_hash(numbers) for numbers in _numbers(parameters)]
        totals = ask(_hash(hashes))
        if len(set(totals)) == 1:
            return None
        reference, apart = _sides(totals)
        rows = [text.split() for text in ask(" ".join(hashes))]
        pairs = list(zip(rows[apart[0]], rows[reference], strict=False))
        differing = [number for number, (one, other) in enumerate(pairs) if one != other]
        first = differing[0]
        return RankDifference(
            parameter=parameter_names(self._modules(), frame)[id(parameters[first])],
            num_parameters=len(differing),
            ranks=apart,
            reference=reference,
            num_alike=totals.count(totals[reference]),
            hashes=pairs[first],
            largest=_largest(parameters[first].detach(), ask, rank, (apart[0], reference)),
        )


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """One hash of the bits of tensors, in their order."""
    return _hash(_hash(numbers) for numbers in _numbers([tensor for tensor in tensors if _is_plain(tensor)]))


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor.detach()) is torch.Tensor
        and tensor.layout is torch.strided
        and not (is_lazy(tensor) or tensor.is_meta or tensor.numel() == 0)
    )


def _sides(totals: Sequence[str]) -> tuple[int, tuple[int, ...]]:
    """A rank that stands for the largest group of equal ranks, with rank 0 among groups of one size, and the rest."""
    counts = Counter(totals)
    common = max(totals, key=lambda total: (counts[total], total == totals[0]))
    return totals.index(common), tuple(rank for rank, total in enumerate(totals) if total != common)


def _largest(parameter: torch.Tensor, ask: Ask, rank: int, sides: tuple[int, int]) -> float | None:
    """The largest absolute difference of a parameter between two ranks, in its first piece that differs; only these
    two send it."""
    (numbers,) = _numbers([parameter])
    texts = ask(" ".join(map(str, numbers)))
    pairs = zip(*(texts[side].split() for side in sides), strict=False)
    start = next((place for place, (one, other) in enumerate(pairs) if one != other), 0) * _PIECE
    file = io.BytesIO()
    torch.save(parameter.reshape(-1)[start : start + _PIECE].cpu().clone(), file)
    texts = ask(base64.b64encode(file.getvalue()).decode() if rank in sides else "")
    one, other = (torch.load(io.BytesIO(base64.b64decode(texts[side])), weights_only=True) for side in sides)
    if one.shape != other.shape:
        return None
    one, other = (tensor if tensor.is_complex() else tensor.double() for tensor in (one, other))
    found = float((one - other).abs().max())
    return found if found == found and found != float("inf") else None


def _numbers(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """For each tensor one number for each of its pieces: the sum of its bits as integers, weighted by their place.

    `torch.hash_tensor` is an exclusive or, which is the same for all constants of an even number of elements. Weights
    have 31 bits and integers 32, so that no product overflows. A device is waited for once.
    """
    with torch.no_grad():
        made = [_sums(tensor.detach()) for tensor in tensors]
        found: dict[int, list[int]] = {}
        for device in {sums.device for sums in made}:
            numbers = [number for number, sums in enumerate(made) if sums.device == device]
            flat = iter(torch.cat([made[number] for number in numbers]).tolist())
            found.update((number, [next(flat) for _ in range(made[number].numel())]) for number in numbers)
    return [found[number] for number in range(len(made))]


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    weights, pieces = _weights(plain.device), torch.split(plain.reshape(-1), _PIECE)
    bits = [piece.view(_BITS[plain.element_size()]) for piece in pieces]
    return torch.stack([(piece * weights[: piece.numel()]).sum() for piece in bits])


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Numbers without a pattern (multiplicative hashing, Knuth 6.4), none of them zero."""
    return torch.arange(2 * _PIECE, device=device) * 2654435761 & (2**31 - 1) | 1


def _hash(numbers: Iterable[object]) -> str:
    return hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).hexdigest()


class RankMeter:
    """Is shown every entry that a rewind plays (see `Watcher`), and compares the ranks when a step is over.

    ``difference`` is the first one, ``number`` the position of its step, ``-1`` if the ranks differ before they have
    played any. ``is_by_update``: an optimizer has made it. ``site`` is where it has stepped, or where this
    rank has written parameters in that step. ``frame`` is where the loop stands.
    """

    def __init__(self, together: Meeting, replicas: Replicas, frame: FrameType | None) -> None:
        self.difference: RankDifference | None = None
        self.number = -1
        self.is_by_update = False
        self.site: Site | None = None
        self._together = together
        self._replicas = replicas
        self._frame = frame
        self._step: PastStep | None = None
        self._updated = ""  # the digest before the update
        self._update: Entry | None = None
        self._then = ""

    def before(self, step: PastStep, entry: Entry) -> None:
        """Note what an update begins with; a new step ends the one before."""
        if step is not self._step:
            self.end_step()
            if self.difference is None:
                self._step, self._updated, self.site = step, "", None
                self._update = None
                self.number += 1
        if self.difference is not None:
            return
        if entry.kind is kinds.OPTIMIZER:
            self._updated, self._update = self._replicas.digest(), entry
        elif entry.writes_state:
            self._then = self._replicas.digest()

    def after(self, entry: Entry) -> None:
        """Note the line that has written parameters."""
        if self.difference is None and entry.writes_state and self._replicas.digest() != self._then:
            self.site = _site(entry)

    def end_step(self) -> None:
        """Compare the ranks after the step that was played last, or before the first one; not after a difference."""
        if self.difference is not None:
            return
        self.difference = self._replicas.compare(self._together.tell, self._together.rank, self._frame)
        if self.difference is not None:
            found, updated = self.difference, self._together.tell(self._updated)
            self.is_by_update = updated[found.ranks[0]] == updated[found.reference] != ""
            if self.is_by_update and self._update is not None:
                self.site = _site(self._update)


def _site(entry: Entry) -> Site | None:
    return make_site(entry.code, entry.instruction, entry.library) if entry.code is not None else None
