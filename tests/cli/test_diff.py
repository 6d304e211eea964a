"""``reprokit diff``: which call is named where two runs part, and that none is where they agree up to rounding."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reprokit.cli import main
from reprokit.compare import imprints
from reprokit.compare.imprints import digest_of
from reprokit.program.interpreter import run
from reprokit.program.ir import Call, Input, Program, Ref
from reprokit.program.step import Step
from reprokit.shrink.checks.mismatch import OtherWay, structure_of
from reprokit.snapshot.format import load, save
from tests.conftest import run_python_in
from tests.render.programs import snapshot_of

SCRIPT = """\
import sys

import torch
import torch.nn.functional as F
from torch import nn

way = sys.argv[1]
if way == "kernel":  # as in another build of torch: only what was recorded shows it
    library = torch.library.Library("aten", "IMPL")
    library.impl("tanh", lambda x: x.exp().sub((-x).exp()).div(x.exp() + (-x).exp()) * 1.001, "CPU")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8, eps=1e-3 if way == "eps" else 1e-5)

    def normed(self, x):
        if way in ("norm", "biased"):
            mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=way == "biased")
            return (x - mean) / torch.sqrt(variance + 1e-5) * self.norm.weight + self.norm.bias
        return self.norm(x)

    def forward(self, x):
        q, k, v = self.qkv(self.normed(x)).chunk(3, -1)
        scores = torch.einsum("bqd,bkd->bqk", q, k) if way == "einsum" else q @ k.transpose(-1, -2)
        scores = scores if way == "scale" else scores / 8**0.5
        F.dropout(scores, 0.1) if way == "draws" else None
        made = F.dropout(scores.softmax(-1), 0.1) @ v
        made = made.detach() if way == "detach" else made
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "half"):
            return x + torch.tanh(self.out(made))


torch.manual_seed(0)
net = nn.Sequential(Block(), nn.Linear(8, 4))
net.double() if way == "double" else None
if way == "compiled":
    from compiler import wrong

    net = torch.compile(net, backend=wrong)
optimizer = torch.optim.AdamW(net.parameters(), 1e-3, betas=(0.9, 0.95 if way == "betas" else 0.999))
for step in range(2):
    torch.manual_seed(9 if way == "seed" else 5)
    x, y = torch.randn(3, 5, 8), torch.randint(4, (15,))
    x = x.double() if way == "double" else x
    loss = F.cross_entropy(net(x).flatten(0, 1), y, label_smoothing=0.1 if way == "smoothing" else 0.0)
    optimizer.zero_grad()
    (loss if way == "whole" else loss * (float("nan") if way == "nan" else 0.5)).backward()
    optimizer.step()
"""
COMPILER = """\
import torch


def wrong(graph, inputs):
    for node in graph.graph.nodes:
        node.target = torch.sin if node.target is torch.tanh else node.target
    graph.recompile()
    return graph.forward
"""
FAILING = """\
import sys

import torch

lin = torch.nn.Linear(4, 3)
y = lin(torch.ones(3, 4))
y = y * 2 if sys.argv[1] == "b" else y
(torch.zeros(5) @ y).sum().backward()
"""
PASSES = """\
import sys

import torch
import torch.nn.functional as F
from torch import nn

way = sys.argv[1]
torch.manual_seed(0)
G = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
D = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
of_g = torch.optim.Adam(G.parameters(), 1e-3)
of_d = torch.optim.Adam(D.parameters(), 1e-3, eps=1e-3 if way == "eps" else 1e-8)
for step in range(2):
    real, noise = torch.randn(6, 3), torch.randn(6, 4)
    fake = G(noise)
    of_d.zero_grad()
    seen = fake if way == "attached" else fake.detach()
    good, bad = -F.logsigmoid(D(real)).mean(), -F.logsigmoid(-D(seen)).mean()
    between = (real + seen.detach()).div(2).requires_grad_()
    (slope,) = torch.autograd.grad(D(between).sum(), between, create_graph=way != "constant")
    penalty = (slope.norm(2, 1) - 1).pow(2).mean()
    if way == "parts":
        for loss in (good, bad, penalty):
            loss.backward()
    else:
        (good + bad + penalty).backward(retain_graph=way == "attached")
    of_d.step()
    of_g.zero_grad()
    (-F.logsigmoid(D(fake.relu() if way == "relu" else fake)).mean()).backward()
    of_g.step()
