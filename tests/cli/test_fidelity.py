"""What is said of a replay that is not what happened in training, by every command that a person reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import run_python_in

TRAINING = """\
import torch


class Net(torch.nn.Module):
    heat = 1.0

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x):
        return (self.layer(x).square() * self.heat).sum().log()


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
for batch in range(8):
    Net.heat = 0.0 if batch == {failing} else 1.0
    (net(torch.ones(1, 2)) / 2).backward()
    if batch % {accumulated} == {accumulated} - 1:
        optimizer.step()
        optimizer.zero_grad()
"""
DIFFERS = "replay differs from training, so it may not show the same failure: the loss was"


class Told:
    """What the commands say of the script, and what they write."""

    def __init__(self, folder: Path, failing: int, accumulated: int) -> None:
        self._folder = folder
        (folder / "train.py").write_text(TRAINING.format(failing=failing, accumulated=accumulated))
        self.capture = self._run("capture", "-o", "x.pt", "train.py")
        self.shrink = self._run("shrink", "--no-whatif", "-o", "out", "x.pt")
        self.issue = (folder / "out" / "issue.md").read_text()

    def _run(self, *words: str) -> list[str]:
        return run_python_in(self._folder, "-m", "reprokit", *words, COLUMNS="100").stderr.splitlines()


@pytest.fixture(scope="module")
def unfaithful(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """The second batch of a step fails, and an attribute of the class is not what the first one had."""
    return Told(tmp_path_factory.mktemp("unfaithful"), failing=5, accumulated=2)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A step of one batch fails, and its update is made with the same attribute."""
    return Told(tmp_path_factory.mktemp("exact"), failing=4, accumulated=1)


def test_capture_shrink_and_issue_say_it(unfaithful: Told) -> None:
    assert DIFFERS in unfaithful.capture[-2]
    assert unfaithful.capture[-1] == "reprokit: next: reprokit shrink x.pt"
    assert any(DIFFERS in line for line in unfaithful.shrink[-6:])
    assert [line for line in unfaithful.issue.splitlines() if line.startswith("It failed ") and DIFFERS in line]


def test_a_diagnosis_says_what_it_rests_on(unfaithful: Told, exact: Told) -> None:
    said, sure = (next(line for line in told.shrink if "diagnosis: " in line) for told in (unfaithful, exact))
    assert "(certain)" in sure and "(possible)" in said
    assert "- This rests on a replay that differs from training (the loss was" in unfaithful.issue


def test_nothing_is_said_of_an_exact_replay(exact: Told) -> None:
    assert "differs from training" not in "\n".join([*exact.capture, *exact.shrink, exact.issue])
