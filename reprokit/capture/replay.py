"""Doing again what the loop did, on the user's own modules and optimizers: to find the first bad step and to record it.

A `Player` plays calls; a `TracedPlayer` plays them under a tracer, so that they become a program. A `Replay` plays the
steps since a copy of the state, and finds the first one with a nan or inf: everything is checked in every step that is
played, what training saw (its losses) is compared bit for bit with what the replay sees, and a step is believed only if
the replay agrees with training in it and up to the next loss after it. The user's live state is borrowed and given back
as it was.

Hooks of the user's are called, and what they raise is ignored. A program holds no hooks of a backward pass, and one
that steps an optimizer would change the live state: a step is recorded without those.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from reprokit import torch_private
from reprokit.capture.calls import (
    Backward,
    CompiledStep,
    Function,
    OptimizerStep,
    Root,
    ScaleLoss,
    Transform,
    ZeroGrad,
    gives_gradients,
    name_of,
    starts_of,
)
from reprokit.capture.judge import Judge, Pending, is_bad_start
from reprokit.capture.meeting import NOTHING, Meeting
from reprokit.capture.roots import unwrapped
from reprokit.capture.structure import is_leaf, iter_tensors, map_leaves
from reprokit.capture.tape import Mark, Number, Op, Segment, Tape, makers_of, version_of, without_gradients
from reprokit.capture.tensor_names import is_unfollowed
from reprokit.capture.traits import VALUE_READS
from reprokit.capture.world import Copy, World, give_gradients, owned_by, python_generators_restored
from reprokit.errors import pass_on
from reprokit.locate.ways import bad_tensor
from reprokit.program.dataflow import copies_of, overlapping, same_bits
from reprokit.program.functions import GRAD_WRITES, written_argument
from reprokit.program.interpreter import Modes
from reprokit.program.ir import AUTOGRAD_GRAD, Phase, Program
from reprokit.program.sites import kind_of_file, make_site
from reprokit.program.trace import InputName, Tracer, recording
from reprokit.series.story import LayerNumbers
from reprokit.series.timeline import parameters_of
from reprokit.snapshot.rng import Generators

if TYPE_CHECKING:
    from reprokit.capture.meters import Meter
    from reprokit.locate.failure import Failure
    from reprokit.snapshot.format import StateBefore

_UNSEEN = "a tensor was written after the step had used it, by something the tape cannot see"
_ROUNDED = "the transform of `{}` was replayed by plain calls, whose results differ by rounding"


class Missing(Exception):
    """What an earlier step made, and a later one goes on with, is not known any more."""


class Player:
    """Plays calls. ``env`` maps numbers to the tensors that stand for those of the loop now, ``numbers`` is the inverse
    by ``id``; ``made`` are the numbers of what was made here.

    ``mismatches`` says in words what is known to differ from what the loop did. ``contents`` are values that earlier
    steps have left, ``state`` the ids of tensors that are put back as a whole, whoever wrote them, ``stand_ins`` are
    used in the place of other tensors, by the ``id`` of these. ``together``: all ranks play the same, and gradients
    are averaged again.
    """

    def __init__(
        self,
        tape: Tape,
        state: Set[int] = frozenset(),
        *,
        contents: Mapping[Number, torch.Tensor] | None = None,
        stand_ins: Mapping[int, torch.Tensor] | None = None,
        together: Meeting | None = None,
    ) -> None:
        self.mismatches: list[str] = []
        self.together = together
        self.env: dict[Number, torch.Tensor] = {}
        self.numbers: dict[int, Number] = {}
        self.made: set[Number] = set()
        self.alive = tape.alive()
        self._tape = tape
        self._state = state
        self._contents = dict(contents or {})
        self._stand_ins = dict(stand_ins or {})
        self._values: dict[Number, torch.Tensor] = {}
        self.states: dict[int, tuple[Any, torch.Tensor, str]] = {}  # where optimizers keep tensors, by ``id``

    def play(self, op: Op) -> Any:
        """Do what a call did."""
        self._check_versions(op)
        result = self.perform(op, *self.given(op))
        self.bind(op, result)
        return result

    def perform(self, op: Op, args: Any, kwargs: Any) -> Any:
        """Call again what was called."""
        return op.kind.play(self, op, args, kwargs)

    def bind(self, op: Op, result: Any) -> None:
        """The results stand for those of the loop from here on."""
        for number, new in zip(op.outs, iter_tensors(result), strict=False):
            self.env[number] = new
            self.numbers[id(new)] = number
            self.made.add(number)

    def given(self, op: Op) -> tuple[Any, Any]:
        """The arguments of a call in the replay."""
        change = self._value if reads_values(op) else self.tensor
        args = map_leaves(op.args, Number, change)
        return args, map_leaves(op.kwargs, Number, change) if op.kwargs else {}

    def tensor(self, number: Number) -> torch.Tensor:
        """The tensor of the replay for one of the loop."""
        known = self.env.get(number)
        if known is not None:
            return known
        live, content = self.alive.get(number), self._contents.get(number)
        if live is None and content is None:
            raise Missing("a step goes on with what was made before the last copy of the state")
        saved = self._tape.saved.get(number)
        if content is not None:
            found = content.detach().clone().requires_grad_(content.requires_grad)
        elif live is None:
            raise Missing
        elif id(live) in self._stand_ins:
            return self._stand_ins[id(live)]
        elif id(live) in self.states:  # the state of an optimizer, which may be made anew in the replay
            optimizer_state, parameter, name = self.states[id(live)]
            return optimizer_state.get(parameter, {}).get(name, live)  # type: ignore[no-any-return]
        elif saved is None and (not live.requires_grad or is_leaf(live)):
            found = live
        else:
            found = saved.clone() if saved is not None else live.detach()
            found = found.requires_grad_() if live.requires_grad else found
        self.env[number] = found
        self.numbers[id(found)] = number
        return found

    def _value(self, number: Number) -> torch.Tensor:
        """The replacement of a tensor whose graph is not used."""
        live = self._contents.get(number, self.alive.get(number, self._tape.before.get(number)))
        if number not in self.env and number not in self.alive and live is not None and number not in self._contents:
            return live
        if number in self.env or live is None or not live.requires_grad or is_leaf(live):
            return self.tensor(number)
        value = self._values.get(number)
        if value is None:
            saved = self._tape.saved.get(number) if number not in self._contents else None
            value = self._values[number] = (saved if saved is not None else live).detach().clone()
            self.numbers[id(value)] = number
        return value

    def keep(self, numbers: Set[Number]) -> None:
        """Let go of everything but what has these numbers."""
        self.env = {number: tensor for number, tensor in self.env.items() if number in numbers}
        self.numbers = {id(tensor): number for number, tensor in self.env.items()}
        self._values = {}
        self.made &= numbers

    def module(self, op: Op) -> torch.nn.Module:
        """The module to call for the call of a root."""
        target = unwrapped(op.target)
        if self.together is not None and (self.together.is_sharded or (target is not op.target and op.mode.grad)):
            self.together.meet("module")
            return op.target  # type: ignore[no-any-return]
        return target

    def before_backward(self) -> None:
        """A backward pass is about to be played."""
        if self.together is not None:
            self.together.meet("backward")

    def _check_versions(self, op: Op) -> None:
        stamps, saved = self._tape.stamps, self._tape.saved
        for number in op.ins:
            stamp, live = stamps.get(number, -1), self.alive.get(number)
            if stamp < 0 or live is None or number in self.made or number in saved or number in self._contents:
                continue
            if isinstance(live, torch.nn.Parameter) or id(live) in self._state or version_of(live) == stamp:
                continue
            if name_of(op) != "torch.Tensor.zero_" and _UNSEEN not in self.mismatches:
                self.mismatches.append(_UNSEEN)


def reads_values(op: Op) -> bool:
    """True if no gradient flows through a call, so that it takes its arguments without their graphs."""
    return not op.mode.grad or name_of(op) in VALUE_READS


def leaves_in(ops: Iterable[Op], alive: Mapping[Number, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves whose gradients playing the calls may change."""
    for op in ops:
        yield from (alive[number] for number in op.ins if number in alive and is_leaf(alive[number]))
        if op.kind is OptimizerStep:
            yield from parameters_of(op.target)
        elif op.kind is ZeroGrad:
            yield from owned_by(op.args[0])


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


