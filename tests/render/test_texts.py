"""The texts for people: issue, report and test, from a snapshot and a reduction of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reprokit.cli import main
from reprokit.errors import UsageError
from reprokit.locate.failure import Failure
from reprokit.program.ir import Call, Input, Program, Ref, Scope, Site
from reprokit.render import facts
from reprokit.render.facts import Facts
from reprokit.render.issue import make_issue
from reprokit.render.report import write_report
from reprokit.render.sources import reduction_script
from reprokit.render.texts import render_all, render_one
from reprokit.shrink.explain import Nearest, VariedPart
from reprokit.shrink.reduction import LogRow, Size, WhatIfResult
from reprokit.snapshot.format import Snapshot, save
from tests.locate.mechanisms import bad_input
from tests.render.programs import (
    VERIFIED,
    masked_softmax,
    site_of,
    snapshot_of,
)


def attention_step() -> Snapshot:
    """A small step with a fully masked row, eight calls before the loss."""
    scope = (Scope("", "Net"), Scope("layers.1.attention", "Attention"))
    calls = [Call("torch.Tensor.mul", (Ref(0), 1.0), {}, Ref(10), scope, Site("train.py", 20, "x = x * 1.0"))]
    for number in range(6):
        calls.append(
            Call("torch.Tensor.add", (Ref(10 + number), 0.0), {}, Ref(11 + number), scope, Site("train.py", 21))
        )
    site = site_of("p = F.softmax(s, dim=-1)  # <b>&", "F.softmax(s, dim=-1)", 31)
    calls += [
        Call("torch.Tensor.masked_fill", (Ref(16), Ref(1), float("-inf")), {}, Ref(20), scope, Site("train.py", 30)),
        Call("torch.nn.functional.softmax", (Ref(20),), {"dim": -1}, Ref(21), scope, site),
        Call("torch.Tensor.sum", (Ref(21),), {}, Ref(22), (), Site("train.py", 40)),
        Call("torch.Tensor.backward", (Ref(22),), phase="backward"),
    ]
    program = Program(tuple(calls), (Input(0, "x", requires_grad=True), Input(1, "mask")), (Ref(21),))
    mask = torch.tensor([[False, True], [True, True]])
    return snapshot_of((program, {0: torch.ones(2, 2), 1: mask}))


def reduced(snapshot: Snapshot, **fields: Any) -> Any:
    """A reduction of the snapshot to one call."""
    small = snapshot_of(masked_softmax())
    content = {
        "program": small.program,
        "tensors": small.tensors,
        "failure": small.failure,
        "checks": 11,
        "verdicts": {"same": 6, "other": 1, "passes": 4, "invalid": 0},
        "seconds": 0.3,
        "reproduces": "5/5",
        "explain": [VariedPart("input"), VariedPart("unused", free=True)],
        "constants": [VariedPart(call="torch.softmax", argument="scale", value=2.0, tried=False)],
        "nearest": Nearest("input", (0,), from_=float("-inf")),
        "context": None,
        "notes": [],
        "whatif": WhatIfResult(),
        "stopped": None,
        "before": Size(snapshot.program.num_calls, snapshot.num_elements),
        "one_minimal": True,
        "log": [LogRow(3, "cut to softmax", 1, 4), LogRow(5, "one element", 1, 1)],
        "save": lambda path: None,
        "diagnosis": None,
        "no_repro": None,
        "summary": lambda: {"calls": 1, "elements": 1},
    }
    return SimpleNamespace(**{**content, **fields})


# -- issue ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["pytorch", "generic"])
def test_the_issue_says_it_all_on_the_first_screen(template: str) -> None:
    snapshot = attention_step()
    reduction = reduced(snapshot)
    text = make_issue(Facts(snapshot, reduction_script(reduction), VERIFIED, reduction), template=template).text
    screen = text.partition("<details>")[0]
    heading = "softmax returns nan in layers.1.attention (float32, CPU, torch 2.13.0)"
    assert text.startswith(f"<!-- Title: {heading} -->\n")
    for words in ("**Observed:**", "**Expected:**", "```python", "python repro.py", "out = tensor([nan])"):
        assert words in screen
    assert "failed 20 of 20 runs" in screen
    assert "Every value of `unused` that was tried fails. The value of `x` matters." in screen
    assert "With `x[0] = 0` in place of `-inf` the failure is gone." in screen
    assert "your own words" in screen
    assert "mechanically by reprokit from 10 torch calls to 1, in 11 checks" in screen
    assert "`layers.1.attention`" in screen and "`train.py:31`" in screen
    assert len(screen.splitlines()) <= 55
    assert "cut to softmax" in text


def test_secrets_are_hidden_again() -> None:
    secret = "hf_" + "a1B2" * 8
    snapshot = attention_step()
    snapshot = replace(snapshot, environment=replace(snapshot.environment, collect_env=f"token {secret}"))
    reduction = reduced(snapshot, log=[LogRow(1, f"token {secret}", 1, 1)])
    leaky = replace(VERIFIED, output=secret, error_output=secret)
    script = reduction_script(reduction)
    assert secret not in make_issue(Facts(snapshot, script, leaky, reduction)).text
    assert secret not in write_report(Facts(snapshot, script, leaky, reduction))


# -- everything ----------------------------------------------------------------------------------------------------


def test_all_of_it_is_written(tmp_path: Path) -> None:
    snapshot = attention_step()
    made = render_all(reduced(snapshot), snapshot, tmp_path, times=3)
    assert made["context"] is None
    assert made["repro"] == {
        "path": str(tmp_path / "repro.py"),
        "lines": 6,
        "files": ["repro.py"],
        "names": {"input": "x"},
        "verified": "3/3",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "issue.md",
        "report.html",
        "repro.py",
        "summary.md",
        "test_repro.py",
    ]


@pytest.mark.parametrize("command", ["render", "whatif", "verify"])
def test_a_snapshot_without_a_program_is_only_for_show(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.pt"
    save(Snapshot(Program((), ()), {}, Failure("backward", "nan", "nan"), 3, 0, "gradient"), path)
    assert main([command, str(path)]) == 1
    assert "holds no program that could be run" in capsys.readouterr().err
    assert main(["show", str(path)]) == 0


def test_a_repro_with_a_side_file_needs_a_folder(tmp_path: Path) -> None:
    values = torch.randn(100).abs()
    values[3] = -1.0
    program = Program((Call("torch.log", (Ref(0),), {}, Ref(1)),), (Input(0, "x"),), (Ref(1),))
    save(snapshot_of((program, {0: values})), tmp_path / "snapshot.pt")
    with pytest.raises(UsageError, match="beside it"):
        render_one(tmp_path / "snapshot.pt", "repro")
    (tmp_path / "repro_inputs.pt").write_text("of another repro")
    assert main(["render", str(tmp_path / "snapshot.pt"), "-o", str(tmp_path)]) == 2
    assert (tmp_path / "repro_inputs.pt").read_text() == "of another repro"
    assert main(["render", str(tmp_path / "snapshot.pt"), "-f", "-o", str(tmp_path)]) == 0
    assert len(torch.load(tmp_path / "repro_inputs.pt")) == 1


@pytest.mark.parametrize(
    ("role", "step", "words"),
    [
        ("parameter", 0, "the parameter `image`, bad before the first step"),
        ("parameter", 3, "the input `image`, bad before the first call reads it"),
        ("batch", 0, "the input `image`, bad before the first call reads it"),
    ],
)
def test_a_parameter_that_training_began_with_is_named_as_that(role: str, step: int, words: str) -> None:
    assert dict(facts.of_failure(replace(bad_input(role)(), step=step)))["origin"] == words
