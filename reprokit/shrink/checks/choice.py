"""Which check a reduction uses: the one that was asked for, else the one that the snapshot's failure calls for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from reprokit.compare.compiled import Compiled
from reprokit.compare.difference import NOT_FINITE, Reference
from reprokit.locate.failure import Failure
from reprokit.locate.kinds import MISMATCH, Dead, Event, ScaleFell, Unlearned
from reprokit.program.step import Step
from reprokit.shrink import spec as specs
from reprokit.shrink.checks.check import Check
from reprokit.shrink.checks.mismatch import Double, MismatchCheck, OtherDevice, OtherWay
from reprokit.shrink.checks.predicate import FunctionCheck, PredicateCheck, jumped_rate, odd_rows
from reprokit.shrink.checks.recorded import ExceptionCheck, NonfiniteCheck
from reprokit.snapshot.format import Snapshot


def choose_check(text: str | None, snapshot: Snapshot) -> Check:
    """The check, with the recorded failure adopted where the snapshot recorded one of its kind.

    Raises `UsageError` for a check that does not exist or that this machine cannot make,
    `NotReproduced` for a failure that one process cannot show.
    """
    failure = snapshot.failure
    if text is None:
        require_reproducible(snapshot)
    if failure.event is not None and text in (None, *Event.words, *ScaleFell.words, *Dead.words, *Unlearned.words):
        return PredicateCheck(event=failure, rows=odd_rows(snapshot), rate=jumped_rate(snapshot))
    if text is None and failure.kind.compares:
        return _as_recorded(_mismatch(_recorded(*failure.reference)), failure)
    check = _made(specs.parse(text or failure.kind.check))
    if isinstance(check, MismatchCheck):
        return _as_recorded(check, failure)
    if isinstance(check, (NonfiniteCheck, ExceptionCheck)) and check.recognises(failure):
        return check.adopted(failure, Step.of(snapshot))
    return check


def require_reproducible(snapshot: Snapshot) -> None:
    """Raise the reason why one process cannot show the failure, if there is one."""
    refusal = snapshot.failure.kind.refusal(snapshot.failure)
    if refusal is not None:
        raise refusal


def _made(spec: specs.Spec) -> Check:
    make = _MAKERS.get(spec.kind, _own)
    return make(spec)


def _own(spec: specs.Spec) -> Check:
    assert spec.file is not None, "a check by function has a file"
    return FunctionCheck(file=spec.file.resolve(), function=spec.detail)


_MAKERS: dict[str, Callable[[specs.Spec], Check]] = {
    specs.NONFINITE: lambda _: NonfiniteCheck(),
    specs.EXCEPTION: lambda _: ExceptionCheck(),
    specs.MISMATCH: lambda spec: _mismatch(_reference(spec)),
}


def _as_recorded(check: MismatchCheck, failure: Failure) -> MismatchCheck:
    """With a value that is not finite on one side, if that is what capture found, and with what `diff` said of it."""
    check = replace(check, departure=failure.departure)
    if failure.kind.compares and failure.way.endswith(NOT_FINITE):
        return replace(check, way=check.reference.name + NOT_FINITE)
    return check


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
