"""Torch's own layers: the constructor call that gives the layer whose forward made some recorded calls.

Nothing is believed: the layer is built, given its parameters and run, and must return what was recorded, bit for bit.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reprokit.program.functions import layer_class, symbol_named
from reprokit.program.ir import Call, Input, ModuleNote, Ref, Scope, iter_refs
from reprokit.program.memory import same_bits
from reprokit.program.run import Modes
from reprokit.shrink.context.constructors import RECURRENT, constructor, split

_COMPOSITE = ("Sequential", "ModuleList", "ModuleDict", "Transformer", "ParametrizationList")
_SUFFIXES = {torch.float16: ".half()", torch.bfloat16: ".bfloat16()", torch.float64: ".double()"}

Values = Mapping[int, torch.Tensor]
_MOST_OF_ITS_OWN = 2**20  # elements that a layer may have beyond those that the calls read


@dataclass(frozen=True, slots=True)
class Layer:
    """One of torch's layers with its constructor arguments, and how it was called.

    ``state`` maps the names of parameters and buffers to values. ``positional`` and ``keywords`` are the values given
    to its forward, ``outputs`` mirrors what it returned. ``suffix`` converts it, as in ``nn.Linear(4, 4).half()``.
    """

    cls: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    state: Mapping[str, int]
    positional: tuple[int, ...]
    keywords: Mapping[str, Any]
    outputs: Any
    suffix: str = ""
    training: bool = True

    def build(self) -> torch.nn.Module:
        """The layer with its initial parameters."""
        arguments, options = _real(self.arguments), _real(dict(self.options))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer: torch.nn.Module = _class_of(self.cls)(*arguments, **options)
        if self.suffix:
            layer = getattr(layer, self.suffix[1:-2])()
        return layer.train(self.training)


@dataclass(frozen=True, slots=True)
class Run:
    """What was recorded of one run of a layer.

    ``outputs`` are the values that somebody needs of it; ``before`` and ``after`` are what values were when they were
    first read, and what the calls left. ``error`` is the exception of the last call.
    """

    calls: Sequence[Call]
    outputs: Sequence[int]
    before: Values
    after: Values
    error: Exception | None = None


def is_layer(scope: Scope, modules: Mapping[str, ModuleNote]) -> bool:
    """True if a module is one of torch's layers that do something themselves."""
    note = modules.get(scope.label)
    is_users = note is not None and bool(note.file) and note.cls.rpartition(".")[2] == scope.cls
    return layer_class(scope.cls) is not None and not is_users and not scope.cls.startswith(_COMPOSITE)


def _class_of(name: str) -> Any:
    found = layer_class(name)
    if found is None:
        raise ValueError(f"torch has no layer `{name}`")
    return found


def layer_of(
    scope: Scope,
    run: Run,
    inputs: Mapping[int, Input],
    note: ModuleNote | None,
) -> Layer | None:
    """The layer that does what was recorded of a run, or ``None`` if no layer does."""
    try:
        return next(_fitting(scope.cls, run, inputs, note or ModuleNote(scope.cls)), None)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError):  # the calls are not those of such a layer
        return None


def _fitting(cls: str, run: Run, inputs: Mapping[int, Input], note: ModuleNote) -> Iterator[Layer]:
    calls, values = run.calls, run.before
    state = _state(cls, calls, inputs, note)
    made = {value for call in calls for value in call.output_refs()}
    read = dict.fromkeys(v for call in calls for v in call.input_refs() if v not in state.values())
    states = {call.mode.rng.value for call in calls if call.mode.rng is not None}
    given = [v for v in read if v not in states and (v not in made or _is_written_before(v, calls))]
    named = {name: values[value] for name, value in state.items()}
    arguments = constructor(cls, dict(note.arguments), calls, named, lambda value: run.after[value].shape)
    dtypes = {values[v].dtype for v in state.values() if values[v].is_floating_point()}
    suffix = _SUFFIXES.get(next(iter(dtypes)), "") if len(dtypes) == 1 else ""
    for positional, keywords in _ways_to_call(cls, given):
        for shape in _output_shapes(cls, run.outputs) if run.error is None else [None]:
            required, options = split(cls, arguments)
            layer = Layer(cls, required, options, state, positional, keywords, shape, suffix, note.training)
            if _agrees(layer, run):
                yield layer


def _is_written_before(value: int, calls: Sequence[Call]) -> bool:
    """True if a value that the calls return was there before (they work in place)."""
    first = next(call for call in calls if value in (*call.input_refs(), *call.output_refs()))
    return value in first.input_refs()


