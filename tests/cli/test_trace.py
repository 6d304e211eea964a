"""``reprokit trace`` and ``reprokit show --frames``: frames of scripts and of snapshots."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run

NET = """\
import hashlib
import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x, scale=1.0):
        return x + self.drop(torch.relu_(self.fc(self.norm(x)))) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.h = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.h:
            x = block(x=x)
        return {"logits": self.head(x)}


torch.manual_seed(0)
net, loss_of = Net(), nn.CrossEntropyLoss()
net.lost = nn.Linear(2, 2)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
print(sys.argv[1:])
for step in range(5):
    print("step")
    ids = torch.randint(0, 11, (4, 7))
    loss = loss_of(net(ids)["logits"].flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
bits = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
for tensor in (*net.parameters(), *(p.grad for p in net.parameters() if p.grad is not None)):
    bits.update(tensor.detach().numpy().tobytes())
print(bits.hexdigest())
"""
FAILING = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x):
        return torch.log(self.b(self.a(x)) + (3 if x[0, 0] < 9 else -3))


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(4, 4)
    x[0, 0] = 10.0 if step == 2 else 0.0
    loss = net(x).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


RESIDUAL = """\
import json
import sys
import warnings

import torch
from torch import nn


class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.v = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        attn = (self.q(x) @ x.transpose(-1, -2)).softmax(-1)
        watch("attn", attn)
        return attn @ self.v(x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class Gate(nn.Module):
    def forward(self, x):
        return Square.apply(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn, self.fc, self.gate = nn.LayerNorm(8), Attn(), nn.Linear(8, 8), Gate()

    def forward(self, x):
        x = x + self.attn(self.norm(x)) + 0.1 * self.gate(x)
        h = torch.relu(self.fc(x))
        watch("h", h)
        return x + h


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.h, self.head = nn.Embedding(11, 8), nn.ModuleList([Block(), Block()]), nn.Linear(8, 11)

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


def note(module, tensor, value):
    shape, size = list(value.shape), value.abs()
    ends = value.min(), value.max(), size.min(), size.max()
    numbers = *ends, value.mean(), value.std(unbiased=False), value.norm(), (value == 0).float().mean()
    seen.append([module, tensor, shape, *(number.item() for number in numbers)])


def watch(name, value):
    if is_hooked:
        value.register_hook(lambda gradient: note(name, "grad_variable", gradient))


torch.manual_seed(0)
warnings.simplefilter("ignore")  # of a hook on an embedding, whose indices have no gradient
net, seen, is_hooked = Net(), [], "hooks" in sys.argv
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for name, part in net.named_modules() if is_hooked else ():
    name = name or "<Net>"
    part.register_forward_hook(lambda part, _, out, name=name: note(name, "output", out))

    def note_backward(part, inputs, outputs, name=name):
        note(name, "grad_output", outputs[0])
        if inputs[0] is not None:
            note(name, "grad_input", inputs[0])

    part.register_full_backward_hook(note_backward)
for step in range(5):
    seen.clear()
    for _ in range(2):
        ids = torch.randint(0, 11, (2, 7))
        loss = nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
        loss.backward()
    if step == 4 and is_hooked:
        print(json.dumps(seen))
    optimizer.step()
    optimizer.zero_grad()
"""


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_chosen_steps_of_a_script_are_measured_and_it_ends_with_the_same_bits(tmp_path: Path, run_python: Run) -> None:
    (tmp_path / "train.py").write_text(NET)
    bare = run_python("train.py", "--lr", "1")
    done = run_python(
        "-m", "reprokit", "trace", "train.py", "--lr", "1", "--steps", "1,3", "-o", "x.jsonl", "--to", "jsonl"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == bare.stdout
    assert "no gradient in the chosen steps: `lost.bias`, `lost.weight`\n" in done.stderr
    rows = rows_of((tmp_path / "x.jsonl").read_text())
    assert {row["step"] for row in rows} == {1, 3}
    outputs = [row["module"] for row in rows if row["step"] == 3 and row["tensor"] == "output"]
    block = ["norm", "fc", "drop", ""]
    inside = [f"h.{number}.{name}".rstrip(".") for number in (0, 1) for name in block]
    assert outputs == ["emb", *inside, "head", "<Net>", "<CrossEntropyLoss>"]
    backward = [row["module"] for row in rows if row["step"] == 3 and row["pass"] == "backward"]
    assert backward[0] == "<CrossEntropyLoss>" and backward.index("head") < backward.index("h.0.norm")
    names = {(row["module"], row["tensor"], row["name"]) for row in rows}
    assert ("h.1.fc", "weight", "bias") in names
    assert {("h.1", "input"), ("<Net>", "output"), ("head", "grad_input")} <= {name[:2] for name in names}


def test_patterns_formats_and_the_last_step(tmp_path: Path, run_reprokit: Run) -> None:
    (tmp_path / "train.py").write_text(NET)
    done = run_reprokit("trace", "train.py", "--stop-after", "1", "--steps", "0-1", "--module", "h.0*", "--to", "csv")
    assert done.returncode == 0 and done.stderr.count("step\n") == 2  # nothing after step 1
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert {row["module"] for row in rows} == {"h.0", "h.0.norm", "h.0.fc", "h.0.drop"}
    assert {row["step"] for row in rows} == {"0", "1"} and rows[0]["shape"] == "8"
    page = run_reprokit("trace", "--to", "html", "train.py")
    assert page.stdout.startswith("<!doctype html>") and "<code>h.1.norm</code>" in page.stdout
    assert "://" not in page.stdout
    own = run_reprokit("trace", "--module", "none", "train.py", "--steps", "9")  # what follows the script is its own
    assert own.stdout.splitlines()[0] == "['--steps', '9']" and "nothing matches `none`" in own.stderr
    screen = run_reprokit("trace", "train.py", "--module", "head")
    assert "step 0  forward  head (Linear)" in screen.stderr and "step 0  backward  head (Linear)" in screen.stderr
    assert "emb" not in screen.stderr


def test_gradients_of_weights_are_those_that_the_optimizer_was_given(tmp_path: Path, run_reprokit: Run) -> None:
    (tmp_path / "train.py").write_text("""\
import torch
torch.manual_seed(0)
net = torch.nn.ModuleDict({"attn": torch.nn.MultiheadAttention(4, 2), "frozen": torch.nn.Linear(4, 4)})
net["frozen"].requires_grad_(False)
head = torch.nn.Linear(4, 1)
first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (net["attn"], head))
for step in range(3):
    for _ in range(2):
        x = torch.randn(3, 2, 4)
        head(net["frozen"](net["attn"](x, x, x)[0])).sum().backward()
    torch.nn.utils.clip_grad_norm_(head.parameters(), 1e-3)
    norms = [head.weight.grad.abs().max().item(), net["attn"].out_proj.weight.grad.abs().max().item()]
    for optimizer in (second, first):
        optimizer.step()
        optimizer.zero_grad()
    print(norms if step == 1 else "")
""")
    done = run_reprokit("trace", "--steps", "1", "--json", "train.py")
    given = next(row for row in rows_of(done.stdout) if row["module"] == "head" and row["tensor"] == "weight")
    assert (given["name"], given["shape"], given["zeros"], given["dtype"]) == ("weight", [1, 4], 0.0, "float32")
    assert given["abs_min"] <= abs(given["mean"]) + given["std"] <= 2 * given["abs_max"] and given["headroom"] > 100
    rows = [row for row in rows_of(done.stdout) if row["tensor"] == "grad_weight"]
    found = {(row["module"], row["name"]): row["abs_max"] for row in rows}
    norms = json.loads(done.stderr.split("\n")[1])
    assert found["head", "weight"] == norms[0] and found["net.attn", "out_proj.weight"] == norms[1]
    own = [f"{part}{name}" for part in ("in_proj_", "out_proj.") for name in ("weight", "bias")]
    assert found.keys() == {("head", "weight"), ("head", "bias"), *(("net.attn", name) for name in own)}


def test_histograms_are_added_on_request(tmp_path: Path, run_reprokit: Run) -> None:
    (tmp_path / "train.py").write_text(NET)
    words = ("trace", "train.py", "--module", "h.0.fc", "--histograms")
    rows = rows_of(run_reprokit(*words, "--to", "jsonl").stdout)
    for row in rows:
        num_elements = math.prod(row["shape"])
        assert sum(row["histogram"]["counts"]) == num_elements - round(row["zeros"] * num_elements)
        assert 2.0 ** row["histogram"]["lowest"] <= row["abs_max"] and isinstance(row["kurtosis"], float)
    table = list(csv.DictReader(io.StringIO(run_reprokit(*words, "--to", "csv").stdout)))
    assert [float(row["kurtosis"]) for row in table] == [row["kurtosis"] for row in rows]
    lowest, _, counts = table[-1]["histogram"].partition(":")
    assert rows[-1]["histogram"] == {"lowest": int(lowest), "counts": [int(count) for count in counts.split()]}
    line = f"2^{lowest} ▁"
    assert line in run_reprokit(*words).stderr and line in run_reprokit(*words, "--to", "html").stdout


def test_the_numbers_are_those_of_hooks_in_the_order_of_the_run(
    tmp_path: Path, run_python: Run, run_reprokit: Run
) -> None:
    (tmp_path / "train.py").write_text(RESIDUAL)
    expected: dict[tuple[str, str], list[list[Any]]] = {}
    for module, tensor, *numbers in json.loads(run_python("train.py", "hooks").stdout):
        expected.setdefault((module, tensor), []).append(numbers)
    roles = ("output", "grad_output", "grad_input", "attn", "h")
    words = [word for role in roles for word in ("--tensor", role)]
    rows = rows_of(run_reprokit("trace", "--steps", "0-4:2", *words, "--json", "train.py").stdout)
    assert {row["step"] for row in rows} == {0, 2, 4}
    last = [row for row in rows if row["step"] == 4 and row["tensor"] != "variable"]
    found: dict[tuple[str, str], list[list[Any]]] = {}
    names = ("shape", "min", "max", "abs_min", "abs_max", "mean", "std", "norm", "zeros")
    for row in last:
        owner = row["name"] if row["tensor"] == "grad_variable" else row["module"]
        found.setdefault((owner, row["tensor"]), []).append([row[name] for name in names])
    assert found.keys() == expected.keys() and len(found) > 30
    for key, wanted in expected.items():  # a residual's own part of the gradient, not that of the tensor it shares
        assert [row[0] for row in found[key]] == [row[0] for row in wanted]
        assert [row[1:] for row in found[key]] == [pytest.approx(row[1:], rel=1e-6, abs=1e-6) for row in wanted]
    homes = {(row["module"], row["site"]) for row in last if row["name"] == "attn" and row["tensor"] == "grad_variable"}
    line = RESIDUAL[: RESIDUAL.index("attn = (")].count("\n") + 1
    assert homes == {(f"h.{number}.attn", f"train.py:{line}") for number in (0, 1)}
    halves = [(row["pass"], row["call"]) for row in last if row["module"] == "head"]
    assert [*dict.fromkeys(halves)] == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
    backward = [row["module"] for row in last if row["tensor"] == "grad_output" and row["call"] == 1]
    assert backward[:4] == ["<Net>", "head", "h.1", "h.1.fc"] and backward[-1] == "emb"


def test_a_line_a_row_for_chosen_classes_and_tensors(tmp_path: Path, run_reprokit: Run) -> None:
    (tmp_path / "train.py").write_text(RESIDUAL)
    words = ("--class", "Lin*", "--class", "Attn", "--tensor", "weight", "--module", "h.1.*")
    lines = run_reprokit("trace", *words, "train.py").stderr.splitlines()
    assert lines[0].split()[:5] == ["module", "tensor", "shape", "min", "max"]
    shown = [line.split()[:4] for line in lines if line.startswith("  h.")]
    own = [f"h.1.{name}" for name in ("attn.q", "attn.v", "fc") for _ in range(2)]
    assert [line[0] for line in shown[:6]] == own and shown[0][1:] == ["(Linear)", "weight", "weight"]
    frames = run_reprokit("trace", "--tensor", "attn", "--to", "table", "train.py").stderr
    assert "step 0  backward  h.1.attn (Attn)\n  grad_variable " in frames
    nothing = run_reprokit("trace", "--tensor", "missing", "train.py").stderr
    assert "no rows: nothing matches `missing`" in nothing


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py", "--steps", "3-9:0"], "error: `3-9:0` is not a list of steps"),
        (["train.py", "--steps", "3-1"], "error: `3-1` is not a list of steps"),
        (["missing.py"], "error: `missing.py` does not exist"),
        (["train.py", "--steps", "1", "-o", "train.py"], "error: `train.py` exists already"),
        ([], "error: no script or snapshot given"),
        (["text.repro.pt"], "error: `text.repro.pt` was not written by reprokit"),
    ],
)
def test_usage_errors(words: list[str], message: str, tmp_path: Path, run_reprokit: Run) -> None:
    for name in ("train.py", "text.repro.pt"):
        (tmp_path / name).write_text("print('ran')\n")
    done = run_reprokit("trace", *words)
    assert done.returncode == 2 and message in done.stderr and "ran" not in done.stdout


def test_a_script_that_raises_keeps_its_traceback_and_shows_its_last_frames(tmp_path: Path, run_reprokit: Run) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nnet = torch.nn.Linear(2, 2)\nnet(torch.ones(2))\nnet(torch.ones(3))\n"
    )
    done = run_reprokit("trace", "--json", "train.py")
    assert done.returncode == 1 and "reprokit/" not in done.stderr
    assert "mat1 and mat2" in done.stderr or "size mismatch" in done.stderr
    calls = [row["call"] for row in rows_of(done.stdout) if row["tensor"] == "output"]
    assert calls == [0]  # the second call has an input and no output
    assert [row["shape"] for row in rows_of(done.stdout) if row["tensor"] == "input"] == [[2], [3]]


def test_recomputed_calls_several_roots_and_skipped_steps(tmp_path: Path, run_reprokit: Run) -> None:
    (tmp_path / "train.py").write_text("""\
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
critic, actor = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.1)
for step in range(3):
    x = torch.randn(2, 4, requires_grad=True)
    value = critic(checkpoint(actor, x, use_reentrant=False)).sum() * (float("inf") if step == 0 else 1)
    scaler.scale(value).backward()
    scaler.step(optimizer)
    scaler.update()
""")
    rows = rows_of(run_reprokit("trace", "--steps", "1", "--json", "train.py").stdout)
    outputs = [row["module"] for row in rows if row["tensor"] == "output"]
    assert outputs == ["actor.0", "actor.1", "actor", "critic.0", "critic.1", "critic"]  # forward frames once
    gradients = [row["module"] for row in rows if row["tensor"] == "grad_output"]
    assert sorted(gradients) == sorted(outputs)  # each once


def test_frames_of_a_snapshot_without_its_script(tmp_path: Path, run_reprokit: Run) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    assert run_reprokit("capture", "-o", "x.pt", "train.py").returncode == 3
    script.unlink()
    rows = rows_of(run_reprokit("trace", "x.pt", "--to", "jsonl").stdout)
    forward = [row["module"] for row in rows if row["tensor"] == "output"]
    assert forward == ["a", "b.0", "b.1", "b", "<Net>"] and {row["step"] for row in rows} == {2}
    (bad,) = (row for row in rows if row["nonfinite"] and row["pass"] == "forward")
    assert (bad["module"], bad["tensor"]) == ("<Net>", "output")
    backward = [row["module"] for row in rows if row["tensor"] == "grad_output"]
    assert backward == ["<Net>", "b", "b.1", "b.0", "a"]
    weights = [(row["module"], row["name"], row["shape"]) for row in rows if row["tensor"] == "grad_weight"]
    assert weights == [("b.0", "weight", [8, 8]), ("b.0", "bias", [8]), ("a", "weight", [8, 4]), ("a", "bias", [8])]
    (first, *_) = rows_of(run_reprokit("trace", "x.pt", "--histograms", "--json").stdout)
    assert sum(first["histogram"]["counts"]) == math.prod(first["shape"])
    last = run_reprokit("show", "--frames", "2", "x.pt").stderr
    assert [line for line in last.splitlines() if line.startswith("step")] == [
        "step 2  forward  b (Sequential)",
        "step 2  forward  <Net>",
    ]
    refused = run_reprokit("trace", "x.pt", "--steps", "1")
    assert refused.returncode == 2 and "a snapshot holds one step" in refused.stderr
