"""An infinity of the forward pass that the loss hides: ``tanh`` and ``clamp`` make it finite, the backward pass NaN.

Zero times infinity in a backward call is the consequence. That it is one is tested: the step is run again with finite
numbers in the place of the infinities.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from reprokit.locate.notes import Found
from reprokit.locate.ways import ways_of
from reprokit.program.ir import Call, Program, Ref, iter_refs, substitute
from reprokit.program.run import Outcome, Tensors, run

_STAND_IN = 1.0  # any moderate number will do


def explains_gradient(program: Program, tensors: Tensors, value: int, reader: int, found: Found) -> bool:
    """True if the gradient is finite without the infinities that call number ``reader`` reads in ``value``, and the
    loss another one: a branch that `torch.where` drops has no part in the loss, so its backward pass is the failure.
    """
    calls = program.calls[: found.index + 1]
    start = calls[-1].args[0] if calls[-1].args else calls[-1].kwargs.get("tensors", calls[-1].kwargs.get("outputs"))
    starts = frozenset(ref.value for ref in iter_refs(start))
    finite = Ref(program.next_value())
    numbers = {"nan": float("nan"), "posinf": _STAND_IN, "neginf": -_STAND_IN}
    made = Call("torch.nan_to_num", (Ref(value),), numbers, finite, mode=calls[reader].mode)
    rest = [_reading(call, {value: finite}) for call in calls[reader:]]
    changed = run(replace(program, calls=(*calls[:reader], made, *rest)), tensors, keep=starts | {found.value})
    if changed.error is not None or _is_gradient_bad(changed, found):
        return False
    plain = run(replace(program, calls=calls[:-1]), tensors, keep=starts)
    return any(not torch.equal(plain.values[key], changed.values[key]) for key in starts)


def _is_gradient_bad(outcome: Outcome, found: Found) -> bool:
    gradient = outcome.gradients.get(found.value, outcome.values.get(found.value))
    return gradient is None or bool(ways_of(gradient))


def _reading(call: Call, values: dict[int, Ref]) -> Call:
    return replace(call, args=substitute(call.args, values), kwargs=substitute(dict(call.kwargs), values))
