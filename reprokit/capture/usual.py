"""Looks at a step of the run now and then: the settings that it ran with, the calls that it made, the data that met its
model. Where one is unlike the looks before, the steps that are kept are looked at one by one, or played.

A look reads the tape and what is still alive; nothing is computed in a step for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from reprokit.capture.calls import Clip, CompiledStep, OptimizerStep, Root, Transform, ZeroGrad
from reprokit.capture.readings import Series, Slot, argument_name, arguments_of, given_to, slot_name, spaces_of
from reprokit.capture.replay import PlayObserver, Replay, in_silence
from reprokit.capture.tape import Number, Op
from reprokit.capture.tensor_names import Names, names_of, parameter_names, root_names
from reprokit.compare.quantity import numbers_of
from reprokit.program.sites import make_site
from reprokit.series.cause import Reading
from reprokit.series.timeline import parameters_of
from reprokit.series.unlike import LEAST_AFTER, LEAST_ALIKE, LEAST_BEFORE, Change, Value, are_exchanged, setting, since
from reprokit.words import user_path

if TYPE_CHECKING:
    from reprokit.capture.loop import Loop

_MOST_SEATS = 4  # optimizers that take turns in one iteration
_MOST_READINGS, _MOST_ELEMENTS = 16, 2**24  # of a value that looks have read
_FAR = 1000.0  # times all values before: a code for a missing label
_LEAST_KEPT = 8  # steps that those from some step on are compared with
_FREE_SECONDS, _SHARE, _MOST_SECONDS = 1.0, 0.01, 2.0  # of playing steps: at first, of the time, at once

Key = tuple[Any, ...]


@dataclass
class _Held:
    """A setting that has had one ``value`` in all looks, so many; that of one which has had several is ``None``."""

    value: Value | None
    num_looks: int = 0


class Usual:
    """What was seen of the steps so far. Keeps nothing that belongs to the user."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._settings: dict[Key, _Held] = {}
        self._values: dict[Slot, list[Reading]] = {}
        self._optimizers: dict[int, Any] = {}  # what kind each is, of which parameters, with which options
        self._counts: dict[int, float] = {}  # of the steps in their state
        self._began, self._spent = time.monotonic(), 0.0

    def look(self, frame: FrameType | None) -> tuple[list[Change], list[Slot]]:
        """What has changed since the last look, and the values that are to be read in all steps that are kept."""
        marks = self._loop.tape.marks
        begin = next((n for n in range(len(marks) - 1, 0, -1) if marks[n - 1].step != marks[-1].step), 0)
        begin = max(begin, len(marks) - _MOST_SEATS)
        ops = self._loop.tape.ops(marks[begin - 1].end if begin else 0, marks[-1].end)
        changed: dict[Key, _Held] = {}
        now = dict(settings_of(ops))  # the last ones: an evaluation comes before
        known = {key: False for key, held in self._settings.items() if key[0] == "call" and held.value is True}
        for key, value in (known | now).items():
            held = self._settings.setdefault(key, _Held(value))
            if held.value == value:
                held.num_looks += 1
            elif held.value is not None:
                changed[key] = held
        found = list(self._changes(changed, ops, frame)) if changed else []
        for optimizer in {id(op.target): op.target for op in ops if op.kind is OptimizerStep}.values():
            self._optimizers[id(optimizer)] = _kind_of(optimizer)
            count = _count_of(optimizer)
            if count < self._counts.get(id(optimizer), 0):
                name, step = names_of([optimizer], frame)[id(optimizer)], marks[-1].step - int(count) + 1
                found.append(Change(f"the state of `{name}`", step, f"has begun anew, and was of {marks[-1].step - 1}"))
            self._counts[id(optimizer)] = count
        return found, self._odd_values(ops)

    # -- settings ------------------------------------------------------------------------------------------------

    def _changes(self, changed: Mapping[Key, _Held], ops: list[Op], frame: FrameType | None) -> Iterator[Change]:
        """Those settings that had one value up to some step, have another one since, and no plan explains it."""
        series: dict[Key, list[tuple[int, Value]]] = {key: [] for key in changed}
        for step, group in groupby(self._loop.tape.segments(), lambda segment: segment.mark.step):
            values = dict(settings_of([op for segment in group for op in segment.ops]))
            for key, known in series.items():
                if key in values or key[0] == "call":
                    known.append((step, values.get(key, False)))
        found: dict[Key, tuple[int, Any, Value]] = {}
        for key, known in series.items():
            held, now = changed[key], known[-1][1]
            num_after = next((n for n, (_, value) in enumerate(reversed(known)) if value != now), len(known))
            before = known[: len(known) - num_after]
            if any(value != held.value for _, value in before):
                held.value = None
            elif num_after >= LEAST_AFTER:
                if len(before) >= LEAST_BEFORE or held.num_looks >= LEAST_ALIKE:
                    found[key] = (known[-num_after][0], held.value, now)
                held.value = None  # one that changes again goes by a plan
        for key, (step, was, now) in found.items():
            others = [one for other, one in found.items() if other != key and other[0] == key[0] and one[0] == step]
            words = setting(was, now, is_rate=key[-1] == "lr")
            if key[0] == "call":
                words = self._gone(key, ops)
            elif isinstance(now, (bool, str)) and not (
                key[-1] == "training" or (key[0] == "flag" and was) or (key[0] == "argument" and isinstance(now, str))
            ):
                words = None  # a switch of the user's own, or a layer that begins to learn
            elif words is None and any(are_exchanged((was, now), other[1:]) for other in others):
                words = f"went from {was} to {now}"
            if words is not None:
                name, place = self._name(key, frame)
                yield Change(name, step, words, place)

    def _gone(self, key: Key, ops: Sequence[Op]) -> str | None:
        """That a call is no longer made: a step although the gradients are cleared for it, or what belongs to a step;
        that an optimizer is in the place of one of its kind, without its state."""
        _, kind, owner = key
        made = {one[1:]: one for one, _ in settings_of(ops) if one[0] == "call"}
        if kind is not OptimizerStep:
            return None if any(one == kind for one, _ in made) else "is no longer called"
        if (ZeroGrad, owner) in made:
            return "is no longer called, though its gradients are cleared"
        new = [op.target for op in ops if op.kind is OptimizerStep and id(op.target) not in self._optimizers]
        alike = [one for one in new if _kind_of(one) == self._optimizers.get(owner)]
        return (
            "is that of a new optimizer, without the state of the old one"
            if alike and id(alike[0]) in self._loop.stateless
            else None
        )

    def _name(self, key: Key, frame: FrameType | None) -> tuple[str, str | None]:
        """The name of a setting as the user knows it, and the module that it is of."""
        kind, *where = key
        modules, ops = self._loop.world.modules, self._loop.tape.ops()
        if kind == "call" and where[0] is OptimizerStep:
            found = names_of([op.target for op in ops if id(op.target) == where[1]][:1], frame)
            return f"`{found.get(where[1], 'optimizer')}.step`", None
        if kind == "call":
            return "`zero_grad`" if where[0] is ZeroGrad else "`clip_grad_norm_`", None
        if kind == "argument":
            op = next((op for op in reversed(ops) if (op.code, op.instruction) == (where[0], where[1])), None)
            name = argument_name(op, where[2], spaces_of(frame)) if op is not None else ""
            site = make_site(where[0], where[1]) if where[0] is not None and not name else None
            return f"`{name}`" if name else f"a number at {site.place}" if site is not None else "a number", None
        if kind == "flag":
            name = parameter_names(modules, frame).get(where[0], "")
            return f"`{name}.requires_grad`", name.rpartition(".")[0] or None
        roots = root_names(modules, frame)
        parts = ((roots.get(id(root)), *one) for root in modules for one in root.named_modules())
        owner = next((one for one in parts if id(vars(one[2])) == where[0]), (None, "", None))
        place = ".".join(filter(None, [owner[0], user_path(owner[1])]))
        return f"`{'.'.join(filter(None, [place, where[-1]]))}`", place or None

    # -- values --------------------------------------------------------------------------------------------------

    def _odd_values(self, ops: Sequence[Op]) -> list[Slot]:
        """The values of the last step that are unlike those of the looks before."""
        alive = self._loop.tape.alive()
        given = [(slot, alive[number]) for slot, number in _given_to_model(ops, alive) if number in alive]
        odd = []
        for slot, reading in _read(self._loop.tape.marks[-1].step, given):
            known = self._values.setdefault(slot, [])
            found = since([*known, reading]) if len(known) >= LEAST_ALIKE else None
            totals = [one.total for one in known]
            is_again = totals[-1:] == [reading.total] and LEAST_ALIKE < len(totals) == len(set(totals))
            odd += [slot] if found is not None or is_again else []
            if found is None:
                self._values[slot] = [*known[-_MOST_READINGS:], reading]
        return odd

    def written(self, step: int, frame: FrameType | None) -> list[Change]:
        """The parameters that the loop has written itself in a step, on a line that has written none before."""
        known: set[Any] = set()
        found: list[Change] = []
        loop, alive = self._loop, self._loop.tape.alive()
        for segment in loop.tape.segments():
            writes = {(op.code, op.instruction): op for op in segment.ops if op.kind.writes_state(op)}
            new = [op for line, op in writes.items() if segment.mark.step == step and line not in known]
            known.update(writes)
            names = parameter_names(loop.world.modules, frame) if new else {}
            for op in new:
                site = make_site(op.code, op.instruction) if op.code is not None else None
                where = f" at {site.place}" if site is not None else ""
                owners = [loop.world.owner_of(alive[number]) for number in op.ins[:1] if number in alive]
                text = f"has other values, written{where}, and the loss has risen"
                found += [Change(f"`{names[id(one)]}`", step, text) for one in owners if id(one) in names]
        return found

    def played(
        self, frame: FrameType | None, wanted: Collection[Slot] | None = None, until: int | None = None
    ) -> list[Change]:
        """The values, those ``wanted`` if that is given, which are unlike before in the kept steps, by playing these;
        with ``until`` the values of that step or the one before.

        Nothing is said where a loss differs from that of training, or in more than a small share of the time.
        """
        loop, world, started = self._loop, self._loop.world, time.monotonic()
        if self._spent > _FREE_SECONDS + _SHARE * (started - self._began):
            return []
        segments = [one for one in loop.tape.segments() if until is None or one.mark.step <= until]
        reader = _Reader(started + _MOST_SECONDS, wanted)
        replay = Replay(world, loop.tape, segments, world.copies[0])
        try:
            with replay.going_back(), in_silence():
                if replay.play(reader) or replay.notes:
                    return []
        finally:
            self._spent += time.monotonic() - started
        modules, last = world.modules, segments[-1].mark.step
        names = Names(loop.tape.alive(), modules, root_names(modules, frame), {}, segments[-1].ops, frame, [])
        found = []
        for slot, series in reader.series.items():
            one = since(series.readings, _LEAST_KEPT) if series.readings[-1].step == last else None
            if one is not None and (until is None or series.readings[one[0]].step >= until - 1):
                place, words = one
                sizes = [reading.size for reading in series.readings]
                is_far = max(sizes[place:]) > _FAR * max(sizes[:place]) > 0
                name = slot_name(names, series, slot, spaces_of(frame))
                found.append(Change(f"`{name}`", series.readings[place].step, words, is_far=is_far))
                self._values.pop(slot, None)
        return found


