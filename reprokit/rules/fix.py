"""Trying a fix: the edited step is run, and judged by what `locate` finds in it, its gradients and its loss.

A step whose failure moved on to another call is edited again, as a person would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from reprokit import native
from reprokit.compare.quantity import losses_of
from reprokit.limits import CpuLimit
from reprokit.locate.blame import outcome_or_failure
from reprokit.locate.failure import Failure
from reprokit.locate.ways import ways_of
from reprokit.own_work import ignored_warnings
from reprokit.program.interpreter import Outcome, run
from reprokit.program.ir import Phase, Program, iter_refs
from reprokit.rules.diagnosis import TriedFix
from reprokit.rules.rule import Edited, Fix, asked
from reprokit.rules.scene import Scene, observe
from reprokit.series.story import StepNumbers
from reprokit.series.usual import UsualLoss

_SECONDS = 10.0  # of all runs: a longer wait for the file is not worth a fix
MAX_CHANGES = 4  # in one fix, when each change uncovers the next failure
_LEAST_USUAL = 1e-3  # a loss that was smaller, or zero, is no measure
WriteCode = Callable[[Program, Program], str]
"""Writes what differs between a step and its edited form as Python, in the names of the user's code."""


@dataclass
class TrialBudget:
    """The runs of the step that are left, and the limit within which they may begin."""

    runs: int = 24
    limit: CpuLimit = field(default_factory=lambda: CpuLimit(_SECONDS))

    @property
    def is_spent(self) -> bool:
        """True if nothing more can be tried."""
        return self.runs <= 0 or self.limit.is_spent

    def take(self) -> bool:
        """True if there is room for one more run; counts it."""
        self.runs -= 1
        return self.runs >= 0 and not self.limit.is_spent


def attempt(
    scene: Scene,
    fix: Fix,
    budget: TrialBudget,
    next_fixes: Callable[[Scene], Iterable[Fix]],
    write: WriteCode | None = None,
) -> TriedFix | None:
    """Try a fix on the step of a scene; ``None`` when it does not apply to it, or the budget is spent.

    ``next_fixes`` are those to go on with where the failure has moved to another call. ``write`` writes the code of a
    change that helped, unless the table has it.
    """
    changes, current, tried, is_local = list[tuple[Fix, Scene]](), scene, None, True
    following, edited = fix, apply(scene, fix)
    while edited is not None and len(changes) < MAX_CHANGES and budget.take():
        changes.append((following, current))
        is_local = is_local and edited.is_local
        result = _run(scene, edited, is_local)
        if isinstance(result, Outcome):
            return _ended(changes, edited.step.program, result, write if is_local else None)
        tried = _tried(changes, False, _still(result, current.failure))
        if result.kind.raises or _is_same(result, current.failure) or not budget.take():
            break
        with ignored_warnings():
            current = observe(replace(scene, step=edited.step, failure=result))
        found = ((item, apply(current, item)) for item in next_fixes(current))
        following, edited = next(((item, made) for item, made in found if made is not None), (fix, None))
    return tried


def _ended(changes: list[tuple[Fix, Scene]], program: Program, outcome: Outcome, write: WriteCode | None) -> TriedFix:
    """The changes after which the step ends with finite values only."""
    scene = changes[0][1]
    num_silent = _num_silent(scene, outcome)
    if num_silent:
        words = f"the step is finite, but {num_silent} of {len(outcome.gradients)} gradients became zero"
        return _tried(changes, False, words)
    code = write(scene.program, program) if write is not None else ""
    words, is_plausible, loss = _judged(program, outcome, scene.timeline)
    words = words or scene.failure.kind.mended
    return replace(_tried(changes, True, words, code), is_plausible=is_plausible, loss=loss)


def apply(scene: Scene, fix: Fix) -> Edited | None:
    """The step after an edit; ``None`` where it does not apply.

    The results of the last call are looked at too when nothing is differentiated in it.
    """
    edited = asked(fix.edit, scene)
    if edited is None:
        return None
    program = edited.step.program
    if not program.outputs and not any(call.is_differentiation or call.is_optimizer_step for call in program.calls):
        last = tuple(iter_refs(program.calls[-1].outputs)) if program.calls else ()
        edited = replace(edited, step=replace(edited.step, program=replace(program, outputs=last)))
    return edited


