"""Cut: to the origin call with its recorded inputs, and upstream from there until the failure is the same.

One instrumented run records what the calls around the origin read and which gradients arrived at their outputs. The
smallest cut is tried first; every refusal doubles the number of calls that are kept, and the whole program comes last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from reprokit.locate.failure import Failure
from reprokit.program.functions import is_in_place
from reprokit.program.ir import AUTOGRAD_BACKWARD, OPAQUE, Call, Input, Mode, Program, Ref, iter_refs
from reprokit.shrink.arguments import without_defaults
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.naming import unique_name
from reprokit.shrink.recording import Recording, record

_MAX_WRITES = 4


def cuts(candidate: Candidate, failure: Failure) -> Iterator[tuple[str, Candidate]]:
    """What to try, smallest first, each with a few words."""
    program = candidate.program
    if failure.is_of_whole_step:
        yield from _parts_of_step(candidate)
        return
    origin = failure.call_index if failure.call_index is not None else _first_reader(program, failure)
    if origin is not None:
        for kept in _neighbourhoods(program, origin, _way_to_drop(program, failure)):
            recording = record(candidate, frozenset(kept))
            for cut in _cuts_to(candidate, failure, kept, recording):
                yield f"only {len(kept)} of {len(program.calls)} calls", cut
        yield "only the calls up to the failure", _up_to(candidate, failure)


def _parts_of_step(candidate: Candidate) -> Iterator[tuple[str, Candidate]]:
    """For a failure that no single call shows: the forward pass alone, then everything up to the last backward pass."""
    program = candidate.program
    places = [index for index, call in enumerate(program.calls) if call.is_differentiation]
    if not places:
        return
    first = program.calls[places[0]]
    starts = tuple(iter_refs(first.args[:1]))[:1]
    forward = replace(program, calls=program.calls[: places[0]], outputs=starts)
    yield "only the forward pass", replace(candidate, program=forward).pruned()
    calls = program.calls[: places[-1] + 1]
    known = {item.value for item in program.inputs}.union(*(call.output_refs() for call in calls))
    outputs = tuple(ref for ref in program.outputs if ref.value in known)
    backward = replace(program, calls=calls, outputs=outputs)
    yield "only up to the last backward pass", replace(candidate, program=backward).pruned()


def _cuts_to(candidate: Candidate, failure: Failure, kept: Sequence[int], recording: Recording) -> Iterator[Candidate]:
    if candidate.program.calls[kept[-1]].is_optimizer_step:
        for only in dict.fromkeys((failure.value, None)):
            yield _optimizer_step(candidate, kept[-1], recording, only)
    elif failure.backward_node is not None:
        yield from _backwards(candidate, failure, kept, recording)
    elif not candidate.program.calls[kept[-1]].is_differentiation:
        yield _forward(candidate, failure, kept, recording, frozenset())
    elif len(kept) > 1:  # a differentiation needs something to go through
        yield _forward(candidate, failure, kept, recording, frozenset(recording.needs_grad))


def _first_reader(program: Program, failure: Failure) -> int | None:
    """The first call that reads an input which was bad from the start."""
    for index, call in enumerate(program.calls):
        if failure.value in call.input_refs() and not call.is_differentiation and call.output_refs():
            return index
    return None


def _way_to_drop(program: Program, failure: Failure) -> list[int]:
    """The calls from the origin to the one that drops the NaN values, which is the last."""
    if failure.drop is None or failure.call_index is None:
        return []
    end = failure.drop.call_index
    reached, led_to = [], set(program.calls[failure.call_index].output_refs())
    for index in range(failure.call_index + 1, end + 1):
        if led_to.intersection(program.calls[index].input_refs()):
            reached.append(index)
            led_to |= _written(program.calls[index])
    needed, kept = set(program.calls[end].input_refs()), [end]
    for index in reversed(reached[:-1]):
        if needed & _written(program.calls[index]):
            kept.append(index)
            needed.update(program.calls[index].input_refs())
    return kept[::-1]


def _neighbourhoods(program: Program, origin: int, downstream: Sequence[int] = ()) -> Iterator[tuple[int, ...]]:
    """The origin alone, then with the calls it depends on most directly: 1, 2, 4, ... calls more.

    ``downstream`` are the calls behind it that have to stay. What a differentiation objects to is often that something
    was written in place.
    """
    written = [_written(call) for call in program.calls]
    order, followed, size = [origin, *downstream], 0, 1 + len(downstream)
    if program.calls[origin].is_differentiation:
        writes = [index for index in reversed(range(origin)) if is_in_place(program.calls[index].target)]
        order.extend(writes[:_MAX_WRITES])
    while True:
        while len(order) <= size and followed < len(order):
            order.extend(found for found in _producers(program, written, order[followed]) if found not in order)
            followed += 1
        yield tuple(sorted(order[:size]))
        if len(order) <= size:
            return
        size *= 2


def _producers(program: Program, written: Sequence[set[int]], index: int) -> list[int]:
    """The calls that wrote what a call reads, latest first; ``written`` says what each call writes."""
    wanted = set(program.calls[index].input_refs())
    found = []
    for position in range(index - 1, -1, -1):
        call = program.calls[position]
        if call.target == OPAQUE or not written[position] & wanted:
            continue
        found.append(position)
        if not is_in_place(call.target):
            wanted -= written[position]
    return found


def _written(call: Call) -> set[int]:
    written = set(call.output_refs())
    if is_in_place(call.target):
        written |= {ref.value for ref in iter_refs(call.args[:1])}
    return written


def _up_to(candidate: Candidate, failure: Failure) -> Candidate:
    """The whole program without what comes after the failure could be seen."""
    calls = [without_defaults(call) for call in candidate.program.calls]
    origin = failure.call_index if failure.call_index is not None else 0
    is_value = failure.value is not None and failure.call_index is not None and failure.phase != "optimizer"
    if is_value and failure.backward_node is None:
        outputs = (Ref(failure.value),) if failure.value is not None else ()
        program = replace(candidate.program, calls=tuple(calls[: origin + 1]), outputs=outputs)
        return replace(candidate, program=program).pruned()
    later = [index for index, call in enumerate(calls) if index >= origin and call.is_differentiation]
    end = later[-1] + 1 if failure.phase == "backward" and later else len(calls)
    return replace(candidate, program=replace(candidate.program, calls=tuple(calls[:end]))).pruned()


@dataclass
class _Body:
    """The kept calls as a program of their own, on recorded inputs."""

    calls: list[Call] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, item: Input, tensor: torch.Tensor) -> None:
        """Add an input."""
        self.inputs.append(item)
        self.tensors[item.value] = tensor

    def candidate(self, candidate: Candidate, outputs: tuple[Ref, ...] = ()) -> Candidate:
        """The finished candidate."""
        return Candidate(
            Program(tuple(self.calls), tuple(self.inputs), outputs, candidate.program.modules), self.tensors
        )


def _body(
    candidate: Candidate, kept: Sequence[int], recording: Recording, wants_grad: frozenset[tuple[int, int]]
) -> _Body:
    """The kept calls; of what they read and did not make, ``wants_grad`` lists the leaves."""
    program = candidate.program
    known = {item.value: item for item in program.inputs}
    body = _Body()
    made: set[int] = set()
    for index in kept:
        call = program.calls[index]
        for value in call.input_refs():
            if value not in made and value not in body.tensors:
                old = known.get(value, Input(value, ""))
                role = "rng" if old.role == "rng" else "batch"
                item = Input(
                    value, old.name or unique_name(call, value, body.inputs), role, (index, value) in wants_grad
                )
                body.add(item, recording.inputs[index, value])
        made.update(call.output_refs())
        body.calls.append(_plain_mode(without_defaults(call), bool(wants_grad)))
    return body


def _plain_mode(call: Call, differentiable: bool) -> Call:
    """With gradients on where nothing depends on it: one block less in the repro."""
    return call if differentiable else replace(call, mode=replace(call.mode, grad=True, inference=False))


def _forward(
    candidate: Candidate,
    failure: Failure,
    kept: Sequence[int],
    recording: Recording,
    wants_grad: frozenset[tuple[int, int]],
) -> Candidate:
    body = _body(candidate, kept, recording, wants_grad)
    outputs = body.calls[-1].output_refs()
    if failure.call_index is not None and failure.value in outputs:
        outputs = (failure.value,)
    return body.candidate(candidate, tuple(Ref(value) for value in outputs))


def _backwards(
    candidate: Candidate, failure: Failure, kept: Sequence[int], recording: Recording
) -> Iterator[Candidate]:
    """With gradients for the input whose gradient is bad, then for all; from the latest backward pass, then earlier."""
    wanted = frozenset(pair for pair in recording.needs_grad if pair[1] == failure.value)
    rounds = max((len(found) for found in recording.gradients.values()), default=0)
    for leaves in dict.fromkeys((wanted, frozenset(recording.needs_grad))):
        for number in reversed(range(rounds)):
            if leaves:
                yield _backward(candidate, kept, recording, leaves, number)


def _backward(
    candidate: Candidate,
    kept: Sequence[int],
    recording: Recording,
    leaves: frozenset[tuple[int, int]],
    number: int,
) -> Candidate:
    body = _body(candidate, kept, recording, leaves)
    value = candidate.program.next_value()
    starts, gradients = [], []
    for output in candidate.program.calls[kept[-1]].output_refs():
        found = recording.gradients.get(output, [])
        if number < len(found):
            body.add(Input(value, "gradient", "gradient"), found[number])
            starts.append(Ref(output))
            gradients.append(Ref(value))
            value += 1
    body.calls.append(Call(AUTOGRAD_BACKWARD, (starts, gradients), phase="backward", mode=Mode()))
    return body.candidate(candidate)


def _optimizer_step(candidate: Candidate, index: int, recording: Recording, only: int | None) -> Candidate:
    """The step on one parameter alone, or on all of them, with gradients and state as they were."""
    call = candidate.program.calls[index]
    known = {item.value: item for item in candidate.program.inputs}
    body = _Body()
    value = candidate.program.next_value()
    content: dict[str, list[object]] = {"params": [], "grads": [], "options": [], "state": []}
    for parameters, grads, options, states in zip(*(call.kwargs[name] for name in content), strict=True):
        rows = [row for row in zip(parameters, grads, states, strict=True) if only in (None, row[0].value)]
        given: list[Ref | None] = []
        for parameter, grad, state in rows:
            name = known[parameter.value].name if parameter.value in known else "parameter"
            body.add(Input(parameter.value, name, "parameter", True), recording.inputs[index, parameter.value])
            recorded = recording.inputs.get((index, grad.value)) if grad else recording.grads.get(parameter.value)
            given.append(Ref(value) if recorded is not None else None)
            if recorded is not None:
                body.add(Input(value, "grad", "gradient"), recorded)
                value += 1
            for key, ref in ((key, ref) for key, item in state.items() for ref in iter_refs(item)):
                body.add(Input(ref.value, key, "state"), recording.inputs[index, ref.value])
        if rows:
            content["params"].append([row[0] for row in rows])
            content["grads"].append(given)
            content["options"].append(dict(options))
            content["state"].append([dict(row[2]) for row in rows])
    body.calls.append(replace(call, args=(), kwargs=content, outputs=None))
    return body.candidate(candidate)
