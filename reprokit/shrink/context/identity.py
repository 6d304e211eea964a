"""Modules replaced by identity: what a module was given stands in for what it returned, as in a shorter layer list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from reprokit.program.functions import is_in_place
from reprokit.program.ir import Ref, Scope, iter_refs, substitute
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.probe import Shapes


def module_runs(candidate: Candidate) -> list[tuple[tuple[Scope, ...], frozenset[int]]]:
    """The scopes of every run of a module and the calls in it, largest first."""
    runs: dict[tuple[Scope, ...], set[int]] = {}
    for index, call in enumerate(candidate.program.calls):
        for depth in range(1, len(call.scope) + 1):
            runs.setdefault(call.scope[:depth], set()).add(index)
    found = [(scope, frozenset(members)) for scope, members in runs.items()]
    return sorted(found, key=lambda run: (-len(run[1]), min(run[1])))


def without_module(candidate: Candidate, run: frozenset[int], shapes: Shapes) -> Iterator[Candidate]:
    """The candidate without a run of a module, with something it was given in place of the one thing it returned."""
    program = candidate.program
    made = {value for index in run for value in program.calls[index].output_refs()}
    others = [call for index, call in enumerate(program.calls) if index not in run]
    needed = {value for call in others for value in call.input_refs()} | {ref.value for ref in program.outputs}
    leaving = sorted(made & needed)
    if len(leaving) != 1 or any(is_in_place(program.calls[index].target) for index in run):
        return
    kept = {item.value for item in program.inputs if item.role in ("parameter", "buffer")}  # is no activation
    read = dict.fromkeys(value for index in sorted(run) for value in program.calls[index].input_refs())
    for value in read:
        if value not in made | kept and shapes.get(value) == shapes.get(leaving[0]):
            yield _redirected(candidate, run, leaving[0], value)


def without_call(candidate: Candidate, index: int) -> Candidate | None:
    """The candidate with the one tensor that a call was given in place of the one that it returned."""
    call = candidate.program.calls[index]
    outputs, inputs = call.output_refs(), list(iter_refs((call.args, call.kwargs)))
    if len(outputs) != 1 or len(inputs) != 1:
        return None
    return _redirected(candidate, frozenset((index,)), outputs[0], inputs[0].value)


def _redirected(candidate: Candidate, run: frozenset[int], old: int, new: int) -> Candidate:
    program, change = candidate.program, {old: Ref(new)}
    calls = tuple(
        replace(call, args=substitute(call.args, change), kwargs=substitute(dict(call.kwargs), change))
        for index, call in enumerate(program.calls)
        if index not in run
    )
    ends = tuple(change.get(ref.value, ref) for ref in program.outputs)
    return replace(candidate, program=replace(program, calls=calls, outputs=ends)).pruned()
