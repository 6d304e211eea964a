"""One call of a program as the expression a person would have written for it.

Operators instead of ``torch.Tensor.add``, methods and attributes on their tensor, ``F.`` for functionals, and no
argument that only repeats a default. Defaults are trusted only where the function is written in Python.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reprokit.program.ir import AUTOGRAD_BACKWARD, BACKWARD, Call, Ref
from reprokit.render import expression
from reprokit.render.expression import Expr
from reprokit.render.names import exact_signature_of, schemas_of, signature_of
from reprokit.render.operators import AUGMENTED, BINARY, REFLECTED, UNARY
from reprokit.render.spelling import is_written_as_method

_METHOD = "torch.Tensor."
_FUNCTIONAL = "torch.nn.functional."
Leaf = Callable[[Any], Expr]


@dataclass(frozen=True, slots=True)
class Statement:
    """A call that has no value to name, such as ``x += 1`` or ``x[mask] = 0``."""

    text: str


def write_call(call: Call, leaf: Leaf) -> Expr | Statement:
    """The call in Python; ``leaf`` writes a `Ref`."""
    call = as_method(call)
    if call.target.startswith(_METHOD) and call.args:
        short = (None if is_written_as_method(call) else _operator(call, leaf)) or _access(call, leaf)
        if short is not None:
            return short
    arguments, keywords = _flags_by_name(call, *_needed_arguments(call))
    args = [expression.argument(value, leaf) for value in arguments]
    kwargs = {name: expression.argument(value, leaf) for name, value in keywords.items()}
    if call.target.startswith(_METHOD) and args and isinstance(call.args[0], Ref):
        return expression.method(args[0], call.name, args[1:], kwargs)
    return expression.call(callee(call.target), args, kwargs)


def callee(target: str) -> str:
    """How a function is named in a repro."""
    return f"F.{target[len(_FUNCTIONAL) :]}" if target.startswith(_FUNCTIONAL) else target


def as_method(call: Call) -> Call:
    """``torch.autograd.backward`` of one tensor as that tensor's method."""
    if call.target != AUTOGRAD_BACKWARD or not call.args:
        return call
    tensors, *rest = call.args
    names = ("grad_tensors", "retain_graph", "create_graph")
    if len(rest) > len(names):
        return call
    keywords = {**dict(zip(names, rest, strict=False)), **call.kwargs}
    only = _only(tensors)
    if not isinstance(only, Ref) or not keywords.keys() <= {*names, "inputs"}:
        return call
    keywords["gradient"] = _only(keywords.pop("grad_tensors", None))
    gradient = () if keywords["gradient"] is None else (keywords["gradient"],)
    del keywords["gradient"]
    return Call(BACKWARD, (only, *gradient), keywords, None, call.scope, call.site, call.mode, call.phase)


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _operator(call: Call, leaf: Leaf) -> Expr | Statement | None:
    name = call.name
    owner = call.args[0]
    if not isinstance(owner, Ref):
        return None
    if name in UNARY and len(call.args) == 1 and not call.kwargs:
        return expression.unary(UNARY[name], leaf(owner))
    operand = _operand(call)
    if operand is None:
        return None
    written = expression.argument(operand, leaf)
    if name in BINARY:
        return expression.binary(BINARY[name], leaf(owner), written)
    if name in REFLECTED and not isinstance(operand, Ref):
        return expression.binary(REFLECTED[name], written, leaf(owner))
    if name in AUGMENTED and call.outputs in (None, owner):
        return Statement(f"{leaf(owner).text} {AUGMENTED[name]} {written.text}")
    return None


def _operand(call: Call) -> Any:
    """The second operand, if the call has exactly two and the second is a tensor or a number."""
    values = [*call.args[1:], *call.kwargs.values()]
    if len(values) != 1 or not call.kwargs.keys() <= {"other"}:
        return None
    is_number = isinstance(values[0], (int, float, complex)) and not isinstance(values[0], str)
    return values[0] if is_number or isinstance(values[0], Ref) else None


def _access(call: Call, leaf: Leaf) -> Expr | Statement | None:
    """Indexing and attributes."""
    if not isinstance(call.args[0], Ref) or call.kwargs:
        return None
    owner, rest = leaf(call.args[0]), call.args[1:]
    if call.name == "__getitem__" and len(rest) == 1:
        return expression.subscript(owner, rest[0], leaf)
    if call.name == "__setitem__" and len(rest) == 2:
        place = expression.subscript(owner, rest[0], leaf)
        return Statement(f"{place.text} = {expression.argument(rest[1], leaf).text}")
    name = call.target[len(_METHOD) :].partition(".")[0]
    if call.name == "__get__" and not rest:
        return expression.attribute(owner, name)
    if call.name == "__set__" and len(rest) == 1:
        return Statement(f"{expression.attribute(owner, name).text} = {expression.argument(rest[0], leaf).text}")
    return None


def _needed_arguments(call: Call) -> tuple[list[Any], dict[str, Any]]:
    """The arguments without those that only repeat a default."""
    parameters = exact_signature_of(call.target) or _optional_parameters(call.target)
    keywords = {n: v for n, v in call.kwargs.items() if n != "_stacklevel" and not _is_default(v, parameters.get(n))}
    arguments = list(call.args)
    positional = list(parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in positional):
        return arguments, keywords
    while 0 < len(arguments) <= len(positional) and _is_default(arguments[-1], positional[len(arguments) - 1]):
        if not _means_the_same(call.target, len(arguments) - 1):
            break
        arguments.pop()
    return arguments, keywords


def _means_the_same(target: str, count: int) -> bool:
    """True if ``count`` arguments by position are the same ones for every overload: ``random_(1, None)`` is not
    ``random_(1)``."""
    return len({tuple(n for n, _ in schema[:count]) for schema in schemas_of(target) if len(schema) >= count}) <= 1


def _flags_by_name(call: Call, arguments: list[Any], keywords: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """``True`` and ``False`` say nothing by themselves: the first one, and what follows it, becomes a keyword."""
    first = next((place for place, value in enumerate(arguments) if place and isinstance(value, bool)), None)
    if first is None:
        return arguments, keywords
    names = _parameter_names(call, arguments)
    if names is None or set(names[first:]) & keywords.keys():
        return arguments, keywords
    return arguments[:first], {**dict(zip(names[first:], arguments[first:], strict=True)), **keywords}


def _parameter_names(call: Call, arguments: list[Any]) -> list[str] | None:
    """What the function calls the parameters that take these arguments, if that is known for certain."""
    count = len(arguments)
    exact = exact_signature_of(call.target)
    if exact:
        plain = [name for name, item in exact.items() if item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        return plain[:count] if len(plain) >= count else None
    fitting = {
        tuple(name for name, _ in schema[:count])
        for schema in schemas_of(call.target)
        if len(schema) >= count and all(isinstance(v, bool) == t for v, (_, t) in zip(arguments, schema, strict=False))
    }
    return list(fitting.pop()) if len(fitting) == 1 else None


def _optional_parameters(target: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of a builtin as torch describes them; of the defaults only ``None`` can be relied on."""
    described = signature_of(target)
    return {n: p if p.default is None else p.replace(default=inspect.Parameter.empty) for n, p in described.items()}


def _is_default(value: Any, parameter: inspect.Parameter | None) -> bool:
    if parameter is None or parameter.default is inspect.Parameter.empty or type(value) is not type(parameter.default):
        return False
    return isinstance(value, (bool, int, float, str, type(None))) and bool(value == parameter.default)
