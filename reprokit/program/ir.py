"""The program: one training step as straight-line calls of public torch functions.

A program is data. It names functions by their public names, refers to tensors by value number, and holds no
code of the user's, so it can be stored, opened without executing anything, cut anywhere, and printed as Python.
This module needs no torch: the tensors of a program's inputs travel beside it in a plain ``dict[int, Tensor]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from reprokit.grammar import Code, Constants, Count, Listing, Name, Path, Row, Statement, one_of

Leaf = TypeVar("Leaf")
ROLES = ("parameter", "buffer", "batch", "random", "state", "gradient", "rng", "opaque")
ZERO_GRAD = "torch.optim.Optimizer.zero_grad"
BACKWARD = "torch.Tensor.backward"
AUTOGRAD_BACKWARD = "torch.autograd.backward"
AUTOGRAD_GRAD = "torch.autograd.grad"
OPAQUE = "opaque"
PACK = "torch._pack_padded_sequence"  # its result goes by its attributes, ``data`` and ``batch_sizes``


class Phase(StrEnum):
    """The part of a step that a call is made in."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


Span = tuple[Count, Count, Count, Count]


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the program, by its value number."""

    value: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A torch constant by its public name, such as ``torch.float16`` or ``torch.channels_last``."""

    name: Name


@dataclass(frozen=True, slots=True)
class Device:
    """A device by its text, such as ``cuda:0``."""

    name: Name


@dataclass(frozen=True, slots=True)
class Slice:
    """A Python slice whose parts are ints, ``None`` or `Ref`."""

    start: Constants
    stop: Constants
    step: Constants


@dataclass(frozen=True, slots=True)
class Scope(Row):
    """One level of module nesting: dotted path inside its root (empty for the root itself), class name, n-th call."""

    path: Name
    cls: Name
    count: Count = 0
    root: Name = ""  # what the user calls the root; empty where that is not needed to tell it from others

    @property
    def full_path(self) -> str:
        """The path with the root's name in front, where it has one."""
        return f"{self.root}.{self.path}" if self.root and self.path else self.root or self.path

    @property
    def label(self) -> str:
        """The name in texts, and the key of `Program.modules`: the full path, else the class in angle brackets."""
        return self.full_path or f"<{self.cls}>"


@dataclass(frozen=True, slots=True)
class Site(Row):
    """Where a call was written: the user's innermost line, and the line inside the library it went through."""

    file: Path
    line: Count
    code: Code = ""
    function: Name = ""
    library: tuple[Path, Count] | None = None
    statement: Statement = ""  # all lines of a statement over several lines
    span: Span | None = None  # of the call in `text`: lines from 1, columns in bytes, the last column behind it

    @property
    def place(self) -> str:
        """``train.py:7``."""
        return f"{self.file}:{self.line}"

    @property
    def text(self) -> str:
        """The statement, dedented: one line or several."""
        return self.statement or self.code

    @property
    def up_to_call(self) -> bytes:
        """The statement up to the end of the call."""
        last, end = self.span[2:] if self.span is not None else (0, 0)
        *lines, line = self.text.encode().split(b"\n")[: last or 1]
        return b"\n".join([*lines, line[:end]])

    @property
    def first_line(self) -> int:
        """The number of the first line of the statement."""
        return self.line - self.span[0] + 1 if self.span is not None else self.line

    @property
    def statement_place(self) -> str:
        """``train.py:7``, or ``train.py:7-9`` for a statement of three lines."""
        last = f"-{self.first_line + len(self.statement.splitlines()) - 1}" if self.statement else ""
        return f"{self.file}:{self.first_line}{last}"


@dataclass(frozen=True, slots=True)
class Mode:
    """The thread's torch settings around a call."""

    grad: bool = True
    autocast: tuple[tuple[Name, Name], ...] = ()  # enabled devices and dtypes: ``("cpu", "torch.float16")``
    inference: bool = False
    rng: Ref | None = None  # the generator's state (a uint8 input) before a random call


