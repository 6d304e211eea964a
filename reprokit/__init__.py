"""From a training script that fails to the smallest standalone program that fails the same way.

``with reprokit.capture():`` around a training loop does in code what ``reprokit capture script.py`` does for a whole
script. Importing this package does not import torch.
"""

from __future__ import annotations

from reprokit import capture
from reprokit.errors import ReprokitError

__version__ = "0.1.0"
__all__ = ["ReprokitError", "__version__", "capture"]