"""
OF_PASSES = {  # of a step behind another one, so that the state differs as well
    "eps": ("from the same inputs:", "`torch.optim.Adam.step`, passes.py:27", "eps: 1e-08 -> 0.001"),
    "constant": ("`torch.autograd.grad`, passes.py:20 is called with create_graph: True -> False",),
    "relu": ("`torch.nn.functional.linear` in `0`, passes.py:29", "only the second has `relu` (passes.py:29)"),
    "parts": ("differs by rounding in each step before", "within what float32 explains"),
    "attached": ("what the step leaves agrees up to rounding", "the first has no gradient here"),
}
DIFFERENCES = {
    "eps": ("`torch.nn.functional.layer_norm` in `0.norm`", "eps: 1e-05 -> 0.001"),
    "biased": ("only the first has `layer_norm`", "only the second has `mean`, `var`"),
    "scale": ("in `0`", "only the first has `div`"),
    "detach": ("`torch.Tensor.detach` in `0`", "the second has no gradient here"),
    "betas": ("`torch.optim.AdamW.step`", "0.999 -> 0.95"),
    "smoothing": ("`torch.nn.functional.cross_entropy`", "label_smoothing: 0.0 -> 0.1"),
    "whole": ("`torch.nn.functional.cross_entropy`", "only the first has `mul` (train.py:"),
    "draws": ("`torch.nn.functional.dropout` in `0`", "another state of the random generator"),
    "seed": ("what the step is given differs", "`x`"),
    "kernel": ("first different call as recorded: `torch.tanh` in `0`", "run here, both make the same of it"),
}
ALIKE = ("norm", "einsum", "half", "double")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a step of the script in every way."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "failing.py").write_text(FAILING)
    (folder / "compiler.py").write_text(COMPILER)
    for way in ("plain", "compiled", "nan", *DIFFERENCES, *ALIKE):
        words = ("capture", "-q", "--at-step", "0", "-o", f"{way}.pt", "train.py", way)
        run_python_in(folder, "-m", "reprokit", *words)
    return folder


def diff(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code of the command in this process, and what it says."""
    code = main(["diff", *(str(folder / word) if word.endswith((".pt", ".jsonl")) else word for word in words)])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("way", DIFFERENCES)
