"""Going back in time: from the last copy of the state, play the steps since, and find the first one with a nan or inf.

Everything is checked in every step that is played. What training saw (its losses) is compared bit for bit with what the
replay sees, and a step is believed only if the replay agrees with training in it and up to the next loss after it. The
user's live state is borrowed and given back as it was.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from reprokit import torch_private
from reprokit.capture.record import kinds
from reprokit.capture.record.attributes import attributes_kept, put_first_back
from reprokit.capture.record.compact_steps import PastStep, split
from reprokit.capture.record.entry import Entry, unwrapped
from reprokit.capture.record.screens import bad_tensor, is_bad_start, sets_gradients, unscaled_start, was_skipped
from reprokit.capture.record.state import State, give_gradients, parameters_of, python_generators_restored
from reprokit.capture.record.structure import is_leaf, iter_tensors
from reprokit.capture.rewind.checkpoint import History
from reprokit.capture.rewind.measure_steps import LayerMeter
from reprokit.capture.rewind.meeting import NOTHING, Meeting, short_collectives
from reprokit.capture.rewind.replayer import Player, describe_mismatch, is_same, leaves_in
from reprokit.errors import pass_on
from reprokit.program.interpreter import Modes
from reprokit.program.memory import same_bits
from reprokit.story import LayerNumbers


@dataclass
class Found:
    """The first bad step: ``entries`` lead from the state that has been put back to what was ``observed_at``.

    ``pending`` is the backward call whose start was bad, which is not to be performed. ``keep`` is the entry that
    ruined a part of the state that was watched. ``saved`` holds outside tensors as they were, and what earlier steps
    made. ``notes`` say what differed from training on the way. ``gradients`` are those of training when it was
    observed, if they are known.
    """

    step: PastStep
    observed_at: str
    entries: list[Entry]
    saved: dict[int, torch.Tensor]
    pending: Entry | None
    keep: Entry | None = None
    notes: list[str] = field(default_factory=list)
    gradients: list[tuple[torch.Tensor, torch.Tensor]] | None = None


class Watcher(Protocol):
    """Is shown what a rewind plays."""

    def before(self, step: PastStep, entry: Entry) -> None:
        """An entry is about to be played."""

    def after(self, entry: Entry) -> None:
        """An entry was played."""


class Rewind:
    """Plays the steps of a history. ``going_back`` is the context in which the live state is borrowed.

    Looks for the step that makes one of the ``ruined`` parts of the state nan or inf, if there are any; else for the
    first bad loss, gradient or parameter. ``skipped`` are the numbers of steps with a bad loss of which no bad update
    was made; with ``takes_skipped`` they are failures like any other. ``together``: all ranks play at once, until one
    of them has found something; `Stopped` is raised if that is another one.
    """

    def __init__(
        self,
        history: History,
        steps: list[PastStep],
        ruined: Sequence[torch.Tensor] = (),
        *,
        takes_skipped: bool = False,
        together: Meeting | None = None,
    ) -> None:
        self.together = together  # while the other ranks wait for what this one plays
        self._history = history
        self._steps = steps
        self._ruined = ruined
        self._takes_skipped = takes_skipped
        self._saved = _saved_by_step(steps)
        self._start = State()
        self._carried: dict[int, torch.Tensor] = {}
        self._used_later = _used_later(steps)
        self._live: dict[int, torch.Tensor] = {}
        self._before = State()
        self._live_gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._notes: list[str] = []
        self._other_losses: list[str] = []
        self.skipped: list[int] = []

    @property
    def notes(self) -> list[str]:
        """The differences from training; of losses the first one, and how many more there are."""
        losses = self._other_losses[:1]
        if len(self._other_losses) > 1:
            losses = [f"{losses[0]}; {len(self._other_losses) - 1} later losses differ too"]
        return losses + self._notes

    @property
    def _num_notes(self) -> int:
        return len(self._notes) + len(self._other_losses)

    @contextlib.contextmanager
    def going_back(self) -> Iterator[None]:
        """The state of the last copy; afterwards everything is as it was. Raises `CannotGoBack` with nothing
        changed."""
        leaves = self.leaves()
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(torch.random.fork_rng(enabled=True))
            stack.enter_context(python_generators_restored(None))
            stack.enter_context(attributes_kept(self._history.modules, self._history.optimizers))
            stack.enter_context(torch_private.preserve_versions(self._history.changing()))
            if self.together is not None:
                stack.enter_context(short_collectives())
            live = self._history.state.put_back()
            stack.callback(live.give_back)
            self._live, self._before = live.copies.contents(), live
            self._live_gradients = [(leaf, leaf.grad) for leaf in leaves]
            stack.callback(give_gradients, self._live_gradients)
            if self.together is not None:  # gradients may be views of memory that averaging writes
                for grad in [leaf.grad for leaf in leaves if leaf.grad is not None]:
                    stack.callback(grad.data.copy_, grad.clone())
            give_gradients([(leaf, None) for leaf in leaves])
            give_gradients([(leaf, torch.zeros_like(leaf)) for leaf in self._history.state.with_gradient])
            give_gradients([(leaf, grad.clone()) for leaf, grad in self._history.state.gradients])
            yield

    def find(self) -> Found | None:
        """Play until something is bad, then go back to where that step began; ``None`` also if training contradicts."""
        for number, step in enumerate(self._steps):
            player, carried, num_notes = self._player(number), self._carried, self._num_notes
            found, rest = self._play(step, player, self._saved[number])
            if found is None or found.observed_at != "parameter":
                forget_averaged(step.entries)
            if found is not None:
                if self.together is not None:
                    self.together.stop(found.observed_at)
                    self.together = player.together = None  # what follows needs no other rank
                found.gradients = self._gradients_of_training(found)
                if self._num_notes > num_notes or not self._agrees_afterwards(found, number, player, rest):
                    return None
                found.saved = {**{key: tensor.detach() for key, tensor in carried.items()}, **found.saved}
                give_gradients([(leaf, None) for leaf in self.leaves()])
                self._start.give_back()
                found.notes = self.notes
                return found
            self._notes += [note for note in player.mismatches if note not in self._notes]
            self._carried = player.made(self._used_later)
        if self.together is not None:
            self.together.stop(NOTHING)
        return None

    def _gradients_of_training(self, found: Found) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """The gradients that training had when they were to be used, which the user's hooks may have changed."""
        if found.step is self._steps[-1] and found.observed_at == "gradient":
            return [(leaf, grad) for leaf, grad in self._live_gradients if grad is not None]
        if found.observed_at not in ("gradient", "parameter"):
            return None
        return [(leaf, leaf.grad.clone()) for leaf in self.leaves() if leaf.grad is not None]

    def play_until(self, number: int, watch: Watcher | None = None) -> dict[int, torch.Tensor]:
        """Play the steps before ``number``; returns what outside tensors hold then, and what those steps made.

        A ``watch`` is shown every entry right before and after it is played, and the starts of backward calls.
        """
        for position in range(min(number, len(self._steps))):
            self._play_whole(position, watch)
        carried = {key: tensor.detach() for key, tensor in self._carried.items()}
        return {**carried, **(self._saved[number] if number < len(self._saved) else {})}

    def _play_whole(self, position: int, watch: Watcher | None) -> bool:
        """Play a step; true if its losses are those of training."""
        step, player, is_alike = self._steps[position], self._player(position), True
        put_first_back(step.entries)
        with Modes() as modes, python_generators_restored(step.generators):
            for entry in step.entries:
                modes.enter(entry.mode)
                if entry.kind is kinds.BACKWARD:
                    with torch.no_grad():
                        is_alike &= self._compare(player, entry, step)
                if watch is not None:
                    watch.before(step, entry)
                player.play(entry)
                if watch is not None:
                    watch.after(entry)
        self._carried = player.made(self._used_later)
        return is_alike

    def begin(self, number: int) -> tuple[list[Entry], dict[int, torch.Tensor]]:
        """Play the steps before ``number`` and what the loop wrote by hand before its forward pass.

        Returns the entries of the step that are left, and what outside tensors hold.
        """
        saved = self.play_until(number)
        step = self._steps[number]
        lead, rest = split(step.entries)
        player = self._player(number)
        put_first_back(step.entries)
        with Modes() as modes, python_generators_restored(step.generators):
            for entry in lead:
                modes.enter(entry.mode)
                player.play(entry)
        return [*(entry for entry in lead if not entry.writes_state), *rest], saved

    def measured(self, meter: LayerMeter, last: int) -> list[LayerNumbers]:
        """Play the steps up to the one that ``last`` counts, and measure the layers in each.

        Ends before the first step with a loss that is not that of training.
        """
        rows: list[LayerNumbers] = []
        with meter.watching():
            for position, step in enumerate(self._steps):
                if step.completed > last or not self._play_whole(position, meter):
                    break
                rows += meter.take(step.completed)
        return rows

    def _player(self, number: int) -> Player:
        state = {id(tensor) for tensor in self._history.changing()}
        carried = {**self._before.renewed(), **self._carried}
        return Player(self._saved[number], carried=carried, state=state, together=self.together)

    def _play(self, step: PastStep, player: Player, saved: dict[int, torch.Tensor]) -> tuple[Found | None, list[Entry]]:
        """The nan or inf tensors of a step, and the entries that were not played."""
        lead, rest = split(step.entries)
        if not rest:  # the training ended with what the loop wrote by hand
            lead, rest = rest, lead
        put_first_back(step.entries)
        with Modes() as modes, python_generators_restored(step.generators):
            if self._ruined:
                self._take_start()
            for entry in lead:
                modes.enter(entry.mode)
                player.play(entry)
            keep = next((entry for entry in reversed(lead) if self._has_ruined(entry)), None)
            if keep is None:
                self._take_start()
            made = [entry for entry in lead if keep is not None or not entry.writes_state]
            entries = [*made, *rest]
            doubtful: int | None = None  # a bad start of which the loop may have made good gradients
            for position, entry in enumerate(rest, len(made)):
                modes.enter(entry.mode)
                is_skipped = not self._takes_skipped and was_skipped(entries, position)
                where = self._watched(player, entry, step, entries[:position], is_skipped)
                if where == "loss" and not self._takes_skipped and sets_gradients(entries, position):
                    doubtful = position if doubtful is None else doubtful
                    self.skipped.append(step.completed)
                    player.play(entry)
                    continue
                if where is not None and doubtful is not None:
                    position, entry, where = doubtful, entries[doubtful], "loss"
                if keep is None and self._has_ruined(entry):
                    keep = entry
                if where is not None and (keep is not None or not self._ruined):
                    is_over = where == "parameter" or entry.kind is kinds.COMPILED
                    end = position + is_over
                    pending = entry if where == "loss" and not is_over else None
                    found = Found(step, where, _without_update(entries[:end], where), saved, pending, keep)
                    return found, entries[end:]
            if keep is not None:
                where = "output" if keep.kind is kinds.MODULE else "parameter"
                return Found(step, where, _without_update(entries, where, keep), saved, None, keep), []
            if not self._ruined and any(entry.writes_state for entry in rest) and self._is_state_bad():
                return Found(step, "parameter", entries, saved, None), []
        return None, []

    def _take_start(self) -> None:
        self._start.take(self._history.changing(), self._history.optimizers, self._history.modules)

    def _has_ruined(self, entry: Entry) -> bool:
        """True if an entry may have changed the state, and a part of it that is looked for is bad now."""
        changes = entry.kind in (kinds.MODULE, kinds.OPTIMIZER) or entry.writes_state or entry.has_stepped
        return changes and any(map(self._history.has_worsened, self._ruined))

    def _agrees_afterwards(self, found: Found, number: int, player: Player, rest: list[Entry]) -> bool:
        """Go on as training did: True if the next loss it saw, or the parameters that it ended with, are the same."""
        if found.pending is not None and found.pending.settings:
            return True  # that loss was bad in training too
        for later in range(number, len(self._steps)):
            step = self._steps[later]
            if later > number:
                player, rest = self._player(later), step.entries
            with Modes() as modes, python_generators_restored(step.generators):
                for entry in rest:
                    modes.enter(entry.mode)
                    if entry.kind is kinds.BACKWARD and entry.settings:
                        return self._compare(player, entry, step)
                    try:
                        player.play(entry)
                        if entry.kind is kinds.COMPILED and entry.settings.seen:
                            return self._compare_results(player, entry, step)
                    except Exception as error:
                        pass_on(error)
                        if entry.kind is not kinds.MODULE or entry.output is not None:
                            raise
                        break  # it did not return in training either
            self._carried = player.made(self._used_later)
        changed = [t for t in self._history.changing() if t.requires_grad and id(t) in self._live]
        if all(same_bits(self._live[id(tensor)], tensor) for tensor in changed):
            return True
        self._notes.append("playing the steps since the last copy did not lead to the parameters that training has")
        return False

    def _watched(
        self, player: Player, entry: Entry, step: PastStep, before: list[Entry], is_skipped: bool
    ) -> str | None:
        """Play one entry; where it is bad, or ``None``."""
        if entry.kind is kinds.BACKWARD:
            with torch.no_grad():
                self._compare(player, entry, step)
                starts = [player.stand_in(unscaled_start(before, start)) for start in entry.starts]
                if is_bad_start(entry, starts):
                    if not is_skipped:
                        return "loss"
                    self.skipped.append(step.completed)
        if entry.kind is kinds.OPTIMIZER:
            optimizer = entry.target
            grads = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
            if not (entry.settings or {}).get("scaler") and bad_tensor(grads) is not None:
                return "gradient"
        is_compared = entry.kind is kinds.COMPILED
        player.play(entry)
        if self.together is not None and entry.kind is kinds.BACKWARD:
            forget_averaged(before)
            entry.averaged = averaged_gradients(self._history.modules)
        if is_compared:
            self._compare_results(player, entry, step)
        is_bad = (entry.kind is kinds.OPTIMIZER or entry.has_stepped) and self._is_state_bad()
        if is_compared and entry.has_stepped and bad_tensor(player.seen(entry).values()) is not None:
            return "loss"
        return "parameter" if is_bad else None

    def _compare(self, player: Player, entry: Entry, step: PastStep) -> bool:
        """True if the backward pass starts from the same value as in training; a difference becomes a note."""
        starts = [(old, player.stand_in(start)) for old, start in zip(entry.settings or (), entry.starts, strict=False)]
        return self._note_losses(starts, step)

    def _compare_results(self, player: Player, entry: Entry, step: PastStep) -> bool:
        new = player.seen(entry)
        pairs = [(old, new[place]) for place, old in entry.settings.seen.items() if place in new]
        return self._note_losses(pairs, step)

    def _note_losses(self, starts: Sequence[tuple[Any, torch.Tensor]], step: PastStep) -> bool:
        differ = [(old, new) for old, new in starts if not is_same(old, new)]
        self._other_losses += [describe_mismatch(f"the loss of step {step.completed}", old, new) for old, new in differ]
        return not differ

    def _is_state_bad(self) -> bool:
        return self._history.newly_bad() is not None

    def leaves(self) -> list[torch.Tensor]:
        """Everything that a played step may give a gradient."""
        leaves = {id(tensor): tensor for tensor in self._history.changing() if is_leaf(tensor)}
        for module in self._history.modules:  # also what is frozen by now and has a gradient from before
            leaves.update((id(parameter), parameter) for parameter in module.parameters())
        for step in self._steps:
            leaves.update((id(leaf), leaf) for leaf in leaves_in(step.entries))
        return list(leaves.values())


