"""Nothing is wrong, and nothing is learned: what neither a value nor an exception shows.

Looked at when the first copy of the state is due, and at the end of the run; in between nothing is done. A parameter
may rest for a while by design: the first look reports only what holds for a whole optimizer, the last one what has not
moved since. One without a gradient is reported where a call or a line of the source keeps it back, so no unused head.
"""

from __future__ import annotations

import ast
import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from reprokit.capture.calls import Backward, Collective, Function, OptimizerStep, Root, ScaleLoss, Unscale, ZeroGrad
from reprokit.capture.cut_lines import cut_line, has, place_of, region_around
from reprokit.capture.early_warning import EventStep
from reprokit.capture.meters import FIRST_STEPS, is_capturing
from reprokit.capture.save import Verdict
from reprokit.capture.tape import Op, Segment
from reprokit.capture.tensor_names import names_of, parameter_names
from reprokit.compare.healthy import blocked
from reprokit.compare.quantity import norms_of, number_of, update_of
from reprokit.errors import ignored_errors, pass_on
from reprokit.locate.failure import Failure
from reprokit.locate.ways import HALVES
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Phase, Program
from reprokit.program.sites import called_name, kind_of_file, line_of
from reprokit.program.step import Step
from reprokit.series.events import Silence
from reprokit.series.timeline import parameters_of
from reprokit.words import counted, listed, number_words

if TYPE_CHECKING:
    from reprokit.capture.loop import Loop
    from reprokit.capture.session import Session

_SAME = 20  # losses in a row that are equal in all bits; of other batches two hardly are
_SHOWN = 3  # names in a line
_MOST_PLAYED = 8  # modules without a gradient for which a call is looked for
_FAINT = 1e-5  # of the loss: less would come of a change of all weights by themselves, at a gradient of rounding
_MOVES = 1e-4  # of the norm of all parameters: more changes a loss that depends on them
_LEAST_CHANGED = 16  # elements that tell an old cast of a weight from a new one
_VANISHED = 1e-10  # of the largest gradient of a weight: less than Adam's eps beside it
_MOSTLY = 0.9  # of the units of a layer
_LEAST_UNITS = 20
_OF_ONE_CLASS = ("softmax", "cross_entropy")  # whose loss is 0 from the start
_FLAT = ("softmax", "norm", "round", "floor", "ceil", "sign")  # of one element, or of steps: by no accident of a layer
_WAS_FAINT = (-1.0, -1)  # in the place of norm and version
Report = Callable[[Silence, FrameType | None, Path | None], Path | None]
Optimizer = torch.optim.Optimizer


class Silent:
    """Looks at a run. ``report`` prints or saves each finding; it is given the file that an earlier one has made."""

    def __init__(self, session: Session, loop: Loop, report: Report) -> None:
        self._session, self._loop, self._report = session, loop, report
        self._has_looked = False
        self._told: Any = weakref.WeakSet()  # optimizers, and the loop for what is of none
        # At the first look: norm and version of parameters without a gradient, the units of weights without one
        self._idle: Any = WeakTensorKeyDictionary()
        self._dead: Any = WeakTensorKeyDictionary()

    def look_first(self, optimizer: Optimizer, frame: FrameType | None) -> None:
        """Look once, right after an optimizer's step; raises `CaptureStop` if the loop is to stop."""
        if not self._has_looked and self.look(optimizer, frame) is not None:
            self._session.stop()

    def look(self, optimizer: Optimizer | None, frame: FrameType | None) -> Path | None:
        """Look, right after the step of an ``optimizer``, ``None`` at the end of the run; the path of a file, if one
        was written. An error in here ends the look."""
        if self._loop.iterations.total < FIRST_STEPS or is_capturing():
            return None
        self._has_looked, path = True, None
        try:
            with self._session.replaying(ends=False):
                found = list(_Look(self._loop, frame, optimizer, self._idle, self._dead, self._told).findings())
        except Exception as error:
            pass_on(error)
            self._session.complain("could not look for what is not learned", error)
            return None
        for silence in found:
            path = self._report(silence, frame, path)
        return path


