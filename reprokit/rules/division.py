"""Rules about divisions by zero, the special ones first, and reductions over too few elements."""

from __future__ import annotations

import torch

from reprokit import native
from reprokit.locate.spelling import short_name, slot_of
from reprokit.program.ir import iter_refs
from reprokit.rules.edits import (
    AWAY_FROM_ZERO,
    away_from_zero,
    biased,
    clamp,
    guarded_weight_norm,
    set_argument,
    sum_over_count,
)
from reprokit.rules.predicates import (
    ZERO_BY_ZERO,
    follows,
    follows_underflow,
    ignored_by,
    meet,
    places,
    raises,
    shape_of,
)
from reprokit.rules.rule import Fix, Numbers, Rule
from reprokit.rules.scene import ObservedCall, Scene

_TESTS = frozenset([
    "eq", "ne", "gt", "ge", "lt", "le", "logical_and", "logical_or", "logical_not", "logical_xor", "isfinite", "isnan",
    "isinf", "bitwise_and", "bitwise_or", "bitwise_not", "one_hot", "tril", "triu", "ones_like", "zeros_like", "cat",
    "stack", "mul", "masked_fill", "where", "arange",
])  # fmt: skip


def counts_something(scene: Scene) -> Numbers | None:
    """True if the denominator is a count: a sum of flags or whole numbers, or a number of elements."""
    for index, call in scene.makers("denominator", 2):
        seen = scene.seen.get(index)
        is_count = short_name(call) in ("count_nonzero", "bincount", "histc")
        if is_count or (short_name(call) == "sum" and seen is not None and seen.args and _is_mask(scene, seen, index)):
            return {"maker": short_name(call)}
    return None


def _is_mask(scene: Scene, seen: ObservedCall, index: int) -> bool:
    """True if the argument of a reduction marks elements that count: flags, whole numbers, 0 and 1 from a comparison.

    What is divided itself is no mask, even if it is zero throughout.
    """
    counted, call = seen.args[0], scene.origin.call
    if not isinstance(counted, torch.Tensor) or native.is_complex(counted):
        return False
    if not native.is_floating_point(counted):
        return True
    numerators = list(iter_refs([call.args[slot] for slot in [slot_of(call, "numerator")] if isinstance(slot, int)]))
    if bool(native.any((counted != 0) & (counted != 1))) or numerators == list(iter_refs(seen.call.args[:1])):
        return False
    makers = list(scene.makers_of(seen.call.args[:1], index))
    return not makers or any(short_name(call) in _TESTS for _, call in makers)


def divides_ignored(scene: Scene) -> Numbers | None:
    """True if what is divided is a loss that ignores every target."""
    losses = [index for index, call in scene.makers("numerator") if short_name(call) in ("cross_entropy", "nll_loss")]
    return next((ignored_by(scene.seen[index]) for index in losses if index in scene.seen), None)


def weight_row_is_zero(scene: Scene) -> Numbers | None:
    """True if a whole row of a weight-normalised weight is zero; with a ``dim`` of -1 the whole is one row."""
    weight, call = scene.tensor("x"), scene.origin.call
    if native.dim(weight) == 0:
        return None
    dim = call.args[2] if len(call.args) > 2 else call.kwargs.get("dim", 0)
    rows = (
        native.reshape(weight, 1, -1)
        if dim == -1
        else native.reshape(native.movedim(weight, dim, 0), weight.shape[dim], -1)
    )
    return places(native.all(rows == 0, 1))


def reduces_nothing(scene: Scene) -> Numbers | None:
    """True if the argument has no elements, but the result does."""
    x, result = scene.tensor("x"), scene.tensor_if_given("result")
    return {"shape": shape_of(x)} if not native.numel(x) and (result is None or native.numel(result)) else None


def reduces_one(scene: Scene) -> Numbers | None:
    """True if every result of a std or var that divides by n - 1 is made from a single element."""
    x, result, call = scene.tensor("x"), scene.tensor("result"), scene.origin.call
    is_unbiased = call.kwargs.get("unbiased", next((item for item in call.args[1:] if isinstance(item, bool)), True))
    if (
        not native.numel(x)
        or native.numel(x) != native.numel(result)
        or call.kwargs.get("correction", int(is_unbiased)) not in (None, 1)
    ):
        return None
    return {"shape": shape_of(x)}


