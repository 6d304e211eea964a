"""A program for people: parameters by their full names, other values by the user's variables, calls as Python.

A name is used again once the value before is done with, as in the source, so two values that are alive at the same time
never share one.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from reprokit.program.ir import OPAQUE, Call, Program, Ref
from reprokit.render import calls
from reprokit.render.expression import Expr
from reprokit.render.names import identifier, name_for_input, name_for_output
from reprokit.shrink.context.variables import variables

_NUMBERED = re.compile(r"_\d+$")


def labels(program: Program) -> dict[int, str]:
    """A name for every value."""
    last_reads = {value: index for index, call in enumerate(program.calls) for value in call.input_refs()}
    written = variables(program.calls)
    found: dict[int, str] = {}
    busy: dict[str, float] = {}  # until which call a name is taken

    def give(value: int, base: str, index: float, until: float) -> None:
        numbered = (f"{base}{number}" for number in itertools.count(2))
        name = next(name for name in itertools.chain([base], numbered) if busy.get(name, -math.inf) <= index)
        found[value], busy[name] = name, until

    for item in program.inputs:
        is_state = item.role in ("parameter", "buffer")
        base = item.name if is_state else _NUMBERED.sub("", name_for_input(item, program))
        give(item.value, base, -1, math.inf if is_state else last_reads.get(item.value, -1))
    for index, call in enumerate(program.calls):
        for value in call.output_refs():
            if value not in found:
                give(value, written.get(value) or _noun(call), index, last_reads.get(value, index))
    return found


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


def _noun(call: Call) -> str:
    """A word for a result; what an attribute gives is called like the attribute."""
    if call.name == "__get__":
        return identifier(call.target.removesuffix(".__get__")) or "view"
    return name_for_output(call)
