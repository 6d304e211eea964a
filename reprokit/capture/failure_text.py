"""The lines after a capture: a failure in words, which ``reprokit show`` has too, and why nothing was saved.

The closing line says why nothing was saved and what to do; a run whose steps were checked and ended well has none,
unless its loop has skipped steps. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprokit import words
from reprokit.series.story import StepNumbers, by_optimizer, titled
from reprokit.words import counted, in_root, sentence

_SHOWN_NUMBERS = ("loss", "gradient norm")
_STEPS = 6
_NUMBERS = (("loss", "loss"), ("gradient norm", "grad_norm"), ("learning rate", "lr"), ("scale", "scale"))
_FAST = 2.0  # how many times larger the last number is before it is worth a word


def what(result: Mapping[str, Any]) -> str:
    """The failure: ``nan from `torch.sqrt` ``, without the space at the end."""
    failure = result["failure"]
    if failure["kind"] == "none":
        return "healthy step, saved on request"
    if "silence" in failure:
        return "a silent failure" + (f" from `{failure['call']}`" if failure["call"] is not None else "")
    if "difference" in failure:
        return f"difference between ranks in `{failure['difference']['parameter']}`"
    if "event" in failure:
        origin = f" from `{failure['call']}`" if failure["call"] is not None else ""
        quantity = failure["event"]["quantity"]
        return (f"{failure['kind']} of the {quantity}" if failure["kind"] != "dead" else "dead layer") + origin
    name: str = failure["exception"]["type"] if failure["exception"] else failure["kind"]
    if "departure" in failure:
        return f"difference between two runs in `{failure['call']}`"
    if failure["call"] is not None:
        is_gradient = failure["phase"] == "backward" and failure.get("backward_node")
        return f"{name} {'in the gradient of' if is_gradient else 'from'} `{failure['call']}`"
    if failure["exception"]:
        site = failure["site"]
        return name + (f" raised at {site['file']}:{site['line']}" if site else "")
    return f"{name} that was already in `{failure['input']}`" if failure["input"] else f"{name} of unknown origin"


def event_words(result: Mapping[str, Any]) -> str:
    """An event in words: ``began at step 20: the loss was 1.2e9, 1e+08 times its median of 12; rows 0-7 of `y` ``.

    Gradients of zeros may be older than any kept step, so of those it is not said that they began; nor is it of a
    number that was as high before.
    """
    if "difference" in result["failure"]:
        return words.difference_words(result["failure"]["difference"])
    event = result["failure"]["event"]
    lead, before = f"began at step {event['began_at']}: ", _as_high_before(event, result["timeline"])
    if before is not None:  # a data set whose rows grow with each use: single steps are off before there are several
        lead = f"at step {event['began_at']}, after {words.number_words(before[1])} at step {before[0]}: "
    return f"{'' if event['quantity'] == 'share of zeros' else lead}{words.event_words(event)}"


def _as_high_before(event: Mapping[str, Any], timeline: Sequence[Mapping[str, Any]]) -> tuple[int, float] | None:
    """The step before an event with the highest value if that is as high, behind a step with a usual one: the first
    losses of a run are high too."""
    name = {"loss": "loss", "gradient norm": "grad_norm"}.get(event["quantity"], "")
    series = [row for row in timeline if row.get("optimizer") == timeline[-1].get("optimizer")]
    rows = [(row["step"], row[name]) for row in series if row.get(name) is not None and row["step"] < event["began_at"]]
    known = itertools.dropwhile(lambda row: not row[1] < event["threshold"], rows)
    highest = max((row for row in known if math.isfinite(row[1])), key=lambda row: row[1], default=None)
    return highest if highest is not None and highest[1] >= event["value"] else None


def cause_line(result: Mapping[str, Any]) -> str | None:
    """An event in words, or the origin of the bad value behind an exception: ``because of nan from `torch.sqrt`,
    train.py:12: ...``."""
    if "silence" in result["failure"]:
        return str(result["failure"]["silence"])
    if "event" in result["failure"]:
        return event_words(result)
    cause = result["failure"].get("cause")
    if not cause:
        return None
    origin = f"from `{cause['call']}`" if cause["call"] is not None else f"in {input_words(cause)}"
    return f"because of {cause['kind']} {', '.join(filter(None, (origin, place_line({'failure': cause}))))}"


def input_words(origin: Mapping[str, Any]) -> str:
    """An input that is nan or inf: ``the parameter `weight`, bad before the first step``, or its name alone."""
    name = f"`{origin['input']}`"
    return f"the parameter {name}, bad before the first step" if origin.get("is_initial") else name


def place_line(result: Mapping[str, Any]) -> str | None:
    """Module, line and code of the origin: ``in layers.1, train.py:31: p = F.softmax(s, -1)``."""
    failure = result["failure"]
    site = failure["site"]
    module = in_root(failure["module"], failure.get("root"))
    words = [f"in {module}"] if module else []
    if site is not None:
        code = site["code"].strip()
        words.append(f"{site['file']}:{site['line']}" + (f": {code}" if code else ""))
    return ", ".join(words) or None


def growth(timeline: Sequence[StepNumbers], quantity: str | None = None) -> Iterator[tuple[str, str]]:
    """The numbers of the last training steps, by name; numbers that never changed are left out.

    ``quantity`` is that of an event, whose own words compare it with its median. The others are compared with the
    median of all steps before.
    """
    for (name, key), (optimizer, rows) in itertools.product(_NUMBERS, by_optimizer(timeline).items()):
        values = [value for row in rows if (value := getattr(row, key)) is not None]
        if len(values) < 2 or (key != "loss" and len(set(values)) == 1):
            continue
        line = "  ".join(words.number_words(value, 4) for value in values[-_STEPS:])
        *before, last = [value for value in values if math.isfinite(value)] or [0.0]
        typical = sorted(before)[len(before) // 2] if len(before) > 1 and min(*before, last) >= 0 else 0.0
        if name != quantity and typical and last >= _FAST * typical:
            which = "the last one" if math.isfinite(values[-1]) else "the last finite one"
            line += f"  ({which} is {words.number_words(last / typical)} times the median of the {len(before)} before)"
        yield titled(name, optimizer), line


def captured_lines(path: Path, result: Mapping[str, Any], start: Path | None, command: Sequence[str] = ()) -> list[str]:
    """The failure, its file, and the next command; paths as seen from the folder ``start``.

    A step that was not noted is to be captured once more, with the ``command`` line of the script if there is one.
    """
    failure, shown = result["failure"], shown_path(path, start)
    if failure["kind"] == "none":
        saved, details, following = f"saved step {failure['step']}, which is healthy", [], ["trace", shown]
    else:
        is_own = failure["exception"] is not None and failure["call"] is None
        captured = "saved the step of {0}, step {1}" if is_own else "captured {} at step {}"
        saved = captured.format(what(result), failure["step"])
        has_line = "silence" in failure or ("event" in failure and "difference" not in failure)  # of its own above
        details = [line for line in (place_line(result), None if has_line else cause_line(result)) if line is not None]
        details += [f"in {failure['bad_rows']}"] if "bad_rows" in failure else []
        timeline = [StepNumbers(**row) for row in result["timeline"]]
        grown = growth(timeline, failure.get("event", {}).get("quantity"))
        details += [f"{name}  {numbers}" for name, numbers in grown if name.startswith(_SHOWN_NUMBERS)]
        cause = result.get("cause") or {}
        details += filter(None, [cause.get("text"), sentence(cause.get("why_not"))])
        following = ["shrink" if can_be_shrunk(result) else "show", shown]
        if command and not result["capture"].get("is_noted", True):
            following = ["capture", "--from-step", str(failure["step"]), *command]
    doubt = words.replay_words(result.get("fidelity", "exact"), result.get("fidelity_note"))
    indented = [f"  {line}" for line in (*details, doubt) if line]
    return [f"{saved} -> {shown}", *indented, f"next: {shlex.join(['reprokit', *following])}"]


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


COMPILED = "which is compiled and not followed"  # part of a note


@dataclass(frozen=True, slots=True)
class Seen:
    """Counts of a run without a snapshot.

    ``num_steps`` are the updates, made by an optimizer or by hand; the loop has skipped ``num_skipped`` bad ones, of
    which the first was announced. ``unseen`` says in words what the capture cannot follow. ``on`` are the kinds of
    failures that `--on` names.
    """

    has_torch: bool = False
    has_forward: bool = False
    has_backward: bool = False
    num_steps: int = 0
    num_skipped: int = 0
    has_transform: bool = False
    unseen: tuple[str, ...] = ()
    on: tuple[str, ...] = ()


def closing_line(seen: Seen, error: BaseException | None) -> str | None:
    """The line, without the tool's name; ``None`` if steps were checked and the run ended well."""
    ending = f"the script ended with {type(error).__name__}" if error is not None else None
    if isinstance(error, SystemExit):  # with a number, or a text that Python prints
        code = error.code if isinstance(error.code, int) or error.code is None else 1
        ending = f"the script ended with exit code {code}" if code else None
    if ending is None and seen.has_backward:
        skipped = f"{seen.num_skipped} steps with a bad loss or gradient were skipped by the loop"
        return f"{skipped}; `--on skipped` saves the first" if seen.num_skipped > 1 else None
    reasons = _why_not_checked(seen) or [_why_not_saved(seen, error)]
    return "; ".join([f"nothing was saved: {ending or reasons.pop(0)}", *reasons])


