"""What several processes save: the step that all of them have played again, from the rank that made the bad value.

With averaged gradients ranks play together only to go back, because a step that is recorded needs no other rank. Under
`fully_shard` a forward pass needs all: each rank records its own step under its own tracer, with FSDP's hooks on, and
inside a unit the parameters are whole plain tensors. What these hooks do is no part of the program. An update needs no
other rank: it is recorded on this rank's shards, as plain tensors, with the averaged gradients as inputs.
"""

from __future__ import annotations

import collections
import contextlib
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from reprokit import torch_private
from reprokit.capture.calls import Backward, Function, Kind, OptimizerStep, Root, RootNote
from reprokit.capture.fidelity import Made
from reprokit.capture.meeting import DONE, Meeting, Parted, SavedElsewhere, Stopped
from reprokit.capture.replay import Found, Replay, TracedPlayer, code_of, quiet_hooks
from reprokit.capture.save import NOT_ALL, NOT_KEPT, NOT_SHOWN, Case, NothingFound
from reprokit.capture.structure import iter_tensors
from reprokit.capture.tape import Mark, Op, Segment
from reprokit.capture.world import DEFAULT_STATE_BYTES, give_gradients, options_of, set_options
from reprokit.errors import pass_on
from reprokit.locate.differences import MISMATCH
from reprokit.locate.failure import Failure, RankDifference
from reprokit.program.ir import Phase, Ref, Site
from reprokit.program.sites import make_site
from reprokit.program.trace import current_mode

if TYPE_CHECKING:
    from reprokit.capture.replicas import Replicas
    from reprokit.capture.save import Describing
    from reprokit.program.trace import Tracer

NOT_REPLAYED = (
    "the model is spread over several processes, and the step could not be replayed in one ({}); "
    "the snapshot holds what the modules of this rank were given"
)
APART = "of several processes only DDP, averaging by hand and `fully_shard` are followed"
RANKS = "ranks"  # the reference of such a mismatch
NOT_TOGETHER = "not all ranks hold copies of the same step, so they did not go back"
OTHER_PARAMETERS = "playing the steps since the last copy did not lead every rank to the parameters that training has"
ONE_PROCESS = "one process cannot show that ranks differ; the snapshot holds the inputs of the step"
_ORDER = ("loss", "gradient", "parameter")  # what ranks find in one step: the first is the cause
_DISTRIBUTED = os.path.join("torch", "distributed", "")


class _Unanswered(Exception):
    """A step cannot be recorded by all ranks, as the text says."""


# -- averaged gradients --------------------------------------------------------------------------------------------


def from_the_past(describing: Describing, segments: list[Segment]) -> Made:
    """The first bad step, if this rank made it. Raises `SavedElsewhere` if another one did, `NothingFound` if going
    back shows no such step.

    What began with a bad part of the state is played once more by all, to find what made that bad.
    """
    together, world = describing.verdict.together, describing.loop.world
    assert together is not None, "ranks go back together"
    if together.is_sharded:
        return _sharded_past(describing, segments, together)
    made, others = describing.played(segments, [])
    culprit = made.culprit if made is not None else None
    ruined = [culprit] if culprit is not None and world.has_worsened(culprit) else []
    if "ruined" in together.agree("ruined" if ruined else "whole"):
        again, reasons = describing.played(segments, ruined)
        made, others = (again, reasons) if again is not None else (made, others)
    return _of_saver(together, made, others)


def _of_saver(together: Meeting, made: Made | None, reasons: Sequence[str]) -> Made:
    """The step of the rank that saves: each whose own loss is bad, else the first one whose step shows the cause."""
    own = "none"
    if made is not None:
        own = "seen" if not made.is_shown else "own" if made.snapshot.observed_at == "loss" else "shown"
    outcomes = together.agree(own)
    if made is not None and own == "own" and not together.is_sharded:
        return made
    rank = next((outcomes.index(one) for one in ("own", "shown", "seen") if one in outcomes), None)
    if rank is None:
        raise NothingFound("; ".join(reasons) or NOT_SHOWN)
    if rank != together.rank or made is None:
        raise SavedElsewhere(rank)
    return made


# -- `fully_shard` -------------------------------------------------------------------------------------------------


