"""Names for the variables of a repro: what the user called a tensor, or what the function it goes into calls it.

Parameters and batch tensors keep the last part of their own name; anything else is named after the parameter of the
first function that takes it (``weight``, ``target``), and results after what was done. Names are unique.

The user's statement says how a call is spelled: names of operands and results, operator or method.

The column span of a call names the expression that made it. Where that expression is the call itself, and not something
that makes it, its parts are the call's operands.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import keyword
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from reprokit import torch_private
from reprokit.locate.spelling import signature_of
from reprokit.program.functions import is_torch_function
from reprokit.program.ir import Call, Input, Program, Ref, iter_refs
from reprokit.program.sites import called_name, parts, variables
from reprokit.snapshot.format import Snapshot
from reprokit.words import item_name

_RESERVED = (
    frozenset(keyword.kwlist)
    | frozenset(keyword.softkwlist)
    | frozenset(dir(builtins))
    | {"torch", "nn", "F", "Path", "saved", "dtype", "self"}
    | {"l", "I", "O"}  # hard to tell from digits
)
_ROLE_WORDS = frozenset(
    {"batch", "buffer", "gradient", "input", "opaque", "parameter", "random", "rng", "state", "tensor", "value"}
)
_NAMESPACES = {"torch.linalg": "linalg_", "torch.fft": "fft_", "torch.special": "special_"}
_ORDINARY = ("x", "y", "z", "w")
_GENERIC = re.compile(r"[xyzw]\d*|v\d+")
_LAYER_LIST = re.compile(r"\.(\d+)(?=\.|$)")
_PARAMETRIZED = re.compile(r"(?:^|\.)parametrizations\.(\w+)\.original(\d*)$")
# fmt: off
_PLAIN_PARAMETERS = frozenset((
    "self", "instance", "obj", "input", "inputs", "tensor", "tensors", "other", "args", "operands", "a", "b", "A", "B",
    "mat", "mat1", "mat2", "vec", "vec2", "batch1", "batch2", "x1", "x2", "exponent", "value", "values",
))
# Nouns for results of functions whose own name is that of an operator, of a builtin of Python, or none.
_VERBS = {
    "total": "add sum", "difference": "sub rsub", "product": "mul matmul baddbmm bmm mm",
    "ratio": "div truediv rtruediv", "quotient": "floordiv", "power": "pow rpow", "negative": "neg",
    "mask": "gt lt ge le eq ne", "weights": "softmax", "hidden": "linear", "part": "getitem select",
    "rows": "index_select embedding", "view": "get", "cast": "to float type_as", "largest": "max",
    "smallest": "min", "magnitude": "abs", "rounded": "round", "every": "all", "some": "any", "joined": "cat",
    "chosen": "where", "picked": "gather", "masked": "masked_fill", "index": "nonzero",
}
# fmt: on
_NOUNS = {verb: noun for noun, verbs in _VERBS.items() for verb in verbs.split()}
_LOSSES = ("cross_entropy", "binary_cross_entropy", "kl_div", "binary_cross_entropy_with_logits")
_PART_NOUNS = {"where": "index", "nonzero": "index", "chunk": "chunk", "split": "part", "unbind": "part"}


class Identifiers(dict[int, str]):
    """Hands out unique names; those of code stay away from words of Python and torch. A value keeps its name."""

    def __init__(self, reserved: frozenset[str] = frozenset(), *, is_code: bool = True) -> None:
        super().__init__()
        self._taken = set(_RESERVED | reserved) if is_code else set[str]()
        self._holders: dict[str, list[int]] = {}

    def adopt(self, value: int, name: str) -> str:
        """Let a value go by a name, or a path such as ``self.weight``, that it has already; the name."""
        self._taken.add(name)
        self[value] = name
        self._holders.setdefault(name, []).append(value)
        return name

    def give(self, value: int, base: str, is_done: Callable[[int], bool] = lambda value: False) -> str:
        """Name a value after ``base``, as no other value is named that is not done with; its name."""
        return self.adopt(value, self.unique(base, is_done))

    def unique(self, base: str, is_done: Callable[[int], bool] = lambda value: False) -> str:
        """An identifier like ``base`` that nothing has, or only values that are done with."""

        def is_free(name: str) -> bool:
            holders = self._holders.get(name, [])
            return name not in self._taken or (bool(holders) and all(map(is_done, holders)))

        ordinary = _ORDINARY if base == _ORDINARY[0] else ()
        name = next(filter(is_free, itertools.chain(ordinary, numbered(base))))
        self._taken.add(name)
        return name


def numbered(base: str) -> Iterator[str]:
    """``x``, ``x2``, ``x3`` and so on."""
    yield base
    yield from (f"{base}{number}" for number in itertools.count(2))


def names_for_inputs(program: Program, words: Mapping[int, str]) -> dict[int, str]:
    """A word for every input; ``words`` are the variables that the user's lines give some of them.

    Parameters that share the last part of their name get the part before as well: ``fc1_weight``, ``fc2_weight``.
    """
    found = {item.value: name_for_input(item, program, words.get(item.value)) for item in program.inputs}
    clashing = Counter(found.values())
    for item in program.inputs:
        if clashing[found[item.value]] > 1 and item.name.endswith(f".{found[item.value]}"):
            owner, last = _LAYER_LIST.sub(r"\1", item.name).split(".")[-2:]
            found[item.value] = identifier(f"{owner}_{last}") or found[item.value]
    return found


def name_for_input(item: Input, program: Program, word: str | None = None) -> str:
    """A word for an input: its own name unless that is generic, the user's ``word``, the parameter that takes it."""
    if item.role == "gradient":
        return "grad"
    own, users = own_name(item), identifier(word) if word is not None else None
    if own is not None and item.role in ("parameter", "buffer"):
        return own
    taking = (parameter_taking(call, item.value) for call in program.calls)
    parameter = next((name for name in taking if name is not None), "x")
    if own is not None and (own != parameter or users is None):  # names that reductions give are those of parameters
        return re.sub(r"_\d+$", "", own)
    return users or parameter


