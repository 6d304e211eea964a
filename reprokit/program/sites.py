"""Where in the user's code a call was written: the innermost frame that belongs neither to torch nor to a library.

The running program is the user's code wherever it is installed: the file of ``__main__``, and what lies beside it.
"""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from reprokit.program.ir import Site

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
    library: tuple[str, int] | None = None
    while frame is not None:
        kind = kind_of_file(frame.f_code.co_filename)
        if frame.f_code.co_filename == driver:
            return None
        if kind == "user":
            return make_site(frame.f_code, frame.f_lineno, library)
        if kind == "library" and library is None and not is_standard(frame.f_code.co_filename):
            library = (relative_path(frame.f_code.co_filename), frame.f_lineno)
        frame = frame.f_back
    return None


def library_line(frame: FrameType | None, driver: str = "") -> tuple[str, int] | None:
    """The innermost line of a library other than torch, from ``frame`` outwards up to the file ``driver`` or the user's
    code; ``None`` if there is none."""
    while frame is not None:
        filename = frame.f_code.co_filename
        kind = kind_of_file(filename)
        if filename == driver or kind == "user":
            return None
        if kind == "library" and not is_standard(filename):
            return relative_path(filename), frame.f_lineno
        frame = frame.f_back
    return None


def make_site(code: CodeType, line: int, library: tuple[str, int] | None = None) -> Site:
    """The site of one line of a code object."""
    filename = code.co_filename
    text = linecache.getline(filename, line).strip()
    return Site(relative_path(filename), line, text, code.co_qualname, library)


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
