"""Training programs in the styles of public repositories, each with a cause that `case.json` says.

`benchmarks/corpus.py` runs over this folder too. Here: the captured step, and the sentences of the issue.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from reprokit.cli import main
from tests.conftest import import_benchmark, run_python_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_runs")]

PROGRAMS = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = {
    file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in sorted(PROGRAMS.glob("*/case.json"))
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_captured_and_the_issue_says_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, case, folder = import_benchmark("corpus"), CASES[name], tmp_path / name
    shutil.copytree(PROGRAMS / name, folder)
    done = run_python_in(folder, "-m", "reprokit", "capture", "-o", "snapshot.pt", "train.py")
    assert done.returncode == 3, done.stderr
    main(["show", "--json", str(folder / "snapshot.pt")])
    shown = json.loads(capsys.readouterr().out)
    failure = shown["failure"]
    said = ("micro_step", "phase", "kind")
    expected = {"step": case["first_bad_step"], **{key: case[key] for key in said if key in case}}
    assert {key: failure[key] for key in expected} == expected
    assert corpus.is_accepted(failure["call"], case["accept_calls"]), failure["call"]
    if case["culprit_module"] is not None:
        assert corpus.is_inside(failure["module"], case["culprit_module"]), failure["module"]
    assert case["site"] in failure["site"]["code"]
    assert shown["fidelity"] == "exact", shown.get("fidelity_note")

    assert main(["shrink", "-q", "--no-whatif", "-o", str(folder / "out"), str(folder / "snapshot.pt")]) == 0
    issue = (folder / "out" / "issue.md").read_text(encoding="utf-8")
    assert [words for words in case["must_say"] if words not in issue] == []
    claims = re.sub(r"```text\n.*?```", "", issue, flags=re.DOTALL).lower()  # without versions and output
    assert [words for words in case["must_not_say"] if words.lower() in claims] == []
