"""What a capture takes beside the time of healthy steps: memory, and the time from a failure to the file.

    python benchmarks/capture.py [--shapes NAME ...] [--parts memory failures process] [--steps N] [--json FILE]

Every measurement is a process of its own, so that its peak memory is its own. Memory: the same loop bare and watched.
Failures: the loss goes bad in the forward pass; only a gradient does; the optimizer ruins the parameters, which is
found by going back. Process: a script from its start to its end, by itself and under `reprokit capture`. The table goes
to stderr, JSON to stdout. README.md in this folder says how to read them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from command import JSON, new_parser, print_json

STEPS = {"mlp": 400, "gpt": 16, "cnn": 100, "narrow": 100, "rl": 400, "many-parameters": 30, "large": 8}  # good steps
PARTS = ("memory", "failures", "process")
WITHOUT_FAILURES = ("rl", "large")  # a loop of its own; a file of 1.5 GiB
PROCESS_STEPS = {"mlp": 20_000}  # shape -> steps of about 30 seconds
RUNS = ("bare", "watched")
SCRIPT = "import sys; sys.path.insert(0, {folder!r})\nfrom shapes import make\ntraining = make({shape!r})\n"
FAILURES = {"loss": "forward", "gradient": "backward", "optimizer": "optimizer"}  # name -> phase expected
STEPS_AFTER = 300  # a failure that nobody noticed after so many more steps is missed
WRITES = 3


# -- in a process of its own ------------------------------------------------------------------------------------------


def peak_bytes() -> int:
    """The most memory that was resident in this process so far."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


def measure_memory(shape: str, steps: int, is_watched: bool) -> JSON:
    """Train ``steps`` steps, each on a batch with memory of its own, as a data loader gives them."""
    from reprokit.capture.session import Session

    training = _fresh_training(shape)
    session = Session(quiet=True)
    with session if is_watched else contextlib.nullcontext():
        for _ in range(steps):
            training.step()
        if is_watched and not session._recorder.enabled:
            raise RuntimeError(f"the session stopped watching a healthy training: {session.results}")
        copies = sum(copy.num_bytes for copy in session._loop.world.copies)
        held = len(session._loop.tape.marks)
        peak = peak_bytes()
    batch = sum(tensor.numel() * tensor.element_size() for tensor in training.batches[0]) if training.batches else 0
    return {
        "peak_bytes": peak,
        "copy_bytes": copies,
        "held_steps": held,
        "batch_bytes": batch,
        "state_bytes": training.state_bytes(),
    }


def _fresh_training(shape: str) -> Any:
    import torch
    from shapes import make

    class FreshBatches(list[Any]):
        """Batches that are copied whenever they are asked for."""

        def __getitem__(self, position: Any) -> Any:
            return tuple(torch.from_numpy(array.copy()) for array in super().__getitem__(position))

    torch.set_num_threads(1)
    training = make(shape)
    arrays = [tuple(tensor.numpy() for tensor in batch) for batch in training.batches]
    training.batches = FreshBatches(arrays)
    return training


def measure_failure(shape: str, steps: int, failure: str) -> JSON:
    """Train ``steps`` good steps under capture, then a bad one; how long until its file is on disk?"""
    expected = {"expected_step": steps, "expected_phase": FAILURES[failure]}
    with tempfile.TemporaryDirectory() as folder:
        return {**expected, **_fail(shape, steps, failure, Path(folder))}


def _fail(shape: str, steps: int, failure: str, folder: Path) -> JSON:
    from reprokit.capture.mode import CaptureStop
    from reprokit.capture.session import Session

    training = _fresh_training(shape)
    training.step()
    loop = FailingLoop(training, failure, bad_step=steps)
    session = Session(quiet=True, directory=folder)
    try:
        with session:
            while loop.number < steps + STEPS_AFTER:
                loop.step()
    except CaptureStop:
        pass
    end = time.perf_counter()
    if not session.snapshots:
        return {"captured": False}
    return {
        "captured": True,
        **loop.summary(end),
        **_describe(session.snapshots[0]),
        "write_s": _write_seconds(session.snapshots[0]),
        "environment_s": _environment_seconds(),
    }


