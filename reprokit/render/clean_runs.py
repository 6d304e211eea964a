"""A server of clean processes; started as a program in a clean interpreter, never imported.

It loads torch once and forks for every run, because a fresh `import torch` costs seconds. It never runs a script
itself, and nothing of reprokit can be imported in it or in its children. The forkserver of `multiprocessing` would not
do: its children import the caller's `__main__` and with it reprokit, and it starts in the caller's environment.

Arguments: the folder that holds torch, and a script to run at once. Without a script, each line of JSON on stdin asks
for runs of one, each in a new folder whose subfolder ``work`` has copies of the script's files and nothing else, and
each run that ends is reported as a line of JSON on stdout. The end of stdin ends the server, and SIGTERM ends it with
all that runs there.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import traceback
import types
from typing import Any

FAILED = 70


def serve() -> None:
    import torch

    running: dict[int, str] = {}  # the folder of each child
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        for line in sys.stdin:
            job = json.loads(line)
            if job["optimizes"]:
                torch.optim.SGD([torch.zeros(1)])  # the first one loads what takes seconds
            waiting = list(job["folders"])
            while waiting or running:
                while waiting and len(running) < job["at_once"]:
                    is_fresh = len(waiting) == len(job["folders"])
                    folder = waiting.pop(0)
                    os.makedirs(os.path.join(folder, "work"))
                    for file in job["files"]:
                        shutil.copy(file, os.path.join(folder, "work"))
                    running[start(folder, job, is_fresh=is_fresh)] = folder
                child, status = os.wait()
                folder = running.pop(child)
                kill_group(child)  # what the run may have left behind
                shutil.rmtree(os.path.join(folder, "work"), ignore_errors=True)
                code = os.waitstatus_to_exitcode(status)
                ended = {"exit_code": None if code == -signal.SIGALRM else code}
                print(json.dumps({"job": job["number"], "folder": folder, **ended}), flush=True)
    finally:
        for child in running:
            kill_group(child)
            os.waitpid(child, 0)


def kill_group(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


def start(folder: str, job: dict[str, Any], *, is_fresh: bool) -> int:
    """Fork a child that becomes the script, or the new interpreter that runs it; its process id."""
    child = os.fork()
    with contextlib.suppress(OSError):  # the child does the same: whoever comes first
        os.setpgid(child, child)
    if child:
        return child
    code = FAILED
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, job["seconds"])  # nothing catches its signal, which ends the run
        os.chdir(os.path.join(folder, "work"))
        opened = {0: os.open(os.devnull, os.O_RDONLY)}
        for number, name in ((1, "stdout"), (2, "stderr")):
            opened[number] = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT, 0o600)
        for number, descriptor in opened.items():
            os.dup2(descriptor, number)
            os.close(descriptor)
        if is_fresh:
            os.execv(job["fresh"][0], job["fresh"])
        atexit._clear()  # of torch's own, which takes longer than a run
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout, sys.stderr = os.fdopen(1, "w", encoding="utf-8"), os.fdopen(2, "w", encoding="utf-8")
        for module, generator in (("torch", "default_generator"), ("numpy", "random")):  # Python seeds its own
            if module in sys.modules:
                getattr(sys.modules[module], generator).seed()
        code = run(job["name"])
        for thread in threading.enumerate():  # Python waits for them at exit
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def run(name: str) -> int:
    """Execute the script as ``__main__``; its exit code."""
    sys.argv = [name]
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


def main(torch_folder: str, script: str | None = None) -> None:
    sys.modules["reprokit"] = None  # type: ignore[assignment]  # importing it raises ModuleNotFoundError
    if torch_folder not in sys.path:
        sys.path.append(torch_folder)
    if script is not None:
        sys.exit(run(script))
    with contextlib.suppress(BaseException):  # the end of stdin, or nobody to report to
        serve()
    os._exit(0)  # taking torch down takes longer than a run


if __name__ == "__main__":
    main(*sys.argv[1:])
