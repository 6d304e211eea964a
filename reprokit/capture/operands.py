"""The operands of the expression that raised, as its frame has them: their values, and the lines that assigned them.

Names, attributes and items are looked up in plain dicts, lists and objects, so no code of the user's runs.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import FrameType
from typing import Any

import torch

from reprokit.program.sites import relative_path

_MOST = 4  # operands of an expression, or of an assignment, that are printed
Node = ast.Name | ast.Attribute | ast.Subscript
Assignment = ast.Assign | ast.AugAssign


def operands_at(frame: FrameType, instruction: int, names: Mapping[int, str]) -> list[str]:
    """The operands of the expression that a frame is at, in words, numbers first; ``names`` are those of parameters by
    ``id``."""
    file = frame.f_code.co_filename
    position = next(islice(frame.f_code.co_positions(), instruction // 2, None), None)
    tree = _tree(file)
    if position is None or tree is None or position[0] is None:
        return []
    places = ("lineno", "end_lineno", "col_offset", "end_col_offset")
    function = _function_at(tree, position[0])
    parts = [node for node in ast.walk(function) if tuple(getattr(node, one, None) for one in places) == position]
    found: list[tuple[bool, str]] = []
    for node in _operands(parts[:1]):
        words = _words(node, frame, names)
        if words:
            made = _assignment(tree if isinstance(node, ast.Attribute) else function, node, position[0])
            if made is not None:
                is_here = made in ast.walk(function)
                read = [one for one in _operands([made.value]) if ast.unparse(one) != ast.unparse(node)]
                values = [value for one in read if is_here and (value := _words(one, frame, names))][:_MOST]
                where = f", where {', '.join(values)}" if values else ""
                words += f" (assigned at {relative_path(file)}:{made.lineno}{where})"
            found.append((isinstance(_value(node, frame), torch.Tensor), words))
    return [words for _, words in sorted(found, key=lambda item: item[0])][:_MOST]


def option_words(options: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], file: str) -> Iterator[str]:
    """The options of an optimizer that are of another type than in the step before, with the line that wrote them if
    one line of a file does."""
    for group, old in zip(options, before, strict=False):
        for name, value in group.items():
            if name in old and type(value) is not type(old[name]) and not isinstance(value, torch.Tensor):
                made = _written(file, name)
                where = f" (assigned at {relative_path(file)}:{made.lineno}{_power(file, made)})" if made else ""
                yield f"`{name}` of the optimizer is {_number(value)}, and was {_number(old[name])} before{where}"


def _written(file: str, name: str) -> Assignment | None:
    """The assignment to an item of this name, if a file has a single one."""
    tree = _tree(file)
    items = [node for node in ast.walk(tree) if isinstance(node, ast.Subscript)] if tree is not None else []
    keys = {ast.unparse(n) for n in items if isinstance(n.slice, ast.Constant) and n.slice.value == name}
    found = [made for key in keys for made in _assignments(tree, key)] if tree is not None else []
    return found[0] if len(found) == 1 else None


def _power(file: str, made: Assignment) -> str:
    """The power in what is assigned, or in what that was assigned: of a negative number it may be complex."""
    tree, value = _tree(file), made.value
    if isinstance(value, ast.Name) and tree is not None:
        earlier = _assignment(_function_at(tree, made.lineno), value, made.lineno)
        value = earlier.value if earlier is not None else value
    powers = (part for part in ast.walk(value) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Pow))
    power = next(powers, None)
    return f", from the power `{ast.unparse(power)}` in line {power.lineno}" if power is not None else ""


@functools.lru_cache(maxsize=4)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _function_at(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function around a line, else the module."""
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    around = [node for node in functions if node.lineno <= line <= (node.end_lineno or 0)]
    return around[-1] if around else tree


def _operands(parts: Sequence[ast.AST]) -> Iterator[Node]:
    """The names, attributes and items that expressions read, each once; not the functions that they call."""
    seen, waiting = set[str](), list(parts)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            if ast.unparse(node) not in seen:
                yield node
            seen.add(ast.unparse(node))
        elif isinstance(node, ast.Call):
            owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            waiting = [*owner, *node.args, *(word.value for word in node.keywords), *waiting]
        else:
            waiting = [*ast.iter_child_nodes(node), *waiting]


def _value(node: ast.AST, frame: FrameType) -> Any:
    """The value of an operand; raises `LookupError` where finding it would run code."""
    if isinstance(node, ast.Name):
        return {**frame.f_globals, **frame.f_locals}[node.id]
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Subscript):
        owner, key = _value(node.value, frame), _value(node.slice, frame)
        if type(owner) in (dict, list, tuple) and type(key) in (str, int):
            return owner[key]
    elif isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        if isinstance(owner, torch.Tensor):
            return {"grad": owner.grad}[node.attr] if owner.is_leaf else None
        space = getattr(owner, "__dict__", {})
        for held in (space, space.get("_parameters") or {}, space.get("_buffers") or {}):
            if node.attr in held:
                return held[node.attr]
    raise LookupError


def _words(node: Node, frame: FrameType, names: Mapping[int, str]) -> str:
    """An operand and its value: `` `den` is 0.0 ``; empty where the value is none that a sentence can hold."""
    try:
        value = _value(node, frame)
    except (LookupError, TypeError):
        return ""
    words = _number(value)
    if type(value) in (list, tuple) and value:
        parts = [_number(part) for part in value[:_MOST]]
        words = f"{len(value)} items: {'; '.join(filter(None, parts))}" if all(parts) else f"{len(value)} items"
    known = f", the parameter `{names[id(value)]}`" if id(value) in names else ""
    return f"`{ast.unparse(node)}` is {words}{known}" if words else ""


def _number(value: Any) -> str:
    """A number, or a tensor as ``float32 [8, 3]``; of a single number its value; empty for anything else."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            return _tensor_words(value)
    if type(value) in (float, complex):
        return f"{value:.6g}{', a complex number' if type(value) is complex else ''}"
    return str(value) if type(value) in (bool, int, type(None)) else ""


def _tensor_words(tensor: torch.Tensor) -> str:
    words = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        return f"{words} ({tensor.device}, {str(tensor.layout).removeprefix('torch.')})"
    if tensor.numel() == 1:
        words += f", {tensor.item():.6g}"
    elif tensor.numel() and not bool(tensor.any()):
        words += ", all zeros"
    return f"{words}, made in inference mode" if tensor.is_inference() else words


def _assignments(tree: ast.AST, wanted: str) -> list[Assignment]:
    made = (node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AugAssign)))
    found = [one for one in made if wanted in map(ast.unparse, getattr(one, "targets", [getattr(one, "target", one)]))]
    return sorted(found, key=lambda one: one.lineno)


def _assignment(tree: ast.AST, node: Node, line: int) -> Assignment | None:
    """The last assignment to an operand above a line, else the last one of all, as in a loop."""
    made = _assignments(tree, ast.unparse(node))
    found = [one for one in made if not one.lineno <= line <= (one.end_lineno or line)]  # else it is yet to be made
    above = [one for one in found if (one.end_lineno or one.lineno) < line]
    return above[-1] if above else found[-1] if found else None
