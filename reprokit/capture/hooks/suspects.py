"""A bad loss or gradient that the loop may deal with itself, until it is known whether the step failed or was skipped.

It failed when an update is about to be made of it, or when the loop ends over it. It was skipped when the loop drops
the gradients, or goes on to its next forward pass without a backward call. Until then no parameter has changed, so the
step can be saved as exactly as at the moment when the bad value was seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from reprokit.capture.record import kinds
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.screens import Suspect, Verdict, bad_tensor, drops_in, is_bad
from reprokit.capture.record.state import owned_by, parameters_of
from reprokit.capture.record.structure import is_leaf, iter_tensors
from reprokit.capture.run.run_state import RunState
from reprokit.capture.save.exceptions import backward_from
from reprokit.locate.ways import is_finite_sum
from reprokit.program.dataflow import edge_of, is_accumulation, reachable
from reprokit.program.functions import GRAD_WRITES


class OwnGradient:
    """Looks at one small gradient of an early layer, which nearly every bad backward pass reaches; not on a GPU, where
    it would have to be waited for, nor with a grad scaler, whose overflows are normal."""

    def __init__(self, run_state: RunState) -> None:
        self._run_state = run_state
        self._hook: Any = None
        self._has_chosen = False
        self._num_entries: int | None = None  # in the step when a bad gradient was reported

    def forget(self) -> None:
        """Let go of the parameter."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def before_backward(self) -> None:
        """A backward pass begins; a loop that has cleared a bad gradient has skipped its step."""
        run_state = self._run_state
        if not self._has_chosen and run_state.ranks.shards.units:
            self._has_chosen = True
            parameter: Any = run_state.ranks.shards.early_parameter()
            if parameter is not None and not parameter.is_cuda:
                self._hook = parameter.register_hook(lambda gradient: run_state.tape.guard(self._look, gradient))
        if self._num_entries is not None:
            later = run_state.running.entries[self._num_entries :]
            if any(entry.kind is kinds.ZERO_GRAD for entry in later):
                self._num_entries = None
                run_state.ranks.withdraw(run_state.iterations.completed)

    def _look(self, gradient: torch.Tensor) -> None:
        run_state = self._run_state
        if run_state.scalers.is_used or run_state.running.suspect is not None or not run_state.tape.enabled:
            return
        if self._num_entries is None and not is_finite_sum(gradient) and bad_tensor([gradient]) is not None:
            self._num_entries = len(run_state.running.entries)
            run_state.report_bad("gradient")


_GRADIENT = "torch.Tensor.grad.__get__"


