"""The checks of a step: the loss always, gradients as far as that is cheap, everything when a copy is due."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from reprokit.capture.options import Watch
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.screens import LaterFlags, Sentinel, bad_tensor, is_bad, is_bad_start, unscaled_start
from reprokit.capture.record.state import parameters_of
from reprokit.capture.run.run_state import RunState
from reprokit.locate.ways import is_finite_sum
from reprokit.program.ir import AUTOGRAD_BACKWARD, AUTOGRAD_GRAD, BACKWARD


class Policy:
    """Answers whether a step is bad; all answers are "no" unless values ``matter``.

    ``clipped`` is the norm that the loop clipped its gradients by, since the last look at them. While ``is_urgent``
    everything is checked at once.
    """

    def __init__(self, run_state: RunState, watch: Watch, *, matter: bool) -> None:
        self.watch = watch
        self.clipped: torch.Tensor | None = None
        self.is_urgent = False
        self._run_state = run_state
        self.matter = matter
        self._sentinel, self._last_layer = Sentinel(), Sentinel(is_last=True)
        self._later = LaterFlags()

    def forget(self) -> None:
        """Let go of everything that belongs to the user."""
        self.clipped = None
        self._sentinel.forget()
        self._last_layer.forget()
        self._later.forget()

    def start(self, entry: Entry) -> Literal["now", "before"] | None:
        """``now`` if what a backward call starts from is bad, ``before`` if something was bad some steps ago."""
        run_state, starts = self._run_state, entry.starts
        first, waits = starts[0], self._waits_for(starts)
        is_plain = len(starts) == 1 and first.numel() == 1 and not run_state.scalers.is_used and len(entry.args) == 1
        if is_plain and not waits and not first.is_cuda and not first.is_complex():
            seen = first.item()
            entry.settings = [seen]
            self._note_loss(entry, seen)
            return "now" if self.matter and not math.isfinite(seen) else None
        entry.settings = [start.detach() for start in starts] if sum(map(torch.Tensor.numel, starts)) == 1 else None
        tensors = (
            [unscaled_start(run_state.running.entries, start) for start in starts]
            if run_state.scalers.is_used
            else starts
        )
        if entry.settings is not None:
            loss = tensors[0].detach() if run_state.scalers.is_used else entry.settings[0]
            is_near = loss.device.type == "cpu" and loss.numel() == 1 and not loss.is_complex()
            self._note_loss(entry, loss.item() if is_near else loss)  # the loop may write into it for its log
        if not self.matter:
            return None
        if waits:
            return self._look_later(() if entry.gives_gradients else tensors)
        return "now" if is_bad_start(entry, tensors) else None

    def _note_loss(self, entry: Entry, loss: torch.Tensor | float) -> None:
        if entry.name in _OF_LOSSES:
            self._run_state.timeline.loss = loss
        elif entry.name == AUTOGRAD_GRAD:
            self._run_state.timeline.start_grad(loss)

    def results(self, losses: Sequence[torch.Tensor]) -> Literal["now", "before"] | None:
        """Like `start`, for the losses that a compiled step has returned."""
        if losses:
            self._run_state.timeline.loss = losses[0]
        if not self.matter:
            return None
        if self._waits_for(losses):
            return self._look_later(losses)
        return "now" if bad_tensor(losses) is not None else None

    def _waits_for(self, tensors: Sequence[torch.Tensor]) -> bool:
        return bool(tensors) and tensors[0].is_cuda and self.watch != "every-step" and not self.is_urgent

    def _look_later(self, tensors: Sequence[torch.Tensor]) -> Literal["now", "before"] | None:
        """Have flags of tensors read when they have arrived; ``before`` if one that has says that a value was bad.

        One of several processes cannot go back by itself. Where ranks meet, flags wait until then. Elsewhere the loss
        of the running step is checked at once: it is bad too, unless the loop skipped the step of the earlier one.
        """
        run_state = self._run_state
        self._later.add(tensors, run_state.iterations.total)
        suspicious, run_state.tape.has_read_bad = run_state.tape.has_read_bad, False  # the device has caught up
        if run_state.ranks.meeting is not None:
            return None
        bad = self._later.read() if suspicious else self._later.poll()
        if not bad or run_state.ranks.is_alone:
            return "before" if bad else None
        return "now" if any(map(is_bad, tensors)) else None

    def gradients(self, optimizer: torch.optim.Optimizer, are_scaled: bool) -> bool:
        """The quick look at the gradients of a step; a hit is confirmed tensor by tensor.

        Gradients that ``are_scaled`` are left to the grad scaler.
        """
        history, clipped = self._run_state.history, self.clipped
        ranks = self._run_state.ranks
        is_thorough = self.watch == "every-step" or self.is_urgent
        has_past = history.is_complete if ranks.is_alone else ranks.goes_back  # all ranks have to look at the same
        if clipped is None and history.is_short and history.is_complete and ranks.is_alone and not is_thorough:
            return False  # cheaper to go back a few short steps than to look at every one
        self.clipped = None
        if self._run_state.ranks.is_sharded:
            return False  # whose shard is bad says nothing: a rank looks at its own gradients before they are averaged
        if not self.matter or are_scaled:
            return False
        gradient = self._sentinel.gradient(optimizer)
        is_far = any(gradient.is_cuda for gradient in _gradients(optimizer)) if gradient is None else gradient.is_cuda
        may_be_all = self._run_state.running.is_noted or not ranks.is_alone  # each rank chooses which steps it notes
        if is_thorough or (may_be_all and not has_past and not is_far):
            return bad_tensor(_gradients(optimizer)) is not None
        if gradient is None or gradient.is_cuda:
            self._later.add([clipped] if clipped is not None else [], self._run_state.iterations.total)
            return False
        suspicious = not is_finite_sum(gradient)
        suspicious = suspicious or (clipped is not None and not math.isfinite(clipped.item()))
        if ranks.is_parallel and not suspicious:  # the loss of another rank may be bad, which reaches the last layer
            gradient = self._last_layer.gradient(optimizer)
            suspicious = gradient is not None and not is_finite_sum(gradient)
        return suspicious and bad_tensor(_gradients(optimizer)) is not None

    def state(self) -> Literal["loss", "parameter"] | None:
        """Where the training has gone bad since the last copy, looking at everything but buffers."""
        if not self.matter:
            return None
        if self._later.read():
            return "loss"
        return "parameter" if self._run_state.history.newly_bad() is not None else None

    def has_bad_loss_before(self) -> bool:
        """True if a loss of an earlier step was bad, one can go back to it, and nobody has looked at it yet."""
        run_state = self._run_state
        return self.matter and run_state.history.is_complete and self._later.is_bad_before(run_state.iterations.total)

    def forget_flags(self) -> None:
        """A bad loss was dealt with by the loop: it is not to be found later."""
        self._later.forget()

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """The buffers that have gone bad since the last copy, with their names."""
        return self._run_state.history.newly_bad_buffers() if self.matter else []


def _gradients(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None)


_OF_LOSSES = frozenset({BACKWARD, AUTOGRAD_BACKWARD})
