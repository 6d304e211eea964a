"""The ranks of a training with averaged gradients write to one another in the store: copies at one step, going back.

Every rank answers the same question and reads the others' answers. Nobody waits for a rank for ever: one that has ended
says so, and for any other there is a time limit. Collectives run only right after an exchange in which all were ready.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

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