class Suspects:
    """Finds suspects of the running step, which holds the current one, and gives the verdict on it."""

    def __init__(self, run_state: RunState) -> None:
        self._run_state = run_state
        self._running = run_state.running
        self._sites: set[tuple[Any, int]] = set()  # the lines where the first steps computed losses

    # -- what makes a suspect ------------------------------------------------------------------------------------

    def begin(self, entry: Entry) -> None:
        """A backward call from a bad start is made; the first one of a step counts."""
        current = self._running.suspect
        if current is None or not current.has_begun:
            self._running.suspect = Suspect("loss", entry, entry, True, self._run_state.timeline.likely_loss)
        elif entry.target is not torch.autograd.grad:
            current.is_accumulated = True

    def can_wait(self) -> bool:
        """True if every update that may follow a backward call is seen before it is made."""
        hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self._leaves())
        return not (hooked or self._run_state.unseen or torch.is_anomaly_enabled())

    def read(self, tensor: torch.Tensor) -> None:
        """The loop has read a number or a test that tells of a bad value: its loss, or a gradient."""
        if self._running.suspect is not None:
            self._running.suspect.is_read = True
            return
        for entry, outputs in self._made_before(tensor):
            if entry.kind is kinds.CLIP or entry.name == _GRADIENT:
                self._suspect_gradient()
                return
            loss = next((output for output in outputs if _is_loss(output)), None)
            if loss is not None:
                self._suspect_loss(loss, entry)
                return

    def _made_before(self, tensor: torch.Tensor) -> Iterator[tuple[Entry, list[torch.Tensor]]]:
        """The entries that a tensor was computed by, the last one first, with the outputs that went into it."""
        wanted = {id(tensor)}
        for entry in reversed(self._running.entries):
            outputs = [output for output in iter_tensors(entry.output) if id(output) in wanted]
            if outputs:
                yield entry, outputs
                wanted.update(id(given) for given, _ in entry.versions)

    def _is_training(self) -> bool:
        modules = [entry.target for entry in self._running.entries if entry.kind is kinds.MODULE]
        return not modules or any(module.training for module in modules)

    def _suspect_loss(self, loss: torch.Tensor, maker: Entry) -> None:
        if is_bad(loss.detach()) and self._is_training():
            begun = self._begun_from(loss)
            pending = begun or backward_from(loss, maker)
            suspect = Suspect("loss", pending, begun or maker, begun is not None, loss.detach())
            self._running.suspect = suspect
            if begun is not None:
                calls = [entry for entry in self._since(suspect) if entry.kind is kinds.BACKWARD]
                suspect.num_later = 1 + sum(entry.target is not torch.autograd.grad for entry in calls)
                self._run_state.iterations.micro_step -= suspect.num_later

    def _begun_from(self, loss: torch.Tensor) -> Entry | None:
        """The backward call that has been made already from a loss, or from what was computed of it."""
        made = {id(loss)}
        for entry in self._running.entries:
            if entry.kind is kinds.BACKWARD and any(id(start) in made for start in entry.starts):
                return entry
            if any(id(given) in made for given, _ in entry.versions):
                made.update(id(tensor) for tensor in iter_tensors(entry.output))
        return None

    def _suspect_gradient(self) -> None:
        calls = [entry for entry in self._running.entries if entry.kind is kinds.BACKWARD]
        if calls and not self._run_state.scalers.is_used and self._has_bad_gradient():
            self._running.suspect = Suspect("gradient", None, calls[-1], True, self._run_state.timeline.likely_loss)

    def learn(self, entries: Sequence[Entry]) -> None:
        """Remember where the losses of a step were computed; those of an evaluation are computed elsewhere."""
        makers = (entry for entry in entries if any(map(_is_loss, iter_tensors(entry.output))))
        self._sites.update((entry.code, entry.line) for entry in makers)

    # -- the verdict ---------------------------------------------------------------------------------------------

    def at_backward(self, suspect: Suspect, is_bad_too: bool) -> Verdict | None:
        """The verdict when another backward call begins, which ``is_bad_too`` or not; ``None``: not known yet."""
        if self._is_dropped(suspect):
            return "skipped"
        if not suspect.has_begun:
            return "skipped" if self.is_passed(suspect) else "harmless"
        if suspect.pending is None or not self._has_come_round(suspect):
            return None
        if suspect.pending.target is torch.autograd.grad and not is_bad_too:
            is_set = suspect.is_accumulated or any(entry.name in GRAD_WRITES for entry in self._since(suspect))
            return None if is_set else "skipped"
        return "failed" if is_bad_too and not self._run_state.iterations.total else None

    def at_update(self, suspect: Suspect, optimizer: torch.optim.Optimizer | None = None) -> Verdict:
        """The verdict when parameters are about to be updated, those of an ``optimizer`` if it is known."""
        if self._is_dropped(suspect):
            return "skipped"
        if not suspect.has_begun:
            has_backward = any(entry.kind is kinds.BACKWARD for entry in self._running.entries)
            return "harmless" if has_backward and not self._has_come_round(suspect) else "skipped"
        if optimizer is not None and suspect.is_read and self._has_gone_back(suspect):
            own = {id(p) for p in parameters_of(optimizer)}
            if all(id(p) not in own for p in self._kept(suspect)):
                return "skipped"
        return "failed" if suspect.pending is not None or self._has_bad_gradient() else "harmless"

    def leave_out(self, suspect: Suspect) -> None:
        """Mark the calls of a skipped step, and take off the tape what made or used its gradients, which are gone."""
        entries, is_given = self._running.entries, _gives_gradients(suspect)
        drops = {id(e) for e in entries if e.kind is kinds.BACKWARD} if is_given else drops_in(entries)
        ends = (n + 1 for n, e in enumerate(entries) if id(e) in drops)
        end = max(ends, default=0) if suspect.has_begun else len(entries) - len(self._since(suspect))
        are_gone = is_given or not any(p.grad is not None and bool(p.grad.any()) for p in self._leaves())
        for entry in entries[:end]:
            entry.is_skipped = True
        entries[:] = [e for e in entries if e is not suspect.pending and not (are_gone and _is_of_gradients(e))]
        self._running.differentiations = [entry for entry in entries if entry.kind is kinds.BACKWARD]

    def is_of_suspect(self, suspect: Suspect, written: Any) -> bool:
        """True if the loop is about to write its update into ``written``, and not, say, into a moving average."""
        trained = {p.data_ptr() for p in self._leaves() if _gives_gradients(suspect) or p.grad is not None}
        return suspect.has_begun and any(tensor.data_ptr() in trained for tensor in iter_tensors(written))

    def at_end(self, suspect: Suspect, has_raised: bool) -> Verdict:
        """The verdict when the loop has ended, with an error or without."""
        if self._is_dropped(suspect) or self.is_passed(suspect):
            return "skipped"
        is_failure = suspect.has_begun or has_raised or not self._sites or self.is_of_training(suspect.last)
        return "failed" if is_failure else "harmless"

    def is_passed(self, suspect: Suspect) -> bool:
        """True if the loop has begun its next forward pass without a backward call."""
        return not suspect.has_begun and self._has_come_round(suspect)

    def is_of_training(self, maker: Entry) -> bool:
        """True if losses of the first steps were computed where this call is made."""
        return (maker.code, maker.line) in self._sites

    def has_bad_gradient_without_update(self) -> bool:
        """True if the loop has called backward, never made an update, and left bad gradients."""
        has_backward = any(entry.kind is kinds.BACKWARD for entry in self._running.entries)
        return has_backward and not self._run_state.iterations.total and self._has_bad_gradient()

    def _is_dropped(self, suspect: Suspect) -> bool:
        """True if the loop has cleared the gradients since, and none that it knows is bad any more."""
        if not suspect.has_begun or not self._drops_since(suspect):
            return False
        return (_gives_gradients(suspect) or not self._kept(suspect)) and not self._has_bad_gradient()

    def _drops_since(self, suspect: Suspect) -> list[Entry]:
        drops = drops_in(self._running.entries)
        return [entry for entry in self._since(suspect) if id(entry) in drops]

    def _kept(self, suspect: Suspect) -> list[torch.Tensor]:
        """The parameters behind the suspect whose gradients the loop has not cleared since.

        Those that an optimizer updates; all parameters if no optimizer that is known updates any of them.
        """
        drops = self._drops_since(suspect)
        if any(entry.kind is not kinds.ZERO_GRAD for entry in drops):  # gradients are cleared or repaired one by one
            return []
        calls = [entry.args[0] for entry in self._running.entries if entry.kind is kinds.ZERO_GRAD]
        optimizers = [*self._run_state.history.optimizers, *(o for o in calls if isinstance(o, torch.optim.Optimizer))]
        updated = {id(p) for optimizer in optimizers for p in parameters_of(optimizer)}
        leaves = _parameters_behind(suspect)
        cleared = {id(p) for entry in drops for p in owned_by(entry.args[0])}
        wanted = [p for p in leaves if id(p) in updated] or leaves
        return [p for p in wanted if id(p) not in cleared]

    def _has_come_round(self, suspect: Suspect) -> bool:
        """True if the line with which the step's forward pass began has been run again since."""
        first = self._first_of_forward()
        if first is None:
            return False
        return any(entry.line == first.line and entry.code is first.code for entry in self._since(suspect))

    def _first_of_forward(self) -> Entry | None:
        return next((entry for entry in self._running.entries if _builds_graph(entry)), None)

    def _has_gone_back(self, suspect: Suspect) -> bool:
        """True if the code that called backward has gone back to where the step began, or before that."""
        code = suspect.last.code
        first = next((entry.line for entry in self._running.entries if entry.code is code), 0)
        return any(entry.line <= first and entry.code is code for entry in self._since(suspect))

    def _since(self, suspect: Suspect) -> list[Entry]:
        entries = self._running.entries
        position = next((number for number, entry in enumerate(entries) if entry is suspect.last), -1)
        return entries[position + 1 :]

    def _has_bad_gradient(self) -> bool:
        return bad_tensor(leaf.grad for leaf in self._leaves() if leaf.grad is not None) is not None

    def _leaves(self) -> list[torch.Tensor]:
        """Everything known that backward may leave gradients in."""
        history = self._run_state.history
        found: dict[int, torch.Tensor] = {}
        found.update((id(p), p) for module in history.modules for p in module.parameters())
        found.update((id(p), p) for optimizer in history.optimizers for p in parameters_of(optimizer))
        given = (tensor for entry in self._running.entries for tensor, _ in entry.versions)
        found.update((id(tensor), tensor) for tensor in given if tensor.requires_grad and is_leaf(tensor))
        return list(found.values())


def _parameters_behind(suspect: Suspect) -> list[torch.Tensor]:
    edges = [edge_of(start) for start in (suspect.pending or suspect.last).starts]
    nodes = reachable(edge[0] for edge in edges if edge is not None)
    return [node.variable for node in nodes if is_accumulation(node) and isinstance(node.variable, torch.nn.Parameter)]


def _gives_gradients(suspect: Suspect) -> bool:
    return suspect.pending is not None and suspect.pending.target is torch.autograd.grad


def _is_of_gradients(entry: Entry) -> bool:
    return entry.is_skipped and entry.kind in (kinds.BACKWARD, kinds.CLIP, kinds.UNSCALE)


def _builds_graph(entry: Entry) -> bool:
    is_forward = entry.kind in kinds.FORWARD
    return is_forward and any(tensor.requires_grad for tensor in iter_tensors(entry.output))


def _is_loss(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.numel() == 1