class _Look:
    """One look at the steps that are kept, and at the state of now: after the step of ``now``, or at the end."""

    def __init__(
        self, loop: Loop, frame: FrameType | None, now: Optimizer | None, idle: Any, dead: Any, told: Any
    ) -> None:
        self.loop, self.frame, self.now, self.idle, self.dead, self.told = loop, frame, now, idle, dead, told
        self.steps, self.modules, self.optimizers = loop.tape.segments(), loop.world.modules, loop.world.optimizers
        self.over = f"in {counted(loop.iterations.completed, 'step')}"
        self.copied: dict[int, torch.Tensor] = {}  # what the first copy that is kept holds
        for copy in loop.world.copies[:1]:
            self.copied = dict(zip(map(id, copy.contents.tensors), copy.contents.contents, strict=True))

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """Of parameters and optimizers, for a finding only: a frame keeps alive what was read of it."""
        return parameter_names(self.modules, self.frame) | names_of(self.optimizers, self.frame)

    def findings(self) -> Iterator[Silence]:
        """The most certain first; one of each optimizer, and one more."""
        last = self.steps[-1].mark if self.steps else self.loop.mark()
        for optimizer in self.optimizers:
            for find in (self._strangers, self._unscaled, self._without_gradient, self._rounding, self._fading):
                step = next((one for one in reversed(self.steps) if _op_of(one, optimizer) is not None), None)
                text = find(optimizer, step) if optimizer not in self.told else None
                if text is not None:
                    self.told.add(optimizer)
                    mark = step.mark if step is not None else last
                    yield Silence(text, mark.place, mark.step)
        for look in (self._skipped, self._stale_casts, self._bypassed, self._same_loss):
            text = look() if self.loop not in self.told else None
            if text is not None:
                self.told.add(self.loop)
                yield Silence(text, last.place, last.step)
        waiting = [p for one in self.optimizers for p in parameters_of(one) if _is_idle(one, p)]
        norms = norms_of([p.detach() for p in waiting])
        self.idle.update({p: (norm, p._version) for p, norm in zip(waiting, norms, strict=True)})

    def _strangers(self, optimizer: Optimizer, step: Segment | None) -> str | None:
        """No module has its parameters any more, or they are frozen, and others are trained that no optimizer has."""
        of_models = {id(p): p for root in self.modules for p in root.parameters()}
        known = {id(p) for one in self.optimizers for p in parameters_of(one)}
        new = [p for p in of_models.values() if p.requires_grad and p.grad is not None and id(p) not in known]
        own, idle = parameters_of(optimizer), [p for p in parameters_of(optimizer) if p.grad is None]
        gone = [p for p in idle if p.requires_grad and id(p) not in of_models]
        is_all = len(gone) + sum(not p.requires_grad for p in idle) == len(own)
        if new and gone and not is_all:  # a module that is still there may be called later, as the head of a task
            modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
            waiting = {id(p) for one in modules for p in torch.nn.Module.parameters(one, recurse=False)}
            gone = [p for p in gone if id(p) not in waiting]
        if not new or not (gone or is_all):
            return None
        count = f"{len(gone)} of the {len(own)} parameters of {self._name(optimizer)} are none of the model"
        lead = f"{self._name(optimizer)} holds no parameter of the model that is trained" if is_all else count
        return f"{lead}, and no optimizer holds {self._listed(new)}, which have a gradient"

    def _unscaled(self, optimizer: Optimizer, step: Segment | None) -> str | None:
        own = [(one.ops, op) for one in self.steps if (op := _op_of(one, optimizer)) is not None]
        for ops, op in own:
            scaled = [n for n, one in enumerate(ops) if one.kind is ScaleLoss]
            later = ops[scaled[-1] :] if scaled and not op.note.scaler else []
            is_written = any(one.kind is Function and one.note is not None and one.note.is_write for one in later)
            if not later or is_written or any(one.kind is Unscale for one in later):  # the loop may divide them itself
                return None
        lead = f"{self._name(optimizer)} steps with gradients of a scaled loss" if own else ""
        return f"{lead}, and the grad scaler has checked none of them; {_place(own[-1][1])}" if own else None

    def _without_gradient(self, optimizer: Optimizer, step: Segment | None) -> str | None:
        trained = [p for p in parameters_of(optimizer) if p.requires_grad]
        if optimizer is self.now:
            resting = [p for p in trained if _is_idle(optimizer, p)]
        else:
            resting = [p for p in trained if self.now is None and self._has_rested(optimizer, p)]
        if resting and len(resting) == len(trained):
            found = _cleared(step, optimizer) or self._cut(step, resting) or self._blocking(step, resting[0])
            lead = f"no gradient has reached any of the {counted(len(resting), 'parameter')} of {self._name(optimizer)}"
            return "; ".join(filter(None, [f"{lead} {self.over}", found]))
        groups: dict[str, list[torch.Tensor]] = {}
        for p in resting if self.now is None else ():
            groups.setdefault(self.names.get(id(p), "").rpartition(".")[0], []).append(p)
        some = list(groups.values())[:_MOST_PLAYED]
        reasons = [(self._blocking(step, group[0]) or self._cut(step, group), group) for group in some]
        cut = [p for reason, group in reasons if reason is not None for p in group]
        reason = next((reason for reason, _ in reasons if reason is not None), None)
        return f"no gradient has reached {self._listed(cut)} {self.over}; {reason}" if cut else None

    def _has_rested(self, optimizer: Optimizer, parameter: torch.Tensor) -> bool:
        """True if a parameter has no gradient, and has not moved since the first look."""
        norm, version = self.idle.get(parameter, (None, None))
        is_idle = version == parameter._version and _is_idle(optimizer, parameter)
        return is_idle and bool(norms_of([parameter.detach()])[0] == norm)

    def _rounding(self, optimizer: Optimizer, step: Segment | None) -> str | None:
        """Gradients of rounding: of all parameters at the first look, or of the same weights at both."""
        dense = [p for p in parameters_of(optimizer) if p.grad is not None and p.grad.layout is torch.strided]
        losses = {row.place: row.loss for row in self.loop.timeline.after(-1)}
        is_looked_at = step is not None and dense and self.now in (None, optimizer)
        loss = number_of(losses.get(step.mark.place)) if step is not None and is_looked_at else None
        if loss is None or not math.isfinite(loss):
            return None
        gradients = norms_of([p.grad.detach() for p in dense if p.grad is not None])
        pairs = list(zip(dense, gradients, norms_of([p.detach() for p in dense]), strict=True))
        faint = [p for p, gradient, weight in pairs if p.dim() > 1 and gradient * weight <= _FAINT * abs(loss)]
        gradient, weight = math.hypot(*gradients), math.hypot(*(pair[2] for pair in pairs))
        if self.now is optimizer and gradient * weight <= _FAINT * abs(loss):
            only = ("",) if loss else _OF_ONE_CLASS  # 0 is what many losses end at
            reason = self._blocking(step, max(dense, key=torch.Tensor.dim), only)
            norm = f"only rounding (norm {number_words(gradient)} beside {number_words(weight)} of the weights)"
            lead = f"the gradients of all {counted(len(dense), 'parameter')} of {self._name(optimizer)} are"
            return f"{lead} {norm if gradient else 'zero'}; {reason}" if reason else None
        both = [p for p in faint if self.idle.get(p) == _WAS_FAINT]
        self.idle.update({p: _WAS_FAINT for p in faint if self.now is optimizer})
        reason = self._blocking(step, both[0], _FLAT) if both and self.now is None and loss else None
        return f"the gradient of {self._listed(both)} is zero or rounding {self.over}; {reason}" if reason else None

    def _fading(self, optimizer: Optimizer, step: Segment | None) -> str | None:
        """A gradient that vanishes on the way to the first layers, underflows in float16, or does not reach most units
        of a layer at either look: units of the last one may be chosen, as actions are."""
        weights = [p for p in parameters_of(optimizer) if p.dim() > 1 and p.grad is not None]
        given = [(p, p.grad.detach()) for p in weights if p.grad is not None and p.grad.layout is torch.strided]
        norms = norms_of([gradient for _, gradient in given])
        known = sorted((norm, n) for n, norm in enumerate(norms) if 0 < norm < math.inf)
        is_first = optimizer is self.now
        if is_first and known and known[0][0] < _VANISHED * known[-1][0]:
            (low, first), (high, last) = known[0], known[-1]
            names = [self.names.get(id(given[n][0]), "a weight") for n in (first, last)]
            ratio = f"{number_words(low / high)} times that of `{names[1]}` ({number_words(high)})"
            return f"the gradient of `{names[0]}` vanishes: its norm is {number_words(low)}, {ratio}"
        modules = (m for root in self.modules for m in root.modules())
        own = {id(m.weight) for m in modules if isinstance(m, (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d))}
        modes = [op.mode.autocast for op in step.ops if op.kind is Root] if step is not None else []
        is_half = any(name == "torch.float16" for mode in modes for _, name in mode) and not self.loop.scalers.is_used
        for n, (p, gradient) in enumerate(given[:-1]):
            if not norms[n] > 0 or id(p) not in own or len(gradient) < _LEAST_UNITS:
                continue
            empty = gradient.flatten(1) == 0
            dead = empty.all(1)
            largest = float(gradient.abs().max())
            is_low = largest < torch.finfo(torch.float16).tiny and bool(empty.any())
            if is_first and is_low and (is_half or gradient.dtype is torch.float16):
                lead = f"the gradient of `{self.names.get(id(p))}` underflows in float16"
                lead = f"{lead}: it is {number_words(largest)} at most"
                return f"{lead}, {float(empty.double().mean()):.1%} of it zero, and there is no grad scaler"
            both = float((dead & self.dead[p]).double().mean()) if p in self.dead else 0.0
            if is_first:
                self.dead[p] = dead
            elif self.now is None and both > _MOSTLY:
                name = self.names.get(id(p), "a weight").rpartition(".")[0]
                return f"{both:.1%} of the units of `{name}` have got no gradient {self.over}"
        return None

    def _cut(self, step: Segment | None, parameters: Sequence[torch.Tensor]) -> str | None:
        """A line of the source that cuts the way from the loss to the model: of the loop if no parameter of the model
        has a gradient, or of a module's forward."""
        ops, known = step.ops if step is not None else [], set(map(id, parameters))
        start = next((op for op in reversed(ops) if op.kind is Backward), None)
        for op in ops if start is not None else ():
            own = {id(p) for p in op.target.parameters() if p.requires_grad} if op.kind is Root else set()
            if known.isdisjoint(own):
                continue
            found = _loop_cut(op, start) if own <= known else None
            found = found or next(filter(None, map(_forward_cut(known), op.target.modules())), None)
            if found is not None:
                return f"the graph is cut at {found}"
        return None

    def _blocking(self, step: Segment | None, parameter: torch.Tensor, only: tuple[str, ...] = ()) -> str | None:
        """The call of a step that is played which passes no gradient on to a parameter; with ``only`` nothing but
        rounding, and a part of its name is one of these."""
        found: Failure | None = None

        def see(program: Program, tensors: Tensors) -> Failure:
            nonlocal found
            owned = (item.value for item in program.inputs if item.role == "parameter")
            value = next((value for value in owned if tensors[value].data_ptr() == parameter.data_ptr()), None)
            found = blocked(Step(program, tensors), Failure(Phase.BACKWARD, "dead", value=value), is_all=bool(only))
            return found

        if self.loop.ranks.is_alone and step is not None:
            with ignored_errors():  # the user's code may not run again with the state of then
                EventStep(self.loop, Verdict("gradient", self.frame), ()).explained_by(see, step.mark.place)
        if found is None or found.call is None or not any(part in found.call for part in only or ("",)):
            return None
        module = f" in `{found.module}`" if found.module and not found.module.startswith("<") else ""
        site = f", {found.site.file}:{found.site.line}: {found.site.code.strip()}" if found.site is not None else ""
        return f"`{found.call}` lets no gradient through{module}{site}"

    def _skipped(self) -> str | None:
        total = self.loop.iterations.total
        is_all = self.now is None and total >= _SAME and self.loop.scalers.num_skipped >= total
        words = f"the grad scaler has left out all {total} steps: every gradient had an infinity or a NaN"
        return words if is_all else None

    def _stale_casts(self) -> str | None:
        """Autocast's cache holds what a weight was before the first update."""
        root = next((op for step in self.steps for op in step.ops if op.kind is Root and op.mode.autocast), None)
        own = parameters_of(self.now) if self.now is not None and torch.is_autocast_cache_enabled() and root else []
        own = [p for p in own if p.dim() > 1 and id(p) in self.copied and torch.is_autocast_enabled(p.device.type)]
        for p in sorted(own, key=lambda p: p.numel() * p.shape[-1])[:_MOST_PLAYED]:
            dtype = torch.get_autocast_dtype(p.device.type)
            old, now = self.copied[id(p)].to(p.device, dtype), p.detach().to(dtype)
            if p.dtype is torch.float32 and (old != now).sum() >= _LEAST_CHANGED:
                with torch.enable_grad():  # as in a forward: the cache keeps what is cast here
                    read = torch.matmul(p, torch.eye(p.shape[-1], device=p.device)).detach()
                if torch.equal(read, old) and root is not None and root.code is not None:
                    region = region_around(root.code, line_of(root.code, root.instruction), "autocast")
                    lead = f"autocast still uses the cast of `{self.names.get(id(p))}` from before the first update"
                    return f"{lead}: it was entered once around all steps{region}"
        return None

    def _bypassed(self) -> str | None:
        distributed, wrapper = torch.distributed, torch.nn.parallel.DistributedDataParallel
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank() == 0):
            return None
        ops, met = [op for step in self.steps for op in step.ops], set(map(id, self.modules))
        called = {id(op.target): op for op in ops if op.kind is Root and op.mode.grad}
        around = [one for one in gc.get_objects() if type(one) is wrapper and id(one) not in met]
        inside = (id(part) for one in around for part in one.module.modules())
        op = next((called[key] for key in inside if key in called), None)
        if op is None or distributed.get_world_size() < 2 or any(one.kind is Collective for one in ops):
            return None  # the loop may average gradients itself
        lead = f"`DistributedDataParallel` is never called, and its module is, {_place(op)}"
        return f"{lead}: the {distributed.get_world_size()} ranks average no gradient"

    def _same_loss(self) -> str | None:
        by_seat: dict[int, list[Any]] = {}
        for row in self.loop.timeline.after(-1):
            by_seat.setdefault(row.seat.number, []).append(row.loss)
        for losses in by_seat.values() if not self.told else ():
            value, *others = [number_of(loss) for loss in losses[-_SAME:]]
            is_same = len(others) == _SAME - 1 and set(others) == {value}
            if is_same and value and math.isfinite(value) and not self._is_coarse(value):  # 0 is what many end at
                change = "the batch changes" if self._batch_changes() else "parameters move" if self._moves() else None
                lead = f"the loss is {number_words(value, 6)} in all bits in the last {_SAME} steps"
                return f"{lead} while {change}" if change is not None else None
        return None

    def _is_coarse(self, value: float) -> bool:
        """True if a loss may be one of half precision, which stands still while it falls slowly."""
        alive, exact = self.loop.tape.alive(), torch.tensor(value, dtype=torch.float64)
        starts = [op for step in self.steps[-1:] for op in step.ops if op.kind is Backward]
        made = [alive[n].dtype in HALVES for op in starts for n in op.ins if n in alive]
        return made[0] if made else any(exact.to(half).item() == value for half in HALVES)

    def _batch_changes(self) -> bool:
        alive, roots = self.loop.tape.alive(), [op for one in self.steps for op in one.ops if op.kind is Root][-2:]
        before, now = ([alive[n] for n in op.ins if n in alive] for op in (roots[0], roots[-1])) if roots else ([], [])
        return any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(before, now, strict=False))

    def _moves(self) -> bool:
        moved = [p for one in self.optimizers for p in parameters_of(one) if id(p) in self.copied and self.steps]
        return (update_of([self.copied[id(p)] for p in moved], [p.detach() for p in moved]) or 0.0) > _MOVES

    def _name(self, optimizer: Optimizer) -> str:
        return f"`{self.names[id(optimizer)]}`"

    def _listed(self, parameters: Sequence[torch.Tensor]) -> str:
        names = [f"`{self.names.get(id(p), 'a parameter')}`" for p in parameters]
        return listed([*names[:_SHOWN], *([f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else [])])


def _is_idle(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    """True if nothing is known of a gradient of a parameter that is to be trained."""
    is_plain = type(parameter) in (torch.nn.Parameter, torch.Tensor) and parameter.layout is torch.strided
    is_trained = is_plain and parameter.requires_grad and not parameter.is_meta
    return is_trained and parameter.grad is None and not optimizer.state.get(parameter)


def _op_of(step: Segment, optimizer: Optimizer) -> Op | None:
    return next((op for op in step.ops if op.kind is OptimizerStep and op.target is optimizer), None)


def _place(op: Op | None) -> str:
    return place_of(op.code, line_of(op.code, op.instruction)) if op is not None and op.code is not None else ""


def _cleared(step: Segment | None, optimizer: Optimizer) -> str | None:
    ops, used = step.ops if step is not None else [], _op_of(step, optimizer) if step is not None else None
    made = max((n for n, op in enumerate(ops) if op.kind is Backward), default=len(ops))
    is_cleared = used is not None and any(op.kind is ZeroGrad for op in ops[made:])
    return f"`zero_grad` clears them after the backward pass, before {_place(used)}" if is_cleared else None


def _loop_cut(root: Op, start: Op | None) -> str | None:
    """The line that cuts the way from a backward call to a model, in the functions that call these."""
    if start is None or root.code is None or start.code is None:
        return None
    called, started = line_of(root.code, root.instruction), line_of(start.code, start.instruction)
    outer, inner = start.code.co_name, root.code.co_name

    def is_root(node: Any) -> bool:
        return isinstance(node, ast.Call) and has(node, called)

    if root.code is start.code:
        return cut_line(root.code, lambda node: has(node, started), is_root)
    found = cut_line(root.code, lambda node: any(called_name(n) == outer for n in ast.walk(node)), is_root)
    found = found or cut_line(root.code, lambda node: isinstance(node, ast.Return), is_root)
    return found or cut_line(start.code, lambda node: has(node, started), lambda node: called_name(node) == inner)


def _forward_cut(known: set[int]) -> Callable[[torch.nn.Module], str | None]:
    """What finds the line of a module's forward that cuts the way to parameters of its parts, given by ``id``."""

    def find(module: torch.nn.Module) -> str | None:
        code: Any = getattr(type(module).forward, "__code__", None)
        parts = [(name, list(part.parameters())) for name, part in module.named_children()]
        parts += [(name, [p]) for name, p in module.named_parameters(recurse=False)]
        wanted = {f"self.{name}" for name, own in parts if any(id(p) in known for p in own)}
        if not wanted or not isinstance(code, CodeType) or kind_of_file(code.co_filename) != "user":
            return None
        is_part = lambda node: isinstance(node, ast.Attribute) and ast.unparse(node) in wanted  # noqa: E731
        return cut_line(code, lambda node: isinstance(node, ast.Return), is_part)

    return find
