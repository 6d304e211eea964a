"""A small step for every rule, that fails by just that mechanism; and for each a near miss."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from reprokit.compare.quantity import measured
from reprokit.locate.failure import Failure, Predicate
from reprokit.program.ir import Call, Input, Program, Ref
from reprokit.series.story import StepNumbers
from reprokit.snapshot.format import Snapshot
from tests.shrink.failing import INF, record, seeded, snapshot_of, traced

NAN = float("nan")
Make = Callable[[], Snapshot]


def leaf(*numbers: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype).requires_grad_()


def step(compute: Callable[..., torch.Tensor], **tensors: torch.Tensor) -> Make:
    """A step that computes a loss and, when something needs a gradient, differentiates it."""

    def run(**given: torch.Tensor) -> torch.Tensor | None:
        loss = compute(**given)
        if not loss.requires_grad:
            return loss
        (loss if loss.dim() == 0 else loss.sum()).backward()
        return None

    def copies() -> dict[str, torch.Tensor]:
        return {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in tensors.items()}

    return lambda: record(run, **copies())  # a step may write into what it is given


def optimizer(name: str, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], **options: Any) -> Make:
    return lambda: snapshot_of(*optimizer_step(name, param, grad, state, **options))


def optimizer_step(
    name: str, param: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], **options: Any
) -> tuple[Program, dict[int, torch.Tensor]]:
    tensors = [param, grad, *state.values()]
    names = ["weight", "grad", *state]
    roles = ["parameter", "gradient", *("state" for _ in state)]
    inputs = [
        Input(n, name, role, role == "parameter") for n, (name, role) in enumerate(zip(names, roles, strict=True))
    ]
    kwargs = {
        "params": [[Ref(0)]], "grads": [[Ref(1)]], "options": [options],
        "state": [[{key: Ref(2 + n) for n, key in enumerate(state)}]],
    }  # fmt: skip
    call = Call(f"torch.optim.{name}.step", (), kwargs, phase="optimizer")
    return Program((call,), tuple(inputs)), dict(enumerate(tensors))


def adam(dtype: torch.dtype, *, grad: float, second: float, eps: float, lr: float = 1e-3) -> Make:
    one = torch.ones(2, dtype=dtype)
    state = {"step": torch.tensor(3.0), "exp_avg": one * 0 + grad, "exp_avg_sq": one * 0 + second}
    options = {"lr": lr, "betas": (0.9, 0.999), "eps": eps, "weight_decay": 0.0, "amsgrad": False}
    return optimizer("Adam", one, one * grad, state, **options)


def sgd(lr: float, *, grad: float = 1e30, dtype: torch.dtype = torch.float32) -> Make:
    return optimizer("SGD", torch.ones(2, dtype=dtype), torch.full((2,), grad, dtype=dtype), {}, lr=lr)


def bad_input(role: str) -> Make:
    def make() -> Snapshot:
        inputs = (Input(0, "image", role), Input(1, "weight"))
        program = Program((Call("torch.Tensor.mul", (Ref(0), Ref(1)), outputs=Ref(2)),), inputs, (Ref(2),))
        return snapshot_of(program, {0: torch.tensor([1.0, NAN]), 1: torch.ones(2)})

    return make


def with_timeline(make: Make, **series: list[float]) -> Make:
    def made() -> Snapshot:
        length = len(next(iter(series.values())))
        rows = [StepNumbers(n, **{"lr": 0.1, **{name: s[n] for name, s in series.items()}}) for n in range(length)]
        return replace(make(), timeline=rows)

    return made


def own_update() -> Snapshot:
    """An update rule written by hand, which divides by a running size."""
    inputs = (Input(0, "weight", "parameter"), Input(1, "grad", "gradient"), Input(2, "size", "state"))
    calls = (
        Call("torch.Tensor.sqrt", (Ref(2),), outputs=Ref(3), phase="optimizer"),
        Call("torch.Tensor.div", (Ref(1), Ref(3)), outputs=Ref(4), phase="optimizer"),
        Call("torch.Tensor.sub", (Ref(0), Ref(4)), outputs=Ref(5), phase="optimizer"),
    )
    tensors = {0: torch.ones(2), 1: torch.tensor([1.0, 0.0]), 2: torch.tensor([1.0, 0.0])}
    return snapshot_of(Program(calls, inputs, (Ref(5),)), tensors)


def unknown() -> Snapshot:
    """A failure that no rule knows."""
    return record(lambda x: torch.special.zeta(x, x), x=torch.tensor([1.0]))


def with_bystanders(snapshot: Snapshot) -> Snapshot:
    """The step with a part that its failure does not depend on: a batch with an outlying row through layers that grow,
    a huge parameter, and a mask over the origin's result that is no part of the loss."""
    program, failure = snapshot.program, snapshot.failure
    data, free = torch.ones(8, 3), program.next_value()
    data[2] *= 6000.0
    inputs = (Input(free, "aside", "batch"), Input(free + 1, "huge", "parameter"))
    operands = [free, *range(free + 2, free + 6)]
    pairs = itertools.pairwise(operands)
    layers = (Call("torch.matmul", (Ref(one), Ref(free + 1)), outputs=Ref(next_one)) for one, next_one in pairs)
    after = failure.call_index + 1 if failure.call_index is not None and failure.exception is None else 0
    made = program.calls[after - 1].output_refs()[:1] if after else ()
    test = [Call("torch.ne", (Ref(value), 5.0), outputs=Ref(free + 8)) for value in made]
    drop = [Call("torch.where", (Ref(free + 8), 0.0, Ref(value)), outputs=Ref(free + 9)) for value in made]
    calls = (*layers, *program.calls[:after], *test, *drop, *program.calls[after:])
    changed = replace(program, calls=calls, inputs=(*program.inputs, *inputs))
    tensors = {**snapshot.tensors, free: data, free + 1: torch.eye(3) * 1e7}
    if failure.event is not None:
        moved = failure.call_index + len(operands) - 1 if failure.call_index is not None else None
        return replace(snapshot, program=changed, tensors=tensors, failure=replace(failure, call_index=moved))
    return replace(snapshot_of(changed, tensors), timeline=snapshot.timeline)


