"""From a failure that was noticed to a file.

The step that is running is saved or, when the state was bad before it, the step that the past shows to be the first bad
one.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from reprokit.capture.early.detectors import Alarm, Finding
from reprokit.capture.options import rank_suffix, with_part
from reprokit.capture.record import kinds
from reprokit.capture.record.compact_steps import PastStep, split
from reprokit.capture.record.current_step import without_preparation
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.screens import bad_tensor
from reprokit.capture.record.state import CannotGoBack, parameters_of
from reprokit.capture.record.structure import iter_tensors
from reprokit.capture.record.tensor_names import root_names
from reprokit.capture.rewind.checkpoint import DEFAULT_STATE_BYTES
from reprokit.capture.rewind.find_bad_step import Found, Rewind
from reprokit.capture.rewind.measure_steps import LayerMeter, layers_of
from reprokit.capture.rewind.meeting import FAILED, Meeting, Parted, SavedElsewhere, Stopped
from reprokit.capture.rewind.replayer import quiet_hooks
from reprokit.capture.rewind.updates import BadUpdate, give, on_plain, write_to
from reprokit.capture.run.ranks import Unanswered
from reprokit.capture.run.run_state import RunState
from reprokit.capture.save.build_snapshot import BuiltSnapshot, FailedStep, make_snapshot, snapshot_without_replay
from reprokit.capture.save.exceptions import Raised
from reprokit.capture.save.fidelity import checked, unchecked
from reprokit.capture.save.unshard import unsharded
from reprokit.errors import ignored_errors, pass_on
from reprokit.locate.failure import RankDifference
from reprokit.locate.quantity import number_of
from reprokit.locate.ways import local_part
from reprokit.program.ir import AUTOGRAD_GRAD, Mode
from reprokit.snapshot.format import CaptureSettings, Snapshot, save
from reprokit.snapshot.source import Source, private
from reprokit.story import LayerNumbers
from reprokit.words import in_root

NOT_KEPT = "the state from before the step was not kept, so there was no going back"
NOT_ALL = "gradients are averaged over processes, and not all of them went back together"
BEGUN_BEFORE = "a step goes on with a graph from before the last copy of the state, so there was no going back"
NOT_REPLAYED = (
    "the model is spread over several processes, and the step could not be replayed in one ({}); "
    "the snapshot holds what the modules of this rank were given"
)
APART = "of several processes only DDP, averaging by hand and `fully_shard` are followed"
HAS_GAP = "the loop went on in this step after an exception, and what the interrupted call wrote is not known"
_STORY_SECONDS = 30.0  # of training in the steps to measure; a longer wait for a snapshot is not worth a story
_MOST_JOINED = 64  # steps: a program of more takes too long to be reduced
OTHER_SHARDS = "playing the updates since the last copy did not lead to the shards that training has"
NOT_SHOWN = "replaying the steps since the last copy did not show which one made the state nan or inf"


class NothingFound(Exception):
    """Going back together has shown no bad step; the message says why."""


class GoneBack(Enum):
    """What going back together has shown a rank: its own loss, or what all ranks have, and if its step explains it."""

    OWN = auto()
    SHOWN = auto()
    SEEN = auto()
    NONE = auto()

    @classmethod
    def of(cls, made: BuiltSnapshot) -> GoneBack:
        """The outcome for a snapshot."""
        if not _is_shown(made.snapshot):
            return cls.SEEN
        return cls.OWN if made.snapshot.observed_at == "loss" else cls.SHOWN


def saver_among(outcomes: Sequence[GoneBack], own: int) -> int | None:
    """The rank that saves: each whose own loss is bad, else the first one whose step shows the cause."""
    if outcomes[own] is GoneBack.OWN:
        return own
    for wanted in (GoneBack.OWN, GoneBack.SHOWN, GoneBack.SEEN):
        if wanted in outcomes:
            return outcomes.index(wanted)
    return None


class SkippedLoss(Exception):
    """The loop has made no bad update of a bad loss that was noticed late; ``step`` is the step of that loss."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the loop skipped step {step}")
        self.step = step


