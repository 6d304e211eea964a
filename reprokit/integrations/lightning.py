"""``ReprokitCallback`` for the ``Trainer`` of Lightning: watches ``trainer.fit()`` and saves the first failing step.

Works with ``lightning`` and with ``pytorch_lightning``: the base class comes from the one that the program has
imported. ``fit`` is the block that is watched: an exception that leaves it is a failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reprokit.integrations import find_framework
from reprokit.integrations.span import WithSpan

if TYPE_CHECKING:
    Callback = object  # the framework is not needed to check these types
else:
    Callback = find_framework("lightning.pytorch", "pytorch_lightning").Callback


class ReprokitCallback(WithSpan, Callback):
    """Watches each ``fit`` of the trainer it is given to; takes the arguments of `reprokit.capture`."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch; the trainer's loggers get what ``record`` measures."""

        def log(numbers: dict[str, float]) -> None:
            metrics = {f"reprokit/{name}": number for name, number in numbers.items() if name != "step"}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=int(numbers["step"]))

        self._span.begin(self, log)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Check what is not checked yet, and leave."""
        self._span.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave with the exception that ended ``fit``; a capture that stops it is one of these."""
        self._span.end(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave a ``fit`` that was broken off without an exception."""
        self._span.end()
