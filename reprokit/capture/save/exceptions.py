"""An exception that ends the script: did it come out of a step, out of which call, and where was it raised?"""

from __future__ import annotations

import dis
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeGuard

import torch

from reprokit import torch_private
from reprokit.capture.record import kinds
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.screens import is_bad
from reprokit.capture.record.structure import iter_tensors
from reprokit.errors import chain
from reprokit.program.ir import BACKWARD, Phase, Site
from reprokit.program.sites import kind_of_file, make_site
from reprokit.program.trace import current_mode
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


def describe(error: BaseException, entry: Entry | None, roots: Iterable[torch.nn.Module]) -> Raised:
    """The facts about an exception; ``entry`` is the call that raised it, if that was on the tape."""
    place = innermost_user_place(error)
    site = make_site(place.tb_frame.f_code, place.tb_lasti) if place is not None else None
    phase = Phase.BACKWARD if entry is not None and entry.kind is kinds.BACKWARD else Phase.FORWARD
    found = site, _module(error, roots), phase, entry is not None, all(map(_is_raised_by_user, chain(error)))
    causes = tuple((type(cause).__name__, str(cause)) for cause in chain(error))
    return Raised(type(error).__name__, str(error), *found, causes)


def is_inside_step(entries: list[Entry]) -> bool:
    """True if the loop has begun to build a graph, so that a step is under way."""
    return any(tensor.requires_grad for entry in entries for tensor in iter_tensors(entry.output)) or any(
        entry.kind is kinds.MODULE and entry.output is None and entry.mode.grad for entry in entries
    )


def bad_value(entries: list[Entry]) -> Entry | None:
    """A backward pass from the last bad scalar that the loop computed with gradients, as if it had come to one; without
    a scalar, from the bad tensor that its last call was a test of."""
    outputs = iter_tensors(entries[-1].output) if entries else ()
    tested = {id(tensor) for tensor in outputs if tensor.dtype is torch.bool}
    last_tested = None
    for entry in reversed(entries):
        for tensor in iter_tensors(entry.output):
            is_tested = last_tested is None and id(tensor) in tested
            if tensor.requires_grad and (tensor.numel() == 1 or is_tested) and is_bad(tensor.detach()):
                if tensor.numel() == 1:
                    return backward_from(tensor, entry)
                last_tested = backward_from(tensor, entry)
            if is_tested:
                tested.update(id(given) for given, _ in entry.versions)
    return last_tested


def backward_from(loss: torch.Tensor, maker: Entry) -> Entry:
    """The backward call that the loop has not made, with the line where the loss was computed."""
    where = {"name": BACKWARD, "code": maker.code, "instruction": maker.instruction}
    return Entry(kinds.BACKWARD, torch.Tensor.backward, (loss,), {}, current_mode(), **where)  # type: ignore[arg-type]


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
    return entry is not None and entry.tb_frame.f_code.co_code[entry.tb_lasti] == dis.opmap["RAISE_VARARGS"]


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
