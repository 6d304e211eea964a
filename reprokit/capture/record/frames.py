"""Whose code is running: the user's, that of a module's call, of a custom autograd function, a library's, or torch's.

What a frame runs is looked up once for each piece of code.
"""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType, FrameType

import torch

from reprokit.program.ir import OPAQUE, Call
from reprokit.program.sites import current_site, is_standard, kind_of_file

_CALL_IMPL = torch.nn.Module._call_impl.__code__
_FUNCTION_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def first_user_frame(frame: FrameType) -> FrameType:
    """The innermost frame of the user's code, from ``frame`` outwards; ``frame`` itself if there is none."""
    walker: FrameType | None = frame
    while walker is not None:
        if (_KINDS.get(id(walker.f_code)) or _kind_of_code(walker.f_code)) in _USER:
            return walker
        walker = walker.f_back
    return frame


def plain_caller(frame: FrameType) -> FrameType | None:
    """The user's frame that calls a torch function; ``None`` unless it does so itself, and the loop runs around it."""
    user: FrameType | None = None
    walker: FrameType | None = frame
    while walker is not None:
        kind = _KINDS.get(id(walker.f_code)) or _kind_of_code(walker.f_code)
        if kind == "user":
            user = user or walker
        elif kind == "top" or kind == "loop":
            return user or walker
        elif kind != "other" and (user is None or kind != "library"):
            return None
        walker = walker.f_back
    return user or frame


def learn_loop(code: CodeType | None, frame: FrameType | None) -> None:
    """``code`` is the user's and makes an optimizer's step: it and the functions of the user's around ``frame`` are the
    training loop, at which a search for a module's call ends."""
    if _KINDS.get(id(code)) != "user":
        return
    while frame is not None:
        if (_KINDS.get(id(frame.f_code)) or _kind_of_code(frame.f_code)) == "user":
            _KINDS[id(frame.f_code)] = "loop"
        frame = frame.f_back


def caller_of(frame: FrameType) -> tuple[FrameType | None, FrameType | None, bool]:
    """The user's frame that calls a torch function, and the frame of the outermost module that runs around it.

    Both are ``None`` inside a custom autograd function. The third is true if a library's code is between the user's and
    torch. The search ends at a module's own level, around which no model runs.
    """
    root: FrameType | None = None
    user: FrameType | None = None
    has_library = False
    walker: FrameType | None = frame
    while walker is not None:
        kind = _KINDS.get(id(walker.f_code)) or _kind_of_code(walker.f_code)
        if kind == "user":
            user = user or walker
        elif kind == "top" or kind == "loop":
            return user or walker, root, has_library
        elif kind == "library":
            has_library = has_library or user is None
        elif kind == "module":
            root = walker
        elif kind == "function":
            return None, None, False
        walker = walker.f_back
    return user or frame, root, has_library


def compiled_call(frame: FrameType | None) -> Call | None:
    """The call of a compiled function that runs, as an `OPAQUE` call without results; ``None`` if none does."""
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            function = frame.f_locals.get("fn")
            name = getattr(function, "__qualname__", type(function).__name__)
            return Call(OPAQUE, (), {"name": name, "source": "", "is_compiled": True}, site=current_site(frame.f_back))
        frame = frame.f_back
    return None


def may_end_loop(frame: FrameType | None, code: CodeType | None, line: int) -> bool:
    """True if the running test in ``code``, further out than ``frame``, has an outcome that ends the loop around it.

    That is the innermost loop in which ``line`` runs, too; an outcome that can lead to another pass does not end it.
    """
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None and _may_end_loop(frame.f_code, frame.f_lasti, line)


@lru_cache(maxsize=64)
def _may_end_loop(code: CodeType, offset: int, line: int) -> bool:
    ops = list(dis.get_instructions(code))
    places = {op.offset: place for place, op in enumerate(ops)}
    jumps = {place: places[op.argval] for place, op in enumerate(ops) if op.opcode in _JUMPS}
    test = max(place for found, place in places.items() if found <= offset)  # a call's own caches come behind it
    while test not in jumps:  # a value that is stored or dropped may not be what the next test is about
        if ops[test].opname.startswith(_ENDS_OF_EXPRESSIONS):
            return False
        test += 1
    ends: dict[int, int] = {}  # of each loop, by where it begins
    for place, target in jumps.items():
        if target <= place:
            ends[target] = max(place, ends.get(target, 0))
    lines = [op.positions.lineno if op.positions is not None else None for op in ops]
    begin = max((b for b, end in ends.items() if b <= test <= end and line in lines[b : end + 1]), default=None)
    if begin is None or "_IF_" not in ops[test].opname:
        return False

    def ends_it(place: int) -> bool:
        waiting, seen, has_left = [place], set[int](), False
        while waiting:
            place = waiting.pop()
            if place == begin:
                return False
            if place > ends[begin] or place < begin or ops[place].opname.startswith("RETURN_"):
                has_left = True
            elif place not in seen and ops[place].opname not in _RAISES:
                seen.add(place)
                waiting += [jumps[place]] if place in jumps else []
                waiting += [place + 1] if ops[place].opname not in _ALWAYS else []
        return has_left

    return ends_it(jumps[test]) or ends_it(test + 1)


_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_ALWAYS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
_RAISES = frozenset({"RAISE_VARARGS", "RERAISE"})
_ENDS_OF_EXPRESSIONS = ("STORE_", "POP_TOP", "RETURN_", "RAISE_")


def _kind_of_code(code: CodeType) -> str:
    """``user`` (``top`` outside of functions; later ``loop``, see `learn_loop`), ``module`` for a module's call,
    ``function`` for a custom autograd function's, ``library``, or ``other``."""
    if code is _FUNCTION_APPLY:
        kind = "function"
    elif code is _CALL_IMPL:
        kind = "module"
    else:
        kind = kind_of_file(code.co_filename)
        if kind == "user":
            kind = "top" if code.co_name == "<module>" else "user"
        elif kind != "library" or is_standard(code.co_filename):
            kind = "other"
    _KINDS[id(code)] = kind
    _CODES.append(code)  # so that the id stays its own
    return kind


_USER = ("user", "loop", "top")
_KINDS: dict[int, str] = {}
_CODES: list[CodeType] = []
