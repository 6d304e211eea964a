"""Edits of a program: calls put in front of or in place of others, arguments exchanged, inputs converted.

An edit keeps every value number that later calls read, so only the edited calls change. The same edit is made at all
calls from one line of the user's code, because that is what a person would do. `REWRITES` are the edits that the
catalogue names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from reprokit.locate.calls import Slot, argument_at, slot_of
from reprokit.locate.domains import number_named
from reprokit.locate.scene import Scene
from reprokit.program.functions import is_in_place
from reprokit.program.ir import Call, Mode, Program, Ref, map_leaves


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
