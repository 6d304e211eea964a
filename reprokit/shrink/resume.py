"""Going on from an earlier reduction: is the one on disk whole, and is it of this snapshot?

Everything is looked at before any work starts, so that a refusal leaves the folder as it was.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import torch

from reprokit.errors import SnapshotError, UsageError
from reprokit.program import plain
from reprokit.shrink.plainness import contents, raw_bytes
from reprokit.shrink.reduction import Origin, Reduction, Size, load
from reprokit.snapshot.format import Snapshot

_MAX_SAMPLES = 4096
_HINT = "shrink without `--resume`, into another folder with -o or over this one with -f"


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
