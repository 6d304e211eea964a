"""The snapshot file: everything about one failed step, in a form that opening never executes.

A file is one ``torch.save`` of dicts, lists, numbers, strings and tensors, read back with ``weights_only=True``.

A file may hold the state of the training from before the step that failed: state dicts of tensors and plain values.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import torch

from reprokit import native
from reprokit.errors import NewerFormat, NotASnapshot, SnapshotError, TruncatedSnapshot
from reprokit.grammar import Count, Later, Line, Name, Text, one_of, plain_of, read
from reprokit.locate.failure import Failure, RankDifference, is_vacuous, root_of
from reprokit.locate.samples import Samples, bad_rows, row_text
from reprokit.program import plain
from reprokit.program.interpreter import Settings
from reprokit.program.ir import Program
from reprokit.program.step import Step
from reprokit.series.cause import Cause
from reprokit.series.story import Chapter, LayerNumbers, RecordedStep, StepNumbers, chapters
from reprokit.snapshot.claims import FailedProgram, require_consistent
from reprokit.snapshot.environment import Environment
from reprokit.snapshot.files import replaced, require_file
from reprokit.snapshot.limits import require_bounded, require_stored
from reprokit.snapshot.rng import Generators, PlainTensor
from reprokit.snapshot.source import SourceState
from reprokit.words import told, visible_name

StateValue = PlainTensor | float | bool | tuple[float | bool, ...] | Line | None


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """A parameter group: its options, and the state of each of its parameters in their order."""

    options: dict[Name, StateValue] = field(default_factory=dict)
    state: list[dict[Name, StateValue]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StateBefore:
    """The state dicts of root modules and the groups of optimizers, by name where there are several, else by ``""``."""

    modules: dict[Name, dict[Name, PlainTensor]] = field(default_factory=dict)
    optimizers: dict[Name, list[OptimizerGroup]] = field(default_factory=dict)
    left_out: list[Line] = field(default_factory=list)  # what could not be kept

    def model(self) -> dict[str, Any]:
        """The state dict of the root module; of several roots a dict of state dicts by name."""
        return _only(self.modules)

    def optimizer(self) -> dict[str, Any]:
        """What ``optimizer.load_state_dict`` takes; of several optimizers a dict of these by name."""
        return _only({name: _state_dict(groups) for name, groups in self.optimizers.items()})


def is_state_value(value: Any) -> bool:
    """True if a value can be stored: tensors, numbers, words, and tuples of numbers."""
    if isinstance(value, tuple):
        return all(type(item) in (int, float, bool) for item in value)
    return type(value) in (int, float, bool, str, type(None)) or isinstance(value, torch.Tensor)


def _only(named: Mapping[str, Any]) -> dict[str, Any]:
    return dict(next(iter(named.values()))) if list(named) == [""] else dict(named)


def _state_dict(groups: list[OptimizerGroup]) -> dict[str, Any]:
    """The numbering is that of `torch.optim.Optimizer.state_dict`: parameters in the order of the groups."""
    state: dict[int, Any] = {}
    described = []
    start = 0
    for group in groups:
        state |= {start + place: dict(values) for place, values in enumerate(group.state) if values}
        end = start + len(group.state)
        described.append({**group.options, "params": list(range(start, end))})
        start = end
    return {"state": state, "param_groups": described}


FORMAT = "reprokit"
VERSION = 1
StoredProgram = Annotated[Program, plain.from_plain]
StoredTensors = dict[int, PlainTensor]
plain_of.register(Program)(plain.to_plain)
Content = TypeVar("Content", bound=FailedProgram)


@dataclass(frozen=True, slots=True)
class CaptureSettings(Settings):
    """The settings of torch, and those of the capture: how it watched, what it kept, which process it was."""

    watch: Later[Annotated[str, one_of("every-step", "sampled", "deferred")]] = None
    history_steps: Later[Count] = None
    history_bytes: Later[Count] = None
    rank: Later[Count] = None
    world_size: Later[Count] = None
    noted_every: Later[Count] = None
    is_noted: Later[bool] = None
    compilers: Later[tuple[Name, ...]] = None  # backends that the script has compiled something with
    began_at: Later[Count] = None  # the first step of this model, if the process trained others before


@dataclass(frozen=True)
class Snapshot:
    """One failed step: its program and tensors, the failure, and what surrounded it.

    ``step`` and ``micro_step`` count from 0. ``layers`` are the numbers of every layer in the steps before it, if they
    were played again; ``before`` is the state that it began with; ``recorded`` is what ``--record`` measured;
    ``samples`` are those of a data set that values of the step were made of; ``digests`` are hashes of what every call
    wrote where it was captured, and of the gradients that arrived there; ``code`` tells later which lines of the
    user's files were edited. The types of the fields are the grammar of the file.
    """

    program: StoredProgram
    tensors: StoredTensors
    failure: Failure
    step: Count
    micro_step: Count
    observed_at: Annotated[str, one_of("loss", "gradient", "parameter", "output", "exception", "")]
    fidelity: Annotated[str, one_of("exact", "close", "unfaithful")] = "exact"
    fidelity_note: Text | None = None
    environment: Environment = Environment()
    source: SourceState = SourceState()
    settings: CaptureSettings = CaptureSettings()
    rng: Generators = Generators()
    timeline: list[StepNumbers] = field(default_factory=list)
    command: list[Line] = field(default_factory=list)
    layers: Later[list[LayerNumbers]] = None
    before: Later[StateBefore] = None
    recorded: Later[list[RecordedStep]] = None
    cause: Later[Cause] = None
    samples: Later[dict[int, Samples]] = None
    digests: Later[list[tuple[Count, Count]]] = None
    code: Later[dict[Name, tuple[Count, ...]]] = None  # digests of lines, see `reprokit.program.code_lines`

    @property
    def num_elements(self) -> int:
        """Elements over all inputs of the program, generator states not counted."""
        return Step.of(self).num_elements

    def summary(self) -> dict[str, Any]:
        """The output of ``reprokit show --json``."""
        summary = {
            "schema": 1,
            "failure": {"step": self.step, "micro_step": self.micro_step, **self._describe_failure()},
            "fidelity": self.fidelity,
            **({"fidelity_note": self.fidelity_note} if self.fidelity != "exact" else {}),
            "program": {"calls": self.program.num_calls, "elements": self.num_elements},
            "environment": plain_of(self.environment),
            "git": plain_of(self.source),
            "rng": _describe_state(plain_of(self.rng)),
            "timeline": plain_of(self.timeline),
            **({"samples": [plain_of(found) for found in self.samples.values()]} if self.samples else {}),
            "story": [plain_of(chapter) for chapter in self.story],
            **({"cause": self.cause.described()} if self.cause is not None else {}),
            "capture": {k: v for k, v in plain_of(self.settings).items() if k not in Settings.__dataclass_fields__},
        }
        return cast(dict[str, Any], told(summary))

    @property
    def end_of_story(self) -> float:
        """The step before which the story ends: the failing one; that of an event has the steps after its begin too."""
        return self.step if self.failure.event is None else math.inf

    @property
    def story(self) -> list[Chapter]:
        """How the run came to its failure, in order of time."""
        return chapters(self.layers or (), self.end_of_story)

    @property
    def bad_rows(self) -> str:
        """``row 2 (sample 23)``: where an input is bad, or the sample that a call of the data set has made bad."""
        value = self.failure.value
        tensor = self.tensors.get(value) if self.failure.is_given and value is not None else None
        is_plain = tensor is not None and tensor.layout is torch.strided and native.is_floating_point(tensor)
        rows: tuple[int, ...] = ()
        if tensor is not None and is_plain and native.element_size(tensor) > 1:  # `isfinite` knows no 8-bit floats
            rows = bad_rows(~native.isfinite(tensor))
        return row_text(self.program, self.samples or {}, value, rows)

    def _describe_failure(self) -> dict[str, Any]:
        failure, cause = self.failure, self.failure.cause
        return {
            **self._describe_origin(failure),
            "backward_node": failure.backward_node,
            "observed_at": self.observed_at,
            "exception": {"type": failure.exception[0], "message": failure.exception[1]} if failure.exception else None,
            "element": list(failure.element) if failure.element is not None else None,
            "num_bad": failure.num_bad,
            "num_elements": failure.num_elements,
            **({"bad_rows": self.bad_rows} if self.bad_rows else {}),
            "shows_cause": not is_vacuous(failure, self.program),
            "cause": cause and {**self._describe_origin(cause), "is_initial": self.is_initial(cause)},
            **({"event": plain_of(failure.event)} if failure.event is not None else {}),
            **({"silence": failure.silence} if failure.silence else {}),
            **({"departure": failure.departure} if failure.departure is not None else {}),
            **(_describe_difference(failure.difference) if failure.difference is not None else {}),
        }

    def _describe_origin(self, failure: Failure) -> dict[str, Any]:
        site = failure.site
        return {
            "phase": failure.phase,
            "kind": failure.kind,
            "call": failure.call,
            "module": failure.module,
            "root": root_of(failure, self.program),
            "input": failure.input_name,
            "site": {"file": site.file, "line": site.line, "code": site.code} if site is not None else None,
        }

    def is_initial(self, failure: Failure) -> bool:
        """True if what failed, or its cause, is a parameter that was bad before the first step of training."""
        items = (item for item in self.program.inputs if item.value == failure.value)
        return self.step == 0 and failure.call is None and any(item.role == "parameter" for item in items)


def _describe_difference(difference: RankDifference) -> dict[str, Any]:
    event = {
        "quantity": "parameter",
        "value": difference.largest,
        "threshold": 0.0,
        "reference_step": difference.equal_after,
        "began_at": difference.began_at,
        "source": difference.parameter,
    }
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in plain_of(difference).items()}
    return {"event": event, "difference": plain}


def save(snapshot: Snapshot, path: Path | str) -> None:
    """Write a snapshot; raises `OSError` when the disk says no, and leaves nothing half-written."""
    write_file(path, "snapshot", replace(snapshot, tensors=storable_together(snapshot.tensors)))


def load(path: Path | str) -> Snapshot:
    """Read a snapshot without executing anything from it; raises `SnapshotError`, or `UsageError` without a file."""
    return read_content(Snapshot, path, "snapshot")


def read_content(cls: type[Content], path: Path | str, kind: str) -> Content:
    """What a file of this kind holds; raises `SnapshotError`, or `UsageError` without a file."""
    content = read_file(path, kind)
    try:
        fields = {name: value for name, value in content.items() if name not in _HEADER}
        made = read(cls, fields, is_whole=cls is Snapshot)
        for part in (made, getattr(made, "context", None)):
            if part is not None:
                require_consistent(part)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise SnapshotError(f"`{path}` is damaged: {error}", hint=_again(kind)) from error
    return made


_HEADER = frozenset({"format", "kind", "version"})


def storable_together(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Plain CPU tensors; those that share memory in the snapshot, such as tied weights, share it in the file."""
    pointers = {v: native.untyped_storage(t).data_ptr() for v, t in tensors.items() if t.layout is torch.strided}
    users = Counter(pointers.values())
    is_shared = {value: users[pointer] > 1 and tensors[value].is_cpu for value, pointer in pointers.items()}
    return {v: native.detach(t) if is_shared.get(v) else storable(t) for v, t in tensors.items()}


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """A plain CPU tensor with storage of its own, so that a view does not drag its base into the file."""
    found = native.detach(tensor)
    found = native.cpu(found if type(found) is torch.Tensor else native.as_subclass(found, torch.Tensor))
    if found.layout is not torch.strided or native.untyped_storage(found).nbytes() == native.numel(
        found
    ) * native.element_size(found):
        return found
    return native.clone(found, memory_format=torch.preserve_format)


