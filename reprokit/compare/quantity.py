"""The quantity of an event, measured in a run of a program: what an event means as data.

``loss``: what the last backward pass starts from, or the only output. ``gradient norm``: the Euclidean norm of all
gradients of leaves together. ``share of zeros``: that in the gradient of one leaf, 1 if it gets none. ``update``: the
norm of the change that the optimizer makes over the norm of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

import torch

from reprokit import native, torch_private
from reprokit.locate.blame import GRAD_SCALER, exception_failure
from reprokit.locate.failure import Failure, module_of
from reprokit.locate.notes import starts_of
from reprokit.locate.ways import HALVES
from reprokit.program.functions import display_name
from reprokit.program.interpreter import Outcome, Tensors, run
from reprokit.program.ir import AUTOGRAD_GRAD, Program, iter_refs


def losses_of(program: Program) -> list[int]:
    """The values that the last backward pass starts from, without the factor of a grad scaler.

    Without a backward pass those of the last `torch.autograd.grad`.
    """
    passes = [call for call in reversed(program.calls) if call.is_differentiation]
    last = next((call for call in passes if call.target != AUTOGRAD_GRAD), passes[0] if passes else None)
    return [_unscaled(program, value) for value in starts_of(last)] if last is not None else []


def _unscaled(program: Program, value: int) -> int:
    for call in program.calls:
        if value in call.output_refs() and GRAD_SCALER in call.scope:
            return next((ref.value for ref in iter_refs(call.args)), value)
    return value


def loss_of(program: Program) -> int | None:
    """The value that counts as the loss: the first of `losses_of`, else the only output."""
    only = program.outputs[0].value if len(program.outputs) == 1 else None
    return next(iter(losses_of(program)), only)


def measured(program: Program, tensors: Tensors, failure: Failure) -> float | None:
    """The quantity of the event of ``failure`` in a run; ``None`` where the program does not have it."""
    return _measured_in(run(program, tensors, keep=frozenset(_kept(program, failure))), program, tensors, failure)


def observed(
    program: Program, tensors: Tensors, failure: Failure, also: Set[int] = frozenset()
) -> tuple[Failure | None, Outcome]:
    """The failure with the value of now if a run shows its event, or an exception, and the outcome of the run.

    ``also`` are values to keep in the outcome. The failure is that of the whole step and names no call, other than the
    optimizer's step that makes an update.
    """
    outcome = run(program, tensors, keep=frozenset(also).union(_kept(program, failure)))
    if outcome.error is not None:
        return exception_failure(program, outcome), outcome
    event, value = failure.event, _measured_in(outcome, program, tensors, failure)
    if event is None or value is None or value < event.threshold:
        return None, outcome
    if math.isnan(value) and not math.isnan(event.value):  # the mean of no rows at all is no spike
        return None, outcome
    found = Failure(failure.phase, failure.kind, failure.way, value=failure.value, event=replace(event, value=value))
    if event.quantity == "update":
        found = replace(at_optimizer(found, program), value=_most_changed(program, tensors, failure, outcome))
    return found, outcome


def at_optimizer(failure: Failure, program: Program) -> Failure:
    """The failure at the optimizer's step, which makes the update."""
    index = max((number for number, call in enumerate(program.calls) if call.is_optimizer_step), default=None)
    return at_call(failure, program, index) if index is not None else failure


def at_call(failure: Failure, program: Program, index: int) -> Failure:
    """The failure with a call as its origin."""
    call = program.calls[index]
    return replace(failure, call=display_name(call.target), call_index=index, module=module_of(call), site=call.site)


def _most_changed(program: Program, tensors: Tensors, failure: Failure, outcome: Outcome) -> int | None:
    known = [value for value in _kept(program, failure) if value in tensors and value in outcome.values]
    updates = {value: update_of([tensors[value]], [outcome.values[value]]) or 0.0 for value in known}
    return max(updates, key=updates.__getitem__, default=None)


