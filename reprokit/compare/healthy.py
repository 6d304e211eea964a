"""The first call of a step that is unlike the same call of a healthy step: where an event begins inside its step.

Both steps are run under observation. A value is off if its largest magnitude is several times that of the healthy step.
Forward, the first call on the way to the loss whose result is off is the origin; a result of the data alone only if
the event ends with the healthy result in its place, because batches differ. Backward, it is the first call, from the
loss on, that turns a gradient like the healthy one into one that is off.

An input that is bad may mark what is missing, such as a label: then healthy steps have it too, and a call drops it
there (`let_through`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from reprokit import native
from reprokit.compare.alignment import Alignment
from reprokit.compare.quantity import at_call, at_optimizer, loss_of, measured
from reprokit.locate.blame import locate
from reprokit.locate.failure import Failure, Predicate
from reprokit.locate.notes import Notes
from reprokit.locate.spelling import argument_at, short_name, slot_of
from reprokit.locate.ways import largest_finite, ways_of
from reprokit.program.dataflow import calls_behind, values_behind, writer_of, written_by
from reprokit.program.functions import display_name
from reprokit.program.interpreter import run
from reprokit.program.ir import Call, Input, Program, Ref
from reprokit.program.observe import Trace
from reprokit.program.step import Step
from reprokit.words import number_words, row_words

_LEAST_FACTOR, _MOST_FACTOR = 1.5, 10.0  # by which a value is off; batches differ by less
_BY_DESIGN = frozenset({"mul", "where", "masked_fill"})  # make zeros because somebody asks for them
_FLAT = frozenset({"round", "floor", "ceil", "trunc", "fix", "sign", "heaviside"})
# Of a gradient in float32, what is left of one that cancels: behind a norm times its divisor, which may be small
_ROUNDING = {"softmax": 16 * 2.0**-23, "norm": 2.0**-13}


class _Sizes(Trace[float]):
    """Observes a run: the largest magnitude of every value as a call read or left it, and of the gradients."""

    def __init__(self, step: Step) -> None:
        super().__init__(step.program, _size, gradients_of=_size)
        # Calls with floating-point results and no graph
        self.graphless = set[int]()
        # At the end of the run, by value
        self.values = dict[int, float]()
        outcome = self.run(step.tensors)
        self.largest_gradients = {value: _size(gradient) for value, gradient in outcome.gradients.items()}
        for (_, value), sizes in self.gradients.items():
            self.largest_gradients[value] = max(self.largest_gradients.get(value, 0.0), *sizes)

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Measure what the call reads."""
        super().before(index, call, values)
        self.values |= self.reads[index]

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Measure what the call left, and see whether it has a graph."""
        super().after(index, call, values)
        self.values |= self.writes[index]
        made = [values[value] for value in written_by(call) if value in values]
        if any(native.is_floating_point(t) for t in made) and not any(t.requires_grad for t in made):
            self.graphless.add(index)

    def passed(self, index: int, value: int) -> float | None:
        """The largest gradient that arrived at a result of a call."""
        return max(self.gradients.get((index, value), ()), default=None)


def explained(step: Step, healthy: Step, failure: Failure) -> Failure:
    """``failure``, an event of the whole step, with the call, the input and the rows that it begins with."""
    event = failure.event
    if event is None:
        return failure
    if event.quantity == "update":
        return at_optimizer(failure, step.program)
    comparison = _Comparison(step, healthy, failure, _factor(event))
    loss = loss_of(step.program)
    is_forward = failure.in_forward or comparison.is_off(loss)
    index = comparison.forward(loss) if is_forward else comparison.backward()
    source = comparison.source(index)
    results = written_by(step.program.calls[index]) if index is not None else ()
    made = next((value for value in results if comparison.is_made_off(index or 0, value)), None)
    carrier = source.value if source is not None else made
    rows = comparison.rows_off(carrier) if source is None or source.role == "batch" else ""
    event = replace(event, source=source.name if source is not None else None, rows=rows or None)
    failure = replace(failure, event=replace(event, **comparison.off_data(source)))
    if index is None:
        return failure
    value = failure.value if failure.value is not None else next(iter(results), None)
    return replace(at_call(failure, step.program, index), value=value)


def _factor(event: Predicate) -> float:
    """The factor by which a value of the step is off."""
    ratio = abs(event.value / event.usual) if event.usual and event.usual > 0 else math.inf
    return min(max(math.pow(ratio, 0.25), _LEAST_FACTOR), _MOST_FACTOR)


@dataclass
class _Comparison:
    """The sizes of a step beside those of a healthy one."""

    step: Step
    other: Step
    failure: Failure
    factor: float  # by which a value is off

    def __post_init__(self) -> None:
        self.sizes = _Sizes(self.step)
        self.healthy = _Sizes(self.other)
        # Values of the healthy step by those of this one
        calls, others = self.step.program.calls, self.other.program.calls
        keys = [_key(call) for call in calls], [_key(call) for call in others]
        self.partner = Alignment.in_order(calls, others, keys).values
        loss = loss_of(self.step.program)
        self.way = calls_behind(self.step.program.calls, [loss] if loss is not None else [])

    def is_off(self, value: int | None, *, gradient: bool = False) -> bool:
        """True if a value, or its gradient, is several times as large as in the healthy step, or not finite."""
        if value is None or value not in self.partner:
            return False
        name = "largest_gradients" if gradient else "values"
        ours, theirs = getattr(self.sizes, name), getattr(self.healthy, name)
        now, before = ours.get(value), theirs.get(self.partner[value])
        return now is not None and before is not None and now > self.factor * before and now > 0

    def is_made_off(self, index: int, value: int) -> bool:
        """True if the result of a call, as the call left it, is off."""
        before = self.healthy.values.get(self.partner.get(value, -1))
        return before is not None and self.sizes.writes.get(index, {}).get(value, 0.0) > max(self.factor * before, 0.0)

    def is_of_data(self, value: int) -> bool:
        """True if no parameter is behind a value."""
        program = self.step.program
        behind = values_behind(program.calls, [value])
        return not any(item.role == "parameter" and item.value in behind for item in program.inputs)

    def forward(self, value: int | None) -> int | None:
        """The first call on the way to a value whose result is off."""
        calls = self.step.program.calls
        innocent = set[int]()
        for index in calls_behind(calls, [value]) if value is not None else ():
            off = [result for result in written_by(calls[index]) if self.is_made_off(index, result)]
            if off and innocent.isdisjoint(calls[index].input_refs()):
                is_cause = self.ends_without(off[0], index) if self.is_of_data(off[0]) else True
                if is_cause:
                    return index
                innocent.update(written_by(calls[index]) if is_cause is False else ())
        return None

    def backward(self) -> int | None:
        """The first call, from the loss on, that makes a gradient off.

        Where that call reads a result that is off, which is a factor of the gradient, the first call on the way to it.
        """
        program = self.step.program
        inputs = {item.value for item in program.inputs}
        for index in reversed(self.way):
            call = program.calls[index]
            if any(self.is_off(value, gradient=True) for value in call.output_refs()):
                continue
            if any(self.is_off(value, gradient=True) for value in call.input_refs()):
                factor = next((v for v in call.input_refs() if v not in inputs and self.is_off(v)), None)
                earlier = self.forward(factor)
                return earlier if earlier is not None else index
        return None

    def source(self, index: int | None) -> Input | None:
        """The input of the step that carries the event: one that the origin reads and that is off, else one of the
        batch without which the event ends."""
        inputs = self.step.program.inputs
        read = self.step.program.calls[index].input_refs() if index is not None else ()
        found = next((item for item in inputs if item.value in read and self.is_off(item.value)), None)
        batch = (item for item in inputs if item.role == "batch")
        # weights that have grown for 30 steps make an event of one batch and none of another: it is not the batch's
        if found is not None or self.ends_with_parameters():
            return found
        return next((item for item in batch if self.ends_without(item.value)), None)

    def ends_with_parameters(self) -> bool:
        """True if the event ends with the parameters of the healthy step."""
        parameters = [item.value for item in self.step.program.inputs if item.role == "parameter"]
        pairs = ((value, self.partner[value]) for value in parameters if value in self.partner)
        given = {value: self.other.tensors[partner] for value, partner in pairs if partner in self.other.tensors}
        found = measured(self.step.program, {**self.step.tensors, **given}, self.failure) if given else None
        return found is not None and self.failure.event is not None and found < self.failure.event.threshold

    def ends_without(self, value: int, index: int = -1) -> bool | None:
        """True if the event ends with the healthy value in the place of one of the data, which call number ``index``
        made; ``None`` where the healthy step has no such value."""
        program, tensors, event = self.step.program, self.step.tensors, self.failure.event
        if event is None or value not in self.partner:
            return None
        values = run(self.other.program, self.other.tensors, keep=frozenset([self.partner[value]])).values
        given = values.get(self.partner[value])
        now = tensors[value] if index < 0 else run(program, tensors, keep=frozenset([value])).values.get(value)
        if given is None or now is None or now.shape != given.shape or now.dtype != given.dtype:
            return None
        if now.layout is not torch.strided or native.equal(now, given):
            return None
        free = Ref(program.next_value())
        changed = [call.substituted({value: free}) for call in program.calls[index + 1 :]]
        calls, inputs = (*program.calls[: index + 1], *changed), (*program.inputs, Input(free.value, "healthy"))
        program = replace(program, calls=calls, inputs=inputs)
        found = measured(program, {**tensors, free.value: native.detach(given)}, self.failure)
        return found is not None and found < event.threshold

    def off_data(self, source: Input | None) -> dict[str, Any]:
        """The target of the loss, or else the ``source`` in the batch, if that is off: fields of a `Predicate`."""
        for index in self.way:
            call = self.step.program.calls[index]
            with suppress(KeyError):
                target = argument_at(call, slot_of(call, "target"))
                if isinstance(target, Ref) and self.is_off(target.value) and self.is_of_data(target.value):
                    return {"argument": f"target of {short_name(call)}", **self._largest(target.value)}
        is_off = source is not None and source.role == "batch" and self.is_off(source.value)
        return self._largest(source.value) if source is not None and is_off else {}

    def rows_off(self, value: int | None) -> str:
        """The rows of a value of the batch that are off at the end of the step, which may write into it."""
        if value is None or value not in self.partner or not self.is_of_data(value):
            return ""
        tensor = run(self.step.program, self.step.tensors, keep=frozenset({value})).values.get(value)
        if tensor is None or not native.dim(tensor) or not native.is_floating_point(tensor):
            return ""
        limit = self.factor * self.healthy.values[self.partner[value]]
        sizes = native.tolist(
            native.amax(
                native.nan_to_num(
                    native.reshape(native.abs(native.double(native.detach(tensor))), len(tensor), -1), math.inf
                ),
                1,
            )
        )
        rows = [row for row, size in enumerate(sizes) if size > limit]
        return row_words(rows) if len(tensor) > 1 else ""

    def _largest(self, value: int) -> dict[str, float]:
        now, before = self.sizes.values[value], self.healthy.values[self.partner[value]]
        return {"largest": now, "largest_usual": before} if math.isfinite(now) else {}


def blocked(step: Step, failure: Failure, *, is_all: bool = False) -> Failure:
    """``failure``, no gradient for the parameter that is its value, with the call that lets none through, and in
    ``way`` what its results show.

    That is the one closest to the loss that a gradient reaches and that passes none on towards the parameter, or one
    that cuts the graph, such as `detach`; or the call that is given numbers made of the parameter as an input, named
    by ``input_name``, without their graph. Without such a call it stays as it is. ``is_all``: no parameter gets more
    than rounding, so that a call counts whatever its results are.
    """
    program, sizes, parameter, loss = step.program, _Sizes(step), failure.value, loss_of(step.program)
    if loss is None or parameter is None:
        return failure
    way, led_to = _way(program, parameter, loss)
    is_leaf = any(item.value == parameter and item.requires_grad for item in program.inputs)
    given = _given_anew(step, parameter, loss) if is_leaf and not way else None
    if given is not None:
        way, led_to = _way(program, parameter, given[1])
    silent = (index for index in reversed(way) if _is_silent(step, sizes, index, led_to, is_all))
    origin = next(silent, None)
    if origin is not None:
        return replace(at_call(failure, program, origin), way=_shown_by(step, origin))
    cut = next((index for index in way if index in sizes.graphless), None) if is_leaf else None
    if cut is not None:
        return at_call(failure, program, cut)
    return _at_copy(step, failure, *given) if given is not None else _at_new_leaf(step, failure, loss)


def _at_new_leaf(step: Step, failure: Failure, loss: int) -> Failure:
    """At the call that is given a leaf in the place of the model; the failure as it is if a parameter is behind the
    loss."""
    behind = values_behind(step.program.calls, [loss])
    leaves = [item for item in step.program.inputs if item.requires_grad and item.value in behind]
    if not leaves or any(item.role == "parameter" for item in leaves):
        return failure
    return _read_without(step, failure, leaves[0], "is a leaf with no graph behind it")


def _at_copy(step: Step, failure: Failure, copy: Input, value: int) -> Failure:
    """At the call that is given the numbers of a value as an input."""
    made = next(call for call in step.program.calls if value in written_by(call))
    place = f" ({made.site.place})" if made.site is not None else ""
    words = f"has the numbers of what `{display_name(made.target)}`{place} returned, and not its graph"
    return _read_without(step, failure, copy, words)


def _read_without(step: Step, failure: Failure, item: Input, words: str) -> Failure:
    """At the call that is given an input without the graph of what it was made of."""
    reader = next(index for index, call in enumerate(step.program.calls) if item.value in call.input_refs())
    return replace(at_call(failure, step.program, reader), input_name=item.name, way=words)


def _way(program: Program, parameter: int, end: int) -> tuple[list[int], set[int]]:
    """The calls on the way from a parameter to a value, and the parameter with their results."""
    led_to, way = {parameter}, list[int]()
    for index in calls_behind(program.calls, [end]):
        if not led_to.isdisjoint(program.calls[index].input_refs()):
            led_to.update(written_by(program.calls[index]))
            way.append(index)
    return way, led_to


def _given_anew(step: Step, parameter: int, loss: int) -> tuple[Input, int] | None:
    """An input that the loss is made of, which has the numbers of a value made of a parameter, and that value: what
    goes through NumPy or a list comes back like that."""
    program, behind = step.program, values_behind(step.program.calls, [loss])
    made = {parameter}
    for call in program.calls:
        made.update(written_by(call) if not made.isdisjoint(call.input_refs()) else ())
    values = run(program, step.tensors, keep=frozenset(made - {parameter})).values
    for item in program.inputs:
        given = native.flatten(native.detach(step.tensors[item.value]))
        if item.role == "parameter" or item.value not in behind or not native.is_floating_point(given):
            continue
        alike = (v for v in sorted(values, reverse=True) if native.numel(values[v]) == native.numel(given))
        found = next(
            (v for v in alike if native.equal(native.to(native.flatten(native.detach(values[v])), given), given)), None
        )
        if found is not None and bool(native.any(given * (given - 1))):  # zeros and ones are equal by accident
            return item, found
    return None


def _is_silent(step: Step, sizes: _Sizes, index: int, led_to: set[int], is_all: bool) -> bool:
    """True if a gradient reaches a call that makes only zeros, or whose derivative is zero everywhere, and passes none
    on to what the parameter has led to; if it ``is_all``, nothing but rounding."""
    program, call = step.program, step.program.calls[index]
    name = short_name(call)
    reached = max((sizes.passed(index, value) or 0.0 for value in call.output_refs()), default=0.0)
    if name in _BY_DESIGN or not reached:
        return False
    most = 0.0
    if is_all:
        share = next((share for part, share in _ROUNDING.items() if part in name), 0.0)
        most = share * reached if share else 0.0  # the gradient may be infinite
    sent = [_passed_on(program, sizes, index, value) for value in call.input_refs() if value in led_to]
    if not sent or not all(size is not None and size <= most for size in sent):
        return False
    makes_zeros = not any(sizes.writes.get(index, {}).get(value) for value in call.output_refs())
    return makes_zeros or is_all or name.strip("_") in _FLAT or _is_saturated(step, index)


def _passed_on(program: Program, sizes: _Sizes, index: int, value: int) -> float | None:
    """The largest gradient of a value that a call reads."""
    maker = writer_of(program.calls, value, index)
    return sizes.largest_gradients.get(value) if maker is None else sizes.passed(maker, value)


def _is_saturated(step: Step, index: int) -> bool:
    """True if each element of what a call returns is at one of two ends, and those of what it is given are not."""
    result, given = _result_of(step, index)
    return given.shape == result.shape and not _ends(given) and bool(_ends(result))


def _result_of(step: Step, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first tensor that a call returns, and the first that it is given."""
    result, given = step.program.calls[index].output_refs()[0], step.program.calls[index].input_refs()[0]
    values = {**step.tensors, **run(step.program, step.tensors, keep=frozenset([result, given])).values}
    return values[result], values[given]


