"""Other graphs of the same step: a write out of place, a leaf copied, a graph kept or cut, an attention written out.

Running them shows what an exception, or a gradient that is not finite, is about.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from reprokit.locate.calls import VIEWS, short_name
from reprokit.locate.scene import Scene
from reprokit.program.functions import is_factory, is_in_place, is_torch_function
from reprokit.program.interpreter import run
from reprokit.program.ir import Call, Program, Ref, iter_refs

_MAX_WRITES = 8  # that are tried, each in a run of the step


def find_write(scene: Scene) -> tuple[Call, Program] | None:
    """The call that writes in place into what the failing backward pass needs, and the step with it out of place.

    The latest such call that alone is at fault, else the first that is together with those before it.
    """
    return scene.once("write", lambda: next(_tried(scene), None))


def _tried(scene: Scene) -> Iterator[tuple[Call, Program]]:
    program, end = scene.program, scene.failure.call_index
    indexes = range(end - 1, -1, -1) if end is not None else ()
    writes = [n for n in indexes if is_in_place(program.calls[n].target) or _inplace_flag(program.calls[n])]
    for index in writes[:_MAX_WRITES]:
        alone = _out_of_place(program, index)
        if alone is not None and run(alone, scene.tensors).error is None:
            yield program.calls[index], alone
    together = program
    for index in reversed(writes[:_MAX_WRITES]):  # `h[0] += 1` writes twice
        together = _out_of_place(together, index + len(together.calls) - len(program.calls)) or together
        if together is not program and run(together, scene.tensors).error is None:
            yield program.calls[index], together


def find_update(scene: Scene) -> tuple[Call, Program] | None:
    """The update of parameters, an optimizer's step or a write without gradients, without which the failing backward
    pass does not raise, and the step with the update behind that pass.

    Updates by hand, one call for each parameter, are moved together.
    """
    return scene.once("update", lambda: next(_moved(scene), None))


def _moved(scene: Scene) -> Iterator[tuple[Call, Program]]:
    program, end = scene.program, scene.failure.call_index
    leaves = {item.value for item in program.inputs if item.requires_grad}
    before = list(enumerate(program.calls[:end])) if end is not None else []
    by_hand = [n for n, call in before if not call.mode.grad and is_in_place(call.target) and _target(call) in leaves]
    steps = [[n] for n, call in reversed(before) if call.is_optimizer_step]
    for indexes in [*steps[:_MAX_WRITES], *([by_hand] if by_hand else [])]:
        assert end is not None
        first = [call for n, call in enumerate(program.calls[: end + 1]) if n not in indexes]
        calls = (*first, *(program.calls[n] for n in indexes), *program.calls[end + 1 :])
        moved = replace(program, calls=calls)
        if run(moved, scene.tensors).error is None:
            yield program.calls[indexes[-1]], moved


def _target(call: Call) -> int | None:
    ref = next(iter_refs(call.args), None)
    return ref.value if ref is not None else None


def written_leaf(scene: Scene) -> tuple[int, int] | None:
    """The value that no call computed and that the origin, an in-place call, writes into, and the call that takes the
    first view for that or is the origin itself; ``None`` if a call computed it."""
    index, call = scene.failure.call_index, scene.call
    target = next(iter_refs(call.args), None) if call is not None else None
    if index is None or target is None:
        return None
    value, first = target.value, index
    while (writer := scene.writer(value, first)) is not None and short_name(scene.program.calls[writer]) in VIEWS:
        base = next(iter_refs(scene.program.calls[writer].args), None)
        if base is None or base.value == value:
            return None
        value, first = base.value, writer
    is_made = writer is not None and not is_factory(scene.program.calls[writer].target)
    return None if is_made else (value, first)


def depends_on_gradients(scene: Scene, values: Iterable[int]) -> bool:
    """True if one of the values is computed from a leaf while gradients are recorded."""
    recorded = {item.value for item in scene.program.inputs if item.requires_grad}
    for call in scene.program.calls[: scene.failure.call_index]:
        if call.mode.grad and short_name(call) != "detach" and recorded.intersection(call.input_refs()):
            recorded.update(call.output_refs())
    return not recorded.isdisjoint(values)


def _inplace_flag(call: Call) -> bool:
    return call.kwargs.get("inplace") is True


def _out_of_place(program: Program, index: int) -> Program | None:
    """The program with the result of an in-place call in a new tensor, which all later calls read.

    ``None`` for state, and where a later call reads the same memory under another name.
    """
    call = program.calls[index]
    target = next(iter_refs(call.args), None)
    inputs = {item.value: item for item in program.inputs}
    if target is None or (target.value in inputs and inputs[target.value].role != "batch"):
        return None
    earlier, later = program.calls[:index], program.calls[index + 1 :]
    shared = _aliases(program, target.value) - {target.value}
    until = itertools.takewhile(lambda item: not _puts_back(item, target), later)
    if any(shared.intersection(item.input_refs()) for item in until):
        return None
    new = Ref(program.next_value())
    change = {target.value: new}
    behind = tuple(item.substituted(change, outputs=True) for item in later)
    outputs = tuple(new if ref == target else ref for ref in program.outputs)
    return replace(program, calls=(*earlier, *_plain_calls(call, target, new), *behind), outputs=outputs)


def _puts_back(call: Call, target: Ref) -> bool:
    """True for the second half of ``h[0] += 1``, which writes the changed part where it was."""
    return call.name == "__setitem__" and call.args[-1:] == (target,)


def _plain_calls(call: Call, target: Ref, new: Ref) -> list[Call]:
    """The call out of place: its own form without the write, or the same write into a copy."""
    if _inplace_flag(call):
        return [replace(call, kwargs={n: v for n, v in call.kwargs.items() if n != "inplace"}, outputs=new)]
    owner, _, last = call.target.rpartition(".")
    name = f"{owner}.__{last[3:]}" if last.startswith("__i") else f"{owner}.{last.removesuffix('_')}"
    if last != "__setitem__" and short_name(call) not in ("copy", "fill", "zero") and is_torch_function(name):
        return [replace(call, target=name, outputs=new)]
    clone = replace(call, target="torch.Tensor.clone", args=(target,), kwargs={}, outputs=new)
    change = {target.value: new}
    return [clone, call.substituted(change, outputs=True)]


def _aliases(program: Program, value: int) -> set[int]:
    """The values that may share memory with one, by views of views."""
    group, size = {value}, 0
    while len(group) > size:
        size = len(group)
        for call in program.calls:
            linked = {*call.output_refs(), *(ref.value for ref in iter_refs(call.args[:1]))}
            if short_name(call) in VIEWS and short_name(call) not in ("clone", "repeat") and group & linked:
                group |= linked
    return group


def with_graphs_kept(program: Program) -> Program:
    """The program with ``retain_graph=True`` in every backward pass but the last."""
    passes = [index for index, call in enumerate(program.calls) if call.is_differentiation]
    return replace(
        program,
        calls=tuple(
            replace(call, kwargs={**call.kwargs, "retain_graph": True}) if index in passes[:-1] else call
            for index, call in enumerate(program.calls)
        ),
    )


def with_graphs_cut(program: Program) -> tuple[Program, Call] | None:
    """The program that detaches what was computed before its first backward pass where later calls read it, and the
    first call that does; ``None`` if none does."""
    first = next((index for index, call in enumerate(program.calls) if call.is_differentiation), None)
    if first is None:
        return None
    old = {value for call in program.calls[:first] for value in call.output_refs()}
    new_values, calls, reader = dict[int, Ref](), list(program.calls[: first + 1]), None
    following = program.next_value()
    for call in program.calls[first + 1 :]:
        read = [value for value in call.input_refs() if value in old and value not in new_values]
        if not call.is_differentiation and not call.is_optimizer_step and call.output_refs():
            reader = reader or (call if read else None)
            for value in read:
                new_values[value] = Ref(following)
                calls.append(replace(call, target="torch.Tensor.detach", args=(Ref(value),), kwargs={},
                                     outputs=Ref(following)))  # fmt: skip
                following += 1
        calls.append(call.substituted(new_values))
    return (replace(program, calls=tuple(calls)), reader) if reader is not None else None


def with_math_attention(scene: Scene) -> Program | None:
    """The program with the origin, an attention without dropout, computed by torch's reference implementation."""
    index, call = scene.index, scene.program.calls[scene.index]
    if not isinstance(call.outputs, Ref):
        return None
    options = dict(zip(("attn_mask", "dropout_p", "is_causal"), call.args[3:], strict=False)) | dict(call.kwargs)
    if options.pop("dropout_p", 0.0):
        return None
    outputs = (call.outputs, Ref(scene.program.next_value()))
    plain = replace(call, target="torch._scaled_dot_product_attention_math", args=call.args[:3], kwargs=options,
                    outputs=outputs)  # fmt: skip
    return replace(scene.program, calls=(*scene.program.calls[:index], plain, *scene.program.calls[index + 1 :]))
