"""Frames: for every module that was called, the ranges of its weights, inputs and outputs, in the order of the calls.

A frame is made from the program alone: what was read inside a module and written outside went in, and what was written
inside and read outside came out. `recorded_rows` gives them, and the gradients that came back, as rows of a trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from reprokit.errors import ReprokitError
from reprokit.locate.blame import GRAD_SCALER
from reprokit.locate.choice import Choice, Role
from reprokit.locate.failure import Failure
from reprokit.locate.ranges import FrameRow, Range
from reprokit.program.ir import AUTOGRAD_BACKWARD, OPAQUE, ZERO_GRAD, Call, Phase, Program, Scope, iter_refs
from reprokit.render.names import labels, result_words
from reprokit.render.survey import Survey, survey, written_by
from reprokit.snapshot.format import Snapshot

MAX_FRAMES = 200

Key = tuple[Scope, ...]
Modules = list[tuple[Key, list[int]]]
Ranges = dict[int, Range | None]
Part = list[tuple[int, FrameRow]]  # values with their rows
Rows = list[Part]
Time = tuple[float, float]  # a call, and the place among the gradients that arrived while it ran
ALL = Choice()


class Magnitudes(NamedTuple):
    """Finite magnitudes over several tensors, and how many of their elements are not finite."""

    low: float | None
    high: float | None
    num_nan: int
    num_inf: int


class Frame(NamedTuple):
    """One call of a module with the spans of its weights, inputs and outputs, ``None`` where none is of numbers."""

    number: int
    module: str
    cls: str
    spans: tuple[Magnitudes | None, ...]
    is_origin: bool


def frames(found: Survey) -> tuple[list[Frame], int]:
    """The frames, cut to those nearest to the origin, and how many were left out before and after."""
    made, calls, origin = _Frames(found), found.program.calls, found.failure.call_index
    shown = []
    for number in _nearest(made.ordered, found.program, found.failure):
        key, indexes = made.ordered[number]
        spans = tuple(_magnitudes(part.values()) for part in made.parts(key, indexes))
        is_origin = origin is not None and calls[origin].scope == key
        shown.append(Frame(number, key[-1].label, key[-1].cls, spans, is_origin))
    return shown, len(made.ordered) - len(shown)


def _magnitudes(ranges: Iterable[Range | None]) -> Magnitudes | None:
    known = [found for found in ranges if found is not None and found.is_float]
    if not known:
        return None
    lows = [found.low for found in known if found.low is not None]
    highs = [found.high for found in known if found.high is not None]
    counts = sum(found.num_nan for found in known), sum(found.num_inf for found in known)
    return Magnitudes(min(lows, default=None), max(highs, default=None), *counts)


def calls_in_frames(program: Program, failure: Failure) -> set[int]:
    """The calls whose operands and results the frames of a survey of this program show."""
    ordered = _ordered(program)
    return {index for number in _nearest(ordered, program, failure) for index in ordered[number][1]}


def _ordered(program: Program) -> Modules:
    """The module calls: their scopes with the calls inside, in the order in which the modules were left."""
    calls: dict[Key, list[int]] = {}
    for index, call in enumerate(program.calls):
        for depth in range(1, len(call.scope) + 1):
            calls.setdefault(call.scope[:depth], []).append(index)
    return sorted(calls.items(), key=lambda item: (item[1][-1], -len(item[0])))


def _nearest(ordered: Modules, program: Program, failure: Failure) -> range:
    if len(ordered) <= MAX_FRAMES:
        return range(len(ordered))
    scope = program.calls[failure.call_index].scope if failure.call_index is not None else ()
    origin = next((number for number, (key, _) in enumerate(ordered) if key == scope), len(ordered))
    end = min(len(ordered), max(MAX_FRAMES, origin + MAX_FRAMES // 4))
    return range(end - MAX_FRAMES, end)


class _Frames:
    def __init__(self, found: Survey) -> None:
        self._found = found
        self.ordered = _ordered(found.program)
        self._weights = {item.value for item in found.program.inputs if item.role in ("parameter", "buffer")}
        self._kept = {ref.value for ref in found.program.outputs}

    def parts(self, key: Key, indexes: list[int]) -> tuple[Ranges, Ranges, Ranges]:
        """The ranges of weights, inputs and outputs of one frame, by value."""
        found, calls, inside = self._found, self._found.program.calls, set(indexes)
        own = [index for index in indexes if calls[index].scope == key]
        weights = {v: found.inputs.get(v) for i in own for v in calls[i].input_refs() if v in self._weights}
        inputs: Ranges = {}
        for index in indexes:
            for value in calls[index].input_refs():
                if value not in self._weights and found.writer(value, index) not in inside:
                    inputs.setdefault(value, found.range_of(value, index))
        last = {v: i for i in indexes for v in written_by(calls[i], found.failure)}
        readers = {value: set(found.readers.get(value, ())) - inside for value in last}
        read = {v: i for v, i in last.items() if v in self._kept or any(map(self._uses, readers[v]))}
        shown = read or {value: index for value, index in last.items() if index == indexes[-1]}
        return weights, inputs, {value: found.written(index, value) for value, index in shown.items()}

    def _uses(self, reader: int) -> bool:
        """True unless a call belongs to the backward of a custom function, which reads what its forward saved."""
        call = self._found.program.calls[reader]
        is_loop = call.is_differentiation and (call.target != AUTOGRAD_BACKWARD or call.site is not None)
        return call.phase != Phase.BACKWARD or is_loop


def recorded_rows(
    snapshot: Snapshot, choice: Choice = ALL, *, last: int | None = None, histograms: bool = False
) -> list[FrameRow]:
    """Run the captured step and return its rows, see `rows_of`. Raises `ReprokitError` if it cannot be run here."""
    return rows_of(surveyed(snapshot, histograms=histograms), snapshot.step, choice, last=last)


def surveyed(snapshot: Snapshot, *, histograms: bool) -> Survey:
    """Run the captured step; raises `ReprokitError` if it cannot be run here. ``histograms``: measure these too."""
    found = survey(snapshot, histograms=histograms, parts=_shared_inputs(snapshot.program))
    if found.error is not None:
        reason = str(found.error).partition("\n")[0]
        raise ReprokitError(
            f"the captured step cannot be run here: {reason}", hint="`reprokit show --json` does not run it"
        )
    return found


def _shared_inputs(program: Program) -> dict[int, dict[Key, set[int]]]:
    """By values that are read inside a module call and outside of it, such as the input of a residual branch, and by
    module call: the calls inside that read."""
    states = {item.value for item in program.inputs if item.role in ("parameter", "buffer", "rng")}
    inside: dict[int, dict[Key, set[int]]] = {}
    for index, call in enumerate(program.calls):
        if not (call.is_differentiation or call.is_optimizer_step or call.target in (OPAQUE, ZERO_GRAD)):
            for value in set(call.input_refs()) - states:
                for depth in range(len(call.scope) + 1):  # the empty scope has them all
                    inside.setdefault(value, {}).setdefault(call.scope[:depth], set()).add(index)
    partly = {v: {key: own for key, own in keys.items() if own < keys[()]} for v, keys in inside.items()}
    return {value: keys for value, keys in partly.items() if keys}


def names_with_gradient(found: Survey) -> set[str]:
    """The names of parameters that got a gradient, or a step of an optimizer."""
    steps = [call for call in found.program.calls if call.is_optimizer_step]
    known = {ref.value for call in steps for ref in iter_refs(call.kwargs["params"])} | found.leaf_gradients.keys()
    return {item.name for item in found.program.inputs if item.value in known}


def rows_of(found: Survey, step: int, choice: Choice = ALL, *, last: int | None = None) -> list[FrameRow]:
    """The rows of the module calls in the order of the run: forward when a module was left, backward when the gradient
    of its output arrived.

    ``last`` asks for so many frames, up to the one in which the step failed.
    """
    made = _Frames(found)
    names = labels(found.program)
    modules = (item for item in made.ordered if GRAD_SCALER not in item[0])
    ordered = [item for item in modules if choice.takes(item[0][-1].label, item[0][-1].cls)]
    forward = [_forward(step, key, made.parts(key, indexes), names) for key, indexes in ordered]
    arrived, pairs = found.arrived, zip(ordered[::-1], forward[::-1], strict=True)
    backward = [_backward(found, arrived, item[0], values) for item, values in pairs]
    if last is not None:
        forward, backward = _until_failure(found.failure, found.program, ordered, forward, backward)
        shown = [part for part in (*forward, *backward) if part]
        return [row for part in shown[len(shown) - min(last, len(shown)) :] for _, row in part]
    times, never = {value: time for (_, value), time in found.arrivals.items()}, (math.inf, 0)  # of gradients
    timed: list[tuple[Time, Part]] = [((item[1][-1], 0), part) for item, part in zip(ordered, forward, strict=True)]
    timed += [(min((times.get(value, never) for value, _ in part), default=never), part) for part in backward]
    timed = [(time, [row for row in part if choice.has_role(row[1].tensor)]) for time, part in timed]
    timed += _variables(found, step, choice)
    return [row for _, part in sorted(timed, key=lambda item: item[0]) for _, row in part]


def _variables(found: Survey, step: int, choice: Choice) -> list[tuple[Time, Part]]:
    """The values that the user's lines assign to variables of wanted names, and the gradients that arrived there."""
    calls, words = found.program.calls, result_words(found.program)
    given = [(-1, item.value, item.name) for item in found.program.inputs if item.role != "rng"]
    made = [(i, value, words[value]) for i, call in enumerate(calls) for value in call.output_refs() if value in words]
    rows: list[tuple[Time, Part]] = []
    for index, value, name in filter(lambda item: choice.has_variable(item[2]), (*given, *made)):
        measured = found.inputs.get(value) if index < 0 else found.written(index, value)
        level, site = (None, None) if index < 0 else (_home(calls[index]), calls[index].site)
        place = (level.label, level.cls, level.count) if level is not None else ("", "", 0)
        if measured is not None and choice.takes(*place[:2]):
            row = FrameRow(step, *place, "forward", "variable", name, measured, site.place if site is not None else "")
            rows.append(((index, 1), [(value, row)]))
            if seen := found.gradients.get((index, value)):
                worst = next((one for one in seen if one.is_bad), seen[-1])
                row = replace(row, direction="backward", tensor="grad_variable", range=worst)
                rows.append((found.arrivals[index, value], [(value, row)]))
    return rows


