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
import io
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from reprokit import members, native, torch_private
from reprokit.capture import calls
from reprokit.capture.calls import Backward, CompiledStep, Function, OptimizerStep, Root, Transform, ZeroGrad
from reprokit.capture.judge import Judge, Pending, is_bad_start
from reprokit.capture.meeting import NOTHING, Meeting
from reprokit.capture.mode import seen, unseen
from reprokit.capture.roots import unwrapped
from reprokit.capture.structure import TENSORS, is_leaf, iter_tensors, map_leaves, space_of
from reprokit.capture.tape import Mark, Number, Op, Segment, Tape, makers_of, version_of, without_gradients
from reprokit.capture.tensor_names import is_unfollowed
from reprokit.capture.traits import VALUE_READS
from reprokit.capture.world import CannotGoBack, Contents, Copy, World, give_gradients, owned_by, set_python_generators
from reprokit.errors import pass_on
from reprokit.limits import CpuLimit
from reprokit.locate.ways import bad_tensor
from reprokit.own_work import ignored_warnings
from reprokit.program.dataflow import copies_of, overlapping, same_bits
from reprokit.program.functions import GRAD_WRITES, written_argument
from reprokit.program.interpreter import Modes, Tensors
from reprokit.program.ir import AUTOGRAD_GRAD, Phase, Program
from reprokit.program.sites import kind_of_file, make_site
from reprokit.program.trace import InputName, Tracer, recording
from reprokit.series.timeline import parameters_of
from reprokit.snapshot.rng import get_rng_state

if TYPE_CHECKING:
    from reprokit.capture.save import Raised
    from reprokit.locate.failure import Failure
    from reprokit.snapshot.format import StateBefore

BEGUN_BEFORE = "a step goes on with a graph from before the last copy of the state, so there was no going back"
_UNSEEN = "a tensor was written after the step had used it, by something the tape cannot see"
_ROUNDED = "the transform of `{}` was replayed by plain calls, whose results differ by rounding"


class _Tracer(Tracer):
    """Copies are work of our own, although calls are recorded while modes of the script are asked about them."""

    def adopt(self, tensor: torch.Tensor, origin: InputName) -> int:
        with unseen():
            return super().adopt(tensor, origin)

    def save_before_write(self, target: torch.Tensor) -> None:
        with unseen():
            super().save_before_write(target)


