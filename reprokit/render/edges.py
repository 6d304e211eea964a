"""Is a failure what the function is defined to give? The edge of its domain or of its dtype that the origin sits on.

Each rule looks at the values that the origin was given, so an answer is seen, not guessed from a name. Where no rule
applies there is no answer, and the issue may well be about a bug of the function.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reprokit.errors import ReprokitError
from reprokit.locate.failure import Drop, Failure
from reprokit.locate.ways import ways_of
from reprokit.program.functions import UnknownFunction, function_named
from reprokit.program.ir import Call, Program, iter_refs
from reprokit.program.run import Tensors, bind_arguments, run
from reprokit.render import wording
from reprokit.render.domains import BACKWARD_RULES, FORWARD_RULES, Edge, Given
from reprokit.render.ranges import measure
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.references import in_dtype

_REVERSED = {"rtruediv": "div", "rdiv": "div", "rpow": "pow"}
_SAME = {
    "truediv": "div", "true_divide": "div", "divide": "div", "itruediv": "div", "idiv": "div", "ipow": "pow",
    "arccos": "acos", "arcsin": "asin", "float_power": "pow",
}  # fmt: skip
# Sums of products: that one of them overflows on the way is floating-point arithmetic, not a defect.
_SUMS_OF_PRODUCTS = frozenset(
    (
        "linear",
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "einsum",
        "conv1d",
        "conv2d",
        "conv3d",
        "rnn_relu",
        "rnn_tanh",
    )
)
_NAMES_OF_EPS = ("eps", "epsilon")


@dataclass(slots=True)
class _Look:
    """An observer that keeps what one call was given and gave."""

    index: int
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    results: tuple[torch.Tensor, ...] = ()

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Keep the arguments."""
        if index == self.index and not call.is_optimizer_step:
            args, kwargs = bind_arguments(call, values)
            self.args, self.kwargs = _copied(args), _copied(kwargs)

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Keep the results."""
        if index == self.index:
            wanted = call.kwargs["params"] if call.is_optimizer_step else call.outputs
            found = (values.get(ref.value) for ref in iter_refs(wanted))
            self.results = tuple(value.detach().clone() for value in found if value is not None)


def find_edge(program: Program, tensors: Tensors, failure: Failure) -> Edge | None:
    """What explains a failure of this program, ``None`` when nothing known does or there is no origin."""
    if failure.kind not in ("nan", "inf"):
        return None
    if failure.drop is not None:
        return _dropped(failure.drop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = observe(program, tensors, failure)
        if given is None:
            return None
        rules = BACKWARD_RULES if failure.phase == "backward" else FORWARD_RULES
        found = (rule(given) for rule in rules)
        edge = _bad_number(given) or next((edge for edge in found if edge is not None), None)
        edge = edge or _in_double(given, program, tensors)
    is_forward_finite = not any(map(ways_of, given.results))
    return replace(edge, is_forward_finite=is_forward_finite) if edge is not None else None


def _dropped(drop: Drop) -> Edge:
    name = wording.short_name(drop.call)
    fact = f"zero times nan is nan, and {wording.code_span(name)} drops values, not their derivatives"
    return Edge(f"for a nan that {name} drops", fact, "finite numbers in what is dropped", is_forward_finite=False)


def observe(program: Program, tensors: Tensors, failure: Failure) -> Given | None:
    """The origin as it ran; ``None`` without one, or when the program cannot be run here."""
    if failure.call_index is None:
        return None
    call, look = program.calls[failure.call_index], _Look(failure.call_index)
    try:
        run(program, tensors, observer=look)
    except (ReprokitError, UnknownFunction, RuntimeError):
        return None
    args, name = look.args, call.name.strip("_")
    if name in _REVERSED:
        name, args = _REVERSED[name], args[::-1]
        call = Call(call.target, call.args[::-1], call.kwargs, call.outputs)
    return Given(_SAME.get(name, name), call, failure, args, look.kwargs, look.results)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return tuple(_copied(item) for item in value)
    return {name: _copied(item) for name, item in value.items()} if isinstance(value, dict) else value


def _bad_number(given: Given) -> Edge | None:
    """A number, not a tensor, that is NaN: an argument of the call, or an option of the optimizer."""
    groups = given.call.kwargs.get("options", ()) if given.call.is_optimizer_step else (given.kwargs,)
    named = [(f"{name}=", value) for group in groups for name, value in group.items()]
    for name, value in (*named, *(("", value) for value in given.args)):
        numbers = value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(number, float) and math.isnan(number) for number in numbers):
            fact = f"what is computed with {name}nan is nan"
            return Edge(f"for {name or 'the argument '}nan", fact, "a number that is finite")
    return None


def _in_double(given: Given, program: Program, tensors: Tensors) -> Edge | None:
    """What float64 makes of the same program says whether the result fits the dtype at all."""
    result = given.result
    if result is None or result.dtype is torch.float64 or given.failure.phase == "backward":
        return None
    if not any(map(ways_of, given.results)):
        return None  # here it does not fail
    limit = torch.finfo(result.dtype).max
    lost = _lost_eps(given, result.dtype)
    if lost is not None:
        return lost
    exact = _exact(given, program, tensors)
    if exact is None:
        return None
    name, value = _dtype(result), given.value(0)
    if exact > limit:
        fact = f"the exact result, about {exact:.3g}, is above the largest {name} number, {limit:.5g}"
        return Edge(f"for a result above {limit:.5g}", fact, f"operands small enough for {name}", value)
    if given.name in _SUMS_OF_PRODUCTS:
        fact = f"its products overflow {name} on the way, whose largest number is {limit:.3g}"
        return Edge(f"where products overflow {name}", fact, f"operands small enough for {name}", value)
    fact = f"float64 gives about {exact:.3g}, which {name} can hold"
    return Edge(f"although float64 gives {exact:.3g}", fact, "", value, is_by_definition=False)


def _exact(given: Given, program: Program, tensors: Tensors) -> float | None:
    """The largest magnitude of what the origin gives in float64, ``None`` when that is not finite either."""
    wide = in_dtype(Candidate(program, tensors), torch.float64)
    target = program.calls[given.failure.call_index or 0].target
    same = (
        n for n, call in enumerate(wide.program.calls) if (call.target, call.outputs) == (target, given.call.outputs)
    )
    index = next(same, None)
    if index is None:
        return None
    look = _Look(index)
    try:
        run(wide.program, wide.tensors, observer=look)
    except (ReprokitError, UnknownFunction, RuntimeError):
        return None
    found = [measure(tensor) for tensor in look.results if tensor.is_floating_point()]
    highs = [seen.high for seen in found if seen.high is not None]
    return max(highs, default=None) if not any(seen.is_bad for seen in found) else None


def _lost_eps(given: Given, dtype: torch.dtype) -> Edge | None:
    """An epsilon that is zero in the dtype, so that it protects nothing."""
    for name, number in _epsilons(given):
        if number > 0 and float(torch.tensor(number, dtype=torch.float64).to(dtype)) == 0.0:
            short = str(dtype).removeprefix("torch.")
            fact = (
                f"`{name}={number:g}` rounds to zero in {short}, so it no longer keeps the denominator from being zero"
            )
            return Edge(f"because {name}={number:g} is 0 in {short}", fact, "", None, is_by_definition=False)
    return None


def _epsilons(given: Given) -> Iterator[tuple[str, float]]:
    groups = given.call.kwargs.get("options", ()) if given.call.is_optimizer_step else (given.kwargs,)
    defaults = _defaults(given.call)
    for name in _NAMES_OF_EPS:
        numbers = (options.get(name, defaults.get(name)) for options in groups)
        yield from ((name, number) for number in numbers if isinstance(number, float))


def _defaults(call: Call) -> dict[str, Any]:
    """The default values of a function's parameters, or of an optimizer's options."""
    try:
        if call.is_optimizer_step:
            function: Any = getattr(torch.optim, call.target.split(".")[2])
        else:
            function = function_named(call.target)
        return {name: item.default for name, item in inspect.signature(function).parameters.items()}
    except (AttributeError, TypeError, ValueError, UnknownFunction):
        return {}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
