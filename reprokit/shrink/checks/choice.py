"""Which check a reduction uses: the one that was asked for, else the one that the snapshot's failure calls for."""

from __future__ import annotations

from dataclasses import replace

from reprokit.compare.compiled import Compiled
from reprokit.compare.difference import MISMATCH, NOT_FINITE, Reference
from reprokit.errors import NotReproduced, UsageError
from reprokit.locate.failure import EVENTS, HEALTHY, SILENT, Failure
from reprokit.locate.failure import EXCEPTION as RAISED
from reprokit.program.step import Step
from reprokit.shrink import spec as specs
from reprokit.shrink.checks.check import Check
from reprokit.shrink.checks.mismatch import Double, MismatchCheck, OtherDevice, OtherWay
from reprokit.shrink.checks.predicate import FunctionCheck, PredicateCheck, jumped_rate, odd_rows
from reprokit.shrink.checks.recorded import ExceptionCheck, NonfiniteCheck
from reprokit.snapshot.format import Snapshot


def choose_check(text: str | None, snapshot: Snapshot) -> Check:
    """The check, with the recorded failure adopted where the snapshot recorded one of its kind.

    Raises `UsageError` for a check that does not exist or that this machine cannot make, `NotReproduced` for a failure
    that one process cannot show.
    """
    if text is None:
        require_reproducible(snapshot)
    is_exception = snapshot.failure.kind == RAISED
    if snapshot.failure.event is not None and text in (None, SILENT, *EVENTS):
        return PredicateCheck(event=snapshot.failure, rows=odd_rows(snapshot), rate=jumped_rate(snapshot))
    if text is None and snapshot.failure.kind == MISMATCH:
        return _as_recorded(_mismatch(_recorded(*snapshot.failure.reference)), snapshot.failure)
    if text is None:
        text = specs.EXCEPTION if is_exception else specs.NONFINITE
    check = _made(specs.parse(text))
    if isinstance(check, MismatchCheck):
        return _as_recorded(check, snapshot.failure)
    if isinstance(check, ExceptionCheck if is_exception else NonfiniteCheck):
        return check.adopted(snapshot.failure, Step.of(snapshot))
    return check


def require_reproducible(snapshot: Snapshot) -> None:
    """Raise `NotReproduced` for a failure that one process cannot show."""
    if snapshot.failure.kind == HEALTHY:
        raise UsageError(
            "the step is healthy and was saved with `--at-step`, so there is no failure to shrink",
            hint="`reprokit trace FILE` shows its tensors; `--check` looks for a failure of your own",
        )
    if snapshot.failure.kind == SILENT and snapshot.failure.event is None:
        raise NotReproduced(f"no value of the step is bad: {snapshot.failure.way}", hint="`reprokit show` has the step")
    if snapshot.failure.difference is not None:
        raise NotReproduced(
            "the parameters of the ranks differ, and one process cannot show that",
            hint="`reprokit show` has the step, the parameter and the ranks",
        )


def _made(spec: specs.Spec) -> Check:
    if spec.kind == specs.NONFINITE:
        return NonfiniteCheck()
    if spec.kind == specs.EXCEPTION:
        return ExceptionCheck()
    if spec.kind == specs.MISMATCH:
        return _mismatch(_reference(spec))
    assert spec.file is not None, "a check by function has a file"
    return FunctionCheck(file=spec.file.resolve(), function=spec.detail)


def _as_recorded(check: MismatchCheck, failure: Failure) -> MismatchCheck:
    """With a value that is not finite on one side, if that is what capture found, and with what `diff` said of it."""
    check = replace(check, departure=failure.departure)
    is_not_finite = failure.kind == MISMATCH and failure.way.endswith(NOT_FINITE)
    return replace(check, way=check.reference.name + NOT_FINITE) if is_not_finite else check


def _mismatch(reference: Reference) -> MismatchCheck:
    reference.require()
    return MismatchCheck(reference=reference)


def _recorded(detail: str, option: str) -> Reference:
    """The reference of a mismatch that capture found; a file of the user's is run for nothing that a file says."""
    return Compiled(option) if detail == specs.COMPILE else _reference(specs.Spec("", MISMATCH, detail))


def _reference(spec: specs.Spec) -> Reference:
    if spec.detail == specs.COMPILE:
        return Compiled(spec.option, spec.file.resolve() if spec.file is not None else None)
    if spec.detail == specs.OTHER:
        return OtherWay()
    return Double() if spec.detail == specs.FP64 else OtherDevice()
