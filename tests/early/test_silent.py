"""Layers that learn nothing, hooks that repair gradients, and scales that collapse."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import reprokit
from reprokit.capture.failure_text import cause_line
from reprokit.capture.rewind.checkpoint import History
from reprokit.capture.rewind.measure_steps import StepMeter
from reprokit.capture.save import event_step
from reprokit.capture.save.event_step import LEAST_SILENT, EventStep
from reprokit.locate.diagnose import diagnose
from reprokit.program.ir import Ref
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.checks.choice import choose_check
from reprokit.shrink.signature import Verdict
from tests.conftest import run_python_in
from tests.early.healthy import mlp


class _Watched:
    """A session under way with what it has told."""

    def __init__(self, session: reprokit.Session, events: list[reprokit.TrainingEvent]) -> None:
        self.session = session
        self.events = events


@contextlib.contextmanager
def _watched(folder: Path, *on: str) -> Iterator[_Watched]:
    torch.manual_seed(0)
    events: list[reprokit.TrainingEvent] = []
    with reprokit.capture(folder / "run.pt", on=on, on_event=events.append, quiet=True) as session:
        yield _Watched(session, events)


def _train(model: nn.Module, num_steps: int = 80) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(num_steps):
        x = torch.randn(8, 16)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
        optimizer.step()


def test_a_dead_layer_is_named_and_reduced_to_itself(tmp_path: Path) -> None:
    with _watched(tmp_path, "dead") as watched:
        model = mlp(16, 32, 1)
        with torch.no_grad():
            model[0].bias.fill_(-1e3)
        _train(model)
    (event,), (result,) = watched.events, watched.session.results
    assert (event.kind, event.severity, event.place) == ("dead", "error", "1")
    failure = result["failure"]
    assert (failure["kind"], failure["call"], failure["module"]) == ("dead", "torch.nn.functional.relu", "1")
    assert failure["event"]["source"] == "0.weight"
    assert (failure["event"]["quantity"], failure["event"]["value"]) == ("share of zeros", 1.0)
    assert failure["step"] == 0  # it has been so from the start
    assert str(cause_line(result)).startswith("the gradient of `0.weight` is missing or zero from step 0 on")
    snapshot = reprokit.load(tmp_path / "run.pt")
    rendered = reprokit.render(reprokit.shrink(snapshot, max_time=60), snapshot, tmp_path / "out")
    text = rendered.repro.read_text()
    assert rendered.verified == "20/20"
    assert "F.relu(" in text and "F.linear(" in text
    assert ".grad != 0).any(), " in text
    assert "A gradient that is not zero everywhere reaches `0.weight`." in rendered.issue.read_text()


def test_a_dead_layer_is_found_where_memory_holds_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps since the copy are never enough; those of the earlier copy count as well."""
    monkeypatch.setattr(History, "is_full", property(lambda history: len(history.steps) >= LEAST_SILENT - 5))
    with _watched(tmp_path, "dead") as watched:
        model = mlp(16, 32, 1)
        with torch.no_grad():
            model[0].bias.fill_(-1e3)
        _train(model)
    (event,) = watched.events
    assert event.kind == "dead" and event.step < 79  # not only when the run is over


def test_a_gradient_of_zero_by_design_gives_no_event(tmp_path: Path) -> None:
    class Unused(nn.Module):
        """A parameter that only takes part so that it has a gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(16, 32, 1)
            self.extra = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) + 0.0 * self.extra.sum()

    with _watched(tmp_path, "early") as watched:
        _train(Unused())
    assert not watched.session.snapshots
    assert not watched.events


def _train_a_dead_layer(rank: int, folder: str) -> None:
    with _watched(Path(folder), "dead") as watched:
        model = mlp(16, 8, 1)
        nn.init.constant_(model[0].bias, -1e3)
        _train(model, 40)
    assert len(watched.events) == 1


def test_each_spawned_process_has_an_event_log_of_its_own(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_train_a_dead_layer, (str(tmp_path),), nprocs=2)
    logs = sorted(tmp_path.glob("run.pid*.events.jsonl"))
    assert [len(log.read_text().splitlines()) for log in logs] == [1, 1]


class _Branches(nn.Module):
    """Two branches, of which one can be cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 1)
        self.way = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.way != "no_grad"):
            left = self.left(x)
        if self.way == "detach":
            left = left.detach()
        elif self.way == "rest":  # by design: it takes no part
            left = torch.zeros(len(x), 8)
        return self.head(torch.cat([left, self.right(x)], 1))


