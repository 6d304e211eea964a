"""``pytest --reprokit`` over real test files, each run of pytest in a process of its own."""

from __future__ import annotations

import importlib
import tomllib
import xml.etree.ElementTree as ElementTree
from importlib.metadata import entry_points
from pathlib import Path

from reprokit.snapshot.format import load
from tests.conftest import ROOT, Run

TESTS = """\
import math
import pytest
import torch


def train(bad_step=None, steps=4):
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = torch.log(net(torch.ones(3, 2)).square() * (step != bad_step)).mean()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("bad", [2])
def test_breaks(bad):
    assert math.isfinite(train(bad))


def test_raises():
    train()
    torch.nn.Linear(2, 1)(torch.ones(3, 3)).sum().backward()


def test_good():
    assert math.isfinite(train())


def test_expects_nan():
    assert not math.isfinite(train(1))


def test_fails_for_another_reason():
    assert train() == 0
"""
MARKED = """\
import pytest
import reprokit

pytest.register_assert_rewrite("reprokit")  # as an entry point of a wheel does
"""
IS_INSTALLED = any(point.name == "reprokit" for point in entry_points(group="pytest11"))
LOADED = () if IS_INSTALLED else ("-p", "reprokit.integrations.pytest_plugin")
PLUGIN = ("-m", "pytest", *LOADED, "-p", "no:cacheprovider", "-q")


def test_a_failing_training_test_names_its_snapshot(tmp_path: Path, run_python: Run) -> None:
    (tmp_path / "test_training.py").write_text(TESTS)
    done = run_python(*PLUGIN, "--reprokit", "--reprokit-dir", "steps", "--junitxml", "x.xml", "test_training.py")
    assert done.returncode == 1 and "3 failed, 2 passed" in done.stdout, done.stdout
    files = sorted(path.name for path in (tmp_path / "steps").iterdir())
    assert files == ["test_breaks-2-step2.repro.pt", "test_raises-step4.repro.pt"]
    assert load(tmp_path / "steps" / files[0]).failure.kind == "inf"
    assert done.stdout.count("- reprokit -") == 2
    assert "next: reprokit shrink steps/test_breaks-2-step2.repro.pt" in done.stdout
    cases = {case.get("name"): case for case in ElementTree.parse(tmp_path / "x.xml").iter("testcase")}
    (noted,) = (item.get("value") for item in cases["test_breaks[2]"].iter("property"))
    assert noted is not None and noted.endswith(files[0])


def test_without_the_option_nothing_is_watched(tmp_path: Path, run_python: Run) -> None:
    (tmp_path / "test_training.py").write_text(TESTS)
    done = run_python(*PLUGIN, "test_training.py")
    assert done.returncode == 1 and "3 failed, 2 passed" in done.stdout and "- reprokit -" not in done.stdout
    assert not list(tmp_path.glob("*.pt"))


def test_pytest_starts_under_capture_with_warnings_as_errors(tmp_path: Path, start_python: Run) -> None:
    """With the entry point pytest finds the package imported; it marks the packages of all plugins for rewriting."""
    (tmp_path / "test_training.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(MARKED)
    words = "capture", "--after-capture", "continue", *PLUGIN, "test_training.py"
    bare = start_python("-W", "error", *PLUGIN, "test_training.py")
    watched = start_python("-W", "error", "-m", "reprokit", *words)
    assert "3 failed, 2 passed" in bare.stdout, bare.stdout + bare.stderr
    assert "3 failed, 2 passed" in watched.stdout, watched.stdout + watched.stderr
    assert watched.returncode == bare.returncode == 1


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        (name,) = tomllib.load(file)["project"]["entry-points"]["pytest11"].values()
    assert callable(importlib.import_module(name).pytest_addoption)
