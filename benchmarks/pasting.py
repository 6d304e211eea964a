"""Pasting the code of a fix into the script that it is about, as somebody would who trusts it."""

from __future__ import annotations

import re

_PLACE = re.compile(r"(?m)^# .*$")
_PART = re.compile(r"(?m)^# (?:\S*/)?(?P<file>[^\s/]+):(?P<line>\d+)(?:-(?P<last>\d+))?\n(?P<code>(?:(?!# ).*\n?)+)")


def paste(code: str, file: str, source: str) -> str | None:
    """The source of ``file`` with the lines that the code names replaced by it; ``None`` where it names no line of it.

    What is only a part of a line, or inside of a function that it calls, cannot be pasted.
    """
    lines, parts = source.splitlines(), list(_PART.finditer(code))
    if not parts or len(parts) < len(_PLACE.findall(code)) or any(part["file"] != file for part in parts):
        return None
    for part in sorted(parts, key=lambda part: -int(part["line"])):  # the last first, so that the lines above stay
        first, last = int(part["line"]) - 1, int(part["last"] or part["line"])
        indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        lines[first:last] = [indent + new for new in part["code"].rstrip().splitlines()]
    return "\n".join(lines) + "\n"
