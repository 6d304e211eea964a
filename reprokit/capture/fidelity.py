"""Writes the file, and measures its fidelity: it is read back, run by itself and located.

``exact`` stays only if that run fails as training did: same phase, kind and origin, and the loss that training saw.
Otherwise the file is written again with a note of what differs.

Where training was compiled and the replay is finite, the recorded program is compiled again, with the compilers that
the script has used, and compared with itself. Only a value that is not finite on one side counts. The failure is blamed
on the call that differs by itself, if one does.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from reprokit import native
from reprokit.capture.options import rank_suffix, with_part
from reprokit.capture.replay import TracedPlayer, describe_mismatch, is_close, is_same
from reprokit.compare.compiled import Compiled, run_compiled
from reprokit.compare.difference import NOT_FINITE, Difference, Reference, compare, first_difference
from reprokit.compare.imprints import Run
from reprokit.compare.quantity import observed
from reprokit.errors import SnapshotError, ignored_errors, pass_on
from reprokit.locate.blame import exception_failure, locate_with_losses
from reprokit.locate.failure import Failure
from reprokit.own_work import ignored_warnings
from reprokit.program.code_lines import lines_of_run
from reprokit.program.dataflow import prepared, same_bits
from reprokit.program.interpreter import Settings, determinism, run
from reprokit.program.ir import Input
from reprokit.progress import Progress
from reprokit.snapshot.format import Snapshot, load, save
from reprokit.snapshot.privacy import private
from reprokit.snapshot.rng import generators_restored
from reprokit.snapshot.source import Source


def has_origin(snapshot: Snapshot) -> bool:
    """True if a failure has an origin in its program."""
    return snapshot.failure.call_index is not None or snapshot.failure.input_name is not None


@dataclass(frozen=True)
class Made:
    """A snapshot; ``culprit`` is the tensor that was bad already when the step began, if that is the failure.

    ``losses`` and ``devices`` are those of the replay; ``reference`` is that of a mismatch.
    """

    snapshot: Snapshot
    culprit: torch.Tensor | None = None
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    devices: dict[int, torch.device] = field(default_factory=dict)
    reference: Reference | None = None

    @property
    def is_shown(self) -> bool:
        """True if the replay of a step has shown where its failure comes from."""
        return has_origin(self.snapshot)

    @property
    def is_exact(self) -> bool:
        return self.snapshot.fidelity == "exact"


@dataclass(frozen=True)
class Place:
    """Where snapshots go: the file ``output``, or a name made of ``name`` and the step inside ``directory``.

    ``source`` says how much of the user's code goes with them. One of several processes adds its rank to the file name,
    ``part`` if it has none.
    """

    output: Path | None
    directory: Path
    name: str
    overwrite: bool
    source: Source = "traceback"
    part: str = ""

    @property
    def log(self) -> Path:
        """The file of events: beside the snapshot, with its name or that of the run; one for each child process."""
        own = f".pid{os.getpid()}" if multiprocessing.parent_process() is not None else ""
        part = rank_suffix() or self.part or own
        if self.output is None:
            return self.directory / f"{self.name}{part}.events.jsonl"
        path = with_part(self.output, part)
        return path.with_name(f"{path.name.removesuffix('.pt').removesuffix('.repro')}.events.jsonl")

    def write(self, made: Made, *, is_asked: bool = False, progress: Progress | None = None) -> tuple[Path, Snapshot]:
        """Write the file and read it back; another name is found when it is taken and may not be overwritten.

        There may be several steps that somebody has asked for: all names have the step then.
        """
        lines = lines_of_run() if self.source == "none" else frozenset()
        snapshot = private(made.snapshot, self.source, lines)
        with ignored_errors(), by_itself(snapshot.settings):  # then `reprokit diff` needs the file of another run
            snapshot = replace(snapshot, digests=Run.of(placed(snapshot, made.devices)).digests)
        part = rank_suffix() or self.part
        automatic = f"{self.name}{part}-step{snapshot.step}"
        own = f"{part}-step{snapshot.step}" if is_asked else part
        path = with_part(self.output, own) if self.output else free_path(self.directory, automatic)
        if path.exists() and not self.overwrite:
            path = free_path(path.parent, path.name.removesuffix(".pt").removesuffix(".repro"))
        save(snapshot, path)
        snapshot.tensors.clear()  # what is read back takes their place
        try:
            return path, checked(path, made, progress)
        except Exception as error:
            pass_on(error)
            doubt = f"the file was not checked ({type(error).__name__}: {error})"
            return path, _noted(_read_back(path), path, {doubt: True})


def _read_back(path: Path) -> Snapshot:
    """The snapshot in a file that was just written; one that no command could read is not left behind."""
    try:
        return load(path)
    except SnapshotError:
        if path.is_file():
            path.unlink()
        raise


def free_path(directory: Path, stem: str) -> Path:
    """``<stem>.repro.pt`` in ``directory``, numbered when that name is taken."""
    numbered = (directory / f"{stem}-{number}.repro.pt" for number in itertools.count(1))
    return next(path for path in itertools.chain([directory / f"{stem}.repro.pt"], numbered) if not path.exists())


def checked(path: Path, made: Made, progress: Progress | None = None) -> Snapshot:
    """The snapshot in a file; its fidelity is that of the file afterwards."""
    snapshot = load(path)
    if not snapshot.program.calls:
        return snapshot
    with by_itself(snapshot.settings):
        try:
            differences = dict(_differences(placed(snapshot, made.devices), made, progress))
        except Exception as error:  # whatever a device or a kernel may object to
            pass_on(error)
            differences = {f"running the file raised {type(error).__name__}: {error}": False}
    return _noted(snapshot, path, differences) if differences else snapshot


def _noted(snapshot: Snapshot, path: Path, differences: Mapping[str, bool]) -> Snapshot:
    """Write the file again with what differs, in words, and whether it is only a matter of rounding."""
    is_near = snapshot.fidelity != "unfaithful" and all(differences.values())
    notes = dict.fromkeys([*filter(None, [snapshot.fidelity_note]), *differences])
    snapshot = replace(snapshot, fidelity="close" if is_near else "unfaithful", fidelity_note="; ".join(notes))
    save(snapshot, path)
    return snapshot


def _differences(snapshot: Snapshot, made: Made, progress: Progress | None) -> Iterator[tuple[str, bool]]:
    """The differences from training as text, and True if they are rounding only."""
    program, tensors, failure, reference = snapshot.program, snapshot.tensors, snapshot.failure, made.reference
    found, losses = None, made.losses.keys()
    if failure.event is not None:
        found, outcome = observed(program, tensors, failure, losses)
        seen = outcome.values
    elif not (failure.kind.raises or failure.kind.compares) and has_origin(snapshot):
        found, seen = locate_with_losses(program, tensors, losses, failure.through, progress)
    else:
        outcome = run(program, tensors, keep=frozenset(losses))
        found, seen = exception_failure(program, outcome) if outcome.error is not None else None, outcome.values
    if reference is not None and not isinstance(compare(snapshot, reference, failure.way), Difference):
        yield "the file does not differ when it is compiled", False
    for value, old in made.losses.items():
        new = seen.get(value)
        if new is not None and not same_bits(old, new):
            yield describe_mismatch("the program's loss", old, new), is_close(old, new)
    if found is not None and found.exception is not None and not failure.kind.raises:
        yield f"`{found.call}` raised in the replay: {found.exception[1]}", False
    if reference is None and (has_origin(snapshot) or failure.event is not None):
        if found is None:
            yield "the file does not fail when it is run", False
        elif _signature(found) != _signature(failure):
            yield f"the file fails in another way when it is run: {found.kind} in {found.phase}", False


def _signature(failure: Failure) -> tuple[Any, ...]:
    raised = failure.exception[0] if failure.exception is not None else None
    if failure.event is not None:
        return failure.phase, failure.kind, failure.event.quantity
    return failure.phase, failure.kind, failure.call, failure.call_index, failure.input_name, raised


def placed(snapshot: Snapshot, devices: Mapping[int, torch.device]) -> Snapshot:
    """A snapshot with its tensors on the devices of training."""
    tensors = {value: native.to(tensor, devices.get(value, "cpu")) for value, tensor in snapshot.tensors.items()}
    return replace(snapshot, tensors=tensors)


@contextlib.contextmanager
def by_itself(settings: Settings) -> Iterator[None]:
    """The settings of the file, without the modes and generators of the code around."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(ignored_warnings())
        stack.enter_context(generators_restored())
        stack.enter_context(native.inference_mode(False))
        stack.enter_context(native.enable_grad())
        for device in ("cpu", "cuda", "mps", "xpu"):
            if native.is_autocast_enabled(device):
                stack.enter_context(native.autocast(device, enabled=False))
        stack.enter_context(determinism(settings))
        yield


