"""``reprokit shrink`` around the workflow: what it writes, says and returns for every way a reduction can end."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reprokit.cli import main
from reprokit.cli.shrink import default_folder
from reprokit.errors import Flaky, NotReproduced
from reprokit.render.verify import CleanProcesses
from reprokit.shrink.reduction import Reduction, Size
from reprokit.shrink.signature import Signed
from reprokit.snapshot.format import Snapshot, save
from tests.shrink.failing import record


def reduction_of(snapshot: Snapshot) -> Reduction:
    """The snapshot as its own reduction, with the numbers of `SUMMARY`."""
    return Reduction(
        snapshot.program,
        snapshot.tensors,
        snapshot.failure,
        Size(70, 41230),
        Signed("forward", "nan"),
        checks=11,
        verdicts={"same": 6, "other": 1, "passes": 4, "invalid": 0},
        seconds=0.31,
        reproduces="5/5",
        one_minimal=True,
    )


@pytest.fixture
def reducer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The workflow and the renderer replaced; ``reducer.shrink`` can be set. There is a snapshot ``x.pt``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CleanProcesses, "open", lambda self: None)
    snapshot = record(lambda x: (x / x).sum(), x=torch.zeros(5))
    save(snapshot, Path("x.pt"))
    fake = SimpleNamespace(shrink=lambda: reduction_of(snapshot), options={}, context=None, snapshot=snapshot)

    def shrink(snapshot: object, **options: Any) -> Reduction:
        fake.options = options
        options["view"].say("replay: 5/5 runs fail as recorded")
        options["view"].show("check 1: all sizes 1: same (2 calls, 5 elements)")
        found: Reduction = fake.shrink()
        return found

    def render_all(reduction: Reduction, snapshot: object, folder: Path, **options: Any) -> dict[str, Any]:
        fake.rendering = options
        (folder / "repro.py").write_text("")
        reduction.save(folder / "reduction.pt")
        repro = {"path": str(folder / "repro.py"), "lines": 7, "files": ["repro.py"], "names": {}, "verified": "20/20"}
        return {"context": fake.context, "repro": repro}

    monkeypatch.setattr("reprokit.workflow.shrink", shrink)
    monkeypatch.setattr(import_module("reprokit.render.texts"), "render_all", render_all)
    return fake


def failing(error: BaseException) -> Callable[[], Any]:
    def shrink() -> Any:
        raise error

    return shrink


def test_the_result_is_written_and_printed(reducer: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    reducer.context = {"path": "x/repro_module.py", "modules": 1, "calls": 6, "lines": 24, "verified": "20/20"}
    words = ["--max-time", "60", "--jobs", "2", "--no-whatif", "--source", "none", "--no-data"]
    assert main(["shrink", "x.pt", "--json", *words]) == 0
    said = capsys.readouterr()
    summary = json.loads(said.out)
    assert (
        summary
        | {
            "verdict": "reduced",
            "before": {"calls": 70, "elements": 41230},
            "fidelity": "exact",
            "context": reducer.context,
        }
        == summary
    )
    assert summary["repro"]["path"] == "x/repro.py"
    assert "41,230" in said.err
    assert "6 with the same failure, 1 with another failure, 4 without a failure" in said.err
    assert "it comes from: 24 lines, verified 20/20 -> x/repro_module.py" in said.err
    assert said.err.splitlines()[-1] == "reprokit: next: python x/repro.py"
    wanted = {"out_dir": None, "max_time": 60.0, "jobs": 2, "executor": None, "whatif": False, "earlier": None}
    assert {name: reducer.options[name] for name in wanted} == wanted
    assert (reducer.rendering["source"], reducer.rendering["no_data"]) == ("none", True)


def test_quiet(reducer: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shrink", "-q", "x.pt"]) == 0
    assert capsys.readouterr() == ("", "")


def test_verbose_tells_every_event(reducer: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    main(["shrink", "-v", "x.pt"])
    assert "reprokit: check 1: all sizes 1: same (2 calls, 5 elements)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "exit_code", "verdict"),
    [
        (NotReproduced("it did not fail again", hint="look at the fidelity"), 4, "not_reproduced"),
        (Flaky("it failed in 2 of 5 runs", hint="set a seed", note="2/5"), 5, "flaky"),
    ],
)
def test_what_cannot_be_reduced(
    error: Exception, exit_code: int, verdict: str, reducer: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    reducer.shrink = failing(error)
    assert main(["shrink", "--json", "x.pt"]) == exit_code
    said = capsys.readouterr()
    assert json.loads(said.out)["verdict"] == verdict
    assert f"\nreprokit: error: {error}\nhint: " in said.err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["shrink", "--resume"], "DIR/reduction.pt"),
        (["shrink", "--level", "module"], "repro_module.py"),
        (["shrink", "--progress", "json"], "--json"),
        (["whatif", "--progress", "none"], "-q"),
    ],
)
def test_a_removed_option_names_what_to_use_instead(
    words: list[str], hint: str, reducer: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "x.pt"]) == 2
    error, said = capsys.readouterr().err.splitlines()
    assert error == f"reprokit: error: `{words[1]}` was removed" and hint in said


@pytest.mark.parametrize(
    ("snapshot", "folder"),
    [("train-step7.repro.pt", "train-step7"), ("/data/x.pt", "x"), ("snapshot", "snapshot.shrunk")],
)
def test_the_default_folder(snapshot: str, folder: str) -> None:
    assert default_folder(Path(snapshot)) == Path(folder)


@pytest.mark.parametrize("command", [["shrink", "-q", "--max-checks", "5"], ["whatif", "-q"]])
def test_warnings_of_what_is_tried_are_not_printed(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(record(lambda x: torch.std(x, 0).sum(), x=torch.ones(1, 3)), "std.pt")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert main([*command, "std.pt"]) == 0
    assert [str(item.message) for item in shown if "degrees of freedom" in str(item.message)] == []
