"""What texts say about a failure: `Facts`, found once and laid out by summary, issue and report; and the rows of names
and values that a terminal shows too.

Values are redacted text in which code stands in backticks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from reprokit.locate.failure import Failure, root_of
from reprokit.locate.ranges import Range
from reprokit.locate.samples import bad_row_text, batch_words
from reprokit.program.step import Step
from reprokit.render import findings, wording
from reprokit.render.expectation import OWN, Expectation, expect, retry
from reprokit.render.kinds import OUTSIDE, words_of
from reprokit.render.module_ranges import calls_in_frames
from reprokit.render.names import in_users_words, labels
from reprokit.render.script import Script
from reprokit.render.survey import Survey, survey
from reprokit.render.verify import VerifyResult
from reprokit.render.wording import code_span
from reprokit.series.story import by_optimizer, has_several_optimizers, paragraph, titled
from reprokit.shrink.reduction import Reduction
from reprokit.snapshot.environment import Environment
from reprokit.snapshot.format import Snapshot
from reprokit.snapshot.redact import redact_source, redact_text, shorten_paths
from reprokit.whatif import home_of
from reprokit.words import counted, in_root, listed, number_words, replay_words, sentence

Fact = tuple[str, str]

_NOTICED = {
    "loss": "the loss",
    "gradient": "a gradient",
    "parameter": "a parameter",
    "output": "an output of the model",
}
_MAX_SHAPES, _MAX_SHAPES_IN_TITLE = 6, 3
_FLOATS = ("float", "bfloat", "complex")


class Facts:
    """The facts of one rendering, each found when a text first asks for it. Inputs have the user's names for them."""

    def __init__(
        self, snapshot: Snapshot, script: Script, verified: VerifyResult, reduction: Reduction | None = None
    ) -> None:
        self.snapshot = in_users_words(snapshot)
        self.script, self.verified, self.reduction = script, verified, reduction
        self.names = labels(self.snapshot.program)
        items = reduction.program.inputs if reduction is not None else ()
        data = [item.name for item in items if item.role not in ("parameter", "buffer")]
        # inputs of the step as the repro calls them; parameters and buffers keep their full names
        self.names_of_data = {name: script.names[name] for name in data if name in script.names}

    @cached_property
    def expectation(self) -> Expectation:
        return expect(self.snapshot, self.reduction)

    @property
    def retry(self) -> str:
        words = retry(self.snapshot, self.reduction, "`")
        return f"{words[:1].upper()}{words[1:]}." if words else ""

    @cached_property
    def survey(self) -> Survey:
        """The captured step, measured where the report shows it."""
        failure = self.snapshot.failure
        bad = self.names.get(failure.value, "the tensor") if failure.value is not None else "the tensor"
        bad = f"gradient of {bad}" if failure.is_derivative else bad
        shown = calls_in_frames(self.snapshot.program, failure)
        return survey(self.snapshot, bad, shown if failure.call_index is not None else None)

    @cached_property
    def operands(self) -> list[tuple[str, Range]]:
        """The names and ranges of what the origin read in the captured step."""
        return [(self.names.get(value, "x"), found) for value, found in self.survey.operands.items()]

    @cached_property
    def title(self) -> str:
        """``softmax returns nan in Attention: a softmax over a fully masked row (float32, CPU, torch 2.13.0)``."""
        failure = self._source.failure
        if failure.event is not None:
            # The minimum has another loss.
            failure = self.snapshot.failure
        headline = words_of(failure).headline
        place = self._place_in_title(failure)
        why = self.expectation.words or self._shapes_in_title(failure)
        details = redact_text(", ".join(filter(None, self._details())))
        return f"{headline}{place}{f': {why}' if why else ''} ({details})"

    @property
    def _source(self) -> Reduction | Snapshot:
        """What the texts are about."""
        return self.reduction if self.reduction is not None else self.snapshot

    def _place_in_title(self, failure: Failure) -> str:
        """The module or the line, where the failure is a matter of the model's code."""
        if self.expectation.owner != OWN or not failure.kind.is_local:
            return ""
        inside = (module(self.snapshot) or "").strip("<>")
        site = self.snapshot.failure.site
        if site is not None and (failure.kind.raises or not inside):
            return f" {shorten_paths(f'at {redact_text(site.place)}')}"
        return f" {shorten_paths(f'in {inside}')}" if inside else ""

    def _shapes_in_title(self, failure: Failure) -> str:
        """The sizes that a call was given which raised."""
        if not failure.kind.raises or not self.operands:
            return ""
        shapes = [str(list(found.shape)) for _, found in self.operands]
        if len(shapes) > _MAX_SHAPES_IN_TITLE:
            shapes = list(dict.fromkeys(shapes))
        more = " ..." if len(shapes) > _MAX_SHAPES_IN_TITLE else ""
        return f"given {listed(shapes[:_MAX_SHAPES_IN_TITLE])}{more}"

    def _details(self) -> Iterator[str]:
        """Formats, device and version of the repro, and the formats of training where those are other ones.

        The repro may need neither autocast nor half precision.
        """
        in_training, now = _autocast(self.snapshot), _autocast(self._source)
        before = list(dict.fromkeys(found.dtype for _, found in self.operands))
        dtypes = self._dtypes_given() or before
        floats, others = _floats_in(dtypes), _floats_in(before)
        yield f"autocast to {now}" if now else " and ".join((floats or dtypes)[:2])
        if in_training and not now:
            yield f"{in_training} autocast in training"
        has_both = bool(floats) and bool(others)
        if has_both and set(floats).isdisjoint(others) and not in_training:
            yield f"{' and '.join(others[:2])} in training"
        environment, home = self.snapshot.environment, home_of(Step.of(self._source))
        yield next(iter(environment.devices), "CUDA") if home == "cuda" else home.upper()
        number = environment.torch.partition("+")[0]
        yield f"torch {number}" if number else ""

    def _dtypes_given(self) -> list[str]:
        """The formats of what the origin reads in the repro."""
        source, index = self._source, self._source.failure.call_index
        read = source.program.calls[index].input_refs() if index is not None else ()
        given = (str(source.tensors[v].dtype) for v in read if v in source.tensors)
        return list(dict.fromkeys(name.removeprefix("torch.") for name in given))

    @cached_property
    def given(self) -> str:
        """The shapes that a call was given which raised, as a sentence; empty for any other failure."""
        if not self.snapshot.failure.kind.raises or not self.operands:
            return ""
        shown = [f"{code_span(name)} {list(found.shape)} {found.dtype}" for name, found in self.operands]
        if len(shown) > _MAX_SHAPES:
            # Of `torch.stack` of a batch the one that differs may be the last.
            nums = Counter(text.partition("` ")[2] for text in shown)
            firsts = [(next(text for text in shown if text.endswith(one)), num) for one, num in nums.items()]
            shown = [f"{text} ({num} such)" if num > 1 else text for text, num in firsts]
        more = f" and {len(shown) - _MAX_SHAPES} more" if len(shown) > _MAX_SHAPES else ""
        return f"In training it was given {', '.join(shown[:_MAX_SHAPES])}{more}."

    @cached_property
    def which(self) -> str:
        """How many elements are bad, and their pattern: rows, a column, all of them."""
        snapshot, positions = self.snapshot, self.survey.positions
        event = snapshot.failure.event
        if event is not None:
            is_one_row = event.rows is not None and event.rows.startswith("row ") and "," not in event.rows
            verb = "stands" if is_one_row else "stand"
            rows = f"{event.rows} of the batch {verb} out; " if event.rows else ""
            return f"{rows}{event_words(snapshot)}"
        if positions is None:
            return how_much(snapshot)
        num_rows = positions.shape[0] if positions.shape else 0
        samples = snapshot.samples or {}
        rows = bad_row_text(snapshot.program, samples, snapshot.failure.value, positions.rows, num_rows)
        name, total = code_span(positions.name), positions.size[0] * positions.size[1]
        pattern = positions.pattern.removesuffix(".")
        if pattern[:1].isdigit():  # it counts them itself
            return f"{name}: {pattern}{rows}"
        counts = f"{sum(positions.counts.values()):,} of {total:,} elements"
        return f"{counts} of {name}: {pattern[:1].lower()}{pattern[1:]}{rows}"

    @cached_property
    def rate(self) -> str:
        """A sentence with the number of runs that fail; without a repro with the reason."""
        verified = self.verified
        if not verified.times:
            return f"There is no repro: {verified.signature}."
        runs, apart = f"{verified.times} runs", "each in a process of its own"
        if verified.num_failed:
            is_one_way = verified.fails and verified.agreed == verified.num_failed
            return f"It failed {verified.num_failed} of {runs}{' in the same way' if is_one_way else ''}, {apart}."
        if verified.exit_code == 0:
            return f"It did not fail in {runs}, {apart}."
        return f"It neither failed nor passed in {runs}, {apart}; {verified.agreed} ended with {verified.signature}."

    @property
    def output(self) -> str:
        """What a repro prints, of one that raises the traceback, else its exit code; empty without a repro."""
        printed = self.verified.output.strip() or self.verified.error_output.strip() or self.verified.signature
        return printed if self.verified.times else ""

    @cached_property
    def size(self) -> str:
        if self.reduction is None or self.reduction.no_repro:
            return counted(self.snapshot.program.num_calls, "torch call")
        before, checks = counted(self.reduction.before.calls, "torch call"), counted(self.reduction.checks, "check")
        return f"{before} to {self.reduction.program.num_calls:,}, in {checks}"

    @cached_property
    def log(self) -> str:
        log = "\n".join(map(str, self.reduction.log)) if self.reduction is not None else ""
        return redact_source(wording.renamed(log, self.script.names))

    @cached_property
    def diagnosis(self) -> Mapping[str, Any] | None:
        """The diagnosis as plain text by part, ``None`` if nothing is known."""
        found = self.reduction.diagnosis if self.reduction is not None else None
        if found is None or not found.is_known:
            return None
        raises = self.snapshot.failure.kind.raises
        return findings.page(found, self.snapshot.cause, is_exception=raises)


