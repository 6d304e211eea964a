"""Why a step failed: the rule that fits what was seen at the origin, and the fixes that were tried.

`diagnose` runs the step once to look, and then as often as its budget allows to try fixes. It knows nothing but the
step: no names of files, models or users have a say. An edited step is run again and checked by what `locate` finds in
it, nothing else; one whose failure moved on to another call is diagnosed and edited again, as a person would.
"""

from __future__ import annotations

import math
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from reprokit.compare.quantity import losses_of
from reprokit.locate.blame import locate, outcome_or_failure
from reprokit.locate.failure import EVENTS, EXCEPTION, Failure
from reprokit.locate.spelling import short_name
from reprokit.locate.ways import ways_of
from reprokit.program.interpreter import Outcome, determinism, run
from reprokit.program.ir import Phase, Program, iter_refs
from reprokit.program.step import Step
from reprokit.rules.diagnosis import UNKNOWN, Also, Diagnosis, TriedFix
from reprokit.rules.rule import CONFIDENCES, TIERS, Edited, Fix, Numbers, Rule, asked
from reprokit.rules.scene import Scene, observe, observe_origin
from reprokit.rules.table import RULES
from reprokit.series.story import StepNumbers

if TYPE_CHECKING:
    from reprokit.snapshot.format import Snapshot

MAX_ALSO = 3
MAX_CHANGES = 4  # in one fix, when each change uncovers the next failure
_KINDS = ("nan", "inf", EXCEPTION, *EVENTS)
_VERB = re.compile(r"\b(?:are|have|divide|hold|overflow|raise)\b")
_SINGULAR = {"are": "is", "have": "has"}
_FAR = 1000.0  # how many times the usual loss of the steps before
_FAR_FROM_ALL = 10.0  # how many times the second largest of them
_LEAST_USUAL = 1e-3  # a loss that was smaller, or zero, is no measure
_LEAST_SIGNED = 3  # losses, none below zero
_ABSURD = 1e30  # for any loss
Found = list[tuple[Rule, Numbers]]
WriteCode = Callable[[Program, Program], str]
"""Writes what differs between a step and its edited form as Python, in the names of the user's code."""


@dataclass
class TrialBudget:
    """The runs of the step that are left, and the seconds in which they may begin."""

    runs: int = 24
    seconds: float = 10.0
    _started: float = field(default_factory=time.monotonic)

    def take(self) -> bool:
        """True if there is room for one more run; counts it."""
        self.runs -= 1
        return self.runs >= 0 and time.monotonic() - self._started < self.seconds

    @property
    def is_spent(self) -> bool:
        """True if nothing more can be tried."""
        return self.runs <= 0 or time.monotonic() - self._started >= self.seconds


def diagnose(step: Snapshot | Scene, *, budget: TrialBudget | None = None, write: WriteCode | None = None) -> Diagnosis:
    """The diagnosis of a captured step (a snapshot).

    ``write`` makes the code of a fix; without it only code from the table is given.
    """
    if step.failure.kind not in _KINDS:
        return Diagnosis(UNKNOWN, "No known mechanism", "There is no origin to look at.")
    with determinism(step.settings), warnings.catch_warnings(action="ignore"):
        scene = observe(step)
        if step.failure.cause is not None and step.failure.cause.call_index is not None:
            # An exception may be about a bad value that an earlier call returned.
            made = observe(replace(scene, failure=step.failure.cause))
            scene = made if matches(made) else scene
        found = matches(scene)
        if not found:
            why = "None of the known causes fits the values that the call was given."
            return Diagnosis(UNKNOWN, "No known mechanism", why)
        is_event = scene.failure.event is not None  # no change of one call ends it
        note, tried = (None, []) if is_event else _try_all(scene, found, budget or TrialBudget(), write)
    (rule, numbers), *others = found
    helped = [item for item in tried if item.helped]
    fix = next((item for item in helped if item.is_plausible), helped[0] if helped else None)
    return Diagnosis(
        rule.name,
        rule.title,
        rule.why.format(**numbers),
        tuple(_said(line, numbers) for line in rule.seen),
        rule.confidence,
        rule.advice,
        tuple(f"https://github.com/{place}" for place in rule.links.split()),
        tuple(_also(rule, others))[:MAX_ALSO],
        fix,
        tuple(item for item in tried if item is not fix),
        note,
    )


def matches(scene: Scene) -> Found:
    """The rules that apply with the numbers of their predicates, the most specific first.

    Rules of context (growth over many steps, say) explain a failure only when nothing at the origin does.
    """
    found = [(rule, numbers) for rule in RULES if (numbers := numbers_of(rule, scene)) is not None]
    return sorted(found, key=lambda item: _rank(item[0]))


