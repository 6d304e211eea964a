"""``ReprokitCallback`` for the ``Trainer`` of Lightning: watches ``trainer.fit()`` and saves the first failing step.

Works with ``lightning`` and with ``pytorch_lightning``: the base class comes from the one that the program has
imported. ``fit`` is the block that is watched: an exception that leaves it is a failure.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from reprokit.integrations import find_framework
from reprokit.integrations.span import Options, Span

if TYPE_CHECKING:
    Callback = object  # the framework is not needed to check these types
else:
    Callback = find_framework("lightning.pytorch", "pytorch_lightning").Callback


class ReprokitCallback(Callback):
    """Watches each ``fit`` of the trainer it is given to; takes the arguments of `reprokit.capture`."""

    def __init__(self, output: str | os.PathLike[str] | None = None, **options: Unpack[Options]) -> None:
        super().__init__()
        self._span = Span(output, options)

    @property
    def snapshots(self) -> list[Path]:
        """The files written so far."""
        return self._span.snapshots

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        self._span.begin(self)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Check what is not checked yet, and leave."""
        self._span.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave with the exception that ended ``fit``; a capture that stops it is one of these."""
        self._span.end(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave a ``fit`` that was broken off without an exception."""
        self._span.end()
