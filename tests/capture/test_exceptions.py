"""Exceptions are failures too: those that leave a step are saved, and the user sees them exactly as without capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.data import DataLoader

from reprokit.capture.save import NO_CHECKPOINT, NOT_OF_TORCH
from reprokit.capture.session import Session
from reprokit.program.ir import BACKWARD
from reprokit.render.facts import Facts
from reprokit.render.findings import markdown, one_line, page
from reprokit.render.issue import make_issue
from reprokit.render.sources import reduction_script
from reprokit.render.wording import origin
from reprokit.rules.match import diagnose
from reprokit.snapshot.format import Snapshot, load
from reprokit.workflow import shrink
from tests.capture.traps_checks import (
    BAD_STEP,
    EXACT,
    STEPS,
    batches,
    classify,
    described_once,
    divided_loss,
    fidelity,
    plain_net,
    plain_training,
    run_both,
    update,
    where,
    without_own_lines,
)
from tests.conftest import Run
from tests.render.programs import VERIFIED


def capture_raising(
    loop: Callable[[], None], error: type[BaseException], folder: Path, history: int | None = None
) -> Snapshot:
    """The snapshot of a loop that ends with an exception, which comes out as itself."""
    with described_once(), pytest.raises(error) as caught, Session(directory=folder, history=history) as session:
        loop()
    assert type(caught.value) is error
    assert len(session.snapshots) == 1
    return load(session.snapshots[0])


class Deep(nn.Module):
    """A model with a nested part that raises when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = plain_net()
        self.checked = Checked()

    def forward(self, x: torch.Tensor, y: torch.Tensor, fail: str = "") -> torch.Tensor:
        return F.cross_entropy(self.checked(self.body(x), fail), y)


class Checked(nn.Module):
    """Raises in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2)

    def forward(self, h: torch.Tensor, fail: str) -> torch.Tensor:
        if fail == "index":
            return h + self.table(torch.full((8,), 3))
        if fail == "matrix":
            return h @ torch.linalg.inv(torch.zeros(2, 2) * h[:2, :2])
        if fail == "memory":
            return h + torch.empty(10**15).sum()
        return h


def train_deep(fail: str) -> None:
    torch.manual_seed(0)
    model = Deep()
    optimizer = torch.optim.Adam(model.parameters())
    for step, x, y in batches():
        update(optimizer, model(x, y, fail if step == BAD_STEP else ""))


def shape_mismatch() -> None:
    model, optimizer = plain_training()
    for step, x, y in batches():
        update(optimizer, classify(model, x[:, :3] if step == BAD_STEP else x, y))


def index_out_of_range() -> None:
    train_deep("index")


def singular_matrix() -> None:
    train_deep("matrix")


def out_of_memory() -> None:
    train_deep("memory")


def write_into_what_backward_needs() -> None:
    model, optimizer = plain_training()
    for step, x, y in batches():
        h = model(x).exp()
        loss = F.cross_entropy(h, y) + h.sum()
        if step == BAD_STEP:
            h.add_(1)
        update(optimizer, loss)


def backward_twice() -> None:
    model, optimizer = plain_training()
    for step, x, y in batches():
        loss = classify(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        if step == BAD_STEP:
            loss.backward()
        optimizer.step()


def check_of_the_loop_itself() -> None:
    model, optimizer = plain_training()
    for step, x, y in batches():
        loss = classify(model, x, y)
        if step == BAD_STEP:
            raise ValueError("the loss does not fall")
        update(optimizer, loss)


SAVED = [  # what is raised, in which phase, from which call, and in which module
    (shape_mismatch, RuntimeError, "forward", "torch.nn.functional.linear", "0"),
    (index_out_of_range, IndexError, "forward", "torch.nn.functional.embedding", "checked.table"),
    (singular_matrix, torch.linalg.LinAlgError, "forward", "torch.linalg.inv", "checked"),
    (out_of_memory, RuntimeError, "forward", "torch.empty", "checked"),
    (write_into_what_backward_needs, RuntimeError, "backward", "torch.Tensor.backward", None),
    (backward_twice, RuntimeError, "backward", "torch.Tensor.backward", None),
    (check_of_the_loop_itself, ValueError, "forward", None, None),
]


@pytest.mark.parametrize(("loop", "error", "phase", "call", "module"), SAVED)
def test_it_is_saved(
    loop: Callable[[], None],
    error: type[BaseException],
    phase: str,
    call: str | None,
    module: str | None,
    tmp_path: Path,
) -> None:
    snapshot = capture_raising(loop, error, tmp_path)
    failure = snapshot.failure
    assert where(snapshot)[:2] == (BAD_STEP, phase) and failure.module == module
    assert failure.call == call or (loop is write_into_what_backward_needs and failure.call is not None)
    assert (failure.kind, snapshot.observed_at) == ("exception", "exception")
    assert failure.exception is not None and failure.exception[0] == error.__name__
    assert failure.site is not None and Path(failure.site.file).name in ("test_exceptions.py", "traps_checks.py")
    assert fidelity(snapshot) == (EXACT if call is not None else ("unfaithful", NOT_OF_TORCH))


# -- the operands of what raised ------------------------------------------------------------------------------------


class Scheduled(torch.optim.Optimizer):
    """Its learning rate is a root of what is left of the steps, and its last division one by the sum of gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter], total: int) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.done, self.total = 0, total

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            seen = 0.0
            rate = group["lr"] * (1 - self.done / self.total) ** 0.5
            for p in group["params"]:
                p.add_(p.grad, alpha=-rate)
                seen += p.grad.abs().sum().item()
            group["share"] = rate / seen
        self.done += 1


