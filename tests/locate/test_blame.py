"""The origin of a failure, over small programs written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from reprokit.grammar import plain_of, read
from reprokit.locate.blame import GRAD_SCALER, locate
from reprokit.locate.failure import Failure
from reprokit.program.ir import Call, Input, Program, Ref
from reprokit.program.trace import InputName, Tracer, recording

INF = float("inf")


def program(calls: Sequence[Call], names: Sequence[str | Input], outputs: Sequence[int] = ()) -> Program:
    inputs = [item if isinstance(item, Input) else Input(n, item) for n, item in enumerate(names)]
    return Program(tuple(calls), tuple(inputs), tuple(map(Ref, outputs)))


def call(target: str, *args: Any, to: Any = None, **kwargs: Any) -> Call:
    return Call(target, args, kwargs, outputs=to)


def found(made: Program, *tensors: torch.Tensor) -> Failure:
    failure = locate(made, dict(enumerate(tensors)))
    assert failure is not None
    return failure


def test_a_wanted_infinity_is_not_blamed() -> None:
    made = program(
        [
            call("torch.Tensor.masked_fill", Ref(0), Ref(1), -INF, to=Ref(2)),
            call("torch.nn.functional.softmax", Ref(2), -1, to=Ref(3)),
            call("torch.Tensor.sum", Ref(3), to=Ref(4)),
        ],
        ["scores", "mask"],
        [4],
    )
    assert locate(made, {0: torch.zeros(2, 3), 1: torch.tensor([[False] * 3, [True, True, False]])}) is None
    failure = found(made, torch.zeros(2, 3), torch.tensor([[False] * 3, [True] * 3]))
    assert (failure.call, failure.kind, failure.phase) == ("torch.nn.functional.softmax", "nan", "forward")
    assert (failure.element, failure.num_bad, failure.num_elements) == ((1, 0), 3, 6)


def test_an_overflow_upstream_of_a_nan_is_the_origin() -> None:
    made = program(
        [
            call("torch.nn.functional.linear", Ref(0), Ref(1), to=Ref(2)),
            call("torch.rsqrt", Ref(2), to=Ref(3)),
            call("torch.Tensor.mul", Ref(2), Ref(3), to=Ref(4)),
        ],
        ["x", "weight"],
        [4],
    )
    big = torch.full((1, 300), 300.0, dtype=torch.float16)
    failure = found(made, big, big)
    assert (failure.call, failure.kind, failure.way) == ("torch.nn.functional.linear", "inf", "+inf")


def test_an_infinity_that_turns_sign_is_blamed_on_the_call_that_let_it_out() -> None:
    made = program(
        [
            call("torch.Tensor.masked_fill", Ref(0), Ref(1), -INF, to=Ref(2)),
            call("torch.nn.functional.cross_entropy", Ref(2), Ref(3 + 10), label_smoothing=0.1, to=Ref(4)),
        ],
        ["logits", "mask", Input(13, "target")],
        [4],
    )
    tensors = {0: torch.zeros(1, 3), 1: torch.tensor([[True, False, False]]), 13: torch.tensor([1])}
    failure = locate(made, tensors)
    assert failure is not None and (failure.call, failure.way) == ("torch.nn.functional.cross_entropy", "+inf")


def recorded(compute: Any, **inputs: torch.Tensor) -> Failure:
    names = {id(tensor): InputName(name) for name, tensor in inputs.items()}
    tracer = Tracer(lambda tensor: names.get(id(tensor)))
    with recording(tracer):
        compute(**inputs)
    failure = locate(tracer.program(), tracer.tensors)
    assert failure is not None
    return failure


def _written_away(x: torch.Tensor) -> torch.Tensor:
    h = 2 * torch.sqrt(x)
    h[x < 0] = 0.0
    return h


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.where(x > 0, 2 * torch.sqrt(x), x),
        lambda x: torch.where(x < 0, x, torch.sqrt(x).exp()),
        lambda x: torch.where(x > 1, torch.where(x > 0, torch.sqrt(x), x), x),
        lambda x: torch.where(x[:1] > 0, torch.sqrt(x).sum(-1), x.sum()),
        lambda x: torch.sqrt(x).masked_fill(x < 0, 0.0),
        lambda x: torch.sqrt(x)[x > 0],
        lambda x: torch.cat([torch.sqrt(x), x])[1:],
        lambda x: torch.sqrt(x).index_select(0, torch.tensor([1])),
        lambda x: torch.nan_to_num(torch.sqrt(x)),
        lambda x: torch.nanmean(torch.sqrt(x)),
        _written_away,
    ],
)
def test_a_nan_that_the_forward_pass_drops_fails_in_the_backward_pass(
    compute: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    failure = recorded(lambda x: compute(x).sum().backward(), x=torch.tensor([-1.0, 4.0], requires_grad=True))
    assert (failure.phase, failure.kind, failure.call) == ("backward", "nan", "torch.sqrt")
    assert failure.drop is not None and not failure.drop.is_given
    assert read(Failure, plain_of(failure)) == failure


def test_a_dropped_nan_names_the_call_that_made_it() -> None:
    def compute(x: torch.Tensor, w: torch.Tensor) -> None:
        torch.where(x > 0, torch.log(x) * w, x).sum().backward()

    failure = recorded(compute, x=torch.tensor([-1.0, 4.0]), w=torch.ones(2, requires_grad=True))
    assert (failure.phase, failure.call, failure.backward_node) == ("backward", "torch.log", "MulBackward0")


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(
    ("compute", "call"),
    [
        (lambda x, y: torch.where(y.isnan(), 0.0, (x - y) ** 2).sum(), "torch.Tensor.pow"),
        (lambda x, y: torch.nn.functional.mse_loss(x, y, reduction="none")[1:].sum(), "torch.nn.functional.mse_loss"),
        (lambda x, y: (y.view(2, 1) @ x.view(1, 2))[1:].sum(), "torch.Tensor.matmul"),
    ],
)
def test_a_nan_that_marks_missing_data_is_not_the_origin(compute: Any, call: str, written: bool) -> None:
    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        if written:
            y = y.clone()
            y[0] = float("nan")
        compute(x, y).backward()

    y = torch.tensor([0.0 if written else float("nan"), 1.0])
    failure = recorded(run, x=torch.ones(2, requires_grad=True), y=y)
    assert (failure.phase, failure.call, failure.input_name) == ("backward", call, None if written else "y")
    assert failure.drop is not None and failure.drop.is_given


@pytest.mark.parametrize(
    ("compute", "call", "x"),
    [
        (lambda x, w: torch.where(x > 0, x, torch.sqrt(x)).sum() + w.sum(), "torch.sqrt", [-1.0, 4.0]),  # a NaN loss
        # a layer takes it on
        (lambda x, w: (torch.sqrt(x).view(2, 1) @ w.view(1, 2))[1:].sum(), "torch.sqrt", [-1.0, 4.0]),
        (
            lambda x, w: (torch.softmax(x.masked_fill(x > 1, -INF), -1) @ w)[1:].sum(),
            "torch.softmax",
            [[2.0, 2.0], [0.0, 1.0]],
        ),
    ],
)
def test_other_nans_are_forward_failures(compute: Any, call: str, x: list[Any]) -> None:
    tensors = {"x": torch.tensor(x, requires_grad=True), "w": torch.ones(2, requires_grad=True)}
    failure = recorded(lambda x, w: compute(x, w).backward(), **tensors)
    assert (failure.phase, failure.call, failure.drop) == ("forward", call, None)


def grad_of(x: torch.Tensor) -> torch.Tensor:
    assert x.grad is not None
    return x.grad


def write_and_cancel(x: torch.Tensor) -> None:
    grad_of(x)[1] /= 0.0
    grad_of(x)[1] -= grad_of(x)[1]


def write_through_data(x: torch.Tensor) -> None:
    grad_of(x).data.div_(0.0)
    grad_of(x).data.sub_(grad_of(x).data)


def write_before_the_next_backward(x: torch.Tensor) -> None:
    grad_of(x).div_(0.0)
    (x * 2.0).sum().backward()


@pytest.mark.parametrize("write", [write_and_cancel, write_through_data, write_before_the_next_backward])
def test_a_finite_gradient_that_the_loop_ruins_by_several_writes(write: Callable[[torch.Tensor], None]) -> None:
    def compute(x: torch.Tensor) -> None:
        (x * 3.0).sum().backward()
        write(x)
        grad_of(x).clamp_(-1, 1)

    failure = recorded(compute, x=torch.zeros(2, requires_grad=True))
    assert (failure.phase, failure.kind, failure.call) == ("forward", "inf", "torch.Tensor.div_")


def test_a_gradient_is_read_before_a_second_backward_pass_ruins_it() -> None:
    def compute(x: torch.Tensor) -> None:
        (x * 3.0).sum().backward()
        grad_of(x).mul_(2.0)
        x.sqrt().sum().backward()
        grad_of(x).mul_(2.0)
        grad_of(x).sub_(grad_of(x))

    failure = recorded(compute, x=torch.zeros(2, requires_grad=True))
    assert (failure.phase, failure.call, failure.backward_node) == ("backward", "torch.Tensor.sqrt", "SqrtBackward0")


def test_a_scaled_loss_may_overflow() -> None:
    scaled = Call("torch.Tensor.mul", (Ref(0), Ref(1)), outputs=Ref(2), scope=(GRAD_SCALER,))
    made = program([scaled, call("torch.Tensor.backward", Ref(2))], [Input(0, "loss", requires_grad=True), "scale"])
    assert locate(made, {0: torch.tensor(1e30), 1: torch.tensor(1.0)}) is None
    assert locate(made, {0: torch.tensor(1e30), 1: torch.tensor(1e30)}) is None  # loss and gradient are finite


def test_module_names_follow_the_contract() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (x - x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Inner()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)

    def compute(x: torch.Tensor) -> None:
        Outer()(x).sum().backward()

    x = torch.zeros(1, requires_grad=True)
    assert recorded(compute, x=x).module == "layers.0"
    assert recorded(lambda x: Inner()(x).sum().backward(), x=x).module == "<Inner>"
    assert recorded(lambda x: (x / (x - x)).sum().backward(), x=x).module is None


class Reciprocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / (x - x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class Outside(Reciprocal):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(x.numpy() / (x.numpy() - x.numpy()))


@pytest.mark.parametrize(
    ("function", "call", "name", "code"),
    [
        (Reciprocal, "torch.Tensor.div", None, "x / (x - x)"),
        (Outside, None, "Outside_output", "function.apply"),
    ],
)
def test_a_nan_out_of_a_custom_function_names_the_line(
    function: Any, call: str | None, name: str | None, code: str
) -> None:
    def compute(x: torch.Tensor) -> None:
        function.apply(x * 1.0).sum().backward()

    failure = recorded(compute, x=torch.zeros(2, requires_grad=True))
    assert (failure.call, failure.input_name, failure.kind) == (call, name, "nan")
    assert failure.site is not None and code in failure.site.code


@pytest.mark.parametrize(
    ("first", "kind", "origin"),
    [
        (call("torch.log", Ref(0), to=Ref(1)), "inf", "torch.log"),
        (call("torch.full", (2,), -INF, to=Ref(1)), "nan", "torch.mul"),  # an infinity that was asked for
    ],
)
def test_a_value_that_went_bad_a_thousand_calls_ago_is_followed(first: Call, kind: str, origin: str) -> None:
    sums = [call("torch.add", Ref(n), Ref(n), to=Ref(n + 1)) for n in range(1, 1500)]
    made = program([first, *sums, call("torch.mul", Ref(1500), Ref(0), to=Ref(1501))], ["x"], [1501])
    failure = found(made, torch.zeros(2))
    assert (failure.kind, failure.call) == (kind, origin)


class Spread(nn.Module):
    """A layer of a graph network: divides by the root of the number of edges."""

    def forward(self, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        scale = torch.zeros(3).index_add_(0, source, torch.ones(2)).pow(-0.5)
        return torch.zeros(3).index_add_(0, source, x[source]) * scale


def test_of_two_layers_that_fail_alike_the_first_is_the_origin() -> None:
    """`gcn_isolated_node`: no value of the first layer reaches what the second one spoils."""
    net = nn.Sequential()
    net.first, net.second = Spread(), Spread()
    x, edges = torch.ones(3, requires_grad=True), torch.tensor([0, 1])
    failure = recorded(lambda x, edges: net.second(net.first(x, edges), edges).sum().backward(), x=x, edges=edges)
    assert failure.call == "torch.Tensor.pow" and failure.call_index == 3
