"""A server of clean processes; started as a program in a clean interpreter, never imported.

It loads torch once and forks for every run, because a fresh `import torch` costs seconds. It never runs a script
itself, and nothing of reprokit can be imported in it or in its children. The forkserver of `multiprocessing` would not
do: its children import the caller's `__main__` and with it reprokit, and it starts in the caller's environment.

Argument: the folder that holds torch. A line of JSON on stdin is a script to run (`Job`), the end of stdin ends the
server. Each run gets a new folder with copies of the script's files and is reported as one line of JSON, in the order
in which runs end.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from dataclasses import dataclass

THREADS = "/proc/self/task"
MODULES = "modules"
FAILED = 70


@dataclass(frozen=True)
class Job:
    """A script (the first of ``files``) to run ``times`` times, each for at most so many seconds.

    The first ``num_fresh`` runs are new interpreters, started by the command ``fresh``; the others are forked.
    """

    number: int
    files: list[str]
    times: int
    at_once: int
    seconds: float
    num_fresh: int
    fresh: list[str]


class Server:
    """Runs one job after another until stdin ends, and then ends what still runs."""

    def __init__(self) -> None:
        self._data = b""  # what was read of stdin
        self._running: dict[int, tuple[str, float]] = {}  # the folder and the deadline of each child
        self._num_threads = num_threads()

    def serve(self) -> None:
        """Run jobs; raises `SystemExit` at the end of stdin."""
        try:
            while True:
                self._read(None)
                while b"\n" in self._data:
                    line, _, self._data = self._data.partition(b"\n")
                    self._serve(Job(**json.loads(line)))
        finally:
            for child, (folder, _) in self._running.items():
                for end in (os.killpg, os.kill):  # it may not have got round to leading a group
                    with contextlib.suppress(ProcessLookupError):
                        end(child, signal.SIGKILL)
                os.waitpid(child, 0)
                shutil.rmtree(folder, ignore_errors=True)

    def _read(self, seconds: float | None) -> None:
        """Read stdin, waiting at most so many seconds."""
        if select.select([0], [], [], seconds)[0]:
            piece = os.read(0, 1 << 16)
            if not piece:
                raise SystemExit
            self._data += piece

    def _serve(self, job: Job) -> None:
        num_started = 0
        while num_started < job.times or self._running:
            while num_started < job.times and len(self._running) < job.at_once:
                folder = prepare(job.files)
                is_fresh = num_started < job.num_fresh or num_threads() > self._num_threads
                child = start(folder, os.path.basename(job.files[0]), job.fresh if is_fresh else [])
                self._running[child] = folder, time.monotonic() + job.seconds
                num_started += 1
            self._finish(job)
            self._read(0.002)

    def _finish(self, job: Job) -> None:
        """Report every child that ended or took too long."""
        for child, (folder, deadline) in list(self._running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            timed_out = not ended and time.monotonic() > deadline
            if timed_out:
                os.killpg(child, signal.SIGKILL)
                status = os.waitpid(child, 0)[1]
            if ended or timed_out:
                del self._running[child]
                load(modules_of(folder))
                report(job.number, folder, None if timed_out else os.waitstatus_to_exitcode(status))


def main(torch_folder: str) -> None:
    sys.modules["reprokit"] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
    if torch_folder not in sys.path:
        sys.path.append(torch_folder)
    load(["torch"])
    Server().serve()


def load(modules: list[str]) -> None:
    """Import what runs would import, each for itself."""
    for module in modules:
        with contextlib.suppress(Exception):  # the script then says so itself
            importlib.import_module(module)


def num_threads() -> int:
    """Threads of this process. A child forked beside more of them than torch comes with would not be clean."""
    return len(os.listdir(THREADS)) if os.path.isdir(THREADS) else threading.active_count()


def prepare(files: list[str]) -> str:
    """A new folder whose subfolder ``work`` has copies of the files and nothing else."""
    folder = tempfile.mkdtemp(prefix="reprokit-")
    os.mkdir(os.path.join(folder, "work"))
    for path in files:
        shutil.copy(path, os.path.join(folder, "work"))
    return folder


def start(folder: str, name: str, fresh: list[str]) -> int:
    """Fork a child that becomes the script, or the new interpreter that runs it; its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = FAILED
    try:
        become(folder, name)
        if fresh:
            os.execv(fresh[0], fresh)
        before = set(sys.modules)
        code = run(name)
        tell_modules(folder, before)
        end()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def become(folder: str, name: str) -> None:
    """Leave the parent behind: own session, folder, streams, arguments and random numbers."""
    os.setsid()
    atexit._clear()  # of torch's own, which takes longer than a run
    os.chdir(os.path.join(folder, "work"))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for target, stream in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(os.path.join(folder, stream), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, target)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = os.fdopen(1, "w", encoding="utf-8"), os.fdopen(2, "w", encoding="utf-8")
    sys.argv = [name]
    for module, generator in (("torch", "default_generator"), ("numpy", "random")):  # Python seeds its own in a child
        if module in sys.modules:
            getattr(sys.modules[module], generator).seed()


def run(name: str) -> int:
    """Execute the script as ``__main__``; its exit code."""
    module = types.ModuleType("__main__")
    module.__file__ = os.path.abspath(name)
    sys.modules["__main__"] = module
    try:
        with open(name, encoding="utf-8") as file:
            exec(compile(file.read(), name, "exec"), module.__dict__)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return (stop.code or 0) & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        own_frame = error.__traceback__
        traceback.print_exception(error.with_traceback(own_frame.tb_next if own_frame is not None else None))
        return 1
    return 0


def end() -> None:
    """Wait for the script's threads and call its ``atexit`` functions, as Python does at exit."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def tell_modules(folder: str, before: set[str]) -> None:
    """Leave the names of torch's own modules that a run has loaded, for `modules_of`."""
    found = [name for name in sys.modules if name not in before and name.startswith("torch.")]
    with open(os.path.join(folder, MODULES), "w", encoding="utf-8") as file:
        json.dump(found, file)


def modules_of(folder: str) -> list[str]:
    """The modules that a run has loaded; none where it did not come to its end."""
    try:
        with open(os.path.join(folder, MODULES), encoding="utf-8") as file:
            return [name for name in json.load(file) if name.startswith("torch.")]
    except (OSError, ValueError):
        return []


def report(number: int, folder: str, exit_code: int | None) -> None:
    """Print exit code, stdout and stderr of a run as JSON, and remove its folder."""
    said: dict[str, object] = {"job": number, "exit_code": exit_code, "folder": os.path.join(folder, "work")}
    for stream in ("stdout", "stderr"):
        try:
            with open(os.path.join(folder, stream), encoding="utf-8", errors="replace") as file:
                said[stream] = file.read(1_000_000)
        except OSError:
            said[stream] = ""
    shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(BaseException):  # the end of stdin, or nobody to report to
        main(sys.argv[1])
    os._exit(0)  # taking torch down takes longer than a run
