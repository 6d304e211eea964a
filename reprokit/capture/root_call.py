"""The ``__call__`` that a class of modules has while its calls are noted.

cloudpickle and dill pickle a class of `__main__` by value: the functions of its dict with their closures and globals.
`RootCalls` and the recorder become ``None`` there, and the copy calls what Python finds without it.
"""

from __future__ import annotations

import sys
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling as is_compiling  # a constant, where `is_compiling` makes calls

from reprokit import torch_private
from reprokit.capture.posing import MAKE, POSING
from reprokit.own_work import passed_over

if TYPE_CHECKING:
    from reprokit.capture.recorder import Recorder
    from reprokit.capture.roots import RootCalls


def noting_call(cls: type | None, original: Any, roots: RootCalls, recorder: Recorder) -> FunctionType:
    """A ``__call__`` that notes a call of what Python finds behind a class, or of ``original``.

    The function behind a class is found anew in each call: in the classes behind it in the order of the module's own.
    """
    make = FunctionType(MAKE, sys.modules[torch.nn.Module.__module__].__dict__)
    made: FunctionType = make(cls, original, torch_private.wrapped_call_code, roots, recorder, is_compiling)
    made.__dict__["of"] = cls, original
    return made


def behind(inner: Any, module: torch.nn.Module) -> Any:
    """The method that a method of `noting_call` calls in the end, if it is one."""
    while getattr(getattr(inner, "__func__", None), "__code__", None) is POSING:
        cls, original = inner.__func__.__dict__["of"]
        inner = super(cls, module).__call__ if original is None else original.__get__(module)
    return inner


def noting_own_call(function: Any, roots: RootCalls | None, recorder: Recorder) -> FunctionType:
    """A ``__call__`` that notes a call of the one that a class has of its own.

    dill takes every global along, so the function has those only that it needs, and a process that has no reprokit can
    load it.
    """

    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = MethodType(function, self)
        if is_compiling() or roots is None:
            return inner(*args, **kwargs)
        if (recorder.depth and not recorder.is_stepping) or not roots.is_root_call():
            return inner(*args, **kwargs)
        try:
            known = self, args, kwargs, sys._getframe(1)
            finish = roots.finish if recorder.loop.generators.looks_left or not recorder.is_claimed else None
            if roots.original is not None:  # every module is watched
                return recorder.whole(roots.begin, known, inner, args, kwargs, finish, around=roots.unwatched)
            return recorder.whole(roots.begin, known, inner, args, kwargs, finish)
        except BaseException as error:
            roots.drop_own_frames(error)  # by the name of a method: the function would be a global
            raise

    needed = {name: value for name, value in globals().items() if name in {"__name__", *__call__.__code__.co_names}}
    return FunctionType(passed_over(__call__).__code__, needed, "__call__", closure=__call__.__closure__)


class LeftOut:
    """An object that pickles as ``None``: a function of ours may be pickled by value, with what its closure holds."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
