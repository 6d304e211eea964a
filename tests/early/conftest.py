"""Early warning takes numbers in batches by the time of a step: not in its tests."""

from __future__ import annotations

import pytest

from reprokit.capture import early_warning


@pytest.fixture(autouse=True)
def whatever_the_machine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches end by their length."""
    monkeypatch.setattr(early_warning, "_DELAY", 1e9)
