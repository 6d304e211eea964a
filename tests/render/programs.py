"""Programs for the tests, recorded from functions or built by hand."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from reprokit.locate.blame import locate
from reprokit.program.ir import Call, Input, Program, Ref, Site
from reprokit.program.trace import Tracer
from reprokit.render.printer import SIDE_FILE, Code
from reprokit.render.source import lines, script
from reprokit.render.verify import VerifyResult
from reprokit.series.story import StepNumbers
from reprokit.snapshot.environment import Environment
from reprokit.snapshot.format import Snapshot

Case = tuple[Program, dict[int, torch.Tensor]]
VERIFIED = VerifyResult(
    20, 20, 20, 1, "exit code 1: AssertionError", "out = tensor([nan])\n", "Traceback\nAssertionError\n", 1.0
)


def site_of(code: str, part: str, line: int = 3, function: str = "", **fields: Any) -> Site:
    """The site of a call that is a part of a statement."""
    before = code[: code.index(part)].split("\n")
    rows = part.split("\n")
    start, end = len(before[-1].encode()), len(rows[-1].encode())
    span = (len(before), start, len(before) + len(rows) - 1, end + start * (len(rows) == 1))
    lines = code.split("\n")
    statement = code if len(lines) > 1 else ""
    return Site("train.py", line, lines[len(before) - 1], function, statement=statement, span=span, **fields)


def record(function: Callable[[], Any]) -> tuple[Program, dict[int, torch.Tensor]]:
    """The program of a function, with every result kept as an output."""
    tracer = Tracer(lambda tensor: None)
    with tracer:
        function()
    values = dict.fromkeys(value for call in tracer.calls for value in call.output_refs())
    return tracer.program(tuple(values)), tracer.tensors


def shown(statements: Iterable[ast.stmt]) -> list[str]:
    """The lines of statements."""
    return [line for statement in statements for line in lines(statement)]


def execute(code: Code, folder: Path) -> dict[str, Any]:
    """Run written code; its variables."""
    if code.side:
        torch.save(dict(code.side), folder / SIDE_FILE)
    variables: dict[str, Any] = {"__file__": str(folder / "repro.py"), "__name__": "repro"}
    exec(compile(script([], [*code.inputs, *code.body]), "repro.py", "exec"), variables)
    return variables


def one_call(target: str, *args: Any, tensors: dict[int, torch.Tensor], **kwargs: Any) -> Case:
    """A program of one call whose result is the output; inputs are the tensors that are given."""
    call = Call(target, args, kwargs, Ref(99))
    return Program((call,), tuple(Input(value, "input") for value in tensors), (Ref(99),)), tensors


def masked_softmax() -> Case:
    """A softmax over nothing but ``-inf``."""
    return one_call("torch.nn.functional.softmax", Ref(0), dim=0, tensors={0: torch.tensor([float("-inf")])})


def square_root_at_zero() -> Case:
    """A square root whose gradient is infinite."""
    forward = Call("torch.sqrt", (Ref(0),), {}, Ref(1))
    backward = Call("torch.autograd.backward", ([Ref(1)], [Ref(2)]), phase="backward")
    inputs = (Input(0, "distance", requires_grad=True), Input(2, "gradient", "gradient"))
    return Program((forward, backward), inputs), {0: torch.zeros(1), 2: torch.ones(1)}


def half_precision_adam(**options: Any) -> Case:
    """Adam without a gradient in half precision, where eps vanishes."""
    kwargs = {"params": [[Ref(0)]], "grads": [[Ref(1)]], "options": [{"lr": 1e-3, **options}], "state": [[{}]]}
    step = Call("torch.optim.Adam.step", (), kwargs, phase="optimizer")
    inputs = (Input(0, "fc.weight", "parameter", True), Input(1, "gradient", "gradient"))
    return Program((step,), inputs), {0: torch.ones(1).half(), 1: torch.zeros(1).half()}


def failing_cholesky() -> Case:
    """A call that raises."""
    return one_call("torch.linalg.cholesky", Ref(0), tensors={0: -torch.eye(2)})


def snapshot_of(case: Case, **fields: Any) -> Snapshot:
    """A snapshot of a program that fails."""
    program, tensors = case
    failure = locate(program, tensors)
    assert failure is not None
    timeline = [StepNumbers(step, 2.0 / (step + 1), 1e-3, seconds=0.01) for step in range(8)]
    snapshot = Snapshot(program, tensors, failure, 8, 0, "loss", timeline=timeline)
    return replace(snapshot, **{"environment": Environment(torch="2.13.0"), **fields})
