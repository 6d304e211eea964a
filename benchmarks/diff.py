"""`reprokit diff` on pairs of runs whose difference is known.

    python benchmarks/diff.py [--only WAY[,WAY]] [--json FILE] [--texts]

Every script of `pairs/` runs once as it is and once in each way; a step of each is saved with ``--at-step``. Of every
planted difference the function has to be named together with its line or module, or the inputs that differ and no
other; in 13 pairs that agree up to rounding none may be. The table goes to stderr, JSON to stdout; exit code 1 when an
aim is missed.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch  # noqa: F401 - once for all forks
from command import JSON, new_parser, print_json

PAIRS = Path(__file__).resolve().parent / "pairs"
MOST_WRONG, MOST_INVENTED = 2, 0
COMPILERS = PAIRS.parent / "miscompilers.py"


class Pair(NamedTuple):
    """A way of a script, and what `diff` has to name.

    ``call`` is the first different call, or with ``alone`` ("first", "second") one that only this run has; ``at`` is
    its module, or a part of its line. ``inputs`` are all that differ. ``settings`` are arguments.
    """

    script: str
    way: str
    call: str = ""
    at: str = ""
    settings: str = ""
    alone: str = ""
    inputs: str = ""  # a pattern that has to match each name, and a number of names
    num_inputs: int = 0
    base: str = "plain"
    step: int = 0


PLANTED = [
    Pair("attention", "shim", "layer_norm", "return self.norm1(x)", alone="first"),
    Pair("attention", "eps", "layer_norm", "1.norm1", "eps: 1e-05 -> 0.001"),
    Pair("attention", "gelu", "gelu", "1.mlp.1", "approximate: none -> tanh"),
    Pair("attention", "no_scale", "div", "scores = scores / (WIDTH", alone="first"),
    Pair("attention", "tf32", "round", "q = torch.round(", alone="second"),
    Pair("attention", "mask", "tril", "mask = torch.ones(", "1: 0 -> 1"),
    Pair("attention", "softmax_dim", "softmax", "weights = scores.softmax(-2)", "1: -1 -> -2"),
    Pair("attention", "three_linears_wrong", "linear", "return [F.linear("),
    Pair("attention", "detach", "detach", "hidden = hidden.detach()"),
    Pair("attention", "no_residual", "add", "x = hidden if WAY", alone="first"),
    Pair("attention", "in_place", "add_", "x.mul_(1.0).add_(0.5)", alone="second"),
    Pair("attention", "draws_more", "dropout", "weights = F.dropout(", "another state of the random generator"),
    Pair("attention", "padding", inputs=r"0\.weight", num_inputs=1),
    Pair("attention", "betas", "step", "optimizer.step()", "betas.1: 0.999 -> 0.95"),
    Pair("attention", "decay", "step", "optimizer.step()", "weight_decay: 0.01 -> 0.1"),
    Pair("attention", "no_clip", "_foreach_norm", "nn.utils.clip_grad_norm_(", alone="first"),
    Pair("attention", "smoothing", "cross_entropy", "loss = F.cross_entropy(", "label_smoothing: 0.0 -> 0.1"),
    Pair("attention", "ignored", "cross_entropy", "loss = F.cross_entropy(", "ignore_index: 0 -> -100"),
    Pair("attention", "double_softmax", "softmax", "logits = logits.softmax(-1) if", alone="second"),
    Pair("attention", "init", inputs=r"[0-3]\..*(weight|bias)", num_inputs=19),
    Pair("attention", "seed", inputs="ids|rng", num_inputs=2, step=1),
    Pair("images", "kernel", "relu", "x = F.relu(self.norm(self.conv1(x)))"),
    Pair("images", "momentum", "batch_norm", "norm", "momentum: 0.1 -> 0.2"),
    Pair("images", "counts_wrong", "div", "x = x.sum((2, 3)) / (x.shape[2] * (x.shape[3] + 1))"),
    Pair("images", "accumulated_unscaled", "div", "loss = loss if number", alone="first", base="accumulated"),
    Pair("images", "accumulated_cleared", "zero_grad", "optimizer.zero_grad()", alone="second", base="accumulated"),
    Pair("images", "two_losses_weight", "mul", "penalty = ", "0.01 -> 0.02", base="two_losses"),
    Pair("graph", "overwrites", "index_put", "sums = sums.index_put("),
    Pair("compiled", "layer_norm", "layer_norm", "1.norm", base=""),
    Pair("ranks", "rank_init", inputs=r"[02]\.(weight|bias)", num_inputs=4, base=""),
    Pair("ranks", "rank_seed", inputs="rng", num_inputs=1, base=""),
    Pair("ranks", "rank_sum", "cross_entropy", "loss = F.cross_entropy(", "reduction: mean -> sum", base=""),
]
ALIKE = [
    *(
        Pair("attention", way)
        for way in (
            "einsum",
            "chunked",
            "three_linears",
            "softmax_by_hand",
            "norm_by_hand",
            "by_hand",
            "half",
            "double",
        )
    ),
    Pair("images", "mean_by_sum"),
    Pair("images", "reordered"),
    Pair("images", "two_losses_summed", base="two_losses"),
    Pair("graph", "order"),
    Pair("graph", "scatter"),
]


def reprokit(folder: Path, *words: str, ranks: int = 0) -> tuple[str, str]:
    """What a command prints on stdout and stderr. It runs in a fork of this process, which has imported torch."""
    if ranks:
        launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        given = [sys.executable, *launcher, "-m", "reprokit", *words]
        done = subprocess.run(given, cwd=folder, capture_output=True, text=True, check=False, env=os.environ)
        return done.stdout, done.stderr
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.chdir(folder)
            sys.argv = ["reprokit", *words]
            try:
                runpy.run_module("reprokit", run_name="__main__")
            except SystemExit:
                pass
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        os.waitpid(child, 0)
        return tuple(file.seek(0) or file.read() for file in (out, err))


def compared(folder: Path, pair: Pair) -> tuple[JSON, str]:
    """The row of `diff` for a pair, and its text; what is saved already is not saved again."""
    script = PAIRS / f"{pair.script}.py"
    names = []
    for way in filter(None, (pair.base, pair.way)):
        name = f"{pair.script}.{way}"
        names.append(f"{name}-step{pair.step}.pt")
        if not (folder / names[-1]).exists():
            words = ("capture", "-q", "--at-step", str(pair.step), "-f", "-o", f"{name}.pt", str(script), way)
            reprokit(folder, *words, ranks=2 * (pair.script == "ranks"))
    if pair.script == "ranks":
        names = [f"ranks.{pair.way}.rank{rank}-step{pair.step}.pt" for rank in (0, 1)]
    elif pair.script == "compiled":
        names += ["--compile", f"{COMPILERS}:{pair.way}"]
    printed, said = reprokit(folder, "diff", "--json", *names)
    row: JSON = json.loads(printed)["rows"][0] if printed else {"verdict": "", "lines": []}
    return row, said


def is_named(pair: Pair, row: JSON) -> bool:
    """True if a row names what was planted: the function with its line or module, or all inputs and no other."""
    if row["verdict"] != "different":
        return False
    if pair.inputs:
        names = [item["name"] for item in row.get("inputs", ())]
        return len(names) == pair.num_inputs and all(re.fullmatch(pair.inputs, name) for name in names)
    source = (PAIRS / f"{pair.script}.py").read_text(encoding="utf-8").splitlines()
    sites = [f"{pair.script}.py:{number}" for number, line in enumerate(source, 1) if pair.at in line]
    text = "\n".join(row["lines"])
    if pair.alone:
        calls = re.search(rf"only the {pair.alone} has ([^;\n]*) \(([^;()]*)\)", text)
        return calls is not None and f"`{pair.call}`" in calls[1] and calls[2] in sites
    is_there = row.get("module") == pair.at or row.get("site") in sites
    return row.get("call", "").rpartition(".")[2] == pair.call and is_there and pair.settings in text


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--only", default="", metavar="WAY[,WAY]")
    parser.add_argument("--texts", action="store_true", help="print what `diff` prints")
    given = parser.parse_args()
    only = set(filter(None, given.only.split(",")))
    rows, right = [], {"planted": 0, "alike": 0}
    with tempfile.TemporaryDirectory() as name:
        for kind, pairs in (("planted", PLANTED), ("alike", ALIKE)):
            for pair in [pair for pair in pairs if not only or pair.way in only]:
                row, text = compared(Path(name), pair)
                is_right = is_named(pair, row) if kind == "planted" else row["verdict"] in ("equal", "rounding")
                right[kind] += is_right
                print(
                    f"{kind:<8} {pair.way:<20} {'right' if is_right else 'WRONG':<6} {row['verdict']}", file=sys.stderr
                )
                if given.texts or not is_right:
                    print(text, file=sys.stderr)
                rows.append({"kind": kind, "way": pair.way, "right": is_right, "text": text})
    wrong, invented = len(PLANTED) - right["planted"], len(ALIKE) - right["alike"]
    is_missed = not only and (wrong > MOST_WRONG or invented > MOST_INVENTED)
    print(f"{right['planted']} of {len(PLANTED)} named, {right['alike']} of {len(ALIKE)} alike", file=sys.stderr)
    print_json({"rows": rows, **right}, given.json)
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
