"""The part of a file name that tells the processes of one training apart. Imports no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def rank_suffix() -> str:
    """``.rank<R>`` for one of several ranks: of torch's process group, else of the environment that torchrun sets."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return f".rank{distributed.get_rank()}" if distributed.get_world_size() > 1 else ""
    size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK")
    return f".rank{rank}" if rank is not None and size.isdigit() and int(size) > 1 else ""


def with_part(path: Path, part: str) -> Path:
    """``out.rank1.pt`` of ``out.pt`` and ``.rank1``."""
    suffix = ".repro.pt" if path.name.endswith(".repro.pt") else path.suffix
    return path.with_name(f"{path.name.removesuffix(suffix)}{part}{suffix}")