def put_first_back(ops: Iterable[Op]) -> None:
    """Give the root modules the attributes that they had in their first calls."""
    first: dict[int, Any] = {}
    for op in ops:
        noted = getattr(op.note, "attributes", None) if op.kind in (Root, Function) else None
        if noted is not None:
            first.setdefault(id(op.target if op.kind is Root else op.args[0]), noted)
    for noted in first.values():
        noted.put_back()


# -- hooks ---------------------------------------------------------------------------------------------------------


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
        return register(tensor, _quiet(hook, met) if _is_users(hook) else hook)

    tables = list(torch_private.hook_tables(modules, leaves))
    before = [(table, dict(table)) for table, _ in tables]
    try:
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
        for table, is_of_backward in tables:
            for key, hook in list(table.items()):
                if is_recorded and is_of_backward and _is_users(hook):
                    met.append(table.pop(key))
                elif _is_users(hook):  # those of torch may be what other processes wait for
                    table[key] = _quiet(hook, met)
        yield met
    finally:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]
        for table, content in before:
            table.clear()
            table.update(content)


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


# -- recording -----------------------------------------------------------------------------------------------------


@dataclass
class ReplayedStep:
    """The program of a step, and how well running it agrees with what the loop saw.

    ``mismatches`` says in words what differed, best known first; empty means bit-equal. ``error`` is what playing
    raised. ``borrowed`` are the inputs that share memory with live tensors until `own_tensors`; ``sources`` are the
    loop's tensors behind the inputs, ``losses`` what backward passes started from, ``seen`` the same in training,
    ``devices`` where inputs were, by value number. ``of_loop`` are the values that calls of the loop itself have made,
    with their names. Known by then: the ``failure``, the state ``before``, the generators' states (``rng``), and the
    ``hooks`` that raised or were left out.
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
    failure: Failure | None = None
    before: StateBefore | None = None
    rng: Generators = field(default_factory=Generators)
    hooks: Sequence[Any] = ()

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


Describe = Callable[[Number | None, torch.Tensor], InputName | None]


class TracedPlayer(Player):
    """Plays calls under the ``tracer``. ``performs`` is false for a backward call that is recorded only."""

    def __init__(
        self, tape: Tape, describe: Describe, root_names: Mapping[int, str] | None, state: Set[int], **options: Any
    ) -> None:
        super().__init__(tape, state, **options)
        self.zeroed: dict[int, tuple[torch.Tensor, int]] = {}  # what `zero_grad` has left of gradients
        self.tracer = Tracer(self._describe, driver=__file__.replace("replay.py", "calls.py"), root_names=root_names)
        self.losses: dict[int, torch.Tensor] = {}
        self.seen_losses: dict[int, torch.Tensor | float] = {}
        self.of_loop: dict[int, str] = {}
        self.is_close = True
        self.has_differentiated = False
        self.performs = True
        self._describe_old = describe

    def record(self, op: Op, *, performs: bool) -> None:
        """Do what a call did and record it; a backward call may be recorded without being performed."""
        library = getattr(op.note, "library", None)
        self.tracer.outer_site = make_site(op.code, op.instruction, library) if op.code is not None else None
        self.tracer.outer_scope = ()
        self.performs = performs
        with torch.DisableTorchFunction():  # our own work is not part of the step
            self._check_versions(op)
            args, kwargs = self.given(op)
        self.bind(op, self.perform(op, args, kwargs))
        for number in op.outs if op.kind is Function else ():
            tensor = self.env.get(number)
            value = self.tracer.value_of(tensor) if tensor is not None else None
            if value is not None:
                origin = self._describe_old(number, self.alive.get(number, tensor))  # type: ignore[arg-type]
                self.of_loop[value] = origin.name if origin is not None else "input"

    def perform(self, op: Op, args: Any, kwargs: Any) -> Any:
        return op.kind.trace(self, op, args, kwargs)

    def starts_of_training(self, op: Op) -> list[torch.Tensor]:
        """What a backward call has started from in training, as far as that is still there."""
        return [self.alive[n] for n in starts_of(op.args, op.kwargs) if isinstance(n, Number) and n in self.alive]

    def compare_loss(self, old: torch.Tensor | float, new: torch.Tensor) -> None:
        """Note if a backward pass starts from another value than in training."""
        if not is_same(old, new):
            self.mismatches.append(describe_mismatch("the loss", old, new))
            self.is_close = self.is_close and is_close(old, new)
        value = self.tracer.value_of(new)
        if value is not None:
            self.losses[value], self.seen_losses[value] = new.detach().clone(), old

    def has_computed(self, parameter: torch.Tensor) -> bool:
        """True if the program itself computes a gradient, which is not what `zero_grad` has left of an older one."""
        left = self.zeroed.get(id(parameter))
        is_left = left is not None and left[0] is parameter.grad and left[0]._version == left[1]
        return self.has_differentiated and not is_left

    def source_of(self, value: int) -> torch.Tensor | None:
        """The loop's own tensor behind an input of the program."""
        tensor = self.tracer.tensor_of(value)
        if tensor is None:
            return None
        number = self.numbers.get(id(tensor))
        return self.alive.get(number, tensor) if number is not None else tensor

    def _describe(self, tensor: torch.Tensor) -> InputName | None:
        number = self.numbers.get(id(tensor))
        old = self.alive.get(number, tensor) if number is not None else tensor
        origin = self._describe_old(number, old)
        if is_unfollowed(old):
            return replace(origin or InputName("input"), role="opaque")
        is_value = origin is not None and origin.role == "opaque" and not tensor.requires_grad
        return None if is_value else origin  # used without the graph that an earlier step made


