"""A candidate: a program with the tensors of its inputs, and the order in which candidates are preferred.

`trusts_arguments` and `is_safe` know the calls that read foreign memory for a wrong size or a number out of range.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from reprokit.program import plain
from reprokit.program.dataflow import contents
from reprokit.program.ir import Call, Input, Mode, Program, Ref, iter_refs, substitute
from reprokit.shrink.leaves import leaves
from reprokit.shrink.plainness import ONES, ZEROS, is_number, plainness, raw_bytes, seed_of
from reprokit.snapshot.format import count_elements

Key = tuple[int, int, int, int]
_COMMON = (torch.float32, torch.int64, torch.bool)
_AUTOCAST_WEIGHT = 10


@dataclass(frozen=True)
class Candidate:
    """A program and the tensors of its inputs by value number. Never changed in place.

    ``variant`` names another way to run it (`reprokit.whatif`), and travels with it; empty in a reduction.
    """

    program: Program
    tensors: Mapping[int, torch.Tensor]
    variant: str = ""

    @property
    def num_calls(self) -> int:
        """Torch calls, differentiation not counted."""
        return self.program.num_calls

    @cached_property
    def num_elements(self) -> int:
        """Elements over all inputs, generator states not counted."""
        return count_elements(self.program, self.tensors)

    @property
    def number_inputs(self) -> list[Input]:
        """The inputs that hold numbers, generator states not included."""
        return [item for item in self.program.inputs if item.role != "rng" and is_number(self.tensors[item.value])]

    @property
    def shapes(self) -> dict[int, tuple[int, ...]]:
        """The shapes of the inputs."""
        return {item.value: tuple(self.tensors[item.value].shape) for item in self.program.inputs}

    def is_smaller_than(self, other: Candidate) -> bool:
        """True if it has fewer calls, elements, settings, dimensions and whole numbers, or plainer values, in order."""
        if self.size_key != other.size_key:
            return self.size_key < other.size_key
        return self.value_key < other.value_key

    @cached_property
    def size_key(self) -> Key:
        """Smaller is better: calls, elements, settings, dimensions and whole numbers."""
        shown = [self.tensors[item.value] for item in self.program.inputs if item.role != "rng"]
        return (
            self.num_calls,
            self.num_elements,
            num_settings(self.program, self.tensors),
            sum(tensor.dim() + sum(tensor.shape) for tensor in shown) + sum(_integers(self.program)),
        )

    @cached_property
    def value_key(self) -> float:
        """Smaller is better: how plain the values of the inputs are. Costs as much as a check of a small program."""
        items = [item for item in self.program.inputs if item.role != "rng"]
        return round(sum(_plainness(item, self.tensors[item.value]) for item in items), 6)

    @cached_property
    def digest(self) -> str:
        """A hash of everything that has a say in a run."""
        found = hashlib.blake2b(repr(plain.to_plain(_anonymous(self.program))).encode())
        for item in self.program.inputs:
            tensor = self.tensors[item.value]
            found.update(f"{item.value} {tensor.dtype} {tuple(tensor.shape)} {_strides(tensor)}".encode())
            found.update(_digest_of(tensor))
        return found.hexdigest()

    def with_tensors(self, tensors: Mapping[int, torch.Tensor]) -> Candidate:
        """The same program with other tensors for some inputs."""
        return replace(self, tensors={**self.tensors, **tensors})

    def with_calls(self, calls: Iterable[Call], **fields: Any) -> Candidate:
        """Other calls; ``fields`` are the other fields of the program that change."""
        return replace(self, program=replace(self.program, calls=tuple(calls), **fields))

    def with_call(self, index: int, *calls: Call) -> Candidate:
        """These calls in the place of one."""
        before, after = self.program.calls[:index], self.program.calls[index + 1 :]
        return self.with_calls((*before, *calls, *after))

    def with_modes(self, change: Callable[[Mode], Mode]) -> Candidate:
        """Every call in another mode."""
        return self.with_calls(replace(call, mode=change(call.mode)) for call in self.program.calls)

    def without_calls(self, gone: Container[int], given: Mapping[int, Ref] | None = None) -> Candidate:
        """Without some calls; ``given`` has the values that stand in for those that the other calls read of them."""
        change = given or {}
        calls = [call for index, call in enumerate(self.program.calls) if index not in gone]
        if change:  # also in outputs, as an in-place call returns what it was given
            parts = (substitute((call.args, dict(call.kwargs), call.outputs), change) for call in calls)
            changed = zip(calls, parts, strict=True)
            calls = [
                replace(call, args=args, kwargs=kwargs, outputs=outputs) for call, (args, kwargs, outputs) in changed
            ]
        outputs = tuple(change.get(ref.value, ref) for ref in self.program.outputs)
        return self.with_calls(calls, outputs=outputs).pruned()

    def pruned(self) -> Candidate:
        """Without inputs that nothing reads."""
        program = self.program.pruned()
        return Candidate(program, {item.value: self.tensors[item.value] for item in program.inputs})


def num_settings(program: Program, tensors: Mapping[int, torch.Tensor]) -> int:
    """How much there is to say besides calls and values: arguments, modes, inputs, unusual dtypes and layouts."""
    count = 0
    for call in program.calls:
        count += weight((call.args, dict(call.kwargs)))
        count += _AUTOCAST_WEIGHT * (len(call.mode.autocast) + call.mode.inference + (call.mode.rng is not None))
        count += not call.mode.grad
    for item in program.inputs:
        tensor = tensors[item.value]
        if item.role == "rng":
            count += seed_of(tensor) is None
            continue
        count += 1 + item.requires_grad + (tensor.device.type != "cpu") + (tensor.dtype not in _COMMON)
        count += tensor.layout is not torch.strided or not tensor.is_contiguous()
    return count


def weight(value: Any) -> int:
    """How much there is to read in arguments; flags that are off, 0, 1, ``None`` and short numbers weigh less."""
    if isinstance(value, Mapping):
        return sum(2 + weight(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(1 + weight(item) for item in value)
    if isinstance(value, bool):
        return 1 + value
    if value is None or value in (0, 1):
        return 1
    if isinstance(value, float):
        return 2 + (round_number(value) != value)
    return 2 + len(list(iter_refs(value)))


def round_number(number: float) -> float:
    """The number with at most three significant digits."""
    return float(f"{number:.3g}")


def _integers(program: Program) -> Iterator[int]:
    """The sizes of the integers in arguments, which are sizes themselves more often than not."""
    for call in program.calls:
        yield from (abs(leaf) for _, leaf in leaves(call) if isinstance(leaf, int))


def _plainness(item: Input, tensor: torch.Tensor) -> float:
    """For a gradient ones are the plainest, because a sum hands them back."""
    found = plainness(tensor)
    return {ONES: ZEROS, ZEROS: ONES}.get(found, found) if item.role == "gradient" else found


def _anonymous(program: Program) -> Program:
    calls = tuple(replace(call, scope=(), site=None) for call in program.calls)
    return replace(program, calls=calls, modules={})


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()


_digests: MutableMapping[torch.Tensor, tuple[int, bytes]] = WeakIdKeyDictionary()


def _digest_of(tensor: torch.Tensor) -> bytes:
    """A hash of the contents, computed once until the tensor is written: candidates share those that are the same."""
    if tensor.is_inference():  # which counts no writes
        return hashlib.blake2b(_bytes_of(tensor)).digest()
    if tensor not in _digests or _digests[tensor][0] != tensor._version:
        _digests[tensor] = (tensor._version, hashlib.blake2b(_bytes_of(tensor)).digest())
    return _digests[tensor][1]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    values = contents(tensor.cpu())
    if values.numel() == 0:
        return b""
    plain = values.clone(memory_format=torch.contiguous_format)  # a stride of one, which a single element may not have
    return raw_bytes(plain)


RECURRENT = frozenset({"torch.lstm", "torch.gru", "torch.rnn_relu", "torch.rnn_tanh"})
_COMPRESSED = frozenset(f"torch.sparse_{layout}_tensor" for layout in ("compressed", "csr", "csc", "bsr", "bsc"))
_TRUSTING_LABELS = frozenset({"torch.ctc_loss", "torch.nn.functional.ctc_loss"})
_TRUSTING = RECURRENT | _COMPRESSED | _TRUSTING_LABELS | {"torch.embedding_bag", "torch.segment_reduce"}
GATES = {"lstm": 4, "gru": 3}


def trusts_arguments(program: Program) -> bool:
    """True if any call may read past the end of a tensor; torch's private functions may as well."""
    names = (call.name for call in program.calls)
    is_private = any(name.startswith("_") and not name.startswith("__") for name in names)
    return is_private or any(call.target in _TRUSTING for call in program.calls)


