"""Running the failed step again from its tape, under a tracer: the tape becomes a program.

Only what the failure depends on is run. Every root module and function is called again with what it was given, so the
user's own code runs once more; the state it changes is put back by the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from reprokit.capture.record import kinds
from reprokit.capture.record.attributes import is_of_torch
from reprokit.capture.record.entry import Entry, gradients_read, starts_of
from reprokit.capture.record.state import owned_by
from reprokit.capture.record.structure import iter_tensors
from reprokit.capture.record.tensor_names import is_unfollowed
from reprokit.capture.rewind.replayer import Player, describe_mismatch, is_close, is_same, step_without_hooks
from reprokit.errors import pass_on
from reprokit.locate.blame import GRAD_SCALER
from reprokit.program.functions import GRAD_WRITES, written_argument
from reprokit.program.interpreter import Modes
from reprokit.program.ir import AUTOGRAD_BACKWARD, ZERO_GRAD, Call, Phase, Program, Ref
from reprokit.program.memory import copies_of, overlapping, same_bits
from reprokit.program.sites import make_site
from reprokit.program.trace import CannotRecord, InputName, Tracer, recording


@dataclass
class ReplayedStep:
    """The program of a step, and how well running it agrees with what the loop saw.

    ``mismatches`` says in words what differed, best known first; empty means bit-equal. ``error`` is what playing
    raised. ``borrowed`` are the inputs that share memory with live tensors until `own_tensors`; ``sources`` are the
    loop's tensors behind the inputs, ``losses`` what backward passes started from, ``seen`` the same in training,
    ``devices`` where inputs were, by value number. ``of_loop`` are the values that calls of the loop itself have made,
    with their names.
    """

    program: Program
    tensors: dict[int, torch.Tensor]
    borrowed: Set[int]
    mismatches: list[str] = field(default_factory=list)
    is_close: bool = True
    error: Exception | None = None
    sources: dict[int, torch.Tensor | None] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    devices: dict[int, torch.device] = field(default_factory=dict)
    seen: dict[int, torch.Tensor | float] = field(default_factory=dict)
    of_loop: dict[int, str] = field(default_factory=dict)

    def own_tensors(self) -> None:
        """Copy what is borrowed to the host, before the live tensors get other contents."""
        self.devices = {value: tensor.device for value, tensor in self.tensors.items() if not tensor.is_cpu}
        self.tensors.update(copies_of({value: self.tensors[value] for value in self.borrowed}, "cpu"))
        self.borrowed = frozenset()

    def share(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Use copies of live tensors, by their ``id``, for inputs that have the same bits: a file holds them once.

        Inputs that overlap in memory keep theirs: a write into one of them shows in the others.
        """
        for value, *others in overlapping(self.tensors):
            copy = copies.get(id(self.sources[value])) if value in self.sources and not others else None
            if copy is not None and same_bits(copy, self.tensors[value]):
                self.tensors[value] = copy


