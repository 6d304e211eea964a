"""One run of a step with a hash of all that it makes: what two runs are compared by, without their tensors.

`Run.of` runs a step and keeps an `Imprint` of each `Version` of a tensor: each result, each value that a call wrote
into, and each gradient that arrived. `Run.fetch` runs it again for the tensors themselves, also in float64. A step with
``y = x * 2`` and ``y.add_(1)`` has the versions

    Version(value=0, number=-1)            x as the step was given it
    Version(value=1, number=0)             the result of the product
    Version(value=1, number=1)             the same tensor after the sum
    Version(value=1, number=1, start=1)    its gradient in the first backward pass
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from reprokit import native
from reprokit.compare.quantity import loss_of, number_of
from reprokit.errors import pass_on
from reprokit.program.convert import default_dtype, in_dtype
from reprokit.program.dataflow import contents
from reprokit.program.functions import display_name
from reprokit.program.interpreter import Settings, determinism
from reprokit.program.ir import Call, Input, Program
from reprokit.program.observe import Trace, copied
from reprokit.program.step import HasProgram, Step

MOST_BYTES = 2**31  # of tensors that are held to be compared, as of the copies that a capture keeps
_BYTES = 32  # of an element: of both runs, in float64 as well
MOST_ELEMENTS = MOST_BYTES // _BYTES
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x9E3779B97F4A7C1  # odd bits of the golden ratio, which spreads neighbours (Knuth, volume 3, 6.4)
GIVEN = -1  # the number of what an input of the step was before any call
LEFT = -1  # in place of a backward pass: the `.grad` that the step leaves


def digest_of(tensor: torch.Tensor) -> int:
    """63 bits that tell contents, dtype and shape of a tensor from others; strides and the bits of a NaN do not count.

    A weighted sum of the elements' bits in 64-bit integers, which is the same on every device and in any order.
    """
    values = contents(tensor)
    if native.is_complex(values):
        values = native.reshape(native.view_as_real(values), -1)
    if native.is_floating_point(values):
        values = native.where(native.isnan(values), math.nan, values)
    bits = native.long(native.view(native.contiguous(values), INTEGERS[native.element_size(values)]))
    if values.dtype == torch.float64:
        bits = bits ^ (bits >> 32)  # the highest bit alone, a sign, would be lost in a sum of two
    places = native.arange(len(bits), device=bits.device)
    weighted = int(native.sum(bits * ((places * _MULTIPLIER) | 1))) if len(bits) else 0
    kind = hashlib.blake2b(f"{tensor.dtype} {[*tensor.shape]} {weighted}".encode(), digest_size=8)
    return int.from_bytes(kind.digest(), "big") >> 1


def size_of(tensor: torch.Tensor) -> float:
    """The largest finite magnitude."""
    finite = tensor[native.isfinite(tensor)]
    return float(native.max(native.abs(finite))) if native.numel(finite) else 0.0


class Version(NamedTuple):
    """A tensor of a run at one time."""

    value: int
    number: int  # of the writes before this one, `GIVEN` before any
    start: int = 0  # of a gradient that arrived there the backward pass, from 1 on, or `LEFT`

    @property
    def result(self) -> Version:
        """Where the gradient arrived."""
        return self._replace(start=0)


class Imprint(NamedTuple):
    """What is kept of a tensor in place of its elements."""

    digest: int
    shape: tuple[int, ...]
    size: float  # the largest magnitude

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Imprint:
        plain = contents(tensor)
        return cls(digest_of(tensor), tuple(tensor.shape), size_of(plain) if native.is_floating_point(plain) else 0.0)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def _head(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, of a tensor that is too large to be compared of its first elements."""
    return copied(tensor if native.numel(tensor) <= MOST_ELEMENTS else native.reshape(tensor, -1)[:MOST_ELEMENTS])


Tensors = dict[Version, torch.Tensor]