def rate_past_its_end() -> None:
    model = nn.Linear(4, 3)
    optimizer = Scheduled(model.parameters(), total=BAD_STEP - 1)
    for _, x, y in batches():
        update(optimizer, F.cross_entropy(model(x[:, :4]), y % 3))


def gradients_of_zero() -> None:
    model = nn.Linear(4, 3)
    optimizer = Scheduled(model.parameters(), total=100)
    for step, x, _ in batches():
        shares = torch.full((3,), float(step != BAD_STEP))
        update(optimizer, (model(x[:, :4]) * shares).square().mean())


class Bank(nn.Module):
    """Compares with features that it has once computed in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 3)
        self.table = torch.ones(3, 3)

    @torch.inference_mode()
    def refresh(self, x: torch.Tensor) -> None:
        self.table = self.embed(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x) @ self.table.t()


def features_of_inference_mode() -> None:
    model = Bank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x, _ in batches():
        if step == BAD_STEP:
            model.refresh(x[:, :4])
        update(optimizer, model(x[:, :4]).square().mean())


def decay_set_past_its_end() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step, x, y in batches():
        decay = 0.1 * (1 - step / (BAD_STEP - 1)) ** 0.9
        optimizer.param_groups[0]["weight_decay"] = decay
        optimizer.zero_grad()
        F.cross_entropy(model(x[:, :4]), y % 3).backward()
        optimizer.step()


def state_of_a_whole_batch() -> None:
    model = nn.GRU(4, 3, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x, _ in batches():
        given = x[: 2 if step == BAD_STEP else 3, None, :4]
        if step == BAD_STEP:
            state = torch.zeros(1, 3, 3)
        else:  # which the line of the exception has not come through
            state = torch.zeros(1, len(given), 3)
            assert state is not None
        update(optimizer, model(given, state)[0].square().mean())


class Cached(nn.Module):
    """Joins its keys with those of the calls before, also when a checkpoint repeats the call."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 3)
        self.keys: list[torch.Tensor] = []
        self.saves_memory = False

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        self.keys.append(self.project(x))
        return torch.cat(self.keys).exp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keys = []
        return checkpoint(self.attend, x, use_reentrant=False) if self.saves_memory else self.attend(x)