_SECONDS = 20.0  # to find the call; a compiler takes up to seconds for each


def compiled_mismatch(replayed: TracedPlayer, compilers: Sequence[Compiled]) -> tuple[Failure | None, Compiled | None]:
    """The failure, and the first of the compilers that shows it, half of one before the whole.

    What differs from training in ``replayed`` becomes what differs from it compiled. Batches that the loop itself has
    prepared become inputs: training did not compile these calls, and a compiler would fuse them with those that follow.
    """
    whole = replayed.program, replayed.tensors
    with native.enable_grad():
        if compilers:
            _without_preparation(replayed)
        for compiler in dict.fromkeys(found for one in compilers for found in (one.simpler, one)):
            with ignored_errors():  # compilers fail in as many ways as there are
                failure = first_difference(replayed, compiler, compiler.name + NOT_FINITE, seconds=_SECONDS)
                if failure is None or not failure.kind.compares:
                    continue
                values = run_compiled(replayed, frozenset(replayed.seen), compiler.compiler).values
                pairs = [(old, values[value]) for value, old in replayed.seen.items() if value in values]
                replayed.mismatches = [describe_mismatch("the loss", *pair) for pair in pairs if not is_same(*pair)]
                replayed.is_close = all(is_close(*pair) for pair in pairs)
                return failure, compiler
    replayed.program, replayed.tensors = whole
    return None, None


def _without_preparation(replayed: TracedPlayer) -> None:
    """Make inputs of what calls of the loop itself have prepared."""
    program = replayed.program
    dropped = prepared(program, replayed.of_loop.keys())
    made = {value for index in dropped for value in program.calls[index].output_refs()}
    calls = tuple(call for index, call in enumerate(program.calls) if index not in dropped)
    read = frozenset(value for call in calls for value in call.input_refs() if value in made)
    outcome = run(program, replayed.tensors, keep=read, only=dropped) if read else None
    if outcome is not None and outcome.error is None:
        inputs = (*program.inputs, *(Input(value, replayed.of_loop[value]) for value in sorted(read)))
        replayed.program = replace(program, calls=calls, inputs=inputs).pruned()
        replayed.tensors = {**replayed.tensors, **outcome.values}
