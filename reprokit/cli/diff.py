"""``reprokit diff``: two runs that should agree, and the first call that was given the same and made something else."""

from __future__ import annotations

import json as json_format
import math
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import reprokit
from reprokit.cli import console
from reprokit.cli.timeline import rows_in
from reprokit.errors import ReprokitError, UsageError
from reprokit.words import counted, listed

if TYPE_CHECKING:
    from reprokit.compare.runs import Comparison
    from reprokit.program.ir import Call, Phase
    from reprokit.snapshot.format import Snapshot

EQUAL, ROUNDING, DIFFERENT = "equal", "rounding", "different"
IMPOSSIBLE, UNSEEN = "cannot be run", "not replayed"
_VERDICTS = {
    EQUAL: "the runs agree in all bits",
    ROUNDING: "the runs differ by rounding",
    DIFFERENT: "the runs differ",
    UNSEEN: "the replays agree, and are not as in training",
}
DEFAULT_SECONDS = 600.0
_MOST = 5  # inputs, or calls of a part of a program, that are named
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_CHILD = """
import sys
if sys.version_info < (3, 11):
    sys.exit("this is Python %d.%d, and reprokit needs 3.11 or newer" % sys.version_info[:2])
sys.path.insert(0, sys.argv[1])
import torch
from reprokit.compare.runs import answer
from reprokit.snapshot.format import load
try:
    snapshot = load(sys.argv[2])
    answer(snapshot, snapshot.settings, sys.stdin.read(), sys.argv[3])
except Exception as error:
    while error.__cause__ is not None:  # a file that is whole here may name what another torch lacks
        error = error.__cause__
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    sys.exit(f"torch {torch.__version__}: {kind}{error}".splitlines()[0])
"""


@click.command("diff", short_help="Find the first call in which two runs part.")
@click.argument("first", type=console.PATH, metavar="FIRST")
@click.argument("second", type=console.PATH, metavar="[SECOND]", required=False)
@click.option("--python", multiple=True, metavar="PATH", help="Run the step with this Python, with another torch.")
@click.option("--dtype", multiple=True, type=click.Choice(_DTYPES), help="Run the step in this format.")
@click.option("--device", multiple=True, type=click.Choice(("cpu", "cuda")), help="Run the step on this device.")
@click.option(
    "--compile", "compilers", multiple=True, metavar="BACKEND|FILE.py:FUNCTION", help="Run the step compiled."
)
@click.option("-o", "--output", type=console.PATH, metavar="FILE", help="Save the difference for `reprokit shrink`.")
@click.option("-f", "--force", is_flag=True, help="Overwrite FILE.")
@console.max_time_option(DEFAULT_SECONDS, "Stop after S seconds.")
@console.planned
def command(
    first: Path,
    second: Path | None,
    python: tuple[str, ...],
    dtype: tuple[str, ...],
    device: tuple[str, ...],
    compilers: tuple[str, ...],
    output: Path | None,
    force: bool,
    max_time: float,
    json: bool,
    verbosity: console.Verbosity,
) -> int:
    """Compare the same step of two runs, saved by `reprokit capture --at-step N`, or the numbers of two runs.

    FIRST alone is run again here, and compared with what was recorded; with --python, --dtype, --device or --compile
    with a run in that way. The exit code is 1 if they differ by more than rounding.
    """
    options = {"python": python, "dtype": dtype, "device": device, "compile": compilers}
    ways = [(kind, value) for kind, values in options.items() for value in values]
    if second is not None and ways:
        raise UsageError("two files are compared as they are", hint="leave out SECOND, or the other ways to run")
    is_log, *is_other = (
        file.name.removesuffix(".1").endswith(".jsonl") for file in (first, second) if file is not None
    )
    if (is_log and (not is_other or output is not None)) or is_log not in (is_other or [is_log]):
        hint = "name two .jsonl files and no -o, or snapshots only"
        raise UsageError("numbers of a run are compared with those of another, and hold no step", hint=hint)
    if output is not None:
        console.check_file(output, overwrite=force)
    with console.deadline(max_time, f"--max-time {2 * max_time:g} waits longer"):
        from reprokit.snapshot.format import load

        if is_log and second is not None:
            found = [_of_logs(rows_in(first), rows_in(second), first, second)]
        else:
            snapshot = load(first)
            if second is not None:
                other = load(second)
                found = [_as_trained(_of_files(snapshot, other), {first: snapshot, second: other})]
            else:
                found = [_in_way(first, snapshot, *way) for way in ways]
                found = found or [_as_trained(_as_recorded(snapshot), {first: snapshot})]
            if output is not None:
                _save(snapshot, found, output)
    if json:
        plain = [{key: item for key, item in row.items() if key != "comparison"} for row in found]
        console.print_json({"schema": 1, "rows": plain})
    for row in found:
        verdict = _VERDICTS.get(row["verdict"], row["verdict"])
        console.say(f"{row['with']}: {verdict}" if row["with"] else verdict, verbosity)
        for line in row["lines"]:
            console.say(f"  {line}", verbosity)
    verdicts = {row["verdict"] for row in found}
    return 1 if DIFFERENT in verdicts else 2 * bool(verdicts & {IMPOSSIBLE, UNSEEN})


