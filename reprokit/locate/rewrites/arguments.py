"""Rewrites of the origin's arguments: guards in front of it, other values for its own options."""

from __future__ import annotations

import contextlib
from typing import Any

from reprokit.locate.calls import Slot, argument_at, short_name, slot_of
from reprokit.locate.domains import DOMAINS
from reprokit.locate.edits import Edited, Editor, everywhere, guard, number_for, rewrite, with_argument
from reprokit.locate.scene import Scene
from reprokit.program.ir import Call, Device, Ref, Symbol

_TESTS_FOR_NAN = ("isnan", "isfinite", "eq", "ne", "gt", "ge", "lt", "le")
_TESTS = {"at_most": "__le__", "above": "__gt__", "at_least": "__ge__", "equal": "__eq__"}


@rewrite
def clamp(
    scene: Scene, operand: Slot = "x", min: str | float | None = None, max: str | float | None = None
) -> Edited | None:
    """Clamp an argument. From below only, it does not apply to a divisor that is rightly negative somewhere."""
    x = scene.tensor(operand)
    if max is None and operand == "denominator" and bool((x < 0).any()):
        return None
    bounds = {name: value for name, value in (("min", min), ("max", max)) if value is not None}
    numbers = {name: number_for(scene, operand, value) for name, value in bounds.items()}
    return guard(scene, operand, "torch.Tensor.clamp", named=numbers)


@rewrite
def plus(scene: Scene, operand: Slot = "x", value: str | float = "eps") -> Edited | None:
    """Add a small number to an argument."""
    x = scene.tensor(operand)
    if bool((x < 0).any()):
        return None  # an eps moves the edge, it does not take it away
    return guard(scene, operand, "torch.Tensor.add", number_for(scene, operand, value))


@rewrite
def away_from_zero(scene: Scene, operand: Slot = "denominator", value: str | float = 1.0) -> Edited | None:
    """Replace the zeros in an argument by a number."""

    number = number_for(scene, operand, value)

    def find_zeros(editor: Editor, argument: Ref) -> Ref:
        return editor.make("torch.Tensor.__eq__", argument, 0)

    return guard(scene, operand, "torch.Tensor.masked_fill", number, prepare=find_zeros)


@rewrite
def inside(scene: Scene) -> Edited | None:
    """The other half of a safe ``where``: give the origin a harmless argument where its result is dropped anyway."""
    domain = DOMAINS.get(short_name(scene.call)) if scene.call is not None else None
    edge = domain.edge if domain is not None else None
    if domain is None or edge is None:
        return None
    bound = number_for(scene, domain.operand, edge.bound)

    def find_edge(editor: Editor, argument: Ref) -> Ref:
        tested = editor.make("torch.abs", argument) if edge.size else argument
        return editor.make(f"torch.Tensor.{_TESTS[edge.test]}", tested, bound)

    return guard(scene, domain.operand, "torch.Tensor.masked_fill", domain.harmless, prepare=find_edge)


@rewrite
def mask_first(scene: Scene) -> Edited | None:
    """Zeros in place of NaN values that mark what is missing, where they first meet a value that needs a gradient."""
    program, drop = scene.program, scene.failure.drop
    if drop is None:
        return None
    marked, editor, is_changed = {drop.value}, Editor(program), False
    needing = {item.value for item in program.inputs if item.requires_grad}
    for index, call in enumerate(program.calls[: drop.call_index]):
        meeting = marked.intersection(call.input_refs())
        if needing.intersection(call.input_refs()):
            needing.update(call.output_refs())
            if meeting and short_name(call) not in _TESTS_FOR_NAN:
                editor.begin(index)
                new = {value: editor.make("torch.Tensor.nan_to_num", Ref(value), 0.0) for value in sorted(meeting)}
                editor.add(call.substituted(new))
                is_changed = True
        elif meeting and short_name(call) not in _TESTS_FOR_NAN:
            marked.update(call.output_refs())
    return Edited(editor.finish(), scene.tensors) if is_changed else None


@rewrite
def minus_max(scene: Scene) -> Edited | None:
    """Subtract the largest element from an argument, which a later normalisation takes out again."""

    return guard(scene, "x", "torch.Tensor.sub", prepare=lambda editor, argument: editor.make("torch.amax", argument))


@rewrite
def set_argument(scene: Scene, name: str, value: Any) -> Edited | None:
    """Give the origin another value for one of its own arguments."""

    def change(editor: Editor, call: Call) -> None:
        slot: Slot = name
        with contextlib.suppress(KeyError):  # it was not given
            slot = slot_of(call, name)
        editor.add(with_argument(call, slot, value))

    return everywhere(scene, change)


@rewrite
def set_option(scene: Scene, name: str, value: float) -> Edited | None:
    """Another hyperparameter for the optimizer's step."""

    def change(editor: Editor, call: Call) -> None:
        options = argument_at(call, "options")
        changed = [{**group, name: value} if name in group else group for group in options]
        if changed != options:
            editor.add(with_argument(call, "options", changed))

    return everywhere(scene, change)


@rewrite
def jitter(scene: Scene, value: float, spread: bool = False) -> Edited | None:
    """Add a small multiple of the identity to a matrix, or with ``spread`` a small diagonal without equal entries."""
    x = scene.tensor("x")
    if x.dim() < 2:
        return None
    size, amount = x.shape[-1], value * max(1.0, float(x.abs().max()))
    values = (amount, 2 * amount) if spread else (amount, amount)

    def make_diagonal(editor: Editor, _: Ref) -> Ref:
        dtype, device = Symbol(str(x.dtype)), Device(str(x.device))
        return editor.make("torch.diag", editor.make("torch.linspace", *values, size, dtype=dtype, device=device))

    return guard(scene, "x", "torch.Tensor.add", prepare=make_diagonal)


@rewrite
def zeros_for_bad_input(scene: Scene) -> Edited | None:
    """Zeros where an input is not finite."""
    failure = scene.failure
    if failure.value is None or failure.call is not None:
        return None
    value = failure.value
    changed = scene.tensors[value].detach().nan_to_num(0.0, 0.0, 0.0)
    return Edited(scene.program, {**scene.tensors, value: changed}, is_local=False)