def _state(cls: str, calls: Sequence[Call], inputs: Mapping[int, Input], note: ModuleNote) -> dict[str, int]:
    """Parameters and buffers by the names that the layer has for them."""
    known: dict[str, int] = {}
    names = _state_names(cls)
    for call in calls:
        for value in call.input_refs():
            item = inputs.get(value)
            if item is not None and item.role in ("parameter", "buffer") and value not in known.values():
                known[_state_name(item.name, names)] = value
    return known


def _state_names(cls: str) -> frozenset[str]:
    if cls in RECURRENT:
        return frozenset()
    return frozenset(("weight", "bias", "running_mean", "running_var", "num_batches_tracked", "in_proj_weight",
                      "in_proj_bias"))  # fmt: skip


def _state_name(name: str, known: frozenset[str]) -> str:
    """A state-dict name inside the layer; a number at its end may only tell two roots apart."""
    last = name.rpartition(".")[2]
    if ".out_proj." in f".{name}":
        return f"out_proj.{last}"
    bare = last.rpartition("_")[0]
    return bare if last not in known and bare in known else last


def _ways_to_call(cls: str, given: Sequence[int]) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
    """How the values that the layer was given may have been its arguments."""
    if cls != "MultiheadAttention":
        yield tuple(given), {}
        return
    for places in itertools.product(given, repeat=3) if len(given) <= 3 else ():
        rest = [value for value in given if value not in places]
        for names in itertools.permutations(("key_padding_mask", "attn_mask"), len(rest)):
            yield places, dict(zip(names, rest, strict=True))


def _output_shapes(cls: str, outputs: Sequence[int]) -> Iterator[Any]:
    """How the values that the layer made may lie in what it returned; ``None`` for a part that nobody needs."""
    refs = [Ref(value) for value in outputs]
    if cls in ("RNN", "GRU"):
        yield from ((refs[0], None), (None, refs[0])) if len(refs) == 1 else [tuple(refs)]
    elif cls == "LSTM":
        for places in itertools.combinations(range(3), len(refs)):
            parts: list[Any] = [None] * 3
            for place, ref in zip(places, refs, strict=True):
                parts[place] = ref
            yield parts[0], (None if len(refs) == 1 and parts[0] else (parts[1], parts[2]))
    elif cls == "MultiheadAttention":
        yield from ((refs[0], None), (None, refs[0])) if len(refs) == 1 else [tuple(refs), tuple(reversed(refs))]
    elif len(refs) == 1:
        yield refs[0]
    elif refs:
        yield tuple(refs)


def _agrees(layer: Layer, run: Run) -> bool:
    """True if the layer really returns, or raises, what was recorded."""
    values = run.before
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in layer.build().parameters())
        if size > _MOST_OF_ITS_OWN + sum(values[value].numel() for value in layer.state.values()):
            return False
        module = layer.build()
        given = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        if not layer.state.keys() <= given.keys():
            return False
        with torch.no_grad():
            for name, value in layer.state.items():
                if given[name].shape != values[value].shape or given[name].dtype != values[value].dtype:
                    return False
                given[name].copy_(values[value])
        arguments = [values[value].clone() for value in layer.positional]
        if layer.cls == "MultiheadAttention":  # tells the cases apart by identity
            arguments = [values[value] for value in layer.positional]
        with Modes() as modes:
            mode = run.calls[-1].mode
            modes.enter(mode, values[mode.rng.value] if mode.rng is not None else None)
            result = module(*arguments, **{name: values[value] for name, value in layer.keywords.items()})
    except Exception as error:  # a layer that does not fit may fail in as many ways as there are layers
        return type(error) is type(run.error) and str(error) == str(run.error)
    return run.error is None and _matches(layer.outputs, result, run.after)


def _matches(outputs: Any, result: Any, values: Values) -> bool:
    if outputs is None:
        return True
    if isinstance(outputs, Ref):
        return isinstance(result, torch.Tensor) and same_bits(result, values[outputs.value])
    if not isinstance(result, (tuple, list)) or len(result) != len(outputs):
        return False
    return all(_matches(part, item, values) for part, item in zip(outputs, result, strict=True))


def _real(value: Any) -> Any:
    """Arguments with torch's constants in place of their names."""
    if isinstance(value, Mapping):
        return {key: _real(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_real(item) for item in value)
    return symbol_named(value.name) if hasattr(value, "name") else value


def values_read(layer: Layer) -> tuple[int, ...]:
    """The values given to the layer's forward, without repeats."""
    return tuple(dict.fromkeys((*layer.positional, *layer.keywords.values())))


def values_made(layer: Layer) -> tuple[int, ...]:
    """The values that it returned and somebody needs."""
    return tuple(dict.fromkeys(ref.value for ref in iter_refs(layer.outputs)))