def _home(call: Call) -> Scope | None:
    """The module whose code has the line of a call: not a layer of torch's that the line calls; ``None``: the loop."""
    owner = call.site.function.split(".")[-2:-1] if call.site is not None else []
    own = [level for level in call.scope if not hasattr(torch.nn, level.cls)]
    return next((level for level in reversed(call.scope) if [level.cls] == owner), own[-1] if own else None)


def _forward(step: int, key: Key, parts: tuple[Ranges, ...], names: Mapping[int, str]) -> Part:
    level = key[-1]
    prefix = f"{level.full_path}." if level.full_path else ""
    rows = []
    for role, part in zip(_ROLES, parts, strict=True):
        for value, found in part.items():
            if found is not None:
                name = names[value].removeprefix(prefix)
                rows.append((value, FrameRow(step, level.label, level.cls, level.count, "forward", role, name, found)))
    return rows


def _backward(found: Survey, arrived: Mapping[int, Range], key: Key, forward: Part) -> Part:
    whole = {value: gradient for value, gradient in arrived.items() if key not in (found.parts or {}).get(value, ())}
    kinds: tuple[tuple[Role, Role, Mapping[int, Range]], ...] = (
        ("output", "grad_output", arrived),
        ("input", "grad_input", whole | {value: part for (own, value), part in found.passed.items() if own == key}),
        ("weight", "grad_weight", found.leaf_gradients),
    )
    return [
        (value, replace(row, direction="backward", tensor=gradient_role, range=gradients[value]))
        for role, gradient_role, gradients in kinds
        for value, row in forward
        if row.tensor == role and value in gradients and (role != "weight" or row.call == 0)
    ]


def _until_failure(
    failure: Failure, program: Program, ordered: list[tuple[Key, list[int]]], forward: Rows, backward: Rows
) -> tuple[Rows, Rows]:
    """The frames that were over when the step failed, and the one in which it did."""
    origin = failure.call_index
    if origin is None or failure.in_update:
        return forward, backward
    own = next((place for place, (key, _) in enumerate(ordered) if key == program.calls[origin].scope), None)
    if failure.in_backward:
        return forward, backward if own is None else backward[: len(ordered) - own]
    over = [place for place, (_, indexes) in enumerate(ordered) if indexes[-1] < origin and place != own]
    return [forward[place] for place in (*over, *(() if own is None else (own,)))], []


_ROLES: tuple[Role, ...] = ("weight", "input", "output")
