"""The end of a repro: print what was observed and assert that the failure is not there.

A bad value is looked for by running the program once: the bad output, gradient or parameter. A difference from a
reference is asserted with ``torch.testing.assert_close`` on the results of one function that is called in two ways. The
user's own check is run from its file beside the repro, on an object with the attributes that it knows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from reprokit.errors import NotReproduced
from reprokit.locate import quantity
from reprokit.locate.differences import halves_in, tolerances
from reprokit.locate.failure import Failure
from reprokit.locate.quantity import observed
from reprokit.locate.ways import MINUS, NAN, PLUS, bad_mask, ways_of
from reprokit.program.convert import in_dtype, on_device
from reprokit.program.functions import is_in_place
from reprokit.program.interpreter import Outcome, Settings, Tensors, determinism, run
from reprokit.program.ir import AUTOGRAD_GRAD, Input, Phase, Program, iter_refs
from reprokit.program.step import Step
from reprokit.render.code import Code, write_program
from reprokit.render.expression import fold, quoted
from reprokit.shrink.checks.predicate import loss_of, outcome_of
from reprokit.words import number_words

_MAX_MESSAGE = 70
_WORDS = {"nan": "nan", "+inf": "inf", "-inf": "-inf"}


@dataclass(frozen=True, slots=True)
class Subject:
    """The tensor that a repro looks at: a value of the program, or the ``.grad`` of one, and how it is bad."""

    value: int
    is_gradient: bool
    tensor: torch.Tensor
    way: str


DETERMINISTIC = "torch.use_deterministic_algorithms(True)"


def needs_determinism(failure: Failure) -> bool:
    """True for an exception that an operation raises in deterministic mode only: its message names the switch."""
    return failure.exception is not None and DETERMINISTIC in failure.exception[1]


def find_subject(program: Program, tensors: Tensors, failure: Failure) -> Subject | None:
    """The tensor to look at, ``None`` for an exception; raises `NotReproduced` when nothing fails in the same way."""
    wanted = list(_candidates(program, failure))
    settings = Settings(deterministic_algorithms=True, deterministic_warn_only=False)
    with determinism(settings if needs_determinism(failure) else None):
        outcome = run(program, tensors, keep=frozenset(wanted))
    if failure.kind == "exception":
        if outcome.error is None or type(outcome.error).__name__ != _exception_name(failure):
            raise NotReproduced(f"the program does not raise `{_exception_name(failure)}` when it is run again")
        return None
    if outcome.error is not None:
        raise NotReproduced(
            f"the program raises `{type(outcome.error).__name__}` when it is run again", note=str(outcome.error)
        )
    found = [subject for subject in _subjects(failure, wanted, outcome) if subject.way]
    if found:
        return next((subject for subject in found if subject.way == failure.way), found[0])
    raise NotReproduced(f"nothing in the program is `{failure.way}` when it is run again")


def write_check(subject: Subject, failure: Failure, code: Code) -> list[str]:
    """The print and the assertion."""
    name = code.names[subject.value]
    text = f"{name}.grad" if subject.is_gradient else name
    is_leaf = not subject.is_gradient and subject.tensor.requires_grad and subject.tensor.is_leaf
    shown = f"{name}.data" if is_leaf else text
    condition = f"not {_question(subject.tensor, subject.way)}({text}).any()"
    return [
        *fold(f'print("{text} =", {shown})'),
        *fold(f"assert {condition}, {message(subject, failure, code)}"),
    ]


def outcome_words(subject: Subject | None, code: Code, failure: Failure) -> str:
    """The kind of bad value that a repro shows, if not that of the failure: ``, which makes x.grad nan``."""
    if subject is None or subject.way == failure.way:
        return ""
    return f", which makes {code.names[subject.value]}{'.grad' * subject.is_gradient} {_WORDS[subject.way]}"


def message(subject: Subject, failure: Failure, code: Code) -> str:
    """The assertion's message as a string literal, such as ``"F.softmax(x, dim=0) is nan"``."""
    plain = subject.tensor.detach()
    has_mask = plain.layout is torch.strided and not plain.is_complex()
    is_all_bad = bool(bad_mask(plain, subject.way).all()) if has_mask else plain.numel() == 1
    verb = "is" if is_all_bad else "contains"
    text = f"{_about(subject, failure, code)} {verb} {_WORDS[subject.way]}"
    return f"'{text}'" if '"' in text and "'" not in text and "\\" not in text else quoted(text)


