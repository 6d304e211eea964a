"""The kinds of calls that a loop makes, one class each: what a replay does for it, and what it records.

A call of a new kind is a class here and a function that notes it, in `recorder.py` or `hooks.py`. ``play`` does again
what the loop did; ``trace`` does it under a tracer, which it may tell more than `play` shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from reprokit import members, native, torch_private
from reprokit.capture.attributes import is_of_torch
from reprokit.capture.structure import is_leaf, iter_tensors
from reprokit.capture.tape import Number, Op
from reprokit.capture.traits import facts_of
from reprokit.capture.variables import Place, play_with
from reprokit.capture.world import owned_by, set_options, set_python_generators
from reprokit.locate.blame import GRAD_SCALER
from reprokit.program.dataflow import GRAD_READS
from reprokit.program.functions import DATA_WRITES, GRAD_WRITES, written_argument
from reprokit.program.ir import AUTOGRAD_BACKWARD, AUTOGRAD_GRAD, ZERO_GRAD, Call, Phase, Ref
from reprokit.program.trace import CannotRecord, InputName, Tracer
from reprokit.series.timeline import parameters_of

if TYPE_CHECKING:
    from reprokit.capture.attributes import Noted
    from reprokit.capture.replay import Player, TracedPlayer

Rng = tuple[torch.Tensor, torch.Tensor | None]  # the states of the CPU's and, where used, a CUDA generator


class Kind:
    """A kind of call. ``is_forward``: it makes tensors of tensors. ``differentiates``: it runs a backward pass."""

    is_forward = False
    differentiates = False
    makes_gradients = False  # or changes them, so that it does not matter any more when they are cleared

    @classmethod
    def is_pure(cls, op: Op) -> bool:
        """True if a call matters only by its results."""
        return False

    @classmethod
    def clears_gradients(cls, op: Op) -> bool:
        """True if a call drops gradients."""
        return False

    @classmethod
    def reads_gradients(cls, op: Op) -> bool:
        """True if a call gives the loop the gradient of a tensor."""
        return False

    @classmethod
    def writes_state(cls, op: Op) -> bool:
        """True if a call writes into parameters or buffers outside of an optimizer."""
        return False

    @classmethod
    def play(cls, player: Player, op: Op, args: Any, kwargs: Any) -> Any:
        """Do what the call did; its result."""
        return op.target(*args, **kwargs)

    @classmethod
    def trace(cls, recording: TracedPlayer, op: Op, args: Any, kwargs: Any) -> Any:
        """The same while it is recorded."""
        return cls.play(recording, op, args, kwargs)


@dataclass(slots=True)
class FunctionNote:
    """Fields of a function call that few calls have: its random numbers, what it writes, its line in a library."""

    is_write: bool = False  # it changes something
    writes_state: bool = False  # parameters or buffers
    rng: Rng | None = None
    outcome: torch.Tensor | None = None  # what a random function has written
    library: tuple[str, int] | None = None  # the line of a library that made it, if that was not the user's line itself
    generators: dict[str, Any] | None = None
    attributes: Noted | None = None


class Function(Kind):
    """A torch function, or `torch.func.functional_call`."""

    is_forward = True

    @classmethod
    def is_pure(cls, op: Op) -> bool:
        return op.note is None or not op.note.is_write

    @classmethod
    def writes_state(cls, op: Op) -> bool:
        return op.note is not None and op.note.writes_state

    @classmethod
    def clears_gradients(cls, op: Op) -> bool:
        is_set = op.note is not None and op.note.is_write and name_of(op) in GRAD_WRITES
        return is_set and not any(isinstance(value, Number) for value in op.args[1:])  # perhaps made of the old one

    @classmethod
    def reads_gradients(cls, op: Op) -> bool:
        return name_of(op) in GRAD_READS

    @classmethod
    def play(cls, player: Player, op: Op, args: Any, kwargs: Any) -> Any:
        note, name = op.note, name_of(op)
        if note is not None:
            restore_generators(note)
            if note.outcome is not None:
                return native.copy_(written_argument(name, args, kwargs), note.outcome)
            if note.writes_state and name in DATA_WRITES:
                return native.copy_(args[0].data, args[1])  # other tensors may look at the same memory
        written = written_argument(name, args, kwargs)
        if op.mode.grad and isinstance(written, torch.Tensor) and is_leaf(written):
            with native.no_grad():  # it was written before the loop said that it needs gradients
                result = op.target(*args, **kwargs)
        else:
            result = op.target(*args, **kwargs)
        return written if result is None and op.outs else result  # `__setitem__` returns nothing


@dataclass(slots=True)
class RootNote:
    """A root module as it was called."""

    is_training: bool  # its mode
    rng: Rng | None
    generators: dict[str, Any] | None  # Python's, if it is not the first root of its step
    forward: Any  # that it had itself, perhaps for this one call
    attributes: Noted | None


class Root(Kind):
    """A module that the loop calls."""

    is_forward = True

    @classmethod
    def is_pure(cls, op: Op) -> bool:
        return not (op.note.is_training and bool(members.buffers(op.target)))

    @classmethod
    def play(cls, player: Player, op: Op, args: Any, kwargs: Any) -> Any:
        note, target = op.note, player.module(op)
        restore_generators(note)
        if note.attributes is not None:
            note.attributes.put_back()
        attributes = members.space_of_module(target)
        now = {name: attributes[name] for name in ("forward",) if name in attributes}
        try:
            if note.forward is not None:
                attributes["forward"] = note.forward
            return target(*args, **kwargs)
        finally:
            attributes.pop("forward", None)
            attributes.update(now)


@dataclass(slots=True)
class TransformNote:
    """The places of the variables that the function reads, whose values are among the arguments."""

    places: list[Place]
    rng: Rng | None
    generators: dict[str, Any] | None = None


class Transform(Kind):
    """A transform of `torch.func`, or a compiled function that makes tensors."""

    is_forward = True

    @classmethod
    def is_pure(cls, op: Op) -> bool:
        return True

    @classmethod
    def play(cls, player: Player, op: Op, args: Any, kwargs: Any) -> Any:
        restore_generators(op.note)
        return play_with(op.target, args, op.note.places)


@dataclass(slots=True)
class CompiledNote(TransformNote):
    """Also the single numbers ``seen`` among the results, by position, and if parameters were updated."""

    seen: dict[int, float | torch.Tensor] = field(default_factory=dict)
    has_stepped: bool = False


class CompiledStep(Kind):
    """A compiled function that differentiates or updates parameters itself."""

    differentiates = True

    @classmethod
    def play(cls, player: Player, op: Op, args: Any, kwargs: Any) -> Any:
        return Transform.play(player, op, args, kwargs)

    @classmethod
    def trace(cls, recording: TracedPlayer, op: Op, args: Any, kwargs: Any) -> Any:
        """Run the function as it was written; updates and the clearing of gradients in it are calls of their own."""
        tracer, first = recording.tracer, len(recording.tracer.calls)
        with _watching_updates(recording):
            result = cls.play(recording, op, args, kwargs)
        calls = tracer.calls[first:]
        last = max((n for n, call in enumerate(calls) if call.is_differentiation), default=len(calls))
        for number, call in enumerate(calls):
            is_update = op.note.has_stepped and number > last and call.phase == Phase.FORWARD
            phase = Phase.BACKWARD if call.is_differentiation else Phase.OPTIMIZER if is_update else call.phase
            tracer.calls[first + number] = replace(call, phase=phase)
        recording.has_differentiated = True
        results = list(iter_tensors(result))
        with native.DisableTorchFunction():
            for place, old in op.note.seen.items():
                if place < len(results):
                    recording.compare_loss(old, results[place])
        return result


@contextlib.contextmanager
def _watching_updates(recording: TracedPlayer) -> Iterator[None]:
    """Record each step of an optimizer, and `zero_grad`, as one call."""
    tracer, first = recording.tracer, len(recording.tracer.calls)

    def look() -> None:
        recording.has_differentiated |= any(call.is_differentiation for call in tracer.calls[first:])

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        look()
        if is_of_torch(optimizer):
            with native.DisableTorchFunction():
                tracer.record(optimizer_call(recording, optimizer))
            tracer.is_silent = True

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        tracer.is_silent = False

    def zero_grad(owner: Any, set_to_none: bool = True) -> None:
        look()
        clear_gradients(recording, owner, ())

    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    owners: tuple[Any, ...] = (torch.optim.Optimizer, torch.nn.Module)
    originals = [owner.zero_grad for owner in owners]
    try:
        for owner in owners:
            owner.zero_grad = zero_grad
        yield
    finally:
        tracer.is_silent = False
        for owner, original in zip(owners, originals, strict=True):
            owner.zero_grad = original
        for handle in handles:
            handle.remove()


@dataclass(slots=True, eq=False)
class BackwardNote:
    """The losses that a backward call started from, and whether optimizers stepped inside of it."""

    losses: list[float | torch.Tensor] | None = None  # ``None`` unless it is a single number
    has_stepped: bool = False  # optimizers stepped inside of it
    averaged: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # with gradients of all processes


class Backward(Kind):
    """`Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad`."""

    differentiates = makes_gradients = True

    @classmethod
    def play(cls, player: Player, op: Op, args: Any, kwargs: Any) -> Any:
        player.before_backward()
        result = op.target(*args, **kwargs)
        for parameter, gradient in op.note.averaged or ():
            parameter.grad = native.clone(gradient)
        return result

    @classmethod
    def trace(cls, recording: TracedPlayer, op: Op, args: Any, kwargs: Any) -> Any:
        tracer, name, note = recording.tracer, name_of(op), op.note
        tracer.phase = Phase.BACKWARD
        recording.has_differentiated = True
        with native.DisableTorchFunction():
            seen = note.losses if note.losses is not None else recording.starts_of_training(op)
            for old, new in zip(seen, starts_of(args, kwargs), strict=False):
                if note.losses is not None or native.numel(old):
                    recording.compare_loss(old, new)
        try:
            if not recording.performs:
                tracer.record(tracer.make_call(name, args, kwargs))
                return None
            if name == AUTOGRAD_BACKWARD:
                recording.before_backward()
                return tracer.perform(name, op.target, args, kwargs)
            return cls.play(recording, op, args, kwargs)
        finally:
            tracer.phase = Phase.FORWARD


class ZeroGrad(Kind):
    """`zero_grad` of a module or an optimizer; its note has the ids of the parameters whose gradients it has set to
    zero."""

    @classmethod
    def clears_gradients(cls, op: Op) -> bool:
        return True

    @classmethod
    def play(cls, player: Player, op: Op, args: Any, kwargs: Any) -> None:
        _clear(args[0], op.note or ())

    @classmethod
    def trace(cls, recording: TracedPlayer, op: Op, args: Any, kwargs: Any) -> None:
        clear_gradients(recording, args[0], op.note or ())


def _clear(owner: Any, zeroed: Any) -> None:
    for parameter in owned_by(owner):
        if id(parameter) in zeroed:
            parameter.grad = native.zeros_like(parameter)
        else:
            with native.DisableTorchFunction():  # a program starts without gradients
                parameter.grad = None


def clear_gradients(recording: TracedPlayer, owner: Any, zeroed: Any) -> None:
    """Forget the gradients of a module or an optimizer while a step is recorded."""
    _clear(owner, zeroed)
    parameters = owned_by(owner)
    with native.DisableTorchFunction():
        left = {id(p): (p.grad, torch_private.version(p.grad)) for p in parameters if p.grad is not None}
        recording.zeroed.update(left)
    known = [p for p in parameters if recording.tracer.value_of(p) is not None]
    if recording.has_differentiated and known:
        refs = [Ref(recording.tracer.value(parameter)) for parameter in known]
        recording.tracer.record(Call(ZERO_GRAD, (refs,), phase=Phase.BACKWARD))


class Clip(Kind):
    """`clip_grad_norm_` and `clip_grad_value_`."""

    makes_gradients = True

    @classmethod
    def trace(cls, recording: TracedPlayer, op: Op, args: Any, kwargs: Any) -> Any:
        recording.tracer.phase = Phase.OPTIMIZER
        try:
            return cls.play(recording, op, args, kwargs)
        finally:
            recording.tracer.phase = Phase.FORWARD


class ScaleLoss(Kind):
    """`GradScaler.scale`; its note is the scale."""

    is_forward = True

    @classmethod
    def is_pure(cls, op: Op) -> bool:
        return True

    @classmethod
    def play(cls, player: Player, op: Op, args: Any, kwargs: Any) -> Any:
        scaler = args[0]
        with torch_private.scaling_by(scaler, op.note):
            return op.target(*args, **kwargs)

    @classmethod
    def trace(cls, recording: TracedPlayer, op: Op, args: Any, kwargs: Any) -> Any:
        recording.tracer.outer_scope = (GRAD_SCALER,)
        return cls.play(recording, op, args, kwargs)


def unscaled(ops: Sequence[Op], start: Number) -> Number:
    """The number of what a grad scaler was given, if ``start`` is its product."""
    for op in reversed(ops):
        if op.kind is ScaleLoss and start in op.outs:
            number: Number = op.ins[op.outs.index(start)]
            return number
    return start


class Unscale(Kind):
    """A grad scaler divides gradients: of its arguments the second is the optimizer; its note is the inverse scale."""

    makes_gradients = True

    @classmethod
    def play(cls, player: Player, op: Op, args: Any, kwargs: Any) -> None:
        with native.no_grad():
            for parameter in parameters_of(args[1]):
                if parameter.grad is not None:
                    native.mul_(parameter.grad, float(op.note))


@dataclass(slots=True)
class StepNote:
    """The options of an optimizer's step, what a fused kernel got from a grad scaler, and the attributes of an
    optimizer of the user's own."""

    options: list[dict[str, Any]]
    scaler: dict[str, Any]
    attributes: Noted | None


