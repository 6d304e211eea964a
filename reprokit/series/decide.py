"""The cause of a failure that no experiment has decided: the local rule that fits, if its fix was tried and helped."""

from __future__ import annotations

from dataclasses import replace

from reprokit.locate.failure import Failure
from reprokit.rules.diagnosis import Diagnosis
from reprokit.rules.match import TIME_UP
from reprokit.rules.table import RULES
from reprokit.series.cause import SMALLER_RATES, Cause, Intervention
from reprokit.words import number_words

UNKNOWN, NUMERICS = "unknown", "numerics"
_RULES = {rule.name: rule for rule in RULES}


def may_tell_more(cause: Cause | None) -> bool:
    """True if a rule may know more than experiments have shown: of half precision they do not know which call it is."""
    return cause is None or cause.kind in (UNKNOWN, NUMERICS)


def out_of_time(cause: Cause | None) -> Cause | None:
    """A cause that nothing has decided, for which not all rules could be asked."""
    return replace(cause, text=f"{cause.text} {TIME_UP}") if cause is not None and cause.kind == UNKNOWN else cause


def decided(cause: Cause | None, found: Diagnosis, failure: Failure) -> Cause | None:
    """The cause that an experiment has shown, else the one that the rule of a diagnosis shows.

    A rule shows one if it is certain and the step was run with a change that helped; of bad data also if the failure
    has gone with another batch. It shows none if experiments that were to be made were not.
    """
    rule = _RULES.get(found.id)
    is_shown = cause is not None and cause.kind == NUMERICS
    if rule is not None and rule.is_shown and failure.kind.raises and found.confidence == "certain":
        return _with_operand(cause, found, failure)
    if not may_tell_more(cause) or rule is None or not rule.cause:
        return cause
    if is_shown and rule.cause not in (NUMERICS, "setting"):
        return cause
    if rule.cause == NUMERICS and any(_RULES[also.id].tier == "context" for also in found.also):
        return cause  # operands of a run that had left its course before
    tried = cause.interventions if cause is not None else ()
    origin, fix = failure.cause or failure, found.fix
    place = f" at {origin.site.place}" if origin.site is not None else ""
    says = f"{found.title}{place}: {found.evidence[0] if found.evidence else found.mechanism.removesuffix('.')}."
    other = next((one for one in tried if one.removes), None)
    made = None
    if found.confidence == "certain" and fix is not None and fix.helped and fix.is_plausible is not False:
        made = Intervention(", then ".join(dict.fromkeys(fix.text)), True, fix.loss, 1)
        loss = f" (loss {number_words(made.loss)})" if made.loss is not None else ""
        after = f"The step stays finite{loss}" if fix.is_plausible else "Its result is finite"
        says += f" {'The call returns' if failure.kind.raises else after} after this change: {made.change}."
    elif found.confidence == "certain" and rule.trial:
        made = Intervention(rule.trial, True, None, 1)
    elif found.note == TIME_UP:
        return out_of_time(cause)
    elif is_shown or rule.cause != "data" or other is None:
        return cause
    shown = cause.text if cause is not None and is_shown else other.words(failure.kind) if other is not None else ""
    says += f" {shown}" if shown else ""
    evidence = tuple(" ".join(line.split()) for line in found.evidence)
    before = cause.evidence if cause is not None else ()
    interventions = (*tried, *([made] if made is not None else []))
    if cause is not None and cause.why_not is not None:
        # What was unlike comes first, and the rule may hide it: cause_row_of_other_unit, where clamping helps as well.
        text = " ".join(filter(None, [cause.text, says]))
        return replace(cause, text=text, evidence=(*before, *evidence), interventions=interventions)
    says = f"{before[0]}. {says}" if before and rule.cause == "state" else says
    return Cause(rule.cause, says, (*evidence, *before), interventions)


def _with_operand(cause: Cause | None, found: Diagnosis, failure: Failure) -> Cause:
    """The cause of an exception whose rule has found the operand that it is about."""
    known = cause or Cause(UNKNOWN, "")
    is_decided, evidence = known.kind != UNKNOWN, (*found.evidence, *known.evidence)
    place = f" at {failure.site.place}" if failure.site is not None else ""
    other = next((one.words(failure.kind) for one in known.interventions if one.removes), "")
    is_told = is_decided or known.why_not is not None  # what was unlike is not left out where nothing was tried
    text = f"{found.title}{place}: {found.evidence[0]}. {known.text if is_told else other}".strip()
    return replace(known, kind=known.kind if is_decided else _RULES[found.id].cause, text=text, evidence=evidence)


def is_second(cause: Cause | None, found: Diagnosis) -> bool:
    """True if the fix of a diagnosis would only hide the failure: its cause lies before the step, or in the data."""
    rule = _RULES.get(found.id)
    if rule is None or cause is None or cause.kind not in ("data", "setting", "state"):
        return False
    removing = next((one.change for one in cause.interventions if one.removes), "")
    return rule.cause != cause.kind or (is_of_course(found) and removing not in SMALLER_RATES)


def is_of_course(found: Diagnosis) -> bool:
    """True if a rule is about numbers that had left their course before the step."""
    return found.id in _RULES and _RULES[found.id].tier == "context"
