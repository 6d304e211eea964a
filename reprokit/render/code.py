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
from itertools import groupby
from typing import Any

import torch

from reprokit.program.functions import all_written, hidden_writes, is_in_place
from reprokit.program.ir import BACKWARD, OPAQUE, ZERO_GRAD, Call, Input, Mode, Program, Ref, iter_refs
from reprokit.program.run import Tensors
from reprokit.render import calls, names
from reprokit.render.calls import Statement
from reprokit.render.expression import Expr
from reprokit.render.layout import WIDTH, fold
from reprokit.render.literals import Literal, as_given, literal
from reprokit.render.names import Names
from reprokit.render.optimizers import write_step
from reprokit.render.spelling import input_words, result_words
from reprokit.shrink.plainness import seed_of

MAX_INLINE = 48
_MAX_INLINE_IN_LINE = 64
_MAX_PARTS = 6
MAX_INPUT_LINES = 24
SIDE_FILE = "repro_inputs.pt"
_CONVERSIONS = frozenset(["bool", "contiguous", "double", "float", "half", "int", "long", "to", "type", "type_as"])
_DTYPE = re.compile(r"\bdtype=(torch\.(?:b?float\d*|float8\w+|complex\d+))")


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


@dataclass(slots=True)
class _Line:
    """A statement and the modes it needs."""

    text: str
    mode: Mode


def write_program(
    program: Program,
    tensors: Tensors,
    *,
    keep: Iterable[int] = (),
    side_file: str = SIDE_FILE,
    given: Mapping[int, str] | None = None,
    written: Mapping[int, Literal] | None = None,
    nouns: Mapping[int, str] | None = None,
    reserved: Iterable[str] = (),
    aside: Iterable[int] = (),
    indent: int = 0,
) -> Code:
    """The program in Python; ``keep`` lists values that must have a variable at the end.

    Inputs in ``given`` are there already under some name and get no line, those in ``written`` are made by another
    expression than their numbers. ``nouns`` are variables that values had in the user's code; one is used again once
    the value before is done with. ``reserved`` are names to stay away from, inputs in ``aside`` go to the side file
    whatever they are. The body will be indented by ``indent``.
    """
    program = replace(program, calls=tuple(call for call in program.calls if not _changes_nothing(call)))
    known = Names(frozenset(reserved))
    for value, name in (given or {}).items():
        known.adopt(value, name)
    words = {**result_words(program), **(nouns or {})}
    return _Writer(
        program,
        tensors,
        frozenset(keep),
        side_file,
        known,
        written or {},
        words,
        frozenset(aside),
        WIDTH - indent,
    ).write()


