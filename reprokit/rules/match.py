"""Why a step failed: the rule that fits what was seen at the origin, and the fixes that were tried.

`diagnose` runs the step once to look, and then as often as its budget allows to try fixes. It knows nothing but the
step: no names of files, models or users have a say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from reprokit.locate.failure import Failure
from reprokit.locate.spelling import short_name
from reprokit.own_work import ignored_warnings
from reprokit.program.interpreter import determinism
from reprokit.program.observe import Copies
from reprokit.program.step import Step
from reprokit.rules.diagnosis import UNKNOWN, Also, Diagnosis, TriedFix
from reprokit.rules.fix import TrialBudget, WriteCode, attempt
from reprokit.rules.rule import CONFIDENCES, TIERS, Fix, Numbers, Rule, asked
from reprokit.rules.scene import Scene, observe, observe_failing, observe_origin
from reprokit.rules.table import RULES

if TYPE_CHECKING:
    from reprokit.snapshot.format import Snapshot

MAX_ALSO = 3
TIME_UP = "Time was up before all fixes were tried."
_VERB = re.compile(r"\b(?:are|have|divide|hold|overflow|raise)\b")
_SINGULAR = {"are": "is", "have": "has"}
Found = list[tuple[Rule, Numbers]]


def diagnose(step: Snapshot | Scene, *, budget: TrialBudget | None = None, write: WriteCode | None = None) -> Diagnosis:
    """The diagnosis of a captured step (a snapshot).

    ``write`` makes the code of a fix; without it only code from the table is given.
    """
    if not step.failure.kind.has_rules(step.failure):
        return Diagnosis(UNKNOWN, "No known mechanism", "There is no origin to look at.")
    with determinism(step.settings), ignored_warnings():
        is_event = step.failure.event is not None
        scene, is_failing = (observe(step), True) if is_event else observe_failing(step)
        scene, found = _matched(scene)
        if not found:
            why = "None of the known causes fits the values that the call was given."
            return Diagnosis(UNKNOWN, "No known mechanism", why)
        if is_event:  # no change of one call ends it
            return _described(found, None, [])
        return _described(found, *_try_all(scene, found, is_failing, budget or TrialBudget(), write))


def _matched(scene: Scene) -> tuple[Scene, Found]:
    """The scene that rules apply to: of an exception maybe that of a bad value which an earlier call returned."""
    cause = scene.failure.cause
    if cause is not None and cause.call_index is not None:
        made = observe(replace(scene, failure=cause))
        found = matches(made)
        if found:
            return made, found
    return scene, matches(scene)


def _described(found: Found, note: str | None, tried: list[TriedFix]) -> Diagnosis:
    """The diagnosis of the first rule; the fix is the first one that leaves a usual loss, or else that helps."""
    (rule, numbers), *others = found
    helped = [item for item in tried if item.helped]
    plausible = [item for item in helped if item.is_plausible]
    fix = next(iter([*plausible, *helped]), None)
    return Diagnosis(
        rule.name,
        rule.title,
        mechanism=rule.why.format(**numbers),
        evidence=tuple(_said(line, numbers) for line in rule.seen),
        confidence=rule.confidence,
        advice=rule.advice.format(**numbers),
        links=tuple(f"https://github.com/{place}" for place in rule.links.split()),
        also=tuple(_also(rule, others))[:MAX_ALSO],
        fix=fix,
        tried=tuple(item for item in tried if item is not fix),
        note=note,
    )


def matches(scene: Scene) -> Found:
    """The rules that apply with the numbers of their predicates, the most specific first.

    Rules of context (growth over many steps, say) explain a failure only when nothing at the origin does.
    """
    found = [(rule, numbers) for rule in RULES if (numbers := numbers_of(rule, scene)) is not None]
    return sorted(found, key=lambda item: _rank(item[0]))


def with_rule(failure: Failure, step: Step, first: str | None = None) -> Failure:
    """The failure with its local rule: ``first`` if that fits, else the first of the table that does."""
    if failure.call_index is None or not failure.kind.is_nonfinite or failure.in_update:
        return failure
    with ignored_warnings():
        scene = observe_origin(step, failure)
        rules = sorted(filter(attrgetter("is_local"), RULES), key=lambda rule: (rule.name != first, _rank(rule)))
        return replace(failure, rule=next((rule.name for rule in rules if numbers_of(rule, scene) is not None), None))


def rule_fits(name: str, failure: Failure, step: Step, trace: Copies) -> bool:
    """True if a local rule fits a failure; ``trace`` is of the run that located it."""
    if failure.call_index is None:  # gradients that overflow where they are added up, which no call may have made
        return False
    with ignored_warnings():
        scene = observe_origin(step, failure, trace)
        return any(numbers_of(rule, scene) is not None for rule in RULES if rule.name == name)


def _rank(rule: Rule) -> tuple[Any, ...]:
    is_half = rule.name.startswith("half-")  # the dtype explains what the same operands do not in float32
    return TIERS.index(rule.tier), CONFIDENCES.index(rule.confidence), not is_half, -len(rule.when), not rule.calls


def numbers_of(rule: Rule, scene: Scene) -> Numbers | None:
    """The numbers of a rule's predicates, ``None`` when it does not apply."""
    failure, call = scene.failure, scene.call
    name = short_name(call) if call is not None else None
    if failure.kind not in rule.kinds.split() or (rule.calls and name not in rule.calls.split()):
        return None
    if rule.phases and _phases(failure).isdisjoint(rule.phases.split()):
        return None
    shown = call.target.removeprefix("torch.optim.") if call is not None and call.is_optimizer_step else name
    numbers: Numbers = {"call": f"{name}_" if call and call.name == f"{name}_" else shown, "count": 0, "total": 0}
    for predicate in rule.when:
        found = asked(predicate, scene)
        if found is None:
            return None
        numbers.update(found)
    return numbers


