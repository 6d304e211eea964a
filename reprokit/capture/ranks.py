"""Several processes: who is there, how they agree at an update, and how they save and stop together.

Every rank comes to the same updates. Averaged gradients give all ranks the same bits, so they come to the same result
about them in the same step, and nothing is exchanged while training is healthy but before a copy of the state. Where
parameters are spread (`fully_shard`), one look into the store before each update takes the place of the averaged
gradient: a rank whose loss is bad reports that before its backward pass, which all have gone through by then. A shard
that is bad is reported for the next update, because the others may be past this one; then all go back.

Other ways to spread a model (tensor parallel modules, stages of a pipeline, FSDP1) are not followed: there each rank
saves what it sees itself, without a replay, and stops alone. All waiting has a limit: a rank that is gone stops nobody.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from reprokit import torch_private
from reprokit.capture import lockstep
from reprokit.capture.meeting import Late, Meeting, Parted, SavedElsewhere
from reprokit.capture.replicas import Replicas
from reprokit.capture.save import NothingFound, Verdict
from reprokit.capture.tape import MOST_BYTES
from reprokit.words import counted

if TYPE_CHECKING:
    from reprokit.capture.judge import Outcome, Pending
    from reprokit.capture.loop import Loop
    from reprokit.program.trace import Tracer
    from reprokit.snapshot.format import Snapshot

# Words of gloo, NCCL and the store about a process that is not there any more.
_OF_PEER = re.compile(r"gloo|NCCL|Connection (?:closed|reset) by peer|Broken pipe|ProcessGroup", re.IGNORECASE)
_PATIENCE = 600.0  # seconds for another rank to save its step
TO_SEE = 30.0  # seconds from one rank's optimizer to another's: both come from the same averaging
AT_COPY = 10.0  # seconds; all ranks come from the same averaging, or one makes more steps than another
AT_END = 20.0  # seconds; one rank may evaluate or save the model while the others have nothing to do any more
_FIRST_COPY = 2  # steps: a graph that a step may not use again is used again in the next one
_GOOD = "good"
_NOT_ALL = "gradients are averaged over processes, and not all of them went back together"


class _Answer(NamedTuple):
    """The message of a rank before all ranks copy their states: what is bad there, and when to copy again.

    ``most`` is for the memory that steps take, ``wanted`` for what a copy costs. ``holds``: it takes copies at all.
    ``digest`` is that of its parameters, empty if they are not compared.
    """

    bad: str
    wanted: int
    most: int
    holds: bool
    digest: str


def _is_apart(modules: Collection[torch.nn.Module], kinds: Collection[type]) -> bool:
    """True if one process holds a part of a model, and is no rank of `fully_shard`."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    return (
        "torch.distributed.pipelining.stage" in sys.modules
        or any(issubclass(kind, fsdp) for kind in kinds)
        or any(hasattr(parameter, "to_local") for module in modules for parameter in module.parameters())
    )