def event(
    compute: Callable[..., torch.Tensor], kind: str, quantity: str, origin: str, threshold: float, **more: Any
) -> Make:
    """A step with an event at the first call of this name; ``more`` are its tensors, and fields of the predicate."""
    tensors = {name: more.pop(name) for name in list(more) if isinstance(more[name], torch.Tensor)}
    roles = {name: "parameter" if tensor.requires_grad else "batch" for name, tensor in tensors.items()}

    def make() -> Snapshot:
        given = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in tensors.items()}
        found = traced(lambda **x: compute(**x).backward(), **given)
        inputs = tuple(replace(item, role=roles[item.name]) for item in found.program.inputs)
        program = replace(found.program, inputs=inputs)
        index = next(n for n, call in enumerate(program.calls) if call.name == origin)
        value = next((item.value for item in inputs if item.role == "parameter"), None)
        failure = Failure("backward" if kind == "dead" else "forward", kind, call=origin, call_index=index, value=value)
        failure = replace(failure, event=Predicate(quantity, threshold, threshold, 10, 11, **more))
        seen = measured(program, found.tensors, failure)
        assert seen is not None and seen >= threshold
        return replace(found, program=program, failure=replace(failure, event=replace(failure.event, value=seen)))

    return make


def squared(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(x @ weight, y)


def spike(**more: Any) -> Make:
    """The loss of eight rows, of which labels may be wrong."""
    given = {"x": seeded(8, 3), "y": torch.ones(8, 1), "weight": seeded(3, 1, grad=True), **more}
    return event(squared, "spike", "loss", "mse_loss", 100.0, **given)


def dead(compute: Callable[..., torch.Tensor], origin: str, **tensors: torch.Tensor) -> Make:
    """A weight without a gradient."""
    given = {"weight": seeded(4, 3, grad=True), "x": seeded(5, 3), **tensors}
    return event(compute, "dead", "share of zeros", origin, 1.0, source="weight", **given)


def dead_relu(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    return (F.relu(F.linear(x, weight, bias)) @ last).sum()


def unlearned(detach: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A layer whose result ``detach`` takes out of the graph; another one learns."""
    return lambda weight, x, last: (detach(F.linear(x, weight)) @ last).sum()


def large_update(lr: float, *, grad: float, rates: list[float]) -> Make:
    """An update of half the parameter's size, at this learning rate."""

    event = Predicate("update", lr * grad, 0.01, 10, 11)
    failure = Failure("optimizer", "spike", call="torch.optim.SGD.step", call_index=0, value=0, event=event)
    step = optimizer_step("SGD", torch.ones(2), torch.full((2,), grad), {}, lr=lr)
    return with_timeline(lambda: Snapshot(*step, failure, 11, 0, "parameter"), lr=rates)


def raising(call: Callable[..., Any], **tensors: torch.Tensor) -> Make:
    return lambda: record(call, **tensors)


def written_leaf(x: torch.Tensor) -> None:
    x[0] = 0.0
    x.sum().backward()


def half(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float16)


def autocast_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return F.linear(x, weight)


HIDDEN = torch.tensor([[False, False], [True, True]])
GRAPH = torch.eye(3).requires_grad_()

CASES: dict[str, Make] = {
    "where-trap": step(lambda x: torch.where(x > 0, x.log(), x).sum(), x=leaf(0.0, 2.0)),
    "missing-values-masked-late": step(
        lambda x, y: torch.where(y.isnan(), 0.0, (x - y.float().flatten()) ** 2).sum(), x=leaf(1.0, 2.0),
        y=torch.tensor([[NAN, 1.0]])),
    "dropped-nan": step(lambda x: torch.where(x > 0, torch.special.ndtri(x), x).sum(), x=leaf(0.5, -2.0)),
    "sqrt-gradient-at-zero": step(lambda x: (x * x).sum(-1).sqrt(), x=leaf(0.0, 0.0)),
    "pow-gradient-at-zero": step(lambda x: (x**0.5).sum(), x=leaf(0.0, 1.0)),
    "acos-gradient-at-one": step(lambda x: torch.acos(x.clamp(-1, 1)).sum(), x=leaf(1.0, 0.5)),
    "pole-gradient-at-zero": step(lambda x: (1 / x).clamp(max=5.0).sum(), x=leaf(0.0, 2.0)),
    "logsumexp-gradient": step(
        lambda x: torch.logsumexp(x + torch.zeros(2, 2).masked_fill(HIDDEN, -INF), 1).clamp(min=-9.0).sum(),
        x=seeded(2, 2, grad=True)
    ),
    "half-operand-overflow": step(lambda x, w: autocast_linear(x, w).sum(), x=torch.full((1, 4), 7e4),
                                  w=torch.full((1, 4), 1e-3)),
    "cosine-similarity-gradient": step(
        lambda x, y: (F.cosine_similarity(x, y, eps=1e-36) * 1e8).sum(), x=torch.zeros(1, 3).requires_grad_(),
        y=torch.ones(1, 3)),
    "half-overflow": step(lambda x, w: F.linear(x, w).sum(), x=torch.full((1, 4), 300.0).half(),
                          w=torch.full((1, 4), 300.0).half()),
    "half-normalize-eps": step(lambda x: F.normalize(x, dim=1).sum(), x=torch.zeros(1, 3).half()),
    "half-eps-lost": step(lambda x, y: x / (y + 1e-8), x=half(0.0, 1.0), y=half(0.0, 1.0)),
    "log-of-negative": step(lambda x: x.log(), x=torch.tensor([-1.0, 1.0])),
    "log1p-below-minus-one": step(lambda x: x.log1p(), x=torch.tensor([-1.0, 1.0])),
    "zero-times-log-zero": step(lambda x, p: (x * p.log()).sum(), x=torch.tensor([0.0, 1.0]),
                                p=torch.tensor([0.0, 0.5])),
    "log-of-zero": step(lambda x: x.log(), x=torch.tensor([0.0, 1.0])),
    "sqrt-of-negative": step(lambda x: x.sqrt(), x=torch.tensor([-1.0, 1.0])),
    "rsqrt-of-zero": step(lambda x: x.rsqrt(), x=torch.tensor([0.0, 1.0])),
    "arc-outside": step(lambda x: x.acos(), x=torch.tensor([1.5, 0.5])),
    "fractional-power-of-negative": step(lambda x: x**0.5, x=torch.tensor([-1.0, 2.0])),
    "negative-power-of-zero": step(lambda x: x**-0.5, x=torch.tensor([0.0, 2.0])),
    "fully-masked-softmax": step(lambda x: F.softmax(x.masked_fill(HIDDEN, -INF), -1), x=torch.zeros(2, 2)),
    "softmax-of-infinity": step(lambda x: F.softmax(x.masked_fill(HIDDEN, INF), -1), x=torch.zeros(2, 2)),
    "label-smoothing-masked-logits": step(
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), x=torch.tensor([[-INF, 0.0]]), y=torch.tensor([1])),
    "log-of-softmax": step(lambda x: torch.log(F.softmax(x, -1)), x=torch.tensor([-300.0, 0.0])),
    "optimizer-eps-lost": adam(torch.float16, grad=0.0, second=0.0, eps=1e-8),
    "optimizer-eps-zero": adam(torch.float32, grad=0.0, second=0.0, eps=0.0),
    "bad-hyperparameter": sgd(NAN, grad=1.0),
    "huge-learning-rate": sgd(1e30),
    "update-without-eps": own_update,
    "average-over-nothing": step(lambda x, m: (x * m).sum() / m.sum(), x=seeded(4), m=torch.zeros(4)),
    "normalise-zero-vector": step(lambda x: x / x.norm(dim=-1, keepdim=True), x=torch.tensor([[0.0, 0.0], [3.0, 4.0]])),
    "standardise-constant": step(lambda x: (x - x.mean()) / x.std(), x=torch.ones(4)),
    "exponentials-underflowed": step(lambda x: x.exp() / x.exp().sum(1, keepdim=True), x=torch.full((2, 2), -200.0)),
    "zero-by-zero": step(lambda x, y: x / y, x=torch.tensor([0.0, 1.0]), y=torch.tensor([0.0, 1.0])),
    "division-by-zero": step(lambda x, y: x / y, x=torch.tensor([2.0, 1.0]), y=torch.tensor([0.0, 1.0])),
    "weight-norm-of-zero": step(
        lambda v, g: torch._weight_norm(v, g, 0), v=torch.tensor([[0.0, 0.0], [1.0, 1.0]]), g=torch.ones(2, 1)),
    "in-place-on-saved": raising(lambda x: (torch.sigmoid(x).add_(1.0) ** 2).sum().backward(), x=leaf(1.0, 2.0)),
    "backward-twice": raising(
        lambda x: ((h := x.exp()).sum().backward(), (h * x).sum().backward())[1], x=leaf(1.0, 2.0)),
    "std-of-one": step(lambda x: x.std(), x=torch.ones(1)),
    "mean-of-nothing": step(lambda x, m: x[m].mean(), x=seeded(3), m=torch.zeros(3, dtype=torch.bool)),
    "batch-norm-of-one": raising(
        lambda x, mean, var: F.batch_norm(x, mean, var, training=True), x=seeded(1, 3), mean=torch.zeros(3),
        var=torch.ones(3)),
    "all-targets-ignored": step(
        lambda x, y: F.cross_entropy(x, y), x=seeded(2, 3, grad=True), y=torch.tensor([-100, -100])),
    "no-target-counts": step(
        lambda x, y: F.cross_entropy(x, y, reduction="sum") / (y >= 0).sum(), x=seeded(2, 3, grad=True),
        y=torch.tensor([-100, -100])),
    "batch-norm-negative-variance": step(
        lambda x, mean, var: F.batch_norm(x, mean, var), x=seeded(2, 2, grad=True), mean=torch.zeros(2),
        var=torch.tensor([1.0, -0.5])),
    "ctc-target-too-long": step(
        lambda x: F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 1, 2]]), torch.tensor([3]), torch.tensor([3])),
        x=seeded(3, 1, 4, grad=True)),
    "index-outside": raising(lambda x, i: x.gather(1, i), x=seeded(2, 3), i=torch.tensor([[5], [0]])),
    "empty-sequence": raising(
        lambda x, n: torch.nn.utils.rnn.pack_padded_sequence(x, n, enforce_sorted=False), x=seeded(3, 2, 4),
        n=torch.tensor([3, 0])),
    "dtype-mismatch": raising(
        lambda x, y: F.linear(x, y), x=seeded(2, 3).double(), y=torch.nn.Parameter(seeded(4, 3))),
    "length-mismatch": raising(lambda x, y: x @ y, x=seeded(2, 3), y=seeded(2, 3)),
    "repeated-eigenvalues": step(lambda x: torch.linalg.eigh(x)[1].sum(), x=GRAPH),
    "cholesky-not-positive": raising(lambda x: torch.linalg.cholesky(x), x=torch.ones(2, 2)),
    "bad-data": bad_input("batch"),
    "in-place-on-leaf": raising(written_leaf, x=leaf(1.0, 2.0)),
    "bad-parameter": bad_input("parameter"),
    "not-followed": bad_input("opaque"),
    "exp-overflow": step(lambda x: x.exp(), x=torch.tensor([100.0, 1.0])),
    "log-rate-overflow": step(lambda x, y: F.poisson_nll_loss(x, y), x=torch.tensor([100.0, 1.0]), y=torch.ones(2)),
    "exp-then-normalised": step(lambda x: (q := x.exp()) / q.sum(), x=torch.tensor([100.0, 1.0])),
    "learning-rate-divergence": with_timeline(
        step(lambda x, y: x @ y, x=torch.full((2, 2), 1e25), y=torch.full((2, 2), 1e25)),
        loss=[1.0, 2.0, 30.0, 4e4, 1e9]),
    "huge-parameters": lambda: snapshot_of(
        Program((Call("torch.Tensor.mul", (Ref(0), Ref(1)), outputs=Ref(2)),),
                (Input(0, "weight", "parameter"), Input(1, "x")), (Ref(2),)),
        {0: torch.tensor([1e30]), 1: torch.tensor([1e20])}),
    "overflow": step(lambda x, y: x * y, x=torch.tensor([1e30]), y=torch.tensor([1e30])),
    "arithmetic-with-infinity": step(
        lambda x, m: x.masked_fill(m, INF) - x.masked_fill(m, INF), x=torch.zeros(2), m=torch.tensor([True, False])),
    "exploding-gradients": step(lambda x: (x * 1e30 * 1e30).sum(), x=leaf(1e-30)),
    "batch-carries-event": spike(y=torch.full((8, 1), 1e3), rows="rows 0-7", source="y"),
    "parameter-carries-event": spike(weight=seeded(3, 1).mul(100).requires_grad_(), source="weight"),
    "learning-rate-jump": large_update(1.0, grad=0.1, rates=[*[0.01] * 11, 1.0]),
    "dead-relu-bias": dead(dead_relu, "relu", bias=torch.full((4,), -99.0).requires_grad_(),
                           last=seeded(4, 1, grad=True)),
    "dead-relu": dead(dead_relu, "relu", weight=seeded(4, 3).abs().neg().mul(3).requires_grad_(), x=seeded(5, 3).abs(),
                      bias=torch.full((4,), -0.1).requires_grad_(), last=seeded(4, 1, grad=True)),
    "cut-from-graph": dead(unlearned(torch.Tensor.detach), "detach", last=seeded(4, 1, grad=True)),
}  # fmt: skip

