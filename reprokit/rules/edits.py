"""Edits for fixes, written as torch code on the origin (`EditedCall`): what the code calls takes the origin's place.

An edit keeps every value number that later calls read, so only the edited calls change. The same edit is made at all
calls from one line of the user's code, because that is what a person would do. An edit does not claim to help; the
edited step is run for that.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reprokit.locate.domains import DOMAINS, number_named
from reprokit.locate.spelling import Slot, argument_at, short_name, slot_of
from reprokit.program.functions import is_in_place
from reprokit.program.ir import Call, Device, Mode, Program, Ref, Symbol, map_leaves
from reprokit.rules.rule import Edited, of_scene
from reprokit.rules.scene import Scene

Code = Callable[["EditedCall"], "EditedValue | None"]
_TESTS_FOR_NAN = ("isnan", "isfinite", "eq", "ne", "gt", "ge", "lt", "le")
_TESTS = {"at_most": "__le__", "above": "__gt__", "at_least": "__ge__", "equal": "__eq__"}


@dataclass(frozen=True, slots=True)
class EditedValue:
    """A tensor of the step in the code of a fix: its methods are calls in the origin's place."""

    ref: Ref
    make: Callable[..., EditedValue]

    def __getattr__(self, method: str) -> Callable[..., EditedValue]:
        return functools.partial(self.make, f"torch.Tensor.{method}", self)


@dataclass(slots=True)
class EditedCall:
    """The call that a fix is written on, and the calls ``made`` in its place."""

    call: Call
    index: int
    numbers: Iterator[int]  # of values that nothing uses yet
    made: list[Call] = field(default_factory=list)

    def __getitem__(self, role: Slot) -> EditedValue:
        """The tensor that an argument is; raises `KeyError` for a number or none."""
        found = argument_at(self.call, slot_of(self.call, role))
        if not isinstance(found, Ref):
            raise KeyError(role)
        return EditedValue(found, self.make)

    def make(self, target: str, *args: Any, like: Call | None = None, **kwargs: Any) -> EditedValue:
        """A new call in the mode of the origin, or of ``like``."""
        like = like or self.call
        mode = Mode(like.mode.grad, like.mode.autocast, like.mode.inference)
        return self.add(replace(like, target=target, args=args, kwargs=kwargs, mode=mode, outputs=Ref(0)))

    def add(self, call: Call) -> EditedValue:
        """A call with a result of its own."""
        args, kwargs = map_leaves(
            (call.args, dict(call.kwargs)), lambda leaf: leaf.ref if isinstance(leaf, EditedValue) else leaf
        )
        outputs = Ref(next(self.numbers)) if isinstance(call.outputs, Ref) else call.outputs
        self.made.append(replace(call, args=args, kwargs=kwargs, outputs=outputs))
        return EditedValue(outputs if isinstance(outputs, Ref) else Ref(-1), self.make)

    def given(self, role: Slot, value: Any) -> EditedValue:
        """The call with another argument. One that writes into the argument finds the new contents in it."""
        slot: Slot = role
        with suppress(KeyError):  # it was not given
            slot = slot_of(self.call, role)
        if slot == 0 and isinstance(value, EditedValue) and is_in_place(self.call.target):
            value.make("torch.Tensor.copy_", self[0], value)
            return self.add(self.call)
        if isinstance(slot, int):
            args = (*self.call.args[:slot], value, *self.call.args[slot + 1 :])
            return self.add(replace(self.call, args=args))
        return self.add(replace(self.call, kwargs={**self.call.kwargs, slot: value}))

    def finish(self, result: EditedValue | None) -> list[Call]:
        """The calls made, of which ``result`` takes the number of the origin's result."""
        if result is None or not isinstance(self.call.outputs, Ref):
            return self.made
        return [call.substituted({result.ref.value: self.call.outputs}, outputs=True) for call in self.made]


