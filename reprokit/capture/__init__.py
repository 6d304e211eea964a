"""Watching a live training loop and saving its first failing step.

The package is callable: ``with reprokit.capture(): ...`` watches the loop inside the block (see `block`). Importing it
does not import torch; entering the block does.
"""

from __future__ import annotations

import sys
from types import ModuleType

from reprokit.capture.block import capture


class _CallablePackage(ModuleType):
    """Lets ``reprokit.capture(...)`` mean `block.capture`, although ``reprokit.capture`` is a package as well."""

    __call__ = staticmethod(capture)


sys.modules[__name__].__class__ = _CallablePackage
