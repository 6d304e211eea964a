"""Do both ways of watching give the same answer? Over generated training loops, and over a folder of scripts.

    OMP_NUM_THREADS=1 python benchmarks/agree.py [--loops N] [--seed N] [--corpus DIR [--case NAME ...]] [--json FILE]

Every generated loop (`generated.py`) is run in this process without capture, then under ``every-step`` and ``sampled``,
with copies at the default pace and at one that the loop names. The snapshots must have the same step,
failure, program and tensors, bit for bit; one that differs from that of ``every-step`` must not be ``exact`` and must
say what is doubtful. All runs must end with the bits of the run without capture, and the same loop with nothing planted
must capture nothing. The scripts of a corpus run through ``reprokit capture``. A table goes to stderr, a JSON summary
to stdout; the exit code is 1 if anything disagrees.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from command import JSON, find_cases, new_parser, print_json
from generated import Loop, Training, draw

import reprokit
from reprokit.capture import save as build_snapshot
from reprokit.program import plain
from reprokit.program.ir import Program, Ref, Scope, map_leaves
from reprokit.snapshot.format import Snapshot, load

Way = tuple[str, int | None]  # how the loop is watched, and the steps between copies (``None``: the default)
REFERENCE: Way = ("every-step", None)
SILENT = "nothing captured"
BROKEN = "; training goes on"  # the end of a message about an error of reprokit's own


@dataclass
class Ended:
    """A run that ended: its snapshot if there is one, what reprokit said, what the run left, what it planted and the
    phase of the failure that this led to."""

    snapshot: Snapshot | None
    said: str
    ending: list[torch.Tensor]
    planted: int | None
    phase: str | None


@dataclass
class Row:
    """One loop or script. ``answers`` has a line for each way, ``different`` what differs from ``every-step``.

    ``explained`` are the ways that differ and say why; ``untrue`` are those whose step or phase is not that of the
    planted fault; ``changed`` are those that ended with other bits than the run without capture; ``broken`` are those
    in which reprokit had an error of its own; ``alarmed`` are those that captured or said something where nothing was
    planted, or changed that run.
    """

    name: str
    loop: JSON = field(default_factory=dict)
    truth: str = ""
    answers: dict[str, str] = field(default_factory=dict)
    different: dict[str, list[str]] = field(default_factory=dict)
    explained: dict[str, str] = field(default_factory=dict)
    untrue: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    alarmed: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """True if every way gave the answer of ``every-step``, or said why not."""
        return not self.different

    @property
    def is_same(self) -> bool:
        """True if every way gave the answer of ``every-step``."""
        return not self.different and not self.explained


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 0 when everything agrees and nothing was changed."""
    options = _parse(argv)
    torch.set_num_threads(1)
    rows = [check_loop(number) for number in options.only or range(options.seed, options.seed + options.loops)]
    if options.corpus is not None:
        with tempfile.TemporaryDirectory(prefix="agree-") as scratch:
            for folder in find_cases(options, "train.py"):
                rows.append(check_script(folder, Path(scratch) / folder.name, options.timeout))
    if not rows:
        return 2
    summary = summarise(rows)
    print(table(rows), file=sys.stderr)
    print_json(summary, options.json)
    is_well = summary["agree"] == summary["runs"]
    return 0 if is_well and not any(summary[name] for name in ("changed", "broken", "alarmed")) else 1


def check_loop(number: int) -> Row:
    """The row of the loop with this number."""
    loop = draw(random.Random(number))
    row = compare_ways(str(number), loop)
    row.alarmed = alarms(loop.healthy)
    return row


def compare_ways(name: str, loop: Loop) -> Row:
    """Run a loop in every way and compare the answers."""
    bare = run(loop)
    row = Row(name, asdict(loop), _words_of_truth(bare.planted, bare.phase))
    ended = {words(way): run(loop, way) for way in ways(loop)}
    for way, done in ended.items():
        row.answers[way] = answer(done)
        if not _is_true(done.snapshot, bare.planted, bare.phase):
            row.untrue.append(way)
        if not same_endings(bare.ending, done.ending):
            row.changed.append(way)
        if BROKEN in done.said:
            row.broken.append(way)
    _compare_all(row, {way: done.snapshot for way, done in ended.items()})
    return row


def alarms(loop: Loop) -> list[str]:
    """The ways that capture something of a healthy loop, say something, or change its end."""
    bare = run(loop)
    found = []
    for way in ways(loop):
        done = run(loop, way)
        if done.snapshot is not None or done.said or not same_endings(bare.ending, done.ending):
            found.append(words(way))
    return found


def ways(loop: Loop) -> list[Way]:
    """The ways of watching that a loop is run in, the reference first."""
    paced: list[Way] = [] if loop.history is None else [("sampled", loop.history)]
    return [REFERENCE, ("sampled", None), *paced]