class FailingLoop:
    """A training loop whose step ``bad_step`` fails; notes when the failure was and when the loop last had control."""

    def __init__(self, training: Any, failure: str, bad_step: int) -> None:
        self.number = 0
        self._training = training
        self._failure = failure
        self._bad_step = bad_step
        self._failed_at: float | None = None
        self._last = 0.0
        self._seconds: list[float] = []

    def step(self) -> None:
        """One step; the forward pass and the loss are the shape's own, with the failure added."""
        import torch
        from torch.nn import functional as F

        training = self._training
        is_bad = self.number == self._bad_step
        started = time.perf_counter()
        inputs, targets = training.batches[self.number % len(training.batches)]
        training.optimizer.zero_grad()
        logits = training.model(inputs)
        if is_bad and self._failure == "loss":
            self._fail()
            logits = (logits - logits.detach() - 1.0).log()
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        if is_bad and self._failure == "gradient":
            zeros = logits - logits.detach()
            loss = loss + torch.where(zeros > 0, zeros.sqrt(), zeros).sum()
            self._fail()
        self._last = time.perf_counter()
        loss.backward()
        if training.clip is not None:
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.clip)
        if is_bad and self._failure == "optimizer":
            training.optimizer.param_groups[0]["lr"] = float("inf")
            self._fail()
        self._last = time.perf_counter()
        training.optimizer.step()
        self._seconds.append(time.perf_counter() - started)
        self.number += 1

    def _fail(self) -> None:
        self._failed_at = time.perf_counter()

    def summary(self, end: float) -> JSON:
        """Seconds: of a good step, from the failure to the end, and of these until something was noticed."""
        assert self._failed_at is not None
        return {
            "step_s": statistics.median(self._seconds[: self._bad_step]),
            "total_s": end - self._failed_at,
            "noticed_s": max(self._last - self._failed_at, 0.0),
            "steps_until_noticed": self.number - self._bad_step,
        }


def _describe(path: Path) -> JSON:
    """What the snapshot says of the failure, and its size."""
    from reprokit.snapshot.format import load

    snapshot = load(path)
    return {
        "file_bytes": path.stat().st_size,
        "step": snapshot.step,
        "phase": snapshot.failure.phase,
        "call": snapshot.failure.call,
        "observed_at": snapshot.observed_at,
        "fidelity": snapshot.fidelity,
        "fidelity_note": snapshot.fidelity_note,
    }


def _environment_seconds() -> float:
    """Seconds for the description of the environment, which is part of every snapshot whatever the model."""
    from reprokit.snapshot.environment import collect_environment

    started = time.perf_counter()
    collect_environment()
    return time.perf_counter() - started


def _write_seconds(path: Path) -> float:
    """Median of the seconds that writing the same bytes takes, until they are on disk."""
    content = path.read_bytes()
    copy = path.with_suffix(".copy")
    seconds = []
    for _ in range(WRITES):
        started = time.perf_counter()
        with open(copy, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        seconds.append(time.perf_counter() - started)
        copy.unlink()
    return statistics.median(seconds)


# -- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; prints the table and the JSON."""
    options = _parser().parse_args(argv)
    result: JSON = {"schema": 1, "python": platform.python_version(), "shapes": {}}
    os.environ["OMP_NUM_THREADS"] = "1"
    with _new_process() as shared:  # started only when used
        run = functools.partial(_run_in, shared) if options.quick else _run_alone
        for shape in options.shapes:
            steps = options.steps or (6 if options.quick else STEPS[shape])
            repeats = 1 if options.quick else options.repeats
            result["shapes"][shape] = measured = measure(shape, steps, repeats, run, options.parts)
            if "process" in options.parts and shape in PROCESS_STEPS:
                measured["process"] = measure_process(shape, steps if options.quick else PROCESS_STEPS[shape], repeats)
            print(table(shape, measured), file=sys.stderr, flush=True)
    print_json(result, options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=STEPS, default=list(STEPS), metavar="SHAPE")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--steps", type=int, help="good steps in each measurement (default: by shape)")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each peak of memory (default 3)")
    parser.add_argument("--quick", action="store_true", help="a few steps in one process, to see that all of it runs")
    return parser


def _new_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _run_in(process: ProcessPoolExecutor, measurement: Callable[..., JSON], *args: Any) -> JSON:
    return process.submit(measurement, *args).result()


def _run_alone(measurement: Callable[..., JSON], *args: Any) -> JSON:
    with _new_process() as process:
        return _run_in(process, measurement, *args)


