"""Reducing a failing program to the smallest one that fails the same way."""

from __future__ import annotations


class View:
    """How the reducer and the table of variants report their work: lines of text. This one shows nothing."""

    def say(self, line: str) -> None:
        """Show a line that stays."""

    def show(self, line: str) -> None:
        """Show the state of the work, such as the latest check of many."""

    def close(self) -> None:
        """Leave the terminal as it was."""
