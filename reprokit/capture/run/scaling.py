"""Grad scalers: their product may overflow, their skipped steps are normal, a collapsing scale is a failure."""

from __future__ import annotations

import torch

COLLAPSED_SCALE = 1.0
SKIPPED_STREAK = 100


class ScalerWatch:
    """Counts the steps that a grad scaler leaves out in a row."""

    def __init__(self) -> None:
        self.is_used = False
        self._skipped = 0
        self._scale: torch.Tensor | None = None

    def scaled(self, scaler: torch.amp.GradScaler) -> torch.Tensor | None:
        """A loss was scaled; a copy of the scale it was scaled with."""
        scale = scaler._scale
        self.is_used = self.is_used or scale is not None
        self._scale = scale.detach().clone() if scale is not None else None
        return self._scale

    def stepped(self) -> None:
        """The scaler let the optimizer step."""
        self._skipped = 0

    def skipped(self, scaler: torch.amp.GradScaler) -> bool:
        """The scaler left a step out; whether that is no longer its normal search for a scale."""
        self._skipped += 1
        return self._skipped >= SKIPPED_STREAK or (self._skipped > 1 and scaler.get_scale() < COLLAPSED_SCALE)

    @property
    def scale(self) -> torch.Tensor | None:
        """The scale of the last loss."""
        return self._scale
