"""The sentences about a failure that every rendering shares: what fails, what was observed, what was expected."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from reprokit import words
from reprokit.grammar import plain_of
from reprokit.locate.failure import SILENT, Drop, Failure
from reprokit.program.ir import Phase
from reprokit.snapshot.redact import redact_source, redact_text
from reprokit.words import listed

if TYPE_CHECKING:
    from reprokit.program.ir import Site
    from reprokit.shrink.explain import Nearest, ProgramPart
    from reprokit.shrink.reduction import Reduction
    from reprokit.snapshot.format import Snapshot

_MAX_CODE, _MAX_MESSAGE = 160, 600  # both shapes of a recomputation are in the third line of its message
_DEFINITIONS = {
    "update": "the norm of the change of all parameters over their norm before the step",
    "gradient norm": "the L2 norm of all gradients together, before clipping",
}
_FREE, _MATTERS = "fails with every value that was tried", "its value matters"
_OPERATORS = {
    "add": "addition", "sub": "subtraction", "rsub": "subtraction", "mul": "multiplication", "div": "division",
    "truediv": "division", "rtruediv": "division", "floordiv": "floor division", "matmul": "matmul",
    "rpow": "pow", "neg": "negation", "getitem": "indexing", "setitem": "index assignment",
}  # fmt: skip
# What a mismatch differs from, in a title and in a sentence.
_REFERENCES = {
    "fp64": ("float64", "in float64"),
    "compile": ("eager", "in eager mode"),
    "cpu-cuda": ("the other device", "on the other device"),
    "other": ("the same result made in another way", "made in the other way"),
}


def event_words(failure: Failure) -> str:
    """``the loss was 1.2e+09, 1e+08 times its median of 12.3; rows 0-7 of `y` ``, or nothing."""
    if failure.kind == SILENT:
        return failure.way
    return words.event_words(asdict(failure.event)) if failure.event is not None else ""


def difference_words(failure: Failure) -> str:
    """``rank 1 differs from rank 0 in `0.weight`, by up to 0.01, since step 13``, or nothing."""
    return words.difference_words(plain_of(failure.difference)) if failure.difference is not None else ""


def kind_words(failure: Failure) -> str:
    """``nan``, ``inf``, ``-inf``, the exception's type, or what an event makes of its quantity."""
    if failure.event is not None:
        return words.number_words(failure.event.value)
    if failure.kind in ("mismatch", "function"):
        return "different" if failure.kind == "mismatch" else "reported"
    if failure.exception is not None:
        return failure.exception[0]
    return {"+inf": "inf", "-inf": "-inf"}.get(failure.way, "nan")


def short_call(failure: Failure) -> str:
    """The origin in a word or two: ``softmax``, ``division``, ``Adam.step``."""
    if failure.call is None:
        return failure.input_name or "an input"
    return short_name(failure.call)


def short_name(call: str) -> str:
    """A public name in a word or two: ``softmax``, ``division``, ``Adam.step``."""
    parts = call.split(".")
    if call.startswith("torch.optim."):
        return ".".join(parts[2:])
    name = parts[-2] if parts[-1] in ("__get__", "__set__") else parts[-1]
    return _OPERATORS.get(name.strip("_"), name.lstrip("_"))


def headline(failure: Failure, *, is_reduced: bool = False) -> str:
    """One line without punctuation at its end: ``softmax returns nan``.

    ``is_reduced``: the value of an event is that of a smaller program, not the one of training.
    """
    call, kind = short_call(failure), kind_words(failure)
    if failure.kind == SILENT:
        return failure.way
    if failure.kind == "exception":
        return f"{call} raises {kind}"
    if failure.kind == "function":
        return f"{failure.check[1]} holds"
    if failure.event is not None:
        source = failure.event.source if failure.kind == "dead" else None
        event = replace(failure.event, source=source, rows=None, samples=None, largest=None)
        if is_reduced and failure.kind != "dead":
            usual = f"; its median in training was {words.number_words(event.usual)}" if event.usual is not None else ""
            value = words.number_words(event.value)
            return f"{failure.kind}: the {event.quantity} of this reduced program is {value}{usual}"
        return f"{failure.kind}: {event_words(replace(failure, event=event))}"
    if failure.kind == "mismatch":
        what = "compiled code" if failure.reference[0] == "compile" else "the result" if failure.call is None else call
        if failure.departure:
            return f"{what} differs between two runs"
        return f"{what} differs from {_REFERENCES.get(failure.reference[0], (failure.way, ''))[0]}"
    if failure.call is None:
        return f"{call} is {kind} before the first call"
    if failure.is_derivative:
        return f"gradient of {call} is {kind}"
    if failure.phase == Phase.OPTIMIZER and failure.call.startswith("torch.optim."):
        return f"{call} makes a parameter {kind}"
    return f"{call} writes {kind} into {written(failure)}" if written(failure) else f"{call} returns {kind}"