def replay(
    entries: list[Entry],
    saved: Mapping[int, torch.Tensor],
    describe: Callable[[torch.Tensor], InputName | None],
    *,
    perform_last: bool,
    raises: bool = False,
    state: Set[int] = frozenset(),
    root_names: Mapping[int, str] | None = None,
    keep: Entry | None = None,
    stand_ins: Mapping[int, torch.Tensor] | None = None,
) -> ReplayedStep:
    """Run ``entries`` again and record them.

    ``saved`` holds what outside tensors contained before the loop wrote into them. ``perform_last`` is false when the
    last entry is a backward call that the loop did not come to, because its start was already bad; ``raises`` is true
    when the last entry is expected to raise. ``state`` are the ids of tensors that the caller has put back.
    ``root_names`` are those of the tracer. ``keep`` is an entry to run in any case.
    ``stand_ins`` are used in the place of other tensors, by the ``id`` of these.
    """
    recorder = _Recorder(saved, describe, state, root_names, stand_ins)
    needed = entries if raises else needed_entries(entries, keep)
    error = None
    with recording(recorder.tracer), Modes() as modes:
        updating = _start_of_hand_update(needed)
        for position, entry in enumerate(needed):
            modes.enter(entry.mode)
            recorder.tracer.phase = Phase.OPTIMIZER if position >= updating else Phase.FORWARD
            try:
                recorder.record(entry, perform=perform_last or position < len(needed) - 1)
            except Exception as raised:
                pass_on(raised)
                if not raises:
                    raise
                error = raised
                break
    recorder.mismatches += map(_ROUNDED.format, dict.fromkeys(recorder.tracer.transforms.rounded))
    program = recorder.tracer.program() if raises else recorder.tracer.program().pruned()
    tensors = {item.value: recorder.tracer.tensors[item.value] for item in program.inputs}
    borrowed = recorder.tracer.borrowed & tensors.keys()
    sources = {item.value: recorder.source_of(item.value) for item in program.inputs}
    known = recorder.mismatches, recorder.is_close, error, sources, recorder.losses
    return ReplayedStep(program, tensors, borrowed, *known, seen=recorder.seen_losses, of_loop=recorder.of_loop)


def needed_entries(entries: list[Entry], keep: Entry | None = None) -> list[Entry]:
    """Those entries that backward calls, optimizer steps and ``keep`` depend on, in order."""
    if not any(entry.kind in kinds.DIFFERENTIATING for entry in entries):
        return entries
    grads = gradients_read(entries)
    needed: set[int] = set()
    read: set[int] = set()  # buffers that a later evaluation reads
    kept: list[Entry] = []
    for entry in reversed(entries):
        made = {id(tensor) for tensor in iter_tensors(entry.output)}
        written = written_argument(entry.name, entry.args, entry.kwargs)
        if written is not None:
            made.add(id(written))
        is_pure = entry.kind in (kinds.MODULE, kinds.FUNCTION, kinds.SCALE, kinds.TRANSFORM) and not entry.writes_state
        is_pure = is_pure and id(written) not in grads and entry.name not in GRAD_WRITES
        buffers = set(map(id, entry.target.buffers())) if entry.kind is kinds.MODULE else set()
        is_pure = is_pure and not (entry.is_training and buffers & read)
        if entry is keep or not is_pure or made & needed or (entry.writes_view and needed):
            kept.append(entry)
            needed.update(id(tensor) for tensor in iter_tensors((entry.args, entry.kwargs)))
            read |= buffers if not entry.is_training else set()
    return kept[::-1]


_OF_GRADIENTS = (kinds.BACKWARD, kinds.TRANSFORM)  # the second where there is none of the first


def _start_of_hand_update(entries: list[Entry]) -> int:
    """The position from which on the loop updates parameters by itself; behind the end when it does not."""
    if all(entry.writes_state for entry in entries):
        return 0
    sources = [[number for number, entry in enumerate(entries) if entry.kind is kind] for kind in _OF_GRADIENTS]
    last = next((numbers[-1] for numbers in sources if numbers), len(entries))
    return last + 1 if any(entry.writes_state for entry in entries[last + 1 :]) else len(entries)


