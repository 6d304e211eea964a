"""An exception that ends the script: did it come out of a step, out of which call, and where was it raised?"""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeGuard

import torch

from reprokit import torch_private
from reprokit.capture.calls import Backward, OptimizerStep, Root
from reprokit.capture.tape import Number, Op, Tape
from reprokit.errors import chain
from reprokit.locate.ways import is_bad
from reprokit.program.ir import Phase, Site
from reprokit.program.sites import kind_of_file, make_site
from reprokit.words import user_path


@dataclass(frozen=True)
class Raised:
    """An exception that ended a step. ``is_call`` says whether it came out of something on the tape, at which ``phase``
    and in which ``module`` it was. ``is_deliberate``: a ``raise`` or ``assert`` of the user's code made it.
    ``causes`` are type and message of the exception and of those it came from."""

    type: str
    message: str
    site: Site | None
    module: str | None
    phase: Phase
    is_call: bool
    is_deliberate: bool
    causes: tuple[tuple[str, str], ...] = ()

    def is_same(self, kind: str, message: str) -> bool:
        """True if type and message of an exception in a replay are those of training."""
        return (kind, _constant(message)) in [(name, _constant(text)) for name, text in self.causes]


def _constant(message: str) -> str:
    """A message without the numbers that change from run to run: versions, addresses, amounts of memory."""
    return re.sub(r"version \d+|0x[0-9a-f]+|[\d.]+ (bytes|[KMGT]iB)", "*", message)


def ends_training(error: BaseException | None) -> bool:
    """True if an exception is an error, not the normal end of a script or a wish of the user."""
    if isinstance(error, SystemExit):
        return error.code not in (None, 0)
    return isinstance(error, Exception)


def cause_of(error: BaseException | None, last: BaseException | None) -> BaseException | None:
    """The exception that ended the script: behind an exit with an error the exception that it handled, or
    else the ``last`` one raised in a step that has not been completed since."""
    if not isinstance(error, SystemExit) or not ends_training(error):
        return error
    causes = [*chain(error), last]
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        return error
    return next((cause for cause in causes if isinstance(cause, Exception)), error)


def describe(error: BaseException, op: Op | None, roots: Iterable[torch.nn.Module]) -> Raised:
    """The facts about an exception; ``op`` is the call that raised it, if that was on the tape."""
    place = innermost_user_place(error)
    site = make_site(place.tb_frame.f_code, place.tb_lasti) if place is not None else None
    phase = Phase.BACKWARD if op is not None and op.kind is Backward else Phase.FORWARD
    found = site, _module(error, roots), phase, op is not None, all(map(_is_raised_by_user, chain(error)))
    causes = tuple((type(cause).__name__, str(cause)) for cause in chain(error))
    return Raised(type(error).__name__, str(error), *found, causes)


def is_inside_step(tape: Tape) -> bool:
    """True if the loop has begun to build a graph, so that a step is under way."""
    alive = tape.alive()
    made = (alive[number] for op in tape.running() for number in op.outs if number in alive)
    return any(tensor.requires_grad for tensor in made) or any(
        op.kind in (Root, Backward, OptimizerStep) and op.mode.grad for op in tape.running()
    )


def bad_value(tape: Tape) -> tuple[Number, Any, int] | None:
    """The last bad scalar that the loop computed with gradients in this step, and where; without a scalar, the bad
    tensor that its last call was a test of."""
    running, alive = tape.running(), tape.alive()
    for tensor, code, instruction in reversed(tape.scalars):
        number = tape.known(tensor)
        if number is not None and is_bad(tensor.detach()):
            made = next((n for n, op in enumerate(running) if number in op.outs), len(running))
            is_passed = any(op.kind is Root and op.mode.grad for op in running[made + 1 :])  # the loop went on
            return None if is_passed else (number, code, instruction)
    tested = set(running[-1].outs) if running else set()
    if any(number in alive and alive[number].requires_grad for number in tested):
        return None  # no test: the loop was computing
    for op in reversed(running):
        for number in op.outs:
            made_here = alive.get(number)
            if number in tested and made_here is not None and made_here.requires_grad and is_bad(made_here.detach()):
                return number, op.code, op.instruction
        if not tested.isdisjoint(op.outs):
            tested.update(op.ins)
    return None


def innermost_user_place(error: BaseException) -> TracebackType | None:
    """The innermost entry of a traceback whose frame is the user's; the frame's variables name tensors."""
    place, entry = None, error.__traceback__
    while entry is not None:
        if kind_of_file(entry.tb_frame.f_code.co_filename) == "user":
            place = entry
        entry = entry.tb_next
    return place


def is_mistake(error: BaseException | None) -> bool:
    """True for an exception such as `NameError` that no ``raise`` has raised: no value of a tensor leads to it."""
    return isinstance(error, _MISTAKES) and not _is_at_raise(_innermost(error))


def _is_raised_by_user(error: BaseException) -> bool:
    entry = _innermost(error)
    return _is_at_raise(entry) and kind_of_file(entry.tb_frame.f_code.co_filename) == "user"


def _innermost(error: BaseException) -> TracebackType | None:
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry


def _is_at_raise(entry: TracebackType | None) -> TypeGuard[TracebackType]:
    if entry is None or entry.tb_lineno is None:
        return False
    line = linecache.getline(entry.tb_frame.f_code.co_filename, entry.tb_lineno).split("#")[0]
    return _RAISE.search(line) is not None


_RAISE = re.compile(r"\b(raise|assert)\b")
_MISTAKES = (NameError, AttributeError, ImportError, LookupError, TypeError)


def _module(error: BaseException, roots: Iterable[torch.nn.Module]) -> str | None:
    inside: Any = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is torch_private.call_impl_code:
            inside = frame.f_locals.get("self")
    if inside is None:
        return None
    paths = (user_path(path) for root in roots for path, module in root.named_modules() if module is inside)
    return next((path for path in paths if path), f"<{type(inside).__name__}>")
