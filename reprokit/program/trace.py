"""Recording a step: every torch call it makes, as a program.

A `Tracer` is a torch-function mode. It sees calls at the level a person writes them (``F.softmax``, ``Tensor.view``),
each with its module scope, source line and thread modes. Tensors nobody in the step made become inputs with the value
they had when they were first used. Random outcomes that carry no gradient become inputs too, so a program seldom draws
numbers. Arguments are held as plain data, torch's constants by name, tensors by number.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional
from torch.overrides import TorchFunctionMode

from reprokit import members, native, torch_private
from reprokit.program import functions
from reprokit.program.custom import CustomFunctions
from reprokit.program.dataflow import copies_of, copy_of, is_bad
from reprokit.program.ir import (
    AUTOGRAD_BACKWARD,
    AUTOGRAD_GRAD,
    BACKWARD,
    OPAQUE,
    Call,
    Device,
    Input,
    Mode,
    ModuleNote,
    Phase,
    Program,
    Ref,
    Scope,
    Site,
    Symbol,
    iter_leaves,
    map_leaves,
)
from reprokit.program.sites import find_frames, make_site, note_of
from reprokit.program.transforms import Transforms
from reprokit.words import user_path


class CannotRecord(TypeError):
    """An argument that a program cannot hold."""


_DTYPES: dict[type, str] = {bool: "torch.bool", int: "torch.int64", float: "torch.float64"}


def with_indexes(value: Any) -> Any:
    """The argument of `__getitem__`, with NumPy arrays as the tensors that torch makes of them."""
    if isinstance(value, tuple):
        return tuple(with_indexes(item) for item in value)
    if type(value).__module__ != "numpy" or getattr(value, "ndim", 0) == 0 or value.dtype.kind not in "biu":
        return value
    index = native.tensor(value)
    return index if index.dtype in (torch.bool, torch.uint8) else native.long(index)


# Functionals that stand for a whole layer: recorded as the calls they are made of.
_LAYERS = frozenset({"torch.nn.functional.multi_head_attention_forward", "torch.nn.functional.gumbel_softmax"})
_INDEXING = frozenset({"torch.Tensor.__getitem__", "torch.Tensor.__setitem__"})
_WITHOUT_RESULT = functions.GRAD_WRITES | {BACKWARD, AUTOGRAD_BACKWARD}  # matter all the same


@dataclass(frozen=True, slots=True)
class InputName:
    """Name and role of an input tensor."""

    name: str
    role: str = "batch"


class Tracer(TorchFunctionMode):
    """Records calls while it is entered.

    ``describe`` names tensors that the step did not make, ``root_names`` those roots that others could be mistaken for,
    by ``id``. Invariant: ``_values`` maps ``id`` of every tensor in ``_alive`` to its value number, so ids are
    never reused. ``phase`` and ``outer_site`` are set by whoever drives the step, from the file ``driver``;
    while it ``is_silent`` nothing is recorded. The contents of parameters are copied unless it ``borrows`` them.
    """

    def __init__(
        self,
        describe: Callable[[torch.Tensor], InputName | None],
        driver: str = "",
        root_names: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__()
        self._driver = driver
        self.calls: list[Call] = []
        self.inputs: list[Input] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self.modules: dict[str, ModuleNote] = {}
        self.phase = Phase.FORWARD
        self.is_silent, self.borrows = False, True
        self.outer_site: Site | None = None
        self.outer_scope: tuple[Scope, ...] = ()
        self.functions = CustomFunctions(self)
        self.transforms = Transforms(self)
        self._describe = describe
        self._values: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []
        self._scopes: list[Scope] = []
        self._root_names = root_names or {}
        self._root = ""
        self._paths: dict[int, str] = {}
        self._counts: dict[int, int] = {}
        self._names: dict[str, int] = {}
        self._borrowed: dict[int, list[int]] = {}
        self._count = -1

    def program(self, outputs: tuple[int, ...] = ()) -> Program:
        """The program recorded so far."""
        return Program(tuple(self.calls), tuple(self.inputs), tuple(Ref(v) for v in outputs), dict(self.modules))

    def value_of(self, tensor: torch.Tensor) -> int | None:
        """The value number of a tensor, or ``None`` if the program does not know it."""
        return self._values.get(id(tensor))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record one call and perform it, unless it is one of a transform of `torch.func` (see `Transforms`)."""
        options = dict(kwargs or {})
        if self.is_silent or torch_private.peek_transforms() is not None:
            return func(*args, **options)
        func = functions.called_function(func, sys._getframe(1))
        if func is torch.Tensor.__iter__ and native.dim(args[0]) > 0:
            return iter(self.perform("torch.Tensor.unbind", native.unbind, (args[0], 0), {}))
        name = functions.name_of(func)
        if name in _LAYERS:
            # Run a Python functional with its own override check answered ``no`` once, so that its inside is recorded
            functional: Any = torch.nn.functional
            original = functional.has_torch_function

            def answer_once(*_: Any) -> bool:
                functional.has_torch_function = original
                return False

            functional.has_torch_function = answer_once
            try:
                with self:
                    return func(*args, **options)
            finally:
                functional.has_torch_function = original
        if name is None:
            return self._perform_unknown(func, args, options)
        return self.perform(name, func, args, options)

    def perform(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform ``func`` and record it under ``name``."""
        if self.is_silent:
            return func(*args, **kwargs)
        for tensor in _tensors(functions.all_written(name, args, kwargs)):
            self.save_before_write(tensor)
        try:
            call = self.make_call(name, with_indexes(args) if name in _INDEXING else args, kwargs)
        except CannotRecord:
            return self._perform_unknown(func, args, kwargs, functions.written_argument(name, args, kwargs))
        if call.is_differentiation:
            return self._differentiate(call, func, args, kwargs)
        random = functions.is_random(name)
        state = _rng_state(args) if random else None
        try:
            result = func(*args, **kwargs)
        except Exception:
            self.calls.append(call)
            raise
        if state is not None and not native.equal(state, _rng_state(args)):
            # It drew random numbers: keep the outcome, or the generator's state when gradients flow through the call
            written = functions.written_argument(call.target, args, kwargs)
            if isinstance(written, torch.Tensor) and not written.requires_grad:
                self._record_write(written, call)
                return result
            if not any(tensor.requires_grad for tensor in _tensors(result)):
                return self.make_outcome(result, "random")
            rng = self._new_input(state, InputName("rng", "rng"), requires_grad=False)
            mode = replace(call.mode, rng=Ref(rng))
            self.calls.append(replace(call, mode=mode, outputs=self._bind(result)))
            return result
        if not call.input_refs() and not functions.is_factory(name):
            return self.make_outcome(result, "batch")
        if not any(True for _ in _tensors(result)) and not functions.is_in_place(name) and name not in _WITHOUT_RESULT:
            return result
        if random and "empty" in call.name:
            return self.make_outcome(result, "batch")
        self.calls.append(replace(call, outputs=self._bind(result)))
        return result

    def _differentiate(self, call: Call, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Differentiate and record it together with what custom functions do on the way.

        Gradients that `torch.autograd.grad` returns from behind such a function are kept by value.
        """
        with self.functions.differentiation() as passages:
            try:
                result = func(*args, **kwargs)
            except Exception:
                self.calls.extend(self.functions.written_out(call, passages))
                raise
        if call.target == AUTOGRAD_GRAD and passages:
            return self.make_outcome(result, "batch")
        self.calls.extend(self.functions.written_out(replace(call, outputs=self._bind(result)), passages))
        return result

    def record(self, call: Call) -> None:
        """Append a call that was performed elsewhere."""
        self.calls.append(call)

    def make_call(self, target: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Call:
        """A call with encoded arguments and the modes of now; raises `CannotRecord`."""
        return Call(
            target,
            self.encode(args),
            self.encode(dict(kwargs or {})),
            scope=tuple(self._scopes) or self.outer_scope,
            site=self._site(),
            mode=current_mode(),
            phase=self.phase,
        )

    def _record_write(self, written: torch.Tensor, call: Call) -> None:
        """The contents that a call wrote into a tensor, as a copy from an input."""
        target = Ref(self.value(written))
        outcome = self._new_input(copy_of(native.detach(written)), InputName("random", "random"), requires_grad=False)
        copy = replace(call, target="torch.Tensor.copy_", args=(target, Ref(outcome)), kwargs={}, outputs=target)
        self.calls.append(copy)

    def make_outcome(self, result: Any, role: str, name: str = "") -> Any:
        """Make the tensors of ``result`` inputs of the program."""
        for tensor in _tensors(result):
            if id(tensor) not in self._values:
                self.adopt(tensor, InputName(name or role, role))
        return result

    def _perform_unknown(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], written: Any = None
    ) -> Any:
        """A function that a program may not hold: what it returns, or has ``written`` into, is an input of the rest."""
        given = list(_tensors((args, kwargs)))
        name = getattr(func, "__name__", type(func).__name__).replace(".", "_")
        result = func(*args, **kwargs)
        changed = [written] if isinstance(written, torch.Tensor) else ()
        return self.adopt_opaque({"name": name}, given, result, changed)

    def perform_opaque(self, described: dict[str, Any], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Perform a call that is not followed: what it returns or writes into its arguments is an input of the rest."""
        given = list(_tensors((args, kwargs)))
        versions = self.versions_of(given)
        result = func(*args, **kwargs)
        written = [
            item for item, version in zip(given, versions, strict=True) if torch_private.version(item) != version
        ]
        return self.adopt_opaque(described, given, result, written)

    def versions_of(self, given: Sequence[torch.Tensor]) -> list[int]:
        """The version counters of tensors, which the program knows as they are now."""
        for item in given:
            self.value(item)
        return [torch_private.version(item) for item in given]

    def adopt_opaque(
        self,
        described: dict[str, Any],
        given: Sequence[torch.Tensor],
        result: Any,
        written: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Make the ``result`` of a call that was not followed an input, and record who made it if that may matter."""
        for item in written:
            self._record_write(item, self.make_call("torch.Tensor.copy_"))
        made = [item for item in _tensors(result) if id(item) not in self._values]
        if given and any(item.requires_grad or is_bad(item) for item in made):
            self.record_opaque({"source": "", **described}, described["name"], given, made)
        return self.make_outcome(result, "batch")

    def record_opaque(
        self, described: dict[str, Any], name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        """Make tensors inputs, and record the call that has made them."""
        args = tuple(Ref(self.value(item)) for item in given)
        self.make_outcome(made, "opaque", f"{name}_output")
        outputs = tuple(Ref(self.value(item)) for item in made)
        self.calls.append(replace(self.make_call(OPAQUE, (), described), args=args, outputs=outputs))

    def encode(self, value: Any) -> Any:
        """Arguments as a program holds them; raises `CannotRecord`."""

        def plain(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return Ref(self.value(leaf))
            if leaf is None or leaf is Ellipsis or type(leaf) in (bool, int, float, complex, str):
                return leaf
            if isinstance(leaf, (torch.dtype, torch.layout, torch.memory_format)):
                return Symbol(str(leaf))
            if isinstance(leaf, torch.device):
                return Device(str(leaf))
            if isinstance(leaf, type) and leaf in _DTYPES:
                return Symbol(_DTYPES[leaf])
            # NumPy scalars, enums and number-like objects as plain numbers and texts
            if isinstance(leaf, str):
                return str.__str__(leaf)
            if isinstance(leaf, (int, float)):
                return int(leaf) if isinstance(leaf, int) else float(leaf)
            if type(leaf).__module__ == "numpy" and getattr(leaf, "ndim", 1) == 0:
                return leaf.item()
            raise CannotRecord(f"a program cannot hold a `{type(leaf).__name__}`")

        return map_leaves(value, plain)

    def value(self, tensor: torch.Tensor) -> int:
        """The value number of a tensor; one that is not known yet becomes an input."""
        known = self._values.get(id(tensor))
        if known is None and self.functions.depth:
            # The value that has the same memory, for a tensor that autograd had saved and gave back as another object
            with native.DisableTorchFunction():
                place = _place(tensor)
                alike = (other for other in reversed(self._alive) if place is not None and _place(other) == place)
                found = next(alike, None)
            known = self._values[id(found)] if found is not None else None
        return known if known is not None else self.adopt(tensor, self._describe(tensor) or InputName("input"))

    def tensor_of(self, value: int) -> torch.Tensor | None:
        """A tensor that stands for a value number."""
        return next((tensor for tensor in reversed(self._alive) if self._values[id(tensor)] == value), None)

    def alias(self, tensor: torch.Tensor, value: int) -> None:
        """Let a second tensor object stand for a value."""
        self._values[id(tensor)] = value
        self._alive.append(tensor)

    def adopt(self, tensor: torch.Tensor, origin: InputName) -> int:
        """Make a tensor an input, unless it is known already; its value number."""
        known = self._values.get(id(tensor))
        if known is not None:
            return known
        borrow = self.borrows and origin.role == "parameter" and tensor.layout is torch.strided
        content = native.detach(tensor) if borrow else copy_of(native.detach(tensor))
        value = self._new_input(content, origin, requires_grad=tensor.requires_grad and not native.is_inference(tensor))
        if native.is_inference(tensor):  # an input is none: autograd refuses to save one
            made = self.new_value()
            mode = Mode(grad=False, inference=True)
            self.calls.append(Call("torch.Tensor.clone", (Ref(value),), outputs=Ref(made), mode=mode))
            value = made
        self.alias(tensor, value)
        if borrow:
            self._borrowed.setdefault(native.untyped_storage(tensor).data_ptr(), []).append(value)
        return value

    def _new_input(self, content: torch.Tensor, origin: InputName, *, requires_grad: bool) -> int:
        value = self.new_value()
        self.tensors[value] = content
        self.inputs.append(Input(value, self._unique(origin.name), origin.role, requires_grad))
        return value

    def save_before_write(self, target: torch.Tensor) -> None:
        """Keep the value that a parameter had before the step writes into it."""
        if target.layout is torch.strided:
            self.value(target)  # what is not known yet becomes an input with the value that it has now
            written = self._borrowed.pop(native.untyped_storage(target).data_ptr(), ())
            self.tensors.update(copies_of({value: self.tensors[value] for value in written}))

    @property
    def borrowed(self) -> frozenset[int]:
        """The inputs that share memory with the tensors they were made from."""
        return frozenset(value for values in self._borrowed.values() for value in values)

    def _bind(self, result: Any) -> Any:
        """Value numbers for the tensors of a result, in its structure."""

        def number(leaf: Any) -> Ref | None:
            if not isinstance(leaf, torch.Tensor):
                return None
            if id(leaf) not in self._values:
                self.alias(leaf, self.new_value())
            return Ref(self._values[id(leaf)])

        return map_leaves(result, number)

    def new_value(self) -> int:
        """A value number that nothing has yet."""
        self._count += 1
        return self._count

    def _unique(self, name: str) -> str:
        number = self._names.get(name, 0)
        self._names[name] = number + 1
        return name if number == 0 else f"{name}_{number}"

    def enter_module(self, module: torch.nn.Module) -> None:
        """A module was entered."""
        if not self._scopes:
            self._paths = {id(part): user_path(path) for path, part in members.named_modules(module)}
            self._root = self._root_names.get(id(module), "")
        count = self._counts.get(id(module), 0)
        self._counts[id(module)] = count + 1
        path = self._paths.get(id(module), type(module).__name__)
        self._scopes.append(Scope(path, type(module).__name__, count, self._root))
        label = self._scopes[-1].label
        if label not in self.modules:
            self.modules[label] = note_of(module)

    def exit_module(self) -> None:
        """The innermost module was left."""
        if self._scopes:
            self._scopes.pop()

    def _site(self) -> Site | None:
        frame, library = find_frames(sys._getframe(2), self._driver)
        if frame is not None:
            return make_site(frame.f_code, frame.f_lasti, library)
        outer = self.outer_site
        return replace(outer, library=library or outer.library) if outer is not None else None


@contextlib.contextmanager
def recording(tracer: Tracer) -> Iterator[Tracer]:
    """Record all that happens inside, with module scopes, custom functions and transforms, without checkpointing."""
    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(lambda module, args: tracer.enter_module(module)),
        hooks.register_module_forward_hook(lambda module, args, output: tracer.exit_module(), always_call=True),
    ]
    try:
        with tracer.functions.watching(), tracer.transforms.watching(), _no_checkpointing(), tracer:
            yield tracer
    finally:
        for handle in handles:
            handle.remove()


def _no_checkpointing() -> contextlib.AbstractContextManager[None]:
    """Let activation checkpointing run its function once, plainly: the values are the same and the calls are seen."""

    class Plain:
        @staticmethod
        def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            del preserve_rng_state
            return function(*args)

    def generator(*_: Any, **__: Any) -> Iterator[None]:
        yield

    module = torch.utils.checkpoint
    return functions.replacing(
        [(module, "CheckpointFunction", Plain), (module, torch_private.CHECKPOINT_FRAMES, generator)]
    )


def current_mode() -> Mode:
    """The thread's torch settings of now."""
    if not torch_private.is_any_autocast_enabled():
        return _PLAIN_MODES[native.is_grad_enabled(), native.is_inference_mode_enabled()]
    enabled = filter(torch.is_autocast_enabled, _DEVICES)
    autocast = tuple((name, str(native.get_autocast_dtype(name))) for name in enabled)
    return Mode(native.is_grad_enabled(), autocast, native.is_inference_mode_enabled())


_DEVICES = ("cpu", "cuda", "mps", "xpu")
_PLAIN_MODES = {(grad, inference): Mode(grad, (), inference) for grad in (False, True) for inference in (False, True)}


def _rng_state(args: tuple[Any, ...]) -> torch.Tensor:
    tensor = next((item for item in _tensors(args)), None)
    if tensor is not None and tensor.is_cuda:
        return native.cuda_get_rng_state(tensor.device)
    return native.get_rng_state()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return iter_leaves(value, torch.Tensor)


def _place(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Storage, offset and strides of the tensor; ``None`` if it has no readable storage."""
    if tensor.layout is not torch.strided or native.numel(tensor) == 0:
        return None
    return native.data_ptr(tensor), tuple(tensor.shape), native.stride(tensor), tensor.dtype
