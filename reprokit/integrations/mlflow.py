"""Numbers of a run in MLflow: ``reprokit.capture(record="auto", on_numbers=MlflowSink())``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from reprokit.integrations import find_framework

mlflow = find_framework("mlflow")
_REFUSED = re.compile(r"[^\w\-. :/]")  # in the names of metrics


class MlflowSink:
    """Logs metrics to the run ``run_id``, else to the active one."""

    def __init__(self, run_id: str | None = None) -> None:
        self._run_id = run_id

    def __call__(self, numbers: Mapping[str, float]) -> None:
        metrics = {_REFUSED.sub("_", name): number for name, number in numbers.items() if name != "step"}
        mlflow.log_metrics(metrics, step=int(numbers["step"]), run_id=self._run_id)
