"""Two runs of a step that should agree: the first call that was given the same and made something else.

`Comparison.of` runs two steps from the same inputs, as far as both have them, and finds two departures: the first one
in any bit, and the first one that is no rounding (`gap`). The latter counts if what the step leaves differs too: loss,
outputs, buffers, gradients and updates. In between a refactoring may make other numbers, such as parts of a gradient.
`beside` makes a step of a departure, which `reprokit shrink` reduces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reprokit import native
from reprokit.compare.departure import Departure, departure_at, leading_calls
from reprokit.compare.difference import OTHER_WAY
from reprokit.compare.imprints import Run, Version
from reprokit.compare.inputs import InputDifference, input_differences, input_partners
from reprokit.compare.places import Places
from reprokit.compare.quantity import at_call
from reprokit.locate.failure import Failure
from reprokit.locate.kinds import MISMATCH
from reprokit.program.ir import Call, Input, Phase, Program, Ref
from reprokit.program.step import HasProgram, Step

_MOST_CONSTANTS = 64


@dataclass
class Comparison:
    """Two runs beside each other, from the same inputs as far as both have them."""

    one: Run
    other: Run
    places: Places
    first: Departure | None  # in any bit
    real: Departure | None  # the first that is no rounding, if what the step leaves differs by more than that
    inputs: list[InputDifference] = field(default_factory=list)  # that differed

    @classmethod
    def of(cls, one: HasProgram, other: HasProgram, num_steps: int = 0) -> Comparison:
        """Run both steps and compare them; ``num_steps`` were made before."""
        mine, others = Step(one.program, one.tensors), Step(other.program, other.tensors)
        partners = input_partners(mine, others)
        found = dict(input_differences(mine, others, partners, num_steps))
        moved = {*found}
        if any(item.role == "rng" for item in found.values()):  # the states of later calls follow from the first
            moved |= {item.value for item in other.program.inputs if item.role == "rng"}
        same, exact = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for value, partner in partners.items():
            given, own = mine.tensors[partner], others.tensors[value]
            if given.shape != own.shape:
                continue
            if value in moved:
                same[value] = native.copy_(native.clone(own), given)  # in its memory format
            if value in moved or given.dtype != own.dtype:
                exact[value] = given
        compared = cls.of_runs(Run.of(one), Run.of(others.with_tensors(same), exact))
        return replace(compared, inputs=[*found.values()])

    @classmethod
    def of_runs(cls, one: Run, other: Run) -> Comparison:
        """Compare two runs whose inputs agree."""
        places = Places(one, other)
        is_real = any(gap.why for gap in map(places.gap, places.ends) if gap is not None)
        first = real = None
        for place in places.differing:
            gap = places.gap(place)
            if gap is None:
                continue
            if first is None:
                first = departure_at(places, place, gap)
            if not is_real:
                break
            if gap.why:
                real = departure_at(places, place, gap)
                break
        return cls(one, other, places, first, real)


# -- a departure as a step of its own ----------------------------------------------------------------------------


@dataclass
class _TwoWays:
    """A program that makes one result in two ways, as it is put together."""

    calls: list[Call]
    outputs: tuple[Ref, Ref]
    last: int  # the call that makes the second way's result
    given: dict[int, Version]  # inputs that both ways share, as the first run has them
    constants: dict[int, torch.Tensor] = field(default_factory=dict)


def beside(found: Comparison, *, is_recorded: bool) -> tuple[Step, Failure] | None:
    """A step that makes the departing result in both ways from what the runs share, and the failure that its two
    outputs differ. With ``is_recorded`` the second way cannot run here, and is a constant of at most `_MOST_CONSTANTS`
    numbers. ``None`` if it is no result of the forward pass.
    """
    departure = found.real
    if departure is None or not departure.is_of_forward_pass:
        return None
    both = _beside_constant(found, departure.place) if is_recorded else _beside_calls(found, departure.place)
    if both is None:
        return None
    tensors = found.one.fetch([*both.given.values()])[0]
    inputs = both.constants | {value: tensors[source] for value, source in both.given.items()}
    names = {item.value: replace(item, requires_grad=False) for item in found.one.step.program.inputs}
    items = (names.get(value, Input(value, f"x{n}")) for n, value in enumerate(inputs))
    program, gap = Program(tuple(both.calls), tuple(items), both.outputs), departure.gap
    failure = Failure(
        Phase.FORWARD,
        MISMATCH,
        OTHER_WAY,
        value=both.outputs[1].value,
        num_bad=gap.num_bad,
        num_elements=gap.num_elements,
        departure=f"beyond what {gap.dtype or 'the format'} explains: {departure.words}",
    )
    step = Step(program, {value: native.detach(tensor) for value, tensor in inputs.items()})
    return step, at_call(failure, program, both.last)


def _first_way(found: Comparison, partner: Version) -> _TwoWays:
    """The calls of the first run that make the result; there is no second way yet."""
    one = found.one
    before = one.made[partner]
    chosen = sorted({before, *leading_calls(one, before, {*found.places.calls.values()})})
    calls, result = [one.calls[at] for at in chosen], Ref(partner.value)
    return _TwoWays(calls, (result, result), len(calls) - 1, one.given(chosen))


def _beside_calls(found: Comparison, place: Version) -> _TwoWays | None:
    """Both ways as calls; ``None`` where the second one reads what the first run does not have."""
    other, partner = found.other, found.places.partner
    both, start, index = _first_way(found, partner[place]), found.one.step.program.next_value(), other.made[place]
    chosen = sorted({index, *leading_calls(other, index, {*found.places.calls})})
    change: dict[int, Any] = {v: Ref(start + v) for at in chosen for v in other.calls[at].output_refs()}
    for value, source in other.given(chosen).items():
        if source not in partner:
            return None
        change[value] = Ref(partner[source].value)
        both.given.setdefault(change[value].value, partner[source])
    both.calls += [other.calls[at].substituted(change, outputs=True) for at in chosen]
    both.last = len(both.calls) - 1
    both.outputs = both.outputs[0], Ref(start + place.value)
    return both


def _beside_constant(found: Comparison, place: Version) -> _TwoWays:
    """The second way as a constant; of a large one the elements that differ most."""
    partner, start = found.places.partner[place], found.one.step.program.next_value()
    both = _first_way(found, partner)
    result, constant = both.outputs[0], Ref(start + 3)
    expected, actual = found.other.fetch([place])[0][place], found.one.fetch([partner])[0][partner]
    if native.numel(expected) > _MOST_CONSTANTS:
        gaps = native.abs(native.double(actual) - native.double(expected))
        flat_gaps = native.nan_to_num(native.reshape(gaps, -1), math.inf)
        chosen = native.topk(flat_gaps, _MOST_CONSTANTS).indices
        expected = native.reshape(expected, -1)[chosen]
        flat, few = Ref(start + 1), Ref(start + 2)
        both.calls.append(Call("torch.Tensor.reshape", (result, (-1,)), outputs=flat))
        both.calls.append(Call("torch.Tensor.index_select", (flat, 0, Ref(start)), outputs=few))
        both.constants[start] = chosen
        result = few
    both.constants[constant.value] = expected
    both.outputs = constant, result
    return both