def record(
    recorder: TracedPlayer, ops: list[Op], *, performs_last: bool, raises: bool = False, keep: Op | None = None
) -> ReplayedStep:
    """Run calls again and record them.

    ``performs_last`` is false when the last one is a backward call that the loop is not to come to, because its start
    was already bad; ``raises`` is true when the last one is expected to raise. ``keep`` is a call to run in any case.
    """
    needed = ops if raises else needed_ops(ops, keep)
    error = None
    with recording(recorder.tracer), Modes() as modes:
        updating = _start_of_hand_update(needed)
        for position, op in enumerate(needed):
            modes.enter(op.mode)
            recorder.tracer.phase = Phase.OPTIMIZER if position >= updating else Phase.FORWARD
            try:
                recorder.record(op, performs=performs_last or position < len(needed) - 1)
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


def needed_ops(ops: Sequence[Op], keep: Op | None = None) -> list[Op]:
    """Those calls that backward calls, optimizer steps and ``keep`` depend on, in order; also writes, and training
    calls of modules whose buffers a later evaluation reads."""
    if not any(op.kind.differentiates for op in ops):
        return list(ops)
    needed: set[Number] = set()
    read: set[int] = set()
    kept: list[Op] = []
    for op in reversed(ops):
        is_root = op.kind is Root
        buffers = set(map(id, op.target.buffers())) if is_root else set()
        is_pure = op.kind.is_forward and (op.kind.is_pure(op) or is_root)
        is_pure = is_pure and not (is_root and op.note.is_training and buffers & read)
        if op is keep or not is_pure or not needed.isdisjoint(op.outs):
            kept.append(op)
            needed.update(op.ins)
            read |= buffers if is_root and not op.note.is_training else set()
    return kept[::-1]


