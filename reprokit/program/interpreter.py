"""Running a program: the interpreter, and the settings that make two runs give the same bits.

``run`` executes the calls in order under the recorded thread modes and hands every intermediate step to an
optional observer. It works on copies: the tensors given to it are never changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import torch

from reprokit import native
from reprokit.errors import pass_on
from reprokit.grammar import Later, Positive, one_of
from reprokit.program.dataflow import bases, copy_of, written_in_place
from reprokit.program.functions import UnknownFunction, function_named, optimizer_named, symbol_named
from reprokit.program.ir import (
    AUTOGRAD_BACKWARD,
    OPAQUE,
    ZERO_GRAD,
    Call,
    Device,
    Mode,
    Program,
    Ref,
    Symbol,
    map_leaves,
)

Tensors = Mapping[int, torch.Tensor]


class Observer(Protocol):
    """Receives every call while a program runs."""

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Called with all live values right before a call."""

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Called with all live values right after a call."""


@dataclass(slots=True)
class Outcome:
    """The result of a run."""

    values: dict[int, torch.Tensor] = field(default_factory=dict)  # that were asked for, by value number
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # ``.grad`` of the leaf inputs that got one
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    error: Exception | None = None  # what a call raised, and its index
    error_call: int | None = None


def run(
    program: Program,
    tensors: Tensors,
    *,
    observer: Observer | None = None,
    keep: frozenset[int] | None = None,
    only: Collection[int] | None = None,
) -> Outcome:
    """Execute ``program`` on copies of ``tensors``.

    ``keep`` lists the value numbers to return (the program's outputs when ``None``), ``only`` the indexes of the calls
    to execute (all when ``None``; `dataflow.needed_calls` gives some that can be without the others). Values are
    dropped after their last use. An exception of a call ends the run and is part of the outcome; a program that names
    a function it may not name raises `UnknownFunction`. The thread's modes and RNG are given back.
    """
    kept = keep if keep is not None else frozenset(ref.value for ref in program.outputs)
    wanted = frozenset(range(len(program.calls)) if only is None else only)
    calls = [(index, call) for index, call in enumerate(program.calls) if index in wanted]
    written = _written([call for _, call in calls])
    leaves = {}
    for item in program.inputs:
        tensor = native.detach(tensors[item.value])
        if item.role != "rng" and (item.role != "parameter" or item.value in written):
            tensor = copy_of(tensor)
        leaves[item.value] = native.requires_grad_(tensor) if item.requires_grad else tensor
    outcome = Outcome(inputs=leaves)
    values = dict(outcome.inputs)
    last_use = _last_uses(calls, kept)
    checked: Any = torch.sparse.check_sparse_tensor_invariants  # unchecked indices write anywhere in memory
    with checked(), Modes() as modes:
        for index, call in calls:
            if call.target == OPAQUE:
                continue
            modes.enter(call.mode, values[call.mode.rng.value] if call.mode.rng is not None else None)
            if observer is not None:
                observer.before(index, call, values)
            args, kwargs = bind_arguments(call, values)
            try:
                result = execute(call, args, kwargs)
                assign(call.outputs, result, values)
            except UnknownFunction:
                raise
            except Exception as error:
                pass_on(error)
                outcome.error, outcome.error_call = error, index
                break
            del args, kwargs, result
            if observer is not None:
                observer.after(index, call, values)
            for value in last_use.get(index, ()):
                values.pop(value, None)
    outcome.values = {value: values[value] for value in kept if value in values}
    outcome.gradients = {
        v: t.grad for v, t in outcome.inputs.items() if t.is_leaf and t.requires_grad and t.grad is not None
    }
    return outcome


def execute(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Perform one call on real arguments."""
    if call.is_optimizer_step:
        return _step_optimizer(call.target, kwargs)
    if call.target == ZERO_GRAD:
        for parameter in args[0]:
            parameter.grad = None
        return None
    if call.target == AUTOGRAD_BACKWARD:
        return native.backward(*args, **kwargs)
    return function_named(call.target)(*args, **kwargs)


def bind_arguments(call: Call, values: Mapping[int, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with values in place of `Ref` and torch constants in place of `Symbol`."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return values[leaf.value]
        if isinstance(leaf, Symbol):
            return symbol_named(leaf.name)
        return torch.device(leaf.name) if isinstance(leaf, Device) else leaf

    return map_leaves(call.args, real, slice), map_leaves(call.kwargs, real, slice)


def assign(outputs: Any, result: Any, values: dict[int, torch.Tensor]) -> None:
    """Store the tensors of ``result`` under the value numbers of the same structure ``outputs``; `TypeError` if it
    differs."""
    if isinstance(outputs, Ref):
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"the call returned `{type(result).__name__}` where the program expects a tensor")
        values[outputs.value] = result
    elif isinstance(outputs, (list, tuple)):
        if not isinstance(result, (list, tuple)) or len(result) != len(outputs):
            raise TypeError(f"the call returned `{type(result).__name__}`, the program expects {len(outputs)} values")
        for part, item in zip(outputs, result, strict=True):
            assign(part, item, values)
    elif isinstance(outputs, Mapping):
        if not isinstance(result, Mapping) or not outputs.keys() <= result.keys():
            raise TypeError(f"the call returned `{type(result).__name__}`, the program expects {sorted(outputs)}")
        for key, part in outputs.items():
            assign(part, result[key], values)


@dataclass(frozen=True, slots=True)
class Settings:
    """The switches of torch that a replay needs to give the same bits; ``None``: as they are."""

    num_threads: Later[Positive] = None
    deterministic_algorithms: Later[bool] = None
    deterministic_warn_only: Later[bool] = None  # else an operation without a deterministic version raises
    matmul_precision: Later[Annotated[str, one_of("highest", "high", "medium")]] = None


@contextlib.contextmanager
def determinism(settings: Settings | None = None) -> Iterator[None]:
    """Run under recorded settings, then give the settings of before back."""
    settings, threads, precision = settings or Settings(), native.get_num_threads(), matmul_precision()
    before = native.are_deterministic_algorithms_enabled(), native.is_deterministic_algorithms_warn_only_enabled()
    is_wanted, warns = settings.deterministic_algorithms, settings.deterministic_warn_only is not False
    is_wanted = before[0] if is_wanted is None else is_wanted
    is_change = is_wanted != before[0] or (is_wanted and warns != before[1])
    try:
        native.set_num_threads(settings.num_threads or threads)
        if is_change:  # the call imports torch's compiler, which takes seconds
            native.use_deterministic_algorithms(is_wanted, warn_only=warns)
        _set_matmul_precision(settings.matmul_precision)
        yield
    finally:
        native.set_num_threads(threads)
        if is_change:
            native.use_deterministic_algorithms(before[0], warn_only=before[1])
        _set_matmul_precision(precision)


def matmul_precision() -> str | None:
    """The float32 matmul precision; ``None`` when the script set the newer per-backend switches, which exclude this
    one."""
    try:
        return native.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None and precision != matmul_precision():
        native.set_float32_matmul_precision(precision)


class Modes:
    """Grad, inference and autocast modes as calls ask for them, entered only when they change.

    An autocast block stays open over neighbouring calls, because its cache of cast weights is shared between them.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._current: tuple[Any, ...] | None = None
        self._rng_before: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Modes:
        self._grad = native.is_grad_enabled()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
        native.set_grad_enabled(self._grad)
        for device, state in self._rng_before.items():
            _set_rng(device, state)

    def enter(self, mode: Mode, rng: torch.Tensor | None = None) -> None:
        """Switch to ``mode``, and put the generator into the state ``rng``."""
        wanted = (mode.autocast, mode.inference)
        if wanted != self._current:
            self._stack.close()
            self._stack = contextlib.ExitStack()
            if mode.inference:
                self._stack.enter_context(native.inference_mode())
            for device, dtype in mode.autocast:
                self._stack.enter_context(native.autocast(device, dtype=symbol_named(dtype)))
            self._current = wanted
        if native.is_grad_enabled() != mode.grad:
            native.set_grad_enabled(mode.grad)
        if rng is not None:
            device = (
                "cuda" if native.numel(rng) <= 64 else "cpu"
            )  # a CUDA generator's state is 16 bytes, the CPU's 5056
            before = native.cuda_get_rng_state() if device == "cuda" else native.get_rng_state()
            self._rng_before.setdefault(device, before)
            _set_rng(device, rng)


def _set_rng(device: str, state: torch.Tensor) -> None:
    if device == "cuda":
        native.cuda_set_rng_state(native.cpu(state))
    else:
        native.set_rng_state(native.cpu(state))


def _written(calls: Sequence[Call]) -> set[int]:
    """The inputs that calls may write into, also through a view; other parameters need no copy."""
    written: set[int] = set()
    for call in reversed(calls):
        written.update(written_in_place(call))
        if not written.isdisjoint(call.output_refs()):
            written.update(bases(call))
    return written


def _last_uses(calls: Sequence[tuple[int, Call]], kept: frozenset[int]) -> dict[int, list[int]]:
    last = {value: index for index, call in calls for value in (*call.input_refs(), *call.output_refs())}
    uses: dict[int, list[int]] = {}
    for value, index in last.items():
        if value not in kept:
            uses.setdefault(index, []).append(value)
    return uses


def _step_optimizer(target: str, kwargs: Mapping[str, Any]) -> None:
    make: Any = optimizer_named(target)
    optimizer = make([{"params": list(group)} for group in kwargs["params"]])
    for group, options, grads, states in zip(
        optimizer.param_groups, kwargs["options"], kwargs["grads"], kwargs["state"], strict=True
    ):
        group.update(options)
        for parameter, grad, state in zip(group["params"], grads, states, strict=True):
            if grad is not None:
                parameter.grad = grad
            if state:
                optimizer.state[parameter] = dict(state)
    optimizer.step()
