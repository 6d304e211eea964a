"""Two runs of a step that should agree: the first call that was given the same and made something else.

Both steps are run as they are and in float64. Calls are aligned by equal results, then by function and module, so that
a refactoring may insert and drop calls; what such calls do together is compared where the programs meet again. First
come the results in the order of the calls, then the gradients that arrived at them, from the loss on, then updates.

A difference is *rounding* if the formulas agree in float64, and if the second result is about as close to that as the
first: within `MARGIN` times its error, or that many units in the last place of the coarser format. Runs of different
formats may each have their own error. Whatever else differs is a *difference*.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import torch

from reprokit.compare.difference import MARGIN, MISMATCH, OTHER_WAY, halves_in, largest_gap, real_numbers
from reprokit.compare.quantity import loss_of, number_of
from reprokit.errors import pass_on
from reprokit.locate.failure import Failure
from reprokit.locate.notes import phase_of
from reprokit.program.convert import default_dtype, in_dtype
from reprokit.program.dataflow import contents, same_bits
from reprokit.program.functions import GRAD_READ, display_name
from reprokit.program.interpreter import Settings, determinism
from reprokit.program.ir import Call, Input, Phase, Program, Ref
from reprokit.program.observe import Trace, copied
from reprokit.program.step import HasProgram, Step

_SAME_FORMULA = 1e-9  # of the largest element: float64 leaves 1e-16 times the number of operations
_SAME_DRAWN = 1e-6  # the same behind a random call, which is made in float32 there, because float64 draws other numbers
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x9E3779B97F4A7C1  # odd bits of the golden ratio, which spreads neighbours (Knuth, volume 3, 6.4)
_MOST_CONSTANTS = 64
_SAME_UPDATE = ("foreach", "fused", "capturable", "differentiable")  # options that choose kernels only
_LEAF = -1  # the number of the gradient that an input of the step got


def digest_of(tensor: torch.Tensor) -> int:
    """63 bits that tell contents, dtype and shape of a tensor from others; strides and the bits of a NaN do not count.

    A weighted sum of the elements' bits in 64-bit integers, which is the same on every device and in any order.
    """
    values = contents(tensor)
    values = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
    if values.is_floating_point():
        values = torch.where(values.isnan(), math.nan, values)
    bits = values.contiguous().view(_INTEGERS[values.element_size()]).long()
    places = torch.arange(len(bits), device=bits.device)
    weighted = int((bits * ((places * _MULTIPLIER) | 1)).sum()) if len(bits) else 0
    kind = hashlib.blake2b(f"{tensor.dtype} {[*tensor.shape]} {weighted}".encode(), digest_size=8)
    return int.from_bytes(kind.digest(), "big") >> 1


def digests_of(step: HasProgram) -> list[tuple[int, int]]:
    """For every call a hash of what it wrote, and of the gradients that arrived there, of a run that keeps no results.
    0 stands for nothing, and for calls that did not run because one raised."""
    trace = Trace(step.program, digest_of, gradients_of=digest_of)
    trace.run(step.tensors)
    found = [[0, 0] for _ in step.program.calls]
    for index, written in trace.writes.items():
        for value, digest in written.items():
            found[index][0] ^= digest
            for gradient in trace.gradients.get((index, value), ())[-1:]:
                found[index][1] ^= gradient
    return [(result, gradient) for result, gradient in found]


class Version(NamedTuple):
    """A result: the ``number``-th time that a ``value`` is written; of a leaf's gradient `_LEAF`."""

    value: int
    number: int


Tensors = dict[Version, torch.Tensor]
Digests = Sequence[tuple[int, int]]


