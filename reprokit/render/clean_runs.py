"""Runs a script many times, each in a process of its own; started as a program in a clean interpreter, never imported.

It loads torch once and forks for every run, because a fresh `import torch` costs seconds. Nothing of reprokit can be
imported in it or in its children. Arguments: folder that holds torch, seconds allowed per run, script, number of runs,
number of processes at a time, side files. Each run gets a new folder with the script and its side files, and is
reported as one line of JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types

Running = dict[int, tuple[str, float]]  # by process id: the folder, and when the time is up


def main(arguments: list[str]) -> None:
    """Run the script as often as asked."""
    torch_folder, seconds, script, times, at_once, *side_files = arguments
    sys.modules["reprokit"] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if torch_folder not in sys.path:
        sys.path.append(torch_folder)
    load(script)
    num_waiting, running = int(times), Running()
    try:
        while num_waiting or running:
            while num_waiting and len(running) < int(at_once):
                num_waiting -= 1
                folder = prepare([script, *side_files])
                running[start(folder, os.path.basename(script))] = (folder, time.monotonic() + float(seconds))
            finish(running)
    finally:
        for child, (folder, _) in running.items():
            for end in (os.killpg, os.kill):  # it may not have got round to leading a group
                with contextlib.suppress(ProcessLookupError):
                    end(child, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)


def load(script: str) -> None:
    """Import what the runs would import, each for itself: torch, and its compiler, which making an optimizer loads."""
    with open(script, encoding="utf-8", errors="replace") as file:
        modules = ["torch", "torch._dynamo"] if "torch.optim" in file.read() else ["torch"]
    with contextlib.suppress(ImportError):  # the script then says so itself
        for module in modules:
            importlib.import_module(module)


def prepare(files: list[str]) -> str:
    """A new folder whose subfolder ``work`` has copies of the files and nothing else."""
    folder = tempfile.mkdtemp(prefix="reprokit-")
    os.mkdir(os.path.join(folder, "work"))
    for path in files:
        shutil.copy(path, os.path.join(folder, "work"))
    return folder


def start(folder: str, name: str) -> int:
    """Fork a child that becomes the script; its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        become(folder, name)
        code = run(name)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def become(folder: str, name: str) -> None:
    """Leave the parent behind: own session, own folder, own streams, own arguments."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(os.path.join(folder, "work"))
    for target, stream in ((1, "stdout"), (2, "stderr")):
        descriptor = os.open(os.path.join(folder, stream), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, target)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout, sys.stderr = os.fdopen(1, "w", encoding="utf-8"), os.fdopen(2, "w", encoding="utf-8")
    sys.argv = [name]


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


def finish(running: Running) -> None:
    """Report every child that ended or took too long."""
    for child in list(running):
        folder, deadline = running[child]
        ended, status = os.waitpid(child, os.WNOHANG)
        timed_out = not ended and time.monotonic() > deadline
        if timed_out:
            os.killpg(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
        if ended or timed_out:
            del running[child]
            report(folder, None if timed_out else os.waitstatus_to_exitcode(status))
    time.sleep(0.005)


def report(folder: str, exit_code: int | None) -> None:
    """Print what a run did, and remove its folder."""
    said: dict[str, object] = {"exit_code": exit_code, "folder": os.path.join(folder, "work")}
    for stream in ("stdout", "stderr"):
        try:
            with open(os.path.join(folder, stream), encoding="utf-8", errors="replace") as file:
                said[stream] = file.read(1_000_000)
        except OSError:
            said[stream] = ""
    shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
