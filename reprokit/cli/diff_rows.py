"""Rows of ``reprokit diff``: a verdict on two runs with its lines.

    reprokit: the runs differ
    reprokit:   beyond what float32 explains: in float64 they differ by 0.001 as well
    reprokit:   first different call: `torch.nn.functional.layer_norm` in `0.ln`, train.py:10: ...

`described` makes the row of a `Comparison`. The command line is parsed without this module, which
imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from reprokit.compare import imprints
from reprokit.compare.departure import Departure
from reprokit.compare.runs import Comparison
from reprokit.locate.failure import module_of
from reprokit.program.functions import display_name
from reprokit.program.ir import Call
from reprokit.words import counted, listed

EQUAL, ROUNDING, DIFFERENT = "equal", "rounding", "different"
IMPOSSIBLE, UNSEEN = "cannot be run", "not replayed"
_VERDICTS = {
    EQUAL: "the runs agree in all bits",
    ROUNDING: "the runs differ by rounding",
    DIFFERENT: "the runs differ",
    UNSEEN: "the replays agree, and are not as in training",
}
MOST_NAMED = 5  # inputs, or calls of a part of a program


@dataclass
class DiffRow:
    """Two runs beside each other."""

    name: str  # how the second was run; empty for a file
    verdict: str
    lines: list[str]
    more: dict[str, Any] = field(default_factory=dict)  # for programs
    comparison: Comparison | None = None

    @property
    def title(self) -> str:
        verdict = _VERDICTS.get(self.verdict, self.verdict)
        return f"{self.name}: {verdict}" if self.name else verdict

    def to_plain(self) -> dict[str, Any]:
        """The row as ``--json`` has it."""
        return {"with": self.name, "verdict": self.verdict, "lines": self.lines, **self.more}


def exit_code(rows: list[DiffRow]) -> int:
    """1 if runs differ by more than rounding, 2 if that is not known of all."""
    verdicts = {row.verdict for row in rows}
    if DIFFERENT in verdicts:
        return 1
    return 2 if verdicts & {IMPOSSIBLE, UNSEEN} else 0


def described(name: str, found: Comparison) -> DiffRow:
    """The row of a comparison whose inputs agree."""
    raised = list(_raised(found))
    has_other_error = found.one.error != found.other.error
    if has_other_error and name:
        return DiffRow(name, IMPOSSIBLE, raised)
    changes, is_other_state = _changed_inputs(found)
    if found.one.error and not has_other_error:
        raised = [f"both raise {found.one.error}"]
    end = [*raised, *_losses(found), *changes]
    formats = [] if name else list(_formats(found))
    is_other = found.real is not None or has_other_error or is_other_state
    departure = found.real or found.first
    if departure is None:
        only = found.places.alignment.only_one, found.places.alignment.only_other
        calls = counted(len(found.places.calls), "call")
        lines = [f"all {calls} of both, their gradients and updates agree in all bits"]
        if any(only):
            lines.append(_only_words(*only))
            is_other = is_other or bool(raised)
        return DiffRow(name, DIFFERENT if is_other else EQUAL, [*formats, *lines, *end])
    lines = [*formats, *_departure_lines(found, departure), *end]
    return DiffRow(name, DIFFERENT if is_other else ROUNDING, lines, _plain_departure(departure), found)


def _raised(found: Comparison) -> Iterator[str]:
    for which, run in (("first", found.one), ("second", found.other)):
        if run.error:
            yield f"the {which} raises {run.error}"


def _losses(found: Comparison) -> Iterator[str]:
    losses = found.places.losses
    if losses is not None:
        yield f"loss {losses[0]:.9g} and {losses[1]:.9g}"
    if found.places.is_cut:
        most = imprints.MOST_ELEMENTS
        yield f"the first {most:,} elements of larger tensors were compared, which 2 GiB have room for"


def _formats(found: Comparison) -> Iterator[str]:
    one, other = ({str(dtype).removeprefix("torch.") for dtype in formats} for formats in found.places.formats)
    for which, only in (("first", one - other), ("second", other - one)):
        if only:
            yield f"only the {which} computes in {listed(sorted(only))}"


def _changed_inputs(found: Comparison) -> tuple[list[str], bool]:
    """The inputs that one of the programs changes alone, and True if they are state that the other one keeps."""
    changed = list(found.places.alone())
    lines = []
    for which in ("first", "second"):
        names = [f"`{item.name}`" for side, item in changed if side == which]
        if names:
            more = " and more" if len(names) > MOST_NAMED else ""
            lines.append(f"only the {which} changes {listed(names[:MOST_NAMED])}{more}")
    own = [(which, item.name) for which, item in changed if item.role != "batch"]
    there = {"first": found.other.step.program.inputs, "second": found.one.step.program.inputs}
    is_shared = any(item.name == name for which, name in own for item in there[which])
    if len({which for which, _ in own}) == 2 and not is_shared:  # three linear layers are one
        lines.append("which of these belong together is not known: they were not compared")
        return lines, False
    return lines, bool(own)


def _departure_lines(found: Comparison, departure: Departure) -> Iterator[str]:
    """What explains the difference, the call, what is unlike about it, and what differs before it by rounding."""
    gap, first = departure.gap, found.first
    is_real = found.real is not None
    if is_real and gap.num_bad and gap.dtype:
        yield f"beyond what {gap.dtype} explains: {gap.why}"
    elif not is_real and gap.why:
        yield "what the step leaves agrees up to rounding, calls in between make other numbers"
    elif not is_real:
        yield f"within what {gap.dtype or 'the format'} explains: in float64 they agree"
    yield f"first different call: {call_words(departure.call)}: {departure.words}"
    if departure.settings:
        who = "it" if departure.called is departure.call else call_words(departure.called)
        yield f"{who} is called with {departure.settings}"
    if any(departure.only):
        yield _only_words(*departure.only)
    if is_real and first is not None and first.call is not departure.call:
        yield f"rounding differs before, first in {call_words(first.call)}: {first.gap.words}"


def _plain_departure(departure: Departure) -> dict[str, Any]:
    """A departure for programs; JSON has no numbers that are not finite."""
    numbers = asdict(departure.gap)
    for name, value in numbers.items():
        if isinstance(value, float) and not math.isfinite(value):
            numbers[name] = None
    place = place_of(departure.call)
    return {**place, "phase": str(departure.phase), "gap": numbers, "settings": departure.settings}


def _only_words(first: list[Call], second: list[Call]) -> str:
    return f"only the first has {_calls_words(first)}; only the second has {_calls_words(second)}"


def _calls_words(calls: list[Call]) -> str:
    if not calls:
        return "no call there"
    names = list(dict.fromkeys(f"`{call.name}`" for call in calls))
    words = listed(names[:MOST_NAMED])
    if len(names) > MOST_NAMED:
        words += f" and {len(names) - MOST_NAMED} more"
    site = calls[0].site
    return f"{words} ({site.place})" if site is not None else words


def call_words(call: Call) -> str:
    """```torch.tanh` in `0`, train.py:33``."""
    found = place_of(call)
    words = f"`{found['call']}`"
    if found["module"]:
        words += f" in `{found['module']}`"
    return f"{words}, {found['site']}" if found["site"] else words


def place_of(call: Call) -> dict[str, Any]:
    """The function, module and line of a call, for programs."""
    site = call.site.place if call.site is not None else None
    return {"call": display_name(call.target), "module": module_of(call), "site": site}
