"""Tensors from one process to another, through the store of the process group.

No collective: a rank whose step failed often finds the others inside one, which they cannot leave. So each rank has a
thread that waits in the store for questions. It sends its shards while its training stands between the same two updates
as that of the rank that asks. All waiting has a limit, so that a rank that is gone stops nobody.
"""

from __future__ import annotations

import _thread
import contextlib
import datetime
import io
import json
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from reprokit.capture.run.shards import Shards

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
