"""The random generators that a script has made for itself, beside those of Python, NumPy and torch.

A replay calls code that may draw from them, so their states are put back. Those of Python and NumPy are found wherever
they are, by Python's garbage collector. It does not know those of torch: they are found in the variables of the user's
modules, in the arguments of the recorded calls, and in attributes of what is trained.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch

from reprokit import native
from reprokit.capture.structure import iter_leaves
from reprokit.program.sites import kind_of_file
from reprokit.snapshot.rng import generators_restored


@contextlib.contextmanager
def all_generators_restored(arguments: Iterable[Any] = ()) -> Iterator[None]:
    """After this context the generators are in the states of before, those of the script included.

    ``arguments`` are those of the calls that are played again.
    """
    passed = iter_leaves(list(arguments), torch.Generator)
    with generators_restored(), own_restored(chain(gc.get_objects(), _variables(), passed)):
        yield


@contextlib.contextmanager
def own_restored(values: Iterable[Any]) -> Iterator[None]:
    """After this context the generators among some values are in the states of before."""
    # By `type`: `isinstance` asks proxies, such as Flask's `request`, for the class of what they stand for.
    found = {id(value): value for value in values if issubclass(type(value), _KINDS)}
    restore = [put_back for value in found.values() if (put_back := _restoring(value)) is not None]
    try:
        yield
    finally:
        for put_back in restore:
            put_back()


def _variables() -> Iterator[Any]:
    """The values of the variables of the user's modules.

    Not those of running functions: to read them changes what ``locals()`` has returned there, and keeps them alive.
    """
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")  # `getattr` would run a lazy module's `__getattr__`
        if isinstance(file, str) and kind_of_file(file) == "user":
            yield from list(vars(module).values())


def _restoring(generator: Any) -> Callable[[], object] | None:
    """Puts a generator back into its state of now; ``None`` for one that has none, such as `random.SystemRandom`."""
    with contextlib.suppress(NotImplementedError):
        if isinstance(generator, random.Random):
            return partial(generator.setstate, generator.getstate())
        if isinstance(generator, torch.Generator):
            return partial(generator.set_state, generator.get_state())
        if isinstance(generator, native.numpy_random.RandomState):
            return partial(generator.set_state, generator.get_state())
        bits = generator.bit_generator
        return partial(setattr, bits, "state", bits.state)
    return None


_OF_NUMPY = (native.numpy_random.Generator, native.numpy_random.RandomState) if native.numpy_random is not None else ()
_KINDS = (random.Random, torch.Generator, *_OF_NUMPY)