class _Reader(PlayObserver):
    """Reads the values that the steps are given, or those ``wanted``. Stops at the ``deadline``."""

    def __init__(self, deadline: float, wanted: Collection[Slot] | None) -> None:
        self.series: dict[Slot, Series] = {}
        self._deadline, self._wanted = deadline, wanted

    def begin(self, replay: Replay) -> bool:
        return time.monotonic() > self._deadline

    def end(self, replay: Replay) -> bool:
        ops, value = replay.segment.ops, replay.player.value
        numbers = [
            one for one in _given_to_model(ops, replay.player.alive) if self._wanted is None or one[0] in self._wanted
        ]
        given = [(slot, tensor) for slot, number in numbers if (tensor := value(number)) is not None]
        for slot, reading in _read(replay.segment.mark.step, given):
            op = next(op for op in ops if (op.code, op.instruction) == slot[:2])
            self.series.setdefault(slot, Series("batch", op, False)).readings.append(reading)
        return False


def _read(step: int, given: Sequence[tuple[Slot, torch.Tensor]]) -> list[tuple[Slot, Reading]]:
    """The values of a step; what one line read several times as one. Waits for a device once."""
    given = [(slot, tensor.detach()) for slot, tensor in given if 0 < tensor.numel() <= _MOST_ELEMENTS]
    given = [(slot, one) for slot, one in given if one.layout is torch.strided and not one.is_complex()]
    with torch.no_grad():
        parts = [(*one.aminmax(), one.count_nonzero(), one.sum(dtype=torch.double)) for _, one in given]
    numbers = iter(numbers_of([part for group in parts for part in group]))
    found: dict[Slot, Reading] = {}
    for slot, tensor in given:
        low, high, count, total = (next(numbers) for _ in range(4))
        if all(map(math.isfinite, (low, high, total))):
            zeros, rows = 1 - count / tensor.numel(), len(tensor) if tensor.dim() else 0
            dtype = str(tensor.dtype).removeprefix("torch.")
            reading = Reading(step, low, high, tensor.numel(), zeros, rows, dtype, total)
            found[slot] = found[slot].joined(reading) if slot in found else reading
    return list(found.items())


