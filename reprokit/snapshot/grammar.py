"""What the fields of a file may hold: a closed grammar of numbers, words and texts, as strangers may write them.

A *kind* is a function that returns the value it was given, texts made `visible`, or raises `ValueError`. Programs have
a grammar of their own (`reprokit.program.plain`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from reprokit.program.plain import PHASES
from reprokit.visible import visible, visible_line, visible_name

Kind = Callable[[Any], Any]


def conform(fields: Mapping[str, Any], kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """The fields, each of its kind; raises `ValueError` for one that is not, is missing or is unknown."""
    unknown = [name for name in fields if name not in kinds]
    if unknown:
        raise ValueError(f"it has an unknown field `{_shown(unknown[0])}`")
    lacking = [name for name in kinds if name not in fields]
    if lacking:
        raise ValueError(f"`{lacking[0]}` is missing")
    return {name: _conform(name, kind, fields[name]) for name, kind in kinds.items()}


def _shown(value: Any) -> str:
    return f"{visible_name(value):.60}" if type(value) is str else type(value).__name__


def _conform(name: str, kind: Kind, value: Any) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        raise ValueError(f"`{name}`: {error}") from error


def _of(*types: type) -> Kind:
    def check(value: Any) -> Any:
        if type(value) not in types:
            raise ValueError(f"it is a `{type(value).__name__}`, not a `{types[0].__name__}`")
        return value

    return check


boolean = _of(bool)
nothing = _of(type(None))
_any_text = _of(str)
_list = _of(list, tuple)
_dict = _of(dict)


def number(value: Any) -> float:
    """A number that a float can hold, or none that it can: nan and inf."""
    found: float = _of(float, int)(value)
    return found if type(found) is float else integer(found)


def integer(value: Any) -> int:
    """A count, a place or a version."""
    found: int = _of(int)(value)
    if abs(found) > 2**63:
        raise ValueError("the number is too large")
    return found


def count(value: Any) -> int:
    """A whole number from 0 up."""
    if integer(value) < 0:
        raise ValueError(f"it is {value}")
    return int(value)


def positive(value: Any) -> int:
    """A whole number from 1 up to a million."""
    if not 1 <= integer(value) <= 10**6:
        raise ValueError(f"it is {value}")
    return int(value)


def text(value: Any) -> str:
    """Several lines."""
    return visible(_any_text(value))


def line(value: Any) -> str:
    """One line."""
    return visible_line(_any_text(value))


def name(value: Any) -> str:
    """One line that may stand in inline code."""
    return visible_name(_any_text(value))


def link(value: Any) -> str:
    """The address of a page."""
    if not re.fullmatch(r"https://[a-z0-9.-]+/[\w./#=-]*", found := line(value), re.ASCII):
        raise ValueError("it is no address of a page")
    return found


def tensor(value: Any) -> torch.Tensor:
    """A tensor of numbers on the CPU, without hooks of its own."""
    if type(value) is not torch.Tensor or not value.is_cpu or value.requires_grad:
        raise ValueError("it is not a plain tensor")
    return value.detach()


def one_of(*words: str | None) -> Kind:
    """One of these words."""

    def check(value: Any) -> Any:
        if not isinstance(value, (str, type(None))) or value not in words:
            raise ValueError(f"`{_shown(value)}` is none of {', '.join(map(str, words))}")
        return value

    return check


def optional(kind: Kind) -> Kind:
    """A kind or ``None``."""
    return lambda value: None if value is None else kind(value)


def either(first: Kind, second: Kind) -> Kind:
    """One of two kinds."""

    def check(value: Any) -> Any:
        try:
            return first(value)
        except ValueError:
            return second(value)

    return check


def list_of(kind: Kind) -> Kind:
    """A list of one kind."""
    return lambda value: [kind(item) for item in _list(value)]


def tuple_of(*kinds: Kind) -> Kind:
    """One value of each kind, as a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if len(_list(value)) != len(kinds):
            raise ValueError(f"it has {len(value)} parts instead of {len(kinds)}")
        return tuple(kind(item) for kind, item in zip(kinds, value, strict=True))

    return check


def map_of(key: Kind, value: Kind) -> Kind:
    """A dict with keys of one kind and values of another."""
    return lambda given: {key(name): value(item) for name, item in _dict(given).items()}


def record(required: Mapping[str, Kind] | None = None, **more: Kind) -> Kind:
    """A dict with these ``required`` keys, and with ``more`` that may be absent."""
    needed = required or {}

    def check(value: Any) -> dict[str, Any]:
        given = _dict(value)
        kinds = {**needed, **{key: kind for key, kind in more.items() if key in given}}
        return conform(given, kinds)

    return check


scalar = either(either(number, boolean), optional(line))
site = optional(tuple_of(line, count, line, name, optional(tuple_of(line, count))))

