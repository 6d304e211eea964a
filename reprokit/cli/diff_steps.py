"""``reprokit diff`` of two snapshots of a step, and of one with what was recorded where it was captured.

What the steps are given comes first: if that differs, it is the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from reprokit.cli.diff_rows import (
    DIFFERENT,
    EQUAL,
    MOST_NAMED,
    ROUNDING,
    UNSEEN,
    DiffRow,
    call_words,
    described,
    place_of,
)
from reprokit.compare.departure import first_other_digest
from reprokit.compare.difference import Difference, compare
from reprokit.compare.imprints import Run
from reprokit.compare.runs import Comparison, beside
from reprokit.errors import ReprokitError, UsageError
from reprokit.program.interpreter import determinism
from reprokit.program.ir import Call, Phase
from reprokit.shrink.checks.mismatch import OtherWay
from reprokit.snapshot.environment import Environment, collect_environment
from reprokit.snapshot.format import Snapshot, save
from reprokit.words import counted

_ENVIRONMENT = ("torch", "python", "platform", "machine", "cuda", "devices")


def of_files(one: Snapshot, other: Snapshot) -> DiffRow:
    """The row of two snapshots."""
    with determinism(other.settings):
        found = Comparison.of(one, other, max(one.step, other.step))
    if not any(item.role != "rng" and found.places.has(item.value) for item in other.program.inputs):
        hint = "save the same step of both runs, with `reprokit capture --at-step N`"
        raise UsageError("the two files have no input in common: they are steps of different programs", hint=hint)
    row = _beside_recorded(one, other, found)
    if not found.inputs:
        return row
    is_rounding = all(item.is_rounding for item in found.inputs)
    given = _input_lines(one, other, found, is_rounding)
    lines = [*given, *_since(one, other), "from the same inputs:", *row.lines]
    verdict = max(row.verdict, ROUNDING if is_rounding else DIFFERENT, key=[EQUAL, ROUNDING, DIFFERENT].index)
    inputs = [{"name": item.name, "role": item.role, "words": item.words} for item in found.inputs]
    return replace(row, verdict=verdict, lines=lines, more={**row.more, "inputs": inputs})


def _input_lines(one: Snapshot, other: Snapshot, found: Comparison, is_rounding: bool) -> Iterator[str]:
    steps = f" (step {one.step} and step {other.step})" if one.step != other.step else ""
    when = " by rounding in each step before" if is_rounding else ", before any call"
    yield f"what the step is given differs{when}{steps}:"
    for item in sorted(found.inputs, key=lambda item: item.is_rounding)[:MOST_NAMED]:
        yield f"`{item.name}` ({item.role}): {item.words}"
    if len(found.inputs) > MOST_NAMED:
        yield f"and {len(found.inputs) - MOST_NAMED} more"


def _beside_recorded(one: Snapshot, other: Snapshot, found: Comparison) -> DiffRow:
    """The row of two runs, by what was recorded if they differ there only."""
    mine, others = found.one.digests, found.other.digests
    is_as_recorded = (mine, others) == (one.digests, other.digests)
    if one.digests and other.digests and not is_as_recorded and not found.inputs:
        alike = {index: before for index, before in found.places.calls.items() if mine[before] == others[index]}
        there = first_other_digest(other.program, one.digests, other.digests, alike)
        if there is not None:
            note = "run here, both make the same of it; by how much they differ: `reprokit diff FILE --python PATH`"
            return _recorded(other.program.calls[there[0]], there[1], one.environment, other.environment, note)
    return described("", found)


def _since(one: Snapshot, other: Snapshot) -> Iterator[str]:
    """The first step whose loss differs, of those that both files know."""
    sides: list[dict[int, list[str]]] = [{}, {}]
    for side, snapshot in zip(sides, (one, other), strict=True):
        for row in snapshot.timeline:  # one of each optimizer
            side.setdefault(row.step, []).append(str(row.loss))
    step = next((step for step, losses in sides[1].items() if sides[0].get(step, losses) != losses), None)
    if step is not None and step < other.step:
        at = f"{step - 1},{step}" if step else "0"
        yield f"their losses differ since step {step}: save that step of both with `reprokit capture --at-step {at}`"


def as_recorded(snapshot: Snapshot) -> DiffRow:
    """The row of a snapshot that is run here, beside what its calls made where it was captured."""
    if snapshot.digests is None or len(snapshot.digests) != len(snapshot.program.calls):
        raise ReprokitError(
            "the file does not hold what its calls made where it was captured",
            hint="capture it with this version of reprokit, or give a second file",
        )
    with determinism(snapshot.settings):
        here = Run.of(snapshot).digests
    found = first_other_digest(snapshot.program, snapshot.digests, here, {n: n for n in range(len(here))})
    if found is None:
        return DiffRow("", EQUAL, [f"all {counted(len(here), 'call')} make the bits that were recorded"])
    more = "by how much: `--python PATH`, with the Python that the file was captured with"
    return _recorded(snapshot.program.calls[found[0]], found[1], snapshot.environment, collect_environment(0.0), more)


def _recorded(call: Call, phase: Phase, one: Environment, other: Environment, more: str) -> DiffRow:
    """The row of a call that made other bits where it was recorded, with what differs between two environments."""
    given = "what it was given is equal in all bits" if phase == "forward" else f"in the {phase} pass"
    lines = [f"first different call as recorded: {call_words(call)}: {given}, and its result is not"]
    pairs = ((name, getattr(one, name), getattr(other, name)) for name in _ENVIRONMENT)
    words = [f"{name} {before or 'unknown'} -> {now or 'unknown'}" for name, before, now in pairs if before != now]
    if words:
        lines.append(f"environments: {', '.join(words)}")
    return DiffRow("", DIFFERENT, [*lines, more], {**place_of(call), "phase": str(phase)})


def as_trained(row: DiffRow, files: Mapping[Path, Snapshot]) -> DiffRow:
    """A row of what was replayed, with the files whose replay is not as in training, as that of compiled code."""
    unlike = {path: snapshot for path, snapshot in files.items() if snapshot.fidelity != "exact"}
    for path, snapshot in unlike.items():
        line = f"the replay of {path.name} is {snapshot.fidelity}: {snapshot.fidelity_note}"
        if snapshot.settings.compilers:
            backend = snapshot.settings.compilers[0]
            line += f"; its calls beside compiled ones: `reprokit diff {path} --compile {backend}`"
        row.lines.append(line)
    losses = [[step.loss for step in snapshot.timeline if step.step == snapshot.step] for snapshot in files.values()]
    is_explained = len(losses) == 2 and str(losses[0]) == str(losses[1])  # as words, in which a NaN is equal to itself
    is_unseen = unlike and not is_explained and row.verdict in (EQUAL, ROUNDING)
    return replace(row, verdict=UNSEEN) if is_unseen else row


def save_difference(snapshot: Snapshot, rows: list[DiffRow], output: Path) -> None:
    """Write the first difference as a step that `reprokit shrink` reduces, if it shows when it is run."""
    row = next((row for row in rows if row.verdict == DIFFERENT), rows[0])
    made = None
    if row.comparison is not None:
        made = beside(row.comparison, is_recorded=row.name.startswith("--python"))
    if made is None:
        row.lines.append(f"not saved: {_why_not_saved(row)}")
    elif not isinstance(compare(made[0], OtherWay()), Difference):
        row.lines.append("not saved: the difference is within the tolerances of `torch.testing.assert_close`")
    else:
        step, failure = made
        fields = ("layers", "before", "cause", "samples", "recorded", "digests")
        left_out: dict[str, Any] = dict.fromkeys(fields)
        save(replace(snapshot, program=step.program, tensors=dict(step.tensors), failure=failure, **left_out), output)
        row.lines.append(f"saved -> {output}; next: reprokit shrink {output}")


def _why_not_saved(row: DiffRow) -> str:
    if row.verdict in (EQUAL, ROUNDING):
        return "the runs do not differ by more than rounding"
    ways = "a forward pass whose result can be made in both ways from the same inputs"
    return f"its first different call is none of {ways}"
