"""Looks at a step of the run now and then: the settings that it ran with, the calls that it made, the data that met its
model. Where one is unlike the looks before, the steps that are kept are looked at one by one, or played.

A look reads the tape and what is still alive; nothing is computed in a step for it.
"""

from __future__ import annotations

import ast
import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from itertools import groupby
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from reprokit.capture.calls import Clip, CompiledStep, OptimizerStep, Root, Transform, ZeroGrad
from reprokit.capture.readings import Series, Slot, argument_name, arguments_of, given_to, slot_name, spaces_of
from reprokit.capture.replay import PlayObserver, Replay, in_silence
from reprokit.capture.tape import Number, Op
from reprokit.capture.tensor_names import Names, names_of, parameter_names, root_names
from reprokit.compare.quantity import numbers_of
from reprokit.program.sites import make_site, parts
from reprokit.series.cause import Reading
from reprokit.series.timeline import parameters_of
from reprokit.series.unlike import CLEARLY, FAR, LEAST_AFTER, LEAST_ALIKE, LEAST_BEFORE, Shift, Value, setting, since
from reprokit.words import user_path

if TYPE_CHECKING:
    from reprokit.capture.loop import Loop

_MOST_WORDS = 60  # characters of an expression
_MOST_SETTINGS = 100_000
_MOST_SEATS = 4  # optimizers that take turns in one iteration
_MOST_READINGS, _MOST_ELEMENTS = 16, 2**24  # of a value that looks have read
_ACTS_IN = 5  # steps, from a setting to the loss
_LEAST_KEPT = 8  # steps that those from some step on are compared with
_FREE_SECONDS, _SHARE = 3.0, 0.01  # of playing steps, in CPU time, which other processes do not change

Key = tuple[Any, ...]


