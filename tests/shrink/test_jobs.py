"""Several candidates at once, here or through an executor: the same result and the same log as one after another."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from reprokit.errors import ReprokitError
from reprokit.program.interpreter import Settings
from reprokit.shrink import apart as isolated
from reprokit.shrink.apart import Isolation, RunLimits, Task
from reprokit.shrink.reducer import shrink
from reprokit.shrink.reduction import Reduction
from tests.shrink import failing
from tests.shrink.predicates import by_number
from tests.shrink.test_isolation import candidate, needs_fork
from tests.shrink.views import Lines

leaves_nothing_behind = pytest.mark.usefixtures("nothing_is_left_behind")
STEPS = (failing.adam_half, failing.gated_recurrence)  # an optimizer, and calls that never run in this process


def outcome(run: Callable[..., Reduction], **options: Any) -> tuple[Any, ...]:
    """All that must not depend on how many candidates run at once, the lines among it."""
    view = Lines()
    reduction = run(view=view, **options)
    tensors = {value: tensor.tolist() for value, tensor in reduction.tensors.items()}
    summary = without_seconds(reduction.summary())
    return reduction.program, tensors, reduction.failure, reduction.log, summary, view.checks


def without_seconds(content: Any) -> Any:
    """Nested data without what is measured, and the number of replays, which are fewer when they are slow."""
    if isinstance(content, dict):
        return {key: without_seconds(value) for key, value in content.items() if key not in ("seconds", "reproduces")}
    return [without_seconds(item) for item in content] if isinstance(content, list) else content


def reduce(step: Callable[[], Any]) -> Callable[..., Reduction]:
    """The reduction of one snapshot, with options to come."""
    snapshot = step()
    return lambda **options: shrink(snapshot, **options)


@needs_fork
@leaves_nothing_behind
@pytest.mark.parametrize("step", STEPS)
def test_jobs_do_not_change_a_reduction(step: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = reduce(step)
    alone = outcome(run)
    monkeypatch.setattr(isolated, "_WORTH_A_PROCESS", 0.0)
    assert outcome(run, jobs=3) == alone


@leaves_nothing_behind
def test_spawned_children_do_not_change_a_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    run = reduce(failing.where_gradient)
    alone = outcome(run)
    monkeypatch.setattr(isolated, "_WORTH_A_PROCESS", 0.0)
    monkeypatch.setattr(isolated, "can_fork", lambda: False)
    assert outcome(run, jobs=2) == alone


@contextmanager
def threads() -> Iterator[Executor]:
    """Threads of this process."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


@contextmanager
def processes() -> Iterator[Executor]:
    """Forked processes."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as executor:
        yield executor


class Counting(Executor):
    """An executor that counts what goes through it."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self.num_submitted = 0

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Any:
        self.num_submitted += 1
        return self.executor.submit(function, *arguments)


@needs_fork
@leaves_nothing_behind
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("start", [threads, processes])
def test_any_executor_will_do(start: Callable[[], Any]) -> None:
    run = reduce(failing.gated_recurrence)
    alone = outcome(run)
    with start() as executor:
        counting = Counting(executor)
        assert outcome(run, executor=counting, jobs=2) == alone
    assert counting.num_submitted >= alone[4]["checks"]


@needs_fork
@leaves_nothing_behind
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_crashes_do_not_break_an_executor() -> None:
    with processes() as executor:
        places = Isolation(Task.of(by_number, Settings()), is_wary=True, executor=executor, jobs=2)
        reports = list(places.reports([candidate(number) for number in (2, 0, 2, 1)]))
    assert [report.error is None for report in reports] == [False, True, False, True]
    assert places.is_wary


class Broken(Executor):
    """An executor that fails after so many results."""

    def __init__(self, num_good: int) -> None:
        self.num_good = num_good

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.num_good -= 1
        if self.num_good < 0:
            future.set_exception(ConnectionError("the cluster is gone"))
        else:
            future.set_result(function(*arguments))
        return future


@needs_fork
@leaves_nothing_behind
def test_an_executor_that_fails_ends_the_reduction(tmp_path: Path) -> None:
    with pytest.raises(ReprokitError, match="the executor failed: ConnectionError: the cluster is gone"):
        shrink(failing.gated_recurrence(), out_dir=tmp_path, executor=Broken(8), jobs=2)
    assert (tmp_path / "reduction.pt").is_file()  # the best so far


class Silent(Executor):
    """An executor whose workers are gone for good."""

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        return Future()


def test_an_executor_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_SECONDS_ON_THE_WAY", 0.0)
    places = Isolation(Task.of(by_number, Settings()), limits=RunLimits(0.5), executor=Silent(), jobs=2)
    with pytest.raises(ReprokitError, match="the executor failed: TimeoutError"):
        list(places.reports([candidate(0), candidate(1)]))


def test_forking_is_tried_before_it_is_relied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    isolated._passes_trial.cache_clear()
    monkeypatch.setattr(isolated, "_differentiate", lambda tried: 1 / 0 if tried is not None else None)
    try:
        assert not isolated.can_fork()
    finally:
        isolated._passes_trial.cache_clear()
