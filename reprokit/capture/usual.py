"""Looks at a step of the run now and then: the settings that it ran with, the calls that it made, the data that met its
model. Where one is unlike the looks before, the steps that are kept are looked at one by one, or played.

A look reads the tape and what is still alive; nothing is computed in a step for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence, Set
from itertools import groupby
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from reprokit import native
from reprokit.capture.calls import OptimizerStep, ZeroGrad
from reprokit.capture.readings import (
    Inputs,
    Key,
    Series,
    Slot,
    is_plain,
    read_all,
    setting_name,
    settings_of,
    settings_over,
    slot_name,
    spaces_of,
)
from reprokit.capture.replay import PlayObserver, Replay, in_silence
from reprokit.capture.tape import Op
from reprokit.capture.tensor_names import Names, names_of, root_names
from reprokit.limits import CpuLimit
from reprokit.series.timeline import parameters_of
from reprokit.series.unlike import LEAST_AFTER, LEAST_ALIKE, LEAST_BEFORE, Reading, Unlike, Value, setting, told, unlike

if TYPE_CHECKING:
    from reprokit.capture.loop import Loop

_MOST_SETTINGS = 100_000
_MOST_SEATS = 4  # optimizers that take turns in one iteration
_MOST_READINGS, _MOST_ELEMENTS = 16, 2**24  # of a value that looks have read
_ACTS_IN = 5  # steps, from a setting to the loss
_LEAST_KEPT = 8  # steps that those from some step on are compared with
_FREE_SECONDS, _SHARE = 3.0, 0.01  # of playing steps, in CPU time, which other processes do not change


class Usual:
    """What was seen of the steps so far. Keeps nothing that belongs to the user."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._settings: dict[Key, Value | None] = {}  # the value that each had in all looks; ``None`` of several
        self._values: dict[Slot, list[Reading]] = {}
        self._kinds: dict[int, Any] = {}  # of optimizers
        self._counts: dict[int, float] = {}  # of steps in their states
        self._run, self._spent = CpuLimit(math.inf), 0.0

    def look(self, frame: FrameType | None) -> tuple[list[Unlike], list[Slot]]:
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
            count, known = _count_of(optimizer), self._counts.get(number, 0)
            if count < known:
                name, step = names_of([optimizer], frame)[number], marks[-1].step - int(count) + 1
                found.append(told(f"the state of `{name}`", step, f"counts fewer steps than before ({count:g})"))
            self._kinds[number] = _kind_of(optimizer)
            self._counts[number] = count if -math.inf < known <= count else -math.inf  # lost again: by a plan
        return found, self._odd_values(ops)

    # -- settings ------------------------------------------------------------------------------------------------

    def has_moved(self, step: int) -> bool:
        """True if an option of an optimizer is far from all that it was until a few steps before: a restart that sets
        another learning rate, a weight decay in per cent. A schedule comes back to a rate that the run has had."""
        for key, known in settings_over(self._loop.tape.segments()).items():
            before = [value for at, value in known if value and at < step - _ACTS_IN]
            now = [value for at, value in known if value and at == step] if before and key[0] == "option" else []
            if now and all(one != now[-1] and setting(one, now[-1], option=key[-1]) for one in before):
                return True
        return False

    def _changes(self, changed: Set[Key], ops: list[Op], frame: FrameType | None) -> Iterator[Unlike]:
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
            words = setting(was, now, option=key[-1] if key[0] == "option" else "")
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
                name, place = setting_name(key, self._loop, frame)
                yield told(name, step, words, place)

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

    # -- values --------------------------------------------------------------------------------------------------

    def _odd_values(self, ops: Sequence[Op]) -> list[Slot]:
        """The values of the last step that are unlike those of the looks before."""
        step, inputs = self._loop.tape.marks[-1].step, Inputs(self._loop.world.state_ids())
        inputs.begin()
        alive = ((slot, number()) for slot, number, _ in inputs.over(step, ops))
        given = [(slot, one) for slot, one in alive if one is not None and native.numel(one) <= _MOST_ELEMENTS]
        odd = []
        for slot, reading in read_all(step, given).items():
            known = self._values.get(slot, [])
            is_odd = unlike("", "batch", [*known, reading], least=LEAST_ALIKE, for_good=True) is not None
            totals = [one.total for one in known]
            is_again = totals[-1:] == [reading.total] and LEAST_ALIKE < len(totals) == len(set(totals))
            odd += [slot] if is_odd or is_again else []
            self._values[slot] = known if is_odd else [*known[-_MOST_READINGS:], reading]
        return odd

    def played(
        self, frame: FrameType | None, wanted: Collection[Slot] | None = None, until: int | None = None
    ) -> list[Unlike]:
        """The values, those ``wanted`` if that is given, which are unlike before in the kept steps, by playing these;
        with ``until`` the values of that step or the one before.

        Nothing is said where a loss differs from that of training, or in more than a small share of the time.
        """
        loop, world = self._loop, self._loop.world
        limit = CpuLimit(_FREE_SECONDS + _SHARE * self._run.used - self._spent)
        if limit.is_spent:
            return []
        segments = [one for one in loop.tape.segments() if until is None or one.mark.step <= until]
        reader = _Reader(wanted, Inputs(world.state_ids()))
        replay = Replay(world, loop.tape, segments, world.copies[0], limit=limit)
        try:
            with replay.going_back(), in_silence():
                if replay.play(reader) or replay.notes:
                    return []
        finally:
            self._spent += limit.used
        modules, last = world.modules, segments[-1].mark.step
        names = Names(loop.tape.alive(), modules, root_names(modules, frame), {}, segments[-1].ops, frame, [])
        found = []
        for slot, series in reader.series.items():
            name = f"`{slot_name(names, series, slot, spaces_of(frame))}`"
            one = unlike(name, "batch", series.readings, least=_LEAST_KEPT, for_good=True)
            num = len([reading for reading in series.readings if one is not None and reading.step >= one.since])
            is_near = num >= LEAST_ALIKE if until is None else one is not None and one.since >= until - 1
            if one is not None and is_near and series.readings[-1].step == last:  # one batch may be odd
                found.append(one)
                self._values.pop(slot, None)
        return found


