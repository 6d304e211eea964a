"""Edits for fixes, written as torch code on the origin: what the code calls takes the origin's place.

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
from typing import Any, Concatenate, ParamSpec

import torch

from reprokit import native
from reprokit.locate.domains import DOMAINS, number_named
from reprokit.locate.spelling import Slot, argument_at, short_name, slot_of
from reprokit.program.dataflow import writer_of
from reprokit.program.functions import is_in_place
from reprokit.program.ir import Call, Device, Mode, Program, Ref, Symbol, map_leaves
from reprokit.program.step import Step
from reprokit.rules.rule import Edited, Fix, OfScene, of_scene
from reprokit.rules.scene import Scene

P = ParamSpec("P")
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

    scene: Scene
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

    def number(self, value: str | float, role: Slot = "x") -> float:
        """A number, or a word for one in the dtype of an argument."""
        x = self.scene.tensor_if_given(role)
        return number_named(value, x.dtype if x is not None and native.is_floating_point(x) else torch.float32)

    def make(self, target: str, *args: Any, like: Call | None = None, **kwargs: Any) -> EditedValue:
        """A new call in the mode of the origin, or of ``like``."""
        like = like or self.call
        mode = Mode(like.mode.grad, like.mode.autocast, like.mode.inference)
        return self.add(replace(like, target=target, args=args, kwargs=kwargs, mode=mode, outputs=Ref(0)))

    def add(self, call: Call, **changes: Any) -> EditedValue:
        """A call, with changes of its fields, that has a result of its own."""

        def plain(leaf: Any) -> Any:
            return leaf.ref if isinstance(leaf, EditedValue) else leaf

        call = replace(call, **changes)
        args, kwargs = map_leaves((call.args, dict(call.kwargs)), plain)
        outputs = Ref(next(self.numbers)) if isinstance(call.outputs, Ref) else call.outputs
        self.made.append(replace(call, args=args, kwargs=kwargs, outputs=outputs))
        return EditedValue(outputs if isinstance(outputs, Ref) else Ref(-1), self.make)

    def given(self, role: Slot, value: Any) -> EditedValue:
        """The call with another argument. One that writes into the argument finds the new contents in it."""
        slot: Slot = role
        with suppress(KeyError):  # it was not given
            slot = slot_of(self.call, role)
        if isinstance(slot, str):
            return self.add(self.call, kwargs={**self.call.kwargs, slot: value})
        if slot == 0 and isinstance(value, EditedValue) and is_in_place(self.call.target):
            self[0].copy_(value)
            return self.add(self.call)
        return self.add(self.call, args=(*self.call.args[:slot], value, *self.call.args[slot + 1 :]))

    def finish(self, result: EditedValue | None) -> list[Call]:
        """The calls made, of which ``result`` takes the number of the origin's result."""
        if result is None or not isinstance(self.call.outputs, Ref):
            return self.made if result is not None else []
        return [call.substituted({result.ref.value: self.call.outputs}, outputs=True) for call in self.made]


def edit(code: Callable[Concatenate[EditedCall, P], EditedValue | None]) -> Callable[P, OfScene[Edited | None]]:
    """Torch code on one call as an edit of the step, at the origin, where it has to apply, and the calls like it."""

    @functools.wraps(code)
    def made(scene: Scene, /, *args: P.args, **kwargs: P.kwargs) -> Edited | None:
        where = _siblings(scene.program, scene.index)
        return _traced(scene, lambda call: code(call, *args, **kwargs), where, scene.index)

    return of_scene(made)


def _traced(
    scene: Scene, code: Callable[[EditedCall], EditedValue | None], where: Collection[int], needed: int
) -> Edited | None:
    """The step with ``code`` in place of the calls ``where``; ``None`` if it does not apply to the call ``needed``."""
    program, calls, changed = scene.program, list[Call](), set[int]()
    numbers = itertools.count(program.next_value())
    for index, call in enumerate(program.calls):
        made = list[Call]()
        if index in where:
            with suppress(KeyError):
                at = EditedCall(scene, call, index, numbers)
                made = at.finish(code(at))
        changed.update([index] if made else [])
        calls += made or [call]
    return Edited(scene.step.with_calls(calls)) if needed in changed else None


