"""Every field of a file filled at random with values of its type, and the file given to each command.

    OMP_NUM_THREADS=1 python benchmarks/strangers.py [--files N] [--forged N] [--seed N] [--json FILE]

The fields and their types are those of the grammar (`reprokit.grammar`), so that a new field is filled too. Numbers are
those at which something ends, texts those that commands read something out of, names those of the file. The files to
begin with are of each kind: a NaN forward, backward and in an optimizer, an exception, an event, a healthy step, one
that is not learned, a result that differs, ranks that differ, a check of the user's own, and reductions. **Forged**
files are damaged in each way of `forged.py` in turn. A child with 2 GiB more than it needs tries each file: a
traceback, a hang, more memory or a control character on the screen is a finding. Exit code 1 on any.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import json
import os
import pkgutil
import random
import re
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest import mock

import forged
import hostile
import torch
from command import JSON, new_parser, print_json

import reprokit
from reprokit import grammar
from reprokit.cli.app import main as command
from reprokit.grammar import known_fields
from reprokit.program.ir import Phase, Program
from reprokit.render.verify import CleanProcesses
from reprokit.shrink.reduction import Reduction
from reprokit.snapshot.format import Snapshot

MEMORY = 2 * 2**30  # bytes beyond those of a process that has imported everything
SECONDS = 40  # for one command, whose own limit is below
NUM_COMMANDS = 3  # of each file that is opened
FORGED = "forged-"  # before the number of a file of `forged.py`
WAYS = (*forged.FORGERIES, *forged.ARCHIVES)
_REFUSED = re.compile(r"is damaged|was not written by|holds more than|is cut off|is empty|has more than|format version")
COUNTS = (0, 1, 2, 3, 7, 40, 10**6, 2**31, 2**62)
NUMBERS = (0, 1, -1, 2, 5, 99, 10**9, -(2**62))
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e300, float("inf"), float("-inf"), float("nan"))
WORDS = (
    *("", "x", "a word", "nan", "+inf", "fp64", "cpu-cuda", "cpu-xpu", "compile", "compile:inductor", "compile:a.py:f"),
    *(
        "other",
        "a.py:f",
        "a.py:",
        ":f",
        "row 3",
        "rows 0-2",
        "rows 7-0",
        "rows 0-99999999999",
        "rows",
        "samples 1 and 2",
    ),
    *("0", "1", "-1", "weight", "input", "target of mse_loss", "torch.exp", "None", "../../x", "a\nb", "20/20", "5/5"),
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "show": ("--max-time", "20"),
    "show json": ("--json",),
    "show frames": ("--frames", "3", "--max-time", "20"),
    "verify": ("--times", "1"),
    "render repro": ("--as", "repro", "-f", "-o", "out.py"),
    "render module": (),
    "render issue": ("--as", "issue"),
    "render report": ("--as", "report"),
    "render summary": ("--as", "summary"),
    "render test": ("--as", "test"),
    "shrink": ("-f", "-o", "out", "--max-time", "3", "--no-whatif", "--fast"),
    "shrink whole": ("-f", "-o", "out", "--max-time", "3", "--jobs", "1"),
    "timeline": ("--to", "jsonl"),
    "timeline csv": ("--to", "csv"),
    "export": ("--before", "-f", "-o", "before"),
    "trace": (),
    "whatif": ("--max-time", "2"),
    "diff": (),
}


# -- files to begin with ----------------------------------------------------------------------------------------------


def make_seeds(folder: Path, *, is_quick: bool = False) -> dict[str, JSON]:
    """Files of every kind of failure."""
    faults = ("forward", "exception") if is_quick else ("forward", "backward", "exception")
    seeds = hostile.make_seeds(folder, faults, is_quick=is_quick)
    forward = seeds["forward.repro.pt"]
    index, call = next(item for item in enumerate(forward["program"]["calls"]) if "ref" in item[1]["outputs"])
    made = {"call": call["target"], "call_index": index, "value": call["outputs"]["ref"]}
    names = [item[1] for item in forward["program"]["inputs"]]
    event = {"quantity": "loss", "value": 9.0, "threshold": 1.0, "reference_step": 0, "began_at": 1}
    whole = {"call": None, "call_index": None, "value": None, "element": None, "num_bad": 0, "num_elements": 0}
    ranks = {
        **{"parameter": names[0], "num_parameters": 1, "ranks": [0, 1], "reference": 0, "num_alike": 1},
        **{"hashes": ("0f", "1e"), "largest": 0.5, "equal_after": 0, "began_at": 1, "is_exact": True, "cause": ""},
    }
    kinds: dict[str, JSON] = {
        "spike": {**whole, "kind": "spike", "phase": "forward", "event": event},
        "explosion": {**whole, "kind": "explosion", "phase": "backward",
                      "event": {**event, "quantity": "gradient norm"}},
        "dead": {**whole, "kind": "dead", "phase": "backward", "way": "no gradient has reached it",
                 "event": {**event, "quantity": "share of zeros", "source": names[0]}},
        "silent": {**whole, "kind": "silent", "phase": "backward", "way": "no gradient has reached it"},
        "healthy": {**whole, "kind": "none"},
        "mismatch": {**made, "kind": "mismatch", "way": "fp64"},
        "function": {**whole, "kind": "function", "way": "check.py:check"},
        "ranks": {**whole, "kind": "mismatch", "phase": "optimizer", "way": "ranks", "difference": ranks},
        "given": {**whole, "kind": "nan", "way": "nan", "input_name": names[-1],
                  "value": forward["program"]["inputs"][-1][0]},
    }  # fmt: skip
    for name, failure in kinds.items():
        seeds[f"{name}.repro.pt"] = {**forward, "failure": {**forward["failure"], **failure}}
        if name in ("spike", "mismatch", "function"):
            reduction = seeds["forward/reduction.pt"]
            own = {key: value for key, value in failure.items() if name != "mismatch" or key not in made}
            seeds[f"{name}/reduction.pt"] = {**reduction, "failure": {**reduction["failure"], **own}}
    seeds["optimizer.repro.pt"] = _of_optimizer(folder)
    return seeds


def _of_optimizer(folder: Path) -> JSON:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.RMSprop([weight], lr=1e38)
    file = folder / "optimizer.repro.pt"
    silence = contextlib.redirect_stderr(io.StringIO())
    with silence, contextlib.suppress(SystemExit), reprokit.capture(file):
        for _ in range(4):
            optimizer.zero_grad()
            (weight * 1e30).sum().backward()
            optimizer.step()
    found: JSON = torch.load(file, weights_only=True)
    return found


# -- filling fields ---------------------------------------------------------------------------------------------------


@dataclass
class Filling:
    """Puts random values of their type into fields of a file."""

    draw: random.Random
    content: JSON
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        program = self.content["program"]
        self.words = [*WORDS, *(item[1] for item in program["inputs"]), *(call["target"] for call in program["calls"])]
        self.words += list(program["modules"])
        self.values = [item[0] for item in program["inputs"]] + [len(program["calls"]), len(program["inputs"])]

    def fill(self) -> JSON:
        """The file with one to four fields filled."""
        cls: Any = Snapshot if self.content["kind"] == "snapshot" else Reduction
        for _ in range(self.draw.choice((1, 1, 2, 3, 4))):
            if self.draw.random() < 0.3:
                self._change_program(self.content["program"])
                continue
            owner, key, hint = self.draw.choice(list(self._places(cls, self.content)))
            owner[key] = self.value(hint, 0)
        return self.content

    def _places(self, cls: Any, plain: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Containers, keys and types of all fields; those of the failure several times."""
        for key, one in known_fields(cls).items():
            if isinstance(plain, dict) and _of_program(one.hint) is None and one.hint is not None:
                yield from [(plain, key, one.hint)] * (6 if cls.__name__ in ("Failure", "Predicate") else 1)
                inner = plain.get(key)
                for arm in grammar._arms(one.hint):
                    if is_dataclass(arm) and isinstance(inner, dict):
                        yield from self._places(arm, inner)

    def value(self, hint: Any, depth: int) -> Any:
        """A value of a type, as plain data."""
        draw, origin, args = self.draw, get_origin(hint), get_args(hint)
        if _of_program(hint) is not None:
            return self.content["program"]
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            return str(draw.choice(list(hint)))
        if origin is Literal:
            return draw.choice(args)
        if origin is Annotated:
            return self._of_kind(hint, args[0], depth)
        if origin in (Union, UnionType):
            arms = [arg for arg in args if arg is not NoneType]
            is_none = len(arms) < len(args) and (depth > 5 or draw.random() < 0.25)
            return None if is_none else self.value(draw.choice(arms), depth)
        if origin is tuple and Ellipsis not in args:
            return tuple(self.value(arg, depth + 1) for arg in args)
        if origin in (tuple, list):
            return origin(self.value(args[0], depth + 1) for _ in range(draw.choice((0, 1, 2, 3))))
        if origin is not None:
            return {
                self.value(args[0], depth + 1): self.value(args[1], depth + 1) for _ in range(draw.choice((0, 1, 2)))
            }
        if is_dataclass(hint):
            parts = {key: self.value(one.hint, depth + 1) for key, one in known_fields(hint).items()}
            return list(parts.values()) if issubclass(hint, grammar.Row) else parts
        return {int: draw.choice((*NUMBERS, *self.values)), float: draw.choice(FLOATS), bool: draw.random() < 0.5}[hint]

    def _of_kind(self, hint: Any, plain: Any, depth: int) -> Any:
        draw, kind = self.draw, next(filter(callable, hint.__metadata__), None)
        if kind is None:
            return self.value(plain, depth)
        if isinstance(kind, grammar.one_of):
            return draw.choice(sorted(kind.words))
        if kind is grammar.link:
            return "https://github.com/x/y"
        if kind is grammar.digest:
            return draw.choice(("", "0f", "1e"))
        if plain is int:
            return draw.choice((*COUNTS, *self.values))
        if plain is torch.Tensor:
            return self._tensor()
        return draw.choice(self.words) if plain is str else self.value(plain, depth)

    def _tensor(self) -> torch.Tensor:
        shape = self.draw.choice(((), (0,), (1,), (3,), (2, 3), (5, 4), (0, 3)))
        dtype = self.draw.choice((torch.float32, torch.float16, torch.int64, torch.bool, torch.uint8, torch.complex64))
        made = torch.zeros(shape, dtype=dtype)
        return made.to_sparse() if self.draw.random() < 0.1 and made.dim() else made

    def _change_program(self, program: JSON) -> None:
        """One part of the program exchanged for another that its grammar knows."""
        draw = self.draw
        call = draw.choice(program["calls"]) if program["calls"] else None
        change = draw.choice(
            (
                "outputs",
                "arguments",
                "drop",
                "tensor",
                "phase",
                "site",
                "scope",
                "mode",
                "role",
                "target",
                "returns",
                "note",
            )
        )
        if change == "tensor" and self.content["tensors"]:
            self.content["tensors"][draw.choice(list(self.content["tensors"]))] = self._tensor()
        elif change == "role" and program["inputs"]:
            row = draw.choice(program["inputs"])
            place, values = draw.choice(((1, self.words), (2, list(grammar_roles())), (3, [True, False])))
            row[place] = draw.choice(values)
        elif change == "returns":
            program["outputs"] = [draw.choice(self.values) for _ in range(draw.choice((0, 1, 3)))]
        elif change == "note" and program["modules"]:
            note = draw.choice(list(program["modules"].values()))
            place, values = draw.choice(((0, self.words), (1, [True, False]), (4, list(COUNTS))))
            note[place] = draw.choice(values)
        elif call is not None:
            self._change_call(program, call, change)

    def _change_call(self, program: JSON, call: JSON, change: str) -> None:
        draw = self.draw
        if change == "outputs":
            call["outputs"] = self._structure(call["outputs"])
        elif change == "arguments" and isinstance(call["args"], dict) and call["args"].get("tuple"):
            parts = call["args"]["tuple"]
            parts[draw.randrange(len(parts))] = draw.choice(
                (None, 1, -1, 2**40, 0.5, "x", {"ref": draw.choice(self.values)})
            )
        elif change == "drop":
            program["calls"].remove(call)
        elif change == "phase":
            call["phase"] = str(draw.choice(list(Phase)))
        elif change == "site":
            call["site"] = draw.choice((None, ["train.py", draw.choice(COUNTS), draw.choice(self.words)]))
        elif change == "scope":
            call["scope"] = [[draw.choice(self.words), draw.choice(self.words), draw.choice(COUNTS)]]
        elif change == "mode":
            call["mode"] = [
                draw.random() < 0.5,
                draw.choice(([], [["cpu", "torch.bfloat16"]])),
                draw.random() < 0.5,
                None,
            ]
        elif change == "target":
            call["target"] = draw.choice([other["target"] for other in program["calls"]])

    def _structure(self, outputs: Any) -> Any:
        """The results of a call in another container."""
        ref = {"ref": 900 + self.draw.randrange(5)}
        return self.draw.choice(
            (None, ref, [outputs], {"tuple": [outputs, ref]}, {"tuple": [{"tuple": [outputs, None]}, ref]},
             {"dict": [["loss", outputs]]}, {"dict": [["loss", {"tuple": [outputs]}], ["x", ref]]}, {"tuple": []})
        )  # fmt: skip


