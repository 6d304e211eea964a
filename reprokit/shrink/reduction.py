"""A reduction: the smallest program found, the log of the search, the file it is kept in, and going on from that file.

A reduction is resumed only after file and snapshot were compared, so that a refusal leaves the folder as it was.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from reprokit.errors import SnapshotError, UsageError
from reprokit.grammar import Count, Line, Name, Text, left_out, one_of, plain_of
from reprokit.locate.diagnosis import Diagnosis
from reprokit.locate.failure import Failure
from reprokit.program import plain
from reprokit.program.ir import Program
from reprokit.program.memory import contents
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.context.piece import Context
from reprokit.shrink.explain import Nearest, VariedPart
from reprokit.shrink.plainness import raw_bytes
from reprokit.shrink.signature import Signed
from reprokit.snapshot.format import (
    Snapshot,
    StoredProgram,
    StoredTensors,
    count_elements,
    read_content,
    storable,
    write_file,
)
from reprokit.words import counted

KIND = "reduction"
_MAX_SAMPLES = 4096  # elements of a tensor in the hash, so that a large model does not cost a pass over its memory
_HINT = "shrink without `--resume`, into another folder with -o or over this one with -f"
Verdict = Annotated[str, one_of("same", "other", "passes", "invalid")]


@dataclass(frozen=True, slots=True)
class Size:
    """Calls of a program, and elements of its inputs."""

    calls: Count
    elements: Count


@dataclass(slots=True)
class PassRow:
    """What a pass did in all rounds: checks, changes kept, calls and elements that went, and how long it took.

    Not frozen: a pass that runs counts in it.
    """

    name: Name
    checks: Count = 0
    successes: Count = 0
    calls: int = 0
    elements: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Origin:
    """The snapshot that a reduction was made from, with which torch and which check."""

    snapshot: Name | None = left_out()
    torch: Line | None = left_out()
    check: Line | None = left_out()
    file: Line | None = left_out()


@dataclass(frozen=True, slots=True)
class Answered:
    """How a program ended in a variant, and the seconds of a run."""

    variant: Name
    name: Line
    answer: Annotated[str, one_of("same", "other", "passes", "cannot_run")]
    detail: Line
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class WhatIfResult:
    """The answers for every program that was run in other settings, and the seconds that it took; empty: not run."""

    budget: float | None = left_out()
    seconds: float | None = left_out()
    tables: Mapping[Annotated[str, one_of("minimum", "context", "snapshot")], tuple[Answered, ...]] | None = left_out()


@dataclass(frozen=True)
class Reduction:
    """The result of one run of the reducer.

    ``before`` holds ``calls`` and ``elements`` of the snapshot, ``reproduces`` the number of replays that failed
    (``5/5``). ``one_minimal`` is true if a full round of all passes changed nothing. ``log`` has a line for every
    change that was kept, ``passes`` a row for every pass. ``stopped`` is the reason of an early end (``max-time``,
    ``max-checks``, ``interrupted``), ``untried`` lists the passes left undone. ``explain`` lists the inputs with their
    freedom, ``constants`` the numbers in arguments; ``nearest`` is the smallest change found that passes, and
    ``explain_checks`` counts the runs for these, which are not part of ``checks``. ``notes`` are sentences on the
    failure rate and on settings of torch. ``diagnosis`` is the cause as plain data. ``origin`` identifies the snapshot
    and torch, ``known`` holds the verdicts by digest for ``resume``. ``context`` is the piece of the model found beside
    the minimum; at ``level`` ``module`` it is the result itself. ``whatif`` is the table of `reprokit.whatif`, empty
    if none was made.
    """

    program: StoredProgram
    tensors: StoredTensors
    failure: Failure
    before: Size
    signature: Signed
    checks: Count = 0
    verdicts: dict[Verdict, Count] = field(default_factory=dict)
    seconds: float = 0.0
    reproduces: Line = ""
    explain: list[VariedPart] = field(default_factory=list)
    one_minimal: bool = False
    log: list[Line] = field(default_factory=list)
    passes: list[PassRow] = field(default_factory=list)
    constants: list[VariedPart] = field(default_factory=list)
    nearest: Nearest | None = None
    explain_checks: Count = 0
    stopped: Line | None = None
    untried: list[Line] = field(default_factory=list)
    notes: list[Text] = field(default_factory=list)
    origin: Origin = Origin()
    known: dict[Name, Verdict] = field(default_factory=dict)
    level: Annotated[str, one_of("op", "module", "step")] = "op"
    context: Context | None = None
    whatif: WhatIfResult = WhatIfResult()
    diagnosis: Diagnosis | None = None

    def summary(self) -> dict[str, Any]:
        """What ``reprokit shrink --json`` prints, without what rendering adds."""
        return {
            "schema": 1,
            "verdict": "reduced",
            "level": self.level,
            "calls": self.program.num_calls,
            "elements": count_elements(self.program, self.tensors),
            "max_abs_input": _largest(self.program, self.tensors),
            "checks": self.checks,
            "verdicts": dict(self.verdicts),
            "seconds": round(self.seconds, 3),
            "reproduces": self.reproduces,
            "explain": plain_of(self.explain),
            "constants": plain_of(self.constants),
            "nearest": plain_of(self.nearest),
            "explain_checks": self.explain_checks,
            "before": plain_of(self.before),
            "signature": plain_of(self.signature),
            "one_minimal": self.one_minimal,
            "stopped": self.stopped,
            "untried": self.untried,
            "passes": plain_of(self.passes),
            "notes": self.notes,
            "whatif": plain_of(self.whatif),
            "diagnosis": plain_of(self.diagnosis),
        }

    def save(self, path: Path | str) -> None:
        """Write the reduction atomically."""
        context = replace(self.context, tensors=_storable(self.context.tensors)) if self.context is not None else None
        write_file(path, KIND, replace(self, tensors=_storable(self.tensors), context=context))


def _storable(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {value: storable(tensor) for value, tensor in tensors.items()}


def load(path: Path | str) -> Reduction:
    """Read a reduction without executing anything from it; raises `SnapshotError`.

    What a file of an earlier version does not hold has its default.
    """
    return read_content(Reduction, path, KIND)


def _largest(program: Program, tensors: Mapping[int, torch.Tensor]) -> float | None:
    """The largest finite absolute value over the inputs, ``None`` without any."""
    largest = None
    for item in program.inputs:
        values = contents(tensors[item.value])
        if item.role == "rng" or values.dtype is torch.bool or values.numel() == 0:
            continue
        sizes = values.abs().double()
        sizes = sizes[sizes.isfinite()]
        if sizes.numel():
            largest = max(largest or 0.0, float(sizes.max()))
    return largest


def origin_of(snapshot: Snapshot) -> Origin:
    """What a reduction belongs to: the snapshot, and the torch whose verdicts it holds."""
    return Origin(fingerprint(snapshot), str(torch.__version__))


def fingerprint(snapshot: Snapshot) -> str:
    """A hash of the program and of a sample of every tensor; equal for the same file."""
    found = hashlib.blake2b(repr(plain.to_plain(snapshot.program)).encode(), digest_size=16)
    found.update(f"{snapshot.step} {snapshot.micro_step} {snapshot.failure.kind} {snapshot.failure.call}".encode())
    for item in snapshot.program.inputs:
        tensor = snapshot.tensors[item.value]
        found.update(f"{item.value} {tensor.dtype} {tuple(tensor.shape)}".encode())
        values = contents(tensor)
        sample = values[:: max(1, values.numel() // _MAX_SAMPLES)].cpu().contiguous()
        if sample.numel():
            found.update(raw_bytes(sample))
    return found.hexdigest()


def load_earlier(path: Path, snapshot: Snapshot, origin: Origin, level: str) -> Reduction:
    """The reduction at ``path``; raises `SnapshotError` for a damaged one, `UsageError` for one of something else."""
    try:
        earlier = load(path)
    except SnapshotError as error:
        raise SnapshotError(f"cannot resume: {error.message}", hint=_HINT, note=error.note) from error
    before = Size(snapshot.program.num_calls, snapshot.num_elements)
    if (earlier.origin.snapshot or origin.snapshot) != origin.snapshot or earlier.before != before:
        raise UsageError(f"cannot resume: `{path}` was made from another snapshot", hint=_HINT)
    if (earlier.origin.check or "") != (origin.check or ""):
        raise UsageError(f"cannot resume: `{path}` was made with another check", hint=_HINT)
    if earlier.level != level:
        raise UsageError(f"cannot resume: `{path}` was made at level `{earlier.level}`", hint=_HINT)
    if earlier.origin.torch != origin.torch:
        return replace(earlier, known={})
    return earlier


_NUMBERS = ("checks", "successes", "calls", "elements", "seconds")


@dataclass
class Ledger:
    """Counts for one run of the reducer. Invariant: the numbers in ``log`` never fall.

    ``calls`` and ``elements`` are the sizes of the best candidate, ``settled`` the passes that changed nothing since it
    became the best, ``variants`` the runs made to explain it.
    """

    calls: int
    elements: int
    log: list[str] = field(default_factory=list)
    rows: dict[str, PassRow] = field(default_factory=dict)
    checks: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    variants: int = 0
    settled: set[str] = field(default_factory=set)
    _current: PassRow = field(default_factory=lambda: PassRow(""))
    _changes: dict[str, str] = field(default_factory=dict)

    def go_on(self, earlier: Reduction) -> None:
        """Count on from an earlier run."""
        self.calls = earlier.program.num_calls
        self.elements = count_elements(earlier.program, earlier.tensors)
        self.log = list(earlier.log)
        self.checks, self.verdicts, self.seconds = earlier.checks, dict(earlier.verdicts), earlier.seconds
        self.rows = {row.name: replace(row) for row in earlier.passes}

    @contextmanager
    def passing(self, name: str) -> Iterator[PassRow]:
        """Book what happens inside on this pass; gives a row that has, in the end, the numbers of this time alone."""
        row = self.rows.setdefault(name, PassRow(name))
        before, this_time = replace(row), PassRow(name)
        outer, self._current = self._current, row
        started = time.monotonic()
        try:
            yield this_time
        finally:
            row.seconds += time.monotonic() - started
            self._current = outer
            for number in _NUMBERS:
                setattr(this_time, number, getattr(row, number) - getattr(before, number))

    def checked(self, candidate: Candidate, verdict: str, change: str) -> None:
        """A candidate was run."""
        self.checks += 1
        self.verdicts[verdict] = self.verdicts.get(verdict, 0) + 1
        self._current.checks += 1
        self._changes[candidate.digest] = change

    def varied(self) -> None:
        """A variant of the result was run."""
        self.variants += 1
        self._current.checks += 1

    def accepted(self, candidate: Candidate) -> str:
        """A candidate became the best one; what was changed, in a few words."""
        change = self._changes.get(candidate.digest, "as known from before")
        row = self._current
        row.successes += 1
        row.calls += self.calls - candidate.num_calls
        row.elements += self.elements - candidate.num_elements
        self.calls, self.elements = candidate.num_calls, candidate.num_elements
        self.settled.clear()
        self.log.append(f"{self.checks}: {change}: {counted(self.calls, 'call')}, {counted(self.elements, 'element')}")
        return change

    def table(self) -> list[PassRow]:
        """The rows as a reduction keeps them."""
        return [replace(row, seconds=round(row.seconds, 4)) for row in self.rows.values()]