def _floats_in(dtypes: Iterable[str]) -> list[str]:
    return [name for name in dtypes if name.startswith(_FLOATS)]


def _autocast(source: Reduction | Snapshot) -> str:
    index = source.failure.call_index
    autocast = source.program.calls[index].mode.autocast if index is not None else ()
    return autocast[0][1].removeprefix("torch.") if autocast else ""


def of_failure(snapshot: Snapshot) -> list[Fact]:
    """The failure, its place and step, and the fidelity of the replay."""
    failure = snapshot.failure
    note = f": {redact_text(snapshot.fidelity_note)}" if snapshot.fidelity_note else ""
    calls = counted(snapshot.program.num_calls, "call")
    elements = counted(snapshot.num_elements, "input element")
    ending = [
        ("replay", f"{snapshot.fidelity}{note}"),
        ("program", f"{calls}, {elements}"),
    ]
    if not failure.kind.is_failure:
        return [("when", when(snapshot)), *ending]
    noticed = noticed_in(snapshot)
    facts = [
        ("where", where(snapshot)),
        ("origin", wording.origin(snapshot, failure)),
        ("line", wording.line(failure)),
        ("exception", _exception(failure)),
        ("because of", cause(snapshot)),
        ("event", "" if failure.silence else event_words(snapshot)),
        ("difference", wording.difference_words(failure)),
        ("not learned", failure.silence),
        ("how much", how_much(snapshot)),
        ("samples", sample_words(snapshot)),
        ("when", f"{when(snapshot)}{f', noticed in {noticed}' if noticed else ''}"),
        *ending,
    ]
    return [(name, value) for name, value in facts if value]


