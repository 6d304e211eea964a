"""The spelling of a call in the user's statement: names of its operands and results, operator or method.

The column span of a call names the expression that made it. Where that expression is the call itself, and not something
that makes it, its parts are the call's operands.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from reprokit.program.ir import Call, Program, Ref
from reprokit.program.statement import called_name, parsed, parts, variables
from reprokit.render.expression import AUGMENTED, BINARY, BINARY_RANKS, REFLECTED, SYMBOLS, UNARY, Rank
from reprokit.snapshot.format import Snapshot
from reprokit.words import item_name

_METHOD = "torch.Tensor."
_UNNAMED = re.compile(r"input(_\d+)?")
# What these return is still called what they were given.
_SAME_THING = frozenset(
    ["abs", "bool", "clamp", "clone", "contiguous", "detach", "double", "expand", "flatten", "float", "half", "long",
     "permute", "repeat", "requires_grad_", "reshape", "squeeze", "t", "to", "transpose", "type", "unsqueeze", "view"]
)  # fmt: skip
_SAME_ATTRIBUTES = frozenset(["T", "mT", "H", "mH", "data", "real"])
_ATOMS = (ast.Attribute, ast.Call, ast.Constant, ast.Dict, ast.List, ast.Name, ast.Subscript)
MODULES = frozenset(["torch", "F", "nn", "functional", "np", "linalg", "fft", "special"])

Match = tuple[ast.AST, Sequence[ast.expr]]
"""An expression that is a call, and what it operates on."""


def match_of(call: Call) -> Match | None:
    """The expression of the user's that is a call, ``None`` where something else makes it, such as a layer."""
    found = ((part, given) for part in parts(call.site) if (given := _operands(part, call)) is not None)
    return next(found, None)


def is_written_as_method(call: Call) -> bool:
    """True if the user wrote ``x.add(y)`` where ``x + y`` would do."""
    match = match_of(call)
    return match is not None and isinstance(match[0], ast.Call)


def is_inside_another(call: Call) -> bool:
    """True if the user's line does not have the call itself but something that makes it."""
    site = call.site
    is_known = site is not None and site.span is not None and parsed(site.text) is not None
    return is_known and match_of(call) is None


def input_words(program: Program) -> dict[int, str]:
    """The names of inputs, from the first line that has one."""
    inputs = {item.value for item in program.inputs}
    return {value: word for value, word in operand_words(program.calls).items() if value in inputs}


def in_users_words(snapshot: Snapshot) -> Snapshot:
    """The snapshot with the inputs that nothing named (``input_26``) called as the user's lines call them."""
    program, failure = snapshot.program, snapshot.failure
    unnamed = {item.value for item in program.inputs if _UNNAMED.fullmatch(item.name)}
    words = {value: word for value, word in input_words(program).items() if value in unnamed}
    inputs = tuple(replace(item, name=words.get(item.value, item.name)) for item in program.inputs)
    if failure.value in words and failure.input_name is not None:
        failure = replace(failure, input_name=words[failure.value])
    return replace(snapshot, program=replace(program, inputs=inputs), failure=failure)


def operand_words(calls: Sequence[Call]) -> dict[int, str]:
    return _read_as(calls, _name)


def result_words(program: Program) -> dict[int, str]:
    """For results the variables that the user's lines assign them to, or read them from."""
    inputs = {item.value for item in program.inputs}
    read = _read_as(program.calls, lambda node: node.id if isinstance(node, ast.Name) else None)
    return {value: word for value, word in {**read, **variables(program.calls)}.items() if value not in inputs}


def _read_as(calls: Sequence[Call], name_of: Callable[[ast.expr], str | None]) -> dict[int, str]:
    words: dict[int, str] = {}
    for value, node in (pair for call in calls for pair in operand_nodes(call).items()):
        name = name_of(node)
        if name is not None:
            words.setdefault(value, name)
    return words


def operand_nodes(call: Call) -> dict[int, ast.expr]:
    """The expressions that a call reads its values from."""
    match = match_of(call)
    node, given = match if match is not None else (None, _given_to_layer(call))
    keywords = {item.arg: item.value for item in node.keywords} if isinstance(node, ast.Call) else {}
    named = [(value, keywords[name]) for name, value in call.kwargs.items() if name in keywords]
    pairs = [*named, *zip(call.args, given, strict=False)]
    return {value.value: part for value, part in reversed(pairs) if isinstance(value, Ref)}


