"""Bad values of the forward pass that the loss does not show.

`find_drop`: a call drops NaN values before the loss, such as those in the branch that a ``where`` does not take; the
backward pass multiplies a gradient of zero with a derivative that is NaN. `explains_gradient`: ``tanh`` or ``clamp``
makes an infinity finite, and the backward pass NaN. `bad_operand`: a call raises over a NaN or an infinity. The latter
two are tested: the step, or the call, is run again with ordinary numbers in the place of what is not finite."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace

import torch

from reprokit.errors import pass_on
from reprokit.locate.calls import short_name
from reprokit.locate.domains import SPREADING
from reprokit.locate.notes import BadValue, Notes, starts_of
from reprokit.locate.ways import MINUS, NAN, PLUS, ways_of
from reprokit.program.dataflow import needed_calls
from reprokit.program.interpreter import Tensors, bind_arguments, execute, run
from reprokit.program.ir import Call, Program, Ref


def find_drop(
    notes: Notes, values: Set[int], after: int, before: int, differentiated: Set[int], *, through_layers: bool
) -> int | None:
    """The first call that reads a NaN which one of ``values`` led to and returns none.

    ``after`` is the call that made them, ``before`` the backward call. Only calls whose derivative was taken count. A
    NaN behind a layer is followed with ``through_layers`` only.
    """
    led_to = set(values)
    for index in range(after + 1, before):
        reads, writes = notes.reads.get(index, {}), notes.writes.get(index, {})
        if led_to.isdisjoint(reads):
            continue
        reads_nan = any(NAN in ways for value, ways in reads.items() if value in led_to)
        if any(NAN in ways for ways in writes.values()) or not reads_nan:
            if through_layers or short_name(notes.program.calls[index]) not in SPREADING:
                led_to.update(writes)
        elif index in differentiated:
            return index
    return None


_STAND_IN = 1.0  # any moderate number will do


def explains_gradient(program: Program, tensors: Tensors, value: int, reader: int, found: BadValue) -> bool:
    """True if the gradient is finite without the infinities that call number ``reader`` reads in ``value``, and the
    loss another one: a branch that `torch.where` drops has no part in the loss, so its backward pass is the failure.
    """
    calls = program.calls[: found.index + 1]
    starts = frozenset(starts_of(calls[-1]))
    finite = Ref(program.next_value())
    numbers = {"nan": float("nan"), "posinf": _STAND_IN, "neginf": -_STAND_IN}
    made = Call("torch.nan_to_num", (Ref(value),), numbers, finite, mode=calls[reader].mode)
    rest = [call.substituted({value: finite}) for call in calls[reader:]]
    changed = run(replace(program, calls=(*calls[:reader], made, *rest)), tensors, keep=starts | {found.value})
    gradient = changed.gradients.get(found.value, changed.values.get(found.value))
    if changed.error is not None or gradient is None or ways_of(gradient):
        return False
    plain = run(replace(program, calls=calls[:-1]), tensors, keep=starts)
    return any(not torch.equal(plain.values[key], changed.values[key]) for key in starts)


def bad_operand(program: Program, tensors: Tensors, notes: Notes, index: int) -> BadValue | None:
    """The operand that makes call number ``index`` raise by being NaN or infinite."""
    reads = {value: ways for value, ways in notes.reads.get(index, {}).items() if ways}
    if not reads or program.calls[index].is_differentiation or program.calls[index].is_optimizer_step:
        return None
    trial = _Trial(index, frozenset(reads))
    with warnings.catch_warnings(action="ignore"):
        run(program, tensors, observer=trial, keep=frozenset(), only=needed_calls(program.calls, {index}))
    found = ((value, way) for way in (NAN, PLUS, MINUS) for value, ways in reads.items() if way in ways)
    value, way = next(found)
    return BadValue(value, way, index) if trial.returns else None


@dataclass
class _Trial:
    """An observer that makes one call with ordinary numbers; ``returns``: True if the call does not raise then."""

    index: int
    bad: frozenset[int]
    returns: bool = False

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Make the call."""
        if index == self.index:
            self.returns = any(self._runs(call, operands) for operands in self._operands(call, values))

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Nothing more."""

    def _operands(self, call: Call, values: Mapping[int, torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
        """The operands without bad numbers: one number in their place, or an identity matrix."""
        given = {value: values[value].detach().clone() for value in call.input_refs() if value in values}
        yield {value: _filled(tensor) if value in self.bad else tensor for value, tensor in given.items()}
        matrices = {v: given[v] for v in self.bad if v in given and given[v].dim() > 1}
        square = {v: matrix for v, matrix in matrices.items() if matrix.shape[-1] == matrix.shape[-2]}
        if square:
            eyes = {v: torch.eye(matrix.shape[-1]).to(matrix).expand_as(matrix) for v, matrix in square.items()}
            yield {**given, **eyes}

    def _runs(self, call: Call, operands: Mapping[int, torch.Tensor]) -> bool:
        try:
            with torch.no_grad():
                execute(call, *bind_arguments(call, operands))
        except Exception as error:  # functions refuse in as many ways as there are functions
            pass_on(error)
            return False
        return True


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor.isfinite(), tensor, torch.full_like(tensor, 0.5)) if ways_of(tensor) else tensor
