"""The end of a repro: print what was observed and assert that it is not bad in the way that failed.

What to look at is found by running the program once: the bad output, the bad gradient or the bad parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from reprokit.errors import NotReproduced
from reprokit.locate.failure import Failure
from reprokit.locate.ways import bad_mask
from reprokit.program.ir import AUTOGRAD_GRAD, Program, iter_refs
from reprokit.program.run import Outcome, Tensors, run
from reprokit.render.code import Code
from reprokit.render.expression import quoted
from reprokit.render.layout import fold

_MAX_MESSAGE = 70
_WORDS = {"nan": "nan", "+inf": "inf", "-inf": "-inf"}


@dataclass(frozen=True, slots=True)
class Subject:
    """The tensor that a repro looks at: a value of the program, or the ``.grad`` of one, and how it is bad."""

    value: int
    is_gradient: bool
    tensor: torch.Tensor
    way: str


def find_subject(program: Program, tensors: Tensors, failure: Failure) -> Subject | None:
    """What to look at, ``None`` for an exception; raises `NotReproduced` when nothing fails in the same way."""
    wanted = list(_candidates(program, failure))
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


def is_bad(tensor: torch.Tensor, way: str) -> bool:
    """True if any element is bad in this way."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.is_floating_point() and bool(bad_mask(plain, way).any())


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
    """What became of the failure where the repro looks, if that is bad in another way: ``, which makes x.grad nan``."""
    if subject is None or subject.way == failure.way:
        return ""
    return f", which makes {code.names[subject.value]}{'.grad' * subject.is_gradient} {_WORDS[subject.way]}"


def message(subject: Subject, failure: Failure, code: Code) -> str:
    """The assertion's message as a string literal, such as ``"F.softmax(x, dim=0) is nan"``."""
    verb = "is" if _is_all_bad(subject.tensor, subject.way) else "contains"
    text = f"{_about(subject, failure, code)} {verb} {_WORDS[subject.way]}"
    return f"'{text}'" if '"' in text and "'" not in text and "\\" not in text else quoted(text)


def _about(subject: Subject, failure: Failure, code: Code) -> str:
    """What the message is about: the expression if it is short, else the variable."""
    name = code.names[subject.value]
    if subject.is_gradient:
        return f"{name}.grad"
    if failure.phase == "optimizer" and failure.call is not None and failure.call.startswith("torch.optim."):
        return f"after {failure.call.split('.')[2]}.step(), {name}"
    expression = code.expressions.get(subject.value, name)
    return expression if len(expression) <= _MAX_MESSAGE else name


def _question(tensor: torch.Tensor, way: str) -> str:
    if way == "nan":
        return "torch.isnan"
    if tensor.is_complex() or not is_bad(tensor, "-inf" if way == "+inf" else "+inf"):
        return "torch.isinf"
    return "torch.isposinf" if way == "+inf" else "torch.isneginf"


def _is_all_bad(tensor: torch.Tensor, way: str) -> bool:
    plain = tensor.detach()
    if plain.layout is not torch.strided or plain.is_complex():
        return plain.numel() == 1
    return bool(bad_mask(plain, way).all())


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
    """What could be looked at, likeliest first; a gradient may turn from inf to nan between its origin and the leaf."""

    def subject(value: int, is_gradient: bool, tensor: torch.Tensor) -> Subject:
        ways = (failure.way, "nan", "+inf", "-inf")
        return Subject(value, is_gradient, tensor, next((way for way in ways if is_bad(tensor, way)), ""))

    values = [
        subject(value, False, outcome.values[value]) for value in dict.fromkeys(wanted) if value in outcome.values
    ]
    order = sorted(outcome.gradients, key=lambda value: (value != failure.value, value))
    gradients = [subject(value, True, outcome.gradients[value]) for value in order]
    return gradients + values if failure.is_derivative else values + gradients


def _exception_name(failure: Failure) -> str:
    return failure.exception[0] if failure.exception is not None else "exception"
