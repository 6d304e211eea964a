"""How ranks talk: all answer the same question in the store of the process group, and read one another's answers.

Nobody waits for a rank for ever: one that has ended says so, and for any other there is a time limit, which ends for
all ranks at once. Collectives run only right after a question to which all have answered that they are ready.

`Replicas` compares the parameters that every rank holds a copy of (`--on ranks`). Averaged gradients give every rank
the same bits, so hashes of equal parameters are equal. One hash of all travels with the answer before each copy of the
state; only when these differ ranks exchange one for each parameter, and values of the first that differs.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import distributed
from torch.nn.parameter import is_lazy

from reprokit import members, native, torch_private
from reprokit.capture.tensor_names import parameter_names
from reprokit.locate.failure import RankDifference
from reprokit.native import clock
from reprokit.words import counted

PATIENCE = 120.0  # seconds for an answer while ranks play their steps
_IN_COLLECTIVE = datetime.timedelta(seconds=60)  # for a rank that was ready a moment ago
_SHORTEST, _LONGEST = 0.0002, 0.02  # seconds between looks
_MET, _WATCHES = "met", "watches"
READY = "ready"
FAILED = "failed"  # a rank cannot play its steps
NOTHING = "nothing"  # was found in the steps that were played
DONE = "done"
_PIECE = 2**18  # elements that are weighted together
_MOST_SENT = 2**18  # elements of a parameter: as text they take up to 6 MiB, and a store refuses 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # two for each of eight bytes
Ask = Callable[[str, str], Sequence[str]]  # answers a question, returns the answers of all ranks in their order


class Parted(Exception):
    """A rank has not answered, as the text says; with a cause if the store has gone, with the process that kept it."""


class Late(Parted):
    """A rank has not answered in time, and may do so later."""


class Stopped(Exception):
    """A rank plays no further, as ``answers`` say."""

    def __init__(self, answers: Sequence[str]) -> None:
        found = [READY if answer.startswith(READY) else answer for answer in answers]
        super().__init__(", ".join(f"rank {rank}: {answer}" for rank, answer in enumerate(found)))


class SavedElsewhere(Exception):
    """Another rank saves its step, as the text says."""


class Meeting:
    """Exchanges answers through the ``store`` under keys that begin with ``prefix``.

    ``is_sharded``: even a forward pass needs all ranks. ``is_ending``: the launcher ends this process. ``said`` is what
    all ranks have answered last while they played, ``found`` the step that this one has found then.
    """

    def __init__(self, store: Any, prefix: str, rank: int, size: int, *, is_sharded: bool) -> None:
        self.rank, self.size, self.is_sharded = rank, size, is_sharded
        self.is_ending = self._is_playing = False
        self.said: Sequence[str] = ()
        self.found: Any = None
        self.warned: int | None = None  # the update at which this rank has something bad
        self._store, self._prefix = store, prefix
        self._num_asked: Counter[str] = Counter()
        self._old: dict[str, list[str]] = {}
        store.set(f"{prefix}/seat/{rank}", _WATCHES)

    def exchange(self, what: str, answer: str, patience: float = PATIENCE) -> list[str]:
        """The answers of all ranks, in their order, to the next question of a kind.

        Raises `Late` on all ranks if one does not answer in ``patience`` seconds, `Parted` if one is not watched.
        """
        self._num_asked[what] += 1
        question = f"{self._prefix}/{what}/{self._num_asked[what]}"
        keys = [f"{question}/{rank}" for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], answer)
            seen = self._wait(keys, patience)
            decision = self._store.compare_set(question, "", seen).decode()  # that of the first rank is that of all
            if decision != _MET:
                raise Late(decision)
            answers = [self._store.get(key).decode() for key in keys]
            for key in self._old.get(what, ()):
                self._store.delete_key(key)  # all have answered this question, so all have read the one before
        except RuntimeError as error:
            raise Parted(str(error).partition("\n")[0]) from error
        self._old[what] = [keys[self.rank], *([question] if self.rank == 0 else [])]
        return answers

    def _wait(self, keys: list[str], patience: float) -> str:
        started = clock.monotonic()
        while not self._store.check(keys):
            waited = clock.monotonic() - started
            missing = [rank for rank, key in enumerate(keys) if waited > 1 and not self._store.check([key])]
            for rank in missing:
                if not self._store.check([f"{self._prefix}/seat/{rank}"]):
                    raise Parted(f"rank {rank} is not watched")
                steps = self._store.get(f"{self._prefix}/seat/{rank}").decode()
                if steps != _WATCHES:
                    raise Parted(f"rank {rank} answers no more after {counted(int(steps), 'optimizer step')}")
            if self.is_ending:
                raise Parted("the launcher ends this process")
            if missing and waited > patience:
                return f"rank {missing[0]} did not answer within {patience:.0f} seconds"
            clock.sleep(min(_LONGEST, _SHORTEST + waited / 10))
        return _MET

    def end(self, num_steps: int) -> None:
        """This rank answers no more, after so many steps of optimizers."""
        with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that keeps it
            self._store.set(f"{self._prefix}/seat/{self.rank}", str(num_steps))

    def warn(self, update: int | None) -> None:
        """Something is bad on this rank, which all are to see at the update with this number; no more if ``None``."""
        if self.warned is not None:
            self._store.delete_key(f"{self._prefix}/bad/{self.warned}")
        if update is not None:
            self._store.set(f"{self._prefix}/bad/{update}", "yes")
        self.warned = update

    def is_warned(self, update: int) -> bool:
        return bool(self._store.check([f"{self._prefix}/bad/{update}"]))

    # -- playing in lockstep -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """In this context all ranks play the same, and meet before each call that needs the others.

        A rank that has found something, or fails, plays no further; nor do the others, which raise `Stopped`. A
        collective of gloo waits a minute for the others, not half an hour.
        """
        self._is_playing = True
        try:
            with torch_private.gloo_waits(_IN_COLLECTIVE):
                yield
        except Parted:
            raise
        except Exception:
            if self._is_playing:
                self.stop(FAILED)
            raise
        finally:
            self._is_playing = False

    def meet(self, what: str, text: str = "") -> list[str]:
        """All ranks are at the same place of the steps that they play, and say a ``text`` there; these texts.

        Raises `Stopped` if a rank is elsewhere, `Parted` if one is gone.
        """
        ready = f"{READY} {what} "
        self.said = self.exchange("play", ready + text)
        if not all(answer.startswith(ready) for answer in self.said):
            self._is_playing = False
            raise Stopped(self.said)
        return [answer.removeprefix(ready) for answer in self.said]

    def stop(self, found: str) -> None:
        """This rank plays no further."""
        self._is_playing = False
        self.said = self.exchange("play", found)

    def report(self, found: Any) -> None:
        """Something is bad in a step. Raises `Stopped` if all ranks are needed to record it."""
        self.found = found
        self.stop(f"{found.where} {found.number}")
        if self.is_sharded and found.where != "parameter":
            raise Stopped(self.said)


# -- parameters that every rank holds a copy of --------------------------------------------------------------------


class Replicas:
    """The replicated parameters of ``modules``. They were equal last after step ``equal_after``, and are not after
    ``different_after``. ``is_off``: gradients are averaged over a part of the ranks only."""

    def __init__(self, modules: Callable[[], list[torch.nn.Module]]) -> None:
        self.equal_after: int | None = None
        self.different_after = 0
        self.is_off = False
        self._modules = modules

    def parameters(self) -> list[torch.Tensor]:
        """Those of modules in `DistributedDataParallel` that it averages the gradients of, over all ranks.

        Without any, all that are trained: then the loop averages by itself. Buffers are left out: DDP writes those of
        rank 0 into the others before each forward pass, or leaves them different on purpose.
        """
        wrapper, size = torch.nn.parallel.DistributedDataParallel, distributed.get_world_size()
        roots = self._modules()
        wrapped = [part for root in roots for part in members.modules(root) if isinstance(part, wrapper)]
        averaged = [part.module for part in wrapped if distributed.get_world_size(part.process_group) == size]
        return [
            parameter
            for root in (averaged if wrapped else roots)
            for name, parameter in members.named_parameters(root)
            if name not in torch_private.ignored_by_ddp(root) and (wrapped or parameter.requires_grad)
            if not is_lazy(parameter) and type(native.detach(parameter)) is torch.Tensor and native.numel(parameter)
        ]

    def digest(self) -> str:
        """The number of parameters and one hash of all; empty if there is nothing to compare."""
        parameters = [] if self.is_off else self.parameters()
        return f"{len(parameters)}-{digest(parameters)}" if parameters else ""

    def differ(self, digests: Sequence[str], step: int) -> bool:
        """True if the digests of the ranks after ``step`` are those of different parameters."""
        if len({text.partition("-")[0] for text in digests}) > 1 or not digests[0]:
            return False  # some rank trains something else, or compares nothing
        is_different = len(set(digests)) > 1
        self.equal_after, self.different_after = (self.equal_after, step) if is_different else (step, 0)
        return is_different

    def compare(self, ask: Ask, rank: int, frame: FrameType | None) -> RankDifference | None:
        """The first parameter that differs, which all ranks look for at the same place; ``None`` if all are equal.
        It began between the last comparisons of all.

        ``rank`` is that of this process; ``frame`` is where the loop stands, for the names of its models.
        """
        parameters = self.parameters()
        rows = ask("numbers", " ".join(map(str, _numbers(parameters))))
        counts = Counter(rows)
        common = max(rows, key=lambda row: (counts[row], row == rows[0]))  # the largest group, else that of rank 0
        apart = tuple(rank for rank, row in enumerate(rows) if row != common)
        if not apart:
            return None
        sides = apart[0], rows.index(common)
        pairs = list(zip(*(rows[side].split() for side in sides), strict=False))
        differing = [number for number, (one, other) in enumerate(pairs) if one != other]
        first = native.detach(parameters[differing[0]])
        numbers = native.tolist(
            native.flatten(native.double(native.view_as_real(first) if native.is_complex(first) else first))[
                :_MOST_SENT
            ]
        )
        texts = ask("values", " ".join(map(repr, numbers)) if rank in sides else "")
        values = (map(float, texts[side].split()) for side in sides)
        gaps = [abs(one - other) for one, other in zip(*values, strict=False)]
        return RankDifference(
            parameter=parameter_names(self._modules(), frame)[id(parameters[differing[0]])],
            num_parameters=len(differing),
            ranks=apart,
            reference=sides[1],
            num_alike=counts[common],
            hashes=(_hash(pairs[differing[0]][0]), _hash(pairs[differing[0]][1])),
            largest=max(gaps) if gaps and math.isfinite(sum(gaps)) else None,
            equal_after=self.equal_after,
            began_at=self.different_after,
            is_exact=self.equal_after == self.different_after - 1,
        )


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """One hash of the bits of tensors, in their order."""
    return _hash(str(_numbers(tensors)))


def _numbers(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A number for each tensor: the sum of its bits as integers, weighted by their place.

    `torch.hash_tensor` is an exclusive or, which is the same for all constants of an even number of elements. Weights
    have 31 bits and integers 32, so that no product overflows.
    """
    found = []
    with native.no_grad():
        for tensor in map(native.detach, tensors):
            plain = native.view_as_real(native.resolve_conj(tensor)) if native.is_complex(tensor) else tensor
            pieces = [
                native.view(piece, _BITS[native.element_size(plain)])
                for piece in native.split(native.reshape(plain, -1), _PIECE)
            ]
            # multiplicative hashing (Knuth 6.4): numbers without a pattern, none of them zero
            weights = native.arange(2 * len(pieces[0]), device=plain.device) * 2654435761 & (2**31 - 1) | 1
            sums = [native.sum(piece * weights[: len(piece)]) for piece in pieces]
            found.append(native.sum(native.stack(sums) * (2 * native.arange(len(sums), device=plain.device) + 1)))
    return [int(number) for number in found]  # a device computes them all before the first is waited for


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
