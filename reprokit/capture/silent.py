"""Nothing is wrong, and nothing is learned: what neither a value nor an exception shows.

Looked at when the first copy of the state is due, and at the end of the run; with `--on dead` also every 20 steps. A
parameter may rest for a while by design: the first look reports only what holds for a whole optimizer, a later one what
has got no gradient since, if a call of the step keeps it back: so no unused head.
"""

from __future__ import annotations

import functools
import gc
import linecache
import math
import statistics
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from reprokit import members, native, torch_private
from reprokit.capture.calls import Backward, Collective, Function, OptimizerStep, Root, ScaleLoss, Unscale, ZeroGrad
from reprokit.capture.early_warning import LEAST_SILENT, EventStep, without_gradient
from reprokit.capture.meters import FIRST_STEPS, is_capturing
from reprokit.capture.mode import played_unseen, unseen
from reprokit.capture.save import Verdict
from reprokit.capture.tape import Mark, Op, Segment
from reprokit.capture.tensor_names import names_of, parameter_names
from reprokit.compare.quantity import norms_of, number_of, update_of
from reprokit.errors import ignored_errors, pass_on
from reprokit.limits import CpuLimit
from reprokit.locate.failure import Failure
from reprokit.locate.kinds import DEAD, SILENT
from reprokit.locate.ways import HALVES
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Phase, Program, Site
from reprokit.program.sites import kind_of_file, make_site, relative_path
from reprokit.series.course import LEAST_PLAYED
from reprokit.series.events import Silence
from reprokit.series.timeline import parameters_of
from reprokit.words import counted, listed, number_words, quoted

if TYPE_CHECKING:
    from reprokit.capture.loop import Loop
    from reprokit.capture.session import Session

_SAME = 20  # losses in a row that are equal in all bits; of other batches two hardly are
_SHOWN = 3  # names in a line
_MOST_PLAYED = 8  # modules without a gradient for which a call is looked for
_PLAYED = 256  # steps, of those kept, that are looked at for the one in which a gradient ends
_SECONDS = 3.0  # of CPU time, to play steps at the end of a run that is watched for other failures
_DYING = 0.5  # of the elements of a gradient
_SUDDEN = 8  # steps in which a layer dies that does not fade out by design
_ABOUT = 0.75  # of the usual share of a gradient that is not zero
_FAINT = 1e-5  # of the loss: less would come of a change of all weights by themselves, at a gradient of rounding
_MOVES = 1e-4  # of the norm of all parameters: more changes a loss that depends on them
_LEAST_CHANGED = 16  # elements that tell an old cast of a weight from a new one
_VANISHED = 1e-10  # of the largest gradient of a weight: less than Adam's eps beside it
_MOSTLY = 0.9  # of the units of a layer
_LEAST_UNITS = 20
_OF_ONE_CLASS = ("softmax", "cross_entropy")  # whose loss is 0 from the start
_FLAT = ("softmax", "norm", "round", "floor", "ceil", "sign")  # of one element, or of steps: by no accident of a layer
Report = Callable[[Silence, FrameType | None, Path | None], Path | None]
Optimizer = torch.optim.Optimizer
Found = Silence | None


