"""Where candidates run: crashes, hangs and floods of memory are verdicts, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from reprokit.locate.failure import Failure
from reprokit.program.interpreter import Settings
from reprokit.program.ir import Call, Input, Program, Ref
from reprokit.program.step import Step
from reprokit.shrink import apart, reducer
from reprokit.shrink.apart import (
    Isolation,
    NotObserved,
    Observe,
    Report,
    RunLimits,
    Task,
    pack_report,
    unpack_report,
)
from reprokit.shrink.checks.check import Ruling
from reprokit.shrink.checks.recorded import NonfiniteCheck
from reprokit.shrink.oracle import Oracle
from reprokit.shrink.reducer import shrink
from reprokit.snapshot.format import Snapshot
from tests.conftest import ROOT
from tests.shrink import failing
from tests.shrink.predicates import FEW_CALLS, Hostile, NeedsBoth, by_number, threads_and_draw
from tests.shrink.views import Lines

SHORT = RunLimits(seconds=3.0, memory=1 << 28)
needs_fork = pytest.mark.skipif(not apart.can_fork(), reason="candidates cannot be forked here")
pytestmark = pytest.mark.usefixtures("importable_tests", "nothing_is_left_behind")


def candidate(number: float) -> Step:
    """A program of one call whose input tells `by_number` what to do."""
    program = Program((Call("torch.log", (Ref(0),), outputs=Ref(1)),), (Input(0, "x"),), (Ref(1),))
    return Step(program, {0: torch.full((1,), float(number))})


def isolation(observe: Observe = by_number, **options: Any) -> Isolation:
    """Candidates run in children, with short limits."""
    return Isolation(Task.of(observe, Settings()), **{"limits": SHORT, "is_wary": True, **options})


def reason(report: Report) -> str:
    """Why there is no observation."""
    assert isinstance(report.error, NotObserved), report
    return report.error.reason


@needs_fork
def test_whatever_a_candidate_does_is_reported() -> None:
    with closing(isolation()) as places:
        reports = [places.report(candidate(number)) for number in range(7)]
        assert [reason(report) for report in reports[2:]] == ["crash", "time", "memory", "error", "crash"]
        assert "SIGSEGV" in str(reports[2].error)
        assert "ValueError: a check that raises" in str(reports[5].error)
        failure = reports[0].value()
        assert failure is not None and failure.call == "torch.log" and failure.num_elements != os.getpid()
        assert reports[1].value() is None


@needs_fork
def test_verdicts_of_candidates_that_crash_or_hang() -> None:
    oracle = Oracle(NonfiniteCheck(Failure("forward", "nan", call="torch.log")), isolation())
    verdicts = [oracle.check(candidate(number)) for number in (0, 1, 2, 3)]
    assert verdicts == [Ruling.SAME, Ruling.PASSES, Ruling.INVALID, Ruling.INVALID]


def test_a_spawned_child_is_used_until_a_candidate_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "can_fork", lambda: False)
    with closing(isolation(jobs=2)) as places:
        reports = [places.report(candidate(number)) for number in (0, 0, 2)]
        reports += places.reports([candidate(number) for number in (0, 1)])
        with closing(places.reports([candidate(number) for number in (1, 0)])) as unread:
            next(unread)
        reports.append(places.report(candidate(1)))
    processes = [failure.num_elements for failure in (report.found for report in reports) if failure is not None]
    assert processes[0] == processes[1] != processes[2]
    assert [report.error is None for report in reports] == [True, True, False, True, True, True]


def test_a_check_that_cannot_be_sent_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "can_fork", lambda: False)
    with closing(isolation(lambda tried: None)) as places:
        assert places.report(candidate(0)).error is not None


@needs_fork
@pytest.mark.parametrize(
    ("target", "is_here"),
    [
        ("torch.log", True),
        ("torch.embedding_bag", False),
        ("torch.segment_reduce", False),
        ("torch._weight_norm", False),
        ("torch.nn.functional.ctc_loss", False),
    ],
)
def test_calls_that_trust_their_arguments_run_apart(target: str, is_here: bool) -> None:
    program = Program((Call(target, (Ref(0),), outputs=Ref(1)),), (Input(0, "x"),), (Ref(1),))
    failure = isolation(is_wary=False).report(Step(program, {0: torch.zeros(1)})).value()
    assert failure is not None
    assert (failure.num_elements == os.getpid()) is is_here


@needs_fork
def test_after_a_crash_everything_runs_apart() -> None:
    places = isolation(is_wary=False)
    first = places.report(candidate(0)).value()
    trusting = Program((Call("torch.embedding_bag", (Ref(0),), outputs=Ref(1)),), (Input(0, "x"),), (Ref(1),))
    assert reason(places.report(Step(trusting, {0: torch.full((1,), 2.0)}))) == "crash"
    second = places.report(candidate(0)).value()
    assert first is not None and first.num_elements == os.getpid()
    assert second is not None and second.num_elements != os.getpid()


@needs_fork
@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_of_the_parent_do_not_stop_a_child(num_threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        threads_and_draw(candidate(0))
        state = torch.get_rng_state()
        drawn = int(torch.randint(1 << 30, ()))
        torch.set_rng_state(state)
        report = isolation(threads_and_draw, limits=RunLimits(60.0)).report(candidate(0))
    finally:
        torch.set_num_threads(before)
    found = report.value()
    assert found is not None
    assert (found.num_bad, found.num_elements) == (num_threads, drawn)


def test_reports_carry_nothing_but_data() -> None:
    failure = failing.zero_by_zero().failure
    assert unpack_report(pack_report(Report(failure))) == Report(failure)
    smuggled = Report(partial(os.system, "true"))  # type: ignore[arg-type]
    assert "is not plain data" in str(unpack_report(pack_report(smuggled)).error)
    assert reason(unpack_report(b"damaged")) == "error"
    assert reason(unpack_report(pack_report(Report(lambda: None)))) == "error"  # type: ignore[arg-type]


@needs_fork
def test_a_check_that_crashes_on_half_of_its_candidates_ends_with_the_right_minimum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[Isolation] = []

    def kept(*arguments: Any) -> Isolation:
        used.append(Isolation(*arguments))
        return used[-1]

    monkeypatch.setattr(reducer, "Isolation", kept)
    snapshot = two_calls_among_many()
    kind = shrink(snapshot, observe=NeedsBoth(), with_piece=False)
    view = Lines()
    hostile = shrink(
        snapshot,
        observe=Hostile(num_calls=snapshot.program.num_calls),
        jobs=3,
        with_piece=False,
        view=view,
    )
    assert sorted(call.name for call in hostile.program.calls) == ["exp", "log"]
    assert hostile.one_minimal
    assert Step.of(hostile).num_elements == Step.of(kind).num_elements
    tried = [re.search(r": (\w+) \((\d+) calls?, ", line) for line in view.checks]
    fates = [found[1] == "invalid" for found in tried if found is not None and int(found[2]) > FEW_CALLS]
    assert sum(fates) >= 0.3 * len(fates) > 3
    assert used[-1].is_wary


def two_calls_among_many() -> Snapshot:
    """A logarithm of negative numbers, and an exponential that has no part in it, among other calls."""

    def step(x: torch.Tensor) -> torch.Tensor:
        for number in range(6):
            x = torch.tanh(x) + float(number)
        x = torch.exp(x)
        for _ in range(6):
            x = F.relu(torch.tanh(x))
        return torch.log(torch.sigmoid(x) - 3.0)

    return failing.record(step, x=failing.seeded(3, 4))


SCRIPT = """
import signal, sys
import torch
from reprokit.shrink import apart
from reprokit.shrink.apart import RunLimits
from reprokit.shrink.reducer import shrink
from tests.shrink import failing
from tests.shrink.predicates import LeavesTraces
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
if sys.argv[2] == "spawned":
    apart.can_fork = lambda: False
try:
    shrink(failing.zero_by_zero(), observe=LeavesTraces(sys.argv[1]), limits=RunLimits(600.0))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("way", "number"), [pytest.param("forked", signal.SIGINT, marks=needs_fork), ("spawned", signal.SIGKILL)]
)
def test_an_interrupted_reduction_leaves_no_process_behind(tmp_path: Path, way: str, number: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path), way]
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as process:
        eventually(lambda: any(tmp_path.iterdir()))
        (traces,) = tmp_path.iterdir()
        candidate_process, its_child = (int(part) for part in traces.name.split("."))
        assert is_alive(candidate_process) and is_alive(its_child)
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
    eventually(lambda: not is_alive(candidate_process))
    if number == signal.SIGINT:
        assert said == "interrupted\n"
        eventually(lambda: not is_alive(its_child))
    elif is_alive(its_child):  # nobody was left to end what a killed process's candidate had started
        os.kill(its_child, signal.SIGKILL)


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended and waits to be asked does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
