"""Calls of functions that `torch.compile` made, by the loop itself: a loss, an optimizer's step, or a whole step.

Each call is one entry, and nothing inside is noted. What the function reads is met before it runs, so that its
parameters are part of the last copy. A function that updates parameters ends the step as an optimizer does; a loss that
it returns is checked then. A replay calls the function as it was written, where going back calls the compiled one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as is_compiling  # a constant, where `is_compiling` makes calls

from reprokit import native, torch_private
from reprokit.capture.callers import learn_loop
from reprokit.capture.calls import CompiledNote, CompiledStep
from reprokit.capture.loop import Loop
from reprokit.capture.recorder import Begun
from reprokit.capture.stand_ins import as_called
from reprokit.capture.structure import is_leaf, iter_leaves, iter_tensors
from reprokit.capture.tape import Number, version_of
from reprokit.capture.transformed import begin_call
from reprokit.capture.variables import names_in, owners_in
from reprokit.compare.compiled import Compiled, registered
from reprokit.errors import drop_own_frames
from reprokit.own_work import passed_over
from reprokit.program.sites import line_of


@dataclass(slots=True)
class _Running:
    """A call that runs, the optimizer that it reads, and the state of all parameters before it."""

    optimizer: torch.optim.Optimizer | None
    before: list[tuple[torch.Tensor, int, torch.Tensor | None, int]]
    has_updated: bool = False


class CompiledCalls:
    """Performs calls of compiled functions and notes those of the loop itself.

    ``_has_lost``: of a call's backward pass no gradient was found, which was printed. In a context ``bare()`` no hook
    is in place.
    """

    def __init__(self, loop: Loop, bare: Callable[[], AbstractContextManager[None]]) -> None:
        self._loop = loop
        self._bare = bare
        self._recorder = loop.recorder
        self._has_lost = False
        self._running: _Running

    def note_compiler(self, backend: Any) -> None:
        """Something is compiled with a backend: a word, a function, or another object that can be called."""
        known = registered(backend) if isinstance(backend, str) else backend
        if not callable(known):
            compiler = Compiled(backend)
        elif isinstance(known, FunctionType):
            compiler = Compiled(f"{Path(known.__code__.co_filename).name}:{known.__name__}", known)
        else:
            compiler = Compiled(type(known).__name__, known)
        self._loop.compilers[compiler.backend] = compiler

    def watched(self, compiled: Any) -> Any:
        """A compiled function whose calls are noted; anything else that `torch.compile` returns, as it is."""
        original = torch_private.uncompiled(compiled)
        is_function = callable(compiled) and not isinstance(compiled, (torch.nn.Module, type))
        if original is None or not is_function:
            return compiled
        recorder = self._recorder

        @functools.wraps(compiled)
        @passed_over
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return compiled(*args, **kwargs)
            try:
                if not recorder.is_outermost:
                    if not recorder.is_installed:
                        recorder.leave_stack()  # a compiler would follow calls into the mode
                    return as_called(compiled, args, kwargs)
                return self._perform(compiled, original, args, kwargs)
            except BaseException as error:
                drop_own_frames(error)
                raise

        return call

    @passed_over
    def _perform(self, compiled: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder, loop = self._recorder, self._loop

        def finish(begun: Begun, output: Any) -> None:
            loop.generators.after_module()
            running = self._running
            bad = self._finish(running, begun, original, output)
            if bad is not None:
                loop.failures.fail(bad, is_late=True)
            if running.has_updated and recorder.enabled:
                loop.end_step(running.optimizer)

        known = compiled, original, args, kwargs
        return recorder.whole(self._begin, known, compiled, args, kwargs, finish, around=self._bare)

    def _begin(self, compiled: Callable[..., Any], original: Any, args: Any, kwargs: dict[str, Any]) -> Begun:
        loop, recorder = self._loop, self._recorder
        drawn = loop.generators.before_module() if loop.generators.looks_left else None
        begun = begin_call(recorder, compiled, original, args, kwargs)
        begun[-1].generators = drawn
        owners = list(owners_in((args, kwargs, begun[2])))
        optimizers = [owner for owner in owners if isinstance(owner, torch.optim.Optimizer)]
        for optimizer in optimizers:
            loop.meet_optimizer(optimizer)
        given = [number() for number in iter_leaves(begun[2], Number)]
        has_state = owners or any(tensor is not None and is_leaf(tensor) for tensor in given)
        known = loop.world.parameters if has_state else []
        state = [(p, _version_of(p), p.grad, _version_of(p.grad)) for p in known]
        self._running = _Running(optimizers[0] if optimizers else None, state)
        return begun

    def _finish(self, running: _Running, begun: Begun, original: Any, output: Any) -> str | None:
        """Note the call; what was bad if it has made an update of that."""
        loop, recorder = self._loop, self._recorder
        running.has_updated = any(_version_of(p) != version for p, version, _, _ in running.before)
        has_gradients = any(p.grad is not g or _version_of(g) != v for p, _, g, v in running.before)
        if not (running.has_updated or has_gradients):
            recorder.finish(begun, output)
            self._note_lost(begun, original)
            return None
        single = (tensor for tensor in enumerate(iter_tensors(output)) if native.numel(tensor[1]) == 1)
        losses = {n: native.detach(tensor) for n, tensor in single if native.is_floating_point(tensor)}
        seen = {n: loss if loss.is_cuda else native.item(loss) for n, loss in losses.items()}
        note = CompiledNote(begun[-1].places, begun[-1].rng, begun[-1].generators, seen, running.has_updated)
        recorder.is_claimed = True
        recorder.finish((CompiledStep, *begun[1:-1], note), output)
        if has_gradients:
            loop.has_differentiated = True
            if not running.has_updated:
                loop.iterations.micro_step += 1
        learn_loop(begun[4], sys._getframe(1))
        return self._bad(running, list(losses.values()), has_gradients=has_gradients) if running.has_updated else None

    def _bad(self, running: _Running, losses: list[torch.Tensor], *, has_gradients: bool) -> str | None:
        loop = self._loop
        if loop.judge.pending is not None:  # the loop called backward, and the function has updated
            return "loss"
        if running.optimizer is not None and not has_gradients:
            if loop.has_bad_gradients(running.optimizer, are_scaled=False):
                return "gradient"
            if loop.has_differentiated:  # a loss was checked in this step already
                return None
        return "loss" if loop.results(losses) else None

    def _note_lost(self, begun: Begun, original: Any) -> None:
        """Say once that a function calls backward, and that no gradient or update of it was found."""
        code = getattr(original, "__code__", None)
        if self._has_lost or code is None or not begun[6].grad or "backward" not in names_in(code):
            return
        self._has_lost = True
        place = f"{Path(begun[4].co_filename).name}:{line_of(begun[4], begun[5])}"
        what = f"`{original.__name__}`, which {place} calls compiled, calls backward"
        self._loop.failures.note_unseen(f"{what}, but no gradient or update that it made was found; it is not checked")


def _version_of(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None else version_of(tensor)
