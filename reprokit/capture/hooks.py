"""Hooks into the parts of torch that end or shape a step: optimizers, grad scalers, clipping, ``autograd.backward``.

Everything is put in place by `Hooks.install` and taken away by `Hooks.removals`; nothing is left on the user's objects.
Calls that are noted as one operation (clearing and clipping gradients, scaling losses, collectives) are performed here
with the recorder out of the way; what is done at an update is decided by the loop.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.overrides
from torch.compiler import is_dynamo_compiling as is_compiling  # a constant, where `is_compiling` makes calls
from torch.optim import optimizer as optimizers

from reprokit import native, torch_private
from reprokit.capture.callers import HAS_FRAME_OF_APPLY, applying, first_user_frame
from reprokit.capture.calls import Clip, Collective, CollectiveNote, Kind, ScaleLoss, Unscale, ZeroGrad
from reprokit.capture.compiled_calls import CompiledCalls
from reprokit.capture.loop import Loop
from reprokit.capture.mode import unseen
from reprokit.capture.posing import POSING
from reprokit.capture.recorder import Begun, Recorder
from reprokit.capture.stand_ins import as_called
from reprokit.capture.structure import repeatable
from reprokit.capture.tape import Number
from reprokit.capture.transformed import MAKES, OPENS, RUNS, TransformCalls
from reprokit.capture.world import owned_by
from reprokit.compare.compiled import DEFAULT
from reprokit.errors import drop_own_frames
from reprokit.own_work import passed_over
from reprokit.program.functions import look_up_all
from reprokit.program.ir import Mode
from reprokit.program.trace import current_mode
from reprokit.program.transforms import SCRIPTED

_PLAIN_MODE = Mode()
MOST_KEPT = 65_536  # elements that a collective may have written for them to be kept
_OF_CALL = ("tensor", "async_op")  # are not given again


class WholeCalls:
    """Performs calls of the loop, each given as a function of torch with its arguments, and notes them.

    A grad scaler that is not enabled does nothing, so it is not noted.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._recorder = loop.recorder
        self._tape = loop.tape

    @passed_over
    def zero_grad(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forget gradients; its note has the parameters that have zeros for them now."""
        if not self._recorder.is_outermost:
            return as_called(target, args, kwargs)
        sets_none = args[1] if len(args) > 1 else kwargs.get("set_to_none", True)
        given = None if sets_none else self._recorder.guard(owned_by, args[0])
        zeroed = frozenset(id(parameter) for parameter in given if parameter.grad is not None) if given else None
        begun = ZeroGrad, target, args, None, None, 0, _PLAIN_MODE, zeroed
        return self._recorder.whole(tuple, (begun,), target, args, kwargs, self._finish_zero_grad)

    def _finish_zero_grad(self, begun: Begun, output: Any) -> None:
        self._tape.log += (*begun[:4], (), *begun[4:])
        if self._loop.judge.pending is not None or self._recorder.gaps:
            self._loop.cleared(begun[2][0])

    @passed_over
    def clip(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Clip gradients; the norm, if there is one, is checked with the gradients."""
        loop, recorder = self._loop, self._recorder
        if not recorder.enabled:
            return as_called(target, args, kwargs)
        args, kwargs = recorder.guard(repeatable, args, kwargs) or (args, kwargs)
        if loop.norms is not None:
            given = args[0] if args else kwargs.get("parameters", ())
            recorder.guard(loop.norms.before_clip, loop.iterations.completed, given)
        output = self._perform(Clip, target, args, kwargs)
        is_spread = hasattr(output, "to_local")  # then all ranks are needed to read it
        if isinstance(output, torch.Tensor) and not is_spread:
            with unseen():
                loop.clipped = loop.timeline.grad_norm = native.detach(output)
        return output

    @passed_over
    def scale(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Multiply a loss by a grad scaler's scale."""
        scaler = args[0]
        if not self._recorder.enabled or not scaler.is_enabled():
            return as_called(target, args, kwargs)

        def finish(begun: Begun, output: Any) -> None:
            self._recorder.finish((*begun[:-1], self._loop.scalers.scaled(scaler)), output)

        return self._perform(ScaleLoss, target, args, kwargs, finish)

    @passed_over
    def unscale(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Divide gradients by a grad scaler's scale; ``target`` is given its inverse."""
        if not self._recorder.enabled or not args[0].is_enabled():
            return as_called(target, args, kwargs)

        def finish(begun: Begun, output: Any) -> None:
            given = (None, args[1])
            self._tape.add(Unscale, target, given, None, (), begun[4:6], begun[6], native.clone(native.detach(args[2])))

        return self._recorder.whole(_begin, (self._recorder, Unscale, target, (), {}), target, args, kwargs, finish)

    @passed_over
    def quietly(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do something of a grad scaler in which only its own calls of `unscale` are noted."""
        if not self._recorder.enabled or not args[0].is_enabled():
            return as_called(target, args, kwargs)
        return self.unseen(target, args, kwargs)

    @passed_over
    def unseen(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do something of which nothing is noted."""
        with self._recorder.paused():
            return as_called(target, args, kwargs)

    @passed_over
    def collective(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write what all processes have into a tensor: averaged gradients, or a number that is kept as it is then."""
        return self._perform(Collective, target, args, kwargs, self._finish_collective)

    def _finish_collective(self, begun: Begun, output: Any) -> None:
        _, target, args, kwargs, code, instruction, mode, _ = begun
        given = {"tensor": args[0]} if args else kwargs or {}
        tensor = given["tensor"]() if isinstance(given.get("tensor"), Number) else None
        if tensor is None:
            return
        kwargs = kwargs or {}
        is_gradient = self._loop.is_gradient(given["tensor"])
        if is_gradient:
            self._loop.ranks.meet_averaging(kwargs.get("group", args[2] if len(args) > 2 else None))
        elif native.numel(tensor) > MOST_KEPT or kwargs.get("async_op"):
            return
        named = {name: value for name, value in kwargs.items() if name not in _OF_CALL}
        note = CollectiveNote(None if is_gradient else native.clone(native.detach(tensor)), tuple(args[1:]), named)
        written = (self._tape.new_number(tensor),)
        self._tape.add(Collective, target, (given["tensor"],), None, written, (code, instruction), mode, note)

    @passed_over
    def _perform(
        self,
        kind: type[Kind],
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        finish: Callable[[Begun, Any], None] | None = None,
    ) -> Any:
        recorder = self._recorder
        if not recorder.is_outermost:
            return self.unseen(target, args, kwargs)
        return recorder.whole(_begin, (recorder, kind, target, args, kwargs), target, args, kwargs, finish)


def _begin(recorder: Recorder, kind: type[Kind], target: Any, args: Any, kwargs: Any) -> Begun:
    user = first_user_frame(sys._getframe(1))
    return kind, target, *recorder.encode(args, kwargs), user.f_code, user.f_lasti, current_mode(), None


class Hooks:
    """Installs and removes all hooks of one capture."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._recorder = loop.recorder
        self._compiled = CompiledCalls(loop, self.bare)
        self._before_compiled: list[Callable[..., Any]] = []
        self._undo: list[Callable[[], None]] = []
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # owner, name, what is there now, what was there
        self._of_optimizers: list[Any] = []  # handles
        self.lacking: list[str] = []  # functions that this torch does not have, so that their calls are not seen

    def install(self) -> None:
        """Put the hooks in place."""
        loop, calls = self._loop, WholeCalls(self._loop)
        look_up_all()
        with native.own_handles():
            before = optimizers.register_optimizer_step_pre_hook(loop.before_step)
            after = optimizers.register_optimizer_step_post_hook(loop.after_step)
        self._undo += [before.remove, after.remove]
        self._of_optimizers = [before, after]
        self._wrap(torch.optim.Optimizer, "zero_grad", calls.zero_grad)
        self._wrap(torch.nn.Module, "zero_grad", calls.zero_grad)
        self._wrap(torch.amp.GradScaler, "scale", calls.scale)
        self._wrap(torch.amp.GradScaler, torch_private.UNSCALE, calls.unscale)
        self._wrap(torch.amp.GradScaler, "step", loop.scaler_step)
        self._wrap(torch.amp.GradScaler, "unscale_", calls.quietly)
        self._wrap(torch.amp.GradScaler, "update", calls.quietly)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._wrap(torch.nn.utils, name, calls.clip)
        if torch.distributed.is_available():
            self._wrap(torch.distributed, "destroy_process_group", loop.ranks.before_parting)
            for name in ("all_reduce", "broadcast"):
                self._wrap(torch.distributed, name, calls.collective)
        if torch_private.HAS_INDICES:
            samples, iterator = loop.samples, torch_private.LoaderIterator
            for name in ("__init__", torch_private.RESET):
                self._wrap(iterator, name, samples.begin)
            self._wrap(iterator, torch_private.NEXT_INDEX, samples.draw)
            self._wrap(iterator, "__next__", samples.arrive)
            self._undo.append(samples.forget)
        transforms = TransformCalls(self._recorder)
        if torch_private.HAS_TRANSFORMS:
            for owner, name in RUNS:
                self._wrap(owner, name, transforms.run)
            for name in MAKES:
                self._wrap(torch.func, name, transforms.make)
            for owner, name in OPENS:
                self._wrap(owner, name, transforms.open)
        for owner, name in ((torch.jit, "trace"), (torch.jit, "trace_module")):
            self._wrap(owner, name, calls.unseen)  # it would record the calls of reprokit
        for compiled in SCRIPTED:
            self._wrap(compiled, "__call__", transforms.run_scripted)
        if not HAS_FRAME_OF_APPLY:  # so that calls in the forward of a custom function are known not to be the loop's
            base: Any = torch.autograd.Function
            apply = vars(base)["apply"]
            wrapper: Any = classmethod(applying(apply))
            self._undo.append(functools.partial(_put_back, base, "apply", wrapper, apply))
            base.apply = wrapper
        self._wrap_backward()
        self._watch_compiler()

    def removals(self) -> list[Callable[[], None]]:
        """The functions that remove the hooks, even if another one fails; they may be called twice."""
        return [*reversed(self._undo), self._undo.clear, self._replaced.clear, self._of_optimizers.clear]

    @contextlib.contextmanager
    def bare(self) -> Iterator[None]:
        """In this context, for a call of a compiled function, no hook is in place: the compiler would trace each that
        it reaches, and its graphs, guards and breaks would be others than bare (`test_unseen_by_compilers.py`)."""
        kept = [(handle.hooks_dict_ref(), handle.id) for handle in self._of_optimizers]
        tables = [(table, dict(table), number) for table, number in kept if table is not None and number in table]
        replaced = [row for row in self._replaced if vars(row[0]).get(row[1]) is row[2]]
        try:
            for table, _, number in tables:
                del table[number]
            for owner, name, _, original in replaced:
                setattr(owner, name, original)
            with self._recorder.roots.aside():
                yield
        finally:
            if self._undo:  # the capture is not over
                for owner, name, wrapper, original in replaced:
                    if vars(owner).get(name) is original:
                        setattr(owner, name, wrapper)
                for table, before, _ in tables:
                    since = {key: hook for key, hook in table.items() if key not in before}
                    left = {key: hook for key, hook in before.items() if key in table or key in _ids(kept)}
                    table.clear()
                    table.update(left | since)

    def _replace(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        functools.update_wrapper(wrapper, original)
        self._undo.append(functools.partial(_put_back, owner, name, wrapper, original))
        self._replaced.append((owner, name, wrapper, original))
        setattr(owner, name, wrapper)

    def _wrap(self, owner: Any, name: str, perform: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        """Have a function performed by ``perform(function, args, kwargs)``."""
        original = getattr(owner, name, None)
        if original is None:
            self.lacking.append(name)
            return

        @passed_over
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            try:
                return perform(original, args, kwargs)
            except BaseException as error:
                drop_own_frames(error)
                raise

        home = sys.modules.get(original.__module__)  # where pickle looks a function up
        for place in {owner, home} if getattr(home, name, None) is original else {owner}:
            self._replace(place, name, wrapper)

    def _watch_compiler(self) -> None:
        """Note calls of functions that are compiled from now on; of those that are compiled already, that they run."""
        original, recorder = torch.compile, self._recorder

        @passed_over
        def compile(*args: Any, **kwargs: Any) -> Any:
            try:
                made = as_called(original, args, kwargs)
            except BaseException as error:
                drop_own_frames(error)
                raise
            if not recorder.enabled:
                return made
            self._watch_compiled()
            recorder.guard(self._compiled.note_compiler, kwargs.get("backend", DEFAULT))
            return self._compiled.watched(made)

        self._replace(torch, "compile", compile)
        self._watch_compiled()

    def _watch_compiled(self) -> None:
        """Have the loop told before a compiled function runs that it calls and that is not noted.

        Nothing happens while the compiler is not loaded, or if it is watched.
        """
        home: Any = sys.modules.get(torch_private.EVAL_FRAME)
        original = getattr(home, _BEFORE_COMPILED, None)
        if original is None or original in self._before_compiled:
            if home is not None and original is None:
                self.lacking.append(_BEFORE_COMPILED)
            return
        recorder, loop = self._recorder, self._loop
        module = getattr(home, torch_private.COMPILED_MODULE, None)
        if module is not None:  # its own `__call__` would hide the first call from the watch of all modules
            recorder.roots.meet_class(module)

        def before_compiled() -> Any:
            if recorder.is_outermost:
                frame = sys._getframe(1)
                # Torch 2.6 comes here also where nothing is compiled: `torch.compiler.disable` has no callback.
                if getattr(frame.f_locals.get("self"), "callback", frame) is not None:
                    loop.meet_compiled(frame)
            else:
                recorder.make_way(self.bare)
            return original()

        self._replace(home, _BEFORE_COMPILED, before_compiled)
        self._before_compiled.append(before_compiled)
        _keep_from_compiling()

    def _wrap_backward(self) -> None:
        original, recorder = torch.autograd.backward, self._recorder

        @passed_over
        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            try:
                is_inner = recorder.depth and not recorder.is_stepping  # such as the one that `Tensor.backward` calls
                if is_inner or not recorder.is_outermost:
                    if threading.get_ident() != recorder.thread:
                        recorder.miss_backward()
                    return original(*args, **kwargs)
                return recorder.differentiate(original, args, kwargs)
            except BaseException as error:
                drop_own_frames(error)
                raise

        self._replace(torch.autograd, "backward", backward)


def _ids(handles: list[tuple[Any, int]]) -> set[int]:
    return {number for _, number in handles}


def _put_back(owner: Any, name: str, wrapper: Any, original: Any) -> None:
    """Undo a replacement, unless somebody else has put something on top of it: then it passes calls on for good."""
    if vars(owner).get(name) is wrapper:
        setattr(owner, name, original)


@functools.cache
def _keep_from_compiling() -> None:
    """Tell the compiler to run our functions as they are: after a graph break it would compile those of the hooks."""
    skip = getattr(sys.modules.get(torch_private.EVAL_FRAME), "skip_code", None)
    owners: list[Any] = [vars(module) for name, module in list(sys.modules.items()) if name.startswith(_HOME)]
    owners += [vars(value) for names in list(owners) for value in names.values() if isinstance(value, type)]
    functions = [_function_of(value) for names in owners for value in list(names.values())]
    waiting = [function.__code__ for function in functions if isinstance(function, FunctionType)]
    waiting.append(POSING)
    while waiting and skip is not None:
        code = waiting.pop()
        if code is POSING or code.co_filename.startswith(_OWN):
            skip(code)
            waiting += [part for part in code.co_consts if isinstance(part, CodeType)]


def _function_of(value: Any) -> Any:
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


# Called by every compiled function right before it runs, and not by those that are not to be compiled, which
# `fully_shard` calls a hundred times a step.
_BEFORE_COMPILED = torch_private.BEFORE_COMPILED
_HOME = "reprokit.capture."
_OWN = os.path.dirname(__file__) + os.sep
