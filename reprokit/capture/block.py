"""``with reprokit.capture():`` — what ``reprokit capture`` does for a script, around a block of one's own code.

Also the lines printed after a capture, which both share. This module imports torch only when a block is entered.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reprokit.capture.failure_text import cause_line, growth, place_line, what
from reprokit.capture.options import DEFAULT_ON, DEFAULT_PERCENT, After, Watch, check_name, current_folder
from reprokit.errors import UsageError
from reprokit.series.events import TrainingEvent
from reprokit.series.story import StepNumbers
from reprokit.snapshot.source import Source
from reprokit.words import print_line, replay_words

if TYPE_CHECKING:
    from reprokit.capture.session import Session

_SHOWN_NUMBERS = ("loss", "gradient norm")


@contextlib.contextmanager
def capture(
    output: str | os.PathLike[str] | None = None,
    *,
    name: str = "training",
    after: After = "stop",
    overwrite: bool = False,
    quiet: bool = False,
    history: int | None = None,
    watch: Watch = "sampled",
    on: Collection[str] = DEFAULT_ON,
    source: Source = "traceback",
    budget: float | Literal["off"] | None = DEFAULT_PERCENT,
    from_step: int | None = None,
    at_step: int | Collection[int] = (),
    on_snapshot: Callable[[Path], object] | None = None,
    record: str | None = None,
    on_numbers: Callable[[dict[str, float]], object] | None = None,
    on_event: Callable[[TrainingEvent], object] | None = None,
) -> Iterator[Session]:
    """Watch the training loop in this block and save its first failing step.

    Writes ``output``, or ``<name>-step<N>.repro.pt`` in the current folder. With ``after="stop"`` the block is left at
    the failure and the program goes on behind it; with ``"continue"`` the loop goes on unwatched. ``history``,
    ``watch``, ``on``, ``source``, ``budget``, ``from_step``, ``at_step``, ``on_snapshot``, ``record``, ``on_numbers``
    and ``on_event`` are those of `Session`. Yields the session, whose ``snapshots`` are files.
    Raises `UsageError` when ``output`` exists and ``overwrite`` is false.
    """
    from reprokit.capture.launch import peel
    from reprokit.capture.mode import CaptureStop
    from reprokit.capture.session import Session
    from reprokit.snapshot.redact import redact_argv

    path = current_folder() / output if output is not None and not os.path.isabs(output) else output
    path = Path(path) if path is not None else None
    check_name(path, None, name)
    if path is not None and path.exists() and not overwrite:
        raise UsageError(f"`{path}` exists already", hint="choose another name, or pass overwrite=True")
    session = Session(
        path,
        name=name,
        after=after,
        command=redact_argv(sys.argv),
        overwrite=overwrite,
        quiet=quiet,
        history=history,
        watch=watch,
        on=on,
        source=source,
        budget=budget,
        from_step=from_step,
        at_step=at_step,
        on_snapshot=on_snapshot,
        record=record,
        on_numbers=on_numbers,
        on_event=on_event,
    )
    try:
        with session:
            yield session
    except CaptureStop as stop:
        if stop.session is not session:
            raise
    except BaseException as error:
        peel(error)
        raise
    finally:
        session.take_away()  # also if an exception has arrived just before it could
        if not quiet:
            if session.closing is not None:
                print_line(session.closing)
            for written, result in zip(session.snapshots, session.results, strict=True):
                for line in captured_lines(written, result, None):
                    print_line(line)


def captured_lines(path: Path, result: Mapping[str, Any], start: Path | None, command: Sequence[str] = ()) -> list[str]:
    """The failure, its file, and the next command; paths as seen from the folder ``start``.

    A step that was not noted is to be captured once more, with the ``command`` line of the script if there is one.
    """
    shown = shown_path(path, start)
    if result["failure"]["kind"] == "none":
        doubt = replay_words(result.get("fidelity", "exact"), result.get("fidelity_note"))
        details = [f"  {doubt}"] if doubt else []
        saved = f"saved step {result['failure']['step']}, which is healthy -> {shown}"
        return [saved, *details, f"next: {shlex.join(['reprokit', 'trace', shown])}"]
    place = place_line(result)
    has_line = "event" in result["failure"] and "difference" not in result["failure"]  # of its own above
    cause = None if has_line else cause_line(result)
    details = [f"  {line}" for line in (place, cause) if line is not None]
    timeline = [StepNumbers(**row) for row in result["timeline"]]
    grown = growth(timeline, result["failure"].get("event", {}).get("quantity"))
    details += [f"  {name}  {numbers}" for name, numbers in grown if name.startswith(_SHOWN_NUMBERS)]
    doubt = replay_words(result.get("fidelity", "exact"), result.get("fidelity_note"))
    details += [f"  {doubt}"] if doubt else []
    failure = result["failure"]
    following = ["shrink" if can_be_shrunk(result) else "show", shown]
    if command and not result["capture"].get("is_noted", True):
        following = ["capture", "--from-step", str(failure["step"]), *command]
    is_own = failure["exception"] is not None and failure["call"] is None
    captured = "saved the step of {0}, step {1}" if is_own else "captured {} at step {}"
    return [
        f"{captured.format(what(result), failure['step'])} -> {shown}",
        *details,
        f"next: {shlex.join(['reprokit', *following])}",
    ]


def can_be_shrunk(result: Mapping[str, Any]) -> bool:
    """True if a snapshot with this summary holds a program, and an origin that the program could show again."""
    failure = result["failure"]
    if "difference" in failure:
        return False  # one process does not show it
    has_origin = failure["call"] is not None or failure["input"] is not None or "event" in failure
    return result["program"]["calls"] > 0 and has_origin and failure["shows_cause"]


def shown_path(path: Path, start: Path | None = None) -> str:
    """A path as a person would type it in ``start`` (the current folder): relative when it lies inside."""
    try:
        relative = os.path.relpath(path, start)
    except FileNotFoundError:  # the folder is gone
        return str(path)
    return relative if not relative.startswith("..") else str(path)
