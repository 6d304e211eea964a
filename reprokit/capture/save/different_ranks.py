"""From parameters that differ between ranks to the first step that makes them differ (`--on ranks`).

All ranks play the steps since their last copies, when the parameters were equal, and compare after each. The step is
named as the first one only if playing has led every rank to the parameters that training has. One process cannot show
the failure, so the rank that differs saves no program: the inputs of its modules in that step, and its line.
"""

from __future__ import annotations

from dataclasses import replace

from reprokit.capture.record.compact_steps import PastStep
from reprokit.capture.rewind.find_bad_step import Rewind
from reprokit.capture.rewind.meeting import FAILED, Meeting, Parted, SavedElsewhere, Stopped
from reprokit.capture.rewind.replayer import quiet_hooks
from reprokit.capture.rewind.replicas import RankMeter, Replicas
from reprokit.capture.save.build_snapshot import BuiltSnapshot, snapshot_without_replay
from reprokit.capture.save.choose_step import BEGUN_BEFORE, NOT_KEPT, Describing
from reprokit.errors import pass_on
from reprokit.locate.differences import MISMATCH
from reprokit.locate.failure import Failure, RankDifference
from reprokit.program.ir import Phase

RANKS = "ranks"  # the reference of such a mismatch
NOT_TOGETHER = "not all ranks hold copies of the same step, so they did not go back"
OTHER_PARAMETERS = "playing the steps since the last copy did not lead every rank to the parameters that training has"
ONE_PROCESS = "one process cannot show that ranks differ; the snapshot holds the inputs of the step"


class DifferentRanks(Describing):
    """Describes the step in which the ranks begin to differ. Raises `SavedElsewhere` on all ranks but one, `Parted` if
    a rank does not answer."""

    def snapshot(self) -> BuiltSnapshot:
        """The snapshot of that step."""
        run_state = self._run_state
        replicas, meeting, found = run_state.replicas, run_state.ranks.meeting, self._noticed.difference
        assert replicas is not None and meeting is not None and found is not None, "ranks that differ have met"
        run_state.freeze_past()
        running = run_state.step_of(run_state.running.entries, run_state.running.memory.saved)
        step, meter = replace(running, completed=found.began_at), None
        note = NOT_TOGETHER if run_state.history.is_complete else NOT_KEPT
        together = run_state.go_back_together(has_difference=True)
        if together is not None:
            steps = self._complete([*run_state.past(), run_state.freezer.lightened(running)])
            note = BEGUN_BEFORE
            if "none" not in together.agree("none" if steps is None else "steps") and steps is not None:
                meter, note = self._played_on_all(replicas, together, steps)
            if meter is not None and meter.difference is not None and steps is not None:
                step, found = steps[max(meter.number, 0)], _dated(meter, steps, found)
        if found.ranks[0] != meeting.rank:
            raise SavedElsewhere(found.ranks[0], f"`{found.parameter}`")
        step = replace(step, place=running.place - (running.completed - step.completed))
        failed = replace(self._failed(step, "parameter", step.entries, step.saved, None), notes=[note])
        made = snapshot_without_replay(failed, self._noticed.frame)
        failure = Failure(Phase.OPTIMIZER, MISMATCH, RANKS, difference=found)
        if meter is not None:
            phase = Phase.OPTIMIZER if meter.is_by_update else Phase.FORWARD
            failure = replace(failure, phase=phase, site=meter.site)
        return BuiltSnapshot(replace(made, failure=failure))

    def _played_on_all(
        self, replicas: Replicas, together: Meeting, steps: list[PastStep]
    ) -> tuple[RankMeter | None, str]:
        """What playing all steps has found, and a note: why nothing, or that one process cannot show it."""
        history, live, reason = self._run_state.history, replicas.digest(), ""
        rewind = Rewind(history, steps, together=together)
        meter = RankMeter(together, replicas, self._noticed.frame)
        try:
            with rewind.going_back(), quiet_hooks(history.modules, rewind.leaves()):
                meter.end_step()  # of the copies
                rewind.play_until(len(steps), meter)
                meter.end_step()
                if meter.difference is None or replicas.digest() != live:
                    reason = "; ".join(rewind.notes) or OTHER_PARAMETERS
        except Stopped as stopped:
            reason = f"another process has stopped going back ({stopped})"
        except Parted:
            raise
        except Exception as error:  # of the user's code, which the state of then may not suit
            together.stop(FAILED)
            pass_on(error)
            reason = f"playing the steps since the last copy raised {type(error).__name__}: {error}"
        if set(together.agree("other" if reason else "same")) == {"same"}:
            return meter, ONE_PROCESS
        return None, reason or OTHER_PARAMETERS


def _dated(meter: RankMeter, steps: list[PastStep], seen: RankDifference) -> RankDifference:
    """The difference that was found by playing, with its step and what made it."""
    found, number = meter.difference, meter.number
    assert found is not None
    began = steps[max(number, 0)].completed
    if number < 0:
        cause = f"they differ before {f'step {began}' if began else 'the first step'}"
        return replace(found, equal_after=seen.equal_after, began_at=began, is_exact=not began, cause=cause)
    before = steps[number - 1].completed if number else seen.equal_after
    cause = "the updates of the optimizers differ" if meter.is_by_update else ""
    if meter.site is not None and not meter.is_by_update:
        cause = f"written outside of an optimizer, by rank {found.ranks[0]} at {meter.site.place}"
    return replace(found, equal_after=before, began_at=began, is_exact=True, cause=cause)
