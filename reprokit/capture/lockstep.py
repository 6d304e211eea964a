"""What several processes save, where that needs them: all ranks play the same steps and meet before each collective.

With averaged gradients a step is recorded without the others. Under `fully_shard` a forward pass needs all: each rank
records its own step under its own tracer, with FSDP's hooks on, and inside a unit the parameters are whole plain
tensors. What these hooks do is no part of the program. An update needs no other rank: it is recorded on this rank's
shards, as plain tensors, with the averaged gradients as inputs. Last, the first step after which ranks differ.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from reprokit import members, native, torch_private
from reprokit.capture.calls import Backward, OptimizerStep
from reprokit.capture.fidelity import Made
from reprokit.capture.meeting import DONE, Parted, SavedElsewhere, Stopped
from reprokit.capture.replay import Case, PlayObserver, Replay, code_of
from reprokit.capture.save import NOT_ALL, NOT_KEPT, NothingFound, NotKept, why_not_played
from reprokit.capture.structure import iter_tensors
from reprokit.capture.tape import Op, Segment
from reprokit.capture.world import DEFAULT_STATE_BYTES, units_of
from reprokit.errors import pass_on
from reprokit.locate.failure import Failure, RankDifference
from reprokit.locate.kinds import MISMATCH
from reprokit.program.ir import Phase, Ref

if TYPE_CHECKING:
    from reprokit.capture.save import Describing
    from reprokit.program.trace import Tracer

NOT_REPLAYED = (
    "the model is spread over several processes, and the step could not be replayed in one ({}); "
    "the snapshot holds what the modules of this rank were given"
)
APART = "of several processes only DDP, averaging by hand and `fully_shard` are followed"
NOT_TOGETHER = "not all ranks hold copies of the same step, so they did not go back"
OTHER_PARAMETERS = "playing the steps since the last copy did not lead every rank to the parameters that training has"
ONE_PROCESS = "one process cannot show that ranks differ; the snapshot holds the inputs of the step"
_DISTRIBUTED = os.path.join("torch", "distributed", "")


def made(describing: Describing, ops: list[Op], pending: Op | None) -> Made:
    """The failing step of a rank that holds a part of the model, as far as it can be recorded. Raises `NothingFound` if
    another rank has stopped the others."""
    loop, verdict = describing.loop, describing.verdict
    case = describing.now(ops, pending, list(dict.fromkeys(loop.unseen)))
    try:
        if loop.ranks.is_apart:
            raise NotKept(APART)
        if verdict.raised is not None:
            raise NotKept("an exception was raised on one rank")  # the others are inside of a collective
        if verdict.together is None:
            raise NotKept(NOT_ALL)
        if not verdict.is_late:
            return recorded_by_all(describing, case)
        found, reasons = describing.from_the_past()
        if found is not None:
            return found
        raise NothingFound("; ".join(dict.fromkeys(reasons)))
    except (NothingFound, Stopped) as reason:
        raise NothingFound(str(reason)) from reason
    except Exception as reason:
        pass_on(reason)
        kind = "" if isinstance(reason, (NotKept, Parted)) else f"{type(reason).__name__}: "
        case.notes = [NOT_REPLAYED.format(f"{kind}{reason}".partition("\n")[0])]
        return Made(describing.without_replay(case))


def from_the_past(describing: Describing, segments: list[Segment]) -> tuple[Made | None, list[str]]:
    """The first bad step as far as this rank shows it, or why it does not: all ranks play until one of them has found
    something. A bad loss or gradient is recorded by all, the update of a shard by the rank that has it."""
    together = describing.verdict.together
    assert together is not None, "ranks go back together"
    together.said, together.found = [], None
    made, reasons = describing.played(segments, [])
    found = [said for kind in ("loss", "gradient") for said in together.said if said.startswith(kind)]
    if not found:
        return made, reasons
    where, number = found[0].split()[0], int(found[0].split()[1])
    replay = describing.replay(segments)
    with replay.going_back():
        case, inputs = replay.begin(number), describing.loop.tape.inputs
        case.where, case.frame = where, describing.verdict.frame
        case.contents = {n: t for n, t in case.contents.items() if not t.requires_grad or n in inputs}
        if together.found is not None and where == "loss" and together.found.pending is not None:
            case.pending = together.found.pending
            notes = [op.note for op in case.ops]
            case.ops = case.ops[: notes.index(case.pending.note)] if case.pending.note in notes else case.ops
        return recorded_by_all(describing, case), []


def recorded_by_all(describing: Describing, case: Case) -> Made:
    """Record a step in lockstep. A rank with a bad loss of its own stops all before its backward pass, where the others
    raise `Stopped`; without one all record up to their last backward pass."""
    world, together = describing.loop.world, describing.verdict.together
    assert together is not None, "ranks record together"
    if case.pending is None:
        last = max((n for n, op in enumerate(case.ops) if op.kind is Backward), default=len(case.ops))
        where = "gradient" if case.found is None else ""
        case = replace(case, where=where, ops=case.ops[: last + 1])
    with together.playing():
        size = sum({id(p): native.numel(p) * native.element_size(p) for p in world.parameters}.values())
        if size > DEFAULT_STATE_BYTES:
            raise NotKept(f"whole parameters take over {DEFAULT_STATE_BYTES // 2**30} GiB")
        with native.no_grad():
            wholes = [(p, p.full_tensor()) for p in world.parameters if hasattr(p, "full_tensor")]
        stand_ins = {id(p): torch.nn.Parameter(whole, requires_grad=p.requires_grad) for p, whole in wholes}
        return describing.make(replace(case, stand_ins=stand_ins, together=together))


def update_on_shards(describing: Describing, case: Case) -> Made:
    """The update that made a shard of this rank bad, on plain tensors; the live state is where its step began."""
    world = describing.loop.world
    gradients = {id(leaf): gradient for leaf, gradient in case.gradients or ()}
    parts = [(whole, torch_private.shard_of(whole)) for whole in world.parameters]
    stand_ins: dict[int, torch.Tensor] = {
        id(whole): torch.nn.Parameter(native.detach(part), requires_grad=whole.requires_grad)
        for whole, part in parts
        if part is not whole
    }
    for key in stand_ins.keys() & gradients.keys():
        stand_ins[key].grad = torch_private.shard_of(gradients[key])
    plain = {id(optimizer): _on_plain(optimizer, stand_ins) for optimizer in world.optimizers}
    updates = [op for op in case.ops if op.kind is OptimizerStep or op.kind.writes_state(op)]
    ops = [op._replace(target=plain[id(op.target)]) if op.kind is OptimizerStep else op for op in updates]
    return describing.make(replace(case, ops=ops, stand_ins=stand_ins))


def _on_plain(optimizer: torch.optim.Optimizer, stand_ins: Mapping[int, torch.Tensor]) -> torch.optim.Optimizer:
    """An optimizer like this one with this rank's parts of parameters and states, as plain tensors."""
    plain: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(plain).update(vars(optimizer))
    plain.state = collections.defaultdict(dict)
    for key, known in optimizer.state.items():
        parts = {name: torch_private.shard_of(value) for name, value in known.items()}
        plain.state[stand_ins.get(id(key), key)] = parts
    plain.param_groups = [
        {**group, "params": [stand_ins.get(id(parameter), parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return plain


@contextlib.contextmanager
def sharding_unseen(modules: Iterable[torch.nn.Module], tracer: Tracer) -> Iterator[None]:
    """In this context a tracer does not see what the hooks of `fully_shard` do, but for casts of a mixed precision.

    Whole parameters lose their memory when their unit has run, so the program gets copies.
    """
    units = units_of(modules)
    tables = [table for table, is_backward in torch_private.hook_tables(members.parts(units)) if not is_backward]
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
            olds = iter_tensors(given if isinstance(result, tuple) and len(result) == len(given) else given[1:])
            for old, new in zip(list(olds), iter_tensors(result), strict=True):
                value = tracer.value(old)
                if new.dtype != old.dtype:
                    call, value = tracer.make_call("torch.Tensor.to", (old, new.dtype)), tracer.new_value()
                    tracer.record(replace(call, outputs=Ref(value)))
                if new is not old:
                    tracer.alias(new, value)
            return result
        finally:
            tracer.is_silent = False

    return unseen


class _Comparison(PlayObserver):
    """Compares the ranks before every step that a replay plays."""

    def __init__(self, describing: Describing) -> None:
        self.difference: RankDifference | None = None  # the first one
        self.number = -1  # of the step that made it, -1 if the copies differ
        self._describing = describing

    def look(self) -> bool:
        """Compare the ranks here; true if they differ, here or before."""
        verdict, replicas = self._describing.verdict, self._describing.loop.ranks.replicas
        if self.difference is None and verdict.together is not None and replicas is not None:
            self.difference = replicas.compare(verdict.together.meet, verdict.together.rank, verdict.frame)
        return self.difference is not None

    def begin(self, replay: Replay) -> bool:
        self.number += not self.look()
        return False


def first_difference(describing: Describing) -> Made:
    """The step in which the ranks begin to differ. Raises `SavedElsewhere` on all ranks but one, `Parted` if a rank
    does not answer."""
    loop, verdict, together = describing.loop, describing.verdict, describing.verdict.together
    replicas, found = loop.ranks.replicas, verdict.difference
    assert replicas is not None and found is not None, "ranks that differ have met"
    running = Segment(loop.tape.running(), loop.mark())
    step, note = Segment(running.ops, replace(running.mark, step=found.began_at)), NOT_KEPT
    if together is None and loop.world.is_complete:
        note = NOT_TOGETHER
    elif together is not None:
        segments, live, comparison = [*describing.segments(), running], replicas.digest(), _Comparison(describing)
        replay = describing.replay(segments)
        try:
            with replay.going_back():
                replay.play(comparison)
                if not comparison.look() or replicas.digest() != live:
                    note = "; ".join(replay.notes) or OTHER_PARAMETERS
                else:
                    note = ONE_PROCESS
                together.stop(DONE)
        except Parted:
            raise
        except Exception as error:
            note = why_not_played(error)
        if set(together.exchange("played", note)) != {ONE_PROCESS}:
            note = OTHER_PARAMETERS if note == ONE_PROCESS else note
        elif comparison.difference is not None:
            number = comparison.number
            step = segments[max(number, 0)]
            began = step.mark.step
            before = segments[number - 1].mark.step if number > 0 else found.equal_after
            cause = "" if number >= 0 else f"they differ before {f'step {began}' if began else 'the first step'}"
            is_exact = number >= 0 or not began
            found = replace(comparison.difference, equal_after=before, began_at=began, is_exact=is_exact, cause=cause)
    if found.ranks[0] != loop.ranks.rank:
        raise SavedElsewhere(f"`{found.parameter}` differs on rank {found.ranks[0]}, which saves its step")
    mark = replace(step.mark, place=running.mark.place - (running.mark.step - step.mark.step))
    snapshot = describing.without_replay(Case("parameter", step.ops, None, mark, frame=verdict.frame, notes=[note]))
    return Made(replace(snapshot, failure=Failure(Phase.OPTIMIZER, MISMATCH, "ranks", difference=found)))
