"""Training steps that fail, recorded from ordinary code: what the tests of the reducer start from."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from reprokit.locate.blame import locate
from reprokit.locate.failure import Failure
from reprokit.program.ir import Call, Input, Program, Ref
from reprokit.program.trace import InputName, Tracer, recording
from reprokit.render.script import write_script
from reprokit.shrink.reducer import shrink
from reprokit.shrink.reduction import Reduction
from reprokit.snapshot.format import Snapshot

INF = float("inf")
Step = Callable[[], Snapshot]
minimum_of = partial(shrink, with_piece=False)  # looking for the piece of the model costs more than the minimum


def record(step: Callable[..., Any], **tensors: torch.Tensor) -> Snapshot:
    """A snapshot of a function of named tensors that fails. A tensor it returns is looked at in the end."""
    return snapshot_of(*_traced(step, tensors))


def traced(step: Callable[..., Any], **tensors: torch.Tensor) -> Snapshot:
    """The same of a function that need not fail; another check than the recorded failure is then what counts."""
    program, inputs = _traced(step, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        failure = locate(program, inputs)
    return Snapshot(program, inputs, failure or Failure("forward", "nan", "nan"), 0, 0, "loss")


def _traced(step: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> tuple[Program, dict[int, torch.Tensor]]:
    names = {id(tensor): InputName(name) for name, tensor in tensors.items()}
    tracer = Tracer(lambda tensor: names.get(id(tensor)))
    outputs: tuple[int, ...] = ()
    with recording(tracer), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = step(**tensors)
        except Exception:
            result = None
    if isinstance(result, torch.Tensor):
        value = tracer.value_of(result)
        outputs = (value,) if value is not None else ()
    return tracer.program(outputs), dict(tracer.tensors)


def snapshot_of(program: Program, tensors: dict[int, torch.Tensor]) -> Snapshot:
    """A snapshot of a program that fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        failure = locate(program, tensors)
    assert failure is not None, "the step does not fail"
    return Snapshot(program, tensors, failure, 0, 0, "loss")


