"""Doing again what the loop did: every entry of a step, on the user's own modules and optimizers, in order.

Nothing is recorded here (`replay` adds that). The state that playing changes is put back by whoever asked for it.

Hooks of the user's are called, and what they raise is ignored. A program holds no hooks of a backward pass, and one
that steps an optimizer would change the live state: a step is recorded without those. Torch's own hooks, such as those
of ``weight_norm``, always stay.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Set
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from reprokit.capture.record import kinds, transformed
from reprokit.capture.record.entry import Entry, unwrapped
from reprokit.capture.record.state import owned_by, parameters_of, set_options, set_python_generators
from reprokit.capture.record.structure import is_leaf, iter_tensors, map_tensors
from reprokit.capture.rewind.meeting import Meeting
from reprokit.errors import pass_on
from reprokit.program.functions import DATA_WRITES, written_argument
from reprokit.program.memory import same_bits
from reprokit.program.sites import kind_of_file


class Player:
    """Plays entries of one step. ``_new`` maps the id of a tensor the loop had to the one that stands for it now.

    ``saved`` holds what outside tensors contained before the loop wrote into them. ``mismatches`` says in words what is
    known to differ from what the loop did. ``carried`` is what earlier steps made for this one; ``state`` are the ids
    of tensors that are put back as a whole, whoever wrote them. ``together``: all ranks play the same, and gradients
    are averaged again.
    """

    def __init__(
        self,
        saved: Mapping[int, torch.Tensor],
        carried: Mapping[int, torch.Tensor] | None = None,
        state: Set[int] = frozenset(),
        together: Meeting | None = None,
    ) -> None:
        self.mismatches: list[str] = []
        self.together = together
        self._state = state
        self._saved = saved
        self._new: dict[int, torch.Tensor] = dict(carried or {})
        self._old: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._made: set[int] = set(self._new)

    def play(self, entry: Entry) -> None:
        """Do what the entry says."""
        self._check_versions(entry)
        self._play(entry, *self.given(entry))

    def given(self, entry: Entry) -> tuple[Any, Any]:
        """The arguments of an entry in the replay."""
        change = self._value if entry.reads_values else self.stand_in
        return map_tensors(entry.args, change), map_tensors(entry.kwargs, change)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The replacement of a tensor whose graph is not used."""
        if id(tensor) in self._new or not tensor.requires_grad or is_leaf(tensor):
            return self.stand_in(tensor)
        value = self._values.get(id(tensor))
        if value is None:
            value = self._values[id(tensor)] = self._saved.get(id(tensor), tensor).detach().clone()
            self._old[id(value)] = tensor
        return value

    def _play(self, entry: Entry, args: Any, kwargs: Any) -> None:
        if entry.rng is not None:
            torch.set_rng_state(entry.rng[0])
            if entry.rng[1] is not None:
                torch.cuda.set_rng_state(entry.rng[1])
        if entry.generators is not None:
            set_python_generators(entry.generators)
        result = self._result_of(entry, args, kwargs)
        for old, new in zip(iter_tensors(entry.output), iter_tensors(result), strict=False):
            self._new[id(old)] = new
            self._old[id(new)] = old
            self._made.add(id(old))

    def _result_of(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        match entry.kind:
            case kinds.MODULE:
                return self._play_module(entry, args, kwargs)
            case kinds.FUNCTION:
                return self._play_function(entry, args, kwargs)
            case kinds.TRANSFORM:
                return transformed.play(entry.target, args, entry.settings)
            case kinds.COMPILED:
                return self._play_compiled(entry, args)
            case kinds.BACKWARD:
                return self._play_backward(entry, args, kwargs)
            case kinds.SCALE:
                return self._play_scale(entry, args, kwargs)
            case kinds.CLIP:
                return self._play_clip(entry, args, kwargs)
            case kinds.UNSCALE:  # multiply by what the scaler multiplied with
                with torch.no_grad():
                    for parameter in parameters_of(entry.args[1]):
                        if parameter.grad is not None:
                            parameter.grad.mul_(float(entry.args[2]))
            case kinds.ZERO_GRAD:
                return self._play_zero_grad(entry, args)
            case kinds.OPTIMIZER:
                return self._play_optimizer(entry, args, kwargs)
            case kinds.COLLECTIVE:
                return self._play_collective(entry, args)

    def seen(self, entry: Entry) -> dict[int, torch.Tensor]:
        """The losses that a compiled function returns in the replay, by their position among its results."""
        outputs = list(iter_tensors(entry.output))
        found = {place: self._new.get(id(outputs[place])) for place in entry.settings.seen}
        return {place: tensor for place, tensor in found.items() if tensor is not None}

    def made(self, ids: Set[int]) -> dict[int, torch.Tensor]:
        """The values of the tensors with these ids after the step."""
        return {key: self._new[key] for key in ids if key in self._new}

    def _play_module(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        target = unwrapped(entry.target)
        if entry.settings is not None:
            entry.settings.put_back()
        attributes = vars(target)
        if self.together is not None and target is not entry.target and entry.mode.grad:
            self.together.meet("module")
            target = entry.target
        now = {name: attributes[name] for name in ("forward",) if name in attributes}
        try:
            if entry.forward is not None:
                attributes["forward"] = entry.forward
            return target(*args, **kwargs)
        finally:
            attributes.pop("forward", None)
            attributes.update(now)

    def _play_function(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        if entry.outcome is not None:
            return written_argument(entry.name, args, kwargs).copy_(entry.outcome)
        if entry.writes_state and entry.name in DATA_WRITES:
            return args[0].data.copy_(args[1])  # other tensors may look at the same memory
        written = written_argument(entry.name, args, kwargs)
        if entry.mode.grad and isinstance(written, torch.Tensor) and is_leaf(written):
            with torch.no_grad():  # it was written before the loop said that it needs gradients
                return entry.target(*args, **kwargs)
        return entry.target(*args, **kwargs)

    def _play_compiled(self, entry: Entry, args: Any) -> Any:
        return transformed.play(entry.target, args, entry.settings.places)

    def _play_scale(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        scaler = entry.args[0]
        now, scaler._scale = scaler._scale, entry.settings if entry.settings is not None else scaler._scale
        try:
            return entry.target(*args, **kwargs)
        finally:
            scaler._scale = now

    def _play_clip(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        return entry.target(*args, **kwargs)

    def _play_backward(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        if self.together is not None:
            self.together.meet("backward")
        result = entry.target(*args, **kwargs)
        self._give_averaged(entry)
        return result

    def _give_averaged(self, entry: Entry) -> None:
        """Give parameters the gradients that all processes have averaged, where they are known."""
        for parameter, gradient in entry.averaged or ():
            self.stand_in(parameter).grad = gradient

    def _play_collective(self, entry: Entry, args: Any) -> None:
        """Write what training has written, if it was kept; gradients are averaged again if all ranks do that."""
        if entry.outcome is not None:
            args[0].copy_(entry.outcome)
        elif self.together is not None:
            others, named = entry.settings
            self.together.meet("collective")
            entry.target(args[0], *others, **named)
            entry.averaged = [(entry.args[0], args[0].detach().clone())]
        elif entry.averaged is not None:
            args[0].copy_(entry.averaged[0][1])

    def _play_zero_grad(self, entry: Entry, args: Any) -> None:
        zeroed = entry.settings or ()
        for parameter in owned_by(args[0]):
            if id(parameter) in zeroed:
                parameter.grad = torch.zeros_like(parameter)
            else:
                with torch._C.DisableTorchFunction():  # a program starts without gradients
                    parameter.grad = None

    def _play_optimizer(self, entry: Entry, args: Any, kwargs: Any) -> None:
        with self.as_then(entry):
            step_without_hooks(entry.target, args, kwargs)

    @contextlib.contextmanager
    def as_then(self, entry: Entry) -> Iterator[None]:
        """The optimizer's options, attributes and its scaler's verdict as they were in the loop."""
        optimizer, settings = entry.target, entry.settings
        scaler = settings["scaler"] if settings is not None else {}
        now = {name: vars(optimizer)[name] for name in scaler if name in vars(optimizer)}
        if settings is not None:
            set_options(optimizer, settings["options"])
            if settings["attributes"] is not None:
                settings["attributes"].put_back()
        for name, value in scaler.items():
            setattr(optimizer, name, value)
        try:
            yield
        finally:
            for name in scaler:
                delattr(optimizer, name)
            vars(optimizer).update(now)  # the loop's scaler may be in the middle of a step

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the replay for a tensor of the loop."""
        known = self._new.get(id(tensor))
        if known is not None:
            return known
        saved = self._saved.get(id(tensor))
        if saved is None and (not tensor.requires_grad or is_leaf(tensor)):
            return tensor
        content = saved.clone() if saved is not None else tensor.detach()
        stand_in = content.requires_grad_() if tensor.requires_grad else content
        self._new[id(tensor)] = stand_in
        self._old[id(stand_in)] = tensor
        return stand_in

    def _check_versions(self, entry: Entry) -> None:
        for tensor, version in entry.versions:
            untouched = version < 0 or tensor._version == version or isinstance(tensor, torch.nn.Parameter)
            known = id(tensor) in self._saved or id(tensor) in self._made or id(tensor) in self._state
            known = known or entry.name == _ZERO  # what the tensor held makes no difference
            if not untouched and not known:
                self.mismatches.append(
                    "a tensor was written after the step had used it, by something the tape cannot see"
                )


_ZERO = "torch.Tensor.zero_"
_NO_KWARGS: Mapping[str, Any] = {}


def leaves_in(entries: Iterable[Entry]) -> Iterator[torch.Tensor]:
    """The leaves whose gradients playing the entries may change."""
    for entry in entries:
        yield from (tensor for tensor, _ in entry.versions if is_leaf(tensor))
        if entry.kind is kinds.OPTIMIZER:
            yield from parameters_of(entry.target)
        elif entry.kind is kinds.ZERO_GRAD:
            yield from owned_by(entry.args[0])


def step_without_hooks(optimizer: torch.optim.Optimizer, args: Any = (), kwargs: Any = _NO_KWARGS) -> None:
    """An optimizer's step as its class defines it, without anybody's hooks and wrappers around it."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer, *args, **kwargs)


def is_same(seen: torch.Tensor | float, new: torch.Tensor) -> bool:
    """True if a tensor has the value that was seen; a single real number may have been kept as a float."""
    if isinstance(seen, torch.Tensor):
        return same_bits(seen, new)
    value = new.detach().item()
    if value != value or seen != seen:
        return value != value and seen != seen
    return value == seen and math.copysign(1, value) == math.copysign(1, seen)


def is_close(seen: torch.Tensor | float, new: torch.Tensor) -> bool:
    """True if a tensor differs from what was seen by no more than rounding may."""
    before = seen.detach() if isinstance(seen, torch.Tensor) else torch.tensor(seen, dtype=new.dtype)
    same_kind = before.shape == new.shape and before.dtype == new.dtype
    return same_kind and torch.allclose(before.to(new.device), new.detach(), rtol=1e-3, equal_nan=True)


def describe_mismatch(what: str, old: torch.Tensor | float, new: torch.Tensor) -> str:
    """In which way two tensors that ought to be equal are not."""
    if new.numel() == 1 and (not isinstance(old, torch.Tensor) or old.numel() == 1):
        return f"{what} was {float(old):.9g} in training and {float(new.detach()):.9g} in the replay"
    return f"{what} differs between training and the replay"


Hooks = MutableMapping[int, Callable[..., Any]]


@contextlib.contextmanager
def quiet_hooks(
    modules: Iterable[torch.nn.Module], leaves: Iterable[torch.Tensor], *, is_recorded: bool = False
) -> Iterator[list[Any]]:
    """Ignore what hooks raise. Yields the list of hooks that have raised, or were left out of a recorded step."""
    met: list[Any] = []
    register: Any = torch.Tensor.register_hook

    def register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if is_recorded and _is_users(hook):
            met.append(hook)
            return RemovableHandle(OrderedDict())
        return register(tensor, _quiet(hook, met))

    tables = list(_tables(modules, leaves))
    before = [(table, dict(table)) for table, _ in tables]
    try:
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
        for table, is_of_backward in tables:
            for key, hook in list(table.items()):
                if is_recorded and is_of_backward and _is_users(hook):
                    met.append(table.pop(key))
                else:
                    table[key] = _quiet(hook, met)
        yield met
    finally:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]
        for table, content in before:
            table.clear()
            table.update(content)


def _tables(modules: Iterable[torch.nn.Module], leaves: Iterable[torch.Tensor]) -> Iterator[tuple[Hooks, bool]]:
    """The tables of hooks that are not empty: of modules, of all modules, and of leaves; true for backward passes."""
    parts = {id(part): part for module in modules for part in module.modules()}.values()
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        everywhere = getattr(torch.nn.modules.module, f"_global{name}", {})
        tables = (*(getattr(part, name) for part in parts), everywhere)
        yield from ((table, name.startswith("_backward")) for table in tables if table)
    for leaf in leaves:
        yield from ((table, True) for table in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks) if table)


def code_of(hook: Any) -> Any:
    """The code that a hook runs, ``None`` if that is not Python."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    return getattr(function if hasattr(function, "__code__") else type(hook).__call__, "__code__", None)


def _is_users(hook: Any) -> bool:
    code = code_of(hook)
    return code is None or kind_of_file(code.co_filename) not in ("torch", "own")


def _quiet(hook: Callable[..., Any], met: list[Any]) -> Callable[..., Any]:
    @functools.wraps(hook, assigned=("__name__", "__doc__"), updated=())
    def quiet(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except Exception as error:
            pass_on(error)
            met.append(hook)
            return None

    return quiet
