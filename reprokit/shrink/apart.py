"""Where candidates run: in this process what cannot crash it, else in a child, so that crashes, hangs and floods of
memory end with that child.

A child is forked where the system allows it: it starts in a few milliseconds and shares all tensors until it writes.
Else it is spawned, as with CUDA: a new interpreter, used until a candidate ends it. Not by `multiprocessing`: its
spawned processes import the caller's `__main__`, so that a training script without a guard would run again, and it
starts none in a daemonic process such as a worker of Dask.

Candidates travel as plain data and tensors that a restricted unpickler accepts, reports as plain data and reprokit's
own classes. So a candidate that got hold of its process cannot make this one execute anything. An executor of
``concurrent.futures`` runs each candidate in a child of its own process.
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
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import Enum
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeAlias

import torch

from reprokit.errors import ReprokitError
from reprokit.locate.kinds import FailureKind
from reprokit.program import plain
from reprokit.program.dataflow import raw_bytes
from reprokit.program.interpreter import Settings, determinism
from reprokit.program.ir import Program
from reprokit.program.step import Step
from reprokit.shrink.safety import trusts_arguments
from reprokit.snapshot.format import storable

Observe: TypeAlias = Callable[[Step], Any]  # returns plain data or dataclasses of reprokit's
_LEAST_SECONDS, _TIMES_FIRST = 10.0, 10
_LEAST_BYTES, _TIMES_PEAK = 1 << 30, 2
_SECONDS_BETWEEN_LOOKS = 0.05
_SECONDS_OF_TRIAL = 20.0
_SECONDS_TO_START = 300.0
_SECONDS_TO_WARM_UP = 60.0  # a first candidate on a GPU also loads its kernels
_SECONDS_ON_THE_WAY = 60.0  # a large model's tensors over a slow network, or a queue; a worker may be gone for good
_WORTH_A_PROCESS = 0.1  # seconds; a quicker candidate is done here before a child has started
_PR_SET_PDEATHSIG = 1
_SERVE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from reprokit.shrink.apart import serve
serve(int(sys.argv[2]), int(sys.argv[3]))
"""


class NotObserved(ReprokitError):
    """A candidate ended without a finding. ``reason``: ``crash``, ``time``, ``memory`` or ``error``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Report:
    """What came back from one candidate: what was found, or an error."""

    found: Any = None
    error: Exception | None = None

    def value(self) -> Any:
        """What was found; raises the error."""
        if self.error is not None:
            raise self.error
        return self.found

    @property
    def took_its_process_down(self) -> bool:
        """True if the candidate would have ended or stopped the reduction, had it run in this process."""
        return isinstance(self.error, NotObserved) and self.error.reason != "error"


@dataclass(frozen=True)
class Task:
    """How a candidate is looked at: with the same settings and the same state of the generator in every process."""

    observe: Observe  # has to pickle where candidates run in spawned children or through an executor
    settings: Settings = Settings()
    rng: bytes = b""

    @classmethod
    def of(cls, observe: Observe, settings: Settings) -> Task:
        """A task with this process's number of threads, where none was recorded, and its generator."""
        rng = raw_bytes(torch.get_rng_state())
        return cls(observe, replace(settings, num_threads=settings.num_threads or torch.get_num_threads()), rng)

    def report(self, candidate: Step) -> Report:
        """The report on one candidate that is run right here; the settings and the generator are given back."""
        before = torch.get_rng_state()
        try:
            with determinism(self.settings):
                if self.rng:
                    torch.set_rng_state(torch.frombuffer(bytearray(self.rng), dtype=torch.uint8))
                return Report(self.observe(candidate))
        except Exception as error:  # whatever a candidate raises outside its calls makes it unusable, nothing more
            return Report(error=error)
        finally:
            torch.set_rng_state(before)


