"""Files from strangers: is anything of theirs run, shown as more than text, or more than reprokit can take?

    OMP_NUM_THREADS=1 python benchmarks/hostile.py [--crafted N] [--mutations N] [--seed N] [--jobs N] [--json FILE]

Real snapshots and reductions are made first. **Crafted** files have a text in one field that tries to leave its place
(`payloads.py`: every text field of the grammar, in every context); each goes through show, verify, render and, in
turns, shrink and whatif. **Mutations** are damaged files and files with junk in them; each goes through show. Every
file is opened in a forked child with a time limit and 8 GiB of address space. ``verify`` runs the gated script in the
child, but for a few files that go through the command as it is. A payload that is executed writes a marker file. What
is printed and written is parsed as what it is. A table goes to stderr, JSON to stdout; exit code 1 on any finding.
"""

from __future__ import annotations

import argparse
import contextlib
import html.parser
import io
import json
import os
import random
import re
import resource
import runpy
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from unittest import mock

import payloads
import torch
from command import JSON, new_parser, print_json
from markdown_it import MarkdownIt
from payloads import WORD
from torch import nn

import reprokit
from reprokit.cli.app import main as command
from reprokit.render import verify as verifying
from reprokit.render.gate import require_closed
from reprokit.shrink.reducer import shrink
from reprokit.snapshot import grammar
from reprokit.snapshot.format import load
from reprokit.visible import visible

MEMORY = 8 * 2**30
SECONDS = 60.0  # for all commands of one crafted file, or for one mutation
BATCH = 40
FAULTS = ("forward", "backward", "exception")
FINDINGS = ("executed", "tracebacks", "hangs", "terminal", "markdown", "html", "refused scripts")
OURS = re.compile(
    r"<details><summary>[^<]*</summary>|</details>|<!-- (?:Title: |please say )(?:(?!--).)*-->|\s+", re.ASCII
)


