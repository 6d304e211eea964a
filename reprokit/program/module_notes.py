"""Notes about modules that were entered: for printing, never for executing."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from reprokit.program.ir import ModuleNote
from reprokit.program.sites import relative_path


def note_of(module: torch.nn.Module) -> ModuleNote:
    """The note for a context repro: torch's own layers by their constructor arguments, user
    classes by place and text."""
    cls = type(module)
    if cls.__module__.startswith("torch.nn.modules"):
        return ModuleNote(cls.__name__, module.training, _constructor_arguments(module))
    try:
        file, (lines, line) = inspect.getsourcefile(cls) or "", inspect.getsourcelines(cls)
    except (OSError, TypeError):
        file, lines, line = "", [], 0
    place = relative_path(file) if file else ""
    return ModuleNote(cls.__qualname__, module.training, {}, place, line, "".join(lines))


def _constructor_arguments(module: torch.nn.Module) -> dict[str, Any]:
    """Those constructor arguments that the layer kept as attributes of plain types."""
    found = {}
    for name in inspect.signature(type(module).__init__).parameters:
        value = getattr(module, name, None)
        if name != "self" and isinstance(value, (bool, int, float, str, tuple, list)):
            found[name] = value
    if "bias" in inspect.signature(type(module).__init__).parameters and "bias" in module._parameters:
        found["bias"] = module._parameters["bias"] is not None
    return found
