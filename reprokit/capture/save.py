"""From a verdict to a snapshot: choose the step and where it begins, replay it, locate the origin, put all together.

A step begins *now* (the live parameters, buffers as they were) or *then* (a copy of the state, and the steps since).
What is simpler is tried first; whether it is what training did is seen by its losses, bit for bit.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from reprokit.capture.attributes import attributes_kept
from reprokit.capture.calls import Backward, BackwardNote, OptimizerStep, Root, ZeroGrad, name_of, starts_of
from reprokit.capture.collect_state import collect_state
from reprokit.capture.exceptions import Raised
from reprokit.capture.fidelity import checked, compiled_mismatch, unchecked
from reprokit.capture.meeting import DONE, Meeting, Parted, Stopped
from reprokit.capture.meters import LayerMeter, layers_of
from reprokit.capture.options import rank_suffix, with_part
from reprokit.capture.replay import (
    Found,
    Missing,
    Player,
    Replay,
    ReplayedStep,
    TracedPlayer,
    leaves_in,
    num_backward,
    put_first_back,
    quiet_hooks,
    record,
    split,
    with_makers,
)
from reprokit.capture.structure import is_leaf
from reprokit.capture.tape import Mark, Number, Op, Segment, Tape, without_graph
from reprokit.capture.tensor_names import Names, names_of, root_names
from reprokit.capture.world import CannotGoBack, give_gradients, owned_by, python_generators_restored
from reprokit.errors import ignored_errors, pass_on
from reprokit.locate.blame import last_bad, locate
from reprokit.locate.differences import Reference
from reprokit.locate.failure import EXCEPTION, HEALTHY, Failure, RankDifference, kind_of
from reprokit.locate.quantity import number_of
from reprokit.locate.ways import NAN, bad_tensor, local_part, ways_of
from reprokit.program.functions import hidden_writes
from reprokit.program.interpreter import Modes, Tensors, matmul_precision
from reprokit.program.ir import AUTOGRAD_BACKWARD, BACKWARD, OPAQUE, Phase, Program, Ref, iter_refs
from reprokit.program.memory import same_bits
from reprokit.program.trace import InputName, Tracer, current_mode
from reprokit.series.detectors import Alarm, Finding
from reprokit.series.story import LayerNumbers
from reprokit.snapshot.environment import collect_environment
from reprokit.snapshot.format import CaptureSettings, Snapshot, StateBefore, save
from reprokit.snapshot.rng import Generators, get_rng_state
from reprokit.snapshot.source import Source, describe_source, private
from reprokit.words import in_root

if TYPE_CHECKING:
    from reprokit.capture.loop import Loop

NOT_KEPT = "the state from before the step was not kept, so there was no going back"
NOT_ALL = "gradients are averaged over processes, and not all of them went back together"
BEGUN_BEFORE = "a step goes on with a graph from before the last copy of the state, so there was no going back"
HAS_GAP = "the loop went on in this step after an exception, and what the interrupted call wrote is not known"
NOT_SHOWN = "replaying the steps since the last copy did not show which one made the state nan or inf"
OTHER_GRADIENTS = "gradients differ between training and the replay, where no hook changes them"
MODULES_SPREAD = "the state of the model: it is spread over the ranks"
OPTIMIZERS_SPREAD = "the state of the optimizers: it is spread over the ranks"
NOT_OF_TORCH = "the exception was raised by code that is no torch call, so running the file does not raise it"
_STORY_SECONDS = 30.0  # of training in the steps to measure; a longer wait for a snapshot is not worth a story
_MOST_JOINED = 64  # steps: a program of more takes too long to be reduced
_LOOKS_BACK = 8  # calls: a check such as `not torch.isfinite(x).all()`, and what the code around it computes
_MOST_CALLS = 256  # a loop's own arithmetic on masks and weights takes tens of calls, a data set thousands
_PHASES = {"gradient": Phase.BACKWARD, "parameter": Phase.OPTIMIZER}
Gradients = list[tuple[torch.Tensor, torch.Tensor]]


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
class Verdict:
    """What failed: the kind of tensor it was seen ``where``, the frame of the loop, the backward call from a bad start
    (``op``), which may have been performed, or the exception.

    ``is_late``: it has happened some steps ago. An ``output`` with a backward call is the start of that: the loop gave
    up over a value, and nothing says that it is a loss. ``takes_skipped``: a step that the loop skipped is a failure
    too. ``has_earlier``: an earlier step had a bad loss, of which no bad update was made. ``alarm``: no value is bad,
    but numbers of the run have left their course. ``together``: all ranks go back. ``difference``: no value is bad, but
    this parameter differs between ranks. ``keep`` is a call that gave bad gradients. ``asked``: this step is to be
    saved although it is healthy.
    """

    where: str
    frame: FrameType | None
    op: Op | None = None
    is_late: bool = False
    raised: Raised | None = None
    takes_skipped: bool = False
    has_earlier: bool = False
    alarm: Alarm | Finding | None = None
    together: Meeting | None = None
    difference: RankDifference | None = None
    keep: Op | None = None
    asked: int | None = None


@dataclass(frozen=True)
class Case:
    """A step to record: its calls, of which ``pending`` is not to be performed, and what is known of it.

    ``is_now``: it begins with the live parameters, with buffers as they were; else the state is there already.
    ``contents`` are values that earlier steps have left. ``likewise`` are calls of a step whose variables are still
    there to name tensors by. ``keep`` is a call that belongs to the failure even if no backward pass depends on it.
    ``gradients`` are those of training, if they are known and not the live ones. ``stand_ins`` are whole parameters in
    the place of those that are spread over processes, by the ``id`` of these. ``explain`` finds the failure in the
    place of `locate`. ``together``: all ranks record their steps at once.
    """

    where: str
    ops: list[Op]
    pending: Op | None
    mark: Mark
    is_now: bool
    frame: FrameType | None
    contents: dict[Number, torch.Tensor] = field(default_factory=dict)
    raised: Raised | None = None
    likewise: list[Op] = field(default_factory=list)
    keep: Op | None = None
    notes: list[str] = field(default_factory=list)
    gradients: Gradients | None = None
    stand_ins: Mapping[int, torch.Tensor] = field(default_factory=dict)
    explain: Callable[[Program, Tensors], Failure | None] | None = None
    together: Meeting | None = None

    @property
    def all_ops(self) -> list[Op]:
        """The calls, the last of them not yet run."""
        return [*self.ops, *([self.pending] if self.pending is not None else [])]


@dataclass(frozen=True)
class Made:
    """A snapshot; ``culprit`` is the tensor that was bad already when the step began, if that is the failure.

    ``losses`` and ``devices`` are those of the replay; ``reference`` is that of a mismatch.
    """

    snapshot: Snapshot
    culprit: torch.Tensor | None = None
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    devices: dict[int, torch.device] = field(default_factory=dict)
    reference: Reference | None = None

    @property
    def is_shown(self) -> bool:
        """True if the replay of a step has shown where its failure comes from."""
        return has_origin(self.snapshot)

    @property
    def is_exact(self) -> bool:
        return self.snapshot.fidelity == "exact"

    def noted(self, note: str) -> Made:
        """The same with another note about its fidelity."""
        return replace(self, snapshot=replace(self.snapshot, fidelity_note=note))


@dataclass(frozen=True)
class Place:
    """Where snapshots go: the file that was asked for, or a name made of ``name`` and the step inside ``directory``.

    ``source`` says how much of the user's code goes with them. One of several processes adds its rank to the file name,
    ``part`` if it has none.
    """

    output: Path | None
    directory: Path
    name: str
    overwrite: bool
    source: Source = "traceback"
    part: str = ""

    def private(self, snapshot: Snapshot) -> Snapshot:
        """The parts of a snapshot that may be written and printed."""
        return private(snapshot, self.source)

    @property
    def log(self) -> Path:
        """The file of events: beside the snapshot, with its name or that of the run; one for each child process."""
        own = f".pid{os.getpid()}" if multiprocessing.parent_process() is not None else ""
        part = rank_suffix() or self.part or own
        if self.output is None:
            return self.directory / f"{self.name}{part}.events.jsonl"
        path = with_part(self.output, part)
        return path.with_name(f"{path.name.removesuffix('.pt').removesuffix('.repro')}.events.jsonl")

    def write(self, made: Made, *, is_asked: bool = False) -> tuple[Path, Snapshot]:
        """Write the file and read it back; another name is found when it is taken and may not be overwritten.

        There may be several steps that somebody has asked for: all names have the step then.
        """
        snapshot = made.snapshot
        part = rank_suffix() or self.part
        automatic = f"{self.name}{part}-step{snapshot.step}"
        own = f"{part}-step{snapshot.step}" if is_asked else part
        path = with_part(self.output, own) if self.output else free_path(self.directory, automatic)
        if path.exists() and not self.overwrite:
            path = free_path(path.parent, path.name.removesuffix(".pt").removesuffix(".repro"))
        save(snapshot, path)
        snapshot.tensors.clear()  # what is read back takes their place
        try:
            return path, checked(path, made.losses, made.devices, made.reference)
        except Exception as error:
            pass_on(error)
            return path, unchecked(path, error)


def has_origin(snapshot: Snapshot) -> bool:
    """True if a failure has an origin in its program."""
    return snapshot.failure.call_index is not None or snapshot.failure.input_name is not None


def free_path(directory: Path, stem: str) -> Path:
    """``<stem>.repro.pt`` in ``directory``, numbered when that name is taken."""
    for number in range(10_000):
        path = directory / (f"{stem}.repro.pt" if number == 0 else f"{stem}-{number}.repro.pt")
        if not path.exists():
            return path
    raise FileExistsError(f"no free name for {stem} in {directory}")


# -- which step, and where it begins -------------------------------------------------------------------------------


class Describing:
    """Finds the step of a verdict and describes it; ``described`` is what the snapshot is to say about the capture."""

    def __init__(self, loop: Loop, verdict: Verdict, command: Sequence[str], described: dict[str, Any]) -> None:
        self.loop = loop
        self.verdict = verdict
        self._command = list(command)
        self._described = described

    def snapshot(self) -> Made:
        """The snapshot of the step, with the story of the layers where the steps before can be played."""
        made = self.made()
        with ignored_errors():  # the user's code may not run again with the state of then; the step is worth a file
            return replace(made, snapshot=replace(made.snapshot, layers=self.layers(made.snapshot) or None))
        return made

    def made(self) -> Made:
        """The first bad step: in the past if the state is bad, else the one that is running."""
        loop, verdict, world, tape = self.loop, self.verdict, self.loop.world, self.loop.tape
        if verdict.asked is not None:
            return self._asked(verdict.asked)
        running, pending = tape.running(), verdict.op
        place = _place_of(pending, running)
        ops = running[:place] if place is not None else running
        keep = verdict.keep
        if not loop.is_noted and verdict.where == "loss":
            culprit = self._bad_output(ops, self.running_mark(pending))
            if culprit is not None:  # all that is known of how the loss was made
                verdict = self.verdict = replace(verdict, where="output", op=None)
                keep, pending = culprit, None
                ops = ops[: next(n for n, op in enumerate(ops, 1) if op is culprit)]
        if loop.ranks.is_sharded or loop.ranks.is_apart:
            return loop.ranks.made(self, ops, pending)
        notes = list(dict.fromkeys(loop.unseen))
        if self._has_gap():
            notes.append(HAS_GAP)
            world.interrupt()
        if not loop.is_noted:
            notes.append(loop.budget.why_not(loop.iterations.completed))
        mark = self.running_mark(pending)
        if self._is_past(ops, pending, place):
            buffers = world.newly_bad_buffers() if verdict.where == "output" else []
            made, reasons = self.from_the_past([buffer for _, buffer in buffers])
            notes += [reason for reason in reasons if not any(note.startswith(reason) for note in notes)]
            if made is not None:
                return made
            if verdict.together is not None:
                raise NothingFound("; ".join(dict.fromkeys(reasons)))
        case = self.now(verdict, ops, pending, mark, keep, notes)
        running = [*ops, *([pending] if pending is not None else [])]
        try:
            made = self.make(case)
        except Missing:  # the step cannot be run again here; what is known of it is worth a file
            return Made(self.without_replay(replace(case, notes=[*notes, BEGUN_BEFORE])))
        return self._better(made, case, running, notes)

    def now(
        self, verdict: Verdict, ops: list[Op], pending: Op | None, mark: Mark, keep: Op | None, notes: list[str]
    ) -> Case:
        """The running step, from the state of now."""
        tape = self.loop.tape
        kept = [op for op in ops if not (op.kind.writes_state(op) or op.kind is OptimizerStep)]
        whole = [*kept, *([pending] if pending is not None else [])]
        whole = with_makers(whole, [*tape.carried, *tape.ops(0, tape.begin)], tape, tape.alive())
        ops = whole[:-1] if pending is not None else whole
        ops, contents = _without_preparation(ops, mark, tape)
        raised = verdict.raised
        return Case(verdict.where, ops, pending, mark, True, verdict.frame, contents, raised, keep=keep, notes=notes)

    def _better(self, made: Made, case: Case, ops: list[Op], notes: list[str]) -> Made:
        """``made``, or what is truer to training than the calls of the running step, ``ops``: these with the steps they
        go on with, or a step before."""
        loop, world = self.loop, self.loop.world
        if not made.is_exact and world.is_complete and not notes and loop.ranks.is_alone:
            made = self._joined(made, case, [*self.segments(), Segment(ops, case.mark)])
        if not loop.is_noted:  # nothing else that differs says anything about training
            return made.noted("; ".join(notes))
        if not made.is_exact and self._is_begun_before(ops):
            note = made.snapshot.fidelity_note
            if BEGUN_BEFORE not in (note or ""):
                made = made.noted("; ".join(filter(None, [BEGUN_BEFORE, note])))
        if made.culprit is not None and world.has_worsened(made.culprit):
            past, _ = self.from_the_past([made.culprit])
            return past or made
        return made

    def _asked(self, step: int) -> Made:
        """A healthy step, with the updates of all its optimizers, played from the last copy. Raises `NotKept`."""
        loop, world = self.loop, self.loop.world
        segments = [segment for segment in self.segments() if segment.mark.step <= step]
        first = next((n for n, segment in enumerate(segments) if segment.mark.step == step), None)
        if not world.is_complete or not world.copies or first is None:
            raise NotKept(NOT_KEPT)
        together = self.verdict.together
        if not loop.ranks.is_alone and together is None:
            raise NotKept(NOT_ALL)
        replay = Replay(world, loop.tape, segments, world.copies[-1], together=together)
        try:
            if together is not None and not together.is_sharded:  # gradients are averaged, and noted
                with replay.going_back(), quiet_hooks(world.modules, replay.leaves()):
                    replay.play_until(len(segments))
                    together.stop(DONE)
                replay = Replay(world, loop.tape, segments, world.copies[-1])
            with replay.going_back():
                with quiet_hooks(world.modules, replay.leaves()):
                    ops, contents = replay.begin(first)
                ops += _one_after_another(replay.segments[first + 1 :])
                mark = replace(segments[-1].mark, micro_step=0, generators=segments[first].mark.generators)
                case = Case("", ops, None, mark, False, self.verdict.frame, contents=contents, notes=replay.notes)
                case = replace(case, likewise=loop.tape.running(), explain=_healthy)
                return loop.ranks.recorded_by_all(self, case) if loop.ranks.is_sharded else self.make(case)
        except Missing:
            raise NotKept(BEGUN_BEFORE) from None
        except (CannotGoBack, Parted, Stopped) as reason:
            raise NotKept(str(reason)) from reason

    def _bad_output(self, ops: list[Op], mark: Mark) -> Op | None:
        """The first call of a root module with a bad result, which the loop may have let go of since."""
        case = self.now(self.verdict, ops, None, mark, None, [])
        leaves, player = self._leaves(case), Player(self.loop.tape, self.loop.world.buffers.ids)
        with contextlib.ExitStack() as stack:
            stack.enter_context(ignored_errors())
            stack.enter_context(self._at_its_beginning(case, leaves))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(quiet_hooks(self.loop.world.modules, leaves))
            modes = stack.enter_context(Modes())
            for op in case.ops:
                modes.enter(op.mode)
                player.play(op)
                is_own = op.kind is Root and any(op is own for own in ops)
                if is_own and bad_tensor(player.env[n] for n in op.outs) is not None:
                    return op
        return None

    def _is_past(self, ops: Sequence[Op], pending: Op | None, place: int | None) -> bool:
        verdict, world = self.verdict, self.loop.world
        if verdict.is_late or verdict.has_earlier:
            return True
        if pending is not None and place is None and any(op.note is pending.note for op in self.loop.tape.ops()):
            return True  # an earlier step of another optimizer
        if any(op.kind.writes_state(op) for op in split(ops)[1]):
            return True
        return verdict.raised is None and world.newly_bad() is not None

    def running_mark(self, pending: Op | None) -> Mark:
        """The mark of the running step, up to a backward call that is pending since."""
        loop, found = self.loop, self.loop.judge.pending
        mark = loop.mark()
        if found is not None and pending is not None and found.note is pending.note:
            mark.micro_step, mark.step, mark.loss = found.micro_step, found.step, found.loss
        return mark

    def segments(self) -> list[Segment]:
        """The steps since the last copy that are over."""
        world = self.loop.world
        return self.loop.tape.segments()[world.copies[-1].num_marks if world.copies else 0 :]

    def all_segments(self) -> list[Segment]:
        """The steps since the first copy that is kept."""
        return self.loop.tape.segments()

    def _has_gap(self) -> bool:
        """True if the loop has handled an exception in this step that may have interrupted a write."""
        recorder = self.loop.recorder
        if self.verdict.raised is None or recorder.raised is None:
            return bool(recorder.gaps)
        return any(gap is not None and gap.note is not recorder.raised[1].note for gap in recorder.gaps) or (
            recorder.gaps.count(None) > 0
        )

    def from_the_past(self, ruined: Sequence[torch.Tensor] = ()) -> tuple[Made | None, list[str]]:
        """The snapshot of the first bad step, or why there is none.

        That is the step that made one of the ``ruined`` parts of the state nan or inf, if there are any; else the first
        one with a bad loss, gradient or parameter.
        """
        loop, world, tape = self.loop, self.loop.world, self.loop.tape
        if not world.is_complete or not world.copies:
            return None, [NOT_KEPT]
        if not loop.ranks.is_alone and self.verdict.together is None:
            return None, [NOT_ALL]
        running, pending = tape.running(), self.verdict.op
        place = _place_of(pending, running)
        ops = running if place is None else running[: place + 1]
        if pending is not None and not any(op.note is pending.note for op in tape.ops()):
            ops = [*running, pending]
        segments = [*self.segments(), Segment(ops, self.running_mark(pending))]
        if loop.ranks.is_sharded:
            return loop.ranks.from_the_past(self, segments)
        made, reasons = self.played(segments, ruined)
        culprit = made.culprit if made is not None and loop.ranks.is_alone else None
        if culprit is None or ruined or not world.has_worsened(culprit):
            return made, reasons
        return self.from_the_past([culprit])[0] or made, []

    def played(self, segments: Sequence[Segment], ruined: Sequence[torch.Tensor]) -> tuple[Made | None, list[str]]:
        """The snapshot of the first bad one of some steps, or why there is none."""
        loop, world, verdict = self.loop, self.loop.world, self.verdict
        replay = Replay(
            world,
            loop.tape,
            segments,
            world.copies[-1],
            ruined=ruined,
            takes_skipped=verdict.takes_skipped,
            expected=verdict.op,
            together=verdict.together,
        )
        try:
            with replay.going_back():
                with quiet_hooks(world.modules, replay.leaves()):
                    found = replay.find()
                if found is None:
                    is_loss = verdict.where == "loss" and verdict.is_late and verdict.together is None
                    if is_loss and replay.skipped and not replay.notes:
                        raise SkippedLoss(replay.skipped[0])
                    return None, [*replay.notes, NOT_SHOWN]
                case = self.before(found, replay.segments)
                made = loop.ranks.update_made(self, case) if loop.ranks.is_sharded else self.make(case)
                if made.culprit is None and not made.is_shown:
                    made = replace(made, culprit=world.newly_bad())
        except (SkippedLoss, Parted):
            raise
        except Exception as error:
            return None, [why_not_played(error)]
        if made.culprit is None and not made.is_exact and loop.ranks.is_alone:
            last = replay.segments[found.number]
            written = [op for op in split(last.ops)[0] if op.kind.writes_state(op)]
            ops = [*([] if found.keep is not None else written), *found.ops]
            ops += [found.pending] if found.pending is not None else []
            made = self._joined(made, case, [*replay.segments[: found.number], Segment(ops, last.mark)])
        return made, []

    def before(self, found: Found, segments: Sequence[Segment]) -> Case:
        """The step that a replay has found; the live state is where that step began."""
        tape, segment = self.loop.tape, segments[found.number]
        earlier = [*tape.carried, *(op for before in segments[: found.number] for op in before.ops)]
        whole = [*found.ops, *([found.pending] if found.pending is not None else [])]
        whole = with_makers(whole, earlier, tape, {**tape.alive(), **found.contents})
        ops = whole[:-1] if found.pending is not None else whole
        mark = replace_mark(segment.mark)
        if found.where in ("loss", "output"):  # the step went on from there
            mark.micro_step = num_backward(found.ops)
        likewise = [*(segments[-2].ops if len(segments) > 1 else []), *tape.running()]
        return Case(
            found.where,
            ops,
            found.pending,
            mark,
            False,
            self.verdict.frame,
            contents=found.contents,
            likewise=likewise,
            keep=found.keep,
            notes=found.notes,
            gradients=found.gradients,
        )

    def _joined(self, made: Made, case: Case, segments: list[Segment]) -> Made:
        """``made``, or the last of ``segments`` together with those whose graphs or gradients it goes on with.

        The latter if only they fail as training did: then parameters were updated between forward and backward pass.
        """
        world, tape = self.loop.world, self.loop.tape
        first = _first_joined(segments, tape)
        owner = segments[-1].mark
        differentiates = [any(op.kind is Backward for op in segment.ops) for segment in segments]
        if case.where == "gradient" and not differentiates[-1] and any(differentiates):
            number = max(n for n, is_made in enumerate(differentiates) if is_made)
            owner, first = segments[number].mark, min(number, number if first is None else first)
        if first is None or len(segments) - first > _MOST_JOINED:
            return made
        replay = Replay(world, tape, segments, world.copies[-1])
        try:
            with replay.going_back():
                contents = replay.play_until(first)
                ops = _one_after_another(replay.segments[first:])
                mark = replace_mark(case.mark)
                mark.step, mark.generators = owner.step, segments[first].mark.generators
                joined = replace(
                    case,
                    ops=ops[:-1] if case.pending is not None else ops,
                    is_now=False,
                    contents=contents,
                    mark=mark,
                    notes=replay.notes,
                )
                other = self.make(joined)
        except Exception as error:  # of the user's code, or because the state of then does not suit
            pass_on(error)
            return made
        is_better = other.is_exact or (other.is_shown and not made.is_shown)
        return replace(other, culprit=None) if is_better else made

    def _is_begun_before(self, ops: Sequence[Op]) -> bool:
        """True if a step goes on with a graph that no step since the last copy has made."""
        tape = self.loop.tape
        known = {number for op in (*tape.ops(), *ops) for number in op.outs}
        alive = tape.alive()
        used = {n for op in ops if op.mode.grad for n in op.ins if n not in known and n not in tape.inputs}
        return any(n not in alive or (alive[n].requires_grad and not is_leaf(alive[n])) for n in used)

    def layers(self, snapshot: Snapshot) -> list[LayerNumbers]:
        """The numbers of every layer in the steps that are kept, up to the one saved, of an event in all; empty where
        that is not possible, or would take too long."""
        loop, world = self.loop, self.loop.world
        seconds = [row.seconds for row in snapshot.timeline if row.seconds is not None]
        segments = self.all_segments()
        can_play = self.verdict.raised is None and world.is_complete and loop.ranks.is_alone and bool(world.copies)
        if not can_play or not segments or not seconds:
            return []
        if len(segments) * sum(seconds) / len(seconds) > _STORY_SECONDS:
            return []
        segments.append(Segment(loop.tape.running(), loop.mark()))
        names = root_names(world.modules, self.verdict.frame)
        began = snapshot.settings.began_at or 0
        called = {id(op.target) for one in segments for op in one.ops if op.kind is Root and one.mark.step >= began}
        layers = {
            in_root(path or f"<{type(root).__name__}>", names.get(id(root))) or "": layer
            for root in world.modules
            for path, layer in layers_of(root)
            if not began or id(root) in called  # else it is another model of the process
        }
        last = snapshot.step if snapshot.failure.event is None else segments[-1].mark.step
        replay = Replay(world, loop.tape, segments, world.copies[0])
        with replay.going_back(), quiet_hooks(world.modules, replay.leaves()):
            return [row for row in replay.measured(LayerMeter(layers), last) if row.step >= began]

    # -- replaying a step ----------------------------------------------------------------------------------------

    def make(self, case: Case) -> Made:
        """Replay a step and describe it.

        Where something raised, a check of the user's may have seen a bad value: then that value is the failure.
        """
        loop = self.loop
        played = self.replayed(case)
        replayed, failure = played.replayed, played.failure
        raised = case.raised
        is_hook = raised is not None and raised.is_call and replayed.error is None and bool(played.hooks)
        is_output = failure is None and case.where in ("output", "parameter") and case.keep is not None
        if raised is not None or is_output:
            program, failure = _seen_by_check(replayed, failure, is_all=is_hook or is_output)
            if failure is not None and failure.kind != EXCEPTION:
                replayed.program = program.pruned()
                where = "gradient" if failure.phase == Phase.BACKWARD else "output"
                where = case.where if case.where == "parameter" else where
                case, raised = replace(case, raised=None, where=where), None
        notes, reference = list(case.notes), None
        if failure is None and raised is None:
            failure, reference = compiled_mismatch(replayed, tuple(loop.compilers.values()))
        if failure is not None and reference is not None:
            played.notes.clear()  # gradients are others than in training, as they have to be
        elif failure is None:
            failure = _unexplained(case, loop.tape.alive())
            is_gone = raised is None or (raised.is_call and replayed.error is None and not is_hook)
            notes += _why_not_again(replayed) if is_gone else [NOT_OF_TORCH]
            replayed.is_close = False
        elif raised is not None and failure.exception is not None and not raised.is_same(*failure.exception):
            notes.append(f"training raised {raised.type}: {raised.message.partition(chr(10))[0]}")
            replayed.is_close = False
        elif _is_from_statistics(replayed.program, failure):
            what = f"a normalisation writes `{failure.input_name}`"
            notes.append(f"{what}, and its value from before the step was not kept")
            replayed.is_close = False
        notes += [*played.notes, *replayed.mismatches]
        replayed.is_close = replayed.is_close and not case.notes
        is_given = failure.call is None and failure.input_name is not None and failure.value is not None
        culprit = replayed.sources.get(failure.value or 0) if is_given else None
        snapshot = self._assemble(case, replayed, failure, notes, played.rng, played.before)
        return Made(snapshot, culprit, replayed.losses, replayed.devices, reference)

    def replayed(self, case: Case) -> _Played:
        """Run a step again and locate its failure; ``explain`` is called with the tensors that the program borrows."""
        loop, world = self.loop, self.loop.world
        raises = case.raised is not None and case.raised.is_call
        with contextlib.ExitStack() as stack:
            leaves = self._leaves(case)
            seen = case.gradients
            if case.where == "gradient" and case.is_now:
                seen = [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None]
            stack.enter_context(self._at_its_beginning(case, leaves))
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
            warnings.simplefilter("ignore")
            hooks = stack.enter_context(quiet_hooks(world.modules, leaves, is_recorded=True))
            if raises:  # checks report what they see, a second time now
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            rng = get_rng_state()
            roots = root_names(world.modules, case.frame)
            is_spread = loop.ranks.is_sharded
            modules = world.modules if case.together is not None or not is_spread else []
            optimizers = world.optimizers if not is_spread else []
            owners = roots | names_of(world.optimizers, case.frame)
            before, copies = collect_state(modules, optimizers, owners, case.stand_ins)
            before.left_out.extend([MODULES_SPREAD] if len(modules) < len(world.modules) else [])
            before.left_out.extend([OPTIMIZERS_SPREAD] if len(optimizers) < len(world.optimizers) else [])
            state = world.buffers.ids if case.is_now else world.state_ids() | world.buffers.ids
            recorder = TracedPlayer(
                loop.tape,
                self._names(case).describe,
                roots,
                state,
                contents=case.contents,
                stand_ins=case.stand_ins,
                together=case.together,
            )
            if loop.ranks.is_sharded:
                stack.enter_context(loop.ranks.recording(world.modules, recorder.tracer))
            replayed = record(recorder, case.all_ops, performs_last=case.pending is None, raises=raises, keep=case.keep)
            if case.together is not None:
                case.together.stop(DONE)
            if case.where == "output" and case.pending is not None:
                *calls, last = replayed.program.calls  # the start of the backward call becomes the output
                replayed.program = replace(replayed.program, calls=tuple(calls), outputs=tuple(iter_refs(last.args)))
            notes = list(self._other_gradients(case, seen))
            failure = (case.explain or locate)(replayed.program, replayed.tensors)
            result = _bad_result(failure, replayed.program)
            if result is not None and loop.compiled is not None:
                made = replace(loop.compiled, outputs=result)
                replayed.program = replace(replayed.program, calls=(made, *replayed.program.calls))
                failure = locate(replayed.program, replayed.tensors)
            replayed.own_tensors()
            replayed.share(copies)
        return _Played(replayed, failure, rng, hooks, notes, before)

    def _leaves(self, case: Case) -> list[torch.Tensor]:
        world = self.loop.world
        owners: list[torch.nn.Module | torch.optim.Optimizer] = [*world.modules, *world.optimizers]
        leaves = {id(p): p for owner in owners for p in owned_by(owner)}
        leaves.update((id(leaf), leaf) for leaf in leaves_in(case.ops, self.loop.tape.alive()))
        for stand_in in case.stand_ins.values():  # whose gradients are those of the step
            leaves.pop(id(stand_in), None)
        return list(leaves.values())

    @contextlib.contextmanager
    def _at_its_beginning(self, case: Case, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """The state the step began with; afterwards buffers, gradients and generators are as they were."""
        world = self.loop.world
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(enabled=True))
            stack.enter_context(python_generators_restored(case.mark.generators))
            stack.enter_context(attributes_kept(world.modules, world.optimizers))
            put_first_back(case.all_ops)
            first = next((rng for op in case.ops if (rng := getattr(op.note, "rng", None)) is not None), None)
            if first is not None:
                torch.set_rng_state(first[0])
            stack.callback(give_gradients, [(leaf, leaf.grad) for leaf in leaves])
            for leaf in leaves:
                leaf.grad = None
            if case.is_now:
                stack.enter_context(world.buffers.put_back())
            if "torch._dynamo" in sys.modules:  # compiled parts run as they are written
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def _other_gradients(self, case: Case, seen: Gradients | None) -> Iterator[str]:
        """A note if gradients that the loop cleared in this step are others in training than in the replay."""
        first = next((n for n, op in enumerate(case.ops) if op.kind is Backward), 0)
        cleared = [op.args[0] for op in case.ops[:first] if op.kind is ZeroGrad]
        fresh = {id(parameter) for owner in cleared for parameter in owned_by(owner)}
        wrapper = torch.nn.parallel.DistributedDataParallel
        is_alone = not any(isinstance(module, wrapper) for module in self.loop.world.modules)
        if case.where not in ("gradient", "parameter") or not is_alone or case.stand_ins:
            return
        pairs = [(old, leaf.grad) for leaf, old in seen or () if id(leaf) in fresh]
        if not all(new is not None and same_bits(old, new) for old, new in pairs):
            yield OTHER_GRADIENTS

    def _names(self, case: Case) -> Names:
        names = Names(self.loop.tape.alive())
        modules = self.loop.world.modules
        for module in modules:
            names.add_root(module)
        names.name_roots(root_names(modules, case.frame))
        names.add_stand_ins(case.stand_ins)
        names.add_stand_ins(self.loop.ranks.gathered())
        for op in case.all_ops:
            names.add_arguments(op)
        names.add_locals(case.frame)
        names.add_by_place(case.all_ops, case.likewise)
        for op in case.all_ops:
            names.add_by_source(op)
            names.add_arguments(op, plain=True)
        return names

    def without_replay(self, case: Case) -> Snapshot:
        """Describe a failed step that cannot be run again here: what its root modules were given, and what was
        seen."""
        names, alive = self._names(case), self.loop.tape.alive()
        rng = get_rng_state()
        tracer = Tracer(lambda tensor: names.describe(None, tensor))
        for op in case.ops:
            for number in op.ins if op.kind is Root else ():
                tensor = alive.get(number)
                if tensor is not None and (is_leaf(tensor) or not tensor.requires_grad):
                    tracer.adopt(local_part(tensor), names.describe(number, tensor) or InputName("input"))
        replayed = ReplayedStep(tracer.program(), tracer.tensors, tracer.borrowed, is_close=False)
        replayed.own_tensors()
        bad = next((item for item in replayed.program.inputs if ways_of(tracer.tensors[item.value])), None)
        failure = _unexplained(case, alive)
        if bad is not None and case.raised is None:
            failure = replace(failure, phase=Phase.FORWARD, input_name=bad.name, value=bad.value)
        return self._assemble(case, replayed, failure, case.notes, rng)

    def _assemble(
        self,
        case: Case,
        replayed: ReplayedStep,
        failure: Failure,
        notes: list[str],
        rng: Generators,
        before: StateBefore | None = None,
    ) -> Snapshot:
        loop, number = self.loop, case.mark.step
        path = getattr(sys.modules.get("__main__"), "__file__", None)  # names were taken out of the command line
        iterations, pending = loop.iterations, loop.judge.pending
        seat = loop.timeline.seat_of(case.mark.place, loop.running(pending.behind if pending is not None else None)[1])
        kin, began = iterations.kin(seat, number), iterations.began(seat, number)
        is_noted = loop.is_noted or case.mark.place != iterations.total
        copies = loop.world.copies
        settings = CaptureSettings(
            **self._described,
            **loop.budget.describe(is_noted=is_noted),
            history_steps=loop.num_steps,
            history_bytes=copies[-1].num_bytes if copies else 0,
            **loop.ranks.describe(),
            compilers=tuple(loop.compilers) or None,
            began_at=began or None,
            num_threads=torch.get_num_threads(),
            deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled() if case.raised else None,
            matmul_precision=matmul_precision(),
        )
        names = iterations.names(names_of(loop.world.optimizers, case.frame))
        loss = number_of(case.mark.loss)
        timeline = loop.timeline.until(case.mark.place, number, loss, seat, kin, names)
        recorded = [row for row in loop.norms.steps if began <= row.step <= number] if loop.norms else []
        return Snapshot(
            program=replayed.program,
            tensors=replayed.tensors,
            failure=failure,
            step=number,
            micro_step=_micro_step(case, replayed, failure),
            observed_at=case.where,
            fidelity="exact" if not notes else "close" if replayed.is_close else "unfaithful",
            fidelity_note="; ".join(dict.fromkeys(notes)) or None,
            environment=collect_environment(),
            source=describe_source(Path(path) if isinstance(path, str) else None, self._command),
            settings=settings,
            rng=rng,
            timeline=timeline,
            command=self._command,
            before=before,
            recorded=recorded or None,
        )


@dataclass(frozen=True)
class _Played:
    """A replay, the failure in its program, the generators' states, and the hooks that raised or were left out."""

    replayed: ReplayedStep
    failure: Failure | None
    rng: Generators
    hooks: list[Any]
    notes: list[str]
    before: StateBefore


