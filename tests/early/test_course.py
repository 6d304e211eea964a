"""The course of a number: how seldom its limit is computed, and that nothing is missed for that."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprokit.capture.early.alarm import Course, Departure


def _departures(course: Course, numbers: list[float]) -> list[Departure]:
    found = [course.add(step, step, number) for step, number in enumerate(numbers)]
    return [departure for departure in found if departure is not None]


def _falling(num_steps: int, rate: float, seed: int) -> list[float]:
    """A loss with noise that falls to a share of ``rate`` in a step and stays at a floor."""
    noise = random.Random(seed)
    return [max(rate**step, 0.01) * noise.uniform(0.9, 1.1) for step in range(num_steps)]


@settings(deadline=None, max_examples=60)
@given(st.integers(120, 700), st.floats(0.95, 1.0), st.integers(0, 99), st.floats(1.5, 8.0))
def test_a_rise_is_found_whenever_it_comes(num_steps: int, rate: float, seed: int, exponent: float) -> None:
    """Between any two limits: the first value is the one that the rise began with."""
    numbers = _falling(num_steps, rate, seed)
    risen = [max(numbers) * 10**exponent] * 3
    found = _departures(Course(), numbers + risen)
    assert [(one.severity, one.began.step) for one in found] == [("error", num_steps)]


@pytest.mark.parametrize(
    ("num_flat", "num_falling", "rate", "level"),
    [(287, 31, 0.94, 1.19), (495, 55, 0.937, 0.14), (494, 51, 0.953, 0.23), (309, 44, 0.954, 0.77)],
)
def test_a_rise_after_a_fast_fall_is_compared_with_the_last_values(
    num_flat: int, num_falling: int, rate: float, level: float
) -> None:
    """In the long flat part the limit is computed seldom; a fall makes a new one necessary soon."""
    noise = random.Random(67)
    shares = [1.0] * num_flat + [rate**step for step in range(num_falling)] + [rate**num_falling] * 90
    numbers = [share * noise.lognormvariate(0, 0.1) for share in shares]
    found = _departures(Course(), [*numbers, *[level] * 12])
    assert [(one.severity, one.began.step) for one in found] == [("warning", len(numbers))]


def _halved(length: int) -> list[float]:
    """A loss that falls from 3 to 0.02, by half in 14 steps, and varies by a fifth."""
    noise = random.Random(0)
    return [(3 * math.exp(-step / 20) + 0.02) * noise.lognormvariate(0, 0.2) for step in range(length)]


@pytest.mark.parametrize("begin", [30, 40, 50, 65, 100])
def test_a_rise_in_a_young_run_whose_loss_falls(begin: int) -> None:
    losses = _halved(150)
    assert _departures(Course(), losses) == []
    losses[begin : begin + 5] = [30.0] * 5  # ten times the first loss
    assert [(one.severity, one.began.step) for one in _departures(Course(), losses)] == [("error", begin)]


def test_a_loss_that_falls_and_returns_to_its_start_is_no_error() -> None:
    assert all(one.severity == "warning" for one in _departures(Course(), _halved(60) * 3))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_bad_loss_does_not_teach_the_course(bad: float) -> None:
    losses = _halved(60)
    assert _departures(Course(), [*losses[:5], bad, *losses[5:]]) == []
