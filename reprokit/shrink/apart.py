"""A candidate in a process of its own, so that crashes, hangs and floods of memory end with that process.

Forked where the system allows it: a forked child starts in a few milliseconds and shares all tensors until it writes.
Else spawned, as with CUDA: a new interpreter, which takes as long as importing torch and is used until a candidate ends
it. Not by `multiprocessing`: its spawned processes import the caller's `__main__`, so that a training script without a
guard would run again, and it starts none in a daemonic process such as a worker of Dask.

Candidates travel as plain data and tensors that a restricted unpickler accepts, reports as plain data and reprokit's
own classes. So a candidate that got hold of its process cannot make this one execute anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import io
import json
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeAlias

import torch

from reprokit.errors import ReprokitError
from reprokit.locate.failure import Failure
from reprokit.program import plain
from reprokit.program.dataflow import raw_bytes
from reprokit.program.interpreter import Settings, determinism
from reprokit.program.ir import Program
from reprokit.program.step import Step
from reprokit.snapshot.format import storable

Observation: TypeAlias = Failure | None
Observe: TypeAlias = Callable[..., Observation]  # of a step, and of the name of a way to run it where it has one


class NotObserved(ReprokitError):
    """A candidate ended without an observation. ``reason``: ``crash``, ``time``, ``memory`` or ``error``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Report:
    """What came back from one candidate: an observation or an error."""

    observation: Observation = None
    error: Exception | None = None

    def value(self) -> Observation:
        """The observation; raises the error."""
        if self.error is not None:
            raise self.error
        return self.observation

    @property
    def took_its_process_down(self) -> bool:
        """True if the candidate would have ended or stopped the reduction, had it run in this process."""
        return isinstance(self.error, NotObserved) and self.error.reason != "error"


@dataclass(frozen=True)
class Task:
    """How candidates are observed: the same settings and the same state of the generator in every process.

    ``observe`` has to be importable by name (a function of a module or an object that pickles) where candidates run in
    spawned children or through an executor.
    """

    observe: Observe
    settings: Settings = Settings()
    rng: bytes = b""

    @classmethod
    def of(cls, observe: Observe, settings: Settings) -> Task:
        """A task with this process's number of threads, where none was recorded, and its generator."""
        rng = raw_bytes(torch.get_rng_state())
        return cls(observe, replace(settings, num_threads=settings.num_threads or torch.get_num_threads()), rng)

    def __call__(self, candidate: Step, way: str = "") -> Observation:
        """Observe one candidate; the settings and the generator are given back."""
        before = torch.get_rng_state()
        try:
            with determinism(self.settings):
                if self.rng:
                    torch.set_rng_state(torch.frombuffer(bytearray(self.rng), dtype=torch.uint8))
                return self.observe(candidate, way) if way else self.observe(candidate)
        finally:
            torch.set_rng_state(before)

    def report(self, candidate: Step, way: str = "") -> Report:
        """The report on one candidate that is run right here."""
        try:
            return Report(self(candidate, way))
        except Exception as error:  # whatever a candidate raises outside its calls makes it unusable, nothing more
            return Report(error=error)


def pack(candidate: Step, way: str = "") -> bytes:
    """A candidate as bytes. A tensor that is several inputs stays one."""
    tensors = {item.value: candidate.tensors[item.value] for item in candidate.program.inputs}
    sent = {id(tensor): _sendable(tensor) for tensor in tensors.values()}
    content = {
        "program": plain.to_plain(candidate.program),
        "way": way,
        "tensors": {value: sent[id(tensor)] for value, tensor in tensors.items()},
    }
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def unpack(packed: bytes) -> tuple[Step, str]:
    """The inverse of `pack`; raises whatever damaged data raises."""
    content = torch.load(io.BytesIO(packed), weights_only=True)
    return Step(plain.from_plain(content["program"]), content["tensors"]), str(content["way"])


def pack_report(report: Report) -> bytes:
    """A report as bytes; an observation that does not pickle becomes an error."""
    reason, message = "", ""
    if report.error is not None:
        reason = report.error.reason if isinstance(report.error, NotObserved) else "error"
        message = str(report.error) if reason != "error" else f"{type(report.error).__name__}: {report.error}"
    try:
        return pickle.dumps((report.observation, reason, message))
    except Exception as error:  # pickling fails in as many ways as there are classes
        return pickle.dumps((None, "error", f"the observation cannot be sent: {error}"))


def unpack_report(packed: bytes) -> Report:
    """The inverse of `pack_report`; anything else becomes an error."""
    try:
        observation, reason, message = _PlainUnpickler(io.BytesIO(packed)).load()
    except Exception as error:  # damaged data fails in as many ways
        return Report(error=NotObserved("error", f"the report cannot be read: {error}"))
    return Report(error=NotObserved(reason, message)) if reason else Report(observation)


