"""A program as Python source: inputs as literals, then one statement per call, grouped under the modes they ran in.

What runs is exactly what `program.run` runs. A value that only one later call reads is written into that call where the
user wrote both on one line, or one right after the other. Tensors that no short expression describes are listed for a
side file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any

import torch

from reprokit.program.functions import all_written, hidden_writes, is_in_place
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import BACKWARD, OPAQUE, ZERO_GRAD, Call, Input, Mode, Program, Ref, iter_refs
from reprokit.render import call_code, names
from reprokit.render.call_code import Statement, write_step
from reprokit.render.expression import WIDTH, Expr, fold
from reprokit.render.literals import Literal, as_given, literal
from reprokit.render.names import Identifiers, input_words, result_words
from reprokit.shrink.plainness import seed_of


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
                is_result = outputs.value in self._keep and not self._reads.uses[outputs.value]
                return self._give(outputs.value, "out" if is_result else names.name_for_output(call), index)
            return None if is_in_place(call.target) else self._names[outputs.value]
        if not call.output_refs() or not isinstance(outputs, (list, tuple)):
            return None
        if self._is_indexable(call, outputs):
            name = self._names.unique(
                {"where": "places", "nonzero": "places", "chunk": "chunks"}.get(call.name, "parts")
            )
            for place, part in enumerate(outputs):
                self._names.adopt(part.value, f"{name}[{place}]")
            return name
        return self._unpacked(outputs, iter(names.names_for_parts(call, len(outputs))), index)

    def _is_indexable(self, call: Call, outputs: Any) -> bool:
        """True if there are too many parts for a name each, and none is written in place."""
        places = (all_written(other.target, other.args, other.kwargs) for other in self._program.calls)
        written = {ref for place in places for ref in iter_refs(place)}
        is_plain = all(isinstance(part, Ref) and part.value not in self._names for part in outputs)
        has_names_for_parts = len(set(names.names_for_parts(call, len(outputs)))) > 1
        is_named = has_names_for_parts or any(ref.value in self._nouns for ref in iter_refs(outputs))
        return len(outputs) > (_MAX_PARTS if is_named else 2) and is_plain and not written.intersection(outputs)

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


MAX_INLINE = 48
_MAX_INLINE_IN_LINE = 64
MAX_INPUT_LINES = 24
SIDE_FILE = "repro_inputs.pt"
_CONVERSIONS = frozenset(["bool", "contiguous", "double", "float", "half", "int", "long", "to", "type", "type_as"])


@dataclass(frozen=True, slots=True)
class Code:
    """A program in Python.

    ``names`` has the variable of every value that has one, ``expressions`` what a value was last assigned.
    ``side`` holds the tensors that the side file must provide, by name.
    """

    imports: tuple[str, ...]
    inputs: tuple[str, ...]
    body: tuple[str, ...]
    names: Mapping[int, str]
    expressions: Mapping[int, str]
    side: Mapping[str, torch.Tensor] = field(default_factory=dict)


def write_program(
    program: Program,
    tensors: Tensors,
    *,
    keep: Iterable[int] = (),
    given: Mapping[int, str] | None = None,
    written: Mapping[int, Literal] | None = None,
    nouns: Mapping[int, str] | None = None,
    reserved: Iterable[str] = (),
    aside: Iterable[int] = (),
    indent: int = 0,
) -> Code:
    """The program in Python; ``keep`` lists values that must have a variable at the end.

    Inputs in ``given`` are there already under some name and get no line, those in ``written`` are made by another
    expression than their numbers. ``nouns`` are variables that values, and inputs without a name of their own, had in
    the user's code (none if empty); one is used again once the value before is done with. ``reserved`` are names to
    stay away from, inputs in ``aside`` go to the side file whatever they are. The body will be indented by ``indent``.
    """
    # A conversion that returned the very tensor that it was given changes nothing.
    calls = (call for call in program.calls if call.name not in _CONVERSIONS or call.outputs not in call.args[:1])
    program = replace(program, calls=tuple(calls))
    known = Identifiers(frozenset(reserved))
    for value, name in (given or {}).items():
        known.adopt(value, name)
    words = {value: word for value, word in {**result_words(program), **(nouns or {})}.items() if word}
    writer = _Writer(program, tensors, frozenset(keep), known, written or {}, words, frozenset(aside), WIDTH - indent)
    return writer.write()


@dataclass
class _Writer:
    _program: Program
    _tensors: Tensors
    _keep: frozenset[int]
    _names: Identifiers
    _written: Mapping[int, Literal]
    _nouns: Mapping[int, str]
    _aside: frozenset[int]
    _width: int
    _side: dict[str, torch.Tensor] = field(default_factory=dict)
    _inlined: dict[int, Expr] = field(default_factory=dict)
    _waiting: dict[int, tuple[int, Call]] = field(default_factory=dict)
    _lines: list[Line] = field(default_factory=list)
    _expressions: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program = self._program
        self._input_words = names.names_for_inputs(program, {**input_words(program), **self._nouns})
        self._reads = Reads(program, self._keep)
        self._targets = Targets(program, self._reads, self._names, self._nouns, self._keep)
        # values that optimizers step and that nothing differentiates are written as parameters
        groups = [call.kwargs["params"] for call in program.calls if call.is_optimizer_step]
        others = {value for call in program.calls if not call.is_optimizer_step for value in call.input_refs()}
        self._plain_params = frozenset(ref.value for ref in iter_refs(groups)) - others

    def write(self) -> Code:
        for item in self._program.inputs:
            if item.role == "rng" and seed_of(self._tensors[item.value]) is None:
                name = self._names.give(item.value, "rng")
                self._side[name] = self._tensors[item.value].detach().cpu()
        returned = {ref.value for ref in self._program.outputs}
        needed = (i for i in self._program.inputs if i.value in returned or not self._reads.is_unused(i.value))
        given = [item for item in needed if item.role != "rng" and item.value not in self._names]
        inputs = [line for item in given if (line := self._write_input(item))]
        for index, call in enumerate(self._program.calls):
            self._write_call(index, call)
        body = [piece for line in under_modes(self._lines) for piece in fold(line, self._width)]
        head, imports = self._head([*inputs, *body])
        lines = [piece for line in inputs for piece in fold(line)]
        return Code(imports, (*head, *lines), tuple(body), self._names.as_dict(), self._expressions, self._side)

    def _head(self, lines: list[str]) -> tuple[list[str], tuple[str, ...]]:
        imports = ["import torch"]
        if any(re.search(r"\bF\.", line) for line in lines):
            imports.append("import torch.nn.functional as F")
        if not self._side:
            return [], tuple(imports)
        load = f'saved = torch.load(Path(__file__).with_name("{SIDE_FILE}"), weights_only=True)'
        return [load], ("from pathlib import Path", "", *imports)

    # -- inputs --------------------------------------------------------------------------------------------------

    def _write_input(self, item: Input) -> str:
        """The line that makes an input, empty when it reads best where it is used."""
        found = self._written.get(item.value)
        if found is None and item.value not in self._aside:
            found = literal(self._tensors[item.value])
        if found is not None and self._is_inlinable_input(item, found):
            self._inlined[item.value] = Expr(found.text)
            return ""
        name = self._names.give(item.value, self._input_words[item.value])
        line = f"{name} = {self._input_text(item, found, name)}"
        if found is not None and len(fold(line)) > MAX_INPUT_LINES:
            return f"{name} = {self._input_text(item, None, name)}"
        return line

    def _input_text(self, item: Input, found: Literal | None, name: str) -> str:
        if found is None:
            self._side[name] = as_given(self._tensors[item.value])
        text = found.text if found is not None else f'saved["{name}"]'
        if item.value in self._plain_params:
            return f"torch.nn.Parameter({text})"
        if not item.requires_grad:
            return text
        return found.requiring_grad() if found is not None else f"{text}.requires_grad_()"

    def _is_inlinable_input(self, item: Input, found: Literal) -> bool:
        """True if the input is only a gradient or optimizer state that reads best where it is used."""
        if (
            item.requires_grad
            or item.value in self._keep
            or self._reads.uses[item.value] != 1
            or len(found.text) > MAX_INLINE
        ):
            return False
        user = next(call for call in self._program.calls if item.value in call.input_refs())
        return (user.is_differentiation or user.is_optimizer_step) and item.value not in self._plain_params

    # -- calls ---------------------------------------------------------------------------------------------------

    def _write_call(self, index: int, call: Call) -> None:
        if call.target == OPAQUE:
            return
        mode = needed_mode(call)
        if call.mode.rng is not None:
            state = self._tensors[call.mode.rng.value]
            seed = seed_of(state)
            if seed is not None:
                self._add(f"torch.manual_seed({seed})", mode)
            else:
                setter = "torch.cuda.set_rng_state" if state.numel() <= 64 else "torch.set_rng_state"
                self._add(f'{setter}(saved["{self._names[call.mode.rng.value]}"])', mode)
        if call.is_optimizer_step:
            self._lines += [Line(line, mode) for line in write_step(call, self._leaf, self._names, self._tensors)]
            return
        if call.target == ZERO_GRAD:
            owners = [self._leaf(ref).text for ref in iter_refs(call.args)]
            if len(owners) > 2:
                self._add(f"for parameter in [{', '.join(owners)}]:\n    parameter.grad = None", mode)
            else:
                self._lines += [Line(f"{owner}.grad = None", mode) for owner in owners]
            return
        written = self._written_to_fit(call, mode)
        if is_in_place(call.target):
            for value in call.input_refs()[:1]:
                self._expressions.pop(value, None)
        elif isinstance(written, Expr) and isinstance(call.outputs, Ref):
            self._expressions[call.outputs.value] = written.text
        if isinstance(written, Expr) and self._is_inlinable(index, call, written):
            self._inlined[call.output_refs()[0]] = written
            self._waiting[call.output_refs()[0]] = (index, call)
            return
        for value in call.input_refs():
            self._waiting.pop(value, None)
        self._assign(index, call, written, mode)

    def _written_to_fit(self, call: Call, mode: Mode) -> Expr | Statement:
        """The call, with what was to be written into it in lines of its own as long as the line is too long."""
        call = self._without_unit_gradient(call)
        while True:
            written = call_code.write_call(call, self._leaf)
            waiting = [value for value in call.input_refs() if value in self._waiting]
            if not waiting or self._length(call, written, mode) <= self._width:
                return written
            longest = max(waiting, key=lambda value: len(self._inlined[value].text))
            index, made = self._waiting.pop(longest)
            self._assign(index, made, self._inlined.pop(longest), mode)

    def _length(self, call: Call, written: Expr | Statement, mode: Mode) -> int:
        noun = self._nouns.get(call.outputs.value) if isinstance(call.outputs, Ref) else None
        name = len(noun or names.name_for_output(call)) + len(" = ") if isinstance(written, Expr) else 0
        return name + len(written.text) + 4 * (bool(mode.autocast or mode.inference) + (mode.grad == mode.inference))

    def _without_unit_gradient(self, call: Call) -> Call:
        """``backward`` of a real scalar without the gradient that it starts from by itself."""
        given = call_code.as_method(call)
        if given.target != BACKWARD or len(given.args) != 2 or not isinstance(given.args[1], Ref):
            return call
        gradient = self._tensors.get(given.args[1].value)
        if gradient is None or gradient.numel() != 1 or gradient.is_complex() or gradient.item() != 1:
            return call
        return replace(given, args=given.args[:1])

    def _leaf(self, value: Any) -> Expr:
        if not isinstance(value, Ref):
            raise TypeError(f"a program cannot hold `{type(value).__name__}`")
        return self._inlined[value.value] if value.value in self._inlined else Expr(self._names[value.value])

    def _add(self, text: str, mode: Mode) -> None:
        self._lines.append(Line(text, mode))

    def _is_inlinable(self, index: int, call: Call, written: Expr) -> bool:
        """True if only one later call reads the result, so that it can be written there."""
        if not isinstance(call.outputs, Ref) or is_in_place(call.target) or call.mode.rng is not None:
            return False
        value = call.outputs.value
        reader = self._reads.only_reader(value, index) if value not in self._names else None
        if reader is None or needed_mode(call) != needed_mode(reader):
            return False
        if value in self._nouns and not reader.is_differentiation:
            return False
        return len(written.text) <= (_MAX_INLINE_IN_LINE if is_one_line(call, reader) else MAX_INLINE)

    def _assign(self, index: int, call: Call, written: Expr | Statement, mode: Mode) -> None:
        target = self._targets.of(index, call)
        if isinstance(written, Statement) or (target is None and written.text.endswith(")")):
            self._add(written.text, mode)
        elif target is None:  # an expression that raises, or whose result is nothing
            self._add(f"{self._names.unique('out')} = {written.text}", mode)
        else:
            self._add(f"{target} = {written.text}", mode)
