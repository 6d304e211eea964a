"""A program as the Python that a person would have written for it: what runs is exactly what `program.run` runs.

Operators instead of ``torch.Tensor.add``, methods and attributes on their tensor, ``F.`` for functionals, public
functions for torch's private ones, and no argument that only repeats a default. Defaults are trusted only where the
function is written in Python. A value that only one later call reads is written into that call where the user wrote
both on one line, or one right after the other. Tensors that no short expression describes go to a side file.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from reprokit.locate.spelling import exact_signature_of, is_default, signature_of
from reprokit.program.functions import all_written, hidden_writes, is_in_place
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import (
    AUTOGRAD_BACKWARD,
    BACKWARD,
    OPAQUE,
    PACK,
    ZERO_GRAD,
    Call,
    Input,
    Mode,
    Program,
    Ref,
    iter_refs,
    map_leaves,
)  # fmt: skip
from reprokit.render import names, source
from reprokit.render.literals import Literal, as_given, literal
from reprokit.render.names import AUGMENTED, BINARY, REFLECTED, UNARY, Identifiers, match_of, schemas_of
from reprokit.render.source import Leaf, argument, assign, constant, fill, method, path, subscript
from reprokit.shrink.plainness import seed_of

_METHOD = "torch.Tensor."
_FUNCTIONAL = "torch.nn.functional."
_UNPACK = "torch._pad_packed_sequence"
_RNN = "nn.utils.rnn"


def expression(text: str) -> ast.expr:
    """The node of an expression of ours, such as that of a literal."""
    return ast.parse(text, mode="eval").body


def write_call(call: Call, leaf: Leaf) -> ast.expr | ast.stmt:
    """The call as an expression, or as a statement where it has no value, such as ``x += 1`` or ``x[mask] = 0``."""
    call = as_method(call)
    if call.target.startswith(_METHOD) and call.args and isinstance(call.args[0], Ref):
        match = match_of(call)  # the user may have written ``x.add(y)`` where ``x + y`` would do
        is_method = match is not None and isinstance(match[0], ast.Call)
        short = (None if is_method else _operator(call, leaf)) or (None if call.kwargs else _access(call, leaf))
        if short is not None:
            return short
    if call.target in (PACK, _UNPACK):
        return _of_packed(call, leaf)
    arguments, keywords = _needed_arguments(call)
    args = [argument(value, leaf) for value in arguments]
    kwargs = {name: argument(value, leaf) for name, value in keywords.items()}
    if call.target.startswith(_METHOD) and args and isinstance(call.args[0], Ref):
        return method(args[0], call.name, args[1:], kwargs)
    return source.call(callee(call.target), args, kwargs)


def _of_packed(call: Call, leaf: Leaf) -> ast.expr:
    """The public functions of packed sequences, for the private ones that they call."""
    defaults = {"batch_first": False, "padding_value": 0.0, "total_length": None}
    first, second = (leaf(value) for value in call.args[:2])
    options = {name: value for name, value in zip(defaults, call.args[2:], strict=False) if value != defaults[name]}
    kwargs = {name: argument(value, leaf) for name, value in options.items()}
    if call.target == PACK:
        return source.call(f"{_RNN}.pack_padded_sequence", [first, second], kwargs)
    packed = source.call(f"{_RNN}.PackedSequence", [first, second])
    return source.call(f"{_RNN}.pad_packed_sequence", [packed], kwargs)


def callee(target: str) -> str:
    return f"F.{target[len(_FUNCTIONAL) :]}" if target.startswith(_FUNCTIONAL) else target


def call_text(call: Call, labels: Mapping[int, str]) -> str:
    """A call in one line for texts, with the labels of its tensors."""
    if call.target == OPAQUE:
        return f"{call.kwargs.get('name', 'opaque')}(...)"
    if call.is_optimizer_step:
        return f"{'.'.join(call.target.split('.')[2:])}()"
    written = write_call(call, lambda ref: ast.Name(labels[ref.value]))
    targets = [labels[value] for value in call.output_refs() if value not in call.input_refs()]
    is_named = targets and isinstance(written, ast.expr)
    return f"{', '.join(targets)} = {source.text(written)}" if is_named else source.text(written)


def as_method(call: Call) -> Call:
    """``torch.autograd.backward`` of one tensor as that tensor's method."""
    names = ("grad_tensors", "retain_graph", "create_graph")
    if call.target != AUTOGRAD_BACKWARD or not 0 < len(call.args) <= 1 + len(names):
        return call
    keywords = {**dict(zip(names, call.args[1:], strict=False)), **call.kwargs}
    only = _only(call.args[0])
    if not isinstance(only, Ref) or not keywords.keys() <= {*names, "inputs"}:
        return call
    gradient = _only(keywords.pop("grad_tensors", None))
    args = (only,) if gradient is None else (only, gradient)
    return replace(call, target=BACKWARD, args=args, kwargs=keywords, outputs=None)


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _operator(call: Call, leaf: Leaf) -> ast.expr | ast.stmt | None:
    """The call with an operator, ``None`` if it has none; then ``leaf`` was not asked."""
    name, owner = call.name, call.args[0]
    if name in UNARY and len(call.args) == 1 and not call.kwargs:
        return ast.UnaryOp(UNARY[name](), leaf(owner))
    values = [*call.args[1:], *call.kwargs.values()]
    if len(values) != 1 or not call.kwargs.keys() <= {"other"} or not isinstance(values[0], (int, float, complex, Ref)):
        return None
    if name in BINARY:
        operator, left, right = BINARY[name](), leaf(owner), argument(values[0], leaf)
        if isinstance(operator, ast.cmpop):
            return ast.Compare(left, [operator], [right])
        return ast.BinOp(left, operator, right)
    if name in REFLECTED and not isinstance(values[0], Ref):
        return ast.BinOp(argument(values[0], leaf), REFLECTED[name](), leaf(owner))
    if name in AUGMENTED and call.outputs in (None, owner):
        target: Any = leaf(owner)
        return ast.AugAssign(target, AUGMENTED[name](), argument(values[0], leaf))
    return None