@dataclass
class Run:
    """What one run of a step left: ``results`` in order, with the call that made each, and ``gradients`` that arrived
    at them and at leaves. ``exact`` and ``exact_gradients`` are those of the run in float64, as far as that went.
    ``error`` is what a call raised, after which nothing was made; empty if none did."""

    step: Step
    results: Tensors = field(default_factory=dict)
    gradients: Tensors = field(default_factory=dict)
    calls: dict[Version, int] = field(default_factory=dict)
    exact: Tensors = field(default_factory=dict)
    exact_gradients: Tensors = field(default_factory=dict)
    error: str = ""

    @classmethod
    def of(cls, content: HasProgram, exact_inputs: Mapping[int, torch.Tensor] | None = None) -> Run:
        """Run a step; in float64 with other inputs where there are ``exact_inputs``."""
        step = Step(content.program, content.tensors)
        results, gradients, calls, error = _traced(step, math.inf)
        run = cls(step, results, gradients, calls, error=error)
        wide = step.with_tensors(exact_inputs or {})
        try:
            with default_dtype(torch.float64):
                converted = in_dtype(wide, torch.float64)
                run.exact, run.exact_gradients, *_ = _traced(converted, step.program.next_value())
        except Exception as error:  # kernels refuse in as many ways as there are functions
            pass_on(error)
        return run

    @property
    def digests(self) -> list[int]:
        """For every call a hash of what it wrote; 0 stands for nothing."""
        found = [0] * len(self.step.program.calls)
        for place, tensor in self.results.items():
            found[self.calls[place]] ^= digest_of(tensor)
        return found

    def last(self, value: int, before: int) -> Version | None:
        """The last time that a call in front of another one wrote a value."""
        return next((p for p in reversed(self.calls) if p.value == value and self.calls[p] < before), None)

    @property
    def loss(self) -> float | None:
        """The loss of the step."""
        value = loss_of(self.step.program)
        made = [tensor for place, tensor in self.results.items() if place.value == value]
        return number_of(made[-1]) if made else None


def write_run(step: HasProgram, settings: Settings, path: str) -> None:
    """Run a step and write what it left; what another Python of `reprokit diff` is started for."""
    with determinism(settings):
        run = Run.of(step)
    fields = ("results", "gradients", "calls", "exact", "exact_gradients")
    content = {name: [(*place, item) for place, item in getattr(run, name).items()] for name in fields}
    torch.save({**content, "torch": str(torch.__version__), "error": run.error}, path)


def read_run(step: HasProgram, path: str) -> tuple[Run, str]:
    """What `write_run` wrote, and the version of torch that made it."""
    content = torch.load(path, weights_only=True)
    version, error = content.pop("torch"), content.pop("error")
    plain = {name: {Version(value, number): item for value, number, item in rows} for name, rows in content.items()}
    return Run(Step(step.program, step.tensors), **plain, error=error), version


def _traced(step: Step, limit: float) -> tuple[Tensors, Tensors, dict[Version, int], str]:
    """Results, gradients and the calls of a run, and its error; casts of a conversion have values from ``limit`` on."""
    trace = Trace(step.program, copied, gradients_of=copied)
    outcome = trace.run(step.tensors)
    error = outcome.error
    times = Counter[int]()
    results, gradients, calls = Tensors(), Tensors(), dict[Version, int]()
    for index, written in trace.writes.items():
        for value, tensor in written.items():
            if value < limit:
                place = Version(value, times[value])
                times[value] += 1
                results[place], calls[place] = tensor, index
                for gradient in trace.gradients.get((index, value), ())[-1:]:
                    gradients[place] = gradient
    gradients |= {Version(value, _LEAF): copied(gradient) for value, gradient in outcome.gradients.items()}
    words = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}" if error is not None else ""
    return results, gradients, calls, words


