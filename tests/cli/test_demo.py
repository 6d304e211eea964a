"""The demonstration runs the public commands and leaves every file it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Run


@pytest.mark.slow
def test_the_demo_leaves_all_results_and_overwrites_nothing(run_reprokit: Run, tmp_path: Path) -> None:
    result = run_reprokit("demo", "--json", "--dir", "shown")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["shrink"]["verdict"] == "reduced"
    assert summary["verify"]["agreed"] == summary["verify"]["times"] == 20
    told = result.stderr.partition("; the results:\n")[2].splitlines()
    listed = dict(line.removeprefix("reprokit:").split() for line in told)
    assert set(listed) >= {"script", "snapshot", "repro", "module", "issue", "report", "test", "reduction"}
    assert {name: str(tmp_path / path) for name, path in listed.items()} == {name: summary[name] for name in listed}
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert set(listed.values()) == written
    assert "$ reprokit capture -o snapshot.repro.pt masked_attention.py" in result.stderr
    again = run_reprokit("demo", "--dir", "shown")
    assert again.returncode == 2
    assert again.stderr.splitlines()[0] == "reprokit: error: the folder `shown` is not empty"
