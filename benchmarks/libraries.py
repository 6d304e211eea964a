"""Other people's test suites, bare and watched: does every test end alike, with the same warnings?

    OMP_NUM_THREADS=1 python benchmarks/libraries.py WORK [--library NAME ...] [--plugin] [-- CAPTURE OPTIONS]

The libraries are in `libraries.json`: the name of a distribution whose source archive on the package index has tests,
what the tests need besides, and the tests to run. WORK keeps the environments, the archives and the logs, about 2 GB.
Each suite runs with ``python -m pytest`` and then with ``reprokit capture --after-capture continue -m pytest``, or with
`--plugin` as ``python -m pytest --reprokit``: one capture for each test. A plugin of pytest's, `REPORTER`, notes what
happens. Whatever differs is run twice more both ways, and counts if it differs each time. A table goes to stderr, a
JSON summary to stdout; the exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from command import JSON, new_parser, print_json

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("libraries.json")
CONSTRAINTS = ROOT / "constraints.txt"
TORCH = "torch==2.13.0"  # a looser one pulls gigabytes of CUDA libraries
TOOLS = ("numpy", "scipy", "pytest", "click", "jinja2", "gitpython", "rich", "hatchling")
RUNS = 3  # a test that draws numbers without a seed may differ by itself
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-o", "addopts=")
CAPTURE = ("-m", "reprokit", "capture", "--after-capture", "continue")
UNFINISHED = "unfinished"  # of a test that was set up and has no outcome: the process crashed in it
TIMED_OUT = 124  # the exit code of `timeout`

# How a line of `Session.complain` begins. The text of a user's exception may say "could not" too, further behind.
TROUBLE = re.compile(r"reprokit: (could not|cannot watch|internal|switched off|.{0,60}an error of its own)")
OURS = re.compile(r"(^|/)reprokit/")  # of the path of a file

HEADINGS = (
    "library",
    "tests",
    "pass bare",
    "end otherwise",
    "warnings bare, watched",
    "name reprokit",
    "trouble",
    "seconds bare, watched",
    "commit",
)

REPORTER_FILE = "libraries_reporter.py"
EVENTS = "REPORT_EVENTS"  # the variable with the file of events
LAST = "REPORT_LAST"  # the variable with the last test to run

# A plugin of pytest's: one line of JSON for each phase of a test that did not pass silently, and for each warning. A
# line is written at once, so a suite that crashes leaves all that came before.
REPORTER = """\
import json
import os

FILE = os.environ["REPORT_EVENTS"]
LAST = os.environ.get("REPORT_LAST", "")
PROCESS = os.getpid()


def write(**event):
    if os.getpid() == PROCESS:  # a forked child is not the suite
        with open(FILE, "a") as file:
            file.write(json.dumps(event) + "\\n")


def pytest_collection_modifyitems(items):
    names = [item.nodeid for item in items]
    if LAST in names:
        del items[names.index(LAST) + 1 :]


def pytest_runtest_logreport(report):
    lines = [line for _, text in report.sections for line in text.splitlines() if line.startswith("reprokit:")]
    kind = "error" if report.failed and report.when != "call" else report.outcome
    kind = getattr(report, "wasxfail", None) is not None and f"xfail {kind}" or kind
    write(test=report.nodeid, when=report.when, outcome=kind, lines=sorted(set(lines)))


def pytest_collectreport(report):
    if report.failed:
        write(test=report.nodeid, when="collect", outcome="error", lines=[])


def pytest_warning_recorded(warning_message, when, nodeid, location):
    category = f"{warning_message.category.__module__}.{warning_message.category.__qualname__}"
    file, line = warning_message.filename, warning_message.lineno
    write(warning=str(warning_message.message), category=category, file=file, line=line, test=nodeid, when=when)
