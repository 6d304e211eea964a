"""The register of rewrites, and how a change reaches the origin and the calls like it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from reprokit.locate.calls import Slot, slot_of
from reprokit.locate.domains import number_named
from reprokit.locate.edits import Chain, Edited, Editor, at_siblings, guarded
from reprokit.locate.scene import Scene
from reprokit.program.ir import Call

Change = Callable[[Editor, Call], list[Call] | None]
Rewrite = Callable[..., Edited | None]
REWRITES: dict[str, Rewrite] = {}


def rewrite(function: Rewrite) -> Rewrite:
    """Register a rewrite under its name."""
    REWRITES[function.__name__] = function
    return function


def everywhere(scene: Scene, change: Change) -> Edited | None:
    """The step with a change made at the origin, and at the calls like it where it applies."""
    index = scene.failure.call_index
    if index is None:
        return None

    def lenient(editor: Editor, call: Call) -> list[Call] | None:
        try:
            return change(editor, call)
        except KeyError:
            return None

    program = at_siblings(scene.program, index, lenient)
    return Edited(program, scene.tensors) if program is not None else None


def guard(scene: Scene, operand: Slot, steps: Chain) -> Edited | None:
    """The step with a chain of calls on an argument in front of the origin and the calls like it."""
    return everywhere(scene, lambda editor, call: guarded(editor, call, slot_of(call, operand), steps))


def number_for(scene: Scene, operand: Slot, value: str | float) -> float:
    """A number of the catalogue in the dtype of an argument."""
    x = scene.tensor(operand)
    return number_named(value, x.dtype if x is not None and x.is_floating_point() else torch.float32)
