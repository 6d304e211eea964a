"""How bad values flow through one run: what a walk back to an origin asks again and again, each answered once.

A model repeats its lines layer by layer, and every operand of every layer may be bad. So an answer belongs to the whole
run, in the order of its calls, and not to one question: all answers together take time that is linear in the calls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property

from reprokit.locate.gradient import GradientWatch
from reprokit.locate.notes import Notes
from reprokit.locate.spelling import constant_ways
from reprokit.locate.ways import MINUS, NAN, PLUS
from reprokit.program.dataflow import written_by
from reprokit.program.functions import is_factory
from reprokit.program.ir import OPAQUE, Call, Program, Site

Line = tuple[str, Site | None]  # a function at a place in the user's code
Candidates = dict[int, int]  # calls, each with the bad value that it made


class Flow:
    """The bad values of the run that ``notes`` were taken of. The run is over, or has ended at what was found."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.program: Program = notes.program
        self._makes_wanted: list[bool] = []  # of the calls so far: that the infinities they leave were asked for
        self.watches: dict[int, GradientWatch] = {}  # of runs that looked into a backward call, by its index
        self._candidates: dict[tuple[Line, str], Candidates] = {}
        self._earliest: dict[tuple[Line, str], _Earliest] = {}

    # -- infinities that somebody asked for ------------------------------------------------------------------------

    def is_wanted(self, value: int, way: str, at: int) -> bool:
        """True if somebody asked for this infinity: a constant, a mask fill, an input given like that.

        Masks come with the batch as ``-inf``; a ``+inf`` in there is data that overflowed.
        """
        if way == NAN:
            return False
        index = self.notes.writer(value, at)
        if index is not None:
            self._decide(until=index)
            return self._makes_wanted[index]
        role = self._roles[value]
        return role != "parameter" and not (role == "batch" and way == PLUS)

    def _decide(self, until: int) -> None:
        """Find out which calls make infinities that somebody asked for. What a call reads was written before it, so in
        their order no call waits for another."""
        for index in range(len(self._makes_wanted), until + 1):
            reads = self.notes.reads.get(index, {})
            bad = [(value, way) for value, ways in reads.items() for way in ways]
            is_source = bool(bad) or _asks_for_infinity(self.program.calls[index])
            self._makes_wanted.append(is_source and all(self.is_wanted(value, way, index) for value, way in bad))

    @cached_property
    def _roles(self) -> Mapping[int, str]:
        return {item.value: item.role for item in self.program.inputs}

    # -- calls -----------------------------------------------------------------------------------------------------

    def maker(self, value: int) -> int | None:
        """The call that made an input and was not followed."""
        return self._makers.get(value)

    @cached_property
    def _makers(self) -> Mapping[int, int]:
        found: dict[int, int] = {}
        for index, call in enumerate(self.program.calls):
            for value in call.output_refs() if call.target == OPAQUE else ():
                found.setdefault(value, index)
        return found

    def readers(self, value: int, after: int) -> Sequence[int]:
        """The calls behind call number ``after`` that read a value."""
        found = self._readers.get(value, [])
        return found[bisect_left(found, after + 1) :]

    @cached_property
    def _readers(self) -> Mapping[int, list[int]]:
        found: dict[int, list[int]] = {}
        for index, values in enumerate(self.reads):
            for value in values:
                found.setdefault(value, []).append(index)
        return found

    @cached_property
    def reads(self) -> Sequence[Sequence[int]]:
        """The values that each call reads."""
        return [call.input_refs() for call in self.program.calls]

    @cached_property
    def writes(self) -> Sequence[Sequence[int]]:
        """The values that each call returns or writes into."""
        return [written_by(call) for call in self.program.calls]

    # -- the same line earlier -------------------------------------------------------------------------------------

    def first_alike(self, index: int, value: int, way: str, end: tuple[int, int]) -> tuple[int, int]:
        """The first call of the same line on the way to ``end``, a value that a call reads, which fails like call
        number ``index``, and its result.

        Of two layers that divide by the number of neighbours the first fails before the second, even if the value it
        spoils is not the one that the second one reads (``gcn_isolated_node`` in the tests).
        """
        own = self.program.calls[index]
        line = own.target, own.site
        candidates = self._alike(line, way) if own.site is not None else {}
        if not candidates or next(iter(candidates)) >= index:
            return index, value
        if (line, way) not in self._earliest:
            self._earliest[line, way] = _Earliest(candidates, self.reads, self.writes)
        earlier = self._earliest[line, way].behind(*end)
        return (earlier, candidates[earlier]) if earlier is not None and earlier < index else (index, value)

    def _alike(self, line: Line, way: str) -> Candidates:
        """The calls of a line that made a bad value of good ones, in order."""
        if (line, way) not in self._candidates:
            found: Candidates = {}
            for index in self._spoiling.get(line, ()):
                made = self.notes.writes[index].items()
                bad = (value for value, ways in made if way in ways and not self.is_wanted(value, way, index + 1))
                value = next(bad, None)
                if value is not None:
                    found[index] = value
            self._candidates[line, way] = found
        return self._candidates[line, way]

    @cached_property
    def _spoiling(self) -> Mapping[Line, list[int]]:
        """The calls that read nothing bad and left something bad, by their lines."""
        found: dict[Line, list[int]] = {}
        for index, made in self.notes.writes.items():
            if any(made.values()) and not any(self.notes.reads[index].values()):
                call = self.program.calls[index]
                found.setdefault((call.target, call.site), []).append(index)
        return found


class _Earliest:
    """Of some calls the earliest one that a value depends on, for every value and moment of a run."""

    def __init__(
        self, among: Mapping[int, object], reads: Sequence[Sequence[int]], writes: Sequence[Sequence[int]]
    ) -> None:
        self._moments: dict[int, list[int]] = {}  # the calls that changed the answer for a value
        self._answers: dict[int, list[int]] = {}
        latest: dict[int, int] = {}  # the answer for a value so far
        for index, (read, written) in enumerate(zip(reads, writes, strict=True)):
            behind = [latest[value] for value in read if value in latest]
            if index in among:
                behind.append(index)
            earliest = min(behind, default=None)
            for value in written if earliest is not None else ():
                if earliest is not None and earliest < latest.get(value, len(reads)):
                    latest[value] = earliest
                    self._moments.setdefault(value, []).append(index)
                    self._answers.setdefault(value, []).append(earliest)

    def behind(self, value: int, before: int) -> int | None:
        """The earliest call that a value depends on as it is before a call."""
        place = bisect_left(self._moments.get(value, []), before)
        return self._answers[value][place - 1] if place else None


def _asks_for_infinity(call: Call) -> bool:
    return is_factory(call.target) or bool(constant_ways(call) & {PLUS, MINUS})
