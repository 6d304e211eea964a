"""How a run came to its failure: numbers of every layer in the steps before it, and when they left their course.

`LayerNumbers` are measured while the kept steps are played again. `chapters` compares each layer with its own earlier
steps, never with fixed numbers: the median of the steps before is the reference.

The timeline is one series of `StepNumbers` for each optimizer where several take turns, else a single one. A step has
the name of its optimizer only if there are several; the last one is the step that failed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import correlation, linear_regression, median

from reprokit.grammar import Count, Later, Name
from reprokit.series.course import SPREADS, band_before
from reprokit.words import counted, number_words


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """A training step: what the loop computed in it, and how long it took. ``None``: unknown."""

    step: Count
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    scale: float | None = None
    seconds: float | None = None
    # Its name where several optimizers take turns
    optimizer: Later[Name] = None
    # By `session.note`
    noted: Later[dict[Name, float]] = None


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Parameters by name after a step: norms of weights and gradients (L2), and the share of zeros in gradients.

    Gradients are those before the loop clipped them.
    """

    step: Count
    weight_norm: dict[Name, float]
    grad_norm: dict[Name, float]
    zeros: dict[Name, float]
    # Of all gradients together, those of parameters without a name too
    norm: Later[float] = None
    # The same after clipping, in a loop that clips
    clipped: Later[float] = None
    # The norm of the change of each parameter over its norm before, where there was room for a copy
    update: Later[dict[Name, float]] = None
    # The same of all parameters
    updated: Later[float] = None

    @property
    def total(self) -> float:
        """The norm of all gradients together."""
        return math.hypot(*self.grad_norm.values()) if self.norm is None else self.norm

    def joined(self, other: RecordedStep) -> RecordedStep:
        """The numbers of two optimizers in the same step."""
        is_clipped = self.clipped is not None or other.clipped is not None
        clipped = (row.total if row.clipped is None else row.clipped for row in (self, other))
        return RecordedStep(
            self.step,
            self.weight_norm | other.weight_norm,
            self.grad_norm | other.grad_norm,
            self.zeros | other.zeros,
            math.hypot(self.total, other.total),
            math.hypot(*clipped) if is_clipped else None,
            (self.update or {}) | (other.update or {}) or None,
        )


def flat(numbers: StepNumbers, row: RecordedStep | None) -> dict[str, float]:
    """The known numbers of a step in one dict: ``loss``, ``lr``, those the loop noted, ``grad_norm/h.0.weight``.

    Those of one of several optimizers have its name behind them: ``loss.critic_optimizer``. A noted number does not
    replace one that was measured, such as the loss of this step by a trainer's average.
    """
    own = {name: value for name in _OWN if (value := getattr(numbers, name)) is not None}
    if row is not None:
        own["grad_norm"] = row.total
        own |= {"clipped_to": row.clipped} if row.clipped is not None else {}
        own |= {"update": row.updated} if row.updated is not None else {}
    end = f".{numbers.optimizer}" if numbers.optimizer is not None else ""
    own = {f"{name}{end}": value for name, value in own.items()}
    found: dict[str, float] = {"step": numbers.step, **own, **(numbers.noted or {}), **own}
    for kind in PARAMETER_NUMBERS if row is not None else ():
        found |= {f"{kind}/{name}": value for name, value in (getattr(row, kind) or {}).items()}
    return found


_OWN = ("loss", "lr", "grad_norm", "scale", "seconds")
PARAMETER_NUMBERS = ("grad_norm", "weight_norm", "update", "zeros")  # fields of `RecordedStep`


def by_optimizer(timeline: Sequence[StepNumbers]) -> dict[str, list[StepNumbers]]:
    """The steps of every optimizer by its name, which is empty for a single series."""
    found: dict[str, list[StepNumbers]] = {}
    for row in timeline:
        found.setdefault(row.optimizer or "", []).append(row)
    return found


