"""Rules about functions outside of their domain, and about softmax over values that leave nothing to normalise."""

from __future__ import annotations

import math

from reprokit import native
from reprokit.locate.spelling import short_name
from reprokit.rules.edits import clamp, log_softmax, plus, set_argument
from reprokit.rules.predicates import follows, has, has_row_of, meet, option, places
from reprokit.rules.rule import Fix, Numbers, Rule
from reprokit.rules.scene import Scene


def is_negative_to_a_fraction(scene: Scene) -> Numbers | None:
    """True if a negative base meets an exponent that is not whole."""
    base, exponent = scene.tensor("base"), scene.tensor("exponent")
    mask = (base < 0) & (native.frac(native.double(exponent)) != 0)
    if not bool(native.any(mask)):
        return None
    bases, exponents = native.expand_as(base, mask)[mask], native.expand_as(exponent, mask)[mask]
    return places(mask, exponent=float(exponents[0]), lowest=float(native.min(bases)))


def meets_zero_factor(scene: Scene) -> Numbers | None:
    """True if the origin's infinities are multiplied by zeros later."""
    result = scene.tensor("result")
    for branch in scene.branches:
        kept = branch.kept_like(result) if short_name(branch.call) == "mul" else None
        if kept is not None and bool(native.any(native.isinf(result) & ~kept)):
            return {"zeros": int(native.sum(native.isinf(result) & ~kept))}
    return None


