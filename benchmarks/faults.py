"""Training under faults: errors inside capture, interrupts and kills at random moments.

    python benchmarks/faults.py [--faults N] [--kills N] [--seed N] [--json FILE]

Raises an error in every function that a captured run calls, at several of its calls, and sends signals at random
moments to processes that train and save. Exit code 1 on a finding. The table goes to stderr, JSON to stdout.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import importlib
import inspect
import os
import pkgutil
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from command import JSON, new_parser, print_json
from torch import nn

from reprokit.capture import save as build_snapshot
from reprokit.capture.session import Session
from reprokit.errors import ReprokitError
from reprokit.snapshot.format import load

# Functions that guard the others, take capture away, or run before the block begins: nothing catches their errors.
GUARDS = {
    *("stand_in", "as_called", "_plain"),  # which performs the call of the loop
    "Recorder.__torch_function__",
    "Recorder._facts",
    "Recorder._perform",
    "Recorder.differentiate",
    "Recorder.install",
    "Recorder.uninstall",
    "TransformCalls.run",
    "TransformCalls.open",
    "TransformCalls.run_scripted",
    "TransformCalls._perform",
    "RootCalls.install",
    "RootCalls.uninstall",
    "RootCalls.is_root_call",
    "RootCalls.unwatched",
    "Recorder.whole",
    "Loop.before_backward",
    "Loop.after_backward",
    "Loop.before_step",
    "Loop.after_step",
    "Loop.leave",
    "Loop.scaler_step",
    "Failures.fail",
    "Contents.write",
    "Copy.give_back",
    "_Bindings.give_back",
    "give_gradients",
}
_WITHOUT_FAULTS = {"session", "hooks", "mode", "options", "launch", "block"}
_KINDS: tuple[type[BaseException], ...] = (RuntimeError, MemoryError, KeyboardInterrupt)
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_STOPPED = 10  # exit code of a child that was interrupted and holds what it should
Trail = list[str]


# -- trainings that fail ----------------------------------------------------------------------------------------------


class Training:
    """A loop that fails at its end, with a digest of its state after every step."""

    def __init__(self, *, is_late: bool, tell: Callable[[str], object] = lambda digest: None) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.gate = nn.Parameter(torch.ones(()))
        self.optimizer = torch.optim.Adam([*self.model.parameters(), self.gate], lr=0.01)
        self.is_late = is_late
        self.trail: Trail = [self.digest()]
        self._tell = tell

    def run(self) -> None:
        """Train; the gate is ruined at step 4, and read at once or at step 7."""
        for step in range(9):
            x, y = torch.randn(5, 6), torch.randint(3, (5,))
            output = self.model(x + 0.1 * random.random())
            if step >= (7 if self.is_late else 4):
                output = output * self.gate
            loss = nn.functional.cross_entropy(output, y)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if step == 3:
                with torch.no_grad():
                    self.gate.mul_(float("nan"))
            self.trail.append(self.digest())
            self._tell(self.trail[-1])

    def digest(self) -> str:
        """A digest of the parameters and one of the buffers."""
        with torch.DisableTorchFunction():
            return ":".join(map(_digest, ([*self.model.parameters(), self.gate], self.model.buffers())))


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def plain_trail(is_late: bool) -> Trail:
    """The digests without reprokit."""
    training = Training(is_late=is_late)
    training.run()
    return training.trail


# -- state before and after --------------------------------------------------------------------------------------


def hooks() -> list[Any]:
    """The functions that a capture replaces, numbers of hooks, and modes of torch."""
    from torch.optim import optimizer as optimizers

    places = [
        (torch.Tensor, "backward"),
        (torch.autograd, "backward"),
        (nn.Module, "__call__"),
        (nn.Module, "zero_grad"),
        (torch.optim.Optimizer, "zero_grad"),
        (torch.nn.utils, "clip_grad_norm_"),
        (torch.autograd.profiler.record_function, "__enter__"),
        (threading, "excepthook"),
        (sys, "excepthook"),
    ]
    found = [getattr(owner, name) for owner, name in places]
    found += [layer.__dict__.get("__call__") for layer in (nn.Linear, nn.Sequential)]
    numbers = [len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)]
    modes = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()]
    return [*found, *numbers, *modes, torch._C._len_torch_function_stack(), Session.active is None]


def unreadable(folder: Path) -> list[str]:
    """Files that are no whole snapshots."""
    found = []
    for path in sorted(folder.iterdir()):
        try:
            if path.suffix != ".pt":
                raise ReprokitError("not a snapshot")
            load(path)
        except ReprokitError:
            found.append(path.name)
    return found


def _differences(before: list[Any], after: list[Any]) -> list[str]:
    left = [str(now) for was, now in zip(before, after, strict=True) if was is not now and was != now]
    return [f"left in the process: {left}"] if left else []


# -- faults -----------------------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """An error at the ``nth`` call of a function, in a late or an early failure."""

    owner: Any
    attribute: str
    function: Callable[..., Any]
    nth: int
    kind: type[BaseException]
    is_late: bool


def functions() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Owner, attribute and function of every function of capture, without the guards."""
    for name in ("capture", "program", "locate", "snapshot"):
        package = importlib.import_module(f"reprokit.{name}")
        for part in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if part.name.rpartition(".")[2] not in _WITHOUT_FAULTS:
                yield from _functions_of(importlib.import_module(part.name))


