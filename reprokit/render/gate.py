"""The gate: a rendered script is parsed before it is run or written, and refused if it holds anything unusual.

What a script says comes from a file that anybody may have sent. The grammar of that file is closed (`program.plain`),
and this is the second lock: a script may hold imports of torch, literals, calls of functions on the allow-list, of
modules of torch and of what the script itself defines, ``print`` and ``assert``. No way leads from there to a file, a
process or the interpreter: there is no attribute with two underscores, no attribute of a tensor that is not on the
list, no name that is neither torch's nor made in the script.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from reprokit.errors import SnapshotError
from reprokit.program.functions import UnknownFunction, allowed_names, layer_class, symbol_named

_IMPORTS = frozenset(
    {"import torch", "import torch.nn.functional as F", "from torch import nn", "from pathlib import Path"}
)
_OF_A_CHECK = frozenset({"import runpy", "from types import SimpleNamespace"})
_PREFIXES = {"F": "torch.nn.functional", "nn": "torch.nn", "torch": "torch"}
_STATEMENTS = (ast.Assign, ast.AugAssign, ast.Expr, ast.Assert, ast.Return, ast.Pass)
_EXPRESSIONS = (
    ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Subscript, ast.Slice, ast.BinOp,
    ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Starred, ast.keyword, ast.withitem, ast.arguments, ast.arg, ast.operator,
    ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context,
)  # fmt: skip
_BUILTINS = frozenset({"print", "float", "complex", "slice", "super", "list", "dict", "tuple", "repr", "range"})
# What a script uses besides functions of the list: constructors, constants, settings and assertions of torch.
_TORCH = frozenset(
    f"torch.{name}"
    for name in (
        "Size", "Tensor", "autocast", "autograd.backward", "compile", "cuda.set_rng_state", "device", "e",
        "enable_grad", "finfo", "inf", "inference_mode", "manual_seed", "nan", "nn.Parameter", "nn.init.constant_",
        "nn.init.ones_", "nn.init.zeros_", "no_grad", "pi", "set_float32_matmul_precision", "set_num_threads",
        "set_rng_state", "sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_coo_tensor", "sparse_csc_tensor",
        "sparse_csr_tensor", "tensor", "testing.assert_close", "use_deterministic_algorithms",
    )
)  # fmt: skip
_ATTRIBUTES = frozenset(
    (
        "backward", "data", "device", "dtype", "eps", "eval", "grad", "is_leaf", "param_groups", "register_buffer",
        "requires_grad", "requires_grad_", "shape", "smallest_normal", "state", "step", "tiny", "train", "update",
        "zero_grad",
    )
)  # fmt: skip
# Parameters and buffers of torch's layers.
_STATE = re.compile(
    r"weight|bias|running_mean|running_var|in_proj_(weight|bias)|out_proj|(weight|bias)_(ih|hh|hr)_l[0-9]+(_reverse)?"
)
_SIDE_LOAD = 'torch.load(Path(__file__).with_name("repro_inputs.pt"), weights_only=True)'


class RefusedScript(SnapshotError):
    """A file led to a script that holds something else than such scripts do."""


def require_closed(text: str, *, check: tuple[str, str] | None = None) -> None:
    """Raise `RefusedScript` unless a script consists of what scripts of ours consist of.

    ``check``: the file and the function of a check of the user's own, which the script may run from beside it.
    """
    try:
        _Reader(ast.parse(text), check).read()
    except (SyntaxError, ValueError, MemoryError) as error:
        raise _refused(f"it is no Python ({type(error).__name__})") from error
    except RecursionError as error:
        raise _refused("it is nested too deeply") from error


def require_test(text: str) -> None:
    """Raise `RefusedScript` unless a test consists of a docstring and a function that runs the repro beside it."""
    tree = ast.parse(text)
    head, *rest = tree.body
    name = rest[-1].name if isinstance(rest[-1], ast.FunctionDef) else ""
    if ast.get_docstring(tree) is None or not isinstance(head, ast.Expr) or not re.fullmatch("test_[a-z0-9_]+", name):
        raise _refused("its test is none")
    if "\n\n".join(map(ast.unparse, rest)) != "\n\n".join(map(ast.unparse, ast.parse(_TEST.format(name)).body)):
        raise _refused("its test does more than run the repro")


_TEST = """
import runpy
from pathlib import Path
def {}():
    runpy.run_path(str(Path(__file__).with_name("repro.py")), run_name="__main__")
