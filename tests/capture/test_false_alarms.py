"""Healthy training that looks ill: capture stays silent, writes nothing and changes no bit.

Each loop asserts for itself that what makes it look ill did happen.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import reprokit
from tests.capture.traps_checks import (
    STEPS,
    WATCHES,
    Loop,
    batches,
    check_silent,
    classify,
    described_once,
    divided_loss,
    ending,
    net,
    plain_net,
    training,
    update,
)

LOOPS: list[Loop] = []


def healthy(loop: Loop) -> Loop:
    """Add a loop to those that must stay silent."""
    LOOPS.append(loop)
    return loop


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_it_stays_silent(loop: Loop, watch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_silent(loop, tmp_path, capsys, watch=watch)


# -- grad scalers --------------------------------------------------------------------------------------------------


def scaled_steps(optimizer: torch.optim.Optimizer, model: nn.Module, *, unscale: bool) -> torch.amp.GradScaler:
    """Train in half precision with a scale that is far too high at first."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=4)
    for _, x, y in batches(40):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = classify(model, x, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**36  # it did skip steps
    return scaler


@healthy
def scaler_warm_up_with_clipping() -> list[torch.Tensor]:
    model, optimizer = training()
    return ending(model, optimizer, scaled_steps(optimizer, model, unscale=True))


@healthy
def scaler_with_a_fused_optimizer() -> list[torch.Tensor]:
    """Torch calls the optimizer's step with infinite gradients here and lets the kernel leave it out."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    return ending(model, optimizer, scaled_steps(optimizer, model, unscale=False))


@healthy
def anomaly_mode_under_a_scaler() -> list[torch.Tensor]:
    """Anomaly mode raises at an overflow that is only the scale's fault; the loop lowers the scale and goes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    num_raised = 0
    with pytest.warns(UserWarning), torch.autograd.set_detect_anomaly(True):
        for _, x, y in batches(30):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = classify(model, x, y)
            optimizer.zero_grad()
            try:
                scaler.scale(loss).backward()
            except RuntimeError:
                num_raised += 1
                scaler.update(scaler.get_scale() / 4)
                continue
            scaler.step(optimizer)
            scaler.update()
    assert 0 < num_raised < 30
    return ending(model, scaler)


# -- infinities and NaN that are meant so ---------------------------------------------------------------------------


@healthy
def masks_of_minus_infinity() -> list[torch.Tensor]:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, mask: torch.Tensor, allowed: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h, weights = self.attention(x, x, x, attn_mask=mask)
            return self.head(h).masked_fill(~allowed, -math.inf), weights

    torch.manual_seed(0)
    model = Masked()
    optimizer = torch.optim.Adam(model.parameters())
    mask = torch.full((4, 4), -math.inf).triu(1)
    allowed = torch.tensor([True, True, False])
    for _, x, y in batches():
        logits, _ = model(x.reshape(2, 4, 4), mask, allowed)
        assert torch.isinf(logits).any()
        update(optimizer, F.cross_entropy(logits.reshape(8, 3), y))
    return ending(model, optimizer)


@healthy
def teacher_with_nan_rows() -> list[torch.Tensor]:
    """Attention of a frozen teacher is NaN for padded sentences; the student learns from the others."""
    torch.manual_seed(0)
    teacher = nn.MultiheadAttention(4, 2, batch_first=True)
    student = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(student.parameters())
    for _, x, _ in batches():
        sentences = x.reshape(2, 4, 4)
        padded = torch.tensor([[False] * 4, [True] * 4])
        with torch.no_grad():
            target, _ = teacher(sentences, sentences, sentences, key_padding_mask=padded, need_weights=True)
        assert torch.isnan(target[1]).all()
        update(optimizer, F.mse_loss(student(sentences)[0], target[0]))
    return ending(student)


@healthy
def ctc_losses_that_are_infinite_by_design() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 5)
    optimizer = torch.optim.Adam(model.parameters())
    lengths = torch.tensor([2, 6])  # a text of six letters cannot fit into four frames
    texts = torch.tensor([[1, 2, 0, 0, 0, 0], [1, 2, 3, 4, 1, 2]])
    for _, x, _ in batches():
        frames = model(x.reshape(4, 2, 4)).log_softmax(-1)
        sizes = torch.tensor([4, 4])
        seen = F.ctc_loss(frames.detach(), texts, sizes, lengths, reduction="none")
        assert torch.isinf(seen[1])
        update(optimizer, F.ctc_loss(frames, texts, sizes, lengths, zero_infinity=True))
    return ending(model)


# -- numbers at the edge --------------------------------------------------------------------------------------------


@healthy
def clipping_of_a_norm_that_overflows() -> list[torch.Tensor]:
    weight = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (weight * 1e19).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_([weight], 1.0)
        assert torch.isinf(norm)
        optimizer.step()
    return ending(weight)


# -- between the steps ----------------------------------------------------------------------------------------------


# -- parameters of every kind ---------------------------------------------------------------------------------------


@healthy
def frozen_parameters() -> list[torch.Tensor]:
    model = net()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    spare = nn.Linear(4, 2)  # never used: its gradients stay None
    optimizer = torch.optim.AdamW([*model.parameters(), *spare.parameters()])
    for _, x, y in batches():
        update(optimizer, classify(model, x, y))
    assert spare.weight.grad is None and model[0].weight.grad is None
    return ending(model, spare)


# -- models that change ---------------------------------------------------------------------------------------------


class Causal(nn.Module):
    """Attention whose mask is kept, and made anew for longer sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.zeros(0, 0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.mask) < len(x):
            self.register_buffer("mask", torch.full((len(x), len(x)), -math.inf).triu(1), persistent=False)
        hidden = self.inner(x)
        return torch.softmax(hidden @ hidden.T + self.mask[: len(x), : len(x)], -1) @ hidden


@healthy
def a_mask_of_infinities_that_grows() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Causal()
    optimizer = torch.optim.Adam(model.parameters())
    for step, x, _ in batches(12):
        update(optimizer, model(x[: 3 + step // 3]).pow(2).mean())
    return ending(model)


# -- compiled, functional, threaded ---------------------------------------------------------------------------------


def compiled(backend: str = "eager") -> list[torch.Tensor]:
    torch._dynamo.reset()
    model = plain_net()
    fast = torch.compile(model, backend=backend)
    optimizer = torch.optim.Adam(model.parameters())
    for _, x, y in batches():
        update(optimizer, classify(fast, x, y))
    return ending(model)


@healthy
def a_compiled_model() -> list[torch.Tensor]:
    return compiled("eager")


@pytest.mark.filterwarnings("default")
def test_a_model_compiled_ahead_of_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_silent(lambda: compiled("aot_eager"), tmp_path, capsys)


def test_a_capture_inside_another_one_does_not_watch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = training()
    with described_once(), reprokit.capture(tmp_path / "outer.pt", after="continue"):
        for step, x, y in batches(4):
            with reprokit.capture(tmp_path / "inner.pt"):
                update(optimizer, divided_loss(model(x), y, step == 3))
    assert [path.name for path in tmp_path.iterdir()] == ["outer.pt"]
    assert capsys.readouterr().err.count("another capture watches already, so this one does not") == 4


# -- what loops do beside the step ----------------------------------------------------------------------------------
