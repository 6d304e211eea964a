"""Cut: to the calls that the failure depends on, then to the origin call with its recorded inputs, and upstream again.

`slice_to` reads the data flow alone and leaves out the rest of a long step before anything runs. `cuts` needs one
instrumented run, which records the arguments of the calls around the origin and the gradients of their outputs. The
smallest cut is tried first; every refusal doubles the number of calls that are kept, and the whole program comes last.

`remove_calls` takes out what is left: whole module scopes first, then windows, largest first, then single calls. A call
can go when its outputs are given as inputs with their recorded values, or when one of its inputs stands in for
its output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from reprokit.locate.failure import Failure
from reprokit.locate.kinds import ACCUMULATION
from reprokit.program.dataflow import BACKWARDS, calls_after, calls_behind, needed_calls
from reprokit.program.functions import is_in_place
from reprokit.program.ir import Input, Program, Ref, iter_refs
from reprokit.program.step import Step
from reprokit.shrink.context.step import StepGraph
from reprokit.shrink.leaves import unique_name, without_defaults
from reprokit.shrink.problem import Problem
from reprokit.shrink.recording import Excerpt, Recording, record

_MAX_WRITES = 4  # autograd objects to one of the latest writes


def cuts(candidate: Step, failure: Failure) -> Iterator[tuple[str, Step]]:
    """What to try, smallest first, each with a few words."""
    program = candidate.program
    if failure.is_of_whole_step:
        yield from _parts_of_step(candidate)
        return
    origin = failure.call_index
    if origin is not None:
        for kept in _neighbourhoods(StepGraph(candidate), origin, _way_to_drop(program, failure)):
            recording = record(candidate, frozenset(kept))
            for cut in _cuts_to(candidate, failure, kept, recording):
                yield f"only {len(kept)} of {len(program.calls)} calls", cut
        yield "only the calls up to the failure", _up_to(candidate, failure)


def _parts_of_step(candidate: Step) -> Iterator[tuple[str, Step]]:
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


def _cuts_to(candidate: Step, failure: Failure, kept: Sequence[int], recording: Recording) -> Iterator[Step]:
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


def _way_to_drop(program: Program, failure: Failure) -> list[int]:
    """The calls from the origin to the one that drops the NaN values, which is the last."""
    if failure.drop is None or failure.call_index is None:
        return []
    end, reached = failure.drop.call_index, set(calls_after(program.calls, failure.call_index))
    return [*sorted(reached.intersection(calls_behind(program.calls, program.calls[end].input_refs(), end))), end]


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


def _up_to(candidate: Step, failure: Failure) -> Step:
    """The whole program without what comes after the failure could be seen."""
    calls = [without_defaults(call) for call in candidate.program.calls]
    origin = failure.call_index if failure.call_index is not None else 0
    is_value = failure.value is not None and failure.call_index is not None and not failure.in_update
    if is_value and failure.backward_node is None:
        outputs = (Ref(failure.value),) if failure.value is not None else ()
        return candidate.with_calls(calls[: origin + 1], outputs=outputs).pruned()
    later = [index for index, call in enumerate(calls) if index >= origin and call.is_differentiation]
    end = later[-1] + 1 if failure.in_backward and later else len(calls)
    return candidate.with_calls(calls[:end]).pruned()


def _excerpt(
    candidate: Step, kept: Sequence[int], recording: Recording, wants_grad: frozenset[tuple[int, int]]
) -> Excerpt:
    """The kept calls; of what they read and did not make, ``wants_grad`` lists the leaves."""
    excerpt = Excerpt(candidate.program, recording)
    excerpt.keep(kept, {"rng"}, wants_grad)
    if not wants_grad:
        excerpt.differentiate_nowhere()
    return excerpt


def _forward(
    candidate: Step, failure: Failure, kept: Sequence[int], recording: Recording, wants_grad: frozenset[tuple[int, int]]
) -> Step:
    excerpt = _excerpt(candidate, kept, recording, wants_grad)
    outputs = excerpt.calls[-1].output_refs()
    if failure.call_index is not None and failure.value in outputs:
        outputs = (failure.value,)
    return excerpt.candidate(outputs)


def _backwards(candidate: Step, failure: Failure, kept: Sequence[int], recording: Recording) -> Iterator[Step]:
    """With gradients for the input whose gradient is bad, then for all; from the latest backward pass, then earlier."""
    wanted = frozenset(pair for pair in recording.needs_grad if pair[1] == failure.value)
    rounds = max((len(found) for found in recording.gradients.values()), default=0)
    for leaves in dict.fromkeys((wanted, frozenset(recording.needs_grad))):
        for number in reversed(range(rounds)):
            if leaves:
                excerpt = _excerpt(candidate, kept, recording, leaves)
                excerpt.differentiate(candidate.program.calls[kept[-1]].output_refs(), number)
                yield excerpt.candidate()


def slice_to(candidate: Step, failure: Failure) -> tuple[Step, Failure] | None:
    """The program without what the failure does not depend on, and the failure with its new place.

    ``None`` when there is nothing to leave out, or when the data flow does not tell, as after an optimizer's step.
    """
    program, origin = candidate.program, failure.call_index
    end = _end(program, failure)
    kept = needed_calls(program.calls, {end, *_rest_of_layer(candidate, failure)}) if end is not None else None
    if origin is None or kept is None or origin not in kept or len(kept) == len(program.calls):
        return None
    outputs = (Ref(failure.value),) if failure.in_forward and failure.value is not None else ()
    calls = tuple(program.calls[index] for index in kept)
    sliced = candidate.with_calls(calls, outputs=outputs).pruned()
    drop = replace(failure.drop, call_index=kept.index(failure.drop.call_index)) if failure.drop else None
    return sliced, replace(failure, call_index=kept.index(origin), drop=drop)


def _end(program: Program, failure: Failure) -> int | None:
    """Where the failure shows: at its origin, or in the first backward pass that goes through the origin."""
    origin = failure.call_index
    if origin is None or failure.in_forward:
        return origin
    if not failure.is_bad_gradient or failure.backward_node == ACCUMULATION:
        return None
    passes = (i for i in range(origin + 1, len(program.calls)) if program.calls[i].target in BACKWARDS)
    return next((index for index in passes if origin in (needed_calls(program.calls, {index}) or ())), None)


def _rest_of_layer(candidate: Step, failure: Failure) -> list[int]:
    """What one of torch's layers does after an origin inside it: only its whole run tells which layer it is."""
    origin = failure.call_index
    if origin is None or not failure.in_forward or failure.kind.raises:
        return []
    return [index for index in StepGraph(candidate).units[origin] if index > origin]


