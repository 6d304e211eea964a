"""Where in the user's code a call or a module's class was written.

A call's site is the innermost frame that belongs neither to torch nor to a library. The running program is the user's
code wherever it is installed: the file of ``__main__``, and what lies beside it.
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
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from reprokit.program.ir import ModuleNote, Site, Span

_OWN = str(Path(__file__).resolve().parent.parent) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
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
        if kind == "user":
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
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    lines = source.splitlines()
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
    if cls.__module__.startswith("torch.nn.modules"):
        # Those constructor arguments that the layer kept as attributes of plain types
        found = {}
        for name in inspect.signature(type(module).__init__).parameters:
            value = getattr(module, name, None)
            if name != "self" and isinstance(value, (bool, int, float, str, tuple, list)):
                found[name] = value
        if "bias" in inspect.signature(type(module).__init__).parameters and "bias" in module._parameters:
            found["bias"] = module._parameters["bias"] is not None
        return ModuleNote(cls.__name__, module.training, found)
    try:
        file, (lines, line) = inspect.getsourcefile(cls) or "", inspect.getsourcelines(cls)
    except (OSError, TypeError):
        file, lines, line = "", [], 0
    place = relative_path(file) if file else ""
    return ModuleNote(cls.__qualname__, module.training, {}, place, line, "".join(lines))
