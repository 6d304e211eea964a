"""The choice of a slice: what the origin depends on in its own module, grown until it explains itself, then cut back.

Slices are proposed likeliest first. The first that fails in the same way on ordinary inputs (finite, moderate numbers)
loses the modules it can do without; where none is ordinary, the least bad one is taken.

Below it the edits that no pass of the minimum makes: no randomness, free sizes in shapes, the gradient of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from reprokit.locate.failure import Failure
from reprokit.program.dataflow import contents
from reprokit.program.functions import is_in_place
from reprokit.program.ir import AUTOGRAD_BACKWARD, BACKWARD, Call, Input, Phase, Ref, Scope, iter_refs
from reprokit.program.step import Step, is_number
from reprokit.shrink.context.step import StepGraph, StepSlice, written
from reprokit.shrink.leaves import parameters_of, with_leaf
from reprokit.shrink.oracle import Oracle
from reprokit.shrink.passes.cut import cuts
from reprokit.shrink.problem import Class
from reprokit.shrink.recording import record
from reprokit.shrink.safety import RECURRENT
from reprokit.shrink.signature import Ruling

_LIMIT = 1e3
_LIMITS = {torch.float16: 128.0}
_OWN_CALLS = 24  # calls of the origin's own module: about what one `forward` computes
_FEW = 4  # units; fewer calls of a loop do not show where an operand came from
_GROWTH = 8  # calls that join for each input that is not ordinary, before the slice is run again
_SMALL_MODULE = 8  # units of a module that is shown whole
_MAX_CALLS = 200  # a longer slice cannot be made small within the budget
_MAX_UNITS = 42  # of the 60 lines that a script may have; classes and inputs take the others


def is_ordinary(tensor: torch.Tensor) -> bool:
    """True if a tensor holds only finite, moderate numbers."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    largest = float(contents(tensor).abs().max())  # a NaN among them makes it NaN
    return largest <= _LIMITS.get(tensor.dtype, _LIMIT)