"""


@dataclass(frozen=True)
class Library:
    """One entry of the list."""

    name: str  # the distribution's, as the package index knows it
    needs: tuple[str, ...]  # what the tests import besides
    tests: tuple[str, ...]  # files and folders in the source archive
    shape: str  # what kind of loops it has
    version: str = ""  # a requirement such as `==1.2`; the newest if empty
    options: tuple[str, ...] = ()  # of pytest's


@dataclass
class Run:
    """What one run of a suite did."""

    code: int
    seconds: float
    outcomes: dict[str, str] = field(default_factory=dict)  # test -> how it ended, in the suite's order
    warnings: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # (test, category, `file:line`)
    texts: dict[tuple[str, str, str], str] = field(default_factory=dict)  # what each warning says
    lines: list[str] = field(default_factory=list)  # of reprokit's


@dataclass(frozen=True, order=True)
class Difference:
    """One thing that is not the same in a watched run."""

    kind: str  # `test`, `warning`, `exit code`
    test: str  # empty where it belongs to no test
    text: str


@dataclass
class Row:
    """The comparison of one library."""

    library: str
    version: str = ""
    commit: str = ""  # of the reprokit that watched
    tests: int = 0
    passed: int = 0  # bare
    differences: list[Difference] = field(default_factory=list)  # those that came every time
    passing: list[Difference] = field(default_factory=list)  # those that came the first time only
    ours: list[str] = field(default_factory=list)  # warnings that name a file of reprokit
    trouble: list[str] = field(default_factory=list)  # lines of reprokit that report an error of its own
    warnings: tuple[int, int] = (0, 0)  # bare, watched
    codes: tuple[int, int] = (0, 0)
    seconds: tuple[float, float] = (0.0, 0.0)
    note: str = ""  # why there was nothing to compare

    @property
    def is_harmless(self) -> bool:
        """True if the watched suite ended as the bare one did."""
        return not (self.differences or self.ours or self.trouble or self.note)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 0 if nothing differs."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, capture_options = split_words(words)
    options = options_of(own)
    wanted = [library for library in read_list(options.list) if not options.library or library.name in options.library]
    if not wanted:
        print(f"no library of `{options.list}` has that name", file=sys.stderr)
        return 2
    work: Path = options.work.resolve()
    watched = ("--reprokit", "--reprokit-dir", str(work / "snapshots")) if options.plugin else ()
    snapshot = ("-f", "-o", str(work / "snapshots" / f"failing-{os.getpid()}.pt"))
    way = Way((), watched) if options.plugin else Way((*CAPTURE, *snapshot, *capture_options), ())
    commit = prepare_base(work, options.project.resolve())
    (work / "snapshots").mkdir(exist_ok=True)
    rows = []
    for library in wanted:
        row = judge(library, work, way, options)
        row.commit = commit
        rows.append(row)
        print("\n".join(lines_of(row)), file=sys.stderr, flush=True)
    print(table(rows), file=sys.stderr)
    print_json({"rows": [summary_of(row) for row in rows]}, options.json)
    return 0 if all(row.is_harmless for row in rows) else 1


# -- the list and the options ----------------------------------------------------------------------------------------


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """The benchmark's own words, and behind `--` those of `reprokit capture`."""
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """The options of the command."""
    parser = new_parser(__doc__)
    parser.add_argument("work", type=Path, help="keeps the environments, archives and logs")
    parser.add_argument("--library", nargs="+", action="extend", metavar="NAME", help="only these")
    parser.add_argument("--list", type=Path, default=LIST, help="another list of libraries")
    parser.add_argument("--project", type=Path, default=ROOT, help="the reprokit to install")
    parser.add_argument("--plugin", action="store_true", help="watch with `pytest --reprokit`")
    parser.add_argument("--keep-bare", action="store_true", help="take the bare run of before, if there is one")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"runs of what differs (default {RUNS})")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for each run of a suite (default 1800)")
    return parser.parse_args(words)


def read_list(file: Path) -> list[Library]:
    """The libraries of a list; an unknown field is an error."""
    found = []
    for name, entry in json.loads(file.read_text(encoding="utf-8")).items():
        lists = {key: tuple(entry[key]) for key in ("needs", "tests", "options") if key in entry}
        found.append(Library(name=name, **{**entry, **lists}))
    return found


