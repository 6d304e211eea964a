"""Torch's own layers in a piece: the constructor call that gives the layer whose forward made some recorded calls.

The layer is built, given its parameters and run, and must return what was recorded, bit for bit. Arguments are those
noted at capture; the layers in `_SIZES` may have shrunk since, so their sizes are read from the weights. Others that do
not agree are shown as their calls.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reprokit.own_work import ignored_warnings
from reprokit.program.dataflow import same_bits
from reprokit.program.functions import layer_class, symbol_named
from reprokit.program.interpreter import Modes
from reprokit.program.ir import Call, ModuleNote, Program, Ref, Scope
from reprokit.program.step import Step
from reprokit.shrink.recording import Recording, record

Arguments = dict[str, Any]
Scopes = tuple[Scope, ...]
SEED = 0  # of the script, before it makes its layers
_COMPOSITE = ("Sequential", "ModuleList", "ModuleDict", "Transformer", "ParametrizationList")
_SUFFIXES = {torch.float16: ".half()", torch.bfloat16: ".bfloat16()", torch.float64: ".double()"}
_MOST_OF_ITS_OWN = 2**20  # elements of parameters that the calls do not read
_REQUIRED = inspect.Parameter.empty
_RECURRENT: Arguments = {  # their signature names nothing
    "input_size": _REQUIRED, "hidden_size": _REQUIRED, "num_layers": 1, "bias": True, "dropout": 0.0,
    "bidirectional": False, "batch_first": False, "nonlinearity": "tanh", "proj_size": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layer:
    """One of torch's layers with its constructor arguments, and how it was called."""

    cls: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    state: Mapping[str, int]  # values by the names of parameters and buffers
    suffix: str = ""  # converts it, as in ``nn.Linear(4, 4).half()``
    training: bool = True
    positional: tuple[int, ...] = ()  # values given to its forward
    keywords: Mapping[str, int] = field(default_factory=dict)
    outputs: Any = None  # in the structure of what it returned

    @property
    def made(self) -> tuple[object, ...]:
        """What tells two layers apart, whatever they are called with."""
        return self.cls, self.arguments, dict(self.options), dict(self.state)

    def build(self) -> torch.nn.Module:
        """The layer with its initial parameters."""
        arguments, options = _real(self.arguments), _real(dict(self.options))
        with ignored_warnings():
            layer: torch.nn.Module = getattr(torch.nn, self.cls)(*arguments, **options)
        if self.suffix:
            layer = getattr(layer, self.suffix[1:-2])()
        return layer.train(self.training)


def is_layer(scope: Scope, modules: Mapping[str, ModuleNote]) -> bool:
    """True if a module is one of torch's layers that do something themselves."""
    note = modules.get(scope.label)
    is_users = note is not None and bool(note.file) and note.cls.rpartition(".")[2] == scope.cls
    return layer_class(scope.cls) is not None and not is_users and not scope.cls.startswith(_COMPOSITE)


def is_container(scope: Scope) -> bool:
    """True if a module only runs its children one after the other."""
    return scope.cls in ("Sequential", "ModuleList", "ModuleDict")


def layer_scope(call: Call, modules: Mapping[str, ModuleNote]) -> Scopes | None:
    """The scopes of a call up to the outermost one that is one of torch's layers."""
    depth = next((depth for depth, scope in enumerate(call.scope, 1) if is_layer(scope, modules)), None)
    return call.scope[:depth] if depth is not None else None


