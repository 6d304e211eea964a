"""The habits of this repository that a test can hold in place."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tests.conftest import ROOT, start_python_in

QUICK = "QUICK := "
PACKAGE = sorted((ROOT / "reprokit").rglob("*.py"))
SAME_CLASS = {"ReprokitCallback"}  # of each framework: its users import one of them


def test_what_make_check_runs_needs_no_torch(tmp_path: Path) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.startswith(QUICK))
    modules = [file.removesuffix(".py").replace("/", ".") for file in line.removeprefix(QUICK).split()]
    assert len(modules) >= 4
    code = "import importlib, sys; sys.dont_write_bytecode = True; [importlib.import_module(m) for m in sys.argv[1:]]"
    done = start_python_in(tmp_path, "-c", f"{code}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))", *modules)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_no_two_public_classes_have_one_name() -> None:
    nodes = (node for path in PACKAGE for node in ast.parse(path.read_text(encoding="utf-8")).body)
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    assert len(names) > 100
    assert {name for name, count in names.items() if count > 1} == SAME_CLASS


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions count; those for types only do not."""
    homes = {name_of(path): path for path in PACKAGE}
    imports = {name: set(imported(ast.parse(path.read_text(encoding="utf-8")))) for name, path in homes.items()}
    graph = {name: {found for found in names if found in homes} for name, names in imports.items()}
    assert sum(map(len, graph.values())) > 500
    TopologicalSorter(graph).prepare()  # raises `CycleError`


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
            yield from [child.module or ""] if not is_package(child.module) else []
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from imported(child)


def is_package(module: str | None) -> bool:
    return (ROOT / (module or "").replace(".", "/")).is_dir()


DOCUMENTED = {"_version", "_base", "_indices", "_values"}  # torch's own pages name them: version counters, views, COO
CALLED = {"_pack_padded_sequence", "_pad_packed_sequence"}  # recorded, and printed by their public names
OF_PYTHON = {"_getframe", "_exit", "_replace", "_fields", "_run_exitfuncs", "_clear", "_showwarnmsg_impl"}


def test_private_names_of_torch_stand_in_one_file() -> None:
    """An attribute with one underscore in front is of a class of ours, or its name stands in `torch_private.py`."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE if path.stem != "torch_private"}
    ours = {name for tree in trees.values() for name in defined(tree)}
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in trees.items()
        for name in named(tree)
        if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
        and not {name, name.rpartition(".")[2]} & (ours | DOCUMENTED | CALLED | OF_PYTHON)
    }
    assert len(ours) > 300
    assert found == set()


def defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (part.name for part in node.body if isinstance(part, ast.FunctionDef))
            yield from (part.target.id for part in node.body if isinstance(getattr(part, "target", None), ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            yield node.attr


def named(tree: ast.Module) -> Iterator[str]:
    """The names of attributes, also those that are texts; and of modules of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("getattr", "hasattr", "setattr", "_wrap", "_replace"):
                yield str(node.args[1].value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch._"):
            yield node.value
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