# A step that fails in nearly the same way, but by another mechanism.
MISSES: dict[str, Make] = {
    "where-trap": step(lambda x: torch.where(x >= 0, x.log1p().sqrt(), x).sum(), x=leaf(0.0, 2.0)),
    "sqrt-gradient-at-zero": step(lambda x: x.rsqrt().sum(), x=leaf(1e-30, 2.0)),
    "logsumexp-gradient": step(lambda x, m: torch.logsumexp(x + m, 0) * 1e30 * 1e30, x=leaf(0.0, 0.0),
                               m=torch.tensor([0.0, -INF])),
    "half-operand-overflow": step(lambda x, w: autocast_linear(x, w).sum(), x=torch.full((1, 4), 6e4),
                                  w=torch.ones(1, 4)),
    "exponentials-underflowed": step(
        lambda x: (q := x.masked_fill(HIDDEN, -INF).exp()) / q.sum(1, keepdim=True), x=torch.zeros(2, 2)),
    "half-eps-lost": step(lambda x, y: x / (y - 1e-3), x=half(0.0, 1.0), y=half(1e-3, 1.0)),
    "zero-times-log-zero": step(lambda x, p: (x * p.log()).sum(), x=torch.tensor([1.0, 0.0]),
                                p=torch.tensor([0.0, 0.5])),
    "rsqrt-of-zero": step(lambda x: x.rsqrt(), x=torch.tensor([-1.0, 1.0])),
    "arc-outside": step(lambda x: x.atanh(), x=torch.tensor([1.0, 0.5])),
    "fractional-power-of-negative": step(lambda x, p: x**p, x=torch.tensor([-2.0, NAN]), p=torch.tensor([2.0, 0.5])),
    "fully-masked-softmax": step(lambda x, m, y: F.cross_entropy(x.masked_fill(m, -INF), y, label_smoothing=0.1),
                                 x=torch.zeros(2, 2), m=torch.tensor([[True, False], [True, False]]),
                                 y=torch.tensor([1, 1])),
    "label-smoothing-masked-logits": step(
        lambda x, y: F.cross_entropy(x, y), x=torch.tensor([[-INF, 0.0]]), y=torch.tensor([0])),
    "log-of-softmax": step(lambda x, m: torch.log(F.softmax(x, -1) * m), x=torch.zeros(2), m=torch.tensor([0.0, 1.0])),
    "average-over-nothing": step(lambda x: x / x.sum(), x=torch.zeros(2)),
    "mean-of-nothing": step(lambda x, m: x.masked_fill(m, NAN).nanmean(), x=torch.ones(1), m=torch.tensor([True])),
    "batch-norm-of-one": raising(
        lambda x, mean, var: F.batch_norm(x, mean, var), x=seeded(2, 3), mean=torch.zeros(2), var=torch.ones(2)),
    "no-target-counts": step(
        lambda x, y: (x * 0).sum() / (y >= 0).sum(), x=seeded(2, 3, grad=True), y=torch.tensor([-100, -100])),
    "ctc-target-too-long": step(
        lambda x: F.ctc_loss(x.masked_fill(torch.arange(4) == 1, -INF), torch.tensor([[1, 2]]), torch.tensor([3]),
                             torch.tensor([2])), x=seeded(3, 1, 4, grad=True)),
    "empty-sequence": raising(
        lambda x, n: torch.nn.utils.rnn.pack_padded_sequence(x, n), x=seeded(3, 2, 4), n=torch.tensor([2, 3])),
    "dtype-mismatch": raising(lambda x, y: F.cross_entropy(x, y), x=seeded(2, 3), y=torch.zeros(2)),
    "repeated-eigenvalues": step(lambda x: (torch.linalg.eigh(x)[0] * 1e30 * 1e30).sum(),
                                 x=torch.tensor([[1e-30, 0.0], [0.0, 2e-30]]).requires_grad_()),
    "cholesky-not-positive": raising(lambda x: torch.linalg.cholesky(x), x=seeded(2, 3)),
    "log-rate-overflow": step(lambda x, y: F.poisson_nll_loss(x, y, log_input=False, eps=0.0),
                              x=torch.tensor([100.0, 0.0]), y=torch.ones(2)),
    "learning-rate-divergence": with_timeline(
        step(lambda x, y: x @ y, x=torch.full((2, 2), 1e25), y=torch.full((2, 2), 1e25)),
        loss=[1.0, 0.5, 0.3, 0.2, 20.0]),
    "huge-parameters": step(lambda x, w: (x * x) * w, x=torch.tensor([1e30]), w=leaf(1e30)),
    "learning-rate-jump": with_timeline(CASES["parameter-carries-event"], lr=[1.0, 0.5, 0.1, *[0.01] * 7, 1.0, 1.0]),
}  # fmt: skip


def mismatch() -> Snapshot:
    """A failure that is neither a bad value nor an exception."""
    return replace(CASES["overflow"](), failure=Failure("forward", "mismatch", "fp64"))