def _row(name: str, verdict: str, lines: list[str], **more: Any) -> dict[str, Any]:
    return {"with": name, "verdict": verdict, "lines": lines, **more}


def _as_trained(row: dict[str, Any], files: Mapping[Path, Snapshot]) -> dict[str, Any]:
    """A row of what was replayed, with the files whose replay is not as in training, as that of compiled code."""
    unlike = {path: snapshot for path, snapshot in files.items() if snapshot.fidelity != "exact"}
    for path, snapshot in unlike.items():
        backends = snapshot.settings.compilers
        more = f"; its calls beside compiled ones: `reprokit diff {path} --compile {backends[0]}`" if backends else ""
        row["lines"].append(f"the replay of {path.name} is {snapshot.fidelity}: {snapshot.fidelity_note}{more}")
    losses = [[step.loss for step in snapshot.timeline if step.step == snapshot.step] for snapshot in files.values()]
    is_explained = len(losses) == 2 and str(losses[0]) == str(losses[1])  # as words, in which a NaN is equal to itself
    is_unseen = unlike and not is_explained and row["verdict"] in (EQUAL, ROUNDING)
    return {**row, "verdict": UNSEEN} if is_unseen else row


def _save(snapshot: Snapshot, rows: list[dict[str, Any]], output: Path) -> None:
    """Write the first difference as a step that `reprokit shrink` reduces, if it shows when it is run."""
    from reprokit.compare.difference import Difference, compare
    from reprokit.compare.runs import beside
    from reprokit.shrink.checks.mismatch import OtherWay
    from reprokit.snapshot.format import save

    row = next((row for row in rows if row["verdict"] == DIFFERENT), rows[0])
    comparison: Comparison | None = row.get("comparison")
    is_recorded = row["with"].startswith("--python")
    made = beside(comparison, is_recorded=is_recorded) if comparison is not None else None
    if made is None:
        is_rounding = row["verdict"] in (EQUAL, ROUNDING)
        reason = "the runs do not differ by more than rounding" if is_rounding else "its first different call is none"
        reason += "" if is_rounding else " of a forward pass whose result can be made in both ways from the same inputs"
        row["lines"].append(f"not saved: {reason}")
    elif not isinstance(compare(made[0], OtherWay()), Difference):
        row["lines"].append("not saved: the difference is within the tolerances of `torch.testing.assert_close`")
    else:
        (step, failure), fields = made, ("layers", "before", "cause", "samples", "recorded", "digests")
        left_out: dict[str, Any] = dict.fromkeys(fields)
        save(replace(snapshot, program=step.program, tensors=dict(step.tensors), failure=failure, **left_out), output)
        row["lines"].append(f"saved -> {output}; next: reprokit shrink {output}")


# -- files -----------------------------------------------------------------------------------------------------------


def _of_files(one: Snapshot, other: Snapshot) -> dict[str, Any]:
    from reprokit.compare.runs import Comparison
    from reprokit.program.interpreter import determinism

    with determinism(other.settings):
        found = Comparison.of(one, other, max(one.step, other.step))
    if not any(item.role != "rng" and found.walk.has(item.value) for item in other.program.inputs):
        hint = "save the same step of both runs, with `reprokit capture --at-step N`"
        raise UsageError("the two files have no input in common: they are steps of different programs", hint=hint)
    row = _beside_recorded(one, other, found)
    if found.inputs:
        more = [f"and {len(found.inputs) - _MOST} more"] if len(found.inputs) > _MOST else []
        inputs = [
            f"`{item.name}` ({item.role}): {item.words}"
            for item in sorted(found.inputs, key=lambda item: item.is_rounding)[:_MOST]
        ]
        steps = f" (step {one.step} and step {other.step})" if one.step != other.step else ""
        is_rounding = all(item.is_rounding for item in found.inputs)
        what = "what the step is given differs" + (
            " by rounding in each step before" if is_rounding else ", before any call"
        )
        row["lines"] = [f"{what}{steps}:", *inputs, *more, *_since(one, other), "from the same inputs:", *row["lines"]]
        row["verdict"] = max(
            row["verdict"], ROUNDING if is_rounding else DIFFERENT, key=[EQUAL, ROUNDING, DIFFERENT].index
        )
        row["inputs"] = [{"name": i.name, "role": i.role, "words": i.words} for i in found.inputs]
    return row


