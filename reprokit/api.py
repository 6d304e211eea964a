"""The functions of the public API. Importing this module does not import torch; calling a function does.

They do in code what the commands of the same names do. `docs/api.md` has examples.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprokit.capture.launch import capture
from reprokit.capture.options import check_steps
from reprokit.errors import ReprokitError
from reprokit.locate.choice import Choice
from reprokit.words import print_line, replay_words

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from reprokit.locate.failure import Failure
    from reprokit.locate.ranges import FrameRow
    from reprokit.render.verify import VerifyResult
    from reprokit.shrink.reduction import Reduction
    from reprokit.snapshot.format import Snapshot
    from reprokit.snapshot.source import Source

__all__ = ["Rendered", "TraceRows", "capture", "load", "locate", "render", "shrink", "trace", "verify"]

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Rendered:
    """The files that `render` wrote; ``module`` is ``repro_module.py``, if the piece of the model can be shown.

    ``lines`` counts the lines of the repro. ``verified`` is the number of its runs in clean processes that showed the
    failure, of all runs: ``20/20``. An event has a repro, with its test, only if a row of the batch or an option stands
    out.
    """

    repro: Path | None
    module: Path | None
    issue: Path
    report: Path
    test: Path | None
    reduction: Path
    lines: int
    verified: str


class TraceRows(list[dict[str, Any]]):
    """The rows of a trace with the fields of `reprokit trace --json`; as a text they are its lines."""

    def add(self, found: Sequence[FrameRow]) -> None:
        """Add the rows of a step."""
        self._found = [*getattr(self, "_found", []), *found]
        self.extend(row.plain() for row in found)

    def __str__(self) -> str:
        from reprokit.locate.ranges import table

        return "\n".join(map(str, table(self._found, 0, is_flat=True).renderables)) if self else "no rows"

    __repr__ = __str__


@contextlib.contextmanager
def trace(
    *,
    steps: int | Collection[int] = 0,
    module: str | None = None,
    classes: Sequence[str] = (),
    tensors: Sequence[str] = (),
    histograms: bool = False,
) -> Iterator[TraceRows]:
    """Measure the module calls of the steps of the loop in this block, or of the single forward and backward in it.

    Yields the rows, which are there when the block is left. ``module``, ``classes`` and ``tensors`` are shell patterns
    as of `reprokit trace`: a tensor is ``output``, ``grad_input`` and so on, or a variable of your code.
    """
    from reprokit.render.module_ranges import recorded_rows

    rows, chosen, choice = TraceRows(), check_steps(steps), Choice(module, tuple(classes), tuple(tensors))
    with tempfile.TemporaryDirectory(prefix="reprokit-trace-") as folder:
        path, on = Path(folder) / "trace.pt", ("exception",)
        try:
            with capture(path, after="continue", quiet=True, on=on, budget=None, at_step=chosen) as session:
                is_watching = session.is_watching
                yield rows
        finally:
            for snapshot in filter(lambda one: one.step in chosen, map(load, session.snapshots)):
                with contextlib.suppress(ReprokitError):  # it needs what this machine lacks
                    rows.add(recorded_rows(snapshot, choice, histograms=histograms))
                if doubt := replay_words(snapshot.fidelity, snapshot.fidelity_note):
                    print_line(f"step {snapshot.step}: {doubt}")
            if not rows:
                reason = f"{choice} in the chosen steps; an optimizer's step ended {session.num_steps} steps"
                print_line(f"no rows: {reason if is_watching else 'another capture watches already'}")


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
    check: str | None = None,
    max_time: float = 120.0,
    max_checks: int | None = None,
    jobs: int = 1,
    executor: Executor | None = None,
    whatif: bool = True,
    fast: bool = False,
) -> Reduction:
    """Return the smallest program found that fails like the snapshot, with the piece of the model and the diagnosis.

    ``check`` is a failure specification as in ``--check``; the default is the captured failure. ``max_time`` (seconds)
    and ``max_checks`` bound the search. ``jobs`` candidates run at once, in child processes or in ``executor``.
    ``whatif`` adds the table of other ways to run the result, which takes up to five seconds;
    ``fast`` leaves out that table and the piece of the model. Raises `NotReproduced` or `Flaky` if the
    snapshot does not fail reliably.
    """
    from reprokit.workflow import shrink as shrink_snapshot

    return shrink_snapshot(
        snapshot,
        check=check,
        max_time=max_time,
        max_checks=max_checks,
        jobs=jobs,
        executor=executor,
        whatif=whatif,
        fast=fast,
    )


def render(
    reduction: Reduction,
    snapshot: Snapshot,
    folder: PathLike,
    *,
    times: int = 20,
    source: Source = "all",
    no_data: bool = False,
    check: str | None = None,
) -> Rendered:
    """Write the files that ``reprokit shrink`` writes into a folder: the repro, the issue, the report, the test, ….

    ``snapshot`` is the one that was reduced. The repro runs ``times`` times in clean processes first; the issue states
    the result. ``source`` is ``all``, ``traceback`` or ``none``: how much of the captured source text is shown. With
    ``no_data`` a result that needs recorded numbers raises `UsageError`. ``check`` is what the snapshot was shrunk
    with, if that is a function of your own, which the repro runs.
    """
    from reprokit.render.texts import render_all
    from reprokit.shrink.spec import parse

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = parse(check).file if check is not None else None
    written = render_all(reduction, snapshot, folder, times=times, source=source, no_data=no_data, check=file)
    repro, context = written["repro"], written["context"]
    return Rendered(
        repro=Path(repro["path"]) if repro is not None else None,
        module=Path(context["path"]) if context is not None else None,
        issue=folder / "issue.md",
        report=folder / "report.html",
        test=folder / "test_repro.py" if repro is not None else None,
        reduction=folder / "reduction.pt",
        lines=repro["lines"] if repro is not None else 0,
        verified=repro["verified"] if repro is not None else "",
    )


def verify(path: PathLike, *, times: int = 20) -> VerifyResult:
    """Run a repro ``times`` times, each in a clean process.

    ``path`` is a script, a folder with a ``repro.py``, or a snapshot or reduction whose repro is rendered first.
    """
    from reprokit.render.verify import verify as run_repeatedly

    return run_repeatedly(Path(path), times)
