"""The sources of a rendering: a reduction with the snapshot it came from, or a snapshot alone, found by path.

A folder that `shrink` wrote stands for the reduction in it. Opening either kind of file executes nothing from it.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from reprokit.errors import NotASnapshot, NotReproduced, ReprokitError, SnapshotError, UsageError
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Program
from reprokit.render.literals import MAX_LITERALS, is_same, literal
from reprokit.render.module import ModuleScript, write_module_script
from reprokit.render.module_tree import Block, Tree
from reprokit.render.script import Script, write_script
from reprokit.shrink import reduction as reductions
from reprokit.shrink.checks.choice import require_reproducible
from reprokit.shrink.checks.predicate import missing_cause
from reprokit.shrink.context.layers import initial, layers_in
from reprokit.shrink.given import given_input
from reprokit.shrink.plainness import constant_of, ladder, num_digits
from reprokit.shrink.reduction import Reduction, fingerprint
from reprokit.snapshot import format as snapshots
from reprokit.snapshot.files import REDUCTION_FILE, hint_for_folder
from reprokit.snapshot.format import Snapshot
from reprokit.snapshot.privacy import private
from reprokit.snapshot.source import Source


def without_data(reduction: Reduction) -> Reduction:
    """The reduction without a piece of the model that holds recorded numbers; `UsageError` if the minimum does."""
    recorded = set(recorded_inputs(reduction.program, reduction.tensors))
    if recorded:
        names = ", ".join(f"`{item.name}`" for item in reduction.program.inputs if item.value in recorded)
        raise UsageError(
            f"the repro needs recorded numbers ({names}), and --no-data writes none",
            hint="look at them without --no-data, and share them only if they may be seen",
        )
    context = reduction.context
    if context is not None and recorded_inputs(context.program, context.tensors):
        return replace(reduction, context=None)
    return reduction


def recorded_inputs(program: Program, tensors: Tensors) -> list[int]:
    """The inputs whose contents tell something that was recorded, generator states aside."""
    return [item.value for item in program.inputs if item.role != "rng" and not is_plain(tensors[item.value])]


def is_plain(tensor: torch.Tensor) -> bool:
    """True if the contents tell nothing: a power of ten, zero, infinity, a number the reducer chose."""
    if tensor.is_quantized:
        return False  # its scale is a recorded number as well
    number = constant_of(tensor) if tensor.numel() else 0
    if number is None:
        found = literal(tensor, max_literals=0)
        return found is not None and found.function in ("arange", "eye")
    if isinstance(number, complex):
        return number in (0, 1)
    if isinstance(number, bool) or number == 0 or not math.isfinite(number):
        return True
    is_chosen = tensor.dtype.is_floating_point and abs(number) in ladder(tensor.dtype)
    return is_chosen or (num_digits(number, tensor.dtype) == 1 and f"{abs(number):.0e}".startswith("1"))


def beyond_limit(program: Program, tensors: Tensors) -> tuple[int, ...]:
    """The inputs that go to a side file so that a script spells out at most `MAX_LITERALS` recorded numbers."""
    kept = 0
    beyond = []
    for value in sorted(recorded_inputs(program, tensors), key=lambda value: tensors[value].numel()):
        found = literal(tensors[value])
        if found is not None and found.function == "tensor":
            kept += tensors[value].numel()
            if kept > MAX_LITERALS:
                beyond.append(value)
    return tuple(beyond)


MAX_LOOKED_AT = 20


@dataclass(frozen=True, slots=True)
class Opened:
    """A reduction, a snapshot, or both. Invariant: at least one is there."""

    reduction: Reduction | None
    snapshot: Snapshot | None

    def script(self) -> Script:
        """The repro of the reduction, or of the whole snapshot when it was not reduced."""
        if self.reduction is not None:
            return reduction_script(self.reduction, self.snapshot)
        assert self.snapshot is not None
        return snapshot_script(self.snapshot)

    def whole(self, path: Path) -> Snapshot:
        """The snapshot; raises `UsageError` if the source at ``path`` is a reduction without one."""
        if self.snapshot is not None:
            return self.snapshot
        assert self.reduction is not None, "a source holds one or the other"
        name, folder = _origin_name(self.reduction), path if path.is_dir() else path.parent
        raise UsageError(
            f"`{path}` holds a reduction, and the snapshot it came from is not beside it",
            hint=f"name what `reprokit shrink` was given: --snapshot {name or 'FILE'}",
            note=f"looked for {f'`{name}` and other ' if name else ''}*.repro.pt in `{folder.resolve().parent}`",
        )

    def private(self, policy: Source, *, no_data: bool) -> Opened:
        """The same with no more of the user's source than the policy allows, and without recorded data."""
        snapshot = private(self.snapshot, policy) if self.snapshot is not None else None
        reduction = private(self.reduction, policy) if self.reduction is not None else None
        if not no_data:
            return replace(self, reduction=reduction, snapshot=snapshot)
        if reduction is None:
            raise UsageError(
                "a whole snapshot is made of recorded data", hint="shrink it with `reprokit shrink --no-data`"
            )
        return Opened(without_data(reduction), snapshot)


