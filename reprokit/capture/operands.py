"""The operands of the expression that raised, as its frame has them: their values, and the lines that assigned them.

For an exception that no torch call of a program shows: a division in a scheduler's or optimizer's own code. Names,
attributes and items are looked up in plain dicts, lists and objects, so no code of the user's runs.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator, Mapping
from itertools import islice
from types import FrameType, TracebackType
from typing import Any

import torch

from reprokit.program.sites import relative_path

_MOST = 4  # operands of an expression that are printed
_MOST_TEXT = 60
Node = ast.Name | ast.Attribute | ast.Subscript


def operands_of(entry: TracebackType, names: Mapping[int, str]) -> list[str]:
    """The operands of the expression that raised in a frame, in words; ``names`` are those of parameters by ``id``."""
    frame, file = entry.tb_frame, entry.tb_frame.f_code.co_filename
    position = next(islice(frame.f_code.co_positions(), entry.tb_lasti // 2, None), None)
    tree = _tree("".join(linecache.getlines(file)))
    if position is None or tree is None or position[0] is None:
        return []
    function = _innermost(tree, position[0])
    spans = [node for node in ast.walk(function) if _span(node) == position]
    found: list[tuple[bool, str]] = []
    for node in _operands(spans[0]) if spans else ():
        words = _words(node, frame, names)
        if words:
            made = _assignment(tree if isinstance(node, ast.Attribute) else function, node, position[0])
            if made is not None:
                read = _read(made, node, frame, names) if made in ast.walk(function) else ""
                words += f" (assigned at {relative_path(file)}:{made.lineno}{read})"
            found.append((isinstance(_value(node, frame), torch.Tensor), words))
    return [words for _, words in sorted(found, key=lambda item: item[0])][:_MOST]


@functools.lru_cache(maxsize=4)
def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source) if source else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _span(node: ast.AST) -> tuple[Any, ...]:
    return tuple(getattr(node, name, None) for name in ("lineno", "end_lineno", "col_offset", "end_col_offset"))


def _innermost(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function around a line, else the module."""
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    around = [node for node in functions if node.lineno <= line <= (node.end_lineno or 0)]
    return around[-1] if around else tree


def _operands(part: ast.AST) -> Iterator[Node]:
    """The names, attributes and items that an expression reads, each once; not the functions that it calls."""
    seen: set[str] = set()
    waiting: list[ast.AST] = [part]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and ast.unparse(node) not in seen:
            seen.add(ast.unparse(node))
            yield node
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
    name = f"`{ast.unparse(node)}`"
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            words = f"{name} is {describe(value)}"
        return f"{words}, the parameter `{names[id(value)]}`" if id(value) in names else words
    if type(value) is complex:
        return f"{name} is {value:.6g}, a complex number"
    if type(value) in (bool, int, float, type(None)):
        return f"{name} is {value:.6g}" if type(value) is float else f"{name} is {value}"
    if type(value) is str:
        return f"{name} is {value!r}" if len(value) < _MOST_TEXT else ""
    return f"{name} has {len(value)} items" if type(value) in (list, tuple, dict) else ""


def describe(tensor: torch.Tensor) -> str:
    """``float32 [8, 3]``, of a single number its value, and of an inference tensor that it is one."""
    words = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return f"{words} ({tensor.device.type}, {str(tensor.layout).removeprefix('torch.')})"
    if tensor.numel() == 1 and tensor.is_cpu:
        words += f", {tensor.item():.6g}"
    elif tensor.is_cpu and tensor.numel() and not bool(tensor.any()):
        words += ", all zeros"
    return f"{words}, made in inference mode" if tensor.is_inference() else words


def _assignment(function: ast.AST, node: Node, line: int) -> ast.Assign | ast.AugAssign | None:
    """The last assignment to an operand above a line of its function, else the last one of all, as in a loop."""
    wanted, found = ast.unparse(node), list[ast.Assign | ast.AugAssign]()
    for made in ast.walk(function):
        if isinstance(made, (ast.Assign, ast.AugAssign)):
            targets = made.targets if isinstance(made, ast.Assign) else [made.target]
            if any(ast.unparse(target) == wanted for target in targets):
                found.append(made)
    found.sort(key=lambda made: made.lineno)
    above = [made for made in found if (made.end_lineno or made.lineno) < line]
    return above[-1] if above else found[-1] if found else None


def _read(made: ast.Assign | ast.AugAssign, node: Node, frame: FrameType, names: Mapping[int, str]) -> str:
    """The operands of an assignment, as they are now."""
    own = ast.unparse(node)
    read = [other for other in _operands(made.value) if ast.unparse(other) != own]
    words = [found for other in read if (found := _words(other, frame, names))][:_MOST]
    return f", where {', '.join(words)}" if words else ""
