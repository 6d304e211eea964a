"""CPU limits, with clocks that the test winds."""

from __future__ import annotations

import pytest

from reprokit import limits, native
from reprokit.limits import CpuLimit
from reprokit.native import clock
from reprokit.rules.fix import TrialBudget


def test_the_clock_of_the_wall_does_not_count() -> None:
    used, wall = 0.0, 0.0
    limit = CpuLimit(5.0, now=lambda: (used, used), wall_now=lambda: wall)
    wall = 1e6
    assert not limit.is_spent and limit.left == 5.0
    used = 4.5
    assert limit.left == 0.5 and limit.used == 4.5
    used = 5.0
    assert limit.is_spent


def test_work_that_waits_ends_by_the_wall_if_that_is_asked_for() -> None:
    wall = 100.0
    limit = CpuLimit(5.0, wall=50.0, now=lambda: (0.0, 0.0), wall_now=lambda: wall)
    wall = 149.0
    assert limit.left == 5.0
    wall = 150.0
    assert limit.is_spent and limit.left == 0.0


def test_counted_is_what_the_work_takes_on_an_idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"thread": 10.0, "process": 100.0}
    monkeypatch.setattr(native, "get_num_threads", lambda: 16)
    monkeypatch.setattr(clock, "thread_time", lambda: times["thread"])
    monkeypatch.setattr(clock, "process_time", lambda: times["process"])
    parallel, waiting = CpuLimit(9.0), CpuLimit(9.0)
    times["thread"] += 1.0
    times["process"] += 16.0  # sixteen threads worked for one second
    assert parallel.used == 1.0
    times["process"] += 32.0  # the thread waits for others, such as those of a backward pass
    assert waiting.used == 3.0
    assert limits.moment() == (11.0, 148.0 / 16)


def test_runs_of_fixes_are_limited_by_both() -> None:
    used = 0.0
    budget = TrialBudget(runs=2, limit=CpuLimit(1.0, now=lambda: (used, used)))
    assert budget.take() and not budget.is_spent
    used = 2.0
    assert not budget.take() and budget.is_spent
    assert [TrialBudget(runs=1).take(), TrialBudget(runs=0).take()] == [True, False]
