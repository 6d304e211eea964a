"""Finds the cause of a failure: the steps since the oldest copy are played unchanged, then with one change at a time.

The unchanged play has to fail as training did, with the same losses bit for bit; else nothing is claimed. It also
reads what the steps were given, so that the failing one can be compared with those before. A change with which the
failing step and its loss are finite and usual *removes* the failure; that decides the class of the cause. The live
state is as it was afterwards.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from reprokit import members, native
from reprokit.capture import readings
from reprokit.capture.calls import Backward, CompiledStep, OptimizerStep, Root, ScaleLoss, Transform
from reprokit.capture.readings import UNNAMED, InputWatch, Key, LossWatch, Series, StatePart, States
from reprokit.capture.replay import Replay, in_silence
from reprokit.capture.structure import map_leaves
from reprokit.capture.tape import Mark, Number, Op, Segment
from reprokit.capture.tensor_names import Names, root_names
from reprokit.capture.world import CannotGoBack, give_gradients
from reprokit.errors import pass_on
from reprokit.limits import CpuLimit
from reprokit.locate.samples import bad_rows, rows_where
from reprokit.locate.ways import HALVES, bad_tensor
from reprokit.program.functions import called_function
from reprokit.series import cause, unlike
from reprokit.series.cause import SMALLER_RATES, TENTH, Cause, Intervention
from reprokit.series.story import failing_series
from reprokit.series.timeline import parameters_of
from reprokit.series.unlike import JUMP, Reading, Unlike
from reprokit.series.usual import UsualLoss
from reprokit.words import counted, number_words, row_words, user_path

if TYPE_CHECKING:
    from types import FrameType

    from reprokit.capture.loop import Loop
    from reprokit.capture.save import Raised
    from reprokit.capture.world import World
    from reprokit.snapshot.format import Snapshot

_CONTROL_SECONDS = 20.0  # of CPU time, to play the steps unchanged: a longer wait for the file is not worth a cause
_DATA_SECONDS = 10.0  # to make their data again, where they cannot be played
_MOST_SECONDS = 20.0  # to play them changed
_TIMES = 20  # the CPU seconds that playing them unchanged took
_LEAST_SECONDS = 3.0  # steps of a millisecond may be played many times
_WAITS = 10  # times a limit, by the clock: a step that is played may wait for another process
_MOST_NAMED = 3  # changes that were not tried
_LARGE_UPDATE = 0.5  # of the norm of the parameters in one step: a healthy update is below a hundredth
_RECENT = 3  # updates and gradients before the failure that count: the first ones of parameters that are zero are large
_LARGE_NORM = 20.0  # times the median norm of the gradients: clipping changes all that follows
_CLASSES = {"batch": "data", "carried": "state", "setting": "setting"}
_MOST_OF_A_KIND = 3  # changes: the same images may be read at many places
_SETTINGS = ("option", "argument", "attribute")  # that a play can change
_MOST_INPUTS = 4  # of a step that are exchanged one at a time


def limited(seconds: float) -> CpuLimit:
    return CpuLimit(seconds, wall=_WAITS * max(seconds, _LEAST_SECONDS))


def rewritten_inputs(loop: Loop, segment: Segment, frame: FrameType | None) -> Iterator[str]:
    """The inputs of a step whose memory is not torch's, and holds other values by now, in words."""
    read = {number for op in segment.ops for number in op.ins}
    modules, alive = loop.world.modules, loop.tape.alive()
    names = Names(alive, modules, root_names(modules, frame), {}, segment.ops, frame, [])
    for number, now, then in loop.tape.rewritten():
        if number in read and not native.is_complex(then):
            found, differs = names.describe(number, now), ~((now == then) | ((now != now) & (then != then)))
            rows = list(bad_rows(differs))
            values = [part[rows] if rows else part for part in (now, then)]
            name = found.name if found is not None else UNNAMED
            yield unlike.rewritten(
                name,
                segment.mark.step,
                rows,
                *((float(native.amin(part)), float(native.amax(part))) for part in values),
            )


