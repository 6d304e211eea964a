"""Signs of matrices that have no stable decomposition or inverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from reprokit.locate.calls import short_name
from reprokit.locate.scene import Scene
from reprokit.locate.signs.registry import Numbers, sign


@sign
def equal_values(scene: Scene, within: float = 1e-6) -> Numbers | None:
    """True if a decomposition has eigenvalues or singular values that are equal, or zero, up to rounding."""
    seen = scene.origin
    if seen is None:
        return None
    for values in seen.results.values():
        if values.is_complex() or values.dim() == 0 or values.shape[-1] < 2 or _is_matrix_of(values, seen.args):
            continue
        ordered = values.double().sort(dim=-1).values
        gaps = (ordered[..., 1:] - ordered[..., :-1]).abs() / ordered.abs().amax().clamp(min=1e-30)
        if bool((gaps <= within).any()):
            words = "singular values" if short_name(seen.call) == "svd" else "eigenvalues"
            return {"count": int((gaps <= within).sum()), "gap": float(gaps.min()), "values": words}
    return None


def _is_matrix_of(values: torch.Tensor, args: Sequence[Any]) -> bool:
    """True if a result of a decomposition is made of vectors: it has as many dimensions as what was decomposed."""
    return bool(args) and isinstance(args[0], torch.Tensor) and values.dim() >= args[0].dim()


@sign
def is_singular(scene: Scene) -> Numbers | None:
    """True if a matrix has no inverse, up to rounding, with its rank and condition number."""
    x = _decomposed(scene)
    if x is None or not x.numel():
        return None
    values = torch.linalg.svdvals(x.detach().double()).reshape(-1, x.shape[-1])
    ratios = values[:, -1] / values[:, 0].clamp(min=1e-300)
    worst = int(ratios.argmin())
    eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 1e-7
    if float(ratios[worst]) > eps * x.shape[-1]:
        return None
    rank = int((values[worst] > values[worst, 0] * eps * x.shape[-1]).sum()) if float(values[worst, 0]) else 0
    return {"rank": rank, "size": x.shape[-1]}


@sign
def is_not_positive(scene: Scene) -> Numbers | None:
    """True if a symmetric matrix has an eigenvalue that is not above zero."""
    x = _decomposed(scene)
    if x is None:
        return None
    lowest = float(torch.linalg.eigvalsh(x.detach().double()).min())
    eps = torch.finfo(x.dtype).eps * float(x.abs().max()) * x.shape[-1]
    return {"lowest": lowest, "size": x.shape[-1]} if lowest <= eps else None


def _decomposed(scene: Scene) -> torch.Tensor | None:
    """The square finite matrices of the origin; ``None`` if it raises over something else, such as shapes."""
    x, failure = scene.tensor("x"), scene.failure
    if failure.exception is not None and "LinAlgError" not in failure.exception[0]:
        return None
    is_square = x is not None and x.dim() > 1 and x.shape[-1] == x.shape[-2]
    return x if x is not None and is_square and bool(x.isfinite().all()) else None
