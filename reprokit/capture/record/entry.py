"""One thing the training loop did, as the tape notes it: it holds the very tensors the loop had.

Facts about a torch function, computed once for each: its name, if it writes, if it is random, if it is noted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch

from reprokit import torch_private
from reprokit.capture.record import kinds
from reprokit.capture.record.kinds import EntryKind
from reprokit.capture.record.structure import ATOMS, iter_tensors
from reprokit.program import functions
from reprokit.program.ir import AUTOGRAD_BACKWARD, AUTOGRAD_GRAD, BACKWARD, Mode


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a torch function; ``function`` is the original, without the wrapper of a capture.

    ``is_plain``: it makes new tensors of tensors or writes into its first one, without random numbers. ``is_silent``:
    it is never noted; if it ``is_read`` it tells the loop a value. ``reads_values``: no gradient flows through it.
    ``may_write``: it writes into what it is given, or is written in Python, where ``inplace=True`` may be asked for.
    """

    function: Callable[..., Any]
    name: str
    is_in_place: bool
    is_differentiation: bool
    is_random: bool
    is_plain: bool
    is_indexing: bool
    is_silent: bool
    is_read: bool
    writes_data: bool
    reads_values: bool
    may_write: bool


def facts_of(func: Callable[..., Any]) -> Facts:
    """The facts of a function, found once."""
    facts = FACTS.get(func)
    return facts if facts is not None else _find_facts(func)


def _find_facts(func: Callable[..., Any]) -> Facts:
    function = func
    if func not in _DIFFERENTIATION and getattr(func, "__wrapped__", None) in _DIFFERENTIATION:
        function = func.__wrapped__  # type: ignore[attr-defined]
    name = functions.name_of(function) or (AUTOGRAD_BACKWARD if function in _DIFFERENTIATION else "")
    is_in_place, is_random = functions.is_in_place(name), functions.is_random(name)
    is_silent = func in _SILENT or (isinstance(func, OPERATORS) and _is_of_torch(func))
    is_special = is_random or functions.is_factory(name) or name in functions.GRAD_WRITES | functions.DATA_WRITES
    is_differentiation = function in _DIFFERENTIATION
    facts = Facts(
        function,
        name,
        is_in_place,
        is_differentiation,
        is_random,
        is_plain=bool(name) and not (is_special or is_differentiation or is_silent or function in _DIVIDED),
        is_indexing=function in _INDEXING,
        is_silent=is_silent,
        is_read=func in _READS,
        writes_data=name in functions.DATA_WRITES,
        reads_values=name in VALUE_READS,
        may_write=is_in_place or isinstance(function, FunctionType),
    )
    if is_silent or (name and function is func):
        FACTS[func] = facts
    return facts


UNKNOWN = Facts(lambda: None, "", *10 * [False])  # of a function whose own facts could not be found
VALUE_READS = frozenset({"torch.Tensor.detach", "torch.Tensor.data.__get__"})
FACTS: dict[Callable[..., Any], Facts] = {}
_INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
_DIVIDED = frozenset({torch.Tensor.__iter__})
_DIFFERENTIATION = frozenset({torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad})
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
# Namespaces of `torch.ops` whose operators torch itself calls, such as the marks that its profiler leaves.
_OF_TORCH = frozenset(
    ["aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "_dtensor", "fsdp", "higher_order", "inductor",
     "quantized", "rngprims", "symm_mem"]
)  # fmt: skip


def _is_of_torch(operator: Any) -> bool:
    return operator.__module__.rpartition(".")[2] in _OF_TORCH


# Functions that change nothing and tell the loop something; those that also make it wait for the device.
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
_READS = frozenset(
    getattr(torch.Tensor, name) for name in ("item", "__float__", "__int__", "__bool__", "numpy", "tolist")
)
_SILENT = frozenset(
    [getattr(torch.Tensor, name) for name in _SILENT_METHODS]
    + [
        getattr(torch.Tensor, name).__get__
        for name in _SILENT_ATTRIBUTES
        if hasattr(getattr(torch.Tensor, name, None), "__get__")
    ]
    + [torch_private.set_grad_enabled]  # of `torch.no_grad`, whose end nothing may come before
)


