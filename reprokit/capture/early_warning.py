"""Early warning: numbers that leave their course become events, and snapshots of the step where they began.

The numbers are those that a step has left anyway: the loss, the norm that the loop clips its gradients by, the scale of
a grad scaler; nothing is computed for them. They are looked at in batches of steps: between the kernels of a step the
caches are cold, so that one look at many costs little more than at one, and a device is waited for once.

An alarm is a verdict like any other. The kept steps are played with their gradient norms and updates measured: the
event begins with the first step in which one of these, or the number that gave the alarm, is off its course for as long
as the alarm lasts. That step is compared with the last healthy one, which shows the call, the input and the rows.

An error here ends early warning, not the capture, and never the training.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from reprokit import native
from reprokit.capture.calls import Backward, OptimizerStep, Unscale
from reprokit.capture.failure_text import event_words
from reprokit.capture.fidelity import Made
from reprokit.capture.meters import MeasuredStep, Meter, is_capturing
from reprokit.capture.mode import seen
from reprokit.capture.readings import Slot
from reprokit.capture.replay import Case
from reprokit.capture.save import Describing, NotKept, Verdict, why_not_played
from reprokit.capture.tape import Op, Segment
from reprokit.capture.usual import Usual
from reprokit.compare.healthy import blocked, explained, let_through
from reprokit.compare.quantity import number_of, numbers_of
from reprokit.errors import ignored_errors, pass_on
from reprokit.limits import CpuLimit
from reprokit.locate.failure import Failure, Predicate
from reprokit.locate.kinds import kind_named
from reprokit.locate.ways import bad_tensor
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Phase, Program
from reprokit.program.step import Step
from reprokit.series.course import (
    HIGH,
    LEVEL,
    OF_NORMS,
    USUAL,
    Alarm,
    Course,
    EventKind,
    ScaleFalls,
    band_before,
    first_off,
    is_off,
)
from reprokit.series.events import LineLog, Silence, TrainingEvent, event_of
from reprokit.series.timeline import Numbers, parameters_of
from reprokit.series.unlike import FAR, JUMP, Unlike, grouped
from reprokit.snapshot.privacy import private
from reprokit.words import number_words, times_words, visible_line

if TYPE_CHECKING:
    from reprokit.capture.failures import Failures
    from reprokit.capture.loop import Loop
    from reprokit.capture.session import Session

BATCH = 32  # steps whose numbers are looked at together
_NORMS_IN_A_ROW = 5  # of gradients: their norm varies more than the loss
_DELAY = 0.5  # seconds that an event may be reported late: slow steps are looked at in smaller batches
_FOLLOWED: Mapping[EventKind, tuple[str, Callable[[], Course | ScaleFalls]]] = {
    "spike": ("loss", Course),
    "explosion": ("norm", functools.partial(Course, "explosion", _NORMS_IN_A_ROW, OF_NORMS)),
    "scale": ("scale", ScaleFalls),
}
_YOUNG, _SOON = 64, 8  # steps in which looks are frequent, and between two of them
_PLAYED = 256  # steps, of those kept, that are looked at for parameters that learn nothing
LEAST_SILENT = 20  # steps with a gradient of zeros
_GROWN, _LEAST_NORMS = 1e4, 3  # times the norm of all gradients at so many looks before
_MOSTLY = 0.5  # of the elements of a gradient
_SUDDEN = 8  # steps in which a layer dies that does not fade out by design
_ABOUT = 0.75  # of the usual share of a gradient that is not zero
_MOST_BESIDE = 4  # healthy steps that a failing one is compared with
_SEEN = {  # where a quantity shows
    "loss": (Phase.FORWARD, "loss"),
    "gradient norm": (Phase.BACKWARD, "gradient"),
    "update": (Phase.OPTIMIZER, "parameter"),
}
Explain = Callable[[Program, Tensors], Failure | None]
T = TypeVar("T")


class EarlyWarning:
    """Follows the numbers of a run, each optimizer's by themselves. ``on_event`` is called with every event."""

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
        self._alarms: list[tuple[Alarm, Course | ScaleFalls]] = []
        self._usual, self._finds_changes, self._looked_for_changes = Usual(loop), "change" in kinds, 0
        self._followed = [(kind, *_FOLLOWED[kind]) for kind in _FOLLOWED if kind in kinds]
        self._courses: dict[tuple[EventKind, int], Course | ScaleFalls] = {}
        self._is_off = False
        self._left, self._batch = 1, 1  # steps to the next look, and between two
        self._seen = -1  # the place of the step up to which numbers were looked at
        self._finds_silent, self._looked, self._num_looks = "dead" in kinds, 0, 0
        self._saves_silences = "silent" in kinds
        # parameters without a gradient, or with one of zeros, at the last look, and in how many looks up to it
        self._silent: Any = WeakTensorKeyDictionary()
        self._norms: list[float] = []  # of all gradients, at each look
        self._has_grown = "explosion" not in kinds
        self._played: Any = WeakTensorKeyDictionary()  # those for which kept steps were played
        loop.has_alarm = self._has_alarm
        loop.world.keeps_earlier = True

    def forget(self) -> None:
        """Let go of everything that belongs to the user."""
        self._is_off = True
        self._alarms.clear()

    # -- looking -------------------------------------------------------------------------------------------------

    def act(self) -> None:
        """A step is over: after a batch of them report what was seen; raises `CaptureStop` as `act_now` does."""
        self._left -= 1
        if self._left > 0:
            return
        frame = sys._getframe(1)
        path = self.catch_up(frame, is_last=False) or self._look_at_gradients(frame)
        if path is None:
            self.look_for_changes(frame)
        missing = LEAST_SILENT - self._loop.num_kept if self._finds_silent else 0
        self._left = min(self._batch, missing) if missing > 0 else self._batch
        is_young = self._finds_changes and self._loop.iterations.total < _YOUNG
        self._left = 1 if self._alarms else min(self._left, _SOON) if is_young else self._left
        if path is not None:
            self._session.stop()

    def act_now(self) -> None:
        """Report what the steps so far show; raises `CaptureStop` if a step was saved and the loop is to stop."""
        if self.catch_up(sys._getframe(1)) is not None:
            self._session.stop()

    def catch_up(self, frame: FrameType | None, *, is_last: bool = True) -> Path | None:
        """Report what the steps show that were not looked at yet; the path of the file, if one was written.

        The capture is over with that: what later steps show is nothing to report any more. Unless it ``is_last``, a
        number that may have got another level is looked at again.
        """
        self._see()
        alarms, self._alarms = self._alarms, []
        path, last = None, math.inf
        for alarm, course in alarms:
            if alarm.shown_by > last:
                break
            is_weak = not alarm.is_beyond
            may_stay = isinstance(course, Course) and path is None and not (is_weak and len(alarm.values) != LEVEL)
            is_level = course.is_level(alarm) if may_stay and isinstance(course, Course) else False
            is_level = is_level and not self._usual.has_moved(alarm.step)
            is_young = is_weak and self._seen < alarm.place + _NORMS_IN_A_ROW  # more may come of it
            if (is_level is None or is_young) and not is_last:
                self._alarms.append((alarm, course))
                continue
            if is_weak and any(one.place == alarm.place and one.is_beyond for one, _ in alarms):
                continue
            found = self._unlike(frame, until=alarm.step) if is_level or is_weak else []
            if (is_level or is_weak) and not any(shift.times > (FAR if is_weak else JUMP) for shift in found):
                for shift in grouped(found):
                    self._emit(self._changed(shift))
                if is_level and not found:
                    event = event_of(alarm)
                    self._emit(
                        replace(event, evidence=f"{event.evidence.partition(', and stayed')[0]}, and stays there")
                    )
                continue
            saved = self._save(alarm, frame) if path is None else None
            if saved is not None:
                path, last = saved, alarm.shown_by
            else:
                self._emit(event_of(alarm))
        return path

    def instead_of(self, verdict: Verdict) -> Path | None:
        """Save the step where the run left its course, if the failure of now is how that ended: then numbers are off
        their course, though not for long enough for an alarm."""
        path = self.catch_up(verdict.frame)  # a failure has come of it
        found = [one for course in self._courses.values() if (one := course.pending) is not None]
        alarm = min(found, key=lambda one: (one.kind != "spike", one.place), default=None)
        if path is not None or alarm is None or verdict.raised is not None:
            return path
        return self._save(alarm, verdict.frame)

    def _look_at_gradients(self, frame: FrameType | None) -> Path | None:
        """Look for what is not learned, and at the norm of all gradients; the path of the file, if one was written."""
        loop, silent = self._loop, self._loop.silent
        is_early = loop.iterations.total < self._looked + LEAST_SILENT
        if self._is_off or not self._finds_silent or silent is None or loop.num_kept < LEAST_SILENT or is_early:
            return None
        self._looked = loop.iterations.total
        path = silent.look(None, frame, is_last=False)
        self._see_growth(silent.norm)
        return path

    def look_for_changes(self, frame: FrameType | None, *, is_last: bool = False) -> None:
        """Report settings, calls and data that are unlike all before."""
        loop = self._loop
        is_early = not is_last and loop.iterations.total < self._looked_for_changes + _SOON
        if (
            not self._finds_changes
            or self._is_off
            or self._alarms
            or is_early
            or not (loop.num_kept and loop.ranks.is_alone)
        ):
            return
        self._looked_for_changes = loop.iterations.total
        found, odd = list[Unlike](), list[Slot]()
        with loop.recorder.paused(), ignored_errors():
            found, odd = self._usual.look(frame)
        for shift in grouped([*found, *(self._unlike(frame, odd) if odd else [])]):
            self._emit(self._changed(shift))

    def _changed(self, shift: Unlike) -> TrainingEvent:
        step, words = (
            max(self._loop.iterations.completed - 1, 0),
            f"since step {shift.since} {shift.name} {shift.words}",
        )
        return TrainingEvent("change", step, "warning", words, shift.place, shift.since)

    def _unlike(
        self, frame: FrameType | None, wanted: Collection[Slot] | None = None, until: int | None = None
    ) -> list[Unlike]:
        """The data, those ``wanted`` if that is given, that are unlike before: in the last steps, or in one of them."""
        if self._loop.world.is_complete and self._loop.ranks.is_alone:
            with self._session.replaying(ends=False), ignored_errors():  # of the user's code
                return self._usual.played(frame, wanted, until)
        return []

    def _see_growth(self, norm: float) -> None:
        """A loop that does not clip computes no norm of all gradients; that of a look is beside those before."""
        usual = statistics.median(self._norms) if len(self._norms) >= _LEAST_NORMS else math.inf
        is_clipped = any(row.norm is not None for row in self._loop.timeline.after(-1))
        if norm > _GROWN * usual and not is_clipped and not self._has_grown:
            step = max(self._loop.iterations.completed - 1, 0)
            words = f"the norm of all gradients is {number_words(norm)}{times_words(norm, usual)} at the looks before"
            self._has_grown = True
            self._emit(TrainingEvent("explosion", step, "warning", words, None, step))
        self._norms.append(norm)

    def _has_alarm(self) -> bool:
        """True if one of the steps so far is to be saved; that is done as soon as the running one is over."""
        self._see()
        self._left = 1 if self._alarms else self._left
        return bool(self._alarms)

    def _see(self) -> None:
        """Look at the numbers of the steps since the last look; waits for a device once."""
        steps = [] if self._is_off or is_capturing() else self._loop.timeline.after(self._seen)
        if steps:
            self._seen = steps[-1].place
            self._batch = max(1, min(BATCH, int(_DELAY / max(steps[-1].seconds, 1e-6))))
            self._guarded(lambda: self._follow(steps))

    def _follow(self, steps: Sequence[Numbers]) -> None:
        values = [value for step in steps for value in (step.loss, step.norm, step.scale)]
        is_far = [isinstance(value, torch.Tensor) and value.is_cuda and native.numel(value) == 1 for value in values]
        far = [
            native.reshape(native.detach(value), ()) for value, is_there in zip(values, is_far, strict=True) if is_there
        ]
        arrived = iter(numbers_of(far))
        near = (next(arrived) if is_there else number_of(value) for value, is_there in zip(values, is_far, strict=True))
        for step, loss, norm, scale in zip(steps, near, near, near, strict=False):
            if norm == 0.0 or (scale is not None and norm is not None and not math.isfinite(norm)):
                norm = None  # a scaler looks for its scale
            numbers = {"loss": loss, "norm": norm, "scale": scale}
            for kind, name, make in self._followed:
                key, number = (kind, step.seat.number), numbers[name]
                if number is not None and key not in self._courses:
                    self._courses[key] = make()
                alarm = self._courses[key].add(step.place, step.step, number) if number is not None else None
                self._alarms += [(alarm, self._courses[key])] if alarm is not None else []

    # -- reporting -----------------------------------------------------------------------------------------------

    def report(self, silence: Silence, frame: FrameType | None, path: Path | None) -> Path | None:
        """Save a step in which something is not learned, unless that has made the file at ``path``, and report it; the
        path of the file."""
        is_saved = self._saves_silences or (self._finds_silent and silence.key is not None)
        saved = path or (self._save(silence, frame) if is_saved else None)
        if path is not None or saved is None:
            self._emit(silence.event("error" if path is not None else "warning", path))
        return saved

    def _save(self, alarm: Alarm | Silence, frame: FrameType | None) -> Path | None:
        """Save the step where an event began, and report it; ``None`` if that step was not kept."""
        if not self._loop.ranks.is_alone:
            return None
        self.look_for_changes(frame, is_last=True)  # which may be what it comes of
        path = self._guarded(lambda: self._saver.save(Verdict("loss", frame, alarm=alarm)))
        if path is not None:
            self._emit(self._saved(alarm, path, self._saver.results[-1]))
        return path

    def _saved(self, alarm: Alarm | Silence, path: Path, result: Mapping[str, Any]) -> TrainingEvent:
        """The event whose step was saved."""
        failure, module = result["failure"], result["failure"]["module"]
        found = failure.get("event") or {}
        if isinstance(alarm, Silence):
            event = alarm.event("error")
        else:
            layers = (chapter["module"] for chapter in result["story"])
            event = event_of(alarm)
            cause = f"; `{failure['call']}` is the origin" if failure["call"] is not None else ""
            words = event_words(result) if found else f"{event.evidence}{cause}"
            place = module or found.get("source") or next(layers, None)
            event = replace(event, severity="error", place=place, evidence=words)
        known = {field.name: found[field.name] for field in fields(event) if field.name in found}
        return replace(event, **known, snapshot=str(path))

    def _emit(self, event: TrainingEvent) -> None:
        # the path of the file is for this machine, and has to be the one that opens it
        event = replace(private(event, self._session.source), snapshot=event.snapshot)
        self._session.say(visible_line(event.line()))
        try:
            self._log.add(event.to_json())
        except OSError as error:
            self._session.complain(f"could not write `{self._log.path.name}`", error)
        if self._on_event is not None:
            try:
                with seen(), native.their_operators():
                    self._on_event(event)
            except Exception as error:
                self._session.complain("`on_event` raised", error)

    def _guarded(self, work: Callable[[], T]) -> T | None:
        """Call ``work`` and return its result; an error in it switches early warning off, and the result is `None`."""
        try:
            return work()
        except Exception as error:
            pass_on(error)
            self.forget()
            self._session.complain("early warning is off after an error of its own", error)
            return None


