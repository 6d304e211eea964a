"""The benchmark of agreement: loops and a script on which the ways of watching agree, and what makes a difference."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.conftest import import_benchmark

SCRIPT = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(6):
    loss = torch.log(model(torch.randn(5, 3)).square() * (step != 3)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def agree() -> ModuleType:
    return import_benchmark("agree")


@pytest.fixture(scope="module")
def loops() -> ModuleType:
    return import_benchmark("generated")


def test_a_loop_on_which_all_ways_agree(agree: ModuleType, loops: ModuleType) -> None:
    loop = loops.Loop(fault="loss", norm="batch", accumulate=2, bad_step=3, bad_micro=1, history=7)
    row = agree.compare_ways("loop", loop)
    assert row.truth == "step 3 forward"
    assert list(row.answers) == ["every-step", "sampled", "deferred", "sampled/7", "deferred/7"]
    assert all(line.startswith("step 3.1 forward nan torch.Tensor.div") for line in row.answers.values())
    assert row.is_same and not (row.untrue or row.changed)
    assert agree.alarms(loop.healthy) == []


def test_an_alarm_is_noticed(agree: ModuleType, loops: ModuleType) -> None:
    assert agree.alarms(loops.Loop(fault="loss")) == ["every-step", "sampled", "deferred"]


def test_main_prints_a_summary(agree: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    case = tmp_path / "corpus" / "logarithm"
    case.mkdir(parents=True)
    (case / "train.py").write_text(SCRIPT)
    code = agree.main(["--loops", "0", "--corpus", str(tmp_path / "corpus"), "--json", str(tmp_path / "summary.json")])
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert code == 0, printed.err
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert (summary["runs"], summary["agree"], summary["same"], summary["exact"]) == (1, 1, 1, 3)
    assert "1 of 1 agree" in printed.err


def test_a_disagreement_is_reported(
    agree: ModuleType, loops: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf(loop: Any, way: Any = None) -> Any:
        done = run(loop, way)
        return replace(done, snapshot=None) if way == ("deferred", None) else done

    run = agree.run
    monkeypatch.setattr(agree, "run", deaf)
    monkeypatch.setattr(agree, "draw", lambda generator: loops.Loop(fault="loss"))
    assert agree.main(["--only", "0"]) == 1
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert (summary["disagree"], summary["untrue"], summary["alarmed"]) == (["0"], ["0"], [])
    assert "deferred differs in captured" in printed.err


@pytest.fixture(scope="module")
def snapshot(agree: ModuleType, loops: ModuleType) -> Any:
    return agree.run(loops.Loop(fault="backward"), ("sampled", None)).snapshot


def test_names_and_numbers_of_values_are_no_difference(agree: ModuleType, snapshot: Any) -> None:
    inputs = tuple(replace(item, name=f"input_{number}") for number, item in enumerate(snapshot.program.inputs))
    renamed = replace(snapshot, program=replace(snapshot.program, inputs=inputs[::-1]))
    assert agree.differences(snapshot, renamed) == []
    assert agree.differences(with_roots(snapshot, "G", "D"), with_roots(snapshot, "Generator", "Critic")) == []
    assert agree.differences(with_roots(snapshot, "G", "D"), with_roots(snapshot, "G", "G")) == ["program"]


def with_roots(snapshot: Any, *names: str) -> Any:
    """The snapshot with these roots for its calls inside modules, in turn."""
    calls = [
        replace(call, scope=tuple(replace(level, root=name) for level in call.scope))
        for call, name in zip(snapshot.program.calls, itertools.cycle(names), strict=False)
    ]
    return replace(snapshot, program=replace(snapshot.program, calls=tuple(calls)))


def test_a_sign_of_zero_is_a_difference(agree: ModuleType, snapshot: Any) -> None:
    value = snapshot.program.inputs[0].value
    zeros = replace(snapshot, tensors={**snapshot.tensors, value: torch.tensor(0.0)})
    signed = replace(snapshot, tensors={**snapshot.tensors, value: torch.tensor(-0.0)})
    assert agree.differences(zeros, signed) == [f"1 tensors ({snapshot.program.inputs[0].name})"]


@pytest.mark.parametrize("change", [{"step": 5}, {"micro_step": 1}])
def test_another_step_is_a_difference(agree: ModuleType, snapshot: Any, change: dict[str, int]) -> None:
    assert agree.differences(snapshot, replace(snapshot, **change)) == list(change)


@pytest.mark.parametrize(
    ("fidelity", "note", "is_explained"),
    [("exact", None, False), ("close", "the loss was 1 in training and 2 in the replay", True), ("close", "", False)],
)
def test_only_a_doubt_explains_a_difference(
    agree: ModuleType, snapshot: Any, fidelity: str, note: str | None, is_explained: bool
) -> None:
    row = agree.Row("loop")
    later = replace(snapshot, step=7, fidelity=fidelity, fidelity_note=note)
    agree._compare_all(row, {"every-step": snapshot, "sampled": later})
    assert row.agrees == is_explained and not row.is_same


def test_the_same_number_is_the_same_loop(agree: ModuleType, loops: ModuleType) -> None:
    drawn = [loops.draw(random.Random(number)) for number in range(40)]
    assert drawn == [loops.draw(random.Random(number)) for number in range(40)]
    assert all(loop == loop.settled() for loop in drawn)
    first, second = (loops.Training(drawn[1]) for _ in range(2))
    first.run(), second.run()
    assert agree.same_endings(first.ending(), second.ending())