@dataclass(frozen=True)
class Noticed:
    """The place of a failure: kind of tensor, frame of the loop, the backward call that was not started, the exception.

    ``is_late``: it has happened some steps ago. An ``output`` with a pending backward call is the start of that: the
    loop gave up over a value, and nothing says that it is a loss. ``last`` is the last entry of the
    step, if the loop has gone on since. ``takes_skipped``: a step that the loop skipped is a failure too.
    ``has_earlier``: an earlier step had a bad loss, of which no bad update was made. ``alarm``: no value is bad, but
    numbers of the run have left their course. ``together``: all ranks go back. ``difference``: no value is bad, but
    this parameter differs between ranks. ``keep`` is a call that gave bad gradients.
    """

    observed_at: str
    frame: FrameType | None
    pending: Entry | None = None
    is_late: bool = False
    raised: Raised | None = None
    last: Entry | None = None
    takes_skipped: bool = False
    has_earlier: bool = False
    alarm: Alarm | Finding | None = None
    together: Meeting | None = None
    difference: RankDifference | None = None
    keep: Entry | None = None


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

    def write(self, made: BuiltSnapshot) -> tuple[Path, Snapshot]:
        """Write the file and read it back; another name is found when it is taken and may not be overwritten."""
        snapshot = made.snapshot
        part = rank_suffix() or self.part
        automatic = f"{self.name}{part}-step{snapshot.step}"
        path = with_part(self.output, part) if self.output else free_path(self.directory, automatic)
        if path.exists() and not self.overwrite:
            path = free_path(path.parent, path.name.removesuffix(".pt").removesuffix(".repro"))
        save(snapshot, path)
        snapshot.tensors.clear()  # what is read back takes their place
        try:
            return path, checked(path, made.losses, made.devices, made.reference)
        except Exception as error:
            pass_on(error)
            return path, unchecked(path, error)


def snapshot_of(
    run_state: RunState, noticed: Noticed, command: Sequence[str], described: dict[str, Any]
) -> BuiltSnapshot:
    """Describe the step that failed; ``described`` is what the snapshot is to say about the capture."""
    describing = Describing(run_state, noticed, command, described)
    made = describing.snapshot()
    with ignored_errors():  # the user's code may not run again with the state of then; the step is worth a file anyway
        return replace(made, snapshot=replace(made.snapshot, layers=describing.layers(made.snapshot) or None))
    return made