def made(describing: Describing, ops: list[Op], pending: Op | None) -> Made:
    """The failing step of a rank that holds a part of the model, as far as it can be recorded."""
    loop, verdict = describing.loop, describing.verdict
    mark, notes = describing.running_mark(pending), list(dict.fromkeys(loop.unseen))
    try:
        if loop.ranks.is_apart:
            raise _Unanswered(APART)
        if verdict.raised is not None:
            return _failing_call(describing, ops, mark)
        if verdict.together is None:
            raise _Unanswered(NOT_ALL)
        if verdict.is_late:
            found, reasons = describing.from_the_past()
            if found is None:
                raise NothingFound("; ".join(reasons))
            return found
        return _recorded_by_all(describing, verdict.together, describing.now(verdict, ops, pending, mark, None, notes))
    except (SavedElsewhere, NothingFound):
        raise
    except Exception as reason:
        pass_on(reason)
        first = next(iter(loop.ranks.culprits()), None) if verdict.together is not None else None
        if first is not None and first != loop.ranks.rank:
            raise SavedElsewhere(first) from reason
        kind = "" if isinstance(reason, (_Unanswered, Parted, Stopped)) else f"{type(reason).__name__}: "
        notes = [NOT_REPLAYED.format(f"{kind}{reason}".partition("\n")[0])]
        kept = [op for op in ops if not (op.kind.writes_state(op) or op.kind is OptimizerStep)]
        case = Case(verdict.where, kept, pending, mark, True, verdict.frame, raised=verdict.raised, notes=notes)
        return Made(describing.without_replay(case))


@dataclass(slots=True)
class _InsideNote(RootNote):
    root: torch.nn.Module


class _Inside(Root):
    """The call of a module inside of a root, by itself."""

    @classmethod
    def trace(cls, recording: TracedPlayer, op: Op, args: Any, kwargs: Any) -> Any:
        recording.tracer.enter_module(op.note.root)
        try:
            return cls.play(recording, op, args, kwargs)
        finally:
            recording.tracer.exit_module()


def _failing_call(describing: Describing, ops: list[Op], mark: Mark) -> Made:
    """The call that raised, by itself, while the other ranks are inside of a collective.

    Of a root the innermost module that was running: its parameters are whole as long as it runs.
    """
    loop, verdict = describing.loop, describing.verdict
    raised = loop.recorder.raised
    op = ops[-1] if raised is not None and ops and ops[-1].note is raised[1].note else None
    if op is None or raised is None or op.kind not in (Root, Function):
        raise _Unanswered("an exception was raised on one rank")
    if op.kind is Root:
        frames = [frame for frame, _ in traceback.walk_tb(raised[0].__traceback__)]
        called = [frame.f_locals for frame in frames if frame.f_code is torch_private.call_impl_code]
        module, args, kwargs = (called[-1][name] for name in ("self", "args", "kwargs"))
        if any(torch_private.shard_of(parameter) is not parameter for parameter in module.parameters()):
            raise _Unanswered("an exception was raised on one rank, outside of the modules that are gathered")
        note = _InsideNote(module.training, op.note.rng, None, None, None, op.target)
        args, kwargs = loop.tape.encode(args), loop.tape.encode(kwargs)
        op = Op(_Inside, module, args, kwargs, (), op.code, op.instruction, op.mode, note)
    case = Case(verdict.where, [op], None, mark, True, verdict.frame, raised=verdict.raised)
    return describing.make(case)


def _sharded_past(describing: Describing, segments: list[Segment], together: Meeting) -> Made:
    """Like `from_the_past`: all ranks play until one of them finds something bad, then all record that step, unless it
    is an update."""
    loop, world, verdict = describing.loop, describing.loop.world, describing.verdict
    made, reasons = None, [NOT_SHOWN]
    takes_skipped, copy = loop.failures.takes_skipped, world.copies[-1]
    replay = Replay(world, loop.tape, segments, copy, takes_skipped=takes_skipped, together=together)
    together.said = ()
    try:
        with replay.going_back():
            with quiet_hooks(world.modules, replay.leaves()):
                found = replay.find()
            reasons += replay.notes
            if found is not None:
                made = _update_on_shards(describing, found, replay.segments)
    except Stopped as stopped:
        together.said = stopped.answers
    answers = [(answer.partition(" ")[0], answer, rank) for rank, answer in enumerate(together.said)]
    bad = sorted((_ORDER.index(where), rank, answer) for where, answer, rank in answers if where in _ORDER)
    if not bad:
        raise NothingFound("; ".join(dict.fromkeys(reasons)))
    _, culprit, answer = bad[0]
    where, _, number = answer.partition(" ")
    if where == "parameter":
        if made is None or culprit != together.rank:
            raise SavedElsewhere(culprit)
        return made
    again = Replay(world, loop.tape, segments, copy, together=together)
    with again.going_back():
        with quiet_hooks(world.modules, again.leaves()):
            ops, contents = again.begin(int(number))
        found = replay.last
        pending = found.pending if found is not None and where == "loss" and culprit == together.rank else None
        place = next((n for n, op in enumerate(ops) if pending is not None and op.note is pending.note), None)
        case = Case(
            where,
            ops[:place] if place is not None else ops,
            pending,
            replace(segments[int(number)].mark),
            False,
            verdict.frame,
            contents=contents,
            notes=again.notes,
        )
        return _recorded_by_all(describing, together, case)


