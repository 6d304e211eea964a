"""Valid arguments for torch functions, found by trying: values by the types and names of a function's parameters.

What works is decided by calling the function. The tries are the same in every run.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from reprokit.program.functions import is_in_place, is_random
from reprokit.program.interpreter import bind_arguments, execute
from reprokit.program.ir import Call, Device, Input, Mode, Program, Ref, Symbol, map_leaves
from reprokit.render.names import signature_of
from reprokit.shrink.plainness import state_of_seed
from tests.render.programs import Case

TRIES = 120
_PREFIXES = {"torch.linalg": "linalg_", "torch.fft": "fft_", "torch.special": "special_"}


def make_float(*sizes: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.arange(1.0, 1.0 + torch.Size(sizes).numel()).reshape(sizes) / 8


def make_index(*sizes: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.arange(torch.Size(sizes).numel()).reshape(sizes) % 2


def make_positive_definite() -> torch.Tensor:
    return torch.eye(3) * 2 + 0.25


def make_mask() -> torch.Tensor:
    return torch.tensor([[True, False, True], [False, True, True], [True, True, False]])


MATRICES: list[Callable[[], torch.Tensor]] = [make_float(3, 3), make_positive_definite]
TENSORS: list[Callable[[], torch.Tensor]] = [
    make_float(3, 3), make_float(3, 3), make_float(3, 3), make_positive_definite, make_float(3), make_float(),
    make_float(2, 3, 3), make_float(1, 2, 4, 4), make_float(1, 2, 4, 4, 4), make_float(1, 4), make_mask,
    make_index(3, 3), make_index(3), lambda: make_float(3, 3)().double(), lambda: make_float(2, 3)().bfloat16(),
    lambda: make_float(3, 3)().to(torch.complex64), lambda: make_index(3, 3)().int(), make_float(2, 2, 4),
]  # fmt: skip
SPARSE: list[Callable[[], torch.Tensor]] = [
    lambda: make_positive_definite().to_sparse(),
    lambda: make_positive_definite().to_sparse_csr(),
    lambda: torch.quantize_per_tensor(make_float(3, 3)(), 0.1, 2, torch.quint8),
    lambda: torch.quantize_per_channel(make_float(3, 3)(), torch.full((3,), 0.1), torch.zeros(3), 0, torch.qint8),
]
_BY_NAME: dict[str, list[Any]] = {
    "dim": [0, 1, -1, (0, 1)], "axis": [0, -1], "dims": [(0, 1), (1, 0), [0], [[0], [1]]], "keepdim": [True, False],
    "dtype": [None, Symbol("torch.float64"), Symbol("torch.float32"), Symbol("torch.complex64")], "p": [2.0, 0.5, 1],
    "reduction": ["mean", "sum", "none"], "size": [(3, 3), (1, 3, 3), (9,)], "shape": [(3, 3), (9,)],
    "index": [make_index(3, 3), make_index(3), 0], "mask": [make_mask], "condition": [make_mask],
    "target": [make_float(3, 3), make_index(3), make_float(3)], "kernel_size": [2, 1], "output_size": [2, (2, 2), 1],
    "equation": ["ij,jk->ik", "ij->ji"], "indexing": ["ij", "xy"], "mode": ["nearest", "constant", "linear", "mean"],
    "pad": [(1, 1)], "padding": [0, 1, [0]], "stride": [1, 2, [1]], "groups": [1], "split_size": [1, 2],
    "split_size_or_sections": [1, [1, 2]], "indices_or_sections": [3, [1]], "sections": [3], "chunks": [3],
    "reduce": ["sum", "mean", "amax"], "rounding_mode": ["floor", "trunc"], "n": [3, 4], "k": [1, 2], "steps": [4],
    "normalized_shape": [(3,)], "num_groups": [1], "num_classes": [4], "upscale_factor": [2], "downscale_factor": [2],
    "repeats": [2, (2, 1)], "shifts": [1], "ord": [2, "fro", None], "unbiased": [True], "diagonal": [0, 1],
    "memory_format": [Symbol("torch.contiguous_format")], "device": [None, Device("cpu")],
    "layout": [None, Symbol("torch.strided")], "generator": [None], "out": [None],
    "weight": [make_float(3, 3), None, make_float(2, 2, 1, 1), make_float(3)],
    "batch1": [make_float(2, 3, 3)], "batch2": [make_float(2, 3, 3)], "vec": [make_float(3)], "vec1": [make_float(3)],
    "vec2": [make_float(3)], "mat": [make_float(3, 3)], "mat1": [make_float(3, 3)], "mat2": [make_float(3, 3)],
    "src": [make_float(3, 3)], "source": [make_float(3, 3)], "values": [make_float()], "scalars": [[0.5, 2.0]],
    "indices": [[make_index(3)], [make_index(2), make_index(2)]], "tensors": [[make_float(3), make_float(3)]],
    "side": ["left", "right"], "driver": [None], "norm": [None, "ortho"], "hermitian": [False], "UPLO": ["L"],
}  # fmt: skip
_BY_TYPE: dict[str, list[Any]] = {
    "int": [0, 1, 2, 3], "bool": [True, False], "float": [0.5, 2.0, 1e-5], "number": [0.5, 2, 1], "str": ["sum"],
    "Optional[int]": [None, 1], "Optional[float]": [None, 0.5], "Optional[bool]": [None, True],
    "List[int]": [[3, 3], [1], [0, 1], [2, 2], [1, 1], []], "List[Tensor]": [[make_float(3, 3), make_float(3, 3)]],
    "List[Optional[Tensor]]": [[make_index(3)]], "List[number]": [[0.5, 2.0]],
    "Optional[List[int]]": [None, [0]], "Optional[Tensor]": [None, make_float(3), make_float(3, 3)],
    "Tensor": list(TENSORS), "Device": [Device("cpu")], "List[float]": [[0.5, 2.0]], "Optional[str]": [None],
}  # fmt: skip
_TENSOR_NAMES = frozenset(["self", "input", "tensor", "other"])
_ANY: list[Any] = [*TENSORS, 0, 1, 0.5, None, True, (3, 3)]


@dataclass(frozen=True, slots=True)
class Parameter:
    """What is known of a parameter."""

    name: str
    type: str
    is_optional: bool
    is_keyword: bool


@functools.cache
def case_for(name: str) -> Case | None:
    """The program of one call of a function, if the tries find one."""
    chooser = random.Random(name)
    for signature, pools in _tries(name, chooser):
        arguments = [_draw(parameter, pools, chooser) for parameter in signature]
        case = program_of(name, *_split(signature, arguments, name, chooser))
        if case is not None:
            return case
    return None


def _tries(name: str, chooser: random.Random) -> Iterator[tuple[list[Parameter], list[Any]]]:
    signatures = list(_signatures(name)) or [
        [Parameter(f"a{n}", "", False, False) for n in range(k)] for k in (1, 2, 3)
    ]
    for number in range(TRIES):
        signature = signatures[number % len(signatures)]
        required = [parameter for parameter in signature if not parameter.is_optional]
        extra = [p for p in signature if p.is_optional and chooser.random() < 0.3] if number % 2 else []
        yield [p for p in signature if p in required or p in extra], SPARSE if number > TRIES * 0.8 else TENSORS


def _signatures(name: str) -> Iterator[list[Parameter]]:
    namespace, _, last = name.rpartition(".")
    if last == "__get__":
        yield [Parameter("self", "Tensor", False, False)]
        return
    packet = getattr(torch.ops.aten, _PREFIXES.get(namespace, "") + last, None)
    for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
        arguments = getattr(packet, overload)._schema.arguments
        if not any(argument.name == "out" for argument in arguments):
            yield [Parameter(a.name, str(a.type), a.has_default_value(), a.kwarg_only) for a in arguments]
    described = [
        Parameter(p.name, "", p.default is not p.empty, p.kind is p.KEYWORD_ONLY)
        for p in signature_of(name).values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if described:
        yield described


def _draw(parameter: Parameter, tensors: list[Any], chooser: random.Random) -> Any:
    named = _BY_NAME.get(parameter.name)
    if named is not None and chooser.random() < 0.8:
        return chooser.choice(named)
    is_tensor = parameter.type == "Tensor" or (not parameter.type and parameter.name in _TENSOR_NAMES)
    if is_tensor:
        return chooser.choice(tensors if chooser.random() < 0.8 else MATRICES)
    return chooser.choice(_BY_TYPE.get(parameter.type, _ANY))


def _split(
    signature: list[Parameter], arguments: list[Any], name: str, chooser: random.Random
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments; what follows something left out is given by keyword."""
    everything = list(zip(signature, arguments, strict=True))
    first = next((n for n, (p, _) in enumerate(everything) if p.is_keyword or p.is_optional), len(everything))
    if name.startswith("torch.Tensor.") and everything:
        first = max(first, 1)
    return tuple(value for _, value in everything[:first]), {p.name: value for p, value in everything[first:]}


