"""The end of a repro: print what was observed and assert that the failure is not there.

A bad value is looked for by running the program once: the bad output, gradient or parameter. A difference from a
reference is asserted with ``torch.testing.assert_close`` on the results of one function that is called in two ways. The
user's own check is run from its file beside the repro, on an object with the attributes that it knows."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from reprokit.compare import quantity
from reprokit.compare.difference import MISMATCH, OTHER_WAY, halves_in, tolerances
from reprokit.compare.quantity import observed
from reprokit.errors import NotReproduced
from reprokit.locate.failure import Failure
from reprokit.locate.ways import MINUS, NAN, PLUS, bad_mask, ways_of
from reprokit.program.convert import in_dtype, on_device
from reprokit.program.functions import is_in_place
from reprokit.program.interpreter import Outcome, Settings, Tensors, determinism, run
from reprokit.program.ir import AUTOGRAD_GRAD, Phase, Program, iter_refs
from reprokit.program.step import Step
from reprokit.render import source
from reprokit.render.printer import Code, write_program
from reprokit.render.source import constant, define, fill, path
from reprokit.shrink.checks.predicate import FUNCTION, loss_of, outcome_of
from reprokit.words import number_words

_MAX_MESSAGE = 70
_WORDS = {"nan": "nan", "+inf": "inf", "-inf": "-inf"}
DETERMINISTIC = "torch.use_deterministic_algorithms(True)"
_WORDS_OF_A_COMPARISON = ("step", "reference", "actual", "expected", "backend", "runpy")
_WORDS_OF_A_CHECK = ("runpy", "SimpleNamespace", "outcome", "exception", "error", "check", "verdict")


@dataclass(frozen=True, slots=True)
class ScriptParts:
    """The parts of a script: code with its inputs, the statements, the assertion; ``beside`` names a file of the
    user's that it runs."""

    code: Code
    body: Sequence[ast.stmt]
    check: Sequence[ast.stmt]
    beside: str | None = None


def parts_of(program: Program, tensors: Tensors, failure: Failure, aside: Collection[int]) -> ScriptParts:
    """The script of a program that fails; raises `NotReproduced`. What it asserts depends on the kind of failure."""
    if failure.kind == MISMATCH:
        return _mismatch(Step(program, {item.value: tensors[item.value] for item in program.inputs}), failure)
    if failure.kind == FUNCTION:
        return _function_check(program, tensors, failure)
    if failure.event is not None:
        return _event(program, tensors, failure, aside)
    subject = find_subject(program, tensors, failure)
    code = write_program(program, tensors, keep=[subject.value] if subject is not None else [], aside=aside)
    if needs_determinism(failure):
        code = replace(code, inputs=(*fill(DETERMINISTIC), *code.inputs))
    return ScriptParts(code, code.body, write_check(subject, failure, code) if subject is not None else [])


@dataclass(frozen=True, slots=True)
class Subject:
    """The tensor that a repro looks at: a value of the program, or the ``.grad`` of one, and how it is bad."""

    value: int
    is_gradient: bool
    tensor: torch.Tensor
    way: str


def needs_determinism(failure: Failure) -> bool:
    """True for an exception that an operation raises in deterministic mode only: its message names the switch."""
    return failure.exception is not None and DETERMINISTIC in failure.exception[1]


def find_subject(program: Program, tensors: Tensors, failure: Failure) -> Subject | None:
    """The tensor to look at, ``None`` for an exception; raises `NotReproduced` when nothing fails in the same way."""
    wanted = list(_candidates(program, failure))
    settings = Settings(deterministic_algorithms=True, deterministic_warn_only=False)
    with determinism(settings if needs_determinism(failure) else None):
        outcome = run(program, tensors, keep=frozenset(wanted))
    raised = type(outcome.error).__name__ if outcome.error is not None else None
    if failure.kind == "exception":
        name = failure.exception[0] if failure.exception is not None else "exception"
        if raised != name:
            raise NotReproduced(f"the program does not raise `{name}` when it is run again")
        return None
    if raised is not None:
        raise NotReproduced(f"the program raises `{raised}` when it is run again", note=str(outcome.error))
    found = [subject for subject in _subjects(failure, wanted, outcome) if subject.way]
    if found:
        return next((subject for subject in found if subject.way == failure.way), found[0])
    raise NotReproduced(f"nothing in the program is `{failure.way}` when it is run again")


def write_check(subject: Subject, failure: Failure, code: Code) -> list[ast.stmt]:
    """The print and the assertion."""
    name = code.names[subject.value]
    text = f"{name}.grad" if subject.is_gradient else name
    is_leaf = not subject.is_gradient and subject.tensor.requires_grad and subject.tensor.is_leaf
    return fill(
        f"print(LABEL, SHOWN)\nassert not {_question(subject.tensor, subject.way)}(SUBJECT).any(), MESSAGE",
        LABEL=constant(f"{text} ="),
        SHOWN=path(f"{name}.data" if is_leaf else text),
        SUBJECT=path(text),
        MESSAGE=constant(_message(subject, failure, code)),
    )


