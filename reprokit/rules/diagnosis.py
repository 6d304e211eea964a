"""A diagnosis: mechanism, evidence, confidence, advice, and the fixes that were tried.

A fix is worth nothing until the captured step was run with it, so every `TriedFix` says what happened when it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from reprokit.grammar import Later, Line, Name, Statement, Text, link, one_of

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TriedFix:
    """A change that was tried on the captured step."""

    id: Name
    text: tuple[Text, ...]  # what was changed, a sentence a change
    code: Statement  # how it looks in Python
    where: tuple[Line, ...]  # the lines of the user's code
    helped: bool  # the whole step became finite
    outcome: Text  # what was seen
    is_plausible: bool | None = True  # the loss is not absurd; ``None`` if the program ends before one
    loss: Later[float] = None  # of the step with the fix

    @property
    def change(self) -> str:
        """All changes in one sentence."""
        return ", then ".join(dict.fromkeys(self.text))


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
    ``none`` when no rule applies.
    """

    id: Name
    title: Line
    mechanism: Text
    evidence: tuple[Text, ...] = ()
    confidence: Annotated[str, one_of("certain", "likely", "possible", "none")] = "none"
    advice: Text = ""
    links: tuple[Annotated[str, link], ...] = ()
    also: tuple[Also, ...] = ()  # further rules that apply
    fix: TriedFix | None = None  # the change that made the step finite
    tried: tuple[TriedFix, ...] = ()  # the others
    note: Text | None = None  # why no fix was tried

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
