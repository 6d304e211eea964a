"""Hooks of the user's in a replay: they are called, and what they raise is ignored.

A program holds no hooks of a backward pass, and one that steps an optimizer would change the live state. So a step is
recorded without those. Torch's own hooks, such as those of ``weight_norm``, always stay.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from reprokit.arrivals import pass_on
from reprokit.program.sites import kind_of_file

Hooks = MutableMapping[int, Callable[..., Any]]


@contextlib.contextmanager
def quiet_hooks(
    modules: Iterable[torch.nn.Module], leaves: Iterable[torch.Tensor], *, is_recorded: bool = False
) -> Iterator[list[Any]]:
    """Ignore what hooks raise. Yields the list of hooks that have raised, or were left out of a recorded step."""
    met: list[Any] = []
    register: Any = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if is_recorded and _is_users(hook):
            met.append(hook)
            return RemovableHandle(OrderedDict())
        return register(tensor, _quiet(hook, met))

    tables = list(_tables(modules, leaves))
    before = [(table, dict(table)) for table, _ in tables]
    try:
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
        for table, is_of_backward in tables:
            for key, hook in list(table.items()):
                if is_recorded and is_of_backward and _is_users(hook):
                    met.append(table.pop(key))
                else:
                    table[key] = _quiet(hook, met)
        yield met
    finally:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]
        for table, content in before:
            table.clear()
            table.update(content)


def _tables(modules: Iterable[torch.nn.Module], leaves: Iterable[torch.Tensor]) -> Iterator[tuple[Hooks, bool]]:
    """The tables of hooks that are not empty: of modules, of all modules, and of leaves; true for backward passes."""
    parts = {id(part): part for module in modules for part in module.modules()}.values()
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        everywhere = getattr(torch.nn.modules.module, f"_global{name}", {})
        tables = (*(getattr(part, name) for part in parts), everywhere)
        yield from ((table, name.startswith("_backward")) for table in tables if table)
    for leaf in leaves:
        yield from ((table, True) for table in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks) if table)


def code_of(hook: Any) -> Any:
    """The code that a hook runs, ``None`` if that is not Python."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    return getattr(function if hasattr(function, "__code__") else type(hook).__call__, "__code__", None)


def _is_users(hook: Any) -> bool:
    code = code_of(hook)
    return code is None or kind_of_file(code.co_filename) not in ("torch", "own")


def _quiet(hook: Callable[..., Any], met: list[Any]) -> Callable[..., Any]:
    @functools.wraps(hook, assigned=("__name__", "__doc__"), updated=())
    def quiet(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            pass_on(error)
            met.append(hook)
            return None

    return quiet
