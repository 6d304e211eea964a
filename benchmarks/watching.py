"""Early warning on runs whose truth is known: thirty healthy ones, and thirty with a cause before the first NaN.

    python benchmarks/watching.py [--runs FILE ...] [--case NAME ...] [--jobs N] [--seed N] [--out DIR] [--json FILE]

Every run of `healthy_runs.py` and `planted_runs.py`, or of FILE, becomes a script and goes through `reprokit capture
--on nonfinite --on early`; a planted one also through plain `reprokit capture`. Healthy runs should have no events; of
planted ones the event, or the story of the NaN, should name the step and the layer that the cause first acts on. A
table goes to stderr, JSON to stdout. Exit code 1 when an aim is missed. README.md in this folder says how to read it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import inspect
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType

from command import JSON, new_parser, print_json
from corpus import is_inside
from planted_runs import Planted

from reprokit.errors import ReprokitError
from reprokit.snapshot.format import load

HERE = Path(__file__).parent
RUNS = (HERE / "healthy_runs.py", HERE / "planted_runs.py")
EARLY = ("--on", "nonfinite", "--on", "early")
CONTINUED = ("--after-capture", "continue")
STOPPED = ("--after-capture", "stop")
SOONEST, LATEST = 3, 40  # steps from a cause to the first NaN
MOST_ERRORS, MOST_WARNINGS = 0, 1  # of all healthy runs


@dataclass
class HealthyRow:
    """The events of a healthy run, as lines. ``problem``: it was not healthy, or reprokit failed."""

    case: str
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problem: str = ""


@dataclass
class PlantedRow:
    """The answers to a planted cause.

    ``bad_step`` is the first loss that was not finite, ``plain_step`` the failure of plain capture, ``story_step``
    where its story begins. ``step``, ``layer`` and ``source``, an input of the step, are the answer of ``--on early``,
    from the event of ``kind``; ``word`` is what it says of the setting that is wrong.
    """

    case: str
    began: int
    until: int
    layers: tuple[str, ...]
    bad_step: int | None = None
    plain_step: int | None = None
    story_step: int | None = None
    kind: str | None = None
    step: int | None = None
    layer: str | None = None
    source: str | None = None
    severity: str | None = None
    word: str | None = None
    said: str = ""
    problem: str = ""

    @property
    def step_ok(self) -> bool:
        """True if the answer is a step in which the cause begins."""
        return self._is_begin(self.step)

    @property
    def layer_ok(self) -> bool:
        """True if the answer is a layer, an input or a setting that the cause acts on, in a step at which it does."""
        named = (*self.layers, *(f"model.{layer}" for layer in self.layers))  # beside another root, such as a teacher
        is_there = self.source in self.layers or any(is_inside(self.layer, layer) for layer in named)
        return (is_there or self.word is not None) and self.step is not None and self.step >= self.began

    @property
    def plain_ok(self) -> bool:
        """True if plain capture names the begin."""
        return self._is_begin(self.plain_step)

    def _is_begin(self, step: int | None) -> bool:
        return step is not None and self.began <= step <= self.until


@dataclass(frozen=True)
class Answer:
    """What a run under capture left: the summary of its snapshot, its events, and what it printed."""

    summary: JSON | None
    events: list[JSON]
    losses: list[float]
    code: int
    said: str
    problem: str = ""

    @property
    def bad_step(self) -> int | None:
        """The first loss that is not finite."""
        return first_bad(self.losses)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 when an aim is missed."""
    options = _parse(argv)
    modules = [load_runs(file) for file in options.runs]
    runs = [run for module in modules for run in module.RUNS]
    healthy = [run for run in runs if not isinstance(run, Planted) and is_asked(run, options.case)]
    planted = [run for run in runs if isinstance(run, Planted) and is_asked(run.function, options.case)]
    allowed = {
        name: sum(getattr(module, "MOST_WRONG", {}).get(name, 0) for module in modules) for name in ("steps", "layers")
    }
    with tempfile.TemporaryDirectory(prefix="watching-") as scratch:
        runner = Runner((options.out or Path(scratch)).absolute(), options.seed, options.timeout)
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            planted_rows = pool.map(runner.planted, planted)
            healthy_rows = list(pool.map(runner.healthy, healthy))
            rows = list(planted_rows)
    print(table(healthy_rows, rows, allowed), file=sys.stderr)
    summary = summarise(healthy_rows, rows, allowed)
    print_json(summary, options.json)
    return 1 if summary["missed"] else 0


