"""From a step that failed to a snapshot: replay it from where it began, locate the origin, put everything together.

The user's live state is borrowed for that. Buffers, gradients and generators are given back as they were.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from reprokit.capture.record import kinds
from reprokit.capture.record.attributes import attributes_kept, put_first_back
from reprokit.capture.record.entry import Entry
from reprokit.capture.record.inplace_writes import address_of
from reprokit.capture.record.state import Copies, give_gradients, owned_by, python_generators_restored
from reprokit.capture.record.structure import is_leaf
from reprokit.capture.record.tensor_names import Names, names_of, root_names
from reprokit.capture.rewind.replayer import Player, leaves_in, quiet_hooks
from reprokit.capture.run.timeline import Turn, with_optimizers
from reprokit.capture.save.collect_state import collect_state
from reprokit.capture.save.exceptions import Raised
from reprokit.capture.save.fidelity import compiled_mismatch
from reprokit.capture.save.record_program import ReplayedStep, replay
from reprokit.locate.blame import last_bad, locate
from reprokit.locate.compiled import Compiled
from reprokit.locate.differences import Reference
from reprokit.locate.failure import EXCEPTION, Failure, kind_of
from reprokit.locate.ways import NAN, local_part, ways_of
from reprokit.program.functions import hidden_writes, written_argument
from reprokit.program.interpreter import Modes, Tensors, matmul_precision
from reprokit.program.ir import AUTOGRAD_BACKWARD, BACKWARD, OPAQUE, Call, Phase, Program, Ref, iter_refs
from reprokit.program.memory import same_bits
from reprokit.program.trace import InputName, Tracer
from reprokit.snapshot.environment import collect_environment
from reprokit.snapshot.format import CaptureSettings, Snapshot, StateBefore
from reprokit.snapshot.rng import Generators, get_rng_state
from reprokit.snapshot.source import describe_source
from reprokit.story import RecordedStep

OTHER_GRADIENTS = "gradients differ between training and the replay, where no hook changes them"
OPTIMIZERS_SPREAD = "the state of the optimizers: it is spread over the ranks"
Gradients = list[tuple[torch.Tensor, torch.Tensor]]
NOT_OF_TORCH = "the exception was raised by code that is no torch call, so running the file does not raise it"


@dataclass(frozen=True)
class FailedStep:
    """The state of the step that failed.

    ``pending`` is the backward call that was not begun because its start was bad. ``buffers`` and ``generators`` lead
    back to where the step began; ``buffers`` is ``None`` when the state is there already. ``raised`` is the exception
    that ended the step, with the place it was raised at. ``likewise`` are entries of a step whose variables are still
    there to name tensors by. ``lead`` is what the loop did by hand before, which parameters hold already and
    ``buffers`` do not.
    ``keep`` is an entry that belongs to the failure even if no backward pass depends on it.
    ``compiled`` is a call of the loop that was not followed, ``compilers`` are those that the
    script has used. ``gradients`` are those of training, if they are not the
    live ones and known all the same. ``put_back`` are the ids of the state that going back has put back.
    ``notes`` say what is known to differ from training. ``stand_ins`` are whole parameters in the place of those that
    are spread over processes, by the ``id`` of these. ``explain`` finds the failure in the place of
    `locate`.
    """

    observed_at: str
    entries: list[Entry]
    saved: dict[int, torch.Tensor]
    pending: Entry | None
    modules: list[torch.nn.Module]
    buffers: Copies | None
    generators: dict[str, Any] | None
    completed: int
    micro_step: int
    timeline: list[Turn]
    command: list[str]
    capture: CaptureSettings
    raised: Raised | None = None
    likewise: list[Entry] = field(default_factory=list)
    keep: Entry | None = None
    lead: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    compiled: Call | None = None
    compilers: tuple[Compiled, ...] = ()
    gradients: Gradients | None = None
    recorded: Sequence[RecordedStep] = ()
    put_back: Set[int] = frozenset()
    stand_ins: Mapping[int, torch.Tensor] = field(default_factory=dict)
    explain: Callable[[Program, Tensors], Failure | None] | None = None

    @property
    def all_entries(self) -> list[Entry]:
        """The operations of the loop, the last of them not yet run."""
        return [*self.entries, *([self.pending] if self.pending is not None else [])]


@dataclass(frozen=True)
class BuiltSnapshot:
    """A snapshot; ``culprit`` is the tensor that was bad already when the step began, if that is the failure.

    ``losses`` and ``devices`` are those of the replay; ``reference`` is that of a mismatch.
    """

    snapshot: Snapshot
    culprit: torch.Tensor | None = None
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    devices: dict[int, torch.device] = field(default_factory=dict)
    reference: Reference | None = None


def make_snapshot(step: FailedStep, frame: FrameType | None) -> BuiltSnapshot:
    """Replay a failed step and describe it; ``frame`` is where the loop stands, for the names of its variables.

    Where something raised, a check of the user's may have seen a bad value: then that value is the failure.
    """
    played = replay_step(step, frame)
    replayed, failure = played.replayed, played.failure
    is_hook = step.raised is not None and step.raised.is_call and replayed.error is None and bool(played.hooks)
    is_output = failure is None and step.observed_at in ("output", "parameter") and step.keep is not None
    if step.raised is not None or is_output:
        program, failure = _seen_by_check(replayed, failure, is_all=is_hook or is_output)
        if failure is not None and failure.kind != EXCEPTION:
            replayed.program = program.pruned()
            where = "gradient" if failure.phase == Phase.BACKWARD else "output"
            where = step.observed_at if step.observed_at == "parameter" else where
            step = replace(step, raised=None, observed_at=where)
    notes, reference = list(step.notes), None
    if failure is None and step.raised is None:
        failure, reference = compiled_mismatch(replayed, step.compilers)
    if failure is not None and reference is not None:
        played.notes.clear()  # gradients are others than in training, as they have to be
    elif failure is None:
        failure = _unexplained(step)
        is_gone = step.raised is None or (step.raised.is_call and replayed.error is None and not is_hook)
        notes += _why_not_again(replayed) if is_gone else [NOT_OF_TORCH]
        replayed.is_close = False
    elif step.raised is not None and failure.exception is not None and not step.raised.is_same(*failure.exception):
        notes.append(f"training raised {step.raised.type}: {step.raised.message.partition(chr(10))[0]}")
        replayed.is_close = False
    elif _is_from_statistics(replayed.program, failure):
        notes.append(f"a normalisation writes `{failure.input_name}`, and its value from before the step was not kept")
        replayed.is_close = False
    notes += [*played.notes, *replayed.mismatches]
    replayed.is_close = replayed.is_close and not step.notes
    is_given = failure.call is None and failure.input_name is not None and failure.value is not None
    culprit = replayed.sources.get(failure.value or 0) if is_given else None
    snapshot = _assemble(step, replayed, failure, notes, played.rng, frame, played.before)
    return BuiltSnapshot(snapshot, culprit, replayed.losses, replayed.devices, reference)


@dataclass(frozen=True)
class _Played:
    """A replay, the failure in its program, the generators' states, and the hooks that raised or were left out."""

    replayed: ReplayedStep
    failure: Failure | None
    rng: Generators
    hooks: list[Any]
    notes: list[str]
    before: StateBefore