def layers_in(step: Step) -> dict[Scopes, Layer]:
    """The layers that a piece can be printed with, by the scopes of their runs, in the order in which they run.

    A layer that another run contradicts, or that shares a parameter with another one, is left out.
    """
    program = step.program
    runs: dict[Scopes, list[int]] = {}
    for index, call in enumerate(program.calls):
        if (scopes := layer_scope(call, program.modules)) is not None:
            runs.setdefault(scopes, []).append(index)
    recording = record(step, frozenset(itertools.chain(*runs.values())))
    found: dict[Scopes, Layer] = {}
    made_of: dict[object, object] = {}  # of a layer's path how it is made, of a parameter the path
    torn: set[str] = set()
    for scopes, indexes in runs.items():
        path, layer = scopes[-1].full_path, _layer_of(step, scopes[-1], indexes, recording)
        is_same = made_of.setdefault(path, layer and layer.made) == (layer and layer.made)
        owners = [made_of.setdefault(value, path) for value in layer.state.values()] if layer is not None else []
        if layer is None or not is_same or any(owner != path for owner in owners):
            torn.add(path)
        else:
            found[scopes] = layer
    return {scopes: layer for scopes, layer in found.items() if scopes[-1].full_path not in torn}


def initial(layers: Mapping[Scopes, Layer]) -> dict[int, torch.Tensor]:
    """The parameters and buffers of layers that are made one after the other under the seed."""
    first: dict[str, Layer] = {}
    for scopes, layer in layers.items():
        first.setdefault(scopes[-1].full_path, layer)
    found: dict[int, torch.Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        for layer in first.values():
            tensors = _tensors_of(layer.build())
            found.update({value: tensors[name].detach() for name, value in layer.state.items()})
    return found


@dataclass(frozen=True, slots=True)
class _Run:
    """What was recorded of one run of a layer."""

    calls: Sequence[Call]
    before: Mapping[int, torch.Tensor]  # what values were when first read
    given: Sequence[int]  # that the calls did not make
    needed: Mapping[int, torch.Tensor]  # what others read of their results
    error: Exception | None  # of the last call


def _recorded(program: Program, indexes: Sequence[int], recording: Recording) -> _Run:
    before: dict[int, torch.Tensor] = {}
    given: dict[int, None] = {}
    made: set[int] = set()
    calls = [program.calls[index] for index in indexes]
    for index, call in zip(indexes, calls, strict=True):
        for value in call.input_refs():
            before.setdefault(value, recording.inputs[index, value])
            if value not in made and (call.mode.rng is None or value != call.mode.rng.value):
                given[value] = None
        made.update(call.output_refs())
    inside = frozenset(indexes)
    others = (call for index, call in enumerate(program.calls) if index not in inside)
    read = {value for call in others for value in call.input_refs()} | {ref.value for ref in program.outputs}
    needed = [value for call in calls for value in call.output_refs() if value in read] or calls[-1].output_refs()
    results = {value: recording.outputs[value] for value in needed if value in recording.outputs}
    return _Run(calls, before, list(given), results, recording.error if recording.error_call == indexes[-1] else None)


def _layer_of(step: Step, scope: Scope, indexes: Sequence[int], recording: Recording) -> Layer | None:
    """The layer that does what was recorded of the calls ``indexes``, or ``None`` if no layer does."""
    program = step.program
    if recording.error_call is not None and recording.error_call < indexes[-1]:
        return None
    run = _recorded(program, indexes, recording)
    names = {item.value: item.name for item in program.inputs if item.role in ("parameter", "buffer")}
    state = {_name_inside(names[value]): value for value in run.given if value in names}
    tensors = {name: run.before[value] for name, value in state.items()}
    note = program.modules.get(scope.label)
    if note is None or note.cls.rpartition(".")[2] != scope.cls:  # two roots may have modules of one name
        note = ModuleNote(scope.cls)
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    suffix = _SUFFIXES.get(next(iter(dtypes)), "") if len(dtypes) == 1 else ""
    try:
        required, options = _written(scope.cls, _arguments(scope.cls, note, run.calls, tensors))
        layer = Layer(scope.cls, required, options, state, suffix, note.training)
        return _called(layer, run) if _has_room(layer, tensors) else None
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, RuntimeError):
        return None  # the calls are not those of such a layer, or the arguments are those of another version of torch