def outcome_words(subject: Subject | None, code: Code, failure: Failure) -> str:
    """A sentence with the bad value that a repro shows, if it is another one than the failure's; else empty."""
    if subject is None or subject.way == failure.way:
        return ""
    return f"It makes {code.names[subject.value]}{'.grad' * subject.is_gradient} {_WORDS[subject.way]}."


def _message(subject: Subject, failure: Failure, code: Code) -> str:
    """The assertion's message, such as ``F.softmax(x, dim=0) is nan``."""
    plain = subject.tensor.detach()
    has_mask = plain.layout is torch.strided and not plain.is_complex()
    is_all_bad = bool(bad_mask(plain, subject.way).all()) if has_mask else plain.numel() == 1
    about = code.names[subject.value]
    if subject.is_gradient:
        about = f"{about}.grad"
    elif failure.phase == Phase.OPTIMIZER and failure.call is not None and failure.call.startswith("torch.optim."):
        about = f"after {failure.call.split('.')[2]}.step(), {about}"
    elif len(written := code.expressions.get(subject.value, about)) <= _MAX_MESSAGE:
        about = written
    return f"{about} {'is' if is_all_bad else 'contains'} {_WORDS[subject.way]}"


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


# -- a mismatch ----------------------------------------------------------------------------------------------------


def _mismatch(given: Step, failure: Failure) -> ScriptParts:
    """The program as a function, called as it is and in the way of the reference, and an assertion that both agree."""
    name, option = failure.reference
    own, beside = list[ast.stmt](), None
    if name == OTHER_WAY:
        ends = [ref.value for ref in given.program.outputs]
        code = write_program(given.program, given.tensors, keep=ends, reserved=_WORDS_OF_A_COMPARISON)
        codes, calls = [code], "expected, actual = FIRST, SECOND"
        own = fill(calls, FIRST=path(code.names[ends[0]]), SECOND=path(code.names[ends[1]]))
        calls = ""
    elif name == "compile":
        codes = [_as_function("step", given, failure)]
        arguments, (beside, function) = _arguments(given, codes[0], ""), failure.check
        own = fill("backend = FOUND", FOUND=_from_file(beside, function)) if beside else []
        calls = f"expected = step({arguments})\nactual = torch.compile(step, backend=BACKEND)({arguments})"
    else:
        is_device = name != "fp64"
        one, other = (on_device(given, device) if is_device else given for device in ("cuda", "cpu"))
        other, into = (
            (other, (".cuda()", ".cpu()")) if is_device else (in_dtype(given, torch.float64), ("", ".double()"))
        )
        given, codes = one, [_as_function("step", one, failure)]
        changed = _as_function("step", other, failure)
        if list(map(source.text, codes[0].body)) != list(map(source.text, changed.body)):
            codes.append(_as_function("reference", other, failure))  # the change goes beyond the inputs
        first, second = _arguments(one, codes[0], into[0]), _arguments(other, codes[-1], into[1])
        calls = f"actual = step({first})\nexpected = {'reference' if len(codes) > 1 else 'step'}({second})"
    halves, extra = halves_in(given.program, dict(given.tensors)), ""
    if halves and torch.float32 in {
        tensor.dtype for tensor in given.tensors.values()
    }:  # not the dtype's own tolerances
        extra = ", rtol={}, atol={}".format(*tolerances(torch.float32, halves))
    ending = f"""
{calls}
print("actual =", actual)
print("expected =", expected)
torch.testing.assert_close(actual, expected.to(actual), equal_nan=True{extra})
"""
    check = fill(ending, BACKEND=ast.Name("backend") if own else constant(option))
    return ScriptParts(codes[0], [line for code in codes for line in code.body], [*own, *check], beside or None)


def _as_function(name: str, given: Step, failure: Failure) -> Code:
    """The program as a function of all its inputs that returns the result in question."""
    assert failure.value is not None, "a mismatch has a result"
    shown = [item for item in given.program.inputs if item.role != "rng"]
    keep = [failure.value, *(item.value for item in shown)]
    code = write_program(given.program, given.tensors, keep=keep, reserved=_WORDS_OF_A_COMPARISON)
    result = code.names[failure.value] + (".grad" if failure.phase == Phase.BACKWARD else "")
    body = [*code.body, ast.Return(path(result))]
    return replace(code, body=(define(name, [code.names[item.value] for item in shown], body),))


