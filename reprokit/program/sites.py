"""Where in the user's code a call was written: the innermost frame that belongs neither to torch nor to a library."""

from __future__ import annotations

import functools
import linecache
import os
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

import torch

from reprokit.program.ir import Site

_OWN = str(Path(__file__).resolve().parent.parent) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
_STDLIB = tuple(str(Path(sysconfig.get_path(key)).resolve()) + os.sep for key in ("stdlib", "platstdlib"))
_LIBRARY_PARTS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@functools.cache
def kind_of_file(filename: str) -> str:
    """``own``, ``torch``, ``library`` or ``user``."""
    path = os.path.realpath(filename)
    if path.startswith(_OWN):
        return "own"
    if path.startswith(_TORCH) or filename.startswith("<frozen") or filename.startswith("<__array_function__"):
        return "torch"
    if any(part in path for part in _LIBRARY_PARTS) or path.startswith(_STDLIB):
        return "library"
    return "user"


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
        if kind == "library" and library is None and not _is_standard(frame.f_code.co_filename):
            library = (relative_path(frame.f_code.co_filename), frame.f_lineno)
        frame = frame.f_back
    return None


def library_line(frame: FrameType | None) -> tuple[str, int] | None:
    """The innermost line of a library other than torch, or ``None``."""
    while frame is not None:
        filename = frame.f_code.co_filename
        if kind_of_file(filename) == "library" and not _is_standard(filename):
            return relative_path(filename), frame.f_lineno
        frame = frame.f_back
    return None


def make_site(code: CodeType, line: int, library: tuple[str, int] | None = None) -> Site:
    """The site of one line of a code object."""
    filename = code.co_filename
    text = linecache.getline(filename, line).strip()
    return Site(relative_path(filename), line, text, code.co_qualname, library)


@functools.cache
def relative_path(filename: str) -> str:
    """The path below the current folder or below the library folder; else only the file's name."""
    path = os.path.realpath(filename)
    for part in _LIBRARY_PARTS:
        if part in path:
            return path.rpartition(part)[2].replace(os.sep, "/")
    here = os.path.realpath(os.curdir) + os.sep
    return path[len(here) :].replace(os.sep, "/") if path.startswith(here) else os.path.basename(path)


def _is_standard(filename: str) -> bool:
    path = os.path.realpath(filename)
    return path.startswith(_STDLIB) and not any(part in path for part in _LIBRARY_PARTS)