def _run(scene: Scene, edited: Edited, is_local: bool) -> Outcome | Failure:
    """The outcome of an edited step with its losses; its failure if a value is not finite, from the first edited call
    on also one that the forward pass hides."""
    program, untouched = edited.step.program, set(map(id, scene.program.calls))
    changed = (index for index, call in enumerate(program.calls) if id(call) not in untouched)
    strict = range(next(changed, 0) if is_local else scene.failure.call_index or 0, len(program.calls))
    with ignored_warnings():
        return outcome_or_failure(program, edited.step.tensors, frozenset(losses_of(program)), strict)


def _num_silent(scene: Scene, result: Outcome) -> int:
    """The number of gradients that an edit made zero: clamping everything away ends a failure and the learning."""
    zeros = [
        value
        for value, gradient in result.gradients.items()
        if native.numel(gradient) and not bool(native.any(gradient))
    ]
    before = run(scene.program, scene.tensors, keep=frozenset()).gradients if zeros else {}
    return sum(value in before and not ways_of(before[value]) and bool(native.any(before[value])) for value in zeros)


def _tried(changes: list[tuple[Fix, Scene]], helped: bool, outcome: str, code: str = "") -> TriedFix:
    texts, codes = zip(*(fix.words_for(scene) for fix, scene in changes), strict=True)
    sites = [scene.call.site if scene.call is not None else scene.failure.site for _, scene in changes]
    places = tuple(site.place if site is not None else "" for site in sites)
    code = "\n".join(dict.fromkeys(filter(None, (*codes, code))))
    return TriedFix(changes[0][0].edit.__name__, texts, code, places, helped, outcome)


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


def _judged(
    program: Program, outcome: Outcome, timeline: Sequence[StepNumbers]
) -> tuple[str, bool | None, float | None]:
    """The results of the whole step: ``loss 2.31, all 34 gradients finite, all parameters finite``; maybe nothing.

    And whether its loss is usual: one that is far above those of the steps before is finite and no good. ``None`` if
    the program computes no loss. And the loss if there is one.
    """
    losses = losses_of(program)
    kept = (native.detach(outcome.values[value]) for value in losses if value in outcome.values)
    numbers = [float(number) for number in kept if native.numel(number) == 1]
    words, is_plausible, loss = [], None, None
    if len(numbers) == 1 and math.isfinite(numbers[0]):
        loss = numbers[0]
    if numbers:
        known = [(row.step, row.loss) for row in timeline if row.loss is not None]
        usual = UsualLoss(known, least=_LEAST_USUAL)
        is_plausible = usual.has(numbers)
        words.append(f"loss {', '.join(f'{number:.4g}' for number in numbers)}")
        if not is_plausible and usual.size is not None:
            words[0] += f" (about {usual.size:.3g} in the steps before)"
    words += _state_words(program, outcome)
    shown = {*losses, *(ref.value for ref in program.outputs)}
    values = [value for number, value in outcome.values.items() if number in shown]
    if values and not words:
        words.append(_all_words(values, "result"))
    return ", ".join(words), is_plausible, loss


def _state_words(program: Program, outcome: Outcome) -> Iterator[str]:
    """The gradients and the updated parameters, if there are any."""
    if outcome.gradients:
        yield _all_words(list(outcome.gradients.values()), "gradient")
    if any(call.is_optimizer_step or call.phase == Phase.OPTIMIZER for call in program.calls):
        after = [outcome.inputs[item.value] for item in program.inputs if item.role == "parameter"]
        yield f"{_all_words(after, 'parameter')} after the step"


def _all_words(tensors: list[torch.Tensor], noun: str) -> str:
    bad = sum(bool(ways_of(tensor)) for tensor in tensors)
    if bad:
        return f"{bad} of {len(tensors)} {noun}s not finite"
    return f"all {len(tensors)} {noun}s finite" if len(tensors) != 1 else f"the only {noun} is finite"
