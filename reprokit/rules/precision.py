"""Rules about numbers that a dtype cannot hold: half precision, growth, options of optimizers, and infinities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reprokit import native
from reprokit.locate.domains import DOMAINS
from reprokit.locate.spelling import short_name
from reprokit.locate.ways import HALVES, largest_finite
from reprokit.rules.edits import (
    AWAY_FROM_ZERO,
    IN_FLOAT32,
    WIDER,
    away_from_zero,
    call_in_float32,
    clamp,
    on_call,
    result_at_most,
    set_argument,
    set_option,
)
from reprokit.rules.predicates import (
    ZERO_BY_ZERO,
    dtype_name,
    follows,
    has,
    is_dangerous,
    is_wanted,
    largest_if_finite,
    option,
    places,
    turns_bad,
)
from reprokit.rules.rule import Fix, Numbers, Rule, of_scene
from reprokit.rules.scene import Scene
from reprokit.series.usual import growth

_TAIL = 20  # steps before the failure that are looked at


@of_scene
def overflows(scene: Scene, *, halves: bool) -> Numbers | None:
    """True if the origin made an infinity of finite arguments because its dtype ends too early.

    The call is done again in float64, to tell by how much. ``halves``: only where half precision is to blame, so that
    float32 could hold the result (bfloat16 ends where float32 does), or only where it is not.
    """
    value, result = scene.bad
    exact = scene.origin.exact.get(value)
    if not native.is_floating_point(result) or exact is None or exact.shape != result.shape:
        return None
    bad, limit = ~native.isfinite(result), torch.finfo(result.dtype).max
    sizes = native.abs(exact)[bad & native.isfinite(exact)]
    if not native.numel(sizes) or float(native.max(sizes)) <= limit:
        return None
    largest = float(native.max(sizes))
    is_beyond = bool(native.any(native.isinf(exact[bad])))  # some do not fit into float64
    fits = largest <= torch.finfo(torch.float32).max and not is_beyond
    if halves != (result.dtype in HALVES and fits):
        return None
    more = "more than " if is_beyond else ""
    return places(native.abs(exact) > limit, more=more, largest=largest, limit=limit, times=largest / limit,
                  dtype=dtype_name(result))  # fmt: skip


def operand_is_too_large(scene: Scene) -> Numbers | None:
    """True if autocast converts a finite operand of the origin to a dtype that ends below it."""
    result = scene.tensor("result")
    if not scene.origin.call.mode.autocast or result.dtype not in HALVES:
        return None
    limit = torch.finfo(result.dtype).max
    for operand in scene.arguments():
        sizes = native.double(native.abs(operand)) if native.is_floating_point(operand) else native.zeros(1)
        if bool(native.all(native.isfinite(sizes))) and bool(native.any(sizes > limit)):
            return places(sizes > limit, largest=float(native.max(sizes)), limit=limit, dtype=dtype_name(result))
    return None


def gradients_explode(scene: Scene) -> Numbers | None:
    """True if a gradient went bad although everything its call was given is finite."""
    largest = largest_if_finite(scene)
    return {"largest": largest} if scene.failure.is_derivative and largest is not None else None


def _lost(eps: object, tensor: torch.Tensor) -> Numbers | None:
    """True if the dtype of a tensor rounds ``eps`` to zero."""
    if not isinstance(eps, float) or eps == 0 or float(native.tensor(eps, dtype=tensor.dtype)) != 0:
        return None
    return {"eps": eps, "dtype": dtype_name(tensor), "smallest": _smallest(tensor)}


def _smallest(tensor: torch.Tensor) -> float:
    """The smallest positive number of the dtype, below which everything is zero."""
    return float(torch.finfo(tensor.dtype).smallest_normal) * float(torch.finfo(tensor.dtype).eps)


def loses_eps(scene: Scene) -> Numbers | None:
    """True if an argument was protected by a small constant that half precision rounds to zero."""
    role = DOMAINS[short_name(scene.origin.call)].operand
    values = scene.tensor(role)
    if values.dtype not in HALVES:
        return None
    guards = (call for _, call in scene.makers(role, 3) if short_name(call) in ("add", "clamp", "clamp_min", "maximum"))
    lost = (_lost(number, values) for call in guards for number in (*call.args, *call.kwargs.values()))
    return next(filter(None, lost), None)


def loses_eps_argument(scene: Scene) -> Numbers | None:
    """True if the call's own ``eps`` is rounded to zero by half precision."""
    x = scene.tensor("x")
    return _lost(scene.operand("eps"), x) if x.dtype in HALVES else None


