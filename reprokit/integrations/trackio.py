"""Numbers of a run in Trackio: ``reprokit.capture(record="auto", on_numbers=TrackioSink())``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reprokit.integrations import find_framework

trackio = find_framework("trackio")


class TrackioSink:
    """Logs to ``run``, else to the run that ``trackio.init`` has started."""

    def __init__(self, run: Any = None) -> None:
        self._log = run.log if run is not None else trackio.log

    def __call__(self, numbers: Mapping[str, float]) -> None:
        self._log({name: number for name, number in numbers.items() if name != "step"}, step=int(numbers["step"]))