@dataclass
class Counts:
    """What was found. ``first`` has an example of each."""

    files: int = 0
    accepted: int = 0
    commands: int = 0
    found: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, where: str) -> None:
        """One more finding of a kind."""
        self.found[kind] += 1
        self.first.setdefault(kind, where[-2000:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 0 without findings."""
    options = _parse(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hostile-") as scratch:
        folder = Path(scratch)
        seeds = make_seeds(folder / "seeds")
        crafted = try_all(spread(list(crafted_files(seeds, folder)), options.crafted), folder, 1, options.jobs)
        halfway = time.perf_counter()
        mutated = try_all(list(islice(mutations(seeds, options.seed), options.mutations)), folder, BATCH, options.jobs)
    seconds = {"crafted": halfway - started, "mutations": time.perf_counter() - halfway}
    print(table({"crafted": crafted, "mutations": mutated}, seconds), file=sys.stderr)
    print_json(summary({"crafted": crafted, "mutations": mutated}, seconds), options.json)
    return 1 if crafted.found or mutated.found else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--crafted", type=int, default=2_000, help="crafted files at most (default 2,000)")
    parser.add_argument("--mutations", type=int, default=10_000, help="damaged files (default 10,000)")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    parser.add_argument("--jobs", type=int, default=2, help="files at once (default 2)")
    return parser.parse_args(argv)


# -- files to begin with ----------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A classifier with a fault in its forward pass, its backward pass, or an exception."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.scale = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities."""
        x = torch.tanh(self.scale(x))
        if self.fault == "backward":
            x = torch.where(x > 0, x, torch.sqrt(x.relu() * 0)) + x
        y = self.head(x)
        if self.fault == "forward":
            y = y - y.sum(-1, keepdim=True).detach() * 0 / (y.detach() * 0)
        return torch.log_softmax(y if self.fault != "exception" else y.reshape(7, -1), -1)


def make_seeds(folder: Path, faults: Sequence[str] = FAULTS, *, is_quick: bool = False) -> dict[str, JSON]:
    """Snapshots of failing loops and their reductions (``is_quick``: as found, without what rendering adds)."""
    folder.mkdir()
    found: dict[str, JSON] = {}
    for fault in faults:
        torch.manual_seed(0)
        model = Net(fault)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        file = folder / f"{fault}.repro.pt"
        silence = contextlib.redirect_stderr(io.StringIO())
        with silence, contextlib.suppress(SystemExit, RuntimeError), reprokit.capture(file):
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.nll_loss(model(torch.randn(5, 4)), torch.randint(3, (5,))).backward()
                optimizer.step()
        if is_quick:
            (folder / fault).mkdir()
            shrink(load(file), out_dir=folder / fault)
        else:
            words = ("--no-whatif",) if fault != "forward" else ()
            command(["shrink", "-q", str(file), "-o", str(folder / fault), *words])
        found[file.name] = torch.load(file, weights_only=True)
        found[f"{fault}/reduction.pt"] = torch.load(folder / fault / "reduction.pt", weights_only=True)
    return found


# -- files to try -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A file, what was done to it, and what is done with it. ``beside`` is the snapshot of a reduction."""

    name: str
    make: Callable[[Path], None]
    is_crafted: bool
    number: int
    beside: JSON | None = None


def crafted_files(seeds: dict[str, JSON], folder: Path) -> Iterator[Trial]:
    """A file for every text field and context, of a snapshot and of a reduction with its snapshot."""
    marker = folder / "EXECUTED"
    number = 0
    for name, content in seeds.items():
        kinds = grammar.SNAPSHOT if content["kind"] == "snapshot" else grammar.REDUCTION
        full = payloads.filled(content, kinds)
        if isinstance(full.get("origin"), dict):
            full["origin"].pop("snapshot", None)  # so that the crafted snapshot beside it is taken for its own
        beside = seeds.get(f"{name.split('/')[0]}.repro.pt") if "/" in name else None
        for place, context, file in payloads.crafted(full, marker):
            number += 1
            yield Trial(f"{name}: {place} as {context}", _writer(file), True, number, beside)


def mutations(seeds: dict[str, JSON], seed: int) -> Iterator[Trial]:
    """Damaged files without end."""
    raw = {name: _bytes(content) for name, content in seeds.items()}
    number = 0
    while True:
        for name, content in seeds.items():
            number += 1
            yield Trial(f"{name}: mutation {number}", _damager(content, raw[name], f"{seed}-{number}"), False, number)


def _writer(content: JSON) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path)


def _damager(content: JSON, raw: bytes, seed: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        draw = random.Random(seed)
        if draw.random() < 0.35:
            path.write_bytes(payloads.damaged(raw, draw))
            return
        try:
            torch.save(payloads.mangled(content, draw), path)
        except Exception:  # what cannot be saved, such as keys that cannot be sorted
            path.write_bytes(payloads.damaged(raw, draw))

    return make


def _bytes(content: JSON) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def spread(trials: list[Trial], most: int) -> list[Trial]:
    """At most so many, from everywhere alike."""
    if len(trials) <= most:
        return trials
    return [trials[round(index * (len(trials) - 1) / max(1, most - 1))] for index in range(most)]


# -- trying them ------------------------------------------------------------------------------------------------------


def try_all(trials: list[Trial], folder: Path, batch: int, jobs: int) -> Counts:
    """Try files in forked children, ``batch`` in one; a child that dies or takes too long goes on in another one."""
    counts, waiting = Counts(), [trials[start : start + batch] for start in range(0, len(trials), batch)]
    running: dict[int, _Child] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            child = _Child(waiting.pop(0), Path(tempfile.mkdtemp(dir=folder)), folder / "EXECUTED")
            running[child.reader] = child
        ready, _, _ = select.select(list(running), [], [], 0.5)
        for reader in list(running):
            child = running[reader]
            is_over = child.read(counts) if reader in ready else child.is_late(counts)
            if is_over:
                del running[reader]
                rest = child.close(counts)
                if rest:
                    waiting.insert(0, rest)
    return counts


class _Child:
    """A forked process that tries some files and reports a line of JSON for each."""

    def __init__(self, trials: list[Trial], folder: Path, marker: Path) -> None:
        self._trials, self._folder, self._marker = trials, folder, marker
        self._done, self._text, self._killed = 0, b"", False
        self.reader, writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self.reader)
            _child(trials, folder, marker, writer)
        os.close(writer)
        self._since = time.monotonic()

    def read(self, counts: Counts) -> bool:
        """Take in what is reported; true at its end."""
        text = os.read(self.reader, 1 << 16)
        self._text += text
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            report = json.loads(line)
            self._done += 1
            self._since = time.monotonic()
            counts.files += 1
            counts.accepted += report["accepted"]
            counts.commands += report["commands"]
            for kind, where in report["found"]:
                counts.note(kind, where)
        return not text

    def is_late(self, counts: Counts) -> bool:
        """Kill it if a file takes too long."""
        if time.monotonic() - self._since < SECONDS:
            return False
        counts.note("hangs", self._trials[self._done].name)
        counts.files += 1
        self._killed = True
        os.killpg(self._pid, signal.SIGKILL)
        return True

    def close(self, counts: Counts) -> list[Trial]:
        """Wait for its end; the files that it did not come to."""
        os.close(self.reader)
        _, status = os.waitpid(self._pid, 0)
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)
        rest = self._trials[self._done :]
        if rest and not self._killed:  # `deadline` ends the process with a line; anything else is a crash
            counts.files += 1
            said = (self._folder / "said").read_text(encoding="utf-8", errors="replace")
            if os.waitstatus_to_exitcode(status) != 1 or "reprokit: error: " not in said:
                counts.note("tracebacks", f"{rest[0].name}: exit {os.waitstatus_to_exitcode(status)}: {said}")
        if self._marker.exists():
            counts.note("executed", self._trials[min(self._done, len(self._trials) - 1)].name)
            self._marker.unlink()
        return rest[1:]