def own_name(item: Input) -> str | None:
    """The name of an input unless that is generic."""
    parametrized = _PARAMETRIZED.search(item.name)
    if parametrized is not None:
        return None if parametrized[2] else identifier(str(parametrized[1]))
    own = identifier(item.name)
    return None if own is None or own in _ROLE_WORDS or _GENERIC.fullmatch(own) else own


def identifier(text: str) -> str | None:
    """The last part of a dotted name as an identifier, or ``None`` when nothing readable is left."""
    word = re.sub(r"\W+", "_", text.rpartition(".")[2], flags=re.ASCII).strip("_").lstrip("0123456789_")
    base = re.sub(r"_\d+$", "", word)
    is_taken = bool({word, base} & _RESERVED) or base.lower() in _ROLE_WORDS or re.fullmatch(r"v\d+", word)
    return None if not word or is_taken or len(word) > 24 else word


def labels(program: Program) -> dict[int, str]:
    """A name in texts for every value: of a result the variable that the user's lines assign it to, or read it from."""
    states = {item.value for item in program.inputs if item.role in ("parameter", "buffer")}
    last_reads = {value: index for index, call in enumerate(program.calls) for value in call.input_refs()}
    known, written = Identifiers(frozenset(), is_code=False), result_words(program)
    for item in program.inputs:
        if item.value in states:
            known.adopt(item.value, item.name)
        else:
            word = re.sub(r"_\d+$", "", name_for_input(item, program))
            known.give(item.value, word, lambda other: other not in states and other not in last_reads)
    for index, call in enumerate(program.calls):
        attribute = identifier(call.target.removesuffix(".__get__")) if call.name == "__get__" else None
        done = {value for value in known if last_reads.get(value, -1) <= index} - states
        for value in call.output_refs():
            if value not in known:
                known.give(value, written.get(value) or attribute or name_for_output(call), done.__contains__)
    return known


def parameter_taking(call: Call, value: int) -> str | None:
    """The name of the parameter of ``call`` that takes a value, ``x`` for a plain operand, ``None`` if none does."""
    known = [list(signature_of(call.target)), *([name for name, _ in schema] for schema in schemas_of(call.target))]
    names = [next((given[place] for given in known if place < len(given)), "x") for place in range(len(call.args))]
    for name, argument in (*call.kwargs.items(), *zip(names, call.args, strict=True)):
        if any(ref.value == value for ref in iter_refs(argument)):
            word = identifier(name) if name in call.kwargs or isinstance(argument, Ref) else None
            return "x" if word is None or {name, word} & _PLAIN_PARAMETERS else word
    return None


def name_for_output(call: Call) -> str:
    if not is_torch_function(call.target):  # a module, or a function of the user's
        return "out"
    word = call.name.strip("_")
    if word.endswith("loss") or word in _LOSSES:
        return "loss"
    if word.startswith(("is", "logical")):
        return "mask"
    return _NOUNS.get(word) or identifier(word) or "out"