# fmt: off
DIVISION = [
    Rule("no-target-counts", "A sum of losses over no target, divided by their number", cause="data",
        kinds="nan", phases="forward", calls="div", when=[ZERO_BY_ZERO, divides_ignored],
        why="All targets are `ignore_index`, so the sum of the losses is 0, and so is the number of targets.",
        seen=["all {count} targets are {ignored}"],
        advice="Leave such samples out, or divide by `max(count, 1)`.",
        expected="at least one target that counts", links="huggingface/trl/issues/1473",
        fixes=[Fix("divide by at least one", clamp("denominator", min=1.0))]),
    Rule("average-over-nothing", "An average over nothing",
        kinds="nan", phases="forward optimizer", calls="div", when=[ZERO_BY_ZERO, counts_something],
        why="A sum over selected elements is divided by how many there are. Nothing was selected, so 0 is divided by "
            "0.",
        seen=["{count} of {total} elements are divided by a count of zero (it comes from `{maker}`)"],
        advice="Divide by `count.clamp(min=1)`: the average over nothing is then 0.",
        expected="a divisor that is never zero", links="meta-pytorch/torchtune/issues/2341 huggingface/trl/issues/1473",
        fixes=[Fix("divide by at least one", clamp("denominator", min=1.0)),
               Fix("divide by one where the count is zero", away_from_zero())]),
    Rule("standardise-constant", "A constant divided by its own spread", kinds="nan", phases="forward", calls="div",
        when=[ZERO_BY_ZERO, follows("std var mean amax max aminmax", "denominator", through="sqrt add abs")],
        why="Values are divided by their own spread or size (`{maker}`). That is zero, as it is where all are equal "
            "or all are zero, and 0 / 0 is NaN.",
        seen=["{count} of {total} elements divide 0 by a spread of 0"],
        advice="Add an eps to the spread, or leave constant samples out.",
        expected="a divisor that is never zero", fixes=AWAY_FROM_ZERO),
    Rule("normalise-zero-vector", "A zero vector divided by its own length", kinds="nan", phases="forward", calls="div",
        when=[ZERO_BY_ZERO, follows("norm vector_norm sqrt", "denominator", through="div mul")],
        why="A vector is divided by its length (`{maker}`). Where all its elements are zero, so is the length, and 0 "
            "/ 0 is NaN.",
        seen=["{count} of {total} elements divide 0 by a length of 0"],
        advice="Use `F.normalize`, which bounds the length from below, or add an eps.",
        expected="a divisor that is never zero", fixes=AWAY_FROM_ZERO),
    Rule("exponentials-underflowed", "A sum of exponentials that all underflowed",
        kinds="nan", phases="forward", calls="div",
        when=[ZERO_BY_ZERO, follows_underflow("exp exp2 softmax sigmoid", "denominator", through="sum add")],
        why="Exponentials of very negative numbers are exactly zero in floating point. Where all of a row are, so is "
            "their sum, and normalising them gives 0 / 0.",
        seen=["{count} of {total} elements divide 0 by a sum of results of `{maker}` that is 0"],
        advice="Normalise in logarithms (`logsumexp`, `log_softmax`), subtract the largest argument of each row "
               "first, or raise the temperature.",
        expected="a divisor that is never zero", links="facebookresearch/swav/issues/67",
        fixes=[Fix("keep the divisor above the smallest normal number", clamp("denominator", min="tiny"))]),
    Rule("zero-by-zero", "Zero divided by zero",
        kinds="nan", phases="forward optimizer", calls="div", is_local=True, when=[ZERO_BY_ZERO],
        why="Numerator and divisor are zero at the same place, and 0 / 0 is NaN.",
        seen=["{count} of {total} elements divide 0 by 0"],
        advice="Say what the quotient should be there: keep the divisor above a small number, or choose the limit "
               "with a safe `where`.",
        expected="a divisor that is never zero", fixes=AWAY_FROM_ZERO),
    Rule("division-by-zero", "Division by zero", kinds="inf", phases="forward optimizer", calls="div reciprocal",
        is_local=True, when=[meet(numerator=dict(not_equal=0.0), denominator=dict(equal=0.0))],
        why="Something that is not zero is divided by zero, which is infinite; normalising it afterwards gives inf / "
            "inf, NaN.",
        seen=["{count} of {total} elements divide a number that is not 0 by 0"],
        advice="Keep the divisor away from zero, or give the elements with a zero divisor a value of their own.",
        expected="a divisor that is never zero", links="fcakyon/balanced-loss/pull/12",
        fixes=AWAY_FROM_ZERO),
    Rule("weight-norm-of-zero", "Weight normalisation of a weight that is zero",
        phases="forward backward", calls="weight_norm", is_local=True, when=[weight_row_is_zero],
        why="Weight normalisation divides every row of the weight by its length. A row that was pruned or initialised "
            "to zero has length zero, and 0 / 0 is NaN.",
        seen=["{count} of {total} rows of the weight are zero throughout"],
        advice="Do not prune whole rows of the direction; set the gain to zero instead, or bound the norm from below.",
        expected="a weight without rows of zeros", links="pytorch/pytorch/issues/19126",
        fixes=[Fix("keep the norm inside of {call} above a small number", guarded_weight_norm())]),
    Rule("std-of-one", "The unbiased spread of a single element",
        phases="forward", calls="std var std_mean var_mean", is_local=True, when=[reduces_one],
        why="The unbiased estimate divides by n - 1, which is zero for one element: 0 / 0 is NaN.",
        seen=["the argument has shape {shape}: one element for every result"],
        advice="Pass `correction=0`, or skip the normalisation for batches of one (`drop_last=True`).",
        expected="two elements or more", links="DLR-RM/stable-baselines3/issues/325",
        fixes=[Fix("divide by n in place of n - 1", biased())]),
    Rule("mean-of-nothing", "The mean of nothing", phases="forward",
        calls="mean nanmean std var median mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
              "binary_cross_entropy_with_logits cross_entropy nll_loss kl_div",
        is_local=True, when=[reduces_nothing],
        why="`{call}` averages over its elements, and there are none: 0 / 0 is NaN. A mask or filter in front of it "
            "selected nothing.",
        seen=["the argument has shape {shape}"],
        advice="Divide the sum by `max(count, 1)`, or skip the term when nothing is selected.",
        expected="at least one element",
        fixes=[Fix("divide the sum by the number of elements, at least one", sum_over_count()),
               Fix("sum in place of averaging in {call}", set_argument("reduction", "sum"))]),
    Rule("batch-norm-of-one", "Batch normalisation of a single value per channel",
        kinds="exception", calls="batch_norm instance_norm",
        when=[raises("more than 1 (value per channel|spatial element)")],
        why="In training the statistics come from the batch itself, and one value has no variance. The last batch of "
            "an epoch is often that small.",
        seen=["`{call}` was given one value per channel in training mode"],
        advice="Use `drop_last=True` in the loader, a larger batch, or a normalisation that does not depend on the "
               "batch.",
        fixes=[Fix("use the running statistics in {call}", set_argument("training", False))]),
]
# fmt: on
