"""What the user's code calls its values, read from the lines that assign them.

A line such as ``q, k = self.proj(x).chunk(2, -1)`` makes several calls; the last of them made what is assigned.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from reprokit.program.ir import Call, Ref

_ASSIGNED = re.compile(r"^([A-Za-z]\w*(?:\s*,\s*[A-Za-z_]\w*)*)\s+=\s+\S")


def variables(calls: Sequence[Call]) -> dict[int, str]:
    """The variables of values, as far as the sites of calls in order tell them."""
    found: dict[int, str] = {}
    for position, call in enumerate(calls):
        following = calls[position + 1] if position + 1 < len(calls) else None
        if call.site is not None and (following is None or _line(following) != _line(call)):
            found.update(_assigned(call))
    return found


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
