"""``reprokit retry``: the captured step with the edited script."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reprokit.snapshot.format import load, save
from tests.conftest import Run

SCRIPT = """\
import sys

import numpy as np
import torch
from torch import nn

torch.manual_seed(3)
np.random.seed(3)
samples = torch.from_numpy(np.memmap("samples.dat", dtype="float32", mode="r+", shape=(96, 4)))
targets = samples.sum(1, keepdim=True).abs() + 0.1
net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples, targets), 10)


def loss_of(x, y, k):
    gap = (net(x) + k * 1e-3 - y).abs()
    return torch.log(gap + y.max() / y.max()).mean()


for k, (x, y) in enumerate(loader):
    loss = loss_of(x + np.random.rand(), y, k)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    print("own", k, loss.item())
"""
# Step 126 has the batch of step 6: no retry waits for so late a step.
LATE = SCRIPT.replace("in enumerate(loader)", "in enumerate(batch for _ in range(13) for batch in loader)")


def write_samples(folder: Path, bad: int | None) -> None:
    samples = np.random.default_rng(0).uniform(-1, 1, (96, 4)).astype("float32")
    if bad is not None:
        samples[10 * bad : 10 * bad + 10] = 0
    samples.tofile(folder / "samples.dat")


@pytest.fixture
def captured(tmp_path: Path, run_reprokit: Run) -> Path:
    """The folder of a script whose step 6 was captured: targets of zero are 0 / 0."""
    write_samples(tmp_path, 6)
    (tmp_path / "train.py").write_text(SCRIPT.replace(".abs() + 0.1", ".abs()"))
    done = run_reprokit("capture", "-o", "s.pt", "--no-cause", "train.py")
    assert done.returncode == 3, done.stderr
    assert load(tmp_path / "s.pt").step == 6
    return tmp_path


def test_a_step_fails_again_until_the_code_is_mended(captured: Path, run_reprokit: Run) -> None:
    before = (captured / "samples.dat").read_bytes()
    again = run_reprokit("retry", "s.pt", "train.py", "--json")
    assert again.returncode == 1, again.stderr
    result = json.loads(again.stdout.splitlines()[-1])
    assert result["verdict"] == "fails" and result["same"] is True
    assert result["failure"]["call"] == "torch.Tensor.div" and result["failure"]["site"]["line"] == 19
    assert "the step fails in the same way: nan from `torch.Tensor.div`, train.py:19" in again.stderr
    # Calls may come and go, before and after the one that failed, and lines may move.
    text = (captured / "train.py").read_text()
    mended = text.replace("y.max() / y.max()", "y.max() / y.max().clamp(min=1e-6)")
    mended = mended.replace("    gap = (net(x)", "    x = x.clamp(-1, 1)\n    gap = (net(x)").replace(
        "import sys\n", "\n"
    )
    (captured / "mended.py").write_text(mended)
    done = run_reprokit("retry", "s.pt", "mended.py")
    assert done.returncode == 0, done.stderr
    assert "the step is finite with this code: loss " in done.stderr
    assert done.stdout.count("own") == 6  # those before it
    other = text.replace("return torch.log(gap + y.max() / y.max())", "return torch.log(y * 0 + gap * 0)")
    (captured / "other.py").write_text(other)
    fails = run_reprokit("retry", "s.pt", "other.py", "--json")
    assert fails.returncode == 1 and json.loads(fails.stdout.splitlines()[-1])["same"] is False
    assert "the step fails in another way: inf from `torch.log`, other.py:19" in fails.stderr
    assert (captured / "samples.dat").read_bytes() == before
    shrunk = run_reprokit("shrink", "s.pt", "--fast", "--no-whatif")
    for text in (shrunk.stderr, (captured / "s" / "summary.md").read_text()):
        assert "reprokit retry FILE train.py" in text, text


@pytest.mark.parametrize("step", [6, 126])
def test_the_step_of_a_healthy_file_is_that_of_training_bit_for_bit(
    step: int, tmp_path: Path, run_reprokit: Run
) -> None:
    """Dropout, Adam's state, NumPy's generator, a schedule and a number that depends on the step."""
    write_samples(tmp_path, None)
    text = SCRIPT if step == 6 else LATE.replace("optimizer, 4, 0.5", "optimizer, 60, 0.5")
    (tmp_path / "train.py").write_text(text)
    assert run_reprokit("capture", "-o", "s.pt", "--at-step", str(step), "train.py").returncode == 0
    snapshot = load(tmp_path / f"s-step{step}.pt")
    row = next(row for row in snapshot.timeline if row.step == step)
    if step == 126:  # its own second step takes its place, and the number of the step is not in the file
        (tmp_path / "train.py").write_text(text.replace("+ k * 1e-3", "+ 126 * 1e-3"))
    done = run_reprokit("retry", f"s-step{step}.pt", "train.py", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["loss"] == row.loss and result["verdict"] == "finite" and result["grad_norm"] > 0
    assert ("the learning rate is 0.0025, as a schedule had set it" in done.stderr) == (step == 126)
    assert done.stdout.count("own") == (6 if step == 6 else 2)
    note = "step 2 of the script stands for step 126, with the captured state and inputs"
    assert (note in result["notes"]) == (step == 126)


def test_inputs_are_matched_in_another_order(captured: Path, run_reprokit: Run) -> None:
    """The edits read the targets first, under their name or another one."""
    text = (captured / "train.py").read_text()
    start, call = "    loss = loss_of(x + np.random.rand(), y, k)", "y.max() / y.max()"
    assert start in text and call in text
    first = {
        "    y = y * 1.0\n": 1,
        "    y = y.clamp(min=1e-6)\n": 0,  # by name
        "    z = y.clamp(min=1e-6)\n    del y\n    y = z\n": 0,  # by shape
        "    mask = torch.ones(x.shape).mul(1.0)\n    y = y.clamp(min=1e-6)\n": 0,
    }
    for lines, code in first.items():
        (captured / "edited.py").write_text(text.replace(start, lines + start))
        done = run_reprokit("retry", "s.pt", "edited.py")
        assert done.returncode == code, (lines, done.stderr)


def test_what_cannot_be_matched_is_said(captured: Path, run_reprokit: Run) -> None:
    text = (captured / "train.py").read_text()
    cases = {
        "nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1)": (
            "nn.Linear(4, 24), nn.Tanh(), nn.Dropout(0.3), nn.Linear(24, 1)",
            "the model of the script has `0.weight` of (24, 4), and the captured state of (16, 4)",
        ),
        "nn.Dropout(0.3), nn.Linear(16, 1)": (
            "nn.Linear(16, 1)",
            "the model of the script has no `3.weight`",
        ),
        "loss_of(x + np.random.rand(), y, k)": (
            "loss_of(x + np.random.rand(), torch.from_numpy(np.zeros(len(y), dtype=int)), k)",
            "gap = (net(x) + k * 1e-3 - y).abs(), where the script reads int64 (",
        ),
        "    loss.backward()": ("    raise SystemExit", "the script ended before it made the captured step"),
        "    optimizer.zero_grad()": ("    raise KeyError('own')", "a step of the script's own fails before: KeyError"),
    }
    for old, (new, message) in cases.items():
        assert old in text
        (captured / "edited.py").write_text(text.replace(old, new))
        done = run_reprokit("retry", "s.pt", "edited.py", "--json")
        assert done.returncode == 2, (new, done.stderr)
        assert message in done.stderr, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["verdict"] == "not_matched"


def test_a_line_that_only_one_step_comes_to_is_reached(tmp_path: Path, run_reprokit: Run) -> None:
    write_samples(tmp_path, None)
    condition = "    if k == 6:\n        loss = loss + (loss - loss.detach()).sqrt()\n    optimizer.zero_grad()"
    (tmp_path / "train.py").write_text(SCRIPT.replace("    optimizer.zero_grad()", condition))
    assert run_reprokit("capture", "-o", "s.pt", "--no-cause", "train.py").returncode == 3
    (tmp_path / "mended.py").write_text(
        (tmp_path / "train.py").read_text().replace("loss.detach())", "loss.detach() + 1e-12)")
    )
    for script, code in (("train.py", 1), ("mended.py", 0)):
        done = run_reprokit("retry", "s.pt", script)
        assert done.returncode == code, done.stderr


def test_a_minibatch_of_another_size_takes_the_place_of_the_own_one(tmp_path: Path, run_reprokit: Run) -> None:
    """The last minibatch of 33 samples has one, whose deviation is NaN; the loop's first one has 16."""
    (tmp_path / "ppo.py").write_text(
        """\
import torch

torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
samples = torch.randn(33, 4)
samples = (samples - samples.mean(0)) / samples.std(0)
for epoch in range(4):
    order = torch.randperm(33)
    for start in range(0, 33, 16):
        x = samples[order[start : start + 16]]
        x = x - x.mean(0)
        loss = (net(x / (x.std(0) + 1)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
    )
    assert run_reprokit("capture", "-o", "s.pt", "--no-cause", "ppo.py").returncode == 3
    again = run_reprokit("retry", "s.pt", "ppo.py")
    assert again.returncode == 1 and "fails in the same way: nan from `torch.Tensor.std`, ppo.py:13" in again.stderr
    mended = (tmp_path / "ppo.py").read_text().replace("x.std(0) + 1)", "x.std(0, unbiased=False) + 1)")
    (tmp_path / "ppo.py").write_text(mended)
    assert run_reprokit("retry", "s.pt", "ppo.py").returncode == 0


def test_files_and_words_that_cannot_be_used(captured: Path, run_reprokit: Run) -> None:
    snapshot = load(captured / "s.pt")
    save(replace(snapshot, before=None), captured / "old.pt")
    old = run_reprokit("retry", "old.pt", "train.py")
    assert old.returncode == 2 and "does not hold the state from before the step" in old.stderr
    assert "hint: capture the failure again" in old.stderr and "own" not in old.stdout  # it was not run
    (captured / "no.pt").write_bytes(b"no")
    for words, code in ((("no.pt", "train.py"), 2), (("s.pt", "none.py"), 2), (("s.pt",), 2), (("s.pt", "-m"), 2)):
        assert run_reprokit("retry", *words).returncode == code, words
    assert run_reprokit("retry", "s.pt", "-m", "train").returncode == 1
    assert run_reprokit("retry", "s.pt", "--", "train.py").returncode == 1


LOOP = """\
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 1)
norm = nn.BatchNorm1d(4)
model = nn.ModuleList([net, norm])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for k in range(122):
    x = torch.randn(8, 4)
    scale = 1 - k / 120
    {body}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SCHEDULED = "loss = (net(x) / scale).pow(2).mean()"
