"""Functions that `torch.compile` made and that the loop calls itself: a loss, an optimizer's step, or a whole step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from reprokit.capture.session import Session
from reprokit.compare.compiled import Compiled, run_compiled
from reprokit.errors import UsageError
from reprokit.render.sources import reduction_script
from reprokit.shrink.checks.choice import choose_check
from reprokit.shrink.reducer import shrink
from tests.capture.traps_checks import (
    BAD_STEP,
    WATCHES,
    CountingBackend,
    batches,
    check_caught,
    check_silent,
    classify,
    ending,
    plain_net,
    plain_training,
    random_seeded,
    run_plain,
    same_bits,
    update,
    where,
)
from tests.conftest import run_python_in
from tests.shrink.failing import zero_by_zero

pytestmark = pytest.mark.filterwarnings("ignore")  # dynamo looks at `grad` of tensors that are no leaves
DIVISION, ROOT = ("forward", "torch.Tensor.div"), ("backward", "torch.Tensor.sqrt")


def factors() -> list[torch.Tensor]:
    return [torch.full((), 0.0 if step == BAD_STEP else 1.0) for step in range(8)]


def divided(logits: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, y) * (factor / factor)


def rooted(logits: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    energy = logits.pow(2) * factor
    return F.cross_entropy(logits, y) + torch.where(energy > 0, energy.sqrt(), energy).mean() * 1e-3


def compiled(function: Any = None, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, **{"backend": "eager", **options})


def whole_step(loss_of: Any = divided) -> list[torch.Tensor]:
    model = plain_net()
    optimizer = torch.optim.Adam(model.parameters())

    @compiled()
    def step(x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = loss_of(model(x), y, factor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for (_, x, y), factor in zip(batches(), factors(), strict=False):
        step(x, y, factor)
    return ending(model, optimizer)


class Trainer:
    """Its step is a compiled method, and returns nothing."""

    def __init__(self, loss_of: Any) -> None:
        self.model = plain_net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loss_of = loss_of

    def step(self, x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> None:
        loss = self.loss_of(self.model(x), y, factor)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def method(loss_of: Any = divided) -> list[torch.Tensor]:
    trainer = Trainer(loss_of)
    step = compiled(trainer.step)
    for (_, x, y), factor in zip(batches(), factors(), strict=False):
        step(x, y, factor)
    return ending(trainer.model)


def by_hand() -> list[torch.Tensor]:
    """Forward, gradients and update in one graph."""
    model = plain_net()
    parameters = dict(model.named_parameters())

    @compiled(fullgraph=True)
    def step(x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        def loss_of(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            return divided(torch.func.functional_call(model, weights, (x,)), y, factor)

        grads, loss = torch.func.grad_and_value(loss_of)({k: v.detach() for k, v in parameters.items()})
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.sub_(grads[name] * 0.1)
        return loss

    for (_, x, y), factor in zip(batches(), factors(), strict=False):
        step(x, y, factor)
    return ending(model)


def loss_only() -> list[torch.Tensor]:
    model = plain_net()
    loss_of = compiled(rooted)
    optimizer = torch.optim.Adam(model.parameters())
    for (_, x, y), factor in zip(batches(), factors(), strict=False):
        update(optimizer, loss_of(model(x), y, factor))
    return ending(model, optimizer)


def update_only() -> list[torch.Tensor]:
    model = plain_net()
    optimizer = torch.optim.Adam(model.parameters())
    step = compiled(optimizer.step)
    for (_, x, y), factor in zip(batches(), factors(), strict=False):
        optimizer.zero_grad()
        rooted(model(x), y, factor).backward()  # type: ignore[no-untyped-call]
        step()
    return ending(model, optimizer)


CASES: dict[Callable[[], list[torch.Tensor]], tuple[str, str]] = {
    whole_step: DIVISION,
    method: DIVISION,
    by_hand: DIVISION,
    loss_only: ROOT,
    update_only: ROOT,
}


@pytest.mark.parametrize("loop", CASES, ids=lambda loop: loop.__name__)
def test_the_origin_is_inside_of_the_compiled_function(loop: Callable[[], list[torch.Tensor]], tmp_path: Path) -> None:
    snapshot = check_caught(loop, tmp_path)
    assert where(snapshot) == (BAD_STEP, *CASES[loop])
    assert (snapshot.fidelity, snapshot.fidelity_note) == ("exact", None)
    assert snapshot.failure.site is not None and Path(snapshot.failure.site.file).name == Path(__file__).name


@pytest.mark.parametrize("watch", WATCHES)
def test_a_gradient_of_a_whole_step(watch: str, tmp_path: Path) -> None:
    """No loss is bad: the parameters are, one step before any loss that the function returns."""
    snapshot = check_caught(lambda: whole_step(rooted), tmp_path, watch=watch)
    assert where(snapshot) == (BAD_STEP, *ROOT)
    assert any(call.is_optimizer_step for call in snapshot.program.calls) and snapshot.fidelity == "exact"


def healthy_step() -> list[torch.Tensor]:
    return whole_step(lambda logits, y, factor: F.cross_entropy(logits, y) + factor)


def test_a_healthy_compiled_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_silent(healthy_step, tmp_path, capsys)


class Slots:
    """Its attributes are not searched."""

    __slots__ = ("model", "optimizer")

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer


def given_state(make: Callable[..., Any], loss_of: Any = divided) -> list[torch.Tensor]:
    """The function finds what it trains in an argument."""
    model = plain_net()
    optimizer = torch.optim.Adam(model.parameters())

    @compiled()
    def step(state: Any, x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        net, updates = state.values() if isinstance(state, dict) else (state.model, state.optimizer)
        loss: torch.Tensor = loss_of(net(x), y, factor)
        updates.zero_grad()
        loss.backward()
        updates.step()
        return loss.detach()

    state = make(model=model, optimizer=optimizer)
    for (_, x, y), factor in zip(batches(), factors(), strict=False):
        step(state, x, y, factor)
    return ending(model, optimizer)


def decorated() -> list[torch.Tensor]:
    class Decorated(Trainer):
        step = compiled(Trainer.step)

    trainer = Decorated(divided)
    for (_, x, y), factor in zip(batches(), factors(), strict=False):
        trainer.step(x, y, factor)
    return ending(trainer.model)


@pytest.mark.parametrize("loop", [lambda: given_state(dict), decorated], ids=["dict", "self"])
def test_what_a_step_trains_may_be_inside_of_its_arguments(loop: Any, tmp_path: Path) -> None:
    snapshot = check_caught(loop, tmp_path)
    assert where(snapshot) == (BAD_STEP, *DIVISION) and snapshot.fidelity == "exact"


def test_a_step_whose_state_is_nowhere_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def healthy(logits: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y) + factor

    plain = run_plain(lambda: given_state(Slots, healthy))
    random_seeded()
    with Session(directory=tmp_path) as session:
        watched = given_state(Slots, healthy)
    assert session.snapshots == [] and same_bits(plain, watched)
    assert capsys.readouterr().err.count("no gradient or update that it made was found") == 1


def test_what_the_user_has_compiled_stays_compiled() -> None:
    count = CountingBackend()
    bend = compiled(lambda h: h.sin() + 1, backend=count)
    bend(torch.ones(3))
    snapshot = zero_by_zero()
    outputs = frozenset(value for call in snapshot.program.calls for value in call.output_refs())
    Compiled("eager").require()
    for _ in range(10):  # more often than dynamo compiles one function again
        run_compiled(snapshot, outputs, count)
    bend(torch.ones(3))
    assert count.num_graphs == 11


@pytest.mark.parametrize(("is_step", "watch"), [(False, "every-step"), (True, "sampled")])
def test_capture_does_not_make_a_function_compile_again(is_step: bool, watch: Any, tmp_path: Path) -> None:
    """A model alone, or the whole step."""

    def num_graphs() -> int:
        count = CountingBackend()
        model, optimizer = plain_training()
        fast = model if is_step else compiled(model, backend=count)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            update(optimizer, classify(fast, x, y))

        run = compiled(step, backend=count) if is_step else step
        for _, x, y in batches():
            run(x, y)
        return count.num_graphs

    plain = num_graphs()
    with Session(directory=tmp_path, watch=watch):
        watched = num_graphs()
    assert plain == watched > 0


# -- failures that only the compiled code has ----------------------------------------------------------------------


def miscompiling(graph: Any, inputs: Any) -> Any:
    """A compiler that takes the exponential of what it is to take the hyperbolic tangent of."""
    for node in graph.graph.nodes:
        if node.target is torch.tanh:
            node.target = torch.exp
    graph.recompile()
    return graph.forward


def bounded(logits: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, y) + torch.tanh(200 * (1 - factor))


def miscompiled(part: str) -> list[torch.Tensor]:
    model, optimizer = plain_training()
    loss_of = compiled(bounded, backend=miscompiling) if part == "loss" else bounded

    def step(x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x), y, factor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = compiled(step, backend=miscompiling) if part == "step" else step
    for (_, x, y), factor in zip(batches(), factors(), strict=False):
        run(x, y, factor)
    return ending(model)


@pytest.mark.parametrize("part", ["loss", "step"])
def test_a_failure_that_only_the_compiled_code_has(part: str, tmp_path: Path) -> None:
    snapshot = check_caught(lambda: miscompiled(part), tmp_path)
    assert where(snapshot) == (BAD_STEP, "forward", "torch.tanh")
    assert (snapshot.failure.kind, snapshot.fidelity) == ("mismatch", "exact")
    assert snapshot.failure.way == f"compile:{Path(__file__).name}:miscompiling, not finite"
    with pytest.raises(UsageError, match="which opening a file never runs") as raised:
        choose_check(None, snapshot)
    assert "--check mismatch:compile:" in (raised.value.hint or "")


def unrounded(graph: Any, inputs: Any) -> Any:
    """A compiler that leaves rounding out, as inductor does between calls in half precision."""
    for node in list(graph.graph.nodes):
        if node.target is torch.round:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    return graph.forward


def distance(logits: torch.Tensor, y: torch.Tensor, a: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, y) + (torch.round(a) - rounded).sqrt() * logits.mean()


@pytest.mark.parametrize("is_written", [False, True])
def test_what_the_loop_computes_before_a_compiled_function_is_not_compiled(is_written: bool, tmp_path: Path) -> None:
    """Compiled too, it would be unrounded as well, and the difference of both no root of less than zero."""

    def loop() -> list[torch.Tensor]:
        model, loss_of = plain_net(), compiled(distance, backend=unrounded)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (_, x, y), factor in zip(batches(), factors(), strict=False):
            a = 3.8 - factor * 1.8
            rounded = torch.round(a)
            if is_written:
                rounded += 0.0
            loss = loss_of(model(x), y, a, rounded)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return ending(model)

    snapshot = check_caught(loop, tmp_path)
    inputs = {item.name for item in snapshot.program.inputs}
    if is_written:  # its calls stay as they are
        assert snapshot.failure.kind == "nan" and {"a", "rounded"}.isdisjoint(inputs)
        return
    assert (snapshot.failure.kind, snapshot.step, snapshot.fidelity) == ("mismatch", BAD_STEP, "exact")
    assert {"a", "rounded"} < inputs and [call.name for call in snapshot.program.calls].count("round") == 1


def test_a_mismatch_is_reduced_with_a_compiler_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "compiler.py").write_text(f"from typing import Any\nimport torch\n{inspect.getsource(miscompiling)}")
    snapshot = check_caught(lambda: miscompiled("step"), tmp_path)
    reduction = shrink(snapshot, check=f"mismatch:compile:{tmp_path / 'compiler.py'}:miscompiling")
    assert [call.name for call in reduction.program.calls] == ["tanh"]
    script = reduction_script(reduction)
    assert script.files == ["repro.py", "compiler.py"] and "torch.compile(step, backend=backend)(" in script.text
    script.write(tmp_path)
    ended = run_python_in(tmp_path, "repro.py")
    assert ended.returncode == 1 and "Absolute difference: inf" in ended.stderr


def test_random_numbers_of_a_compiler_are_no_mismatch(tmp_path: Path) -> None:
    """In training the compiler drew a zero; the replay draws another number, and says that it is another one."""

    def drawing(graph: Any, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch.nn.functional.dropout:
                node.args = (node.args[0], 1.0)
        graph.recompile()
        return graph.forward

    def loop() -> list[torch.Tensor]:
        model, optimizer = plain_training()
        drop = compiled(lambda h: F.dropout(h, 0.1, training=True), backend=drawing)
        for _, x, y in batches():
            hidden = drop(model(x))
            update(optimizer, F.cross_entropy(hidden, y) * (hidden.abs().sum() / hidden.abs().sum()))
        return ending(model)

    snapshot = check_caught(loop, tmp_path)
    assert snapshot.failure.kind == "nan" and snapshot.fidelity == "unfaithful"
    assert "did not occur again" in (snapshot.fidelity_note or "")


class Share(nn.Module):
    """Each row divided by its sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.sum(1, keepdim=True)


def test_the_names_in_a_compiled_model_are_those_of_the_model(tmp_path: Path) -> None:
    def train() -> None:
        model = compiled(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sequential(nn.Tanh(), Share())))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, x, y in batches():
            update(optimizer, F.cross_entropy(model(x * (step != BAD_STEP)), y))

    snapshot = check_caught(lambda: train() or [], tmp_path)
    assert (*where(snapshot), snapshot.failure.module) == (BAD_STEP, *DIVISION, "1.1")
    assert [item.name for item in snapshot.program.inputs if item.role == "parameter"] == ["0.weight"]
