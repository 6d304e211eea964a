"""Work of our own calls no function that a script may have replaced; replaced ones run as often as without us."""

from __future__ import annotations

import ast
import json
import pkgutil
from pathlib import Path

import pytest

import reprokit
from tests.conftest import Run

HERE = Path(__file__).parent
CONTINUE = ("--after-capture", "continue")


@pytest.mark.parametrize(
    ("phase", "options", "has_file"),
    [
        ("healthy", ("--watch", "every-step", "--record", "auto", "--numbers", "numbers.jsonl"), False),
        ("healthy", ("--on", "early", "--on", "silent"), False),
        ("forward", CONTINUE, True),
        ("backward", CONTINUE, True),
        ("optimizer", CONTINUE, True),
        ("exception", (), True),
        ("event", ("--on", "early", *CONTINUE), True),
    ],
)
def test_no_patched_function_is_called_by_us(
    phase: str, options: tuple[str, ...], has_file: bool, run_reprokit: Run, tmp_path: Path
) -> None:
    script = HERE / "patched_everything.py"
    done = run_reprokit("capture", "-o", "s.pt", *options, str(script), phase, "report.json")
    assert done.returncode == (3 if phase == "exception" else 0), done.stderr
    assert "error of its own" not in done.stderr and (tmp_path / "s.pt").exists() == has_file, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["of_ours"] == {}
    called = ["torch.Tensor.detach", "torch.Tensor.abs", "torch.nn.functional.softplus", "random.random"]
    assert all(report["calls"][name] >= 50 for name in called), report["calls"]
    assert report["seen"], "a call from a file of reprokit would have been noted"


@pytest.mark.parametrize(
    "options", [(), ("--on", "early"), ("--watch", "every-step", "--record", "auto"), ("--budget", "off")]
)
def test_functions_that_draw_are_called_as_often(options: tuple[str, ...], run_python: Run) -> None:
    script = str(HERE / "patched_draws.py")
    bare = run_python(script)
    watched = run_python("-m", "reprokit", "capture", *options, script)
    assert (bare.returncode, watched.returncode) == (0, 0), watched.stderr
    assert bare.stdout == watched.stdout and len(bare.stdout.split()) == 4


@pytest.mark.parametrize("options", [("--at-step", "3", "--on", "early"), ("--at-step", "3,5", "--history", "2")])
def test_handles_have_the_numbers_of_a_bare_run(options: tuple[str, ...], run_python: Run, tmp_path: Path) -> None:
    """And nothing of ours calls `copy.deepcopy`, as `dataclasses.asdict` does, when steps are saved."""
    script = str(HERE / "copies_and_handles.py")
    bare = run_python(script)
    watched = run_python("-m", "reprokit", "capture", *options, script)
    assert (bare.returncode, watched.returncode) == (0, 0), watched.stderr
    assert bare.stdout == watched.stdout and bare.stdout.startswith("[] [0, 1, ")
    assert list(tmp_path.glob("*.pt")), watched.stderr


@pytest.mark.parametrize(
    "options",
    [("--history", "2"), ("--on", "early", "--on", "silent"), ("--watch", "every-step"), ("--record", "1")],
    ids=" ".join,
)
def test_methods_of_modules_are_called_by_the_script_alone(options: tuple[str, ...], run_python: Run) -> None:
    script = str(HERE / "own_members.py")
    bare = run_python(script)
    watched = run_python("-m", "reprokit", "capture", *options, script)
    assert (bare.returncode, watched.returncode) == (0, 0), watched.stderr
    assert bare.stdout == watched.stdout and "'forward', 30" in bare.stdout


def test_packages_of_a_capture_call_what_is_kept() -> None:
    """Their source calls no function of torch and no clock by its attribute, and no method of a tensor."""
    root, found = Path(reprokit.__file__).parent, []
    files = [file for package in PACKAGES for file in sorted((root / package).glob("*.py"))]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = ast.unparse(node.func)
                if _is_function(name) or (node.func.attr in METHODS and not name.startswith("native.")):
                    found.append(f"{file.relative_to(root)}:{node.lineno} {name}")
    assert len(files) > 80 and found == []


def _is_function(name: str) -> bool:
    """True for a function that a script may replace: classes, such as `torch.device`, are none."""
    if name.partition(".")[0] not in ("torch", "time", "random") or name.startswith(LOOKED_UP_LATE):
        return False
    try:
        return not isinstance(pkgutil.resolve_name(name), type)
    except (AttributeError, ImportError, ValueError):
        return False


PACKAGES = ("capture", "program", "locate", "compare", "rules", "snapshot", "series")
METHODS = {"dim", "detach", "clone", "numel", "is_floating_point", "is_complex", "element_size", "requires_grad_"}
LOOKED_UP_LATE = (
    "torch.distributed.",  # is not there on every system
    "torch.backends.",  # settings
    "torch.compile",  # of the comparison with compiled code
    "torch.nn.Module.",
)
