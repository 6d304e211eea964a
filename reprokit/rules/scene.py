"""The scene of a failure: what the origin call was given, what it made of it, and what surrounded it.

A rule asks a `Scene`: ``scene.tensor("x")`` is the origin's first operand, ``scene.makers("x")`` the calls that it
comes from. Only the calls near the origin keep their tensors (copies, without gradient). `observe` runs a step for
them; `observe_origin` takes them from the run that has located the failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from reprokit import native
from reprokit.locate.blame import locate
from reprokit.locate.failure import Failure
from reprokit.locate.samples import SamplesByValue, row_text
from reprokit.locate.spelling import VIEWS, Slot, argument_at, default_of, short_name, slot_of
from reprokit.program.convert import exact_results
from reprokit.program.dataflow import needed_calls, values_behind, writer_of
from reprokit.program.interpreter import Settings, bind_arguments
from reprokit.program.ir import Call, Program, Ref, iter_refs
from reprokit.program.observe import Copies, Trace, copied
from reprokit.program.step import Step
from reprokit.series.story import StepNumbers, failing_series

if TYPE_CHECKING:
    from reprokit.snapshot.format import Snapshot


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """A call with copies of tensors, by value."""

    call: Call
    given: Mapping[int, torch.Tensor]
    made: Mapping[int, torch.Tensor]  # its results, and what it wrote into

    @property
    def args(self) -> tuple[Any, ...]:
        return bind_arguments(self.call, self.given)[0]

    @property
    def kwargs(self) -> Mapping[str, Any]:
        return bind_arguments(self.call, self.given)[1]

    def argument(self, role: Slot) -> Any:
        """One argument, or what the function takes when it is not given; raises `KeyError`."""
        try:
            slot = slot_of(self.call, role)
        except KeyError:
            return default_of(self.call, role)
        if isinstance(slot, str):
            return self.kwargs[slot]
        if slot >= len(self.args):
            raise KeyError(role)
        return self.args[slot]

    @property
    def result(self) -> torch.Tensor | None:
        """The first tensor that came out."""
        return next(iter(self.made.values()), None)

    @property
    def exact(self) -> dict[int, torch.Tensor]:
        """What the call would have made in float64."""
        return exact_results(self.call, self.given, self.made)


@dataclass(frozen=True, slots=True)
class Branch:
    """A later call that drops elements of the origin's result."""

    call: Call
    kept: torch.Tensor  # true where they go on

    def kept_like(self, mask: torch.Tensor) -> torch.Tensor | None:
        """``kept`` in the shape of another mask; ``None`` if it does not have it."""
        try:
            return native.expand(self.kept, mask.shape)
        except RuntimeError:
            return None