@dataclass(frozen=True, slots=True)
class Call:
    """One call. ``outputs`` mirrors the structure of the result: `Ref` for tensors, ``None`` for anything else.

    A result that is the same tensor object as an earlier value (in-place calls) carries that value's `Ref`.
    Special targets besides torch functions:

    * ``torch.optim.<Class>.step``: kwargs ``params`` and ``grads`` (lists per group; a grad of ``None`` means the one
      that backward left), ``options`` (a dict per group), ``state`` (per group a list of dicts per parameter).
    * `ZERO_GRAD`: args ``([params],)``; sets their ``.grad`` to ``None``.
    * `OPAQUE`: a call that torch functions cannot express; it is not executed, its outputs are inputs of the program;
      kwargs ``name`` and ``source`` describe it.
    """

    target: Name
    args: tuple[Constants, ...] = ()
    kwargs: Mapping[Name, Constants] = field(default_factory=dict)
    outputs: Constants = None
    scope: tuple[Scope, ...] = ()
    site: Site | None = None
    mode: Mode = Mode()
    phase: Phase = Phase.FORWARD

    @property
    def name(self) -> str:
        """The last component of the target, ``softmax`` for ``torch.nn.functional.softmax``."""
        return self.target.rpartition(".")[2]

    @property
    def is_differentiation(self) -> bool:
        """True if the call runs autograd."""
        return self.target in (BACKWARD, AUTOGRAD_BACKWARD, AUTOGRAD_GRAD)

    @property
    def is_optimizer_step(self) -> bool:
        """True if the call is a whole step of an optimizer."""
        return self.target.startswith("torch.optim.") and self.target.endswith(".step")

    def input_refs(self) -> tuple[int, ...]:
        """The value numbers read, in order, without repeats (the generator state included)."""
        found = dict.fromkeys(ref.value for ref in iter_refs((self.args, self.kwargs)))
        if self.mode.rng is not None:
            found[self.mode.rng.value] = None
        return tuple(found)

    def output_refs(self) -> tuple[int, ...]:
        """The value numbers written, in order."""
        return tuple(dict.fromkeys(ref.value for ref in iter_refs(self.outputs)))

    def substituted(self, values: Mapping[int, Any], *, outputs: bool = False) -> Call:
        """The call with other arguments (`Ref` or constants) for the listed values, and other outputs if wanted."""
        args, kwargs = substitute((self.args, dict(self.kwargs)), values)
        return replace(self, args=args, kwargs=kwargs, outputs=substitute(self.outputs, values if outputs else {}))


@dataclass(frozen=True, slots=True)
class Input(Row):
    """A tensor the program starts from.

    ``role``: ``parameter``, ``buffer``, ``batch`` (anything else the step was given), ``random`` (the outcome of a
    random call), ``state`` (of an optimizer), ``gradient``, ``rng``, or ``opaque``.
    """

    value: int
    name: Name  # the state-dict name, the argument's name, or a word for its role
    role: Annotated[str, one_of(*ROLES)] = "batch"
    requires_grad: bool = False  # it is a leaf


@dataclass(frozen=True, slots=True)
class ModuleNote:
    """A module that was entered: for printing, never for executing."""

    cls: Name
    training: bool = True
    arguments: Mapping[Name, Constants] = field(default_factory=dict)  # of the constructor of torch's own layers
    file: Path = ""  # of user classes, as line and source are
    line: int = 0
    source: Listing = ""


@dataclass(frozen=True, slots=True)
class Program:
    """Straight-line calls over numbered tensors. Every value is an input or an output of an earlier call."""

    calls: tuple[Call, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Ref, ...] = ()
    modules: Mapping[Name, ModuleNote] = field(default_factory=dict)

    @property
    def num_calls(self) -> int:
        """Torch calls, not counting backward calls, `ZERO_GRAD` and the creation of inputs."""
        return sum(not (call.is_differentiation or call.target == ZERO_GRAD) for call in self.calls)

    def input(self, value: int) -> Input:
        """The input with this value number; raises ``KeyError``."""
        return {item.value: item for item in self.inputs}[value]

    def next_value(self) -> int:
        """A value number that nothing uses yet."""
        made = (value for call in self.calls for value in call.output_refs())
        return max((*(item.value for item in self.inputs), *made), default=-1) + 1

    def pruned(self) -> Program:
        """The same program without inputs that nothing reads."""
        read = {value for call in self.calls for value in call.input_refs()} | {ref.value for ref in self.outputs}
        return replace(self, inputs=tuple(item for item in self.inputs if item.value in read))


def iter_refs(value: Any) -> Iterator[Ref]:
    """Every `Ref` in nested arguments, in order."""
    return iter_leaves(value, Ref)


def iter_leaves(value: Any, kind: type[Leaf]) -> Iterator[Leaf]:
    """Every object of a ``kind`` in nested arguments, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iter_leaves(item, kind)
    elif isinstance(value, Mapping):
        yield from iter_leaves(list(value.values()), kind)
    elif isinstance(value, Slice):
        yield from iter_leaves((value.start, value.stop, value.step), kind)


def map_leaves(value: Any, change: Callable[[Any], Any], make_slice: Callable[..., Any] = Slice) -> Any:
    """Nested arguments with ``change`` applied to every leaf (`Ref`, `Symbol`, numbers, ...)."""
    if isinstance(value, tuple):
        return tuple([map_leaves(item, change, make_slice) for item in value])
    if isinstance(value, list):
        return [map_leaves(item, change, make_slice) for item in value]
    if isinstance(value, Mapping):
        return {key: map_leaves(item, change, make_slice) for key, item in value.items()}
    if isinstance(value, (Slice, slice)):
        return make_slice(*map_leaves((value.start, value.stop, value.step), change, make_slice))
    return change(value)


def substitute(value: Any, values: Mapping[int, Any]) -> Any:
    """Nested arguments with the `Ref` of each listed value number replaced (by another `Ref` or a constant)."""

    def change(leaf: Any) -> Any:
        return values.get(leaf.value, leaf) if isinstance(leaf, Ref) else leaf

    return map_leaves(value, change)
