"""True if the context of a reduction has anything to show that its minimum does not.

It has not if it is the same calls, outside of any module or function, on the same numbers, be there more of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reprokit.program.ir import Ref, map_leaves
from reprokit.render.modes import needed_mode
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.context.blocks import Block
from reprokit.shrink.plainness import constant_of, contents

if TYPE_CHECKING:
    from reprokit.shrink.reduction import Reduction


def is_minimum_again(reduction: Reduction) -> bool:
    """True if the context is the minimum in other sizes."""
    context = reduction.context
    if context is None or any(isinstance(item, Block) for item in context.tree.root.items):
        return False
    return _outline(context.candidate) == _outline(Candidate(reduction.program, reduction.tensors))


def _outline(candidate: Candidate) -> str:
    """The calls with values numbered as they come up, without sizes and dimensions, and the numbers of the inputs."""
    numbers: dict[int, int] = {}

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return "value", numbers.setdefault(leaf.value, len(numbers))
        return int if type(leaf) is int else leaf

    calls = [
        (call.target, needed_mode(call), map_leaves((call.args, dict(call.kwargs), call.outputs), plain))
        for call in candidate.program.calls
    ]
    inputs = {numbers.get(item.value): item for item in candidate.program.inputs}
    given = [(number, item.requires_grad, _contents(candidate, item.value)) for number, item in inputs.items()]
    return repr((calls, sorted(given, key=repr)))


def _contents(candidate: Candidate, value: int) -> tuple[Any, ...]:
    tensor = candidate.tensors[value]
    constant = constant_of(tensor)
    return tensor.dtype, contents(tensor).tolist() if constant is None else constant