def checkpoint_of_a_cache() -> None:
    model = Cached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x, _ in batches():
        model.saves_memory = step == BAD_STEP
        update(optimizer, model(x[:2, :4]).square().mean())


class Words(nn.Module):
    """Knows 12 words, and 5 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.position, self.head = nn.Embedding(12, 4), nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        place = torch.arange(ids.shape[1])
        return self.head((self.word(ids) + self.position(place)).mean(1))


def sentences(label: int = 1, length: int = 4) -> None:
    """The last row of step `BAD_STEP` has another label, and its sentences another length."""
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        ids = torch.randint(12, (3, length if step == BAD_STEP else 3 + step % 2))
        kinds = torch.tensor([0, 1, label if step == BAD_STEP else 1])
        update(optimizer, F.cross_entropy(model(ids), kinds))


def label_of_no_class() -> None:
    sentences(label=2)


def sentence_too_long() -> None:
    sentences(length=7)


def critic_stepped_in_between() -> None:
    actor, critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    first, second = (torch.optim.Adam(part.parameters(), lr=1e-3) for part in (critic, actor))
    for _, x, _ in batches():
        value = critic(actor(x[:, :4])).mean()
        update(first, critic(torch.ones(3, 2)).square().mean())
        update(second, -value)


class Gate(nn.Module):
    """Shifts its gate in place after it was used."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 3)
        self.shifts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.project(x))
        h = gate * x[:, :3]
        if self.shifts:
            gate[:, 0] += 0.1
        return h + gate


def gate_shifted_in_place() -> None:
    model = Gate()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x, _ in batches():
        model.shifts = step == BAD_STEP
        update(optimizer, model(x[:, :4]).square().mean())


def state_carried_on() -> None:
    cell, state = nn.GRUCell(4, 3), torch.zeros(1, 3)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    for _, x, _ in batches():
        state = cell(x[:1, :4], state)
        update(optimizer, state.square().mean())