class _Recorder(Player):
    """Plays entries under the tracer."""

    def __init__(
        self,
        saved: Mapping[int, torch.Tensor],
        describe: Callable[[torch.Tensor], InputName | None],
        state: Set[int] = frozenset(),
        root_names: Mapping[int, str] | None = None,
        stand_ins: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(saved, stand_ins, state)
        self._zeroed: dict[int, tuple[torch.Tensor, int]] = {}
        self.tracer = Tracer(self._describe, driver=_DRIVER, root_names=root_names)
        self.losses: dict[int, torch.Tensor] = {}
        self.seen_losses: dict[int, torch.Tensor | float] = {}
        self.of_loop: dict[int, str] = {}
        self.is_close = True
        self._describe_old = describe
        self._differentiated = False
        self._perform = True

    def record(self, entry: Entry, *, perform: bool) -> None:
        """Do what the entry says and record it; a backward call may be recorded without being performed."""
        code = entry.code
        self.tracer.outer_site = make_site(code, entry.instruction, entry.library) if code is not None else None
        self.tracer.outer_scope = ()
        self._perform = perform
        with torch._C.DisableTorchFunction():  # our own work is not part of the step
            self._check_versions(entry)
            args, kwargs = self.given(entry)
        self._play(entry, args, kwargs)
        for old in iter_tensors(entry.output) if entry.kind is kinds.FUNCTION else ():
            value = self.tracer.value_of(self._new[id(old)]) if id(old) in self._new else None
            if value is not None:
                origin = self._describe_old(old)
                self.of_loop[value] = origin.name if origin is not None else "input"

    def _play_scale(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        self.tracer.outer_scope = (GRAD_SCALER,)
        return super()._play_scale(entry, args, kwargs)

    def _play_clip(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        self.tracer.phase = Phase.OPTIMIZER
        try:
            return super()._play_clip(entry, args, kwargs)
        finally:
            self.tracer.phase = Phase.FORWARD

    def _play_compiled(self, entry: Entry, args: Any) -> Any:
        """Run the function as it was written; updates and the clearing of gradients in it are calls of their own."""
        tracer, first = self.tracer, len(self.tracer.calls)
        with self._watching_updates(entry):
            result = super()._play_compiled(entry, args)
        calls = tracer.calls[first:]
        last = max((n for n, call in enumerate(calls) if call.is_differentiation), default=len(calls))
        for number, call in enumerate(calls):
            is_update = entry.has_stepped and number > last and call.phase == Phase.FORWARD
            phase = Phase.BACKWARD if call.is_differentiation else Phase.OPTIMIZER if is_update else call.phase
            tracer.calls[first + number] = replace(call, phase=phase)
        self._differentiated = True
        results = list(iter_tensors(result))
        with torch._C.DisableTorchFunction():
            for place, old in entry.settings.seen.items():
                if place < len(results):
                    self._compare_loss(old, results[place])
        return result

    @contextlib.contextmanager
    def _watching_updates(self, entry: Entry) -> Iterator[None]:
        """Record each step of an optimizer, and `zero_grad`, as one call."""
        first, tracer = len(self.tracer.calls), self.tracer

        def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self._differentiated |= any(call.is_differentiation for call in tracer.calls[first:])
            if is_of_torch(optimizer):
                with torch._C.DisableTorchFunction():
                    tracer.record(self._optimizer_call(optimizer))
                tracer.is_silent = True

        def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            tracer.is_silent = False

        def zero_grad(owner: Any, set_to_none: bool = True) -> None:
            self._differentiated |= any(call.is_differentiation for call in tracer.calls[first:])
            self._play_zero_grad(replace(entry, args=(owner,), settings=None), (owner,))

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

    def _play_zero_grad(self, entry: Entry, args: Any) -> None:
        owner = entry.args[0]
        super()._play_zero_grad(entry, args)
        parameters = owned_by(owner)
        with torch._C.DisableTorchFunction():
            self._zeroed.update((id(p), (p.grad, p.grad._version)) for p in parameters if p.grad is not None)
        known = [p for p in parameters if self.tracer.value_of(p) is not None]
        if self._differentiated and known:
            refs = [Ref(self.tracer.value(parameter)) for parameter in known]
            self.tracer.record(Call(ZERO_GRAD, (refs,), phase=Phase.BACKWARD))

    def _play_optimizer(self, entry: Entry, args: Any, kwargs: Any) -> None:
        optimizer: torch.optim.Optimizer = entry.target
        self.tracer.phase = Phase.OPTIMIZER
        with self.as_then(entry):
            if is_of_torch(optimizer):
                with torch._C.DisableTorchFunction():
                    self.tracer.record(self._optimizer_call(optimizer))
                    step_without_hooks(optimizer)
            else:
                step_without_hooks(optimizer, args, kwargs)
        self.tracer.phase = Phase.FORWARD

    def _optimizer_call(self, optimizer: torch.optim.Optimizer) -> Call:
        tracer = self.tracer
        params, grads, options, states = [], [], [], []
        for group in optimizer.param_groups:
            with_grad = [p for p in group["params"] if p.grad is not None]
            for parameter in with_grad:
                tracer.save_before_write(parameter)
            params.append([Ref(tracer.value(p)) for p in with_grad])
            grads.append([None if self._is_from_program(p) else Ref(tracer.value(p.grad)) for p in with_grad])
            options.append(self._plain_items(group, without="params"))
            states.append([self._plain_items(optimizer.state.get(p, {}), role="state") for p in with_grad])
        call = tracer.make_call(f"torch.optim.{type(optimizer).__name__}.step")
        content = {"params": params, "grads": grads, "options": options, "state": states}
        return replace(call, kwargs=content, phase=Phase.OPTIMIZER)

    def _is_from_program(self, parameter: torch.Tensor) -> bool:
        """True if the program itself computes a gradient, which is not what `zero_grad` has left of an older one."""
        left = self._zeroed.get(id(parameter))
        is_left = left is not None and left[0] is parameter.grad and left[0]._version == left[1]
        return self._differentiated and not is_left

    def _plain_items(self, items: Mapping[str, Any], without: str = "", role: str = "") -> dict[str, Any]:
        plain = {}
        for name, value in items.items():
            if name == without:
                continue
            try:
                if isinstance(value, torch.Tensor) and role:
                    plain[name] = Ref(self.tracer.adopt(value, InputName(name, role)))
                else:
                    plain[name] = self.tracer.encode(value)
            except CannotRecord:
                self.mismatches.append(f"the optimizer's `{name}` cannot be recorded")
        return plain

    def _play_backward(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        self.tracer.phase = Phase.BACKWARD
        self._differentiated = True
        name, settings = entry.name, entry.settings
        with torch._C.DisableTorchFunction():
            olds = settings if settings is not None else entry.starts
            for old, new in zip(olds, starts_of(args, kwargs), strict=False):
                if settings is not None or old.numel():
                    self._compare_loss(old, new)
        try:
            if not self._perform:
                self.tracer.record(self.tracer.make_call(name, args, kwargs))
                return None
            if name == AUTOGRAD_BACKWARD:
                return self.tracer.perform(name, entry.target, args, kwargs)
            result = entry.target(*args, **kwargs)
            self._give_averaged(entry)
            return result
        finally:
            self.tracer.phase = Phase.FORWARD

    def _compare_loss(self, old: torch.Tensor | float, new: torch.Tensor) -> None:
        if not is_same(old, new):
            self.mismatches.append(describe_mismatch("the loss", old, new))
            self.is_close = self.is_close and is_close(old, new)
        value = self.tracer.value_of(new)
        if value is not None:
            self.losses[value], self.seen_losses[value] = new.detach().clone(), old

    def _describe(self, tensor: torch.Tensor) -> InputName | None:
        old = self._old.get(id(tensor), tensor)
        origin = self._describe_old(old)
        if is_unfollowed(old):
            return replace(origin or InputName("input"), role="opaque")
        is_value = origin is not None and origin.role == "opaque" and not tensor.requires_grad
        return None if is_value else origin  # used without the graph that an earlier step made

    def source_of(self, value: int) -> torch.Tensor | None:
        """The loop's own tensor behind an input of the program."""
        tensor = self.tracer.tensor_of(value)
        return self._old.get(id(tensor), tensor) if tensor is not None else None


_DRIVER = __file__
_ROUNDED = "the transform of `{}` was replayed by plain calls, whose results differ by rounding"