def _beside_recorded(one: Snapshot, other: Snapshot, found: Comparison) -> dict[str, Any]:
    """The row of two runs, by what was recorded if they differ there only."""
    from reprokit.compare.runs import first_other_digest

    here, recorded = (found.one.digests, found.other.digests), (one.digests, other.digests)
    if one.digests and other.digests and here != recorded and not found.inputs:
        alike = {at: before for at, before in found.walk.calls.items() if here[0][before] == here[1][at]}
        there = first_other_digest(other.program, one.digests, other.digests, alike)
        if there is not None:
            note = "run here, both make the same of it; by how much they differ: `reprokit diff FILE --python PATH`"
            return _recorded(other.program.calls[there[0]], there[1], one.environment, other.environment, note)
    return _described("", found)


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


def _as_recorded(snapshot: Snapshot) -> dict[str, Any]:
    from reprokit.compare.runs import Run, first_other_digest
    from reprokit.program.interpreter import determinism
    from reprokit.snapshot.environment import collect_environment

    if snapshot.digests is None or len(snapshot.digests) != len(snapshot.program.calls):
        raise ReprokitError(
            "the file does not hold what its calls made where it was captured",
            hint="capture it with this version of reprokit, or give a second file",
        )
    with determinism(snapshot.settings):
        here = Run.of(snapshot).digests
    found = first_other_digest(snapshot.program, snapshot.digests, here, {n: n for n in range(len(here))})
    if found is None:
        return _row("", EQUAL, [f"all {counted(len(here), 'call')} make the bits that were recorded"])
    more = "by how much: `--python PATH`, with the Python that the file was captured with"
    environments = snapshot.environment, collect_environment(0.0)
    return _recorded(snapshot.program.calls[found[0]], found[1], *environments, more)


def _recorded(call: Call, phase: Phase, one: Any, other: Any, more: str) -> dict[str, Any]:
    """The row of a call that made other bits where it was recorded, with what differs between two environments."""
    given = "what it was given is equal in all bits" if phase == "forward" else f"in the {phase} pass"
    lines = [f"first different call as recorded: {_call_words(call)}: {given}, and its result is not"]
    names = ("torch", "python", "platform", "machine", "cuda", "devices")
    pairs = ((name, getattr(one, name), getattr(other, name)) for name in names)
    words = [f"{name} {before or 'unknown'} -> {now or 'unknown'}" for name, before, now in pairs if before != now]
    lines += [f"environments: {', '.join(words)}"] if words else []
    return _row("", DIFFERENT, [*lines, more], **_place(call), phase=str(phase))


# -- one step in other ways ------------------------------------------------------------------------------------------


def _in_way(path: Path, snapshot: Snapshot, kind: str, value: str) -> dict[str, Any]:
    """The row of a step beside itself in another way; an error of that way is its row."""
    from reprokit.whatif import one_line

    name = f"--{kind} {value}"
    try:
        if kind == "compile":
            return _compiled(name, snapshot, value)
        if kind == "python":
            found, version = _in_python(path, snapshot, value)
            return _described(f"{name} (torch {version})", found)
        return _described(name, _converted(snapshot, kind, value))
    except UsageError:
        raise
    except Exception as error:  # what cannot be converted, compiled or moved fails in as many ways
        return _row(name, IMPOSSIBLE, [str(error) if isinstance(error, ReprokitError) else one_line(error)])


def _converted(snapshot: Snapshot, kind: str, value: str) -> Comparison:
    import torch

    from reprokit.compare.runs import Comparison, Run
    from reprokit.program.convert import default_dtype, in_dtype, on_device
    from reprokit.program.interpreter import determinism

    if value == "cuda" and not torch.cuda.is_available():
        raise ReprokitError("torch sees no GPU")
    with determinism(snapshot.settings):
        one = Run.of(snapshot)
        if kind == "device":
            return Comparison.of_runs(one, Run.of(on_device(snapshot, value), snapshot.tensors))
        dtype = getattr(torch, value)
        with default_dtype(dtype):
            return Comparison.of_runs(one, Run.of(in_dtype(snapshot, dtype), snapshot.tensors))


