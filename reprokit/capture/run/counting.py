"""Counting iterations as a person would: one per attempted optimizer step, however many optimizers there are.

An optimizer that takes over from another one (it holds the same parameters, or the other one is gone or steps no more)
goes on with its count; of several that live side by side, the one that has stepped most often counts. Steps that a grad
scaler skips are normal; a scale that collapses is a failure.
"""

from __future__ import annotations

import weakref

import torch

from reprokit.capture.record.state import parameters_of


class Iterations:
    """``completed`` iterations, and ``micro_step`` backward calls made in the one that is running."""

    def __init__(self) -> None:
        self.completed = 0
        self.micro_step = 0
        self.total = 0
        self._counts: dict[int, int] = {}
        self._attempts: dict[int, int] = {}
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._parameters: dict[int, set[int]] = {}
        self._supposed: dict[int, tuple[int, int]] = {}  # who seems to have been replaced, and how far it was
        self._last: int | None = None

    def attempts(self, optimizer: torch.optim.Optimizer) -> int:
        """How many steps of this very optimizer were attempted."""
        known = self._optimizers.get(id(optimizer))
        return self._attempts[id(optimizer)] if known is not None and known() is optimizer else 0

    def attempted(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of ``optimizer`` ended or was skipped by a grad scaler."""
        key = id(optimizer)
        known = self._optimizers.get(key)
        if known is None or known() is not optimizer:
            own = {id(parameter) for parameter in parameters_of(optimizer)}
            inherited = [
                count
                for other, count in self._counts.items()
                if self._optimizers[other]() is None or own & self._parameters[other] or other == key
            ]
            self._counts[key], self._attempts[key] = max(inherited, default=0), 0
            self._optimizers[key], self._parameters[key] = weakref.ref(optimizer), own
        self._counts[key] += 1
        self._attempts[key] += 1
        self.total += 1
        if len(self._counts) > 1:
            self._notice_replacement(key)
        self._last = key
        if self._counts[key] > self.completed:
            self.completed = self._counts[key]
            self.micro_step = 0

    def _notice_replacement(self, key: int) -> None:
        """A new optimizer that steps twice in a row goes on for an older one, unless that one steps again."""
        for new, (old, count) in list(self._supposed.items()):
            if old == key:
                self._counts[new] -= count
                self.completed = max(self._counts.values())
                del self._supposed[new]
        is_new = self._attempts[key] == self._counts[key] == 2
        if is_new and self._last == key and key not in self._supposed:
            old = max((other for other in self._counts if other != key), key=self._counts.__getitem__)
            if list(self._counts).index(old) < list(self._counts).index(key):
                self._supposed[key] = (old, self._counts[old])
                self._counts[key] += self._counts[old]

    def updated_by_hand(self) -> None:
        """The loop changed parameters without an optimizer."""
        self.completed += 1
        self.total += 1
        self.micro_step = 0


COLLAPSED_SCALE = 1.0
SKIPPED_STREAK = 100


class ScalerWatch:
    """Counts the steps that a grad scaler leaves out in a row."""

    def __init__(self) -> None:
        self.is_used = False
        self.scale: torch.Tensor | None = None  # of the last loss
        self._skipped = 0

    def scaled(self, scaler: torch.amp.GradScaler) -> torch.Tensor | None:
        """A loss was scaled; a copy of the scale it was scaled with."""
        scale = scaler._scale
        self.is_used = self.is_used or scale is not None
        self.scale = scale.detach().clone() if scale is not None else None
        return self.scale

    def stepped(self) -> None:
        """The scaler let the optimizer step."""
        self._skipped = 0

    def skipped(self, scaler: torch.amp.GradScaler) -> bool:
        """The scaler left a step out; whether that is no longer its normal search for a scale."""
        self._skipped += 1
        return self._skipped >= SKIPPED_STREAK or (self._skipped > 1 and scaler.get_scale() < COLLAPSED_SCALE)
