"""Where a tensor is not finite: a small grid that stands for all of its elements, and the pattern in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reprokit.locate.ways import MINUS, NAN, PLUS, bad_mask, local_part

MAX_ROWS, MAX_COLUMNS = 24, 64
_MOST_INDEXES = 6  # that are worth listing


@dataclass(frozen=True, slots=True)
class Positions:
    """A tensor's bad elements. The last dimension runs over the columns of ``cells``, all others over its rows.

    A cell is ``nan``, ``+inf``, ``-inf`` or empty, and stands for as many neighbours as it takes to fit; it is
    bad when any of them is, and ``nan`` before anything else. ``size`` is the number of rows and columns that stand
    behind it.
    """

    name: str
    shape: tuple[int, ...]
    cells: tuple[tuple[str, ...], ...]
    size: tuple[int, int]
    counts: dict[str, int]
    pattern: str

    @property
    def num_finite(self) -> int:
        """Elements that are finite."""
        return self.size[0] * self.size[1] - sum(self.counts.values())

    @property
    def is_condensed(self) -> bool:
        """True if a cell stands for several elements."""
        return self.size != (len(self.cells), len(self.cells[0]))


def positions_of(tensor: torch.Tensor, name: str) -> Positions | None:
    """Where ``tensor`` is not finite; ``None`` if it is finite, or has no elements that could tell."""
    values = local_part(tensor.detach())
    if not values.is_floating_point() or values.layout is not torch.strided or values.is_meta or not values.numel():
        return None
    values = values.float() if values.element_size() == 1 else values
    masks = {way: bad_mask(values, way) for way in (NAN, PLUS, MINUS)}
    counts = {way: int(mask.sum()) for way, mask in masks.items()}
    if not any(counts.values()):
        return None
    columns = values.shape[-1] if values.dim() else 1
    rows = values.numel() // columns
    grids = {way: _grid(mask.reshape(rows, columns)).tolist() for way, mask in masks.items() if counts[way]}
    first = next(iter(grids.values()))
    cells = tuple(
        tuple(next((way for way, grid in grids.items() if grid[row][column]), "") for column in range(len(first[0])))
        for row in range(len(first))
    )
    pattern = pattern_of(masks[NAN] | masks[PLUS] | masks[MINUS])
    found = {way: count for way, count in counts.items() if count}
    return Positions(name, tuple(tensor.shape), cells, (rows, columns), found, pattern)


def pattern_of(bad: torch.Tensor) -> str:
    """How the bad elements lie, in a sentence: all, one, whole slices, or scattered."""
    total, count = bad.numel(), int(bad.sum())
    if count == total:
        return "Every element is bad." if total > 1 else "It is a single number."
    if count == 1:
        place = ", ".join(str(int(index)) for index in bad.nonzero()[0])
        return f"A single element is bad, at [{place}]."
    for dimension in range(bad.dim()):
        whole = _whole_slices(bad, dimension)
        if whole and bad.dim() > 1 and len(whole) * (total // bad.shape[dimension]) == count:
            return f"Exactly what lies at {_listed(whole)} of dimension {dimension} is bad, and all of it."
    touched = [_touched(bad, dimension) for dimension in range(bad.dim())]
    for dimension, indexes in enumerate(touched):
        if bad.dim() > 1 and len(indexes) < bad.shape[dimension] and len(indexes) <= _MOST_INDEXES:
            return f"All bad elements lie at {_listed(indexes)} of dimension {dimension}."
    return f"{count:,} of {total:,} elements are bad, spread over every dimension."


def _whole_slices(bad: torch.Tensor, dimension: int) -> list[int]:
    slices = bad.movedim(dimension, 0).reshape(bad.shape[dimension], -1).all(1)
    return [int(index) for index in slices.nonzero().flatten()]


def _touched(bad: torch.Tensor, dimension: int) -> list[int]:
    slices = bad.movedim(dimension, 0).reshape(bad.shape[dimension], -1).any(1)
    return [int(index) for index in slices.nonzero().flatten()]


def _listed(indexes: list[int]) -> str:
    if len(indexes) == 1:
        return f"index {indexes[0]}"
    if len(indexes) > _MOST_INDEXES:
        return f"{len(indexes):,} indexes, {indexes[0]} to {indexes[-1]},"
    return f"the indexes {', '.join(map(str, indexes[:-1]))} and {indexes[-1]}"


def _grid(mask: torch.Tensor) -> torch.Tensor:
    """The mask with at most so many rows and columns; a cell is set when any element behind it is."""
    sizes = (min(mask.shape[0], MAX_ROWS), min(mask.shape[1], MAX_COLUMNS))
    places = mask.nonzero()
    grid = torch.zeros(sizes, dtype=torch.bool)
    grid[places[:, 0] * sizes[0] // mask.shape[0], places[:, 1] * sizes[1] // mask.shape[1]] = True
    return grid
