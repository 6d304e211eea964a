"""Copies of what training changes: parameters, buffers and optimizer state, so that steps can be run again.

Memory of a copy is reused from one to the next. Restoring writes into the user's own tensors, without touching their
version counters, and gives back a copy of what they held. The states of Python's and NumPy's random generators, which a
model's forward may draw from beside torch's, are kept as well.
"""

from __future__ import annotations

import contextlib
import operator
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from reprokit import torch_private
from reprokit.capture.record.attributes import Containers, is_of_torch, tensors_held
from reprokit.capture.record.structure import iter_tensors

_FREE_SHARE = 0.1  # copies that would take more of a device's free memory live on the CPU


class CannotGoBack(Exception):
    """Tensors are no longer what they were when they were copied."""


class Copies:
    """Tensors and their contents at one moment. Invariant: ``_tensors`` and ``_contents`` are parallel."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._contents: list[torch.Tensor] = []
        self._versions: list[int] = []

    def take(self, tensors: list[torch.Tensor]) -> None:
        """Remember the contents of ``tensors``, using the memory of the last copy where it is of the same tensors."""
        same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        if same:
            self._overwrite(range(len(tensors)))
        else:
            self._tensors = tensors
            self._contents = [_copy(tensor) for tensor in tensors]
        self._versions = [tensor._version for tensor in tensors]

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember more tensors."""
        known = set(map(id, self._tensors))
        for tensor in tensors:
            if id(tensor) not in known:
                known.add(id(tensor))
                self._tensors.append(tensor)
                self._contents.append(_copy(tensor))
                self._versions.append(tensor._version)

    def put_back(self) -> Copies:
        """Write the remembered contents into the tensors; returns copies of what they held before.

        Raises `CannotGoBack` before anything is written if a tensor has another shape or dtype by now.
        """
        for tensor, content in zip(self._tensors, self._contents, strict=True):
            if tensor.shape != content.shape or tensor.dtype != content.dtype:
                raise CannotGoBack("the model was changed since the last copy of its state")
        current = Copies()
        current.take(list(self._tensors))
        try:
            self.give_back()
        except BaseException:
            current.give_back()
            raise
        return current

    def give_back(self) -> None:
        """Write the remembered contents into the tensors, which are as they were; needs no memory."""
        with torch.no_grad():
            for tensor, content in zip(self._tensors, self._contents, strict=True):
                tensor.data.copy_(content)

    def contents(self) -> dict[int, torch.Tensor]:
        """The saved values, by the ``id`` of the tensor."""
        return dict(zip(map(id, self._tensors), self._contents, strict=True))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors with saved values."""
        return self._tensors

    @property
    def num_bytes(self) -> int:
        """The memory the contents take."""
        return num_bytes(self._contents)

    def clear(self) -> None:
        """Forget everything."""
        self._tensors, self._contents, self._versions = [], [], []

    def _overwrite(self, numbers: Sequence[int]) -> None:
        """Copy tensors into the memory of their old copies, in one call where torch can."""
        contents = [self._contents[number] for number in numbers]
        tensors = [self._tensors[number] for number in numbers]
        has_grad = torch.is_grad_enabled()
        try:  # an exception that arrives inside `torch.no_grad` itself would leave gradients off
            torch_private.set_grad_enabled(False)
            torch._foreach_copy_(contents, tensors, non_blocking=False)
        except RuntimeError:  # a shape or layout has changed
            for number in numbers:
                self._contents[number] = _copy(self._tensors[number])
            return
        finally:
            torch_private.set_grad_enabled(has_grad)
        for number in numbers:
            if self._contents[number].dtype != self._tensors[number].dtype:
                self._contents[number] = _copy(self._tensors[number])


class BufferCopies(Copies):
    """Copies of modules' buffers from when a step began, refreshed when something wrote them.

    Batch normalisation writes its running statistics without telling their version counters; the counter of the batches
    it has seen tells for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._witnesses: list[torch.Tensor] = []
        self._places: dict[tuple[int, str], int] = {}
        self._rebound: dict[tuple[int, str], torch.nn.Module] = {}

    def add_module(self, module: torch.nn.Module) -> None:
        """Remember the buffers of a module."""
        known = set(map(id, self._tensors))
        for part in module.modules():
            buffers = dict(part.named_buffers(recurse=False))
            counter = buffers.get("num_batches_tracked")
            for name, buffer in buffers.items():
                if not buffer.is_inference() and id(buffer) not in known:
                    known.add(id(buffer))
                    self._places[id(part), name] = len(self._tensors)
                    self.add([buffer])
                    witness = buffer if counter is None else counter
                    self._witnesses.append(witness)
                    self._versions[-1] = witness._version

    def rebind(self, part: torch.nn.Module, name: str) -> None:
        """A forward of the running step replaces a buffer."""
        if (id(part), name) in self._places:
            self._rebound[id(part), name] = part

    def put_back(self) -> Copies:
        """Also what buffers were before a forward replaced them."""
        current = super().put_back()
        for (key, name), part in self._rebound.items():
            part._buffers[name] = self._tensors[self._places[key, name]]
        return current

    def refresh(self) -> None:
        """Remember the contents of now; buffers that nothing wrote are left alone."""
        for (key, name), part in self._rebound.items():
            number, buffer = self._places[key, name], part._buffers.get(name)
            if buffer is not None:
                is_own = self._witnesses[number] is self._tensors[number]
                self._tensors[number], self._contents[number] = buffer, _copy(buffer)
                self._witnesses[number] = buffer if is_own else self._witnesses[number]
                self._versions[number] = self._witnesses[number]._version
        self._rebound = {}
        numbers = [n for n, (w, v) in enumerate(zip(self._witnesses, self._versions, strict=True)) if w._version != v]
        if numbers:
            self._overwrite(numbers)
            for number in numbers:
                self._versions[number] = self._witnesses[number]._version

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._witnesses, self._places, self._rebound = [], {}, {}