def _compiled(name: str, snapshot: Snapshot, backend: str) -> dict[str, Any]:
    from reprokit.compare.compiled import Compiled
    from reprokit.compare.difference import first_difference
    from reprokit.shrink import spec

    check = spec.parse(f"mismatch:compile:{backend}")
    found = first_difference(snapshot, Compiled(check.option, check.file.resolve() if check.file is not None else None))
    if found is None:
        return _row(name, ROUNDING, ["no result differs by more than the tolerances of `torch.testing.assert_close`"])
    call = snapshot.program.calls[found.call_index] if found.call_index is not None else None
    where = _call_words(call) if call is not None else "only the whole step shows it"
    lines = [f"first different call: {where}: {found.num_bad:,} of {found.num_elements:,} elements differ"]
    lines.append(f"to reduce it: `reprokit shrink FILE --check {check.text}`")
    return _row(name, DIFFERENT, lines, **(_place(call) if call is not None else {}))


def _in_python(path: Path, snapshot: Snapshot, python: str) -> tuple[Comparison, str]:
    """The comparison with the run of another Python, and its version of torch."""
    import torch

    from reprokit.compare.runs import Comparison, Imprint, Run, Version
    from reprokit.program.interpreter import determinism
    from reprokit.program.step import Step

    with tempfile.TemporaryDirectory(prefix="reprokit-diff-") as folder, determinism(snapshot.settings):
        package, written = Path(folder, "package"), Path(folder, "run.pt")
        package.mkdir()
        (package / "reprokit").symlink_to(Path(reprokit.__file__).parent)  # and nothing else of this environment
        words = [python, "-c", _CHILD, str(package), str(path.resolve()), str(written)]

        def ask(places: Collection[Version]) -> Any:
            written.unlink(missing_ok=True)
            asked = json_format.dumps([*places])
            try:
                done = subprocess.run(words, input=asked, capture_output=True, text=True, check=False, cwd=folder)
            except OSError as error:
                raise ReprokitError(f"`{python}` cannot be started: {error.strerror}") from error
            if not written.exists():
                said = done.stderr.strip().splitlines() if done.returncode > 0 else []
                raise ReprokitError((said or [f"it ended with {done.returncode}"])[-1])
            with torch.serialization.safe_globals([Imprint, Version]):
                return torch.load(written, weights_only=True)

        step, (version, made) = Step.of(snapshot), ask([])
        there = Run(step, step, *made)
        there.ask = lambda places: ask(places)[2:]
        return Comparison.of_runs(Run.of(snapshot), there), version


# -- words -----------------------------------------------------------------------------------------------------------


def _described(name: str, found: Comparison) -> dict[str, Any]:
    """The row of a comparison whose inputs agree."""
    from reprokit.compare.runs import MOST_ELEMENTS

    errors, walk = (found.one.error, found.other.error), found.walk
    raised = [f"the {which} raises {error}" for which, error in zip(("first", "second"), errors, strict=True) if error]
    if errors[0] != errors[1] and name:
        return _row(name, IMPOSSIBLE, raised)
    end = [f"both raise {errors[0]}"] if errors[0] == errors[1] != "" else [*raised]
    end += [f"loss {walk.losses[0]:.9g} and {walk.losses[1]:.9g}"] if walk.losses is not None else []
    if walk.is_cut:
        end.append(f"the first {MOST_ELEMENTS:,} elements of larger tensors were compared, which 2 GiB have room for")
    changed = list(walk.alone())
    for which in ("first", "second"):
        names = [f"`{item.name}`" for side, item in changed if side == which]
        end += (
            [f"only the {which} changes {listed(names[:_MOST])}" + " and more" * (len(names) > _MOST)] if names else []
        )
    own = [(which, item.name) for which, item in changed if item.role != "batch"]
    there = {"first": found.other.step.program.inputs, "second": found.one.step.program.inputs}
    is_shared = any(item.name == name for which, name in own for item in there[which])
    is_merged = len({which for which, _ in own}) == 2 and not is_shared  # three linear layers are one
    end += ["which of these belong together is not known: they were not compared"] if is_merged else []
    halves = [{str(dtype).removeprefix("torch.") for dtype in found} for found in walk.formats]
    sides = (("first", halves[0] - halves[1]), ("second", halves[1] - halves[0]))
    formats = [f"only the {which} computes in {listed(sorted(only))}" for which, only in sides if only and not name]
    is_other = found.real is not None or errors[0] != errors[1] or (bool(own) and not is_merged)
    departure = found.real or found.first
    if departure is None:
        known = set(walk.calls.values())
        only = (
            [call for at, call in enumerate(found.one.calls) if at not in known],
            [call for at, call in enumerate(found.other.calls) if at not in walk.calls],
        )
        lines = [f"all {counted(len(walk.calls), 'call')} of both, their gradients and updates agree in all bits"]
        lines += [_only_words(*only)] if any(only) else []
        is_other = is_other or (any(only) and bool(raised))
        return _row(name, DIFFERENT if is_other else EQUAL, [*formats, *lines, *end])
    gap, lines = departure.gap, [f"first different call: {_call_words(departure.call)}: {departure.words}"]
    if found.real is not None and gap.num_bad and gap.dtype:
        lines.insert(0, f"beyond what {gap.dtype} explains: {gap.why}")
    elif found.real is None:
        inside = "what the step leaves agrees up to rounding, calls in between make other numbers"
        explained = f"within what {gap.dtype or 'the format'} explains: in float64 they agree"
        lines.insert(0, inside if gap.why else explained)
    who = "it" if departure.called is departure.call else _call_words(departure.called)
    lines += [f"{who} is called with {departure.settings}"] if departure.settings else []
    lines += [_only_words(*departure.only)] if any(departure.only) else []
    if found.real is not None and found.first is not None and found.first.call is not found.real.call:
        lines.append(f"rounding differs before, first in {_call_words(found.first.call)}: {found.first.gap.words}")
    numbers = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(gap).items()}
    more = {**_place(departure.call), "phase": str(departure.phase), "gap": numbers, "settings": departure.settings}
    verdict = DIFFERENT if is_other else ROUNDING
    return _row(name, verdict, [*formats, *lines, *end], **more, comparison=found)


