"""Looks at a step of the run now and then: the settings that it ran with, the data that met its model, the optimizers
that made it. Where one is unlike the looks before, the steps since are looked at one by one, or played.

A look reads the tape and what is still alive; nothing is computed in a step for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from reprokit.capture.calls import Clip, CompiledStep, OptimizerStep, Root, Transform
from reprokit.capture.readings import (
    Series,
    Slot,
    argument_name,
    arguments_of,
    given_to,
    slot_name,
    spaces_of,
)
from reprokit.capture.replay import PlayObserver, Replay, in_silence
from reprokit.capture.tape import Number, Op
from reprokit.capture.tensor_names import Names, parameter_names, root_names
from reprokit.compare.quantity import numbers_of
from reprokit.program.sites import make_site
from reprokit.series.cause import Reading
from reprokit.series.unlike import LEAST_AFTER, LEAST_ALIKE, LEAST_BEFORE, Change, Value, are_exchanged, setting, since
from reprokit.words import user_path

if TYPE_CHECKING:
    from reprokit.capture.loop import Loop

_MOST_SEATS = 4  # optimizers that take turns in one iteration
_MOST_ELEMENTS = 2**24  # of a value that is read
_MOST_READINGS = 16  # of a value that looks have read
LEAST_KEPT = 8  # steps that those from some step on are compared with
_FREE_SECONDS, _SHARE, _MOST_SECONDS = 1.0, 0.01, 2.0  # of playing steps: at first, of the time, at once
_MODE = "training"  # of a module
_RATES = frozenset({"lr"})
_VARIED = None

Key = tuple[Any, ...]


@dataclass
class _Held:
    """A setting that has had one ``value`` in all looks, so many; that of one which has had several is ``None``."""

    value: Value | None
    num_looks: int = 1


class Usual:
    """What was seen of the steps so far. Keeps nothing that belongs to the user."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._settings: dict[Key, _Held] = {}
        self._values: dict[Slot, list[Reading]] = {}
        self._began, self._spent = time.monotonic(), 0.0

    def look(self, frame: FrameType | None) -> tuple[list[Change], list[Slot]]:
        """What has changed since the last look, and the values that are to be read in all steps that are kept."""
        tape = self._loop.tape
        marks = tape.marks
        begin = next((n for n in range(len(marks) - 1, 0, -1) if marks[n - 1].step != marks[-1].step), 0)
        begin = max(begin, len(marks) - _MOST_SEATS)
        ops = tape.ops(marks[begin - 1].end if begin else 0, marks[-1].end)
        changed: dict[Key, _Held] = {}
        for key, value in dict(settings_of(ops)).items():  # the last ones: an evaluation comes before
            held = self._settings.setdefault(key, _Held(value, 0))
            if held.value == value:
                held.num_looks += 1
            elif held.value is not _VARIED:
                changed[key] = held
        found = self._changes(changed, frame) if changed else []
        return found, self._odd_values(ops)

    # -- settings ------------------------------------------------------------------------------------------------

    def _changes(self, changed: Mapping[Key, _Held], frame: FrameType | None) -> list[Change]:
        """Those settings that had one value up to some step, and have another one since."""
        segments = self._loop.tape.segments()
        series: dict[Key, list[tuple[int, Value]]] = {key: [] for key in changed}
        for segment in segments:
            for key, value in dict(settings_of(segment.ops)).items():
                if key in series:
                    series[key].append((segment.mark.step, value))
        found: list[tuple[Key, int, Value, Value]] = []
        for key, values in series.items():
            held, now = changed[key], values[-1][1]
            was: Any = held.value
            num_after = next((n for n, (_, value) in enumerate(reversed(values)) if value != now), len(values))
            before = values[: len(values) - num_after]
            if any(value != was for _, value in before):
                held.value = _VARIED
            elif num_after >= LEAST_AFTER:
                if len(before) >= LEAST_BEFORE or held.num_looks >= LEAST_ALIKE:
                    found.append((key, values[-num_after][0], was, now))
                held.value = _VARIED  # one that changes again goes by a plan
        return [*self._told(found, frame)]

    def _told(self, found: Sequence[tuple[Key, int, Value, Value]], frame: FrameType | None) -> Iterator[Change]:
        """Those that no plan explains, with their names."""
        spaces, ops = spaces_of(frame), self._loop.tape.ops()
        for key, step, was, now in found:
            others = [(a, b) for other, n, a, b in found if n == step and other != key and other[0] == key[0]]
            words = setting(was, now, is_rate=key[-1] in _RATES)
            if isinstance(now, bool) and not (key[-1] == _MODE or (key[0] == "flag" and was)):
                continue  # a switch of the user's own, or a layer that begins to learn
            if words is None and any(are_exchanged((was, now), other) for other in others):
                words = f"went from {was} to {now}"
            if words is None:
                continue
            name, place = self._name(key, ops, spaces, frame)
            yield Change(name, step, words, place)

    def _name(self, key: Key, ops: Sequence[Op], spaces: Any, frame: FrameType | None) -> tuple[str, str | None]:
        """The name of a setting as the user knows it, and the module that it is of."""
        kind, *where = key
        if kind == "argument":
            op = next((op for op in reversed(ops) if (op.code, op.instruction) == (where[0], where[1])), None)
            name = argument_name(op, where[2], spaces) if op is not None else ""
            site = make_site(where[0], where[1]) if where[0] is not None and not name else None
            return f"`{name}`" if name else f"a number at {site.place}" if site is not None else "a number", None
        if kind == "option":
            return f"`{where[-1]}`", None
        modules = self._loop.world.modules
        roots = root_names(modules, frame)
        if kind == "flag":
            name = parameter_names(modules, frame).get(where[0], "")
            return f"`{name}.requires_grad`", name.rpartition(".")[0] or None
        for root in modules:
            for path, module in root.named_modules():
                if id(vars(module)) == where[0]:
                    place = ".".join(filter(None, [roots.get(id(root), ""), user_path(path)]))
                    return f"`{'.'.join(filter(None, [place, where[1]]))}`", place or None
        return f"`{where[1]}`", None

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

    def played(self, frame: FrameType | None, wanted: Collection[Slot] | None = None) -> list[Change]:
        """The values, those ``wanted`` if that is given, which are unlike before in the kept steps, by playing these.

        Nothing is said where a loss differs from that of training, or in more than a small share of the time.
        """
        loop, world, started = self._loop, self._loop.world, time.monotonic()
        if self._spent > _FREE_SECONDS + _SHARE * (started - self._began):
            return []
        segments, reader = loop.tape.segments(), _Reader(started + _MOST_SECONDS, wanted)
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
            one = since(series.readings, LEAST_KEPT) if series.readings[-1].step == last else None
            if one is not None:
                place, words, is_far = one
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
        segment, given = replay.segment, []
        for slot, number in _given_to_model(segment.ops, replay.player.alive):
            tensor = replay.player.value(number)
            if tensor is not None and (self._wanted is None or slot in self._wanted):
                given.append((slot, tensor))
        for slot, reading in _read(segment.mark.step, given):
            op = next(op for op in segment.ops if (op.code, op.instruction) == slot[:2])
            self.series.setdefault(slot, Series("batch", op, False)).readings.append(reading)
        return False


