"""Python's warnings while work of our own runs: nothing is shown, and nothing is changed that decides what is shown.

Python's C code looks for a filter in the list `warnings.filters`, and forgets what was shown once whenever the filters
have another version. So the list gets a rule in front that only C code finds, and no code of a thread that does work of
our own gives the filters another version: not `catch_warnings` in a step that is played again, and not the one with
which Python starts a process. Imports no torch.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from threading import RLock, get_ident
from types import FunctionType
from typing import Any, TypeVar

PASSED_OVER = " (importlib._bootstrap)"
_LOCK = RLock()
_DISPLAYS: dict[int, Any] = {}  # the threads in which work of our own runs: what shows warnings there
_MUTATED = ("_filters_mutated", "_filters_mutated_lock_held")  # the second one is of Python 3.14
_UNDO: list[Callable[[], None]] = []


class _Rule:
    """In the place of a pattern for modules in a filter: matches what work of our own warns of.

    Code of a step that is played again may record its warnings, and then it finds them.
    """

    def match(self, module: str) -> bool:
        display = _DISPLAYS.get(get_ident())
        return display is not None and display is _display()


_IGNORED: Any = ("ignore", None, Warning, _Rule(), 0)


class _Filters(list):  # type: ignore[type-arg]
    """A list of filters with our rule in front, which C code finds. Python code finds what is behind it: the filters
    that were there before, in a list of their own."""

    __slots__ = ("before", "shown")

    def __init__(self, before: list[Any]) -> None:
        self.before, self.shown = before, list(before)
        list.__setitem__(self, slice(None), [_IGNORED, *self.shown])

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return list, (self.shown,)

    def __getitem__(self, index: Any) -> Any:
        found = self.shown[index]
        return _Filters(found) if isinstance(index, slice) else found  # the copy that `catch_warnings` puts in place

    def copy(self) -> _Filters:
        return _Filters(self.shown)


def _reading(name: str) -> Callable[..., Any]:
    def method(self: _Filters, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.shown, name)(*args, **kwargs)

    return method


def _writing(name: str) -> Callable[..., Any]:
    def method(self: _Filters, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.shown, name)(*args, **kwargs)
        if get_ident() not in _DISPLAYS:  # another thread sets filters of its own, which stay
            getattr(self.before, name)(*args, **kwargs)
        list.__setitem__(self, slice(None), [_IGNORED, *self.shown])
        return self if result is self.shown else result

    return method


_READ = "__add__ __contains__ __eq__ __ge__ __gt__ __iter__ __le__ __len__ __lt__ __mul__ __ne__ __repr__ __reversed__"
_WRITE = "__delitem__ __iadd__ __imul__ __setitem__ append clear extend insert pop remove reverse sort"
for _name in (*_READ.split(), "count", "index"):
    setattr(_Filters, _name, _reading(_name))
for _name in _WRITE.split():
    setattr(_Filters, _name, _writing(_name))


@contextlib.contextmanager
def ignored_warnings() -> Iterator[None]:
    """A context in which Python's warnings of this thread are ignored.

    After it the filters are those of before, and what was shown once is not shown again.
    """
    thread = get_ident()
    if thread in _DISPLAYS:
        yield
        return
    with _LOCK:
        if not _DISPLAYS:
            _put_in_place()
        _DISPLAYS[thread] = _display()
    try:
        yield
    finally:
        with _LOCK:
            del _DISPLAYS[thread]
            if not _DISPLAYS:
                while _UNDO:
                    _UNDO.pop()()


Function = TypeVar("Function", bound=Callable[..., Any])


def passed_over(function: Function) -> Function:
    """Decorates a function that performs a call of the user's code: a warning with a ``stacklevel`` counts no frame of
    it. Python's warnings leave out the frames of its import system, and know these by the names of their files."""
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace(co_filename=function.__code__.co_filename + PASSED_OVER)
    return function


def _put_in_place() -> None:
    space: dict[str, Any] = vars(warnings)
    filters = _Filters(space["filters"])
    space["filters"] = filters

    def put_back() -> None:
        if type(space["filters"]) is _Filters:  # else another thread has left a `catch_warnings` of its own
            space["filters"] = filters.before

    _UNDO.append(put_back)
    for name in _MUTATED:
        if name in space:
            _UNDO.append(_held(space, name))


def _held(space: dict[str, Any], name: str) -> Callable[[], None]:
    """Keep work of our own from giving the filters another version; the function that puts Python's own back."""
    original = space[name]

    def mutated() -> None:
        if get_ident() not in _DISPLAYS:
            original()

    space[name] = mutated

    def put_back() -> None:
        if space[name] is mutated:
            space[name] = original

    return put_back


def _display() -> Any:
    """The function that shows a warning; a `catch_warnings` that records has another one."""
    return getattr(warnings, "_showwarnmsg_impl", warnings.showwarning)