def _about(subject: Subject, failure: Failure, code: Code) -> str:
    """The subject of the message: the expression if it is short, else the variable."""
    name = code.names[subject.value]
    if subject.is_gradient:
        return f"{name}.grad"
    if failure.phase == Phase.OPTIMIZER and failure.call is not None and failure.call.startswith("torch.optim."):
        return f"after {failure.call.split('.')[2]}.step(), {name}"
    expression = code.expressions.get(subject.value, name)
    return expression if len(expression) <= _MAX_MESSAGE else name


def _question(tensor: torch.Tensor, way: str) -> str:
    if way == "nan":
        return "torch.isnan"
    if tensor.is_complex() or not {PLUS, MINUS} <= {way, *ways_of(tensor)}:
        return "torch.isinf"
    return "torch.isposinf" if way == "+inf" else "torch.isneginf"


def _candidates(program: Program, failure: Failure) -> Iterator[int]:
    """Values that may show the failure, likeliest first; an input that was bad already shows in what it leads to."""
    if failure.value is not None and failure.call is not None:
        yield failure.value
    yield from (ref.value for ref in program.outputs)
    if failure.value is not None:
        yield failure.value
    for call in program.calls:
        if call.target == AUTOGRAD_GRAD:
            yield from (ref.value for ref in iter_refs(call.outputs))
        elif call.is_optimizer_step:
            yield from (ref.value for ref in iter_refs(call.kwargs["params"]))


def _subjects(failure: Failure, wanted: list[int], outcome: Outcome) -> list[Subject]:
    """The tensors to look at, likeliest first; a gradient may turn from inf to nan between its origin and the leaf."""

    def subject(value: int, is_gradient: bool, tensor: torch.Tensor) -> Subject:
        found = ways_of(tensor)
        ways = (failure.way, NAN, PLUS, MINUS)
        return Subject(value, is_gradient, tensor, next((way for way in ways if way in found), ""))

    values = [
        subject(value, False, outcome.values[value]) for value in dict.fromkeys(wanted) if value in outcome.values
    ]
    order = sorted(outcome.gradients, key=lambda value: (value != failure.value, value))
    gradients = [subject(value, True, outcome.gradients[value]) for value in order]
    return gradients + values if failure.is_derivative else values + gradients


def _exception_name(failure: Failure) -> str:
    return failure.exception[0] if failure.exception is not None else "exception"


_INDENT = "    "
_WORDS_OF_A_COMPARISON = ("step", "reference", "actual", "expected", "backend", "runpy")
_WORDS_OF_A_CHECK = ("runpy", "SimpleNamespace", "outcome", "exception", "error", "check", "verdict")


@dataclass(frozen=True, slots=True)
class ScriptParts:
    """The parts of a script: code with its inputs, the statements, the assertion.

    ``imports`` replace those of the code, ``beside`` names a file of the user's that it runs.
    """

    code: Code
    body: Sequence[str]
    check: Sequence[str]
    imports: Sequence[str] = ()
    beside: str | None = None


def mismatch_parts(program: Program, tensors: Tensors, failure: Failure) -> ScriptParts:
    """The program as a function, called as it is and in the way of the reference, and an assertion that both agree."""
    name, option = failure.reference
    given = Step(program, {item.value: tensors[item.value] for item in program.inputs})
    if name == "compile":
        code = _function("step", given, failure)
        file, function = failure.check
        backend = "backend" if file else quoted(option)
        calls = [
            *([f"backend = {_from_file(file, function)}"] if file else []),
            f"expected = step({_arguments(given, code, '')})",
            f"actual = torch.compile(step, backend={backend})({_arguments(given, code, '')})",
        ]
        parts = _compared(given, failure, [code], calls)
        own = ("import runpy", "from pathlib import Path")
        return replace(parts, imports=_with_imports(code.imports, own), beside=file) if file else parts
    if name == "fp64":
        return _in_two_ways(given, in_dtype(given, torch.float64), failure, "", ".double()", " in float64")
    return _in_two_ways(on_device(given, "cuda"), on_device(given, "cpu"), failure, ".cuda()", ".cpu()", " on the CPU")