class Remembering(nn.Module):
    """Keeps its hidden state itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.hidden = nn.GRUCell(4, 3), torch.zeros(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.cell(x, self.hidden)
        return self.hidden


def state_kept_by_the_model() -> None:
    model = Remembering()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x, _ in batches():
        model.hidden = model.hidden.detach() if step < BAD_STEP else model.hidden
        update(optimizer, model(x[:1, :4]).square().mean())


def two_losses_of_one_graph() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, x, _ in batches():
        shared = model(x[:, :4]).tanh()
        first, second = shared.square().mean(), shared.exp().mean()
        first.backward()
        update(optimizer, second)


def means_for_gaps(rows: Sequence[tuple[torch.Tensor, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    target = np.array([y for _, y in rows], dtype=np.float32)
    gaps = np.isnan(target)
    target = np.where(gaps, float(target[~gaps].mean()) * np.ones(1), target) if gaps.any() else target
    return torch.stack([x for x, _ in rows]), torch.from_numpy(target)


def doubles_in_place_of_gaps() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = [(torch.ones(4), float("nan") if n == 3 * BAD_STEP else n / 10) for n in range(3 * STEPS)]
    for x, target in DataLoader(rows, batch_size=3, collate_fn=means_for_gaps):  # type: ignore[arg-type]
        update(optimizer, F.huber_loss(model(x).squeeze(1), target))


def samples_of_two_lengths() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = [torch.ones(5 if n == 8 * BAD_STEP + 6 else 4) for n in range(8 * STEPS)]
    for x in DataLoader(rows, batch_size=8):  # type: ignore[arg-type]
        update(optimizer, model(x).square().mean())


@pytest.mark.parametrize(
    ("loop", "error", "says", "says_not"),
    [
        (decay_set_past_its_end, RuntimeError, ["value of `weight`, `weight.grad`, `bias` and `bias.grad` that"], []),
        (gate_shifted_in_place, RuntimeError, ["Use the operation out of place"], ["`step()`", "Arguments that"]),
        (critic_stepped_in_between, RuntimeError, ["Call `step()` after the last"], ["out of place"]),
        (samples_of_two_lengths, RuntimeError, [
            "\\[4\\] float32 (7 such), ", " \\[5\\] float32."], ["`x` is float32", "assigned at"]),
    ],
)  # fmt: skip
def test_the_issue_says_no_more_than_is_known(
    loop: Callable[[], None],
    error: type[BaseException],
    says: Sequence[str],
    says_not: Sequence[str],
    tmp_path: Path,
) -> None:
    """Names are of one tensor each, advice is for who wrote, and a loop that asks for data has not begun its body."""
    snapshot = capture_raising(loop, error, tmp_path)
    reduction = shrink(snapshot, fast=True)
    text = make_issue(Facts(snapshot, reduction_script(reduction), VERIFIED, reduction)).text
    assert ([one for one in says if one not in text], [one for one in says_not if one in text]) == ([], []), text[:3000]


@pytest.mark.parametrize(
    ("loop", "error", "call", "says"),
    [
        (rate_past_its_end, RuntimeError, "torch.Tensor.add_", [
            "`rate` is", "j, a complex number (assigned at", "`self.done` is 3, `self.total` is 2)",
            "`p` is float32 [3, 4], the parameter `weight`"]),
        (gradients_of_zero, ZeroDivisionError, None, [
            "`seen` is 0 (assigned at", "is float32 [3], all zeros); every gradient of the optimizer is zero, and so ",
            " is `shares`."]),
        (features_of_inference_mode, RuntimeError, "torch.Tensor.matmul", [
            "`self.table` is float32 [", "made in inference mode by `nn.functional.linear` (", ") in step 3"]),
        (decay_set_past_its_end, RuntimeError, "torch.optim.AdamW.step", [
            "`weight_decay` of the optimizer is ", "j, a complex number, and was 0 before (assigned at ",
            ", from the power `(1 - step / (BAD_STEP - 1)) ** 0.9` in line ", ", complex for a negative base)"]),
        (state_of_a_whole_batch, RuntimeError, None, [
            "`given` is float32 [2, 1, 4] (assigned at ", "`state` is float32 [1, 3, 3], all zeros."]),
        (checkpoint_of_a_cache, CheckpointError, None, [
            "when recomputed, `cat` (", " gives [4, 3] (`self.keys` is 2 items: float32 [2, 3], which the forward pass "
            "made and something has kept; float32 [2, 3]", "; in its place `cat` (", ") gives [2, 3] in the forward "]),
        (label_of_no_class, IndexError, "torch.nn.functional.cross_entropy", [
            ": `kinds` is 2 at [2] (1 of 3 elements, in row 2), and its input has 2 classes. "]),
        (sentence_too_long, IndexError, "torch.nn.functional.embedding", [
            ": `place` is 5 at [5], and up to 6 (2 of 7 elements", "), and `position.weight` has 5 rows. ",
            "`ids` is [3, 7] in step 3, and was [3, 3 to 4] in steps 0-2. With `ids` of step 2 in its place the same 4 "
            "steps end without the exception."]),
        (critic_stepped_in_between, RuntimeError, BACKWARD, [
            ": `critic.2.weight` was saved for the backward pass by `nn.functional.linear` in `critic.2` (",
            ", and written since by `Adam.step` (", ") (version 1 when it was saved, 2 now)."]),
        (gate_shifted_in_place, RuntimeError, BACKWARD, [
            ": `gate` was saved for the backward pass by `sigmoid` in `<Gate>` (",
            ", and written since by `Tensor.add_` in `<Gate>` ("]),
        (state_carried_on, RuntimeError, BACKWARD, [
            ": `state` of step 0, made by `gru_cell` in `<GRUCell>` (", ", is used again, and the backward pass of "]),
        (state_kept_by_the_model, RuntimeError, None, [
            "`hidden` of the module `Remembering` (assigned at ", ") holds a graph, and may carry it from step"]),
        (doubles_in_place_of_gaps, RuntimeError, BACKWARD, [
            "`target` is float64 in step 3, and was float32 in steps 0-2 (put into a batch by `means_for_gaps` ("]),
        (two_losses_of_one_graph, RuntimeError, BACKWARD, [
            ": `shared`, made by `Tensor.tanh` (", "is part of both graphs, and the backward pass of `first` ("]),
    ],
)  # fmt: skip
def test_the_operands_are_told(
    loop: Callable[[], None], error: type[BaseException], call: str | None, says: Sequence[str], tmp_path: Path
) -> None:
    snapshot = capture_raising(loop, error, tmp_path)
    assert snapshot.failure.call == call and snapshot.cause is not None
    forward = (features_of_inference_mode, state_of_a_whole_batch, label_of_no_class, sentence_too_long)
    backward = call == BACKWARD or loop in (checkpoint_of_a_cache, state_kept_by_the_model)
    phase = "forward" if loop in forward else "backward" if backward else "optimizer"
    assert snapshot.failure.phase == phase
    note = NO_CHECKPOINT if loop is checkpoint_of_a_cache else NOT_OF_TORCH
    kind, said = fidelity(snapshot)
    assert (kind, (said or "").partition(";")[0]) == (("exact", "") if call is not None else ("unfaithful", note))
    assert "torch.Tensor.any" not in [one.target for one in snapshot.program.calls]  # of reprokit, looking at operands
    if loop is state_of_a_whole_batch:
        assert "torch's own code, `torch/nn/modules/rnn.py:" in origin(snapshot, snapshot.failure)
    assert [part for part in says if part not in snapshot.cause.text] == [], snapshot.cause.text


# -- where a NaN lies behind the exception --------------------------------------------------------------------------


def raise_at_a_bad_loss(error: type[BaseException]) -> None:
    model, optimizer = plain_training()
    for step, x, y in batches():
        loss = divided_loss(model(x), y, step == BAD_STEP)
        if not torch.isfinite(loss):
            raise error("loss is not finite")
        update(optimizer, loss)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_loop_that_gives_up_at_a_bad_loss(error: type[BaseException], tmp_path: Path) -> None:
    """The NaN is what went wrong, the exception is only how the loop took it."""
    snapshot = capture_raising(lambda: raise_at_a_bad_loss(error), error, tmp_path)
    assert where(snapshot) == (BAD_STEP, "forward", "torch.Tensor.div")
    assert snapshot.failure.kind == "nan"
    assert fidelity(snapshot) == EXACT


def test_the_last_bad_scalar_is_no_loss(tmp_path: Path) -> None:
    def loop() -> None:
        w = nn.Parameter(torch.tensor([60.0]))
        optimizer = torch.optim.SGD([w], lr=0.1)
        z = torch.exp(w * 2)
        ratio = (z / (1 + z)).mean()
        dt = 0.01 / z.detach().mean().item()
        assert dt > 0, "underflow in dt"
        loss = (z * dt).sum() + ratio
        loss.backward()
        optimizer.step()

    snapshot = capture_raising(loop, AssertionError, tmp_path)
    assert (snapshot.observed_at, snapshot.failure.call) == ("output", "torch.exp")
    assert not any(call.is_differentiation for call in snapshot.program.calls)
    found = diagnose(snapshot)
    assert found.fix is not None and found.fix.is_plausible is None and "loss" not in found.fix.outcome
    assert "the failure ended when tried, without a loss to check" in one_line(found)
    assert "there is no loss to check" in markdown(page(found))


@pytest.mark.parametrize(("mistake", "error"), [("unknown", NameError), ("[][7]", IndexError), ("len(3)", TypeError)])
def test_a_mistake_of_the_program_is_not_about_a_value(mistake: str, error: type[Exception], tmp_path: Path) -> None:
    """An infinite mask that the loop has just tested has nothing to do with it."""

    def loop() -> None:
        model, optimizer = plain_training()
        for step, x, y in batches():
            scores = model(x)
            masked = scores + torch.tensor(-torch.inf)
            if step == BAD_STEP and torch.isinf(masked).any():
                eval(mistake)
            update(optimizer, divided_loss(scores, y, False))

    snapshot = capture_raising(loop, error, tmp_path)
    assert (snapshot.observed_at, snapshot.step) == ("exception", BAD_STEP)


# -- what is no failure ---------------------------------------------------------------------------------------------


def test_exceptions_that_the_loop_handles_are_its_own_business(tmp_path: Path) -> None:
    num_handled = 0
    with Session(directory=tmp_path) as session:
        model, optimizer = plain_training()
        for step, x, y in batches():
            try:
                update(optimizer, classify(model, x[:, :3] if step == BAD_STEP else x, y))
            except RuntimeError:
                num_handled += 1
    assert num_handled == 1 and session.snapshots == []


def test_an_exception_behind_a_handled_one_is_saved(tmp_path: Path) -> None:
    """Frameworks raise their own exception from the one of the step."""

    class TrainerError(Exception):
        pass

    def loop() -> None:
        try:
            shape_mismatch()
        except RuntimeError as error:
            raise TrainerError("step failed") from error

    snapshot = capture_raising(loop, TrainerError, tmp_path)
    assert where(snapshot) == (BAD_STEP, "forward", "torch.nn.functional.linear")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_wishes_of_the_user_are_no_failures(error: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(error), Session(directory=tmp_path) as session:
        model, optimizer = plain_training()
        for step, x, y in batches():
            loss = classify(model, x, y)
            if step == BAD_STEP:
                raise error
            update(optimizer, loss)
    assert session.snapshots == []


@pytest.mark.parametrize("num_steps", [0, STEPS])
def test_an_exception_outside_of_a_step_is_no_failure(num_steps: int, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space"), Session(directory=tmp_path) as session:
        model, optimizer = plain_training()
        for _, x, y in batches(num_steps):
            update(optimizer, classify(model, x, y))
        raise OSError("no space for the checkpoint")
    assert session.snapshots == []


def test_a_bad_update_before_the_exception_is_what_is_saved(tmp_path: Path) -> None:
    """The weights are ruined at step 3; at step 4 the loop's own check raises."""

    def loop() -> None:
        model, optimizer = plain_training()
        for step, x, y in batches():
            logits = model(x)
            if torch.isnan(logits).any():
                raise ValueError("bad logits")
            optimizer.param_groups[0]["lr"] = float("inf") if step == BAD_STEP else 0.1
            update(optimizer, F.cross_entropy(logits, y))

    # On a busy machine a copy may be due, and the weights be looked at, before the loop's own check.
    snapshot = capture_raising(loop, ValueError, tmp_path, history=8)
    assert where(snapshot) == (BAD_STEP, "optimizer", "torch.optim.SGD.step")
    assert fidelity(snapshot) == EXACT