# -- environments and sources ----------------------------------------------------------------------------------------


def prepare_base(work: Path, project: Path) -> str:
    """One environment with torch, pytest and the reprokit of `project`, on which those of the libraries stand; returns
    the commit of `project`, with a `+` behind it where files differ from that commit."""
    python = python_of(work / "base")
    if not python.exists():
        call(sys.executable, "-m", "venv", work / "base")
        call(python, "-m", "pip", "-q", "install", "-c", CONSTRAINTS, TORCH, *TOOLS)
    commit = commit_of(project)
    installed = work / "base" / "commit.txt"
    is_known = bool(commit) and not commit.endswith("+")
    if is_known and installed.exists() and installed.read_text() == commit:
        return commit  # a second process with the same commit leaves the package of the first as it is
    installed.unlink(missing_ok=True)
    call(python, "-m", "pip", "-q", "install", "--force-reinstall", "--no-deps", "--no-build-isolation", project)
    installed.write_text(commit)
    return commit


def commit_of(project: Path) -> str:
    """The short name of the commit that is checked out in `project`; empty where it is no checkout."""
    words = ["git", "-C", str(project), "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def prepare(library: Library, work: Path) -> tuple[Path, Path]:
    """The Python of a library's own environment and the folder with its source."""
    folder = work / "venv" / library.name
    python = python_of(folder)
    requirements = " ".join((TORCH, *library.needs, library.name + library.version))
    complete = folder / "installed.txt"  # written last: with other requirements, or after an interrupt, once more
    if not complete.exists() or complete.read_text() != requirements:
        call(sys.executable, "-m", "venv", folder)
        (packages_of(python) / "base.pth").write_text(f"{packages_of(python_of(work / 'base'))}\n")
        call(python, "-m", "pip", "-q", "install", "-c", CONSTRAINTS, *requirements.split())
        complete.write_text(requirements)
    return python, source_of(library, work, python)


def source_of(library: Library, work: Path, python: Path) -> Path:
    """The unpacked source archive of the installed version; downloads it if it is not here."""
    archives = work / "archives"
    if find_archive(library.name, archives) is None:
        download = ("-m", "pip", "-q", "download", "--no-deps", "--no-binary", library.name, "-d", archives)
        call(python, *download, library.name + library.version)
    archive = find_archive(library.name, archives)
    if archive is None:
        raise FileNotFoundError(f"no source archive of `{library.name}`")
    source = work / "src" / archive.name.removesuffix(".tar.gz")
    if not source.exists():
        with tarfile.open(archive) as tar:
            tar.extractall(work / "src", filter="data")
    return source


def find_archive(name: str, archives: Path) -> Path | None:
    """The archive of a distribution, whose file may write `-`, `_` and `.` alike."""
    wanted = plain_name(name)
    for archive in sorted(archives.glob("*.tar.gz")):
        stem, _, version = archive.name.removesuffix(".tar.gz").rpartition("-")
        if plain_name(stem) == wanted and version:
            return archive
    return None


def plain_name(name: str) -> str:
    """The name of a distribution as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def python_of(environment: Path) -> Path:
    """The interpreter of a virtual environment."""
    return environment / "bin" / "python"


def packages_of(python: Path) -> Path:
    """The folder of the packages of an environment."""
    question = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", question], capture_output=True, text=True, check=True).stdout.strip())


def call(*words: object) -> None:
    """Run a command that has to succeed."""
    subprocess.run([str(word) for word in words], check=True)


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How a suite is watched."""

    prefix: tuple[str, ...]  # the words between the interpreter and `-m pytest`
    options: tuple[str, ...]  # more of pytest's options


BARE = Way((), ())


@dataclass(frozen=True)
class Suite:
    """The tests of a library, ready to run."""

    library: Library
    python: Path
    source: Path
    work: Path
    limit: float

    def run(self, kind: str, way: Way, last: str = "") -> Run:
        """Run the suite up to the test `last`, or all of it; `kind` names its log."""
        logs = self.work / "logs"
        logs.mkdir(exist_ok=True)
        (logs / REPORTER_FILE).write_text(REPORTER)
        events = logs / f"{self.library.name}-{kind}.jsonl"
        events.unlink(missing_ok=True)
        events.with_suffix(".json").unlink(missing_ok=True)
        before = os.environ.get("PYTHONPATH")
        path = os.pathsep.join(filter(None, [str(logs), before]))
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, EVENTS: str(events), LAST: last}
        reporter = ("-p", REPORTER_FILE.removesuffix(".py"))
        words = (*way.prefix, *PYTEST, *reporter, *way.options, *self.library.options, *self.library.tests)
        with open(events.with_suffix(".log"), "wb") as log, open(events.with_suffix(".err"), "wb") as errors:
            started = time.monotonic()
            code = self._call(words, environment, log, errors)
            seconds = time.monotonic() - started
        end = {"words": self._words(), "code": code, "seconds": seconds}
        events.with_suffix(".json").write_text(json.dumps(end))
        lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
        return read_run(lines, self._errors_of(kind), code, seconds)

    def _errors_of(self, kind: str) -> str:
        file = self.work / "logs" / f"{self.library.name}-{kind}.err"
        return file.read_text(encoding="utf-8", errors="replace")

    def kept(self, kind: str) -> Run | None:
        """A run of before, from its log; `None` if there is none, or one of other tests."""
        events = self.work / "logs" / f"{self.library.name}-{kind}.jsonl"
        if not events.with_suffix(".json").exists():
            return None
        end = json.loads(events.with_suffix(".json").read_text())
        if end.get("words") != self._words():
            return None
        lines = events.read_text(encoding="utf-8").splitlines()
        return read_run(lines, self._errors_of(kind), end["code"], end["seconds"])

    def _words(self) -> list[str]:
        """What is run, for a later process that asks for the same."""
        return [*self.library.options, *self.library.tests]

    def _call(self, words: Sequence[str], environment: dict[str, str], log: IO[bytes], errors: IO[bytes]) -> int:
        command = [str(self.python), *words]
        try:
            return subprocess.run(
                command,
                cwd=self.source,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=errors,
                timeout=self.limit,
            ).returncode
        except subprocess.TimeoutExpired:
            return TIMED_OUT


