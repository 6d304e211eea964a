"""The spelling of a call in the user's line: names of its operands and results, operator or method.

The line is parsed, the part of it that is the call is found by the function's name or operator, and its operands are
read off. Where a line is not whole, or two parts of it say different things, it says nothing.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from reprokit.program.functions import is_torch_function
from reprokit.program.ir import Call, Program, Ref
from reprokit.render.expression import AUGMENTED, BINARY, BINARY_RANKS, REFLECTED, SYMBOLS, UNARY, Rank, quoted
from reprokit.shrink.context.variables import first_readers, is_handed_on
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
_NAMESPACES = (_METHOD, "torch.", "torch.nn.functional.", "torch.linalg.", "torch.fft.", "torch.special.")


Match = tuple[ast.AST, Sequence[ast.expr]]
"""A part of a line that is a call, and what it operates on."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """The names in a line of one call, by value.

    ``operands`` is what it was given, ``variables`` those of them that are plain variables there, ``paths`` the whole
    text of variables and attributes (``self.weight``, ``state["avg"]``), ``results`` what it was assigned to.
    """

    operands: Mapping[int, str] = field(default_factory=dict)
    variables: Mapping[int, str] = field(default_factory=dict)
    paths: Mapping[int, str] = field(default_factory=dict)
    results: Mapping[int, str] = field(default_factory=dict)


def is_written_as_method(call: Call) -> bool:
    """True if the user wrote ``x.add(y)`` where ``x + y`` would do."""
    matches = _matches(call)
    return bool(matches) and all(isinstance(node, ast.Call) for node, _ in matches)


def is_inside_another(call: Call) -> bool:
    """True if the user's line does not have the call itself but something that makes it."""
    return call.site is not None and parsed_line(call.site.code) is not None and not _matches(call)


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
    """The names of the values that calls read, from the first line that has one."""
    return _first_said(spelling.operands for spelling in spellings(calls))


def operand_paths(calls: Sequence[Call]) -> dict[int, str]:
    """The paths of the values that calls read, from the first line that has one and no call in it."""
    return _first_said(spelling.paths for spelling in spellings(calls))


def result_words(program: Program) -> dict[int, str]:
    """For results the variables that the user's lines assign them to, or read them from."""
    inputs = {item.value for item in program.inputs}
    found = spellings(program.calls)
    words = _first_said((*(spelling.results for spelling in found), *(spelling.variables for spelling in found)))
    return {value: word for value, word in words.items() if value not in inputs}


def _first_said(said: Iterable[Mapping[int, str]]) -> dict[int, str]:
    """For each value its first name."""
    words: dict[int, str] = {}
    for names in said:
        for value, word in names.items():
            words.setdefault(value, word)
    return words


def spellings(calls: Sequence[Call]) -> list[Spelling]:
    """The spellings of calls in order.

    Where a line has several parts that could be a call, they are told apart if the program has all of them, in a loop
    as often as it goes round.
    """
    ends = {_line(call): call for call in calls}.values()
    readers = first_readers(calls)
    last = {id(call) for call in ends if not is_handed_on(call, readers)}
    return [s for _, run in groupby(calls, key=_line) for s in _spellings_of_run(list(run), last)]


def _line(call: Call) -> tuple[object, ...] | None:
    site = call.site
    return (site.file, site.line, site.function) if site is not None else None


def _spellings_of_run(run: Sequence[Call], last: Container[int]) -> Iterator[Spelling]:
    """The same for calls of one line; ``last`` are the ids of calls that no other on their line follows."""
    for call, matches in zip(run, _told_apart(run), strict=True):
        if matches:
            yield _read(call, matches)
        else:
            yield Spelling(_operands_of_a_layer(call), results=_results_of_a_module(call) if id(call) in last else {})


def parts_of(run: Sequence[Call]) -> list[Match | None]:
    """For calls of one line the part of it that each of them is, ``None`` where that is not sure."""
    return [matches[0] if len(matches) == 1 else None for matches in _told_apart(run)]


def _told_apart(run: Sequence[Call]) -> Iterator[Sequence[Match]]:
    """For calls of one line the parts of it that each of them can be."""
    total, seen = Counter(call.target for call in run), Counter[str]()
    for call in run:
        matches = _matches(call)
        if matches and total[call.target] % len(matches) == 0:
            matches = [matches[seen[call.target] % len(matches)]]
        seen[call.target] += 1
        yield matches


def _read(call: Call, matches: Sequence[Match]) -> Spelling:
    """The names on which all parts of the line agree."""
    operands: dict[int, str] = {}
    variables: dict[int, str] = {}
    paths: dict[int, str] = {}
    for position, argument in enumerate(call.args):
        nodes = [given[position] if position < len(given) else None for _, given in matches]
        words = {_name(node) if node is not None else None for node in nodes}
        if isinstance(argument, Ref) and len(words) == 1 and (word := words.pop()) is not None:
            operands.setdefault(argument.value, word)
            if all(isinstance(node, ast.Name) for node in nodes):
                variables.setdefault(argument.value, word)
            texts = {_path(node) if node is not None else None for node in nodes}
            if len(texts) == 1 and (text := texts.pop()) is not None:
                paths.setdefault(argument.value, text)
    return Spelling(operands, variables, paths, _results(call, matches[0][0]) if len(matches) == 1 else {})


def _matches(call: Call) -> list[Match]:
    """The parts of the line that can be the call, in the order of their evaluation; none of a library's call."""
    line = parsed_line(call.site.code) if call.site is not None and call.site.library is None else None
    if line is None:
        return []
    return [(node, given) for node in _evaluated(line.tree) if (given := _operands(node, call)) is not None]


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield from _evaluated(child)
    yield node


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """A line of code that is whole; of a compound statement its head.

    ``before`` and ``after`` are what it takes to make a statement of it: columns of ``tree`` are places in ``body``.
    """

    body: str
    tree: ast.Module
    before: str = ""
    after: str = ""

    def restored(self, body: str) -> str:
        """A body as the line that it stands for."""
        return f"{self.before}{body.removesuffix(self.after)}"


