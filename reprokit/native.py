"""The functions that reprokit calls for its own work, as they were when it was imported.

A script may replace any attribute of torch, `random` or `time`, for one that draws random numbers or stops the clock.
Work of our own calls ``native.detach(tensor)``, never ``tensor.detach()``: what the script has put in its place neither
runs more often than without us, nor changes what we compute. A replay of the user's modules calls what training called.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from reprokit import torch_private

numpy_random: Any
try:
    from numpy import random as numpy_random
except ImportError:  # torch runs without it
    numpy_random = None

# Methods of tensors.
_indices = torch.Tensor._indices
_values = torch.Tensor._values
abs = torch.Tensor.abs
all = torch.Tensor.all
amax = torch.Tensor.amax
amin = torch.Tensor.amin
aminmax = torch.Tensor.aminmax
any = torch.Tensor.any
argmax = torch.Tensor.argmax
as_strided = torch.Tensor.as_strided
as_subclass = torch.Tensor.as_subclass
bfloat16 = torch.Tensor.bfloat16
bool = torch.Tensor.bool
ccol_indices = torch.Tensor.ccol_indices
clamp = torch.Tensor.clamp
clone = torch.Tensor.clone
coalesce = torch.Tensor.coalesce
col_indices = torch.Tensor.col_indices
contiguous = torch.Tensor.contiguous
copy_ = torch.Tensor.copy_
count_nonzero = torch.Tensor.count_nonzero
cpu = torch.Tensor.cpu
crow_indices = torch.Tensor.crow_indices
data_ptr = torch.Tensor.data_ptr
dequantize = torch.Tensor.dequantize
detach = torch.Tensor.detach
diagonal = torch.Tensor.diagonal
dim = torch.Tensor.dim
div = torch.Tensor.div
double = torch.Tensor.double
element_size = torch.Tensor.element_size
expand = torch.Tensor.expand
expand_as = torch.Tensor.expand_as
fill_ = torch.Tensor.fill_
flatten = torch.Tensor.flatten
float = torch.Tensor.float
frac = torch.Tensor.frac
half = torch.Tensor.half
int = torch.Tensor.int
is_coalesced = torch.Tensor.is_coalesced
is_complex = torch.Tensor.is_complex
is_floating_point = torch.Tensor.is_floating_point
is_inference = torch.Tensor.is_inference
isfinite = torch.Tensor.isfinite
isinf = torch.Tensor.isinf
isnan = torch.Tensor.isnan
item = torch.Tensor.item
long = torch.Tensor.long
max = torch.Tensor.max
mean = torch.Tensor.mean
min = torch.Tensor.min
movedim = torch.Tensor.movedim
mul_ = torch.Tensor.mul_
nan_to_num = torch.Tensor.nan_to_num
narrow = torch.Tensor.narrow
new_empty = torch.Tensor.new_empty
nonzero = torch.Tensor.nonzero
numel = torch.Tensor.numel
qscheme = torch.Tensor.qscheme
register_hook = torch.Tensor.register_hook
requires_grad_ = torch.Tensor.requires_grad_
reshape = torch.Tensor.reshape
resolve_conj = torch.Tensor.resolve_conj
resolve_neg = torch.Tensor.resolve_neg
round = torch.Tensor.round
row_indices = torch.Tensor.row_indices
select = torch.Tensor.select
set_ = torch.Tensor.set_
size = torch.Tensor.size
square_ = torch.Tensor.square_
storage_offset = torch.Tensor.storage_offset
stride = torch.Tensor.stride
sub = torch.Tensor.sub
sum = torch.Tensor.sum
sum_to_size = torch.Tensor.sum_to_size
to = torch.Tensor.to
to_dense = torch.Tensor.to_dense
tolist = torch.Tensor.tolist
topk = torch.Tensor.topk
unbind = torch.Tensor.unbind
unsqueeze = torch.Tensor.unsqueeze
untyped_storage = torch.Tensor.untyped_storage
values = torch.Tensor.values
view = torch.Tensor.view
view_as = torch.Tensor.view_as

# Functions.
allclose = torch.allclose
arange = torch.arange
are_deterministic_algorithms_enabled = torch.are_deterministic_algorithms_enabled
as_tensor = torch.as_tensor
bincount = torch.bincount
dot = torch.dot
empty = torch.empty
eq = torch.Tensor.eq
equal = torch.equal
eye = torch.eye
frexp = torch.frexp
full_like = torch.full_like
get_autocast_dtype = torch.get_autocast_dtype
get_default_dtype = torch.get_default_dtype
get_float32_matmul_precision = torch.get_float32_matmul_precision
get_num_threads = torch.get_num_threads
is_anomaly_enabled = torch.is_anomaly_enabled
is_autocast_cache_enabled = torch.is_autocast_cache_enabled
is_autocast_enabled = torch.is_autocast_enabled
is_deterministic_algorithms_warn_only_enabled = torch.is_deterministic_algorithms_warn_only_enabled
is_grad_enabled = torch.is_grad_enabled
is_inference_mode_enabled = torch.is_inference_mode_enabled
isneginf = torch.isneginf
load = torch.load
logical_and = torch.logical_and
matmul = torch.matmul
ones_like = torch.ones_like
save = torch.save
set_default_dtype = torch.set_default_dtype
set_float32_matmul_precision = torch.set_float32_matmul_precision
set_num_threads = torch.set_num_threads
sparse_compressed_tensor = torch.sparse_compressed_tensor
sparse_coo_tensor = torch.sparse_coo_tensor
split = torch.split
stack = torch.stack
tensor = torch.tensor
use_deterministic_algorithms = torch.use_deterministic_algorithms
view_as_real = torch.view_as_real
where = torch.where
zeros = torch.zeros
zeros_like = torch.zeros_like

# Functions of the other modules of torch.
backward = torch.autograd.backward
clip_grad_norm_ = torch.nn.utils.clip_grad_norm_
cuda_device_count = torch.cuda.device_count
cuda_get_rng_state = torch.cuda.get_rng_state
cuda_is_available = torch.cuda.is_available
cuda_is_current_stream_capturing = torch.cuda.is_current_stream_capturing
cuda_is_initialized = torch.cuda.is_initialized
cuda_mem_get_info = torch.cuda.mem_get_info
cuda_set_rng_state = torch.cuda.set_rng_state
eigvals = torch.linalg.eigvals
eigvalsh = torch.linalg.eigvalsh
get_gradient_edge = torch.autograd.graph.get_gradient_edge
get_rng_state = torch.default_generator.get_state
grad = torch.autograd.grad
is_compiling = torch.compiler.is_compiling
mps_get_rng_state = torch.mps.get_rng_state
mps_set_rng_state = torch.mps.set_rng_state
set_rng_state = torch.default_generator.set_state
set_stance = torch.compiler.set_stance
svdvals = torch.linalg.svdvals
vector_norm = torch.linalg.vector_norm

# Contexts.
DisableTorchFunction = torch.DisableTorchFunction
autocast = torch.autocast
inference_mode = torch.inference_mode
set_detect_anomaly = torch.autograd.set_detect_anomaly
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
