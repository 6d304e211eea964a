"""Trying fixes: an edited step is run again and checked by what `locate` finds in it, nothing else.

A step whose failure moved on to another call is diagnosed and edited again, as a person would, a few times at most. How
many runs and how much time that may take is bounded.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from reprokit.locate.blame import GRAD_SCALER, outcome_or_failure
from reprokit.locate.catalogue import Remedy
from reprokit.locate.diagnosis import Fix
from reprokit.locate.edits import REWRITES, Edited
from reprokit.locate.failure import EXCEPTION, Failure
from reprokit.locate.scene import Scene, observe
from reprokit.locate.ways import ways_of
from reprokit.program.interpreter import Outcome
from reprokit.program.ir import AUTOGRAD_GRAD, Phase, Program, Ref, iter_refs
from reprokit.series.story import StepNumbers

MAX_CHANGES = 4  # in one fix, when each change uncovers the next failure
_FAR = 1000.0  # how many times the usual loss of the steps before
_FAR_FROM_ALL = 10.0  # how many times the second largest of them
_LEAST_USUAL = 1e-3  # a loss that was smaller, or zero, is no measure
_LEAST_SIGNED = 3  # losses, none below zero
_ABSURD = 1e30  # for any loss
NextRemedies = Callable[[Scene], Iterable[Remedy]]
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


def watched(program: Program) -> Program:
    """The program, looking at the results of its last call too when nothing is differentiated in it."""
    if program.outputs or any(call.is_differentiation or call.is_optimizer_step for call in program.calls):
        return program
    last = tuple(iter_refs(program.calls[-1].outputs)) if program.calls else ()
    return replace(program, outputs=last)


def result_of(edited: Edited) -> Outcome | Failure:
    """The outcome of an edited step with its losses, or its failure."""
    with warnings.catch_warnings(action="ignore"):
        return outcome_or_failure(edited.program, edited.tensors, frozenset(_losses(edited.program)))


def attempt(
    scene: Scene, remedy: Remedy, budget: TrialBudget, next_remedies: NextRemedies, write: WriteCode | None = None
) -> Fix | None:
    """Try a remedy on the step of a scene; ``None`` when it does not apply to it, or the budget is spent.

    ``write`` writes the code of a change that helped, unless the catalogue has it.
    """
    changes, current, fix, is_local = list[tuple[Remedy, Scene, Edited]](), scene, None, True
    following, edited = remedy, apply(scene, remedy)
    while edited is not None and len(changes) < MAX_CHANGES and budget.take():
        changes.append((following, current, edited))
        is_local = is_local and edited.is_local
        result = result_of(edited)
        if isinstance(result, Outcome):
            code = write(scene.program, edited.program) if is_local and write is not None else ""
            outcome, is_plausible = _finite(edited.program, result, scene.timeline)
            outcome = outcome or ("the call returns" if scene.failure.kind == EXCEPTION else "finite")
            is_plausible = True if scene.failure.kind == EXCEPTION and is_plausible is None else is_plausible
            return replace(_fix(changes, True, outcome, code), is_plausible=is_plausible)
        fix = _fix(changes, False, _still(result, current.failure))
        if result.kind == EXCEPTION or _is_same(result, current.failure) or not budget.take():
            break
        with warnings.catch_warnings(action="ignore"):
            current = observe(replace(scene, program=edited.program, tensors=edited.tensors, failure=result))
        found = ((item, apply(current, item)) for item in next_remedies(current))
        following, edited = next(((item, made) for item, made in found if made is not None), (remedy, None))
    return fix


def _fix(changes: list[tuple[Remedy, Scene, Edited]], helped: bool, outcome: str, code: str = "") -> Fix:
    texts, codes = zip(*(remedy.words_for(scene) for remedy, scene, _ in changes), strict=True)
    return Fix(
        changes[0][0].rewrite,
        texts,
        "\n".join(dict.fromkeys(filter(None, (*codes, code)))),
        tuple(_place(scene) for _, scene, _ in changes),
        helped,
        outcome,
    )


def apply(scene: Scene, remedy: Remedy) -> Edited | None:
    """The step after a remedy's rewrite; ``None`` where it does not apply."""
    try:
        edited = REWRITES[remedy.rewrite](scene, **remedy.parameters)
    except KeyError:
        return None
    return replace(edited, program=watched(edited.program)) if edited is not None else None


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
    losses = _losses(program)
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
    if not words and values:
        words = [_all_words(values, "result")]
    return ", ".join(word for word in words if word), is_plausible


def _losses(program: Program) -> list[int]:
    """The values that the last backward pass starts from, without the factor of a grad scaler.

    Without a backward pass those of the last `torch.autograd.grad`.
    """
    passes = [call for call in reversed(program.calls) if call.is_differentiation]
    last = next((call for call in passes if call.target != AUTOGRAD_GRAD), passes[0] if passes else None)
    return [_unscaled(program, ref.value) for ref in iter_refs(last.args[:1])] if last is not None else []


def _unscaled(program: Program, value: int) -> int:
    for call in program.calls:
        if value in call.output_refs() and GRAD_SCALER in call.scope:
            return next((ref.value for ref in iter_refs(call.args) if isinstance(ref, Ref)), value)
    return value


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


def _place(scene: Scene) -> str:
    site = scene.call.site if scene.call is not None else scene.failure.site
    return site.place if site is not None else ""