class Silent:
    """Looks at a run. ``report`` prints or saves each finding; it is given the file that an earlier one has made.

    ``norm`` is that of all gradients at the last look. ``finds_dead``: a gradient that ends is a finding too.
    """

    def __init__(self, session: Session, loop: Loop, report: Report, *, finds_dead: bool) -> None:
        self._session, self.loop, self._report, self.finds_dead = session, loop, report, finds_dead
        self.num_looks, self.norm = 0, 0.0
        self.told: Any = weakref.WeakSet()  # optimizers, and the loop for what is of none
        self.standing: Any = weakref.WeakSet()  # optimizers with a rate of 0 up to the first look
        # At the first look: norm and version of parameters without a gradient, those with one of rounding, the units of
        # weights without one
        self.idle: Any = WeakTensorKeyDictionary()
        self.faint: Any = WeakTensorKeyDictionary()
        self.units: Any = WeakTensorKeyDictionary()
        # Parameters without a gradient, or with one of zeros, at the last look, and in how many looks up to it
        self.resting: Any = WeakTensorKeyDictionary()
        self.played: Any = WeakTensorKeyDictionary()  # those for which kept steps were played

    def look_first(self, optimizer: Optimizer, frame: FrameType | None) -> None:
        """Look once, right after an optimizer's step; raises `CaptureStop` if the loop is to stop."""
        if not self.num_looks and self.look(optimizer, frame, is_last=False) is not None:
            self._session.stop()

    def look(self, optimizer: Optimizer | None, frame: FrameType | None, *, is_last: bool = True) -> Path | None:
        """Look, the first time right after the step of an ``optimizer``; the path of a file, if one was written. An
        error in here ends the look."""
        if self.loop.iterations.total < FIRST_STEPS or is_capturing():
            return None
        self.num_looks, path = self.num_looks + 1, None
        try:
            with self._session.replaying(ends=False), unseen():
                look = _Look(self, frame, optimizer, is_last=is_last)
                found, idle = list(look.findings()), look.without_gradient() if optimizer is not None else ""
        except Exception as error:
            pass_on(error)
            self._session.complain("could not look for what is not learned", error)
            return None
        if idle and not found:
            self._session.say(idle)
        for silence in found:
            path = self._report(silence, frame, path)
        return path


