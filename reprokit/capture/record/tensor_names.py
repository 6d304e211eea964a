"""Names for the tensors a program starts from, as the user knows them: state-dict names, argument names, variables."""

from __future__ import annotations

import ast
import inspect
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

from reprokit.capture.record import kinds
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.structure import iter_tensors
from reprokit.program.sites import kind_of_file, make_site
from reprokit.program.statement import parts
from reprokit.program.trace import InputName
from reprokit.words import item_name

_MAX_FRAMES = 30
_PLAIN_NAMES = frozenset({"input", "args", "kwargs"})


_unfollowed: dict[int, weakref.ref[torch.Tensor]] = {}


def note_unfollowed(value: Any) -> None:
    """Remember that tensors came out of a call that is not noted, so that they are not taken for data."""
    for tensor in iter_tensors(value):
        key = id(tensor)
        _unfollowed[key] = weakref.ref(tensor, lambda _, key=key: _unfollowed.pop(key, None))  # type: ignore[misc]


def is_unfollowed(tensor: torch.Tensor) -> bool:
    """True if a tensor came out of such a call."""
    known = _unfollowed.get(id(tensor))
    return known is not None and known() is tensor


class Names:
    """Knows tensors by identity. The first name that was added wins; the largest root names the parameters."""

    def __init__(self) -> None:
        self._origins: dict[int, InputName] = {}
        self._roots: list[torch.nn.Module] = []

    def describe(self, tensor: torch.Tensor) -> InputName | None:
        """The name and role of a tensor, or ``None``."""
        known = self._origins.get(id(tensor))
        if known is None and tensor.grad_fn is not None:  # what a custom autograd function returned
            return InputName(f"{tensor.grad_fn.name().removesuffix('Backward')}_output", "opaque")
        return known

    def add_root(self, module: torch.nn.Module) -> None:
        """Parameters and buffers of a root module, by their state-dict names."""
        self._roots.append(module)

    def add_arguments(self, entry: Entry, *, plain: bool = False) -> None:
        """The arguments of a root module, by the parameter names of its forward.

        ``plain`` names such as torch's own ``input`` say less than those of the loop's variables, which may come
        before.
        """
        if entry.kind is not kinds.MODULE:
            return
        try:
            bound = inspect.signature(entry.target.forward).bind(*entry.args, **entry.kwargs)
        except (TypeError, ValueError):
            return
        for name, value in bound.arguments.items():
            if plain or name not in _PLAIN_NAMES:
                self._add_values(name, value)

    def add_locals(self, frame: FrameType | None) -> None:
        """Variables of the user's functions that are running, innermost first."""
        for _ in range(_MAX_FRAMES):
            if frame is None:
                return
            if kind_of_file(frame.f_code.co_filename) == "user":
                for name, value in list(frame.f_locals.items()):
                    if isinstance(value, (torch.Tensor, list, tuple, dict)) and not name.startswith("_"):
                        self._add_values(name, value)
            frame = frame.f_back

    def add_by_place(self, entries: list[Entry], likewise: list[Entry]) -> None:
        """Names for what earlier calls of the same lines were given: those of ``likewise``, argument by argument."""
        known = {}
        for entry in likewise:
            for position, tensor in enumerate(iter_tensors((entry.args, entry.kwargs))):
                origin = self._origins.get(id(tensor))
                if origin is not None and origin.role == "batch":
                    known[entry.code, entry.instruction, entry.name, position] = origin
        for entry in entries:
            for position, tensor in enumerate(iter_tensors((entry.args, entry.kwargs))):
                origin = known.get((entry.code, entry.instruction, entry.name, position))
                if origin is not None:
                    self._origins.setdefault(id(tensor), origin)

    def add_by_source(self, entry: Entry) -> None:
        """Names of the variables that a root module is given where its call is written."""
        if entry.kind is kinds.MODULE and entry.code is not None:
            calls = (part for part in parts(make_site(entry.code, entry.instruction)) if isinstance(part, ast.Call))
            given = next((call.args for call in calls), [])
            for argument, value in zip(given, entry.args, strict=False) if len(given) == len(entry.args) else ():
                if isinstance(argument, ast.Name):
                    self._add_values(argument.id, value)

    def _add_values(self, name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in list(value.items())[:64]:
                if isinstance(item, torch.Tensor):
                    self._origins.setdefault(id(item), InputName(item_name(name, str(key))))
            return
        for tensor in list(iter_tensors(value))[:64] if not isinstance(value, torch.Tensor) else [value]:
            self._origins.setdefault(id(tensor), InputName(name))

    def name_roots(self, names: Mapping[int, str]) -> None:
        """Name parameters and buffers, behind the root's name where ``names`` has it; to be called before other names
        are added."""
        for module in sorted(self._roots, key=lambda root: -sum(1 for _ in root.parameters())):
            root = f"{names[id(module)]}." if id(module) in names else ""
            for name, parameter in module.named_parameters():
                self._origins.setdefault(id(parameter), InputName(root + name, "parameter"))
            for name, buffer in module.named_buffers():
                self._origins.setdefault(id(buffer), InputName(root + name, "buffer"))
