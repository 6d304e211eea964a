"""Handling of a verdict: the step is saved, the session is over, and the loop stops or goes on unwatched.

Also what is only found when the block ends, an exception that ends it included: did it come out of a step, out of which
call, and where was it raised?
"""

from __future__ import annotations

import contextlib
import dis
import math
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from reprokit import members, native, torch_private
from reprokit.capture.calls import Backward, BackwardNote, OptimizerStep, Root, name_of
from reprokit.capture.early_warning import EarlyWarning, EventStep
from reprokit.capture.fidelity import Made, Place, has_origin
from reprokit.capture.judge import Pending
from reprokit.capture.loop import Loop
from reprokit.capture.meeting import Parted, SavedElsewhere
from reprokit.capture.operands import carried_by, operands_at, option_words
from reprokit.capture.replay import Forward
from reprokit.capture.save import (
    Describing,
    NothingFound,
    NotKept,
    Raised,
    SkippedLoss,
    Verdict,
)
from reprokit.capture.tape import Number, Op, Tape
from reprokit.compare.quantity import number_of
from reprokit.errors import chain, has_arrived, ignored_errors, tb_entries
from reprokit.locate.ways import is_bad
from reprokit.program.ir import Phase
from reprokit.program.sites import is_standard, kind_of_file, make_site, relative_path
from reprokit.program.trace import current_mode
from reprokit.progress import Progress
from reprokit.series.course import QUANTITIES
from reprokit.series.events import Silence
from reprokit.series.timeline import parameters_of
from reprokit.snapshot.format import Snapshot
from reprokit.words import listed, user_path

if TYPE_CHECKING:
    from reprokit.capture.session import Session
    from reprokit.capture.silent import Silent


