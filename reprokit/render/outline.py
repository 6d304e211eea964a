"""The program around the origin of a failure, with the range of every value: what the report shows as a table.

The snapshot's program is run once, observed only in a window of calls; values are named as the user named them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from reprokit.locate.failure import Failure, module_of
from reprokit.program.ir import OPAQUE, Call, Program, Ref
from reprokit.program.run import Tensors, determinism, run
from reprokit.render import calls
from reprokit.render.expression import Expr
from reprokit.render.names import Names, name_for_output
from reprokit.render.ranges import Range, measure

CALLS_BEFORE, CALLS_AFTER = 6, 2


@dataclass(frozen=True, slots=True)
class Row:
    """One call of the window. ``results`` pairs a name with its range, ``None`` when the run did not get that far."""

    index: int
    text: str
    module: str
    place: str
    code: str
    results: tuple[tuple[str, Range | None], ...]
    is_origin: bool


@dataclass(frozen=True, slots=True)
class Outline:
    """The window, the ranges of what enters it, and how many calls are left out on either side."""

    rows: tuple[Row, ...]
    operands: tuple[tuple[str, Range], ...]
    num_before: int
    num_after: int


class _Watch:
    """An observer that measures the results inside the window, and the origin's operands right before it."""

    def __init__(self, window: range, origin: int) -> None:
        self._window = window
        self._origin = origin
        self.results: dict[tuple[int, int], Range] = {}
        self.operands: dict[int, Range] = {}

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Measure the operands of the origin."""
        if index == self._origin:
            self.operands = {value: measure(values[value]) for value in call.input_refs() if value in values}

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Measure what a call in the window wrote."""
        if index in self._window:
            for value in call.output_refs():
                if value in values:
                    self.results[index, value] = measure(values[value])


def outline(program: Program, tensors: Tensors, failure: Failure, settings: Mapping[str, Any] | None = None) -> Outline:
    """The calls around the origin, measured in one run of the program."""
    origin = _origin_index(program, failure)
    window = range(max(0, origin - CALLS_BEFORE), min(len(program.calls), origin + CALLS_AFTER + 1))
    watch = _Watch(window, origin)
    with determinism(settings):
        run(program, tensors, observer=watch)
    names = _display_names(program, window)
    rows = tuple(
        _row(index, program.calls[index], names, watch, is_origin=index == failure.call_index) for index in window
    )
    operands = tuple((names[value], found) for value, found in watch.operands.items())
    return Outline(rows, operands, window.start, len(program.calls) - window.stop)


def _origin_index(program: Program, failure: Failure) -> int:
    if failure.call_index is not None:
        return failure.call_index
    readers = (index for index, call in enumerate(program.calls) if failure.value in call.input_refs())
    return next(readers, 0)


def _display_names(program: Program, window: range) -> dict[int, str]:
    """Inputs by their full names, results by a noun; only of what the window mentions."""
    mentioned: set[int] = set()
    for index in window:
        mentioned.update(program.calls[index].input_refs(), program.calls[index].output_refs())
    shown = {item.value: item.name for item in program.inputs if item.value in mentioned}
    names = Names(frozenset(shown.values()))
    for call in program.calls[: window.stop]:
        for value in call.output_refs():
            if value in mentioned and value not in shown:
                shown[value] = names.unique(name_for_output(call))
    return shown


def _row(index: int, call: Call, names: Mapping[int, str], watch: _Watch, *, is_origin: bool) -> Row:
    site = call.site
    results = tuple((names[value], watch.results.get((index, value))) for value in call.output_refs())
    return Row(
        index,
        call_text(call, names),
        module_of(call) or "",
        f"{site.file}:{site.line}" if site is not None else "",
        site.code.strip() if site is not None else "",
        results,
        is_origin,
    )


def call_text(call: Call, names: Mapping[int, str]) -> str:
    """A call as Python, with the names of its tensors."""

    def leaf(ref: Any) -> Expr:
        return Expr(names[ref.value]) if isinstance(ref, Ref) else Expr(repr(ref))

    if call.target == OPAQUE:
        return f"{call.kwargs.get('name', 'opaque')}(...)"
    if call.is_optimizer_step:
        return f"{'.'.join(call.target.split('.')[2:])}()"
    written = calls.write_call(call, leaf).text
    targets = [names[value] for value in call.output_refs() if value not in call.input_refs()]
    return f"{', '.join(targets)} = {written}" if targets and "=" not in written.split("(")[0] else written