def _exception(failure: Failure) -> str:
    """`` `ValueError`: `expected a float` ``; empty without one."""
    if failure.exception is None:
        return ""
    message = wording.message(failure)
    return f"`{failure.exception[0]}`{f': {message}' if message else ''}"


def event_words(snapshot: Snapshot) -> str:
    """An event in a few words, with the inputs as the user's code calls them."""
    shown = labels(snapshot.program)
    items = (item for item in snapshot.program.inputs if item.role == "batch" and item.value in shown)
    return wording.renamed(wording.event_words(snapshot.failure), {item.name: shown[item.value] for item in items})


def sample_words(snapshot: Snapshot) -> str:
    """``the rows of `x` and `y` are samples 12, 7 and 30``; empty where no loader is known to have given the batch."""
    return batch_words(snapshot.samples or {})


def doubt(snapshot: Snapshot) -> str:
    """A sentence on how the replay differs from training; empty where it is exact."""
    words = redact_text(replay_words(snapshot.fidelity, snapshot.fidelity_note))
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def learning_rate(snapshot: Snapshot) -> str:
    """``The learning rate was 0.5``, of every optimizer, for a run that diverged; empty for any other failure."""
    series = by_optimizer(snapshot.timeline)
    last = {name: next((row.lr for row in reversed(rows) if row.lr is not None), None) for name, rows in series.items()}
    known = [titled(number_words(rate, 4), redact_text(name)) for name, rate in last.items() if rate is not None]
    is_diverging = snapshot.failure.event is not None or bool(snapshot.story)
    return f"The learning rate was {listed(known)}" if known and is_diverging else ""


