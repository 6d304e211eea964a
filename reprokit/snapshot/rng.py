"""The state of every random generator a training loop may draw from, as plain data and tensors.

Only generators that the program has already touched are read: NumPy's when NumPy is imported, an accelerator's when it
is initialised. Reading draws nothing.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def get_rng_state() -> dict[str, Any]:
    """The states of the generators of Python, NumPy, torch and every accelerator, loadable with ``weights_only``."""
    state: dict[str, Any] = {"python": _python_state(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _numpy_state(numpy)
    for name, device in _started_accelerators().items():
        state[name] = [device.get_rng_state(index).cpu() for index in range(device.device_count())]
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators back to what `get_rng_state` returned; accelerators that are not here are left out."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        words = numpy.array(state["numpy"]["words"], dtype=numpy.uint32)
        rest = (state["numpy"][name] for name in ("position", "has_gauss", "gauss"))
        numpy.random.set_state((state["numpy"]["algorithm"], words, *rest))
    for name, device in _started_accelerators().items():
        for index, device_state in enumerate(state.get(name, [])[: device.device_count()]):
            device.set_rng_state(device_state, index)


def _python_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    return {"version": version, "words": list(words), "gauss": gauss}


def _numpy_state(numpy: Any) -> dict[str, Any]:
    algorithm, words, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    return {
        "algorithm": algorithm,
        "words": words.tolist(),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }


def _started_accelerators() -> dict[str, Any]:
    """The device modules in use by name; a device that was never started has drawn nothing."""
    started: dict[str, Any] = {}
    for name in ("cuda", "xpu"):
        device = getattr(torch, name, None)
        if device is not None and device.is_initialized():
            started[name] = device
    if torch.backends.mps.is_available():
        started["mps"] = _Mps()
    return started


class _Mps:
    """Apple's device behind the same calls as the others; it has a single generator."""

    def device_count(self) -> int:
        """Always one."""
        return 1

    def get_rng_state(self, index: int) -> torch.Tensor:
        """The state of the only generator."""
        return torch.mps.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        """Set the only generator."""
        torch.mps.set_rng_state(state)