def _operands(node: ast.AST, call: Call) -> Sequence[ast.expr] | None:
    """The operands of a part of the line in the order of the call's arguments, if it is this call."""
    name, is_method = call.name, call.target.startswith(_METHOD)
    match node:
        case ast.BinOp(left, op, right) if is_method:
            is_swapped = isinstance(left, ast.Constant) and isinstance(call.args[0], Ref)  # `2 * x` is `x.mul(2)`
            reflected = (right, left) if REFLECTED.get(name) == SYMBOLS[type(op)] else None
            plain = (right, left) if is_swapped else (left, right)
            return plain if BINARY.get(name) == SYMBOLS[type(op)] else reflected
        case ast.AugAssign(target, op, value) if is_method and AUGMENTED.get(name) == f"{SYMBOLS[type(op)]}=":
            return target, value
        case ast.Compare(left, [op], [right]) if is_method and BINARY.get(name) == SYMBOLS.get(type(op), ""):
            return left, right
        case ast.UnaryOp(op, operand) if is_method and UNARY.get(name) == SYMBOLS.get(type(op), ""):
            return (operand,)
        case ast.Subscript(value, _) if call.target == f"{_METHOD}__getitem__":
            return (value,)
        case ast.Attribute(value, attribute) if call.target == f"{_METHOD}{attribute}.__get__":
            return (value,)
        case ast.Call():
            return _of_call(node, call)
    return None


def _of_call(node: ast.Call, call: Call) -> Sequence[ast.expr] | None:
    function, is_method = node.func, call.target.startswith(_METHOD)
    if called_name(node) != call.name or any(isinstance(argument, ast.Starred) for argument in node.args):
        return None
    if isinstance(function, ast.Name):
        return None if is_method else node.args
    owner = function.value if isinstance(function, ast.Attribute) else None
    name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else None
    is_of_module = name in MODULES
    if owner is None or is_method == is_of_module:
        return None
    return [owner, *node.args] if is_method else node.args


def rank_of(node: ast.AST) -> Rank:
    if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare)):
        operators = node.ops if isinstance(node, ast.Compare) else [node.op]
        symbol = SYMBOLS.get(type(operators[0]), "")
        return Rank.UNARY if isinstance(node, ast.UnaryOp) and symbol else BINARY_RANKS.get(symbol, Rank.TUPLE)
    return Rank.ATOM if isinstance(node, _ATOMS) else Rank.TUPLE


def _name(node: ast.expr) -> str | None:
    """The name of an operand: a variable, an attribute, a key; also of a view or cast of one."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return _name(node.value) if node.attr in _SAME_ATTRIBUTES else node.attr
    if isinstance(node, ast.Subscript):
        key, of = node.slice, _name(node.value)
        is_named = isinstance(key, ast.Constant) and isinstance(key.value, str)
        return item_name(of or "", str(key.value)) if isinstance(key, ast.Constant) and is_named else of
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SAME_THING:
        is_of_module = isinstance(node.func.value, ast.Name) and node.func.value.id in MODULES
        owner = next(iter(node.args), None) if is_of_module else node.func.value
        return _name(owner) if owner is not None else None
    return None


def _given_to_layer(call: Call) -> Sequence[ast.expr]:
    """The arguments of one of torch's layers, for the function that it is named after.

    A layer such as ``nn.GRUCell`` passes its own arguments first: ``torch.gru_cell(input, hx, ...)``. A layer inside of
    another one of torch's, such as ``nn.Sequential``, is not what the line calls.
    """
    node = next((part for part in parts(call.site) if isinstance(part, ast.Call)), None)
    function = re.escape(call.name.replace("_", ""))
    is_layer = call.scope and re.fullmatch(f"{function}([123]d|loss)?", call.scope[-1].cls.lower())
    is_inside = len(call.scope) > 1 and hasattr(torch.nn, call.scope[-2].cls)
    if node is None or not is_layer or is_inside or any(isinstance(argument, ast.Starred) for argument in node.args):
        return ()
    return node.args
