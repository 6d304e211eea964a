"""Signs of labels, indexes and lengths that do not fit, and of exceptions."""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from reprokit.arrivals import pass_on
from reprokit.locate.calls import short_name
from reprokit.locate.failure import EXCEPTION
from reprokit.locate.graphs import find_update, find_write, written_leaf
from reprokit.locate.scene import Scene
from reprokit.locate.signs import Numbers, dtype_name, places, sign
from reprokit.locate.signs.operands import dimension
from reprokit.program.interpreter import execute
from reprokit.program.ir import Call, map_leaves

_OF_BATCHES = re.compile(
    r"batch.?size|batch dimension|non-singleton dimension 0\b|batch2 tensor|expected hidden", re.IGNORECASE
)
_RECURRENT = ("gru", "lstm", "rnn_relu", "rnn_tanh")  # their hidden states have the batch second
_SHAPE = re.compile(r"[(\[]([\d, ]+)[)\]]")


@sign
def raises(scene: Scene, pattern: str) -> Numbers | None:
    """True if the exception's type and message match."""
    if scene.failure.kind != EXCEPTION or scene.failure.exception is None:
        return None
    kind, message = scene.failure.exception
    lines = message.strip().splitlines() or [""]
    return {"exception": f"{kind}: {lines[0]}"} if re.search(pattern, f"{kind}: {message}", re.IGNORECASE) else None


@sign
def writes_what_backward_needs(scene: Scene) -> Numbers | None:
    """The in-place call without which the backward pass does not raise."""
    found = find_write(scene)
    if found is None:
        return None
    message = scene.failure.exception[1] if scene.failure.exception is not None else ""
    saver = re.search(r"which is output \d+ of (\w+?)(?:Backward\d*)?[,;]", message)
    needed = f"the result of `{saver[1]}`" if saver is not None else "a tensor"
    return {"writer": _placed(found[0]), "needed": needed}


@sign
def updates_before_backward(scene: Scene) -> Numbers | None:
    """The update of parameters that has to come after the backward pass for it not to raise."""
    found = find_update(scene)
    return {"writer": _placed(found[0])} if found is not None else None


@sign
def writes_into_leaf(scene: Scene) -> Numbers | None:
    """The leaf that the origin writes into in place, by itself or through a view."""
    call, found = scene.program.calls[scene.index], written_leaf(scene)
    if found is None:
        return None
    value, first = found
    name = next((f"`{item.name}`" for item in scene.program.inputs if item.value == value), "a tensor")
    view = "" if first == scene.failure.call_index else "a view of "
    return {"writer": _placed(call), "leaf": name, "written": f"{view}{name}"}


def _placed(call: Call) -> str:
    place = f" at {call.site.place}" if call.site is not None else ""
    name = call.target.removeprefix("torch.optim.") if call.is_optimizer_step else short_name(call)
    return f"`{name}`{place}"


@sign
def label_outside(scene: Scene) -> Numbers | None:
    """True if the call raises over a label, or the number of an embedding's row, outside of what there is."""
    call = scene.origin.call
    is_loss = short_name(call) in ("cross_entropy", "nll_loss")
    is_table = short_name(call) in ("embedding", "embedding_bag")
    table = scene.tensor("weight" if is_table else "x")
    labels = scene.tensor("target" if is_loss else "x")
    if labels.is_floating_point():
        return None
    if short_name(call) == "one_hot":
        size = call.kwargs.get("num_classes", call.args[1] if len(call.args) > 1 else -1)
    else:
        size = table.shape[(dimension(scene) or 0) if is_loss else 0]
    counted = labels[labels != scene.operand("ignore_index")] if is_loss else labels
    if not counted.numel() or size < 0:
        return None
    lowest, highest = int(counted.min()), int(counted.max())
    if (lowest >= 0 and highest < size) or not _returns_with(scene, labels, labels.clamp(0, size - 1)):
        return None
    return {"lowest": lowest, "highest": highest, "size": size, "last": size - 1}


def _returns_with(scene: Scene, old: torch.Tensor, new: torch.Tensor) -> bool:
    """True if the origin does not raise with ``new`` in place of one of its tensors: the exception is over its values.

    Functions compare sizes before they read values, so a label may be outside and the exception about something else.
    """
    origin = scene.origin
    arguments = (origin.args, dict(origin.kwargs))
    args, kwargs = map_leaves(arguments, lambda leaf: new if leaf is old else _copied(leaf))
    try:
        with torch.no_grad():
            execute(origin.call, args, kwargs)
    except Exception as error:  # functions refuse in as many ways as there are functions
        pass_on(error)
        return False
    return True


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf  # `max_norm` writes into the weight


@sign
def dtypes_differ(scene: Scene) -> Numbers | None:
    """The floating-point dtypes of the origin's tensors if there are several."""
    names = list(dict.fromkeys(dtype_name(item) for item in scene.arguments() if item.is_floating_point()))
    return {"dtypes": " and ".join(names)} if len(names) > 1 else None