class _PlainUnpickler(pickle.Unpickler):
    """Knows no classes but reprokit's own that hold data."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "reprokit":
            found = super().find_class(module, name)
            if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, Enum)):
                return found
        raise pickle.UnpicklingError(f"`{module}.{name}` is not plain data")


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """With storage of its own, on the device where it is."""
    return storable(tensor) if tensor.device.type == "cpu" else tensor.detach()


_LEAST_SECONDS = 10.0
_TIMES_FIRST = 10
_LEAST_BYTES = 1 << 30
_TIMES_PEAK = 2
_SECONDS_BETWEEN_LOOKS = 0.05
_PR_SET_PDEATHSIG = 1
_TRIAL_SECONDS = 20.0
_SECONDS_TO_START = 300.0
_SECONDS_TO_WARM_UP = 60.0  # a first candidate on a GPU also loads its kernels
_READY = b"ready"
_SERVE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from reprokit.shrink.apart import serve
serve(int(sys.argv[2]), int(sys.argv[3]))
"""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """``seconds`` for a whole run, ``memory`` in bytes on top of what the process has when a run starts; ``None``: no
    limit."""

    seconds: float | None = None
    memory: int | None = None

    @classmethod
    def after(cls, seconds: float) -> RunLimits:
        """The limits after a first run that took so long and, at its peak, as much memory as the system remembers."""
        return cls(max(_LEAST_SECONDS, _TIMES_FIRST * seconds), max(_LEAST_BYTES, _TIMES_PEAK * peak_bytes()))

    def times(self, runs: int) -> RunLimits:
        """The limits for so many runs in a row."""
        return self if self.seconds is None else RunLimits(runs * self.seconds, self.memory)


def peak_bytes() -> int:
    """The most memory that this process, or any child that has ended, ever held."""
    if sys.platform == "win32":
        return 0
    import resource

    peaks = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(peaks) * (1 if sys.platform == "darwin" else 1024)