def _recorded_by_all(describing: Describing, together: Meeting, case: Case) -> Made:
    """Record a step in lockstep. The rank that has a pending backward call stops all before that, and saves; without
    one, all record up to their last backward pass. Raises `SavedElsewhere` on the other ranks."""
    world = describing.loop.world
    if case.pending is None:
        last = max((n for n, op in enumerate(case.ops) if op.kind is Backward), default=len(case.ops))
        case = replace(case, where="gradient", ops=case.ops[: last + 1])
    made, reasons = None, [NOT_SHOWN]
    try:
        with together.playing():
            size = sum({id(p): p.numel() * p.element_size() for p in world.parameters}.values())
            if size > DEFAULT_STATE_BYTES:
                raise _Unanswered(f"whole parameters take over {DEFAULT_STATE_BYTES // 2**30} GiB")
            stand_ins = {id(p): _whole(p) for p in world.parameters if hasattr(p, "full_tensor")}
            made = describing.make(replace(case, stand_ins=stand_ins, together=together))
    except Stopped as stopped:
        culprit = next((rank for rank, answer in enumerate(stopped.answers) if answer == f"{DONE} loss"), None)
        if culprit is not None:
            raise SavedElsewhere(culprit) from stopped
        reasons = [str(stopped)]
    if case.pending is not None and made is not None:
        return made
    return _of_saver(together, made, reasons)


