"""What the user's code calls its values, read from the lines that assign them.

A line such as ``q, k = self.proj(x).chunk(2, -1)`` makes several calls; the last of them made what is assigned.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from reprokit.program.ir import Call, Ref, Site

_COMPUTED = (ast.BinOp, ast.Call, ast.Compare, ast.Subscript, ast.UnaryOp)
_ASSIGNED = re.compile(r"^([A-Za-z]\w*(?:\s*,\s*[A-Za-z_]\w*)*)\s+=\s+\S")


def variables(calls: Sequence[Call]) -> dict[int, str]:
    """The variables of values, as far as the sites of calls in order tell them."""
    found: dict[int, str] = {}
    readers = first_readers(calls)
    for position, call in enumerate(calls):
        following = calls[position + 1] if position + 1 < len(calls) else None
        is_shown = call.site is not None and call.site.library is None
        is_last = is_shown and (following is None or _line(following) != _line(call))
        if is_last and not is_handed_on(call, readers):
            found.update(_assigned(call))
    return found


def first_readers(calls: Iterable[Call]) -> dict[int, list[tuple[int, Call]]]:
    """For every value the first two calls that read it (the one that made it may be one), and when they did.

    Differentiation is left out.
    """
    found: dict[int, list[tuple[int, Call]]] = {}
    for index, call in enumerate(calls):
        for value in () if call.is_differentiation else dict.fromkeys(call.input_refs()):
            readers = found.setdefault(value, [])
            if len(readers) < 2:
                readers.append((index, call))
    return found


def is_handed_on(call: Call, readers: Mapping[int, Sequence[tuple[int, Call]]]) -> bool:
    """True if the line passes the result to a function and assigns what that returns: ``loss = model(x[:, 1:])``.

    The result's first reader is then in another function, and the line has a call with an argument that is computed on
    the line; that call is neither this one nor the module that it ran in. ``readers`` comes from `first_readers`.
    """
    outer = _receiver(call.site.code) if call.site is not None else None
    if call.site is None or outer is None:
        return False
    if outer == call.name or any(scope.path.rpartition(".")[2] == outer for scope in call.scope):
        return False
    reading = [item for value in call.output_refs() for item in readers.get(value, ()) if item[1] is not call]
    first = min(reading, key=lambda item: item[0])[1].site if reading else None
    return first is not None and _function(first) != _function(call.site)


@functools.lru_cache(maxsize=256)
def _receiver(code: str) -> str | None:
    """The outermost function on a line with an argument that is computed there, by the last part of its name."""
    try:
        nodes = [node for node in ast.walk(ast.parse(code.strip())) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError):
        return None
    return next((ast.unparse(node.func).rpartition(".")[2] for node in nodes if _has_computed_argument(node)), None)


def _has_computed_argument(node: ast.Call) -> bool:
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    return any(isinstance(part, _COMPUTED) for argument in given for part in ast.walk(argument))


def _function(site: Site) -> tuple[str, str]:
    return site.file, site.function


def _line(call: Call) -> tuple[str, int, str] | None:
    return (call.site.file, call.site.line, call.site.function) if call.site is not None else None


def _assigned(call: Call) -> Iterator[tuple[int, str]]:
    match = _ASSIGNED.match(call.site.code if call.site is not None else "")
    if match is None:
        return
    names = [name.strip() for name in match.group(1).split(",")]
    if isinstance(call.outputs, Ref):
        if len(names) == 1:
            yield call.outputs.value, names[0]
    elif isinstance(call.outputs, (tuple, list)) and len(call.outputs) == len(names):
        yield from ((ref.value, name) for ref, name in zip(call.outputs, names, strict=True) if isinstance(ref, Ref))