class Ranks:
    """The state of the other processes as seen from this one.

    Gradients are averaged over all of them (``is_parallel``), or parameters spread by `fully_shard` (``is_sharded``) or
    in another way (``is_apart``). At the ``meeting`` the ranks exchange answers; they copy their state together, next
    after ``due_at`` steps, and all of them hold copies if the training ``goes_back``. ``has_missed``: the last copy was
    not made. ``replicas`` are there where ranks are to be compared.
    """

    _runs = 0

    def __init__(self, loop: Loop) -> None:
        self.is_parallel = self.is_sharded = self.is_apart = False
        self.meeting: Meeting | None = None
        self.due_at = _FIRST_COPY
        self.goes_back = self.has_missed = False
        self.rank: int | None = None
        self.replicas: Replicas | None = None
        self._loop = loop
        self._is_manual = False  # the loop itself averages
        self._num_averaged = 0  # updates by averaged gradients
        self._size = 1
        self._store: Any = None
        self._reported_at: int | None = None
        self._is_ending = False
        Ranks._runs += 1
        self._prefix = f"reprokit/{Ranks._runs}"

    # -- who is there --------------------------------------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        """True if this process trains by itself."""
        return not (self.is_parallel or self.is_sharded)

    def meet(self) -> None:
        """A new root or optimizer was met: look at what is trained."""
        if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
            return
        modules = self._loop.world.modules
        kinds = {type(part) for module in modules for part in module.modules()}
        wrapper = torch.nn.parallel.DistributedDataParallel
        self.is_parallel = self._is_manual or any(issubclass(kind, wrapper) for kind in kinds)
        self.is_sharded = any(map(torch_private.is_sharded, kinds))
        if not (self.is_sharded or self._store is not None) and _is_apart(modules, kinds):
            self.is_apart, self.is_parallel, self.rank = True, False, distributed.get_rank()
            self._size = distributed.get_world_size()
            self._loop.world.give_up()  # going back would need the parameters of the other processes
        self._join()

    def meet_averaging(self, group: Any) -> None:
        """The loop averages gradients over a group of processes by itself, over all if that is ``None``."""
        is_part = group is not None and distributed.get_world_size(group) < distributed.get_world_size()
        if self.replicas is not None and is_part:
            self.replicas.is_off = True
        if not (self._is_manual or self.is_apart or self.is_sharded):
            self._is_manual = self.is_parallel = True
            self.due_at = self._loop.iterations.total + _FIRST_COPY
            self._join()

    def _join(self) -> None:
        if not self.is_alone and self._store is None:
            rank, size = self.rank, self._size = distributed.get_rank(), distributed.get_world_size()
            self._store = torch_private.default_store()
            self._store.set(self._key("watches", rank), "yes")
            prefix = f"{self._prefix}/meeting"
            self.meeting = Meeting(self._store, prefix, rank, size, is_sharded=self.is_sharded)
            self.goes_back = True

    def compare(self) -> None:
        """Compare the parameters that all ranks hold a copy of."""
        self.replicas = Replicas(lambda: self._loop.world.modules)

    def describe(self) -> dict[str, Any]:
        """For the snapshot: the rank and the number of processes, nothing for a single process."""
        return {} if self.rank is None else {"rank": self.rank, "world_size": self._size}

    def is_of_peer(self, error: BaseException) -> bool:
        """True for an exception of a collective whose other processes have gone: it says nothing about this one."""
        return self.rank is not None and isinstance(error, RuntimeError) and _OF_PEER.search(str(error)) is not None

    # -- an update -----------------------------------------------------------------------------------------------

    def before_backward(self, is_bad: bool) -> None:
        """A backward call begins, from a start that may be bad."""
        if is_bad and self._loop.judge.pending is not None:
            self._report("loss", self._loop.iterations.total)

    def _report(self, what: str, total: int) -> None:
        """Something is bad on this rank, which all ranks are to see at the update that ``total`` counts."""
        self._reported_at = total
        self._store.set(self._key("bad", self.rank), what)
        self._store.set(self._key("bad step", total), "yes")

    def withdraw(self, step: int) -> None:
        """The loss of this rank was bad in this step, which the loop has skipped."""
        if self._reported_at is not None:
            self._store.delete_key(self._key("bad", self.rank))
            self._store.delete_key(self._key("bad step", self._reported_at))
            self._reported_at = None

    def at_update(self, pending: Pending | None, outcome: Outcome | None, *, is_bad: bool) -> None:
        """An optimizer is about to use its gradients, of which some are bad on this rank if it ``is_bad``."""
        loop, failures, total = self._loop, self._loop.failures, self._loop.iterations.total
        self._num_averaged += self.is_parallel
        is_told = self.is_sharded and self._has("bad step", total)
        if self.is_sharded and is_bad and not is_told:
            self._report("gradient", total + 1)
            is_bad = False
        if not (is_bad or is_told or outcome):
            return
        is_bad_here = is_bad or (is_told and outcome != "skipped")
        with failures.until_saved() if is_bad_here else contextlib.nullcontext():  # another rank may end meanwhile
            is_only_here = is_bad and self._is_bad_only_here(total)
            if outcome == "skipped" or is_only_here:
                loop.act(outcome, pending)
            if (is_bad_here or outcome == "failed") and not is_only_here:
                self._fail_together(is_told or is_bad)
            elif is_bad and loop.recorder.enabled:
                failures.fail("gradient")

    def at_skip(self, pending: Pending) -> None:
        """A grad scaler has left out the update of a bad loss; the others take it for an overflow like any other."""
        if self.is_sharded:  # no step is recorded without the other ranks
            self._loop.judge.pending = None
            self._loop.act("skipped", pending)
        else:
            self._fail_together(False)

    def _is_bad_only_here(self, total: int) -> bool:
        """True if averaged gradients, which are bad on this rank, were good on another one, which has not reported bad
        ones within `TO_SEE` seconds. ``False``, at once, if a rank has reported a bad value of its own or is not
        watched."""
        what, ends_at = f"bad average {self._num_averaged}", time.monotonic() + TO_SEE
        if self.is_sharded:
            return False
        self._store.set(self._key(what, self.rank), "yes")
        while self._are_all("watches") and not (self._has("bad step", total) or self._are_all(what) or self._is_ending):
            if time.monotonic() > ends_at:
                step = self._loop.iterations.completed
                seen = f"averaged gradients are bad on rank {self.rank} at step {step}, and not on every rank"
                self._loop.failures.session.say(f"{seen}; rank {self.rank} saves its step")
                return True
            time.sleep(0.05)
        return False

    def end_update(self) -> None:
        """A step is over: one that holds too much until the next copy of all ranks is not kept."""
        if self.meeting is not None and self._loop.tape.num_bytes > 2 * MOST_BYTES:
            self._loop.world.interrupt()
            self._loop.tape.forget()

    # -- saving and stopping -------------------------------------------------------------------------------------

    def _fail_together(self, is_seen_by_all: bool, where: str = "gradient", *, is_difference: bool = False) -> None:
        """A process had something bad, or ranks differ: its rank saves, and all stop in the same step."""
        frame, failures, session = sys._getframe(1), self._loop.failures, self._loop.failures.session
        try:
            with failures.until_saved():  # another rank may end before this one has begun to save
                if is_difference:
                    is_seen_by_all = self._save_difference(frame)
                elif not (is_seen_by_all and self._go_back(frame, where)):
                    self._save_or_leave(frame, is_seen_by_all)
            all_stop = self._all_stop(is_seen_by_all and (session.stops or self.is_sharded))
        except Exception as error:
            session.switch_off(error)
            return
        if all_stop:
            session.stop()
        if session.stops and not is_difference:
            session.say("the other processes have not seen it, so the training goes on, unwatched")
        if session.stops or is_difference or not is_seen_by_all:
            self.leave()

    def _go_back(self, frame: FrameType, where: str) -> bool:
        """If the state of a rank is bad, all find the step that made it so; true if a rank has saved that step."""
        session = self._loop.failures.session
        try:
            together = self.together()
            if together is None:
                return False
            self._loop.failures.save(Verdict(where, frame, is_late=True, together=together))
        except (Parted, NothingFound) as reason:
            self._loop.unseen.append(f"{_NOT_ALL} ({reason})" if isinstance(reason, Parted) else str(reason))
            return False
        except SavedElsewhere as elsewhere:
            session.leave()
            session.say(f"the first bad value is that of rank {elsewhere.rank}, which saves its step")
        return True

    def together(self, *, has_difference: bool = False) -> Meeting | None:
        """Where all ranks play the steps since their copies; ``None`` if these differ, or no state was made bad where
        it ``has_difference`` neither."""
        loop, meeting = self._loop, self.meeting
        if meeting is None or not self.goes_back:
            return None
        place = f"{loop.copied_at} {loop.num_steps} {loop.world.is_complete}"
        state = _GOOD if loop.world.newly_bad() is None else "bad"
        answers = [answer.split("/") for answer in meeting.exchange("back", f"{place}/{state}")]
        is_same = loop.world.is_complete and all(other == place for other, _ in answers)
        has_cause = has_difference or any(state != _GOOD for _, state in answers)
        return meeting if is_same and has_cause else None

    def _save_or_leave(self, frame: FrameType, is_seen_by_all: bool) -> None:
        """Save the step that is running if this rank is to, or say which one does."""
        loop, failures, session = self._loop, self._loop.failures, self._loop.failures.session
        culprits, pending = self.culprits(), loop.judge.pending
        first = next(iter(culprits), None)
        op = failures.op_of(pending) if pending is not None else None
        if self.is_sharded:
            is_own = pending is not None and first == self.rank
            verdict = Verdict("loss" if is_own else "gradient", frame, op if is_own else None, together=self.meeting)
            try:
                failures.save(verdict)
                return
            except SavedElsewhere as elsewhere:
                first = elsewhere.rank
        elif pending is not None:
            loop.timeline.loss = pending.loss
            failures.save(Verdict("loss", frame, op, is_late=op is None))
            return
        elif first is None:
            failures.save(Verdict("gradient", frame), self._is_ours if is_seen_by_all else None)
            return
        session.leave()
        bad = "the loss" if culprits.get(first) == "loss" else "a gradient"
        session.say(f"{bad} is nan or inf on rank {first}, which saves its step")

    def culprits(self) -> dict[int, str]:
        """The ranks that have reported, each with what is bad there; those with a bad loss come first."""
        known = [rank for rank in range(self._size) if self._has("bad", rank)]
        reports = {rank: str(self._store.get(self._key("bad", rank)), "utf-8") for rank in known}
        return dict(sorted(reports.items(), key=lambda report: (report[1] != "loss", report[0])))

    def _is_ours(self, snapshot: Snapshot) -> bool:
        """True if this process's own step made the bad gradient that all of them have after averaging."""
        is_own = snapshot.failure.call is not None or snapshot.failure.input_name is not None
        answers: Sequence[str] = []
        with contextlib.suppress(Parted):
            if self.meeting is not None:
                answers = self.meeting.exchange("finding", "own" if is_own else "")
        culprits = [rank for rank, answer in enumerate(answers) if answer]
        if culprits and self.rank not in culprits:
            session = self._loop.failures.session
            session.say(f"a gradient is nan or inf on rank {culprits[0]}, which saves its step")
        return self.rank in culprits or (not culprits and (self.rank == 0 or (is_own and not answers)))

    def _all_stop(self, may_meet: bool) -> bool:
        """True if the loop is to stop on all ranks, after each has done its part."""
        failures = self._loop.failures
        is_met = may_meet and not failures.is_terminated and self._meet_all()
        return failures.session.stops and (failures.is_terminated or is_met)

    def _meet_all(self) -> bool:
        """Wait until every rank has done its part; ``False`` as soon as some rank is not watched."""
        if not self._are_all("watches"):
            return False
        self._store.set(self._key("done", self.rank), "yes")
        ends_at = time.monotonic() + _PATIENCE
        try:
            while not self._are_all("done"):
                if self._is_ending or not self._are_all("watches") or time.monotonic() > ends_at:
                    return self._are_all("done")
                time.sleep(0.05)
        except distributed.DistNetworkError:  # the host of the store has gone, so it was done
            pass
        return True

    # -- what is saved -------------------------------------------------------------------------------------------

    made = staticmethod(lockstep.made)
    from_the_past = staticmethod(lockstep.from_the_past)
    difference_made = staticmethod(lockstep.first_difference)

    def recording(self, tracer: Tracer) -> contextlib.AbstractContextManager[None]:
        """The context in which a step is recorded."""
        return lockstep.sharding_unseen(self._loop.world.modules, tracer)

    def gathered(self) -> dict[int, torch.Tensor]:
        """The whole parameters that units of `fully_shard` have, by the ``id`` of the spread ones."""
        return lockstep.gathered(self._loop.world.modules) if self.is_sharded else {}

    # -- copies at the same step ---------------------------------------------------------------------------------

    def check_together(self, started: float, *, is_end: bool = False) -> float:
        """All ranks check their state before they copy it, and go back if one is bad; ``started``, less the wait.

        ``is_end``: the last step is over, and no other one will be.
        """
        loop, replicas = self._loop, self.replicas
        bad: str | None = loop.check_state()
        if bad == "loss" and not self.is_sharded and loop.world.newly_bad() is None:
            bad = None  # no update was made of it
            loop.failures.count_skipped(loop.iterations.completed)
        digest = replicas.digest() if replicas is not None else ""
        checked = time.perf_counter()
        answers = self._meet_for_copy(bad or _GOOD, digest, started, is_end=is_end)
        waited = time.perf_counter() - checked
        step = max(loop.iterations.completed - is_end, 0)
        if answers is None:
            pass
        elif any(answer.bad != _GOOD for answer in answers):
            self._fail_together(True, bad or "parameter")
        elif replicas is not None and replicas.differ([answer.digest for answer in answers], step):
            self._fail_together(True, is_difference=True)
        return started + waited

    def _meet_for_copy(self, bad: str, digest: str, now: float, *, is_end: bool) -> list[_Answer] | None:
        """The ranks' answers when a copy is due, and when the next one is; ``None`` if a rank is gone or late.

        After one copy that was missed the ranks meet for the next, after two in a row no more.
        """
        loop, meeting, total = self._loop, self.meeting, self._loop.iterations.total
        if meeting is None:
            return None
        wanted = loop.world.wanted_steps(now, total - loop.copied_at, loop.num_steps, loop.tape.num_bytes, MOST_BYTES)
        own = _Answer(bad, *wanted, loop.world.takes_copies, digest)
        try:
            texts = meeting.exchange_or_miss("copy", json.dumps(own), AT_END if is_end else AT_COPY)
        except (Parted, RuntimeError) as error:
            if isinstance(error, Late) and not (is_end or self.has_missed):
                self.has_missed, self.due_at = True, total + 1 + _FIRST_COPY
            else:
                self._part(total + (not is_end))
            self._say_parted(str(error).partition("\n")[0], total + (not is_end))
            return None
        self.has_missed = False
        answers = [_Answer(*json.loads(text)) for text in texts]
        self.goes_back = all(answer.holds for answer in answers)
        wanted_by_all, most = max(answer.wanted for answer in answers), min(answer.most for answer in answers)
        self.due_at = total + 1 + max(1, min(wanted_by_all, most))
        return answers

    def _say_parted(self, reason: str, num_steps: int) -> None:
        """A rank has not answered: no ranks are compared any more, and none go back together, or only this copy was
        missed."""
        step, is_compared = self._loop.iterations.completed, self.replicas is not None and not self.replicas.is_off
        since = "`--on ranks` compares no more" if is_compared else "late failures are saved without going back"
        made = f"rank {self.rank} has made {counted(num_steps, 'optimizer step')}"
        until = f"no copy of the state after step {step}" if self.has_missed else f"{since} from step {step} on"
        self._loop.failures.session.say(f"{reason}; {made}; {until}")

    def _save_difference(self, frame: FrameType) -> bool:
        """Parameters differ between ranks, which all of them know: the first rank that differs saves; ``False`` if a
        rank does not answer."""
        loop, session, replicas, meeting = self._loop, self._loop.failures.session, self.replicas, self.meeting
        assert replicas is not None and meeting is not None, "ranks that differ have met"
        is_together = True
        try:
            found = replicas.compare(lambda text: meeting.exchange("differ", text), meeting.rank, frame)
            if found is None:
                raise Parted("an answer was that of another step")
            before, after = replicas.equal_after, replicas.different_after
            found = replace(found, equal_after=before, began_at=after, is_exact=before == after - 1)
            loop.failures.save(Verdict("parameter", frame, is_late=True, difference=found))
        except SavedElsewhere as elsewhere:
            session.say(f"{elsewhere.what} differs on rank {elsewhere.rank}, which saves its step")
        except Parted as reason:
            session.say(f"nothing was saved, because a rank did not answer ({reason}); the training goes on, unwatched")
            is_together = False
        session.leave()
        return is_together

    # -- the end -------------------------------------------------------------------------------------------------

    def before_parting(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The process group is about to be destroyed: the last moment for going back together."""
        recorder, group = self._loop.recorder, args[0] if args else kwargs.get("group")
        if recorder.enabled and recorder.is_outermost and (group is None or group is distributed.group.WORLD):
            recorder.guard(functools.partial(self.check_at_end, has_failed=sys.exc_info()[0] is not None))
        return target(*args, **kwargs)

    def check_at_end(self, *, has_failed: bool) -> None:
        """All ranks have come to the end of their loops, unless this one ``has_failed``: check what was not checked.

        Raises `CaptureStop` if a step was bad and the loop is to stop.
        """
        if self.meeting is not None:
            if not has_failed and self._loop.recorder.enabled:
                self.check_together(time.perf_counter(), is_end=True)
            self._loop.recorder.guard(self.part)

    def tell_at_end(self) -> None:
        """With ``--on ranks`` print why nothing was compared, if it was not."""
        replicas = self.replicas
        if replicas is None or replicas.num_compared or not self._loop.iterations.total:
            return
        if self.is_sharded or self.is_apart:
            reason = "parameters are spread over the ranks"
        elif self.is_alone:
            reason = "this process trains by itself"
        else:
            reason = "the ranks have not met, or gradients are averaged over a part of them"
        self._loop.failures.session.say(f"`--on ranks` has compared nothing: {reason}")

    def hurry(self) -> None:
        """The launcher is about to end this process, and maybe has ended others: wait for nobody any more."""
        self._is_ending = True
        if self.meeting is not None:
            self.meeting.is_ending = True

    def part(self) -> None:
        """No copies at one step any more, and no going back, as that would need the others."""
        self._part(self._loop.iterations.total)

    def _part(self, num_steps: int) -> None:
        if self.meeting is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that keeps it
                self.meeting.end(num_steps)
            self._loop.world.give_up()
        self.meeting, self.goes_back, self.has_missed = None, False, False

    def leave(self) -> None:
        """This rank goes on unwatched: nobody is to wait for it."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone with the rank that keeps it
                self._store.delete_key(self._key("watches", self.rank))
        self.part()

    # -- the store -----------------------------------------------------------------------------------------------

    def _are_all(self, what: str) -> bool:
        return all(self._has(what, rank) for rank in range(self._size))

    def _has(self, what: str, which: int) -> bool:
        return bool(self._store.check([self._key(what, which)]))

    def _key(self, what: str, which: int | None) -> str:
        return f"{self._prefix}/{what}/{which}"