def words(way: Way) -> str:
    """A way of watching as it is printed."""
    return way[0] if way[1] is None else f"{way[0]}/{way[1]}"


# -- running -----------------------------------------------------------------------------------------------------


def run(loop: Loop, way: Way | None = None) -> Ended:
    """Run a loop to its end, watched in one way or, with ``None``, not at all."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="agree-") as folder, warnings.catch_warnings(), _environment_once():
        warnings.simplefilter("ignore")
        training = Training(loop)
        path = Path(folder) / "failed.pt"
        with contextlib.redirect_stderr(said), contextlib.suppress(Exception), _watching(path, way):
            training.run()
        snapshot = load(path) if path.exists() else None
        return Ended(snapshot, said.getvalue(), training.ending(), training.planted, training.phase)


def _watching(path: Path, way: Way | None) -> contextlib.AbstractContextManager[Any]:
    if way is None:
        return contextlib.nullcontext()
    watch: Any = way[0]
    return reprokit.capture(path, watch=watch, history=way[1], after="continue", quiet=True)


@contextlib.contextmanager
def _environment_once() -> Iterator[None]:
    """Describe the environment once for all runs: it is the same, and takes longer than everything else."""
    original = build_snapshot.collect_environment
    build_snapshot.collect_environment = _environment
    try:
        yield
    finally:
        build_snapshot.collect_environment = original


_environment = functools.cache(build_snapshot.collect_environment)


def check_script(folder: Path, work: Path, timeout: float) -> Row:
    """The row of one script of a corpus, run through the public command."""
    snapshots = {}
    row = Row(folder.name)
    for way in (REFERENCE, ("sampled", None)):
        shutil.copytree(folder, work / way[0])
        command = ["capture", "--quiet", "--watch", way[0], "-o", "failed.pt", "train.py"]
        done = subprocess.run(
            [sys.executable, "-m", "reprokit", *command],
            cwd=work / way[0],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        path = work / way[0] / "failed.pt"
        snapshots[words(way)] = load(path) if path.exists() else None
        row.answers[words(way)] = answer(Ended(snapshots[words(way)], done.stderr, [], None, None))
    _compare_all(row, snapshots)
    return row


# -- comparing ---------------------------------------------------------------------------------------------------


def _compare_all(row: Row, snapshots: Mapping[str, Snapshot | None]) -> None:
    reference = snapshots[words(REFERENCE)]
    for way, snapshot in snapshots.items():
        found = differences(reference, snapshot)
        if found and snapshot is not None and snapshot.fidelity != "exact" and snapshot.fidelity_note:
            row.explained[way] = f"{', '.join(found)}: {snapshot.fidelity_note}"
        elif found:
            row.different[way] = found


def differences(first: Snapshot | None, second: Snapshot | None) -> list[str]:
    """The differences between two snapshots as text."""
    if first is None or second is None:
        return [] if first is second else ["captured"]
    one, other = _Plain(first), _Plain(second)
    found = [name for name in one.failure if one.failure[name] != other.failure[name]]
    found += ["program"] if one.program != other.program else []
    unlike = one.differing(other)
    return found + ([f"{len(unlike)} tensors ({', '.join(unlike[:3])})"] if unlike else [])


class _Plain:
    """A snapshot for comparison: values and roots numbered in the order in which they are read, inputs nameless."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._numbers: dict[int, int] = {}
        self._roots: dict[str, str] = {"": ""}
        program = self._renumbered(snapshot.program)
        described = plain.to_plain(program)
        described["inputs"] = sorted([value, role, grad] for value, _, role, grad in described["inputs"])
        self.program = repr(described)  # as text, in which a NaN is equal to itself
        self.tensors = {self._number(value): tensor for value, tensor in snapshot.tensors.items()}
        self._names = {item.value: item.name for item in program.inputs}
        failure = asdict(snapshot.failure)
        failure["value"] = None if failure["value"] is None else self._number(failure["value"])
        failure.pop("input_name")
        self.failure = {"step": snapshot.step, "micro_step": snapshot.micro_step, **failure}

    def _number(self, value: int) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _renumbered(self, program: Program) -> Program:
        def change(leaf: Any) -> Any:
            return Ref(self._number(leaf.value)) if isinstance(leaf, Ref) else leaf

        calls, labels = [], {}
        for call in program.calls:
            args, kwargs = map_leaves(call.args, change), map_leaves(call.kwargs, change)
            mode = replace(call.mode, rng=change(call.mode.rng))
            outputs, scope = map_leaves(call.outputs, change), tuple(map(self._unnamed, call.scope))
            labels.update((old.label, new.label) for old, new in zip(call.scope, scope, strict=True))
            calls.append(replace(call, args=args, kwargs=kwargs, mode=mode, outputs=outputs, scope=scope))
        inputs = tuple(replace(item, value=self._number(item.value)) for item in program.inputs)
        modules = {labels.get(label, label): note for label, note in program.modules.items()}
        outputs = map_leaves(program.outputs, change)
        return replace(program, calls=tuple(calls), inputs=inputs, outputs=outputs, modules=modules)

    def _unnamed(self, level: Scope) -> Scope:
        """A level of module nesting without the name of a variable, which is gone when its function has returned."""
        return replace(level, root=self._roots.setdefault(level.root, f"root {len(self._roots)}"))

    def differing(self, other: _Plain) -> list[str]:
        """The names of the tensors that are not the same in another snapshot."""
        numbers = sorted(self.tensors.keys() | other.tensors.keys())
        return [
            self._names.get(number, str(number))
            for number in numbers
            if not same_bytes(self.tensors.get(number), other.tensors.get(number))
        ]


