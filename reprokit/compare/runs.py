"""Two runs of a step that should agree: the first call that was given the same and made something else.

Both steps run with a hash of every result and of every gradient that arrives. Calls are aligned by equal results, then
by function and module, so that a refactoring may insert and drop calls; what such calls do together is compared where
the programs meet again. Where hashes differ both run again, as they are and in float64, for these tensors only, and at
most `MOST_BYTES` at a time. Differences come in the order of time: results, and for every backward pass the gradients
that arrived in it, from the loss on.

A difference is *rounding* if the formulas agree in float64, and if the second result is about as close to that as the
first: within `MARGIN` times its error, or that many units in the last place of the coarser format. Runs of different
formats may each have their own error. Others count if what the step leaves differs too: loss, outputs, buffers,
gradients and updates. In between a refactoring may make other numbers, such as parts of a gradient.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import torch

from reprokit import native
from reprokit.compare.difference import MARGIN, MISMATCH, OTHER_WAY, halves_in, largest_gap, real_numbers, results_of
from reprokit.compare.quantity import at_call, loss_of, number_of
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

MOST_BYTES = 2**31  # of tensors that are held to be compared, as of the copies that a capture keeps
_BYTES = 32  # of an element: of both runs, in float64 as well
MOST_ELEMENTS = MOST_BYTES // _BYTES
_SAME_FORMULA = 1e-9  # of the largest element: float64 leaves 1e-16 times the number of operations
_SAME_DRAWN = 1e-6  # the same behind a random call, which is made in float32 there, because float64 draws other numbers
_SMALL = 1e-5  # of an `eps`: a format that is no half precision
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x9E3779B97F4A7C1  # odd bits of the golden ratio, which spreads neighbours (Knuth, volume 3, 6.4)
_MOST_CONSTANTS = 64
_SAME_UPDATE = ("foreach", "fused", "capturable", "differentiable")  # options that choose kernels only
ABSENT: Any = object()  # in place of an option that only the other version of torch has
_GIVEN = -1  # the number of what an input of the step was before any call
_LEFT = -1  # in place of a backward pass: the `.grad` that the step leaves


def digest_of(tensor: torch.Tensor) -> int:
    """63 bits that tell contents, dtype and shape of a tensor from others; strides and the bits of a NaN do not count.

    A weighted sum of the elements' bits in 64-bit integers, which is the same on every device and in any order.
    """
    values = contents(tensor)
    values = native.reshape(native.view_as_real(values), -1) if native.is_complex(values) else values
    if native.is_floating_point(values):
        values = native.where(native.isnan(values), math.nan, values)
    bits = native.long(native.view(native.contiguous(values), _INTEGERS[native.element_size(values)]))
    if values.dtype == torch.float64:
        bits = bits ^ (bits >> 32)  # the highest bit alone, a sign, would be lost in a sum of two
    places = native.arange(len(bits), device=bits.device)
    weighted = int(native.sum(bits * ((places * _MULTIPLIER) | 1))) if len(bits) else 0
    kind = hashlib.blake2b(f"{tensor.dtype} {[*tensor.shape]} {weighted}".encode(), digest_size=8)
    return int.from_bytes(kind.digest(), "big") >> 1


class Version(NamedTuple):
    """A tensor of a run: a ``value`` when it was written for the ``number``-th time, or was `_GIVEN`; or the gradient
    that arrived there in the ``start``-th backward pass, from 1 on."""

    value: int
    number: int
    start: int = 0

    @property
    def result(self) -> Version:
        """Where the gradient arrived."""
        return self._replace(start=0)


class Imprint(NamedTuple):
    """What is kept of a tensor in place of its elements."""

    digest: int
    shape: tuple[int, ...]
    size: float  # the largest magnitude

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Imprint:
        plain = contents(tensor)
        return cls(digest_of(tensor), tuple(tensor.shape), _size(plain) if native.is_floating_point(plain) else 0.0)


def _head(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, of a tensor that is too large to be compared of its first elements."""
    return copied(tensor if native.numel(tensor) <= MOST_ELEMENTS else native.reshape(tensor, -1)[:MOST_ELEMENTS])


Tensors = dict[Version, torch.Tensor]
Digests = Sequence[tuple[int, int]]


