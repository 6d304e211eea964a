"""The small training scripts of the frameworks: in the test's own folder, and one long run of each without capture."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import run_python_in

SCRIPTS = Path(__file__).parent / "scripts"

# What each script does in its run without capture. Frameworks take seconds to start, so one run serves many tests.
PLAIN = {
    "train_transformers.py": "healthy raise healthy:callback nan:callback raise:callback",
    "train_lightning.py": (
        "automatic:healthy manual:healthy closure:healthy manual:raise automatic:raise "
        "automatic:healthy:callback automatic:nan:callback automatic:raise:callback"
    ),
    "train_accelerate.py": "healthy nan raise healthy",
    "train_ignite.py": "healthy raise",
}


@dataclass(frozen=True)
class Finished:
    """A run that ended, and the folder it ran in."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def modes(self) -> dict[str, list[str]]:
        """What was printed in each mode, without the times that frameworks print."""
        modes: dict[str, list[str]] = {}
        for line in self.stdout.splitlines():
            if line.startswith("mode "):
                lines = modes[line.removeprefix("mode ")] = []
            elif "runtime" not in line:
                lines.append(line)
        return modes

    @property
    def tracebacks(self) -> list[str]:
        """The tracebacks on stderr, from the frame on that both Python and a script that handles them show."""
        parts = self.stderr.split("Traceback (most recent call last):\n")[1:]
        return [_without_first_frame(part) for part in parts]


Run = Callable[..., Finished]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run ``python *words`` in the test's own folder, beside the scripts."""
    return functools.partial(execute, copy_scripts(tmp_path))


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of a script without capture, made when a test first asks for it."""

    @functools.cache
    def run(script: str) -> Finished:
        return execute(copy_scripts(tmp_path_factory.mktemp("plain")), script, *PLAIN[script].split())

    return run


def copy_scripts(folder: Path) -> Path:
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def execute(folder: Path, *words: str) -> Finished:
    done = run_python_in(folder, *words)  # imports the framework under capture
    stdout, stderr = (text.replace(str(folder), ".") for text in (done.stdout, done.stderr))
    return Finished(done.returncode, stdout, stderr, folder)


def _without_first_frame(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.startswith("reprokit: ")]
    end = next((number for number, line in enumerate(lines) if not line.startswith(" ")), len(lines)) + 1
    start = next(number for number, line in enumerate(lines) if line.endswith("in run_modes"))
    return "\n".join(lines[start:end])
