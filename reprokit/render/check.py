"""The end of a repro: print what was observed and assert that the failure is not there.

Begin with `of_value`: it runs the program once and looks for the bad output, gradient or parameter.
Of a softmax the last lines of the script are then

    print("p =", p)
    assert not torch.isnan(p).any(), "torch.softmax(x, 0) is nan"

`of_mismatch` asserts with ``torch.testing.assert_close`` on the results of one function that is
called in two ways, `of_event` that a quantity is below its threshold, and `of_own_check` runs the
user's own check from its file beside the repro. Which one a failure needs is in `render/kinds.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from reprokit.compare import quantity
from reprokit.compare.difference import OTHER_WAY, halves_in, tolerances
from reprokit.compare.quantity import observed
from reprokit.errors import NotReproduced
from reprokit.locate.failure import Failure, Predicate
from reprokit.locate.ways import MINUS, NAN, PLUS, bad_mask, ways_of
from reprokit.program.convert import in_dtype, on_device
from reprokit.program.functions import is_in_place
from reprokit.program.interpreter import Outcome, Settings, Tensors, determinism, run
from reprokit.program.ir import AUTOGRAD_GRAD, Program, iter_refs
from reprokit.program.step import Step
from reprokit.render import source
from reprokit.render.printer import Code, write_program
from reprokit.render.source import constant, define, fill, path
from reprokit.shrink.checks.predicate import loss_of, outcome_of
from reprokit.words import number_words

_MAX_MESSAGE = 70
_WORDS = {"nan": "nan", "+inf": "inf", "-inf": "-inf"}
DETERMINISTIC = "torch.use_deterministic_algorithms(True)"
_WORDS_OF_A_COMPARISON = ("step", "reference", "actual", "expected", "backend", "runpy")
_WORDS_OF_A_CHECK = (
    "runpy",
    "SimpleNamespace",
    "outcome",
    "exception",
    "error",
    "check",
    "verdict",
)


@dataclass(frozen=True, slots=True)
class ScriptParts:
    """The parts of a script."""

    # The inputs, and the names of values.
    code: Code
    body: Sequence[ast.stmt]
    # The print and the assertion.
    check: Sequence[ast.stmt]
    # The name of a file of the user's that the script runs.
    beside: str | None = None


# -- a bad value, or an exception ------------------------------------------------------------------


def of_value(program: Program, tensors: Tensors, failure: Failure, aside: Collection[int]) -> ScriptParts:
    """The program; an assertion on the bad value, or none where a call raises."""
    subject = find_subject(program, tensors, failure)
    keep = [subject.value] if subject is not None else []
    code = write_program(program, tensors, keep=keep, aside=aside)
    if needs_determinism(failure):
        code = replace(code, inputs=(*fill(DETERMINISTIC), *code.inputs))
    check = write_check(subject, failure, code) if subject is not None else []
    return ScriptParts(code, code.body, check)


@dataclass(frozen=True, slots=True)
class Subject:
    """A value of the program, or its ``.grad``, that a repro looks at, and how it is bad."""

    value: int
    is_gradient: bool
    tensor: torch.Tensor
    way: str


def needs_determinism(failure: Failure) -> bool:
    """True for an exception that an operation raises in deterministic mode only.

    Its message names the switch.
    """
    return failure.exception is not None and DETERMINISTIC in failure.exception[1]


def find_subject(program: Program, tensors: Tensors, failure: Failure) -> Subject | None:
    """The tensor to look at, ``None`` for an exception.

    Raises `NotReproduced` when nothing fails in the same way.
    """
    wanted = list(_candidates(program, failure))
    settings = Settings(deterministic_algorithms=True, deterministic_warn_only=False)
    with determinism(settings if needs_determinism(failure) else None):
        outcome = run(program, tensors, keep=frozenset(wanted))
    raised = type(outcome.error).__name__ if outcome.error is not None else None
    if failure.kind.raises:
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
    tensor = subject.tensor
    is_leaf = not subject.is_gradient and tensor.requires_grad and tensor.is_leaf
    return fill(
        f"print(LABEL, SHOWN)\nassert not {_question(tensor, subject.way)}(SUBJECT).any(), MESSAGE",
        LABEL=constant(f"{text} ="),
        SHOWN=path(f"{name}.data" if is_leaf else text),
        SUBJECT=path(text),
        MESSAGE=constant(_message(subject, failure, code)),
    )


def outcome_words(subject: Subject | None, code: Code, failure: Failure) -> str:
    """A sentence with the bad value of a repro, if it is another one than the failure's."""
    if subject is None or subject.way == failure.way:
        return ""
    suffix = ".grad" if subject.is_gradient else ""
    return f"It makes {code.names[subject.value]}{suffix} {_WORDS[subject.way]}."


