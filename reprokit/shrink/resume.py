"""Going on from an earlier reduction: is the one on disk whole, and is it of this snapshot?

Everything is looked at before any work starts, so that a refusal leaves the folder as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from reprokit.errors import SnapshotError, UsageError
from reprokit.program import plain
from reprokit.shrink.ledger import PassRow
from reprokit.shrink.oracle import Verdict
from reprokit.shrink.plainness import contents, raw_bytes
from reprokit.shrink.reduction import Reduction, load
from reprokit.snapshot.format import Snapshot

_MAX_SAMPLES = 4096
_HINT = "shrink without `--resume`, into another folder with -o or over this one with -f"


def origin_of(snapshot: Snapshot) -> dict[str, Any]:
    """What a reduction belongs to: the snapshot, and the torch whose verdicts it holds."""
    return {"snapshot": fingerprint(snapshot), "torch": str(torch.__version__)}


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


def load_earlier(path: Path, snapshot: Snapshot, origin: Mapping[str, Any], level: str) -> Reduction:
    """The reduction at ``path``; raises `SnapshotError` for a damaged one, `UsageError` for one of something else."""
    try:
        earlier = load(path)
    except SnapshotError as error:
        raise SnapshotError(f"cannot resume: {error.message}", hint=_HINT, note=error.note) from error
    before = {"calls": snapshot.program.num_calls, "elements": snapshot.num_elements}
    if not _is_whole(earlier):
        raise SnapshotError(f"cannot resume: `{path}` is damaged", hint=_HINT)
    if earlier.origin.get("snapshot", origin["snapshot"]) != origin["snapshot"] or earlier.before != before:
        raise UsageError(f"cannot resume: `{path}` was made from another snapshot", hint=_HINT)
    if earlier.origin.get("check", "") != origin.get("check", ""):
        raise UsageError(f"cannot resume: `{path}` was made with another check", hint=_HINT)
    if earlier.level != level:
        raise UsageError(f"cannot resume: `{path}` was made at level `{earlier.level}`", hint=_HINT)
    if earlier.origin.get("torch") != origin["torch"]:
        return replace(earlier, known={})
    return earlier


def _is_whole(earlier: Reduction) -> bool:
    """True if everything that is gone on from is of the form it should be."""
    verdicts = {verdict.value for verdict in Verdict}
    row = set(PassRow.__dataclass_fields__)
    return (
        all(item.value in earlier.tensors for item in earlier.program.inputs)
        and all(isinstance(line, str) for line in earlier.log)
        and set(earlier.verdicts) <= verdicts
        and set(earlier.known.values()) <= verdicts
        and all(set(entry) == row for entry in earlier.passes)
    )
