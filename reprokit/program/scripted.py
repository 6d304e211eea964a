"""Calls of what `torch.jit` has compiled: torch functions made there go past every function mode.

A scripted or traced function is known by the Python function that it was made from. A method of a scripted module is
known by that of the module's class. Neither is there for what was loaded from a file.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch

SCRIPTED = (torch.jit.ScriptFunction, torch._C.ScriptMethod)
_CALL_IMPL = torch.nn.Module._call_impl.__code__
_MODULE_CALLS = frozenset({_CALL_IMPL, *(part for part in _CALL_IMPL.co_consts if isinstance(part, CodeType))})


@contextlib.contextmanager
def calls_replaced(perform: Callable[..., Any]) -> Iterator[None]:
    """Have calls performed by ``perform(original, function, python, *args, **kwargs)``."""
    before: list[tuple[Any, Any]] = [(owner, owner.__call__) for owner in SCRIPTED]
    try:
        for owner, original in before:
            owner.__call__ = _replaced(original, perform)
        yield
    finally:
        for owner, original in before:
            owner.__call__ = original


def _replaced(original: Any, perform: Callable[..., Any]) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return perform(original, self, _python_of(self, sys._getframe(1)), *args, **kwargs)

    return __call__


def name_of_scripted(function: Any) -> str:
    """What the user calls a compiled function or method."""
    if not isinstance(function, torch._C.ScriptMethod):
        return str(function.name)
    kind: Any = function.owner._type()
    return f"{kind.name()}.{function.name}"


def _python_of(function: Any, caller: FrameType) -> Callable[..., Any] | None:
    """The Python function that a call stands for; ``None`` if it is not known, or would change attributes again."""
    if any(node.kind() == "prim::SetAttr" for node in function.inlined_graph.nodes()):
        return None
    if not isinstance(function, torch._C.ScriptMethod):
        return getattr(function, "_torchdynamo_inline", None)
    module = caller.f_locals.get("self") if caller.f_code in _MODULE_CALLS else None
    written = getattr(getattr(module, "_concrete_type", None), "py_class", None)
    method = getattr(written, function.name, None) if isinstance(written, type) else None
    return method.__get__(module) if method is not None else None
