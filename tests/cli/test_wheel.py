"""The wheel holds all that is needed: installed elsewhere it captures, renders, and finds its example."""

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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content, built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "reprokit", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_what_is_in_it(installed: Path) -> None:
    names = {path.relative_to(installed).parts[0] for path in installed.iterdir()}
    assert names == {"reprokit", "torch_reprokit-0.1.0.dist-info"}
    assert (installed / "reprokit" / "py.typed").is_file()


def test_it_captures_and_renders(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    captured = run(installed, tmp_path, "capture", "-o", "x.pt", "train.py")
    assert captured.returncode == 3, captured.stderr
    code = "from reprokit.cli import main\n"
    code += "for kind in ('repro', 'issue', 'report', 'test'):\n"
    code += "    assert main(['render', 'x.pt', '--as', kind, '-o', kind + '.txt']) == 0, kind\n"
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    rendered = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert rendered.returncode == 0, rendered.stderr
    assert all((tmp_path / f"{kind}.txt").read_text() for kind in ("repro", "issue", "report", "test"))


def test_it_finds_its_example(installed: Path, tmp_path: Path) -> None:
    code = "from reprokit.cli.demo import find_example; print(find_example())"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(installed / "reprokit" / "examples" / "masked_attention.py")
