"""What the fields of a file claim of each other, checked once when it is read.

The grammar types each field by itself. Here a value that a failure names is a value of the program, a row one of the
batch, a result one that a call makes, so that nothing behind this has to doubt it. `ValueError` says which claim fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from reprokit import native
from reprokit.locate.failure import Failure
from reprokit.locate.kinds import Event, ExceptionRaised, FailureKind, Mismatch, OwnCheck, RanksDiffer, ScaleFell
from reprokit.program.functions import display_name
from reprokit.program.ir import Input, Program
from reprokit.program.step import HasProgram
from reprokit.words import row_ranges

_REFERENCES = ("fp64", "cpu-cuda", "compile", "other")  # that a mismatch differs from


class FailedProgram(HasProgram, Protocol):
    """A program with its tensors and its failure, as every file holds one."""

    @property
    def failure(self) -> Failure:
        """What goes wrong in it."""


def require_consistent(step: FailedProgram) -> None:
    """Raise `ValueError` unless program, tensors, failure and samples agree."""
    _require_tensors(step)
    failure = step.failure
    if failure.cause is not None and failure.cause.cause is not None:
        raise ValueError("the cause of the failure has a cause")
    require_call(step.program, failure)
    _require_values(step.program, failure)
    require_kind = _KINDS.get(type(failure.kind))
    if require_kind is not None:
        require_kind(step, failure)
    _require_element(step, failure)
    _require_event(step, failure)
    _require_samples(step)


def _require_tensors(step: FailedProgram) -> None:
    """Every input has a tensor that can be what the program says of it."""
    for item in step.program.inputs:
        tensor = step.tensors.get(item.value)
        if tensor is None:
            raise ValueError(f"the input `{item.name}` has no tensor")
        if item.requires_grad and not (native.is_floating_point(tensor) or native.is_complex(tensor)):
            raise ValueError(f"the input `{item.name}` requires a gradient, and is of `{tensor.dtype}`")
    states = {call.mode.rng.value for call in step.program.calls if call.mode.rng is not None}
    for value in states & step.tensors.keys():
        tensor = step.tensors[value]
        if tensor.dtype is not torch.uint8 or native.dim(tensor) != 1:
            raise ValueError(f"value {value} is no state of a generator")


def require_call(program: Program, failure: Failure) -> None:
    """Raise `ValueError` unless the calls that a failure names are calls of the program."""
    for origin in (failure, failure.drop, failure.cause):
        index = origin.call_index if origin is not None else None
        if origin is None or (index is None and origin.call is None):
            continue
        if index is None or index not in range(len(program.calls)):
            raise ValueError(f"the failure comes from call {index} of {len(program.calls)}")
        target = program.calls[index].target
        if origin.call not in (None, target, display_name(target), program.calls[index].kwargs.get("name")):
            raise ValueError(f"the failure names `{origin.call:.60}` for a call of `{target}`")


def _require_values(program: Program, failure: Failure) -> None:
    """The values that a failure names are values of the program."""
    known = {item.value for item in program.inputs}
    known.update(value for call in program.calls for value in call.output_refs())
    for origin in (failure, failure.drop, failure.cause):
        if origin is not None and origin.value is not None and origin.value not in known:
            raise ValueError(f"the failure is in value {origin.value}, which the program does not have")


def _require_exception(_: FailedProgram, failure: Failure) -> None:
    """A type and a message."""
    if failure.exception is None:
        raise ValueError("the failure is an exception, and none is named")


def _require_numbers(_: FailedProgram, failure: Failure) -> None:
    """A quantity and its threshold. A dead layer may be found without."""
    if failure.event is None:
        raise ValueError(f"the failure is an event (`{failure.kind}`), and has no numbers of one")


def _require_file(_: FailedProgram, failure: Failure) -> None:
    """A check, or a compiler, of the user's own is a function in a file that lies beside the script."""
    file, function = failure.check
    if not (file and function.isidentifier()) or Path(file).name != file:
        raise ValueError("the failure is of a check, and names no file and function")


def _require_reference(step: FailedProgram, failure: Failure) -> None:
    """The result of a call differs from that of a known reference, or two outputs of the program do."""
    program = step.program
    name, option = failure.reference
    if name == "ranks":
        raise ValueError("ranks differ, and no parameter is named")
    if name not in _REFERENCES:
        raise ValueError(f"a mismatch with `{name:.60}`, which is no reference")
    if name == "compile" and ".py" in option:
        _require_file(step, failure)
    if name == "other" and len(program.outputs) < 2:
        raise ValueError("a mismatch of two results, and the program has fewer")
    made = {value for call in program.calls for value in call.output_refs()}
    if failure.value is None or failure.value not in made | {item.value for item in program.inputs}:
        raise ValueError("a mismatch has no result")
    if failure.value not in made and failure.in_forward:
        raise ValueError(f"the result of a mismatch is value {failure.value}, which no call makes")


def _require_ranks(step: FailedProgram, failure: Failure) -> None:
    """A difference between ranks has no other reference."""
    if failure.way != "ranks":
        _require_reference(step, failure)


# What a failure of a kind has in a file.
_KINDS: dict[type[FailureKind], Callable[[FailedProgram, Failure], None]] = {
    ExceptionRaised: _require_exception,
    Event: _require_numbers,
    ScaleFell: _require_numbers,
    OwnCheck: _require_file,
    Mismatch: _require_reference,
    RanksDiffer: _require_ranks,
}


def _require_element(step: FailedProgram, failure: Failure) -> None:
    """An element of an input lies in it."""
    for origin in (failure, failure.cause):
        tensor = step.tensors.get(origin.value) if origin is not None and origin.value is not None else None
        if origin is None or origin.element is None or tensor is None:
            continue
        shape = tensor.shape
        if len(shape) != len(origin.element) or any(n >= size for n, size in zip(origin.element, shape, strict=True)):
            raise ValueError(f"element {list(origin.element)} is none of {list(shape)}")


def _require_event(step: FailedProgram, failure: Failure) -> None:
    """The data of an event have a name and two sizes; its rows are those of an input."""
    event = failure.event
    if event is None:
        return
    if not event.is_complete:
        raise ValueError("the event has a `largest` without `largest_usual`, or without the name of an input")
    last = row_ranges(event.rows)[-1][-1] if event.rows else -1
    most = max((len(step.tensors[item.value]) for item in _with_rows(step)), default=0)
    if last >= most:
        raise ValueError(f"the event is in row {last}, and no input has more than {most}")


def _with_rows(step: FailedProgram) -> Iterator[Input]:
    return (item for item in step.program.inputs if native.dim(step.tensors[item.value]))


def _require_samples(step: FailedProgram) -> None:
    """Samples are those of a value, one for each of its rows."""
    made = {value for call in step.program.calls for value in call.output_refs()}
    for value, found in (getattr(step, "samples", None) or {}).items():
        tensor = step.tensors.get(value)
        num_rows = len(tensor) if tensor is not None and native.dim(tensor) else 0
        if tensor is None and value not in made:
            raise ValueError(f"no value of the program has the samples of `{found.name}`")
        if tensor is not None and found.are_rows and num_rows != len(found.indices):
            raise ValueError(f"`{found.name}` has {num_rows} rows of {len(found.indices)} samples")
