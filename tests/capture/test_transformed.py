"""Failures inside of `torch.func` transforms: the origin is a call of the transformed function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jacfwd, jacrev, jvp, vjp, vmap

import reprokit
from reprokit.capture.options import Watch
from reprokit.capture.session import Session
from reprokit.locate.blame import locate
from reprokit.program import transforms
from reprokit.program.ir import OPAQUE
from reprokit.snapshot.format import Snapshot, load
from tests.capture.traps_checks import BAD_STEP, WATCHES, batches, check_caught, described_once, ending, update, where

Loss = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Has an energy whose gradient by ``x`` does not exist at zero, and forces by different transforms."""

    def __init__(self, forces: str = "grad") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.forces = nn.Linear(4, 8), nn.Linear(8, 1), forces

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)) * x.pow(2).sum().sqrt()).squeeze(-1)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * x.sum() / x.sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forces == "grad":
            return vmap(grad(self.energy))(x)
        if self.forces == "jacrev":
            return vmap(jacrev(self.share), chunk_size=3)(x)
        energies, pull = vjp(vmap(self.energy), x)
        return torch.stack(pull(torch.ones_like(energies)))


def of_rows(model: Net, x: torch.Tensor) -> torch.Tensor:
    return vmap(model.share)(x).mean()


def of_a_variable(model: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = model.first(x)
    return vmap(lambda row: (hidden * row.sum() / row.sum()).mean())(x).mean()


def of_gradients(model: Net, x: torch.Tensor) -> torch.Tensor:
    def loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return functional_call(Called(model), {f"net.{k}": v for k, v in parameters.items()}, (row,)).sum()

    grads, losses = vmap(grad_and_value(loss), in_dims=(None, 0))(dict(model.named_parameters()), x)
    return losses.mean() + grads["first.weight"].pow(2).mean()


class Called(nn.Module):
    """The share that a network gives, as a module."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net.share(x)


def of_a_tangent(model: Net, x: torch.Tensor) -> torch.Tensor:
    return jvp(lambda given: model.first(given) * given.pow(2).sum(1, keepdim=True).sqrt(), (x,), (x + 1,))[1].mean()


def of_a_jacobian(model: Net, x: torch.Tensor) -> torch.Tensor:
    return jacfwd(model.share)(x[0]).pow(2).mean()


def of_a_root_pulled(model: Net, x: torch.Tensor) -> torch.Tensor:
    _, pull = vjp(lambda rows: rows.square().sum(1).sqrt(), x)
    return (model.first(x) + pull(torch.ones(8))[0].sum()).mean()


def inside(forces: str) -> Loss:
    def loss(model: Net, x: torch.Tensor) -> torch.Tensor:
        model.forces = forces
        return model(x).pow(2).mean()

    return loss


def run(loss_of: Loss) -> list[torch.Tensor]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x, _ in batches():
        if step == BAD_STEP:
            x[0] = 0
        update(optimizer, loss_of(model, x))
    return ending(model)


DIVISION, ROOT = ("forward", "torch.Tensor.div"), ("backward", "torch.Tensor.sqrt")
CASES = {
    "rows": (of_rows, DIVISION),
    "variable": (of_a_variable, DIVISION),
    "gradients": (of_gradients, DIVISION),
    "tangent": (of_a_tangent, ROOT),
    "jacobian": (of_a_jacobian, DIVISION),
    **{f"{name} in a module": (inside(name), ROOT) for name in ("grad", "vjp")},
    "jacrev in a module": (inside("jacrev"), DIVISION),
}


@pytest.mark.parametrize("case", CASES)
def test_the_origin_is_inside_of_the_transform(case: str, tmp_path: Path) -> None:
    loss, (phase, call) = CASES[case]
    snapshot = check_caught(lambda: run(loss), tmp_path)
    assert where(snapshot) == (BAD_STEP, phase, call)
    assert snapshot.fidelity in ("exact", "close") and "rounding" in (snapshot.fidelity_note or "rounding")
    found = locate(snapshot.program, snapshot.tensors)
    assert found is not None and (found.phase, found.call) == (phase, call)
    assert snapshot.failure.site is not None
    assert " / " in snapshot.failure.site.code or "sqrt()" in snapshot.failure.site.code


@pytest.mark.parametrize("watch", WATCHES)
def test_a_transform_of_a_past_step_is_played(watch: str, tmp_path: Path) -> None:
    """Its function reads what the loop made in that step."""
    snapshot = check_caught(lambda: run(of_a_variable), tmp_path, watch=watch)
    assert where(snapshot) == (BAD_STEP, *DIVISION)


Slopes = Callable[[nn.Module, dict[str, torch.Tensor], torch.Tensor], dict[str, torch.Tensor]]


def share_of(layer: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (functional_call(layer, parameters, (x,)) * x.sum() / x.sum()).pow(2).mean()


def with_value(layer: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loop reads its loss."""
    slopes, value = grad_and_value(lambda given: share_of(layer, given, x))(parameters)
    assert isinstance(value.item(), float)
    return slopes


def along_a_tangent(layer: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    tangents = {name: torch.ones_like(parameter) for name, parameter in parameters.items()}
    _, slope = jvp(lambda given: share_of(layer, given, x), (parameters,), (tangents,))
    return {name: slope * tangent for name, tangent in tangents.items()}


def of_samples(layer: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Clipped and noisy, as in DP-SGD."""
    rows = vmap(grad(lambda given, row: share_of(layer, given, row)), in_dims=(None, 0))(parameters, x)
    norms = torch.stack([item.flatten(1).norm(dim=1) for item in rows.values()]).norm(dim=0)
    factor = (1.0 / norms).clamp(max=1.0)
    clipped = {name: torch.einsum("n,n...->...", factor, item) / len(x) for name, item in rows.items()}
    return {name: item + 0.01 * torch.randn_like(item) for name, item in clipped.items()}


def of_a_root(layer: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss is finite, so only the tensors that the loop writes show the failure."""

    def root(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return (functional_call(layer, given, (x,)) * x.sum()).pow(2).mean().sqrt()

    return grad(root)(parameters)


@pytest.mark.parametrize("slopes_of", [with_value, along_a_tangent, of_samples, of_a_root])
def test_updates_that_the_loop_makes_of_the_results(slopes_of: Slopes, tmp_path: Path) -> None:
    """Such a loop has no backward pass and no optimizer; a buffer of its own that it writes is no step."""

    def train() -> list[torch.Tensor]:
        model = Net()
        parameters = dict(model.first.named_parameters())
        average = torch.zeros(8, 4)
        for step, x, _ in batches():
            x.mul_(0 if step == BAD_STEP else 1)
            slopes = slopes_of(model.first, parameters, x)
            with torch.no_grad():
                average.mul_(0.9)
                for name, parameter in parameters.items():
                    parameter.sub_(slopes[name], alpha=0.01)
        return [*ending(model), *parameters.values()]

    snapshot = check_caught(train, tmp_path)
    assert where(snapshot) == (BAD_STEP, *(ROOT if slopes_of is of_a_root else DIVISION))


@pytest.mark.parametrize("watch", ["sampled", "every-step"])
@pytest.mark.parametrize("slopes_of", [with_value, along_a_tangent, of_samples])
def test_a_marked_step_of_a_loop_that_writes_nothing(slopes_of: Slopes, watch: Watch, tmp_path: Path) -> None:
    """The loop skips its first bad step by itself, and does not mark it."""
    model = Net()
    torch.manual_seed(0)
    parameters = {name: parameter.detach() for name, parameter in model.first.named_parameters()}
    with described_once(), Session(directory=tmp_path, watch=watch, after="continue") as session:
        for step in range(BAD_STEP + 3):
            x = torch.randn(8, 4) * (0 if step in (2, BAD_STEP + 1) else 1)
            slopes = slopes_of(model.first, parameters, x)
            if step != 2:
                parameters = {name: parameter.detach() - 0.01 * slopes[name] for name, parameter in parameters.items()}
                session.step()
    snapshot = load(session.snapshots[0])
    assert where(snapshot) == (BAD_STEP, *DIVISION)
    assert snapshot.fidelity == "exact" and len(snapshot.timeline) == BAD_STEP + 1


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_healthy_loop_that_writes_nothing(
    is_marked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without marks one line says how to make them."""
    weights = torch.randn(4)
    with reprokit.capture(tmp_path / "x.pt") as session:
        for _ in range(6):
            weights = weights - 0.01 * grad(lambda w: (w * w).sum())(weights)
            if is_marked:
                session.step()
    assert not session.snapshots
    assert ("`session.step()` after each" in capsys.readouterr().err) is not is_marked


def saved(loss: Loss, folder: Path) -> Snapshot:
    with described_once(), Session(directory=folder, after="continue") as session:
        run(loss)
    return load(session.snapshots[0])


def of_random_rows(model: Net, x: torch.Tensor) -> torch.Tensor:
    return vmap(lambda row: model.share(row) * torch.rand(()) * torch.rand(()), randomness="different")(x).mean()


@pytest.mark.parametrize("loss", [of_rows, of_random_rows])
def test_a_transform_that_is_not_written_out(loss: Loss, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many calls, or other random numbers row by row: the origin is the line of the transform."""
    if loss is of_rows:
        monkeypatch.setattr(transforms, "MOST_CALLS", 4)
    snapshot = saved(loss, tmp_path)
    failure, opaque = snapshot.failure, [call for call in snapshot.program.calls if call.target == OPAQUE]
    assert (snapshot.step, failure.phase, failure.call) == (BAD_STEP, "forward", None)
    assert failure.site is not None and failure.site.code.startswith("return vmap(")
    assert len(opaque) == 1 and str(opaque[0].kwargs["name"]).startswith("vmap(")


@torch.library.custom_op("reprokit_tests::shares", mutates_args=())
def shares(x: torch.Tensor) -> torch.Tensor:
    """Each row divided by its sum."""
    return x / x.sum(1, keepdim=True)


shares.register_autograd(lambda ctx, gradient: gradient, setup_context=lambda ctx, inputs, output: None)


def of_data_of_an_operator(model: Net, x: torch.Tensor) -> torch.Tensor:
    return model.first(torch.ops.reprokit_tests.shares(x)).mean()


def of_a_linear_map(model: Net, x: torch.Tensor) -> torch.Tensor:
    _, push = torch.func.linearize(lambda rows: rows.square().sum(1).sqrt(), x)
    return (model.first(x) + push(torch.zeros(8, 4)).sum()).mean()


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # by torch.func.linearize
@pytest.mark.parametrize("loss", [of_data_of_an_operator, of_a_linear_map, of_a_root_pulled])
def test_the_result_of_a_call_that_is_not_noted_is_no_data(loss: Loss, tmp_path: Path) -> None:
    snapshot = saved(loss, tmp_path)
    roles = {item.value: item.role for item in snapshot.program.inputs}
    assert snapshot.failure.call is None and roles[snapshot.failure.value or 0] == "opaque"


def test_an_operator_of_an_extension_is_a_call_of_the_program(tmp_path: Path) -> None:
    def loss(model: Net, x: torch.Tensor) -> torch.Tensor:
        return shares(model.first(x) * x.sum(1, keepdim=True)).mean()

    snapshot = saved(loss, tmp_path)
    assert (snapshot.step, snapshot.fidelity) == (BAD_STEP, "exact")
    assert [call.target for call in snapshot.program.calls].count(OPAQUE) == 1
    assert {"x", "weight", "bias"} < {item.name for item in snapshot.program.inputs}


def test_an_exception_inside_of_a_transform(tmp_path: Path) -> None:
    def wrong(model: Net, x: torch.Tensor) -> torch.Tensor:
        return vmap(lambda row: model.share(row) @ row)(x).mean()

    with described_once(), pytest.raises(RuntimeError, match="size"), Session(directory=tmp_path) as session:
        run(wrong)
    snapshot = load(session.snapshots[0])
    assert where(snapshot) == (0, "forward", "torch.Tensor.matmul")
    assert snapshot.failure.exception is not None and snapshot.failure.exception[0] == "RuntimeError"