@pytest.mark.parametrize("sets_to_none", [True, False])
@pytest.mark.parametrize(
    ("way", "call", "place"),
    [
        ("detach", "torch.Tensor.detach", "left"),
        ("no_grad", "torch.nn.functional.linear", "left"),
        ("rest", None, None),
    ],
)
def test_a_branch_that_is_cut_off_is_named(
    way: str, call: str | None, place: str | None, sets_to_none: bool, tmp_path: Path
) -> None:
    with _watched(tmp_path, "early") as watched:
        model = _Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(120):
            model.way = way if step >= 60 else ""
            x = torch.randn(8, 16)
            optimizer.zero_grad(set_to_none=sets_to_none)
            (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
            optimizer.step()
    if call is None:
        assert not watched.events and not watched.session.snapshots
        return
    (event,), (result,) = watched.events, watched.session.results
    assert (event.kind, event.severity, event.began_at, event.place) == ("dead", "error", 60, place)
    assert (result["failure"]["step"], result["failure"]["call"]) == (60, call)
    assert result["failure"]["event"]["source"] == "left.weight"
    snapshot = reprokit.load(tmp_path / "run.pt")
    rendered = reprokit.render(reprokit.shrink(snapshot, max_time=60), snapshot, tmp_path / "out")
    text = rendered.repro.read_text()
    assert rendered.verified == "20/20"
    assert ".backward()" in text and ".grad is not None, " in text
    observed = "**Observed:** The gradient of `left.weight` is missing or zero from step 60 on. "
    assert observed in rendered.issue.read_text()
    (tmp_path / "mended.py").write_text(text.replace(".detach()", "").replace("torch.no_grad()", "torch.enable_grad()"))
    assert run_python_in(tmp_path, "mended.py").returncode == 0, text


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_layer_that_never_gets_a_gradient_is_a_warning(is_wanted: bool, tmp_path: Path) -> None:
    with _watched(tmp_path, "early") as watched:
        model = _Branches()
        model.way = "no_grad"
        model.left.requires_grad_(is_wanted)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(150):
            x = torch.randn(8, 16)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
            optimizer.step()
    assert not watched.session.snapshots
    if not is_wanted:
        assert not watched.events
        return
    (event,) = watched.events
    assert (event.kind, event.severity, event.place) == ("dead", "warning", "left")
    assert event.evidence.startswith("`left.weight` and 1 more get no gradient in ")


@pytest.mark.parametrize("begins", [0, 60])
def test_a_gradient_that_is_zero_from_a_step_on_is_dated(begins: int, tmp_path: Path) -> None:
    with _watched(tmp_path, "dead") as watched:
        model = mlp(16, 32, 32, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(120):
            if step == begins:
                nn.init.constant_(model[2].bias, -1e3)
            x = torch.randn(8, 16)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
            optimizer.step()
    (event,), (result,) = watched.events, watched.session.results
    assert (event.began_at, event.place, result["failure"]["step"]) == (begins, "3", begins)
    assert event.evidence.startswith("`torch.nn.functional.relu` lets no gradient through in `3`: the gradient of `0.")


@pytest.mark.parametrize("rate", [30.0, 10.0])
def test_a_net_that_dies_of_one_update_is_told_though_it_takes_some_steps(rate: float, tmp_path: Path) -> None:
    """More than half of the gradients are zero before the end: behind a ReLU that is usual."""
    with _watched(tmp_path, "dead") as watched:
        torch.manual_seed(0)
        model = mlp(12, 20, 20, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        shares = []
        for step in range(260):
            x = torch.rand(32, 12, generator=torch.Generator().manual_seed(step))
            optimizer.param_groups[0]["lr"] = rate if step == 60 else 0.01
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True) - 2).pow(2).mean().backward()
            optimizer.step()
            shares.append((model[2].weight.grad == 0).float().mean().item())
    begins = shares.index(1.0)
    assert 61 < begins < 68 and 0.5 < shares[begins - 1] < 1.0
    (event,) = watched.events
    assert (event.kind, event.began_at) == ("dead", begins)


def test_a_layer_that_fades_under_a_decay_gives_no_event(tmp_path: Path) -> None:
    """Its units die one by one; the last one takes the gradient of the layer before with it."""
    with _watched(tmp_path, "early") as watched:
        model = mlp(10, 32, 32, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=3.0)
        is_silent = []
        for _ in range(400):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(32, 10)), torch.randint(0, 2, (32,))).backward()
            optimizer.step()
            is_silent.append(not model[0].weight.grad.any())
    assert is_silent[-1] and not is_silent[100]
    assert not watched.events