class Bindings:
    """Which tensors the buffers of modules are; a forward may replace them. Each of ``spaces`` is of one module."""

    def __init__(self, spaces: Iterable[dict[str, torch.Tensor | None]]) -> None:
        self._buffers = [(space, dict(space)) for space in spaces if space]

    def put_back(self) -> Bindings:
        """Go back to it; returns what was there before."""
        current = Bindings([space for space, _ in self._buffers])
        self.give_back()
        return current

    def give_back(self) -> None:
        """Go back to it."""
        for buffers, content in self._buffers:
            for name, buffer in content.items():  # those of a scripted module are no dict
                buffers[name] = buffer


class OptimizerNote:
    """The structure of an optimizer: its options, and the names of the state of each parameter; the attributes of one
    of the user's own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._options = options_of(optimizer)
        self._attributes = None if is_of_torch(optimizer) else Containers([optimizer])
        self._state = [(key, state, dict(state)) for key, state in optimizer.state.items() if isinstance(state, dict)]

    def renewed(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The ids of tensors of that state in whose place the optimizer has made new ones, and these."""
        for key, _, content in self._state:
            now = self._optimizer.state.get(key, {})
            for name, tensor in content.items():
                made = now.get(name) if isinstance(tensor, torch.Tensor) else None
                if isinstance(made, torch.Tensor) and made is not tensor:
                    yield id(tensor), made

    def put_back(self) -> OptimizerNote:
        """Go back to it; returns a note of what was there before."""
        current = OptimizerNote(self._optimizer)
        self.give_back()
        return current

    def give_back(self) -> None:
        """Go back to it."""
        if self._attributes is not None:
            self._attributes.give_back()
        set_options(self._optimizer, self._options)
        self._optimizer.state.clear()
        for key, state, content in self._state:
            state.clear()
            state.update(content)
            self._optimizer.state[key] = state


