"""Counts what a reader of ``reprokit/`` feels: how dense the code is, who owns a field, where a kind is tested.

Reads source only. ``python -m tests.house`` prints the counts of each package, with ``--worst N`` the places behind
them; ``--lower`` writes smaller counts into `test_house.json`, the upper limits that `test_house.py` holds.

    tokens            without comments and docstrings, so that packing cannot lower them
    tokens_per_line   of code lines
    complex           functions with a cyclomatic complexity above 12; `most_complex`: the highest complexity
    foreign_stores    `x.field = ...` where `x` is not `self` and only classes of other files have the field
    biggest_class     fields of the class with the most; `written_outside`: how many of them other files store into
    circle            modules of the largest import circle, with the imports under `if TYPE_CHECKING`
    ternaries         conditional expressions per 1,000 code lines
    failure_kinds     comparisons with a kind, phase or event of a failure; `failure_kind_files`: the files they are in
    call_kinds        comparisons with the kind of a recorded call in `capture/`, without `calls.py`
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = Path(__file__).with_name("test_house.json")
COMPLEX = 12  # a function with more branches than this is read twice
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.IfExp, ast.ExceptHandler, ast.Assert, ast.match_case)
MEMBERSHIP = (ast.Is, ast.IsNot, ast.In, ast.NotIn)
PHASES = {"FORWARD", "BACKWARD", "OPTIMIZER"}
FAILURE_NAMES = {
    *("NONFINITE", "EXCEPTION", "HEALTHY", "SILENT", "DEAD", "EVENTS", "KINDS", "MISMATCH", "RANKS", "NAN", "INF"),
}
FAILURE_WORDS = {
    *("nan", "inf", "exception", "spike", "explosion", "dead", "silent", "change", "scale", "mismatch", "none"),
}


@dataclass(frozen=True, slots=True)
class Class:
    """A class and its fields: annotated in its body, or stored by its methods through their first parameter."""

    name: str
    path: Path
    line: int
    fields: frozenset[str]


@dataclass(slots=True)
class Counted:
    """The counts of a package folder, and the places behind them."""

    packages: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    complexities: list[tuple[int, str]] = field(default_factory=list)
    classes: list[Class] = field(default_factory=list)
    stores: Counter[tuple[str, Path]] = field(default_factory=Counter)  # a field's name, the file that stores into it
    failure_kinds: Counter[Path] = field(default_factory=Counter)
    call_kinds: Counter[Path] = field(default_factory=Counter)
    circles: list[list[str]] = field(default_factory=list)

    @property
    def owners(self) -> dict[str, set[Path]]:
        """The files whose classes have a field of that name."""
        owners = defaultdict(set)
        for cls in self.classes:
            for name in cls.fields:
                owners[name].add(cls.path)
        return owners

    @property
    def foreign(self) -> dict[tuple[str, Path], int]:
        """Stores into a field that only classes of other files have."""
        owners = self.owners
        return {key: count for key, count in self.stores.items() if owners[key[0]] and key[1] not in owners[key[0]]}

    def limits(self) -> dict[str, float]:
        """The counts of the whole folder, which may fall and not rise."""
        total = sum(self.packages.values(), Counter())
        biggest = max(self.classes, key=lambda cls: len(cls.fields))
        owners = self.owners
        written = {name for name, _ in self.foreign if name in biggest.fields and owners[name] == {biggest.path}}
        return {
            "tokens": total["tokens"],
            "tokens_per_line": round(total["tokens"] / total["code"], 1),
            "complex": sum(worth > COMPLEX for worth, _ in self.complexities),
            "most_complex": max(self.complexities)[0],
            "foreign_stores": sum(self.foreign.values()),
            "biggest_class": len(biggest.fields),
            "written_outside": len(written),
            "circle": max(map(len, self.circles), default=0),
            "ternaries": round(1000 * total["ternaries"] / total["code"], 1),
            "failure_kinds": sum(self.failure_kinds.values()),
            "failure_kind_files": len(self.failure_kinds),
            "call_kinds": sum(self.call_kinds.values()),
        }


def count(folder: Path) -> Counted:
    """Count every Python file below a package's folder."""
    counted = Counted()
    texts = {path.relative_to(folder): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    for path, tree in trees.items():
        package = path.parts[0] if len(path.parts) > 1 else "(top)"
        row = counted.packages[package]
        row["files"] += 1
        _count_lines(row, texts[path], tree)
        for node in ast.walk(tree):
            _count_node(counted, row, path, node)
    counted.circles = circles({module_name(path, folder.name): tree for path, tree in trees.items()})
    return counted


def _count_lines(row: Counter[str], source: str, tree: ast.Module) -> None:
    """Add lines, code lines, tokens and lines that are only a comment."""
    lines = source.splitlines()
    docstrings = {line for node in ast.walk(tree) for line in _docstring_lines(node)}
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        first, last = token.start[0], token.end[0]
        if token.type == tokenize.COMMENT and lines[first - 1].lstrip().startswith("#"):
            row["comments"] += 1
        elif token.type not in LAYOUT and first not in docstrings:
            row["tokens"] += 1
            code.update(range(first, last + 1))
    row["lines"] += len(lines)
    row["code"] += len(code - docstrings)


def _docstring_lines(node: ast.AST) -> range:
    if not isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
        return range(0)
    if ast.get_docstring(node, clean=False) is None:
        return range(0)
    text = node.body[0]
    return range(text.lineno, (text.end_lineno or text.lineno) + 1)


def _count_node(counted: Counted, row: Counter[str], path: Path, node: ast.AST) -> None:
    if isinstance(node, ast.IfExp):
        row["ternaries"] += 1
    elif isinstance(node, FUNCTIONS):
        row["functions"] += 1
        worth = complexity(node)
        row["complex"] += worth > COMPLEX
        counted.complexities.append((worth, f"{path}:{node.lineno} {node.name}"))
    elif isinstance(node, ast.ClassDef):
        counted.classes.append(Class(node.name, path, node.lineno, frozenset(fields_of(node))))
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not _is_self(node.value):
        counted.stores[node.attr, path] += 1
    elif isinstance(node, ast.Compare):
        if is_failure_kind(node):
            counted.failure_kinds[path] += 1
        elif path.parts[0] == "capture" and path.name != "calls.py" and is_call_kind(node):
            counted.call_kinds[path] += 1


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def complexity(function: ast.AST) -> int:
    """The cyclomatic complexity of a function without the functions inside it."""
    branches = 1
    nodes = list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        if isinstance(node, BRANCHES):
            branches += 1
        elif isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            branches += 1 + len(node.ifs)
        nodes.extend(ast.iter_child_nodes(node))
    return branches


def fields_of(cls: ast.ClassDef) -> Iterator[str]:
    """The fields of a class."""
    for part in cls.body:
        is_field = isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
        if is_field and "ClassVar" not in ast.unparse(part.annotation):
            yield part.target.id
        if not isinstance(part, FUNCTIONS) or not part.args.args:
            continue
        own = part.args.args[0].arg
        for node in ast.walk(part):
            is_store = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_store and isinstance(node.value, ast.Name) and node.value.id == own:
                yield node.attr


def is_failure_kind(node: ast.Compare) -> bool:
    """True for a comparison with a phase, or with a kind or an event of a failure."""
    names = {name.rpartition(".")[2] for name in _texts(node)}
    words = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}
    if names & PHASES:
        return True
    return _asks_for_kind(node) and bool(names & FAILURE_NAMES or words & FAILURE_WORDS)