# -- the step where it began ---------------------------------------------------------------------------------------


class EventStep(Describing):
    """Describes the step where an alarm began. Raises `NotKept`."""

    def made(self) -> Made:
        """The snapshot of that step."""
        alarm = self.verdict.alarm
        assert alarm is not None, "an event has an alarm"
        with self.kept() as steps:
            places = [step.mark.place for step in steps]
            if alarm.place not in places:
                raise NotKept(f"step {alarm.step} is no longer kept")
            number, quantity, explain = places.index(alarm.place), "gradient norm", None
            if isinstance(alarm, Silence):
                return self._silent(steps, number, alarm)
            if alarm.kind != "scale":
                number, quantity, explain = self._at_beginning_of(steps, alarm, number)
            with self._until_seen(steps, number, quantity) as case:
                case.explain = explain
                return self.make(case)

    def explained_by(self, explain: Explain, place: int, *, is_forward: bool) -> None:
        """Play the step at ``place`` up to its gradients, and have it explained; if it ``is_forward``, only up to the
        backward call, but with what no gradient depends on."""
        with self.kept() as steps:
            number = next(n for n, step in enumerate(steps) if step.mark.place == place)
            with self._until_seen(steps, number, "gradient norm") as case:
                last = max((n for n, op in enumerate(case.ops) if op.kind is Backward), default=None)
                if is_forward and last is not None:
                    case = replace(case, where="output", ops=case.ops[:last], pending=case.ops[last], is_whole=True)
                self.replayed(replace(case, explain=explain))

    def _silent(self, steps: list[Segment], number: int, silence: Silence) -> Made:
        """A step which shows that something is not learned, up to its gradients."""
        failure = replace(silence.origin, kind=kind_named(silence.kind), way=silence.text)
        # the values and calls of the origin are those of the program that was looked at, and not of the one saved
        plain = replace(failure, call=None, call_index=None, value=None, element=None, input_name=None)
        explain: Explain | None = None
        if silence.key is not None:
            before, began = steps[max(number - 1, 0)].mark.step, steps[number].mark.step
            event = Predicate("share of zeros", 1.0, 1.0, before, began, source=silence.name)
            plain = replace(plain, event=event)
            explain = without_gradient(self.loop, silence.key, plain)
        try:
            with self._until_seen(steps, number, "gradient norm") as case:
                case.mark.micro_step = 0
                found = plain if explain is None else None
                return self.make(replace(case, explain=explain, found=found))
        except Exception as error:
            notes, (ops, mark) = [why_not_played(error)], steps[number]
            case = Case("gradient", ops, None, mark, True, self.verdict.frame, {}, None, None, notes)
            return Made(replace(self.without_replay(case), failure=replace(plain, event=None)))

    def beside_healthy(self, made: Made) -> Made:
        """``made``, of which an input is bad, with what healthy steps before tell of that: see `let_through`."""
        snapshot, alive = made.snapshot, self.loop.tape.alive()
        tensors = {v: native.to(tensor, made.devices.get(v, tensor.device)) for v, tensor in snapshot.tensors.items()}
        with self.kept() as steps:
            given = [bad_tensor(alive[n] for op in step.ops for n in op.ins if n in alive) for step in steps]
            alike = [n for n, bad in enumerate(given) if bad is not None and steps[n].mark.step < snapshot.step]
            for number in alike[::-1][:_MOST_BESIDE]:
                healthy = self._program_of(steps, number, "gradient norm")
                found = let_through(snapshot.failure, Step(snapshot.program, tensors), healthy)
                if found is not None:
                    return replace(made, snapshot=replace(snapshot, failure=found))
        return made

    def measured(self, steps: Sequence[Segment], limit: CpuLimit | None = None) -> list[MeasuredStep]:
        """Play the steps, as many as begin within the limit, and measure them; empty if a played loss differs from the
        one of training."""
        replay, meter = self.replay(steps, 0, limit), Meter(self.loop.tape.alive())
        with replay.going_back():
            replay.play(meter)
        return [] if replay.notes else meter.steps

    def _at_beginning_of(self, steps: list[Segment], alarm: Alarm, number: int) -> tuple[int, str, Explain]:
        """The position of the step in which a number has left its course, at ``number`` or before, the quantity that
        shows it, and the failure.

        It is the alarm's own first step, or an earlier one that is off in a number that was not followed live. That
        number has to be off in every step from there up to the alarm's last. In the step right before the alarm it may
        be off alone, if the update is: a learning rate may be wrong once.
        """
        places = [step.mark.place for step in steps]
        end = max(number, places.index(alarm.values[-1].place) if alarm.values[-1].place in places else number)
        measured = self.measured(steps[: end + 1])
        begun, predicate = number, Predicate(**alarm.numbers)
        healthy = places.index(alarm.healthy.place) if alarm.healthy.place in places else max(number - 1, 0)
        own = [n for n, played in enumerate(measured) if played.optimizer == measured[number].optimizer]
        updates, last = [measured[n].update for n in own], own.index(number) - 1 if measured else -1
        for quantity in ("gradient norm", "update"):
            numbers = updates if quantity == "update" else [measured[n].norm for n in own]
            first = first_off(numbers)
            if is_off(updates, last) and is_off(numbers, last):  # right before the alarm
                first = last if first is None else min(first, last)
            band = band_before(numbers, first) if first is not None and own[first] < begun else None
            if first is not None and band is not None:
                usual = (n for n in range(first - 1, -1, -1) if (value := numbers[n]) and band.spreads(value) <= USUAL)
                begun, healthy = own[first], own[next(usual, first - 1)]
                limits = numbers[first] or 0.0, band.number(HIGH), steps[healthy].mark.step, steps[begun].mark.step
                predicate = Predicate(quantity, *limits, band.number(0.0))
        reference = self._program_of(steps, healthy, predicate.quantity)

        def explain(program: Program, tensors: Tensors) -> Failure:
            failure = Failure(_SEEN[predicate.quantity][0], kind_named(alarm.kind), event=predicate)
            return explained(Step(program, tensors), reference, failure)

        return begun, predicate.quantity, explain

    def _program_of(self, steps: list[Segment], number: int, quantity: str) -> Step:
        recorded: list[Step] = []

        def keep(program: Program, tensors: Tensors) -> None:
            recorded.append(
                Step(program, {value: native.clone(native.detach(tensor)) for value, tensor in tensors.items()})
            )

        with self._until_seen(steps, number, quantity) as case:
            self.replayed(replace(case, explain=keep))
        return recorded[0]

    @contextmanager
    def _until_seen(self, steps: list[Segment], number: int, quantity: str) -> Iterator[Case]:
        """A step of the past up to where a quantity shows, gradients as they are before they are clipped; the live
        state is where the step began."""
        kind = OptimizerStep if quantity == "update" else Backward
        with self.begun(steps[: number + 1], number, 0) as case:
            last = max((n for n, op in enumerate(case.ops) if op.kind is kind), default=len(case.ops))
            later: Sequence[Op] = case.ops[last + 1 :] if quantity != "update" else ()
            ops = [*case.ops[: last + 1], *(op for op in later if op.kind is Unscale)]
            yield replace(case, where=_SEEN[quantity][1], ops=ops)


def without_gradient(loop: Loop, key: int, failure: Failure, *, is_all: bool = False) -> Explain:
    """A function that finds the call which stops the gradient of the parameter with this ``id``; see `blocked`."""
    address = next(native.data_ptr(p) for one in loop.world.optimizers for p in parameters_of(one) if id(p) == key)

    def explain(program: Program, tensors: Tensors) -> Failure:
        owned = (item.value for item in program.inputs if item.role == "parameter")
        value = next((value for value in owned if native.data_ptr(tensors[value]) == address), None)
        if value is None:  # no gradient depends on it
            return replace(failure, event=None)
        found = blocked(Step(program, tensors), replace(failure, value=value), is_all=is_all)
        return replace(found, way=failure.way) if failure.way else found

    return explain
