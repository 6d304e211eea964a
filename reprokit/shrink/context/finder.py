"""The search for the context: a slice that explains itself (`growth`), made small.

Every step is confirmed by an oracle with the signature of the snapshot. Unlike the minimum, a context keeps all calls
of the module where the failure was born, never takes an input that is not ordinary for one that is, and keeps masks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from reprokit.locate.failure import Failure
from reprokit.program.ir import Scope
from reprokit.program.step import Step, is_number
from reprokit.shrink.context.growth import (
    Choice,
    ending_earlier,
    extraordinary,
    is_written,
    keeps_biases,
    keeps_masks,
    module_runs,
    uniform_rows,
    with_certainty,
    with_sum,
    without_call,
    without_module,
    without_unused,
)
from reprokit.shrink.context.step import StepGraph
from reprokit.shrink.context.tree import Context, initial, tree_of
from reprokit.shrink.oracle import Oracle, OutOfBudget
from reprokit.shrink.passes.setting import simplify_precision
from reprokit.shrink.passes.sizes import shrink_sizes
from reprokit.shrink.passes.values import plainer_contents
from reprokit.shrink.plainness import ANY, MAX_LITERALS, NUM_SEEDS, filled, plainness, seed_of, state_of_seed
from reprokit.shrink.problem import Problem
from reprokit.shrink.recording import shapes_of
from reprokit.shrink.signature import Ruling

_SIZE_CHECKS = (
    120  # sizes of a large piece would take the whole budget; a number, so that seconds do not decide the result
)
_STRETCHES = 16  # of single indexes the minimum tries 256: a context may keep an index too many
_MIN_DRAWN = 9  # fewer numbers fit on one line of a script


def find_context(
    whole: Step, failure: Failure, oracle: Oracle, words: Mapping[int, str] | None = None
) -> Context | None:
    """The context of a failure of ``whole``; ``None`` when no slice of the step fails alone.

    ``words`` are variables of the user's by value, read from the step as it was captured: once calls of a line are
    gone, the last one left is not what the line assigns. When the budget of ``oracle`` ends early, the best so far is
    the answer.
    """
    started = time.monotonic()
    start = _chosen(StepGraph(whole, words or {}), failure, oracle)
    if start is None:
        return None
    limit, rows = len(extraordinary(start)), uniform_rows(start)
    problem = Problem(start, oracle, max_stretches=_STRETCHES)
    problem.accepts = lambda piece: (
        len(extraordinary(piece)) <= limit and keeps_masks(piece, rows) and keeps_biases(piece)
    )
    problem.keeps = is_written
    search = _Search(problem)
    with contextlib.suppress(OutOfBudget):
        search.run()
    best = problem.best
    tensors = {item.value: best.tensors[item.value] for item in best.program.inputs}
    drawn = tuple(sorted(search.drawn & tensors.keys()))
    seconds = time.monotonic() - started
    return Context(best.program, tensors, problem.failure, drawn, not extraordinary(best), oracle.checks, seconds)


def _chosen(step: StepGraph, failure: Failure, oracle: Oracle) -> Step | None:
    """The slice to start from, found in half of the time; what was recorded of the step is let go."""
    choice = Choice(step, failure, oracle)
    with contextlib.suppress(OutOfBudget), oracle.at_most(0.5):
        choice.run()
    return choice.best


@dataclass
class _Search:
    """Makes the best candidate of a problem small; ``drawn`` are the inputs that hold random numbers by then."""

    problem: Problem
    drawn: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Everything in turn."""
        self._end_earlier(in_sum=True)
        self._drop_randomness()
        self._drop_autocast()
        self._drop_layers()
        self._plain_together()
        self._shrink_sizes()
        simplify_precision(self.problem)
        self._sum_outputs()
        self._plain_values()
        for item in self._best.program.inputs:
            if item.role == "rng" and seed_of(self._best.tensors[item.value]) is None:
                self._seed(item.value)
        self._end_earlier(in_sum=False)
        self._try(without_unused(self._best), "without unused calls")

    @property
    def _best(self) -> Step:
        return self.problem.best

    @property
    def _oracle(self) -> Oracle:
        return self.problem.oracle

    def _try(self, candidate: Step, change: str) -> bool:
        """Go on from a candidate that reads better, whatever its size, if it fails the same way."""
        plain = candidate.pruned()
        if candidate is self._best or not self.problem.accepts(plain):
            return False
        if self._oracle.check(plain, change) is not Ruling.SAME:
            return False
        self.problem.best = plain
        return True

    def _end_earlier(self, *, in_sum: bool) -> None:
        """Differentiate what comes soon after the origin, without what only later calls use."""
        origin = self.problem.failure.call_index
        if origin is not None:
            shorter = ending_earlier(self._best, origin, in_sum=in_sum)
            any(self._try(candidate, "a gradient of less") for candidate in shorter)

    def _drop_randomness(self) -> None:
        """Let values pass random calls unchanged, as with a dropout of 0."""
        for call in self._best.program.calls:
            if call.mode.rng is not None and call in self._best.program.calls:
                index = self._best.program.calls.index(call)
                change = f"without the randomness of {call.name}"
                simpler = (without_call(self._best, index), with_certainty(self._best, index))
                if not any(candidate is not None and self._try(candidate, change) for candidate in simpler):
                    self._seed(call.mode.rng.value)

    def _seed(self, value: int) -> None:
        """Start a generator from a small seed."""
        size = self._best.tensors[value].numel()
        for seed in range(NUM_SEEDS):
            if self._try(self._best.with_tensors({value: state_of_seed(seed, size)}), f"seed {seed}"):
                return

    def _shrink_sizes(self) -> None:
        """Sizes as small as half of the time and a fixed number of checks allow; what is left is for the rest."""
        with contextlib.suppress(OutOfBudget), self._oracle.at_most(0.5, _SIZE_CHECKS):
            before = None
            while before is not self._best:  # an index of `gather` shrinks before what it looks up can
                before = self._best
                shrink_sizes(self.problem)

    def _drop_layers(self) -> None:
        """Modules by identity, largest first; never the one of the origin and its own layers."""
        tried: set[tuple[Scope, ...]] = set()
        while True:
            scope, run = next((found for found in self._droppable() if found[0] not in tried), ((), frozenset()))
            if not run:
                return
            tried.add(scope)
            shorter = without_module(self._best, run, shapes_of(self._best))
            any(self._try(candidate, "a module by identity") for candidate in shorter)

    def _droppable(self) -> Iterator[tuple[tuple[Scope, ...], frozenset[int]]]:
        """The runs of modules that the origin is not in, nor next to, with their scopes."""
        origin = self.problem.failure.call_index
        step = StepGraph(self._best)
        for scope, run in module_runs(self._best):
            if origin is None or (origin not in run and not step.is_own_layer(scope, origin)):
                yield scope, run

    def _plain_together(self) -> None:
        """One number everywhere, where that fails as well: then sizes shrink without regard to what is where."""
        items = [item for item in self._best.number_inputs if item.role != "gradient"]
        for number in (1.0, 0.0):
            tensors = {item.value: filled(self._best.tensors[item.value], number) for item in items}
            if self._try(self._best.with_tensors(tensors), f"all numbers {number:g}"):
                return

    def _drop_autocast(self) -> None:
        if any(call.mode.autocast for call in self._best.program.calls):
            self._try(self._best.with_modes(lambda mode: replace(mode, autocast=())), "no autocast")

    def _sum_outputs(self) -> None:
        """Differentiate the sum of what comes out, instead of giving gradients."""
        summed = with_sum(self._best)
        if summed is not None and not self._try(summed, "the gradient of a sum"):
            for number in (1.0, 0.0):
                gradients = [i.value for i in self._best.program.inputs if i.role == "gradient"]
                plain = {value: torch.full_like(self._best.tensors[value], number) for value in gradients}
                if self._try(self._best.with_tensors(plain), "plain gradients"):
                    return

    def _plain_values(self) -> None:
        """Initial parameters for the layers where these still fail, the plainest numbers elsewhere."""
        given = self._take_initial()
        for item in self._best.program.inputs:
            if item.value not in given and item.role not in ("rng", "gradient"):
                self._simplify(item.value, item.role)
        self._sum_outputs()  # with plainer numbers it may do
        self._draw([item.value for item in self._best.program.inputs if item.value not in given])

    def _take_initial(self) -> set[int]:
        """Initial parameters for all layers, else for as many as possible; the values that are now as made."""
        tree = tree_of(self._best)
        values = initial(tree, self._best.tensors, ())
        if not values or self._try(self._best.with_tensors(values), "initial parameters"):
            return set(values)
        taken: set[int] = set()
        for block in tree.layers():
            names = block.layer.state.values() if block.layer is not None else ()
            chosen = {value: values[value] for value in names}
            if chosen and self._try(self._best.with_tensors(chosen), f"initial {block.scope.path}"):
                taken.update(chosen)
        return taken

    def _simplify(self, value: int, role: str) -> None:
        tensor = self._best.tensors.get(value)
        for plain in plainer_contents(tensor, role) if tensor is not None else ():
            if self.problem.consider(self._best.with_tensors({value: plain}), "plainer values"):
                return

    def _draw(self, values: list[int]) -> None:
        """Seeded random numbers where too many are left to be listed; all together, since they are drawn in order."""
        tensors = self._best.tensors
        long = [v for v in values if v in tensors and is_number(tensors[v]) and tensors[v].numel() >= _MIN_DRAWN]
        chosen = {value for value in long if plainness(tensors[value]) >= ANY and not tensors[value].is_complex()}
        needed = {value for value in chosen if tensors[value].numel() > MAX_LITERALS}
        for drawn in (chosen, needed):
            numbers = initial(tree_of(self._best), tensors, drawn) if drawn else {}
            if drawn and self._try(self._best.with_tensors({v: numbers[v] for v in drawn}), "seeded numbers"):
                self.drawn = drawn
                return
