"""Calls: take out what is left of them, whole module scopes first, then windows, largest first, then single calls.

A call can go when its outputs are given as inputs with their recorded values, or when one of its inputs stands in for
its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reprokit.program.functions import is_in_place
from reprokit.program.ir import Input, Phase, Ref
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.leaves import unique_name
from reprokit.shrink.problem import Problem
from reprokit.shrink.recording import Recording, record
from reprokit.shrink.signature import ACCUMULATION


def remove_calls(problem: Problem) -> None:
    """Take out every call that the failure does not need."""
    _remove_scopes(problem)
    window = max(1, len(problem.best.program.calls) // 2)
    while True:
        _remove_windows(problem, window)
        if window == 1:
            return
        window //= 2


def _remove_scopes(problem: Problem) -> None:
    """Take out modules, outermost first."""
    depth = 1
    while any(len(call.scope) >= depth for call in problem.best.program.calls):
        for scope in dict.fromkeys(
            call.scope[:depth] for call in problem.best.program.calls if len(call.scope) >= depth
        ):
            calls = problem.best.program.calls
            inside = frozenset(i for i in _removable(problem) if calls[i].scope[:depth] == scope)
            if 1 < len(inside) < len(calls):
                _remove(problem, inside, f"without module {scope[-1].path or scope[-1].cls}")
        depth += 1


def _remove_windows(problem: Problem, window: int) -> None:
    """Take out windows of calls, from the end to the beginning."""
    stop = len(problem.best.program.calls)
    while stop > 0:
        start = max(0, stop - window)
        chosen = frozenset(index for index in _removable(problem) if start <= index < stop)
        if chosen:
            _remove(problem, chosen, f"without {len(chosen)} calls" if len(chosen) > 1 else "without one call")
        stop = start


def _removable(problem: Problem) -> list[int]:
    """Every call but the origin, and the backward pass that a bad gradient is seen in when there is only one."""
    calls = problem.best.program.calls
    failure = problem.failure
    passes = [index for index, call in enumerate(calls) if call.is_differentiation]
    kept = set(passes if failure.phase == Phase.BACKWARD and len(passes) == 1 else ())
    origin = failure.call_index if failure.backward_node != ACCUMULATION else None
    return [index for index in range(len(calls)) if index not in kept and index != origin]


def _remove(problem: Problem, chosen: frozenset[int], change: str) -> bool:
    """Take out these calls; a program of none shows nothing, even if what it is given is bad."""
    if problem.best.without_calls(chosen).num_calls == 0:
        return False
    recording = record(problem.best, chosen)
    failure = problem.failure
    may_bypass = len(chosen) == 1 or failure.is_of_whole_step
    proposals = _without(problem.best, chosen, recording, may_bypass)
    return problem.first((change, candidate) for candidate in proposals)


def _without(
    candidate: Candidate, chosen: frozenset[int], recording: Recording, may_bypass: bool
) -> Iterator[Candidate]:
    yield _dropped(candidate, chosen)
    yield _by_value(candidate, chosen, recording)
    if len(chosen) == 1:
        yield from _as_leaf(candidate, next(iter(chosen)))
    if may_bypass:
        yield from _bypassed(candidate, chosen, recording)


def _dropped(candidate: Candidate, chosen: frozenset[int]) -> Candidate:
    """Without the calls, where what they wrote is not needed or was there before; else the candidate itself."""
    program = candidate.program
    calls = tuple(call for index, call in enumerate(program.calls) if index not in chosen)
    known = {item.value for item in program.inputs}
    for call in calls:
        if any(value not in known for value in call.input_refs()):
            return candidate
        known.update(call.output_refs())
    if any(ref.value not in known for ref in program.outputs):
        return candidate
    return candidate.with_calls(calls).pruned()


def _as_leaf(candidate: Candidate, index: int) -> Iterator[Candidate]:
    """With `requires_grad` on the input itself, in place of a later `requires_grad_()`."""
    program = candidate.program
    call = program.calls[index]
    if call.target == "torch.Tensor.requires_grad_" and isinstance(call.args[0], Ref):
        inputs = tuple(
            replace(i, requires_grad=i.requires_grad or i.value == call.args[0].value) for i in program.inputs
        )
        calls = (*program.calls[:index], *program.calls[index + 1 :])
        yield candidate.with_calls(calls, inputs=inputs)


def _by_value(candidate: Candidate, chosen: frozenset[int], recording: Recording) -> Candidate:
    """With the recorded values of what the calls returned as inputs."""
    program = candidate.program
    known = {item.value for item in program.inputs}
    made = dict.fromkeys(v for index in sorted(chosen) for v in program.calls[index].output_refs() if v not in known)
    wants_grad = any(item.requires_grad for item in program.inputs)
    inputs: list[Input] = []
    for value in made:
        if value in recording.outputs:
            name = unique_name(None, value, (*program.inputs, *inputs))
            inputs.append(Input(value, name, "batch", wants_grad and recording.outputs[value].is_floating_point()))
    calls = tuple(call for index, call in enumerate(program.calls) if index not in chosen)
    tensors = {**candidate.tensors, **{item.value: recording.outputs[item.value] for item in inputs}}
    return Candidate(replace(program, calls=calls, inputs=(*program.inputs, *inputs)), tensors).pruned()


def _bypassed(candidate: Candidate, chosen: frozenset[int], recording: Recording) -> Iterator[Candidate]:
    """With something that the calls read in place of the one thing that is needed of what they made: what has the same
    shape first; for a single call also what has another one.
    """
    calls = candidate.program.calls
    inside = {value for index in chosen for value in calls[index].output_refs()}
    needed = {v for index, call in enumerate(calls) if index not in chosen for v in call.input_refs()}
    leaving = sorted(inside & (needed | {ref.value for ref in candidate.program.outputs}))
    if len(leaving) != 1 or leaving[0] not in recording.outputs:
        return
    if any(is_in_place(calls[index].target) for index in chosen):
        return
    output = recording.outputs[leaving[0]]
    read = {value: recording.inputs[i, value] for i in sorted(chosen) for value in calls[i].input_refs()}
    alike = [value for value, tensor in read.items() if value not in inside and tensor.dtype == output.dtype]
    for value in sorted(alike, key=lambda value: read[value].shape != output.shape):
        if len(chosen) == 1 or read[value].shape == output.shape:
            yield candidate.without_calls(chosen, {leaving[0]: Ref(value)})