def _message(subject: Subject, failure: Failure, code: Code) -> str:
    """The assertion's message, such as ``F.softmax(x, dim=0) is nan``."""
    plain = subject.tensor.detach()
    has_mask = plain.layout is torch.strided and not plain.is_complex()
    is_all_bad = bool(bad_mask(plain, subject.way).all()) if has_mask else plain.numel() == 1
    verb = "is" if is_all_bad else "contains"
    return f"{_about(subject, failure, code)} {verb} {_WORDS[subject.way]}"


def _about(subject: Subject, failure: Failure, code: Code) -> str:
    """The expression of the bad value, or its variable where that is long."""
    name = code.names[subject.value]
    if subject.is_gradient:
        return f"{name}.grad"
    if failure.is_of_optimizer and failure.call is not None:
        return f"after {failure.call.split('.')[2]}.step(), {name}"
    expression = code.expressions.get(subject.value, name)
    return expression if len(expression) <= _MAX_MESSAGE else name


def _question(tensor: torch.Tensor, way: str) -> str:
    if way == "nan":
        return "torch.isnan"
    has_both_signs = {PLUS, MINUS} <= {way, *ways_of(tensor)}
    if tensor.is_complex() or not has_both_signs:
        return "torch.isinf"
    return "torch.isposinf" if way == "+inf" else "torch.isneginf"


def _candidates(program: Program, failure: Failure) -> Iterator[int]:
    """Values that may show the failure, likeliest first.

    An input that was bad already shows in what it leads to.
    """
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
    """The tensors to look at, likeliest first.

    A gradient may turn from inf to nan between its origin and the leaf.
    """

    def subject(value: int, is_gradient: bool, tensor: torch.Tensor) -> Subject:
        found = ways_of(tensor)
        ways = (failure.way, NAN, PLUS, MINUS)
        way = next((way for way in ways if way in found), "")
        return Subject(value, is_gradient, tensor, way)

    kept = [value for value in dict.fromkeys(wanted) if value in outcome.values]
    values = [subject(value, False, outcome.values[value]) for value in kept]
    order = sorted(outcome.gradients, key=lambda value: (value != failure.value, value))
    gradients = [subject(value, True, outcome.gradients[value]) for value in order]
    return gradients + values if failure.is_derivative else values + gradients


# -- a mismatch ------------------------------------------------------------------------------------

_ENDING = """
print("actual =", actual)
print("expected =", expected)
torch.testing.assert_close(actual, expected.to(actual), equal_nan=True{})
"""


def of_mismatch(program: Program, tensors: Tensors, failure: Failure, aside: Collection[int]) -> ScriptParts:
    """The program as a function that is called as it is and in the way of the reference.

    A program that makes a result in two ways is no function: its two outputs are compared.
    """
    given = Step(program, {item.value: tensors[item.value] for item in program.inputs})
    name = failure.reference[0]
    if name == OTHER_WAY:
        return _in_two_ways(given)
    if name == "compile":
        return _compiled(given, failure)
    return _converted(given, failure)


def _in_two_ways(given: Step) -> ScriptParts:
    ends = [ref.value for ref in given.program.outputs]
    code = write_program(given.program, given.tensors, keep=ends, reserved=_WORDS_OF_A_COMPARISON)
    first, second = (path(code.names[value]) for value in ends[:2])
    own = fill("expected, actual = FIRST, SECOND", FIRST=first, SECOND=second)
    return ScriptParts(code, code.body, [*own, *_ending(given)])


def _compiled(given: Step, failure: Failure) -> ScriptParts:
    """The compiler may be a function of the user's, in a file beside the script."""
    code = _as_function("step", given, failure)
    arguments = _arguments(given, code, "")
    file, function = failure.check
    own: list[ast.stmt] = []
    backend: ast.expr = constant(failure.reference[1])
    if file:
        own = fill("backend = FOUND", FOUND=_from_file(file, function))
        backend = ast.Name("backend")
    calls = fill(
        f"expected = step({arguments})\nactual = torch.compile(step, backend=BACKEND)({arguments})",
        BACKEND=backend,
    )
    return ScriptParts(code, code.body, [*own, *calls, *_ending(given)], file or None)


