"""The steps of a training in numbers: one series for each optimizer where several take turns, else a single one.

A row of a timeline has the name of its optimizer only if there are several; the last row is the step that failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def by_optimizer(timeline: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of every optimizer by its name, which is empty for a single series."""
    found: dict[str, list[Row]] = {}
    for row in timeline:
        found.setdefault(str(row.get("optimizer", "")), []).append(row)
    return found


def failing_series(timeline: Sequence[Row]) -> list[Row]:
    """The rows that may be compared with the step that failed, this one included."""
    return by_optimizer(timeline)[str(timeline[-1].get("optimizer", ""))] if timeline else []


def has_several_optimizers(timeline: Sequence[Row]) -> bool:
    """True if optimizers take turns."""
    return any("optimizer" in row for row in timeline)


def titled(title: str, optimizer: str) -> str:
    """What a series is called: ``loss (od)``."""
    return f"{title} ({optimizer})" if optimizer else title
