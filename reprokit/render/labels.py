"""What the report calls the values of a program: parameters by their full names, anything else by the user's variables.

A variable that is written anew keeps its name, as in the source, so names are not unique.
"""

from __future__ import annotations

import re

from reprokit.program.ir import Program
from reprokit.render.names import Names, name_for_input, name_for_output
from reprokit.shrink.context.variables import variables

_NUMBERED = re.compile(r"_\d+$")


def labels(program: Program) -> dict[int, str]:
    """A name for every value."""
    names = Names()
    found = {item.value: item.name for item in program.inputs if item.role in ("parameter", "buffer")}
    for item in program.inputs:
        if item.value not in found:
            plain = _NUMBERED.sub("", name_for_input(item, program))
            found[item.value] = names.unique(plain)
    written = variables(program.calls)
    for call in program.calls:
        for value in call.output_refs():
            if value not in found:
                found[value] = written.get(value) or names.unique(name_for_output(call))
    return found
