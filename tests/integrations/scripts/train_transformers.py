import sys

import torch
from outcome import print_left_behind, print_parameters, run_modes
from torch import nn
from torch.utils.data import IterableDataset
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

BAD_BATCH = 3


class TinyConfig(PretrainedConfig):
    model_type = "tiny"


class MaskedMean(nn.Module):
    def forward(self, hidden, mask):
        weights = mask.unsqueeze(-1).float()
        return (hidden * weights).sum(1) / weights.sum(1)


class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(11, 6)
        self.pool = MaskedMean()
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(6, 3)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, attention_mask, labels):
        logits = self.head(self.drop(self.pool(self.embed(input_ids), attention_mask)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Batches(IterableDataset):
    """Rows of 4 a batch; one row of the bad batch is padding only, or has a token that does not exist."""

    def __init__(self, mode):
        self.mode = mode

    def __iter__(self):
        generator = torch.Generator().manual_seed(1)
        for row in range(24):
            tokens = torch.randint(0, 11, (5,), generator=generator)
            mask = torch.ones(5, dtype=torch.long)
            if row == 4 * BAD_BATCH + 1 and self.mode == "nan":
                mask.zero_()
            if row == 4 * BAD_BATCH + 1 and self.mode == "raise":
                tokens[2] = 11
            yield {"input_ids": tokens, "attention_mask": mask, "labels": tokens[0] % 3}


def new_callbacks():
    from reprokit.integrations.transformers import ReprokitCallback

    return [ReprokitCallback(name="train_transformers")]


def train(words):
    """Train as words like ``nan:callback`` say."""
    mode, *with_callback = words.split(":")
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    torch.manual_seed(0)
    callbacks = new_callbacks() if with_callback else []
    trainer = Trainer(TinyModel(TinyConfig()), arguments, train_dataset=Batches(mode), callbacks=callbacks)
    try:
        trainer.train()
        print_parameters(trainer.model)
    finally:
        print_left_behind()


run_modes(train, sys.argv[1:])