@dataclass
class Scene:
    """The values around a failure in one run. ``call`` is ``None`` when an input was bad before the first call."""

    step: Step
    failure: Failure
    # Of the steps of its optimizer
    timeline: Sequence[StepNumbers] = ()
    settings: Settings = Settings()
    # The origin and what is near it, by the index of the call
    seen: Mapping[int, ObservedCall] = field(default_factory=dict)
    samples: SamplesByValue = field(default_factory=dict)
    # Of the step, where it has a single backward pass
    number: int | None = None

    @property
    def program(self) -> Program:
        return self.step.program

    @property
    def tensors(self) -> Mapping[int, torch.Tensor]:
        return self.step.tensors

    @property
    def call(self) -> Call | None:
        return self.program.calls[self.failure.call_index] if self.failure.call_index is not None else None

    @property
    def index(self) -> int:
        """The number of the origin; raises `KeyError` without one."""
        if self.failure.call_index is None:
            raise KeyError("origin")
        return self.failure.call_index

    @property
    def near(self) -> Set[int]:
        """The origin, and the two calls before it on each of its operands' ways."""
        if self.call is None:
            return set()
        if self.call.is_optimizer_step:
            return {self.index}
        makers = self.makers_of((self.call.args, dict(self.call.kwargs)), self.index, 2)
        return {self.index, *(number for number, _ in makers)}

    def see(self, trace: Trace[torch.Tensor]) -> None:
        """Take the copies of a run's trace."""
        calls = self.program.calls
        self.seen = {n: ObservedCall(calls[n], given, trace.writes.get(n, {})) for n, given in trace.reads.items()}

    @property
    def origin(self) -> ObservedCall:
        """The origin with its real arguments; raises `KeyError` without one, or if the run did not get there."""
        return self.seen[self.index]

    def given_to(self, index: int) -> Mapping[int, torch.Tensor]:
        """Copies of what a call is given, from another run if it is not near the origin."""
        if index in self.seen:
            return self.seen[index].given
        trace = Trace(self.program, copied, {index})
        trace.run(self.tensors, only=range(index + 1))
        return trace.reads.get(index, {})

    @property
    def bad(self) -> tuple[int, torch.Tensor]:
        """The bad value that the origin made, by number: the failure's, else the first result; raises `KeyError`."""
        made = self.origin.made
        for value in (self.failure.value, *made):
            if value is not None and value in made:
                return value, made[value]
        raise KeyError("result")

    def recorded(self, role: Slot) -> Any:
        """An argument of the origin as the program has it: a `Ref` for a tensor; raises `KeyError`."""
        call = self.program.calls[self.index]
        return argument_at(call, slot_of(call, role))

    def operand(self, role: Slot) -> Any:
        """An argument of the origin; raises `KeyError`."""
        return self.origin.argument(role)

    def tensor(self, role: Slot) -> torch.Tensor:
        """An argument of the origin, or its ``result``, as a tensor; raises `KeyError` if it is no number either."""
        found = self.origin.result if role == "result" else self.operand(role)
        if isinstance(found, torch.Tensor):
            return found
        if not isinstance(found, (int, float)) or isinstance(found, bool):
            raise KeyError(role)
        return native.tensor(float(found), dtype=torch.float64)

    def tensor_if_given(self, role: Slot) -> torch.Tensor | None:
        """The same; ``None`` for neither tensor nor number."""
        try:
            return self.tensor(role)
        except KeyError:
            return None

    def row_text(self, argument: Any, rows: Sequence[int], before: int | None = None) -> str:
        """Rows of an argument of a call, with their samples: ``row 7 (sample 88)``."""
        value = argument.value if isinstance(argument, Ref) else None
        return row_text(self.program, self.samples, value, rows, before)

    def arguments(self) -> list[torch.Tensor]:
        """All tensors that the origin is given."""
        call = self.origin.call
        return [self.origin.given[ref.value] for ref in dict.fromkeys(iter_refs((call.args, dict(call.kwargs))))]

    @cached_property
    def upstream(self) -> frozenset[int]:
        """The values that the failure depends on, and so may be evidence: those behind the origin, and for a gradient,
        an update or an event all behind the losses that it came from."""
        call, failure = self.call, self.failure
        if failure.event is not None and call is None:
            return frozenset(item.value for item in self.program.inputs)
        if call is None:
            return frozenset() if failure.value is None else frozenset([failure.value])
        found = values_behind(self.program.calls, call.input_refs(), self.index)
        is_local = failure.in_forward and failure.event is None
        return found if is_local else found | self._behind_losses

    def leads_to_loss(self, call: Call) -> bool:
        """True if a later call is part of what is differentiated or returned, or nothing is."""
        return not self._behind_losses or not self._behind_losses.isdisjoint(call.output_refs())

    @cached_property
    def _behind_losses(self) -> frozenset[int]:
        """The values behind what is differentiated, or returned, that the origin is part of."""
        calls, found = self.program.calls, set[int]()
        own = set(self.call.output_refs()) if self.call is not None else set()
        ends = [(number, call.input_refs()) for number, call in enumerate(calls) if call.is_differentiation]
        for end, values in (*ends, (len(calls), tuple(ref.value for ref in self.program.outputs))):
            behind = values_behind(calls, values, end)
            if self.call is not None and (end <= self.index or not own.isdisjoint(behind)):
                found |= behind
        return frozenset(found)

    def makers(self, role: Slot, depth: int = 1) -> Iterator[tuple[int, Call]]:
        """The calls that an argument of the origin comes from, views and casts skipped, up to ``depth`` back."""
        with contextlib.suppress(KeyError):
            yield from self.makers_of(self.recorded(role), self.index, depth)

    def makers_of(self, argument: Any, before: int, depth: int = 1) -> Iterator[tuple[int, Call]]:
        """The calls that an argument of call number ``before`` comes from, in the same way."""
        for ref in iter_refs(argument):
            index = writer_of(self.program.calls, ref.value, before)
            if index is None:
                continue
            call = self.program.calls[index]
            if short_name(call) in VIEWS:
                yield from self.makers_of(call.args[:1], index, depth)
                continue
            yield index, call
            if depth > 1:
                yield from self.makers_of((call.args, dict(call.kwargs)), index, depth - 1)

    @cached_property
    def branches(self) -> list[Branch]:
        """The later calls on the way to the loss that drop elements of the origin's result, from another run."""
        calls, downstream = self.program.calls, dict[int, set[int]]()
        led_to = set(calls[self.index].output_refs())
        for index in range(self.index + 1, len(calls)):
            call = calls[index]
            if led_to.isdisjoint(call.input_refs()) or call.is_differentiation or call.is_optimizer_step:
                continue
            if short_name(call) in _DROPPING and self.leads_to_loss(call):
                downstream[index] = set(led_to)
            if not call.name.endswith("_like"):
                led_to.update(call.output_refs())
        trace = Trace(self.program, copied, downstream)
        trace.run(self.tensors, only=needed_calls(calls, downstream.keys()) if downstream else ())
        found = ((index, _kept(calls[index], given, downstream[index])) for index, given in trace.reads.items())
        return [Branch(calls[index], mask) for index, masks in found for mask in masks]


