"""Files from strangers: code that runs, text that leaves its place, and files that are more than reprokit can take.

    OMP_NUM_THREADS=1 python benchmarks/hostile.py [--fields N] [--mutations N] [--seed N] [--jobs N] [--json FILE]

Real snapshots and reductions are made first. **Fields**: a file for every text field of the grammar and every context,
with a text that tries to leave that context (`payloads.py`); `show` opens a snapshot, `render` a reduction.
**Crafted** files join the fields that were accepted, some of one context in each file; a file goes through show,
verify, render and, in turns, shrink and whatif. **Mutations** are damaged files and files with junk in them, opened as
fields are. Every file is opened in a forked child with a time limit and 8 GiB of address space. ``verify`` runs the
gated script in the child, but for a few files that go through the command as it is. A payload that is executed writes a
marker file. Everything printed and written is parsed. A table goes to stderr, JSON to stdout; exit code 1 on any
finding.
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
from reprokit.render.gate import require_closed
from reprokit.render.verify import CleanProcesses, CleanRun
from reprokit.shrink.reducer import shrink
from reprokit.shrink.reduction import Reduction
from reprokit.snapshot.format import Snapshot, load
from reprokit.words import visible

MEMORY = 8 * 2**30
SECONDS = 60.0  # for all commands of one crafted file, or for one other file; six times that with real processes
BATCH = 40
JOINED = 8  # fields in one crafted file
FAULTS = ("forward", "backward", "exception")
FINDINGS = ("executed", "tracebacks", "hangs", "terminal", "markdown", "html", "refused scripts")
OURS = re.compile(
    r"<details><summary>[^<]*</summary>|</details>|<!-- (?:Title: |please say )(?:(?!--).)*-->|\s+", re.ASCII
)


@dataclass
class Counts:
    """Numbers of files, accepted files, commands and findings of each kind. ``first`` has an example of each."""

    files: int = 0
    accepted: list[Trial] = field(default_factory=list)
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
        parts = dict[str, Counts]()
        seconds = dict[str, float]()
        for name, trials, batch in (
            ("fields", lambda: spread(list(field_trials(seeds, folder)), options.fields), BATCH),
            ("crafted", lambda: list(joined(parts["fields"].accepted, seeds)), 1),
            ("mutations", lambda: list(islice(mutations(seeds, options.seed), options.mutations)), BATCH),
        ):
            parts[name] = try_all(trials(), folder, batch, options.jobs)
            seconds[name] = time.perf_counter() - started - sum(seconds.values())
            print(f"{name}: {parts[name].files} files in {seconds[name]:.0f} s", file=sys.stderr)
    print(table(parts, seconds), file=sys.stderr)
    print_json(summary(parts, seconds), options.json)
    return 1 if any(counts.found for counts in parts.values()) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--fields", type=int, default=10**6, help="fields x contexts at most (default: all)")
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
    """A file of the kind of ``seed``, and how it is made. ``beside`` is the snapshot of a crafted reduction.

    ``places`` in the ``full`` file hold the ``text`` of a ``context``; a mutation has none.
    """

    name: str
    seed: str
    number: int
    make: Callable[[Path], None]
    is_crafted: bool = False
    beside: JSON | None = None
    full: JSON = field(default_factory=dict)
    places: tuple[payloads.Path_, ...] = ()
    context: str = ""
    text: str = ""

    @property
    def is_real(self) -> bool:
        """True for a crafted file whose scripts run in real clean processes, 20 times each."""
        return self.is_crafted and self.number % 211 == 0


def field_trials(seeds: dict[str, JSON], folder: Path) -> Iterator[Trial]:
    """A file for every text field and context, one of the seeds in turn for each."""
    full = {name: _full(content) for name, content in seeds.items()}
    number = 0
    for turn, (context, text) in enumerate(payloads.contexts(folder / "EXECUTED").items()):
        seen = set[tuple[str, str]]()
        for name in (*list(seeds)[2 * turn % len(seeds) :], *list(seeds)[: 2 * turn % len(seeds)]):
            for place, path in payloads.fields(full[name]).items():
                if (seeds[name]["kind"], place) not in seen:
                    seen.add((seeds[name]["kind"], place))
                    number += 1
                    make = _crafter(full[name], (path,), text)
                    title = f"{name}: {place} as {context}"
                    yield Trial(title, name, number, make, False, None, full[name], (path,), context, text)


def joined(trials: Sequence[Trial], seeds: dict[str, JSON]) -> Iterator[Trial]:
    """Files with several fields each, of one seed and context; a reduction has its snapshot beside it."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.seed, trial.context), []).append(trial)
    chunks = [part[start : start + JOINED] for part in groups.values() for start in range(0, len(part), JOINED)]
    for number, chunk in enumerate(chunks):
        first, places = chunk[0], tuple(place for trial in chunk for place in trial.places)
        beside = seeds[f"{first.seed.split('/')[0]}.repro.pt"] if "/" in first.seed else None
        title = "; ".join(trial.name for trial in chunk)
        make = _crafter(first.full, places, first.text)
        yield Trial(title, first.seed, number, make, True, beside, first.full, places, first.context, first.text)


