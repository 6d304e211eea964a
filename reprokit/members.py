"""The parts of a module, their parameters and their buffers, read from where modules store them.

`nn.Module.named_parameters` and the like call what a class of the user's has in their place, `Tensor.__hash__` and
`__getattribute__`. Here none of these runs. Order and names are torch's; what is there twice counts once, by identity.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from reprokit import torch_private
from reprokit.torch_private import space_of_module, stored

__all__ = ["space_of_module"]


def named_modules(root: torch.nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, torch.nn.Module]]:
    """A module and all inside it, each with its path."""
    found: list[tuple[str, torch.nn.Module]] = []
    met: set[int] = set()
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if remove_duplicate and id(module) in met:
            continue
        met.add(id(module))
        found.append((path, module))
        children = _items(module, torch_private.MODULES)
        waiting += [(_joined(path, name), child) for name, child in reversed(children) if child is not None]
    return found


def modules(root: torch.nn.Module) -> list[torch.nn.Module]:
    """A module and all inside it."""
    return [module for _, module in named_modules(root)]


def parts(roots: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Modules and all inside them."""
    return list({id(part): part for root in roots for part in modules(root)}.values())


def children_names(module: torch.nn.Module) -> list[str]:
    """The names of the modules that a module holds itself."""
    return [name for name, child in _items(module, torch_private.MODULES) if child is not None]


def named_parameters(
    root: torch.nn.Module, *, recurse: bool = True, remove_duplicate: bool = True
) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters of a module, of itself alone unless ``recurse``, each with its path."""
    return _named_tensors(root, torch_private.PARAMETERS, recurse, remove_duplicate)


def parameters(root: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters of a module and of all inside it."""
    return [parameter for _, parameter in named_parameters(root)]


def named_buffers(root: torch.nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, torch.Tensor]]:
    """The buffers of a module and of all inside it, each with its path."""
    return _named_tensors(root, torch_private.BUFFERS, True, remove_duplicate)


def buffers(root: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers of a module and of all inside it."""
    return [buffer for _, buffer in named_buffers(root)]


def own_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that a module holds itself."""
    return [parameter for _, parameter in named_parameters(module, recurse=False)]


def own_buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    """The buffers that a module holds itself."""
    return [buffer for _, buffer in _named_tensors(module, torch_private.BUFFERS, False, True)]


def tensors(root: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of a module."""
    return [*parameters(root), *buffers(root)]


def buffer_table(module: torch.nn.Module) -> Any:
    """A module's own buffers as it stores them, also those that are ``None``."""
    return stored(module, torch_private.BUFFERS)


def _named_tensors(root: torch.nn.Module, table: str, recurse: bool, remove_duplicate: bool) -> list[tuple[str, Any]]:
    parts = named_modules(root, remove_duplicate=remove_duplicate) if recurse else [("", root)]
    found: list[tuple[str, Any]] = []
    met: set[int] = set()
    for path, module in parts:
        for name, tensor in _items(module, table):
            if tensor is None or id(tensor) in met:
                continue
            if remove_duplicate:
                met.add(id(tensor))
            found.append((_joined(path, name), tensor))
    return found


def _items(module: torch.nn.Module, table: str) -> list[tuple[str, Any]]:
    found = stored(module, table)
    return list(dict.items(found) if issubclass(type(found), dict) else found.items())  # a scripted module has no dict


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
