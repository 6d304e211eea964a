"""From an alarm to a file: go back to the step where it began, and find the call that is unlike the last healthy step.

The kept steps are played with their gradient norms and updates measured. An event begins with the first step in which
one of these, or the number that gave the alarm, is off its course for as long as the alarm lasts. That step and the
last healthy one become programs; comparing them shows the call, the input and the rows of the batch.

From parameters that differ between ranks to the first step that makes them differ (`--on ranks`).

All ranks play the steps since their last copies, when the parameters were equal, and compare after each. The step is
named as the first one only if playing has led every rank to the parameters that training has. One process cannot show
the failure, so the rank that differs saves no program: the inputs of its modules in that step, and its line.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile

from reprokit.capture.early.alarm import HIGH, QUANTITIES, SPREADS, USUAL, Band
from reprokit.capture.early.detectors import Alarm, Finding
from reprokit.capture.record import kinds
from reprokit.capture.record.compact_steps import PastStep
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.screens import bad_tensor
from reprokit.capture.record.state import CannotGoBack
from reprokit.capture.record.structure import iter_tensors
from reprokit.capture.record.tensor_names import parameter_names
from reprokit.capture.rewind.find_bad_step import Rewind
from reprokit.capture.rewind.measure_steps import MeasuredStep, OutOfTime, StepMeter
from reprokit.capture.rewind.meeting import FAILED, Meeting, Parted, RankMeter, Replicas, SavedElsewhere, Stopped
from reprokit.capture.rewind.replayer import quiet_hooks
from reprokit.capture.save.build_snapshot import (
    BuiltSnapshot,
    FailedStep,
    make_snapshot,
    replay_step,
    snapshot_without_replay,
)
from reprokit.capture.save.choose_step import BEGUN_BEFORE, NOT_KEPT, Describing
from reprokit.errors import ignored_errors, pass_on
from reprokit.locate.differences import MISMATCH
from reprokit.locate.failure import Failure, Predicate, RankDifference
from reprokit.locate.gains import Step, blocked, explained
from reprokit.locate.let_through import let_through
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Phase, Program

_PLAYED = 256  # steps, of those kept, that are looked at for parameters that learn nothing
_PLAYED_SECONDS = 1.0  # of CPU time for them; twice `LEAST_SILENT` steps are played however long they take
LEAST_SILENT = 20  # steps with a gradient of zeros
_MOSTLY = 0.5  # of the elements of a gradient
_SUDDEN = 8  # steps in which a layer dies that does not fade out by design
_ABOUT = 0.75  # of the usual share of a gradient that is not zero
_RECENT = 32  # of them: numbers of a run drift, and those of its first steps are far above all others
_LEAST = 8  # healthy steps that a played number is compared with
_GAP = 8  # steps before a number that it is not compared with: a slow rise would be its own reference
_LEAST_RATIO = 0.3  # of gradient norms and updates, see `early.detectors`
_MOST_BESIDE = 4  # healthy steps that a failing one is compared with
_PHASES = {"loss": Phase.FORWARD, "gradient norm": Phase.BACKWARD, "update": Phase.OPTIMIZER}
_OBSERVED = {"loss": "loss", "gradient norm": "gradient", "update": "parameter"}


class NotKept(Exception):
    """The step where an event began cannot be played any more; the message says why."""


class EventStep(Describing):
    """Describes the step where an alarm began. Raises `NotKept`."""

    def snapshot(self) -> BuiltSnapshot:
        """The snapshot of that step."""
        alarm = self._noticed.alarm
        assert alarm is not None, "an event has an alarm"
        with self._kept() as steps:
            number = _position(steps, alarm.place)
            if number is None:
                raise NotKept(f"step {alarm.step} is no longer kept")
            if isinstance(alarm, Finding):
                made = self._without_gradient(steps, number, alarm)
            elif alarm.kind == "scale":
                with self._begun(steps, number, "gradient norm") as failed:
                    made = make_snapshot(failed, self._noticed.frame)
            else:
                made = self._made(steps, alarm, number)
            with ignored_errors():  # the step is worth a file without the numbers of its layers
                return replace(made, snapshot=replace(made.snapshot, layers=self.layers(made.snapshot) or None))
            return made

    def find_silent(self, always: Set[int] = frozenset()) -> Finding | None:
        """A parameter that learns nothing: it gets no gradient from a step on.

        The parameters with an ``id`` in ``always`` had no gradient whenever somebody looked.
        """
        history = self._run_state.history
        with self._kept() as steps:
            played = steps[:_PLAYED]
            meter, rewind = StepMeter(seconds=_PLAYED_SECONDS, least=2 * LEAST_SILENT), Rewind(history, played)
            with rewind.going_back(), quiet_hooks(history.modules, rewind.leaves()), suppress(OutOfTime):
                rewind.play_until(len(played), meter)
            if rewind.notes:
                return None  # other losses than those of training
            named = parameter_names(history.modules, self._noticed.frame)
            return _silent(meter.steps, named, always)

    @contextmanager
    def _kept(self) -> Iterator[list[PastStep]]:
        """The steps since the copy before the last one; going back leads to it."""
        run_state = self._run_state
        run_state.freeze_past()
        if not run_state.history.is_complete:
            raise NotKept(NOT_KEPT)
        with run_state.history.with_earlier():
            steps = self._complete(run_state.past())
            if steps is None:
                raise NotKept(BEGUN_BEFORE)
            try:
                yield steps
            except CannotGoBack as reason:
                raise NotKept(str(reason)) from reason

    def _without_gradient(self, steps: list[PastStep], number: int, finding: Finding) -> BuiltSnapshot:
        """The snapshot of a step in which a parameter gets no gradient, or one of zeros."""
        parameters = (p for module in self._run_state.history.modules for p in module.parameters())
        address = next(p.data_ptr() for p in parameters if id(p) == finding.key)
        before = steps[max(number - 1, 0)].completed
        event = Predicate("share of zeros", 1.0, 1.0, before, steps[number].completed, source=finding.name)

        def explain(program: Program, tensors: Tensors) -> Failure:
            owned = (item.value for item in program.inputs if item.role == "parameter")
            value = next((value for value in owned if tensors[value].data_ptr() == address), None)
            failure = Failure(Phase.BACKWARD, "dead", value=value, event=event)
            return blocked(Step(program, tensors), failure)

        with self._begun(steps, number, "gradient norm") as failed:
            made = make_snapshot(replace(failed, explain=explain), self._noticed.frame)
        if made.snapshot.failure.call is None:
            raise NotKept(f"no call behind `{finding.name}` keeps its gradient back")
        return made

    def _made(self, steps: list[PastStep], alarm: Alarm, number: int) -> BuiltSnapshot:
        """The snapshot of the step in which a number has left its course, at ``number`` or before."""
        last = _position(steps, alarm.departure.values[-1].place)
        rewind, meter = Rewind(self._run_state.history, steps), StepMeter()
        with rewind.going_back(), quiet_hooks(self._run_state.history.modules, rewind.leaves()):
            rewind.play_until((number if last is None else max(number, last)) + 1, meter)
        measured = [] if rewind.notes else meter.steps  # a played loss that is not that of training dates nothing
        begun, healthy, predicate = _beginning(steps, measured, alarm, number)
        quantity = predicate.quantity
        reference = self._program_of(steps, healthy, quantity)

        def explain(program: Program, tensors: Tensors) -> Failure:
            failure = Failure(_PHASES[quantity], alarm.kind, event=predicate)
            return explained(Step(program, tensors), reference, failure)

        with self._begun(steps, begun, quantity) as failed:
            return make_snapshot(replace(failed, explain=explain), self._noticed.frame)

    def beside_healthy(self, made: BuiltSnapshot) -> BuiltSnapshot:
        """``made``, of which an input is bad, with what healthy steps before tell of that: see `let_through`."""
        snapshot = made.snapshot
        tensors = {v: tensor.to(made.devices.get(v, tensor.device)) for v, tensor in snapshot.tensors.items()}
        with self._kept() as steps:
            alike = [n for n, step in enumerate(steps) if step.completed < snapshot.step and _is_given_bad(step)]
            for number in alike[::-1][:_MOST_BESIDE]:
                healthy = self._program_of(steps, number, "gradient norm")
                found = let_through(snapshot.failure, Step(snapshot.program, tensors), healthy)
                if found is not None:
                    return replace(made, snapshot=replace(snapshot, failure=found))
        return made

    def _program_of(self, steps: list[PastStep], number: int, quantity: str) -> Step:
        recorded: list[Step] = []

        def keep(program: Program, tensors: Tensors) -> None:
            recorded.append(Step(program, {value: tensor.detach().clone() for value, tensor in tensors.items()}))

        with self._begun(steps, number, quantity) as failed:
            replay_step(replace(failed, explain=keep), self._noticed.frame)
        return recorded[0]

    @contextmanager
    def _begun(self, steps: list[PastStep], number: int, quantity: str) -> Iterator[FailedStep]:
        """A step of the past; the live state is where it began."""
        rewind, history = Rewind(self._run_state.history, steps), self._run_state.history
        with rewind.going_back():
            with quiet_hooks(history.modules, rewind.leaves()):
                entries, saved = rewind.begin(number)
            step = steps[number]
            failed = self._failed(step, _OBSERVED[quantity], _until_seen(entries, quantity), saved, None)
            later = steps[number + 1].entries if number + 1 < len(steps) else self._run_state.running.entries
            yield replace(
                failed,
                buffers=None,
                put_back=self._state(),
                notes=rewind.notes,
                likewise=[*later, *self._run_state.running.entries],
            )


def _silent(measured: Sequence[MeasuredStep], named: Mapping[int, str], always: Set[int]) -> Finding | None:
    """The first parameter that gets no gradient from a step on, for enough steps that gave another one a gradient.

    In the step before less than half of it was zero, and of those that end with it: a layer may fade out by design,
    unit by unit, as under a decay. Without a step before it has to have been so ``always``. One that has a gradient in
    some steps and none in others may rest by design, as the head of a task does, so a gradient that is missing has to
    have been there in every step before.
    """
    series = {key: _Shares.of(measured, key) for key in named}
    faded = {one.since[-1].place for one in series.values() if one.since and one.before and one.is_fading}
    for key, name in named.items():
        one = series[key]
        if len(one.since) < LEAST_SILENT or one.since[-1].place in faded or not (one.before or key in always):
            continue
        has_learned = len(one.before) >= _LEAST and all(share not in (None, 1.0) for share in one.before)
        if not one.is_missing or has_learned:
            way = "none" if one.is_missing else "zeros"
            return Finding("dead", name, way, len(one.since), one.since[-1].place, one.since[-1].completed, key)
    return None


@dataclass(frozen=True)
class _Shares:
    """The shares of zeros in the gradient of one parameter ``before`` the steps ``since``, latest first, in which it
    has no other elements. ``None``: it has no gradient, which ``is_missing`` says of the last step."""

    before: list[float | None]
    since: list[PastStep]
    is_missing: bool

    @classmethod
    def of(cls, measured: Sequence[MeasuredStep], key: int) -> _Shares:
        """Those in the steps that gave any parameter a gradient."""
        shares = [(one.step, one.zeros[key]) for one in measured if one.norm and key in one.zeros]
        since = [step for step, _ in takewhile(lambda pair: pair[1] in (None, 1.0), reversed(shares))]
        before = [share for _, share in shares[: len(shares) - len(since)]]
        return cls(before, since, bool(shares) and shares[-1][1] is None)

    @property
    def is_fading(self) -> bool:
        """True if at least half of the last gradients was zero, and there is no telling that this came suddenly.

        It did if `_SUDDEN` steps before the end the share was about what it usually was.
        """
        shares = [share or 0.0 for share in self.before]
        if shares[-1] < _MOSTLY or len(shares) <= 2 * _SUDDEN:
            return shares[-1] >= _MOSTLY
        then, usual = shares[-_SUDDEN], statistics.median(shares[:-_SUDDEN])
        return then >= _MOSTLY and 1.0 - then < _ABOUT * (1.0 - usual)


def _is_given_bad(step: PastStep) -> bool:
    return bad_tensor(t for entry in step.entries for t in iter_tensors((entry.args, entry.kwargs))) is not None


def _position(steps: Sequence[PastStep], place: int) -> int | None:
    return next((number for number, step in enumerate(steps) if step.place == place), None)


def _until_seen(entries: list[Entry], quantity: str) -> list[Entry]:
    """The entries of a step up to where a quantity shows; gradients as they are before they are clipped."""
    kind = kinds.OPTIMIZER if quantity == "update" else kinds.BACKWARD
    last = max((n for n, entry in enumerate(entries) if entry.kind is kind), default=len(entries))
    later = entries[last + 1 :] if quantity != "update" else []
    return entries[: last + 1] + [entry for entry in later if entry.kind is kinds.UNSCALE]


def _beginning(
    steps: list[PastStep], measured: list[MeasuredStep], alarm: Alarm, number: int
) -> tuple[int, int, Predicate]:
    """Where an alarm begins: the positions of that step and of a healthy one among the kept ones, and the predicate.

    It is the alarm's own first step, or an earlier one that is off in a number that was not followed live.

    That number has to be off in every step from there up to the alarm's last. In the step right before the alarm it
    may be off alone, if the update is: a learning rate may be wrong once.
    """
    departure = alarm.departure
    healthy = _position(steps, departure.healthy.place)
    own = Predicate(
        QUANTITIES[alarm.kind],
        departure.began.number,
        departure.limit,
        departure.healthy.step,
        departure.began.step,
        departure.usual,
    )
    found = number, healthy if healthy is not None else max(number - 1, 0), own
    own_turn = [n for n, one in enumerate(measured) if one.optimizer == measured[number].optimizer]
    series = {name: [getattr(measured[n], name) for n in own_turn] for name in ("norm", "update")}
    last = own_turn.index(number) - 1 if measured else -1  # before the alarm
    is_by_update = _is_off(series["update"], last)
    for quantity, numbers in zip(("gradient norm", "update"), series.values(), strict=True):
        turn = _first_off(numbers)
        if is_by_update and _is_off(numbers, last):
            turn = last if turn is None else min(turn, last)
        if turn is not None and own_turn[turn] < found[0]:
            band = _band(numbers, turn)
            usual = (n for n in range(turn - 1, -1, -1) if (value := numbers[n]) and band.spreads(value) <= USUAL)
            first, before = own_turn[turn], own_turn[next(usual, turn - 1)]
            predicate = Predicate(
                quantity,
                numbers[turn] or 0.0,
                band.number(HIGH),
                steps[before].completed,
                steps[first].completed,
                band.number(0.0),
            )
            found = first, before, predicate
    return found


def _is_off(numbers: Sequence[float | None], position: int, limit: float = SPREADS) -> bool:
    if position < _LEAST or len(_known(numbers[:position])) < _LEAST:
        return False
    value = numbers[position]
    return value is not None and _band(numbers, position).spreads(value) > limit


def _band(numbers: Sequence[float | None], position: int) -> Band:
    """The course of the numbers before a position, without the last ones if there are enough others."""
    older = _known(numbers[: max(position - _GAP, 0)])
    before = older if len(older) >= _LEAST else _known(numbers[:position])
    return Band.of(before[-_RECENT:], _LEAST_RATIO)


def _known(numbers: Sequence[float | None]) -> list[float]:
    return [value for value in numbers if value and math.isfinite(value)]


def _first_off(numbers: Sequence[float | None]) -> int | None:
    """The position from which on all numbers are high, and the last ones off the course of those before.

    ``None`` if the last one is not off.
    """
    first, limit = None, SPREADS
    for position in range(len(numbers) - 1, _LEAST - 1, -1):
        if not _is_off(numbers, position, limit):
            break
        first, limit = position, HIGH
    return first


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
