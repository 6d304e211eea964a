"""Which torch functions a program may name: the security boundary of the whole tool.

A name is allowed when torch itself lists the function as overridable (`torch.overrides`) or when it creates a
tensor from numbers, less everything that touches files, processes, raw memory, callbacks or Python objects. Names map
to functions through one table built from torch's own namespaces; nothing is ever imported or evaluated by name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional
from torch import overrides

_FACTORIES = frozenset(
    [
        "arange",
        "bartlett_window",
        "blackman_window",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "hamming_window",
        "hann_window",
        "kaiser_window",
        "linspace",
        "logspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "range",
        "scalar_tensor",
        "tril_indices",
        "triu_indices",
        "vander",
        "zeros",
        "normal",
        "complex",
        "polar",
    ]
)
_TENSOR_ATTRIBUTES = ("data", "grad", "real", "imag", "T", "mT", "H", "mH")
_WRITABLE_ATTRIBUTES = ("data", "grad")
GRAD_READ = "torch.Tensor.grad.__get__"
GRAD_WRITES = frozenset({"torch.Tensor.grad.__set__"})
DATA_WRITES = frozenset({"torch.Tensor.data.__set__"})

# Overridable in fact, but missing from torch's own list.
_UNLISTED_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "unflatten")
_UNLISTED_FUNCTIONALS = ("elu_", "hardsigmoid", "hardswish", "hardtanh_", "leaky_relu_", "sigmoid", "tanh")

# Last name components that never belong into a program: files, processes, raw memory, callbacks, Python objects.
_FORBIDDEN = frozenset(
    [
        "__array__",
        "__array_wrap__",
        "__cuda_array_interface__",
        "__deepcopy__",
        "__dir__",
        "__dlpack__",
        "__dlpack_device__",
        "__hash__",
        "__iter__",
        "__reduce__",
        "__reduce_ex__",
        "__repr__",
        "__setstate__",
        "__format__",
        "__torch_dispatch__",
        "__new__",
        "__init__",
        "__init_subclass__",
        "_make_subclass",
        "_make_wrapper_subclass",
        "_reduce_ex_internal",
        "_rev_view_func_unsafe",
        "_view_func",
        "_view_func_unsafe",
        "apply_",
        "as_subclass",
        "data_ptr",
        "from_file",
        "frombuffer",
        "_from_blob",
        "from_numpy",
        "map2_",
        "map_",
        "module_load",
        "numpy",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "reinforce",
        "resize_as_sparse_",
        "set_",
        "share_memory_",
        "is_shared",
        "storage",
        "storage_type",
        "untyped_storage",
        "_typed_storage",
        "tolist",
        "save",
        "load",
        "compile",
        "vmap",
        "_sobol_engine_draw",
        "_sobol_engine_ff_",
        "_sobol_engine_initialize_state_",
        "_sobol_engine_scramble_",
        "_cufft_set_plan_cache_max_size",
        "_unpack_dual",
        "_register_hook_dict",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "_use_cudnn_rnn_flatten_weight",
    ]
)

RANDOM = frozenset(
    [
        "_fused_dropout",
        "_sample_dirichlet",
        "_standard_gamma",
        "alpha_dropout",
        "alpha_dropout_",
        "bernoulli",
        "bernoulli_",
        "binomial",
        "cauchy_",
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "exponential_",
        "feature_alpha_dropout",
        "feature_alpha_dropout_",
        "feature_dropout",
        "feature_dropout_",
        "fractional_max_pool2d",
        "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d",
        "fractional_max_pool3d_with_indices",
        "geometric_",
        "gumbel_softmax",
        "log_normal_",
        "multinomial",
        "native_dropout",
        "normal",
        "normal_",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "randperm",
        "random_",
        "rrelu",
        "rrelu_",
        "rrelu_with_noise",
        "rrelu_with_noise_",
        "uniform_",
        "kaiming_normal_",
        "kaiming_uniform_",
        "trunc_normal_",
        "xavier_uniform_",
        "xavier_normal_",
        "orthogonal_",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "scaled_dot_product_attention",
        "multi_head_attention_forward",
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    ]
)

_IN_PLACE_OPERATORS = frozenset(
    [
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__idiv__",
        "__itruediv__",
        "__ifloordiv__",
        "__imod__",
        "__ipow__",
        "__iand__",
        "__ior__",
        "__ixor__",
        "__ilshift__",
        "__irshift__",
    ]
)


class UnknownFunction(ValueError):
    """A program names a function that it may not name, or that this torch does not have."""


def function_named(name: str) -> Callable[..., Any]:
    """The torch function with this public name; raises `UnknownFunction`."""
    try:
        return _by_name()[name]
    except KeyError:
        raise UnknownFunction(f"`{name}` is not a torch function that a program may call") from None


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
    return name.rpartition(".")[2] in RANDOM


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


@functools.cache
def _place_of_inplace(name: str) -> int | None:
    """The position of a function's parameter ``inplace``."""
    try:
        return list(inspect.signature(function_named(name)).parameters).index("inplace")
    except (UnknownFunction, TypeError, ValueError):
        return None