class _Look(Trace[Any]):
    """Measures what a run makes: everything, or the places in ``wanted``."""

    def __init__(self, program: Program, measure: Callable[[torch.Tensor], Any], wanted: set[Version] | None) -> None:
        super().__init__(program, measure, gradients_of=measure)
        self.wanted, self.found, self.made = wanted, dict[Version, Any](), dict[Version, int]()
        self._times, self._num_starts = Counter[int](), 0

    def take(self, place: Version, tensor: torch.Tensor | None) -> None:
        if tensor is None:  # as hooks of a second derivative get where nothing depends on a value
            return
        if self.wanted is None or place in self.wanted:
            self.found[place] = self.measure(tensor)

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Count backward passes; what is read has been measured when it was written."""
        self._running = index
        self._num_starts += call.is_differentiation
        self._note_memory(call.input_refs(), values)

    def _measured(self, wanted: Collection[int], values: Mapping[int, torch.Tensor]) -> dict[int, Any]:
        self._note_memory(wanted, values)
        for value in (value for value in wanted if value in values):
            place = Version(value, self._times[value])
            self._times[value] += 1
            self.made[place] = self._running
            self.take(place, values[value])
        return {}

    def _wait_for_gradients(self, index: int, value: int, tensor: torch.Tensor) -> None:
        place = Version(value, self._times[value] - 1)
        hook = lambda gradient: self.take(place._replace(start=self._num_starts), gradient)  # noqa: E731
        native.register_hook(tensor, hook)  # type: ignore[no-untyped-call]

    @classmethod
    def at(cls, step: Step, measure: Callable[[torch.Tensor], Any], wanted: set[Version] | None) -> _Look:
        """A run of a step; gradients that it leaves and its inputs are measured too."""
        look, loss = cls(step.program, measure, wanted), loss_of(step.program)
        outcome = look.run(step.tensors, keep=frozenset(() if loss is None else (loss,)))
        for value, tensor in step.tensors.items():
            look.take(Version(value, _GIVEN), tensor)
        for value, gradient in outcome.gradients.items():
            look.take(Version(value, _GIVEN, _LEFT), gradient)
        return look


@dataclass(eq=False)
class Run:
    """One run of a step: ``marks`` of all that it made, and the call that has ``made`` each result. Its float64 run
    starts from ``wide``. ``error`` is what a call raised, after which nothing was made; empty if none did. ``ask`` has
    it run again elsewhere."""

    step: Step
    wide: Step
    marks: dict[Version, Imprint] = field(default_factory=dict)
    made: dict[Version, int] = field(default_factory=dict)
    error: str = ""
    loss: float | None = None
    ask: Callable[[Collection[Version]], tuple[Tensors, Tensors]] | None = None

    @classmethod
    def of(cls, content: HasProgram, exact_inputs: Mapping[int, torch.Tensor] | None = None) -> Run:
        """Run a step; in float64 it is run with other inputs where there are ``exact_inputs``."""
        step = Step(content.program, content.tensors)
        look = _Look.at(step, Imprint.of, None)
        error, loss = look.outcome.error, next(map(number_of, look.outcome.values.values()), None)
        words = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}" if error is not None else ""
        return cls(step, step.with_tensors(exact_inputs or {}), look.found, look.made, words, loss)

    @property
    def calls(self) -> Sequence[Call]:
        return self.step.program.calls

    def fetch(self, places: Collection[Version]) -> tuple[Tensors, Tensors]:
        """The tensors at places, and what they are in float64, as far as that can be run."""
        if self.ask is not None:
            return self.ask(places)
        found, exact = _Look.at(self.step, _head, {*places}).found, Tensors()
        try:
            with default_dtype(torch.float64):
                exact = _Look.at(in_dtype(self.wide, torch.float64), _head, {*places}).found
        except Exception as error:  # kernels refuse in as many ways as there are functions
            pass_on(error)
        return found, exact

    @functools.cached_property
    def digests(self) -> list[tuple[int, int]]:
        """For every call a hash of what it wrote, and of the gradients that arrived there; 0 stands for nothing."""
        found = [[0, 0] for _ in self.calls]
        for place, mark in self.marks.items():
            if place.number != _GIVEN:
                found[self.made[place.result]][place.start > 0] += mark.digest
        return [(result % 2**63, gradient % 2**63) for result, gradient in found]

    @functools.cached_property
    def changed(self) -> dict[Version, Input]:
        """The inputs that the step leaves with other contents, by what they were."""
        found = {Version(item.value, _GIVEN): item for item in self.step.program.inputs}
        ends = {place: self.last(place.value, len(self.calls)) for place in found}
        return {at: item for at, item in found.items() if self.marks[ends[at]].digest != self.marks[at].digest}

    def last(self, value: int, before: int) -> Version:
        """Where a value was written last in front of a call."""
        place = Version(value, _GIVEN)
        while self.made.get(later := Version(value, place.number + 1), before) < before:
            place = later
        return place

    def given(self, chosen: Sequence[int]) -> dict[int, Version]:
        """What chosen calls read and do not make themselves."""
        found, made = dict[int, Version](), set[int]()
        for at in chosen:
            reads = self.calls[at].input_refs()
            found.update((v, self.last(v, at)) for v in reads if v not in made and v not in found)
            made.update(self.calls[at].output_refs())
        return found


def answer(step: HasProgram, settings: Settings, asked: str, path: str) -> None:
    """Run a step, and write what it made and the tensors that are asked for; for another Python of `reprokit diff`."""
    with determinism(settings):
        run, places = Run.of(step), [Version(*place) for place in json.loads(asked)]
        tensors = run.fetch(places) if places else ()
    native.save((str(torch.__version__), (run.marks, run.made, run.error, run.loss), *tensors), path)


# -- two tensors ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """How two tensors differ: elements that do, the largest absolute difference, that over the largest element, and
    units in the last place, if that is a number of the format. ``why`` it is no rounding; empty if it is. ``dtype`` is
    the coarser of both."""

    num_bad: int
    num_elements: int
    largest: float
    relative: float
    units: int | None
    why: str = ""
    dtype: str = ""

    @property
    def words(self) -> str:
        """``12 of 4,096 elements differ by up to 3 units in the last place (2e-7 of the largest)``."""
        if not self.num_bad:
            return self.why or "zeros of another sign"
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
        return Gap(0, native.numel(second), math.inf, math.inf, None, f"shapes {[*first.shape]} and {[*second.shape]}")
    one, other = real_numbers(first), real_numbers(second)
    bad = (one != other) & ~(native.isnan(one) & native.isnan(other))
    largest, scale = largest_gap(one, other), max(_size(one), _size(other))
    relative = largest / scale if scale else math.inf
    num_bad = int(native.sum(native.any(bad, -1) if native.is_complex(first) else bad))
    if not num_bad and first.dtype != second.dtype:
        return None  # the same numbers in another format
    own, others = ({tensor.dtype, *halves} for tensor, halves in zip((first, second), formats, strict=True))
    eps, name = max(((torch.finfo(d).eps, str(d)) for d in own | others if d.is_floating_point), default=(0.0, ""))
    found = Gap(num_bad, native.numel(first), largest, relative, _units(first, second), "", name.removeprefix("torch."))
    noise = eps * max(scale, least)
    wide, wide_other = exact
    if wide is not None and wide_other is not None and wide.shape == wide_other.shape == first.shape:
        formula, size = largest_gap(real_numbers(wide), real_numbers(wide_other)), max(_size(real_numbers(wide)), least)
        if formula > same_formula * size:
            return replace(found, why=f"in float64 they differ by {formula / size if size else math.inf:.1g} as well")
        # of a mean near zero the error may be small by chance, such as of a channel in another memory format
        noise = max(noise, largest_gap(one, real_numbers(wide)), MARGIN * noise if eps < _SMALL else 0.0)
        noise = max(noise, largest_gap(other, real_numbers(wide_other))) if own != others else noise
    if not largest <= MARGIN * noise:
        times = largest / noise if noise else math.inf
        return replace(found, why=f"that is {times:.0f} times the rounding error of the first")
    return found


def _size(tensor: torch.Tensor) -> float:
    finite = tensor[native.isfinite(tensor)]
    return float(native.max(native.abs(finite))) if native.numel(finite) else 0.0


def _units(first: torch.Tensor, second: torch.Tensor) -> int | None:
    """Numbers of the format between two results at most; ``None`` if one is not finite or the formats differ."""
    kind = _INTEGERS.get(native.element_size(first))
    if first.dtype != second.dtype or not native.is_floating_point(first) or kind is None or not native.numel(first):
        return None
    if not bool(native.all(native.isfinite(first) & native.isfinite(second))):
        return None
    ranks = []
    for tensor in (first, second):
        bits = native.double(native.view(native.contiguous(contents(native.cpu(tensor))), kind))
        ranks.append(native.where(bits < 0, -(2.0 ** (8 * native.element_size(first) - 1)) - bits, bits))
    return int(native.max(native.abs(ranks[0] - ranks[1])))


# -- two programs --------------------------------------------------------------------------------------------------


class InputDifference(NamedTuple):
    """An input that is not the same in both steps; ``is_rounding``: by no more than rounding in each step before."""

    name: str
    role: str
    words: str
    is_rounding: bool


class Departure(NamedTuple):
    """The first call of the second program whose result, gradient or update differs, at a ``place`` there.

    ``only`` are the calls that lead to it from values that agree, of each program, where it has more than this one:
    then these differ together. ``settings`` are the arguments of ``called`` that differ, this call or one before it.
    ``words`` have what it is given, the difference, and what becomes of it in the loss.
    """

    place: Version
    call: Call
    phase: Phase
    gap: Gap
    only: tuple[list[Call], list[Call]]
    called: Call
    settings: str
    words: str


@dataclass
class Comparison:
    """Two runs beside each other, from the same inputs as far as both have them; ``inputs`` are those that differed.

    ``first`` is the first departure in any bit, and ``real`` the first that is no rounding, if what the step leaves
    differs by more than that."""

    one: Run
    other: Run
    walk: _Walk
    first: Departure | None
    real: Departure | None
    inputs: list[InputDifference] = field(default_factory=list)

    @classmethod
    def of(cls, one: HasProgram, other: HasProgram, num_steps: int = 0) -> Comparison:
        """Run both steps and compare them; ``num_steps`` were made before."""
        mine, others = Step(one.program, one.tensors), Step(other.program, other.tensors)
        inputs = _input_partners(mine, others)
        found = dict(_input_differences(mine, others, inputs, num_steps))
        pairs = {v: (mine.tensors[p], others.tensors[v]) for v, p in inputs.items()}
        moved = {*found}
        if any(item.role == "rng" for item in found.values()):  # the states of later calls follow from the first
            moved |= {item.value for item in other.program.inputs if item.role == "rng"}
        pairs = {v: (one, own) for v, (one, own) in pairs.items() if one.shape == own.shape}
        given = {v: one for v, (one, own) in pairs.items() if v in moved or one.dtype != own.dtype}
        same = {
            v: native.copy_(native.clone(pairs[v][1]), one) for v, one in given.items() if v in moved
        }  # in its memory format
        compared = cls.of_runs(Run.of(one), Run.of(others.with_tensors(same), given))
        return replace(compared, inputs=[*found.values()])

    @classmethod
    def of_runs(cls, one: Run, other: Run) -> Comparison:
        """Compare two runs whose inputs agree."""
        walk = _Walk(one, other)
        is_real = any(gap.why for gap in map(walk.gap, walk.ends) if gap is not None)
        found = ((place, gap) for place in walk.differing if (gap := walk.gap(place)) is not None)
        first = next(found, None)
        real = next((item for item in (first, *found) if item is not None and item[1].why), None) if is_real else None
        return cls(one, other, walk, first and walk.departure(*first), real and walk.departure(*real))


def first_other_digest(
    program: Program, mine: Digests, others: Digests, calls: Mapping[int, int]
) -> tuple[int, Phase] | None:
    """The first call of a program, and the phase, in which a hash of ``others``, that program's, is not the one of
    ``mine`` for the call that ``calls`` puts beside it."""
    found = list[tuple[int, int, int, Phase]]()  # in the order of time
    for at, before in calls.items():
        phase = Phase.OPTIMIZER if phase_of(program.calls[at]) is Phase.OPTIMIZER else Phase.FORWARD
        start = next((n for n, call in enumerate(program.calls) if n > at and call.is_differentiation), at)
        rows = (at, 1, at, phase), (start, -at, at, Phase.BACKWARD)
        found += [row for n, row in enumerate(rows) if 0 != mine[before][n] != others[at][n] != 0]
    return min(found)[2:] if found else None


def _input_partners(one: Step, other: Step) -> dict[int, int]:
    """Inputs of the first step by those of the second: by name and contents, or one of these, or in order."""
    found: dict[int, int] = {}
    digests = [{v: digest_of(tensor) for v, tensor in step.tensors.items()} for step in (one, other)]
    keys: Sequence[Callable[[Input, Step, Mapping[int, int]], Hashable]] = (
        lambda item, step, made: (item.role, item.name, made[item.value]),
        lambda item, step, made: (item.role, made[item.value]),
        lambda item, step, made: (item.role, item.name, step.tensors[item.value].shape),
        lambda item, step, made: (item.role, step.tensors[item.value].shape),
    )
    for key in keys:
        left: dict[Hashable, list[int]] = {}
        for item in one.program.inputs:
            if item.value not in found.values():
                left.setdefault(key(item, one, digests[0]), []).append(item.value)
        for item in other.program.inputs:
            partners = left.get(key(item, other, digests[1]), []) if item.value not in found else []
            if partners:
                found[item.value] = partners.pop(0)
    twins = {
        digest: value for value, digest in digests[0].items()
    }  # a function of the user's gets a parameter as a leaf
    return {value: twins[digest] for value, digest in digests[1].items() if digest in twins} | found


def _input_differences(
    one: Step, other: Step, partners: Mapping[int, int], num_steps: int
) -> Iterator[tuple[int, InputDifference]]:
    states = [item for item in other.program.inputs if item.role == "rng"][1:]  # draws before have made these
    for item in other.program.inputs:
        if item.value in partners and item not in states:
            first, second = one.tensors[partners[item.value]], other.tensors[item.value]
            if first.dtype != second.dtype and native.is_floating_point(first) and native.is_floating_point(second):
                narrow = min(first.dtype, second.dtype, key=lambda dtype: dtype.itemsize)
                first, second = (
                    native.to(first, narrow),
                    native.to(second, narrow),
                )  # the same numbers in another format
            gap = gap_between(first, second)
            if gap is not None:
                eps = torch.finfo(first.dtype).eps if native.is_floating_point(first) else 0.0
                is_rounding = item.role not in ("rng", "batch") and gap.relative <= MARGIN * eps * num_steps
                words = "the state of the random generator differs" if item.role == "rng" else gap.words
                yield item.value, InputDifference(item.name, item.role, words, is_rounding)
    sides = ("first", one, {*partners.values()}), ("second", other, {*partners})
    for which, step, known in sides:  # a constant may be an input in one program only, but not what an optimizer knows
        for item in step.program.inputs:
            if item.value not in known and item.role == "state":
                yield -1 - item.value, InputDifference(item.name, item.role, f"only the {which} step has it", False)


def beside(found: Comparison, *, is_recorded: bool) -> tuple[Step, Failure] | None:
    """A step that makes the departing result in both ways from what the runs share, and the failure that its two
    outputs differ. With ``is_recorded`` the second way cannot run here, and is a constant of at most `_MOST_CONSTANTS`
    numbers. ``None`` if it is no result of the forward pass.
    """
    departure, walk = found.real, found.walk
    if departure is None or departure.phase is not Phase.FORWARD:
        return None
    one, other, place, partner = found.one, found.other, departure.place, walk.partner[departure.place]
    start, index, before = one.step.program.next_value(), other.made[place], one.made[partner]
    mine = sorted({before, *_led_by(one, before, {*walk.calls.values()})})
    calls, last, result = [one.calls[at] for at in mine], len(mine) - 1, Ref(partner.value)
    given, inputs = one.given(mine), dict[int, torch.Tensor]()
    if is_recorded:
        expected, actual = other.fetch([place])[0][place], one.fetch([partner])[0][partner]
        if native.numel(expected) > _MOST_CONSTANTS:
            gaps = native.nan_to_num(
                native.reshape(native.abs(native.double(actual) - native.double(expected)), -1), math.inf
            )
            inputs[start] = native.topk(gaps, _MOST_CONSTANTS).indices
            flat, expected = Ref(start + 1), native.reshape(expected, -1)[inputs[start]]
            calls.append(Call("torch.Tensor.reshape", (result, (-1,)), outputs=flat))
            calls.append(Call("torch.Tensor.index_select", (flat, 0, Ref(start)), outputs=Ref(start + 2)))
            result = Ref(start + 2)
        inputs[start + 3] = expected
        outputs = Ref(start + 3), result
    else:
        others = sorted({index, *_led_by(other, index, {*walk.calls})})
        change: dict[int, Any] = {v: Ref(start + v) for at in others for v in other.calls[at].output_refs()}
        for value, source in other.given(others).items():
            if source not in walk.partner:
                return None
            change[value] = Ref(walk.partner[source].value)
            given.setdefault(change[value].value, walk.partner[source])
        calls += [other.calls[at].substituted(change, outputs=True) for at in others]
        last, outputs = len(calls) - 1, (result, Ref(start + place.value))
    tensors = one.fetch([*given.values()])[0]
    inputs |= {value: tensors[source] for value, source in given.items()}
    names = {item.value: replace(item, requires_grad=False) for item in one.step.program.inputs}
    items = (names.get(value, Input(value, f"x{n}")) for n, value in enumerate(inputs))
    program, gap = Program(tuple(calls), tuple(items), outputs), departure.gap
    words = f"beyond what {gap.dtype or 'the format'} explains: {departure.words}"
    failure = Failure(Phase.FORWARD, MISMATCH, OTHER_WAY, value=outputs[1].value, num_bad=gap.num_bad,
                      num_elements=gap.num_elements, departure=words)  # fmt: skip
    return Step(program, {v: native.detach(tensor) for v, tensor in inputs.items()}), at_call(failure, program, last)


class _Walk:
    """The calls of the second program beside those of the first; ``partner`` are places of the first by those there,
    ``starts`` its backward passes."""

    def __init__(self, one: Run, other: Run) -> None:
        self.one, self.other = one, other
        self.formats = halves_in(one.step.program, one.step.tensors), halves_in(other.step.program, other.step.tensors)
        self.same_formula = _SAME_DRAWN if any(call.mode.rng is not None for call in one.calls) else _SAME_FORMULA
        self.calls = _aligned(one, other)  # calls of the first by those of the second
        inputs = _input_partners(one.step, other.step)
        self.partner = {Version(value, _GIVEN): Version(partner, _GIVEN) for value, partner in inputs.items()}
        made: list[dict[int, list[Version]]] = [{}, {}]
        for found, run in zip(made, (one, other), strict=True):
            for place, index in run.made.items():
                found.setdefault(index, []).append(place)
        starts = [[n for n, call in enumerate(run.calls) if call.is_differentiation] for run in (one, other)]
        for index, before in sorted(self.calls.items()):
            mine, others = made[0].get(before, []), made[1].get(index, [])
            given = zip(one.given([before]).values(), other.given([index]).values(), strict=False)
            pairs = [*zip(mine, others, strict=False), *given]
            is_alike = len(mine) == len(others) and all(self._has_same_shape(p, v) for p, v in pairs)
            if index in starts[1] and len(starts[0]) != len(starts[1]):
                is_alike = False  # one backward pass of a sum beside those of its parts
            if not is_alike and not self._shares(before, index):
                del self.calls[index]  # such as the parts of a weight beside those of what it is multiplied with
            elif len(mine) == len(others):
                self.partner.update(zip(others, mine, strict=True))
        self._pair_operands(inputs)
        self.passes = starts[1]
        # a call that is aligned with a backward call may be none: files of strangers name the phases as they like
        passes = ((at, self.calls.get(n)) for at, n in enumerate(starts[1]))
        self.starts = {at + 1: starts[0].index(before) + 1 for at, before in passes if before in starts[0]}
        self.starts[0] = 0
        if not any(map(_writes_gradients, (*one.calls, *other.calls))):
            self.starts[_LEFT] = _LEFT
        steps = ((index, before) for index, before in self.calls.items() if other.calls[index].is_optimizer_step)
        options = {index: changed_settings(one.calls[before], other.calls[index]) for index, before in steps}
        # calls that make another update, be it only from the next step on; another version of torch has more options
        self.other_options = {
            at
            for at, found in options.items()
            if any(ABSENT not in pair and name not in _SAME_UPDATE for name, pair in found.items())
        }
        self._gaps, self._held = dict[Version, Gap | None](), dict[Version, tuple[Any, ...]]()

    def _shares(self, before: int, index: int) -> bool:
        """True if all that two calls are given is the same in both programs."""
        pairs = zip(self.one.calls[before].input_refs(), self.other.calls[index].input_refs(), strict=False)
        return all(self.one.last(v, before) == self.partner.get(self.other.last(w, index)) for v, w in pairs)

    def _has_same_shape(self, mine: Version, other: Version) -> bool:
        """False for what one of the runs has not made, because a call in front of it raised."""
        marks = self.one.marks.get(mine), self.other.marks.get(other)
        return marks[0] is not None and marks[1] is not None and marks[0].shape == marks[1].shape

    def _pair_operands(self, inputs: Mapping[int, int]) -> None:
        """What an aligned call is given is paired too, where calls that only one program has have made it, and what
        both programs leave in their inputs."""
        one, other, known = self.one, self.other, set(self.partner.values())
        pairs = [(at, n, one.calls[at].input_refs(), other.calls[n].input_refs()) for n, at in self.calls.items()]
        pairs.append((len(one.calls), len(other.calls), tuple(inputs.values()), tuple(inputs)))
        for before, index, mine, others in pairs:
            for value, value_other in zip(mine, others, strict=True) if len(mine) == len(others) else ():
                first, second = one.last(value, before), other.last(value_other, index)
                is_made = _GIVEN not in (first.number, second.number)
                if is_made and second not in self.partner and first not in known:
                    self.partner[second] = first
                    known.add(first)

    def has(self, value: int) -> bool:
        """True if an input of the second step has a partner."""
        return Version(value, _GIVEN) in self.partner

    def _mine(self, place: Version) -> Version | None:
        """The place of the first run beside one of the second."""
        partner, start = self.partner.get(place.result), self.starts.get(place.start)
        return partner._replace(start=start) if partner is not None and start is not None else None

    @functools.cached_property
    def differing(self) -> list[Version]:
        """Places of the second run where hashes differ, in the order of time. A value that is made once more, by a call
        of the same function, gets a part of its gradient there."""
        found, runs = list[Version](), (self.one, self.other)
        kinds = [
            [(display_name(c.target), made) for c, (made, _) in zip(run.calls, run.digests, strict=True)]
            for run in runs
        ]
        copies = [Counter(found) for found in kinds]
        for result, partner in self.partner.items():
            sides = zip(copies, kinds, (self.one.made.get(partner), self.other.made.get(result)), strict=True)
            numbers = {number[kind[at]] for number, kind, at in sides if at is not None}
            for start, mine in self.starts.items():
                place = result._replace(start=start)
                marks = self.one.marks.get(partner._replace(start=mine)), self.other.marks.get(place)
                one, other = (mark.digest if mark is not None else None for mark in marks)
                is_comparable = len(numbers) < 2 if start else None not in marks and result.number != _GIVEN
                found += [place] if one != other and is_comparable else []
        found += [place for place, at in self.other.made.items() if at in self.other_options and place not in found]
        return sorted(found, key=self._time)

    def _time(self, place: Version) -> tuple[int, ...]:
        index = self.other.made.get(place.result, -1)
        passes = [-1, *self.passes]  # counted from 1; the last one is that of the gradients that are left
        return (passes[place.start], 0, -index) if place.start else (index, 1)

    @functools.cached_property
    def ends(self) -> list[Version]:
        """The places that differ of what the second step leaves: its outputs, what it has written into inputs, their
        gradients, and what optimizers were given and made of it. All places of a step that raised, or whose
        loss is NaN or inf, behind which nothing differs."""
        run, program = self.other, self.other.step.program
        if self.one.error or run.error or not math.isfinite(run.loss or 0.0):
            return self.differing
        given = [item.value for item in program.inputs]
        updates = [(at + 1, v) for at, c in enumerate(run.calls) if c.is_optimizer_step for v in c.input_refs()]
        found = {run.last(v, at) for at, v in updates}
        found |= {run.last(v, len(run.calls)) for v in (*results_of(program), *given)}
        ours = {v for call in self.one.calls if call.is_optimizer_step for v in call.input_refs()}
        twins = {v for v in given if (mine := self.partner.get(Version(v, _GIVEN))) is not None and mine.value in ours}
        found |= {Version(value, _GIVEN, _LEFT) for value in {*given} - {v for _, v in updates} - twins}
        return [place for place in self.differing if place in found]

    def gap(self, place: Version) -> Gap | None:
        """The difference at a place; an optimizer's options may show in later steps only, as a beta of Adam does."""
        if place not in self._gaps:
            has = self._mine(place) in self.one.marks, place in self.other.marks
            found: Gap | None = Gap(
                0, 1, math.inf, math.inf, None, f"the {'second' if has[0] else 'first'} has no gradient here"
            )
            if all(has):
                if place not in self._held:
                    self._hold(place)
                first, second, *exact = self._held.pop(place)
                least = self.largest_gradient if place.start else 0.0
                index = self.other.made.get(place, -1)
                # Adam divides gradients that are rounding, as that of a bias of keys, by their own size
                same = _SAME_DRAWN if index >= 0 and self.other.calls[index].is_optimizer_step else self.same_formula
                found = gap_between(first, second, (exact[0], exact[1]), self.formats, same, least)
            if self.other.made.get(place) in self.other_options and not (found and found.why):
                found = replace(found or Gap(0, 0, 0.0, 0.0, 0), why="its other options show in later steps")
            self._gaps[place] = found
        return self._gaps[place]

    def _hold(self, wanted: Version) -> None:
        """Run both again for the tensors at a place, and at as many of those that follow as may be held at once."""
        chosen, size = dict[Version, Any](), 0
        for place in (wanted, *self.ends, *self.differing):
            mine, mark = self._mine(place), self.other.marks.get(place)
            is_new = place not in self._gaps and place not in chosen
            if is_new and mine in self.one.marks and mark is not None:
                size += min(math.prod(mark.shape), MOST_ELEMENTS)
                if chosen and size > MOST_ELEMENTS:
                    break
                chosen[place] = mine
        (one, wide), (other, wide_other) = self.one.fetch([*chosen.values()]), self.other.fetch([*chosen])
        self._held = {p: (one[m], other[p], wide.get(m), wide_other.get(p)) for p, m in chosen.items()}

    @property
    def is_cut(self) -> bool:
        """True if a tensor is larger than what is held of it."""
        return any(
            math.prod(self.other.marks[at].shape) > MOST_ELEMENTS for at in self.differing if at in self.other.marks
        )

    @functools.cached_property
    def largest_gradient(self) -> float:
        """Of leaves of the first run; beside it the gradient of a bias in front of a normalization is rounding."""
        return max((mark.size for place, mark in self.one.marks.items() if place.start == _LEFT), default=0.0)

    @functools.cached_property
    def losses(self) -> tuple[float, float] | None:
        """The losses of both, unless they stand for different parts, such as the last micro-batch beside the whole."""
        values, runs = [loss_of(run.step.program) for run in (self.one, self.other)], (self.one, self.other)
        places = [run.last(v, len(run.calls)) for run, v in zip(runs, values, strict=True) if v is not None]
        found = [run.loss for run in runs if run.loss is not None]
        is_one = len(places) == 2 and self.partner.get(places[1]) == places[0]
        return (found[0], found[1]) if is_one and len(found) == 2 else None

    def departure(self, place: Version, gap: Gap) -> Departure:
        """What differs at a place, with the calls that lead to it."""
        one, other, mine = self.one, self.other, self.partner[place.result]
        before, index = one.made.get(mine), other.made.get(place.result, -1)
        matched = {*self.calls.values()}, {*self.calls}
        phase, given, only = Phase.FORWARD, "", [list[int](), list[int]()]
        if place.start:
            phase, given = Phase.BACKWARD, "the gradient that arrives there: "
            reads = [_readers(run, at) for run, at in ((one, mine), (other, place))]
            only = [[at for at in found if at not in known] for found, known in zip(reads, matched, strict=True)]
            odd = [at for at in reads[1] if at in only[1] or _settings(one.calls[self.calls[at]], other.calls[at])]
            if reads[1] and not (only[0] and not odd):  # the call that makes this gradient
                index, given = (odd or reads[1][-1:])[0], "the gradient that it passes on: "
                before = self.calls.get(index)
            index = max(index, 0)
        elif phase_of(other.calls[index]) is Phase.OPTIMIZER:
            phase, given = Phase.OPTIMIZER, "the parameters after it: "
        sides = (one, before), (other, index)
        for found, (run, at), known in zip(only, sides, matched, strict=True):
            found += [n for n in _led_by(run, at, known) if n not in found]
            if phase is Phase.OPTIMIZER:  # what writes into gradients, as clipping does
                found += [n for n in range(at or 0) if n not in known and _writes_gradients(run.calls[n])]
        if before is not None and phase is Phase.FORWARD and not any(only):
            read = [[*run.given([at or 0]).values()] for run, at in sides]
            made = [[run.marks[place].digest for place in found] for (run, _), found in zip(sides, read, strict=True)]
            is_shared = [self.partner.get(place) for place in read[1]] == read[0]
            given = "inputs equal in all bits, " if made[0] == made[1] else "inputs agree, " if is_shared else ""
        grown = abs(self.losses[0] - self.losses[1]) if self.losses is not None and phase is Phase.FORWARD else 0.0
        more = (
            f", which grow to {grown:.2g} in the loss" if grown > gap.largest else f"; the loss differs by {grown:.2g}"
        )
        words = f"{given}{gap.words}{more if 0 < grown < math.inf else ''}"
        others = {n: self._settings(at, n) for n, at in sorted(self.calls.items())}
        near = others if place.start else {other.made.get(found) for found in other.given([index]).values()}
        is_open = not any(only) and not others.get(index) and not given.startswith("inputs")
        earlier = (n for n in others if others[n] and n in near and is_open)
        calls = [one.calls[at] for at in only[0]], [other.calls[at] for at in only[1]]
        at = next(earlier, index)
        return Departure(place, other.calls[index], phase, gap, calls, other.calls[at], others.get(at, ""), words)

    def _settings(self, before: int, index: int) -> str:
        """The arguments of two calls that differ, and whether they draw other random numbers."""
        sides = (self.one, self.one.calls[before]), (self.other, self.other.calls[index])
        drawn = {run.marks[Version(c.mode.rng.value, _GIVEN)].digest for run, c in sides if c.mode.rng is not None}
        words = [_settings(sides[0][1], sides[1][1]), "another state of the random generator" * (len(drawn) > 1)]
        return ", ".join(filter(None, words))

    def alone(self) -> Iterator[tuple[str, Input]]:
        """The inputs that one of the programs changes, such as an average of the parameters, and the other does not."""
        runs, changed = (self.one, self.other), (self.one.changed, self.other.changed)
        digests = [{run.marks[at].digest for at in found} for run, found in zip(runs, changed, strict=True)]
        pairs = [(mine, at) for at, mine in self.partner.items() if at.number == _GIVEN]
        for n, which in enumerate(("first", "second")):
            known = {pair[n] for pair in pairs if pair[1 - n]._replace(number=0) in runs[1 - n].made}
            for place, item in changed[n].items():
                is_twin = runs[n].marks[place].digest in digests[1 - n]  # of a parameter that is an input twice
                if place not in known and not is_twin and item.role != "state":
                    yield which, item