def grammar_roles() -> Sequence[str]:
    from reprokit.program.ir import ROLES

    return ROLES


def _of_program(hint: Any) -> Any:
    return next((arm for arm in grammar._arms(hint) if arm is Program), None)


def filled(seeds: Mapping[str, JSON], seed: str) -> tuple[str, JSON]:
    """A file of random kind with random fields, and the name of the one it began with."""
    draw = random.Random(seed)
    name = draw.choice(sorted(seeds))
    return name, Filling(draw, copy.deepcopy(dict(seeds[name]))).fill()


def write_file(seeds: Mapping[str, JSON], number: str, file: Callable[[str], Path]) -> tuple[str, Path, str]:
    """Write the file of a number: the name of the one that it began with, its path, and the way of a forged one."""
    if not number.startswith(FORGED):
        name, content = filled(seeds, number)
        path = file(name)
        torch.save(content, path)
        return name, path, ""
    way = WAYS[int(number.rpartition("-")[2]) % len(WAYS)]
    draw = random.Random(number)
    name = draw.choice(sorted(seeds))
    path = file(name)
    path.write_bytes(forged.forge(copy.deepcopy(dict(seeds[name])), way, draw))
    return name, path, way


# -- trying them ------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """Findings by their kind, with an example of each."""

    files: int = 0
    accepted: int = 0
    commands: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)


