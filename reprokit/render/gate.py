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
_PREFIXES = {"F": "torch.nn.functional", "nn": "torch.nn", "torch": "torch"}
_NODES: tuple[type[ast.AST], ...] = (
    ast.Module, ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.arguments, ast.arg, ast.Assign,
    ast.AugAssign, ast.Expr, ast.Assert, ast.Return, ast.Pass, ast.With, ast.withitem, ast.For, ast.Name, ast.Attribute,
    ast.Call, ast.keyword, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Subscript, ast.Slice, ast.BinOp,
    ast.UnaryOp, ast.Compare, ast.BoolOp, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context,
)  # fmt: skip
_BUILTINS = frozenset({"print", "float", "complex", "slice", "super", "list", "dict", "tuple", "repr", "range"})
# What a script uses besides functions of the list: constructors, constants, settings and assertions of torch.
_TORCH = frozenset(
    f"torch.{name}"
    for name in (
        "Size", "Tensor", "autocast", "autograd.backward", "compile", "cuda.set_rng_state", "device", "e",
        "enable_grad", "finfo", "inf", "inference_mode", "manual_seed", "nan", "nn.Parameter", "nn.init.constant_",
        "nn.init.ones_", "nn.init.zeros_", "no_grad", "pi", "set_float32_matmul_precision", "set_num_threads",
        "nn.utils.rnn.PackedSequence", "nn.utils.rnn.pack_padded_sequence", "nn.utils.rnn.pad_packed_sequence",
        "set_rng_state", "sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_coo_tensor", "sparse_csc_tensor",
        "sparse_csr_tensor", "tensor", "testing.assert_close", "use_deterministic_algorithms",
    )
)  # fmt: skip
_ATTRIBUTES = frozenset(
    (
        "backward", "batch_sizes", "data", "device", "dtype", "eps", "eval", "grad", "is_leaf", "param_groups",
        "register_buffer",
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
        tree = ast.parse(text)
        _Reader(tree, check).read(tree)
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
        self.tree = tree
        nodes = list(ast.walk(tree))
        self.members = set(_members(nodes))
        self.imports, self.names, self.nodes = _IMPORTS, _BUILTINS - {"super"}, _NODES
        self.attributes = _ATTRIBUTES | self.members
        self.whole = {ast.unparse(ast.parse(_SIDE_LOAD)), "super().__init__()"}  # what belongs only as it stands
        taken = {*_PREFIXES, *_BUILTINS, "Path"}
        if check is not None:
            self.imports |= {"import runpy", "from types import SimpleNamespace"}
            self.names |= {"exception", "Exception", "SimpleNamespace"}
            self.nodes = (*_NODES, ast.Try, ast.ExceptHandler)
            self.attributes |= {"outputs", "loss", "gradients", "exception"}
            self.whole.add(f"runpy.run_path(str(Path(__file__).with_name({check[0]!r})))[{check[1]!r}]")
            taken |= {"runpy", "SimpleNamespace"}
        methods = {id(part) for node in nodes if isinstance(node, ast.ClassDef) for part in node.body}
        defined = (node for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
        made = {node.name for node in defined if id(node) not in methods}
        made |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        made |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
        for name in sorted(made | self.members):
            if name.startswith("__") or name in taken:
                raise _refused(f"it defines `{name}`")
        self.names |= made

    def read(self, node: ast.AST) -> None:
        """Raise `RefusedScript` at the first thing that does not belong."""
        if isinstance(node, ast.expr) and ast.unparse(node) in self.whole:
            return
        if not isinstance(node, self.nodes) or not self._belongs(node):
            shown = ast.unparse(node) if isinstance(node, (ast.expr, ast.stmt)) else type(node).__name__
            raise _refused(f"it holds `{shown:.80}`")
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (isinstance(node, ast.Attribute) and _dotted(node)):
            return
        for child in ast.iter_child_nodes(node):
            self.read(child)

    def _belongs(self, node: ast.AST) -> bool:
        match node:
            case ast.Import() | ast.ImportFrom():
                return node in self.tree.body and ast.unparse(node) in self.imports
            case ast.ClassDef():
                is_plain = not node.keywords and not node.decorator_list and node in self.tree.body
                methods = [part.name if isinstance(part, ast.FunctionDef) else "" for part in node.body]
                return (
                    is_plain
                    and [ast.unparse(base) for base in node.bases] == ["nn.Module"]
                    and {*methods} <= {"__init__", "forward"}
                )
            case ast.FunctionDef(args=given):
                more = (node.decorator_list, given.defaults, given.kw_defaults, given.vararg, given.kwarg, node.returns)
                return not any(more) and not any(item.annotation for item in given.args)
            case ast.Try():
                return not node.orelse and not node.finalbody
            case ast.ExceptHandler():
                return node.type is not None and ast.unparse(node.type) == "Exception"
            case ast.Name():
                return node.id in self.names
            case ast.Attribute():
                name = _dotted(node)
                if name is not None:
                    return _is_of_torch(name)
                known = node.attr in self.attributes or bool(_STATE.fullmatch(node.attr))
                return known or any(f"torch.Tensor.{node.attr}{end}" in allowed_names() for end in ("", ".__get__"))
        return True


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