def resident_bytes(pid: int) -> int:
    """The memory that a process holds; 0 where the system does not tell, or for a process that has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


class Child:
    """A process that observes candidates one after another; a forked one observes a single candidate.

    ``report`` is ``None`` until the latest candidate has come to an end, one way or another; ``seconds`` is what that
    took. `close` kills the process and all that it started.
    """

    def __init__(self, task: Task, *, is_forked: bool) -> None:
        self.report: Report | None = Report()
        self.seconds = 0.0
        self._task = task
        self._is_forked = is_forked
        self._is_ready = self._is_warm = False
        self._pid = 0
        self._exit_code: int | None = None

    def open(self) -> None:
        """Spawn the process if there is none; it loads torch while this one goes on."""
        if self._is_forked or self._pid:
            return
        try:
            task = pickle.dumps(self._task)
        except Exception as error:  # pickling fails in as many ways as there are classes
            raise ReprokitError(
                "the check cannot be sent to another process", hint="use a function of a module", note=str(error)
            ) from error
        self.connection, theirs = Pipe()
        os.set_inheritable(theirs.fileno(), True)
        arguments = [sys.executable, "-c", _SERVE, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
        quiet = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0), (os.POSIX_SPAWN_DUP2, 0, 1)]
        with _uninterrupted():
            self._pid = os.posix_spawn(sys.executable, arguments, os.environ, file_actions=quiet, setpgroup=0)
            theirs.close()
        with contextlib.suppress(OSError):  # a process that ends at once is noticed when it has to be ready
            self.connection.send_bytes(task)

    def start(self, candidate: Step, limits: RunLimits, way: str = "") -> None:
        """Start a candidate; first comes the end of one that nobody waited for."""
        wait_for(self, [self])
        self.settle()
        self._limits = limits
        if self._is_forked:
            self._fork(candidate, way)
        else:
            self._get_ready()
            is_on_gpu = any(tensor.device.type != "cpu" for tensor in candidate.tensors.values())
            if is_on_gpu and not self._is_warm and limits.seconds is not None:
                self._limits = RunLimits(limits.seconds + _SECONDS_TO_WARM_UP, limits.memory)
        self._allowed = None if limits.memory is None else resident_bytes(self._pid) + limits.memory
        self._started = time.monotonic()
        self.report = None
        if self._is_forked:
            return
        try:
            self.connection.send_bytes(pack(candidate, way))
        except OSError:  # it has ended
            self.read()
        except Exception as error:  # not every tensor can be stored
            self.report = Report(error=error)

    def read(self) -> None:
        """Take the report that has arrived, or notice that there will be none."""
        try:
            self._finish(unpack_report(self.connection.recv_bytes()))
        except (EOFError, OSError):
            self._finish(Report(error=NotObserved("crash", f"the candidate ended its process ({self._end()})")))

    def enforce(self) -> None:
        """End a run that has taken too much."""
        if self._limits.seconds is not None and time.monotonic() - self._started > self._limits.seconds:
            self._end()
            message = f"the candidate took more than {self._limits.seconds:.0f} s"
            self._finish(Report(error=NotObserved("time", message)))
        elif self._allowed is not None and resident_bytes(self._pid) > self._allowed:
            self._end()
            message = f"the candidate took more than {self._limits.memory:,} bytes"
            self._finish(Report(error=NotObserved("memory", message)))

    def settle(self) -> None:
        """After a run: end a process that cannot be used again."""
        if self._is_forked or (self.report is not None and self.report.took_its_process_down):
            self.close()

    def close(self) -> None:
        """End the process; a later `start` makes another one."""
        if self._pid:
            with _uninterrupted():
                self._end()
                self.connection.close()
                self._pid, self._exit_code = 0, None
                self._is_ready = self._is_warm = False
                self.report = self.report or Report()

    def _fork(self, candidate: Step, way: str) -> None:
        self.connection, theirs = Pipe(duplex=False)
        parent = os.getpid()
        try:
            with _uninterrupted(), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # about threads, of which torch always has some
                child = os.fork()
                if child == 0:
                    _live(self._task, candidate, way, theirs, parent)
                _lead_group(child)
                self._pid = child
        finally:
            theirs.close()

    def _get_ready(self) -> None:
        self.open()
        if self._is_ready:
            return
        said = b"it took too long"
        try:
            if self.connection.poll(_SECONDS_TO_START):
                said = self.connection.recv_bytes()
        except (EOFError, OSError):
            said = b"it ended at once"
        if said != _READY:
            self.close()
            raise ReprokitError("no process can be started for candidates", note=said.decode(errors="replace"))
        self._is_ready = True

    def _end(self) -> str:
        """Kill the process with all that it started; how it ended."""
        if self._exit_code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
            try:
                self._exit_code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            except ChildProcessError:  # somebody else waits for all children
                self._exit_code = 1
        if self._exit_code < 0:
            with contextlib.suppress(ValueError):
                return signal.Signals(-self._exit_code).name
        return f"exit code {self._exit_code}"

    def _finish(self, report: Report) -> None:
        self.report = report
        self.seconds = time.monotonic() - self._started
        self._is_warm = True


def wait_for(child: Child, children: Sequence[Child]) -> Report:
    """The report of ``child``; meanwhile all ``children`` are served."""
    while child.report is None:
        running = [other for other in children if other.report is None]
        ready = wait([other.connection for other in running], _SECONDS_BETWEEN_LOOKS)
        for other in running:
            if other.connection in ready:
                other.read()
            else:
                other.enforce()
    return child.report


def can_fork() -> bool:
    """True if forked children can run torch here: tried once, because what autograd allows depends on its build."""
    if not hasattr(os, "fork") or sys.platform == "darwin":
        return False  # macOS's own libraries do not survive a fork
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return not is_on_gpu and _passes_trial()


@functools.cache
def _passes_trial() -> bool:
    differentiating = threading.Thread(target=_differentiate, args=(None,))  # this may be a forked child itself
    differentiating.start()
    differentiating.join()
    child = Child(Task(_differentiate), is_forked=True)
    try:
        child.start(Step(Program((), ()), {}), RunLimits(_TRIAL_SECONDS))
        return wait_for(child, [child]).error is None
    finally:
        child.close()


def _differentiate(_: Step | None) -> None:
    """A backward pass with a parallel loop in it."""
    with torch.enable_grad():
        leaf = torch.ones(1 << 16, requires_grad=True)
        (leaf.exp() * 2).sum().backward()  # type: ignore[no-untyped-call]


def _live(task: Task, candidate: Step, way: str, connection: Connection[Any, Any], parent: int) -> NoReturn:
    """The whole life of a forked child.

    It works in a new thread: OpenMP's pool of the thread that forked is gone, and the first parallel loop would wait
    for that pool for ever, while a new thread makes a pool of its own.
    """
    try:
        _lead_group(0)
        _become_expendable(parent)
        reports: list[Report] = []
        thread = threading.Thread(target=lambda: reports.append(task.report(candidate, way)))
        thread.start()
        thread.join()
        for report in reports:
            connection.send_bytes(pack_report(report))
    finally:
        os._exit(0)


def serve(descriptor: int, parent: int) -> None:
    """The whole life of a spawned child: answer until the other side hangs up."""
    connection: Connection[bytes, bytes] = Connection(descriptor)
    try:
        task: Task = pickle.loads(connection.recv_bytes())
    except Exception as error:  # the task is code of somebody's, and may fail to load in any way
        connection.send_bytes(f"{type(error).__name__}: {error}".encode())
        return
    _become_expendable(parent)
    connection.send_bytes(_READY)
    while True:
        try:
            packed = connection.recv_bytes()
        except EOFError:
            return
        try:
            report = task.report(*unpack(packed))
        except Exception as error:  # a candidate that cannot be loaded here cannot be run either
            report = Report(error=error)
        connection.send_bytes(pack_report(report))


def _become_expendable(parent: int) -> None:
    """In a new process: die with the parent, leave no core files, and keep quiet."""
    import faulthandler
    import resource

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it could be asked
            os._exit(1)
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    os.close(quiet)


def _lead_group(child: int) -> None:
    """Give a child a process group of its own; child and parent both see to it, so it holds for both from the start."""
    with contextlib.suppress(OSError):  # the child has ended, or has done it
        os.setpgid(child, child)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect after the block, so that no process is started that nobody knows of."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    missed: list[Any] = []
    signal.signal(signal.SIGINT, lambda *arguments: missed.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if missed and callable(handler):
            handler(*missed[0])
