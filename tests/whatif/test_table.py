"""The table: every variant apart from this process, within its budget, as plain data that a reduction keeps."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from reprokit import whatif as table
from reprokit.cli import main
from reprokit.grammar import read
from reprokit.program.interpreter import Settings
from reprokit.program.step import Step
from reprokit.render.findings import WORDS
from reprokit.shrink import reduction as reductions
from reprokit.shrink.checks.check import Signed
from reprokit.shrink.reduction import Reduction, Size, WhatIfResult
from reprokit.snapshot.format import Snapshot, read_file, save, write_file
from reprokit.whatif import AS_IT_IS, BY_KEY, VARIANTS, Variant
from tests.shrink import failing

QUICK = [variant for variant in VARIANTS if not variant.is_slow]


def subjects(snapshot: Snapshot) -> table.Subjects:
    whole = Step.of(snapshot)
    return {"snapshot": (whole, table.check_of(whole, snapshot.failure, None, None))}


def reduction_of(snapshot: Snapshot) -> Reduction:
    return Reduction(
        snapshot.program,
        snapshot.tensors,
        snapshot.failure,
        Size(snapshot.program.num_calls, snapshot.num_elements),
        Signed(snapshot.failure.phase, snapshot.failure.kind, snapshot.failure.call),
    )


def answers(made: WhatIfResult, name: str = "snapshot") -> dict[str, str]:
    return {row.variant: row.answer for row in (made.tables or {})[name]}


def without_slow_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = table.make_table
    monkeypatch.setattr(table, "make_table", lambda *words, **named: whole(*words, variants=QUICK, **named))


def test_what_the_budget_does_not_reach_says_so() -> None:
    made = table.make_table(subjects(failing.masked_softmax()), Settings(), 0.01)
    assert set(answers(made).values()) == {"cannot_run"}
    assert {row.detail for row in made.tables["snapshot"]} == {"not done within the 0.01 s for this table"}


def hang(candidate: Step) -> Step:
    while True:
        pass


def crash(candidate: Step) -> Step:
    os.abort()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="variants made here reach forked processes only")
def test_a_crash_and_a_hang_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Variant("crash", "crash", crash), Variant("hang", "hang", hang)
    for variant in bad:
        monkeypatch.setitem(BY_KEY, variant.key, variant)
    made = table.make_table(subjects(failing.masked_softmax()), Settings(), 300.0, [bad[0], BY_KEY[AS_IT_IS]])
    assert answers(made) == {"crash": "other", AS_IT_IS: "same"}
    assert "SIGABRT" in made.tables["snapshot"][0].detail
    (row,) = table.make_table(subjects(failing.masked_softmax()), Settings(), 0.5, [bad[1]]).tables["snapshot"]
    assert (row.answer, row.detail) == ("cannot_run", "not done within the 0.5 s for this table")


def test_a_reduction_has_its_minimum_and_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_variants(monkeypatch)
    reduction = reduction_of(failing.half_linear_overflow())
    assert set(table.of_reduction(reduction, Settings(), seconds=300.0).tables) == {"minimum"}
    context = failing.masked_softmax()
    reduction = replace(reduction, context=context)  # type: ignore[arg-type]
    made = table.of_reduction(reduction, Settings(), seconds=300.0)
    assert answers(made, "minimum")["float32"] == "passes"
    assert answers(made, "context")["float32"] == "same"


def children() -> set[str]:
    """The processes that this one has started and not waited for."""
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


def test_a_reduction_keeps_its_table(tmp_path: Path) -> None:
    reduction = reduction_of(failing.masked_softmax())
    made = table.make_table(subjects(failing.masked_softmax()), Settings(), 0.01)
    reduction = replace(reduction, whatif=made)
    reduction.save(tmp_path / "reduction.pt")
    assert reductions.load(tmp_path / "reduction.pt").whatif == reduction.whatif
    content = read_file(tmp_path / "reduction.pt", reductions.KIND)
    del content["whatif"]
    write_file(tmp_path / "old.pt", reductions.KIND, content)
    assert reductions.load(tmp_path / "old.pt").whatif == WhatIfResult()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    without_slow_variants(monkeypatch)
    save(failing.masked_softmax(), tmp_path / "x.repro.pt")
    assert main(["whatif", str(tmp_path / "x.repro.pt"), "--json"]) == 0
    said = capsys.readouterr()
    table_said = {name: part for name, part in json.loads(said.out).items() if name != "schema"}
    assert answers(read(WhatIfResult, table_said))["float64"] == "same"
    rows = table_said["tables"]["snapshot"]
    assert [line.partition(": ")[2] for line in said.err.splitlines()[: len(rows)]] == [
        f"snapshot, {row['name'].replace('`', '')}: {WORDS[row['answer']]}" for row in rows
    ]
    assert main(["whatif", str(tmp_path / "x.repro.pt"), "--keep"]) == 2
    reduction_of(failing.masked_softmax()).save(tmp_path / "reduction.pt")
    capsys.readouterr()
    assert main(["whatif", "-q", str(tmp_path), "--keep"]) == 0
    assert capsys.readouterr().err == ""
    assert answers(reductions.load(tmp_path / "reduction.pt").whatif, "minimum")["as_it_is"] == "same"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="variants made here reach forked processes only")
def test_an_answer_is_told_before_the_next_variant_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_a_mark(candidate: Step) -> Step:
        (tmp_path / "ran").touch()
        return candidate

    marked = Variant("mark", "mark", leave_a_mark)
    monkeypatch.setitem(BY_KEY, marked.key, marked)
    told: list[tuple[str, bool]] = []
    table.make_table(
        subjects(failing.masked_softmax()),
        Settings(),
        300.0,
        [BY_KEY[AS_IT_IS], marked],
        on_trial=lambda program, variant, trial: told.append((variant.key, (tmp_path / "ran").exists())),
    )
    assert told == [(AS_IT_IS, False), ("mark", True)]
