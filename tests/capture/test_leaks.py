"""Two hundred captures entered and left: nothing is left in torch, no thread, no open file, and no memory."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers

from reprokit.capture.session import Session
from reprokit.series.timeline import Timeline
from tests.capture.traps_checks import batches, classify, described_once, rooted_loss, training, update

CAPTURES = 100


def patched_things() -> tuple[Any, ...]:
    """Everything in torch that capture touches, as it is now."""
    return (
        nn.Module.__call__,
        nn.Module.zero_grad,
        torch.autograd.backward,
        torch.optim.Optimizer.zero_grad,
        *(getattr(torch.nn.utils, name) for name in ("clip_grad_norm_", "clip_grad_value_")),
        *(getattr(torch.nn.utils.clip_grad, name) for name in ("clip_grad_norm_", "clip_grad_value_")),
        *(getattr(torch.amp.GradScaler, name) for name in ("scale", "step", "update", "unscale_", "_unscale_grads_")),
        torch.compile,
    )


def counts() -> dict[str, int]:
    """What could pile up, cycles that only wait for the garbage collector aside."""
    gc.collect()
    return {
        "optimizer hooks": len(optimizers._global_optimizer_pre_hooks) + len(optimizers._global_optimizer_post_hooks),
        "module hooks": sum(len(value) for name, value in vars(nn.modules.module).items() if name.endswith("_hooks")),
        "function modes": torch._C._len_torch_function_stack(),
        "threads": threading.active_count(),
        "open files": len(os.listdir("/proc/self/fd")),
        "sessions": int(Session.active is not None),
        "classes with a call of their own": sum("__call__" in vars(kind) for kind in kinds(nn.Module)),
    }


def grown(before: dict[str, int]) -> dict[str, int]:
    """By how much each count is higher now; classes of other tests may have gone meanwhile."""
    return {name: count - before[name] for name, count in counts().items() if count > before[name]}


def kinds(kind: type) -> set[type]:
    """A class and all that derive from it."""
    return {kind, *(each for derived in kind.__subclasses__() for each in kinds(derived))}


def resident_bytes() -> int:
    """The memory this process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def capture_once(folder: Path, *, bad: bool = False, error: bool = False) -> None:
    """A few steps of a new model in a capture of their own."""
    with Session(directory=folder, after="continue", quiet=True):
        model, optimizer = training()
        for step, x, y in batches(4):
            update(optimizer, rooted_loss(model(x), y, bad and step == 2))
        if error:
            raise ValueError("out of the block")


def test_models_that_are_over_are_let_go_of(tmp_path: Path) -> None:
    """A search trains one model after another; copies of the state hold no more than the last ones."""
    models, sizes = list[weakref.ref[nn.Module]](), list[int]()
    with Session(directory=tmp_path, after="continue", quiet=True) as session:
        for _ in range(12):
            model, optimizer = training()
            models.append(weakref.ref(model))
            for _, x, y in batches(2):
                update(optimizer, classify(model, x, y))
            del model, optimizer
            gc.collect()
            assert sum(reference() is not None for reference in models) <= 3
            sizes.append(max(len(copy.contents.tensors) for copy in session._loop.world.copies))
        assert sizes[-1] <= sizes[5]


@pytest.mark.slow
def test_nothing_piles_up(tmp_path: Path) -> None:
    capture_once(tmp_path)
    things, before = patched_things(), counts()
    sizes = []
    for number in range(CAPTURES):
        capture_once(tmp_path)
        assert patched_things() == things
        if number % 5 == 4:
            sizes.append(resident_bytes())
    assert grown(before) == {}
    settled, last = sizes[5:10], sizes[-5:]  # the first captures fill caches
    assert sum(last) / 5 - sum(settled) / 5 < 2 * 2**20


@pytest.mark.parametrize(("bad", "error"), [(False, True), (True, False)])
def test_nothing_is_left_after_failures(bad: bool, error: bool, tmp_path: Path) -> None:
    with described_once():
        capture_once(tmp_path, bad=bad)
        gc.collect()
        things, before = patched_things(), counts()
    for _ in range(10):
        with described_once(), pytest.raises(ValueError) if error else contextlib.nullcontext():
            capture_once(tmp_path, bad=bad, error=error)
    assert patched_things() == things
    assert grown(before) == {}
    assert len(list(tmp_path.iterdir())) == (11 if bad else 0)


def test_the_model_is_let_go(tmp_path: Path) -> None:
    """A session that is over, but still there, keeps nothing of the training alive."""
    with Session(directory=tmp_path) as session:
        model, optimizer = training()
        for _, x, y in batches(4):
            update(optimizer, classify(model, x, y))
        watched = weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(optimizer)
    del model, optimizer, x, y
    gc.collect()
    assert session.snapshots == []
    assert [reference() is None for reference in watched] == [True, True, True]


def test_a_loop_that_asks_for_gradients_and_never_updates_keeps_no_numbers() -> None:
    """A simulation calls `torch.autograd.grad` for forces; its energies on a GPU are kept as the tensors they are."""
    timeline, energies = Timeline(), [torch.ones(()) for _ in range(3)]
    kept = [weakref.ref(energy) for energy in energies]
    timeline.start_grad(energies[0])
    assert timeline.loss is energies[0]
    for energy in energies[1:]:
        timeline.start_grad(energy)
    del energies[:], energy
    assert timeline.loss is None and [energy() for energy in kept] == [None] * 3


def train_one(bad: int | None = None) -> None:
    """A training of its own, as each test of a suite has."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(6):
        scale = float("nan") if step == bad else 1.0
        loss = (model(torch.ones(8, 16)) * scale).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def parameters_alive() -> int:
    gc.collect()
    return sum(type(one) is nn.Parameter for one in gc.get_objects())


def test_many_trainings_in_one_capture_leave_nothing_behind(tmp_path: Path) -> None:
    with Session(tmp_path / "bad.pt", after="continue", quiet=True) as session:
        for _ in range(10):
            train_one()
        before = parameters_alive()
        for _ in range(30):
            train_one()
        assert parameters_alive() <= before + 4  # those of the last training, as before
        train_one(bad=4)  # its modules and optimizers have ids that others had before
    assert [path.name for path in session.snapshots] == ["bad.pt"]
    assert session.results[0]["fidelity"] == "exact"
