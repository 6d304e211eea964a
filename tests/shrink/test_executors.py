"""Executors of the command line: a wrong one is an error before anything is written; a right one changes no result."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reprokit.cli import main
from reprokit.shrink import spec as executors
from reprokit.snapshot.format import save
from tests.conftest import server
from tests.processes import IS_POSSIBLE, MODULES
from tests.shrink import failing
from tests.shrink.test_isolation import needs_fork

needs_dask = pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="`distributed` is absent")
without_warnings = pytest.mark.filterwarnings("default")  # Dask's own, about sockets and loops
SECONDS_TO_START = 120.0


def on_a_cluster(test: Callable[..., None]) -> Callable[..., None]:
    """A test with a local Dask cluster."""
    return needs_dask(needs_fork(without_warnings(pytest.mark.slow(test))))


def shrink_through(executor: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Ask for an executor that cannot be used; stderr of the command, which writes nothing."""
    save(failing.zero_by_zero(), folder / "a.pt")
    assert main(["shrink", str(folder / "a.pt"), "-o", str(folder / "out"), "--executor", executor]) == 2
    assert not (folder / "out").exists()
    said = capsys.readouterr().err
    assert said.count("error:") == said.count("hint:") == 1
    return said


@pytest.mark.parametrize("word", ["", "ray", "dask", "dask://", "dask://host", "dask://host:x", "slurm"])
def test_an_unknown_word(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = shrink_through(word, tmp_path, capsys)
    assert f"`{word}` is not an executor" in said and executors.EXECUTORS in said


@pytest.mark.parametrize(("executor", "package"), [("dask://host:1", "distributed"), ("mpi", "mpi4py")])
def test_a_missing_package(
    executor: str,
    package: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = shrink_through(executor, tmp_path, capsys)
    assert f"the executor needs `{package}`" in said and f"pip install {package}" in said


@needs_dask
@without_warnings
def test_a_wrong_address(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_SECONDS_TO_CONNECT", 1.0)
    address = f"127.0.0.1:{free_port()}"
    assert f"no Dask scheduler at `tcp://{address}`" in shrink_through(f"dask://{address}", tmp_path, capsys)


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def cluster(num_workers: int = 2) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A Dask scheduler with workers, in processes of their own, as documentation starts them; address and scheduler."""
    port = str(free_port())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    scheduler = ["distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", port, "--no-dashboard"]
    worker = ["distributed.cli.dask_worker", f"tcp://127.0.0.1:{port}", "--nthreads", "1", "--no-dashboard"]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for arguments in [scheduler, *[[*worker, "--no-nanny"]] * num_workers]:
            command = [server(*MODULES).python if IS_POSSIBLE else sys.executable, "-m", *arguments]
            started.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
        wait_for_workers(f"tcp://127.0.0.1:{port}", num_workers)
        yield f"127.0.0.1:{port}", started[0]
    finally:
        for process in started:
            process.kill()
            process.wait()


def wait_for_workers(address: str, num_workers: int) -> None:
    """Wait until that many have come."""
    from distributed import Client

    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline:
        try:
            with Client(address, timeout=SECONDS_TO_START, set_as_default=False) as client:
                client.wait_for_workers(num_workers, timeout=SECONDS_TO_START)
                return
        except OSError:  # no scheduler yet
            time.sleep(0.2)
    pytest.fail("no cluster has started")


@on_a_cluster
def test_the_command_writes_the_same_repro_through_dask(tmp_path: Path) -> None:
    save(failing.masked_softmax(), tmp_path / "a.pt")
    written = []
    with cluster() as (address, _):
        for name, options in [("here", []), ("there", ["--executor", f"dask://{address}"])]:
            assert main(["shrink", str(tmp_path / "a.pt"), "-o", str(tmp_path / name), *options]) == 0
            written.append((tmp_path / name / "repro.py").read_text())
    assert written[0] == written[1]
    ended = subprocess.run([sys.executable, str(tmp_path / "there" / "repro.py")], capture_output=True, check=False)
    assert ended.returncode == 1
