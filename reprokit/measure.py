"""Measures the module calls of chosen steps in a running script, forward and backward.

Only in a chosen step ``nn.Module.__call__`` is replaced, and gradients are seen by hooks on the tensors that go in and
come out; those of weights are read when an optimizer has stepped. Nothing is added to a graph and no generator is used,
so the training ends with the same bits. Code inside of `torch.compile` is left alone: the compiled module is measured
from outside.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as is_compiling
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _disable_current_modes

from reprokit import torch_private
from reprokit.capture.structure import ATOMS
from reprokit.capture.tensor_names import root_names
from reprokit.errors import pass_on
from reprokit.locate.ranges import FrameRow, Pass, Role, measure
from reprokit.series.timeline import Iterations, parameters_of

_MAX_TENSORS = 32  # of one role in one call: the cache of a language model has two for each layer
_MAX_DEPTH = 4
Named = tuple[str, torch.Tensor]


class TraceStop(SystemExit):
    """Ends the script after the last step that was asked for; passes ``except Exception`` and prints no traceback."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True, slots=True)
class _Called:
    """A call of a module. ``is_again`` for one that a checkpoint makes in the backward pass."""

    module: str
    root: int
    cls: str
    call: int
    is_again: bool
    has_grad: bool


class FrameRecorder:
    """Measures ``steps`` of the running process, and gives ``receive`` the rows of each when it is over.

    Steps are counted as a capture counts them. ``pattern`` is a shell pattern for paths of modules. After the step
    ``stop_after`` it raises `TraceStop` in the script. ``histograms``: measure these too. An error of its own goes to
    ``complain`` and ends the measuring, never the script.
    """

    def __init__(
        self,
        steps: Collection[int],
        receive: Callable[[list[FrameRow]], None],
        complain: Callable[[BaseException], None],
        *,
        pattern: str | None = None,
        stop_after: int | None = None,
        histograms: bool = False,
    ) -> None:
        self.num_steps = 0
        self.without_gradient: set[str] | None = None  # names of parameters; ``None`` before the first backward pass
        self._steps = frozenset(steps)
        self._receive = receive
        self._complain = complain
        self._pattern = pattern
        self._stop_after = stop_after
        self._range_of = functools.partial(measure, histogram=histograms)
        self._process = os.getpid()
        self._iterations = Iterations()
        self._original: Any = None
        self._wrapper: Any = None
        self._undo: list[Callable[[], None]] = []
        self._rows: list[tuple[_Called, FrameRow]] = []
        self._calls: Counter[tuple[int, bool]] = Counter()
        self._paths: dict[int, tuple[torch.nn.Module, str, int]] = {}  # path and root by the ``id`` of a module
        self._roots: dict[int, torch.nn.Module] = {}
        self._names: dict[int, str] = {}  # of roots that paths would mix up
        self._handles: list[Any] = []
        self._with_grad: dict[int, int] = {}  # modules whose gradients are seen in this step: the first such call
        self._weights: dict[int, tuple[int, Any]] = {}  # version and range of those measured in this step
        self._old_gradients: dict[int, tuple[weakref.ref[torch.Tensor] | None, int]] = {}  # and their versions

    def install(self) -> None:
        """Count the steps from now on, and measure those that are chosen."""
        hook = optimizers.register_optimizer_step_post_hook(self._after_step)
        self._undo += [hook.remove, self._wrap_scaler()]
        self._begin_step()

    def remove(self) -> None:
        """Take everything away; rows of a step that is not over are handed on."""
        self._guarded(self._note_gradients)
        self._end_step()
        while self._undo:
            self._undo.pop()()
        self._paths.clear()
        self._old_gradients.clear()
        self._roots.clear()

    # -- steps ---------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if self._iterations.completed in self._steps and self._original is None:
            for module, _, _ in self._paths.values():
                self._remember_gradients(module)
            self._original = original = torch.nn.Module.__call__
            tracer = self

            def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
                if is_compiling() or tracer._original is None:
                    return original(self, *args, **kwargs)
                called = tracer._guarded(tracer._before, self, args, kwargs, torch.is_grad_enabled())
                output = original(self, *args, **kwargs)
                if called is not None:
                    tracer._guarded(tracer._after, called, output)
                return output

            self._wrapper = __call__
            torch.nn.Module.__call__ = __call__  # type: ignore[method-assign]

    def _end_step(self) -> None:
        """Hand on what was measured; measure no more until the next chosen step."""
        if self._original is None:
            return
        if torch.nn.Module.__call__ is self._wrapper:  # else somebody has put something on top, which passes calls on
            torch.nn.Module.__call__ = self._original  # type: ignore[method-assign]
        self._original = self._wrapper = None
        if any(row.direction == "backward" for _, row in self._rows):
            without = {
                ".".join(filter(None, (self._names.get(key, ""), name)))
                for key, root in self._roots.items()
                for name, parameter in _unwrapped(root).named_parameters()
                if parameter.requires_grad and parameter.grad is None
            }
            self.without_gradient = without if self.without_gradient is None else self.without_gradient & without
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        rows = [replace(row, module=_label(called, self._names.get(called.root, ""))) for called, row in self._rows]
        ends = {row.frame: place for place, row in enumerate(rows) if row.tensor != "grad_weight"}
        rows.sort(key=lambda row: ends.get(row.frame, len(rows)))  # frames in the order in which the modules were left
        self._rows.clear()
        self._calls.clear()
        self._with_grad.clear()
        self._weights.clear()
        self._receive(rows)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not is_compiling() and os.getpid() == self._process:
            self._attempted(optimizer)

    def _note_gradients(self, only: Collection[int] | None = None) -> None:
        """Measure ``.grad`` of parameters (those with these ``id``s) where it changed since it was remembered."""
        for module, path, root in list(self._paths.values()) if self._original is not None else ():
            cls, call = type(module).__name__, self._with_grad.get(id(module), 0)
            if self._pattern is not None and not self._is_wanted(path, root, cls):
                continue
            for name, weight in module.named_parameters(recurse=False):
                gradient, (old, version) = weight.grad, self._old_gradients.get(id(weight), (None, 0))
                if gradient is None or (only is not None and id(weight) not in only):
                    continue
                if old is None or old() is not gradient or version != gradient._version:
                    self._old_gradients[id(weight)] = weakref.ref(gradient), gradient._version
                    self._note(_Called(path, root, cls, call, False, False), "backward", "grad_weight", name, gradient)

    def _remember_gradients(self, module: torch.nn.Module) -> None:
        """The gradients of a module's own parameters belong to a step before, unless they change."""
        for weight in module.parameters(recurse=False):
            if weight.grad is not None:
                self._old_gradients[id(weight)] = weakref.ref(weight.grad), weight.grad._version

    def _attempted(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer stepped, or a grad scaler left its step out."""
        before = self._iterations.completed
        try:
            self._guarded(self._note_gradients, {id(parameter) for parameter in parameters_of(optimizer)})
            self._iterations.attempted(optimizer)
            self.num_steps = self._iterations.completed
            if self.num_steps != before:
                self._guarded(self._note_gradients)
                self._end_step()
                self._begin_step()
        except BaseException as error:
            self._fail(error)
        if self._stop_after is not None and before <= self._stop_after < self._iterations.completed:
            raise TraceStop

    def _wrap_scaler(self) -> Callable[[], None]:
        """Count the steps that a grad scaler leaves out."""
        owner: Any = torch.amp.GradScaler
        original, iterations = owner.step, self._iterations

        @functools.wraps(original)
        def step(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = iterations.attempts(optimizer)
            result = original(scaler, optimizer, *args, **kwargs)
            if scaler.is_enabled() and iterations.attempts(optimizer) == before:
                self._attempted(optimizer)
            return result

        owner.step = step

        def undo() -> None:
            if owner.step is step:
                owner.step = original

        return undo

    def _fail(self, error: BaseException) -> None:
        """Fail open: everything goes, the script goes on."""
        pass_on(error)
        self._rows.clear()
        self._steps = frozenset()
        with contextlib.suppress(Exception):
            self.remove()
        self._complain(error)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
                return work(*args)
        except BaseException as error:
            self._fail(error)
            return None

    def _before(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], has_grad: bool
    ) -> _Called | None:
        """Measure weights and inputs; a call that a checkpoint repeats only if the first one had no gradients."""
        if os.getpid() != self._process or _tracing_state() is not None or _peek_transforms() is not None:
            return None
        path, root = self._place(module)
        cls = type(module).__name__
        if self._pattern is not None and not self._is_wanted(path, root, cls):
            return None
        is_again = torch_private.graph_task_id() != -1
        if is_again and id(module) in self._with_grad:
            return None
        key = (id(module), is_again)
        if has_grad:
            self._with_grad.setdefault(id(module), self._calls[key])
        called = _Called(path, root, cls, self._calls[key], is_again, has_grad)
        self._calls[key] += 1
        if not is_again:
            for name, weight in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                now = -1 if weight.is_inference() else weight._version
                version, found = self._weights.get(id(weight), (-1, None))
                if found is None or version != now or now < 0:
                    self._weights[id(weight)] = now, (found := self._range_of(weight))
                self._rows.append((called, self._row(called, "forward", "weight", name, found)))
        self._add(called, "input", _arguments(module, args, kwargs))
        return called

    def _after(self, called: _Called, output: Any) -> None:
        self._add(called, "output", _tensors("", output))

    def _add(self, called: _Called, role: Role, named: Iterator[Named]) -> None:
        """Measure tensors of a call, and their gradients when they come."""
        for (name, tensor), _ in zip(named, range(_MAX_TENSORS), strict=False):
            if not called.is_again:
                self._note(called, "forward", role, name, tensor)
            if tensor.requires_grad and called.has_grad:
                self._handles.append(tensor.register_hook(self._recorder(called, role, name)))  # type: ignore[no-untyped-call]

    def _recorder(self, called: _Called, role: Role, name: str) -> Callable[[torch.Tensor], None]:
        step, gradient_role = self._iterations.completed, _GRADIENTS[role]

        def record(gradient: torch.Tensor) -> None:
            if self._original is not None and step == self._iterations.completed and not is_compiling():
                self._guarded(self._note, called, "backward", gradient_role, name, gradient)

        return record

    def _note(self, called: _Called, direction: Pass, role: Role, name: str, tensor: torch.Tensor) -> None:
        self._rows.append((called, self._row(called, direction, role, name, self._range_of(tensor))))

    def _row(self, called: _Called, direction: Pass, role: Role, name: str, found: Any) -> FrameRow:
        return FrameRow(self._iterations.completed, "", called.cls, called.call, direction, role, name, found)

    # -- names ---------------------------------------------------------------------------------------------------

    def _place(self, module: torch.nn.Module) -> tuple[str, int]:
        """The path of a module in its root, and the root's ``id``; a module that no root holds is one itself."""
        known = self._paths.get(id(module))
        if known is None or known[0] is not module:
            inner = _unwrapped(module)
            self._roots[id(module)] = module
            self._paths[id(module)] = module, "", id(module)
            for path, part in inner.named_modules():
                self._paths.setdefault(id(part), (part, path, id(module)))
                self._remember_gradients(part)
            self._names = root_names(list(self._roots.values()), sys._getframe())
            known = self._paths[id(module)]
        return known[1], known[2]

    def _is_wanted(self, path: str, root: int, cls: str) -> bool:
        candidates = {path or f"<{cls}>", _label(_Called(path, root, cls, 0, False, False), self._names.get(root, ""))}
        return any(fnmatchcase(candidate, str(self._pattern)) for candidate in candidates)


_GRADIENTS: Mapping[Role, Role] = {"input": "grad_input", "output": "grad_output"}
_peek_transforms = torch_private.peek_transforms
_tracing_state = torch_private.tracing_state


def _label(called: _Called, root: str) -> str:
    """A module as it is printed: its path, behind the name of its root where there are several."""
    return ".".join(filter(None, (root, called.module))) or f"<{called.cls}>"


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside of the wrappers of DDP and `torch.compile`, whose paths readers know."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def _arguments(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Named]:
    """The tensors among the arguments of a call, by the parameter names of its forward."""
    names, rest = _parameters(getattr(type(module).forward, "__func__", type(module).forward))
    for place, value in enumerate(args):
        yield from _tensors(names[place] if place < len(names) else f"{rest}[{place - len(names)}]", value)
    for name, value in kwargs.items():
        yield from _tensors(name, value)


@functools.lru_cache(maxsize=1024)
def _parameters(forward: Callable[..., Any]) -> tuple[tuple[str, ...], str]:
    """The names of positional parameters without ``self``, and of the one that takes the rest."""
    try:
        found = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return (), "args"
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = (item.name for item in found if item.kind is inspect.Parameter.VAR_POSITIONAL)
    return tuple(item.name for item in found if item.kind in plain), next(rest, "args")


def _tensors(name: str, value: Any, depth: int = 0) -> Iterator[Named]:
    """The tensors in a structure, with their places: ``x``, ``states[1]``, ``batch.labels``."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif type(value) in ATOMS or isinstance(value, (type, torch.nn.Module)) or callable(value) or depth > _MAX_DEPTH:
        return
    elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        for place, item in enumerate(value):
            yield from _tensors(f"{name}[{place}]", item, depth + 1)
    else:
        for key, item in _items(value):
            yield from _tensors(f"{name}.{key}" if name else str(key), item, depth + 1)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a mapping, a named tuple, or the attributes of an object."""
    if isinstance(value, tuple):
        yield from zip(getattr(value, "_fields", ()), value, strict=False)
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif hasattr(value, "__dict__"):
        yield from list(vars(value).items())
