"""Early warning: alarms of the detectors become events, and those that matter become snapshots of where they began.

An error here ends early warning, not the capture, and never the training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from reprokit.arrivals import pass_on
from reprokit.capture.early.alarm import EventKind, EventLog, TrainingEvent, event_of
from reprokit.capture.early.detectors import Alarm, Detectors, Finding, Numbers
from reprokit.capture.early.silent import silent_or_hooked
from reprokit.capture.failure_text import event_words
from reprokit.capture.rewind.checkpoint import LEAST_STEPS
from reprokit.capture.run.run_state import RunState
from reprokit.capture.save.event_step import LEAST_SILENT
from reprokit.visible import visible_line

_PACE = 300  # times the steps that were played to look for silent parameters pass until the next look


class EventHost(Protocol):
    """The session that events are told to."""

    def say(self, text: str) -> None:
        """Tell the user."""

    def complain(self, what: str, error: BaseException) -> None:
        """Say what broke."""

    def stop(self) -> None:
        """Stop the loop, if it is to."""


class EventSaver(Protocol):
    """Plays kept steps, and writes snapshots."""

    def save_event(self, alarm: Alarm | Finding, frame: FrameType | None) -> tuple[Path, dict[str, Any]] | None:
        """Write a snapshot of the step where an alarm began, if that was kept; its path and its summary."""

    def find_silent(self) -> Finding | None:
        """Play kept steps to find a parameter that learns nothing."""


class EarlyWarning:
    """Follows the numbers of a run. ``on_event`` is called with every event.

    ``_suspicion`` are the parameters without a gradient other than zero, and the number of hooks on gradients, when the
    state was copied last; ``_looked_at`` those for which kept steps were played. Until place ``_next_look`` none are.
    """

    def __init__(
        self,
        session: EventHost,
        run_state: RunState,
        kinds: Collection[EventKind],
        saver: EventSaver,
        log: EventLog,
        on_event: Callable[[TrainingEvent], object] | None,
    ) -> None:
        self._session = session
        self._run_state = run_state
        self._saver = saver
        self._log = log
        self._on_event = on_event
        self._alarms: list[Alarm] = []
        self._detectors = Detectors(kinds, self._alarms.append)
        self._finds_silent = "dead" in kinds
        self._num_copies = 1
        self._next_look = 0
        self._looked_at: frozenset[int] = frozenset()
        run_state.on_step = self._see
        run_state.history.keeps_earlier = True

    def forget(self) -> None:
        """Let go of everything that belongs to the user."""
        self._run_state.on_step = None
        self._detectors.forget()
        self._alarms.clear()

    @property
    def pending(self) -> Alarm | None:
        """The alarm that a failure of now is the end of."""
        return self._detectors.pending

    def act(self) -> None:
        """A step is over: tell what was seen in it; raises `CaptureStop` if it was saved and the loop is to stop."""
        num_copies = self._run_state.history.num_copies
        if num_copies == self._num_copies and not self._alarms:
            return
        frame = sys._getframe(1)
        is_saved = False
        for alarm in self._take_alarms():
            is_saved = self._tell(alarm, frame, may_save=not is_saved) or is_saved
        if num_copies != self._num_copies:
            self._num_copies = num_copies
            is_saved = is_saved or self._look_at_gradients(frame) is not None
        if is_saved:
            self._session.stop()

    def look_back(self, frame: FrameType | None) -> Path | None:
        """The run is over: look for parameters that have learned nothing; the path of the file, if one was written."""
        self._next_look = 0
        return self._look_at_gradients(frame)

    def _take_alarms(self) -> list[Alarm]:
        alarms, self._alarms[:] = list(self._alarms), []
        return alarms

    def _look_at_gradients(self, frame: FrameType | None) -> Path | None:
        """Look for zeros and hooks, and play kept steps if there are any that were not looked at."""
        place = self._run_state.iterations.total
        if not self._finds_silent or place < self._next_look or self._run_state.history.num_kept < LEAST_SILENT:
            return None
        try:
            suspicious = silent_or_hooked(self._run_state.history.optimizers)
            if not suspicious - self._looked_at:
                return None
            finding = self._saver.find_silent()
        except Exception as error:
            self._break_off(error)
            return None
        self._looked_at |= suspicious
        self._next_look = place + _PACE * LEAST_STEPS
        saved = self._saver.save_event(finding, frame) if finding is not None else None
        if finding is None or saved is None:  # a gradient may be zero by design
            return None
        self.tell_saved(finding, *saved)
        return saved[0]

    def _silent(self, finding: Finding) -> TrainingEvent:
        """The event of a parameter that learns nothing."""
        words = f"the gradient of `{finding.name}` is zero in {finding.num_steps} steps from step {finding.step} on"
        if finding.way == "nan":
            words = f"the gradient of `{finding.name}` is nan in step {finding.step}, and a hook makes it finite"
        place = finding.name.rpartition(".")[0] or finding.name
        return TrainingEvent(finding.kind, self._step, "error", words, place, finding.step)

    def tell_saved(self, alarm: Alarm | Finding, path: Path, result: dict[str, Any]) -> None:
        """Tell an event whose step was saved."""
        failure = result["failure"]
        found = failure.get("event") or {}
        origin = f"; `{failure['call']}` is the origin" if failure["call"] is not None else ""
        if isinstance(alarm, Finding):
            event = self._silent(alarm)
            event = replace(event, evidence=event.evidence + origin)
        else:
            event = event_of(alarm.kind, alarm.departure, self._step)
            layers = (chapter["module"] for chapter in result["story"])
            place = failure["module"] or found.get("source") or next(layers, None)
            event = replace(event, evidence=event_words(result) if found else event.evidence + origin, place=place)
        known = {name: value for name, value in found.items() if name not in ("source", "rows")}
        self._emit(replace(event, **known, snapshot=str(path)))

    def _tell(self, alarm: Alarm, frame: FrameType | None, *, may_save: bool) -> bool:
        """Tell an event; whether it was saved. The capture is over with the first one that was."""
        is_error = alarm.departure.severity == "error"
        saved = self._saver.save_event(alarm, frame) if is_error and may_save else None
        if saved is None:
            self._emit(event_of(alarm.kind, alarm.departure, self._step))
            return False
        self.tell_saved(alarm, *saved)
        return True

    @property
    def _step(self) -> int:
        return max(self._run_state.iterations.completed - 1, 0)

    def _see(self, numbers: Numbers) -> None:
        try:
            self._detectors.see(numbers)
        except Exception as error:
            self._break_off(error)

    def _emit(self, event: TrainingEvent) -> None:
        self._session.say(visible_line(event.line()))
        try:
            self._log.add(event)
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
