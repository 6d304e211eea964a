"""How small, in how many checks, how fast: the reducer beside torch's own minifier on the same graphs in the same run.

    python benchmarks/shrink.py [--sizes 50 200 800] [--parts graphs kinds large] [--repeats N] [--json FILE]

Graphs of three sizes with a fault in the middle; failures that are no fault of a forward graph, which a graph minifier
cannot be asked about; and a training step of GPT-2, in processes of their own. All snapshots are captured from loops.
The part `answers` times the whole command, from its start with an empty interpreter: to the first `repro.py`, and to
its end.
The table goes to stderr, JSON to stdout. README.md in this folder says how to read them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import graphs
import minifier
import torch
from capture import peak_bytes
from command import JSON, new_parser, print_json
from minifier import Clock

import reprokit
from reprokit.program.interpreter import run
from reprokit.render.sources import reduction_script
from reprokit.render.verify import verify
from reprokit.shrink.reducer import shrink
from reprokit.shrink.reduction import Reduction
from reprokit.snapshot.format import Snapshot, load
from reprokit.whatif import NOT_DONE

SIZES = (50, 200, 800)
PARTS = ("graphs", "kinds", "large", "answers")
CAUSES = tuple(graphs.GPT2_FAULTS)
ANSWERED = ("backward_only", "two_calls", "exception")  # kinds whose whole command is timed
LARGE_THREADS = 2
TINY = {"num_layers": 2, "width": 64, "vocabulary": 100, "length": 16}
GIB = 2**30

# What a graph of any size and the large step may take; what exceeds one of these is listed under `misses`.
GRAPH_LIMITS = {"checks": 15, "instrumented_runs": 4, "seconds": 0.5, "calls": 2, "elements": 4}
LARGE_LIMITS = {"shrink_s": 30.0, "above_model_bytes": 4 * GIB}
# Of the command, on an idle machine with two cores.
SMALL_ANSWERS = {"first_repro_s": 2.0, "total_s": 8.0}
LARGE_ANSWERS = {"first_repro_s": 5.0, "total_s": 15.0}
SECONDS_BETWEEN_LOOKS = 0.005


@dataclass(frozen=True)
class Reduced:
    """What the reducer made of a snapshot.

    ``replays`` says how often the snapshot failed again, ``instrumented_runs`` counts the runs that record values.
    ``alone``: the repro needs no file beside it. ``repro_fails``: it ended with 1 in a clean process. ``is_right``:
    the failure is the one that was planted. ``note`` is what the reducer said when it gave no result.
    """

    checks: int = 0
    replays: str = ""
    instrumented_runs: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    calls: int | None = None
    elements: int | None = None
    one_minimal: bool = False
    alone: bool = False
    repro_fails: bool = False
    is_right: bool = False
    note: str | None = None


# -- one snapshot -----------------------------------------------------------------------------------------------------


def capture(case: graphs.Case, file: Path) -> Snapshot | None:
    """Train under capture until the case fails; ``None`` when nothing was saved."""
    with contextlib.suppress(Exception), reprokit.capture(file, quiet=True, watch="every-step"):
        case.train()  # a case may raise: that is then what was captured
    return load(file) if file.exists() else None


def reduce(snapshot: Snapshot, case: graphs.Case, repeats: int) -> Reduced:
    """Shrink a snapshot ``repeats`` times; the seconds are medians."""
    spent = []
    for _ in range(repeats):
        clock = Clock()
        try:
            with _recordings() as recordings:
                reduction = shrink(snapshot, check=case.check)
        except Exception as error:
            return Reduced(**clock.read(), note=f"{type(error).__name__}: {error}")
        spent.append(clock.read())
    seconds = {name: statistics.median(one[name] for one in spent) for name in spent[0]}
    return _describe(reduction, snapshot, case.fault, len(recordings), seconds)


def _describe(
    reduction: Reduction, snapshot: Snapshot, fault: graphs.Fault, instrumented_runs: int, seconds: dict[str, float]
) -> Reduced:
    summary = reduction.summary()
    script = reduction_script(reduction, snapshot)
    with tempfile.TemporaryDirectory() as folder:
        repro_fails = verify(script.write(Path(folder)), 1).fails
    return Reduced(
        checks=summary["checks"],
        replays=summary["reproduces"],
        instrumented_runs=instrumented_runs,
        **seconds,
        calls=summary["calls"],
        elements=summary["elements"],
        one_minimal=summary["one_minimal"],
        alone=not script.side,
        repro_fails=repro_fails,
        is_right=shows(reduction, fault),
    )


def shows(reduction: Reduction, fault: graphs.Fault) -> bool:
    """Whether what a reduction shows is what was planted."""
    failure = reduction.failure
    call = (failure.call or "").rpartition(".")[2]
    return failure.phase == fault.phase and fault.call in (call, failure.backward_node, failure.kind)


@contextlib.contextmanager
def _recordings() -> Iterator[list[int]]:
    """Grows by the length of a program whenever its values are recorded.

    The context is left out meanwhile: the minifier has no such thing, and the minimum does not wait for it.
    """
    found: list[int] = []

    def counted(program: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(len(program.calls))
        return run(program, *args, **kwargs)

    with (
        mock.patch.object(import_module("reprokit.shrink.recording"), "run", counted),
        mock.patch.object(import_module("reprokit.shrink.reducer"), "find_context", lambda *_: None),
    ):
        yield found


# -- graphs and kinds -------------------------------------------------------------------------------------------------


def measure_graph(name: str, size: int, repeats: int) -> JSON:
    """One graph, by the reducer and by torch's minifier with both checks."""
    case = graphs.make_stack(name, size)
    with tempfile.TemporaryDirectory() as folder:
        snapshot = capture(case, Path(folder) / "snapshot.pt")
    if snapshot is None:
        raise RuntimeError(f"`{name}` of {size} calls was not captured")
    module, inputs = minifier.graph_of(case.model, case.batches[-1])
    strict = minifier.same_origin(module, inputs)
    return {
        "name": name,
        "size": size,
        "calls": snapshot.program.num_calls,
        "graph_calls": minifier.num_calls(module.graph),
        "elements": snapshot.num_elements,
        "reprokit": asdict(reduce(snapshot, case, repeats)),
        "minifier": asdict(_minify(module, inputs, minifier.is_not_finite, strict, repeats)),
        "minifier_strict": asdict(_minify(module, inputs, strict, strict, repeats)),
    }


