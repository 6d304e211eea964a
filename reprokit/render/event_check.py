"""The end of the repro of an event: the quantity of the step, printed, and an assertion that it is below the threshold.

The threshold is the recorded one, which the step of training has exceeded. A parameter that learns nothing has none:
the repro asserts that it gets a gradient, and that not all of it is zero.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from reprokit.errors import NotReproduced
from reprokit.locate.failure import Failure, Predicate
from reprokit.locate.quantity import loss_of, observed
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Program, iter_refs
from reprokit.render.check import ScriptParts
from reprokit.render.code import write_program
from reprokit.render.expression import quoted
from reprokit.render.layout import fold
from reprokit.words import number_words

_VARIABLES = {"gradient norm": "norm", "update": "update"}


def event_parts(program: Program, tensors: Tensors, failure: Failure, aside: Collection[int] = ()) -> ScriptParts:
    """The program, the quantity and the assertion; raises `NotReproduced` where it is below the threshold."""
    found, outcome = observed(program, tensors, failure)
    if found is None or found.event is None:
        raise NotReproduced("the event is not there when the program is run again")
    quantity = found.event.quantity
    values = _subjects(program, failure, quantity, list(outcome.gradients))
    reserved = (_VARIABLES[quantity], "before", "change", "size") if quantity in _VARIABLES else ()
    code = write_program(program, tensors, keep=values, reserved=reserved, aside=aside)
    names = [code.names[value] for value in values]
    if quantity == "share of zeros":
        lines = _gradient_check(names[0], is_missing=values[0] not in outcome.gradients)
    else:
        lines = _threshold_check(found.event, names)
    check = [part for line in lines for part in fold(line)]
    return ScriptParts(code, [*_remembered(quantity, names), *code.body], check)


def _gradient_check(name: str, *, is_missing: bool) -> list[str]:
    """The gradient and the assertion that there is one, or that not all of it is zero."""
    shown = f'print("{name}.grad =", {name}.grad)'
    if is_missing:
        return [shown, f"assert {name}.grad is not None, {quoted(f'no gradient reaches {name}')}"]
    return [shown, f"assert ({name}.grad != 0).any(), {quoted(f'the gradient of {name} is zero everywhere')}"]


def _threshold_check(event: Predicate, names: Sequence[str]) -> list[str]:
    """The quantity and the assertion that it is below the threshold."""
    name = _VARIABLES.get(event.quantity, names[0])
    threshold = _threshold(event.value, event.threshold)
    usual = f", and its median in training was {number_words(event.usual)}" if event.usual is not None else ""
    said = quoted(f"the {event.quantity} is not below {threshold}{usual}")
    lines = [f'print("{name} =", {name})', f"assert {name} < {threshold}, {said}"]
    return [*_measuring(event.quantity, name, names), *lines]


def _subjects(program: Program, failure: Failure, quantity: str, graded: Sequence[int]) -> list[int]:
    """The values that the quantity is computed from, which need variables."""
    loss = loss_of(program)
    if quantity == "loss" and loss is not None:
        return [loss]
    if quantity == "gradient norm":
        return list(graded)
    if quantity == "update":
        steps = [call.kwargs["params"] for call in program.calls if call.is_optimizer_step]
        return [ref.value for ref in iter_refs(steps)]
    if failure.value is None:
        raise NotReproduced("the tensor of the event is not known")
    return [failure.value]


def _measuring(quantity: str, name: str, names: Sequence[str]) -> list[str]:
    """The lines that compute the quantity; a loss is there already."""
    if quantity == "loss":
        return []
    if quantity == "gradient norm":
        return [f"{name} = {_norm([f'{variable}.grad' for variable in names])}"]
    copies = ["before" if len(names) == 1 else f"before[{number}]" for number in range(len(names))]
    changes = [f"({variable} - {copy})" for variable, copy in zip(names, copies, strict=True)]
    return [f"change = {_norm(changes)}", f"size = {_norm(copies)}", f"{name} = change / size"]


def _norm(tensors: Sequence[str]) -> str:
    if len(tensors) == 1:
        return f"{tensors[0]}.norm()"
    return f"torch.stack([{', '.join(f'{tensor}.norm()' for tensor in tensors)}]).norm()"


def _remembered(quantity: str, names: Sequence[str]) -> list[str]:
    """A line that keeps parameters as they are before the step."""
    if quantity != "update":
        return []
    copies = [f"{name}.detach().clone()" for name in names]
    return fold(f"before = {copies[0] if len(copies) == 1 else f'[{chr(44).join(copies)}]'}")


def _threshold(value: float, threshold: float) -> str:
    """The threshold with four digits, with all where rounding takes it above the value."""
    short = float(f"{threshold:.4g}")
    return repr(short if not value < short else threshold)
