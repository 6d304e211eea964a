"""Where in the user's code a call or a module's class was written.

A call's site is the innermost frame that belongs neither to torch nor to a library. The running program is the user's
code wherever it is installed: the file of ``__main__``, and what lies beside it. The statement there is read as a
tree: the expression of the call in it, and the variables that it assigns.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from reprokit.errors import is_stand_in
from reprokit.program.ir import Call, ModuleNote, Ref, Site, Span

if TYPE_CHECKING:
    import torch

_OWN = str(Path(__file__).resolve().parent.parent) + os.sep
_TORCH = str(Path(getattr(find_spec("torch"), "origin", "")).resolve().parent) + os.sep  # without an import of torch
_STDLIB = tuple(str(Path(sysconfig.get_path(key)).resolve()) + os.sep for key in ("stdlib", "platstdlib"))
_CELL = re.compile(r"^<ipython-input|[\\/]ipykernel_\d+[\\/]\d+\.py$")
_LIBRARY_PARTS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@functools.cache
def kind_of_file(filename: str) -> str:
    """``own``, ``torch``, ``library`` or ``user``."""
    path = os.path.realpath(filename)
    if path.startswith(_OWN):
        return "own"
    if path.startswith(_TORCH) or filename.startswith("<frozen") or filename.startswith("<__array_function__"):
        return "torch"
    if path.startswith(_STDLIB) or any(part in path for part in _LIBRARY_PARTS):
        return "user" if _is_program(path) else "library"
    return "user"


def _is_program(path: str) -> bool:
    """True for the file of ``__main__`` and, unless it was run with ``-m``, for files in its folder."""
    main = sys.modules.get("__main__")
    found = getattr(main, "__file__", None)
    if not isinstance(found, str):
        return False
    file = os.path.realpath(found)
    folder = os.path.dirname(file) + os.sep
    is_package = getattr(main, "__spec__", None) is not None or folder.endswith(_LIBRARY_PARTS)
    return path == file or (not is_package and path.startswith(folder))


def current_site(frame: FrameType | None, driver: str = "") -> Site | None:
    """The site of whoever called torch, from ``frame`` outwards up to the file ``driver``; ``None`` without user
    code."""
    user, library = find_frames(frame, driver)
    return make_site(user.f_code, user.f_lasti, library) if user is not None else None


def find_frames(frame: FrameType | None, driver: str = "") -> tuple[FrameType | None, tuple[str, int] | None]:
    """From ``frame`` outwards up to the file ``driver``: the innermost frame of the user's code, and inside of it the
    innermost line of a library other than torch."""
    library: tuple[str, int] | None = None
    while frame is not None and (filename := frame.f_code.co_filename) != driver:
        kind = kind_of_file(filename)
        if kind == "user" and not is_stand_in(frame.f_code):
            return frame, library
        if kind == "library" and library is None and not is_standard(filename):
            library = (relative_path(filename), frame.f_lineno)
        frame = frame.f_back
    return None, library


def line_of(code: CodeType, instruction: int) -> int:
    """The line of an instruction, given as its offset in bytes; 0 if it has none."""
    return next((line for start, end, line in code.co_lines() if start <= instruction < end and line is not None), 0)


def make_site(code: CodeType, instruction: int, library: tuple[str, int] | None = None) -> Site:
    """The site of the call that an instruction of a code object makes, given as its offset in bytes."""
    filename, positions = code.co_filename, next(islice(code.co_positions(), max(instruction, 0) // 2, None))
    line = positions[0] or 0
    text = linecache.getline(filename, line).strip()
    return Site(relative_path(filename), line, text, code.co_qualname, library, *_cut(filename, positions))


_MAX_LINES = 20  # a longer statement is a table of data or a body, not the expression of a call
Positions = tuple[int | None, int | None, int | None, int | None]


def _cut(filename: str, positions: Positions) -> tuple[str, Span | None]:
    """The statement around a call if it has several lines, and the expression of the call in it."""
    line, end_line, column, end_column = positions
    if line is None or end_line is None or column is None or end_column is None:
        return "", None
    source = linecache.getlines(filename)
    numbers = _statements("".join(source)).get(line, range(line, line + 1))
    if len(numbers) > _MAX_LINES or numbers[-1] > len(source):
        return "", None
    lines = [source[number - 1].rstrip() for number in numbers]
    if end_line not in numbers:  # a loop is the expression of what its head iterates over
        end_line, end_column = numbers[-1], len(lines[-1].encode())
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    cut = [text.removeprefix(indent) if text.startswith(indent) else text.lstrip() for text in lines]
    first, last = line - numbers[0], end_line - numbers[0]
    start, end = (len(lines[n].encode()) - len(cut[n].encode()) for n in (first, last))
    return "\n".join(cut) * (len(cut) > 1), (first + 1, column - start, last + 1, end_column - end)


@functools.lru_cache(maxsize=16)
def _statements(source: str) -> Mapping[int, range]:
    """For the lines of a file those of the innermost statement; of a compound statement only its head.

    Lines of texts over several lines are left out, because these change with their indentation.
    """
    found: dict[int, range] = {}
    statement = parsed.__wrapped__(source)  # which is large, and not kept
    nodes, lines = list(ast.walk(statement.tree)) if statement is not None else [], source.splitlines()
    for node in nodes:  # from the outside to the inside
        if isinstance(node, ast.stmt):
            numbers = range(node.lineno, _last_line(node, lines) + 1)
            found.update(dict.fromkeys(numbers, numbers))
    for node in nodes:
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno != node.lineno:
            for line in found.get(node.lineno, ()):
                found.pop(line, None)
    return found


def _last_line(node: ast.stmt, lines: Sequence[str]) -> int:
    """The last line of a statement; of a compound statement that of its head, without comments behind it."""
    body: Sequence[ast.stmt] = getattr(node, "body", ())
    if not body:
        return node.end_lineno or node.lineno
    last = max(node.lineno, body[0].lineno - 1)
    while last > node.lineno and lines[last - 1].strip()[:1] in ("", "#"):
        last -= 1
    return last


def relative_path(filename: str) -> str:
    """The path below the current folder or below the library folder, ``In[3]`` for a cell of a notebook; else only the
    file's name."""
    return (_cell(filename) if _CELL.search(filename) else None) or _relative_path(filename)