class _Look:
    """One look at the steps that are kept, and at the state of now: after the step of ``now``, or later."""

    def __init__(self, seen: Silent, frame: FrameType | None, now: Optimizer | None, *, is_last: bool) -> None:
        self.seen, self.loop, self.frame, self.now, self.is_last = seen, seen.loop, frame, now, is_last
        self.idle, self.told, loop = seen.idle, seen.told, seen.loop
        self.steps, self.modules, self.optimizers = loop.tape.segments(), loop.world.modules, loop.world.optimizers
        self.over = f"in {counted(loop.iterations.completed, 'step')}"
        self.copied: dict[int, torch.Tensor] = {}  # what the first copy that is kept holds
        for copy in loop.world.copies[:1]:
            self.copied = dict(zip(map(id, copy.contents.tensors), copy.contents.contents, strict=True))
        trained = [p for one in self.optimizers for p in parameters_of(one)]
        dense = [p for p in trained if p.grad is not None and p.grad.layout is torch.strided and native.numel(p.grad)]
        self.norms = {id(p): n for p, n in zip(dense, norms_of([_gradient(p) for p in dense]), strict=True)}
        seen.norm = math.hypot(*self.norms.values())
        resting = [p for p in trained if (p.requires_grad if p.grad is None else self.norms.get(id(p)) == 0)]
        seen.resting = WeakTensorKeyDictionary({p: seen.resting.get(p, 0) + 1 for p in resting})

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """Of parameters and optimizers, for a finding only: a frame keeps alive what was read of it."""
        return parameter_names(self.modules, self.frame) | names_of(self.optimizers, self.frame)

    def findings(self) -> Iterator[Silence]:
        """The most certain first; one of each optimizer, and one more."""
        finders = (
            self._strangers,
            self._unscaled,
            self._without_gradient,
            self._standing,
            self._ended,
            self._rounding,
            self._fading,
        )
        is_between = self.now is None and not self.is_last
        for optimizer in self.optimizers:
            for find in (self._strangers, self._ended) if is_between else finders:
                step = next((one for one in reversed(self.steps) if _op_of(one, optimizer) is not None), None)
                found = find(optimizer, step) if optimizer not in self.told else None
                if found is not None:
                    self.told.add(optimizer)
                    yield found
        for look in (self._skipped, self._stale_casts, self._bypassed, self._same_loss, self._unowned):
            other = look() if self.loop not in self.told and not is_between else None
            if other is not None:
                self.told.add(self.loop)
                yield other
        waiting = [p for p in self.seen.resting if self.now is not None and _is_plain(p)]
        norms = norms_of([native.detach(p) for p in waiting])
        self.idle.update({p: (norm, torch_private.version(p)) for p, norm in zip(waiting, norms, strict=True)})

    def _silence(self, text: str, step: Segment | None = None, origin: Failure | Site | None = None) -> Silence:
        """Something that a step shows, the last one if none is given, with the call or the line that it comes of."""
        mark = step.mark if step is not None else self.steps[-1].mark if self.steps else self.loop.mark()
        if not isinstance(origin, Failure):
            origin = Failure(Phase.BACKWARD, SILENT, site=origin)
        return Silence(text, mark.place, mark.step, origin)

    def _of(self, parameter: torch.Tensor, text: str, step: Segment | None, origin: Failure) -> Silence:
        """Of parameters that get no gradient, such as this one, with the call that keeps it back."""
        made = self._silence(f"{text}; {_reason(origin)}", step, origin)
        return made._replace(name=self.names.get(id(parameter), ""), key=id(parameter))

    def without_gradient(self) -> str:
        """For `--record`: the parameters, of those that fit its pattern, that have no gradient."""
        norms, resting = self.loop.norms, [p for p in self.seen.resting if p.grad is None]
        known = [p for p in resting if norms is not None and norms.takes(self.names.get(id(p), ""))]
        return f"no gradient has reached {self._listed(known)} at step {self.steps[-1].mark.step}" if known else ""

    def _strangers(self, optimizer: Optimizer, step: Segment | None) -> Found:
        """No module has its parameters any more, or they are frozen, and others are trained that no optimizer has."""
        of_models = {id(p): p for root in self.modules for p in members.parameters(root)}
        known = {id(p) for one in self.optimizers for p in parameters_of(one)}
        new = [p for p in of_models.values() if p.requires_grad and p.grad is not None and id(p) not in known]
        own, idle = parameters_of(optimizer), [p for p in parameters_of(optimizer) if p.grad is None]
        gone = [p for p in idle if p.requires_grad and id(p) not in of_models]
        is_all = len(gone) + sum(not p.requires_grad for p in idle) == len(own)
        if new and gone and not is_all:  # a module that is still there may be called later, as the head of a task
            modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
            waiting = {id(p) for one in modules for p in members.own_parameters(one)}
            gone = [p for p in gone if id(p) not in waiting]
        if not new or not (gone or is_all):
            return None
        count = f"{len(gone)} of the {len(own)} parameters of {self._name(optimizer)} are none of the model"
        lead = f"{self._name(optimizer)} holds no parameter of the model that is trained" if is_all else count
        text = f"{lead}, and no optimizer holds {self._listed(new)}, which have a gradient"
        alive, ids, calls = self.loop.tape.alive(), set(map(id, new)), ((s, op) for s in self.steps for op in s.ops)
        first = next((call for call in calls if any(id(alive.get(n)) in ids for n in call[1].ins)), None)
        if first is None or first[0] is self.steps[0]:  # it may be older
            return self._silence(text, step)
        site = _site(first[1])
        return self._silence(f"{text}, since step {first[0].mark.step}{_place(site)}", step, site)

    def _unowned(self) -> Found:
        """A group of an optimizer is empty, as of a generator that was used up, and parameters of its model get
        gradients, are in no optimizer and are what they were. Without such a group they may be left out on purpose."""
        empty = next((one for one in self.optimizers if any(not group["params"] for group in one.param_groups)), None)
        if empty is None or not self.is_last or self.told:
            return None
        known = {id(p) for one in self.optimizers for p in parameters_of(one)}
        own = [members.parameters(root) for root in self.modules]
        left = {id(p): p for of_root in own for p in of_root if not known.isdisjoint(map(id, of_root))}
        given = [p for key, p in left.items() if key not in known and p.requires_grad and key in self.copied]
        given = [p for p in given if p.grad is not None and p.grad.layout is torch.strided]
        given = [p for p in given if native.equal(native.to(self.copied[id(p)], p.device), native.detach(p))]
        if not given or 0.0 in norms_of([_gradient(p) for p in given]):
            return None
        words = f"no optimizer holds {self._listed(given)}, which have a gradient and have not moved"
        return self._silence(f"a group of {self._name(empty)} is empty, and {words}")

    def _unscaled(self, optimizer: Optimizer, step: Segment | None) -> Found:
        own = [(one.ops, op) for one in self.steps if (op := _op_of(one, optimizer)) is not None]
        for ops, op in own:
            scaled = [n for n, one in enumerate(ops) if one.kind is ScaleLoss]
            later = ops[scaled[-1] :] if scaled and not op.note.scaler else []
            is_written = any(one.kind is Function and one.note is not None and one.note.is_write for one in later)
            if not later or is_written or any(one.kind is Unscale for one in later):  # the loop may divide them itself
                return None
        if not own:
            return None
        site, lead = _site(own[-1][1]), f"{self._name(optimizer)} steps with gradients of a scaled loss"
        return self._silence(f"{lead}, and the grad scaler has checked none of them{_place(site)}", step, site)

    def _standing(self, optimizer: Optimizer, step: Segment | None) -> Found:
        """A learning rate of 0 at both looks and in all steps that are kept: a warm-up in whole numbers, for one."""
        made = [op for one in self.steps if (op := _op_of(one, optimizer)) is not None]
        rates = [group.get("lr") for op in made for group in op.note.options]
        if not rates or any(not isinstance(rate, (int, float)) or rate for rate in rates):
            return None
        if self.now is optimizer:
            self.seen.standing.add(optimizer)
        if self.now is not None or optimizer not in self.seen.standing:
            return None
        site, last = _site(made[-1]), counted(len(made), "step")
        words = f"the learning rate of {self._name(optimizer)} was 0 in the first steps, and is 0 in the last {last}"
        return self._silence(f"{words}{_place(site)}", step, site)

    def _without_gradient(self, optimizer: Optimizer, step: Segment | None) -> Found:
        trained = [p for p in parameters_of(optimizer) if p.requires_grad]
        is_first = optimizer is self.now
        resting = [p for p in trained if (_is_idle if is_first else self._has_rested)(optimizer, p) and p.grad is None]
        if not resting or len(resting) < len(trained) or (self.now is not None and not is_first):
            return None
        lead = f"no gradient has reached any of the {counted(len(resting), 'parameter')} of {self._name(optimizer)}"
        text, site = f"{lead} {self.over}", _cleared(step, optimizer)
        if site is not None:
            cleared = "`zero_grad` clears them after the backward pass, before the step"
            return self._silence(f"{text}; {cleared}{_place(site)}", step, site)
        reasons = self._reasons(next((one for one in self.steps if _op_of(one, optimizer) is not None), None), resting)
        first = next((p for p in resting if id(p) in reasons), None)
        return self._of(first, text, step, reasons[id(first)]) if first is not None else self._silence(text, step)

    def _has_rested(self, optimizer: Optimizer, parameter: torch.Tensor) -> bool:
        """True if a parameter has not moved since the first look, in which it had no gradient either. A decay may have
        moved one whose gradient is zero."""
        norm, version = self.idle.get(parameter, (None, None))
        is_still = bool(norms_of([native.detach(parameter)])[0] == norm)
        if parameter.grad is None:
            return is_still and version == torch_private.version(parameter) and _is_idle(optimizer, parameter)
        return is_still or (norm is not None and any(group.get("weight_decay") for group in optimizer.param_groups))

    def _ended(self, optimizer: Optimizer, step: Segment | None) -> Found:
        """A gradient that is zero or missing, since the first look, or from a step on that is kept.

        Kept steps are played once for each parameter: a part of a model may rest in turn with others, all the time.
        """
        looks, num_looks = self.seen.resting, self.seen.num_looks
        new = [p for p in parameters_of(optimizer) if p in looks and p not in self.seen.played]
        if not self.is_last:  # an unused head is no reason to play steps all the time
            new = [p for p in new if looks[p] > 1 and (p.grad is not None or looks[p] < num_looks)]
        always = {id(p) for p in new if looks[p] == num_looks and self._has_rested(optimizer, p)}
        if self.now is not None or not (new if self.seen.finds_dead else always):
            return None
        self.seen.played.update({p: True for p in new})
        for mark, is_dead, parameters in self._begun(new, always):
            begun = next(one for one in self.steps if one.mark.place == mark.place)
            reasons = self._reasons(begun, parameters)
            known = [p for p in parameters if id(p) in reasons and not _is_fit(reasons[id(p)])]
            if known:
                over = f"since step {mark.step}" if is_dead else self.over
                text = f"no gradient has reached {self._listed(known)} {over}"
                found = self._of(known[0], text, begun, reasons[id(known[0])])
                seen = max(self.loop.iterations.completed - 1, 0)
                return found._replace(kind="dead", seen=seen) if is_dead else found
        return None

    def _begun(self, wanted: Sequence[torch.Tensor], always: set[int]) -> list[tuple[Mark, bool, list[torch.Tensor]]]:
        """The steps with which gradients end, whether they were there before, and the parameters that are ``wanted``.

        In the step before less than half of a gradient was zero, and of those that end with it: a layer may fade out by
        design, unit by unit, as under a decay. One that has a gradient in some steps and none in others may rest by
        design, as the head of a task does, so a gradient that is missing has to have been there in every step before.
        """
        found: dict[int, tuple[Mark, bool, list[torch.Tensor]]] = {}
        faded = set[int]()  # the steps in which a layer ended by design
        for p in self.seen.resting:
            shares = [(one.mark, one.zeros[id(p)]) for one in self.measured if one.norm and id(p) in one.zeros]
            since = [mark for mark, _ in takewhile(lambda pair: pair[1] in (None, 1.0), reversed(shares))]
            before = [share for _, share in shares[: len(shares) - len(since)]]
            if since and before and _is_fading([share or 0.0 for share in before]):
                faded.add(since[-1].place)
                continue
            was_there = len(before) >= LEAST_PLAYED and all(share not in (None, 1.0) for share in before)
            is_dead = len(since) >= LEAST_SILENT and bool(before) and (shares[-1][1] is not None or was_there)
            is_told = is_dead and (self.seen.finds_dead or id(p) in always) if before else since and id(p) in always
            if is_told and any(p is one for one in wanted):
                found.setdefault(since[-1].place, (since[-1], bool(before), []))[2].append(p)
        return [entry for place, entry in sorted(found.items()) if place not in faded]

    @functools.cached_property
    def measured(self) -> list[Any]:
        """The kept steps, played; empty if that is not possible."""
        with ignored_errors(), played_unseen():  # `NotKept`, or of the user's code
            played = EventStep(self.loop, Verdict("gradient", self.frame), ())
            if self.seen.finds_dead:
                return played.measured(self.steps[:_PLAYED])
            return played.measured(self.steps[:LEAST_SILENT], CpuLimit(_SECONDS))
        return []

    def _rounding(self, optimizer: Optimizer, step: Segment | None) -> Found:
        """Gradients of rounding: of all parameters at the first look, or of the same weights at both."""
        dense = [p for p in parameters_of(optimizer) if id(p) in self.norms]
        losses = {row.place: row.loss for row in self.loop.timeline.after(-1)}
        is_looked_at = step is not None and dense and self.now in (None, optimizer)
        loss = number_of(losses.get(step.mark.place)) if step is not None and is_looked_at else None
        if loss is None or not math.isfinite(loss):
            return None
        gradients, weights = [self.norms[id(p)] for p in dense], norms_of([native.detach(p) for p in dense])
        pairs = list(zip(dense, gradients, weights, strict=True))
        faint = [p for p, gradient, weight in pairs if native.dim(p) > 1 and gradient * weight <= _FAINT * abs(loss)]
        gradient, weight = math.hypot(*gradients), math.hypot(*weights)
        if self.now is optimizer and gradient * weight <= _FAINT * abs(loss):
            first = [max(dense, key=native.dim)]
            only = ("",) if loss else _OF_ONE_CLASS  # 0 is what many losses end at
            reason = self._reasons(step, first, only).get(id(first[0]))
            norm = f"only rounding (norm {number_words(gradient)} beside {number_words(weight)} of the weights)"
            lead = f"the gradients of all {counted(len(dense), 'parameter')} of {self._name(optimizer)} are"
            both, text = first if reason is not None else [], f"{lead} {norm if gradient else 'zero'}"
        else:
            both = [p for p in faint if p in self.seen.faint]
            self.seen.faint.update({p: True for p in faint if self.now is optimizer})
            is_told = both and self.now is None and loss
            reason = self._reasons(step, both[:1], _FLAT).get(id(both[0])) if is_told else None
            text = f"the gradient of {self._listed(both)} is zero or rounding {self.over}" if both else ""
        if reason is None:
            return None
        found = self._of(both[0], text, step, reason)
        return found if self.norms[id(both[0])] == 0 else found._replace(key=None)

    def _fading(self, optimizer: Optimizer, step: Segment | None) -> Found:
        """A gradient that vanishes on the way to the first layers, underflows in float16, or does not reach most units
        of a layer at either look: units of the last one may be chosen, as actions are."""
        weights = [p for p in parameters_of(optimizer) if native.dim(p) > 1 and p.grad is not None]
        given = [(p, native.detach(p.grad)) for p in weights if p.grad is not None and p.grad.layout is torch.strided]
        norms = norms_of([gradient for _, gradient in given])
        known = sorted((norm, n) for n, norm in enumerate(norms) if 0 < norm < math.inf)
        is_first = optimizer is self.now
        if is_first and known and known[0][0] < _VANISHED * known[-1][0]:
            (low, first), (high, last) = known[0], known[-1]
            names = [self.names.get(id(given[n][0]), "a weight") for n in (first, last)]
            ratio = f"{number_words(low / high)} times that of `{names[1]}` ({number_words(high)})"
            lead = f"the gradient of `{names[0]}` vanishes"
            return self._silence(f"{lead}: its norm is {number_words(low)}, {ratio}", step)
        kinds = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d)
        modules = [m for root in self.modules for m in members.modules(root) if isinstance(m, kinds)]
        # As a parameter: a parametrized `weight` is computed, and spectral norm moves its buffers, when it is read
        own = {id(p) for m in modules for name, p in members.named_parameters(m, recurse=False) if name == "weight"}
        modes = [op.mode.autocast for op in step.ops if op.kind is Root] if step is not None else []
        is_half = any(name == "torch.float16" for mode in modes for _, name in mode) and not self.loop.scalers.is_used
        for n, (p, gradient) in enumerate(given[:-1]):
            if not norms[n] > 0 or id(p) not in own or len(gradient) < _LEAST_UNITS:
                continue
            empty = native.flatten(gradient, 1) == 0
            dead = native.all(empty, 1)
            largest = float(native.max(native.abs(gradient)))
            is_low = largest < torch.finfo(torch.float16).tiny and bool(native.any(empty))
            if is_first and is_low and (is_half or gradient.dtype is torch.float16):
                lead = f"the gradient of `{self.names.get(id(p))}` underflows in float16"
                lead = f"{lead}: it is {number_words(largest)} at most"
                zero = f"{float(native.mean(native.double(empty))):.1%} of it zero"
                return self._silence(f"{lead}, {zero}, and there is no grad scaler", step)
            both = float(native.mean(native.double(dead & self.seen.units[p]))) if p in self.seen.units else 0.0
            if is_first:
                self.seen.units[p] = dead
            elif self.now is None and both > _MOSTLY:
                name = self.names.get(id(p), "a weight").rpartition(".")[0]
                return self._silence(f"{both:.1%} of the units of `{name}` have got no gradient {self.over}", step)
        return None

    def _reasons(
        self, step: Segment | None, parameters: Sequence[torch.Tensor], only: tuple[str, ...] = ()
    ) -> dict[int, Failure]:
        """The calls of a step, played again, that pass no gradient on to parameters, by the ``id`` of these; one of
        each module is asked for. With ``only`` nothing but rounding, and a part of the call's name is one of these."""
        groups: dict[str, list[torch.Tensor]] = {}
        for p in parameters:
            groups.setdefault(self.names.get(id(p), "").rpartition(".")[0], []).append(p)
        found: dict[int, Failure] = {}
        failure = Failure(Phase.BACKWARD, DEAD)

        def see(program: Program, tensors: Tensors) -> Failure:
            for group in list(groups.values())[:_MOST_PLAYED]:
                one = without_gradient(self.loop, id(group[0]), failure, is_all=bool(only))(program, tensors)
                if one is not None and one.call is not None and any(part in one.call for part in only or ("",)):
                    found.update(dict.fromkeys(map(id, group), one))
            return failure

        if self.loop.ranks.is_alone and step is not None:
            with ignored_errors(), played_unseen():  # the user's code may not run again with the state of then
                played = EventStep(self.loop, Verdict("gradient", self.frame), ())
                played.explained_by(see, step.mark.place, is_forward=parameters[0].grad is None)
        return found

    def _skipped(self) -> Found:
        total = self.loop.iterations.total
        is_all = self.now is None and total >= _SAME and self.loop.scalers.num_skipped >= total
        words = f"the grad scaler has left out all {total} steps: every gradient had an infinity or a NaN"
        return self._silence(words) if is_all else None

    def _stale_casts(self) -> Found:
        """Autocast's cache holds what a weight was before the first update."""
        root = next((op for step in self.steps for op in step.ops if op.kind is Root and op.mode.autocast), None)
        own = parameters_of(self.now) if self.now is not None and native.is_autocast_cache_enabled() and root else []
        own = [
            p for p in own if native.dim(p) > 1 and id(p) in self.copied and native.is_autocast_enabled(p.device.type)
        ]
        for p in sorted(own, key=lambda p: native.numel(p) * p.shape[-1])[:_MOST_PLAYED]:
            dtype = native.get_autocast_dtype(p.device.type)
            old, now = native.to(self.copied[id(p)], p.device, dtype), native.to(native.detach(p), dtype)
            if p.dtype is torch.float32 and native.sum(old != now) >= _LEAST_CHANGED:
                with native.enable_grad():  # as in a forward: the cache keeps what is cast here
                    read = native.detach(native.matmul(p, native.eye(p.shape[-1], device=p.device)))
                if native.equal(read, old):
                    site = _region(self.frame, "autocast")
                    lead = f"autocast still uses the cast of `{self.names.get(id(p))}` from before the first update"
                    return self._silence(f"{lead}: it was entered once around all steps{_place(site)}", origin=site)
        return None

    def _bypassed(self) -> Found:
        distributed, wrapper = torch.distributed, torch.nn.parallel.DistributedDataParallel
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank() == 0):
            return None
        ops, met = [op for step in self.steps for op in step.ops], set(map(id, self.modules))
        called = {id(op.target): op for op in ops if op.kind is Root and op.mode.grad}
        around = [one for one in gc.get_objects() if type(one) is wrapper and id(one) not in met]
        inside = (id(part) for one in around for part in members.modules(one.module))
        op = next((called[key] for key in inside if key in called), None)
        if op is None or distributed.get_world_size() < 2 or any(one.kind is Collective for one in ops):
            return None  # the loop may average gradients itself
        lead = f"`DistributedDataParallel` is never called, and its module is{_place(_site(op))}"
        words = f"{lead}: the {distributed.get_world_size()} ranks average no gradient"
        return self._silence(words, origin=_site(op))

    def _same_loss(self) -> Found:
        by_seat: dict[int, list[Any]] = {}
        for row in self.loop.timeline.after(-1):
            by_seat.setdefault(row.seat.number, []).append(row.loss)
        for losses in by_seat.values() if not self.told else ():
            value, *others = [number_of(loss) for loss in losses[-_SAME:]]
            is_same = len(others) == _SAME - 1 and set(others) == {value}
            if is_same and value and math.isfinite(value) and not self._is_coarse(value):  # 0 is what many end at
                change = "the batch changes" if self._batch_changes() else "parameters move" if self._moves() else None
                lead = f"the loss is {number_words(value, 6)} in all bits in the last {_SAME} steps"
                return self._silence(f"{lead} while {change}") if change is not None else None
        return None

    def _is_coarse(self, value: float) -> bool:
        """True if a loss may be one of half precision, which stands still while it falls slowly."""
        alive, exact = self.loop.tape.alive(), native.tensor(value, dtype=torch.float64)
        starts = [op for step in self.steps[-1:] for op in step.ops if op.kind is Backward]
        made = [alive[n].dtype in HALVES for op in starts for n in op.ins if n in alive]
        return made[0] if made else any(native.item(native.to(exact, half)) == value for half in HALVES)

    def _batch_changes(self) -> bool:
        alive, roots = self.loop.tape.alive(), [op for one in self.steps for op in one.ops if op.kind is Root][-2:]
        before, now = ([alive[n] for n in op.ins if n in alive] for op in (roots[0], roots[-1])) if roots else ([], [])
        return any(a.shape != b.shape or not native.equal(a, b) for a, b in zip(before, now, strict=False))

    def _moves(self) -> bool:
        moved = [p for one in self.optimizers for p in parameters_of(one) if id(p) in self.copied and self.steps]
        return (update_of([self.copied[id(p)] for p in moved], [native.detach(p) for p in moved]) or 0.0) > _MOVES

    def _name(self, optimizer: Optimizer) -> str:
        return f"`{self.names[id(optimizer)]}`"

    def _listed(self, parameters: Sequence[torch.Tensor]) -> str:
        names = [f"`{self.names.get(id(p), 'a parameter')}`" for p in parameters]
        return listed([*names[:_SHOWN], *([f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else [])])


def _is_idle(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    """True if nothing is known of a gradient of a parameter that is to be trained."""
    is_trained = _is_plain(parameter) and parameter.requires_grad
    return is_trained and parameter.grad is None and not optimizer.state.get(parameter)


def _is_plain(parameter: torch.Tensor) -> bool:
    is_dense = type(parameter) in (torch.nn.Parameter, torch.Tensor) and parameter.layout is torch.strided
    return is_dense and not parameter.is_meta


def _op_of(step: Segment, optimizer: Optimizer) -> Op | None:
    return next((op for op in step.ops if op.kind is OptimizerStep and op.target is optimizer), None)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None, "a parameter without a gradient has none to measure"
    return native.detach(parameter.grad)


def _site(op: Op | None) -> Site | None:
    return make_site(op.code, op.instruction) if op is not None and op.code is not None else None


def _place(site: Site | None) -> str:
    """A line of the user's with its text, behind a comma."""
    return f", {site.place}{quoted(f': {site.code}')}" if site is not None else ""


def _reason(found: Failure) -> str:
    """Why a gradient does not pass a call."""
    if found.input_name is not None:
        return f"`{found.input_name}`, given to `{found.call}`{_place(found.site)}, {found.way}"
    shown = f"; {found.way}" if found.way else ""
    return f"`{found.call}` lets no gradient through{_place(found.site)}{shown}"


def _is_fit(found: Failure) -> bool:
    """True if the call is a loss that measures how far two values are apart: a gradient of zero says that they are not,
    such as a value head that begins at zero while every return is zero."""
    return found.call is not None and found.call.endswith("_loss")


def _cleared(step: Segment | None, optimizer: Optimizer) -> Site | None:
    """The step of an optimizer whose gradients are cleared between the backward pass and it."""
    ops, used = step.ops if step is not None else [], _op_of(step, optimizer) if step is not None else None
    made = max((n for n, op in enumerate(ops) if op.kind is Backward), default=len(ops))
    return _site(used) if any(op.kind is ZeroGrad for op in ops[made:]) else None


def _region(frame: FrameType | None, name: str) -> Site | None:
    """The ``with`` of something with a name around the lines that run, by its indentation."""
    while frame is not None:
        file, indent = frame.f_code.co_filename, math.inf
        for number in range(frame.f_lineno, 0, -1) if kind_of_file(file) == "user" else ():
            line = linecache.getline(file, number)
            text = line.strip()
            if text and len(line) - len(line.lstrip()) < indent:
                if text.startswith("with ") and name in text:
                    return Site(relative_path(file), number, text)
                indent = len(line) - len(line.lstrip())
        frame = frame.f_back
    return None


def _is_fading(shares: Sequence[float]) -> bool:
    """True if at least half of the last gradient was zero, and there is no telling that this came suddenly.

    It did if `_SUDDEN` steps before the end the share of zeros was about what it usually was.
    """
    if shares[-1] < _DYING or len(shares) <= 2 * _SUDDEN:
        return shares[-1] >= _DYING
    then, usual = shares[-_SUDDEN], statistics.median(shares[:-_SUDDEN])
    return then >= _DYING and 1.0 - then < _ABOUT * (1.0 - usual)
