"""Naming the origin of a failure: the first call, forward or backward, that turned good values into bad ones.

A program is run under observation and the ways in which values are bad (NaN, +inf, -inf) are noted around every
call. From what was seen to be bad (a loss, a gradient, a parameter) the notes are followed back against the data flow.
Infinities somebody asked for, such as a mask filled with ``-inf``, are followed only when nothing else explains the
failure.

Bad values of the forward pass may not show in the loss. `find_drop`: a call drops NaN values before the loss, such as
those in the branch that a ``where`` does not take; the backward pass multiplies a gradient of zero with a derivative
that is NaN. `explains_gradient`: ``tanh`` or ``clamp`` makes an infinity finite, and the backward pass NaN.
`bad_operand`: a call raises over a NaN or an infinity. The latter two are tested: the step, or the call, is run again
with ordinary numbers in the place of what is not finite.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch

from reprokit import native
from reprokit.errors import pass_on
from reprokit.locate.domains import SPREADING
from reprokit.locate.failure import Drop, Failure, kind_of, module_of
from reprokit.locate.flow import Flow
from reprokit.locate.gradient import Blame, GradientWatch, blame_gradient
from reprokit.locate.kinds import EXCEPTION
from reprokit.locate.notes import BadValue, Notes, failure_of_call, phase_of, starts_of
from reprokit.locate.spelling import constant_ways, short_name
from reprokit.locate.ways import CLEAN, MINUS, NAN, PLUS, ways_of
from reprokit.own_work import ignored_warnings
from reprokit.program.dataflow import needed_calls
from reprokit.program.functions import GRAD_READ, GRAD_WRITES, display_name
from reprokit.program.interpreter import Observer, Outcome, Tensors, bind_arguments, execute, run
from reprokit.program.ir import AUTOGRAD_GRAD, Call, Input, Phase, Program, Ref, Scope, iter_refs
from reprokit.program.observe import Trace, copied
from reprokit.progress import Progress

GRAD_SCALER = Scope("<GradScaler>", "GradScaler")
_BOUNDING = ("clamp", "clip", "nan_to_num")
_MOST_OPERANDS = 8  # of a call, each of which is followed to its origin
_STAND_IN = 1.0  # any moderate number will do


def find_drop(
    notes: Notes, values: Set[int], after: int, before: int, differentiated: Set[int], *, through_layers: bool
) -> int | None:
    """The first call that reads a NaN which one of ``values`` led to and returns none.

    ``after`` is the call that made them, ``before`` the backward call. Only calls whose derivative was taken count. A
    NaN behind a layer is followed with ``through_layers`` only.
    """
    led_to = set(values)
    for index in range(after + 1, before):
        reads, writes = notes.reads.get(index, {}), notes.writes.get(index, {})
        if led_to.isdisjoint(reads):
            continue
        reads_nan = any(NAN in ways for value, ways in reads.items() if value in led_to)
        if any(NAN in ways for ways in writes.values()) or not reads_nan:
            if through_layers or short_name(notes.program.calls[index]) not in SPREADING:
                led_to.update(writes)
        elif index in differentiated:
            return index
    return None


def explains_gradient(program: Program, tensors: Tensors, value: int, reader: int, found: BadValue) -> bool:
    """True if the gradient is finite without the infinities that call number ``reader`` reads in ``value``, and the
    loss another one: a branch that `torch.where` drops has no part in the loss, so its backward pass is the failure.
    """
    calls = program.calls[: found.index + 1]
    starts = frozenset(starts_of(calls[-1]))
    finite = Ref(program.next_value())
    numbers = {"nan": float("nan"), "posinf": _STAND_IN, "neginf": -_STAND_IN}
    made = Call("torch.nan_to_num", (Ref(value),), numbers, finite, mode=calls[reader].mode)
    rest = [call.substituted({value: finite}) for call in calls[reader:]]
    changed = run(replace(program, calls=(*calls[:reader], made, *rest)), tensors, keep=starts | {found.value})
    gradient = changed.gradients.get(found.value, changed.values.get(found.value))
    if changed.error is not None or gradient is None or ways_of(gradient):
        return False
    plain = run(replace(program, calls=calls[:-1]), tensors, keep=starts)
    return any(not native.equal(plain.values[key], changed.values[key]) for key in starts)


def bad_operand(program: Program, tensors: Tensors, notes: Notes, index: int) -> BadValue | None:
    """The operand that makes call number ``index`` raise by being NaN or infinite."""
    reads = {value: ways for value, ways in notes.reads.get(index, {}).items() if ways}
    if not reads or program.calls[index].is_differentiation or program.calls[index].is_optimizer_step:
        return None
    with ignored_warnings():
        trace = Trace(program, copied, {index})
        trace.run(tensors, only=needed_calls(program.calls, {index}))
    found = ((value, way) for way in (NAN, PLUS, MINUS) for value, ways in reads.items() if way in ways)
    value, way = next(found)
    returns = any(_returns(program.calls[index], given) for given in _ordinary(trace.reads.get(index, {}), reads))
    return BadValue(value, way, index) if returns else None


def _ordinary(given: Mapping[int, torch.Tensor], bad: Container[int]) -> Iterator[dict[int, torch.Tensor]]:
    """The operands without bad numbers: one number in their place, or an identity matrix."""
    yield {value: _filled(tensor) if value in bad else tensor for value, tensor in given.items()}
    square = {v: t for v, t in given.items() if v in bad and native.dim(t) > 1 and t.shape[-1] == t.shape[-2]}
    if square:
        eyes = {
            v: native.expand_as(native.to(native.eye(matrix.shape[-1]), matrix), matrix) for v, matrix in square.items()
        }
        yield {**given, **eyes}


def _returns(call: Call, operands: Mapping[int, torch.Tensor]) -> bool:
    try:
        with native.no_grad():
            execute(call, *bind_arguments(call, operands))
    except Exception as error:  # functions refuse in as many ways as there are functions
        pass_on(error)
        return False
    return True


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    return native.where(native.isfinite(tensor), tensor, native.full_like(tensor, 0.5)) if ways_of(tensor) else tensor


def locate(
    program: Program,
    tensors: Tensors,
    *,
    looks_into_backward: bool = False,
    through: int | None = None,
    progress: Progress | None = None,
    observer: Observer | None = None,
) -> Failure | None:
    """Run ``program`` and name the origin of its failure, or ``None`` when nothing goes wrong.

    Watched, first one wins: exceptions; the tensors that differentiation starts from; the gradients it leaves on leaf
    inputs; later writes into these; parameters after the optimizer; the program's outputs. Raises `UnknownFunction` for
    a program that names a function it may not name. ``looks_into_backward``: every gradient of the last backward call
    is examined, so that no second run is needed if one is bad. ``through`` is a value that lets something bad in an
    input through: then the call that made it is the origin. ``observer`` sees the same run, up to the failure.
    """
    inner = _last_backward(program) if looks_into_backward else None
    notes = Notes(program, watch=_watch, inner=inner, progress=progress, observer=observer)
    return _located(program, tensors, notes, through)


def outcome_or_failure(
    program: Program, tensors: Tensors, keep: Set[int], strict: Sequence[int] = ()
) -> Outcome | Failure:
    """The outcome of a run in which nothing goes wrong, with the values in ``keep`` and the outputs; else the failure,
    as `locate` names it.

    The calls ``strict`` (indexes) may not make a bad value in the forward pass either that a later call hides, as in
    ``1 - x / inf``. Clamping it is no hiding.
    """
    notes = Notes(program, watch=_watch)
    failure = _located(program, tensors, notes, keep=keep) or _hidden_failure(program, tensors, notes, strict)
    return failure if failure is not None else notes.outcome


def _hidden_failure(program: Program, tensors: Tensors, notes: Notes, calls: Sequence[int]) -> Failure | None:
    walk = _Walk(Flow(notes), tensors)
    for index in calls:
        if program.calls[index].phase is Phase.FORWARD and not any(notes.reads.get(index, {}).values()):
            for value, ways in notes.writes.get(index, {}).items():
                readers = [program.calls[reader] for reader in walk.flow.readers(value, index)]
                is_bounded = bool(readers) and all(short_name(call) in _BOUNDING for call in readers)
                for way in () if is_bounded else ways:
                    if not walk.is_wanted(value, way, index + 1):
                        return walk.blame(value, way, index + 1)
    return None


def locate_with_losses(
    program: Program,
    tensors: Tensors,
    losses: Set[int],
    through: int | None = None,
    progress: Progress | None = None,
) -> tuple[Failure | None, dict[int, torch.Tensor]]:
    """The same and the ``losses`` (value numbers) that backward calls start from, in one run where one is enough.

    One is enough where the program has a single backward call and nothing hides behind an infinity.
    """
    notes = Notes(program, watch=_watch, wanted=losses, inner=_last_backward(program), progress=progress)
    return _located(program, tensors, notes, through), notes.losses


def _last_backward(program: Program) -> GradientWatch | None:
    backward = [index for index, call in enumerate(program.calls) if call.is_differentiation]
    return GradientWatch(program, backward[-1]) if backward else None


def _located(
    program: Program, tensors: Tensors, notes: Notes, through: int | None = None, keep: Set[int] = frozenset()
) -> Failure | None:
    outcome = notes.run(tensors, keep)
    if outcome.error is not None and notes.found is None:
        return _with_cause(exception_failure(program, outcome), program, tensors, notes)
    found = notes.found or _at_end(program, notes, outcome)
    if found is None:
        return None
    if found.is_gradient:
        return _blame_gradient(_Walk(Flow(notes), tensors), found)
    return _Walk(Flow(notes), tensors, through).blame(found.value, found.way, found.index)


def last_bad(program: Program, tensors: Tensors, within: int) -> int | None:
    """The last bad value that nobody asked for and that one of the last calls, ``within`` so many, made or read."""
    notes = Notes(program)
    notes.run(tensors)
    walk = _Walk(Flow(notes), tensors)
    for index in sorted(notes.reads, reverse=True)[:within]:
        for flags, at in ((notes.writes.get(index, {}), index + 1), (notes.reads[index], index)):
            for value, ways in flags.items():
                if any(not walk.is_wanted(value, way, at) for way in ways):
                    return value
    return None


def locate_exception(program: Program, tensors: Tensors) -> Failure | None:
    """The exception that ends a run, whatever is bad before it, with the bad value behind it."""
    notes = Notes(program)
    outcome = notes.run(tensors)
    if outcome.error is None:
        return None
    return _with_cause(exception_failure(program, outcome), program, tensors, notes)


def _with_cause(failure: Failure, program: Program, tensors: Tensors, notes: Notes) -> Failure:
    bad = bad_operand(program, tensors, notes, failure.call_index or 0)
    cause = _Walk(Flow(notes), tensors).blame(bad.value, bad.way, bad.index) if bad is not None else None
    return replace(failure, cause=cause)


def _watch(notes: Notes, index: int, call: Call, values: Mapping[int, torch.Tensor], *, after: bool) -> BadValue | None:
    """A bad value around one call that ends the run."""
    if call.is_differentiation and not after:
        return _bad_rewritten(notes, index) or _bad_start(notes, index, call, values)
    if call.is_differentiation and call.target != AUTOGRAD_GRAD:
        grads = ((value, ways_of(leaf.grad)) for value, leaf in notes.leaves.items() if leaf.grad is not None)
        return _first_bad(grads, index, is_gradient=True)
    if call.is_optimizer_step and after:
        parameters = dict.fromkeys(ref.value for ref in iter_refs(call.kwargs["params"]))
        return _first_bad(((value, ways_of(values[value])) for value in parameters), index + 1)
    if call.is_optimizer_step:
        return _bad_rewritten(notes, index)
    if call.target in GRAD_WRITES and after:  # a gradient that the loop itself puts in place
        given = (ref.value for ref in iter_refs(call.args[1:]))
        return _first_bad(((value, notes.reads[index].get(value, CLEAN)) for value in given), index)
    return None


def _bad_start(notes: Notes, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> BadValue | None:
    for value in starts_of(call):
        if not values[value].requires_grad:
            continue  # the differentiation itself is going to object
        ways: frozenset[str] = notes.reads[index].get(value, CLEAN)
        if _given_gradients(call):
            ways &= {NAN}  # not a loss: an infinity in it may be wanted, and the gradient decides
        writer = notes.writer(value, index)
        is_scaled = writer is not None and GRAD_SCALER in notes.program.calls[writer].scope
        if ways and not (is_scaled and not any(notes.reads[writer or 0].values())):
            return BadValue(value, _worst(ways), index)  # a good loss times the scaler's factor may overflow
    return None


def _first_bad(
    given: Iterable[tuple[int, frozenset[str]]], index: int, *, is_gradient: bool = False
) -> BadValue | None:
    return next((BadValue(value, _worst(ways), index, is_gradient) for value, ways in given if ways), None)


def _bad_rewritten(notes: Notes, before: int) -> BadValue | None:
    """A gradient that was finite after the backward pass and that something, such as clipping, has written since."""
    for number, call in notes.grad_reads:
        if number >= before:
            break
        leaf = notes.leaves.get(call.input_refs()[0])
        ways = ways_of(leaf.grad) if leaf is not None and leaf.grad is not None else frozenset()
        value = next(iter(call.output_refs()), -1)
        if ways and (notes.writer(value, before) or 0) > number:
            return BadValue(value, _worst(ways), before)
    return None


def _at_end(program: Program, notes: Notes, outcome: Outcome) -> BadValue | None:
    end = len(program.calls)
    outputs = (ref.value for ref in program.outputs if ref.value in outcome.values)
    states = [item.value for item in program.inputs if _is_updated(notes, item, end)]
    return (
        _bad_rewritten(notes, end)
        or _first_bad(((value, ways_of(outcome.values[value])) for value in outputs), end)
        or _first_bad(((value, ways_of(outcome.inputs[value])) for value in states), end)
    )


def _is_updated(notes: Notes, item: Input, end: int) -> bool:
    """True for a trained or kept input that was written; `torch.func` also trains tensors without `requires_grad`."""
    writer = notes.writer(item.value, end)
    is_state = item.role in ("parameter", "buffer") or item.requires_grad
    return writer is not None and (is_state or notes.program.calls[writer].phase is Phase.OPTIMIZER)


def _blame_gradient(walk: _Walk, found: BadValue) -> Failure:
    """Blame a bad gradient on a node, or on the forward when the node only passed on a NaN that was there before."""
    program, tensors, notes, watches = walk.flow.program, walk.tensors, walk.notes, walk.flow.watches
    blame = blame_gradient(program, tensors, found, watches.get(found.index, notes.inner))
    watches[found.index] = blame.watch
    for value in _given_gradients(program.calls[found.index]) if blame.was_given else ():
        ways = notes.reads[found.index].get(value)
        if ways and notes.writer(value, found.index) is not None:  # the program computed it by itself
            return walk.blame(value, _worst(ways), found.index)
    for earlier in _nan_around(notes, walk, blame.failure.call_index):
        if not _is_given(program, earlier):
            return _dropped(notes, blame, earlier, found.index, is_given=False) or earlier
        dropped = _dropped(notes, blame, earlier, found.index, is_given=True)
        if dropped is not None:
            return dropped
        if earlier.call is not None:
            return earlier  # else the data holds it, and the forward has dealt with that
    return _hidden_infinity(program, tensors, walk, found, blame.failure.call_index) or blame.failure


def _hidden_infinity(
    program: Program, tensors: Tensors, walk: _Walk, found: BadValue, index: int | None
) -> Failure | None:
    """The origin of an infinity that call number ``index`` reads, if its backward pass fails because of that."""
    if index is None:
        return None
    for value, ways in walk.notes.reads[index].items():
        unwanted = [way for way in sorted(ways - {NAN}) if not walk.is_wanted(value, way, index)]
        if unwanted and explains_gradient(program, tensors, value, index, found):
            return walk.blame(value, unwanted[0], index)
    return None


def _nan_around(notes: Notes, walk: _Walk, index: int | None) -> Iterator[Failure]:
    """The origins of the NaN values that call number ``index`` reads and returns; those that a call computed first."""
    if index is None:
        return
    read = [(value, index) for value, ways in notes.reads[index].items() if NAN in ways]
    written = [(value, index + 1) for value, ways in notes.writes[index].items() if NAN in ways]
    origins = (walk.blame(value, NAN, at) for value, at in read + written)
    yield from sorted(origins, key=lambda origin: _is_given(notes.program, origin))


def _is_given(program: Program, origin: Failure) -> bool:
    """True if no arithmetic made the NaN: the data holds it, or the code writes it."""
    if origin.call_index is None:
        return True
    return NAN in constant_ways(program.calls[origin.call_index])


def _dropped(notes: Notes, blame: Blame, origin: Failure, end: int, *, is_given: bool) -> Failure | None:
    """The failure of the backward pass over NaN values of the forward pass that a call dropped; `None` if none did."""
    start = blame.failure.call_index if is_given else origin.call_index
    if origin.value is None or start is None:
        return None
    made = {value for value, ways in notes.writes[start].items() if NAN in ways} if is_given else {origin.value}
    index = find_drop(notes, made, start, end, blame.differentiated, through_layers=is_given) if made else start
    if index is None:
        return None
    drop = Drop(index, display_name(notes.program.calls[index].target), origin.value, is_given)
    if is_given:
        return replace(blame.failure, drop=drop, input_name=origin.input_name)
    own = blame.at(start)
    moved = replace(blame.failure, call=origin.call, call_index=start, module=origin.module, site=origin.site)
    return replace(own or moved, drop=drop)


State = tuple[int, str, int | None, int | None]
"""A value, a way in which it is bad, and the call that wrote it; of an input the call that reads it."""


@dataclass(frozen=True, slots=True)
class _End:
    """Where following a bad value ends: the call ``index`` wrote it, or it is an input if there is none.

    ``passed`` is the call that wrote the value ``through``, with the way in which that was bad.
    """

    value: int
    way: str
    at: int  # the call that reads it
    index: int | None
    passed: tuple[int, str] | None = None


class _Walk:
    """Follows bad values back to their origins, at the most to the value ``through`` if that leads to an input.

    A value that a call wrote is followed once, whoever asks. Values wait in a list, not on Python's stack: a model may
    have more layers than Python has frames.
    """

    def __init__(self, flow: Flow, tensors: Tensors, through: int | None = None) -> None:
        self.flow, self.notes = flow, flow.notes
        self._program = flow.program
        self._through = through
        self.tensors = tensors
        self._ends: dict[State, _End] = {}
        self._origins: dict[State, int | None] = {}

    def blame(self, value: int, way: str, at: int) -> Failure:
        """The origin of ``value`` being bad in this way when call number ``at`` reads it."""
        end = self._end(value, way, at)
        if end.index is not None:
            return self._blame_call(*self.flow.first_alike(end.index, end.value, end.way, (value, at)), end.way)
        origin = self._blame_input(end.value, end.way, end.at)
        if end.passed is None or self._through is None:
            return origin
        index, passed_way = end.passed
        passed = self._blame_call(index, self._through, passed_way)
        read = self._program.calls[passed.call_index or 0].input_refs()  # one alone shows not what drops it
        return replace(passed, marker=origin.input_name, operand=f"{len(read)} operands")

    def _end(self, value: int, way: str, at: int) -> _End:
        """Follow a bad value, and first every operand that it may be followed to."""
        waiting, begun = [(value, way, at)], set[State]()
        while waiting:
            place = waiting[-1]
            state = self._state(*place)
            if state in self._ends:
                waiting.pop()
                continue
            # What has begun and has no end yet reads what it makes: a file can claim that, a run cannot.
            operands = [one for one in self._operands(*place) if one != place and self._state(*one) not in begun]
            unknown = [one for one in operands if self._state(*one) not in self._ends]
            if unknown:
                begun.add(state)
                waiting += unknown
                continue
            waiting.pop()
            begun.discard(state)
            self._ends[state] = self._ended(place, operands)
        return self._ends[self._state(value, way, at)]

    def _ended(self, place: tuple[int, str, int], operands: Sequence[tuple[int, str, int]]) -> _End:
        """The end of a value whose operands have one."""
        value, way, at = place
        index = self.notes.writer(value, at)
        end = _End(value, way, at, index)
        if operands:
            end = self._ends[self._state(*self._made_first(operands))]
        if value == self._through and index is not None:
            end = replace(end, passed=(index, way))
        return end

    def _state(self, value: int, way: str, at: int) -> State:
        index = self.notes.writer(value, at)
        return value, way, index, at if index is None else None

    def _operands(self, value: int, way: str, at: int) -> list[tuple[int, str, int]]:
        """The values that explain why ``value`` is bad in this way, each with its way and the call that reads it; none
        where following it ends."""
        index = self.notes.writer(value, at)
        if index is None:
            given = self._given_to_maker(value)
            return [given] if given is not None else []
        reads, first = self.notes.reads[index], dict[int, str]()
        for wanted in dict.fromkeys((way, NAN, PLUS, MINUS)):
            for read, ways in reads.items():
                if wanted in ways and not self.is_wanted(read, wanted, index):
                    first.setdefault(read, wanted)
        found = [(read, wanted, index) for read, wanted in first.items()]
        if not found:
            found = [(read, way, index) for read, ways in reads.items() if way in ways]
            return found[:1]
        return found if len(found) <= _MOST_OPERANDS else found[:1]

    def _made_first(self, operands: Sequence[tuple[int, str, int]]) -> tuple[int, str, int]:
        """The operand whose origin comes first, if several are bad and calls made all of them.

        An infinite sum and, one line later, an infinite product that is divided by it: the sum is what went wrong.
        """
        if len(operands) == 1:
            return operands[0]
        origins = [self._origin_of(*operand) for operand in operands]
        known = [origin for origin in origins if origin is not None]
        return operands[origins.index(min(known))] if len(known) == len(operands) else operands[0]

    def _origin_of(self, value: int, way: str, at: int) -> int | None:
        """The call that is the origin of a bad value whose end is known, ``None`` if none made it."""
        state = self._state(value, way, at)
        if state not in self._origins:
            end = self._ends[state]
            if end.index is None:
                self._origins[state] = end.passed[0] if end.passed is not None else None
            else:
                index, made = self.flow.first_alike(end.index, end.value, end.way, (value, at))
                self._origins[state] = self._blame_call(index, made, end.way).call_index
        return self._origins[state]

    def is_wanted(self, value: int, way: str, at: int) -> bool:
        """True if somebody asked for this infinity (see `Flow.is_wanted`)."""
        return self.flow.is_wanted(value, way, at)

    def _blame_call(self, index: int, value: int, way: str) -> Failure:
        call = self._program.calls[index]
        if call.target == AUTOGRAD_GRAD:
            found = BadValue(value, way, index, is_gradient=True)
            return _blame_gradient(self._unlimited(), found)
        if call.target == GRAD_READ:
            last = max(n for n, earlier in enumerate(self._program.calls[:index]) if earlier.is_differentiation)
            found = BadValue(call.input_refs()[0], way, last, is_gradient=True)
            return _blame_gradient(self._unlimited(), found)
        failure = failure_of_call(self._program, index, phase_of(call), way, value=value)
        if failure.in_forward and value not in call.output_refs():
            written = (item.name for item in self._program.inputs if item.value == value)
            failure = replace(failure, input_name=next(written, None))
        return _with_place(failure, self.notes, index, value, way)

    def _unlimited(self) -> _Walk:
        """A walk that goes on behind the value ``through``."""
        return self if self._through is None else _Walk(self.flow, self.tensors)

    def _given_to_maker(self, value: int) -> tuple[int, str, int] | None:
        """A bad value that the call which made an input was given, and that nobody asked for."""
        maker = self.flow.maker(value)
        if maker is None:
            return None
        for given in self._program.calls[maker].input_refs():
            writer = self.notes.writer(given, maker)
            is_input = writer is None and given in self.tensors
            ways = ways_of(self.tensors[given]) if is_input else self.notes.writes.get(writer or 0, {}).get(given, ())
            for way in sorted(ways):
                if given != value and not self.is_wanted(given, way, maker):
                    return given, way, maker
        return None

    def _blame_input(self, value: int, way: str, at: int) -> Failure:
        calls, maker = self._program.calls, self.flow.maker(value)
        reader = calls[maker] if maker is not None else calls[at] if at < len(calls) else None
        failure = Failure(
            reader.phase if reader is not None and not reader.is_differentiation else Phase.FORWARD,
            kind_of(way),
            way,
            value=value,
            site=reader.site if reader else None,
            module=module_of(reader) if reader else None,
            input_name=self._program.input(value).name,
        )
        return _with_place(failure, self.notes, None, value, way)


def _with_place(failure: Failure, notes: Notes, index: int | None, value: int, way: str) -> Failure:
    if index is None:
        seen = (notes.reads[number][value] for number in sorted(notes.reads) if value in notes.reads[number])
        ways = next(seen, None)
    else:
        ways = notes.writes.get(index, {}).get(value)
    if not ways:
        return failure
    return replace(failure, element=ways.first.get(way), num_bad=ways.count.get(way, 0), num_elements=ways.num_elements)


def exception_failure(program: Program, outcome: Outcome) -> Failure:
    """The failure of a run that a call ended with an exception."""
    assert outcome.error is not None and outcome.error_call is not None
    index = outcome.error_call
    exception = (type(outcome.error).__name__, str(outcome.error))
    return failure_of_call(program, index, phase_of(program.calls[index]), "", kind=EXCEPTION, exception=exception)


def _given_gradients(call: Call) -> list[int]:
    """The value numbers of the gradients that a differentiation is handed to start with."""
    position = 2 if call.target == AUTOGRAD_GRAD else 1
    by_position = call.args[position] if len(call.args) > position else None
    by_name = [call.kwargs.get(name) for name in ("gradient", "grad_tensors", "grad_outputs")]
    return [ref.value for ref in iter_refs((by_position, by_name))]


def _worst(ways: frozenset[str]) -> str:
    return next(way for way in (NAN, PLUS, MINUS) if way in ways)
