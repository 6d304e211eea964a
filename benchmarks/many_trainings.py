"""The script that `many.py` starts on every rank: small trainings of each kind, in which a rank fails at a known step.

    torchrun --nproc-per-node 2 benchmarks/many_trainings.py cells KIND healthy-0 forward-1 ...
    torchrun --nproc-per-node 2 benchmarks/many_trainings.py overhead KIND ROUNDS

Each cell is a training under `reprokit.capture`, written to the working directory as FAILURE-CULPRIT.rankN.pt, with a
file FAILURE-CULPRIT.N.done once rank N is through. A healthy cell is also trained bare, and its ``done`` file says
whether losses and final parameters are the same bits. In a failing cell one rank's loss, gradient, update or part goes
bad.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from overhead import Control, Race, Reprokit, Variant
from shapes import VOCABULARY, LanguageModel, Training
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import reprokit

STEP = 6  # of the failure
NUM_STEPS = 10
WIDTH = 8
WARM_STEPS = 40


def spread(model: nn.Sequential, kind: str) -> nn.Module:
    """The model as this kind of training has it."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind.startswith("fsdp") or kind == "hsdp":
        options: dict[str, Any] = {}
        if kind == "fsdp-offload":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if kind == "fsdp-mixed":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        if kind == "hsdp":
            shape = (2, dist.get_world_size() // 2)
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for part in (model[0], model[2], model):
            fully_shard(part, **options)
    return model


def train(kind: str, failure: str, culprit: int) -> str:
    """A training whose rank ``culprit`` fails in step `STEP`; a digest of all losses and of the final parameters."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 4))
    layers, model = model, spread(model, kind)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(NUM_STEPS):
        x = torch.randn(8, WIDTH, generator=generator)
        y = (x.sum(1) > 0).long()
        is_bad = step == STEP and rank == culprit
        logits = model(x).float()
        loss = F.cross_entropy(logits, y)
        if failure == "forward":
            count = torch.full((), 0.0 if is_bad else 1.0)
            loss = loss * (count / count)
        if failure == "backward":
            energy = logits.pow(2) * (0.0 if is_bad else 1.0)
            loss = loss + torch.where(energy > 0, energy.sqrt(), energy).mean()
        optimizer.zero_grad()
        loss.backward()
        if kind == "manual":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
        if kind == "fsdp-clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if is_bad and failure == "optimizer":
            optimizer.param_groups[0]["lr"] = float("inf")
        if is_bad and failure == "late":
            with torch.no_grad():
                layers[2].weight.mul_(float("inf"))
        optimizer.step()
        losses.append(loss.item())
    return _digest(losses, layers)


def _digest(losses: Sequence[float], model: nn.Module) -> str:
    digest = hashlib.sha256(" ".join(loss.hex() for loss in losses).encode())
    for parameter in model.parameters():
        local = getattr(parameter, "to_local", lambda parameter=parameter: parameter)()
        digest.update(local.detach().numpy().tobytes())
    return digest.hexdigest()


def run_cells(kind: str, cells: Sequence[str]) -> None:
    """Train every cell under capture."""
    for cell in cells:
        failure, culprit = cell.split("-")
        bare = train(kind, failure, int(culprit)) if failure == "healthy" else ""
        watched = ""
        with reprokit.capture(f"{cell}.pt"):
            watched = train(kind, failure, int(culprit))
        answer = "" if failure != "healthy" else "same" if bare == watched else "other"
        Path(f"{cell}.{dist.get_rank()}.done").write_text(answer, encoding="utf-8")


class _Shared(Training):
    """A language model of about 30 ms of CPU time a step, in every rank on batches of its own."""

    def state_bytes(self) -> int:
        return 0


def run_overhead(kind: str, rounds: int) -> None:
    """Race a watched training against the same one bare, quadruple by quadruple, on all ranks at once."""
    warnings.filterwarnings("ignore")
    races = {}
    for name, variant in (("control", Control), ("reprokit", Reprokit)):
        races[name] = Race(variant(_language_model(kind)), time.process_time, settles=True)
        races[name].variant.warm_up(0.0)
        _reach_steady_state(races[name].variant)
    started = time.perf_counter()
    for _ in range(rounds):
        for race in races.values():
            dist.barrier()
            race.run_quadruple()
    summary = {name: race.summary() for name, race in races.items()}
    result = {"kind": kind, "rank": dist.get_rank(), "seconds": time.perf_counter() - started, "variants": summary}
    Path(f"overhead.{dist.get_rank()}.json").write_text(json.dumps(result), encoding="utf-8")


def _reach_steady_state(variant: Variant) -> None:
    """As many steps on all ranks, because their collectives have to match: the first copies come soon."""
    variant.on()
    for _ in range(WARM_STEPS):
        variant.step()
    variant.off()


def _language_model(kind: str) -> Training:
    torch.manual_seed(0)
    is_averaged = kind == "ddp"
    model: nn.Module = LanguageModel(depth=3 if is_averaged else 1, width=96, num_heads=4, length=64)
    if is_averaged:
        model = nn.parallel.DistributedDataParallel(model)
    else:
        for part in (*model.blocks, model):  # type: ignore[misc]
            fully_shard(part)
    torch.manual_seed(dist.get_rank())
    tokens = [torch.randint(VOCABULARY, (8, 65)) for _ in range(8)]
    batches = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in tokens]
    return _Shared(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches, clip=1.0)


def main(argv: Sequence[str]) -> None:
    """Run one part on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    part, kind, *rest = argv
    if part == "overhead":
        run_overhead(kind, int(rest[0]))
    else:
        run_cells(kind, rest)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
