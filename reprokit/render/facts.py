"""The facts of a snapshot as names and values: gathered here once, laid out by terminal, issue and report.

Values are redacted text in which code stands in backticks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reprokit.locate.failure import HEALTHY, Failure, root_of
from reprokit.program.ir import Phase
from reprokit.render import wording
from reprokit.render.names import labels
from reprokit.series.story import has_several_optimizers, paragraph
from reprokit.snapshot.environment import Environment
from reprokit.snapshot.format import Snapshot
from reprokit.snapshot.redact import redact_text
from reprokit.words import counted, in_root, replay_words

Fact = tuple[str, str]

_NOTICED = {
    "loss": "the loss",
    "gradient": "a gradient",
    "parameter": "a parameter",
    "output": "an output of the model",
}


def of_failure(snapshot: Snapshot) -> list[Fact]:
    """The failure, its place and step, and the fidelity of the replay."""
    failure = snapshot.failure
    if failure.kind == HEALTHY:
        size = f"{counted(snapshot.program.num_calls, 'call')}, {counted(snapshot.num_elements, 'input element')}"
        note = f": {redact_text(snapshot.fidelity_note)}" if snapshot.fidelity_note else ""
        return [("when", when(snapshot)), ("replay", f"{snapshot.fidelity}{note}"), ("program", size)]
    noticed = f", noticed in {noticed_in(snapshot)}" if noticed_in(snapshot) else ""
    message = f": {wording.message(failure)}" if wording.message(failure) else ""
    note = f": {redact_text(snapshot.fidelity_note)}" if snapshot.fidelity_note else ""
    size = f"{counted(snapshot.program.num_calls, 'call')}, {counted(snapshot.num_elements, 'input element')}"
    shown = labels(snapshot.program)
    items = (item for item in snapshot.program.inputs if item.role == "batch" and item.value in shown)
    batch = {item.name: shown[item.value] for item in items}
    facts = [
        ("where", where(snapshot)),
        ("origin", origin(snapshot, failure)),
        ("line", line(failure)),
        ("exception", f"`{failure.exception[0]}`{message}" if failure.exception is not None else ""),
        ("because of", cause(snapshot)),
        ("event", wording.renamed(wording.event_words(failure), batch)),
        ("difference", wording.difference_words(failure)),
        ("how much", how_much(failure)),
        ("when", f"{when(snapshot)}{noticed}"),
        ("replay", f"{snapshot.fidelity}{note}"),
        ("program", size),
    ]
    return [(name, value) for name, value in facts if value]


def doubt(snapshot: Snapshot) -> str:
    """A sentence on how the replay differs from training; empty where it is exact."""
    words = redact_text(replay_words(snapshot.fidelity, snapshot.fidelity_note))
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def story(snapshot: Snapshot) -> str:
    """How the training came to the failure, in a few sentences; empty if no step before was unusual."""
    return redact_text(paragraph(snapshot.story))


def module(snapshot: Snapshot) -> str | None:
    """The module in which it failed, with its root's name in front where there are several roots."""
    return in_root(snapshot.failure.module, root_of(snapshot.failure, snapshot.program))


def where(snapshot: Snapshot) -> str:
    """``in the forward pass, in module `layers.1` ``, without the space at the end."""
    failure, inside = snapshot.failure, module(snapshot)
    phase = wording.phase_words(failure)
    place = f", in module {wording.code_span(inside)}" if inside else ""
    is_outside = failure.call is not None and not failure.module and failure.phase != Phase.OPTIMIZER
    if is_outside and phase != wording.OUTSIDE:
        place = f", {wording.OUTSIDE}"
    calls = snapshot.program.calls
    is_validation = failure.phase == Phase.FORWARD and bool(calls) and not any(call.mode.grad for call in calls)
    return f"{phase}{', without gradients' if is_validation else ''}{place}"