def test_a_difference_is_named(way: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = diff(runs, capsys, "plain-step0.pt", f"{way}-step0.pt")
    assert code == 1 and "the runs differ\n" in text
    assert all(words in text for words in DIFFERENCES[way]), text


@pytest.mark.parametrize("way", ALIKE)
def test_rounding_is_no_difference(way: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = diff(runs, capsys, "plain-step0.pt", f"{way}-step0.pt")
    assert code == 0 and ("the runs differ by rounding" in text or "agree in all bits" in text), text


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("passes")
    (folder / "passes.py").write_text(PASSES)
    for way in ("plain", *OF_PASSES):
        words = ("capture", "-q", "--at-step", "1", "-o", f"{way}.pt", "passes.py", way)
        run_python_in(folder, "-m", "reprokit", *words)
    return folder


@pytest.mark.parametrize("way", OF_PASSES)
def test_gradients_are_those_of_one_backward_pass(
    way: str, passes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each tensor has to be compared in a run of its own."""
    code, text = diff(passes, capsys, "plain-step1.pt", f"{way}-step1.pt")
    assert code == int(way not in ("parts", "attached")), text
    assert all(words in text for words in OF_PASSES[way]), text
    monkeypatch.setattr(imprints, "MOST_ELEMENTS", 25)
    again, cut = diff(passes, capsys, "plain-step1.pt", f"{way}-step1.pt")
    assert again == code
    named = [[line for line in lines.splitlines() if "first different call" in line] for lines in (text, cut)]
    assert [line.partition(": ")[2].split(",")[0] for line in named[0]] == [
        line.partition(": ")[2].split(",")[0] for line in named[1]
    ]
    assert way != "eps" or "the first 25 elements of larger tensors were compared" in cut


def test_one_file_in_other_ways(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(runs, capsys, "plain-step0.pt")[0] == 0
    code, text = diff(runs, capsys, "nan.pt", "nan.pt")
    assert code == 0 and "agree in all bits" in text and "loss nan and nan" in text
    code, text = diff(runs, capsys, "kernel-step0.pt")
    assert code == 1 and "as recorded: `torch.tanh` in `0`, train.py:33" in text
    code, text = diff(runs, capsys, "plain-step0.pt", "--dtype", "float64", "--dtype", "bfloat16")
    assert code == 0 and text.count("the runs differ by rounding") == 2, text


def test_other_pythons(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reprokit").mkdir()
    (tmp_path / "reprokit" / "__init__.py").write_text("raise RuntimeError('of another version')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, text = diff(runs, capsys, "plain-step0.pt", "--python", "/no/python", "--python", sys.executable)
    assert code == 2 and f"(torch {torch.__version__}): the runs agree in all bits" in text
    assert "--python /no/python: cannot be run\nreprokit:   `/no/python` cannot be started" in text
    (tmp_path / "sitecustomize.py").write_text("import torch\ndel torch.tanh, torch.Tensor.tanh")
    code, text = diff(runs, capsys, "plain-step0.pt", "--python", sys.executable)
    lacking = f"torch {torch.__version__}: `torch.tanh` is not a torch function that a program may call"
    assert code == 2 and text.endswith(f"cannot be run\nreprokit:   {lacking}\n"), text


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # by the compiler
def test_a_compiled_step_is_not_what_is_replayed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("plain-step0.pt", "compiled-step0.pt"), ("compiled-step0.pt",)):
        code, text = diff(runs, capsys, *words)
        assert code == 2 and "the replays agree, and are not as in training" in text, text
        assert (
            "the replay of compiled-step0.pt is " in text and "compiled-step0.pt --compile compiler.py:wrong`" in text
        )
    code, text = diff(runs, capsys, "compiled-step0.pt", "--compile", f"{runs}/compiler.py:wrong")
    assert code == 1 and "first different call: `torch.tanh` in `0`, train.py:33" in text, text


def test_steps_that_raise_and_steps_of_other_programs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for way in "ab":
        run_python_in(runs, "-m", "reprokit", "capture", "-q", "-o", f"{way}.pt", "failing.py", way)
    code, text = diff(runs, capsys, "a.pt", "a.pt")
    assert code == 0 and "both raise RuntimeError: " in text
    code, text = diff(runs, capsys, "a.pt", "b.pt")
    assert code == 1 and "only the second has `mul` (failing.py:7)" in text
    code, text = diff(runs, capsys, "plain-step0.pt", "a.pt")
    assert code == 2 and "the two files have no input in common" in text


def test_one_of_two_steps_raises_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = Program(
        (
            Call("torch.nn.functional.embedding", (Ref(1), Ref(0)), {}, Ref(2)),
            Call("torch.Tensor.mul", (Ref(2), 2.0), {}, Ref(3)),
            Call("torch.log", (Ref(3),), {}, Ref(4)),
        ),
        (Input(0, "table", "parameter"), Input(1, "index", "batch")),
        (Ref(4),),
    )
    tensors = {0: -torch.ones(3, 2), 1: torch.tensor([0, 2])}
    snapshot = snapshot_of((program, tensors))
    save(snapshot, tmp_path / "a.pt")
    save(replace(snapshot, tensors={**tensors, 1: torch.tensor([0, 99])}), tmp_path / "b.pt")
    for words in (("a.pt", "b.pt"), ("b.pt", "a.pt")):
        code, text = diff(tmp_path, capsys, *words)
        assert code in (1, 2) and "this is an error in reprokit itself" not in text, text


def test_numbers_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs_of: dict[str, list[dict[str, Any]]] = {
        "one": [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}],
        "two": [{"step": 0, "loss": 1.0, "grad_norm": 3.0}, {"step": 1, "loss": 2.5, "grad_norm": 3.0}],
        "resumed": [{"step": step, "loss": loss} for step, loss in ((1, 2.0), (2, "nan"), (3, 1.0))],
        "again": [{"step": step, "loss": loss} for step, loss in ((1, 2.0), (2, "nan"))],
        "later": [{"step": 7, "loss": 1.0}],
        "other": [{"step": 1, "train_loss": 1.0}],
    }
    for name, rows in runs_of.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text = diff(tmp_path, capsys, "one.jsonl", "two.jsonl")
    assert code == 1 and "step 1 is the first that differs: loss 2.0 and 2.5" in text
    assert f"--at-step 0,1 -o {tmp_path}/one.pt" in text and f"--at-step 0,1 -o {tmp_path}/two.pt" in text
    assert f"reprokit diff {tmp_path}/one-step1.pt {tmp_path}/two-step1.pt" in text
    assert "only the second has grad_norm" in text
    assert diff(tmp_path, capsys, "one.jsonl", "one.jsonl")[0] == 0
    code, text = diff(tmp_path, capsys, "again.jsonl", "resumed.jsonl")
    assert code == 0 and "the second has 3 steps, 2 steps are in both" in text
    refused = {
        ("one.jsonl", "later.jsonl"): "no step in common",
        ("one.jsonl", "other.jsonl"): "no loss and no norm in common",
        ("one.jsonl",): "compared with those of another",
        ("one.jsonl", "two.jsonl", "-o", "d.pt"): "hold no step",
    }
    for words, said in refused.items():
        code, text = diff(tmp_path, capsys, *words)
        assert code == 2 and said in text and "hint: " in text


@pytest.mark.usefixtures("few_runs")
def test_a_difference_is_reduced_with_both_ways(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(runs, capsys, "plain-step0.pt", "eps-step0.pt", "-o", "d.pt")[0] == 1
    given = load(runs / "d.pt")
    outcome = run(given.program, given.tensors)
    assert outcome.error is None and len(given.program.outputs) == 2
    assert main(["shrink", "--no-whatif", "-q", "-o", str(runs / "out"), str(runs / "d.pt")]) == 0
    capsys.readouterr()
    assert main(["show", str(runs / "d.pt")]) == 0
    shown = capsys.readouterr().err
    assert "difference between two runs in `torch.nn.functional.layer_norm` at step 0" in shown
    assert "beyond what float32 explains: inputs equal in all bits" in " ".join(shown.split())
    text = (runs / "out" / "repro.py").read_text()
    assert text.count("layer_norm(") == 2 and "eps=0.001" in text
    done = run_python_in(runs / "out", "repro.py")
    assert done.returncode == 1 and "Tensor-likes are not close" in done.stderr
    issue, summary = ((runs / "out" / name).read_text() for name in ("issue.md", "summary.md"))
    assert "Title: layer_norm differs between two runs" in issue and "Two ways to make one result" in issue
    assert "; the loss differs by " in issue and "units in the last place" in summary


def test_no_side_becomes_a_constant(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diff(runs, capsys, "plain-step0.pt", "eps-step0.pt", "-f", "-o", "constant.pt")
    whole = load(runs / "constant.pt")
    check = OtherWay(structure_of(Step(whole.program, whole.tensors)))
    ends = frozenset(ref.value for ref in whole.program.outputs)
    assert all(outcome.values for outcome in check.pair(Step(whole.program, whole.tensors), ends))
    fewer = Step(whole.program, whole.tensors).with_calls(whole.program.calls[1:])
    assert not any(outcome.values for outcome in check.pair(fewer, ends))


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-100, 100), min_size=2, max_size=12), st.sampled_from(DTYPES), st.data())
def test_a_digest_tells_bits_shapes_and_formats_not_strides(
    numbers: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = torch.tensor(numbers, dtype=dtype)
    at = data.draw(st.integers(0, len(numbers) - 1))
    other = tensor.clone()
    other[at] += 1
    assert digest_of(other) != digest_of(tensor) != digest_of(tensor[None])
    assert digest_of(tensor) != digest_of(tensor.to(torch.float16))
    strided = torch.zeros(len(numbers), 3, dtype=dtype)
    strided[:, 1] = tensor
    assert digest_of(strided[:, 1]) == digest_of(tensor)
    swapped = tensor.clone()
    swapped[0], swapped[at] = tensor[at], tensor[0]
    assert (digest_of(swapped) == digest_of(tensor)) == torch.equal(swapped, tensor)
