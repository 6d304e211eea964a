"""The bad value behind an exception: a NaN or infinity without which the call does not raise.

The raising call is run again with ordinary numbers in place of what is not finite. Only if it returns then, the value
is the cause.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from reprokit.arrivals import pass_on
from reprokit.locate.notes import Notes
from reprokit.locate.ways import MINUS, NAN, PLUS, ways_of
from reprokit.program.ir import Call, Program
from reprokit.program.run import Tensors, bind_arguments, execute, run


@dataclass(frozen=True, slots=True)
class BadValue:
    """A value that is bad in this way when call number ``at`` reads it."""

    value: int
    way: str
    at: int


def bad_operand(program: Program, tensors: Tensors, notes: Notes, index: int) -> BadValue | None:
    """The operand that makes call number ``index`` raise by being NaN or infinite."""
    reads = {value: ways for value, ways in notes.reads.get(index, {}).items() if ways}
    if not reads or program.calls[index].is_differentiation or program.calls[index].is_optimizer_step:
        return None
    trial = _Trial(index, frozenset(reads))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(program, tensors, observer=trial, keep=frozenset())
    found = ((value, way) for way in (NAN, PLUS, MINUS) for value, ways in reads.items() if way in ways)
    value, way = next(found)
    return BadValue(value, way, index) if trial.returns else None


@dataclass
class _Trial:
    """An observer that makes one call with ordinary numbers; ``returns`` says whether it does not raise then."""

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