def moderate(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with zeros in place of what is not ordinary."""
    limit = _LIMITS.get(tensor.dtype, _LIMIT)
    return torch.where(tensor.abs() <= limit, tensor, torch.zeros((), dtype=tensor.dtype))


def extraordinary(candidate: Step) -> list[int]:
    """The inputs that are not ordinary."""
    items = (item for item in candidate.program.inputs if item.role != "rng")
    return [item.value for item in items if not is_ordinary(candidate.tensors[item.value])]


def uniform_rows(candidate: Step) -> dict[int, frozenset[float]]:
    """The numbers, 0 and 1, that fill whole rows of the buffers which hold masks: flags, or both 0 and 1 alone."""
    found = {}
    for item in candidate.program.inputs:
        tensor = candidate.tensors[item.value]
        if item.role == "buffer" and tensor.dim() and tensor.layout is torch.strided and not tensor.is_quantized:
            rows = {number: (tensor == number).all(-1).any() for number in (0.0, 1.0)}
            if bool((tensor == 0).any()) and bool((tensor == 1).any()) and bool(((tensor == 0) | (tensor == 1)).all()):
                found[item.value] = frozenset(number for number, is_there in rows.items() if bool(is_there))
    return found


def keeps_masks(candidate: Step, known: Mapping[int, frozenset[float]]) -> bool:
    """True if no mask has got a row of zeros or ones unlike the ``known`` rows of the start: a causal mask that hides
    all of a row would be another cause than the one of the step."""
    return not any(
        bool((tensor == number).all(-1).any())
        for value, rows in known.items()
        if (tensor := candidate.tensors.get(value)) is not None and tensor.dim() and tensor.numel()
        for number in {0.0, 1.0} - rows
    )


def keeps_biases(candidate: Step) -> bool:
    """True if every bias is as long as a dimension of the weight beside it: one that is broadcast is no layer's."""
    shapes = {item.name: candidate.tensors[item.value].shape for item in candidate.program.inputs}
    weights = ((name.removesuffix("bias") + "weight", shape) for name, shape in shapes.items() if name.endswith("bias"))
    return all(weight not in shapes or shape.numel() in shapes[weight] for weight, shape in weights)


@dataclass
class Choice:
    """The search for a slice; ``best`` is what it has come to, also when the budget ends early."""

    step: StepGraph
    failure: Failure
    oracle: Oracle
    best: Step | None = None
    shown: frozenset[int] = frozenset()

    def run(self) -> None:
        """Take the first slice that fails in the same way and is ordinary, brought to whole modules; else the least
        bad one."""
        least_bad = 4
        for piece in self._slices():
            candidate = piece.candidate(self.failure.value)
            if candidate is None or not self._is_same(candidate, f"{len(piece.kept)} calls around the origin"):
                continue
            self.best = self.best or candidate
            is_long = self.step.num_units(piece.kept) > _MAX_UNITS
            if not extraordinary(candidate):
                piece, candidate = self._without_modules(piece, candidate)
                if not is_long or self.step.num_units(piece.kept) <= _MAX_UNITS:
                    self.best = self._with_whole_modules(piece, candidate)
                    return
            elif not is_long:
                candidate = self._tamed(candidate)
            rank = 2 * bool(extraordinary(candidate)) + is_long
            if rank < least_bad:
                least_bad, self.best = rank, candidate
        if self.best is None:  # nothing with modules fails alone: what the minimum starts from
            self.best = self.oracle.first(cuts(self.step.whole, self.failure))

    def _tamed(self, candidate: Step) -> Step:
        """With zeros in place of the numbers that are not ordinary, if it fails without them: all, else one by one."""
        numbers = [value for value in extraordinary(candidate) if is_number(candidate.tensors[value])]
        for values in (numbers, *([value] for value in numbers)):
            tame = candidate.with_tensors({value: moderate(candidate.tensors[value]) for value in values})
            if values and self._is_same(tame, "ordinary numbers"):
                candidate = tame
        return candidate

    def _slices(self) -> Iterator[StepSlice]:
        """Slices, likeliest first."""
        origin = self.failure.call_index
        if origin is None:
            return
        call = self.step.program.calls[origin]
        if call.is_optimizer_step:
            yield from self._around_parameter(origin)
        elif self.failure.phase == Phase.BACKWARD and self.failure.kind != "exception":
            yield from self._around_gradient(origin)
        elif self.step.is_forward(origin):
            yield from self._around_output(origin)

    def _within(self, index: int) -> Callable[[int], bool]:
        """True if a call runs in the module of another one, or in a child of it; in the loop, in the same function."""
        place = self.step.place(index)
        return lambda other: self.step.is_inside(other, place)

    def _around_output(self, origin: int) -> Iterator[StepSlice]:
        """What the origin depends on in its module, with more of where extraordinary inputs come from; then more."""
        seen: set[tuple[int, ...]] = set()
        kept = self._own(origin)
        while len(kept) <= _MAX_CALLS:
            piece = StepSlice(self.step, self.step.connected(kept, origin, downstream=False))
            missing = self._causes(piece)
            if not missing or len(kept) + len(missing) > _MAX_CALLS:
                yield piece
                missing = self.step.upstream(kept, 2 * len(kept), lambda index: True)
            kept = list(dict.fromkeys((*kept, *missing)))
            if piece.kept in seen:
                return
            seen.add(piece.kept)

    def _own(self, origin: int) -> list[int]:
        """What the origin depends on in its own module or function; at least a few calls, if it is in the loop."""
        kept = self.step.upstream([origin], _OWN_CALLS, self._within(origin))
        if self.step.place(origin)[0] or self.step.num_units(kept) >= _FEW:
            return kept
        more = self.step.upstream(kept, _FEW, lambda index: not self.step.program.calls[index].scope)
        self.shown = frozenset(more)
        return more

    def _causes(self, piece: StepSlice) -> list[int]:
        """Where inputs that are not ordinary came from: calls of the module that made them."""
        candidate = piece.candidate(None)
        found: list[int] = []
        calls = self.step.program.calls
        for value in extraordinary(candidate) if candidate is not None else ():
            reader = piece.boundary().get(value)
            makers = self.step.producers(reader) if reader is not None else []
            maker = next((i for i in makers if value in calls[i].output_refs() and self.step.is_forward(i)), None)
            if maker is not None:
                found += self.step.upstream([maker], _GROWTH, self._within(maker))
        return [index for index in dict.fromkeys(found) if index not in piece.kept]

    def _around_gradient(self, origin: int) -> Iterator[StepSlice]:
        """What the origin depends on, and what depends on it as far as its module returns it; less, if that is much;
        then ever more."""
        own, is_inside = self._own(origin), self._within(origin)
        later = self.step.downstream(origin, _OWN_CALLS, is_inside)
        sides = self.step.upstream(later, 2 * _OWN_CALLS, is_inside)
        kept = list(dict.fromkeys((*own, *later, *sides)))
        if self.step.num_units(kept) > _MAX_UNITS:
            for limit in (_OWN_CALLS, _OWN_CALLS // 4, 1):
                yield from self._explained(self.step.upstream([origin], limit, is_inside), origin)
        while len(kept) <= _MAX_CALLS:
            yield self._differentiated(kept, origin)
            before, limit = len(kept), 2 * len(kept)
            later = self.step.downstream(origin, limit, lambda index: True)
            kept = list(dict.fromkeys((*kept, *later, *self.step.upstream([*later, *kept], limit, lambda index: True))))
            if len(kept) == before:
                return

    def _explained(self, kept: list[int], origin: int) -> Iterator[StepSlice]:
        """A slice for a gradient, with more of where extraordinary inputs come from while it does not get too long."""
        while self.step.num_units(kept) <= _MAX_UNITS:
            piece = self._differentiated(kept, origin)
            yield piece
            causes = self._causes(piece)
            if not causes:
                return
            kept = [*piece.kept, *causes]

    def _differentiated(self, kept: list[int], origin: int) -> StepSlice:
        return StepSlice(self.step, self.step.connected(kept, origin, downstream=True), is_differentiated=True)

    def _around_parameter(self, update: int) -> Iterator[StepSlice]:
        """The layer that holds the parameter which turned bad, then the module around it."""
        calls = self.step.program.calls
        users = [i for i, c in enumerate(calls) if self.failure.value in c.input_refs() and self.step.is_forward(i)]
        if not users:
            return
        for limit in (1, _OWN_CALLS):
            kept = self.step.upstream(users, limit, self._within(users[0]))
            yield StepSlice(self.step, tuple(sorted(kept)), is_differentiated=True, update=update)

    def _without_modules(self, piece: StepSlice, candidate: Step) -> tuple[StepSlice, Step]:
        """The slice without what lies outside the origin's own module: whole modules, largest first, then calls of
        modules too large to be shown whole."""
        origin = self.failure.call_index
        assert origin is not None
        own, is_inside = self.step.program.calls[origin].scope, self._within(origin)
        groups: dict[tuple[object, ...], list[int]] = {}
        for index in piece.kept:
            scope = self.step.program.calls[index].scope
            for depth in range(1, len(scope) + 1):
                if scope[:depth] != own[:depth] and not self.step.is_own_layer(scope[:depth], origin):
                    groups.setdefault(scope[:depth], []).append(index)
            is_small = self.step.size_of(self.step.place(index)) <= _SMALL_MODULE
            if not (is_small or index in self.shown or is_inside(index)):
                groups.setdefault((index,), list(self.step.units[index]))
        for group in sorted(groups.values(), key=lambda members: -len(members)):
            kept = tuple(index for index in piece.kept if index not in group)
            if piece.update is None and origin in kept:
                kept = self.step.connected(kept, origin, downstream=piece.is_differentiated)
            if kept and kept != piece.kept and (origin in kept or piece.update is not None):
                piece, candidate = self._better(replace(piece, kept=kept), "without a module") or (piece, candidate)
        return piece, candidate

    def _with_whole_modules(self, piece: StepSlice, candidate: Step) -> Step:
        """Small modules whole, where the slice starts in the middle of one."""
        for place in dict.fromkeys(self.step.place(index) for index in piece.kept):
            if place[0] and self.step.size_of(place) <= _SMALL_MODULE:
                inside = [index for index in piece.kept if self.step.is_inside(index, place)]
                whole = self.step.upstream(inside, _MAX_CALLS, self._within(inside[0]))
                kept = tuple(sorted({*piece.kept, *whole}))
                if kept != piece.kept:
                    piece, candidate = self._better(replace(piece, kept=kept), "a whole module") or (piece, candidate)
        return candidate

    def _better(self, piece: StepSlice, change: str) -> tuple[StepSlice, Step] | None:
        """A slice with its candidate, if it is ordinary and fails the same way."""
        found = piece.candidate(self.failure.value)
        if found is None or extraordinary(found) or not self._is_same(found, change):
            return None
        return piece, found

    def _is_same(self, candidate: Step, change: str) -> bool:
        return self.oracle.check(candidate, change) is Ruling.SAME


_MAX_ENDS = 4
_FIRST_OF_KERNEL = 2  # of a weight's dimensions, behind those of channels
_PROBABILITIES = frozenset({"p", "dropout", "dropout_p"})


def is_written(candidate: Step, group: Class) -> bool:
    """True if a class of sizes holds a kernel, a size that the user wrote, or what a recurrent layer is made of, whose
    gates and layers are multiples."""
    calls = candidate.program.calls
    layers = {value for call in calls if call.target in RECURRENT for value in call.input_refs()[1:]}
    kernels = {ref.value for call in calls if "conv" in call.name for ref in iter_refs(call.args[1:2])}
    return any(
        member.value in layers or (member.value in kernels and member.axis >= _FIRST_OF_KERNEL) for member in group.axes
    )


def with_certainty(candidate: Step, index: int) -> Step | None:
    """With a probability of 0 in a random call; ``None`` for one that has no such argument."""
    call = candidate.program.calls[index]
    names = parameters_of(call.target)
    name = next((name for name in names if name in _PROBABILITIES), None)
    if name is None:
        return None
    place, mode = names.index(name), replace(call.mode, rng=None)
    if place < len(call.args):
        return candidate.with_call(index, replace(with_leaf(call, (0, place), 0.0), mode=mode))
    return candidate.with_call(index, replace(call, kwargs={**call.kwargs, name: 0.0}, mode=mode))


def without_unused(candidate: Step) -> Step:
    """Without the calls whose results nothing uses; in-place calls stay, for they may write through a view."""
    step, program = StepGraph(candidate), candidate.program
    ends = {ref.value for ref in program.outputs}
    used = [
        index
        for index, call in enumerate(program.calls)
        if is_in_place(call.target) or not step.is_forward(index) or ends & written(call)
    ]
    kept = set(step.upstream(used, len(program.calls) + 1, lambda index: True))
    return candidate.with_calls(call for index, call in enumerate(program.calls) if index in kept).pruned()


def ending_earlier(candidate: Step, origin: int, *, in_sum: bool) -> Iterator[Step]:
    """With the backward pass from something between the origin and the end, nearest to the origin first: from its sum,
    or with the gradient that arrives there.

    Nothing for a candidate that does not end in its only backward pass, from given gradients.
    """
    program, step = candidate.program, StepGraph(candidate)
    others = [call for call in program.calls if call.is_differentiation or call.is_optimizer_step]
    if len(others) != 1 or program.calls[-1].target != AUTOGRAD_BACKWARD:
        return
    later = step.downstream(origin, len(program.calls), lambda index: True)
    ends = [i for i in later if i == step.units[i][-1] and len(program.calls[i].output_refs()) == 1][:_MAX_ENDS]
    gradients = {} if in_sum else record(candidate, frozenset(ends)).gradients
    new = Ref(program.next_value())
    item = Input(new.value, "gradient", "gradient")
    given = candidate.with_calls(program.calls, inputs=(*program.inputs, item))
    for value in (Ref(program.calls[index].output_refs()[0]) for index in ends):
        if in_sum:
            total = Call("torch.Tensor.sum", (value,), outputs=new)
            backward = Call(BACKWARD, (new,), phase=Phase.BACKWARD)
            yield without_unused(candidate.with_call(len(program.calls) - 1, total, backward))
        elif value.value in gradients:
            backward = replace(program.calls[-1], args=([value], [new]))
            ended = given.with_call(len(program.calls) - 1, backward)
            yield without_unused(ended.with_tensors({new.value: gradients[value.value][-1]}))


def with_sum(candidate: Step) -> Step | None:
    """With ``out.sum().backward()``; ``None`` unless it ends in a backward pass from given gradients."""
    program = candidate.program
    place = next((i for i, call in enumerate(program.calls) if call.target == AUTOGRAD_BACKWARD), None)
    if place is None or len(program.calls[place].args) != 2:
        return None
    call = program.calls[place]
    value = candidate.program.next_value()
    added: list[Call] = []
    total: Ref | None = None
    for start, gradient in zip(*call.args, strict=True):
        term = start
        if candidate.tensors[gradient.value].dim():
            term, value = Ref(value), value + 1
            added.append(Call("torch.Tensor.sum", (start,), outputs=term))
        if total is not None:
            added.append(Call("torch.Tensor.add", (total, term), outputs=Ref(value)))
            term, value = Ref(value), value + 1
        total = term
    return candidate.with_call(place, *added, Call(BACKWARD, (total,), phase=Phase.BACKWARD)).pruned()


def module_runs(candidate: Step) -> list[tuple[tuple[Scope, ...], frozenset[int]]]:
    """The scopes of every run of a module and the calls in it, largest first."""
    runs: dict[tuple[Scope, ...], set[int]] = {}
    for index, call in enumerate(candidate.program.calls):
        for depth in range(1, len(call.scope) + 1):
            runs.setdefault(call.scope[:depth], set()).add(index)
    found = [(scope, frozenset(members)) for scope, members in runs.items()]
    return sorted(found, key=lambda run: (-len(run[1]), min(run[1])))


def without_module(candidate: Step, run: frozenset[int], shapes: Mapping[int, tuple[int, ...]]) -> Iterator[Step]:
    """The candidate without a run of a module, with something it was given in place of the one thing it returned."""
    program = candidate.program
    made = {value for index in run for value in program.calls[index].output_refs()}
    others = [call for index, call in enumerate(program.calls) if index not in run]
    needed = {value for call in others for value in call.input_refs()} | {ref.value for ref in program.outputs}
    leaving = sorted(made & needed)
    if len(leaving) != 1 or any(is_in_place(program.calls[index].target) for index in run):
        return
    kept = {item.value for item in program.inputs if item.role in ("parameter", "buffer")}  # is no activation
    read = dict.fromkeys(value for index in sorted(run) for value in program.calls[index].input_refs())
    for value in read:
        if value not in made | kept and shapes.get(value) == shapes.get(leaving[0]):
            yield candidate.without_calls(run, {leaving[0]: Ref(value)})


def without_call(candidate: Step, index: int) -> Step | None:
    """The candidate with the one tensor that a call was given in place of the one that it returned."""
    call = candidate.program.calls[index]
    outputs, inputs = call.output_refs(), list(iter_refs((call.args, call.kwargs)))
    if len(outputs) != 1 or len(inputs) != 1:
        return None
    return candidate.without_calls((index,), {outputs[0]: inputs[0]})
