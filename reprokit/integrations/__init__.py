"""Callbacks for training frameworks and sinks for trackers, for those who prefer code over ``reprokit capture``.

One module a framework (`transformers`, `lightning`); importing this package imports none of them. What the callbacks
share is here: finding the framework, and `Span` in the module of that name.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from reprokit.errors import ReprokitError


class MissingFramework(ReprokitError, ImportError):
    """A callback was imported without its framework; an `ImportError` for those who test for one."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.add_note(f"hint: {hint}")


def find_framework(*names: str) -> ModuleType:
    """The first of these modules that the program has imported already, else the first that is installed.

    Raises `MissingFramework` when there is none; an error inside an installed one leaves here unchanged.
    """
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    package = names[0].partition(".")[0]
    raise MissingFramework(
        f"`{package}` is not installed", hint=f"pip install {package}; `reprokit capture` needs no callback"
    )
