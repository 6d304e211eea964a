"""The rewrites that the catalogue's fixes are made of: each turns a captured step into one that may not fail.

A rewrite says nothing about whether it helps; the edited step is run for that. It returns ``None`` where it does not
apply, for instance when the argument is a number and not a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from reprokit.locate.edits import Chain, Edited, Editor, at_siblings, converted, guarded, with_argument
from reprokit.locate.scene import Scene, Slot, argument_at, short_name, slot_of
from reprokit.locate.signs import EDGES
from reprokit.program.ir import Call, Ref, Symbol, iter_refs, substitute

Rewrite = Callable[..., Edited | None]
REWRITES: dict[str, Rewrite] = {}
_NORM = "torch.linalg.vector_norm"
_SAFE = {"acos": 0.0, "asin": 0.0, "atanh": 0.0, "acosh": 2.0, "exp": 0.0, "expm1": 0.0, "exp2": 0.0, "sinh": 0.0,
         "cosh": 0.0}  # fmt: skip


def rewrite(function: Rewrite) -> Rewrite:
    """Register a rewrite under its name."""
    REWRITES[function.__name__] = function
    return function


def number_named(name: str | float, dtype: torch.dtype) -> float:
    """A number of the catalogue: itself, or a word for one that depends on the dtype."""
    if not isinstance(name, str):
        return float(name)
    limits = torch.finfo(dtype)
    return {
        "eps": float(limits.eps), "tiny": float(limits.tiny), "min": float(limits.min), "max": float(limits.max),
        "below_one": 1.0 - 4 * float(limits.eps), "above_minus_one": 4 * float(limits.eps) - 1.0,
        "log_max": math.log(float(limits.max)) - 1.0, "small": 1e-3 if limits.bits == 16 else 1e-6,
    }[name]  # fmt: skip


@rewrite
def at_least(scene: Scene, operand: Slot = "x", value: str | float = "eps") -> Edited | None:
    """Clamp an argument from below. Does not apply to a divisor that is rightly negative somewhere."""
    x = scene.tensor(operand)
    if x is None or (operand == "denominator" and bool((x < 0).any())):
        return None
    return _guard(scene, operand, [("torch.Tensor.clamp", (), {"min": _number(scene, operand, value)})])


@rewrite
def between(scene: Scene, low: str | float, high: str | float, operand: Slot = "x") -> Edited | None:
    """Clamp an argument on both sides."""
    bounds: dict[str, Any] = {"min": _number(scene, operand, low), "max": _number(scene, operand, high)}
    return _guard(scene, operand, [("torch.Tensor.clamp", (), bounds)])


@rewrite
def finite_arguments(scene: Scene, bound: float = 1e4) -> Edited | None:
    """Clamp both arguments, so that infinities in them become large numbers."""

    def change(editor: Editor, call: Call) -> list[Call] | None:
        made, changed = list[Call](), call
        for role in ("x", "y"):
            try:
                slot = slot_of(changed, role)
            except (KeyError, StopIteration):
                continue
            steps: Chain = [("torch.Tensor.clamp", (), {"min": -bound, "max": bound})]
            guarding = guarded(editor, changed, slot, steps)
            if guarding is not None:
                *before, changed = guarding
                made += before
        return [*made, changed] if made else None

    return _everywhere(scene, change)


@rewrite
def at_most(scene: Scene, operand: Slot = "x", value: str | float = "log_max") -> Edited | None:
    """Clamp an argument from above."""
    return _guard(scene, operand, [("torch.Tensor.clamp", (), {"max": _number(scene, operand, value)})])


@rewrite
def plus(scene: Scene, operand: Slot = "x", value: str | float = "eps") -> Edited | None:
    """Add a small number to an argument."""
    x = scene.tensor(operand)
    if x is None or bool((x < 0).any()):
        return None  # an eps moves the edge, it does not take it away
    return _guard(scene, operand, [("torch.Tensor.add", (_number(scene, operand, value),), {})])


@rewrite
def away_from_zero(scene: Scene, operand: Slot = "denominator", value: str | float = 1.0) -> Edited | None:
    """Replace the zeros in an argument by a number."""

    def change(editor: Editor, call: Call) -> list[Call] | None:
        slot = slot_of(call, operand)
        argument = argument_at(call, slot)
        if not isinstance(argument, Ref):
            return None
        found, mask = editor.call(call, "torch.eq", argument, 0)
        fill: Chain = [("torch.Tensor.masked_fill", (mask, _number(scene, operand, value)), {})]
        made = guarded(editor, call, slot, fill)
        return [found, *made] if made is not None else None

    return _everywhere(scene, change)


@rewrite
def inside(scene: Scene) -> Edited | None:
    """The other half of a safe ``where``: give the origin a harmless argument where its result is dropped anyway."""
    call = scene.call
    if call is None or short_name(call) not in EDGES:
        return None
    operand, _ = EDGES[short_name(call)]
    tests = {
        **dict.fromkeys(("acos", "asin", "atanh"), ("torch.ge", 1.0)),
        **dict.fromkeys(("exp", "expm1", "exp2", "sinh", "cosh"), ("torch.ge", _number(scene, operand, "log_max"))),
        **dict.fromkeys(("div", "reciprocal"), ("torch.eq", 0.0)),
        "log1p": ("torch.le", -1.0),
        "acosh": ("torch.le", 1.0),
    }
    test, bound = tests.get(short_name(call), ("torch.le", 0.0))

    def change(editor: Editor, call: Call) -> list[Call] | None:
        slot = slot_of(call, operand)
        argument = argument_at(call, slot)
        if not isinstance(argument, Ref):
            return None
        before, tested = [], argument
        if short_name(call) in ("acos", "asin", "atanh"):
            size, tested = editor.call(call, "torch.abs", argument)
            before.append(size)
        found, mask = editor.call(call, test, tested, bound)
        fill: Chain = [("torch.Tensor.masked_fill", (mask, _SAFE.get(short_name(call), 1.0)), {})]
        made = guarded(editor, call, slot, fill)
        return [*before, found, *made] if made is not None else None

    return _everywhere(scene, change)


@rewrite
def minus_max(scene: Scene, operand: Slot = "x") -> Edited | None:
    """Subtract the largest element from an argument, which a later normalisation takes out again."""

    def change(editor: Editor, call: Call) -> list[Call] | None:
        slot = slot_of(call, operand)
        argument = argument_at(call, slot)
        if not isinstance(argument, Ref):
            return None
        largest, top = editor.call(call, "torch.amax", argument)
        made = guarded(editor, call, slot, [("torch.Tensor.sub", (top,), {})])
        return [largest, *made] if made is not None else None

    return _everywhere(scene, change)


@rewrite
def set_argument(scene: Scene, name: str, value: Any, position: int | None = None) -> Edited | None:
    """Give the origin another value for one of its own arguments."""

    def change(_: Editor, call: Call) -> list[Call]:
        by_position = position is not None and len(call.args) > position and name not in call.kwargs
        return [with_argument(call, position if by_position and position is not None else name, value)]

    return _everywhere(scene, change)


@rewrite
def biased(scene: Scene) -> Edited | None:
    """A standard deviation or variance divided by n instead of n - 1."""

    def change(_: Editor, call: Call) -> list[Call]:
        args = tuple(item for item in call.args if not isinstance(item, bool))
        kwargs = {name: item for name, item in call.kwargs.items() if name != "unbiased"}
        return [replace(call, args=args, kwargs={**kwargs, "correction": 0})]

    return _everywhere(scene, change)


@rewrite
def set_option(scene: Scene, name: str, value: float) -> Edited | None:
    """Another hyperparameter for the optimizer's step."""
    call = scene.call
    if call is None or not call.is_optimizer_step or not any(name in group for group in call.kwargs["options"]):
        return None
    options = [{**group, name: value} if name in group else group for group in call.kwargs["options"]]
    return _at_origin(scene, [replace(call, kwargs={**call.kwargs, "options": options})])


