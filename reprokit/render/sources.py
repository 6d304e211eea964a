"""What can be rendered: a reduction with the snapshot it came from, or a snapshot alone, found by path.

A folder that `shrink` wrote stands for the reduction in it. Opening either kind of file executes nothing from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reprokit.errors import NotASnapshot, NotReproduced, SnapshotError
from reprokit.render.module import ModuleScript, write_module_script
from reprokit.render.script import Script, write_script

if TYPE_CHECKING:
    from reprokit.shrink.reduction import Reduction
    from reprokit.snapshot.format import Snapshot

REDUCTION_FILE = "reduction.pt"


@dataclass(frozen=True, slots=True)
class Source:
    """A reduction, a snapshot, or both. Invariant: at least one is there."""

    reduction: Reduction | None
    snapshot: Snapshot | None

    def script(self) -> Script:
        """The repro of the reduction, or of the whole snapshot when it was not reduced."""
        if self.reduction is not None:
            return reduction_script(self.reduction, self.snapshot)
        assert self.snapshot is not None
        return snapshot_script(self.snapshot)


def open_source(path: Path) -> Source:
    """The reduction or snapshot at ``path``; raises `SnapshotError`."""
    from reprokit.snapshot import format as snapshots

    if path.is_dir():
        return _open_reduction(path / REDUCTION_FILE)
    try:
        return Source(None, snapshots.load(path))
    except NotASnapshot as error:
        try:
            return _open_reduction(path)
        except NotASnapshot:
            raise error from None


def _open_reduction(file: Path) -> Source:
    from reprokit.shrink import reduction as reductions

    return Source(reductions.load(file), _snapshot_beside(file.parent))


def _snapshot_beside(folder: Path) -> Snapshot | None:
    """The snapshot that a folder of results is named after, if it is still there."""
    from reprokit.snapshot import format as snapshots

    place = folder.resolve()
    files = (place.with_name(f"{place.name}{ending}") for ending in (".repro.pt", ".pt"))
    file = next((file for file in files if file.is_file()), None)
    try:
        return snapshots.load(file) if file is not None else None
    except SnapshotError:
        return None


def script_of(path: Path) -> Script:
    """The repro of the reduction or snapshot at ``path``."""
    return open_source(path).script()


def reduction_script(reduction: Reduction, snapshot: Snapshot | None = None) -> Script:
    """The repro of a reduction; of one at the level of modules, its context."""
    context = context_script(reduction, snapshot) if reduction.level == "module" else None
    if context is not None:
        return Script(context.text)
    version = snapshot.environment.get("torch") if snapshot is not None else None
    return write_script(
        reduction.program,
        reduction.tensors,
        reduction.failure,
        num_calls_before=reduction.before.get("calls"),
        torch_version=version,
    )


def context_script(reduction: Reduction, snapshot: Snapshot | None = None) -> ModuleScript | None:
    """The context of a reduction as modules; ``None`` without one, or when it would need a side file."""
    if reduction.context is None:
        return None
    version = snapshot.environment.get("torch") if snapshot is not None else None
    try:
        return write_module_script(
            reduction.context, num_calls_before=reduction.before.get("calls"), torch_version=version
        )
    except NotReproduced:
        return None


def snapshot_script(snapshot: Snapshot) -> Script:
    """The repro of a whole snapshot."""
    return write_script(
        snapshot.program, snapshot.tensors, snapshot.failure, torch_version=snapshot.environment.get("torch")
    )
