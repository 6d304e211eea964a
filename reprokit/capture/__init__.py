"""Watching a live training loop and saving its first failing step.

The package is callable: ``with reprokit.capture(): ...`` watches the loop inside the block. Importing it does not
import
torch; calling it does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from reprokit.capture.session import Session


@contextmanager
def watch(
    output: Path | str | None = None,
    *,
    after: Literal["stop", "continue"] = "stop",
    overwrite: bool = False,
    name: str = "training",
) -> Iterator[Session]:
    """Watch the training loop inside a ``with`` block.

    At the first non-finite value a snapshot is written to ``output`` (default: ``<name>-step<N>.repro.pt`` in the
    current
    folder). With ``after="stop"`` the block is left at that point and the program goes on behind it; with
    ``"continue"``
    training goes on unwatched. Yields the session; its ``snapshots`` are the files written. Raises `UsageError` when
    ``output`` exists and ``overwrite`` is false.
    """
    from reprokit.capture.session import CaptureStop, Session
    from reprokit.errors import UsageError

    target = Path(output) if output is not None else None
    if target is not None and target.exists() and not overwrite:
        raise UsageError(f"`{target}` exists", hint="pass overwrite=True, or another name")
    session = Session(target, name=name, after=after, overwrite=overwrite)
    try:
        with session:
            yield session
    except CaptureStop as stop:
        if stop.session is not session:
            raise
    for path in session.snapshots:
        print(f"reprokit: captured the failing step: {path}", file=sys.stderr)
        print(f"reprokit: next: reprokit shrink {path}", file=sys.stderr)


class _CallablePackage(ModuleType):
    """Lets ``reprokit.capture(...)`` mean `watch`, although ``reprokit.capture`` is a package as well."""

    __call__ = staticmethod(watch)


sys.modules[__name__].__class__ = _CallablePackage