class OptimizerStep(Kind):
    """The step of an optimizer."""

    @classmethod
    def play(cls, player: Player, op: Op, args: Any, kwargs: Any) -> None:
        with as_then(op):
            step_without_hooks(op.target, args, kwargs)

    @classmethod
    def trace(cls, recording: TracedPlayer, op: Op, args: Any, kwargs: Any) -> None:
        optimizer: torch.optim.Optimizer = op.target
        recording.tracer.phase = Phase.OPTIMIZER
        with as_then(op):
            if is_of_torch(optimizer):
                with native.DisableTorchFunction():
                    recording.tracer.record(optimizer_call(recording, optimizer))
                    step_without_hooks(optimizer)
            else:
                step_without_hooks(optimizer, args, kwargs)
        recording.tracer.phase = Phase.FORWARD


@contextlib.contextmanager
def as_then(op: Op) -> Iterator[None]:
    """The optimizer's options, attributes and its scaler's verdict as they were in the loop."""
    optimizer, note = op.target, op.note
    now = {name: vars(optimizer)[name] for name in note.scaler if name in vars(optimizer)}
    set_options(optimizer, note.options)
    if note.attributes is not None:
        note.attributes.put_back()
    for name, value in note.scaler.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in note.scaler:
            delattr(optimizer, name)
        vars(optimizer).update(now)  # the loop's scaler may be in the middle of a step