def _converted(given: Step, failure: Failure) -> ScriptParts:
    """In another dtype, or on another device."""
    if failure.reference[0] == "fp64":
        other = in_dtype(given, torch.float64)
        into, into_other = "", ".double()"
    else:
        given, other = (on_device(given, device) for device in ("cuda", "cpu"))
        into, into_other = ".cuda()", ".cpu()"
    code = _as_function("step", given, failure)
    name, reference, body = "step", code, list(code.body)
    changed = _as_function("step", other, failure)
    if list(map(source.text, code.body)) != list(map(source.text, changed.body)):
        # The change goes beyond the inputs, so one function cannot serve both.
        name, reference = "reference", _as_function("reference", other, failure)
        body += reference.body
    first = _arguments(given, code, into)
    second = _arguments(other, reference, into_other)
    calls = fill(f"actual = step({first})\nexpected = {name}({second})")
    return ScriptParts(code, body, [*calls, *_ending(given)])


def _ending(given: Step) -> list[ast.stmt]:
    """The prints and the assertion, with the tolerances that the check of the reduction has."""
    halves = halves_in(given.program, dict(given.tensors))
    extra = ""
    if halves and torch.float32 in {tensor.dtype for tensor in given.tensors.values()}:
        # A float32 result of a program that computes in half precision.
        extra = ", rtol={}, atol={}".format(*tolerances(torch.float32, halves))
    return fill(_ENDING.format(extra))


def _as_function(name: str, given: Step, failure: Failure) -> Code:
    """The program as a function of all its inputs that returns the result in question."""
    assert failure.value is not None, "a mismatch has a result"
    shown = [item for item in given.program.inputs if item.role != "rng"]
    keep = [failure.value, *(item.value for item in shown)]
    code = write_program(given.program, given.tensors, keep=keep, reserved=_WORDS_OF_A_COMPARISON)
    result = code.names[failure.value] + (".grad" if failure.in_backward else "")
    body = [*code.body, ast.Return(path(result))]
    return replace(code, body=(define(name, [code.names[item.value] for item in shown], body),))


def _arguments(given: Step, code: Code, into: str) -> str:
    """The arguments of one call, each copied where an earlier call has changed it.

    That call may have written into it, or added to its gradient.
    """
    writes = any(is_in_place(call.target) for call in given.program.calls)
    made = []
    for item in given.program.inputs:
        if item.role == "rng":
            continue
        tensor, name, change = given.tensors[item.value], code.names[item.value], into
        if into == ".double()" and not tensor.is_floating_point():
            change = ".cdouble()" if tensor.is_complex() else ""
        if item.requires_grad:
            made.append(f"{name}.detach().clone(){change}.requires_grad_()")
        else:
            made.append(f"{name}.clone(){change}" if writes else f"{name}{change}")
    return ", ".join(made)


# -- the user's own check --------------------------------------------------------------------------


_OWN_CHECK = """
outcome = SimpleNamespace(outputs=OUTPUTS, loss=LOSS, gradients=GRADIENTS, exception=EXCEPTION)
check = CHECK
verdict = check(outcome)
print(LABEL, SHOWN)
assert verdict not in (True, "same"), MESSAGE
"""
_CAUGHT = """
exception = None
try:
    pass
except Exception as error:
    exception = error
"""