def failing_series(timeline: Sequence[StepNumbers]) -> list[StepNumbers]:
    """The steps that may be compared with the one that failed, this one included."""
    return by_optimizer(timeline)[timeline[-1].optimizer or ""] if timeline else []


def has_several_optimizers(timeline: Sequence[StepNumbers]) -> bool:
    return any(row.optimizer is not None for row in timeline)


def titled(title: str, optimizer: str) -> str:
    """What a series is called: ``loss (od)``."""
    return f"{title} ({optimizer})" if optimizer else title


@dataclass(frozen=True, slots=True)
class LayerNumbers:
    """One layer in one step. ``None``: it has no such number. NaN and infinities stand for themselves."""

    step: Count
    module: Name
    # The norm of the gradients of its own parameters before the update
    gradient: float | None = None
    # The norm of the change of these parameters over their norm
    update: float | None = None
    # The largest magnitude in its output
    activation: float | None = None
    # The share of zeros there
    zeros: float | None = None


@dataclass(frozen=True, slots=True)
class Chapter:
    """What happened to one quantity of one layer, beginning with ``step``."""

    step: int
    module: str
    quantity: str
    text: str


QUANTITIES = {
    "activation": "largest activation",
    "zeros": "share of zeros",
    "gradient": "gradient norm",
    "update": "update over weight",
}
_FACTOR = 10.0  # that a wrong start grows by at least: layers of healthy runs vary by less
_GROWTH = 1.2  # a step: slower growth over the few steps that are kept is within the noise of small batches
_EXPLAINED = 0.8  # of the variance: a single jump among equal numbers explains at most three quarters
_LEAST_STEPS = 3  # in a row make a trend, and a course to leave
_STOPPED = {"gradient": "the gradient of `{}` is zero", "zeros": "the output of `{}` is zero"}


def chapters(rows: Iterable[LayerNumbers], failing: float) -> list[Chapter]:
    """What left its course before the step ``failing``, infinity for all steps, in order of time.

    In one step outputs come before gradients and these before updates. What is wrong with an output is passed on to
    the layers after it, with a gradient to those before: the first of them in that direction comes first. Of updates
    the one that went furthest does.
    """
    found: list[tuple[tuple[int, int, float], Chapter]] = []
    known = _series(row for row in rows if row.step < failing)
    places = {module: place for place, module in enumerate(dict.fromkeys(module for module, _ in known))}
    for (module, quantity), series in known.items():
        for factor, step, text in (*_stop(module, quantity, series), *_departure(module, quantity, series)):
            rank = {"gradient": -places[module], "update": -factor}.get(quantity, places[module])
            chapter = Chapter(step, module, QUANTITIES[quantity], text)
            found.append(((step, list(QUANTITIES).index(quantity), rank), chapter))
    return [chapter for _, chapter in sorted(found, key=lambda pair: pair[0])]


