"""Recurrent layers: the first layer of several, one feature, no biases.

The weights of all layers are one list and the rows of all gates one weight, so none of this is a matter of one size or
one argument. Corpus case `rnn_relu_lr20` has 4 elements with this and 29 without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from reprokit.program.ir import Call, Ref, iter_refs
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.oracle import Proposal
from reprokit.shrink.problem import Problem
from reprokit.shrink.risks import GATES, RECURRENT, place_of_weights


def simplify_recurrent(problem: Problem) -> None:
    """Take what can go out of every recurrent layer whose weights and states are inputs."""
    for index, call in enumerate(problem.best.program.calls):
        if call.target in RECURRENT and place_of_weights(call) is not None:
            while problem.first(_smaller(problem, index)):
                pass


def _smaller(problem: Problem, index: int) -> Iterator[Proposal]:
    best, call = problem.best, problem.best.program.calls[index]
    place = place_of_weights(call)
    assert place is not None
    weights, has_biases, num_layers, _, _, is_bidirectional = call.args[place : place + 6]
    states = list(iter_refs(call.args[place - 1]))
    if any(ref.value not in best.tensors for ref in (*states, *weights)):
        return
    num_directions = 2 if is_bidirectional else 1
    each = len(weights) // (num_layers * num_directions)
    first = num_directions * each
    if num_layers > 1:
        shorter = {ref.value: best.tensors[ref.value][:num_directions] for ref in states}
        args = {place: weights[:first], place + 2: 1}
        yield "the first layer", _with_args(best.with_tensors(shorter), index, call, args)
    if has_biases:
        args = {place: [ref for n, ref in enumerate(weights) if n % each not in (2, 3)], place + 1: False}
        yield "no biases", _with_args(best, index, call, args)
    if each in (2, 4):  # others have a projection
        yield from _of_one_feature(problem, call, states, weights, weights[0:first:each])


def _of_one_feature(
    problem: Problem, call: Call, states: list[Ref], weights: list[Ref], from_input: list[Ref]
) -> Iterator[Proposal]:
    """The bad feature, or else the first; ``from_input`` are the weights that the input of the layer meets."""
    tensors = problem.best.tensors
    num_gates = GATES.get(call.name, 1)
    num_features = tensors[weights[0].value].shape[0] // num_gates
    bad = problem.failure.element if problem.failure.value in call.output_refs() else None
    feature = bad[-1] % num_features if bad else 0
    chosen = {ref.value: tensors[ref.value][..., [feature]] for ref in states}
    for ref in weights:
        rows = tensors[ref.value][feature::num_features]
        columns = slice(None) if rows.dim() == 1 or ref in from_input else slice(feature, None, num_features)
        chosen[ref.value] = rows[..., columns].contiguous()
    if num_features > 1:
        yield "one feature", problem.best.with_tensors(chosen)


def _with_args(candidate: Candidate, index: int, call: Call, args: dict[int, Any]) -> Candidate:
    changed = tuple(args.get(place, value) for place, value in enumerate(call.args))
    return candidate.with_call(index, replace(call, args=changed)).pruned()
