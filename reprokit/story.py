"""How a run came to its failure: numbers of every layer in the steps before it, and when they left their course.

`LayerNumbers` are measured while the kept steps are played again. `chapters` compares each layer with its own earlier
steps, never with fixed numbers: the median of the steps before is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from reprokit.grammar import Count, Name
from reprokit.words import counted


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """One layer in one step. ``None``: it has no such number.

    ``gradient`` is the norm of the gradients of its own parameters before the update, ``update`` the norm of the change
    of these parameters over their norm, ``activation`` the largest magnitude in its output, and ``zeros`` the share of
    zeros there. NaN and infinities stand for themselves.
    """

    step: Count
    module: Name
    gradient: float | None = None
    update: float | None = None
    activation: float | None = None
    zeros: float | None = None


@dataclass(frozen=True, slots=True)
class Chapter:
    """What happened to one quantity of one layer, beginning with ``step``."""

    step: int
    module: str
    quantity: str
    text: str


QUANTITIES = {
    "gradient": "gradient norm",
    "update": "update over weight",
    "activation": "largest activation",
    "zeros": "share of zeros",
}
_FACTOR = 10.0  # between a value and the median before it: layers of healthy runs vary by less from step to step
_GROWTH = 1.2  # a step: slower growth over the few steps that are kept is within the noise of small batches
_LEAST_STEPS = 3  # in a row make a trend
_STOPPED = {"gradient": "the gradient of `{}` is zero", "zeros": "the output of `{}` is zero"}


_Ranked = tuple[float, Chapter]


def chapters(rows: Iterable[LayerNumbers]) -> list[Chapter]:
    """What left its course, in order of time; in one step the layer that left it furthest comes first."""
    found: list[_Ranked] = []
    for (module, quantity), series in _series(rows).items():
        if quantity in _STOPPED:
            found += _stop(module, quantity, series)
        if quantity != "zeros":
            found += _departure(module, quantity, series)
    return [chapter for _, chapter in sorted(found, key=lambda pair: (pair[1].step, -pair[0]))]


def _series(rows: Iterable[LayerNumbers]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """The steps and values of every quantity of every module."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        for quantity in QUANTITIES:
            value = getattr(row, quantity)
            if value is not None:
                found.setdefault((row.module, quantity), []).append((row.step, value))
    return found


def _departure(module: str, quantity: str, series: Sequence[tuple[int, float]]) -> Iterator[_Ranked]:
    """The first step from which on a quantity stays far above its median before, if there is one."""
    name, values = f"{QUANTITIES[quantity]} of `{module}`", [value for _, value in series]
    for place in range(1, len(series)):
        before = [value for value in values[:place] if math.isfinite(value)]
        usual = median(before) if before else 0.0
        if usual <= 0.0 or not all(_is_far(value, usual) for value in values[place:]):
            continue
        place = _start_of_growth(values, place)
        step, value = series[place]
        usual = median(values[:place])
        last = values[-1]
        rate = _rate(values[max(place - 1, 0) :])
        if not math.isfinite(value):
            text = f"the {name} is {value:g} at step {step}; before it was about {usual:.3g}"
        elif rate is not None:
            text = f"the {name} grows {rate:.2g} times a step from step {step} on ({usual:.3g} to {last:.3g})"
        else:
            text = f"the {name} jumps from about {usual:.3g} to {value:.3g} at step {step}"
        rank = value / usual if math.isfinite(value) else math.inf
        yield rank, Chapter(step, module, QUANTITIES[quantity], text)
        return


def _is_far(value: float, usual: float) -> bool:
    return not math.isfinite(value) or value > _FACTOR * usual


def _start_of_growth(values: Sequence[float], place: int) -> int:
    """The first step of the growth that leads to ``place``: every step from there on is larger than the one before."""
    while place > 1 and values[place - 1] > _GROWTH * values[place - 2] > 0:
        place -= 1
    return place


def _rate(values: Sequence[float]) -> float | None:
    """The factor of each step, as a geometric mean, if the values grow in every one of several steps."""
    finite = [value for value in values if math.isfinite(value)]
    pairs = list(pairwise(finite))
    if len(pairs) < _LEAST_STEPS or not all(after > _GROWTH * before > 0 for before, after in pairs):
        return None
    return math.exp(math.log(finite[-1] / finite[0]) / len(pairs))


def _stop(module: str, quantity: str, series: Sequence[tuple[int, float]]) -> Iterator[_Ranked]:
    """The first step from which on a layer has no gradient, or nothing but zeros as its output, if there is one."""
    nothing = 1.0 if quantity == "zeros" else 0.0
    lively = max((place for place, (_, value) in enumerate(series) if value != nothing), default=-1)
    if len(series) - lively - 1 < _LEAST_STEPS:
        return
    step = series[lively + 1][0]
    since = f"from step {step} on" if lively >= 0 else f"in all of the {counted(len(series), 'played step')}"
    yield math.inf, Chapter(step, module, QUANTITIES[quantity], f"{_STOPPED[quantity].format(module)} {since}")


def paragraph(found: Sequence[Chapter], most: int = 3) -> str:
    """The first chapters as sentences; empty without any."""
    return " ".join(f"{chapter.text[:1].upper()}{chapter.text[1:]}." for chapter in found[:most])


@dataclass(frozen=True, slots=True)
class LayerSeries:
    """One quantity of one layer, a value for each step; ``None`` where it was not measured."""

    module: str
    values: tuple[float | None, ...]


def by_layer(rows: Sequence[LayerNumbers], quantity: str, most: int) -> list[LayerSeries]:
    """At most so many layers in the order of the model: those that left their course, then the first ones."""
    steps = sorted({row.step for row in rows})
    known = {module: dict(series) for (module, name), series in _series(rows).items() if name == quantity}
    left = (chapter.module for chapter in chapters(rows) if chapter.quantity == QUANTITIES[quantity])
    kept = set(list(dict.fromkeys([*left, *known]))[:most])
    return [LayerSeries(name, tuple(map(values.get, steps))) for name, values in known.items() if name in kept]