def written(failure: Failure) -> str:
    """The input that the origin wrote the bad value into, by the last part of its name; empty for a result."""
    is_written = failure.call is not None and failure.phase == Phase.FORWARD and failure.input_name is not None
    return str(failure.input_name).rpartition(".")[2] if is_written else ""


def observed(failure: Failure, *, is_constant: bool = False) -> str:
    """What happened, in a sentence; ``is_constant``: the bad value is a constant in the call itself."""
    name, kind = f"`{failure.call or short_call(failure)}`", kind_words(failure)
    if failure.kind == SILENT:
        return f"Something is not learned: {failure.way}."
    if failure.kind == "function":
        return f"The check `{failure.check[1]}` holds for what the program leaves behind."
    if failure.event is not None:
        event = failure.event
        is_compared = failure.call is not None and event.quantity != "update"
        first = f"The first call whose result is off, compared with step {event.reference_step}, is `{failure.call}`."
        if failure.kind == "dead":
            return f"{event_words(failure).replace('the', 'The', 1)}. `{failure.call}` lets no gradient through."
        meaning = f" The {event.quantity} is {known}." if (known := _DEFINITIONS.get(event.quantity)) else ""
        return f"In training step {event.began_at} {event_words(failure)}.{meaning}{f' {first}' if is_compared else ''}"
    if failure.kind == "mismatch":
        what = name if failure.call is not None else "The program"
        if failure.reference[0] == "other":
            there = f" In the runs, {name}: {failure.departure}." if failure.departure else ""
            return (
                f"Two ways to make one result from the same inputs, which should agree, make different numbers.{there}"
            )
        way = "compiled" if failure.reference[0] == "compile" else "as it is"
        return f"{what} gives another result {way} than {_REFERENCES.get(failure.reference[0], ('', ''))[1]}."
    if failure.exception is not None:
        return f"{name} raises `{kind}`" + (f": {message(failure)}." if message(failure) else ".")
    if failure.call is None:
        return f"The input {name} is already {kind} before the first call reads it."
    if failure.through is not None:
        there = "In healthy steps before, which are given such values too, it drops them."
        return f"{name} lets the {kind} of the input `{failure.marker}` through. {there}"
    if failure.drop is not None:
        return _observed_drop(failure, failure.drop)
    if failure.is_derivative:
        node = f" ({failure.backward_node})" if failure.backward_node else ""
        return f"The backward pass of {name}{node} turns a finite gradient into {kind}."
    if failure.phase == Phase.OPTIMIZER and failure.call.startswith("torch.optim."):
        return f"{name} turns a finite parameter with a finite gradient into {kind}."
    places = {"optimizer": "the optimizer step", "backward": _CUSTOM}
    inside = f", called in {places[failure.phase]}," if failure.phase in places else ""
    what = f"writes {kind} into `{written(failure)}`" if written(failure) else f"returns {kind}"
    if failure.call.endswith(".__setitem__"):
        name, what = "The index assignment", f"writes {kind}"
    why = f"although none of its inputs is {failure.way or kind}"
    return f"{name}{inside} {what} {f'because the code gives it {kind}' if is_constant else why}."


def _observed_drop(failure: Failure, drop: Drop) -> str:
    holder = f"`{failure.input_name}` holds" if failure.input_name else f"`{failure.call}` returns"
    holder = "The data holds" if drop.is_given and not failure.input_name else holder
    node = f" of `{failure.call}`" if drop.is_given else ""
    node += f" ({failure.backward_node})" if failure.backward_node else ""
    return (
        f"{holder} nan for elements that `{drop.call}` drops, so the loss is finite. "
        f"The backward pass{node} multiplies their gradient of zero with that nan, and the gradient becomes nan."
    )