@rewrite
def log_softmax(scene: Scene) -> Edited | None:
    """``log_softmax`` in place of the logarithm of a softmax."""
    program = scene.program

    def change(_: Editor, call: Call) -> list[Call] | None:
        index = next((n for n, other in enumerate(program.calls) if other is call), len(program.calls))
        for ref in iter_refs(call.args[:1]):
            writer = scene.writer(ref.value, index)
            if writer is not None and short_name(program.calls[writer]) == "softmax":
                made = program.calls[writer]
                name = made.target.replace("softmax", "log_softmax")
                return [replace(call, target=name, args=made.args, kwargs=made.kwargs)]
        return None

    return _everywhere(scene, change)


@rewrite
def xlogy(scene: Scene) -> Edited | None:
    """``torch.xlogy`` in place of a product with a logarithm."""
    index = scene.failure.call_index
    if index is None or scene.call is None:
        return None
    program, editor, found = scene.program, Editor(scene.program), False
    logs = {call.outputs.value: call.args[0] for call in program.calls
            if short_name(call) == "log" and isinstance(call.outputs, Ref) and call.args}  # fmt: skip
    for number, call in enumerate(program.calls):
        if short_name(call) != "mul" or len(call.args) != 2 or call.name.startswith("__i") or call.name.endswith("_"):
            continue
        for factor, logarithm in (call.args, call.args[::-1]):
            if isinstance(logarithm, Ref) and logarithm.value in logs and isinstance(factor, Ref):
                editor.put(number, [replace(call, target="torch.xlogy", args=(factor, logs[logarithm.value]))])
                found = True
    return Edited(editor.finish(), scene.tensors) if found else None