"""


def _refused(why: str) -> RefusedScript:
    return RefusedScript(
        f"the script made from this file was refused: {why}",
        hint="nothing was run or written; if the file is your own, please report this",
    )


class _Reader:
    """Reads one script. ``made`` are the names that it defines, ``members`` what it puts into modules of its own."""

    def __init__(self, tree: ast.Module, check: tuple[str, str] | None) -> None:
        self._tree = tree
        self._check = check
        nodes = list(ast.walk(tree))
        self._made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        methods = {id(part) for node in nodes if isinstance(node, ast.ClassDef) for part in node.body}
        defined = (node for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
        self._made |= {node.name for node in defined if id(node) not in methods}
        self._made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        self._made |= {str(node.name) for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
        self._members = set(_members(nodes))

    def read(self) -> None:
        """Raise `RefusedScript` at the first thing that does not belong."""
        taken = {*_PREFIXES, *_BUILTINS, "Path"}
        taken |= {"runpy", "SimpleNamespace"} if self._check is not None else set()
        for name in sorted(self._made | self._members):
            if name.startswith("__") or name in taken:
                raise _refused(f"it defines `{name}`")
        for statement in self._tree.body:
            self._top(statement)

    def _top(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            known = _IMPORTS | _OF_A_CHECK if self._check is not None else _IMPORTS
            if ast.unparse(node) not in known:
                raise _refused(f"it holds `{ast.unparse(node):.80}`")
        elif isinstance(node, ast.ClassDef):
            self._class(node)
        else:
            self._statement(node)

    def _class(self, node: ast.ClassDef) -> None:
        if [ast.unparse(base) for base in node.bases] != ["nn.Module"] or node.keywords or node.decorator_list:
            raise _refused(f"it holds a class `{node.name}` that is no plain module")
        for part in node.body:
            if not isinstance(part, ast.FunctionDef):
                raise _refused(f"`{node.name}` holds more than functions")
            self._function(part, ("__init__", "forward"))

    def _function(self, node: ast.FunctionDef, names: tuple[str, ...] = ()) -> None:
        given = node.args
        if node.decorator_list or given.defaults or given.kw_defaults or given.vararg or given.kwarg or node.returns:
            raise _refused(f"the function `{node.name}` has more than arguments")
        if any(item.annotation is not None for item in given.args) or (names and node.name not in names):
            raise _refused(f"it holds the function `{node.name}`")
        for statement in node.body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef):
            self._function(node)
        elif isinstance(node, (ast.With, ast.For)):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    self._statement(child)
                else:
                    self._expression(child)
        elif self._check is not None and isinstance(node, ast.Try):
            self._caught(node)
        elif isinstance(node, _STATEMENTS):
            for child in ast.iter_child_nodes(node):
                self._expression(child)
        else:
            raise _refused(f"it holds `{ast.unparse(node):.80}`")

    def _caught(self, node: ast.Try) -> None:
        """The statements of a check of the user's that sees an exception: ``except Exception as error``."""
        if node.orelse or node.finalbody or [ast.unparse(h.type) for h in node.handlers if h.type] != ["Exception"]:
            raise _refused(f"it holds `{ast.unparse(node):.80}`")
        for statement in (*node.body, *(line for handler in node.handlers for line in handler.body)):
            self._statement(statement)

    def _expression(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr) and self._is_whole(node):
            return
        if not isinstance(node, _EXPRESSIONS):
            shown = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
            raise _refused(f"it holds `{shown:.80}`")
        if isinstance(node, ast.Attribute):
            self._attribute(node)
        elif isinstance(node, ast.Name):
            self._name(node)
        else:
            for child in ast.iter_child_nodes(node):
                self._expression(child)

    def _is_whole(self, node: ast.expr) -> bool:
        """True for what belongs only as it stands: the load of the side file, and the run of the user's check."""
        text = ast.unparse(node)
        allowed = [ast.unparse(ast.parse(_SIDE_LOAD, mode="eval")), "super().__init__()"]
        if self._check is not None:
            file, function = self._check
            allowed.append(f"runpy.run_path(str(Path(__file__).with_name({file!r})))[{function!r}]")
            allowed += ["SimpleNamespace"]
        return text in allowed

    def _name(self, node: ast.Name) -> None:
        is_known = node.id in self._made or (node.id in _BUILTINS - {"super"})
        if not is_known and not (self._check is not None and node.id == "exception"):
            raise _refused(f"it uses `{node.id:.80}`")

    def _attribute(self, node: ast.Attribute) -> None:
        name = _dotted(node)
        if name is not None:
            if not _is_of_torch(name):
                raise _refused(f"it uses `{name:.80}`")
            return
        known = node.attr in _ATTRIBUTES | self._members or bool(_STATE.fullmatch(node.attr))
        known = known or any(f"torch.Tensor.{node.attr}{end}" in allowed_names() for end in ("", ".__get__"))
        if not known and not (self._check is not None and node.attr in ("outputs", "loss", "gradients", "exception")):
            raise _refused(f"it uses the attribute `{node.attr:.80}`")
        self._expression(node.value)


def _members(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "register_buffer":
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and _is_self(node.func.value):
                yield name.value


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _dotted(node: ast.expr) -> str | None:
    """``torch.nn.functional.relu`` for ``F.relu``; ``None`` for what does not begin with a module of torch."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in _PREFIXES:
        return None
    return ".".join((_PREFIXES[node.id], *reversed(parts)))


def _is_of_torch(name: str) -> bool:
    if name in allowed_names() or name in _TORCH:
        return True
    owner, _, last = name.rpartition(".")
    if owner == "torch.optim":
        return f"{name}.step" in allowed_names()
    if owner == "torch.nn":
        return layer_class(last) is not None
    try:
        return owner == "torch" and symbol_named(name) is not None
    except UnknownFunction:
        return False
