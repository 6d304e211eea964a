"""Failures that are there only sometimes: the rule by which candidates are accepted, and what a reduction then says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reprokit.cli import main
from reprokit.errors import Flaky
from reprokit.locate.failure import Failure
from reprokit.program.interpreter import Settings
from reprokit.program.step import Step
from reprokit.shrink.apart import Report
from reprokit.shrink.certainty import Certainty
from reprokit.shrink.checks.check import Check
from reprokit.shrink.reducer import shrink
from reprokit.snapshot.format import Snapshot, save
from tests.shrink import failing
from tests.shrink.failing import seeded, traced

FAILS = Failure("forward", "function", "f")
EMPTY = Step(failing.zero_by_zero().program, {})

# The function counts its calls in a file, since candidates run in processes of their own, and misses every nth one.
SOMETIMES = """
from pathlib import Path

COUNT = Path(__file__).with_name("count")

def sometimes(outcome):
    count = COUNT.stat().st_size if COUNT.exists() else 0
    with COUNT.open("ab") as file:
        file.write(b".")
    return bool(outcome.loss > 10) and count % {period} {sign} {place}
"""


def step(x: torch.Tensor) -> torch.Tensor:
    return (torch.relu(x * 3.0) + 1.0).sum()


def snapshot_of_growth() -> Snapshot:
    return traced(step, x=seeded(4, 6))


@dataclass(frozen=True)
class ScriptedCheck(Check):
    """A check whose observations are known beforehand."""

    wanted: Failure | None = FAILS
    outcomes: Any = ()

    def recognises(self, failure: Failure) -> bool:
        return True

    @property
    def spec(self) -> str:
        return "scripted"

    def observe(self, candidate: Step) -> Failure | None:
        return FAILS if next(self.outcomes) else None


def test_a_failure_that_is_mostly_there_is_reduced_and_its_rate_stated(tmp_path: Path) -> None:
    file = tmp_path / "flaky.py"
    file.write_text(SOMETIMES.format(period=8, sign="!=", place=3))
    reduction = shrink(snapshot_of_growth(), check=f"{file}:sometimes", max_checks=20)
    failed, runs = map(int, reduction.reproduces.split("/"))
    assert runs == 30 and 0 < failed < 30
    assert reduction.program.num_calls < snapshot_of_growth().program.num_calls
    assert f"flaky: the snapshot fails in {failed}/30 runs; a change needs 3 failures in 5 runs" in reduction.notes
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


def test_a_result_that_never_fails_again_is_flaky() -> None:
    outcomes = iter([1, 0] + 28 * [1] + 30 * [0])
    certainty = certainty_of(outcomes)
    certainty.establish(EMPTY, lambda *rate: None)
    with pytest.raises(Flaky, match="does not fail when it is run again"):
        certainty.confirm(EMPTY)


def certainty_of(outcomes: Iterator[int]) -> Certainty:
    """Before the first run of a snapshot whose runs end like this."""
    check: Any = ScriptedCheck(outcomes=outcomes)
    places: Any = SimpleNamespace(task=None, change=lambda *_: None, report=lambda tried: Report(check.observe(tried)))
    oracle: Any = SimpleNamespace(failure=check.observe)
    return Certainty(oracle, places, check, Settings(), True, FAILS)
