"""Edits of a context that no pass of the minimum makes: no randomness, free sizes in shapes, the gradient of a sum."""

from __future__ import annotations

from dataclasses import replace

from reprokit.program.ir import AUTOGRAD_BACKWARD, BACKWARD, Call, Ref, iter_refs
from reprokit.shrink.arguments import leaves, with_leaf
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.dimensions import Axis, Class, Constant
from reprokit.shrink.naming import parameters_of

_KERNELS = ("conv", "pool", "fold")
_FIRST_OF_KERNEL = 2  # of a weight's dimensions, behind those of channels
_PROBABILITIES = frozenset({"p", "dropout", "dropout_p"})


def with_free_size(call: Call, sizes: set[int]) -> Call | None:
    """A reshaping with its largest size as -1, if that is a product rather than a size of an input."""
    places = [(path, leaf) for path, leaf in leaves(call) if isinstance(leaf, int) and not isinstance(leaf, bool)]
    if call.name not in ("view", "reshape") or len(places) < 2 or any(size <= 0 for _, size in places):
        return None
    path, largest = max(places, key=lambda place: place[1])
    return with_leaf(call, path, -1) if largest not in sizes else None


def is_written(candidate: Candidate, group: Class) -> bool:
    """True if a class of sizes holds a kernel: a size that the user wrote, which no batch and no width follows."""
    calls = candidate.program.calls
    kernels = {ref.value for call in calls if "conv" in call.name for ref in iter_refs(call.args[1:2])}
    return any(
        member.value in kernels and member.axis >= _FIRST_OF_KERNEL
        if isinstance(member, Axis)
        else isinstance(member, Constant) and any(word in calls[member.call].name for word in _KERNELS)
        for member in group.members
    )


def with_certainty(candidate: Candidate, index: int) -> Candidate | None:
    """With a probability of 0 in a random call; ``None`` for one that has no such argument."""
    calls = list(candidate.program.calls)
    call, names = calls[index], parameters_of(calls[index].target)
    name = next((name for name in names if name in _PROBABILITIES), None)
    if name is None:
        return None
    place, mode = names.index(name), replace(call.mode, rng=None)
    if place < len(call.args):
        calls[index] = replace(with_leaf(call, (0, place), 0.0), mode=mode)
    else:
        calls[index] = replace(call, kwargs={**call.kwargs, name: 0.0}, mode=mode)
    return replace(candidate, program=replace(candidate.program, calls=tuple(calls)))


def with_sum(candidate: Candidate) -> Candidate | None:
    """With ``out.sum().backward()``; ``None`` unless it ends in a backward pass from given gradients."""
    program = candidate.program
    place = next((i for i, call in enumerate(program.calls) if call.target == AUTOGRAD_BACKWARD), None)
    if place is None or len(program.calls[place].args) != 2:
        return None
    call = program.calls[place]
    value = candidate.program.next_value()
    added: list[Call] = []
    total: Ref | None = None
    for start, gradient in zip(*call.args, strict=True):
        term = start
        if candidate.tensors[gradient.value].dim():
            term, value = Ref(value), value + 1
            added.append(Call("torch.Tensor.sum", (start,), outputs=term))
        if total is not None:
            added.append(Call("torch.Tensor.add", (total, term), outputs=Ref(value)))
            term, value = Ref(value), value + 1
        total = term
    calls = (*program.calls[:place], *added, Call(BACKWARD, (total,), phase="backward"), *program.calls[place + 1 :])
    return replace(candidate, program=replace(program, calls=calls)).pruned()