def _only_words(first: list[Call], second: list[Call]) -> str:
    return f"only the first has {_calls_words(first)}; only the second has {_calls_words(second)}"


def _calls_words(calls: list[Call]) -> str:
    names = list(dict.fromkeys(f"`{call.name}`" for call in calls))
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    site = f" ({calls[0].site.place})" if calls and calls[0].site is not None else ""
    return listed(names[:_MOST]) + more + site if calls else "no call there"


def _call_words(call: Call) -> str:
    found = _place(call)
    where = f" in `{found['module']}`" if found["module"] else ""
    return f"`{found['call']}`{where}" + (f", {found['site']}" if found["site"] else "")


def _place(call: Call) -> dict[str, Any]:
    from reprokit.locate.failure import module_of
    from reprokit.program.functions import display_name

    site = call.site.place if call.site is not None else None
    return {"call": display_name(call.target), "module": module_of(call), "site": site}


# -- numbers of runs -------------------------------------------------------------------------------------------------

_COMPARED = ("loss", "grad_norm", "update", "weight_norm")
Numbers = Mapping[str, Any]


def _of_logs(one: list[Numbers], other: list[Numbers], first: Path, second: Path) -> dict[str, Any]:
    """The first step of two runs whose loss or norm differs in any bit."""
    rows = [{(row["step"], row.get("optimizer")): row for row in side} for side in (one, other)]
    shared = [(rows[0][key], row) for key, row in rows[1].items() if key in rows[0]]
    names = [{name for pair in shared for name in pair[n] if name.startswith(_COMPARED)} for n in (0, 1)]
    compared = names[0] & names[1]
    if not compared:
        what = "loss and no norm" if shared else "step"
        raise UsageError(f"the two files have no {what} in common", hint="measure the same steps, with `--record N`")
    sides = ("first", names[0] - compared, len(rows[0])), ("second", names[1] - compared, len(rows[1]))
    more = [f"only the {which} has {listed(sorted(found))}" for which, found, _ in sides if found]
    steps = counted(len(shared), "step")
    more += [f"the {which} has {n:,} steps, {steps} are in both" for which, _, n in sides if n > len(shared)]
    for before, row in shared:
        both = (name for name in row if name in compared and name in before)
        name = next((name for name in both if not _is_same(before[name], row[name])), None)
        if name is not None:
            step = int(row["step"])
            words = f"step {step} is the first that differs: {name} {before[name]!r} and {row[name]!r}"
            at = f"{step - 1},{step}" if step else "0"
            stems = [str(path).removesuffix(".1").removesuffix(".jsonl") for path in (first, second)]
            save = [f"reprokit capture --at-step {at} -o {stem}.pt train.py ARGS of that run" for stem in stems]
            save.append(f"reprokit diff {' '.join(f'{stem}-step{step}.pt' for stem in stems)}")
            return _row("", DIFFERENT, [words, *save, *more], step=step, number=name)
    return _row("", EQUAL, [f"{listed(sorted(compared))} of {steps} agree in all bits", *more])


def _is_same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