def settings_of(ops: Sequence[Op]) -> Iterator[tuple[Key, Value]]:
    """The numbers, flags and words that a step ran with: arguments of calls, options, attributes of its roots; that it
    made the calls which belong to a step."""
    used = _used_by_gradients(ops)
    for place, op in enumerate(ops):
        if op.kind in (OptimizerStep, ZeroGrad, Clip):
            owner = op.target if op.kind is OptimizerStep else op.args[0] if op.kind is ZeroGrad else None
            yield ("call", op.kind, id(owner)), True
        if op.kind is OptimizerStep:
            for number, group in enumerate(op.note.options):
                for name, value in group.items():
                    parts = value if isinstance(value, tuple) else (value,)
                    known = (v for v in enumerate(parts) if _is_plain(v[1]))
                    yield from ((("option", id(op.target), number, n, name), v) for n, v in known)
        elif place in used:
            given = ((name, value) for name, value in arguments_of(op) if _is_plain(value))
            yield from ((("argument", op.code, op.instruction, name), value) for name, value in given)
        if op.kind is Root and op.note.attributes is not None and op.mode.grad:
            noted = op.note.attributes
            yield from ((("attribute", id(space), name), v) for (space, name), v in noted.items() if _is_plain(v))
            flags = noted.values[len(noted.values) - len(noted.layout.parameters) :]
            yield from ((("flag", id(p)), flag) for p, flag in zip(noted.layout.parameters, flags, strict=True))


