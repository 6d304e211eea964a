"""From a snapshot to a reduction with all that is found out about it: piece of the model, diagnosis, table of variants.

``reprokit shrink`` and `reprokit.shrink` both call `shrink`, and `reprokit.render.texts.render_all` writes the files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reprokit.errors import ReprokitError
from reprokit.program.ir import Program
from reprokit.program.step import Step
from reprokit.render.fix_code import fix_code
from reprokit.render.names import in_users_words
from reprokit.rules.diagnosis import Diagnosis, resting_on_replay
from reprokit.rules.match import diagnose
from reprokit.shrink import View, reducer
from reprokit.shrink.reducer import SearchStopped
from reprokit.shrink.reduction import Reduction, WhatIfResult
from reprokit.snapshot.format import Snapshot
from reprokit.whatif import of_reduction

WHATIF_SECONDS = 5.0
MISMATCH_SECONDS = 30.0  # where every row compiles the program


def shrink(
    snapshot: Snapshot,
    *,
    check: str | None = None,
    whatif: bool = True,
    fast: bool = False,
    view: View | None = None,
    **search: Any,
) -> Reduction:
    """`reducer.shrink` with diagnosis and table. An error in one of these is shown, and the rest of the result stays.

    ``fast`` leaves out the piece of the model and the table; ``search`` are options of the reducer. Ctrl-C raises
    `SearchStopped` with the best so far, or `KeyboardInterrupt` before there is one.
    """
    view = view or View()
    if check is None and snapshot.failure.is_given:  # the reducer would say so without the names in the user's code
        snapshot = in_users_words(snapshot)
    reduction = reducer.shrink(snapshot, check=check, with_piece=not fast, view=view, **search)
    try:
        reduction = replace(reduction, diagnosis=_diagnosed(snapshot, view))
        if whatif and not fast and reduction.failure.event is None:
            reduction = replace(reduction, whatif=_compared(reduction, snapshot, check, view))
    except KeyboardInterrupt as interrupt:
        raise SearchStopped(reduction) from interrupt
    return reduction


def _compared(reduction: Reduction, snapshot: Snapshot, check: str | None, view: View) -> WhatIfResult:
    seconds = MISMATCH_SECONDS if reduction.failure.kind.compares else WHATIF_SECONDS
    view.say(f"running the result in other ways, for {seconds:g} s at most (--no-whatif leaves this out)")
    try:
        return of_reduction(reduction, snapshot.settings, step=Step.of(snapshot), seconds=seconds, check=check)
    except ReprokitError as error:
        view.say(f"there is no what-if table: {error.message}")
        return WhatIfResult()


def _diagnosed(snapshot: Snapshot, view: View) -> Diagnosis | None:
    def write(before: Program, after: Program) -> str:
        try:
            return fix_code(before, after)
        except Exception as error:
            view.say(f"could not render the fix as code: {type(error).__name__}: {error}")
            return ""

    try:
        found = diagnose(in_users_words(snapshot), write=write)
        is_doubtful = snapshot.fidelity == "unfaithful"
        return resting_on_replay(found, snapshot.fidelity_note) if is_doubtful else found
    except Exception as error:
        view.say(f"no diagnosis: {type(error).__name__}: {error}")
        return None
