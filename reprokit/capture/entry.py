"""One thing the training loop did, as the tape notes it, and the light form in which past steps are kept.

While a step runs its entries hold the very tensors the loop had. When it is over, `Freezer` replaces what the step made
itself by empty stand-ins, so that only what came from outside (the batch, small states) stays alive until the next
copy.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from reprokit.capture.structure import ATOMS, iter_tensors, map_tensors
from reprokit.program.ir import AUTOGRAD_GRAD, Mode


@dataclass(slots=True, eq=False)
class Entry:
    """``kind``: ``module``, ``function``, ``differentiate``, ``zero_grad``, ``clip``, ``scale``, ``unscale`` or
    ``optimizer``.

    ``versions`` pairs the tensors it was given with their version counters. ``rng`` holds the states of the CPU and,
    where used, the CUDA generator before a call that may draw. ``outcome`` is what a random in-place function left.
    ``settings`` is what else a replay needs: an optimizer's options of that step, a grad scaler's scale.
    ``writes_state`` marks functions that write into parameters and buffers outside of optimizers: they are part of the
    state that the next forward begins with. ``writes_view`` marks writes into a view of another tensor. ``has_stepped``
    marks differentiations inside which optimizers stepped.
    """

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mode: Mode
    output: Any = None
    name: str = ""
    code: CodeType | None = None
    line: int = 0
    rng: tuple[torch.Tensor, torch.Tensor | None] | None = None
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    outcome: torch.Tensor | None = None
    settings: Any = None
    writes_state: bool = False
    writes_view: bool = False
    has_stepped: bool = False

    @property
    def starts(self) -> list[torch.Tensor]:
        """The tensors a differentiation starts from."""
        return starts_of(self.args, self.kwargs)

    @property
    def gives_gradients(self) -> bool:
        """Whether a differentiation is handed gradients, so that what it starts from is not a loss."""
        position = 2 if self.name == AUTOGRAD_GRAD else 1
        given = self.args[position] if len(self.args) > position else None
        return given is not None or any(self.kwargs.get(name) is not None for name in _GIVEN_GRADIENTS)


_GIVEN_GRADIENTS = ("gradient", "grad_tensors", "grad_outputs")


def starts_of(args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a differentiation with these arguments starts from."""
    first = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
    return [first] if isinstance(first, torch.Tensor) else list(iter_tensors(first))


def versions_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, int]]:
    """The tensors among the arguments of a call with their version counters (-1 for those that have none)."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append((value, -1 if value.is_inference() else value._version))
        elif type(value) not in ATOMS:
            found += [(t, -1 if t.is_inference() else t._version) for t in iter_tensors(value)]
    return found


def generator_states(versions: Iterable[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states of the CPU generator and, when a CUDA tensor is among the arguments, of its device's generator."""
    state = torch.default_generator.get_state()
    for tensor, _ in versions:
        if tensor.is_cuda:
            return state, torch.cuda.get_rng_state(tensor.device)
    return state, None


def is_among(tensor: torch.Tensor, versions: list[tuple[torch.Tensor, int]]) -> bool:
    """Whether a tensor is one of the arguments."""
    for known, _ in versions:  # noqa: SIM110 (a generator would cost more than the loop)
        if known is tensor:
            return True
    return False


def new_tensors(entry: Entry, made: set[int]) -> list[torch.Tensor]:
    """What an entry made: its outputs, but not what it was given from outside and only wrote into or handed back."""
    output = entry.output
    if output is None:
        return []
    outputs = [output] if isinstance(output, torch.Tensor) else list(iter_tensors(output))
    given = [id(tensor) for tensor, _ in entry.versions]
    return [tensor for tensor in outputs if id(tensor) in made or id(tensor) not in given]


def size_of(entries: list[Entry]) -> int:
    """The memory of what a step was given and made, in bytes."""
    tensors = {id(t): t for entry in entries for t in iter_tensors((entry.args, entry.kwargs, entry.output))}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


_VALUE_READS = frozenset({"torch.Tensor.detach", "torch.Tensor.data.__get__"})  # take a tensor without its graph
_WITHOUT_RESULTS = frozenset({"zero_grad", "clip", "unscale", "optimizer"})  # are not given what the step made


