"""The course of a number: how seldom its limit is computed, and that nothing is missed for that."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprokit.capture.early.course import LENGTH, Band, Course, Departure


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


def test_the_limit_of_a_steady_course_is_computed_once_in_a_hundred_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    bands: list[Band] = []
    of = Band.of

    def counted(numbers: Sequence[float], least_ratio: float) -> Band:
        bands.append(of(numbers, least_ratio))
        return bands[-1]

    monkeypatch.setattr(Band, "of", counted)
    noise = random.Random(0)
    numbers = [noise.uniform(2.0, 3.0) for _ in range(10 * LENGTH)]
    course = Course()
    assert not _departures(course, numbers[:300])
    del bands[:]
    assert not _departures(course, numbers[300:])
    assert len(bands) <= 8
