"""Verifying a repro: does it end the same way every time, in clean processes without reprokit?

The first run is a new interpreter. Where the system can fork, the others are forked from a clean interpreter that has
loaded torch and never runs a script itself (`clean_runs`), which can be started before there is a script; elsewhere
every run is a new interpreter. Two runs agree when exit code, output and last line of the error output are the same.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from reprokit.errors import UsageError
from reprokit.snapshot.files import REDUCTION_FILE, REPRO_FILE, require_file

if TYPE_CHECKING:
    from reprokit.render.module import ModuleScript
    from reprokit.render.script import Script

CLEAN_RUNS = Path(__file__).with_name("clean_runs.py")
SECONDS_PER_RUN = 120.0
SHOWS_BUG = 1  # the exit code of a repro while the failure is there
_PASSED_ON = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CleanRun:
    """The end of one run. ``exit_code`` is ``None`` when it took too long."""

    exit_code: int | None
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line of the error output, which names the exception."""
        lines = self.stderr.strip().splitlines()
        return lines[-1].strip() if lines else ""

    @property
    def signature(self) -> tuple[int | None, str, str]:
        """Equal for two runs that ended in the same way."""
        return self.exit_code, self.last_line, self.stdout


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The number of runs that agree, and their end; ``num_failed`` of all runs show the bug, in any words."""

    times: int
    agreed: int
    num_failed: int
    exit_code: int | None
    signature: str
    output: str
    error_output: str
    seconds: float

    @property
    def is_unanimous(self) -> bool:
        return self.agreed == self.times

    @property
    def fails(self) -> bool:
        return self.exit_code == SHOWS_BUG

    @property
    def verified(self) -> str:
        """``20/20``."""
        return f"{self.agreed}/{self.times}"

    def summary(self) -> dict[str, Any]:
        """The result as ``reprokit verify --json`` prints it."""
        return {
            "schema": 1,
            "times": self.times,
            "agreed": self.agreed,
            "failed": self.num_failed,
            "verified": self.verified,
            "exit_code": self.exit_code,
            "signature": self.signature,
            "output": self.output,
            "seconds": round(self.seconds, 3),
        }


class CleanProcesses:
    """Runs scripts in clean processes while this one goes on. ``close`` ends them all.

    ``open`` starts the server ahead of the first script. Files in ``beside`` are put beside every script of `begin`.
    """

    def __init__(self, beside: Sequence[Path] = ()) -> None:
        self._beside = tuple(beside)
        self._server: subprocess.Popen[str] | None = None
        self._reports: dict[int, list[CleanRun]] = {}
        self._known: dict[str, Verification] = {}
        self._folders = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self) -> None:
        """Start the server, where the system can fork."""
        if self._server is None and hasattr(os, "fork"):
            self._server = subprocess.Popen(
                _command(),
                cwd=tempfile.gettempdir(),
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for this process, which then ends the server
            )

    def close(self) -> None:
        """End the server with all that runs there."""
        if self._server is not None:
            with self._server:
                self._server.terminate()
            self._server = None
        self._folders.close()

    def begin(self, script: Script | ModuleScript, times: int) -> Verification:
        """Start to run a script that is not on disk; a text without a side file is run once, however often asked."""
        known = self._known.get(script.text)
        if known is not None and not getattr(script, "side", None):
            return known
        folder = self._folder()
        for file in self._beside:
            shutil.copy(file, folder)
        self._known[script.text] = self.begin_file(script.write(folder), times)
        return self._known[script.text]

    def begin_file(self, script: Path, times: int, seconds: float = SECONDS_PER_RUN) -> Verification:
        """Start to run a script ``times`` times, each for at most so many seconds."""
        if times > 1:
            self.open()
        number = len(self._reports)
        self._reports[number] = []
        if self._server is not None:
            assert self._server.stdin is not None
            folder = self._folder()
            job = {
                "number": number,
                "name": script.name,
                "files": [str(file) for file in (script, *side_files(script))],
                "folders": [str(folder / str(place)) for place in range(times)],
                "at_once": max(1, min(2, os.cpu_count() or 1)),
                "seconds": seconds,
                "fresh": _command(script.name),
                "optimizes": "torch.optim" in script.read_text(errors="replace"),
            }
            with contextlib.suppress(OSError):  # it has ended
                os.write(self._server.stdin.fileno(), f"{json.dumps(job)}\n".encode())
        return Verification(self, number, script, times, seconds)

    def runs(self, number: int, script: Path, times: int, seconds: float) -> list[CleanRun]:
        """The runs of a job; what a server that has ended leaves undone is done by new interpreters."""
        runs = self._reports[number]
        while len(runs) < times and self._server is not None:
            assert self._server.stdout is not None
            line = self._server.stdout.readline()
            if not line:
                break
            found = json.loads(line)
            self._reports[found["job"]].append(_run_in(Path(found["folder"]), found["exit_code"]))
        while len(runs) < times:
            folder = self._folder()
            (folder / "work").mkdir()
            for file in (script, *side_files(script)):
                shutil.copy(file, folder / "work")
            with open(folder / "stdout", "wb") as output, open(folder / "stderr", "wb") as errors:
                exit_code = None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    exit_code = subprocess.run(
                        _command(script.name),
                        cwd=folder / "work",
                        env=_environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=errors,
                        timeout=seconds,
                    ).returncode
            shutil.rmtree(folder / "work", ignore_errors=True)
            runs.append(_run_in(folder, exit_code))
        return runs

    def _folder(self) -> Path:
        return Path(self._folders.enter_context(tempfile.TemporaryDirectory(prefix="reprokit-")))


def _run_in(folder: Path, exit_code: int | None) -> CleanRun:
    """A run without what differs from one process to the next by nature: its folder and memory addresses."""

    def tidied(name: str) -> str:
        with open(folder / name, encoding="utf-8", errors="replace") as file:
            text = file.read(1_000_000)
        work = folder / "work"
        return re.sub(r"\b0x[0-9a-f]{6,}", "0x...", text.replace(os.path.realpath(work), ".").replace(str(work), "."))

    try:
        return CleanRun(exit_code, tidied("stdout"), tidied("stderr"))
    except OSError:  # it ended before it had any
        return CleanRun(exit_code, "", "")


class Verification:
    """The runs of a script, which go on in the background until somebody asks for the result."""

    def __init__(self, processes: CleanProcesses, number: int, script: Path, times: int, seconds: float) -> None:
        self._processes, self._job = processes, (number, script, times, seconds)
        self._started = time.perf_counter()
        self._result: VerifyResult | None = None

    def result(self) -> VerifyResult:
        if self._result is None:
            runs = self._processes.runs(*self._job)
            self._result = _judge(runs, time.perf_counter() - self._started)
        return self._result


def verify(path: Path | str, times: int = 20, *, seconds_per_run: float = SECONDS_PER_RUN) -> VerifyResult:
    """Run a repro ``times`` times.

    ``path`` is a script, a folder that holds ``repro.py``, or a snapshot or reduction whose repro is rendered first.
    """
    source = Path(path)
    if os.path.isdir(source):
        inside = (source / name for name in (REPRO_FILE, REDUCTION_FILE))
        source = next((file for file in inside if file.is_file()), source)
    require_file(source, "repro")
    if times < 1:
        raise UsageError(f"cannot verify {times} times", hint="--times takes a number from 1 up")
    with CleanProcesses() as processes:
        if source.suffix == ".py":
            return processes.begin_file(source.resolve(), times, seconds_per_run).result()
        from reprokit.render.script import require_repro, require_whole
        from reprokit.render.sources import open_source

        script = open_source(source).script()
        require_repro(script)
        require_whole(script)
        return processes.begin(script, times).result()


def _judge(runs: Sequence[CleanRun], seconds: float) -> VerifyResult:
    signature, agreed = Counter(run.signature for run in runs).most_common(1)[0]
    typical = next(run for run in runs if run.signature == signature)
    text = "timeout" if typical.exit_code is None else f"exit code {typical.exit_code}"
    text += f": {typical.last_line}" if typical.last_line else ""
    num_failed = sum(run.exit_code == SHOWS_BUG for run in runs)
    return VerifyResult(len(runs), agreed, num_failed, typical.exit_code, text, typical.stdout, typical.stderr, seconds)


def side_files(script: Path) -> list[Path]:
    """The files beside a script that its source names."""
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return []
    words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = dict.fromkeys(word for word in words if word and word == os.path.basename(word) and word != script.name)
    return [script.parent / name for name in names if (script.parent / name).is_file()]


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def _command(*script: str) -> list[str]:
    """The command of a new interpreter that runs a script in the current folder, or that is the server."""
    found = importlib.util.find_spec("torch")  # isolated interpreters leave out a user's site-packages
    torch_folder = str(Path(found.origin).parent.parent) if found is not None and found.origin else ""
    return [sys.executable, "-I", "-X", "utf8", str(CLEAN_RUNS), torch_folder, *script]
