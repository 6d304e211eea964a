"""Programs with a known cause, and that cause mended by hand: does each edited program train to its end?

    python benchmarks/mended.py FOLDER [--only NAME[,NAME]] [--write TARGET]

FOLDER has a folder for every program, with a `case.json` that names its script. Every program runs twice without
reprokit: as it is, and mended. A run ends at the first loss, gradient or parameter that is not finite. Where possible,
the edit is in the code of the failing step, so that the step is finite with the state and the batch it was captured
with. Exit code 1 if a mended program fails, or if an unmended one that has to fail does not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from command import JSON, new_parser, print_json

Edit = tuple[str, str, str]  # a file, a text that it has once, and the text in its place

_DISTANCE = ("(out - out.detach()).pow(2).sum().sqrt()", "((out - out.detach()).pow(2).sum() + 1e-12).sqrt()")
# Without any counts all clients have the same share.
_SHARE = (
    "share = counts / counts.sum()",
    "share = counts / counts.sum() if counts.sum() > 0 else torch.full((2,), 0.5)",
)
_PINBALL = (
    "        e = y - pred[:, k]\n",
    "        e = torch.where(y == -999999.0, 0.0, y - pred[:, k])  # the code of a missing value\n",
)

MENDED: dict[str, list[Edit]] = {
    "averaged_model_with_buffers": [("train.py", *_DISTANCE)],
    "bias_reset_kills_block": [("classify.py", "default=-40.0", "default=0.0")],
    # A target that is too long adds 0 to the loss; the recording stays as short as it was.
    "ctc_target_too_long": [("train_asr.py", "nn.CTCLoss(blank=0)", "nn.CTCLoss(blank=0, zero_infinity=True)")],
    # Not the betas: the ratios are a buffer, which comes from before the step.
    "ddpm_snr_zero": [("ddpm.py", "/ self.snr[t]\n", "/ self.snr[t].clamp(min=1e-8)\n")],
    # The sums alone: the masks that the step was captured with are in half precision.
    "dice_sums_in_half": [
        ("segment.py", "(prob * target).sum()", "(prob * target).sum(dtype=torch.float32)"),
        (
            "segment.py",
            "prob.pow(2).sum() + target.sum()",
            "prob.pow(2).sum(dtype=torch.float32) + target.sum(dtype=torch.float32)",
        ),
    ],
    "distill_half_teacher": [
        (
            "distill.py",
            "p = F.softmax(teacher / self.t, dim=1)",
            "log_p = F.log_softmax(teacher.float() / self.t, dim=1)",
        ),
        ("distill.py", "(p * (p.log() - log_q))", "(log_p.exp() * (log_p - log_q))"),
    ],
    "embedding_bag_adam_no_eps": [
        ("tabular.py", '"--eps", type=float, default=0.0', '"--eps", type=float, default=1e-8')
    ],
    "fedavg_sizes_zero": [("fed.py", "if not self.guard or sizes.sum() > 0", "if sizes.sum() > 0")],
    "gcn_isolated_node": [("gcn.py", "dinv = deg.pow(-0.5)", "dinv = deg.clamp(min=1).pow(-0.5)")],
    # Every position sees itself.
    "gpt_window_and_padding": [("model.py", "        if self.keep_self:\n    ", "")],
    "gradient_penalty_then_zero_grad": [("train.py", "centred.abs().amax(0)", "centred.abs().amax(0).clamp(min=1e-6)")],
    # The Trainer divides by the number of labels that count; its model takes another function of the loss.
    "hf_labels_all_ignored": [
        (
            "train.py",
            "args = TrainingArguments(",
            "plain_loss = model.loss_function\n\n\n"
            "def loss_of_some(*inputs, num_items_in_batch=None, **options):\n"
            "    return plain_loss(*inputs, num_items_in_batch=max(1, int(num_items_in_batch)), **options)\n\n\n"
            "model.loss_function = loss_of_some\n"
            "args = TrainingArguments(",
        )
    ],
    # Not the radius: the recurrent weights are a buffer, and the state has grown already.
    "hidden_state_grows": [("stream.py", "h @ self.w)\n", "h @ self.w).clamp(max=100.0)\n")],
    "hydra_restart_learning_rate": [("conf/config.yaml", "restart_lr: 20.0", "restart_lr: 2.0e-3")],
    "image_cache_scaled_in_place": [("train_cached.py", "img.mul_(1.6)", "img = img * 1.6")],
    "infonce_temperature_falls": [
        (
            "simclr.py",
            "self.temperature if self.floor is None else self.temperature.clamp(min=self.floor)",
            "self.temperature.clamp(min=0.05)",
        )
    ],
    "maml_variance_zero": [("maml.py", '"--floor", type=float, default=0.0', '"--floor", type=float, default=0.01')],
    "mean_teacher_buffer_decay": [("mean_teacher.py", "default=1.2)", "default=0.2)")],
    # An empty text is read as one word that is padding.
    "packed_lstm_empty_text": [
        ("sentiment.py", "self.emb(ids), lengths, ", "self.emb(ids), lengths.clamp(min=1), "),
        ("sentiment.py", "/ lengths[:, None]", "/ lengths[:, None].clamp(min=1)"),
    ],
    "pinn_point_at_centre": [("pinn.py", '"--eps", type=float, default=0.0', '"--eps", type=float, default=1e-3')],
    # The deviation of one sample is 0; a loop that leaves a minibatch of one out would not take the captured one.
    "ppo_minibatch_of_one": [("ppo.py", "ad.std()", "ad.std(unbiased=False)")],
    "quantile_codes_five_batches": [("forecast.py", *_PINBALL)],
    "quantile_codes_one_batch": [("forecast.py", *_PINBALL)],
    # The bound alone is enough for the captured step, whose weights are those of the large rate.
    "realnvp_learning_rate": [
        ("flow.py", "        if self.bounded:\n    ", ""),
        ("flow.py", "default=1.2e-1", "default=5e-3"),
    ],
    "second_derivative_then_zero_grad": [
        ("train.py", '"--eps", type=float, default=0.0', '"--eps", type=float, default=1e-3')
    ],
    "teacher_buffers_averaged": [("train.py", *_DISTANCE)],
    "teacher_variance_negative": [("train.py", "default=1.2)", "default=0.2)")],
    "three_models_one_diverges": [("train.py", 'default="0.01,50,0.05"', 'default="0.01,0.02,0.05"')],
    "three_models_one_handled": [
        ("train.py", "x / x.norm(dim=1, keepdim=True)", "x / x.norm(dim=1, keepdim=True).clamp(min=1e-6)")
    ],
    "triplet_same_photo_twice": [("reid.py", '"--eps", type=float, default=0.0', '"--eps", type=float, default=1e-8')],
    "uncertainty_weight_drifts": [("multitask.py", '"--clamp", type=float)', '"--clamp", type=float, default=5.0)')],
    # In the loop, not in the data set: the captured batch is one of those that were not scaled.
    "vae_one_shard_unscaled": [
        (
            "vaekit/__main__.py",
            "        for x in loader:\n",
            "        for x in loader:\n            x = torch.where(x.amax(1, keepdim=True) > 1, x / 255, x)\n",
        )
    ],
    "weights_loaded_new_optimizer": [("train.py", *_SHARE)],
    "weights_loaded_one_optimizer": [("train.py", *_SHARE)],
    "wgan_gp_dead_critic": [
        ("train_gan.py", '"--gp-eps", type=float, default=0.0', '"--gp-eps", type=float, default=1e-8')
    ],
    "yolo_sqrt_of_negative": [("detect.py", "        if self.positive:\n    ", "")],
}

# The edit cannot act on the captured step, which fails again: the bad value is in its state or its data.
ELSEWHERE: dict[str, str] = {
    "bias_reset_kills_block": "state: a callback has written the bias",
    "image_cache_scaled_in_place": "data: the images have grown",
    "mean_teacher_buffer_decay": "state: variances of the teacher are negative",
    "teacher_variance_negative": "state: variances of the teacher are negative",
    "three_models_one_diverges": "state: of a model that has diverged",
}

# Stops a program at the first loss or parameter that is not finite.
_GUARD = """
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