def seeded(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers that are the same every time."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    return numbers.requires_grad_(grad)


def masked_softmax() -> Snapshot:
    """A fully masked row of attention among 50 calls."""

    def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for _ in range(15):
            x = torch.tanh(x * 1.01) + 0.1
        scores = (x @ x.transpose(1, 2)).masked_fill(mask, -INF)
        return (F.softmax(scores, dim=-1) @ x).relu().sum()

    mask = torch.zeros(3, 7, 7, dtype=torch.bool)
    mask[1, 4] = True
    return record(step, x=seeded(3, 7, 8), mask=mask)


def asked_for_infinity() -> Snapshot:
    """The origin itself is told to fill in what is bad, behind calls that have no part in it."""
    return record(lambda x: torch.tanh(x * 2.0).masked_fill(x > 0, -INF).sum(), x=seeded(4, 5))


def zero_times_log_zero() -> Snapshot:
    """0 * log 0."""
    return record(lambda p: (p * p.log()).sum(), p=torch.tensor([0.2, 0.8, 0.0, 0.5]))


def zero_by_zero() -> Snapshot:
    """A mean over nothing."""
    return record(
        lambda loss, mask: ((loss * mask).sum() / mask.sum()).exp(), loss=seeded(6, 5), mask=torch.zeros(6, 5)
    )


def half_linear_overflow() -> Snapshot:
    """A layer whose products overflow half precision."""
    x, weight = seeded(32, 64).mul(60).half(), seeded(48, 64).mul(60).half()
    return record(
        lambda x, weight, bias: F.linear(F.relu(x), weight, bias).sum(), x=x, weight=weight, bias=weight[:, 0]
    )


def half_sum_overflow() -> Snapshot:
    """A sum that is too large for half precision, of elements that are not."""
    return record(lambda x: torch.sum(x * 1.0), x=torch.full((300, 500), 1.5).half())


def sqrt_gradient() -> Snapshot:
    """The gradient of a norm at zero."""
    x = seeded(4, 6).index_fill(0, torch.tensor([2]), 0.0).requires_grad_()
    return record(lambda x: (x**2).sum(dim=1).sqrt().mean().backward(), x=x)


def logsumexp_gradient() -> Snapshot:
    """The gradient of a log-sum-exp over nothing but ``-inf``."""

    def step(x: torch.Tensor) -> None:
        out = torch.logsumexp(x + torch.tensor([0.0, -INF, 0.0])[:, None], dim=1)
        torch.where(out.isinf(), torch.zeros_like(out), out).sum().backward()

    return record(step, x=seeded(3, 5, grad=True))


def eigh_gradient() -> Snapshot:
    """The gradient of eigenvectors that are not unique."""

    def step(x: torch.Tensor) -> None:
        values, vectors = torch.linalg.eigh(x @ x.T)
        (values.sum() + (vectors * torch.arange(6.0)[:, None]).sum()).backward()

    return record(step, x=torch.eye(6).requires_grad_())


def where_gradient() -> Snapshot:
    """The gradient of the branch that was not taken."""

    def step(x: torch.Tensor) -> None:
        torch.where(x > 0, x, torch.exp(-x) - 1).mean().backward()

    return record(step, x=torch.tensor([[1.0, 2.0, -200.0], [0.5, -0.5, 3.0]]).requires_grad_())


def label_smoothing() -> Snapshot:
    """Cross entropy with label smoothing over impossible classes."""
    logits = seeded(16, 9)
    logits[:, 3] = -INF
    target = torch.arange(16) % 3
    return record(lambda x, target: F.cross_entropy(x * 2, target, label_smoothing=0.2), x=logits, target=target)


def adam_half() -> Snapshot:
    """Adam in half precision, where eps is zero."""
    tensors = {
        0: seeded(8, 5).half(),
        1: seeded(3).half(),
        2: seeded(8, 5).half().index_fill(0, torch.tensor([4]), 0.0),
        3: seeded(3).half(),
        4: torch.tensor(3.0),
        5: torch.zeros(8, 5).half(),
        6: torch.zeros(8, 5).half(),
    }
    kwargs = {
        "params": [[Ref(0), Ref(1)]],
        "grads": [[Ref(2), Ref(3)]],
        "options": [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}],
        "state": [[{"step": Ref(4), "exp_avg": Ref(5), "exp_avg_sq": Ref(6)}, {}]],
    }
    inputs = [Input(0, "fc.weight", "parameter", True), Input(1, "fc.bias", "parameter", True)]
    inputs += [Input(2, "g", "gradient"), Input(3, "h", "gradient")]
    inputs += [Input(4, "step", "state"), Input(5, "exp_avg", "state"), Input(6, "exp_avg_sq", "state")]
    return snapshot_of(Program((Call("torch.optim.Adam.step", (), kwargs, phase="optimizer"),), tuple(inputs)), tensors)


