"""A fault inside the code by which ranks meet: no rank hangs, the training of all ends with the bits it would have had.

Like `test_fail_open.py`, in two processes: a fault in every third function in turn, on one of the ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import run_python_in

TRAINING = """
import collections
import contextlib
import importlib
import io
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from reprokit.capture import meeting, ranks
from reprokit.capture.session import Session
from tests.capture.test_fail_open import HOME, NTH, fault_in, functions_of
from tests.capture.traps_checks import same_bits

ranks.AT_COPY = ranks.AT_END = 0.8
ranks.TO_SEE = 10.0
meeting.Meeting.exchange.__defaults__ = (1.5,)
ranks.TO_SAVE = 2.5
ON = {  # what fails in each run: that of `--on`
    "rate": ("nonfinite", "ranks"),
    "written": ("ranks",),
    "update": ("nonfinite",),
    "gradient": ("nonfinite",),
    "after averaging": ("nonfinite",),
}


def train(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    net = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    for step in range(8):
        x = torch.randn(8, 4, generator=generator)
        bad = step == 5 and rank == 1
        logits = net(x)
        loss = F.cross_entropy(logits, (x.sum(1) > 0).long())
        if how == "gradient":
            loss = loss + (logits * (0.0 if bad else 1.0)).square().sum().sqrt()
        optimizer.zero_grad()
        loss.backward()
        if how == "after averaging" and bad:
            next(model.parameters()).grad[0] = float("nan")
        if how == "update" and step == 5:
            optimizer.param_groups[0]["lr"] = float("inf")
        if how == "written" and bad:
            with torch.no_grad():
                model[2].weight[0, 0] += 1e-3
        if how == "rate" and bad:
            optimizer.param_groups[0]["lr"] = 0.02
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def watched(how, folder, fault=None):
    said = io.StringIO()
    folder.mkdir(parents=True)
    with contextlib.redirect_stderr(said):
        session = Session(directory=folder, after="continue", history=3, on=ON[how])
        with session:
            if fault is not None:
                fault.is_armed = True
            ended = train(how)
        if fault is not None:
            fault.is_armed = False
    return ended, said.getvalue(), session


def calls_in(how):
    calls = collections.Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([frame.f_code] if event == "call" else []))
    try:
        assert watched(how, Path(f"calls-{rank}", how))[1]
    finally:
        sys.setprofile(None)
    return calls


def broken_promises(how, fault, folder):
    started = time.monotonic()
    ended, said, session = watched(how, folder, fault)
    promises = {
        "a bit was changed": same_bits(ended, bare[how]),
        f"it said {said}": said.count("injected") <= 1,
        "nothing was saved and nothing was said": bool(said) or bool(session.snapshots),
        "half a file was left": sorted(folder.glob("*.pt*")) == sorted(session.snapshots),
        "something was left in torch": torch._C._len_torch_function_stack() == 0 and Session.active is None,
        "it took long": time.monotonic() - started < 150,  # every wait is far shorter, on a busy machine too
    }
    return [promise for promise, is_kept in promises.items() if not is_kept]


dist.init_process_group("gloo")
rank = dist.get_rank()
bare = {how: train(how) for how in ON}
calls = {how: calls_in(how) for how in ON}
broken, num_met = {}, 0
for part in sys.argv[1:]:
    functions = list(functions_of(importlib.import_module(HOME + part)))
    for number, (label, owner, attribute, function) in enumerate(functions[::3]):
        target = number % 2
        chosen = [max((min(NTH, calls[how][function.__code__]), how) for how in ON)]
        dist.broadcast_object_list(chosen, src=target)
        nth, how = chosen[0]
        if not nth:
            continue
        folder = Path(f"{part}-{label}-{rank}")
        if rank == target:
            with fault_in(owner, attribute, function, nth) as fault:
                promises = broken_promises(how, fault, folder)
            num_met += fault.num_calls > 0
        else:
            promises = broken_promises(how, None, folder)
        if promises:
            broken[f"{label} on rank {target}, {how}"] = promises
Path(f"broken.{rank}").write_text(json.dumps([broken, num_met]))
dist.destroy_process_group()
"""


PARTS = ("meeting", "lockstep", "ranks")


@pytest.mark.slow
def test_a_fault_on_one_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    done = run_python_in(
        tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py", *PARTS
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"broken.{rank}").read_text()) for rank in range(2)]
    assert [broken for broken, _ in found] == [{}, {}]
    assert all(num_met for _, num_met in found)
