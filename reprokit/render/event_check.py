"""The end of the repro of an event: the quantity of the step, printed, and an assertion that it is below the threshold.

The threshold is the recorded one, which the step of training has exceeded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from reprokit.errors import NotReproduced
from reprokit.locate.failure import Failure
from reprokit.locate.quantity import loss_of, observed
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Program, iter_refs
from reprokit.render.check import ScriptParts
from reprokit.render.code import write_program
from reprokit.render.expression import quoted
from reprokit.render.layout import fold

_VARIABLES = {"gradient norm": "norm", "share of zeros": "share", "update": "update"}


def event_parts(program: Program, tensors: Tensors, failure: Failure, aside: Collection[int] = ()) -> ScriptParts:
    """The program, the quantity and the assertion; raises `NotReproduced` where it is below the threshold."""
    found, outcome = observed(program, tensors, failure)
    if found is None or found.event is None:
        raise NotReproduced("the event is not there when the program is run again")
    quantity = found.event.quantity
    values = _subjects(program, failure, quantity, list(outcome.gradients))
    reserved = () if quantity == "loss" else (_VARIABLES[quantity], "before", "change", "size")
    code = write_program(program, tensors, keep=values, reserved=reserved, aside=aside)
    names = [code.names[value] for value in values]
    name = names[0] if quantity == "loss" else _VARIABLES[quantity]
    lines = [] if quantity == "loss" else _measuring(quantity, name, names)
    threshold = _threshold(found.event.value, found.event.threshold)
    usual = f", and its median in training was {found.event.usual:.3g}" if found.event.usual is not None else ""
    said = quoted(f"the {quantity} is not below {threshold}{usual}")
    check = [line for text in (*lines, f'print("{name} =", {name})') for line in fold(text)]
    check += fold(f"assert {name} < {threshold}, {said}")
    return ScriptParts(code, [*_remembered(quantity, names), *code.body], check)


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
    """The lines that compute the quantity."""
    if quantity == "share of zeros":
        return [f"{name} = ({names[0]}.grad == 0).float().mean()"]
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
