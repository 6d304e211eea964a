"""The course of a number: how seldom its limit is computed, and that nothing is missed for that."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprokit.series.course import Alarm, Course


def _alarms(course: Course, numbers: list[float]) -> list[Alarm]:
    found = [course.add(step, step, number) for step, number in enumerate(numbers)]
    return [alarm for alarm in found if alarm is not None and alarm.is_beyond]


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
    found = _alarms(Course(), numbers + risen)
    assert [one.step for one in found] == [num_steps]


@pytest.mark.parametrize("is_learned", [True, False])
def test_a_few_odd_batches_are_no_other_level(is_learned: bool) -> None:
    """What they have spoiled is learned anew, from much lower than what another task begins with."""
    after = [6 * 0.9**n if is_learned else 0.01 * 1.2**n for n in range(20)]
    course, alarms = Course(), list[Alarm]()
    for step, number in enumerate([*_falling(200, 0.9, 1), 8.5, 8.3, 7.7, 7.1, 6.2, *after]):
        alarms += filter(None, [course.add(step, step, number)])
    assert course.is_level(alarms[0]) is is_learned
