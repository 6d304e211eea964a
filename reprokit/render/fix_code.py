"""A fix as code: the lines of the user's program that were changed, as they were when the step became finite.

Each is the user's own line with the changed calls written into it. Where that is not possible, it is written anew from
its calls; the comment above tells whether what is shown can stand in the place of the line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from reprokit.program.ir import Call, Mode, Program, Site
from reprokit.program.run import Tensors
from reprokit.render.code import write_program
from reprokit.render.gate import is_line
from reprokit.render.labels import labels
from reprokit.render.modes import OFF
from reprokit.render.own_line import own_line, stands_for
from reprokit.render.reads import is_one_line
from reprokit.render.spelling import is_inside_another, operand_paths

MAX_LINES = 6  # for one line of the user's code; the changed calls alone are shown where it takes more
_LAYER = re.compile(r"\.(\d+)(?=\.|$)")
_NUMBER = re.compile(r"-?\d[\d.]*e[-+]?\d+")
_LIMITS = {
    repr(float(getattr(torch.finfo(dtype), name))).replace("e+", "e"): f"torch.finfo({dtype}).{name}"
    for dtype in (torch.bfloat16, torch.float64, torch.float32)
    for name in ("min", "max", "tiny")
}


def fix_code(before: Program, after: Program, tensors: Tensors) -> str:
    """The changed lines of a step, each below a comment that says where it is; empty when there is nothing to show.

    ``before`` and ``after`` share the calls that were not touched.
    """
    untouched = {id(call) for call in before.calls}
    changed = [index for index, call in enumerate(after.calls) if id(call) not in untouched]
    shown: dict[tuple[str, int], str] = {}
    for index in changed:
        site = after.calls[index].site
        if site is None or (site.file, site.line) in shown or after.calls[index].is_optimizer_step:
            continue
        text, place = _Piece(before, after, tensors, frozenset(changed), index).shown(site)
        shown[site.file, site.line] = f"# {place}\n{text}" if text and is_line(text) else ""
    return "\n".join(filter(None, shown.values()))


@dataclass(frozen=True)
class _Piece:
    """The line of the user's code that call number ``index`` of the edited program stands on."""

    before: Program
    after: Program
    tensors: Tensors
    changed: frozenset[int]
    index: int

    def shown(self, site: Site) -> tuple[str, str]:
        """The code, empty where it is long, and where it belongs.

        That is ``train.py:7`` for what can stand in the place of the line, ``in train.py:7`` for the changed calls
        alone; it is also said where these are in a function that the line calls.
        """
        place = f"{site.file}:{site.line}"
        own = own_line(_on_line(self.before, site), _on_line(self.after, site), _in_words)
        if own:
            return own, place
        line = self._line()
        whole = self._written(line)
        if len(whole) <= MAX_LINES and stands_for("\n".join(whole), site.code):
            return "\n".join(whole), place
        kept = set(map(id, self.after.calls))
        replaced = [call for call in self._old() if id(call) not in kept]
        is_inside = bool(replaced) and all(map(is_inside_another, replaced))
        alone = self._written([number for number in line if number in self.changed])
        found = next((lines for lines in (whole, alone) if len(lines) <= MAX_LINES), [])
        return "\n".join(found), f"{place}, in what it calls" if is_inside else f"in {place}"

    def _old(self) -> list[Call]:
        """The calls of the line before the change."""
        return [call for call in self.before.calls if is_one_line(call, self.after.calls[self.index])]

    def _line(self) -> Sequence[int]:
        """The numbers of the calls on the line, once where a loop goes over it several times."""
        calls, first, last = self.after.calls, self.index, self.index
        while first > 0 and is_one_line(calls[first - 1], calls[self.index]):
            first -= 1
        while last + 1 < len(calls) and is_one_line(calls[last + 1], calls[self.index]):
            last += 1
        numbers = range(first, last + 1)
        targets = [calls[number].target for number in numbers]
        length = next(n for n in range(1, len(targets) + 1) if targets == targets[:n] * (len(targets) // n))
        return numbers[:length]

    def _in_its_place(self, calls: Sequence[Call]) -> list[Call]:
        """The calls without modes that are set around the line; an autocast switched off by the change is written."""
        around = next((call.mode.autocast for call in self._old()), ())
        off = tuple((device, OFF) for device, _ in around)
        return [replace(call, mode=Mode(autocast=() if call.mode.autocast else off)) for call in calls]

    def _written(self, numbers: Sequence[int]) -> list[str]:
        """Some calls of the line as code that stands in its place."""
        written = set(numbers)
        outside = [call for number, call in enumerate(self.after.calls) if number not in written]
        read = {ref.value for ref in self.after.outputs} | {value for call in outside for value in call.input_refs()}
        calls = _needed(self._in_its_place([self.after.calls[number] for number in numbers]), read)
        given, made = dict[int, str](), set[int]()
        paths, known = self._paths(), {**labels(self.after), **labels(self.before)}
        for call in calls:
            for value in call.input_refs():
                if value not in made and value not in given:
                    given[value] = _unique([paths.get(value), _path(known[value])], set(given.values()))
            made.update(call.output_refs())
        kept = [value for value in made if value in read]
        piece = replace(self.after, inputs=(), calls=tuple(calls), outputs=())
        inserted = dict.fromkeys((value for value in made if value >= self.before.next_value()), "")
        nouns = {**inserted, **{value: known[value] for value in kept}}
        lines = write_program(piece, self.tensors, keep=[*kept, *(read & given.keys())], given=given, nouns=nouns).body
        return [_in_words(line) for line in self._returned(lines, calls)]

    def _returned(self, lines: Sequence[str], calls: Sequence[Call]) -> Sequence[str]:
        """The lines, with ``return`` where the user's line returns what the last of them makes."""
        last = calls[-1] if lines else None
        if last is None or last.site is None or not last.site.code.startswith("return "):
            return lines
        on_line = [call for call in self.after.calls if call.site is not None and call.site.line == last.site.line]
        if any(value in call.input_refs() for call in on_line for value in last.output_refs()):
            return lines
        return [*lines[:-1], re.sub(r"^\w+ = ", "return ", lines[-1])]

    def _paths(self) -> Mapping[int, str]:
        """How the line reaches the values that it reads."""
        return operand_paths(self._old())


def _on_line(program: Program, site: Site) -> list[Call]:
    """All calls of a line, those of functions that it holds (a comprehension) and of all its runs included."""
    sites = ((call, call.site) for call in program.calls)
    return [call for call, its in sites if its is not None and (its.file, its.line) == (site.file, site.line)]


def _path(name: str) -> str:
    """The name of a parameter as an expression: layers in lists are indexed."""
    return _LAYER.sub(r"[\1]", name)


def _unique(wanted: Sequence[str | None], taken: Container[str]) -> str:
    """The first name that is not taken, or the last one with a number."""
    numbered = (f"{wanted[-1]}{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain(wanted, numbered) if name is not None and name not in taken)


def _needed(calls: Sequence[Call], read: set[int]) -> list[Call]:
    """The calls without those that nothing reads any more."""
    wanted, needed = set(read), list[Call]()
    for call in reversed(calls):
        writes = set(call.output_refs())
        if writes & wanted or not writes or writes & set(call.input_refs()):
            needed.append(call)
            wanted |= set(call.input_refs())
    return needed[::-1]


def _in_words(code: str) -> str:
    """Code in which the limits of dtypes go by their names."""
    return _NUMBER.sub(lambda number: _LIMITS.get(number[0], number[0]), code)
