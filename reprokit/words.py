"""Numbers with their nouns."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """``1 call``, ``2,232 calls``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
