"""A loop that looks at its own loss or gradients: it skips the step and goes on, or it gives up over it.

A skipped step is told in one line and changes nothing, and `--on skipped` saves it; a step that the loop gives up over
is saved. What is made an update of is saved as ever.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from reprokit.capture.mode import CaptureStop
from reprokit.capture.session import Session
from reprokit.snapshot.format import load
from tests.capture.traps_checks import (
    BAD_STEP,
    EXACT,
    WATCHES,
    Loop,
    batches,
    classify,
    described_once,
    divided_loss,
    ending,
    fidelity,
    net,
    plain_net,
    plain_training,
    random_seeded,
    rooted_loss,
    run_plain,
    same_bits,
    update,
    where,
)

Test = Callable[[torch.Tensor], bool]
LOSS_TESTS: dict[str, Test] = {
    "isfinite": lambda loss: not torch.isfinite(loss),
    "item": lambda loss: math.isnan(loss.item()),
    "comparison": lambda loss: not loss < 1e6,
}


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


GRADIENT_TESTS: dict[str, Callable[[nn.Module], bool]] = {
    "isfinite": lambda model: any(not g.isfinite().all() for g in grads(model)),
    "norm": lambda model: not math.isfinite(sum(g.norm().item() ** 2 for g in grads(model)) ** 0.5),
    "clip": lambda model: not torch.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
}


def skipping_losses(test: Test, bad: tuple[int, ...] = (BAD_STEP,)) -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for step, x, y in batches(8):
        loss = divided_loss(model(x), y, step in bad)
        if test(loss):
            continue
        update(optimizer, loss)
    return ending(model, optimizer)


def skipping_gradients(test: Callable[[nn.Module], bool], loss_of: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for step, x, y in batches(8):
        loss = loss_of(model(x), y, step == BAD_STEP)
        optimizer.zero_grad()
        loss.backward()
        if test(model):
            continue
        optimizer.step()
    return ending(model, optimizer)


def check_skipped(loop: Loop, folder: Path, capsys: pytest.CaptureFixture[str], watch: str, step: int) -> None:
    """Claim that the training goes on with the bits that it would have had, and that one line names the step."""
    plain = run_plain(loop)
    capsys.readouterr()
    random_seeded()
    with Session(directory=folder, watch=watch) as session:  # type: ignore[arg-type]
        watched = loop()
    assert session.snapshots == [] and same_bits(plain, watched)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"at step {step}, and the loop skipped it; training goes on" in line


def check_saved(loop: Loop, folder: Path, step: int, phase: str, **options: object) -> None:
    """Claim that the step is saved, exactly, and the loop stopped or at its end."""
    folder.mkdir(exist_ok=True)
    with described_once(), pytest.raises(CaptureStop), Session(directory=folder, **options) as session:  # type: ignore[arg-type]
        loop()
    snapshot = load(session.snapshots[0])
    assert where(snapshot)[:2] == (step, phase)
    assert fidelity(snapshot) == EXACT


def check_silently_skipped(loop: Loop, folder: Path, capsys: pytest.CaptureFixture[str], watch: str) -> None:
    """Claim that a step that never comes to a bad update, nor to a backward pass from a bad loss, is none of ours."""
    plain = run_plain(loop)
    capsys.readouterr()
    random_seeded()
    with Session(directory=folder, watch=watch) as session:  # type: ignore[arg-type]
        watched = loop()
    assert session.snapshots == [] and same_bits(plain, watched) and capsys.readouterr().err == ""


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("test", LOSS_TESTS)
def test_a_bad_loss_that_is_skipped(test: str, watch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_silently_skipped(lambda: skipping_losses(LOSS_TESTS[test]), tmp_path, capsys, watch)


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("loss_of", [divided_loss, rooted_loss])
@pytest.mark.parametrize("test", GRADIENT_TESTS)
def test_bad_gradients_that_are_skipped(
    test: str,
    loss_of: Callable[..., torch.Tensor],
    watch: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop = lambda: skipping_gradients(GRADIENT_TESTS[test], loss_of)  # noqa: E731
    if loss_of is divided_loss:
        check_skipped(loop, tmp_path, capsys, watch, BAD_STEP)
    else:  # no update is made of them
        check_silently_skipped(loop, tmp_path, capsys, watch)


def functions_only() -> list[torch.Tensor]:
    weight = nn.Parameter(torch.full((4, 2), 0.1))
    for step, x, y in batches():
        loss = divided_loss(x @ weight, y, step == BAD_STEP)
        weight.grad = None
        loss.backward()
        assert weight.grad is not None
        if torch.isnan(weight.grad).any():
            continue
        with torch.no_grad():
            weight -= 0.1 * weight.grad
    return ending(weight)


def given_gradients() -> list[torch.Tensor]:
    model = plain_net()
    for step, x, y in batches():
        loss = divided_loss(model(x), y, step == BAD_STEP)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        if any(not g.isfinite().all() for g in gradients):
            continue
        with torch.no_grad():
            for p, g in zip(model.parameters(), gradients, strict=True):
                p -= 0.1 * g
    return ending(model)


def with_a_moving_average() -> list[torch.Tensor]:
    """The average goes on in a skipped step."""
    model = net()
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step, x, y in batches():
        loss = divided_loss(model(x), y, step == BAD_STEP)
        loss.backward()
        if all(g.isfinite().all() for g in grads(model)):
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
    return ending(model, average)


@pytest.mark.parametrize("loop", [functions_only, given_gradients, with_a_moving_average])
def test_loops_that_skip(loop: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_skipped(loop, tmp_path, capsys, "sampled", BAD_STEP)
    check_saved(loop, tmp_path / "saved", BAD_STEP, "forward", on=("nonfinite", "skipped"))


def test_a_failure_after_a_skipped_step_is_saved(tmp_path: Path) -> None:
    """Also when it is found late: going back passes the skipped step by."""

    def loop() -> list[torch.Tensor]:
        model, optimizer = plain_training()
        for step, x, y in batches(9):
            loss = divided_loss(model(x), y, step == 2)
            optimizer.zero_grad()
            loss.backward()
            if not all(g.isfinite().all() for g in grads(model)):
                continue
            optimizer.param_groups[0]["lr"] = math.inf if step == 6 else 0.1
            optimizer.step()
        return []

    for watch in WATCHES:
        check_saved(loop, tmp_path / watch, 5, "optimizer", watch=watch, history=50)


SKIPS_BY: dict[str, Callable[[nn.Module, torch.Tensor], bool]] = {
    "before_backward": lambda model, loss: False,
    "clip": lambda model, loss: bool(loss.backward()) or GRADIENT_TESTS["clip"](model),
    "gradients": lambda model, loss: bool(loss.backward()) or GRADIENT_TESTS["isfinite"](model),
}


def skipping_then_failing(skip: str, fail: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Two steps in a row are skipped, and the next one fails before any update."""
    model, optimizer = plain_training()
    for step, x, y in batches(9):
        optimizer.zero_grad()
        loss = fail(model(x), y, True) if step == 5 else divided_loss(model(x), y, step in (3, 4))
        if skip == "before_backward" and not torch.isfinite(loss):
            continue
        if SKIPS_BY[skip](model, loss) and step != 5:
            continue
        if skip == "before_backward":
            loss.backward()
        optimizer.step()
    return []


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("skip", SKIPS_BY)
def test_a_failure_right_after_skipped_steps_is_not_theirs(skip: str, watch: str, tmp_path: Path) -> None:
    check_saved(lambda: skipping_then_failing(skip, rooted_loss), tmp_path, 3, "backward", watch=watch)