class Usual:
    """What was seen of the steps so far. Keeps nothing that belongs to the user."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._settings: dict[Key, Value | None] = {}  # the value that each had in all looks; ``None`` of several
        self._values: dict[Slot, list[Reading]] = {}
        self._kinds: dict[int, Any] = {}  # of optimizers
        self._counts: dict[int, float] = {}  # of steps in their states
        self._began, self._spent = time.process_time(), 0.0

    def look(self, frame: FrameType | None) -> tuple[list[Shift], list[Slot]]:
        """What has changed since the last look, and the values that are to be read in all steps that are kept."""
        marks = self._loop.tape.marks
        begin = next((n for n in range(len(marks) - 1, 0, -1) if marks[n - 1].step != marks[-1].step), 0)
        begin = max(begin, len(marks) - _MOST_SEATS)
        ops = self._loop.tape.ops(marks[begin - 1].end if begin else 0, marks[-1].end)
        ended = {key: False for key, value in self._settings.items() if key[0] == "call" and value is True}
        now = ended | settings_of(ops)
        if len(self._settings) > _MOST_SETTINGS:  # every round of a federated training has its own optimizers
            self._settings, self._kinds, self._counts = {}, {}, {}
        changed = {key for key, value in now.items() if self._settings.setdefault(key, value) not in (value, None)}
        found = list(self._changes(changed, ops, frame)) if changed else []
        for number, optimizer in {id(op.target): op.target for op in ops if op.kind is OptimizerStep}.items():
            count = _count_of(optimizer)
            if count < self._counts.get(number, 0):
                name, step = names_of([optimizer], frame)[number], marks[-1].step - int(count) + 1
                found.append(Shift(f"the state of `{name}`", step, f"counts fewer steps than before ({count:g})"))
            self._kinds[number], self._counts[number] = _kind_of(optimizer), count
        return found, self._odd_values(ops)

    # -- settings ------------------------------------------------------------------------------------------------

    def has_moved(self, step: int) -> bool:
        """True if an option of an optimizer is far from all that it was until a few steps before: a restart that sets
        another learning rate, a weight decay in per cent. A schedule comes back to a rate that the run has had."""
        before: dict[Key, list[Value]] = {}
        now: dict[Key, Value] = {}
        for segment in self._loop.tape.segments():
            options = {key: value for key, value in settings_of(segment.ops).items() if key[0] == "option" and value}
            for key, value in options.items() if segment.mark.step < step - _ACTS_IN else ():
                before.setdefault(key, []).append(value)
            now.update(options if segment.mark.step == step else {})
        pairs = ((key, [(was, now[key]) for was in known]) for key, known in before.items() if key in now)
        return any(
            all(one != is_now and setting(one, is_now, is_rate=key[-1] == "lr") for one, is_now in both)
            for key, both in pairs
        )

    def _changes(self, changed: Set[Key], ops: list[Op], frame: FrameType | None) -> Iterator[Shift]:
        """Those settings that had one value up to some step, have another one since, and no plan explains it."""
        series: dict[Key, list[tuple[int, Value]]] = {key: [] for key in changed}
        for step, group in groupby(self._loop.tape.segments(), lambda segment: segment.mark.step):
            values = settings_of([op for segment in group for op in segment.ops])
            for key, known in series.items():
                if key in values or key[0] == "call":
                    known.append((step, values.get(key, False)))
        found: dict[Key, tuple[int, Any, Value]] = {}
        for key, known in series.items():
            was, now = self._settings[key], known[-1][1]
            num_after = next((n for n, (_, value) in enumerate(reversed(known)) if value != now), len(known))
            before = known[: len(known) - num_after]
            is_varied = any(value != was for _, value in before)
            if is_varied or num_after >= LEAST_AFTER:
                self._settings[key] = None  # one that changes again goes by a plan
                since_step = known[-num_after][0]
                if not is_varied and len(before) >= LEAST_AFTER and since_step >= LEAST_BEFORE:
                    found[key] = since_step, was, now
        for key, (step, was, now) in found.items():
            words = setting(was, now, is_rate=key[-1] == "lr")
            is_plain = isinstance(now, (bool, str))
            if key[-1] == "training":
                words = f"went from {'training' if was else 'eval'} mode to {'training' if now else 'eval'} mode"
            elif key[0] == "call":
                words = self._ended(key, ops)
            elif is_plain and key[0] != ("argument" if isinstance(now, str) else "flag"):
                words = None  # a switch of the user's own
            elif key[0] == "flag" and not was:
                words = None  # a layer that begins to learn
            elif words is None and (step, now, was) in [one for other, one in found.items() if other[0] == key[0]]:
                words = f"went from {was} to {now}"  # two were exchanged, such as the labels of a GAN
            if words is not None:
                name, place = self._name(key, frame)
                yield Shift(name, step, words, place)

    def _ended(self, key: Key, ops: Sequence[Op]) -> str | None:
        """That a call which every step has made is not made any more, or an optimizer has lost its state with it."""
        _, kind, owner = key
        made = {one[1:] for one in settings_of(ops) if one[0] == "call"}
        if kind is not OptimizerStep:
            return None if any(one == kind for one, _ in made) else "is no longer called"
        if (ZeroGrad, owner) in made:
            return "is no longer called, though its gradients are cleared"
        new = [op.target for op in ops if op.kind is OptimizerStep and id(op.target) not in self._kinds]
        new = [one for one in new if id(one) in self._loop.stateless and _kind_of(one) == self._kinds.get(owner)]
        return "is that of a new optimizer, without the state of the old one" if new else None

    def _name(self, key: Key, frame: FrameType | None) -> tuple[str, str | None]:
        """The name of a setting as the user knows it, and the module that it is of."""
        kind, *where = key
        modules, ops = self._loop.world.modules, self._loop.tape.ops()
        if kind == "call":
            found = names_of([op.target for op in ops if id(op.target) == where[1]][:1], frame)
            names = {OptimizerStep: f"{found.get(where[1], 'optimizer')}.step", ZeroGrad: "zero_grad"}
            return f"`{names.get(where[0], 'clip_grad_norm_')}`", None
        if kind == "argument":
            op = next((op for op in reversed(ops) if (op.code, op.instruction) == (where[0], where[1])), None)
            name = argument_name(op, where[2], spaces_of(frame)) if op is not None else ""
            site = make_site(where[0], where[1]) if where[0] is not None and not name else None
            written = ast.unparse(next(iter(parts(site)))) if site is not None and parts(site) else ""
            return f"`{name}`" if name else f"a number in `{written}`" if 0 < len(
                written
            ) < _MOST_WORDS else "a number", None
        if kind == "flag":
            name = parameter_names(modules, frame).get(where[0], "")
            return f"`{name}.requires_grad`", name.rpartition(".")[0] or None
        roots = root_names(modules, frame)
        known = ((roots.get(id(root)), *one) for root in modules for one in root.named_modules())
        owner = next((one for one in known if id(vars(one[2])) == where[0]), (None, "", None))
        place = ".".join(filter(None, [owner[0], user_path(owner[1])]))
        return f"`{'.'.join(filter(None, [place, where[-1]]))}`", place or None

    # -- values --------------------------------------------------------------------------------------------------

    def _odd_values(self, ops: Sequence[Op]) -> list[Slot]:
        """The values of the last step that are unlike those of the looks before."""
        given = [(slot, tensor) for slot, number in _given_to_model(ops) if (tensor := number()) is not None]
        odd = []
        for slot, reading in _read(self._loop.tape.marks[-1].step, given).items():
            known = self._values.get(slot, [])
            is_odd = len(known) >= LEAST_ALIKE and since([*known, reading]) is not None
            totals = [one.total for one in known]
            is_again = totals[-1:] == [reading.total] and LEAST_ALIKE < len(totals) == len(set(totals))
            odd += [slot] if is_odd or is_again else []
            self._values[slot] = known if is_odd else [*known[-_MOST_READINGS:], reading]
        return odd

    def played(
        self, frame: FrameType | None, wanted: Collection[Slot] | None = None, until: int | None = None
    ) -> list[Shift]:
        """The values, those ``wanted`` if that is given, which are unlike before in the kept steps, by playing these;
        with ``until`` the values of that step or the one before.

        Nothing is said where a loss differs from that of training, or in more than a small share of the time.
        """
        loop, world, started = self._loop, self._loop.world, time.process_time()
        left = _FREE_SECONDS + _SHARE * (started - self._began) - self._spent
        if left <= 0:
            return []
        segments = [one for one in loop.tape.segments() if until is None or one.mark.step <= until]
        reader, replay = _Reader(started + left, wanted), Replay(world, loop.tape, segments, world.copies[0])
        try:
            with replay.going_back(), in_silence():
                if replay.play(reader) or replay.notes:
                    return []
        finally:
            self._spent += time.process_time() - started
        modules, last = world.modules, segments[-1].mark.step
        names = Names(loop.tape.alive(), modules, root_names(modules, frame), {}, segments[-1].ops, frame, [])
        found = []
        for slot, series in reader.series.items():
            one = since(series.readings, _LEAST_KEPT) if series.readings[-1].step == last else None
            begin = len(series.readings) - LEAST_ALIKE if until is None else math.inf  # one batch may be odd
            if one is not None and one[0] <= begin and (until is None or series.readings[one[0]].step >= until - 1):
                sizes = [reading.size for reading in series.readings]
                usual = max(median(sizes[: one[0]]), max(sizes[: one[0]]) / CLEARLY)
                times = median(sizes[one[0] :]) / (usual or math.inf)
                times = times if "float" in series.readings[-1].dtype or times > FAR else 0.0
                name = f"`{slot_name(names, series, slot, spaces_of(frame))}`"
                found.append(Shift(name, series.readings[one[0]].step, one[1], times=times))
                self._values.pop(slot, None)
        return found


class _Reader(PlayObserver):
    """Reads the values that the steps are given, or those ``wanted``. Stops at the ``deadline``."""

    def __init__(self, deadline: float, wanted: Collection[Slot] | None) -> None:
        self.series: dict[Slot, Series] = {}
        self._deadline, self._wanted = deadline, wanted

    def begin(self, replay: Replay) -> bool:
        return time.process_time() > self._deadline

    def end(self, replay: Replay) -> bool:
        ops, wanted, value = replay.segment.ops, self._wanted, replay.player.value
        numbers = (one for one in _given_to_model(ops) if wanted is None or one[0] in wanted)
        given = ((slot, tensor) for slot, number in numbers if (tensor := value(number)) is not None)
        for slot, reading in _read(replay.segment.mark.step, given).items():
            op = next(op for op in ops if (op.code, op.instruction) == slot[:2])
            self.series.setdefault(slot, Series("batch", op, False)).readings.append(reading)
        return False


def _read(step: int, given: Iterable[tuple[Slot, torch.Tensor]]) -> dict[Slot, Reading]:
    """The values of a step; what one line read several times as one. Waits for a device once."""
    known, parts = list[tuple[Slot, torch.Tensor]](), list[torch.Tensor]()
    for slot, one in given:
        is_plain = one.layout is torch.strided and not one.is_complex() and 0 < one.numel() <= _MOST_ELEMENTS
        with torch.no_grad(), suppress(RuntimeError, NotImplementedError, TypeError):  # of a type that has no such call
            if is_plain:
                parts += [*one.aminmax(), one.count_nonzero(), one.sum(dtype=torch.double)]
                known.append((slot, one))
    numbers, found = iter(numbers_of(parts)), dict[Slot, Reading]()
    for slot, one in known:
        low, high, count, total = (next(numbers) for _ in range(4))
        if all(map(math.isfinite, (low, high, total))):
            rows, dtype = one.shape[0] if one.dim() else 0, str(one.dtype).removeprefix("torch.")
            reading = Reading(step, low, high, one.numel(), 1 - count / one.numel(), rows, dtype, total)
            found[slot] = found[slot].joined(reading) if slot in found else reading
    return found


def settings_of(ops: Sequence[Op]) -> dict[Key, Value]:
    """The numbers, flags and words that a step ran with: arguments of calls, options, attributes of its roots; that it
    made the calls which belong to a step. An evaluation comes before the step, whose own ones stay."""
    used, found = _used_by_gradients(ops), dict[Key, Any]()
    for place, op in enumerate(ops):
        if op.kind in (OptimizerStep, ZeroGrad, Clip):
            owner = op.target if op.kind is OptimizerStep else op.args[0] if op.kind is ZeroGrad else None
            found["call", op.kind, id(owner)] = True
        if op.kind is OptimizerStep:
            options = ((n, name, value) for n, group in enumerate(op.note.options) for name, value in group.items())
            for n, name, value in options:
                parts = enumerate(value) if isinstance(value, tuple) else [(0, value)]
                found.update({("option", id(op.target), n, part, name): one for part, one in parts})
        elif place in used:
            found.update({("argument", op.code, op.instruction, name): value for name, value in arguments_of(op)})
        if op.kind is Root and op.note.attributes is not None and op.mode.grad:
            noted, parameters = op.note.attributes, op.note.attributes.layout.parameters
            found.update({("attribute", id(space), name): value for (space, name), value in noted.items()})
            flags = zip(parameters, noted.values[len(noted.values) - len(parameters) :], strict=True)
            found.update({("flag", id(parameter)): flag for parameter, flag in flags})
    return {key: value for key, value in found.items() if _is_plain(value)}


def _used_by_gradients(ops: Sequence[Op]) -> set[int]:
    """The positions of the calls that gradients are made of, or that are made of gradients, and of writes."""
    needed, of_gradients, found = set[Number](), set[Number](), set[int]()
    for place in range(len(ops) - 1, -1, -1):
        if ops[place].kind.differentiates or (ops[place].kind.is_forward and not needed.isdisjoint(ops[place].outs)):
            found.add(place)
            needed.update(ops[place].ins)
    for place, op in enumerate(ops):
        if (
            op.kind is Clip
            or op.kind.writes_state(op)
            or op.kind.reads_gradients(op)
            or not of_gradients.isdisjoint(op.ins)
        ):
            found.add(place)
            of_gradients.update(op.outs)
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


def _kind_of(optimizer: torch.optim.Optimizer) -> Any:
    """What an optimizer has in common with one in its place that goes on with its work."""
    options = [{name: value for name, value in group.items() if _is_plain(value)} for group in optimizer.param_groups]
    return type(optimizer), frozenset(map(id, parameters_of(optimizer))), options


def _count_of(optimizer: torch.optim.Optimizer) -> float:
    """The steps in the state of an optimizer; infinity where it has none, or a device would have to be waited for."""
    count = next((one for one in optimizer.state.values() if isinstance(one, dict)), {}).get("step", math.inf)
    return float(count) if not isinstance(count, torch.Tensor) or count.is_cpu else math.inf


def _given_to_model(ops: Sequence[Op]) -> Iterator[tuple[Slot, Number]]:
    """What calls that use parameters were given besides, and what these have not made."""
    made: set[Number] = set()
    for op in ops:
        if op.kind.is_forward:
            given = [(slot, number, number()) for slot, number in given_to(op)]
            is_met = any(number in made or isinstance(tensor, torch.nn.Parameter) for _, number, tensor in given)
            if is_met or op.kind in (Root, Transform, CompiledStep):
                yield from (
                    (slot, number)
                    for slot, number, tensor in given
                    if number not in made and not isinstance(tensor, torch.nn.Parameter)
                )
                made.update(op.outs)
