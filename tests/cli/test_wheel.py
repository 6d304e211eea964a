"""The wheel holds all that is needed, unpacked elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """\
import torch

x = torch.zeros(2, requires_grad=True)
optimizer = torch.optim.SGD([x], lr=0.1)
for step in range(3):
    loss = (x / x).sum()
    loss.backward()
    optimizer.step()
"""
USER = """\
from reprokit.cli import main
from reprokit.cli.demo import find_example

assert main(["capture", "-o", "x.pt", "train.py"]) == 3
for kind in ("repro", "issue"):
    assert main(["render", "x.pt", "--as", kind, "-o", kind + ".txt"]) == 0, kind
print(find_example())
"""


def test_the_wheel_captures_renders_and_finds_its_example(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {path.name for path in site.iterdir()} == {"reprokit", "torch_reprokit-0.1.0.dist-info"}
    assert (site / "reprokit" / "py.typed").is_file()
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", USER], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(site / "reprokit" / "examples" / "masked_attention.py")
    assert all((tmp_path / f"{kind}.txt").read_text() for kind in ("repro", "issue"))
