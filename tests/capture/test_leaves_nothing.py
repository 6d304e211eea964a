"""A capture that is over has left nothing: no attribute of Python's or torch's modules and classes, no hook, no filter,
no handler is another than before, however it has ended.
"""

from __future__ import annotations

import textwrap

import pytest

from tests.conftest import Run

SNAPSHOT = '''
import atexit, gc, logging, multiprocessing, random, signal, subprocess, sys, threading, warnings, os
import numpy, torch, torch.distributed, torch.func
import torch._dynamo, torch.utils.data, torch.nn.utils.parametrize
from torch import nn
import reprokit
from reprokit.capture.session import Session
from reprokit.capture import failures, save, experiments, fidelity, retry


def spaces():
    """Every module that a hook could be put into, and every class in it."""
    wanted = ("torch", "numpy.random", "warnings", "threading", "multiprocessing", "subprocess", "random", "logging",
              "signal", "os", "builtins", "sys", "pickle", "copy", "gc", "__main__", "linecache", "importlib")
    for name, module in list(sys.modules.items()):
        if module is not None and name.startswith(wanted) and isinstance(getattr(module, "__dict__", None), dict):
            yield name, module.__dict__
            for key, value in list(module.__dict__.items()):
                if isinstance(value, type):
                    yield f"{name}.{key}", dict(vars(value))


COUNTERS = ("_ncallbacks", "exc_info", "last_value", "path_importer_cache", "modules")


def snapshot():
    found = {}
    for space, items in spaces():
        for key, value in items.items():
            if callable(value) or isinstance(value, (staticmethod, classmethod, property)):
                found[space, key] = value
            elif key.startswith("_global") or key in ("meta_path", "path_hooks", "callbacks"):
                found[space, key] = tuple(value) if isinstance(value, (list, dict)) else value
    found["filters"] = tuple(warnings.filters)
    found["filters list"] = id(warnings.filters)
    found["filters version"] = warning_version()
    found["showwarning"] = warnings.showwarning
    found["once"] = dict(warnings.onceregistry)
    found["hooks of exceptions"] = sys.excepthook, threading.excepthook, sys.unraisablehook
    found["trace"] = sys.getprofile(), sys.gettrace(), threading.getprofile(), threading.gettrace()
    found["exit functions"] = atexit._ncallbacks()
    found["function modes"] = torch._C._len_torch_function_stack()
    found["dispatch modes"] = torch._C._len_torch_dispatch_stack()
    found["signals"] = {number: signal.getsignal(number) for number in signal.valid_signals()}
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    found["logging"] = [(logger.name, list(logger.handlers), list(logger.filters)) for logger in loggers]
    found["collector"] = gc.isenabled(), gc.get_threshold(), tuple(gc.callbacks)
    found["settings"] = (
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(), torch.get_num_threads(), torch.is_inference_mode_enabled(),
    )
    found["threads"] = threading.active_count()
    found["environment"] = dict(os.environ)
    found["open files"] = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return found


def warning_version():
    """The number by which registries know that filters have changed: a warning that was shown is shown again then."""
    space = {"__name__": "probe"}
    exec("import warnings\\nwarnings.warn('probe', ImportWarning)", space)
    return space["__warningregistry__"]["version"]


def differences(before, after):
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        is_ours = str(getattr(new, "__module__", "")).startswith("reprokit")
        if key in before and key in after and old is not new and old != new:
            yield key, old, new
        elif key not in before and is_ours and not key[0].startswith("__main__"):
            yield key, old, new


def hooked(model, optimizer, loader):
    """What hangs on the objects of the user."""
    tables = [vars(part) for part in model.modules()]
    found = [sorted((k, len(v) if hasattr(v, "__len__") else 0) for k, v in table.items()) for table in tables]
    found.append(sorted(k for k in vars(optimizer)))
    found.append([(len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ())) for p in model.parameters()])
    found.append(sorted(vars(loader)))
    return found


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x):
        return self.net(x)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=8)
step = 0


def train(bad=None, epochs=2):
    global step
    step = 0
    for _ in range(epochs):
        for x in loader:
            loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
            if step == bad:
                loss = loss * float("nan")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            torch.nn.functional.mse_loss(loss, torch.zeros(1))  # warns, once
            step += 1


def heal():
    for parameter in model.parameters():
        parameter.data.nan_to_num_()
    optimizer.state.clear()


warnings.warn("a first warning")
torch.save(model.state_dict(), "x.pt"), torch.load("x.pt")
train()
with reprokit.capture(quiet=True, overwrite=True):  # what is imported late, is imported now
    train(3)
heal()
with reprokit.capture(quiet=True, overwrite=True, on=("nonfinite", "early", "silent")):
    train()
'''
ENDS = {
    "healthy": "with reprokit.capture(quiet=True):\n    train()",
    "stopped": "with reprokit.capture(quiet=True):\n    train(3)\nheal()",
    "continued": "with reprokit.capture(quiet=True, after='continue'):\n    train(3)\n    heal()\n    train()",
    "an exception": """
try:
    with reprokit.capture(quiet=True):
        train()
        model(torch.ones(2, 3))
except RuntimeError:
    pass
""",
    "an error of its own": """
from reprokit.capture.loop import Loop

def broken(self, *args):
    raise ZeroDivisionError

kept, Loop.end_step = Loop.end_step, broken
with reprokit.capture(quiet=True) as session:
    train()
Loop.end_step = kept
assert session._has_complained
""",
    "an error of its own while saving": """
def broken(*args, **kwargs):
    raise ZeroDivisionError

kept, save.Describing.snapshot = save.Describing.snapshot, broken
with reprokit.capture(quiet=True, after="continue"):
    train(3)
save.Describing.snapshot = kept
heal()
""",
    "early, every step, a record": """
on = ("nonfinite", "early", "silent")
with reprokit.capture(quiet=True, watch="every-step", on=on, record="auto", on_numbers=lambda numbers: None):
    train()
""",
    "paused": "with reprokit.capture(quiet=True) as session:\n    train()\n    session.pause()\n    train()",
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left(end: str, run_python: Run, tmp_path) -> None:  # type: ignore[no-untyped-def]
    compared = """
        for row in differences(before, snapshot()):
            print("LEFT", *map(str, row))
        if hooked(model, optimizer, loader) != before_hooked:
            print("LEFT hooks of objects", before_hooked, hooked(model, optimizer, loader))
        print("compared", len(before) > 5000)
    """
    begin = "before, before_hooked = snapshot(), hooked(model, optimizer, loader)\n"
    (tmp_path / "block.py").write_text(SNAPSHOT + begin + ENDS[end] + textwrap.dedent(compared))
    done = run_python("block.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["compared True"]
