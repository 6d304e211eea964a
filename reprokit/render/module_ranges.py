"""Frames: for every module that was called, the ranges of its weights, inputs and outputs, in the order of the calls.

A frame is made from the program alone: what was read inside a module and written outside went in, and what was written
inside and read outside came out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from reprokit.locate.ranges import Range
from reprokit.program.ir import AUTOGRAD_BACKWARD, Scope
from reprokit.render.survey import Survey, written_by

MAX_FRAMES = 200

Key = tuple[Scope, ...]


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """Finite magnitudes over several tensors, and how many of their elements are not finite."""

    low: float | None
    high: float | None
    num_nan: int
    num_inf: int

    @property
    def worst(self) -> float | None:
        """The largest magnitude, NaN if there is any."""
        return math.nan if self.num_nan else math.inf if self.num_inf else self.high

    @classmethod
    def over(cls, ranges: Iterable[Range | None]) -> Magnitudes | None:
        """The span of the ranges of numbers among these, ``None`` without any."""
        known = [found for found in ranges if found is not None and found.is_float]
        if not known:
            return None
        lows = [found.low for found in known if found.low is not None]
        highs = [found.high for found in known if found.high is not None]
        counts = sum(found.num_nan for found in known), sum(found.num_inf for found in known)
        return cls(min(lows, default=None), max(highs, default=None), *counts)


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a module."""

    number: int
    module: str
    cls: str
    weights: Magnitudes | None
    inputs: Magnitudes | None
    outputs: Magnitudes | None
    is_origin: bool

    @property
    def spans(self) -> tuple[Magnitudes | None, ...]:
        """Weights, inputs and outputs."""
        return self.weights, self.inputs, self.outputs


def frames(found: Survey) -> tuple[list[Frame], int]:
    """The frames, cut to those nearest to the origin, and how many were left out before and after."""
    made = _Frames(found).make()
    if len(made) <= MAX_FRAMES:
        return made, 0
    origins = [number for number, frame in enumerate(made) if frame.is_origin]
    end = min(len(made), max(MAX_FRAMES, (origins[-1] if origins else len(made)) + MAX_FRAMES // 4))
    return made[end - MAX_FRAMES : end], len(made) - MAX_FRAMES


class _Frames:
    def __init__(self, found: Survey) -> None:
        self._found = found
        self._calls: dict[Key, list[int]] = {}
        for index, call in enumerate(found.program.calls):
            for depth in range(1, len(call.scope) + 1):
                self._calls.setdefault(call.scope[:depth], []).append(index)
        self._weights = {item.value for item in found.program.inputs if item.role in ("parameter", "buffer")}
        self._kept = {ref.value for ref in found.program.outputs}

    def make(self) -> list[Frame]:
        """All frames, in the order in which the modules were left."""
        ordered = sorted(self._calls.items(), key=lambda item: (item[1][-1], -len(item[0])))
        return [self._frame(number, key, indexes) for number, (key, indexes) in enumerate(ordered)]

    def _frame(self, number: int, key: Key, indexes: list[int]) -> Frame:
        inside = set(indexes)
        calls = self._found.program.calls
        level = key[-1]
        own = [index for index in indexes if calls[index].scope == key]
        return Frame(
            number,
            level.label,
            level.cls,
            Magnitudes.over(self._weights_of(own)),
            Magnitudes.over(self._inputs_of(indexes, inside)),
            Magnitudes.over(self._outputs_of(indexes, inside)),
            self._found.failure.call_index in own,
        )

    def _weights_of(self, own: list[int]) -> list[Range | None]:
        read = dict.fromkeys(v for i in own for v in self._found.program.calls[i].input_refs() if v in self._weights)
        return [self._found.inputs.get(value) for value in read]

    def _inputs_of(self, indexes: list[int], inside: set[int]) -> list[Range | None]:
        ranges: dict[int, Range | None] = {}
        for index in indexes:
            for value in self._found.program.calls[index].input_refs():
                if value not in self._weights and self._found.writer(value, index) not in inside:
                    ranges.setdefault(value, self._found.range_of(value, index))
        return list(ranges.values())

    def _uses(self, reader: int) -> bool:
        """True unless a call belongs to the backward of a custom function, which reads what its forward saved."""
        call = self._found.program.calls[reader]
        is_loop = call.is_differentiation and (call.target != AUTOGRAD_BACKWARD or call.site is not None)
        return call.phase != "backward" or is_loop

    def _outputs_of(self, indexes: list[int], inside: set[int]) -> list[Range | None]:
        last = {v: i for i in indexes for v in written_by(self._found.program.calls[i], self._found.failure)}
        readers = self._found.readers
        read = {
            value: index
            for value, index in last.items()
            if value in self._kept or any(self._uses(reader) for reader in set(readers.get(value, ())) - inside)
        }
        shown = read or {value: index for value, index in last.items() if index == indexes[-1]}
        return [self._found.written.get((index, value)) for value, index in shown.items()]
