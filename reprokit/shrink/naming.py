"""Names for values that had none: what the function calls its parameter, or ``x``, ``y``, ``z``, ``w``.

Only telling parameter names such as ``weight`` are taken over; ``input`` and ``other`` say nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import overrides

from reprokit.program.functions import UnknownFunction, function_named
from reprokit.program.ir import Call, Input, iter_refs

_OPERANDS = ("x", "y", "z", "w")
_TELLING = frozenset({"weight", "bias", "target", "mask", "index", "indices", "running_mean", "running_var", "targets"})


def unique_name(call: Call | None, value: int, taken: Sequence[Input]) -> str:
    """A name for the value that ``call`` reads, other than those of the inputs that are there."""
    used = {item.name for item in taken}
    parameter = parameter_of(call, value) if call is not None else None
    names = (parameter, *_OPERANDS) if parameter in _TELLING else _OPERANDS
    free = next((name for name in names if name is not None and name not in used), None)
    return free if free is not None else f"x{value}"


def parameter_of(call: Call, value: int) -> str | None:
    """What the function calls the argument that a value is in; ``None`` if it does not say."""
    for name, argument in call.kwargs.items():
        if any(ref.value == value for ref in iter_refs(argument)):
            return name
    for place, argument in enumerate(call.args):
        if any(ref.value == value for ref in iter_refs(argument)):
            parameters = parameters_of(call.target)
            return parameters[place] if place < len(parameters) else None
    return None


def parameters_of(target: str) -> list[str]:
    """What the function calls its parameters; empty if it does not say."""
    try:
        function = function_named(target)
        return list(inspect.signature(overrides.get_testing_overrides().get(function, function)).parameters)
    except (UnknownFunction, TypeError, ValueError):
        return []
