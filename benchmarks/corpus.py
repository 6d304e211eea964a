"""Run the whole tool over a folder of failing training scripts and score it against what an expert found.

    python benchmarks/corpus.py CORPUS [--case NAME ...] [--jobs N] [--out DIR] [--json FILE] [--compare FILE]

Every case is a folder with ``train.py`` and ``case.json``. For each one the public commands are run: capture, show,
shrink, and then ``repro.py`` by itself, three times, in an empty folder with a clean interpreter. The code of a fix
is pasted into the script, which is run again. A table goes to stderr, a JSON summary to stdout. A command that fails is
part of the score, never the end of the benchmark.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from command import JSON, find_cases, new_corpus_parser, print_json
from pasting import paste

REPRO_RUNS = 3

# What is counted in the summary: field of `Row` -> heading.
CHECKS = {
    "captured": "captured",
    "step": "step",
    "phase": "phase",
    "blame": "blame",
    "module": "module",
    "kind": "kind",
    "exact": "exact",
    "repro": "repro",
    "calls_ok": "calls",
    "elements_ok": "elems",
    "one_minimal": "1-min",
    "no_side_file": "alone",
    "issue_ok": "issue",
    "report_ok": "report",
    "diagnosis_ok": "diag",
    "fix": "fix",
    "pasted": "pasted",
    "ruff_ok": "ruff",
}
# What a diagnosis of a family may be about: words, one of which is part of the id of its entry. A coarse score.
THEMES = {
    "bad_data": ("bad-data", "constant", "zero-by-zero", "average"),
    "custom_optimizer": ("update", "optimizer", "eps", "zero-by-zero", "division-by-zero"),
    "divergence": ("divergence", "blowup", "exploding", "huge", "overflow", "recurrent"),
    "domain_error": ("negative", "outside", "below"),
    "edge_derivative": ("gradient-at", "gradient"),
    "empty_reduction": ("of-one", "nothing", "average", "ignored"),
    "half_precision": ("half", "eps-lost", "underflowed"),
    "inf_logits": ("masked-logits", "infinity"),
    "linalg_backward": ("eigenvalues", "cholesky"),
    "log_of_zero": ("log-zero", "log-of-zero", "log-of-softmax"),
    "log_space": ("logsumexp", "with-infinity"),
    "masked_softmax": ("masked-softmax",),
    "normalisation": ("norm", "zero-vector", "constant"),
    "overflow": ("overflow", "exp-", "with-infinity"),
    "sqrt_at_zero": ("sqrt", "norm", "hypot"),
    "where_trap": ("where-trap",),
    "zero_division": ("zero-by-zero", "division", "average", "constant", "nothing", "vector"),
}
MAX_ISSUE_CHARACTERS = 65_536
ISSUE_PARTS = (
    "<!-- Title: ",
    "**Observed:**",
    "**Expected:**",
    "```python",
    "python repro.py",
    " of 20 runs in the same way",
    "In your own words",
    "mechanically",
    "<summary>Reduction log</summary>",
    "PyTorch version",
)


@dataclass
class Row:
    """The score of one case. ``None`` means not reached or not applicable."""

    case: str
    captured: bool = False
    step: bool = False
    phase: bool = False
    blame: bool = False
    module: bool | None = None
    kind: bool = False
    exact: bool = False
    repro: bool = False
    calls_ok: bool = False
    elements_ok: bool = False
    one_minimal: bool = False
    no_side_file: bool = False
    issue_ok: bool = False
    report_ok: bool | None = None
    diagnosis_ok: bool | None = None
    fix: bool = False
    pasted: bool | None = None
    ruff_ok: bool | None = None
    calls: int | None = None
    elements: int | None = None
    lines: int | None = None
    checks: int | None = None
    capture_seconds: float = 0.0
    shrink_seconds: float = 0.0
    origin: str = ""
    diagnosis: str = ""
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finished:
    """A command that ended: exit code, output, seconds."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    def json(self) -> JSON | None:
        """The last line of stdout that is a JSON object."""
        for line in reversed(self.stdout.splitlines()):
            if line.startswith("{"):
                try:
                    return dict(json.loads(line))
                except ValueError:
                    continue
        try:
            return dict(json.loads(self.stdout[self.stdout.index("{") :]))
        except ValueError:
            return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 0 when every case went through all commands."""
    options = _parse(argv)
    folders = find_cases(options, "case.json")
    if not folders:
        return 2
    with tempfile.TemporaryDirectory(prefix="corpus-") as scratch:
        out = options.out or Path(scratch)
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            rows = list(pool.map(lambda folder: run_case(folder, out / folder.name, options.timeout), folders))
    summary = summarise(rows)
    print(table(rows), file=sys.stderr)
    print_json(summary, options.json)
    if options.compare:
        print(compare(json.loads(options.compare.read_text()), summary), file=sys.stderr)
    return 0 if not any(row.errors for row in rows) else 1


def run_case(folder: Path, work: Path, timeout: float) -> Row:
    """Run all commands on a copy of one case."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folder, work)
    case: JSON = json.loads((folder / "case.json").read_text())
    captured = _reprokit(["capture", "--json", "-o", "snap.pt", "train.py"], work, timeout)
    if not (work / "snap.pt").exists():
        return Row(folder.name, capture_seconds=captured.seconds, errors=[f"capture: {_last(captured)}"])
    shown = _reprokit(["show", "--json", "snap.pt"], work, timeout)
    shrunk = _reprokit(["shrink", "--json", "--no-whatif", "-o", "out", "snap.pt"], work, timeout)
    repros = _run_repro(work / "out", shrunk.json(), timeout)
    row = score(folder.name, case, shown.json(), shrunk.json(), repros, _text_of(work / "out" / "issue.md"))
    row.pasted = is_healed_by_pasting(folder, work, shrunk.json(), timeout)
    row.report_ok = opens_cleanly(work / "out" / "report.html")
    row.ruff_ok = is_clean_code(sorted((work / "out").glob("repro*.py")))
    row.capture_seconds, row.shrink_seconds = round(captured.seconds, 2), round(shrunk.seconds, 2)
    commands = {"show": shown, "shrink": shrunk}
    row.errors += [f"{name}: {_last(done)}" for name, done in commands.items() if done.code != 0]
    return row