BY_NUMBER = "loss = net(x).pow(2).mean()\n    if k == 120:\n        loss = loss + (loss - loss.detach()).pow(2).sqrt()"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (SCHEDULED, "the captured step has 0.0 in `div`"),
        (BY_NUMBER, "the step does not reach train.py:14"),
    ],
)
def test_a_late_step_that_a_number_decides_about_is_not_taken_for_mended(
    body: str, said: str, run_reprokit: Run, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LOOP.format(body=body))
    assert run_reprokit("capture", "-o", "s.pt", "--no-cause", "train.py").returncode == 3
    (tmp_path / "edited.py").write_text(LOOP.format(body=body).replace(".pow(2).sqrt()", ".square().sqrt()"))
    for script in ("train.py", "edited.py"):  # the edit is not reached, or there is none
        done = run_reprokit("retry", "s.pt", script)
        assert done.returncode == 2 and said in done.stderr, done.stderr


def test_the_captured_state_goes_to_the_model_of_the_same_name(run_reprokit: Run, tmp_path: Path) -> None:
    """Of two models in turn the second diverges: a smaller rate does not mend its state."""
    text = """\
import torch

for rate in (0.01, 50.0):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(40):
        x = torch.randn(8, 4)
        loss = (model(x).squeeze(1) - x[:, 0]).pow(4).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "mended.py").write_text(text.replace("50.0", "0.01"))
    assert run_reprokit("capture", "-o", "s.pt", "--no-cause", "train.py").returncode == 3
    assert load(tmp_path / "s.pt").step > 40
    for script in ("train.py", "mended.py"):
        done = run_reprokit("retry", "s.pt", script)
        assert done.returncode == 1 and "fails in the same way" in done.stderr, done.stderr


def test_a_finite_loss_with_a_ruined_buffer_is_not_mended(run_reprokit: Run, tmp_path: Path) -> None:
    body = "x = x * (1e30 if k == 120 else 1.0)\n    loss = net(norm(x)).pow(2).mean()"
    (tmp_path / "train.py").write_text(LOOP.format(body=body))
    assert run_reprokit("capture", "-o", "s.pt", "--no-cause", "train.py").returncode == 3
    (tmp_path / "mended.py").write_text(LOOP.format(body=body).replace("norm(x)).pow(2)", "norm(x)).tanh().pow(2)"))
    done = run_reprokit("retry", "s.pt", "mended.py")
    assert done.returncode == 1 and "running_var` is nan or infinite after it" in done.stderr, done.stderr


ROWS = """\
import torch
from torch.utils.data import DataLoader


