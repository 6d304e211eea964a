"""The state of every random generator a training loop may draw from, as plain data and tensors.

NumPy's is read where NumPy is installed, an accelerator's when the program has initialised it. Reading draws nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any

import torch

from reprokit import native
from reprokit.grammar import Count, Later, Name, plain_of, values_of


def _plain_tensor(value: Any) -> torch.Tensor:
    """A tensor of numbers on the CPU, without hooks of its own."""
    if type(value) is not torch.Tensor or not value.is_cpu or value.requires_grad:
        raise ValueError("it is not a plain tensor")
    return native.detach(value)


PlainTensor = Annotated[torch.Tensor, _plain_tensor]
plain_of.register(torch.Tensor)(lambda tensor: tensor)


@dataclass(frozen=True, slots=True)
class PythonState:
    """What ``random.getstate`` returns."""

    version: int
    words: tuple[Count, ...]
    gauss: float | None


@dataclass(frozen=True, slots=True)
class NumpyState:
    """What ``numpy.random.get_state`` returns."""

    algorithm: Name
    words: tuple[Count, ...]
    position: Count
    has_gauss: Count
    gauss: float


@dataclass(frozen=True, slots=True)
class Generators:
    """The states of the generators of Python, NumPy, torch and every accelerator in use."""

    python: Later[PythonState] = None
    torch: Later[PlainTensor] = None
    numpy: Later[NumpyState] = None
    cuda: Later[tuple[PlainTensor, ...]] = None
    xpu: Later[tuple[PlainTensor, ...]] = None
    mps: Later[tuple[PlainTensor, ...]] = None


def get_rng_state() -> Generators:
    """The states of the generators that are in use."""
    accelerators = {
        name: tuple(native.cpu(device.get_rng_state(index)) for index in range(device.device_count()))
        for name, device in _started_accelerators().items()
    }
    numpy_state = None
    if native.get_numpy_state is not None:
        algorithm, words, position, has_gauss, gauss = native.get_numpy_state(legacy=True)
        numpy_state = NumpyState(algorithm, tuple(words.tolist()), int(position), int(has_gauss), float(gauss))
    return Generators(PythonState(*native.get_python_state()), native.get_rng_state(), numpy_state, **accelerators)


def set_rng_state(states: Generators) -> None:
    """Put the generators that are in use into some states."""
    if states.python is not None:
        native.set_python_state((states.python.version, states.python.words, states.python.gauss))
    if states.numpy is not None and native.set_numpy_state is not None:
        native.set_numpy_state(tuple(values_of(states.numpy).values()))
    if states.torch is not None:
        native.set_rng_state(states.torch)
    for name, device in _started_accelerators().items():
        for index, state in enumerate(getattr(states, name) or ()):
            if index < device.device_count():
                device.set_rng_state(state, index)


@contextlib.contextmanager
def generators_restored() -> Iterator[None]:
    """After this context the generators are in the states of before."""
    before = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(before)


def _started_accelerators() -> dict[str, Any]:
    """The device modules in use by name; a device that was never started has drawn nothing."""
    return {name: device for name, device in _ACCELERATORS.items() if device.is_initialized()}


def _functions_of(device: Any) -> SimpleNamespace:
    """The functions of a device module as they are now."""
    names = ("is_initialized", "device_count", "get_rng_state", "set_rng_state")
    return SimpleNamespace(**{name: getattr(device, name) for name in names})


_ACCELERATORS = {name: _functions_of(getattr(torch, name)) for name in ("cuda", "xpu") if hasattr(torch, name)}
_ACCELERATORS["mps"] = SimpleNamespace(  # it has a single generator
    is_initialized=torch.backends.mps.is_available,
    device_count=lambda: 1,
    get_rng_state=lambda _: native.mps_get_rng_state(),
    set_rng_state=lambda state, _: native.mps_set_rng_state(state),
)