ENVIRONMENT = record(
    python=line, torch=line, platform=line, machine=line, libraries=map_of(name, line), cuda=optional(line),
    cudnn=optional(integer), devices=list_of(line), switches=map_of(name, scalar), variables=map_of(name, line),
    collect_env=text,
)  # fmt: skip
SOURCE = record(
    command=list_of(line), commit=optional(line), branch=optional(line), remote=optional(line), dirty=optional(boolean),
    file=optional(line), diff=text, diff_truncated=boolean,
)  # fmt: skip
SETTINGS = record(
    num_threads=positive, deterministic_algorithms=boolean, matmul_precision=one_of("highest", "high", "medium", None),
    watch=one_of("every-step", "sampled", "deferred"), history_steps=count, history_bytes=count, rank=count,
    world_size=count, noted_every=count, is_noted=boolean,
)  # fmt: skip
_PYTHON = record(version=integer, words=list_of(count), gauss=optional(number))
_NUMPY = record(algorithm=name, words=list_of(count), position=count, has_gauss=count, gauss=number)
RNG = record(python=_PYTHON, numpy=_NUMPY, torch=tensor, cuda=list_of(tensor), xpu=list_of(tensor), mps=list_of(tensor))
ROW = record(
    step=count, loss=optional(number), lr=optional(number), grad_norm=optional(number), scale=optional(number),
    seconds=optional(number), optimizer=name,
)  # fmt: skip
_FAILURE = {
    "phase": one_of(*PHASES),
    "kind": one_of("nan", "inf", "exception", "mismatch", "function"),
    "way": line,
    "call": optional(name),
    "call_index": optional(count),
    "backward_node": optional(name),
    "module": optional(name),
    "site": site,
    "value": optional(integer),
    "element": optional(list_of(count)),
    "num_bad": count,
    "num_elements": count,
    "input_name": optional(name),
    "exception": optional(tuple_of(name, text)),
}
_DROP = optional(tuple_of(count, name, integer, boolean))
_SPECTRUM = one_of("", "zero", "repeated")
_CAUSE = record(_FAILURE, drop=_DROP, is_overflow=boolean, spectrum=_SPECTRUM, cause=nothing)
FAILURE = record(_FAILURE, drop=_DROP, is_overflow=boolean, spectrum=_SPECTRUM, cause=optional(_CAUSE))
SNAPSHOT: Mapping[str, Kind] = {
    "failure": FAILURE,
    "step": count,
    "micro_step": count,
    "observed_at": one_of("loss", "gradient", "parameter", "output", "exception", ""),
    "fidelity": one_of("exact", "close", "unfaithful"),
    "fidelity_note": optional(text),
    "environment": ENVIRONMENT,
    "source": SOURCE,
    "settings": SETTINGS,
    "rng": RNG,
    "timeline": list_of(ROW),
    "command": list_of(line),
}

CONTEXT: Mapping[str, Kind] = {
    "failure": FAILURE,
    "drawn": list_of(integer),
    "is_ordinary": boolean,
    "checks": count,
    "seconds": number,
}
_NUMBER = either(number, boolean)
_PART_KINDS: Mapping[str, Kind] = {
    "input": name,
    "element": list_of(count),
    "call": name,
    "argument": name,
    "value": _NUMBER,
    "free": boolean,
    "tried": boolean,
    "from": _NUMBER,
    "to": _NUMBER,
}
_PART = record({}, **_PART_KINDS)
_FIX = record(
    id=name, text=list_of(text), code=text, where=list_of(line), helped=boolean, outcome=text,
    is_plausible=optional(boolean),
)  # fmt: skip
_DIAGNOSIS = record(
    id=name, title=line, mechanism=text, evidence=list_of(text),
    confidence=one_of("certain", "likely", "possible", "none"), advice=text, links=list_of(link),
    also=list_of(record(id=name, title=line, evidence=list_of(text))), fix=optional(_FIX), tried=list_of(_FIX),
    note=optional(text),
)  # fmt: skip
_ANSWER = {"variant": name, "name": line, "answer": one_of("same", "other", "passes", "cannot_run"), "detail": line}
_TABLE = record(
    budget=number, seconds=number,
    tables=map_of(one_of("minimum", "context", "snapshot"), list_of(record(_ANSWER, seconds=optional(number)))),
)  # fmt: skip
_PASS = record({"name": name}, checks=count, successes=count, calls=integer, elements=integer, seconds=number)
REDUCTION: Mapping[str, Kind] = {
    "failure": FAILURE,
    "before": record({"calls": count, "elements": count}),
    "signature": record(
        phase=one_of(*PHASES), kind=name, call=optional(name), backward_node=name, input=name, drop=name,
        exception=name, check=line,
    ),
    "checks": count,
    "verdicts": map_of(name, count),
    "seconds": number,
    "reproduces": line,
    "explain": list_of(_PART),
    "one_minimal": boolean,
    "log": list_of(line),
    "passes": list_of(_PASS),
    "constants": list_of(_PART),
    "nearest": optional(_PART),
    "explain_checks": count,
    "stopped": optional(line),
    "untried": list_of(line),
    "notes": list_of(text),
    "origin": record(check=line, file=line, snapshot=name, torch=line),
    "known": map_of(name, one_of("same", "other", "passes", "invalid")),
    "level": one_of("op", "module", "step"),
    "whatif": either(record(), _TABLE),
    "diagnosis": optional(_DIAGNOSIS),
}