@sign
def stacks_other_sizes(scene: Scene) -> Numbers | None:
    """True if the tensors that are to be put side by side differ in size, with the first that does."""
    tensors = scene.operand("x")
    if not isinstance(tensors, (list, tuple)) or not all(isinstance(item, torch.Tensor) for item in tensors):
        return None
    sizes = [list(item.shape) for item in tensors]
    number = next((number for number, size in enumerate(sizes) if size != sizes[0]), None)
    if number is None:
        return None
    different = len({tuple(size) for size in sizes})
    return {"total": len(sizes), "different": different, "first": sizes[0], "other": sizes[number], "number": number}


@sign
def batches_differ(scene: Scene) -> Numbers | None:
    """True if the function was given two sizes that are those of batches among the inputs of the step.

    An exception over flattened tensors does not show which dimension differs. A batch is the first dimension of an
    input; a hidden state may have it second.
    """
    pair = _compared_sizes(scene)
    if pair is None or scene.failure.exception is None:
        return None
    is_recurrent = scene.call is not None and short_name(scene.call) in _RECURRENT
    depth = 2 if is_recurrent or "expected hidden" in scene.failure.exception[1].lower() else 1
    given = (scene.tensors[item.value] for item in scene.inputs() if item.role != "parameter")
    batches = {size for tensor in given for size in tensor.shape[:depth]}
    return {"smaller": pair[0], "larger": pair[1]} if batches.issuperset(pair) else None


@sign
def is_remainder(scene: Scene) -> Numbers | None:
    """True if an input of the step has as many rows as full batches and a short one at the end make up."""
    pair = _compared_sizes(scene)
    for item in scene.inputs() if pair is not None else ():
        rows = scene.tensors[item.value].shape[:1]
        if pair is None or item.role == "parameter" or not rows or rows[0] <= pair[1]:
            continue
        whole, rest = divmod(rows[0], pair[1])
        if rest == pair[0]:
            return {"input": f"`{item.name}`", "rows": rows[0], "whole": whole, "smaller": rest, "larger": pair[1]}
    return None


def _compared_sizes(scene: Scene) -> tuple[int, int] | None:
    """The two sizes that an exception compares, the smaller one first, if the origin's arguments have both."""
    if scene.failure.kind != EXCEPTION or scene.failure.exception is None:
        return None
    pair = _two_sizes(scene.failure.exception[1])
    sizes = {size for tensor in scene.arguments() for size in tensor.shape[:2]}
    return (min(pair), max(pair)) if pair is not None and sizes.issuperset(pair) else None


def _two_sizes(message: str) -> tuple[int, int] | None:
    """The sizes of two batches that a message compares: its first two numbers, or the one place where shapes differ.

    In the shapes of such messages, those of a hidden state or a matrix, the batch stands before the last dimension.
    """
    if not _OF_BATCHES.search(message):
        return None
    shapes = [[int(size) for size in found.split(",")] for found in _SHAPE.findall(message) if "," in found]
    if len(shapes) > 1 and len(shapes[0]) == len(shapes[1]):
        pairs = list(zip(*shapes[:2], strict=True))
        is_batch = [one != other for one, other in pairs] == [place == len(pairs) - 2 for place in range(len(pairs))]
        return pairs[-2] if is_batch else None
    numbers = [int(number) for number in re.findall(r"\b\d+\b", message)]
    return (numbers[0], numbers[1]) if len(numbers) > 1 and numbers[0] != numbers[1] else None


@sign
def ignores_all_targets(scene: Scene) -> Numbers | None:
    """True if every target of a loss is the one it ignores."""
    target = scene.tensor("target")
    if target.is_floating_point() or not target.numel():
        return None
    ignored = scene.operand("ignore_index")
    return {"count": target.numel(), "ignored": ignored} if bool((target == ignored).all()) else None


@sign
def target_is_impossible(scene: Scene) -> Numbers | None:
    """True if the score of a target class is ``-inf``, so that its loss is infinite."""
    x, target = scene.tensor("x"), scene.tensor("target")
    if target.is_floating_point() or x.dim() < 2 or x.shape[:1] != target.shape[:1]:
        return None
    chosen = x.gather(1, target.clamp(0, x.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return places((chosen == -math.inf) & (target >= 0) & (target != scene.operand("ignore_index")))


@sign
def target_is_longer(scene: Scene) -> Numbers | None:
    """True if a target of ``ctc_loss`` needs more steps than its input has (repeats need one more)."""
    targets = scene.tensor("targets")
    lengths = (torch.as_tensor(scene.operand(f"{name}_lengths")).flatten().tolist() for name in ("input", "target"))
    start = 0
    for number, (available, length) in enumerate(zip(*lengths, strict=False)):
        row = targets[number] if targets.dim() == 2 else targets[start : start + length]
        start += length
        labels = row[:length]
        needed = length + int((labels[1:] == labels[:-1]).sum())
        if needed > available:
            return {"needed": needed, "available": available, "sample": number}
    return None
