"""Early warning: numbers that leave their course become events, and those that matter snapshots of where they began.

The numbers are those that a step has left anyway: the loss, the norm that the loop clips its gradients by, the scale of
a grad scaler; nothing is computed for them. They are looked at in batches of steps: between the kernels of a step the
caches are cold, so that one look at many costs little more than at one, and a device is waited for once.

An error here ends early warning, not the capture, and never the training.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from reprokit.capture.event_step import LEAST_SILENT
from reprokit.capture.failure_text import event_words
from reprokit.capture.loop import Loop
from reprokit.capture.meters import is_capturing
from reprokit.errors import pass_on
from reprokit.locate.quantity import norms_of, number_of, numbers_of
from reprokit.series.course import OF_NORMS, Alarm, Course, EventKind, ScaleFalls
from reprokit.series.events import Finding, LineLog, TrainingEvent, event_of
from reprokit.series.timeline import Numbers, parameters_of
from reprokit.words import visible_line

if TYPE_CHECKING:
    from reprokit.capture.failures import Failures
    from reprokit.capture.session import Session

BATCH = 32  # steps whose numbers are looked at together
_NORMS_IN_A_ROW = 5  # of gradients: their norm varies more than the loss
_DELAY = 0.5  # seconds that an event may be reported late: slow steps are looked at in smaller batches
_UNPAID_SECONDS = 1.0  # of CPU time: a look plays up to 256 steps, three times as slow as training
LOOKING_SHARE = 0.01  # of the CPU time of the run, beside these
_FOLLOWED: Mapping[EventKind, tuple[str, Callable[[], Course | ScaleFalls]]] = {
    "spike": ("loss", Course),
    "explosion": ("norm", functools.partial(Course, "explosion", _NORMS_IN_A_ROW, OF_NORMS)),
    "scale": ("scale", ScaleFalls),
}

T = TypeVar("T")


class EarlyWarning:
    """Follows the numbers of a run, each optimizer's by themselves. ``on_event`` is called with every event.

    ``_always`` are the parameters that had no gradient, or one of zeros, at every look so far; playing kept steps
    because of such parameters took ``_spent`` seconds of CPU time since ``_began``. Numbers were looked at up to the
    step at the place ``_seen``, gradients when there were ``_looked`` steps. In ``_left`` steps is the next look.
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
        self._session, self._loop, self._saver = session, loop, saver
        self._log, self._on_event = log, on_event
        self._alarms: list[Alarm] = []
        self._followed = [(kind, *_FOLLOWED[kind]) for kind in _FOLLOWED if kind in kinds]
        self._courses: dict[tuple[EventKind, int], Course | ScaleFalls] = {}
        self._is_off = False
        self._left, self._seen, self._batch = 1, -1, 1
        self._finds_silent, self._looked = "dead" in kinds, 0
        self._began, self._spent = time.process_time(), 0.0
        self._always: WeakTensorKeyDictionary | None = None  # an id would be that of another parameter later
        loop.has_alarm = self._has_alarm
        loop.world.keeps_earlier = True

    def forget(self) -> None:
        """Let go of everything that belongs to the user."""
        self._is_off = True
        self._alarms.clear()

    @property
    def pending(self) -> Alarm | None:
        """The alarm that a failure of now is the end of: numbers are off their course, though not for long enough.
        `catch_up` comes before."""
        found = [one for course in self._courses.values() if (one := course.pending) is not None]
        return min(found, key=lambda one: (one.kind != "spike", one.place), default=None)

    def act(self) -> None:
        """A step is over: after a batch of them report what was seen; raises `CaptureStop` as `act_now` does."""
        self._left -= 1
        if self._left > 0:
            return
        frame = sys._getframe(1)
        path = self.catch_up(frame) or self.look_at_gradients(frame, is_last=False)
        missing = LEAST_SILENT - self._loop.num_kept if self._finds_silent else 0
        self._left = min(self._batch, missing) if missing > 0 else self._batch
        if path is not None:
            self._session.stop()

    def act_now(self) -> None:
        """Report what the steps so far show; raises `CaptureStop` if a step was saved and the loop is to stop."""
        if self.catch_up(sys._getframe(1)) is not None:
            self._session.stop()

    def catch_up(self, frame: FrameType | None) -> Path | None:
        """Report what the steps show that were not looked at yet; the path of the file, if one was written.

        The capture is over with that: what later steps show is nothing to report any more.
        """
        self._see()
        alarms, self._alarms = self._alarms, []
        path, last = None, math.inf
        for alarm in alarms:
            if alarm.shown_by > last:
                break
            saved = self._save(alarm, frame) if alarm.severity == "error" and path is None else None
            if saved is not None:
                path, last = saved, alarm.shown_by
            else:
                self._emit(event_of(alarm))
        return path

    def look_at_gradients(self, frame: FrameType | None, *, is_last: bool) -> Path | None:
        """Look for zeros, and play kept steps if there are any; the path of the file, if one was written. ``is_last``:
        the run is over."""
        total = self._loop.iterations.total
        is_early = not is_last and total < self._looked + LEAST_SILENT
        if self._is_off or not self._finds_silent or self._loop.num_kept < LEAST_SILENT or is_early:
            return None
        self._looked = total
        finding = self._guarded(lambda: self._find_silent(is_last=is_last))
        return self._save(finding, frame) if finding is not None else None  # a gradient may be zero by design

    def _find_silent(self, *, is_last: bool) -> Finding | None:
        """Play kept steps if a parameter learns nothing now, and there is time for it."""
        without = _silent([p for optimizer in self._loop.world.optimizers for p in parameters_of(optimizer)])
        always = without if self._always is None else [p for p in without if p in self._always]
        self._always = WeakTensorKeyDictionary({p: 0 for p in always})
        started = time.process_time()
        has_time = is_last or self._spent < _UNPAID_SECONDS + LOOKING_SHARE * (started - self._began)
        if not without or not has_time:
            return None
        finding = self._saver.find_silent({id(p) for p in always})
        self._spent += time.process_time() - started
        return finding

    def tell_saved(self, alarm: Alarm | Finding, path: Path, result: dict[str, Any]) -> None:
        """Report an event whose step was saved."""
        failure, module = result["failure"], result["failure"]["module"]
        found = failure.get("event") or {}
        if isinstance(alarm, Finding):
            name, is_layer = alarm.name, module is not None and not module.startswith("<")
            lead = f"`{failure['call']}` lets no gradient through{f' in `{module}`' if is_layer else ''}"
            what = f"`{name}` gets no gradient" if alarm.is_missing else f"the gradient of `{name}` is zero"
            words = f"{lead}: {what} in {alarm.num_steps} steps from step {alarm.step} on"
            place, step = module if is_layer else name.rpartition(".")[0] or name, self._loop.iterations.completed - 1
            event = TrainingEvent(alarm.kind, max(step, 0), "error", words, place, alarm.step)
        else:
            layers = (chapter["module"] for chapter in result["story"])
            event = replace(event_of(alarm), place=module or found.get("source") or next(layers, None))
            if found:
                event = replace(event, evidence=event_words(result))
            elif failure["call"] is not None:
                event = replace(event, evidence=f"{event.evidence}; `{failure['call']}` is the origin")
        known = {field.name: found[field.name] for field in fields(event) if field.name in found}
        self._emit(replace(event, **known, snapshot=str(path)))

    def _save(self, alarm: Alarm | Finding, frame: FrameType | None) -> Path | None:
        """Save the step where an event began, and report it."""
        saved = self._guarded(lambda: self._saver.save_event(alarm, frame))
        if saved is None:
            return None
        self.tell_saved(alarm, *saved)
        return saved[0]

    def _has_alarm(self) -> bool:
        """True if one of the steps so far is to be saved; that is done as soon as the running one is over."""
        self._see()
        self._left = 1 if self._alarms else self._left
        return any(alarm.severity == "error" for alarm in self._alarms)

    def _see(self) -> None:
        """Look at the numbers of the steps since the last look; waits for a device once."""
        steps = [] if self._is_off or is_capturing() else self._loop.timeline.after(self._seen)
        if steps:
            self._seen = steps[-1].place
            self._batch = max(1, min(BATCH, int(_DELAY / max(steps[-1].seconds, 1e-6))))
            self._guarded(lambda: self._follow(steps))

    def _follow(self, steps: Sequence[Numbers]) -> None:
        values = [value for step in steps for value in (step.loss, step.norm, step.scale)]
        arrived = iter(numbers_of([value.detach().reshape(()) for value in values if _is_far(value)]))
        near = (next(arrived) if _is_far(value) else number_of(value) for value in values)
        for step, loss, norm, scale in zip(steps, near, near, near, strict=False):
            if norm == 0.0 or (scale is not None and norm is not None and not math.isfinite(norm)):
                norm = None  # a scaler looks for its scale
            numbers = {"loss": loss, "norm": norm, "scale": scale}
            for kind, name, make in self._followed:
                number, course = numbers[name], self._courses.get((kind, step.seat.number))
                if number is None:
                    continue
                if course is None:
                    course = self._courses[kind, step.seat.number] = make()
                alarm = course.add(step.place, step.step, number)
                if alarm is not None:
                    self._alarms.append(alarm)

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

    def _guarded(self, work: Callable[[], T]) -> T | None:
        """What ``work`` returns; an internal error switches early warning off, and `None` is returned."""
        try:
            return work()
        except Exception as error:
            pass_on(error)
            self.forget()
            self._session.complain("early warning is off after an error of its own", error)
            return None


def _is_far(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda and value.numel() == 1


def _silent(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters that are trained and whose gradient is missing or zero.

    One fused norm over all gradients and one number per parameter; a device is waited for once.
    """
    found = [p for p in parameters if p.grad is None and p.requires_grad]
    dense = [p for p in parameters if p.grad is not None and p.grad.layout is torch.strided and p.grad.numel()]
    with torch.no_grad():
        norms = norms_of([p.grad.detach() for p in dense if p.grad is not None])
    return found + [p for p, norm in zip(dense, norms, strict=True) if norm == 0.0]