def origin(snapshot: Snapshot, failure: Failure) -> str:
    """The call that a failure of the step, or the bad value behind it, began with, or what there is in its place."""
    if failure.call is not None:
        node = f" ({failure.backward_node})" if failure.backward_node else ""
        into = f", into {wording.code_span(wording.written(failure))}" if wording.written(failure) else ""
        return f"`{failure.call}`{node}{into}"
    if failure.difference is not None:
        return ""
    if failure.input_name is not None:
        words = ("parameter", "step") if snapshot.is_initial(failure) else ("input", "call reads it")
        return f"the {words[0]} {wording.code_span(failure.input_name)}, bad before the first {words[1]}"
    return "the training loop's own code" if failure.exception is not None else "unknown"


def cause(snapshot: Snapshot) -> str:
    """The bad value without which a call does not raise, and its origin; empty without one."""
    found = snapshot.failure.cause
    if found is None:
        return ""
    made = f"{'in' if found.call is None else 'from'} {origin(snapshot, found)}"
    return ", ".join(filter(None, (f"{wording.kind_words(found)} {made}", line(found))))


def line(failure: Failure) -> str:
    """``file:line`` and its code."""
    site = failure.site
    if site is None:
        return ""
    return f"{wording.code_span(redact_text(site.place))}{wording.code_of(site)}"


def how_much(failure: Failure) -> str:
    """The number of bad elements of the bad tensor; empty for a single number."""
    if failure.num_elements <= 1 or not failure.num_bad:
        return ""
    verb = "is" if failure.num_bad == 1 else "are"
    first = f", first at {list(failure.element)}" if failure.element is not None else ""
    return f"{failure.num_bad:,} of {failure.num_elements:,} elements {verb} {failure.way}{first}"


def when(snapshot: Snapshot) -> str:
    """The step of the training, and which of its backward passes comes next where it is not the first one.

    Where optimizers take turns, what went before may have been another one's. Ranks are compared after a step.
    """
    done, words, failure = snapshot.micro_step, f"step {snapshot.step}", snapshot.failure
    if began := snapshot.settings.began_at:
        words += f", which is step {snapshot.step - began} of another model: its training began at step {began}"
    if (
        not done
        or failure.phase == Phase.OPTIMIZER
        or failure.difference is not None
        or has_several_optimizers(snapshot.timeline)
    ):
        return words
    return f"{words}, micro-step {done + 1} (after {counted(done, 'backward pass', 'backward passes')})"


def surroundings(snapshot: Snapshot) -> list[Fact]:
    """The process among several, and the compilers the script has used."""
    settings = snapshot.settings
    process = f"rank {settings.rank} of {settings.world_size or 1}" if settings.rank is not None else ""
    backends = ", ".join(wording.code_span(name) for name in settings.compilers or ())
    compiled = f"parts of the script, with {backends}" if backends else ""
    return _shown([("process", process), ("compiled", compiled)])


def noticed_in(snapshot: Snapshot) -> str:
    """The place where the bad value was noticed; empty for an exception."""
    return _NOTICED.get(snapshot.observed_at, "")


def versions(environment: Environment) -> list[Fact]:
    """Versions, the machine, and the libraries that the program had imported."""
    rows = [(name, getattr(environment, name)) for name in ("torch", "python", "platform", "cuda", "cudnn", "devices")]
    return _shown([*rows, *libraries(environment)])


def libraries(environment: Environment) -> list[Fact]:
    return _shown(sorted(environment.libraries.items()))


def settings(environment: Environment) -> list[Fact]:
    switches = ((name.replace("_", " "), value) for name, value in environment.switches.items())
    return _shown([*sorted(environment.variables.items()), *switches])


def source(snapshot: Snapshot) -> list[Fact]:
    git = snapshot.source
    changed = ", with uncommitted changes" if git.dirty else ""
    return _shown(
        [
            ("command", " ".join(git.command or snapshot.command)),
            ("file", git.file),
            ("commit", f"{git.commit[:12]} on {git.branch or 'no branch'}{changed}" if git.commit else ""),
            ("remote", git.remote),
        ]
    )


def _shown(rows: Iterable[tuple[str, Any]]) -> list[Fact]:
    return [(name, redact_text(_plain(value))) for name, value in rows if value not in (None, (), "")]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
