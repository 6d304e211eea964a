"""Edits of a program: calls put in front of or in place of others, arguments exchanged, inputs converted.

An edit keeps every value number that later calls read, so only the edited calls change. The same edit is made at all
calls from one line of the user's code, because that is what a person would do. `REWRITES` are the edits that the
catalogue names: guards in front of the origin, other values for its options, another function or precision in its
place. A rewrite does not claim to help; the edited step is run for that. It returns ``None`` where it does not apply,
for instance when the argument is a number and not a tensor.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from reprokit.locate.domains import DOMAINS, number_named
from reprokit.locate.scene import Scene
from reprokit.locate.spelling import Slot, argument_at, short_name, slot_of
from reprokit.program.functions import is_in_place
from reprokit.program.ir import Call, Device, Mode, Program, Ref, Symbol, iter_refs, map_leaves


@dataclass(frozen=True, slots=True)
class Edited:
    """A program after an edit, and the tensors of its inputs.

    ``is_local`` means that single calls were edited; what was not touched is the very same `Call` as before.
    """

    program: Program
    tensors: Mapping[int, torch.Tensor]
    is_local: bool = True


@dataclass
class Editor:
    """Collects what is put in place of single calls of one program: `begin` one, then `make` and `add` others."""

    program: Program
    _next: int = field(init=False)
    replaced: dict[int, list[Call]] = field(default_factory=dict)
    _index: int = 0

    def __post_init__(self) -> None:
        self._next = self.program.next_value()

    def begin(self, index: int) -> None:
        """Go on at call number ``index``, which stays as it is unless something is put in its place."""
        self._index = index
        self.replaced.pop(index, None)

    def add(self, call: Call) -> None:
        """Go on with a call that is not new."""
        self.replaced.setdefault(self._index, []).append(call)

    def value(self) -> Ref:
        """A value that nothing uses yet."""
        self._next += 1
        return Ref(self._next - 1)

    def make(self, target: str, *args: Any, to: Ref | None = None, like: Call | None = None, **kwargs: Any) -> Ref:
        """Go on with a new call in the mode of the one that is edited, or of ``like``; the value that it makes."""
        like, to = like or self.program.calls[self._index], to or self.value()
        mode = Mode(like.mode.grad, like.mode.autocast, like.mode.inference)
        self.add(replace(like, target=target, args=args, kwargs=kwargs, outputs=to, mode=mode))
        return to

    def finish(self) -> Program:
        """The edited program."""
        calls: list[Call] = []
        for index, call in enumerate(self.program.calls):
            calls += self.replaced.get(index, [call])
        return replace(self.program, calls=tuple(calls))


def siblings(program: Program, index: int) -> list[int]:
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


def with_argument(call: Call, slot: Slot, value: Any) -> Call:
    """The call with one argument exchanged."""
    if isinstance(slot, int):
        return replace(call, args=(*call.args[:slot], value, *call.args[slot + 1 :]))
    return replace(call, kwargs={**call.kwargs, slot: value})


def guarded(editor: Editor, call: Call, slot: Slot, target: str, *args: Any, **kwargs: Any) -> Call | None:
    """The call behind a new call of ``target`` on one of its arguments; ``None`` when that is not a tensor.

    An in-place call that writes into the argument finds the new contents in it.
    """
    argument = argument_at(call, slot)
    if not isinstance(argument, Ref):
        return None
    new = editor.make(target, argument, *args, **kwargs)
    if is_in_place(call.target) and slot == 0:
        editor.make("torch.Tensor.copy_", argument, new, to=argument)
        return call
    return with_argument(call, slot, new)


def converted(program: Program, tensors: Mapping[int, torch.Tensor], dtype: torch.dtype) -> Edited:
    """The program with everything that is float16 in another dtype, autocast included."""
    name = str(dtype)
    methods = {"torch.Tensor.half": f"torch.Tensor.{'float' if dtype is torch.float32 else 'bfloat16'}"}

    def change(leaf: Any) -> Any:
        return replace(leaf, name=name) if getattr(leaf, "name", None) == "torch.float16" else leaf

    calls = []
    for call in program.calls:
        args, kwargs = map_leaves((call.args, dict(call.kwargs)), change)
        calls.append(replace(call, target=methods.get(call.target, call.target), args=args, kwargs=kwargs,
                             mode=replace(call.mode, autocast=_autocast(call.mode, name))))  # fmt: skip
    new = {value: t.to(dtype) if t.dtype is torch.float16 else t for value, t in tensors.items()}
    return Edited(replace(program, calls=tuple(calls)), new, is_local=False)


def _autocast(mode: Mode, name: str) -> tuple[tuple[str, str], ...]:
    if name == "torch.float32":
        return ()
    return tuple((device, name if dtype == "torch.float16" else dtype) for device, dtype in mode.autocast)


Change = Callable[[Editor, Call], None]
Prepare = Callable[[Editor, Ref], Ref]
Rewrite = Callable[..., Edited | None]
REWRITES: dict[str, Rewrite] = {}


def rewrite(function: Rewrite) -> Rewrite:
    """Register a rewrite under its name."""
    REWRITES[function.__name__] = function
    return function


def everywhere(scene: Scene, change: Change) -> Edited | None:
    """The step with a change made at the origin, and at the calls like it where it applies and adds something."""
    origin, editor = scene.failure.call_index, Editor(scene.program)
    for index in siblings(scene.program, origin) if origin is not None else ():
        editor.begin(index)
        with contextlib.suppress(KeyError):
            change(editor, scene.program.calls[index])
    is_changed = origin is not None and origin in editor.replaced
    return Edited(editor.finish(), scene.tensors) if is_changed else None


def guard(
    scene: Scene,
    operand: Slot,
    target: str,
    *args: Any,
    prepare: Prepare | None = None,
    named: Mapping[str, Any] = MappingProxyType({}),
) -> Edited | None:
    """The step with ``target`` of an argument in its place, at the origin and the calls like it.

    ``prepare`` makes a further argument of it from the argument.
    """

    def change(editor: Editor, call: Call) -> None:
        slot = slot_of(call, operand)
        argument = argument_at(call, slot)
        given = (prepare(editor, argument),) if prepare is not None and isinstance(argument, Ref) else ()
        made = guarded(editor, call, slot, target, *given, *args, **named)
        if made is not None:
            editor.add(made)

    return everywhere(scene, change)


def number_for(scene: Scene, operand: Slot, value: str | float) -> float:
    """A number of the catalogue in the dtype of an argument."""
    x = scene.tensor_if_given(operand)
    return number_named(value, x.dtype if x is not None and x.is_floating_point() else torch.float32)


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


@rewrite
def biased(scene: Scene) -> Edited | None:
    """A standard deviation or variance divided by n instead of n - 1."""

    def change(editor: Editor, call: Call) -> None:
        args = tuple(item for item in call.args if not isinstance(item, bool))
        flags = [item for item in call.args if isinstance(item, bool)]  # unbiased, keepdim
        kwargs = {name: item for name, item in call.kwargs.items() if name != "unbiased"}
        kwargs |= {"keepdim": flags[1]} if len(flags) > 1 else {}
        editor.add(replace(call, args=args, kwargs={**kwargs, "correction": 0}))

    return everywhere(scene, change)


@rewrite
def log_softmax(scene: Scene) -> Edited | None:
    """``log_softmax`` in place of the logarithm of a softmax."""
    program = scene.program

    def change(editor: Editor, call: Call) -> None:
        index = next((n for n, other in enumerate(program.calls) if other is call), len(program.calls))
        for ref in iter_refs(call.args[:1]):
            writer = scene.writer(ref.value, index)
            if writer is not None and short_name(program.calls[writer]) == "softmax":
                made = program.calls[writer]
                name = made.target.replace("softmax", "log_softmax")
                editor.add(replace(call, target=name, args=made.args, kwargs=made.kwargs))

    return everywhere(scene, change)


@rewrite
def sum_over_count(scene: Scene) -> Edited | None:
    """A mean as the sum over the number of elements, at least one."""

    def change(editor: Editor, call: Call) -> None:
        if "mean" not in call.target or not isinstance(call.outputs, Ref) or not isinstance(call.args[0], Ref):
            return
        function, total = call.target.replace("mean", "sum"), editor.value()
        editor.add(replace(call, target=function, outputs=total))
        count = editor.make(function, editor.make("torch.ones_like", call.args[0]), *call.args[1:], **call.kwargs)
        editor.make("torch.Tensor.div", total, editor.make("torch.Tensor.clamp", count, min=1), to=call.outputs)

    return everywhere(scene, change)


@rewrite
def loss_over_count(scene: Scene) -> Edited | None:
    """A mean loss as the sum over the number of targets that count, at least one."""

    def change(editor: Editor, call: Call) -> None:
        target = argument_at(call, slot_of(call, "target"))
        if not isinstance(target, Ref) or not isinstance(call.outputs, Ref):
            return
        total = editor.value()
        editor.add(replace(call, kwargs={**call.kwargs, "reduction": "sum"}, outputs=total))
        kept = editor.make("torch.ne", target, call.kwargs.get("ignore_index", -100))
        divisor = editor.make("torch.Tensor.clamp", editor.make("torch.Tensor.sum", kept), min=1)
        editor.make("torch.Tensor.div", total, divisor, to=call.outputs)

    return everywhere(scene, change)


@rewrite
def guarded_weight_norm(scene: Scene) -> Edited | None:
    """Weight normalisation with a norm that is never zero."""
    weight = scene.tensor("x")

    def change(editor: Editor, call: Call) -> None:
        if len(call.args) < 2 or not isinstance(call.outputs, Ref):
            return
        direction, gain, *rest = call.args
        kept = rest[0] if rest else call.kwargs.get("dim", 0)
        dims = [n for n in range(weight.dim()) if n != kept % weight.dim()] if kept != -1 else list(range(weight.dim()))
        size = editor.make("torch.linalg.vector_norm", direction, 2, dims, True)
        divisor = editor.make("torch.Tensor.clamp", size, min=number_named("eps", weight.dtype))
        editor.make("torch.Tensor.mul", editor.make("torch.Tensor.div", direction, divisor), gain, to=call.outputs)

    return everywhere(scene, change)


@rewrite
def call_in_float32(scene: Scene) -> Edited | None:
    """Do the origin in float32, with autocast off, and go on from its float32 result."""
    inputs = {value for value, tensor in scene.tensors.items() if tensor.is_floating_point()}

    def change(editor: Editor, call: Call) -> None:
        if call.is_optimizer_step or not isinstance(call.outputs, Ref):
            return
        plain = replace(call, mode=replace(call.mode, autocast=()))
        floats = [value for value in call.input_refs() if value in inputs | scene.floats]
        cast = plain.substituted({v: editor.make("torch.Tensor.float", Ref(v), like=plain) for v in floats})
        editor.add(replace(cast, kwargs={name: value for name, value in cast.kwargs.items() if name != "dtype"}))

    if scene.call is None or scene.call.name.endswith("_") or scene.call.name.startswith("__i"):
        return None
    return everywhere(scene, change)


@rewrite
def step_in(scene: Scene, dtype: str) -> Edited | None:
    """Do the whole step in another dtype than float16."""
    edited = converted(scene.program, scene.tensors, {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype])
    has_half = any(tensor.dtype is torch.float16 for tensor in scene.tensors.values())
    return edited if has_half or edited.program != scene.program else None


@rewrite
def result_at_most(scene: Scene) -> Edited | None:
    """Clamp the origin's result to the largest number of its dtype."""
    limit = number_named("max", scene.tensor("result").dtype)

    def change(editor: Editor, call: Call) -> None:
        if not isinstance(call.outputs, Ref) or call.outputs.value in call.input_refs():
            return
        raw = editor.value()
        editor.add(replace(call, outputs=raw))
        editor.make("torch.clamp", raw, -limit, limit, to=call.outputs)

    return everywhere(scene, change)
