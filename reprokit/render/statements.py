"""Statements of a repro: which call reads which value, the variables of results, the torch modes around neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

from reprokit.program.functions import all_written, hidden_writes, is_in_place
from reprokit.program.ir import BACKWARD, OPAQUE, ZERO_GRAD, Call, Mode, Program, Ref, iter_refs
from reprokit.render import call_code, names
from reprokit.render.names import Identifiers


class Reads:
    """The readers of a program's values; those in ``keep`` are also read from outside, at the end.

    ``uses`` says how often each value is read, repeats within a call included.
    """

    def __init__(self, program: Program, keep: frozenset[int]) -> None:
        self._calls = program.calls
        self._keep = keep
        self._last = _last_uses(program)
        self.uses = Counter(ref.value for call in program.calls for ref in iter_refs((call.args, call.kwargs)))

    def is_unused(self, value: int) -> bool:
        """True if nobody asks for a value."""
        return not self.uses[value] and value not in self._keep

    def is_done(self, value: int, index: int) -> bool:
        """True if nobody asks for a value after call number ``index``."""
        return value not in self._keep and self._last.get(value, -1) <= index

    def only_reader(self, value: int, index: int) -> Call | None:
        """The one call that the expression of call number ``index`` can stand in: the next one, or a later one on the
        same line if all between go into it."""
        if value in self._keep or self.uses[value] != 1:
            return None
        made = self._calls[index]
        for call in self._calls[index + 1 :]:
            if value in call.input_refs():
                return call if _may_hold(call, value) else None
            is_whole_value = isinstance(call.outputs, Ref) and self.uses[call.outputs.value] == 1
            if not (is_one_line(made, call) and is_whole_value and _is_pure(made) and _is_pure(call)):
                return None
        return None


def _may_hold(reader: Call, value: int) -> bool:
    """True if the expression of a value can stand in the call that reads it."""
    if reader.is_differentiation:
        owner = call_code.as_method(reader)
        return owner.target == BACKWARD and owner.args[0] == Ref(value)
    if reader.target in (OPAQUE, ZERO_GRAD) or reader.is_optimizer_step or reader.mode.rng is not None:
        return False
    written = iter_refs(all_written(reader.target, reader.args, reader.kwargs))
    return Ref(value) not in written and value not in reader.output_refs()


def _is_pure(call: Call) -> bool:
    """True if it makes no difference when the call runs."""
    is_special = call.target in (OPAQUE, ZERO_GRAD) or call.is_differentiation or call.is_optimizer_step
    if is_special or call.mode.rng is not None:
        return False
    written = chain.from_iterable(find(call.target, call.args, call.kwargs) for find in (all_written, hidden_writes))
    return next(iter_refs(list(written)), None) is None


def is_one_line(one: Call, other: Call) -> bool:
    """True if the user wrote both calls in one statement of one function."""
    if one.site is None or other.site is None:
        return False
    lines = [(site.file, site.first_line, site.function) for site in (one.site, other.site)]
    return lines[0] == lines[1] and one.scope == other.scope


def _last_uses(program: Program) -> dict[int, int]:
    last: dict[int, int] = {}
    for index, call in enumerate(program.calls):
        last.update(dict.fromkeys((*call.input_refs(), *call.output_refs()), index))
    last.update({ref.value: len(program.calls) for ref in program.outputs})
    return last


def only_optimized(program: Program) -> frozenset[int]:
    """Values that optimizers step and that nothing differentiates: written as parameters."""
    stepped = {
        ref.value for call in program.calls if call.is_optimizer_step for ref in iter_refs(call.kwargs["params"])
    }
    others = [call for call in program.calls if not call.is_optimizer_step]
    return frozenset(stepped - {value for call in others for value in call.input_refs()})


_MAX_PARTS = 6


@dataclass
class Targets:
    """Hands out the variables of results. ``nouns`` are those that values had in the user's code."""

    _program: Program
    _reads: Reads
    _names: Identifiers
    _nouns: Mapping[int, str]
    _keep: frozenset[int]

    def of(self, index: int, call: Call) -> str | None:
        """The target left of the equals sign, ``None`` if none is needed."""
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
        has_names_for_parts = len(set(names.names_for_parts(call, len(outputs)))) > 1
        is_named = has_names_for_parts or any(ref.value in self._nouns for ref in iter_refs(outputs))
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
        own = names.identifier(self._nouns.get(value, ""))
        if own is None:
            return self._names.give(value, noun)
        return self._names.reuse(value, own, lambda other: self._reads.is_done(other, index))

    def _noun(self, value: int, noun: str) -> str:
        return "out" if value in self._keep and not self._reads.uses[value] else noun


@dataclass(frozen=True, slots=True)
class Line:
    """A statement and the modes it needs."""

    text: str
    mode: Mode


def needed_mode(call: Call) -> Mode:
    """The call's modes, less those that make no difference to it."""
    mode = replace(call.mode, rng=None)
    sets_its_own = call.is_differentiation and call.target != "torch.autograd.grad"
    if sets_its_own or call.is_optimizer_step or call.target == ZERO_GRAD:
        return replace(mode, grad=not mode.inference)
    return mode


def under_modes(lines: Sequence[Line]) -> Iterator[str]:
    """The statements in ``with`` blocks; neighbours in the same autocast share a block, as they share its cache."""
    for (autocast, inference), block in groupby(lines, key=lambda line: (line.mode.autocast, line.mode.inference)):
        group = list(block)
        outer = [f'torch.autocast("{device}", dtype={dtype})' for device, dtype in autocast]
        outer = ["torch.inference_mode()", *outer] if inference else outer
        runs = [(grad, list(part)) for grad, part in groupby(group, key=lambda line: line.mode.grad)]
        if outer and len(runs) == 1 and runs[0][0] == inference:
            outer.append(_grad_mode(runs[0][0]))
            runs = [(not inference, runs[0][1])]
        if outer:
            yield f"with {', '.join(outer)}:"
        for grad, part in runs:
            indent = "    " * bool(outer)
            if grad == inference:
                yield f"{indent}with {_grad_mode(grad)}:"
                indent += "    "
            for line in part:
                yield from (indent + piece for piece in line.text.split("\n"))


def _grad_mode(grad: bool) -> str:
    return "torch.enable_grad()" if grad else "torch.no_grad()"
