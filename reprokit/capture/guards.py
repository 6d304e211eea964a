"""Hooks of the user's that raise, such as checks for NaN: in a replay they stay, and what they raise is ignored.

A hook may change what a module returns, so none is left out. The failure is the bad value, not the check that saw it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch

_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
Hooks = MutableMapping[int, Callable[..., Any]]


@contextlib.contextmanager
def silenced(modules: Iterable[torch.nn.Module], leaves: Iterable[torch.Tensor]) -> Iterator[list[Exception]]:
    """Ignore what hooks of modules and tensors raise; yields the exceptions that were ignored."""
    ignored: list[Exception] = []
    parts = {id(part): part for module in modules for part in module.modules()}.values()
    tables: list[Hooks] = [getattr(part, name) for part in parts for name in _OF_MODULES]
    tables += [getattr(torch.nn.modules.module, name, {}) for name in _GLOBAL]
    tables += [hooks for leaf in leaves if (hooks := leaf._backward_hooks)]
    before = [(table, dict(table)) for table in tables if table]
    register: Any = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        return register(tensor, _quiet(hook, ignored))

    try:
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
        for table, content in before:
            table.update({key: _quiet(hook, ignored) for key, hook in content.items()})
        yield ignored
    finally:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]
        for table, content in before:
            table.update({key: hook for key, hook in content.items() if key in table})


def _quiet(hook: Callable[..., Any], ignored: list[Exception]) -> Callable[..., Any]:
    @functools.wraps(hook, assigned=("__name__", "__doc__"), updated=())
    def quiet(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            ignored.append(error)
            return None

    return quiet
