"""Which torch functions a program may name: the security boundary of the whole tool.

A name is allowed when it stands in a list that is checked in (``allowed/torch-<version>.txt``). Nothing on a list
touches files, processes, raw memory, callbacks or Python objects; a function of a later torch is not allowed before
somebody has read what it does (``tests/program/allow_list.py``). Names are never imported or evaluated.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from importlib import resources
from types import (
    BuiltinFunctionType,
    FrameType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional
import torch.overrides

from reprokit.words import visible_name

_FACTORIES = frozenset(
    ["arange", "bartlett_window", "blackman_window", "empty", "empty_strided", "eye", "full", "hamming_window",
     "hann_window", "kaiser_window", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "range",
     "scalar_tensor", "tril_indices", "triu_indices", "vander", "zeros", "normal", "complex", "polar"],
)  # fmt: skip
GRAD_READ = "torch.Tensor.grad.__get__"
GRAD_WRITES = frozenset({"torch.Tensor.grad.__set__"})
DATA_WRITES = frozenset({"torch.Tensor.data.__set__"})

_RANDOM = frozenset(
    ["_fused_dropout", "_sample_dirichlet", "_standard_gamma", "alpha_dropout", "bernoulli", "binomial", "cauchy",
     "dropout", "dropout1d", "dropout2d", "dropout3d", "exponential", "feature_alpha_dropout", "feature_dropout",
     "fractional_max_pool2d", "fractional_max_pool2d_with_indices", "fractional_max_pool3d",
     "fractional_max_pool3d_with_indices", "geometric", "gumbel_softmax", "log_normal", "multinomial",
     "native_dropout", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
     "randperm", "random", "rrelu", "rrelu_with_noise", "uniform", "kaiming_normal", "kaiming_uniform", "trunc_normal",
     "xavier_uniform", "xavier_normal", "orthogonal", "lstm", "gru", "rnn_tanh", "rnn_relu",
     "scaled_dot_product_attention", "multi_head_attention_forward", "empty", "empty_like", "empty_permuted",
     "empty_strided", "new_empty", "new_empty_strided"],
)  # fmt: skip

_IN_PLACE_OPERATORS = frozenset(
    ["__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__", "__imod__",
     "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"],
)  # fmt: skip


_Place = tuple[Any, str, Callable[..., Any]]  # an owner, a name in it, and torch's function of that name


class UnknownFunction(ValueError):
    """A program names a function that it may not name, or that this torch does not have."""


def function_named(name: str) -> Callable[..., Any]:
    """The torch function with this public name; raises `UnknownFunction`."""
    try:
        return _by_name()[name]
    except KeyError:
        raise UnknownFunction(f"`{name}` is not a torch function that a program may call") from None


def symbol_named(name: str) -> Any:
    """The dtype, layout or memory format with this name; raises `UnknownFunction` for anything else."""
    found = vars(torch).get(name.removeprefix("torch."))  # `getattr` would import submodules by their names
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise UnknownFunction(f"`{visible_name(name):.60}` is not a torch constant")
    return found


@contextlib.contextmanager
def replacing(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """In this context attributes of torch's objects are others: owners, names, and what stands there."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in changes]
    try:
        for owner, name, ours in changes:
            setattr(owner, name, ours)
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def is_torch_function(name: str) -> bool:
    """True if a program may name this function."""
    return name in _by_name()


def name_of(function: Callable[..., Any]) -> str | None:
    """The public name of a torch function, or ``None`` when a program may not hold it.

    A capture puts wrappers around some of torch's own; those have the names of what they wrap.
    """
    try:
        name = _by_function().get(function)
        return name if name is not None else _by_function().get(getattr(function, "__wrapped__", function))
    except TypeError:  # unhashable
        return None


