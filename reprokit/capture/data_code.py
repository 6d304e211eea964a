"""The user's code that a loader runs: of its data set, its samplers, its `collate_fn`, and of what these call.

Found by reading: of an object the class and the attributes, of a function the names in its code. A function that takes
part in the training step as well may be in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from types import CodeType, FunctionType, MethodType
from typing import Any

from reprokit.errors import ignored_errors
from reprokit.program.edits import Spans
from reprokit.program.sites import kind_of_file, relative_path

_DEEPEST = 4  # an attribute of a transform in a list of transforms of a data set
_MOST = 200  # objects


def lines_of_data(parts: Collection[Any]) -> Spans:
    """The lines of the code of data sets, functions that collate, and samplers, by file."""
    found = _Search()
    for part in parts:
        with ignored_errors():  # of an attribute of the user's own
            found.look_at(part, 0)
    return found.spans


class _Search:
    def __init__(self) -> None:
        self.spans: dict[str, list[range]] = {}
        self._seen: dict[int, Any] = {}

    def look_at(self, value: Any, depth: int) -> None:
        """Note the lines of a function, a class or an object, and look at what it has."""
        if depth > _DEEPEST or id(value) in self._seen or len(self._seen) > _MOST:
            return
        if isinstance(value, MethodType):
            self.look_at(value.__func__, depth)
            self.look_at(value.__self__, depth)
        elif isinstance(value, FunctionType):
            self._seen[id(value)] = value
            self._look_at_function(value, depth)
        elif isinstance(value, type):
            self._seen[id(value)] = value
            for base in value.__mro__:
                self._note_class(base, depth)
        elif isinstance(value, (list, tuple)):
            for item in value[:8]:
                if not isinstance(item, (int, float, str)):
                    self.look_at(item, depth + 1)
        elif _is_of_user(type(value)) or depth == 0:
            self._seen[id(value)] = value
            self.look_at(type(value), depth)
            for item in list(getattr(value, "__dict__", {}).values()):
                self.look_at(item, depth + 1)

    def _note_class(self, cls: type, depth: int) -> None:
        if not _is_of_user(cls):
            return
        with ignored_errors():  # of a class without source
            lines, first = inspect.getsourcelines(cls)
            self._note(inspect.getfile(cls), first, len(lines))
        for member in list(vars(cls).values()):
            inner = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(inner, FunctionType):
                self._look_at_function(inner, depth)

    def _look_at_function(self, function: FunctionType, depth: int) -> None:
        code = function.__code__
        if kind_of_file(code.co_filename) != "user":
            return
        lines = [line for _, _, line in code.co_lines() if line is not None]
        self._note(code.co_filename, code.co_firstlineno, max(lines, default=0) - code.co_firstlineno + 1)
        for name in _names_in(code):
            value = function.__globals__.get(name)
            if isinstance(value, (FunctionType, type)) and _is_of_user(value):
                self.look_at(value, depth + 1)

    def _note(self, file: str, first: int, num_lines: int) -> None:
        self.spans.setdefault(relative_path(file), []).append(range(first, first + max(1, num_lines)))


def _names_in(code: CodeType) -> set[str]:
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _is_of_user(value: Any) -> bool:
    """True for a function or a class of the user's."""
    module = inspect.getmodule(value)
    file = getattr(module, "__file__", None)
    code = getattr(value, "__code__", None)
    if code is not None:
        file = code.co_filename
    return isinstance(file, str) and kind_of_file(file) == "user"
