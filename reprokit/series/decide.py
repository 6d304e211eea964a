"""The cause of a failure that no experiment has decided: the local rule that fits, if its fix was tried and helped.

`decided` makes a `Cause` of a diagnosis, such as

    The logarithm of zero at train.py:12: 3 of 8 arguments are exactly zero. The step stays finite (loss 0.693) after
    this change: clamp the argument of log away from zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reprokit.locate.failure import Failure
from reprokit.program.ir import Site
from reprokit.rules.diagnosis import Diagnosis, TriedFix
from reprokit.rules.match import TIME_UP
from reprokit.rules.rule import Rule
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
    rule, known = _RULES.get(found.id), cause or Cause(UNKNOWN, "")
    if rule is None:
        return cause
    if rule.is_shown and failure.kind.raises and found.confidence == "certain":
        return _with_operand(rule, known, found, failure)
    if not may_tell_more(cause) or not _may_show(rule, known, found):
        return cause
    fix, made = _certain_fix(found), None
    if fix is not None:
        made = Intervention(fix.change, True, fix.loss, 1)
    elif found.confidence == "certain" and rule.trial:
        made = Intervention(rule.trial, True, None, 1)
    elif found.note == TIME_UP:
        return out_of_time(cause)
    elif rule.cause != "data" or known.removing is None or known.kind == NUMERICS:
        return cause
    text = " ".join(filter(None, _sentences(known, found, failure, fix)))
    evidence = tuple(" ".join(line.split()) for line in found.evidence)
    interventions = known.interventions if made is None else (*known.interventions, made)
    if known.why_not is not None:
        # What was unlike comes first, and the rule may hide it: cause_row_of_other_unit, where clamping helps as well.
        text = f"{known.text} {text}".strip()
        return replace(known, text=text, evidence=(*known.evidence, *evidence), interventions=interventions)
    if known.evidence and rule.cause == "state":
        text = f"{known.evidence[0]}. {text}"
    return Cause(rule.cause, text, (*evidence, *known.evidence), interventions)


def _may_show(rule: Rule, known: Cause, found: Diagnosis) -> bool:
    """True if a rule that fits may decide what experiments have left open."""
    if known.kind == NUMERICS and rule.cause not in (NUMERICS, "setting"):
        return False
    # Operands of a run that had left its course before
    is_of_run = rule.cause == NUMERICS and any(_RULES[also.id].tier == "context" for also in found.also)
    return bool(rule.cause) and not is_of_run


def _certain_fix(found: Diagnosis) -> TriedFix | None:
    """The fix of a certain rule, if the step was run with it and did not fail."""
    fix = found.fix
    if fix is None or found.confidence != "certain" or not fix.helped or fix.is_plausible is False:
        return None
    return fix


def _sentences(known: Cause, found: Diagnosis, failure: Failure, fix: TriedFix | None) -> Iterator[str]:
    """The mechanism, what the fix did, and what experiments have shown."""
    origin = failure.cause or failure
    yield _mechanism(found, origin.site)
    if fix is not None:
        yield _words_of_fix(fix, failure)
    if known.kind == NUMERICS:
        yield known.text
    elif known.removing is not None:
        yield known.removing.words(failure.kind)


def _mechanism(found: Diagnosis, site: Site | None) -> str:
    """What the rule says, where, and the first thing that was seen of it."""
    place = f" at {site.place}" if site is not None else ""
    seen = found.evidence[0] if found.evidence else found.mechanism.removesuffix(".")
    return f"{found.title}{place}: {seen}."


def _words_of_fix(fix: TriedFix, failure: Failure) -> str:
    after = "Its result is finite"
    if failure.kind.raises:
        after = "The call returns"
    elif fix.is_plausible:
        loss = f" (loss {number_words(fix.loss)})" if fix.loss is not None else ""
        after = f"The step stays finite{loss}"
    return f"{after} after this change: {fix.change}."


def _with_operand(rule: Rule, known: Cause, found: Diagnosis, failure: Failure) -> Cause:
    """The cause of an exception whose rule has found the operand that it is about."""
    is_decided = known.kind != UNKNOWN
    if is_decided or known.why_not is not None:
        more = known.text  # what was unlike is not left out where nothing was tried
    else:
        more = known.removing.words(failure.kind) if known.removing is not None else ""
    text = f"{_mechanism(found, failure.site)} {more}".strip()
    kind = known.kind if is_decided else rule.cause
    return replace(known, kind=kind, text=text, evidence=(*found.evidence, *known.evidence))


def is_second(cause: Cause | None, found: Diagnosis) -> bool:
    """True if the fix of a diagnosis would only hide the failure: its cause lies before the step, or in the data."""
    rule = _RULES.get(found.id)
    if rule is None or cause is None or cause.kind not in ("data", "setting", "state"):
        return False
    is_rate = cause.removing is not None and cause.removing.change in SMALLER_RATES
    return rule.cause != cause.kind or (is_of_course(found) and not is_rate)


def is_of_course(found: Diagnosis) -> bool:
    """True if a rule is about numbers that had left their course before the step."""
    return found.id in _RULES and _RULES[found.id].tier == "context"
