"""The operands of the expression that raised, as its frame has them: their values, and the lines that assigned them.

Names, attributes and items are looked up in plain dicts, lists and objects, so no code of the user's runs.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import FrameType
from typing import Any

import torch

from reprokit import members, native
from reprokit.capture.structure import iter_tensors
from reprokit.program.dataflow import node_of
from reprokit.program.sites import relative_path
from reprokit.words import quoted, quoted_unless_name

_MOST = 4  # operands of an expression, or of an assignment, that are printed
_POSITION = ("lineno", "end_lineno", "col_offset", "end_col_offset")


def operands_at(frame: FrameType, instruction: int, notes: Mapping[int, str]) -> list[str]:
    """The operands of the expression that a frame is at, in words, numbers first; ``notes`` are about tensors, by their
    ``id``."""
    file, found = frame.f_code.co_filename, list[tuple[bool, str]]()
    position = next(islice(frame.f_code.co_positions(), instruction // 2, None), (None,))
    line, tree = position[0] or 0, _tree(file)
    function = _function_at(tree, line)
    here = list(ast.walk(function))
    parts = [node for node in here if tuple(getattr(node, one, None) for one in _POSITION) == position]
    for node in _operands(part for part in parts[:1] if not hasattr(part, "body")):  # a loop has not begun its body
        words, name = _words(node, frame, notes), ast.unparse(node)
        made = _assignment(tree if isinstance(node, ast.Attribute) else function, name, line) if words else None
        if made is not None:
            read = [one for one in _operands([made.value]) if ast.unparse(one) != name] if made in here else []
            values = ", ".join([value for one in read if (value := _words(one, frame, notes))][:_MOST])
            words += f" (assigned at {relative_path(file)}:{made.lineno}{f', where {values}' if values else ''})"
        found += [(isinstance(_value(node, frame), torch.Tensor), words)] if words else []
    return [words for _, words in sorted(found, key=lambda item: item[0])][:_MOST]


def option_words(options: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], file: str) -> Iterator[str]:
    """The options of an optimizer that are no real numbers any more, with the one line of a file that writes them."""
    for group, old in zip(options, before, strict=False):
        numbers = [name for name, value in old.items() if isinstance(value, (int, float))]
        for name in (name for name in numbers if not isinstance(group.get(name, 0), (int, float, torch.Tensor))):
            made, where = [one for one, target in _assignments(_tree(file)) if target.endswith(f"[{name!r}]")], ""
            if len(made) == 1:
                line, source = made[0].lineno, made[0].value
                earlier = _assignment(_function_at(_tree(file), line), ast.unparse(source), line)
                nodes = ast.walk(earlier.value if earlier is not None else source)
                power = next((p for p in nodes if isinstance(p, ast.BinOp) and isinstance(p.op, ast.Pow)), None)
                of = ""
                if power is not None:
                    of = f", from the power{quoted(f' `{ast.unparse(power)}`')} in line {power.lineno}"
                of += ", complex for a negative base" * bool(of)
                where = f" (assigned at {relative_path(file)}:{line}{of})"
            yield f"`{name}` of the optimizer is {_text(group[name], {})}, and was {_text(old[name], {})} before{where}"


def carried_by(roots: Iterable[torch.nn.Module]) -> Iterator[str]:
    """The attributes of modules that hold tensors with a graph and that their code reads, such as a hidden state."""
    for path, module in (item for root in roots for item in members.named_modules(root)):
        file = getattr(sys.modules.get(type(module).__module__), "__file__", None) or ""
        nodes = [node for node in ast.walk(_tree(file)) if isinstance(node, ast.Attribute)]
        for name, value in list(members.space_of_module(module).items()):
            at = {type(node.ctx): node.lineno for node in nodes if node.attr == name}
            if {ast.Load, ast.Store} <= at.keys() and any(node_of(one) is not None for one in iter_tensors(value)):
                where = f"assigned at {relative_path(file)}:{at[ast.Store]}, read in line {at[ast.Load]}"
                owner = f"`{name}` of the module `{path or type(module).__name__}`"
                yield f"{owner} ({where}) holds a graph, and may carry it from step to step"


@functools.lru_cache(maxsize=4)
def _tree(file: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(file)))


def _function_at(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function around a line, else the module."""
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return ([tree, *(node for node in functions if node.lineno <= line <= (node.end_lineno or 0))])[-1]