def _readers(run: Run, place: Version) -> list[int]:
    """The calls that read a value, but for backward passes and optimizers."""
    reads = (at for at, call in enumerate(run.calls) if place.value in call.input_refs())
    special = (at for at in reads if run.last(place.value, at) == place.result)
    return [at for at in special if not run.calls[at].is_differentiation and not run.calls[at].is_optimizer_step]


def _writes_gradients(call: Call) -> bool:
    """True for a call between a backward pass and an update."""
    return call.phase is Phase.OPTIMIZER and call.target != GRAD_READ and not call.is_optimizer_step


def _aligned(one: Run, other: Run) -> dict[int, int]:
    """Calls of the first run by those of the second: with equal results, then of one function in one module, then of
    one function, each between those that are known."""

    def keys(run: Run, level: int) -> list[Hashable]:
        names, made = [display_name(call.target) for call in run.calls], [result for result, _ in run.digests]
        scopes = [tuple(scope.path for scope in call.scope) for call in run.calls]
        rows = zip(names, (made, scopes, [0] * len(names))[level], strict=True)
        return [(name, more) if level or more else None for name, more in rows]

    return aligned([(keys(one, level), keys(other, level)) for level in range(3)])


def aligned(levels: Sequence[tuple[Sequence[Hashable], Sequence[Hashable]]]) -> dict[int, int]:
    """Places of the first sequence by those of the second: of equal keys of the first level, then of the next one, each
    between those that are known."""
    found: dict[int, int] = {}
    stretches = [(0, len(levels[0][0]), 0, len(levels[0][1]))]
    for mine, others in levels:
        left: list[tuple[int, int, int, int]] = []
        for begin, end, begin_other, end_other in stretches:
            matcher = SequenceMatcher(None, mine[begin:end], others[begin_other:end_other], autojunk=False)
            at, at_other = begin, begin_other
            for start, start_other, size in matcher.get_matching_blocks():
                left.append((at, begin + start, at_other, begin_other + start_other))
                found.update((begin_other + start_other + n, begin + start + n) for n in range(size))
                at, at_other = begin + start + size, begin_other + start_other + size
        stretches = left
    return found


