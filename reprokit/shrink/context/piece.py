"""A context as it is kept: the program of the piece, its tensors, its failure, and how its numbers came about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from reprokit.locate import failure as failures
from reprokit.locate.failure import Failure
from reprokit.program import plain
from reprokit.program.ir import Program
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.context.blocks import Tree
from reprokit.shrink.context.tree import tree_of
from reprokit.snapshot import grammar
from reprokit.snapshot.format import checked, require_call, storable


@dataclass(frozen=True)
class Context:
    """The piece of the model that was found.

    ``drawn`` lists the inputs that hold `torch.randn` under the seed of the layers. ``is_ordinary`` tells whether all
    inputs are ordinary; if not, nothing in the step was. ``checks`` and ``seconds`` are what it took.
    """

    program: Program
    tensors: dict[int, torch.Tensor]
    failure: Failure
    drawn: tuple[int, ...] = ()
    is_ordinary: bool = True
    checks: int = 0
    seconds: float = 0.0

    @property
    def candidate(self) -> Candidate:
        """As a candidate."""
        return Candidate(self.program, self.tensors)

    @property
    def tree(self) -> Tree:
        """As modules."""
        return tree_of(self.candidate)


def to_plain(context: Context | None) -> dict[str, Any] | None:
    """The context as plain data and tensors."""
    if context is None:
        return None
    content = {name: getattr(context, name) for name in Context.__dataclass_fields__}
    content["program"] = plain.to_plain(context.program)
    content["failure"] = failures.to_plain(context.failure)
    content["tensors"] = {value: storable(tensor) for value, tensor in context.tensors.items()}
    content["drawn"] = list(context.drawn)
    return content


def from_plain(content: Mapping[str, Any] | None) -> Context | None:
    """The inverse of `to_plain`; raises `KeyError`, `TypeError` or `ValueError` on anything else."""
    if content is None:
        return None
    fields = checked(content, grammar.CONTEXT)
    require_call(fields["program"], fields["failure"])
    return Context(**{**fields, "drawn": tuple(fields["drawn"])})
