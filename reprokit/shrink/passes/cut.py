"""Cut: to the calls that the failure depends on, then to the origin call with its recorded inputs, and upstream again.

`slice_to` reads the data flow alone and leaves out the rest of a long step before anything runs. `cuts` needs one
instrumented run, which records the arguments of the calls around the origin and the gradients of their outputs. The
smallest cut is tried first; every refusal doubles the number of calls that are kept, and the whole program comes last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from reprokit.locate.failure import EXCEPTION, Failure
from reprokit.program.dataflow import BACKWARDS, needed_calls
from reprokit.program.functions import is_in_place
from reprokit.program.ir import (
    Call,
    Input,
    Phase,
    Program,
    Ref,
    iter_refs,
)
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.context.step import StepGraph, written
from reprokit.shrink.leaves import unique_name, without_defaults
from reprokit.shrink.recording import Excerpt, Recording, record
from reprokit.shrink.signature import ACCUMULATION

_MAX_WRITES = 4  # autograd objects to one of the latest writes


def cuts(candidate: Candidate, failure: Failure) -> Iterator[tuple[str, Candidate]]:
    """What to try, smallest first, each with a few words."""
    program = candidate.program
    if failure.is_of_whole_step:
        yield from _parts_of_step(candidate)
        return
    origin = failure.call_index if failure.call_index is not None else _first_reader(program, failure)
    if origin is not None:
        for kept in _neighbourhoods(StepGraph(candidate), origin, _way_to_drop(program, failure)):
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
    yield "only the forward pass", candidate.with_calls(program.calls[: places[0]], outputs=starts).pruned()
    calls = program.calls[: places[-1] + 1]
    known = {item.value for item in program.inputs}.union(*(call.output_refs() for call in calls))
    outputs = tuple(ref for ref in program.outputs if ref.value in known)
    yield "only up to the last backward pass", candidate.with_calls(calls, outputs=outputs).pruned()


def _cuts_to(candidate: Candidate, failure: Failure, kept: Sequence[int], recording: Recording) -> Iterator[Candidate]:
    if candidate.program.calls[kept[-1]].is_optimizer_step:
        everything = frozenset(ref.value for ref in iter_refs(candidate.program.calls[kept[-1]].kwargs["params"]))
        bad = everything if failure.value is None else everything & {failure.value}
        for parameters in dict.fromkeys((bad, everything)):
            excerpt = Excerpt(candidate.program, recording)
            excerpt.update(kept[-1], parameters, is_alone=True)
            yield excerpt.candidate()
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
            led_to |= written(program.calls[index])
    needed, kept = set(program.calls[end].input_refs()), [end]
    for index in reversed(reached[:-1]):
        if needed & written(program.calls[index]):
            kept.append(index)
            needed.update(program.calls[index].input_refs())
    return kept[::-1]


def _neighbourhoods(step: StepGraph, origin: int, downstream: Sequence[int] = ()) -> Iterator[tuple[int, ...]]:
    """The origin alone, then with the calls it depends on most directly: 1, 2, 4, ... calls more.

    ``downstream`` are the calls behind it that have to stay. What a differentiation objects to is often that something
    was written in place.
    """
    order, followed, size = [origin, *downstream], 0, 1 + len(downstream)
    calls = step.program.calls
    if calls[origin].is_differentiation:
        writes = [index for index in reversed(range(origin)) if is_in_place(calls[index].target)]
        order.extend(writes[:_MAX_WRITES])
    while True:
        while len(order) <= size and followed < len(order):
            order.extend(found for found in step.producers(order[followed]) if found not in order)
            followed += 1
        yield tuple(sorted(order[:size]))
        if len(order) <= size:
            return
        size *= 2


def _up_to(candidate: Candidate, failure: Failure) -> Candidate:
    """The whole program without what comes after the failure could be seen."""
    calls = [without_defaults(call) for call in candidate.program.calls]
    origin = failure.call_index if failure.call_index is not None else 0
    is_value = failure.value is not None and failure.call_index is not None and failure.phase != Phase.OPTIMIZER
    if is_value and failure.backward_node is None:
        outputs = (Ref(failure.value),) if failure.value is not None else ()
        return candidate.with_calls(calls[: origin + 1], outputs=outputs).pruned()
    later = [index for index, call in enumerate(calls) if index >= origin and call.is_differentiation]
    end = later[-1] + 1 if failure.phase == Phase.BACKWARD and later else len(calls)
    return candidate.with_calls(calls[:end]).pruned()


def _excerpt(
    candidate: Candidate, kept: Sequence[int], recording: Recording, wants_grad: frozenset[tuple[int, int]]
) -> Excerpt:
    """The kept calls; of what they read and did not make, ``wants_grad`` lists the leaves."""
    excerpt = Excerpt(candidate.program, recording)
    known = {item.value: item for item in candidate.program.inputs}
    made: set[int] = set()
    for index in kept:
        call = candidate.program.calls[index]
        for value in call.input_refs():
            if value not in made and value not in excerpt.tensors:
                old = known.get(value, Input(value, ""))
                name = old.name or unique_name(call, value, excerpt.inputs)
                excerpt.read(index, value, name, "rng" if old.role == "rng" else "batch", (index, value) in wants_grad)
        made.update(call.output_refs())
        excerpt.calls.append(_plain_mode(without_defaults(call), bool(wants_grad)))
    return excerpt


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
    excerpt = _excerpt(candidate, kept, recording, wants_grad)
    outputs = excerpt.calls[-1].output_refs()
    if failure.call_index is not None and failure.value in outputs:
        outputs = (failure.value,)
    return excerpt.candidate(outputs)


def _backwards(
    candidate: Candidate, failure: Failure, kept: Sequence[int], recording: Recording
) -> Iterator[Candidate]:
    """With gradients for the input whose gradient is bad, then for all; from the latest backward pass, then earlier."""
    wanted = frozenset(pair for pair in recording.needs_grad if pair[1] == failure.value)
    rounds = max((len(found) for found in recording.gradients.values()), default=0)
    for leaves in dict.fromkeys((wanted, frozenset(recording.needs_grad))):
        for number in reversed(range(rounds)):
            if leaves:
                excerpt = _excerpt(candidate, kept, recording, leaves)
                excerpt.differentiate(candidate.program.calls[kept[-1]].output_refs(), number)
                yield excerpt.candidate()


def slice_to(candidate: Candidate, failure: Failure) -> tuple[Candidate, Failure] | None:
    """The program without what the failure does not depend on, and the failure with its new place.

    ``None`` when there is nothing to leave out, or when the data flow does not tell, as after an optimizer's step.
    """
    program, origin = candidate.program, failure.call_index
    end = _end(program, failure)
    kept = needed_calls(program.calls, {end, *_rest_of_layer(candidate, failure)}) if end is not None else None
    if origin is None or kept is None or origin not in kept or len(kept) == len(program.calls):
        return None
    outputs = (Ref(failure.value),) if failure.phase == Phase.FORWARD and failure.value is not None else ()
    calls = tuple(program.calls[index] for index in kept)
    sliced = candidate.with_calls(calls, outputs=outputs).pruned()
    drop = replace(failure.drop, call_index=kept.index(failure.drop.call_index)) if failure.drop else None
    return sliced, replace(failure, call_index=kept.index(origin), drop=drop)


def _end(program: Program, failure: Failure) -> int | None:
    """Where the failure shows: at its origin, or in the first backward pass that goes through the origin."""
    origin = failure.call_index
    if origin is None or failure.phase == Phase.FORWARD:
        return origin
    if failure.phase != Phase.BACKWARD or failure.kind == EXCEPTION or failure.backward_node == ACCUMULATION:
        return None
    passes = (i for i in range(origin + 1, len(program.calls)) if program.calls[i].target in BACKWARDS)
    return next((index for index in passes if origin in (needed_calls(program.calls, {index}) or ())), None)


def _rest_of_layer(candidate: Candidate, failure: Failure) -> list[int]:
    """What one of torch's layers does after an origin inside it: only its whole run tells which layer it is."""
    origin = failure.call_index
    if origin is None or failure.phase != Phase.FORWARD or failure.kind == EXCEPTION:
        return []
    return [index for index in StepGraph(candidate).units[origin] if index > origin]