def score(
    case_id: str, case: JSON, shown: JSON | None, shrunk: JSON | None, repros: Sequence[Finished], issue: str
) -> Row:
    """The row of a case, from what the commands printed and the text of the issue."""
    row = Row(case_id)
    if shown is not None:
        _score_failure(row, case, shown)
    if shrunk is not None:
        _score_reduction(row, case, shrunk)
    is_stable = len({(done.stdout, done.code) for done in repros}) == 1
    row.issue_ok = is_whole_issue(issue)
    row.repro = len(repros) == REPRO_RUNS and is_stable and all(done.code == 1 for done in repros)
    return row


def _score_failure(row: Row, case: JSON, shown: JSON) -> None:
    failure = shown["failure"]
    row.captured = True
    row.origin = f"{failure['call']} in {failure['module']}"
    row.step = failure["step"] == case["first_bad_step"]
    row.phase = failure["phase"] == {"loss": "forward"}.get(case["phase"], case["phase"])
    row.kind = failure["kind"] == case["kind"]
    row.blame = is_accepted(failure["call"], case["accept_calls"])
    if case.get("culprit_module"):
        row.module = is_inside(failure["module"], case["culprit_module"])
    row.exact = shown["fidelity"] == "exact"


def _score_reduction(row: Row, case: JSON, shrunk: JSON) -> None:
    row.calls, row.elements, row.checks = shrunk.get("calls"), shrunk.get("elements"), shrunk.get("checks")
    row.calls_ok = row.calls is not None and row.calls <= case["minimal_ops"]
    row.elements_ok = row.elements is not None and row.elements <= 2 * case["minimal_numel"]
    row.one_minimal = bool(shrunk.get("one_minimal"))
    diagnosis = shrunk.get("diagnosis") or {}
    row.diagnosis = diagnosis.get("id", "")
    themes = THEMES.get(case.get("family", ""))
    row.diagnosis_ok = any(theme in row.diagnosis for theme in themes) if themes is not None else None
    fix = diagnosis.get("fix") or {}
    row.fix = bool(fix.get("helped")) and fix.get("is_plausible", True)
    repro = shrunk.get("repro") or {}
    row.lines = repro.get("lines")
    row.no_side_file = len(repro.get("files", ())) == 1


def is_whole_issue(text: str) -> bool:
    """Whether an issue text is within the limit, has all its parts, and names no home folder."""
    is_closed = text.count("<details>") == text.count("</details>") > 0
    is_private = f"{Path.home()}/" not in text
    said = text.replace("### Expected behavior", "**Expected:**")  # the form of transformers has a heading for it
    is_complete = all(part in said for part in ISSUE_PARTS)
    return len(text) <= MAX_ISSUE_CHARACTERS and is_closed and is_private and is_complete


def is_healed_by_pasting(case: Path, work: Path, shrunk: JSON | None, timeout: float) -> bool | None:
    """Whether the whole script runs to its end, under capture, with the code of the fix pasted over its lines.

    ``None`` where there is no code for lines of the script: a change in a library, or of the optimizer's options.
    """
    fix = ((shrunk or {}).get("diagnosis") or {}).get("fix") or {}
    source = paste(fix.get("code", ""), "train.py", (work / "train.py").read_text(encoding="utf-8"))
    if source is None:
        return None
    folder = work / "pasted"
    shutil.copytree(case, folder)
    (folder / "train.py").write_text(source, encoding="utf-8")
    return _reprokit(["capture", "-o", "snap.pt", "train.py"], folder, timeout).code == 0


