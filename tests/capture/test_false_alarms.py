"""Healthy training that looks ill: capture stays silent, writes nothing and changes no bit.

Each loop asserts for itself that what makes it look ill did happen.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import pickle
import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import reprokit
from reprokit.capture.session import Session
from tests.capture.traps_checks import (
    STEPS,
    WATCHES,
    CountingBackend,
    Loop,
    batches,
    check_silent,
    classify,
    ending,
    net,
    plain_net,
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
def scaler_warm_up() -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return ending(model, optimizer, scaled_steps(optimizer, model, unscale=False))


@healthy
def scaler_warm_up_with_clipping() -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    return ending(model, optimizer, scaled_steps(optimizer, model, unscale=True))


@healthy
def scaler_with_a_fused_optimizer() -> list[torch.Tensor]:
    """Torch calls the optimizer's step with infinite gradients here and lets the kernel leave it out."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    return ending(model, optimizer, scaled_steps(optimizer, model, unscale=False))


@healthy
def scaler_overflow_through_layer_norm() -> list[torch.Tensor]:
    """An overflow becomes NaN on its way back through a layer norm; the scaler skips it all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return ending(model, scaled_steps(optimizer, model, unscale=True))


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
def infinite_sentinels() -> list[torch.Tensor]:
    model = plain_net()
    optimizer = torch.optim.Adam(model.parameters())
    lowest = torch.full((), math.inf)
    for _, x, _ in batches():
        points = model(x)
        distances = (points[:, None] - points[None]).pow(2).sum(-1)
        distances = distances.masked_fill(torch.eye(8, dtype=torch.bool), math.inf)
        nearest = distances.min(1).values
        lowest = torch.minimum(lowest, nearest.detach().min())
        update(optimizer, F.relu(1.0 - nearest).mean() + points.pow(2).mean())
    return ending(model, lowest)


@healthy
def bool_and_integer_tensors() -> list[torch.Tensor]:
    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4)
            self.body = plain_net(1)
            self.register_buffer("seen", torch.zeros(5, dtype=torch.long))

        def forward(self, rows: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.seen.index_add_(0, rows, torch.ones_like(rows))
            logits = self.body(self.table(rows) * keep[:, None])
            return logits, logits.argmax(-1)

    torch.manual_seed(0)
    model = Indexed()
    optimizer = torch.optim.AdamW(model.parameters())
    for step, x, y in batches():
        logits, _ = model((x.abs().sum(1) * 10 + step).long() % 5, x[:, 0] > 0)
        update(optimizer, F.cross_entropy(logits, y))
    return ending(model)


@healthy
def rows_masked_out_whole_and_sliced_away() -> list[torch.Tensor]:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = torch.zeros(8, 8).masked_fill(mask, -math.inf)
            return self.value(x), scores.softmax(-1)

    torch.manual_seed(0)
    model = Averaging()
    optimizer = torch.optim.Adam(model.parameters())
    for _, x, y in batches():
        mask = torch.zeros(8, 8, dtype=torch.bool)
        mask[5:] = True
        values, weights = model(x, mask)
        assert torch.isnan(weights).any()
        update(optimizer, F.cross_entropy(weights[:5] @ values, y[:5]))
    return ending(model)


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
def loss_that_is_nan_by_design_and_never_used() -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    unused = []
    for _, x, y in batches():
        logits = model(x)
        empty = F.cross_entropy(logits[:0], y[:0])  # the mean over nothing
        assert torch.isnan(empty)
        unused.append(empty)
        update(optimizer, F.cross_entropy(logits, y))
    return ending(model)


@healthy
def nan_in_a_metric_only() -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    log: list[float] = []
    for _, x, y in batches():
        logits = model(x)
        predicted = logits.detach().argmax(1)
        hits = ((predicted == 5) & (y == 5)).sum()
        precision = hits / (predicted == 5).sum()
        spread = logits[:1].std(0, correction=0) / logits[:1].std(0, correction=0)
        log += [float(precision), spread.mean().item()]
        update(optimizer, F.cross_entropy(logits, y))
    assert all(math.isnan(value) for value in log)
    return ending(model)


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
def gradients_whose_norm_overflows() -> list[torch.Tensor]:
    weight = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([weight], lr=1e-21)
    for _ in range(STEPS):
        update(optimizer, (weight * 1e19).sum())
        assert not torch.isfinite(weight.grad.norm()) and torch.isfinite(weight.grad).all()
    return ending(weight)


@healthy
def half_gradients_whose_norm_overflows() -> list[torch.Tensor]:
    weight = nn.Parameter(torch.zeros(100_000, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (weight.float() * 300).mean() * 1e5
        loss.backward()
        assert torch.isfinite(weight.grad).all() and not torch.isfinite(weight.grad.sum())
        optimizer.step()
    return ending(weight)


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


@healthy
def evaluation_and_generation_between_steps() -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    written: list[torch.Tensor] = []
    for step, x, y in batches():
        update(optimizer, classify(model, x, y))
        if step % 2:
            continue
        model.eval()
        with torch.no_grad():
            score = classify(model, x, y) / torch.zeros(())
            assert torch.isinf(score)
        with torch.inference_mode():
            token = x[:1]
            for _ in range(3):
                logits = model(token)
                logits = logits.masked_fill(logits < logits.topk(1).values, -math.inf)
                drawn = torch.multinomial(logits.softmax(-1), 1)
                written.append(drawn)
                token = token + drawn
        model.train()
    return ending(model, written)


@healthy
def inference_mode_around_a_frozen_model() -> list[torch.Tensor]:
    frozen, model = net(1).eval(), plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in batches():
        with torch.inference_mode():
            hint = frozen(x).argmax(1)
        update(optimizer, F.cross_entropy(model(x), torch.where(x[:, 0] > 0, hint.clone(), y)))
    return ending(model, frozen)


@healthy
def sanity_validation_before_training() -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model.eval()
    with torch.no_grad():
        for _, x, y in batches(2, seed=9):
            assert torch.isnan(classify(model, x, y) * torch.full((), math.nan))
    model.train()
    for _, x, y in batches():
        update(optimizer, classify(model, x, y))
    return ending(model)


@healthy
def learning_rate_finder() -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    best = math.inf
    for _, x, y in batches(30):
        loss = classify(model, x, y)
        best = min(best, loss.item())
        if loss.item() > 4 * best:
            break
        update(optimizer, loss)
        for group in optimizer.param_groups:
            group["lr"] *= 3
    assert optimizer.param_groups[0]["lr"] > 1
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    for _, x, y in batches():
        update(optimizer, classify(model, x, y))
    return ending(model, optimizer)


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


def sparse_embedding(make: Callable[[Any], torch.optim.Optimizer]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    table, head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)
    optimizer, dense = make(table.parameters()), torch.optim.SGD(head.parameters(), lr=0.1)
    for step, x, y in batches():
        rows = ((x[:, 0].abs() * 10).long() + step) % 10
        optimizer.zero_grad()
        dense.zero_grad()
        F.cross_entropy(head(table(rows)), y).backward()
        assert table.weight.grad.is_sparse
        optimizer.step()
        dense.step()
    return ending(table, head, optimizer)


@healthy
def sparse_gradients_with_sparse_adam() -> list[torch.Tensor]:
    return sparse_embedding(lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.01))


@healthy
def sparse_gradients_with_sgd() -> list[torch.Tensor]:
    return sparse_embedding(lambda parameters: torch.optim.SGD(parameters, lr=0.1))


@healthy
def complex_parameters() -> list[torch.Tensor]:
    torch.manual_seed(0)
    filters = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64))
    optimizer = torch.optim.Adam([filters], lr=0.01)
    for _, x, _ in batches():
        update(optimizer, (torch.fft.rfft(x) * filters).abs().pow(2).mean())
    return ending(filters, optimizer)


@healthy
def shared_weights() -> list[torch.Tensor]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 4)
            self.body = nn.Linear(4, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.table.weight

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.table(rows)).tanh())

    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step, x, y in batches():
        update(optimizer, classify(model, (x[:, 0].abs() * 10 + step).long() % 6, y))
    return ending(model, optimizer)


# -- models that change ---------------------------------------------------------------------------------------------


@healthy
def a_layer_added_during_training() -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    for step, x, y in batches(10):
        if step == 5:
            new = nn.Linear(2, 2)
            model.append(new)
            optimizer.add_param_group({"params": new.parameters(), "lr": 1e-2})
        update(optimizer, classify(model, x, y))
    return ending(model, optimizer)


@healthy
def layers_unfrozen_during_training() -> list[torch.Tensor]:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, x, y in batches(10):
        if step == 5:
            model[0].requires_grad_(True)
        update(optimizer, classify(model, x, y))
    return ending(model, optimizer)


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


@healthy
def a_model_that_is_traced_between_steps() -> list[torch.Tensor]:
    model = plain_net()
    optimizer = torch.optim.Adam(model.parameters())
    outputs = []
    for step, x, y in batches(6):
        update(optimizer, classify(model, x, y))
        if step % 2:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                traced = torch.jit.trace(model, x)
            outputs.append(traced(x).sum())
    return ending(model, outputs)


@healthy
def functions_that_are_pickled() -> list[torch.Tensor]:
    model = plain_net()
    optimizer = torch.optim.Adam(model.parameters())
    for _, x, y in batches(4):
        clip = pickle.loads(pickle.dumps(functools.partial(torch.nn.utils.clip_grad_norm_, max_norm=0.1)))
        copy.deepcopy(optimizer)
        pickle.dumps((model, optimizer))
        assert pickle.loads(pickle.dumps(nn.Module.zero_grad)) is nn.Module.zero_grad
        classify(model, x, y).backward()
        clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return ending(model)


@healthy
def a_model_turned_to_bfloat16_and_to_half() -> list[torch.Tensor]:
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dtype = torch.float32
    for step, x, y in batches(12):
        if step == 4:
            dtype = torch.bfloat16
            model.bfloat16()
        if step == 8:
            dtype = torch.float16
            model.half()
        update(optimizer, classify(model, x.to(dtype), y))
    assert model[0].weight.dtype is torch.float16
    return ending(model)


@healthy
def a_weight_replaced_during_training() -> list[torch.Tensor]:
    model = plain_net()
    optimizer = torch.optim.Adam(model.parameters())
    for step, x, y in batches(10):
        if step == 5:
            model[2].weight = nn.Parameter(torch.randn(2, 8))
            optimizer = torch.optim.Adam(model.parameters())
        update(optimizer, classify(model, x, y))
    return ending(model)


# -- compiled, functional, threaded ---------------------------------------------------------------------------------


def compiled(backend: str) -> list[torch.Tensor]:
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


@healthy
def a_compiled_step() -> list[torch.Tensor]:
    torch._dynamo.reset()
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = classify(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo looks at `grad` of tensors that are no leaves
        for _, x, y in batches():
            step(x, y)
    return ending(model)


@pytest.mark.parametrize("watch", WATCHES)
def test_capture_does_not_make_a_compiled_model_compile_again(watch: str, tmp_path: Path) -> None:
    def num_graphs() -> int:
        count = CountingBackend()
        torch._dynamo.reset()
        model = plain_net()
        fast = torch.compile(model, backend=count)
        optimizer = torch.optim.Adam(model.parameters())
        for _, x, y in batches():
            update(optimizer, classify(fast, x, y))
        return count.num_graphs

    plain = num_graphs()
    with Session(directory=tmp_path, watch=watch):
        watched = num_graphs()
    assert plain == watched == 1


@healthy
def functional_training() -> list[torch.Tensor]:
    model = plain_net()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

    for _, x, y in batches():
        grads = torch.func.grad(loss_of)(weights, x, y)
        weights = {name: weight - 0.1 * grads[name] for name, weight in weights.items()}
    return ending(weights)


@healthy
def gradients_of_every_sample() -> list[torch.Tensor]:
    """As differential privacy does it: a gradient for each row, clipped, averaged."""
    model = plain_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    per_sample = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))
    for _, x, y in batches():
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        grads = per_sample(weights, x, y)
        for name, parameter in model.named_parameters():
            parameter.grad = grads[name].clamp(-1, 1).mean(0)
        optimizer.step()
    return ending(model)


@healthy
def training_in_another_thread() -> list[torch.Tensor]:
    result: list[torch.Tensor] = []

    def work() -> None:
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        for _, x, y in batches():
            update(optimizer, classify(model, x, y))
        result.extend(ending(model, optimizer))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert result
    return result


@healthy
def a_thread_that_evaluates_meanwhile() -> list[torch.Tensor]:
    model = plain_net()
    other = plain_net(3).eval()
    optimizer = torch.optim.Adam(model.parameters())
    for _, x, y in batches():
        with torch.no_grad():
            thread = threading.Thread(target=lambda x=x: other(x) / 0)
        thread.start()
        thread.join()
        update(optimizer, classify(model, x, y))
    return ending(model)


def test_nested_captures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def loop() -> list[torch.Tensor]:
        model = net()
        optimizer = torch.optim.Adam(model.parameters())
        inner: Any = contextlib.nullcontext()
        for step, x, y in batches(12):
            if step == 4:
                inner = reprokit.capture(tmp_path / "inner.pt")
                inner.__enter__()
            update(optimizer, classify(model, x, y))
            if step == 8:
                inner.__exit__(None, None, None)
        return ending(model, optimizer)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        check_silent(loop, tmp_path, capsys)


# -- what loops do beside the step ----------------------------------------------------------------------------------


def checkpointed(use_reentrant: bool) -> list[torch.Tensor]:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = net(), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=use_reentrant))

    model = Deep()
    optimizer = torch.optim.Adam(model.parameters())
    for _, x, y in batches():
        update(optimizer, classify(model, x.requires_grad_(), y))
    return ending(model)


@healthy
def reentrant_checkpointing() -> list[torch.Tensor]:
    return checkpointed(True)


@healthy
def checkpointing_without_reentry() -> list[torch.Tensor]:
    return checkpointed(False)


@healthy
def checkpointing_in_the_loop() -> list[torch.Tensor]:
    model, head = net(), nn.Linear(2, 2)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
    for _, x, y in batches():
        update(optimizer, F.cross_entropy(head(checkpoint(model, x, use_reentrant=False)), y))
    return ending(model, head)


@healthy
def clamped_weights_and_a_moving_average() -> list[torch.Tensor]:
    model = net()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    optimizer = torch.optim.RMSprop(model.parameters())
    for _, x, y in batches():
        update(optimizer, classify(model, x, y))
        average.update_parameters(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.3, 0.3)
    return ending(model, average)


@healthy
def a_target_network() -> list[torch.Tensor]:
    online, target = plain_net(), plain_net()
    optimizer = torch.optim.Adam(online.parameters())
    for step, x, action in batches(12):
        with torch.no_grad():
            wanted = x[:, 0] + 0.9 * target(x.roll(1, 0)).max(1).values
        value = online(x).gather(1, action[:, None]).squeeze(1)
        update(optimizer, F.smooth_l1_loss(value, wanted))
        if step % 4 == 3:
            target.load_state_dict(online.state_dict())
        if random.random() < 0.5:
            for old, new in zip(target.parameters(), online.parameters(), strict=True):
                old.data.mul_(0.99).add_(new.data, alpha=0.01)
    return ending(online, target)


@healthy
def schedules_and_accumulation() -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)
    for step in range(STEPS):
        for _, x, y in batches(4, seed=step):
            (classify(model, x, y) / 4).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return ending(model, optimizer)


@healthy
def two_optimizers() -> list[torch.Tensor]:
    torch.manual_seed(0)
    maker, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    train_maker, train_judge = torch.optim.Adam(maker.parameters()), torch.optim.SGD(judge.parameters(), lr=0.01)
    for step, x, _ in batches(12):
        fake = maker(torch.randn(8, 3))
        update(train_judge, F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean())
        if step % 3 == 0:
            update(train_maker, F.softplus(-judge(fake)).mean())
    return ending(maker, judge, train_maker)


@healthy
def a_line_search() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    for _, x, y in batches():

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = classify(model, x, y)  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(closure)
    return ending(model)


@pytest.mark.parametrize("action", ["always", "default"])
def test_warnings_of_torch_name_the_line_of_the_loop(action: Any, tmp_path: Path) -> None:
    """The same warnings, from the same places, so that filters by module and once-per-line work as without capture."""

    def warned() -> list[tuple[str, int, str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            model = plain_net()
            for _, x, y in batches(3):
                loss = classify(model, x, y)
                float(loss)  # torch warns from C++
                F.softmax(loss.expand(2, 2))  # and from Python, about its caller
            float(loss)
        return [(warning.filename, warning.lineno, str(warning.message)) for warning in caught]

    torch.set_warn_always(True)
    try:
        plain = warned()
        with Session(directory=tmp_path):
            watched = warned()
    finally:
        torch.set_warn_always(False)
    assert len(plain) == (7 if action == "always" else 3)
    assert watched == plain
