"""The `sitecustomize` of the processes of `harmless.py`: notes warnings, and what is left when the process ends.

It notes one entry for each module, optimizer and scaler, and each variable of ``__main__``, after the script's own exit
functions and after a capture has ended. A thing that dies before leaves its tensors, which are looked at in the end: so
it neither is kept alive, nor does it matter when exactly it dies.
"""

import atexit
import gc
import hashlib
import json
import os
import random
import sys
import warnings
from pathlib import Path

REPORT = os.environ.pop("HARMLESS_REPORT", None)  # not for the processes that the script starts
WARNED = []
DIED = []
KEPT = {}  # methods of tensors as they are before the script, which may replace them
IS_OVER = []  # not empty when the report is written: what dies then is in it


def begin():
    """Put the hooks in place; torch is imported, as it is for every script that is compared."""
    import numpy
    import torch

    names = "is_inference detach to_dense cpu resolve_conj resolve_neg contiguous view reshape numpy"
    KEPT.update((name, getattr(torch.Tensor, name)) for name in names.split())
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)  # what a script does not seed itself begins anywhere
    show = warnings._showwarnmsg

    def note(message):
        WARNED.append([message.category.__name__, str(message.message), message.filename, message.lineno])
        show(message)

    warnings._showwarnmsg = note
    for kind, (cls, _) in kinds().items():
        cls.__del__ = lambda one, kind=kind: None if IS_OVER else DIED.append(found(kind, one))
    process = os.getpid()
    atexit.register(lambda: os.getpid() == process and write(Path(REPORT)))


def kinds():
    """What is looked for: a class, and a function that gives the values that it is made of."""
    import torch

    return {
        "module": (torch.nn.Module, lambda one: [one.training, dict(one._parameters), dict(one._buffers)]),
        "optimizer": (torch.optim.Optimizer, lambda one: [one.param_groups, list(one.state.values())]),
        "scaler": (torch.amp.GradScaler, lambda one: one.state_dict()),
    }


def found(kind, one):
    """What a thing is made of, not copied."""
    return kind, type(one).__qualname__, kinds()[kind][1](one)


def write(report):
    """Write the report; the last thing that the process does."""
    import numpy
    import torch

    generators = {"torch": torch.default_generator.get_state(), "random": random.getstate()}
    generators["numpy"] = numpy.random.mtrand._rand.get_state()
    gc.collect()
    IS_OVER.append(True)
    classes = [(kind, cls) for kind, (cls, _) in kinds().items()]
    alive = [found(kind, one) for one in gc.get_objects() for kind, cls in classes if issubclass(type(one), cls)]
    alive += [("generator", name, state) for name, state in generators.items()]
    variables = vars(sys.modules["__main__"])
    alive += [("variable", name, value) for name, value in variables.items() if not name.startswith("__")]
    lists = {"alive": [entry(*one) for one in alive], "died": [entry(*one) for one in DIED], "warnings": WARNED}
    report.write_text(json.dumps(lists))


def entry(kind, name, value):
    """The kind and name of a thing with a digest of its bits."""
    digest = hashlib.sha256()
    count = add(digest, value, kind != "variable")
    return {"kind": kind, "name": name, "tensors": count, "digest": digest.hexdigest()}


def add(digest, value, has_gradients, depth=0):
    """Add the bits of a value made of containers, tensors and plain values; how many tensors there were."""
    import numpy
    import torch

    digest.update(type(value).__qualname__.encode())
    if isinstance(value, torch.Tensor):
        count = add_tensor(digest, value)
        return count + (add(digest, value.grad, False) if value.is_leaf and value.grad is not None else 0)
    if depth > 20:
        return 0
    if isinstance(value, dict):
        digest.update(b"%d" % len(value))
        pairs = list(value.items())
        return sum(add(digest, part, has_gradients, depth + 1) for pair in pairs for part in pair)
    if isinstance(value, (list, tuple)):
        digest.update(b"%d" % len(value))
        return sum(add(digest, item, has_gradients, depth + 1) for item in value)
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        digest.update(value.tobytes() if value.dtype != object else b"")
    elif isinstance(value, (type(None), bool, int, float, complex, str, bytes)):
        digest.update(repr(value).encode())
    return 0


def add_tensor(digest, tensor):
    """Add a tensor's type, version and bits."""
    import torch

    version = -1 if KEPT["is_inference"](tensor) else tensor._version
    facts = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.device} {tensor.requires_grad} {version}"
    digest.update(facts.encode())
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type == "meta":
        return 1
    plain = KEPT["detach"](tensor)
    plain = KEPT["to_dense"](plain) if plain.layout is not torch.strided else plain
    for name in ("cpu", "resolve_conj", "resolve_neg", "contiguous"):
        plain = KEPT[name](plain)
    bits = KEPT["view"](KEPT["reshape"](plain, -1), torch.uint8)
    digest.update(KEPT["numpy"](bits).tobytes())
    return 1


if REPORT is not None:
    begin()
