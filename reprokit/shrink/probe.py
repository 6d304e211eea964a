"""Is a program well-formed? Asked of shapes only, so that ill-formed edits never cost a check.

A probe runs the calls on made-up tensors and looks at nothing but shapes and errors. Small inputs are made of zeros;
large ones, and those of functions that refuse zeros, lie on the meta device, which has no contents at all (and takes a
second to load). Some kernels trust their arguments: an ill-formed call of them reads foreign memory. Those are probed
on the meta device only; recurrent layers run on zeros once all their sizes were compared, and never with a wrong number
of weights or states. When nothing runs, every edit has to be checked.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from reprokit.program.interpreter import run
from reprokit.program.ir import Call, Device, Program, iter_refs
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.indexes import fits, parts_of

Shape = tuple[int, ...]
RECURRENT = frozenset({"torch.lstm", "torch.gru", "torch.rnn_relu", "torch.rnn_tanh"})
_COMPRESSED = frozenset(f"torch.sparse_{layout}_tensor" for layout in ("compressed", "csr", "csc", "bsr", "bsc"))
_TRUSTING_SHAPES = frozenset({*RECURRENT, *_COMPRESSED, "torch.embedding_bag", "torch.segment_reduce"})
TRUSTING_LABELS = frozenset({"torch.ctc_loss", "torch.nn.functional.ctc_loss"})
_GATES = {"lstm": 4, "gru": 3}
Shapes = dict[int, Shape]
_MAX_ZEROS = 1 << 23  # a product of two matrices of this size takes less than loading the meta device


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
        are_states_right and (is_projected or output == hidden) and [shapes[ref.value] for ref in weights] == expected
    )


@dataclass(frozen=True, slots=True)
class Form:
    """What a probe needs to know of an input."""

    shape: Shape
    dtype: torch.dtype


Forms = tuple[tuple[int, Form], ...]

Key = tuple[tuple[object, ...], Forms]


class Ground(Enum):
    """What a program is probed on: a device, and whether a warning counts as a refusal."""

    ZEROS = ("cpu", True)
    ZEROS_WARNING = ("cpu", False)
    META = ("meta", True)
    META_WARNING = ("meta", False)

    @property
    def device(self) -> str:
        """Where the made-up tensors are."""
        return self.value[0]

    @property
    def is_strict(self) -> bool:
        """True if a warning counts as a refusal, because the program gave none so far."""
        return self.value[1]


@dataclass
class Prober:
    """Probes the programs that come up in one reduction, and remembers every answer.

    ``before_run`` is called before each run and may raise when there is no time for one.
    """

    before_run: Callable[[], None] = lambda: None
    _grounds: dict[Key, Ground | None] = field(default_factory=dict)
    _shapes: dict[Key, Shapes | None] = field(default_factory=dict)
    _texts: dict[int, tuple[Call, str]] = field(default_factory=dict)

    def refuses(self, candidate: Candidate, known: Candidate, *, raises: bool = False) -> bool:
        """True if a candidate is ill-formed for sure, seen that ``known`` runs.

        ``raises`` says that the failure is an exception: where no probe of ``known`` gets through, being ill-formed may
        be what its last call objects to, and only the calls before are probed.
        """
        if not is_safe(candidate.program, candidate.shapes):
            return True
        ground = self.ground(known)
        if self._fits(known, ground) and not self._fits(candidate, ground):
            return True
        if ground is not None and _is_dense(candidate):
            return self.shapes(candidate.program, forms_of(candidate), ground) is None
        if raises:
            return self._refuses_start(candidate, known)
        is_risky = trusts_shapes(candidate.program) and forms_of(candidate) != forms_of(known)
        return is_risky and self.ground(candidate) is None

    def _fits(self, candidate: Candidate, ground: Ground | None) -> bool:
        """True if all indexes and lengths are in range, also the labels of scores that a call returns."""
        calls, made = candidate.program.calls, {}
        if ground is not None and _is_dense(candidate) and any(call.target in TRUSTING_LABELS for call in calls):
            shapes = self.shapes(candidate.program, forms_of(candidate), ground) or {}
            made = {value: torch.empty(shape, device="meta") for value, shape in shapes.items()}
        return fits(calls, {**made, **candidate.tensors})

    def _refuses_start(self, candidate: Candidate, known: Candidate) -> bool:
        """True if the calls before the last one are ill-formed."""
        ground = self.ground(without_last(known)) if len(known.program.calls) > 1 else None
        start = without_last(candidate)
        return ground is not None and self.shapes(start.program, forms_of(start), ground) is None

    def ground(self, known: Candidate) -> Ground | None:
        """What a candidate that is known to run can be probed on; ``None`` if nothing will do."""
        forms = forms_of(known)
        key = self._key(known.program, forms)
        if key not in self._grounds:
            grounds = _grounds_for(known)
            self._grounds[key] = next((g for g in grounds if self.shapes(known.program, forms, g) is not None), None)
        return self._grounds[key]

    def shapes(self, program: Program, forms: Mapping[int, Form], ground: Ground) -> Shapes | None:
        """The shapes of all values for inputs of these forms, ``None`` when the program does not run with them."""
        leaves = (item.value for item in program.inputs if item.requires_grad)
        key = self._key(program, forms, ground, *leaves)
        if key not in self._shapes:
            self.before_run()
            self._shapes[key] = _run_on(program, forms, ground)
        return self._shapes[key]

    def _key(self, program: Program, forms: Mapping[int, Form], *more: object) -> Key:
        """What tells two questions apart. Programs share most of their calls, so each call is spelled once."""
        for call in program.calls:
            if id(call) not in self._texts:
                self._texts[id(call)] = call, str(call)  # holds the call, so that its number stays its own
        return (*more, *(self._texts[id(call)][1] for call in program.calls)), _in_order(forms)


def forms_of(candidate: Candidate) -> dict[int, Form]:
    """The forms of a program's inputs."""
    tensors = {item.value: candidate.tensors[item.value] for item in candidate.program.inputs}
    return {value: Form(tuple(tensor.shape), tensor.dtype) for value, tensor in tensors.items()}