def _access(call: Call, leaf: Leaf) -> ast.expr | ast.stmt | None:
    owner, rest = call.args[0], call.args[1:]
    attribute = call.target[len(_METHOD) :].partition(".")[0]
    match call.name, len(rest):
        case "__getitem__", 1:
            return subscript(leaf(owner), rest[0], leaf)
        case "__setitem__", 2:
            return assign(subscript(leaf(owner), rest[0], leaf), argument(rest[1], leaf))
        case "__get__", 0:
            return ast.Attribute(leaf(owner), attribute)
        case "__set__", 1:
            return assign(ast.Attribute(leaf(owner), attribute), argument(rest[0], leaf))
    return None


def _needed_arguments(call: Call) -> tuple[list[Any], dict[str, Any]]:
    """The arguments without those that only repeat a default; from the first ``True`` or ``False`` on by keyword.

    Of a builtin only the defaults that are ``None`` can be relied on, and the names on which all overloads agree.
    """
    exact, empty = exact_signature_of(call.target), inspect.Parameter.empty
    known = signature_of(call.target).items()
    parameters = {n: p if exact or p.default is None else p.replace(default=empty) for n, p in known}
    keywords = {n: v for n, v in call.kwargs.items() if n != "_stacklevel" and not is_default(v, parameters.get(n))}
    arguments, positional = list(call.args), list(parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in positional):
        return arguments, keywords
    if call.name != "random_":  # `random_(1, None)` is not `random_(1)`
        while 0 < len(arguments) <= len(positional) and is_default(arguments[-1], positional[len(arguments) - 1]):
            arguments.pop()
    count = len(arguments)
    first = next((place for place, value in enumerate(arguments) if place and isinstance(value, bool)), count)
    plain = [name for name, item in exact.items() if item.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    fitting = {
        tuple(name for name, _ in schema[:count])
        for schema in schemas_of(call.target)
        if len(schema) >= count and all(isinstance(v, bool) == t for v, (_, t) in zip(arguments, schema, strict=False))
    }
    names = {tuple(plain[:count])} if exact and len(plain) >= count else fitting if not exact else set()
    if len(names) != 1:
        return arguments, keywords
    return arguments[:first], {**dict(zip(names.pop()[first:], arguments[first:], strict=True)), **keywords}


def write_step(call: Call, leaf: Leaf, opt: str, tensors: Tensors) -> Iterator[ast.stmt]:
    """The statements of a ``torch.optim.<Class>.step`` call: gradients, the optimizer with its unusual options and
    its state, the step."""
    groups = [call.kwargs[part] for part in ("params", "grads", "options", "state")]
    cls, optimizer = call.target.rpartition(".")[0], ast.Name(opt)
    for params, grads, _, _ in zip(*groups, strict=True):
        for param, grad in zip(params, grads, strict=True):
            if grad is not None:
                yield assign(ast.Attribute(leaf(param), "grad"), leaf(grad))
    defaults = {name: _identity(value) for name, value in _make(cls).defaults.items()}
    unusual = [{n: v for n, v in o.items() if defaults.get(n, _identity(v)) != _identity(v)} for o in groups[2]]
    given = [options if _is_accepted(cls, options, tensors) else {} for options in unusual]
    if len(given) == 1:
        made = source.call(cls, [argument(groups[0][0], leaf)], {n: argument(v, leaf) for n, v in given[0].items()})
    else:
        parts = [{"params": params, **options} for params, options in zip(groups[0], given, strict=True)]
        made = source.call(cls, [argument(parts, leaf)])
    yield assign(optimizer, made)
    for place, (options, accepted) in enumerate(zip(unusual, given, strict=True)):
        if options != accepted:
            changed = {name: argument(value, leaf) for name, value in options.items()}
            yield ast.Expr(source.call(path(f"{opt}.param_groups[{place}].update"), [], changed))
    for params, _, _, states in zip(*groups, strict=True):
        for param, state in zip(params, states, strict=True):
            if state:
                held = ast.Subscript(ast.Attribute(optimizer, "state"), leaf(param))
                yield assign(held, argument(dict(state), leaf))
    yield ast.Expr(method(optimizer, "step"))


def _identity(value: Any) -> Any:
    """Equal for options that are the same: ``0`` is not ``False``, and a list may be a tuple."""
    return ("several", *value) if isinstance(value, (list, tuple)) else (type(value), value)


def _is_accepted(cls: str, options: Mapping[str, Any], tensors: Tensors) -> bool:
    given = map_leaves(options, lambda leaf: tensors.get(leaf.value) if isinstance(leaf, Ref) else leaf)
    try:
        _make(cls, **given)
    except (ValueError, TypeError, RuntimeError):
        return False
    return True


def _make(cls: str, **options: Any) -> Any:
    made: Any = getattr(torch.optim, cls.rpartition(".")[2])
    return made([torch.zeros(1, 1)], **options)  # a matrix, because some optimizers take nothing else


def _may_hold(reader: Call, value: int) -> bool:
    """True if the expression of a value can stand in the call that reads it."""
    if reader.is_differentiation:
        owner = as_method(reader)
        return owner.target == BACKWARD and owner.args[0] == Ref(value)
    if reader.target in (OPAQUE, ZERO_GRAD) or reader.is_optimizer_step or reader.mode.rng is not None:
        return False
    written = iter_refs(all_written(reader.target, reader.args, reader.kwargs))
    return Ref(value) not in written and value not in reader.output_refs()


def _is_pure(call: Call) -> bool:
    """True if it makes no difference when the call runs."""
    is_special = call.target in (OPAQUE, ZERO_GRAD) or call.is_differentiation or call.is_optimizer_step
    written = (find(call.target, call.args, call.kwargs) for find in (all_written, hidden_writes))
    return not is_special and call.mode.rng is None and not any(list(iter_refs(list(places))) for places in written)


def is_one_line(one: Call, other: Call) -> bool:
    """True if the user wrote both calls in one statement of one function."""
    if one.site is None or other.site is None:
        return False
    lines = [(site.file, site.first_line, site.function) for site in (one.site, other.site)]
    return lines[0] == lines[1] and one.scope == other.scope


def needed_mode(call: Call) -> Mode:
    """The call's modes, less those that make no difference to it."""
    mode = replace(call.mode, rng=None)
    sets_its_own = call.is_differentiation and call.target != "torch.autograd.grad"
    if sets_its_own or call.is_optimizer_step or call.target == ZERO_GRAD:
        return replace(mode, grad=not mode.inference)
    return mode


Line = tuple[ast.stmt, Mode]


def under_modes(lines: Sequence[Line]) -> Iterator[ast.stmt]:
    """The statements in ``with`` blocks; neighbours in the same autocast share a block, as they share its cache."""

    def block(around: list[ast.expr], body: list[ast.stmt]) -> list[ast.stmt]:
        return [ast.With([ast.withitem(item) for item in around], body)] if around else body

    for (autocast, inference), part in groupby(lines, key=lambda line: (line[1].autocast, line[1].inference)):
        outer = [source.call("torch.inference_mode")] * inference
        outer += [source.call("torch.autocast", [constant(device)], {"dtype": path(name)}) for device, name in autocast]
        runs = [(grad, [line for line, _ in run]) for grad, run in groupby(part, key=lambda line: line[1].grad)]
        modes = [[source.call(f"torch.{'enable' if grad else 'no'}_grad")] * (grad == inference) for grad, _ in runs]
        if outer and len(runs) == 1:
            outer, modes = outer + modes[0], [[]]
        body = [made for mode, (_, run) in zip(modes, runs, strict=True) for made in block(list(mode), run)]
        yield from block(list(outer), body)


MAX_INLINE = 48
_MAX_INLINE_IN_LINE = 64
_MAX_EXPRESSION = 72  # leaves room for a name and an indent
MAX_INPUT_LINES = 24
_MAX_PARTS = 6
SIDE_FILE = "repro_inputs.pt"
_LOAD = f'saved = torch.load(Path(__file__).with_name("{SIDE_FILE}"), weights_only=True)'
_CONVERSIONS = frozenset(["bool", "contiguous", "double", "float", "half", "int", "long", "to", "type", "type_as"])


@dataclass(frozen=True, slots=True)
class Code:
    """A program in Python."""

    inputs: tuple[ast.stmt, ...]
    body: tuple[ast.stmt, ...]
    names: Mapping[int, str]  # the variables of values that have one
    expressions: Mapping[int, str]  # what values were last assigned
    side: Mapping[str, torch.Tensor] = field(default_factory=dict)  # the tensors that the side file must provide


def write_program(
    program: Program,
    tensors: Tensors,
    *,
    keep: Iterable[int] = (),
    given: Mapping[int, str] | None = None,
    nouns: Mapping[int, str] | None = None,
    reserved: Iterable[str] = (),
    aside: Iterable[int] = (),
) -> Code:
    """The program in Python; ``keep`` lists values that must have a variable at the end.

    Inputs in ``given`` are there already under some name and get no line. ``nouns`` are variables that values, and
    inputs without a name of their own, had in the user's code (none if empty); one is used again once the value before
    is done with. ``reserved`` are names to stay away from, inputs in ``aside`` go to the side file whatever they are.
    """
    # A conversion that returned the very tensor that it was given changes nothing.
    calls = (call for call in program.calls if call.name not in _CONVERSIONS or call.outputs not in call.args[:1])
    program = replace(program, calls=tuple(calls))
    known = Identifiers(frozenset(reserved))
    for value, name in (given or {}).items():
        known.adopt(value, name)
    words = {value: word for value, word in {**names.result_words(program), **(nouns or {})}.items() if word}
    return _Printer(program, tensors, frozenset(keep), known, words, frozenset(aside)).print()


@dataclass
class _Printer:
    program: Program
    tensors: Tensors
    keep: frozenset[int]
    names: Identifiers
    nouns: Mapping[int, str]
    aside: frozenset[int]
    side: dict[str, torch.Tensor] = field(default_factory=dict)
    inlined: dict[int, ast.expr] = field(default_factory=dict)
    origins: dict[int, tuple[int, Call]] = field(default_factory=dict)  # of those of `inlined` that calls make
    lines: list[Line] = field(default_factory=list)
    expressions: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program = self.program
        self.input_words = names.names_for_inputs(program, {**names.input_words(program), **self.nouns})
        self.uses = Counter(ref.value for call in program.calls for ref in iter_refs((call.args, call.kwargs)))
        self.last: dict[int, int] = {}  # the last call that names a value
        for index, call in enumerate(program.calls):
            self.last.update(dict.fromkeys((*call.input_refs(), *call.output_refs()), index))
        self.last.update({ref.value: len(program.calls) for ref in program.outputs})
        # values that optimizers step and that nothing differentiates are written as parameters
        groups = [call.kwargs["params"] for call in program.calls if call.is_optimizer_step]
        others = {value for call in program.calls if not call.is_optimizer_step for value in call.input_refs()}
        self.plain_params = frozenset(ref.value for ref in iter_refs(groups)) - others

    def print(self) -> Code:
        program, returned = self.program, {ref.value for ref in self.program.outputs}
        for item in program.inputs:
            if item.role == "rng" and seed_of(self.tensors[item.value]) is None:
                self.side[self.names.give(item.value, "rng")] = self.tensors[item.value].detach().cpu()
        needed = [item for item in program.inputs if {item.value} & (returned | self.uses.keys() | self.keep)]
        given = [item for item in needed if item.role != "rng" and item.value not in self.names]
        inputs = [line for item in given if (line := self._input(item)) is not None]
        for index, call in enumerate(program.calls):
            if call.target != OPAQUE:
                self._call(index, call)
        load = fill(_LOAD) if self.side else []
        return Code((*load, *inputs), tuple(under_modes(self.lines)), self.names, self.expressions, self.side)

    def _input(self, item: Input) -> ast.stmt | None:
        """The line that makes an input, ``None`` when it reads best where it is used."""
        found = literal(self.tensors[item.value]) if item.value not in self.aside else None
        if found is not None and self._is_inlinable_input(item, found):
            self.inlined[item.value] = expression(found.text)
            return None
        name = self.names.give(item.value, self.input_words[item.value])
        line = self._made(item, found, name) if found is not None else None
        return line if line is not None and len(source.lines(line)) <= MAX_INPUT_LINES else self._made(item, None, name)

    def _made(self, item: Input, found: Literal | None, name: str) -> ast.stmt:
        if found is None:
            self.side[name] = as_given(self.tensors[item.value])
        text = found.text if found is not None else f'saved["{name}"]'
        if item.value in self.plain_params:
            text = f"torch.nn.Parameter({text})"
        elif item.requires_grad:
            text = found.requiring_grad() if found is not None else f"{text}.requires_grad_()"
        return assign(ast.Name(name), expression(text))

    def _is_inlinable_input(self, item: Input, found: Literal) -> bool:
        """True if the input is only a gradient or optimizer state that reads best where it is used."""
        value = item.value
        if item.requires_grad or value in self.keep or self.uses[value] != 1 or len(found.text) > MAX_INLINE:
            return False
        user = next(call for call in self.program.calls if value in call.input_refs())
        return (user.is_differentiation or user.is_optimizer_step) and value not in self.plain_params

    def _call(self, index: int, call: Call) -> None:
        mode = needed_mode(call)
        if call.mode.rng is not None:
            self.lines.append((self._seed(call.mode.rng), mode))
        if call.is_optimizer_step:
            opt = self.names.unique("opt")
            self.lines += [(line, mode) for line in write_step(call, self._leaf, opt, self.tensors)]
            for group in zip(call.kwargs["params"], call.kwargs["grads"], strict=True):
                for param, grad in zip(*group, strict=True):
                    if grad is not None and grad.value in self.inlined:  # as texts call it
                        self.names.adopt(grad.value, f"{self.names[param.value]}.grad")
            return
        if call.target == ZERO_GRAD:
            owners = [self._leaf(ref) for ref in iter_refs(call.args)]
            made = [assign(ast.Attribute(owner, "grad"), constant(None)) for owner in owners]
            if len(owners) > 2:
                made = fill("for parameter in OWNERS:\n    parameter.grad = None", OWNERS=ast.List(owners))
            self.lines += [(line, mode) for line in made]
            return
        written = self._written_to_fit(self._without_unit_gradient(call))
        if is_in_place(call.target):
            for value in call.input_refs()[:1]:
                self.expressions.pop(value, None)
        elif isinstance(written, ast.expr) and isinstance(call.outputs, Ref):
            self.expressions[call.outputs.value] = source.text(written)
        if isinstance(written, ast.expr) and self._is_inlinable(index, call, written):
            self.inlined[call.output_refs()[0]] = written
            self.origins[call.output_refs()[0]] = index, call
            return
        self._assign(index, call, written)

    def _written_to_fit(self, call: Call) -> ast.expr | ast.stmt:
        """The call, with what was to be written into it in lines of its own as long as the line is too long."""
        while True:
            written = write_call(call, self._leaf)
            inside = [value for value in call.input_refs() if value in self.inlined and value in self.origins]
            if not inside or len(source.text(written)) <= _MAX_EXPRESSION:
                return written
            longest = max(inside, key=lambda value: len(source.text(self.inlined[value])))
            self._assign(*self.origins[longest], self.inlined.pop(longest))

    def _assign(self, index: int, call: Call, written: ast.expr | ast.stmt) -> None:
        target = self._target(index, call) if isinstance(written, ast.expr) else None
        if isinstance(written, ast.stmt):
            line = written
        elif target is None and isinstance(written, ast.Call):
            line = ast.Expr(written)
        else:  # an expression that raises, or whose result is nothing, has a target of its own
            line = assign(target or ast.Name(self.names.unique("out")), written)
        self.lines.append((line, needed_mode(call)))

    def _seed(self, rng: Ref) -> ast.stmt:
        state = self.tensors[rng.value]
        seed = seed_of(state)
        if seed is not None:
            return ast.Expr(source.call("torch.manual_seed", [constant(seed)]))
        setter = "torch.cuda.set_rng_state" if state.numel() <= 64 else "torch.set_rng_state"
        return ast.Expr(source.call(setter, [expression(f'saved["{self.names[rng.value]}"]')]))

    def _without_unit_gradient(self, call: Call) -> Call:
        """``backward`` of a real scalar without the gradient that it starts from by itself."""
        given = as_method(call)
        if given.target != BACKWARD or len(given.args) != 2 or not isinstance(given.args[1], Ref):
            return call
        gradient = self.tensors.get(given.args[1].value)
        is_one = gradient is not None and gradient.numel() == 1 and not gradient.is_complex() and gradient.item() == 1
        return replace(given, args=given.args[:1]) if is_one else call

    def _leaf(self, value: Any) -> ast.expr:
        if not isinstance(value, Ref):
            raise TypeError(f"a program cannot hold `{type(value).__name__}`")
        return self.inlined[value.value] if value.value in self.inlined else path(self.names[value.value])

    def _is_inlinable(self, index: int, call: Call, written: ast.expr) -> bool:
        """True if only one later call reads the result, so that it can be written there: the next one, or a later one
        on the same line if all between go into it."""
        if not isinstance(call.outputs, Ref) or is_in_place(call.target) or call.mode.rng is not None:
            return False
        value = call.outputs.value
        if value in self.names or value in self.keep or self.uses[value] != 1:
            return False
        for reader in self.program.calls[index + 1 :]:
            if value in reader.input_refs():
                break
            is_whole_value = isinstance(reader.outputs, Ref) and self.uses[reader.outputs.value] == 1
            if not (is_one_line(call, reader) and is_whole_value and _is_pure(call) and _is_pure(reader)):
                return False
        if not _may_hold(reader, value) or needed_mode(call) != needed_mode(reader):
            return False
        if value in self.nouns and not reader.is_differentiation:
            return False
        return len(source.text(written)) <= (_MAX_INLINE_IN_LINE if is_one_line(call, reader) else MAX_INLINE)

    def _target(self, index: int, call: Call) -> ast.expr | None:
        """What stands left of the equals sign, ``None`` if nothing needs to."""
        outputs = call.outputs
        if isinstance(outputs, Ref):
            if outputs.value not in self.names:
                is_result = outputs.value in self.keep and not self.uses[outputs.value]
                return self._named(outputs.value, "out" if is_result else names.name_for_output(call), index)
            return None if is_in_place(call.target) else path(self.names[outputs.value])
        if not call.output_refs() or not isinstance(outputs, (list, tuple)):
            return None
        ends = (".data", ".batch_sizes") if call.target == PACK else [f"[{n}]" for n in range(len(outputs))]
        is_flat = all(isinstance(item, Ref) for item in outputs)
        if call.target == PACK or (len(outputs) > _MAX_PARTS and is_flat):
            name = self.names.unique("packed" if call.target == PACK else "parts")
            for ref, end in zip(outputs, ends, strict=True):
                self.names.adopt(ref.value, f"{name}{end}")
            return ast.Name(name)

        def part(ref: Any, noun: str) -> ast.expr:
            if isinstance(ref, (list, tuple)) and ref:  # `histogramdd` returns a tensor and a list of tensors
                return ast.Tuple([part(item, f"{noun}_{n}") for n, item in enumerate(ref)])
            if not isinstance(ref, Ref) or not (self.uses[ref.value] or ref.value in self.keep):
                return ast.Name("_")
            return path(self.names[ref.value]) if ref.value in self.names else self._named(ref.value, noun, index)

        return ast.Tuple(list(map(part, outputs, names.names_for_parts(call, len(outputs)))))

    def _named(self, value: int, noun: str, index: int) -> ast.expr:
        own = names.identifier(self.nouns.get(value, ""))
        if own is None:
            return ast.Name(self.names.give(value, noun))
        is_done = lambda other: other not in self.keep and self.last.get(other, -1) <= index  # noqa: E731
        return ast.Name(self.names.give(value, own, is_done))
