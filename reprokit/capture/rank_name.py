"""The part of a file name that tells the processes of one training apart. Imports no torch."""

from __future__ import annotations

import os


def rank_suffix() -> str:
    """``.rank<R>`` under torchrun, where each process writes a file of its own."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    return f".rank{os.environ.get('RANK', '0')}" if world_size.isdigit() and int(world_size) > 1 else ""
