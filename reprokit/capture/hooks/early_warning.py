"""Early warning: alarms of the detectors become events, and those that matter become snapshots of where they began.

An error here ends early warning, not the capture, and never the training.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Set
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from reprokit.arrivals import pass_on
from reprokit.capture.early.alarm import EventKind, LineLog, TrainingEvent, event_of
from reprokit.capture.early.detectors import BATCH, Alarm, Detectors, Finding
from reprokit.capture.early.silent import hooked, silent
from reprokit.capture.failure_text import event_words
from reprokit.capture.run.run_state import RunState
from reprokit.capture.save.event_step import LEAST_SILENT
from reprokit.visible import visible_line

_DELAY = 0.5  # seconds that an event may be reported late: slow steps are looked at in smaller batches
_MOST_LOOKS = 2  # for one reason to look at a parameter
_UNPAID_LOOKS = 4  # of a run: two for its hooks at the start, two for a layer that dies later
_UNPAID_SECONDS = 1.0  # of CPU time for these: a look plays up to 256 steps, three times as slow as training
LOOKING_SHARE = 0.01  # of the CPU time from then on


_Parameters = WeakTensorKeyDictionary  # an id would be that of another parameter once its own is gone


class EventHost(Protocol):
    """The session that reports events."""

    def say(self, text: str) -> None:
        """Print a line."""

    def complain(self, what: str, error: BaseException) -> None:
        """Say what broke."""

    def stop(self) -> None:
        """Stop the loop, if it is to."""


class EventSaver(Protocol):
    """Plays kept steps, and writes snapshots."""

    def save_event(self, alarm: Alarm | Finding, frame: FrameType | None) -> tuple[Path, dict[str, Any]] | None:
        """Write a snapshot of the step where an alarm began, if that was kept; its path and its summary."""

    def find_silent(self, always: Set[int]) -> Finding | None:
        """Play kept steps to find a parameter that learns nothing."""


class EarlyWarning:
    """Follows the numbers of a run. ``on_event`` is called with every event.

    ``_always`` are the parameters that had no gradient, or one of zeros, at every look so far. ``_silent_looks`` and
    ``_hook_looks`` count for how many looks kept steps were played because a parameter was silent, or had a hook.
    After `_UNPAID_LOOKS` or `_UNPAID_SECONDS` none are before the CPU time ``_next_look``; other processes on the
    machine do not change that. Numbers were looked at up to the step at the place ``_seen``, gradients last when there
    were ``_looked_after`` copies of the state. ``_left`` steps are to come before anything is looked at.
    """

    def __init__(
        self,
        session: EventHost,
        run_state: RunState,
        kinds: Collection[EventKind],
        saver: EventSaver,
        log: LineLog,
        on_event: Callable[[TrainingEvent], object] | None,
    ) -> None:
        self._session = session
        self._run_state = run_state
        self._saver = saver
        self._log = log
        self._on_event = on_event
        self._alarms: list[Alarm] = []
        self._detectors = Detectors(kinds, self._alarms.append)
        self._is_off = False
        self._left, self._seen, self._batch = 1, -1, 1
        self._finds_silent, self._looked_after = "dead" in kinds, 0
        self._has_told_never = False
        self._next_look = 0.0
        self._num_looks, self._spent = 0, 0.0
        self._always: _Parameters | None = None
        self._silent_looks, self._hook_looks = _Parameters(), _Parameters()
        run_state.has_alarm = self._has_alarm
        run_state.history.keeps_earlier = True

    def forget(self) -> None:
        """Let go of everything that belongs to the user."""
        self._is_off = True
        self._detectors.forget()
        self._alarms.clear()

    @property
    def pending(self) -> Alarm | None:
        """The alarm that a failure of now is the end of; `catch_up` comes before."""
        return self._detectors.pending

    def act(self) -> None:
        """A step is over: after a batch of them report what was seen; raises `CaptureStop` as `act_now` does."""
        self._left -= 1
        if self._left <= 0:
            self._end_batch(sys._getframe(1))

    def act_now(self) -> None:
        """Report what the steps so far show; raises `CaptureStop` if a step was saved and the loop is to stop."""
        if self.catch_up(sys._getframe(1)) is not None:
            self._session.stop()

    def _end_batch(self, frame: FrameType) -> None:
        path = self.catch_up(frame, waits=False)
        if path is None and self._is_time_to_look:
            self._looked_after = self._run_state.history.num_copies
            path = self._look_at_gradients(frame)
        self._left = 1 if self._detectors.is_waiting else self._batch
        if path is not None:
            self._session.stop()

    @property
    def _is_time_to_look(self) -> bool:
        """True if enough steps have passed since a copy to look at gradients, which is done once after each."""
        history = self._run_state.history
        if history.num_copies == self._looked_after:
            return False
        earlier = history.num_kept - len(history.steps)
        has_fewer = history.num_copies > 2 and earlier < LEAST_SILENT <= history.num_kept  # copies of short memory
        return has_fewer or len(history.steps) >= LEAST_SILENT

    def catch_up(self, frame: FrameType | None, *, waits: bool = True) -> Path | None:
        """Report what the steps show that were not looked at yet; the path of the file, if one was written.

        The capture is over with that: what later steps show is nothing to report any more.
        """
        self._see(waits=waits)
        alarms, self._alarms[:] = list(self._alarms), []
        path, last = None, math.inf
        for alarm in alarms:
            if alarm.shown_by > last:
                break
            saved = self._tell(alarm, frame, may_save=path is None)
            if saved is not None:
                path, last = saved, alarm.shown_by
        return path

    def look_back(self, frame: FrameType | None) -> Path | None:
        """The run is over: look for parameters that have learned nothing; the path of the file, if one was written."""
        self._next_look = 0.0
        return self._look_at_gradients(frame)

    def _look_at_gradients(self, frame: FrameType | None) -> Path | None:
        """Look for zeros and hooks, and play kept steps if there are any that were not looked at often enough.

        That is twice: what began less than `LEAST_SILENT` steps ago is found at the next look, when the steps before
        that copy of the state are still kept.
        """
        history = self._run_state.history
        if self._is_off or not self._finds_silent or history.num_kept < LEAST_SILENT:
            return None
        try:
            finding = self._find_silent(silent(history.optimizers), hooked(history.optimizers))
        except Exception as error:
            self._break_off(error)
            return None
        if finding is not None and finding.way == "never":
            if not self._has_told_never:
                self._has_told_never = True
                self._emit(replace(self._silent(finding), severity="warning"))
            return None
        saved = self._save(finding, frame) if finding is not None else None
        if finding is None or saved is None:  # a gradient may be zero by design
            return None
        self.tell_saved(finding, *saved)
        return saved[0]

    def _find_silent(self, without: list[torch.Tensor], with_hook: list[torch.Tensor]) -> Finding | None:
        """Play kept steps for the parameters that were not looked at often enough, if the time has come."""
        always = without if self._always is None else [p for p in without if p in self._always]
        self._always = _Parameters({p: 0 for p in always})
        looks = [(self._silent_looks, p) for p in without] + [(self._hook_looks, p) for p in with_hook]
        due = [(counts, p) for counts, p in looks if p not in counts or counts[p] < _MOST_LOOKS]
        started = time.process_time()
        is_unpaid = self._num_looks < _UNPAID_LOOKS and self._spent < _UNPAID_SECONDS
        if not due or not (is_unpaid or started >= self._next_look):
            return None
        finding = self._saver.find_silent({id(p) for p in always})
        ended = time.process_time()
        for counts, p in due:
            counts[p] = counts[p] + 1 if p in counts else 1
        self._num_looks, self._spent = self._num_looks + 1, self._spent + ended - started
        self._next_look = ended + (ended - started) / LOOKING_SHARE
        return finding

    def _silent(self, finding: Finding) -> TrainingEvent:
        """The event of a parameter that learns nothing."""
        share = {"zeros": "the gradient of `{}` is zero", "nan": ""}.get(finding.way, "`{}` gets no gradient")
        if finding.others:
            share = f"`{{}}` and {len(finding.others)} more get no gradient"
        words = f"{share.format(finding.name)} in {finding.num_steps} steps from step {finding.step} on"
        if finding.way == "nan":
            words = f"the gradient of `{finding.name}` is nan in step {finding.step}, and a hook makes it finite"
        place = finding.name.rpartition(".")[0] or finding.name
        return TrainingEvent(finding.kind, self._step, "error", words, place, finding.step)

    def tell_saved(self, alarm: Alarm | Finding, path: Path, result: dict[str, Any]) -> None:
        """Report an event whose step was saved."""
        failure = result["failure"]
        found = failure.get("event") or {}
        origin = f"; `{failure['call']}` is the origin" if failure["call"] is not None else ""
        if isinstance(alarm, Finding):
            event, module = self._silent(alarm), failure["module"]
            is_layer = failure["kind"] == "dead" and module is not None and not module.startswith("<")
            lead = f"`{failure['call']}` lets no gradient through{f' in `{module}`' if is_layer else ''}: "
            if failure["kind"] == "dead":
                event = replace(event, evidence=lead + event.evidence, place=module if is_layer else event.place)
            else:
                event = replace(event, evidence=event.evidence + origin)
        else:
            event = event_of(alarm.kind, alarm.departure, alarm.shown_by)
            layers = (chapter["module"] for chapter in result["story"])
            place = failure["module"] or found.get("source") or next(layers, None)
            event = replace(event, evidence=event_words(result) if found else event.evidence + origin, place=place)
        known = {field.name: found[field.name] for field in fields(event) if field.name in found}
        self._emit(replace(event, **known, snapshot=str(path)))

    def _tell(self, alarm: Alarm, frame: FrameType | None, *, may_save: bool) -> Path | None:
        """Report an event; the path of its file, if it was saved."""
        is_error = alarm.departure.severity == "error"
        saved = self._save(alarm, frame) if is_error and may_save else None
        if saved is None:
            self._emit(event_of(alarm.kind, alarm.departure, alarm.shown_by))
            return None
        self.tell_saved(alarm, *saved)
        return saved[0]

    def _save(self, alarm: Alarm | Finding, frame: FrameType | None) -> tuple[Path, dict[str, Any]] | None:
        """Save the step where an event began; after an error of ours nothing is looked for any more."""
        try:
            return self._saver.save_event(alarm, frame)
        except Exception as error:
            self._break_off(error)
            return None

    @property
    def _step(self) -> int:
        return max(self._run_state.iterations.completed - 1, 0)

    def _has_alarm(self) -> bool:
        """True if one of the steps so far is to be saved; that is done as soon as the running one is over."""
        self._see(waits=True)
        self._left = 1 if self._alarms else self._left
        return any(alarm.departure.severity == "error" for alarm in self._alarms)

    def _see(self, *, waits: bool) -> None:
        """Look at the numbers of the steps so far; those on a device come later unless it ``waits`` for them."""
        if self._is_off:
            return
        try:
            steps = self._run_state.timeline.after(self._seen)
            if steps and (waits or not self._detectors.is_waiting or len(steps) >= self._batch):
                self._seen = steps[-1].place
                self._batch = max(1, min(BATCH, int(_DELAY / max(steps[-1].seconds, 1e-6))))
                self._detectors.see(steps)
            self._detectors.arrive(waits=waits)
        except Exception as error:
            self._break_off(error)

    def _emit(self, event: TrainingEvent) -> None:
        self._session.say(visible_line(event.line()))
        try:
            self._log.add(event.to_json())
        except OSError as error:
            self._session.complain(f"could not write `{self._log.path.name}`", error)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception as error:
                self._session.complain("`on_event` raised", error)

    def _break_off(self, error: Exception) -> None:
        pass_on(error)
        self.forget()
        self._session.complain("early warning is off after an error of its own", error)
