"""A typed program that uses every public name of reprokit; `make types` checks it with mypy, strictly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import reprokit


def captured(loss_of: Callable[[torch.Tensor], torch.Tensor], seen: list[Path]) -> reprokit.Session:
    with reprokit.capture("out.pt", after="continue", budget=None, on_snapshot=seen.append) as session:
        torch.autograd.backward(loss_of(torch.zeros(3, requires_grad=True)))
    return session


def watched() -> list[str | None]:
    events: list[reprokit.TrainingEvent] = []
    with reprokit.capture(on=("early",), on_event=events.append):
        torch.autograd.backward(torch.zeros((), requires_grad=True) * 2)
    return [event.snapshot for event in events if event.severity == "error" and event.kind == "spike"]


def measured(model: torch.nn.Module, batch: torch.Tensor) -> list[float]:
    rows: reprokit.TraceRows
    with reprokit.trace(steps=[0, 1], module="h.*", classes=["Linear"], tensors=["output"]) as rows:
        model(batch)
    return [row["max"] for row in rows]


def reduced(path: Path) -> tuple[reprokit.Snapshot, reprokit.Reduction]:
    snapshot = reprokit.load(path)
    failure: reprokit.Failure | None = reprokit.locate(snapshot)
    if failure is None:
        raise reprokit.ReprokitError("does not fail here", hint=f"made by reprokit {reprokit.__version__}")
    return snapshot, reprokit.shrink(snapshot, max_time=10.0)


def written(reduction: reprokit.Reduction, snapshot: reprokit.Snapshot, folder: Path) -> str:
    rendered: reprokit.Rendered = reprokit.render(reduction, snapshot, folder, source="none")
    result: reprokit.VerifyResult = reprokit.verify(folder, times=3)
    return rendered.verified if result.fails else str(result.exit_code)
