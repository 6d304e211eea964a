"""Edits of a context that no pass of the minimum makes: no randomness, free sizes in shapes, the gradient of a sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from reprokit.program.functions import is_in_place
from reprokit.program.ir import AUTOGRAD_BACKWARD, BACKWARD, Call, Input, Phase, Ref, Scope, iter_refs
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.context.step import StepGraph, written
from reprokit.shrink.dimensions import Class
from reprokit.shrink.leaves import parameters_of, with_leaf
from reprokit.shrink.recording import record
from reprokit.shrink.risks import RECURRENT

_MAX_ENDS = 4
_FIRST_OF_KERNEL = 2  # of a weight's dimensions, behind those of channels
_PROBABILITIES = frozenset({"p", "dropout", "dropout_p"})


def is_written(candidate: Candidate, group: Class) -> bool:
    """True if a class of sizes holds a kernel, a size that the user wrote, or what a recurrent layer is made of, whose
    gates and layers are multiples."""
    calls = candidate.program.calls
    layers = {value for call in calls if call.target in RECURRENT for value in call.input_refs()[1:]}
    kernels = {ref.value for call in calls if "conv" in call.name for ref in iter_refs(call.args[1:2])}
    return any(
        member.value in layers or (member.value in kernels and member.axis >= _FIRST_OF_KERNEL) for member in group.axes
    )


def with_certainty(candidate: Candidate, index: int) -> Candidate | None:
    """With a probability of 0 in a random call; ``None`` for one that has no such argument."""
    call = candidate.program.calls[index]
    names = parameters_of(call.target)
    name = next((name for name in names if name in _PROBABILITIES), None)
    if name is None:
        return None
    place, mode = names.index(name), replace(call.mode, rng=None)
    if place < len(call.args):
        return candidate.with_call(index, replace(with_leaf(call, (0, place), 0.0), mode=mode))
    return candidate.with_call(index, replace(call, kwargs={**call.kwargs, name: 0.0}, mode=mode))


def without_unused(candidate: Candidate) -> Candidate:
    """Without the calls whose results nothing uses; in-place calls stay, for they may write through a view."""
    step, program = StepGraph(candidate), candidate.program
    ends = {ref.value for ref in program.outputs}
    used = [
        index
        for index, call in enumerate(program.calls)
        if is_in_place(call.target) or not step.is_forward(index) or ends & written(call)
    ]
    kept = set(step.upstream(used, len(program.calls) + 1, lambda index: True))
    return candidate.with_calls(call for index, call in enumerate(program.calls) if index in kept).pruned()


def ending_earlier(candidate: Candidate, origin: int, *, in_sum: bool) -> Iterator[Candidate]:
    """With the backward pass from something between the origin and the end, nearest to the origin first: from its sum,
    or with the gradient that arrives there.

    Nothing for a candidate that does not end in its only backward pass, from given gradients.
    """
    program, step = candidate.program, StepGraph(candidate)
    others = [call for call in program.calls if call.is_differentiation or call.is_optimizer_step]
    if len(others) != 1 or program.calls[-1].target != AUTOGRAD_BACKWARD:
        return
    later = step.downstream(origin, len(program.calls), lambda index: True)
    ends = [i for i in later if i == step.units[i][-1] and len(program.calls[i].output_refs()) == 1][:_MAX_ENDS]
    gradients = {} if in_sum else record(candidate, frozenset(ends)).gradients
    new = Ref(program.next_value())
    item = Input(new.value, "gradient", "gradient")
    given = candidate.with_calls(program.calls, inputs=(*program.inputs, item))
    for value in (Ref(program.calls[index].output_refs()[0]) for index in ends):
        if in_sum:
            total = Call("torch.Tensor.sum", (value,), outputs=new)
            backward = Call(BACKWARD, (new,), phase=Phase.BACKWARD)
            yield without_unused(candidate.with_call(len(program.calls) - 1, total, backward))
        elif value.value in gradients:
            backward = replace(program.calls[-1], args=([value], [new]))
            ended = given.with_call(len(program.calls) - 1, backward)
            yield without_unused(ended.with_tensors({new.value: gradients[value.value][-1]}))


def with_sum(candidate: Candidate) -> Candidate | None:
    """With ``out.sum().backward()``; ``None`` unless it ends in a backward pass from given gradients."""
    program = candidate.program
    place = next((i for i, call in enumerate(program.calls) if call.target == AUTOGRAD_BACKWARD), None)
    if place is None or len(program.calls[place].args) != 2:
        return None
    call = program.calls[place]
    value = candidate.program.next_value()
    added: list[Call] = []
    total: Ref | None = None
    for start, gradient in zip(*call.args, strict=True):
        term = start
        if candidate.tensors[gradient.value].dim():
            term, value = Ref(value), value + 1
            added.append(Call("torch.Tensor.sum", (start,), outputs=term))
        if total is not None:
            added.append(Call("torch.Tensor.add", (total, term), outputs=Ref(value)))
            term, value = Ref(value), value + 1
        total = term
    return candidate.with_call(place, *added, Call(BACKWARD, (total,), phase=Phase.BACKWARD)).pruned()


def module_runs(candidate: Candidate) -> list[tuple[tuple[Scope, ...], frozenset[int]]]:
    """The scopes of every run of a module and the calls in it, largest first."""
    runs: dict[tuple[Scope, ...], set[int]] = {}
    for index, call in enumerate(candidate.program.calls):
        for depth in range(1, len(call.scope) + 1):
            runs.setdefault(call.scope[:depth], set()).add(index)
    found = [(scope, frozenset(members)) for scope, members in runs.items()]
    return sorted(found, key=lambda run: (-len(run[1]), min(run[1])))


def without_module(
    candidate: Candidate, run: frozenset[int], shapes: Mapping[int, tuple[int, ...]]
) -> Iterator[Candidate]:
    """The candidate without a run of a module, with something it was given in place of the one thing it returned."""
    program = candidate.program
    made = {value for index in run for value in program.calls[index].output_refs()}
    others = [call for index, call in enumerate(program.calls) if index not in run]
    needed = {value for call in others for value in call.input_refs()} | {ref.value for ref in program.outputs}
    leaving = sorted(made & needed)
    if len(leaving) != 1 or any(is_in_place(program.calls[index].target) for index in run):
        return
    kept = {item.value for item in program.inputs if item.role in ("parameter", "buffer")}  # is no activation
    read = dict.fromkeys(value for index in sorted(run) for value in program.calls[index].input_refs())
    for value in read:
        if value not in made | kept and shapes.get(value) == shapes.get(leaving[0]):
            yield candidate.without_calls(run, {leaving[0]: Ref(value)})


def without_call(candidate: Candidate, index: int) -> Candidate | None:
    """The candidate with the one tensor that a call was given in place of the one that it returned."""
    call = candidate.program.calls[index]
    outputs, inputs = call.output_refs(), list(iter_refs((call.args, call.kwargs)))
    if len(outputs) != 1 or len(inputs) != 1:
        return None
    return candidate.without_calls((index,), {outputs[0]: inputs[0]})
