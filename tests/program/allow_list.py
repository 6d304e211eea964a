"""The functions of the installed torch that nobody has decided about, and a way to decide.

    python tests/program/allow_list.py                       # print them
    python tests/program/allow_list.py --allow NAME ...      # write the list of this torch, with these in addition
    python tests/program/allow_list.py --refuse NAME ...     # remember that these are not allowed

A list is ``reprokit/program/allowed/torch-<version>.txt``, what was refused stands in ``refused.txt`` beside this file.
Read what a function does before you allow it: nothing on a list may touch files, processes, raw memory, callbacks or
Python objects, or print.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import overrides

from reprokit.program.functions import UnknownFunction, allowed_names, is_torch_function, optimizer_named

REFUSED = Path(__file__).with_name("refused.txt")
LISTS = Path(__file__).parents[2] / "reprokit" / "program" / "allowed"
_ATTRIBUTES = ("data", "grad", "real", "imag", "T", "mT", "H", "mH")
_NAMESPACES = ((torch, "torch"), (torch.nn.functional, "torch.nn.functional"), (torch.nn.init, "torch.nn.init"))


def candidates() -> set[str]:
    """Everything that a program could name: what torch lists as overridable, its variable functions and methods, its
    optimizers."""
    found = {f"torch.Tensor.{name}.__get__" for name in _ATTRIBUTES}
    found |= {f"torch.{name}" for name in dir(torch._C._VariableFunctions) if hasattr(torch, name)}
    found |= {name for function in overrides.get_testing_overrides() if (name := _public_name(function))}
    found |= {f"torch.optim.{name}.step" for name, cls in vars(torch.optim).items() if _is_optimizer(cls)}
    return {name for name in found if not name.startswith("torch.__")}


def undecided() -> set[str]:
    """The candidates that are in no list."""
    return candidates() - allowed_names() - set(REFUSED.read_text().split())


def is_here(name: str) -> bool:
    """True if the installed torch has the function or optimizer."""
    try:
        return is_torch_function(name) or optimizer_named(name) is not None
    except UnknownFunction:
        return False


def _is_optimizer(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer


def _public_name(function: Callable[..., Any]) -> str | None:
    name = overrides.resolve_name(function) or next(_by_search(function), None)
    if name is None or name.endswith((".__get__", ".__set__", ".__delete__")):
        return None
    short = name.removeprefix("torch.functional.")
    return f"torch.{short}" if getattr(torch, short, None) is function else name


def _by_search(function: Callable[..., Any]) -> Iterator[str]:
    last = getattr(function, "__name__", "")
    return (f"{prefix}.{last}" for owner, prefix in _NAMESPACES if getattr(owner, last, None) is function)


def main() -> None:
    """Print what is undecided, or write what was decided."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allow", nargs="*", metavar="NAME")
    parser.add_argument("--refuse", nargs="*", metavar="NAME")
    given = parser.parse_args()
    if given.allow is not None:
        version = ".".join(torch.__version__.split(".")[:2])
        names = {*(name for name in allowed_names() if is_here(name)), *given.allow}
        (LISTS / f"torch-{version}.txt").write_text("".join(f"{name}\n" for name in sorted(names)))
    if given.refuse is not None:
        names = {*REFUSED.read_text().split(), *given.refuse}
        REFUSED.write_text("".join(f"{name}\n" for name in sorted(names)))
    if given.allow is None and given.refuse is None:
        print(*sorted(undecided()), sep="\n")


if __name__ == "__main__":
    main()
