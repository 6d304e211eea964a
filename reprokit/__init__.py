"""From a training script that fails to the smallest standalone program that fails the same way.

``with reprokit.capture():`` around a training loop does in code what ``reprokit capture script.py`` does for a whole
script. Importing this package does not import torch.

PYTEST_DONT_REWRITE: pytest rewrites packages that have a plugin, and would warn that this one is imported already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Packages and functions share names. A package that is imported later would replace the function of its name.
import reprokit.capture
import reprokit.locate
import reprokit.render
import reprokit.shrink  # noqa: F401
from reprokit.api import Rendered, TraceRows, capture, load, locate, render, shrink, trace, verify
from reprokit.errors import ReprokitError
from reprokit.series.events import TrainingEvent

if TYPE_CHECKING:
    from reprokit.capture.session import Session
    from reprokit.locate.failure import Failure
    from reprokit.render.verify import VerifyResult
    from reprokit.shrink.reduction import Reduction
    from reprokit.snapshot.format import Snapshot

# `import reprokit.capture.launch as launch` looks the module up by the name of what stands for its package.
for _function in (capture, locate, render, shrink):
    _function.__name__ = f"reprokit.{_function.__name__}"

__version__ = "0.1.0"
__all__ = [
    "Failure",
    "Reduction",
    "Rendered",
    "ReprokitError",
    "Session",
    "Snapshot",
    "TraceRows",
    "TrainingEvent",
    "VerifyResult",
    "__version__",
    "capture",
    "load",
    "locate",
    "render",
    "shrink",
    "trace",
    "verify",
]

_HOMES = {  # of the classes, whose modules import torch
    "Failure": "reprokit.locate.failure",
    "Reduction": "reprokit.shrink.reduction",
    "Session": "reprokit.capture.session",
    "Snapshot": "reprokit.snapshot.format",
    "VerifyResult": "reprokit.render.verify",
}


def __getattr__(name: str) -> Any:
    """Import a class when it is asked for first."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
