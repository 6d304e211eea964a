"""Functions that call torch in place of reprokit's own code, so that a warning names the user's line.

Python attributes a warning to a frame: its file, line, module and registry of the warnings that were shown. Where a
hook performs a call of the loop, that frame would be the hook's. So it performs the call through a stand-in: a
function with the file and the globals of the calling frame, whose only line has the number of the line that runs
there. One is made for each place that calls, and found by its instruction from then on. Tracebacks leave stand-ins
out (`reprokit.errors.is_own`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

from reprokit import torch_private
from reprokit.capture.callers import KINDS
from reprokit.errors import STAND_IN

StandIn = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any] | None], Any]

# The name of the first argument marks the code. It is one line: `co_firstlineno` is the line of everything in it.
exec(f"def _stand_in({STAND_IN}, args, kwargs): return {STAND_IN}(*args, **kwargs) if kwargs else {STAND_IN}(*args)")
_TEMPLATE: CodeType = globals()["_stand_in"].__code__
_MOST = 10_000  # code that is made anew all the time, such as that of notebooks, would fill the table
STAND_INS: dict[tuple[int, int], StandIn] = {}  # by the ``id`` of the calling code and the offset of its instruction
_CODES: dict[int, CodeType] = {}  # kept, so that each ``id`` stays its own


def stand_in(frame: FrameType, function: Callable[..., Any]) -> StandIn:
    """The stand-in for whoever calls ``function``, seen from ``frame``: a frame of reprokit's, of torch's dispatch to a
    mode, or the calling frame itself."""
    frame = _calling(frame, function)
    key = id(frame.f_code), frame.f_lasti
    found: Any = STAND_INS.get(key)
    if found is not None and found.__globals__ is frame.f_globals:
        return found  # type: ignore[no-any-return]
    if len(STAND_INS) >= _MOST:
        forget()
    line = frame.f_lineno or frame.f_code.co_firstlineno
    code = _TEMPLATE.replace(co_filename=frame.f_code.co_filename, co_firstlineno=line, co_name=frame.f_code.co_name)
    made = FunctionType(code, frame.f_globals)
    _CODES[key[0]], _CODES[id(code)] = frame.f_code, code
    KINDS[id(code)] = "other"  # no search for the loop ends here: the frame that it stands for is further out
    STAND_INS[key] = made
    return made


def as_called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function as whoever has called the hook would."""
    return stand_in(sys._getframe(1), function)(function, args, kwargs)


def forget() -> None:
    """Let go of the user's code and globals."""
    STAND_INS.clear()
    for number, code in list(_CODES.items()):
        if code.co_varnames[:1] == (STAND_IN,):
            KINDS.pop(number, None)
    _CODES.clear()


def _calling(frame: FrameType, function: Callable[..., Any]) -> FrameType:
    walker: FrameType | None = frame
    while walker is not None and walker.f_code.co_filename.startswith(OWN):
        walker = walker.f_back
    if walker is None:
        return frame
    if walker.f_code is not torch_private.handle_code:
        return walker
    # A function that is written in Python asks the mode itself, and is called again by it: the calling frame is the one
    # around the outer call. Wrappers of torch's may lie between, so it is recognised by its code.
    caller, code = walker.f_back, getattr(function, "__code__", None)
    outer = caller
    while outer is not None and outer.f_code is not code and outer.f_code.co_filename.startswith(_TORCH):
        outer = outer.f_back
    if outer is None or outer.f_code is not code:
        outer = caller
    return outer.f_back if outer is not None and outer.f_back is not None else frame


OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch_private.handle_code.co_filename) + os.sep if torch_private.handle_code else OWN
