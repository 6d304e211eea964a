"""A reduction: the smallest program found, how it was found, and the file it is kept in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from reprokit.errors import SnapshotError
from reprokit.locate import failure as failures
from reprokit.locate.failure import Failure
from reprokit.program import plain
from reprokit.program.ir import Program
from reprokit.shrink.context import piece as pieces
from reprokit.shrink.context.piece import Context
from reprokit.shrink.plainness import contents
from reprokit.snapshot import grammar
from reprokit.snapshot.format import checked, count_elements, read_file, require_call, storable, write_file

KIND = "reduction"


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

    program: Program
    tensors: dict[int, torch.Tensor]
    failure: Failure
    before: dict[str, int]
    signature: dict[str, Any]
    checks: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    reproduces: str = ""
    explain: list[dict[str, Any]] = field(default_factory=list)
    one_minimal: bool = False
    log: list[str] = field(default_factory=list)
    passes: list[dict[str, Any]] = field(default_factory=list)
    constants: list[dict[str, Any]] = field(default_factory=list)
    nearest: dict[str, Any] | None = None
    explain_checks: int = 0
    stopped: str | None = None
    untried: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    origin: dict[str, Any] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    level: str = "op"
    context: Context | None = None
    whatif: dict[str, Any] = field(default_factory=dict)
    diagnosis: dict[str, Any] | None = None

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
            "explain": self.explain,
            "constants": self.constants,
            "nearest": self.nearest,
            "explain_checks": self.explain_checks,
            "before": self.before,
            "signature": self.signature,
            "one_minimal": self.one_minimal,
            "stopped": self.stopped,
            "untried": self.untried,
            "passes": self.passes,
            "notes": self.notes,
            "whatif": self.whatif,
            "diagnosis": self.diagnosis,
        }

    def save(self, path: Path | str) -> None:
        """Write the reduction atomically."""
        content = {name: getattr(self, name) for name in Reduction.__dataclass_fields__}
        content["program"] = plain.to_plain(self.program)
        content["failure"] = failures.to_plain(self.failure)
        content["tensors"] = {value: storable(tensor) for value, tensor in self.tensors.items()}
        content["context"] = pieces.to_plain(self.context)
        write_file(path, KIND, content)


def load(path: Path | str) -> Reduction:
    """Read a reduction without executing anything from it; raises `SnapshotError`.

    What a file of an earlier version does not hold has its default.
    """
    content = read_file(path, KIND)
    defaults = {item.name: item.default_factory() for item in fields(Reduction) if callable(item.default_factory)}
    defaults |= {item.name: item.default for item in fields(Reduction) if item.default is not MISSING}
    try:
        found = {**defaults, **content}
        context = found.pop("context")
        made = Reduction(**checked(found, grammar.REDUCTION), context=pieces.from_plain(context))
        require_call(made.program, made.failure)
        return made
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise SnapshotError(f"`{path}` is damaged: {error}", hint="shrink the snapshot again") from error


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
