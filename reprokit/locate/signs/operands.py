"""Signs in operands of the origin: their values, what makes them, zeros that are divided, infinities that meet, and
the edges of functions, where a value or a derivative does not exist.

For zeros that float64 would not have made the program is run once more, and the calls close to the origin are done in
float64 beside it, on what the calls before them gave in float64. Only calls in which nothing cancels count: a
difference of rounded numbers is zero by chance.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reprokit.locate.domains import DOMAINS, SPECTRA, compare, spectrum_of
from reprokit.locate.scene import Branch, ObservedCall, Scene, recompute
from reprokit.locate.signs import Numbers, dtype_name, is_wanted, places, sign
from reprokit.locate.spelling import VIEWS, Slot, short_name, slot_of
from reprokit.program.dataflow import written_in_place
from reprokit.program.functions import function_named
from reprokit.program.interpreter import bind_arguments, run
from reprokit.program.ir import Call, Ref, iter_refs
from reprokit.program.sites import parts

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


_TESTS = frozenset([
    "eq", "ne", "gt", "ge", "lt", "le", "logical_and", "logical_or", "logical_not", "logical_xor", "isfinite", "isnan",
    "isinf", "bitwise_and", "bitwise_or", "bitwise_not", "one_hot", "tril", "triu", "ones_like", "zeros_like", "cat",
    "stack", "mul", "masked_fill", "where", "arange",
])  # fmt: skip


@sign
def has(scene: Scene, operand: Slot = "x", *, size: bool = False, **wanted: str | float) -> Numbers | None:
    """True if any element of an argument (or of the ``result``) compares as wanted; ``size``: its magnitude."""
    values = scene.tensor(operand)
    if values.is_complex() or values.dtype is torch.bool:
        return None
    mask = _compared(values, size=size, **wanted)
    if not bool(mask.any()):
        return None
    found = values[mask].double()
    return places(mask, operand=scene.name(operand), lowest=float(found.min()), highest=float(found.max()))


def _compared(values: torch.Tensor, *, size: bool = False, **wanted: str | float) -> torch.Tensor:
    return compare(values.abs() if size else values, wanted)


@sign
def is_negative_to_a_fraction(scene: Scene) -> Numbers | None:
    """True if a negative base meets an exponent that is not whole."""
    base, exponent = scene.tensor("base"), scene.tensor("exponent")
    mask = (base < 0) & (exponent.double().frac() != 0)
    if not bool(mask.any()):
        return None
    bases, exponents = base.expand_as(mask)[mask], exponent.expand_as(mask)[mask]
    return places(mask, exponent=float(exponents[0]), lowest=float(bases.min()))


@sign
def option(scene: Scene, name: str, **wanted: float) -> Numbers | None:
    """True if an argument of the origin that is a number or flag is as wanted, given or by default."""
    value = scene.operand(name)
    return {name: value} if is_wanted(value, wanted) else None


@sign
def has_row_of(scene: Scene, value: float) -> Numbers | None:
    """True if some row along the call's ``dim`` holds nothing but this value."""
    x, call = scene.tensor("x"), scene.origin.call
    given = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    dim = tuple(given) if isinstance(given, (list, tuple)) and given else dimension(scene)
    if not x.numel():
        return None
    return places((x == value).all().reshape(1) if dim is None or x.dim() == 0 else (x == value).all(dim))


@sign
def follows(scene: Scene, calls: Sequence[str], operand: Slot = "x", through: Sequence[str] = ()) -> Numbers | None:
    """True if an argument comes from one of these calls: views, casts and what is named in ``through`` apart."""
    waiting = list(scene.makers(operand))
    for index, call in waiting:
        if short_name(call) in calls:
            return {"maker": short_name(call), "operand": scene.name(operand)}
        if short_name(call) in through:
            waiting += scene.makers_of((call.args, dict(call.kwargs)), index)
    return None


@sign
def counts_something(scene: Scene) -> Numbers | None:
    """True if the denominator is a count: a sum of flags or whole numbers, or a number of elements."""
    for index, call in scene.makers("denominator", 2):
        if short_name(call) in ("count_nonzero", "bincount", "histc"):
            return {"maker": short_name(call)}
        seen = scene.seen.get(index)
        if short_name(call) == "sum" and seen is not None and seen.args and _is_mask(scene, seen, index):
            return {"maker": short_name(call)}
    return None


def _is_mask(scene: Scene, seen: ObservedCall, index: int) -> bool:
    """True if the argument of a reduction marks elements that count: flags, whole numbers, 0 and 1 from a comparison.

    What is divided itself is no mask, even if it is zero throughout.
    """
    counted, call = seen.args[0], scene.call
    if call is None or not isinstance(counted, torch.Tensor) or counted.is_complex():
        return False
    if not counted.is_floating_point():
        return True
    numerators = list(iter_refs([call.args[slot] for slot in [slot_of(call, "numerator")] if isinstance(slot, int)]))
    if bool(((counted != 0) & (counted != 1)).any()) or numerators == list(iter_refs(seen.call.args[:1])):
        return False
    makers = list(scene.makers_of(seen.call.args[:1], index))
    return not makers or any(short_name(call) in _TESTS for _, call in makers)