class Failures:
    """Saves a failing step at ``place`` and ends the session.

    ``snapshots`` are the files written and ``results`` their summaries. ``is_deliberate``: the step was saved because
    the script raised an exception of its own, so that nothing but the script says that it failed. The loop has skipped
    ``num_skipped`` steps. ``_kept`` is the step in which the buffers ``_kept_for`` (ids) became nan or inf, while the
    training itself was finite: it is saved if nothing else fails until the block ends.
    """

    def __init__(
        self,
        session: Session,
        loop: Loop,
        place: Place,
        command: Sequence[str],
        on: Collection[str],
        *,
        finds_cause: bool = True,
    ) -> None:
        loop.failures = self
        self.finds_cause = finds_cause
        self.snapshots: list[Path] = []
        self.results: list[dict[str, Any]] = []
        self.num_failed = 0  # of these files, those of steps that failed
        self.is_deliberate = self.is_terminated = False
        self.takes_skipped = "skipped" in on
        self.num_skipped = 0
        self.early: EarlyWarning | None = None
        self.silent: Silent | None = None
        self.session = session
        self._loop = loop
        self._kept: Made | None = None
        self._kept_for: set[int] = set()
        self._reasons: set[str] = set()  # why steps of events were not saved
        self._place = place
        self._command = command
        self._takes_exceptions = "exception" in on

    def forget(self) -> None:
        """Let go of everything that belongs to the user."""
        self._kept, self._kept_for = None, set()

    # -- while the loop runs -------------------------------------------------------------------------------------

    def fail(
        self,
        where: str,
        *,
        op: Op | None = None,
        pending: Pending | None = None,
        is_late: bool = False,
        keep: Op | None = None,
    ) -> None:
        """Save the step and end the session; raises `CaptureStop` unless the loop is to go on.

        ``op`` is a backward call from a bad start, ``pending`` one that was performed.
        """
        try:
            if pending is not None:
                op = self.op_of(pending)
                is_late = is_late or op is None
            path = self.save(Verdict(where, sys._getframe(1), op, is_late, keep=keep))
            self._loop.ranks.leave()
        except Exception as error:
            self.session.switch_off(error)
            return
        if path is not None:
            self.session.stop()

    def op_of(self, pending: Pending) -> Op | None:
        return next((op for op in self._loop.tape.ops() if op.note is pending.note), None)

    def keep_bad_buffer(self) -> None:
        """Keep the step that made a buffer nan or inf."""
        bad = [] if self._kept_for else self._loop.bad_buffers()
        if not bad:
            return
        self._kept_for = {id(buffer) for _, buffer in bad}
        verdict = Verdict("output", sys._getframe(1), is_late=True)
        self.session.say(self._announcement(verdict))
        with self.session.replaying(ends=False):
            try:
                self._kept = self._made(verdict)
            except Exception as error:
                self.session.complain(f"could not keep the step in which `{bad[0][0]}` became nan or inf", error)

    def note_unseen(self, what: str) -> None:
        """Say what the run does that is not known, and keep it for the notes of a snapshot."""
        self._loop.unseen.append(what)
        self.session.say(what)

    def count_skipped(self, step: int) -> None:
        """The loop has skipped a step; say so at the first one."""
        self.num_skipped += 1
        if self.num_skipped == 1:
            what = f"a bad loss was seen at step {step}, and the loop skipped it"
            self.session.say(f"{what}; training goes on (`--on skipped` saves such a step)")

    # -- at the end ----------------------------------------------------------------------------------------------

    def look_back(self, error: BaseException | None) -> Path | None:
        """The block ends: check what has not been checked yet, and what it ended with; the file, if one was written."""
        loop, recorder, judge = self._loop, self._loop.recorder, self._loop.judge
        raised = recorder.raised
        cause = cause_of(error, raised[0] if raised is not None else None)
        entries = tb_entries(cause.__traceback__) if cause is not None else ()
        frames = [entry.tb_frame for entry in entries if kind_of_file(_file_of(entry)) == "user"]
        frame = sys._getframe(2) if cause is None else frames[-1] if frames else None
        with recorder.paused():
            loop.ranks.part()
            is_cut = ends_training(error) and (raised is not None or is_inside_step(loop.tape))  # saved as that
            self.save_asked(is_over=loop.ranks.is_alone and not is_cut)
            if judge.pending is not None and not self.takes_skipped and judge.is_dropped(judge.pending):
                self.count_skipped(judge.pending.step)  # a bad loss whose gradients the loop has dropped is no failure
                loop.tape.drop_gradients()
                judge.pending = None
                loop.flags.forget()
            path = self.early.catch_up(frame) if self.early is not None else None
            if path is not None:
                return path
            bad = loop.check_state()
            if bad is not None:
                return self.save(Verdict(bad, frame, is_late=True))
            path = self._look_at_the_last_step(error, frame)
            if path is not None or self.num_failed:
                return path
            is_buffer_bad = self._kept is not None or bool(loop.bad_buffers())
        if self._takes_exceptions and isinstance(cause, Exception):
            path = self._take_exception(cause, frame)
        if path is None and error is None and self.early is not None:
            self.early.look_for_changes(frame, is_last=True)
        if path is None and error is None and self.silent is not None and recorder.enabled:
            path = self.silent.look(None, frame)
        if path is None and is_buffer_bad:
            path = self.save(Verdict("output", frame, is_late=True))
        bad_forward = loop.forwards.bad
        if path is None and bad_forward is not None and loop.is_forward_only:
            path = self.save(Verdict("output", frame, keep=bad_forward.ops[0]))
        return path

    def _look_at_the_last_step(self, error: BaseException | None, frame: FrameType | None) -> Path | None:
        """The loop has ended over a bad loss or gradient, and may have said so by ``error``; or it never updates."""
        loop, has_raised = self._loop, ends_training(error)
        if not loop.matter or isinstance(error, (KeyboardInterrupt, GeneratorExit)):
            return None
        pending = loop.judge.pending
        if pending is not None:
            loop.timeline.loss = pending.loss
            op = self.op_of(pending)
            return self.save(Verdict("loss", frame, op, op is None), None if loop.ranks.is_alone else has_origin)
        found = bad_value(loop.tape)
        raised = loop.recorder.raised  # an exception of torch is a failure of its own
        is_of_torch = raised is not None and any(one is raised[0] for one in chain(error))
        # of a `NameError` and its like that no ``raise`` has raised no value of a tensor is the reason
        is_mistake = isinstance(error, _MISTAKES) and not _raiser(error)
        if found is not None:
            number, code, instruction = found
            is_loss = (code, instruction) in loop.loss_sites
            is_scalar = any(scalar() is number() for scalar, _, _ in loop.tape.scalars)
            is_given_up = has_raised and not is_of_torch and not is_mistake
            if is_given_up or (is_scalar and (is_loss or not loop.loss_sites)):
                where = "loss" if is_loss or (is_scalar and not loop.loss_sites and not has_raised) else "output"
                note = BackwardNote()  # of the backward call that the loop has not made
                op = Op(Backward, torch.Tensor.backward, (number,), {}, (), code, instruction, current_mode(), note)
                return self.save(Verdict(where, frame, op))
        if loop.has_differentiated and not loop.iterations.total and loop.judge.has_bad_gradient():
            return self.save(Verdict("gradient", frame))
        return None

    def _take_exception(self, error: Exception, frame: FrameType | None) -> Path | None:
        loop, raised = self._loop, self._loop.recorder.raised
        known = next((e for e in chain(error) if raised is not None and e is raised[0]), None)
        if loop.ranks.is_of_peer(error):
            return None
        if has_arrived(error) or (known is None and not is_inside_step(loop.tape)):
            return None
        op = raised[1] if raised is not None and known is not None else loop.raising_step(error)
        if op is not None:
            loop.recorder.raised = (known or error, op)
        with loop.recorder.paused(), native.own_operators():
            described = describe(known or error, op, loop)
        if op is not None:
            loop.tape.add(op.kind, op.target, op.args, op.kwargs, (), (op.code, op.instruction), op.mode, op.note)
        return self.save(Verdict("exception", frame, raised=described))

    def save_asked(self, before: float = math.inf, *, is_over: bool = False) -> None:
        """Save the steps before ``before`` that `--at-step` names; training goes on. If it ``is_over`` also the step
        without an update, and, of a run without backward calls, calls of root modules."""
        loop, session = self._loop, self.session
        known = {mark.step for mark in loop.tape.marks}
        for step in sorted(step for step in loop.asked if step < before):
            loop.asked.discard(step)
            forward = loop.forwards.asked.get(step) if is_over and loop.is_forward_only else None
            is_new = step not in known and step >= loop.iterations.completed
            is_last = is_over and is_new and step == loop.iterations.completed
            has_begun = forward is not None or (is_last and loop.has_differentiated)  # and did not come to its end
            if is_new and not has_begun:
                session.say(f"step {step} of `--at-step` is not saved: the training ended before it was over")
                continue
            verdict = Verdict.asked(sys._getframe(2), loop.ranks.together())
            with session.replaying(ends=False):
                try:
                    describing = Describing(loop, verdict, self._command)
                    made = describing.unfinished(step, forward) if has_begun else describing.asked(step)
                    path = self._write(made, is_asked=True)
                except NotKept as reason:
                    session.say(f"step {step} was not saved: {reason}")
                    continue
                except Exception as error:
                    session.complain(f"could not save step {step}", error)
                    continue
            session.hand_over(path)

    def end_here(self) -> None:
        """Stop the loop after the last step that `--at-step` names; raises `CaptureStop`."""
        self.save_asked(self._loop.iterations.completed)
        self.session.leave()
        self.session.stops = True
        self.session.stop()

    # -- saving --------------------------------------------------------------------------------------------------

    def _made(self, verdict: Verdict) -> Made:
        """The failing step; the step that made a buffer nan or inf before, if the failure comes from that buffer."""
        loop = self._loop
        if verdict.where == "output" and verdict.op is None and self._kept is not None:
            return self._kept
        if verdict.alarm is not None:
            return EventStep(loop, verdict, self._command).snapshot()
        describing = Describing(loop, verdict, self._command)
        forward = self._forward_of(verdict)
        if forward is not None:
            made = describing.unfinished(0, forward)
            return replace(made, snapshot=replace(made.snapshot, cause=describing.cause(made)))
        if verdict.difference is not None:
            return loop.ranks.difference_made(describing)
        made = describing.snapshot()
        if self._kept is not None and id(made.culprit) in self._kept_for:
            return self._kept
        if made.snapshot.failure.is_given and loop.ranks.is_alone:
            with contextlib.suppress(NotKept):  # the user's code may not run again with the state of then
                return EventStep(loop, verdict, self._command).beside_healthy(made)
        return made

    def locating(self) -> Progress:
        """Prints how far locating the origin has come, if that takes long."""
        return Progress(self.session.say, "locating")

    def _forward_of(self, verdict: Verdict) -> Forward | None:
        """The forward pass that a verdict is about, in a run without a backward call."""
        bad = self._loop.forwards.bad
        return bad if bad is not None and verdict.keep is bad.ops[0] else None

    def _announcement(self, verdict: Verdict) -> str:
        """The line before the replay, which may take long: the failure and its step."""
        loop, op, alarm = self._loop, verdict.op, verdict.alarm
        forward = self._forward_of(verdict)
        if forward is not None:
            return f"an output is nan or inf in forward pass {forward.number}; replaying it"
        if isinstance(alarm, Silence):
            return f"something is not learned; saving step {alarm.step}"
        if alarm is not None:
            return f"the {QUANTITIES[alarm.kind]} left its course at step {alarm.step}; going back to it"
        if verdict.difference is not None:
            step = verdict.difference.began_at
            return f"parameters differ between ranks after step {step}; going back to find the first such step"
        starts = (op.note.losses or [loop.tape.alive().get(number) for number in op.ins]) if op is not None else []
        start = number_of(starts[0]) if len(starts) == 1 else None
        pending, step = loop.judge.pending, loop.running()[0]
        if pending is not None and op is not None and op.note is pending.note:
            step = pending.step
        named = ("buffer" if op is None else "value") if verdict.where == "output" else verdict.where
        what = f"a {named} is nan or inf"
        if verdict.raised is not None:
            what = f"{verdict.raised.type} was raised"
        elif start is not None:
            what = f"{'the loss' if verdict.where == 'loss' else 'a value'} is {start}"
        doing = "going back to find the step that made it" if verdict.is_late else "replaying the step"
        return f"{what} at step {step}; {doing}"

    def save(self, verdict: Verdict, is_wanted: Callable[[Snapshot], bool] | None = None) -> Path | None:
        """Write a snapshot of the failing step, if it ``is_wanted``; the session is over then, unless it turns out
        that the loop has skipped the step."""
        self.save_asked(self._loop.iterations.completed)
        session, is_event = self.session, verdict.alarm is not None
        path = self.early.instead_of(verdict) if self.early is not None and not is_event else None
        if path is not None:
            return path
        with self.until_saved():
            with session.replaying(ends=verdict.alarm is None and verdict.together is None):
                try:
                    session.say(self._announcement(verdict))
                    made = self._made(verdict)
                    if is_wanted is not None and not is_wanted(made.snapshot):
                        return None
                    path = self._write(made)
                except (SkippedLoss, Parted, NothingFound, SavedElsewhere):
                    raise
                except NotKept as reason:
                    if str(reason) not in self._reasons:  # every later event has the same one
                        self._reasons.add(str(reason))
                        session.say(f"the step was not saved: {reason}")
                    return None
                except Exception as error:
                    session.complain("could not save the failing step", error)
                    return None
                is_exception = verdict.raised is not None and made.snapshot.observed_at == "exception"
                self.is_deliberate = is_exception and verdict.raised.is_deliberate  # type: ignore[union-attr]
                self.num_failed += 1
            if path is not None:  # `SkippedLoss` ends the context, and not the session
                session.leave()
                session.hand_over(path)
        return path

    def _write(self, made: Made, *, is_asked: bool = False) -> Path:
        path, snapshot = self._place.write(made, is_asked=is_asked, progress=self.locating())
        self.snapshots.append(path)
        self.results.append({**snapshot.summary(), "path": str(path)})
        return path

    @contextlib.contextmanager
    def until_saved(self) -> Iterator[None]:
        """Defer the first SIGTERM until the block ends: a launcher sends it to all ranks once one has ended, also to
        one that saves its step. It ends the process then, unless a saved step stops the loop. A handler of the script's
        own is left alone."""
        arrived: list[int] = []

        def defer(number: int, frame: FrameType | None) -> None:
            arrived.append(number)
            signal.signal(number, signal.SIG_DFL)
            self.is_terminated = True
            self._loop.ranks.hurry()

        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, defer)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) is defer:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if arrived and not (self.num_failed and self.session.stops):
                signal.raise_signal(signal.SIGTERM)


