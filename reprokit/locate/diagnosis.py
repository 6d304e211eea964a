"""A diagnosis as plain data: mechanism, evidence, confidence, advice, and the fixes that were tried.

A fix is worth nothing until the captured step was run with it, so every `Fix` says what happened when it was.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that was tried on the captured step.

    ``text`` says what was changed (one sentence a change), ``code`` how it looks in Python, ``where`` the lines of
    the user's code. ``helped`` means that the whole step became finite; ``outcome`` says what was seen. When not
    ``is_plausible``, the step is finite and its loss still absurd, so that nothing is mended; ``None`` if the program
    ends before a loss that could show whether it helped.
    """

    id: str
    text: tuple[str, ...]
    code: str
    where: tuple[str, ...]
    helped: bool
    outcome: str
    is_plausible: bool | None = True


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a step failed.

    ``confidence`` is ``certain`` (the values at the origin leave no other reading), ``likely`` or ``possible``, and
    ``none`` when nothing in the catalogue applies. ``also`` names further entries that apply, such as a loss that had
    been growing for many steps. ``fix`` is the change that made the step finite; ``tried`` are the others. ``note``
    says why no fix was tried.
    """

    id: str
    title: str
    mechanism: str
    evidence: tuple[str, ...] = ()
    confidence: str = "none"
    advice: str = ""
    links: tuple[str, ...] = ()
    also: tuple[dict[str, Any], ...] = ()
    fix: Fix | None = None
    tried: tuple[Fix, ...] = ()
    note: str | None = None

    @property
    def is_known(self) -> bool:
        """True if an entry of the catalogue applies."""
        return self.id != UNKNOWN

    def summary(self) -> dict[str, Any]:
        """The diagnosis as plain data."""
        plain: dict[str, Any] = _listed(asdict(self))
        return plain


def resting_on_replay(diagnosis: Diagnosis, note: str | None) -> Diagnosis:
    """The diagnosis of a step whose replay is not what happened in training: no more than possible, with the reason."""
    if not diagnosis.is_known:
        return diagnosis
    why = f" ({note})" if note else ""
    basis = f"This rests on a replay that differs from training{why}: the training may have failed in another way."
    return replace(diagnosis, confidence="possible", evidence=(basis, *diagnosis.evidence))


def from_plain(plain: dict[str, Any]) -> Diagnosis:
    """The inverse of `Diagnosis.summary`; raises `TypeError`, `ValueError` or `KeyError` on anything else."""
    fields = dict(plain)
    for name in ("evidence", "links", "also"):
        fields[name] = tuple(fields[name])
    fields["fix"] = _fix(fields["fix"]) if fields["fix"] is not None else None
    fields["tried"] = tuple(_fix(item) for item in fields["tried"])
    return Diagnosis(**fields)


def _fix(plain: dict[str, Any]) -> Fix:
    return Fix(**{**plain, "text": tuple(plain["text"]), "where": tuple(plain["where"])})


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _listed(item) for name, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value