def _functions_of(module: ModuleType) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__ or name in GUARDS:
            continue
        if inspect.isfunction(value) and not inspect.isgeneratorfunction(value):
            yield module, name, value
        elif inspect.isclass(value):
            for attribute, function in list(vars(value).items()):
                is_plain = inspect.isfunction(function) and "__create_fn__" not in str(function)
                if is_plain and f"{name}.{attribute}" not in GUARDS:
                    yield value, attribute, function


def calls_of(is_late: bool) -> collections.Counter[CodeType]:
    """Number of calls of each function in a captured run."""
    calls: collections.Counter[CodeType] = collections.Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls[frame.f_code] += 1

    with tempfile.TemporaryDirectory() as folder, _session(Path(folder)):
        sys.setprofile(note)
        try:
            Training(is_late=is_late).run()
        finally:
            sys.setprofile(None)
    return calls


def faults(number: int, seed: int) -> list[Fault]:
    """``number`` faults: one in each function, with the kinds of errors in turn, then the other kinds and calls."""
    found: list[list[Fault]] = [[], []]
    calls = {is_late: calls_of(is_late) for is_late in (True, False)}
    choose = random.Random(seed)
    for position, (owner, attribute, function) in enumerate(functions()):
        is_late = calls[True][function.__code__] >= calls[False][function.__code__]
        times = calls[is_late][function.__code__]
        for turn in range(2 * len(_KINDS) if times else 0):
            nth = min(3, times) if turn == 0 else choose.randint(1, times)
            kind = _KINDS[(position + turn) % len(_KINDS)]
            found[turn > 0].append(Fault(owner, attribute, function, nth, kind, is_late))
    choose.shuffle(found[1])
    return [*found[0], *found[1]][:number]


@contextlib.contextmanager
def _session(folder: Path) -> Iterator[Session]:
    described, build_snapshot.collect_environment = build_snapshot.collect_environment, _environment
    try:
        with Session(directory=folder, after="continue", quiet=True, history=3) as session:
            yield session
    finally:
        build_snapshot.collect_environment = described


_environment = functools.cache(build_snapshot.collect_environment)


@contextlib.contextmanager
def _injected(fault: Fault) -> Iterator[list[int]]:
    """Put a fault in wherever the function was imported to; yields a list that must hold something to arm it."""
    armed: list[int] = []
    num_calls = 0

    @functools.wraps(fault.function)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += bool(armed)
        if armed and num_calls == fault.nth:
            raise fault.kind("injected")
        return fault.function(*args, **kwargs)

    modules = [m for name, m in list(sys.modules.items()) if name.startswith("reprokit.")]
    owners = [m for m in modules if vars(m).get(fault.attribute) is fault.function]
    owners = owners if isinstance(fault.owner, ModuleType) else [fault.owner]
    for owner in owners:
        setattr(owner, fault.attribute, faulty)
    try:
        yield armed
    finally:
        for owner in owners:
            setattr(owner, fault.attribute, fault.function)


def findings_of(fault: Fault, plain: Trail) -> list[str]:
    """Findings of one fault: a changed bit, a hook or mode that is left, a file that does not load."""
    before, ended, found = hooks(), None, []
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as sink, _injected(fault) as armed:
        training = Training(is_late=fault.is_late)
        try:
            with contextlib.redirect_stderr(sink), _session(Path(folder)):
                armed.append(1)
                training.run()
        except BaseException as error:
            ended = error
        armed.clear()
        found += [f"half a file: {names}" for names in [unreadable(Path(folder))] if names]
    if ended is None:
        found += ["a bit was changed"] if training.trail != plain else []
    elif fault.kind is not KeyboardInterrupt or type(ended) is not KeyboardInterrupt:
        found.append(f"the training ended with {ended!r}")
    else:
        found += _beside(training.trail, training.digest(), plain, is_inside_update=_is_inside_update(ended))
    found += _differences(before, hooks())
    torch.set_grad_enabled(True)  # for the next one
    return found