@dataclass(frozen=True)
class _Plan:
    """A change, in words and as what is done, which shows a cause of the class ``kind`` if it removes the failure."""

    kind: str
    says: str
    text: str
    is_odd: bool = True  # what it changes is worth telling if nothing removes the failure
    edit: Callable[[Op, Mark], Op] | None = None  # changes the calls before they are played
    values: Mapping[Number, torch.Tensor] = field(default_factory=dict)  # stand in the place of tensors
    held: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()  # parts of the state with values from ``since`` on
    since: int = 0
    norm: float | None = None  # that gradients are clipped to
    clears: bool = False  # gradients begin with nothing from ``since`` on
    states: States = field(default_factory=dict)  # of optimizers, before their update of the step ``since``
    is_wide: bool = False  # what is half precision is in float32


@dataclass(frozen=True)
class _Played:
    """The result of a play. ``is_alike``: all losses were those of training; ``loss`` is the last one."""

    is_alike: bool
    is_bad: bool
    loss: float


class _Changing(LossWatch):
    """Makes the change of a plan."""

    def __init__(self, plan: _Plan) -> None:
        super().__init__()
        self._plan = plan

    def begin(self, replay: Replay) -> bool:
        self._hold(replay)
        if self._plan.clears and replay.segment.mark.step >= self._plan.since:
            give_gradients((leaf, None) for leaf in replay.leaves())
        return super().begin(replay)

    def before(self, replay: Replay, op: Op) -> bool:
        plan = self._plan
        for number in op.ins if plan.values else ():
            if number in plan.values:
                replay.player.replace(number, plan.values[number])
        for number in op.ins if plan.is_wide else ():
            value = replay.player.value(number)
            if value is not None and value.dtype in HALVES:
                replay.player.replace(number, native.float(native.detach(value)))
        if plan.states and op.kind is OptimizerStep and replay.segment.mark.step == plan.since:
            for parameter in parameters_of(op.target):
                if parameter in plan.states:
                    op.target.state[parameter] = dict(plan.states[parameter])
        if plan.norm is not None and op.kind is OptimizerStep:
            native.clip_grad_norm_(parameters_of(op.target), plan.norm)
        return super().before(replay, op)

    def after(self, replay: Replay, op: Op) -> bool:
        if op.kind is OptimizerStep or op.kind.writes_state(op):
            self._hold(replay)
        return False

    def _hold(self, replay: Replay) -> None:
        for tensor, value in self._plan.held if replay.segment.mark.step >= self._plan.since else ():
            native.copy_(tensor.data, value)


