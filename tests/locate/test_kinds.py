"""Every kind of failure has a word in files, and is the same value after a file was written and read."""

from __future__ import annotations

import copy
import pickle

import pytest

from reprokit.grammar import plain_of, read
from reprokit.locate.failure import Failure, RankDifference
from reprokit.locate.kinds import KINDS, MISMATCH, WORDS, FailureKind, Mismatch, RanksDiffer, kind_named
from reprokit.program.ir import Phase
from reprokit.shrink import spec

DIFFERENCE = RankDifference("weight", 1, (1,), 0, 1, ("a", "b"))


def failure_of(kind: type[FailureKind]) -> Failure:
    difference = DIFFERENCE if kind is RanksDiffer else None
    exception = ("ValueError", "boom") if kind.raises else None
    word = kind.words[0] if kind.words else MISMATCH
    return Failure(Phase.FORWARD, word, exception=exception, difference=difference)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_kind_is_its_word_in_files(kind: type[FailureKind]) -> None:
    failure = failure_of(kind)
    assert type(failure.kind) is kind
    assert not kind.words or failure.kind == kind.words[0]
    plain = plain_of(failure)
    assert type(plain["kind"]) is str
    for again in (read(Failure, plain), pickle.loads(pickle.dumps(failure)), copy.deepcopy(failure)):
        assert again == failure
        assert type(again.kind) is kind


def test_every_word_names_one_kind() -> None:
    assert len(set(WORDS)) == len(WORDS) == sum(len(kind.words) for kind in KINDS)
    assert all(kind_named(word) == word for word in WORDS)
    with pytest.raises(ValueError, match="is none of"):
        read(Failure, {"phase": "forward", "kind": "sudden"})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_kind_has_a_check_or_a_reason_why_there_is_none(kind: type[FailureKind]) -> None:
    failure = failure_of(kind)
    assert failure.kind.check in (spec.NONFINITE, spec.EXCEPTION, spec.MISMATCH)
    refusal = failure.kind.refusal(failure)
    assert (refusal is not None) == (kind.__name__ in ("Unlearned", "RanksDiffer", "Healthy"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_two_kinds_have_one_signature(kind: type[FailureKind]) -> None:
    same = [other for other in KINDS if failure_of(other).key() == failure_of(kind).key()]
    assert len(same) == (2 if issubclass(kind, Mismatch) else 1)
