"""Processes that the script starts and that may train: each is watched by a capture of its own.

Processes of ``multiprocessing`` are given something else to run, which travels with them and is nowhere else; Python
commands that the script starts get ``-m reprokit --started-in FOLDER`` in front of their script. FOLDER has the options
of the capture, and children leave their reports there. Workers of data loaders and other processes of libraries are
left alone. Imports no torch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprokit.capture import launch
from reprokit.errors import ignored_errors

if TYPE_CHECKING:
    from reprokit.cli.capture import Capture

STARTED_IN = "--started-in"
PLAN = "plan"  # the file with the options of the capture
_OWN = str(Path(__file__).resolve().parent.parent) + os.sep
_LIBRARIES = tuple(str(Path(sysconfig.get_path(key)).resolve()) + os.sep for key in ("stdlib", "platstdlib"))
_PACKAGES = ("site-packages", "dist-packages")
_RUNS_WHAT_IT_IS_GIVEN = ("torch.multiprocessing.spawn", "concurrent.futures.process")
_POOLS = ("multiprocessing.pool", "torch.multiprocessing.pool")  # a task whose worker ends is waited for for ever
_RANKS = ("RANK", "LOCAL_RANK")
_FLAGS = re.compile("-[bBdEOPqRuvx]+|-[XW].+")  # of Python, without a value of their own


class Children:
    """Watches what a run starts, for as long as ``starting`` is entered.

    ``folder`` is where children leave their reports; made when the first one is started.
    """

    def __init__(self, plan: Capture, folder: Path | None = None) -> None:
        self._plan = plan
        self._folder = folder
        self._is_ours = folder is None
        self.num_watched = 0

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(launch.when_imported("multiprocessing.process", lambda: self._watch_processes(stack)))
            self._watch_commands(stack)
            yield

    def report(self, found: Mapping[str, Any]) -> None:
        """Leave what was captured here for the process that has started this one."""
        with contextlib.suppress(OSError, TypeError, ValueError):
            (self.folder / f"{os.getpid()}.json").write_text(json.dumps(found))

    def reports(self) -> list[dict[str, Any]]:
        """What all processes below this one that have ended reported; only the first one reads it."""
        found = []
        for path in sorted(self._folder.glob("*.json")) if self._folder is not None and self._is_ours else ():
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(path.read_text()))
        return found

    def forget(self) -> None:
        """Mark all reports as printed."""
        if self._folder is not None and self._is_ours:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @property
    def folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="reprokit-children-"))
            (self._folder / PLAN).write_text(self._plan.to_json())
        return self._folder

    def _watch_processes(self, stack: contextlib.ExitStack) -> None:
        process = sys.modules["multiprocessing.process"].BaseProcess
        original, children = process.start, self

        @functools.wraps(original)
        def start(self: Any) -> None:
            run = None
            with ignored_errors():
                run = children.run_of(self)
            if run is not None:
                self.run = run
                children.num_watched += 1
            try:
                original(self)
            except Exception:  # it may be that what was added cannot be sent
                if run is None:
                    raise
                del self.run
                children.num_watched -= 1
                original(self)
            self.__dict__.pop("run", None)

        process.start = start
        stack.callback(setattr, process, "start", original)

    def _watch_commands(self, stack: contextlib.ExitStack) -> None:
        original, children = subprocess.Popen.__init__, self

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            found, words = None, args[0] if args else kwargs.get("args")
            if len(args) <= 1 and not kwargs.get("shell") and kwargs.get("executable") is None:
                with ignored_errors():
                    found = children.command(words, kwargs.get("env") or os.environ, kwargs.get("cwd") or "")
            if found is None:
                original(self, *args, **kwargs)
                return
            children.num_watched += 1
            original(self, **{**kwargs, "args": found})

        subprocess.Popen.__init__ = __init__  # type: ignore[method-assign]
        stack.callback(setattr, subprocess.Popen, "__init__", original)

    def run_of(self, process: Any) -> WatchedRun | None:
        """What a process of ``multiprocessing`` is to run, ``None`` unless it may train."""
        function = _function_of(process)
        module = getattr(function, "__module__", None)
        if module not in (*_RUNS_WHAT_IT_IS_GIVEN, *_POOLS) and not _is_users(function):
            return None
        plan = self._plan
        if module in _POOLS:
            plan = replace(plan, options={**plan.options, "after": "continue"})
        return WatchedRun(process, plan, self.folder)

    def command(self, words: Any, environment: Mapping[str, str], folder: str = "") -> list[str] | None:
        """The command with which a Python command is watched in a folder; ``None`` if it is not one to watch."""
        if isinstance(words, str) or not isinstance(words, Sequence) or not words or not _is_this_python(words[0]):
            return None
        words = [os.fspath(word) for word in words]
        places = (place for place, word in enumerate(words) if place and not _FLAGS.fullmatch(word))
        place = next(places, len(words))
        if not _is_program_to_watch(words[place:], environment, folder):
            return None
        return [*words[:place], "-m", "reprokit", STARTED_IN, str(self.folder), *words[place:]]


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """What a process runs in the place of its own ``run``: the same, watched."""

    process: Any
    plan: Capture
    folder: Path

    def __call__(self) -> None:
        self.process.__dict__.pop("run", None)
        watch = self.plan.in_child().watch(self.folder)
        try:
            with watch.watching():
                self.process.run()
        except Exception as error:
            launch.peel(error)
            raise
        finally:
            watch.announce()


def _function_of(process: Any) -> Any:
    target = process.__dict__.get("_target")
    if target is None:
        return type(process).run
    while isinstance(target, functools.partial):
        target = target.func
    return target if hasattr(target, "__code__") or hasattr(target, "__func__") else type(target).__call__


def _is_users(function: Any) -> bool:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and _is_users_file(code.co_filename)


def _is_users_file(filename: str) -> bool:
    """True for a file that belongs neither to Python, nor to an installed package, nor to reprokit."""
    path = os.path.realpath(filename)
    return not path.startswith((_OWN, *_LIBRARIES)) and not any(f"{os.sep}{name}{os.sep}" in path for name in _PACKAGES)


def _is_this_python(word: Any) -> bool:
    """True for the Python that runs now: another one may not have reprokit."""
    found = shutil.which(os.fspath(word)) or ""
    own = os.path.dirname(os.path.abspath(sys.executable))
    return "python" in os.path.basename(found) and os.path.dirname(os.path.abspath(found)) == own


def _is_program_to_watch(words: list[str], environment: Mapping[str, str], folder: str) -> bool:
    """True for the user's script or module, and for whatever is started as one of several ranks."""
    is_module = words[:1] == ["-m"]
    name = "".join(words[is_module : is_module + 1])
    if not name or name.startswith("-") or name.partition(".")[0] == "reprokit":
        return False
    if any(variable in environment for variable in _RANKS):
        return True
    if not is_module:
        path = os.path.join(folder, name)
        return _is_users_file(path) and os.path.isfile(path)
    spec = importlib.util.find_spec(name.partition(".")[0])
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec is not None else []
    return any(place is not None and _is_users_file(place) for place in places)
