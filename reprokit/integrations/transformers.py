"""``ReprokitCallback`` for the ``Trainer`` of transformers: watches ``trainer.train()``, saves the first failing step.

The trainer tells its callbacks of a good end only. An exception that ends the program is seen through
``sys.excepthook``; one that the script handles ends nothing, and the watch goes on until the next ``train()``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from reprokit.integrations import find_framework
from reprokit.integrations.span import Options, Span

if TYPE_CHECKING:
    TrainerCallback = object  # the framework is not needed to check these types
else:
    TrainerCallback = find_framework("transformers").TrainerCallback


class ReprokitCallback(TrainerCallback):
    """Watches each training run of the trainer it is given to; takes the arguments of `reprokit.capture`."""

    def __init__(self, output: str | os.PathLike[str] | None = None, **options: Unpack[Options]) -> None:
        super().__init__()
        self._span = Span(output, options)

    @property
    def snapshots(self) -> list[Path]:
        """The files written so far."""
        return self._span.snapshots

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch."""
        self._span.begin(self)
        self._span.end_when_uncaught()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check what is not checked yet, and leave."""
        self._span.finish()
