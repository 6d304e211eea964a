"""The whole step as a graph, and slices of it: some calls as a candidate on the values that a run of the step recorded.

The graph says who makes and who reads each value, in which module a call runs, and which calls belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from reprokit.program.functions import GRAD_WRITES, is_in_place
from reprokit.program.ir import OPAQUE, ZERO_GRAD, Call, Program, Scope, iter_refs
from reprokit.program.step import Step
from reprokit.shrink.context.layers import Scopes, is_container, layer_scope
from reprokit.shrink.recording import Excerpt, Recording, record

Place = tuple[tuple[Scope, ...], str]


@dataclass
class StepGraph:
    """The step, and who makes and who reads each of its values; ``words`` are variables of the user's by value."""

    whole: Step
    words: Mapping[int, str] = field(default_factory=dict)
    _recordings: dict[bool, Recording] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        """Its program."""
        return self.whole.program

    @cached_property
    def units(self) -> dict[int, tuple[int, ...]]:
        """The calls that belong together with a call: those of the same run of one of torch's layers."""
        groups: dict[Scopes | int, list[int]] = {}
        for index, call in enumerate(self.program.calls):
            layer = layer_scope(call, self.program.modules) if call.target != OPAQUE else None
            groups.setdefault(index if layer is None else layer, []).append(index)
        return {index: tuple(members) for members in groups.values() for index in members}

    @cached_property
    def places(self) -> list[Place]:
        """The user's module that each call runs in; in the loop itself, the function."""
        found: list[Place] = []
        for call in self.program.calls:
            layer = layer_scope(call, self.program.modules)
            scope = call.scope if layer is None else layer[:-1]
            while scope and is_container(scope[-1]):
                scope = scope[:-1]
            found.append((scope, call.site.function if not scope and call.site is not None else ""))
        return found

    def within(self, index: int) -> Callable[[int], bool]:
        """True if a call runs in the module of another one, or in a child of it; in the loop, in the same function."""
        places, (scope, function) = self.places, self.places[index]
        return lambda other: places[other][0][: len(scope)] == scope if scope else places[other] == (scope, function)

    @cached_property
    def _writers(self) -> dict[int, list[int]]:
        """The calls that make or change each value, latest first."""
        found: dict[int, list[int]] = {}
        for index, call in reversed(list(enumerate(self.program.calls))):
            for value in written(call) if call.target != OPAQUE else ():
                found.setdefault(value, []).append(index)
        return found

    @cached_property
    def readers_of(self) -> dict[int, list[int]]:
        """The calls that read each value, in order."""
        found: dict[int, list[int]] = {}
        for index, call in enumerate(self.program.calls):
            for value in call.input_refs():
                found.setdefault(value, []).append(index)
        return found

    def producers(self, index: int) -> list[int]:
        """The calls that wrote what a call reads, latest first."""
        found = set()
        for value in self.program.calls[index].input_refs():
            for writer in self._writers.get(value, ()):
                if writer < index:
                    found.add(writer)
                    if not is_in_place(self.program.calls[writer].target):
                        break
        return sorted(found, reverse=True)

    def readers(self, index: int) -> list[int]:
        """The later forward calls that read what a call wrote."""
        found = {reader for value in written(self.program.calls[index]) for reader in self.readers_of.get(value, ())}
        return sorted(reader for reader in found if reader > index and self.is_forward(reader))

    def is_forward(self, index: int) -> bool:
        """True if a call computes something, rather than differentiates, updates or clears."""
        call = self.program.calls[index]
        is_other = call.is_differentiation or call.is_optimizer_step or call.target in (OPAQUE, ZERO_GRAD)
        return not is_other and call.target not in GRAD_WRITES

    def num_units(self, indexes: Iterable[int]) -> int:
        """How much there is to print of these calls: a layer counts once."""
        return len({self.units[index] for index in indexes})

    def connected(self, kept: Iterable[int], origin: int, *, downstream: bool) -> tuple[int, ...]:
        """Of some calls those that the origin depends on through them; with ``downstream`` and leads on."""
        among, everything = frozenset(kept), len(self.program.calls)
        later = self.downstream(origin, everything, among.__contains__) if downstream else [origin]
        return tuple(sorted(among.intersection(self.upstream(later, everything, among.__contains__))))

    def upstream(
        self, starts: Iterable[int], limit: int, is_inside: Callable[[int], bool] = lambda index: True
    ) -> list[int]:
        """What ``starts`` depend on, nearest first, at most ``limit`` calls, within what is inside."""
        return self._spread(starts, limit, self.producers, is_inside)

    def downstream(self, index: int, limit: int, is_inside: Callable[[int], bool] = lambda index: True) -> list[int]:
        """What depends on a call, nearest first, at most ``limit`` calls, within what is inside."""
        return self._spread([index], limit, self.readers, is_inside)

    def _spread(
        self,
        starts: Iterable[int],
        limit: int,
        neighbours: Callable[[int], list[int]],
        is_inside: Callable[[int], bool],
    ) -> list[int]:
        """From some calls to their neighbours and on; torch's layers come whole."""
        order = list(dict.fromkeys(unit for index in starts for unit in self.units[index]))
        seen = set(order)
        for index in order:
            for found in neighbours(index):
                if found not in seen and self.is_forward(found) and is_inside(found):
                    order.extend(unit for unit in self.units[found] if unit not in seen)
                    seen.update(self.units[found])
            if len(order) >= limit:
                break
        return order

    def recording(self, wanted: frozenset[int], *, is_differentiated: bool) -> Recording:
        """A run recorded around these calls and maybe more; an earlier one, if that had them all."""
        known = self._recordings.get(is_differentiated)
        if known is None or not wanted <= known.wanted:
            calls = self.program.calls if is_differentiated else self.program.calls[: max(wanted) + 1]
            known = self._recordings[is_differentiated] = record(self.whole.with_calls(calls), wanted)
        return known