def pack(candidate: Step) -> bytes:
    """A candidate as bytes. A tensor that is several inputs stays one, on its device, with storage of its own."""
    tensors = {item.value: candidate.tensors[item.value] for item in candidate.program.inputs}
    sent = {id(t): storable(t) if t.device.type == "cpu" else t.detach() for t in tensors.values()}
    file = io.BytesIO()
    plain_tensors = {value: sent[id(tensor)] for value, tensor in tensors.items()}
    torch.save({"program": plain.to_plain(candidate.program), "tensors": plain_tensors}, file)
    return file.getvalue()


def unpack(packed: bytes) -> Step:
    """The inverse of `pack`; raises whatever damaged data raises."""
    content = torch.load(io.BytesIO(packed), weights_only=True)
    return Step(plain.from_plain(content["program"]), content["tensors"])


def pack_report(report: Report) -> bytes:
    """A report as bytes; what does not pickle becomes an error."""
    reason, message = "", ""
    if report.error is not None:
        reason = report.error.reason if isinstance(report.error, NotObserved) else "error"
        message = str(report.error) if reason != "error" else f"{type(report.error).__name__}: {report.error}"
    try:
        return pickle.dumps((report.found, reason, message))
    except Exception as error:  # pickling fails in as many ways as there are classes
        return pickle.dumps((None, "error", f"the finding cannot be sent: {error}"))


def unpack_report(packed: bytes) -> Report:
    """The inverse of `pack_report`; anything else becomes an error."""
    try:
        found, reason, message = _PlainUnpickler(io.BytesIO(packed)).load()
    except Exception as error:  # damaged data fails in as many ways
        return Report(error=NotObserved("error", f"the report cannot be read: {error}"))
    return Report(error=NotObserved(reason, message)) if reason else Report(found)