@dataclass(slots=True, eq=False)
class Entry:
    """One call of the loop.

    ``versions`` pairs the tensors it was given with their version counters. ``rng`` holds the states of the CPU and,
    where used, the CUDA generator before a call that may draw; ``generators`` those of Python and NumPy, if a module is
    not the first one of its step. ``outcome`` is what a random in-place function left.
    ``settings`` is what else a replay needs: an optimizer's options of that step, a grad scaler's scale, the
    attributes that a root module had when it was called (`attributes.Noted`), the ids of the parameters whose gradients
    `zero_grad` set to zero, the places of the variables that the function of a transform reads.
    ``writes_state`` marks functions that write into parameters and buffers outside of optimizers: they are part of the
    state that the next forward begins with. ``writes_view`` marks writes into a view of another tensor. ``has_stepped``
    marks backward calls inside which optimizers stepped. ``library`` is the line of a library that made the call, if
    it was not made by the user's line itself. ``is_training`` is the training mode in which a module was called;
    ``forward`` is the attribute of that name that the module itself had, perhaps for this one call.
    ``averaged`` pairs parameters with the gradients that a backward call has left after all processes averaged them,
    where going back has computed these.
    ``instruction`` is the offset in ``code`` of the call in the user's code, in bytes. ``is_skipped`` marks calls of a
    step that the loop has skipped since.
    """

    kind: EntryKind
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mode: Mode
    output: Any = None
    name: str = ""
    code: CodeType | None = None
    instruction: int = 0
    rng: tuple[torch.Tensor, torch.Tensor | None] | None = None
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    outcome: torch.Tensor | None = None
    settings: Any = None
    writes_state: bool = False
    writes_view: bool = False
    has_stepped: bool = False
    is_training: bool = False
    is_skipped: bool = False
    generators: dict[str, Any] | None = None
    forward: Any = None
    library: tuple[str, int] | None = None
    averaged: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def line(self) -> int:
        """The line of the instruction in ``code``; 0 if it has none."""
        return _line_of(self.code, self.instruction)

    @property
    def reads_values(self) -> bool:
        """True if no gradient flows through the entry, so that it takes its arguments without their graphs."""
        return not self.mode.grad or self.name in VALUE_READS

    @property
    def starts(self) -> list[torch.Tensor]:
        """The tensors a backward call starts from."""
        return starts_of(self.args, self.kwargs)

    @property
    def gives_gradients(self) -> bool:
        """True if a backward call is handed gradients, so that what it starts from is not a loss."""
        position = 2 if self.name == AUTOGRAD_GRAD else 1
        given = self.args[position] if len(self.args) > position else None
        return given is not None or any(self.kwargs.get(name) is not None for name in _GIVEN_GRADIENTS)

    @property
    def keeps_graph(self) -> bool:
        """True if a backward pass retains the graph."""
        if len(self.args) < _FEWEST_WITH_GRAPH and not self.kwargs:
            return False
        positions = _GRAPH_POSITIONS.get(self.name, ())
        given = [self.args[position] for position in positions if len(self.args) > position]
        return any((*given, *(self.kwargs.get(name) for name in ("retain_graph", "create_graph"))))


class PlainEntry(Entry):
    """A function of the usual kind, noted with the least work: fields that are not set are made when they are read.

    The user's own line has called it. ``stamps`` are the version counters of the
    tensors in its arguments, which are no other objects than tensors, numbers, words, and lists or tuples of these.
    ``is_nested``: some are lists, or tuples that hold a tensor. ``is_write``: it writes into its first argument.
    """

    __slots__ = ("is_nested", "is_write", "stamps")
    is_nested: bool
    is_write: bool
    stamps: tuple[int, ...] | list[int]

    if not TYPE_CHECKING:
        kind = kinds.FUNCTION

        def __getattr__(self, name: str) -> Any:
            """The value of a field that is not set yet, which it keeps."""
            make = _LATE.get(name)
            if make is None:
                raise AttributeError(name)
            value = make(self)
            setattr(self, name, value)
            return value


@functools.lru_cache(maxsize=1024)
def _line_of(code: CodeType | None, instruction: int) -> int:
    lines = code.co_lines() if code is not None else ()
    return next((line for start, end, line in lines if start <= instruction < end and line is not None), 0)


def _pairs_of(entry: PlainEntry) -> list[tuple[torch.Tensor, int]]:
    return list(zip(iter_tensors((entry.args, entry.kwargs)), entry.stamps, strict=True))


_LATE: Mapping[str, Any] = {
    **{name: lambda entry: None for name in ("output", "rng", "outcome", "settings", "generators", "forward")},
    **{
        name: lambda entry: False
        for name in ("has_stepped", "is_training", "is_skipped", "writes_state", "writes_view")
    },
    "library": lambda entry: None,
    "averaged": lambda entry: None,
    "name": lambda entry: facts_of(entry.target).name,
    "versions": _pairs_of,
}