def load_runs(file: Path) -> ModuleType:
    """A file of runs as a module."""
    known = sys.modules.get(file.stem)  # once: `Planted` is one class
    if known is not None and known.__file__ is not None and file.exists() and file.samefile(known.__file__):
        return known
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.exists():
        raise SystemExit(f"watching.py: no file of runs: {file}")
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_asked(function: Callable[[int], None], names: Sequence[str] | None) -> bool:
    """True if a run is one of those that `--case` names."""
    return not names or function.__name__ in names


def script_of(function: Callable[[int], None], seed: int) -> str:
    """The body of a function as a script of its own."""
    lines, _ = inspect.getsourcelines(function)
    begin = next(number for number, line in enumerate(lines) if line.startswith("def ")) + 1
    while not lines[begin].rstrip().endswith('"""'):
        begin += 1
    return HEAD.format(seed=seed) + textwrap.dedent("".join(lines[begin + 1 :]))


HEAD = """\
import copy
import math
import random
from collections import OrderedDict, deque

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed({seed})
random.seed({seed})
"""


@dataclass(frozen=True)
class Runner:
    """Runs scripts under capture, each in a folder of its own."""

    folder: Path
    seed: int
    timeout: float

    def healthy(self, function: Callable[[int], None]) -> HealthyRow:
        """The row of a healthy run."""
        answer = self._capture(function, "early", [*EARLY, *CONTINUED])
        row = HealthyRow(function.__name__)
        row.errors = [_line(event) for event in answer.events if event["severity"] == "error"]
        row.warnings = [_line(event) for event in answer.events if event["severity"] != "error"]
        if answer.summary is not None and not row.errors:
            row.errors.append(
                f"captured: {answer.summary['failure']['kind']} at step {answer.summary['failure']['step']}"
            )
        row.problem = answer.problem
        if answer.code != 0 or answer.bad_step is not None:
            row.problem = f"exit code {answer.code}, first bad loss {answer.bad_step}: {answer.said[-300:]}"
        return row

    def planted(self, run: Planted) -> PlantedRow:
        """The row of a planted run."""
        row = PlantedRow(run.function.__name__, run.began, run.until, run.layers)
        plain = self._capture(run.function, "plain", CONTINUED)
        row.bad_step = plain.bad_step
        if plain.summary is not None:
            row.plain_step = plain.summary["failure"]["step"]
            row.story_step = next((item["step"] for item in plain.summary.get("story", ())), None)
        early = self._capture(run.function, "early", [*EARLY, *STOPPED])
        row.kind, row.severity, row.step, row.layer = begin_of(early)
        event = early.summary["failure"].get("event") if early.summary is not None else None
        row.source = event.get("source") if event else None
        row.said = said_in(early.said)
        found = re.search(run.words, row.said) if run.words else None
        row.word = found[0] if found else None
        row.problem = plain.problem or early.problem or untruth(run, plain.bad_step)
        return row

    def _capture(self, function: Callable[[int], None], name: str, options: Iterable[str]) -> Answer:
        folder = self.folder / function.__name__ / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(script_of(function, self.seed), encoding="utf-8")
        snapshot, events = folder / "run.repro.pt", folder / "run.events.jsonl"
        for file in (snapshot, events):
            file.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "reprokit", "capture", "-o", str(snapshot), *options, "train.py"],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=self.timeout,
        )
        summary, problem = None, ""
        try:
            summary = load(snapshot).summary() if snapshot.exists() else None
        except ReprokitError as error:
            problem = f"{name}: {error}"
        lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
        found = [json.loads(line) for line in lines]
        return Answer(summary, found, losses_in(done.stdout), done.returncode, done.stderr, problem)


def losses_in(text: str) -> list[float]:
    """The losses of a run, which prints a step and its loss in a line, and may print other lines."""
    return [float(line.split()[1]) for line in text.splitlines() if line.split()[:1] and line.split()[0].isdigit()]


def said_in(text: str) -> str:
    """What reprokit said of events and failures; the names of files, which hold the words of a run, left out."""
    lines = [line for line in text.splitlines() if line.startswith("reprokit:")]
    return "\n".join(re.sub(r" -> \S+$", "", line) for line in lines)


def first_bad(losses: Sequence[float]) -> int | None:
    """The first step whose loss is not finite."""
    return next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)


