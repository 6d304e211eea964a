"""How a candidate is observed wherever it runs, the report on it, and both as bytes for another process.

Candidates travel as plain data and tensors that a restricted unpickler accepts, reports as plain data and reprokit's
own classes. So a candidate that got hold of its process cannot make this one execute anything.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

import torch

from reprokit.errors import ReprokitError
from reprokit.locate.failure import Failure
from reprokit.program import plain
from reprokit.program.interpreter import Settings, determinism
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.plainness import raw_bytes
from reprokit.snapshot.format import storable

Observation: TypeAlias = Failure | None
Observe: TypeAlias = Callable[[Candidate], Observation]


class NotObserved(ReprokitError):
    """A candidate ended without an observation. ``reason``: ``crash``, ``time``, ``memory`` or ``error``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Report:
    """What came back from one candidate: an observation or an error."""

    observation: Observation = None
    error: Exception | None = None

    def value(self) -> Observation:
        """The observation; raises the error."""
        if self.error is not None:
            raise self.error
        return self.observation

    @property
    def took_its_process_down(self) -> bool:
        """True if the candidate would have ended or stopped the reduction, had it run in this process."""
        return isinstance(self.error, NotObserved) and self.error.reason != "error"


@dataclass(frozen=True)
class Task:
    """How candidates are observed: the same settings and the same state of the generator in every process.

    ``observe`` has to be importable by name (a function of a module or an object that pickles) where candidates run in
    spawned children or through an executor.
    """

    observe: Observe
    settings: Settings = Settings()
    rng: bytes = b""

    @classmethod
    def of(cls, observe: Observe, settings: Settings) -> Task:
        """A task with this process's number of threads, where none was recorded, and its generator."""
        rng = raw_bytes(torch.get_rng_state())
        return cls(observe, replace(settings, num_threads=settings.num_threads or torch.get_num_threads()), rng)

    def __call__(self, candidate: Candidate) -> Observation:
        """Observe one candidate; the settings and the generator are given back."""
        before = torch.get_rng_state()
        try:
            with determinism(self.settings):
                if self.rng:
                    torch.set_rng_state(torch.frombuffer(bytearray(self.rng), dtype=torch.uint8))
                return self.observe(candidate)
        finally:
            torch.set_rng_state(before)

    def report(self, candidate: Candidate) -> Report:
        """The report on one candidate that is run right here."""
        try:
            return Report(self(candidate))
        except Exception as error:  # whatever a candidate raises outside its calls makes it unusable, nothing more
            return Report(error=error)


def pack(candidate: Candidate) -> bytes:
    """A candidate as bytes. A tensor that is several inputs stays one."""
    tensors = {item.value: candidate.tensors[item.value] for item in candidate.program.inputs}
    sent = {id(tensor): _sendable(tensor) for tensor in tensors.values()}
    content = {
        "program": plain.to_plain(candidate.program),
        "variant": candidate.variant,
        "tensors": {value: sent[id(tensor)] for value, tensor in tensors.items()},
    }
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def unpack(packed: bytes) -> Candidate:
    """The inverse of `pack`; raises whatever damaged data raises."""
    content = torch.load(io.BytesIO(packed), weights_only=True)
    return Candidate(plain.from_plain(content["program"]), content["tensors"], str(content["variant"]))


def pack_report(report: Report) -> bytes:
    """A report as bytes; an observation that does not pickle becomes an error."""
    reason, message = "", ""
    if report.error is not None:
        reason = report.error.reason if isinstance(report.error, NotObserved) else "error"
        message = str(report.error) if reason != "error" else f"{type(report.error).__name__}: {report.error}"
    try:
        return pickle.dumps((report.observation, reason, message))
    except Exception as error:  # pickling fails in as many ways as there are classes
        return pickle.dumps((None, "error", f"the observation cannot be sent: {error}"))


def unpack_report(packed: bytes) -> Report:
    """The inverse of `pack_report`; anything else becomes an error."""
    try:
        observation, reason, message = _PlainUnpickler(io.BytesIO(packed)).load()
    except Exception as error:  # damaged data fails in as many ways
        return Report(error=NotObserved("error", f"the report cannot be read: {error}"))
    return Report(error=NotObserved(reason, message)) if reason else Report(observation)


class _PlainUnpickler(pickle.Unpickler):
    """Knows no classes but reprokit's own that hold data."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "reprokit":
            found = super().find_class(module, name)
            if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, Enum)):
                return found
        raise pickle.UnpicklingError(f"`{module}.{name}` is not plain data")


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """With storage of its own, on the device where it is."""
    return storable(tensor) if tensor.device.type == "cpu" else tensor.detach()