def optimizer_loses_eps(scene: Scene) -> Numbers | None:
    """True if the optimizer's ``eps`` is rounded to zero in the dtype of a parameter."""
    groups = zip(scene.origin.kwargs.get("params", ()), _options(scene), strict=False)
    lost = (_lost(options.get("eps"), parameter) for group, options in groups for parameter in group)
    return next(filter(None, lost), None)


@of_scene
def optimizer_option(scene: Scene, /, name: str, **wanted: float) -> Numbers | None:
    """True if an option of the optimizer's step is as wanted in any group."""
    values = (group.get(name) for group in _options(scene))
    found = next((value for value in values if is_wanted(value, wanted)), None)
    return {name: found} if found is not None else None


def has_bad_number(scene: Scene) -> Numbers | None:
    """True if an option of the optimizer's step is not finite."""
    options = (item for group in _options(scene) for item in group.items())
    return next(({"name": name, "value": value} for name, value in options if _is_bad(value)), None)


def _options(scene: Scene) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = scene.origin.kwargs.get("options", ())
    return found if scene.origin.call.is_optimizer_step else ()


def _is_bad(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_bad, value))
    if isinstance(value, torch.Tensor):
        return native.is_floating_point(value) and not bool(native.all(native.isfinite(value)))
    return isinstance(value, float) and not math.isfinite(value)


def is_normalised_later(scene: Scene) -> Numbers | None:
    """True if the origin's result is divided, later, by a sum over itself."""
    calls = scene.program.calls[scene.index :]
    known, summed = set(calls[0].output_refs()), set[int]()
    for call in filter(scene.leads_to_loss, calls[1:]):
        reads = set(call.input_refs())
        if short_name(call) in ("sum", "mean", "amax", "max") and known & reads:
            summed.update(call.output_refs())
        elif short_name(call) == "div" and known & reads and summed & reads:
            return {}
        elif known & reads:
            known.update(call.output_refs())
        elif summed & reads:
            summed.update(call.output_refs())
    return None


def loss_was_growing(scene: Scene) -> Numbers | None:
    """True if the loss, or the norm of the gradients, of the steps before had grown tenfold, for good."""
    for name, word in (("loss", "loss"), ("grad_norm", "gradient norm")):
        found = growth(_numbers(scene, name)[-_TAIL:])
        if found is not None:
            first, low, last, high = found
            rates = _rates_since(scene, first)
            return {"what": word, "low": low, "high": high, "from_step": first, "to_step": last, "lr": rates}
    return None


def parameters_are_huge(scene: Scene) -> Numbers | None:
    """True if parameters that the failure depends on have left every usual range before the step."""
    inputs = (item for item in scene.program.inputs if item.role == "parameter" and item.value in scene.upstream)
    values = ((scene.tensors[item.value], item.name) for item in inputs)
    sizes = (
        (largest_finite(value), name)
        for value, name in values
        if native.is_floating_point(value) and native.numel(value)
    )
    worst, name = max(sizes, default=(0.0, ""))
    rate = _last_rate(scene, "; the update before was made at a learning rate of")
    return {"largest": worst, "input": f"`{name}`", "lr": rate} if worst >= 1e6 else None


def _rates_since(scene: Scene, first: int) -> str:
    """The learning rates of the updates since a step, behind words; empty if none was noted."""
    rates = [rate for step, rate in _numbers(scene, "lr") if step >= first]
    if not rates:
        return ""
    low, high = f"{min(rates):.4g}", f"{max(rates):.4g}"
    return f", at a learning rate of {low}" if low == high else f", at learning rates of {low} to {high}"


def _last_rate(scene: Scene, words: str) -> str:
    """The learning rate of the last update behind these words; empty if none was noted."""
    rates = _numbers(scene, "lr")
    return f"{words} {rates[-1][1]:.4g}" if rates else ""


