"""Every kind of failure has words, and a statement for its repro."""

from __future__ import annotations

import pytest

from reprokit.locate.failure import Failure, Predicate
from reprokit.locate.kinds import KINDS, Event, FailureKind, Unlearned
from reprokit.render.kinds import ROWS, words_of
from tests.locate.test_kinds import failure_of


def test_every_kind_has_words_and_a_statement() -> None:
    assert set(ROWS) == set(KINDS)
    assert all(callable(write) for _, write in ROWS.values())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_words_of_a_kind_are_sentences(kind: type[FailureKind]) -> None:
    failure = failure_of(kind)
    if issubclass(kind, Event):
        event = Predicate("loss", 100.0, 10.0, reference_step=3, began_at=4, usual=1.0)
        failure = Failure("forward", failure.kind, call="torch.exp", event=event)
    if kind is Unlearned:
        failure = Failure("backward", failure.kind, "no gradient has reached `weight`")
    words = words_of(failure)
    assert type(words) is ROWS[kind][0]
    assert words.short and words.phase
    assert words.headline and not words.headline.endswith(".")
    assert words.observed.endswith(".")
    assert words.expected.endswith(".")


def test_an_event_without_numbers_is_described() -> None:
    """As of a dead layer whose step could not be played again."""
    assert words_of(Failure("backward", "dead")).phase == "over the whole step"
