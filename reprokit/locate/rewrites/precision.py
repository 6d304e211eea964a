"""Rewrites that compute in another precision, or keep what does not fit."""

from __future__ import annotations

from dataclasses import replace

import torch

from reprokit.locate.domains import number_named
from reprokit.locate.edits import Edited, Editor, converted
from reprokit.locate.rewrites.registry import everywhere, rewrite
from reprokit.locate.scene import Scene
from reprokit.program.ir import Call, Ref, substitute

_METHODS = {torch.float32: "float", torch.float64: "double", torch.float16: "half", torch.bfloat16: "bfloat16"}


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
    return everywhere(scene, change)


@rewrite
def step_in(scene: Scene, dtype: str) -> Edited | None:
    """Do the whole step in another dtype than float16."""
    edited = converted(scene.program, scene.tensors, {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype])
    has_half = any(tensor.dtype is torch.float16 for tensor in scene.tensors.values())
    return edited if has_half or edited.program != scene.program else None


@rewrite
def dtype_of_parameters(scene: Scene) -> Edited | None:
    """Convert the other floating-point arguments of the origin to the dtype of the parameters among them."""
    call, origin, index = scene.call, scene.origin, scene.failure.call_index
    if call is None or origin is None or index is None:
        return None
    given = {ref.value: item for ref, item in zip(call.args, origin.args, strict=False) if isinstance(ref, Ref)}
    parameters = {item.value for item in scene.program.inputs if item.role == "parameter" or item.requires_grad}
    dtypes = {item.dtype for value, item in given.items() if value in parameters}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if dtype not in _METHODS:
        return None
    editor = Editor(scene.program)
    others = [value for value, item in given.items() if item.is_floating_point() and item.dtype != dtype]
    made = [editor.call(call, f"torch.Tensor.{_METHODS[dtype]}", Ref(value)) for value in others]
    new = dict(zip(others, (ref for _, ref in made), strict=True))
    editor.put(index, [*(convert for convert, _ in made), replace(call, args=substitute(call.args, new))])
    return Edited(editor.finish(), scene.tensors)


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

    return everywhere(scene, change)


def _is_float(scene: Scene, value: int) -> bool:
    """True if a value that the origin, or a call like it, reads is a tensor of floats."""
    for item in scene.program.inputs:
        if item.value == value:
            return scene.tensors[value].is_floating_point()
    index = scene.writer(value, len(scene.program.calls))
    return index is None or index in scene.peaks