def _full(content: JSON) -> JSON:
    full = payloads.filled(content, Snapshot if content["kind"] == "snapshot" else Reduction)
    if isinstance(full.get("origin"), dict):
        full["origin"].pop("snapshot", None)  # so that the crafted snapshot beside it is taken for its own
    return full


def mutations(seeds: dict[str, JSON], seed: int) -> Iterator[Trial]:
    """Damaged files without end."""
    raw = {name: _bytes(content) for name, content in seeds.items()}
    number = 0
    while True:
        for name, content in seeds.items():
            number += 1
            yield Trial(f"{name}: mutation {number}", name, number, _damager(content, raw[name], f"{seed}-{number}"))


def _crafter(content: JSON, places: Sequence[payloads.Path_], text: str) -> Callable[[Path], None]:
    return lambda path: torch.save(payloads.crafted(content, places, text), path)


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
    """At most ``most`` of the trials, evenly spaced."""
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
        """Read the reports of finished files; true at the end of the process."""
        text = os.read(self.reader, 1 << 16)
        self._text += text
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            report = json.loads(line)
            counts.accepted += [self._trials[self._done]] if report["accepted"] else []
            self._done += 1
            self._since = time.monotonic()
            counts.files += 1
            counts.commands += report["commands"]
            for kind, where in report["found"]:
                counts.note(kind, where)
        return not text

    def is_late(self, counts: Counts) -> bool:
        """Kill it if a file takes too long."""
        is_real = any(trial.is_real for trial in self._trials)
        if self._done == len(self._trials) or time.monotonic() - self._since < (6 * SECONDS if is_real else SECONDS):
            return False
        counts.note("hangs", self._trials[self._done].name)
        counts.files += 1
        self._killed = True
        os.killpg(self._pid, signal.SIGKILL)
        return True

    def close(self, counts: Counts) -> list[Trial]:
        """Wait for the process to end; the files that it has not opened."""
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
        self._file = folder / ("x/reduction.pt" if "/" in trial.seed else "x.repro.pt")
        self._file.parent.mkdir(exist_ok=True)

    def report(self) -> JSON:
        """Findings, the number of commands, and ``accepted`` if the file was opened."""
        trial = self._trial
        self._file.unlink(missing_ok=True)
        with contextlib.suppress(Exception) if not trial.places else contextlib.nullcontext():
            trial.make(self._file)
        if trial.beside is not None:
            torch.save(trial.beside, self._folder / "x.repro.pt")
        opening = ("render",) if "/" in trial.seed else ("show", "--max-time", "20")
        if trial.is_crafted:
            is_accepted = self._try_crafted()
        else:
            is_accepted = self._run(*opening) == 0 or (bool(trial.places) and "is damaged" not in self._said())
        if self._marker.exists():
            self._note("executed", "")
            self._marker.unlink()
        return {"accepted": is_accepted, "commands": self._commands, "found": self._found}

    def _try_crafted(self) -> bool:
        first = self._run("show", "--json") if self._trial.beside is None else self._run("render")
        if first in (1, 2) and "is damaged" in self._said():
            return False
        if self._trial.beside is None:
            self._run("show")
        patched = mock.patch.multiple(CleanProcesses, open=_not_opened, runs=_here)
        with contextlib.nullcontext() if self._trial.is_real else patched:
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
        kinds = {"summary.md": "issue", "issue.md": "issue", "report.html": "report", "test_repro.py": "test"}
        for name, kind in (kinds | dict.fromkeys(("repro.py", "repro_module.py"), "repro")).items():
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

    def _run(self, name: str, *words: str) -> int:
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


def _not_opened(processes: CleanProcesses) -> None:
    """Stands for the start of clean processes."""


def _here(processes: CleanProcesses, number: int, script: Path, times: int, seconds: float) -> list[CleanRun]:
    """Stands for the clean processes of `verify`: the script, in this process."""
    output, errors = io.StringIO(), ""
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except Exception:
            errors = traceback.format_exc()
    return [CleanRun(1 if errors else 0, output.getvalue(), errors)]


# -- reading texts ------------------------------------------------------------------------------------------------


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
    """Elements, attributes and addresses of a report that hold a payload."""
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


# -- output -----------------------------------------------------------------------------------------------------------


def summary(parts: dict[str, Counts], seconds: dict[str, float]) -> JSON:
    """The JSON."""
    return {
        name: {
            "files": counts.files,
            "accepted": len(counts.accepted),
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