@sign
def reduces_nothing(scene: Scene) -> Numbers | None:
    """True if the argument has no elements, but the result does."""
    x, result = scene.tensor("x"), scene.tensor_if_given("result")
    if x.numel() or (result is not None and not result.numel()):
        return None
    return {"shape": _shape(x)}


@sign
def reduces_one(scene: Scene) -> Numbers | None:
    """True if every result of a std or var that divides by n - 1 is made from a single element."""
    x, result, call = scene.tensor("x"), scene.tensor("result"), scene.origin.call
    is_unbiased = call.kwargs.get("unbiased", next((item for item in call.args[1:] if isinstance(item, bool)), True))
    if not x.numel() or x.numel() != result.numel() or call.kwargs.get("correction", int(is_unbiased)) not in (None, 1):
        return None
    return {"shape": _shape(x)}


@sign
def weight_row_is_zero(scene: Scene) -> Numbers | None:
    """True if a whole row of a weight-normalised weight is zero; with a ``dim`` of -1 the whole is one row."""
    weight, call = scene.tensor("x"), scene.origin.call
    if weight.dim() == 0:
        return None
    dim = call.args[2] if len(call.args) > 2 else call.kwargs.get("dim", 0)
    rows = weight.reshape(1, -1) if dim == -1 else weight.movedim(dim, 0).reshape(weight.shape[dim], -1)
    return places((rows == 0).all(1))


def dimension(scene: Scene) -> int | None:
    """The ``dim`` the origin works along, ``None`` for all."""
    call, x = scene.origin.call, scene.tensor_if_given("x")
    if short_name(call) in ("cross_entropy", "nll_loss"):
        return 1 if x is not None and x.dim() > 1 else 0
    for name in ("dim", "axis"):
        try:
            dim = scene.operand(name)
        except KeyError:
            continue
        return _whole(dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim)
    return _whole(call.args[1]) if len(call.args) > 1 else None  # builtins have no signature


def _whole(number: object) -> int | None:
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"


@sign
def meet(scene: Scene, **wanted: Mapping[str, Any]) -> Numbers | None:
    """True if operands of the origin compare as wanted at one place, each as in `has`."""
    masks = (_compared(scene.tensor(name), **bounds) for name, bounds in wanted.items())
    return places(functools.reduce(torch.logical_and, masks), operand=scene.name([*wanted][-1]))


@sign
def divides_by_number_zero(scene: Scene) -> Numbers | None:
    """True if the divisor is a Python number that is zero; ``divisor`` calls it as the user's line does."""
    call, result, number = scene.origin.call, scene.tensor("result"), scene.operand("denominator")
    if not isinstance(number, (int, float)) or number != 0:
        return None
    name = _written_divisor(call)
    words = f"the number {number}"
    return places(torch.ones_like(result, dtype=torch.bool), divisor=f"{words} (`{name}`)" if name else words)


def _written_divisor(call: Call) -> str | None:
    """The divisor in the user's words; ``None`` for a literal, and where no division is written."""
    divisions = (part for part in parts(call.site) if isinstance(part, (ast.BinOp, ast.AugAssign)))
    divisors = (part.right if isinstance(part, ast.BinOp) else part.value for part in divisions)
    return next((ast.unparse(divisor) for divisor in divisors if not isinstance(divisor, ast.Constant)), None)


@sign
def underflowed(scene: Scene, operand: Slot = "x", makers: Sequence[str] | None = None) -> Numbers | None:
    """True if zeros in an argument would not be zero in exact arithmetic; ``makers``: lost by one of these calls."""
    values, found = scene.tensor(operand), find_underflow(scene, operand)
    if found is None:
        return None
    maker = short_name(scene.program.calls[found.maker])
    if makers is not None and maker not in makers:
        return None
    return places(found.lost, maker=maker, zeros=found.num_zeros, dtype=dtype_name(values))


@sign
def adds_opposite_infinities(scene: Scene) -> Numbers | None:
    """True if infinities meet that take each other away: in a sum or difference, or within one reduction."""
    call, x = scene.origin.call, scene.tensor("x")
    if short_name(call) in ("sum", "mean", "cumsum"):
        plus, minus = int((x == math.inf).sum()), int((x == -math.inf).sum())
        return {"count": min(plus, minus), "total": x.numel()} if plus and minus else None
    y = scene.tensor("y")
    other = -y if short_name(call) == "sub" else y
    return places(x.isinf() & other.isinf() & (x != other))