class _Versions(Trace[Any]):
    """Measures the versions of a run: all, or the ``wanted`` ones."""

    def __init__(self, program: Program, measure: Callable[[torch.Tensor], Any], wanted: set[Version] | None) -> None:
        super().__init__(program, measure, gradients_of=measure)
        self.wanted = wanted
        self.found = dict[Version, Any]()
        self.made = dict[Version, int]()  # the calls that have made them
        self._times = Counter[int]()
        self._num_starts = 0

    @classmethod
    def of(cls, step: Step, measure: Callable[[torch.Tensor], Any], wanted: set[Version] | None = None) -> _Versions:
        """Run a step; gradients that it leaves and its inputs are measured too."""
        trace, loss = cls(step.program, measure, wanted), loss_of(step.program)
        outcome = trace.run(step.tensors, keep=frozenset(() if loss is None else (loss,)))
        for value, tensor in step.tensors.items():
            trace.take(Version(value, GIVEN), tensor)
        for value, gradient in outcome.gradients.items():
            trace.take(Version(value, GIVEN, LEFT), gradient)
        return trace

    def take(self, version: Version, tensor: torch.Tensor | None) -> None:
        """Measure a tensor; hooks of a second derivative get none where nothing depends on a value."""
        if tensor is not None and (self.wanted is None or version in self.wanted):
            self.found[version] = self.measure(tensor)

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Count backward passes; what is read has been measured when it was written."""
        self._running = index
        self._num_starts += call.is_differentiation
        self._note_memory(call.input_refs(), values)

    def _measured(self, wanted: Collection[int], values: Mapping[int, torch.Tensor]) -> dict[int, Any]:
        self._note_memory(wanted, values)
        for value in wanted:
            if value in values:
                version = Version(value, self._times[value])
                self._times[value] += 1
                self.made[version] = self._running
                self.take(version, values[value])
        return {}

    def _wait_for_gradients(self, index: int, value: int, tensor: torch.Tensor) -> None:
        version = Version(value, self._times[value] - 1)

        def arrive(gradient: torch.Tensor) -> None:
            self.take(version._replace(start=self._num_starts), gradient)

        native.register_hook(tensor, arrive)  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class Run:
    """One run of a step."""

    step: Step
    wide: Step  # that its float64 run starts from
    marks: dict[Version, Imprint] = field(default_factory=dict)  # of all that it made and was given
    made: dict[Version, int] = field(default_factory=dict)  # the call that has made each result
    error: str = ""  # what a call raised, after which nothing was made; empty if none did
    loss: float | None = None
    ask: Callable[[Collection[Version]], tuple[Tensors, Tensors]] | None = None  # has it run again elsewhere

    @classmethod
    def of(cls, content: HasProgram, exact_inputs: Mapping[int, torch.Tensor] | None = None) -> Run:
        """Run a step; in float64 it is run with other inputs where there are ``exact_inputs``."""
        step = Step(content.program, content.tensors)
        trace = _Versions.of(step, Imprint.of)
        error, loss = trace.outcome.error, next(map(number_of, trace.outcome.values.values()), None)
        words = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}" if error is not None else ""
        return cls(step, step.with_tensors(exact_inputs or {}), trace.found, trace.made, words, loss)

    @property
    def calls(self) -> Sequence[Call]:
        return self.step.program.calls

    def fetch(self, versions: Collection[Version]) -> tuple[Tensors, Tensors]:
        """The tensors of versions, and what they are in float64, as far as that can be run."""
        if self.ask is not None:
            return self.ask(versions)
        found, exact = _Versions.of(self.step, _head, {*versions}).found, Tensors()
        try:
            with default_dtype(torch.float64):
                exact = _Versions.of(in_dtype(self.wide, torch.float64), _head, {*versions}).found
        except Exception as error:  # kernels refuse in as many ways as there are functions
            pass_on(error)
        return found, exact

    @functools.cached_property
    def digests(self) -> list[tuple[int, int]]:
        """For every call a hash of what it wrote, and of the gradients that arrived there; 0 stands for nothing."""
        found = [[0, 0] for _ in self.calls]
        for version, mark in self.marks.items():
            if version.number != GIVEN:
                found[self.made[version.result]][version.start > 0] += mark.digest
        return [(result % 2**63, gradient % 2**63) for result, gradient in found]

    @functools.cached_property
    def num_copies(self) -> list[int]:
        """For every call how many of its function have made the same."""
        kinds = [(display_name(call.target), made) for call, (made, _) in zip(self.calls, self.digests, strict=True)]
        copies = Counter(kinds)
        return [copies[kind] for kind in kinds]

    @functools.cached_property
    def made_by(self) -> dict[int, list[Version]]:
        """What each call has made."""
        found: dict[int, list[Version]] = {}
        for version, index in self.made.items():
            found.setdefault(index, []).append(version)
        return found

    @functools.cached_property
    def passes(self) -> list[int]:
        """The backward passes."""
        return [index for index, call in enumerate(self.calls) if call.is_differentiation]

    def digest(self, version: Version | None) -> int | None:
        """The digest of a version that was made."""
        if version is None or version not in self.marks:
            return None
        return self.marks[version].digest

    @functools.cached_property
    def changed(self) -> dict[Version, Input]:
        """The inputs that the step leaves with other contents, by what they were."""
        found = {}
        for item in self.step.program.inputs:
            given, end = Version(item.value, GIVEN), self.last(item.value, len(self.calls))
            if self.marks[end].digest != self.marks[given].digest:
                found[given] = item
        return found

    def last(self, value: int, before: int) -> Version:
        """The version of a value that a call reads."""
        version = Version(value, GIVEN)
        while self.made.get(later := Version(value, version.number + 1), before) < before:
            version = later
        return version

    def given(self, chosen: Sequence[int]) -> dict[int, Version]:
        """What chosen calls read and do not make themselves."""
        found, made = dict[int, Version](), set[int]()
        for index in chosen:
            for value in self.calls[index].input_refs():
                if value not in made and value not in found:
                    found[value] = self.last(value, index)
            made.update(self.calls[index].output_refs())
        return found

    def makers(self, index: int) -> set[int]:
        """The calls that have made what a call reads."""
        versions = self.given([index]).values()
        return {self.made[version] for version in versions if version in self.made}

    def readers(self, version: Version) -> list[int]:
        """The calls that read a version, but for backward passes and optimizers."""
        return [
            index
            for index, call in enumerate(self.calls)
            if version.value in call.input_refs()
            and self.last(version.value, index) == version.result
            and not call.is_differentiation
            and not call.is_optimizer_step
        ]


def answer(step: HasProgram, settings: Settings, asked: str, path: str) -> None:
    """Run a step, and write what it made and the tensors that are asked for; for another Python of `reprokit diff`."""
    with determinism(settings):
        run, versions = Run.of(step), [Version(*version) for version in json.loads(asked)]
        tensors = run.fetch(versions) if versions else ()
    native.save((str(torch.__version__), (run.marks, run.made, run.error, run.loss), *tensors), path)
