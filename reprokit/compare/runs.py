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
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import torch

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
_SAME_FORMULA = 1e-9  # of the largest element: float64 leaves 1e-16 times the number of operations
_SAME_DRAWN = (
    1e-6  # the same behind a random call, which is made in float32 there, because float64 draws other numbers;
)
# and after an update: Adam divides gradients that are rounding, as that of a bias of keys, by their own size
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x9E3779B97F4A7C1  # odd bits of the golden ratio, which spreads neighbours (Knuth, volume 3, 6.4)
_MOST_CONSTANTS = 64
_SAME_UPDATE = ("foreach", "fused", "capturable", "differentiable")  # options that choose kernels only
_GIVEN = -1  # the number of what an input of the step was before any call
_LEFT = -1  # in place of a backward pass: the `.grad` that the step leaves


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
        return cls(digest_of(tensor), tuple(tensor.shape), _size(plain) if plain.is_floating_point() else 0.0)


Tensors = dict[Version, torch.Tensor]
Digests = Sequence[tuple[int, int]]


class _Look(Trace[Any]):
    """Measures what a run makes: everything, or the places in ``wanted``."""

    def __init__(self, program: Program, measure: Callable[[torch.Tensor], Any], wanted: set[Version] | None) -> None:
        super().__init__(program, measure, gradients_of=measure)
        self.wanted, self.found, self.made_by = wanted, dict[Version, Any](), dict[Version, int]()
        self._times, self._num_starts = Counter[int](), 0

    def take(self, place: Version, tensor: torch.Tensor) -> None:
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
            self.made_by[place] = self._running
            self.take(place, values[value])
        return {}

    def _wait_for_gradients(self, index: int, value: int, tensor: torch.Tensor) -> None:
        place = Version(value, self._times[value] - 1)
        hook = lambda gradient: self.take(place._replace(start=self._num_starts), gradient)  # noqa: E731
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]

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
    """One run of a step: ``marks`` of all that it made, ``calls`` that made the results. Its float64 run starts from
    ``wide``. ``error`` is what a call raised, after which nothing was made; empty if none did. ``ask`` has it run again
    elsewhere."""

    step: Step
    wide: Step
    marks: dict[Version, Imprint] = field(default_factory=dict)
    calls: dict[Version, int] = field(default_factory=dict)
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
        return cls(step, step.with_tensors(exact_inputs or {}), look.found, look.made_by, words, loss)

    def fetch(self, places: Collection[Version]) -> tuple[Tensors, Tensors]:
        """The tensors at places, and what they are in float64, as far as that can be run."""
        if self.ask is not None:
            return self.ask(places)
        found, exact = _Look.at(self.step, copied, {*places}).found, Tensors()
        try:
            with default_dtype(torch.float64):
                exact = _Look.at(in_dtype(self.wide, torch.float64), copied, {*places}).found
        except Exception as error:  # kernels refuse in as many ways as there are functions
            pass_on(error)
        return found, exact

    @functools.cached_property
    def digests(self) -> list[tuple[int, int]]:
        """For every call a hash of what it wrote, and of the gradients that arrived there; 0 stands for nothing."""
        found = [[0, 0] for _ in self.step.program.calls]
        for place, mark in self.marks.items():
            if place.number != _GIVEN:
                found[self.calls[place.result]][place.start > 0] += mark.digest
        return [(result % 2**63, gradient % 2**63) for result, gradient in found]

    @functools.cached_property
    def written(self) -> dict[int, list[Version]]:
        """The places of every value, in the order of time."""
        found: dict[int, list[Version]] = {}
        for place in self.calls:
            found.setdefault(place.value, []).append(place)
        return found

    def last(self, value: int, before: int) -> Version:
        """Where a value was written last in front of a call."""
        return next(
            (p for p in reversed(self.written.get(value, [])) if self.calls[p] < before), Version(value, _GIVEN)
        )


def answer(step: HasProgram, settings: Settings, asked: str, path: str) -> None:
    """Run a step, and write what it made and the tensors that are asked for; for another Python of `reprokit diff`."""
    with determinism(settings):
        run, places = Run.of(step), [Version(*place) for place in json.loads(asked)]
        tensors = run.fetch(places) if places else ({}, {})
    parts: list[Mapping[Version, Any]] = [run.marks, run.calls, *tensors]
    plain = [
        [(*place, tuple(item) if isinstance(item, Imprint) else item) for place, item in part.items()] for part in parts
    ]
    torch.save((str(torch.__version__), plain, run.error, run.loss), path)


