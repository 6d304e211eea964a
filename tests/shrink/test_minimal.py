"""Results are 1-minimal: `assert_minimal` is called with the results of `test_reducer` and `test_multicall`.

The edits are listed here from scratch and by brute force, without the passes, their probes or their oracle: every call,
every index of every group of equal sizes, every argument, every option, every value. Two things are no improvement: a
warning that was not there before, and a program without a call, which an input that was bad from the start would allow.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from reprokit.locate.blame import locate
from reprokit.locate.failure import Failure
from reprokit.program.interpreter import run
from reprokit.program.ir import Call, Input, Program, Ref, iter_refs
from reprokit.program.step import Step
from reprokit.shrink.order import is_smaller
from reprokit.shrink.reduction import Reduction
from tests.shrink import failing

Place = tuple[int, int]


def assert_minimal(reduction: Reduction) -> None:
    """Claim that no single edit leads to something smaller that fails the same way."""
    best = Step.of(reduction)
    edits = list(single_edits(best))
    assert len(edits) >= 3
    for edit, candidate in edits:
        is_better = is_smaller(candidate, best) and candidate.num_calls
        assert not (is_better and fails_alike(candidate, best)), edit


def test_the_edits_find_what_can_go() -> None:
    whole = failing.masked_softmax()
    best = Step.of(whole)
    shorter = (c for edit, c in single_edits(best) if edit.startswith("index") and is_smaller(c, best))
    assert any(fails_alike(candidate, best) for candidate in itertools.islice(shorter, 60))


def fails_alike(candidate: Step, best: Step) -> bool:
    wanted, warns_already = failure_of(best)
    found, warns = failure_of(candidate)
    if found is None or wanted is None or (warns and not warns_already):
        return False
    given = [candidate.tensors[item.value] for item in candidate.program.inputs]
    has_new_nan = found.call is not None and any(tensor.isnan().any() for tensor in given)
    return not has_new_nan and found.key() == wanted.key()


def failure_of(candidate: Step) -> tuple[Failure | None, bool]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return locate(candidate.program, candidate.tensors), bool(caught)
        except Exception:
            return None, False


def single_edits(best: Step) -> Iterator[tuple[str, Step]]:
    yield from without_a_call(best)
    yield from without_an_index(best)
    yield from with_other_values(best)
    yield from without_a_leaf(best)
    for index, call in enumerate(best.program.calls):
        for edit, other in other_arguments(call):
            calls = (*best.program.calls[:index], other, *best.program.calls[index + 1 :])
            yield edit, replace(best, program=replace(best.program, calls=calls)).pruned()


def without_a_call(best: Step) -> Iterator[tuple[str, Step]]:
    program = best.program
    values = frozenset(value for call in program.calls for value in call.output_refs())
    outcome = run(program, best.tensors, keep=values)
    for index, call in enumerate(program.calls):
        calls = (*program.calls[:index], *program.calls[index + 1 :])
        known = {item.value for item in program.inputs}
        made = [value for value in call.output_refs() if value not in known and value in outcome.values]
        for grad in (False, True):
            inputs = [Input(v, f"v{v}", "batch", grad and outcome.values[v].is_floating_point()) for v in made]
            tensors = {**best.tensors, **{value: outcome.values[value].detach().clone() for value in made}}
            shorter = replace(program, calls=calls, inputs=(*program.inputs, *inputs))
            yield f"call {index} by value", Step(shorter, tensors).pruned()
        for old, new in itertools.product(made, call.input_refs()):
            yield f"call {index} bypassed", Step(redirected(program, index, old, new), best.tensors).pruned()


def redirected(program: Program, index: int, old: int, new: int) -> Program:
    def change(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(new) if value.value == old else value
        if isinstance(value, (list, tuple)):
            return type(value)(change(item) for item in value)
        return {key: change(item) for key, item in value.items()} if isinstance(value, dict) else value

    later = [replace(c, args=change(c.args), kwargs=change(dict(c.kwargs))) for c in program.calls[index + 1 :]]
    return replace(program, calls=(*program.calls[:index], *later), outputs=change(program.outputs))


def without_an_index(best: Step) -> Iterator[tuple[str, Step]]:
    places: dict[int, list[Place]] = {}
    for item in best.program.inputs:
        for axis, size in enumerate(best.tensors[item.value].shape):
            if size > 1:
                places.setdefault(size, []).append((item.value, axis))
    for size, group in places.items():
        subsets = [s for n in range(1, min(len(group), 4) + 1) for s in itertools.combinations(group, n)]
        for subset, index in itertools.product(subsets, range(size)):
            tensors = dict(best.tensors)
            for value, axis in subset:
                rest = [i for i in range(size) if i != index]
                tensors[value] = tensors[value].index_select(axis, torch.tensor(rest))
            yield f"index {index} of {subset}", replace(best, tensors=tensors)


def with_other_values(best: Step) -> Iterator[tuple[str, Step]]:
    for item in best.program.inputs:
        tensor = best.tensors[item.value]
        if tensor.is_floating_point():
            for number in (0.0, 1.0):
                plain = torch.where(tensor.isfinite(), torch.full_like(tensor, number), tensor)
                yield f"{item.name} is {number}", best.with_tensors({item.value: plain})
            short = torch.tensor([float(f"{x:.1g}") for x in tensor.flatten().tolist()]).to(tensor.dtype)
            yield f"{item.name} is short", best.with_tensors({item.value: short.reshape(tensor.shape)})
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        yield f"no {dtype}", best.with_tensors({v: t.float() for v, t in best.tensors.items() if t.dtype is dtype})


def without_a_leaf(best: Step) -> Iterator[tuple[str, Step]]:
    is_differentiated = any(call.is_differentiation for call in best.program.calls)  # else they are parameters
    for place, item in enumerate(best.program.inputs):
        if item.requires_grad and is_differentiated:
            inputs = (
                *best.program.inputs[:place],
                replace(item, requires_grad=False),
                *best.program.inputs[place + 1 :],
            )
            yield f"no gradient of {item.name}", replace(best, program=replace(best.program, inputs=inputs))


def other_arguments(call: Call) -> Iterator[tuple[str, Call]]:
    if call.is_optimizer_step:
        for group, options in enumerate(call.kwargs["options"]):
            for name in options:
                fewer = [dict(other) for other in call.kwargs["options"]]
                del fewer[group][name]
                yield f"no option {name}", replace(call, kwargs={**call.kwargs, "options": fewer})
        return
    for name in call.kwargs:
        yield f"no {name}", replace(call, kwargs={k: v for k, v in call.kwargs.items() if k != name})
    if len(call.args) > 1 and not call.is_differentiation:
        yield "no last argument", replace(call, args=call.args[:-1])
    for place, argument in enumerate(call.args):
        others: list[Any] = [False] if argument is True else [None] if isinstance(argument, Ref) and place else []
        if isinstance(argument, list) and len(argument) > 1:
            others += [argument[:-1], argument[1:]]
        for other in others:
            yield f"argument {place}", replace(call, args=(*call.args[:place], other, *call.args[place + 1 :]))
    if call.is_differentiation and len(call.args) == 2 and len(list(iter_refs(call.args[0]))) > 1:
        for place in range(len(call.args[0])):
            yield f"only output {place}", replace(call, args=tuple([part[place]] for part in call.args))