def write_file(path: Path | str, kind: str, content: Any) -> None:
    """Write a dataclass, or plain data and tensors, atomically, with the format's header."""
    with replaced(Path(path)) as file:
        native.save({"format": FORMAT, "kind": kind, "version": VERSION, **plain_of(content)}, file)


def read_file(path: Path | str, kind: str) -> dict[str, Any]:
    """Read what `write_file` wrote; raises `SnapshotError` or `UsageError` with a hint for anything else."""
    target = Path(path)
    require_file(target, kind)
    if target.stat().st_size == 0:
        raise TruncatedSnapshot(f"`{target}` is empty", hint=_again(kind))
    content = _unpickle(target, kind)
    if type(content) is not dict or _word(content.get("format")) != FORMAT:
        raise NotASnapshot(f"`{target}` was not written by reprokit", hint=f"give the {kind} file that reprokit wrote")
    require_bounded(content, target)
    version = content.get("version")
    if type(version) is not int or abs(version) > VERSION + 1000:
        shown = _word(version) or type(version).__name__
        raise SnapshotError(f"`{target}` is damaged: its version is {shown!r}", hint=_again(kind))
    if version > VERSION:
        raise NewerFormat(
            f"`{target}` has format version {version}, this reprokit reads up to {VERSION}",
            hint="pip install -U torch-reprokit",
        )
    found = _word(content.get("kind"))
    if found != kind:
        origin = content.get("origin")  # of a reduction, which may know the name of its snapshot
        name = _word(origin.get("file")) if isinstance(origin, dict) else ""
        hint = f"give the {kind} that it was made from, `{name}`" if name else f"give a {kind} file"
        raise NotASnapshot(f"`{target}` is a {found}, not a {kind}", hint=hint)
    return content


