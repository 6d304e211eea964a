"""What stands left of the equals sign: variables for the results of calls, with the user's own names where known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reprokit.program.functions import all_written, is_in_place
from reprokit.program.ir import Call, Program, Ref, iter_refs
from reprokit.render import names
from reprokit.render.names import Names
from reprokit.render.reads import Reads

_MAX_PARTS = 6


class Targets:
    """Hands out the variables of results. ``nouns`` are those that values had in the user's code."""

    def __init__(
        self, program: Program, reads: Reads, known: Names, nouns: Mapping[int, str], keep: frozenset[int]
    ) -> None:
        self._program = program
        self._reads = reads
        self._names = known
        self._nouns = nouns
        self._keep = keep

    def of(self, index: int, call: Call) -> str | None:
        """What stands left of the equals sign, or ``None`` when nothing needs to."""
        outputs = call.outputs
        if isinstance(outputs, Ref):
            if outputs.value not in self._names:
                return self._give(outputs.value, self._noun(outputs.value, names.name_for_output(call)), index)
            return None if is_in_place(call.target) else self._names[outputs.value]
        if not call.output_refs() or not isinstance(outputs, (list, tuple)):
            return None
        if self._is_indexable(call, outputs):
            return self._indexed(outputs, names.name_for_list(call))
        return self._unpacked(outputs, iter(names.names_for_parts(call, len(outputs))), index)

    def _is_indexable(self, call: Call, outputs: Any) -> bool:
        """True if there are too many parts for a name each, and none is written in place."""
        places = (all_written(other.target, other.args, other.kwargs) for other in self._program.calls)
        written = {ref for place in places for ref in iter_refs(place)}
        is_plain = all(isinstance(part, Ref) and part.value not in self._names for part in outputs)
        is_named = any(ref.value in self._nouns for ref in iter_refs(outputs)) or not _is_alike(call, outputs)
        return len(outputs) > (_MAX_PARTS if is_named else 2) and is_plain and not written.intersection(outputs)

    def _indexed(self, outputs: Any, noun: str) -> str:
        """One variable for all parts, which go by their places in it."""
        name = self._names.unique(noun)
        for place, part in enumerate(outputs):
            self._names.adopt(part.value, f"{name}[{place}]")
        return name

    def _unpacked(self, outputs: Any, nouns: Iterator[str], index: int) -> str:
        parts = []
        for part in outputs:
            noun = next(nouns, "part")
            if isinstance(part, (list, tuple)):
                parts.append(f"({self._unpacked(part, iter(()), index)})")
            elif not isinstance(part, Ref) or self._reads.is_unused(part.value):
                parts.append("_")
            elif part.value in self._names:
                parts.append(self._names[part.value])
            else:
                parts.append(self._give(part.value, noun, index))
        return ", ".join(parts) + ("," if len(parts) == 1 else "")

    def _give(self, value: int, noun: str, index: int) -> str:
        """The variable for what call number ``index`` returned."""
        own = names.identifier(self._nouns.get(value, ""))
        if own is None:
            return self._names.give(value, noun)
        return self._names.reuse(value, own, lambda other: self._reads.is_done(other, index))

    def _noun(self, value: int, noun: str) -> str:
        return "out" if value in self._keep and not self._reads.uses[value] else noun


def _is_alike(call: Call, outputs: Sequence[Any]) -> bool:
    """True if the parts of a result have no names of their own."""
    return len(set(names.names_for_parts(call, len(outputs)))) == 1
