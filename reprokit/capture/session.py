"""A capture session: from installing the hooks to a snapshot on disk, and back to a world without reprokit.

Nothing it does may stop, slow or change the training: an internal error is printed once and switches it off. One
session of a process watches at a time, and it watches one thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from traceback import format_exception
from types import FrameType
from typing import Any, ClassVar, Literal

from reprokit import native, torch_private
from reprokit.capture.budget import Budget
from reprokit.capture.early_warning import EarlyWarning
from reprokit.capture.failure_text import Seen, closing_line
from reprokit.capture.failures import Failures, ends_training
from reprokit.capture.fidelity import Place
from reprokit.capture.generators import all_generators_restored
from reprokit.capture.hooks import Hooks
from reprokit.capture.loop import Loop
from reprokit.capture.meters import NormMeter
from reprokit.capture.mode import CaptureStop, played_unseen, seen
from reprokit.capture.options import (
    DEFAULT_ON,
    DEFAULT_PERCENT,
    After,
    Watch,
    check_options,
    check_steps,
    current_folder,
    events_in,
)
from reprokit.capture.recorder import Recorder
from reprokit.capture.save import SkippedLoss
from reprokit.capture.silent import Silent
from reprokit.capture.tensor_names import parameter_names
from reprokit.capture.world import World
from reprokit.compare.quantity import number_of
from reprokit.errors import UsageError, ignored_errors, pass_on
from reprokit.native import clock
from reprokit.own_work import ignored_warnings
from reprokit.series.events import LineLog, Silence, TrainingEvent
from reprokit.series.story import RecordedStep, StepNumbers, flat
from reprokit.snapshot.source import Source
from reprokit.words import escaped_line, print_line, print_own, visible_line, without_code


class Session:
    """Watches a training loop and saves its first failing step.

    Use as a context manager. ``output`` is the file to write (made from ``name`` and the step inside ``directory`` when
    ``None``); the file name of one of several processes gets its rank, or ``part``. ``after`` says whether the loop is
    stopped (`CaptureStop` is raised in it) or goes on unwatched. ``history`` is the number of steps between copies of
    the training state (``None``: chosen by their cost; 0: no copies). ``watch``: ``sampled`` checks the loss, one early
    gradient and clipped norms in every step and everything when the copy is refreshed; ``every-step`` checks everything
    always. ``budget`` is the share of the loop's CPU time in percent that is kept by noting fewer steps (``None`` or
    ``"off"``: no limit), ``from_step`` the first step to note. The steps ``at_step`` are saved although they are
    healthy, and training goes on; after ``last_step`` the loop is stopped. ``on`` says what is a failure, ``source``
    how much of the user's code is kept. ``on_snapshot`` is called with the path of every file written, when all hooks
    are gone; an exception of it is printed. ``record`` measures norms of gradients and weights: ``auto``, every ``N``
    steps, or ``N:PATTERN`` for some parameters. ``on_numbers`` is called with a dict of the numbers of every step that
    was measured (at the pace of ``auto`` without ``record``), ``on_event`` with every event. Without ``cause`` the
    steps before a failure are not played again with one thing changed.
    ``snapshots`` are the files written, ``results`` their summaries; ``closing`` is the line that says why there are
    none. With ``verbose`` an error of reprokit's own is printed with its traceback. ``stops`` says whether the loop is
    to stop, ``is_watching`` whether the hooks are in place. Raises `UsageError` for a value that no option has.
    """

    active: ClassVar[Session | None] = None  # the one that watches
    recorder_type: ClassVar[type[Recorder]] = Recorder
    failures_type: ClassVar[type[Failures]] = Failures

    def __init__(
        self,
        output: Path | None = None,
        *,
        name: str = "training",
        part: str = "",
        directory: Path | None = None,
        after: After = "stop",
        command: Sequence[str] = (),
        overwrite: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        history: int | None = None,
        watch: Watch = "sampled",
        on: Collection[str] = DEFAULT_ON,
        source: Source = "traceback",
        budget: float | Literal["off"] | None = DEFAULT_PERCENT,
        from_step: int | None = None,
        at_step: int | Collection[int] = (),
        last_step: int | None = None,
        on_snapshot: Callable[[Path], object] | None = None,
        record: str | None = None,
        on_numbers: Callable[[dict[str, float]], object] | None = None,
        on_event: Callable[[TrainingEvent], object] | None = None,
        cause: bool = True,
    ) -> None:
        asked = check_steps(at_step)
        check_options(after, history, watch, on, source, budget, from_step)
        given = (("on_snapshot", on_snapshot), ("on_numbers", on_numbers), ("on_event", on_event))
        for (option, function), takes in zip(given, ("a path", "a dict", "an event"), strict=True):
            if function is not None and not callable(function):
                raise UsageError(f"`{option}` cannot be {function!r}", hint=f"it is a function that takes {takes}")
        self.stops = after == "stop"
        self.is_watching = False
        self._is_over = False
        self._quiet = quiet
        self._verbose = verbose
        kinds = events_in(on)
        on = self._on = (*on, "nonfinite") if kinds else tuple(on)  # a NaN is no spike
        self._on_snapshot = on_snapshot
        self._early: EarlyWarning | None = None
        self.closing: str | None = None
        self._has_complained = self._has_said_lacking = False
        self._paused_at: float | None = None
        self._recorder = self.recorder_type(self.switch_off)
        self._recorder.on_other_thread = lambda: self.say("a second thread trains, which is not watched")
        world = World(1 if watch == "every-step" and history is None else history)
        percent = None if watch == "every-step" or budget == "off" else budget
        matter = not {"nonfinite", "skipped"}.isdisjoint(on)
        self._loop = Loop(self._recorder, world, Budget(percent, from_step), watch, matter=matter)
        self.source = source
        place = Place(output, directory or current_folder(), name, overwrite, source, part)
        self._failures = self.failures_type(self, self._loop, place, command, on, finds_cause=cause)
        self._loop.asked, self._loop.last_step = asked, last_step
        self._loop.choose()
        self.snapshots, self.results = self._failures.snapshots, self._failures.results
        self._on_numbers = on_numbers
        if record is not None or on_numbers is not None:
            self._loop.norms = NormMeter(record or "auto", self._parameter_names, self.say, self._hand_over_numbers)
        if "ranks" in on:
            self._loop.ranks.compare()
        if kinds:
            log = LineLog(lambda: place.log)
            self._early = EarlyWarning(self, self._loop, kinds, self._failures, log, on_event)
            self._loop.early = self._failures.early = self._early
        report = self._early.report if self._early is not None else self._warn
        silent = Silent(self, self._loop, report, finds_dead="dead" in kinds)
        self._loop.silent = self._failures.silent = silent
        self._loop.budget.say = self.say
        self._hooks = Hooks(self._loop)

    def __enter__(self) -> Session:
        try:
            self.resume()
        except Exception as error:
            self.take_away()
            self.complain("cannot watch this run", error, "it goes on unwatched")
        except BaseException:
            self.take_away()
            raise
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        path = None
        try:
            if self._recorder.enabled and not isinstance(exc, CaptureStop):
                try:
                    has_failed = exc is not None and (ends_training(exc) or not isinstance(exc, SystemExit))
                    with self._recorder.paused():  # the last moment for going back together
                        self._loop.ranks.check_at_end(has_failed=has_failed)
                    if self._recorder.enabled:  # and they have found nothing
                        path = self._failures.look_back(exc)
                        self._loop.ranks.tell_at_end()
                        is_told = self.snapshots or self._has_complained
                        self.closing = None if is_told else closing_line(self._seen(), exc)
                except Exception as error:
                    self.switch_off(error)
        finally:
            self.take_away()
        if path is not None and exc is None:
            self.stop()

    def take_away(self) -> None:
        """Take everything away, the mode on torch's stack included, also if an exception arrives meanwhile."""
        try:
            self.leave()
            self._recorder.leave_stack()
        except BaseException:
            self.leave()
            self._recorder.leave_stack()
            raise

    @property
    def has_failed(self) -> bool:
        """True if a step failed and was saved, for another reason than an exception that the script raised itself."""
        return self._failures.num_failed > 0 and not self._failures.is_deliberate

    @property
    def has_checked(self) -> bool:
        """True if a backward pass was seen."""
        return self._recorder.is_claimed

    def _seen(self) -> Seen:
        loop, recorder = self._loop, self._recorder
        return Seen(
            has_torch=True,
            has_forward=bool(loop.world.modules),
            has_backward=recorder.is_claimed or (recorder.has_transform and loop.iterations.total > 0),
            num_steps=loop.iterations.total,
            num_skipped=self._failures.num_skipped,
            has_transform=recorder.has_transform,
            unseen=tuple(loop.unseen),
            on=self._on,
        )

    def resume(self) -> None:
        """Put every hook in place and watch. Also after `pause`, with all that is known of the training.

        Nothing happens when the session watches already, or is over; while another one watches, a line says so.
        """
        if self.is_watching or self._is_over:
            return
        if Session.active is not None:
            self.say("another capture watches already, so this one does not")
            return
        if self._paused_at is not None:
            self._loop.skip(clock.perf_counter() - self._paused_at)
            self._paused_at = None
        torch_private.require()
        Session.active = self
        self._hooks.install()
        lacking = torch_private.lacking(self._hooks.lacking)
        if lacking is not None and not self._has_said_lacking:
            self._has_said_lacking = True
            self.say(lacking)
        self._recorder.install()
        self.is_watching = self._recorder.enabled = True

    def pause(self) -> None:
        """Take every hook away and keep what is known of the training; what happens until `resume` is not seen."""
        if not self.is_watching:
            return
        self._do_all(*self._unhooking)
        self._recorder.leave_stack()
        self._paused_at = clock.perf_counter()

    @property
    def _unhooking(self) -> tuple[Callable[[], None], ...]:
        self.is_watching = self._recorder.enabled = False
        if Session.active is self:
            Session.active = None
        return (self._recorder.uninstall, self._loop.leave, self._unhook, self._loop.interrupt)

    def _unhook(self) -> None:
        self._do_all(*self._hooks.removals())

    def leave(self) -> None:
        """Take everything away, whatever breaks on the way; the mode itself leaves torch's stack in ``__exit__``.

        Does it once more if it was interrupted.
        """
        self._is_over = True
        early = (self._early.forget,) if self._early is not None else ()
        self._do_all(*self._unhooking, self._failures.forget, self._loop.forget, *early)

    def stop(self) -> None:
        """Stop the loop, if it is to."""
        if self.stops:
            raise CaptureStop(self)

    @contextlib.contextmanager
    def replaying(self, *, ends: bool = True) -> Iterator[None]:
        """A context in which a step may be replayed: nobody watches meanwhile; the session is over then if it
        ``ends``."""
        self.is_watching, has_grad = False, native.is_grad_enabled()
        generators = all_generators_restored(self._recorder.tape.arguments())
        with self._recorder.paused(), ignored_warnings(), generators:
            try:
                self._recorder.enabled = False
                with played_unseen(), native.own_operators(), native.own_handles():
                    yield
            except SkippedLoss as skipped:
                ends = False
                self._failures.count_skipped(skipped.step)
            finally:
                native.set_grad_enabled(has_grad)
                if ends:
                    self.leave()
                elif not self._is_over:
                    self.is_watching = self._recorder.enabled = True

    def _do_all(self, *parts: Callable[[], None]) -> None:
        """Run every part; an error in one is printed and does not stop the others."""
        for part in parts:
            try:
                part()
            except Exception as error:
                self.complain("an error of its own while ending", error)

    def complain(self, what: str, error: BaseException, then: str = "training goes on") -> None:
        """Say what broke; one line for everything that may come of it. Raises an exception that is the user's."""
        pass_on(error)
        if not self._has_complained:
            self._has_complained = True
            print_line(f"{what} ({type(error).__name__}: {error}); {then}")
            self._print_traceback(error)

    def _print_traceback(self, error: BaseException) -> None:
        if self._verbose:
            with ignored_errors():  # of the exception's own `__str__`
                print_own("".join(format_exception(error)))

    def switch_off(self, error: BaseException) -> None:
        """Fail open: say it once, stop watching, let the training go on.

        Raises an exception that is the user's; what was noted until then is forgotten.
        """
        try:
            pass_on(error)
        except BaseException:
            if self.is_watching:
                try:
                    self._loop.begin_over()
                except Exception:
                    self.leave()
            raise
        if self.is_watching:
            self.complain("switched off after an error of its own", error)
            self.leave()
            with ignored_errors():
                self._loop.ranks.leave()

    def hand_over(self, path: Path) -> None:
        """Call ``on_snapshot``, after which the file may be elsewhere."""
        if self._on_snapshot is not None:
            self._tell("on_snapshot", self._on_snapshot, path, f"the snapshot is `{path}`")

    def _tell(self, option: str, function: Callable[[Any], object], what: object, then: str) -> bool:
        """Call a function of the user's, whose exception is printed; ``False`` if there was one."""
        try:
            with seen():
                function(what)
        except Exception as error:
            pass_on(error)
            print_line(visible_line(f"`{option}` raised {type(error).__name__}: {error}; {then}"))
            self._print_traceback(error)
            return False
        return True

    def step(self) -> None:
        """Mark the end of a step whose update writes into no tensor: ``params = {k: p - lr * g[k] for ...}``.

        Steps of an optimizer, and updates that are written into parameters, need no mark.
        """
        if self._recorder.is_outermost:
            self._recorder.guard(self._loop.finish_marked_step)

    def note(self, **numbers: float) -> None:
        """Add numbers of the loop's own to the timeline, such as ``note(accuracy=0.9)``.

        They belong to the step whose loss was computed last. A tensor of one element is a number too. Raises
        `UsageError` for anything else.
        """
        found = {name: number_of(value) for name, value in numbers.items()}
        odd = next((name for name, value in found.items() if value is None), None)
        if odd is not None:
            raise UsageError(f"`{odd}` cannot be {type(numbers[odd]).__name__}", hint="session.note takes numbers")
        if self.is_watching:
            self._loop.timeline.note({name: value for name, value in found.items() if value is not None})

    @property
    def num_steps(self) -> int:
        """The steps of the training that are over."""
        return self._loop.iterations.completed

    def trained_parameters(self) -> set[str]:
        """The names of all parameters that are to be trained."""
        names = self._parameter_names()
        return {names[id(p)] for p in self._loop.world.parameters if p.requires_grad and id(p) in names}

    def _parameter_names(self) -> dict[int, str]:
        return parameter_names(self._loop.world.modules, sys._getframe().f_back)

    def _hand_over_numbers(self, numbers: StepNumbers, row: RecordedStep) -> None:
        """Call ``on_numbers``; not again after an error."""
        if self._on_numbers is not None:
            with self._recorder.paused():
                if not self._tell("on_numbers", self._on_numbers, flat(numbers, row), "it is not called again"):
                    self._on_numbers = None

    def _warn(self, silence: Silence, frame: FrameType | None, path: Path | None) -> None:
        self.say(escaped_line(silence.event("warning").line()))

    def say(self, text: str) -> None:
        """Print a line, unless all is to be quiet."""
        if not self._quiet:
            print_line(without_code(text) if self.source == "none" else text)


def _abandon_in_child() -> None:
    """A forked process, such as a worker of a data loader, is not the training: nothing is watched in it."""
    session = Session.active
    if session is not None:
        session._recorder.leave_stack()
        session.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_in_child)
