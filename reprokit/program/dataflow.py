"""Data flow: which calls some calls of a program depend on, what a call writes, and what may share memory.

Read off the calls alone, before anything runs. `needed_calls` leaves nothing out that the others could notice: every
random call starts from a generator state of its own, and a write in place stays while anything that may share its
memory is read later. Then the nodes of autograd, and the memory of tensors: copies that keep strides and what tensors
share, and equality bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from reprokit import native
from reprokit.program.functions import DATA_WRITES, GRAD_READ, GRAD_WRITES, all_written, hidden_writes
from reprokit.program.ir import AUTOGRAD_BACKWARD, BACKWARD, OPAQUE, ZERO_GRAD, Call, Program, Ref, iter_refs

BACKWARDS = frozenset({BACKWARD, AUTOGRAD_BACKWARD})
GRAD_READS = frozenset({GRAD_READ, "torch.Tensor._grad.__get__"})
_ONLY_GRADIENTS = GRAD_WRITES | BACKWARDS | {ZERO_GRAD}  # matter to who reads ``.grad`` alone


def needed_calls(calls: Sequence[Call], ends: Set[int]) -> list[int] | None:
    """The indexes of the calls that the calls ``ends`` depend on, these included, in order.

    ``None`` if that is not known: one of them reads a ``.grad``, which any backward pass may have written.
    """
    memory = _Memory(calls[: max(ends) + 1])
    needed, places, kept = set[int](), set[int](), list[int]()
    for index in range(max(ends), -1, -1):
        call = calls[index]
        if index not in ends:
            if call.target == OPAQUE or call.target in _ONLY_GRADIENTS:
                continue
            writes = {memory.place(value) for value in written_in_place(call)}
            if places.isdisjoint(writes) and needed.isdisjoint(call.output_refs()):
                continue
        if call.is_optimizer_step or call.target in GRAD_READS:
            return None
        needed.update(call.input_refs())
        places.update(map(memory.place, call.input_refs()))
        kept.append(index)
    return kept[::-1]


def prepared(program: Program, among: Set[int]) -> list[int]:
    """The indexes of the calls that make values ``among`` from inputs without gradient and from each other, and whose
    memory nothing writes: their results can be inputs."""
    memory = _Memory(program.calls)
    written = {memory.place(value) for call in program.calls for value in written_in_place(call)}
    known = {item.value for item in program.inputs if not item.requires_grad}
    found = []
    for index, call in enumerate(program.calls):
        results = set(call.output_refs())
        is_kept = not results or not results <= among or not known.issuperset(call.input_refs())
        is_kept = is_kept or call.mode.rng is not None or bool(call.kwargs.get("requires_grad"))
        if not (is_kept or call.target == OPAQUE) and written.isdisjoint(map(memory.place, results)):
            found.append(index)
            known |= results
    return found


def calls_after(calls: Sequence[Call], index: int) -> list[int]:
    """The later calls that read a value that call number ``index`` made, or that was made of one of these."""
    reached, led_to = list[int](), set(written_by(calls[index]))
    for later in range(index + 1, len(calls)):
        if not led_to.isdisjoint(calls[later].input_refs()):
            reached.append(later)
            led_to.update(written_by(calls[later]))
    return reached


def calls_behind(calls: Sequence[Call], values: Iterable[int], before: int | None = None) -> list[int]:
    """The calls ``before`` one, or of all, that values were made by, directly or through others, in order."""
    needed, found = set(values), list[int]()
    for index in range(len(calls) if before is None else before)[::-1]:
        if not needed.isdisjoint(written_by(calls[index])):
            found.append(index)
            needed.update(calls[index].input_refs())
    return found[::-1]


def values_behind(calls: Sequence[Call], values: Iterable[int], before: int | None = None) -> frozenset[int]:
    """The values, and all that they were made of."""
    given = tuple(values)
    return frozenset(given).union(*(calls[index].input_refs() for index in calls_behind(calls, given, before)))


def writer_of(calls: Sequence[Call], value: int, before: int) -> int | None:
    """The last call before ``before`` that returned a value or wrote into it; ``None`` for an input as it was given."""
    return next((index for index in range(before)[::-1] if value in written_by(calls[index])), None)


def written_by(call: Call) -> tuple[int, ...]:
    """The values that a call returns or writes into, running statistics included."""
    return tuple(dict.fromkeys((*call.output_refs(), *written_in_place(call))))


def written_in_place(call: Call) -> Iterator[int]:
    """The values that a call writes into, running statistics included."""
    if call.is_optimizer_step:
        yield from (ref.value for ref in iter_refs(call.kwargs["params"]))
        return
    yield from (ref.value for ref in iter_refs(all_written(call.target, call.args, call.kwargs)))
    yield from (ref.value for ref in iter_refs(hidden_writes(call.target, call.args, call.kwargs)))


def bases(call: Call) -> tuple[int, ...]:
    """The values that results of a call may share memory with: its first tensor, or any where it returns several."""
    if call.target in GRAD_READS:
        return ()
    return call.input_refs()[:1] if isinstance(call.outputs, Ref) else call.input_refs()


class _Memory:
    """Values in groups: two values of different groups share no memory."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._parents: dict[int, int] = {}
        for call in calls:
            together = list(iter_refs(call.args)) if call.target in DATA_WRITES else []
            first, *others = *call.output_refs(), *bases(call), *(ref.value for ref in together), -1
            for value in others[:-1]:
                self._parents[self.place(value)] = self.place(first)

    def place(self, value: int) -> int:
        """The group of a value."""
        while (parent := self._parents.get(value, value)) != value:
            self._parents[value] = value = self._parents.get(parent, parent)
        return value


