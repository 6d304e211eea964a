"""Programs as plain data: dicts, lists, strings and numbers that a restricted unpickler accepts.

``to_plain`` and ``from_plain`` are inverse to each other. ``from_plain`` is a closed grammar, because the file may come
from a stranger and a program is printed as source code: what calls name is on the allow-list, keywords are
identifiers, constants, devices, roles and phases are among those that exist. Everything else raises `ValueError`.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

from reprokit.grammar import count, integer, line, member_of, name, of, plain_of, read, shown, text
from reprokit.program.functions import allowed_names, symbol_named
from reprokit.program.ir import (
    AUTOGRAD_BACKWARD,
    BACKWARD,
    OPAQUE,
    PACK,
    ZERO_GRAD,
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
    Slice,
    Symbol,
)
from reprokit.words import visible

_SPECIAL = frozenset({BACKWARD, AUTOGRAD_BACKWARD, ZERO_GRAD, OPAQUE})
_SCALARS = (bool, int, float, str, type(None))
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_DEVICE_TYPE = re.compile(r"cpu|cuda|hpu|ipu|maia|meta|mps|mtia|privateuseone|vulkan|xla|xpu")
_DEVICE = re.compile(rf"(?:{_DEVICE_TYPE.pattern})(?::[0-9]{{1,4}})?")
_LARGEST_INT = 2**127  # what an argument of a torch function can hold, with room


def to_plain(program: Program) -> dict[str, Any]:
    """The program as nested dicts, lists and scalars."""
    return {
        "calls": [_call_to_plain(call) for call in program.calls],
        "inputs": [plain_of(item) for item in program.inputs],
        "outputs": [ref.value for ref in program.outputs],
        "modules": {
            path: [note.cls, note.training, argument_to_plain(note.arguments), note.file, note.line, note.source]
            for path, note in program.modules.items()
        },
    }


def from_plain(plain: Mapping[str, Any]) -> Program:
    """The program that ``to_plain`` described; raises `ValueError` on anything else."""
    try:
        program = Program(
            calls=tuple(_call_from_plain(item) for item in plain["calls"]),
            inputs=tuple(read(Input, item) for item in plain["inputs"]),
            outputs=tuple(Ref(integer(value)) for value in plain["outputs"]),
            modules={name(path): _note_from_plain(note) for path, note in plain["modules"].items()},
        )
        check(program)
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ValueError(f"malformed program: {error}") from error
    return program


def check(program: Program) -> None:
    """Raise `ValueError` unless every value is defined before it is read."""
    known = {item.value for item in program.inputs}
    if len(known) != len(program.inputs):
        raise ValueError("an input is defined twice")
    for number, call in enumerate(program.calls):
        unknown = [value for value in call.input_refs() if value not in known]
        if unknown:
            raise ValueError(f"call {number} reads value {unknown[0]} before it is defined")
        if call.target != OPAQUE:
            known.update(call.output_refs())
    lost = [ref.value for ref in program.outputs if ref.value not in known]
    if lost:
        raise ValueError(f"it returns value {lost[0]}, which is not defined")


def argument_to_plain(value: Any) -> Any:
    """One argument; raises `TypeError` for what a program cannot hold."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, list):
        return [argument_to_plain(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [argument_to_plain(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_scalar(key), argument_to_plain(item)] for key, item in value.items()]}
    if isinstance(value, Ref):
        return {"ref": value.value}
    if isinstance(value, Symbol):
        return {"symbol": value.name}
    if isinstance(value, Device):
        return {"device": value.name}
    if isinstance(value, Slice):
        return {"slice": [argument_to_plain(item) for item in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    raise TypeError(f"a program cannot hold `{type(value).__name__}`")


def argument_from_plain(plain: Any) -> Any:
    """The inverse of `argument_to_plain`."""
    if isinstance(plain, _SCALARS):
        return _scalar(plain)
    if isinstance(plain, list):
        return [argument_from_plain(item) for item in plain]
    if isinstance(plain, dict) and len(plain) == 1:
        (tag, content), *_ = plain.items()
        reader = _READERS.get(tag)
        if reader is not None:
            return reader(content)
    raise ValueError(f"unknown argument `{shown(plain)}`")


_READERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda content: tuple(argument_from_plain(item) for item in content),
    "dict": lambda content: {_scalar(key): argument_from_plain(item) for key, item in content},
    "ref": lambda content: Ref(integer(content)),
    "symbol": lambda content: Symbol(_symbol(content)),
    "device": lambda content: Device(_matching(_DEVICE, content, "device")),
    "slice": lambda content: Slice(*(argument_from_plain(item) for item in content)),
    "ellipsis": lambda content: Ellipsis,
    "complex": lambda content: complex(*(of(float)(part) for part in content)),
}


def _call_to_plain(call: Call) -> dict[str, Any]:
    mode = call.mode
    return {
        "target": call.target,
        "args": argument_to_plain(call.args),
        "kwargs": argument_to_plain(dict(call.kwargs)),
        "outputs": argument_to_plain(call.outputs),
        "scope": [[level.path, level.cls, level.count, *([level.root] if level.root else [])] for level in call.scope],
        "site": plain_of(call.site),
        "mode": [mode.grad, [list(pair) for pair in mode.autocast], mode.inference, argument_to_plain(mode.rng)],
        "phase": str(call.phase),
    }


def _call_from_plain(plain: Mapping[str, Any]) -> Call:
    grad, autocast, inference, rng = plain["mode"]
    call = Call(
        target=_target(plain["target"]),
        args=of(tuple)(argument_from_plain(plain["args"])),
        kwargs=_keywords(argument_from_plain(plain["kwargs"]), is_text=plain["target"] == OPAQUE),
        outputs=_outputs(argument_from_plain(plain["outputs"]), is_opaque=plain["target"] == OPAQUE),
        scope=tuple(read(Scope, level) for level in plain["scope"]),
        site=read(Site, plain["site"]) if plain["site"] is not None else None,
        mode=Mode(
            of(bool)(grad),
            tuple((_matching(_DEVICE_TYPE, device, "device"), _symbol(dtype)) for device, dtype in autocast),
            of(bool)(inference),
            of(Ref)(argument_from_plain(rng)) if rng is not None else None,
        ),
        phase=member_of(Phase)(plain["phase"]),
    )
    if call.is_optimizer_step:
        _require_step(call)
    elif call.target == ZERO_GRAD:
        (given,) = call.args
        if call.kwargs or not isinstance(given, list) or not all(isinstance(item, Ref) for item in given):
            raise ValueError("`zero_grad` takes a list of tensors")
    elif call.target == PACK and call.outputs is not None:  # a call that raised has no result
        parts = call.outputs if isinstance(call.outputs, (list, tuple)) else ()
        if len(parts) != 2 or not all(isinstance(item, Ref) for item in parts):
            raise ValueError("the result of packing a sequence is its data and its sizes")
    elif call.target == OPAQUE:
        kinds = {"name": str, "source": str, "is_compiled": bool, "is_transform": bool, "is_scripted": bool}
        is_described = all(isinstance(item, kinds.get(name, ())) for name, item in call.kwargs.items())
        if not is_described or not all(isinstance(item, Ref) for item in call.args):
            raise ValueError("an opaque call has a name and a source")
        if not {"name", "source"} <= call.kwargs.keys():
            raise ValueError("an opaque call has no name or no source")
    return call


def _target(value: Any) -> str:
    target = text(value)
    if target not in allowed_names() and target not in _SPECIAL:
        raise ValueError(f"`{shown(target)}` is not a torch function that a program may call")
    return target


def _require_step(call: Call) -> None:
    """The parameters, gradients, options and state of an optimizer's groups, all of one length."""
    groups = list(zip(*(of(list)(call.kwargs[group]) for group in _GROUPS), strict=True))
    if call.args or len(call.kwargs) != len(_GROUPS):
        raise ValueError("an optimizer's step has other arguments than its groups")
    for params, grads, options, state in groups:
        for param, grad, values in zip(*map(of(list), (params, grads, state)), strict=True):
            of(Ref)(param)
            of(Ref, NoneType)(grad)
            of(dict)(values)
        _keywords(options)


_GROUPS = ("params", "grads", "options", "state")


def _outputs(value: Any, *, is_opaque: bool = False) -> Any:
    """The structure of a result: values, ``None``, and containers of them; no function of torch returns a dict."""
    if isinstance(value, (list, tuple)) or (is_opaque and isinstance(value, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _outputs(item, is_opaque=is_opaque)
    elif not isinstance(value, Ref) and value is not None:
        raise ValueError("the result of a call is no tensor")
    return value


def _keywords(value: Any, *, is_text: bool = False) -> dict[str, Any]:
    """Arguments by name, all of them names that Python accepts; those of an opaque call are for people to read."""
    given: dict[str, Any] = of(dict)(value)
    if is_text:
        given = {key: visible(item) if isinstance(item, str) else item for key, item in given.items()}
    for key in given:
        if not isinstance(key, str) or not _IDENTIFIER.fullmatch(key) or keyword.iskeyword(key):
            raise ValueError(f"`{shown(key)}` is not the name of an argument")
    return given


def _symbol(value: Any) -> str:
    symbol = text(value)
    symbol_named(symbol)
    return symbol


def _note_from_plain(plain: Any) -> ModuleNote:
    cls, training, arguments, file, number, source = plain
    given = _keywords(argument_from_plain(arguments))
    return ModuleNote(name(cls), of(bool)(training), given, line(file), count(number), text(source))


def _matching(pattern: re.Pattern[str], value: Any, noun: str) -> str:
    if not pattern.fullmatch(text(value)):
        raise ValueError(f"`{shown(value)}` is not a {noun}")
    return str(value)


def _scalar(key: Any) -> Any:
    if not isinstance(key, _SCALARS) or (isinstance(key, int) and abs(key) > _LARGEST_INT):
        raise ValueError("a constant is no text and no number")
    return visible(key) if isinstance(key, str) else key
