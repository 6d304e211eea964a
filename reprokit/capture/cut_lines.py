"""The line that keeps a gradient from a model, read from the source: what a loss is made of, back to the model.

The log has no call that makes a tensor of plain numbers, as `torch.tensor(out.tolist())` does. A line is named only if
the assignments of its function lead over it.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType
from typing import Any

from reprokit.program.sites import called_name, relative_path

Finds = Callable[[Any], bool]  # a node of the tree
_CUTS = frozenset(
    ["detach", "detach_", "item", "tolist", "numpy", "from_numpy", "tensor", "as_tensor", "Tensor", "FloatTensor",
     "array", "argmax", "argmin", "round", "floor", "ceil", "sign", "long", "int", "bool", "float", "multinomial"]
)  # fmt: skip
_OF_TENSORS = frozenset({"float"})  # a method that keeps the graph; the function does not
_WITHOUT_GRAPH = frozenset({"no_grad", "inference_mode"})
_ORDERED = frozenset({"max", "min", "sort", "topk"})  # their second result are indices


def cut_line(code: CodeType, is_start: Finds, is_source: Finds) -> str | None:
    """The place and text of the line of a function that cuts the way from a statement that ``is_start`` back to an
    expression that ``is_source``, of several the one next to the source: ``train.py:9: a = out.detach().numpy()``."""
    lines = linecache.getlines(code.co_filename)
    scope = _scope("".join(lines), code.co_name, code.co_firstlineno)
    nodes: list[Any] = list(_inside(scope)) if scope is not None else []
    plain = [n for n in nodes if isinstance(n, ast.With) and opens(n, _WITHOUT_GRAPH)]
    given: dict[str, list[tuple[float, ast.AST]]] = {}
    leading: set[int] = set()  # the ``id``s of values that are made of the source

    def made_of(expression: ast.AST, line: float) -> list[tuple[float, ast.AST]]:
        """The last two assignments of each name: of a list also what was appended to it."""
        names = {ast.unparse(n) for n in ast.walk(expression) if isinstance(n, (ast.Name, ast.Attribute))}
        return [one for name in sorted(names) for one in [g for g in given.get(name, ()) if g[0] < line][-2:]]

    def leads(expression: ast.AST, line: float) -> bool:
        is_there = any(map(is_source, ast.walk(expression)))
        return is_there or any(id(value) in leading for _, value in made_of(expression, line))

    def cut(expression: ast.AST, line: float, seen: set[int]) -> float | None:
        for at, value in made_of(expression, line):
            if id(value) in leading - seen:
                seen.add(id(value))
                found = cut(value, at, seen)
                if found is not None or any(has(region, int(at)) for region in plain):
                    return at if found is None else found
        return line if any(_cuts(n) and leads(n, line) for n in ast.walk(expression)) else None

    for name, at, value in sorted(_given(nodes), key=lambda one: one[1]):
        given.setdefault(name, []).append((at, value))
        leading |= {id(value)} if leads(value, at) else set()
    starts = [n for n in nodes if isinstance(n, (ast.Expr, ast.Assign, ast.Return)) and is_start(n)]
    found = (cut(n.value, n.lineno, set()) for n in reversed(starts) if n.value)
    with suppress(RecursionError):
        line = next((one for one in found if one is not None), None)
        return place_of(code, int(line + 0.5)) if line is not None else None
    return None


def place_of(code: CodeType, line: int) -> str:
    """A line of the file of a function, with its text."""
    return f"{relative_path(code.co_filename)}:{line}: {linecache.getline(code.co_filename, line).strip()}"


def region_around(code: CodeType, line: int, name: str) -> str:
    """The ``with`` of something with a name that holds a line of a function; empty if there is none."""
    scope = _scope("".join(linecache.getlines(code.co_filename)), code.co_name, code.co_firstlineno)
    nodes = _inside(scope) if scope is not None else ()
    found = next((n.lineno for n in nodes if isinstance(n, ast.With) and opens(n, {name}) and has(n, line)), None)
    return f", {place_of(code, found)}" if found is not None else ""


def has(node: Any, line: int) -> bool:
    """True if a node of a tree includes a line."""
    return hasattr(node, "lineno") and node.lineno <= line <= node.end_lineno


def opens(node: ast.With, names: frozenset[str] | set[str]) -> bool:
    """True if a ``with`` is of something with one of these names."""
    return any(called_name(item.context_expr) in names for item in node.items)


def _given(nodes: list[Any]) -> Iterator[tuple[str, float, ast.AST]]:
    """Names with the lines and the expressions of their values; what a comprehension runs over comes before it."""
    for node in nodes:
        targets: list[ast.expr] = []
        value: Any = getattr(node, "value", None)
        ahead = 0.0
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
            targets = [node.target]
        elif isinstance(node, (ast.For, ast.comprehension)):
            targets, value, ahead = [node.target], node.iter, 0.5
        elif called_name(node) in ("append", "extend") and isinstance(node.func, ast.Attribute) and node.args:
            targets, value = [node.func.value], node.args[0]
        for target in targets if value is not None else ():
            for item in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                yield ast.unparse(item.value if isinstance(item, ast.Subscript) else item), value.lineno - ahead, value


def _cuts(node: Any) -> bool:
    """True for an expression whose result has no graph, or no gradient."""
    if isinstance(node, ast.Subscript):
        return getattr(node.slice, "value", None) == 1 and called_name(node.value) in _ORDERED
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _OF_TENSORS:
        return False
    is_attribute = isinstance(node, ast.Attribute) and node.attr in ("data", "indices")
    return is_attribute or isinstance(node, ast.Compare) or called_name(node) in _CUTS


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function but those of functions in it."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from (node, *_inside(node))


@functools.lru_cache(maxsize=16)
def _scope(source: str, name: str, line: int) -> ast.AST | None:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.name == name]
    starts = ((n, min([n.lineno, *(one.lineno for one in n.decorator_list)])) for n in functions)
    return tree if name == "<module>" else next((n for n, start in starts if start == line), None)
