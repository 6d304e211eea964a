"""A recorded step, stored as plain data and run again, gives the loss and every gradient bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reprokit.program import plain
from reprokit.program.interpreter import run
from reprokit.program.ir import OPAQUE, Program
from reprokit.program.trace import InputName, Tracer, recording

transformers = pytest.importorskip("transformers")

IDS = torch.tensor([[3, 7, 7, 1, 40, 2, 9], [5, 5, 6, 11, 30, 8, 4]])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def record(model: nn.Module, compute_loss: Callable[[], torch.Tensor]) -> tuple[Program, Tracer, torch.Tensor]:
    names = {id(p): InputName(name, "parameter") for name, p in model.named_parameters()}
    names |= {id(b): InputName(name, "buffer") for name, b in model.named_buffers()}
    tracer = Tracer(lambda tensor: names.get(id(tensor)))
    with recording(tracer):
        loss = compute_loss()
        loss.backward()
    return plain.from_plain(plain.to_plain(tracer.program())), tracer, loss


def assert_replays(model: nn.Module, compute_loss: Callable[[], torch.Tensor]) -> Program:
    program, tracer, loss = record(model, compute_loss)
    value = tracer.value_of(loss)
    assert value is not None
    before = torch.get_rng_state()
    for _ in range(2):  # twice: the first run must not have changed the recorded tensors
        outcome = run(program, tracer.tensors, keep=frozenset([value]))
        assert outcome.error is None
        assert same_bits(outcome.values[value].detach(), loss.detach())
        inputs = {item.name: item.value for item in program.inputs if item.role == "parameter"}
        compared = 0
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert same_bits(outcome.gradients[inputs[name]], parameter.grad), name
                compared += 1
        assert compared == sum(p.grad is not None for p in model.parameters()) > 0
    assert torch.equal(before, torch.get_rng_state())
    return program


class Recurrent(nn.Module):
    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__()
        self.rnn = cls(4, 8, 2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class LoopOverSteps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.size(1), 6)
        for frame in x:
            h = self.cell(frame, h)
        return h


def square(output: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).mean()


PLAIN: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), lambda: torch.randn(3, 4)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.5),
            nn.Hardswish(), nn.Flatten(),
            nn.Linear(36, 2),
        ),
        lambda: torch.randn(3, 1, 8, 8),
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), lambda: torch.randn(2, 5, 4)),
    "gru": (lambda: Recurrent(nn.GRU), lambda: torch.randn(2, 5, 4)),
    "loop over a tensor": (LoopOverSteps, lambda: torch.randn(3, 2, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_plain_models(name: str) -> None:
    torch.manual_seed(0)
    make, batch = PLAIN[name]
    model, x = make(), batch()
    assert_replays(model, lambda: square(model(x)))


def test_transformer_encoder_with_padding_mask() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    x = torch.randn(2, 5, 16)
    program = assert_replays(model, lambda: square(model(x, src_key_padding_mask=mask)))
    assert not any(call.target == OPAQUE for call in program.calls)
    assert any(call.scope and call.scope[-1].path == "layers.1.self_attn" for call in program.calls)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


TEXT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "gpt2": (gpt2, {}),
    "t5": (t5, {}),
}


@pytest.mark.parametrize("name", TEXT)
def test_transformers_text_models(name: str) -> None:
    torch.manual_seed(0)
    make, extra = TEXT[name]
    model = make().train()
    assert_replays(model, lambda: model(input_ids=IDS, labels=IDS, **extra).loss)


def test_autocast_and_no_grad_modes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    x = torch.randn(4, 8)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            target = model(x).sigmoid()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        return F.mse_loss(output.float(), target)

    program = assert_replays(model, loss)
    modes = {call.mode for call in program.calls}
    assert {mode.grad for mode in modes} == {True, False}
    assert {mode.autocast for mode in modes} == {(), (("cpu", "torch.bfloat16"),)}


def test_in_place_views_and_setitem() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    kept = x.clone()

    def loss() -> torch.Tensor:
        x[1:].mul_(2.0)
        y = model(x)
        z = y.clone()
        z[:, 0] = 1.0
        z.view(-1)[2:5].add_(y.view(-1)[2:5])
        return square(z)

    program, tracer, total = record(model, loss)
    batch = next(item for item in program.inputs if item.role == "batch")
    assert same_bits(tracer.tensors[batch.value], kept)  # the value before the step wrote into it
    value = tracer.value_of(total)
    assert value is not None
    assert same_bits(run(program, tracer.tensors, keep=frozenset([value])).values[value].detach(), total.detach())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_is_seen_through(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    x = torch.randn(3, 4, requires_grad=True)
    program = assert_replays(
        inner, lambda: square(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=use_reentrant))
    )
    assert not any(call.target == OPAQUE for call in program.calls)
    assert any(call.name == "tanh" for call in program.calls)
