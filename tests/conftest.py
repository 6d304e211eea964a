"""What all tests share: the command line in a process of its own, from any folder, and the benchmarks as modules."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from tests import processes

ROOT = Path(__file__).resolve().parent.parent
Run = Callable[..., subprocess.CompletedProcess[str]]
SECONDS = 300.0  # then a process hangs, on a busy machine too

settings.register_profile("reprokit", deadline=None)  # how long an example takes depends on what else the machine does
settings.load_profile("reprokit")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a run in the background, whose children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # without it every process would compile all of reprokit: half a second
os.environ["REPROKIT_SHRINK_NO_WHATIF"] = "1"  # five seconds for every reduction; the tests of the table ask for it
if platform.machine() in ("x86_64", "AMD64"):
    os.environ["ATEN_CPU_CAPABILITY"] = "avx2"  # the same kernels on every machine: AVX-512 hides some overflows
BEFORE = dict(os.environ)  # a test may have changed it when the server of processes starts


def start_python_in(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``python *words`` in a folder, with reprokit importable; a hang ends the test."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment_with(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def run_python_in(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`start_python_in` with a process that was forked after ``import torch``, where the system can fork."""
    if not processes.IS_POSSIBLE:
        return start_python_in(folder, *words, **variables)
    return server(*processes.MODULES).run(words, folder, environment_with(variables), SECONDS)


def environment_with(variables: dict[str, str]) -> dict[str, str]:
    """The environment of the tests' processes."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


@functools.cache
def server(*modules: str) -> processes.Server:
    """The process of this test run that has imported these modules."""
    made = processes.Server(modules, {**BEFORE, "OMP_NUM_THREADS": "1"})
    atexit.register(made.close)
    return made


def import_benchmark(name: str) -> ModuleType:
    """A script of the benchmarks as a module; these import each other as from the folder that they are in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module(name)


class ForkingSystem:
    """Stands for `sys` where only the path of Python is asked for."""

    @property
    def executable(self) -> str:
        """A stand-in for Python that forks, where the system can."""
        return server("torch").python if processes.IS_POSSIBLE else sys.executable


@pytest.fixture(autouse=True)
def verified_in_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification of a repro starts its clean processes by forking; `test_verify` starts Python."""
    verify = sys.modules.get("reprokit.render.verify")
    if verify is not None:
        monkeypatch.setattr(verify, "sys", ForkingSystem())


def run_few_times(patch: pytest.MonkeyPatch) -> None:
    """A reduction's repro runs four times in clean processes, not 20: for tests that are about something else."""
    from reprokit.render import texts, verify

    begin = verify.CleanProcesses.begin_file

    def begin_few(self: Any, script: Path, times: int, *seconds: float) -> Any:
        return begin(self, script, 4 if times == texts.TIMES else times, *seconds)

    patch.setattr(verify.CleanProcesses, "begin_file", begin_few)


@pytest.fixture
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_few_times`."""
    run_few_times(monkeypatch)


@functools.cache
def environment_text(collect: Callable[[float], str]) -> Callable[[float], str]:
    """`_collect_env_text` of `reprokit.snapshot.environment`, which takes a quarter of a second, called once."""
    return functools.cache(collect)


@pytest.fixture(autouse=True)
def described_in_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system is asked once about the environment; `test_environment` asks whenever it collects one."""
    environment = sys.modules.get("reprokit.snapshot.environment")
    if environment is not None:
        monkeypatch.setattr(environment, "_collect_env_text", environment_text(environment._collect_env_text))


@pytest.fixture
def run_python(tmp_path: Path) -> Run:
    """Run ``python *words`` in the test's own folder, in a process that finds torch imported."""
    return functools.partial(run_python_in, tmp_path)


@pytest.fixture
def start_python(tmp_path: Path) -> Run:
    """`run_python` with a start of Python: for what depends on it (`processes`)."""
    return functools.partial(start_python_in, tmp_path)


@pytest.fixture
def run_reprokit(run_python: Run) -> Run:
    """Run ``reprokit *words`` in the test's own folder."""
    return functools.partial(run_python, "-m", "reprokit")


@pytest.fixture
def start_reprokit(start_python: Run) -> Run:
    """`run_reprokit` with a start of Python."""
    return functools.partial(start_python, "-m", "reprokit")
