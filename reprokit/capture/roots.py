"""Meeting root modules: the modules that the loop calls itself, and only those.

For the first steps ``nn.Module.__call__`` is watched, and put back while a root runs, so that nothing inside one sees
it. Every class met at the outermost level gets a ``__call__`` of its own that tells the tape; then the global watch
goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.compiler import is_dynamo_compiling as is_compiling  # a constant, where `is_compiling` makes calls


class Listener(Protocol):
    """Who is told of calls; the tape."""

    def is_root_call(self) -> bool:
        """Whether a module called now is called by the loop itself."""

    def guard(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do work of our own, whose errors must not reach the loop."""

    def call_module(
        self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a root module."""


class RootCalls:
    """Puts calls of root modules through the listener, and takes everything away again."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._patched: dict[type[torch.nn.Module], Any] = {}
        self._original: Any = None
        self._known: list[type[torch.nn.Module]] = []
        self._has_settled = False

    def install(self) -> None:
        """Watch every module until `settle`, so that the first call of each root is seen from its beginning."""
        if self._has_settled:
            for cls in self._known:
                self.meet(cls, torch.nn.Module.__call__)
            return
        roots, listener, original = self, self._listener, torch.nn.Module.__call__
        self._original = original

        def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not listener.is_root_call():
                return original(self, *args, **kwargs)
            listener.guard(roots.meet, type(self), original)
            return listener.call_module(original, self, args, kwargs)

        torch.nn.Module.__call__ = __call__  # type: ignore[method-assign]

    def settle(self) -> None:
        """The roots are known: stop watching every module."""
        self._has_settled = True
        if self._original is not None:
            torch.nn.Module.__call__ = self._original  # type: ignore[method-assign]
            self._original = None

    def uninstall(self) -> None:
        """Give every class its own ``__call__`` back; `install` finds the ones known so far again."""
        if self._original is not None:
            torch.nn.Module.__call__ = self._original  # type: ignore[method-assign]
            self._original = None
        for cls, own in self._patched.items():
            if own is None:
                del cls.__call__
            else:
                cls.__call__ = own  # type: ignore[method-assign]
        self._patched.clear()

    def meet(self, cls: type[torch.nn.Module], original: Callable[..., Any]) -> None:
        """Give a root's class a ``__call__`` that tells the listener."""
        if cls in self._patched:
            return
        listener = self._listener
        own = cls.__dict__.get("__call__")
        self._patched[cls] = own
        if cls not in self._known:
            self._known.append(cls)
        inner = own or original

        def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not listener.is_root_call():
                return inner(self, *args, **kwargs)
            return listener.call_module(inner, self, args, kwargs)

        cls.__call__ = __call__  # type: ignore[method-assign]

    def look_away(self) -> Any:
        """A root is about to run: call the modules inside it as if nobody watched.

        Returns the ``nn.Module.__call__`` that is to be put back afterwards, ``None`` when every root is known and no
        module is watched.
        """
        if self._original is None:
            return None
        watching = torch.nn.Module.__call__
        torch.nn.Module.__call__ = self._original  # type: ignore[method-assign]
        return watching
