"""Functions that call torch in place of reprokit's own code, so that a warning names the user's line.

Python attributes a warning to a frame: its file, line, module and registry of the warnings that were shown. Where a
hook performs a call of the loop, that frame would be the hook's. So it performs the call through a stand-in: a
function with the file and the globals of the calling frame, whose only line has the number of the line that runs
there. One is made for each place of a module that calls, and found by its instruction from then on. Code in a namespace
that is no module's (`exec`, notebooks) gets one for each call, because a stand-in keeps its globals alive. Tracebacks
leave stand-ins out (`reprokit.errors.is_own`).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from reprokit import torch_private
from reprokit.capture.callers import KINDS
from reprokit.errors import STAND_IN, attempt
from reprokit.own_work import passed_over

StandIn = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any] | None], Any]

# The name of the first argument marks the code. It is one line: `co_firstlineno` is the line of everything in it.
exec(f"def _stand_in({STAND_IN}, args, kwargs): return {STAND_IN}(*args, **kwargs) if kwargs else {STAND_IN}(*args)")
exec(f"def _around({STAND_IN}, args, kwargs, inner): return inner({STAND_IN}, args, kwargs)")
_TEMPLATE: CodeType = globals()["_stand_in"].__code__
_OUTER_TEMPLATE: CodeType = globals()["_around"].__code__
_MOST_FRAMES = 6  # between a function of torch that warns and the user's line: those of a layer's call are four
_MOST_CALLERS = 8  # around a backward call: three frames of torch's are between it and a `Function.backward`
_MOST = 10_000  # code that is made anew all the time, such as that of notebooks, would fill the table
STAND_INS: dict[tuple[int, int], StandIn] = {}  # by the ``id`` of the calling code and the offset of its instruction
_OUTER: dict[tuple[int, int, int], StandIn] = {}  # the same with the ``id`` of the one that it calls
_WITH_CALLERS: dict[tuple[int, ...], StandIn] = {}  # by the places of the frames around a call
_MADE: dict[tuple[int, int, int], CodeType] = {}  # of stand-ins: by calling code, offset and the template's ``id``
_CODES: dict[int, CodeType] = {}  # kept, so that each ``id`` stays its own


def stand_in(frame: FrameType, function: Callable[..., Any]) -> StandIn:
    """The stand-in for whoever calls ``function``, seen from ``frame``: a frame of reprokit's, of torch's dispatch to a
    mode, or the calling frame itself.

    Where torch calls, it may attribute a warning to whoever has called it (`nn.Softmax` to its fifth frame): then there
    is one more for each frame of torch's, and for the first around these.
    """
    return attempt(lambda: _found(frame, function)) or directly


def _found(frame: FrameType, function: Callable[..., Any]) -> StandIn:
    frame = _calling(frame, function)
    key = id(frame.f_code), frame.f_lasti
    found: Any = STAND_INS.get(key)
    is_kept = _is_of_module(frame)
    if found is None or found.__globals__ is not frame.f_globals:
        if len(_MADE) + len(_OUTER) >= _MOST:
            forget()
        found = _made(_TEMPLATE, frame)
        if is_kept:
            STAND_INS[key] = found
    if not frame.f_code.co_filename.startswith(TORCH):
        return found  # type: ignore[no-any-return]
    return _with_outer(frame, found, _MOST_FRAMES, is_of_torch=True)


def with_callers(frame: FrameType, function: Callable[..., Any]) -> StandIn:
    """The stand-in for whoever calls ``function``, which runs code of the user's, in those for the frames around it."""
    if frame.f_code is torch_private.handle_code or frame.f_code.co_filename.startswith(OWN):
        frame = _calling(frame, function)
    # Every backward call of a loop comes through here: the key is made without a call of ours.
    key: list[int] = []
    num_left = _MOST_CALLERS + 1
    walker: FrameType | None = frame
    while walker is not None and num_left:
        key += id(walker.f_code), walker.f_lasti, id(walker.f_globals)
        num_left -= not walker.f_code.co_filename.startswith(OWN)
        walker = walker.f_back
    places = tuple(key)
    found = _WITH_CALLERS.get(places)
    if found is None:
        found = attempt(lambda: _made_with_callers(frame, function, places)) or stand_in(frame, function)
    return found


