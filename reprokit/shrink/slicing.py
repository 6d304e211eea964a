"""The calls that a forward failure depends on, found from the program's data flow alone.

A step may be long before it fails: other batches, their backward passes, layers whose results lead elsewhere. Without
them every run of the step costs only what leads to the failure. In-place calls are all kept, because what shares memory
is not known before a program runs.
"""

from __future__ import annotations

from dataclasses import replace

from reprokit.locate.failure import Failure
from reprokit.program.functions import GRAD_WRITES, is_in_place
from reprokit.program.ir import AUTOGRAD_BACKWARD, BACKWARD, OPAQUE, ZERO_GRAD, Call, Ref
from reprokit.shrink.candidate import Candidate

_GRAD_READS = frozenset({"torch.Tensor.grad.__get__", "torch.Tensor._grad.__get__"})
_ONLY_GRADIENTS = GRAD_WRITES | {BACKWARD, AUTOGRAD_BACKWARD, ZERO_GRAD}  # matter to who reads ``.grad`` alone


def slice_to(candidate: Candidate, failure: Failure) -> tuple[Candidate, Failure] | None:
    """The program up to the origin without what the origin does not depend on, and the failure with its new place.

    ``None`` when there is nothing to leave out, or when the data flow does not tell, as after an optimizer's step.
    """
    program, origin = candidate.program, failure.call_index
    if failure.phase != "forward" or origin is None:
        return None
    needed = set(program.calls[origin].input_refs())
    kept = [program.calls[origin]]
    for call in reversed(program.calls[:origin]):
        if call.is_optimizer_step or call.target in _GRAD_READS:
            return None
        if call.target not in _ONLY_GRADIENTS and _matters(call, needed):
            needed.update(call.input_refs())
            kept.append(call)
    if len(kept) == len(program.calls):
        return None
    outputs = (Ref(failure.value),) if failure.value is not None else ()
    sliced = replace(candidate, program=replace(program, calls=tuple(reversed(kept)), outputs=outputs)).pruned()
    return sliced, replace(failure, call_index=len(kept) - 1)


def _matters(call: Call, needed: set[int]) -> bool:
    return call.target != OPAQUE and (is_in_place(call.target) or not needed.isdisjoint(call.output_refs()))