def _child(trials: list[Trial], folder: Path, marker: Path, writer: int) -> None:
    code = 1
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(folder)
        said = os.open(folder / "said", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(said, stream)
        sys.stdout = open(1, "w", encoding="utf-8", errors="surrogatepass", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="surrogatepass", closefd=False)  # noqa: SIM115
        for trial in trials:
            os.write(writer, json.dumps(_Tried(trial, folder, marker).report()).encode() + b"\n")
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


class _Tried:
    """One file on its way through the commands."""

    def __init__(self, trial: Trial, folder: Path, marker: Path) -> None:
        self._trial, self._folder, self._marker = trial, folder, marker
        self._found: list[tuple[str, str]] = []
        self._commands = 0
        self._file = folder / ("x.repro.pt" if trial.beside is None else "x/reduction.pt")
        self._file.parent.mkdir(exist_ok=True)

    def report(self) -> JSON:
        """What was found."""
        trial = self._trial
        self._file.unlink(missing_ok=True)
        with contextlib.suppress(Exception) if not trial.is_crafted else contextlib.nullcontext():
            trial.make(self._file)
        if trial.beside is not None:
            torch.save(trial.beside, self._folder / "x.repro.pt")
        is_accepted = self._try_crafted() if trial.is_crafted else self._run("show", "--max-time", "20") == 0
        if self._marker.exists():
            self._note("executed", "")
            self._marker.unlink()
        return {"accepted": is_accepted, "commands": self._commands, "found": self._found}

    def _try_crafted(self) -> bool:
        first = self._run("show", "--json", is_json=True) if self._trial.beside is None else self._run("render")
        if first in (1, 2) and "is damaged" in self._said():
            return False
        if self._trial.beside is None:
            self._run("show")
        is_real = self._trial.number % 211 == 0
        with contextlib.nullcontext() if is_real else mock.patch.object(verifying, "_run", _here):
            self._run("verify", "--times", "1")
            for kind in ("repro", "test", "issue", "report"):
                self._render(kind)
            if self._trial.number % 8 == 0 and self._trial.beside is None:
                self._run("shrink", "-f", "-o", "out", "--max-time", "5", "--no-whatif")
                self._read_all(self._folder / "out")
            if self._trial.number % 64 == 0:
                self._run("whatif", "--max-time", "2")
        return True

    def _render(self, kind: str) -> None:
        target = self._folder / f"rendered.{kind}"
        if self._run("render", "--as", kind, "-f", "-o", str(target)) == 0:
            self._read(kind, target.read_text(encoding="utf-8"))

    def _read_all(self, folder: Path) -> None:
        for name, kind in (("issue.md", "issue"), ("report.html", "report"), ("repro.py", "repro"),
                           ("repro_module.py", "repro"), ("test_repro.py", "test")):  # fmt: skip
            if (folder / name).is_file():
                self._read(kind, (folder / name).read_text(encoding="utf-8"))

    def _read(self, kind: str, text: str) -> None:
        if not is_visible(text):
            self._note("terminal", kind)
        if kind == "issue":
            self._found += [("markdown", f"{self._trial.name}: {escape}") for escape in markdown_escapes(text)]
        elif kind == "report":
            self._found += [("html", f"{self._trial.name}: {escape}") for escape in html_escapes(text)]
        elif kind == "test":
            compile(text, "test", "exec")
            with contextlib.suppress(Exception):
                runpy.run_path(_written(self._folder / "test_it.py", text))
        else:
            require_closed(text)

    def _run(self, name: str, *words: str, is_json: bool = False) -> int:
        """A command as `main` runs it; its output is looked at."""
        self._commands += 1
        sys.stdout.flush()
        os.ftruncate(1, 0)
        os.lseek(1, 0, os.SEEK_SET)
        try:
            code = command([name, str(self._file), *words])
        except BaseException:
            self._note("tracebacks", f"{name}: {traceback.format_exc()}")
            return 1
        said = self._said()
        if "Traceback (most recent" in said and "this is an error in reprokit itself" in said:
            self._note("tracebacks", f"{name} {words}: {said}")
        if not is_visible(said):
            self._note("terminal", f"{name} {words}: {said!r}")
        if "was refused" in said:
            self._note("refused scripts", f"{name} {words}: {said}")
        return code

    def _said(self) -> str:
        sys.stdout.flush()
        sys.stderr.flush()
        return (self._folder / "said").read_text(encoding="utf-8", errors="surrogatepass")

    def _note(self, kind: str, where: str) -> None:
        self._found.append((kind, f"{self._trial.name}: {where}"))


def _written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def _here(script: Path, times: int, seconds: float) -> Iterator[verifying.Run]:
    """Stands for the clean processes of `verify`: the script, in this process."""
    output, errors = io.StringIO(), ""
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except Exception:
            errors = traceback.format_exc()
    yield verifying.Run(1 if errors else 0, output.getvalue(), errors)


# -- what texts may hold ----------------------------------------------------------------------------------------------


def is_visible(text: str) -> bool:
    """True if nothing in a text drives a terminal."""
    return visible(text) == text


def markdown_escapes(text: str) -> list[str]:
    """Parts of an issue in which a payload is more than text or code, and markup that is not of the templates."""
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "html_block" and OURS.sub("", token.content):
            found.append(token.content)
        if token.type != "inline":
            continue
        for inner in token.children or ():
            is_foreign = inner.type == "html_inline" and OURS.sub("", inner.content)
            if is_foreign or (inner.type in ("link_open", "image") and WORD in str(inner.attrs)):
                found.append(f"{inner.type} {inner.content} {inner.attrs}")
        is_heading = WORD in token.content and token.level == 1 and f"# {token.content}" in text.splitlines()
        if is_heading:
            found.append(f"heading {token.content}")
    return found


def html_escapes(text: str) -> list[str]:
    """The same of a report."""
    reader = _Html()
    reader.feed(text)
    return reader.found


_NEVER = ("b", "em", "img", "h4", "iframe", "object", "form", "input")


class _Html(html.parser.HTMLParser):
    """Notes elements, attributes and addresses that have a payload in them, and scripts and styles that do."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at its attributes."""
        self._open.append(tag)
        for name, value in attrs:
            text = value or ""
            is_address = name in ("href", "src", "action") and not re.match(r"#|https://github\.com/|data:", text)
            is_active = name.startswith("on") or WORD in name or (name in ("style", "href") and WORD in text)
            if is_address or is_active or tag in _NEVER:
                self.found.append(f"<{tag} {name}={text[:80]!r}>")
        if tag in _NEVER or (tag == "i" and not attrs):
            self.found.append(f"<{tag}>")

    def handle_data(self, data: str) -> None:
        """Scripts and styles are ours alone."""
        if WORD in data and self._open and self._open[-1] in ("script", "style"):
            self.found.append(data[:200])

    def handle_endtag(self, tag: str) -> None:
        """Back to the element around it."""
        while self._open and self._open.pop() != tag:
            pass

    def handle_comment(self, data: str) -> None:
        """Comments are ours alone."""
        if WORD in data:
            self.found.append(data[:200])


# -- telling ----------------------------------------------------------------------------------------------------------


def summary(parts: dict[str, Counts], seconds: dict[str, float]) -> JSON:
    """The JSON."""
    return {
        name: {
            "files": counts.files,
            "accepted": counts.accepted,
            "commands": counts.commands,
            **{kind: counts.found[kind] for kind in FINDINGS},
            "seconds": round(seconds[name], 1),
            "first": counts.first,
        }
        for name, counts in parts.items()
    }


def table(parts: dict[str, Counts], seconds: dict[str, float]) -> str:
    """A line for each part, and an example of each finding."""
    names = ("files", "accepted", "commands", *FINDINGS, "seconds")
    rows = [(name, *(str(values[column]) for column in names)) for name, values in summary(parts, seconds).items()]
    widths = [max(map(len, column)) for column in zip(("", *names), *rows, strict=True)]
    lines = ["  ".join(word.rjust(width) for word, width in zip(row, widths, strict=True))
             for row in (("", *names), *rows)]  # fmt: skip
    examples = [f"\n{kind}: {where}" for counts in parts.values() for kind, where in counts.first.items()]
    return "\n".join([*lines, *examples])


if __name__ == "__main__":
    sys.exit(main())
