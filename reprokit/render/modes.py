"""The torch modes that statements of a repro need, as ``with`` blocks around neighbours that share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from reprokit.program.ir import ZERO_GRAD, Call, Mode

OFF = "off"  # in place of a dtype: autocast is on around the code and switched off in it


@dataclass(frozen=True, slots=True)
class Line:
    """A statement and the modes it needs."""

    text: str
    mode: Mode


def needed_mode(call: Call) -> Mode:
    """The call's modes, less those that make no difference to it."""
    mode = replace(call.mode, rng=None)
    sets_its_own = call.is_differentiation and call.target != "torch.autograd.grad"
    if sets_its_own or call.is_optimizer_step or call.target == ZERO_GRAD:
        return replace(mode, grad=not mode.inference)
    return mode


def under_modes(lines: Sequence[Line]) -> Iterator[str]:
    """The statements in ``with`` blocks; neighbours in the same autocast share a block, as they share its cache."""
    for (autocast, inference), block in groupby(lines, key=lambda line: (line.mode.autocast, line.mode.inference)):
        group = list(block)
        outer = [f'torch.autocast("{device}", {_switch(dtype)})' for device, dtype in autocast]
        outer = ["torch.inference_mode()", *outer] if inference else outer
        runs = [(grad, list(part)) for grad, part in groupby(group, key=lambda line: line.mode.grad)]
        if outer and len(runs) == 1 and runs[0][0] == inference:
            outer.append(_grad_mode(runs[0][0]))
            runs = [(not inference, runs[0][1])]
        if outer:
            yield f"with {', '.join(outer)}:"
        for grad, part in runs:
            indent = "    " * bool(outer)
            if grad == inference:
                yield f"{indent}with {_grad_mode(grad)}:"
                indent += "    "
            for line in part:
                yield from (indent + piece for piece in line.text.split("\n"))


def _switch(dtype: str) -> str:
    return "enabled=False" if dtype == OFF else f"dtype={dtype}"


def _grad_mode(grad: bool) -> str:
    return "torch.enable_grad()" if grad else "torch.no_grad()"
