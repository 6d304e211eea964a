"""Calls of functions that `torch.compile` made, by the loop itself: a loss, an optimizer's step, or a whole step.

Each call is one entry, and nothing inside is noted. What the function reads is met before it runs, so that its
parameters are part of the last copy. A function that updates parameters ends the step as an optimizer does; a loss that
it returns is checked then. A replay calls the function as it was written, where going back calls the compiled one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as is_compiling  # a constant, where `is_compiling` makes calls

from reprokit.capture.hooks.on_failure import Failures
from reprokit.capture.hooks.policy import Policy
from reprokit.capture.hooks.stepping import Stepping
from reprokit.capture.record import kinds
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.roots import learn_loop
from reprokit.capture.record.structure import is_leaf, iter_tensors
from reprokit.capture.record.transformed import CompiledCall, begin_call, names_in, owners_in
from reprokit.capture.run.run_state import RunState
from reprokit.locate.compiled import Compiled, registered
from reprokit.program.sites import kind_of_file


@dataclass(slots=True)
class _Running:
    """A call that runs: its entry, the optimizer that it reads, and the state of all parameters before it."""

    entry: Entry
    optimizer: torch.optim.Optimizer | None
    before: list[tuple[torch.Tensor, int, torch.Tensor | None, int]]
    has_updated: bool = False


class CompiledCalls:
    """Performs calls of compiled functions and notes those of the loop itself.

    ``_has_lost``: of a call's backward pass no gradient was found, which was printed.
    """

    def __init__(self, run_state: RunState, policy: Policy, failures: Failures, stepping: Stepping) -> None:
        self._run_state = run_state
        self._tape = run_state.tape
        self._policy = policy
        self._failures = failures
        self._stepping = stepping
        self._has_lost = False

    def note_compiler(self, backend: Any) -> None:
        """Something is compiled with a backend: a word, a function, or another object that can be called."""
        known = registered(backend) if isinstance(backend, str) else backend
        if not callable(known):
            compiler = Compiled(backend)
        elif isinstance(known, FunctionType):
            compiler = Compiled(f"{Path(known.__code__.co_filename).name}:{known.__name__}", known)
        else:
            compiler = Compiled(_place_of(known) or type(known).__name__, known)
        self._run_state.compilers[compiler.backend] = compiler

    def watched(self, compiled: Any) -> Any:
        """A compiled function whose calls are noted; anything else that `torch.compile` returns, as it is."""
        original = getattr(compiled, "_torchdynamo_orig_callable", None)
        is_function = callable(compiled) and not isinstance(compiled, (torch.nn.Module, type))
        if original is None or not is_function or getattr(compiled, "_torchdynamo_disable", False):
            return compiled
        tape = self._tape

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return compiled(*args, **kwargs)
            if not tape.is_outermost:
                if not tape.is_installed:
                    tape.leave_stack()  # a compiler would follow calls into the mode
                return compiled(*args, **kwargs)
            return self._perform(compiled, original, args, kwargs)

        return call

    def _perform(self, compiled: Any, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape = self._tape
        running = tape.guard(self._begin, compiled, original, args, kwargs)
        watching = tape.guard(tape.roots.lift_watch)
        try:
            output = tape.call_aside(running.entry if running is not None else None, compiled, args, kwargs)
        finally:
            if watching is not None:
                tape.guard(tape.roots.lower_watch, watching)
        if running is None or not tape.enabled:
            return output
        bad = tape.guard(self._finish, running, original, output, sys._getframe(2))
        if bad is not None and tape.enabled:
            self._failures.fail(bad, is_late=True)
        if running.has_updated:
            tape.guard(self._stepping.end_step, running.optimizer)
        return output

    def _begin(
        self, compiled: Callable[..., Any], original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Running:
        drawn = self._run_state.generators.before_module()
        entry = begin_call(self._tape, compiled, original, args, kwargs, sys._getframe(4))
        entry.generators = drawn
        owners = list(owners_in(entry.args))
        optimizers = [owner for owner in owners if isinstance(owner, torch.optim.Optimizer)]
        for optimizer in optimizers:
            self._run_state.meet_optimizer(optimizer)
        has_state = owners or any(is_leaf(tensor) for tensor, _ in entry.versions)
        known = self._run_state.history.parameters if has_state else []
        state = [(p, _version_of(p), p.grad, _version_of(p.grad)) for p in known]
        return _Running(entry, optimizers[0] if optimizers else None, state)

    def _finish(self, running: _Running, original: Any, output: Any, frame: Any) -> str | None:
        """Note the call; what was bad if it has made an update of that."""
        entry, tape = running.entry, self._tape
        entry.output = output if isinstance(output, torch.Tensor) else list(iter_tensors(output))
        running.has_updated = any(_version_of(p) != version for p, version, _, _ in running.before)
        has_gradients = any(p.grad is not g or _version_of(g) != v for p, _, g, v in running.before)
        if not (running.has_updated or has_gradients):
            tape.running.add(entry)
            self._note_lost(entry, original)
            return None
        losses = {n: t.detach() for n, t in enumerate(iter_tensors(output)) if t.numel() == 1 and _is_real(t)}
        entry.kind, entry.has_stepped = kinds.COMPILED, running.has_updated
        seen = {n: loss if loss.is_cuda else loss.item() for n, loss in losses.items()}
        entry.settings = CompiledCall(entry.settings, seen)
        tape.is_claimed = True
        tape.running.add(entry)
        if has_gradients and not running.has_updated:
            self._run_state.iterations.micro_step += 1
        learn_loop(entry.code, frame)
        return self._bad(running, list(losses.values()), has_gradients=has_gradients) if running.has_updated else None

    def _bad(self, running: _Running, losses: list[torch.Tensor], *, has_gradients: bool) -> str | None:
        suspect, policy = self._tape.running.suspect, self._policy
        if suspect is not None and suspect.has_begun:  # the loop called backward, and the function has updated
            return "loss"
        if running.optimizer is not None and not has_gradients:
            if policy.gradients(running.optimizer, are_scaled=False):
                return "gradient"
            if suspect is not None or self._tape.running.differentiations:  # a loss was checked in this step already
                return None
        return "loss" if policy.results(losses) is not None else None

    def _note_lost(self, entry: Entry, original: Any) -> None:
        """Say once that a function calls backward, and that no gradient or update of it was found."""
        code = getattr(original, "__code__", None)
        if self._has_lost or code is None or not entry.mode.grad or "backward" not in names_in(code):
            return
        self._has_lost = True
        place = f"{Path(entry.code.co_filename).name}:{entry.line}" if entry.code is not None else "the loop"
        what = f"`{original.__name__}`, which {place} calls compiled, calls backward"
        self._failures.note_unseen(f"{what}, but no gradient or update that it made was found; it is not checked")


def _place_of(backend: Any) -> str | None:
    """``FILE.py:NAME`` of the user's module that has an object in a variable, the main program last."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    homes = {file: module for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    for file in sorted(homes, key=lambda file: file == main):
        names = list(vars(homes[file]).items()) if kind_of_file(file) == "user" else []
        name = next((name for name, value in names if value is backend), None)
        if name is not None:
            return f"{Path(file).name}:{name}"
    return None


def _version_of(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()
