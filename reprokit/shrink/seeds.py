"""States of random generators: one that follows from a small seed takes one line of a repro."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from reprokit.program.ir import Call
from reprokit.program.run import run
from reprokit.shrink.candidate import Candidate
from reprokit.shrink.plainness import state_of_seed


def has_state(candidate: Candidate) -> bool:
    """True if any call starts from a recorded state of the generator."""
    return any(item.role == "rng" for item in candidate.program.inputs)


def with_seeds(candidate: Candidate, seeds: range) -> Iterator[tuple[str, Candidate]]:
    """The candidate with every generator started from a small seed instead, for each of the seeds."""
    states = {item.value: candidate.tensors[item.value] for item in candidate.program.inputs if item.role == "rng"}
    for seed in seeds if states else ():
        yield (
            f"seed {seed}",
            candidate.with_tensors({v: state_of_seed(seed, state.numel()) for v, state in states.items()}),
        )


def without_idle_states(candidate: Candidate) -> Candidate:
    """The candidate without states for calls that draw no numbers, seen in one run."""
    watch = _Draws()
    run(candidate.program, candidate.tensors, observer=watch, keep=frozenset())
    calls = tuple(
        call if index in watch.drawing else replace(call, mode=replace(call.mode, rng=None))
        for index, call in enumerate(candidate.program.calls)
    )
    return replace(candidate, program=replace(candidate.program, calls=calls)).pruned()


@dataclass
class _Draws:
    """An observer that notes which calls draw random numbers on the CPU; any call of another device may."""

    drawing: set[int] = field(default_factory=set)
    _state: torch.Tensor = field(default_factory=torch.get_rng_state)

    def before(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Note the state, and that the call draws until it comes back without."""
        self.drawing.add(index)
        self._state = torch.get_rng_state()

    def after(self, index: int, call: Call, values: Mapping[int, torch.Tensor]) -> None:
        """Compare the state."""
        is_on_cpu = all(values[value].device.type == "cpu" for value in call.input_refs() if value in values)
        if is_on_cpu and torch.equal(self._state, torch.get_rng_state()):
            self.drawing.discard(index)
