import logging
import sys
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader

if "pytorch_lightning" in sys.argv:
    import pytorch_lightning as L
else:
    import lightning as L

from outcome import print_left_behind, print_parameters, run_modes

BAD_BATCH = 3
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Standardize(nn.Module):
    """Zero mean and unit deviation of a batch: nothing good comes of a batch whose rows are all the same."""

    def forward(self, batch):
        return (batch - batch.mean(0)) / batch.std(0)


class Automatic(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.standardize = Standardize()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))

    def loss(self, batch):
        features, labels = batch
        return nn.functional.cross_entropy(self.layers(self.standardize(features)), labels)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validation_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Manual(Automatic):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()


class Closure(Automatic):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def batches(mode="healthy"):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(6):
        features = torch.randn(5, 4, generator=generator)
        labels = torch.randint(0, 3, (5,), generator=generator)
        if number == BAD_BATCH and mode == "nan":
            features[:] = features[0]
        if number == BAD_BATCH and mode == "raise":
            labels[2] = 3
        rows += zip(features, labels, strict=True)
    return DataLoader(rows, batch_size=5)


def new_callbacks():
    from reprokit.integrations.lightning import ReprokitCallback

    return [ReprokitCallback(name="train_lightning")]


def train(words):
    """Train as words like ``manual:nan:callback`` say."""
    loop, mode, *with_callback = words.split(":")
    L.seed_everything(0, verbose=False)
    module = {"automatic": Automatic, "manual": Manual, "closure": Closure}[loop]()
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=new_callbacks() if with_callback else [],
    )
    try:
        trainer.fit(module, batches(mode), batches())
        print_parameters(module)
    finally:
        print_left_behind()


run_modes(train, [word for word in sys.argv[1:] if word != "pytorch_lightning"])
