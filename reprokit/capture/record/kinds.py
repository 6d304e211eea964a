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
    TRANSFORM = auto()  # of `torch.func`, a scripted or a compiled function
    COMPILED = auto()  # a compiled function that differentiates or updates parameters itself
    BACKWARD = auto()  # also `torch.autograd.grad`
    ZERO_GRAD = auto()
    CLIP = auto()
    SCALE = auto()
    UNSCALE = auto()
    OPTIMIZER = auto()
    COLLECTIVE = auto()  # writes what all processes have into its first argument


MODULE: Final = EntryKind.MODULE
FUNCTION: Final = EntryKind.FUNCTION
TRANSFORM: Final = EntryKind.TRANSFORM
COMPILED: Final = EntryKind.COMPILED
BACKWARD: Final = EntryKind.BACKWARD
ZERO_GRAD: Final = EntryKind.ZERO_GRAD
CLIP: Final = EntryKind.CLIP
SCALE: Final = EntryKind.SCALE
UNSCALE: Final = EntryKind.UNSCALE
OPTIMIZER: Final = EntryKind.OPTIMIZER
COLLECTIVE: Final = EntryKind.COLLECTIVE
FORWARD: Final = (MODULE, FUNCTION, TRANSFORM)
DIFFERENTIATING: Final = (BACKWARD, COMPILED)