def _cell(filename: str) -> str | None:
    """The cell as IPython's tracebacks call it: with the number of its latest run, so nothing here is remembered."""
    try:
        shell: Any = sys.modules["IPython"].get_ipython()
        kind_and_name = shell.compile.format_code_name(filename)
    except (KeyError, AttributeError):
        return None
    return str(kind_and_name[1]) if kind_and_name else None


@functools.cache
def _relative_path(filename: str) -> str:
    path = os.path.realpath(filename)
    for part in _LIBRARY_PARTS:
        if part in path:
            return path.rpartition(part)[2].replace(os.sep, "/")
    here = os.path.realpath(os.curdir) + os.sep
    return path[len(here) :].replace(os.sep, "/") if path.startswith(here) else os.path.basename(path)


@functools.cache
def is_standard(filename: str) -> bool:
    """True for a file of Python's standard library."""
    path = os.path.realpath(filename)
    return path.startswith(_STDLIB) and not any(part in path for part in _LIBRARY_PARTS)


def note_of(module: torch.nn.Module) -> ModuleNote:
    """The note for a context repro: torch's own layers by their constructor arguments, user
    classes by place and text."""
    cls = type(module)
    if cls.__module__.startswith("torch.nn.modules"):  # the arguments that the layer kept as attributes of plain types
        parameters = inspect.signature(cls.__init__).parameters
        kept = {name: getattr(module, name, None) for name in parameters if name != "self"}
        found = {key: value for key, value in kept.items() if isinstance(value, (bool, int, float, str, tuple, list))}
        if "bias" in kept.keys() - found.keys() and hasattr(module, "bias"):
            found["bias"] = module.bias is not None
        return ModuleNote(cls.__name__, module.training, found)
    text, place, line = source_of(cls)
    return ModuleNote(cls.__qualname__, module.training, {}, place, line, text)


