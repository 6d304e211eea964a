"""A context as it is kept: the program of the piece, its tensors, its failure, and how its numbers came about."""

from __future__ import annotations

from dataclasses import dataclass

from reprokit.grammar import Count
from reprokit.locate.failure import Failure
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.context.blocks import Tree
from reprokit.shrink.context.tree import tree_of
from reprokit.snapshot.format import StoredProgram, StoredTensors


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
