"""Checks of failures that a snapshot records: values that are not finite, exceptions, refused allocations.

A request for memory that no machine could grant can be reduced: a candidate has to make such a request as well. Any
other request is granted on the next machine, or on this one an hour later, so it is not reduced. Candidates run with
little address space, so that a request that could be granted is refused before it is paid for.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from reprokit.errors import NotReproduced
from reprokit.locate.blame import exception_failure, locate, locate_exception
from reprokit.locate.failure import EXCEPTION, Failure, is_vacuous
from reprokit.locate.ways import MINUS, PLUS
from reprokit.program.interpreter import run
from reprokit.program.ir import OPAQUE, Phase, Program
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.exact import origin_of
from reprokit.shrink.signature import (
    ALL_WAYS,
    Given,
    Signature,
    SignatureCheck,
    Signed,
    Verdict,
    given_by,
    is_clean,
    ways_given,
)

_POWERS = "bkmgt"
_SIZE = r"(\d[\d,]{0,30}(?:\.\d+)?) ?(bytes|B|[KMGT]i?B)\b"
_REQUEST = re.compile(rf"(?:tried to allocate|invalid buffer size:) {_SIZE}", re.IGNORECASE)
_CAPACITY = re.compile(rf"total capacity of {_SIZE}", re.IGNORECASE)
_BEYOND_MACHINES = 2**40
_TIMES_MEMORY = 4  # overcommitting systems grant more than there is, and in half precision half is asked for
_LEAST_SPACE = 2**30


@dataclass(frozen=True)
class NonfiniteCheck(SignatureCheck):
    """NaN or infinity with the same origin, kind and phase.

    Both infinities are one kind, so for an infinity both are forbidden in inputs, unless the snapshot itself was given
    the other one (a mask filled with ``-inf``). ``given`` are the inputs and constants of the snapshot that are bad: a
    NaN that marks a missing label, parameters that an earlier step ruined.
    """

    given: Given = frozenset()

    def recognises(self, failure: Failure) -> bool:
        """True if it is a value that is not finite."""
        return failure.kind != EXCEPTION

    @property
    def spec(self) -> str:
        """``nonfinite``."""
        return "nonfinite"

    def observe(self, candidate: Candidate) -> Failure | None:
        """Follow what is bad to its origin; a program that is only given a bad value to start from shows nothing.

        A result that is too large for its dtype stays one, and does not become a sum that overflows on the way. A
        matrix with repeated singular values does not become one of lower rank.
        """
        is_gradient = self.wanted is not None and self.wanted.backward_node is not None
        found = locate(candidate.program, candidate.tensors, looks_into_backward=is_gradient)
        if found is None or is_vacuous(found, candidate.program):
            return None
        is_compared = self.wanted is not None and (self.wanted.is_overflow or self.wanted.spectrum)
        return _compared(found, candidate) if is_compared else found

    def adopted(self, failure: Failure, whole: Candidate) -> Self:
        """This check for the failure of a whole program; raises `NotReproduced` if no call of it computes that."""
        if is_vacuous(failure, whole.program):
            raise NotReproduced(
                f"no recorded call computes `{failure.input_name}`, so there is nothing to reduce",
                hint=_hint(failure, whole.program),
            )
        given = given_by(whole.program, whole.tensors)
        forbidden = frozenset({failure.way})
        if failure.kind == "inf":
            forbidden |= {PLUS, MINUS} - {way for _, way in given}
        wanted = Signature.of(_compared(failure, whole), whole.program)
        return replace(self, wanted=wanted, forbidden=forbidden - {""}, given=given)

    def is_clean(self, candidate: Candidate) -> bool:
        """True if nothing is bad that was not bad in the snapshot; an incoming gradient has to be finite."""
        return is_clean(candidate.program, candidate.tensors, self.signature, self.forbidden, self.given)

    def summary(self) -> Signed:
        """The signature alone: this check is the default."""
        return self.signature.summary()


def _compared(failure: Failure, candidate: Candidate) -> Failure:
    """The failure with its `Failure.is_overflow` and `Failure.spectrum` filled in."""
    if failure.phase != Phase.FORWARD and not failure.is_derivative:
        return failure
    origin = origin_of(candidate.program, candidate.tensors, failure)
    if origin is None:
        return failure
    spectrum = origin.spectrum if failure.is_derivative else ""
    return replace(failure, is_overflow=origin.is_overflow(failure), spectrum=spectrum)


def _hint(failure: Failure, program: Program) -> str:
    """How to record the calls behind an input."""
    makers = (call for call in program.calls if call.target == OPAQUE and failure.value in call.output_refs())
    maker = next(makers, None)
    if maker is None:
        return "it comes from code that is not followed; if that is compiled, capture with `TORCH_COMPILE_DISABLE=1`"
    name = maker.kwargs["name"]
    if "is_scripted" in maker.kwargs:
        return f"`{name}` is compiled by `torch.jit`: capture again with `PYTORCH_JIT=0` in the environment"
    if "is_transform" in maker.kwargs:
        return f"the calls of `{name}` are not recorded: call its function on the failing row without the transform"
    if "is_compiled" in maker.kwargs or maker.kwargs["source"]:
        return f"capture again with `TORCH_COMPILE_DISABLE=1` in the environment: `{name}` is compiled"
    return f"`{name}` computes it by other means than torch calls"


@dataclass(frozen=True)
class ExceptionCheck(SignatureCheck):
    """An exception of a call, whatever values are bad before it."""

    def recognises(self, failure: Failure) -> bool:
        """True if a call raised."""
        return failure.kind == EXCEPTION

    @property
    def spec(self) -> str:
        """``exception``."""
        return "exception"

    def adopted(self, failure: Failure, whole: Candidate) -> Self:
        """This check for the failure of a whole program; what makes the bad value behind the exception stays."""
        check = super().adopted(failure, whole)
        if failure.cause is None:
            return check
        return replace(check, forbidden=ALL_WAYS - ways_given(whole.program, whole.tensors))

    def observe(self, candidate: Candidate) -> Failure | None:
        """Run until a call raises."""
        if self.wanted is not None and self.wanted.cause is not None:
            return locate_exception(candidate.program, candidate.tensors)
        outcome = run(candidate.program, candidate.tensors, keep=frozenset())
        return exception_failure(candidate.program, outcome) if outcome.error is not None else None

    def summary(self) -> Signed:
        """The signature alone: its kind says which check it is."""
        return self.signature.summary()


@dataclass(frozen=True)
class OutOfMemoryCheck(ExceptionCheck):
    """The same exception of the same call for a request of ``least`` bytes or more."""

    least: int = 0

    def adopted(self, failure: Failure, whole: Candidate) -> Self:
        """This check for a refused allocation; raises `NotReproduced` for one that another machine may grant."""
        request, memory = requested_bytes(failure), _memory_of(failure)
        if request is None or memory is None or request < _TIMES_MEMORY * memory or not _can_limit(failure):
            raise NotReproduced(
                "out of memory depends on the machine; not reduced",
                hint="look at what is held at the failing line, on a GPU with `torch.cuda.memory_summary()`",
                note=f"`{failure.call}` asked for {_in_words(request)}; the memory there is {_in_words(memory)}",
            )
        return replace(super().adopted(failure, whole), least=min(request, _BEYOND_MACHINES))

    def observe(self, candidate: Candidate) -> Failure | None:
        """Run until a call raises, with little address space."""
        with _little_space():
            return super().observe(candidate)

    def judge(self, observation: Failure | None, candidate: Candidate) -> Verdict:
        """Compare signatures; a smaller request could be granted, so its refusal says nothing."""
        verdict = super().judge(observation, candidate)
        if verdict is Verdict.SAME and observation is not None and (requested_bytes(observation) or 0) < self.least:
            return Verdict.INVALID
        return verdict


def requested_bytes(failure: Failure) -> int | None:
    """How much was asked for by an allocation that was refused, ``None`` for any other failure."""
    return _bytes_in(_REQUEST, failure)


def _bytes_in(pattern: re.Pattern[str], failure: Failure) -> int | None:
    found = pattern.search(failure.exception[1]) if failure.exception is not None else None
    return int(float(found[1].replace(",", "")) * 1024 ** _POWERS.index(found[2][0].lower())) if found else None


def _memory_of(failure: Failure) -> int | None:
    """The memory of the device that refused: CUDA names it, else this machine's; ``None`` where the system has no name
    for it."""
    named = _bytes_in(_CAPACITY, failure)
    if named is None and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return named


def _can_limit(failure: Failure) -> bool:
    """True if a request that could be granted costs little: on Linux, and on a GPU, which has what it has."""
    return sys.platform == "linux" or _bytes_in(_CAPACITY, failure) is not None


@contextlib.contextmanager
def _little_space() -> Iterator[None]:
    """A quarter of the memory that is available on top of what the process holds."""
    import torch

    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if sys.platform != "linux" or is_on_gpu:  # CUDA reserves addresses as it likes
        yield
        return
    import resource  # where there is one

    before, most = resource.getrlimit(resource.RLIMIT_AS)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _address_space() + max(_LEAST_SPACE, available // 4)
    resource.setrlimit(resource.RLIMIT_AS, (limit if before < 0 else min(limit, before), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _in_words(size: int | None) -> str:
    if size is None:
        return "an unknown size"
    return f"{size / 2**40:,.1f} TiB" if size >= 2**40 else f"{size / 2**30:,.1f} GiB"
