"""A slice: some calls of the step, cut out as a candidate on the values that a run of the step recorded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from reprokit.program.functions import GRAD_WRITES
from reprokit.program.ir import AUTOGRAD_BACKWARD, Call, Input, Program, Ref, iter_refs
from reprokit.shrink.arguments import without_defaults
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.context.step import Step, written
from reprokit.shrink.naming import unique_name
from reprokit.shrink.recording import Recording


@dataclass(frozen=True)
class Slice:
    """Some calls of a step as a candidate.

    ``kept`` are forward calls in order. If it ``is_differentiated`` a backward pass follows, from everything they make
    that gradients arrive at; with ``update`` that optimizer's step comes last.
    """

    step: Step
    kept: tuple[int, ...]
    is_differentiated: bool = False
    update: int | None = None

    def candidate(self, subject: int | None) -> Candidate | None:
        """The slice on recorded values; ``subject`` is the value that is bad. ``None`` when it cannot be built."""
        wanted = frozenset((*self.kept, *(() if self.update is None else (self.update,))))
        recording = self.step.recording(wanted, is_differentiated=self.is_differentiated)
        return self._backward(recording) if self.is_differentiated else self._forward(recording, subject)

    def boundary(self) -> dict[int, int]:
        """What is read and not made: each value with the first call that reads it."""
        made: set[int] = set()
        found: dict[int, int] = {}
        for index in self.kept:
            call = self.step.program.calls[index]
            for value in call.input_refs():
                if value not in made:
                    found.setdefault(value, index)
            made.update(call.output_refs())
        return found

    def outlets(self) -> list[int]:
        """What is made and, as far as this slice goes, not used up: read by other calls, or by none."""
        calls, given, kept = self.step.program.calls, self.boundary(), frozenset(self.kept)
        made = dict.fromkeys(v for i in self.kept for v in calls[i].output_refs() if v not in given)
        inner = {value for index in self.kept for value in calls[index].input_refs()}
        outer = {
            value
            for value in made
            for reader in self.step.readers_of.get(value, ())
            if reader not in kept and calls[reader].target not in GRAD_WRITES
        }
        return [value for value in made if value in outer or value not in inner]

    def _inputs(self, recording: Recording) -> tuple[list[Input], dict[int, torch.Tensor]]:
        known = {item.value: item for item in self.step.program.inputs}
        inputs: list[Input] = []
        tensors = {}
        for value, index in self.boundary().items():
            old = known.get(value)
            call = self.step.program.calls[index]
            name = old.name if old is not None else self.step.words.get(value) or unique_name(call, value, inputs)
            needs_grad = self.is_differentiated and (index, value) in recording.needs_grad
            inputs.append(Input(value, name, old.role if old is not None else "batch", needs_grad))
            tensors[value] = recording.inputs[index, value]
        return inputs, tensors

    def _calls(self) -> list[Call]:
        return [without_defaults(self.step.program.calls[index]) for index in self.kept]

    def _forward(self, recording: Recording, subject: int | None) -> Candidate:
        inputs, tensors = self._inputs(recording)
        calls = self._calls()
        if all(not call.mode.grad for call in calls):
            calls = [replace(call, mode=replace(call.mode, grad=True, inference=False)) for call in calls]
        made = {value for call in calls for value in written(call)}
        chosen = [subject] if subject is not None and subject in made else self.outlets()
        ends = self._layer_outputs(chosen)
        outputs = tuple(Ref(value) for value in ends)
        return Candidate(Program(tuple(calls), tuple(inputs), outputs, self.step.program.modules), tensors)

    def _layer_outputs(self, chosen: list[int]) -> list[int]:
        """Of a value inside one of torch's layers, what the layer returns."""
        calls = self.step.program.calls
        inside = [index for index in self.kept if set(chosen) & written(calls[index])]
        unit = self.step.units[inside[-1]] if inside else ()
        if len(unit) < 2:
            return chosen
        alone = Slice(self.step, unit).outlets()
        return [value for value in alone if value in self.outlets()] or chosen

    def _backward(self, recording: Recording) -> Candidate | None:
        inputs, tensors = self._inputs(recording)
        value = self.step.program.next_value()
        starts: list[Ref] = []
        gradients: list[Ref] = []
        for output in self.outlets():
            found = recording.gradients.get(output, [])
            if found:
                inputs.append(Input(value, "gradient", "gradient"))
                tensors[value] = found[-1]
                starts.append(Ref(output))
                gradients.append(Ref(value))
                value += 1
        if not starts or not any(item.requires_grad for item in inputs):
            return None
        calls = [*self._calls(), Call(AUTOGRAD_BACKWARD, (starts, gradients), phase="backward")]
        if self.update is not None:
            leaves = [item.value for item in inputs if item.requires_grad]
            calls.append(self._step_on(leaves, inputs, tensors, recording))
        return Candidate(Program(tuple(calls), tuple(inputs), (), self.step.program.modules), tensors)

    def _step_on(
        self, leaves: list[int], inputs: list[Input], tensors: dict[int, torch.Tensor], recording: Recording
    ) -> Call:
        """The optimizer's step on the leaves alone, with the gradients that the backward pass leaves."""
        assert self.update is not None
        call = self.step.program.calls[self.update]
        content: dict[str, list[object]] = {"params": [], "grads": [], "options": [], "state": []}
        for params, options, states in zip(*(call.kwargs[n] for n in ("params", "options", "state")), strict=True):
            rows = [row for row in zip(params, states, strict=True) if row[0].value in leaves]
            if not rows:
                continue
            content["params"].append([row[0] for row in rows])
            content["grads"].append([None for _ in rows])
            content["options"].append(dict(options))
            content["state"].append([dict(row[1]) for row in rows])
            for _, state in rows:
                for key, ref in ((key, ref) for key, item in state.items() for ref in iter_refs(item)):
                    inputs.append(Input(ref.value, key, "state"))
                    tensors[ref.value] = recording.inputs[self.update, ref.value]
        return replace(call, args=(), kwargs=content, outputs=None)
