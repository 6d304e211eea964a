"""Survival analysis with Lightning: a network gives the shape and scale of a Weibull distribution for each patient."""

import argparse
import logging
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Cohort(Dataset):
    """(features, years in the study, 1 if the event was seen); one patient left on the first day."""

    def __init__(self, n=96, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 5, generator=g)
        risk = torch.exp(0.5 * self.x[:, 0] - 0.3 * self.x[:, 1])
        self.years = -torch.log(torch.rand(n, generator=g).clamp(0.01)) / risk + 0.05
        self.event = (torch.rand(n, generator=g) < 0.7).float()
        if seed == 0:
            self.years[59], self.event[59] = 0.0, 0.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.years[i], self.event[i]


class WeibullHead(nn.Module):
    """Shape below one: the hazard falls with time."""

    def __init__(self, width):
        super().__init__()
        self.shape, self.scale = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, h):
        return torch.sigmoid(self.shape(h)).squeeze(-1), F.softplus(self.scale(h)).squeeze(-1) + 0.1


class Survival(L.LightningModule):
    def __init__(self, lr=1e-2, width=16, calibration=0.1):
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Linear(5, width), nn.BatchNorm1d(width), nn.SiLU(), nn.Dropout(0.1)]
        self.body = nn.Sequential(*layers, nn.Linear(width, width), nn.SiLU())
        self.head = WeibullHead(width)

    def forward(self, x):
        return self.head(self.body(x))

    def negative_log_likelihood(self, shape, scale, years, event):
        cumulative = (years / scale) ** shape
        seen = event > 0
        log_hazard = torch.log(shape[seen] / scale[seen]) + (shape[seen] - 1) * torch.log(years[seen] / scale[seen])
        return (cumulative.sum() - log_hazard.sum()) / len(years)

    def training_step(self, batch, batch_idx):
        x, years, event = batch
        shape, scale = self(x)
        nll = self.negative_log_likelihood(shape, scale, years, event)
        median = scale * 0.6931 ** (1 / shape)
        calibration = F.smooth_l1_loss(median.clamp(max=20.0), years)
        self.log_dict({"nll": nll, "calibration": calibration})
        return nll + self.hparams.calibration * calibration

    def validation_step(self, batch, batch_idx):
        x, years, event = batch
        self.log("val_nll", self.negative_log_likelihood(*self(x), years, event))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Printer(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        print(f"step {trainer.global_step} loss {outputs['loss'].item():.4f}")

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            print(f"val_nll {trainer.callback_metrics['val_nll']:.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    L.seed_everything(5, verbose=False)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        gradient_clip_val=1.0,
        val_check_interval=4,
        callbacks=[Printer(), ModelCheckpoint(dirpath="checkpoints", monitor="val_nll"), LearningRateMonitor()],
        logger=L.pytorch.loggers.CSVLogger("logs"),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Survival(args.lr), DataLoader(Cohort(), 8), DataLoader(Cohort(16, seed=1), 8))


if __name__ == "__main__":
    main()