def try_all(seeds: Mapping[str, JSON], numbers: Sequence[str], folder: Path, batch: int = 50) -> Found:
    """Fill and try files, a batch of them in each child process; a child that dies goes on in another one."""
    found, waiting = Found(), list(numbers)
    for name, content in seeds.items():
        target = folder / "real" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, target)
    _import_all()
    while waiting:
        waiting = waiting[_try_some(seeds, waiting[:batch], folder, found) :]
    return found


def _import_all() -> None:
    """Import what commands import when they run, once for all children."""
    for module in pkgutil.walk_packages(reprokit.__path__, "reprokit."):
        if "integrations" not in module.name and "__main__" not in module.name:
            importlib.import_module(module.name)
    importlib.import_module("torch._dynamo")


def _try_some(seeds: Mapping[str, JSON], numbers: Sequence[str], folder: Path, found: Found) -> int:
    """Try files in a child; how many of them it has tried."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(seeds, numbers, folder, writer)
    os.close(writer)
    with open(reader, "rb") as reports:
        lines = [json.loads(line) for line in reports]
    _, status = os.waitpid(child, 0)
    reports_of = [line for line in lines if "files" in line]
    for line in reports_of:
        found.files += 1
        found.accepted += line["accepted"]
        found.commands += line["commands"]
        for kind, where in line["found"]:
            found.kinds[kind] += 1
            found.first.setdefault(kind, where)
    if os.waitstatus_to_exitcode(status) == 0:
        return len(numbers)
    doing = next((line["doing"] for line in reversed(lines) if "doing" in line), "")
    said = (folder / "said").read_text(encoding="utf-8", errors="replace")
    if "reprokit: error:" not in said:  # a deadline ends the process with such a line
        kind = f"the process ended with {os.waitstatus_to_exitcode(status)}: {doing.partition(':')[0]}"
        found.kinds[kind] += 1
        found.first.setdefault(kind, f"{doing}\n{said[-2000:]}")
    found.files += 1
    return len(reports_of) + 1


def _child(seeds: Mapping[str, JSON], numbers: Sequence[str], folder: Path, writer: int) -> None:
    code = 1
    try:
        now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(folder)
        said = os.open("said", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(said, stream)
        sys.stdout = open(1, "w", encoding="utf-8", errors="surrogatepass", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="surrogatepass", closefd=False)  # noqa: SIM115
        signal.signal(signal.SIGALRM, _too_late)
        with mock.patch.multiple(CleanProcesses, open=hostile._not_opened, runs=hostile._here):
            for number in numbers:
                report = _try(
                    seeds, number, lambda words: os.write(writer, json.dumps({"doing": words}).encode() + b"\n")
                )
                os.write(writer, json.dumps(report).encode() + b"\n")
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def _too_late(*_: object) -> None:
    raise TimeoutError("too late")


def _try(seeds: Mapping[str, JSON], number: str, tell: Callable[[str], object]) -> JSON:
    """Fill a file and give it to commands: to all that open it if one does."""
    draw, found = random.Random(number), list[tuple[str, str]]()
    name, file, way = write_file(seeds, number, _place)
    number = f"{number} ({way})" if way else number
    known = [
        words for words in COMMANDS if "/" not in name or words.split()[0] in ("render", "verify", "shrink", "whatif")
    ]
    opening = "render test" if "/" in name else "show json"
    commands, is_accepted, done = [opening, *draw.sample(known, NUM_COMMANDS)], False, 0
    for words in commands:
        tell(f"{words}: file {number} of {name}")
        kind, said = _run(words, file, name)
        done += 1
        if kind:
            found.append((kind, f"{words} of {name}, file {number}: {said[-1500:]}"))
        is_accepted = is_accepted or not _REFUSED.search(said)
        if not is_accepted:
            break
    return {"files": 1, "accepted": is_accepted, "commands": done, "found": found}


def _place(name: str) -> Path:
    file = Path("x/reduction.pt" if "/" in name else "x.repro.pt")
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    return file


def _run(words: str, file: Path, name: str) -> tuple[str, str]:
    """The kind of what is wrong with a command, empty if nothing is, and what it has printed."""
    sys.stdout.flush()
    os.ftruncate(1, 0)
    os.lseek(1, 0, os.SEEK_SET)
    given = [words.split()[0], str(file)]
    if words == "diff":
        given.append(str(Path("real") / name))
    signal.alarm(SECONDS)
    try:
        code, error = command([*given, *COMMANDS[words]]), None
    except BaseException as raised:
        code, error = 1, raised
    signal.alarm(0)
    sys.stdout.flush()
    sys.stderr.flush()
    said = Path("said").read_text(encoding="utf-8", errors="surrogatepass")
    if error is not None:
        said += "".join(traceback.format_exception(error))
    is_wrong = error is not None or "this is an error in reprokit itself" in said or code not in (0, 1, 2, 4, 5)
    if not is_wrong and not hostile.is_visible(said):
        return f"control characters on the screen of {words}", said
    return _kind(said) if is_wrong else "", said


def _kind(said: str) -> str:
    """A traceback in short: the exception, and the last place in reprokit."""
    places = re.findall(r'File ".*?/(reprokit/[\w/]+\.py)", line (\d+), in (\w+)', said)
    last = re.findall(r"^(\w[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)$", said, re.MULTILINE)
    return f"{last[-1][:120] if last else said[-120:]} at {':'.join(places[-1]) if places else '?'}"


def main(argv: Sequence[str] | None = None) -> int:
    """Try files; exit code 0 without findings."""
    parser = new_parser(__doc__)
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--forged", type=int, default=1000, help="files of forged.py (default 1,000)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="strangers-") as scratch:
        seeds = make_seeds(Path(scratch) / "seeds")
        numbers = [f"{options.seed}-{number}" for number in range(options.files)]
        numbers += [f"{FORGED}{options.seed}-{number}" for number in range(options.forged)]
        found = try_all(seeds, numbers, Path(scratch))
    for kind, count in found.kinds.most_common():
        print(f"{count} x {kind}\n{found.first[kind]}\n", file=sys.stderr)
    numbers_of = {"files": found.files, "accepted": found.accepted, "commands": found.commands}
    print_json({**numbers_of, "found": dict(found.kinds)}, options.json)
    return 1 if found.kinds else 0


if __name__ == "__main__":
    sys.exit(main())
