"""The end of the repro of an event: the quantity of the step, printed, and an assertion that it is below the recorded
threshold."""

from __future__ import annotations

from collections.abc import Collection

from reprokit.errors import NotReproduced
from reprokit.locate.failure import Failure
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
    event, loss = found.event, loss_of(program)
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
