"""The kinds of entries: what the loop called decides how an entry is replayed.

Compare with ``entry.kind is kinds.MODULE``: Python 3.11 takes 0.3 us to find a member in an enum, 15 ns in a module.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class EntryKind(Enum):
    """What the loop called. Members are compared by identity."""

    MODULE = auto()
    FUNCTION = auto()
    TRANSFORM = auto()  # of `torch.func`, or a scripted function
    BACKWARD = auto()  # also `torch.autograd.grad`
    ZERO_GRAD = auto()
    CLIP = auto()
    SCALE = auto()
    UNSCALE = auto()
    OPTIMIZER = auto()


MODULE: Final = EntryKind.MODULE
FUNCTION: Final = EntryKind.FUNCTION
TRANSFORM: Final = EntryKind.TRANSFORM
BACKWARD: Final = EntryKind.BACKWARD
ZERO_GRAD: Final = EntryKind.ZERO_GRAD
CLIP: Final = EntryKind.CLIP
SCALE: Final = EntryKind.SCALE
UNSCALE: Final = EntryKind.UNSCALE
OPTIMIZER: Final = EntryKind.OPTIMIZER
FORWARD: Final = (MODULE, FUNCTION, TRANSFORM)