def _arguments(given: Step, code: Code, into: str) -> str:
    """The arguments of one call; copies where it would see what an earlier call has written or added to a gradient."""
    writes, made = any(is_in_place(call.target) for call in given.program.calls), []
    for item in given.program.inputs:
        if item.role != "rng":
            tensor, name, change = given.tensors[item.value], code.names[item.value], into
            if into == ".double()" and not tensor.is_floating_point():
                change = ".cdouble()" if tensor.is_complex() else ""
            copied = f"{name}.clone(){change}" if writes else f"{name}{change}"
            made.append(f"{name}.detach().clone(){change}.requires_grad_()" if item.requires_grad else copied)
    return ", ".join(made)


# -- the user's own check ------------------------------------------------------------------------------------------


def _function_check(program: Program, tensors: Tensors, failure: Failure) -> ScriptParts:
    """The program, the object that the user's function is shown, and an assertion that it sees no bug."""
    file, function = failure.check
    given = Step(program, {item.value: tensors[item.value] for item in program.inputs})
    loss, graded = loss_of(given), outcome_of(given).gradients
    leaves = [item for item in program.inputs if item.name in graded]
    outputs = [ref.value for ref in program.outputs]
    keep = [*outputs, *([loss] if loss is not None else []), *(item.value for item in leaves)]
    code = write_program(program, tensors, keep=keep, reserved=_WORDS_OF_A_CHECK)
    raises = failure.exception is not None
    gradients = [(constant(item.name), path(f"{code.names[item.value]}.grad")) for item in leaves]
    shown = "exception" if raises else "loss"
    check = fill(
        f"""
outcome = SimpleNamespace(outputs=OUTPUTS, loss=LOSS, gradients=GRADIENTS, exception={"exception" if raises else None})
check = CHECK
verdict = check(outcome)
print("outcome.{shown} =", {"repr(exception)" if raises else "outcome.loss"})
assert verdict not in (True, "same"), MESSAGE
""",
        OUTPUTS=ast.Tuple([path(code.names[value]) for value in outputs if not raises]),
        LOSS=path(code.names[loss]) if loss is not None and not raises else constant(None),
        GRADIENTS=ast.Dict([name for name, _ in gradients], [gradient for _, gradient in gradients]),
        CHECK=_from_file(file, function),
        MESSAGE=constant(f"{function}(outcome) is true"),
    )
    body: Sequence[ast.stmt] = code.body
    if raises:
        (none, caught) = fill("exception = None\ntry:\n    pass\nexcept Exception as error:\n    exception = error")
        assert isinstance(caught, ast.Try)
        caught.body = list(code.body)
        body = [none, caught]
    return ScriptParts(code, body, check, file)


def _from_file(file: str, name: str) -> ast.expr:
    (made,) = fill(
        "runpy.run_path(str(Path(__file__).with_name(FILE)))[NAME]", FILE=constant(file), NAME=constant(name)
    )
    assert isinstance(made, ast.Expr)
    return made.value


# -- an event ------------------------------------------------------------------------------------------------------


def _event(program: Program, tensors: Tensors, failure: Failure, aside: Collection[int]) -> ScriptParts:
    """The program, the quantity and the assertion; raises `NotReproduced` where it is below the threshold."""
    found, outcome = observed(program, tensors, failure)
    if found is None or found.event is None:
        raise NotReproduced("the event is not there when the program is run again")
    event, loss = found.event, quantity.loss_of(program)
    name = {"gradient norm": "norm", "update": "update"}.get(event.quantity, "")
    values = [loss] if event.quantity == "loss" and loss is not None else list(outcome.gradients)
    if name == "update":
        steps = [call.kwargs["params"] for call in program.calls if call.is_optimizer_step]
        values = [ref.value for ref in iter_refs(steps)]
    reserved = (name, "before", "change", "size") if name else ()
    code = write_program(program, tensors, keep=values, reserved=reserved, aside=aside)
    names = [code.names[value] for value in values]

    def norm(tensors: Sequence[str]) -> str:
        norms = [f"{tensor}.norm()" for tensor in tensors]
        return norms[0] if len(norms) == 1 else f"torch.stack([{', '.join(norms)}]).norm()"

    first = measuring = ""
    if name == "norm":
        measuring = f"norm = {norm([f'{name}.grad' for name in names])}\n"
    elif name == "update":
        first = f"before = [{', '.join(f'{name}.detach().clone()' for name in names)}]"
        copies = [f"before[{number}]" for number in range(len(names))]
        changes = [f"({name} - {copy})" for name, copy in zip(names, copies, strict=True)]
        measuring = f"change = {norm(changes)}\nsize = {norm(copies)}\nupdate = change / size\n"
    name = name or names[0]
    short = float(f"{event.threshold:.4g}")
    threshold = event.threshold if event.value < short else short  # rounding may take it above the value
    usual = f", and its median in training was {number_words(event.usual)}" if event.usual is not None else ""
    said = constant(f"the {event.quantity} is not below {threshold!r}{usual}")
    check = f'{measuring}print("{name} =", {name})\nassert {name} < LIMIT, SAID'
    return ScriptParts(code, [*fill(first), *code.body], fill(check, LIMIT=constant(threshold), SAID=said))