def same_bytes(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """True if two tensors agree in shape, dtype and every bit."""
    if first is None or second is None or first.shape != second.shape or first.dtype != second.dtype:
        return first is second
    one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(one, other)


def same_endings(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """True if two runs left the same bits."""
    return len(first) == len(second) and all(map(same_bytes, first, second))


def answer(done: Ended) -> str:
    """The result of one watch mode in a line."""
    snapshot = done.snapshot
    if snapshot is None:
        return f"{SILENT}{f' ({done.said.strip()})' if done.said else ''}"
    failure = snapshot.failure
    origin = failure.call or (f"input {failure.input_name}" if failure.input_name else "no origin")
    place = f"step {snapshot.step}.{snapshot.micro_step} {failure.phase} {failure.kind} {origin} in {failure.module}"
    note = f" ({snapshot.fidelity_note})" if snapshot.fidelity_note else ""
    return f"{place}, seen at {snapshot.observed_at}, {snapshot.fidelity}{note}"


def _is_true(snapshot: Snapshot | None, planted: int | None, phase: str | None) -> bool:
    if planted is None or phase is None:
        return snapshot is None
    return snapshot is not None and (snapshot.step, snapshot.failure.phase) == (planted, phase)


def _words_of_truth(planted: int | None, phase: str | None) -> str:
    return "nothing" if planted is None or phase is None else f"step {planted} {phase}"


# -- reporting ---------------------------------------------------------------------------------------------------


def summarise(rows: Sequence[Row]) -> JSON:
    """Counts and all rows."""
    generated = [row for row in rows if row.loop]
    return {
        "runs": len(rows),
        "loops": len(generated),
        "agree": sum(row.agrees for row in rows),
        "same": sum(row.is_same for row in rows),
        "captured": sum(any(SILENT not in line for line in row.answers.values()) for row in rows),
        "exact": sum(line.endswith(", exact") for row in rows for line in row.answers.values()),
        "answers": sum(len(row.answers) for row in rows),
        "disagree": [row.name for row in rows if not row.agrees],
        "explained": [row.name for row in rows if row.explained],
        "true": sum(not row.untrue for row in generated),
        "untrue": [row.name for row in generated if row.untrue],
        "changed": [row.name for row in generated if row.changed],
        "broken": [row.name for row in generated if row.broken],
        "alarmed": [row.name for row in generated if row.alarmed],
        "faults": dict(Counter(row.loop["fault"] for row in generated)),
        "rows": [asdict(row) for row in rows],
    }


def table(rows: Sequence[Row]) -> str:
    """The rows that are not all well, and a line of counts."""
    lines = []
    for row in rows:
        problems = [f"{way} differs in {', '.join(found)}" for way, found in row.different.items()]
        problems += [f"{way} explains {text}" for way, text in row.explained.items()]
        others = {name: getattr(row, name) for name in ("untrue", "changed", "broken", "alarmed")}
        problems += [f"{name}: {', '.join(found)}" for name, found in others.items() if found]
        if problems:
            plain_loop = asdict(Loop())
            features = ", ".join(f"{key}={value}" for key, value in row.loop.items() if value != plain_loop[key])
            lines.append(f"{row.name}: {row.truth or 'script'} [{features}]")
            lines += [f"  {way:12} {line}" for way, line in row.answers.items()]
            lines += [f"  ! {problem}" for problem in problems]
    summary = summarise(rows)
    lines.append(
        f"{summary['agree']} of {summary['runs']} agree ({summary['same']} the same in every bit), "
        f"{summary['true']} of {summary['loops']} true, {len(summary['changed'])} changed, "
        f"{len(summary['broken'])} broken, {len(summary['alarmed'])} false alarms; "
        f"{summary['exact']} of {summary['answers']} answers exact"
    )
    return "\n".join(lines)


def _parse(argv: Sequence[str] | None) -> Any:
    parser = new_parser(__doc__)
    parser.add_argument("--loops", type=int, default=200, help="generated loops (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first loop (default 0)")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="only the loops with these numbers")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="also the scripts of this folder")
    parser.add_argument("--case", nargs="+", action="extend", metavar="NAME", help="only these scripts")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each script (default 300)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