@rewrite
def call_in_float32(scene: Scene) -> Edited | None:
    """Do the origin in float32, with autocast off, and go on from its float32 result."""

    def change(editor: Editor, call: Call) -> list[Call] | None:
        if call.is_optimizer_step or not isinstance(call.outputs, Ref):
            return None
        mode, made, seen = replace(call.mode, autocast=()), list[Call](), dict[int, Ref]()
        plain = replace(call, mode=mode)
        for value in call.input_refs():
            cast, seen[value] = editor.call(plain, "torch.Tensor.float", Ref(value))
            made.append(cast)
        floats = {value for value in seen if _is_float(scene, value)}
        made = [cast for cast, value in zip(made, seen, strict=True) if value in floats]
        args, kwargs = substitute((call.args, dict(call.kwargs)), {value: seen[value] for value in floats})
        return [*made, replace(plain, args=args, kwargs={k: v for k, v in kwargs.items() if k != "dtype"})]

    if scene.call is None or scene.call.name.endswith("_") or scene.call.name.startswith("__i"):
        return None
    return _everywhere(scene, change)


@rewrite
def step_in(scene: Scene, dtype: str) -> Edited | None:
    """Do the whole step in another dtype than float16."""
    kinds = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    has_half = any(t.dtype is torch.float16 for t in scene.tensors.values())
    has_autocast = any("torch.float16" in dict(call.mode.autocast).values() for call in scene.program.calls)
    return converted(scene.program, scene.tensors, kinds[dtype]) if has_half or has_autocast else None


@rewrite
def result_at_most(scene: Scene) -> Edited | None:
    """Clamp the origin's result to the largest number of its dtype."""
    result = scene.origin.result if scene.origin is not None else None
    if result is None:
        return None
    limit = number_named("max", result.dtype)

    def change(editor: Editor, call: Call) -> list[Call] | None:
        if not isinstance(call.outputs, Ref) or call.outputs.value in call.input_refs():
            return None
        raw = editor.value()
        clamp, _ = editor.call(call, "torch.clamp", raw, -limit, limit, to=call.outputs)
        return [replace(call, outputs=raw), clamp]

    return _everywhere(scene, change)