def source_of(cls: type) -> tuple[str, str, int]:
    """The text of a class, its file and line; empty where there is none."""
    try:
        file, (lines, line) = inspect.getsourcefile(cls) or "", inspect.getsourcelines(cls)
    except (OSError, TypeError):
        return "", "", 0
    return "".join(lines), relative_path(file) if file else "", line


@dataclass(frozen=True, slots=True)
class ParsedStatement:
    """A statement that is whole; of a compound statement its head."""

    body: str
    tree: ast.Module  # its columns are places in ``body``
    before: str = ""  # what it takes to make a statement of it
    after: str = ""


@functools.lru_cache(maxsize=256)
def parsed(text: str) -> ParsedStatement | None:
    """The statement as a tree, ``None`` where it is not whole."""
    before, after = "el" * text.startswith("elif "), " pass" * text.endswith(":")
    body = f"{text.removeprefix(before)}{after}"
    try:
        return ParsedStatement(body, ast.parse(body), before, after) if body else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def parts(site: Site | None) -> Sequence[ast.AST]:
    """The expressions with the span of a call: its own; for an augmented assignment also the statement.

    Empty for a call inside a library, and without a statement or span.
    """
    if site is None or site.library is not None or site.span is None:
        return ()
    return _parts(site.text, site.span)


@functools.lru_cache(maxsize=1024)
def _parts(text: str, span: Span) -> Sequence[ast.AST]:
    statement = parsed(text)
    if statement is None:
        return ()
    removed = len(statement.before) * (span[0] == 1), len(statement.before) * (span[2] == 1)
    wanted = (span[0], span[1] - removed[0], span[2], span[3] - removed[1])
    return [node for node in ast.walk(statement.tree) if wanted in _spans(node)]


def _spans(node: ast.AST) -> Iterator[tuple[int, int, int, int]]:
    """The span of a node, and for a method behind a line break the one that Python gives its call: from the name on."""
    if isinstance(node, (ast.expr, ast.stmt)) and node.end_lineno is not None and node.end_col_offset is not None:
        end = (node.end_lineno, node.end_col_offset)
        yield node.lineno, node.col_offset, *end
        if isinstance(node, ast.Call) and isinstance(owner := node.func, ast.Attribute):
            column = (owner.end_col_offset or 0) - len(owner.attr.encode())
            yield owner.end_lineno or 0, column, *end


def called_name(node: ast.AST) -> str:
    """The last part of the name that a part of a statement calls, empty if it calls none."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def variables(calls: Sequence[Call]) -> dict[int, str]:
    """The variables that statements assign the results of calls to.

    A layer may make several calls; the last of them returns what is assigned.
    """
    found: dict[int, str] = {}
    for position, call in enumerate(calls):
        following = calls[position + 1].site if position + 1 < len(calls) else None
        for part in parts(call.site):
            is_itself = not isinstance(part, ast.Call) or called_name(part) == call.name
            if is_itself or following != call.site:
                for value, name in _assigned(call, part):
                    found.setdefault(value, name)
    return found


def _assigned(call: Call, part: ast.AST) -> Iterator[tuple[int, str]]:
    """The values of a result with the variables that a statement assigns exactly one of its parts to."""
    statement = parsed(call.site.text) if call.site is not None else None
    outputs = [call.outputs] if isinstance(call.outputs, Ref) else call.outputs
    assigned = _assignments(statement.tree) if statement is not None else ()
    target = next((target for target, value in assigned if value is part), None)
    names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    if isinstance(outputs, (tuple, list)) and len(outputs) == len(names):
        pairs = zip(outputs, names, strict=True)
        yield from ((ref.value, name.id) for ref, name in pairs if isinstance(ref, Ref) and isinstance(name, ast.Name))


def _assignments(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets and what they are assigned, in ``a, b = x, y`` each by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            yield target, value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                yield from zip(target.elts, value.elts, strict=False)
