"""The search for the context: choose a slice, let it grow until it explains itself, then make it small.

Every step is confirmed by an oracle with the signature of the snapshot. Unlike the minimum, a context keeps all calls
of the module where the failure was born, and never takes an input that is not ordinary for one that is.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from reprokit.locate.failure import Failure
from reprokit.program.ir import AUTOGRAD_BACKWARD, BACKWARD, Call, Ref, Scope
from reprokit.shrink.arguments import leaves, with_leaf
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.constants import filled, is_number, number_inputs
from reprokit.shrink.context.defaults import initial
from reprokit.shrink.context.identity import module_runs, without_call, without_module
from reprokit.shrink.context.ordinary import extraordinary, moderate
from reprokit.shrink.context.piece import Context
from reprokit.shrink.context.slices import Place, Slice, Step
from reprokit.shrink.context.tree import tree_of
from reprokit.shrink.oracle import Oracle, OutOfBudget, Verdict
from reprokit.shrink.passes.cut import cuts
from reprokit.shrink.passes.setting import simplify_precision
from reprokit.shrink.passes.sizes import shrink_sizes
from reprokit.shrink.passes.values import plainer_contents
from reprokit.shrink.plainness import ANY, MAX_LITERALS, NUM_SEEDS, plainness, seed_of, state_of_seed
from reprokit.shrink.probe import Shapes, forms_of
from reprokit.shrink.problem import Problem

_OWN_CALLS = 24
_FEW = 4
_GROWTH = 8
_SMALL_MODULE = 8
_MAX_CALLS = 200
_MAX_UNITS = 42
_SIZE_CHECKS = 120
_MIN_DRAWN = 9


def find_context(whole: Candidate, failure: Failure, oracle: Oracle) -> Context | None:
    """The context of a failure of ``whole``; ``None`` when no slice of the step fails alone.

    When the budget of ``oracle`` ends early, the best so far is the answer.
    """
    started = time.monotonic()
    search = _Search(Step(whole), failure, oracle)
    with contextlib.suppress(OutOfBudget):
        search.run()
    if search.problem is None:
        return None
    best = search.problem.best
    found = search.problem.failure
    tensors = {item.value: best.tensors[item.value] for item in best.program.inputs}
    drawn = tuple(sorted(search.drawn & tensors.keys()))
    seconds = time.monotonic() - started
    return Context(best.program, tensors, found, drawn, not extraordinary(best), oracle.checks, seconds)


@dataclass
class _Search:
    step: Step
    failure: Failure
    oracle: Oracle
    problem: Problem | None = None
    drawn: set[int] = field(default_factory=set)
    shown: frozenset[int] = frozenset()

    def run(self) -> None:
        """Choose and shrink; what was reached is in ``problem``."""
        start = self._start()
        if start is None:
            return
        self.problem = Problem(start, self.oracle)  # what was found so far was in case the budget ends
        limit = len(extraordinary(start))
        self.problem.accepts = lambda candidate: len(extraordinary(candidate)) <= limit
        self._drop_randomness()
        self._drop_autocast()
        self._drop_layers()
        self._free_shapes()
        self._plain_together()
        self._shrink_sizes()
        self._rescale_attention()
        self._make_contiguous()
        simplify_precision(self.problem)
        self._sum_outputs()
        self._plain_values()
        for item in self._best.program.inputs:
            if item.role == "rng" and seed_of(self._best.tensors[item.value]) is None:
                self._seed(item.value)

    # -- the slice -----------------------------------------------------------------------------------------------

    def _start(self) -> Candidate | None:
        """The first slice that fails in the same way and is ordinary, brought to whole modules; else the first."""
        second_best: tuple[int, Candidate] | None = None
        for piece in self._slices():
            candidate = piece.candidate(self.failure.value)
            if candidate is None or not self._is_same(candidate, f"{len(piece.kept)} calls around the origin"):
                continue
            self.problem = self.problem or Problem(candidate, self.oracle)
            is_long = self.step.num_units(piece.kept) > _MAX_UNITS
            if not extraordinary(candidate):
                piece, candidate = self._without_modules(piece, candidate)
                if not is_long or self.step.num_units(piece.kept) <= _MAX_UNITS:
                    return self._with_whole_modules(piece, candidate)
            elif not is_long:
                candidate = self._tamed(candidate)
            rank = 2 * bool(extraordinary(candidate)) + is_long
            if second_best is None or rank < second_best[0]:
                second_best = rank, candidate
        return second_best[1] if second_best is not None else self._cut()

    def _tamed(self, candidate: Candidate) -> Candidate:
        """With zeros in place of the numbers that are not ordinary, if it fails without them: all, else one by one."""
        for values in (extraordinary(candidate), *([value] for value in extraordinary(candidate))):
            tame = candidate.with_tensors({value: moderate(candidate.tensors[value]) for value in values})
            if values and self._is_same(tame, "ordinary numbers"):
                candidate = tame
        return candidate

    def _slices(self) -> Iterator[Slice]:
        """Slices, likeliest first."""
        origin = self.failure.call_index
        if origin is None:
            return
        call = self.step.program.calls[origin]
        if call.is_optimizer_step:
            yield from self._around_parameter(origin)
        elif self.failure.phase == "backward" and self.failure.kind != "exception":
            yield from self._around_gradient(origin)
        elif self.step.is_forward(origin):
            yield from self._around_output(origin)

    def _is_inside(self, index: int, origin: int) -> bool:
        """Whether a call runs in the same module as the origin, or in a child of it; in the loop, the same function."""
        return self.step.is_inside(index, self.step.place(origin))

    def _among(self, place: Place) -> Callable[[int], bool]:
        """Whether a call runs in a module."""
        return lambda index: self.step.is_inside(index, place)

    def _around_output(self, origin: int) -> Iterator[Slice]:
        """What the origin depends on in its module, with more of where extraordinary inputs come from; then more."""
        seen: set[tuple[int, ...]] = set()
        kept = self._own(origin)
        while len(kept) <= _MAX_CALLS:
            piece = Slice(self.step, self.step.connected(kept, origin, downstream=False))
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
        kept = self.step.upstream([origin], _OWN_CALLS, lambda index: self._is_inside(index, origin))
        if self.step.place(origin)[0] or self.step.num_units(kept) >= _FEW:
            return kept
        more = self.step.upstream(kept, _FEW, lambda index: not self.step.program.calls[index].scope)
        self.shown = frozenset(more)
        return more

    def _causes(self, piece: Slice) -> list[int]:
        """Where inputs that are not ordinary came from: calls of the module that made them."""
        candidate = piece.candidate(None)
        found: list[int] = []
        calls = self.step.program.calls
        for value in extraordinary(candidate) if candidate is not None else ():
            reader = piece.boundary().get(value)
            makers = self.step.producers(reader) if reader is not None else []
            maker = next((i for i in makers if value in calls[i].output_refs() and self.step.is_forward(i)), None)
            if maker is not None:
                place = self.step.place(maker)
                found += self.step.upstream([maker], _GROWTH, self._among(place))
        return [index for index in dict.fromkeys(found) if index not in piece.kept]

    def _around_gradient(self, origin: int) -> Iterator[Slice]:
        """What the origin depends on, and what depends on it as far as its module returns it; less, if that is much;
        then ever more."""

        def is_inside(index: int) -> bool:
            return self._is_inside(index, origin)

        own = self._own(origin)
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

    def _explained(self, kept: list[int], origin: int) -> Iterator[Slice]:
        """A slice for a gradient, with more of where extraordinary inputs come from while it does not get too long."""
        while self.step.num_units(kept) <= _MAX_UNITS:
            piece = self._differentiated(kept, origin)
            yield piece
            causes = self._causes(piece)
            if not causes:
                return
            kept = [*piece.kept, *causes]

    def _differentiated(self, kept: list[int], origin: int) -> Slice:
        return Slice(self.step, self.step.connected(kept, origin, downstream=True), is_differentiated=True)

    def _around_parameter(self, update: int) -> Iterator[Slice]:
        """The layer that holds the parameter which turned bad, then the module around it."""
        calls = self.step.program.calls
        users = [i for i, c in enumerate(calls) if self.failure.value in c.input_refs() and self.step.is_forward(i)]
        if not users:
            return
        for limit in (1, _OWN_CALLS):
            kept = self.step.upstream(users, limit, lambda index: self._is_inside(index, users[0]))
            yield Slice(self.step, tuple(sorted(kept)), is_differentiated=True, update=update)

    def _without_modules(self, piece: Slice, candidate: Candidate) -> tuple[Slice, Candidate]:
        """The slice without what lies outside the origin's own module: whole modules, largest first, then calls of
        modules too large to be shown whole."""
        origin = self.failure.call_index
        assert origin is not None
        own = self.step.program.calls[origin].scope
        groups: dict[tuple[object, ...], list[int]] = {}
        for index in piece.kept:
            scope = self.step.program.calls[index].scope
            for depth in range(1, len(scope) + 1):
                if scope[:depth] != own[:depth] and not self.step.is_own_layer(scope[:depth], origin):
                    groups.setdefault(scope[:depth], []).append(index)
            if (
                index not in self.shown
                and not self._is_inside(index, origin)
                and self.step.size_of(self.step.place(index)) > _SMALL_MODULE
            ):
                groups.setdefault((index,), list(self.step.units[index]))
        for group in sorted(groups.values(), key=lambda members: -len(members)):
            kept = tuple(index for index in piece.kept if index not in group)
            if piece.update is None and origin in kept:
                kept = self.step.connected(kept, origin, downstream=piece.is_differentiated)
            if kept and kept != piece.kept and (origin in kept or piece.update is not None):
                piece, candidate = self._better(replace(piece, kept=kept), "without a module") or (piece, candidate)
        return piece, candidate

    def _with_whole_modules(self, piece: Slice, candidate: Candidate) -> Candidate:
        """Small modules whole, where the slice starts in the middle of one."""
        for place in dict.fromkeys(self.step.place(index) for index in piece.kept):
            if place[0] and self.step.size_of(place) <= _SMALL_MODULE:
                inside = [index for index in piece.kept if self.step.is_inside(index, place)]
                whole = self.step.upstream(inside, _MAX_CALLS, self._among(place))
                kept = tuple(sorted({*piece.kept, *whole}))
                if kept != piece.kept:
                    piece, candidate = self._better(replace(piece, kept=kept), "a whole module") or (piece, candidate)
        return candidate

    def _better(self, piece: Slice, change: str) -> tuple[Slice, Candidate] | None:
        """A slice with its candidate, if it is ordinary and fails the same way."""
        found = piece.candidate(self.failure.value)
        if found is None or extraordinary(found) or not self._is_same(found, change):
            return None
        return piece, found

    def _cut(self) -> Candidate | None:
        """When nothing with modules fails alone: what the minimum starts from."""
        return next((c for change, c in cuts(self.step.whole, self.failure) if self._is_same(c, change)), None)

    def _is_same(self, candidate: Candidate, change: str) -> bool:
        return self.oracle.check(candidate, change) is Verdict.SAME

    # -- making it small -----------------------------------------------------------------------------------------

    @property
    def _best(self) -> Candidate:
        assert self.problem is not None
        return self.problem.best

    def _try(self, candidate: Candidate, change: str) -> bool:
        """Go on from a candidate that reads better, whatever its size, if it fails the same way."""
        assert self.problem is not None
        plain = candidate.pruned()
        if candidate is self._best or not self.problem.accepts(plain) or not self._is_same(plain, change):
            return False
        self.problem.best = plain
        return True

    def _drop_randomness(self) -> None:
        """Let values pass random calls unchanged, as with a dropout of 0."""
        for call in self._best.program.calls:
            if call.mode.rng is not None and call in self._best.program.calls:
                index = self._best.program.calls.index(call)
                change = f"without the randomness of {call.name}"
                bypassed = without_call(self._best, index)
                is_gone = bypassed is not None and self._try(bypassed, change)
                if not is_gone and not self._try(_with_certainty(self._best, index), change):
                    self._seed(call.mode.rng.value)

    def _seed(self, value: int) -> None:
        """Start a generator from a small seed."""
        size = self._best.tensors[value].numel()
        for seed in range(NUM_SEEDS):
            if self._try(self._best.with_tensors({value: state_of_seed(seed, size)}), f"seed {seed}"):
                return

    def _shrink_sizes(self) -> None:
        """Sizes as small as a fixed number of checks allows; what is left of the budget is for the rest."""
        assert self.problem is not None
        limit = self.oracle.max_checks
        own = self.oracle.checks + _SIZE_CHECKS
        self.oracle.max_checks = own if limit is None else min(own, limit)
        try:
            shrink_sizes(self.problem)
        except OutOfBudget:
            if self.oracle.checks != own:
                raise
        finally:
            self.oracle.max_checks = limit

    def _drop_layers(self) -> None:
        """Modules by identity, largest first; never the one of the origin and its own layers."""
        tried: set[tuple[Scope, ...]] = set()
        while True:
            best, shapes = self._best, self._shapes()
            run = next((run for run in self._droppable() if _scope_of(best, run) not in tried), None)
            if run is None or shapes is None:
                return
            tried.add(_scope_of(best, run))
            any(self._try(shorter, "a module by identity") for shorter in without_module(best, run, shapes))

    def _droppable(self) -> Iterator[frozenset[int]]:
        """The runs of modules that the origin is not in, nor next to."""
        assert self.problem is not None
        origin = self.problem.failure.call_index
        step = Step(self._best)
        for run in module_runs(self._best):
            scope = _scope_of(self._best, run)
            if origin is None or (origin not in run and not step.is_own_layer(scope, origin)):
                yield run

    def _shapes(self) -> Shapes | None:
        """The shapes of all values of the best candidate, if a probe can tell."""
        assert self.problem is not None
        ground = self.problem.prober.ground(self._best)
        forms = forms_of(self._best)
        return self.problem.prober.shapes(self._best.program, forms, ground) if ground is not None else None

    def _free_shapes(self) -> None:
        """One size of every reshaping is left to torch, so that the sizes it is a product of can shrink apart."""
        assert self.problem is not None
        prober = self.problem.prober
        ground = prober.ground(self._best)
        if ground is None:
            return
        forms = forms_of(self._best)
        shapes = prober.shapes(self._best.program, forms, ground)
        best = self._best
        for index, call in enumerate(best.program.calls):
            for freed in _with_free_size(call, {size for form in forms.values() for size in form.shape}):
                calls = (*best.program.calls[:index], freed, *best.program.calls[index + 1 :])
                program = replace(best.program, calls=calls)
                if prober.shapes(program, forms, ground) == shapes:
                    best = replace(best, program=program)
                    break
        self._try(best, "free sizes in shapes")

    def _plain_together(self) -> None:
        """One number everywhere, where that fails as well: then sizes shrink without regard to what is where."""
        items = [item for item in number_inputs(self._best) if item.role != "gradient"]
        for number in (1.0, 0.0):
            tensors = {item.value: filled(self._best.tensors[item.value], number) for item in items}
            if self._try(self._best.with_tensors(tensors), f"all numbers {number:g}"):
                return

    def _drop_autocast(self) -> None:
        calls = self._best.program.calls
        if any(call.mode.autocast for call in calls):
            plain = tuple(replace(call, mode=replace(call.mode, autocast=())) for call in calls)
            self._try(replace(self._best, program=replace(self._best.program, calls=plain)), "no autocast")

    def _rescale_attention(self) -> None:
        """In torch's attention the factor that belongs to the width each head has now."""
        assert self.problem is not None
        shapes = self._shapes()
        calls = list(self._best.program.calls)
        for index, call in enumerate(calls):
            is_inside = any(scope.cls == "MultiheadAttention" for scope in call.scope)
            if shapes is not None and is_inside and call.name == "mul" and isinstance(call.args[-1], float):
                width = shapes[call.output_refs()[0]][-1]
                calls[index] = replace(call, args=(*call.args[:-1], math.sqrt(1.0 / width)))
        if calls != list(self._best.program.calls):
            program = replace(self._best.program, calls=tuple(calls))
            self._try(replace(self._best, program=program), "attention scaled anew")

    def _make_contiguous(self) -> None:
        tensors = {
            value: tensor.contiguous()
            for value, tensor in self._best.tensors.items()
            if tensor.layout is torch.strided and not tensor.is_contiguous()
        }
        if tensors:
            self._try(self._best.with_tensors(tensors), "contiguous inputs")

    def _sum_outputs(self) -> None:
        """Differentiate the sum of what comes out, instead of giving gradients."""
        summed = _with_sum(self._best)
        if summed is not None and not self._try(summed, "the gradient of a sum"):
            for number in (1.0, 0.0):
                gradients = [i.value for i in self._best.program.inputs if i.role == "gradient"]
                plain = {value: torch.full_like(self._best.tensors[value], number) for value in gradients}
                if self._try(self._best.with_tensors(plain), "plain gradients"):
                    return

    def _plain_values(self) -> None:
        """Initial parameters for the layers where these still fail, the plainest numbers elsewhere."""
        given = self._take_initial()
        for item in self._best.program.inputs:
            if item.value not in given and item.role not in ("rng", "gradient"):
                self._simplify(item.value, item.role)
        self._draw([item.value for item in self._best.program.inputs if item.value not in given])

    def _take_initial(self) -> set[int]:
        """Initial parameters for all layers, else for as many as possible; the values that are now as made."""
        tree = tree_of(self._best)
        values = initial(tree, self._best.tensors, ())
        if not values or self._try(self._best.with_tensors(values), "initial parameters"):
            return set(values)
        taken: set[int] = set()
        for block in tree.layers():
            names = block.layer.state.values() if block.layer is not None else ()
            chosen = {value: values[value] for value in names}
            if chosen and self._try(self._best.with_tensors(chosen), f"initial {block.scope.path}"):
                taken.update(chosen)
        return taken

    def _simplify(self, value: int, role: str) -> None:
        assert self.problem is not None
        tensor = self._best.tensors.get(value)
        for plain in plainer_contents(tensor, role) if tensor is not None else ():
            if self.problem.consider(self._best.with_tensors({value: plain}), "plainer values"):
                return

    def _draw(self, values: list[int]) -> None:
        """Seeded random numbers where too many are left to be listed; all together, since they are drawn in order."""
        tensors = self._best.tensors
        long = [v for v in values if v in tensors and is_number(tensors[v]) and tensors[v].numel() >= _MIN_DRAWN]
        chosen = {value for value in long if plainness(tensors[value]) >= ANY and not tensors[value].is_complex()}
        needed = {value for value in chosen if tensors[value].numel() > MAX_LITERALS}
        for drawn in (chosen, needed):
            numbers = initial(tree_of(self._best), tensors, drawn) if drawn else {}
            if drawn and self._try(self._best.with_tensors({v: numbers[v] for v in drawn}), "seeded numbers"):
                self.drawn = drawn
                return


