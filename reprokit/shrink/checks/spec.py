"""What ``--check`` may say, read without torch and without running anything, so that a wrong word costs no wait."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path

from reprokit.errors import UsageError

NONFINITE, EXCEPTION, MISMATCH = "nonfinite", "exception", "mismatch"
FP64, COMPILE, DEVICES = "fp64", "compile", "cpu-cuda"
DEFAULT_BACKEND = "inductor"
WRITTEN = frozenset({"repro.py", "repro_module.py", "test_repro.py"})
SYNTAX = (
    "nonfinite, exception, mismatch:fp64, mismatch:compile[:BACKEND | :FILE.py:FUNCTION], mismatch:cpu-cuda "
    "or FILE.py:FUNCTION"
)


@dataclass(frozen=True, slots=True)
class Spec:
    """A check as it was written, and what it means.

    ``detail`` is the reference of a mismatch or the function's name, ``option`` the backend of a compiler.
    """

    text: str
    kind: str
    detail: str = ""
    option: str = ""
    file: Path | None = None


def parse(text: str) -> Spec:
    """The check that is meant; raises `UsageError`."""
    kind, _, rest = text.partition(":")
    detail, _, option = rest.partition(":")
    if kind in (NONFINITE, EXCEPTION) and not rest:
        return Spec(text, kind)
    if kind == MISMATCH and detail in (FP64, DEVICES) and not option:
        return Spec(text, kind, detail)
    file, _, function = (option if kind == MISMATCH and detail == COMPILE else text).rpartition(":")
    if file.endswith(".py") and function:
        found = _function(text, Path(file), function)
        return replace(found, kind=kind, detail=COMPILE, option=f"{Path(file).name}:{function}") if option else found
    if kind == MISMATCH and detail == COMPILE:
        return Spec(text, kind, detail, option or DEFAULT_BACKEND)
    raise UsageError(f"`{text}` is not a check", hint=f"one of {SYNTAX}")


def _function(text: str, file: Path, function: str) -> Spec:
    """A function of a file, found by reading the file."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=file.name)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot read `{file}`: {reason}", hint="name the file that holds the check") from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"`{file}` is not valid Python: {error}", hint="try `python` on it first") from None
    if file.name in WRITTEN:
        raise UsageError(f"`{file.name}` is the name of a result", hint="rename the file that holds the check")
    found = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = [target.id for node in tree.body if isinstance(node, ast.Assign) for target in _targets(node)]
    if function not in (*found, *names):
        known = ", ".join(found) or "none"
        raise UsageError(f"`{file}` has no function `{function}`", hint=f"functions in it: {known}")
    return Spec(text, "function", function, file=file)


def _targets(node: ast.Assign) -> list[ast.Name]:
    return [target for target in node.targets if isinstance(target, ast.Name)]
