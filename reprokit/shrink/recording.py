"""One instrumented run: what chosen calls read, what they returned, and which gradients arrived at their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from reprokit.program.ir import Call
from reprokit.program.run import run
from reprokit.shrink.candidate import Candidate


@dataclass
class Recording:
    """Copies taken around the calls in ``wanted``.

    ``inputs`` holds what a call read, right before it, by (call, value); ``outputs`` and ``gradients`` are by value,
    gradients in the order of the backward passes. ``grads`` are the ``.grad`` of the parameters of an optimizer step.
    ``error`` is what call number ``error_call`` raised, which ended the run.
    """

    wanted: frozenset[int]
    inputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    needs_grad: set[tuple[int, int]] = field(default_factory=set)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    grads: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    error: Exception | None = None
    error_call: int | None = None

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Copy what a wanted call reads."""
        if index not in self.wanted:
            return
        for value in call.input_refs():
            tensor = values[value]
            self.inputs[index, value] = copy_of(tensor)
            if tensor.requires_grad:
                self.needs_grad.add((index, value))
            if call.is_optimizer_step and tensor.is_leaf and tensor.grad is not None:
                self.grads[value] = copy_of(tensor.grad)

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Copy what it returned, and listen for gradients."""
        if index not in self.wanted:
            return
        for value in call.output_refs():
            tensor = values[value]
            self.outputs[value] = copy_of(tensor)
            if tensor.requires_grad:
                self._listen(value, tensor)

    def _listen(self, value: int, tensor: torch.Tensor) -> None:
        def note(gradient: torch.Tensor) -> None:
            self.gradients.setdefault(value, []).append(copy_of(gradient))

        tensor.register_hook(note)  # type: ignore[no-untyped-call]


def record(candidate: Candidate, wanted: frozenset[int]) -> Recording:
    """Run a candidate and record around the ``wanted`` calls."""
    recording = Recording(wanted)
    outcome = run(candidate.program, candidate.tensors, observer=recording, keep=frozenset())
    recording.error, recording.error_call = outcome.error, outcome.error_call
    return recording


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A detached copy with the same strides."""
    plain = tensor.detach()
    return plain.clone() if plain.layout is not torch.strided else plain.clone(memory_format=torch.preserve_format)
