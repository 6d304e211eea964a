"""The functions of the public API. Importing this module does not import torch; calling a function does.

They do in code what the commands of the same names do. `docs/api.md` has examples.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from reprokit.capture.block import capture

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from reprokit.locate.failure import Failure
    from reprokit.render.verify import VerifyResult
    from reprokit.shrink.reduction import Reduction
    from reprokit.snapshot.format import Snapshot
    from reprokit.snapshot.source import Source

__all__ = ["Rendered", "capture", "load", "locate", "render", "shrink", "verify"]

PathLike = str | os.PathLike[str]
Level = Literal["op", "module", "step"]


@dataclass(frozen=True, slots=True)
class Rendered:
    """The files that `render` wrote.

    ``lines`` counts the lines of the repro. ``verified`` is the number of its runs in clean processes that showed the
    failure, of all runs: ``20/20``.
    """

    repro: Path
    issue: Path
    report: Path
    test: Path
    lines: int
    verified: str


def load(path: PathLike) -> Snapshot:
    """Read a snapshot. Nothing in the file is executed.

    Raises `SnapshotError` for a file that is no snapshot, is damaged or has a newer format, and `UsageError` if there
    is no file.
    """
    from reprokit.snapshot.format import load as load_snapshot

    return load_snapshot(Path(path))


def locate(snapshot: Snapshot) -> Failure | None:
    """Run the step of a snapshot once and return the origin of its failure; `None` if the step does not fail here."""
    from reprokit.locate.blame import locate as locate_origin

    return locate_origin(snapshot.program, snapshot.tensors)


def shrink(
    snapshot: Snapshot,
    *,
    level: Level = "op",
    check: str | None = None,
    max_time: float | None = None,
    max_checks: int | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
) -> Reduction:
    """Return the smallest program found that fails like the snapshot.

    ``level`` is ``op`` (the minimum, with the piece of the model beside it), ``module`` (that piece as the result) or
    ``step`` (every call, with smaller sizes). ``check`` is a failure specification as in ``--check``; the default is
    the captured failure. ``max_time`` (seconds) and ``max_checks`` bound the search. ``jobs`` candidates run at once,
    in child processes or in ``executor``. Raises `NotReproduced` or `Flaky` if the snapshot does not fail reliably.
    """
    from reprokit.shrink.reducer import shrink as reduce

    return reduce(
        snapshot,
        level=level,
        check=check,
        max_time=max_time,
        max_checks=max_checks,
        jobs=jobs,
        executor=executor,
    )


def render(
    reduction: Reduction, snapshot: Snapshot, folder: PathLike, *, times: int = 20, source: Source = "all"
) -> Rendered:
    """Write ``repro.py``, ``issue.md``, ``report.html`` and ``test_repro.py`` of a reduction into a folder.

    ``snapshot`` is the one that was reduced. The repro runs ``times`` times in clean processes first; the issue states
    the result. ``source`` is ``all``, ``traceback`` or ``none``: how much of the captured source text is shown.
    """
    from reprokit.render.texts import render_all

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    summary = render_all(reduction, snapshot, folder, times=times, source=source)
    return Rendered(
        repro=Path(summary["path"]),
        issue=folder / "issue.md",
        report=folder / "report.html",
        test=folder / "test_repro.py",
        lines=summary["lines"],
        verified=summary["verified"],
    )


def verify(path: PathLike, *, times: int = 20) -> VerifyResult:
    """Run a repro ``times`` times, each in a clean process.

    ``path`` is a script, a folder with a ``repro.py``, or a snapshot or reduction whose repro is rendered first.
    """
    from reprokit.render.verify import verify as run_repeatedly

    return run_repeatedly(Path(path), times)