def step_without_hooks(optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """An optimizer's step as its class defines it, without anybody's hooks and wrappers around it."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer, *args, **(kwargs or {}))


@native.own_operators()
def optimizer_call(recording: TracedPlayer, optimizer: torch.optim.Optimizer) -> Call:
    """The call of an optimizer's step, with its options and states as they are now."""
    tracer = recording.tracer
    params, grads, options, states = [], [], [], []
    for group in optimizer.param_groups:
        with_grad = [p for p in group["params"] if p.grad is not None]
        for parameter in with_grad:
            tracer.save_before_write(parameter)
        params.append([Ref(tracer.value(p)) for p in with_grad])
        grads.append([None if recording.has_computed(p) else Ref(tracer.value(p.grad)) for p in with_grad])
        options.append(_plain_items(recording, group, without="params"))
        states.append([_plain_items(recording, optimizer.state.get(p, {}), role="state") for p in with_grad])
    call = tracer.make_call(f"torch.optim.{type(optimizer).__name__}.step")
    content = {"params": params, "grads": grads, "options": options, "state": states}
    return replace(call, kwargs=content, phase=Phase.OPTIMIZER)


def _plain_items(
    recording: TracedPlayer, items: Mapping[str, Any], without: str = "", role: str = ""
) -> dict[str, Any]:
    tracer: Tracer = recording.tracer
    plain = {}
    for name, value in items.items():
        if name == without:
            continue
        try:
            if isinstance(value, torch.Tensor) and role:
                plain[name] = Ref(tracer.adopt(value, InputName(name, role)))
            else:
                plain[name] = tracer.encode(value)
        except CannotRecord:
            recording.mismatches.append(f"the optimizer's `{name}` cannot be recorded")
    return plain


@dataclass(slots=True, eq=False)
class CollectiveNote:
    """The result and the other arguments of a collective."""

    outcome: torch.Tensor | None  # what it has written, if that is small and no gradient
    others: tuple[Any, ...]  # its other arguments
    named: dict[str, Any]
    averaged: torch.Tensor | None = None  # what a replay on all ranks has given


class Collective(Kind):
    """A collective writes what all processes have into its first argument."""

    @classmethod
    def play(cls, player: Player, op: Op, args: Any, kwargs: Any) -> Any:
        note = op.note
        if note.outcome is not None:
            native.copy_(args[0], note.outcome)
        elif player.together is not None:
            player.together.meet("collective")
            op.target(args[0], *note.others, **note.named)
            note.averaged = native.clone(native.detach(args[0]))
        elif note.averaged is not None:
            native.copy_(args[0], note.averaged)
        return args[0]


def restore_generators(note: Any) -> None:
    """The generators as they were before a call, where they were noted."""
    if note.rng is not None:
        native.set_rng_state(note.rng[0])
        if note.rng[1] is not None:
            native.cuda_set_rng_state(note.rng[1])
    if note.generators is not None:
        set_python_generators(note.generators)


def name_of(op: Op) -> str:
    """The name of the torch function that was called; empty for other calls."""
    return facts_of(op.target).name if op.kind in (Function, Backward) else ""


def starts_of(args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """What a backward call with these arguments starts from: tensors, or the numbers of these."""
    first = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
    return list(first) if isinstance(first, (list, tuple)) else [first]


def gives_gradients(op: Op) -> bool:
    """True if a backward call is handed gradients, so that what it starts from is not a loss."""
    position = 2 if name_of(op) == AUTOGRAD_GRAD else 1
    given = op.args[position] if len(op.args) > position else None
    return given is not None or not _GIVEN_GRADIENTS.isdisjoint([k for k, v in op.kwargs.items() if v is not None])


_GIVEN_GRADIENTS = frozenset({"gradient", "grad_tensors", "grad_outputs"})
