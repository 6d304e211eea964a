"""From a verdict to a snapshot: choose the step and where it begins, replay it, locate the origin, put all together.

A step begins *now* (the live parameters, buffers as they were) or *then* (a copy of the state, and the steps since).
What is simpler is tried first; whether it is what training did is seen by its losses, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointError

from reprokit import members, native, torch_private
from reprokit.capture.attributes import attributes_kept
from reprokit.capture.calls import Backward, OptimizerStep, Root, ZeroGrad, name_of, starts_of
from reprokit.capture.experiments import Experiments, rewritten_inputs
from reprokit.capture.fidelity import Made, by_itself, compiled_mismatch, placed
from reprokit.capture.meeting import DONE, Meeting, Parted, Stopped
from reprokit.capture.meters import Meter, layers_of
from reprokit.capture.recomputed import Recomputations
from reprokit.capture.replay import (
    BEGUN_BEFORE,
    Case,
    Finder,
    Forward,
    Gradients,
    Replay,
    TracedPlayer,
    graphs_in,
    in_silence,
    leaves_in,
    needed_ops,
    put_first_back,
    quiet_hooks,
    split,
)
from reprokit.capture.roots import unwrapped
from reprokit.capture.samples import SampleWatch
from reprokit.capture.structure import is_leaf
from reprokit.capture.tape import Mark, Number, Op, Segment, makers_of
from reprokit.capture.tensor_names import Names, names_of, root_names
from reprokit.capture.world import (
    DEFAULT_STATE_BYTES,
    CannotGoBack,
    give_gradients,
    options_of,
    owned_by,
    set_python_generators,
)
from reprokit.compare.quantity import number_of
from reprokit.errors import attempt, ignored_errors, pass_on
from reprokit.limits import CpuLimit
from reprokit.locate.blame import last_bad, locate
from reprokit.locate.failure import Failure, RankDifference, kind_of
from reprokit.locate.kinds import EXCEPTION, HEALTHY
from reprokit.locate.samples import Samples, with_samples
from reprokit.locate.ways import NAN, local_part, ways_of
from reprokit.own_work import ignored_warnings
from reprokit.program.code_lines import digests_of_run
from reprokit.program.dataflow import same_bits
from reprokit.program.functions import hidden_writes
from reprokit.program.interpreter import matmul_precision
from reprokit.program.ir import AUTOGRAD_BACKWARD, BACKWARD, Phase, Program, Ref, Site, iter_refs
from reprokit.program.trace import InputName
from reprokit.rules.match import diagnose
from reprokit.series.cause import Cause
from reprokit.series.course import Alarm
from reprokit.series.decide import decided, may_tell_more
from reprokit.series.events import Silence
from reprokit.series.story import LayerNumbers
from reprokit.series.timeline import parameters_of
from reprokit.snapshot.environment import collect_environment
from reprokit.snapshot.format import CaptureSettings, OptimizerGroup, Snapshot, StateBefore, is_state_value, storable
from reprokit.snapshot.rng import generators_restored
from reprokit.snapshot.source import describe_source
from reprokit.words import in_root

if TYPE_CHECKING:
    from reprokit.capture.loop import Loop

NOT_KEPT = "the state from before the step was not kept, so there was no going back"
NOT_KEPT_FOR_CAUSE = "the steps before were not kept"
NOT_ALL = "gradients are averaged over processes, and not all of them went back together"
HAS_GAP = "the loop went on in this step after an exception, and what the interrupted call wrote is not known"
NOT_SHOWN = "replaying the steps since the last copy did not show which one made the state nan or inf"
OTHER_GRADIENTS = "gradients differ between training and the replay, where no hook changes them"
MODULES_SPREAD = "the state of the model: it is spread over the ranks"
OPTIMIZERS_SPREAD = "the state of the optimizers: it is spread over the ranks"
NOT_AGAIN = "the failure did not occur again when the step was replayed"
NO_CHECKPOINT = "a checkpoint is recorded as plain calls, so running the file does not raise the exception"
NOT_OF_TORCH = "the recorded calls alone do not raise the exception, so running the file does not"
_STORY_SECONDS = 20.0  # of CPU time, to measure the steps; a longer wait for a snapshot is not worth a story
_MOST_JOINED = 64  # steps: a program of more takes too long to be reduced
_LOOKS_BACK = 8  # calls: a check such as `not torch.isfinite(x).all()`, and what the code around it computes
_PHASES = {"gradient": Phase.BACKWARD, "parameter": Phase.OPTIMIZER}


class SkippedLoss(Exception):
    """The loop has made no bad update of a bad loss that was noticed late; ``step`` is the step of that loss."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the loop skipped step {step}")
        self.step = step


class NotKept(Exception):
    """A step cannot be played any more; the message says why."""


class NothingFound(Exception):
    """Going back together has shown no bad step; the message says why."""


@dataclass(frozen=True)
class Raised:
    """An exception that ended a step."""

    type: str
    message: str
    site: Site | None
    module: str | None
    phase: Phase  # where it came out
    is_call: bool  # it came out of something on the tape
    is_deliberate: bool  # a ``raise`` or ``assert`` of the user's code made it
    causes: tuple[tuple[str, str], ...] = ()  # types and messages, also of those it came from
    facts: tuple[str, ...] = ()  # the operands of the expression that raised, in words

    def alike(self, kind: str, message: str) -> tuple[str, str] | None:
        """Type and message in training of an exception in a replay, where versions may be others; ``None`` for another
        one."""
        same = (kind, _constant(message))
        return next(((name, text) for name, text in self.causes if (name, _constant(text)) == same), None)


