"""Every public function of torch, `random` and NumPy's generators is replaced by one that notes who calls it.

    patched_everything.py healthy|forward|backward|optimizer|exception|event FILE

It writes to FILE how many calls there were, and those that came from a file of reprokit.
"""

import atexit
import collections
import functools
import inspect
import json
import random
import sys
import types
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.nn import functional as F

phase, report = sys.argv[1:]
OURS = str(Path(sys.modules["reprokit"].__file__).parent) if "reprokit" in sys.modules else "no such folder"
NAMESPACES = {
    "torch": torch,
    "torch.nn.functional": F,
    "torch.Tensor": torch.Tensor,
    "torch.linalg": torch.linalg,
    "torch.special": torch.special,
    "torch.fft": torch.fft,
    "torch.random": torch.random,
    "torch.autograd": torch.autograd,
    "torch.autograd.graph": torch.autograd.graph,
    "torch.func": torch.func,
    "torch.nn.utils": nn.utils,
    "torch.nn.init": nn.init,
    "torch.cuda": torch.cuda,
    "torch.compiler": torch.compiler,
    "random": random,
    "numpy.random": numpy.random,
}
CONTEXTS = ["no_grad", "enable_grad", "inference_mode", "set_grad_enabled"]
OF_CLASSES = {"__init__", "__new__", "__getattribute__", "__setattr__", "__delattr__", "__class__", "__del__"}
SLOTS = type(object.__eq__)  # of operators that are written in C
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type(torch.Tensor.add))
calls = collections.Counter()
of_ours = collections.Counter()


def watched(name, original):
    """A function that notes its direct caller and calls the original."""

    @functools.wraps(original, assigned=("__name__", "__doc__"), updated=())
    def call(*args, **kwargs):
        caller = sys._getframe(1)
        calls[name] += 1
        if caller.f_code.co_filename.startswith(OURS):
            place = Path(caller.f_code.co_filename).relative_to(OURS)
            of_ours[f"{name} by {place}:{caller.f_lineno} {caller.f_code.co_name}"] += 1
        return original(*args, **kwargs)

    return call


def is_seen():
    """True if a call from a file of reprokit is noted."""
    of_ours.clear()
    exec(compile("function(x)", f"{OURS}/native.py", "exec"), {"function": torch.isfinite, "x": torch.ones(2)})
    return bool(of_ours)


def write_report():
    found = {"calls": dict(calls), "of_ours": dict(of_ours)}
    Path(report).write_text(json.dumps({**found, "seen": is_seen()}))


def patch_everything():
    """Replace all of them, the operators of tensors too, other names that start with an underscore not."""
    for title, owner in NAMESPACES.items():
        for name in dir(owner):
            found = inspect.getattr_static(owner, name, None)
            is_operator = owner is torch.Tensor and name.startswith("__") and name not in OF_CLASSES
            if isinstance(found, (staticmethod, classmethod)) or (name.startswith("_") and not is_operator):
                continue
            if isinstance(found, (*FUNCTIONS, SLOTS)) or (owner is torch and name in CONTEXTS):
                setattr(owner, name, watched(f"{title}.{name}", found))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x, power):
        hidden = F.softplus(self.norm(self.first(x)))
        gate = torch.sqrt(hidden.detach().abs() + random.random())
        if phase == "exception" and power > 1:
            return self.last(hidden[:, :5])
        if phase == "forward" and power > 1:
            gate = torch.log(gate - gate)
        return self.last(hidden * gate)


random.seed(0)
numpy.random.seed(0)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
patch_everything()
atexit.register(write_report)
for step in range(90):
    power = 2 if step == 70 and phase != "healthy" else 1
    x = torch.randn(16, 6) + float(numpy.random.rand())
    out = model(x, power)
    if phase == "event" and power > 1:
        out = out * 1e4
    distance = (out - x[:, :2].tanh()).pow(2)
    if phase == "backward" and power > 1:
        distance = (distance * 0).sqrt() + distance
    loss = distance.mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    if phase == "optimizer" and power > 1:
        optimizer.state[model.first.weight]["exp_avg_sq"].fill_(-1.0)
    optimizer.step()