class Freezer:
    """Turns finished steps into light ones.

    A tensor that one step made and a later one uses with its graph (a generator's output that the next optimizer's loss
    starts from) keeps its stand-in: ``_carried`` knows it as long as the tensor lives.
    """

    def __init__(self) -> None:
        self._carried: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._pool: list[torch.Tensor] = []  # stand-ins that nobody has used yet

    def forget(self) -> None:
        """No step before now can be played again."""
        self._carried = {}

    def freeze(self, entries: list[Entry], saved: dict[int, torch.Tensor], *, in_place: bool = False) -> Frozen:
        """The entries of a finished step without what the step made; ``in_place`` changes the entries themselves."""
        work = _Freezing(self._carried, self._pool)
        made = work.made
        for entry in entries:
            made.update(map(id, new_tensors(entry, made)))
        light = entries if in_place else [copy.copy(entry) for entry in entries]
        for entry in light:
            work.freeze(entry)
        kept = {}
        for key, content in saved.items():
            if key in work.stand_ins:
                kept[id(work.stand_ins[key][1])] = content
            elif key in work.outside:
                kept[key] = content
        for tensor, stand_in in work.stand_ins.values():
            if tensor.requires_grad:
                self._carried[id(tensor)] = (weakref.ref(tensor), stand_in)
        num_bytes = 0
        for tensor in (*work.outside.values(), *kept.values()):
            num_bytes += tensor.numel() * tensor.element_size()
        return Frozen(light, kept, num_bytes, work.is_cut)


@dataclass(slots=True)
class Frozen:
    """A light step. ``is_cut``: it uses a graph that began before anything that is remembered."""

    entries: list[Entry]
    saved: dict[int, torch.Tensor]
    num_bytes: int
    is_cut: bool


class _Freezing:
    """Maps tensors that a step ``made`` to stand-ins; keeps the originals alive while ids are compared."""

    def __init__(
        self, carried: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]], pool: list[torch.Tensor]
    ) -> None:
        self._carried = carried
        self._pool = pool
        self.made: set[int] = set()
        self.stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.outside: dict[int, torch.Tensor] = {}
        self.is_cut = False
        self._reads_values = False

    def freeze(self, entry: Entry) -> None:
        light = self._light
        self._reads_values = not entry.mode.grad or entry.name in _VALUE_READS
        if entry.kind not in _WITHOUT_RESULTS:
            entry.args = tuple([light(v) if isinstance(v, torch.Tensor) else self._map(v) for v in entry.args])
            if entry.kwargs:
                entry.kwargs = {name: self._map(value) for name, value in entry.kwargs.items()}
        output = entry.output
        if output is not None:
            tensors = (output,) if isinstance(output, torch.Tensor) else iter_tensors(output)
            entry.output = [light(tensor) for tensor in tensors]
        if entry.versions:
            entry.versions = [pair for pair in entry.versions if id(pair[0]) in self.outside]

    def _map(self, value: Any) -> Any:
        return value if type(value) in ATOMS else map_tensors(value, self._light)

    def _light(self, tensor: torch.Tensor) -> torch.Tensor:
        key = id(tensor)
        known = self.stand_ins.get(key)
        if known is not None:
            return known[1]
        if key in self.made:
            if not self._pool:
                self._pool.extend(torch.empty(256, 0).unbind())
            light = self._pool.pop()
        elif tensor.grad_fn is not None and tensor.requires_grad:
            light = self._carried_from_before(tensor)
        else:
            if type(tensor) is not torch.nn.Parameter:
                self.outside[key] = tensor
            return tensor
        self.stand_ins[key] = (tensor, light)
        return light

    def _carried_from_before(self, tensor: torch.Tensor) -> torch.Tensor:
        reference, light = self._carried.get(id(tensor), (None, None))
        if reference is not None and light is not None and reference() is tensor:
            return light
        if self._reads_values:  # such as the last loss, which many loops add to a sum
            return tensor.detach()
        self.is_cut = True
        return tensor.detach().requires_grad_()


def with_makers(entries: list[Entry], earlier: list[list[Entry]]) -> list[Entry]:
    """``entries`` of a step with those of earlier steps that made the graphs it goes on with."""
    result = list(entries)
    made = {id(tensor) for entry in entries for tensor in iter_tensors(entry.output)}
    needed = {id(tensor) for entry in entries for tensor in iter_tensors((entry.args, entry.kwargs))} - made
    for step in reversed(earlier):
        for entry in reversed(step):
            outputs = {id(tensor) for tensor in iter_tensors(entry.output)}
            if entry.kind in ("module", "function") and not entry.writes_state and outputs & needed:
                result.insert(0, entry)
                needed = (needed - outputs) | {id(tensor) for tensor in iter_tensors((entry.args, entry.kwargs))}
    return result
