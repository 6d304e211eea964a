"""The constructor arguments of torch's layers, and how a person would write them.

Sizes are read from the weights and the calls, since the ones noted at capture may have shrunk; the rest is as noted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from reprokit.program.functions import layer_class
from reprokit.program.ir import Call

Arguments = dict[str, Any]
Values = Mapping[str, torch.Tensor]
Shapes = Callable[[int], Sequence[int]]

RECURRENT = ("RNN", "GRU", "LSTM")
_REQUIRED = inspect.Parameter.empty
_RECURRENT_DEFAULTS: Arguments = {
    "input_size": _REQUIRED, "hidden_size": _REQUIRED, "num_layers": 1, "bias": True, "dropout": 0.0,
    "bidirectional": False, "batch_first": False, "nonlinearity": "tanh", "proj_size": 0,
}  # fmt: skip


def constructor(cls: str, noted: Arguments, calls: Sequence[Call], state: Values, shapes: Shapes) -> Arguments:
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


def _linear(calls: Sequence[Call], state: Values) -> Arguments:
    rows, columns = state["weight"].shape
    return {"in_features": columns, "out_features": rows, "bias": "bias" in state}


def _conv(calls: Sequence[Call], state: Values) -> Arguments:
    call, *_ = (call for call in calls if call.name.startswith("conv"))
    channels, per_group, *kernel = state["weight"].shape
    stride, padding, dilation, groups = call.args[3:7]
    found = {"stride": stride, "dilation": dilation, "groups": groups, "kernel_size": tuple(kernel)}
    sizes = {"in_channels": per_group * groups, "out_channels": channels, "bias": "bias" in state}
    return {**found, **sizes, **({"padding": padding} if len(calls) == 1 else {})}


def _transposed(calls: Sequence[Call], state: Values) -> Arguments:
    stride, padding, output_padding, groups, dilation = calls[-1].args[3:8]
    channels, per_group, *kernel = state["weight"].shape
    found = {"stride": stride, "padding": padding, "output_padding": output_padding, "groups": groups}
    sizes = {"in_channels": channels, "out_channels": per_group * groups, "kernel_size": tuple(kernel)}
    return {**found, **sizes, "dilation": dilation, "bias": "bias" in state}


def _embedding(calls: Sequence[Call], state: Values) -> Arguments:
    rows, columns = state["weight"].shape
    return {"num_embeddings": rows, "embedding_dim": columns}


def _bilinear(calls: Sequence[Call], state: Values) -> Arguments:
    rows, first, second = state["weight"].shape
    return {"in1_features": first, "in2_features": second, "out_features": rows, "bias": "bias" in state}


def _shape_norm(calls: Sequence[Call], state: Values) -> Arguments:
    shape = tuple(calls[-1].args[1])
    is_affine = {"elementwise_affine": "weight" in state}
    is_layer_norm = calls[-1].name == "layer_norm"
    return {"normalized_shape": shape, **is_affine, **({"bias": "bias" in state} if is_layer_norm else {})}


def _batch_norm(calls: Sequence[Call], state: Values) -> Arguments:
    sized, *_ = (state[name] for name in ("running_mean", "weight") if name in state)
    return {"num_features": len(sized), "affine": "weight" in state, "track_running_stats": "running_mean" in state}


def _group_norm(calls: Sequence[Call], state: Values) -> Arguments:
    return {"num_groups": calls[-1].args[1], "num_channels": len(state["weight"])} if "weight" in state else {}


def _recurrent(calls: Sequence[Call], state: Values) -> Arguments:
    call = calls[-1]
    place, *_ = (index for index in (2, 3) if isinstance(call.args[index], list))
    has_biases, num_layers, dropout, _, is_bidirectional = call.args[place + 1 : place + 6]
    first = state["weight_ih_l0"]
    found = {"input_size": first.shape[1], "hidden_size": state["weight_hh_l0"].shape[1], "num_layers": num_layers}
    found |= {"bias": has_biases, "dropout": dropout, "bidirectional": is_bidirectional}
    if call.name.startswith("rnn_"):
        found["nonlinearity"] = call.name.removeprefix("rnn_")
    return {**found, "batch_first": call.args[place + 6] if len(call.args) > place + 6 else False}


def _attention(calls: Sequence[Call], state: Values, shapes: Shapes) -> Arguments:
    width = state["in_proj_weight"].shape[1]
    split, *_ = (call for call in calls if call.name == "view" and len(call.args) == 4)
    num_heads = width // shapes(split.output_refs()[0])[-1]
    return {"embed_dim": width, "num_heads": num_heads, "bias": "in_proj_bias" in state, "dropout": 0.0}


_SIZES: dict[str, Callable[[Sequence[Call], Values], Arguments]] = {
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