@functools.cache
def _by_function() -> dict[Callable[..., Any], str]:
    """The canonical name of every function: of several names the one that torch's documentation has."""
    table: dict[Callable[..., Any], tuple[tuple[bool, ...], str]] = {}
    for name, function in _allowed():
        entry = (_obscurity(name, function), name)
        known = table.setdefault(function, entry)
        if entry[0] < known[0]:
            table[function] = entry
    return {function: name for function, (_, name) in table.items()}


@functools.cache
def _by_name() -> dict[str, Callable[..., Any]]:
    """Every name, aliases included: a snapshot of another version may hold one."""
    table: dict[str, Callable[..., Any]] = {}
    for name, function in _allowed():
        table.setdefault(name, function)
    return table


def _allowed() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, function in _candidates():
        last = name.rpartition(".")[2]
        attribute = name.split(".")[-2] if last in ("__get__", "__set__", "__delete__") else last
        if attribute not in _FORBIDDEN and last not in _FORBIDDEN and callable(function):
            yield name, function


def _obscurity(name: str, function: Callable[..., Any]) -> tuple[bool, ...]:
    """Sorts the names of one function: ``torch.dsmm`` is ``torch.mm`` without a docstring, and what
    `torch.nn.functional` shares with `torch` is documented there alone."""
    last = name.rpartition(".")[2]
    return last.startswith("_"), not function.__doc__, not name.startswith("torch.nn.functional.")


def _candidates() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in _TENSOR_ATTRIBUTES:
        yield f"torch.Tensor.{name}.__get__", getattr(torch.Tensor, name).__get__
    for name in _WRITABLE_ATTRIBUTES:
        yield f"torch.Tensor.{name}.__set__", getattr(torch.Tensor, name).__set__
    for name in sorted(_FACTORIES):
        yield f"torch.{name}", getattr(torch, name)
    for name in _UNLISTED_METHODS:
        yield f"torch.Tensor.{name}", getattr(torch.Tensor, name)
    for name in _UNLISTED_FUNCTIONALS:
        yield f"torch.nn.functional.{name}", getattr(torch.nn.functional, name)
    yield "torch.autograd.grad", torch.autograd.grad
    for name in dir(torch._C._VariableFunctions):
        if not name.startswith("__") and hasattr(torch, name) and name not in _FACTORIES:
            yield f"torch.{name}", getattr(torch, name)
    for function in overrides.get_testing_overrides():
        public = _public_name(function)
        if public is not None:
            yield public, function


def _public_name(function: Any) -> str | None:
    name = overrides.resolve_name(function) or _search(function)
    if name is None or name.endswith((".__get__", ".__set__", ".__delete__")):
        return None
    if name.startswith("torch.functional."):
        short = name[len("torch.functional.") :]
        return f"torch.{short}" if getattr(torch, short, None) is function else name
    return name


def _search(function: Any) -> str | None:
    last = getattr(function, "__name__", "")
    for namespace, prefix in (
        (torch, "torch"),
        (torch.nn.functional, "torch.nn.functional"),
        (torch.nn.init, "torch.nn.init"),
    ):
        if getattr(namespace, last, None) is function:
            return f"{prefix}.{last}"
    return None
