"""Files that `torch.save` does not write: pickles that contradict themselves, programs without end, odd archives.

`FORGERIES` are functions by name that change the content of a file in place, `ARCHIVES` change its bytes. Each is a
kind of damage that random values of a field's type (`strangers.py`) and changed bytes (`payloads.py`) do not make.
"""

from __future__ import annotations

import io
import random
import struct
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from command import JSON

Forgery = Callable[[JSON, random.Random], object]
ArchiveForgery = Callable[[bytes, random.Random], bytes]


# -- tensors ----------------------------------------------------------------------------------------------------------


class _Rebuilt:
    """Pickled as a call that the restricted unpickler makes, with arguments that no tensor has."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._function, self._arguments


def _view(storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any = False, hooks: Any = None) -> _Rebuilt:
    rebuild = torch._utils._rebuild_tensor_v2
    return _Rebuilt(rebuild, storage, offset, size, stride, requires_grad, hooks or OrderedDict())


def _sparse(index: torch.Tensor, values: torch.Tensor, size: tuple[int, ...]) -> _Rebuilt:
    return _Rebuilt(torch._utils._rebuild_sparse_tensor, torch.sparse_coo, (index, values, size, False))


def _storage(numbers: int = 6, dtype: torch.dtype = torch.float32) -> Any:
    return torch.arange(numbers).to(dtype)._typed_storage()


def _tensors() -> dict[str, Callable[[], Any]]:
    """Tensors of odd sizes, strides, storages and kinds."""
    index, ones = torch.tensor([[0, 7]]), torch.ones(2)
    odd_booleans = torch.tensor([2, 255], dtype=torch.uint8).view(torch.bool)
    return {
        "overlapping rows": lambda: _view(_storage(), 0, (4, 3), (1, 1)),
        "no step": lambda: _view(_storage(), 0, (4, 3), (0, 0)),
        "endless without a step": lambda: _view(_storage(), 0, (2**20, 2**20), (0, 0)),
        "negative size": lambda: _view(_storage(), 0, (-1, 3), (3, 1)),
        "negative step": lambda: _view(_storage(), 5, (3,), (-1,)),
        "behind its storage": lambda: _view(_storage(), 5, (3,), (1,)),
        "offset below zero": lambda: _view(_storage(), -1, (3,), (1,)),
        "sizes of floats": lambda: _view(_storage(), 0, (2.0, 3), (3, 1)),
        "sizes of a text": lambda: _view(_storage(), 0, "23", "31"),
        "no element, and a terabyte": lambda: _view(_storage(), 0, (0, 2**40), (2**40, 1)),
        "sizes that overflow": lambda: _view(_storage(), 0, (2**62, 4), (1, 1)),
        "many axes": lambda: _view(_storage(1), 0, (1,) * 70, (1,) * 70),
        "hooks": lambda: _view(_storage(), 0, (2,), (1,), False, OrderedDict({0: "hook"})),
        "wants a gradient": lambda: _view(_storage(), 0, (2,), (1,), True),
        "integers that want a gradient": lambda: _view(_storage(6, torch.int64), 0, (2,), (1,), True),
        "booleans of other bytes": lambda: _view(odd_booleans._typed_storage(), 0, (2,), (1,)),
        "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
        "sparse beyond its size": lambda: _sparse(index, torch.ones(2), (3,)),
        "sparse of two sizes": lambda: _sparse(index, torch.ones(5), (9,)),
        "sparse": lambda: torch.eye(3).to_sparse(),
        "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
        "meta": lambda: torch.empty(3, device="meta"),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "quantized by row": lambda: torch.quantize_per_channel(torch.eye(2), ones, torch.zeros(2), 0, torch.qint8),
        "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
        "negated": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
        "half a byte": lambda: torch.zeros(4, dtype=torch.float8_e5m2),
        "unsigned": lambda: torch.ones(3, dtype=torch.uint32),
        "a scalar": lambda: torch.tensor(float("nan")),
        "empty": lambda: torch.zeros(0, 3),
        "a storage": lambda: _storage(),
        "a size": lambda: torch.Size((2, 3)),
        "a dtype": lambda: torch.float16,
        "bytes": lambda: bytearray(b"123"),
    }  # fmt: skip


def _put_tensor(made: Callable[[], Any]) -> Forgery:
    def change(content: JSON, draw: random.Random) -> None:
        key = draw.choice(sorted(content["tensors"]))
        content["tensors"][key] = made()

    return change


def _share_storage(content: JSON, draw: random.Random) -> None:
    """All tensors are views of one storage, which overlap."""
    storage = torch.randn(4096).untyped_storage()
    for key, tensor in content["tensors"].items():
        if tensor.dtype in (torch.float32, torch.int64) and tensor.numel() < 256:
            view = torch.empty(0, dtype=tensor.dtype)
            content["tensors"][key] = view.set_(storage, draw.randrange(4), tensor.shape, tensor.stride())


def _other_dtypes(content: JSON, draw: random.Random) -> None:
    for key, tensor in content["tensors"].items():
        dtype = draw.choice((torch.float16, torch.float64, torch.int32, torch.bool, torch.complex128, torch.uint8))
        content["tensors"][key] = tensor.to(dtype)


def _other_shapes(content: JSON, draw: random.Random) -> None:
    for key, tensor in content["tensors"].items():
        shapes: tuple[torch.Tensor, ...] = (tensor.flatten(), tensor[None], tensor.flatten()[:1], tensor.flatten()[:0])
        content["tensors"][key] = draw.choice(shapes)


def _odd_keys(content: JSON, draw: random.Random) -> None:
    for key in (None, "0", 1.5, True, (1,), -1, 2**70, "../x"):
        content["tensors"][key] = torch.ones(1)


# -- nested data ------------------------------------------------------------------------------------------------------


def _places(value: Any, depth: int = 0) -> list[Any]:
    """The containers of a file, of the outer ones first."""
    inner = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
    found = [value] if isinstance(value, (dict, list)) else []
    return found + [place for item in inner if depth < 8 for place in _places(item, depth + 1)]


def _put(content: JSON, draw: random.Random, value: Any) -> None:
    """A value in the place of another, anywhere."""
    place = draw.choice([one for one in _places(content) if one])
    place[draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))] = value


def _put_itself(content: JSON, draw: random.Random) -> None:
    """A container that holds itself."""
    place = draw.choice([one for one in _places(content) if one])
    place[draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))] = place


def _deep(content: JSON, draw: random.Random) -> None:
    nested: Any = 0
    for _ in range(draw.choice((60, 150, 400))):
        nested = draw.choice(([nested], {"tuple": [nested]}, {"dict": [["x", nested]]}, (nested,)))
    _put(content, draw, nested)


def _doubled(content: JSON, draw: random.Random) -> None:
    nested: Any = ["x"]
    for _ in range(draw.choice((10, 40))):
        nested = [nested, nested]
    _put(content, draw, nested)


_TEXTS = ("\ud800", "a\nb", "a\r\nb", "\x1b[31m", "\x9b2J", "..", "/", "a/b", "/etc/passwd", "C:\\x", "", " ", "\u2028",
          "\u202e", "<script>", "{{1}}", "%s%n", "None", "self", "\u2061x\u2062y\u2064", "\u2064\u2062",
          "x" * 70_000, "1\u0300" * 500, "torch", "a.b.c", "a..b", "0", "-1", "\U0001d41a")  # fmt: skip
_NUMBERS = (-1, 0, 2**31, 2**63 - 1, 2**63, -(2**63), 2**200, 1e400, float("nan"), -0.0, 5e-324, True, None)


def _odd_texts(content: JSON, draw: random.Random) -> None:
    """One text in all places of names: inputs, modules and scopes."""
    text, program = draw.choice(_TEXTS), content["program"]
    for row in program["inputs"]:
        if draw.random() < 0.5:
            row[1] = text + (str(row[0]) if draw.random() < 0.5 else "")
    for call in program["calls"]:
        for level in call["scope"]:
            level[0] = text
            level[1] = draw.choice((text, level[1]))
    program["modules"] = {draw.choice((name, text)): note for name, note in program["modules"].items()}


def _odd_numbers(content: JSON, draw: random.Random) -> None:
    """Numbers in places of numbers, in the failure and the program."""
    places = _places(content["program"]) + _places(content.get("failure") or content.get("signature"))
    for place in draw.sample(places, min(len(places), 3)):
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        for key in keys:
            if isinstance(place[key], (int, float)) and draw.random() < 0.5:
                place[key] = draw.choice(_NUMBERS)


def _other_containers(content: JSON, draw: random.Random) -> None:
    made = (OrderedDict(a=1), Counter("aa"), defaultdict(list), {1, 2}, frozenset((1,)), 1j, b"x", range(3))
    _put(content, draw, draw.choice(made))


# -- programs ---------------------------------------------------------------------------------------------------------


def _call(target: str, args: list[Any], output: int, **kwargs: Any) -> JSON:
    pairs = {"dict": [[key, value] for key, value in kwargs.items()]}
    mode = [True, [], False, None]
    return {"target": target, "args": {"tuple": args}, "kwargs": pairs, "outputs": {"ref": output}, "scope": [],
            "site": None, "mode": mode, "phase": "forward"}  # fmt: skip


def _first_float(content: JSON) -> int:
    tensors = content["tensors"]
    return next(key for key, one in tensors.items() if one.dtype is torch.float32)


def _grow(content: JSON, draw: random.Random) -> None:
    """A value that doubles with each call, in front of the program."""
    last, calls = _first_float(content), []
    for number in range(45):
        calls.append(_call("torch.cat", [[{"ref": last}, {"ref": last}]], 5000 + number))
        last = 5000 + number
    _in_front(content, calls)


def _huge_results(content: JSON, draw: random.Random) -> None:
    """Calls whose result is larger than any memory."""
    ref = {"ref": _first_float(content)}
    calls = [
        _call("torch.zeros", [[2**40]], 5000),
        _call("torch.arange", [2**45], 5000),
        _call("torch.Tensor.expand", [ref, 2**40, -1], 5000),
        _call("torch.Tensor.repeat", [ref, *([2**13] * 3)], 5000),
        _call("torch.nn.functional.pad", [ref, [2**36, 0]], 5000),
        _call("torch.nn.functional.one_hot", [ref], 5000, num_classes=2**40),
        _call("torch.eye", [2**20], 5000),
        _call("torch.Tensor.new_zeros", [ref, [2**50]], 5000),
        _call("torch.linspace", [0, 1, 2**42], 5000),
    ]
    _in_front(content, [draw.choice(calls)])


def _in_front(content: JSON, calls: list[JSON]) -> None:
    content["program"]["calls"] = [*calls, *content["program"]["calls"]]
    for owner in (content.get("failure"), (content.get("failure") or {}).get("cause")):
        if owner and isinstance(owner.get("call_index"), int):
            owner["call_index"] += len(calls)


def _redefine(content: JSON, draw: random.Random) -> None:
    """Calls that write the values of others, or of inputs."""
    program = content["program"]
    known = [row[0] for row in program["inputs"]]
    for call in program["calls"]:
        if "ref" in (call["outputs"] or {}) and draw.random() < 0.3:
            call["outputs"] = {"ref": draw.choice(known)}


def _read_later(content: JSON, draw: random.Random) -> None:
    """Calls in another order, so that some read what later ones make."""
    draw.shuffle(content["program"]["calls"])


def _other_targets(content: JSON, draw: random.Random) -> None:
    """The calls of the program with the functions of others."""
    calls = content["program"]["calls"]
    targets = [call["target"] for call in calls]
    draw.shuffle(targets)
    for call, target in zip(calls, targets, strict=True):
        call["target"] = target


def _odd_modes(content: JSON, draw: random.Random) -> None:
    for call in content["program"]["calls"]:
        casts = draw.choice(([], [["cpu", "torch.float16"]], [["cuda", "torch.bfloat16"]], [["mps", "torch.int64"]]))
        call["mode"] = [draw.random() < 0.5, casts, draw.random() < 0.5, draw.choice((None, {"ref": 0}))]


def _odd_devices(content: JSON, draw: random.Random) -> None:
    for row in content["program"]["inputs"]:
        row[4:] = [draw.choice(("cuda", "cuda:7", "meta", "xpu:0", "mps", "privateuseone", "xla:0"))]


def _endless_sites(content: JSON, draw: random.Random) -> None:
    for call in content["program"]["calls"]:
        if call["site"] is not None:
            call["site"][1] = draw.choice((0, 2**62))
            call["site"][6:] = [[0, 2**40, 2**41, 2**42]]


FORGERIES: dict[str, Forgery] = {
    **{f"tensor: {name}": _put_tensor(made) for name, made in _tensors().items()},
    **{
        name.strip("_").replace("_", " "): function
        for name, function in globals().items()
        if name in ("_share_storage", "_other_dtypes", "_other_shapes", "_odd_keys", "_put_itself", "_deep", "_doubled",
                    "_odd_texts", "_odd_numbers", "_other_containers", "_grow", "_huge_results", "_redefine",
                    "_read_later", "_other_targets", "_odd_modes", "_odd_devices", "_endless_sites")
    },
}  # fmt: skip


# -- archives ---------------------------------------------------------------------------------------------------------


def _members(raw: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def _archive(members: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, part in members:
            archive.writestr(name, part)
    return file.getvalue()


def _renamed(change: Callable[[str], str]) -> ArchiveForgery:
    return lambda raw, draw: _archive([(change(name), part) for name, part in _members(raw)])


def _with(*more: tuple[str, bytes]) -> ArchiveForgery:
    return lambda raw, draw: _archive([*_members(raw), *more])


def _twice(raw: bytes, draw: random.Random) -> bytes:
    members = _members(raw)
    return _archive([*members, draw.choice(members)])


def _left_out(raw: bytes, draw: random.Random) -> bytes:
    members = _members(raw)
    members.remove(draw.choice(members))
    return _archive(members)


def _cut_member(raw: bytes, draw: random.Random) -> bytes:
    members = _members(raw)
    place = draw.randrange(len(members))
    name, part = members[place]
    members[place] = name, part[: draw.randrange(len(part) + 1)]
    return _archive(members)


def _flagged(raw: bytes, draw: random.Random) -> bytes:
    """Flags, methods, sizes and sums of the directory that do not fit."""
    changed = bytearray(raw)
    at = raw.rfind(b"PK\x01\x02") if draw.random() < 0.5 else raw.find(b"PK\x01\x02")
    offset, value = draw.choice(
        ((8, 1), (10, 99), (10, 8), (16, 0), (20, 2**32 - 1), (24, 2**31), (28, 65535), (42, 2**31))
    )
    struct.pack_into("<I" if offset >= 16 and offset != 28 else "<H", changed, at + offset, value)
    return bytes(changed)


ARCHIVES: dict[str, ArchiveForgery] = {
    "absolute names": _renamed(lambda name: f"/{name}"),
    "names that climb": _renamed(lambda name: f"../{name}"),
    "backslashes": _renamed(lambda name: name.replace("/", "\\")),
    "names with line ends": _renamed(lambda name: name.replace("archive", "a\nb")),
    "no folder": _renamed(lambda name: name.rpartition("/")[2]),
    "more entries": _with(("/etc/x", b"1"), ("../../x", b"2"), ("archive/data/9999", b"3")),
    "another pickle": _with(("other/data.pkl", b"cos\nsystem\n(S'true'\ntR.")),
    "code": _with(("archive/constants.pkl", b"\x80\x02)."), ("archive/code/x.py", b"1")),
    "zeros beside it": _with(("archive/data/9998", bytes(2**20))),
    "an entry twice": _twice,
    "an entry left out": _left_out,
    "an entry cut off": _cut_member,
    "flags": _flagged,
    "compressed": lambda raw, draw: _archive(_members(raw), zipfile.ZIP_DEFLATED),
    "compressed hard": lambda raw, draw: _archive([*_members(raw), ("archive/z", bytes(2**24))], zipfile.ZIP_BZIP2),
    "text in front": lambda raw, draw: b"#!/bin/sh\n" + raw,
    "text behind": lambda raw, draw: raw + b"\0" * draw.choice((1, 22, 70_000)),
    "big endian": lambda raw, draw: _archive(
        [(name, b"big" if name.endswith("byteorder") else part) for name, part in _members(raw)]
    ),
    "odd endian": lambda raw, draw: _archive(
        [(name, b"\xffxx" if name.endswith("byteorder") else part) for name, part in _members(raw)]
    ),
    "another version": lambda raw, draw: _archive(
        [(name, b"99\n" if name.endswith("version") else part) for name, part in _members(raw)]
    ),
    "no archive": lambda raw, draw: draw.choice(
        (b"PK\x05\x06" + bytes(18), b"PK\x03\x04", b"\x80\x02}q\x00.", b"\n" * 99)
    ),
}


def forge(content: JSON, name: str, draw: random.Random) -> bytes:
    """The bytes of a file with one forgery; of the file as it is where the forgery has nothing to change."""
    if name in FORGERIES:
        FORGERIES[name](content, draw)
    file = io.BytesIO()
    torch.save(content, file)
    return ARCHIVES[name](file.getvalue(), draw) if name in ARCHIVES else file.getvalue()