def replay_step(step: FailedStep, frame: FrameType | None) -> _Played:
    """Run a step again and locate its failure; ``explain`` is called with the tensors that the program borrows."""
    raises = step.raised is not None and step.raised.is_call
    with contextlib.ExitStack() as stack:
        leaves = _leaves(step)
        seen = step.gradients
        if step.observed_at == "gradient" and step.buffers is not None:
            seen = [(leaf, leaf.grad) for leaf in leaves if leaf.grad is not None]
        stack.enter_context(_at_its_beginning(step))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        warnings.simplefilter("ignore")
        hooks = stack.enter_context(quiet_hooks(step.modules, leaves, is_recorded=True))
        if raises:  # checks report what they see, a second time now
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        rng = get_rng_state()
        roots = root_names(step.modules, frame)
        optimizers = [] if step.stand_ins else step.optimizers  # whose state is spread as well
        before, copies = collect_state(step.modules, optimizers, roots | names_of(step.optimizers, frame))
        before.left_out.extend([OPTIMIZERS_SPREAD] if len(optimizers) < len(step.optimizers) else [])
        replayed = replay(
            step.all_entries,
            step.saved,
            _names(step, frame).describe,
            perform_last=step.pending is None,
            raises=raises,
            state=step.put_back | {id(buffer) for module in step.modules for buffer in module.buffers()},
            root_names=roots,
            keep=step.keep,
            stand_ins=step.stand_ins,
        )
        if step.observed_at == "output" and step.pending is not None:
            *calls, last = replayed.program.calls  # the start of the backward call becomes the output
            replayed.program = replace(replayed.program, calls=tuple(calls), outputs=tuple(iter_refs(last.args)))
        notes = list(_other_gradients(step, seen))
        failure = (step.explain or locate)(replayed.program, replayed.tensors)
        result = _bad_result(failure, replayed.program)
        if result is not None and step.compiled is not None:
            made = replace(step.compiled, outputs=result)
            replayed.program = replace(replayed.program, calls=(made, *replayed.program.calls))
            failure = locate(replayed.program, replayed.tensors)
        replayed.own_tensors()
        replayed.share(copies)
    return _Played(replayed, failure, rng, hooks, notes, before)


