"""Programs as source: what is printed runs, gives the same bits, and reads as a person would have written it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reprokit.program.interpreter import run
from reprokit.program.ir import ZERO_GRAD, Call, Input, Mode, Program, Ref, Site, Slice, Symbol
from reprokit.render.literals import is_same
from reprokit.render.printer import write_program
from tests.render.programs import Case, execute, half_precision_adam, one_call, record, shown

Operation = Callable[[torch.Tensor, torch.Tensor], Any]


def lines_of(program: Program, tensors: dict[int, torch.Tensor], keep: tuple[int, ...] = ()) -> list[str]:
    code = write_program(program, tensors, keep=keep)
    return shown([*code.inputs, *code.body])


def assert_same_bits(case: Case, folder: Path) -> None:
    """Everything that has a variable holds the same bits as in the interpreter, gradients included."""
    program, tensors = case
    keep = frozenset(ref.value for ref in program.outputs)
    expected = run(program, tensors, keep=keep)
    leaves = {item.value for item in program.inputs if item.requires_grad}
    code = write_program(program, tensors, keep=keep | leaves)
    state = torch.get_rng_state()
    variables = execute(code, folder)
    torch.set_rng_state(state)
    assert expected.error is None
    for value, tensor in expected.values.items():
        found = eval(code.names[value], variables)
        assert is_same(found.detach(), tensor.detach()), (code.names[value], code.body)
    for value, gradient in expected.gradients.items():
        assert is_same(variables[code.names[value]].grad, gradient), code.body


def softmax_under_autocast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.softmax(x @ y, dim=-1)


def centred(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        mean = x.mean(dim=0)
    return x - mean


def scattered(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    result[:, 0] = 1.5
    result[y > 0] = 0
    result += y
    return result


OPERATIONS: list[Operation] = [
    lambda x, y: x + y,
    lambda x, y: 1 - x,
    lambda x, y: 2 * x - 3 * y,
    lambda x, y: x / (y.abs() + 1e-3),
    lambda x, y: 1 / (1 + x * x),
    lambda x, y: x @ y.T,
    lambda x, y: -(x**2),
    lambda x, y: (-x) ** 2,
    lambda x, y: 2**x,
    lambda x, y: x.detach() % 3 // 2 + y % 2,
    lambda x, y: torch.where((x > 0) & ~(y > 1) | (x == y), x, y),
    lambda x, y: x.T.reshape(-1)[:9].view(3, 3),
    lambda x, y: x[:, 1:2] * y[..., None, 0],
    lambda x, y: x[y > 0].sum() + x,
    lambda x, y: torch.max(x, dim=0).values + torch.topk(y, 2, dim=1)[1][:, :1],
    lambda x, y: torch.stack(torch.unbind(x, 1)) + torch.cat(y.chunk(3, 1)).reshape(3, 3),
    lambda x, y: F.layer_norm(x, (3,), eps=1e-3) + F.softmax(y, dim=1),
    lambda x, y: F.cross_entropy(x, torch.tensor([0, 1, 2]), label_smoothing=0.1) * y,
    lambda x, y: x.masked_fill(y > 0, float("-inf")).exp(),
    lambda x, y: torch.einsum("ij,jk->ik", x, y),
    lambda x, y: x.to(torch.float16).float() + y.double().sum().float(),
    lambda x, y: F.max_pool1d(x, 2, stride=1).sum() + F.relu(y.clone(), inplace=True),
    lambda x, y: F.dropout(x, 0.5, training=True) + y,
    lambda x, y: torch.zeros_like(x).add_(y, alpha=2).mul_(x),
    softmax_under_autocast,
    centred,
    scattered,
]


@st.composite
def recorded(draw: Any) -> Case:
    """A program of a few operations over two leaves, differentiated half of the time."""
    torch.manual_seed(draw(st.integers(0, 3)))
    needs_grad = draw(st.booleans())
    leaves = [torch.randn(3, 3).requires_grad_(needs_grad), torch.randn(3, 3)]
    steps = draw(
        st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)
    )

    def compute() -> None:
        values = list(leaves)
        for operation, first, second in steps:
            values.append(operation(values[first % len(values)], values[second % len(values)]) + torch.zeros(3, 3))
        if needs_grad and values[-1].requires_grad:
            values[-1].sum().backward()

    return record(compute)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(recorded())
def test_what_is_printed_gives_the_same_bits(tmp_path: Path, case: Case) -> None:
    assert_same_bits(case, tmp_path)


def test_defaults_are_left_out() -> None:
    case = one_call(
        "torch.nn.functional.cross_entropy",
        Ref(0),
        Ref(1),
        weight=None,
        size_average=None,
        ignore_index=-100,
        reduce=None,
        reduction="mean",
        label_smoothing=0.1,
        tensors={0: torch.zeros(1, 2), 1: torch.tensor([1])},
    )
    assert lines_of(*case, keep=(99,))[-1] == "out = F.cross_entropy(x, target, label_smoothing=0.1)"


@pytest.mark.parametrize(
    ("target", "args", "text"),
    [
        ("torch.Tensor.__getitem__", ((Slice(None, None, None), 0),), "out = x[:, 0]"),
        ("torch.Tensor.T.__get__", (), "out = x.T"),
        ("torch.Tensor.to", (Symbol("torch.float16"),), "out = x.to(torch.float16)"),
        ("torch.Tensor.__rtruediv__", (1,), "out = 1 / x"),
        ("torch.Tensor.sum", (), "out = x.sum()"),
        ("torch.where", (), "out = torch.where(condition)"),
    ],
)
def test_reads_like_python(target: str, args: tuple[Any, ...], text: str) -> None:
    program, tensors = one_call(target, Ref(0), *args, tensors={0: torch.ones(2, 2)})
    assert lines_of(program, tensors, keep=(99,))[-1] == text


def test_a_value_that_only_the_next_call_reads_is_written_there() -> None:
    x = torch.zeros(1)
    program, tensors = record(lambda: (1 - torch.sigmoid(x)) ** 0.5)
    assert lines_of(program, tensors, keep=(program.outputs[-1].value,))[-1] == "out = (1 - torch.sigmoid(x)) ** 0.5"


def test_neighbours_share_a_block() -> None:
    half = Mode(autocast=(("cpu", "torch.bfloat16"),))
    quiet = Mode(grad=False, autocast=half.autocast)
    calls = (
        Call("torch.exp", (Ref(0),), {}, Ref(1), mode=half),
        Call("torch.log", (Ref(0),), {}, Ref(2), mode=quiet),
        Call("torch.Tensor.add", (Ref(1), Ref(2)), {}, Ref(3), mode=half),
    )
    program = Program(calls, (Input(0, "x"),), (Ref(3),))
    assert lines_of(program, {0: torch.ones(1)}, keep=(1, 2, 3))[1:] == [
        'with torch.autocast("cpu", dtype=torch.bfloat16):',
        "    exp = torch.exp(x)",
        "    with torch.no_grad():",
        "        log = torch.log(x)",
        "    out = exp + log",
    ]


def test_optimizer_shows_only_unusual_options() -> None:
    program, tensors = half_precision_adam(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.5, foreach=None)
    assert lines_of(program, tensors, keep=(0,)) == [
        "weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))",
        "weight.grad = torch.zeros(1, dtype=torch.float16)",
        "opt = torch.optim.Adam([weight], weight_decay=0.5)",
        "opt.step()",
    ]


OPTIMIZERS = sorted(
    name for name, cls in vars(torch.optim).items() if isinstance(cls, type) and cls.__base__ is torch.optim.Optimizer
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_defaults(name: str) -> None:
    kwargs = {"params": [[Ref(0)]], "grads": [[Ref(1)]], "options": [{"lr": 0.25}], "state": [[{}]]}
    inputs = (Input(0, "weight", "parameter", True), Input(1, "gradient", "gradient"))
    program = Program((Call(f"torch.optim.{name}.step", (), kwargs, phase="optimizer"),), inputs)
    body = lines_of(program, {0: torch.ones(2, 2), 1: torch.ones(2, 2)}, keep=(0,))
    assert body[-2:] == [f"opt = torch.optim.{name}([weight], lr=0.25)", "opt.step()"]


def test_optimizer_with_state_and_groups(tmp_path: Path) -> None:
    kwargs = {
        "params": [[Ref(0)], [Ref(1)]],
        "grads": [[Ref(2)], [Ref(3)]],
        "options": [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.2, "momentum": 0.9}],
        "state": [[{"momentum_buffer": Ref(4)}], [{}]],
    }
    inputs = (
        Input(0, "a.weight", "parameter", True),
        Input(1, "b.weight", "parameter", True),
        Input(2, "gradient", "gradient"),
        Input(3, "gradient", "gradient"),
        Input(4, "state", "state"),
    )
    tensors = {value: torch.randn(2) for value in range(5)}
    program = Program((Call("torch.optim.SGD.step", (), kwargs, phase="optimizer"),), inputs, (Ref(0), Ref(1)))
    assert_same_bits((program, tensors), tmp_path)


def test_zero_grad_and_retained_graphs(tmp_path: Path) -> None:
    calls = (
        Call("torch.Tensor.pow", (Ref(0), 2), {}, Ref(1)),
        Call("torch.Tensor.sum", (Ref(1),), {}, Ref(2)),
        Call(
            "torch.Tensor.backward",
            (Ref(2),),
            {"gradient": None, "retain_graph": True, "create_graph": False, "inputs": None},
        ),
        Call(ZERO_GRAD, ([Ref(0)],)),
        Call("torch.autograd.backward", ([Ref(2), Ref(1)], [None, Ref(3)])),
    )
    inputs = (Input(0, "x", requires_grad=True), Input(3, "gradient", "gradient"))
    program = Program(calls, inputs, (Ref(2),))
    tensors = {0: torch.randn(2), 3: torch.randn(2)}
    assert_same_bits((program, tensors), tmp_path)
    assert "total.backward(retain_graph=True)" in lines_of(program, tensors, keep=(2,))
    assert "x.grad = None" in lines_of(program, tensors, keep=(2,))


def test_what_is_read_before_a_write_on_the_same_line_stays_before_it(tmp_path: Path) -> None:
    site = Site("train.py", 1, "y = F.batch_norm(x, mean, var, training=True) * (mean + 1)")
    calls = (
        Call("torch.Tensor.add", (Ref(1), 1), {}, Ref(3), site=site),
        Call("torch.nn.functional.batch_norm", (Ref(0), Ref(1), Ref(2)), {"training": True}, Ref(4), site=site),
        Call("torch.Tensor.mul", (Ref(4), Ref(3)), {}, Ref(5), site=site),
    )
    inputs = (Input(0, "x"), Input(1, "mean", "buffer"), Input(2, "var", "buffer"))
    tensors = {0: torch.arange(6.0).reshape(2, 3), 1: torch.zeros(3), 2: torch.ones(3)}
    assert_same_bits((Program(calls, inputs, (Ref(5),)), tensors), tmp_path)