def _siblings(program: Program, index: int) -> list[int]:
    """The call, and all others of the same function that come from the same part of the user's statement.

    Parts differ in the numbers that the statement itself shows: in ``((x - m) ** 2).mean() ** 0.5`` are two powers.
    """
    key = _place(program.calls[index])
    is_known = program.calls[index].site is not None
    return [number for number, call in enumerate(program.calls) if _place(call) == key] if is_known else [index]


def _place(call: Call) -> tuple[Any, ...]:
    site = call.site
    if site is None:
        return call.target, None
    numbers = [value for value in call.args[1:2] if isinstance(value, (int, float))]
    shown = [value for value in numbers if re.search(rf"(?<![\w.]){re.escape(str(value))}(?![\w.])", site.text)]
    return call.target, tuple(shown), site.file, site.first_line, site.library


@edit
def on_call(call: EditedCall, code: Callable[[EditedCall], EditedValue | None]) -> EditedValue | None:
    """Any torch code: ``on_call(lambda call: call.given("x", call["x"].abs()))``."""
    return code(call)


@edit
def clamp(
    call: EditedCall, role: Slot = "x", *, min: str | float | None = None, max: str | float | None = None
) -> EditedValue | None:
    """Clamp an argument. From below only, it does not apply to a divisor that is rightly negative somewhere."""
    if max is None and role == "denominator" and bool(native.any(call.scene.tensor(role) < 0)):
        return None
    bounds = {"min": min, "max": max}
    numbers = {name: call.number(value, role) for name, value in bounds.items() if value is not None}
    return call.given(role, call[role].clamp(**numbers))


@edit
def plus(call: EditedCall, role: Slot = "x") -> EditedValue | None:
    """Add a small number to an argument without negative elements: there it would move the edge, not take it away."""
    is_negative = bool(native.any(call.scene.tensor(role) < 0))
    return call.given(role, call[role].add(call.number("eps", role))) if not is_negative else None


@edit
def away_from_zero(call: EditedCall, role: Slot = "denominator") -> EditedValue:
    """Put ones in place of the zeros in an argument."""
    return call.given(role, call[role].masked_fill(call.make("torch.Tensor.__eq__", call[role], 0), 1.0))


@edit
def inside(call: EditedCall) -> EditedValue | None:
    """The other half of a safe ``where``: give the origin a harmless argument where its result is dropped anyway."""
    domain = DOMAINS[short_name(call.call)]
    edge, x = domain.points[0], call[domain.operand]
    if len(domain.points) > 1:
        return None
    tested = call.make("torch.abs", x) if edge.size else x
    dropped = call.make(f"torch.Tensor.{_TESTS[edge.test]}", tested, call.number(edge.bound, domain.operand))
    return call.given(domain.operand, x.masked_fill(dropped, domain.harmless))


@edit
def set_argument(call: EditedCall, name: str, value: Any) -> EditedValue:
    return call.given(name, value)


@edit
def set_option(call: EditedCall, name: str, value: float) -> EditedValue | None:
    """Another hyperparameter for the optimizer's step."""
    options = argument_at(call.call, "options")
    changed = [{**group, name: value} if name in group else group for group in options]
    return call.given("options", changed) if changed != options else None


@edit
def jitter(call: EditedCall, value: float, *, spread: bool = False) -> EditedValue | None:
    """Add a small multiple of the identity to a matrix, or with ``spread`` a small diagonal without equal entries."""
    x = call.scene.tensor("x")
    if native.dim(x) < 2:
        return None
    amount = value * max(1.0, float(native.max(native.abs(x))))
    kind: dict[str, Any] = {"dtype": Symbol(str(x.dtype)), "device": Device(str(x.device))}
    entries = call.make("torch.linspace", amount, 2 * amount if spread else amount, x.shape[-1], **kind)
    return call.given("x", call["x"].add(call.make("torch.diag", entries)))


