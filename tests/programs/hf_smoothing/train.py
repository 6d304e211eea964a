"""Instruction tuning of a small GPT-2 with transformers' Trainer: label smoothing and a z-loss in compute_loss."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_pt_utils import LabelSmoother

MAX_LENGTH = 16


class Instructions(Dataset):
    """Question and answer as token ids, cut to MAX_LENGTH; the question's labels are ignored."""

    def __init__(self, n=40, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for i in range(n):
            length = int(torch.randint(3, 9, (1,), generator=g))
            if seed == 0 and i in (24, 25, 26, 27):  # questions that quote a whole document
                length = 20
            question = torch.randint(5, 30, (length,), generator=g).tolist()
            answer = [30 + token % 10 for token in question[:5]] + [2]
            self.rows.append((question, answer))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        question, answer = self.rows[i]
        return {"input_ids": (question + answer)[:MAX_LENGTH], "labels": ([-100] * len(question) + answer)[:MAX_LENGTH]}


class Collator:
    def __init__(self, pad=0):
        self.pad = pad

    def __call__(self, rows):
        width = max(len(row["input_ids"]) for row in rows)
        ids = torch.full((len(rows), width), self.pad)
        labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
        for i, row in enumerate(rows):
            n = len(row["input_ids"])
            ids[i, :n] = torch.tensor(row["input_ids"])
            labels[i, :n] = torch.tensor(row["labels"])
            mask[i, :n] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class InstructionTrainer(Trainer):
    """Label smoothing over the answers, and a small penalty on the size of the logits."""

    def __init__(self, *args, z_weight=1e-3, **kwargs):
        super().__init__(*args, **kwargs)
        self.z_weight, self.smoother = z_weight, LabelSmoother(epsilon=0.1)

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        z_loss = outputs["logits"].float().logsumexp(dim=-1).pow(2).mean()
        loss = self.smoother(outputs, labels, shift_labels=True) + self.z_weight * z_loss
        inputs["labels"] = labels
        return (loss, outputs) if return_outputs else loss


class Printer(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print(f"step {state.global_step} of {state.max_steps}")


def main():
    set_seed(11)
    config = GPT2Config(
        vocab_size=40, n_positions=MAX_LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    arguments = TrainingArguments(
        output_dir="output",
        per_device_train_batch_size=4,
        num_train_epochs=1,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        save_total_limit=1,
        bf16=True,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = InstructionTrainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Instructions(),
        eval_dataset=Instructions(8, seed=1),
        data_collator=Collator(),
        callbacks=[Printer()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
