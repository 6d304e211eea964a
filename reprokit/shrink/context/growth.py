"""The choice of a slice: what the origin depends on in its own module, grown until what it is given is ordinary.

Slices are proposed likeliest first. The first that fails in the same way on ordinary inputs (finite, moderate numbers)
is taken; where none is ordinary, the least bad one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import torch

from reprokit.locate.failure import Failure
from reprokit.program.dataflow import BACKWARDS, contents, needed_calls
from reprokit.program.ir import AUTOGRAD_BACKWARD, BACKWARD, Call, Input, Phase, Ref, iter_refs
from reprokit.program.step import Step, is_number
from reprokit.shrink.checks.check import Ruling
from reprokit.shrink.context.step import StepGraph, StepSlice
from reprokit.shrink.oracle import Oracle
from reprokit.shrink.passes.cut import cuts
from reprokit.shrink.problem import Class
from reprokit.shrink.recording import record
from reprokit.shrink.safety import RECURRENT

_LIMIT = 1e3
_LIMITS = {torch.float16: 128.0}
_OWN_CALLS = 24  # calls of the origin's own module: about what one `forward` computes
_OWN_MODULE = 16  # units; of a larger module not all layers fit in a script
_FEW = 4  # units; fewer calls of a loop do not show where an operand came from
_GROWTH = 8  # calls that join for each input that is not ordinary, before the slice is run again
_MAX_CALLS = 200  # a longer slice cannot be made small within the budget
_MAX_UNITS = 42  # of the 60 lines that a script may have; classes and inputs take the others
_MAX_ENDS = 4
_FIRST_OF_KERNEL = 2  # of a weight's dimensions, behind those of channels


def is_ordinary(tensor: torch.Tensor) -> bool:
    """True if a tensor holds only finite, moderate numbers."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    largest = float(contents(tensor).abs().max())  # a NaN among them makes it NaN
    return largest <= _LIMITS.get(tensor.dtype, _LIMIT)


def extraordinary(candidate: Step) -> list[int]:
    """The inputs that are not ordinary."""
    items = (item for item in candidate.program.inputs if item.role != "rng")
    return [item.value for item in items if not is_ordinary(candidate.tensors[item.value])]


def chosen_slice(step: StepGraph, failure: Failure, oracle: Oracle) -> Iterator[Step]:
    """Slices that fail in the same way, each better than the one before; the last is the one to take.

    A slice is better if it is ordinary, then if it is not too long to print.
    """
    least_bad = 4
    for piece in _slices(step, failure):
        candidate = piece.candidate(failure.value)
        change = f"{len(piece.kept)} calls around the origin"
        if candidate is None or oracle.check(candidate, change) is not Ruling.SAME:
            continue
        is_long = step.num_units(piece.kept) > _MAX_UNITS
        if extraordinary(candidate) and not is_long:
            candidate = _tamed(candidate, oracle)
        rank = 2 * bool(extraordinary(candidate)) + is_long
        if rank < least_bad:
            least_bad = rank
            yield candidate
        if not extraordinary(candidate):
            return
    if least_bad == 4:  # nothing with modules fails alone: what the minimum starts from
        found = oracle.first(cuts(step.whole, failure))
        yield from [found] if found is not None else []


def _tamed(candidate: Step, oracle: Oracle) -> Step:
    """With zeros in place of the numbers that are not ordinary, if it fails without them: all, else one by one."""
    numbers = [value for value in extraordinary(candidate) if is_number(candidate.tensors[value])]
    for values in (numbers, *([value] for value in numbers)):
        tensors = {value: candidate.tensors[value] for value in values}
        limits = {value: _LIMITS.get(tensor.dtype, _LIMIT) for value, tensor in tensors.items()}
        tame = {v: torch.where(t.abs() <= limits[v], t, torch.zeros((), dtype=t.dtype)) for v, t in tensors.items()}
        if values and oracle.check(candidate.with_tensors(tame), "ordinary numbers") is Ruling.SAME:
            candidate = candidate.with_tensors(tame)
    return candidate


