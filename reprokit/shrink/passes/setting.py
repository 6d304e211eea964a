"""Setting: drop what a repro would have to say besides calls and values, whenever it still fails without.

Autocast, optional arguments, flags, lists of layers, half precision, optimizer options and state, several outputs of a
backward pass; one argument at a time. `find_integer` and `delete_adaptively` ask few questions where a pass would
otherwise walk one by one; they know nothing of programs, so they are tested on numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from reprokit.locate.ways import HALVES
from reprokit.program.functions import is_random, symbol_named
from reprokit.program.interpreter import run
from reprokit.program.ir import AUTOGRAD_BACKWARD, Call, Ref
from reprokit.program.step import Step
from reprokit.shrink.leaves import leaves, lists_of_tensors, with_leaf
from reprokit.shrink.order import round_number
from reprokit.shrink.plainness import NUM_SEEDS, seed_of, state_of_seed
from reprokit.shrink.problem import Problem

Item = TypeVar("Item")
_SMALL = 4  # doubling costs more questions than it saves on runs up to this length


def find_integer(holds: Callable[[int], bool], limit: int | None = None) -> int:
    """A number n with ``holds(n)`` (0 always holds) where ``holds(n + 1)`` does not, in about 2 log n questions.

    Small numbers are asked one by one, since most runs are short; then the number is doubled until it fails, and the
    gap is bisected. Nothing above ``limit`` is asked. After `find_integer` of MacIver's Hypothesis
    (hypothesis.internal.conjecture.junkdrawer).
    """
    low = 0
    while low < _SMALL:
        if low == limit or not holds(low + 1):
            return low
        low += 1
    high = 2 * low
    while (limit is None or high <= limit) and holds(high):
        low, high = high, 2 * high
    if limit is not None:
        high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def delete_adaptively(items: Sequence[Item], try_keeping: Callable[[list[Item]], bool]) -> list[Item]:
    """What is left of ``items`` when everything that can go is gone, from the end to the beginning.

    ``try_keeping`` is asked whether these will do, in their order; what it agreed to last is what is left. A run that
    can go costs the logarithm of its length; an item that has to stay costs one question.
    """
    kept = list(items)
    stop = len(kept)
    while stop > 0:
        before, after = kept[:stop], kept[stop:]
        run = find_integer(lambda n, b=before, a=after: try_keeping(b[: len(b) - n] + a), stop)  # type: ignore[misc]
        kept = before[: stop - run] + after
        stop -= run + 1
    return kept


def simplify_setting(problem: Problem) -> None:
    """Drop modes, arguments, precision and state."""
    drop_autocast(problem)
    for index in range(len(problem.best.program.calls)):
        call = problem.best.program.calls[index]
        if call.is_optimizer_step:
            _simplify_optimizer(problem, index)
        elif call.is_differentiation:
            _simplify_differentiation(problem, index)
        else:
            _simplify_call(problem, index)
    _drop_leaves(problem)
    _simplify_layout(problem)
    _simplify_randomness(problem)


def drop_autocast(problem: Problem) -> None:
    """Cast the inputs to autocast's dtype instead."""
    modes = {call.mode.autocast for call in problem.best.program.calls} - {()}
    if not modes:
        return
    plain = problem.best.with_modes(lambda mode: replace(mode, autocast=()))
    dtype = symbol_named(next(iter(sorted(modes)))[0][1])
    cast = {value: t.to(dtype) for value, t in plain.tensors.items() if t.dtype is torch.float32}
    in_half = () if _overflows(plain, cast) else ((plain.with_tensors(cast), "half precision instead of autocast"),)
    for candidate, change in (*in_half, (plain, "no autocast")):
        if problem.consider(candidate, change):
            return


def simplify_precision(problem: Problem) -> None:
    """Use float32 instead of any other floating-point format."""
    for kind, dtypes in (("half precision", HALVES), ("float64", (torch.float64,))):
        tensors = {value: t.float() for value, t in problem.best.tensors.items() if t.dtype in dtypes}
        if tensors and not _overflows(problem.best, tensors):
            problem.consider(problem.best.with_tensors(tensors), f"float32 instead of {kind}")


def _overflows(candidate: Step, cast: dict[int, torch.Tensor]) -> bool:
    """True if a cast makes an infinity of a number: the failure would then be given, not made."""
    return any(int(t.isinf().sum()) > int(candidate.tensors[value].isinf().sum()) for value, t in cast.items())


def _simplify_layout(problem: Problem) -> None:
    """Dense and contiguous inputs, gradients on."""
    best = problem.best
    dense = {value: t.to_dense() for value, t in best.tensors.items() if t.layout is not torch.strided}
    if dense and problem.consider(best.with_tensors(dense), "dense inputs"):
        best = problem.best
    plain = {value: t.contiguous() for value, t in best.tensors.items() if t.layout is torch.strided}
    problem.consider(best.with_tensors(plain), "contiguous inputs")
    plainest = problem.best.with_modes(lambda mode: replace(mode, grad=True, inference=False))
    problem.consider(plainest, "no modes")


def _simplify_randomness(problem: Problem) -> None:
    """No generator state where nothing is drawn, and a small seed in place of a recorded one.

    A call that draws keeps a seed even if others do as well: later edits would make it a matter of luck.
    """
    if not any(item.role == "rng" for item in problem.best.program.inputs):
        return
    problem.consider(without_idle_states(problem.best), "no generator state")
    states = [problem.best.tensors[item.value] for item in problem.best.program.inputs if item.role == "rng"]
    if any(seed_of(state) is None for state in states):
        any(problem.consider(seeded, change) for change, seeded in with_seeds(problem.best, range(NUM_SEEDS)))


