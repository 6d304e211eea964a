"""Whose code is running: the user's, that of a module's call, of a custom autograd function, or anybody else's.

What a frame runs is looked up once for each piece of code.
"""

from __future__ import annotations

from types import CodeType, FrameType

import torch

from reprokit.program.ir import OPAQUE, Call
from reprokit.program.sites import current_site, kind_of_file

_CALL_IMPL = torch.nn.Module._call_impl.__code__
_FUNCTION_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def first_user_frame(frame: FrameType) -> FrameType:
    """The innermost frame of the user's code, from ``frame`` outwards; ``frame`` itself if there is none."""
    walker: FrameType | None = frame
    while walker is not None:
        if (_KINDS.get(id(walker.f_code)) or _kind_of_code(walker.f_code)) == "user":
            return walker
        walker = walker.f_back
    return frame


def caller_of(frame: FrameType) -> tuple[FrameType | None, FrameType | None]:
    """The user's frame that calls a torch function, and the frame of the outermost module that runs around it.

    Both are ``None`` inside a custom autograd function.
    """
    root: FrameType | None = None
    user: FrameType | None = None
    walker: FrameType | None = frame
    while walker is not None:
        kind = _KINDS.get(id(walker.f_code)) or _kind_of_code(walker.f_code)
        if kind != "other":
            if kind == "user":
                user = user or walker
            elif kind == "function":
                return None, None
            else:
                root = walker
        walker = walker.f_back
    return user or frame, root


def compiled_call(frame: FrameType | None) -> Call | None:
    """The call of a compiled function that runs, as an `OPAQUE` call without results; ``None`` if none does."""
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            function = frame.f_locals.get("fn")
            name = getattr(function, "__qualname__", type(function).__name__)
            return Call(OPAQUE, (), {"name": name, "source": "", "is_compiled": True}, site=current_site(frame.f_back))
        frame = frame.f_back
    return None


def _kind_of_code(code: CodeType) -> str:
    """``user``, ``module`` for a module's call, ``function`` for a custom autograd function's, or ``other``."""
    if code is _FUNCTION_APPLY:
        kind = "function"
    elif code is _CALL_IMPL:
        kind = "module"
    else:
        kind = "user" if kind_of_file(code.co_filename) == "user" else "other"
    _KINDS[id(code)] = kind
    _CODES.append(code)  # so that the id stays its own
    return kind


_KINDS: dict[int, str] = {}
_CODES: list[CodeType] = []