def _slices(step: StepGraph, failure: Failure) -> Iterator[StepSlice]:
    """Slices around the origin, with more of where inputs that are not ordinary come from; then of everything."""
    origin = failure.call_index
    if origin is None:
        return
    if step.program.calls[origin].is_optimizer_step:
        calls = step.program.calls  # the layer that holds the parameter which turned bad, then the module around it
        users = [i for i, c in enumerate(calls) if failure.value in c.input_refs() and step.is_forward(i)]
        for limit in (1, _OWN_CALLS) if users else ():
            kept = step.upstream(users, limit, step.within(users[0]))
            yield StepSlice(step, tuple(sorted(kept)), is_differentiated=True, update=origin)
        return
    is_differentiated = failure.is_bad_gradient
    if not (is_differentiated or step.is_forward(origin)):
        return
    kept = _own_calls(step, origin, is_differentiated)
    seen: set[tuple[int, ...]] = set()
    while len(kept) <= _MAX_CALLS:
        connected = step.connected(kept, origin, downstream=is_differentiated)
        if connected in seen:
            return
        seen.add(connected)
        piece = StepSlice(step, connected, is_differentiated)
        missing = _causes(piece)
        if is_differentiated or not missing or len(kept) + len(missing) > _MAX_CALLS:
            yield piece
        if not missing or len(kept) + len(missing) > _MAX_CALLS:
            later = step.downstream(origin, 2 * len(kept)) if is_differentiated else []
            missing = [*later, *step.upstream([*later, *kept], 2 * len(kept))]
        kept = list(dict.fromkeys((*kept, *missing)))


def _own_calls(step: StepGraph, origin: int, is_differentiated: bool) -> list[int]:
    """What the origin depends on in its own module or function, for a gradient also what depends on it there."""
    is_inside = step.within(origin)
    kept = step.upstream([origin], _OWN_CALLS, is_inside)
    if not step.places[origin][0] and step.num_units(kept) < _FEW:
        kept = step.upstream(kept, _FEW, lambda index: not step.program.calls[index].scope)
    if is_differentiated:
        later = step.downstream(origin, _OWN_CALLS, is_inside)
        whole = list(dict.fromkeys((*kept, *later, *step.upstream(later, 2 * _OWN_CALLS, is_inside))))
        kept = whole if step.num_units(whole) <= _MAX_UNITS else kept
    return kept


def _causes(piece: StepSlice) -> list[int]:
    """Where inputs that are not ordinary came from: calls of the module that made them."""
    step, candidate, found = piece.step, piece.candidate(None), list[int]()
    boundary = piece.boundary()
    for value in extraordinary(candidate) if candidate is not None else ():
        makers = step.producers(boundary[value]) if value in boundary else []
        maker = next((i for i in makers if value in step.program.calls[i].output_refs() and step.is_forward(i)), None)
        if maker is not None:
            found += step.upstream([maker], _GROWTH, step.within(maker))
    return [index for index in dict.fromkeys(found) if index not in piece.kept]


def own_calls(whole: StepGraph, origin: int) -> Callable[[Step], list[int]]:
    """What gives the calls of the origin's own module in a candidate; without the layers of a large one."""
    place = whole.places[origin]
    inside = [index for index in range(len(whole.program.calls)) if whole.places[index] == place]
    has_layers = whole.num_units(inside) <= _OWN_MODULE

    def find(candidate: Step) -> list[int]:
        step, calls = StepGraph(candidate), candidate.program.calls
        own = (index for index in range(len(calls)) if step.places[index] == place)
        return [index for index in own if calls[index].scope == place[0] or is_layer_kept(calls[index])]

    def is_layer_kept(call: Call) -> bool:
        return has_layers and (bool(place[0]) or len(call.scope) == 1)  # in the loop those that it calls itself

    return find


def without_randomness(candidate: Step, index: int) -> Step | None:
    """With the one tensor that a random call was given in place of the one that it returned, as with no dropout."""
    call = candidate.program.calls[index]
    outputs, inputs = call.output_refs(), list(iter_refs((call.args, call.kwargs)))
    if call.mode.rng is None or len(outputs) != 1 or len(inputs) != 1:
        return None
    return candidate.without_calls((index,), {outputs[0]: inputs[0]})


