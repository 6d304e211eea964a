"""Failures that are there only sometimes: the rule by which candidates are accepted, and what a reduction then says."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reprokit.cli import main
from reprokit.errors import Flaky
from reprokit.locate.failure import Failure
from reprokit.program.interpreter import Settings
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.certainty import MAX_RUNS, Certainty, Rate, RepeatedCheck, Rule, rule_for, settings_that_matter
from reprokit.shrink.isolation.task import NotObserved, Report
from reprokit.shrink.reducer import shrink
from reprokit.shrink.signature import Signature, SignatureCheck, Verdict
from reprokit.snapshot.format import CaptureSettings, Snapshot, save
from tests.shrink import failing
from tests.shrink.failing import seeded, traced

FAILS = Failure("forward", "function", "f")
EMPTY = Candidate(failing.zero_by_zero().program, {})

# The function counts its calls in a file, since candidates run in processes of their own, and misses every nth one.
SOMETIMES = """
from pathlib import Path

COUNT = Path(__file__).with_name("count")

def sometimes(outcome):
    count = COUNT.stat().st_size if COUNT.exists() else 0
    with COUNT.open("ab") as file:
        file.write(b".")
    return bool(outcome.loss > 10) and count % {period} {sign} {place}

def threads(outcome):
    import torch
    return bool(outcome.loss > 10) and torch.get_num_threads() > 1
"""


def step(x: torch.Tensor) -> torch.Tensor:
    return (torch.relu(x * 3.0) + 1.0).sum()


def snapshot_of_growth() -> Snapshot:
    return traced(step, x=seeded(4, 6))


@dataclass(frozen=True)
class ScriptedCheck(SignatureCheck):
    """A check whose observations are known beforehand."""

    wanted: Signature | None = field(default_factory=lambda: Signature.of(FAILS, EMPTY.program))
    outcomes: Any = ()

    def recognises(self, failure: Failure) -> bool:
        return True

    @property
    def spec(self) -> str:
        return "scripted"

    def observe(self, candidate: Candidate) -> Failure | None:
        return FAILS if next(self.outcomes) else None


def binomial(runs: int, needed: int, chance: float) -> float:
    """The probability of at least so many failures, from listing all ways for a small number of runs."""
    ways = itertools.product((0, 1), repeat=runs)
    return sum(math.prod(chance if hit else 1 - chance for hit in way) for way in ways if sum(way) >= needed)


@pytest.mark.parametrize(("failed", "runs"), [(29, 30), (15, 30), (4, 5), (1, 3)])
def test_the_lower_end_solves_wilsons_equation(failed: int, runs: int) -> None:
    share, low = failed / runs, Rate(failed, runs).at_least
    assert 0 < low < share
    assert (share - low) / math.sqrt(low * (1 - low) / runs) == pytest.approx(2.3263478740408408)


def test_a_rule_is_seldom_wrong_in_either_way() -> None:
    rate = Rate(29, 30)
    rule = rule_for(rate)
    assert rule is not None and rule.runs <= 14
    assert 1 - binomial(rule.runs, rule.needed, rate.at_least) <= 0.01
    assert binomial(rule.runs, rule.needed, rate.at_least / 4) <= 0.01
    assert "1%" in str(rule) and f"{rule.needed} of {rule.runs}" in str(rule)


def test_rarer_failures_take_more_runs_and_then_too_many() -> None:
    rules = [rule_for(Rate(failed, 30)) for failed in range(30, 0, -1)]
    runs = [rule.runs for rule in rules if rule is not None]
    assert runs == sorted(runs) and max(runs) <= MAX_RUNS
    assert rules[-1] is None and None not in rules[: len(runs)]


@pytest.mark.parametrize(
    ("outcomes", "verdict", "num_runs"),
    [
        ([1, 1, 0, 1, 1], Verdict.SAME, 4),  # three of five are there after four
        ([0, 0, 0, 1, 1], Verdict.PASSES, 3),  # three of five can no longer be reached
        ([0, 1, 0, 1, 1], Verdict.SAME, 5),
        ([0, 1, 0, 1, 0], Verdict.PASSES, 5),
    ],
)
def test_runs_end_when_the_answer_is_certain(outcomes: list[int], verdict: Verdict, num_runs: int) -> None:
    remaining = iter(outcomes)
    check = RepeatedCheck(ScriptedCheck(outcomes=remaining), Rule(3, 5))
    assert check.once.judge(check(EMPTY), EMPTY) is verdict
    assert len(outcomes) - len(list(remaining)) == num_runs


def test_a_failure_that_is_mostly_there_is_reduced_with_a_stated_confidence(tmp_path: Path) -> None:
    file = tmp_path / "flaky.py"
    file.write_text(SOMETIMES.format(period=8, sign="!=", place=3))
    reduction = shrink(snapshot_of_growth(), check=f"{file}:sometimes", max_checks=40)
    failed, runs = map(int, reduction.reproduces.split("/"))
    assert runs == 30 and 0 < failed < 30
    assert reduction.program.num_calls < snapshot_of_growth().program.num_calls
    (rule,) = [note for note in reduction.notes if note.startswith("flaky: ")]
    assert f"fails in {failed}/30 runs" in rule and "wrong with probability 1% at most" in rule
    (result,) = [note for note in reduction.notes if note.startswith("the result fails in ")]
    assert int(result.split()[4].split("/")[0]) >= 20
    assert reduction.summary()["notes"] == reduction.notes


def test_a_failure_that_is_seldom_there_is_flaky(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("flaky.py").write_text(SOMETIMES.format(period=4, sign="==", place=1))
    save(snapshot_of_growth(), "x.pt")
    assert main(["shrink", "--json", "--check", "flaky.py:sometimes", "x.pt"]) == 5
    said = capsys.readouterr()
    verdict = json.loads(said.out.splitlines()[-1])
    assert verdict["verdict"] == "flaky" and "reproduces 8/30" in verdict["note"]
    assert "8 of 30 runs" in verdict["message"]


def test_the_number_of_threads_is_named_when_it_matters(tmp_path: Path) -> None:
    file = tmp_path / "flaky.py"
    file.write_text(SOMETIMES.format(period=2, sign="!=", place=0))
    snapshot = snapshot_of_growth()
    snapshot = replace(snapshot, settings=CaptureSettings(num_threads=2))
    reduction = shrink(snapshot, check=f"{file}:threads")
    assert reduction.reproduces == "5/5"
    assert "with 1 thread it does not fail (0/1 runs)" in reduction.notes
    assert shrink(failing.zero_by_zero()).notes == []


@pytest.mark.parametrize(
    ("failures", "words"),
    [([1] * 8, "fails every time (8/8 runs)"), ([0] * 8, "does not fail (0/8 runs)"), ([0, 1] * 4, None)],
)
def test_deterministic_algorithms_are_named_when_they_matter(failures: list[int], words: str | None) -> None:
    check = ScriptedCheck(outcomes=iter(failures))
    seen: list[Settings] = []

    def report(settings: Settings) -> Report:
        seen.append(settings)
        return Report(check.observe(EMPTY))

    notes = settings_that_matter(report, check, EMPTY, Settings(num_threads=1), is_flaky=True)
    assert notes == ([f"with deterministic algorithms it {words}"] if words else [])
    assert seen == [Settings(num_threads=1, deterministic_algorithms=True)] * 8


def test_a_run_that_breaks_off_says_nothing_about_a_setting() -> None:
    report = Report(error=NotObserved("time", "the candidate took more than 10 s"))
    check = ScriptedCheck()
    assert settings_that_matter(lambda settings: report, check, EMPTY, Settings(num_threads=2), is_flaky=False) == []


def test_a_result_that_does_not_hold_is_not_given_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where chance made a candidate the best one, the last one that holds is the result."""
    file = tmp_path / "flaky.py"
    file.write_text(SOMETIMES.format(period=8, sign="!=", place=3))
    steps: list[Candidate] = []
    judge = SignatureCheck.judge

    def forgetful(self: SignatureCheck, observation: Failure | None, candidate: Candidate) -> Verdict:
        is_last = bool(steps) and candidate is steps[-1] and forgetful.is_over  # type: ignore[attr-defined]
        return Verdict.PASSES if is_last else judge(self, observation, candidate)

    forgetful.is_over = False  # type: ignore[attr-defined]
    monkeypatch.setattr(SignatureCheck, "judge", forgetful)

    def watch(certainty: Certainty, best: Candidate) -> tuple[Candidate, bool]:
        steps.extend(certainty.steps)
        forgetful.is_over = True  # type: ignore[attr-defined]
        return confirmed(certainty, best)

    confirmed = Certainty.confirmed
    monkeypatch.setattr(Certainty, "confirmed", watch)
    reduction = shrink(snapshot_of_growth(), check=f"{file}:sometimes", max_checks=20)
    assert len(steps) >= 2 and not reduction.one_minimal
    kept = Candidate(reduction.program, reduction.tensors)
    assert kept.digest == steps[-2].digest