def _constant(message: str) -> str:
    """A message without the numbers that change from run to run: versions, addresses, amounts of memory."""
    return re.sub(r"version \d+|0x[0-9a-f]+|[\d.]+ (bytes|[KMGT]iB)", "*", message)


@dataclass(frozen=True)
class Verdict:
    """What failed: the kind of tensor it was seen ``where``, or the exception.

    An ``output`` with a backward call is the start of that: the loop gave up over a value that may be no loss.
    """

    where: str
    frame: FrameType | None  # of the loop
    op: Op | None = None  # the backward call from a bad start, which may have been performed
    is_late: bool = False  # it has happened some steps ago
    raised: Raised | None = None
    alarm: Alarm | Silence | None = None  # numbers of the run have left their course
    together: Meeting | None = None  # all ranks go back
    difference: RankDifference | None = None  # this parameter differs between ranks
    keep: Op | None = None  # a call that gave bad gradients
    is_asked: bool = False  # `--at-step` names the step, and nothing has failed

    @classmethod
    def asked(cls, frame: FrameType, together: Meeting | None = None) -> Verdict:
        """That a healthy step is to be saved."""
        return cls("", frame, together=together, is_asked=True)


HEALTHY_STEP = Failure(Phase.FORWARD, HEALTHY)


class Describing:
    """Finds the step of a verdict and describes it."""

    def __init__(self, loop: Loop, verdict: Verdict, command: Sequence[str]) -> None:
        self.loop = loop
        self.verdict = verdict
        self._command = list(command)

    def snapshot(self) -> Made:
        """The snapshot of the step, with the story of the layers where the steps before can be played."""
        made = self.made()
        with ignored_errors():  # the user's code may not run again with the state of then; the step is worth a file
            made = replace(made, snapshot=replace(made.snapshot, layers=self.layers(made.snapshot) or None))
        made = replace(made, snapshot=replace(made.snapshot, cause=self.cause(made)))
        with ignored_errors():
            made = replace(made, snapshot=replace(made.snapshot, cause=self._with_rewritten(made.snapshot)))
        return made

    def cause(self, made: Made) -> Cause | None:
        """What has led to the failure: an experiment shows it, or a rule about the call whose fix helps."""
        found: Cause | None = None
        if self.loop.failures.finds_cause and self.loop.ranks.is_alone:
            segments = self._kept_steps(made.snapshot)
            if segments:
                with ignored_errors():
                    given = made.snapshot, self.verdict.frame, self.verdict.raised
                    found = Experiments(self.loop, segments, *given).run()
            elif self._lacks_steps(made.snapshot):
                found = Cause("unknown", "", why_not=f"no experiment was made, because {NOT_KEPT_FOR_CAUSE}")
            if (may_tell_more(found) or self.verdict.raised is not None) and made.snapshot.fidelity != "unfaithful":
                with ignored_errors():
                    found = _found_by_rule(made, found)
            with ignored_errors():
                found = self._recomputed(found, segments)
        return _with_operands(found, self.verdict.raised, made.snapshot.failure)

    def _lacks_steps(self, snapshot: Snapshot) -> bool:
        """True if experiments would need steps before the failing one that were not kept. In a first step, and in one
        of another kind of failure, none is ever made."""
        began = snapshot.settings.began_at or 0
        return snapshot.failure.kind.has_cause and snapshot.step > began

    def _recomputed(self, cause: Cause | None, segments: list[Segment]) -> Cause | None:
        """The cause, behind what a checkpoint has recomputed in another way, where that has raised the exception."""
        raised, world, seen = self.verdict.raised, self.loop.world, Recomputations()
        if raised is None or raised.type != CheckpointError.__name__ or not segments:
            return cause
        replay = Replay(world, self.loop.tape, segments, world.copies[0])
        with replay.going_back(), in_silence(), seen.watching(), contextlib.suppress(CheckpointError):
            replay.play()
        known, says = cause or Cause("unknown", ""), f"A checkpoint does not repeat its forward pass: {seen.found}."
        if not seen.found:
            return cause
        kind = "state" if known.kind == "unknown" else known.kind
        return replace(known, kind=kind, text=f"{says} {known.text}".strip(), evidence=(seen.found, *known.evidence))

    def _kept_steps(self, snapshot: Snapshot) -> list[Segment]:
        """The steps to play again with one thing changed, up to the failure; none where that is not possible."""
        loop, world, alarm, last = self.loop, self.loop.world, self.verdict.alarm, snapshot.step
        raised, raising, is_told = self.verdict.raised, loop.recorder.raised, snapshot.failure.kind.has_cause
        if not (is_told and world.is_complete and world.copies):
            return []
        if isinstance(alarm, Alarm):  # later steps have shown the event
            last = alarm.values[-1].step
        segments = [*loop.tape.segments(), self._steps()[-1]]
        if raised is not None and raising is not None:
            segments[-1].ops.append(raising[1])
        return [segment for segment in segments if segment.ops and segment.mark.step <= last]

    def _with_rewritten(self, snapshot: Snapshot) -> Cause | None:
        """The cause, with the inputs of the step that something else has written since."""
        step = next((one for one in self._steps() if one.mark.step == snapshot.step), None)
        if step is None or not self.loop.failures.finds_cause:
            return snapshot.cause
        found = [*rewritten_inputs(self.loop, step, self.verdict.frame)]
        known = snapshot.cause or Cause("unknown", "")
        text = " ".join(filter(None, [known.text, *(f"{one}." for one in found)]))
        return replace(known, text=text, evidence=(*known.evidence, *found)) if found else snapshot.cause

    def made(self) -> Made:
        """The first bad step: in the past if the state is bad, else the one that is running."""
        loop, verdict, world = self.loop, self.verdict, self.loop.world
        segments, pending = self._steps(), verdict.op
        ops = segments[-1].ops
        is_here = pending is not None and bool(ops) and ops[-1].note is pending.note
        ops = ops[:-1] if is_here else ops
        if loop.ranks.is_sharded or loop.ranks.is_apart:
            return loop.ranks.made(self, ops, pending)
        notes, raised = list(dict.fromkeys(loop.unseen)), loop.recorder.raised
        own = raised[1].note if verdict.raised is not None and raised is not None else self
        if any(gap is None or gap.note is not own for gap in loop.recorder.gaps):  # handled, and may have ended a write
            notes.append(HAS_GAP)
            world.interrupt()
        if not loop.is_noted:
            notes.append(loop.budget.why_not(loop.iterations.completed))
        is_past = verdict.is_late or loop.has_bad_loss_before() or (pending is not None and not is_here)
        is_past = is_past or any(op.kind.writes_state(op) for op in split(ops)[1])
        if is_past or (verdict.raised is None and world.newly_bad() is not None):
            buffers = world.newly_bad_buffers() if verdict.where == "output" else []
            made, reasons = self.from_the_past([buffer for _, buffer in buffers])
            if made is not None:
                return made
            if verdict.together is not None:
                raise NothingFound("; ".join(dict.fromkeys(reasons)))
            notes += [reason for reason in reasons if not any(note.startswith(reason) for note in notes)]
        case = self.now(ops, pending, notes)
        try:
            made = self._of_now(case, segments)
        except CannotGoBack as reason:  # what is known of the step is worth a file
            return Made(self.without_replay(replace(case, notes=[*notes, str(reason)])))
        if loop.is_noted and made.culprit is not None and world.has_worsened(made.culprit):
            return self.from_the_past([made.culprit])[0] or made
        return made

    def asked(self, step: int) -> Made:
        """A healthy step, with the updates of all its optimizers. Raises `NotKept`."""
        segments = [segment for segment in self.segments() if segment.mark.step <= step]
        first = next((n for n, segment in enumerate(segments) if segment.mark.step == step), None)
        if first is None:
            raise NotKept(NOT_KEPT)
        ranks, together = self.loop.ranks, self.verdict.together
        if not ranks.is_alone and together is None:
            raise NotKept(NOT_ALL)
        with self.kept():
            if together is not None and not ranks.is_sharded:  # gradients are averaged, and noted
                replay = self.replay(segments)
                with replay.going_back():
                    replay.play()
                    together.stop(DONE)
                self.verdict = replace(self.verdict, together=None)
            with self.healthy(segments, first) as case:
                return ranks.recorded_by_all(self, case) if ranks.is_sharded else self.make(case)

    def recorded(self) -> tuple[TracedPlayer, list[Op]]:
        """The last step that is over as a program, and its calls. Raises `NotKept`."""
        with self.kept() as segments:
            copy = -1 if self.segments() else 0  # a copy may have been taken right after it
            segments = self.segments() or segments
            if not segments:
                raise NotKept(NOT_KEPT)
            with self.healthy(segments, len(segments) - 1, copy) as case:
                return self.replayed(case), case.ops

    def unfinished(self, step: int, forward: Forward | None = None) -> Made:
        """The running step as far as it has come, or a forward pass of a run without a backward call.

        It is healthy if it was asked for.
        """
        if forward is None:
            forward = Forward(step, self.loop.tape.running())
        case = self.now(forward.ops, None, [])
        case.mark.step = forward.number
        found = HEALTHY_STEP if self.verdict.is_asked else None
        return self.make(replace(case, contents=forward.given, found=found))

    def now(self, ops: list[Op], pending: Op | None, notes: list[str]) -> Case:
        """The running step, from the state of now."""
        verdict, mark = self.verdict, self._running_mark(pending)
        raising = self.loop.recorder.raised[1].note if verdict.raised and self.loop.recorder.raised else None
        is_over = [op.kind is OptimizerStep and op.note is not raising for op in ops]
        ops = [op for op, over in zip(ops, is_over, strict=True) if not (op.kind.writes_state(op) or over)]
        return Case(verdict.where, ops, pending, mark, True, verdict.frame, {}, verdict.raised, verdict.keep, notes)

    def _of_now(self, case: Case, segments: list[Segment]) -> Made:
        """The running step, the last of ``segments``: with those that it goes on with, else from the state of now."""
        is_unknown = not self.loop.is_noted and case.where == "loss"  # then the first bad module is all that is known
        for place, op in enumerate(case.ops if is_unknown else ()):
            if op.kind is Root:
                made = self.make(replace(case, where="output", ops=case.ops[: place + 1], pending=None, keep=op))
                if made.is_shown:
                    return made
        joined = self._joined(case, segments) if not case.notes else None
        made = joined if joined is not None and joined.is_exact else _better(self.make(case), joined)
        note = made.snapshot.fidelity_note or ""
        if not made.is_exact and BEGUN_BEFORE not in note and self._reached(case, segments)[1]:
            note = "; ".join(filter(None, [BEGUN_BEFORE, note]))
            return replace(made, snapshot=replace(made.snapshot, fidelity_note=note))
        return made

    def _steps(self) -> list[Segment]:
        """The steps since the last copy; of the one that is running the calls that lead to the failure, the last one a
        backward call that is not to be performed, unless an earlier step of another optimizer has made that."""
        running, pending, tape = self.loop.tape.running(), self.verdict.op, self.loop.tape
        if pending is not None:
            place = next((number for number, op in enumerate(running) if op.note is pending.note), None)
            is_new = place is None and not any(op.note is pending.note for op in tape.ops())
            running = [*running[:place], pending] if place is not None or is_new else running
        return [*self.segments(), Segment(running, self._running_mark(pending))]

    def _running_mark(self, pending: Op | None) -> Mark:
        """The mark of the running step, up to a backward call that is pending since."""
        mark, found = self.loop.mark(), self.loop.judge.pending
        if found is not None and pending is not None and found.note is pending.note:
            mark.micro_step, mark.step, mark.loss = found.micro_step, found.step, found.loss
        return mark

    def segments(self) -> list[Segment]:
        """The steps since the last copy that are over."""
        world = self.loop.world
        return self.loop.tape.segments()[world.copies[-1].num_marks if world.copies else 0 :]

    def from_the_past(self, ruined: Sequence[torch.Tensor] = ()) -> tuple[Made | None, list[str]]:
        """The snapshot of the first bad step, or why there is none: of the one that made one of the ``ruined`` parts of
        the state nan or inf, else the first one with a bad loss, gradient or parameter."""
        loop, world, verdict = self.loop, self.loop.world, self.verdict
        if not world.is_complete or not world.copies:
            return None, [NOT_KEPT]
        if not loop.ranks.is_alone and verdict.together is None:
            return None, [NOT_ALL]
        segments = self._steps()
        if loop.ranks.is_sharded:
            return loop.ranks.from_the_past(self, segments)
        made, reasons = self.played(segments, ruined)
        culprit = made.culprit if made is not None and loop.ranks.is_alone and not ruined else None
        if culprit is not None and world.has_worsened(culprit):
            return self.from_the_past([culprit])[0] or made, []
        return made, reasons

    def replay(self, segments: Sequence[Segment], copy: int = -1, limit: CpuLimit | None = None) -> Replay:
        """Plays some steps since a copy, together with the other ranks if these go back as well."""
        world = self.loop.world
        together = self.verdict.together
        return Replay(world, self.loop.tape, segments, world.copies[copy], together=together, limit=limit)

    def played(self, segments: Sequence[Segment], ruined: Sequence[torch.Tensor]) -> tuple[Made | None, list[str]]:
        """The snapshot of the first bad one of some steps, or why there is none."""
        loop, verdict, replay = self.loop, self.verdict, self.replay(segments)
        finder = Finder(replay, ruined, takes_skipped=loop.failures.takes_skipped, expected=verdict.op)
        try:
            with replay.going_back():
                case = replay.find(finder)
                if case is None:
                    is_loss = verdict.where == "loss" and verdict.is_late and verdict.together is None
                    if is_loss and finder.skipped and not replay.notes:
                        raise SkippedLoss(finder.skipped[0])
                    return None, [*replay.notes, NOT_SHOWN if verdict.raised is None else NOT_AGAIN]
                case.frame = verdict.frame
                made = loop.ranks.update_made(self, case) if loop.ranks.is_sharded else self.make(case)
                if made.culprit is None and not made.is_shown:
                    made = replace(made, culprit=loop.world.newly_bad())
        except (SkippedLoss, Parted):
            raise
        except Exception as error:
            return None, [why_not_played(error)]
        if made.culprit is None and not made.is_exact and loop.ranks.is_alone:
            last = replay.segments[case.number]
            written = [op for op in split(last.ops)[0] if op.kind.writes_state(op) and case.keep is None]
            joined = [*segments[: case.number], Segment([*written, *case.all_ops], last.mark)]
            made = _better(made, self._joined(case, joined))
        return made, []

    @contextlib.contextmanager
    def kept(self) -> Iterator[list[Segment]]:
        """The steps since the first copy that is kept. Raises `NotKept` where they cannot be played."""
        world = self.loop.world
        if not world.is_complete or not world.copies:
            raise NotKept(NOT_KEPT)
        try:
            yield self.loop.tape.segments()
        except (CannotGoBack, Parted, Stopped) as reason:
            raise NotKept(str(reason)) from reason

    @contextlib.contextmanager
    def begun(self, segments: Sequence[Segment], first: int, copy: int = -1) -> Iterator[Case]:
        """The steps from the ``first`` on, as one; the live state is where that began."""
        replay = self.replay(segments, copy)
        with replay.going_back():
            case = replay.begin(first)
            for segment in replay.segments[first + 1 :]:
                generators = segment.mark.generators  # those that the step began with: its first root gets them
                for op in segment.ops:
                    if generators is not None and op.kind is Root:
                        op, generators = op._replace(note=replace(op.note, generators=generators)), None
                    case.ops.append(op)
            case.mark, case.frame = replace(segments[-1].mark, generators=case.mark.generators), self.verdict.frame
            yield case

    @contextlib.contextmanager
    def healthy(self, segments: Sequence[Segment], first: int, copy: int = -1) -> Iterator[Case]:
        """As `begun`, for steps in which nothing has failed."""
        with self.begun(segments, first, copy) as case:
            case.mark.micro_step = 0
            yield replace(case, found=HEALTHY_STEP)

    def _joined(self, case: Case, segments: list[Segment]) -> Made | None:
        """The step of ``case``, the last of ``segments``, with those before that it goes on with; ``None`` if there are
        none, or that does not show the failure."""
        first, step = self._reached(case, segments)[0], segments[-1].mark.step
        made_by = [n for n, segment in enumerate(segments) if any(op.kind is Backward for op in segment.ops)]
        if case.where == "gradient" and made_by and made_by[-1] < len(segments) - 1:
            step, first = segments[made_by[-1]].mark.step, min(made_by[-1], first)
        world, length = self.loop.world, len(segments) - first
        is_update = case.raised is not None and case.raised.phase is Phase.OPTIMIZER  # which has ended in the middle
        if not 1 - is_update < length <= _MOST_JOINED or not (
            world.is_complete and world.copies and self.loop.ranks.is_alone
        ):
            return None
        try:
            with self.begun(segments, first) as begun:
                ops = begun.ops[:-1] if case.pending is not None else begun.ops
                mark = replace(case.mark, step=step, generators=begun.mark.generators)
                made = self.make(
                    replace(case, ops=ops, is_now=False, contents=begun.contents, mark=mark, notes=begun.notes)
                )
        except Exception as error:  # of the user's code, or because the state of then does not suit
            pass_on(error)
            return None
        return replace(made, culprit=None) if made.is_exact or made.is_shown else None

    def _reached(self, case: Case, segments: Sequence[Segment]) -> tuple[int, bool]:
        """The position of the first of ``segments`` whose graphs the last one goes on with, if what these graphs read
        was updated since: else they are made again from the state of now. True if one is from before them all."""
        tape, alive, last = self.loop.tape, self.loop.tape.alive(), len(segments) - 1
        ops = segments[-1].ops
        needed_by = needed_ops(ops, case.keep or (ops[-1] if case.raised is not None else None))
        needed = graphs_in(needed_by, tape, {**alive, **_values(case.contents)})
        earlier = [op for segment in segments[:-1] for op in segment.ops]
        is_from_before = not needed <= {number for op in earlier for number in op.outs}
        makers = {id(op): op for op in makers_of(needed, earlier)}
        first = next((n for n in range(last) if any(id(op) in makers for op in segments[n].ops)), last)
        updated: set[int] = set()
        for op in (op for segment in segments[first:-1] for op in segment.ops):
            if op.kind is OptimizerStep:
                updated.update(map(id, parameters_of(op.target)))
            elif op.kind.writes_state(op):
                updated.update(id(alive[number]) for number in op.ins if number in alive)
        read = {id(alive[number]) for op in makers.values() for number in op.ins if number in alive}
        modules = [value for op in makers.values() for value in (op.target, *op.args[:1])]
        read.update(id(p) for one in modules if isinstance(one, torch.nn.Module) for p in members.parameters(one))
        return last if updated.isdisjoint(read) else first, is_from_before

    def layers(self, snapshot: Snapshot) -> list[LayerNumbers]:
        """The numbers of every layer in the steps that are kept, up to the one saved, of an event in all; empty where
        that is not possible, or would take too long."""
        loop, world = self.loop, self.loop.world
        segments = loop.tape.segments()
        can_play = self.verdict.raised is None and world.is_complete and loop.ranks.is_alone and bool(world.copies)
        if not (can_play and segments):
            return []
        segments.append(Segment(loop.tape.running(), loop.mark()))
        names = root_names(world.modules, self.verdict.frame)
        began = snapshot.settings.began_at or 0
        # The first of its steps may hold calls of a model that the loop has given up: three_models_one_handled.
        own = [one for one in segments if one.mark.step > began] or segments[-1:]
        called = {id(op.target) for one in own for op in one.ops if op.kind is Root}
        layers = {
            in_root(path or f"<{type(root).__name__}>", names.get(id(root))) or "": layer
            for root in world.modules
            for path, layer in layers_of(root)
            if not began or id(root) in called  # else it is another model of the process
        }
        last = snapshot.step if snapshot.failure.event is None else segments[-1].mark.step
        limit = CpuLimit(_STORY_SECONDS)
        replay, meter = Replay(world, loop.tape, segments, world.copies[0], limit=limit), Meter({}, layers, last)
        with replay.going_back(), meter.watching(), in_silence():
            if replay.play(meter):
                return []
        return [row for row in meter.rows if row.step >= began]

    def make(self, case: Case) -> Made:
        """Replay a step and describe it.

        Where something raised, a check of the user's may have seen a bad value: then that value is the failure.
        """
        loop, raised = self.loop, case.raised
        replayed = self.replayed(case)
        failure, notes, reference = replayed.failure, list(case.notes), None
        is_hook = raised is not None and raised.is_call and replayed.error is None and bool(replayed.hooks)
        is_output = case.where in ("output", "parameter") and case.keep is not None
        if failure is None and (raised is not None or is_output):
            failure = _seen_by_check(replayed, is_all=is_hook or is_output)
        if raised is not None and failure is not None and not failure.kind.raises:
            replayed.program, raised = replayed.program.pruned(), None
            case = replace(case, raised=None, where="gradient" if failure.in_backward else "output")
        if failure is None and raised is None:
            failure, reference = compiled_mismatch(replayed, tuple(loop.compilers.values()))
        is_known = loop.is_noted or not case.is_now  # else nothing that differs says anything about training
        is_close = replayed.is_close and not case.notes
        if failure is None:
            failure, is_close = _unexplained(case, loop.tape.alive()), False
            is_gone = raised is None or (raised.is_call and replayed.error is None and not is_hook)
            is_repeated = raised is not None and raised.type == CheckpointError.__name__
            notes += [NO_CHECKPOINT if is_repeated else NOT_AGAIN if is_gone else NOT_OF_TORCH] if is_known else []
        elif raised is not None and failure.exception is not None and raised.alike(*failure.exception):
            failure = replace(failure, exception=raised.alike(*failure.exception))
        elif raised is not None and failure.exception is not None:
            notes.append(f"training raised {raised.type}: {raised.message.partition(chr(10))[0]}")
            is_close = False
        elif reference is None and _is_from_statistics(replayed.program, failure):
            what = f"a normalisation writes `{failure.input_name}`"
            notes.append(f"{what}, and its value from before the step was not kept")
            is_close = False
        notes += replayed.mismatches if is_known else []
        is_given = failure.call is None and failure.input_name is not None and failure.value is not None
        culprit = replayed.source_of(failure.value or 0) if is_given else None
        snapshot = self._assemble(case, replayed, failure, notes, is_close=is_close)
        return Made(snapshot, culprit, replayed.losses, replayed.devices, reference)

    def replayed(self, case: Case) -> TracedPlayer:
        """Run a step again, with what made the graphs it goes on with, and locate its failure; ``explain`` is called
        with the tensors that the program borrows."""
        loop, world, tape, ranks = self.loop, self.loop.world, self.loop.tape, self.loop.ranks
        graphs = graphs_in(case.all_ops, tape, {**tape.alive(), **_values(case.contents)})
        case = replace(case, ops=[*makers_of(graphs, [*tape.carried, *tape.ops()]), *case.ops])
        raises = case.is_whole or (case.raised is not None and case.raised.is_call)
        trained: list[Any] = [*world.modules, *world.optimizers]
        owners = {id(p): p for owner in trained for p in owned_by(owner)}
        owners.update((id(leaf), leaf) for leaf in leaves_in(case.ops, tape.alive()))
        of_step = set(map(id, case.stand_ins.values()))  # whose gradients are those of the step
        leaves = [leaf for key, leaf in owners.items() if key not in of_step]
        seen = case.gradients
        if case.where == "gradient" and case.is_now:
            seen = [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None]
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._at_its_beginning(case, leaves))
            hooks = stack.enter_context(quiet_hooks(world.modules, leaves, is_recorded=True))
            if raises:  # checks report what they see, a second time now
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            roots = root_names(world.modules, case.frame)
            modules = world.modules if case.together is not None or not ranks.is_sharded else []
            optimizers = world.optimizers if not ranks.is_sharded else []
            named = roots | names_of(world.optimizers, case.frame)
            before, copies = _state_before(modules, optimizers, named, case.stand_ins)
            before.left_out.extend([MODULES_SPREAD] if len(modules) < len(world.modules) else [])
            before.left_out.extend([OPTIMIZERS_SPREAD] if len(optimizers) < len(world.optimizers) else [])
            state = world.buffers.ids if case.is_now else world.state_ids() | world.buffers.ids
            options = {"contents": case.contents, "stand_ins": case.stand_ins, "together": case.together}
            replayed = TracedPlayer(tape, self._names(case, roots).describe, roots, state, **options)
            replayed.before, replayed.hooks = before, hooks
            if ranks.is_sharded:
                stack.enter_context(ranks.recording(world.modules, replayed.tracer))
            replayed.run(case.all_ops, performs_last=case.pending is None, raises=raises, keep=case.keep)
            if case.together is not None:
                case.together.stop(DONE)
            if case.where == "output" and case.pending is not None:
                *calls, last = replayed.program.calls  # the start of the backward call becomes the output
                replayed.program = replace(replayed.program, calls=tuple(calls), outputs=tuple(iter_refs(last.args)))
            if self._has_other_gradients(case, seen or []):
                replayed.mismatches.insert(0, OTHER_GRADIENTS)
            failure = case.found
            if failure is None:
                explain = case.explain or functools.partial(locate, progress=loop.failures.locating())
                failure = explain(replayed.program, replayed.tensors)
            result = _bad_result(failure, replayed.program)
            if result is not None and loop.compiled is not None:
                made = replace(loop.compiled, outputs=result)
                replayed.program = replace(replayed.program, calls=(made, *replayed.program.calls))
                failure = locate(replayed.program, replayed.tensors)
            replayed.failure = failure
            replayed.own_tensors(copies)
        return replayed

    @contextlib.contextmanager
    def _at_its_beginning(self, case: Case, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """The state the step began with; afterwards buffers, gradients and generators are as they were."""
        world = self.loop.world
        with contextlib.ExitStack() as stack:
            stack.enter_context(generators_restored())
            if case.mark.generators is not None:
                set_python_generators(case.mark.generators)
            stack.enter_context(attributes_kept(world.modules, world.optimizers))
            stack.enter_context(ignored_warnings())
            stack.enter_context(native.set_detect_anomaly(False))
            put_first_back(case.all_ops)
            first = next((rng for op in case.ops if (rng := getattr(op.note, "rng", None)) is not None), None)
            if first is not None:
                native.set_rng_state(first[0])
            stack.callback(give_gradients, [(leaf, leaf.grad) for leaf in leaves])
            give_gradients([(leaf, None) for leaf in leaves])
            if case.is_now:
                stack.enter_context(world.buffers.put_back())
            if torch_private.DYNAMO in sys.modules:  # compiled parts run as they are written
                stack.enter_context(native.set_stance("force_eager"))
            yield

    def _has_other_gradients(self, case: Case, seen: Gradients) -> bool:
        """True if gradients that the loop cleared in this step are others in training than in the replay."""
        wrapper = torch.nn.parallel.DistributedDataParallel
        is_averaged = any(isinstance(module, wrapper) for module in self.loop.world.modules)
        if case.where not in ("gradient", "parameter") or is_averaged or case.stand_ins:
            return False
        first = next((n for n, op in enumerate(case.ops) if op.kind is Backward), 0)
        cleared = [op.args[0] for op in case.ops[:first] if op.kind is ZeroGrad]
        fresh = {id(parameter) for owner in cleared for parameter in owned_by(owner)}
        pairs = [(old, leaf.grad) for leaf, old in seen if id(leaf) in fresh]
        return not all(new is not None and same_bits(old, new) for old, new in pairs)

    def _names(self, case: Case, roots: Mapping[int, str]) -> Names:
        tape, modules = self.loop.tape, self.loop.world.modules
        stand_ins = {**case.stand_ins, **self.loop.ranks.gathered()}
        # variables of the steps after it are still there
        later = [] if case.is_now else tape.ops(tape.marks[-2].end if len(tape.marks) > 1 else 0)
        return Names(tape.alive(), modules, roots, stand_ins, case.all_ops, case.frame, later)

    def without_replay(self, case: Case) -> Snapshot:
        """Describe a failed step that cannot be run again here: what its root modules were given, and what was
        seen."""
        roots, alive = root_names(self.loop.world.modules, case.frame), self.loop.tape.alive()
        names = self._names(case, roots)
        replayed = TracedPlayer(self.loop.tape, names.describe, roots, frozenset())
        for op in case.ops:
            for number in op.ins if op.kind is Root else ():
                tensor = alive.get(number)
                if tensor is not None and (is_leaf(tensor) or not tensor.requires_grad):
                    replayed.tracer.adopt(local_part(tensor), names.describe(number, tensor) or InputName("input"))
        replayed.finish(is_whole=True)
        bad = next((item for item in replayed.program.inputs if ways_of(replayed.tensors[item.value])), None)
        replayed.own_tensors({})
        failure = _unexplained(case, alive)
        if bad is not None and case.raised is None:
            failure = replace(failure, phase=Phase.FORWARD, input_name=bad.name, value=bad.value)
        return self._assemble(case, replayed, failure, case.notes, is_close=False)

    def _assemble(
        self, case: Case, replayed: TracedPlayer, failure: Failure, notes: list[str], *, is_close: bool
    ) -> Snapshot:
        loop, number = self.loop, case.mark.step
        path = getattr(sys.modules.get("__main__"), "__file__", None)  # names were taken out of the command line
        iterations, pending = loop.iterations, loop.judge.pending
        seat = loop.timeline.seat_of(case.mark.place, loop.running(pending.behind if pending is not None else None)[1])
        began = iterations.began(seat, number)
        is_noted = loop.is_noted or case.mark.place != iterations.total
        copies = loop.world.copies
        settings = CaptureSettings(
            watch=loop.watch,
            **loop.budget.describe(is_noted=is_noted),
            history_steps=loop.num_steps,
            history_bytes=copies[-1].num_bytes if copies else 0,
            **loop.ranks.describe(),
            compilers=tuple(loop.compilers) or None,
            began_at=began or None,
            num_threads=native.get_num_threads(),
            deterministic_algorithms=native.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=native.is_deterministic_algorithms_warn_only_enabled() if case.raised else None,
            matmul_precision=matmul_precision(),
        )
        names = iterations.names(names_of(loop.world.optimizers, case.frame))
        loss = number_of(case.mark.loss)
        timeline = loop.timeline.until(case.mark.place, number, loss, seat, names)
        recorded = [row for row in loop.norms.steps if began <= row.step <= number] if loop.norms else []
        samples = _samples_in(replayed, loop.samples)
        failure = with_samples(failure, replayed.program, samples)
        return Snapshot(
            program=replayed.program,
            tensors=replayed.tensors,
            failure=failure,
            step=number,
            micro_step=_micro_step(case, replayed, failure),
            observed_at=case.where,
            fidelity="exact" if not notes else "close" if is_close else "unfaithful",
            fidelity_note="; ".join(dict.fromkeys(notes)) or None,
            environment=collect_environment(),
            source=describe_source(Path(path) if isinstance(path, str) else None, self._command),
            settings=settings,
            rng=replayed.rng,
            timeline=timeline,
            command=self._command,
            before=replayed.before,
            recorded=recorded or None,
            samples=samples or None,
            code=attempt(lambda: digests_of_run(loop.began_at)) or None,
        )


def _samples_in(replayed: TracedPlayer, watch: SampleWatch) -> dict[int, Samples]:
    """The samples behind the values of a program that a loader gave: inputs, and results of calls of the data set."""
    program, found = replayed.program, dict[int, Samples]()
    names = replayed.of_loop | {item.value: item.name for item in program.inputs}
    known = names.keys() & {*replayed.tensors, *(value for call in program.calls for value in call.output_refs())}
    for number, tensor in replayed.env.items():
        value = replayed.tracer.value_of(tensor) if watch.of(number) is not None else None
        if value is not None and value in known:
            num_rows = native.size(tensor, 0) if native.dim(tensor) else 0
            samples = watch.samples(number, names[value], num_rows)
            found |= {value: samples} if samples is not None else {}
    return found


def _with_operands(cause: Cause | None, raised: Raised | None, failure: Failure) -> Cause | None:
    """The cause, behind the operands of the expression that raised, or before them where it is known."""
    is_shown = failure.in_backward and failure.call is not None
    if raised is None or not raised.facts or not failure.kind.raises or is_shown:
        return cause
    facts = "; ".join(raised.facts)
    says = f"{facts[0].upper()}{facts[1:]}."
    known = cause or Cause("unknown", "")
    text = f"{says} {known.text}" if known.kind == "unknown" else f"{known.text} {says}"
    return replace(known, text=text.strip(), evidence=(*known.evidence, *raised.facts))


def _found_by_rule(made: Made, cause: Cause | None) -> Cause | None:
    """What a rule about the failing call shows, by running the recorded step with its fixes."""
    with by_itself(made.snapshot.settings):
        found = diagnose(placed(made.snapshot, made.devices))
    return decided(cause, found, made.snapshot.failure)


def _state_before(
    modules: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[int, str],
    whole: Mapping[int, torch.Tensor],
) -> tuple[StateBefore, dict[int, torch.Tensor]]:
    """Copies of the state of root modules and optimizers, for `reprokit export`; also by the ``id`` of the live tensor.

    ``names`` are by ``id``, for those that need one. No more is copied than a capture may hold as its past. ``whole``
    parameters stand for those that are spread over processes.
    """
    made: dict[int, torch.Tensor] = {}
    found, size = StateBefore(), 0

    def copied(state: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal size
        odd = next((name for name, value in state.items() if not is_state_value(value)), None)
        if odd is not None:
            raise ValueError(f"`{odd}` is no plain value")
        copies = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                tensor = whole.get(id(value), value)
                if id(tensor) not in made:
                    size += native.numel(tensor) * native.element_size(tensor)
                    if size > DEFAULT_STATE_BYTES:
                        raise ValueError(f"it takes over {DEFAULT_STATE_BYTES // 2**30} GiB")
                    made[id(tensor)] = native.clone(storable(tensor), memory_format=torch.preserve_format)
                value = made[id(tensor)]
            copies[name] = value
        return copies

    def of_module(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        inner = unwrapped(module)
        live: dict[str, torch.Tensor] = dict(members.named_parameters(inner, remove_duplicate=False))
        live.update(members.named_buffers(inner, remove_duplicate=False))
        state = inner.state_dict()
        odd = next((name for name, value in state.items() if not isinstance(value, torch.Tensor)), None)
        if odd is not None:
            raise ValueError(f"`{odd}` is no tensor")
        return copied({name: live.get(name, value) for name, value in state.items()})

    def of_optimizer(optimizer: torch.optim.Optimizer) -> list[OptimizerGroup]:
        groups = zip(optimizer.param_groups, options_of(optimizer), strict=True)
        states = [(options, [optimizer.state.get(p, {}) for p in group["params"]]) for group, options in groups]
        return [OptimizerGroup(copied(options), list(map(copied, own))) for options, own in states]

    def keep(owners: Sequence[Any], kept: dict[str, Any], copy: Callable[[Any], Any]) -> None:
        for owner in owners:
            cls = type(owner).__name__
            try:
                kept[names.get(id(owner), cls) if len(owners) > 1 else ""] = copy(owner)
            except Exception as error:  # such as one from a state dict of the user's own
                pass_on(error)
                found.left_out.append(f"the state of `{cls}`: {error}".partition("\n")[0])

    keep(
        [module for module in modules if members.tensors(module)],
        found.modules,
        of_module,
    )
    keep(optimizers, found.optimizers, of_optimizer)
    return found, made


def _values(contents: Mapping[Number, torch.Tensor]) -> dict[Number, torch.Tensor]:
    return {number: native.detach(tensor) for number, tensor in contents.items()}


def _better(made: Made, joined: Made | None) -> Made:
    """A step, or the same with those before it if only that fails as training did or shows the cause."""
    is_better = joined is not None and (joined.is_exact or (joined.is_shown and not made.is_shown))
    return joined if joined is not None and is_better else made


def why_not_played(error: Exception) -> str:
    """Why the steps since the last copy were not played to their end."""
    if isinstance(error, CannotGoBack):
        return str(error)
    if isinstance(error, Stopped):
        return f"another process has stopped going back ({error})"
    pass_on(error)  # of the user's code, which the state of then may not suit
    message = str(error).partition("\n")[0]
    return f"playing the steps since the last copy raised {type(error).__name__}: {message}"


def _seen_by_check(replayed: TracedPlayer, *, is_all: bool) -> Failure | None:
    """The failure of the last bad value of the last calls, or of all; the program ends with it then."""
    program = replayed.program
    value = last_bad(program, replayed.tensors, within=len(program.calls) if is_all else _LOOKS_BACK)
    if value is None:
        return None
    replayed.program = replace(program, outputs=(Ref(value),)).pruned()
    return locate(replayed.program, replayed.tensors)


def _is_from_statistics(program: Program, failure: Failure) -> bool:
    """True for a bad input that a call of the step writes without telling its version, and that is no buffer.

    The replay has the value from after that call, so the call may have made it bad.
    """
    kept = {item.value for item in program.inputs if item.role == "buffer"}
    written = (hidden_writes(call.target, call.args, call.kwargs) for call in program.calls)
    values = {ref.value for ref in iter_refs(list(written))} - kept
    return failure.call is None and failure.input_name is not None and failure.value in values


def _bad_result(failure: Failure | None, program: Program) -> Ref | None:
    if failure is None or failure.call is not None:
        return None
    items = (item for item in program.inputs if item.value == failure.value)
    return next((Ref(item.value) for item in items if item.role == "batch" and item.requires_grad), None)


def _unexplained(case: Case, alive: Mapping[Number, torch.Tensor]) -> Failure:
    phase = _PHASES.get(case.where, Phase.FORWARD)
    raised = case.raised
    if raised is not None:
        exception = (raised.type, raised.message)
        return Failure(raised.phase, EXCEPTION, module=raised.module, site=raised.site, exception=exception)
    numbers = starts_of(case.pending.args, case.pending.kwargs) if case.pending else []
    ways = [way for number in numbers if number in alive for way in ways_of(alive[number])]
    return Failure(phase, kind_of(NAN if NAN in ways or not ways else ways[0]))


def _micro_step(case: Case, replayed: TracedPlayer, failure: Failure) -> int:
    """Backward calls made before the failing call; a bad value may be noticed several of them later."""
    made = case.mark.micro_step
    differs = any(mismatch != OTHER_GRADIENTS for mismatch in replayed.mismatches)
    if failure.in_update or failure.call_index is None or differs:
        return made
    backward = [n for n, call in enumerate(replayed.program.calls) if call.target in (BACKWARD, AUTOGRAD_BACKWARD)]
    later = sum(number > failure.call_index for number in backward)
    is_pending = case.pending is not None and name_of(case.pending) in (BACKWARD, AUTOGRAD_BACKWARD)
    return max(0, made - max(0, later - is_pending))