def names_for_parts(call: Call, count: int) -> list[str]:
    """Nouns for the parts of a result with several tensors."""
    if not is_torch_function(call.target):
        return ["out"] * count
    namespace, _, name = call.target.rpartition(".")
    cls = getattr(torch.return_types, _NAMESPACES.get(namespace, "") + name, None)
    fields = getattr(cls, "__match_args__", ())
    if len(fields) == count:
        return [field.lower() for field in fields]
    word = call.name.strip("_")
    return [_PART_NOUNS.get(word) or identifier(word) or "part"] * count


@functools.cache
def schemas_of(target: str) -> tuple[tuple[tuple[str, bool], ...], ...]:
    """For every overload of a builtin its positional parameters: the name, and whether it is a flag."""
    namespace, _, name = target.rpartition(".")
    packet = getattr(torch.ops.aten, f"{_NAMESPACES.get(namespace, '')}{name}", None)
    overloads: list[str] = packet.overloads() if isinstance(packet, type(torch.ops.aten.add)) else []  # type: ignore[no-untyped-call]
    return tuple(
        tuple((item.name, str(item.type) == "bool") for item in torch_private.positional_parameters(operator))
        for operator in (getattr(packet, overload) for overload in overloads)
    )


_METHOD = "torch.Tensor."
_OPERATORS: Sequence[tuple[type[ast.operator | ast.cmpop], str, str]] = (  # special method, plain method
    (ast.Add, "add", "add"), (ast.Sub, "sub", "sub"), (ast.Mult, "mul", "mul"), (ast.Div, "truediv", "div"),
    (ast.FloorDiv, "floordiv", ""), (ast.Mod, "mod", "remainder"), (ast.MatMult, "matmul", "matmul"),
    (ast.Pow, "pow", ""), (ast.LShift, "lshift", ""), (ast.RShift, "rshift", ""), (ast.BitAnd, "and", ""),
    (ast.BitXor, "xor", ""), (ast.BitOr, "or", ""), (ast.Lt, "lt", "lt"), (ast.LtE, "le", "le"),
    (ast.Gt, "gt", "gt"), (ast.GtE, "ge", "ge"), (ast.Eq, "eq", "eq"), (ast.NotEq, "ne", "ne"),
)  # fmt: skip
# Methods of a tensor that are written as operators.
UNARY = {"neg": ast.USub, "positive": ast.UAdd, "__invert__": ast.Invert}
BINARY = {name: node for node, special, plain in _OPERATORS for name in (f"__{special}__", plain) if name}
REFLECTED = {f"__r{special}__": node for node, special, _ in _OPERATORS if issubclass(node, ast.operator)}
AUGMENTED = {"floor_divide_": ast.FloorDiv} | {
    name: node
    for node, special, plain in _OPERATORS
    for name in (f"__i{special}__", f"{plain}_")
    if issubclass(node, ast.operator) and node is not ast.MatMult and name != "_"
}
_UNNAMED = re.compile(r"input(_\d+)?")
# What these return is still called what they were given.
_SAME_THING = frozenset(
    ["abs", "bool", "clamp", "clone", "contiguous", "detach", "double", "expand", "flatten", "float", "half", "long",
     "permute", "repeat", "requires_grad_", "reshape", "squeeze", "t", "to", "transpose", "type", "unsqueeze", "view"]
)  # fmt: skip
_SAME_ATTRIBUTES = frozenset(["T", "mT", "H", "mH", "data", "real"])
MODULES = frozenset(["torch", "F", "nn", "functional", "np", "linalg", "fft", "special"])

Match = tuple[ast.AST, Sequence[ast.expr]]
"""An expression that is a call, and what it operates on."""


def match_of(call: Call) -> Match | None:
    """The expression of the user's that is a call, ``None`` where something else makes it, such as a layer."""
    found = ((part, given) for part in parts(call.site) if (given := _operands(part, call)) is not None)
    return next(found, None)


def input_words(program: Program) -> dict[int, str]:
    """The names of inputs, from the first line that has one."""
    inputs = {item.value for item in program.inputs}
    return {value: word for value, word in operand_words(program.calls).items() if value in inputs}


def in_users_words(snapshot: Snapshot) -> Snapshot:
    """The snapshot with the inputs that nothing named (``input_26``) called as the user's lines call them."""
    program, failure = snapshot.program, snapshot.failure
    unnamed = {item.value for item in program.inputs if _UNNAMED.fullmatch(item.name)}
    words = {value: word for value, word in input_words(program).items() if value in unnamed}
    inputs = tuple(replace(item, name=words.get(item.value, item.name)) for item in program.inputs)
    if failure.value in words and failure.input_name is not None:
        failure = replace(failure, input_name=words[failure.value])
    return replace(snapshot, program=replace(program, inputs=inputs), failure=failure)


