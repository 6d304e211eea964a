"""The diagnosis in the texts for people, from a real reduction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reprokit.cli import main
from reprokit.grammar import plain_of
from reprokit.render.facts import Facts
from reprokit.render.issue import make_issue
from reprokit.render.report import write_report
from reprokit.render.sources import reduction_script
from reprokit.rules.match import diagnose
from reprokit.shrink.reducer import shrink
from reprokit.snapshot.format import save
from tests.render.programs import VERIFIED
from tests.shrink.failing import record, zero_by_zero


def test_the_issue_and_the_report_tell_it(tmp_path: Path) -> None:
    snapshot = zero_by_zero()
    reduction = shrink(snapshot, out_dir=tmp_path)
    script = reduction_script(reduction, snapshot)
    without = make_issue(Facts(snapshot, script, VERIFIED, reduction)).text
    assert "Diagnosis" not in without
    reduction = replace(reduction, diagnosis=diagnose(snapshot))
    issue = make_issue(Facts(snapshot, script, VERIFIED, reduction)).text
    report = write_report(Facts(snapshot, script, VERIFIED, reduction))
    assert "<summary>Diagnosis" in issue and "no loss to check: divide by at least one" in issue
    assert '<h2 id="diagnosis">Diagnosis</h2>' in report and "no loss to check: divide by at least one" in report
    assert reduction.summary()["diagnosis"] == plain_of(reduction.diagnosis)


@pytest.mark.slow
def test_the_code_of_a_fix_is_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n\ndef step(x):\n    token = torch.log(x)  # ask me@example.com\n    return token.sum()\n"
    )
    namespace: dict[str, Any] = {}
    exec(compile(script.read_text(), str(script), "exec"), namespace)
    snapshot = record(lambda x: namespace["step"](x).backward(), x=torch.zeros(2, requires_grad=True))
    save(snapshot, tmp_path / "snap.pt")
    assert main(["shrink", str(tmp_path / "snap.pt"), "-o", str(tmp_path / "out"), "--no-whatif", "-q"]) == 0
    code, texts = "token = torch.log(x.clamp(min=1e-6))", {}
    for policy in ("traceback", "none"):
        for kind in ("issue", "report"):
            capsys.readouterr()
            assert main(["render", str(tmp_path / "out"), "--as", kind, "--source", policy]) == 0
            texts[policy, kind] = capsys.readouterr().out
    assert {key: code in text for key, text in texts.items()} == {key: key[0] != "none" for key in texts}
    assert all("clamp the argument of log" in text and "me@" not in text for text in texts.values())
    assert main(
        ["shrink", str(tmp_path / "snap.pt"), "-o", str(tmp_path / "none"), "--source", "none", "--no-whatif", "-q"]
    ) == 0  # fmt: skip
    assert code not in (tmp_path / "none" / "issue.md").read_text()


def test_a_change_that_is_no_fix_is_not_drawn_as_one(tmp_path: Path) -> None:
    snapshot = zero_by_zero()
    reduction = shrink(snapshot, out_dir=tmp_path)
    script = reduction_script(reduction, snapshot)
    for is_plausible in (True, False):
        diagnosis = diagnose(snapshot)
        assert diagnosis.fix is not None
        diagnosis = replace(diagnosis, fix=replace(diagnosis.fix, is_plausible=is_plausible))
        reduction = replace(reduction, diagnosis=diagnosis)
        html = write_report(Facts(snapshot, script, VERIFIED, reduction))
        assert ('<div class="helped">' in html) is is_plausible
        assert ("so it is no fix" in html) is not is_plausible
