"""Two runs of a step beside each other, place by place.

A *place* is a `Version` of the second run: a result, or a gradient that arrived in one of its backward passes. Calls
are aligned by equal results, then by function and module, so that a refactoring may insert and drop calls; what such
calls do together is compared where the programs meet again. `Places.differing` begins with hashes; where these differ
`Places.gap` runs both steps again, as they are and in float64, for these tensors only, and at most `MOST_BYTES` at a
time. Differences come in the order of time: results, and for every backward pass the gradients that arrived in it, from
the loss on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from reprokit.compare import imprints
from reprokit.compare.alignment import Alignment
from reprokit.compare.difference import halves_in, results_of
from reprokit.compare.gap import SAME_DRAWN, SAME_FORMULA, Gap, gap_between, no_gap
from reprokit.compare.imprints import GIVEN, LEFT, Run, Version
from reprokit.compare.inputs import input_partners
from reprokit.compare.quantity import loss_of
from reprokit.compare.settings import ABSENT, changed_settings
from reprokit.locate.notes import writes_gradients
from reprokit.program.functions import display_name
from reprokit.program.ir import Input

_SAME_UPDATE = ("foreach", "fused", "capturable", "differentiable")  # options that choose kernels only


class Places:
    """Two runs beside each other. Begin with ``differing`` and ``gap``."""

    def __init__(self, one: Run, other: Run) -> None:
        self.one = one
        self.other = other
        self.formats = halves_in(one.step.program, one.step.tensors), halves_in(other.step.program, other.step.tensors)
        self._draws = any(call.mode.rng is not None for call in one.calls)
        self.alignment = _aligned(one, other)
        # Calls of the first program by those of the second
        self.calls = self.alignment.calls
        inputs = input_partners(one.step, other.step)
        # Versions of the first run by those of the second
        self.partner = {Version(value, GIVEN): Version(partner, GIVEN) for value, partner in inputs.items()}
        self._pair_results()
        self._pair_operands(inputs)
        # Backward passes of the first run by those of the second; 0 stands for the forward pass
        self.starts = self._paired_passes()
        # Calls that make another update, be it only from the next step on
        self._with_other_options = {index for index in self.calls if self._has_other_options(index)}
        self._gaps = dict[Version, Gap | None]()
        # Tensors of both runs that were fetched for the next gaps
        self._held = dict[Version, tuple[Any, ...]]()

    # -- what belongs together -----------------------------------------------------------------------------------

    def _pair_results(self) -> None:
        """The results of aligned calls are partners; calls that are unlike each other are aligned no more."""
        for index, before in sorted(self.calls.items()):
            mine, others = self.one.made_by.get(before, []), self.other.made_by.get(index, [])
            if not self._is_alike(before, index) and not self._shares(before, index):
                del self.calls[index]
            elif len(mine) == len(others):
                self.partner.update(zip(others, mine, strict=True))

    def _is_alike(self, before: int, index: int) -> bool:
        """True if two calls read and make tensors of the same shapes."""
        one, other = self.one, self.other
        if index in other.passes and len(one.passes) != len(other.passes):
            return False  # one backward pass of a sum beside those of its parts
        mine, others = one.made_by.get(before, []), other.made_by.get(index, [])
        if len(mine) != len(others):
            return False  # such as the parts of a weight beside those of what it is multiplied with
        given = zip(one.given([before]).values(), other.given([index]).values(), strict=False)
        pairs = [*zip(mine, others, strict=True), *given]
        return all(self._has_same_shape(first, second) for first, second in pairs)

    def _has_same_shape(self, mine: Version, other: Version) -> bool:
        """False for what one of the runs has not made, because a call in front of it raised."""
        marks = self.one.marks.get(mine), self.other.marks.get(other)
        return marks[0] is not None and marks[1] is not None and marks[0].shape == marks[1].shape

    def _shares(self, before: int, index: int) -> bool:
        """True if all that two calls are given is the same in both programs."""
        pairs = zip(self.one.calls[before].input_refs(), self.other.calls[index].input_refs(), strict=False)
        return all(self.one.last(v, before) == self.partner.get(self.other.last(w, index)) for v, w in pairs)

    def _pair_operands(self, inputs: Mapping[int, int]) -> None:
        """What an aligned call is given is paired too, where calls that only one program has have made it, and what
        both programs leave in their inputs."""
        one, other, known = self.one, self.other, set(self.partner.values())
        pairs = [(at, n, one.calls[at].input_refs(), other.calls[n].input_refs()) for n, at in self.calls.items()]
        pairs.append((len(one.calls), len(other.calls), tuple(inputs.values()), tuple(inputs)))
        for before, index, mine, others in pairs:
            if len(mine) != len(others):
                continue
            for value, value_other in zip(mine, others, strict=True):
                first, second = one.last(value, before), other.last(value_other, index)
                is_made = GIVEN not in (first.number, second.number)
                if is_made and second not in self.partner and first not in known:
                    self.partner[second] = first
                    known.add(first)

    def _paired_passes(self) -> dict[int, int]:
        found = {0: 0}
        for number, index in enumerate(self.other.passes, 1):
            before = self.calls.get(index)
            # It is aligned with another call in files of strangers, which name the phases as they like.
            if before in self.one.passes:
                found[number] = self.one.passes.index(before) + 1
        if not any(map(writes_gradients, (*self.one.calls, *self.other.calls))):
            found[LEFT] = LEFT
        return found

    def _has_other_options(self, index: int) -> bool:
        """True for an optimizer whose options differ; another version of torch may have more of them."""
        call = self.other.calls[index]
        if not call.is_optimizer_step:
            return False
        changed = changed_settings(self.one.calls[self.calls[index]], call)
        return any(ABSENT not in pair and name not in _SAME_UPDATE for name, pair in changed.items())

    def has(self, value: int) -> bool:
        """True if an input of the second step has a partner."""
        return Version(value, GIVEN) in self.partner

    def mine(self, place: Version) -> Version | None:
        """The place of the first run beside one of the second."""
        partner, start = self.partner.get(place.result), self.starts.get(place.start)
        return partner._replace(start=start) if partner is not None and start is not None else None

    # -- what differs --------------------------------------------------------------------------------------------

    @functools.cached_property
    def differing(self) -> list[Version]:
        """Places where hashes differ, in the order of time."""
        places = [result._replace(start=start) for result in self.partner for start in self.starts]
        found = [place for place in places if self._has_other_digest(place)]
        updated = (place for place, at in self.other.made.items() if at in self._with_other_options)
        found += [place for place in updated if place not in found]
        return sorted(found, key=self._time)

    def _has_other_digest(self, place: Version) -> bool:
        one, other = self.one.digest(self.mine(place)), self.other.digest(place)
        if place.start:
            return one != other and self._has_whole_gradient(place.result)
        return None not in (one, other) and one != other and place.number != GIVEN

    def _has_whole_gradient(self, result: Version) -> bool:
        """True unless a value is made once more in one of the programs, by a call of the same function: then it gets a
        part of its gradient there."""
        sides = (self.one, self.partner[result]), (self.other, result)
        numbers = {run.num_copies[run.made[version]] for run, version in sides if version in run.made}
        return len(numbers) < 2

    def _time(self, place: Version) -> tuple[int, ...]:
        index = self.other.made.get(place.result, -1)
        passes = [-1, *self.other.passes]  # counted from 1; the last one is that of the gradients that are left
        return (passes[place.start], 0, -index) if place.start else (index, 1)

    @functools.cached_property
    def ends(self) -> list[Version]:
        """The places that differ of what the second step leaves: its outputs, what it has written into inputs, their
        gradients, and what optimizers were given and made of it. All places of a step that raised, or whose
        loss is NaN or inf, behind which nothing differs."""
        run = self.other
        if self.one.error or run.error or not math.isfinite(run.loss or 0.0):
            return self.differing
        given = [item.value for item in run.step.program.inputs]
        steps = [(at + 1, call) for at, call in enumerate(run.calls) if call.is_optimizer_step]
        updates = [(at, value) for at, call in steps for value in call.input_refs()]
        found = {run.last(value, at) for at, value in updates}
        found |= {run.last(value, len(run.calls)) for value in (*results_of(run.step.program), *given)}
        left = {*given} - {value for _, value in updates} - self._updated_in_first(given)
        found |= {Version(value, GIVEN, LEFT) for value in left}
        return [place for place in self.differing if place in found]

    def _updated_in_first(self, values: list[int]) -> set[int]:
        """Those inputs whose partners an optimizer of the first step is given."""
        updated = {value for call in self.one.calls if call.is_optimizer_step for value in call.input_refs()}
        partners = {value: self.partner.get(Version(value, GIVEN)) for value in values}
        return {value for value, mine in partners.items() if mine is not None and mine.value in updated}

    def gap(self, place: Version) -> Gap | None:
        """The difference at a place; an optimizer's options may show in later steps only, as a beta of Adam does."""
        if place not in self._gaps:
            found = self._gap(place)
            is_hidden = self.other.made.get(place) in self._with_other_options and not (found and found.why)
            if is_hidden:
                found = replace(found or Gap(0, 0, 0.0, 0.0, 0), why="its other options show in later steps")
            self._gaps[place] = found
        return self._gaps[place]

    def _gap(self, place: Version) -> Gap | None:
        if self.mine(place) not in self.one.marks:
            return no_gap(1, "the first has no gradient here")
        if place not in self.other.marks:
            return no_gap(1, "the second has no gradient here")
        if place not in self._held:
            self._hold(place)
        first, second, *exact = self._held.pop(place)
        least = self._largest_gradient if place.start else 0.0
        return gap_between(first, second, (exact[0], exact[1]), self.formats, self._same_formula(place), least)

    def _same_formula(self, place: Version) -> float:
        index = self.other.made.get(place)
        # Adam divides gradients that are rounding, as that of a bias of keys, by their own size.
        is_update = index is not None and self.other.calls[index].is_optimizer_step
        return SAME_DRAWN if self._draws or is_update else SAME_FORMULA

    def _hold(self, wanted: Version) -> None:
        """Run both again for the tensors at a place, and at as many of those that follow as may be held at once."""
        chosen, size = dict[Version, Any](), 0
        for place in (wanted, *self.ends, *self.differing):
            mine, mark = self.mine(place), self.other.marks.get(place)
            is_new = place not in self._gaps and place not in chosen
            if is_new and mine in self.one.marks and mark is not None:
                size += min(mark.num_elements, imprints.MOST_ELEMENTS)
                if chosen and size > imprints.MOST_ELEMENTS:
                    break
                chosen[place] = mine
        (one, wide), (other, wide_other) = self.one.fetch([*chosen.values()]), self.other.fetch([*chosen])
        self._held = {p: (one[m], other[p], wide.get(m), wide_other.get(p)) for p, m in chosen.items()}

    @property
    def is_cut(self) -> bool:
        """True if a tensor is larger than what is held of it."""
        marks = (self.other.marks[place] for place in self.differing if place in self.other.marks)
        return any(mark.num_elements > imprints.MOST_ELEMENTS for mark in marks)

    @functools.cached_property
    def _largest_gradient(self) -> float:
        """Of leaves of the first run; beside it the gradient of a bias in front of a normalization is rounding."""
        return max((mark.size for place, mark in self.one.marks.items() if place.start == LEFT), default=0.0)

    @functools.cached_property
    def losses(self) -> tuple[float, float] | None:
        """The losses of both, unless they stand for different parts, such as the last micro-batch beside the whole."""
        places, losses = [], []
        for run in (self.one, self.other):
            value = loss_of(run.step.program)
            if value is None or run.loss is None:
                return None
            places.append(run.last(value, len(run.calls)))
            losses.append(run.loss)
        return (losses[0], losses[1]) if self.partner.get(places[1]) == places[0] else None

    def alone(self) -> Iterator[tuple[str, Input]]:
        """The inputs that one of the programs changes, such as an average of the parameters, and the other does not."""
        runs, changed = (self.one, self.other), (self.one.changed, self.other.changed)
        digests = [{run.marks[at].digest for at in found} for run, found in zip(runs, changed, strict=True)]
        pairs = [(mine, at) for at, mine in self.partner.items() if at.number == GIVEN]
        for n, which in enumerate(("first", "second")):
            known = {pair[n] for pair in pairs if pair[1 - n]._replace(number=0) in runs[1 - n].made}
            for place, item in changed[n].items():
                is_twin = runs[n].marks[place].digest in digests[1 - n]  # of a parameter that is an input twice
                if place not in known and not is_twin and item.role != "state":
                    yield which, item


def _aligned(one: Run, other: Run) -> Alignment:
    """Calls with equal results, then of one function in one module, then of one function, each between those that are
    known."""
    levels = zip(_keys(one), _keys(other), strict=True)
    return Alignment.in_order(one.calls, other.calls, *levels)


def _keys(run: Run) -> Iterator[list[Hashable]]:
    names = [display_name(call.target) for call in run.calls]
    results = [result for result, _ in run.digests]
    # Calls that have made nothing, such as backward passes, are equal.
    yield [(name, result) if result else None for name, result in zip(names, results, strict=True)]
    yield [(name, *(scope.path for scope in call.scope)) for name, call in zip(names, run.calls, strict=True)]
    yield [*names]
