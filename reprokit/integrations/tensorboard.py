"""Numbers of a run in TensorBoard: ``reprokit.capture(record="auto", on_numbers=TensorBoardSink("runs/finetune"))``."""

from __future__ import annotations

import os
from collections.abc import Mapping

from reprokit.integrations import find_framework

find_framework("tensorboard")


class TensorBoardSink:
    """Writes every number as a scalar into an event file in ``folder``."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._writer = find_framework("torch.utils.tensorboard").SummaryWriter(os.fspath(folder))

    def __call__(self, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            if name != "step":
                self._writer.add_scalar(name, number, int(numbers["step"]))

    def close(self) -> None:
        self._writer.close()
