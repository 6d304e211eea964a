"""The closing line of a run that ended badly or had no step to check: what was seen, why nothing was saved, what to do.

A run that was judged and ended well has none, unless its loop has skipped steps. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reprokit.words import counted

COMPILED = "which is compiled and not followed"  # part of a note


@dataclass(frozen=True, slots=True)
class Seen:
    """Counts of a run without a snapshot.

    ``num_steps`` are the updates, made by an optimizer or by hand; the loop has skipped ``num_skipped`` bad ones, of
    which the first was announced. ``unseen`` says in words what the capture cannot
    follow. ``on`` are the kinds of failures that were asked for.
    """

    has_torch: bool = False
    has_forward: bool = False
    has_backward: bool = False
    num_steps: int = 0
    num_skipped: int = 0
    has_other_thread: bool = False
    has_transform: bool = False
    unseen: tuple[str, ...] = ()
    on: tuple[str, ...] = ()


def closing_line(seen: Seen, error: BaseException | None) -> str | None:
    """The line, without the tool's name; ``None`` if steps were checked and the run ended well."""
    ending = _ending(error)
    if ending is None and seen.has_backward:
        skipped = f"{seen.num_skipped} steps with a bad loss or gradient were skipped by the loop"
        return f"{skipped}; `--on skipped` saves the first" if seen.num_skipped > 1 else None
    reasons = list(_reasons(seen)) or [_why_not_saved(seen, error)]
    return "; ".join([f"nothing was saved: {ending or reasons.pop(0)}", *reasons])


def _ending(error: BaseException | None) -> str | None:
    """How the run ended, ``None`` if well."""
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return None
        return f"the script ended with exit code {error.code if isinstance(error.code, int) else 1}"
    return f"the script ended with {type(error).__name__}" if error is not None else None


def _reasons(seen: Seen) -> Iterator[str]:
    """The reason why no step was checked, with a hint."""
    if not seen.has_torch:
        yield "torch was not imported"
        return
    if any(COMPILED in note for note in seen.unseen):
        yield "compiled whole steps are not noted: set TORCH_COMPILE_DISABLE=1"
    if seen.has_other_thread:
        yield "a second thread trained, and only the first one is watched"
    if seen.has_transform and not seen.has_backward:
        yield "steps by `torch.func` alone are not checked: use `loss.backward()` or `torch.autograd.grad`"
    elif not seen.has_backward:
        yield f"{'forward passes but no' if seen.has_forward else 'no'} backward pass was seen, so no step was checked"


def _why_not_saved(seen: Seen, error: BaseException | None) -> str:
    """Why an ending is no failure of a step, when steps were checked."""
    bad = f"the loop skipped {counted(seen.num_skipped, 'bad step')}" if seen.num_skipped else "none was bad"
    judged = f"{counted(seen.num_steps, 'step')} {'was' if seen.num_steps == 1 else 'were'} checked and {bad}"
    if {"nonfinite", "skipped"}.isdisjoint(seen.on):
        judged = "bad losses were not asked for: add `--on nonfinite`"
    if not isinstance(error, Exception):
        return judged
    if "exception" not in seen.on:
        return "exceptions were not asked for: add `--on exception`"
    return f"the exception came from outside of a step; {judged}"