@pytest.mark.parametrize("is_repaired", [True, False])
def test_a_hook_that_repairs_gradients_is_told(is_repaired: bool, tmp_path: Path) -> None:
    with _watched(tmp_path, "dead") as watched:
        model = nn.Linear(4, 8)
        for parameter in model.parameters():
            parameter.register_hook(torch.nan_to_num if is_repaired else lambda gradient: gradient * 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(40):
            h = model(torch.randn(4, 4))
            root = torch.sqrt(h * (h > 0)) if is_repaired else h.abs()
            torch.where(h > 0, root, h * 0).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    if not is_repaired:
        assert not watched.events
        return
    (event,), (result,) = watched.events, watched.session.results
    assert (event.kind, event.severity) == ("dead", "error")
    assert "the gradient of `weight` is nan in step " in event.evidence
    assert (result["failure"]["kind"], result["failure"]["call"]) == ("nan", "torch.sqrt")


def test_a_hook_that_repairs_gradients_from_midway_is_dated(tmp_path: Path) -> None:
    """Its looks for hooks are over when it begins; the gradient of zeros that it leaves is a reason of its own."""
    with _watched(tmp_path, "dead") as watched:
        body, head = nn.Linear(6, 16, bias=False), nn.Linear(16, 1)
        body.weight.register_hook(torch.nan_to_num)
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.05)
        for step in range(160):
            x = torch.randn(8, 6)
            x[7] *= step < 80
            hidden = body(x)
            optimizer.zero_grad()
            head(hidden / (hidden.pow(2).sum(1, keepdim=True).sqrt() + 1e-6)).pow(2).mean().backward()
            optimizer.step()
    (event,), (result,) = watched.events, watched.session.results
    assert (event.began_at, event.place, result["failure"]["step"]) == (80, "body", 80)
    assert "a hook makes it finite" in event.evidence
    assert result["fidelity_note"].startswith(
        "a hook makes the nan gradient of `body.weight` finite in training; hooks"
    )