def _start_of_hand_update(ops: Sequence[Op]) -> int:
    """The position from which on the loop updates parameters by itself; behind the end when it does not."""
    if all(op.kind.writes_state(op) or op.kind is OptimizerStep for op in ops):
        return 0
    sources = [[n for n, op in enumerate(ops) if op.kind is kind] for kind in (Backward, Transform)]
    last = next((numbers[-1] for numbers in sources if numbers), len(ops))
    return last + 1 if any(op.kind.writes_state(op) for op in ops[last + 1 :]) else len(ops)


# -- the steps since a copy ----------------------------------------------------------------------------------------


@dataclass
class Found:
    """The first bad step: ``ops`` lead from the state that has been put back to what was bad at ``where``.

    ``pending`` is the backward call whose start was bad, which is not to be performed. ``keep`` is the call that
    ruined a part of the state that was watched. ``contents`` are values that earlier steps have left. ``notes`` say
    what differed from training on the way. ``gradients`` are those of training when it was seen, if they are known.
    """

    number: int
    where: str
    ops: list[Op]
    pending: Op | None = None
    keep: Op | None = None
    contents: dict[Number, torch.Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gradients: list[tuple[torch.Tensor, torch.Tensor]] | None = None


class PlayObserver(Protocol):
    """Is shown what a replay plays."""

    def before(self, mark: Mark, op: Op) -> None:
        """A call is about to be played."""

    def after(self, op: Op) -> None:
        """A call was played."""


class Replay:
    """Plays ``segments``, the steps since a ``copy``. ``going_back`` is the context in which the live state is
    borrowed.

    Looks for the step that makes one of the ``ruined`` parts of the state nan or inf, if there are any; else for the
    first bad loss, gradient or parameter. ``skipped`` are the numbers of steps with a bad loss of which no update was
    made; with ``takes_skipped`` they are failures like any other. ``expected`` is a backward call from a bad start of
    which the loop is about to make an update behind the last step. ``together``: all ranks play at once.
    """

    def __init__(
        self,
        world: World,
        tape: Tape,
        segments: Sequence[Segment],
        copy: Copy,
        *,
        ruined: Sequence[torch.Tensor] = (),
        takes_skipped: bool = False,
        expected: Op | None = None,
        together: Meeting | None = None,
    ) -> None:
        self._expected = expected
        self.together = together
        self.skipped: list[int] = []
        self.segments = _with_carried(tape, segments)
        self._world, self._tape, self._copy = world, tape, copy
        self._ruined, self._takes_skipped = ruined, takes_skipped
        self._alive = tape.alive()
        self._last_use = _last_use(self.segments)
        self._state = world.state_ids()
        self._player: Player
        self._start = Copy()
        self._live: dict[int, torch.Tensor] = {}
        self._live_gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._notes: list[str] = []
        self._other_losses: list[str] = []

    @property
    def notes(self) -> list[str]:
        """The differences from training; of losses the first one."""
        return [*self._other_losses[:1], *self._notes]

    @contextlib.contextmanager
    def going_back(self) -> Iterator[None]:
        """The state of the copy; afterwards everything is as it was. Raises `CannotGoBack` with nothing changed."""
        leaves = self.leaves()
        self._live_gradients = [(leaf, leaf.grad) for leaf in leaves]
        gradients = self._live_gradients if self.together is not None else []
        kept = [(grad, grad.clone()) for _, grad in gradients if grad is not None]
        changing = self._world.changing()
        self._live = {id(t): t.detach().clone() for t in changing if t.requires_grad}
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if self.together is not None:
                stack.enter_context(self.together.playing())
            for grad, content in kept:  # gradients may be views of memory that averaging writes
                stack.callback(grad.data.copy_, content)
            states = {
                id(value): (optimizer.state, parameter, name)
                for optimizer in self._world.optimizers
                for parameter, state in optimizer.state.items()
                if isinstance(state, dict)
                for name, value in state.items()
                if isinstance(value, torch.Tensor)
            }
            stack.enter_context(self._world.at(self._copy, leaves))
            self._player = Player(self._tape, self._state, together=self.together)
            self._player.states = states
            yield

    def leaves(self) -> list[torch.Tensor]:
        """Everything that a played step may give a gradient."""
        leaves = {id(tensor): tensor for tensor in self._world.changing() if is_leaf(tensor)}
        for module in self._world.modules:  # also what is frozen by now and has a gradient from before
            leaves.update((id(parameter), parameter) for parameter in module.parameters())
        for segment in self.segments:
            leaves.update((id(leaf), leaf) for leaf in leaves_in(segment.ops, self._alive))
        return list(leaves.values())

    # -- playing -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _step(self, number: int) -> Iterator[Modes]:
        """In this context a step is played; afterwards only what later steps use is known of it."""
        segment = self.segments[number]
        put_first_back(segment.ops)
        with Modes() as modes, python_generators_restored(segment.mark.generators):
            yield modes
        self._notes += [note for note in self._player.mismatches if note not in self._notes]
        self._player.keep({n for n in self._player.env if self._last_use.get(n, -1) > number})

    def play_until(self, number: int, observer: PlayObserver | None = None) -> dict[Number, torch.Tensor]:
        """Play the steps before ``number``; returns the values that they have left for it.

        An ``observer`` is shown every call right before and after it is played.
        """
        for position in range(min(number, len(self.segments))):
            self._play_whole(position, observer)
        return self._contents()

    def _play_whole(self, number: int, observer: PlayObserver | None) -> bool:
        """Play a step; true if its losses are those of training."""
        segment, is_alike = self.segments[number], True
        with self._step(number) as modes:
            for op in segment.ops:
                modes.enter(op.mode)
                if op.kind is Backward:
                    is_alike &= self._compare(op, segment.mark)
                if observer is not None:
                    observer.before(segment.mark, op)
                self._player.play(op)
                if op.kind is Backward and self.together is not None:
                    op.note.averaged = averaged_gradients(self._world.modules)
                if observer is not None:
                    observer.after(op)
        return is_alike

    def _contents(self) -> dict[Number, torch.Tensor]:
        player = self._player
        return {number: tensor for number, tensor in player.env.items() if number in player.made}

    def begin(self, number: int) -> tuple[list[Op], dict[Number, torch.Tensor]]:
        """Play the steps before ``number`` and what the loop wrote by hand before its forward pass.

        Returns the calls of the step that are left, and the values that earlier steps have left for them.
        """
        contents = self.play_until(number)
        segment = self.segments[number]
        lead, rest = split(segment.ops)
        put_first_back(segment.ops)
        with Modes() as modes, python_generators_restored(segment.mark.generators):
            for op in lead:
                modes.enter(op.mode)
                self._player.play(op)
        return [*(op for op in lead if not op.kind.writes_state(op)), *rest], contents

    def measured(self, meter: Meter, last: int) -> list[LayerNumbers]:
        """Play the steps up to the one that ``last`` counts, and measure the layers in each.

        Ends before the first step with a loss that is not that of training.
        """
        rows: list[LayerNumbers] = []
        with meter.watching():
            for number, segment in enumerate(self.segments):
                if segment.mark.step > last or not self._play_whole(number, meter):
                    break
                rows += meter.rows()
        return rows

    # -- finding -------------------------------------------------------------------------------------------------

    def find(self) -> Found | None:
        """Play until something is bad, then go back to where that step began; ``None`` also if training contradicts."""
        judge = Judge(self.leaves, lambda: self._world.parameters)
        start: Copy | None = None  # of the step with a pending loss
        contents: dict[Number, torch.Tensor] = {}
        number_of_pending = -1
        for number in range(len(self.segments)):
            is_open = judge.pending is not None
            if not is_open:
                start, number_of_pending = Copy(), number
                contents = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in self._contents().items()}
            num_notes = len(self._notes) + len(self._other_losses)
            with self._step(number) as modes:
                found, rest = self._look(number, judge, modes, None if is_open else start)
                if found is not None:
                    if found.number < 0:  # the loss that is pending since
                        assert judge.pending is not None
                        found.number = number_of_pending
                        self._locate_pending(found, judge.pending.note)
                    is_over = False
                    if self.together is not None:
                        self.together.report(found)
                        is_over = self.together.is_sharded  # else what follows needs no other rank
                        self.together = self._player.together = None
                    found.gradients = self._gradients_of_training(found, number)
                    differs = len(self._notes) + len(self._other_losses) > num_notes
                    if differs or not (is_over or self._agrees_afterwards(found, number, rest, modes)):
                        return None
            if found is not None:
                assert start is not None
                found.contents = contents
                give_gradients([(leaf, None) for leaf in self.leaves()])
                start.give_back()
                found.notes = self.notes
                return found
        if self.together is not None:
            self.together.stop(NOTHING)
        return None

    def _look(self, number: int, judge: Judge, modes: Modes, start: Copy | None) -> tuple[Found | None, Iterator[Op]]:
        """The nan or inf of a step, and the calls that were not played. ``start`` gets the state that the forward pass
        of the step begins with."""
        segment, world, player = self.segments[number], self._world, self._player
        lead, rest = split(segment.ops)
        if not rest:  # the training ended with what the loop wrote by hand
            lead, rest = rest, lead
        is_ruin = bool(self._ruined)
        if is_ruin and start is not None:
            self._take(start)
        keep: Op | None = None
        for op in lead:
            modes.enter(op.mode)
            player.play(op)
            keep = op if is_ruin and keep is None and self._has_ruined(op) else keep
        if keep is None and start is not None:
            self._take(start)
        made = [op for op in lead if keep is not None or not op.kind.writes_state(op)]
        ops, remaining = [*made, *rest], iter(rest)
        for position, op in enumerate(remaining, len(made)):
            modes.enter(op.mode)
            before = judge.pending
            where = self._play_looking(op, judge, segment.mark, ops[:position])
            if is_ruin and keep is None and self._has_ruined(op):
                keep = op
            if where is None or (is_ruin and keep is None):
                continue
            if where == "loss" and op.kind is not CompiledStep:
                pending = judge.pending or before
                assert pending is not None
                place = next((n for n, o in enumerate(ops[: position + 1]) if o.note is pending.note), None)
                found = Found(number if place is not None else -1, where, [], keep=keep)
                found.pending = ops[place] if place is not None else None
                found.ops = _without_skipped(ops[:place]) if place is not None else []
                return found, _again(op, remaining)
            is_over = where == "parameter" or op.kind is CompiledStep
            end = position + is_over
            led = _without_skipped(_without_update(ops[:end], where))
            found = Found(number, where, led, keep=keep)
            return found, remaining if is_over else _again(op, remaining)
        judge.end_step()
        if keep is not None:
            where = "output" if keep.kind is Root else "parameter"
            return Found(number, where, _without_update(ops, where, keep), keep=keep), remaining
        has_written = any(op.kind.writes_state(op) for op in rest)
        if not is_ruin and has_written and world.newly_bad() is not None:
            return Found(number, "parameter", ops), remaining
        if judge.pending is not None and self._expected is not None and number == len(self.segments) - 1:
            return Found(-1, "loss", []), remaining
        return None, remaining

    def _locate_pending(self, found: Found, note: Any) -> None:
        """The step of a loss that was bad some steps before the update that was made of it."""
        for number, segment in enumerate(self.segments):
            lead, rest = split(segment.ops)
            ops = [*(op for op in lead if not op.kind.writes_state(op)), *rest]
            place = next((n for n, op in enumerate(ops) if op.note is note), None)
            if place is not None:
                found.number, found.ops, found.pending = number, _without_skipped(ops[:place]), ops[place]
                return

    def _take(self, start: Copy) -> None:
        start.take(self._world.changing(), self._world.optimizers, self._world.modules)

    def _play_looking(self, op: Op, judge: Judge, mark: Mark, before: Sequence[Op]) -> str | None:
        """Play one call; where it is bad, or ``None``."""
        player, world = self._player, self._world
        if op.kind is Backward:
            outcome = self._begin_backward(op, judge, mark, before)
            if outcome == "failed":
                return "loss"
            result = player.play(op)
            judge.end(op.note, list(iter_tensors(result)))
            if self.together is not None:
                op.note.averaged = averaged_gradients(world.modules)
            return "parameter" if op.note.has_stepped and world.newly_bad() is not None else None
        if op.kind is OptimizerStep:
            parameters = list(parameters_of(op.target))
            if (outcome := self._update(judge, parameters, ())) is not None:
                return outcome
            grads = [p.grad for p in parameters if p.grad is not None]
            if not op.note.scaler and bad_tensor(grads) is not None:
                return "gradient"
            player.play(op)
            return "parameter" if world.newly_bad() is not None else None
        if op.kind.writes_state(op):
            written = written_argument(name_of(op), *player.given(op))
            owners = [world.owner_of(t) for t in iter_tensors(written)]
            trained = [owner for owner in owners if owner is not None and world.is_trained(owner)]
            given = [t for t in iter_tensors(player.given(op)) if trained]
            if trained and (outcome := self._update(judge, trained, given)) is not None:
                return outcome
            player.play(op)
            return None
        player.play(op)
        if op.kind is ZeroGrad:
            judge.clear(owned_by(op.args[0]))
        elif op.kind is Function and judge.pending is not None and op.note is not None and op.note.is_write:
            written = written_argument(name_of(op), *player.given(op))
            if name_of(op) in GRAD_WRITES or any(leaf.grad is written for leaf in self.leaves()):
                judge.correct()
        elif op.kind is CompiledStep:
            results = self._seen(op)
            self._note_losses([(op.note.seen[place], new) for place, new in results.items()], mark)
            if op.note.has_stepped and bad_tensor(results.values()) is not None:
                return "loss"
            return "parameter" if op.note.has_stepped and world.newly_bad() is not None else None
        return None

    def _seen(self, op: Op) -> dict[int, torch.Tensor]:
        """The losses that a compiled function returns in the replay, by their position among its results."""
        return {place: self._player.env[op.outs[place]] for place in op.note.seen if place < len(op.outs)}

    def _begin_backward(self, op: Op, judge: Judge, mark: Mark, before: Sequence[Op]) -> str | None:
        with torch.no_grad():
            self._compare(op, mark)
            numbers = [n for n in starts_of(op.args, op.kwargs) if isinstance(n, Number)]
            starts = [self._player.tensor(unscaled(before, number)) for number in numbers]
            gives = gives_gradients(op)
            is_bad = is_bad_start(starts, gives_gradients=gives)
        is_asked = name_of(op) == AUTOGRAD_GRAD
        counts = is_bad and not (is_asked and (gives or sum(map(torch.Tensor.numel, starts)) != 1))
        if not counts and judge.pending is None:
            return None
        behind = judge.behind([self._player.tensor(number) for number in numbers]) if counts else set()
        call = Pending(op.note, (op.code, op.instruction), is_asked, behind, mark.step, None, 0)
        outcome = judge.begin(call, counts)
        if outcome == "skipped":
            self.skipped.append(mark.step)
        return outcome

    def _update(self, judge: Judge, parameters: Sequence[torch.Tensor], given: Iterable[torch.Tensor]) -> str | None:
        pending = judge.pending
        outcome = judge.update(parameters, given) if pending is not None else None
        if outcome == "skipped" and pending is not None:
            self.skipped.append(pending.step)
            if self._takes_skipped:
                judge.pending = pending
                return "loss"
        return "loss" if outcome == "failed" else None

    def _has_ruined(self, op: Op) -> bool:
        """True if a call may have changed the state, and a part of it that is looked for is bad now."""
        changes = op.kind in (Root, OptimizerStep) or op.kind.writes_state(op) or getattr(op.note, "has_stepped", False)
        return changes and any(map(self._world.has_worsened, self._ruined))

    def _gradients_of_training(self, found: Found, number: int) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """The gradients that training had when they were to be used, which the user's hooks may have changed."""
        if number == len(self.segments) - 1 and found.where == "gradient":
            return [(leaf, grad) for leaf, grad in self._live_gradients if grad is not None]
        if found.where not in ("gradient", "parameter"):
            return None
        return [(leaf, leaf.grad.clone()) for leaf in self.leaves() if leaf.grad is not None]

    def _agrees_afterwards(self, found: Found, number: int, rest: Iterator[Op], modes: Modes) -> bool:
        """Go on as training did: True if the next loss it saw, or the parameters that it ended with, are the same."""
        if found.pending is not None and found.pending.note.losses:
            return True  # that loss was bad in training too
        player = self._player
        for later in range(number, len(self.segments)):
            segment = self.segments[later]
            for op in rest if later == number else segment.ops:
                modes.enter(op.mode)
                if op.kind is Backward and op.note.losses:
                    return self._compare(op, segment.mark)
                player.play(op)
                if op.kind is CompiledStep and op.note.seen:
                    pairs = [(op.note.seen[place], new) for place, new in self._seen(op).items()]
                    return self._note_losses(pairs, segment.mark)
        changed = [t for t in self._world.changing() if t.requires_grad and id(t) in self._live]
        if all(same_bits(self._live[id(tensor)], tensor) for tensor in changed):
            return True
        self._notes.append("playing the steps since the last copy did not lead to the parameters that training has")
        return False

    def _compare(self, op: Op, mark: Mark) -> bool:
        """True if the backward pass starts from the same value as in training; a difference becomes a note."""
        numbers = [n for n in starts_of(op.args, op.kwargs) if isinstance(n, Number)]
        olds = op.note.losses or ()
        return self._note_losses([(old, self._player.tensor(n)) for old, n in zip(olds, numbers, strict=False)], mark)

    def _note_losses(self, pairs: Sequence[tuple[Any, torch.Tensor]], mark: Mark) -> bool:
        differ = [(old, new) for old, new in pairs if not is_same(old, new)]
        self._other_losses += [describe_mismatch(f"the loss of step {mark.step}", old, new) for old, new in differ]
        return not differ


