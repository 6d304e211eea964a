"""Handling of a failure: the step is saved, the session is over, and the loop stops or goes on unwatched.

Also what is only found when the block ends, an exception that ends it included, and how several processes save and stop
together.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from reprokit.capture.early.alarm import QUANTITIES
from reprokit.capture.early.detectors import Alarm, Finding
from reprokit.capture.hooks.policy import Policy
from reprokit.capture.hooks.suspects import Suspects
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.screens import Suspect, Verdict
from reprokit.capture.rewind.meeting import Parted, SavedElsewhere
from reprokit.capture.run.run_state import RunState
from reprokit.capture.save import exceptions
from reprokit.capture.save.build_snapshot import BuiltSnapshot
from reprokit.capture.save.choose_step import NOT_ALL, NothingFound, Noticed, Place, SkippedLoss, snapshot_of
from reprokit.capture.save.event_step import DifferentRanks, EventStep, NotKept
from reprokit.errors import chain, has_arrived
from reprokit.snapshot.format import Snapshot
from reprokit.words import counted

if TYPE_CHECKING:
    from reprokit.capture.hooks.early_warning import EarlyWarning


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
    the script raised an exception of its own, so that nothing but the script says that it failed. ``suspects``
    are bad values that the loop may deal with itself; it has skipped ``num_skipped`` steps. ``_kept`` is the
    step in which the buffers ``_kept_for`` (ids) became nan or inf, while the training itself was finite.
    """

    def __init__(
        self,
        session: Owner,
        run_state: RunState,
        policy: Policy,
        place: Place,
        command: Sequence[str],
        *,
        takes_exceptions: bool,
        takes_skipped: bool,
    ) -> None:
        self.snapshots: list[Path] = []
        self.results: list[dict[str, Any]] = []
        self.is_deliberate = False
        self.suspects = Suspects(run_state)
        self.num_skipped = 0
        self.early: EarlyWarning | None = None
        self._kept: BuiltSnapshot | None = None
        self._kept_for: set[int] = set()
        self._is_terminated = False
        self._reasons: set[str] = set()  # why steps of events were not saved
        self._session = session
        self._run_state = run_state
        self._policy = policy
        self._place = place
        self._command = command
        self._takes_exceptions = takes_exceptions
        self._takes_skipped = takes_skipped

    def forget(self) -> None:
        """Let go of everything that belongs to the user."""
        self._kept = None
        self._kept_for = set()

    def keep_bad_buffer(self) -> None:
        """Keep the step that made a buffer nan or inf; it is saved if nothing else fails until the block ends."""
        bad = [] if self._kept_for else self._policy.buffers()
        if not bad:
            return
        self._kept_for = {id(buffer) for _, buffer in bad}
        noticed = Noticed("output", sys._getframe(1), is_late=True)
        self._session.say(self._announcement(noticed))
        with self._session.replaying(ends=False):
            try:
                self._kept = self._snapshot(noticed)
            except Exception as error:
                self._session.complain(f"could not keep the step in which `{bad[0][0]}` became nan or inf", error)
                return
        self._session.say(
            f"`{bad[0][0]}` became nan or inf at step {self._kept.snapshot.step}; loss and gradients are finite, "
            "so the step is saved when the training ends without another failure"
        )

    def fail(
        self, observed_at: str, *, pending: Entry | None = None, is_late: bool = False, keep: Entry | None = None
    ) -> None:
        """Save the step and end the session; raises `CaptureStop` unless the loop is to go on."""
        try:
            path = self._save(Noticed(observed_at, sys._getframe(1), pending, is_late, keep=keep))
            self._run_state.ranks.leave()
        except Exception as error:
            self._session.switch_off(error)
            return
        if path is not None:
            self._session.stop()

    @property
    def is_held(self) -> bool:
        """True if backward was called from a bad start and the loop has made no update since."""
        suspect = self._run_state.running.suspect
        return suspect is not None and suspect.pending is not None and suspect.has_begun

    def settle(self, suspect: Suspect, verdict: Verdict) -> None:
        """Act on what has become of a suspect; raises `CaptureStop` if the step failed and the loop is to stop."""
        is_failure = verdict == "failed" or (verdict == "skipped" and self._takes_skipped)
        try:
            path = self._save(self._noticed(suspect, sys._getframe(1))) if is_failure else None
            if is_failure:
                self._run_state.ranks.leave()
            else:
                self._let_go_of(suspect, verdict)
        except Exception as error:
            self._session.switch_off(error)
            return
        if path is not None:
            self._session.stop()

    def _let_go_of(self, suspect: Suspect, verdict: Verdict) -> None:
        """The training goes on; say so at the first step that the loop skips."""
        step = self._run_state.iterations.completed
        self._run_state.running.suspect = None
        self._run_state.iterations.micro_step += suspect.num_later
        if verdict == "skipped":
            self.suspects.leave_out(suspect)
            self._run_state.ranks.withdraw(step)
            self._policy.forget_flags()
            self.count_skipped(suspect.observed_at, step)

    def note_unseen(self, what: str) -> None:
        """Say what the run does that is not known, and keep it for the notes of a snapshot."""
        self._run_state.unseen.append(what)
        self._session.say(what)

    def count_skipped(self, observed_at: str, step: int) -> None:
        """The loop has skipped a step; say so at the first one."""
        self.num_skipped += 1
        if self.num_skipped == 1:
            what = f"a bad {observed_at} was seen at step {step}, and the loop skipped it"
            self._session.say(f"{what}; training goes on (`--on skipped` saves such a step)")

    def _noticed(self, suspect: Suspect, frame: FrameType | None) -> Noticed:
        self._run_state.timeline.loss = suspect.loss
        return Noticed(suspect.observed_at, frame, suspect.pending, last=suspect.last)

    def is_bad_only_here(self) -> bool:
        """True if averaged gradients are bad on this rank, and not on every one: then it saves and stops alone."""
        step, ranks = self._run_state.iterations.completed, self._run_state.ranks
        if not ranks.is_parallel or not ranks.is_bad_only_here(step):
            return False
        seen = f"averaged gradients are bad on rank {ranks.rank} at step {step}, and not on every rank"
        self._session.say(f"{seen}; rank {ranks.rank} saves its step")
        return True

    def fail_together(self, is_seen_by_all: bool, observed_at: str = "gradient") -> None:
        """One of several processes had a bad loss or gradient: its rank saves, and all stop in the same step."""
        frame, session, ranks = sys._getframe(1), self._session, self._run_state.ranks
        try:
            with self.until_saved():  # another rank may end before this one has begun to save
                if not (is_seen_by_all and self._go_back_together(frame, observed_at)):
                    self._save_or_leave(frame, is_seen_by_all)
            all_stop = self._all_stop(is_seen_by_all and (session.stops or ranks.is_sharded))
        except Exception as error:
            session.switch_off(error)
            return
        if all_stop:
            session.stop()
        if session.stops:
            session.say("the other processes have not seen it, so the training goes on, unwatched")
        if session.stops or not is_seen_by_all:
            self._run_state.ranks.leave()

    def _all_stop(self, may_meet: bool) -> bool:
        """True if the loop is to stop on all ranks, after each has done its part."""
        is_met = may_meet and not self._is_terminated and self._run_state.ranks.meet_all()
        return self._session.stops and (self._is_terminated or is_met)

    def say_parted(self, reason: str, *, is_compared: bool) -> None:
        """A rank has not answered, for this ``reason``: no ranks are compared any more, and none go back together, or
        only this copy was missed."""
        ranks, step = self._run_state.ranks, self._run_state.iterations.completed
        since = "`--on ranks` compares no more" if is_compared else "late failures are saved without going back"
        made = f"rank {ranks.rank} has made {counted(ranks.num_steps, 'optimizer step')}"
        until = f"no copy of the state after step {step}" if ranks.has_missed else f"{since} from step {step} on"
        self._session.say(f"{reason}; {made}; {until}")

    def fail_by_difference(self) -> None:
        """Parameters differ between ranks, which all of them know: the first rank that differs saves, and all stop.

        Where a rank does not answer, nobody waits for it: the training goes on.
        """
        session, frame, all_stop = self._session, sys._getframe(1), False
        try:
            try:
                seen = self._run_state.difference(frame)
            except Parted as reason:
                self._run_state.part()
                self.say_parted(str(reason), is_compared=True)
                return
            try:
                self._save(Noticed("parameter", frame, is_late=True, difference=seen))
                is_together = True
            except SavedElsewhere as elsewhere:
                is_together = True
                session.say(f"{elsewhere.what} differs on rank {elsewhere.rank}, which saves its step")
            except Parted:
                is_together = False
                session.say("nothing was saved, because a rank did not answer; the training goes on, unwatched")
            session.leave()
            all_stop = self._all_stop(session.stops and is_together)
            if not all_stop:
                self._run_state.ranks.leave()
        except Exception as error:
            session.switch_off(error)
        if all_stop:
            session.stop()

    def _save_or_leave(self, frame: FrameType | None, is_seen_by_all: bool) -> None:
        """Save the step that is running if this rank is to, or say which one is."""
        session, ranks, suspect = self._session, self._run_state.ranks, self._run_state.running.suspect
        culprits = self._culprits(is_seen_by_all)
        first = next(iter(culprits), None)
        saves = not ranks.is_sharded or ranks.rank == first  # one rank gathers the parameters
        if saves and suspect is not None and self.is_held:
            self._save(self._noticed(suspect, frame))
        elif saves and ranks.is_sharded:
            self._save(Noticed("gradient", frame))
        elif first is not None:
            session.leave()
            bad = "the loss" if culprits[first] == "loss" else f"a {culprits[first]}"
            session.say(f"{bad} is nan or inf on rank {first}, which saves its step")
        else:
            self._save(Noticed("gradient", frame), self._is_ours if is_seen_by_all else None)
            ranks.report_finding(False)  # in case that it could not find out: the others wait for an answer

    def _culprits(self, is_seen_by_all: bool) -> dict[int, str]:
        """The ranks whose step failed, in order; before those with a bad loss the one whose update came before it."""
        run_state, ranks = self._run_state, self._run_state.ranks
        culprits = ranks.culprits()
        if not (ranks.is_sharded and is_seen_by_all):
            return culprits
        bad = run_state.updates.first_bad(run_state.iterations.completed, run_state.running.entries)
        steps = ranks.compare(bad.update.step if bad is not None else None)
        return {min(steps, key=lambda rank: (steps[rank], rank)): "parameter"} if steps else culprits

    def look_back(self, error: BaseException | None) -> Path | None:
        """The block ends: check what has not been checked yet, and what it ended with; the file, if one was written."""
        raised = self._run_state.running.raised
        cause = exceptions.cause_of(error, raised[0] if raised is not None else None)
        place = exceptions.innermost_user_place(cause) if cause is not None else None
        frame = sys._getframe(2) if cause is None else place.tb_frame if place is not None else None
        with self._run_state.tape.paused():
            self._run_state.ranks.part()
            self._settle_skipped(error)
            path = self.early.catch_up(frame) if self.early is not None else None
            if path is not None:
                return path
            bad = self._policy.state()
            if bad is not None:
                return self._save(Noticed(bad, frame, is_late=True))
            path = self._look_back_at_suspect(error, frame)
            if path is not None or self.snapshots:
                return path
            is_buffer_bad = self._kept is not None or bool(self._policy.buffers())
        if self._takes_exceptions and isinstance(cause, Exception):
            path = self._take_exception(cause, frame)
        if path is None and error is None and self.early is not None:
            path = self.early.look_at_gradients(frame, is_last=True)
        if path is None and is_buffer_bad:
            path = self._save(Noticed("output", frame, is_late=True))
        return path

    def _settle_skipped(self, error: BaseException | None) -> None:
        """The loop has ended: let go of a bad loss or gradient that it skipped, so that it is not found late."""
        suspect = self._run_state.running.suspect
        if suspect is None or not self._policy.matter or self._takes_skipped:
            return
        if self.suspects.at_end(suspect, exceptions.ends_training(error)) == "skipped":
            self.settle(suspect, "skipped")

    def _look_back_at_suspect(self, error: BaseException | None, frame: FrameType | None) -> Path | None:
        """The loop has ended over a bad loss or gradient, and may have said so by ``error``; or it never updates."""
        running, has_raised = self._run_state.running, exceptions.ends_training(error)
        if not self._policy.matter or (isinstance(error, (KeyboardInterrupt, GeneratorExit))):
            return None
        suspect = running.suspect
        verdict = self.suspects.at_end(suspect, has_raised) if suspect is not None else None
        if suspect is not None and verdict in ("failed", "skipped"):
            if has_raised and not (suspect.has_begun or self.suspects.is_of_training(suspect.last)):
                suspect.observed_at = "output"  # nothing says that it is a loss
            return self._save(self._noticed(suspect, frame), None if self._run_state.ranks.is_alone else _has_origin)
        is_given_up = has_raised and not exceptions.is_mistake(error)
        pending = exceptions.bad_value(running.current) if is_given_up else None
        if pending is not None:
            observed_at = "loss" if self.suspects.is_of_training(pending) else "output"
            return self._save(Noticed(observed_at, frame, pending))
        if self.suspects.has_bad_gradient_without_update():
            return self._save(Noticed("gradient", frame))
        return None

    def _take_exception(self, error: Exception, frame: FrameType | None) -> Path | None:
        raised, entries = self._run_state.running.raised, self._run_state.running.entries
        known = next((e for e in chain(error) if raised is not None and e is raised[0]), None)
        if self._run_state.ranks.is_of_peer(error):
            return None
        if has_arrived(error) or (known is None and not exceptions.is_inside_step(self._run_state.running.current)):
            return None
        entry = raised[1] if raised is not None and known is not None else None
        described = exceptions.describe(known or error, entry, self._run_state.history.modules)
        if entry is not None and not any(noted is entry for noted in entries):
            entries.append(entry)
        return self._save(Noticed("exception", frame, raised=described))

    def _go_back_together(self, frame: FrameType | None, observed_at: str) -> bool:
        """If the state of a rank is bad, all find the step that made it so; true if a rank has saved that step."""
        try:
            together = self._run_state.go_back_together()
            if together is None:
                return False
            self._save(Noticed(observed_at, frame, is_late=True, together=together))
        except (Parted, NothingFound) as reason:
            self._run_state.unseen.append(f"{NOT_ALL} ({reason})" if isinstance(reason, Parted) else str(reason))
            return False
        except SavedElsewhere as elsewhere:
            self._session.leave()
            self._session.say(f"the first bad value is that of rank {elsewhere.rank}, which saves its step")
        return True

    def _is_ours(self, snapshot: Snapshot) -> bool:
        """True if this process's own step made the bad gradient that all of them have after averaging."""
        own, ranks = _has_origin(snapshot), self._run_state.ranks
        ranks.report_finding(own)
        culprits, rank = ranks.wait_for_findings(), ranks.rank
        if culprits and rank not in culprits:
            self._session.say(f"a gradient is nan or inf on rank {culprits[0]}, which saves its step")
        return rank in culprits or (not culprits and rank == 0)

    def save_event(self, alarm: Alarm | Finding, frame: FrameType | None) -> tuple[Path, dict[str, Any]] | None:
        """Save the step in which an alarm began; the session is over then. ``None`` if that step was not kept."""
        if not self._run_state.ranks.is_alone:
            return None
        path = self._save(Noticed("loss" if alarm.kind == "spike" else "gradient", frame, alarm=alarm))
        return (path, self.results[-1]) if path is not None else None

    def find_silent(self, always: Set[int]) -> Finding | None:
        """Play kept steps to find a parameter that learns nothing; ``always`` are those that never got a gradient."""
        with self._session.replaying(ends=False):
            try:
                noticed = Noticed("gradient", sys._getframe(1))
                return EventStep(self._run_state, noticed, self._command, {}).find_silent(always)
            except NotKept:
                return None

    def _save_pending(self, noticed: Noticed) -> Path | None:
        """Save the step where the run left its course, if what has failed now is how that ended."""
        if self.early is None or noticed.alarm is not None:
            return None
        path = self.early.catch_up(noticed.frame)
        alarm = self.early.pending
        if path is not None or alarm is None or noticed.raised is not None or not self._run_state.ranks.is_alone:
            return path
        path = self._save(replace(noticed, alarm=alarm))
        if path is not None:
            self.early.tell_saved(alarm, path, self.results[-1])
        return path

    def _snapshot(self, noticed: Noticed) -> BuiltSnapshot:
        """The failing step; the step that made a buffer nan or inf before, if the failure comes from that buffer."""
        described = {"watch": self._policy.watch}
        if noticed.alarm is not None or noticed.difference is not None:
            describing = DifferentRanks if noticed.difference is not None else EventStep
            made = describing(self._run_state, noticed, self._command, described).snapshot()
            return replace(made, snapshot=self._place.private(made.snapshot))
        if noticed.observed_at == "output" and noticed.pending is None and self._kept is not None:
            return self._kept
        is_later = not noticed.is_late and self._policy.has_bad_loss_before()
        noticed = replace(noticed, takes_skipped=self._takes_skipped, has_earlier=is_later)
        made = snapshot_of(self._run_state, noticed, self._command, described)
        if self._kept is not None and id(made.culprit) in self._kept_for:
            return self._kept
        if made.snapshot.failure.is_given and self._run_state.ranks.is_alone:
            with contextlib.suppress(NotKept):  # the user's code may not run again with the state of then
                made = EventStep(self._run_state, noticed, self._command, described).beside_healthy(made)
        return replace(made, snapshot=self._place.private(made.snapshot))

    def _announcement(self, noticed: Noticed) -> str:
        """The line before the replay, which may take long: the failure and its step."""
        if noticed.alarm is not None:
            if isinstance(noticed.alarm, Finding):
                return f"`{noticed.alarm.name}` learns nothing; replaying step {noticed.alarm.step}"
            number = QUANTITIES[noticed.alarm.kind]
            return f"the {number} left its course at step {noticed.alarm.step}; going back to it"
        if noticed.difference is not None:
            step = noticed.difference.began_at
            return f"parameters differ between ranks after step {step}; going back to find the first such step"
        starts = noticed.pending.starts if noticed.pending is not None else []
        if noticed.raised is not None:
            what = f"{noticed.raised.type} was raised"
        elif len(starts) == 1 and starts[0].numel() == 1:
            what = f"{'the loss' if noticed.observed_at == 'loss' else 'a value'} is {starts[0].item()}"
        else:
            named = "value" if noticed.pending is not None else "buffer"
            what = f"a {named if noticed.observed_at == 'output' else noticed.observed_at} is nan or inf"
        doing = "going back to find the step that made it" if noticed.is_late else "replaying the step"
        return f"{what} at step {self._run_state.iterations.completed}; {doing}"

    def _save(self, noticed: Noticed, is_wanted: Callable[[Snapshot], bool] | None = None) -> Path | None:
        """Write a snapshot of the failing step, if it ``is_wanted``; the session is over then, unless it turns out
        that the loop has skipped the step."""
        path = self._save_pending(noticed)
        if path is not None:
            return path
        with self.until_saved():
            path = self._write(noticed, is_wanted)
            if path is not None:
                self._session.hand_over(path)
        return path

    @contextlib.contextmanager
    def until_saved(self) -> Iterator[None]:
        """Defer a SIGTERM until the block ends; it ends the process then, unless a saved step stops the loop."""
        arrived: list[int] = []
        try:
            with _termination_deferred(self._hurry) as arrived:
                yield
        finally:
            if arrived and not (self.snapshots and self._session.stops):
                signal.raise_signal(signal.SIGTERM)

    def _hurry(self) -> None:
        self._is_terminated = True
        self._run_state.ranks.hurry()

    def _write(self, noticed: Noticed, is_wanted: Callable[[Snapshot], bool] | None) -> Path | None:
        path = None
        with self._session.replaying(ends=noticed.alarm is None and noticed.together is None):
            try:
                self._session.say(self._announcement(noticed))
                made = self._snapshot(noticed)
                if is_wanted is not None and not is_wanted(made.snapshot):
                    return None
                path, snapshot = self._place.write(made)
                is_exception = noticed.raised is not None and snapshot.observed_at == "exception"
                self.is_deliberate = is_exception and noticed.raised.is_deliberate  # type: ignore[union-attr]
                result = {**snapshot.summary(), "path": str(path)}
            except (SkippedLoss, Parted, NothingFound, SavedElsewhere):
                raise
            except NotKept as reason:
                if str(reason) not in self._reasons:  # every later event has the same one
                    self._reasons.add(str(reason))
                    self._session.say(f"the step was not saved: {reason}")
                return None
            except Exception as error:
                self._session.complain("could not save the failing step", error)
                return None
            self.snapshots.append(path)
            self.results.append(result)
        if path is not None:  # `SkippedLoss` ends the context, and not the session
            self._session.leave()
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