def read_answer(path: str) -> tuple[str, tuple[dict[Version, Any], ...], str, float | None]:
    """The version of torch there; marks, calls, tensors and tensors in float64 by place; the error; the loss."""
    version, plain, error, loss = torch.load(path, weights_only=True)
    return version, tuple({Version(*place): item for *place, item in rows} for rows in plain), error, loss


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
        return Gap(0, second.numel(), math.inf, math.inf, None, f"shapes {[*first.shape]} and {[*second.shape]}")
    one, other = real_numbers(first), real_numbers(second)
    bad = (one != other) & ~(one.isnan() & other.isnan())
    largest, scale = largest_gap(one, other), max(_size(one), _size(other))
    relative = largest / scale if scale else math.inf
    num_bad = int((bad.any(-1) if first.is_complex() else bad).sum())
    own, others = ({tensor.dtype, *halves} for tensor, halves in zip((first, second), formats, strict=True))
    eps, name = max(((torch.finfo(d).eps, str(d)) for d in own | others if d.is_floating_point), default=(0.0, ""))
    found = Gap(num_bad, first.numel(), largest, relative, _units(first, second), "", name.removeprefix("torch."))
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
    """The first call of the second program whose result, gradient or update differs, at a ``place`` there.

    ``only_first`` and ``only_second`` are the calls that lead to it from values that agree, where a program has more
    than this one: then these differ together. ``settings`` are the arguments that differ; ``is_exact``: what it is
    given is equal in all bits.
    """

    place: Version
    call: Call
    phase: Phase
    gap: Gap
    only_first: list[Call]
    only_second: list[Call]
    settings: str = ""
    is_exact: bool = False

    @property
    def words(self) -> str:
        """``inputs equal in all bits, 12 of 4,096 elements differ by up to 3 units in the last place``."""
        what = {"backward": "the gradient that it passes on: ", "optimizer": "the parameters after it: "}
        is_alone = self.phase is Phase.FORWARD and not (self.only_first or self.only_second)
        given = f"inputs {'equal in all bits' if self.is_exact else 'agree'}, " if is_alone else ""
        return what.get(self.phase, given) + self.gap.words


@dataclass
class Comparison:
    """Two runs beside each other. ``inputs`` that differ are the answer; else ``first`` is the first departure in any
    bit, and ``real`` the first that is no rounding, if what the step leaves differs by more than that."""

    one: Run
    other: Run
    inputs: list[InputDifference] = field(default_factory=list)
    first: Departure | None = None
    real: Departure | None = None
    walk: _Walk | None = None

    @property
    def words(self) -> str:
        """The first departure that is no rounding, and what becomes of it."""
        found, losses = self.real or self.first, (self.one.loss, self.other.loss)
        gap = abs(losses[0] - losses[1]) if losses[0] is not None and losses[1] is not None else 0.0
        grown = f", which grow to {gap:.2g} in the loss" if found and found.gap.num_bad and 0 < gap < math.inf else ""
        return (found.words if found is not None else "") + grown

    @classmethod
    def of(cls, one: HasProgram, other: HasProgram) -> Comparison:
        """Run both steps and compare them."""
        mine, others = Step(one.program, one.tensors), Step(other.program, other.tensors)
        inputs = _input_partners(mine, others)
        found = list(_input_differences(mine, others, inputs))
        if found:
            return cls(Run(mine, mine), Run(others, others), found)
        drawn = {item.value for item in other.program.inputs if item.role == "rng"}
        wide = {value: mine.tensors[partner] for value, partner in inputs.items() if value not in drawn}
        return cls.of_runs(Run.of(one), Run.of(other, wide))

    @classmethod
    def of_runs(cls, one: Run, other: Run) -> Comparison:
        """Compare two runs whose inputs agree."""
        walk = _Walk(one, other)
        is_real = any(gap.why for gap in map(walk.gap, walk.ends) if gap is not None)
        found = ((place, gap) for place in walk.differing if (gap := walk.gap(place)) is not None)
        first = next(found, None)
        real = next((item for item in (first, *found) if item is not None and item[1].why), None) if is_real else None
        return cls(one, other, [], first and walk.departure(*first), real and walk.departure(*real), walk)


