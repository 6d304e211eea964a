"""A stage of a pipeline (`torch.distributed.pipelining`): did a bad value begin in it, or did another stage send it?"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from reprokit.capture.record import kinds
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.screens import bad_tensor
from reprokit.capture.record.structure import iter_tensors


def first_bad(entries: Iterable[Entry], *, is_first: bool) -> tuple[str, Entry] | None:
    """The first call of a step that a bad value went through: ``sent`` by another stage, or an ``output`` of this one.

    What the first stage (``is_first``) is given comes from the loop.
    """
    for entry in entries:
        if entry.kind is kinds.MODULE:
            if not is_first and _is_bad((entry.args, entry.kwargs)):
                return "sent", entry
            if _is_bad(entry.output):
                return "output", entry
        elif entry.kind is kinds.BACKWARD and entry.gives_gradients and _is_bad((entry.args[1:], entry.kwargs)):
            return "sent", entry
    return None


def _is_bad(value: object) -> bool:
    floating = [t.detach() for t in iter_tensors(value) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return bad_tensor(floating) is not None
