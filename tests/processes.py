"""Python processes that share one start of torch: a server that has imported it forks for each.

A forked process has its own arguments, folder, environment, streams, `__main__`, exit code and session. It starts in
milliseconds; a start of Python with `import torch` and its end take two to four seconds. It does not have a start and
an end of Python: the order of imports, options of the interpreter, variables that are read once, a new seed for
hashes, the teardown of modules. Tests that depend on these start Python. This file is client and server: it is the
server where it runs as a program.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

IS_POSSIBLE = hasattr(os, "fork") and hasattr(os, "pidfd_open")
MODULES = ("torch", "torch._dynamo", "click", "git", "jinja2", "rich.live")  # the first optimizer imports the second
READ_ONCE = ("PYTHON", "LD_", "OMP_", "KMP_", "MKL_", "TORCH_LOGS", "TORCHDYNAMO_")  # when Python or torch starts
_PIECE = 1 << 16


# -- the tests' side --------------------------------------------------------------------------------------------------


class Server:
    """A process that has imported some modules, as the tests see it. It ends with the process that started it."""

    def __init__(self, modules: tuple[str, ...], environment: dict[str, str]) -> None:
        self._read_once = _read_once(environment)
        self._socket, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno()), *modules],
                env={name: value for name, value in environment.items() if name != "PYTHONPATH"},
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        """End the server and what it has forked."""
        self._socket.close()
        self._process.wait()

    def run(
        self, words: tuple[str, ...], folder: Path, environment: dict[str, str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python *words`` in a forked process, where words are ``FILE ...``, ``-c CODE ...`` or ``-m NAME ...``.

        Raises `subprocess.TimeoutExpired` as `subprocess.run` does; the process and its group are killed.
        """
        assert _read_once(environment) == self._read_once, "a forked process cannot read these variables again"
        request = json.dumps({"words": words, "folder": str(folder), "environment": environment})
        ends = [os.pipe() for _ in range(3)]
        try:
            socket.send_fds(self._socket, [request.encode() + b"\n"], [write for _, write in ends])
        finally:
            for _, write in ends:
                os.close(write)
        try:
            stdout, stderr, code = _read_all([read for read, _ in ends], time.monotonic() + seconds)
        except TimeoutError:
            raise subprocess.TimeoutExpired(words, seconds) from None
        finally:  # the server kills a process whose exit code nobody can read
            for read, _ in ends:
                os.close(read)
        assert code, f"the server of forked processes has ended: {self._process.poll()}"
        return subprocess.CompletedProcess(["python", *words], int(code), stdout, stderr)


def _read_once(environment: dict[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in environment if name.startswith(READ_ONCE) and name != "PYTHONPATH"}


def _read_all(descriptors: list[int], deadline: float) -> list[str]:
    """What comes out of all of them until their ends."""
    found = {descriptor: bytearray() for descriptor in descriptors}
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    num_open = len(descriptors)
    while num_open:
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            raise TimeoutError
        for descriptor, _ in ready:
            piece = os.read(descriptor, _PIECE)
            found[descriptor] += piece
            if not piece:
                poll.unregister(descriptor)
                num_open -= 1
    return [text.decode().replace("\r\n", "\n") for text in found.values()]


# -- the server's side ------------------------------------------------------------------------------------------------


class Forks:
    """The server's loop. Each process is known by a descriptor that is readable once it has ended."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._running: dict[int, tuple[int, int]] = {}
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def serve(self) -> dict[str, Any] | None:
        """Fork for every request. Returns a request in the process that is to carry it out, at the end ``None``."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._connection.fileno():
                    request, descriptors = self._receive()
                    if request is None:
                        self._kill(*(process for process, _ in self._running.values()))
                        return None
                    if self._fork(descriptors):
                        return request
                elif descriptor in self._running:
                    self._finish(descriptor)
                else:  # of a process that ends now, or one whose end nobody waits for
                    self._poll.unregister(descriptor)
                    self._kill(*(process for process, status in self._running.values() if status == descriptor))

    def _receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        text, descriptors, _, _ = socket.recv_fds(self._connection, _PIECE, 3)
        while text and not text.endswith(b"\n"):
            text += self._connection.recv(_PIECE)
        return (json.loads(text) if text else None), descriptors

    def _fork(self, descriptors: list[int]) -> bool:
        """Whether this is the new process, which has its own streams and session, and nothing of the server's."""
        child = os.fork()
        *streams, status = descriptors
        if child:
            watched = os.pidfd_open(child)
            self._running[watched] = child, status
            self._poll.register(watched, select.POLLIN)
            self._poll.register(status, 0)  # an error once the reading end is closed
        else:
            os.setsid()
            for target, stream in enumerate(streams, 1):
                os.dup2(stream, target)
            self._connection.close()
            for descriptor in (*descriptors, *self._running, *(status for _, status in self._running.values())):
                os.close(descriptor)
        for stream in streams if child else ():
            os.close(stream)
        return not child

    def _finish(self, watched: int) -> None:
        child, status = self._running.pop(watched)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(KeyError):
            self._poll.unregister(status)
        self._poll.unregister(watched)
        with contextlib.suppress(BrokenPipeError):
            os.write(status, str(code).encode())
        os.close(status)
        os.close(watched)

    def _kill(self, *processes: int) -> None:
        for process in processes:
            for kill in (os.killpg, os.kill):  # it may not lead its group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(process, signal.SIGKILL)


def become(words: list[str], folder: str, environment: dict[str, str]) -> None:
    """Take on what a process is started with, but for its streams."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv = [sys.executable, *words]
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    sys.path[:0] = [os.path.abspath(entry) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.modules["multiprocessing.process"].ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    if "numpy" in sys.modules:  # Python seeds its own in a forked process
        sys.modules["numpy"].random.seed()  # type: ignore[attr-defined]


def execute(words: list[str]) -> None:
    """Do what Python does with the words of its command line."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins)
    first, *rest = words
    if first == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.realpath(first)))
        file = os.path.abspath(first)
        main.__dict__.update(__file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))
        with open(first, "rb") as source:
            exec(compile(source.read(), file, "exec"), main.__dict__)


def outcome(words: list[str]) -> int:
    """The exit code of a command; an exception is printed as Python prints it."""
    try:
        execute(words)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(code: int) -> NoReturn:
    """End as Python does, but for the teardown of modules, which takes as long as `import torch`."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def main(descriptor: int, modules: list[str]) -> None:
    """Import the modules, then fork on request."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.pop(0)  # this file's folder
    for module in modules:
        importlib.import_module(module)
    request = Forks(socket.socket(fileno=descriptor)).serve()
    if request is None:
        os._exit(0)  # the teardown of torch takes seconds
    become(**request)
    end(outcome(request["words"]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