def first_other_digest(
    program: Program, mine: Digests, others: Digests, calls: Mapping[int, int]
) -> tuple[int, Phase] | None:
    """The first call of a program, and the phase, in which a hash of ``others``, that program's, is not the one of
    ``mine`` for the call that ``calls`` puts beside it."""
    found = list[tuple[tuple[int, int, int], int, Phase]]()
    for at, before in calls.items():
        call = program.calls[at]
        phase = Phase.OPTIMIZER if phase_of(call) is Phase.OPTIMIZER else Phase.FORWARD
        found += [((at, 1, 0), at, phase)] if mine[before][0] != others[at][0] else []
        start = next((n for n, later in enumerate(program.calls) if n > at and later.is_differentiation), at)
        found += [((start, 0, -at), at, Phase.BACKWARD)] if mine[before][1] != others[at][1] else []
    return min(found)[1:] if found else None


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
    """Inputs that differ. Of the states of a random generator only the first is given: draws before make the others."""
    inputs = [[*step.program.inputs] for step in (one, other)]
    drawn = [[item for item in items if item.role == "rng"] for items in inputs]
    for items, states in zip(inputs, drawn, strict=True):
        items[:] = [item for item in items if item not in states[1 if all(drawn) else 0 :]]
    for item in inputs[1]:
        if item.value not in partners:
            yield InputDifference(item.name, item.role, "only the second step has it")
            continue
        first, second = one.tensors[partners[item.value]], other.tensors[item.value]
        if first.dtype != second.dtype and first.is_floating_point() and second.is_floating_point():
            narrow = min(first.dtype, second.dtype, key=lambda dtype: dtype.itemsize)
            first, second = first.to(narrow), second.to(narrow)  # the same numbers in another format
        gap = gap_between(first, second)
        if gap is not None:
            words = "the state of the random generator differs" if item.role == "rng" else ""
            yield InputDifference(item.name, item.role, words or gap.words)
    for item in inputs[0]:
        if item.value not in partners.values():
            yield InputDifference(item.name, item.role, "only the first step has it")


def beside(found: Comparison, *, is_recorded: bool) -> tuple[Step, Failure] | None:
    """A step that makes the departing result in both ways from what the runs share, and the failure that its two
    outputs differ. With ``is_recorded`` the second way cannot run here, and is a constant of at most `_MOST_CONSTANTS`
    numbers. ``None`` if it is no result of the forward pass.
    """
    departure, walk = found.real, found.walk
    if departure is None or walk is None or departure.phase is not Phase.FORWARD:
        return None
    one, other, place = found.one, found.other, departure.place
    ours, theirs, start = one.step.program.calls, other.step.program.calls, one.step.program.next_value()
    partner, index = walk.partner[place], other.calls[place]
    before, matched = one.calls[partner], set(walk.calls.values())
    mine = sorted({before, *_led_by(ours, before, lambda at: at not in matched)})
    calls, result = [ours[at] for at in mine], partner.value
    given, inputs = _given(one, mine), dict[int, torch.Tensor]()
    number = start + other.step.program.next_value()
    if is_recorded:
        expected, actual = other.fetch([place])[0][place], one.fetch([partner])[0][partner]
        number += 1
        if expected.numel() > _MOST_CONSTANTS:
            gaps = (actual.double() - expected.double()).abs().reshape(-1).nan_to_num(math.inf)
            inputs[number] = gaps.topk(_MOST_CONSTANTS).indices
            flat, chosen = Ref(number + 1), Ref(number + 2)
            calls.append(Call("torch.Tensor.reshape", (Ref(result), (-1,)), outputs=flat))
            calls.append(Call("torch.Tensor.index_select", (flat, 0, Ref(number)), outputs=chosen))
            result, expected = number + 2, expected.reshape(-1)[inputs[number]]
        inputs[number + 3] = expected
        outputs = Ref(number + 3), Ref(result)
    else:
        others = sorted({index, *_led_by(theirs, index, lambda at: at not in walk.calls)})
        change: dict[int, Any] = {v: Ref(start + v) for at in others for v in theirs[at].output_refs()}
        for value, source in _given(other, others).items():
            if source not in walk.partner:
                return None
            change[value] = Ref(walk.partner[source].value)
            given.setdefault(change[value].value, walk.partner[source])
        calls += [theirs[at].substituted(change, outputs=True) for at in others]
        outputs = Ref(result), Ref(start + place.value)
    tensors = one.fetch([*given.values()])[0]
    inputs |= {value: tensors[source] for value, source in given.items()}
    names = {item.value: item for item in one.step.program.inputs}
    items = [names.get(value, Input(value, f"x{n}")) for n, value in enumerate(inputs)]
    program = Program(tuple(calls), tuple(replace(item, requires_grad=False) for item in items), outputs)
    bad, elements = departure.gap.num_bad, departure.gap.num_elements
    failure = Failure(Phase.FORWARD, MISMATCH, OTHER_WAY, num_bad=bad, num_elements=elements, departure=found.words)
    at = len(mine) - 1 if is_recorded else len(calls) - 1
    failure = at_call(replace(failure, value=outputs[1].value), program, at)
    return Step(program, {value: tensor.detach() for value, tensor in inputs.items()}), failure