def opens_cleanly(report: Path) -> bool | None:
    """Whether a report opens in Chromium with nothing on the console; ``None`` where there is no Chromium."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        return None
    if not report.is_file():
        return False
    with tempfile.TemporaryDirectory(prefix="profile-") as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
        command = [browser, *options, f"--user-data-dir={profile}", report.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode == 0 and "CONSOLE" not in done.stderr and "<h1" in done.stdout


def is_clean_code(files: Sequence[Path]) -> bool | None:
    """Whether ruff's default rules and layout have nothing to say; ``None`` where ruff is not installed."""
    if not files or importlib.util.find_spec("ruff") is None:
        return None
    ruff = [sys.executable, "-m", "ruff"]
    paths = [str(file) for file in files]
    checks = (["check", "--isolated", "--no-cache"], ["format", "--check", "--isolated", "--no-cache"])
    return all(subprocess.run([*ruff, *check, *paths], capture_output=True).returncode == 0 for check in checks)


def is_accepted(call: str | None, accepted: Sequence[str]) -> bool:
    """Whether the origin's name is one of the right answers, compared by last components."""
    return call is not None and any(f".{call}".endswith(f".{name}") for name in accepted)


def is_inside(module: str | None, culprit: str) -> bool:
    """Whether the tool's module is the culprit or inside it; ``(root)`` is a name in angle brackets."""
    if module is None:
        return False
    if culprit == "(root)":
        return module.startswith("<")
    return module == culprit or module.startswith(f"{culprit}.")


def summarise(rows: Sequence[Row]) -> JSON:
    """Counts, medians and all rows."""
    counts = {}
    for name in CHECKS:
        values = [getattr(row, name) for row in rows if getattr(row, name) is not None]
        counts[name] = f"{sum(values)}/{len(values)}"
    return {
        "cases": len(rows),
        "counts": counts,
        "medians": {
            name: _median([getattr(row, name) for row in rows])
            for name in ("lines", "checks", "calls", "elements", "capture_seconds", "shrink_seconds")
        },
        "rows": [asdict(row) for row in rows],
    }


def table(rows: Sequence[Row]) -> str:
    """The rows as fixed-width text, with a line of counts below."""
    width = max(len(row.case) for row in rows)
    head = " ".join(f"{heading:>8}" for heading in CHECKS.values())
    numbers = f"{'calls':>5} {'elem':>5} {'lines':>5} {'checks':>6} {'capture':>7} {'shrink':>6}"
    lines = [f"{'case':{width}} {head} {numbers}"]
    for row in rows:
        marks = " ".join(f"{_mark(getattr(row, name)):>8}" for name in CHECKS)
        numbers = f"{_text(row.calls):>5} {_text(row.elements):>5} {_text(row.lines):>5} {_text(row.checks):>6}"
        lines.append(f"{row.case:{width}} {marks} {numbers} {row.capture_seconds:7.1f} {row.shrink_seconds:6.1f}")
        lines += [f"  {error}" for error in row.errors]
    summary = summarise(rows)
    lines.append(f"{'':{width}} " + " ".join(f"{summary['counts'][name]:>8}" for name in CHECKS))
    lines.append("medians: " + ", ".join(f"{name} {value}" for name, value in summary["medians"].items()))
    return "\n".join(lines)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Which checks of which cases changed since an earlier summary."""
    old = {row["case"]: row for row in before["rows"]}
    lines = []
    for row in after["rows"]:
        earlier = old.get(row["case"])
        if earlier is None:
            lines.append(f"new     {row['case']}")
            continue
        changed = [name for name in CHECKS if earlier.get(name) != row[name]]
        lines += [f"{'better' if row[name] else 'worse':7} {row['case']}: {CHECKS[name]}" for name in changed]
    return "\n".join(lines) or "no case changed"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_corpus_parser(__doc__, jobs=2)
    parser.add_argument("--out", type=Path, help="keep all files here")
    parser.add_argument("--compare", type=Path, help="an earlier summary")
    return parser.parse_args(argv)


def _reprokit(arguments: Sequence[str], folder: Path, timeout: float) -> Finished:
    return _execute([sys.executable, "-m", "reprokit", *arguments], folder, timeout)


def _run_repro(out: Path, shrunk: JSON | None, timeout: float) -> list[Finished]:
    """``repro.py`` with only its own files, in a clean interpreter that cannot import reprokit from here."""
    files = (shrunk or {}).get("repro", {}).get("files", [])
    if not files:
        return []
    with tempfile.TemporaryDirectory(prefix="repro-") as clean:
        for name in files:
            shutil.copy(out / Path(name).name, clean)
        return [_execute([sys.executable, "-I", "repro.py"], Path(clean), timeout) for _ in range(REPRO_RUNS)]


def _execute(command: Sequence[str], folder: Path, timeout: float) -> Finished:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Finished(124, "", f"no end within {timeout:.0f} s", timeout)
    return Finished(done.returncode, done.stdout, done.stderr, time.perf_counter() - started)


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _last(done: Finished) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return f"exit {done.code}: {' | '.join(lines[-2:])[:300]}"


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 2) if known else None


def _mark(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"


def _text(value: int | None) -> str:
    return "-" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
