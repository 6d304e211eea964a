"""The origin of a failure by itself, on what it was given: what it makes in float64.

Whether a result fits its dtype is found by running the origin's call, not by its name. An overflow in
float64 too, or a random call, has no answer here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reprokit.locate.domains import spectrum_of
from reprokit.locate.failure import Failure
from reprokit.locate.spelling import short_name
from reprokit.locate.ways import bad_mask, ways_of
from reprokit.program.convert import default_dtype, in_dtype
from reprokit.program.dataflow import copy_of, needed_calls, written_in_place
from reprokit.program.functions import UnknownFunction
from reprokit.program.interpreter import Tensors, run
from reprokit.program.ir import Call, Input, Program, Ref
from reprokit.program.step import Step, is_number


class _Stop(Exception):
    """Ends the run behind the origin."""


@dataclass(frozen=True, slots=True)
class OriginCall:
    """A call with the tensors that it was given, by value number, and those that it made or wrote into.

    ``value`` is the bad one among these, ``None`` if none of them is the failure's.
    """

    call: Call
    given: Mapping[int, torch.Tensor]
    made: Mapping[int, torch.Tensor]
    value: int | None

    @property
    def bad(self) -> torch.Tensor | None:
        """The nan or inf value: the failure's value, else the first floating-point result."""
        floats = (value for value, tensor in self.made.items() if tensor.is_floating_point() or tensor.is_complex())
        value = self.value if self.value is not None else next(floats, None)
        return self.made[value] if value is not None else None

    def exact(self, way: str) -> float | None:
        """The largest magnitude in float64 of the elements that are bad in this way; of all elements where none is.

        ``None`` when float64 gives no finite number either or is the dtype already, and for sparse and 8-bit formats.
        """
        bad = self.bad
        if bad is None or not is_number(bad) or self.call.mode.rng is not None:
            return None
        if bad.dtype in (torch.float64, torch.complex128):
            return None
        wide = in_dtype(Step(*self._alone()), torch.float64)
        with default_dtype(torch.float64):
            made = _run(wide.program, wide.tensors)
        numbers = made.get(self._number_of(bad)) if made is not None else None
        if numbers is None or numbers.shape != bad.shape or not numbers.numel():
            return None
        mask = bad_mask(bad, way) if not bad.is_complex() else ~bad.isfinite()
        found = numbers[mask].abs() if bool(mask.any()) else numbers.abs()
        largest = float(found.max())
        return largest if bool(found.isfinite().all()) else None

    def derivative(self, value: int) -> float | None:
        """The largest derivative of the results by an operand in float64; ``None`` when it is not finite."""
        if self.call.mode.rng is not None or value not in self.given or not is_number(self.given[value]):
            return None
        program, given = self._alone()
        inputs = tuple(replace(item, requires_grad=item.value == value) for item in program.inputs)
        wide = in_dtype(Step(replace(program, inputs=inputs), given), torch.float64)
        with default_dtype(torch.float64), torch.enable_grad(), contextlib.suppress(UnknownFunction, RuntimeError):
            outcome = run(wide.program, wide.tensors)
            results = [tensor for tensor in outcome.values.values() if tensor.requires_grad]
            ones = [torch.ones_like(tensor) for tensor in results]
            (found,) = torch.autograd.grad(results, outcome.inputs[value], ones)
            return float(found.abs().max()) if not ways_of(found) else None
        return None

    def shows(self, failure: Failure) -> bool:
        """True if the bad value is bad as in the failure, or if that is a gradient, which only a backward pass has."""
        return failure.is_derivative or (self.bad is not None and failure.way in ways_of(self.bad))

    def is_overflow(self, failure: Failure) -> bool:
        """True if the result, or the derivative, is in float64 a number that the dtype cannot hold."""
        tensor, exact = self.bad, None
        if failure.is_derivative and failure.value is not None and failure.value in self.given:
            tensor, exact = self.given[failure.value], self.derivative(failure.value)
        elif failure.kind == "inf":
            exact = self.exact(failure.way)
        return exact is not None and tensor is not None and exact > torch.finfo(tensor.dtype).max

    @property
    def spectrum(self) -> str:
        """`spectrum_of` the matrix that the call decomposes; empty for other calls."""
        with contextlib.suppress(RuntimeError):  # a dtype without decompositions
            return spectrum_of(short_name(self.call), next(iter(self.given.values()), torch.zeros(())))
        return ""

    def _alone(self) -> tuple[Program, Tensors]:
        rng = self.call.mode.rng.value if self.call.mode.rng is not None else None
        inputs = tuple(Input(value, f"value{value}", "rng" if value == rng else "batch") for value in self.given)
        return Program((self.call,), inputs, tuple(Ref(value) for value in self.made)), self.given

    def _number_of(self, tensor: torch.Tensor) -> int:
        return next(value for value, made in self.made.items() if made is tensor)


