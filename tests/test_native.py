"""The functions that are kept: a torch that lacks one can be imported, and the error of its call names it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from textwrap import dedent

import pytest

from reprokit import native
from tests.conftest import Run

KEPT = [
    (node.targets[0].id, ast.unparse(node.value).replace("names.", "torch.", 1))
    for node in ast.parse(Path(native.__file__).read_text()).body
    if isinstance(node, ast.Assign)
    and isinstance(node.targets[0], ast.Name)
    and ast.unparse(node.value).startswith("names.")
]
# Imports the module once without each name, and calls what stands in the place of the function.
SCRIPT = """
import importlib, json, pkgutil, sys
import torch
from reprokit import torch_private

class Absent:
    def __get__(self, instance, owner):
        raise AttributeError("it is not there")

wrong = []
for name, path in json.loads(sys.argv[1]):
    home, _, attribute = path.rpartition(".")
    owner = pkgutil.resolve_name(home)
    if owner is torch.default_generator:  # its methods cannot be taken away
        continue
    was_own, original = attribute in vars(owner), getattr(owner, attribute)
    setattr(owner, attribute, Absent()) if isinstance(owner, type) else delattr(owner, attribute)
    try:
        sys.modules.pop("reprokit.native", None)
        native = importlib.import_module("reprokit.native")
        try:
            getattr(native, name)(1)
            wrong.append(f"{name} does not raise")
        except RuntimeError as error:
            if str(error) != f"torch {torch.__version__} lacks `{path}`":
                wrong.append(f"{name}: {error}")
    except Exception as error:
        wrong.append(f"{name}: {type(error).__name__}: {error}")
    finally:
        if isinstance(owner, type) and not was_own:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, original)
    assert getattr(owner, attribute) is not None
print(len(wrong), wrong[:5])
"""


def test_a_torch_that_lacks_a_function_can_be_imported(run_python: Run, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_python("script.py", json.dumps(KEPT))
    assert len(KEPT) > 140 and done.stdout == "0 []\n", done.stdout + done.stderr


def test_a_function_that_came_later_is_called() -> None:
    missing = native._Missing("torch.nn.no_such.function")
    with pytest.raises(RuntimeError, match=r"lacks `torch\.nn\.no_such\.function`"):
        missing()
    assert native._Missing("torch.nn").functional.relu.__class__ is native._Missing
    assert native._Missing("math").sqrt(9.0) == 3.0


def test_a_capture_in_a_torch_that_lacks_functions(run_python: Run, tmp_path: Path) -> None:
    """Each is needed for one thing only; training goes on and the step is saved or a line says why not."""
    (tmp_path / "script.py").write_text(LACKING)
    done = run_python("script.py")
    assert done.returncode == 0 and done.stdout == "trained\n", done.stderr
    assert (tmp_path / "s.pt").exists(), done.stderr


LACKING = dedent("""
    import torch
    del torch.cuda.mem_get_info, torch.is_autocast_cache_enabled, torch.linalg.svdvals
    import reprokit

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with reprokit.capture(output="s.pt", after="continue"):
        for step in range(4):
            loss = model(torch.ones(2, 3)).mean() * (float("nan") if step == 2 else 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("trained")
""")
