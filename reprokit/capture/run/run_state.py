"""The state of a watched training run: the step that is running, the steps since the last copy, and the numbers.

No decisions are made here, and nothing is hooked.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import distributed

from reprokit.capture.failure_text import COMPILED
from reprokit.capture.record import kinds
from reprokit.capture.record.attributes import Owner
from reprokit.capture.record.compact_steps import Freezer, PastStep
from reprokit.capture.record.entry import Entry, reads_gradient
from reprokit.capture.record.state import BufferCopies, GeneratorWatch
from reprokit.capture.record.structure import iter_tensors
from reprokit.capture.record.tape import Tape
from reprokit.capture.rewind.checkpoint import History, is_unmade
from reprokit.capture.rewind.meeting import GOOD, CopyAnswer, Meeting, Parted, Replicas
from reprokit.capture.rewind.updates import Updates
from reprokit.capture.run.budget import Budget
from reprokit.capture.run.ranks import Ranks
from reprokit.capture.run.timeline import Iterations, NormMeter, ScalerWatch, Timeline
from reprokit.errors import pass_on
from reprokit.locate.compiled import Compiled
from reprokit.locate.failure import RankDifference
from reprokit.program.functions import DATA_WRITES
from reprokit.program.ir import Call

_MOST_WAITING = 16  # steps that are frozen together: work that is done in one go is done faster
_WAITING_BYTES = 16 * 2**20  # that these may hold
_WAITING_ENTRIES = 64  # that these may have: Python's garbage collector walks through what they hold
_keeps_graph = attrgetter("keeps_graph")
_MOST_MAKERS = 4  # steps before a copy, each of which may hold a batch
SETTLED_AFTER = 2  # optimizer steps after which every root module is taken to be known


class RunState:
    """Knows one run. ``tape`` notes the ``running`` step; ``buffers`` are copies from when it began; ``history`` is the
    past."""

    def __init__(self, tape: Tape, history: History, budget: Budget) -> None:
        self.tape = tape
        self.running = tape.running
        self.history = history
        self.budget = budget
        self.freezer = Freezer()
        self.buffers = BufferCopies()
        self.iterations = Iterations()
        self.generators = GeneratorWatch()
        self.timeline = Timeline()
        self.norms: NormMeter | None = None
        self.scalers = ScalerWatch()
        self.replicas: Replicas | None = None  # where ranks are to be compared
        self.updates = Updates()
        self.ranks = Ranks()
        self._keeps_updates = not history.is_off
        self.running.memory.on_first_write = history.add_written
        self.running.memory.on_conversion = self.convert
        self.running.on_lost = self._lose
        self.before_interrupt: Callable[[], None] = lambda: None
        self.has_alarm: Callable[[], bool] = lambda: False  # asked before a copy
        self.unseen: list[str] = []  # what else the run does, in words, that is not known
        self.compilers: dict[str, Compiled] = {}  # that the script has used, by name
        self.compiled: Call | None = None  # the first compiled function that the loop called itself
        self.is_converted = False
        self.copied_at = -1  # the step of the last copy; the first ones begin before any step
        self._may_wait = 1  # steps
        self._waiting_bytes = 0  # an estimate of what they hold
        self._num_states: dict[int, int] = {}  # parameters with a state that the loop may write, by optimizer
        self._finished: set[int] = set()  # optimizers that have stepped since the last backward call

    def meet_compiled(self, call: Call | None) -> None:
        """The loop calls something compiled itself: neither that nor what follows is noted, in any later step."""
        self.history.give_up()
        if self.compiled is not None:
            return
        self.compiled = call
        name = f"`{call.kwargs['name']}`" if call is not None else "a function"
        site = call.site if call is not None else None
        place = f" at {site.file}:{site.line}" if site is not None else ""
        self.unseen.append(f"the loop itself calls {name}{place}, {COMPILED} (`TORCH_COMPILE_DISABLE=1` helps)")

    def meet_module(self, module: torch.nn.Module) -> None:
        """A root module is about to be called: note its buffers and the generators before it changes them."""
        if self.is_converted:
            self._begin_anew()
        self.running.generators = self.generators.before_module()
        if self.history.meet_module(module):
            self._meet_ranks()
            self.buffers.add_module(module)
            self.tape.roots.attributes.meet(module)
            self._know_state()
        if not self.generators.is_looking and not is_unmade(module):
            self.tape.roots.met.add(id(module))

    def meet_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        self.running.memory.has_optimizer = True
        if self.history.meet_optimizer(optimizer):
            self._num_states[id(optimizer)] = len(optimizer.state)
            self._meet_ranks()
            self.tape.roots.attributes.meet(optimizer)
            self._know_state()

    def _meet_ranks(self) -> None:
        self.ranks.meet(self.history.modules)
        if self.ranks.is_sharded or self.ranks.is_apart:
            self.history.give_up()  # going back would need the parameters of the other processes

    def begin_update(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to write parameters."""
        if self.ranks.meeting is not None:
            return
        self.ranks.begin_update()
        if self.ranks.is_sharded and self._keeps_updates:
            self.updates.begin(optimizer, self.iterations.completed, self.running.entries)

    def end_step(self, optimizer: torch.optim.Optimizer | None, ended: float, *, was_checked: bool = False) -> None:
        """The running step is over: keep it, or, when everything ``was_checked``, take a new copy of the state.

        No copy is taken after an alarm, which leads back to the old one. ``optimizer`` is ``None`` after an update made
        by hand; the step ``ended`` before the checks.
        """
        if self.history.num_optimizers > 1:
            if self.running.differentiations:
                self._finished.clear()
            self._finished.add(id(optimizer))
        elif optimizer is not None:
            self._finished = {id(optimizer)}
        if self.running.gaps:
            self.history.interrupt()
        self._note_numbers(optimizer, ended)
        if was_checked and not (self.ranks.is_alone and self.history.is_complete and self.has_alarm()):
            self._copy_state(ended)
            self.generators.look_closely()
        elif not self.running.is_noted:
            self.history.interrupt()
        elif self.history.is_complete:
            self._keep_step()
        if optimizer is not None and len(optimizer.state) != self._num_states.get(id(optimizer)):
            self._num_states[id(optimizer)] = len(optimizer.state)
            self._know_state()
        if optimizer is None:
            self.iterations.updated_by_hand()
        else:
            self.iterations.attempted(optimizer)
        self.ranks.end_update(self.iterations.total)
        if self.iterations.total == SETTLED_AFTER:
            self.tape.roots.settle()
        if optimizer is not None:  # an update made by hand is seen only in a step that is noted
            self.budget.end_step(ended, len(self.running.entries) + self.running.num_dropped)
        self.restart()

    def end_marked_step(self) -> None:
        """The loop has made new parameters, and the old ones are as they were: nothing has to be kept."""
        self._note_numbers(None, time.perf_counter())
        self.iterations.updated_by_hand()
        self.history.interrupt()
        self.restart()

    def _note_numbers(self, optimizer: torch.optim.Optimizer | None, ended: float) -> None:
        rate = optimizer.param_groups[0].get("lr") if optimizer is not None else None
        if isinstance(rate, torch.Tensor):
            rate = rate.detach().clone()
        key = weakref.ref(optimizer) if optimizer is not None else None  # an id may come back
        total, completed = self.iterations.total, self.iterations.completed
        self.timeline.end_step(total, completed, rate, self.scalers.scale, ended, key)
        if self.norms is not None and optimizer is not None:
            self.norms.end_step(completed, optimizer, self.timeline.last)

    def _keep_step(self) -> None:
        history, running = self.history, self.running
        history.steps.append(self.step_of(running.entries, running.memory.saved))
        self._waiting_bytes += running.num_bytes
        holds_graph = any(map(_keeps_graph, running.differentiations))
        if len(history.waiting()) >= self._may_wait or holds_graph or self._waiting_bytes > history.room:
            self.freeze_past()
            if self.ranks.meeting is not None and history.is_full:
                history.interrupt()  # until the next copy of all ranks

    def freeze_past(self) -> None:
        """Let go of what past steps made and nobody needs any more."""
        self._waiting_bytes = 0
        try:
            self.history.makers = self.freezer.living(self.history.makers, self.freezer.used)
            for step in self.history.waiting():
                num_entries = len(step.entries)
                self.freezer.freeze(step)
                self.history.frozen(step)
                if step.is_cut:
                    self.history.interrupt()
                    return
                by_bytes, by_entries = _WAITING_BYTES // (step.made_bytes + 1), _WAITING_ENTRIES // (num_entries + 1)
                self._may_wait = min(_MOST_WAITING, by_bytes + 1, by_entries + 1)
        except Exception as error:  # an argument that cannot be copied: then there is no going back behind this step
            pass_on(error)
            self.history.interrupt()

    def past(self) -> list[PastStep]:
        """The steps since the last copy, with entries."""
        return [self.freezer.thaw(step) for step in self.history.steps]

    def makers(self) -> list[list[Entry]]:
        """The entries of those steps before the last copy whose graphs may be used still."""
        return [self.freezer.thaw(step).entries for step in self.history.makers]

    def step_of(self, entries: list[Entry], saved: dict[int, torch.Tensor]) -> PastStep:
        """The running step with these entries."""
        iterations = self.iterations
        return PastStep(
            entries,
            saved,
            iterations.completed,
            iterations.micro_step,
            self.timeline.likely_loss,
            self.generators.states,
            place=iterations.total,
        )

    def restart(self) -> None:
        """A new step begins."""
        self.running.restart()
        self.choose()
        if self.buffers.tensors:
            self.buffers.refresh()
        if self.generators.states is not None:
            self.generators.restart()

    def choose(self) -> None:
        """Note the functions of the running step, or not."""
        is_noted = self.running.is_noted = self.budget.notes(self.iterations.completed)
        self.tape.turn(is_on=is_noted)

    def interrupt(self) -> None:
        """Something happened that is not on the tape; the step starts anew."""
        self.history.interrupt()
        self.restart()

    def begin_over(self) -> None:
        """An exception has interrupted work of reprokit's own: nothing that is known is sure to be whole."""
        self.history.state.clear()
        self.history.makers = []
        self.freezer.forget()
        self.buffers.clear()
        self.convert()
        self.restart()
        self.running.gaps.append(None)

    def meet_averaging(self, group: Any) -> None:
        """The loop averages gradients over a group of processes by itself, over all if that is ``None``."""
        if (
            self.replicas is not None
            and group is not None
            and distributed.get_world_size(group) < distributed.get_world_size()
        ):
            self.replicas.is_off = True
        if not self.ranks.is_manual:
            self.ranks.meet_averaging(self.iterations.total)

    def is_gradient(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is a gradient that the loop has read in the running step, or was computed from some."""
        wanted = {id(tensor)}
        for entry in reversed(self.running.entries):
            if entry.kind is kinds.BACKWARD:
                return False
            if any(id(made) in wanted for made in iter_tensors(entry.output)):
                if reads_gradient(entry):
                    return True
                wanted.update(id(given) for given, _ in entry.versions)
        return False

    def is_due(self, now: float) -> bool:
        """True if the running step, which is over, is followed by a copy; all ranks copy after the same step."""
        if self.budget.from_step == self.iterations.completed + 1:  # the last step that is not noted
            return True
        if self.ranks.meeting is not None:
            return self.iterations.total + 1 >= self.ranks.due_at
        return self.history.is_due(now)

    def digest(self) -> str:
        """The digest of the parameters that other ranks have too; empty if these are not to be compared."""
        return self.replicas.digest() if self.replicas is not None and self.ranks.meeting is not None else ""

    def differ(self, answers: Sequence[CopyAnswer], *, is_end: bool) -> bool:
        """True if the ranks have answered that their parameters differ after the step that runs, or, at the end, after
        the last one."""
        digests = [answer.digest for answer in answers]
        step = max(self.iterations.completed - is_end, 0)
        return self.replicas is not None and self.replicas.differ(digests, step)

    def difference(self, frame: FrameType | None) -> RankDifference:
        """The difference that all ranks know of: the parameter, and the steps between which it came. Raises `Parted`
        if a rank does not answer; ``frame`` is where the loop stands."""
        replicas, meeting = self.replicas, self.ranks.meeting
        if replicas is None or meeting is None:
            raise Parted
        found = replicas.compare(lambda text: meeting.exchange("differ", text), meeting.rank, frame)
        if found is None:
            raise Parted("an answer was that of another step")
        before, after = replicas.equal_after, replicas.different_after
        return replace(found, equal_after=before, began_at=after, is_exact=before == after - 1)

    def meet_for_copy(self, bad: str | None, digest: str, now: float, *, is_end: bool) -> list[CopyAnswer] | None:
        """The answers of the ranks when a copy is due; ``None`` if one has not come in time: see `Ranks`."""
        wanted = self.history.wanted_steps(now, self.iterations.total - self.copied_at)
        answer = CopyAnswer(bad or GOOD, *wanted, self.history.takes_copies, digest)
        answers = self.ranks.meet_for_copy(answer, self.iterations.total, is_end=is_end)
        if answers is None and not self.ranks.has_missed:
            self.history.give_up()
        return answers

    def go_back_together(self, *, has_difference: bool = False) -> Meeting | None:
        """For all ranks to play the steps since their copies; ``None`` if these differ, or no state was made bad where
        it ``has_difference`` neither."""
        meeting, history = self.ranks.meeting, self.history
        if meeting is None or not self.ranks.goes_back:
            return None
        self.freeze_past()
        place = f"{self.copied_at} {len(history.steps)} {history.is_complete}"
        bad = GOOD if history.newly_bad() is None else "bad"
        answers = [answer.split("/") for answer in meeting.exchange("back", f"{place}/{bad}")]
        is_same = history.is_complete and all(other == place for other, _ in answers)
        has_cause = has_difference or any(state != GOOD for _, state in answers)
        return meeting if is_same and has_cause else None

    def part(self) -> None:
        """From here on this process is by itself: without the others it cannot go back."""
        self.ranks.part()
        self.history.give_up()

    def report_bad(self, what: str = "loss") -> None:
        """Tell the other processes that the loss, or a gradient, of this one is bad."""
        self.ranks.report_bad(self.iterations.completed, what)

    def skip(self, seconds: float) -> None:
        """So much time has passed unwatched: it counts neither for the pace of copies nor as part of a step."""
        self.history.skip(seconds)
        self.budget.interrupt()
        self.timeline.skip(seconds)
        if self.norms is not None:
            self.norms.skip(seconds)

    def forget(self) -> None:
        """Let go of everything that belongs to the user."""
        self.running.memory.forget()
        self.compilers.clear()
        self.history.forget()
        self.freezer.forget()
        self.updates.forget()
        self.buffers.clear()
        if self.norms is not None:
            self.norms.forget()
        self.tape.roots.attributes.forget()

    def convert(self) -> None:
        """State is of another type, shape or place now: there is no going back behind this."""
        self.is_converted = True
        self.history.interrupt()
        self.tape.roots.met.clear()

    def _lose(self, entries: list[Entry]) -> None:
        """Calls that nothing depends on were taken off the tape; they may have changed statistics all the same."""
        trained = [entry.target for entry in entries if entry.kind is kinds.MODULE and entry.is_training]
        if not any(next(module.buffers(), None) is not None for module in trained):
            return
        if self.history.is_complete:
            self.before_interrupt()
            self.history.interrupt()
        kept = self.running.entries  # without the call that is about to run
        if not any(e.writes_state or (e.kind is kinds.MODULE and e.output is not None) for e in kept):
            self.buffers.refresh()  # the step begins with what they have left

    def _begin_anew(self) -> None:
        """A converted model is used for the first time: what it is now is where its past begins."""
        self.is_converted = False
        for module in self.history.modules:
            self.buffers.add_module(module)
        entries = self.running.entries
        if not any(entry.kind in (kinds.MODULE, *kinds.DIFFERENTIATING) for entry in entries):
            entries[:] = [entry for entry in entries if not (entry.writes_state or entry.name in DATA_WRITES)]
            self._copy_state(time.perf_counter())

    def _copy_state(self, started: float) -> None:
        is_kept = self._keep_makers()
        self.copied_at = self.iterations.total
        unfinished = [o for o in self.history.optimizers if id(o) not in self._finished]
        self.history.take(started, unfinished, may_keep=is_kept and not self.running.memory.has_rebound)
        earlier = self.history.earlier
        self.freezer.forget([*self.history.makers, *([*earlier.makers, *earlier.steps] if earlier else [])])
        self.running.memory.copied()
        self._know_state()
        self.tape.roots.met.clear()
        owners: list[Owner] = [*self.history.modules, *self.history.optimizers]
        self.tape.roots.attributes.begin_anew(owners)
        self.history.rest(started)

    def _keep_makers(self) -> bool:
        """Know of the steps before a copy those that made graphs which later steps may go on with.

        True if all steps since the copy before can be played, with the running one, which is the last of them then.
        """
        history, running = self.history, self.running
        last = self.step_of(running.entries, running.memory.saved)
        steps = [*history.makers, *history.steps, last]
        try:
            for step in steps:
                if step.flat is None:
                    self.freezer.freeze(step)
            history.makers = self.freezer.living(steps)[-_MOST_MAKERS:]
        except Exception as error:  # an argument that cannot be copied
            pass_on(error)
            history.makers = []
            return False
        history.steps.append(last)
        return running.is_noted and not any(step.is_cut for step in history.steps)

    def _know_state(self) -> None:
        self.running.memory.know_state(self.history.changing(), self.history.untouched())
