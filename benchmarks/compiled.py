"""Twelve compile mismatches, from a training run to a repro: how many are captured as one, and how small they become.

    python benchmarks/compiled.py [--case NAME ...] [--json FILE]

Each case of `miscompiled.py` fails in its compiled part only: a compiled model, a compiled loss or a whole compiled
step, by one faulty decomposition (`miscompilers.py`) or by what inductor does with half precision. It is captured,
reduced and verified by the commands a user would type. The table goes to stderr, JSON to stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from command import new_parser, print_json
from miscompiled import CASES

HERE = Path(__file__).parent
MOST_CALLS = 3
_SECONDS = 600.0


@dataclass(frozen=True)
class Row:
    """A case: its failure as captured, the calls that are left, and how the repro was verified.

    ``note`` is what a command said when it gave no result.
    """

    case: str
    part: str
    kind: str = ""
    call: str | None = None
    fidelity: str = ""
    calls: int | None = None
    checks: int | None = None
    verified: str = ""
    seconds: float = 0.0
    note: str = ""

    @property
    def is_small(self) -> bool:
        """True if a few calls are left, and the repro shows the failure every time."""
        agreed, _, times = self.verified.partition("/")
        return self.calls is not None and 0 < self.calls <= MOST_CALLS and agreed == times != ""


def run_case(name: str, folder: Path) -> Row:
    """Capture and reduce one case."""
    case, started = CASES[name], time.monotonic()
    snapshot = folder / f"{name}.repro.pt"
    captured = _reprokit("capture", "-o", snapshot, HERE / "miscompiled.py", name)
    row = Row(name, case.part)
    if not snapshot.exists():
        return Row(name, case.part, note=_last_line(captured.stderr))
    failure = json.loads(_reprokit("show", "--json", snapshot).stdout)
    row = Row(name, case.part, failure["failure"]["kind"], failure["failure"]["call"], failure["fidelity"])
    is_own = not isinstance(case.compiler, str)
    check = ["--check", f"mismatch:compile:{HERE / 'miscompilers.py'}:{name}"] if is_own else []
    made = _reprokit("shrink", "--json", "-q", "-o", folder / name, *check, snapshot)
    if made.returncode:
        return Row(**{**asdict(row), "note": _last_line(made.stderr), "seconds": time.monotonic() - started})
    found = json.loads(made.stdout)
    result = {"calls": found["calls"], "checks": found["checks"], "verified": found["repro"]["verified"]}
    return Row(**{**asdict(row), **result, "seconds": time.monotonic() - started})


def _reprokit(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reprokit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("reprokit:")]
    return lines[-1] if lines else ""


def main() -> int:
    """Run the cases; ends with 1 if fewer than nine in twelve become small, or one becomes nothing."""
    parser = new_parser(__doc__)
    parser.add_argument("--case", nargs="+", choices=CASES, metavar="NAME", help="only these cases")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.case or CASES:
            row = run_case(name, Path(folder))
            rows.append(row)
            told = (
                row.kind,
                row.call,
                row.fidelity,
                row.calls,
                row.checks,
                row.verified,
                f"{row.seconds:.0f} s",
                row.note,
            )
            print(f"{name:17}{row.part:6}", *told, sep="  ", file=sys.stderr, flush=True)
    small, empty = sum(row.is_small for row in rows), sum(row.calls == 0 for row in rows)
    print(f"{small} of {len(rows)} in {MOST_CALLS} calls or fewer, {empty} in none", file=sys.stderr)
    print_json({"rows": [asdict(row) for row in rows], "small": small, "empty": empty}, options.json)
    return 0 if 4 * small >= 3 * len(rows) and not empty else 1


if __name__ == "__main__":
    sys.exit(main())
