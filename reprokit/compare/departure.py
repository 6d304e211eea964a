"""The first call of the second program whose result, gradient or update differs, in words.

`departure_at` begins with a place that differs, and finds the call to name: of a gradient not the call that it arrives
at, but the one that passes it on. Calls that only one of the programs makes may stand in the place of one call of the
other; then all of them differ together:

    only the first has `layer_norm`; only the second has `mean`, `var`, `sub` and `div`
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from reprokit.compare.gap import Gap
from reprokit.compare.imprints import GIVEN, Run, Version
from reprokit.compare.places import Places
from reprokit.compare.settings import settings_words
from reprokit.locate.notes import phase_of, writes_gradients
from reprokit.program.ir import Call, Phase, Program

Digests = Sequence[tuple[int, int]]


class Departure(NamedTuple):
    """The first call of the second program whose result, gradient or update differs."""

    place: Version
    call: Call
    phase: Phase
    gap: Gap
    # The calls that lead to it from values that agree, of each program, where it has more than this one
    only: tuple[list[Call], list[Call]]
    # This call or one before it, and those of its arguments that differ
    called: Call
    settings: str
    words: str  # what it is given, the difference, and what becomes of it in the loss

    @property
    def is_of_forward_pass(self) -> bool:
        return self.phase is Phase.FORWARD


@dataclass
class _Origin:
    """The call to name: of the second program its ``index``, of the first the one ``before`` it stands beside."""

    phase: Phase
    index: int
    before: int | None
    words: str = ""  # what is compared
    # The calls that only the first and only the second program have, and that lead to it
    only_one: list[int] = field(default_factory=list)
    only_other: list[int] = field(default_factory=list)

    @property
    def is_alone(self) -> bool:
        """True if both programs make the same calls up to here."""
        return not self.only_one and not self.only_other


def first_other_digest(
    program: Program, mine: Digests, others: Digests, calls: Mapping[int, int]
) -> tuple[int, Phase] | None:
    """The first call of a program, and the phase, in which a hash of ``others``, that program's, is not the one of
    ``mine`` for the call that ``calls`` puts beside it."""
    found = list[tuple[int, int, int, Phase]]()  # in the order of time
    for index, before in calls.items():
        (result, gradient), (result_other, gradient_other) = mine[before], others[index]
        if 0 != result != result_other != 0:
            phase = phase_of(program.calls[index])
            found.append((index, 1, index, phase if phase is Phase.OPTIMIZER else Phase.FORWARD))
        if 0 != gradient != gradient_other != 0:
            passes = (at for at, call in enumerate(program.calls) if at > index and call.is_differentiation)
            found.append((next(passes, index), -index, index, Phase.BACKWARD))
    return min(found)[2:] if found else None


def departure_at(places: Places, place: Version, gap: Gap) -> Departure:
    """What differs at a place, with the calls that lead to it."""
    one, other = places.one, places.other
    origin = _origin(places, place)
    _add_leading_calls(places, origin)
    if origin.before is not None and origin.phase is Phase.FORWARD and origin.is_alone:
        origin.words = _given_words(places, origin.before, origin.index)
    words = f"{origin.words}{gap.words}{_words_of_loss(places, origin.phase, gap)}"
    called, settings = _called(places, place, origin)
    only = [one.calls[at] for at in origin.only_one], [other.calls[at] for at in origin.only_other]
    return Departure(place, other.calls[origin.index], origin.phase, gap, only, other.calls[called], settings, words)


def _origin(places: Places, place: Version) -> _Origin:
    one, other = places.one, places.other
    if place.start:
        return _origin_of_gradient(places, place)
    before, index = one.made.get(places.partner[place.result]), other.made.get(place, -1)
    if phase_of(other.calls[index]) is Phase.OPTIMIZER:
        return _Origin(Phase.OPTIMIZER, index, before, "the parameters after it: ")
    return _Origin(Phase.FORWARD, index, before)


def _origin_of_gradient(places: Places, place: Version) -> _Origin:
    """The call that makes a gradient: the first reader of its value that is unlike the other program's, else the last
    one. Where only the first program has other readers, it is the call that the gradient arrives at."""
    one, other, mine = places.one, places.other, places.partner[place.result]
    readers = other.readers(place)
    known = set(places.calls.values())
    only_one = [at for at in one.readers(mine) if at not in known]
    only_other = [at for at in readers if at not in places.calls]
    odd = [
        at for at in readers if at not in places.calls or settings_words(one.calls[places.calls[at]], other.calls[at])
    ]
    if readers and (odd or not only_one):
        index = (odd or readers[-1:])[0]
        words = "the gradient that it passes on: "
        return _Origin(Phase.BACKWARD, index, places.calls.get(index), words, only_one, only_other)
    index, before = max(other.made.get(place.result, -1), 0), one.made.get(mine)
    return _Origin(Phase.BACKWARD, index, before, "the gradient that arrives there: ", only_one, only_other)


def _add_leading_calls(places: Places, origin: _Origin) -> None:
    sides = (
        (origin.only_one, places.one, origin.before, set(places.calls.values())),
        (origin.only_other, places.other, origin.index, set(places.calls)),
    )
    for found, run, index, matched in sides:
        found += [at for at in leading_calls(run, index, matched) if at not in found]
        if origin.phase is Phase.OPTIMIZER:  # what writes into gradients, as clipping does
            writers = (at for at in range(index or 0) if writes_gradients(run.calls[at]))
            found += [at for at in writers if at not in matched]


def leading_calls(run: Run, index: int | None, matched: Set[int]) -> list[int]:
    """The unmatched calls that lead to a call from values that the programs share, itself included, in order."""
    if index is None:
        return []
    found, left = {index} - matched, [index]
    while left:
        new = run.makers(left.pop()) - found - matched
        found |= new
        left += new
    return sorted(found)


def _given_words(places: Places, before: int, index: int) -> str:
    """What is known of the inputs of two aligned calls; empty if they differ."""
    one, other = places.one, places.other
    mine, others = [*one.given([before]).values()], [*other.given([index]).values()]
    if [one.digest(version) for version in mine] == [other.digest(version) for version in others]:
        return "inputs equal in all bits, "
    is_shared = [places.partner.get(version) for version in others] == mine
    return "inputs agree, " if is_shared else ""


def _words_of_loss(places: Places, phase: Phase, gap: Gap) -> str:
    """What becomes of a difference of the forward pass in the loss."""
    if places.losses is None or phase is not Phase.FORWARD:
        return ""
    grown = abs(places.losses[0] - places.losses[1])
    if not 0 < grown < math.inf:
        return ""
    return f", which grow to {grown:.2g} in the loss" if grown > gap.largest else f"; the loss differs by {grown:.2g}"


def _called(places: Places, place: Version, origin: _Origin) -> tuple[int, str]:
    """The call whose arguments are to blame, and these: the origin, or a call before it whose arguments differ."""
    others = {index: _settings(places, before, index) for index, before in sorted(places.calls.items())}
    is_open = origin.is_alone and not others.get(origin.index) and not origin.words.startswith("inputs")
    if is_open:
        makers = places.other.makers(origin.index)
        for index, settings in others.items():
            # A gradient depends on all calls: the first one counts.
            if settings and (place.start or index in makers):
                return index, settings
    return origin.index, others.get(origin.index, "")


def _settings(places: Places, before: int, index: int) -> str:
    """The arguments of two calls that differ, and whether they draw other random numbers."""
    sides = (places.one, places.one.calls[before]), (places.other, places.other.calls[index])
    drawn = {run.digest(Version(call.mode.rng.value, GIVEN)) for run, call in sides if call.mode.rng is not None}
    words = [settings_words(sides[0][1], sides[1][1])]
    if len(drawn) > 1:
        words.append("another state of the random generator")
    return ", ".join(filter(None, words))
