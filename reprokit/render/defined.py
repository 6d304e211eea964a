"""Is a failure what the function is defined to give? The edge of its domain or of its dtype that the origin sits on.

Each rule looks at the values that the origin was given, so an answer is seen, not guessed from a name. Where no rule
applies there is no answer, and the issue may well be about a bug of the function.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from reprokit.errors import ReprokitError
from reprokit.locate.calls import default_of, short_name
from reprokit.locate.domains import INNER
from reprokit.locate.failure import Drop, Failure
from reprokit.locate.scene import ObservedCall, Scene
from reprokit.locate.ways import ways_of
from reprokit.program.functions import UnknownFunction
from reprokit.program.interpreter import Tensors, run
from reprokit.program.ir import Call, Program
from reprokit.render import wording
from reprokit.render.call_code import optimizer_defaults
from reprokit.render.definitions import Defect, Edge, defined_edge, scene_of, with_zero
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.references import default_dtype, in_dtype
from reprokit.shrink.exact import OriginCall, origin_of
from reprokit.shrink.leaves import parameter_of
from reprokit.shrink.plainness import is_number

_NAMES_OF_EPS = ("eps", "epsilon")


def find_edge(program: Program, tensors: Tensors, failure: Failure) -> Edge | None:
    """The edge that explains a failure of this program; ``None`` without one or without an origin."""
    if failure.kind not in ("nan", "inf"):
        return None
    if failure.drop is not None:
        return _dropped(failure.drop)
    origin = origin_of(program, tensors, failure)
    if origin is None:
        return None
    with warnings.catch_warnings(action="ignore"):
        scene = scene_of(origin, failure)
        edge = _bad_number(scene) or defined_edge(scene) or _in_double(scene, origin, failure, program, tensors)
    is_forward_finite = not any(map(ways_of, scene.origin.results.values()))
    return replace(edge, is_forward_finite=is_forward_finite) if edge is not None else None


def _dropped(drop: Drop) -> Edge:
    name = wording.short_name(drop.call)
    fact = f"zero times nan is nan, and {wording.code_span(name)} drops values, not their derivatives"
    return Edge(f"for a nan that {name} drops", fact, "finite numbers in what is dropped", is_forward_finite=False)


def _bad_number(scene: Scene) -> Edge | None:
    """A NaN among the numbers, not tensors, that the call is given; of an optimizer's options also an infinity."""
    seen, is_step = scene.origin, scene.origin.call.is_optimizer_step
    groups = seen.call.kwargs.get("options", ()) if is_step else (seen.kwargs,)
    named = [(f"{name}=", value) for group in groups for name, value in group.items()]
    for name, value in (*named, *(("", value) for value in seen.args)):
        numbers = value if isinstance(value, (list, tuple)) else (value,)
        floats = [number for number in numbers if isinstance(number, float)]
        bad = next((n for n in floats if math.isnan(n) or (is_step and math.isinf(n))), None)
        if bad is not None:
            fact = f"what is computed with {name}{bad} is {'nan' if math.isnan(bad) else 'not finite'}"
            return Edge(f"for {name or 'the argument '}{bad}", fact, "a number that is finite")
    return None


def _in_double(scene: Scene, origin: OriginCall, failure: Failure, program: Program, tensors: Tensors) -> Edge | None:
    """The edge found by running the origin in float64: whether the result fits the dtype."""
    bad, is_backward = origin.bad, failure.is_derivative
    if bad is None:
        return None
    exact = _exact_gradient(failure, program, tensors) if is_backward else origin.exact(failure.way)
    is_held = exact is not None and exact <= torch.finfo(bad.dtype).max
    lost = _lost_eps(scene.origin, bad.dtype) if is_held and not is_backward else None
    if lost is not None and any(map(ways_of, origin.made.values())):
        return lost
    arriving = _arriving(failure, program, tensors) if is_backward else []
    return _compared(failure, origin, exact, bad.dtype, [*origin.given.values(), *arriving])


def _compared(
    failure: Failure, origin: OriginCall, exact: float | None, dtype: torch.dtype, read: Sequence[torch.Tensor]
) -> Edge:
    """The edge that follows from the largest magnitude in float64; ``None`` stands for one that is not finite.

    ``read`` is what the result or the gradient is computed from.
    """
    limit, name, is_backward = torch.finfo(dtype).max, _short(dtype), failure.is_derivative
    deciding = origin.deciding() if not is_backward else ()
    derivative = origin.derivative(failure.value) if is_backward and failure.value is not None else None
    if derivative is not None and derivative > limit:
        fact = f"its derivative, about {derivative:.3g}, is above the largest {name} number, {limit:.5g}"
        operands = tuple(value for value, tensor in origin.given.items() if is_number(tensor))
        wanted = f"an argument whose derivative fits {name}"
        fact = with_zero(fact, failure)
        return Edge("where its derivative overflows", fact, wanted, operands if len(operands) == 1 else ())
    if exact is None:
        return Edge("", _why_open(dtype, is_backward), "other operands", deciding, verdict=Defect.OPEN)
    wanted, what = f"operands small enough for {name}", _bad_name(failure, origin)
    converted = _too_large_to_convert(origin, dtype) if not is_backward else ()
    if converted:
        largest = max(float(origin.given[value].abs().max()) for value in converted)
        fact = f"autocast converts an operand of up to {largest:.5g} to {name}, whose largest number is {limit:.5g}"
        return Edge(f"for an operand above {limit:.5g}", fact, wanted, converted)
    if exact > limit:
        fact = f"the exact {what}, about {exact:.3g}, is above the largest {name} number, {limit:.5g}"
        words = f"for a {what if '`' not in what else 'value'} above {limit:.5g}"
        return Edge(words, fact, wanted, deciding)
    inner = INNER.get(short_name(origin.call))
    if inner is not None and _bound(inner, read) > limit:
        fact = f"its {inner} overflow {name} on the way, whose largest number is {limit:.3g}"
        return Edge(f"where {inner} overflow {name}", fact, wanted, deciding)
    fact = f"float64 gives about {exact:.3g}, which {name} can hold"
    return Edge(f"although float64 gives {exact:.3g}", fact, "", deciding, verdict=Defect.BETTER)