# fmt: off
DOMAIN = [
    Rule("log-of-negative", "The logarithm of a negative number",
        kinds="nan", phases="forward", calls="log log2 log10", is_local=True, when=[has(below=0.0)],
        why="The logarithm is not defined below zero, so `{call}` returns NaN.",
        seen=["{count} of {total} arguments are below zero (lowest {lowest:.4g})"],
        advice="Find out why the argument can be negative; clamp it if it is rounding only.",
        expected="an argument above zero",
        fixes=[Fix("clamp the argument of {call} away from zero", clamp(min="eps"))]),
    Rule("zero-times-log-zero", "Zero times the logarithm of zero",
        phases="forward", calls="log log2 log10", when=[has(equal=0.0), meets_zero_factor],
        why="The term x * log(y) is meant to be 0 where x is 0, but for y = 0 the logarithm is `-inf`, and 0 * -inf "
            "is NaN.",
        seen=["log 0 is multiplied by 0 in {zeros} of the elements"],
        advice="Use `torch.xlogy`, clamp the probability away from zero, or use a loss that takes logits.",
        expected="an argument above zero", links="emited/VariationalRecurrentNeuralNetwork/issues/2",
        fixes=[Fix("clamp the argument of {call} away from zero", clamp(min="eps"))]),
    Rule("log-of-zero", "The logarithm of zero",
        phases="forward", calls="log log2 log10 xlogy", is_local=True, when=[has("logarithm", equal=0.0)],
        why="The logarithm of zero is `-inf`.", seen=["{count} of {total} arguments are exactly zero"],
        advice="Clamp the argument away from zero, or work with logarithms from the start.",
        expected="an argument above zero",
        fixes=[Fix("clamp the argument of {call} away from zero", clamp("logarithm", min="eps")),
               Fix("add a small number to the argument of {call}", plus("logarithm"))]),
    Rule("sqrt-of-negative", "The square root of a negative number",
        kinds="nan", phases="forward", calls="sqrt rsqrt", is_local=True, when=[has(below=0.0)],
        why="The square root is not defined below zero. A variance computed as E[x**2] - E[x]**2, for instance, is "
            "slightly negative by rounding.",
        seen=["{count} of {total} arguments are below zero (lowest {lowest:.4g})"],
        advice="Clamp the argument at zero or a little above.", expected="an argument that is never negative",
        fixes=[Fix("clamp the argument of {call} away from zero", clamp(min="eps"))]),
    Rule("rsqrt-of-zero", "The reciprocal square root of zero",
        kinds="inf", phases="forward", calls="rsqrt", is_local=True, when=[has(equal=0.0)],
        why="`rsqrt` of zero is infinite.", seen=["{count} of {total} arguments are exactly zero"],
        advice="Add a small number to the argument.", expected="an argument above zero",
        fixes=[Fix("add a small number to the argument of {call}", plus())]),
    Rule("arc-outside", "An inverse function outside of its domain",
        phases="forward", calls="acos asin atanh erfinv", is_local=True, when=[has(size=True, above=1.0)],
        why="`{call}` is defined between -1 and 1 only. A cosine from a normalised product can be slightly larger "
            "than one by rounding.",
        seen=["{count} of {total} arguments are outside of [-1, 1] ({lowest:.9g} to {highest:.9g})"],
        advice="Clamp the argument to slightly less than one on both sides.",
        expected="an argument within [-1, 1]", links="pytorch/pytorch/issues/8069",
        fixes=[Fix("clamp the argument of {call} to slightly less than one",
                   clamp(min="above_minus_one", max="below_one"))]),
    Rule("fractional-power-of-negative", "A fractional power of a negative number",
        kinds="nan", phases="forward", calls="pow", is_local=True, when=[is_negative_to_a_fraction],
        why="x ** p is not a real number for x below zero unless p is whole, so `pow` returns NaN.",
        seen=["{count} of {total} elements raise a number below zero (lowest {lowest:.4g}) to the power of "
              "{exponent:.4g}"],
        advice="Keep the base positive (clamp it, or take its absolute value), and find out why it can be negative.",
        expected="a base that is never negative", links="pyg-team/pytorch_geometric/issues/61",
        fixes=[Fix("clamp the base of {call} away from zero", clamp("base", min="eps"))]),
    Rule("negative-power-of-zero", "A negative power of zero",
        kinds="inf", phases="forward", calls="pow",
        is_local=True, when=[meet(exponent=dict(below=0.0), base=dict(equal=0.0))],
        why="Zero to a negative power is a division by zero.", seen=["{count} of {total} bases are exactly zero"],
        advice="Clamp the base away from zero, or put zero where the base is zero.",
        expected="a base that is never zero",
        fixes=[Fix("clamp the base of {call} away from zero", clamp("base", min="eps"))]),
    Rule("log1p-below-minus-one", "The logarithm of one plus something below minus one",
        phases="forward backward", calls="log1p", is_local=True, when=[has(at_most=-1.0)],
        why="`log1p(x)` is log(1 + x), which is `-inf` at -1 and NaN below.",
        seen=["{count} of {total} arguments are -1 or below (lowest {lowest:.4g})"],
        advice="Clamp the argument to above -1.", expected="an argument above -1",
        fixes=[Fix("clamp the argument of {call} to above -1", clamp(min="above_minus_one"))]),
    Rule("fully-masked-softmax", "A softmax over a fully masked row",
        kinds="nan", phases="forward", calls="softmax log_softmax cross_entropy",
        is_local=True, when=[has_row_of(-math.inf)],
        why="Every score of a row is `-inf`, so there is nothing to distribute a probability over: exp(-inf - (-inf)) "
            "is NaN. It happens when masks together hide all keys, or when a whole sample is padding.",
        seen=["{count} of {total} rows hold nothing but `-inf`"],
        advice="Let every row see at least one key, fill masks with a large negative number in place of `-inf`, or "
               "use `scaled_dot_product_attention`, which gives zeros for such rows.",
        expected="a finite score in every row", links="pytorch/pytorch/issues/41508 pytorch/pytorch/issues/40932",
        fixes=[Fix("put the lowest finite number in place of -inf before {call}", clamp(min="min"))]),
    Rule("softmax-of-infinity", "A softmax with an infinite score", cause="",
        kinds="nan", phases="forward", calls="softmax log_softmax cross_entropy",
        is_local=True, when=[has(equal=math.inf)],
        why="Softmax subtracts the largest score first. When that is `inf`, inf - inf is NaN for the whole row.",
        seen=["{count} of {total} scores are `inf`"],
        advice="Find what makes the score infinite; clamp it if it is given like that.", expected="finite scores",
        fixes=[Fix("clamp the argument of {call} from above", clamp(max=1e4))]),
    Rule("label-smoothing-masked-logits", "Label smoothing over impossible classes",
        phases="forward", calls="cross_entropy",
        is_local=True, when=[option("label_smoothing", above=0.0), has(equal=-math.inf)],
        why="Label smoothing asks for some probability in every class. A class whose score is `-inf` has probability "
            "zero, and log 0 makes the loss infinite; without label smoothing the same scores are fine.",
        seen=["label_smoothing = {label_smoothing}, and {count} of {total} scores are `-inf`"],
        advice="Leave masked classes out of the smoothing, or mask with a large negative number.",
        expected="finite logits wherever the target has weight", links="facebookresearch/pytext/pull/1698",
        fixes=[Fix("take label smoothing away", set_argument("label_smoothing", 0.0)),
               Fix("put a large negative number in place of -inf before {call}", clamp(min=-1e4))]),
    Rule("batch-norm-negative-variance", "A running variance below zero", cause="state",
        kinds="nan", phases="forward", calls="batch_norm",
        when=[option("training", equal=0.0), has("running_var", below=0.0)],
        why="In evaluation mode batch normalisation divides by the root of the running variance plus eps, which is not "
            "defined below zero. No batch has such a variance, so something else has written the buffer.",
        seen=["{count} of {total} running variances are below zero (lowest {lowest:.4g})"],
        advice="Look at what writes the buffers: an average of models, a factor above one, a loaded file.",
        expected="a running variance that is never negative",
        fixes=[Fix("clamp the running variance of {call} at zero", clamp("running_var", min=0.0)),
               Fix("use the statistics of the batch in {call}", set_argument("training", True))]),
    Rule("log-of-softmax", "The logarithm of a probability that is exactly zero",
        phases="forward backward", calls="log log2 log10",
        when=[has(equal=0.0), follows("softmax sigmoid", through="sub")],
        why="A probability that is small enough is exactly zero in floating point, and its logarithm is `-inf`. The "
            "two together can be computed without going through zero.",
        seen=["{count} of {total} probabilities are exactly zero"],
        advice="Use `F.log_softmax`, `F.logsigmoid`, or a loss that takes logits (`cross_entropy`, "
               "`binary_cross_entropy_with_logits`).",
        links="emited/VariationalRecurrentNeuralNetwork/issues/2",
        fixes=[Fix("use log_softmax in place of the logarithm of a softmax", log_softmax()),
               Fix("clamp the argument of {call} away from zero", clamp(min="eps"))]),
]
# fmt: on