def _read(step: int, given: Sequence[tuple[Slot, torch.Tensor]]) -> list[tuple[Slot, Reading]]:
    """The values of a step; what one line read several times as one. Waits for a device once."""
    given = [(slot, tensor.detach()) for slot, tensor in given if _is_readable(tensor)]
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
    """The numbers, flags and words that a step ran with: arguments of calls, options, attributes of its roots."""
    for op in ops:
        if op.kind is OptimizerStep:
            for place, group in enumerate(op.note.options):
                for name, value in group.items():
                    parts = value if isinstance(value, tuple) else (value,)
                    known = (v for v in enumerate(parts) if _is_plain(v[1]))
                    yield from ((("option", id(op.target), place, n, name), v) for n, v in known)
        elif op.kind.is_forward or op.kind is Clip:
            given = ((place, value) for place, value in arguments_of(op) if _is_plain(value))
            yield from ((("argument", op.code, op.instruction, place), value) for place, value in given)
        if op.kind is Root and op.note.attributes is not None and op.mode.grad:
            noted = op.note.attributes
            yield from ((("attribute", id(space), name), v) for (space, name), v in noted.items() if _is_plain(v))
            flags = noted.values[len(noted.values) - len(noted.layout.parameters) :]
            yield from ((("flag", id(p)), flag) for p, flag in zip(noted.layout.parameters, flags, strict=True))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


def _is_readable(tensor: torch.Tensor) -> bool:
    return 0 < tensor.numel() <= _MOST_ELEMENTS and tensor.layout is torch.strided and not tensor.is_complex()


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