def traced(scene: Scene, code: Code, places: Collection[int] = ()) -> Edited | None:
    """The step with ``code`` in place of these calls; by default of the origin, where it has to apply, and those like
    it."""
    program = scene.program
    needed = frozenset(places or [scene.index])
    where = frozenset(places or _siblings(program, scene.index))
    numbers, calls, changed = itertools.count(program.next_value()), list[Call](), set[int]()
    for index, call in enumerate(program.calls):
        made = list[Call]()
        if index in where:
            with suppress(KeyError):
                at = EditedCall(call, index, numbers)
                made = at.finish(code(at))
        changed.update([index] if made else [])
        calls += made or [call]
    return Edited(replace(program, calls=tuple(calls)), scene.tensors) if needed & changed else None


def _siblings(program: Program, index: int) -> list[int]:
    """The call, and all others of the same function that come from the same part of the user's statement.

    Parts differ in the numbers that the statement itself shows: in ``((x - m) ** 2).mean() ** 0.5`` are two powers.
    """
    origin = program.calls[index]
    if origin.site is None:
        return [index]
    key = _place(origin)
    return [number for number, call in enumerate(program.calls) if _place(call) == key]


def _place(call: Call) -> tuple[Any, ...]:
    site = call.site
    if site is None:
        return call.target, None
    numbers = [value for value in call.args[1:2] if isinstance(value, (int, float))]
    shown = [value for value in numbers if re.search(rf"(?<![\w.]){re.escape(str(value))}(?![\w.])", site.text)]
    return call.target, tuple(shown), site.file, site.first_line, site.library


@of_scene
def on_call(scene: Scene, code: Code) -> Edited | None:
    """Any torch code on the origin: ``on_call(lambda call: call.given("x", call["x"].abs()))``."""
    return traced(scene, code)


@of_scene
def clamp(
    scene: Scene, role: Slot = "x", *, min: str | float | None = None, max: str | float | None = None
) -> Edited | None:
    """Clamp an argument. From below only, it does not apply to a divisor that is rightly negative somewhere."""
    if max is None and role == "denominator" and bool((scene.tensor(role) < 0).any()):
        return None
    bounds = {"min": min, "max": max}
    numbers = {name: _number(scene, role, value) for name, value in bounds.items() if value is not None}
    return traced(scene, lambda call: call.given(role, call[role].clamp(**numbers)))


@of_scene
def plus(scene: Scene, role: Slot = "x") -> Edited | None:
    """Add a small number to an argument without negative elements: there it would move the edge, not take it away."""
    number = _number(scene, role, "eps")
    if bool((scene.tensor(role) < 0).any()):
        return None
    return traced(scene, lambda call: call.given(role, call[role].add(number)))


@of_scene
def away_from_zero(scene: Scene, role: Slot = "denominator") -> Edited | None:
    """Put ones in place of the zeros in an argument."""

    def code(call: EditedCall) -> EditedValue:
        return call.given(role, call[role].masked_fill(call.make("torch.Tensor.__eq__", call[role], 0), 1.0))

    return traced(scene, code)


def _number(scene: Scene, role: Slot, value: str | float) -> float:
    """A number, or a word for one, in the dtype of an argument."""
    x = scene.tensor_if_given(role)
    return number_named(value, x.dtype if x is not None and x.is_floating_point() else torch.float32)


@of_scene
def inside(scene: Scene) -> Edited | None:
    """The other half of a safe ``where``: give the origin a harmless argument where its result is dropped anyway."""
    domain = DOMAINS[short_name(scene.origin.call)]
    edge, role = domain.edge, domain.operand
    if edge is None:
        return None
    bound = _number(scene, role, edge.bound)

    def code(call: EditedCall) -> EditedValue:
        tested = call.make("torch.abs", call[role]) if edge.size else call[role]
        dropped = call.make(f"torch.Tensor.{_TESTS[edge.test]}", tested, bound)
        return call.given(role, call[role].masked_fill(dropped, domain.harmless))

    return traced(scene, code)