def read_run(events: Iterable[str], text: str, code: int, seconds: float) -> Run:
    """The events of the reporter and what the process printed on stderr as one record."""
    run = Run(code, seconds)
    for line in events:
        event = json.loads(line)
        if "warning" in event:
            key = (event["test"], event["category"], f"{event['file']}:{event['line']}")
            run.warnings[key] += 1
            run.texts.setdefault(key, event["warning"])
        else:
            before = run.outcomes.get(event["test"])
            run.outcomes[event["test"]] = joined_outcome(before, event["when"], event["outcome"])
            run.lines += event["lines"]
    run.lines += [line for line in text.splitlines() if line.startswith("reprokit:")]
    run.lines = sorted(set(run.lines))
    return run


def joined_outcome(before: str | None, when: str, now: str) -> str:
    """How a test ended after one more of its phases: the first that is not plain success is its outcome."""
    if before not in (None, UNFINISHED, "passed"):
        return before
    has_begun = when == "setup" and now == "passed"
    return UNFINISHED if has_begun else now


# -- comparing ---------------------------------------------------------------------------------------------------------


def judge(library: Library, work: Path, way: Way, options: argparse.Namespace) -> Row:
    """Run a suite bare and watched, and what differs again."""
    row = Row(library.name)
    try:
        python, source = prepare(library, work)
    except (subprocess.CalledProcessError, OSError) as error:
        row.note = str(error)
        return row
    suite = Suite(library, python, source, work, options.limit)
    row.version = source.name.rpartition("-")[2]
    before = suite.kept("bare") if options.keep_bare else None
    bare = before or suite.run("bare", BARE)
    watched = suite.run("watched", way)
    fill(row, bare, watched)
    found = differences(bare, watched)
    row.differences = sorted(confirmed(suite, way, found, list(bare.outcomes), options.runs))
    row.passing = sorted(found - set(row.differences))
    return row


