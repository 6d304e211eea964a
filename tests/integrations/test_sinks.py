"""Numbers of a run in TensorBoard, as W&B, MLflow and Trackio are given them, and in the logs of trainers."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import Run

LOOP = """\
import torch
import reprokit
from reprokit.integrations.tensorboard import TensorBoardSink

sink = TensorBoardSink("runs")
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
with reprokit.capture(quiet=True, record="1", on_numbers=sink):
    for step in range(3):
        optimizer.zero_grad()
        net(torch.ones(4, 2)).sum().backward()
        optimizer.step()
sink.close()
"""


def test_tensorboard(tmp_path: Path, run_python: Run) -> None:
    reader: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tmp_path / "train.py").write_text(LOOP)
    done = run_python("train.py")
    assert done.returncode == 0 and "raised" not in done.stderr, done.stderr
    events = reader.EventAccumulator(str(tmp_path / "runs")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("grad_norm/weight")]
    assert [step for step, _ in found] == [0, 1, 2] and found[0][1] == pytest.approx(4 * 2**0.5)


class Tracker(ModuleType):
    """Stands for the package of a tracker, which no environment of the tests has; notes what it is called with."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[Any] = []
        self.run = self  # of W&B

    def define_metric(self, name: str, **options: Any) -> None:
        """Of W&B."""

    def log(self, numbers: dict[str, float], **options: Any) -> None:
        self.calls.append((numbers, options))

    log_metrics = log


@pytest.mark.parametrize(
    ("name", "sink", "logged"),
    [
        ("wandb", "WandbSink", ({"reprokit/step": 2, "reprokit/loss": 0.5, "reprokit/zeros/h[0]": 0.0}, {})),
        ("mlflow", "MlflowSink", ({"loss": 0.5, "zeros/h_0_": 0.0}, {"step": 2, "run_id": None})),
        ("trackio", "TrackioSink", ({"loss": 0.5, "zeros/h[0]": 0.0}, {"step": 2})),
    ],
)
def test_a_tracker_is_given_the_numbers_of_a_step(
    name: str, sink: str, logged: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker(name)
    monkeypatch.setitem(sys.modules, name, tracker)
    monkeypatch.delitem(sys.modules, f"reprokit.integrations.{name}", raising=False)
    made = getattr(importlib.import_module(f"reprokit.integrations.{name}"), sink)()
    made({"step": 2, "loss": 0.5, "zeros/h[0]": 0.0})
    assert tracker.calls == [logged]
    monkeypatch.delitem(sys.modules, f"reprokit.integrations.{name}")


LIGHTNING = """\
import torch
import lightning as L
from lightning.pytorch.loggers import CSVLogger
from reprokit.integrations.lightning import ReprokitCallback


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, index):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


logger = CSVLogger(".", name="csv", version="x")
callback = ReprokitCallback(record="1", quiet=True)
options = dict(enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, accelerator="cpu")
trainer = L.Trainer(max_epochs=1, logger=logger, callbacks=[callback], log_every_n_steps=1, **options)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2))
"""
TRANSFORMERS = """\
import json
import torch
from transformers import Trainer, TrainingArguments
from reprokit.integrations.transformers import ReprokitCallback
from reprokit.snapshot.format import load


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(2, 1), 0

    def forward(self, x, labels=None):
        self.calls += 1
        return {"loss": self.layer(x).mean() * (float("nan") if self.calls == 4 else 1)}


data = [{"x": torch.ones(2), "labels": torch.ones(1)} for _ in range(8)]
args = TrainingArguments("out", max_steps=4, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True)
callback = ReprokitCallback(record="1", quiet=True, output="x.pt")
trainer = Trainer(Net(), args, train_dataset=data, callbacks=[callback])
try:
    trainer.train()
finally:
    print(json.dumps([row["step"] for row in trainer.state.log_history if "reprokit/grad_norm/layer.weight" in row]))
    print(json.dumps([sorted(row.noted or {}) for row in load("x.pt").timeline]))
"""


def test_the_callback_of_lightning_logs_to_its_loggers(tmp_path: Path, run_python: Run) -> None:
    pytest.importorskip("lightning")
    (tmp_path / "train.py").write_text(LIGHTNING)
    done = run_python("train.py")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "csv" / "x" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row.get("reprokit/grad_norm/weight")] == ["0", "1", "2"]


def test_the_callback_of_transformers_keeps_numbers_both_ways(tmp_path: Path, run_python: Run) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(TRANSFORMERS)
    done = run_python("train.py")
    assert done.returncode == 3, done.stderr
    steps, noted = map(json.loads, done.stdout.splitlines()[-2:])
    assert steps == [0, 1, 2] and "learning_rate" in noted[0]


def test_the_log_history_of_a_trainer_holds_the_last_hundred_rows() -> None:
    pytest.importorskip("transformers")
    from reprokit.integrations.transformers import ReprokitCallback

    callback, own = ReprokitCallback(record="1", quiet=True), {"loss": 1.0, "step": 0}
    state = SimpleNamespace(log_history=[own])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    callback.on_train_begin(None, state, None)
    for _ in range(130):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    callback.on_train_end(None, state, None)
    assert state.log_history[0] is own
    assert [row["step"] for row in state.log_history[1:]] == list(range(30, 130))
