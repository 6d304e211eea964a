"""Warnings name the line of the loop that they are about, not the line of reprokit that was between it and torch.

Python finds the line a warning is about by counting frames, and shows a warning once per line. With a tape in between,
the count ends in reprokit, and one line of ours would swallow the warnings of the whole loop.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.overrides

_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_DISPATCH = torch.overrides.handle_torch_function.__name__


def redirect_warnings() -> Callable[[], None]:
    """Begin to issue warnings about a line of ours again, about the loop's; returns what ends it."""
    original: Any = getattr(warnings, "_showwarnmsg", None)
    if original is None:
        return lambda: None

    def show(message: Any) -> None:
        frame = _asking(sys._getframe(1)) if message.filename.startswith(_OWN) else None
        if frame is None:
            original(message)
            return
        _forget(message.filename)
        warnings.warn_explicit(
            message.message,
            message.category,
            frame.f_code.co_filename,
            frame.f_lineno,
            frame.f_globals.get("__name__"),
            frame.f_globals.setdefault("__warningregistry__", {}),
            source=message.source,
        )

    warnings._showwarnmsg = show  # type: ignore[attr-defined]

    def end() -> None:
        if getattr(warnings, "_showwarnmsg", None) is show:
            warnings._showwarnmsg = original  # type: ignore[attr-defined]

    return end


def _asking(frame: FrameType | None) -> FrameType | None:
    """The frame behind the innermost frames of ours: the one that would have been named without us."""
    handed_over = False
    while frame is not None and not frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        handed_over = frame.f_code.co_name == _DISPATCH
        frame = frame.f_back
    return frame.f_back if frame is not None and handed_over else frame  # it was called by the function itself


def _forget(filename: str) -> None:
    """Let the next warning about this file be shown as well; where it belongs, it may be a new one."""
    for name, module in list(sys.modules.items()):
        if name.startswith("reprokit.capture.") and getattr(module, "__file__", None) == filename:
            getattr(module, "__warningregistry__", {}).clear()