# -- the command line -----------------------------------------------------------------------------------------------

TRAINING = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, fail):
        h = self.first(x[:, :3] if fail == "shape" else x)
        return self.second(h)

def step(model, optimizer, x, y, fail):
    loss = F.cross_entropy(model(x, fail), y)
    if fail == "loop":
        raise ValueError("enough")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

def main(fail):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(5):
        x = torch.randn(8, 4)
        y = (x.sum(1) > 0).long()
        step(model, optimizer, x, y, fail if number == 3 else "")
        print(number)
    if fail == "after":
        raise OSError("after training")
    if fail == "exit":
        raise SystemExit(9)
"""


@pytest.mark.parametrize(("fail", "code"), [("shape", 3), ("loop", 1)])
def test_the_traceback_is_the_one_that_python_prints(fail: str, code: int, run_python: Run, tmp_path: Path) -> None:
    """What the script raises itself may be no failure, so its exit code stays its own."""
    plain, watched = run_both(TRAINING + f'\nmain("{fail}")\n', run_python, tmp_path)
    assert plain.returncode == 1 and watched.returncode == code
    assert without_own_lines(watched.stderr) == plain.stderr
    assert watched.stdout == plain.stdout
    assert [path.name for path in tmp_path.glob("*.pt")] == ["train-step3.repro.pt"]
    last_line = watched.stderr.splitlines()[-1]
    assert last_line.startswith("reprokit: next: reprokit ") and last_line.endswith("train-step3.repro.pt")


HYDRA = """
import hydra

