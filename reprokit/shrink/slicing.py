"""The calls that a failure depends on, found from the program's data flow alone.

A step may be long before it fails: other batches, their backward passes, layers whose results lead elsewhere. Without
them every run of the step costs only what leads to the failure. In-place calls are all kept, because what shares memory
is not known before a program runs. Whoever uses a slice runs it first to see that it fails alike.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from reprokit.locate.failure import EXCEPTION, Failure
from reprokit.program.functions import GRAD_READ, GRAD_WRITES, is_in_place
from reprokit.program.ir import AUTOGRAD_BACKWARD, BACKWARD, OPAQUE, ZERO_GRAD, Call, Program, Ref
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.context.step import Step
from reprokit.shrink.signature import ACCUMULATION

_GRAD_READS = frozenset({GRAD_READ, "torch.Tensor._grad.__get__"})
_BACKWARDS = frozenset({BACKWARD, AUTOGRAD_BACKWARD})
_ONLY_GRADIENTS = GRAD_WRITES | _BACKWARDS | {ZERO_GRAD}  # matter to who reads ``.grad`` alone


def slice_to(candidate: Candidate, failure: Failure) -> tuple[Candidate, Failure] | None:
    """The program without what the failure does not depend on, and the failure with its new place.

    ``None`` when there is nothing to leave out, or when the data flow does not tell, as after an optimizer's step.
    """
    program, origin = candidate.program, failure.call_index
    end = _end(program, failure)
    kept = _needed(program.calls, {end, *_rest_of_layer(candidate, failure)}) if end is not None else None
    if origin is None or kept is None or origin not in kept or len(kept) == len(program.calls):
        return None
    outputs = (Ref(failure.value),) if failure.phase == "forward" and failure.value is not None else ()
    calls = tuple(program.calls[index] for index in kept)
    sliced = replace(candidate, program=replace(program, calls=calls, outputs=outputs)).pruned()
    drop = replace(failure.drop, call_index=kept.index(failure.drop.call_index)) if failure.drop else None
    return sliced, replace(failure, call_index=kept.index(origin), drop=drop)


def _end(program: Program, failure: Failure) -> int | None:
    """Where the failure shows: at its origin, or in the first backward pass that goes through the origin."""
    origin = failure.call_index
    if origin is None or failure.phase == "forward":
        return origin
    if failure.phase != "backward" or failure.kind == EXCEPTION or failure.backward_node == ACCUMULATION:
        return None
    passes = (i for i in range(origin + 1, len(program.calls)) if program.calls[i].target in _BACKWARDS)
    return next((index for index in passes if origin in (_needed(program.calls, {index}) or ())), None)


def _rest_of_layer(candidate: Candidate, failure: Failure) -> list[int]:
    """What one of torch's layers does after an origin inside it: only its whole run tells which layer it is."""
    origin = failure.call_index
    if origin is None or failure.phase != "forward" or failure.kind == EXCEPTION:
        return []
    return [index for index in Step(candidate).units[origin] if index > origin]


def _needed(calls: Sequence[Call], ends: Set[int]) -> list[int] | None:
    """The indexes of the calls that some calls depend on, their own included; ``None`` if that is not known."""
    needed: set[int] = set()
    kept: list[int] = []
    for index in range(max(ends), -1, -1):
        call = calls[index]
        if index not in ends:
            if call.is_optimizer_step or call.target in _GRAD_READS:
                return None
            if call.target in _ONLY_GRADIENTS or not _matters(call, needed):
                continue
        needed.update(call.input_refs())
        kept.append(index)
    return kept[::-1]


def _matters(call: Call, needed: set[int]) -> bool:
    return call.target != OPAQUE and (is_in_place(call.target) or not needed.isdisjoint(call.output_refs()))
