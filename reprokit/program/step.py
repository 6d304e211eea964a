"""A step: a program with the tensors of its inputs. The one carrier of both; an edit returns a new step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

from reprokit import native, torch_private
from reprokit.program import plain
from reprokit.program.dataflow import contents, raw_bytes
from reprokit.program.ir import Call, Input, Mode, Program, Ref


class HasProgram(Protocol):
    """A program with its tensors, as every file holds one."""

    @property
    def program(self) -> Program:
        """The calls."""

    @property
    def tensors(self) -> Mapping[int, torch.Tensor]:
        """The inputs of the program by value number."""


@dataclass(frozen=True, eq=False)
class Step:
    """A program and the tensors of its inputs by value number. Never changed in place."""

    program: Program
    tensors: Mapping[int, torch.Tensor]

    @classmethod
    def of(cls, content: HasProgram) -> Step:
        """The step that a snapshot or a reduction holds."""
        return cls(content.program, content.tensors)

    @property
    def num_calls(self) -> int:
        """Torch calls; backward calls are not counted."""
        return self.program.num_calls

    @cached_property
    def num_elements(self) -> int:
        """Elements over all inputs; generator states are not counted."""
        return sum(native.numel(self.tensors[item.value]) for item in self.program.inputs if item.role != "rng")

    @property
    def number_inputs(self) -> list[Input]:
        """The inputs that hold numbers, without generator states."""
        return [item for item in self.program.inputs if item.role != "rng" and is_number(self.tensors[item.value])]

    @property
    def shapes(self) -> dict[int, tuple[int, ...]]:
        """The shapes of the inputs."""
        return {item.value: tuple(self.tensors[item.value].shape) for item in self.program.inputs}

    @cached_property
    def digest(self) -> str:
        """A hash of everything that a run depends on: places in the source and modules are not part of it."""
        calls = tuple(replace(call, scope=(), site=None) for call in self.program.calls)
        found = hashlib.blake2b(repr(plain.to_plain(replace(self.program, calls=calls, modules={}))).encode())
        for item in self.program.inputs:
            tensor = self.tensors[item.value]
            strides = native.stride(tensor) if tensor.layout is torch.strided else ()
            found.update(f"{item.value} {tensor.dtype} {tuple(tensor.shape)} {strides}".encode())
            found.update(_digest_of(tensor))
        return found.hexdigest()

    def with_tensors(self, tensors: Mapping[int, torch.Tensor]) -> Step:
        """The same program with other tensors for some inputs."""
        return replace(self, tensors={**self.tensors, **tensors})

    def with_calls(self, calls: Iterable[Call], **fields: Any) -> Step:
        """Other calls; ``fields`` are the other fields of the program that change."""
        return replace(self, program=replace(self.program, calls=tuple(calls), **fields))

    def with_call(self, index: int, *calls: Call) -> Step:
        """These calls in the place of one."""
        before, after = self.program.calls[:index], self.program.calls[index + 1 :]
        return self.with_calls((*before, *calls, *after))

    def with_modes(self, change: Callable[[Mode], Mode]) -> Step:
        """Every call in another mode."""
        return self.with_calls(replace(call, mode=change(call.mode)) for call in self.program.calls)

    def without_calls(self, gone: Container[int], given: Mapping[int, Ref] | None = None) -> Step:
        """Without some calls; ``given`` has the values that the other calls read in place of theirs."""
        change = given or {}
        calls = [call for index, call in enumerate(self.program.calls) if index not in gone]
        if change:  # also in outputs, as an in-place call returns what it was given
            calls = [call.substituted(change, outputs=True) for call in calls]
        outputs = tuple(change.get(ref.value, ref) for ref in self.program.outputs)
        return self.with_calls(calls, outputs=outputs).pruned()

    def pruned(self) -> Step:
        """Without inputs that nothing reads."""
        program = self.program.pruned()
        return Step(program, {item.value: self.tensors[item.value] for item in program.inputs})


def is_number(tensor: torch.Tensor) -> bool:
    """True if the tensor holds real floating-point or complex numbers in a plain layout, in a format that computes."""
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.dtype.itemsize > 1  # not float8
    return is_plain and native.numel(tensor) > 0 and (native.is_floating_point(tensor) or native.is_complex(tensor))


_digests: MutableMapping[torch.Tensor, tuple[int, bytes]] = WeakIdKeyDictionary()


def _digest_of(tensor: torch.Tensor) -> bytes:
    """A hash of the contents, computed once until the tensor is written: many steps share their tensors."""
    if native.is_inference(tensor):  # which counts no writes
        return hashlib.blake2b(_bytes_of(tensor)).digest()
    if tensor not in _digests or _digests[tensor][0] != torch_private.version(tensor):
        _digests[tensor] = (torch_private.version(tensor), hashlib.blake2b(_bytes_of(tensor)).digest())
    return _digests[tensor][1]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    values = contents(native.cpu(tensor))
    if native.numel(values) == 0:
        return b""
    return raw_bytes(native.clone(values, memory_format=torch.contiguous_format))  # one element may have any stride