def _again(op: Op, rest: Iterator[Op]) -> Iterator[Op]:
    yield op
    yield from rest


def _with_carried(tape: Tape, segments: Sequence[Segment]) -> list[Segment]:
    """The steps, the first one begun with what was made before the copy for them."""
    found = [Segment(list(segment.ops), segment.mark) for segment in segments]
    produced = {number for segment in segments for op in segment.ops for number in op.outs}
    used = {number for segment in segments for op in segment.ops if not reads_values(op) for number in op.ins}
    carried = makers_of(used - produced, tape.carried)
    if found and carried:
        lead, rest = split(found[0].ops)
        found[0] = Segment([*lead, *carried, *rest], found[0].mark)
    return found


def _last_use(segments: Sequence[Segment]) -> dict[Number, int]:
    """The last step that uses what has a number."""
    return {number: place for place, segment in enumerate(segments) for op in segment.ops for number in op.ins}


def split(ops: Sequence[Op]) -> tuple[list[Op], list[Op]]:
    """The manual changes before the first forward pass of a step, and the rest."""
    first = next((n for n, op in enumerate(ops) if op.kind in _FORWARDS), len(ops))
    end = max((n + 1 for n in range(first) if ops[n].kind.writes_state(ops[n])), default=0)
    return list(ops[:end]), list(ops[end:])


