"""A failure that begins in an input of the step: no recorded call made the bad value, so there is nothing to reduce."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from reprokit.errors import GivenInput
from reprokit.locate.failure import Failure
from reprokit.program.ir import Program
from reprokit.words import counted

_MAX_SHOWN = 20  # rows and elements


def given_input(failure: Failure, program: Program, tensors: Mapping[int, torch.Tensor]) -> GivenInput:
    """The error that names the input, its bad rows and elements, and the line where the loop has it from."""
    tensor = tensors.get(failure.value) if failure.value is not None else None
    places: list[list[int]] = []
    if tensor is not None:
        numbers = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
        numbers = numbers if numbers.is_complex() else numbers.double()  # no isnan for 8-bit floats
        places = (numbers.isinf() if failure.kind.is_infinite else numbers.isnan()).nonzero().tolist()
    rows = sorted({place[0] for place in places if len(place) > 1})
    site = failure.site
    found = {
        "name": failure.input_name,
        "rows": rows[:_MAX_SHOWN],
        "elements": places[:_MAX_SHOWN],
        "num_bad": failure.num_bad,
        "num_elements": failure.num_elements,
        "place": {"file": site.file, "line": site.line, "code": site.code} if site is not None else None,
    }
    shown = ", ".join(map(str, rows[:_MAX_SHOWN])) + (", \u2026" if len(rows) > _MAX_SHOWN else "")
    where = f" (row{'s' * (len(rows) > 1)} {shown})" if rows else ""
    size = f"{failure.num_bad:,} of {counted(failure.num_elements, 'element')}"
    is_made = any(failure.value in call.output_refs() for call in program.calls)
    uses = "computes it, by other means than recorded calls" if is_made else "uses it first"
    note = "no call of the step makes the bad value, so there is nothing to reduce and no repro"
    if failure.marker is not None:
        note = f"healthy steps before hold {failure.kind} in it too; which call lets it through here is not known"
    return GivenInput(
        f"`{failure.input_name}` holds {failure.kind} before any recorded call reads it: {size}{where}",
        found,
        hint=f"this line {uses}: {site.file}:{site.line}: {site.code}" if site is not None else None,
        note=note,
    )