@edit
def biased(call: EditedCall) -> EditedValue:
    """A standard deviation or variance divided by n instead of n - 1."""
    flags = [item for item in call.call.args if isinstance(item, bool)]  # unbiased, keepdim
    args = tuple(item for item in call.call.args if not isinstance(item, bool))
    kwargs = {name: item for name, item in call.call.kwargs.items() if name != "unbiased"}
    kwargs |= {"keepdim": flags[1]} if len(flags) > 1 else {}
    return call.add(call.call, args=args, kwargs={**kwargs, "correction": 0})


@edit
def log_softmax(call: EditedCall) -> EditedValue | None:
    """``log_softmax`` in place of the logarithm of a softmax."""
    writer = writer_of(call.scene.program.calls, call[0].ref.value, call.index)
    made = call.scene.program.calls[writer] if writer is not None else call.call
    if short_name(made) != "softmax":
        return None
    target = made.target.replace("softmax", "log_softmax")
    return call.add(call.call, target=target, args=made.args, kwargs=made.kwargs)


@edit
def sum_over_count(call: EditedCall) -> EditedValue | None:
    """A mean as the sum over the number of elements, at least one."""
    if "mean" not in call.call.target or not isinstance(call.call.outputs, Ref):
        return None
    total = call.add(call.call, target=call.call.target.replace("mean", "sum"))
    ones = call.make("torch.ones_like", call[0])
    count = call.make(call.made[0].target, ones, *call.call.args[1:], **call.call.kwargs)
    return total.div(count.clamp(min=1))


@edit
def loss_over_count(call: EditedCall) -> EditedValue:
    """A mean loss as the sum over the number of targets that count, at least one."""
    total = call.given("reduction", "sum")
    kept = call.make("torch.ne", call["target"], call.call.kwargs.get("ignore_index", -100))
    return total.div(kept.sum().clamp(min=1))


@edit
def guarded_weight_norm(call: EditedCall) -> EditedValue:
    """Weight normalisation with a norm that is never zero."""
    num_dims = native.dim(call.scene.tensor("x"))
    kept = call.call.args[2] if len(call.call.args) > 2 else call.call.kwargs.get("dim", 0)
    dims = [n for n in range(num_dims) if kept == -1 or n != kept % num_dims]
    size = call.make("torch.linalg.vector_norm", call[0], 2, dims, True)
    return call[0].div(size.clamp(min=call.number("eps"))).mul(call[1])


@edit
def call_in_float32(call: EditedCall) -> EditedValue | None:
    """Do the origin in float32, with autocast off, and go on from its float32 result."""
    scene, name = call.scene, call.call.name
    is_written_to = name.endswith("_") or name.startswith("__i")
    if call.call.is_optimizer_step or not isinstance(call.call.outputs, Ref) or is_written_to:
        return None
    plain = replace(call.call, mode=replace(call.call.mode, autocast=()))
    given = scene.given_to(call.index)
    casts = {}
    for value in plain.input_refs():
        if value in given and native.is_floating_point(given[value]):
            casts[value] = call.make("torch.Tensor.float", Ref(value), like=plain).ref
    cast = plain.substituted(casts)
    return call.add(cast, kwargs={name: value for name, value in cast.kwargs.items() if name != "dtype"})


@edit
def result_at_most(call: EditedCall) -> EditedValue | None:
    """Clamp the origin's result to the largest number of its dtype."""
    outputs, limit = call.call.outputs, call.number("max", "result")
    if not isinstance(outputs, Ref) or outputs.value in call.call.input_refs():
        return None
    return call.make("torch.clamp", call.add(call.call), -limit, limit)


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
    tensors = {value: native.to(t, dtype) if t.dtype is torch.float16 else t for value, t in scene.tensors.items()}
    has_half = any(tensor.dtype is torch.float16 for tensor in scene.tensors.values())
    return Edited(Step(program, tensors), is_local=False) if has_half or program != scene.program else None


AWAY_FROM_ZERO = [
    Fix("keep the divisor above a small number", clamp("denominator", min="eps")),
    Fix("divide by one where the divisor is zero", away_from_zero()),
]
IN_FLOAT32 = Fix("use float32 in place of float16", step_in(torch.float32))
WIDER = [Fix("use bfloat16 in place of float16", step_in(torch.bfloat16)), IN_FLOAT32]