def _series(rows: Iterable[LayerNumbers]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        for quantity in QUANTITIES:
            value = getattr(row, quantity)
            if value is not None:
                found.setdefault((row.module, quantity), []).append((row.step, value))
    return found


def _departure(module: str, quantity: str, series: Sequence[tuple[int, float]]) -> Iterator[tuple[float, int, str]]:
    """The first step from which on a quantity stays off its course, if there is one, and how many times the usual value
    it has there; with a text."""
    values = [value for _, value in series]
    off = (place for place in range(_LEAST_STEPS, len(series)) if _stays_off(values, place))
    place = 0 if _is_wrong_start(series) else next(off, None)
    if place is None or quantity == "zeros":
        return
    usual = median([value for value in values[:place] if 0 < value < math.inf] or values[:1])
    risen = 1 + max((n for n, value in enumerate(values[:place]) if value <= usual), default=-1)
    rate = _growth(values[risen:])
    if rate is not None:
        # It begins above all values before, and half a step of it above the median.
        least = max([usual * math.sqrt(rate), *(value for value in values[:risen] if math.isfinite(value))])
        place = next((n for n in range(risen, place) if values[n] > least), place)
        text = _growth_words(series, place, usual)
    elif place == 0:  # nothing is usual before the first step, and a few steps are no growth
        return
    else:
        text = _jump_words(*series[place], usual)
    step, value = series[place]
    factor = value / usual if place and math.isfinite(value) else math.inf
    yield factor, step, f"the {QUANTITIES[quantity]} of `{module}` {text}"


def _is_wrong_start(series: Sequence[tuple[int, float]]) -> bool:
    """True for a start that is too large: it grows from step 0 on and has no usual value before it (watching case
    `wrong_start`)."""
    values = [value for _, value in series]
    rises = all(before < value for before, value in itertools.pairwise(values))
    return series[0][0] == 0 and rises and values[-1] > _FACTOR * values[0]


def _growth_words(series: Sequence[tuple[int, float]], place: int, usual: float) -> str:
    last, end = series[-1]
    begin, before = "the first step", number_words(usual)
    if place:
        begin, before = f"step {series[place][0]}", f"about {before} before"
    return f"grows from {begin} on, from {before} to {number_words(end)} at step {last}"


def _jump_words(step: int, value: float, usual: float) -> str:
    if math.isfinite(value):
        return f"jumps from about {number_words(usual)} to {number_words(value)} at step {step}"
    return f"is {value:g} at step {step}; before it was about {number_words(usual)}"


def _stays_off(values: Sequence[float], place: int) -> bool:
    """True if all numbers from a place on are off the course of those before."""
    band = band_before(values, place, _LEAST_STEPS)
    return band is not None and all(band.spreads(value) > SPREADS for value in values[place:])


def _growth(values: Sequence[float]) -> float | None:
    """The factor of each step: the exponential that fits best, if it explains how the values differ."""
    points = [(step, math.log(value)) for step, value in enumerate(values) if math.isfinite(value) and value > 0]
    if len(points) <= _LEAST_STEPS:
        return None
    slope, _ = linear_regression(*zip(*points, strict=True))
    is_trend = slope > math.log(_GROWTH) and correlation(*zip(*points, strict=True)) ** 2 > _EXPLAINED
    return math.exp(slope) if is_trend else None


def _stop(module: str, quantity: str, series: Sequence[tuple[int, float]]) -> Iterator[tuple[float, int, str]]:
    """The first step from which on a layer has no gradient, or nothing but zeros as its output, if there is one."""
    nothing = 1.0 if quantity == "zeros" else 0.0
    lively = max((place for place, (_, value) in enumerate(series) if value != nothing), default=-1)
    if quantity not in _STOPPED or len(series) - lively - 1 < _LEAST_STEPS:
        return
    step = series[lively + 1][0]
    since = f"from step {step} on" if lively >= 0 else f"in all of the {counted(len(series), 'played step')}"
    yield math.inf, step, f"{_STOPPED[quantity].format(module)} {since}"


def paragraph(found: Sequence[Chapter], most: int = 3) -> str:
    """The first chapters of the first layers as sentences; empty without any."""
    first = {chapter.module: chapter for chapter in reversed(found)}
    shown = [chapter for chapter in found if first[chapter.module] is chapter][:most]
    return " ".join(f"{chapter.text[:1].upper()}{chapter.text[1:]}." for chapter in shown)


@dataclass(frozen=True, slots=True)
class LayerSeries:
    """One quantity of one layer, a value for each step; ``None`` where it was not measured."""

    module: str
    values: tuple[float | None, ...]


def by_layer(rows: Sequence[LayerNumbers], quantity: str, failing: float, most: int) -> list[LayerSeries]:
    """At most so many layers in the order of the model: those that left their course, then the first ones."""
    steps = sorted({row.step for row in rows})
    known = {module: dict(series) for (module, name), series in _series(rows).items() if name == quantity}
    left = (chapter.module for chapter in chapters(rows, failing) if chapter.quantity == QUANTITIES[quantity])
    kept = set(list(dict.fromkeys([*left, *known]))[:most])
    return [LayerSeries(name, tuple(map(values.get, steps))) for name, values in known.items() if name in kept]