def written(call: Call) -> set[int]:
    """The values that a call makes or changes."""
    found = set(call.output_refs())
    if is_in_place(call.target):
        found |= {ref.value for ref in iter_refs(call.args[:1])}
    return found


@dataclass(frozen=True)
class StepSlice:
    """Some calls of a step as a candidate."""

    step: StepGraph
    kept: tuple[int, ...]  # forward calls in order
    is_differentiated: bool = False  # a backward pass follows, from all they make that gradients arrive at
    update: int | None = None  # that optimizer's step comes last

    def candidate(self, subject: int | None) -> Step | None:
        """The slice on recorded values; ``subject`` is the value that is bad. ``None`` when it cannot be built."""
        wanted = frozenset((*self.kept, *(() if self.update is None else (self.update,))))
        recording = self.step.recording(wanted, is_differentiated=self.is_differentiated)
        excerpt = Excerpt(self.step.program, recording)
        wants_grad = recording.needs_grad if self.is_differentiated else ()
        excerpt.keep(self.kept, {item.role for item in self.step.program.inputs}, wants_grad, self.step.words)
        if not self.is_differentiated:
            if all(not call.mode.grad for call in excerpt.calls):
                excerpt.differentiate_nowhere()
            return excerpt.candidate(self._shown(subject))
        leaves = [item.value for item in excerpt.inputs if item.requires_grad]
        if not excerpt.differentiate(self.outlets()) or not leaves:
            return None
        if self.update is not None:
            excerpt.update(self.update, leaves, is_alone=False)
        return excerpt.candidate()

    def boundary(self) -> dict[int, int]:
        """What is read and not made: each value with the first call that reads it."""
        made: set[int] = set()
        found: dict[int, int] = {}
        for index in self.kept:
            call = self.step.program.calls[index]
            for value in call.input_refs():
                if value not in made:
                    found.setdefault(value, index)
            made.update(call.output_refs())
        return found

    def outlets(self) -> list[int]:
        """What is made and, as far as this slice goes, not used up: read by other calls, or by none."""
        calls, given, kept = self.step.program.calls, self.boundary(), frozenset(self.kept)
        made = dict.fromkeys(v for i in self.kept for v in calls[i].output_refs() if v not in given)
        inner = {value for index in self.kept for value in calls[index].input_refs()}
        outer = {
            value
            for value in made
            for reader in self.step.readers_of.get(value, ())
            if reader not in kept and calls[reader].target not in GRAD_WRITES
        }
        return [value for value in made if value in outer or value not in inner]

    def _shown(self, subject: int | None) -> list[int]:
        """The value that is bad; if it is inside one of torch's layers, what the layer returns."""
        calls, outlets = self.step.program.calls, self.outlets()
        writers = [index for index in self.kept if subject in written(calls[index])]
        if subject is None or not writers:
            return outlets
        unit = self.step.units[writers[-1]]
        returned = [value for value in StepSlice(self.step, unit).outlets() if value in outlets]
        return returned if len(unit) > 1 and returned else [subject]
