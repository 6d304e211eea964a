"""Sentences and numbers with their nouns that terminal, issue and report share."""

from __future__ import annotations

import re

_GRADIENTS = re.compile(r"(?:^|_)grad(?:ient)?s?(?:_|$)")


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """``1 call``, ``2,232 calls``; ``plural`` is for nouns that take more than an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or f'{noun}s'}"


def replay_words(fidelity: str, note: str | None) -> str:
    """How the replay differs from training, and why; a sentence without a full stop, empty for an exact replay."""
    why = f": {note}" if note else ""
    if fidelity == "exact":
        return ""
    if fidelity == "close":
        return f"the replay is close to training, not the same bit for bit{why}"
    return f"the replay differs from training, so it may not show the same failure{why}"


def in_root(module: str | None, root: str | None) -> str | None:
    """A module as people read it: ``D.2`` where its root has a name, and ``D`` for that root itself."""
    if module is None or not root:
        return module
    return root if module.startswith("<") else f"{root}.{module}"


def item_name(owner: str, key: str) -> str:
    """The name of a dict's item: its key, with ``_grad`` in a dict of gradients, whose keys are those of parameters."""
    return f"{key}_grad" if _GRADIENTS.search(owner) else key
