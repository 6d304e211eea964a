"""From a training script that fails to the smallest standalone program that fails the same way.

``with reprokit.capture():`` around a training loop does in code what ``reprokit capture script.py`` does for a whole
script. Importing this package does not import torch.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from reprokit.capture import block as _block
from reprokit.errors import ReprokitError

if TYPE_CHECKING:
    from reprokit.capture.block import capture

__version__ = "0.1.0"
__all__ = ["ReprokitError", "__version__", "capture"]


class _CallablePackage(ModuleType):
    """The package ``reprokit.capture``, which is also the function of that name: ``with reprokit.capture():``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _block.capture(*args, **kwargs)


sys.modules["reprokit.capture"].__class__ = _CallablePackage