@of_scene
def mask_first(scene: Scene) -> Edited | None:
    """Zeros in place of NaN values that mark what is missing, where they first meet a value that needs a gradient."""
    program, drop = scene.program, scene.failure.drop
    if drop is None:
        return None
    marked, places = {drop.value}, list[int]()
    needing = {item.value for item in program.inputs if item.requires_grad}
    for index, call in enumerate(program.calls[: drop.call_index]):
        is_met = not marked.isdisjoint(call.input_refs()) and short_name(call) not in _TESTS_FOR_NAN
        if not needing.isdisjoint(call.input_refs()):
            needing.update(call.output_refs())
            places += [index] if is_met else []
        elif is_met:
            marked.update(call.output_refs())

    def code(call: EditedCall) -> EditedValue:
        meeting = sorted(marked.intersection(call.call.input_refs()))
        new = {value: EditedValue(Ref(value), call.make).nan_to_num(0.0).ref for value in meeting}
        return call.add(call.call.substituted(new))

    return traced(scene, code, places) if places else None


@of_scene
def minus_max(scene: Scene) -> Edited | None:
    """Subtract the largest element from an argument, which a later normalisation takes out again."""
    return traced(scene, lambda call: call.given("x", call["x"].sub(call.make("torch.amax", call["x"]))))


@of_scene
def set_argument(scene: Scene, name: str, value: Any) -> Edited | None:
    """Give the origin another value for one of its own arguments."""
    return traced(scene, lambda call: call.given(name, value))


@of_scene
def set_option(scene: Scene, name: str, value: float) -> Edited | None:
    """Another hyperparameter for the optimizer's step."""

    def code(call: EditedCall) -> EditedValue | None:
        options = argument_at(call.call, "options")
        changed = [{**group, name: value} if name in group else group for group in options]
        return call.given("options", changed) if changed != options else None

    return traced(scene, code)


@of_scene
def jitter(scene: Scene, value: float, *, spread: bool = False) -> Edited | None:
    """Add a small multiple of the identity to a matrix, or with ``spread`` a small diagonal without equal entries."""
    x = scene.tensor("x")
    if x.dim() < 2:
        return None
    amount = value * max(1.0, float(x.abs().max()))
    ends = (amount, 2 * amount) if spread else (amount, amount)
    kind: dict[str, Any] = {"dtype": Symbol(str(x.dtype)), "device": Device(str(x.device))}

    def code(call: EditedCall) -> EditedValue:
        diagonal = call.make("torch.diag", call.make("torch.linspace", *ends, x.shape[-1], **kind))
        return call.given("x", call["x"].add(diagonal))

    return traced(scene, code)


@of_scene
def zeros_for_bad_input(scene: Scene) -> Edited | None:
    """Zeros where an input is not finite."""
    value = scene.failure.value
    if value is None or scene.failure.call is not None:
        return None
    changed = scene.tensors[value].detach().nan_to_num(0.0, 0.0, 0.0)
    return Edited(scene.program, {**scene.tensors, value: changed}, is_local=False)


@of_scene
def biased(scene: Scene) -> Edited | None:
    """A standard deviation or variance divided by n instead of n - 1."""

    def code(at: EditedCall) -> EditedValue:
        call = at.call
        flags = [item for item in call.args if isinstance(item, bool)]  # unbiased, keepdim
        args = tuple(item for item in call.args if not isinstance(item, bool))
        kwargs = {name: item for name, item in call.kwargs.items() if name != "unbiased"}
        kwargs |= {"keepdim": flags[1]} if len(flags) > 1 else {}
        return at.add(replace(call, args=args, kwargs={**kwargs, "correction": 0}))

    return traced(scene, code)


@of_scene
def log_softmax(scene: Scene) -> Edited | None:
    """``log_softmax`` in place of the logarithm of a softmax."""

    def code(at: EditedCall) -> EditedValue | None:
        writer = scene.writer(at[0].ref.value, at.index)
        made = scene.program.calls[writer] if writer is not None else at.call
        if short_name(made) != "softmax":
            return None
        target = made.target.replace("softmax", "log_softmax")
        return at.add(replace(at.call, target=target, args=made.args, kwargs=made.kwargs))

    return traced(scene, code)