def _with_free_size(call: Call, sizes: set[int]) -> Iterator[Call]:
    """A reshaping with its largest size as -1, if that is a product rather than a size of an input."""
    places = [(path, leaf) for path, leaf in leaves(call) if isinstance(leaf, int) and not isinstance(leaf, bool)]
    if call.name in ("view", "reshape") and len(places) > 1 and all(size > 0 for _, size in places):
        path, largest = max(places, key=lambda place: place[1])
        if largest not in sizes:
            yield with_leaf(call, path, -1)


def _scope_of(candidate: Candidate, run: frozenset[int]) -> tuple[Scope, ...]:
    """The module that a run is of: what the scopes of its calls begin with."""
    scopes = [candidate.program.calls[index].scope for index in sorted(run)]
    depth = next((d for d, levels in enumerate(zip(*scopes, strict=False)) if len(set(levels)) > 1), None)
    return scopes[0][:depth]


def _with_certainty(candidate: Candidate, index: int) -> Candidate:
    """With a probability of 0 in a random call."""
    calls = list(candidate.program.calls)
    call = calls[index]
    for path, leaf in leaves(call):
        if isinstance(leaf, float) and 0 < leaf < 1:
            call = with_leaf(call, path, 0.0)
    calls[index] = replace(call, mode=replace(call.mode, rng=None))
    return replace(candidate, program=replace(candidate.program, calls=tuple(calls)))


def _with_sum(candidate: Candidate) -> Candidate | None:
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
    calls = (*program.calls[:place], *added, Call(BACKWARD, (total,), phase="backward"), *program.calls[place + 1 :])
    return replace(candidate, program=replace(program, calls=calls)).pruned()
