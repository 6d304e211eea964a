"""A diagnosis: mechanism, evidence, confidence, advice, and the fixes that were tried.

A fix is worth nothing until the captured step was run with it, so every `TriedFix` says what happened when it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from reprokit.grammar import Line, Name, Text, left_out, link, one_of

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TriedFix:
    """A change that was tried on the captured step.

    ``text`` says what was changed (one sentence a change), ``code`` how it looks in Python, ``where`` the lines of
    the user's code. ``helped`` means that the whole step became finite; ``outcome`` says what was seen. When not
    ``is_plausible``, the step is finite and its loss still absurd, so that nothing is mended; ``None`` if the program
    ends before a loss that could show whether it helped. ``loss`` is that of the step with the fix.
    """

    id: Name
    text: tuple[Text, ...]
    code: Text
    where: tuple[Line, ...]
    helped: bool
    outcome: Text
    is_plausible: bool | None = True
    loss: float | None = left_out()


@dataclass(frozen=True, slots=True)
class Also:
    """A further rule that applies, and what was seen of it."""

    id: Name
    title: Line
    evidence: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a step failed.

    ``confidence`` is ``certain`` (the values at the origin leave no other reading), ``likely`` or ``possible``, and
    ``none`` when no rule applies. ``also`` names further rules that apply, such as a loss that had
    been growing for many steps. ``fix`` is the change that made the step finite; ``tried`` are the others. ``note``
    says why no fix was tried.
    """

    id: Name
    title: Line
    mechanism: Text
    evidence: tuple[Text, ...] = ()
    confidence: Annotated[str, one_of("certain", "likely", "possible", "none")] = "none"
    advice: Text = ""
    links: tuple[Annotated[str, link], ...] = ()
    also: tuple[Also, ...] = ()
    fix: TriedFix | None = None
    tried: tuple[TriedFix, ...] = ()
    note: Text | None = None

    @property
    def is_known(self) -> bool:
        """True if a rule applies."""
        return self.id != UNKNOWN


def resting_on_replay(diagnosis: Diagnosis, note: str | None) -> Diagnosis:
    """The diagnosis of a step whose replay is not what happened in training: no more than possible, with the reason."""
    if not diagnosis.is_known:
        return diagnosis
    why = f" ({note})" if note else ""
    basis = f"This rests on a replay that differs from training{why}: the training may have failed in another way."
    return replace(diagnosis, confidence="possible", evidence=(basis, *diagnosis.evidence))