class _Wide(TorchFunctionMode):
    """In this context what would become half precision becomes float32, and the state of a training is in it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        modules = [tensor for one in world.modules for tensor in members.tensors(one)]
        self._state = {id(one): (one, one.data) for one in (*modules, *world.changing()) if one.dtype in HALVES}

    def __enter__(self) -> None:
        for tensor, content in self._state.values():
            gradient, tensor.grad = tensor.grad, None
            tensor.data = native.float(content)
            tensor.grad = native.float(gradient) if gradient is not None else None
        super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for tensor, content in self._state.values():
            tensor.data = content

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = called_function(function, sys._getframe(1))
        function = native.float if function in (native.half, native.bfloat16) else function
        args, kwargs = map_leaves(
            (args, kwargs or {}), torch.dtype, lambda one: torch.float32 if one in HALVES else one
        )
        return function(*args, **kwargs)


class Experiments:
    """The plays of the failure of ``snapshot``, which the last of ``segments`` shows."""

    def __init__(
        self,
        loop: Loop,
        segments: Sequence[Segment],
        snapshot: Snapshot,
        frame: FrameType | None,
        raised: Raised | None,
    ) -> None:
        self._loop, self._segments, self._frame, self._raised = loop, segments, frame, raised
        self._kind = snapshot.failure.kind
        # No value of an event is bad, and a smaller step makes any loss more usual.
        self._since = snapshot.step if self._kind.is_unusual else segments[-1].mark.step
        rows = failing_series(snapshot.timeline)
        losses = [(row.step, row.loss) for row in rows if row.loss is not None and row.step < snapshot.step]
        if self._kind.raises and snapshot.failure.cause is None:
            losses = []  # a high loss raises nothing
        usual = UsualLoss(losses)
        self._diverged, self._limits = usual.divergence, (usual.low, usual.high)
        self._limit = limited(_CONTROL_SECONDS)
        self._longest = 0.0  # CPU seconds of a play
        self._why_not = ""  # the last play has no result
        self._began = snapshot.settings.began_at or 0  # steps before are another model's
        self._own = [segment for segment in segments if segment.mark.step >= self._began]
        self._steps = list(dict.fromkeys(segment.mark.step for segment in self._own))  # one may have several updates
        self._roots = root_names(loop.world.modules, frame)
        kept = readings.settings_over(self._own, of_all=True).items()
        self._settings = {k: v for k, v in kept if k[0] in _SETTINGS and not any(isinstance(one, str) for _, one in v)}
        self._tried: list[Intervention] = []
        self._unreached: list[str] = []  # changes

    def run(self) -> Cause | None:
        """Play unchanged, compare, and try what may have led to the failure, likeliest first; ``None`` where no value
        differs from the steps before."""
        watch = self._watch()
        control = self._play(None, watch)
        if control is not None and not control.is_alike and not control.is_bad:
            emptied = self._emptied(control)
            if emptied is not None:
                return emptied
        if control is not None and not control.is_alike:
            self._why_not = "the steps before, played again, had other losses than in training"
        elif control is not None and not control.is_bad and self._kind.is_played:
            self._why_not = "the failure did not occur again when the steps before were played"
        if self._why_not:
            return self._told_unplayed()
        self._limit = limited(min(_MOST_SECONDS, max(_LEAST_SECONDS, _TIMES * self._limit.used)))
        evidence = [] if self._diverged is None else [self._diverged.text]

        def note(plan: _Plan) -> None:
            if not any(plan.says.startswith(line) for line in evidence):
                evidence.append(plan.says.removesuffix("."))

        is_odd = False  # a batch is
        for plan in self._plans(watch):
            is_odd = is_odd or (plan.kind == "data" and plan.is_odd)
            if plan.is_odd:
                note(plan)
            if plan.text and self._kind.is_played and self._removes(plan):
                note(plan)
                return Cause(plan.kind, self._told(plan), tuple(evidence), tuple(self._tried))
        exchanges = self._exchanges(watch) if self._kind.is_played else iter(())
        exchanged = next((plan for plan in exchanges if self._removes(plan)), None)
        if exchanged is not None:
            is_data = self._kind.is_unusual or is_odd or exchanged.is_odd
            kind, why = ("data", "") if is_data else ("unknown", "; why, no experiment has decided")
            return Cause(kind, f"{self._told(exchanged).removesuffix('.')}{why}.", tuple(evidence), tuple(self._tried))
        why_not = self._not_tried()
        if not evidence:
            return Cause("unknown", "", (), tuple(self._tried), why_not) if why_not is not None else None
        why = "no experiment could be made" if why_not is None else "no experiment was made"
        why = "no experiment has decided why" if self._tried else why
        return Cause("unknown", f"{evidence[0]}; {why}.", tuple(evidence), tuple(self._tried), why_not)

    def _not_tried(self) -> str | None:
        """Which changes were not tried, and why."""
        if not self._unreached:
            return None
        num, named = len(self._unreached), self._unreached[:_MOST_NAMED]
        others = f" and {num - len(named)} more" if num > len(named) else ""
        was = "was" if num == 1 else "were"
        used = f"experiments had used {self._limit.seconds:.3g} s of CPU time"
        return f"{counted(num, 'change')} {was} not tried, because {used}: {'; '.join(named)}{others}"

    def _told_unplayed(self) -> Cause:
        """What was unlike the steps before, from their settings and data alone: as a whole they cannot be played."""
        plans = *self._odd_values(self._data()), *self._odd_settings()
        odd = [plan.says.removesuffix(".") for plan in plans if plan.is_odd]
        evidence = tuple(dict.fromkeys(odd))
        text = f"{evidence[0]}." if evidence else ""
        return Cause("unknown", text, evidence, why_not=f"no experiment was made, because {self._why_not}")

    def _data(self) -> InputWatch:
        """The data of the steps: made again, or as far as they are held if the state cannot be put back."""
        watch, world, tape = self._watch(), self._loop.world, self._loop.tape
        replay = Replay(world, tape, self._own, world.copies[0], limit=limited(_DATA_SECONDS))
        try:
            with replay.going_back(), in_silence():
                watch.read_data(replay)
        except Exception as error:
            pass_on(error)
            watch = self._watch()
            watch.read_held(self._own, tape.saved)
        return watch

    def _emptied(self, control: _Played) -> Cause | None:
        """The state of an optimizer that counts fewer updates than were played was emptied, unseen: it is the cause if
        the steps go as in training when it is emptied then, and are finite with the state kept."""
        for optimizer in self._loop.world.optimizers:
            played = [mark.step for ops, mark in self._segments for op in ops if op.target is optimizer]
            counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
            num = int(max(counts, default=0))
            if 0 < num < len(played):
                says = f"{unlike.emptied_state(type(optimizer).__name__, played[-num]).text}."
                states: States = {parameter: {} for parameter in parameters_of(optimizer)}
                plan = _Plan("state", says, "the state of the optimizer kept", states=states, since=played[-num])
                again = self._play(plan, _Changing(plan))
                if again is not None and again.is_alike and again.is_bad:
                    self._tried = [Intervention(plan.text, True, control.loss, len(self._steps))]
                    return Cause("state", self._told(plan), (says.removesuffix("."),), tuple(self._tried))
        return None

    def _told(self, plan: _Plan) -> str:
        return f"{plan.says} {self._tried[-1].words(self._kind)}"

    def _removes(self, plan: _Plan) -> bool:
        """Try a change, if there is time."""
        if any(one.change == plan.text for one in self._tried):
            return False
        if self._limit.left < self._longest:
            self._unreached += [plan.text] if plan.text not in self._unreached else []
            return False
        played = self._play(plan, _Changing(plan))
        if played is None:
            self._unreached += [plan.text] if self._limit.is_spent else []
            return False
        loss = played.loss if math.isfinite(played.loss) and self._raised is None else None
        self._tried.append(Intervention(plan.text, not played.is_bad, loss, len(self._steps)))
        return not played.is_bad

    def _play(self, plan: _Plan | None, observer: LossWatch) -> _Played | None:
        """Play the steps from the oldest copy; ``None``, with the reason noted, where that is not possible or takes too
        long."""
        world, segments, used = self._loop.world, self._segments, self._limit.used
        self._why_not = ""
        if plan is not None and plan.edit is not None:
            edit = plan.edit
            segments = [
                Segment([edit(op, mark) for op in ops], mark) if mark.step >= self._began else Segment(ops, mark)
                for ops, mark in segments
            ]
        replay = Replay(world, self._loop.tape, segments, world.copies[0], limit=self._limit)
        try:
            with replay.going_back(), in_silence(), _Wide(world) if plan and plan.is_wide else nullcontext():
                try:
                    first = len(segments) - len(self._own)
                    if replay.play(LossWatch(), (first, 0)) or replay.play(observer):
                        seconds = f"{self._limit.seconds:.3g} s of CPU time"
                        self._why_not = f"playing {counted(len(segments), 'step')} again takes more than {seconds}"
                        return None
                except Exception as error:  # of the user's code, which a change may not suit
                    pass_on(error)
                    is_same = self._raised is not None and self._raised.alike(type(error).__name__, str(error))
                    self._why_not = "" if is_same else f"playing the steps again raised {type(error).__name__}"
                    return _Played(not replay.other_losses, True, math.nan) if is_same else None
                if self._raised is not None:
                    return _Played(not replay.other_losses, False, observer.loss)
                is_scaled = any(op.kind is ScaleLoss for op in segments[-1].ops)  # gradients may be infinite on purpose
                gradients = [leaf.grad for leaf in replay.leaves() if leaf.grad is not None and not is_scaled]
                low, high = self._limits if plan is None or plan.kind != "numerics" else (-math.inf, math.inf)
                is_bad = not (math.isfinite(observer.loss) and low <= observer.loss <= high)
                is_bad = is_bad or bad_tensor(gradients) is not None or world.newly_bad() is not None
                is_bad = is_bad or bool(world.newly_bad_buffers())
                return _Played(not replay.other_losses, is_bad, observer.loss)
        except Exception as error:  # the state cannot be put back
            pass_on(error)
            self._why_not = str(error) if isinstance(error, CannotGoBack) else "the state of then cannot be put back"
            return None
        finally:
            self._longest = max(self._longest, self._limit.used - used)

    def _watch(self) -> InputWatch:
        parts: dict[int, StatePart] = {}
        stepped = {id(one) for optimizer in self._loop.world.optimizers for one in parameters_of(optimizer)}
        for module in self._loop.world.modules:
            root = self._roots.get(id(module), "")
            for name, tensor in (*members.named_parameters(module), *members.named_buffers(module)):
                path = ".".join(filter(None, [root, user_path(name)]))
                parts.setdefault(id(tensor), StatePart(path, root, tensor, id(tensor) in stepped))
        return InputWatch(self._loop.world.state_ids(), parts)

    def _names(self) -> Names:
        alive, modules, ops = self._loop.tape.alive(), self._loop.world.modules, self._segments[-1].ops
        return Names(alive, modules, self._roots, {}, ops, self._frame, [])

    def _plans(self, watch: InputWatch) -> Iterator[_Plan]:
        """Changes, likeliest first: of what is unlike the steps before, then of what may have driven the run away."""
        yield from self._odd_values(watch)
        for found, states in watch.lost[-1:]:
            is_once, text = len(watch.lost) == 1, "the state of the optimizer as before"  # some loops reset it at times
            yield _Plan("state", f"{found.text}.", text, is_once, states=states, since=found.since)
        yield from self._odd_settings()
        for found, tensor, old in watch.written[:_MOST_OF_A_KIND]:
            yield _Plan("state", f"{found.text}.", f"{found.name} as before", held=[(tensor, old)], since=found.since)
        yield from self._added_gradients()
        yield from self._smaller_rate(watch) if self._diverged is not None else ()
        yield from self._odd_state(watch)
        for keys, one in self._grouped(unlike.course):
            if one.name == "lr" and self._diverged is None:  # a warm-up: a model that does not train never fails
                continue
            yield self._setting_plan(keys, one, one.first, is_odd=False)
        halves = {dtype for op in self._segments[-1].ops for _, dtype in op.mode.autocast}
        halves &= {str(dtype) for dtype in HALVES}
        compiled = {op.kind for ops, _ in self._segments for op in ops} & {Transform, CompiledStep}
        parts = [name for module in self._loop.world.modules for name in members.children_names(module)]
        is_compiled = bool(compiled or self._loop.compilers) or "_orig_mod" in parts  # it would be compiled again
        # What is large in any precision ends as finite in a wider one.
        if halves and self._diverged is None and not is_compiled:
            says = f"The step runs in {' and '.join(sorted(halves)).replace('torch.', '')} under autocast."
            yield _Plan("numerics", says, "autocast off", is_odd=False, edit=_without_autocast)
        if watch.halves and self._diverged is None and not is_compiled:
            says = f"The step computes in {' and '.join(sorted(watch.halves))}."
            text = "float32 in the place of half precision"
            yield _Plan("numerics", says, text, is_odd=False, edit=_without_autocast, is_wide=True)
        yield from self._smaller_rate(watch) if self._diverged is None else ()
        norms = [norm for norm in watch.norms if math.isfinite(norm)]
        usual = median(norms) if norms else 0.0
        largest = max(norms[-_RECENT:], default=0.0)
        is_scaled = any(op.kind is ScaleLoss for ops, _ in self._segments for op in ops)
        if not self._kind.is_unusual and usual > 0 and largest > _LARGE_NORM * usual and not is_scaled:
            says = f"The norm of the gradients was {number_words(largest)}, and its median {number_words(usual)}."
            yield _Plan("setting", says, f"gradients clipped to a norm of {number_words(usual)}", norm=usual)

    def _added_gradients(self) -> Iterator[_Plan]:
        """Gradients that nothing sets to zero between updates: a call of ``zero_grad`` is missing."""
        done = [(ops, mark.step) for ops, mark in self._own[:-1] if any(op.kind is Backward for op in ops)]
        kept = takewhile(lambda one: not any(op.kind.clears_gradients(op) for op in one[0]), reversed(done))
        steps = [step for _, step in kept]
        if len(steps) > _RECENT:
            says = f"Nothing has set the gradients to zero since step {steps[-1]}, so each update adds all since."
            yield _Plan("state", says, "gradients set to zero before each step", since=steps[-1], clears=True)

    def _smaller_rate(self, watch: InputWatch) -> Iterator[_Plan]:
        """A smaller learning rate, for a run that has diverged or had a large update."""
        steps = [op for ops, _ in self._own for op in ops if op.kind is OptimizerStep]
        rates = [group["lr"] for op in steps for group in op.note.options if _is_number(group.get("lr"))]
        update = max(watch.updates[-_RECENT:], default=0.0) if not self._kind.is_unusual else 0.0
        if rates and (self._diverged is not None or update > _LARGE_UPDATE):
            says = cause.rate_words(self._diverged, update, min(rates), max(rates))
            for text, factor in SMALLER_RATES.items():
                if text != TENTH and self._diverged is None:
                    continue
                yield _Plan("setting", says, text, edit=partial(_with_smaller_rate, factor))

    def _odd_values(self, watch: InputWatch) -> Iterator[_Plan]:
        """Values that differ from the steps before, in the order in which the failing step reads them: their odd rows
        as in a usual step, then all of them."""
        names, spaces, found = self._names(), readings.spaces_of(self._frame), []
        num_past = _RECENT if self._diverged is None else len(self._steps)
        for slot, series in watch.series.items():
            if series.readings and series.readings[-1].step == self._steps[-1]:
                one = series.unlike(readings.slot_name(names, series, slot, spaces), num_past)
                found += [(series, one)] if one is not None else []
        last = self._steps[-1]
        odd = sorted([(_is_over(series, one, last), place) for place, (series, one) in enumerate(found)])
        for is_over, place in odd[:_MOST_OF_A_KIND]:
            series, one = found[place]
            step = one.first if one.role == "carried" else max((n for n in series.values if n < one.since), default=-1)
            kind, one = _CLASSES[one.role], self._with_rows(one, series)
            if one.rows and (values := _replaced(series, step, one, is_whole=False)):
                text = f"{row_words(one.rows)} of `{one.name}` of step {step} in their place"
                yield _Plan(kind, f"{one.text}.", text, not is_over, values=values)
            if values := _replaced(series, step, one, is_whole=True):
                yield _Plan(
                    kind, f"{one.text}.", f"`{one.name}` of step {step} in its place", not is_over, values=values
                )
            else:
                yield _Plan(kind, f"{one.text}.", "", not is_over)

    def _with_rows(self, found: Unlike, series: Series) -> Unlike:
        """With the rows that are unlike before, if these are some of a single tensor, or with what made the batch."""
        whole = series.numbers.get(found.since, ()) if found.role == "batch" and found.is_now else ()
        for made in filter(None, (self._loop.samples.collate(number()) for number in whole)):
            return replace(found, words=f"{found.text} (put into a batch by {made})")
        odd = [(n, value) for n, value in enumerate(series.values.get(found.since, ())) if _is_odd(value, found)]
        if found.role != "batch" or found.words or found.is_now or len(odd) != 1 or not native.dim(odd[0][1]):
            return found
        (place, tensor), ops = odd[0], [op for ops, mark in self._segments if mark.step == found.since for op in ops]
        rows = rows_where(_odd_elements(tensor, found))
        samples = self._loop.samples.words(series.numbers[found.since][place], ops, rows, len(tensor))
        return replace(found, rows=tuple(rows), samples=samples) if len(rows) < len(tensor) else found

    def _odd_settings(self) -> Iterator[_Plan]:
        """Settings that have jumped, as they were before."""
        for keys, one in self._grouped(unlike.changed):
            is_raised = max(map(abs, one.now)) > max(map(abs, one.before))  # many runs lower a rate at times
            yield self._setting_plan(keys, one, one.since, is_odd=is_raised)

    def _grouped(self, how: Callable[..., Unlike | None]) -> list[tuple[list[Key], Unlike]]:
        """Settings that are unlike before, those together that have one name and changed at one step."""
        found: dict[tuple[str, int], tuple[list[Key], Unlike]] = {}
        for key, values in self._settings.items():
            changes = [one for n, one in enumerate(values) if not n or one[1] != values[n - 1][1]]
            read = [Reading(step, float(value), float(value)) for step, value in changes]
            is_flag = isinstance(values[0][1], bool)
            if how("", read, is_flag=is_flag) is None:
                continue
            name = readings.setting_name(key, self._loop, self._frame)[0]
            one = how(name.strip("`"), read, is_flag=is_flag)
            if one is not None and name.startswith("`"):
                found.setdefault((one.name.rpartition(".")[2], one.since), ([], one))[0].append(key)
        return list(found.values())[:_MOST_OF_A_KIND]

    def _setting_plan(self, keys: Sequence[Key], one: Unlike, since: int, *, is_odd: bool = True) -> _Plan:
        """Settings with their values of before the step ``since``."""
        known = {key: self._settings[key] for key in keys}
        values = {key: [*pairs[:1], *(p for p in pairs if p[0] < since)][-1][1] for key, pairs in known.items()}
        first, *others = {str(value): value for value in values.values()}.values()
        value = str(first) if isinstance(first, bool) else number_words(float(first))
        name = one.name if len(keys) == 1 else one.name.rpartition(".")[2]
        text = f"`{name}` as before" if others else f"`{name}` at {value} as before"
        return _Plan("setting", f"{one.text}.", text, is_odd, edit=partial(_with_settings, values, since))

    def _odd_state(self, watch: InputWatch) -> Iterator[_Plan]:
        """Parts of the state that grow, fall or drift: as they were first."""
        found = []
        for part in watch.followed:
            given = part.name, "state", part.readings
            odd, one = None, unlike.drift(*given) if native.numel(part.tensor) == 1 else None
            if not part.is_stepped:  # a bias drifts in many runs, and goes anywhere in one that has diverged
                odd = unlike.growth(*given) or unlike.decay(*given)
                one = odd or one or unlike.sign(*given)
            found += [(part, one, odd is not None)] if one is not None else []
        for part, one, is_odd in sorted(found, key=lambda item: not item[2])[:_MOST_OF_A_KIND]:
            is_single = native.numel(part.tensor) == 1
            value = number_words(float(part.first)) if is_single else f"its value before step {self._steps[0]}"
            text, says = f"`{part.name}` held at {value}", f"{one.text}."
            yield _Plan("state", says, text, is_odd, held=[(part.tensor, part.first)])
            if not is_single:  # averages of a teacher are made of all its buffers: teacher_variance_negative
                held = [(one.tensor, one.first) for one in watch.followed if one.root == part.root]
                owner = f"`{part.root}`" if part.root else "the model"
                has_weights = any(isinstance(tensor, torch.nn.Parameter) for tensor, _ in held)
                what = f"{owner} held at its" if has_weights else f"the buffers of {owner} held at their"
                text = f"{what} values before step {self._steps[0]}"
                yield _Plan("state", says, text, is_odd, held=held)

    def _exchanges(self, watch: InputWatch) -> Iterator[_Plan]:
        """The last batch from before the failure, if it is of the same kind, in the place of all since: each of its
        values alone, then all."""
        names, spaces = self._names(), readings.spaces_of(self._frame)
        later = [step for step in self._steps if step >= self._since]
        read = [(slot, one) for slot, one in watch.series.items() if later[-1] in one.values and one.role == "batch"]
        given = [(slot, one) for slot, one in read if not one.is_random]
        before = [step for step in self._steps if step < self._since]
        step = next((n for n in reversed(before) if all(_are_alike(one, n, later) for _, one in given)), None)
        if step is None:
            return
        pairs: dict[str, dict[Number, torch.Tensor]] = {}
        sizes, last = dict[str, str](), later[-1]
        for slot, one in given:
            name = f"`{readings.slot_name(names, one, slot, spaces)}`"
            seen = [value.shape for n in before for value in one.values.get(n, ())]
            steps = f"steps {before[0]}-{before[-1]}" if len(before) > 1 else f"step {before[0]}"
            sizes[name] = unlike.resized(name, seen, one.values[last][0].shape, f"step {last}", steps)
            for now in later:
                if not all(map(native.equal, one.values[now], one.values[step])):
                    found = zip(one.numbers[now], one.values[step], strict=True)
                    pairs.setdefault(readings.slot_name(names, one, slot, spaces), {}).update(found)
        which = f"step {self._since}" if len(later) == 1 else f"steps {self._since}-{later[-1]}"
        few = pairs if len(pairs) <= _MOST_INPUTS else {}
        parts = {f"`{name}`": values for name, values in few.items() if name != UNNAMED}
        if pairs and (len(pairs) > 1 or not parts):
            parts["the batch"] = {number: value for values in pairs.values() for number, value in values.items()}
        for name, values in parts.items():
            text = f"{name} of step {step} in its place"
            says = sizes.get(name, "") if self._kind.raises and len(later) == 1 else ""
            yield _Plan("data", f"{says or f'It depends on {name} of {which}'}.", text, bool(says), values=values)


def _are_alike(series: Series, step: int, later: Iterable[int]) -> bool:
    """True if the later steps have read as many tensors there, of the same types and numbers of dimensions."""
    kinds = {n: [(value.dtype, native.dim(value)) for value in series.values.get(n, ())] for n in (step, *later)}
    return all(kinds[n] == kinds[step] and len(series.numbers.get(n, ())) == len(kinds[n]) for n in later)


def _is_over(series: Series, found: Unlike, last: int) -> bool:
    """True if a value was odd in an earlier step, and is as before in the last one."""
    odd = (_is_odd(value, found) for value in series.values.get(last, ()))
    return found.role == "batch" and found.since < last and not any(odd)


def _is_odd(value: torch.Tensor, found: Unlike) -> bool:
    return bool(found.words or found.is_now) or bool(native.any(_odd_elements(value, found)))


def _odd_elements(tensor: torch.Tensor, found: Unlike) -> torch.Tensor:
    """Which elements have left the range of before; of a new sign, which are negative."""
    limit = JUMP * max(map(abs, found.before))
    return native.abs(native.double(tensor)) > limit if max(map(abs, found.now)) > limit else tensor < 0


def _replaced(series: Series, step: int, found: Unlike, *, is_whole: bool) -> dict[Number, torch.Tensor]:
    """The values of ``step`` in the place of the odd ones, or their odd rows; nothing where shapes or types differ."""
    usual, values = series.values.get(step, []), {}
    for later, numbers in series.numbers.items():
        if later >= (step + 1 if found.role == "carried" else found.since):
            for number, old, now in zip(numbers, usual, series.values.get(later, ()), strict=False):
                if old.shape != now.shape or old.dtype != now.dtype:
                    return {}
                if found.role == "batch" and not _is_odd(now, found):
                    continue
                values[number] = old
                if not is_whole:
                    rows = rows_where(_odd_elements(now, found))
                    values[number] = native.clone(now)
                    values[number][rows] = old[rows]
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _with_settings(values: Mapping[Key, Any], since: int, op: Op, mark: Mark) -> Op:
    """A call with other settings from a step on."""
    if mark.step < since:
        return op
    if op.kind is OptimizerStep:
        return _with_options(op, lambda *key: values.get(("option", id(op.target), *key[:-1]), key[-1]))
    own = {key[1:]: value for key, value in values.items() if key[0] == "attribute"}
    if own and op.kind is Root and op.note.attributes is not None:
        op = op._replace(note=replace(op.note, attributes=op.note.attributes.with_values(own)))
    call = ("argument", op.code, op.instruction)
    args = tuple(values.get((*call, place), value) for place, value in enumerate(op.args))
    return op._replace(args=args, kwargs={name: values.get((*call, name), value) for name, value in op.kwargs.items()})


def _with_smaller_rate(factor: float, op: Op, mark: Mark) -> Op:
    if op.kind is not OptimizerStep:
        return op
    return _with_options(op, lambda *key: key[-1] * factor if key[2] == "lr" and _is_number(key[-1]) else key[-1])


def _with_options(op: Op, change: Callable[[int, int, str, Any], Any]) -> Op:
    """A step with other options, made of the place of a group, the part of the option, its name and value."""

    def changed_in(place: int, name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(change(place, part, name, one) for part, one in enumerate(value))
        return change(place, 0, name, value)

    groups = enumerate(op.note.options)
    options = [{name: changed_in(place, name, value) for name, value in group.items()} for place, group in groups]
    return op._replace(note=replace(op.note, options=options))


def _without_autocast(op: Op, mark: Mark) -> Op:
    return op._replace(mode=replace(op.mode, autocast=()))