def test_looks_for_silent_parameters_stop_until_they_are_paid_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that rest in turn are a new reason to look all the time."""
    looks: list[None] = []
    look = EventStep.find_silent
    monkeypatch.setattr(EventStep, "find_silent", lambda *given: (looks.append(None), look(*given))[1])
    with _watched(tmp_path, "dead") as watched:
        experts, head = nn.ModuleList(nn.Linear(16, 16) for _ in range(12)), nn.Linear(16, 1)
        optimizer = torch.optim.SGD([*experts.parameters(), *head.parameters()], lr=0.01)
        for step in range(400):
            optimizer.zero_grad()
            head(experts[step // 5 % 12](torch.randn(8, 16))).pow(2).mean().backward()
            optimizer.step()
            if step == 390:
                assert len(looks) <= 6  # four that are free, and those that the seconds so far paid for
    assert not watched.events


def test_a_scale_that_collapses_leads_to_the_first_overflow(tmp_path: Path) -> None:
    with _watched(tmp_path, "scale") as watched:
        model = mlp(16, 32, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for step in range(80):
            x = torch.randn(8, 16)
            with torch.autocast("cpu", torch.float16):
                y = model(x)
                loss = (y.float() - x.sum(1, keepdim=True)).pow(2).mean()
            if step >= 50:
                loss = loss + y.float().mul(1e30).sum()  # its gradient is more than half precision holds
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    (event,), (result,) = watched.events, watched.session.results
    assert (event.kind, event.severity, event.began_at) == ("scale", "error", 50)
    assert result["failure"]["step"] == 50
    assert result["failure"]["kind"] in ("inf", "nan")


def test_a_dead_layer_keeps_what_makes_it_dead(tmp_path: Path) -> None:
    """A parameter far from the dead activation: the repro without the bias, or with equal classes, shows nothing."""
    with _watched(tmp_path, "dead"):
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
        with torch.no_grad():
            model[2].bias.fill_(-25.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(80):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(0, 3, (8,))).backward()
            optimizer.step()
    snapshot = reprokit.load(tmp_path / "run.pt")
    assert snapshot.failure.call == "torch.nn.functional.relu"
    rendered = reprokit.render(reprokit.shrink(snapshot, max_time=60), snapshot, tmp_path / "out")
    text = rendered.repro.read_text()
    assert rendered.verified == "20/20"
    (tmp_path / "alive.py").write_text(text.replace("relu(", "tanh("))
    assert run_python_in(tmp_path, "alive.py").returncode == 0, text


def test_the_bias_that_kills_a_layer_stays_in_the_repro(tmp_path: Path) -> None:
    """Without it a negative weight would keep the activation below zero, and the diagnosis would name another cause."""
    with _watched(tmp_path, "dead"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(90):
            if step == 30:
                nn.init.constant_(model[2].bias, -50.0)
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x.abs().sum(1, keepdim=True)).backward()
            optimizer.step()
    snapshot = reprokit.load(tmp_path / "run.pt")
    reduction = reprokit.shrink(snapshot, max_time=60)
    assert "The bias `2.bias` " in diagnose(snapshot).mechanism
    text = reprokit.render(reduction, snapshot, tmp_path / "out").repro.read_text()
    mended = re.sub(r"bias = .*", "bias = torch.zeros(1)", text)
    (tmp_path / "mended.py").write_text(mended)
    assert mended != text and run_python_in(tmp_path, "mended.py").returncode == 0, text


class _Residual(nn.Module):
    """A layer in a residual block, which learns nothing once its activation is dead."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inp, self.layer, self.act, self.out = nn.Linear(6, 8), nn.Linear(8, 8), act, nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        return self.out(x + self.act(self.layer(x)))


@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU(inplace=True), torch.relu_, torch.Tensor.relu_])
def test_the_repro_of_a_dead_activation_passes_with_another_one(
    act: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    """Nothing else stops the gradient in the repro either, such as a layer that reads only zeros."""
    with _watched(tmp_path, "dead"):
        model = _Residual(act)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(120):
            if step == 60:
                nn.init.constant_(model.layer.bias, -40.0)
            x = torch.randn(8, 6)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x[:, :3].tanh()).backward()
            optimizer.step()
    snapshot = reprokit.load(tmp_path / "run.pt")
    assert str(snapshot.failure.call).rpartition(".")[2].rstrip("_") == "relu"
    assert diagnose(snapshot).id == "dead-relu-bias"
    rendered = reprokit.render(reprokit.shrink(snapshot, max_time=60), snapshot, tmp_path / "out")
    text = rendered.repro.read_text()
    assert rendered.verified == "20/20" and "relu" in text
    assert run_python_in(tmp_path, "out/repro.py").returncode == 1, text
    (tmp_path / "alive.py").write_text(re.sub(r"F\.relu\(|torch\.relu_?\(|\.relu_\(", _leaky, text))
    assert run_python_in(tmp_path, "alive.py").returncode == 0, text


def _leaky(relu: re.Match[str]) -> str:
    return ".mul_(1.0" if relu[0].startswith(".") else "F.leaky_relu("