class Rows:
    def __len__(self):
        return 48

    def __getitem__(self, index):
        x = torch.ones(3) * (index % 5 + 1)
        return x if index != 35 else x * 0


torch.manual_seed(0)
net = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
for step, x in enumerate(DataLoader(Rows(), batch_size=4)):
    u = x + torch.rand(4, 3) * 0
    if step == 8:
        u[1] = x[1] * 1.0
    # the direction
    loss = (net(x) - u / u.norm(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("own", step)
"""


def test_only_an_edit_of_what_the_step_runs_makes_it_finite(run_reprokit: Run, tmp_path: Path) -> None:
    """A line that only the captured step reaches, and a data set that makes the bad row."""
    (tmp_path / "train.py").write_text(ROWS)
    assert run_reprokit("capture", "-o", "s.pt", "--no-cause", "--source", "none", "train.py").returncode == 3
    snapshot = load(tmp_path / "s.pt")
    assert snapshot.step == 8 and snapshot.code is not None and len(snapshot.code["train.py"]) == ROWS.count("\n")
    assert run_reprokit("capture", "-o", "whole.pt", "--no-cause", "train.py").returncode == 3
    save(replace(load(tmp_path / "whole.pt"), code=None), tmp_path / "old.pt")  # of a version that kept no digests
    mended = "u.norm(dim=1, keepdim=True).clamp(min=1e-6)"
    edits = {
        "": (ROWS, 1),
        "a comment": (ROWS.replace("# the direction", "# its direction"), 1),
        "a line that is printed": (ROWS.replace('print("own", step)', 'print("own", step + 0)'), 1),
        "the data": (ROWS.replace("else x * 0", "else x"), 2),
        "the code": (ROWS.replace("u.norm(dim=1, keepdim=True)", mended), 0),
    }
    for what, (text, code) in edits.items():
        (tmp_path / "train.py").write_text(text)
        done = run_reprokit("retry", "s.pt", "train.py")
        assert done.returncode == code, (what, done.stderr)
        if what == "the data":
            assert "the captured batch was given to the step, so a change of the data cannot show" in done.stderr
            assert "train.py:11 is code of a data set: " in done.stderr
    for script, code in ((ROWS, 1), (edits["the code"][0], 0)):
        (tmp_path / "train.py").write_text(script)
        done = run_reprokit("retry", "old.pt", "train.py")
        assert done.returncode == code, done.stderr


def test_a_step_that_reads_other_bits_is_not_finite(run_reprokit: Run, tmp_path: Path) -> None:
    """Nothing is seeded, so the script cannot make the captured row again, and no other step reads a row like it."""
    text = """\
import torch

net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(12):
    x = torch.rand(4) + 1
    loss = net(x).square().mean()
    if step == 9:
        extra = torch.rand(2, 4)
        extra = extra * (extra[0] - extra[0]) if UNLUCKY else extra
        loss = loss + 1e-3 * (extra / extra.norm(dim=1, keepdim=True)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    (tmp_path / "train.py").write_text("import os\nUNLUCKY = os.path.exists('unlucky')\n" + text)
    (tmp_path / "unlucky").write_text("")
    assert run_reprokit("capture", "-o", "s.pt", "--no-cause", "train.py").returncode == 3
    (tmp_path / "unlucky").unlink()
    done = run_reprokit("retry", "s.pt", "train.py")
    assert done.returncode == 2, done.stderr
    edited = (tmp_path / "train.py").read_text().replace("lr=1e-2", "lr=1e-3")
    (tmp_path / "train.py").write_text(edited)
    done = run_reprokit("retry", "s.pt", "train.py")
    assert done.returncode == 2, done.stderr


def test_a_loss_above_three_times_the_usual_is_not_finite(captured: Path, run_reprokit: Run) -> None:
    text = (captured / "train.py").read_text()
    for least, code in (("0.5", 0), ("1e-30", 1)):
        mended = text.replace("gap + y.max() / y.max()", f"gap + 1 / y.max().double().clamp(min={least})")
        (captured / "train.py").write_text(mended)
        done = run_reprokit("retry", "s.pt", "train.py")
        assert done.returncode == code, done.stderr
    assert "and usual are up to" in done.stderr


MICRO_STEPS = """\
import torch
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
net = torch.nn.Linear(5, 7)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for step in range(12):
    optimizer.zero_grad()
    for micro in range(4):
        x, y = torch.randn(6, 5), torch.randint(0, 7, (6,))
        if step == 8 and micro == 2:
            y[:] = -100
        valid = (y != -100).sum()
        loss = cross_entropy(net(x), y, ignore_index=-100, reduction="sum") / valid
        (loss / 4).backward()
    optimizer.step()
"""


def test_a_step_of_several_micro_steps_is_over_at_its_update(run_reprokit: Run, tmp_path: Path) -> None:
    """The fourth micro-step begins where the first did, and the third is the one that failed."""
    (tmp_path / "train.py").write_text(MICRO_STEPS)
    assert run_reprokit("capture", "-o", "s.pt", "--no-cause", "train.py").returncode == 3
    edits = {
        "": ("/ valid", "/ valid", 1),
        "a line that is near": ("/ valid", "/ valid + 0", 1),
        "the code": ("/ valid", "/ valid.clamp(min=1)", 0),
    }
    for what, (old, new, code) in edits.items():
        (tmp_path / "train.py").write_text(MICRO_STEPS.replace(old, new))
        done = run_reprokit("retry", "s.pt", "train.py")
        assert done.returncode == code, (what, done.stderr)


OWN_CLIPPING = """\
import torch

torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)


def norm_of(parameters):
    total = sum(p.grad.square().sum() for p in parameters).sqrt()
    is_inf = total.isinf()
    return is_inf * -1.0 + is_inf.logical_not() * total


for step in range(12):
    x = torch.randn(8, 4)
    if step == 7:
        x[3] = 1e11
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = norm_of(net.parameters())
    if norm == -1.0:
        continue
    for p in net.parameters():
        p.grad.mul_(1 / norm.clamp(min=1.0))
    optimizer.step()
"""


def test_mended_clipping_makes_the_step_leave_its_update_out(run_reprokit: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_CLIPPING)
    assert run_reprokit("capture", "-o", "s.pt", "--no-cause", "train.py").returncode == 3
    mended = "torch.where(is_inf, -1.0, total)"
    edits = {
        "a learning rate": ("lr=1e-3", "lr=1e-4", 1),
        "the code": ("is_inf * -1.0 + is_inf.logical_not() * total", mended, 0),
    }
    for what, (old, new, code) in edits.items():
        (tmp_path / "train.py").write_text(OWN_CLIPPING.replace(old, new))
        done = run_reprokit("retry", "s.pt", "train.py")
        assert done.returncode == code, (what, done.stderr)


RANKING = """\
import torch

torch.manual_seed(4)
net = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=2e-3)


def ranking(scores, positive):
    hardest = scores[positive].min()
    return (scores[~positive] - hardest + 0.1).relu().mean()


for step in range(12):
    x = torch.randn(6, 5)
    positive = x[:, 0] > (-0.2 if step != 9 else 9.0)
    positive[0], positive[1] = step != 9, False
    loss = ranking(net(x).squeeze(1), positive)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_an_edited_branch_in_front_of_the_line_that_failed(run_reprokit: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKING)
    assert run_reprokit("capture", "-o", "s.pt", "--no-cause", "train.py").returncode == 3
    line = "    hardest = scores"
    edits = {
        "a branch that is not taken": ("    if scores.isnan().all():\n        return scores.sum() * 0\n", 1),
        "the code": ("    if not positive.any():\n        return 0.1 * scores.abs().mean()\n", 0),
    }
    for what, (branch, code) in edits.items():
        (tmp_path / "train.py").write_text(RANKING.replace(line, branch + line))
        done = run_reprokit("retry", "s.pt", "train.py")
        assert done.returncode == code, (what, done.stderr)


WRITES_NUMBERS = """
import json

import torch
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), torch.tensor(1.0)

    def forward(self, x):
        self.scale = self.scale / 2
        return self.layer(x) / self.scale


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.0001)
for step in range(200):
    loss = (net(torch.randn(8, 4)) * 1e-6).abs().log().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    with open("metrics.json", "w") as file:
        json.dump({"step": step}, file)
"""


def test_numbers_that_the_script_writes_beside_itself_are_no_edited_settings(run_reprokit: Run, tmp_path: Path) -> None:
    """The step of number 2 stands for one far behind; the attribute that halves in every step is not kept."""
    (tmp_path / "train.py").write_text(WRITES_NUMBERS)
    (tmp_path / "metrics.json").write_text("{}")
    assert run_reprokit("capture", "--no-cause", "-o", "s.pt", "train.py").returncode == 3
    done = run_reprokit("retry", "s.pt", "train.py")
    assert done.returncode == 2, done.stderr
    assert "with other bits than the captured step" in done.stderr


IDLE = """\
import os

import torch


class Net(torch.nn.Linear):
    scale = 1.0


def unused():
    net.scale = 1.0


torch.manual_seed(0)
net = Net(4, 1)
if os.path.exists("unlucky"):
    net.scale = 0.0
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(6):
    x = torch.randn(8, 4)
    gap = net(x) - 0.5
    if step == 4:
        gap = gap * net.scale / net.scale
    loss = gap.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_an_edited_line_that_has_not_run_explains_nothing(run_reprokit: Run, tmp_path: Path) -> None:
    """The number is another one because a file is gone; the edited function writes its name, and nobody calls it."""
    (tmp_path / "train.py").write_text(IDLE)
    (tmp_path / "unlucky").write_text("")
    assert run_reprokit("capture", "-o", "s.pt", "--no-cause", "train.py").returncode == 3
    (tmp_path / "unlucky").unlink()
    edits = {
        "a function that is not called": ("    net.scale = 1.0", "    net.scale = 2.0", 2),
        "the condition": ('if os.path.exists("unlucky"):', 'if os.path.exists("lucky"):', 0),
    }
    for what, (old, new, code) in edits.items():
        (tmp_path / "train.py").write_text(IDLE.replace(old, new))
        done = run_reprokit("retry", "s.pt", "train.py")
        assert done.returncode == code, (what, done.stderr)


CARRIED = """\
import torch

torch.manual_seed(0)
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
carried = torch.ones(8, 4)
for step in range(12):
    x = torch.randn(8, 4)
    state = carried * 30 + net(x).sigmoid()
    loss = (1e-3 * state).exp().mean().log()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    carried = state.detach()
"""


def test_an_edit_behind_the_update_acts_on_the_steps_before(run_reprokit: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CARRIED)
    assert run_reprokit("capture", "-o", "s.pt", "--no-cause", "train.py").returncode == 3
    (tmp_path / "train.py").write_text(CARRIED.replace("state.detach()", "state.detach().clamp(max=2)"))
    done = run_reprokit("retry", "s.pt", "train.py")
    assert done.returncode == 2 and "behind the update of the step before" in done.stderr, done.stderr
    (tmp_path / "train.py").write_text(CARRIED.replace("carried * 30", "carried.clamp(max=2) * 30"))
    done = run_reprokit("retry", "s.pt", "train.py")
    assert done.returncode == 0, done.stderr


DRAWS = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        chosen = x[x[:, 0] > 0]
        centre = chosen.mean(0)
        noise = torch.rand(8, 4)
        return self.layer(x - centre + noise)


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
for step in range(8):
    x = torch.randn(8, 4)
    if step == STEP:
        x = -x.abs()
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("step", [0, 5])
def test_a_mended_line_that_draws_moves_the_numbers_behind_it(step: int, run_reprokit: Run, tmp_path: Path) -> None:
    text = DRAWS.replace("STEP", str(step))
    (tmp_path / "train.py").write_text(text)
    assert run_reprokit("capture", "-o", "s.pt", "--no-cause", "train.py").returncode == 3
    mended = "chosen.mean(0) if len(chosen) else x[torch.randint(8, (1,))].mean(0)"
    (tmp_path / "train.py").write_text(text.replace("chosen.mean(0)", mended))
    done = run_reprokit("retry", "s.pt", "train.py")
    assert done.returncode == 0, done.stderr
    assert "an edited line draws random numbers, so" in done.stderr


METHODS = """\
import torch
from torch import nn

torch.manual_seed(0)


class Curve(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.points = nn.Linear(4, 3), nn.Parameter(torch.ones(2, 4))
        self.weight = nn.Parameter(torch.zeros(3))

    def at(self, x):
        known = self.layer(self.points)
        weight = self.weight.exp()
        rows = self.layer(x / x.norm(dim=1, keepdim=True))
        return rows @ known.T, rows * weight


curve = Curve()
optimizer = torch.optim.Adam(curve.parameters(), lr=1e-2)
for step in range(12):
    x = torch.randn(8, 4)
    if step == 9:
        x = x * 0
    out, size = curve.at(x)
    loss = out.square().mean() + size.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 1:
        print(out.mean().item())
"""


def test_parameters_of_a_model_that_is_never_called(run_reprokit: Run, tmp_path: Path) -> None:
    """They are the captured ones. A log behind the update, which reads the step before, is no part of the step."""
    (tmp_path / "train.py").write_text(METHODS)
    assert run_reprokit("capture", "-o", "s.pt", "--no-cause", "train.py").returncode == 3
    assert run_reprokit("retry", "s.pt", "train.py").returncode == 1
    (tmp_path / "train.py").write_text(METHODS.replace("keepdim=True)", "keepdim=True).clamp(min=1e-6)"))
    done = run_reprokit("retry", "s.pt", "train.py")
    assert done.returncode == 0, done.stderr