def _simplify_call(problem: Problem, index: int) -> None:
    """Drop what may go, one argument at a time."""
    tried: list[Call] = []
    while problem.best.program.calls[index] not in tried:
        tried.append(problem.best.program.calls[index])
        best = problem.best
        fewer = fewer_arguments(best.program.calls[index])
        problem.first((change, best.with_call(index, call)) for change, call in fewer)


def fewer_arguments(call: Call) -> Iterator[tuple[str, Call]]:
    """The call with one thing less to say: a keyword, a last argument, a tensor, a flag, digits, part of a list."""
    for name in call.kwargs:
        kwargs = {key: value for key, value in call.kwargs.items() if key != name}
        yield f"no `{name}`", replace(call, kwargs=kwargs)
    if len(call.args) > 1:
        yield "no last argument", replace(call, args=call.args[:-1])
    for path, leaf in leaves(call):
        if isinstance(leaf, Ref) and len(path) == 2 and path != (0, 0):
            yield "no optional tensor", with_leaf(call, path, None)
        elif leaf is True:
            yield "a flag off", with_leaf(call, path, False)
        elif isinstance(leaf, int) and leaf >= 2:
            yield "a smaller number", with_leaf(call, path, 1)
        elif isinstance(leaf, float) and leaf and is_random(call.target):
            yield "nothing random", with_leaf(call, path, 0.0)
        elif isinstance(leaf, float) and round_number(leaf) != leaf:
            yield "a rounder argument", with_leaf(call, path, round_number(leaf))
    for place, refs in lists_of_tensors(call):
        for length in range(1, len(refs)):
            yield "a shorter list", with_leaf(call, place, refs[:length])


def _drop_leaves(problem: Problem) -> None:
    """Gradients for fewer inputs: for the one whose gradient is bad alone, else as few as will do."""
    leaves = [item.value for item in problem.best.program.inputs if item.requires_grad]
    others = [value for value in leaves if value != problem.failure.value]
    if len(others) > 1 and problem.consider(_without_leaves(problem.best, others), "gradients for one input"):
        return

    def will_do(kept: list[int]) -> bool:
        fewer = _without_leaves(problem.best, [value for value in others if value not in kept])
        return problem.consider(fewer, f"gradients for {len(kept)} of {len(others)} other inputs")

    delete_adaptively(others, will_do)


def _without_leaves(candidate: Step, values: list[int]) -> Step:
    inputs = (replace(i, requires_grad=i.requires_grad and i.value not in values) for i in candidate.program.inputs)
    return replace(candidate, program=replace(candidate.program, inputs=tuple(inputs)))


def _simplify_differentiation(problem: Problem, index: int) -> None:
    """Start from one output alone, and without options."""
    call = problem.best.program.calls[index]
    for place in range(len(call.args[0])) if call.target == AUTOGRAD_BACKWARD else ():
        starts, gradients = call.args
        alone = replace(call, args=([starts[place]], [gradients[place]]))
        if len(starts) > 1 and problem.consider(problem.best.with_call(index, alone), "one output differentiated"):
            break
    for name in problem.best.program.calls[index].kwargs:
        call = problem.best.program.calls[index]
        kwargs = {key: value for key, value in call.kwargs.items() if key != name}
        problem.consider(problem.best.with_call(index, replace(call, kwargs=kwargs)), f"no `{name}`")


def _simplify_optimizer(problem: Problem, index: int) -> None:
    """Drop state and options; all, then one at a time."""

    def consider(name: str, content: list[Any], change: str) -> bool:
        call = problem.best.program.calls[index]
        changed = replace(call, kwargs={**call.kwargs, name: content})
        return problem.consider(problem.best.with_call(index, changed), change)

    kwargs = problem.best.program.calls[index].kwargs
    consider("state", [[{} for _ in group] for group in kwargs["state"]], "no optimizer state")
    if consider("options", [{} for _ in kwargs["options"]], "default options"):
        return
    for name in dict.fromkeys(key for group in kwargs["options"] for key in group):
        groups = problem.best.program.calls[index].kwargs["options"]
        consider("options", [{k: v for k, v in g.items() if k != name} for g in groups], f"default `{name}`")


def with_seeds(candidate: Step, seeds: range) -> Iterator[tuple[str, Step]]:
    """The candidate with every generator started from a small seed instead, for each of the seeds."""
    states = {item.value: candidate.tensors[item.value] for item in candidate.program.inputs if item.role == "rng"}
    for seed in seeds if states else ():
        seeded = {value: state_of_seed(seed, state.numel()) for value, state in states.items()}
        yield f"seed {seed}", candidate.with_tensors(seeded)


def without_idle_states(candidate: Step) -> Step:
    """The candidate without states for calls that draw no numbers, seen in one run."""
    watch = _Draws()
    run(candidate.program, candidate.tensors, observer=watch, keep=frozenset())
    calls = enumerate(candidate.program.calls)
    plain = (c if n in watch.drawing else replace(c, mode=replace(c.mode, rng=None)) for n, c in calls)
    return candidate.with_calls(plain).pruned()


@dataclass
class _Draws:
    """An observer that notes which calls draw random numbers on the CPU; any call of another device may."""

    drawing: set[int] = field(default_factory=set)
    _state: torch.Tensor = field(default_factory=torch.get_rng_state)

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Note the state, and that the call draws until it comes back without."""
        self.drawing.add(index)
        self._state = torch.get_rng_state()

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Compare the state."""
        is_on_cpu = all(values[value].device.type == "cpu" for value in call.input_refs() if value in values)
        if is_on_cpu and torch.equal(self._state, torch.get_rng_state()):
            self.drawing.discard(index)
