"""A capture session: from installing the hooks to a snapshot on disk, and back to a world without reprokit.

The session listens to the tape and the hooks and decides whether a step is bad; on the first bad step it has the step
replayed and saved. Nothing it does may stop, slow or change the training: an error of its own is said once and switches
it off.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Literal

import torch
from torch.compiler import is_dynamo_compiling as is_compiling  # a constant, where `is_compiling` makes calls

from reprokit.capture import exceptions
from reprokit.capture.entry import Entry
from reprokit.capture.history import History
from reprokit.capture.hooks import Hooks
from reprokit.capture.judge import Judge, Watch
from reprokit.capture.saving import Noticed, Place, snapshot_of
from reprokit.capture.state import options_of
from reprokit.capture.structure import repeatable
from reprokit.capture.tape import Tape
from reprokit.capture.training import Training
from reprokit.capture.watch import is_handed_to_kernel
from reprokit.errors import UsageError
from reprokit.program.ir import Mode
from reprokit.snapshot.format import Snapshot

ON = ("nonfinite", "exception")
AFTER = ("stop", "continue")
WATCH = ("sampled", "every-step", "deferred")
PLAIN_MODE = Mode()
_NO_SCALER: dict[str, Any] = {}
_BY_SCALERS = frozenset({"scale", "unscale", "scaler_step", "quietly"})  # one that is not enabled does nothing


class CaptureStop(SystemExit):
    """Ends the user's script after a capture.

    As a `SystemExit` it passes ``except Exception``, runs ``finally`` blocks and prints no traceback.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(3)
        self.session = session