def operand_words(calls: Sequence[Call]) -> dict[int, str]:
    """The names that values have in the lines that read them."""
    pairs = (pair for call in calls for pair in operand_nodes(call).items())
    return {value: name for value, node in reversed(list(pairs)) if (name := _name(node)) is not None}


def result_words(program: Program) -> dict[int, str]:
    """For results the variables that the user's lines assign them to, or read them from."""
    inputs = {item.value for item in program.inputs}
    pairs = [pair for call in program.calls for pair in operand_nodes(call).items()]
    read = {value: node.id for value, node in reversed(pairs) if isinstance(node, ast.Name)}
    return {value: word for value, word in {**read, **variables(program.calls)}.items() if value not in inputs}


def operand_nodes(call: Call) -> dict[int, ast.expr]:
    """The expressions that a call reads its values from."""
    match = match_of(call)
    node, given = match if match is not None else (None, _given_to_layer(call))
    keywords = {item.arg: item.value for item in node.keywords} if isinstance(node, ast.Call) else {}
    named = [(value, keywords[name]) for name, value in call.kwargs.items() if name in keywords]
    pairs = [*named, *zip(call.args, given, strict=False)]
    return {value.value: part for value, part in reversed(pairs) if isinstance(value, Ref)}


def _operands(node: ast.AST, call: Call) -> Sequence[ast.expr] | None:
    """The operands of a part of the line in the order of the call's arguments, if it is this call."""
    name, is_method = call.name, call.target.startswith(_METHOD)
    match node:
        case ast.BinOp(left, op, right) if is_method:
            is_swapped = isinstance(left, ast.Constant) and isinstance(call.args[0], Ref)  # `2 * x` is `x.mul(2)`
            reflected = (right, left) if REFLECTED.get(name) is type(op) else None
            plain = (right, left) if is_swapped else (left, right)
            return plain if BINARY.get(name) is type(op) else reflected
        case ast.AugAssign(target, op, value) if is_method and AUGMENTED.get(name) is type(op):
            return target, value
        case ast.Compare(left, [comparison], [right]) if is_method and BINARY.get(name) is type(comparison):
            return left, right
        case ast.UnaryOp(sign, operand) if is_method and UNARY.get(name) is type(sign):
            return (operand,)
        case ast.Subscript(value, _) if call.target == f"{_METHOD}__getitem__":
            return (value,)
        case ast.Attribute(value, attribute) if call.target == f"{_METHOD}{attribute}.__get__":
            return (value,)
        case ast.Call():
            return _of_call(node, call)
    return None


def _of_call(node: ast.Call, call: Call) -> Sequence[ast.expr] | None:
    function, is_method = node.func, call.target.startswith(_METHOD)
    if called_name(node) != call.name or any(isinstance(argument, ast.Starred) for argument in node.args):
        return None
    if isinstance(function, ast.Name):
        return None if is_method else node.args
    owner = function.value if isinstance(function, ast.Attribute) else None
    name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else None
    is_of_module = name in MODULES
    if owner is None or is_method == is_of_module:
        return None
    return [owner, *node.args] if is_method else node.args


def _name(node: ast.expr) -> str | None:
    """The name of an operand: a variable, an attribute, a key; also of a view or cast of one."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return _name(node.value) if node.attr in _SAME_ATTRIBUTES else node.attr
    if isinstance(node, ast.Subscript):
        key, of = node.slice, _name(node.value)
        is_named = isinstance(key, ast.Constant) and isinstance(key.value, str)
        return item_name(of or "", str(key.value)) if isinstance(key, ast.Constant) and is_named else of
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SAME_THING:
        is_of_module = isinstance(node.func.value, ast.Name) and node.func.value.id in MODULES
        owner = next(iter(node.args), None) if is_of_module else node.func.value
        return _name(owner) if owner is not None else None
    return None


def _given_to_layer(call: Call) -> Sequence[ast.expr]:
    """The arguments of one of torch's layers, for the function that it is named after.

    A layer such as ``nn.GRUCell`` passes its own arguments first: ``torch.gru_cell(input, hx, ...)``. A layer inside of
    another one of torch's, such as ``nn.Sequential``, is not what the line calls.
    """
    node = next((part for part in parts(call.site) if isinstance(part, ast.Call)), None)
    function = re.escape(call.name.replace("_", ""))
    is_layer = call.scope and re.fullmatch(f"{function}([123]d|loss)?", call.scope[-1].cls.lower())
    is_inside = len(call.scope) > 1 and hasattr(torch.nn, call.scope[-2].cls)
    if node is None or not is_layer or is_inside or any(isinstance(argument, ast.Starred) for argument in node.args):
        return ()
    return node.args