def program_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Case | None:
    """The program of one call whose arguments hold makers of tensors, ``None`` if torch refuses the call."""
    tensors: dict[int, torch.Tensor] = {}

    def numbered(leaf: Any) -> Any:
        if not callable(leaf):
            return leaf
        tensors[len(tensors)] = leaf()
        return Ref(len(tensors) - 1)

    args, kwargs = map_leaves((args, kwargs), numbered)
    inputs = [Input(value, "batch") for value in tensors]
    mode = Mode()
    if is_random(name):
        tensors[50], mode = state_of_seed(3, 5056), Mode(rng=Ref(50))
        inputs.append(Input(50, "rng", "rng"))
    call = Call(name, args, kwargs, mode=mode)
    try:
        outputs = _outputs(call, tensors)
    except Exception:  # torch's own refusals are of many types
        return None
    program = Program((Call(name, args, kwargs, outputs, mode=mode),), tuple(inputs), tuple(map(Ref, _values(outputs))))
    return program, tensors


def _outputs(call: Call, tensors: dict[int, torch.Tensor]) -> Any:
    """The structure of what a call returns."""
    values = {value: tensor.clone() for value, tensor in tensors.items()}
    torch.default_generator.manual_seed(3)  # `torch.manual_seed` keeps a traceback for every device, which is slow
    result = execute(call, *bind_arguments(call, values))
    if result is NotImplemented:
        raise TypeError("this operator takes no such operand")
    known = {id(tensor): value for value, tensor in values.items()}
    number = iter(range(100, 10_000))

    def named(part: Any) -> Any:
        if isinstance(part, (tuple, list)):
            return tuple(named(item) for item in part)
        return Ref(known.get(id(part), next(number))) if isinstance(part, torch.Tensor) else None

    outputs = named(result)
    is_telling = bool(list(_values(outputs))) or is_in_place(call.target)
    return outputs if is_telling else None


def _values(outputs: Any) -> list[int]:
    if isinstance(outputs, Ref):
        return [outputs.value]
    return [value for part in outputs for value in _values(part)] if isinstance(outputs, tuple) else []
