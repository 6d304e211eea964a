"""The first call of a step that is unlike the same call of a healthy step: where an event begins inside its step.

Both steps are run under observation. A value is off if its largest magnitude is several times that of the healthy step.
Forward, the first call on the way to the loss whose result is off is the origin: either an input of the step that it
reads is off, or its own gain is. Backward, it is the first call, from the loss on, that turns a gradient like the
healthy one into one that is off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial
from itertools import groupby
from typing import Any

import torch

from reprokit.locate.failure import Failure
from reprokit.locate.quantity import at_call, at_optimizer, loss_of, measured
from reprokit.locate.spelling import VIEWS, argument_at, short_name, slot_of
from reprokit.locate.ways import largest_finite, ways_of
from reprokit.program.dataflow import node_of
from reprokit.program.functions import all_written
from reprokit.program.interpreter import run
from reprokit.program.ir import Call, Input, Phase, Program, Ref, iter_refs
from reprokit.program.step import Step

_LEAST_FACTOR, _MOST_FACTOR = 1.5, 10.0  # by which a value is off; batches differ by less
_MOST_ROWS = 64  # of a batch that are exchanged one by one; each costs a run
_BY_DESIGN = frozenset({"mul", "where", "masked_fill"})
_NOTHING = torch.empty(0)  # in the place of an input that the healthy step does not have; a batch is not empty
_SHARE = 0.1  # of the largest effect of a row, which makes another row one that carries it, too


@dataclass
class _Sizes:
    """Observes a run: the largest magnitude of every value and of its gradient, by value number.

    ``made`` and ``passed`` have those of every result as its call left it, by the index of the call and the value: a
    value that is written in place has several. ``floats`` are the calls with a floating-point result, ``with_graph``
    those with a result that has a graph.
    """

    values: dict[int, float] = field(default_factory=dict)
    made: dict[tuple[int, int], float] = field(default_factory=dict)
    gradients: dict[int, float] = field(default_factory=dict)
    passed: dict[tuple[int, int], float] = field(default_factory=dict)
    floats: set[int] = field(default_factory=set)
    with_graph: set[int] = field(default_factory=set)
    _versions: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, step: Step) -> _Sizes:
        sizes = cls()
        outcome = run(step.program, step.tensors, observer=sizes, keep=frozenset())
        sizes.gradients.update((value, _size(gradient)) for value, gradient in outcome.gradients.items())
        return sizes

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Note what the call reads, if that is new or was written since."""
        for value in call.input_refs():
            if self._versions.get(value) != values[value]._version:
                self._versions[value] = values[value]._version
                self.values[value] = _size(values[value])

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Note what the call returned or wrote into, and the gradient of what it returned once there is one."""
        for value in _results(call):
            tensor = values[value]
            self.values[value], self._versions[value] = _size(tensor), tensor._version
            self.made[index, value] = self.values[value]
            if tensor.is_floating_point():
                self.floats.add(index)
            if tensor.requires_grad:
                self.with_graph.add(index)
        for value in call.output_refs():
            tensor = values[value]
            if node_of(tensor) is not None:
                hook = partial(self._note, index, value)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _note(self, index: int, value: int, gradient: torch.Tensor) -> None:
        size = _size(gradient)
        self.passed[index, value] = max(self.passed.get((index, value), 0.0), size)
        self.gradients[value] = max(self.gradients.get(value, 0.0), size)


def explained(step: Step, healthy: Step, failure: Failure) -> Failure:
    """``failure``, an event of the whole step, with the call, the input and the rows that it begins with."""
    event = failure.event
    if event is None:
        return failure
    if event.quantity == "update":
        return at_optimizer(failure, step.program)
    ratio = event.value / event.usual if event.usual and event.usual > 0 else math.inf
    factor = min(max(abs(ratio) ** 0.25, _LEAST_FACTOR), _MOST_FACTOR) if math.isfinite(ratio) else _MOST_FACTOR
    comparison = _Comparison.of(step, healthy, factor)
    is_forward = failure.phase is Phase.FORWARD or comparison.is_off(loss_of(step.program))
    index = comparison.forward(loss_of(step.program)) if is_forward else comparison.backward()
    source, rows = comparison.off_input(step.program.calls[index]) if index is not None else None, ""
    if source is None:
        source, rows = _by_exchange(step, healthy, failure, comparison.partner)
        if source is None and not rows and index is not None:
            made = (value for value in _results(step.program.calls[index]) if comparison.is_made_off(index, value))
            rows = comparison.rows_off(next(made, None))
    elif source.role == "batch":
        rows = comparison.rows_off(source.value)
    event = replace(event, source=source.name if source is not None else None, rows=rows or None)
    failure = replace(failure, event=replace(event, **comparison.off_data(source)))
    if index is None:
        return failure
    value = failure.value if failure.value is not None else next(iter(_results(step.program.calls[index])), None)
    return replace(at_call(failure, step.program, index), value=value)


def blocked(step: Step, failure: Failure) -> Failure:
    """``failure``, no gradient for the parameter that is its value, with the call that lets none through.

    That is one that returns only zeros, or one that cuts the graph. Without such a call it stays as it is.
    """
    program, sizes = step.program, _Sizes.of(step)
    index = _zeroing(program, sizes, failure.value)
    if index is None and any(item.value == failure.value and item.requires_grad for item in program.inputs):
        index = _cutting(program, sizes, failure.value)
    return at_call(failure, program, index) if index is not None else failure


def _zeroing(program: Program, sizes: _Sizes, parameter: int | None) -> int | None:
    """The first call behind the parameter, from the loss on, that makes only zeros of something else, and of a
    gradient. A product and a mask make zeros because somebody asks for them."""
    for index in reversed(_way_to(program, loss_of(program))):
        call = program.calls[index]
        is_reached = any(sizes.passed.get((index, value), 0.0) > 0 for value in call.output_refs())
        is_wanted = short_name(call) in _BY_DESIGN
        if is_reached and not is_wanted and all(sizes.made[index, value] == 0.0 for value in call.output_refs()):
            read = [v for v in call.input_refs() if _is_silent(program, sizes, index, v)]
            ways = [_way_to(program, value, before=index) for value in read]
            if any(parameter in program.calls[number].input_refs() for way in ways for number in way):
                return index
    return None


def _cutting(program: Program, sizes: _Sizes, parameter: int | None) -> int | None:
    """The first call on the way from the parameter to the loss that has no graph, such as `detach`."""
    reached = {parameter}
    for index in _way_to(program, loss_of(program)):
        call = program.calls[index]
        if not reached.isdisjoint(call.input_refs()):
            reached.update(_results(call))
            if index in sizes.floats and index not in sizes.with_graph:
                return index
    return None


def _is_silent(program: Program, sizes: _Sizes, index: int, value: int) -> bool:
    """True if call number ``index`` reads a value that is not zero and passes no gradient on to it."""
    maker = _maker(program, index, value)
    if maker is None:
        return sizes.gradients.get(value) == 0.0 and sizes.values.get(value) != 0.0
    return sizes.passed.get((maker, value)) == 0.0 and sizes.made[maker, value] != 0.0


def _maker(program: Program, index: int, value: int) -> int | None:
    """The last call before call number ``index`` that returns a value or writes into it."""
    return next((n for n in range(index - 1, -1, -1) if value in _results(program.calls[n])), None)


def blocking_bias(step: Step, blocking: Failure) -> int | None:
    """The bias in front of the call of a `blocked` failure without which the parameter gets a gradient."""
    program, index = step.program, blocking.call_index
    while index is not None:
        read = program.calls[index].input_refs()[:1]
        index = _maker(program, index, read[0]) if read else None
        if index is not None and short_name(program.calls[index]) not in VIEWS:
            break
    vectors = {i.value for i in program.inputs if i.role == "parameter" and step.tensors[i.value].dim() == 1}
    for value in program.calls[index].input_refs() if index is not None else ():
        if value in vectors and blocking.event is not None:
            without = {**step.tensors, value: torch.zeros_like(step.tensors[value])}
            share = measured(program, without, blocking)
            if share is not None and share < blocking.event.threshold:
                return value
    return None


@dataclass
class _Comparison:
    """The sizes of a step beside those of a healthy one. ``partner`` maps its values to those of the healthy step."""

    step: Step
    sizes: _Sizes
    healthy: _Sizes
    partner: dict[int, int]
    factor: float

    @classmethod
    def of(cls, step: Step, healthy: Step, factor: float) -> _Comparison:
        """Run both."""
        return cls(step, _Sizes.of(step), _Sizes.of(healthy), _partners(step.program, healthy.program), factor)

    def is_off(self, value: int | None, *, gradient: bool = False) -> bool:
        """True if a value, or its gradient, is several times as large as in the healthy step, or not finite."""
        if value is None or value not in self.partner:
            return False
        name = "gradients" if gradient else "values"
        ours, theirs = getattr(self.sizes, name), getattr(self.healthy, name)
        now, before = ours.get(value), theirs.get(self.partner[value])
        return now is not None and before is not None and now > self.factor * before and now > 0

    def is_made_off(self, index: int, value: int) -> bool:
        """True if the result of a call, as the call left it, is several times as large as the value of the healthy
        step."""
        before = self.healthy.values.get(self.partner.get(value, -1))
        return before is not None and self.sizes.made[index, value] > max(self.factor * before, 0.0)

    def off_data(self, source: Input | None) -> dict[str, Any]:
        """The target of the loss, or else the ``source`` in the batch, if that is off: fields of a `Predicate`."""
        for index in _way_to(self.step.program, loss_of(self.step.program)):
            call = self.step.program.calls[index]
            with suppress(KeyError):
                target = argument_at(call, slot_of(call, "target"))
                if isinstance(target, Ref) and self.is_off(target.value) and self.is_of_batch(target.value):
                    return {"argument": f"target of {short_name(call)}", **self._largest(target.value)}
        is_data = source is not None and source.role == "batch" and self.is_off(source.value)
        return self._largest(source.value) if source is not None and is_data else {}

    def is_of_batch(self, value: int) -> bool:
        """True if no parameter is behind a value."""
        program = self.step.program
        behind = {value, *(read for index in _way_to(program, value) for read in program.calls[index].input_refs())}
        return not any(item.role == "parameter" and item.value in behind for item in program.inputs)

    def rows_off(self, value: int | None) -> str:
        """The rows of a value of the batch that are off at the end of the step, which may write into it."""
        if value is None or not self.is_of_batch(value):
            return ""
        tensor = run(self.step.program, self.step.tensors, keep=frozenset({value})).values.get(value)
        if tensor is None or not tensor.dim() or not tensor.is_floating_point():
            return ""
        limit = self.factor * self.healthy.values[self.partner[value]]
        sizes = tensor.detach().double().abs().reshape(len(tensor), -1).nan_to_num(math.inf).amax(1).tolist()
        return _row_words([row for row, size in enumerate(sizes) if size > limit], len(tensor))

    def _largest(self, value: int) -> dict[str, float]:
        now, before = self.sizes.values[value], self.healthy.values[self.partner[value]]
        return {"largest": now, "largest_usual": before} if math.isfinite(now) else {}

    def off_input(self, call: Call) -> Input | None:
        """The first input of the step that is off among those that a call reads."""
        inputs = {item.value: item for item in self.step.program.inputs}
        return next((inputs[v] for v in call.input_refs() if v in inputs and self.is_off(v)), None)

    def forward(self, value: int | None) -> int | None:
        """The first call on the way to a value whose result is off."""
        calls = self.step.program.calls
        way = _way_to(self.step.program, value)
        return next((n for n in way if any(self.is_made_off(n, result) for result in _results(calls[n]))), None)

    def backward(self) -> int | None:
        """The first call, from the loss on, that makes a gradient off.

        Where that call reads a result that is off, which is a factor of the gradient, the first call on the way to it.
        """
        program = self.step.program
        inputs = {item.value for item in program.inputs}
        for index in reversed(_way_to(program, loss_of(program))):
            call = program.calls[index]
            if any(self.is_off(value, gradient=True) for value in call.output_refs()):
                continue
            if any(self.is_off(value, gradient=True) for value in call.input_refs()):
                factor = next((v for v in call.input_refs() if v not in inputs and self.is_off(v)), None)
                earlier = self.forward(factor) if factor is not None else None
                return earlier if earlier is not None else index
        return None


def _way_to(program: Program, value: int | None, before: int | None = None) -> list[int]:
    """The indexes of the calls ``before`` one, or of all, that a value depends on, in order."""
    needed, kept = {value}, []
    for index in range((len(program.calls) if before is None else before) - 1, -1, -1):
        call = program.calls[index]
        if not call.is_differentiation and needed.intersection(_results(call)):
            needed.update(call.input_refs())
            kept.append(index)
    return kept[::-1]


def _results(call: Call) -> list[int]:
    """The values that a call returns or writes into; of a write through a view only the view."""
    written = iter_refs(all_written(call.target, call.args, call.kwargs))
    return list(dict.fromkeys([*call.output_refs(), *(ref.value for ref in written)]))


def _partners(program: Program, other: Program) -> dict[int, int]:
    """The values of one step beside those of another: results of like calls, and inputs that like calls read."""
    keys, theirs = ([_key(call) for call in one.calls] for one in (program, other))
    found: dict[int, int] = {}
    for start, start_other, length in SequenceMatcher(None, keys, theirs, autojunk=False).get_matching_blocks():
        for offset in range(length):
            call, partner = program.calls[start + offset], other.calls[start_other + offset]
            for mine, its in ((call.input_refs(), partner.input_refs()), (call.output_refs(), partner.output_refs())):
                if len(mine) == len(its):
                    for value, value_other in zip(mine, its, strict=True):
                        found.setdefault(value, value_other)
    return found


def _key(call: Call) -> tuple[object, ...]:
    return call.target, tuple(scope.path for scope in call.scope), call.site.line if call.site is not None else 0


def _by_exchange(step: Step, healthy: Step, failure: Failure, partner: Mapping[int, int]) -> tuple[Input | None, str]:
    """The input of the batch without which, its healthy values in its place, there is no event, and its rows: those
    with an effect of their own."""
    event = failure.event
    batch = [item for item in step.program.inputs if item.role == "batch" and step.tensors[item.value].dim()]
    pairs = [(item, healthy.tensors.get(partner.get(item.value, -1), _NOTHING)) for item in batch]
    whole = {item.value: other for item, other in pairs if _are_alike(step.tensors[item.value], other)}
    if event is None or not whole:
        return None, ""

    def value_with(tensors: Mapping[int, torch.Tensor]) -> float:
        found = measured(step.program, {**step.tensors, **tensors}, failure)
        return found if found is not None and not math.isnan(found) else math.inf

    if not value_with(whole) < event.threshold:
        return None, ""
    alone = (item for item, other in pairs if item.value in whole and value_with({item.value: other}) < event.threshold)
    source = next(alone, None)
    lengths = {len(tensor) for tensor in whole.values()}
    length = lengths.pop()
    if lengths or not 1 < length <= _MOST_ROWS:
        return source, ""
    effects = []
    for row in range(length):
        mixed = {value: step.tensors[value].detach().clone() for value in whole}
        for value, tensor in mixed.items():
            tensor[row] = whole[value][row]
        effects.append(event.value - value_with(mixed))
    most = max(effects)
    if not most > 0 or not math.isfinite(most):
        return source, ""
    return source, _row_words([row for row, effect in enumerate(effects) if effect >= _SHARE * most], length)


def _are_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_complex()
    return is_plain and tensor.shape == other.shape and tensor.dtype == other.dtype


def _row_words(rows: Sequence[int], length: int) -> str:
    """``rows 0-3, 6``; empty for none, and for a batch of a single row."""
    if not rows or length < 2:
        return ""
    words = []
    for _, group in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
        numbers = [row for _, row in group]
        words.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}")
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(words)}"


def _size(tensor: torch.Tensor) -> float:
    """The largest magnitude; infinite with a value that is not finite."""
    return math.inf if ways_of(tensor) else largest_finite(tensor)
