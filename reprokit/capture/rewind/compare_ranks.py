"""Comparing the ranks in every step that they play together: the first step after which their parameters differ.

Every rank plays its own steps. After each the ranks exchange hashes of their parameters through the store, so all find
the same step. Then they exchange hashes of its gradients, options and optimizer state: these say why parameters differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import torch

from reprokit.capture.record import kinds
from reprokit.capture.record.compact_steps import PastStep
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.state import options_of, parameters_of, state_tensors
from reprokit.capture.rewind.find_bad_step import averaged_gradients, forget_averaged
from reprokit.capture.rewind.meeting import Together
from reprokit.capture.rewind.replayer import Player
from reprokit.capture.rewind.replicas import Replicas, digest
from reprokit.locate.failure import RankDifference
from reprokit.program.ir import Site
from reprokit.program.sites import make_site


@dataclass
class Account:
    """Hashes of one step of one rank: ``parameters``, ``gradients`` and optimizer ``state`` before the update, and the
    gradients right after they were ``averaged``. ``options`` are those of the optimizer by group,
    ``written`` is the line that wrote parameters outside of optimizers."""

    parameters: str = ""
    averaged: str = ""
    gradients: str = ""
    state: str = ""
    options: list[dict[str, str]] = field(default_factory=list)
    written: str = ""


class RankMeter:
    """Is shown every entry that a rewind plays (see `Watcher`), and compares the ranks when a step is over.

    ``difference`` is the first one, ``number`` the position of its step, ``-1`` if the ranks differ before they have
    played any; ``accounts`` are those of all ranks for that step, ``site`` is where this rank has written parameters
    in it outside of optimizers. ``frame`` is where the loop stands.
    """

    def __init__(
        self, together: Together, modules: Sequence[torch.nn.Module], replicas: Replicas, frame: FrameType | None
    ) -> None:
        self.difference: RankDifference | None = None
        self.number = -1
        self.accounts: list[Account] = []
        self.site: Site | None = None
        self._together = together
        self._modules = modules
        self._replicas = replicas
        self._frame = frame
        self._step: PastStep | None = None
        self._own = Account()
        self._then = ""

    def before(self, step: PastStep, entry: Entry, player: Player) -> None:
        """Note what an update begins with; a new step ends the one before."""
        if step is not self._step:
            self.end_step()
            if self.difference is None:
                self._step, self._own, self.site = step, Account(), None
                self.number += 1
        if self.difference is not None:
            return
        if entry.kind is kinds.OPTIMIZER:
            self._note_update(entry.target, (entry.settings or {}).get("options") or options_of(entry.target))
        elif entry.writes_state:
            self._then = self._replicas.digest()

    def after(self, step: PastStep, entry: Entry) -> None:
        """Keep averaged gradients for the replay of this step by one rank; note lines that write parameters."""
        if self.difference is not None:
            return
        if entry.kind is kinds.BACKWARD:
            forget_averaged(step.entries)
            entry.averaged = averaged_gradients(self._modules)
        if entry.kind in (kinds.BACKWARD, kinds.COLLECTIVE):
            self._own.averaged = digest(_gradients(self._replicas.parameters()))
        elif entry.writes_state and entry.code is not None and self._replicas.digest() != self._then:
            self.site = make_site(entry.code, entry.instruction, entry.library)
            self._own.written = self.site.place

    def end_step(self) -> None:
        """Compare the ranks after the step that was played last, or before the first one; not after a difference."""
        if self.difference is not None:
            return
        self.difference = self._replicas.compare(self._together.tell, self._together.rank, self._frame)
        if self.difference is not None:
            texts = self._together.tell(json.dumps(asdict(self._own)))
            self.accounts = [Account(**json.loads(text)) for text in texts]
        elif self._step is not None:
            forget_averaged(self._step.entries)

    def _note_update(self, optimizer: torch.optim.Optimizer, options: Sequence[dict[str, Any]]) -> None:
        own, parameters = self._own, list(parameters_of(optimizer))
        known = set(map(id, parameters))
        own.parameters = self._replicas.digest()
        own.gradients = digest(_gradients(parameters))
        own.state = digest(tensor for tensor in state_tensors(optimizer) if id(tensor) not in known)
        own.options = [{name: _word(value) for name, value in group.items()} for group in options]


def is_by_update(own: Account, other: Account) -> bool:
    """True if an optimizer has made parameters of two ranks differ, which were equal when it began."""
    return bool(own.gradients and other.gradients) and own.parameters == other.parameters


def why(rank: int, reference: int, accounts: Sequence[Account]) -> str:
    """Why a step has left other parameters on ``rank`` than on ``reference``, from what both did in it; empty if that
    does not show, as where an optimizer has stepped inside the backward pass."""
    own, other = accounts[rank], accounts[reference]
    if not is_by_update(own, other):
        lines = [(number, accounts[number].written) for number in (rank, reference) if accounts[number].written]
        where = " and ".join(f"rank {number} at {line}" for number, line in lines)
        return f"written outside of an optimizer, by {where}" if where else ""
    if own.gradients != other.gradients:
        if own.averaged == other.averaged:
            return "gradients are equal after averaging, and differ when the optimizer steps: the loop changes them"
        return "gradients differ when the optimizer steps"
    for one, two in zip(own.options, other.options, strict=False):
        for name in one:
            if one[name] != two.get(name):
                words = f"`{name}` is {one[name]} on rank {rank} and {two.get(name, 'missing')} on rank {reference}"
                return f"gradients are equal, the updates differ: {words}"
    if own.state != other.state:
        return "gradients are equal, the updates differ: the optimizer's state differs before the step"
    return "gradients, options and the optimizer's state are equal, the updates differ"


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _word(value: Any) -> str:
    shown = value.tolist() if isinstance(value, torch.Tensor) else value
    is_plain = shown is None or isinstance(shown, (bool, int, float, str, list, tuple))
    return repr(shown)[:80] if is_plain else type(shown).__name__