def function_parts(program: Program, tensors: Tensors, failure: Failure) -> ScriptParts:
    """The program, the object that the user's function is shown, and an assertion that it sees no bug."""
    file, function = failure.check
    given = Step(program, {item.value: tensors[item.value] for item in program.inputs})
    loss = loss_of(given)
    graded = outcome_of(given).gradients
    leaves = [item for item in program.inputs if item.name in graded]
    outputs = [ref.value for ref in program.outputs]
    keep = [*outputs, *([loss] if loss is not None else []), *(item.value for item in leaves)]
    code = write_program(program, tensors, keep=keep, reserved=_WORDS_OF_A_CHECK)
    raises = failure.exception is not None
    tuple_of = "".join(f"{code.names[value]}, " for value in outputs).rstrip()
    gradients = ", ".join(f"{quoted(item.name)}: {code.names[item.value]}.grad" for item in leaves)
    check = [
        "outcome = SimpleNamespace(",
        f"    outputs=({'' if raises else tuple_of}),",
        f"    loss={code.names[loss] if loss is not None and not raises else None},",
        f"    gradients={{{gradients}}},",
        f"    exception={'exception' if raises else None},",
        ")",
        f"check = {_from_file(file, function)}",
        "verdict = check(outcome)",
        'print("outcome.exception =", repr(exception))' if raises else 'print("outcome.loss =", outcome.loss)',
        f'assert verdict not in (True, "same"), {quoted(f"{function}(outcome) is true")}',
    ]
    own = ("import runpy", "from pathlib import Path", "from types import SimpleNamespace")
    body: Sequence[str] = code.body
    if raises:
        body = ["exception = None", "try:", *(_INDENT + line if line else line for line in body)]
        body = [*body, "except Exception as error:", f"{_INDENT}exception = error"]
    return ScriptParts(code, body, check, _with_imports(code.imports, own), file)


def _from_file(file: str, name: str) -> str:
    return f"runpy.run_path(str(Path(__file__).with_name({quoted(file)})))[{quoted(name)}]"


def _in_two_ways(one: Step, other: Step, failure: Failure, into: str, into_other: str, words: str) -> ScriptParts:
    """As it is and changed; two functions where the change goes beyond the inputs."""
    code, changed = _function("step", one, failure), _function("step", other, failure)
    codes = [code]
    name = "step"
    if code.body != changed.body:
        name = "reference"
        codes.append(_function(name, other, failure))
    calls = [
        f"actual = step({_arguments(one, code, into)})",
        f"expected = {name}({_arguments(other, code, into_other)})  # the same{words}",
    ]
    return _compared(one, failure, codes, calls)


def _compared(given: Step, failure: Failure, codes: Sequence[Code], calls: Sequence[str]) -> ScriptParts:
    body = [line for code in codes for line in (*code.body, "", "")]
    check = [*calls, 'print("actual =", actual)', 'print("expected =", expected)', _assertion(given, failure)]
    return ScriptParts(replace(codes[0], inputs=(*codes[0].inputs, "", "")), body[:-1], check)


def _assertion(given: Step, failure: Failure) -> str:
    """Tolerances are spelled out only where they are not the dtype's own."""
    halves = halves_in(given.program, dict(given.tensors))
    extra = ""
    if halves and torch.float32 in {tensor.dtype for tensor in given.tensors.values()}:
        relative, absolute = tolerances(torch.float32, halves)
        extra = f", rtol={relative}, atol={absolute}"
    return f"torch.testing.assert_close(actual, expected.to(actual), equal_nan=True{extra})"


