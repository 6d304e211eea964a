"""From a step that failed to a snapshot: replay it from where it began, locate the origin, put everything together.

The user's live state is borrowed for that. Buffers, gradients and generators are given back as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from reprokit.capture.counting import Iterations
from reprokit.capture.generators import python_generators_restored
from reprokit.capture.names import Names
from reprokit.capture.replay import Replayed, replay
from reprokit.capture.state import Copies, UpdateCopies, parameters_of
from reprokit.capture.structure import is_leaf, iter_tensors
from reprokit.capture.tape import Entry
from reprokit.locate.blame import locate
from reprokit.locate.failure import Failure, kind_of
from reprokit.locate.ways import NAN, ways_of
from reprokit.program.ir import AUTOGRAD_BACKWARD, BACKWARD, OPAQUE
from reprokit.program.run import matmul_precision
from reprokit.snapshot.environment import collect_environment
from reprokit.snapshot.format import Snapshot
from reprokit.snapshot.rng import get_rng_state
from reprokit.snapshot.source import describe_source


@dataclass(frozen=True)
class FailedStep:
    """What a session knows of the step that failed.

    ``pending`` is the differentiation that was not begun because its start was bad; ``optimizer`` the one whose update
    ruined parameters. ``buffers``, ``updates`` and ``generators`` lead back to where the step began.
    """

    observed_at: str
    entries: list[Entry]
    saved: dict[int, torch.Tensor]
    pending: Entry | None
    optimizer: torch.optim.Optimizer | None
    modules: list[torch.nn.Module]
    buffers: Copies
    updates: UpdateCopies
    generators: dict[str, Any] | None
    iterations: Iterations
    timeline: list[dict[str, Any]]
    loss: float | None
    command: list[str]

    @property
    def all_entries(self) -> list[Entry]:
        """What the loop did, and what it was about to do."""
        return [*self.entries, *([self.pending] if self.pending is not None else [])]


def make_snapshot(step: FailedStep, frame: FrameType | None) -> Snapshot:
    """Replay a failed step and describe it; ``frame`` is where the loop stands, for the names of its variables."""
    names = _names(step, frame)
    notes: list[str] = []
    with _at_its_beginning(step, notes):
        rng = get_rng_state()
        replayed = replay(step.all_entries, step.saved, names.describe, perform_last=step.pending is None)
        failure = locate(replayed.program, replayed.tensors)
    if failure is None:
        failure = Failure(_PHASES.get(step.observed_at, "forward"), _observed_kind(step.pending))
        notes += _why_not_again(replayed)
        replayed.is_close = False
    notes += replayed.mismatches
    return _assemble(step, replayed, failure, notes, rng)


_PHASES = {"gradient": "backward", "parameter": "optimizer"}


def _names(step: FailedStep, frame: FrameType | None) -> Names:
    names = Names()
    for module in step.modules:
        names.add_root(module)
    names.name_roots()
    for entry in step.all_entries:
        names.add_arguments(entry)
    names.add_locals(frame)
    return names


def _assemble(
    step: FailedStep, replayed: Replayed, failure: Failure, notes: list[str], rng: dict[str, Any]
) -> Snapshot:
    script = Path(step.command[0]) if step.command else None
    now = {"step": step.iterations.completed, "loss": step.loss, "lr": None, "seconds": None}
    return Snapshot(
        program=replayed.program,
        tensors=replayed.tensors,
        failure=failure,
        step=step.iterations.completed,
        micro_step=_micro_step(step, replayed, failure),
        observed_at=step.observed_at,
        fidelity="exact" if not notes else "close" if replayed.is_close else "unfaithful",
        fidelity_note="; ".join(dict.fromkeys(notes)) or None,
        environment=collect_environment(),
        source=describe_source(script, step.command),
        settings=_settings(),
        rng=rng,
        timeline=[*step.timeline, now],
        command=step.command,
    )


def _why_not_again(replayed: Replayed) -> Iterator[str]:
    """What to say when the replay is fine although the step was not."""
    yield "the failure did not occur again when the step was replayed"
    opaque = dict.fromkeys(call.kwargs["name"] for call in replayed.program.calls if call.target == OPAQUE)
    if opaque:
        yield "custom autograd functions are not followed: " + ", ".join(f"`{name}`" for name in opaque)


def _micro_step(step: FailedStep, replayed: Replayed, failure: Failure) -> int:
    """Backward calls made before the failing one; a bad gradient may be noticed several of them later."""
    made = step.iterations.micro_step
    if failure.phase != "backward" or failure.call_index is None:
        return made
    backward = [n for n, call in enumerate(replayed.program.calls) if call.target in (BACKWARD, AUTOGRAD_BACKWARD)]
    return max(0, made - sum(number > failure.call_index for number in backward))


def _observed_kind(pending: Entry | None) -> str:
    ways = [way for tensor in iter_tensors(pending.args[:1]) for way in ways_of(tensor)] if pending else []
    return kind_of(NAN if NAN in ways or not ways else ways[0])


def _settings() -> dict[str, Any]:
    """The switches a replay needs to give the same bits."""
    return {
        "num_threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": matmul_precision(),
    }


@contextlib.contextmanager
def _at_its_beginning(step: FailedStep, notes: list[str]) -> Iterator[None]:
    """The state the step began with; afterwards buffers, gradients and generators are as they were."""
    with torch.random.fork_rng(enabled=True), python_generators_restored(step.generators):
        first = next((entry.rng for entry in step.entries if entry.rng is not None), None)
        if first is not None:
            torch.set_rng_state(first[0])
        grads = _take_gradients(step)
        if step.optimizer is not None and not step.updates.put_back():
            notes.append("parameters from before the update were not kept, they did not fit into the memory limit")
        current = step.buffers.put_back()
        try:
            yield
        finally:
            current.put_back()
            for parameter, grad in grads:
                parameter.grad = grad


def _take_gradients(step: FailedStep) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Set the gradients of everything that could get one aside."""
    leaves: dict[int, torch.Tensor] = {id(p): p for module in step.modules for p in module.parameters()}
    for entry in step.entries:
        leaves.update((id(tensor), tensor) for tensor, _ in entry.versions if is_leaf(tensor))
        if entry.kind == "optimizer":
            leaves.update((id(p), p) for p in parameters_of(entry.target))
    taken = [(leaf, leaf.grad) for leaf in leaves.values()]
    for leaf, _ in taken:
        leaf.grad = None
    return taken
