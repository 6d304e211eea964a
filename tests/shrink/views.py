"""A view that keeps what the reducer reports."""

from __future__ import annotations

from reprokit.shrink import View


class Lines(View):
    """The lines that stay, and the checks: number, change, verdict and size as text."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.shown: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def show(self, line: str) -> None:
        self.shown.append(line)

    @property
    def checks(self) -> list[str]:
        return [line.partition(", check ")[2] for line in self.shown if ", check " in line]
