"""Rules about derivatives that do not exist, or are infinite, where the forward result is fine."""

from __future__ import annotations

import math

import torch

from reprokit import native
from reprokit.locate.domains import SPECTRA, spectrum_of
from reprokit.locate.spelling import short_name
from reprokit.rules.edits import AWAY_FROM_ZERO, clamp, inside, jitter, plus, set_argument
from reprokit.rules.predicates import danger, has, has_row_of, is_dangerous, places
from reprokit.rules.rule import Fix, Numbers, Rule, of_scene
from reprokit.rules.scene import Scene


def dropped_later(scene: Scene) -> Numbers | None:
    """True if every dangerous element of the origin is dropped by a later ``where`` or mask."""
    mask, drop = danger(scene), scene.failure.drop
    if not bool(native.any(mask)) or (drop is not None and drop.is_given):
        return None
    for branch in scene.branches:
        kept = branch.kept_like(mask) if short_name(branch.call) != "mul" else None
        if kept is not None and not bool(native.any(kept & mask)):
            return places(mask, dropper=short_name(branch.call))
    return None


@of_scene
def drops_nan(scene: Scene, *, given: bool) -> Numbers | None:
    """True if the forward pass drops NaN values, which the data or the code marks missing numbers with (``given``) or
    the origin made."""
    drop, result = scene.failure.drop, scene.tensor_if_given("result")
    if drop is None or drop.is_given is not given:
        return None
    found = places(native.isnan(result)) if result is not None else None
    holder = f"`{scene.failure.input_name}`" if scene.failure.input_name else "the data"
    return {**(found or {}), "holder": holder, "dropper": drop.call.rpartition(".")[2]}


def has_equal_values(scene: Scene) -> Numbers | None:
    """True if a decomposition has values that are equal up to rounding."""
    name = short_name(scene.origin.call)
    return {"values": SPECTRA[name][0]} if spectrum_of(name, scene.tensor("x")) == "repeated" else None


def is_not_positive(scene: Scene) -> Numbers | None:
    """True if a symmetric matrix has an eigenvalue that is not above zero."""
    x, exception = scene.tensor("x"), scene.failure.exception
    is_about_shape = exception is not None and "LinAlgError" not in exception[0]
    if (
        is_about_shape
        or native.dim(x) < 2
        or x.shape[-1] != x.shape[-2]
        or not native.numel(x)
        or not bool(native.all(native.isfinite(x)))
    ):
        return None
    lowest = float(native.min(native.eigvalsh(native.double(native.detach(x)))))
    eps = torch.finfo(x.dtype).eps * float(native.max(native.abs(x))) * x.shape[-1]
    return {"lowest": lowest} if lowest <= eps else None