class _Writer:
    def __init__(
        self,
        program: Program,
        tensors: Tensors,
        keep: frozenset[int],
        side_file: str,
        known: Names,
        written: Mapping[int, Literal],
        nouns: Mapping[int, str],
        aside: frozenset[int],
        width: int,
    ) -> None:
        self._program = program
        self._tensors = tensors
        self._keep = keep
        self._side_file = side_file
        self._names = known
        self._written = written
        self._nouns = nouns
        self._aside = aside
        self._width = width
        self._input_words = names.names_for_inputs(program, input_words(program))
        self._last_uses = _last_uses(program)
        self._side: dict[str, torch.Tensor] = {}
        self._inlined: dict[int, Expr] = {}
        self._waiting: dict[int, tuple[int, Call]] = {}
        self._lines: list[_Line] = []
        self._expressions: dict[int, str] = {}
        self._uses = _count_uses(program)
        self._plain_params = _only_optimized(program)

    def write(self) -> Code:
        self._name_random_states()
        inputs = _with_one_dtype([self._write_input(item) for item in self._needed_inputs()])
        for index, call in enumerate(self._program.calls):
            self._write_call(index, call)
        body = [piece for line in _under_modes(self._lines) for piece in fold(line, self._width)]
        head, imports = self._head([*inputs, *body])
        lines = [piece for line in inputs for piece in fold(line)]
        return Code(imports, (*head, *lines), tuple(body), self._names.as_dict(), self._expressions, self._side)

    def _head(self, lines: list[str]) -> tuple[list[str], tuple[str, ...]]:
        imports = ["import torch"]
        if any(re.search(r"\bF\.", line) for line in lines):
            imports.append("import torch.nn.functional as F")
        if not self._side:
            return [], tuple(imports)
        load = f'saved = torch.load(Path(__file__).with_name("{self._side_file}"), weights_only=True)'
        return [load], ("from pathlib import Path", "", *imports)

    # -- inputs --------------------------------------------------------------------------------------------------

    def _needed_inputs(self) -> list[Input]:
        wanted = {ref.value for ref in self._program.outputs} | self._keep
        return [
            item
            for item in self._program.inputs
            if item.role != "rng" and item.value not in self._names and (self._uses[item.value] or item.value in wanted)
        ]

    def _name_random_states(self) -> None:
        for item in self._program.inputs:
            if item.role == "rng" and seed_of(self._tensors[item.value]) is None:
                name = self._names.give(item.value, "rng")
                self._side[name] = self._tensors[item.value].detach().cpu()

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
        """Whether the input is only a gradient or optimizer state that reads best where it is used."""
        if (
            item.requires_grad
            or item.value in self._keep
            or self._uses[item.value] != 1
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
            self._write_random_state(call.mode.rng.value, mode)
        if call.is_optimizer_step:
            for line in write_step(call, self._leaf, self._names, self._tensors):
                self._add(line, mode)
            return
        if call.target == ZERO_GRAD:
            self._write_zero_grad(call, mode)
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
            written = calls.write_call(call, self._leaf)
            waiting = [value for value in call.input_refs() if value in self._waiting]
            if not waiting or self._length(call, written, mode) <= self._width:
                return written
            longest = max(waiting, key=lambda value: len(self._inlined[value].text))
            index, made = self._waiting.pop(longest)
            self._assign(index, made, self._inlined.pop(longest), mode)

    def _length(self, call: Call, written: Expr | Statement, mode: Mode) -> int:
        """How long the line gets, about."""
        noun = self._nouns.get(call.outputs.value) if isinstance(call.outputs, Ref) else None
        name = len(noun or names.name_for_output(call)) + len(" = ") if isinstance(written, Expr) else 0
        return name + len(written.text) + 4 * (bool(mode.autocast or mode.inference) + (mode.grad == mode.inference))

    def _without_unit_gradient(self, call: Call) -> Call:
        """``backward`` of a real scalar without the gradient that it starts from by itself."""
        given = calls.as_method(call)
        if given.target != BACKWARD or len(given.args) != 2 or not isinstance(given.args[1], Ref):
            return call
        gradient = self._tensors.get(given.args[1].value)
        if gradient is None or gradient.numel() != 1 or gradient.is_complex() or gradient.item() != 1:
            return call
        return replace(given, args=given.args[:1])

    def _write_random_state(self, value: int, mode: Mode) -> None:
        """Start the generator from a seed, or from a state in the side file."""
        state = self._tensors[value]
        seed = seed_of(state)
        if seed is not None:
            self._add(f"torch.manual_seed({seed})", mode)
            return
        setter = "torch.cuda.set_rng_state" if state.numel() <= 64 else "torch.set_rng_state"
        self._add(f'{setter}(saved["{self._names[value]}"])', mode)

    def _leaf(self, value: Any) -> Expr:
        if not isinstance(value, Ref):
            raise TypeError(f"a program cannot hold `{type(value).__name__}`")
        return self._inlined[value.value] if value.value in self._inlined else Expr(self._names[value.value])

    def _add(self, text: str, mode: Mode) -> None:
        self._lines.append(_Line(text, mode))

    def _write_zero_grad(self, call: Call, mode: Mode) -> None:
        owners = [self._leaf(ref).text for ref in iter_refs(call.args)]
        if len(owners) <= 2:
            for owner in owners:
                self._add(f"{owner}.grad = None", mode)
            return
        self._add(f"for parameter in [{', '.join(owners)}]:\n    parameter.grad = None", mode)

    def _is_inlinable(self, index: int, call: Call, written: Expr) -> bool:
        """Whether only one later call reads the result, so that it can be written there."""
        if not isinstance(call.outputs, Ref) or is_in_place(call.target) or call.mode.rng is not None:
            return False
        value = call.outputs.value
        if value in self._keep or value in self._names or self._uses[value] != 1:
            return False
        reader = self._reader(value, index)
        if reader is None or not self._may_hold(reader, value) or needed_mode(call) != needed_mode(reader):
            return False
        limit = _MAX_INLINE_IN_LINE if _is_one_line(call, reader) else MAX_INLINE
        if value in self._nouns and not reader.is_differentiation:
            return False
        return len(written.text) <= limit

    def _reader(self, value: int, index: int) -> Call | None:
        """The call that reads a value: the next one, or a later one on the same line if all between go into it."""
        calls = self._program.calls
        made = calls[index]
        for call in calls[index + 1 :]:
            if value in call.input_refs():
                return call
            is_whole_value = isinstance(call.outputs, Ref) and self._uses[call.outputs.value] == 1
            if not (_is_one_line(made, call) and is_whole_value and _is_pure(made) and _is_pure(call)):
                return None
        return None

    def _may_hold(self, reader: Call, value: int) -> bool:
        """Whether the expression of a value can stand in the call that reads it."""
        if reader.is_differentiation:
            owner = calls.as_method(reader)
            return owner.target == BACKWARD and owner.args[0] == Ref(value)
        if reader.target in (OPAQUE, ZERO_GRAD) or reader.is_optimizer_step or reader.mode.rng is not None:
            return False
        is_written = is_in_place(reader.target) and Ref(value) in (*reader.args[:1], *reader.kwargs.values())
        return not is_written and value not in reader.output_refs()

    def _assign(self, index: int, call: Call, written: Expr | Statement, mode: Mode) -> None:
        target = self._target(index, call)
        if isinstance(written, Statement) or (target is None and written.text.endswith(")")):
            self._add(written.text, mode)
        elif target is None:  # an expression that raises, or whose result is nothing
            self._add(f"{self._names.unique('out')} = {written.text}", mode)
        else:
            self._add(f"{target} = {written.text}", mode)

    def _target(self, index: int, call: Call) -> str | None:
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
        """Whether there are too many parts for a name each, and none is written in place."""
        written = {ref for c in self._program.calls if is_in_place(c.target) for ref in iter_refs(c.args[:1])}
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
            elif not isinstance(part, Ref) or not (self._uses[part.value] or part.value in self._keep):
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
        return self._names.reuse(
            value, own, lambda other: other not in self._keep and self._last_uses.get(other, -1) <= index
        )

    def _noun(self, value: int, noun: str) -> str:
        return "out" if value in self._keep and not self._uses[value] else noun


def _changes_nothing(call: Call) -> bool:
    """Whether a conversion returned the very tensor that it was given."""
    return call.name in _CONVERSIONS and bool(call.args) and call.outputs == call.args[0]


def _is_pure(call: Call) -> bool:
    """Whether it makes no difference when the call runs."""
    is_special = call.target in (OPAQUE, ZERO_GRAD) or call.is_differentiation or call.is_optimizer_step
    if is_special or call.mode.rng is not None:
        return False
    written = (given(call.target, call.args, call.kwargs) for given in (all_written, hidden_writes))
    return next(iter_refs(list(written)), None) is None


def _is_alike(call: Call, outputs: Sequence[Any]) -> bool:
    """Whether the parts of a result have no names of their own."""
    return len(set(names.names_for_parts(call, len(outputs)))) == 1


def _is_one_line(one: Call, other: Call) -> bool:
    """Whether the user wrote both calls on one line of one function."""
    if one.site is None or other.site is None:
        return False
    lines = [(site.file, site.line, site.function) for site in (one.site, other.site)]
    return lines[0] == lines[1] and one.scope == other.scope


def _with_one_dtype(lines: Iterable[str]) -> list[str]:
    """The lines, with a dtype that several of them name said once."""
    written = [line for line in lines if line]
    dtypes = Counter(found for line in written for found in set(_DTYPE.findall(line)))
    (dtype, count), *_ = [*dtypes.most_common(1), ("", 0)]
    if count < 2:
        return written
    return [f"dtype = {dtype}", *(re.sub(rf"\bdtype={dtype}\b", "dtype=dtype", line) for line in written)]


def _count_uses(program: Program) -> Counter[int]:
    """How often every value is read, repeats within a call included."""
    uses: Counter[int] = Counter(
        ref.value for call in program.calls for ref in iter_refs((call.args, dict(call.kwargs)))
    )
    return uses


def _last_uses(program: Program) -> dict[int, int]:
    """The number of the last call that reads or returns each value; what the program returns is used at its end."""
    last: dict[int, int] = {}
    for index, call in enumerate(program.calls):
        last.update(dict.fromkeys((*call.input_refs(), *call.output_refs()), index))
    last.update({ref.value: len(program.calls) for ref in program.outputs})
    return last


def _only_optimized(program: Program) -> frozenset[int]:
    """Values that optimizers step and that nothing differentiates: written as parameters."""
    stepped = {
        ref.value for call in program.calls if call.is_optimizer_step for ref in iter_refs(call.kwargs["params"])
    }
    others = [call for call in program.calls if not call.is_optimizer_step]
    return frozenset(stepped - {value for call in others for value in call.input_refs()})


def needed_mode(call: Call) -> Mode:
    """The call's modes, less those that make no difference to it."""
    mode = replace(call.mode, rng=None)
    sets_its_own = call.is_differentiation and call.target != "torch.autograd.grad"
    if sets_its_own or call.is_optimizer_step or call.target == ZERO_GRAD:
        return replace(mode, grad=not mode.inference)
    return mode


def _under_modes(lines: list[_Line]) -> Iterator[str]:
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