def is_call_kind(node: ast.Compare) -> bool:
    """True for a comparison with the class of a recorded call."""
    return _asks_for_kind(node) and any(isinstance(operator, MEMBERSHIP) for operator in node.ops)


def _asks_for_kind(node: ast.Compare) -> bool:
    return any(name.rpartition(".")[2] in ("kind", "_kind", "phase", "event") for name in _texts(node))


def _texts(node: ast.Compare) -> list[str]:
    return [ast.unparse(side) for side in (node.left, *node.comparators)]


def circles(trees: dict[str, ast.Module]) -> list[list[str]]:
    """The circles of imports among modules, largest first; imports inside functions and for types only count."""
    graph = {name: set(_imported(tree, set(trees))) for name, tree in trees.items()}
    reached = {name: _reached_from(name, graph) for name in graph}
    found = []
    seen: set[str] = set()
    for name in graph:
        if name in seen:
            continue
        circle = sorted(other for other in reached[name] if name in reached[other])
        seen.update(circle)
        if len(circle) > 1:
            found.append(circle)
    return sorted(found, key=len, reverse=True)


def module_name(path: Path, package: str) -> str:
    """The dotted name of the module in a file, whose path begins below the package's folder."""
    return ".".join((package, *path.with_suffix("").parts)).removesuffix(".__init__")


def _imported(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """Those of the modules that a file imports; of `from package import module` only the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            full_names = (f"{node.module}.{alias.name}" for alias in node.names)
            names = [name if name in modules else node.module for name in full_names]
        else:
            continue
        yield from (name for name in names if name in modules)


def _reached_from(start: str, graph: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting.extend(graph[name])
    return reached


def print_table(counted: Counted) -> None:
    """A row for each package, then the counts of the whole folder."""
    columns = ("files", "lines", "code", "tokens", "functions", "complex", "ternaries", "comments")
    print(f"{'package':14}" + "".join(f"{column:>11}" for column in columns) + f"{'tokens/line':>13}")
    for name, row in sorted(counted.packages.items(), key=lambda item: -item[1]["tokens"]):
        ratio = row["tokens"] / max(row["code"], 1)
        print(f"{name:14}" + "".join(f"{row[column]:>11}" for column in columns) + f"{ratio:>13.1f}")
    for name, value in counted.limits().items():
        print(f"{name:20} {value}")


def print_worst(counted: Counted, number: int) -> None:
    """The places with the highest counts."""
    complexities = sorted(counted.complexities, reverse=True)[:number]
    print("\nmost complex:", *(f"{worth} {place}" for worth, place in complexities), sep="\n  ")
    classes = sorted(counted.classes, key=lambda cls: -len(cls.fields))[:number]
    print("\nmost fields:", *(f"{len(cls.fields)} {cls.path}:{cls.line} {cls.name}" for cls in classes), sep="\n  ")
    writers: Counter[Path] = Counter()
    for (_, path), stores in counted.foreign.items():
        writers[path] += stores
    tables = {
        "foreign stores": writers,
        "kinds of failures": counted.failure_kinds,
        "kinds of calls": counted.call_kinds,
    }
    for title, table in tables.items():
        print(f"\n{title}:", *(f"{value} {path}" for path, value in table.most_common(number)), sep="\n  ")
    print("\nimport circles:", *(f"{len(circle)}: {' '.join(circle)}" for circle in counted.circles), sep="\n  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "reprokit")
    parser.add_argument("--worst", type=int, metavar="N", default=0)
    parser.add_argument("--lower", action="store_true", help="write counts that have fallen into test_house.json")
    given = parser.parse_args()
    counted = count(given.folder.resolve())
    print_table(counted)
    if given.worst:
        print_worst(counted, given.worst)
    if given.lower:
        limits = json.loads(LIMITS.read_text(encoding="utf-8"))
        lower = {name: min(limits.get(name, value), value) for name, value in counted.limits().items()}
        LIMITS.write_text(json.dumps({**limits, **lower}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
