"""Numbers of a run in Weights & Biases: ``reprokit.capture(record="auto", on_numbers=WandbSink())``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reprokit.integrations import find_framework

wandb = find_framework("wandb")


class WandbSink:
    """Logs to ``run``, else to the run that ``wandb.init`` has started.

    The step is a metric of its own, because a run may log other things between two of these steps.
    """

    def __init__(self, run: Any = None) -> None:
        self._run = run if run is not None else wandb.run
        if self._run is None:
            raise RuntimeError("there is no run: call `wandb.init` first")
        self._run.define_metric("reprokit/step")
        self._run.define_metric("reprokit/*", step_metric="reprokit/step")

    def __call__(self, numbers: Mapping[str, float]) -> None:
        self._run.log({f"reprokit/{name}": number for name, number in numbers.items()})