class State:
    """Everything that steps change, at one moment: tensors' contents and optimizers' notes.

    ``gradients`` pairs parameters with copies of gradients that were still to be used at that moment; ``with_gradient``
    are all that had one.
    """

    def __init__(self) -> None:
        self.copies = Copies()
        self.gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.with_gradient: list[torch.Tensor] = []
        self._notes: list[OptimizerNote | Bindings] = []

    def take(
        self,
        tensors: list[torch.Tensor],
        optimizers: Iterable[torch.optim.Optimizer],
        modules: Iterable[torch.nn.Module],
    ) -> None:
        """Remember all of it, reusing memory."""
        self.copies.take(tensors)
        parameters = (t for t in tensors if t.requires_grad or isinstance(t, torch.nn.Parameter))  # also frozen by now
        self.with_gradient = [tensor for tensor in parameters if tensor.grad is not None]
        self._notes = [*map(OptimizerNote, optimizers), Bindings(p._buffers for m in modules for p in m.modules())]

    def take_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remember gradients, which an optimizer's step is still to use."""
        self.gradients = [(p, p.grad.detach().clone()) for p in parameters if p.grad is not None]

    def add(self, tensors: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Remember more."""
        self.copies.add(tensors)
        self._notes += [OptimizerNote(optimizer) for optimizer in optimizers]

    def bind(self, module: torch.nn.Module) -> None:
        """Remember what the buffers of one more module are."""
        self._notes.append(Bindings(part._buffers for part in module.modules()))

    def renewed(self) -> dict[int, torch.Tensor]:
        """Tensors of optimizer states that were replaced since then: the new one by the ``id`` of the old one."""
        return dict(pair for note in self._notes if isinstance(note, OptimizerNote) for pair in note.renewed())

    def clear(self) -> None:
        """Forget everything."""
        self._notes, self.gradients, self.with_gradient = [], [], []
        self.copies.clear()

    def put_back(self) -> State:
        """Go back to it; returns the state of before. Raises `CannotGoBack` with nothing changed."""
        current = State()
        current.copies = self.copies.put_back()
        try:
            for note in self._notes:
                current._notes.append(note.put_back())
        except BaseException:
            current.give_back()
            raise
        return current

    def give_back(self) -> None:
        """Go back to it, knowing that nothing has another shape by now."""
        self.copies.give_back()
        for note in self._notes:
            note.give_back()


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of every parameter group, such as the learning rate of now."""
    found = []
    for group in optimizer.param_groups:
        options = {**group}
        del options["params"]
        found.append(options)
    return found


def set_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """The inverse of `options_of`."""
    for group, values in zip(optimizer.param_groups, options, strict=False):
        group.update(values)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Every parameter of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def owned_by(owner: torch.nn.Module | torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of a module or an optimizer."""
    return list(parameters_of(owner) if isinstance(owner, torch.optim.Optimizer) else owner.parameters())


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Parameters and every tensor of the optimizer's state; those in attributes of one of the user's own."""
    yield from parameters_of(optimizer)
    if not is_of_torch(optimizer):
        yield from tensors_held(optimizer)
    for state in optimizer.state.values():
        if isinstance(state, dict):
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    yield value
                else:
                    yield from iter_tensors(value)


def give_gradients(grads: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Set the gradients of leaves."""
    for leaf, grad in grads:
        leaf.grad = grad


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The memory that tensors take, in bytes."""
    return sum([tensor.numel() * tensor.element_size() for tensor in tensors])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if plain.is_cuda and num_bytes([plain]) > _FREE_SHARE * torch.cuda.mem_get_info(plain.device)[0]:
        return plain.cpu()
    return plain.clone() if plain.layout is not torch.strided else plain.clone(memory_format=torch.preserve_format)


class GeneratorWatch:
    """Notes the generators' states before a step's first forward, while there is reason to.

    Reading them in every step would cost several per cent of a short step, so they are read in the first steps and once
    after every copy of the state. If the states differ before and after a step's forward then, they are read always.
    """

    def __init__(self) -> None:
        self.states: dict[str, Any] | None = None
        self._looks_left = 3
        self._is_drawn = False

    @property
    def is_looking(self) -> bool:
        """True if the next forward matters."""
        return self._is_drawn or self._looks_left > 0

    def before_module(self) -> dict[str, Any] | None:
        """A root module is about to run: the states of now if it is not the first one of a step that is looked at."""
        if not self.is_looking:
            return None
        states = python_generators()
        if self.states is None:
            self.states = states
            return None
        return states

    def restart(self) -> None:
        """The step is over."""
        if self.states is None:
            return
        if not self._is_drawn:
            self._looks_left -= 1
            self._is_drawn = not _are_equal(self.states, python_generators())
        self.states = None

    def look_closely(self) -> None:
        """Look again in the next step."""
        self._looks_left = max(self._looks_left, 1)


def python_generators() -> dict[str, Any]:
    """The states of Python's and, where the program uses it, NumPy's generator."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {"python": random.getstate()}
    if numpy is not None and hasattr(numpy, "random"):
        states["numpy"] = numpy.random.get_state()
    return states


def _are_equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    if first["python"] != second["python"] or first.keys() != second.keys():
        return False
    return all(
        a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else a == b
        for a, b in zip(first.get("numpy", ()), second.get("numpy", ()), strict=True)
    )


@contextlib.contextmanager
def python_generators_restored(states: dict[str, Any] | None) -> Iterator[None]:
    """Python's and NumPy's generators as they were in ``states``; afterwards as they are now."""
    before = python_generators()
    try:
        set_python_generators(states or before)
        yield
    finally:
        set_python_generators(before)


def set_python_generators(states: dict[str, Any]) -> None:
    """Put Python's and NumPy's generators into ``states``."""
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