def led_to(snapshot: Snapshot) -> str:
    """What has led to the failure, as far as playing the steps again has shown, and what was not played."""
    cause = snapshot.cause
    if cause is None:
        return ""
    return redact_text(" ".join(filter(None, [cause.text, sentence(cause.why_not)])))


def story(snapshot: Snapshot) -> str:
    """How the training came to the failure, in a few sentences; empty if no step before was unusual."""
    return redact_text(paragraph(snapshot.story))


def module(snapshot: Snapshot) -> str | None:
    """The module in which it failed, with its root's name in front where there are several roots."""
    return in_root(snapshot.failure.module, root_of(snapshot.failure, snapshot.program))


def where(snapshot: Snapshot) -> str:
    """``in the forward pass, in module `layers.1` ``, without the space at the end."""
    failure, inside = snapshot.failure, module(snapshot)
    phase = words_of(failure).phase
    place = f", in module {code_span(inside)}" if inside else ""
    is_outside = failure.call is not None and not failure.module and not failure.in_update
    if is_outside and phase != OUTSIDE:
        place = f", {OUTSIDE}"
    calls = snapshot.program.calls
    is_validation = failure.in_forward and bool(calls) and not any(call.mode.grad for call in calls)
    return f"{phase}{', without gradients' if is_validation else ''}{place}"


def cause(snapshot: Snapshot) -> str:
    """The bad value without which a call does not raise, and its origin; empty without one."""
    found = snapshot.failure.cause
    if found is None:
        return ""
    made = f"{'in' if found.call is None else 'from'} {wording.origin(snapshot, found)}"
    return ", ".join(filter(None, (f"{words_of(found).short} {made}", wording.line(found))))


def how_much(snapshot: Snapshot) -> str:
    """The number of bad elements of the bad tensor, the rows of an input, and the sample of the first one; empty for a
    single number."""
    failure = snapshot.failure
    if failure.num_elements <= 1 or not failure.num_bad or failure.departure:
        return failure.departure or ""
    verb = "is" if failure.num_bad == 1 else "are"
    first = f", first at {list(failure.element)}" if failure.element is not None else ""
    rows, place = f": {snapshot.bad_rows}" if snapshot.bad_rows else "", failure.element or ()
    if place and not rows:
        num_rows = failure.num_elements if len(place) == 1 else 0  # else it is not known here
        rows = bad_row_text(snapshot.program, snapshot.samples or {}, failure.value, place[:1], num_rows)
    return f"{failure.num_bad:,} of {failure.num_elements:,} elements {verb} {failure.way}{first}{rows}"


def when(snapshot: Snapshot) -> str:
    """The step of the training, and which of its backward passes comes next where it is not the first one.

    Where optimizers take turns, what went before may have been another one's. Ranks are compared after a step.
    """
    done, words, failure = snapshot.micro_step, f"step {snapshot.step}", snapshot.failure
    if began := snapshot.settings.began_at:
        words += f", which is step {snapshot.step - began} of another model: its training began at step {began}"
    is_after_step = failure.in_update or failure.difference is not None
    if not done or is_after_step or has_several_optimizers(snapshot.timeline):
        return words
    return f"{words}, micro-step {done + 1} (after {counted(done, 'backward pass', 'backward passes')})"


def surroundings(snapshot: Snapshot) -> list[Fact]:
    """The process among several, and the compilers the script has used."""
    settings = snapshot.settings
    process = f"rank {settings.rank} of {settings.world_size or 1}" if settings.rank is not None else ""
    backends = ", ".join(code_span(name) for name in settings.compilers or ())
    compiled = f"parts of the script, with {backends}" if backends else ""
    return _shown([("process", process), ("compiled", compiled)])


def noticed_in(snapshot: Snapshot) -> str:
    """The place where the bad value was noticed; empty for an exception, and where no value is bad."""
    return "" if snapshot.failure.silence else _NOTICED.get(snapshot.observed_at, "")


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
