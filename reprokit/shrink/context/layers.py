"""Torch's own layers: the constructor call that gives the layer whose forward made some recorded calls.

The layer is built, given its parameters and run, and must return what was recorded, bit for bit. Sizes are read from
the weights and the calls, since the arguments noted at capture may have shrunk; the rest is as noted.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reprokit.program.dataflow import same_bits
from reprokit.program.functions import layer_class, symbol_named
from reprokit.program.interpreter import Modes
from reprokit.program.ir import Call, Input, ModuleNote, Ref, Scope, iter_refs

Arguments = dict[str, Any]
State = Mapping[str, torch.Tensor]
Shapes = Callable[[int], Sequence[int]]
RECURRENT = ("RNN", "GRU", "LSTM")
_REQUIRED = inspect.Parameter.empty
_RECURRENT_DEFAULTS: Arguments = {
    "input_size": _REQUIRED, "hidden_size": _REQUIRED, "num_layers": 1, "bias": True, "dropout": 0.0,
    "bidirectional": False, "batch_first": False, "nonlinearity": "tanh", "proj_size": 0,
}  # fmt: skip
_COMPOSITE = ("Sequential", "ModuleList", "ModuleDict", "Transformer", "ParametrizationList")
_SUFFIXES = {torch.float16: ".half()", torch.bfloat16: ".bfloat16()", torch.float64: ".double()"}
Values = Mapping[int, torch.Tensor]
_MOST_OF_ITS_OWN = 2**20  # elements that a layer may have beyond those that the calls read


def constructor(cls: str, noted: Arguments, calls: Sequence[Call], state: State, shapes: Shapes) -> Arguments:
    """All constructor arguments by name, sizes as they are now.

    ``noted`` are those at capture, ``state`` the parameters and buffers by name, ``shapes`` returns the shapes of what
    the calls made. Raises `ValueError` or `LookupError` for calls that are not, or no longer all, those of the layer.
    """
    arguments = dict(noted)
    find = _SIZES.get(cls.rstrip("123d")) or _SIZES.get(cls)
    if find is not None:
        arguments.update(find(calls, state))
    elif cls == "MultiheadAttention":
        arguments.update(_attention(calls, state, shapes))
    for name in ("device", "dtype", "kdim", "vdim"):
        arguments.pop(name, None)
    return arguments


def _linear(calls: Sequence[Call], state: State) -> Arguments:
    rows, columns = state["weight"].shape
    return {"in_features": columns, "out_features": rows, "bias": "bias" in state}


def _conv(calls: Sequence[Call], state: State) -> Arguments:
    call, *_ = (call for call in calls if call.name.startswith("conv"))
    channels, per_group, *kernel = state["weight"].shape
    stride, padding, dilation, groups = call.args[3:7]
    found = {"stride": stride, "dilation": dilation, "groups": groups, "kernel_size": tuple(kernel)}
    sizes = {"in_channels": per_group * groups, "out_channels": channels, "bias": "bias" in state}
    return {**found, **sizes, **({"padding": padding} if len(calls) == 1 else {})}


def _transposed(calls: Sequence[Call], state: State) -> Arguments:
    stride, padding, output_padding, groups, dilation = calls[-1].args[3:8]
    channels, per_group, *kernel = state["weight"].shape
    found = {"stride": stride, "padding": padding, "output_padding": output_padding, "groups": groups}
    sizes = {"in_channels": channels, "out_channels": per_group * groups, "kernel_size": tuple(kernel)}
    return {**found, **sizes, "dilation": dilation, "bias": "bias" in state}


def _embedding(calls: Sequence[Call], state: State) -> Arguments:
    rows, columns = state["weight"].shape
    return {"num_embeddings": rows, "embedding_dim": columns}


def _bilinear(calls: Sequence[Call], state: State) -> Arguments:
    rows, first, second = state["weight"].shape
    return {"in1_features": first, "in2_features": second, "out_features": rows, "bias": "bias" in state}


def _shape_norm(calls: Sequence[Call], state: State) -> Arguments:
    shape = tuple(calls[-1].args[1])
    is_affine = {"elementwise_affine": "weight" in state}
    is_layer_norm = calls[-1].name == "layer_norm"
    return {"normalized_shape": shape, **is_affine, **({"bias": "bias" in state} if is_layer_norm else {})}


def _batch_norm(calls: Sequence[Call], state: State) -> Arguments:
    sized, *_ = (state[name] for name in ("running_mean", "weight") if name in state)
    return {"num_features": len(sized), "affine": "weight" in state, "track_running_stats": "running_mean" in state}


def _group_norm(calls: Sequence[Call], state: State) -> Arguments:
    return {"num_groups": calls[-1].args[1], "num_channels": len(state["weight"])} if "weight" in state else {}


def _recurrent(calls: Sequence[Call], state: State) -> Arguments:
    call = calls[-1]
    place, *_ = (index for index in (2, 3) if isinstance(call.args[index], list))
    has_biases, num_layers, dropout, _, is_bidirectional = call.args[place + 1 : place + 6]
    first = state["weight_ih_l0"]
    found = {"input_size": first.shape[1], "hidden_size": state["weight_hh_l0"].shape[1], "num_layers": num_layers}
    found |= {"bias": has_biases, "dropout": dropout, "bidirectional": is_bidirectional}
    if call.name.startswith("rnn_"):
        found["nonlinearity"] = call.name.removeprefix("rnn_")
    return {**found, "batch_first": call.args[place + 6] if len(call.args) > place + 6 else False}


def _attention(calls: Sequence[Call], state: State, shapes: Shapes) -> Arguments:
    width = state["in_proj_weight"].shape[1]
    split, *_ = (call for call in calls if call.name == "view" and len(call.args) == 4)
    num_heads = width // shapes(split.output_refs()[0])[-1]
    return {"embed_dim": width, "num_heads": num_heads, "bias": "in_proj_bias" in state, "dropout": 0.0}


_SIZES: dict[str, Callable[[Sequence[Call], State], Arguments]] = {
    "Linear": _linear,
    "Conv": _conv,
    "ConvTranspose": _transposed,
    "Embedding": _embedding,
    "EmbeddingBag": _embedding,
    "Bilinear": _bilinear,
    "LayerNorm": _shape_norm,
    "RMSNorm": _shape_norm,
    "BatchNorm": _batch_norm,
    "InstanceNorm": _batch_norm,
    "GroupNorm": _group_norm,
    **dict.fromkeys(RECURRENT, _recurrent),
}


def split(cls: str, arguments: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """What a person would write: required arguments by place, others by name if they are not the default."""
    defaults = _defaults(cls)
    required = tuple(_short(arguments[name]) for name, default in defaults.items() if default is _REQUIRED)
    options = {
        name: _short(value)
        for name, value in arguments.items()
        if name not in defaults or not (defaults[name] is _REQUIRED or _is_same_option(value, defaults[name]))
    }
    if cls.startswith(("MaxPool", "AvgPool")) and options.get("stride") == required[0]:
        del options["stride"]
    return required, options


def _defaults(cls: str) -> Arguments:
    """The defaults of the constructor."""
    if cls in RECURRENT:
        return _RECURRENT_DEFAULTS
    made: Any = layer_class(cls)
    parameters = inspect.signature(made).parameters.values()
    return {p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _is_same_option(value: Any, default: Any) -> bool:
    short = _short(value)
    return type(short) is type(_short(default)) and bool(short == _short(default))


def _short(value: Any) -> Any:
    """A size that is the same in all dimensions as one number."""
    if isinstance(value, (list, tuple)) and value and all(item == value[0] for item in value):
        return value[0] if isinstance(value[0], int) else value
    return value


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
class LayerRun:
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
    run: LayerRun,
    inputs: Mapping[int, Input],
    note: ModuleNote | None,
) -> Layer | None:
    """The layer that does what was recorded of a run, or ``None`` if no layer does."""
    try:
        return next(_fitting(scope.cls, run, inputs, note or ModuleNote(scope.cls)), None)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError):  # the calls are not those of such a layer
        return None


def _fitting(cls: str, run: LayerRun, inputs: Mapping[int, Input], note: ModuleNote) -> Iterator[Layer]:
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


def _agrees(layer: Layer, run: LayerRun) -> bool:
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
