"""Which samples of a data set a value of a step was made of, and the words for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from reprokit import native
from reprokit.grammar import Name
from reprokit.locate.failure import Failure
from reprokit.locate.spelling import short_name
from reprokit.program.dataflow import values_behind, writer_of
from reprokit.program.ir import Program, Ref
from reprokit.words import listed, row_words, rows_in, sample_words

# Whose result has the rows of the first argument, if it has as many: casts, copies, other shapes, and arithmetic with
# numbers. `transpose` may have as many rows by chance.
KEEP_ROWS = frozenset([
    "add", "bfloat16", "clone", "contiguous", "cpu", "cuda", "detach", "div", "double", "flatten", "float", "half",
    "int", "long", "mul", "reshape", "squeeze", "sub", "to", "truediv", "unsqueeze", "view",
])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples that a batch of a `DataLoader` was made of, by their indices in its data set."""

    name: Name
    indices: tuple[int, ...]
    are_rows: bool  # row i is index number i; a ``collate_fn`` of the user's may sort them, or drop some

    def words(self, rows: Sequence[int]) -> str:
        """``samples 1207, 88 and 4012`` of these rows; empty if they are no samples."""
        is_known = rows and self.are_rows and max(rows) < len(self.indices)
        return sample_words([self.indices[row] for row in rows]) if is_known else ""


_MOST_ROWS = 8  # that are listed
SamplesByValue = Mapping[int, Samples]


def rows_of(
    program: Program, known: SamplesByValue, value: int | None, rows: Sequence[int], before: int | None = None
) -> tuple[str, str]:
    """Rows of a value of the step before a call, and their samples: ``rows 3-5``, ``samples 1207, 88 and 4012``. Of a
    value that the data set has computed, which has no rows of a batch, the sample, as far as it is known."""
    if value is not None and value not in known and value in values_behind(program.calls, known):
        sample = _sample_of(program, known, value)
        return "", sample_words([sample]) if sample is not None else ""
    found = _samples_behind(program, known, value, before) if value is not None else None
    return row_words(rows), found.words(rows) if found is not None else ""


def rows_where(mask: torch.Tensor) -> list[int]:
    """The indexes of the first dimension where a mask of at least one dimension is true somewhere."""
    rows: list[int] = native.tolist(native.flatten(native.nonzero(native.any(native.reshape(mask, len(mask), -1), 1))))
    return rows


def bad_rows(bad: torch.Tensor) -> tuple[int, ...]:
    """The indexes of the first dimension where a mask is true somewhere; empty if all are, or more than are listed."""
    if not (native.dim(bad) and native.numel(bad)):
        return ()
    rows = rows_where(bad)
    return tuple(rows) if len(rows) <= _MOST_ROWS and len(rows) < len(bad) else ()


def row_text(
    program: Program, known: SamplesByValue, value: int | None, rows: Sequence[int], before: int | None = None
) -> str:
    """``rows 3-5 (samples 1207, 88 and 4012)``, with as much as is known; see `rows_of`."""
    words, samples = rows_of(program, known, value, rows, before)
    return f"{words} ({samples})" if words and samples else words or samples


def _samples_behind(program: Program, known: SamplesByValue, value: int, before: int | None) -> Samples | None:
    calls, before = program.calls, len(program.calls) if before is None else before
    while value not in known:
        index = writer_of(calls, value, before)
        if index is None or short_name(calls[index]) not in KEEP_ROWS:
            return None
        first, *others = (*calls[index].args, *calls[index].kwargs.values())
        if not isinstance(first, Ref) or any(isinstance(other, Ref) for other in others):
            return None
        value, before = first.value, index
    return known[value]


def _sample_of(program: Program, known: SamplesByValue, value: int) -> int | None:
    """The sample of which a value is a part, where the calls up to the one that stacks all samples are known."""
    calls = program.calls
    for batch, found in known.items():
        index = next((n for n, call in enumerate(calls) if batch in call.output_refs()), None)
        first = calls[index].args[0] if index is not None and calls[index].args else None
        parts = [part.value for part in first if isinstance(part, Ref)] if isinstance(first, (list, tuple)) else []
        owners = [n for n, part in enumerate(parts) if value in values_behind(calls, [part], index)]
        if found.are_rows and len(parts) == len(found.indices) and len(owners) == 1:
            return found.indices[owners[0]]
    return None


def bad_row_text(program: Program, known: SamplesByValue, value: int | None, rows: Sequence[int], num_rows: int) -> str:
    """The same; of a value computed of a batch ``; row 7 of `x` is sample 88``, if only one batch has so many rows."""
    words, samples = rows_of(program, known, value, rows)
    if samples or not words:
        return f": {text}" if (text := row_text(program, known, value, rows)) else ""
    found = [one for one in known.values() if one.are_rows and len(one.indices) == num_rows]
    if len({one.indices for one in found}) != 1:
        return ""
    verb, names = "is" if len(rows) == 1 else "are", listed([f"`{one.name}`" for one in found])
    return f"; {row_words(rows)} of {names} {verb} {found[0].words(rows)}"


def with_samples(failure: Failure, program: Program, known: SamplesByValue) -> Failure:
    """``failure`` with the samples of the rows that carry its event. Rows of a single sample are no rows of a batch."""
    event = failure.event
    if event is None or not known:
        return failure
    carrier = next((item.value for item in program.inputs if item.name == event.source), failure.value)
    rows, samples = rows_of(program, known, carrier, rows_in(event.rows) if event.rows else ())
    return replace(failure, event=replace(event, rows=rows or None, samples=samples or None))


def batch_words(known: SamplesByValue) -> str:
    """``the rows of `x` and `y` are samples 12, 7 and 30``, of every batch."""
    batches: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for found in known.values():
        batches.setdefault((found.indices, found.are_rows), []).append(f"`{found.name}`")
    words = []
    for (indices, are_rows), names in batches.items():
        made = f"{listed(names)} {'was' if len(names) == 1 else 'were'} made of"
        lead = f"the rows of {listed(names)} are" if are_rows else made
        words.append(f"{lead} {sample_words(indices)}")
    return "; ".join(words)
