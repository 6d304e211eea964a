"""The functions that reprokit calls for its own work, as they were when it was imported.

A script may replace any attribute of torch, `random` or `time`, for one that draws random numbers or stops the clock.
Work of our own calls ``native.detach(tensor)``, never ``tensor.detach()``: what the script has put in its place neither
runs more often than without us, nor changes what we compute. A replay of the user's modules calls what training called.
"""

from __future__ import annotations

import contextlib
import pkgutil
import random
import time
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from reprokit import torch_private


class _Missing:
    """In the place of a function that this torch lacks: looked up again when it is called."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> _Missing:
        return _Missing(f"{self._path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            function = pkgutil.resolve_name(self._path)
        except (AttributeError, ImportError):
            raise RuntimeError(f"torch {torch.__version__} lacks `{self._path}`") from None
        return function(*args, **kwargs)


class _Names:
    """The functions of a module or class. A torch that lacks one can be imported all the same."""

    def __init__(self, owner: Any, path: str) -> None:
        self._owner = owner
        self._path = path

    def __getattr__(self, name: str) -> Any:
        path = f"{self._path}.{name}"
        try:
            found = getattr(self._owner, name)
        except AttributeError:
            return _Missing(path)
        has_functions = isinstance(found, ModuleType) or found is torch.Tensor or found is torch.default_generator
        return _Names(found, path) if has_functions else found


if TYPE_CHECKING:
    import torch as names
else:
    names = _Names(torch, "torch")

numpy_random: Any
try:
    from numpy import random as numpy_random
except ImportError:  # torch runs without it
    numpy_random = None

# Methods of tensors.
abs = names.Tensor.abs
all = names.Tensor.all
amax = names.Tensor.amax
amin = names.Tensor.amin
aminmax = names.Tensor.aminmax
any = names.Tensor.any
argmax = names.Tensor.argmax
as_strided = names.Tensor.as_strided
as_subclass = names.Tensor.as_subclass
bfloat16 = names.Tensor.bfloat16
bool = names.Tensor.bool
ccol_indices = names.Tensor.ccol_indices
clamp = names.Tensor.clamp
clone = names.Tensor.clone
coalesce = names.Tensor.coalesce
col_indices = names.Tensor.col_indices
contiguous = names.Tensor.contiguous
copy_ = names.Tensor.copy_
count_nonzero = names.Tensor.count_nonzero
cpu = names.Tensor.cpu
crow_indices = names.Tensor.crow_indices
data_ptr = names.Tensor.data_ptr
dequantize = names.Tensor.dequantize
detach = names.Tensor.detach
diagonal = names.Tensor.diagonal
dim = names.Tensor.dim
div = names.Tensor.div
double = names.Tensor.double
element_size = names.Tensor.element_size
expand = names.Tensor.expand
expand_as = names.Tensor.expand_as
fill_ = names.Tensor.fill_
flatten = names.Tensor.flatten
float = names.Tensor.float
frac = names.Tensor.frac
half = names.Tensor.half
int = names.Tensor.int
is_coalesced = names.Tensor.is_coalesced
is_complex = names.Tensor.is_complex
is_floating_point = names.Tensor.is_floating_point
is_inference = names.Tensor.is_inference
isfinite = names.Tensor.isfinite
isinf = names.Tensor.isinf
isnan = names.Tensor.isnan
item = names.Tensor.item
long = names.Tensor.long
max = names.Tensor.max
mean = names.Tensor.mean
min = names.Tensor.min
movedim = names.Tensor.movedim
mul_ = names.Tensor.mul_
nan_to_num = names.Tensor.nan_to_num
narrow = names.Tensor.narrow
new_empty = names.Tensor.new_empty
nonzero = names.Tensor.nonzero
numel = names.Tensor.numel
qscheme = names.Tensor.qscheme
register_hook = names.Tensor.register_hook
requires_grad_ = names.Tensor.requires_grad_
reshape = names.Tensor.reshape
resolve_conj = names.Tensor.resolve_conj
resolve_neg = names.Tensor.resolve_neg
round = names.Tensor.round
row_indices = names.Tensor.row_indices
select = names.Tensor.select
set_ = names.Tensor.set_
size = names.Tensor.size
square_ = names.Tensor.square_
storage_offset = names.Tensor.storage_offset
stride = names.Tensor.stride
sub = names.Tensor.sub
sum = names.Tensor.sum
sum_to_size = names.Tensor.sum_to_size
to = names.Tensor.to
to_dense = names.Tensor.to_dense
tolist = names.Tensor.tolist
topk = names.Tensor.topk
unbind = names.Tensor.unbind
unsqueeze = names.Tensor.unsqueeze
untyped_storage = names.Tensor.untyped_storage
values = names.Tensor.values
view = names.Tensor.view
view_as = names.Tensor.view_as

# Functions.
allclose = names.allclose
arange = names.arange
are_deterministic_algorithms_enabled = names.are_deterministic_algorithms_enabled
as_tensor = names.as_tensor
bincount = names.bincount
dot = names.dot
empty = names.empty
eq = names.Tensor.eq
equal = names.equal
eye = names.eye
frexp = names.frexp
full_like = names.full_like
get_autocast_dtype = names.get_autocast_dtype
get_default_dtype = names.get_default_dtype
get_float32_matmul_precision = names.get_float32_matmul_precision
get_num_threads = names.get_num_threads
is_anomaly_enabled = names.is_anomaly_enabled
is_autocast_cache_enabled = names.is_autocast_cache_enabled
is_autocast_enabled = names.is_autocast_enabled
is_deterministic_algorithms_warn_only_enabled = names.is_deterministic_algorithms_warn_only_enabled
is_grad_enabled = names.is_grad_enabled
is_inference_mode_enabled = names.is_inference_mode_enabled
isneginf = names.isneginf
load = names.load
logical_and = names.logical_and
matmul = names.matmul
ones_like = names.ones_like
save = names.save
set_default_dtype = names.set_default_dtype
set_float32_matmul_precision = names.set_float32_matmul_precision
set_num_threads = names.set_num_threads
sparse_compressed_tensor = names.sparse_compressed_tensor
sparse_coo_tensor = names.sparse_coo_tensor
split = names.split
stack = names.stack
tensor = names.tensor
use_deterministic_algorithms = names.use_deterministic_algorithms
view_as_real = names.view_as_real
where = names.where
zeros = names.zeros
zeros_like = names.zeros_like

# Functions of the other modules of torch.
backward = names.autograd.backward
clip_grad_norm_ = names.nn.utils.clip_grad_norm_
cuda_device_count = names.cuda.device_count
cuda_get_rng_state = names.cuda.get_rng_state
cuda_is_available = names.cuda.is_available
cuda_is_current_stream_capturing = names.cuda.is_current_stream_capturing
cuda_is_initialized = names.cuda.is_initialized
cuda_mem_get_info = names.cuda.mem_get_info
cuda_set_rng_state = names.cuda.set_rng_state
eigvals = names.linalg.eigvals
eigvalsh = names.linalg.eigvalsh
get_gradient_edge = names.autograd.graph.get_gradient_edge
get_rng_state = names.default_generator.get_state
grad = names.autograd.grad
is_compiling = names.compiler.is_compiling
mps_get_rng_state = names.mps.get_rng_state
mps_set_rng_state = names.mps.set_rng_state
set_rng_state = names.default_generator.set_state
set_stance = names.compiler.set_stance
svdvals = names.linalg.svdvals
vector_norm = names.linalg.vector_norm

# Contexts.
DisableTorchFunction = names.DisableTorchFunction
autocast = names.autocast
inference_mode = names.inference_mode
set_detect_anomaly = names.autograd.set_detect_anomaly
set_grad_enabled = torch_private.set_grad_enabled

# The generators of Python and NumPy.
get_python_state = random.getstate
set_python_state = random.setstate
get_numpy_state = numpy_random.get_state if numpy_random is not None else None
set_numpy_state = numpy_random.set_state if numpy_random is not None else None


class _GradMode:
    """`torch.no_grad` and `torch.enable_grad` look up other functions of torch whenever they are entered."""

    __slots__ = ("_before",)
    is_on = True

    def __enter__(self) -> None:
        self._before = is_grad_enabled()
        set_grad_enabled(self.is_on)

    def __exit__(self, *exception: object) -> None:
        set_grad_enabled(self._before)


class no_grad(_GradMode):
    """In this context no graph is made."""

    __slots__ = ()
    is_on = False


class enable_grad(_GradMode):
    """In this context a graph is made."""

    __slots__ = ()
    is_on = True


class clock:
    """Time. These are not in the module: libraries that stop the clock replace such functions in every module."""

    monotonic = staticmethod(time.monotonic)
    perf_counter = staticmethod(time.perf_counter)
    process_time = staticmethod(time.process_time)
    sleep = staticmethod(time.sleep)
    thread_time = staticmethod(time.thread_time)
    time = staticmethod(time.time)


# The operators of tensors. Code calls them by what it writes, `a == b`, and so do functions of torch, such as `save`.
_OF_CLASSES = {"__class__", "__del__", "__delattr__", "__getattribute__", "__init__", "__init_subclass__", "__new__"}
_OF_CLASSES |= {"__setattr__", "__subclasshook__", "__torch_dispatch__", "__torch_function__"}
_ABSENT = object()  # the operator is that of a base class
_OPERATORS: dict[str, Any] = {
    name: vars(torch.Tensor).get(name, _ABSENT)
    for name in dir(torch.Tensor)
    if name.startswith("__") and name not in _OF_CLASSES and callable(getattr(torch.Tensor, name))
}
_replaced: list[dict[str, Any]] = []  # by the script, in the contexts that are entered


def _put(operators: dict[str, Any]) -> dict[str, Any]:
    """Put operators in place; those that were there, where they were others."""
    space: Any = vars(torch.Tensor)
    others = {name: now for name, new in operators.items() if (now := space.get(name, _ABSENT)) is not new}
    for name in others:
        if operators[name] is _ABSENT:
            delattr(torch.Tensor, name)
        else:
            setattr(torch.Tensor, name, operators[name])
    return others


class own_operators(contextlib.ContextDecorator):
    """In this context tensors have the operators of before, for a replay, a look or a save: not for each step, since
    to find replaced ones takes some microseconds. They are those of every thread."""

    __slots__ = ()

    def __enter__(self) -> None:
        is_inside = len(_replaced) > 0 and not _replaced[-1]  # of a context at whose beginning none was replaced
        _replaced.append({} if is_inside else _put(_OPERATORS))

    def __exit__(self, *exception: object) -> None:
        if theirs := _replaced.pop():
            _put(theirs)


class their_operators:
    """Inside of `own_operators`, a context for code of the user's, with the operators that the script has replaced."""

    __slots__ = ()

    def __enter__(self) -> None:
        if _replaced and _replaced[-1]:
            _put(_replaced[-1])

    def __exit__(self, *exception: object) -> None:
        if _replaced and _replaced[-1]:
            _replaced[-1].update(_put(_OPERATORS))


_next_id = -(2**62)  # of our handles; below zero, since a handle that is loaded from a file moves torch's counter up


@contextlib.contextmanager
def own_handles() -> Iterator[None]:
    """In this context the handles of hooks have numbers of our own: those of the script's go on as if there were none
    (`test_handles_have_the_numbers_of_a_bare_run`)."""
    global _next_id
    theirs = RemovableHandle.next_id
    if theirs < 0:  # inside of another such context
        yield
        return
    RemovableHandle.next_id = _next_id
    try:
        yield
    finally:
        _next_id, RemovableHandle.next_id = RemovableHandle.next_id, theirs