def _minify(module: Any, inputs: Any, check: minifier.Check, strict: minifier.Check, repeats: int) -> minifier.Minified:
    """The run of the minifier whose seconds are the median one."""
    runs = sorted((minifier.minify(module, inputs, check, strict) for _ in range(repeats)), key=lambda r: r.seconds)
    return runs[(repeats - 1) // 2]


def measure_kind(name: str, repeats: int) -> JSON:
    """A failure of another kind: by the reducer, and what torch's minifier says of the forward graph."""
    case = graphs.KINDS[name]()
    with tempfile.TemporaryDirectory() as folder:
        snapshot = capture(case, Path(folder) / "snapshot.pt")
    if snapshot is None:
        return {"name": name, "reprokit": asdict(Reduced(note="not captured")), "minifier": None}
    module, inputs = minifier.graph_of(case.model, case.batches[-1])
    return {
        "name": name,
        "calls": snapshot.program.num_calls,
        "elements": snapshot.num_elements,
        "reprokit": asdict(reduce(snapshot, case, repeats if case.check is None else 1)),  # compiling takes long
        "minifier": asdict(minifier.minify(module, inputs, minifier.is_not_finite, _never)),
    }


def _never(module: Any, inputs: Any) -> bool:
    """The strict check where no call of the forward graph is at fault."""
    return False


# -- the large step, in processes of its own --------------------------------------------------------------------------


def measure_large(cause: str, dimensions: JSON) -> JSON:
    """Capture a failing step of GPT-2 in one process, shrink it in another one."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "snapshot.pt")
        captured = _in_process({"do": "capture", "cause": cause, "file": file, **dimensions})
        return {"cause": cause, **captured, **_in_process({"do": "shrink", "cause": cause, "file": file})}


def _in_process(wanted: JSON) -> JSON:
    command = [sys.executable, __file__, "--one", json.dumps(wanted)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(LARGE_THREADS)}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    if finished.returncode != 0:
        raise RuntimeError(f"{wanted} ended with {finished.returncode}:\n{finished.stderr}")
    return dict(json.loads(finished.stdout.splitlines()[-1]))


def run_one(wanted: JSON) -> JSON:
    """What a process of its own is asked to do."""
    torch.set_num_threads(LARGE_THREADS)
    file = Path(wanted.pop("file"))
    action, cause = wanted.pop("do"), wanted.pop("cause")
    if action == "capture":
        return capture_large(graphs.make_gpt2(cause, **wanted), file)
    return shrink_large(file, graphs.GPT2_FAULTS[cause])


def capture_large(case: graphs.Case, file: Path) -> JSON:
    """Write the snapshot of a large step."""
    started = time.perf_counter()
    if capture(case, file) is None:
        raise RuntimeError("the large step was not captured")
    return {
        "parameters": sum(parameter.numel() for parameter in case.model.parameters()),
        "capture_s": time.perf_counter() - started,
        "file_bytes": file.stat().st_size,
    }


def shrink_large(file: Path, fault: graphs.Fault) -> JSON:
    """Load and shrink. Memory: the highest that the process took, less an empty one, less the snapshot's tensors."""
    before = peak_bytes()
    started = time.perf_counter()
    snapshot = load(file)
    load_s = time.perf_counter() - started
    tensors = {tensor.untyped_storage().data_ptr(): tensor for tensor in snapshot.tensors.values()}
    model_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())
    clock = Clock()
    with _recordings() as recordings:
        reduction = shrink(snapshot)
    seconds = clock.read()
    peak = peak_bytes()
    return {
        "calls": snapshot.program.num_calls,
        "elements": snapshot.num_elements,
        "load_s": load_s,
        "shrink_s": seconds["seconds"],
        "model_bytes": model_bytes,
        "above_model_bytes": peak - before - model_bytes,
        "reprokit": asdict(_describe(reduction, snapshot, fault, len(recordings), seconds)),
    }


