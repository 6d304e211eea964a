"""Parts of the sentences about a failure: its call, line and message, what matters in its repro; and Markdown.

What is said depends on the kind of the failure, and stands in `render/kinds.py`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from reprokit import words
from reprokit.grammar import plain_of, values_of
from reprokit.locate.failure import Failure
from reprokit.snapshot.redact import redact_source, redact_text
from reprokit.words import listed

if TYPE_CHECKING:
    from reprokit.program.ir import Site
    from reprokit.shrink.explain import Nearest, ProgramPart, VariedPart
    from reprokit.shrink.reduction import Reduction
    from reprokit.snapshot.format import Snapshot

_MAX_CODE = 160
_MAX_MESSAGE = 600  # both shapes of a recomputation are in the third line of its message
_FREE = "fails with every value that was tried"
_MATTERS = "its value matters"
_OPERATORS = {
    "add": "addition", "sub": "subtraction", "rsub": "subtraction", "mul": "multiplication", "div": "division",
    "truediv": "division", "rtruediv": "division", "floordiv": "floor division", "matmul": "matmul",
    "rpow": "pow", "neg": "negation", "getitem": "indexing", "setitem": "index assignment",
}  # fmt: skip


def event_words(failure: Failure) -> str:
    """``the loss was 1.2e+09, 1e+08 times its median of 12.3; rows 0-7 of `y` ``, or nothing."""
    if failure.silence or failure.event is None:
        return failure.silence
    return words.event_words(values_of(failure.event))


def difference_words(failure: Failure) -> str:
    """``rank 1 differs from rank 0 in `0.weight`, by up to 0.01, since step 13``, or nothing."""
    return words.difference_words(plain_of(failure.difference)) if failure.difference is not None else ""


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


def written(failure: Failure) -> str:
    """The input that the origin wrote the bad value into, by the last part of its name; empty for a result."""
    if failure.call is None or failure.input_name is None or not failure.in_forward:
        return ""
    return failure.input_name.rpartition(".")[2]


def message(failure: Failure) -> str:
    """The exception's message as inline code, redacted, as far as its lines fit; nothing where there is none.

    Without a full stop, which the sentence around it has.
    """
    if failure.exception is None:
        return ""
    lines = list(filter(None, map(str.strip, failure.exception[1].splitlines())))
    if not lines:
        return ""
    lengths = itertools.accumulate(len(line) + 1 for line in lines)
    fitting = [line for line, length in zip(lines, lengths, strict=True) if length <= _MAX_MESSAGE + 1]
    text = _shortened(redact_text(" ".join(fitting or lines[:1])), _MAX_MESSAGE)
    # The full stop of a sentence goes, an ellipsis stays.
    return code_span(text if text.endswith("..") else text.removesuffix("."))


def shown_names(reduction: Reduction, names: Mapping[str, str]) -> dict[str, str]:
    """The names of inputs in texts: those of the repro's variables if there are any."""
    return {item.name: "incoming gradient" for item in reduction.program.inputs if item.role == "gradient"} | {**names}


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Text with the inputs in backticks called as the repro calls them."""
    return re.sub("`([^`]+)`", lambda span: f"`{names.get(span[1], span[1])}`", text)


def explained(reduction: Reduction, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """For every input and constant that is left: what the repro calls it, and whether it matters."""
    inputs = [(names.get(item.input or "", item.input or ""), item) for item in reduction.explain]
    constants = [(_constant_name(item), item) for item in reduction.constants]
    return [(name, _role_of(item)) for name, item in (*inputs, *constants)]


def _role_of(item: VariedPart) -> str:
    if item.tried is False:
        return "not varied"
    return _FREE if item.free else _MATTERS


def what_matters(reduction: Reduction, names: Mapping[str, str]) -> str:
    """Which parts are free, which matter, and the nearest variant that passes, in up to three sentences."""
    by_role: dict[str, list[str]] = {}
    for name, role in explained(reduction, names):
        by_role.setdefault(role, []).append(f"the {name}" if " " in name else code_span(name))
    free, matters = by_role.get(_FREE), by_role.get(_MATTERS)
    sentences = []
    if free:
        sentences.append(f"Every value of {listed(free)} that was tried fails.")
    if matters:
        subject, verb = ("value", "matters") if len(matters) == 1 else ("values", "matter")
        sentences.append(f"The {subject} of {listed(matters)} {verb}.")
    nearest = reduction.nearest
    # Minus zero for zero tells nothing.
    if nearest is not None and (nearest.to, nearest.from_) != (0, 0):
        new, old = nearest_words(nearest, names)
        sentences.append(f"With {code_span(new)} in place of {code_span(old)} the failure is gone.")
    return " ".join(sentences)


def nearest_words(nearest: Nearest, names: Mapping[str, str]) -> tuple[str, str]:
    """The nearest variant that passes, and what is there instead: ``x[0, 1] = 88`` and ``100``."""
    name = _constant_name(nearest) if nearest.input is None else names.get(nearest.input, nearest.input)
    if nearest.element:
        name = f"{name}[{', '.join(map(str, nearest.element))}]"
    new, old = (f"{v:.6g}" if isinstance(v, float) else str(v) for v in (nearest.to, nearest.from_))
    return f"{name} = {new}", old


def _constant_name(item: ProgramPart) -> str:
    """``exponent of pow``, ``constant of the division``."""
    call = item.call or ""
    if call.startswith("torch.optim."):
        return f"{item.argument} of {short_name(call).partition('.')[0]}"
    name = call.rpartition(".")[2]
    operation = _OPERATORS.get(name.strip("_")) if name.startswith("__") else None
    argument = "constant" if item.argument == "other" else item.argument
    owner = f"the {operation}" if operation else name.strip("_")
    return f"{argument} of {owner}"


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
        name = code_span(failure.input_name)
        if snapshot.is_initial(failure):
            return f"the parameter {name}, bad before the first step"
        return f"the input {name}, bad before the first call reads it"
    if failure.exception is None:
        return "" if failure.silence else "unknown"
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