def _why_not_checked(seen: Seen) -> list[str]:
    """Why no step was checked, with a hint; empty if some were."""
    if not seen.has_torch:
        return ["torch was not imported"]
    found = []
    if any(COMPILED in note for note in seen.unseen):
        found.append(
            "functions compiled before the capture are not noted: compile inside it or set TORCH_COMPILE_DISABLE=1"
        )
    if seen.has_transform and not seen.has_backward:
        what = "`torch.func` was called, and no update made of its gradients was seen"
        found.append(f"{what}: write updates in place or call `session.step()` after each")
    elif not seen.has_backward:
        lead = "forward passes but no" if seen.has_forward else "no"
        more = ", and no output of a model was nan or +inf" if seen.has_forward and "nonfinite" in seen.on else ""
        found.append(f"{lead} backward pass was seen, so no step was checked{more}")
    return found


def _why_not_saved(seen: Seen, error: BaseException | None) -> str:
    """Why an ending is no failure of a step, when steps were checked."""
    bad = f"the loop skipped {counted(seen.num_skipped, 'bad step')}" if seen.num_skipped else "none was bad"
    checked = f"{counted(seen.num_steps, 'step')} {'was' if seen.num_steps == 1 else 'were'} checked and {bad}"
    if {"nonfinite", "skipped"}.isdisjoint(seen.on):
        checked = "bad losses were not asked for: add `--on nonfinite`"
    if not isinstance(error, Exception):
        return checked
    if "exception" not in seen.on:
        return "exceptions were not asked for: add `--on exception`"
    return f"the exception came from outside of a step; {checked}"