def of_own_check(program: Program, tensors: Tensors, failure: Failure, aside: Collection[int]) -> ScriptParts:
    """The program, the object that the user's function is called with, and its verdict."""
    file, function = failure.check
    raises = failure.exception is not None
    given = Step(program, {item.value: tensors[item.value] for item in program.inputs})
    loss, graded = loss_of(given), outcome_of(given).gradients
    leaves = [item for item in program.inputs if item.name in graded]
    outputs = [ref.value for ref in program.outputs]
    keep = [*outputs, *([loss] if loss is not None else []), *(item.value for item in leaves)]
    code = write_program(program, tensors, keep=keep, reserved=_WORDS_OF_A_CHECK)
    # After an exception there is nothing else.
    loss = None if raises else loss
    shown = "exception" if raises else "loss"
    check = fill(
        _OWN_CHECK,
        OUTPUTS=ast.Tuple([path(code.names[value]) for value in outputs if not raises]),
        LOSS=path(code.names[loss]) if loss is not None else constant(None),
        GRADIENTS=ast.Dict(
            [constant(item.name) for item in leaves],
            [path(f"{code.names[item.value]}.grad") for item in leaves],
        ),
        EXCEPTION=path("exception") if raises else constant(None),
        CHECK=_from_file(file, function),
        LABEL=constant(f"outcome.{shown} ="),
        SHOWN=ast.Call(path("repr"), [path("exception")], []) if raises else path("outcome.loss"),
        MESSAGE=constant(f"{function}(outcome) is true"),
    )
    body = _caught(code.body) if raises else code.body
    return ScriptParts(code, body, check, file)


def _caught(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    none, attempt = fill(_CAUGHT)
    assert isinstance(attempt, ast.Try)
    attempt.body = list(body)
    return [none, attempt]


def _from_file(file: str, name: str) -> ast.expr:
    (made,) = fill(
        "runpy.run_path(str(Path(__file__).with_name(FILE)))[NAME]",
        FILE=constant(file),
        NAME=constant(name),
    )
    assert isinstance(made, ast.Expr)
    return made.value


# -- an event --------------------------------------------------------------------------------------


def of_event(program: Program, tensors: Tensors, failure: Failure, aside: Collection[int]) -> ScriptParts:
    """The program, the quantity and the assertion.

    Raises `NotReproduced` where the quantity is below the threshold.
    """
    found, outcome = observed(program, tensors, failure)
    if found is None or found.event is None:
        raise NotReproduced("the event is not there when the program is run again")
    event = found.event
    values = _values_of(event, program, outcome)
    reserved = _RESERVED.get(event.quantity, ())
    code = write_program(program, tensors, keep=values, reserved=reserved, aside=aside)
    names = [code.names[value] for value in values]
    first = measuring = ""
    if event.quantity == "gradient norm":
        name = "norm"
        measuring = f"norm = {_norm([f'{leaf}.grad' for leaf in names])}\n"
    elif event.quantity == "update":
        name = "update"
        first = f"before = [{', '.join(f'{parameter}.detach().clone()' for parameter in names)}]"
        measuring = _update_of(names)
    else:
        name = names[0]
    check = f'{measuring}print("{name} =", {name})\nassert {name} < LIMIT, SAID'
    limit = _limit(event)
    usual = ""
    if event.usual is not None:
        usual = f", and its median in training was {number_words(event.usual)}"
    said = f"the {event.quantity} is not below {limit!r}{usual}"
    ending = fill(check, LIMIT=constant(limit), SAID=constant(said))
    return ScriptParts(code, [*fill(first), *code.body], ending)


# Variables of the measurement.
_RESERVED = {"gradient norm": ("norm",), "update": ("update", "before", "change", "size")}


def _values_of(event: Predicate, program: Program, outcome: Outcome) -> list[int]:
    """The values that the quantity is computed of."""
    loss = quantity.loss_of(program)
    if event.quantity == "update":
        steps = [call.kwargs["params"] for call in program.calls if call.is_optimizer_step]
        return [ref.value for ref in iter_refs(steps)]
    if event.quantity == "loss" and loss is not None:
        return [loss]
    return list(outcome.gradients)


def _norm(tensors: Sequence[str]) -> str:
    """The code of the norm of several tensors together."""
    norms = [f"{tensor}.norm()" for tensor in tensors]
    return norms[0] if len(norms) == 1 else f"torch.stack([{', '.join(norms)}]).norm()"


def _update_of(names: Sequence[str]) -> str:
    """The code of the change of parameters over their size."""
    copies = [f"before[{number}]" for number in range(len(names))]
    changes = [f"({name} - {copy})" for name, copy in zip(names, copies, strict=True)]
    return f"change = {_norm(changes)}\nsize = {_norm(copies)}\nupdate = change / size\n"


def _limit(event: Predicate) -> float:
    """The threshold with four digits, unless these take it above the value."""
    short = float(f"{event.threshold:.4g}")
    return event.threshold if event.value < short else short
