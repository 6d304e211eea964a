"""The tape: what the training loop did since its parameters last changed, noted at the outermost level only.

One entry per call of a root module, per torch function the loop itself called, per differentiation. Inside a root
module the tape is not present: its mode is off the stack and nothing runs. Entries hold references, not copies.
What it cannot note (random outcomes, values from NumPy) is used later by its value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from reprokit.capture.entry import Entry, new_tensors
from reprokit.capture.facts import READS, SILENT, facts_of
from reprokit.capture.roots import RootCalls
from reprokit.capture.state import num_bytes
from reprokit.capture.structure import ATOMS, iter_tensors, repeatable
from reprokit.capture.sweep import still_useful
from reprokit.capture.written import WrittenMemory
from reprokit.program import functions
from reprokit.program.sites import kind_of_file
from reprokit.program.trace import current_mode

_MODULE_LOAD = 16  # how much more than a function's a root module's results weigh
_SWEEP_AT = 32
BUDGET = 256 * 2**20  # bytes of loop-level results kept alive per step
_CALL_IMPL = torch.nn.Module._call_impl.__code__
_FUNCTION_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


class Tape(TorchFunctionMode):
    """Notes the loop's outermost calls of one thread.

    ``on_differentiate(entry)`` is asked before a differentiation runs, ``on_module(module)`` before a root module does,
    unless its id is in ``met``, ``on_error`` when the tape itself fails. ``enabled`` is set by the session. Invariant:
    while ``_depth`` is above 0 the loop is inside something that is noted as a whole, and nothing is added. ``replays``
    counts the replays that run right now, in any session. ``raised`` is the last exception that came out of something
    the loop called, with its entry.
    """

    replays: ClassVar[int] = 0

    def __init__(
        self,
        *,
        on_differentiate: Callable[[Entry], None],
        on_module: Callable[[torch.nn.Module], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.enabled = False
        self.raised: tuple[BaseException, Entry] | None = None
        self.roots = RootCalls(self)
        self.memory = WrittenMemory()
        self.met: set[int] = set()
        self._on_differentiate = on_differentiate
        self._on_module = on_module
        self._on_error = on_error
        self._budget = BUDGET
        self._bytes = 0
        self._load = 0
        self._load_limit = _SWEEP_AT
        self._depth = 0
        self._thread = get_ident()
        self._is_claimed = False
        self._is_lifted = False
        self._hand_updated = False
        self.on_hand_update: Callable[[], None] = lambda: None
        self.on_differentiated: Callable[[Entry], None] = lambda entry: None
        self.on_read: Callable[[Any], None] = lambda value: None
        self.on_sweep: Callable[[list[Entry]], None] = lambda entries: None

    # -- life ----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Meet root modules and go on top of torch's stack of function modes."""
        self.roots.install()
        torch._C._push_on_torch_function_stack(self)

    def leave_stack(self) -> None:
        """Take the mode off torch's stack, wherever on it the loop's own modes have left it."""
        self._is_lifted = False
        height = torch._C._len_torch_function_stack()
        modes = [torch._C._pop_torch_function_stack() for _ in range(height)]
        for mode in reversed(modes):
            if mode is not self:
                torch._C._push_on_torch_function_stack(mode)

    def uninstall(self) -> None:
        """Give every class its own ``__call__`` back; the mode stays on the stack."""
        self.enabled = False
        self.roots.uninstall()

    def restart(self) -> None:
        """Forget the step: parameters have just changed."""
        self.entries = []
        self.memory.restart()
        self.raised = None
        self._bytes = 0
        self._budget = BUDGET
        self._load = 0
        self._hand_updated = False

    @property
    def saved(self) -> dict[int, torch.Tensor]:
        """What outside tensors held before the step wrote into them, by ``id``."""
        return self.memory.saved

    @property
    def is_outermost(self) -> bool:
        """Whether the loop itself is running, on the thread that is watched."""
        return self._depth == 0 and self.enabled and get_ident() == self._thread

    def is_root_call(self) -> bool:
        """Whether a module called now is called by the loop itself; the first thread that trains is the one watched."""
        if self._depth or not self.enabled or _tracing_state() is not None:
            return False
        if get_ident() == self._thread:
            return True
        if self._is_claimed or not torch.is_grad_enabled() or not self._is_on_stack():
            return False
        self._thread = get_ident()
        self.restart()
        return True

    def _is_on_stack(self) -> bool:
        return any(
            torch._C._get_function_stack_at(level) is self for level in range(torch._C._len_torch_function_stack())
        )

    def run_in_thread(self, run: Callable[[], None]) -> None:
        """Run the body of a new thread with the tape on the stack of that thread."""
        torch._C._push_on_torch_function_stack(self)
        try:
            run()
        finally:
            self.leave_stack()

    def step_aside(self) -> bool:
        """Note nothing until `step_back`; whether the mode was taken off torch's stack for that."""
        self._depth += 1
        if self._is_lifted:
            self._is_lifted = False
            return True
        try:
            top = _pop_mode()
        except RuntimeError:  # the stack is empty
            return False
        if top is self:
            return True
        _push_mode(top)
        return False

    def step_back(self, popped: bool) -> None:
        """The inverse of `step_aside`."""
        if popped:
            _push_mode(self)
        self._depth -= 1

    def lift(self) -> None:
        """Take the mode off torch's stack until `lower`, or until a `step_back` if a `step_aside` comes in between."""
        self._is_lifted = self.step_aside()
        self._depth -= 1

    def lower(self) -> None:
        """The inverse of `lift`."""
        if self._is_lifted:
            self._is_lifted = False
            _push_mode(self)

    def step_back_lifted(self, popped: bool) -> None:
        """The inverse of `step_aside`, but the mode stays off torch's stack until `lower`."""
        self._is_lifted = popped
        self._depth -= 1

    def paused(self) -> _Paused:
        """A context in which the tape notes nothing and, where possible, is not on torch's mode stack at all."""
        return _Paused(self)

    def note(self, kind: str, target: Any, frame: FrameType, args: tuple[Any, ...] = ()) -> Entry:
        """Add an entry for something that is not a torch function (``zero_grad``, ``optimizer``)."""
        user = frame if _KINDS.get(id(frame.f_code)) == "user" else _first_user_frame(frame)
        entry = Entry(kind, target, args, {}, current_mode(), None, "", user.f_code, user.f_lineno)
        self.entries.append(entry)
        return entry

    def guard(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do reprokit's own work, unseen by the tape; an error in it must never reach the loop."""
        try:
            with self.paused():
                return work(*args)
        except Exception as error:
            self._on_error(error)
            return None

    # -- functions the loop calls --------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Perform a torch function of the loop and note it."""
        if self._depth or isinstance(func, _OPERATORS):  # such as the marks that torch's profiler leaves
            return func(*args, **kwargs) if kwargs else func(*args)
        options: dict[str, Any] = kwargs or {}  # type: ignore[assignment]
        if func in SILENT:
            result = func(*args, **options)
            if func in READS:
                try:
                    self.on_read(result)
                except Exception as error:
                    self._on_error(error)
            return result
        if (
            not self.enabled
            or get_ident() != self._thread
            or _peek_transforms() is not None
            or _tracing_state() is not None
        ):
            return func(*args, **options)
        if func is torch.Tensor.__iter__ and args[0].dim() > 0:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, (args[0], 0)))
        try:
            entry = self._prepare(func, args, options, sys._getframe(1))
        except Exception as error:
            self._on_error(error)
            entry = None
        if entry is None:
            return func(*args, **options)
        if entry.kind == "differentiate":
            return self._differentiate(entry)
        try:
            output = func(*args, **options)
        except BaseException as error:
            self.raised = (error, entry)
            raise
        try:
            self._finish_function(entry, output)
        except Exception as error:
            self._on_error(error)
        return output

    def differentiate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Like a loop's ``loss.backward()``, for entry points that torch does not hand to modes."""
        entry = self.guard(self._prepare, function, args, kwargs, sys._getframe(2))
        return function(*args, **kwargs) if entry is None else self._differentiate(entry)

    def backward(self, target: Callable[..., Any], tensor: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Perform and note ``target(tensor, **kwargs)``, the backward method of tensors."""
        self._is_claimed = True
        entry = None
        popped = self.step_aside()
        try:
            try:
                entry = self._prepare(target, (tensor,), kwargs, sys._getframe(3))
            except Exception as error:
                self._on_error(error)
            if entry is not None:
                self._on_differentiate(entry)
            target(tensor, **kwargs)
        except BaseException as error:
            if entry is not None:
                self.raised = (error, entry)
            raise
        finally:
            self.step_back(popped)
        if entry is not None:
            self.entries.append(entry)
            self.on_differentiated(entry)

    def _differentiate(self, entry: Entry) -> Any:
        self._is_claimed = True
        popped = self.step_aside()
        try:
            self._on_differentiate(entry)
            output = entry.output = entry.target(*entry.args, **entry.kwargs)
        except BaseException as error:
            self.raised = (error, entry)
            raise
        finally:
            self.step_back(popped)
        if output is None:
            self.entries.append(entry)
        else:
            self.guard(self._add, entry)
        self.on_differentiated(entry)
        return output

    def _prepare(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Entry | None:
        user = self._caller(frame)
        if user is None:
            return None
        facts = facts_of(func)
        if facts.is_differentiation:
            if self._hand_updated:
                self._end_hand_update()
            is_plain = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
            if not is_plain:
                args, kwargs = repeatable(args, kwargs)
            entry = Entry(
                "differentiate",
                facts.function,
                args,
                kwargs,
                current_mode(),
                None,
                facts.name,
                user.f_code,
                user.f_lineno,
            )
            if not is_plain:
                entry.versions = _versions(args, kwargs)
            return entry
        versions = _versions(args, kwargs)
        is_state = writes_view = False
        if facts.is_in_place:
            written = functions.written_argument(facts.name, args, kwargs)
            verdict = self.memory.judge(written, versions, self.entries)
            if verdict is None:
                return None
            is_state = verdict
            writes_view = isinstance(written, torch.Tensor) and written._is_view()
            if is_state:
                self._hand_updated = any(entry.kind == "differentiate" for entry in self.entries)
        if self._hand_updated and _begins_forward(facts.name, versions):
            self._end_hand_update()
        name = facts.name
        entry = Entry("function", facts.function, args, kwargs, current_mode(), None, name, user.f_code, user.f_lineno)
        entry.versions = versions
        entry.is_state, entry.writes_view = is_state, writes_view
        if facts.is_random and any(tensor.requires_grad for tensor, _ in versions):
            entry.rng = _rng_state(versions)
        return entry

    def _finish_function(self, entry: Entry, output: Any) -> None:
        """Keep the entry if it made tensors that a replay has to make again, or wrote into some."""
        if entry.is_state:
            self._keep_random_outcome(entry)
            self.entries.append(entry)
            if entry.name in functions.DATA_WRITES:
                self.memory.moved(entry.args[0])
            return
        facts = facts_of(entry.target)
        entry.output = output
        if output.__class__ is torch.Tensor and not facts.is_special:
            if entry.versions:  # the usual case: a new tensor made of tensors
                self.entries.append(entry)
                self._load += 1
                if self._load > self._load_limit:
                    self._sweep()
                made = self.memory.made
                if id(output) in made or not _is_among(output, entry.versions):
                    made.add(id(output))
                    self._count(output)
            return
        outputs = list(iter_tensors(output))
        is_in_place = facts.is_in_place or entry.name in functions.GRAD_WRITES
        if not (outputs or is_in_place) or not self._can_repeat(entry, outputs):
            return
        if is_in_place:
            self._keep_random_outcome(entry)
        self._add(entry)

    def _keep_random_outcome(self, entry: Entry) -> None:
        if entry.rng is None and functions.is_random(entry.name):
            written = functions.written_argument(entry.name, entry.args, entry.kwargs)
            if isinstance(written, torch.Tensor):
                entry.outcome = written.detach().clone()

    def _can_repeat(self, entry: Entry, outputs: list[torch.Tensor]) -> bool:
        """Whether replaying the function gives the same; otherwise its outcome is used by value."""
        if not entry.name:
            return any(tensor.requires_grad for tensor in outputs)
        if functions.is_random(entry.name):
            return entry.rng is not None or functions.is_in_place(entry.name)
        return bool(entry.versions) or functions.is_factory(entry.name)

    def _add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self._load += 1
        if self._load > self._load_limit:
            self._sweep()
        made = self.memory.made
        for tensor in new_tensors(entry, made):
            made.add(id(tensor))
            self._count(tensor)

    def _count(self, tensor: torch.Tensor) -> None:
        """A result is kept alive; let others go if that is too much."""
        self._bytes += num_bytes([tensor])
        while self._bytes > self._budget and self._drop_oldest():
            pass

    def _drop_oldest(self) -> bool:
        """Drop the oldest function entry that no gradient flows through; what it made is then used by value."""
        for position, entry in enumerate(self.entries):
            outputs = _outputs(entry)
            if entry.kind == "function" and outputs and not any(tensor.requires_grad for tensor in outputs):
                del self.entries[position]
                self.memory.made.difference_update(map(id, outputs))
                self._bytes -= num_bytes(outputs)
                return True
        self._budget *= 2  # nothing can go: gradients need all of it anyway
        return False

    def _end_hand_update(self) -> None:
        """The first thing after parameters were changed by hand begins a new step."""
        self._hand_updated = False
        with self.paused():
            self.on_hand_update()

    # -- root modules --------------------------------------------------------------------------------------------

    def call_module(
        self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a root module with the tape out of the way, and note the call."""
        popped = self.step_aside()
        try:
            try:
                entry = self._prepare_module(module, args, kwargs, sys._getframe(2))
                watching = self.roots.look_away()
            except Exception as error:
                self._on_error(error)
                return original(module, *args, **kwargs)
            try:
                output = original(module, *args, **kwargs)
            except BaseException as error:
                self.raised = (error, entry)
                raise
            finally:
                if watching is not None:
                    torch.nn.Module.__call__ = watching  # type: ignore[method-assign]
            try:
                self._finish_module(entry, output)
            except Exception as error:
                self._on_error(error)
            return output
        finally:
            self.step_back(popped)

    def _prepare_module(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Entry:
        if self._hand_updated:
            self._end_hand_update()
        if id(module) not in self.met:
            self._on_module(module)
        user = frame if _KINDS.get(id(frame.f_code)) == "user" else _first_user_frame(frame)
        entry = Entry("module", module, args, kwargs, current_mode(), None, "", user.f_code, user.f_lineno)
        entry.versions = versions = _versions(args, kwargs)
        entry.rng = _rng_state(versions)
        self.entries.append(entry)
        self._load += _MODULE_LOAD
        if self._load > self._load_limit:
            self._sweep()
        return entry

    def _sweep(self) -> None:
        """Let go of what nobody can use any more; the less that is, the longer until the next look."""
        before, self._load = self._load, 0
        useful = still_useful(self.entries)
        if len(useful) < len(self.entries):
            gone = {id(entry) for entry in self.entries} - {id(entry) for entry in useful}
            self.on_sweep([entry for entry in self.entries if id(entry) in gone])
            self.entries = useful
            self.memory.keep_only(useful)
            self._bytes = sum(num_bytes(_outputs(entry)) for entry in useful if entry.kind == "function")
        self._load = sum(_MODULE_LOAD if entry.kind == "module" else 1 for entry in self.entries)
        self._load_limit = max(_SWEEP_AT, 2 * (self._load if 2 * self._load < before else before))

    def _finish_module(self, entry: Entry, output: Any) -> None:
        entry.output = output
        made = self.memory.made
        if output.__class__ is torch.Tensor and not _is_among(output, entry.versions):
            made.add(id(output))
        else:
            made.update(map(id, new_tensors(entry, made)))

    def _caller(self, frame: FrameType) -> FrameType | None:
        """The user's frame that calls a function; ``None`` inside a custom autograd function or an unknown root.

        The tensors a custom function returns are used by value. The class of a root that first appears now tells the
        tape from its next call on.
        """
        root: FrameType | None = None
        user: FrameType | None = None
        walker: FrameType | None = frame
        while walker is not None:
            kind = _KINDS.get(id(walker.f_code)) or _kind_of_code(walker.f_code)
            if kind != "other":
                if kind == "user":
                    user = user or walker
                elif kind == "function":
                    return None
                else:
                    root = walker
            walker = walker.f_back
        if root is not None:
            self._meet_late(root)
            return None
        return user or frame

    def _meet_late(self, frame: FrameType) -> None:
        """A root that the tape did not know has just begun to run: note this call too, and wait for its end."""
        found = frame.f_locals
        module = found["self"]
        self.roots.meet(type(module), type(module).__call__)
        if sys.getprofile() is not None or frame.f_back is None:
            return  # somebody else is profiling; what this one call returns is used by value
        entry = self._prepare_module(module, found.get("args", ()), found.get("kwargs", {}), frame.f_back)
        self._depth += 1

        def wait(current: FrameType, event: str, value: Any) -> None:
            if event == "return" and current is frame:
                sys.setprofile(None)
                self._depth -= 1
                self.guard(self._finish_module, entry, value)

        sys.setprofile(wait)


class _Paused:
    """See `Tape.paused`."""

    __slots__ = ("_popped", "_tape")

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._popped = False

    def __enter__(self) -> None:
        self._popped = self._tape.step_aside()

    def __exit__(self, *exc_info: object) -> None:
        self._tape.step_back(self._popped)


def _versions(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, int]]:
    """The tensors among the arguments with their version counters (-1 for those that have none)."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append((value, -1 if value.is_inference() else value._version))
        elif type(value) not in ATOMS:
            found += [(t, -1 if t.is_inference() else t._version) for t in iter_tensors(value)]
    return found


def _outputs(entry: Entry) -> list[torch.Tensor]:
    return list(iter_tensors(entry.output))


def _is_among(tensor: torch.Tensor, versions: list[tuple[torch.Tensor, int]]) -> bool:
    for known, _ in versions:  # noqa: SIM110 (a generator would cost more than the loop)
        if known is tensor:
            return True
    return False


def _begins_forward(name: str, versions: list[tuple[torch.Tensor, int]]) -> bool:
    """Whether a function after a hand-made update is no more part of it: it builds a graph."""
    if not torch.is_grad_enabled() or name.endswith(("__get__", "__set__")) or functions.is_in_place(name):
        return False
    return any(tensor.requires_grad for tensor, _ in versions)


def _rng_state(versions: Iterable[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states of the CPU generator and, when a CUDA tensor is involved, of its device's generator."""
    state = torch.default_generator.get_state()
    for tensor, _ in versions:
        if tensor.is_cuda:
            return state, torch.cuda.get_rng_state(tensor.device)
    return state, None


def _first_user_frame(frame: FrameType) -> FrameType:
    walker: FrameType | None = frame
    while walker is not None:
        if (_KINDS.get(id(walker.f_code)) or _kind_of_code(walker.f_code)) == "user":
            return walker
        walker = walker.f_back
    return frame


def _kind_of_code(code: CodeType) -> str:
    """``user``, ``module`` for a module's call, ``function`` for a custom autograd function's, or ``other``."""
    if code is _FUNCTION_APPLY:
        kind = "function"
    elif code is _CALL_IMPL:
        kind = "module"
    else:
        kind = "user" if kind_of_file(code.co_filename) == "user" else "other"
    _KINDS[id(code)] = kind
    _CODES.append(code)  # so that the id stays its own
    return kind


_pop_mode = torch._C._pop_torch_function_stack
_push_mode = torch._C._push_on_torch_function_stack
_tracing_state = torch._C._get_tracing_state  # of `torch.jit.trace`, which would trace our work as well
_peek_transforms = (
    torch._C._functorch.peek_interpreter_stack
)  # vmap, grad and the like, inside which values are not ours
_KINDS: dict[int, str] = {}
_CODES: list[CodeType] = []
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