def _given(run: Run, chosen: Sequence[int]) -> dict[int, Version]:
    """What chosen calls read and do not make themselves."""
    found, made = dict[int, Version](), set[int]()
    for at in chosen:
        call = run.step.program.calls[at]
        found.update((v, run.last(v, at)) for v in call.input_refs() if v not in made and v not in found)
        made.update(call.output_refs())
    return found


class _Walk:
    """The calls of the second program beside those of the first; ``partner`` are places of the first by those there."""

    def __init__(self, one: Run, other: Run) -> None:
        self.one, self.other = one, other
        self.formats = halves_in(one.step.program, one.step.tensors), halves_in(other.step.program, other.step.tensors)
        is_drawn = any(call.mode.rng is not None for call in one.step.program.calls)
        self.same_formula = _SAME_DRAWN if is_drawn else _SAME_FORMULA
        self.calls = _aligned(one, other)  # calls of the first by those of the second
        inputs = _input_partners(one.step, other.step)
        self.partner = {Version(value, _GIVEN): Version(partner, _GIVEN) for value, partner in inputs.items()}
        made = tuple([list[Version]() for _ in run.step.program.calls] for run in (one, other))
        for found, run in zip(made, (one, other), strict=True):
            for place, index in run.calls.items():
                found[index].append(place)
        starts = [[n for n, c in enumerate(run.step.program.calls) if c.is_differentiation] for run in (one, other)]
        for index, before in sorted(self.calls.items()):
            mine, others = made[0][before], made[1][index]
            is_alike = [one.marks[at].shape for at in mine] == [other.marks[at].shape for at in others]
            if index in starts[1] and len(starts[0]) != len(starts[1]):
                is_alike = False  # one backward pass of a sum beside those of its parts
            if not is_alike and not self._shares(before, index):
                del self.calls[index]  # such as the parts of a weight beside those of what it is multiplied with
            elif len(mine) == len(others):
                self.partner.update(zip(others, mine, strict=True))
        self._pair_operands()
        self.passes = starts[1]
        self.starts = {at + 1: starts[0].index(self.calls[n]) + 1 for at, n in enumerate(starts[1]) if n in self.calls}
        self.starts[0] = 0
        if not any(_writes_gradients(call) for run in (one, other) for call in run.step.program.calls):
            self.starts[_LEFT] = _LEFT
        self._gaps, self._held = dict[Version, Gap | None](), dict[Version, tuple[Any, ...]]()

    def _shares(self, before: int, index: int) -> bool:
        """True if all that two calls are given is the same in both programs."""
        ours, theirs = self.one.step.program.calls[before], self.other.step.program.calls[index]
        pairs = zip(ours.input_refs(), theirs.input_refs(), strict=False)
        return all(self.one.last(v, before) == self.partner.get(self.other.last(w, index)) for v, w in pairs)

    def _pair_operands(self) -> None:
        """What an aligned call is given is paired too, where calls that only one program has have made it, and what
        both programs leave in their inputs."""
        ours, theirs, known = self.one.step.program.calls, self.other.step.program.calls, set(self.partner.values())
        given = [(mine.value, place.value) for place, mine in self.partner.items() if place.number == _GIVEN]
        pairs = [(at, n, [*ours[at].input_refs()], [*theirs[n].input_refs()]) for n, at in self.calls.items()]
        pairs.append((len(ours), len(theirs), [one for one, _ in given], [other for _, other in given]))
        for before, index, mine, others in pairs:
            for value, value_other in zip(mine, others, strict=True) if len(mine) == len(others) else ():
                place, other = self.one.last(value, before), self.other.last(value_other, index)
                is_made = _GIVEN not in (place.number, other.number)
                if is_made and other not in self.partner and place not in known:
                    self.partner[other] = place
                    known.add(place)

    def _mine(self, place: Version) -> Version | None:
        """The place of the first run beside one of the second."""
        partner, start = self.partner.get(place.result), self.starts.get(place.start)
        return partner._replace(start=start) if partner is not None and start is not None else None

    @functools.cached_property
    def differing(self) -> list[Version]:
        """Places of the second run where hashes differ, in the order of time."""
        found, calls = list[Version](), self.other.step.program.calls
        copies = [Counter(map(_kind, run.step.program.calls, run.digests)) for run in (self.one, self.other)]
        for result, partner in self.partner.items():
            for start, start_mine in self.starts.items():
                place, mine = result._replace(start=start), partner._replace(start=start_mine)
                marks = self.one.marks.get(mine), self.other.marks.get(place)
                one, other = (mark.digest if mark is not None else None for mark in marks)
                if one == other or (not start and (None in (one, other) or result.number == _GIVEN)):
                    continue
                if start and result.number != _GIVEN:  # a value that is made again gets its part of the gradient
                    index, before = self.other.calls[result], self.one.calls[partner]
                    keys = (
                        _kind(self.one.step.program.calls[before], self.one.digests[before]),
                        _kind(calls[index], self.other.digests[index]),
                    )
                    if copies[0][keys[0]] != copies[1][keys[1]]:
                        continue
                found.append(place)
        steps = [at for at, call in enumerate(calls) if call.is_optimizer_step and self._has_other_options(at)]
        found += [place for place, at in self.other.calls.items() if at in steps and place not in found]
        return sorted(found, key=self._time)

    def _time(self, place: Version) -> tuple[int, ...]:
        index = self.other.calls.get(place.result, -1)
        end = self.passes[place.start - 1 if place.start > 0 else -1] if place.start and self.passes else index
        return (end, 0, -index) if place.start else (index, 1)

    @functools.cached_property
    def ends(self) -> list[Version]:
        """The places that differ of what the second step leaves: its outputs, what it has written into inputs, their
        gradients, and what optimizers were given and made of it. All places of a step that raised, or whose loss is NaN
        or inf, behind which nothing differs."""
        run, program = self.other, self.other.step.program
        if self.one.error or run.error or not math.isfinite(run.loss or 0.0):
            return self.differing
        given, steps = (
            [item.value for item in program.inputs],
            [n for n, c in enumerate(program.calls) if c.is_optimizer_step],
        )
        updated = {value for at in steps for value in program.calls[at].input_refs()}
        found = {run.last(value, len(program.calls)) for value in (*results_of(program), *given)}
        found |= {Version(value, _GIVEN, _LEFT) for value in given if value not in updated}
        found |= {run.last(value, at + 1) for at in steps for value in program.calls[at].input_refs()}
        return [place for place in self.differing if place in found]

    def gap(self, place: Version) -> Gap | None:
        """The difference at a place; an optimizer's options may show in later steps only, as a beta of Adam does."""
        if place not in self._gaps:
            mine, index = self._mine(place), self.other.calls.get(place, -1)
            is_update = index >= 0 and self.other.step.program.calls[index].is_optimizer_step
            if mine not in self.one.marks or place not in self.other.marks:
                which = "first" if mine not in self.one.marks else "second"
                found: Gap | None = Gap(0, 1, math.inf, math.inf, None, f"the {which} has no gradient here")
            else:
                if place not in self._held:
                    self._hold(place)
                first, second, *exact = self._held.pop(place)
                least = self.largest_gradient if place.start else 0.0
                same = max(self.same_formula, _SAME_DRAWN) if is_update else self.same_formula
                found = gap_between(first, second, (exact[0], exact[1]), self.formats, same, least)
            if is_update and (found is None or not found.why) and self._has_other_options(index):
                found = replace(found or Gap(0, 0, 0.0, 0.0, 0), why="its other options show in later steps")
            self._gaps[place] = found
        return self._gaps[place]

    def _hold(self, wanted: Version) -> None:
        """Run both again for the tensors at a place, and at as many of those that follow as may be held at once."""
        chosen, size = dict[Version, Version](), 0
        for place in (wanted, *self.ends, *self.differing):
            mine = self._mine(place)
            if place in self._gaps or mine not in self.one.marks or place not in self.other.marks:
                continue
            size += _BYTES * math.prod(self.other.marks[place].shape) * (place not in chosen)
            if chosen and size > MOST_BYTES:
                break
            chosen[place] = mine
        (one, wide), (other, wide_other) = self.one.fetch([*chosen.values()]), self.other.fetch([*chosen])
        self._held = {p: (one[m], other[p], wide.get(m), wide_other.get(p)) for p, m in chosen.items()}

    @functools.cached_property
    def largest_gradient(self) -> float:
        """Of leaves of the first run; beside it the gradient of a bias in front of a normalization is rounding."""
        return max((mark.size for place, mark in self.one.marks.items() if place.start == _LEFT), default=0.0)

    def departure(self, place: Version, gap: Gap) -> Departure:
        """What differs at a place, with the calls that lead to it."""
        ours, theirs, matched = self.one.step.program.calls, self.other.step.program.calls, set(self.calls.values())
        index = self.other.calls.get(place.result, -1)
        if place.start:
            phase, index = Phase.BACKWARD, self._consumer(place, index)
            before = self.calls.get(index)
        else:
            phase = Phase.OPTIMIZER if phase_of(theirs[index]) is Phase.OPTIMIZER else Phase.FORWARD
            before = self.one.calls[self.partner[place]]
        found, found_other = _led_by(ours, before, lambda at: at not in matched), _led_by(theirs, index, self._is_new)
        if phase is Phase.OPTIMIZER and before is not None:  # what writes into gradients, as clipping does
            found += [at for at in range(before) if at not in matched and _writes_gradients(ours[at])]
            found_other += [at for at in range(index) if self._is_new(at) and _writes_gradients(theirs[at])]
        elif phase is Phase.BACKWARD:  # what reads a value here and not there, so that its gradient is another
            mine = self.partner[place.result].value
            found += [at for at, call in enumerate(ours) if at not in matched and mine in call.input_refs()]
        only_first, only_second = [ours[at] for at in found], [theirs[at] for at in found_other]
        settings = _settings(ours[before], theirs[index]) if before is not None and index in self.calls else ""
        if before is not None and not self._draws_alike(ours[before], theirs[index]):
            settings = ", ".join(filter(None, [settings, "another state of the random generator"]))
        is_exact = before is not None and not (only_first or only_second) and self._is_given_equal(before, index)
        return Departure(place, theirs[index], phase, gap, only_first, only_second, settings, is_exact)

    def _draws_alike(self, before: Call, call: Call) -> bool:
        """True if no call draws random numbers, or both begin with the same state of the generator."""
        states = [self.one.step.tensors[before.mode.rng.value]] if before.mode.rng is not None else []
        states += [self.other.step.tensors[call.mode.rng.value]] if call.mode.rng is not None else []
        return len(states) < 2 or same_bits(*states)

    def _is_given_equal(self, before: int, index: int) -> bool:
        calls = (
            (self.one, self.one.step.program.calls[before], before),
            (self.other, self.other.step.program.calls[index], index),
        )
        digests = [[run.marks[run.last(v, at)].digest for v in call.input_refs()] for run, call, at in calls]
        return digests[0] == digests[1]

    def _has_other_options(self, index: int) -> bool:
        """True if an optimizer makes another update than in the first program, be it only from the next step on."""
        before, ours, theirs = self.calls.get(index), self.one.step.program.calls, self.other.step.program.calls
        settings = _settings(ours[before], theirs[index]) if before is not None else ""
        return any(not part.startswith(_SAME_UPDATE) for part in settings.split(", ") if part)

    def _is_new(self, index: int) -> bool:
        return index not in self.calls

    def _consumer(self, place: Version, index: int) -> int:
        """The call that made the gradient of a place: of those that read it the one that the first program has not, or
        has with other arguments, else the last."""
        calls, ours = self.other.step.program.calls, self.one.step.program.calls
        reads = [at for at in range(index + 1, len(calls)) if place.value in calls[at].input_refs()]
        reads = [at for at in reads if not calls[at].is_differentiation and not calls[at].is_optimizer_step]
        odd = (at for at in reads if at not in self.calls or _settings(ours[self.calls[at]], calls[at]))
        return next(odd, reads[-1] if reads else max(index, 0))


def _kind(call: Call, made: tuple[int, int]) -> tuple[str, int]:
    """What two calls have in common that make one value."""
    return display_name(call.target), made[0]


def _writes_gradients(call: Call) -> bool:
    """True for a call between a backward pass and an update."""
    return call.phase is Phase.OPTIMIZER and call.target != GRAD_READ and not call.is_optimizer_step


def _aligned(one: Run, other: Run) -> dict[int, int]:
    """Calls of the first run by those of the second: with equal results, then of one function in one module, then of
    one function, each between those that are known."""
    ours, theirs = one.step.program.calls, other.step.program.calls
    digests, digests_other = ([result for result, _ in run.digests] for run in (one, other))

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
