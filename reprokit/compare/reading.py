"""A captured step beside the same step with edited code: whether it has read what the captured one read.

Calls are aligned by their lines, as far as these were not edited. What comes from outside of the step (batch, state,
random outcomes, settings) has to be the same, bit for bit, unless an edit explains the difference. Results of calls are
not compared: rounding differs between machines.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Set
from dataclasses import dataclass, replace

from reprokit.compare.alignment import Alignment
from reprokit.compare.imprints import GIVEN, Run, Version
from reprokit.compare.settings import ABSENT, changed_settings
from reprokit.program.edits import Edits
from reprokit.program.functions import display_name
from reprokit.program.ir import Call, iter_refs
from reprokit.program.step import Step

_OF_STEP_BEFORE = "it is behind the update of the step before, whose state is the captured one"


@dataclass(frozen=True, slots=True)
class ReadDifference:
    """What a step has, in words, that the captured one has not; ``is_explained`` by an edit."""

    words: str
    is_explained: bool
    is_number: bool = False  # an argument of a call that both steps make
    is_bits: bool = False  # other bits of an input that both steps read
    is_random: bool = False  # numbers from a generator that an edited line has drawn from before
    reason: str = "no edit explains that"


class StepReading:
    """The differences between the captured step and the one that was made in its place."""

    def __init__(self, captured: Step, made: Step, edits: Edits, origin: int | None = None) -> None:
        """``origin`` is the index of the captured call that failed in the forward pass."""
        self._edits = edits
        self._origin = origin
        self._one, self._other = Run.of(captured), Run.of(made)
        keys = self._keys_of_then(), self._keys_of_now()
        self._pairs = Alignment.in_order(self._one.calls, self._other.calls, keys).calls  # of then by those of now
        inputs = {place.value for place in self._other.marks if place.number == GIVEN and not place.start}
        given = {self._other.marks[Version(value, GIVEN)].digest for value in inputs}
        self._needed_then = _needed(self._one, given)
        self._needed_now = _needed(self._other, set())

    @functools.cached_property
    def differences(self) -> list[ReadDifference]:
        """All of them, in the order of the calls of now."""
        found = [*self._lost_calls(), *self._new_calls(), *self._changed_calls(), *self._unknown_inputs()]
        return [difference for _, difference in sorted(found, key=lambda row: row[0])]

    @property
    def unexplained(self) -> list[ReadDifference]:
        """The differences that no edit explains."""
        return [one for one in self.differences if not one.is_explained]

    def _keys_of_then(self) -> list[Hashable]:
        keys: list[Hashable] = []
        for call in self._one.calls:
            place: object = None
            if call.site is not None:
                place = self._edits.line_of(call.site) or ("edited", call.site.file, call.site.line)
            keys.append((place, *_kind(call)))
        return keys

    def _keys_of_now(self) -> list[Hashable]:
        keys: list[Hashable] = []
        for call in self._other.calls:
            place = (call.site.file, call.site.line) if call.site is not None else None
            keys.append((place, *_kind(call)))
        return keys

    # -- calls that only one of the steps makes ------------------------------------------------------------------

    def _lost_calls(self) -> Iterator[tuple[int, ReadDifference]]:
        """Calls of the captured step that are not made now.

        What it made before the first call that both make is no part of the step that stands for it: that begins where
        an input is read.
        """
        known = set(self._pairs.values())
        first = min(known, default=0)
        for index, call in enumerate(self._one.calls):
            is_lost = index not in known and index > first and index in self._needed_then
            if not is_lost or call.site is None:
                continue
            now = self._edits.line_of(call.site)
            is_explained = now is None
            if now is not None:
                is_explained = self._edits.acts_on(replace(call.site, file=now[0], line=now[1]))
            what = f"the step does not reach `{call.name}` in {_place(call)}"
            yield self._time(index), ReadDifference(what, is_explained)

    def _new_calls(self) -> Iterator[tuple[int, ReadDifference]]:
        """Calls that the captured step did not make, up to the end that it had: it ends where it failed."""
        last = max(self._pairs, default=-1)
        for index, call in enumerate(self._other.calls):
            is_new = index not in self._pairs and index <= last and index in self._needed_now
            if not is_new or call.site is None:
                continue
            what = f"the step reaches `{call.name}` in {_place(call)}, which the captured one did not"
            if index < self._num_before:
                yield index, ReadDifference(what, False, reason=_OF_STEP_BEFORE)
            else:
                yield index, ReadDifference(what, self._edits.acts_on(call.site))

    @functools.cached_property
    def _num_before(self) -> int:
        """The number of leading calls that belong to the iteration before.

        The loop makes them behind its update, such as `carried = state.detach().clamp(max=2.0)` in its last line. They
        read what the captured iteration before has left, so an edit of them would have acted on many steps.
        """
        calls = self._other.calls
        update = next((call.site for call in reversed(calls) if call.is_optimizer_step), None)
        if update is None:
            return 0
        num_behind = 0
        for index, call in enumerate(calls):
            site = call.site
            if site is None or (site.file, site.function) != (update.file, update.function):
                continue
            if site.line <= update.line:
                break
            num_behind = index + 1
        return num_behind

    def _time(self, before: int) -> int:
        """A place among the calls of now for a call of then."""
        return max((index for index, partner in self._pairs.items() if partner < before), default=-1)

    # -- calls that both make ------------------------------------------------------------------------------------

    def _changed_calls(self) -> Iterator[tuple[int, ReadDifference]]:
        for index, before in sorted(self._pairs.items()):
            if index not in self._needed_now:
                continue
            then, now = self._one.calls[before], self._other.calls[index]
            is_acted_on = self._edits.acts_on(now.site)
            for name, pair in changed_settings(then, now).items():
                old, new = ("the default" if value is ABSENT else value for value in pair)
                if str(old) != str(new):  # two NaN are the same
                    words = f"`{now.name}` in {_place(now)} has {_named(name, new)}, and in the captured step {old}"
                    is_number = all(isinstance(value, (float, bool)) for value in (old, new))
                    yield index, ReadDifference(words, is_acted_on, is_number)
            yield from self._changed_operands(index, before, is_acted_on)

    def _changed_operands(self, index: int, before: int, is_acted_on: bool) -> Iterator[tuple[int, ReadDifference]]:
        then, now = self._one.calls[before], self._other.calls[index]
        mine, others = _operands(then), _operands(now)
        if len(mine) != len(others):
            words = f"`{now.name}` in {_place(now)} reads {len(others)} tensors, and in the captured step {len(mine)}"
            yield index, ReadDifference(words, is_acted_on)
            return
        for value, value_other in zip(mine, others, strict=True):
            first, second = self._one.last(value, before), self._other.last(value_other, index)
            is_given = first.number == GIVEN, second.number == GIVEN
            if not any(is_given) or self._has_same_bits(first, second):
                continue
            what = f"`{now.name}` in {_place(now)} reads {self._name_of(second)} with other bits than the captured step"
            is_explained = is_acted_on
            is_random = self._is_moved_by_edit(second.value, index)
            if all(is_given):  # an edit does not act on data, but on what a tensor is made of
                is_explained = is_random or self._is_made(second.value, now)
            yield index, ReadDifference(what, is_explained, is_bits=all(is_given), is_random=is_random)

    def _is_moved_by_edit(self, value: int, index: int) -> bool:
        """True for random numbers behind the origin, of a generator that an edited line has drawn from before.

        Up to the origin the generators are where they were, so other numbers cannot be why the origin has not failed.
        """
        if value not in self._random or self._origin is None:
            return False
        is_behind = index > self._time(self._origin)
        return is_behind and any(place < index for place in self._draws_of_edits)

    @functools.cached_property
    def _random(self) -> set[int]:
        return {item.value for item in self._other.step.program.inputs if item.role == "random"}

    @functools.cached_property
    def _draws_of_edits(self) -> list[int]:
        """The calls in edited lines that read random numbers and that the captured step has not made."""
        found = []
        for index, call in enumerate(self._other.calls):
            is_new = index not in self._pairs and call.site is not None and self._edits.is_edited(call.site)
            if is_new and not self._random.isdisjoint(_operands(call)):
                found.append(index)
        return found

    def _has_same_bits(self, first: Version, second: Version) -> bool:
        mine, others = self._one.marks.get(first), self._other.marks.get(second)
        return mine is None or others is None or mine.digest == others.digest

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        return {item.value: item.name for item in self._other.step.program.inputs}

    def _is_made(self, value: int, call: Call) -> bool:
        """True if an edit acts on what an input is made of, as the code of now says it."""
        name = self._names.get(value, "")
        return self._edits.makes("" if name == "batch" or name.startswith("input") else name, call.site)

    def _name_of(self, place: Version) -> str:
        return f"`{self._names[place.value]}`" if place.value in self._names else "a result"

    # -- inputs --------------------------------------------------------------------------------------------------

    def _unknown_inputs(self) -> Iterator[tuple[int, ReadDifference]]:
        """Inputs of calls that the captured step does not have: it has to know their bits all the same.

        An edited line may bring a value of its own, such as a table that it makes with NumPy; not one of a name that
        the captured step has.
        """
        known = {mark.digest for mark in self._one.marks.values()}
        names = {item.name for item in self._one.step.program.inputs if not item.name.startswith("input")}
        items = {item.value: item for item in self._other.step.program.inputs if item.role in ("batch", "random")}
        last = max(self._pairs, default=-1)
        for index, call in enumerate(self._other.calls[: last + 1]):
            if index in self._pairs or index not in self._needed_now:
                continue
            for value in _operands(call):
                place = self._other.last(value, index)
                item = items.get(value)
                if item is None or place.number != GIVEN or self._other.marks[place].digest in known:
                    continue
                is_edited = call.site is not None and self._edits.is_edited(call.site)
                is_drawn = item.role == "random"  # numbered, so its name says nothing
                has_own_name = is_drawn or item.name not in names
                is_own = (is_edited and has_own_name) or self._is_made(value, call)
                reads = f"`{call.name}` in {_place(call)} reads `{item.name}`"
                what = f"{reads} with bits that the captured step does not have"
                yield index, ReadDifference(what, is_own)


def _needed(run: Run, given: Set[int]) -> set[int]:
    """The calls that the backward passes of a run, what follows them, and its last call depend on.

    What was made by a call, and has the digest of something ``given``, was put in place of its result.
    """
    passes = [index for index, call in enumerate(run.calls) if call.is_differentiation]
    begin = passes[-1] if passes else len(run.calls) - 1
    found = {*passes, *range(max(begin, 0), len(run.calls))}
    left = list(found)
    while left:
        index = left.pop()
        for value in run.calls[index].input_refs():
            place = run.last(value, index)
            maker = run.made.get(place)
            is_given = place in run.marks and run.marks[place].digest in given
            if maker is not None and maker not in found and not is_given:
                found.add(maker)
                left.append(maker)
    return found


def _kind(call: Call) -> tuple[str, tuple[str, ...]]:
    return display_name(call.target), tuple(scope.path for scope in call.scope)


def _operands(call: Call) -> tuple[int, ...]:
    """The values that a call reads, but for the state of a generator."""
    return tuple(dict.fromkeys(ref.value for ref in iter_refs((call.args, dict(call.kwargs)))))


def _named(name: str, value: object) -> str:
    return f"{value}" if name[:1].isdigit() else f"{name} {value}"


def _place(call: Call) -> str:
    """``train.py:12 (loss = ...)``."""
    site = call.site
    if site is None:
        return "torch's own code"
    return f"{site.place} ({site.code.strip()})" if site.code else site.place
