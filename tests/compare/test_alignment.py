"""Which call of one program stands beside which call of another."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from reprokit.compare.alignment import Alignment
from reprokit.program.ir import Call, Ref, Site


def program(names: str, lines: Sequence[int] = ()) -> list[Call]:
    """A chain of calls with names of one letter: each reads what the one before has made."""
    calls = []
    for number, name in enumerate(names):
        site = Site("train.py", lines[number], "step", "") if lines else None
        calls.append(Call(f"torch.{name}", (Ref(number),), outputs=Ref(number + 1), site=site))
    return calls


def names_of(calls: Sequence[Call]) -> list[str]:
    return [call.name for call in calls]


def by_name(one: Sequence[Call], other: Sequence[Call]) -> Alignment:
    return Alignment.in_order(one, other, (names_of(one), names_of(other)))


def test_a_refactoring_inserts_and_drops_calls() -> None:
    found = by_name(program("abcd"), program("acxd"))
    assert found.calls == {0: 0, 1: 2, 3: 3}
    assert names_of(found.only_one) == ["b"]
    assert names_of(found.only_other) == ["x"]


def test_a_later_level_fills_the_gaps_of_the_first_one() -> None:
    one, other = program("aaba"), program("aba")
    results = ([1, 2, 3, 4], [2, 3, 5])  # the last calls have made something else
    assert Alignment.in_order(one, other, results).calls == {0: 1, 1: 2}
    found = Alignment.in_order(one, other, results, (names_of(one), names_of(other)))
    assert found.calls == {0: 1, 1: 2, 2: 3}


def test_a_later_level_does_not_cross_the_first_one() -> None:
    one, other = program("ab"), program("ba")
    results = ([1, 2], [2, 3])
    assert Alignment.in_order(one, other, results, (names_of(one), names_of(other))).calls == {0: 1}


def test_calls_of_a_line_are_counted_whatever_is_called_between() -> None:
    one, other = program("aab", [1, 1, 2]), program("baxa", [2, 1, 3, 1])
    assert Alignment.by_line(one, other).calls == {0: 2, 1: 0, 3: 1}


def test_values_of_like_calls_are_partners() -> None:
    found = by_name(program("abc"), program("axbc"))
    assert found.values == {0: 0, 1: 1, 2: 3, 3: 4}


def test_calls_with_other_operands_have_no_partners() -> None:
    one = [Call("torch.add", (Ref(0), Ref(1)), outputs=Ref(2))]
    other = [Call("torch.add", (Ref(5),), outputs=Ref(6))]
    assert by_name(one, other).values == {2: 6}


@given(st.text("abc", max_size=8), st.text("abc", max_size=8))
def test_an_alignment_keeps_names_and_order(first: str, second: str) -> None:
    one, other = program(first), program(second)
    found = by_name(one, other)
    pairs = sorted(found.calls.items())
    assert all(one[before].name == other[index].name for index, before in pairs)
    assert [before for _, before in pairs] == sorted({before for _, before in pairs})
    assert len(found.only_one) + len(pairs) == len(one)
    assert by_name(one, one).calls == {n: n for n in range(len(one))}
