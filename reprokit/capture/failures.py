"""Handling of a verdict: the step is saved, the session is over, and the loop stops or goes on unwatched.

Also what is only found when the block ends, an exception that ends it included.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from reprokit.capture import exceptions
from reprokit.capture.event_step import EventStep
from reprokit.capture.judge import Pending
from reprokit.capture.loop import Loop
from reprokit.capture.meeting import Parted, SavedElsewhere
from reprokit.capture.save import Describing, Made, NothingFound, NotKept, Place, SkippedLoss, Verdict, backward_from
from reprokit.capture.tape import Op
from reprokit.errors import chain, has_arrived
from reprokit.series.course import QUANTITIES, Alarm
from reprokit.series.events import Finding
from reprokit.snapshot.format import Snapshot

if TYPE_CHECKING:
    from reprokit.capture.early_warning import EarlyWarning


class Owner(Protocol):
    """The session that fails."""

    stops: bool  # whether the loop is to stop at a failure

    def replaying(self, *, ends: bool = True) -> AbstractContextManager[None]:
        """A context in which a step may be replayed; the session is over then if it ``ends``."""

    def leave(self) -> None:
        """Take everything away."""

    def stop(self) -> None:
        """Stop the loop, if it is to."""

    def switch_off(self, error: BaseException) -> None:
        """End because of an error of our own."""

    def complain(self, what: str, error: Exception) -> None:
        """Say what broke."""

    def say(self, text: str) -> None:
        """Print a line."""

    def hand_over(self, path: Path) -> None:
        """Call the user's function for a new snapshot."""


