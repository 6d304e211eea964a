"""Training programs in the styles of public repositories, each with a cause that `case.json` says.

`benchmarks/corpus.py` runs over this folder too. Here: the captured step, and the sentences of the issue.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from reprokit.cli import main
from tests.conftest import import_benchmark, run_python_in

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_runs")]

PROGRAMS = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = {
    file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in sorted(PROGRAMS.glob("*/case.json"))
}
# Where an issue once said what is not so. A reduction takes seconds; `benchmarks/corpus.py` reduces the others too.
ISSUES = ["nanogpt_packed", "timm_squared_relu", "dqn_boltzmann", "hf_smoothing", "lit_survival", "monodepth"]
ISSUES += ["hydra_vqvae"]


@pytest.fixture(scope="module")
def corpus() -> ModuleType:
    return import_benchmark("corpus")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which every program ran under capture."""
    folder = tmp_path_factory.mktemp("programs")
    for name in CASES:
        shutil.copytree(PROGRAMS / name, folder / name)
        done = run_python_in(folder / name, "-m", "reprokit", "capture", "-o", "snapshot.pt", "train.py")
        assert done.returncode == 3, done.stderr
    return folder


@pytest.mark.parametrize("name", CASES)
def test_the_step_of_the_cause_is_captured(
    name: str, captured: Path, corpus: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    case, folder = CASES[name], captured / name
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


@pytest.mark.parametrize("name", ISSUES)
def test_the_issue_says_what_is_so_and_nothing_else(name: str, captured: Path) -> None:
    case, folder = CASES[name], captured / name
    assert main(["shrink", "-q", "--no-whatif", "-o", str(folder / "out"), str(folder / "snapshot.pt")]) == 0
    issue = (folder / "out" / "issue.md").read_text(encoding="utf-8")
    assert [words for words in case["must_say"] if words not in issue] == []
    claims = re.sub(r"```text\n.*?```", "", issue, flags=re.DOTALL).lower()  # without versions and output
    assert [words for words in case["must_not_say"] if words.lower() in claims] == []
