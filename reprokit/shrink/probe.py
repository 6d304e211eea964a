"""Is a program well-formed? Asked of shapes only, so that ill-formed edits never cost a check.

A probe runs the calls on made-up tensors and looks at nothing but shapes and errors. Small inputs are made of zeros;
large ones, and those of functions that refuse zeros, lie on the meta device, which has no contents at all (and takes a
second to load). So do those of functions that trust their arguments, since a wrong shape can crash the process there;
recurrent layers run on zeros once all their sizes were compared. When neither runs, every edit has to be checked.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from reprokit.program.ir import Call, Device, Program
from reprokit.program.run import run
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.indexes import fits, parts_of
from reprokit.shrink.safety import RECURRENT, TRUSTING_LABELS, is_consistent, is_packed, is_safe, trusts_shapes

Shape = tuple[int, ...]
Shapes = dict[int, Shape]
_MAX_ZEROS = 1 << 23  # a product of two matrices of this size takes less than loading the meta device


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