class Failures:
    """Saves a failing step at ``place`` and ends the session.

    ``snapshots`` are the files written and ``results`` their summaries. ``is_deliberate``: the step was saved because
    the script raised an exception of its own, so that nothing but the script says that it failed. The loop has skipped
    ``num_skipped`` steps. ``_kept`` is the step in which the buffers ``_kept_for`` (ids) became nan or inf, while the
    training itself was finite.
    """

    def __init__(
        self,
        session: Owner,
        loop: Loop,
        place: Place,
        command: Sequence[str],
        *,
        takes_exceptions: bool,
        takes_skipped: bool,
    ) -> None:
        loop.failures = self
        self.snapshots: list[Path] = []
        self.results: list[dict[str, Any]] = []
        self.num_failed = 0  # of these files, those of steps that failed
        self.is_deliberate = self.is_terminated = False
        self.takes_skipped = takes_skipped
        self.num_skipped = 0
        self.early: EarlyWarning | None = None
        self.session = session
        self._loop = loop
        self._kept: Made | None = None
        self._kept_for: set[int] = set()
        self._reasons: set[str] = set()  # why steps of events were not saved
        self._place = place
        self._command = command
        self._takes_exceptions = takes_exceptions

    def forget(self) -> None:
        """Let go of everything that belongs to the user."""
        self._kept = None
        self._kept_for = set()

    # -- while the loop runs -------------------------------------------------------------------------------------

    def fail(
        self,
        where: str,
        *,
        op: Op | None = None,
        pending: Pending | None = None,
        is_late: bool = False,
        keep: Op | None = None,
    ) -> None:
        """Save the step and end the session; raises `CaptureStop` unless the loop is to go on.

        ``op`` is a backward call from a bad start, ``pending`` one that was performed.
        """
        try:
            if pending is not None:
                op = self.op_of(pending)
                is_late = is_late or op is None
            path = self.save(Verdict(where, sys._getframe(1), op, is_late, keep=keep))
            self._loop.ranks.leave()
        except Exception as error:
            self.session.switch_off(error)
            return
        if path is not None:
            self.session.stop()

    def op_of(self, pending: Pending) -> Op | None:
        return next((op for op in self._loop.tape.ops() if op.note is pending.note), None)

    def keep_bad_buffer(self) -> None:
        """Keep the step that made a buffer nan or inf; it is saved if nothing else fails until the block ends."""
        bad = [] if self._kept_for else self._loop.bad_buffers()
        if not bad:
            return
        self._kept_for = {id(buffer) for _, buffer in bad}
        verdict = Verdict("output", sys._getframe(1), is_late=True)
        self.session.say(self._announcement(verdict))
        with self.session.replaying(ends=False):
            try:
                self._kept = self._made(verdict)
            except Exception as error:
                self.session.complain(f"could not keep the step in which `{bad[0][0]}` became nan or inf", error)
                return
        self.session.say(
            f"`{bad[0][0]}` became nan or inf at step {self._kept.snapshot.step}; loss and gradients are finite, "
            "so the step is saved when the training ends without another failure"
        )

    def note_unseen(self, what: str) -> None:
        """Say what the run does that is not known, and keep it for the notes of a snapshot."""
        self._loop.unseen.append(what)
        self.session.say(what)

    def count_skipped(self, step: int) -> None:
        """The loop has skipped a step; say so at the first one."""
        self.num_skipped += 1
        if self.num_skipped == 1:
            what = f"a bad loss was seen at step {step}, and the loop skipped it"
            self.session.say(f"{what}; training goes on (`--on skipped` saves such a step)")

    # -- at the end ----------------------------------------------------------------------------------------------

    def look_back(self, error: BaseException | None) -> Path | None:
        """The block ends: check what has not been checked yet, and what it ended with; the file, if one was written."""
        loop, recorder = self._loop, self._loop.recorder
        raised = recorder.raised
        cause = exceptions.cause_of(error, raised[0] if raised is not None else None)
        place = exceptions.innermost_user_place(cause) if cause is not None else None
        frame = sys._getframe(2) if cause is None else place.tb_frame if place is not None else None
        with recorder.paused():
            loop.ranks.part()
            self.save_asked()
            self._let_go_of_skipped()
            path = self.early.catch_up(frame) if self.early is not None else None
            if path is not None:
                return path
            bad = loop.check_state()
            if bad is not None:
                return self.save(Verdict(bad, frame, is_late=True))
            path = self._look_at_the_last_step(error, frame)
            if path is not None or self.num_failed:
                return path
            is_buffer_bad = self._kept is not None or bool(loop.bad_buffers())
        if self._takes_exceptions and isinstance(cause, Exception):
            path = self._take_exception(cause, frame)
        if path is None and error is None and self.early is not None:
            path = self.early.look_at_gradients(frame, is_last=True)
        if path is None and is_buffer_bad:
            path = self.save(Verdict("output", frame, is_late=True))
        return path

    def _let_go_of_skipped(self) -> None:
        """The loop has ended: a bad loss whose gradients it has dropped is no failure."""
        judge = self._loop.judge
        if judge.pending is not None and not self.takes_skipped and judge.is_dropped(judge.pending):
            self.count_skipped(judge.pending.step)
            self._loop.tape.drop_gradients()
            judge.pending = None
            self._loop.flags.forget()

    def _look_at_the_last_step(self, error: BaseException | None, frame: FrameType | None) -> Path | None:
        """The loop has ended over a bad loss or gradient, and may have said so by ``error``; or it never updates."""
        loop, has_raised = self._loop, exceptions.ends_training(error)
        if not loop.matter or isinstance(error, (KeyboardInterrupt, GeneratorExit)):
            return None
        pending = loop.judge.pending
        if pending is not None:
            loop.timeline.loss = pending.loss
            op = self.op_of(pending)
            is_wanted = None if loop.ranks.is_alone else _has_origin
            return self.save(Verdict("loss", frame, op, is_late=op is None), is_wanted)
        found = exceptions.bad_value(loop.tape)
        raised = loop.recorder.raised  # an exception of torch is a failure of its own
        is_of_torch = raised is not None and any(one is raised[0] for one in chain(error))
        is_given_up = has_raised and not is_of_torch and not exceptions.is_mistake(error)
        if found is not None:
            number, code, instruction = found
            is_loss = (code, instruction) in loop.loss_sites
            is_scalar = any(loop.tape.known(tensor) == number for tensor, _, _ in loop.tape.scalars)
            if is_given_up or (is_scalar and (is_loss or not loop.loss_sites)):
                where = "loss" if is_loss or (is_scalar and not loop.loss_sites and not has_raised) else "output"
                return self.save(Verdict(where, frame, backward_from(number, code, instruction)))
        if loop.has_differentiated and not loop.iterations.total and loop.judge.has_bad_gradient():
            return self.save(Verdict("gradient", frame))
        return None

    def _take_exception(self, error: Exception, frame: FrameType | None) -> Path | None:
        loop, raised = self._loop, self._loop.recorder.raised
        known = next((e for e in chain(error) if raised is not None and e is raised[0]), None)
        if loop.ranks.is_of_peer(error):
            return None
        if has_arrived(error) or (known is None and not exceptions.is_inside_step(loop.tape)):
            return None
        op = raised[1] if raised is not None and known is not None else None
        described = exceptions.describe(known or error, op, loop.world.modules)
        if op is not None:
            loop.tape.add(op.kind, op.target, op.args, op.kwargs, (), (op.code, op.instruction), op.mode, op.note)
        return self.save(Verdict("exception", frame, raised=described))

    # -- events --------------------------------------------------------------------------------------------------

    def save_event(self, alarm: Alarm | Finding, frame: FrameType | None) -> tuple[Path, dict[str, Any]] | None:
        """Save the step in which an alarm began; the session is over then. ``None`` if that step was not kept."""
        if not self._loop.ranks.is_alone:
            return None
        path = self.save(Verdict("loss" if alarm.kind == "spike" else "gradient", frame, alarm=alarm))
        return (path, self.results[-1]) if path is not None else None

    def find_silent(self, always: Set[int], seconds: float) -> Finding | None:
        """Play kept steps to find a parameter that learns nothing; ``always`` are those that never got a gradient."""
        with self.session.replaying(ends=False):
            try:
                verdict = Verdict("gradient", sys._getframe(1))
                return EventStep(self._loop, verdict, self._command, {}).find_silent(always, seconds)
            except NotKept:
                return None

    def _save_pending(self, verdict: Verdict) -> Path | None:
        """Save the step where the run left its course, if what has failed now is how that ended."""
        if self.early is None or verdict.alarm is not None:
            return None
        path = self.early.catch_up(verdict.frame)
        alarm = self.early.pending
        if path is not None or alarm is None or verdict.raised is not None or not self._loop.ranks.is_alone:
            return path
        path = self.save(replace(verdict, alarm=alarm))
        if path is not None:
            self.early.tell_saved(alarm, path, self.results[-1])
        return path

    def save_asked(self, before: float = math.inf) -> None:
        """Save the steps before ``before`` that were asked for; training goes on."""
        loop = self._loop
        known = {mark.step for mark in loop.tape.marks}
        for step in sorted(step for step in loop.asked if step < before):
            loop.asked.discard(step)
            if step not in known and step >= loop.iterations.completed:
                self.session.say(f"step {step} was asked for, and the training ended before it was over")
                continue
            verdict = Verdict("", sys._getframe(2), asked=step)
            with self.session.replaying(ends=False):
                try:
                    made = Describing(loop, verdict, self._command, {"watch": loop.watch}).made()
                    made = replace(made, snapshot=self._place.private(made.snapshot))
                    path, snapshot = self._place.write(made, is_asked=True)
                except NotKept as reason:
                    self.session.say(f"step {step} was not saved: {reason}")
                    continue
                except Exception as error:
                    self.session.complain(f"could not save step {step}", error)
                    continue
            self.snapshots.append(path)
            self.results.append({**snapshot.summary(), "path": str(path)})
            self.session.hand_over(path)

    def end_here(self) -> None:
        """Stop the loop after its last step that was asked for; raises `CaptureStop`."""
        self.save_asked(self._loop.iterations.completed)
        self.session.leave()
        self.session.stops = True
        self.session.stop()

    # -- saving --------------------------------------------------------------------------------------------------

    def _made(self, verdict: Verdict) -> Made:
        """The failing step; the step that made a buffer nan or inf before, if the failure comes from that buffer."""
        loop, described = self._loop, {"watch": self._loop.watch}
        if verdict.difference is not None:
            made = loop.ranks.difference_made(Describing(loop, verdict, self._command, described))
            return replace(made, snapshot=self._place.private(made.snapshot))
        if verdict.alarm is not None:
            made = EventStep(loop, verdict, self._command, described).snapshot()
            return replace(made, snapshot=self._place.private(made.snapshot))
        if verdict.where == "output" and verdict.op is None and self._kept is not None:
            return self._kept
        is_later = not verdict.is_late and loop.has_bad_loss_before()
        verdict = replace(verdict, takes_skipped=self.takes_skipped, has_earlier=is_later)
        made = Describing(loop, verdict, self._command, described).snapshot()
        if self._kept is not None and id(made.culprit) in self._kept_for:
            return self._kept
        if made.snapshot.failure.is_given and loop.ranks.is_alone:
            with contextlib.suppress(NotKept):  # the user's code may not run again with the state of then
                made = EventStep(loop, verdict, self._command, described).beside_healthy(made)
        return replace(made, snapshot=self._place.private(made.snapshot))

    def _announcement(self, verdict: Verdict) -> str:
        """The line before the replay, which may take long: the failure and its step."""
        if verdict.alarm is not None:
            if isinstance(verdict.alarm, Finding):
                return f"`{verdict.alarm.name}` learns nothing; replaying step {verdict.alarm.step}"
            number = QUANTITIES[verdict.alarm.kind]
            return f"the {number} left its course at step {verdict.alarm.step}; going back to it"
        if verdict.difference is not None:
            step = verdict.difference.began_at
            return f"parameters differ between ranks after step {step}; going back to find the first such step"
        loss = self._start_of(verdict)
        if verdict.raised is not None:
            what = f"{verdict.raised.type} was raised"
        elif loss is not None:
            what = f"{'the loss' if verdict.where == 'loss' else 'a value'} is {loss}"
        else:
            named = "value" if verdict.op is not None else "buffer"
            what = f"a {named if verdict.where == 'output' else verdict.where} is nan or inf"
        doing = "going back to find the step that made it" if verdict.is_late else "replaying the step"
        pending = self._loop.judge.pending
        step, _ = self._loop.running()
        if pending is not None and verdict.op is not None and verdict.op.note is pending.note:
            step = pending.step
        return f"{what} at step {step}; {doing}"

    def _start_of(self, verdict: Verdict) -> float | None:
        """The single number that a backward call starts from."""
        op = verdict.op
        if op is None:
            return None
        if op.note.losses:
            seen = op.note.losses[0]
            return float(seen) if not isinstance(seen, torch.Tensor) or not seen.is_complex() else None
        found = [self._loop.tape.alive().get(number) for number in op.ins]
        first = found[0] if len(found) == 1 else None
        return float(first.detach()) if first is not None and first.numel() == 1 and not first.is_complex() else None

    def save(self, verdict: Verdict, is_wanted: Callable[[Snapshot], bool] | None = None) -> Path | None:
        """Write a snapshot of the failing step, if it ``is_wanted``; the session is over then, unless it turns out
        that the loop has skipped the step."""
        self.save_asked(self._loop.iterations.completed)
        path = self._save_pending(verdict)
        if path is not None:
            return path
        with self.until_saved():
            path = self._write(verdict, is_wanted)
            if path is not None:
                self.session.hand_over(path)
        return path

    @contextlib.contextmanager
    def until_saved(self) -> Iterator[None]:
        """Defer a SIGTERM until the block ends; it ends the process then, unless a saved step stops the loop."""
        arrived: list[int] = []
        try:
            with _termination_deferred(self._hurry) as arrived:
                yield
        finally:
            if arrived and not (self.num_failed and self.session.stops):
                signal.raise_signal(signal.SIGTERM)

    def _hurry(self) -> None:
        self.is_terminated = True
        self._loop.ranks.hurry()

    def _write(self, verdict: Verdict, is_wanted: Callable[[Snapshot], bool] | None) -> Path | None:
        path = None
        with self.session.replaying(ends=verdict.alarm is None and verdict.together is None):
            try:
                self.session.say(self._announcement(verdict))
                made = self._made(verdict)
                if is_wanted is not None and not is_wanted(made.snapshot):
                    return None
                path, snapshot = self._place.write(made)
                is_exception = verdict.raised is not None and snapshot.observed_at == "exception"
                self.is_deliberate = is_exception and verdict.raised.is_deliberate  # type: ignore[union-attr]
                result = {**snapshot.summary(), "path": str(path)}
            except (SkippedLoss, Parted, NothingFound, SavedElsewhere):
                raise
            except NotKept as reason:
                if str(reason) not in self._reasons:  # every later event has the same one
                    self._reasons.add(str(reason))
                    self.session.say(f"the step was not saved: {reason}")
                return None
            except Exception as error:
                self.session.complain("could not save the failing step", error)
                return None
            self.snapshots.append(path)
            self.results.append(result)
            self.num_failed += 1
        if path is not None:  # `SkippedLoss` ends the context, and not the session
            self.session.leave()
        return path


@contextlib.contextmanager
def _termination_deferred(hurry: Callable[[], None]) -> Iterator[list[int]]:
    """Defer the first SIGTERM: a launcher sends it to all ranks once one has ended, also to one that saves its step.

    Yields the signals that have arrived; ``hurry`` is called then. A handler of the script's own is left alone.
    """
    arrived: list[int] = []

    def defer(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        signal.signal(number, signal.SIG_DFL)
        hurry()

    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield arrived
        return
    signal.signal(signal.SIGTERM, defer)
    try:
        yield arrived
    finally:
        if signal.getsignal(signal.SIGTERM) is defer:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _has_origin(snapshot: Snapshot) -> bool:
    return snapshot.failure.call is not None or snapshot.failure.input_name is not None