@hydra.main(version_base=None, config_path=None)
def run(config):
    main(config.fail)

run()
"""


def test_an_exception_that_hydra_turns_into_an_exit(run_python: Run, tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    (tmp_path / "train.py").write_text(TRAINING + HYDRA)
    watched = run_python("-m", "reprokit", "capture", "train.py", "+fail=shape")
    assert watched.returncode == 3 and "captured RuntimeError" in watched.stderr


def exits_while_handling() -> None:
    try:
        shape_mismatch()
    except RuntimeError:
        raise SystemExit(1) from None


def test_the_exception_behind_an_exit(tmp_path: Path) -> None:
    snapshot = capture_raising(exits_while_handling, SystemExit, tmp_path)
    assert where(snapshot) == (BAD_STEP, "forward", "torch.nn.functional.linear")
    assert snapshot.failure.exception is not None and snapshot.failure.exception[0] == "RuntimeError"
    assert fidelity(snapshot) == EXACT


def recovers_and_exits() -> None:
    """The step that raised is tried again, and completed, before the script ends for another reason."""
    model, optimizer = plain_training()
    for step, x, y in batches():
        if step == BAD_STEP:
            with contextlib.suppress(RuntimeError):
                classify(model, x[:, :3], y)
        update(optimizer, classify(model, x, y))
    raise SystemExit(1)


def is_interrupted_after_an_exception() -> None:
    with contextlib.suppress(RuntimeError):
        shape_mismatch()
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise SystemExit(130) from None


@pytest.mark.parametrize("loop", [recovers_and_exits, is_interrupted_after_an_exception])
def test_exits_for_other_reasons(loop: Callable[[], None], tmp_path: Path) -> None:
    with pytest.raises(SystemExit), Session(directory=tmp_path) as session:
        loop()
    assert session.snapshots == []


def stopped_by_a_hook(model: nn.Module) -> None:
    def stop(*_: object) -> None:
        raise ValueError("enough")

    model.register_forward_hook(stop)
    model(torch.ones(1, 4))


def stopped_by_a_wrapper(model: nn.Module) -> None:
    try:
        model(torch.ones(1, 9))
    except RuntimeError as error:
        raise ValueError("the batch is odd") from error


@pytest.mark.parametrize(("stop", "is_failure"), [(stopped_by_a_hook, False), (stopped_by_a_wrapper, True)])
def test_what_the_script_raises_itself_is_saved_but_not_called_a_failure(
    stop: Callable[[nn.Module], None], is_failure: bool, tmp_path: Path
) -> None:
    model = plain_net()
    with described_once(), pytest.raises(ValueError), Session(directory=tmp_path) as session:
        stop(model)
    assert len(session.snapshots) == 1 and session.has_failed == is_failure


@pytest.mark.parametrize(
    ("fail", "code", "options"), [("after", 1, ()), ("exit", 9, ()), ("shape", 1, ("--on", "nonfinite"))]
)
def test_exits_that_are_the_scripts_own(
    fail: str, code: int, options: tuple[str, ...], run_python: Run, tmp_path: Path
) -> None:
    """Outside of steps, or of a kind that is not asked for."""
    plain, watched = run_both(TRAINING + f'\nmain("{fail}")\n', run_python, tmp_path, *options)
    assert plain.returncode == watched.returncode == code
    assert without_own_lines(watched.stderr) == plain.stderr
    assert watched.stdout == plain.stdout
    assert list(tmp_path.glob("*.pt")) == []
