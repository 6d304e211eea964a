"""Does a script do exactly the same when it is watched? Bit for bit, over a folder of training scripts.

    OMP_NUM_THREADS=1 python benchmarks/identical.py CORPUS [--case NAME ...] [--jobs N] [--json FILE]

Every case is a folder with ``train.py``. It is run twice, each time in a clean process and a folder of its own: plain,
and under ``reprokit capture --after-capture continue``, so that the comparison covers the failure and all that comes
after it. Compared are what was printed on stdout, the exit code, and everything that is left at the very end of the
process. A table goes to stderr, a JSON summary to stdout; the exit code is 1 if anything differs.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from command import JSON, find_cases, new_corpus_parser, print_json

STATE_FILE = "identical_state.json"
RUNNER_FILE = "identical_runner.py"
CAPTURE = ("-m", "reprokit", "capture", "--quiet", "--after-capture", "continue")
UNWATCHED = "it goes on unwatched"  # what capture says when it could not begin: then nothing would be compared

# What is compared: field of `Row` -> heading.
CHECKS = {"stdout_same": "stdout", "exit_same": "exit", "state_same": "state"}

# Runs a script as ``__main__`` and writes one entry for each module, optimizer and scaler when the process ends, after
# the script's own exit functions and after a capture has ended. A thing that dies before that leaves its tensors to be
# looked at in the end; so neither is it kept alive, nor does it matter when exactly it dies.
RUNNER = '''\
import atexit
import gc
import hashlib
import json
import random
import sys
import types

import numpy
import torch

KEPT = []
DIED = []


def main():
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)  # what a script does not seed itself begins anywhere
    sys.argv[:] = sys.argv[1:]
    module = types.ModuleType("__main__")
    module.__file__ = sys.argv[0]
    sys.modules["__main__"] = module
    KEPT.append(module)
    for kind, (cls, _) in KINDS.items():
        cls.__del__ = lambda one, kind=kind: DIED.append(found(kind, one))
    atexit.register(write_state)
    with open(sys.argv[0], "rb") as file:
        code = compile(file.read(), sys.argv[0], "exec", dont_inherit=True)
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        KEPT.append(error)  # with its frames, and so with the models in them
        raise


def write_state():
    gc.collect()
    alive = [
        found(kind, one) for one in gc.get_objects() for kind, (cls, _) in KINDS.items() if issubclass(type(one), cls)
    ]
    alive.append(("rng", "torch", torch.get_rng_state()))
    alive.append(("rng", "random", random.getstate()))
    alive.append(("rng", "numpy", numpy.random.get_state()))
    with open("identical_state.json", "w") as file:
        json.dump({"alive": [entry(*one) for one in alive], "died": [entry(*one) for one in DIED]}, file)


def found(kind, one):
    """What a thing is made of, not copied."""
    return kind, type(one).__qualname__, KINDS[kind][1](one)


def tensors_of(module):
    return [module.training, dict(module._parameters), dict(module._buffers)]


KINDS = {
    "module": (torch.nn.Module, tensors_of),
    "optimizer": (torch.optim.Optimizer, lambda one: [one.param_groups, list(one.state.values())]),
    "scaler": (torch.amp.GradScaler, lambda one: one.state_dict()),
}


def entry(kind, name, value):
    digest = hashlib.sha256()
    count = add(digest, value)
    return {"kind": kind, "name": name, "tensors": count, "digest": digest.hexdigest()}


def add(digest, value):
    """Add the bits of a value made of containers, tensors and plain values; how many tensors there were."""
    digest.update(type(value).__qualname__.encode())
    if isinstance(value, torch.nn.Parameter):
        return add_tensor(digest, value) + add(digest, value.grad)
    if isinstance(value, torch.Tensor):
        return add_tensor(digest, value)
    if isinstance(value, dict):
        digest.update(b"%d" % len(value))
        return sum(add(digest, key) + add(digest, item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        digest.update(b"%d" % len(value))
        return sum(add(digest, item) for item in value)
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        digest.update(value.tobytes())
    elif isinstance(value, (type(None), bool, int, float, complex, str, bytes)):
        digest.update(repr(value).encode())
    return 0


def add_tensor(digest, tensor):
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.device} {tensor.requires_grad}".encode())
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.device.type != "meta":
        bits = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        digest.update(bits.numpy().tobytes())
    return 1


main()
'''


@dataclass(frozen=True)
class State:
    """What the script left: things ``alive`` at its end, and what things that ``died`` on the way left."""

    alive: Counter[str]
    died: Counter[str]

    @property
    def num_tensors(self) -> int:
        """Of all things together; a tensor counts once for each thing that has it."""
        return sum(json.loads(entry)["tensors"] for entry in (self.alive + self.died).elements())

    def missing_in(self, watched: State) -> Counter[str]:
        """What of this is not to be found in a watched run."""
        return (self.alive - watched.alive) + (self.died - watched.died)

    def added_by(self, watched: State) -> Counter[str]:
        """What is alive after a watched run only; copies that a capture has made and let go are its own business."""
        return watched.alive - self.alive


@dataclass(frozen=True)
class Run:
    """What one run did: its output, its exit code, what it left, and how many snapshots were written."""

    stdout: bytes
    stderr: str
    code: int
    state: State | None
    num_snapshots: int


@dataclass
class Row:
    """The comparison of one case; ``notes`` say what differs."""

    case: str
    stdout_same: bool = False
    exit_same: bool = False
    state_same: bool = False
    num_tensors: int = 0
    num_snapshots: int = 0
    exit_code: int | None = None
    differs_by_itself: bool | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_identical(self) -> bool:
        """Whether everything is the same and capture was really on."""
        return self.stdout_same and self.exit_same and self.state_same and not self.notes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 0 when nothing differs."""
    options = new_corpus_parser(__doc__, jobs=1).parse_args(argv)
    folders = find_cases(options, "train.py")
    if not folders:
        return 2
    with (
        tempfile.TemporaryDirectory(prefix="identical-") as scratch,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        rows = list(pool.map(lambda folder: run_case(folder, Path(scratch) / folder.name, options.timeout), folders))
    summary = summarise(rows)
    print(table(rows), file=sys.stderr)
    print_json(summary, options.json)
    return 0 if all(row.is_identical for row in rows) else 1


def run_case(folder: Path, work: Path, timeout: float) -> Row:
    """Run a case plain and watched; when they differ, plain once more, to see whether it always does the same."""
    try:
        plain = run(folder, work / "plain", (), timeout)
        watched = run(folder, work / "watched", CAPTURE, timeout)
        row = compare(folder.name, plain, watched)
        if not row.is_identical:
            again = run(folder, work / "again", (), timeout)
            row.differs_by_itself = not compare(folder.name, plain, again).is_identical
    except subprocess.TimeoutExpired:
        row = Row(folder.name, notes=[f"no end within {timeout:.0f} s"])
    return row


def run(folder: Path, work: Path, prefix: Sequence[str], timeout: float) -> Run:
    """Run the case once in a new folder; ``prefix`` are the words between the interpreter and the script."""
    shutil.copytree(folder, work)
    (work / RUNNER_FILE).write_text(RUNNER)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, *prefix, RUNNER_FILE, "train.py"]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, timeout=timeout)
    return Run(
        stdout=done.stdout,
        stderr=done.stderr.decode(errors="replace"),
        code=done.returncode,
        state=_read_state(work / STATE_FILE),
        num_snapshots=len(list(work.glob("*.repro.pt"))),
    )