def _operands(parts: Iterable[ast.AST]) -> Iterator[ast.expr]:
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
    owner: Any = _value(node.value, frame) if isinstance(node, (ast.Subscript, ast.Attribute)) else None
    if isinstance(node, ast.Subscript) and type(owner) in (dict, list, tuple):
        key = _value(node.slice, frame)
        return owner[key] if type(key) in (str, int) else None
    if isinstance(node, ast.Attribute) and isinstance(owner, torch.Tensor):
        return {"grad": owner.grad if owner.is_leaf else None}[node.attr]
    space = getattr(owner, "__dict__", {}) if isinstance(node, ast.Attribute) else {}
    return {**(space.get("_parameters") or {}), **(space.get("_buffers") or {}), **space}[getattr(node, "attr", "")]


def _words(node: ast.AST, frame: FrameType, notes: Mapping[int, str]) -> str:
    """An operand and its value: `` `den` is 0.0 ``; empty where the value is none that a sentence can hold."""
    try:
        value = _value(node, frame)
    except (LookupError, TypeError):
        return ""
    words = _text(value, notes)
    if type(value) in (list, tuple) and value:
        parts = [_text(part, notes) for part in value[:_MOST]]
        words = f"{len(value)} items" + (f": {'; '.join(parts)}" if all(parts) else "")
    return f"`{quoted_unless_name(ast.unparse(node), 'an operand')}` is {words}" if words else ""


def _text(value: Any, notes: Mapping[int, str]) -> str:
    """A number, or a tensor as ``float32 [8, 3]``; of a single number its value; empty for anything else."""
    if type(value) in (float, complex):
        return f"{value:.6g}{', a complex number' if type(value) is complex else ''}"
    if not isinstance(value, torch.Tensor):
        return str(value) if type(value) in (bool, int, type(None)) else ""
    words = [f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"]
    if not value.is_cpu or value.layout is not torch.strided:
        words[0] += f" ({value.device}, {str(value.layout).removeprefix('torch.')})"
    elif native.numel(value) == 1 or not bool(native.any(value)):
        words.append(
            f"{native.item(value):.6g}" if native.numel(value) == 1 else "all zeros" if native.numel(value) else ""
        )
    unknown = "made in inference mode, before the calls that are kept" if native.is_inference(value) else ""
    return ", ".join(filter(None, [*words, notes.get(id(value), unknown)]))


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.Assign | ast.AugAssign, str]]:
    """The assignments, with each of their targets."""
    for one in ast.walk(tree):
        if isinstance(one, (ast.Assign, ast.AugAssign)):
            yield from ((one, ast.unparse(t)) for t in (one.targets if isinstance(one, ast.Assign) else [one.target]))


def _assignment(tree: ast.AST, name: str, line: int) -> ast.Assign | ast.AugAssign | None:
    """The last assignment to a name above a line, else below it; none of several if it is in a branch without it."""
    found = [one for one, target in _assignments(tree) if target == name]
    found = [one for one in found if not one.lineno <= line <= (one.end_lineno or line)]
    made = max(found, key=lambda one: (one.lineno < line, one.lineno), default=None)
    blocks = [one for node in ast.walk(tree) if isinstance(node, ast.If) for one in (node.body, node.orelse) if one]
    spans = [range(one[0].lineno, (one[-1].end_lineno or line) + 1) for one in blocks]
    is_aside = made is not None and any(made.lineno in span and line not in span for span in spans)
    return made if len(found) == 1 or not is_aside else None
