"""Early warning: alarms of the detectors become events, and those that matter become snapshots of where they began.

An error here ends early warning, not the capture, and never the training.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from reprokit.capture.event_step import LEAST_SILENT
from reprokit.capture.failure_text import event_words
from reprokit.capture.loop import Loop
from reprokit.errors import pass_on
from reprokit.locate.quantity import norms_of
from reprokit.series.detectors import BATCH, Alarm, Detectors, Finding
from reprokit.series.events import EventKind, LineLog, TrainingEvent, event_of
from reprokit.words import visible_line

if TYPE_CHECKING:
    from reprokit.capture.failures import Failures
    from reprokit.capture.session import Session

_DELAY = 0.5  # seconds that an event may be reported late: slow steps are looked at in smaller batches
_MOST_LOOKS = 2  # for one reason to look at a parameter
_UNPAID_SECONDS = 1.0  # of CPU time: a look plays up to 256 steps, three times as slow as training
LOOKING_SHARE = 0.01  # of the CPU time of the run, beside these


_Parameters = WeakTensorKeyDictionary  # an id would be that of another parameter once its own is gone


class EarlyWarning:
    """Follows the numbers of a run. ``on_event`` is called with every event.

    ``_always`` are the parameters that had no gradient, or one of zeros, at every look so far. ``_looks`` counts for
    how many looks kept steps were played because a parameter was silent; that took ``_spent`` seconds of CPU time since
    ``_began``. Numbers were looked at up to the step at the place ``_seen``, gradients last when there were
    ``_looked_after`` copies of the state. ``_left`` steps are to come before anything is looked at.
    """

    def __init__(
        self,
        session: Session,
        loop: Loop,
        kinds: Collection[EventKind],
        saver: Failures,
        log: LineLog,
        on_event: Callable[[TrainingEvent], object] | None,
    ) -> None:
        self._session = session
        self._loop = loop
        self._saver = saver
        self._log = log
        self._on_event = on_event
        self._alarms: list[Alarm] = []
        self._detectors = Detectors(kinds, self._alarms.append)
        self._is_off = False
        self._left, self._seen, self._batch = 1, -1, 1
        self._finds_silent, self._looked_after = "dead" in kinds, 0
        self._began, self._spent = time.process_time(), 0.0
        self._always: _Parameters | None = None
        self._looks = _Parameters()
        loop.has_alarm = self._has_alarm
        loop.world.keeps_earlier = True

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
        if self._left > 0:
            return
        frame = sys._getframe(1)
        path = self.catch_up(frame, waits=False)
        if path is None and not self._steps_to_look:
            self._looked_after = self._loop.world.num_copies
            path = self.look_at_gradients(frame, is_last=False)
        self._left = 1 if self._detectors.is_waiting else max(1, min(self._batch, self._steps_to_look))
        if path is not None:
            self._session.stop()

    def act_now(self) -> None:
        """Report what the steps so far show; raises `CaptureStop` if a step was saved and the loop is to stop."""
        if self.catch_up(sys._getframe(1)) is not None:
            self._session.stop()

    @property
    def _steps_to_look(self) -> int:
        """Steps until gradients are to be looked at, which is done once after each copy of the state."""
        loop = self._loop
        if not self._finds_silent or loop.world.num_copies == self._looked_after:
            return BATCH
        earlier = loop.num_kept - loop.num_steps
        has_fewer = loop.world.num_copies > 2 and earlier < LEAST_SILENT  # copies of short memory
        return max(LEAST_SILENT - (loop.num_kept if has_fewer else loop.num_steps), 0)

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
            is_error = alarm.departure.severity == "error"
            saved = self._save(alarm, frame) if is_error and path is None else None
            if saved is not None:
                self.tell_saved(alarm, *saved)
                path, last = saved[0], alarm.shown_by
            else:
                self._emit(event_of(alarm.kind, alarm.departure, alarm.shown_by))
        return path

    def look_at_gradients(self, frame: FrameType | None, *, is_last: bool) -> Path | None:
        """Look for zeros, and play kept steps if there are any that were not looked at often enough; the path of the
        file, if one was written. ``is_last``: the run is over.

        That is twice: what began less than `LEAST_SILENT` steps ago is found at the next look, when the steps before
        that copy of the state are still kept.
        """
        if self._is_off or not self._finds_silent or self._loop.num_kept < LEAST_SILENT:
            return None
        try:
            finding = self._find_silent(is_last=is_last)
        except Exception as error:
            self._break_off(error)
            return None
        saved = self._save(finding, frame) if finding is not None else None
        if finding is None or saved is None:  # a gradient may be zero by design
            return None
        self.tell_saved(finding, *saved)
        return saved[0]

    def _find_silent(self, *, is_last: bool) -> Finding | None:
        """Play kept steps for the parameters that were not looked at often enough, if there is time for it."""
        groups = [group for optimizer in self._loop.world.optimizers for group in optimizer.param_groups]
        without = _silent([parameter for group in groups for parameter in group["params"]])
        always = without if self._always is None else [p for p in without if p in self._always]
        self._always = _Parameters({p: 0 for p in always})
        due = [p for p in without if p not in self._looks or self._looks[p] < _MOST_LOOKS]
        started = time.process_time()
        has_time = is_last or self._spent < _UNPAID_SECONDS + LOOKING_SHARE * (started - self._began)
        if not due or not has_time:
            return None
        finding = self._saver.find_silent({id(p) for p in always})
        for p in due:
            self._looks[p] = self._looks[p] + 1 if p in self._looks else 1
        self._spent += time.process_time() - started
        return finding

    def tell_saved(self, alarm: Alarm | Finding, path: Path, result: dict[str, Any]) -> None:
        """Report an event whose step was saved."""
        failure, module = result["failure"], result["failure"]["module"]
        found = failure.get("event") or {}
        if isinstance(alarm, Finding):
            what = {"zeros": "the gradient of `{}` is zero", "none": "`{}` gets no gradient"}[alarm.way]
            words = f"{what.format(alarm.name)} in {alarm.num_steps} steps from step {alarm.step} on"
            place, step = alarm.name.rpartition(".")[0] or alarm.name, self._loop.iterations.completed - 1
            event = TrainingEvent(alarm.kind, max(step, 0), "error", words, place, alarm.step)
        else:
            layers = (chapter["module"] for chapter in result["story"])
            event = event_of(alarm.kind, alarm.departure, alarm.shown_by)
            event = replace(event, place=module or found.get("source") or next(layers, None))
        if failure["kind"] == "dead":
            is_layer = module is not None and not module.startswith("<")
            lead = f"`{failure['call']}` lets no gradient through{f' in `{module}`' if is_layer else ''}: "
            event = replace(event, evidence=lead + event.evidence, place=module if is_layer else event.place)
        elif found:
            event = replace(event, evidence=event_words(result))
        elif failure["call"] is not None:
            event = replace(event, evidence=f"{event.evidence}; `{failure['call']}` is the origin")
        known = {field.name: found[field.name] for field in fields(event) if field.name in found}
        self._emit(replace(event, **known, snapshot=str(path)))

    def _save(self, alarm: Alarm | Finding, frame: FrameType | None) -> tuple[Path, dict[str, Any]] | None:
        """Save the step where an event began; after an error of ours nothing is looked for any more."""
        try:
            return self._saver.save_event(alarm, frame)
        except Exception as error:
            self._break_off(error)
            return None

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
            steps = self._loop.timeline.after(self._seen)
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


def _silent(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters that are trained and whose gradient is missing or zero.

    One fused norm over all gradients and one number per parameter; a device is waited for once.
    """
    found = [p for p in parameters if p.grad is None and p.requires_grad]
    dense = [p for p in parameters if p.grad is not None and p.grad.layout is torch.strided and p.grad.numel()]
    with torch.no_grad():
        norms = norms_of([p.grad.detach() for p in dense if p.grad is not None])
    return found + [p for p, norm in zip(dense, norms, strict=True) if norm == 0.0]
