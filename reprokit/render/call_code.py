"""One call of a program as the Python that a person would have written for it, and names for values that people read.

Operators instead of ``torch.Tensor.add``, methods and attributes on their tensor, ``F.`` for functionals, and no
argument that only repeats a default. Defaults are trusted only where the function is written in Python. An optimizer's
step becomes several statements: gradients set by hand, the optimizer with its unusual options, its state, the step."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from reprokit.locate.spelling import exact_signature_of
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import AUTOGRAD_BACKWARD, BACKWARD, OPAQUE, Call, Program, Ref, map_leaves
from reprokit.render import expression
from reprokit.render.expression import AUGMENTED, BINARY, REFLECTED, UNARY, Expr
from reprokit.render.literals import as_given, is_same, number_text
from reprokit.render.names import (
    Identifiers,
    identifier,
    match_of,
    name_for_input,
    name_for_output,
    numbered,
    result_words,
    schemas_of,
    signature_of,
)

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
        match = match_of(call)  # the user may have written ``x.add(y)`` where ``x + y`` would do
        is_method = match is not None and isinstance(match[0], ast.Call)
        short = (None if is_method else _operator(call, leaf)) or _access(call, leaf)
        if short is not None:
            return short
    arguments, keywords = _flags_by_name(call, *_needed_arguments(call))
    args = [expression.argument(value, leaf) for value in arguments]
    kwargs = {name: expression.argument(value, leaf) for name, value in keywords.items()}
    if call.target.startswith(_METHOD) and args and isinstance(call.args[0], Ref):
        return expression.method(args[0], call.name, args[1:], kwargs)
    return expression.call(callee(call.target), args, kwargs)


def callee(target: str) -> str:
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
    values = [*call.args[1:], *call.kwargs.values()]
    if len(values) != 1 or not call.kwargs.keys() <= {"other"}:
        return None
    is_number = isinstance(values[0], (int, float, complex)) and not isinstance(values[0], str)
    return values[0] if is_number or isinstance(values[0], Ref) else None


def _access(call: Call, leaf: Leaf) -> Expr | Statement | None:
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
    parameters = exact_signature_of(call.target)
    if not parameters:  # a builtin: of the defaults only ``None`` can be relied on
        described, empty = signature_of(call.target), inspect.Parameter.empty
        parameters = {n: p if p.default is None else p.replace(default=empty) for n, p in described.items()}
    keywords = {n: v for n, v in call.kwargs.items() if n != "_stacklevel" and not _is_default(v, parameters.get(n))}
    arguments = list(call.args)
    positional = list(parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in positional):
        return arguments, keywords
    while 0 < len(arguments) <= len(positional) and _is_default(arguments[-1], positional[len(arguments) - 1]):
        count = len(arguments) - 1  # `random_(1, None)` is not `random_(1)`: that is another overload
        if len({tuple(n for n, _ in schema[:count]) for schema in schemas_of(call.target) if len(schema) >= count}) > 1:
            break
        arguments.pop()
    return arguments, keywords


def _flags_by_name(call: Call, arguments: list[Any], keywords: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Passes the first ``True`` or ``False``, and all arguments behind it, by keyword."""
    first = next((place for place, value in enumerate(arguments) if place and isinstance(value, bool)), None)
    if first is None:
        return arguments, keywords
    names = _parameter_names(call, arguments)
    if names is None or set(names[first:]) & keywords.keys():
        return arguments, keywords
    return arguments[:first], {**dict(zip(names[first:], arguments[first:], strict=True)), **keywords}


def _parameter_names(call: Call, arguments: list[Any]) -> list[str] | None:
    """The names of the parameters that take these arguments, if they are known for certain."""
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


def _is_default(value: Any, parameter: inspect.Parameter | None) -> bool:
    if parameter is None or parameter.default is inspect.Parameter.empty or type(value) is not type(parameter.default):
        return False
    return isinstance(value, (bool, int, float, str, type(None))) and bool(value == parameter.default)


def write_step(call: Call, leaf: Leaf, names: Identifiers, tensors: Tensors) -> Iterator[str]:
    """The statements of a ``torch.optim.<Class>.step`` call."""
    groups = list(
        zip(call.kwargs["params"], call.kwargs["grads"], call.kwargs["options"], call.kwargs["state"], strict=True)
    )
    for params, grads, _, _ in groups:
        for param, grad in zip(params, grads, strict=True):
            if grad is not None:
                yield f"{leaf(param).text}.grad = {_gradient_text(param, grad, leaf, tensors)}"
    opt = names.unique("opt")
    cls = call.target.rpartition(".")[0]
    unusual = [_unusual(cls, options) for _, _, options, _ in groups]
    given = [options if _is_accepted(cls, options, tensors) else {} for options in unusual]
    yield f"{opt} = {_constructor(cls, call.kwargs['params'], given, leaf).text}"
    for place, (options, accepted) in enumerate(zip(unusual, given, strict=True)):
        if options != accepted:
            yield expression.call(f"{opt}.param_groups[{place}].update", [], _written(options, leaf)).text
    for params, _, _, states in groups:
        for param, state in zip(params, states, strict=True):
            if state:
                yield f"{opt}.state[{leaf(param).text}] = {expression.argument(dict(state), leaf).text}"
    yield f"{opt}.step()"


