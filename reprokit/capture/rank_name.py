"""The part of a file name that tells the processes of one training apart. Imports no torch."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from reprokit.arrivals import ignored_errors
from reprokit.errors import UsageError

_LONGEST_PART = ".rank99999"
_LONGEST_END = f"{_LONGEST_PART}-step999999999-9999.repro.pt"


def rank_suffix() -> str:
    """``.rank<R>`` for one of several ranks: of torch's process group, else of the environment that torchrun sets."""
    distributed = sys.modules.get("torch.distributed")
    with ignored_errors():  # of a process group that is coming or going
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return f".rank{distributed.get_rank()}" if distributed.get_world_size() > 1 else ""
    size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK")
    return f".rank{rank}" if rank is not None and size.isdigit() and int(size) > 1 else ""


def current_folder() -> Path:
    """The working folder; raises `UsageError` if somebody has deleted it."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current folder does not exist any more", hint="change to another folder") from None


def check_name(output: Path | None, folder: Path | None, name: str) -> None:
    """Raise `UsageError` for a file name that turns out to be too long when a step is saved."""
    if output is not None and not output.name:
        return  # a folder, which is refused elsewhere
    longest = with_part(output, _LONGEST_PART) if output is not None else Path(folder or ".", name + _LONGEST_END)
    try:
        os.lstat(longest)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"the file name `{longest.name}` is too long", hint="choose a shorter name") from None


def with_part(path: Path, part: str) -> Path:
    """``out.rank1.pt`` of ``out.pt`` and ``.rank1``."""
    suffix = ".repro.pt" if path.name.endswith(".repro.pt") else path.suffix
    return path.with_name(f"{path.name.removesuffix(suffix)}{part}{suffix}")
