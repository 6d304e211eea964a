"""``reprokit shrink`` around the reducer: what it writes, says and returns for every way a reduction can end."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import reprokit.render.diagnosis_text  # noqa: F401 (the package around it is replaced below)
from reprokit.cli import main
from reprokit.cli.shrink import default_folder
from reprokit.errors import Flaky, NotReproduced, ReprokitError
from reprokit.locate.diagnosis import Diagnosis
from reprokit.locate.failure import Failure
from reprokit.program.interpreter import Settings
from reprokit.program.ir import Phase
from reprokit.render.script import Script
from reprokit.render.verify import CleanProcesses
from reprokit.shrink.events import Checked, Improved, Replayed
from reprokit.shrink.reduction import Origin, WhatIfResult
from reprokit.snapshot.format import save
from tests.shrink.failing import record

SUMMARY = {
    "schema": 1,
    "verdict": "reduced",
    "calls": 2,
    "elements": 5,
    "checks": 11,
    "verdicts": {"same": 6, "other": 1, "passes": 4, "invalid": 0},
    "seconds": 0.31,
    "reproduces": "5/5",
    "before": {"calls": 70, "elements": 41230},
    "one_minimal": True,
}


@dataclass(frozen=True)
class FakeReduction:
    """A reduction that can be summed up and saved."""

    whatif: WhatIfResult = field(default_factory=WhatIfResult)
    origin: Origin = field(default_factory=Origin)
    diagnosis: Diagnosis | None = None
    failure: Failure = field(default_factory=lambda: Failure(Phase.FORWARD, "nan"))

    def summary(self) -> dict[str, Any]:
        return dict(SUMMARY)

    def save(self, path: Path) -> None:
        path.write_text("a reduction")


@pytest.fixture
def reducer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The reducer, renderer and snapshot replaced; ``reducer.shrink`` can be set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPROKIT_SHRINK_NO_WHATIF")
    monkeypatch.setattr(CleanProcesses, "open", lambda self: None)
    monkeypatch.setattr(CleanProcesses, "begin", lambda *_: SimpleNamespace(result=lambda: None))
    fake = SimpleNamespace(
        shrink=lambda: FakeReduction(),
        options={},
        context=None,
        table=WhatIfResult,
        compared=None,
        diagnose=lambda write: None,
        fix_code=lambda: "",
    )

    def shrink(snapshot: object, **options: Any) -> FakeReduction:
        fake.options = options
        options["on_event"](Replayed(5, 5))
        options["on_event"](Checked(1, 2, 5, "same", "all sizes 1"))
        return fake.shrink()

    def render_all(reduction: object, snapshot: object, folder: Path, **options: Any) -> dict[str, Any]:
        fake.rendered = reduction
        (folder / "repro.py").write_text("")
        return {"path": str(folder / "repro.py"), "lines": 7, "files": ["repro.py"], "verified": "20/20"}

    @contextmanager
    def making_of_reduction(reduction: object, settings: object, **options: Any) -> Iterator[Any]:
        fake.compared = settings
        yield fake.table

    def first_repro(*_: object, **__: object) -> Script:
        return Script("import torch\n")

    modules = {
        "reprokit.shrink": {},
        "reprokit.shrink.reducer": {"shrink": shrink},
        "reprokit.shrink.reduction": {"load": lambda path: FakeReduction(), "WhatIfResult": WhatIfResult},
        "reprokit.snapshot.format": {
            "load": lambda path: SimpleNamespace(settings=Settings(num_threads=1), fidelity="exact", fidelity_note=None)
        },
        "reprokit.whatif": {},
        "reprokit.whatif.table": {"making_of_reduction": making_of_reduction},
        "reprokit.render.texts": {
            "TIMES": 20,
            "first_repro": first_repro,
            "presentable_context": lambda *_: None,
            "render_all": render_all,
            "render_context": lambda *_, **__: fake.context,
        },
        "reprokit.locate.diagnose": {"diagnose": lambda snapshot, write: fake.diagnose(write)},
        "reprokit.render.fix_code": {"fix_code": lambda *_: fake.fix_code()},
        "reprokit.render.spelling": {"in_users_words": lambda snapshot: snapshot},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def failing(error: BaseException) -> Callable[[], Any]:
    def shrink() -> Any:
        raise error

    return shrink


def test_the_result_is_written_and_told(reducer: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shrink", "train-step7.repro.pt", "--json", "--max-time", "60", "--jobs", "2"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {
        **SUMMARY,
        "fidelity": "exact",
        "fidelity_note": None,
        "context": None,
        "repro": {"path": "train-step7/repro.py", "lines": 7, "files": ["repro.py"], "verified": "20/20"},
    }
    assert "41,230" in said.err
    assert "6 with the same failure, 1 with another failure, 4 without a failure" in said.err
    assert said.err.splitlines()[-1] == "reprokit: next: python train-step7/repro.py"
    assert Path("train-step7", "reduction.pt").is_file()
    wanted = {"out_dir": Path("train-step7"), "level": "op", "max_time": 60.0, "jobs": 2, "resume": False}
    wanted["executor"] = None
    assert {name: reducer.options[name] for name in wanted} == wanted


def test_the_context_is_told(reducer: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    reducer.context = {"path": "x/repro_module.py", "modules": 1, "calls": 6, "lines": 24, "verified": "20/20"}
    assert main(["shrink", "x.pt", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["context"] == reducer.context
    assert "it comes from: 24 lines, verified 20/20 -> x/repro_module.py" in said.err


def test_the_what_if_table_is_kept_or_left_out(reducer: SimpleNamespace) -> None:
    reducer.table = lambda: WhatIfResult(tables={})
    assert main(["shrink", "x.pt", "--no-whatif"]) == 0
    assert reducer.compared is None and reducer.rendered.whatif == WhatIfResult()
    assert main(["shrink", "-f", "x.pt"]) == 0
    assert reducer.compared == Settings(num_threads=1) and reducer.rendered.whatif == WhatIfResult(tables={})


def test_a_what_if_table_that_fails_costs_nothing_else(
    reducer: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    reducer.table = failing(ReprokitError("no worker can be started"))
    assert main(["shrink", "x.pt"]) == 0
    assert "there is no what-if table: no worker can be started" in capsys.readouterr().err
    assert Path("x", "repro.py").is_file()


def test_a_diagnosis_that_fails_costs_nothing_else(
    reducer: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    def diagnose(write: Callable[..., str]) -> None:
        raise ZeroDivisionError("no luck")

    reducer.diagnose = diagnose
    assert main(["shrink", "x.pt"]) == 0
    assert "reprokit: no diagnosis: ZeroDivisionError: no luck" in capsys.readouterr().err
    assert Path("x", "reduction.pt").is_file()


def test_a_fix_whose_code_cannot_be_written_is_still_told(
    reducer: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[str] = []

    def diagnose(write: Callable[..., str]) -> None:
        written.append(write(None, None, None))
        return None

    reducer.diagnose = diagnose
    reducer.fix_code = failing(KeyError("no name"))
    assert main(["shrink", "x.pt"]) == 0
    assert written == [""]
    assert "could not render the fix as code: KeyError: 'no name'" in capsys.readouterr().err


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


def test_interrupted_with_a_best_so_far(reducer: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    def shrink() -> FakeReduction:
        FakeReduction().save(Path("x", "reduction.pt"))
        reducer.options["on_event"](Improved(2, 5, "all sizes 1"))
        raise KeyboardInterrupt

    reducer.shrink = shrink
    assert main(["shrink", "x.pt"]) == 130
    assert Path("x", "repro.py").is_file()
    line = "interrupted; the best so far (2 calls, 5 elements) is in `x`, and `--resume` goes on from there"
    assert capsys.readouterr().err.splitlines()[-1] == f"reprokit: error: {line}"


def test_interrupted_before_anything_was_found(reducer: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    reducer.shrink = failing(KeyboardInterrupt())
    assert main(["shrink", "x.pt"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        "reprokit: error: interrupted before anything smaller was found"
    )
    assert not Path("x", "repro.py").exists()


@pytest.mark.parametrize(("flags", "exit_code"), [([], 2), (["-f"], 0), (["--resume"], 0)])
def test_a_folder_in_use(flags: list[str], exit_code: int, reducer: SimpleNamespace) -> None:
    Path("x").mkdir()
    Path("x", "note.txt").write_text("mine")
    Path("x", "reduction.pt").write_text("an earlier one")
    assert main(["shrink", *flags, "x.pt"]) == exit_code
    assert Path("x", "note.txt").read_text() == "mine"


def test_nothing_of_others_is_overwritten_because_there_is_nothing_to_resume(reducer: SimpleNamespace) -> None:
    Path("x").mkdir()
    assert main(["shrink", "--resume", "x.pt"]) == 0
    Path("x", "reduction.pt").unlink()
    Path("x", "repro.py").write_text("mine")
    assert main(["shrink", "--resume", "x.pt"]) == 2
    assert Path("x", "repro.py").read_text() == "mine"


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
