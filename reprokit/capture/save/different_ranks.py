"""From parameters that differ between ranks to a file: go back to the first step that makes them differ.

All ranks play the steps since their last copies, when the parameters were equal, and compare after each. The step is
named as the first one only if playing has led every rank to the parameters that training has. The rank that differs
saves its own step.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from reprokit.arrivals import pass_on
from reprokit.capture.record.compact_steps import PastStep
from reprokit.capture.record.state import CannotGoBack
from reprokit.capture.rewind.compare_ranks import RankMeter, is_by_update, why
from reprokit.capture.rewind.find_bad_step import Rewind
from reprokit.capture.rewind.meeting import FAILED, Parted, SavedElsewhere, Stopped, Together
from reprokit.capture.rewind.replicas import Replicas
from reprokit.capture.rewind.user_hooks import ACCUMULATED, EVERY, guarded
from reprokit.capture.save.build_snapshot import BuiltSnapshot, make_snapshot, snapshot_without_replay
from reprokit.capture.save.choose_step import BEGUN_BEFORE, NOT_KEPT, Describing
from reprokit.locate.differences import MISMATCH
from reprokit.locate.failure import Failure, RankDifference
from reprokit.locate.quantity import at_optimizer
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Phase, Program, Site

RANKS = "ranks"  # the reference of such a mismatch
NOT_TOGETHER = "not all ranks hold copies of the same step, so they did not go back"
OTHER_PARAMETERS = "playing the steps since the last copy did not lead every rank to the parameters that training has"
NOT_AGAIN = "playing it again raised an error"
_SAME, _OTHER, _WITHOUT_HOOKS = "same", "other", "without hooks"


@dataclass(frozen=True)
class _First:
    """The first difference, the position of its step among ``steps``, and the user's hooks that were left ``out`` of
    playing. ``is_by_update``: an optimizer has made it; else ``site`` is where this rank has written parameters."""

    difference: RankDifference
    steps: list[PastStep]
    number: int
    out: Set[str]
    is_by_update: bool
    site: Site | None


class DifferentRanks(Describing):
    """Describes the step in which the ranks begin to differ. Raises `SavedElsewhere` on all ranks but one, `Parted` if
    a rank does not answer."""

    def snapshot(self) -> BuiltSnapshot:
        """The snapshot of that step."""
        run_state = self._run_state
        replicas, meeting, seen = run_state.replicas, run_state.ranks.meeting, self._noticed.difference
        assert replicas is not None and meeting is not None and seen is not None, "ranks that differ have met"
        run_state.freeze_past()
        together = run_state.go_back_together(has_difference=True)
        first, reason = None, NOT_TOGETHER if run_state.history.is_complete else NOT_KEPT
        if together is not None:
            first, reason = self._first(replicas, together, seen)
        made = self._replayed(first, together) if first is not None and together is not None else None
        found = first.difference if first is not None else seen
        if found.ranks[0] != meeting.rank:
            raise SavedElsewhere(found.ranks[0], f"`{found.parameter}`")
        return made or self._without_replay(found, reason or NOT_AGAIN)

    def _first(self, replicas: Replicas, together: Together, seen: RankDifference) -> tuple[_First | None, str]:
        """The first step that makes the ranks differ, or why it is not known; the same on all ranks."""
        run_state = self._run_state
        running = run_state.step_of(run_state.running.entries, run_state.running.memory.saved)
        steps = self._complete([*run_state.past(), run_state.freezer.lightened(running)])
        if "none" in together.agree("none" if steps is None else "steps") or steps is None:
            return None, BEGUN_BEFORE
        has_stepped = any(entry.has_stepped for step in steps for entry in step.entries)
        live = replicas.digest()
        for out in (EVERY - {ACCUMULATED} if has_stepped else EVERY, frozenset[str]()):
            meter, answer, reason = self._played_on_all(replicas, together, steps, live, out)
            answers = together.agree(answer)
            if set(answers) == {_SAME} and meter.difference is not None:
                return _first_of(meter, steps, seen, out), ""
            if _WITHOUT_HOOKS not in answers:
                break
        return None, reason or OTHER_PARAMETERS

    def _played_on_all(
        self, replicas: Replicas, together: Together, steps: list[PastStep], live: str, out: Set[str]
    ) -> tuple[RankMeter, str, str]:
        """Play all steps, and compare after each: what was found, if this rank has come to its ``live`` parameters, and
        why not."""
        history = self._run_state.history
        rewind = Rewind(history, steps, together=together)
        meter = RankMeter(together, history.modules, replicas, self._noticed.frame)
        hooked = 0
        try:
            with rewind.going_back(), guarded(history.modules, rewind.leaves(), out) as hooks:
                hooked = hooks.left_out.total()
                meter.end_step()  # of the copies
                rewind.play_until(len(steps), meter)
                meter.end_step()
                is_same = replicas.digest() == live
        except Stopped as stopped:
            return meter, _OTHER, f"another process has stopped going back ({stopped})"
        except Parted:
            raise
        except Exception as error:  # of the user's code, which the state of then may not suit
            together.stop(FAILED)
            pass_on(error)
            is_own = isinstance(error, CannotGoBack)
            reason = "" if is_own else f"playing the steps since the last copy raised {type(error).__name__}: "
            return meter, _OTHER, f"{reason}{error}"
        return meter, _SAME if is_same else _WITHOUT_HOOKS if hooked else _OTHER, "; ".join(rewind.notes)

    def _replayed(self, first: _First, together: Together) -> BuiltSnapshot | None:
        """The step as a program, on the rank that differs; the others play the steps before with it."""
        history, difference = self._run_state.history, first.difference
        rewind = Rewind(history, first.steps, together=together)

        def explain(program: Program, tensors: Tensors) -> Failure:
            phase = Phase.OPTIMIZER if first.is_by_update else Phase.FORWARD
            failure = Failure(phase, MISMATCH, RANKS, site=first.site, difference=difference)
            return at_optimizer(failure, program) if first.is_by_update else failure

        try:
            with rewind.going_back():
                with guarded(history.modules, rewind.leaves(), first.out):
                    entries, saved = rewind.begin(first.number)
                if together.rank != difference.ranks[0]:
                    return None
                step = first.steps[first.number]
                failed = self._failed(step, "parameter", entries, saved, None)
                later = first.steps[first.number + 1 : first.number + 2]
                likewise = [*(entry for step in later for entry in step.entries), *self._run_state.running.entries]
                if not first.is_by_update:
                    failed = replace(failed, micro_step=0)
                failed = replace(failed, buffers=None, put_back=self._state(), notes=rewind.notes, likewise=likewise)
                return make_snapshot(replace(failed, explain=explain), self._noticed.frame)
        except (Stopped, Parted):
            return None
        except Exception as error:
            if together.rank != difference.ranks[0]:
                together.stop(FAILED)
            pass_on(error)
            return None

    def _without_replay(self, difference: RankDifference, reason: str) -> BuiltSnapshot:
        """The running step by what its modules were given."""
        run_state = self._run_state
        step = run_state.step_of(run_state.running.entries, run_state.running.memory.saved)
        place = step.place - (step.completed - difference.began_at)
        step = replace(step, completed=difference.began_at, place=place)
        failed = self._failed(step, "parameter", step.entries, step.saved, None)
        failed = replace(failed, notes=[f"the step was not replayed: {reason}"])
        made = snapshot_without_replay(failed, self._noticed.frame)
        failure = Failure(Phase.OPTIMIZER, MISMATCH, RANKS, difference=difference)
        return BuiltSnapshot(replace(made, failure=failure))


def _first_of(meter: RankMeter, steps: list[PastStep], seen: RankDifference, out: Set[str]) -> _First:
    """The difference that was found, with its step and why it is there."""
    found, number = meter.difference, meter.number
    assert found is not None
    if number < 0:
        began = steps[0].completed
        cause = f"they differ before {f'step {began}' if began else 'the first step'}"
        found = replace(found, equal_after=seen.equal_after, began_at=began, is_exact=not began, cause=cause)
        return _First(found, steps, 0, out, is_by_update=False, site=None)
    before = steps[number - 1].completed if number else seen.equal_after
    cause = why(found.ranks[0], found.reference, meter.accounts)
    found = replace(found, equal_after=before, began_at=steps[number].completed, is_exact=True, cause=cause)
    by_update = is_by_update(meter.accounts[found.ranks[0]], meter.accounts[found.reference])
    return _First(found, steps, number, out, by_update, meter.site)