class Describing:
    """Finds the step to save and describes it."""

    def __init__(
        self, run_state: RunState, noticed: Noticed, command: Sequence[str], described: dict[str, Any]
    ) -> None:
        self._run_state = run_state
        self._noticed = noticed
        self._command = list(command)
        self._described = described

    def snapshot(self) -> BuiltSnapshot:
        """The first bad step: in the past if the state is bad, else the one that is running."""
        run_state, noticed = self._run_state, self._noticed
        run_state.freeze_past()
        entries = run_state.running.entries
        entries = entries[: _position(entries, noticed.pending)]  # which may have been performed all the same
        entries = entries[: _position(entries, noticed.last) + 1]
        culprit = None
        if not run_state.running.is_noted and noticed.observed_at == "loss":
            modules = (entry for entry in entries if entry.kind is kinds.MODULE)
            outputs = ((entry, filter(torch.is_floating_point, iter_tensors(entry.output))) for entry in modules)
            culprit = next((entry for entry, found in outputs if bad_tensor(found) is not None), None)
        if culprit is not None:  # all that is known of how the loss was made
            noticed = self._noticed = replace(noticed, observed_at="output", pending=None, last=culprit)
            entries = entries[: _position(entries, culprit) + 1]
        if noticed.raised is not None:
            entries = [entry for entry in entries if not entry.is_skipped or entry.writes_state]
        step = run_state.step_of(entries, run_state.running.memory.saved)
        if run_state.ranks.is_sharded or run_state.ranks.is_apart:
            return self._with_whole_parameters(step, entries)
        notes = list(dict.fromkeys(run_state.unseen))
        if self._has_gap():
            notes.append(HAS_GAP)
            run_state.history.interrupt()
        if not run_state.running.is_noted:
            notes.append(run_state.budget.why_not(run_state.iterations.completed))
        lead, rest = split(entries)
        is_past = noticed.is_late or noticed.has_earlier or any(entry.writes_state for entry in rest)
        is_past = is_past or (noticed.raised is None and run_state.history.newly_bad() is not None)
        if is_past:
            buffers = run_state.history.newly_bad_buffers() if noticed.observed_at == "output" else []
            past, reasons = self._from_the_past(step, [buffer for _, buffer in buffers])
            notes += [reason for reason in reasons if not any(note.startswith(reason) for note in notes)]
            if past is not None:
                return past
        entries, saved, pending = self._with_graphs_from_before(step)
        if entries is step.entries:  # and not light copies of them, which hold no values
            entries = without_preparation(entries, saved)
        entries = [entry for entry in entries if not (entry.writes_state or entry.kind is kinds.OPTIMIZER)]
        failed = self._failed(step, noticed.observed_at, entries, saved, pending)
        failed = replace(failed, raised=noticed.raised, notes=notes, lead=lead, keep=culprit or noticed.keep)
        made = make_snapshot(failed, noticed.frame)
        if made.snapshot.fidelity != "exact" and run_state.history.is_complete and not notes:
            light = run_state.freezer.lightened(step, noticed.pending)
            failed = replace(failed, pending=light.entries.pop() if noticed.pending is not None else None)
            made = self._joined(made, failed, [*run_state.past(), light])
        if made.snapshot.fidelity != "exact" and BEGUN_BEFORE not in notes and self._is_begun_before(step):
            note = "; ".join(filter(None, [BEGUN_BEFORE, made.snapshot.fidelity_note]))
            made = replace(made, snapshot=replace(made.snapshot, fidelity_note=note))
        if not run_state.running.is_noted:  # nothing else that differs says anything about training
            made = replace(made, snapshot=replace(made.snapshot, fidelity_note="; ".join(notes)))
        if made.culprit is not None and run_state.history.has_worsened(made.culprit):
            past, _ = self._from_the_past(step, [made.culprit])
            return past or made
        return made

    def _with_whole_parameters(self, step: PastStep, entries: list[Entry]) -> BuiltSnapshot:
        """The running step of this rank by itself; what it was given, if the parameters cannot be put together."""
        run_state, noticed = self._run_state, self._noticed
        kept = [entry for entry in entries if not (entry.writes_state or entry.kind is kinds.OPTIMIZER)]
        failed = self._failed(step, noticed.observed_at, kept, step.saved, noticed.pending)
        failed = replace(failed, raised=noticed.raised, lead=split(entries)[0], notes=list(run_state.unseen))
        ranks, history = run_state.ranks, run_state.history
        try:
            if ranks.is_apart:
                raise Unanswered(APART)
            if noticed.raised is None:
                bad = run_state.updates.first_bad(step.completed, run_state.running.entries)
                if bad is not None:
                    return self._of_update(step, bad)
            if ranks.shards.num_bytes > DEFAULT_STATE_BYTES:
                raise Unanswered(f"whole parameters take over {DEFAULT_STATE_BYTES // 2**30} GiB")
            whole = ranks.gather()
            with unsharded(history.modules, history.optimizers, ranks.shards.slots, whole) as stand_ins:
                return make_snapshot(replace(failed, stand_ins=stand_ins), noticed.frame)
        except Exception as reason:
            pass_on(reason)
            kind = "" if isinstance(reason, Unanswered) else f"{type(reason).__name__}: "
            failed = replace(failed, notes=[NOT_REPLAYED.format(f"{kind}{reason}".partition("\n")[0])])
            return BuiltSnapshot(snapshot_without_replay(failed, noticed.frame))

    def _of_update(self, step: PastStep, bad: BadUpdate) -> BuiltSnapshot:
        """The update that made a shard of this rank nan or inf: one call, with the averaged gradients as inputs."""
        run_state, update = self._run_state, bad.update
        history = run_state.history
        slots = run_state.ranks.shards.slots
        parameters = list(parameters_of(bad.optimizer))
        shards = {id(slot.parameter): local_part(slot.parameter.detach()) for slot in slots}
        shards.update(zip(map(id, parameters), bad.shards, strict=True))
        place = step.place - (run_state.iterations.completed - update.step)
        failed = self._failed(replace(step, completed=update.step, place=place, loss=None), "parameter", [], {}, None)
        notes = [] if bad.is_same else [OTHER_SHARDS]
        with unsharded(history.modules, history.optimizers, slots, shards) as stand_ins:
            pairs = zip(parameters, bad.shards, strict=True)
            plain = [stand_ins.get(id(p), torch.nn.Parameter(shard)) for p, shard in pairs]
            if bad.write is not None:
                entries = [write_to(bad.write, parameters, plain)]
                return make_snapshot(
                    replace(failed, entries=entries, stand_ins=stand_ins, notes=notes), self._noticed.frame
                )
            given = Entry(kinds.FUNCTION, give, (), {}, Mode(), name=give.__name__)
            given.target = functools.partial(give, plain, update)
            made = update.entry or Entry(kinds.OPTIMIZER, bad.optimizer, (), {}, Mode())
            settings: dict[str, Any] = {"options": update.options, "scaler": {}, "attributes": None}
            entries = [given, replace(made, target=bad.optimizer, settings=settings)]
            failed = replace(failed, entries=entries, stand_ins=stand_ins, notes=notes, buffers=None)
            with on_plain(bad.optimizer, plain, bad.states):
                return make_snapshot(failed, self._noticed.frame)

    def layers(self, snapshot: Snapshot) -> list[LayerNumbers]:
        """The numbers of every layer in the steps that are kept, up to the one saved, of an event in all; empty where
        that is not possible, or would take too long."""
        run_state, history = self._run_state, self._run_state.history
        seconds = [row.seconds for row in snapshot.timeline if row.seconds is not None]
        names = root_names(history.modules, self._noticed.frame)
        layers = {
            in_root(path or f"<{type(root).__name__}>", names.get(id(root))) or "": layer
            for root in history.modules
            for path, layer in layers_of(root)
        }
        with history.with_earlier():
            can_play = self._noticed.raised is None and history.is_complete and run_state.ranks.is_alone
            past = run_state.past() if can_play else []
            if not past or not seconds or len(past) * sum(seconds) / len(seconds) > _STORY_SECONDS:
                return []
            running = run_state.step_of(run_state.running.entries, run_state.running.memory.saved)
            steps = self._complete([*past, run_state.freezer.lightened(running)]) or []
            last = snapshot.step if snapshot.failure.event is None else steps[-1].completed if steps else 0
            rewind = Rewind(history, steps)
            with rewind.going_back(), quiet_hooks(history.modules, rewind.leaves()):
                return rewind.measured(LayerMeter(layers), last)

    def _has_gap(self) -> bool:
        """True if the loop has handled an exception in this step that may have interrupted a write."""
        running = self._run_state.running
        if self._noticed.raised is None or running.raised is None:
            return bool(running.gaps)
        return any(gap not in (None, running.raised[1]) for gap in running.gaps)

    def _from_the_past(
        self, step: PastStep, ruined: Sequence[torch.Tensor] = ()
    ) -> tuple[BuiltSnapshot | None, list[str]]:
        """The snapshot of the first bad step, or why there is none.

        That is the step that made one of the ``ruined`` parts of the state nan or inf, if there are any; else the first
        one with a bad loss, gradient or parameter.
        """
        run_state, pending = self._run_state, self._noticed.pending
        if not run_state.history.is_complete:
            return None, [NOT_KEPT]
        if not run_state.ranks.is_alone and self._noticed.together is None:
            return None, [NOT_ALL]
        steps = self._complete([*run_state.past(), run_state.freezer.lightened(step, pending)])
        if self._noticed.together is not None:
            return self._from_the_past_together(steps, self._noticed.together), []
        if steps is None:
            return None, [BEGUN_BEFORE]
        made, reasons = self._played(steps, ruined)
        if made is None or made.culprit is None or ruined or not run_state.history.has_worsened(made.culprit):
            return made, reasons
        return self._from_the_past(step, [made.culprit])[0] or made, []

    def _from_the_past_together(self, steps: list[PastStep] | None, together: Meeting) -> BuiltSnapshot:
        """The snapshot of the first bad step, if this rank made it. Raises `SavedElsewhere` if another one did,
        `NothingFound` if going back shows no such step.

        What began with a bad part of the state is played once more by all, to find what made that bad.
        """
        made = others = None
        ruined: list[torch.Tensor] = []
        for is_again in (False, True):
            again, reasons = self._played(steps, ruined) if steps is not None else (None, [BEGUN_BEFORE])
            if steps is None:  # the others are not to wait for this rank
                together.stop(FAILED)
            made, others = (again, reasons) if again is not None or not is_again else (made, others)
            culprit = made.culprit if made is not None else None
            is_ruined = culprit is not None and self._run_state.history.has_worsened(culprit)
            ruined = [culprit] if culprit is not None and is_ruined else []
            if is_again or "ruined" not in together.agree("ruined" if is_ruined else "whole"):
                break
        own = GoneBack.of(made).name if made is not None else GoneBack.NONE.name
        rank = saver_among([GoneBack[name] for name in together.agree(own)], together.rank)
        if rank is None:
            raise NothingFound("; ".join(others or [NOT_SHOWN]))
        if rank != together.rank or made is None:
            raise SavedElsewhere(rank, "a value")
        return made

    def _played(self, steps: list[PastStep], ruined: Sequence[torch.Tensor]) -> tuple[BuiltSnapshot | None, list[str]]:
        history = self._run_state.history
        together = self._noticed.together
        rewind = Rewind(history, steps, ruined, takes_skipped=self._noticed.takes_skipped, together=together)
        try:
            with rewind.going_back():
                with quiet_hooks(history.modules, rewind.leaves()):
                    found = rewind.find()
                if found is None:
                    is_loss = self._noticed.observed_at == "loss" and self._noticed.is_late
                    if is_loss and rewind.skipped and not rewind.notes:
                        raise SkippedLoss(rewind.skipped[0])
                    return None, [*rewind.notes, NOT_SHOWN]
                failed = self._failed_before(found, steps)
                made = make_snapshot(failed, self._noticed.frame)
                if made.culprit is None and not _is_shown(made.snapshot):
                    made = replace(made, culprit=history.newly_bad())
        except CannotGoBack as reason:
            return None, [str(reason)]
        except Stopped as stopped:
            return None, [f"another process has stopped going back ({stopped})"]
        except (SkippedLoss, Parted):
            raise
        except Exception as error:  # of the user's code, which the state of then may not suit
            if rewind.together is not None:
                rewind.together.stop(FAILED)
            pass_on(error)
            return None, [f"playing the steps since the last copy raised {type(error).__name__}: {error}"]
        if made.culprit is None and made.snapshot.fidelity != "exact":
            written = [entry for entry in split(found.step.entries)[0] if entry.writes_state]
            last = replace(found.step, entries=[*([] if found.keep is not None else written), *found.entries])
            made = self._joined(made, failed, [*steps[: steps.index(found.step)], last])
        return made, []

    def _joined(self, made: BuiltSnapshot, failed: FailedStep, steps: list[PastStep]) -> BuiltSnapshot:
        """``made``, or the last of ``steps`` together with those whose graphs or gradients it goes on with.

        The latter if only they fail as training did: then parameters were updated between forward and backward pass.
        """
        last = steps[-1].entries
        if not self._run_state.ranks.is_alone:
            return made
        first = self._run_state.freezer.first_joined([step.entries for step in steps[:-1]], last)
        differentiates = [any(entry.kind is kinds.BACKWARD for entry in step.entries) for step in steps]
        owner = steps[-1]
        if failed.observed_at == "gradient" and not differentiates[-1] and any(differentiates):
            number = max(n for n, is_made in enumerate(differentiates) if is_made)
            owner, first = steps[number], min(number, number if first is None else first)
        if first is None or len(steps) - first > _MOST_JOINED:
            return made
        rewind = Rewind(self._run_state.history, steps)
        try:
            with rewind.going_back():
                saved = rewind.play_until(first)
                joined = replace(
                    failed,
                    entries=_one_after_another(steps[first:]),
                    saved=saved,
                    lead=[],
                    buffers=None,
                    put_back=self._state(),
                    generators=steps[first].generators,
                    completed=owner.completed,
                    notes=rewind.notes,
                )
                other = make_snapshot(joined, self._noticed.frame)
        except Exception as error:  # of the user's code, or because the state of then does not suit
            pass_on(error)
            return made
        is_better = other.snapshot.fidelity == "exact" or (_is_shown(other.snapshot) and not _is_shown(made.snapshot))
        return replace(other, culprit=None) if is_better else made

    def _complete(self, steps: list[PastStep]) -> list[PastStep] | None:
        """The steps with what was made before the last copy for them; ``None`` if that is not known."""
        makers, made, complete = self._run_state.makers(), set[int](), []
        for step in steps:
            entries = self._run_state.freezer.with_makers(step.entries, makers, made)
            if entries is None:
                return None
            complete.append(replace(step, entries=entries))
            made.update(id(tensor) for entry in entries for tensor in iter_tensors(entry.output))
        return complete

    def _failed_before(self, found: Found, steps: list[PastStep]) -> FailedStep:
        """The step that a rewind has found; the live state is where that step began."""
        earlier = [*self._run_state.makers(), *(step.entries for step in steps[: steps.index(found.step)])]
        entries = self._run_state.freezer.with_makers(found.entries, earlier) or found.entries
        failed = self._failed(found.step, found.observed_at, entries, found.saved, found.pending)
        micro_step = found.step.micro_step
        if found.observed_at in ("loss", "output"):  # the step went on from there
            micro_step -= num_backward(found.step.entries) - num_backward(found.entries)
            micro_step += num_backward([self._noticed.pending]) if found.step is steps[-1] else 0
        return replace(
            failed,
            buffers=None,
            put_back=self._state(),
            notes=found.notes,
            gradients=found.gradients,
            likewise=[*(steps[-2].entries if len(steps) > 1 else []), *self._run_state.running.entries],
            keep=found.keep,
            micro_step=micro_step,
        )

    def _state(self) -> Set[int]:
        return {id(tensor) for tensor in self._run_state.history.changing()}

    def _with_graphs_from_before(self, step: PastStep) -> tuple[list[Entry], dict[int, torch.Tensor], Entry | None]:
        """The running step, begun with what earlier steps made with a graph that it goes on with."""
        pending = self._noticed.pending
        earlier = [*self._run_state.makers(), *(past.entries for past in self._run_state.past())]
        if earlier:
            light = self._run_state.freezer.lightened(step, pending)
            entries = self._run_state.freezer.with_makers(light.entries, earlier)
            if entries is not None and len(entries) > len(light.entries):
                return (entries[:-1], light.saved, entries[-1]) if pending else (entries, light.saved, None)
        return step.entries, step.saved, pending

    def _is_begun_before(self, step: PastStep) -> bool:
        """True if the running step goes on with a graph that no step since the last copy has made."""
        freezer, pending = self._run_state.freezer, self._noticed.pending
        light = freezer.lightened(step, pending)
        past = [earlier.entries for earlier in self._run_state.past()]
        return freezer.with_makers(light.entries, past) is None

    def _failed(
        self,
        step: PastStep,
        observed_at: str,
        entries: list[Entry],
        saved: dict[int, torch.Tensor],
        pending: Entry | None,
    ) -> FailedStep:
        run_state, number, loss = self._run_state, step.completed, number_of(step.loss)
        is_noted = run_state.running.is_noted or number != run_state.iterations.completed
        return FailedStep(
            observed_at=observed_at,
            entries=entries,
            saved=saved,
            pending=pending,
            modules=run_state.history.modules,
            buffers=run_state.buffers,
            generators=step.generators,
            completed=number,
            micro_step=step.micro_step,
            timeline=run_state.timeline.until(step.place, number, loss),
            recorded=[row for row in run_state.norms.steps if row.step <= number] if run_state.norms else [],
            optimizers=run_state.history.optimizers,
            compiled=run_state.compiled,
            compilers=tuple(run_state.compilers.values()),
            command=self._command,
            capture=CaptureSettings(
                **self._described,
                **run_state.budget.describe(is_noted=is_noted),
                history_steps=len(run_state.history.steps),
                history_bytes=run_state.history.state.copies.num_bytes,
                **run_state.ranks.describe(),
                compilers=tuple(run_state.compilers) or None,
            ),
        )