@rewrite
def sum_over_count(scene: Scene) -> Edited | None:
    """A mean as the sum over the number of elements, at least one."""
    x = scene.tensor("x")
    result = scene.origin.result if scene.origin is not None else None
    if x is None or result is None:
        return None
    count = max(1, x.numel() // max(1, result.numel()))

    def change(editor: Editor, call: Call) -> list[Call] | None:
        if not isinstance(call.outputs, Ref):
            return None
        total = editor.value()
        divide, _ = editor.call(call, "torch.Tensor.div", total, count, to=call.outputs)
        return [replace(call, target=call.target.replace("nanmean", "sum").replace("mean", "sum"), outputs=total),
                divide]  # fmt: skip

    return _at_origin_by(scene, change)


@rewrite
def loss_over_count(scene: Scene) -> Edited | None:
    """A mean loss as the sum over the number of targets that count, at least one."""

    def change(editor: Editor, call: Call) -> list[Call] | None:
        try:
            target = argument_at(call, slot_of(call, "target"))
        except (KeyError, IndexError):
            return None
        if not isinstance(target, Ref) or not isinstance(call.outputs, Ref):
            return None
        ignored = call.kwargs.get("ignore_index", -100)
        total = editor.value()
        loss = replace(call, kwargs={**call.kwargs, "reduction": "sum"}, outputs=total)
        different, kept = editor.call(call, "torch.ne", target, ignored)
        number, count = editor.call(call, "torch.Tensor.sum", kept)
        one, divisor = editor.call(call, "torch.Tensor.clamp", count, min=1)
        divide, _ = editor.call(call, "torch.Tensor.div", total, divisor, to=call.outputs)
        return [loss, different, number, one, divide]

    return _everywhere(scene, change)


@rewrite
def jitter(scene: Scene, value: float, spread: bool = False) -> Edited | None:
    """Add a small multiple of the identity to a matrix, or with ``spread`` a small diagonal without equal entries."""
    x = scene.tensor("x")
    if x is None or x.dim() < 2:
        return None
    size, amount = x.shape[-1], value * max(1.0, float(x.abs().max()))
    values = (amount, 2 * amount) if spread else (amount, amount)

    def change(editor: Editor, call: Call) -> list[Call] | None:
        slot = slot_of(call, "x")
        argument = argument_at(call, slot)
        if not isinstance(argument, Ref):
            return None
        line, numbers = editor.call(call, "torch.linspace", *values, size, dtype=Symbol(str(x.dtype)))
        matrix, diagonal = editor.call(call, "torch.diag", numbers)
        made = guarded(editor, call, slot, [("torch.Tensor.add", (diagonal,), {})])
        return [line, matrix, *made] if made is not None else None

    return _everywhere(scene, change)


@rewrite
def guarded_weight_norm(scene: Scene) -> Edited | None:
    """Weight normalisation with a norm that is never zero."""
    weight = scene.tensor("x")
    if weight is None:
        return None

    def change(editor: Editor, call: Call) -> list[Call] | None:
        if len(call.args) < 2 or not isinstance(call.outputs, Ref):
            return None
        direction, gain, *rest = call.args
        kept = rest[0] if rest else call.kwargs.get("dim", 0)
        dims = [n for n in range(weight.dim()) if n != kept % weight.dim()] if kept != -1 else list(range(weight.dim()))
        norm, size = editor.call(call, _NORM, direction, 2, dims, True)
        bound, divisor = editor.call(call, "torch.Tensor.clamp", size, min=number_named("eps", weight.dtype))
        unit, normed = editor.call(call, "torch.Tensor.div", direction, divisor)
        scaled, _ = editor.call(call, "torch.Tensor.mul", normed, gain, to=call.outputs)
        return [norm, bound, unit, scaled]

    return _everywhere(scene, change)


@rewrite
def zeros_for_bad_input(scene: Scene) -> Edited | None:
    """Zeros where an input is not finite."""
    failure = scene.failure
    if failure.value is None or failure.call is not None:
        return None
    value = failure.value
    changed = scene.tensors[value].detach().nan_to_num(0.0, 0.0, 0.0)
    return Edited(scene.program, {**scene.tensors, value: changed})


def _guard(scene: Scene, operand: Slot, steps: Chain) -> Edited | None:
    return _everywhere(scene, lambda editor, call: guarded(editor, call, slot_of(call, operand), steps))


def _everywhere(scene: Scene, change: Callable[[Editor, Call], list[Call] | None]) -> Edited | None:
    index = scene.failure.call_index
    if index is None:
        return None

    def lenient(editor: Editor, call: Call) -> list[Call] | None:
        try:
            return change(editor, call)
        except (KeyError, IndexError, StopIteration):
            return None

    program = at_siblings(scene.program, index, lenient)
    return Edited(program, scene.tensors) if program is not None else None


def _at_origin_by(scene: Scene, change: Callable[[Editor, Call], list[Call] | None]) -> Edited | None:
    editor, index = Editor(scene.program), scene.failure.call_index
    made = change(editor, scene.call) if scene.call is not None else None
    if made is None or index is None:
        return None
    editor.put(index, made)
    return Edited(editor.finish(), scene.tensors)


def _at_origin(scene: Scene, calls: list[Call]) -> Edited | None:
    return _at_origin_by(scene, lambda _editor, _call: calls)


def _number(scene: Scene, operand: Slot, value: str | float) -> float:
    x = scene.tensor(operand)
    dtype = x.dtype if x is not None and x.is_floating_point() else torch.float32
    return number_named(value, dtype)


def _is_float(scene: Scene, value: int) -> bool:
    """Whether a value that the origin, or a call like it, reads is a tensor of floats."""
    for item in scene.program.inputs:
        if item.value == value:
            return scene.tensors[value].is_floating_point()
    writer: Mapping[int, Any] = scene.peaks
    index = scene.writer(value, len(scene.program.calls))
    return index is None or index in writer
