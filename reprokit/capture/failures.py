"""What happens at a failure: the step is saved, the session is over, and the loop stops or goes on unwatched.

Also what is only found when the block ends, an exception that ends it included, and how several processes save and stop
together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from reprokit.capture import exceptions
from reprokit.capture.entry import Entry
from reprokit.capture.judge import Judge
from reprokit.capture.rescue import Made
from reprokit.capture.saving import Noticed, Place, snapshot_of
from reprokit.capture.training import Training
from reprokit.snapshot.format import Snapshot


class Owner(Protocol):
    """The session that fails."""

    stops: bool  # whether the loop is to stop at a failure

    def replaying(self, *, ends: bool = True) -> AbstractContextManager[None]:
        """A context in which a step may be replayed; the session is over then if it ``ends``."""

    def leave(self) -> None:
        """Take everything away."""

    def stop(self) -> None:
        """Stop the loop, if it is to."""

    def switch_off(self, error: Exception) -> None:
        """End because of an error of our own."""

    def complain(self, what: str, error: Exception) -> None:
        """Say what broke."""

    def say(self, text: str) -> None:
        """Tell the user."""


class Failures:
    """Saves a failing step at ``place`` and ends the session.

    ``snapshots`` are the files written and ``results`` their summaries. ``is_deliberate``: the step was saved because
    the script raised an exception of its own, so that nothing but the script says that it failed. ``held`` is a
    differentiation with a bad start that was begun all the same, because other processes wait for it. ``_kept`` is the
    step in which the buffers ``_kept_for`` (ids) went bad, while the training itself was finite.
    """

    def __init__(
        self,
        session: Owner,
        training: Training,
        judge: Judge,
        place: Place,
        command: Sequence[str],
        *,
        takes_exceptions: bool,
    ) -> None:
        self.snapshots: list[Path] = []
        self.results: list[dict[str, Any]] = []
        self.is_deliberate = False
        self.held: Entry | None = None
        self._kept: Made | None = None
        self._kept_for: set[int] = set()
        self._session = session
        self._training = training
        self._judge = judge
        self._place = place
        self._command = command
        self._takes_exceptions = takes_exceptions

    def forget(self) -> None:
        """Let go of everything that belongs to the user."""
        self.held = self._kept = None
        self._kept_for = set()

    def keep_bad_buffer(self) -> None:
        """Keep the step in which a buffer went bad; it is saved if nothing else fails until the block ends."""
        bad = [] if self._kept_for else self._judge.buffers()
        if not bad:
            return
        self._kept_for = {id(buffer) for _, buffer in bad}
        with self._session.replaying(ends=False):
            try:
                self._kept = self._snapshot(Noticed("output", sys._getframe(1), is_late=True))
            except Exception as error:
                self._session.complain(f"could not keep the step in which `{bad[0][0]}` went bad", error)
                return
        self._session.say(
            f"`{bad[0][0]}` went bad at step {self._kept.snapshot.step}; the loss and the gradients are finite, "
            "so the step is saved when the training ends without another failure"
        )

    def fail(self, observed_at: str, *, pending: Entry | None = None, is_late: bool = False) -> None:
        """Save the step and end the session; raises `CaptureStop` unless the loop is to go on."""
        path = self._save(Noticed(observed_at, sys._getframe(1), pending, is_late))
        if path is not None:
            self._session.stop()

    def fail_together(self, is_seen_by_all: bool) -> None:
        """One of several processes had a bad loss or gradient: its rank saves, and all stop in the same step."""
        frame, session, ranks = sys._getframe(1), self._session, self._training.ranks
        try:
            guilty = ranks.guilty()
            if self.held is not None:
                self._save(Noticed("loss", frame, self.held))
            elif guilty:
                session.leave()
                session.say(f"the loss went bad on rank {guilty[0]}, which saves its step")
            else:
                self._save(Noticed("gradient", frame), self._is_ours if is_seen_by_all else None)
                ranks.tell(False)  # in case that it could not find out: the others wait for an answer
            all_stop = is_seen_by_all and session.stops and ranks.meet_all()
        except Exception as error:
            session.switch_off(error)
            return
        if all_stop:
            session.stop()
        elif session.stops:
            session.say("the other processes have not seen it, so the training goes on, unwatched")

    def look_back(self, error: BaseException | None) -> Path | None:
        """The block ends: judge what has not been judged yet, and what it ended with; the file, if one was written."""
        raised = self._training.running.raised
        cause = exceptions.cause_of(error, raised[0] if raised is not None else None)
        frame = exceptions.innermost_user_place(cause)[0] if cause is not None else sys._getframe(2)
        with self._training.tape.paused():
            bad = self._judge.state()
            if bad is not None:
                return self._save(Noticed(bad, frame, is_late=True))
            if self._judge.matter and error is not None and exceptions.ends_training(error):
                pending = exceptions.bad_value(self._training.running.entries)
                if pending is not None:
                    observed_at = "loss" if exceptions.is_loss(pending, error) else "output"
                    return self._save(Noticed(observed_at, frame, pending))
            is_buffer_bad = self._kept is not None or bool(self._judge.buffers())
        path = None
        if self._takes_exceptions and isinstance(cause, Exception):
            path = self._take_exception(cause, frame)
        if path is None and is_buffer_bad:
            path = self._save(Noticed("output", frame, is_late=True))
        return path

    def _take_exception(self, error: Exception, frame: FrameType | None) -> Path | None:
        raised, entries = self._training.running.raised, self._training.running.entries
        known = next((e for e in exceptions.chain(error) if raised is not None and e is raised[0]), None)
        if known is None and not exceptions.is_inside_step(entries):
            return None
        entry = raised[1] if raised is not None and known is not None else None
        described = exceptions.describe(known or error, entry, self._training.history.modules)
        if entry is not None and not any(noted is entry for noted in entries):
            entries.append(entry)
        return self._save(Noticed("exception", frame, raised=described))

    def _is_ours(self, snapshot: Snapshot) -> bool:
        """Whether this process's own step made the bad gradient that all of them have after averaging."""
        own, ranks = snapshot.failure.call is not None or snapshot.failure.input_name is not None, self._training.ranks
        ranks.tell(own)
        guilty, rank = ranks.hear(), ranks.rank
        if guilty and rank not in guilty:
            self._session.say(f"the gradients went bad on rank {guilty[0]}, which saves its step")
        return rank in guilty or (not guilty and rank == 0)

    def _snapshot(self, noticed: Noticed) -> Made:
        """The failing step; the one in which a buffer went bad before, if that is where the failure comes from."""
        if noticed.observed_at == "output" and noticed.pending is None and self._kept is not None:
            return self._kept
        made = snapshot_of(self._training, noticed, self._command, {"watch": self._judge.watch})
        if self._kept is not None and id(made.culprit) in self._kept_for:
            return self._kept
        return replace(made, snapshot=self._place.private(made.snapshot))

    def _announcement(self, noticed: Noticed) -> str:
        """What was noticed, at which step, and what is done now, which may take long."""
        starts = noticed.pending.starts if noticed.pending is not None else []
        if noticed.raised is not None:
            what = f"{noticed.raised.type} was raised"
        elif len(starts) == 1 and starts[0].numel() == 1:
            what = f"{'the loss' if noticed.observed_at == 'loss' else 'a value'} is {starts[0].item()}"
        else:
            what = f"a {'buffer' if noticed.observed_at == 'output' else noticed.observed_at} is nan or inf"
        doing = "going back to find the step that made it" if noticed.is_late else "replaying the step"
        return f"{what} at step {self._training.iterations.completed}; {doing}"

    def _save(self, noticed: Noticed, is_wanted: Callable[[Snapshot], bool] | None = None) -> Path | None:
        """Write a snapshot of the failing step, if it ``is_wanted``; the session is over then in any case."""
        with self._session.replaying():
            try:
                self._session.say(self._announcement(noticed))
                made = self._snapshot(noticed)
                if is_wanted is not None and not is_wanted(made.snapshot):
                    return None
                path, snapshot = self._place.write(made)
            except Exception as error:
                self._session.complain("could not save the failing step", error)
                return None
            is_exception = noticed.raised is not None and snapshot.observed_at == "exception"
            self.is_deliberate = is_exception and noticed.raised.is_deliberate  # type: ignore[union-attr]
            self.snapshots.append(path)
            self.results.append({**snapshot.summary(), "path": str(path)})
            return path
