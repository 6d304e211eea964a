"""The private names of torch that reprokit needs, looked up in one place.

A torch without one of them loses what hangs on it: the name gets a stand-in, and `lacking` says in one line what is
lost. Only the names in `require` are needed for any watching.
"""

from __future__ import annotations

import contextlib
import datetime
import operator
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch

NAMES: list[str] = []
LOST: dict[str, str] = {}  # what is lost, for every name that this torch lacks


def _look_up(name: str, lost: str, stand_in: Any) -> Any:
    NAMES.append(name)
    try:
        return pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        LOST[name] = lost
        return stand_in


def _nothing(*args: Any) -> None:
    return None


def _raise_missing(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("this torch has no such function")


# The stack of torch-function modes.
_STACK = "torch._C._{}torch_function_stack"
push_mode = _look_up(_STACK.format("push_on_"), "", _nothing)
pop_mode = _look_up(_STACK.format("pop_"), "", _nothing)
num_modes = _look_up(_STACK.format("len_"), "", lambda: 0)
mode_at = _look_up("torch._C._get_function_stack_at", "", _nothing)
# Work of our own is unseen by function modes and subclasses of the user's, but for a step that is played again in it.
# Without the second name the first must not be used, or a replay would be unseen by our own modes as well.
_SEEN = "modes and tensor subclasses of the script see calls of reprokit"
enable_functions = _look_up("torch._C._EnableTorchFunction", _SEEN, None)
disable_functions = torch.DisableTorchFunction if enable_functions is not None else contextlib.nullcontext
enable_functions = enable_functions or contextlib.nullcontext
_SUBCLASSES = "tensor subclasses of the script see calls of replays"
disable_subclasses = _look_up("torch._C.DisableTorchFunctionSubclass", _SUBCLASSES, contextlib.nullcontext)
# The stack of torch-dispatch modes.
num_dispatch_modes = _look_up("torch._C._len_torch_dispatch_stack", _SEEN, lambda: 0)
pop_dispatch_mode = _look_up("torch.utils._python_dispatch._pop_mode", _SEEN, _nothing)
push_dispatch_mode = _look_up("torch.utils._python_dispatch._push_mode", _SEEN, _nothing)


REQUIRED = (_STACK.format("push_on_"), _STACK.format("pop_"), _STACK.format("len_"), "torch._C._get_function_stack_at")

# Whether torch itself is at work: transforms, a recomputation in the backward pass.
_TRANSFORMED = "calls inside of `torch.func` transforms are recorded as those of the loop"
peek_transforms = _look_up("torch._C._functorch.peek_interpreter_stack", _TRANSFORMED, _nothing)
_RECOMPUTED = "forward passes that a checkpoint repeats are recorded as those of the loop"
graph_task_id = _look_up("torch._C._current_graph_task_id", _RECOMPUTED, lambda: -1)

# Whether tensors are a tracer's: of `make_fx`, `torch.export` and fake tensors, whose values cannot be read.
_TRACED = "calls that `make_fx` traces are recorded as those of the loop"
_dispatch_mode = _look_up("torch._C._get_dispatch_mode", _TRACED, _nothing)
_dispatch_keys = _look_up("torch._C._TorchDispatchModeKey", _TRACED, None)
_TRACERS = [getattr(_dispatch_keys, name, None) for name in ("PROXY", "FUNCTIONAL", "FAKE")]


def is_tracing() -> bool:
    """True while a dispatch mode of torch's own traces what is called."""
    return any(key is not None and _dispatch_mode(key) is not None for key in _TRACERS)


# Modes. The public functions of the same meaning go through torch-function modes, or ask for each device.
is_any_autocast_enabled = _look_up(
    "torch._C._is_any_autocast_enabled", "", lambda: any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
)
set_grad_enabled = _look_up("torch._C._set_grad_enabled", "", torch.set_grad_enabled)
set_deterministic = _look_up(  # the public function imports the compiler, which takes seconds
    "torch._C._set_deterministic_algorithms", "", torch.use_deterministic_algorithms
)
# Many tensors in one call; without it a `RuntimeError` leads to one call for each.
foreach_norm = _look_up("torch._foreach_norm", "", _raise_missing)
_VERSIONS = "a replay changes the version counters of parameters"
_preserve_version = _look_up(
    "torch.autograd.grad_mode._unsafe_preserve_version_counter", _VERSIONS, lambda tensor: contextlib.nullcontext()
)


@contextlib.contextmanager
def preserve_versions(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Leave version counters as they are, whatever is written meanwhile."""
    with contextlib.ExitStack() as stack:
        for tensor in tensors:  # torch 2.6 takes one tensor only
            stack.enter_context(_preserve_version(tensor))
        yield


# Code of torch that is looked for in the stack.
_MODULES = "modules that a library calls are recorded as calls of the loop"
call_impl_code = _look_up("torch.nn.Module._call_impl.__code__", _MODULES, None)
wrapped_call_code = _look_up("torch.nn.Module._wrapped_call_impl.__code__", "", torch.nn.Module.__call__.__code__)
CALL = "self._call_impl if self._compiled_call_impl is None else self._compiled_call_impl"  # what that code calls
handle_code = _look_up("torch.overrides.handle_torch_function.__code__", "", None)  # where a mode is put back
functional_call_code = _look_up("torch.nn.utils.stateless._functional_call.__code__", _MODULES, None)
_HOOKED = "modules with full backward hooks are recorded with an identity function around them"
BackwardHookFunction = _look_up("torch.nn.modules._functions.BackwardHookFunction", _HOOKED, None)

# The parts of `torch.func`. Without one of them transforms are neither noted nor written out.
_LOST_TRANSFORMS = "calls of `torch.func` transforms are not recorded"
apis = _look_up("torch._functorch.apis", _LOST_TRANSFORMS, None)
eager_transforms = _look_up("torch._functorch.eager_transforms", _LOST_TRANSFORMS, None)
JVP, VJP = "_jvp_with_argnums", "_vjp_with_argnums"
_PARTS = ("grad_impl", "grad_and_value_impl", JVP, VJP)
for _name in ("apis.vmap_impl", *(f"eager_transforms.{part}" for part in _PARTS)):
    _look_up(f"torch._functorch.{_name}", _LOST_TRANSFORMS, None)
HAS_TRANSFORMS = _LOST_TRANSFORMS not in LOST.values()

# The iterators of loaders, which draw index batches.
_SAMPLES = "the indices of the samples in a batch are not known"
LoaderIterator = _look_up("torch.utils.data.dataloader._BaseDataLoaderIter", _SAMPLES, None)
RESET, NEXT_INDEX, COLLATE = "_reset", "_next_index", "_collate_fn"  # the last is of an instance
for _name in (RESET, NEXT_INDEX):
    _look_up(f"torch.utils.data.dataloader._BaseDataLoaderIter.{_name}", _SAMPLES, None)
HAS_INDICES = _SAMPLES not in LOST.values()

# The compiler's modules, which nothing of ours imports, and names in them.
DYNAMO, INDUCTOR = "torch._dynamo", "torch._inductor.compile_fx"
EVAL_FRAME, BACKENDS, BACKEND_TABLE = f"{DYNAMO}.eval_frame", f"{DYNAMO}.backends.registry", "_COMPILER_FNS"
BEFORE_COMPILED = "_is_skip_guard_eval_unsafe_stance"  # every compiled function calls it right before it runs
COMPILED_MODULE = "OptimizedModule"  # of the same module: the class of compiled modules
CHECKPOINT_FRAMES = "_checkpoint_without_reentrant_generator"  # of `torch.utils.checkpoint`
CHECKPOINT_HOOKS = "_checkpoint_hook", "_recomputation_hook"  # of the forward pass, and of what repeats it
UNSCALE = "_unscale_grads_"  # of a `GradScaler`


def uncompiled(function: Any) -> Any:
    """The function behind a compiled one; ``None`` behind any other."""
    return getattr(function, "_torchdynamo_orig_callable", None)


version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")  # how often a tensor was written
# The parts of a sparse tensor that may be uncoalesced, which the public methods refuse.
_SPARSE = "sparse tensors are not checked and not saved"
sparse_indices = _look_up("torch.Tensor._indices", _SPARSE, _raise_missing)
sparse_values = _look_up("torch.Tensor._values", _SPARSE, _raise_missing)


def positional_parameters(operator: Any) -> list[Any]:
    """The positional parameters of an overload of an operator, as its schema has them."""
    return [item for item in operator._schema.arguments if not item.kwarg_only]


# The tables of modules, tensors and scalers. Public functions give copies, without what is ``None``.
MODULES, PARAMETERS, BUFFERS = "_modules", "_parameters", "_buffers"
space_of_module: Callable[[torch.nn.Module], dict[str, Any]] = vars(torch.nn.Module)["__dict__"].__get__


def stored(module: torch.nn.Module, name: str) -> Any:
    """What a module stores, without its `__getattribute__`; a scripted or traced one has some of it elsewhere."""
    space = space_of_module(module)
    return space[name] if name in space else getattr(module, name)


Hooks = MutableMapping[int, Callable[..., Any]]
hooks_of_leaf = operator.attrgetter("_post_accumulate_grad_hooks")


def hook_tables(
    parts: Collection[torch.nn.Module], leaves: Iterable[torch.Tensor] = ()
) -> Iterator[tuple[Hooks, bool]]:
    """The tables of hooks that are not empty: of these modules, of all, and of leaves; true for backward passes."""
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        everywhere = getattr(torch.nn.modules.module, f"_global{name}", {})
        tables = (*(stored(part, name) for part in parts), everywhere)
        yield from ((table, name.startswith("_backward")) for table in tables if table)
    for leaf in leaves:
        yield from ((table, True) for table in (leaf._backward_hooks, hooks_of_leaf(leaf)) if table)


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """The tensor that holds a scaler's scale; ``None`` before the first loss. `get_scale` waits for the device."""
    return scaler._scale


@contextlib.contextmanager
def scaling_by(scaler: torch.amp.GradScaler, scale: torch.Tensor | None) -> Iterator[None]:
    """In this context a scaler has another scale, if one is given."""
    now, scaler._scale = scaler._scale, scale if scale is not None else scaler._scale
    try:
        yield
    finally:
        scaler._scale = now


def require() -> None:
    """Raises `RuntimeError` if this torch lacks a name without which nothing can be watched."""
    missing = [name for name in REQUIRED if name in LOST]
    if missing:
        raise RuntimeError(f"torch {torch.__version__} lacks {', '.join(missing)}")


def lacking(functions: Collection[str]) -> str | None:
    """What is lost in a capture, in one line; ``None`` if nothing is. ``functions`` are those that have no hook."""
    lost = {name: text for name, text in LOST.items() if text}
    lost |= {name: f"calls of `{name}` are not seen" for name in functions}
    if not lost:
        return None
    names = ", ".join(f"`{name}`" for name in lost)
    return f"torch {torch.__version__} lacks {names}: {'; '.join(dict.fromkeys(lost.values()))}"


# Several processes. Without one of these names they are not followed.
_DISTRIBUTED = "several processes are not followed"
_c10d = _look_up("torch.distributed.distributed_c10d", "", None)


def default_store() -> Any:
    """The store that the default process group was made with."""
    return _c10d._get_default_store()


@contextlib.contextmanager
def gloo_waits(limit: datetime.timedelta) -> Iterator[None]:
    """In this context a collective of gloo waits no longer for the other processes."""
    kind = getattr(torch.distributed, "ProcessGroupGloo", ())
    groups = list(_c10d._world.pg_map)
    found = [group._get_backend(device) for group in groups for device in group._device_types]
    before = [(backend, backend.options._timeout) for backend in found if isinstance(backend, kind)]
    for backend, _ in before:
        backend._set_default_timeout(limit)
    try:
        yield
    finally:
        for backend, timeout in before:
            backend._set_default_timeout(timeout)


def shard_of(tensor: Any) -> torch.Tensor:
    """The very tensor that holds this process's part of one that is spread, not a view of it; else ``tensor``."""
    return getattr(tensor, "_local_tensor", tensor)  # type: ignore[no-any-return]


def shards_of(tensors: Sequence[Any]) -> Sequence[torch.Tensor]:
    """`shard_of` of many tensors."""
    return tensors if _PLAIN.issuperset(map(type, tensors)) else list(map(shard_of, tensors))


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def ignored_by_ddp(module: torch.nn.Module) -> Collection[str]:
    """The parameters and buffers of a module that `DistributedDataParallel` leaves alone."""
    return getattr(module, "_ddp_params_and_buffers_to_ignore", ())


def is_sharded(kind: type) -> bool:
    """True for the class of a module that was given to `fully_shard`."""
    return hasattr(kind, "_get_fsdp_state")


def gathered(unit: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The spread parameters of a module given to `fully_shard`, each with the one that it is gathered into."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # of versions before 2.13, with one group or none
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    for group in groups:
        for part in group.fsdp_params:
            if hasattr(part, "_unsharded_param"):
                yield part.sharded_param, part._unsharded_param
