"""Signs of arithmetic that has no answer: zeros that are divided, infinities that meet."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence

import torch

from reprokit.locate.calls import Slot, short_name
from reprokit.locate.scene import Scene
from reprokit.locate.signs.registry import Numbers, dtype_name, places, sign
from reprokit.locate.underflow import find_underflow
from reprokit.program.functions import function_named


@sign
def divides_zero_by_zero(scene: Scene) -> Numbers | None:
    """True if numerator and denominator are zero at one place."""
    return _division(scene, lambda numerator: numerator == 0)


@sign
def divides_by_zero(scene: Scene) -> Numbers | None:
    """True if a numerator that is not zero is divided by zero."""
    return _division(scene, lambda numerator: numerator != 0)


def _division(scene: Scene, numerators: Callable[[torch.Tensor], torch.Tensor]) -> Numbers | None:
    call, denominator = scene.call, scene.tensor("denominator")
    if call is None or denominator is None:
        return None
    numerator = torch.ones(()) if short_name(call) == "reciprocal" else scene.tensor("numerator")
    if numerator is None:
        return None
    return places(numerators(numerator) & (denominator == 0), operand=scene.name("denominator"))


@sign
def divides_by_number_zero(scene: Scene) -> Numbers | None:
    """True if the divisor is a Python number that is zero; ``divisor`` calls it as the user's line does."""
    call, result = scene.call, scene.tensor("result")
    if call is None or result is None:
        return None
    try:
        number = scene.operand("denominator")
    except KeyError:
        return None
    if not isinstance(number, (int, float)) or number != 0:
        return None
    name = _written_divisor(call.site.code) if call.site is not None else None
    words = f"the number {number}"
    return places(torch.ones_like(result, dtype=torch.bool), divisor=f"{words} (`{name}`)" if name else words)


def _written_divisor(line: str) -> str | None:
    """What the only division of a line divides by; ``None`` for a literal, and for a line that cannot be parsed."""
    try:
        nodes = list(ast.walk(ast.parse(line.strip())))
    except SyntaxError:
        return None
    divisors = [node.right for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)]
    divisors += [node.value for node in nodes if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div)]
    return ast.unparse(divisors[0]) if len(divisors) == 1 and not isinstance(divisors[0], ast.Constant) else None


@sign
def underflowed(scene: Scene, operand: Slot = "x", makers: Sequence[str] | None = None) -> Numbers | None:
    """True if zeros in an argument would not be zero in exact arithmetic; ``makers``: lost by one of these calls."""
    values, found = scene.tensor(operand), find_underflow(scene, operand)
    if values is None or found is None:
        return None
    maker = short_name(scene.program.calls[found.loss.maker])
    if makers is not None and maker not in makers:
        return None
    return places(found.lost, maker=maker, zeros=found.loss.num_zeros, dtype=dtype_name(values))


@sign
def divides_infinities(scene: Scene) -> Numbers | None:
    """True if an infinity is divided by an infinity."""
    numerator, denominator = scene.tensor("numerator"), scene.tensor("denominator")
    return (
        places(numerator.isinf() & denominator.isinf()) if numerator is not None and denominator is not None else None
    )


@sign
def adds_opposite_infinities(scene: Scene) -> Numbers | None:
    """True if infinities meet that take each other away: in a sum or difference, or within one reduction."""
    call, x, y = scene.call, scene.tensor("x"), scene.tensor("y")
    if call is None or x is None:
        return None
    if short_name(call) in ("sum", "mean", "cumsum"):
        plus, minus = int((x == math.inf).sum()), int((x == -math.inf).sum())
        return {"count": min(plus, minus), "total": x.numel()} if plus and minus else None
    if y is None:
        return None
    other = -y if short_name(call) == "sub" else y
    return places(x.isinf() & other.isinf() & (x != other))


@sign
def multiplies_zero_by_infinity(scene: Scene) -> Numbers | None:
    """True if zero meets an infinity in a product, of matrices too."""
    call, x, y = scene.call, scene.tensor("x"), scene.tensor("y")
    if call is None or x is None or y is None:
        return None
    multiply = function_named(call.target)
    meetings = [multiply((x == 0).double(), y.isinf().double()), multiply(x.isinf().double(), (y == 0).double())]
    return places((meetings[0] + meetings[1]) > 0)
