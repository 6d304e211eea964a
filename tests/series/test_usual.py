"""What is usual of a number of a run, and when it has left its course."""

from __future__ import annotations

import math

import pytest

from reprokit.series.usual import UsualLoss, divergence, growth


def test_divergence_begins_with_the_last_usual_loss() -> None:
    found = divergence([(0, 5.0), (1, 4.7), (2, 2356.0), (3, 8960.0), (4, 39810.0)])
    assert found is not None and (found.step, found.usual, found.last_step, found.last) == (1, 4.7, 4, 39810.0)
    assert divergence([(0, 5.0), (1, 4.7), (2, 9.0)]) is None
    assert divergence([(0, -4.0), (1, -45.0)]) is None


def test_losses_of_a_divergence_are_not_usual() -> None:
    usual = UsualLoss([(0, 5.0), (1, 4.7), (2, 2356.0)])
    assert usual.losses == [5.0, 4.7]
    assert (usual.low, usual.high) == pytest.approx((-15, 3 * 4.85))
    assert usual.size == 4.7
    assert usual.has([4.0]) and not usual.has([4.0, 100.0])


def test_nothing_is_usual_before_the_first_step() -> None:
    usual = UsualLoss([(0, math.nan)])
    assert usual.size is None
    assert usual.has([1e20]) and not usual.has([1e31]) and not usual.has([math.nan])


def test_a_loss_that_turns_negative_is_not_usual() -> None:
    steps = [(0, 1.0), (1, 0.9), (2, 0.8)]
    assert UsualLoss(steps).has([-0.5]) and not UsualLoss(steps).has([-0.95])
    assert UsualLoss(steps[:2]).has([-0.95])
    assert UsualLoss([*steps, (3, -0.1)]).has([-0.95])


def test_a_growth_goes_on_for_more_than_a_step() -> None:
    steps = [(0, 1.0), (1, 1.1), (2, 1.0), (3, 9.0), (4, 30.0), (5, 90.0)]
    assert growth(steps) == (0, 1.0, 5, 90.0)
    assert growth([*steps[:3], (3, 1.0), (4, 90.0), (5, 1.0)]) is None
    assert growth(steps[:2]) is None
