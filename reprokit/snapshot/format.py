"""The snapshot file: everything about one failed step, in a form that opening never executes.

A file is one ``torch.save`` of dicts, lists, numbers, strings and tensors, read back with ``weights_only=True``.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from reprokit.errors import NewerFormat, NotASnapshot, SnapshotError, TruncatedSnapshot
from reprokit.locate import failure as failures
from reprokit.locate.failure import Failure, is_vacuous, root_of
from reprokit.program import plain
from reprokit.program.functions import display_name
from reprokit.program.ir import Program, Site
from reprokit.snapshot import grammar
from reprokit.snapshot.files import replaced
from reprokit.snapshot.limits import require_bounded, require_stored
from reprokit.snapshot.paths import require_file
from reprokit.visible import visible_name

FORMAT = "reprokit"
VERSION = 1


@dataclass(frozen=True)
class Snapshot:
    """One failed step: its program and tensors, the failure, and what surrounded it.

    ``step`` and ``micro_step`` count from 0. ``fidelity`` is ``exact``, ``close`` or ``unfaithful``. ``settings``
    are the determinism switches
    that a replay needs. ``timeline`` has one dict per step: step, loss, learning rate, gradient norm, seconds.
    """

    program: Program
    tensors: dict[int, torch.Tensor]
    failure: Failure
    step: int
    micro_step: int
    observed_at: str
    fidelity: str = "exact"
    fidelity_note: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    @property
    def num_elements(self) -> int:
        """Elements over all inputs of the program, generator states not counted."""
        return count_elements(self.program, self.tensors)

    def summary(self) -> dict[str, Any]:
        """The output of ``reprokit show --json``."""
        return {
            "schema": 1,
            "failure": {"step": self.step, "micro_step": self.micro_step, **self._describe_failure()},
            "fidelity": self.fidelity,
            **({"fidelity_note": self.fidelity_note} if self.fidelity != "exact" else {}),
            "program": {"calls": self.program.num_calls, "elements": self.num_elements},
            "environment": self.environment,
            "git": self.source,
            "rng": {name: _describe_state(state) for name, state in self.rng.items()},
            "timeline": self.timeline,
            "capture": {name: self.settings[name] for name in _CAPTURE_SETTINGS if name in self.settings},
        }

    def _describe_failure(self) -> dict[str, Any]:
        failure, cause = self.failure, self.failure.cause
        return {
            "phase": failure.phase,
            "kind": failure.kind,
            "call": failure.call,
            "backward_node": failure.backward_node,
            "module": failure.module,
            "root": root_of(failure, self.program),
            "site": _describe_site(failure.site),
            "observed_at": self.observed_at,
            "exception": {"type": failure.exception[0], "message": failure.exception[1]} if failure.exception else None,
            "input": failure.input_name,
            "element": list(failure.element) if failure.element is not None else None,
            "num_bad": failure.num_bad,
            "num_elements": failure.num_elements,
            "shows_cause": not is_vacuous(failure, self.program),
            "cause": self._describe_cause(cause) if cause is not None else None,
        }

    def _describe_cause(self, cause: Failure) -> dict[str, Any]:
        """The origin of the bad value that made a call raise."""
        names = ("phase", "kind", "call", "module")
        plain = {name: getattr(cause, name) for name in names}
        root, site = root_of(cause, self.program), _describe_site(cause.site)
        return {**plain, "root": root, "input": cause.input_name, "is_initial": self.is_initial(cause), "site": site}

    def is_initial(self, failure: Failure) -> bool:
        """True if what failed, or its cause, is a parameter that was bad before the first step of training."""
        items = (item for item in self.program.inputs if item.value == failure.value)
        return self.step == 0 and failure.call is None and any(item.role == "parameter" for item in items)


def _describe_site(site: Site | None) -> dict[str, Any] | None:
    return {"file": site.file, "line": site.line, "code": site.code} if site else None


_CAPTURE_SETTINGS = ("watch", "history_steps", "history_bytes", "rank", "world_size", "noted_every", "is_noted")


def count_elements(program: Program, tensors: Mapping[int, torch.Tensor]) -> int:
    """Elements over all inputs of a program, generator states not counted."""
    return sum(tensors[item.value].numel() for item in program.inputs if item.role != "rng")


def save(snapshot: Snapshot, path: Path | str) -> None:
    """Write a snapshot; raises `OSError` when the disk says no, and leaves nothing half-written."""
    content = {name: getattr(snapshot, name) for name in Snapshot.__dataclass_fields__}
    content["program"] = plain.to_plain(snapshot.program)
    content["failure"] = failures.to_plain(snapshot.failure)
    content["tensors"] = storable_together(snapshot.tensors)
    write_file(path, "snapshot", content)


def load(path: Path | str) -> Snapshot:
    """Read a snapshot without executing anything from it; raises `SnapshotError`, or `UsageError` without a file."""
    content = read_file(path, "snapshot")
    try:
        fields = checked(content, grammar.SNAPSHOT)
        require_call(fields["program"], fields["failure"])
        return Snapshot(**fields)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise SnapshotError(f"`{path}` is damaged: {error}", hint="capture it again") from error


def checked(content: Mapping[str, Any], kinds: Mapping[str, grammar.Kind]) -> dict[str, Any]:
    """The fields of a file: program, tensors and failure, and the others by their kinds; raises `ValueError`."""
    rest = {name: value for name, value in content.items() if name not in _OWN_READER}
    fields = grammar.conform(rest, kinds)
    program = plain.from_plain(content["program"])
    return {
        **fields,
        "program": program,
        "tensors": _tensors(program, content["tensors"]),
        "failure": failures.from_plain(fields["failure"]),
    }


_OWN_READER = frozenset({"format", "kind", "version", "program", "tensors"})


def _tensors(program: Program, tensors: Any) -> dict[int, torch.Tensor]:
    """The tensors of a file, one for each input of its program."""
    found: dict[int, torch.Tensor] = grammar.map_of(grammar.integer, grammar.tensor)(tensors)
    lacking = [item.name for item in program.inputs if item.value not in found]
    if lacking:
        raise ValueError(f"the input `{lacking[0]}` has no tensor")
    return found


def require_call(program: Program, failure: Failure) -> None:
    """Raise `ValueError` unless the calls that a failure names are calls of the program."""
    for origin in (failure, failure.drop, failure.cause):
        index = origin.call_index if origin is not None else None
        if origin is None or (index is None and origin.call is None):
            continue
        if index is None or index not in range(len(program.calls)):
            raise ValueError(f"the failure comes from call {index} of {len(program.calls)}")
        target = program.calls[index].target
        if origin.call not in (None, target, display_name(target), program.calls[index].kwargs.get("name")):
            raise ValueError(f"the failure names `{origin.call:.60}` for a call of `{target}`")


def storable_together(tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Plain CPU tensors; those that share memory in the snapshot, such as tied weights, share it in the file."""
    pointers = {v: t.untyped_storage().data_ptr() for v, t in tensors.items() if t.layout is torch.strided}
    users = Counter(pointers.values())
    is_shared = {value: users[pointer] > 1 and tensors[value].is_cpu for value, pointer in pointers.items()}
    return {v: t.detach() if is_shared.get(v) else storable(t) for v, t in tensors.items()}


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """A plain CPU tensor with storage of its own, so that a view does not drag its base into the file."""
    plain_tensor = tensor.detach()
    if type(plain_tensor) is not torch.Tensor:
        plain_tensor = plain_tensor.as_subclass(torch.Tensor)
    plain_tensor = plain_tensor.cpu()
    if plain_tensor.layout is torch.strided:
        storage = plain_tensor.untyped_storage()
        if storage.nbytes() != plain_tensor.numel() * plain_tensor.element_size():
            plain_tensor = plain_tensor.clone(memory_format=torch.preserve_format)
    return plain_tensor