def _led_by(run: Run, index: int | None, matched: Set[int]) -> list[int]:
    """The unmatched calls that lead to a call from values that the programs share, itself included, in order."""
    found, left = {index} - {None} - matched, [index]
    while left:
        makers = (
            {run.made.get(place) for place in run.given([at]).values()} if (at := left.pop()) is not None else set()
        )
        new = makers - {None} - found - matched
        found |= new
        left += new
    return sorted(at for at in found if at is not None)


def _settings(first: Call, second: Call) -> str:
    """``eps: 1e-05 -> 1e-06``: what two calls of one function are given besides tensors, where that differs."""
    found = {n: ["default" if one is ABSENT else one for one in p] for n, p in changed_settings(first, second).items()}
    return ", ".join(f"{name}: {one} -> {other}" for name, (one, other) in found.items())


def changed_settings(first: Call, second: Call) -> dict[str, tuple[Any, Any]]:
    """The numbers and words that two calls are given and that differ, by name; `ABSENT` where a call has none."""
    one, other = (dict(_leaves("", call.args)) | dict(_leaves("", call.kwargs)) for call in (first, second))
    for found, mode in ((one, first.mode), (other, second.mode)):
        found |= {"autocast": mode.autocast or "off", "gradients": "on" if mode.grad else "off"}
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return {name: (one.get(name, ABSENT), other.get(name, ABSENT)) for name in names}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Numbers and words in nested arguments, with the names or places that lead to them."""
    if isinstance(value, (list, tuple, Mapping)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(f"{key}" if isinstance(value, Mapping) else f"{name}.{key}".lstrip("."), item)
    elif not isinstance(value, Ref):
        yield name, value