@of_scene
def sum_over_count(scene: Scene) -> Edited | None:
    """A mean as the sum over the number of elements, at least one."""

    def code(at: EditedCall) -> EditedValue | None:
        call = at.call
        if "mean" not in call.target or not isinstance(call.outputs, Ref):
            return None
        function = call.target.replace("mean", "sum")
        total = at.add(replace(call, target=function))
        count = at.make(function, at.make("torch.ones_like", at[0]), *call.args[1:], **call.kwargs)
        return total.div(count.clamp(min=1))

    return traced(scene, code)


@of_scene
def loss_over_count(scene: Scene) -> Edited | None:
    """A mean loss as the sum over the number of targets that count, at least one."""

    def code(call: EditedCall) -> EditedValue:
        total = call.given("reduction", "sum")
        kept = call.make("torch.ne", call["target"], call.call.kwargs.get("ignore_index", -100))
        return total.div(kept.sum().clamp(min=1))

    return traced(scene, code)


@of_scene
def guarded_weight_norm(scene: Scene) -> Edited | None:
    """Weight normalisation with a norm that is never zero."""
    weight = scene.tensor("x")

    def code(at: EditedCall) -> EditedValue:
        kept = at.call.args[2] if len(at.call.args) > 2 else at.call.kwargs.get("dim", 0)
        dims = [n for n in range(weight.dim()) if kept == -1 or n != kept % weight.dim()]
        size = at.make("torch.linalg.vector_norm", at[0], 2, dims, True)
        return at[0].div(size.clamp(min=number_named("eps", weight.dtype))).mul(at[1])

    return traced(scene, code)


@of_scene
def call_in_float32(scene: Scene) -> Edited | None:
    """Do the origin in float32, with autocast off, and go on from its float32 result."""
    inputs = {value for value, tensor in scene.tensors.items() if tensor.is_floating_point()}

    def code(at: EditedCall) -> EditedValue | None:
        call = at.call
        if call.is_optimizer_step or not isinstance(call.outputs, Ref):
            return None
        plain = replace(call, mode=replace(call.mode, autocast=()))
        floats = [value for value in call.input_refs() if value in inputs | scene.floats]
        cast = plain.substituted({v: at.make("torch.Tensor.float", Ref(v), like=plain).ref for v in floats})
        return at.add(replace(cast, kwargs={name: value for name, value in cast.kwargs.items() if name != "dtype"}))

    is_in_place_call = scene.call is None or scene.call.name.endswith("_") or scene.call.name.startswith("__i")
    return None if is_in_place_call else traced(scene, code)


@of_scene
def result_at_most(scene: Scene) -> Edited | None:
    """Clamp the origin's result to the largest number of its dtype."""
    limit = number_named("max", scene.tensor("result").dtype)

    def code(at: EditedCall) -> EditedValue | None:
        outputs = at.call.outputs
        if not isinstance(outputs, Ref) or outputs.value in at.call.input_refs():
            return None
        return at.make("torch.clamp", at.add(at.call), -limit, limit)

    return traced(scene, code)


@of_scene
def step_in(scene: Scene, dtype: torch.dtype) -> Edited | None:
    """Do the whole step in another dtype than float16, autocast included."""
    name = str(dtype)
    halves = {"torch.Tensor.half": f"torch.Tensor.{'float' if dtype is torch.float32 else 'bfloat16'}"}

    def change(leaf: Any) -> Any:
        return replace(leaf, name=name) if getattr(leaf, "name", None) == "torch.float16" else leaf

    calls = []
    for call in scene.program.calls:
        args, kwargs = map_leaves((call.args, dict(call.kwargs)), change)
        autocast = tuple((device, name if was == "torch.float16" else was) for device, was in call.mode.autocast)
        mode = replace(call.mode, autocast=autocast if dtype is not torch.float32 else ())
        calls.append(replace(call, target=halves.get(call.target, call.target), args=args, kwargs=kwargs, mode=mode))
    program = replace(scene.program, calls=tuple(calls))
    tensors = {value: t.to(dtype) if t.dtype is torch.float16 else t for value, t in scene.tensors.items()}
    has_half = any(tensor.dtype is torch.float16 for tensor in scene.tensors.values())
    return Edited(program, tensors, is_local=False) if has_half or program != scene.program else None