def observe(content: Snapshot | Scene) -> Scene:
    """The scene of a step's failure, from one run of the calls that lead to it."""
    scene = scene_of(content)
    return _observed(scene, scene.near) if scene.call is not None else scene


def observe_failing(content: Snapshot | Scene) -> tuple[Scene, bool]:
    """The scene of a step's failure, and whether the step fails again in this one run of all its calls."""
    scene = scene_of(content)
    trace = Trace(scene.program, copied, scene.near)
    is_failing = locate(scene.program, scene.tensors, observer=trace) is not None
    scene.see(trace)
    # A step that fails in another way now may have ended before the origin.
    is_seen = scene.call is None or scene.index in scene.seen
    return scene if is_seen else _observed(scene, scene.near), is_failing


def scene_of(content: Snapshot | Scene) -> Scene:
    """The scene of a step's failure before the step was run."""
    step = content.step if isinstance(content, Scene) else Step.of(content)
    scene = Scene(step, content.failure, failing_series(content.timeline), content.settings)
    scene.samples = content.samples or {}
    if isinstance(content, Scene):
        scene.number = content.number
    elif not content.micro_step:
        scene.number = content.step
    return scene


def observe_origin(step: Step, failure: Failure, trace: Copies | None = None) -> Scene:
    """A scene of the origin alone: from the ``trace`` of the run that located the failure, where that has copied it."""
    scene = Scene(step, failure)
    if trace is not None and trace.is_complete and scene.index in trace.reads:
        scene.see(trace)
        return scene
    return _observed(scene, {scene.index})


def _observed(scene: Scene, near: Set[int]) -> Scene:
    """The scene with copies around the calls ``near`` the origin, from a run of the calls that they need."""
    only = needed_calls(scene.program.calls, near)
    trace = Trace(scene.program, copied, near)
    trace.run(scene.tensors, only=range(scene.index + 1) if only is None else only)
    scene.see(trace)
    return scene


_DROPPING = ("where", "masked_fill", "mul", "__getitem__")


def _kept(call: Call, values: Mapping[int, torch.Tensor], downstream: set[int]) -> Iterator[torch.Tensor]:
    """Masks of the elements that a call keeps of a value downstream of the origin; none if it drops none."""
    for value, mask in _masks(call, values):
        if isinstance(value, Ref) and value.value in downstream:
            yield native.bool(mask)


def _masks(call: Call, values: Mapping[int, torch.Tensor]) -> Iterator[tuple[Any, torch.Tensor]]:
    """The arguments of which a call drops elements, each with a mask of those that it keeps."""

    def tensor_of(argument: Any) -> torch.Tensor | None:
        found = values.get(argument.value) if isinstance(argument, Ref) else argument
        return found if isinstance(found, torch.Tensor) else None

    name, args = short_name(call), [*call.args, *call.kwargs.values()]
    if name == "where" and len(args) == 3:
        chosen, condition, other = args
        if "Tensor" not in call.target:
            condition, chosen, other = args
        mask = tensor_of(condition)
        if mask is not None:
            yield chosen, mask
            yield other, ~native.bool(mask)
    elif name == "masked_fill" and len(args) >= 3:
        mask = tensor_of(args[1])
        if mask is not None:
            yield args[0], ~native.bool(mask)
    elif name == "mul" and len(args) == 2:
        for value, other in (args, reversed(args)):
            factor = tensor_of(other)
            if factor is not None and bool(native.any(factor == 0)):
                yield value, factor != 0
    elif call.name == "__getitem__":
        mask = tensor_of(args[1])
        if mask is not None and mask.dtype is torch.bool:
            yield args[0], mask
