"""What fields of a file claim of each other is checked when it is read: one clear line, before anything is run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reprokit.cli import main
from reprokit.errors import SnapshotError
from reprokit.locate.failure import Failure, Predicate
from reprokit.program.ir import Call, Input, Mode, Phase, Program, Ref
from reprokit.program.plain import from_plain, to_plain
from reprokit.render.sources import snapshot_script
from reprokit.shrink.reduction import load as load_reduction
from reprokit.snapshot.format import Snapshot, load, read_file, save
from tests.conftest import import_benchmark
from tests.render.programs import masked_softmax, record, snapshot_of

EVENT = Predicate("loss", 9.0, 1.0, 0, 1)


def refused(snapshot: Snapshot, folder: Path) -> str:
    """The line about a file that is refused."""
    save(snapshot, folder / "bad.repro.pt")
    with pytest.raises(SnapshotError) as error:
        load(folder / "bad.repro.pt")
    assert error.value.message.startswith(f"`{folder / 'bad.repro.pt'}` is damaged: ")
    return error.value.message.partition(": ")[2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"value": 77}, "value 77, which the program does not have"),
        ({"call_index": 9}, "the failure comes from call 9 of"),
        ({"kind": "mismatch", "way": "fp64", "value": None}, "a mismatch has no result"),
        ({"kind": "mismatch", "way": "fp64", "value": 0}, "value 0, which no call makes"),
        ({"kind": "mismatch", "way": "fp63"}, "`fp63`, which is no reference"),
        ({"kind": "mismatch", "way": "ranks"}, "no parameter is named"),
        ({"kind": "mismatch", "way": "compile:../x.py:f"}, "names no file and function"),
        ({"kind": "mismatch", "way": "other"}, "the program has fewer"),
        ({"kind": "function", "way": "check.py"}, "names no file and function"),
        ({"kind": "function", "way": "/etc/check.py:f"}, "names no file and function"),
        ({"kind": "exception", "exception": None}, "none is named"),
        ({"kind": "spike"}, "has no numbers of one"),
        ({"call": None, "call_index": None, "value": 0, "element": (9, 9)}, "element [9, 9] is none of"),
        ({"kind": "spike", "event": replace(EVENT, rows="rows 0-99999999999")}, "row 99999999999, and no input"),
        ({"kind": "spike", "event": replace(EVENT, rows="rows 7-0")}, "`rows 7-0` do not rise"),
        ({"kind": "spike", "event": replace(EVENT, rows="all of them")}, "they are no rows"),
    ],
)
def test_a_claim_that_does_not_hold(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    snapshot = snapshot_of(masked_softmax())
    assert words in refused(replace(snapshot, failure=replace(snapshot.failure, **changes)), tmp_path)


def test_tensors_that_cannot_be_what_the_program_says(tmp_path: Path) -> None:
    call = Call("torch.log", (Ref(0),), {}, Ref(1))
    log = Program((call,), (Input(0, "x", "parameter", True),), (Ref(1),))
    snapshot = snapshot_of((log, {0: torch.tensor([-1.0])}))
    assert "requires a gradient" in refused(replace(snapshot, tensors={0: torch.tensor([1])}), tmp_path)
    drawn = replace(call, mode=Mode(rng=Ref(5)))
    states = replace(log, calls=(drawn,), inputs=(*log.inputs, Input(5, "state", "rng")))
    tensors = {0: torch.tensor([-1.0]), 5: torch.ones(3)}
    assert "no state of a generator" in refused(replace(snapshot, program=states, tensors=tensors), tmp_path)


def test_the_result_of_a_call_is_no_dict() -> None:
    plain = to_plain(Program((Call("torch.log", (Ref(0),), {}, {"loss": Ref(1)}),), (Input(0, "x"),)))
    with pytest.raises(ValueError, match="the result of a call is no tensor"):
        from_plain(plain)


def test_a_list_in_a_tuple_is_rendered() -> None:
    def step() -> None:
        counts, (rows, _) = torch.histogramdd(torch.tensor([[0.1, 0.2], [0.7, 0.9]]), bins=[2, 2])
        torch.log(counts.sum() * 0 - rows[1].sum())

    text = snapshot_script(snapshot_of(record(step))).text
    assert "(rows, _) = torch.histogramdd(" in text
    compile(text, "repro.py", "exec")


def test_a_device_that_is_not_here_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("the device is here")
    snapshot = snapshot_of(masked_softmax())
    save(replace(snapshot, failure=replace(snapshot.failure, kind="mismatch", way="cpu-cuda")), tmp_path / "x.repro.pt")
    for words in (["verify"], ["render", "--as", "repro"], ["render", "--as", "report"]):
        assert main([words[0], str(tmp_path / "x.repro.pt"), *words[1:]]) == 2
        assert capsys.readouterr().err.startswith(
            "reprokit: error: `mismatch:cpu-cuda` needs CUDA, and this torch sees none"
        )


def test_a_repro_that_runs_a_file_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = snapshot_of(masked_softmax())
    failure = Failure(Phase.FORWARD, "function", "check.py:is_bad")
    save(replace(snapshot, failure=failure), tmp_path / "x.repro.pt")
    assert main(["render", str(tmp_path / "x.repro.pt"), "--as", "repro", "-o", str(tmp_path / "repro.py")]) == 0
    assert "warning: the script runs the check in `check.py` beside it: read that file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, about tensors that nobody makes but a forger
def test_fields_filled_at_random(tmp_path: Path) -> None:
    strangers = import_benchmark("strangers")
    seeds = strangers.make_seeds(tmp_path / "seeds", is_quick=True)
    for name, content in seeds.items():
        torch.save(content, tmp_path / "begun.pt")
        (load_reduction if "/" in name else load)(tmp_path / "begun.pt")
    numbers = [f"test-{number}" for number in range(40)]
    numbers += [f"{strangers.FORGED}test-{number}" for number in range(0, len(strangers.WAYS), 2)]
    found = strangers.try_all(seeds, numbers, tmp_path)
    assert dict(found.first) == {}
    assert found.files == len(numbers) and found.accepted > 25 and found.commands > 100


def test_what_filled_fields_would_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strangers = import_benchmark("strangers")
    save(snapshot_of(masked_softmax()), tmp_path / "x.repro.pt")
    content = read_file(tmp_path / "x.repro.pt", "snapshot")
    content["failure"] = {**content["failure"], "kind": "mismatch", "way": "fp64", "value": 77}
    monkeypatch.setattr("reprokit.snapshot.format.require_consistent", lambda step: None)
    monkeypatch.setattr(strangers, "filled", lambda seeds, seed: ("x.repro.pt", content))
    commands = {"show json": ("--json",), "render repro": ("--as", "repro"), "verify": ("--times", "1")}
    monkeypatch.setattr(strangers, "COMMANDS", commands)
    monkeypatch.setattr(strangers, "NUM_COMMANDS", 2)
    found = strangers.try_all({"x.repro.pt": content}, ["0"], tmp_path)
    assert any("KeyError" in kind for kind in found.kinds)