def _again(kind: str) -> str:
    return "capture it again" if kind == "snapshot" else "shrink the snapshot again"


def _word(value: Any) -> str:
    """A short text of a file as it may stand in a message, empty for anything else."""
    return visible_name(value)[:80] if type(value) is str else ""


def _unpickle(target: Path, kind: str) -> Any:
    if not _is_archive(target):
        with target.open("rb") as file:
            started_as_zip = file.read(4) == b"PK\x03\x04"
        if started_as_zip:
            raise TruncatedSnapshot(f"`{target}` is cut off", hint=f"copy it again, or {_again(kind)}")
        raise NotASnapshot(f"`{target}` was not written by reprokit", hint=f"give the {kind} file that reprokit wrote")
    try:
        require_stored(target)
        content = native.load(target, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        raise NotASnapshot(
            f"`{target}` holds more than plain data and tensors, so it was not opened",
            hint="reprokit never executes code from a file",
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # torch's unpickler meets damage with whatever its parts raise
        raise TruncatedSnapshot(
            f"`{target}` is damaged", hint=f"copy it again, or {_again(kind)}", note=str(error).split("\n")[0]
        ) from error
    return content


def _is_archive(target: Path) -> bool:
    try:
        return zipfile.is_zipfile(target)
    except zipfile.BadZipFile:  # one that claims to be a part of several
        return False


def _describe_state(state: Any) -> Any:
    """A generator state in a few words; the numbers themselves stay in the file."""
    if isinstance(state, torch.Tensor):
        return {"bytes": native.numel(state) * native.element_size(state)}
    if isinstance(state, dict):
        return {name: _describe_state(part) for name, part in state.items()}
    if isinstance(state, (list, tuple)):
        return {"items": len(state)}
    return state