def _kept(program: Program, failure: Failure) -> Iterable[int]:
    quantity = failure.event.quantity if failure.event is not None else ""
    if quantity == "loss":
        loss = loss_of(program)
        yield from () if loss is None else (loss,)
    elif quantity == "update":
        yield from (ref.value for call in program.calls if call.is_optimizer_step
                    for ref in iter_refs(call.kwargs["params"]))  # fmt: skip
    elif quantity == "gradient norm":
        yield from (ref.value for call in program.calls if call.target == AUTOGRAD_GRAD
                    for ref in iter_refs(call.outputs))  # fmt: skip


def _measured_in(outcome: Outcome, program: Program, tensors: Tensors, failure: Failure) -> float | None:
    """The quantity of the event in the outcome of a run that kept the values for it."""
    event, value = failure.event, failure.value
    if event is None or outcome.error is not None:
        return None
    if event.quantity == "share of zeros":
        return _silent_share(program, outcome, value) if value is not None else None
    kept = [outcome.values[number] for number in _kept(program, failure) if number in outcome.values]
    if event.quantity == "gradient norm":
        return norm_of([*outcome.gradients.values(), *kept])
    if not kept:
        return None
    if event.quantity == "loss":
        return number_of(kept[0])
    before = [native.detach(tensors[number]) for number in _kept(program, failure) if number in tensors]
    return update_of(before, [native.detach(tensor) for tensor in kept]) if len(before) == len(kept) else None


def _silent_share(program: Program, outcome: Outcome, value: int) -> float | None:
    """The share of zeros in a gradient; ``None`` without a backward pass that could have made another one."""
    if not any(call.is_differentiation for call in program.calls):
        return None
    if value in outcome.gradients:
        return share_of_zeros(outcome.gradients[value])
    return 1.0 if any(item.value == value and item.requires_grad for item in program.inputs) else None


def number_of(value: Any) -> float | None:
    """A tensor of one element or a number as a float; ``None`` for anything else."""
    if value is None:
        return None
    if value.__class__ is float:
        return float(value)
    if isinstance(value, torch.Tensor):
        is_number = native.numel(value) == 1 and not native.is_complex(value)
        return float(native.item(native.detach(value))) if is_number else None
    return float(value) if isinstance(value, (int, float)) else None


def norms_of(tensors: list[torch.Tensor]) -> list[float]:
    """The Euclidean norm of each tensor, of half precision in float32; fused if that can be done for all together."""
    dtype = torch.float32 if any(tensor.dtype in HALVES for tensor in tensors) else None
    try:
        return numbers_of(torch_private.foreach_norm(tensors, 2, dtype=dtype)) if tensors else []
    except RuntimeError:  # half and double precision
        return [_norm(tensor) for tensor in tensors]


def numbers_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Single elements as numbers; together where they are of one kind and on one device."""
    try:
        return list(map(float, native.tolist(native.stack(list(tensors))))) if tensors else []
    except RuntimeError:
        return [float(tensor) for tensor in tensors]


def norm_of(tensors: Iterable[torch.Tensor]) -> float | None:
    """The Euclidean norm of tensors together, in float64; ``None`` without a tensor."""
    norms = [_norm(tensor) for tensor in tensors]
    return math.hypot(*norms) if norms else None


def update_of(before: Iterable[torch.Tensor], after: Iterable[torch.Tensor]) -> float | None:
    """The norm of the change over the norm of what was there before; ``None`` where that is zero."""
    old = list(before)
    change = norm_of(native.double(new) - native.double(was) for was, new in zip(old, after, strict=True))
    size = norm_of(old)
    return change / size if change is not None and size else None


def share_of_zeros(tensor: torch.Tensor) -> float:
    """The share of zeros among the elements; 0 for an empty tensor."""
    plain = native.to_dense(native.detach(tensor)) if tensor.layout is not torch.strided else native.detach(tensor)
    return float(native.mean(native.double(plain == 0))) if native.numel(plain) else 0.0


def _norm(tensor: torch.Tensor) -> float:
    plain = native.detach(tensor)
    plain = native.values(native.coalesce(plain)) if plain.layout is torch.sparse_coo else plain
    return float(native.vector_norm(native.double(plain) if not native.is_complex(plain) else plain))