class Session:
    """Watches a training loop and saves its first failing step.

    Use as a context manager. ``output`` is the file to write (made from ``name`` and the step inside ``directory`` when
    ``None``); ``after`` says whether the loop is stopped (`CaptureStop` is raised in it) or goes on unwatched.
    ``history`` is the number of steps between copies of the training state (``None``: chosen by their cost; 0: no
    copies). ``watch``: ``sampled`` judges the loss, one early gradient and clipped norms in every step and everything
    when the copy is refreshed; ``every-step`` judges everything always; ``deferred`` never waits for a value. ``on``
    says what is a failure. ``snapshots`` are the files written and ``results`` their summaries. Raises `UsageError` for
    a value that no option has.
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
        history: int | None = None,
        watch: Watch = "sampled",
        on: Collection[str] = ON,
    ) -> None:
        _check_options(after, history, watch, on)
        self.snapshots: list[Path] = []
        self.results: list[dict[str, Any]] = []
        self._place = Place(output, directory or Path.cwd(), name, overwrite)
        self._after = after
        self._command = list(command)
        self._quiet = quiet
        self._judges = "nonfinite" in on
        self._takes_exceptions = "exception" in on
        self._tape = Tape(on_differentiate=self._judge_start, on_module=self._meet_module, on_error=self._switch_off)
        self._tape.on_hand_update = self._finish_hand_update
        self._tape.on_differentiated = self._finish_differentiation
        self._hooks = Hooks(self)
        self._training = Training(self._tape, History(1 if watch == "every-step" and history is None else history))
        self._judge = Judge(self._training, watch, matter=self._judges)
        self._tape.on_read = self._judge.read
        self._has_complained = False
        self._paused_at: float | None = None
        self._held: Entry | None = None
        self._stepping: bool | None = None  # see Tape.step_aside; None while no optimizer steps
        self._stepper: torch.optim.Optimizer | None = None
        self._met: torch.optim.Optimizer | None = None
        self._stepper_scaler: dict[str, Any] = {}
        self._stepping_scaler: torch.amp.GradScaler | None = None
        self._stepped_inside: torch.optim.Optimizer | None = None
        self._active = False
        self._is_over = False

    # -- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        try:
            self.resume()
        except Exception as error:
            _print(f"cannot watch this run ({type(error).__name__}: {error}); it goes on unwatched")
            self._leave()
            self._tape.leave_stack()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        path = None
        if self._tape.enabled and not isinstance(exc, CaptureStop):
            try:
                path = self._look_back(exc)
            except Exception as error:
                self._switch_off(error)
        self._leave()
        self._tape.leave_stack()
        if path is not None and exc is None and self._after == "stop":
            raise CaptureStop(self)

    def resume(self) -> None:
        """Put every hook in place and watch. Also after `pause`, with all that is known of the training.

        Nothing happens when the session watches already, or is over.
        """
        if self._active or self._is_over:
            return
        if self._paused_at is not None:
            self._training.skip(time.perf_counter() - self._paused_at)
            self._paused_at = None
        self._watchers.append(self)
        self._hooks.install()
        self._tape.install()
        self._active = True
        self._settle_watching()

    def pause(self) -> None:
        """Take every hook away and keep what is known of the training; what happens until `resume` is not seen."""
        if not self._active:
            return
        self._do_all(*self._unhooking())
        self._tape.leave_stack()
        self._paused_at = time.perf_counter()

    def _unhooking(self) -> list[Callable[[], None]]:
        self._active = self._tape.enabled = False
        return [self._make_way, self._exit_step, *self._hooks.removals(), self._tape.uninstall, self._tape.restart]

    def _make_way(self) -> None:
        """The capture that this one was entered in watches again."""
        if self in self._watchers:
            self._watchers.remove(self)
            self._settle_watching()
            if self._watchers:
                self._watchers[-1]._wake()

    def _leave(self) -> None:
        """Take everything away, whatever breaks on the way; the mode itself leaves torch's stack in ``__exit__``."""
        self._is_over = True
        self._stepper = self._met = self._stepped_inside = self._stepping_scaler = self._held = None
        self._do_all(*self._unhooking(), self._training.forget, self._judge.forget)

    def _do_all(self, *parts: Callable[[], None]) -> None:
        """Do every part; what breaks is said, and does not keep the others from being done."""
        for part in parts:
            try:
                part()
            except Exception as error:
                self._complain("an error of its own while ending", error)

    def _complain(self, what: str, error: Exception) -> None:
        """Say what broke; one line for everything that may come of it."""
        if not self._has_complained:
            self._has_complained = True
            _print(f"{what} ({type(error).__name__}: {error}); training goes on")

    def _wake(self) -> None:
        """A capture inside this one has ended: what happened meanwhile was not noted, so the step starts anew."""
        self._exit_step()
        self._training.interrupt()

    @classmethod
    def _settle_watching(cls) -> None:
        """Who watches: the innermost session that is on, unless a session is just replaying a step."""
        for session in cls._watchers:
            session._tape.enabled = session._active and cls._watchers[-1] is session and not Tape.replays

    def _switch_off(self, error: Exception) -> None:
        """Fail open: say it once, stop watching, let the training go on."""
        if self._active:
            self._complain("switched off after an error of its own", error)
            self._leave()
            with contextlib.suppress(Exception):
                self._training.ranks.leave()

    def _say(self, text: str) -> None:
        if not self._quiet:
            _print(text)

    def _guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run work of our own unless the session has ended; errors switch it off."""
        if not self._tape.enabled:
            return None
        return self._tape.guard(work, *args)

    # -- what the loop does --------------------------------------------------------------------------------------

    def _meet_module(self, module: torch.nn.Module) -> None:
        """A root module is about to be called."""
        self._training.meet_module(module)

    def _judge_start(self, entry: Entry) -> None:
        """Asked before every differentiation: is the loss bad?"""
        if not self._tape.enabled:
            return
        try:
            verdict = self._judge.start(entry)
            if verdict == "now":
                self._training.accuse()
        except Exception as error:
            self._switch_off(error)
            return
        if verdict == "now" and not self._training.ranks.is_alone:
            self._held = self._held or entry  # the other processes wait for this backward
        elif verdict == "now":
            self._fail("loss", pending=entry)
        elif verdict == "before":
            self._fail("loss", is_late=True)

    def _finish_differentiation(self, entry: Entry) -> None:
        """A differentiation is over; optimizers may have stepped inside it, as soon as a gradient was complete."""
        if entry.target is not torch.autograd.grad and entry is not self._held:
            self._training.iterations.micro_step += 1
        optimizer, self._stepped_inside = self._stepped_inside, None
        if optimizer is not None and self._tape.enabled:
            self._tape.entries[-1].is_state = True
            self._tape.guard(self._judge_past, optimizer)

    def run_in_thread(self, run: Callable[[], None]) -> None:
        """See `hooks.Listener`."""
        if self._tape.enabled:
            self._tape.run_in_thread(run)
        else:
            run()

    def before_compiling(self, arguments: Any) -> None:
        """See `hooks.Listener`: a whole step that is compiled cannot be noted, so the tape gets out of its way."""
        if self._tape.is_outermost:
            self._tape.leave_stack()
            self._training.history.give_up()
            self._training.unseen.append("the loop itself calls something compiled, which is not followed")

    def differentiate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `hooks.Listener`."""
        if not self._tape.is_outermost:
            return function(*args, **kwargs)
        return self._tape.differentiate(function, args, kwargs)

    @property
    def tape(self) -> Tape:
        """See `hooks.Listener`."""
        return self._tape

    def backward(self, target: Callable[..., Any], tensor: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """See `hooks.Listener`."""
        self._tape.backward(target, tensor, kwargs)

    def before_mark(self) -> None:
        """See `hooks.Listener`."""
        if self._tape.enabled:
            self._tape.lift()

    def after_mark(self) -> None:
        """See `hooks.Listener`."""
        self._tape.lower()

    def zero_grad(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `hooks.Listener`."""
        tape = self._tape
        if not tape.is_outermost:
            return target(*args, **kwargs)
        popped = tape.step_aside()
        try:
            output = target(*args, **kwargs)
        finally:
            tape.step_back(popped)
        tape.entries.append(Entry("zero_grad", target, args, kwargs, PLAIN_MODE))
        return output

    def around(self, kind: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `hooks.Listener`."""
        if not self._tape.enabled or (kind in _BY_SCALERS and not args[0].is_enabled()):
            return target(*args, **kwargs)
        handle = getattr(self, f"_around_{kind}", self._perform)
        return handle(kind, target, args, kwargs)

    def _perform(self, kind: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform as one thing and note it."""
        args, kwargs = repeatable(args, kwargs)
        is_outermost = self._tape.is_outermost
        with self._tape.paused():
            output = target(*args, **kwargs)
            if is_outermost and self._tape.enabled:
                try:
                    entry = self._tape.note(kind, target, sys._getframe(3), args)
                    entry.kwargs, entry.output = kwargs, output
                    if kind == "scale":
                        entry.settings = self._training.scalers.scaled(args[0])
                except Exception as error:
                    self._switch_off(error)
        return output

    def _around_clip(self, kind: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self._perform(kind, target, args, kwargs)
        if isinstance(output, torch.Tensor):
            self._judge.clipped = self._training.timeline.grad_norm = output.detach()
        return output

    def _around_quietly(
        self, kind: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a scaler does in there is noted as a whole or not at all."""
        with self._tape.paused():
            return target(*args, **kwargs)

    def _around_unscale(
        self, kind: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self._tape.paused():
            output = target(*args, **kwargs)
        frame = sys._getframe(3)
        self._guarded(lambda: self._tape.note("unscale", target, frame, (None, args[1], args[2].detach().clone())))
        return output

    def _around_scaler_step(
        self, kind: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A grad scaler's step: when it leaves the optimizer's step out, that is an attempt all the same."""
        optimizer = args[1] if len(args) > 1 else kwargs["optimizer"]
        before = self._guarded(self._training.iterations.attempts, optimizer)
        is_outermost = self._tape.is_outermost
        with self._tape.paused():
            self._stepping_scaler = args[0] if is_outermost else None
            try:
                output = target(*args, **kwargs)
            finally:
                self._stepping_scaler = None
        if not self._tape.enabled:
            return output
        if self._guarded(self._training.iterations.attempts, optimizer) != before:
            if not self._stepper_scaler:
                self._training.scalers.stepped()
        else:
            if self._held is not None:  # the others take the gradients of this rank for an overflow like any other
                self._fail_together(False)
            elif self._guarded(self._training.scalers.skipped, args[0]) and self._judges:
                self._fail("gradient")
            self._guarded(self._training.end_step, optimizer, time.perf_counter())
        return output

    # -- optimizer steps -----------------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """See `hooks.Listener`: judge the gradients and get out of the way."""
        if is_compiling() or not self._tape.enabled:
            return None
        if not self._tape.is_outermost and (self._stepping_scaler is None or self._stepping is not None):
            if self._stepping is None and torch._C._current_graph_task_id() != -1:
                self._stepped_inside = optimizer
                self._tape.guard(self._training.meet_optimizer, optimizer)
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None) if kwargs or len(args) > 1 else None
        self._enter_step(optimizer)
        try:
            if self._met is not optimizer:
                self._training.meet_optimizer(optimizer)
                self._met = optimizer
            is_bad_gradient = closure is None and self._is_bad_gradient(optimizer)
            ranks = self._training.ranks
            is_accused = ranks.is_sharded and self._training.is_accused
        except Exception as error:
            self._switch_off(error)
            return None
        if (is_bad_gradient or is_accused or self._held is not None) and not ranks.is_alone:
            self._fail_together(is_accused or (is_bad_gradient and ranks.is_parallel))
        elif is_bad_gradient:
            self._fail("gradient")
        if closure is None or not self._tape.enabled:
            return None
        wrapped = self._watched_closure(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _enter_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._stepping is not None:
            self._exit_step()
        self._stepper = optimizer
        self._stepper_scaler = _NO_SCALER
        if self._training.scalers.is_used and is_handed_to_kernel(optimizer):
            self._stepper_scaler = {name: getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")}
        self._stepping = self._tape.step_aside()

    def _exit_step(self) -> None:
        if self._stepping is not None:
            popped, self._stepping = self._stepping, None
            self._tape.step_back(popped)

    def _watched_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The loop's closure with the tape on; from the second call in one step on, the tape starts over with it."""
        calls = 0

        def watched() -> Any:
            nonlocal calls
            calls += 1
            if not self._tape.enabled:
                return closure()
            self._exit_step()
            if calls > 1:
                self._guarded(self._training.interrupt)
            try:
                loss = closure()
                if self._tape.enabled and self._guarded(self._is_bad_gradient, optimizer):
                    self._fail("gradient")
            finally:
                if self._tape.enabled:
                    self._enter_step(optimizer)
            return loss

        return watched

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """See `hooks.Listener`: when it is time to, judge the state; a good step becomes the past."""
        tape = self._tape
        if is_compiling() or not tape.enabled or self._stepping is None or optimizer is not self._stepper:
            return
        try:
            entry = tape.note("optimizer", optimizer, sys._getframe(2))
            entry.settings = {"options": options_of(optimizer), "scaler": self._stepper_scaler}
            if self._stepper_scaler and self._is_collapsing():
                self._tape.entries.pop()  # the kernel has left the parameters alone
                self._fail("gradient")
            self._judge_past(optimizer)
        except Exception as error:
            self._switch_off(error)
        finally:
            if self._stepping is not None:
                popped, self._stepping = self._stepping, None
                self._tape.step_back_lifted(popped)

    def _is_collapsing(self) -> bool:
        """Whether a fused kernel was told to leave this step out once too often; a GPU is not waited for."""
        found, scaler = self._stepper_scaler["found_inf"], self._stepping_scaler
        if not self._judges or scaler is None or not isinstance(found, torch.Tensor) or found.is_cuda:
            return False
        if not found.item():
            self._training.scalers.stepped()
            return False
        return self._training.scalers.skipped(scaler)

    def _judge_past(self, optimizer: torch.optim.Optimizer | None) -> None:
        """At the end of a step: when it is time to, judge everything; then begin a new step."""
        training = self._training
        started = time.perf_counter()
        is_due = training.history.is_due(started)
        if (is_due or self._judge.watch == "every-step") and training.ranks.is_alone:
            bad = self._judge.state()
            if bad is not None:
                self._fail(bad, is_late=True)
        if self._tape.enabled:
            training.end_step(optimizer, started, was_checked=is_due)

    def _is_bad_gradient(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._judge.gradients(optimizer, are_scaled=bool(self._stepper_scaler))

    def _finish_hand_update(self) -> None:
        """The loop changed parameters itself, without an optimizer: that ends the step as well."""
        if self._tape.enabled:
            self._judge_past(None)

    # -- failure -------------------------------------------------------------------------------------------------

    def _look_back(self, error: BaseException | None) -> Path | None:
        """The block ends: judge what has not been judged yet, and what it ended with."""
        frame = exceptions.innermost_user_frame(error) if error is not None else sys._getframe(2)
        with self._tape.paused():
            bad = self._judge.state()
            if bad is not None:
                return self._save(Noticed(bad, frame, is_late=True))
            if self._judges and exceptions.ends_training(error):
                pending = exceptions.bad_loss(self._tape.entries)
                if pending is not None:
                    return self._save(Noticed("loss", frame, pending))
        if self._takes_exceptions and isinstance(error, Exception):
            return self._take_exception(error, frame)
        return None

    def _take_exception(self, error: Exception, frame: FrameType | None) -> Path | None:
        raised, entries = self._tape.raised, self._tape.entries
        known = next((e for e in exceptions.chain(error) if raised is not None and e is raised[0]), None)
        if known is None and not exceptions.is_inside_step(entries):
            return None
        entry = raised[1] if raised is not None and known is not None else None
        described = exceptions.describe(known or error, entry, self._training.history.modules)
        if entry is not None and not any(noted is entry for noted in entries):
            entries.append(entry)
        return self._save(Noticed("exception", frame, raised=described))

    def _fail(self, observed_at: str, *, pending: Entry | None = None, is_late: bool = False) -> None:
        """Save the step and end the session; raises `CaptureStop` unless the loop is to go on."""
        path = self._save(Noticed(observed_at, sys._getframe(1), pending, is_late))
        if path is not None and self._after == "stop":
            raise CaptureStop(self)

    def _fail_together(self, is_seen_by_all: bool) -> None:
        """One of several processes had a bad loss or gradient: its rank saves, and all stop in the same step."""
        frame, ranks = sys._getframe(1), self._training.ranks
        try:
            guilty = ranks.guilty()
            if self._held is not None:
                self._save(Noticed("loss", frame, self._held))
            elif guilty:
                self._leave()
                self._say(f"the loss went bad on rank {guilty[0]}, which saves its step")
            else:
                self._save(Noticed("gradient", frame), self._is_ours if is_seen_by_all else None)
                ranks.tell(False)  # in case that it could not find out: the others wait for an answer
            all_stop = is_seen_by_all and self._after == "stop" and ranks.meet_all()
        except Exception as error:
            self._switch_off(error)
            return
        if all_stop:
            raise CaptureStop(self)
        if self._after == "stop":
            self._say("the other processes have not seen it, so the training goes on, unwatched")

    def _is_ours(self, snapshot: Snapshot) -> bool:
        """Whether this process's own step made the bad gradient that all of them have after averaging."""
        own, ranks = snapshot.failure.call is not None or snapshot.failure.input_name is not None, self._training.ranks
        ranks.tell(own)
        guilty, rank = ranks.hear(), ranks.rank
        if guilty and rank not in guilty:
            self._say(f"the gradients went bad on rank {guilty[0]}, which saves its step")
        return rank in guilty or (not guilty and rank == 0)

    def _save(self, noticed: Noticed, is_wanted: Callable[[Snapshot], bool] | None = None) -> Path | None:
        """Write a snapshot of the failing step, if it ``is_wanted``; the session is over then in any case."""
        self._active = False
        path = None
        with self._tape.paused():
            Tape.replays += 1
            self._settle_watching()
            try:
                snapshot = snapshot_of(self._training, noticed, self._command, {"watch": self._judge.watch})
                if is_wanted is None or is_wanted(snapshot):
                    path = self._place.write(snapshot)
                    self.snapshots.append(path)
                    self.results.append({**snapshot.summary(), "path": str(path)})
            except Exception as error:
                self._complain("could not save the failing step", error)
            finally:
                Tape.replays -= 1
                self._leave()
                self._settle_watching()
        return path


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the script may have closed its streams
        print(f"reprokit: {text}", file=sys.stderr, flush=True)


def _check_options(after: str, history: int | None, watch: str, on: Collection[str]) -> None:
    """Raises `UsageError` for a value that no option has."""
    for name, value, known in (("after", after, AFTER), ("watch", watch, WATCH), *(("on", item, ON) for item in on)):
        if value not in known:
            raise UsageError(f"`{name}` cannot be {value!r}", hint=f"it is one of {', '.join(map(repr, known))}")
    if history is not None and history < 0:
        raise UsageError(f"`history` cannot be {history}", hint="it is a number of steps, 0 for no copies")


def _abandon_in_child() -> None:
    """A forked process, such as a worker of a data loader, is not the training: nothing is watched in it."""
    for session in list(Session._watchers):
        session._tape.leave_stack()
        session._leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_in_child)