def compare(case: str, plain: Run, watched: Run) -> Row:
    """The row of a case, from its two runs."""
    row = Row(case, exit_code=plain.code, num_snapshots=watched.num_snapshots)
    row.stdout_same = plain.stdout == watched.stdout
    row.exit_same = plain.code == watched.code
    difference = _state_difference(plain, watched)
    row.state_same = difference is None
    row.num_tensors = plain.state.num_tensors if plain.state is not None else 0
    if not row.stdout_same:
        row.notes.append(f"stdout: {_first_difference(plain.stdout, watched.stdout)}")
    if not row.exit_same:
        row.notes.append(f"exit code: {plain.code} plain, {watched.code} watched: {_last_line(watched.stderr)}")
    if not row.state_same:
        row.notes.append(f"state: {difference}")
    if UNWATCHED in watched.stderr:
        row.notes.append(f"not watched: {_last_line(watched.stderr)}")
    return row


def summarise(rows: Sequence[Row]) -> JSON:
    """Counts, totals and all rows."""
    return {
        "cases": len(rows),
        "identical": sum(row.is_identical for row in rows),
        "different": [row.case for row in rows if not row.is_identical],
        "differs_by_itself": [row.case for row in rows if row.differs_by_itself],
        "captured": sum(row.num_snapshots > 0 for row in rows),
        "counts": {name: f"{sum(getattr(row, name) for row in rows)}/{len(rows)}" for name in CHECKS},
        "tensors": sum(row.num_tensors for row in rows),
        "rows": [asdict(row) for row in rows],
    }


def table(rows: Sequence[Row]) -> str:
    """The rows as fixed-width text, with a line of counts below."""
    width = max(len(row.case) for row in rows)
    head = " ".join(f"{heading:>6}" for heading in CHECKS.values())
    lines = [f"{'case':{width}} {head} tensors code snapshots"]
    for row in rows:
        marks = " ".join(f"{'same' if getattr(row, name) else 'DIFFER':>6}" for name in CHECKS)
        code = "-" if row.exit_code is None else row.exit_code
        lines.append(f"{row.case:{width}} {marks} {row.num_tensors:7d} {code:>4} {row.num_snapshots:9d}")
        lines += [f"  {note}" for note in row.notes]
        lines += ["  differs without capture as well"] * bool(row.differs_by_itself)
    summary = summarise(rows)
    lines.append(f"{'':{width}} " + " ".join(f"{summary['counts'][name]:>6}" for name in CHECKS))
    lines.append(f"{summary['identical']} of {summary['cases']} identical, {summary['captured']} captured")
    return "\n".join(lines)


def _first_difference(plain: bytes, watched: bytes) -> str:
    lines = plain.decode(errors="replace").splitlines(), watched.decode(errors="replace").splitlines()
    for number, (left, right) in enumerate(zip(*lines, strict=False), start=1):
        if left != right:
            return f"line {number}: `{left[:80]}` plain, `{right[:80]}` watched"
    return f"{len(lines[0])} lines plain, {len(lines[1])} watched ({len(plain)} and {len(watched)} bytes)"


def _read_state(file: Path) -> State | None:
    if not file.exists():
        return None
    written = json.loads(file.read_text())
    counters = {name: Counter(json.dumps(entry, sort_keys=True) for entry in written[name]) for name in written}
    return State(**counters)


def _state_difference(plain: Run, watched: Run) -> str | None:
    if plain.state is None:
        return f"the plain run left none: {_last_line(plain.stderr)}"
    if watched.state is None:
        return f"the watched run left none: {_last_line(watched.stderr)}"
    missing, added = plain.state.missing_in(watched.state), plain.state.added_by(watched.state)
    if not missing and not added:
        return None
    return f"only plain: {_names(missing)}; only watched: {_names(added)}"


def _names(entries: Counter[str]) -> str:
    named = sorted(f"{entry['kind']} {entry['name']}" for entry in map(json.loads, entries.elements()))
    return ", ".join(named[:6]) + ", ..." * (len(named) > 6) if named else "-"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
