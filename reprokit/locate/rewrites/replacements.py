"""Rewrites of the origin as another function, in another precision, or of the graph around it."""

from __future__ import annotations

from dataclasses import replace

import torch

from reprokit.locate.calls import argument_at, short_name, slot_of
from reprokit.locate.domains import number_named
from reprokit.locate.edits import Edited, Editor, converted, everywhere, rewrite
from reprokit.locate.scene import Scene
from reprokit.program.ir import Call, Ref, iter_refs


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
