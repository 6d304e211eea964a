"""Rewrites of the origin as another function, in another precision, or of the graph around it."""

from __future__ import annotations

from dataclasses import replace

import torch

from reprokit.locate.calls import argument_at, short_name, slot_of
from reprokit.locate.domains import number_named
from reprokit.locate.edits import Edited, Editor, converted, everywhere, rewrite
from reprokit.locate.graphs import (
    depends_on_gradients,
    find_update,
    find_write,
    with_graphs_cut,
    with_graphs_kept,
    with_math_attention,
    written_leaf,
)
from reprokit.locate.scene import Scene
from reprokit.locate.signs.precision import root_of_squares
from reprokit.program.functions import GRAD_READ
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
def xlogy(scene: Scene) -> Edited | None:
    """``torch.xlogy`` in place of a product with a logarithm."""
    program, editor, found = scene.program, Editor(scene.program), False
    logs = {call.outputs.value: call.args[0] for call in program.calls
            if short_name(call) == "log" and isinstance(call.outputs, Ref) and call.args}  # fmt: skip
    for number, call in enumerate(program.calls):
        if short_name(call) != "mul" or len(call.args) != 2 or call.name.startswith("__i") or call.name.endswith("_"):
            continue
        for factor, logarithm in (call.args, call.args[::-1]):
            if isinstance(logarithm, Ref) and logarithm.value in logs and isinstance(factor, Ref):
                editor.begin(number)
                editor.add(replace(call, target="torch.xlogy", args=(factor, logs[logarithm.value])))
                found = True
    return Edited(editor.finish(), scene.tensors) if found else None


@rewrite
def sum_over_count(scene: Scene) -> Edited | None:
    """A mean as the sum over the number of elements, at least one."""

    def change(editor: Editor, call: Call) -> None:
        if not isinstance(call.outputs, Ref) or not isinstance(call.args[0], Ref):
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
def out_of_place(scene: Scene) -> Edited | None:
    """The write that a backward pass objects to, into a new tensor."""
    found = find_write(scene)
    return Edited(found[1], scene.tensors, site=found[0].site) if found is not None else None


@rewrite
def update_after_backward(scene: Scene) -> Edited | None:
    """The update that a backward pass objects to, behind that pass."""
    found = find_update(scene)
    return Edited(found[1], scene.tensors, is_local=False) if found is not None else None


@rewrite
def write_without_grad(scene: Scene) -> Edited | None:
    """The write into a leaf under `torch.no_grad`, which changes the leaf; not of values that have a gradient."""
    index, call, found = scene.index, scene.program.calls[scene.index], written_leaf(scene)
    if found is None:
        return None
    target = next(iter_refs(call.args))
    if depends_on_gradients(scene, {ref.value for ref in iter_refs((call.args, call.kwargs))} - {target.value}):
        return None
    editor = Editor(scene.program)
    editor.begin(index)
    editor.add(replace(call, mode=replace(call.mode, grad=False)))
    return Edited(editor.finish(), scene.tensors, is_local=False)


@rewrite
def write_into_copy(scene: Scene) -> Edited | None:
    """A copy of a leaf in its place, from the in-place call or its first view on."""
    found = written_leaf(scene)
    if found is None:
        return None
    value, first = found
    editor, calls = Editor(scene.program), scene.program.calls
    editor.begin(first)
    new = editor.make("torch.Tensor.clone", Ref(value))
    editor.add(calls[first].substituted({value: new}, outputs=True))
    for index, call in enumerate(calls[first + 1 :], first + 1):
        if not call.is_optimizer_step and call.target != GRAD_READ:
            editor.begin(index)
            editor.add(call.substituted({value: new}, outputs=True))
    return Edited(editor.finish(), scene.tensors, is_local=False)


@rewrite
def keep_graphs(scene: Scene) -> Edited | None:
    """``retain_graph=True`` in all backward passes but the last."""
    return Edited(with_graphs_kept(scene.program), scene.tensors)


@rewrite
def cut_graphs(scene: Scene) -> Edited | None:
    """``detach()`` where later calls read what an earlier backward pass has gone through."""
    found = with_graphs_cut(scene.program)
    return Edited(found[0], scene.tensors, site=found[1].site) if found is not None else None


@rewrite
def math_attention(scene: Scene) -> Edited | None:
    """The reference implementation of an attention in place of a fused kernel."""
    program = with_math_attention(scene)
    return Edited(program, scene.tensors, is_local=False) if program is not None else None


@rewrite
def scale_first(scene: Scene) -> Edited | None:
    """A norm of numbers that were divided by the largest of them, which multiplies the norm."""
    index, end = scene.index, root_of_squares(scene)
    if end is None:
        return None
    program, editor = scene.program, Editor(scene.program)
    call, root = program.calls[index], program.calls[end]
    if not isinstance(call.args[0], Ref) or not isinstance(root.outputs, Ref):
        return None
    editor.begin(index)
    constant = editor.make("torch.Tensor.detach", call.args[0])
    top = editor.make("torch.Tensor.amax", editor.make("torch.Tensor.abs", constant))
    changed = call.substituted({call.args[0].value: editor.make("torch.Tensor.div", call.args[0], top)})
    if index != end:
        editor.add(changed)
        editor.begin(end)
        changed = root
    raw = editor.value()
    editor.add(replace(changed, outputs=raw))
    editor.make("torch.Tensor.mul", raw, top, to=root.outputs)
    return Edited(editor.finish(), scene.tensors)


_METHODS = {torch.float32: "float", torch.float64: "double", torch.float16: "half", torch.bfloat16: "bfloat16"}


@rewrite
def call_in_float32(scene: Scene) -> Edited | None:
    """Do the origin in float32, with autocast off, and go on from its float32 result."""

    def change(editor: Editor, call: Call) -> None:
        if call.is_optimizer_step or not isinstance(call.outputs, Ref):
            return
        plain = replace(call, mode=replace(call.mode, autocast=()))
        floats = [value for value in call.input_refs() if _is_float(scene, value)]
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
def dtype_of_parameters(scene: Scene) -> Edited | None:
    """Convert the other floating-point arguments of the origin to the dtype of the parameters among them."""
    call, origin, index = scene.origin.call, scene.origin, scene.index
    given = {ref.value: item for ref, item in zip(call.args, origin.args, strict=False) if isinstance(ref, Ref)}
    parameters = {item.value for item in scene.program.inputs if item.role == "parameter" or item.requires_grad}
    dtypes = {item.dtype for value, item in given.items() if value in parameters}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if dtype not in _METHODS:
        return None
    editor = Editor(scene.program)
    editor.begin(index)
    others = [value for value, item in given.items() if item.is_floating_point() and item.dtype != dtype]
    editor.add(call.substituted({v: editor.make(f"torch.Tensor.{_METHODS[dtype]}", Ref(v)) for v in others}))
    return Edited(editor.finish(), scene.tensors)


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


def _is_float(scene: Scene, value: int) -> bool:
    """True if a value that the origin, or a call like it, reads is a tensor of floats."""
    for item in scene.program.inputs:
        if item.value == value:
            return scene.tensors[value].is_floating_point()
    index = scene.writer(value, len(scene.program.calls))
    return index is None or scene.is_float(index)