def _called(layer: Layer, run: _Run) -> Layer | None:
    """The layer with what it was called with, if it then returns, or raises, what was recorded."""
    given = [value for value in run.given if value not in layer.state.values()]
    for positional, keywords in _ways_to_call(layer.cls, given):
        found = replace(layer, positional=positional, keywords=keywords)
        try:
            result = _result(found, run.before, run.calls[-1])
        except Exception as raised:  # a layer that does not fit may fail in as many ways as there are layers
            if type(raised) is type(run.error) and str(raised) == str(run.error):
                return found
            continue
        left = dict(run.needed)
        outputs = _placed(result, left)
        if run.error is None and not left:
            return replace(found, outputs=outputs)
    return None


def _name_inside(name: str) -> str:
    """The name that a layer has for a parameter; a number at its end may only tell two roots apart."""
    last = name.rpartition(".")[2]
    bare = last.rpartition("_")[0]
    own = bare if bare in ("weight", "bias", "running_mean", "running_var") else last
    return f"out_proj.{own}" if ".out_proj." in f".{name}" else own


def _arguments(cls: str, note: ModuleNote, calls: Sequence[Call], state: Mapping[str, torch.Tensor]) -> Arguments:
    """All constructor arguments by name: as noted, with sizes as they are now."""
    found = {name: value for name, value in note.arguments.items() if name not in ("device", "dtype", "kdim", "vdim")}
    sizes = _SIZES.get(cls.rstrip("123d"))
    if sizes is not None:
        found |= sizes(calls, state)
    if cls == "MultiheadAttention" and all(call.mode.rng is None for call in calls):
        found["dropout"] = 0.0
    return found


def _conv(calls: Sequence[Call], state: Mapping[str, torch.Tensor]) -> Arguments:
    call, *_ = (call for call in calls if call.name.startswith("conv"))
    channels, per_group, *kernel = state["weight"].shape
    groups = call.args[6]
    found = {"in_channels": per_group * groups, "out_channels": channels, "groups": groups, "bias": "bias" in state}
    found |= {"kernel_size": tuple(kernel), "stride": call.args[3], "dilation": call.args[5]}
    return {**found, **({"padding": call.args[4]} if len(calls) == 1 else {})}


def _shape_norm(calls: Sequence[Call], state: Mapping[str, torch.Tensor]) -> Arguments:
    found = {"normalized_shape": tuple(calls[-1].args[1]), "elementwise_affine": "weight" in state}
    return {**found, **({"bias": "bias" in state} if calls[-1].name == "layer_norm" else {})}


def _embedding(calls: Sequence[Call], state: Mapping[str, torch.Tensor]) -> Arguments:
    return dict(zip(("num_embeddings", "embedding_dim"), state["weight"].shape, strict=True))


def _recurrent(calls: Sequence[Call], state: Mapping[str, torch.Tensor]) -> Arguments:
    """Nothing is noted of these: their constructors take anything."""
    call = calls[-1]
    weights, *_ = (place for place, value in enumerate(call.args) if isinstance(value, list))
    names = ("bias", "num_layers", "dropout", "", "bidirectional", "batch_first")  # the fourth is the mode
    found = {"input_size": state["weight_ih_l0"].shape[1], "hidden_size": state["weight_hh_l0"].shape[1]}
    found |= {name: value for name, value in zip(names, call.args[weights + 1 :], strict=False) if name}
    return found | ({"nonlinearity": call.name.removeprefix("rnn_")} if call.name.startswith("rnn_") else {})