backward = torch.Tensor.backward
def check(tensors, where):
    for tensor in tensors:
        if not bool(torch.isfinite(tensor).all()):
            raise SystemExit(f"{where} is not finite")
def guarded(self, *args, **options):
    check([self.detach()], "a loss")
    return backward(self, *args, **options)
def after(optimizer, args, options):
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    check([parameter.grad for parameter in parameters if parameter.grad is not None], "a gradient")
    check([parameter.detach() for parameter in parameters], "a parameter")
torch.Tensor.backward = guarded
register_optimizer_step_post_hook(after)
"""


def write(program: Path, target: Path) -> None:
    """Write a mended copy of the folder of a program."""
    shutil.copytree(program, target, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in MENDED[program.name]:
        path = target / file
        path.chmod(0o644)
        text = path.read_text()
        if text.count(old) != 1:
            raise SystemExit(f"error: {program.name}/{file} has {text.count(old)} times {old!r}")
        path.write_text(text.replace(old, new))


def finding(folder: Path) -> str:
    """The last line that a program prints when it fails without reprokit; empty if it trains to its end."""
    with tempfile.TemporaryDirectory() as guard:
        Path(guard, "sitecustomize.py").write_text(_GUARD)
        command = [sys.executable, *case_of(folder)["run"]]
        environment = {**os.environ, "PYTHONPATH": guard}
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    if run.returncode:
        return run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"exit code {run.returncode}"
    return ""


def case_of(folder: Path) -> JSON:
    """The contents of a program's `case.json`: command line, step, kind and cause of its failure."""
    return json.loads((folder / "case.json").read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every program as it is and mended."""
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--write", type=Path, metavar="TARGET", help="leave the mended programs there")
    options = parser.parse_args(arguments)
    results: list[JSON] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only.split(",") if options.only else sorted(MENDED):
            target, plain = (options.write or Path(scratch)) / name, Path(scratch) / f"{name}-plain"
            write(options.folder / name, target)
            shutil.copytree(options.folder / name, plain)
            before, after = finding(plain), finding(target)
            # A spike and a layer that is dead are finite.
            is_right = not after and bool(before) == (case_of(plain)["kind"] in ("nan", "inf", "exception"))
            results.append({"name": name, "plain": before, "mended": after, "right": is_right})
            print(f"{name:32} {before or 'trains':60.60} {after or 'trains'}", file=sys.stderr, flush=True)
    num_right = sum(result["right"] for result in results)
    print(f"{num_right} of {len(results)} as they should be", file=sys.stderr)
    print_json({"programs": results}, options.json)
    return num_right < len(results)


if __name__ == "__main__":
    sys.exit(main())