def _phases(failure: Failure) -> set[str]:
    """The phases of rules that may apply: what a call returns has the reasons of a forward pass in any phase.

    So has a NaN that the origin made and a later call drops.
    """
    if not failure.is_bad_gradient:
        return {failure.phase}
    if not failure.is_derivative:
        return {"forward"}
    is_made = failure.drop is not None and not failure.drop.is_given
    return {"backward", "forward"} if is_made else {"backward"}


def _also(rule: Rule, others: Found) -> Iterator[Also]:
    """The other rules that apply and looked at something that those before them did not."""
    known = {predicate.__name__ for predicate in rule.when} | {"raises"}  # the message is printed anyway
    for other, numbers in others:
        names = {predicate.__name__ for predicate in other.when}
        if other.tier != "general" and not names <= known:
            known |= names
            yield Also(other.name, other.title, tuple(_said(line, numbers) for line in other.seen))


def _said(line: str, numbers: Numbers) -> str:
    """A line of evidence with its numbers; ``1 of 3 arguments is zero``."""
    if numbers["count"] == 1 and line.startswith("{count} of "):
        line = _VERB.sub(lambda match: _SINGULAR.get(match[0], f"{match[0]}s"), line, count=1)
    return line.format(**numbers)


def _try_all(
    scene: Scene, found: Found, is_failing: bool, budget: TrialBudget, write: WriteCode | None
) -> tuple[str | None, list[TriedFix]]:
    """All fixes of the rules in order, until one helps and leaves a usual loss; and why none was tried."""
    fixes = _fixes_of(found)
    if not fixes:
        return "No change of the step itself is known that would help.", []
    if not is_failing:
        return "The step did not fail when it was run again, so no fix could be tried.", []
    tried: list[TriedFix] = []
    for fix in fixes:
        made = attempt(scene, fix, budget, lambda moved: _fixes_of(matches(moved)), write)
        if made is not None and made not in tried:
            tried.append(made)
        if made is not None and made.helped and made.is_plausible is not False:
            return None, tried
        if budget.is_spent:
            return TIME_UP, tried
    return None, tried


def _fixes_of(found: Found) -> list[Fix]:
    fixes = [fix for rule, _ in found for fix in rule.fixes]
    return [fix for number, fix in enumerate(fixes) if fix not in fixes[:number]]
