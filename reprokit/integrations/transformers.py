"""``ReprokitCallback`` for the ``Trainer`` of transformers: watches ``trainer.train()``, saves the first failing step.

The trainer calls its callbacks at a good end only. An exception that ends the program is seen through
``sys.excepthook``; one that the script handles ends nothing, and the watch goes on until the next ``train()``.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from reprokit.integrations import find_framework
from reprokit.integrations.span import WithSpan

if TYPE_CHECKING:
    TrainerCallback = object  # the framework is not needed to check these types
else:
    TrainerCallback = find_framework("transformers").TrainerCallback


_MOST_ROWS = 100  # as many steps as the timeline has


class ReprokitCallback(WithSpan, TrainerCallback):
    """Watches each training run of the trainer it is given to; takes the arguments of `reprokit.capture`."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch; the last steps that ``record`` measures stand in the trainer's log history."""

        rows: deque[dict[str, float]] = deque()

        def log(numbers: dict[str, float]) -> None:
            measured = {f"reprokit/{name}": number for name, number in numbers.items() if name != "step"}
            rows.append({**measured, "step": int(numbers["step"])})
            state.log_history.append(rows[-1])
            if len(rows) > _MOST_ROWS:  # every checkpoint writes the history
                oldest = rows.popleft()
                state.log_history[:] = [row for row in state.log_history if row is not oldest]

        self._span.begin(self, log)
        self._span.end_when_uncaught()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Note the trainer's own numbers in the timeline."""
        self._span.note(logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check what is not checked yet, and leave."""
        self._span.finish()