# -- the command line: when there is something to look at -------------------------------------------------------------


def measure_answer(name: str, dimensions: JSON) -> JSON:
    """`reprokit shrink` of a kind of failure or a cause of GPT-2's: seconds to the first repro and to the end."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "snapshot.pt"
        is_large = name in CAUSES
        if is_large:
            _in_process({"do": "capture", "cause": name, "file": str(file), **dimensions})
        elif capture(graphs.KINDS[name](), file) is None:
            raise RuntimeError(f"`{name}` was not captured")
        return {"name": name, "is_large": is_large, **_timed_command(file, Path(folder) / "results")}


def _timed_command(file: Path, results: Path) -> JSON:
    words = [sys.executable, "-m", "reprokit", "shrink", str(file), "-o", str(results), "--json", "-q"]
    environment = {**os.environ, "PYTHONPATH": str(Path(reprokit.__file__).parent.parent)}
    environment.pop("REPROKIT_SHRINK_NO_WHATIF", None)
    first, started, used = None, time.perf_counter(), _seconds_of_children()
    with tempfile.TemporaryFile() as said, subprocess.Popen(words, stdout=said, env=environment) as process:
        while process.poll() is None:
            if first is None and (results / "repro.py").exists():
                first = time.perf_counter() - started
            time.sleep(SECONDS_BETWEEN_LOOKS)
        total = time.perf_counter() - started
        if process.returncode != 0:
            raise RuntimeError(f"`reprokit shrink` ended with {process.returncode}")
        said.seek(0)
        summary = json.load(said)
    variants = [row for table in summary["whatif"]["tables"].values() for row in table]
    return {
        "first_repro_s": first,
        "total_s": total,
        "cpu_s": _seconds_of_children() - used,
        "verified": summary["repro"]["verified"],
        "variants": len(variants),
        "variants_not_reached": sum(row["detail"].startswith(NOT_DONE) for row in variants),
    }


def _seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# -- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; prints the table and the JSON."""
    options = _parser().parse_args(argv)
    if options.one is not None:
        print(json.dumps(run_one(json.loads(options.one))))
        return 0
    torch.set_num_threads(1)
    _warm_up()
    result: JSON = {"schema": 1, "python": platform.python_version(), "torch": torch.__version__}
    for part, measure_part in MEASURES.items():
        if part in options.parts:
            result[part] = measure_part(options)
            print(TABLES[part](result[part]), file=sys.stderr, flush=True)
    result["misses"] = misses(result)
    print("\n".join(f"over the limit: {miss}" for miss in result["misses"]), file=sys.stderr)
    print_json(result, options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), metavar="CALLS", help="of the graphs")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each tool on each graph (default 3)")
    parser.add_argument("--causes", nargs="+", choices=CAUSES, default=list(CAUSES), help="what fails in GPT-2")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers of GPT-2, to see that everything runs")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a single measurement, in this process
    return parser


def _warm_up() -> None:
    """Both tools load much of torch when they are first used."""
    measure_graph(next(iter(graphs.PARTS)), min(SIZES), 1)


def _measure_graphs(options: argparse.Namespace) -> list[JSON]:
    return [measure_graph(name, size, options.repeats) for name in graphs.PARTS for size in options.sizes]


def _measure_kinds(options: argparse.Namespace) -> list[JSON]:
    return [measure_kind(name, options.repeats) for name in graphs.KINDS]


def _measure_large(options: argparse.Namespace) -> list[JSON]:
    dimensions = TINY if options.tiny else {}
    return [measure_large(cause, dimensions) for cause in options.causes]


def _measure_answers(options: argparse.Namespace) -> list[JSON]:
    dimensions = TINY if options.tiny else {}
    return [measure_answer(name, dimensions) for name in (*ANSWERED, *options.causes)]


MEASURES: dict[str, Callable[[argparse.Namespace], list[JSON]]] = {
    "graphs": _measure_graphs,
    "kinds": _measure_kinds,
    "large": _measure_large,
    "answers": _measure_answers,
}