def _made_with_callers(frame: FrameType, function: Callable[..., Any], places: tuple[int, ...]) -> StandIn:
    found: StandIn = _with_outer(frame, stand_in(frame, function), _MOST_CALLERS, is_of_torch=False)
    around: list[FrameType] = [frame]
    while len(around) * 3 < len(places) and around[-1].f_back is not None:
        around.append(around[-1].f_back)
    if all(map(_is_of_module, around)):
        _WITH_CALLERS[places] = found
    return found


def _with_outer(frame: FrameType, inner: Any, most: int, *, is_of_torch: bool) -> StandIn:
    """The outermost of the stand-ins around ``inner``: up to the first frame that is not of torch if ``inner``
    ``is_of_torch``, else as many as ``most``."""
    is_kept = _is_of_module(frame)
    for _ in range(most):
        back = frame.f_back
        while back is not None and back.f_code.co_filename.startswith(OWN):
            back = back.f_back
        if back is None:
            break
        is_kept = is_kept and _is_of_module(back)
        key = id(back.f_code), back.f_lasti, id(inner)
        outer: Any = _OUTER.get(key) if is_kept else None
        if outer is None:
            outer = _made(_OUTER_TEMPLATE, back, inner)
            if is_kept:
                _OUTER[key] = outer
        frame, inner = back, outer
        if is_of_torch and not frame.f_code.co_filename.startswith(TORCH):
            break
    return inner  # type: ignore[no-any-return]


def _is_of_module(frame: FrameType) -> bool:
    """True if the globals of a frame are those of a module, which live as long as the process does."""
    module = sys.modules.get(frame.f_globals.get("__name__", ""))
    return module is not None and module.__dict__ is frame.f_globals


@passed_over
def directly(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
    return function(*args, **(kwargs or {}))


def _made(template: CodeType, frame: FrameType, *inner: StandIn) -> FunctionType:
    return FunctionType(_code_of(template, frame), frame.f_globals, argdefs=inner or None)


def _code_of(template: CodeType, frame: FrameType) -> CodeType:
    calling = frame.f_code
    key = id(calling), frame.f_lasti, id(template)
    code = _MADE.get(key)
    if code is None:
        line = frame.f_lineno or calling.co_firstlineno
        code = template.replace(co_filename=calling.co_filename, co_firstlineno=line, co_name=calling.co_name)
        _MADE[key] = code
        _CODES[id(code)], _CODES[id(calling)] = code, calling
        KINDS[id(code)] = "other"  # no search for the loop ends here: the frame that it stands for is further out
    return code


@passed_over
def as_called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function as whoever has called the hook would."""
    if has_frame(function):
        return function(*args, **kwargs)
    return stand_in(sys._getframe(1), function)(function, args, kwargs)


def has_frame(function: Any) -> bool:
    """True for a function that is written in Python: it has a frame of its own, which a warning in it is counted from,
    and needs no stand-in where `passed_over` functions call it."""
    if type(function) is functools.partial:
        function = function.func
    return type(function) is FunctionType or (type(function) is MethodType and type(function.__func__) is FunctionType)


def forget() -> None:
    """Let go of the user's code and globals."""
    STAND_INS.clear()
    _OUTER.clear()
    _WITH_CALLERS.clear()
    _MADE.clear()
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
    while outer is not None and outer.f_code is not code and outer.f_code.co_filename.startswith(TORCH):
        outer = outer.f_back
    if outer is None or outer.f_code is not code:
        outer = caller
    return outer.f_back if outer is not None and outer.f_back is not None else frame


OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
TORCH = os.path.dirname(torch_private.handle_code.co_filename) + os.sep if torch_private.handle_code else OWN