def _is_shown(snapshot: Snapshot) -> bool:
    """True if the replay of a step has shown where its failure comes from."""
    return snapshot.failure.call_index is not None or snapshot.failure.input_name is not None


def _one_after_another(steps: Sequence[PastStep]) -> list[Entry]:
    """The entries of several steps, each with the generators that it began with."""
    for step in steps[1:]:
        first = next((entry for entry in step.entries if entry.kind is kinds.MODULE), None)
        if first is not None and step.generators is not None:
            first.generators = step.generators
    return [entry for step in steps for entry in step.entries]


def num_backward(entries: Sequence[Entry | None]) -> int:
    """Backward calls among entries."""
    found = (entry for entry in entries if entry is not None and entry.kind is kinds.BACKWARD)
    return sum(entry.name != AUTOGRAD_GRAD for entry in found)


def _position(entries: list[Entry], wanted: Entry | None) -> int:
    return next((number for number, entry in enumerate(entries) if entry is wanted), len(entries))


def free_path(directory: Path, stem: str) -> Path:
    """``<stem>.repro.pt`` in ``directory``, numbered when that name is taken."""
    for number in range(10_000):
        path = directory / (f"{stem}.repro.pt" if number == 0 else f"{stem}-{number}.repro.pt")
        if not path.exists():
            return path
    raise FileExistsError(f"no free name for {stem} in {directory}")