def reads_gradient(entry: Entry) -> bool:
    """True if the loop reads the gradient of a tensor."""
    return entry.name in _GRAD_READS


def gradients_read(entries: Iterable[Entry]) -> set[int]:
    """The ids of the gradients that the loop looked at, and of what shares their memory."""
    found: set[int] = set()
    for entry in entries:
        if entry.name in _GRAD_READS or (entry.name in _ALIASES and id(entry.args[0]) in found):
            found.update(id(tensor) for tensor in iter_tensors(entry.output))
    return found


_GRAD_READS = frozenset({"torch.Tensor.grad.__get__", "torch.Tensor._grad.__get__"})
_ALIASES = frozenset(
    f"torch.Tensor.{name}"
    for name in ("data.__get__", "detach", "view", "view_as", "reshape", "flatten", "unsqueeze", "t", "__getitem__")
)
_GRAPH_POSITIONS = {BACKWARD: (2, 3), AUTOGRAD_BACKWARD: (2, 3), AUTOGRAD_GRAD: (3, 4)}
_FEWEST_WITH_GRAPH = 3  # arguments
_GIVEN_GRADIENTS = ("gradient", "grad_tensors", "grad_outputs")


def starts_of(args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a backward call with these arguments starts from."""
    first = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
    return [first] if isinstance(first, torch.Tensor) else list(iter_tensors(first))


def versions_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, int]]:
    """The tensors among the arguments of a call with their version counters (-1 for those that have none)."""
    found = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            found.append((value, -1 if value.is_inference() else value._version))
        elif type(value) not in ATOMS:
            found += [(t, -1 if t.is_inference() else t._version) for t in iter_tensors(value)]
    return found


TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_version = attrgetter("_version")
_DIMENSIONS = 16
_SINGLE = ATOMS | {slice, type(...), torch.Size}
_ITEMS = TENSORS | _SINGLE


def stamps_of(args: tuple[Any, ...]) -> list[int] | None:
    """The version counters of the tensors among the arguments of a call; ``None`` if there may be others inside of
    these."""
    stamps = []
    try:
        for value in args:
            kind = value.__class__
            if kind is _Tensor or kind is _Parameter:
                stamps.append(value._version)
            elif kind not in _SINGLE and not (kind is tuple and _is_flat(value)):
                return None
    except RuntimeError:  # of a tensor made in inference mode
        return None
    return stamps


def _is_flat(value: tuple[Any, ...]) -> bool:
    return len(value) <= _DIMENSIONS and _SINGLE.issuperset(map(type, value))


def own_and_stamped(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]] | None:
    """The arguments of a call, with lists of their own, and the version counters of their tensors.

    ``None`` if there is anything but tensors with such counters, numbers, words, and lists or tuples of these.
    """
    own: list[Any] = []
    stamps: list[int] = []
    try:
        for value in args:
            kind = value.__class__
            if kind in TENSORS:
                stamps.append(value._version)
            elif kind is list or kind is tuple:
                kinds = set(map(type, value))
                if kinds <= TENSORS:
                    stamps += map(_version, value)
                elif kinds <= _ITEMS:
                    stamps += [item._version for item in value if item.__class__ in TENSORS]
                else:
                    return None
            elif kind not in _SINGLE:
                return None
            own.append(list(value) if kind is list else value)
    except RuntimeError:
        return None
    return tuple(own), stamps


def generator_states(versions: Iterable[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states of the CPU generator and, when a CUDA tensor is among the arguments, of its device's generator."""
    state = torch.default_generator.get_state()
    for tensor, _ in versions:
        if tensor.is_cuda:
            return state, torch.cuda.get_rng_state(tensor.device)
    return state, None


def is_among(tensor: torch.Tensor, versions: list[tuple[torch.Tensor, int]]) -> bool:
    """True if a tensor is one of the arguments."""
    for known, _ in versions:  # noqa: SIM110 (a generator would cost more than the loop)
        if known is tensor:
            return True
    return False


def new_tensors(entry: Entry, made: set[int]) -> list[torch.Tensor]:
    """The new tensors of an entry: its outputs without tensors from outside that it wrote into or returned."""
    output = entry.output
    if output is None:
        return []
    outputs = [output] if isinstance(output, torch.Tensor) else list(iter_tensors(output))
    given = [id(tensor) for tensor, _ in entry.versions]
    return [tensor for tensor in outputs if id(tensor) in made or id(tensor) not in given]


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The target of a replay: the module itself, without a wrapper that would wait for other processes."""
    return module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module