def called_function(func: Callable[..., Any], caller: FrameType) -> Callable[..., Any]:
    """The function that was called when torch asks a function mode for ``func``.

    Torch passes the mode what it finds at the function's own name. If a script has put a function of its own there,
    that is the one which is running already and has called torch's: it would run twice.
    """
    if isinstance(func, _BUILT_IN) or not _has_hash(func) or func in _names_of_torch():
        return func
    place: _Place | None = None
    with contextlib.suppress(TypeError):  # no weak reference can be made to it
        if func not in _PLACES:
            _PLACES[func] = next(_places_of(func), None)
        place = _PLACES[func]
    if place is None:
        return func
    owner, name, original = place
    is_there: bool = getattr(owner, name, None) is func
    if not is_there:
        return func
    if caller.f_code is _handle_torch_function.__code__ and not _is_running(original, caller):
        return func  # the script's function asks for modes itself, as torch's do
    return original


def _is_running(function: Callable[..., Any], frame: FrameType | None) -> bool:
    """True if a function of torch is running close to a frame, with at most wrappers of a script between."""
    code = getattr(function, "__code__", None)
    for _ in range(_MOST_WRAPPERS):
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is code


def _places_of(func: Callable[..., Any]) -> Iterator[_Place]:
    """Where a function stands in the place of one of torch: the owner, the name, and torch's function."""
    for original, (owner, name) in _names_of_torch().items():
        if getattr(owner, name, None) is func:
            yield owner, name, original


@functools.cache
def _names_of_torch() -> dict[Callable[..., Any], tuple[Any, str]]:
    """The functions that torch looks up by their names to pass them to a mode: the owner and the name of each."""
    # those whose functions are Python and call `handle_torch_function` with their own name
    modules = (torch.nn.init, torch.autograd, torch, torch.functional, torch.nn.functional)
    found: list[tuple[Any, tuple[Any, str]]] = []
    found += [(function, (module, name)) for module in modules for name, function in vars(module).items()]
    found += [(getattr(torch.Tensor, name), (torch.Tensor, name)) for name in dir(torch.Tensor)]
    return {function: place for function, place in found if callable(function) and _has_hash(function)}


def _has_hash(function: Any) -> bool:
    return isinstance(function, Hashable)


_BUILT_IN = (
    BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType,
    type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor),
)  # fmt: skip
_PLACES: MutableMapping[Callable[..., Any], _Place | None] = WeakKeyDictionary()
_MOST_WRAPPERS = 8
_handle_torch_function = torch.overrides.handle_torch_function

_OPERATORS = {
    "__add__": "add", "__radd__": "add", "__iadd__": "add_", "__sub__": "sub", "__rsub__": "sub", "__isub__": "sub_",
    "__mul__": "mul", "__rmul__": "mul", "__imul__": "mul_", "__div__": "div", "__truediv__": "div",
    "__rtruediv__": "div", "__rdiv__": "div", "__itruediv__": "div_", "__idiv__": "div_",
    "__floordiv__": "floor_divide", "__rfloordiv__": "floor_divide", "__ifloordiv__": "floor_divide_",
    "__mod__": "remainder", "__rmod__": "remainder", "__imod__": "remainder_", "__pow__": "pow", "__rpow__": "pow",
    "__ipow__": "pow_", "__matmul__": "matmul", "__rmatmul__": "matmul",
}  # fmt: skip


def display_name(name: str) -> str:
    """The name a person would look for: operators by their function, ``torch.Tensor.div`` for ``__rtruediv__``."""
    owner, _, last = name.rpartition(".")
    return f"{owner}.{_OPERATORS.get(last, last)}"


@functools.cache
def is_random(name: str) -> bool:
    """True if the function may draw from a random generator (or returns uninitialised memory)."""
    return name.rpartition(".")[2].removesuffix("_") in _RANDOM


@functools.cache
def is_factory(name: str) -> bool:
    """True if the function makes a tensor out of numbers only."""
    return name.startswith("torch.") and name.count(".") == 1 and name[6:] in _FACTORIES


@functools.cache
def is_in_place(name: str) -> bool:
    """True if the function by its name writes into its first argument."""
    last = name.rpartition(".")[2]
    return name in DATA_WRITES or last in _IN_PLACE_OPERATORS or (last.endswith("_") and not last.endswith("__"))


_STATISTICS = {
    "torch.nn.functional.batch_norm": (1, 2),
    "torch.batch_norm": (3, 4),
    "torch.nn.functional.instance_norm": (1, 2),
    "torch.instance_norm": (3, 4),
}