def _in_order(forms: Mapping[int, Form]) -> Forms:
    return tuple(sorted(forms.items(), key=lambda item: item[0]))


def without_last(candidate: Candidate) -> Candidate:
    """The candidate without its last call, which is the one that raises when the failure is an exception."""
    program = replace(candidate.program, calls=candidate.program.calls[:-1], outputs=())
    return replace(candidate, program=program).pruned()


def _grounds_for(candidate: Candidate) -> list[Ground]:
    if not _is_dense(candidate):
        return []
    unguarded = tuple(call for call in candidate.program.calls if call.target not in RECURRENT or is_packed(call))
    is_trusting = trusts_shapes(replace(candidate.program, calls=unguarded))
    return [ground for ground in Ground if not (is_trusting and ground.device == "cpu")]


def _is_dense(candidate: Candidate) -> bool:
    return all(tensor.layout is torch.strided and not tensor.is_quantized for tensor in candidate.tensors.values())


def _run_on(program: Program, forms: Mapping[int, Form], ground: Ground) -> Shapes | None:
    if ground.device == "cpu" and sum(math.prod(form.shape) for form in forms.values()) > _MAX_ZEROS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error" if ground.is_strict else "ignore")
            made_up, values = _made_up(program, forms, ground), frozenset(_values(program))
            outcome = run(_made_on(program, ground.device), made_up, observer=_Guard(), keep=values)
    except Exception:  # a probe may fail in as many ways as there are functions
        return None
    if outcome.error is not None:
        return None
    return {value: tuple(tensor.shape) for value, tensor in outcome.values.items()}


class _Guard:
    """Ends a run before a recurrent layer whose sizes do not fit: it crashes, and on the meta device for some."""

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Raise `ValueError` for such a call."""
        if call.target in RECURRENT and not is_consistent(call, {v: tuple(t.shape) for v, t in values.items()}):
            raise ValueError(f"the sizes of `{call.target}` do not fit")

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Do nothing."""


def _made_on(program: Program, device: str) -> Program:
    """The program with new tensors on another device, such as the first state of an ``nn.GRU``."""
    calls = tuple(
        replace(call, kwargs={**call.kwargs, "device": Device(device)})
        if not call.input_refs() and isinstance(call.kwargs.get("device"), Device)
        else call
        for call in program.calls
    )
    return replace(program, calls=calls)


def _made_up(program: Program, forms: Mapping[int, Form], ground: Ground) -> dict[int, torch.Tensor]:
    """Zeros; of a flat tensor all elements belong to its first part."""
    random = {item.value for item in program.inputs if item.role == "rng"}
    made = {v: torch.zeros(f.shape, dtype=f.dtype, device=ground.device) for v, f in forms.items() if v not in random}
    for parts in (parts for call in program.calls for parts in parts_of(call, made) if ground.device == "cpu"):
        lengths = [made[parts.flat].numel(), *[0] * (made[parts.counts].numel() - 1 - parts.has_end)]
        made[parts.counts] = parts.counts_for(lengths, made[parts.counts])
    return {**made, **dict.fromkeys(random, torch.get_rng_state())}


def _values(program: Program) -> Iterator[int]:
    yield from (item.value for item in program.inputs)
    for call in program.calls:
        yield from call.output_refs()
