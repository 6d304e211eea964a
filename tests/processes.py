"""Python processes that share one start of torch and reprokit: a server that has imported them forks for each.

A forked process has its own arguments, folder, environment, streams, `__main__`, exit code and session. It starts in
milliseconds; a start of Python with `import torch` and its end take two to four seconds. It does not have a start and
an end of Python: the order of imports, options of the interpreter, variables that are read once, a new seed for
hashes, the teardown of modules. Tests that depend on these start Python. The server describes the environment once for
all of them. This file is client and server: it is the server where it runs as a program.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

IS_POSSIBLE = hasattr(os, "fork") and hasattr(os, "pidfd_open")
MODULES = (
    *("torch", "torch._dynamo", "click", "git", "jinja2", "rich.live"),  # the first optimizer imports the second
    *("torch.distributed.launcher", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    *("reprokit.cli", "reprokit.capture.session", "reprokit.render.texts", "reprokit.shrink.reducer"),
)
READ_ONCE = ("PYTHON", "LD_", "OMP_", "KMP_", "MKL_", "TORCH_LOGS", "TORCHDYNAMO_")  # when Python or torch starts
ISOLATED = ["-I", "-X", "utf8"]
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
UNLIKE = b"unlike"  # the answer to a request with other variables that are read once
_PIECE = 1 << 16


# -- the tests' side --------------------------------------------------------------------------------------------------


class Server:
    """A process that has imported some modules, as the tests see it. It ends with the process that started it.

    ``python`` is a file that can be called in place of Python: it forks where that is possible.
    """

    def __init__(self, modules: tuple[str, ...], environment: dict[str, str]) -> None:
        self._environment = environment
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        path = os.path.join(self._folder.name, "socket")
        self.python = os.path.join(self._folder.name, "python")
        with open(self.python, "w", encoding="utf-8") as file:
            words = shlex.join([sys.executable, "-I", "-S", __file__, "call", path, sys.executable])
            file.write(f'#!/bin/sh\nexec {words} "$@"\n')
        os.chmod(self.python, 0o700)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()
            self._process = subprocess.Popen(
                [sys.executable, __file__, "serve", str(listening.fileno()), self.python, *modules],
                env={name: value for name, value in environment.items() if name != "PYTHONPATH"},
                stdin=subprocess.PIPE,
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        """End the server and what it has forked."""
        self._process.communicate()
        self._folder.cleanup()

    def run(
        self, words: tuple[str, ...], folder: Path, environment: dict[str, str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python *words`` in a forked process, where words are ``FILE ...``, ``-c CODE ...`` or ``-m NAME ...``.

        Raises `subprocess.TimeoutExpired` as `subprocess.run` does; the process and its group are killed.
        """
        assert _read_once(environment) == _read_once(self._environment), "a forked process cannot read these again"
        ends = [os.pipe() for _ in range(2)]
        with contextlib.ExitStack() as stack:
            for read, _ in ends:
                stack.callback(os.close, read)
            try:
                nothing = os.open(os.devnull, os.O_RDONLY)
                streams = [nothing, *(write for _, write in ends)]
                path = os.path.join(self._folder.name, "socket")
                connection = stack.enter_context(ask(path, list(words), str(folder), environment, streams))
            finally:
                for descriptor in (nothing, *(write for _, write in ends)):
                    os.close(descriptor)
            try:
                read = [read for read, _ in ends]
                stdout, stderr, code = _read_all([*read, connection.fileno()], time.monotonic() + seconds)
            except TimeoutError:
                raise subprocess.TimeoutExpired(words, seconds) from None
        assert code, f"the server of forked processes has ended: {self._process.poll()}"
        return subprocess.CompletedProcess(["python", *words], int(code), stdout, stderr)