def with_rule(failure: Failure, step: Step, first: str | None = None) -> Failure:
    """The failure with its local rule: ``first`` if that fits, else the first of the table that does."""
    if failure.call_index is None or failure.kind not in ("nan", "inf") or failure.phase is Phase.OPTIMIZER:
        return failure
    with warnings.catch_warnings(action="ignore"):
        scene = observe_origin(step, failure)
        rules = sorted(filter(attrgetter("is_local"), RULES), key=lambda rule: (rule.name != first, _rank(rule)))
        return replace(failure, rule=next((rule.name for rule in rules if numbers_of(rule, scene) is not None), None))


def _rank(rule: Rule) -> tuple[Any, ...]:
    return TIERS.index(rule.tier), CONFIDENCES.index(rule.confidence), -len(rule.when), not rule.calls


def numbers_of(rule: Rule, scene: Scene) -> Numbers | None:
    """The numbers of a rule's predicates, ``None`` when it does not apply."""
    failure, call = scene.failure, scene.call
    name = short_name(call) if call is not None else None
    if failure.kind not in rule.kinds.split() or (rule.calls and name not in rule.calls.split()):
        return None
    if rule.phases and _phases(failure).isdisjoint(rule.phases.split()):
        return None
    shown = call.target.removeprefix("torch.optim.") if call is not None and call.is_optimizer_step else name
    numbers: Numbers = {"call": shown, "count": 0, "total": 0}
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
    if failure.phase != Phase.BACKWARD or failure.kind == EXCEPTION:
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
    scene: Scene, found: Found, budget: TrialBudget, write: WriteCode | None
) -> tuple[str | None, list[TriedFix]]:
    """All fixes of the rules in order, until one helps and leaves a plausible loss; and why none was tried."""
    fixes = [fix for rule, _ in found for fix in rule.fixes]
    if not fixes:
        return "No change of the step itself is known that would help.", []
    if not scene.has_failed and locate(scene.program, scene.tensors) is None:
        return "The step did not fail when it was run again, so no fix could be tried.", []
    tried: list[TriedFix] = []
    for number, fix in enumerate(fixes):
        if fix in fixes[:number]:
            continue
        made = attempt(scene, fix, budget, _next_fixes, write)
        if made is not None and made not in tried:
            tried.append(made)
        if made is not None and made.helped and made.is_plausible is not False:
            return None, tried
        if budget.is_spent:
            return "Time was up before all fixes were tried.", tried
    return None, tried


def _next_fixes(scene: Scene) -> list[Fix]:
    """The fixes to try when an edit moved the failure to another call."""
    return [fix for rule, _ in matches(scene) for fix in rule.fixes]


def attempt(
    scene: Scene,
    fix: Fix,
    budget: TrialBudget,
    next_fixes: Callable[[Scene], Iterable[Fix]],
    write: WriteCode | None = None,
) -> TriedFix | None:
    """Try a fix on the step of a scene; ``None`` when it does not apply to it, or the budget is spent.

    ``write`` writes the code of a change that helped, unless the table has it.
    """
    changes, current, tried, is_local = list[tuple[Fix, Scene]](), scene, None, True
    following, edited = fix, apply(scene, fix)
    while edited is not None and len(changes) < MAX_CHANGES and budget.take():
        changes.append((following, current))
        is_local = is_local and edited.is_local
        result = _result_of(scene, edited, is_local)
        if isinstance(result, Outcome):
            num_silent = _num_silent(scene, result)
            if num_silent:
                words = f"the step is finite, but {num_silent} of {len(result.gradients)} gradients became zero"
                return _tried(changes, False, words)
            code = write(scene.program, edited.step.program) if is_local and write is not None else ""
            is_exception = scene.failure.kind == EXCEPTION
            outcome, is_plausible = _finite(edited.step.program, result, scene.timeline)
            outcome = outcome or ("the call returns" if is_exception else "finite")
            is_plausible = True if is_exception and is_plausible is None else is_plausible
            return replace(_tried(changes, True, outcome, code), is_plausible=is_plausible)
        tried = _tried(changes, False, _still(result, current.failure))
        if result.kind == EXCEPTION or _is_same(result, current.failure) or not budget.take():
            break
        with warnings.catch_warnings(action="ignore"):
            current = observe(replace(scene, step=edited.step, failure=result))
        found = ((item, apply(current, item)) for item in next_fixes(current))
        following, edited = next(((item, made) for item, made in found if made is not None), (fix, None))
    return tried


def apply(scene: Scene, fix: Fix) -> Edited | None:
    """The step after an edit; ``None`` where it does not apply.

    The results of the last call are looked at too when nothing is differentiated in it.
    """
    edited = asked(fix.edit, scene)
    if edited is None:
        return None
    program = edited.step.program
    if not program.outputs and not any(call.is_differentiation or call.is_optimizer_step for call in program.calls):
        program = replace(program, outputs=tuple(iter_refs(program.calls[-1].outputs)) if program.calls else ())
    return replace(edited, step=replace(edited.step, program=program))


