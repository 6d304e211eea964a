"""The habits of this repository that a test can hold in place."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import ROOT, start_python_in

QUICK = "QUICK := "


def test_what_make_check_runs_needs_no_torch(tmp_path: Path) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.startswith(QUICK))
    modules = [file.removesuffix(".py").replace("/", ".") for file in line.removeprefix(QUICK).split()]
    assert len(modules) >= 5
    code = "import importlib, sys; sys.dont_write_bytecode = True; [importlib.import_module(m) for m in sys.argv[1:]]"
    done = start_python_in(tmp_path, "-c", f"{code}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))", *modules)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