@dataclass
class _Watch:
    """Keeps what one call was given and made, and ends the run behind it."""

    index: int
    failure: Failure
    call: Call | None = None
    given: dict[int, torch.Tensor] = field(default_factory=dict)
    made: dict[int, torch.Tensor] = field(default_factory=dict)

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Keep the operands."""
        if index == self.index:
            self.call = call
            if call.is_optimizer_step:
                self.call, values = _of_parameter(call, self.failure.value, values)
            self.given = {value: copy_of(values[value].detach()) for value in self.call.input_refs() if value in values}

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Keep the results, and stop."""
        if index == self.index and self.call is not None:
            self.made = {value: copy_of(values[value].detach()) for value in written_by(self.call) if value in values}
            raise _Stop


def origin_of(program: Program, tensors: Tensors, failure: Failure) -> OriginCall | None:
    """The origin as it runs here; ``None`` without one, or when the program does not get there.

    Runs the calls that the origin depends on, and all before it where these do not give the recorded value.
    """
    if failure.call_index is None:
        return None
    needed = needed_calls(program.calls, {failure.call_index})
    found = _watched(program, tensors, failure, needed)
    if needed is None or len(needed) > failure.call_index or (found is not None and found.shows(failure)):
        return found
    return _watched(program, tensors, failure, None)


def _watched(program: Program, tensors: Tensors, failure: Failure, only: list[int] | None) -> OriginCall | None:
    assert failure.call_index is not None
    watch = _Watch(failure.call_index, failure)
    try:
        run(program, tensors, observer=watch, keep=frozenset(), only=only)
    except _Stop:
        value = failure.value if failure.value in watch.made else None
        return OriginCall(watch.call, watch.given, watch.made, value) if watch.call is not None else None
    except (UnknownFunction, RuntimeError):
        pass
    return None


def written_by(call: Call) -> tuple[int, ...]:
    """The values that a call makes or writes into, running statistics included."""
    return tuple(dict.fromkeys((*call.output_refs(), *written_in_place(call))))


def _run(program: Program, tensors: Tensors) -> dict[int, torch.Tensor] | None:
    """The outputs of a program, ``None`` if it raises."""
    try:
        with torch.no_grad():
            outcome = run(program, tensors)
    except (UnknownFunction, RuntimeError):
        return None
    return outcome.values if outcome.error is None else None


def _of_parameter(
    call: Call, parameter: int | None, values: Mapping[int, torch.Tensor]
) -> tuple[Call, Mapping[int, torch.Tensor]]:
    """An optimizer's step of one parameter alone, and the values with the gradient that backward left."""
    kwargs: Any = call.kwargs
    groups = zip(kwargs["params"], kwargs["grads"], kwargs["options"], kwargs["state"], strict=True)
    for params, grads, options, states in groups:
        for ref, grad, state in zip(params, grads, states, strict=True):
            if ref.value != parameter:
                continue
            held, number = values[ref.value].grad, max(values) + 1
            if grad is None and held is not None:
                grad, values = Ref(number), {**values, number: held}
            alone = {"params": [[ref]], "grads": [[grad]], "options": [options], "state": [[state]]}
            return replace(call, kwargs=alone), values
    return call, values
