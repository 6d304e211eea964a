"""Calls that read foreign memory when an argument has a wrong size or a number is out of range."""

from __future__ import annotations

from collections.abc import Mapping

from reprokit.program.ir import Call, Program, iter_refs

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
