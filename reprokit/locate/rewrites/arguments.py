"""Rewrites of the origin's arguments: guards in front of it, other values for its own options."""

from __future__ import annotations

from typing import Any

from reprokit.locate.calls import Slot, argument_at, short_name, slot_of
from reprokit.locate.domains import DOMAINS
from reprokit.locate.edits import Edited, Editor, everywhere, guard, guarded, number_for, rewrite, with_argument
from reprokit.locate.scene import Scene
from reprokit.locate.signs.training import negative_squares
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
def finite_arguments(scene: Scene) -> Edited | None:
    """Clamp both arguments, so that infinities in them become large numbers."""

    def change(editor: Editor, call: Call) -> list[Call] | None:
        made, changed = list[Call](), call
        for role in ("x", "y"):
            try:
                slot = slot_of(changed, role)
            except KeyError:
                continue
            guarding = guarded(editor, changed, slot, "torch.Tensor.clamp", min=-1e4, max=1e4)
            if guarding is not None:
                *before, changed = guarding
                made += before
        return [*made, changed] if made else None

    return everywhere(scene, change)


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

    def find_zeros(editor: Editor, call: Call, argument: Ref) -> tuple[list[Call], tuple[Any, ...]]:
        found, mask = editor.call(call, "torch.Tensor.__eq__", argument, 0)
        return [found], (mask,)

    number = number_for(scene, operand, value)
    return guard(scene, operand, "torch.Tensor.masked_fill", number, prepare=find_zeros)


@rewrite
def inside(scene: Scene) -> Edited | None:
    """The other half of a safe ``where``: give the origin a harmless argument where its result is dropped anyway."""
    domain = DOMAINS.get(short_name(scene.call)) if scene.call is not None else None
    edge = domain.edge if domain is not None else None
    if domain is None or edge is None:
        return None
    bound = number_for(scene, domain.operand, edge.bound)

    def find_edge(editor: Editor, call: Call, argument: Ref) -> tuple[list[Call], tuple[Any, ...]]:
        before, tested = list[Call](), argument
        if edge.size:
            size, tested = editor.call(call, "torch.abs", tested)
            before.append(size)
        found, mask = editor.call(call, f"torch.Tensor.{_TESTS[edge.test]}", tested, bound)
        return [*before, found], (mask,)

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
            guards = [editor.call(call, "torch.Tensor.nan_to_num", Ref(value), 0.0) for value in sorted(meeting)]
            new = dict(zip(sorted(meeting), (ref for _, ref in guards), strict=True))
            if new and short_name(call) not in _TESTS_FOR_NAN:
                editor.put(index, [*(guard for guard, _ in guards), call.substituted(new)])
                is_changed = True
        elif meeting and short_name(call) not in _TESTS_FOR_NAN:
            marked.update(call.output_refs())
    return Edited(editor.finish(), scene.tensors) if is_changed else None


@rewrite
def minus_max(scene: Scene) -> Edited | None:
    """Subtract the largest element from an argument, which a later normalisation takes out again."""

    def find_largest(editor: Editor, call: Call, argument: Ref) -> tuple[list[Call], tuple[Any, ...]]:
        largest, top = editor.call(call, "torch.amax", argument)
        return [largest], (top,)

    return guard(scene, "x", "torch.Tensor.sub", prepare=find_largest)


@rewrite
def set_argument(scene: Scene, name: str, value: Any) -> Edited | None:
    """Give the origin another value for one of its own arguments."""

    def change(_: Editor, call: Call) -> list[Call]:
        try:
            return [with_argument(call, slot_of(call, name), value)]
        except KeyError:  # it was not given
            return [with_argument(call, name, value)]

    return everywhere(scene, change)


@rewrite
def set_option(scene: Scene, name: str, value: float) -> Edited | None:
    """Another hyperparameter for the optimizer's step."""

    def change(_: Editor, call: Call) -> list[Call] | None:
        options = argument_at(call, "options")
        if not any(name in group for group in options):
            return None
        return [
            with_argument(call, "options", [{**group, name: value} if name in group else group for group in options])
        ]

    return everywhere(scene, change)


@rewrite
def jitter(scene: Scene, value: float, spread: bool = False) -> Edited | None:
    """Add a small multiple of the identity to a matrix, or with ``spread`` a small diagonal without equal entries."""
    x = scene.tensor("x")
    if x.dim() < 2:
        return None
    size, amount = x.shape[-1], value * max(1.0, float(x.abs().max()))
    values = (amount, 2 * amount) if spread else (amount, amount)

    def make_diagonal(editor: Editor, call: Call, _: Ref) -> tuple[list[Call], tuple[Any, ...]]:
        dtype, device = Symbol(str(x.dtype)), Device(str(x.device))
        line, numbers = editor.call(call, "torch.linspace", *values, size, dtype=dtype, device=device)
        matrix, diagonal = editor.call(call, "torch.diag", numbers)
        return [line, matrix], (diagonal,)

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


@rewrite
def squares_from_zero(scene: Scene) -> Edited | None:
    """Zeros in place of negative averages of squares in the state of the optimizer."""
    changed = {state: scene.tensors[state].detach().clamp(min=0.0) for _, state in negative_squares(scene)}
    return Edited(scene.program, {**scene.tensors, **changed}, is_local=False) if changed else None