def _numbers(scene: Scene, name: str) -> list[tuple[int, float]]:
    """The finite numbers of this name, with their steps."""
    found = ((row.step, getattr(row, name)) for row in scene.timeline)
    return [(step, number) for step, number in found if number is not None and math.isfinite(number)]


def has_infinite_operand(scene: Scene) -> Numbers | None:
    """True if the origin was given infinities and no NaN; element by element, where its result is NaN."""
    given, result = [tensor for tensor in scene.arguments() if native.is_floating_point(tensor)], scene.tensor("result")
    found = [mask for mask in (native.isinf(tensor) for tensor in given) if bool(native.any(mask))]
    if not found or any(bool(native.any(native.isnan(tensor))) for tensor in given):
        return None
    if short_name(scene.origin.call) in ("mul", "sub", "add", "div"):
        infinite = sum(native.int(native.expand(mask, result.shape)) for mask in found)
        if bool(native.any(native.isnan(result) & (infinite == 0))):
            return None
    return places(found[0])


# fmt: off
PRECISION = [
    Rule("half-operand-overflow", "An operand that is too large for autocast",
        phases="forward", when=[operand_is_too_large],
        why="Autocast converts the operands of `{call}` to {dtype}. One is finite but beyond the largest number of "
            "that dtype ({limit:.6g}), so the conversion makes it infinite.",
        seen=["the operand goes up to {largest:.6g}",
              "{count} of {total} of its elements are beyond {limit:.6g}"],
        advice="Scale the operand down (unscaled input data?), do this call in float32, or use bfloat16.",
        expected="operands small enough for the dtype",
        fixes=[Fix("do this {call} in float32", call_in_float32()), *WIDER]),
    Rule("half-overflow", "Half precision overflow", phases="forward", is_local=True, when=[overflows(halves=True)],
        why="`{call}` in {dtype} gives a number beyond the largest one of that type ({limit:.6g}), so it becomes "
            "infinite, and NaN soon after.",
        seen=["the result would be {more}{largest:.6g}, {more}{times:.3g} times the largest {dtype} number "
              "({limit:.6g})",
              "{count} of {total} elements overflow"],
        advice="Do this call in float32, scale its arguments down first, or use bfloat16, which has the range of "
               "float32.",
        expected="operands small enough for the dtype",
        links="huggingface/transformers/issues/5651 pytorch/pytorch/issues/40497",
        fixes=[Fix("do this {call} in float32", call_in_float32()), WIDER[0],
               Fix("clamp the result of {call} to the largest number of its dtype", result_at_most()), WIDER[1]]),
    Rule("half-normalize-eps", "An eps that half precision rounds to zero", cause="framework",
        phases="forward backward", calls="normalize cosine_similarity layer_norm group_norm rms_norm instance_norm",
        is_of_torch=True, when=[loses_eps_argument],
        why="The `eps` of `{call}` is there to avoid a division by zero, but {eps:.3g} is below the smallest {dtype} "
            "number ({smallest:.3g}) and becomes zero. A zero vector, or one of equal values, is then divided by "
            "zero.",
        seen=["eps = {eps:.3g}, the smallest {dtype} number above zero is {smallest:.3g}"],
        advice="Give `eps` a value that half precision can hold, such as 1e-4, or do the call in float32.",
        links="huggingface/diffusers/pull/13316",
        fixes=[Fix("give {call} an eps that half precision can hold", set_argument("eps", 1e-4)),
               Fix("do this {call} in float32", call_in_float32())]),
    Rule("half-eps-lost", "An eps that half precision rounds to zero",
        phases="forward backward", calls="div reciprocal log log2 log10 sqrt rsqrt", when=[is_dangerous, loses_eps],
        why="A small number was added to keep the divisor or argument of `{call}` away from zero, but {eps:.3g} is "
            "below the smallest {dtype} number ({smallest:.3g}), so nothing was added.",
        seen=["eps = {eps:.3g} becomes 0 in {dtype}, and {count} of {total} operands are zero"],
        advice="Use an eps of 1e-4 or more in half precision, or do the call in float32.",
        fixes=[Fix("keep the divisor above a number that half precision can hold", clamp("denominator", min="small")),
               Fix("divide by one where the divisor is zero", away_from_zero()),
               Fix("keep the argument of {call} above a number that half precision can hold", clamp(min="small"))]),
    Rule("bad-hyperparameter", "A hyperparameter that is not a number", when=[has_bad_number], cause="setting",
        why="`{name}` of `{call}` is {value}. Everything computed with it is bad.", seen=["{name} = {value}"],
        advice="Find where it is computed: a schedule that divides by zero steps, a statistic of a failed step.",
        expected="a number that is finite",
        fixes=[Fix("give the optimizer a finite learning rate", set_option("lr", 1e-3),
                   "for group in optimizer.param_groups:\n    group[\"lr\"] = 1e-3")]),
    Rule("optimizer-eps-lost", "The optimizer's eps is zero in half precision", cause="setting",
        phases="optimizer", is_of_torch=True, when=[optimizer_loses_eps],
        why="The optimizer divides by the root of the squared gradients plus `eps`. In {dtype} an eps of {eps:.3g} is "
            "zero (the smallest number above zero is {smallest:.3g}), and so are small squares, so a zero or tiny "
            "gradient divides by zero.",
        seen=["eps = {eps:.3g} in {dtype}, where everything below {smallest:.3g} is zero"],
        advice="Keep the parameters in float32 and use autocast, or give the optimizer an eps of 1e-4.",
        links="pytorch/pytorch/issues/8860",
        fixes=[Fix("give the optimizer an eps that half precision can hold", set_option("eps", 1e-4),
                   "torch.optim.{optimizer}(params, eps=1e-4)"),
               IN_FLOAT32]),
    Rule("optimizer-eps-zero", "The optimizer has no eps", cause="setting",
        phases="optimizer", when=[optimizer_option("eps", equal=0.0)],
        why="The optimizer divides by the root of the squared gradients plus `eps`. With an eps of 0 a gradient of "
            "zero gives 0 / 0.",
        seen=["eps = 0"], advice="Use the default eps.",
        fixes=[Fix("give the optimizer its usual eps", set_option("eps", 1e-8),
                   "torch.optim.{optimizer}(params, eps=1e-8)")]),
    Rule("huge-learning-rate", "A learning rate out of all proportion", cause="setting",
        phases="optimizer", when=[optimizer_option("lr", at_least=1e6)],
        why="The update is the gradient times the learning rate, and goes beyond the largest number of the dtype.",
        seen=["the learning rate is {lr:.4g}"], advice="Check the learning rate and its schedule.",
        fixes=[Fix("use a learning rate of 1e-3", set_option("lr", 1e-3), "torch.optim.{optimizer}(params, lr=1e-3)")]),
    Rule("update-without-eps", "An update divided by a size that is zero", kinds="nan", phases="optimizer", calls="div",
        when=[ZERO_BY_ZERO, follows("sqrt norm vector_norm std mean", "denominator")],
        why="The update rule divides a gradient by its own running size (`{maker}`) without an eps. A parameter whose "
            "gradient has been zero all along has size zero, and 0 / 0 is NaN.",
        seen=["{count} of {total} elements divide a gradient of 0 by a size of 0"],
        advice="Add an eps to the divisor of the update.", links="kozistr/pytorch_optimizer/issues/120",
        fixes=AWAY_FROM_ZERO),
    Rule("exp-overflow", "An exponential that overflows", cause="",
        phases="forward", calls="exp expm1 exp2 sinh cosh", is_local=True, when=[is_dangerous, turns_bad],
        why="exp(x) goes beyond the largest {dtype} number ({limit:.4g}) as soon as x is above its logarithm (88.7 "
            "for float32 and bfloat16, 11.1 for float16).",
        seen=["the largest argument is {largest:.4g}"],
        advice="Subtract the largest argument first if the result is normalised (`softmax`, `logsumexp`), clamp it, "
               "or stay in logarithms.",
        expected="operands small enough for the dtype", links="facebookresearch/swav/issues/67",
        fixes=[Fix("clamp the argument of {call} from above", clamp(max="log_max")),
               Fix("clamp the argument of {call} at 20", clamp(max=20.0))]),
    Rule("exp-then-normalised", "An exponential that overflows before it is normalised",
        phases="forward", calls="exp exp2", when=[is_dangerous, turns_bad, is_normalised_later],
        why="exp(x) overflows, and the division by its own sum that follows makes inf / inf, NaN. Subtracting the "
            "largest x first changes nothing in the quotient and keeps exp(x) at one or below.",
        seen=["the largest argument is {largest:.4g}, and the result is divided by a sum over itself"],
        advice="Subtract the largest argument before the exponential, or use `softmax`.",
        expected="operands small enough for the dtype", links="facebookresearch/swav/issues/67",
        fixes=[Fix("subtract the largest argument before {call}",
                   on_call(lambda call: call.given("x", call["x"].sub(call.make("torch.amax", call["x"]))))),
               Fix("clamp the argument of {call} from above", clamp(max="log_max"))]),
    Rule("learning-rate-divergence", "The numbers had been growing before", cause="setting",
        tier="context", confidence="likely", when=[loss_was_growing],
        why="The failure may be the end of a longer story: {what} had been growing for some steps before it.",
        seen=["the {what} went from {low:.4g} at step {from_step} to {high:.4g} at step {to_step}{lr}"],
        advice="Lower the learning rate, warm it up, or clip gradients (to a lower norm if they are clipped already).",
        links="pytorch/examples/pull/223"),
    Rule("huge-parameters", "Parameters that have left every usual range", cause="setting",
        tier="context", confidence="likely", when=[parameters_are_huge],
        why="The parameters were ruined before this step, by an update or what came before it; the failure is only "
            "where it shows.",
        seen=["{input} holds values up to {largest:.4g}{lr}"],
        advice="Lower the learning rate, warm it up, or clip gradients (to a lower norm if they are clipped already)."),
    Rule("overflow", "A product or sum beyond the largest number", cause="",
        phases="forward", tier="general", is_local=True, when=[overflows(halves=False)],
        why="`{call}` gives a number beyond the largest {dtype} number ({limit:.4g}).",
        seen=["the result would be {more}{largest:.4g}, {more}{times:.3g} times the largest {dtype} number"],
        advice="Look at how the arguments became so large; scale them down before the call.",
        expected="operands small enough for the dtype",
        fixes=[Fix("clamp the result of {call} to the largest number of its dtype", result_at_most())]),
    Rule("exploding-gradients", "Gradients that grow until they overflow",
        kinds="inf", phases="backward", tier="general", confidence="possible", when=[gradients_explode],
        why="Nothing that is known about `{call}` explains an infinity at its arguments: most likely the gradient is "
            "a product of too many, or too large, factors.",
        seen=["everything `{call}` was given is finite (at most {largest:.4g}), its gradient is not"],
        advice="Clip gradients (to a lower norm if they are clipped already), normalise between layers, or lower the "
               "learning rate."),
    Rule("log-rate-overflow", "A log rate whose exponential overflows", phases="forward", calls="poisson_nll_loss",
        cause="",
        is_local=True, when=[option("log_input", equal=1.0), has(above="log_max"), turns_bad],
        why="With `log_input` the loss takes the exponential of its input, which goes beyond the largest {dtype} "
            "number ({limit:.4g}).",
        seen=["{count} of {total} log rates are too large (up to {highest:.4g})"],
        advice="Look at why the log rate became so large (a learning rate, a noisy objective); clamp it before the "
               "loss.",
        expected="operands small enough for the dtype",
        fixes=[Fix("clamp the argument of {call} from above", clamp(max="log_max")),
               Fix("clamp the argument of {call} at 20", clamp(max=20.0))]),
    Rule("arithmetic-with-infinity", "Arithmetic with infinities",
        kinds="nan", phases="forward", calls="mul matmul mm bmm linear sub add sum mean cumsum div",
        is_local=True, when=[has_infinite_operand],
        why="Infinities went into `{call}`, often from a mask, and no NaN. inf - inf, inf / inf and 0 * inf are NaN; a "
            "product with zero does not hide an infinity.",
        seen=["{count} of {total} elements of an operand are infinite"],
        advice="Use large finite numbers in place of infinities, and `torch.where` or `masked_fill` in place of a "
               "product with a mask.",
        expected="finite operands"),
]
# fmt: on