def hidden_writes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The running statistics that a normalisation updates without telling their version counters."""
    positions = _STATISTICS.get(name, ())
    by_position = [args[position] for position in positions if position < len(args)]
    return by_position + [kwargs[key] for key in ("running_mean", "running_var") if positions and key in kwargs]


def written_argument(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument that an in-place function writes into: its first one by position or name; ``None`` for others."""
    if not is_in_place(name):
        return None
    return args[0] if args else next(iter(kwargs.values()), None)


def all_written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Everything that a function writes into, `hidden_writes` aside: in place, by ``inplace`` or into ``out``."""
    if name in DATA_WRITES:
        return list(args)  # from then on both are the same memory
    position = _place_of_inplace(name)
    is_asked = bool(kwargs.get("inplace", position is not None and position < len(args) and args[position]))
    first = args[0] if args else next(iter(kwargs.values()), None)
    return [kwargs.get("out"), first if is_asked or is_in_place(name) else None]


def takes_inplace(name: str) -> bool:
    """True if a function has a parameter ``inplace``."""
    return bool(name) and _place_of_inplace(name) is not None


@functools.cache
def _place_of_inplace(name: str) -> int | None:
    """The position of a function's parameter ``inplace``."""
    try:
        return list(inspect.signature(function_named(name)).parameters).index("inplace")
    except (UnknownFunction, TypeError, ValueError):
        return None


@functools.cache
def allowed_names() -> frozenset[str]:
    """Every name that a program may hold: the union of the checked-in lists, one for each version of torch."""
    lists = resources.files(__package__).joinpath("allowed").iterdir()
    return frozenset(name for file in lists for name in file.read_text(encoding="ascii").split())


def look_up_all() -> None:
    """Look up everything that a program may name; later a script may have replaced the attributes of torch."""
    _by_function()
    _optimizers()
    _layers()
    _names_of_torch()


def optimizer_named(target: str) -> type[torch.optim.Optimizer]:
    """The class whose step this call is; raises `UnknownFunction` unless the class is on the list and in this torch."""
    try:
        return _optimizers()[target]
    except KeyError:
        raise UnknownFunction(f"`{target}` is not the step of one of torch's optimizers") from None


@functools.cache
def _optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """torch's optimizers by the names of their steps."""
    targets = (name for name in allowed_names() if name.startswith("torch.optim."))
    found = {target: getattr(torch.optim, target.split(".")[2], None) for target in targets}
    return {target: optimizer for target, optimizer in found.items() if optimizer is not None}


def layer_class(name: str) -> type[torch.nn.Module] | None:
    """One of torch's layers by its name in `torch.nn`; ``None`` for anything else there."""
    return _layers().get(name)


@functools.cache
def _layers() -> dict[str, type[torch.nn.Module]]:
    found = ((name, getattr(torch.nn, name, None)) for name in torch.nn.modules.__all__)
    return {name: layer for name, layer in found if isinstance(layer, type) and issubclass(layer, torch.nn.Module)}


@functools.cache
def _by_function() -> dict[Callable[..., Any], str]:
    """The canonical name of every function: of several names the one that torch's documentation has."""

    def rank(item: tuple[str, Callable[..., Any]]) -> tuple[bool, ...]:
        """``torch.dsmm`` is ``torch.mm`` without a docstring; what `torch.nn.functional` shares with `torch` is
        documented there alone."""
        name, function = item
        is_private = name.rpartition(".")[2].startswith("_")
        return is_private, not function.__doc__, not name.startswith("torch.nn.functional.")

    ranked = sorted(reversed(_by_name().items()), key=rank, reverse=True)  # the best name of a function is its last
    return {function: name for name, function in ranked}


@functools.cache
def _by_name() -> dict[str, Callable[..., Any]]:
    """Every listed function that this torch has, aliases included: a snapshot of another version may hold one."""
    names = sorted(name for name in allowed_names() if not name.startswith("torch.optim."))
    found = ((name, _member(name)) for name in names)
    return {name: function for name, function in found if function is not None}


def _member(name: str) -> Any:
    """The object with a name from the list, such as ``torch.linalg.norm``; ``None`` where this torch does not have it.

    An attribute's reader is ``torch.Tensor.grad.__get__``.
    """
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return found