def _ends(tensor: torch.Tensor) -> list[float]:
    """The one or two numbers that a tensor is made of; empty if there are more."""
    if not native.is_floating_point(tensor) or not native.numel(tensor) or tensor.layout is not torch.strided:
        return []
    low, high = (native.item(end) for end in native.aminmax(native.detach(tensor)))
    is_at_ends = bool(native.all((tensor == low) | (tensor == high)))
    return [*dict.fromkeys([low, high])] if is_at_ends else []


def _shown_by(step: Step, index: int) -> str:
    """What the results of a call show that lets no gradient through; empty if nothing."""
    result, given = _result_of(step, index)
    ends, shape = " or ".join(map(number_words, _ends(result))), list(given.shape)
    if "cross_entropy" in short_name(step.program.calls[index]) and shape[:2][-1:] == [1]:
        return f"its scores {shape} have one class, so it returns the same number, {ends}, whatever they are"
    return f"all of its outputs are {ends}" if ends and native.numel(result) > 1 else ""


def let_through(failure: Failure, failing: Step, healthy: Step) -> Failure | None:
    """``failure``, of an input that is bad, beside a healthy step: the first call on the way of the bad value that
    drops it there and not here. Without one the ``failure`` with its `Failure.marker`, if the input is bad there too.

    ``None`` if the healthy step tells nothing: its input is good, or it has taken other rows of the same data.
    """
    if locate(healthy.program, healthy.tensors) is not None:
        return None
    notes, then = Notes(failing.program), Notes(healthy.program)
    notes.run(failing.tensors)
    then.run(healthy.tensors)
    # Two steps need not make all the same calls.
    for index, other in Alignment.by_line(healthy.program.calls, failing.program.calls).calls.items():
        bad = [value for value, ways in notes.writes.get(index, {}).items() if failure.way in ways]
        if not bad or not _drops(then, other, failure.way):
            continue
        found = locate(failing.program, failing.tensors, through=bad[0])
        if found is not None and found.call_index == index:
            return found if _is_masking(healthy, other) else None
    given = (item.value for item in healthy.program.inputs if item.name == failure.input_name)
    is_marker = any(failure.way in ways_of(healthy.tensors[value]) for value in given)
    return replace(failure, marker=failure.input_name) if is_marker else None


def _drops(notes: Notes, index: int, way: str) -> bool:
    reads, writes = (ways.get(index, {}).values() for ways in (notes.reads, notes.writes))
    return any(way in ways for ways in reads) and not any(way in ways for ways in writes)


def _is_masking(step: Step, index: int) -> bool:
    """True unless a call only takes rows of the data, as ``data[i : i + 32]`` does for every batch."""
    operands = run(step.program, step.tensors, keep=frozenset(step.program.calls[index].input_refs())).values.values()
    return any(tensor.dtype == torch.bool or tensor.requires_grad for tensor in operands)


def _key(call: Call) -> tuple[object, ...]:
    return call.target, tuple(scope.path for scope in call.scope), call.site.line if call.site is not None else 0


def _size(tensor: torch.Tensor) -> float:
    """The largest magnitude; infinite with a value that is not finite."""
    return math.inf if ways_of(tensor) else largest_finite(tensor)