def _gradient_text(param: Ref, grad: Ref, leaf: Leaf, tensors: Tensors) -> str:
    written = leaf(grad)
    if written.text.isidentifier() or grad.value not in tensors or param.value not in tensors:
        return written.text
    like, value = as_given(tensors[param.value]), as_given(tensors[grad.value])
    for function in (torch.zeros_like, torch.ones_like):
        if is_same(function(like), value):
            return f"torch.{function.__name__}({leaf(param).text})"
    first = value.reshape(-1)[0].item() if value.numel() else 0.0
    if value.is_floating_point() and is_same(torch.full_like(like, first), value):
        return f"torch.full_like({leaf(param).text}, {number_text(first, value.dtype)})"
    return written.text


def _constructor(cls: str, params: list[Any], options: list[dict[str, Any]], leaf: Leaf) -> Expr:
    if len(params) == 1:
        return expression.call(cls, [expression.argument(params[0], leaf)], _written(options[0], leaf))
    parts = [{"params": group, **given} for group, given in zip(params, options, strict=True)]
    return expression.call(cls, [expression.argument(parts, leaf)])


def _written(options: Mapping[str, Any], leaf: Leaf) -> dict[str, Expr]:
    return {name: expression.argument(value, leaf) for name, value in options.items()}


def _unusual(cls: str, options: Mapping[str, Any]) -> dict[str, Any]:
    defaults = optimizer_defaults(cls)
    return {name: value for name, value in options.items() if name in defaults and not _is_equal(value, defaults[name])}


def _is_equal(value: Any, default: Any) -> bool:
    if isinstance(value, (list, tuple)) and isinstance(default, (list, tuple)):
        return list(value) == list(default)
    return type(value) is type(default) and bool(value == default)


def _is_accepted(cls: str, options: Mapping[str, Any], tensors: Tensors) -> bool:
    given = map_leaves(options, lambda leaf: tensors.get(leaf.value) if isinstance(leaf, Ref) else leaf)
    try:
        _make(cls, **given)
    except (ValueError, TypeError, RuntimeError):
        return False
    return True


@functools.cache
def optimizer_defaults(cls: str) -> Mapping[str, Any]:
    """The default options of one of torch's optimizers."""
    return dict(_make(cls).defaults)


def _make(cls: str, **options: Any) -> Any:
    made: Any = getattr(torch.optim, cls.rpartition(".")[2])
    return made([torch.zeros(1, 1)], **options)  # a matrix, because some optimizers take nothing else


_NUMBERED = re.compile(r"_\d+$")


def labels(program: Program) -> dict[int, str]:
    """A name for every value: of a result the variable that the user's lines assign it to, or read it from."""
    last_reads = {value: index for index, call in enumerate(program.calls) for value in call.input_refs()}
    written = result_words(program)
    found: dict[int, str] = {}
    busy: dict[str, float] = {}  # until which call a name is taken

    def give(value: int, base: str, index: float, until: float) -> None:
        name = next(name for name in numbered(base) if busy.get(name, -math.inf) <= index)
        found[value], busy[name] = name, until

    for item in program.inputs:
        is_state = item.role in ("parameter", "buffer")
        base = item.name if is_state else _NUMBERED.sub("", name_for_input(item, program))
        give(item.value, base, -1, math.inf if is_state else last_reads.get(item.value, -1))
    for index, call in enumerate(program.calls):
        for value in call.output_refs():
            if value not in found:
                noun = name_for_output(call)
                if call.name == "__get__":
                    noun = identifier(call.target.removesuffix(".__get__")) or "view"
                give(value, written.get(value) or noun, index, last_reads.get(value, index))
    return found


def call_text(call: Call, names: Mapping[int, str]) -> str:
    """A call as Python, with the names of its tensors."""

    def leaf(ref: Any) -> Expr:
        return Expr(names[ref.value]) if isinstance(ref, Ref) else Expr(repr(ref))

    if call.target == OPAQUE:
        return f"{call.kwargs.get('name', 'opaque')}(...)"
    if call.is_optimizer_step:
        return f"{'.'.join(call.target.split('.')[2:])}()"
    written = write_call(call, leaf).text
    targets = [names[value] for value in call.output_refs() if value not in call.input_refs()]
    return f"{', '.join(targets)} = {written}" if targets and "=" not in written.split("(")[0] else written
