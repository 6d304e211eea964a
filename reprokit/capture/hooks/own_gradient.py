"""The gradient of a parameter as this process computes it, before `fully_shard` averages it over all of them.

Afterwards each process holds a part of the average only, and nobody can tell whose step made it bad. What is seen here
is reported before the last gradients are averaged, so all processes know it when they come to their optimizers.
"""

from __future__ import annotations

from typing import Any

import torch

from reprokit.capture.record import kinds
from reprokit.capture.record.screens import bad_tensor
from reprokit.capture.run.run_state import RunState
from reprokit.locate.ways import is_finite_sum


class OwnGradient:
    """Looks at one small gradient of an early layer, which nearly every bad backward pass reaches; not on a GPU, where
    it would have to be waited for, nor with a grad scaler, whose overflows are normal."""

    def __init__(self, run_state: RunState) -> None:
        self._run_state = run_state
        self._hook: Any = None
        self._has_chosen = False
        self._num_entries: int | None = None  # in the step when a bad gradient was reported

    def forget(self) -> None:
        """Let go of the parameter."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def before_backward(self) -> None:
        """A backward pass begins; a loop that has cleared a bad gradient has skipped its step."""
        run_state = self._run_state
        if not self._has_chosen and run_state.ranks.shards.units:
            self._has_chosen = True
            parameter: Any = run_state.ranks.shards.early_parameter()
            if parameter is not None and not parameter.is_cuda:
                self._hook = parameter.register_hook(lambda gradient: run_state.tape.guard(self._look, gradient))
        if self._num_entries is not None:
            later = run_state.running.entries[self._num_entries :]
            if any(entry.kind is kinds.ZERO_GRAD for entry in later):
                self._num_entries = None
                run_state.ranks.withdraw(run_state.iterations.completed)

    def _look(self, gradient: torch.Tensor) -> None:
        run_state = self._run_state
        if run_state.scalers.is_used or run_state.running.suspect is not None or not run_state.tape.enabled:
            return
        if self._num_entries is None and not is_finite_sum(gradient) and bad_tensor([gradient]) is not None:
            self._num_entries = len(run_state.running.entries)
            run_state.report_bad("gradient")
