"""The oracle: does this candidate still fail the same way? Every answer is a real execution.

A verdict is remembered by the candidate's content, so the same candidate is never run twice. How a candidate is run is
a seam (`Runner`): in this process here. Time and number of checks are bounded.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch

from reprokit.locate.blame import locate
from reprokit.locate.failure import Failure
from reprokit.program.run import determinism
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.signature import Signature, is_clean, same


class Verdict(Enum):
    """What a check can say. A crash is never taken for the bug, nor another failure for this one."""

    SAME = "same"
    OTHER = "other"
    PASSES = "passes"
    INVALID = "invalid"


class OutOfBudget(Exception):
    """The time or the number of checks that was allowed is spent."""


class Runner(Protocol):
    """Runs a candidate and names its failure; may raise for a candidate that cannot be run."""

    def __call__(self, candidate: Candidate) -> Failure | None:
        """The failure of the candidate, or ``None`` when nothing goes wrong."""


def run_in_process(candidate: Candidate) -> Failure | None:
    """Run in this process, on copies, with the generators and modes given back."""
    state = torch.get_rng_state()
    grad = torch.is_grad_enabled()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.set_grad_enabled(True)
            return locate(candidate.program, candidate.tensors)
    finally:
        torch.set_grad_enabled(grad)
        torch.set_rng_state(state)


@dataclass
class Oracle:
    """Decides candidates against one signature.

    ``ways`` are the ways in which no input may be bad. ``checks`` counts executions and ``verdicts`` what they said.
    ``settings`` are the recorded determinism switches.
    """

    signature: Signature
    ways: frozenset[str] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)
    max_time: float | None = None
    max_checks: int | None = None
    runner: Runner = run_in_process
    on_check: Callable[[Candidate, Verdict, str], None] | None = None
    checks: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    _known: dict[str, Verdict] = field(default_factory=dict)
    _failures: dict[str, Failure] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)

    def check(self, candidate: Candidate, change: str = "") -> Verdict:
        """The verdict on a candidate; raises `OutOfBudget` when no more checks are allowed."""
        known = self._known.get(candidate.digest)
        if known is not None:
            return known
        if not is_clean(candidate.program, candidate.tensors, self.signature, self.ways):
            return Verdict.OTHER
        self._spend()
        verdict = self._judge(candidate)
        self._known[candidate.digest] = verdict
        self.verdicts[verdict.value] += 1
        if self.on_check is not None:
            self.on_check(candidate, verdict, change)
        return verdict

    def failure(self, candidate: Candidate) -> Failure | None:
        """The failure of a candidate under the recorded settings; not counted as a check."""
        with determinism(self.settings):
            return self.runner(candidate)

    def known_failure(self, candidate: Candidate) -> Failure | None:
        """The failure of a candidate that was found to be the same one, without running it again."""
        if candidate.digest not in self._failures:
            found = self.failure(candidate)
            if found is None:
                return None
            self._failures[candidate.digest] = found
        return self._failures[candidate.digest]

    @property
    def remembered(self) -> dict[str, str]:
        """The verdicts by digest, as plain data."""
        return {digest: verdict.value for digest, verdict in self._known.items()}

    def recall(self, verdicts: Mapping[str, str]) -> None:
        """Take over the verdicts of an earlier run; raises `ValueError` for one that does not exist."""
        self._known.update({digest: Verdict(value) for digest, value in verdicts.items()})

    def _spend(self) -> None:
        is_late = self.max_time is not None and time.monotonic() - self._started > self.max_time
        if is_late or (self.max_checks is not None and self.checks >= self.max_checks):
            raise OutOfBudget
        self.checks += 1

    def _judge(self, candidate: Candidate) -> Verdict:
        try:
            failure = self.failure(candidate)
        except Exception:  # whatever a candidate raises outside its calls makes it unusable, nothing more
            return Verdict.INVALID
        if failure is None:
            return Verdict.PASSES
        if same(Signature.of(failure, candidate.program), self.signature):
            self._failures[candidate.digest] = failure
            return Verdict.SAME
        return Verdict.INVALID if failure.kind == "exception" else Verdict.OTHER
