"""One instrumented run: what chosen calls read and returned, and which gradients arrived at their outputs.

An `Excerpt` makes a candidate of some calls on these values.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from reprokit.program.dataflow import copy_of
from reprokit.program.interpreter import run
from reprokit.program.ir import AUTOGRAD_BACKWARD, Call, Input, Phase, Program, Ref, iter_refs
from reprokit.program.step import Step
from reprokit.shrink.leaves import unique_name, without_defaults


@dataclass
class Recording:
    """Copies taken around the calls in ``wanted``."""

    wanted: frozenset[int]
    inputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # what a call read, right before it
    needs_grad: set[tuple[int, int]] = field(default_factory=set)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)  # by value
    grads: dict[int, torch.Tensor] = field(default_factory=dict)  # ``.grad`` of the parameters of an optimizer step
    gradients: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # in the order of the backward passes
    error: Exception | None = None  # what ended the run
    error_call: int | None = None

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Copy what a wanted call reads."""
        if index not in self.wanted:
            return
        for value in call.input_refs():
            tensor = values[value]
            self.inputs[index, value] = copy_of(tensor.detach())
            if tensor.requires_grad:
                self.needs_grad.add((index, value))
            if call.is_optimizer_step and tensor.is_leaf and tensor.grad is not None:
                self.grads[value] = copy_of(tensor.grad.detach())

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Copy what it returned, and listen for gradients."""
        if index not in self.wanted:
            return
        for value in call.output_refs():
            tensor = values[value]
            self.outputs[value] = copy_of(tensor.detach())
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, value))  # type: ignore[no-untyped-call]

    def _note(self, value: int, gradient: torch.Tensor) -> None:
        self.gradients.setdefault(value, []).append(copy_of(gradient.detach()))


def record(candidate: Step, wanted: frozenset[int]) -> Recording:
    """Run a candidate and record around the ``wanted`` calls."""
    recording = Recording(wanted)
    outcome = run(candidate.program, candidate.tensors, observer=recording, keep=frozenset())
    recording.error, recording.error_call = outcome.error, outcome.error_call
    return recording


def shapes_of(candidate: Step) -> dict[int, tuple[int, ...]]:
    """The shapes of the values of a candidate, as far as it runs."""
    program = candidate.program
    made = (value for call in program.calls for value in call.output_refs())
    wanted = frozenset((*made, *(item.value for item in program.inputs)))
    return {value: tuple(tensor.shape) for value, tensor in run(program, candidate.tensors, keep=wanted).values.items()}


@dataclass
class Excerpt:
    """Some calls of a program as a program of their own, on the values that a run recorded."""

    program: Program
    recording: Recording
    calls: list[Call] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._next = self.program.next_value()

    def candidate(self, outputs: Iterable[int] = ()) -> Step:
        """The finished candidate."""
        refs = tuple(map(Ref, outputs))
        return Step(Program(tuple(self.calls), tuple(self.inputs), refs, self.program.modules), self.tensors)

    def keep(
        self,
        indexes: Iterable[int],
        roles: Container[str],
        wants_grad: Container[tuple[int, int]] = frozenset(),
        words: Mapping[int, str] | None = None,
    ) -> None:
        """Add calls. What they read and did not make becomes inputs: those of the program keep their names and some
        ``roles``, others get one of the ``words`` by value; ``wants_grad`` lists the leaves by call and value."""
        known, made = {item.value: item for item in self.program.inputs}, set[int]()
        for index in indexes:
            call = self.program.calls[index]
            for value in call.input_refs():
                if value not in made and value not in self.tensors:
                    old = known.get(value, Input(value, (words or {}).get(value, "")))
                    name = old.name or unique_name(call, value, self.inputs)
                    role = old.role if old.role in roles else "batch"
                    self.read(index, value, name, role, (index, value) in wants_grad)
            made.update(call.output_refs())
            self.calls.append(without_defaults(call))

    def differentiate_nowhere(self) -> None:
        """Let all calls run with gradients on where nothing depends on it: one block less in the repro."""
        self.calls = [replace(call, mode=replace(call.mode, grad=True, inference=False)) for call in self.calls]

    def read(self, index: int, value: int, name: str, role: str, requires_grad: bool = False) -> None:
        """Add an input: a value as call ``index`` read it."""
        self.inputs.append(Input(value, name, role, requires_grad))
        self.tensors[value] = self.recording.inputs[index, value]

    def differentiate(self, outputs: Iterable[int], number: int = -1) -> bool:
        """Add a backward pass from the outputs that gradients arrived at in pass ``number``; True if there are any."""
        found = {output: self.recording.gradients.get(output, [])[number:][:1] for output in outputs}
        starts = {Ref(output): self._add(gradient, "gradient") for output, given in found.items() for gradient in given}
        self.calls.append(Call(AUTOGRAD_BACKWARD, (list(starts), list(starts.values())), phase=Phase.BACKWARD))
        return bool(starts)

    def update(self, index: int, parameters: Container[int], *, is_alone: bool) -> None:
        """Add an optimizer's step on these parameters alone, with their state.

        ``is_alone`` adds parameters and gradients as inputs; else a backward pass before the step leaves the gradients.
        """
        call, names = self.program.calls[index], {item.value: item.name for item in self.program.inputs}
        content: dict[str, list[object]] = {"params": [], "grads": [], "options": [], "state": []}
        for params, grads, options, states in zip(*(call.kwargs[name] for name in content), strict=True):
            rows = []
            for ref, grad, state in zip(params, grads, states, strict=True):
                if ref.value in parameters:
                    name = names.get(ref.value, "parameter")
                    rows.append((ref, self._parameter(index, ref, grad, name) if is_alone else None, dict(state)))
                    for key, other in ((key, other) for key, item in state.items() for other in iter_refs(item)):
                        self.read(index, other.value, names.get(other.value, key), "state")
            if rows:
                content["options"].append(dict(options))
                for name, column in zip(("params", "grads", "state"), zip(*rows, strict=True), strict=True):
                    content[name].append(list(column))
        self.calls.append(replace(call, args=(), kwargs=content, outputs=None))

    def _parameter(self, index: int, ref: Ref, grad: Ref | None, name: str) -> Ref | None:
        """Add a parameter and its gradient; the new value of the gradient."""
        self.read(index, ref.value, name, "parameter", True)
        recorded = self.recording
        found = recorded.inputs.get((index, grad.value)) if grad else recorded.grads.get(ref.value)
        return self._add(found, f"{name}.grad") if found is not None else None

    def _add(self, gradient: torch.Tensor, name: str) -> Ref:
        value, self._next = self._next, self._next + 1
        self.inputs.append(Input(value, name, "gradient"))
        self.tensors[value] = gradient
        return Ref(value)
