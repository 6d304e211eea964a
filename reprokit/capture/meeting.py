"""Ranks write to one another in the store of the process group: every rank answers the same question and reads the
others' answers.

Nobody waits for a rank for ever: one that has ended says so, and for any other there is a time limit. Collectives run
only right after an exchange in which all were ready.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Iterator, Sequence
from typing import Any

from reprokit import torch_private
from reprokit.words import counted

PATIENCE = 120.0  # seconds for an answer while ranks play their steps
_IN_COLLECTIVE = datetime.timedelta(seconds=60)  # for a rank that was ready a moment ago
_SHORTEST, _LONGEST = 0.0002, 0.02  # seconds between looks
_MET = "met"
READY = "ready"
FAILED = "failed"  # a rank cannot play its steps
NOTHING = "nothing"  # was found in the steps that were played
DONE = "done"


class Parted(Exception):
    """A rank has not answered, as the text says; going back or copying at one step is over."""


class Late(Parted):
    """A rank has not answered in time, and may do so later."""


class Stopped(Exception):
    """A rank plays no further; ``answers`` are what every rank has found."""

    def __init__(self, answers: Sequence[str]) -> None:
        found = [READY if answer.startswith(READY) else answer for answer in answers]
        super().__init__(", ".join(f"rank {rank}: {answer}" for rank, answer in enumerate(found)))
        self.answers = found


class SavedElsewhere(Exception):
    """Going back has shown that ``rank`` made the bad value, at ``what``; that rank saves its step."""

    def __init__(self, rank: int, what: str = "a value") -> None:
        super().__init__(f"rank {rank} saves its step")
        self.rank = rank
        self.what = what


class Meeting:
    """Exchanges answers through the ``store`` under keys that begin with ``prefix``.

    ``is_sharded``: even a forward pass needs all ranks. ``is_ending``: the launcher ends this process.
    """

    def __init__(self, store: Any, prefix: str, rank: int, size: int, *, is_sharded: bool) -> None:
        self.rank, self.is_sharded = rank, is_sharded
        self.is_ending = self._is_playing = False
        self.said: Sequence[str] = ()
        self._store, self._prefix, self._size = store, prefix, size
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

    def meet(self, what: str) -> None:
        """All ranks are about to do the same thing; raises `Stopped` if they are not, `Parted` if one is gone."""
        answers = self.tell(what)
        if set(answers) != {what}:
            self._is_playing = False
            raise Stopped(answers)

    def tell(self, text: str) -> Sequence[str]:
        """The texts of all ranks at the same place of the steps that they play; raises `Stopped`, `Parted`."""
        answers = self.exchange("play", f"{READY} {text}")
        if not all(answer.startswith(READY) for answer in answers):
            self._is_playing = False
            raise Stopped(answers)
        return [answer.removeprefix(f"{READY} ") for answer in answers]

    def stop(self, found: str) -> None:
        """This rank plays no further. ``said`` is what all ranks have found then, or where they are."""
        self._is_playing = False
        self.said = self.exchange("play", found)

    def found(self, where: str, number: int) -> None:
        """Something is bad in the step with this number. Raises `Stopped` if all ranks are needed to record it."""
        self.stop(f"{where} {number}")
        if self.is_sharded and where != "parameter":
            raise Stopped(self.said)

    def agree(self, answer: str) -> Sequence[str]:
        """The answers of all to a question between two rounds of playing."""
        return self.exchange("round", answer)
