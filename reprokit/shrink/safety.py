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
_TRUSTING_SHAPES = frozenset({*RECURRENT, *_COMPRESSED, "torch.embedding_bag", "torch.segment_reduce"})
TRUSTING_LABELS = frozenset({"torch.ctc_loss", "torch.nn.functional.ctc_loss"})

_GATES = {"lstm": 4, "gru": 3}


def trusts_arguments(program: Program) -> bool:
    """True if any call may read past the end of a tensor, for a wrong size or for a number in it that is out of
    range."""
    return trusts_shapes(program) or any(call.target in TRUSTING_LABELS for call in program.calls)


def trusts_shapes(program: Program) -> bool:
    """True if any call may read past the end of a tensor of the wrong size; torch's private functions may as well."""
    return any(call.target in _TRUSTING_SHAPES or _is_private(call.name) for call in program.calls)


def is_safe(program: Program, shapes: Mapping[int, Shape]) -> bool:
    """True if every recurrent layer gets the weights, gates and states it expects, as far as ``shapes`` are known."""
    return all(is_complete(call, shapes) for call in program.calls if call.target in RECURRENT)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_complete(call: Call, shapes: Mapping[int, Shape]) -> bool:
    """True if a recurrent layer gets the weights, gates and states it expects, as far as ``shapes`` are known.

    Arguments: input, states, weights, biases, layers, dropout, training, bidirectional, batch first; for a packed
    sequence the batch sizes come second and the last one is missing.
    """
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


def is_packed(call: Call) -> bool:
    """True if a recurrent layer reads a packed sequence."""
    return not isinstance(call.args[2], list)


def is_consistent(call: Call, shapes: Mapping[int, Shape]) -> bool:
    """True if every size of a recurrent layer is the one it must be; of a packed one only `is_complete` is known.

    All ``shapes`` must be there.
    """
    if not is_complete(call, shapes) or is_packed(call):
        return is_complete(call, shapes)
    weights, has_biases, num_layers, _, _, is_bidirectional, is_batch_first = call.args[2:]
    given, states = shapes[call.args[0].value], [shapes[ref.value] for ref in iter_refs(call.args[1])]
    directions = 2 if is_bidirectional else 1
    num_cells = num_layers * directions
    if len(given) != 3 or len(states) != (2 if call.name == "lstm" else 1) or any(len(state) != 3 for state in states):
        return False
    batch, output, hidden = given[0 if is_batch_first else 1], states[0][2], states[-1][2]
    gates, is_projected = hidden * _GATES.get(call.name, 1), len(weights) == num_cells * (5 if has_biases else 3)
    expected: list[Shape] = []
    for cell in range(num_cells):
        width = given[2] if cell < directions else output * directions
        expected += [(gates, width), (gates, output), *[(gates,), (gates,)] * bool(has_biases)]
        expected += [(output, hidden)] * is_projected
    are_states_right = all(state[:2] == (num_cells, batch) for state in states)
    return (
        are_states_right
        and (is_projected or output == hidden)
        and [shapes[ref.value] for ref in weights] == expected
    )