def _other_gradients(step: FailedStep, seen: Gradients | None) -> Iterator[str]:
    """A note if gradients that the loop cleared in this step are others in training than in the replay, or may be."""
    first = next((n for n, entry in enumerate(step.entries) if entry.kind is kinds.BACKWARD), 0)
    cleared = [entry.args[0] for entry in step.entries[:first] if entry.kind is kinds.ZERO_GRAD]
    fresh = {id(parameter) for owner in cleared for parameter in owned_by(owner)}
    is_alone = not any(isinstance(module, torch.nn.parallel.DistributedDataParallel) for module in step.modules)
    if step.observed_at not in ("gradient", "parameter") or not is_alone or step.stand_ins:
        return
    pairs = [(old, leaf.grad) for leaf, old in seen or () if id(leaf) in fresh]
    if not all(new is not None and same_bits(old, new) for old, new in pairs):
        yield OTHER_GRADIENTS


def _seen_by_check(replayed: ReplayedStep, failure: Failure | None, *, is_all: bool) -> tuple[Program, Failure | None]:
    """The program and its failure; where no call of torch raised, the last bad value of the last calls, or of all."""
    program = replayed.program
    if failure is not None:
        return program, failure
    value = last_bad(program, replayed.tensors, within=len(program.calls) if is_all else _LOOKS_BACK)
    if value is None:
        return program, None
    program = replace(program, outputs=(Ref(value),))
    return program, locate(program, replayed.tensors)


_LOOKS_BACK = 8  # calls: a check such as `not torch.isfinite(x).all()`, and what the code around it computes


def _is_from_statistics(program: Program, failure: Failure) -> bool:
    """True for a bad input that a call of the step writes without telling its version, and that is no buffer.

    The replay has the value from after that call, so the call may have made it bad.
    """
    kept = {item.value for item in program.inputs if item.role == "buffer"}
    written = (hidden_writes(call.target, call.args, call.kwargs) for call in program.calls)
    values = {ref.value for ref in iter_refs(list(written))} - kept
    return failure.call is None and failure.input_name is not None and failure.value in values


def _bad_result(failure: Failure | None, program: Program) -> Ref | None:
    if failure is None or failure.call is not None:
        return None
    items = (item for item in program.inputs if item.value == failure.value)
    return next((Ref(item.value) for item in items if item.role == "batch" and item.requires_grad), None)


def snapshot_without_replay(step: FailedStep, frame: FrameType | None) -> Snapshot:
    """Describe a failed step that cannot be run again here: what its root modules were given, and what was seen."""
    names = _names(step, frame)
    rng = get_rng_state()
    tracer = Tracer(names.describe)
    for entry in step.entries:
        for tensor, _ in entry.versions if entry.kind is kinds.MODULE else ():
            if is_leaf(tensor) or not tensor.requires_grad:
                tracer.adopt(local_part(tensor), names.describe(tensor) or InputName("input"))
    replayed = ReplayedStep(tracer.program(), tracer.tensors, tracer.borrowed, is_close=False)
    replayed.own_tensors()
    bad = next((item for item in replayed.program.inputs if ways_of(tracer.tensors[item.value])), None)
    failure = _unexplained(step)
    if bad is not None and step.raised is None:
        failure = replace(failure, phase=Phase.FORWARD, input_name=bad.name, value=bad.value)
    return _assemble(step, replayed, failure, step.notes, rng, frame)


def _unexplained(step: FailedStep) -> Failure:
    phase = _PHASES.get(step.observed_at, Phase.FORWARD)
    raised = step.raised
    if raised is not None:
        exception = (raised.type, raised.message)
        return Failure(raised.phase, EXCEPTION, module=raised.module, site=raised.site, exception=exception)
    ways = [way for tensor in step.pending.starts for way in ways_of(tensor)] if step.pending else []
    return Failure(phase, kind_of(NAN if NAN in ways or not ways else ways[0]))