def open_source(path: Path, snapshot: Path | None = None) -> Opened:
    """The reduction or snapshot at ``path``; raises `SnapshotError`.

    ``snapshot`` is the file that a reduction was made from, where it is not beside it.
    """
    if snapshot is not None:
        opened, found = open_source(path), snapshots.load(snapshot)
        if opened.reduction is None:
            raise UsageError(f"`{path}` is a snapshot already", hint="leave out --snapshot, which is about a reduction")
        if not _is_made_from(opened.reduction, found):
            named = f"; that was `{name}`" if (name := _origin_name(opened.reduction)) else ""
            hint = f"name what `reprokit shrink` was given{named}"
            raise UsageError(f"`{path}` was not made from `{snapshot}`", hint=hint)
        return replace(opened, snapshot=found)
    file = path / REDUCTION_FILE if os.path.isdir(path) else path
    if os.path.isdir(path) and not file.is_file():
        raise UsageError(f"the folder `{path}` has no `{REDUCTION_FILE}`", hint=hint_for_folder(path))
    try:
        found = snapshots.load(file)
    except NotASnapshot as error:
        try:
            reduction = reductions.load(file)
        except NotASnapshot:
            if (file.parent / REDUCTION_FILE).is_file():
                error.hint = f"give the folder that it is in: {file.parent}"
            raise error from None
        return Opened(reduction, _snapshot_beside(file.parent, reduction))
    require_reproducible(found)
    if not found.program.calls:
        raise SnapshotError(f"`{path}` holds no program that could be run", hint=f"`reprokit show {path}` says why")
    return Opened(None, found)


def _snapshot_beside(folder: Path, reduction: Reduction) -> Snapshot | None:
    """The snapshot that a reduction was made from: in the folder around, by its name or as another of that kind."""
    around = folder.resolve().parent
    named = [around / name for name in (_origin_name(reduction), f"{folder.resolve().name}.pt") if name]
    for file in dict.fromkeys([*named, *sorted(around.glob("*.repro.pt"))[:MAX_LOOKED_AT]]):
        try:
            found = snapshots.load(file) if os.path.isfile(file) else None  # a name from a file may be no name
        except ReprokitError:
            continue
        if found is not None and _is_made_from(reduction, found):
            return found
    return None


def _is_made_from(reduction: Reduction, snapshot: Snapshot) -> bool:
    return reduction.origin.snapshot in (None, fingerprint(snapshot))


def _origin_name(reduction: Reduction) -> str:
    return Path(reduction.origin.file or "").name


def reduction_script(reduction: Reduction, snapshot: Snapshot | None = None) -> Script:
    if reduction.no_repro:
        return Script("", reason=reduction.no_repro)
    return write_script(
        reduction.program,
        reduction.tensors,
        reduction.failure,
        num_calls_before=reduction.before.calls,
        torch_version=snapshot.environment.torch if snapshot is not None else "",
        aside=beyond_limit(reduction.program, reduction.tensors),
    )


def context_script(reduction: Reduction, snapshot: Snapshot | None = None) -> ModuleScript | None:
    """The context of a reduction as modules; ``None`` without one, when it would need a side file, or many numbers."""
    context = reduction.context
    if context is None:
        return None
    start = initial(layers_in(context.candidate))
    made = {value for value, tensor in start.items() if is_same(tensor, context.tensors[value])}
    needing = tuple(item for item in context.program.inputs if item.value not in made)
    if beyond_limit(replace(context.program, inputs=needing), context.tensors):
        return None
    version = snapshot.environment.torch if snapshot is not None else ""
    try:
        return write_module_script(context, num_calls_before=reduction.before.calls, torch_version=version)
    except NotReproduced:
        return None


def snapshot_script(snapshot: Snapshot) -> Script:
    program, tensors, failure = snapshot.program, snapshot.tensors, snapshot.failure
    reason = given_input(failure, program, tensors).message if failure.is_given else missing_cause(snapshot)
    if reason:
        return Script("", reason=reason)
    aside = beyond_limit(program, tensors)
    return write_script(program, tensors, failure, torch_version=snapshot.environment.torch, aside=aside)


def is_minimum_again(reduction: Reduction) -> bool:
    """True if the context has no module and no other call than the minimum."""
    context = reduction.context
    if context is None or any(isinstance(item, Block) for item in Tree.of(context.candidate).root.items):
        return False
    made = [call.target for call in context.program.calls]
    return made == [call.target for call in reduction.program.calls]
