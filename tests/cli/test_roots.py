"""A step that calls several models: each has the name that the script gives it, and none is mistaken for another."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import reprokit
from reprokit.render.module_ranges import frames
from reprokit.render.survey import survey
from reprokit.snapshot.format import Snapshot, load
from tests.conftest import run_python_in

TRAINING = """\
import torch
from torch import nn


class Log(nn.Module):
    def forward(self, x):
        return x.log()


torch.manual_seed(0)
G = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
D = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid(), Log())
optimizers = {
    "for G": torch.optim.SGD(G.parameters(), lr=0.125),
    "for D": torch.optim.SGD(D.parameters(), lr=0.25),
}


def train(net, x, optimizer, zero):
    optimizer.zero_grad()
    loss = -net(x * zero - 1e30 * (1 - zero)).mean() + 20
    loss.backward()
    optimizer.step()


with torch.no_grad():
    D[0].weight.fill_(1.0)
for step in range(6):
    fake = G(torch.randn(4, 2))
    optimizers["for G"].zero_grad()
    (fake.square().mean() + 2 + step).backward()
    optimizers["for G"].step()
    train(D, G(torch.randn(4, 2)).detach(), optimizers["for D"], 0.0 if step == 4 else 1.0)
"""


class Told:
    """What the commands say of the script, and what they write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "train.py").write_text(TRAINING)
        self.capture = self._run("capture", "-o", "x.pt", "train.py").stderr.splitlines()
        self.show = self._run("show", "x.pt").stderr.splitlines()
        self.json = json.loads(self._run("show", "--json", "x.pt").stdout)
        self._run("shrink", "--no-whatif", "-o", "out", "x.pt")
        self.issue = (folder / "out" / "issue.md").read_text()
        self.report = (folder / "out" / "report.html").read_text()

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run_python_in(self._folder, "-m", "reprokit", *words, COLUMNS="120")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """The second of two models fails in its third module; the function that calls it has another name for it."""
    return Told(tmp_path_factory.mktemp("roots"))


def test_every_text_names_the_model(told: Told) -> None:
    assert (told.json["failure"]["module"], told.json["failure"]["root"]) == ("2", "D")
    assert any(line.startswith("reprokit:   in D.2, train.py:7: return x.log()") for line in told.capture)
    assert any("in module `D.2`" in line for line in told.show)
    assert "in module `D.2`" in told.issue
    assert " in D.2: " in told.issue.splitlines()[0]


def test_the_table_of_modules_has_each_model(told: Told) -> None:
    names = re.findall(r'<th class="left"><code>(.*?)</code></th>', told.report)
    assert names == ["G.0", "G.1", "G.2", "G", "D.0", "D.1", "D.2", "D"]


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)


class Trainer:
    """Holds its models in the ways that people do."""

    def __init__(self) -> None:
        self.critic = nn.Linear(2, 2)
        self.inside = {"actor": nn.Linear(2, 2)}
        self.both = Both()

    def run(self, folder: Path) -> Snapshot:
        def forward(x: torch.Tensor) -> torch.Tensor:
            return self.both.second(self.inside["actor"](self.critic(x)))

        return captured(folder, forward)


def captured(folder: Path, forward: Callable[[torch.Tensor], torch.Tensor]) -> Snapshot:
    """The snapshot of a step whose loss becomes NaN behind ``forward``."""
    with reprokit.capture(folder / "x.pt", quiet=True):
        (forward(torch.ones(1, 2)).sum() * torch.tensor(0.0) / 0).backward()
    return load(folder / "x.pt")


def modules_of(snapshot: Snapshot) -> list[str]:
    return [frame.module for frame in frames(survey(snapshot))[0]]


def test_models_are_found_in_attributes_containers_and_other_models(tmp_path: Path) -> None:
    assert modules_of(Trainer().run(tmp_path)) == ["critic", "actor", "both.second"]


def test_a_model_without_a_name_has_its_class_and_a_number(tmp_path: Path) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return nowhere()(nowhere()(x))

    models = {2 * number: nn.Linear(2, 2) for number in range(2)}  # no name leads to these
    nowhere = iter(models.values()).__next__
    assert modules_of(captured(tmp_path, forward)) == ["Linear", "Linear2"]