def why_not_played(error: Exception) -> str:
    """Why the steps since the last copy were not played to their end."""
    if isinstance(error, Stopped):
        return f"another process has stopped going back ({error})"
    if isinstance(error, (CannotGoBack, Missing)):
        return BEGUN_BEFORE if isinstance(error, Missing) else str(error)
    pass_on(error)  # of the user's code, which the state of then may not suit
    return f"playing the steps since the last copy raised {type(error).__name__}: {error}"


def _healthy(program: Program, tensors: Tensors) -> Failure:
    return Failure(Phase.FORWARD, HEALTHY)


def _place_of(op: Op | None, ops: Sequence[Op]) -> int | None:
    if op is None:
        return None
    return next((number for number, other in enumerate(ops) if other.note is op.note), None)


def replace_mark(mark: Mark) -> Mark:
    """A copy of a mark."""
    return replace(mark)


def backward_from(number: Number, code: Any, instruction: int) -> Op:
    """The backward call that the loop has not made, with the line where the loss was computed."""
    args = (number,)
    return Op(Backward, torch.Tensor.backward, args, {}, (), code, instruction, current_mode(), BackwardNote())


def _one_after_another(segments: Sequence[Segment]) -> list[Op]:
    """The calls of several steps, each with the generators that it began with."""
    found: list[Op] = []
    for place, segment in enumerate(segments):
        is_first = place > 0 and segment.mark.generators is not None
        for op in segment.ops:
            if is_first and op.kind is Root:
                op = op._replace(note=replace(op.note, generators=segment.mark.generators))
                is_first = False
            found.append(op)
    return found


