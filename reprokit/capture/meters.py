"""Numbers that training does not compute: of every parameter while it runs (`--record`), and of steps that are played.

While the training runs, never more than a small share of the time is taken on ``auto``: after every measurement the
meter waits until its own cost is paid for. It takes fused norms over all gradients, all weights and their changes, for
which it copies the weights before the update, and waits for a device a few times. Played steps cost nothing until
somebody asks.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.weak import WeakTensorKeyDictionary

from reprokit import members, native
from reprokit.capture.calls import Backward, Clip, OptimizerStep, Unscale
from reprokit.capture.mode import unseen
from reprokit.capture.replay import PlayObserver, Replay
from reprokit.capture.structure import iter_leaves, iter_tensors
from reprokit.capture.tape import Mark, Number, Op
from reprokit.capture.world import DEFAULT_STATE_BYTES
from reprokit.compare.quantity import norm_of, norms_of, numbers_of, share_of_zeros, update_of
from reprokit.errors import UsageError, ignored_errors
from reprokit.locate.ranges import Range, measure
from reprokit.locate.ways import local_part
from reprokit.native import clock
from reprokit.series.story import LayerNumbers, RecordedStep, StepNumbers
from reprokit.series.timeline import TIMELINE_STEPS, parameters_of
from reprokit.words import user_path

AUTO_SHARE = 0.003  # of the time: with the work around it that stays below the 0.5% that is promised
_LEAST_STEPS = 10
_MOST_NUMBERS = 20_000  # of each kind in a file
FIRST_STEPS = 3  # a parameter that is used has a gradient in one of them
_FIRST_ON_AUTO = 1  # the first step of a training allocates the memory of gradients and kernels


class NormMeter:
    """Measures the parameters of an optimizer right after its step, when the gradients are still there; gradients that
    the loop clips right before that.

    ``record`` is ``auto``, ``N`` or ``N:PATTERN``; anything else raises `UsageError`. ``names`` gives the names of
    parameters by ``id``; it is called again for a parameter that is not in its result. ``say`` prints why it measures
    no more. ``hand_over`` is given the numbers of a step that was measured.
    """

    def __init__(
        self,
        record: str,
        names: Callable[[], Mapping[int, str]],
        say: Callable[[str], None],
        hand_over: Callable[[StepNumbers, RecordedStep], None],
    ) -> None:
        number, _, pattern = record.partition(":")
        if number != "auto" and not (number.isdigit() and int(number) >= 1):
            hint = "it is auto, a number of steps, or one with a pattern such as 10:h.0.*"
            raise UsageError(f"`record` cannot be {record!r}", hint=hint)
        self._every, self._pattern = None if number == "auto" else int(number), pattern or "*"
        self._ask_names, self._say, self._hand_over = names, say, hand_over
        self.steps: collections.deque[RecordedStep] = collections.deque()
        self._names = WeakTensorKeyDictionary()
        self._next = 0.0
        self._last_step = -1
        self._is_off = False
        self._before: dict[int, tuple[float, float]] = {}  # gradients before they were clipped, by ``id`` of parameters
        self._old: dict[int, torch.Tensor] = {}  # parameters before the update, by ``id``
        self._copied = 0.0  # seconds that this took

    def skip(self, seconds: float) -> None:
        """So much time has passed unwatched: it pays for nothing."""
        self._next += seconds

    def takes(self, name: str) -> bool:
        """True for a parameter that is to be measured."""
        return fnmatchcase(name, self._pattern)

    def before_clip(self, step: int, parameters: Any) -> None:
        """The loop is about to clip the gradients of these."""
        if self._is_due(step):
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
            self._before |= _measured(p for p in parameters if isinstance(p, torch.Tensor))

    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: copies of its parameters tell by how much it changes them."""
        self._old.clear()
        if self._before or self._is_due(step):
            started = clock.perf_counter()
            whole = {id(p): local_part(native.detach(p)) for p in parameters_of(optimizer) if p.requires_grad}
            if has_room(whole.values()):
                self._old = {key: native.clone(tensor) for key, tensor in whole.items()}
            self._copied = clock.perf_counter() - started

    def measure(self, step: int, optimizer: torch.optim.Optimizer) -> RecordedStep | None:
        """The numbers of an optimizer that has made its step, if it is to be measured. Waits for a device three
        times."""
        before, self._before = self._before, {}
        old, self._old = self._old, {}
        if not (before or old or self._is_due(step)):
            return None
        started = clock.perf_counter() - (self._copied if old else 0.0)
        parameters = [p for p in parameters_of(optimizer) if not p.is_meta]
        named = {name: p for p in parameters if self.takes(name := self._name(p))}
        clipped = _measured(parameters)
        unclipped = {key: before.get(key, pair) for key, pair in clipped.items()}
        with native.no_grad():
            weights = norms_of([local_part(native.detach(p)) for p in named.values()])
            changed = {id(p): local_part(native.detach(p)) for p in parameters if id(p) in old}
            sizes = dict(zip(old, norms_of(list(old.values())), strict=True))
            changes = dict(
                zip(changed, norms_of([native.sub(new, old[key]) for key, new in changed.items()]), strict=True)
            )
        size = math.hypot(*(sizes[key] for key in changes))
        ended = clock.perf_counter()
        self._next, self._last_step = ended + (ended - started) / AUTO_SHARE, step
        return RecordedStep(
            step,
            dict(zip(named, weights, strict=True)),
            {name: unclipped[id(p)][0] for name, p in named.items() if id(p) in unclipped},
            {name: unclipped[id(p)][1] for name, p in named.items() if id(p) in unclipped},
            math.hypot(*(norm for norm, _ in unclipped.values())),
            math.hypot(*(norm for norm, _ in clipped.values())) if before else None,
            {name: changes[id(p)] / sizes[id(p)] for name, p in named.items() if sizes.get(id(p))} or None,
            math.hypot(*changes.values()) / size if size else None,
        )

    def keep(self, row: RecordedStep, numbers: StepNumbers) -> None:
        """Remember the numbers of a step and hand them over; those of all optimizers of a step are one row."""
        self._hand_over(numbers, row)
        if self.steps and self.steps[-1].step == row.step:
            row = self.steps.pop().joined(row)
        if row.weight_norm or row.grad_norm:  # else no parameter of a step fits the pattern
            self.steps.append(row)
        if len(self.steps) > max(_LEAST_STEPS, min(TIMELINE_STEPS, _MOST_NUMBERS // max(1, len(row.weight_norm)))):
            self.steps.popleft()

    def _is_due(self, step: int) -> bool:
        if self._every is not None:
            is_due = step % self._every == 0
        else:  # every optimizer of a step is measured, or none
            is_due = step == self._last_step or (step >= _FIRST_ON_AUTO and clock.perf_counter() >= self._next)
        if is_due and not self._is_off and is_capturing():  # a graph would replay it; reading ends its capture
            self._is_off = True
            self._say("`--record` is off: the optimizer steps inside of a CUDA graph")
        return is_due and not self._is_off

    def _name(self, parameter: torch.Tensor) -> str:
        if parameter not in self._names:
            known: Mapping[int, str] = {}
            with ignored_errors():  # then the parameters have numbers for names
                known = self._ask_names()
            self._names[parameter] = known.get(id(parameter), f"parameter {len(self._names)}")
        return str(self._names[parameter])


def _measured(parameters: Iterable[torch.Tensor]) -> dict[int, tuple[float, float]]:
    """The norms of gradients and the shares of zeros in them, by the ``id`` of the parameter."""
    with native.no_grad():
        whole = {id(p): local_part(native.detach(p.grad)) for p in parameters if p.grad is not None}
        # of a sparse gradient the elements that are stored; the others are zero
        given = [
            native.values(native.coalesce(grad)) if grad.layout is torch.sparse_coo else grad for grad in whole.values()
        ]
        norms, counts = norms_of(given), numbers_of([native.count_nonzero(gradient) for gradient in given])
    zeros = (1 - count / max(1, native.numel(grad)) for count, grad in zip(counts, given, strict=True))
    return dict(zip(whole, zip(norms, zeros, strict=True), strict=True))


def has_room(tensors: Collection[torch.Tensor]) -> bool:
    """True if a copy of tensors is small, and takes less than half of what is free on their devices."""
    sizes: dict[torch.device, int] = {}
    for tensor in tensors:
        sizes[tensor.device] = sizes.get(tensor.device, 0) + native.numel(tensor) * native.element_size(tensor)
    far = {device: size for device, size in sizes.items() if device.type == "cuda"}
    is_small = sum(sizes.values()) <= DEFAULT_STATE_BYTES
    return is_small and all(2 * size < native.cuda_mem_get_info(device)[0] for device, size in far.items())


def is_capturing() -> bool:
    """True while a CUDA graph is captured on the stream of now."""
    return bool(native.cuda_is_initialized()) and native.cuda_is_current_stream_capturing()  # type: ignore[no-untyped-call]


# -- steps that are played -----------------------------------------------------------------------------------------


@dataclass
class MeasuredStep:
    """A step that was played. ``optimizer`` is the ``id`` of the one that made its update. ``zeros`` are the shares of
    zeros in gradients, by the ``id`` of the parameter, ``None`` for one that is trained and has no gradient. Layers
    have ``outputs`` and ``numbers``."""

    mark: Mark
    optimizer: int | None = None
    norm: float | None = None
    update: float | None = None
    zeros: dict[int, float | None] = field(default_factory=dict)
    outputs: dict[str, list[Range]] = field(default_factory=dict)
    numbers: dict[str, dict[str, float | None]] = field(default_factory=dict)


class Meter(PlayObserver):
    """Measures the steps that are played: all gradients and updates, or with ``layers``, which have names in the order
    of the model, these (their outputs while it is `watching`), up to the step ``last`` or one with another loss than in
    training. ``steps`` and, of layers, ``rows`` are what it has measured."""

    def __init__(
        self,
        alive: Mapping[Number, torch.Tensor],
        layers: Mapping[str, torch.nn.Module] | None = None,
        last: float = math.inf,
    ) -> None:
        self.steps: list[MeasuredStep] = []
        self.rows: list[LayerNumbers] = []
        self._alive, self._last = alive, last
        self._names = {id(layer): name for name, layer in (layers or {}).items()}
        self._parameters = {name: members.own_parameters(layer) for name, layer in (layers or {}).items()}
        self._weights: dict[int, torch.Tensor] = {}  # before an update

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Measure outputs of layers in here."""

        def see(module: torch.nn.Module, _: Any, output: Any) -> None:
            name = self._names.get(id(module))
            if name is not None and not native.is_compiling():
                with unseen(), native.no_grad():
                    found = [measure(tensor) for tensor in iter_tensors(output) if native.is_floating_point(tensor)]
                self.steps[-1].outputs.setdefault(name, []).extend(found)

        handle = register_module_forward_hook(see)
        try:
            yield
        finally:
            handle.remove()

    def begin(self, replay: Replay) -> bool:
        self.steps.append(MeasuredStep(replay.segment.mark))
        return replay.segment.mark.step > self._last

    def before(self, replay: Replay, op: Op) -> bool:
        """Measure gradients where they are complete and not yet clipped, and remember parameters."""
        step = self.steps[-1]
        if op.kind in (Clip, OptimizerStep) and step.norm is None and not self._names:
            parameters = self._given_to(op)
            with native.no_grad():
                gradients = {id(p): p.grad for p in parameters if p.grad is not None}
                step.norm = norm_of(gradients.values())
                step.zeros = {id(p): None for p in parameters if p.requires_grad}
                step.zeros |= {key: share_of_zeros(gradient) for key, gradient in gradients.items()}
        if op.kind is OptimizerStep:
            step.optimizer = id(op.target)
            self._weights = {id(p): native.clone(native.detach(p)) for p in parameters_of(op.target)}
        return False

    def after(self, replay: Replay, op: Op) -> bool:
        """Measure the gradients of layers where they are complete, and the change of weights."""
        step = self.steps[-1]
        with native.no_grad():
            for name, own in self._parameters.items():
                numbers = step.numbers.setdefault(name, {})
                gradients = [p.grad for p in own if p.grad is not None]
                if op.kind in (Backward, Unscale) and gradients:
                    numbers["gradient"] = norm_of(gradients)
                if op.kind is OptimizerStep and any(id(p) in self._weights for p in own):
                    numbers["update"] = self._update(own)
            if op.kind is OptimizerStep and not self._names:
                step.update = self._update(parameters_of(op.target))
        return False

    def end(self, replay: Replay) -> bool:
        if self._names and replay.other_losses:
            return True
        step = self.steps[-1]
        for name in self._names.values():
            outputs = step.outputs.get(name, [])
            known = {**step.numbers.get(name, {}), "activation": _largest(outputs)}
            if any(number is not None for number in known.values()):
                self.rows.append(LayerNumbers(step.mark.step, name, **known, zeros=_share_of_zeros(outputs)))
        return False

    def _update(self, parameters: Sequence[torch.Tensor]) -> float | None:
        pairs = [(self._weights[id(p)], native.detach(p)) for p in parameters if id(p) in self._weights]
        return update_of([old for old, _ in pairs], [new for _, new in pairs])

    def _given_to(self, op: Op) -> list[torch.Tensor]:
        if op.kind is OptimizerStep:
            return parameters_of(op.target)
        given = op.args[0] if op.args else op.kwargs.get("parameters", ())
        found = [self._alive[n] for n in iter_leaves(given, Number) if n in self._alive]
        return [*found, *iter_tensors(given)]


def layers_of(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The layers of a model with their paths."""
    for path, module in members.named_modules(root):
        if not members.children_names(module) or members.own_parameters(module):
            yield user_path(path), module


def _largest(outputs: Iterable[Range]) -> float | None:
    if any(found.num_nan for found in outputs):
        return math.nan
    return max((math.inf if found.num_inf else found.high or 0.0 for found in outputs), default=None)


def _share_of_zeros(outputs: Iterable[Range]) -> float | None:
    sizes = [(math.prod(found.shape), found.zeros) for found in outputs if found.zeros is not None]
    total = sum(size for size, _ in sizes)
    return sum(size * share for size, share in sizes) / total if total else None