def halved(output: torch.Tensor, target: torch.Tensor, bad: bool) -> torch.Tensor:
    return (output @ torch.ones(output.shape[1] + 1, 2)).mean()


@pytest.mark.parametrize("skip", SKIPS_BY)
def test_an_exception_right_after_skipped_steps_is_not_theirs(skip: str, tmp_path: Path) -> None:
    session = Session(directory=tmp_path)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), session:
        skipping_then_failing(skip, halved)
    snapshot = load(session.snapshots[0])
    assert (snapshot.failure.kind, snapshot.failure.call) == ("exception", "torch.Tensor.matmul")
    assert snapshot.fidelity == "exact" and snapshot.failure.cause is None


# -- loops that give up ----------------------------------------------------------------------------------------------


def halting(test: Test | None = None, first: bool = False) -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x, y in batches():
        loss = divided_loss(model(x), y, step == (0 if first else BAD_STEP))
        if test is not None and test(loss):
            break
        optimizer.zero_grad()
        loss.backward()
        if test is None and GRADIENT_TESTS["isfinite"](model):
            break
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for _, x, y in batches(60):
            classify(model, x, y).item()
    return ending(model)


HALTS: dict[str, Callable[[], list[torch.Tensor]]] = {
    **{f"loss_{name}": (lambda test=test: halting(test)) for name, test in LOSS_TESTS.items()},  # type: ignore[misc]
    "first": lambda: halting(LOSS_TESTS["item"], first=True),
    "gradient": lambda: halting(),
}


@pytest.mark.parametrize("name", HALTS)
def test_the_step_that_the_loop_gives_up_over_is_saved(name: str, tmp_path: Path) -> None:
    check_saved(HALTS[name], tmp_path, 0 if name == "first" else BAD_STEP, "forward")


def no_update_ever() -> list[torch.Tensor]:
    x = torch.zeros(2, requires_grad=True)
    torch.sqrt(x * x).sum().backward()
    return []