def test_a_look_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more steps are played than are needed once the time is over."""
    played = []
    before = StepMeter.before

    def counted(meter: StepMeter, *args: Any) -> None:
        before(meter, *args)
        played.append(len(meter.steps))

    monkeypatch.setattr(StepMeter, "before", counted)
    monkeypatch.setattr(event_step, "_PLAYED_SECONDS", 0.0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model[0].weight.register_hook(lambda gradient: gradient * 1.0)
    with reprokit.capture(on=("nonfinite", "early"), quiet=True):
        for _ in range(200):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
    assert max(played) == 2 * event_step.LEAST_SILENT


def test_modules_whose_parameters_share_a_name_are_told_apart(tmp_path: Path) -> None:
    with _watched(tmp_path, "dead") as watched:
        encoder, head = nn.Linear(6, 8), nn.Linear(8, 1)
        optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.01)
        for step in range(80):
            x = torch.randn(8, 6)
            h = encoder(x)
            loss = (head(h.detach() if step >= 20 else h) - x.sum(1, keepdim=True)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (event,) = watched.events
    assert (event.kind, event.began_at) == ("dead", 20) and "`encoder.weight` gets no gradient" in event.evidence
    found = diagnose(reprokit.load(tmp_path / "run.pt"))
    assert found.id == "cut-from-graph" and "the share of zeros in the gradient is 0, not 1" in found.evidence[0]


def _detached(tmp_path: Path) -> reprokit.Snapshot:
    """Two towers with a contrastive loss, of which one is cut off from step 60 on."""
    with _watched(tmp_path, "dead"):
        left = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        right, scale, labels = nn.Linear(5, 4), nn.Parameter(torch.tensor(1.0)), torch.arange(8)
        optimizer = torch.optim.SGD([*left.parameters(), *right.parameters(), scale], lr=0.01)
        for step in range(120):
            zi = nn.functional.normalize(left(torch.randn(8, 6)))
            zi = zi.detach() if step >= 60 else zi
            logits = scale.exp() * zi @ right(torch.randn(8, 5)).T
            loss = nn.functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            ((loss + nn.functional.cross_entropy(logits.T, labels)) / 2).backward()
            optimizer.step()
    return reprokit.load(tmp_path / "run.pt")


def test_a_layer_that_is_cut_off_needs_no_more_than_itself_and_the_cut(tmp_path: Path) -> None:
    snapshot = _detached(tmp_path)
    reduction = reprokit.shrink(snapshot, max_time=60)
    rendered = reprokit.render(reduction, snapshot, tmp_path / "out")
    text = rendered.repro.read_text()
    assert rendered.verified == "20/20"
    assert "F.linear(" in text and ".detach()" in text and reduction.program.num_calls <= 4, text
    assert not any(word in text for word in ("relu", "normalize", "exp", " * ", " + ", " / ")), text
    issue = (tmp_path / "out" / "issue.md").read_text()
    assert "It passes with" not in issue and " matter" not in issue.split("**In your own words")[0]
    (tmp_path / "mended.py").write_text(text.replace(".detach()", ""))
    assert run_python_in(tmp_path, "mended.py").returncode == 0, text


def test_an_event_passes_only_in_a_run_that_ends_without_it(tmp_path: Path) -> None:
    snapshot = _detached(tmp_path)
    whole, check = Candidate(snapshot.program, snapshot.tensors), choose_check(None, snapshot)
    found = check(whole)
    assert found is not None
    check = check.adopted(found, whole)
    verdicts = {"as it is": check.judge(check(whole), whole)}
    cut = next(index for index, call in enumerate(whole.program.calls) if call.name == "detach")
    call = whole.program.calls[cut]
    mended = whole.without_calls({cut}, {call.output_refs()[0]: Ref(call.input_refs()[0])})
    verdicts["mended"] = check.judge(check(mended), mended)
    label = next(item.value for item in whole.program.inputs if whole.tensors[item.value].dtype is torch.int64)
    raising = whole.with_tensors({label: whole.tensors[label] + 8})
    verdicts["label out of bounds"] = check.judge(check(raising), raising)
    elsewhere = replace(check, blocking="torch.Tensor.sign")
    verdicts["blocked elsewhere"] = elsewhere.judge(elsewhere(whole), whole)
    no_backward = whole.with_calls(call for call in whole.program.calls if not call.is_differentiation)
    verdicts["no backward pass"] = check.judge(check(no_backward), no_backward)
    assert verdicts == {
        "as it is": Verdict.SAME,
        "mended": Verdict.PASSES,
        "label out of bounds": Verdict.INVALID,
        "blocked elsewhere": Verdict.OTHER,
        "no backward pass": Verdict.OTHER,
    }