def message(failure: Failure) -> str:
    """The exception's message as inline code, redacted, as far as its lines fit; nothing where there is none.

    Without a full stop, which the sentence around it has.
    """
    text = failure.exception[1].strip() if failure.exception is not None else ""
    first, *others = filter(None, map(str.strip, text.splitlines() or [""])) if text else ("",)
    lengths = itertools.accumulate((len(other) + 1 for other in others), initial=len(first))
    shown = [line for line, length in zip((first, *others), lengths, strict=True) if length <= _MAX_MESSAGE]
    line = _shortened(redact_text(" ".join(shown or [first])), _MAX_MESSAGE)
    return code_span(line if line.endswith("..") else line.removesuffix(".")) if line else ""


def expected(failure: Failure) -> str:
    """The expectation as a sentence, without a claim that was not checked."""
    if failure.kind == "exception":
        return "The call returns."
    if failure.kind == "function":
        return "The check does not hold."
    if failure.event is not None:
        event = failure.event
        if event.quantity == "share of zeros":
            name = f"`{event.source}`" if event.source else "the parameter"
            return f"A gradient that is not zero everywhere reaches {name}."
        usual = f", whose median before was {words.number_words(event.usual)}" if event.usual is not None else ""
        limit = words.number_words(event.threshold, 4)
        return f"The {event.quantity} is below {limit}, the limit of what was usual in this run{usual}."
    if failure.kind == "mismatch":
        return "Equal results, within the tolerances of `torch.testing.assert_close`."
    if failure.call is None:
        return "Inputs are free of such values, or are rejected where they enter."
    if failure.is_derivative:
        return "A finite gradient."
    if failure.phase == Phase.OPTIMIZER:
        return "A finite parameter after the step."
    return "A finite result."