def _whole(parameter: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.nn.Parameter(parameter.full_tensor(), requires_grad=parameter.requires_grad)


class _Gradients(Kind):
    """Gradients are there: pairs of parameters and gradients, which are inputs of the program."""

    @classmethod
    def writes_state(cls, op: Op) -> bool:
        return True

    @classmethod
    def trace(cls, recording: TracedPlayer, op: Op, args: Any, kwargs: Any) -> None:
        with torch.DisableTorchFunction():
            give_gradients(op.target)


def _update_on_shards(describing: Describing, found: Found, segments: Sequence[Segment]) -> Made:
    """The update that made a shard of this rank bad; the live state is where its step began."""
    world = describing.loop.world
    gradients = {id(leaf): gradient for leaf, gradient in found.gradients or ()}
    stand_ins: dict[int, torch.Tensor] = {}
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for parameter in world.parameters:
        part = torch_private.shard_of(parameter)
        if part is not parameter:
            plain = stand_ins[id(parameter)] = torch.nn.Parameter(part.detach(), requires_grad=parameter.requires_grad)
            if id(parameter) in gradients:
                pairs.append((plain, torch_private.shard_of(gradients[id(parameter)])))
    given = Op(_Gradients, pairs, (), {}, (), None, 0, current_mode(), None)
    ops = [given, *(op for op in found.ops if op.kind is OptimizerStep or op.kind.writes_state(op))]
    case = Case(
        "parameter",
        ops,
        None,
        replace(segments[found.number].mark),
        False,
        describing.verdict.frame,
        contents=found.contents,
        notes=found.notes,
        stand_ins=stand_ins,
    )
    with contextlib.ExitStack() as stack:
        for optimizer in world.optimizers:
            stack.enter_context(_on_plain(optimizer, stand_ins))
        return describing.make(case)


@contextlib.contextmanager
def _on_plain(optimizer: torch.optim.Optimizer, stand_ins: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """An optimizer with this rank's parts of its parameters and states, as plain tensors."""
    groups = [group["params"] for group in optimizer.param_groups]
    state, options = optimizer.state, options_of(optimizer)
    parts = {
        stand_ins.get(id(key), key): {
            name: torch_private.shard_of(value) if isinstance(value, torch.Tensor) else value
            for name, value in known.items()
        }
        for key, known in state.items()
    }
    optimizer.state = collections.defaultdict(dict, parts)
    try:
        for group in optimizer.param_groups:
            group["params"] = [stand_ins.get(id(parameter), parameter) for parameter in group["params"]]
        yield
    finally:
        optimizer.state = state
        set_options(optimizer, options)
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters


@contextlib.contextmanager
def sharding_unseen(modules: Iterable[torch.nn.Module], tracer: Tracer) -> Iterator[None]:
    """In this context a tracer does not see what the hooks of `fully_shard` do, but for casts of a mixed precision.

    Whole parameters lose their memory when their unit has run, so the program gets copies.
    """
    parts = {id(part): part for module in modules for part in module.modules()}.values()
    units: list[Any] = [part for part in parts if torch_private.is_sharded(type(part))]
    tables = [table for table, is_backward in torch_private.hook_tables(units) if not is_backward]
    before = [(table, dict(table)) for table in tables]
    tracer.borrows = not units
    try:
        for table in tables:
            for key, hook in list(table.items()):
                if _DISTRIBUTED in getattr(code_of(hook), "co_filename", ""):
                    table[key] = _unseen(hook, tracer)
        yield
    finally:
        for table, content in before:
            table.update(content)
        for unit in units:
            unit.reshard()


def _unseen(hook: Any, tracer: Tracer) -> Any:
    def unseen(module: torch.nn.Module, *given: Any) -> Any:
        tracer.is_silent = True
        try:
            result = hook(module, *given)
            olds = list(iter_tensors(given if isinstance(result, tuple) and len(result) == len(given) else given[1:]))
            for old, new in zip(olds, iter_tensors(result), strict=True):
                if new is not old:
                    _hand_on(tracer, old, new)
            return result
        finally:
            tracer.is_silent = False

    return unseen


def _hand_on(tracer: Tracer, old: torch.Tensor, new: torch.Tensor) -> None:
    value = tracer.value(old)
    if new.dtype != old.dtype:
        call = tracer.make_call("torch.Tensor.to", (old, new.dtype))
        value = tracer.new_value()
        tracer.record(replace(call, outputs=Ref(value)))
    tracer.alias(new, value)


def gathered(modules: Iterable[torch.nn.Module]) -> dict[int, torch.Tensor]:
    """The whole parameters inside of units, by the ``id`` of the spread ones."""
    parts = {id(part): part for module in modules for part in module.modules()}.values()
    units = [part for part in parts if torch_private.is_sharded(type(part))]
    return {id(spread): whole for unit in units for spread, whole in torch_private.gathered(unit)}


# -- ranks that differ ---------------------------------------------------------------------------------------------


class _Meter:
    """Is shown every call that a replay plays, and compares the ranks when a step is over.

    ``difference`` is the first one, ``number`` the position of its step, ``-1`` if the ranks differ before they have
    played any. ``is_by_update``: an optimizer has made it. ``site`` is where it has stepped, or where this rank has
    written parameters in that step.
    """

    def __init__(self, together: Meeting, replicas: Replicas, describing: Describing) -> None:
        self.difference: RankDifference | None = None
        self.number = -1
        self.is_by_update = False
        self.site: Site | None = None
        self._together, self._replicas, self._frame = together, replicas, describing.verdict.frame
        self._mark: Mark | None = None
        self._updated = self._then = ""  # the digests before the update, and before a write
        self._update: Op | None = None

    def before(self, mark: Mark, op: Op) -> None:
        """Note what an update begins with; a new step ends the one before."""
        if mark is not self._mark:
            self.end_step()
            if self.difference is None:
                self._mark, self._updated, self.site, self._update = mark, "", None, None
                self.number += 1
        if self.difference is None and op.kind is OptimizerStep:
            self._updated, self._update = self._replicas.digest(), op
        elif self.difference is None and op.kind.writes_state(op):
            self._then = self._replicas.digest()

    def after(self, op: Op) -> None:
        """Note the line that has written parameters."""
        if self.difference is None and op.kind.writes_state(op) and self._replicas.digest() != self._then:
            self.site = _site(op)

    def end_step(self) -> None:
        """Compare the ranks after the step that was played last, or before the first one; not after a difference."""
        if self.difference is not None:
            return
        self.difference = self._replicas.compare(self._together.tell, self._together.rank, self._frame)
        if self.difference is not None:
            found, updated = self.difference, self._together.tell(self._updated)
            self.is_by_update = updated[found.ranks[0]] == updated[found.reference] != ""
            if self.is_by_update and self._update is not None:
                self.site = _site(self._update)

    def dated(self, segments: Sequence[Segment], seen: RankDifference) -> RankDifference:
        """The difference that was found by playing, with its step and what made it."""
        found, number = self.difference, self.number
        assert found is not None
        began = segments[max(number, 0)].mark.step
        if number < 0:
            cause = f"they differ before {f'step {began}' if began else 'the first step'}"
            return replace(found, equal_after=seen.equal_after, began_at=began, is_exact=not began, cause=cause)
        before = segments[number - 1].mark.step if number else seen.equal_after
        cause = "the updates of the optimizers differ" if self.is_by_update else ""
        if self.site is not None and not self.is_by_update:
            cause = f"written outside of an optimizer, by rank {found.ranks[0]} at {self.site.place}"
        return replace(found, equal_after=before, began_at=began, is_exact=True, cause=cause)


def _site(op: Op) -> Site | None:
    library = getattr(op.note, "library", None)
    return make_site(op.code, op.instruction, library) if op.code is not None else None


def first_difference(describing: Describing) -> Made:
    """The step in which the ranks begin to differ. Raises `SavedElsewhere` on all ranks but one, `Parted` if a rank
    does not answer."""
    loop, verdict = describing.loop, describing.verdict
    replicas, meeting, found = loop.ranks.replicas, loop.ranks.meeting, verdict.difference
    assert replicas is not None and meeting is not None and found is not None, "ranks that differ have met"
    running, meter = Segment(loop.tape.running(), loop.mark()), None
    step = Segment(running.ops, replace(running.mark, step=found.began_at))
    note = NOT_TOGETHER if loop.world.is_complete else NOT_KEPT
    together = loop.ranks.together(has_difference=True)
    if together is not None:
        segments = [*describing.segments(), running]
        meter, note = _played_by_all(describing, replicas, together, segments)
        if meter is not None and meter.difference is not None:
            step, found = segments[max(meter.number, 0)], meter.dated(segments, found)
    if found.ranks[0] != meeting.rank:
        raise SavedElsewhere(found.ranks[0], f"`{found.parameter}`")
    mark = replace(step.mark, place=running.mark.place - (running.mark.step - step.mark.step))
    case = Case("parameter", step.ops, None, mark, False, verdict.frame, notes=[note])
    failure = Failure(Phase.OPTIMIZER, MISMATCH, RANKS, difference=found)
    if meter is not None:
        failure = replace(failure, phase=Phase.OPTIMIZER if meter.is_by_update else Phase.FORWARD, site=meter.site)
    return Made(replace(describing.without_replay(case), failure=failure))


def _played_by_all(
    describing: Describing, replicas: Replicas, together: Meeting, segments: list[Segment]
) -> tuple[_Meter | None, str]:
    """What playing all steps has found, and a note: why nothing, or that one process cannot show it."""
    world, live, reason = describing.loop.world, replicas.digest(), ""
    replay = Replay(world, describing.loop.tape, segments, world.copies[-1], together=together)
    meter = _Meter(together, replicas, describing)
    try:
        with replay.going_back(), quiet_hooks(world.modules, replay.leaves()):
            meter.end_step()  # of the copies
            replay.play_until(len(segments), meter)
            meter.end_step()
            if meter.difference is None or replicas.digest() != live:
                reason = "; ".join(replay.notes) or OTHER_PARAMETERS
            together.stop(DONE)
    except Stopped as stopped:
        reason = f"another process has stopped going back ({stopped})"
    except Parted:
        raise
    except Exception as error:  # of the user's code, which the state of then may not suit
        pass_on(error)
        reason = f"playing the steps since the last copy raised {type(error).__name__}: {error}"
    if set(together.agree("other" if reason else "same")) == {"same"}:
        return meter, ONE_PROCESS
    return None, reason or OTHER_PARAMETERS