def is_safe(program: Program, shapes: Mapping[int, tuple[int, ...]]) -> bool:
    """True if every recurrent layer gets the weights, gates and states it expects, as far as ``shapes`` are known."""
    return all(_is_complete(call, shapes) for call in program.calls if call.target in RECURRENT)


def place_of_weights(call: Call) -> int | None:
    """Where the weights of a recurrent layer stand among the arguments: input, states, weights, biases, layers,
    dropout, training, bidirectional, batch first; for a packed sequence the batch sizes come second and the last one
    is missing."""
    place = next((index for index in (2, 3) if index < len(call.args) and isinstance(call.args[index], list)), None)
    return place if len(call.args) == 9 and not call.kwargs else None


def _is_complete(call: Call, shapes: Mapping[int, tuple[int, ...]]) -> bool:
    place = place_of_weights(call)
    if place is None:
        return False
    weights, has_biases, num_layers, _, _, is_bidirectional = call.args[place : place + 6]
    num_cells = num_layers * (2 if is_bidirectional else 1)
    per_cell = 4 if has_biases else 2
    counts = (per_cell, per_cell + 1) if call.name == "lstm" else (per_cell,)  # one more with a projection
    count = next((count for count in counts if len(weights) == num_cells * count), None)
    states = [shapes[ref.value] for ref in iter_refs(call.args[place - 1]) if ref.value in shapes]
    if count is None or any(shape[:1] != (num_cells,) for shape in states):
        return False
    gated = [shapes[ref.value] for n, ref in enumerate(weights) if n % count < per_cell and ref.value in shapes]
    return all(shape and shape[0] % GATES.get(call.name, 1) == 0 for shape in gated)
