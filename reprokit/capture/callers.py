"""Whose code calls: the user's, that of a module's call, of a custom autograd function, a library's, or torch's.

What a frame runs is looked up once for each piece of code.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from reprokit import torch_private
from reprokit.own_work import passed_over
from reprokit.program.sites import is_standard, kind_of_file


def applying(original: Any) -> Callable[..., Any]:
    """``Function.apply`` with a frame; ``original`` is the class method, which is written in C from torch 2.14 on."""

    @passed_over
    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        return original.__get__(None, cls)(*args, **kwargs)

    return apply


_APPLY = getattr(torch.autograd.Function.apply, "__func__", None)
HAS_FRAME_OF_APPLY = _APPLY is not None
_FUNCTION_APPLY = (_APPLY or applying(None)).__code__


def first_user_frame(frame: FrameType) -> FrameType:
    """The innermost frame of the user's code, from ``frame`` outwards; ``frame`` itself if there is none."""
    walker: FrameType | None = frame
    while walker is not None:
        if (KINDS.get(id(walker.f_code)) or _kind_of_code(walker.f_code)) in _USER:
            return walker
        walker = walker.f_back
    return frame


def learn_loop(code: CodeType | None, frame: FrameType | None) -> None:
    """``code`` is the user's and makes an optimizer's step: it and the functions of the user's around ``frame`` are the
    training loop, at which a search for a module's call ends."""
    if KINDS.get(id(code)) not in ("user", "loop"):
        return
    num_known = 0
    while frame is not None and num_known < 2:  # the function may be called by another loop now
        kind = KINDS.get(id(frame.f_code)) or _kind_of_code(frame.f_code)
        if kind == "user":
            KINDS[id(frame.f_code)] = "loop"
        num_known += kind in ("loop", "top")
        frame = frame.f_back


def caller_of(frame: FrameType, meet: Callable[[type], object]) -> tuple[FrameType | None, bool]:
    """The user's frame that calls a torch function, ``None`` inside a custom autograd function; true if a library's
    code is between the two. ``meet`` is called with the class of the outermost module that runs around it.

    The search ends at a module's own level, around which no model runs.
    """
    root: FrameType | None = None
    user: FrameType | None = None
    has_library = False
    walker: FrameType | None = frame
    while walker is not None:
        kind = KINDS.get(id(walker.f_code)) or _kind_of_code(walker.f_code)
        if kind == "user":
            user = user or walker
        elif kind == "top" or kind == "loop":
            user = user or walker
            break
        elif kind == "library":
            has_library = has_library or user is None
        elif kind == "module":
            root = walker
        elif kind == "function":
            return None, False
        walker = walker.f_back
    if root is not None:
        meet(type(root.f_locals["self"]))
    return user or frame, has_library


def _kind_of_code(code: CodeType) -> str:
    """``user`` (``top`` outside of functions; later ``loop``, see `learn_loop`), ``module`` for a module's call,
    ``function`` for a custom autograd function's, ``library``, or ``other``."""
    if code is _FUNCTION_APPLY:
        kind = "function"
    elif code is torch_private.call_impl_code:
        kind = "module"
    else:
        kind = kind_of_file(code.co_filename)
        if kind == "user":
            kind = "top" if code.co_name == "<module>" else "user"
        elif kind != "library" or is_standard(code.co_filename):
            kind = "other"
    KINDS[id(code)] = kind
    _CODES.append(code)  # so that the id stays its own
    return kind


_USER = ("user", "loop", "top")
KINDS: dict[int, str] = {}
_CODES: list[CodeType] = []