def test_bad_gradients_of_a_script_without_an_update(tmp_path: Path) -> None:
    check_saved(no_update_ever, tmp_path, 0, "backward")


# -- what is no skip -------------------------------------------------------------------------------------------------


def another_optimizer_is_cleared() -> list[torch.Tensor]:
    model, critic = plain_net(), plain_net(1)
    optimize, criticize = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.1)
    for step, x, y in batches():
        optimize.zero_grad()
        divided_loss(model(x), y, step == BAD_STEP).backward()
        update(criticize, classify(critic, x, y))
        optimize.step()
    return []


def updated_by_hand() -> list[torch.Tensor]:
    weight = torch.full((4, 2), 0.1, requires_grad=True)
    for step, x, y in batches():
        divided_loss(x @ weight, y, step == BAD_STEP).backward()
        assert weight.grad is not None
        weight.data -= 0.1 * weight.grad
        weight.grad = None
    return []


def adversaries(is_skipped: bool) -> list[torch.Tensor]:
    """The second model's loss goes back through the first one, whose optimizer steps next."""
    critic, model = plain_net(), nn.Linear(4, 4)
    criticize, optimize = torch.optim.SGD(critic.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x, y in batches():
        update(criticize, classify(critic, model(x).detach(), y))
        optimize.zero_grad()
        loss = divided_loss(critic(model(x)), y, step == BAD_STEP)
        loss.backward()
        if not torch.isfinite(loss) and is_skipped:
            continue
        criticize.zero_grad()
        optimize.step()
    return ending(model)


def test_gradients_that_only_another_optimizer_clears_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_skipped(lambda: adversaries(is_skipped=True), tmp_path, capsys, "sampled", BAD_STEP)
    check_saved(lambda: adversaries(is_skipped=False), tmp_path, BAD_STEP, "forward")


def with_a_bad_metric() -> list[torch.Tensor]:
    """Tests of values that the loss does not come from."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in batches():
        metric = torch.zeros(2) / 0
        loss = classify(model, x, y)
        assert int(metric.isnan().sum()) == 2
        assert bool((metric[0] < 1) | (loss < 100)) and not bool(loss.isnan() | loss.isinf())
        optimizer.zero_grad()
        loss.backward()
        assert not sum((~g.isfinite()).sum() for g in grads(model))
        optimizer.step()
    return ending(model)


@pytest.mark.parametrize(
    "loop",
    [another_optimizer_is_cleared, updated_by_hand],
)
def test_a_bad_loss_of_which_an_update_is_made(loop: Loop, tmp_path: Path) -> None:
    check_saved(loop, tmp_path, BAD_STEP, "forward")


def validation_with_a_graph() -> list[torch.Tensor]:
    """A script that reads a bad loss of its evaluation, for which it has forgotten `no_grad`."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, y in batches():
        loss = classify(model, x, y)
        update(optimizer, loss)
    empty = F.cross_entropy(model(x)[:0], y[:0])
    assert math.isnan(empty.item())
    return ending(model)


def left_out_in_the_last_step() -> list[torch.Tensor]:
    """The loop goes over to the next batch over a NaN, counts it or looks at it in another loop, and then runs out."""
    model, optimizer = plain_training()
    num_bad = 0
    for step, x, y in batches(6):
        logits = model(x) * (math.nan if step == 5 else 1.0)
        for row in logits:
            if torch.isnan(row).any():
                break
        num_bad += int(torch.isnan(logits).sum().item() > 0)
        if torch.isnan(logits).any():
            continue
        update(optimizer, F.cross_entropy(logits, y))
    assert num_bad == 1
    return ending(model)


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("bad", [2, 5])
def test_a_skipped_step_with_a_penalty_on_the_input(
    bad: int, watch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loop drops the gradients of its model; that of the input, which nothing updates, stays NaN."""
    with Session(directory=tmp_path, watch=watch) as session:
        model, optimizer = plain_training()
        for step, x, y in batches(6):
            x = (x * (math.nan if step == bad else 1.0)).requires_grad_()
            logits = model(x)
            (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
            optimizer.zero_grad()
            (F.cross_entropy(logits, y) + slope.square().mean()).backward()
            if math.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
                optimizer.step()
            else:
                optimizer.zero_grad()
    assert session.snapshots == []
    assert capsys.readouterr().err.count(f"a bad loss was seen at step {bad}, and the loop skipped it") == 1


OTHERS = [
    validation_with_a_graph,
    with_a_bad_metric,
    left_out_in_the_last_step,
]


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("loop", OTHERS)
def test_other_bad_values_that_are_read(
    loop: Loop, watch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Session(directory=tmp_path, watch=watch) as session:
        loop()
    assert session.snapshots == [] and capsys.readouterr().err == ""