def test_nothing_that_holds_is_flaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "flaky.py"
    file.write_text(SOMETIMES.format(period=8, sign="!=", place=3))
    confirmed = Certainty.confirmed

    def unlucky(certainty: Certainty, best: Candidate) -> tuple[Candidate, bool]:
        certainty.steps.clear()
        return confirmed(certainty, best)

    monkeypatch.setattr(Certainty, "confirmed", unlucky)
    with pytest.raises(Flaky, match="no reduction holds"):
        shrink(snapshot_of_growth(), check=f"{file}:sometimes", max_checks=10)


def test_runs_that_selected_the_program_do_not_raise_its_rate() -> None:
    outcomes = itertools.cycle((0, 1))
    check: Any = ScriptedCheck(outcomes=outcomes)
    oracle: Any = SimpleNamespace(failure=check.observe)
    certainty = Certainty(oracle, oracle, check, Settings(), False, FAILS)
    with pytest.raises(Flaky, match="fails in 15 of 30 runs"):
        certainty.establish(EMPTY, lambda rate: None, [FAILS])


def test_runs_that_selected_the_program_count_when_all_fail() -> None:
    check: Any = ScriptedCheck(outcomes=iter((1, 1, 1, 1)))
    oracle: Any = SimpleNamespace(failure=check.observe)
    certainty = Certainty(oracle, oracle, check, Settings(), False, FAILS)
    certainty.establish(EMPTY, lambda rate: None, [FAILS])
    assert certainty.reproduces == "5/5"