def _is_inside_update(error: BaseException) -> bool:
    """True if an optimizer was at work: without reprokit, too, an interrupt leaves some parameters as they were."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code is inspect.unwrap(torch.optim.Adam.step).__code__ for frame in frames)


def _beside(trail: Trail, now: str, plain: Trail, *, is_inside_update: bool) -> list[str]:
    """Findings of an interrupted training: the steps before the interrupt, and the parameters after it.

    Batch normalisation has written its buffers in the middle of a step; step 3 ends with a write by hand.
    """
    done = len(trail)
    either = [digest.partition(":")[0] for digest in plain[done - 1 : done + 1]]
    is_same = trail == plain[:done] and (now.partition(":")[0] in either or is_inside_update or done == 4)
    return [] if is_same else ["a bit was changed before the interrupt"]


# -- kills ------------------------------------------------------------------------------------------------------------


def kill(number: signal.Signals, delay: float, folder: Path, plain: Trail) -> list[str]:
    """Train in a child and send it a signal after ``delay`` seconds; the findings in its steps, files and exit code."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _train_as_child(folder, writing)
    os.close(writing)
    with os.fdopen(reading) as told:
        told.readline()  # it has begun
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)
        trail = [plain[0], *told.read().split()]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    names = unreadable(folder)
    if number is signal.SIGKILL:
        names = [name for name in names if name.endswith(".pt")]  # nobody can remove an unfinished file then
    found = [f"half a file: {names}"] if names else []
    found += ["a bit was changed"] if trail != plain[: len(trail)] else []
    return found + ([] if code in (0, _STOPPED, -number) else [f"ended with {code}"])


def _train_as_child(folder: Path, pipe: int) -> None:
    """Train and end the process; exit code 2 if a hook or mode is left."""
    before, code = hooks(), 0
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.write(pipe, b"begin\n")
        with _session(folder):
            Training(is_late=True, tell=lambda digest: os.write(pipe, f"{digest}\n".encode())).run()
    except KeyboardInterrupt:
        code = _STOPPED
    except BaseException:
        code = 1
    os._exit(2 if _differences(before, hooks()) else code)


def kills(number: int, seed: int) -> Iterator[tuple[str, list[str]]]:
    """The name of each signal, sent at a random moment of a run or of its saving, with its findings."""
    plain, choose = plain_trail(True), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, _session(Path(folder)):
        started = time.perf_counter()
        Training(is_late=True).run()
        seconds = time.perf_counter() - started
    for turn in range(number):
        signal_number = _SIGNALS[turn % len(_SIGNALS)]
        with tempfile.TemporaryDirectory() as folder:
            found = kill(signal_number, choose.uniform(0, seconds), Path(folder), plain)
        yield signal_number.name, found


# -- the command ------------------------------------------------------------------------------------------------------


def measure(num_faults: int, num_kills: int, seed: int) -> JSON:
    """Run everything; counts and findings."""
    plain = {is_late: plain_trail(is_late) for is_late in (True, False)}
    counts: collections.Counter[str] = collections.Counter()
    findings: JSON = {}
    for fault in faults(num_faults, seed):
        counts[fault.kind.__name__] += 1
        found = findings_of(fault, plain[fault.is_late])
        if found:
            findings[f"{fault.function.__qualname__}, call {fault.nth}, {fault.kind.__name__}"] = found
    for turn, (name, found) in enumerate(kills(num_kills, seed)):
        counts[name] += 1
        if found:
            findings[f"{name}, kill {turn}"] = found
    return {"seed": seed, "counts": dict(counts), "findings": findings}


def main(arguments: Sequence[str] | None = None) -> int:
    """The benchmark; 1 if something was found."""
    parser = new_parser(__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="errors to raise (default 1000)")
    parser.add_argument("--kills", type=int, default=120, help="signals to send (default 120)")
    parser.add_argument("--seed", type=int, default=0, help="of the calls and moments (default 0)")
    options = parser.parse_args(arguments)
    result = measure(options.faults, options.kills, options.seed)
    for name, number in result["counts"].items():
        num_found = sum(name in key for key in result["findings"])
        print(f"{name:20} {number:6}   findings {num_found}", file=sys.stderr)
    for name, found in result["findings"].items():
        print(f"{name}: {'; '.join(found)}", file=sys.stderr)
    print_json(result, options.json)
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