def measure_process(shape: str, steps: int, repeats: int) -> JSON:
    """Seconds of a script that trains ``steps`` steps, by itself and under `reprokit capture`, in turns; medians."""
    seconds: dict[str, list[tuple[float, float]]] = {"bare": [], "watched": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        head = SCRIPT.format(folder=str(Path(__file__).resolve().parent), shape=shape)
        script.write_text(f"{head}for _ in range({steps}):\n    training.step()\n", encoding="utf-8")
        commands = {"bare": [str(script)], "watched": ["-m", "reprokit", "capture", str(script)]}
        for _ in range(repeats):
            for name, command in commands.items():
                started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run([sys.executable, *command], cwd=folder, check=True, capture_output=True)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                seconds[name].append((time.perf_counter() - started, cpu))
    medians = {name: map(statistics.median, zip(*runs, strict=True)) for name, runs in seconds.items()}
    return {"steps": steps, **{name: {"wall_s": wall, "cpu_s": cpu} for name, (wall, cpu) in medians.items()}}


def measure(shape: str, steps: int, repeats: int, run: Callable[..., JSON], parts: Sequence[str] = PARTS) -> JSON:
    """Everything about one shape; ``run`` calls in another process. Ratios are in steps of the same process."""
    memory = _measure_peaks(shape, steps, repeats, run) if "memory" in parts else None
    failures = {}
    for failure in FAILURES if "failures" in parts and shape not in WITHOUT_FAILURES else ():
        failures[failure] = row = run(measure_failure, shape, steps, failure)
        if row["captured"]:
            row["steps_beyond_writing"] = (row["total_s"] - row["write_s"]) / row["step_s"]
            row["steps_without_environment"] = row["steps_beyond_writing"] - row["environment_s"] / row["step_s"]
            row["is_right"] = row["step"] == row["expected_step"] and row["phase"] == row["expected_phase"]
    return {"steps": steps, "memory": memory, "failures": failures}


def _measure_peaks(shape: str, steps: int, repeats: int, run: Callable[..., JSON]) -> JSON:
    bare = [run(measure_memory, shape, steps, False) for _ in range(repeats)]
    watched = [run(measure_memory, shape, steps, True) for _ in range(repeats)]
    peaks = [statistics.median(run["peak_bytes"] for run in runs) for runs in (bare, watched)]
    return {
        **{name: watched[-1][name] for name in ("copy_bytes", "held_steps", "batch_bytes", "state_bytes")},
        "bare_peak_bytes": peaks[0],
        "watched_peak_bytes": peaks[1],
        "extra_bytes": peaks[1] - peaks[0],
    }


def table(shape: str, measured: JSON) -> str:
    """The results of one shape as text."""
    memory, process, lines = measured["memory"], measured.get("process"), []
    if memory is not None:
        sizes = {name: f"{memory[name] / 2**20:.1f} MiB" for name in memory if name.endswith("_bytes")}
        lines.append(
            f"{shape}: {measured['steps']} steps; peak bare {sizes['bare_peak_bytes']}, watched +{sizes['extra_bytes']}"
            f" (copies {sizes['copy_bytes']} of a state of {sizes['state_bytes']};"
            f" {memory['held_steps']} steps held, batch {sizes['batch_bytes']})"
        )
    if process is not None:
        clocks = (f"{name} {process[name]['wall_s']:.2f} s ({process[name]['cpu_s']:.2f} s of CPU)" for name in RUNS)
        lines.append(f"{shape}: a process of {process['steps']} steps: {', '.join(clocks)}")
    if measured["failures"]:
        lines.append(
            f"  {'failure':10} {'total':>10} {'noticed':>10} {'environment':>11} {'writing':>10} {'step':>10}"
            f" {'steps':>8} {'file':>10}  what was saved"
        )
    for failure, row in measured["failures"].items():
        if not row["captured"]:
            lines.append(f"  {failure:10} missed")
            continue
        clocks = ("total_s", "noticed_s", "environment_s", "write_s", "step_s")
        times = " ".join(f"{row[name] * 1e3:7.1f} ms" for name in clocks)
        lines.append(
            f"  {failure:10} {times} {row['steps_beyond_writing']:8.1f} {row['file_bytes'] / 2**20:6.1f} MiB"
            f"  step {row['step']}, {row['phase']}, {row['fidelity']}{'' if row['is_right'] else ': WRONG'}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