# fmt: off
GRADIENTS = [
    Rule("where-trap", "The gradient of a branch that `where` does not take", phases="backward",
        calls="log log2 log10 log1p sqrt rsqrt acos asin acosh atanh div reciprocal pow exp expm1 exp2 sinh cosh",
        when=[is_dangerous, dropped_later],
        why="`{call}` is also computed for elements that a later `{dropper}` drops. Their forward value is thrown "
            "away, but the backward pass still multiplies their gradient of zero with the derivative of `{call}`, "
            "which is infinite or NaN there: the product is NaN.",
        seen=["{count} of {total} elements are outside of what `{call}` is differentiable for, and `{dropper}` drops "
              "all of them"],
        advice="Put a harmless value into the argument as well, not only into the result: a second `where` in front "
               "of the call.",
        expected="an argument inside the domain also where the result is dropped",
        links="pytorch/pytorch/issues/68425 pytorch/pytorch/issues/23395",
        fixes=[Fix("give {call} a harmless argument where its result is dropped anyway", inside()),
               Fix("clamp the argument of {call} from above", clamp(max="log_max"))]),
    Rule("missing-values-masked-late", "Missing values that are masked after they were computed with",
        phases="backward", when=[drops_nan(given=True)],
        why="{holder} marks missing values with NaN. They go through `{call}`, and a later `{dropper}` drops the "
            "result, so the loss is finite. The backward pass still multiplies their gradient of zero with a "
            "derivative that is NaN, and the product is NaN.",
        seen=["{count} of {total} results of `{call}` are NaN, and `{dropper}` drops all of them"],
        advice="Mask before the arithmetic, not after it: put a finite number in place of the missing values, then "
               "drop the result.",
        expected="finite numbers in what is dropped", links="pytorch/pytorch/issues/68425"),
    Rule("dropped-nan", "The gradient of NaN values that the forward pass drops",
        phases="backward", tier="general", when=[drops_nan(given=False)],
        why="`{call}` returns NaN for elements that a later `{dropper}` drops, so the loss is finite. The backward "
            "pass still multiplies their gradient of zero with a derivative that is NaN there, and the product is "
            "NaN.",
        seen=["{count} of {total} results of `{call}` are NaN, and `{dropper}` drops all of them"],
        advice="Put a harmless value into the argument of `{call}`, not only into its result.",
        expected="finite numbers in what is dropped", links="pytorch/pytorch/issues/68425"),
    Rule("sqrt-gradient-at-zero", "The derivative of a square root at zero",
        phases="backward", calls="sqrt", is_local=True, when=[has(equal=0.0)],
        why="The derivative of `sqrt` is 1 / (2 * sqrt(x)), which is infinite at zero. The forward value is a plain "
            "0, so nothing is seen before the backward pass; with a square in front of it 0 * inf makes NaN.",
        seen=["{count} of {total} elements under the square root are zero"],
        advice="Add a small number under the root, or use `torch.linalg.vector_norm`, whose gradient at zero is "
               "defined as zero.",
        expected="an argument away from zero", links="pytorch/pytorch/issues/2421",
        fixes=[Fix("add a small number under the square root", plus()),
               Fix("clamp the argument of {call} away from zero", clamp(min="eps"))]),
    Rule("pow-gradient-at-zero", "The derivative of a power below one at zero",
        phases="backward", calls="pow", is_local=True, when=[has("exponent", below=1.0), has("base", equal=0.0)],
        why="The derivative of x ** p is p * x ** (p - 1). For p below one that is infinite at x = 0, although x ** p "
            "itself is 0 there.",
        seen=["the exponent is below 1, and {count} of {total} bases are zero"],
        advice="Clamp the base away from zero before it is raised to a power below one.",
        expected="a base away from zero", links="kornia/kornia/issues/918",
        fixes=[Fix("clamp the base of {call} away from zero", clamp("base", min="eps")),
               Fix("add a small number to the base of {call}", plus("base"))]),
    Rule("acos-gradient-at-one", "The derivative of an arc cosine or arc sine at one",
        phases="backward", calls="acos asin", is_local=True, when=[has(size=True, at_least=1.0)],
        why="The derivative of `{call}` is infinite at 1 and -1. Clamping to [-1, 1] keeps the forward value legal "
            "but lets the gradient through at the very edge.",
        seen=["{count} of {total} arguments are at the edge ({highest:.9g} at most)"],
        advice="Clamp to slightly less than one, or compute the angle with `atan2` of a sine and a cosine.",
        expected="an argument inside (-1, 1)", links="pytorch/pytorch/issues/8069",
        fixes=[Fix("clamp the argument of {call} to slightly less than one",
                   clamp(min="above_minus_one", max="below_one"))]),
    Rule("pole-gradient-at-zero", "The derivative of a logarithm or a division at zero",
        phases="backward", calls="log log2 log10 div reciprocal", confidence="likely",
        is_local=True, when=[is_dangerous],
        why="The derivative of log(x) is 1 / x, and that of a / x holds a / x**2: both are infinite at zero.",
        seen=["{count} of {total} logarithms or divisions are at zero or below"],
        advice="Clamp the argument or the divisor away from zero before the call.",
        expected="an argument or a divisor away from zero", links="pytorch/pytorch/issues/108618",
        fixes=[*AWAY_FROM_ZERO,
               Fix("clamp the argument of {call} away from zero", clamp("logarithm", min="eps"))]),
    Rule("logsumexp-gradient", "The gradient of a log-sum-exp over nothing but -inf",
        phases="backward", calls="logsumexp logcumsumexp logaddexp",
        is_local=True, when=[has("result", equal=-math.inf)],
        why="Where every argument is `-inf` the result is `-inf`, and the derivative exp(x - result) becomes exp(-inf "
            "+ inf), which is NaN. A mask behind the call takes the value away, not the NaN in the gradient.",
        seen=["{count} of {total} results are `-inf`, because everything that goes into them is"],
        advice="Use a large negative number in place of `-inf`, so that differences stay defined.",
        expected="a finite score in every row", links="pytorch/pytorch/issues/31829",
        fixes=[Fix("put a large negative number in place of -inf before {call}", clamp(min=-1e4))]),
    Rule("cosine-similarity-gradient", "The gradient of a cosine similarity with a zero vector",
        phases="backward", calls="cosine_similarity normalize", when=[has_row_of(0.0)],
        why="A vector of length zero has no direction. `{call}` divides by the small `eps` there, so the gradient is "
            "as large as 1 / eps, and overflows once it is multiplied on.",
        seen=["{count} of {total} vectors are zero throughout"],
        advice="Give `eps` a larger value, or leave zero vectors out.",
        fixes=[Fix("give {call} a larger eps", set_argument("eps", 1e-3))]),
    Rule("repeated-eigenvalues", "The gradient of eigenvectors or singular vectors that are not unique",
        phases="backward", calls="eigh eig svd", is_local=True, when=[has_equal_values],
        why="The vectors of equal {values} can be turned into each other, so they have no derivative: it holds 1 / (a "
            "- b) for every pair of {values}.",
        seen=["some {values} are equal up to rounding"],
        advice="Break the symmetry with a small diagonal of different entries, use only functions of the values, or "
               "keep the vectors out of the gradient.",
        expected="a matrix with distinct eigenvalues or singular values", links="pytorch/pytorch/pull/50942",
        fixes=[Fix("add a small diagonal of different entries to the argument of {call}", jitter(1e-4, spread=True)),
               Fix("add a diagonal of different entries to the argument of {call}", jitter(1e-2, spread=True))]),
    Rule("cholesky-not-positive", "A Cholesky decomposition of a matrix that is not positive definite",
        kinds="nan inf exception", calls="cholesky cholesky_ex", when=[is_not_positive],
        why="The decomposition exists for positive definite matrices only. A covariance loses that by rounding or by "
            "too few samples.",
        seen=["the lowest eigenvalue is {lowest:.4g}"],
        advice="Add a small multiple of the identity (jitter), or decompose in float64.",
        fixes=[Fix("add a very small multiple of the identity to the argument of {call}", jitter(1e-6)),
               Fix("add a small multiple of the identity to the argument of {call}", jitter(1e-3))]),
]
# fmt: on