class _Reader(PlayObserver):
    """Reads the values that the steps are given, or those ``wanted``."""

    def __init__(self, wanted: Collection[Slot] | None, inputs: Inputs) -> None:
        self.series: dict[Slot, Series] = {}
        self._wanted, self._inputs = wanted, inputs

    def end(self, replay: Replay) -> bool:
        step, wanted, value = replay.segment.mark.step, self._wanted, replay.player.value
        self._inputs.begin(replay.player)
        given = [one for one in self._inputs.over(step, replay.segment.ops) if wanted is None or one[0] in wanted]
        calls = {slot: op for slot, _, op in given}
        read = read_all(step, ((slot, tensor) for slot, number, _ in given if (tensor := value(number)) is not None))
        for slot, reading in read.items():
            self.series.setdefault(slot, Series("batch", calls[slot], False)).readings.append(reading)
        return False


def _kind_of(optimizer: torch.optim.Optimizer) -> Any:
    """What an optimizer has in common with one in its place that goes on with its work."""
    options = [{name: value for name, value in group.items() if is_plain(value)} for group in optimizer.param_groups]
    return type(optimizer), frozenset(map(id, parameters_of(optimizer))), options


def _count_of(optimizer: torch.optim.Optimizer) -> float:
    """The steps in the state of an optimizer; infinity where it has none, or a device would have to be waited for."""
    count = next((one for one in optimizer.state.values() if isinstance(one, dict)), {}).get("step", math.inf)
    if isinstance(count, torch.Tensor):
        return float(native.item(count)) if count.is_cpu else math.inf
    return float(count)
