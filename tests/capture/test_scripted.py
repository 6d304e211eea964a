"""Functions and modules that `torch.jit` has compiled: each call is one call of the program, which is not followed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from reprokit.program.ir import OPAQUE
from reprokit.rules.match import diagnose
from tests.capture.traps_checks import (
    BAD_STEP,
    Loop,
    batches,
    check_caught,
    check_silent,
    ending,
    plain_net,
    update,
    where,
)

pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")


def share(x: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    return weight * x.log().sum(1)


def damped(x: torch.Tensor) -> torch.Tensor:
    x.mul_(0.5)
    return x.log().sum(1)


class Scored(nn.Module):
    """Has statistics of its own and a share that does not exist for negative numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x)) + (x.square() + shift).log().sum(1, keepdim=True)


def of_function(make: Callable[[], Callable[[torch.Tensor], torch.Tensor]]) -> Loop:
    def loop() -> list[torch.Tensor]:
        function = make()
        model = plain_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step, x, _ in batches():
            shares = model(x).softmax(1) - (2.0 if step == BAD_STEP else 0.0)
            update(optimizer, function(shares).mean())
        return ending(model)

    return loop


def of_module(make: Callable[[nn.Module], Callable[..., torch.Tensor]]) -> Loop:
    def loop() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = make(Scored())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step, x, y in batches():
            shift = torch.full((), -9.0 if step == BAD_STEP else 1.0)
            update(optimizer, nn.functional.cross_entropy(model(x, shift), y))
        return ending(model)

    return loop


def traced(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, (torch.randn(8, 4), torch.ones(())), check_trace=False)


CALLS: dict[str, tuple[Loop, str, str]] = {
    "function": (of_function(lambda: torch.jit.script(share)), "share", "function(shares)"),
    "in place": (of_function(lambda: torch.jit.script(damped)), "damped", "function(shares)"),
    "module": (of_module(torch.jit.script), "Scored.forward", "model(x, shift)"),
    "traced module": (of_module(traced), "Scored.forward", "model(x, shift)"),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_compiled_function_is_one_call(case: str, tmp_path: Path) -> None:
    loop, name, code = CALLS[case]
    snapshot = check_caught(loop, tmp_path)
    assert where(snapshot) == (BAD_STEP, "forward", None)
    assert snapshot.failure.site is not None and code in snapshot.failure.site.code
    assert name in [call.kwargs["name"] for call in snapshot.program.calls if call.target == OPAQUE]
    assert diagnose(snapshot).id == "not-followed"


@pytest.mark.parametrize("case", CALLS)
def test_healthy_compiled_functions(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.capture.test_scripted.BAD_STEP", -1)
        check_silent(CALLS[case][0], tmp_path, capsys)