_PHASES = {"gradient": Phase.BACKWARD, "parameter": Phase.OPTIMIZER}


def _names(step: FailedStep, frame: FrameType | None) -> Names:
    names = Names()
    for module in step.modules:
        names.add_root(module)
    names.name_roots(root_names(step.modules, frame))
    for entry in step.all_entries:
        names.add_arguments(entry)
    names.add_locals(frame)
    names.add_by_place(step.all_entries, step.likewise)
    for entry in step.all_entries:
        names.add_by_source(entry)
        names.add_arguments(entry, plain=True)
    return names


def _assemble(
    step: FailedStep,
    replayed: ReplayedStep,
    failure: Failure,
    notes: list[str],
    rng: Generators,
    frame: FrameType | None,
    before: StateBefore | None = None,
) -> Snapshot:
    path = getattr(sys.modules.get("__main__"), "__file__", None)  # names were taken out of the command line
    settings = replace(
        step.capture,
        num_threads=torch.get_num_threads(),
        deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
        matmul_precision=matmul_precision(),
    )
    return Snapshot(
        program=replayed.program,
        tensors=replayed.tensors,
        failure=failure,
        step=step.completed,
        micro_step=_micro_step(step, replayed, failure),
        observed_at=step.observed_at,
        fidelity="exact" if not notes else "close" if replayed.is_close else "unfaithful",
        fidelity_note="; ".join(dict.fromkeys(notes)) or None,
        environment=collect_environment(),
        source=describe_source(Path(path) if isinstance(path, str) else None, step.command),
        settings=settings,
        rng=rng,
        timeline=with_optimizers(step.timeline, names_of(step.optimizers, frame)),
        command=step.command,
        before=before,
        recorded=list(step.recorded) or None,
    )


def _why_not_again(replayed: ReplayedStep) -> Iterator[str]:
    yield "the failure did not occur again when the step was replayed"
    opaque = dict.fromkeys(call.kwargs["name"] for call in replayed.program.calls if call.target == OPAQUE)
    if opaque:
        yield "custom autograd functions are not followed: " + ", ".join(f"`{name}`" for name in opaque)


def _micro_step(step: FailedStep, replayed: ReplayedStep, failure: Failure) -> int:
    """Backward calls made before the failing call; a bad value may be noticed several of them later."""
    made = step.micro_step
    if failure.phase == Phase.OPTIMIZER or failure.call_index is None or replayed.mismatches:
        return made
    backward = [n for n, call in enumerate(replayed.program.calls) if call.target in (BACKWARD, AUTOGRAD_BACKWARD)]
    later = sum(number > failure.call_index for number in backward)
    is_pending = step.pending is not None and step.pending.name in (BACKWARD, AUTOGRAD_BACKWARD)
    return max(0, made - max(0, later - is_pending))


@contextlib.contextmanager
def _at_its_beginning(step: FailedStep) -> Iterator[None]:
    """The state the step began with; afterwards buffers, gradients and generators are as they were."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(enabled=True))
        stack.enter_context(python_generators_restored(step.generators))
        stack.enter_context(attributes_kept(step.modules, step.optimizers))
        put_first_back(step.all_entries)
        first = next((entry.rng for entry in step.entries if entry.rng is not None), None)
        if first is not None:
            torch.set_rng_state(first[0])
        leaves = _leaves(step)
        stack.callback(give_gradients, [(leaf, leaf.grad) for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
        if step.buffers is not None:
            stack.callback(step.buffers.put_back().give_back)
            _write_buffers(step)
        if "torch._dynamo" in sys.modules:  # compiled parts run as they are written
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _write_buffers(step: FailedStep) -> None:
    """Repeat what the loop wrote by hand into buffers since they were copied."""
    buffers = {address_of(buffer) for module in step.modules for buffer in module.buffers()} - {None}
    player = Player(step.saved)
    with Modes() as modes:
        for entry in step.lead:
            written = written_argument(entry.name, entry.args, entry.kwargs)
            is_buffer = isinstance(written, torch.Tensor) and address_of(written) in buffers
            if is_buffer or not entry.writes_state:
                modes.enter(entry.mode)
                player.play(entry)


def _leaves(step: FailedStep) -> list[torch.Tensor]:
    owners: list[torch.nn.Module | torch.optim.Optimizer] = [*step.modules, *step.optimizers]
    leaves = {id(p): p for owner in owners for p in owned_by(owner)}
    leaves.update((id(leaf), leaf) for leaf in leaves_in([*step.lead, *step.entries]))
    return list(leaves.values())