Node = Any  # torch.autograd.graph.Node
Edge = tuple[Node, int]


class NodeOwners:
    """Which call owns which autograd node: the first one behind whose outputs it is met.

    Nodes are kept alive here, because autograd's Python objects are otherwise recreated.
    """

    def __init__(self) -> None:
        self._owner: dict[Node, int] = {}

    def own_outputs(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> list[Node]:
        """Give the new nodes behind the outputs of call number ``index`` to it; returns these nodes."""
        places = iter_refs(all_written(call.target, call.args, call.kwargs))
        written = [values[value] for value in (*call.output_refs(), *(ref.value for ref in places)) if value in values]
        found = [node for node in reachable(map(node_of, written), self._owner) if not is_accumulation(node)]
        self._owner.update(dict.fromkeys(found, index))
        return found

    def owner(self, node: Node) -> int | None:
        """The index of the call that owns the node, or ``None``."""
        return self._owner.get(node)


def node_of(tensor: torch.Tensor) -> Node | None:
    """The node that made a tensor, ``None`` for leaves and for tensors that need no gradient."""
    try:
        return tensor.grad_fn if tensor.requires_grad else None
    except RuntimeError:  # a view made without grad whose base was written since: `w[5] /= w[5].norm()` makes one
        return None


def is_accumulation(node: Node) -> bool:
    """True if the node adds into the ``.grad`` of a leaf."""
    return hasattr(node, "variable")


def edge_of(tensor: torch.Tensor) -> Edge | None:
    """Where gradients of this tensor flow to: its node and slot, or ``None`` when it needs none."""
    if not tensor.requires_grad:
        return None
    if native.is_inference_mode_enabled():  # a call in it takes no gradients, and torch cannot name the node of a leaf
        return None
    try:
        edge = native.get_gradient_edge(tensor)
    except (AssertionError, RuntimeError):  # views of parameters made without gradients: `requires_grad`, but no node
        return None
    return edge.node, edge.output_nr


def reachable(nodes: Iterable[Node | None], known: Container[Node] = ()) -> Iterator[Node]:
    """Every node behind ``nodes``, each once; not those that are ``known``, and what is behind these."""
    seen: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node is not None and node not in seen and node not in known:
            seen.add(node)
            yield node
            stack.extend(following for following, _ in node.next_functions)


def copy_of(tensor: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """A copy with the same strides, so that kernels take the same path; on another device if one is named."""
    if device is not None and tensor.device.type != device:
        return native.to(tensor, device)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return native.clone(tensor)
    return native.clone(tensor, memory_format=torch.preserve_format)


def copies_of(tensors: Mapping[int, torch.Tensor], device: str | None = None) -> dict[int, torch.Tensor]:
    """Copies that share memory with each other where the originals overlap, and with nothing else."""
    copies: dict[int, torch.Tensor] = {}
    for values in overlapping(tensors):
        group = [tensors[value] for value in values]
        if len(group) == 1:
            copies[values[0]] = copy_of(group[0], device)
            continue
        begin, end = min(native.storage_offset(tensor) for tensor in group), max(map(_end, group))
        memory = copy_of(native.as_strided(group[0], (end - begin,), (1,), begin), device)
        for value, tensor in zip(values, group, strict=True):
            place = native.storage_offset(tensor) - begin, tensor.shape, native.stride(tensor)
            copies[value] = native.set_(native.new_empty(memory, 0), native.untyped_storage(memory), *place)
    return copies


def overlapping(tensors: Mapping[int, torch.Tensor]) -> Iterator[list[int]]:
    """The value numbers in groups: tensors of one group overlap in memory, those of two groups do not."""
    places: dict[Any, list[int]] = {}
    for value, tensor in tensors.items():
        places.setdefault(_memory_of(tensor) or value, []).append(value)
    for values in places.values():
        if len(values) == 1:
            yield values
            continue
        group: list[int] = []
        reach = 0
        for value in sorted(values, key=lambda value: native.storage_offset(tensors[value])):
            if group and native.storage_offset(tensors[value]) >= reach:
                yield group
                group = []
            group.append(value)
            reach = max(reach, _end(tensors[value]))
        yield group


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """A key shared by tensors with the same memory and dtype; ``None`` without memory."""
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or native.numel(tensor) == 0
        or tensor.is_meta
    ):
        return None
    return native.untyped_storage(tensor).data_ptr(), tensor.dtype, tensor.device


def _end(tensor: torch.Tensor) -> int:
    """The position in its memory behind the last element of a tensor."""
    steps = zip(tensor.shape, native.stride(tensor), strict=True)
    return int(native.storage_offset(tensor)) + 1 + sum((size - 1) * stride for size, stride in steps)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if shape, dtype and every bit agree; a NaN equals any NaN at the same place, 0.0 does not equal -0.0."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    a, b = (native.contiguous(contents(tensor)) for tensor in (first, native.to(second, first.device)))
    if native.is_complex(a):
        a, b = native.reshape(native.view_as_real(a), -1), native.reshape(native.view_as_real(b), -1)
    if native.numel(a) == 0:
        return True
    differ = native.any(
        native.view(native.view(a, torch.uint8) != native.view(b, torch.uint8), native.numel(a), -1), dim=1
    )
    if not a.dtype.is_floating_point:
        return not bool(native.any(differ))
    return bool(native.all(native.isnan(native.double(a[differ])) & native.isnan(native.double(b[differ]))))


def is_bad(tensor: torch.Tensor) -> bool:
    """True if an element is nan or inf."""
    with native.DisableTorchFunction():
        has_bad_values = native.is_floating_point(tensor) or native.is_complex(tensor)
        return has_bad_values and not bool(native.all(native.isfinite(native.detach(tensor))))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor on the CPU; without NumPy, which torch can do without."""
    return ctypes.string_at(native.data_ptr(tensor), native.numel(tensor) * native.element_size(tensor))


def contents(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in one row, as numbers that torch computes with: it can hardly do anything with an 8-bit float."""
    plain = native.detach(tensor)
    if plain.layout is not torch.strided:
        plain = native.to_dense(plain)
    if plain.is_quantized:
        plain = native.dequantize(plain)
    if native.is_floating_point(plain) and native.element_size(plain) == 1:
        plain = native.float(plain)
    return native.reshape(native.resolve_neg(native.resolve_conj(plain)), -1)
