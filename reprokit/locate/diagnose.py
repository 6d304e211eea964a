"""Why a step failed: the entry of the catalogue that fits what was seen at the origin, and the fixes that were tried.

`diagnose` runs the step once to look, and then as often as its budget allows to try fixes. It knows nothing but the
step: no names of files, models or users have a say.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from reprokit.locate.blame import locate
from reprokit.locate.catalogue import CONFIDENCES, TIERS, CatalogueEntry, Remedy, entries
from reprokit.locate.diagnosis import UNKNOWN, Also, Diagnosis, Fix
from reprokit.locate.failure import EVENTS, EXCEPTION, Failure
from reprokit.locate.scene import CapturedStep, Scene, observe
from reprokit.locate.signs import Numbers, operands, precision, seen, training
from reprokit.locate.spelling import short_name
from reprokit.locate.trials import TrialBudget, WriteCode, attempt
from reprokit.program.interpreter import determinism
from reprokit.program.ir import Phase

MAX_ALSO = 3
_MODULES_OF_SIGNS = (operands, precision, training)  # each registers its own
_KINDS = ("nan", "inf", EXCEPTION, *EVENTS)
_VERB = re.compile(r"\b(?:are|have|divide|hold|overflow|raise)\b")
_SINGULAR = {"are": "is", "have": "has"}


def diagnose(
    step: CapturedStep,
    *,
    budget: TrialBudget | None = None,
    write: WriteCode | None = None,
) -> Diagnosis:
    """The diagnosis of a captured step (a snapshot).

    ``write`` makes the code of a fix; without it only code from the catalogue is given.
    """
    if step.failure.kind not in _KINDS:
        return _unknown("There is no origin to look at.")
    with determinism(step.settings), warnings.catch_warnings(action="ignore"):
        scene = _at_root(observe(step))
        found = matches(scene)
        if not found:
            return _unknown("None of the known causes fits the values that the call was given.")
        is_event = scene.failure.event is not None  # no change of one call ends it
        note, tried = (None, []) if is_event else _try_all(scene, found, budget or TrialBudget(), write)
    (entry, numbers), *others = found
    fix = _best(tried)
    return Diagnosis(
        entry.id,
        entry.title,
        entry.mechanism.format(**numbers),
        tuple(_said(line, numbers) for line in entry.evidence),
        entry.confidence,
        entry.advice,
        entry.links,
        tuple(_also(entry, others))[:MAX_ALSO],
        fix,
        tuple(item for item in tried if item is not fix),
        note,
    )


def matches(scene: Scene) -> list[tuple[CatalogueEntry, Numbers]]:
    """The entries that apply with the numbers of their signs, the most specific first.

    Entries of context (growth over many steps, say) explain a failure only when nothing at the origin does.
    """
    found = []
    for entry in entries():
        numbers = numbers_of(entry, scene)
        if numbers is not None:
            found.append((entry, numbers))
    return sorted(found, key=lambda item: _rank(item[0]))


def _at_root(scene: Scene) -> Scene:
    """The scene of what the origin fails over, if the catalogue knows that, else the same scene.

    An exception may be about a bad value that an earlier call returned.
    """
    if scene.failure.cause is not None and scene.failure.cause.call_index is not None:
        made = observe(replace(scene, failure=scene.failure.cause))
        return made if matches(made) else scene
    return scene


def _also(entry: CatalogueEntry, others: list[tuple[CatalogueEntry, Numbers]]) -> Iterator[Also]:
    """The other entries that apply and looked at something that those before them did not."""
    known = {condition.sign for condition in entry.when} | {"raises"}  # the message is printed anyway
    for other, numbers in others:
        signs = {condition.sign for condition in other.when}
        if other.tier != "general" and not signs <= known:
            known |= signs
            yield Also(other.id, other.title, tuple(_said(line, numbers) for line in other.evidence))


def _said(line: str, numbers: Numbers) -> str:
    """A line of evidence with its numbers; ``1 of 3 arguments is zero``."""
    if numbers["count"] == 1 and line.startswith("{count} of "):
        line = _VERB.sub(lambda match: _SINGULAR.get(match[0], f"{match[0]}s"), line, count=1)
    return line.format(**numbers)


def _rank(entry: CatalogueEntry) -> tuple[Any, ...]:
    return TIERS.index(entry.tier), CONFIDENCES.index(entry.confidence), -len(entry.when), not entry.calls


def numbers_of(entry: CatalogueEntry, scene: Scene) -> Numbers | None:
    """The numbers of an entry's signs, ``None`` when it does not apply."""
    failure, call = scene.failure, scene.call
    if failure.kind not in entry.kinds:
        return None
    if entry.phases and not _phases(failure) & set(entry.phases):
        return None
    name = short_name(call) if call is not None else None
    if entry.calls and name not in entry.calls and (call is None or _optimizer(call.target) not in entry.calls):
        return None
    if entry.nodes and not any((failure.backward_node or "").startswith(node) for node in entry.nodes):
        return None
    shown = (_optimizer(call.target) if call is not None else None) or name
    numbers: Numbers = {"call": shown, "count": 0, "total": 0}
    for condition in entry.when:
        found = seen(scene, condition.sign, **condition.parameters)
        if found is None:
            return None
        numbers.update(found)
    return numbers


def _phases(failure: Failure) -> set[str]:
    """The phases of entries that may apply: what a call returns has the reasons of a forward pass in any phase.

    So has a NaN that the origin made and a later call drops.
    """
    if failure.phase != Phase.BACKWARD or failure.kind == EXCEPTION:
        return {failure.phase}
    if not failure.is_derivative:
        return {"forward"}
    is_made = failure.drop is not None and not failure.drop.is_given
    return {"backward", "forward"} if is_made else {"backward"}


def _optimizer(target: str) -> str | None:
    """``step`` for the step of any of torch's optimizers, and its class in front: ``Adam.step``."""
    return target.removeprefix("torch.optim.") if target.startswith("torch.optim.") else None


def _try_all(
    scene: Scene, found: list[tuple[CatalogueEntry, Numbers]], budget: TrialBudget, write: WriteCode | None
) -> tuple[str | None, list[Fix]]:
    """All remedies of the best entries in order, until one helps and leaves a plausible loss."""
    remedies = [remedy for entry, _ in found for remedy in entry.remedies]
    if not remedies:
        return "The catalogue knows no change of the step itself that would help.", []
    if not scene.has_failed and locate(scene.program, scene.tensors) is None:
        return "The step did not fail when it was run again, so no fix could be tried.", []
    tried: list[Fix] = []
    for number, remedy in enumerate(remedies):
        if remedy in remedies[:number]:
            continue
        fix = attempt(scene, remedy, budget, _next_remedies, write)
        if fix is not None and fix not in tried:
            tried.append(fix)
        if fix is not None and fix.helped and fix.is_plausible is not False:
            return None, tried
        if budget.is_spent:
            return "Time was up before all fixes were tried.", tried
    return None, tried


def _best(tried: list[Fix]) -> Fix | None:
    """The fix that helped; the first that only made the step finite where there is none."""
    helped = [item for item in tried if item.helped]
    return next((item for item in helped if item.is_plausible), helped[0] if helped else None)


def _next_remedies(scene: Scene) -> list[Remedy]:
    """The remedies to try when an edit moved the failure to another call."""
    return [remedy for entry, _ in matches(scene) for remedy in entry.remedies]


def _unknown(why: str) -> Diagnosis:
    return Diagnosis(UNKNOWN, "No known mechanism", why)
