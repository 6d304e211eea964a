"""The errors of reprokit.

ReprokitError            exit code 1
├── UsageError           2
├── SnapshotError        1
│   ├── NotASnapshot     2
│   ├── TruncatedSnapshot
│   └── NewerFormat
├── NotReproduced        4
│   └── GivenInput
├── Flaky                5
├── OutputError          1  (also an OSError)
└── Interrupted          130
"""

from __future__ import annotations

from typing import Any


class ReprokitError(Exception):
    """An error with a hint. ``exit_code`` is what the command line ends with."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None, note: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.note = note


class UsageError(ReprokitError):
    """The command was given something that cannot work."""

    exit_code = 2


class SnapshotError(ReprokitError):
    """A file cannot be used as a snapshot."""


class NotASnapshot(SnapshotError):
    """The file is something else, so another one has to be named."""

    exit_code = 2


class TruncatedSnapshot(SnapshotError):
    """The file is cut off or damaged."""


class NewerFormat(SnapshotError):
    """The file was written by a newer reprokit."""


class NotReproduced(ReprokitError):
    """The failure does not happen again."""

    exit_code = 4


class GivenInput(NotReproduced):
    """The bad value was in an input of the step; ``input`` has its name, rows, elements and place."""

    def __init__(self, message: str, input: dict[str, Any], hint: str | None = None, note: str | None = None) -> None:
        super().__init__(message, hint, note)
        self.input = input


class Flaky(ReprokitError):
    """The failure happens again only sometimes."""

    exit_code = 5


class OutputError(ReprokitError, OSError):
    """What a command prints cannot be written."""


class Interrupted(ReprokitError):
    """The user stopped the work."""

    exit_code = 130