def misses(result: JSON) -> list[str]:
    """What exceeds a limit, or does not show what was planted in a graph."""
    found = []
    for row in result.get("graphs", []):
        name, ours = f"{row['name']} of {row['size']} calls", row["reprokit"]
        found += _over(name, ours, GRAPH_LIMITS)
        found += [f"{name}: {what}" for what in ("alone", "repro_fails", "is_right") if not ours[what]]
    for row in result.get("large", []):
        found += _over(f"GPT-2, {row['cause']}", row, LARGE_LIMITS)
    for row in result.get("answers", []):
        found += _over(f"`shrink` of {row['name']}", row, LARGE_ANSWERS if row["is_large"] else SMALL_ANSWERS)
    return found


def _over(name: str, row: JSON, limits: JSON) -> list[str]:
    return [f"{name}: {what} {row[what]}" for what, most in limits.items() if row[what] is None or row[what] > most]


def table_of_graphs(rows: Sequence[JSON]) -> str:
    """A line for each tool and graph."""
    lines = [f"{'graph':20} {'calls':>5}  {'tool':16} {_HEAD} {'runs':>5}  {'alone':6} {'same failure':12}"]
    for row in rows:
        ours, *peers = (row[tool] for tool in ("reprokit", "minifier", "minifier_strict"))
        runs = f"{ours['replays'].partition('/')[2]}+{ours['instrumented_runs']}"
        start = f"{row['name']:20} {row['calls']:5}"
        lines.append(
            f"{start}  {'reprokit':16} {_numbers(ours)} {runs:>5}  {_mark(ours['alone'])} {_mark(ours['is_right'])}"
        )
        for name, peer in zip(("minifier", "minifier, strict"), peers, strict=True):
            marks = f"{_mark(peer['fails_as_printed'])} {_mark(peer['is_same'])}"
            lines.append(f"{'':26}  {name:16} {_numbers(peer)} {'1':>5}  {marks}".rstrip())
    return "\n".join(lines)


def table_of_kinds(rows: Sequence[JSON]) -> str:
    """A line for each kind, and below it what torch's minifier says."""
    lines = [f"{'kind':20} {'before':>6} {_HEAD}  {'alone':6} {'same failure':12}"]
    for row in rows:
        ours, peer = row["reprokit"], row["minifier"]
        marks = ours["note"] or f"{_mark(ours['alone'])} {_mark(ours['is_right'])}"
        lines.append(f"{row['name']:20} {_text(row.get('calls')):>6} {_numbers(ours)}  {marks}".rstrip())
        if peer is not None:
            said = peer["note"] or f"{peer['calls']} calls, {peer['elements']} elements after {peer['checks']} checks"
            lines.append(f"{'':20} minifier: {said.splitlines()[0]}")
    return "\n".join(lines)


def table_of_large(rows: Sequence[JSON]) -> str:
    """A line for each cause."""
    lines = [f"{'GPT-2':8} {'parameters':>11} {'before':>6} {_HEAD} {'loading':>8} {'model':>9} {'above it':>9}"]
    for row in rows:
        memory = " ".join(f"{row[name] / GIB:5.2f} GiB" for name in ("model_bytes", "above_model_bytes"))
        lines.append(
            f"{row['cause']:8} {row['parameters']:11,} {row['calls']:6} {_numbers(row['reprokit'])}"
            f" {row['load_s']:6.2f} s {memory}"
        )
    return "\n".join(lines)


def table_of_answers(rows: Sequence[JSON]) -> str:
    """A line for each snapshot."""
    head = f"{'first repro':>12} {'all':>8} {'CPU':>8}  {'verified':8} {'variants':>8} {'not reached':>11}"
    lines = [f"{'reprokit shrink':20} {head}"]
    for row in rows:
        first = "-" if row["first_repro_s"] is None else f"{row['first_repro_s']:.2f} s"
        lines.append(
            f"{row['name']:20} {first:>12} {row['total_s']:6.2f} s {row['cpu_s']:6.2f} s  {row['verified']:8}"
            f" {row['variants']:8} {row['variants_not_reached']:11}"
        )
    return "\n".join(lines)


TABLES: dict[str, Callable[[Sequence[JSON]], str]] = {
    "graphs": table_of_graphs,
    "kinds": table_of_kinds,
    "large": table_of_large,
    "answers": table_of_answers,
}
_HEAD = f"{'checks':>6} {'seconds':>8} {'CPU':>8} {'left':>5} {'elements':>8}"


def _numbers(row: JSON) -> str:
    clocks = " ".join(f"{row[name]:8.3f}" for name in ("seconds", "cpu_seconds"))
    return f"{row['checks']:6} {clocks} {_text(row['calls']):>5} {_text(row['elements']):>8}"


def _text(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _mark(value: bool) -> str:
    return f"{'yes' if value else 'NO':6}"


if __name__ == "__main__":
    sys.exit(main())
