"""Programs as plain data: dicts, lists, strings and numbers that a restricted unpickler accepts.

``to_plain`` and ``from_plain`` are inverse to each other. ``from_plain`` checks everything it reads, because the
file may come from a stranger; what it cannot understand raises `ValueError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from reprokit.program.ir import Call, Device, Input, Mode, ModuleNote, Program, Ref, Scope, Site, Slice, Symbol

T = TypeVar("T")
_SCALARS = (bool, int, float, str, type(None))


def to_plain(program: Program) -> dict[str, Any]:
    """The program as nested dicts, lists and scalars."""
    return {
        "calls": [_call_to_plain(call) for call in program.calls],
        "inputs": [[i.value, i.name, i.role, i.requires_grad] for i in program.inputs],
        "outputs": [ref.value for ref in program.outputs],
        "modules": {path: _note_to_plain(note) for path, note in program.modules.items()},
    }


def from_plain(plain: Mapping[str, Any]) -> Program:
    """The program that ``to_plain`` described; raises `ValueError` on anything else."""
    try:
        program = Program(
            calls=tuple(_call_from_plain(item) for item in plain["calls"]),
            inputs=tuple(Input(_int(v), _str(n), _str(r), bool(g)) for v, n, r, g in plain["inputs"]),
            outputs=tuple(Ref(_int(value)) for value in plain["outputs"]),
            modules={_str(path): _note_from_plain(note) for path, note in plain["modules"].items()},
        )
        check(program)
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"malformed program: {error}") from error
    return program


def check(program: Program) -> None:
    """Raise `ValueError` unless every value is defined before it is read."""
    known = {item.value for item in program.inputs}
    if len(known) != len(program.inputs):
        raise ValueError("malformed program: an input is defined twice")
    for number, call in enumerate(program.calls):
        unknown = [value for value in call.input_refs() if value not in known]
        if unknown:
            raise ValueError(f"malformed program: call {number} reads value {unknown[0]} before it is defined")
        known.update(call.output_refs())


def require_types(kind: type, fields: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless each value fits the annotation of its field in a dataclass; what a container holds is
    not checked."""
    for name, hint in get_type_hints(kind).items():
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if name in fields and not isinstance(fields[name], tuple(get_origin(item) or item for item in kinds)):
            raise ValueError(f"`{name}` is a `{type(fields[name]).__name__}`")


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
        return plain
    if isinstance(plain, list):
        return [argument_from_plain(item) for item in plain]
    if isinstance(plain, dict) and len(plain) == 1:
        (tag, content), *_ = plain.items()
        reader = _READERS.get(tag)
        if reader is not None:
            return reader(content)
    raise ValueError(f"malformed program: unknown argument `{plain!r:.60}`")


_READERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda content: tuple(argument_from_plain(item) for item in content),
    "dict": lambda content: {_scalar(key): argument_from_plain(item) for key, item in content},
    "ref": lambda content: Ref(_int(content)),
    "symbol": lambda content: Symbol(_str(content)),
    "device": lambda content: Device(_str(content)),
    "slice": lambda content: Slice(*(argument_from_plain(item) for item in content)),
    "ellipsis": lambda content: Ellipsis,
    "complex": lambda content: complex(*content),
}


def _call_to_plain(call: Call) -> dict[str, Any]:
    mode = call.mode
    return {
        "target": call.target,
        "args": argument_to_plain(call.args),
        "kwargs": argument_to_plain(dict(call.kwargs)),
        "outputs": argument_to_plain(call.outputs),
        "scope": [_scope_to_plain(level) for level in call.scope],
        "site": _site_to_plain(call.site),
        "mode": [mode.grad, [list(pair) for pair in mode.autocast], mode.inference, argument_to_plain(mode.rng)],
        "phase": call.phase,
    }


def _call_from_plain(plain: Mapping[str, Any]) -> Call:
    grad, autocast, inference, rng = plain["mode"]
    return Call(
        target=_str(plain["target"]),
        args=_of(tuple, argument_from_plain(plain["args"])),
        kwargs=_of(dict, argument_from_plain(plain["kwargs"])),
        outputs=argument_from_plain(plain["outputs"]),
        scope=tuple(_scope_from_plain(*level) for level in plain["scope"]),
        site=_site_from_plain(plain["site"]),
        mode=Mode(
            bool(grad),
            tuple((_str(d), _str(t)) for d, t in autocast),
            bool(inference),
            _of(Ref, argument_from_plain(rng)) if rng is not None else None,
        ),
        phase=_str(plain["phase"]),
    )


def _scope_to_plain(level: Scope) -> list[Any]:
    return [level.path, level.cls, level.count, *([level.root] if level.root else [])]


def _scope_from_plain(path: Any, cls: Any, count: Any, root: Any = "") -> Scope:
    return Scope(_str(path), _str(cls), _int(count), _str(root))


def _site_to_plain(site: Site | None) -> Any:
    if site is None:
        return None
    return [site.file, site.line, site.code, site.function, list(site.library) if site.library else None]


def _site_from_plain(plain: Any) -> Site | None:
    if plain is None:
        return None
    file, line, code, function, library = plain
    return Site(
        _str(file), _int(line), _str(code), _str(function), (_str(library[0]), _int(library[1])) if library else None
    )


def _note_to_plain(note: ModuleNote) -> list[Any]:
    return [note.cls, note.training, argument_to_plain(note.arguments), note.file, note.line, note.source]


def _note_from_plain(plain: Any) -> ModuleNote:
    cls, training, arguments, file, line, source = plain
    given = _of(dict, argument_from_plain(arguments))
    return ModuleNote(_str(cls), bool(training), given, _str(file), _int(line), _str(source))


def _int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"malformed program: `{value!r:.60}` is not a number")
    return value


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"malformed program: `{value!r:.60}` is not text")
    return value


def _scalar(key: Any) -> Any:
    if not isinstance(key, _SCALARS):
        raise ValueError(f"malformed program: `{key!r:.60}` is no key")
    return key


def _of(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"malformed program: `{value!r:.60}` is not a {kind.__name__}")
    return value
