"""An optimizer's step as Python: gradients set by hand, the optimizer with its unusual options, its state, a step.

Options that the class refuses, such as a learning rate of NaN, got there later; they are put into the group afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from reprokit.program.ir import Call, Ref, map_leaves
from reprokit.program.run import Tensors
from reprokit.render import expression
from reprokit.render.expression import Expr
from reprokit.render.literals import as_given, is_same, number_text
from reprokit.render.names import Names

Leaf = Callable[[Any], Expr]


def write_step(call: Call, leaf: Leaf, names: Names, tensors: Tensors) -> Iterator[str]:
    """The statements of a ``torch.optim.<Class>.step`` call."""
    groups = list(
        zip(call.kwargs["params"], call.kwargs["grads"], call.kwargs["options"], call.kwargs["state"], strict=True)
    )
    for params, grads, _, _ in groups:
        for param, grad in zip(params, grads, strict=True):
            if grad is not None:
                yield f"{leaf(param).text}.grad = {_gradient_text(param, grad, leaf, tensors)}"
    opt = names.unique("opt")
    cls = call.target.rpartition(".")[0]
    unusual = [_unusual(cls, options) for _, _, options, _ in groups]
    given = [options if _is_accepted(cls, options, tensors) else {} for options in unusual]
    yield f"{opt} = {_constructor(cls, call.kwargs['params'], given, leaf).text}"
    for place, (options, accepted) in enumerate(zip(unusual, given, strict=True)):
        if options != accepted:
            yield expression.call(f"{opt}.param_groups[{place}].update", [], _written(options, leaf)).text
    for params, _, _, states in groups:
        for param, state in zip(params, states, strict=True):
            if state:
                yield f"{opt}.state[{leaf(param).text}] = {expression.argument(dict(state), leaf).text}"
    yield f"{opt}.step()"


def _gradient_text(param: Ref, grad: Ref, leaf: Leaf, tensors: Tensors) -> str:
    written = leaf(grad)
    if written.text.isidentifier() or grad.value not in tensors or param.value not in tensors:
        return written.text
    like, value = as_given(tensors[param.value]), as_given(tensors[grad.value])
    for function in (torch.zeros_like, torch.ones_like):
        if is_same(function(like), value):
            return f"torch.{function.__name__}({leaf(param).text})"
    first = value.reshape(-1)[0].item() if value.numel() else 0.0
    if value.is_floating_point() and is_same(torch.full_like(like, first), value):
        return f"torch.full_like({leaf(param).text}, {number_text(first, value.dtype)})"
    return written.text


def _constructor(cls: str, params: list[Any], options: list[dict[str, Any]], leaf: Leaf) -> Expr:
    if len(params) == 1:
        return expression.call(cls, [expression.argument(params[0], leaf)], _written(options[0], leaf))
    parts = [{"params": group, **given} for group, given in zip(params, options, strict=True)]
    return expression.call(cls, [expression.argument(parts, leaf)])


def _written(options: Mapping[str, Any], leaf: Leaf) -> dict[str, Expr]:
    return {name: expression.argument(value, leaf) for name, value in options.items()}


def _unusual(cls: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that differ from the class's defaults."""
    defaults = _defaults(cls)
    return {name: value for name, value in options.items() if name in defaults and not _is_equal(value, defaults[name])}


def _is_equal(value: Any, default: Any) -> bool:
    if isinstance(value, (list, tuple)) and isinstance(default, (list, tuple)):
        return list(value) == list(default)
    return type(value) is type(default) and bool(value == default)


def _is_accepted(cls: str, options: Mapping[str, Any], tensors: Tensors) -> bool:
    """True if the class can be made with these options."""
    given = map_leaves(options, lambda leaf: tensors.get(leaf.value) if isinstance(leaf, Ref) else leaf)
    try:
        _make(cls, **given)
    except (ValueError, TypeError, RuntimeError):
        return False
    return True


@functools.cache
def _defaults(cls: str) -> Mapping[str, Any]:
    return dict(_make(cls).defaults)


def _make(cls: str, **options: Any) -> Any:
    made: Any = getattr(torch.optim, cls.rpartition(".")[2])
    return made([torch.zeros(1, 1)], **options)  # a matrix, because some optimizers take nothing else