def like(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """The copy as an object of the tensor's class with its attributes: classes do not see that we copy, so they are not
    asked to make one."""
    cls = type(tensor)
    if cls in TENSORS or type(copy) is cls:
        return copy
    made = native.as_subclass(copy, cls)
    space_of(made).update(space_of(tensor))
    return made


class Player:
    """Plays calls."""

    def __init__(
        self,
        tape: Tape,
        state: Set[int] = frozenset(),
        *,
        contents: Mapping[Number, torch.Tensor] | None = None,
        stand_ins: Mapping[int, torch.Tensor] | None = None,
        together: Meeting | None = None,
    ) -> None:
        self.mismatches: list[str] = []  # what is known to differ from what the loop did, in words
        self.together = together  # all ranks play the same, and gradients are averaged again
        self.env: dict[Number, torch.Tensor] = {}  # the tensors that stand for those of the loop now
        self.numbers: dict[int, Number] = {}  # the inverse, by ``id``
        self.made: set[Number] = set()  # of what was made here
        self.alive = tape.alive()
        self._tape = tape
        self._state = state  # the ids of tensors that are put back as a whole, whoever wrote them
        self._contents = dict(contents or {})  # values that earlier steps have left
        self._stand_ins = dict(stand_ins or {})  # for other tensors, by the ``id`` of these
        self._values: dict[Number, torch.Tensor] = {}
        self.states: dict[int, tuple[Any, torch.Tensor, str]] = {}  # where optimizers keep tensors, by ``id``

    def play(self, op: Op) -> Any:
        """Do what a call did."""
        self._check_versions(op)
        args, kwargs = self.given(op)
        with seen(), native.their_operators():
            result = op.kind.play(self, op, args, kwargs)
        self.bind(op, result)
        return result

    def bind(self, op: Op, result: Any) -> None:
        """The results stand for those of the loop from here on; not for what is state by now and was none when the
        loop wrote it."""
        for number, new in zip(op.outs, iter_tensors(result), strict=False):
            live = self.alive.get(number)
            if live is not None and live is not new and id(live) in self._state:
                continue
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
        saved = self._tape.saved.get(number) if id(live) not in self._state else None
        if content is not None:
            found = native.requires_grad_(like(content, native.clone(native.detach(content))), content.requires_grad)
        elif live is None:
            raise CannotGoBack(BEGUN_BEFORE)
        elif id(live) in self._stand_ins:
            return self._stand_ins[id(live)]
        elif id(live) in self.states:  # the state of an optimizer, which may be made anew in the replay
            optimizer_state, parameter, name = self.states[id(live)]
            return optimizer_state.get(parameter, {}).get(name, live)  # type: ignore[no-any-return]
        elif saved is None and (not live.requires_grad or is_leaf(live)):
            found = live
        else:
            found = like(live, native.clone(saved) if saved is not None else native.detach(live))
            found = native.requires_grad_(found) if live.requires_grad else found
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
            value = like(live, native.clone(native.detach(saved if saved is not None else live)))
            self._values[number] = value
            self.numbers[id(value)] = number
        return value

    def value(self, number: Number) -> torch.Tensor | None:
        """The tensor that a number refers to now; no copy with a graph is made. ``None`` if it is unknown."""
        known = self.env.get(number, self._contents.get(number, self._tape.saved.get(number)))
        return known if known is not None else self.alive.get(number)

    def replace(self, number: Number, value: torch.Tensor) -> None:
        """Let another value stand for a number from here on."""
        old = self.value(number)
        if old is not None and old is not value:
            self.env[number] = native.requires_grad_(like(old, native.clone(value)), old.requires_grad)
            self.numbers[id(self.env[number])] = number

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
            if calls.name_of(op) != "torch.Tensor.zero_" and _UNSEEN not in self.mismatches:
                self.mismatches.append(_UNSEEN)


def reads_values(op: Op) -> bool:
    """True if no gradient flows through a call, so that it takes its arguments without their graphs."""
    return not op.mode.grad or calls.name_of(op) in VALUE_READS


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
    value = native.item(native.detach(new))
    if value != value or seen != seen:
        return value != value and seen != seen
    return value == seen and math.copysign(1, value) == math.copysign(1, seen)


def is_close(seen: torch.Tensor | float, new: torch.Tensor) -> bool:
    """True if a tensor differs from what was seen by no more than rounding may."""
    before = native.detach(seen) if isinstance(seen, torch.Tensor) else native.tensor(seen, dtype=new.dtype)
    same_kind = before.shape == new.shape and before.dtype == new.dtype
    return same_kind and native.allclose(native.to(before, new.device), native.detach(new), rtol=1e-3, equal_nan=True)


def describe_mismatch(what: str, old: torch.Tensor | float, new: torch.Tensor) -> str:
    """In which way two tensors that ought to be equal are not."""
    if native.numel(new) == 1 and (not isinstance(old, torch.Tensor) or native.numel(old) == 1):
        return f"{what} was {float(old):.9g} in training and {float(native.detach(new)):.9g} in the replay"
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


@contextlib.contextmanager
def in_silence() -> Iterator[None]:
    """Discards stdout and stderr of the user's code, which training has printed already."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def quiet_hooks(
    modules: Iterable[torch.nn.Module], leaves: Iterable[torch.Tensor], *, is_recorded: bool = False
) -> Iterator[list[Any]]:
    """Ignore what hooks raise. Yields the list of hooks that have raised, or were left out of a recorded step."""
    met: list[Any] = []
    register: Any = torch.Tensor.register_hook

    def quiet(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook, assigned=("__name__", "__doc__"), updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception as error:
                pass_on(error)
                met.append(hook)
                return None

        return call

    def register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if is_recorded and _is_users(hook):
            met.append(hook)
            return RemovableHandle(OrderedDict())
        return register(tensor, quiet(hook) if _is_users(hook) else hook)

    tables = list(torch_private.hook_tables(members.parts(modules), leaves))
    before = [(table, dict(table)) for table, _ in tables]
    try:
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
        for table, is_of_backward in tables:
            for key, hook in list(table.items()):
                if is_recorded and is_of_backward and _is_users(hook):
                    met.append(table.pop(key))
                elif _is_users(hook):  # those of torch may be what other processes wait for
                    table[key] = quiet(hook)
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


class TracedPlayer(Player):
    """Plays calls under the ``tracer``, so that they become a ``program``, and compares them with what the loop saw:
    ``mismatches`` says in words what differed, best known first; empty means bit-equal."""

    def __init__(
        self, tape: Tape, describe: Describe, root_names: Mapping[int, str] | None, state: Set[int], **options: Any
    ) -> None:
        super().__init__(tape, state, **options)
        self.tracer = _Tracer(self._describe, driver=__file__.replace("replay.py", "calls.py"), root_names=root_names)
        self.program: Program
        self.tensors: dict[int, torch.Tensor] = {}  # its inputs
        self.devices: dict[int, torch.device] = {}  # where they were, unless on the host
        self.losses: dict[int, torch.Tensor] = {}  # what backward passes started from
        self.seen: dict[int, torch.Tensor | float] = {}  # the same in training
        self.of_loop: dict[int, str] = {}  # values that calls of the loop itself have made, with their names
        self.zeroed: dict[int, tuple[torch.Tensor, int]] = {}  # what `zero_grad` has left of gradients
        self.is_close, self.has_differentiated = True, False
        self.performs = True  # else a backward call is recorded only
        self.error: Exception | None = None  # that playing has raised
        self.failure: Failure | None = None
        self.before: StateBefore | None = None  # the state
        self.rng = get_rng_state()
        self.hooks: Sequence[Any] = ()  # that raised or were left out
        self._describe_old = describe

    def run(self, ops: list[Op], *, performs_last: bool, raises: bool = False, keep: Op | None = None) -> None:
        """Run calls again and record them.

        ``performs_last`` is false when the last one is a backward call that the loop is not to come to, because its
        start was already bad; ``raises`` is true when the last one is expected to raise. ``keep`` is a call to run in
        any case.
        """
        ops = ops if raises else needed_ops(ops, keep)
        passes = [[n for n, op in enumerate(ops) if op.kind is kind] for kind in (Backward, Transform)]
        last = next((numbers[-1] for numbers in passes if numbers), len(ops))
        has_update = any(op.kind.writes_state(op) for op in ops[last + 1 :])  # by the loop itself
        is_update = all(op.kind.writes_state(op) or op.kind is OptimizerStep for op in ops)
        with recording(self.tracer), Modes() as modes:
            for position, op in enumerate(ops):
                modes.enter(op.mode)
                is_after = is_update or (has_update and position > last)
                self.tracer.phase = Phase.OPTIMIZER if is_after else Phase.FORWARD
                self.performs = performs_last or position < len(ops) - 1
                try:
                    self.play(op)
                except Exception as raised:
                    pass_on(raised)
                    if raises:
                        self.error = raised
                        break
                    if type(raised).__module__.startswith("reprokit."):  # such as that another rank has stopped
                        raise
                    raise CannotGoBack(why_not_again(raised)) from raised
        self.mismatches += map(_ROUNDED.format, dict.fromkeys(self.tracer.transforms.rounded))
        self.finish(is_whole=raises)

    def finish(self, *, is_whole: bool) -> None:
        """Make the program of what was recorded; without what nobody needs unless it ``is_whole``."""
        self.program = self.tracer.program() if is_whole else self.tracer.program().pruned()
        self.tensors = {item.value: self.tracer.tensors[item.value] for item in self.program.inputs}

    def play(self, op: Op) -> Any:
        library = getattr(op.note, "library", None)
        self.tracer.outer_site = make_site(op.code, op.instruction, library) if op.code is not None else None
        self.tracer.outer_scope = ()
        with native.DisableTorchFunction():  # our own work is not part of the step
            self._check_versions(op)
            args, kwargs = self.given(op)
        with seen(), native.their_operators():
            result = op.kind.trace(self, op, args, kwargs)
        self.bind(op, result)
        for number in op.outs if op.kind is Function else ():
            tensor = self.env.get(number)
            value = self.tracer.value_of(tensor) if tensor is not None else None
            if value is not None:
                with native.DisableTorchFunction():  # naming a tensor is no part of the step
                    origin = self._describe_old(number, self.alive.get(number, tensor))  # type: ignore[arg-type]
                self.of_loop[value] = origin.name if origin is not None else "input"
        return result

    def starts_of_training(self, op: Op) -> list[torch.Tensor]:
        """What a backward call has started from in training, as far as that is still there."""
        return [self.alive[n] for n in calls.starts_of(op.args, op.kwargs) if isinstance(n, Number) and n in self.alive]

    def compare_loss(self, old: torch.Tensor | float, new: torch.Tensor) -> None:
        """Note if a backward pass starts from another value than in training."""
        if not is_same(old, new):
            self.mismatches.append(describe_mismatch("the loss", old, new))
            self.is_close = self.is_close and is_close(old, new)
        value = self.tracer.value_of(new)
        if value is not None:
            self.losses[value], self.seen[value] = native.clone(native.detach(new)), old

    def has_computed(self, parameter: torch.Tensor) -> bool:
        """True if the program itself computes a gradient, which is not what `zero_grad` has left of an older one."""
        left = self.zeroed.get(id(parameter))
        is_left = left is not None and left[0] is parameter.grad and torch_private.version(left[0]) == left[1]
        return self.has_differentiated and not is_left

    def source_of(self, value: int) -> torch.Tensor | None:
        """The loop's own tensor behind an input of the program."""
        tensor = self.tracer.tensor_of(value)
        number = self.numbers.get(id(tensor)) if tensor is not None else None
        return self.alive.get(number, tensor) if number is not None and tensor is not None else tensor

    def own_tensors(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Copy what is borrowed to the host, before the live tensors get other contents.

        ``copies`` of live tensors, by their ``id``, are used for inputs that have the same bits: a file holds them
        once. Inputs that overlap in memory keep theirs: a write into one of them shows in the others.
        """
        self.devices = {value: tensor.device for value, tensor in self.tensors.items() if not tensor.is_cpu}
        borrowed = self.tracer.borrowed & self.tensors.keys()
        self.tensors.update(copies_of({value: self.tensors[value] for value in borrowed}, "cpu"))
        for value, *others in overlapping(self.tensors):
            copy = copies.get(id(self.source_of(value))) if not others else None
            if copy is not None and same_bits(copy, self.tensors[value]):
                self.tensors[value] = copy

    def _describe(self, tensor: torch.Tensor) -> InputName | None:
        number = self.numbers.get(id(tensor))
        old = self.alive.get(number, tensor) if number is not None else tensor
        origin = self._describe_old(number, old)
        if is_unfollowed(old):
            return replace(origin or InputName("input"), role="opaque")
        is_value = origin is not None and origin.role == "opaque" and not tensor.requires_grad
        return None if is_value else origin  # used without the graph that an earlier step made


def why_not_again(error: Exception) -> str:
    """What a fidelity note says of a step whose calls raise an exception when they are played again: what they read
    beside their arguments, such as an attribute of a parameter, is not put back."""
    message = str(error).partition("\n")[0]
    return f"playing the step again raised {type(error).__name__}: {message}"


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
        buffers = set(map(id, members.buffers(op.target))) if is_root else set()
        is_pure = op.kind.is_forward and (op.kind.is_pure(op) or is_root)
        is_pure = is_pure and not (is_root and op.note.is_training and buffers & read)
        if op is keep or not is_pure or not needed.isdisjoint(op.outs):
            kept.append(op)
            needed.update(op.ins)
            read |= buffers if is_root and not op.note.is_training else set()
    return kept[::-1]


Describe = Callable[[Number | None, torch.Tensor], InputName | None]
Gradients = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Case:
    """A step to record: its calls, of which ``pending`` is not to be performed, and what is known of it."""

    where: str
    ops: list[Op]
    pending: Op | None
    mark: Mark
    is_now: bool = False  # it begins with the live parameters and buffers as they were; else the state is there already
    frame: FrameType | None = None
    contents: dict[Number, torch.Tensor] = field(default_factory=dict)  # values that earlier steps have left
    raised: Raised | None = None
    keep: Op | None = None  # a call of the failure even if no backward pass depends on it
    notes: list[str] = field(default_factory=list)
    gradients: Gradients | None = None  # those of training, if they are known and not the live ones
    stand_ins: Mapping[int, torch.Tensor] = field(default_factory=dict)  # by ``id``: whole for spread parameters
    found: Failure | None = None  # what it shows, where nothing is to be located
    explain: Callable[[Program, Tensors], Failure | None] | None = None  # in the place of `locate`
    is_whole: bool = False  # no call is left out, even if no backward pass depends on it
    together: Meeting | None = None  # all ranks record at once
    number: int = -1  # among the steps that were played to find it

    @property
    def all_ops(self) -> list[Op]:
        """The calls, the last of them not yet run."""
        return [*self.ops, *([self.pending] if self.pending is not None else [])]


@dataclass(slots=True)
class Forward:
    """Calls of root modules, each that many times called before, with copies of what they were given."""

    number: int
    ops: list[Op] = field(default_factory=list)
    given: dict[Number, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Forwards:
    """What is kept of a run that makes no backward call."""

    # Calls made so far, by the `id` of the module.
    nums: Counter[int] = field(default_factory=Counter)
    # Those that `--at-step` names, by the number of the call.
    asked: dict[int, Forward] = field(default_factory=dict)
    # The first with a bad output.
    bad: Forward | None = None

    def begin_bad(self, number: int) -> Forward:
        """The first with a bad output, still without its call."""
        self.bad = Forward(number)
        return self.bad

    def clear(self) -> None:
        """Let go of what was kept."""
        self.asked.clear()
        self.bad = None


class PlayObserver:
    """Sees what a replay plays: each step as it begins and ends, each call before and after. True ends the play."""

    def begin(self, replay: Replay) -> bool:
        return False

    def before(self, replay: Replay, op: Op) -> bool:
        return False

    def after(self, replay: Replay, op: Op) -> bool:
        return False

    def end(self, replay: Replay) -> bool:
        return False


class Replay:
    """Plays ``segments``, the steps since a ``copy``, in the context `going_back`, in which the live state is borrowed.

    Every loss is compared with the one of training. No step begins once the ``limit`` is spent.
    """

    def __init__(
        self,
        world: World,
        tape: Tape,
        segments: Sequence[Segment],
        copy: Copy,
        *,
        together: Meeting | None = None,
        limit: CpuLimit | None = None,
    ) -> None:
        self.segments = _with_carried(tape, segments)
        self._limit = limit
        self.together = together  # all ranks play at once
        self.number = self.index = 0  # the step of the next call to play, and its index there
        self.other_losses: list[str] = []  # which differed, in words
        self.world = world
        self.player: Player
        self.live_gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.tape, self._copy, self._alive = tape, copy, tape.alive()
        self._last_use = {n: place for place, one in enumerate(self.segments) for op in one.ops for n in op.ins}
        self._live: dict[int, torch.Tensor] = {}
        self._notes: list[str] = []

    @property
    def notes(self) -> list[str]:
        """The differences from training; of losses the first one."""
        return [*self.other_losses[:1], *self._notes]

    @property
    def segment(self) -> Segment:
        """The step that is played."""
        return self.segments[self.number]

    @contextlib.contextmanager
    def going_back(self) -> Iterator[None]:
        """The state of the copy; afterwards everything is as it was. Raises `CannotGoBack` with nothing changed.

        What the user's hooks raise is ignored.
        """
        leaves = self.leaves()
        self.live_gradients = [(leaf, leaf.grad) for leaf in leaves]
        filled = Contents(self._filled())
        gradients = self.live_gradients if self.together is not None else []
        kept = [(grad, native.clone(grad)) for _, grad in gradients if grad is not None]
        self._live = {id(t): native.clone(native.detach(t)) for t in self.world.changing() if t.requires_grad}
        with contextlib.ExitStack() as stack:
            stack.enter_context(ignored_warnings())
            if self.together is not None:
                stack.enter_context(self.together.playing())
            for grad, content in kept:  # gradients may be views of memory that averaging writes
                stack.callback(native.copy_, grad.data, content)
            states = {
                id(value): (optimizer.state, parameter, name)
                for optimizer in self.world.optimizers
                for parameter, state in optimizer.state.items()
                if isinstance(state, dict)
                for name, value in state.items()
                if isinstance(value, torch.Tensor)
            }
            self.player = Player(self.tape, self.world.state_ids(), together=self.together)
            self.player.states = states
            stack.callback(filled.write)
            stack.enter_context(self.world.at(self._copy, leaves))
            yield

    def _filled(self) -> list[torch.Tensor]:
        """The parameters that the loop has put into a model since the copy, and filled by `copy_` in these steps."""
        ops = [op for segment in self.segments for op in segment.ops if op.kind is Function and op.note is not None]
        written = {id(self._alive.get(n)) for op in ops if op.note.is_write for n in op.ins[:1]}
        held = set(map(id, self._copy.contents.tensors))
        parameters = {id(p): p for module in self.world.modules for p in members.parameters(module)}
        return [p for key, p in parameters.items() if key in written and key not in held]

    def leaves(self) -> list[torch.Tensor]:
        """Everything that a played step may give a gradient."""
        leaves = {id(tensor): tensor for tensor in self.world.changing() if is_leaf(tensor)}
        for module in self.world.modules:  # also what is frozen by now and has a gradient from before
            leaves.update((id(parameter), parameter) for parameter in members.parameters(module))
        for segment in self.segments:
            leaves.update((id(leaf), leaf) for leaf in leaves_in(segment.ops, self._alive))
        return list(leaves.values())

    def play(
        self, observer: PlayObserver | None = None, end: tuple[int, int] | None = None, *, to_next_loss: bool = False
    ) -> bool:
        """Play on to the call at ``end`` (a step and an index), or all; true if the ``observer`` or the limit has
        stopped it, or the next loss was seen."""
        observer, player, last = observer or PlayObserver(), self.player, end or (len(self.segments), 0)
        with quiet_hooks(self.world.modules, self.leaves()), Modes() as modes:
            while (self.number, self.index) < last:
                ops, mark = self.segment
                if self.index == 0:
                    if self._limit is not None and self._limit.is_spent:
                        return True
                    put_first_back(ops)
                    if mark.generators is not None:
                        set_python_generators(mark.generators)
                    if observer.begin(self):
                        return True
                while self.index < len(ops) and (self.number, self.index) != last:
                    op = ops[self.index]
                    modes.enter(op.mode)
                    if op.kind is Backward and op.note.losses:
                        starts = [
                            player.tensor(n) for n in calls.starts_of(op.args, op.kwargs) if isinstance(n, Number)
                        ]
                        self._compare(zip(op.note.losses, starts, strict=False))
                        if to_next_loss:
                            return True
                    if observer.before(self, op):
                        return True
                    player.play(op)
                    self.index += 1
                    if op.kind is CompiledStep and op.note.seen:
                        self._compare([(op.note.seen[place], new) for place, new in self.seen(op).items()])
                        if to_next_loss:
                            return True
                    elif op.kind is Backward and self.together is not None:
                        op.note.averaged = averaged_gradients(self.world.modules)
                    if observer.after(self, op):
                        return True
                self._notes += [note for note in player.mismatches if note not in self._notes]
                if self.index < len(ops):
                    break
                if observer.end(self):
                    return True
                player.keep({n for n in player.env if self._last_use.get(n, -1) > self.number})
                self.number, self.index = self.number + 1, 0
        return False

    def play_some(self, is_wanted: Callable[[Op], bool]) -> None:
        """Play only those calls of all steps that are wanted and whose arguments are there; each call is asked about in
        order."""
        player = self.player
        with Modes() as modes:
            while self.number < len(self.segments) and not (self._limit is not None and self._limit.is_spent):
                for index, op in enumerate(self.segment.ops):
                    self.index = index
                    if is_wanted(op) and all(player.value(number) is not None for number in op.ins):
                        modes.enter(op.mode)
                        player.play(op)
                player.keep({n for n in player.env if self._last_use.get(n, -1) > self.number})
                self.number, self.index = self.number + 1, 0

    def _compare(self, pairs: Iterable[tuple[Any, torch.Tensor]]) -> None:
        """Note which losses of a step are others than in training."""
        what = f"the loss of step {self.segment.mark.step}"
        self.other_losses += [describe_mismatch(what, old, new) for old, new in pairs if not is_same(old, new)]

    def seen(self, op: Op) -> dict[int, torch.Tensor]:
        """The losses that a compiled function returns in the replay, by their position among its results."""
        return {place: self.player.env[op.outs[place]] for place in op.note.seen if place < len(op.outs)}

    def contents(self) -> dict[Number, torch.Tensor]:
        """The values that the steps so far have left."""
        return {number: tensor for number, tensor in self.player.env.items() if number in self.player.made}

    def begin(self, number: int) -> Case:
        """Play the steps before ``number`` and what the loop wrote by hand before its forward pass; the rest of it."""
        self.play(end=(number, 0))
        (lead, rest), contents = split(self.segment.ops), self.contents()
        self.play(end=(number, len(lead)))
        ops = [*(op for op in lead if not op.kind.writes_state(op)), *rest]
        return Case("", ops, None, self.segments[number].mark, contents=contents, notes=self.notes)

    def find(self, finder: Finder) -> Case | None:
        """Play until the ``finder`` stops, then go back to where that step began; ``None`` also if training contradicts
        what was found."""
        if not self.play(finder):
            if self.together is not None:
                self.together.stop(NOTHING)
            return None
        case, is_over = finder.case(self), False
        if self.together is not None:
            self.together.report(case)
            is_over = self.together.is_sharded  # else what follows needs no other rank
            self.together = self.player.together = None
        if case.where == "gradient" and self.number == len(self.segments) - 1:  # the user's hooks may have changed them
            case.gradients = [(leaf, grad) for leaf, grad in self.live_gradients if grad is not None]
        elif case.where in ("gradient", "parameter"):
            case.gradients = [(leaf, native.clone(leaf.grad)) for leaf in self.leaves() if leaf.grad is not None]
        is_alike = len(self.other_losses) == finder.num_other_losses
        if not is_alike or not (is_over or self._agrees_afterwards(case)):
            return None
        give_gradients([(leaf, None) for leaf in self.leaves()])
        finder.start.give_back()
        case.notes = self.notes
        return case

    def _agrees_afterwards(self, case: Case) -> bool:
        """Go on as training did: true if the next loss it saw, or the parameters that it ended with, are the same."""
        if case.pending is not None and case.pending.note.losses:
            return True  # that loss was bad in training too
        num_other = len(self.other_losses)
        if self.play(to_next_loss=True):
            return len(self.other_losses) == num_other
        changed = [t for t in self.world.changing() if t.requires_grad and id(t) in self._live]
        if all(same_bits(self._live[id(tensor)], tensor) for tensor in changed):
            return True
        self._notes.append("playing the steps since the last copy did not lead to the parameters that training has")
        return False


class Finder(PlayObserver):
    """Stops at the call that makes one of the ``ruined`` parts of the state nan or inf, if there are any; else at the
    first bad loss, gradient or parameter.

    ``expected`` is a backward call from a bad start of which the loop is about to make an update behind the last step.
    """

    def __init__(
        self,
        replay: Replay,
        ruined: Sequence[torch.Tensor] = (),
        *,
        takes_skipped: bool = False,
        expected: Op | None = None,
    ) -> None:
        self.start = Copy()  # the state that the step begins with
        self.skipped: list[int] = []  # steps with a bad loss of which no update was made
        self.num_other_losses = 0  # before the step
        self._judge = Judge(replay.leaves, lambda: replay.world.parameters)
        self._ruined, self._takes_skipped, self._expected = ruined, takes_skipped, expected
        self._contents: dict[Number, torch.Tensor] = {}
        self._where: str | None = None
        self._lead = 0  # calls before the forward pass
        self._is_begun = False  # the start is that of this step, or of the one in which the pending loss was computed

    def begin(self, replay: Replay) -> bool:
        self.num_other_losses = len(replay.other_losses)
        lead, rest = split(replay.segment.ops)
        self._lead = len(lead) if rest and not self._ruined else 0  # a training may end with what the loop wrote
        if self._judge.pending is None:
            self._is_begun = False
            self._contents = {
                number: native.requires_grad_(like(tensor, native.clone(native.detach(tensor))), tensor.requires_grad)
                for number, tensor in replay.contents().items()
                if not tensor.requires_grad or is_leaf(tensor) or number in replay.tape.inputs  # graphs are made again
            }
        return False

    def before(self, replay: Replay, op: Op) -> bool:
        world = replay.world
        if replay.index >= self._lead and not self._is_begun:
            self._is_begun, self.start = True, Copy()
            self.start.take(world.changing(), world.optimizers, world.modules)
        if replay.index < self._lead or self._ruined:
            return False
        if op.kind is Backward:
            self._where = self._begin_backward(replay, op)
        elif op.kind is OptimizerStep:
            parameters = list(parameters_of(op.target))
            grads = [p.grad for p in parameters if p.grad is not None]
            self._where = self._update(parameters)
            if self._where is None and not op.note.scaler and bad_tensor(grads) is not None:
                self._where = "gradient"
        elif op.kind.writes_state(op):
            args = replay.player.given(op)
            owners = [world.owner_of(tensor) for tensor in iter_tensors(written_argument(calls.name_of(op), *args))]
            trained = [owner for owner in owners if owner is not None and world.is_trained(owner)]
            self._where = self._update(trained, iter_tensors(args)) if trained else None
        return self._where is not None

    def after(self, replay: Replay, op: Op) -> bool:
        judge, world, has_stepped = self._judge, replay.world, getattr(op.note, "has_stepped", False)
        has_stepped = has_stepped or op.kind is OptimizerStep
        if self._ruined:
            changes = op.kind is Root or has_stepped or op.kind.writes_state(op)
            return changes and any(map(world.has_worsened, self._ruined))
        if replay.index <= self._lead:
            return False
        if op.kind is Backward:
            judge.end(op.note, [replay.player.env[number] for number in op.outs])
        elif op.kind is ZeroGrad:
            judge.clear(owned_by(op.args[0]))
        elif op.kind is CompiledStep and has_stepped:
            self._where = "loss" if bad_tensor(replay.seen(op).values()) is not None else None
        elif op.kind is Function and judge.pending is not None and op.note is not None and op.note.is_write:
            written = written_argument(calls.name_of(op), *replay.player.given(op))
            if calls.name_of(op) in GRAD_WRITES or any(leaf.grad is written for leaf in replay.leaves()):
                judge.correct()
        if self._where is None and has_stepped and world.newly_bad() is not None:
            self._where = "parameter"
        return self._where is not None

    def end(self, replay: Replay) -> bool:
        self._judge.end_step()
        is_written = not self._ruined and any(op.kind.writes_state(op) for op in replay.segment.ops[self._lead :])
        if is_written and replay.world.newly_bad() is not None:
            self._where = "parameter"
        elif replay.number == len(replay.segments) - 1 and self._judge.pending and self._expected is not None:
            self._where = "loss"
        return self._where is not None

    def _begin_backward(self, replay: Replay, op: Op) -> str | None:
        numbers = [n for n in calls.starts_of(op.args, op.kwargs) if isinstance(n, Number)]
        earlier, tensor = replay.segment.ops[: replay.index], replay.player.tensor
        with native.no_grad():
            starts = [tensor(calls.unscaled(earlier, number)) for number in numbers]
            gives = calls.gives_gradients(op)
            is_bad = is_bad_start(starts, gives_gradients=gives)
        is_asked = calls.name_of(op) == AUTOGRAD_GRAD
        counts = is_bad and not (is_asked and (gives or sum(map(native.numel, starts)) != 1))
        if not counts and self._judge.pending is None:
            return None
        behind, step = self._judge.behind(map(tensor, numbers)) if counts else set(), replay.segment.mark.step
        pending = Pending(op.note, (op.code, op.instruction), is_asked, behind, step, None, 0)
        outcome = self._judge.begin(pending, counts)
        self.skipped += [step] if outcome == "skipped" else []
        return "loss" if outcome == "failed" else None

    def _update(self, parameters: Sequence[torch.Tensor], given: Iterable[torch.Tensor] = ()) -> str | None:
        pending = self._judge.pending
        outcome = self._judge.update(parameters, given) if pending is not None else None
        if outcome == "skipped" and pending is not None:
            self.skipped.append(pending.step)
            if self._takes_skipped:
                self._judge.pending, outcome = pending, "failed"
        return "loss" if outcome == "failed" else None

    def case(self, replay: Replay) -> Case:
        """The step that was found."""
        number, end, where, pending = replay.number, replay.index, self._where or "parameter", self._judge.pending
        if where == "loss" and pending is not None:  # computed some steps before the update that was made of it
            places = ((n, i) for n, one in enumerate(replay.segments) for i, op in enumerate(one.ops))
            number, end = next((n, i) for n, i in places if replay.segments[n].ops[i].note is pending.note)
        segment = replay.segments[number]
        before, call, keep = segment.ops[:end], segment.ops[end] if where == "loss" and pending else None, None
        lead, rest = split(before) if self._lead else ([], before)
        ops = [*(op for op in lead if not op.kind.writes_state(op)), *rest]
        if self._ruined:
            keep, where = ops[-1], "output" if ops[-1].kind is Root else "parameter"
        elif where == "gradient":  # without the update behind the last backward call
            last = max((n for n, op in enumerate(ops) if op.kind is Backward), default=len(ops))
            later = [op for op in ops[last + 1 :] if not (op.kind.writes_state(op) or op.kind is OptimizerStep)]
            ops = [*ops[: last + 1], *later]
        is_by_hand = end == len(segment.ops) and ops[-1].kind not in (OptimizerStep, Backward, CompiledStep)
        if not self._ruined and not is_by_hand:
            ops = [ops[position] for position in without_gradients(ops)]
        mark = replace(segment.mark)
        if keep is not None or where in ("loss", "output"):  # the step went on from there
            mark.micro_step = sum(op.kind is Backward and calls.name_of(op) != AUTOGRAD_GRAD for op in ops)
        return Case(where, ops, call, mark, contents=self._contents, keep=keep, number=number)


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


def split(ops: Sequence[Op]) -> tuple[list[Op], list[Op]]:
    """The manual changes before the first forward pass of a step, and the rest."""
    first = next((n for n, op in enumerate(ops) if op.kind in (Root, Transform, Backward, CompiledStep)), len(ops))
    end = max((n + 1 for n in range(first) if ops[n].kind.writes_state(ops[n])), default=0)
    return list(ops[:end]), list(ops[end:])


def averaged_gradients(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters whose gradients `DistributedDataParallel` averages, each with a copy of its gradient."""
    wrapped = [module for module in modules if unwrapped(module) is not module]
    leaves = [parameter for module in wrapped for parameter in members.parameters(module)]

    return [(leaf, native.clone(leaf.grad)) for leaf in leaves if leaf.grad is not None]


def graphs_in(ops: Iterable[Op], tape: Tape, known: Mapping[Number, torch.Tensor]) -> set[Number]:
    """The numbers with a graph of earlier calls that these calls read; ``known`` tensors without a graph are values."""
    produced: set[Number] = set()
    wanted: set[Number] = set()
    with native.DisableTorchFunction():  # a tensor subclass may refuse what its script does not ask for
        for op in ops:
            for number in op.ins if not reads_values(op) else ():
                tensor = known.get(number)
                if tensor is None or (tensor.requires_grad and not is_leaf(tensor)):
                    wanted.update({number} - produced - tape.inputs.keys())
            produced.update(op.outs)
    return wanted