def _result_of(scene: Scene, edited: Edited, is_local: bool) -> Outcome | Failure:
    """The outcome of an edited step with its losses; its failure if a value is not finite, from the first edited call
    on also one that the forward pass hides."""
    calls, untouched, first = (
        edited.step.program.calls,
        set(map(id, scene.program.calls)),
        scene.failure.call_index or 0,
    )
    if is_local:
        first = next((index for index, call in enumerate(calls) if id(call) not in untouched), 0)
    strict = range(first, len(calls))
    with warnings.catch_warnings(action="ignore"):
        return outcome_or_failure(
            edited.step.program, edited.step.tensors, frozenset(losses_of(edited.step.program)), strict
        )


def _num_silent(scene: Scene, result: Outcome) -> int:
    """The number of gradients that an edit made zero: clamping everything away ends a failure and the learning."""
    zeros = [value for value, gradient in result.gradients.items() if gradient.numel() and not bool(gradient.any())]
    before = run(scene.program, scene.tensors, keep=frozenset()).gradients if zeros else {}
    return sum(value in before and not ways_of(before[value]) and bool(before[value].any()) for value in zeros)


def _tried(changes: list[tuple[Fix, Scene]], helped: bool, outcome: str, code: str = "") -> TriedFix:
    texts, codes = zip(*(fix.words_for(scene) for fix, scene in changes), strict=True)
    sites = [scene.call.site if scene.call is not None else scene.failure.site for _, scene in changes]
    return TriedFix(
        changes[0][0].edit.__name__,
        texts,
        "\n".join(dict.fromkeys(filter(None, (*codes, code)))),
        tuple(site.place if site is not None else "" for site in sites),
        helped,
        outcome,
    )


def _is_same(failure: Failure, before: Failure) -> bool:
    """True if the edit left the failure where it was."""
    return (failure.call, failure.phase, failure.site) == (before.call, before.phase, before.site)


def _still(failure: Failure, before: Failure) -> str:
    """The behaviour of an edited step that is not finite."""
    name = f"`{failure.call or failure.input_name or failure.backward_node}`"
    if failure.exception is not None:
        first_line = (failure.exception[1].strip().splitlines() or [""])[0]
        return f"{name} raises {failure.exception[0]}: {first_line}"
    if _is_same(failure, before):
        return f"{name} still gives {failure.way or failure.kind}"
    return f"then {name} gives {failure.way or failure.kind} in the {failure.phase} pass"


def _finite(program: Program, outcome: Outcome, timeline: Sequence[StepNumbers]) -> tuple[str, bool | None]:
    """The results of the whole step: ``loss 2.31, all 34 gradients finite, all parameters finite``; maybe nothing.

    And whether its loss is plausible: one that is far above those of the steps before is finite and no good. ``None``
    if the program computes no loss.
    """
    losses = losses_of(program)
    kept = (outcome.values[value].detach() for value in losses if value in outcome.values)
    numbers = [float(number) for number in kept if number.numel() == 1]
    usual, is_plausible = _compared(numbers, timeline)
    note = f" (about {usual:.3g} in the steps before)" if is_plausible is False and usual is not None else ""
    words = [f"loss {', '.join(f'{number:.4g}' for number in numbers)}{note}"] if numbers else []
    words += [_all_words(list(outcome.gradients.values()), "gradient")] if outcome.gradients else []
    if any(call.is_optimizer_step or call.phase == Phase.OPTIMIZER for call in program.calls):
        after = [outcome.inputs[item.value] for item in program.inputs if item.role == "parameter"]
        words.append(_all_words(after, "parameter") + " after the step")
    shown = {*losses, *(ref.value for ref in program.outputs)}
    values = [value for number, value in outcome.values.items() if number in shown]
    return ", ".join(words or ([_all_words(values, "result")] if values else [])), is_plausible


def _compared(numbers: list[float], timeline: Sequence[StepNumbers]) -> tuple[float | None, bool | None]:
    """The usual size of the loss in the steps before, if there were any, and whether these numbers are plausible.

    One step whose loss has exploded already, as it does one step before an overflow, is no measure. Where no loss was
    below zero, one that is, by more than the losses before were large, is not plausible either.
    """
    if not numbers:
        return None, None
    signed = [row.loss for row in timeline if row.loss is not None and math.isfinite(row.loss)]
    before = [abs(loss) for loss in signed]
    worst = max(map(abs, numbers))
    if not before:
        return None, worst < _ABSURD
    usual = statistics.median_low(before)
    second = sorted(before)[-2:][0]
    is_far = worst > _FAR * max(usual, _LEAST_USUAL) and worst > _FAR_FROM_ALL * second
    is_turned = len(signed) >= _LEAST_SIGNED and min(signed) >= 0 and min(numbers) < -second
    return usual, not is_far and not is_turned and worst < _ABSURD


def _all_words(tensors: list[torch.Tensor], noun: str) -> str:
    bad = sum(bool(ways_of(tensor)) for tensor in tensors)
    if bad:
        return f"{bad} of {len(tensors)} {noun}s not finite"
    return f"all {len(tensors)} {noun}s finite" if len(tensors) != 1 else f"the only {noun} is finite"
