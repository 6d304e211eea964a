"""The scene of a failure: what the origin call was given, what it made of it, and what surrounded it.

One run of the program is observed. Only the calls near the origin keep their tensors (copies, without gradient).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from reprokit.errors import pass_on
from reprokit.locate.failure import Failure
from reprokit.locate.spelling import VIEWS, Slot, argument_at, default_of, short_name, slot_of
from reprokit.locate.ways import ways_of
from reprokit.program.dataflow import calls_after, needed_calls, written_in_place
from reprokit.program.functions import function_named
from reprokit.program.interpreter import Settings, Tensors, bind_arguments, run
from reprokit.program.ir import Call, Phase, Program, Ref, iter_refs, map_leaves
from reprokit.series.story import StepNumbers, failing_series

if TYPE_CHECKING:
    from reprokit.snapshot.format import Snapshot


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """A call with the real arguments it was run with, and its results by value number."""

    call: Call
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: dict[int, torch.Tensor] = field(default_factory=dict)

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
        return next(iter(self.results.values()), None)


@dataclass(frozen=True, slots=True)
class Branch:
    """A later call that drops elements of the origin's result: ``kept`` is true where they go on."""

    call: Call
    kept: torch.Tensor

    def kept_like(self, mask: torch.Tensor) -> torch.Tensor | None:
        """``kept`` in the shape of another mask; ``None`` if it does not have it."""
        try:
            return self.kept.expand(mask.shape)
        except RuntimeError:
            return None


@dataclass
class Scene:
    """The values around a failure in one run. ``call`` is ``None`` when an input was bad before the first call."""

    program: Program
    tensors: Tensors
    failure: Failure
    timeline: Sequence[StepNumbers] = ()
    settings: Settings = Settings()
    seen: dict[int, ObservedCall] = field(default_factory=dict)
    floats: set[int] = field(default_factory=set)  # values that hold floating-point numbers
    branches: list[Branch] = field(default_factory=list)
    has_failed: bool = False  # a call raised, or the origin's result or gradient was not finite

    @property
    def call(self) -> Call | None:
        return self.program.calls[self.failure.call_index] if self.failure.call_index is not None else None

    @property
    def index(self) -> int:
        """The number of the origin; raises `KeyError` without one."""
        if self.failure.call_index is None:
            raise KeyError("origin")
        return self.failure.call_index

    def recorded(self, role: Slot) -> Any:
        """An argument of the origin as the program has it: a `Ref` for a tensor; raises `KeyError`."""
        call = self.program.calls[self.index]
        return argument_at(call, slot_of(call, role))

    @property
    def origin(self) -> ObservedCall:
        """The origin with its real arguments; raises `KeyError` without one, or if the run did not get there."""
        return self.seen[self.index]

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
        return torch.tensor(float(found), dtype=torch.float64)

    def tensor_if_given(self, role: Slot) -> torch.Tensor | None:
        """The same; ``None`` for neither tensor nor number."""
        try:
            return self.tensor(role)
        except KeyError:
            return None

    def arguments(self) -> list[torch.Tensor]:
        """All tensors that the origin is given."""
        found: list[Any] = []
        map_leaves((self.origin.args, dict(self.origin.kwargs)), found.append)
        return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]

    def writer(self, value: int, before: int) -> int | None:
        """The last call before ``before`` whose output this value is."""
        calls = self.program.calls
        return next((index for index in range(before - 1, -1, -1) if value in calls[index].output_refs()), None)

    @cached_property
    def upstream(self) -> frozenset[int]:
        """The values that the failure depends on, and so may be evidence: those behind the origin, and for a gradient,
        an update or an event all behind the losses that it came from."""
        call, failure = self.call, self.failure
        if failure.event is not None and call is None:
            return frozenset(item.value for item in self.program.inputs)
        if call is None:
            return frozenset() if failure.value is None else frozenset([failure.value])
        found = self._ancestors(call.input_refs(), self.index)
        is_local = failure.phase == Phase.FORWARD and failure.event is None
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
            behind = self._ancestors(values, end)
            if self.call is not None and (end <= self.index or not own.isdisjoint(behind)):
                found |= behind
        return frozenset(found)

    def _ancestors(self, values: Iterable[int], before: int) -> frozenset[int]:
        calls = (self.program.calls[number] for number in self.behind(values, before))
        return frozenset(values).union(*(call.input_refs() for call in calls))

    def behind(self, values: Iterable[int], before: int) -> list[int]:
        """The calls before ``before`` that values depend on, in their order."""
        needed, found = set(values), list[int]()
        for number in range(before - 1, -1, -1):
            call = self.program.calls[number]
            if not needed.isdisjoint(call.output_refs()):
                found.append(number)
                needed.update(call.input_refs())
        return found[::-1]

    def makers(self, role: Slot, depth: int = 1) -> Iterator[tuple[int, Call]]:
        """The calls that an argument of the origin comes from, views and casts skipped, up to ``depth`` back."""
        with contextlib.suppress(KeyError):
            yield from self.makers_of(self.recorded(role), self.index, depth)

    def makers_of(self, argument: Any, before: int, depth: int = 1) -> Iterator[tuple[int, Call]]:
        """The calls that an argument of call number ``before`` comes from, in the same way."""
        for ref in iter_refs(argument):
            index = self.writer(ref.value, before)
            if index is None:
                continue
            call = self.program.calls[index]
            if short_name(call) in VIEWS:
                yield from self.makers_of(call.args[:1], index, depth)
                continue
            yield index, call
            if depth > 1:
                yield from self.makers_of((call.args, dict(call.kwargs)), index, depth - 1)