@sign
def multiplies_zero_by_infinity(scene: Scene) -> Numbers | None:
    """True if zero meets an infinity in a product, of matrices too."""
    x, y, multiply = scene.tensor("x"), scene.tensor("y"), function_named(scene.origin.call.target)
    meetings = [multiply((x == 0).double(), y.isinf().double()), multiply(x.isinf().double(), (y == 0).double())]
    return places((meetings[0] + meetings[1]) > 0)


def danger(scene: Scene) -> torch.Tensor:
    """A mask of the origin's argument: at or beyond the edge of what it, or its derivative, is defined for."""
    domain = DOMAINS[short_name(scene.origin.call)]
    values = scene.tensor(domain.operand)
    if not values.is_floating_point():
        return torch.zeros_like(values, dtype=torch.bool)
    mask = domain.places(values)
    exponent = scene.tensor_if_given("exponent") if domain.operand == "base" else None
    if exponent is not None:  # x ** 2 has a derivative everywhere
        mask = mask & ((exponent < 1) | (exponent != exponent.round()))
    return mask


@sign
def is_dangerous(scene: Scene) -> Numbers | None:
    """True if any element is at or beyond the edge of what the origin is defined for."""
    return places(danger(scene))


@sign
def dropped_later(scene: Scene) -> Numbers | None:
    """True if every dangerous element of the origin is dropped by a later ``where`` or mask."""
    mask, drop = danger(scene), scene.failure.drop
    if not bool(mask.any()) or (drop is not None and drop.is_given):
        return None
    for branch in scene.branches:
        kept = _like(branch, mask) if short_name(branch.call) != "mul" else None
        if kept is not None and not bool((kept & mask).any()):
            return places(mask, dropper=short_name(branch.call))
    return None


@sign
def drops_nan(scene: Scene, given: bool) -> Numbers | None:
    """True if the forward pass drops NaN values, which the data or the code marks missing numbers with (``given``) or
    the origin made."""
    drop, result = scene.failure.drop, scene.tensor_if_given("result")
    if drop is None or drop.is_given is not given:
        return None
    found = places(result.isnan()) if result is not None else None
    holder = f"`{scene.failure.input_name}`" if scene.failure.input_name else "the data"
    return {**(found or {}), "holder": holder, "dropper": drop.call.rpartition(".")[2]}


@sign
def meets_zero_factor(scene: Scene) -> Numbers | None:
    """True if the origin's infinities are multiplied by zeros later."""
    result = scene.tensor("result")
    for branch in scene.branches:
        kept = _like(branch, result) if short_name(branch.call) == "mul" else None
        if kept is not None and bool((result.isinf() & ~kept).any()):
            return {"zeros": int((result.isinf() & ~kept).sum())}
    return None


def _like(branch: Branch, mask: torch.Tensor) -> torch.Tensor | None:
    try:
        return branch.kept.expand(mask.shape)
    except RuntimeError:
        return None


@sign
def is_normalised_later(scene: Scene) -> Numbers | None:
    """True if the origin's result is divided, later, by a sum over itself."""
    calls = scene.program.calls[scene.index :]
    known, summed = set(calls[0].output_refs()), set[int]()
    for call in filter(scene.leads_to_loss, calls[1:]):
        if short_name(call) in ("sum", "mean", "amax", "max") and known.intersection(call.input_refs()):
            summed.update(call.output_refs())
        elif short_name(call) == "div" and known & set(call.input_refs()) and summed & set(call.input_refs()):
            return {}
        elif known.intersection(call.input_refs()):
            known.update(call.output_refs())
        elif summed.intersection(call.input_refs()):
            summed.update(call.output_refs())
    return None


@sign
def equal_values(scene: Scene) -> Numbers | None:
    """True if a decomposition has eigenvalues or singular values that are equal, or zero, up to rounding."""
    name = short_name(scene.origin.call)
    found = spectrum_of(name, scene.tensor("x"))
    if not found:
        return None
    values = SPECTRA[name][0]
    words = f"one of the {values} is zero" if found == "zero" else f"some {values} are equal up to rounding"
    return {"values": values, "spectrum": words}


@sign
def is_not_positive(scene: Scene) -> Numbers | None:
    """True if a symmetric matrix has an eigenvalue that is not above zero."""
    x, exception = scene.tensor("x"), scene.failure.exception
    is_about_shape = exception is not None and "LinAlgError" not in exception[0]
    if is_about_shape or x.dim() < 2 or x.shape[-1] != x.shape[-2] or not x.numel() or not bool(x.isfinite().all()):
        return None
    lowest = float(torch.linalg.eigvalsh(x.detach().double()).min())
    eps = torch.finfo(x.dtype).eps * float(x.abs().max()) * x.shape[-1]
    return {"lowest": lowest, "size": x.shape[-1]} if lowest <= eps else None