def remove_calls(problem: Problem) -> None:
    """Take out every call that the failure does not need."""
    _remove_scopes(problem)
    window = max(1, len(problem.best.program.calls) // 2)
    while window:
        stop = len(problem.best.program.calls)
        while stop > 0:  # from the end to the beginning
            start = max(0, stop - window)
            chosen = frozenset(index for index in _removable(problem) if start <= index < stop)
            if chosen:
                _remove(problem, chosen, f"without {len(chosen)} calls" if len(chosen) > 1 else "without one call")
            stop = start
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


def _removable(problem: Problem) -> list[int]:
    """Every call but the origin, and the backward pass that a bad gradient is seen in when there is only one."""
    calls = problem.best.program.calls
    failure = problem.failure
    passes = [index for index, call in enumerate(calls) if call.is_differentiation]
    kept = set(passes if failure.in_backward and len(passes) == 1 else ())
    kept.update(problem.fixed(problem.best))
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


def _without(candidate: Step, chosen: frozenset[int], recording: Recording, may_bypass: bool) -> Iterator[Step]:
    yield _dropped(candidate, chosen)
    yield _by_value(candidate, chosen, recording)
    if len(chosen) == 1:
        yield from _as_leaf(candidate, next(iter(chosen)))
    if may_bypass:
        yield from _bypassed(candidate, chosen, recording)


def _dropped(candidate: Step, chosen: frozenset[int]) -> Step:
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


def _as_leaf(candidate: Step, index: int) -> Iterator[Step]:
    """With `requires_grad` on the input itself, in place of a later `requires_grad_()`."""
    call = candidate.program.calls[index]
    if call.target == "torch.Tensor.requires_grad_" and isinstance(call.args[0], Ref):
        inputs = (
            replace(i, requires_grad=i.requires_grad or i.value == call.args[0].value) for i in candidate.program.inputs
        )
        yield candidate.with_calls(candidate.with_call(index).program.calls, inputs=tuple(inputs))


def _by_value(candidate: Step, chosen: frozenset[int], recording: Recording) -> Step:
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
    return Step(replace(program, calls=calls, inputs=(*program.inputs, *inputs)), tensors).pruned()


def _bypassed(candidate: Step, chosen: frozenset[int], recording: Recording) -> Iterator[Step]:
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