def _used_by_gradients(ops: Sequence[Op]) -> set[int]:
    """The positions of the calls that gradients are made of, or that are made of gradients."""
    needed, of_gradients, found = set[Number](), set[Number](), set[int]()
    for place in range(len(ops) - 1, -1, -1):
        if ops[place].kind.differentiates or (ops[place].kind.is_forward and not needed.isdisjoint(ops[place].outs)):
            found.add(place)
            needed.update(ops[place].ins)
    for place, op in enumerate(ops):
        if op.kind is Clip or op.kind.reads_gradients(op) or not of_gradients.isdisjoint(op.ins):
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
    state = next((state for state in optimizer.state.values() if isinstance(state, dict)), {})
    count = state.get("step")
    return (
        float(count) if isinstance(count, (int, float)) or (isinstance(count, torch.Tensor) and count.is_cpu) else 0.0
    )


def _given_to_model(ops: Sequence[Op], alive: Mapping[Number, torch.Tensor]) -> Iterator[tuple[Slot, Number]]:
    """What calls that use parameters were given besides, and what these have not made."""
    made: set[Number] = set()
    for op in ops:
        if not op.kind.is_forward:
            continue
        given = [(slot, number, alive.get(number)) for slot, number in given_to(op)]
        is_met = any(number in made or isinstance(tensor, torch.nn.Parameter) for _, number, tensor in given)
        if is_met or op.kind in (Root, Transform, CompiledStep):
            for slot, number, tensor in given:
                if number not in made and not isinstance(tensor, torch.nn.Parameter):
                    yield slot, number
            made.update(op.outs)