def shown_names(reduction: Reduction, names: Mapping[str, str]) -> dict[str, str]:
    """The names of inputs in texts: those of the repro's variables if there are any."""
    return {item.name: "incoming gradient" for item in reduction.program.inputs if item.role == "gradient"} | {**names}


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Text with the inputs in backticks called as the repro calls them."""
    return re.sub("`([^`]+)`", lambda span: f"`{names.get(span[1], span[1])}`", text)


def explained(reduction: Reduction, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """For every input and constant that is left: what the repro calls it, and whether it matters."""
    inputs = [(names.get(item.input or "", item.input or ""), item) for item in reduction.explain]
    parts = [*inputs, *((_constant_name(item), item) for item in reduction.constants)]
    return [(name, "not varied" if item.tried is False else _FREE if item.free else _MATTERS) for name, item in parts]


def what_matters(reduction: Reduction, names: Mapping[str, str]) -> str:
    """Which parts are free, which matter, and the nearest variant that passes, in up to three sentences."""
    words = [(f"the {name}" if " " in name else code_span(name), text) for name, text in explained(reduction, names)]
    free, matters = ([name for name, text in words if text == wanted] for wanted in (_FREE, _MATTERS))
    sentences = [f"Every value of {listed(free)} that was tried fails."] if free else []
    if matters:
        subject, verb = ("value", "matters") if len(matters) == 1 else ("values", "matter")
        sentences.append(f"The {subject} of {listed(matters)} {verb}.")
    nearest = reduction.nearest
    if nearest is not None and (nearest.to, nearest.from_) != (0, 0):  # minus zero for zero tells nothing
        new, old = nearest_words(nearest, names)
        sentences.append(f"With {code_span(new)} in place of {code_span(old)} the failure is gone.")
    return " ".join(sentences)


def nearest_words(nearest: Nearest, names: Mapping[str, str]) -> tuple[str, str]:
    """The nearest variant that passes, and what is there instead: ``x[0, 1] = 88`` and ``100``."""
    element = ", ".join(map(str, nearest.element or ()))
    name = _constant_name(nearest) if nearest.input is None else names.get(nearest.input, nearest.input)
    new, old = (f"{v:.6g}" if isinstance(v, float) else str(v) for v in (nearest.to, nearest.from_))
    return f"{name}{f'[{element}]' if element else ''} = {new}", old


def _constant_name(item: ProgramPart) -> str:
    """``exponent of pow``, ``constant of the division``."""
    name = (item.call or "").rpartition(".")[2]
    if (item.call or "").startswith("torch.optim."):
        return f"{item.argument} of {short_name(item.call or '').partition('.')[0]}"
    operation = _OPERATORS.get(name.strip("_")) if name.startswith("__") else None
    argument = "constant" if item.argument == "other" else item.argument
    return f"{argument} of {f'the {operation}' if operation else name.strip('_')}"


_CUSTOM = "the backward of a custom autograd function"
OUTSIDE = "outside of any module"


def phase_words(failure: Failure) -> str:
    """The phase of the failure. An exception may come long before the model is called, such as from the data."""
    if failure.difference is not None and failure.call is None:
        where = "in the optimizer step" if failure.phase == Phase.OPTIMIZER else "outside of an optimizer"
        return where if failure.site is not None else "the call is not known"
    if failure.is_of_whole_step and failure.event is None:
        return "in the forward pass" if failure.way == "other" else "over the whole step"
    if failure.kind == "exception" and failure.phase == Phase.FORWARD and failure.module is None:
        return OUTSIDE
    is_custom = failure.phase == Phase.BACKWARD and failure.kind in ("nan", "inf") and not failure.is_derivative
    if is_custom and failure.call:
        return f"in {_CUSTOM}"
    return "in the optimizer step" if failure.phase == Phase.OPTIMIZER else f"in the {failure.phase} pass"


def code_span(text: str) -> str:
    """Inline code, with more backticks around it than it holds in a row."""
    ticks = "`" * (longest_run(text) + 1)
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{padding}{' '.join(text.split())}{padding}{ticks}"


def prose(text: str) -> str:
    """A paragraph of Markdown in which only inline code is markup: anything else that could be is shown as it is."""

    def escaped(found: re.Match[str]) -> str:
        entity = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}.get(found[0])
        return found[1] or entity or "".join(f"\\{character}" for character in found[0])

    return _AT_START.sub(r"\1\\\2", _MARKUP.sub(escaped, " ".join(text.split())))


# Inline code begins and ends with as many backticks; tags, links, emphasis and cells begin with one of the rest.
_MARKUP = re.compile(
    r"(?<!`)((`+)(?!`).*?(?<!`)\2(?!`))|`+|[\\<>~|\[\]]|\*(?! )|(?<! )\*|&(?=[#\w])|(?<![^\W_])_|_(?![^\W_])"
)
_AT_START = re.compile(r"^(\d*)([#+.)-]+(?=\s|$))")


def line(failure: Failure) -> str:
    """``file:line`` and its code; of a call inside a library the library's line, and the user's that led there."""
    site = failure.site
    if site is None:
        return ""
    own = f"{code_span(redact_text(site.place))}{code_of(site)}"
    if site.library is None:
        return own
    file, number = site.library
    return f"{code_span(redact_text(f'{file}:{number}'))}, called from {own}"


def origin(snapshot: Snapshot, failure: Failure) -> str:
    """The call that a failure of the step, or the bad value behind it, began with, or what there is in its place."""
    if failure.call is not None:
        node = f" ({failure.backward_node})" if failure.backward_node else ""
        into = f", into {code_span(written(failure))}" if written(failure) else ""
        return f"`{failure.call}`{node}{into}"
    if failure.difference is not None:
        return ""
    if failure.input_name is not None:
        words = ("parameter", "step") if snapshot.is_initial(failure) else ("input", "call reads it")
        return f"the {words[0]} {code_span(failure.input_name)}, bad before the first {words[1]}"
    if failure.exception is None:
        return "unknown" if failure.kind != SILENT else ""
    if failure.site is not None and failure.site.library is not None:
        file, line = failure.site.library
        owner = "torch" if file.startswith("torch/") else "a library"
        return f"{owner}'s own code, {code_span(redact_text(f'{file}:{line}'))}"
    return "not known: no recorded call raises it"


def code_of(site: Site | None) -> str:
    """``: `x = a - b` ``, redacted and shortened, or nothing."""
    code = redact_source(site.code.strip()) if site is not None else ""
    return f": {code_span(_shortened(code, _MAX_CODE))}" if code else ""


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ..."


def longest_run(text: str) -> int:
    """The most backticks in a row."""
    return max(map(len, re.findall("`+", text)), default=0)
