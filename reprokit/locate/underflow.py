"""Zeros that float64 would not have made.

The program is run once more, and the calls close to the origin are done in float64 beside it, on what the calls before
them gave in float64. Only calls in which nothing cancels count: a difference of rounded numbers is zero by chance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from reprokit.locate.calls import VIEWS, Slot, short_name
from reprokit.locate.scene import ObservedCall, Scene, recompute
from reprokit.program.dataflow import written_in_place
from reprokit.program.interpreter import bind_arguments, run
from reprokit.program.ir import Call, Ref

REACH = 32  # calls behind the origin that are looked at
_SUMS = frozenset({"sum", "mean", "add", "cumsum", "matmul", "mm", "bmm", "mv"})  # nothing cancels above zero
_OTHERS = VIEWS | {
    "exp", "exp2", "softmax", "sigmoid", "mul", "div", "cat", "stack", "sqrt", "abs", "neg", "square", "pow",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Underflow:
    """A mask of the zeros in a value that float64 would not have made.

    ``maker`` is the call that first made zeros, and ``num_zeros`` how many.
    """

    lost: torch.Tensor
    maker: int
    num_zeros: int


def find_underflow(scene: Scene, role: Slot) -> Underflow | None:
    """The zeros in an argument of the origin that float64 would not have made; ``None`` if there are none."""
    return scene.once(role, lambda: _find(scene, role))


def _find(scene: Scene, role: Slot) -> Underflow | None:
    try:
        argument, values = scene.recorded(role), scene.tensor(role)
    except KeyError:
        return None
    if not isinstance(argument, Ref) or not bool((values == 0).any()):
        return None
    watch = _Watch(frozenset(scene.behind()[-REACH:]))
    run(scene.program, scene.tensors, observer=watch, keep=frozenset(), only=range(scene.index))
    return watch.found.get(argument.value)


@dataclass
class _Watch:
    """Keeps ``exact``, what values are in float64, and the zeros ``found``, by value."""

    reach: frozenset[int]
    exact: dict[int, torch.Tensor] = field(default_factory=dict)
    found: dict[int, Underflow] = field(default_factory=dict)
    _made: torch.Tensor | None = None

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Do the call in float64, before it writes into its arguments."""
        self._made = None
        name, refs = short_name(call), call.input_refs()
        if index not in self.reach or not refs or call.mode.rng is not None:
            return
        if name in _OTHERS or (name in _SUMS and all(bool((values[v] >= 0).all()) for v in refs)):
            given = {v: self.exact[v].clone() if v in self.exact else values[v].detach() for v in call.input_refs()}
            self._made = recompute(ObservedCall(call, *bind_arguments(call, given)))

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Compare with what it made."""
        for value in written_in_place(call):
            self.exact.pop(value, None)
        if index not in self.reach or not isinstance(call.outputs, Ref):
            return
        value, exact, result = call.outputs.value, self._made, values[call.outputs.value].detach()
        if exact is None or exact.shape != result.shape:
            return
        self.exact[value] = exact
        known = next((self.found[v] for v in call.input_refs() if v in self.found), None)
        lost = (result == 0) & (exact != 0)
        if known is None:
            lost &= exact.abs() < (torch.finfo(result.dtype).tiny if result.is_floating_point() else 0.0)
        if bool(lost.any()):
            first = (known.maker, known.num_zeros) if known else (index, int(lost.sum()))
            self.found[value] = Underflow(lost, *first)