class _PlainUnpickler(pickle.Unpickler):
    """Knows no classes but reprokit's own that hold data."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "reprokit":
            found = super().find_class(module, name)
            is_class = isinstance(found, type)
            if is_class and (dataclasses.is_dataclass(found) or issubclass(found, (Enum, FailureKind))):
                return found
        raise pickle.UnpicklingError(f"`{module}.{name}` is not plain data")


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

    def and_more(self, seconds: float) -> RunLimits:
        """The limits with so many seconds more."""
        return self if self.seconds is None else replace(self, seconds=self.seconds + seconds)


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
    """A process that runs candidates one after another; a forked one runs a single candidate.

    ``report`` is ``None`` until the latest candidate has come to an end, one way or another; ``seconds`` is what that
    took. `close` kills the process and all that it started.
    """

    def __init__(self, *, is_forked: bool) -> None:
        self.report: Report | None = Report()
        self.seconds = 0.0
        self._is_forked = is_forked
        self._is_ready = False
        self._pid = 0

    def open(self) -> None:
        """Spawn the process if there is none; it loads torch while this one goes on."""
        if self._is_forked or self._pid:
            return
        self.connection, theirs = Pipe()
        os.set_inheritable(theirs.fileno(), True)
        arguments = [sys.executable, "-c", _SERVE, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
        quiet = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0), (os.POSIX_SPAWN_DUP2, 0, 1)]
        self._pid = os.posix_spawn(sys.executable, arguments, os.environ, file_actions=quiet, setpgroup=0)
        theirs.close()

    def start(self, task: Task, candidate: Step, limits: RunLimits) -> None:
        """Start a candidate; first comes the end of one that nobody waited for."""
        wait_for(self, [self])
        self.settle()
        if self._is_forked:
            self._fork(task, candidate)
        else:
            self.open()
            limits = limits if self._is_ready else self._ready(limits)
        self._limits = limits
        self._allowed = None if limits.memory is None else resident_bytes(self._pid) + limits.memory
        self._started, self.report = time.monotonic(), None
        if not self._is_forked:
            try:
                self.connection.send_bytes(pickle.dumps((task, pack(candidate))))
            except OSError:  # it has ended
                self.read()
            except Exception as error:  # not every tensor can be stored, nor every task
                self.report = Report(error=error)

    def read(self) -> None:
        """Take the report that has arrived, or notice that there will be none."""
        try:
            self._finish(unpack_report(self.connection.recv_bytes()))
        except (EOFError, OSError):
            code = self._kill()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self._finish(Report(error=NotObserved("crash", f"the candidate ended its process ({how})")))

    def enforce(self) -> None:
        """End a run that has taken too much."""
        seconds, memory = self._limits.seconds, self._limits.memory
        if seconds is not None and time.monotonic() - self._started > seconds:
            error = NotObserved("time", f"the candidate took more than {seconds:.0f} s")
        elif self._allowed is not None and resident_bytes(self._pid) > self._allowed:
            error = NotObserved("memory", f"the candidate took more than {memory:,} bytes")
        else:
            return
        self._kill()
        self._finish(Report(error=error))

    def settle(self) -> None:
        """After a run: end a process that cannot be used again."""
        if self._is_forked or (self.report is not None and self.report.took_its_process_down):
            self.close()

    def close(self) -> None:
        """End the process; a later `start` makes another one."""
        if self._pid:
            self._kill()
            self.connection.close()
            self._pid, self._is_ready = 0, False
            self.report = self.report or Report()

    def _fork(self, task: Task, candidate: Step) -> None:
        self.connection, theirs = Pipe(duplex=False)
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads, of which torch always has some
            self._pid = os.fork()
        if self._pid == 0:
            _live(task, candidate, theirs, parent)
        theirs.close()
        with contextlib.suppress(OSError):  # the child has ended, or has done it
            os.setpgid(self._pid, self._pid)

    def _ready(self, limits: RunLimits) -> RunLimits:
        """The limits for the first candidate of a process that has loaded torch."""
        try:
            self._is_ready = self.connection.poll(_SECONDS_TO_START) and bool(self.connection.recv_bytes())
        except (EOFError, OSError):
            self._is_ready = False
        if not self._is_ready:
            self.close()
            raise ReprokitError("no process can be started for candidates")
        return limits.and_more(_SECONDS_TO_WARM_UP)

    def _kill(self) -> int:
        """Kill the process with all that it started; how it ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        except ChildProcessError:  # it was waited for
            return 1

    def _finish(self, report: Report) -> None:
        self.report, self.seconds = report, time.monotonic() - self._started


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
    with closing(Child(is_forked=True)) as child:
        child.start(Task(_differentiate), Step(Program((), ()), {}), RunLimits(_SECONDS_OF_TRIAL))
        return wait_for(child, [child]).error is None


def _differentiate(_: Step | None) -> None:
    """A backward pass with a parallel loop in it."""
    with torch.enable_grad():
        leaf = torch.ones(1 << 16, requires_grad=True)
        (leaf.exp() * 2).sum().backward()  # type: ignore[no-untyped-call]


def _live(task: Task, candidate: Step, connection: Connection[Any, Any], parent: int) -> NoReturn:
    """The whole life of a forked child.

    It works in a new thread: OpenMP's pool of the thread that forked is gone, and the first parallel loop would wait
    for that pool for ever, while a new thread makes a pool of its own.
    """
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        _become_expendable(parent)
        reports: list[Report] = []
        thread = threading.Thread(target=lambda: reports.append(task.report(candidate)))
        thread.start()
        thread.join()
        for report in reports:
            connection.send_bytes(pack_report(report))
    finally:
        os._exit(0)


def serve(descriptor: int, parent: int) -> None:
    """The whole life of a spawned child: answer until the other side hangs up."""
    connection: Connection[bytes, bytes] = Connection(descriptor)
    _become_expendable(parent)
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            received = connection.recv_bytes()
            try:
                task, packed = pickle.loads(received)
                report = task.report(unpack(packed))
            except Exception as error:  # what cannot be loaded here cannot be run either
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


def report_packed(task: Task, packed: bytes, limits: RunLimits) -> bytes:
    """The other side of an executor: the report on one candidate."""
    with closing(Isolation(task, limits=limits, is_wary=True)) as isolation:
        return pack_report(isolation.report(unpack(packed)))


