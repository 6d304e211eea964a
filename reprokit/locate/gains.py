"""The first call of a step that is unlike the same call of a healthy step: where an event begins inside its step.

Both steps are run under observation. A value is off if its largest magnitude is several times that of the healthy step.
Forward, the first call on the way to the loss whose result is off is the origin: either an input of the step that it
reads is off, or its own gain is. Backward, it is the first call, from the loss on, that turns a gradient like the
healthy one into one that is off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial
from itertools import groupby
from typing import Any

import torch

from reprokit.locate.calls import VIEWS, argument_at, short_name, slot_of
from reprokit.locate.failure import Failure, module_of
from reprokit.locate.quantity import at_optimizer, loss_of, measured, measured_in
from reprokit.locate.ways import largest_finite, ways_of
from reprokit.program.functions import all_written, display_name
from reprokit.program.interpreter import Tensors, run
from reprokit.program.ir import Call, Input, Phase, Program, Ref, iter_refs

_LEAST_FACTOR, _MOST_FACTOR = 1.5, 10.0  # by which a value is off; batches differ by less
_MOST_ROWS = 64  # of a batch that are exchanged one by one; each costs a run
_BY_DESIGN = frozenset({"mul", "where", "masked_fill"})
_SHARE = 0.1  # of the largest effect of a row, which makes another row one that carries it, too


@dataclass(frozen=True)
class Step:
    """A step as a program with its tensors."""

    program: Program
    tensors: Tensors


@dataclass
class _Sizes:
    """Observes a run: the largest magnitude of every value and of its gradient, by value number.

    ``made`` and ``passed`` have those of every result as its call left it, by the index of the call and the value: a
    value that is written in place has several.
    """

    values: dict[int, float] = field(default_factory=dict)
    made: dict[tuple[int, int], float] = field(default_factory=dict)
    gradients: dict[int, float] = field(default_factory=dict)
    passed: dict[tuple[int, int], float] = field(default_factory=dict)
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
        for value in call.output_refs():
            tensor = values[value]
            if tensor.requires_grad and tensor.grad_fn is not None:
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
    ratio = event.value / event.usual if event.usual and event.usual > 0 else math.inf
    factor = min(max(abs(ratio) ** 0.25, _LEAST_FACTOR), _MOST_FACTOR) if math.isfinite(ratio) else _MOST_FACTOR
    if event.quantity == "update":
        return at_optimizer(failure, step.program)
    comparison = _Comparison.of(step, healthy, factor)
    is_forward = failure.phase is Phase.FORWARD or comparison.is_off(loss_of(step.program))
    found = comparison.forward(loss_of(step.program)) if is_forward else comparison.backward()
    index, source = found if found is not None else (None, None)
    rows = ""
    if event.quantity in ("loss", "gradient norm"):
        source, rows = _carried_by(step, healthy, failure, comparison, source, index)
        if source is None and not rows and index is not None:
            rows = _rows_of_result(step, healthy, comparison, index)
    event = replace(event, source=source.name if source is not None else None, rows=rows or None)
    event = replace(event, **comparison.off_data(source))
    if index is None:
        return replace(failure, event=event)
    call = step.program.calls[index]
    return replace(
        failure,
        event=event,
        call=display_name(call.target),
        call_index=index,
        module=module_of(call),
        site=call.site,
        value=failure.value if failure.value is not None else next(iter(_results(call)), None),
    )


def zeroed(step: Step, failure: Failure) -> Failure:
    """``failure``, a gradient of zeros for the parameter that is its value, with the call that lets nothing through.

    That is the first one, from the loss on, that makes only zeros of something else, and of a gradient. Without such a
    call the failure stays as it is. A product and a mask make zeros because somebody asks for them.
    """
    sizes, program = _Sizes.of(step), step.program
    for index in reversed(_way_to(program, loss_of(program))):
        call = program.calls[index]
        is_reached = any(sizes.passed.get((index, value), 0.0) > 0 for value in call.output_refs())
        is_wanted = short_name(call) in _BY_DESIGN
        if is_reached and not is_wanted and all(sizes.made[index, value] == 0.0 for value in call.output_refs()):
            read = [v for v in call.input_refs() if _is_silent(program, sizes, index, v)]
            ways = [_way_to(program, value, before=index) for value in read]
            if any(failure.value in program.calls[number].input_refs() for way in ways for number in way):
                name = display_name(call.target)
                return replace(failure, call=name, call_index=index, module=module_of(call), site=call.site)
    return failure


def _is_silent(program: Program, sizes: _Sizes, index: int, value: int) -> bool:
    """True if call number ``index`` reads a value that is not zero and passes no gradient on to it."""
    maker = _maker(program, index, value)
    if maker is None:
        return sizes.gradients.get(value) == 0.0 and sizes.values.get(value) != 0.0
    return sizes.passed.get((maker, value)) == 0.0 and sizes.made[maker, value] != 0.0


def _maker(program: Program, index: int, value: int) -> int | None:
    """The last call before call number ``index`` that returns a value or writes into it."""
    return next((n for n in range(index - 1, -1, -1) if value in _results(program.calls[n])), None)


def blocked(step: Step, failure: Failure) -> Failure:
    """``failure``, no gradient for the parameter that is its value, with the call that lets none through.

    That is one that returns only zeros, or one that cuts the graph. Without such a call it stays as it is.
    """
    found = zeroed(step, failure)
    return found if found.call is not None else _cut(step, failure)


def is_alive_without(step: Step, blocking: Failure) -> bool:
    """True if the parameter of a `blocked` failure would get a gradient if the call let it through unchanged.

    It would not where what the layer itself reads is all zeros, or where an earlier call blocks as well.
    """
    event, through = blocking.event, _Through(blocking.call_index)
    outcome = run(step.program, step.tensors, observer=through, keep=frozenset())
    share = measured_in(outcome, step.program, step.tensors, blocking)
    return event is not None and share is not None and share < event.threshold


def blocking_bias(step: Step, blocking: Failure) -> int | None:
    """The bias in front of the call of a `blocked` failure without which the parameter gets a gradient."""
    program, index = step.program, blocking.call_index
    while index is not None:
        read = program.calls[index].input_refs()[:1]
        index = _maker(program, index, read[0]) if read else None
        if index is not None and short_name(program.calls[index]) not in VIEWS:
            break
    vectors = {i.value for i in program.inputs if i.role == "parameter" and step.tensors[i.value].dim() == 1}
    read = program.calls[index].input_refs() if index is not None else ()
    return next((value for value in read if value in vectors and not _lasts_without(step, blocking, value)), None)


def _lasts_without(step: Step, failure: Failure, value: int) -> bool:
    """True if an event lasts with zeros in the place of one input."""
    found = measured(step.program, {**step.tensors, value: torch.zeros_like(step.tensors[value])}, failure)
    return failure.event is None or found is None or found >= failure.event.threshold


@dataclass
class _Through:
    """Observes a run: passes the gradient of what one call returns to what it reads, where that gets only zeros."""

    index: int | None
    _arrived: list[torch.Tensor] = field(default_factory=list)

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Pass the gradient on once it has arrived."""
        for value in call.input_refs() if index == self.index else ():
            if values[value].requires_grad:
                values[value].register_hook(self._passed)  # type: ignore[no-untyped-call]

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Keep the gradient that arrives."""
        for value in call.output_refs() if index == self.index else ():
            if values[value].requires_grad:
                values[value].register_hook(self._arrived.append)  # type: ignore[no-untyped-call]

    def _passed(self, gradient: torch.Tensor) -> torch.Tensor:
        fitting = (arrived for arrived in self._arrived if arrived.shape == gradient.shape)
        return gradient if gradient.any() else next(fitting, gradient).to(gradient.dtype)


def _cut(step: Step, failure: Failure) -> Failure:
    """``failure`` with the first call on the way from its parameter to the loss that has no graph, such as `detach`."""
    program, flags = step.program, _Flags()
    if not any(item.value == failure.value and item.requires_grad for item in program.inputs):
        return failure
    run(program, step.tensors, observer=flags, keep=frozenset())
    reached = {failure.value}
    for index in _way_to(program, loss_of(program)):
        call = program.calls[index]
        if reached.isdisjoint(call.input_refs()):
            continue
        results = _results(call)
        reached.update(results)
        if any(flags.is_float.get(value, False) for value in results) and index not in flags.with_graph:
            name = display_name(call.target)
            return replace(failure, call=name, call_index=index, module=module_of(call), site=call.site)
    return failure


@dataclass
class _Flags:
    """Observes a run: which results have floating-point elements, and which calls made one with a graph."""

    is_float: dict[int, bool] = field(default_factory=dict)
    with_graph: set[int] = field(default_factory=set)

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Nothing is noted before a call."""

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Note what the call returned or wrote into."""
        for value in _results(call):
            self.is_float[value] = values[value].is_floating_point()
            if values[value].requires_grad:
                self.with_graph.add(index)


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
        program = self.step.program
        given = {item.value for item in program.inputs if item.role == "parameter"}
        for index in _way_to(program, loss_of(program)):
            call = program.calls[index]
            with suppress(KeyError):
                target = argument_at(call, slot_of(call, "target"))
                if (
                    isinstance(target, Ref)
                    and self.is_off(target.value)
                    and given.isdisjoint(self._behind(target.value))
                ):
                    return {"argument": f"target of {short_name(call)}", **self._largest(target.value)}
        is_data = source is not None and source.role == "batch" and self.is_off(source.value)
        return self._largest(source.value) if source is not None and is_data else {}

    def _behind(self, value: int) -> set[int]:
        program = self.step.program
        return {value, *(v for n in _way_to(program, value) for v in program.calls[n].input_refs())}

    def _largest(self, value: int) -> dict[str, float]:
        now, before = self.sizes.values[value], self.healthy.values[self.partner[value]]
        return {"largest": now, "largest_usual": before} if math.isfinite(now) else {}

    def forward(self, value: int | None) -> tuple[int, Input | None] | None:
        """The first call on the way to a value whose result is off, and the input of the step that is, if one is."""
        program = self.step.program
        inputs = {item.value: item for item in program.inputs}
        for index in _way_to(program, value):
            call = program.calls[index]
            if any(self.is_made_off(index, result) for result in _results(call)):
                return index, next((inputs[v] for v in call.input_refs() if v in inputs and self.is_off(v)), None)
        return None

    def backward(self) -> tuple[int, Input | None] | None:
        """The first call, from the loss on, that makes a gradient off, and the input of the step that it reads.

        Where that call reads a result that is off, which is a factor of the gradient, the first call on the way to it.
        """
        program = self.step.program
        inputs = {item.value: item for item in program.inputs}
        for index in reversed(_way_to(program, loss_of(program))):
            call = program.calls[index]
            if any(self.is_off(value, gradient=True) for value in call.output_refs()):
                continue
            if any(self.is_off(value, gradient=True) for value in call.input_refs()):
                factor = next((v for v in call.input_refs() if v not in inputs and self.is_off(v)), None)
                earlier = self.forward(factor) if factor is not None else None
                if earlier is not None:
                    return earlier
                return index, next((inputs[v] for v in call.input_refs() if v in inputs and self.is_off(v)), None)
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


def _carried_by(
    step: Step, healthy: Step, failure: Failure, comparison: _Comparison, source: Input | None, index: int | None
) -> tuple[Input | None, str]:
    """The input of the batch that carries an event, and its rows.

    That is the one that is off; else the one without which, its healthy values in its place, there is no event.
    """
    if source is not None and source.role != "batch":
        return source, ""
    batch = [item for item in step.program.inputs if item.role == "batch" and step.tensors[item.value].dim()]
    pairs = {item.value: healthy.tensors.get(comparison.partner.get(item.value, -1)) for item in batch}
    alike = [item for item in batch if _are_alike(step.tensors[item.value], pairs[item.value])]
    if source is not None:
        if source not in alike:
            return source, ""
        mine = _read_at(step, index, source.value)
        if mine is None or not mine.is_floating_point():
            return source, ""
        limit = comparison.factor * comparison.healthy.values[comparison.partner[source.value]]
        return source, row_words(_rows_above(mine, limit), len(mine))
    return _by_exchange(step, failure, {item: t for item in alike if (t := pairs[item.value]) is not None})


def _rows_of_result(step: Step, healthy: Step, comparison: _Comparison, index: int) -> str:
    """The rows that are off of a result which was computed from the batch alone."""
    program, roles = step.program, {item.value: item.role for item in step.program.inputs}
    value = next((value for value in _results(program.calls[index]) if comparison.is_made_off(index, value)), None)
    read = {v for number in _way_to(program, value) for v in program.calls[number].input_refs()}
    if value is None or "parameter" in map(roles.get, read):
        return ""
    tensor = run(program, step.tensors, keep=frozenset({value})).values.get(value)
    if tensor is None or not tensor.dim():
        return ""
    limit = comparison.factor * comparison.healthy.values[comparison.partner[value]]
    return row_words(_rows_above(tensor, limit), len(tensor))


@dataclass
class _Reading:
    """Observes a run: the tensor that one call reads, as it is then."""

    index: int | None
    value: int
    tensor: torch.Tensor | None = None

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Copy the tensor."""
        if index == self.index:
            self.tensor = values[self.value].detach().clone()

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Nothing is noted after a call."""


def _read_at(step: Step, index: int | None, value: int) -> torch.Tensor | None:
    reading = _Reading(index, value)
    run(step.program, step.tensors, observer=reading, keep=frozenset())
    return reading.tensor


def _rows_above(tensor: torch.Tensor, limit: float) -> list[int]:
    """The rows that hold a magnitude above a limit, or one that is not finite."""
    sizes = tensor.detach().double().abs().reshape(len(tensor), -1).nan_to_num(math.inf).amax(1).tolist()
    return [row for row, size in enumerate(sizes) if size > limit]


def _by_exchange(step: Step, failure: Failure, healthy: Mapping[Input, torch.Tensor]) -> tuple[Input | None, str]:
    """Exchange inputs for their healthy values, then single rows of all of them."""
    event = failure.event
    if event is None or not healthy:
        return None, ""

    def value_with(tensors: Mapping[int, torch.Tensor]) -> float:
        found = measured(step.program, {**step.tensors, **tensors}, failure)
        return found if found is not None and not math.isnan(found) else math.inf

    whole = {item.value: tensor for item, tensor in healthy.items()}
    if not value_with(whole) < event.threshold:
        return None, ""
    alone = (item for item in healthy if len(healthy) > 1 and value_with({item.value: healthy[item]}) < event.threshold)
    source = next(iter(healthy)) if len(healthy) == 1 else next(alone, None)
    lengths = {len(tensor) for tensor in healthy.values()}
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
    return source, row_words([row for row, effect in enumerate(effects) if effect >= _SHARE * most], length)


def _are_alike(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_complex()
    return is_plain and other is not None and tensor.shape == other.shape and tensor.dtype == other.dtype


def row_words(rows: Sequence[int], length: int) -> str:
    """``rows 0-3, 6``; empty for none, and for a batch of a single row."""
    if not rows or length < 2:
        return ""
    stretches = list(_stretches(rows))
    words = [f"{first}-{last}" if last > first else f"{first}" for first, last in stretches]
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(words)}"


def _stretches(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    for _, group in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
        numbers = [row for _, row in group]
        yield numbers[0], numbers[-1]


def _size(tensor: torch.Tensor) -> float:
    """The largest magnitude; infinite with a value that is not finite."""
    return math.inf if ways_of(tensor) else largest_finite(tensor)
