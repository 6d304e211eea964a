"""What is done with a candidate wherever it runs, and what comes back: an observation, or why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from reprokit.errors import ReprokitError
from reprokit.locate.failure import Failure
from reprokit.program.run import Settings, determinism
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.plainness import raw_bytes

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
    workers or through an executor.
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