@functools.lru_cache(maxsize=256)
def parsed_line(code: str) -> ParsedLine | None:
    """The line as a tree, ``None`` where it is not whole."""
    line = code.strip()
    before, after = "el" * line.startswith("elif "), " pass" * line.endswith(":")
    body = f"{line.removeprefix(before)}{after}"
    try:
        return ParsedLine(body, ast.parse(body), before, after) if body else None
    except (SyntaxError, ValueError):
        return None


def _operands(node: ast.AST, call: Call) -> Sequence[ast.expr] | None:
    """The operands of a part of the line in the order of the call's arguments, if it is this call."""
    name, is_method = call.name, _is_method(call)
    match node:
        case ast.BinOp(left, op, right) if is_method:
            reflected = (right, left) if REFLECTED.get(name) == SYMBOLS[type(op)] else None
            return (left, right) if BINARY.get(name) == SYMBOLS[type(op)] else reflected
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
    if any(isinstance(argument, ast.Starred) for argument in node.args):
        return None
    function = node.func
    if isinstance(function, ast.Name):
        return None if _is_method(call) or function.id != call.name else node.args
    if not isinstance(function, ast.Attribute) or function.attr != call.name:
        return None
    is_of_module = isinstance(function.value, (ast.Name, ast.Attribute)) and _word(function.value) in MODULES
    if _is_method(call) == is_of_module:
        return None
    return [function.value, *node.args] if _is_method(call) else node.args


def rank_of(node: ast.AST) -> Rank:
    """The rank of a part of a line."""
    if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare)):
        operators = node.ops if isinstance(node, ast.Compare) else [node.op]
        symbol = SYMBOLS.get(type(operators[0]), "")
        return Rank.UNARY if isinstance(node, ast.UnaryOp) and symbol else BINARY_RANKS.get(symbol, Rank.TUPLE)
    return Rank.ATOM if isinstance(node, _ATOMS) else Rank.TUPLE


def _word(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _is_method(call: Call) -> bool:
    return call.target.startswith(_METHOD)


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


def _path(node: ast.expr) -> str | None:
    """The text of a variable, of an attribute, or of an item by a constant, of such; ``None`` for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    owner = _path(node.value) if isinstance(node, (ast.Attribute, ast.Subscript)) else None
    if owner is None:
        return None
    if isinstance(node, ast.Attribute):
        return f"{owner}.{node.attr}"
    key = node.slice.value if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) else None
    return f"{owner}[{quoted(key) if isinstance(key, str) else key}]" if isinstance(key, (str, int)) else None


def _operands_of_a_layer(call: Call) -> dict[int, str]:
    """The names on the line of what one of torch's layers is given, read off the function that it is named after.

    A layer such as ``nn.GRUCell`` passes its own arguments first: ``torch.gru_cell(input, hx, ...)``.
    """
    layer = call.scope[-1] if call.scope else None
    line = parsed_line(call.site.code) if call.site is not None and call.site.library is None else None
    if line is None or layer is None or not layer.cls.lower().startswith(call.name.replace("_", "")):
        return {}
    attribute = layer.path.rpartition(".")[2]
    nodes = [node for node in ast.walk(line.tree) if isinstance(node, ast.Call) and _called(node) == attribute]
    if len(nodes) != 1 or any(isinstance(argument, ast.Starred) for argument in nodes[0].args):
        return {}
    given = ((ref, _name(node)) for ref, node in zip(call.args, nodes[0].args, strict=False) if isinstance(ref, Ref))
    return {ref.value: word for ref, word in given if word is not None}


def _called(node: ast.Call) -> str:
    return _word(node.func) if isinstance(node.func, (ast.Name, ast.Attribute)) else ""


def _results(call: Call, node: ast.AST) -> dict[int, str]:
    """The variables that the line assigns exactly what the call returned to."""
    return {v: name for names, made in _assignments(call) if made is node for v, name in _matched(call, names)}


def _results_of_a_module(call: Call) -> dict[int, str]:
    """The same for a call that the line makes through a module, such as ``loss = criterion(x, y)``.

    Nothing for a call inside a library: what it returns is seldom what the library's function returns.
    """
    if call.site is not None and call.site.library is not None:
        return {}
    for targets, assigned in _assignments(call):
        if isinstance(assigned, ast.Call) and not _is_torch(assigned):
            return dict(_matched(call, targets))
    return {}


def _is_torch(node: ast.Call) -> bool:
    """True if a call on the line is one of torch's functions, and not of a module or of the user's."""
    return any(is_torch_function(f"{place}{_called(node)}") for place in _NAMESPACES)


def _assignments(call: Call) -> Iterator[tuple[list[str], ast.expr]]:
    """Variables and what the line assigns to them."""
    line = parsed_line(call.site.code) if call.site is not None else None
    for node in ast.walk(line.tree) if line is not None else ():
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
            if all(isinstance(part, ast.Name) for part in parts):
                yield [part.id for part in parts if isinstance(part, ast.Name)], node.value


def _matched(call: Call, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    if isinstance(call.outputs, Ref):
        if len(names) == 1:
            yield call.outputs.value, names[0]
    elif isinstance(call.outputs, (tuple, list)) and len(call.outputs) == len(names):
        yield from ((ref.value, name) for ref, name in zip(call.outputs, names, strict=True) if isinstance(ref, Ref))