_FORWARDS = (Root, Transform, Backward, CompiledStep)


def _without_update(ops: list[Op], where: str, keep: Op | None = None) -> list[Op]:
    """``ops`` without the update behind the last backward call and ``keep``, unless it made a parameter bad."""
    if where == "loss" or (where == "parameter" and keep is None):
        return ops
    last = max((n for n, op in enumerate(ops) if op.kind is Backward or op is keep), default=len(ops))
    later = [op for op in ops[last + 1 :] if not (op.kind.writes_state(op) or op.kind is OptimizerStep)]
    return ops[: last + 1] + later


def _without_skipped(ops: Sequence[Op]) -> list[Op]:
    return [ops[position] for position in without_gradients(ops)]


def unscaled(ops: Sequence[Op], start: Number) -> Number:
    """The number of what a grad scaler was given, if ``start`` is its product."""
    for op in reversed(ops):
        if op.kind is ScaleLoss and start in op.outs:
            number: Number = op.ins[op.outs.index(start)]
            return number
    return start


def averaged_gradients(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters whose gradients `DistributedDataParallel` averages, each with a copy of its gradient."""
    leaves = [parameter for module in modules if unwrapped(module) is not module for parameter in module.parameters()]
    return [(leaf, leaf.grad.clone()) for leaf in leaves if leaf.grad is not None]


def num_backward(ops: Iterable[Op | None]) -> int:
    """Backward calls among calls that leave gradients."""
    return sum(op is not None and op.kind is Backward and name_of(op) != AUTOGRAD_GRAD for op in ops)


def with_makers(ops: Sequence[Op], earlier: Sequence[Op], tape: Tape, known: Mapping[Number, torch.Tensor]) -> list[Op]:
    """``ops`` of a step behind those of ``earlier`` ones that made the graphs it goes on with.

    What is ``known`` without a graph is used by its value.
    """
    produced: set[Number] = set()
    wanted: set[Number] = set()
    for op in ops:
        for number in op.ins if not reads_values(op) else ():
            tensor = known.get(number)
            is_value = tensor is not None and (not tensor.requires_grad or is_leaf(tensor))
            if number not in produced and number not in tape.inputs and not is_value:
                wanted.add(number)
        produced.update(op.outs)
    return [*makers_of(wanted, earlier), *ops]
