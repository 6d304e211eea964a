"""`reprokit diff` on pairs of runs whose difference is known.

    python benchmarks/diff.py [--only WAY[,WAY]] [--json FILE] [--texts]

Every script of `pairs/` runs once as it is and once in each way; a step of each is saved with ``--at-step``.
Of 24 planted differences the first call (with its line, or the input) should be named; in 12 pairs that agree up to
rounding none may be. The table goes to stderr, JSON to stdout; exit code 1 when an aim is missed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from command import new_parser, print_json

PAIRS = Path(__file__).resolve().parent / "pairs"
LEAST_NAMED, MOST_INVENTED = 22, 0
SAME = "the runs (agree in all bits|differ by rounding)"


class Pair(NamedTuple):
    """A way of a script, and what the output of `diff` has to match."""

    script: str
    way: str
    truth: str
    step: int = 0
    options: tuple[str, ...] = ()


PLANTED = [
    Pair("attention", "shim", r"first different call: [^\n]*`0.1.norm1`|first different call: .*in `1.norm1`"),
    Pair("attention", "eps", r"`torch.nn.functional.layer_norm` in `1.norm1`.*\n.*eps: 1e-05 -> 0.001"),
    Pair("attention", "gelu", r"`torch.nn.functional.gelu` in `1.mlp.1`.*\n.*approximate: none -> tanh"),
    Pair("attention", "no_scale", r"only the first has `(div|truediv)`[^\n]*; only the second has no call"),
    Pair("attention", "tf32", r"only the second has [^\n]*`round`"),
    Pair("attention", "mask", r"`torch.Tensor.tril`[^\n]*attention.py"),
    Pair(
        "attention", "softmax_dim", r"`torch.Tensor.softmax`.*\n[^\n]*-1 -> -2|only the second has [^\n]*`nan_to_num`"
    ),
    Pair(
        "attention",
        "three_linears_wrong",
        r"only the first has `linear` and `chunk`[^\n]*; only the second has [^\n]*`linear`",
    ),
    Pair("attention", "detach", r"`torch.Tensor.detach`"),
    Pair("attention", "no_residual", r"only the first has `add`"),
    Pair("attention", "in_place", r"`(torch.Tensor.)?mul_?`|`add_`"),
    Pair("attention", "padding", r"given differs[^\n]*\n[^\n]*`0.weight` \(parameter\)"),
    Pair("attention", "betas", r"AdamW.step`.*\n[^\n]*0.999 -> 0.95"),
    Pair("attention", "decay", r"AdamW.step`.*\n[^\n]*weight_decay: 0.01 -> 0.1"),
    Pair("attention", "no_clip", r"AdamW.step`.*\n[^\n]*only the first has [^\n]*attention.py:128"),
    Pair("attention", "smoothing", r"cross_entropy`.*\n[^\n]*label_smoothing: [^\n]*-> 0.1"),
    Pair("attention", "ignored", r"cross_entropy`.*\n[^\n]*ignore_index: 0 -> -100"),
    Pair("attention", "double_softmax", r"cross_entropy`.*\n[^\n]*only the second has `softmax`"),
    Pair("attention", "init", r"given differs[^\n]*\n[^\n]*`0.weight` \(parameter\)"),
    Pair("attention", "seed", r"given differs[^\n]*\n[^\n]*`ids`", 1),
    Pair("images", "kernel", r"as recorded: `torch.nn.functional.relu`"),
    Pair("images", "momentum", r"batch_norm`.*\n[^\n]*(0.1 -> 0.2)"),
    Pair("images", "counts_wrong", r"images.py"),
    Pair("graph", "overwrites", r"only the first has `index_add`[^\n]*; only the second has [^\n]*`index_put`"),
]
ALIKE = [
    Pair("attention", "einsum", SAME),
    Pair("attention", "chunked", SAME),
    Pair("attention", "three_linears", SAME),
    Pair("attention", "softmax_by_hand", SAME),
    Pair("attention", "norm_by_hand", SAME),
    Pair("attention", "by_hand", SAME),
    Pair("attention", "half", SAME),
    Pair("attention", "double", SAME),
    Pair("images", "mean_by_sum", SAME),
    Pair("images", "reordered", SAME),
    Pair("graph", "order", SAME),
    Pair("graph", "scatter", SAME),
]


def reprokit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """One command."""
    given = [sys.executable, "-m", "reprokit", *words]
    return subprocess.run(given, cwd=folder, capture_output=True, text=True, check=False, env=os.environ)


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--only", default="", metavar="WAY[,WAY]")
    parser.add_argument("--texts", action="store_true", help="print what `diff` prints")
    given = parser.parse_args()
    only = set(filter(None, given.only.split(",")))
    rows, right = [], {"planted": 0, "alike": 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, pairs in (("planted", PLANTED), ("alike", ALIKE)):
            for pair in [pair for pair in pairs if not only or pair.way in only]:
                base = folder / f"{pair.script}-step{pair.step}.pt"
                for way, file in (("plain", base), (pair.way, folder / f"{pair.way}-step{pair.step}.pt")):
                    if not file.exists():
                        script = (str(PAIRS / f"{pair.script}.py"), way)
                        output = file.name.replace(f"-step{pair.step}", "")
                        reprokit(folder, "capture", "-q", "--at-step", str(pair.step), "-o", output, *script)
                done = reprokit(folder, "diff", base.name, file.name)
                is_right = re.search(pair.truth, done.stderr) is not None and done.returncode == int(kind == "planted")
                right[kind] += is_right
                verdict = done.stderr.splitlines()[0].removeprefix("reprokit: ") if done.stderr else "nothing"
                print(f"{kind:<8} {pair.way:<20} {'right' if is_right else 'WRONG':<6} {verdict}", file=sys.stderr)
                if given.texts or not is_right:
                    print(done.stderr, file=sys.stderr)
                rows.append({"kind": kind, "way": pair.way, "right": is_right, "text": done.stderr})
    invented = len(ALIKE) - right["alike"]
    is_missed = not only and (right["planted"] < LEAST_NAMED or invented > MOST_INVENTED)
    print(f"{right['planted']} of {len(PLANTED)} named, {right['alike']} of {len(ALIKE)} alike", file=sys.stderr)
    print_json({"rows": rows, **right}, given.json)
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