# -- two tensors ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """How two tensors differ: elements that do, the largest absolute difference, that over the largest element, and
    units in the last place, if that is a number of the format. ``why`` it is no rounding; empty if it is."""

    num_bad: int
    num_elements: int
    largest: float
    relative: float
    units: int | None
    why: str = ""

    @property
    def words(self) -> str:
        """``12 of 4,096 elements differ by up to 3 units in the last place (2e-7 of the largest)``."""
        units = f"{self.units:,} units in the last place" if self.units is not None and self.units < 10**6 else ""
        size = units or f"{self.largest:.3g}"
        more = f" ({self.relative:.1g} of the largest)" if math.isfinite(self.relative) else ""
        return f"{self.num_bad:,} of {self.num_elements:,} elements differ by up to {size}{more}"


def gap_between(
    first: torch.Tensor,
    second: torch.Tensor,
    exact: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    formats: tuple[frozenset[torch.dtype], frozenset[torch.dtype]] = (frozenset(), frozenset()),
    same_formula: float = _SAME_FORMULA,
    least: float = 0.0,
) -> Gap | None:
    """The difference of two results; ``None`` if all bits agree. ``exact`` are their values in float64, ``formats`` the
    half-precision formats that the programs compute in, ``least`` the size beside which others are rounding."""
    if same_bits(first, second):
        return None
    if first.shape != second.shape:
        return Gap(0, second.numel(), math.inf, math.inf, None, f"shapes {[*first.shape]} and {[*second.shape]}")
    one, other = real_numbers(first), real_numbers(second)
    bad = (one != other) & ~(one.isnan() & other.isnan())
    largest, scale = largest_gap(one, other), max(_size(one), _size(other))
    relative = largest / scale if scale else math.inf
    num_bad = int((bad.any(-1) if first.is_complex() else bad).sum())
    found = Gap(num_bad, first.numel(), largest, relative, _units(first, second))
    own, others = ({tensor.dtype, *halves} for tensor, halves in zip((first, second), formats, strict=True))
    eps = max((torch.finfo(dtype).eps for dtype in own | others if dtype.is_floating_point), default=0.0)
    noise = eps * max(scale, least)
    wide, wide_other = exact
    if wide is not None and wide_other is not None and wide.shape == wide_other.shape == first.shape:
        formula, size = largest_gap(real_numbers(wide), real_numbers(wide_other)), max(_size(real_numbers(wide)), least)
        if formula > same_formula * size:
            return replace(found, why=f"in float64 they differ by {formula / size if size else math.inf:.1g} as well")
        noise = max(noise, largest_gap(one, real_numbers(wide)))
        noise = max(noise, largest_gap(other, real_numbers(wide_other))) if own != others else noise
    if not largest <= MARGIN * noise:
        times = largest / noise if noise else math.inf
        return replace(found, why=f"that is {times:.0f} times the rounding error of the first")
    return found


def _size(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _units(first: torch.Tensor, second: torch.Tensor) -> int | None:
    """Numbers of the format between two results at most; ``None`` if one is not finite or the formats differ."""
    kind = _INTEGERS.get(first.element_size())
    if first.dtype != second.dtype or not first.is_floating_point() or kind is None or not first.numel():
        return None
    if not bool((first.isfinite() & second.isfinite()).all()):
        return None
    ranks = []
    for tensor in (first, second):
        bits = contents(tensor.cpu()).contiguous().view(kind).double()
        ranks.append(torch.where(bits < 0, -(2.0 ** (8 * first.element_size() - 1)) - bits, bits))
    return int((ranks[0] - ranks[1]).abs().max())


# -- two programs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InputDifference:
    """An input of one step or both that is not the same."""

    name: str
    role: str
    words: str

    @property
    def is_alone(self) -> bool:
        """True if one step only has it."""
        return self.words.startswith("only the ")


@dataclass(frozen=True)
class Departure:
    """The first call of the ``second`` program whose result, gradient or update differs.

    ``index`` is its place there. ``only_first`` and ``only_second`` are the calls that lead to it from values that
    agree, where a program has more than this one: then these differ together. ``settings`` are the arguments that
    differ.
    """

    index: int
    call: Call
    phase: Phase
    gap: Gap
    only_first: list[Call]
    only_second: list[Call]
    settings: str = ""

    @property
    def is_alone(self) -> bool:
        """True if it is one call of both programs."""
        return not (self.only_first or self.only_second)


@dataclass
class Comparison:
    """Two runs beside each other. ``inputs`` that differ are the answer; else ``first`` is the first departure in any
    bit, and ``real`` the first that is no rounding. ``calls`` are calls of ``one`` by those of ``other``."""

    one: Run
    other: Run
    inputs: list[InputDifference]
    first: Departure | None = None
    real: Departure | None = None
    calls: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, one: HasProgram, other: HasProgram) -> Comparison:
        """Run both steps and compare them."""
        mine, others = Step(one.program, one.tensors), Step(other.program, other.tensors)
        inputs = _input_partners(mine, others)
        found = list(_input_differences(mine, others, inputs))
        if found:
            return cls(Run(mine), Run(others), found)
        return cls.of_runs(Run.of(one), Run.of(other, {v: mine.tensors[p] for v, p in inputs.items()}))

    @classmethod
    def of_runs(cls, one: Run, other: Run) -> Comparison:
        """Compare two runs whose inputs agree."""
        walk = _Walk(one, other)
        departures = list(walk.departures())
        first = next(iter(departures), None)
        real = next((found for found in departures if found.gap.why), None)
        return cls(one, other, [], first, real, walk.calls)


def first_other_digest(
    program: Program, mine: Digests, others: Digests, calls: Mapping[int, int]
) -> tuple[int, Phase] | None:
    """The first call of a program, and the phase, in which a hash of ``others``, that program's, is not the one of
    ``mine`` for the call that ``calls`` puts beside it."""
    forward = [at for at in sorted(calls) if phase_of(program.calls[at]) is not Phase.OPTIMIZER]
    updates = [at for at in sorted(calls) if phase_of(program.calls[at]) is Phase.OPTIMIZER]
    orders = ((Phase.FORWARD, 0, forward), (Phase.BACKWARD, 1, forward[::-1]), (Phase.OPTIMIZER, 0, updates))
    for phase, kind, order in orders:
        for at in order:
            if mine[calls[at]][kind] != others[at][kind]:
                return at, phase
    return None


def _input_partners(one: Step, other: Step) -> dict[int, int]:
    """Inputs of the first step by those of the second: by name, then by equal contents, then by order."""
    found: dict[int, int] = {}
    keys: Sequence[Callable[[Step, Input], Hashable]] = (
        lambda step, item: (item.role, item.name),
        lambda step, item: digest_of(step.tensors[item.value]),
        lambda step, item: (item.role, step.tensors[item.value].shape),
    )
    for key in keys:
        left: dict[Hashable, list[int]] = {}
        for item in one.program.inputs:
            if item.value not in found.values():
                left.setdefault(key(one, item), []).append(item.value)
        for item in other.program.inputs:
            partners = left.get(key(other, item), []) if item.value not in found else []
            if partners:
                found[item.value] = partners.pop(0)
    return found


def _input_differences(one: Step, other: Step, partners: Mapping[int, int]) -> Iterator[InputDifference]:
    for item in other.program.inputs:
        if item.value not in partners:
            yield InputDifference(item.name, item.role, "only the second step has it")
            continue
        first, second = one.tensors[partners[item.value]], other.tensors[item.value]
        if first.dtype != second.dtype and first.is_floating_point() and second.is_floating_point():
            narrow = min(first.dtype, second.dtype, key=lambda dtype: dtype.itemsize)
            first, second = first.to(narrow), second.to(narrow)  # the same numbers in another format
        gap = gap_between(first, second)
        if gap is not None and item.role == "rng":
            yield InputDifference(item.name, item.role, "the state of the random generator differs")
        elif gap is not None:
            yield InputDifference(item.name, item.role, gap.why if first.shape != second.shape else gap.words)
    for item in one.program.inputs:
        if item.value not in partners.values():
            yield InputDifference(item.name, item.role, "only the first step has it")


def beside(found: Comparison, departure: Departure, *, is_recorded: bool) -> tuple[Step, Failure] | None:
    """A step that makes the departing result in both ways from what the runs share, and the failure that its two
    outputs differ. With ``is_recorded`` the second way cannot run here, and is a constant of at most `_MOST_CONSTANTS`
    numbers. ``None`` if it is no result of the forward pass.
    """
    one, other, index = found.one, found.other, departure.index
    walk = _Walk(one, other)
    place = next((p for p, at in other.calls.items() if at == index and p in walk.partner), None)
    if departure.phase is not Phase.FORWARD or place is None:
        return None
    ours, theirs, start = one.step.program.calls, other.step.program.calls, one.step.program.next_value()
    before = one.calls[walk.partner[place]]
    mine = sorted({before, *_led_by(ours, before, lambda at: at not in set(walk.calls.values()))})
    calls, result = [ours[at] for at in mine], walk.partner[place].value
    given = _given(one, ours, mine)
    inputs = {value: tensor for value, tensor in given.items() if tensor is not None}
    number = start + other.step.program.next_value()
    if is_recorded:
        expected, number = other.results[place], number + 1
        if expected.numel() > _MOST_CONSTANTS:
            gaps = (
                (one.results[walk.partner[place]].double() - expected.double()).abs().reshape(-1).nan_to_num(math.inf)
            )
            inputs[number] = gaps.topk(_MOST_CONSTANTS).indices
            flat = Call("torch.Tensor.reshape", (Ref(result), (-1,)), outputs=Ref(number + 1))
            calls += [
                flat,
                Call("torch.Tensor.index_select", (Ref(number + 1), 0, Ref(number)), outputs=Ref(number + 2)),
            ]
            result, expected = number + 2, expected.reshape(-1)[inputs[number]]
        second = number + 3
        inputs[second] = expected
        outputs = Ref(second), Ref(result)
    else:
        others = sorted({index, *_led_by(theirs, index, lambda at: at not in walk.calls)})
        made = {value for at in others for value in theirs[at].output_refs()}
        change: dict[int, Any] = {value: Ref(start + value) for value in made}
        for value in _given(other, theirs, others):
            last = other.last(value, others[0])
            partner = walk.partner.get(last) if last is not None else None
            change[value] = Ref(partner.value if partner is not None else walk.inputs.get(value, value))
            inputs.setdefault(change[value].value, _value_of(one, change[value].value, before))
        calls += [theirs[at].substituted(change, outputs=True) for at in others]
        outputs = Ref(result), Ref(start + place.value)
    names = {item.value: item for item in one.step.program.inputs}
    items = [names.get(value, Input(value, f"x{n}")) for n, value in enumerate(inputs)]
    program = Program(tuple(calls), tuple(replace(item, requires_grad=False) for item in items), outputs)
    step = Step(program, {value: tensor.detach() for value, tensor in inputs.items()})
    gap, way = departure.gap, OTHER_WAY
    return step, Failure(
        Phase.FORWARD, MISMATCH, way, value=outputs[1].value, num_bad=gap.num_bad, num_elements=gap.num_elements
    )


def _given(run: Run, calls: Sequence[Call], chosen: Sequence[int]) -> dict[int, torch.Tensor]:
    """What chosen calls read and do not make themselves."""
    found, made = dict[int, torch.Tensor](), set[int]()
    for at in chosen:
        found.update((v, _value_of(run, v, at)) for v in calls[at].input_refs() if v not in made and v not in found)
        made.update(calls[at].output_refs())
    return found


def _value_of(run: Run, value: int, before: int) -> torch.Tensor:
    place = run.last(value, before)
    return run.results[place] if place is not None else run.step.tensors[value]


class _Walk:
    """The calls of the second program beside those of the first."""

    def __init__(self, one: Run, other: Run) -> None:
        self.one, self.other = one, other
        self.formats = tuple(halves_in(run.step.program, run.step.tensors) for run in (one, other))
        is_drawn = any(call.mode.rng is not None for call in one.step.program.calls)
        self.same_formula = _SAME_DRAWN if is_drawn else _SAME_FORMULA
        self.calls = _aligned(one, other)  # calls of the first by those of the second
        self.inputs = _input_partners(one.step, other.step)
        places = [_places_by_call(run) for run in (one, other)]
        self.partner: dict[Version, Version] = {Version(v, _LEAF): Version(p, _LEAF) for v, p in self.inputs.items()}
        for index, before in sorted(self.calls.items()):
            mine, others = (found.get(at, []) for found, at in zip(places, (before, index), strict=True))
            sizes = [[run.results[at].shape for at in made] for run, made in ((one, mine), (other, others))]
            if sizes[0] != sizes[1] and not self._shares(before, index):
                del self.calls[index]  # such as the parts of a weight beside those of what it is multiplied with
            elif len(mine) == len(others):
                self.partner.update(zip(others, mine, strict=True))
        self._pair_operands()

    def _shares(self, before: int, index: int) -> bool:
        """True if all that two calls are given is the same in both programs."""
        ours, theirs = (run.step.program.calls[at] for run, at in ((self.one, before), (self.other, index)))
        for value, value_other in zip(ours.input_refs(), theirs.input_refs(), strict=False):
            place, other = self.one.last(value, before), self.other.last(value_other, index)
            is_input = place is None and other is None and self.inputs.get(value_other) == value
            if not (is_input or (other is not None and place == self.partner.get(other))):
                return False
        return True

    def _pair_operands(self) -> None:
        """What an aligned call is given is paired too, where calls that only one program has have made it."""
        known = set(self.partner.values())
        for index, before in self.calls.items():
            calls = self.one.step.program.calls[before], self.other.step.program.calls[index]
            mine, others = ([*call.input_refs()] for call in calls)
            for value, value_other in zip(mine, others, strict=False) if len(mine) == len(others) else ():
                place, other = self.one.last(value, before), self.other.last(value_other, index)
                if place is not None and other is not None and other not in self.partner and place not in known:
                    self.partner[other] = place
                    known.add(place)

    def departures(self) -> Iterator[Departure]:
        """What differs, in the order of a step."""
        updates = []
        for place, index in self.other.calls.items():
            is_update = phase_of(self.other.step.program.calls[index]) is Phase.OPTIMIZER
            gap = self._gap(place)
            if is_update and (gap is None or not gap.why) and self._has_other_options(index):
                # another beta of Adam shows in the parameters of later steps only
                gap = replace(gap or Gap(0, 0, 0.0, 0.0, 0), why="its other options show in later steps")
            if gap is not None and place in self.partner:
                found = (self.one.calls[self.partner[place]], index, gap)
                if is_update:
                    updates.append(found)
                else:
                    yield self._departure(Phase.FORWARD, *found)
        known = dict(self.other.calls)
        if not any(_writes_gradients(call) for run in (self.one, self.other) for call in run.step.program.calls):
            known |= {place: -1 for place in self.other.gradients if place.number == _LEAF}
        for place in sorted(known, key=lambda place: -known[place]):
            gap = self._gap(place, of_gradient=True)
            if gap is not None:
                index = self._consumer(place, known[place])
                yield self._departure(Phase.BACKWARD, self.calls.get(index), index, gap)
        for found in updates:
            yield self._departure(Phase.OPTIMIZER, *found)

    def _has_other_options(self, index: int) -> bool:
        """True if an optimizer makes another update than in the first program, be it only from the next step on."""
        before, ours, theirs = self.calls.get(index), self.one.step.program.calls, self.other.step.program.calls
        settings = _settings(ours[before], theirs[index]) if before is not None else ""
        return any(not part.startswith(_SAME_UPDATE) for part in settings.split(", ") if part)

    def _gap(self, place: Version, *, of_gradient: bool = False) -> Gap | None:
        """The difference at a place that both programs have; of its gradient also if only one has it."""
        partner = self.partner.get(place)
        name = "gradients" if of_gradient else "results"
        first, second = getattr(self.one, name).get(partner), getattr(self.other, name).get(place)
        if partner is None or (first is None and second is None):
            return None
        if first is None or second is None:
            which = "second" if second is None else "first"
            return Gap(1, 1, math.inf, math.inf, None, f"the {which} has no gradient here") if of_gradient else None
        exact = "exact_gradients" if of_gradient else "exact"
        wide = getattr(self.one, exact).get(partner), getattr(self.other, exact).get(place)
        formats = self.formats[0], self.formats[1]
        least = self.largest_gradient if of_gradient else 0.0
        return gap_between(first, second, wide, formats, self.same_formula, least)

    @functools.cached_property
    def largest_gradient(self) -> float:
        """Of leaves of the first run; beside it the gradient of a bias in front of a normalization is rounding."""
        leaves = (tensor for place, tensor in self.one.gradients.items() if place.number == _LEAF)
        return max(map(_size, leaves), default=0.0)

    def _departure(self, phase: Phase, before: int | None, index: int, gap: Gap) -> Departure:
        ours, theirs = self.one.step.program.calls, self.other.step.program.calls
        matched = set(self.calls.values())
        found, found_other = _led_by(ours, before, lambda at: at not in matched), _led_by(theirs, index, self._is_new)
        if phase is Phase.OPTIMIZER and before is not None:  # what writes into gradients, as clipping does
            found += [at for at in range(before) if at not in matched and _writes_gradients(ours[at])]
            found_other += [at for at in range(index) if self._is_new(at) and _writes_gradients(theirs[at])]
        only_first, only_second = [ours[at] for at in found], [theirs[at] for at in found_other]
        settings = _settings(ours[before], theirs[index]) if before is not None and index in self.calls else ""
        return Departure(index, theirs[index], phase, gap, only_first, only_second, settings)

    def _is_new(self, index: int) -> bool:
        return index not in self.calls

    def _consumer(self, place: Version, index: int) -> int:
        """The call that made the gradient of a place: of those that read it the one that the first program has not, or
        has with other arguments, else the last."""
        calls = self.other.step.program.calls
        reads = [at for at in range(index + 1, len(calls)) if place.value in calls[at].input_refs()]
        reads = [at for at in reads if not calls[at].is_differentiation and not calls[at].is_optimizer_step]
        ours = self.one.step.program.calls
        odd = (at for at in reads if at not in self.calls or _settings(ours[self.calls[at]], calls[at]))
        return next(odd, reads[-1] if reads else max(index, 0))


def _writes_gradients(call: Call) -> bool:
    """True for a call between a backward pass and an update."""
    return call.phase is Phase.OPTIMIZER and call.target != GRAD_READ and not call.is_optimizer_step


def _places_by_call(run: Run) -> dict[int, list[Version]]:
    found: dict[int, list[Version]] = {}
    for place, index in run.calls.items():
        found.setdefault(index, []).append(place)
    return found


def _aligned(one: Run, other: Run) -> dict[int, int]:
    """Calls of the first run by those of the second: with equal results, then of one function in one module, then of
    one function, each between those that are known."""
    ours, theirs = one.step.program.calls, other.step.program.calls
    digests, digests_other = one.digests, other.digests

    def keys(level: int, calls: Sequence[Call], made: Sequence[int]) -> list[Hashable]:
        names = [display_name(call.target) for call in calls]
        if level == 0:
            return [(name, found) if found else None for name, found in zip(names, made, strict=True)]
        scopes = [tuple(scope.path for scope in call.scope) if level == 1 else () for call in calls]
        return list(zip(names, scopes, strict=True))

    found: dict[int, int] = {}
    stretches = [(0, len(ours), 0, len(theirs))]
    for level in range(3):
        left: list[tuple[int, int, int, int]] = []
        mine, others = keys(level, ours, digests), keys(level, theirs, digests_other)
        for begin, end, begin_other, end_other in stretches:
            matcher = SequenceMatcher(None, mine[begin:end], others[begin_other:end_other], autojunk=False)
            at, at_other = begin, begin_other
            for start, start_other, size in matcher.get_matching_blocks():
                left.append((at, begin + start, at_other, begin_other + start_other))
                found.update((begin_other + start_other + n, begin + start + n) for n in range(size))
                at, at_other = begin + start + size, begin_other + start_other + size
        stretches = left
    return found


def _led_by(calls: Sequence[Call], index: int | None, is_unmatched: Callable[[int], bool]) -> list[int]:
    """The unmatched calls that lead to a call from values that the programs share, itself included, in order."""
    if index is None:
        return []
    wanted, found = set(calls[index].input_refs()), [index] if is_unmatched(index) else []
    for at in reversed(range(index)):
        if not wanted.isdisjoint(calls[at].output_refs()) and is_unmatched(at):
            found.insert(0, at)
            wanted |= set(calls[at].input_refs())
    return found


def _settings(first: Call, second: Call) -> str:
    """``eps: 1e-05 -> 1e-06``: what two calls of one function are given besides tensors, where that differs."""
    one, other = (dict(_leaves("", call.args)) | dict(_leaves("", call.kwargs)) for call in (first, second))
    one["autocast"], other["autocast"] = first.mode.autocast or "off", second.mode.autocast or "off"
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return ", ".join(f"{name}: {one.get(name, 'default')} -> {other.get(name, 'default')}" for name in names)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Numbers and words in nested arguments, with the names or places that lead to them."""
    if isinstance(value, (list, tuple, Mapping)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(f"{key}" if isinstance(value, Mapping) else f"{name}.{key}".lstrip("."), item)
    elif not isinstance(value, Ref):
        yield name, value
