"""The tape: what the training loop did since its parameters last changed, noted at the outermost level only.

One entry per call of a root module, per torch function the loop itself called, per differentiation. Inside a root
module the tape is not present: its mode is off the stack and nothing runs. Entries hold references, not copies; the
tape is
dropped after every optimizer step. What it cannot note (random outcomes, values from NumPy) is used later by its value.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from reprokit.capture.structure import iter_tensors
from reprokit.program import functions
from reprokit.program.ir import Mode
from reprokit.program.sites import kind_of_file
from reprokit.program.trace import current_mode

DEFAULT_BUDGET = 256 * 2**20  # bytes of loop-level results kept alive per step
_CALL_IMPL = torch.nn.Module._call_impl.__code__
_FUNCTION_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


@dataclass(slots=True)
class Entry:
    """One thing the loop did. ``kind``: ``module``, ``function``, ``differentiate``, ``zero_grad`` or ``optimizer``.

    ``versions`` pairs the tensors it was given with their version counters. ``rng`` holds the states of the CPU and,
    where used,
    the CUDA generator before a call that may draw. ``outcome`` is what a random in-place function left.
    """

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mode: Mode
    output: Any = None
    name: str = ""
    code: CodeType | None = None
    line: int = 0
    rng: tuple[torch.Tensor, torch.Tensor | None] | None = None
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    outcome: torch.Tensor | None = None
    is_scaling: bool = False


class Tape(TorchFunctionMode):
    """Notes the loop's outermost calls of one thread.

    ``on_differentiate(entry)`` is asked before a differentiation runs, ``on_module(module)`` before a root module does,
    ``on_error`` when the tape itself fails. Invariant: while ``_depth`` is above 0 the loop is inside something that is
    noted as a whole, and nothing is added. ``replays`` counts the replays that run right now, in any session.
    """

    replays: ClassVar[int] = 0

    def __init__(
        self,
        *,
        on_differentiate: Callable[[Entry], None],
        on_module: Callable[[torch.nn.Module], None],
        on_error: Callable[[Exception], None],
        budget: int = DEFAULT_BUDGET,
    ) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.saved: dict[int, torch.Tensor] = {}
        self.enabled = True
        self._on_differentiate = on_differentiate
        self._on_module = on_module
        self._on_error = on_error
        self._budget = budget
        self._bytes = 0
        self._depth = 0
        self._thread = threading.get_ident()
        self._made: set[int] = set()
        self._patched: dict[type[torch.nn.Module], Any] = {}
        self._original_call: Any = None
        self._memory: set[int] | None = None
        self._hand_updated = False
        self.is_watched: Callable[[], bool] = lambda: True
        self.on_hand_update: Callable[[], None] = lambda: None
        self.parameters: Callable[[], Iterable[torch.Tensor]] = tuple

    # -- life ----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Watch every module until `settle`, so that the first call of each root is seen from its beginning."""
        tape, original = self, torch.nn.Module.__call__
        self._original_call = original

        def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not tape.is_outermost:
                return original(self, *args, **kwargs)
            tape._patch(type(self), original)
            return tape.call_module(original, self, args, kwargs)

        torch.nn.Module.__call__ = __call__  # type: ignore[method-assign]

    def enter_stack(self) -> None:
        """Put the mode on top of torch's stack of function modes."""
        torch._C._push_on_torch_function_stack(self)

    def leave_stack(self) -> None:
        """Take the mode off torch's stack, wherever on it the loop's own modes have left it."""
        height = torch._C._len_torch_function_stack()
        modes = [torch._C._pop_torch_function_stack() for _ in range(height)]
        for mode in reversed(modes):
            if mode is not self:
                torch._C._push_on_torch_function_stack(mode)

    def settle(self) -> None:
        """The roots are known: stop watching every module. A root that appears later is met by `_is_inside`."""
        if self._original_call is not None:
            torch.nn.Module.__call__ = self._original_call  # type: ignore[method-assign]
            self._original_call = None

    def uninstall(self) -> None:
        """Give every class its own ``__call__`` back and forget everything."""
        self.enabled = False
        self.settle()
        for cls, own in self._patched.items():
            if own is None:
                del cls.__call__
            else:
                cls.__call__ = own  # type: ignore[method-assign]
        self._patched.clear()
        self.restart()

    def restart(self) -> None:
        """Forget the step: parameters have just changed."""
        self.entries = []
        self.saved = {}
        self._made = set()
        self._bytes = 0
        self._memory = None
        self._hand_updated = False

    @property
    def is_outermost(self) -> bool:
        """Whether the loop itself is running, on the thread that is watched."""
        return self._depth == 0 and self.enabled and self.is_watched() and threading.get_ident() == self._thread

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether an entry of the tape produced this tensor object."""
        return id(tensor) in self._made

    def paused(self) -> _Paused:
        """A context in which the tape notes nothing and, where possible, is not on torch's mode stack at all."""
        return _Paused(self)

    def note(self, kind: str, target: Any, frame: FrameType, **kwargs: Any) -> Entry:
        """Add an entry for something that is not a torch function (``zero_grad``, ``optimizer``)."""
        user = _first_user_frame(frame)
        entry = Entry(kind, target, (), kwargs, current_mode(), code=user.f_code, line=user.f_lineno)
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
        options = dict(kwargs) if kwargs else {}
        if func in _SILENT or not self.is_outermost:
            return func(*args, **options)
        if func is torch.Tensor.__iter__ and args[0].dim() > 0:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, (args[0], 0)))
        entry = self.guard(self._prepare, func, args, options, sys._getframe(1))
        if entry is None:
            return func(*args, **options)
        if entry.kind == "differentiate":
            return self._differentiate(entry)
        entry.output = func(*args, **options)
        self.guard(self._finish_function, entry)
        return entry.output

    def differentiate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Like a loop's ``loss.backward()``, for entry points that torch does not hand to modes."""
        entry = self.guard(self._prepare, function, args, kwargs, sys._getframe(2))
        return function(*args, **kwargs) if entry is None else self._differentiate(entry)

    def _differentiate(self, entry: Entry) -> Any:
        self._on_differentiate(entry)
        with self.paused():
            entry.output = entry.target(*entry.args, **entry.kwargs)
        self.guard(self._add, entry, list(iter_tensors(entry.output)))
        return entry.output

    def _prepare(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Entry | None:
        if self._is_inside(frame):
            return None
        name = functions.name_of(func) or ""
        written = functions.written_argument(name, args, kwargs)
        if written is not None and self._is_parameter(written):
            self._hand_updated = any(entry.kind == "differentiate" for entry in self.entries)
            return None
        self._end_hand_update()
        kind = "differentiate" if func in _DIFFERENTIATION else "function"
        user = _first_user_frame(frame)
        entry = Entry(kind, func, args, kwargs, current_mode(), name=name, code=user.f_code, line=user.f_lineno)
        entry.versions = [(tensor, _version(tensor)) for tensor in iter_tensors((args, kwargs))]
        if written is not None:
            self._save_before_write(written)
        if functions.is_random(name) and any(tensor.requires_grad for tensor, _ in entry.versions):
            entry.rng = _rng_state(entry.versions)
        return entry

    def _finish_function(self, entry: Entry) -> None:
        """Keep the entry if it made tensors that a replay has to make again."""
        outputs = list(iter_tensors(entry.output))
        written = functions.written_argument(entry.name, entry.args, entry.kwargs)
        if not (outputs or written is not None) or not self._can_repeat(entry, outputs):
            return
        if isinstance(written, torch.Tensor) and entry.rng is None and functions.is_random(entry.name):
            entry.outcome = written.detach().clone()
        self._add(entry, outputs)

    def _can_repeat(self, entry: Entry, outputs: list[torch.Tensor]) -> bool:
        """Whether replaying the function gives the same; otherwise its outcome is used by value."""
        if not entry.name:
            return any(tensor.requires_grad for tensor in outputs)
        if functions.is_random(entry.name):
            return entry.rng is not None or functions.is_in_place(entry.name)
        return bool(entry.versions) or functions.is_factory(entry.name)

    def _add(self, entry: Entry, outputs: list[torch.Tensor]) -> None:
        self.entries.append(entry)
        self._made.update(map(id, outputs))
        self._bytes += _num_bytes(outputs)
        while self._bytes > self._budget and self._drop_oldest():
            pass

    def _drop_oldest(self) -> bool:
        """Drop the oldest function entry that no gradient flows through; what it made is then used by value."""
        for position, entry in enumerate(self.entries):
            outputs = list(iter_tensors(entry.output))
            if entry.kind == "function" and not any(tensor.requires_grad for tensor in outputs):
                del self.entries[position]
                self._made.difference_update(map(id, outputs))
                self._bytes -= _num_bytes(outputs)
                return True
        self._budget *= 2  # nothing can go: gradients need all of it anyway
        return False

    def _save_before_write(self, target: Any) -> None:
        """Keep what outside tensors held before the loop writes into their memory."""
        if not isinstance(target, torch.Tensor) or target.layout is not torch.strided:
            return
        memory = target.untyped_storage().data_ptr()
        for tensor in self._outside_tensors(target):
            known = id(tensor) in self.saved or tensor.layout is not torch.strided
            if not known and tensor.untyped_storage().data_ptr() == memory:
                self.saved[id(tensor)] = tensor.detach().clone(memory_format=torch.preserve_format)
                self._bytes += _num_bytes([tensor])

    def _outside_tensors(self, target: torch.Tensor) -> Iterator[torch.Tensor]:
        """Tensors the step did not make: the target, and those read so far."""
        if id(target) not in self._made:
            yield target
        for entry in self.entries:
            for tensor, _ in entry.versions:
                if id(tensor) not in self._made:
                    yield tensor

    def _is_parameter(self, target: Any) -> bool:
        """Whether a tensor is a parameter, or shares memory with one that a root module holds."""
        if not isinstance(target, torch.Tensor) or isinstance(target, torch.nn.Parameter):
            return isinstance(target, torch.nn.Parameter)
        if target.layout is not torch.strided or (id(target) in self._made and not target._is_view()):
            return False
        if self._memory is None:
            self._memory = {p.untyped_storage().data_ptr() for p in self.parameters() if p.layout is torch.strided}
        return target.untyped_storage().data_ptr() in self._memory

    def _end_hand_update(self) -> None:
        """The first thing after parameters were changed by hand begins a new step."""
        if self._hand_updated:
            self._hand_updated = False
            self.on_hand_update()

    # -- root modules --------------------------------------------------------------------------------------------

    def call_module(
        self, original: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a root module with the tape out of the way, and note the call."""
        entry = self.guard(self._prepare_module, module, args, kwargs, sys._getframe(2))
        with self.paused(), _plain_call(self):
            output = original(module, *args, **kwargs)
        if entry is not None:
            entry.output = output
            self.guard(self._finish_module, entry)
        return output

    def _prepare_module(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Entry:
        self._end_hand_update()
        self._on_module(module)
        user = _first_user_frame(frame)
        entry = Entry("module", module, args, kwargs, current_mode(), code=user.f_code, line=user.f_lineno)
        entry.versions = [(tensor, _version(tensor)) for tensor in iter_tensors((args, kwargs))]
        entry.rng = _rng_state(entry.versions)
        self.entries.append(entry)
        return entry

    def _finish_module(self, entry: Entry) -> None:
        self._made.update(id(tensor) for tensor in iter_tensors(entry.output))

    def _is_inside(self, frame: FrameType) -> bool:
        """Whether a custom autograd function is running, or a root module that is not known yet.

        The tensors a custom function returns are used by value. The class of a new root tells the tape from its next
        call on.
        """
        root = None
        walker: FrameType | None = frame
        while walker is not None:
            if walker.f_code is _FUNCTION_APPLY:
                return True
            if walker.f_code is _CALL_IMPL:
                root = walker
            walker = walker.f_back
        if root is not None:
            self._patch(type(root.f_locals["self"]), type(root.f_locals["self"]).__call__)
        return root is not None

    def _patch(self, cls: type[torch.nn.Module], original: Callable[..., Any]) -> None:
        if cls in self._patched:
            return
        tape = self
        own = cls.__dict__.get("__call__")
        self._patched[cls] = own
        inner = own or original

        def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not tape.is_outermost:
                return inner(self, *args, **kwargs)
            return tape.call_module(inner, self, args, kwargs)

        cls.__call__ = __call__  # type: ignore[method-assign]


class _plain_call:
    """While the tape still watches every module: let modules inside a root be called as if nobody did."""

    def __init__(self, tape: Tape) -> None:
        self._original = tape._original_call

    def __enter__(self) -> None:
        if self._original is not None:
            self._watching = torch.nn.Module.__call__
            torch.nn.Module.__call__ = self._original  # type: ignore[method-assign]

    def __exit__(self, *exc_info: object) -> None:
        if self._original is not None:
            torch.nn.Module.__call__ = self._watching  # type: ignore[method-assign]


class _Paused:
    """See `Tape.paused`."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._popped = False

    def __enter__(self) -> None:
        self._tape._depth += 1
        height = torch._C._len_torch_function_stack()
        if height and torch._C._get_function_stack_at(height - 1) is self._tape:
            torch._C._pop_torch_function_stack()
            self._popped = True

    def __exit__(self, *exc_info: object) -> None:
        if self._popped:
            torch._C._push_on_torch_function_stack(self._tape)
        self._tape._depth -= 1


def _rng_state(versions: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states of the CPU generator and, when a CUDA tensor is involved, of its device's generator."""
    cuda = next((tensor.device for tensor, _ in versions if tensor.is_cuda), None)
    return torch.get_rng_state(), torch.cuda.get_rng_state(cuda) if cuda is not None else None


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _first_user_frame(frame: FrameType) -> FrameType:
    walker: FrameType | None = frame
    while walker is not None:
        if kind_of_file(walker.f_code.co_filename) == "user":
            return walker
        walker = walker.f_back
    return frame


_DIFFERENTIATION = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
_SILENT_METHODS = [
    "size",
    "dim",
    "numel",
    "nelement",
    "item",
    "tolist",
    "numpy",
    "stride",
    "element_size",
    "data_ptr",
    "get_device",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "is_pinned",
    "is_signed",
    "storage_offset",
    "untyped_storage",
    "__len__",
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
    "__complex__",
    "__repr__",
    "__format__",
    "__hash__",
    "__contains__",
    "__reduce_ex__",
    "__deepcopy__",
    "register_hook",
    "retain_grad",
]
_SILENT_ATTRIBUTES = [
    "shape",
    "dtype",
    "device",
    "requires_grad",
    "is_leaf",
    "ndim",
    "is_cuda",
    "is_cpu",
    "grad_fn",
    "is_nested",
    "is_sparse",
    "layout",
    "itemsize",
    "nbytes",
    "names",
    "output_nr",
    "_version",
    "_base",
    "is_meta",
    "is_quantized",
    "is_mkldnn",
    "is_mps",
    "is_xpu",
    "retains_grad",
    "_backward_hooks",
]
_SILENT = frozenset(
    [getattr(torch.Tensor, name) for name in _SILENT_METHODS]
    + [
        getattr(torch.Tensor, name).__get__
        for name in _SILENT_ATTRIBUTES
        if hasattr(getattr(torch.Tensor, name, None), "__get__")
    ]
)