def _too_large_to_convert(origin: OriginCall, dtype: torch.dtype) -> tuple[int, ...]:
    """The operands that autocast cannot convert to ``dtype`` without overflow, if the call is finite without that."""
    limit = torch.finfo(dtype).max
    wide = {v: t for v, t in origin.given.items() if t.is_floating_point() and torch.finfo(t.dtype).max > limit}
    clamped = {v: t.clamp(-limit, limit) for v, t in wide.items() if t.numel() and float(t.abs().max()) > limit}
    is_cause = origin.call.mode.autocast and clamped and origin.is_finite_with(clamped)
    return tuple(clamped) if is_cause else ()


def _why_open(dtype: torch.dtype, is_backward: bool) -> str:
    if dtype in (torch.float64, torch.complex128):
        return f"there is no wider dtype than {_short(dtype)} to compare with"
    return f"{'the gradient' if is_backward else 'the result'} in float64 is not finite either, or could not be had"


def _bad_name(failure: Failure, origin: OriginCall) -> str:
    """The nan or inf value: the gradient, the result, or the argument written into, by its parameter's name."""
    if failure.is_derivative:
        return "gradient"
    if origin.value is None or origin.value in origin.call.output_refs() or origin.call.is_optimizer_step:
        return "result"
    return f"`{parameter_of(origin.call, origin.value) or 'statistic'}`"


def _bound(inner: str, read: Sequence[torch.Tensor]) -> float:
    """The largest number that products, squares or sums of what a call reads can come to, or more."""
    sizes = [tensor.detach().abs().double() for tensor in read if is_number(tensor)]
    if inner == "products":
        peaks = sorted(float(size.max()) for size in sizes)
        return math.prod(peaks[-2:]) * max(size.numel() for size in sizes)
    if inner == "partial products":
        return max(float(size.clamp(min=1.0).prod()) for size in sizes)
    return max(float((size.square() if inner == "squares" else size).sum()) for size in sizes)


@dataclass(frozen=True, slots=True)
class _Arriving:
    """An observer that keeps the gradients which the backward pass gives to the results of one call."""

    index: int
    gradients: list[torch.Tensor] = field(default_factory=list)

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Nothing yet."""

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Wait for the gradients."""
        for value in call.output_refs() if index == self.index else ():
            if values[value].requires_grad:
                values[value].register_hook(self.gradients.append)  # type: ignore[no-untyped-call]


def _arriving(failure: Failure, program: Program, tensors: Tensors) -> list[torch.Tensor]:
    """The gradients that arrive at the origin."""
    watch = _Arriving(failure.call_index if failure.call_index is not None else -1)
    with contextlib.suppress(ReprokitError, UnknownFunction, RuntimeError):
        run(program, tensors, observer=watch, keep=frozenset())
    return watch.gradients


def _exact_gradient(failure: Failure, program: Program, tensors: Tensors) -> float | None:
    """The largest magnitude in float64 of the gradient that is bad, ``None`` when it is not finite or not that of an
    input."""
    wide = in_dtype(Candidate(program, tensors), torch.float64)
    try:
        with default_dtype(torch.float64):
            outcome = run(wide.program, wide.tensors)
    except (ReprokitError, UnknownFunction, RuntimeError):
        return None
    gradient = outcome.gradients.get(failure.value) if failure.value is not None else None
    if gradient is None or outcome.error is not None or ways_of(gradient):
        return None
    return float(gradient.abs().max())


def _lost_eps(seen: ObservedCall, dtype: torch.dtype) -> Edge | None:
    """An epsilon that is zero in the dtype, so that it protects nothing."""
    for name, number in _epsilons(seen):
        if number > 0 and float(torch.tensor(number, dtype=torch.float64).to(dtype)) == 0.0:
            short = _short(dtype)
            fact = (
                f"`{name}={number:g}` rounds to zero in {short}, so it no longer keeps the denominator from being zero"
            )
            return Edge(f"because {name}={number:g} is 0 in {short}", fact, "", verdict=Defect.BETTER)
    return None


def _epsilons(seen: ObservedCall) -> Iterator[tuple[str, float]]:
    """The epsilons of an optimizer's groups, or of a function, given or by default."""
    call, is_step = seen.call, seen.call.is_optimizer_step
    groups = call.kwargs["options"] if is_step else (seen.kwargs,)
    for name, options in itertools.product(_NAMES_OF_EPS, groups):
        number = options.get(name)
        if number is None:
            with contextlib.suppress(KeyError):
                number = optimizer_defaults(call.target.rpartition(".")[0])[name] if is_step else default_of(call, name)
        if isinstance(number, float):
            yield name, number


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