# -- exceptions ----------------------------------------------------------------------------------------------------


def ends_training(error: BaseException | None) -> bool:
    """True if an exception is an error, not the normal end of a script or a wish of the user."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return isinstance(error, Exception)


def cause_of(error: BaseException | None, last: BaseException | None) -> BaseException | None:
    """The exception that ended the script: behind an exit with an error the exception that it handled, or
    else the ``last`` one raised in a step that has not been completed since."""
    if not isinstance(error, SystemExit) or not ends_training(error):
        return error
    causes = [*chain(error), last]
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        return error
    return next((cause for cause in causes if isinstance(cause, Exception)), error)


def describe(error: BaseException, op: Op | None, loop: Loop) -> Raised:
    """The facts about an exception of the loop; ``op`` is the call that raised it, if that was on the tape."""
    roots = loop.world.modules
    entries = list(tb_entries(error.__traceback__))
    kinds = [kind_of_file(_file_of(entry)) for entry in entries]
    own = [n for n, kind in enumerate(kinds) if kind == "user"]
    library = [n for n, kind in enumerate(kinds) if kind == "library" and not is_standard(_file_of(entries[n]))]
    checks = [len(entries) - 1] if kind_of_file(_raiser(error)) == "torch" else []  # of a module of torch itself
    place, inside, line = (entries[own[-1]] if own else None), max([-1, *library, *checks]), None
    if own and inside > own[-1]:
        line = relative_path(_file_of(entries[inside])), entries[inside].tb_lineno or 0
    site = make_site(place.tb_frame.f_code, place.tb_lasti, line) if place is not None else None
    phases = {Backward: Phase.BACKWARD, OptimizerStep: Phase.OPTIMIZER}
    phase = phases.get(op.kind, Phase.FORWARD) if op is not None else Phase.FORWARD
    is_deliberate = all(file and kind_of_file(file) == "user" for file in map(_raiser, chain(error)))
    causes = tuple((type(cause).__name__, str(cause)) for cause in chain(error))
    calls = [n for n, entry in enumerate(entries) if entry.tb_frame.f_code is torch_private.call_impl_code]
    called = entries[calls[-1]].tb_frame.f_locals.get("self") if calls else None
    paths = (user_path(path) for root in roots for path, part in members.named_modules(root) if part is called)
    module = next((path for path in paths if path), f"<{type(called).__name__}>") if called is not None else None
    facts: list[str] = []
    if place is not None and not is_deliberate:
        with ignored_errors():  # objects of the user's
            named = [pair for root in roots for pair in members.named_parameters(root)]
            notes = {id(p): f"the parameter `{user_path(n)}`" for n, p in named}

            notes |= _inference_notes(loop)
            of_loop = [n for n in own if n < min(calls, default=0)]
            for n in dict.fromkeys([max([own[-1], *library]), *of_loop[-1:]]):
                told = operands_at(entries[n].tb_frame, entries[n].tb_lasti, notes)
                told = [words for words in told if words not in "".join(facts)]
                where = f"{relative_path(_file_of(entries[n]))}:{entries[n].tb_lineno}"
                facts += [f"at {where} {', '.join(told)}"] if told else []
            if phase is Phase.BACKWARD:
                facts = list(carried_by(roots)) if "a second time" in str(error) else []
            if op is not None and op.kind is OptimizerStep:
                facts += _optimizer_facts(op, loop.tape, [entries[n].tb_frame for n in own])
    return Raised(*causes[0], site, module, phase, op is not None, is_deliberate, causes, tuple(facts))


def _inference_notes(loop: Loop) -> dict[int, str]:
    """The calls that made the tensors of inference mode, also views of them made later, by the ``id`` of the tensor."""
    made, alive = dict[Number, str](), loop.tape.alive()
    steps = [*((one.mark.step, one.ops) for one in loop.tape.segments()), (loop.running()[0], loop.tape.running())]
    for step, op in ((step, op) for step, ops in steps for op in ops):
        words = next((made[number] for number in op.ins if number in made), "")
        if op.mode.inference and op.code is not None:
            name, place = name_of(op) or type(op.target).__name__, make_site(op.code, op.instruction).place
            words = f"made in inference mode by `{name.removeprefix('torch.')}` ({place}) in step {step}"
        made |= dict.fromkeys(op.outs, words) if words else {}
    return {id(alive[n]): words for n, words in made.items() if n in alive and native.is_inference(alive[n])}


def _optimizer_facts(op: Op, tape: Tape, frames: Sequence[FrameType]) -> list[str]:
    """The options of an optimizer that changed their type; gradients that are all zero, and variables that are too."""
    before = next((one for one in reversed(tape.ops()) if one.target is op.target), op)
    facts = list(option_words(op.note.options, before.note.options, frames[-1].f_code.co_filename))
    known = [p.grad for p in parameters_of(op.target) if p.grad is not None]
    if any(
        bool(native.any(torch_private.sparse_values(part)) if part.is_sparse else native.any(part)) for part in known
    ):
        return facts
    items = [item for frame in frames for item in frame.f_locals.items() if type(item[1]) is torch.Tensor]
    zeros = [
        f"`{name}`"
        for name, value in items
        if native.is_floating_point(value) and native.dim(value) and not native.any(value)
    ]
    return [*facts, f"every gradient of the optimizer is zero{f', and so is {listed(zeros)}' if zeros else ''}"]


def _file_of(entry: TracebackType) -> str:
    return entry.tb_frame.f_code.co_filename


def is_inside_step(tape: Tape) -> bool:
    """True if the loop has begun to build a graph, so that a step is under way."""
    alive = tape.alive()
    made = (alive[number] for op in tape.running() for number in op.outs if number in alive)
    return any(tensor.requires_grad for tensor in made) or any(
        op.kind in (Root, Backward, OptimizerStep) and op.mode.grad for op in tape.running()
    )


def bad_value(tape: Tape) -> tuple[Number, Any, int] | None:
    """The last bad scalar that the loop computed with gradients in this step, and where."""
    running = tape.running()
    for scalar, code, instruction in reversed(tape.scalars):
        tensor = scalar()
        number = None if tensor is None else tape.known(tensor)
        if tensor is not None and number is not None and is_bad(native.detach(tensor)):
            made = next((n for n, op in enumerate(running) if number in op.outs), len(running))
            is_passed = any(op.kind is Root and op.mode.grad for op in running[made + 1 :])  # the loop went on
            return None if is_passed else (number, code, instruction)
    return None


def _raiser(error: BaseException) -> str:
    """The file of the ``raise`` or ``assert`` that has raised an exception; empty if none has."""
    entries = list(tb_entries(error.__traceback__))
    if not entries:
        return ""
    code = entries[-1].tb_frame.f_code
    has_raised = code.co_code[entries[-1].tb_lasti] == _RAISE
    return code.co_filename if has_raised else ""


_RAISE = dis.opmap["RAISE_VARARGS"]  # the instruction of ``raise`` and of a failed ``assert``
_MISTAKES = (NameError, AttributeError, ImportError, LookupError, TypeError)