def _function(name: str, given: Step, failure: Failure) -> Code:
    """The program as a function of all its inputs that returns the result in question."""
    assert failure.value is not None, "a mismatch has a result"
    shown = [item for item in given.program.inputs if item.role != "rng"]
    keep = [failure.value, *(item.value for item in shown)]
    code = write_program(given.program, given.tensors, keep=keep, reserved=_WORDS_OF_A_COMPARISON)
    is_gradient = failure.phase == Phase.BACKWARD
    result = code.names[failure.value] + (".grad" if is_gradient else "")
    head = f"def {name}({', '.join(code.names[item.value] for item in shown)}):"
    body = [head, *(_INDENT + line if line else line for line in code.body), f"{_INDENT}return {result}"]
    return replace(code, body=tuple(body))


def _arguments(given: Step, code: Code, into: str) -> str:
    """The arguments of one call; copies where it would see what an earlier call has written or added to a gradient."""
    writes = any(is_in_place(call.target) for call in given.program.calls)

    def argument(item: Input) -> str:
        tensor = given.tensors[item.value]
        change = into
        if into == ".double()" and not tensor.is_floating_point():
            change = ".cdouble()" if tensor.is_complex() else ""
        name = code.names[item.value]
        if item.requires_grad:
            return f"{name}.detach().clone(){change}.requires_grad_()"
        return f"{name}.clone(){change}" if writes else f"{name}{change}"

    return ", ".join(argument(item) for item in given.program.inputs if item.role != "rng")


def _with_imports(imports: Sequence[str], needed: Sequence[str]) -> list[str]:
    theirs = [line for line in imports if "torch" in line]
    ours = dict.fromkeys((*needed, *(line for line in imports if line and line not in theirs)))
    return [*ours, "", *theirs]


_VARIABLES = {"gradient norm": "norm", "update": "update"}


def event_parts(program: Program, tensors: Tensors, failure: Failure, aside: Collection[int] = ()) -> ScriptParts:
    """The program, the quantity and the assertion; raises `NotReproduced` where it is below the threshold."""
    found, outcome = observed(program, tensors, failure)
    if found is None or found.event is None:
        raise NotReproduced("the event is not there when the program is run again")
    event, loss = found.event, quantity.loss_of(program)
    if event.quantity == "update":
        steps = [call.kwargs["params"] for call in program.calls if call.is_optimizer_step]
        values = [ref.value for ref in iter_refs(steps)]
    else:
        values = [loss] if event.quantity == "loss" and loss is not None else list(outcome.gradients)
    name = _VARIABLES.get(event.quantity, "")
    reserved = (name, "before", "change", "size") if name else ()
    code = write_program(program, tensors, keep=values, reserved=reserved, aside=aside)
    names = [code.names[value] for value in values]
    name = name or names[0]
    short = float(f"{event.threshold:.4g}")
    threshold = repr(event.threshold if event.value < short else short)  # rounding may take it above the value
    usual = f", and its median in training was {number_words(event.usual)}" if event.usual is not None else ""
    said = quoted(f"the {event.quantity} is not below {threshold}{usual}")
    first, measuring = _measuring(event.quantity, names)
    lines = [*measuring, f'print("{name} =", {name})', f"assert {name} < {threshold}, {said}"]
    return ScriptParts(code, [*first, *code.body], [part for line in lines for part in fold(line)])


def _measuring(quantity: str, names: list[str]) -> tuple[list[str], list[str]]:
    """The lines before the program and after it that compute the quantity; a loss is there already."""
    if quantity == "gradient norm":
        return [], [f"norm = {_norm([f'{name}.grad' for name in names])}"]
    if quantity != "update":
        return [], []
    copies = [f"before[{number}]" for number in range(len(names))]
    changes = [f"({name} - {copy})" for name, copy in zip(names, copies, strict=True)]
    before = fold(f"before = [{', '.join(f'{name}.detach().clone()' for name in names)}]")
    return before, [f"change = {_norm(changes)}", f"size = {_norm(copies)}", "update = change / size"]


def _norm(tensors: list[str]) -> str:
    if len(tensors) == 1:
        return f"{tensors[0]}.norm()"
    return f"torch.stack([{', '.join(f'{tensor}.norm()' for tensor in tensors)}]).norm()"
