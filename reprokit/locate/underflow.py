"""Zeros that exact arithmetic would not have made, and the overflows that hide behind some of them.

The program is run once more. Beside what the calls close to the origin make goes a mask of what is not zero *in exact
arithmetic*: an exponential of a number never is, a product is not if no factor is, a sum of what is not negative is not
if any term is not. Where nothing is known about a call, what it made counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from reprokit.locate.calls import VIEWS, Slot, argument_at, constant_ways, short_name, slot_of
from reprokit.locate.scene import Scene
from reprokit.locate.ways import MINUS, PLUS, ways_of
from reprokit.program.dataflow import needed_calls
from reprokit.program.functions import function_named
from reprokit.program.interpreter import bind_arguments, run
from reprokit.program.ir import Call, Ref, iter_refs

REACH = 32  # calls behind the origin that are looked at
_EXPONENTIALS = ("exp", "exp2", "softmax", "sigmoid")
_PRODUCTS = VIEWS | {"mul", "div", "cat", "stack"}
_SUMS = ("sum", "mean", "add", "cumsum", "matmul", "mm", "bmm", "mv")  # of what is not negative
_KEEPERS = ("sqrt", "abs", "neg", "square")  # zero only where the argument is
_POLES = ("div", "reciprocal", "log", "log2", "log10", "log1p", "rsqrt", "pow")  # infinite without an overflow


@dataclass(frozen=True, slots=True)
class Loss:
    """The call that first made zeros, how many, and the call whose overflow they come from if it divides by one."""

    maker: int
    num_zeros: int
    overflow: int | None


@dataclass(frozen=True, slots=True)
class Underflow:
    """A mask of the zeros in an argument that exact arithmetic would not have made, and the call that made them."""

    lost: torch.Tensor
    loss: Loss


def find_underflow(scene: Scene, role: Slot) -> Underflow | None:
    """The zeros in an argument of the origin that exact arithmetic would not have made; ``None`` if there are none."""
    return scene.once(role, lambda: _find(scene, role))


def _find(scene: Scene, role: Slot) -> Underflow | None:
    try:
        argument, values = scene.recorded(role), scene.tensor(role)
    except KeyError:
        return None
    if not isinstance(argument, Ref) or not bool((values == 0).any()):
        return None
    watch = _Watch(frozenset(scene.behind()[-REACH:]))
    needed = needed_calls(scene.program.calls, {scene.index})
    before = needed[:-1] if needed is not None else range(scene.index)
    run(scene.program, scene.tensors, observer=watch, keep=frozenset(), only=before)
    loss = watch.losses.get(argument.value)
    if loss is None:
        return None
    lost = watch.truth[argument.value] & (values == 0)
    return Underflow(lost, loss) if bool(lost.any()) else None


@dataclass
class _Watch:
    """Keeps ``truth``, where a value is not zero in exact arithmetic, and ``losses``, by value number."""

    reach: frozenset[int]
    truth: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, Loss] = field(default_factory=dict)
    _overflows: dict[int, int] = field(default_factory=dict)  # infinite value -> the call that overflowed
    _sigmoids: dict[int, torch.Tensor] = field(default_factory=dict)
    _expected: torch.Tensor | None = None
    _is_given_finite: bool = True

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Say what a call is going to make, before it writes into its arguments."""
        if index in self.reach:
            self._expected = self._truth_of(call, values)
            self._is_given_finite = not any(ways_of(values[value]) for value in call.input_refs())

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Compare with what it made."""
        if index not in self.reach or not isinstance(call.outputs, Ref):
            return
        value, result = call.outputs.value, values[call.outputs.value].detach()
        if PLUS in ways_of(result):
            self._note_overflow(index, call, value)
        if self._expected is None or self._expected.shape != result.shape:
            return
        self.truth[value] = self._expected
        zeros = int((self._expected & (result == 0)).sum())
        known = next((self.losses[v] for v in call.input_refs() if v in self.losses), None)
        if zeros:
            self.losses[value] = known or Loss(index, zeros, self._divisor_overflow(call))

    def _note_overflow(self, index: int, call: Call, value: int) -> None:
        known = next((self._overflows[v] for v in call.input_refs() if v in self._overflows), None)
        is_new = self._is_given_finite and short_name(call) not in _POLES
        if is_new and not constant_ways(call) & {PLUS, MINUS}:
            known = index
        if known is not None:
            self._overflows[value] = known

    def _divisor_overflow(self, call: Call) -> int | None:
        divisor = _divisor(call)
        return self._overflows.get(divisor.value) if divisor is not None else None

    def _truth_of(self, call: Call, values: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        name, refs = short_name(call), list(iter_refs((call.args, dict(call.kwargs))))
        if not refs or any(values[ref.value].is_complex() for ref in refs):
            return None
        first = values[refs[0].value].detach()
        if name == "sigmoid" and isinstance(call.outputs, Ref):
            self._sigmoids[call.outputs.value] = first < math.inf
        if name in _EXPONENTIALS:
            return first > -math.inf
        sigmoid = self._sigmoids.get(refs[0].value)
        if sigmoid is not None and name in VIEWS and isinstance(call.outputs, Ref):
            viewed = _made_of(call, {**values, refs[0].value: sigmoid.float()})
            if viewed is not None:
                self._sigmoids[call.outputs.value] = viewed
        if name == "sub" and len(refs) == 1 and 1 in call.args:
            return sigmoid  # 1 - sigmoid(x) is sigmoid(-x)
        if name in _KEEPERS or (name == "pow" and len(refs) == 1 and _is_positive(call.args[-1])):
            return self._nonzero(refs[0], values)
        is_sum = name in _SUMS and all(bool((values[ref.value] >= 0).all()) for ref in refs)
        return self._as_indicators(call, values) if name in _PRODUCTS or is_sum else None

    def _as_indicators(self, call: Call, values: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        """The call done with ones where its arguments are not zero: its result is not zero either where this is not."""
        divisor = _divisor(call)
        if divisor is not None and divisor.value not in self._overflows and PLUS in ways_of(values[divisor.value]):
            return None  # zeros of an infinity that somebody asked for
        shadows = {ref.value: values[ref.value] for ref in iter_refs((call.args, dict(call.kwargs)))}
        for value, tensor in shadows.items():
            if tensor.is_floating_point():
                mask = self._nonzero(Ref(value), values)
                shadows[value] = (torch.ones_like(mask) if divisor == Ref(value) else mask).float()
        if short_name(call) == "add" and any(isinstance(number, (int, float)) and number < 0 for number in call.args):
            return None
        return _made_of(call, shadows)

    def _nonzero(self, ref: Ref, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
        known = self.truth.get(ref.value)
        return known if known is not None else values[ref.value].detach() != 0


def _made_of(call: Call, values: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """A mask of the results that are not zero for other values of the arguments; ``None`` if it refuses them."""
    args, kwargs = bind_arguments(call, values)
    try:
        with torch.no_grad():
            made = function_named(call.target)(*args, **kwargs)
    except (RuntimeError, LookupError, TypeError, ValueError):
        return None  # it takes numbers of its own kind only
    return made != 0 if isinstance(made, torch.Tensor) else None


def _divisor(call: Call) -> Ref | None:
    divisor = argument_at(call, slot_of(call, "denominator")) if short_name(call) == "div" else None
    return divisor if isinstance(divisor, Ref) else None


def _is_positive(number: object) -> bool:
    return isinstance(number, (int, float)) and number > 0