def layer_norm_half() -> Snapshot:
    """An embedding whose squares overflow inside a normalisation."""

    def step(index: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(index, table)
        return (rows * rows).mean(dim=-1)

    table = seeded(20, 8).half()
    table[13] = 500.0
    return record(step, index=torch.tensor([[1, 5, 13], [4, 0, 2]]), table=table)


def in_place_gradient() -> Snapshot:
    """The gradient of an in-place square root, which cannot start from a leaf."""
    return record(lambda x: (x * 1.0).sqrt_().mean().backward(), x=torch.tensor([1.0, 0.0, 4.0]).requires_grad_())


def gradients_added_up() -> Snapshot:
    """Two finite gradients whose sum is too large."""

    def step(x: torch.Tensor) -> None:
        (torch.tanh(x) * 60000.0).sum().backward()
        (torch.tanh(x) * 60000.0).sum().backward()

    return record(step, x=torch.zeros(6, dtype=torch.float16, requires_grad=True))


def accumulated_gradients() -> Snapshot:
    """The same two among gradients of batches that add nothing, before and between them."""

    def step(x: torch.Tensor) -> None:
        for factor in (0.0, 60000.0, 1.0, 60000.0):
            (torch.tanh(x) * factor).sum().backward()

    return record(step, x=torch.zeros(6, dtype=torch.float16, requires_grad=True))


def gradient_penalty() -> Snapshot:
    """A second derivative that does not exist."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> None:
        out = (F.relu(x @ weight).sum(dim=1) * 0.0).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        ((grad**2).sum(dim=1).sqrt() - 1).pow(2).mean().backward()

    return record(step, x=seeded(4, 3, grad=True), weight=seeded(3, 5, grad=True))


def loss_scaled_twice() -> Snapshot:
    """Gradients of a chain with several leaves that overflow where they are added up."""

    def step(x: torch.Tensor, weight: torch.Tensor) -> None:
        hidden = x
        for _ in range(6):
            hidden = torch.tanh(F.linear(hidden, weight))
        scale = torch.exp(weight.sum() * 0) * 60000
        for _ in range(2):
            ((weight * scale).sum() + hidden.sum() * 0).backward(retain_graph=True)

    return record(step, x=torch.zeros(3, 4).half(), weight=torch.zeros(4, 4).half().requires_grad_())


def singular_matrix() -> Snapshot:
    """An exception: the inverse of a singular matrix."""
    return record(lambda x: torch.linalg.inv((x @ x.T) * 0.0).sum(), x=seeded(5, 3))


def wrong_shapes() -> Snapshot:
    """An exception: sizes that do not match."""

    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) @ torch.ones(4, 5)

    return record(lambda x: Wrong()(x).sum(), x=seeded(7, 3))


def bad_batch() -> Snapshot:
    """A NaN that was in the batch from the start."""
    batch = seeded(8, 6)
    batch[3, 2] = float("nan")
    return record(lambda batch, weight: F.linear(batch, weight).relu().mean(), batch=batch, weight=seeded(4, 6))


def gated_recurrence() -> Snapshot:
    """A recurrent layer whose gates belong together in one weight."""
    layer = nn.LSTM(5, 7, num_layers=2, batch_first=True)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.mul_(0.0)
    x = seeded(3, 4, 5).clone()

    def step(x: torch.Tensor) -> torch.Tensor:
        out, _ = layer(x)
        return (out / out.abs().sum()).sum()

    return record(step, x=x)


def chosen_column() -> Snapshot:
    """A column picked by number, and its logarithm."""
    x = seeded(5, 9).abs()
    x[2, 7] = 0.0
    return record(lambda x: x[:, 7].log().mean(), x=x)


def missing_label(function: Callable[[torch.Tensor], torch.Tensor]) -> Snapshot:
    """A NaN marks labels that are missing; `where` drops it in the forward pass and not in the backward pass."""

    def step(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> None:
        mask = ~torch.isnan(target)
        prediction = torch.tanh(x @ weight) + 0.1
        loss = torch.where(mask, function(prediction - target), torch.zeros(())).sum() / mask.sum()
        loss.backward()  # type: ignore[no-untyped-call]

    target = seeded(6, 3)
    target[2, 1] = target[4, 0] = float("nan")
    return record(step, x=seeded(6, 5), weight=seeded(5, 3, grad=True), target=target)


def ruined_teacher(num_layers: int) -> Snapshot:
    """A student learns from a teacher whose parameters are all NaN."""

    def step(x: torch.Tensor, student: torch.Tensor, **teacher: torch.Tensor) -> None:
        target = x
        for layer in range(num_layers):
            target = torch.tanh(F.linear(target, teacher[f"weight{layer}"], teacher[f"bias{layer}"]))
        F.mse_loss(torch.tanh(x @ student), target).backward()  # type: ignore[no-untyped-call]

    shapes = {"weight": (4, 4), "bias": (4,)}
    bad = {f"{name}{n}": torch.full(shape, float("nan")) for n in range(num_layers) for name, shape in shapes.items()}
    return record(step, x=seeded(3, 4), student=seeded(4, 4, grad=True), **bad)


def labels_in_one_row() -> Snapshot:
    """CTC labels of four samples in one row, those of one sample longer than its input."""

    def step(x: torch.Tensor, labels: torch.Tensor, sizes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(x.log_softmax(-1), labels, sizes, lengths)

    lengths = torch.tensor([3, 4, 12, 4])
    labels = torch.arange(int(lengths.sum())) % 10 + 1
    return record(step, x=seeded(10, 4, 11), labels=labels, sizes=torch.full((4,), 10), lengths=lengths)


def ending_of(reduction: Reduction) -> str:
    """How the repro ends: the name of the exception it ends with, or ``passes``. It may need no side file."""
    script = write_script(reduction.program, reduction.tensors, reduction.failure)
    assert not script.side
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            exec(compile(script.text, "repro.py", "exec"), {"__name__": "__main__"})
        except (Exception, SystemExit) as error:
            return type(error).__name__
    return "passes"
