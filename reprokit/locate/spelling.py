"""Calls in the words of the rules: one name for all spellings of a function, and arguments by the part they play."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any

from torch import overrides

from reprokit.locate.ways import MINUS, NAN, PLUS
from reprokit.program.functions import UnknownFunction, display_name, function_named, is_in_place
from reprokit.program.ir import Call, map_leaves

Slot = int | str
_ALIASES = {
    "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "rsub": "sub", "float_power": "pow",
    "arccos": "acos", "arcsin": "asin", "arccosh": "acosh", "arctanh": "atanh", "arctan2": "atan2", "inverse": "inv",
    "softmax2d": "softmax", "special_expit": "sigmoid", "_weight_norm": "weight_norm",
    "_weight_norm_interface": "weight_norm",
}  # fmt: skip
_ROLES = {
    "div": ("numerator", "denominator"),
    "pow": ("base", "exponent"),
    "reciprocal": ("denominator",),
    "xlogy": ("factor", "logarithm"),
    **dict.fromkeys(("log", "log2", "log10"), ("logarithm",)),
}
_FIRST = ("input", "self", "tensor", "x", "A")
REVERSED = ("__rtruediv__", "__rdiv__", "__rpow__", "__rsub__", "rsub", "__rmod__")
# Of functions without a signature; a reciprocal is 1 divided by its argument.
_BUILTIN_DEFAULTS = {
    ("cosine_similarity", "eps"): 1e-8, ("cosine_similarity", "dim"): 1, ("reciprocal", "numerator"): 1,
}  # fmt: skip
VIEWS = frozenset([
    "view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as", "transpose", "permute", "flatten", "unflatten",
    "contiguous", "t", "__get__", "clone", "detach", "to", "float", "half", "bfloat16", "double", "type_as",
    "movedim", "chunk", "split", "unbind", "__getitem__", "select", "narrow", "repeat",
])  # fmt: skip


def short_name(call: Call) -> str:
    """The function in a word that all its spellings share: ``div`` for ``/=``, ``acos`` for ``arccos``."""
    last = display_name(call.target).rpartition(".")[2]
    last = last.removeprefix("special_")
    if is_in_place(call.target) and last.endswith("_") and not last.endswith("__"):
        last = last.rstrip("_")
    return _ALIASES.get(last, last)


def slot_of(call: Call, role: Slot) -> Slot:
    """The slot of an argument: a position, or the name of a keyword argument.

    ``role`` is a position, ``x`` or ``y`` for the first and second operand, a role such as ``denominator``, or the name
    that the function's signature gives; raises `KeyError`.
    """
    if isinstance(role, int):
        return role
    if role in call.kwargs:
        return role
    position = _position(call, role)
    if position < len(call.args):
        return position
    names = (*_FIRST, *call.kwargs) if position == 0 else ("other", "target", "ord", "p") if position == 1 else ()
    for name in names:
        if name in call.kwargs:
            return name
    raise KeyError(role)


def _position(call: Call, role: str) -> int:
    roles = _ROLES.get(short_name(call), ())
    if role in roles:
        position = roles.index(role)
        return len(roles) - 1 - position if call.name in REVERSED else position
    if role in ("x", "y"):
        return "xy".index(role)
    parameters = list(exact_signature_of(call.target))
    if role not in parameters:
        raise KeyError(role)
    return parameters.index(role)


def argument_at(call: Call, slot: Slot) -> Any:
    """The argument in a slot; raises `KeyError`."""
    if isinstance(slot, str):
        return call.kwargs[slot]
    if slot >= len(call.args):
        raise KeyError(slot)
    return call.args[slot]


def default_of(call: Call, name: Slot) -> Any:
    """The default of a parameter of the call's function; raises `KeyError`."""
    known = (short_name(call), name)
    if known in _BUILTIN_DEFAULTS:
        return _BUILTIN_DEFAULTS[known]
    parameter = exact_signature_of(call.target).get(str(name))
    if parameter is None or parameter.default is inspect.Parameter.empty:
        raise KeyError(name)
    return parameter.default


@functools.cache
def exact_signature_of(target: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function written in Python, whose defaults can be relied on; empty for any other."""
    try:
        function = function_named(target)
        parameters = inspect.signature(function).parameters if inspect.isfunction(function) else {}
    except (UnknownFunction, TypeError, ValueError):
        return {}
    if list(parameters) == ["args", "kwargs"]:  # torch's boolean dispatch, to a name with an underscore before it
        real = getattr(inspect.getmodule(function), f"_{target.rpartition('.')[2]}", None)
        return inspect.signature(real).parameters if inspect.isfunction(real) else {}
    return parameters


@functools.cache
def signature_of(target: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of a torch function, those of a builtin as torch describes it; empty when unknown."""
    if exact := exact_signature_of(target):
        return exact
    try:
        function = function_named(target)
    except UnknownFunction:
        return {}
    for described in (function, overrides.get_testing_overrides().get(function)):
        try:
            return inspect.signature(described).parameters if described is not None else {}
        except (TypeError, ValueError):
            continue
    return {}


def is_default(value: Any, parameter: inspect.Parameter | None) -> bool:
    """True if an argument says what the function would do anyway."""
    default = parameter.default if parameter is not None else inspect.Parameter.empty
    is_plain = isinstance(value, (bool, int, float, str, type(None)))
    return is_plain and type(value) is type(default) and bool(value == default)


def constant_ways(call: Call) -> set[str]:
    """The ways in which constants of a call are bad."""
    found: set[str] = set()

    def look(leaf: Any) -> Any:
        if isinstance(leaf, float) and not math.isfinite(leaf):
            found.add(NAN if math.isnan(leaf) else PLUS if leaf > 0 else MINUS)
        return leaf

    if not call.is_optimizer_step:  # a bad hyperparameter is a cause worth showing, not a value that flows
        map_leaves((call.args, dict(call.kwargs)), look)
    return found
