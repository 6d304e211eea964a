"""The search for the context: a slice that explains itself (`growth`), made small.

The passes are those of the minimum, with the same oracle. Unlike the minimum, a context keeps the calls of the module
where the failure was born, never takes an input that is not ordinary for one that is, and keeps masks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from reprokit.grammar import Count
from reprokit.locate.failure import Failure
from reprokit.program.step import Step
from reprokit.shrink.checks.check import Ruling
from reprokit.shrink.context import growth
from reprokit.shrink.context.layers import initial, layers_in
from reprokit.shrink.context.step import StepGraph
from reprokit.shrink.oracle import Oracle, OutOfBudget
from reprokit.shrink.passes.cut import remove_calls
from reprokit.shrink.passes.setting import simplify_precision
from reprokit.shrink.passes.sizes import shrink_sizes
from reprokit.shrink.passes.values import simplify_values
from reprokit.shrink.plainness import NUM_SEEDS, filled, seed_of, state_of_seed
from reprokit.shrink.problem import Problem
from reprokit.snapshot.format import StoredProgram, StoredTensors

# The sizes of a large piece would take the whole budget; a number, so that seconds do not decide the result.
_SIZE_CHECKS = 120
_STRETCHES = 16  # of single indexes the minimum tries 256: a context may keep an index too many


@dataclass(frozen=True)
class Context:
    """The piece of the model that was found, and what that took."""

    program: StoredProgram
    tensors: StoredTensors
    failure: Failure
    is_ordinary: bool = True  # all inputs are; if not, nothing in the step was
    checks: Count = 0
    seconds: float = 0.0

    @property
    def candidate(self) -> Step:
        """As a candidate."""
        return Step.of(self)


def find_context(
    whole: Step, failure: Failure, oracle: Oracle, words: Mapping[int, str] | None = None
) -> Context | None:
    """The context of a failure of ``whole``; ``None`` when no slice of the step fails alone.

    ``words`` are variables of the user's by value, read from the step as it was captured: once calls of a line are
    gone, the last one left is not what the line assigns. When the budget of ``oracle`` ends early, the best so far is
    the answer.
    """
    started, graph, start = time.monotonic(), StepGraph(whole, words or {}), None
    with contextlib.suppress(OutOfBudget), oracle.at_most(0.5):
        for better in growth.chosen_slice(graph, failure, oracle):
            start = better
    if start is None:
        return None
    search = _Search(Problem(start, oracle, max_stretches=_STRETCHES))
    if failure.call_index is not None:
        search.problem.fixed = growth.own_calls(graph, failure.call_index)
    with contextlib.suppress(OutOfBudget):
        search.run()
    best = search.problem.best
    tensors = {item.value: best.tensors[item.value] for item in best.program.inputs}
    is_ordinary, seconds = not growth.extraordinary(best), time.monotonic() - started
    return Context(best.program, tensors, search.problem.failure, is_ordinary, oracle.checks, seconds)


class _Search:
    """Makes the best candidate of a problem small."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        start = problem.best
        known = set(growth.extraordinary(start))
        masks = {i.value for i in start.program.inputs if i.role == "buffer" and growth.is_mask(start.tensors[i.value])}
        rows = growth.full_rows(start, masks)
        self.given: set[int] = set()  # parameters that are as their layers make them
        problem.accepts = lambda piece: (
            known.issuperset(growth.extraordinary(piece))
            and growth.full_rows(piece, masks) <= rows
            and growth.keeps_biases(piece)
            and all(piece.tensors.get(value) is self._best.tensors.get(value) for value in self.given)
        )
        problem.keeps = growth.is_written

    def run(self) -> None:
        """Everything in turn."""
        self._end_earlier(in_sum=True)
        self._drop_randomness()
        remove_calls(self.problem)
        if any(call.mode.autocast for call in self._best.program.calls):
            self._try(self._best.with_modes(lambda mode: replace(mode, autocast=())), "no autocast")
        self._plain_together()
        # Sizes as small as half of the time and a fixed number of checks allow; what is left is for the rest.
        with contextlib.suppress(OutOfBudget), self.problem.oracle.at_most(0.5, _SIZE_CHECKS):
            before = None
            while before is not self._best:  # an index of `gather` shrinks before what it looks up can
                before = self._best
                shrink_sizes(self.problem)
        simplify_precision(self.problem)
        self._take_initial()
        simplify_values(self.problem)
        for item in self._best.program.inputs:
            if item.role == "rng" and seed_of(self._best.tensors[item.value]) is None:
                self._seed(item.value)
        self._end_earlier(in_sum=False)
        origin = self.problem.failure.call_index
        if origin is not None and not self.problem.failure.is_of_whole_step:
            self._try(growth.without_unused(self._best, origin), "without unused calls")

    @property
    def _best(self) -> Step:
        return self.problem.best

    def _try(self, candidate: Step, change: str) -> bool:
        """Go on from a candidate that reads better, whatever its size, if it fails the same way."""
        plain = candidate.pruned()
        if not self.problem.accepts(plain) or self.problem.oracle.check(plain, change) is not Ruling.SAME:
            return False
        self.problem.best = plain
        return True

    def _end_earlier(self, *, in_sum: bool) -> None:
        """Differentiate what comes soon after the origin, without what only later calls use."""
        origin = self.problem.failure.call_index
        if origin is not None:
            shorter = growth.ending_earlier(self._best, origin, in_sum=in_sum)
            any(self._try(candidate, "a gradient of less") for candidate in shorter)

    def _drop_randomness(self) -> None:
        """Let values pass random calls unchanged, as with a dropout of 0."""
        for call in self._best.program.calls:
            if call in self._best.program.calls:
                candidate = growth.without_randomness(self._best, self._best.program.calls.index(call))
                if candidate is not None:
                    self._try(candidate, f"without the randomness of {call.name}")

    def _plain_together(self) -> None:
        """One number everywhere, where that fails as well: then sizes shrink without regard to what is where."""
        items = [item for item in self._best.number_inputs if item.role != "gradient"]
        for number in (1.0, 0.0):
            tensors = {item.value: filled(self._best.tensors[item.value], number) for item in items}
            if self._try(self._best.with_tensors(tensors), f"all numbers {number:g}"):
                return

    def _take_initial(self) -> None:
        """Initial parameters for all layers, else for as many as possible."""
        layers = layers_in(self._best)
        values = initial(layers)
        if values and self._try(self._best.with_tensors(values), "initial parameters"):
            self.given = set(values)
            return
        for scopes, layer in layers.items():
            chosen = {value: values[value] for value in layer.state.values() if value not in self.given}
            if chosen and self._try(self._best.with_tensors(chosen), f"initial {scopes[-1].path}"):
                self.given.update(chosen)

    def _seed(self, value: int) -> None:
        """Start a generator from a small seed."""
        size = self._best.tensors[value].numel()
        for seed in range(NUM_SEEDS):
            if self._try(self._best.with_tensors({value: state_of_seed(seed, size)}), f"seed {seed}"):
                return
