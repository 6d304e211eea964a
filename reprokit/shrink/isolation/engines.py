"""Executors by name: Dask, Ray and MPI behind the interface of ``concurrent.futures``.

An engine is opened before anything is written. Then its package, its address and the versions on the other side are
known to be right, and its processes have loaded torch. Imports neither torch nor an engine before that.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reprokit.errors import UsageError

if TYPE_CHECKING:
    from reprokit.shrink.isolation.runner import Executor

SYNTAX = "dask://HOST:PORT, ray or mpi"
MPI_COMMAND = "mpiexec -n 4 python -m mpi4py.futures -m reprokit shrink FILE --executor mpi"
_DASK = "dask://"
_SECONDS_TO_CONNECT = 10.0
_SECONDS_TO_GREET = 120.0  # a new process loads torch, from a network's file system perhaps


@dataclass(frozen=True, slots=True)
class Engine:
    """An executor that answers, and how many candidates it runs at once."""

    executor: Executor
    num_slots: int


@contextmanager
def open_engine(name: str) -> Iterator[Engine]:
    """The engine of that name (`SYNTAX`); raises `UsageError` if it cannot be used."""
    opening = _opening_of(name)
    with opening as engine:
        if engine.num_slots < 1:
            raise UsageError(f"executor `{name}` has no workers", hint="start workers first")
        _greet(name, engine)
        yield engine


def check_name(name: str) -> str:
    """The name itself; raises `UsageError` if there is no such engine. Opens nothing."""
    _opening_of(name)
    return name


def versions() -> tuple[str, str]:
    """The other side: its versions of reprokit and torch, which is loaded then."""
    import torch

    return str(sys.modules["reprokit"].__version__), str(torch.__version__)


def _opening_of(name: str) -> AbstractContextManager[Engine]:
    host, _, port = name.removeprefix(_DASK).rpartition(":")
    if name.startswith(_DASK) and host and port.isdecimal():
        return _open_dask(f"tcp://{host}:{port}")
    if name in ("ray", "mpi"):
        return _open_ray() if name == "ray" else _open_mpi()
    raise UsageError(f"`{name}` is not an executor", hint=f"one of {SYNTAX}")


def _greet(name: str, engine: Engine) -> None:
    """Ask as many times as there are slots, so that every process loads torch, and compare versions."""
    ours = versions()
    try:
        futures = [engine.executor.submit(versions) for _ in range(engine.num_slots)]
        found = {tuple(future.result(_SECONDS_TO_GREET)) for future in futures}
    except Exception as error:  # executors fail in as many ways as there are
        raise UsageError(
            f"the workers of executor `{name}` cannot run reprokit",
            hint="install reprokit and torch where the workers run",
            note=described(error),
        ) from error
    for theirs in found - {ours}:
        raise UsageError(
            f"the workers of executor `{name}` have reprokit {theirs[0]} and torch {theirs[1]}",
            hint=f"here it is reprokit {ours[0]} and torch {ours[1]}; start the workers in the same environment",
        )


def described(error: Exception) -> str:
    """The kind of an error, with its text if it has one, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # the latter: mpi4py finds no MPI library
        hint = f"python -m pip install {package}"
        raise UsageError(f"the executor needs `{package}`", hint=hint, note=described(error)) from error


@contextmanager
def _open_dask(address: str) -> Iterator[Engine]:
    distributed = _imported("distributed", "distributed")
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # a lost scheduler is printed by the reduction
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
    try:
        client = distributed.Client(address, timeout=_SECONDS_TO_CONNECT, set_as_default=False)
    except Exception as error:  # refused, unknown host, no answer, or a scheduler of another version
        note = described(error)
        raise UsageError(f"no Dask scheduler at `{address}`", hint="start one: dask scheduler", note=note) from error
    try:
        yield Engine(client.get_executor(pure=False, retries=0), sum(client.nthreads().values()))
    finally:
        client.close(timeout=_SECONDS_TO_CONNECT)


@contextmanager
def _open_ray() -> Iterator[Engine]:
    ray = _imported("ray", "ray")
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.CRITICAL)
    except Exception as error:  # no cluster, or one of another version
        hint = "start one: ray start --head"
        raise UsageError("no Ray cluster is running", hint=hint, note=described(error)) from error
    try:
        yield Engine(_Ray(ray), int(ray.cluster_resources().get("CPU", 0)))
    finally:
        ray.shutdown()


@contextmanager
def _open_mpi() -> Iterator[Engine]:
    if "mpi4py.futures" not in sys.orig_argv:  # each process would reduce the snapshot
        raise UsageError("MPI has to start the command", hint=MPI_COMMAND)
    futures = _imported("mpi4py.futures", "mpi4py")
    if importlib.import_module("mpi4py.MPI").COMM_WORLD.Get_size() < 2:
        raise UsageError("MPI has started one process, which leaves none for candidates", hint=MPI_COMMAND)
    with futures.MPIPoolExecutor() as executor:
        yield Engine(executor, executor.num_workers)


@dataclass(frozen=True)
class _Ray:
    """Ray's tasks as an executor. A lost task is not run again: the candidate may have ended its process."""

    ray: Any

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> _RayFuture:
        """Start the function on one core of the cluster."""
        remote = self.ray.remote(num_cpus=1, max_retries=0)(function)
        return _RayFuture(self.ray, remote.remote(*arguments))


@dataclass(frozen=True)
class _RayFuture:
    """The result of one task."""

    ray: Any
    reference: Any

    def result(self, timeout: float | None = None) -> Any:
        """The result, after ``timeout`` seconds at most."""
        return self.ray.get(self.reference, timeout=timeout)

    def cancel(self) -> None:
        """End the task, if it has not ended."""
        self.ray.cancel(self.reference)
