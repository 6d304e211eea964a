"""A context as it is kept: the program of the piece, its tensors, its failure, and its initial values under a seed.

Initial values are drawn in the order of the printed script: for each module its own parameters first, then its
children, then the inputs. So the renderer can tell, by doing the same, which tensors need no words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from reprokit.grammar import Count
from reprokit.locate.failure import Failure
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.context.tree import Block, Key, Tree, tree_of
from reprokit.snapshot.format import StoredProgram, StoredTensors

SEED = 0


def initial(tree: Tree, tensors: Mapping[int, torch.Tensor], drawn: Collection[int]) -> dict[int, torch.Tensor]:
    """The initial parameters and buffers of all layers, and random numbers for the values in ``drawn``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return dict(_made(tree, tensors, drawn))


def _made(
    tree: Tree, tensors: Mapping[int, torch.Tensor], drawn: Collection[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    for block in modules_in_order(tree.root):
        if block.layer is not None:
            module = block.layer.build()
            given = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            yield from ((value, given[name].detach()) for name, value in block.layer.state.items())
            continue
        for value in own_values(tree, block.key):
            if value in drawn:
                yield value, normal_numbers(tensors[value])
    for value in script_values(tree):
        if value in drawn:
            yield value, normal_numbers(tensors[value])


def normal_numbers(like: torch.Tensor) -> torch.Tensor:
    """``torch.randn`` of this shape and dtype."""
    return torch.randn(tuple(like.shape), dtype=like.dtype)


def modules_in_order(root: Block) -> list[Block]:
    """Every module once, outermost first, in the order in which they are made."""
    found: dict[Key, Block] = {}
    for block in root.blocks():
        if block is not root and not block.is_function:
            found.setdefault(block.key, block)
    return list(found.values())


def own_values(tree: Tree, key: Key) -> list[int]:
    """The parameters and buffers that a module of the user's keeps itself, in the program's order."""
    in_layers = {value for block in tree.layers() if block.layer for value in block.layer.state.values()}
    return [
        item.value for item in tree.program.inputs if tree.owners.get(item.value) == key and item.value not in in_layers
    ]


def script_values(tree: Tree) -> list[int]:
    """The inputs that no module keeps, generator states not included."""
    return [item.value for item in tree.program.inputs if item.role != "rng" and item.value not in tree.owners]


@dataclass(frozen=True)
class Context:
    """The piece of the model that was found.

    ``drawn`` lists the inputs that hold `torch.randn` under the seed of the layers. ``is_ordinary`` tells whether all
    inputs are ordinary; if not, nothing in the step was. ``checks`` and ``seconds`` are what it took.
    """

    program: StoredProgram
    tensors: StoredTensors
    failure: Failure
    drawn: tuple[int, ...] = ()
    is_ordinary: bool = True
    checks: Count = 0
    seconds: float = 0.0

    @property
    def candidate(self) -> Candidate:
        """As a candidate."""
        return Candidate(self.program, self.tensors)

    @property
    def tree(self) -> Tree:
        """As modules."""
        return tree_of(self.candidate)