_SIZES: dict[str, Callable[[Sequence[Call], Mapping[str, torch.Tensor]], Arguments]] = {
    "Linear": lambda calls, state: {
        "in_features": state["weight"].shape[1], "out_features": state["weight"].shape[0], "bias": "bias" in state,
    },
    "Conv": _conv,
    "Embedding": _embedding,
    "EmbeddingBag": _embedding,
    "LayerNorm": _shape_norm,
    "RMSNorm": _shape_norm,
    "BatchNorm": lambda calls, state: {
        "num_features": len(state["running_mean" if "running_mean" in state else "weight"]),
        "affine": "weight" in state, "track_running_stats": "running_mean" in state,
    },
    **dict.fromkeys(("RNN", "GRU", "LSTM"), _recurrent),
    "MultiheadAttention": lambda calls, state: {
        "embed_dim": state["in_proj_weight"].shape[1], "bias": "in_proj_bias" in state,
    },
}  # fmt: skip


def _written(cls: str, arguments: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """What a person would write: required arguments by place, others by name if they are not the default."""
    defaults = _RECURRENT
    if cls not in ("RNN", "GRU", "LSTM"):
        parameters = inspect.signature(getattr(torch.nn, cls)).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    short = {name: _short(value) for name, value in arguments.items()}
    required = tuple(short[name] for name, default in defaults.items() if default is _REQUIRED)
    options = {
        name: value
        for name, value in short.items()
        if defaults.get(name) is not _REQUIRED
        and not (name in defaults and type(value) is type(_short(defaults[name])) and value == _short(defaults[name]))
        and not (name == "stride" and "Pool" in cls and value == required[0])
    }
    return required, options


def _short(value: Any) -> Any:
    """A size that is the same in all dimensions as one number."""
    is_even = isinstance(value, (list, tuple)) and value and all(item == value[0] for item in value)
    return value[0] if is_even and isinstance(value[0], int) else value


def _ways_to_call(cls: str, given: Sequence[int]) -> Iterator[tuple[tuple[int, ...], dict[str, int]]]:
    """How the values that the layer was given may have been its arguments."""
    if cls != "MultiheadAttention":
        yield tuple(given), {}
        return
    for places in itertools.product(given, repeat=3) if len(given) <= 3 else ():
        rest = [value for value in given if value not in places]
        for names in itertools.permutations(("key_padding_mask", "attn_mask"), len(rest)):
            yield places, dict(zip(names, rest, strict=True))


def _has_room(layer: Layer, state: Mapping[str, torch.Tensor]) -> bool:
    """True if a layer has these parameters, and not many beside them."""
    with torch.device("meta"):
        own = _tensors_of(layer.build())
    is_same = all(name in own and (own[name].shape, own[name].dtype) == (t.shape, t.dtype) for name, t in state.items())
    return is_same and sum(t.numel() for t in own.values()) <= _MOST_OF_ITS_OWN + sum(t.numel() for t in state.values())


def _result(layer: Layer, before: Mapping[int, torch.Tensor], last: Call) -> Any:
    """What the layer returns for what it was given."""
    module = layer.build()
    own = _tensors_of(module)
    with torch.no_grad():
        for name, value in layer.state.items():
            own[name].copy_(before[value])
    copies = {value: before[value].clone() for value in (*layer.positional, *layer.keywords.values())}
    with Modes() as modes:
        modes.enter(last.mode, before[last.mode.rng.value] if last.mode.rng is not None else None)
        return module(*map(copies.get, layer.positional), **{n: copies[v] for n, v in layer.keywords.items()})


def _placed(result: Any, left: dict[int, torch.Tensor]) -> Any:
    """What a layer returned with the numbers of equal values, which are taken from ``left``; ``None`` for others."""
    if isinstance(result, (tuple, list)):
        return tuple(_placed(part, left) for part in result)
    same = (v for v, tensor in left.items() if isinstance(result, torch.Tensor) and same_bits(result, tensor))
    value = next(same, None)
    if value is None:
        return None
    del left[value]
    return Ref(value)


def _tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _real(value: Any) -> Any:
    """Arguments with torch's constants in place of their names."""
    if isinstance(value, Mapping):
        return {key: _real(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_real(item) for item in value)
    return symbol_named(value.name) if hasattr(value, "name") else value