@dataclass
class Isolation:
    """Hands out the reports on candidates.

    What is known not to take this process down runs here, unless it ``is_wary``. Anything else runs in a child, or
    through the ``executor`` if there is one.
    """

    task: Task = field(default_factory=lambda: Task(lambda _: None))
    jobs: int = 1  # at once
    is_wary: bool = False  # of code of the user's, and after a candidate took its process down
    executor: Executor | None = None
    limits: RunLimits | None = None  # ``None``: they follow from the first run, which has none
    _spawned: list[Child] = field(default_factory=list)
    _latest_seconds: float = 0.0

    @property
    def num_at_once(self) -> int:
        """How many candidates are worth running at once."""
        is_worth_it = self.executor is not None or self.is_wary or self._latest_seconds > _WORTH_A_PROCESS
        return self.jobs if is_worth_it and _has_process_groups() else 1

    def report(self, candidate: Step) -> Report:
        """The report on one candidate."""
        with closing(self.reports([candidate])) as reports:
            return next(reports)

    def reports(self, candidates: Sequence[Step], tasks: Sequence[Task] = ()) -> Generator[Report, None, None]:
        """The reports in the order of the candidates, all of which run at once; closing ends those not waited for.

        ``tasks`` are in place of `task`, one for each. Raises `ReprokitError` if the executor fails.
        """
        started = time.monotonic()
        is_risky = len(candidates) > 1 or self.is_wary or trusts_arguments(candidates[0].program)
        if len(candidates) == 1 and not (is_risky and _has_process_groups()):
            found = iter([(tasks[0] if tasks else self.task).report(candidates[0])])
        elif self.executor is None:
            found = self._in_children(candidates, tasks or [self.task] * len(candidates))
        else:
            found = self._through(self.executor, candidates)
        with contextlib.ExitStack() as stack:
            if isinstance(found, Generator):
                stack.enter_context(closing(found))
            for report in found:
                self._latest_seconds = time.monotonic() - started
                self.limits = self.limits or RunLimits.after(self._latest_seconds)
                self.is_wary = self.is_wary or report.took_its_process_down
                yield report

    def change(self, task: Task, runs: int = 1) -> None:
        """Look at candidates in another way from here on, which takes so many runs for each. The limits stay, so that
        no candidate is ever without any."""
        self.task = task
        if self.limits is not None and self.limits.seconds is not None:
            self.limits = replace(self.limits, seconds=runs * self.limits.seconds)

    def close(self) -> None:
        """End all children."""
        for child in self._spawned:
            child.close()
        self._spawned.clear()

    def _in_children(self, candidates: Sequence[Step], tasks: Sequence[Task]) -> Generator[Report, None, None]:
        if can_fork():
            running = [Child(is_forked=True) for _ in candidates]
        else:
            self._spawned += [Child(is_forked=False) for _ in range(len(candidates) - len(self._spawned))]
            running = self._spawned[: len(candidates)]
        try:
            for child in running:
                child.open()
            for child, task, candidate in zip(running, tasks, candidates, strict=True):
                child.start(task, candidate, self.limits or RunLimits())
            for child in running:
                yield wait_for(child, running)
        finally:
            for child in running:
                child.settle()

    def _through(self, executor: Executor, candidates: Sequence[Step]) -> Generator[Report, None, None]:
        limits = self.limits or RunLimits()
        futures: list[Future[bytes]] = []
        try:
            for candidate in candidates:
                futures.append(executor.submit(report_packed, self.task, pack(candidate), limits))
            for future in futures:
                yield unpack_report(future.result(limits.and_more(_SECONDS_ON_THE_WAY).seconds))
        except Exception as error:  # executors fail in as many ways as there are; candidates never raise here
            message = f"the executor failed: {type(error).__name__}: {error}"
            raise ReprokitError(message, hint="shrink without it, or with another one") from error
        finally:
            for future in futures:
                future.cancel()


def _has_process_groups() -> bool:
    return hasattr(os, "killpg")
