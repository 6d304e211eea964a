"""A reduction: the smallest program found, the log of the search, and the file it is kept in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch

from reprokit.grammar import Count, Digest, Later, Line, Name, Text, one_of, plain_of
from reprokit.grammar import Path as FilePath
from reprokit.locate.failure import Failure
from reprokit.program import plain
from reprokit.program.dataflow import contents, raw_bytes
from reprokit.program.ir import Program
from reprokit.program.step import Step
from reprokit.rules.diagnosis import Diagnosis
from reprokit.shrink.checks.check import Signed
from reprokit.shrink.context.finder import Context
from reprokit.shrink.explain import Nearest, VariedPart
from reprokit.snapshot.format import Snapshot, StoredProgram, StoredTensors, read_content, storable, write_file
from reprokit.words import counted, told

KIND = "reduction"
_TOLD = (  # in the summary
    "checks verdicts seconds reproduces explain constants nearest explain_checks before signature one_minimal stopped "
    "notes whatif diagnosis no_repro"
)
_MAX_SAMPLES = 4096  # elements of a tensor in the hash, so that a large model does not cost a pass over its memory
Ruling = Annotated[str, one_of("same", "other", "passes", "invalid")]


@dataclass(frozen=True, slots=True)
class Size:
    """Calls of a program, and elements of its inputs."""

    calls: Count
    elements: Count


@dataclass(frozen=True, slots=True)
class LogRow:
    """A change that was kept: the number of checks until then, what was changed, and the size that was left."""

    checks: Count
    change: Line
    calls: Count
    elements: Count

    def __str__(self) -> str:
        return f"{self.checks}: {self.change}: {counted(self.calls, 'call')}, {counted(self.elements, 'element')}"


@dataclass(frozen=True, slots=True)
class Origin:
    """The snapshot that a reduction was made from, with which torch and which check."""

    snapshot: Later[Digest] = None
    torch: Later[Line] = None
    check: Later[Line] = None
    file: Later[FilePath] = None


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

    budget: Later[float] = None
    seconds: Later[float] = None
    tables: Later[Mapping[Annotated[str, one_of("minimum", "context", "snapshot")], tuple[Answered, ...]]] = None


@dataclass(frozen=True)
class Reduction:
    """The result of one run of the reducer."""

    program: StoredProgram
    tensors: StoredTensors
    failure: Failure
    before: Size  # of the snapshot
    signature: Signed
    checks: Count = 0
    verdicts: dict[Ruling, Count] = field(default_factory=dict)
    seconds: float = 0.0
    reproduces: Line = ""  # the number of replays that failed: ``5/5``
    explain: list[VariedPart] = field(default_factory=list)  # the inputs with their freedom
    one_minimal: bool = False  # a full round of all passes changed nothing
    log: list[LogRow] = field(default_factory=list)  # of every change that was kept
    constants: list[VariedPart] = field(default_factory=list)  # in arguments
    nearest: Nearest | None = None  # the smallest change found that passes
    explain_checks: Count = 0  # for these three; not part of ``checks``
    stopped: Line | None = None  # ``max-time``, ``max-checks``, ``interrupted``
    notes: list[Text] = field(default_factory=list)  # on the failure rate and on settings of torch
    origin: Origin = Origin()  # the snapshot and torch
    context: Context | None = None  # the piece of the model found beside the minimum
    whatif: WhatIfResult = WhatIfResult()  # empty if none was made
    diagnosis: Diagnosis | None = None
    no_repro: Later[Line] = None  # why there is none of an event; then the program is the whole step

    def summary(self) -> dict[str, Any]:
        """What ``reprokit shrink --json`` prints, without what rendering adds."""
        summary = {
            "schema": 1,
            "verdict": "reduced",
            "calls": self.program.num_calls,
            "elements": Step.of(self).num_elements,
            "max_abs_input": _largest(self.program, self.tensors),
            **{name: plain_of(getattr(self, name)) for name in _TOLD.split()},
            "seconds": round(self.seconds, 3),
        }
        return cast(dict[str, Any], told(summary))

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