def averaged_gradients(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters whose gradients `DistributedDataParallel` averages, each with a copy of its gradient."""
    leaves = [parameter for module in modules if unwrapped(module) is not module for parameter in module.parameters()]
    return [(leaf, leaf.grad.clone()) for leaf in leaves if leaf.grad is not None]


def forget_averaged(entries: list[Entry]) -> None:
    """Let go of averaged gradients."""
    for entry in entries:
        if entry.kind in (kinds.BACKWARD, kinds.COLLECTIVE):
            entry.averaged = None


def _without_update(entries: list[Entry], where: str, keep: Entry | None = None) -> list[Entry]:
    """``entries`` without the update behind the last backward call and ``keep``, unless it made a parameter bad."""
    if where == "loss" or (where == "parameter" and keep is None):
        return entries
    last = max((n for n, e in enumerate(entries) if e.kind is kinds.BACKWARD or e is keep), default=len(entries))
    return entries[: last + 1] + [e for e in entries[last + 1 :] if not (e.writes_state or e.kind is kinds.OPTIMIZER)]


def _used_later(steps: list[PastStep]) -> set[int]:
    """The ids of what one step makes, graph and all, and a later one is given."""
    made: set[int] = set()
    used: set[int] = set()
    for step in steps:
        for entry in step.entries:
            used.update(key for tensor in iter_tensors((entry.args, entry.kwargs)) if (key := id(tensor)) in made)
        made.update(id(tensor) for entry in step.entries for tensor in iter_tensors(entry.output))
    return used


def _saved_by_step(steps: list[PastStep]) -> list[dict[int, torch.Tensor]]:
    """For every step, what outside tensors held in it that it or a later step has written."""
    merged: dict[int, torch.Tensor] = {}
    result = []
    for step in reversed(steps):
        merged = {**merged, **step.saved}
        result.append(merged)
    return result[::-1]
