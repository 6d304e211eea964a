"""Hooks of the user's in a replay: it is played without them, since they count, log and raise a second time.

A hook may also change what a module returns. So where the replay without hooks is not what training did, it is played
once more with them, and what they raise is ignored. Torch's own hooks, such as those of ``weight_norm``, always stay.
"""

from __future__ import annotations

import contextlib
import dis
import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from reprokit.arrivals import pass_on
from reprokit.program.sites import kind_of_file

FORWARD, BACKWARD, ACCUMULATED = "forward", "backward", "accumulated"  # when hooks are called
EVERY = frozenset({FORWARD, BACKWARD, ACCUMULATED})
_NAMES = {
    FORWARD: ("_forward_pre_hooks", "_forward_hooks"),
    BACKWARD: ("_backward_pre_hooks", "_backward_hooks"),
    ACCUMULATED: (),
}
Hooks = MutableMapping[int, Callable[..., Any]]


@dataclass
class UserHooks:
    """``ignored`` are exceptions that hooks raised in the replay. ``left_out`` counts hooks that were left out, by
    kind; ``may_change`` are the kinds of those that may change what training computed. ``keeps_of_gradients``: hooks
    on gradients were not left out."""

    ignored: list[Exception] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    may_change: set[str] = field(default_factory=set)
    keeps_of_gradients: bool = False

    def leave_out(self, kind: str, hook: Callable[..., Any]) -> None:
        """A hook is not called in the replay."""
        self.left_out[kind] += 1
        if _may_change(kind, hook):
            self.may_change.add(kind)


@contextlib.contextmanager
def guarded(
    modules: Iterable[torch.nn.Module], leaves: Iterable[torch.Tensor], out: Set[str] = EVERY
) -> Iterator[UserHooks]:
    """Play without the user's hooks of the kinds ``out``; what the others raise is ignored."""
    found = UserHooks()
    register: Any = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if BACKWARD not in out or not _is_users(hook):
            found.keeps_of_gradients |= _is_users(hook)
            return register(tensor, _quiet(hook, found.ignored))
        found.leave_out(BACKWARD, hook)
        return RemovableHandle(OrderedDict())

    tables = list(_tables(modules, leaves))
    before = [(table, dict(table)) for _, table in tables]
    try:
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
        for kind, table in tables:
            for key, hook in list(table.items()):
                if kind not in out or not _is_users(hook):
                    found.keeps_of_gradients |= kind != FORWARD and _is_users(hook)
                    table[key] = _quiet(hook, found.ignored)
                else:
                    del table[key]
                    found.leave_out(kind, hook)
        yield found
    finally:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]
        for table, content in before:
            table.clear()
            table.update(content)


def _tables(modules: Iterable[torch.nn.Module], leaves: Iterable[torch.Tensor]) -> Iterator[tuple[str, Hooks]]:
    """The tables of hooks that are not empty, each with its kind: of modules, of all modules, and of leaves."""
    parts = {id(part): part for module in modules for part in module.modules()}.values()
    for kind, names in _NAMES.items():
        for name in names:
            everywhere = getattr(torch.nn.modules.module, f"_global{name}", {})
            yield from ((kind, table) for table in (*(getattr(part, name) for part in parts), everywhere) if table)
    for leaf in leaves:
        if leaf._backward_hooks:
            yield BACKWARD, leaf._backward_hooks
        if leaf._post_accumulate_grad_hooks:
            yield ACCUMULATED, leaf._post_accumulate_grad_hooks


def code_of(hook: Any) -> Any:
    """The code that a hook runs, ``None`` if that is not Python."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    return getattr(function if hasattr(function, "__code__") else type(hook).__call__, "__code__", None)


def _is_users(hook: Any) -> bool:
    """True if a hook is not torch's own."""
    code = code_of(hook)
    return code is None or kind_of_file(code.co_filename) not in ("torch", "own")


def _may_change(kind: str, hook: Any) -> bool:
    """True unless the code of a hook returns nothing but ``None`` and calls nothing that writes in place.

    What a hook returns that is called with an accumulated gradient is not used; it may set that gradient.
    """
    code = code_of(hook)
    if code is None or any(name.endswith("_") and not name.endswith("__") for name in code.co_names):
        return True
    last: Any = None
    for instruction in dis.get_instructions(code):
        if kind == ACCUMULATED:
            if (instruction.opname, instruction.argval) == ("STORE_ATTR", "grad"):
                return True
            continue
        returned = {"RETURN_VALUE": last, "RETURN_CONST": instruction}.get(instruction.opname)
        if returned is not None and (returned.argval is not None or "CONST" not in returned.opname):
            return True
        last = instruction
    return False


def _quiet(hook: Callable[..., Any], ignored: list[Exception]) -> Callable[..., Any]:
    @functools.wraps(hook, assigned=("__name__", "__doc__"), updated=())
    def quiet(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            pass_on(error)
            ignored.append(error)
            return None

    return quiet