def _first_joined(segments: Sequence[Segment], tape: Any) -> int | None:
    """The position of the first of ``segments`` whose graphs the last one, or a step between them, goes on with.

    ``None`` if nothing goes on with a graph.
    """
    needed, first = _graphs_from_before(segments[-1].ops, tape), None
    for position in range(len(segments) - 2, -1, -1):
        outs = {number for op in segments[position].ops for number in op.outs}
        if needed & outs:
            first = position
        if first is not None:
            needed = (needed - outs) | _graphs_from_before(segments[position].ops, tape)
    return first


def _graphs_from_before(ops: Sequence[Op], tape: Any) -> set[Number]:
    """The numbers of what a step is given with its graph and has not made itself."""
    needed: set[Number] = set()
    produced: set[Number] = set()
    for op in ops:
        if op.mode.grad and name_of(op) not in ("torch.Tensor.detach", "torch.Tensor.data.__get__"):
            needed.update(n for n in op.ins if n not in produced and n not in tape.inputs)
        produced.update(op.outs)
    return needed


def _without_preparation(ops: list[Op], mark: Mark, tape: Tape) -> tuple[list[Op], dict[Number, torch.Tensor]]:
    """``ops`` less those that prepared data, if these are very many, and what they made for the others.

    A call that made a bad value stays.
    """
    plain = [op for op in without_graph(ops, tape.alive()) if op.outs]
    roots = [op for op in plain if op.kind is Root and not [*op.target.parameters(), *op.target.buffers()]]
    known = set(map(id, roots))
    prepared = [op for op in plain if name_of(op) or id(op) in known]
    if len(prepared) <= _MOST_CALLS:
        return ops, {}
    player = Player(tape)
    made: dict[Number, torch.Tensor] = {}
    try:
        with torch.random.fork_rng(enabled=True), python_generators_restored(mark.generators), Modes() as modes:
            for op in prepared:
                modes.enter(op.mode)
                player.play(op)
                made.update((number, player.env[number].detach().clone()) for number in op.outs)
    except Exception as error:
        pass_on(error)
        return ops, {}
    if player.mismatches or any(tensor.requires_grad for tensor in player.env.values()):
        return ops, {}
    contents = {number: tensor for number, tensor in made.items() if not ways_of(tensor)}
    candidates, kept = set(map(id, prepared)), []
    needed: set[Number] = set()
    for op in reversed(ops):
        if id(op) not in candidates or not needed.isdisjoint(op.outs):
            kept.append(op)
            needed.update(number for number in op.ins if number not in contents)
    return kept[::-1], contents


