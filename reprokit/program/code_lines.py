"""Digests of the lines of the user's code: enough to find out later which lines were edited, and no line of source.

A line has 16 bits: those of its tokens and its indentation, without comments. Too few to tell a guessed line from
others. The text files of settings beside the script have digests too.
"""

from __future__ import annotations

import hashlib
import io
import linecache
import math
import os
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reprokit.errors import ignored_errors
from reprokit.program.sites import kind_of_file, relative_path

CodeDigests = Mapping[str, tuple[int, ...]]

_MOST_LINES = 20_000  # of all files: 60 kB in a snapshot
_MOST_BYTES = 2**20  # of a file; a larger one is data
_SETTINGS = (".yaml", ".yml", ".toml", ".json", ".ini", ".cfg")
_MOST_SETTINGS_BYTES = 2**16
_MOST_ENTRIES = 500  # of folders that are looked through for settings; a data set has more
_HAS_WORD = re.compile(r"\w")
_DOTTED_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER}


def main_file() -> str | None:
    """The path of the script or module that runs as ``__main__``."""
    found = getattr(sys.modules.get("__main__"), "__file__", None)
    return found if isinstance(found, str) else None


def files_of_run(began_at: float = math.inf) -> dict[str, Path]:
    """The user's Python files that are imported now, and the files of settings beside the script, by their short names.

    The script comes first. A file that was written after the run ``began_at`` is no setting: a log of numbers that the
    script writes beside itself has other lines after each run.
    """
    main = main_file()
    named = [main] if main is not None else []
    modules: list[Any] = list(sys.modules.values())
    for module in modules:
        path = vars(module).get("__file__") if hasattr(module, "__dict__") else None
        if isinstance(path, str) and path.endswith(".py") and kind_of_file(path) == "user":
            named.append(path)
    found: dict[str, Path] = {}
    for path in named:
        found.setdefault(relative_path(path), Path(path))
    if main is not None:
        for file in _settings_beside(Path(main).resolve().parent):
            if file.stat().st_mtime <= began_at:
                found.setdefault(relative_path(str(file)), file)
    return found


def _settings_beside(folder: Path) -> Iterator[Path]:
    """Small files of settings in a folder and in the folders in it."""
    num_seen = 0
    folders = [(folder, 0)]
    while folders:
        current, depth = folders.pop(0)
        with ignored_errors():
            for entry in sorted(os.scandir(current), key=lambda one: one.name):
                num_seen += 1
                if num_seen > _MOST_ENTRIES:
                    return
                if entry.is_dir(follow_symlinks=False):
                    is_hidden = entry.name.startswith((".", "__"))
                    if depth < 2 and not is_hidden:
                        folders.append((Path(entry.path), depth + 1))
                elif entry.name.endswith(_SETTINGS) and entry.stat().st_size <= _MOST_SETTINGS_BYTES:
                    yield Path(entry.path)


def lines_of_run() -> frozenset[str]:
    """The lines of the user's Python files and cells, without indentation.

    Left out are names, which every file may have, and lines without a letter or digit.
    """
    files = [str(path) for path in files_of_run().values() if path.suffix == ".py"]
    cells = [name for name in list(linecache.cache) if kind_of_file(name) == "user"]
    lines = set[str]()
    for name in {*files, *cells}:
        with ignored_errors():
            lines.update(line.strip() for line in linecache.getlines(name))
    return frozenset(line for line in lines if _HAS_WORD.search(line) and not _DOTTED_NAME.fullmatch(line))


def digests_of_run(began_at: float) -> dict[str, tuple[int, ...]]:
    """The digests of the lines of `files_of_run`; of as many files as there is room for.

    Of a file of Python that was written after the run ``began_at`` the code that runs is not known: it has no lines.
    """
    found: dict[str, tuple[int, ...]] = {}
    num_lines = 0
    for name, path in files_of_run(began_at).items():
        text = read_text(path)
        if text is None:
            continue
        is_as_run = path.stat().st_mtime <= began_at
        digests = line_digests(text, is_python=path.suffix == ".py") if is_as_run else ()
        num_lines += len(digests)
        if num_lines > _MOST_LINES:
            break
        found[name] = digests
    return found


def read_text(path: Path) -> str | None:
    """The text of a file; ``None`` if it has none, or is too large for code."""
    with ignored_errors():
        if path.stat().st_size <= _MOST_BYTES:
            with tokenize.open(path) as file:
                return file.read()
    return None


def line_digests(text: str, *, is_python: bool = True) -> tuple[int, ...]:
    """16 bits for every line, and 0 for a line without code."""
    lines = text.splitlines()
    rows = _tokens_by_line(text, len(lines)) if is_python else None
    if rows is None:
        rows = [line.strip() for line in lines]
    return tuple(_digest(row) if row else 0 for row in rows)


def _digest(row: str) -> int:
    digest = hashlib.blake2b(row.encode("utf-8", "surrogatepass"), digest_size=2).digest()
    return int.from_bytes(digest, "big") or 1


def _tokens_by_line(text: str, num_lines: int) -> list[str] | None:
    """The tokens of every line behind its indentation; ``None`` if the text is not Python."""
    rows: list[list[str]] = [[] for _ in range(num_lines + 1)]
    depth, begins_line = 0, True
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.INDENT:
                depth += 1
            elif token.type == tokenize.DEDENT:
                depth -= 1
            elif token.type == tokenize.NEWLINE:
                begins_line = True
            if token.type in _LAYOUT or token.type in (tokenize.INDENT, tokenize.DEDENT):
                continue
            if begins_line:
                rows[token.start[0] - 1].append(f"{depth}|")
                begins_line = False
            for offset, part in enumerate(token.string.split("\n")):  # a string may have several lines
                if part:
                    rows[token.start[0] - 1 + offset].append(part)
    except (tokenize.TokenError, IndentationError, SyntaxError, IndexError):
        return None
    return [" ".join(row) for row in rows[:num_lines]]
