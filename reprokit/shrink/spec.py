"""What ``--check`` and ``--executor`` may say, read without torch, so that a wrong word costs no wait.

Executors are those of the packages `distributed` and `mpi4py`. One is opened before anything is written, so that a
missing package or a wrong address is a usage error.
"""

from __future__ import annotations

import ast
import importlib
import logging
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reprokit.errors import UsageError

NONFINITE, EXCEPTION, MISMATCH = "nonfinite", "exception", "mismatch"
FP64, COMPILE, DEVICES, OTHER = "fp64", "compile", "cpu-cuda", "other"
DEFAULT_BACKEND = "inductor"
WRITTEN = frozenset({"repro.py", "repro_module.py", "test_repro.py"})
CHECKS = (
    "nonfinite, exception, mismatch:fp64, mismatch:compile[:BACKEND | :FILE.py:FUNCTION], mismatch:cpu-cuda "
    "or FILE.py:FUNCTION"
)


@dataclass(frozen=True, slots=True)
class Spec:
    """A check as it was written, and what it means."""

    text: str
    kind: str
    detail: str = ""  # the reference of a mismatch, or the function's name
    option: str = ""  # the backend of a compiler
    file: Path | None = None


def parse(text: str) -> Spec:
    """The check that is meant; raises `UsageError`."""
    word, _, rest = text.partition(":")
    detail, _, option = rest.partition(":")
    if word in (NONFINITE, EXCEPTION) and not rest:
        return Spec(text, word)
    is_mismatch = word == MISMATCH
    if is_mismatch and detail in (FP64, DEVICES, OTHER) and not option:
        return Spec(text, word, detail)
    is_compiled = is_mismatch and detail == COMPILE
    file, _, function = (option if is_compiled else text).rpartition(":")
    if file.endswith(".py") and function:
        found = _function(text, Path(file), function)
        if not option:
            return found
        own_compiler = f"{Path(file).name}:{function}"
        return replace(found, kind=word, detail=COMPILE, option=own_compiler)
    if is_compiled:
        return Spec(text, word, detail, option or DEFAULT_BACKEND)
    raise UsageError(f"`{text}` is not a check", hint=f"one of {CHECKS}")


def _function(text: str, file: Path, function: str) -> Spec:
    """A function of a file, found by reading the file."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=file.name)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot read `{file}`: {reason}", hint="name the file that holds the check") from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"`{file}` is not valid Python: {error}", hint="try `python` on it first") from None
    if file.name in WRITTEN:
        raise UsageError(f"`{file.name}` is the name of a result", hint="rename the file that holds the check")
    found = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = [target.id for node in tree.body if isinstance(node, ast.Assign) for target in _targets(node)]
    if function not in (*found, *names):
        known = ", ".join(found) or "none"
        raise UsageError(f"`{file}` has no function `{function}`", hint=f"functions in it: {known}")
    return Spec(text, "function", function, file=file)


def _targets(node: ast.Assign) -> list[ast.Name]:
    return [target for target in node.targets if isinstance(target, ast.Name)]


EXECUTORS = "dask://HOST:PORT or mpi"
_DASK = "dask://"
_SECONDS_TO_CONNECT = 10.0


def check_name(name: str) -> str:
    """The name itself; raises `UsageError` if it names no executor."""
    if name == "mpi" or (name.startswith(_DASK) and name.rpartition(":")[2].isdecimal()):
        return name
    hint = f"one of {EXECUTORS}; `reprokit.shrink(..., executor=...)` takes any executor of `concurrent.futures`"
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
