"""The benchmark of agreement: loops and a script on which the ways of watching agree, and one on which they do not."""

from __future__ import annotations

import json
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import import_benchmark


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
    assert list(row.answers) == ["every-step", "sampled", "sampled/7"]
    assert all(line.startswith("step 3.1 forward nan torch.Tensor.div") for line in row.answers.values())
    assert row.is_same and not (row.untrue or row.changed)
    assert agree.alarms(loop.healthy) == []


def test_a_disagreement_is_reported(
    agree: ModuleType, loops: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def deaf(loop: Any, way: Any = None) -> Any:
        done = run(loop, way)
        return replace(done, snapshot=None) if way == ("sampled", None) else done

    run = agree.run
    monkeypatch.setattr(agree, "run", deaf)
    monkeypatch.setattr(agree, "draw", lambda generator: loops.Loop(fault="loss"))
    assert agree.main(["--only", "0"]) == 1
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert (summary["disagree"], summary["untrue"], summary["alarmed"]) == (["0"], ["0"], [])
    assert "sampled differs in captured" in printed.err
