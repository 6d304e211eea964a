"""Executors of `--executor`: those of the packages `distributed` and `mpi4py`.

An executor is opened before anything is written, so that a missing package or a wrong address is a usage error.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from reprokit.errors import UsageError

SYNTAX = "dask://HOST:PORT or mpi"
_DASK = "dask://"
_SECONDS_TO_CONNECT = 10.0


def check_name(name: str) -> str:
    """The name itself; raises `UsageError` if it names no executor."""
    if name == "mpi" or (name.startswith(_DASK) and name.rpartition(":")[2].isdecimal()):
        return name
    hint = f"one of {SYNTAX}; `reprokit.shrink(..., executor=...)` takes any executor of `concurrent.futures`"
    raise UsageError(f"`{name}` is not an executor", hint=hint)


@contextmanager
def open_executor(name: str) -> Iterator[tuple[Executor, int]]:
    """The executor of that name, and the number of candidates that it runs at once."""
    package = "mpi4py" if name == "mpi" else "distributed"
    try:
        module: Any = importlib.import_module("mpi4py.futures" if name == "mpi" else "distributed")
    except (ImportError, RuntimeError) as error:  # the latter: mpi4py finds no MPI library
        hint = f"python -m pip install {package}"
        raise UsageError(f"the executor needs `{package}`", hint=hint, note=str(error)) from error
    if name == "mpi":
        with module.MPIPoolExecutor() as executor:
            yield executor, max(1, executor.num_workers)
        return
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # an executor that fails ends the reduction
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
    address = f"tcp://{name.removeprefix(_DASK)}"
    try:
        client = module.Client(address, timeout=_SECONDS_TO_CONNECT, set_as_default=False)
    except Exception as error:  # refused, unknown host, no answer, or a scheduler of another version
        raise UsageError(
            f"no Dask scheduler at `{address}`", hint="start one: dask scheduler", note=str(error)
        ) from error
    try:
        yield client.get_executor(pure=False, retries=0), max(1, sum(client.nthreads().values()))
    finally:
        client.close(timeout=_SECONDS_TO_CONNECT)
