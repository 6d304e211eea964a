"""Verifying a repro: does it end the same way every time, in clean processes without reprokit?

Where the system can fork, one clean interpreter loads torch and forks for every run (`clean_runs`); elsewhere every run
is an interpreter of its own. Two runs agree when exit code, output and last line of the error output are the same.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprokit.errors import ReprokitError, UsageError
from reprokit.snapshot.paths import REDUCTION_FILE, REPRO_FILE, require_file

CLEAN_RUNS = Path(__file__).with_name("clean_runs.py")
SECONDS_PER_RUN = 120.0
SHOWS_BUG = 1  # the exit code of a repro while the failure is there
_PASSED_ON = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
)  # fmt: skip
_RUN_ALONE = """
import runpy, sys
sys.modules["reprokit"] = None
folder, script = sys.argv[1:]
sys.path.append(folder)
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
"""


@dataclass(frozen=True, slots=True)
class Run:
    """How one run ended. ``exit_code`` is ``None`` when it took too long."""

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
        """What two runs must share to have ended in the same way."""
        return self.exit_code, self.last_line, self.stdout


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """How many of the runs agree, and how these ended; ``num_failed`` of all runs show the bug, in whatever words."""

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
        """True if every run ended in the same way."""
        return self.agreed == self.times

    @property
    def fails(self) -> bool:
        """True if the runs that agree show the bug."""
        return self.exit_code == SHOWS_BUG

    @property
    def verified(self) -> str:
        """``20/20``."""
        return f"{self.agreed}/{self.times}"

    def summary(self) -> dict[str, Any]:
        """What ``reprokit verify --json`` prints."""
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


def verify(path: Path | str, times: int = 20, *, seconds_per_run: float = SECONDS_PER_RUN) -> VerifyResult:
    """Run a repro ``times`` times.

    ``path`` is a script, a folder that holds ``repro.py``, or a snapshot or reduction whose repro is rendered first.
    """
    source = _file_of(Path(path))
    require_file(source, "repro")
    if times < 1:
        raise UsageError(f"cannot verify {times} times", hint="--times takes a number from 1 up")
    if source.suffix == ".py":
        return _verify_script(source, times, seconds_per_run)
    from reprokit.render.script import require_whole
    from reprokit.render.sources import script_of

    script = script_of(source)
    require_whole(script)
    with tempfile.TemporaryDirectory(prefix="reprokit-") as folder:
        return _verify_script(script.write(Path(folder)), times, seconds_per_run)


def _file_of(path: Path) -> Path:
    """What stands for a folder of results: the repro in it, or the reduction if that is not there any more."""
    inside = (path / name for name in (REPRO_FILE, REDUCTION_FILE))
    return next((file for file in inside if file.is_file()), path) if os.path.isdir(path) else path


def _verify_script(script: Path, times: int, seconds_per_run: float) -> VerifyResult:
    started = time.perf_counter()
    runs = list(_run(script.resolve(), times, seconds_per_run))
    return _judge(runs, time.perf_counter() - started)


def _judge(runs: Sequence[Run], seconds: float) -> VerifyResult:
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


def _run(script: Path, times: int, seconds: float) -> Iterator[Run]:
    done = 0
    if hasattr(os, "fork"):
        for run in _forked_runs(script, times, seconds):
            done += 1
            yield run
    for _ in range(times - done):
        yield _interpreter_run(script, seconds)


def _forked_runs(script: Path, times: int, seconds: float) -> Iterator[Run]:
    """Runs forked from one clean interpreter; fewer than asked when that interpreter dies."""
    at_once = max(1, min(2, os.cpu_count() or 1))
    side = [str(path) for path in side_files(script)]
    command = [
        sys.executable,
        "-I",
        str(CLEAN_RUNS),
        _torch_folder(),
        str(seconds),
        str(script),
        str(times),
        str(at_once),
        *side,
    ]
    with (
        tempfile.TemporaryDirectory(prefix="reprokit-") as folder,
        subprocess.Popen(
            command,
            cwd=folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said = json.loads(line)
                yield _tidied(said["exit_code"], said["stdout"], said["stderr"], said["folder"])
        finally:
            if process.poll() is None:
                process.terminate()


def _interpreter_run(script: Path, seconds: float) -> Run:
    """One run in a fresh interpreter."""
    with tempfile.TemporaryDirectory(prefix="reprokit-") as folder:
        for path in (script, *side_files(script)):
            shutil.copy(path, folder)
        command = [sys.executable, "-I", "-c", _RUN_ALONE, _torch_folder(), script.name]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return Run(None, "", "")
        except OSError as error:
            raise ReprokitError(f"cannot start `{sys.executable}`", note=str(error)) from error
        return _tidied(done.returncode, done.stdout, done.stderr, folder)


def _tidied(exit_code: int | None, stdout: str, stderr: str, folder: str) -> Run:
    """A run without what differs from one process to the next by nature: its folder and memory addresses."""

    def tidy(text: str) -> str:
        return re.sub(r"\b0x[0-9a-f]{6,}", "0x...", text.replace(os.path.realpath(folder), ".").replace(folder, "."))

    return Run(exit_code, tidy(stdout), tidy(stderr))


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ}


def _torch_folder() -> str:
    """The folder that holds torch, which may be one that isolated interpreters leave out (a user's site-packages)."""
    import torch

    return str(Path(torch.__file__).parent.parent)