def begin_of(answer: Answer) -> tuple[str | None, str | None, int | None, str | None]:
    """Kind, severity, step and layer of what early warning says: its snapshot, or else its first event."""
    if answer.summary is not None:
        failure, story = answer.summary["failure"], answer.summary.get("story", ())
        event = failure.get("event")
        told = (event["place"] for event in answer.events if event.get("snapshot") and event.get("place"))
        place = next(told, None)
        layer = next((item["module"] for item in story if item["module"]), place)
        if failure["kind"] in ("dead", "silent") and place is not None:
            layer = place  # the story may begin with another one
        if event:
            own = failure["module"]
            is_root = own is not None and own.startswith("<")  # which is no layer
            return failure["kind"], "error", event["began_at"], layer if own is None or is_root else own
        if story:
            return "story", "error", story[0]["step"], layer
        return failure["kind"], "error", failure["step"], failure["module"] or layer
    event = min(answer.events, key=lambda event: event["severity"] != "error", default=None)
    if event is None:
        return None, None, None, None
    return event["kind"], event["severity"], event.get("began_at"), event.get("place")


def untruth(run: Planted, bad_step: int | None) -> str:
    """What contradicts the truth beside a run; empty if nothing does."""
    if run.is_finite is None:
        return ""
    if run.is_finite:
        return "" if bad_step is None else f"a loss of step {bad_step} is not finite"
    is_near = bad_step is not None and run.began + SOONEST <= bad_step <= run.began + LATEST
    return "" if is_near else f"the first bad loss is that of step {bad_step}"


def _line(event: JSON) -> str:
    return f"{event['kind']} at step {event['step']}: {event['evidence']}"


# -- reporting --------------------------------------------------------------------------------------------------------


def summarise(healthy: Sequence[HealthyRow], planted: Sequence[PlantedRow], allowed: dict[str, int]) -> JSON:
    """Counts, the aims that were missed, and all rows."""
    counts = {
        "errors": sum(len(row.errors) for row in healthy),
        "warnings": sum(len(row.warnings) for row in healthy),
        "steps": sum(row.step_ok for row in planted),
        "layers": sum(row.layer_ok for row in planted),
        "plain_steps": sum(row.plain_ok for row in planted),
    }
    aims = {
        "errors": counts["errors"] <= MOST_ERRORS,
        "warnings": counts["warnings"] <= MOST_WARNINGS,
        "steps": counts["steps"] >= len(planted) - allowed["steps"],
        "layers": counts["layers"] >= len(planted) - allowed["layers"],
        "plain_steps": counts["plain_steps"] == 0,
        "problems": not any(row.problem for row in (*healthy, *planted)),
    }
    return {
        "healthy": len(healthy),
        "planted": len(planted),
        **counts,
        "missed": [name for name, is_met in aims.items() if not is_met],
        "rows": [*map(asdict, healthy), *({**asdict(row), "ok": [row.step_ok, row.layer_ok]} for row in planted)],
    }


def table(healthy: Sequence[HealthyRow], planted: Sequence[PlantedRow], allowed: dict[str, int]) -> str:
    """The rows as fixed-width text, with a line of counts below."""
    lines = [f"{'healthy':28} {'error':>6} {'warning':>8}"] if healthy else []
    for row in healthy:
        lines.append(f"{row.case:28} {len(row.errors):6} {len(row.warnings):8}")
        lines += [f"  {text}" for text in (*row.errors, *row.warnings, row.problem) if text]
    if planted:
        head = f"{'planted':28} {'began':>8} {'found':>6} {'':3} {'layer':20} {'':3} {'by':14}"
        lines.append(f"{head} {'NaN':>5} {'plain':>6} story")
    for case in planted:
        began = f"{case.began}" if case.until == case.began else f"{case.began}-{case.until}"
        by = f"{case.kind or 'nothing'}{'' if case.severity in (None, 'error') else f' ({case.severity})'}"
        place = _text(case.layer or case.word)
        lines.append(
            f"{case.case:28} {began:>8} {_text(case.step):>6} {_mark(case.step_ok):3} {place:20} "
            f"{_mark(case.layer_ok):3} {by:14} {_text(case.bad_step):>5} {_text(case.plain_step):>6} "
            f"{_text(case.story_step)}"
        )
        lines += [f"  {case.problem}"] if case.problem else []
    summary = summarise(healthy, planted, allowed)
    lines.append(
        f"{len(healthy)} healthy: {summary['errors']} errors, {summary['warnings']} warnings; {len(planted)} planted: "
        f"{summary['steps']} steps right (plain capture: {summary['plain_steps']}), {summary['layers']} layers right; "
        f"aims missed: {', '.join(summary['missed']) or 'none'}"
    )
    return "\n".join(lines)


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _mark(is_right: bool) -> str:
    return "yes" if is_right else "NO"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--runs", nargs="+", type=Path, default=RUNS, metavar="FILE", help="files of runs")
    parser.add_argument("--case", nargs="+", action="extend", metavar="NAME", help="only these runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of every run; rules were made with 0 (default 0)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each process (default 300)")
    parser.add_argument("--out", type=Path, help="keep all files here")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