def confirmed(
    suite: Suite, way: Way, found: set[Difference], order: Sequence[str], num_runs: int = RUNS
) -> set[Difference]:
    """Those differences that more runs show as well. Each runs all that came before them: a test may fail only after
    others."""
    for number in range(2, num_runs + 1):
        if not found:
            break
        last = last_of(found, order)
        bare = suite.run(f"bare-{number}", BARE, last)
        watched = suite.run(f"watched-{number}", way, last)
        found = found & differences(bare, watched)
    return found


def last_of(found: Iterable[Difference], order: Sequence[str]) -> str:
    """The last test in the suite's order that a difference belongs to; empty, for all, if one belongs to none."""
    places = {test: place for place, test in enumerate(order)}
    needed = [places.get(difference.test) for difference in found if difference.kind != "exit code"]
    if not needed or None in needed:
        return ""
    return order[max(place for place in needed if place is not None)]


def differences(bare: Run, watched: Run) -> set[Difference]:
    """All that is not the same in two runs."""
    found = set()
    for test in bare.outcomes.keys() | watched.outcomes.keys():
        ends = [run.outcomes.get(test, "missing") for run in (bare, watched)]
        if ends[0] != ends[1]:
            found.add(Difference("test", test, f"{ends[0]} -> {ends[1]}"))
    for key in bare.warnings.keys() | watched.warnings.keys():
        counts = [run.warnings[key] for run in (bare, watched)]
        if counts[0] != counts[1]:
            test, category, place = key
            found.add(Difference("warning", test, f"{category} at {place}: {counts[0]} -> {counts[1]}"))
    if bare.code != watched.code:
        found.add(Difference("exit code", "", f"{bare.code} -> {watched.code}"))
    return found


def fill(row: Row, bare: Run, watched: Run) -> None:
    """Write the numbers of two runs into the row."""
    row.tests = len(bare.outcomes)
    row.passed = sum(outcome == "passed" for outcome in bare.outcomes.values())
    row.ours = sorted({f"{place} {category}" for _, category, place in watched.warnings if OURS.search(place)})
    row.trouble = [line for line in watched.lines if TROUBLE.match(line)]
    row.warnings = (bare.warnings.total(), watched.warnings.total())
    row.codes = (bare.code, watched.code)
    row.seconds = (bare.seconds, watched.seconds)
    if not bare.outcomes:
        row.note = f"no test ran (exit code {bare.code})"


# -- printing ----------------------------------------------------------------------------------------------------------


def lines_of(row: Row) -> list[str]:
    """What is to be known of a library, the first line in short."""
    verdict = "alike" if row.is_harmless else "DIFFERS"
    lines = [
        f"{row.library} {row.version}: {verdict}, {row.tests} tests, {row.seconds[0]:.0f} -> {row.seconds[1]:.0f} s"
    ]
    lines += [f"    {row.note}"] if row.note else []
    lines += [f"    {one.kind} {one.test}: {one.text}" for one in row.differences]
    lines += [f"    once only: {one.kind} {one.test}: {one.text}" for one in row.passing]
    lines += [f"    a file of reprokit: {text}" for text in row.ours]
    lines += [f"    {line}" for line in row.trouble]
    return lines


def table(rows: Sequence[Row]) -> str:
    """The table for the README."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    for row in rows:
        otherwise = sum(one.kind == "test" for one in row.differences)
        cells = (
            f"{row.library} {row.version}",
            str(row.tests),
            str(row.passed),
            str(otherwise),
            f"{row.warnings[0]}, {row.warnings[1]}",
            str(len(row.ours)),
            str(len(row.trouble)),
            f"{row.seconds[0]:.0f}, {row.seconds[1]:.0f}",
            row.commit,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary_of(row: Row) -> JSON:
    """A row as plain data."""
    return {**asdict(row), "is_harmless": row.is_harmless}


if __name__ == "__main__":
    sys.exit(main())
