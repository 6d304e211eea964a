"""Numbers of a run in TensorBoard, W&B (offline), MLflow (local files) and Trackio, with the real packages."""

from __future__ import annotations

import csv
import json
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import Run

LOOP = """\
import torch
import reprokit

{setup}
torch.manual_seed(0)
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
with reprokit.capture(quiet=True, record="1", on_numbers=sink) as session:
    for step in range(3):
        optimizer.zero_grad()
        net(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        session.note(accuracy=step / 4)
{end}
"""


def train(run: Run, folder: Path, setup: str, end: str, **variables: str) -> str:
    (folder / "train.py").write_text(LOOP.format(setup=setup, end=end))
    done = run("train.py", **variables)
    assert done.returncode == 0 and "raised" not in done.stderr, done.stderr
    return done.stdout


def test_tensorboard(tmp_path: Path, run_python: Run) -> None:
    reader: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    setup = "from reprokit.integrations.tensorboard import TensorBoardSink\nsink = TensorBoardSink('runs')"
    train(run_python, tmp_path, setup, "sink.close()")
    events = reader.EventAccumulator(str(tmp_path / "runs")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("grad_norm/weight")]
    assert [step for step, _ in found] == [0, 1, 2] and found[0][1] == pytest.approx(4 * 2**0.5)


def test_wandb_offline(tmp_path: Path, run_python: Run) -> None:
    pytest.importorskip("wandb")
    setup = (
        "import wandb\nfrom reprokit.integrations.wandb import WandbSink\n"
        "run = wandb.init(mode='offline', project='p', dir='.')\nsink = WandbSink()"
    )
    end = "print(float(run.summary['reprokit/step']), float(run.summary['reprokit/grad_norm/bias']))\nrun.finish()"
    assert train(run_python, tmp_path, setup, end, WANDB_SILENT="true").splitlines()[-1] == "2.0 4.0"
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_mlflow_in_a_local_folder(tmp_path: Path, run_python: Run) -> None:
    try:
        import mlflow  # noqa: F401
    except Exception as error:  # an old release with a new protobuf raises whatever it meets
        pytest.skip(f"mlflow cannot be imported: {error}")
    setup = (
        "import mlflow\nfrom reprokit.integrations.mlflow import MlflowSink\n"
        "mlflow.set_tracking_uri('file:runs')\n"
        "run = mlflow.start_run()\nsink = MlflowSink()"
    )
    end = (
        "found = mlflow.tracking.MlflowClient().get_metric_history(run.info.run_id, 'grad_norm/bias')\n"
        "print([(metric.step, metric.value) for metric in found])\nmlflow.end_run()"
    )
    printed = train(run_python, tmp_path, setup, end, MLFLOW_ALLOW_FILE_STORE="true").splitlines()[-1]
    assert printed == "[(0, 4.0), (1, 4.0), (2, 4.0)]"


def test_trackio(tmp_path: Path, run_python: Run) -> None:
    pytest.importorskip("trackio")
    setup = (
        "import trackio\nfrom reprokit.integrations.trackio import TrackioSink\n"
        "trackio.init(project='p', name='x', auto_log_cpu=False, auto_log_gpu=False)\nsink = TrackioSink()"
    )
    train(run_python, tmp_path, setup, "trackio.finish()", TRACKIO_DIR=str(tmp_path / "tracked"))
    (file,) = (tmp_path / "tracked").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, _ in rows] == [0, 1, 2] and '"grad_norm/bias"' in str(rows[0][1])


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