def _seen_by_check(replayed: ReplayedStep, failure: Failure | None, *, is_all: bool) -> tuple[Program, Failure | None]:
    """The program and its failure; where no call of torch raised, the last bad value of the last calls, or of all."""
    program = replayed.program
    if failure is not None:
        return program, failure
    value = last_bad(program, replayed.tensors, within=len(program.calls) if is_all else _LOOKS_BACK)
    if value is None:
        return program, None
    program = replace(program, outputs=(Ref(value),))
    return program, locate(program, replayed.tensors)


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


def _why_not_again(replayed: ReplayedStep) -> Iterator[str]:
    yield "the failure did not occur again when the step was replayed"
    opaque = dict.fromkeys(call.kwargs["name"] for call in replayed.program.calls if call.target == OPAQUE)
    if opaque:
        yield "custom autograd functions are not followed: " + ", ".join(f"`{name}`" for name in opaque)


def _micro_step(case: Case, replayed: ReplayedStep, failure: Failure) -> int:
    """Backward calls made before the failing call; a bad value may be noticed several of them later."""
    made = case.mark.micro_step
    if failure.phase == Phase.OPTIMIZER or failure.call_index is None or replayed.mismatches:
        return made
    backward = [n for n, call in enumerate(replayed.program.calls) if call.target in (BACKWARD, AUTOGRAD_BACKWARD)]
    later = sum(number > failure.call_index for number in backward)
    is_pending = case.pending is not None and name_of(case.pending) in (BACKWARD, AUTOGRAD_BACKWARD)
    return max(0, made - max(0, later - is_pending))
