"""Running the failed step again from its tape, under a tracer: the tape becomes a program.

Only what the failure depends on is run. Every root module and function is called again with what it was given, so the
user's own code runs once more; the state it changes is put back by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reprokit.capture.state import parameters_of
from reprokit.capture.structure import is_leaf, iter_tensors, map_tensors
from reprokit.capture.tape import Entry
from reprokit.locate.blame import GRAD_SCALER
from reprokit.program.functions import written_argument
from reprokit.program.ir import AUTOGRAD_BACKWARD, ZERO_GRAD, Call, Program, Ref
from reprokit.program.run import Modes, run
from reprokit.program.sites import make_site
from reprokit.program.trace import CannotRecord, Origin, Tracer, recording


@dataclass
class Replayed:
    """The program of a step, and how well running it agrees with what the loop saw.

    ``mismatches`` says in words what differed, best known first; empty means bit-equal.
    """

    program: Program
    tensors: dict[int, torch.Tensor]
    mismatches: list[str] = field(default_factory=list)
    is_close: bool = True


def replay(
    entries: list[Entry],
    saved: Mapping[int, torch.Tensor],
    describe: Callable[[torch.Tensor], Origin | None],
    *,
    perform_last: bool,
) -> Replayed:
    """Run ``entries`` again and record them.

    ``saved`` holds what outside tensors contained before the loop wrote into them. ``perform_last`` is false when
    the last
    entry is a differentiation that the loop did not come to, because its start was already bad.
    """
    player = _Player(saved, describe)
    needed = needed_entries(entries)
    with recording(player.tracer), Modes() as modes:
        for position, entry in enumerate(needed):
            modes.enter(entry.mode)
            player.play(entry, perform=perform_last or position < len(needed) - 1)
    program = player.tracer.program().pruned()
    tensors = {item.value: player.tracer.tensors[item.value] for item in program.inputs}
    replayed = Replayed(program, tensors, player.mismatches)
    _compare(replayed, player.starts)
    return replayed


def needed_entries(entries: list[Entry]) -> list[Entry]:
    """Those entries that differentiations and optimizer steps depend on, in order."""
    if not any(entry.kind == "differentiate" for entry in entries):
        return entries
    needed: set[int] = set()
    kept: list[Entry] = []
    for entry in reversed(entries):
        made = {id(tensor) for tensor in iter_tensors(entry.output)}
        written = written_argument(entry.name, entry.args, entry.kwargs)
        if written is not None:
            made.add(id(written))
        if entry.kind not in ("module", "function", "scale") or made & needed or _shares_memory(entry, needed):
            kept.append(entry)
            needed.update(id(tensor) for tensor in iter_tensors((entry.args, entry.kwargs)))
    return kept[::-1]


def _shares_memory(entry: Entry, needed: set[int]) -> bool:
    """Whether an in-place entry may write into something needed through another tensor object (a view)."""
    written = written_argument(entry.name, entry.args, entry.kwargs)
    return bool(needed) and entry.kind == "function" and _is_view(written)


def _is_view(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor._is_view()


class _Player:
    """Plays entries. ``_new`` maps the id of a tensor the loop had to the tensor that stands for it now."""

    def __init__(self, saved: Mapping[int, torch.Tensor], describe: Callable[[torch.Tensor], Origin | None]) -> None:
        self.tracer = Tracer(self._describe, driver=__file__)
        self.mismatches: list[str] = []
        self.starts: list[tuple[int, torch.Tensor]] = []
        self._saved = saved
        self._describe_old = describe
        self._new: dict[int, torch.Tensor] = {}
        self._old: dict[int, torch.Tensor] = {}
        self._made: set[int] = set()
        self._differentiated = False

    def play(self, entry: Entry, *, perform: bool) -> None:
        """Do what the entry says, under the tracer."""
        self.tracer.outer_site = make_site(entry.code, entry.line) if entry.code is not None else None
        self.tracer.outer_scope = ()
        with torch._C.DisableTorchFunction():  # our own work is not part of the step
            self._check_versions(entry)
            args, kwargs = map_tensors(entry.args, self._stand_in), map_tensors(entry.kwargs, self._stand_in)
        if entry.rng is not None:
            _set_rng(entry.rng)
        if entry.kind == "differentiate":
            result = self._differentiate(entry, args, kwargs, perform)
        else:
            result = getattr(self, f"_play_{entry.kind}")(entry, args, kwargs)
        for old, new in zip(iter_tensors(entry.output), iter_tensors(result), strict=False):
            self._new[id(old)] = new
            self._old[id(new)] = old
            self._made.add(id(old))

    def _play_module(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        return entry.target(*args, **kwargs)

    def _play_function(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        if entry.outcome is not None:
            return written_argument(entry.name, args, kwargs).copy_(entry.outcome)
        return entry.target(*args, **kwargs)

    def _play_scale(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        self.tracer.outer_scope = (GRAD_SCALER,)
        return entry.target(*args, **kwargs)

    def _play_clip(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        return entry.target(*args, **kwargs)

    def _play_unscale(self, entry: Entry, args: Any, kwargs: Any) -> None:
        """Multiply the gradients by what the scaler multiplied them with."""
        optimizer, inverse = entry.args[1], entry.args[2]
        with torch.no_grad():
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse)

    def _play_zero_grad(self, entry: Entry, args: Any, kwargs: Any) -> None:
        owner = entry.args[0]
        is_optimizer = isinstance(owner, torch.optim.Optimizer)
        parameters = list(parameters_of(owner) if is_optimizer else owner.parameters())
        for parameter in parameters:
            parameter.grad = None
        known = [p for p in parameters if self.tracer.value_of(p) is not None]
        if self._differentiated and known:
            refs = [Ref(self.tracer.value(parameter)) for parameter in known]
            self.tracer.record(Call(ZERO_GRAD, (refs,), phase="backward"))

    def _play_optimizer(self, entry: Entry, args: Any, kwargs: Any) -> None:
        optimizer: torch.optim.Optimizer = entry.target
        self.tracer.phase = "optimizer"
        if type(optimizer).__module__.startswith("torch.optim."):
            with torch._C.DisableTorchFunction():
                self.tracer.record(self._optimizer_call(optimizer))
                optimizer.step()
        else:
            optimizer.step()
        self.tracer.phase = "forward"

    def _optimizer_call(self, optimizer: torch.optim.Optimizer) -> Call:
        tracer = self.tracer
        params, grads, options, states = [], [], [], []
        for group in optimizer.param_groups:
            with_grad = [p for p in group["params"] if p.grad is not None]
            for parameter in with_grad:
                tracer.save_before_write(parameter)
            params.append([Ref(tracer.value(p)) for p in with_grad])
            grads.append([None if self._differentiated else Ref(tracer.value(p.grad)) for p in with_grad])
            options.append(self._plain_items(group, without="params"))
            states.append([self._plain_items(optimizer.state.get(p, {}), role="state") for p in with_grad])
        call = tracer.make_call(f"torch.optim.{type(optimizer).__name__}.step")
        content = {"params": params, "grads": grads, "options": options, "state": states}
        return replace(call, kwargs=content, phase="optimizer")

    def _plain_items(self, items: Mapping[str, Any], without: str = "", role: str = "") -> dict[str, Any]:
        """The entries of a state or option dict that a program can hold."""
        plain = {}
        for name, value in items.items():
            if name == without:
                continue
            try:
                if isinstance(value, torch.Tensor) and role:
                    plain[name] = Ref(self.tracer.adopt(value, Origin(name, role)))
                else:
                    plain[name] = self.tracer.encode(value)
            except CannotRecord:
                self.mismatches.append(f"the optimizer's `{name}` cannot be recorded")
        return plain

    def _differentiate(self, entry: Entry, args: Any, kwargs: Any, perform: bool) -> Any:
        self.tracer.phase = "backward"
        self._differentiated = True
        with torch._C.DisableTorchFunction():
            self._compare_starts(entry, args)
        name = entry.name or AUTOGRAD_BACKWARD
        try:
            if not perform:
                self.tracer.record(self.tracer.make_call(name, args, kwargs))
                return None
            if name == AUTOGRAD_BACKWARD:
                return self.tracer.perform(name, entry.target, args, kwargs)
            return entry.target(*args, **kwargs)
        finally:
            self.tracer.phase = "forward"

    def _compare_starts(self, entry: Entry, args: Any) -> None:
        """Is what the differentiation starts from the same as in the loop?"""
        olds, news = iter_tensors(entry.args[:1]), iter_tensors(args[:1])
        for old, new in zip(olds, news, strict=True):
            if not same_bits(old, new):
                self.mismatches.append(_describe_mismatch("the loss", old, new))
            value = self.tracer.value_of(new)
            if value is not None:
                self.starts.append((value, new.detach().clone()))

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor of the loop in the replay."""
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

    def _describe(self, tensor: torch.Tensor) -> Origin | None:
        return self._describe_old(self._old.get(id(tensor), tensor))

    def _check_versions(self, entry: Entry) -> None:
        for tensor, version in entry.versions:
            untouched = version < 0 or tensor._version == version or isinstance(tensor, torch.nn.Parameter)
            if not untouched and id(tensor) not in self._saved and id(tensor) not in self._made:
                self.mismatches.append(
                    "a tensor was written after the step had used it, by something the tape cannot see"
                )


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors agree bit for bit, every NaN taken as the same."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    a, b = first.detach(), second.detach().to(first.device)
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return bool(((a == b) | (torch.isnan(a) & torch.isnan(b))).all())


def _compare(replayed: Replayed, starts: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Run the program by itself and compare what differentiations start from with the traced run."""
    expected = dict(starts)
    outcome = run(replayed.program, replayed.tensors, keep=frozenset(expected))
    if outcome.error is not None:
        call = replayed.program.calls[outcome.error_call or 0]
        replayed.mismatches.append(f"`{call.target}` raised in the replay: {outcome.error}")
        replayed.is_close = False
    for value, old in expected.items():
        new = outcome.values.get(value)
        if new is not None and not same_bits(old, new):
            replayed.mismatches.append(_describe_mismatch("the program's loss", old, new))
            replayed.is_close = replayed.is_close and torch.allclose(old, new, rtol=1e-3, equal_nan=True)


def _describe_mismatch(what: str, old: torch.Tensor, new: torch.Tensor) -> str:
    if old.numel() == 1 and new.numel() == 1:
        return f"{what} was {float(old.detach()):.9g} in training and {float(new.detach()):.9g} in the replay"
    return f"{what} differs between training and the replay"


def _set_rng(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
