"""``reprokit retry``: make the captured step once more with the edited script: is it finite now?

The script runs as Python would run it, until it has made that step, and stops there.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reprokit.capture import launch
from reprokit.capture.failure_text import place_line, what
from reprokit.cli import console
from reprokit.cli.capture import UserScript, watching
from reprokit.cli.trace import OptionsAnywhere
from reprokit.errors import NotMatched, UsageError
from reprokit.words import number_words

if TYPE_CHECKING:
    from reprokit.capture.retry import RetrySession


@dataclass(frozen=True, slots=True)
class Retry(console.ScriptPlan):
    """A snapshot and the script whose loop is to make its step."""

    file: Path
    script: UserScript
    json: bool
    verbosity: console.Verbosity

    def __call__(self) -> int:
        """Run the script; 0 if the step is finite, 1 if it fails. Raises `NotMatched`."""
        self.script.check()
        from reprokit.capture.retry import RetrySession
        from reprokit.snapshot.format import load

        captured, ending = load(self.file), None
        with launch.hide_own_frames(), tempfile.TemporaryDirectory(prefix="reprokit-retry-") as folder:
            try:
                is_verbose = self.verbosity is console.Verbosity.VERBOSE
                session = RetrySession(captured, Path(folder), self.script.words, verbose=is_verbose)
                wanted = f"until it has made step {captured.step} of {self.file}"
                console.say(f"running `{self.script.target}` {wanted}", self.verbosity)
                try:
                    with watching(lambda: session, self.verbosity):
                        self.script.run()
                except (Exception, SystemExit) as error:
                    ending = error
                if isinstance(ending, Exception) and not isinstance(ending, UsageError):
                    launch.show_exception(ending)
                text, is_same = self._result(session, ending)
            except NotMatched as reason:
                if self.json:
                    console.print_json({"schema": 1, "verdict": "not_matched", "reason": reason.message})
                raise
        for line in (*session.notes, text):
            console.say(line, self.verbosity)
        if self.json:
            result: dict[str, Any] = {"schema": 1, "verdict": "finite" if is_same is None else "fails"}
            result |= {"loss": session.loss, "grad_norm": session.grad_norm, "same": is_same, "notes": session.notes}
            console.print_json({**result, "failure": session.results[0]["failure"] if session.results else None})
        return 0 if is_same is None else 1

    def _require_same_inputs(self, session: RetrySession, *, is_same: bool) -> None:
        """Raise `NotMatched` if the failing step is not the captured one; it is if it fails alike without an edit."""
        from reprokit.snapshot.format import load

        is_edited = session.edits.is_any
        is_in_doubt = session.is_own if is_edited else not is_same
        other = session.read_by(load(session.snapshots[0])).unexplained if is_in_doubt else []
        if other:
            why = "no edit explains that" if is_edited else "nothing was edited"
            raise NotMatched(session.why or f"the step is not the captured one: {other[0].words}, and {why}")

    def _result(self, session: RetrySession, ending: BaseException | None) -> tuple[str, bool | None]:
        """The verdict in words, and whether the step fails as it did: ``None`` if it does not fail."""
        if session.refusal is not None:
            raise session.refusal
        if isinstance(ending, UsageError):
            raise ending
        if session.results:
            failure = session.results[0]
            if session.of_data:
                raise NotMatched(session.of_data)
            is_same, is_raised = session.is_same(), failure["failure"]["exception"] is not None
            told = ", ".join(filter(None, (what(failure), place_line(failure))))
            if not session.has_begun and not is_same:
                raise NotMatched(f"a step of the script's own fails before: {told}")
            if is_raised and not is_same and session.other_shape:
                raise NotMatched(f"the script does not take the captured inputs: {told}", hint=session.other_shape)
            self._require_same_inputs(session, is_same=is_same)
            return f"the step fails in {'the same' if is_same else 'another'} way: {told}", is_same
        if not session.is_over:
            how = f"raised {type(ending).__name__}" if isinstance(ending, Exception) else "ended"
            raise NotMatched(f"the script {how} before it made the captured step", hint=session.why or None)
        if session.still:
            result = "fails in the same way" if session.is_unusual else "is finite, and not mended"
            return f"the step {result}: {session.still}", session.is_unusual
        loss, norm = (number_words(math.nan if n is None else n) for n in (session.loss, session.grad_norm))
        return f"the step is finite with this code: loss {loss}, gradient norm {norm}", None


@click.command(
    "retry",
    cls=OptionsAnywhere,
    short_help="Make the captured step with the edited script.",
    context_settings={"allow_interspersed_args": False},
)
@click.argument("file", type=console.PATH, metavar="FILE")
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="(SCRIPT | -m MODULE) [ARGS]...")
@console.common_options
def command(file: Path, target: Sequence[str], verbosity: console.Verbosity, json: bool) -> console.Plan:
    """Have I fixed my training? Make the step of a snapshot with the edited script.

    The script runs up to the step with the captured number. This begins with the captured state, is given the
    captured inputs, and ends the script. Exit code 0: it is finite; 1: it fails; 2: it could not be made.
    """
    words = list(target[target[:1] == ("--",) :])
    is_module = words[:1] == ["-m"]
    words = words[is_module:]
    if not words or not words[0]:
        raise UsageError(
            f"no {'module' if is_module else 'script'} given", hint="reprokit retry FILE train.py [ARGS]..."
        )
    return Retry(file, UserScript(words[0], is_module, tuple(words[1:])), json, verbosity)
