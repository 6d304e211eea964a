"""Which calls could take the process down: kernels that trust their arguments instead of checking them.

An ill-formed edit of such a call reads foreign memory, so it never runs in this process, not even as a probe on
contentless tensors when it is the number of weights or states that is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

from reprokit.program.ir import Call, Program, iter_refs

Shape = tuple[int, ...]

RECURRENT = frozenset({"torch.lstm", "torch.gru", "torch.rnn_relu", "torch.rnn_tanh"})
_COMPRESSED = frozenset(f"torch.sparse_{layout}_tensor" for layout in ("compressed", "csr", "csc", "bsr", "bsc"))
_TRUSTING = frozenset({*RECURRENT, *_COMPRESSED, "torch.embedding_bag", "torch.segment_reduce"})

_GATES = {"lstm": 4, "gru": 3}


def trusts_shapes(program: Program) -> bool:
    """True if any call may read past the end of a tensor of the wrong size; torch's private functions may as well."""
    return any(call.target in _TRUSTING or _is_private(call.name) for call in program.calls)


def is_safe(program: Program, shapes: Mapping[int, Shape]) -> bool:
    """True if every recurrent layer gets the weights, gates and states it expects; ``shapes`` are of the inputs."""
    return all(_is_complete(call, shapes) for call in program.calls if call.target in RECURRENT)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_complete(call: Call, shapes: Mapping[int, Shape]) -> bool:
    """Arguments: input, states, weights, biases, layers, dropout, training, bidirectional, batch first; for a packed
    sequence the batch sizes come second and the last one is missing."""
    place = next((index for index in (2, 3) if index < len(call.args) and isinstance(call.args[index], list)), None)
    if place is None or call.kwargs or len(call.args) != 9:
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
    return all(shape and shape[0] % _GATES.get(call.name, 1) == 0 for shape in gated)