def recompute(seen: ObservedCall) -> torch.Tensor | None:
    """The first result of a call if it had been made in float64; ``None`` where that cannot be had."""
    if short_name(seen.call) in ("half", "to", "bfloat16", "type", "type_as", "float"):
        first = seen.args[0] if seen.args else None
        return first.double() if isinstance(first, torch.Tensor) and first.is_floating_point() else None

    def doubled(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    try:
        args, kwargs = map_leaves((seen.args, dict(seen.kwargs)), doubled)
        kwargs.pop("dtype", None)
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            result = function_named(seen.call.target)(*args, **kwargs)
    except Exception as error:  # kernels refuse in as many ways as there are functions
        pass_on(error)
        return None
    while isinstance(result, (list, tuple)) and result:
        result = result[0]
    return result if isinstance(result, torch.Tensor) else None


def observe(step: Snapshot | Scene) -> Scene:
    """The scene of a step's failure, from one run of the calls that lead to it and go on from it."""
    scene = Scene(step.program, step.tensors, step.failure, failing_series(step.timeline), step.settings)
    outcome = run(step.program, step.tensors, observer=_Watch(scene), keep=frozenset(), only=_shown(scene))
    scene.has_failed = scene.has_failed or outcome.error is not None
    scene.branches = [branch for branch in scene.branches if scene.leads_to_loss(branch.call)]
    return scene


def _shown(scene: Scene) -> list[int] | None:
    """The origin and what its results get to, in a forward failure up to the backward pass, and what these depend on;
    ``None`` for all calls."""
    failure, calls = scene.failure, scene.program.calls
    if failure.call_index is None:
        return None
    after = calls_after(calls, failure.call_index)
    if failure.phase == Phase.FORWARD and not failure.is_derivative:
        after = [index for index in after if calls[index].phase == Phase.FORWARD]
    return needed_calls(calls, {failure.call_index, *after})


class _Watch:
    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._near = _near(scene)
        self._downstream: set[int] = set()

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Copy what the calls near the origin are given."""
        if index in self._near:
            args, kwargs = map_leaves(bind_arguments(call, values), _copied)
            self._scene.seen[index] = ObservedCall(call, args, kwargs)
        failure = self._scene.failure
        bad = values.get(failure.value) if index == failure.call_index and failure.value is not None else None
        if failure.is_derivative and bad is not None and bad.requires_grad:
            bad.register_hook(self._note_bad)  # type: ignore[no-untyped-call]
        if self._downstream.intersection(call.input_refs()):
            kept = (mask.detach().clone() for mask in _kept(call, values, self._downstream))
            self._scene.branches.extend(Branch(call, mask) for mask in kept)

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Note results near the origin."""
        made = {value: values[value] for value in call.output_refs() if value in values}
        if index in self._near:
            self._scene.seen[index].results.update(map_leaves(made, _copied))
        is_origin = index == self._scene.failure.call_index
        if is_origin and not self._scene.failure.is_derivative:
            self._note_bad(*(values[value] for value in written_in_place(call)), *made.values())
        if is_origin or (self._downstream.intersection(call.input_refs()) and not call.name.endswith("_like")):
            self._downstream.update(made)
        self._scene.floats.update(value for value, tensor in made.items() if tensor.is_floating_point())

    def _note_bad(self, *tensors: torch.Tensor) -> None:
        self._scene.has_failed = self._scene.has_failed or any(map(ways_of, tensors))


def _near(scene: Scene) -> set[int]:
    """The origin, and the calls that its arguments come from."""
    index, call = scene.failure.call_index, scene.call
    if index is None or call is None:
        return set()
    found = {index}
    if not call.is_optimizer_step:
        found.update(number for number, _ in scene.makers_of((call.args, dict(call.kwargs)), index, 2))
    return found


def _kept(call: Call, values: Mapping[int, torch.Tensor], downstream: set[int]) -> Iterator[torch.Tensor]:
    """Masks of the elements that a call keeps of a value downstream of the origin; none if it drops none."""

    def mask_of(argument: Any) -> torch.Tensor | None:
        found = values.get(argument.value) if isinstance(argument, Ref) else argument
        return found if isinstance(found, torch.Tensor) else None

    name, args = short_name(call), [*call.args, *call.kwargs.values()]
    kept: list[tuple[Any, torch.Tensor | None]] = []  # a value of the program with a mask of it
    if name == "where" and len(args) == 3:
        chosen, condition, other = args if "Tensor" in call.target else (args[1], args[0], args[2])
        mask = mask_of(condition)
        kept = [(chosen, mask), (other, ~mask.bool() if mask is not None else None)]
    elif name == "masked_fill" and len(args) >= 3:
        mask = mask_of(args[1])
        kept = [(args[0], ~mask.bool() if mask is not None else None)]
    elif name == "mul" and len(args) == 2:
        factors = [mask_of(args[1]), mask_of(args[0])]
        kept = [(args[n], f != 0) for n, f in enumerate(factors) if f is not None and bool((f == 0).any())]
    elif call.name == "__getitem__":
        mask = mask_of(args[1])
        kept = [(args[0], mask)] if mask is not None and mask.dtype is torch.bool else []
    for value, mask in kept:
        if mask is not None and isinstance(value, Ref) and value.value in downstream:
            yield mask.bool()


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