def without_unused(candidate: Step, origin: int) -> Step:
    """Without the calls that neither the origin nor a backward pass depends on, if the data flow tells."""
    calls = candidate.program.calls
    kept = needed_calls(calls, {origin, *(index for index, call in enumerate(calls) if call.target in BACKWARDS)})
    return candidate.without_calls(set(range(len(calls))).difference(kept)) if kept is not None else candidate


def full_rows(candidate: Step, masks: Collection[int]) -> set[tuple[int, float]]:
    """The masks with a row of zeros or ones alone: a causal mask that hides all of a row would be another cause."""
    tensors = {value: candidate.tensors[value] for value in masks if value in candidate.tensors}
    rows = ((value, number, t) for value, t in tensors.items() for number in (0.0, 1.0) if t.dim() and t.numel())
    return {(value, number) for value, number, tensor in rows if bool((tensor == number).all(-1).any())}


def is_mask(tensor: torch.Tensor) -> bool:
    """True if a tensor holds 0 and 1, both, and nothing else."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    zeros, ones = tensor == 0, tensor == 1
    return bool(zeros.any()) and bool(ones.any()) and bool((zeros | ones).all())


def keeps_biases(candidate: Step) -> bool:
    """True if every bias is as long as a dimension of the weight beside it: one that is broadcast is no layer's."""
    shapes = {item.name: candidate.tensors[item.value].shape for item in candidate.program.inputs}
    weights = ((name.removesuffix("bias") + "weight", shape) for name, shape in shapes.items() if name.endswith("bias"))
    ends = {name: shape[:1] if len(shape) == 2 else shape[:2] for name, shape in shapes.items()}
    return all(weight not in ends or shape.numel() in ends[weight] for weight, shape in weights)


def is_written(candidate: Step, group: Class) -> bool:
    """True if a class of sizes holds a kernel, a size that the user wrote, or what a recurrent layer is made of, whose
    gates and layers are multiples."""
    calls = candidate.program.calls
    kept = {item.value for item in candidate.program.inputs if item.role == "parameter"}
    layers = {value for call in calls if call.target in RECURRENT for value in call.input_refs()} & kept
    kernels = {ref.value for call in calls if "conv" in call.name for ref in iter_refs(call.args[1:2])}
    return any(
        member.value in layers or (member.value in kernels and member.axis >= _FIRST_OF_KERNEL) for member in group.axes
    )


def ending_earlier(candidate: Step, origin: int, *, in_sum: bool) -> Iterator[Step]:
    """With the backward pass from something between the origin and the end, nearest to the origin first: from its sum,
    or with the gradient that arrives there.

    Nothing for a candidate that does not end in its only backward pass, from given gradients.
    """
    program, step = candidate.program, StepGraph(candidate)
    last = len(program.calls) - 1
    others = [call for call in program.calls if call.is_differentiation or call.is_optimizer_step]
    if len(others) != 1 or program.calls[last].target != AUTOGRAD_BACKWARD:
        return
    later = step.downstream(origin, last)
    ends = [i for i in later if i == step.units[i][-1] and len(program.calls[i].output_refs()) == 1][:_MAX_ENDS]
    gradients = {} if in_sum else record(candidate, frozenset(ends)).gradients
    new = Ref(program.next_value())
    for value in (Ref(program.calls[index].output_refs()[0]) for index in ends):
        if in_sum:
            total = Call("torch.Tensor.sum", (value,), outputs=new)
            ended = candidate.with_call(last, total, Call(BACKWARD, (new,), phase=Phase.BACKWARD))
        elif value.value in gradients:
            given = (*program.inputs, Input(new.value, "gradient", "gradient"))
            backward = replace(program.calls[last], args=([value], [new]))
            ended = candidate.with_calls((*program.calls[:last], backward), inputs=given)
            ended = ended.with_tensors({new.value: gradients[value.value][-1]})
        else:
            continue
        yield without_unused(ended, origin)