def ask(
    path: str, words: list[str], folder: str, environment: dict[str, str], streams: list[int], **options: bool
) -> socket.socket:
    """Ask for a process. The connection gives its exit code, takes signals for it, and kills it when it is closed."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = {"words": words, "folder": folder, "environment": environment, **options}
    text = json.dumps(request).encode() + b"\n"
    sent = socket.send_fds(connection, [text], streams)
    connection.sendall(text[sent:])
    return connection


def call(path: str, python: str, words: list[str]) -> NoReturn:
    """Stand in for Python. What a fork cannot give (its options, say) is given by Python itself."""
    isolated, unbuffered = words[:3] == ISOLATED, words[:1] == ["-u"]
    command = words[3 if isolated else int(unbuffered) :]
    if not command or (command[0].startswith("-") and command[0] not in ("-c", "-m")):
        os.execv(python, [python, *words])
    connection = ask(path, command, os.getcwd(), dict(os.environ), [0, 1, 2], isolated=isolated, unbuffered=unbuffered)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: connection.sendall(bytes([number])))
    code = b""
    while piece := connection.recv(_PIECE):
        code += piece
    if code == UNLIKE:
        os.execv(python, [python, *words])
    if int(code or 1) < 0:
        if int(code) != -signal.SIGKILL:  # which has no handler
            signal.signal(-int(code), signal.SIG_DFL)
        os.kill(os.getpid(), -int(code))
    os._exit(int(code or 1) & 0xFF)


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

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._read_once = _read_once(dict(os.environ))
        self._running: dict[int, tuple[int, socket.socket]] = {}
        self._connections: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(listening, select.POLLIN)
        self._poll.register(0, select.POLLIN)

    def serve(self) -> dict[str, Any] | None:
        """Fork for every request. Returns a request in the process that is to carry it out, at the end ``None``."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == 0:
                    for process, _ in self._running.values():
                        _signal(process, signal.SIGKILL)
                    return None
                if descriptor == self._listening.fileno():
                    request = self._answer(self._listening.accept()[0])
                    if request is not None:
                        return request
                elif descriptor in self._running:
                    self._finish(descriptor)
                elif descriptor in self._connections:
                    self._pass_on(descriptor)

    def _answer(self, connection: socket.socket) -> dict[str, Any] | None:
        """Fork for a request; it is returned in the new process only."""
        text, streams, _, _ = socket.recv_fds(connection, _PIECE, 3)
        while text and not text.endswith(b"\n"):
            text += connection.recv(_PIECE)
        request = json.loads(text)
        child = None
        if _read_once(request["environment"]) | self._read_once != self._read_once:
            connection.sendall(UNLIKE)
            connection.close()
        else:
            child = os.fork()
        if child == 0:
            self._leave(connection, streams)
            return request
        for stream in streams:
            os.close(stream)
        if child is not None:
            watched = os.pidfd_open(child)
            self._running[watched] = child, connection
            self._connections[connection.fileno()] = child
            self._poll.register(watched, select.POLLIN)
            self._poll.register(connection, select.POLLIN)
        return None

    def _leave(self, connection: socket.socket, streams: list[int]) -> None:
        """Have a session and streams of one's own, and nothing of the server's."""
        os.setsid()
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        connection.close()
        self._listening.close()
        for watched, (_, other) in self._running.items():
            os.close(watched)
            other.close()

    def _finish(self, watched: int) -> None:
        """Tell the exit code of a process that has ended."""
        child, connection = self._running.pop(watched)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self._poll.unregister(watched)
        os.close(watched)
        if self._connections.pop(connection.fileno(), None) is not None:
            self._poll.unregister(connection)
        with contextlib.suppress(OSError):
            connection.sendall(str(code).encode())
        connection.close()

    def _pass_on(self, descriptor: int) -> None:
        """Send a process the signals that came for it, or end it when nobody waits for it any more."""
        child = self._connections[descriptor]
        (connection,) = (known for _, known in self._running.values() if known.fileno() == descriptor)
        numbers = connection.recv(_PIECE)
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        if not numbers:
            self._poll.unregister(connection)
            del self._connections[descriptor]
            _signal(child, signal.SIGKILL)


def _signal(process: int, number: int) -> None:
    for kill in (os.killpg, os.kill):  # it may not lead its group yet
        with contextlib.suppress(ProcessLookupError):
            kill(process, number)


def become(
    python: str,
    words: list[str],
    folder: str,
    environment: dict[str, str],
    isolated: bool = False,
    unbuffered: bool = False,
) -> None:
    """Take on what a process is started with, but for its streams."""
    for stream in (sys.stdout, sys.stderr) if unbuffered else ():
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv = [sys.executable, *words]
    sys.executable = python
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    entries = [] if isolated else environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [os.path.abspath(entry) for entry in entries if entry]
    sys.modules["multiprocessing.process"].ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    if "numpy" in sys.modules:  # Python seeds its own in a forked process
        sys.modules["numpy"].random.seed()  # type: ignore[attr-defined]


def execute(words: list[str], isolated: bool) -> None:
    """Do what Python does with the words of its command line."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins)
    first, *rest = words
    if first == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path[:0] = [] if isolated else [os.getcwd()]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[:0] = [] if isolated else [""]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        sys.path[:0] = [] if isolated else [os.path.dirname(os.path.realpath(first))]
        file = os.path.abspath(first)
        main.__dict__.update(__file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))
        with open(first, "rb") as source:
            exec(compile(source.read(), file, "exec"), main.__dict__)


def outcome(words: list[str], isolated: bool) -> int:
    """The exit code of a command; an exception is printed as Python prints it."""
    try:
        execute(words, isolated)
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


def keep_text(environment: types.ModuleType) -> None:
    """Ask the system about the environment now, which takes a quarter of a second, and never again."""
    text = environment._collect_env_text(environment.COLLECT_SECONDS)
    environment._collect_env_text = lambda timeout: text  # type: ignore[attr-defined]


def serve(descriptor: int, python: str, modules: list[str]) -> None:
    """Import the modules, then fork on request."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[0] = ROOT
    for module in modules:
        importlib.import_module(module)
    sys.path.pop(0)
    if "reprokit.snapshot.environment" in sys.modules:
        keep_text(sys.modules["reprokit.snapshot.environment"])
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy the pages of all that is imported
    request = Forks(socket.socket(fileno=descriptor)).serve()
    if request is None:
        os._exit(0)  # the teardown of torch takes seconds
    become(python, **request)
    end(outcome(request["words"], request.get("isolated", False)))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        call(sys.argv[2], sys.argv[3], sys.argv[4:])
