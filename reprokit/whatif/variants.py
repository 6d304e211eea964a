"""The ways in which a program is run again: each changes the program, torch's settings around it, or how it is run.

The order is that of the table. What is cheap comes first, so that a short budget is spent on as many as possible.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.references import default_dtype, in_dtype, on_device

AS_IT_IS = "as_it_is"
ANOMALY = "detect_anomaly"
COMPILED = "compile:"
Change = Callable[[Candidate], Candidate]
Around = Callable[[], contextlib.AbstractContextManager[None]]


class Unsuitable(Exception):
    """A variant that cannot be run here; the message says why, in one line."""


def _same(candidate: Candidate) -> Candidate:
    return candidate


def _is_always_of_interest(candidate: Candidate) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run a program. ``key`` is for machines, ``name`` for people.

    ``change`` makes the other program, ``around`` holds torch's settings while it runs, and ``is_of_interest`` tells
    whether it is another way at all for a candidate. With a ``backend`` the program is compiled.
    """

    key: str
    name: str
    change: Change = _same
    around: Around = contextlib.nullcontext
    is_of_interest: Callable[[Candidate], bool] = _is_always_of_interest
    backend: str = ""

    @property
    def is_slow(self) -> bool:
        """True if it takes seconds to start."""
        return bool(self.backend)


def _in(dtype: torch.dtype, candidate: Candidate) -> Candidate:
    return in_dtype(candidate, dtype)


def _without_autocast(candidate: Candidate) -> Candidate:
    calls = tuple(replace(call, mode=replace(call.mode, autocast=())) for call in candidate.program.calls)
    return replace(candidate, program=replace(candidate.program, calls=calls))


def _has_autocast(candidate: Candidate) -> bool:
    return any(call.mode.autocast for call in candidate.program.calls)


def home_of(candidate: Candidate) -> str:
    """The kind of device that a candidate runs on."""
    items = (item for item in candidate.program.inputs if item.role != "rng")
    kinds = (candidate.tensors[item.value].device.type for item in items)
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


def _is_elsewhere(kind: str, candidate: Candidate) -> bool:
    return home_of(candidate) != kind


def _on(kind: str, candidate: Candidate) -> Candidate:
    if kind == "cuda" and not torch.cuda.is_available():
        raise Unsuitable("torch sees no GPU")
    return on_device(candidate, kind)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic algorithms, without the compiler that the public switch imports, which takes seconds."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=warn_only)


def _has_attention(candidate: Candidate) -> bool:
    return any(call.name == "scaled_dot_product_attention" for call in candidate.program.calls)


@contextlib.contextmanager
def _attention(backend: str) -> Iterator[None]:
    """One implementation of attention only; the call raises where that does not exist for its device or arguments."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):
        yield


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _anomaly() -> Iterator[None]:
    with torch.autograd.set_detect_anomaly(True):
        yield


def _precision(dtype: torch.dtype) -> Variant:
    name = str(dtype).removeprefix("torch.")
    return Variant(name, name, partial(_in, dtype), partial(default_dtype, dtype))


def _device(kind: str, name: str) -> Variant:
    return Variant(kind, f"on {name}", partial(_on, kind), is_of_interest=partial(_is_elsewhere, kind))


def _kernel(key: str, name: str, backend: str) -> Variant:
    around = partial(_attention, backend)
    return Variant(f"attention:{key}", f"attention by the {name} kernel", around=around, is_of_interest=_has_attention)


VARIANTS = (
    Variant(AS_IT_IS, "as it is"),
    *map(_precision, (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    Variant("autocast_off", "autocast off", _without_autocast, is_of_interest=_has_autocast),
    Variant("deterministic", "deterministic algorithms", around=_deterministic),
    Variant("one_thread", "one thread", around=_one_thread),
    Variant(ANOMALY, "`set_detect_anomaly`", around=_anomaly),
    _kernel("math", "math", "MATH"),
    _kernel("flash", "flash", "FLASH_ATTENTION"),
    _kernel("efficient", "memory-efficient", "EFFICIENT_ATTENTION"),
    _device("cpu", "the CPU"),
    _device("cuda", "CUDA"),
    Variant(f"{COMPILED}aot_eager", "`torch.compile`, aot_eager", backend="aot_eager"),
    Variant(f"{COMPILED}inductor", "`torch.compile`, inductor", backend="inductor"),
)
BY_KEY = {variant.key: variant for variant in VARIANTS}