def write_file(path: Path | str, kind: str, content: Mapping[str, Any]) -> None:
    """Write plain data and tensors atomically, with the format's header."""
    with replaced(Path(path)) as file:
        torch.save({"format": FORMAT, "kind": kind, "version": VERSION, **_as_plain(dict(content))}, file)


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
        raise NotASnapshot(f"`{target}` is a {found}, not a {kind}", hint=_hint_for_kind(content, kind))
    return content


def _again(kind: str) -> str:
    return "capture it again" if kind == "snapshot" else "shrink the snapshot again"


def _hint_for_kind(content: Mapping[str, Any], kind: str) -> str:
    """The hint for a file of another kind; a reduction may know the name of its snapshot."""
    origin = content.get("origin")
    name = _word(origin.get("file")) if isinstance(origin, dict) else ""
    return f"give the {kind} that it was made from, `{name}`" if name else f"give a {kind} file"


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
        content = torch.load(target, weights_only=True, map_location="cpu")
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


def _as_plain(value: Any) -> Any:
    """Nested data with exact built-in types, because a restricted unpickler refuses subclasses such as version
    strings."""
    if value is None or isinstance(value, (bool, torch.Tensor)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {_as_plain(key): _as_plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_as_plain(item) for item in value)
    if isinstance(value, (list, set, frozenset)):
        return [_as_plain(item) for item in value]
    return str(value)


def _describe_state(state: Any) -> Any:
    """A generator state in a few words; the numbers themselves stay in the file."""
    if isinstance(state, torch.Tensor):
        return {"bytes": state.numel() * state.element_size()}
    if isinstance(state, dict):
        return {name: _describe_state(part) for name, part in state.items()}
    if isinstance(state, (list, tuple)):
        return {"items": len(state)}
    return state
