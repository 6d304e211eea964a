"""A capture session: from installing the hooks to a snapshot on disk, and back to a world without reprokit.

The session listens to the tape and the hooks, decides whether a step is bad, and on the first bad step replays it,
locates
the origin and saves. Nothing it does may stop, slow or change the training: an error of its own is said once and
switches it off.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from reprokit.capture.counting import Iterations
from reprokit.capture.generators import python_generators
from reprokit.capture.hooks import Hooks
from reprokit.capture.rescue import FailedStep, make_snapshot
from reprokit.capture.state import Copies, UpdateCopies, parameters_of
from reprokit.capture.structure import iter_tensors
from reprokit.capture.tape import Entry, Tape
from reprokit.capture.watch import bad_tensor
from reprokit.locate.ways import ways_of
from reprokit.snapshot.format import Snapshot, save

TIMELINE_STEPS = 100
SETTLED_AFTER = 2  # optimizer steps after which every root module is taken to be known
COLLAPSED_SCALE = 1.0
SKIPPED_STREAK = 100


class CaptureStop(SystemExit):
    """Ends the user's script after a capture.

    As a `SystemExit` it passes ``except Exception``, runs ``finally`` blocks and prints no traceback.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(3)
        self.session = session


class Session:
    """Watches a training loop and saves its first failing step.

    Use as a context manager. ``output`` is the file to write (made from ``name`` and the step inside ``directory``
    when ``None``); ``after`` says whether
    the loop is stopped (`CaptureStop` is raised in it) or goes on unwatched. ``snapshots`` are the files written and
    ``results`` their summaries.
    """

    _watchers: ClassVar[list[Session]] = []

    def __init__(
        self,
        output: Path | None = None,
        *,
        name: str = "training",
        directory: Path | None = None,
        after: Literal["stop", "continue"] = "stop",
        command: Sequence[str] = (),
        overwrite: bool = False,
        quiet: bool = False,
    ) -> None:
        self.snapshots: list[Path] = []
        self.results: list[dict[str, Any]] = []
        self._output = output
        self._name = name
        self._directory = directory or Path.cwd()
        self._after = after
        self._command = list(command)
        self._overwrite = overwrite
        self._quiet = quiet
        self._tape = Tape(on_differentiate=self._judge_start, on_module=self._meet_module, on_error=self._switch_off)
        self._tape.is_watched = lambda: self._is_watching
        self._tape.on_hand_update = self._finish_hand_update
        self._tape.parameters = self._parameters
        self._hooks = Hooks(self)
        self._roots: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._buffers = Copies()
        self._updates = UpdateCopies()
        self._iterations = Iterations()
        self._generators: dict[str, Any] | None = None
        self._timeline: collections.deque[dict[str, Any]] = collections.deque(maxlen=TIMELINE_STEPS)
        self._loss: float | None = None
        self._started = time.perf_counter()
        self._clipped: torch.Tensor | None = None
        self._skipped = 0
        self._stepping: contextlib.AbstractContextManager[None] | None = None
        self._active = False
        self._stopped = False

    # -- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        self._watchers.append(self)
        self._hooks.install()
        self._tape.install()
        self._tape.enter_stack()
        self._active = True
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        self._leave()
        self._tape.leave_stack()

    def _leave(self) -> None:
        """Take everything away; the mode itself leaves torch's stack in ``__exit__``."""
        self._active = False
        if self in self._watchers:
            self._watchers.remove(self)
            if self._watchers:
                self._watchers[-1]._resume()
        self._exit_step()
        self._hooks.remove()
        self._tape.uninstall()
        self._buffers.clear()
        self._updates = UpdateCopies()

    def _resume(self) -> None:
        """A capture inside this one has ended: what happened meanwhile was not noted, so the step starts anew."""
        self._exit_step()
        self._restart()

    @property
    def _is_watching(self) -> bool:
        """Whether the session is on, is the innermost one, and no session is just replaying a step."""
        return self._active and self._watchers[-1] is self and not Tape.replays

    def _switch_off(self, error: Exception) -> None:
        """Fail open: say it once, stop watching, let the training go on."""
        if self._active:
            self._leave()
            self._say(f"switched off after an error of its own ({type(error).__name__}: {error}); training goes on")

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(f"reprokit: {text}", file=sys.stderr, flush=True)

    def _guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run work of our own unless the session has ended; errors switch it off."""
        if not self._is_watching:
            return None
        return self._tape.guard(work, *args)

    # -- what the loop does --------------------------------------------------------------------------------------

    def _meet_module(self, module: torch.nn.Module) -> None:
        """A root module is about to be called: note its buffers and the generators before it changes them."""
        if self._generators is None:
            self._generators = python_generators()
        known = self._roots.get(id(module))
        if known is None or known() is not module:
            self._roots[id(module)] = weakref.ref(module)
            self._buffers.add([buffer for buffer in module.buffers() if not buffer.is_inference()])

    def _judge_start(self, entry: Entry) -> None:
        """Asked before every differentiation: is the loss bad?"""
        if not self._is_watching:
            return
        bad = self._guarded(self._bad_start, entry)
        if bad:
            self._fail("loss", pending=entry)
        if entry.target is not torch.autograd.grad:
            self._iterations.differentiated()

    def _bad_start(self, entry: Entry) -> bool:
        starts = list(iter_tensors(entry.args[:1] or tuple(entry.kwargs.values())[:1]))
        if entry.name == "torch.Tensor.backward" and starts and starts[0].numel() == 1:
            self._loss = self._unscaled_loss(starts[0])
        return any(ways_of(self._judged(tensor)) for tensor in starts)

    def _judged(self, start: torch.Tensor) -> torch.Tensor:
        """The tensor to judge: what the grad scaler was given, if the start is its product."""
        for entry in reversed(self._tape.entries):
            if entry.kind == "scale" and any(tensor is start for tensor in iter_tensors(entry.output)):
                olds, news = iter_tensors(entry.args[1]), iter_tensors(entry.output)
                return next(old for old, new in zip(olds, news, strict=True) if new is start)
        return start

    def _unscaled_loss(self, start: torch.Tensor) -> float:
        return float(self._judged(start).detach())

    def differentiate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `hooks.Listener`."""
        if not self._is_watching or not self._tape.is_outermost:
            return function(*args, **kwargs)
        return self._tape.differentiate(function, args, kwargs)

    def around(self, kind: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `hooks.Listener`."""
        if not self._is_watching:
            return target(*args, **kwargs)
        handle = getattr(self, f"_around_{kind}", self._perform)
        return handle(kind, target, args, kwargs)

    def _perform(self, kind: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform as one thing and note it."""
        outermost = self._tape.is_outermost
        with self._tape.paused():
            output = target(*args, **kwargs)
        if outermost:
            frame = sys._getframe(3)
            entry = self._guarded(lambda: self._tape.note(kind, target, frame))
            if entry is not None:
                entry.args, entry.kwargs, entry.output = args, kwargs, output
        return output

    def _around_clip(self, kind: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Iterator):
            args = (list(args[0]), *args[1:])  # a generator can be read only once
        output = self._perform(kind, target, args, kwargs)
        self._clipped = output if isinstance(output, torch.Tensor) else None
        return output

    def _around_scaler_update(
        self, kind: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self._tape.paused():
            return target(*args, **kwargs)

    def _around_unscale(
        self, kind: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        output = target(*args, **kwargs)
        frame = sys._getframe(3)

        def note() -> None:
            inverse = float(args[2])
            self._tape.note("unscale", target, frame).args = (None, args[1], inverse)

        self._guarded(note)
        return output

    def _around_scaler_step(
        self, kind: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A grad scaler's step: when it leaves the optimizer's step out, that is an attempt all the same."""
        optimizer = args[1] if len(args) > 1 else kwargs["optimizer"]
        before = self._iterations.attempts(optimizer)
        output = target(*args, **kwargs)
        if self._is_watching and self._iterations.attempts(optimizer) == before:
            self._skipped += 1
            if self._is_collapsed(args[0]):
                self._fail("gradient")
            self._guarded(self._finish_step, optimizer)
        else:
            self._skipped = 0
        return output

    def _is_collapsed(self, scaler: torch.amp.GradScaler) -> bool:
        """Whether skipping steps is no longer the scaler's normal search for a scale."""
        return self._skipped >= SKIPPED_STREAK or (self._skipped > 1 and scaler.get_scale() < COLLAPSED_SCALE)

    # -- optimizer steps -----------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """See `hooks.Listener`: judge the gradients, remember the state, get out of the way."""
        if not self._is_watching or not self._tape.is_outermost:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None and self._guarded(self._bad_gradients, optimizer):
            self._fail("gradient")
        if not self._guarded(self._remember, optimizer):
            return None
        self._enter_step()
        if closure is None:
            return None
        wrapped = self._watched_closure(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _remember(self, optimizer: torch.optim.Optimizer) -> bool:
        if not isinstance(optimizer, torch.optim.LBFGS):
            self._updates.take(optimizer)
        return True

    def _enter_step(self) -> None:
        self._exit_step()
        self._stepping = self._tape.paused()
        self._stepping.__enter__()

    def _exit_step(self) -> None:
        if self._stepping is not None:
            self._stepping.__exit__(None, None, None)
            self._stepping = None

    def _watched_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The loop's closure with the tape on; from the second call in one step on, the tape starts over with it."""
        calls = 0

        def watched() -> Any:
            nonlocal calls
            calls += 1
            if not self._is_watching:
                return closure()
            self._exit_step()
            if calls > 1:
                self._guarded(self._restart)
            try:
                loss = closure()
                if self._is_watching and self._guarded(self._bad_gradients, optimizer):
                    self._fail("gradient")
            finally:
                if self._is_watching:
                    self._enter_step()
            return loss

        return watched

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See `hooks.Listener`: judge the parameters; a good step is forgotten."""
        if not self._is_watching or self._stepping is None:
            return
        self._exit_step()
        frame = sys._getframe(3)
        self._guarded(lambda: self._tape.note("optimizer", optimizer, frame))
        if self._guarded(self._bad_parameters, optimizer):
            self._fail("parameter", optimizer=optimizer)
        self._guarded(self._finish_step, optimizer)

    def _bad_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return False  # a fused kernel looks at the scaler's verdict itself
        clipped, self._clipped = self._clipped, None
        if clipped is not None and bool(torch.isfinite(clipped)):
            return False
        grads = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        return bad_tensor(grads) is not None

    def _bad_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        return bad_tensor(parameters_of(optimizer)) is not None or bad_tensor(self._buffers.changed()) is not None

    def _finish_step(self, optimizer: torch.optim.Optimizer) -> None:
        now = time.perf_counter()
        rate = optimizer.param_groups[0].get("lr")
        self._timeline.append(
            {
                "step": self._iterations.completed,
                "loss": self._loss,
                "lr": float(rate) if rate is not None else None,
                "seconds": round(now - self._started, 6),
            }
        )
        self._started = now
        self._iterations.attempted(optimizer)
        if self._iterations.total == SETTLED_AFTER:
            self._tape.settle()
        self._restart()

    def _finish_hand_update(self) -> None:
        """The loop changed parameters itself, without an optimizer: that ends the step as well."""
        self._iterations.updated_by_hand()
        self._restart()

    def _parameters(self) -> Iterator[torch.Tensor]:
        for reference in self._roots.values():
            module = reference()
            if module is not None:
                yield from module.parameters()

    def _restart(self) -> None:
        self._tape.restart()
        self._buffers.refresh()
        self._generators = None

    # -- failure -------------------------------------------------------------------------------------------------

    def _fail(
        self, observed_at: str, *, pending: Entry | None = None, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Save the step and end the session; raises `CaptureStop` unless the loop is to go on."""
        frame = sys._getframe(1)
        self._active = False
        path = None
        with self._tape.paused():
            Tape.replays += 1
            try:
                snapshot = self._snapshot(observed_at, pending, optimizer, frame)
                path = self._write(snapshot)
                self.snapshots.append(path)
                self.results.append({**snapshot.summary(), "path": str(path)})
            except Exception as error:
                self._say(f"could not save the failing step ({type(error).__name__}: {error}); training goes on")
            finally:
                Tape.replays -= 1
                self._leave()
        if path is not None and self._after == "stop":
            self._stopped = True
            raise CaptureStop(self)

    def _snapshot(
        self, observed_at: str, pending: Entry | None, optimizer: torch.optim.Optimizer | None, frame: Any
    ) -> Snapshot:
        modules = [module for root in self._roots.values() if (module := root()) is not None]
        step = FailedStep(
            observed_at=observed_at,
            entries=self._tape.entries,
            saved=self._tape.saved,
            pending=pending,
            optimizer=optimizer,
            modules=modules,
            buffers=self._buffers,
            updates=self._updates,
            generators=self._generators,
            iterations=self._iterations,
            timeline=list(self._timeline),
            loss=self._loss,
            command=self._command,
        )
        return make_snapshot(step, frame)

    def _write(self, snapshot: Snapshot) -> Path:
        path = self._output or free_path(self._directory, f"{self._name}-step{snapshot.step}")
        if path.exists() and not self._overwrite:
            path = free_path(path.parent, path.name.removesuffix(".pt").removesuffix(".repro"))
        save(snapshot, path)
        return path


def free_path(directory: Path, stem: str) -> Path:
    """``<stem>.repro.pt`` in ``directory``, numbered when that name is taken."""
    for number in range(10_000):
        path = directory / (f"{stem}.repro.pt" if number == 0 else f"{stem}-{number}.repro.pt")
        if not path.exists():
            return path
    raise FileExistsError(f"no free name for {stem} in {directory}")


def _abandon_in_child() -> None:
    """A forked process, such as a worker of a data loader, is not the training: nothing is watched in it."""
    for session in list(Session._watchers):
        session._tape.leave_stack()
        session._leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_in_child)
