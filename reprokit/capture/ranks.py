"""Several processes: who is there, how they agree at an update, and how they save and stop together.

Every rank comes to the same updates. Averaged gradients give all ranks the same bits, so they see the same bad gradient
in the same step, and exchange nothing while training is healthy but one `Vote` before a copy of the state. Where
parameters are spread (`fully_shard`), one look into the store before each update takes the place of the averaged
gradient: a rank whose loss is bad warns the others before its backward pass, which all have gone through by then. Of a
bad shard it warns for the next update, because the others may be past this one; then all go back.

Over a failure all exchange a `Vote` too: then they go back together, or each records its running step, and the rank
that shows the cause saves. Models that are spread in another way (tensor parallel modules, pipelines, FSDP1) are not
followed: there each rank saves what it sees, without a replay, and stops alone. A rank that is gone stops nobody.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from reprokit import members, torch_private
from reprokit.capture import lockstep
from reprokit.capture.fidelity import has_origin
from reprokit.capture.meeting import Late, Meeting, Parted, Replicas, SavedElsewhere
from reprokit.capture.save import NOT_ALL, NothingFound, Verdict
from reprokit.capture.stand_ins import as_called
from reprokit.capture.tape import MOST_BYTES
from reprokit.capture.world import gathered
from reprokit.native import clock
from reprokit.own_work import passed_over
from reprokit.words import counted

if TYPE_CHECKING:
    from reprokit.capture.judge import Outcome, Pending
    from reprokit.capture.loop import Loop
    from reprokit.snapshot.format import Snapshot

# Words of gloo, NCCL and the store about a process that is not there any more.
_OF_PEER = re.compile(r"gloo|NCCL|Connection (?:closed|reset) by peer|Broken pipe|ProcessGroup", re.IGNORECASE)
TO_SAVE = 600.0  # seconds for another rank to save its step
TO_SEE = 30.0  # seconds from one rank's optimizer to another's: both come from the same averaging
AT_COPY = 30.0  # the same, or one rank makes more steps than another
AT_END = 20.0  # seconds; one rank may evaluate or save the model while the others have nothing to do any more
_FIRST_COPY = 2  # steps: a graph that a step may not use again is used again in the next one


class Vote(NamedTuple):
    """What a rank sends to the others before all copy their states, and when a step has failed."""

    place: str  # of its last copy, and the step since; empty if it cannot go back
    is_state_bad: bool
    wanted: int  # steps to the next copy by what a copy costs
    most: int  # steps that memory allows
    holds: bool  # it takes copies
    digest: str  # of its parameters, if they are compared
    is_bad: bool  # its running step is, and the loop has not skipped it


class Ranks:
    """The state of the other processes as seen from this one.

    Gradients are averaged over all of them (``is_parallel``), or parameters spread by `fully_shard` (``is_sharded``) or
    in another way (``is_apart``). All ranks hold copies of their state if the training ``goes_back``.
    """

    _runs = 0

    def __init__(self, loop: Loop) -> None:
        self.is_parallel = self.is_sharded = self.is_apart = self.goes_back = False
        self.is_alone = True  # this process trains by itself
        self.meeting: Meeting | None = None  # where the ranks copy their state together, until one does not come
        self.due_at = _FIRST_COPY  # steps, of the next copies
        self.rank: int | None = None
        self.replicas: Replicas | None = None  # where ranks are to be compared
        self._loop = loop
        self._is_manual = False  # the loop itself averages
        self._size = 1
        self._others: Meeting | None = None  # the meeting; also when no copies are taken there any more
        Ranks._runs += 1
        self._prefix = f"reprokit/{Ranks._runs}"

    def meet(self) -> None:
        """A new root or optimizer was met: look at what is trained."""
        if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
            return
        self.rank, self._size = distributed.get_rank(), distributed.get_world_size()
        modules, fsdp = self._loop.world.modules, sys.modules.get("torch.distributed.fsdp")
        kinds = {type(part) for module in modules for part in members.modules(module)}
        wrapper, other = torch.nn.parallel.DistributedDataParallel, getattr(fsdp, "FullyShardedDataParallel", ())
        self.is_parallel = self._is_manual or any(issubclass(kind, wrapper) for kind in kinds)
        self.is_sharded = any(map(torch_private.is_sharded, kinds))
        is_apart = "torch.distributed.pipelining.stage" in sys.modules or any(issubclass(one, other) for one in kinds)
        is_apart |= any(hasattr(p, "to_local") for module in modules for p in members.parameters(module))
        if is_apart and not (self.is_sharded or self._others is not None):
            self.is_apart, self.is_parallel = True, False
            self._loop.world.give_up()  # going back would need the parameters of the other processes
        self.is_alone = not (self.is_parallel or self.is_sharded)
        if not self.is_alone and self._others is None:
            store, who = torch_private.default_store(), (self._prefix, self.rank, self._size)
            self.meeting = self._others = Meeting(store, *who, is_sharded=self.is_sharded)
            self.goes_back = True

    def meet_averaging(self, group: Any) -> None:
        """The loop averages gradients over a group of processes by itself, over all if that is ``None``."""
        is_part = group is not None and distributed.get_world_size(group) < distributed.get_world_size()
        if self.replicas is not None and is_part:
            self.replicas.is_off = True
        if not (self._is_manual or self.is_apart or self.is_sharded):
            self._is_manual = True
            self.due_at = self._loop.iterations.total + _FIRST_COPY
            self.meet()

    def compare(self) -> None:
        """Compare the parameters that all ranks hold a copy of."""
        self.replicas = Replicas(lambda: self._loop.world.modules)

    def describe(self) -> dict[str, Any]:
        """For the snapshot: the rank and the number of processes, nothing for a single process."""
        return {} if self.rank is None else {"rank": self.rank, "world_size": self._size}

    def is_of_peer(self, error: BaseException) -> bool:
        """True for an exception of a collective whose other processes have gone: it says nothing about this one."""
        return self.rank is not None and isinstance(error, RuntimeError) and _OF_PEER.search(str(error)) is not None

    def before_backward(self, is_bad: bool) -> None:
        """A backward call begins, from a start that may be bad."""
        if is_bad and self.is_sharded and self._others is not None and self._loop.judge.pending is not None:
            self._others.warn(self._loop.iterations.total)

    def withdraw(self) -> None:
        """The loop has skipped the step in which this rank had something bad."""
        if self._others is not None:
            self._others.warn(None)

    def at_update(self, pending: Pending | None, outcome: Outcome | None, *, is_bad: bool) -> None:
        """An optimizer is about to use its gradients, of which some are bad on this rank if it ``is_bad``."""
        loop, others, is_own = self._loop, self._others, outcome != "skipped"
        if self.is_sharded and others is not None:
            update, is_bad_here = loop.iterations.total, is_bad
            is_bad = others.is_warned(update)
            if is_bad_here and not is_bad:
                others.warn(update + 1)
            is_own = is_own and others.warned is not None
        if not is_bad:
            if outcome == "failed":
                self._fail_together(None)
            else:
                loop.act(outcome, pending)
            return
        votes: list[Vote] | None = []
        with loop.failures.until_saved():  # another rank may end meanwhile
            try:
                votes = self._ask("failure", TO_SEE, loop.world.newly_bad() is not None, is_bad=is_own)
            except Late:
                if not self.is_sharded:
                    seen = f"averaged gradients are bad on rank {self.rank} at step {loop.iterations.completed}"
                    loop.failures.session.say(f"{seen}, and not on every rank; rank {self.rank} saves its step")
                    votes = None
            except Parted:
                pass
            if votes and not any(vote.is_bad for vote in votes):
                loop.act(outcome, pending)
            else:
                self._fail_together(votes, stops_alone=votes is None)

    def at_skip(self, pending: Pending) -> None:
        """A grad scaler has left out the update of a bad loss; the others take it for an overflow like any other."""
        if self.is_sharded:  # no step is recorded without the other ranks
            self._loop.judge.pending = None
            self._loop.act("skipped", pending)
        else:
            self._fail_together(None)

    def end_update(self) -> None:
        """A step is over: one that holds too much until the next copy of all ranks is not kept."""
        if self.meeting is not None and self._loop.tape.num_bytes > 2 * MOST_BYTES:
            self._loop.world.interrupt()
            self._loop.tape.forget()

    def _fail_together(
        self, votes: Sequence[Vote] | None, where: str = "gradient", *, stops_alone: bool = False
    ) -> None:
        """Something is bad, or ranks differ: one rank saves, and all stop in the same step. ``votes`` are those of
        all ranks, none if one is gone, ``None`` if only this one has seen it, which goes on then or ``stops_alone``."""
        frame, failures, session = sys._getframe(1), self._loop.failures, self._loop.failures.session
        all_stop, others = stops_alone, self._others
        try:
            with failures.until_saved():
                try:
                    self._save(frame, votes, where)
                except SavedElsewhere as elsewhere:
                    session.say(str(elsewhere))
                except Parted as reason:
                    session.say(f"nothing was saved, because a rank did not answer ({reason})")
                session.leave()
                if votes is not None:
                    try:
                        all_stop = others is not None and bool(others.exchange("done", "", TO_SAVE))
                    except Parted as reason:  # when the rank that keeps the store has ended, all were done
                        all_stop = reason.__cause__ is not None
                    all_stop = all_stop or failures.is_terminated
        except Exception as error:
            session.switch_off(error)
            return
        if all_stop:
            session.stop()
        elif session.stops:
            session.say("the other processes have not seen it, so the training goes on, unwatched")
        self.leave()

    def _save(self, frame: FrameType, votes: Sequence[Vote] | None, where: str) -> None:
        """Save the step, of the past if the state of a rank is bad. Raises `SavedElsewhere` if another rank does."""
        loop, failures, pending = self._loop, self._loop.failures, self._loop.judge.pending
        now = Verdict("gradient", frame)
        if pending is not None:
            loop.timeline.loss, op = pending.loss, failures.op_of(pending)
            now = Verdict("loss", frame, op, is_late=op is None and not self.is_sharded)
        if not votes:  # each rank for itself
            is_sure = votes is None or pending is not None or self.rank == 0
            failures.save(now, None if is_sure else has_origin)
            return
        places = {vote.place for vote in votes}
        together = self._others if len(places) == 1 and "" not in places else None
        if where == "ranks":
            assert self.replicas is not None and self._others is not None, "ranks that differ have met"
            found = self.replicas.compare(self._others.exchange, self._others.rank, frame)
            failures.save(Verdict("parameter", frame, is_late=True, difference=found, together=together))
            return
        first = next((rank for rank, vote in enumerate(votes) if vote.is_bad), 0)
        is_past = together is not None and any(vote.is_state_bad for vote in votes)
        if is_past and self._save_one(Verdict(where, frame, is_late=True, together=together), first):
            return
        self._save_one(replace(now, together=self._others) if self.is_sharded else now, first)

    def _save_one(self, verdict: Verdict, first: int) -> bool:
        """Save the step of the culprit: the first rank with a bad loss of its own, else the first one whose step shows
        where the bad value comes from, else the first one. ``False`` on all ranks if none has a step.

        Raises `SavedElsewhere` on the others. If one does not answer, the ``first`` bad rank saves, and each that shows
        the cause.
        """
        others, loop, has_asked = self._others, self._loop, False
        assert others is not None, "ranks have met"

        def is_ours(snapshot: Snapshot | None) -> bool:
            nonlocal has_asked
            has_asked, own = True, "none"
            if snapshot is not None:
                own = "loss" if snapshot.observed_at == "loss" else "shown" if has_origin(snapshot) else "seen"
            try:
                found = others.exchange("culprit", own, TO_SAVE)
            except Parted:
                return own in ("loss", "shown") or (own == "seen" and others.rank == first)
            rank = next((found.index(one) for one in ("loss", "shown", "seen") if one in found), others.rank)
            if rank != others.rank:
                raise SavedElsewhere(f"the first bad value is that of rank {rank}, which saves its step")
            return snapshot is not None

        try:
            path = loop.failures.save(verdict, is_ours)
        except (NothingFound, Parted) as reason:
            path = None
            loop.unseen.append(f"{NOT_ALL} ({reason})" if isinstance(reason, Parted) else str(reason))
        return path is not None or (not has_asked and is_ours(None))

    def together(self) -> Meeting | None:
        """Where all ranks play the steps since their copies; ``None`` if these are not those of the same steps."""
        with contextlib.suppress(Parted):
            places = {vote.place for vote in self._ask("asked", AT_COPY, False)} if self.meeting is not None else {""}
            return self._others if len(places) == 1 and "" not in places else None
        return None

    made = staticmethod(lockstep.made)
    recorded_by_all = staticmethod(lockstep.recorded_by_all)
    update_made = staticmethod(lockstep.update_on_shards)
    from_the_past = staticmethod(lockstep.from_the_past)
    difference_made = staticmethod(lockstep.first_difference)
    recording = staticmethod(lockstep.sharding_unseen)

    def gathered(self) -> dict[int, torch.Tensor]:
        """The whole parameters that units of `fully_shard` have, by the ``id`` of the spread ones."""
        return gathered(self._loop.world.modules) if self.is_sharded else {}

    def check_together(self, started: float, *, is_end: bool = False) -> float:
        """All ranks check their state before they copy it, and go back if one is bad; ``started``, less the wait.

        ``is_end``: the last step is over, and no other one will be. A rank that does not answer ends all copying.
        """
        loop, replicas, say = self._loop, self.replicas, self._loop.failures.session.say
        total, step = loop.iterations.total, loop.iterations.completed
        where = loop.check_state()
        is_bad = where == "parameter" or (where == "loss" and loop.world.newly_bad() is not None)
        digest = replicas.digest() if replicas is not None else ""
        checked = clock.perf_counter()
        votes: list[Vote] = []
        try:
            votes = self._ask("copy", AT_END if is_end else AT_COPY, is_bad, started, digest)
        except Parted as reason:
            self.part()
            is_compared = replicas is not None and not replicas.is_off
            since = "`--on ranks` compares no more" if is_compared else "late failures are saved without going back"
            made = f"rank {self.rank} has made {counted(total + (not is_end), 'optimizer step')}"
            say(f"{reason}; {made}; {since} from step {step} on")
        waited = clock.perf_counter() - checked
        if votes:
            self.goes_back = all(vote.holds for vote in votes)
            wanted_by_all, most = max(vote.wanted for vote in votes), min(vote.most for vote in votes)
            self.due_at = total + 1 + max(1, min(wanted_by_all, most))
        digests = [vote.digest for vote in votes]
        if any(vote.is_state_bad for vote in votes):
            self._fail_together(votes, where or "parameter")
        elif votes and replicas is not None and replicas.differ(digests, max(step - is_end, 0)):
            self._fail_together(votes, "ranks")
        elif where == "loss" and not is_bad:  # no update was made of it
            loop.failures.count_skipped(step)
        return started + waited

    def _ask(
        self, what: str, patience: float, is_state_bad: bool, now: float = 0.0, digest: str = "", is_bad: bool = False
    ) -> list[Vote]:
        """The votes of all ranks. Raises `Parted` if one does not answer."""
        loop, world = self._loop, self._loop.world
        assert self._others is not None, "ranks have met"
        place = f"{loop.copied_at} {loop.num_steps}" if world.is_complete else ""
        since = loop.iterations.total - loop.copied_at
        wanted = world.wanted_steps(now, since, loop.num_steps, loop.tape.num_bytes, MOST_BYTES)
        own = Vote(place, is_state_bad, *wanted, world.takes_copies, digest, is_bad)
        return [Vote(*json.loads(text)) for text in self._others.exchange(what, json.dumps(own), patience)]

    @passed_over
    def before_parting(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The process group is about to be destroyed: the last moment for going back together."""
        recorder, group = self._loop.recorder, args[0] if args else kwargs.get("group")
        if recorder.enabled and recorder.is_outermost and (group is None or group is distributed.group.WORLD):
            recorder.guard(functools.partial(self.check_at_end, has_failed=sys.exc_info()[0] is not None))
        return as_called(target, args, kwargs)

    def check_at_end(self, *, has_failed: bool) -> None:
        """All ranks have come to the end of their loops, unless this one ``has_failed``: check what was not checked.

        Raises `CaptureStop` if a step was bad and the loop is to stop.
        """
        if self.meeting is not None and not has_failed and self._loop.recorder.enabled:
            self.check_together(clock.perf_counter(), is_end=True)
            if self._loop.recorder.enabled:
                self._loop.failures.save_asked()
        self._loop.recorder.guard(self.leave)

    def tell_at_end(self) -> None:
        """With ``--on ranks`` print why nothing was compared, if it was not."""
        replicas = self.replicas
        if replicas is None or replicas.equal_after is not None or not self._loop.iterations.total:
            return
        reason = "parameters are spread, averaged over a part of the ranks, or the ranks have not met"
        if self.is_alone and not self.is_apart:
            reason = "this process trains by itself"
        self._loop.failures.session.say(f"`--on ranks` has compared nothing: {reason}")

    def hurry(self) -> None:
        """The launcher is about to end this process, and maybe has ended others: wait for nobody any more."""
        if self._others is not None:
            self._others.is_ending = True

    def part(self) -> None:
        """No copies at one step any more, and no going back, as that would need the others."""
        if self.meeting is not None:
            self._loop.world.give_up()
        self.meeting, self.goes_back = None, False

    def leave(self) -> None:
        """This rank goes on unwatched: nobody is to wait for it."""
        self.part()
        if self._others is not None:
            self._others.end(self._loop.iterations.total)
