"""Sentences and numbers with their nouns that terminal, issue and report share, and text of unknown origin made
visible: what would move the cursor, colour the screen, turn the reading direction or end a comment is shown as its
escape."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from reprokit.errors import ignored_errors

# Control characters but tab and line feed, separators of lines and paragraphs, and the marks that turn the direction of
# text around (https://trojansource.codes). Surrogates that stand alone cannot be written to any file.
_HIDDEN = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ufeff\\ufff9-\\ufffb\\ud800-\\udfff]"
)
_NOT_IN_A_LINE = re.compile(f"{_HIDDEN.pattern[:-1]}\\t\\n]")
_NOT_IN_A_NAME = re.compile(f"{_HIDDEN.pattern[:-1]}\\t\\n`]")


def retry_words(command: Sequence[str] = (), mark: str = "") -> str:
    """What to run after an edit of the script that ``command`` runs, between two marks."""
    script = shlex.join(command) or "SCRIPT [ARGS]"
    return f"if the bug is in your own code, edit that and run: {mark}reprokit retry FILE {script}{mark}"


_kept: list[tuple[int, os.stat_result]] = []  # a descriptor of where stderr led before the script began, and its file


def keep_stderr() -> None:
    """Print from now on where stderr leads now, wherever the script leads its own.

    A script that collects its stderr, such as a test with pytest's `capsys`, then reads its own lines only.
    """
    if not _kept and sys.stderr is not None:
        with ignored_errors():  # it is closed
            descriptor = os.dup(2)
            _kept.append((descriptor, os.fstat(descriptor)))


def print_line(text: str) -> None:
    """Print one line of the tool on stderr."""
    print_own(f"reprokit: {visible(text)}\n")


def print_own(text: str) -> None:
    """Print a text of the tool on stderr; the script that runs may have closed its own or set it to ``None``."""
    with ignored_errors():
        descriptor = _kept_descriptor()
        if descriptor is not None:
            left = text.encode(errors="backslashreplace")
            while left:
                left = left[os.write(descriptor, left) :]
        elif sys.stderr is not None:
            print(text, end="", file=sys.stderr, flush=True)


def _kept_descriptor() -> int | None:
    """The descriptor of `keep_stderr`, if it still leads there.

    A script may close every descriptor that it does not know (`os.closerange`), and a file of its own then gets the
    number.
    """
    for descriptor, before in _kept:
        with ignored_errors():  # it is closed
            now = os.fstat(descriptor)
            if os.path.samestat(now, before) and now.st_mode == before.st_mode and now.st_rdev == before.st_rdev:
                return descriptor
    return None


def _let_go() -> None:
    """In a forked process, which may live on as a daemon: whoever reads this one's stderr would wait for its end."""
    with ignored_errors():
        descriptor = _kept_descriptor()
        if descriptor is not None:
            os.close(descriptor)
    _kept.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


# A sentence may quote the user's code. The quotation stands between marks, with the words that take its place where no
# source may be shown. Marks survive every way to put texts together, and stand in files. What is read of a file is a
# `Quoting`; whoever prints a text removes what is left (`visible`).
_QUOTE, _INSTEAD, _UNQUOTE = "\u2061", "\u2062", "\u2064"
_QUOTATION = re.compile(f"{_QUOTE}([^{_INSTEAD}{_UNQUOTE}]*){_INSTEAD}?([^{_UNQUOTE}]*){_UNQUOTE}?")
_MARKS = re.compile(f"[{_QUOTE}{_INSTEAD}{_UNQUOTE}]")
_DOTTED_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")


def quoted(code: str, instead: str = "") -> str:
    """A piece of the user's code as a part of a sentence, and the words ``instead`` of it where none may be shown."""
    return f"{_QUOTE}{_MARKS.sub('', code)}{_INSTEAD}{_MARKS.sub('', instead)}{_UNQUOTE}"


def quoted_unless_name(code: str, instead: str) -> str:
    """The same; a name such as ``self.weight`` stays, as names of variables are in every file."""
    return code if _DOTTED_NAME.fullmatch(code) else quoted(code, instead)


def with_code(text: str) -> str:
    """A sentence with the code that it quotes, and without the marks around it."""
    return _MARKS.sub("", _QUOTATION.sub(r"\1", text)) if _MARKS.search(text) else text


class Quoting(str):
    """A sentence of a file as people read it; ``marked`` is the same with the marks around the code that it quotes."""

    __slots__ = ("marked",)
    marked: str

    def __new__(cls, marked: str) -> Quoting:
        made = super().__new__(cls, with_code(marked))
        made.marked = marked
        return made

    def __getnewargs__(self) -> tuple[str]:
        return (self.marked,)


def unmarked(text: str) -> str:
    """A sentence with marks as it is kept in memory: without them, and knowing where they were."""
    return Quoting(text) if _MARKS.search(text) else text


def marked(text: str) -> str:
    """A sentence as a file has it."""
    return text.marked if isinstance(text, Quoting) else text


def told(value: Any) -> Any:
    """Plain nested data without the marks: for people and programs, not for files."""
    if isinstance(value, str):
        return with_code(value)
    if isinstance(value, Mapping):
        return {key: told(item) for key, item in value.items()}
    return type(value)(map(told, value)) if type(value) in (list, tuple) else value


def without_code(text: str) -> str:
    """A sentence without the code that it quotes. A quotation without an end reaches to the end of the text."""
    return _MARKS.sub("", _QUOTATION.sub(r"\2", text)) if _MARKS.search(text) else text


def change_quotations(text: str, change: Callable[[str], str], change_code: Callable[[str], str]) -> str:
    """A sentence with its own words changed by one function, and the code that it quotes by another."""
    pieces, end = [], 0
    for found in _QUOTATION.finditer(text):
        pieces += [change(text[end : found.start()]), quoted(change_code(found[1]), change(found[2]))]
        end = found.end()
    return "".join((*pieces, change(text[end:])))


def visible(text: str) -> str:
    """The text with escapes such as ``\\x1b`` for characters that hide or do something; line ends and tabs stay."""
    return _HIDDEN.sub(_escape, with_code(text))


def visible_line(text: str) -> str:
    """The same in one line."""
    return _NOT_IN_A_LINE.sub(_escape, with_code(text))


def visible_name(text: str) -> str:
    """The same without what would end inline code in Markdown."""
    return _NOT_IN_A_NAME.sub(_escape, with_code(text))


def escaped(text: str) -> str:
    """As `visible`, with the marks around quoted code left where they are: for files."""
    return _HIDDEN.sub(_escape, text)


def escaped_line(text: str) -> str:
    """As `visible_line`, with the marks."""
    return _NOT_IN_A_LINE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    text = ascii(found[0])[1:-1]
    return text if text != found[0] else f"\\x{ord(text):02x}"


_GRADIENTS = re.compile(r"(?:^|_)grad(?:ient)?s?(?:_|$)")


def json_line(value: Any, *, is_ascii: bool = True) -> str:
    """Plain data as one line of JSON; numbers that JSON does not have are texts: ``nan``, ``inf``, ``-inf``. Texts are
    printed, so without the marks around code."""
    return json.dumps(_for_json(value), allow_nan=False, ensure_ascii=is_ascii)


def _for_json(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {name: _for_json(item) for name, item in value.items()}
    return [_for_json(item) for item in value] if isinstance(value, (list, tuple)) else told(value)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """``1 call``, ``2,232 calls``; ``plural`` is for nouns that take more than an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or f'{noun}s'}"


def sentence(words: str | None) -> str:
    """With a capital letter and a full stop; empty for ``None``."""
    return f"{words[0].upper()}{words[1:]}." if words else ""


def listed(words: Sequence[str]) -> str:
    """Words with commas and an ``and``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _stretches(numbers: Sequence[int], most: int | None = None) -> list[str]:
    """Numbers one after the other, those in a row as ``0-3``; behind so many stretches the count of the others."""
    groups = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    found = [[number for _, number in group] for _, group in groups]
    words = [f"{one[0]}-{one[-1]}" if len(one) > 1 else f"{one[0]}" for one in found[:most]]
    others = sum(map(len, found[len(words) :]))
    return [*words, f"{others:,} more"] if others else words


def row_words(rows: Sequence[int]) -> str:
    """``rows 0-3, 6``; empty for none."""
    return f"row{'s' if len(rows) > 1 else ''} {', '.join(_stretches(rows))}" if rows else ""


_ROWS = re.compile(r"rows? \d+(?:-\d+)?(?:, \d+(?:-\d+)?)*", re.ASCII)


def rows_in(words: str) -> list[int]:
    """The numbers in ``rows 0-3, 6``."""
    return list(itertools.chain.from_iterable(row_ranges(words)))


def row_ranges(words: str) -> list[range]:
    """The stretches in ``rows 0-3, 6``; raises `ValueError` for other words, and for rows that do not rise."""
    if not _ROWS.fullmatch(words):
        raise ValueError("they are no rows, such as `rows 0-3, 6`")
    found: list[range] = []
    for stretch in words.partition(" ")[2].split(", "):
        first, _, last = stretch.partition("-")
        found.append(range(int(first), int(last or first) + 1))
        if not found[-1] or (len(found) > 1 and found[-1][0] <= found[-2][-1]):
            raise ValueError(f"`{words:.60}` do not rise")
    return found


def sample_words(indices: Sequence[int]) -> str:
    """``samples 1207, 88 and 4012``."""
    return f"sample{'s' if len(indices) != 1 else ''} {listed(_stretches(indices, most=8))}"


def replay_words(fidelity: str, note: str | None) -> str:
    """How the replay differs from training, and why; a sentence without a full stop, empty for an exact replay."""
    why = f": {note}" if note else ""
    if fidelity == "exact":
        return ""
    if fidelity == "close":
        return f"the replay is close to training, not the same bit for bit{why}"
    return f"the replay differs from training, so it may not show the same failure{why}"


def in_root(module: str | None, root: str | None) -> str | None:
    """A module as people read it: ``D.2`` where its root has a name, and ``D`` for that root itself."""
    if module is None or not root:
        return module
    return root if module.startswith("<") else f"{root}.{module}"


def user_path(path: str) -> str:
    """The path of a module, parameter or buffer without the wrapper that `torch.compile` puts around a module."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod") if "_orig_mod" in path else path


def item_name(owner: str, key: str) -> str:
    """The name of a dict's item: its key, with ``_grad`` in a dict of gradients, whose keys are those of parameters."""
    return f"{key}_grad" if _GRADIENTS.search(owner) else key


def number_words(value: float, digits: int = 3) -> str:
    """A number with so many digits, without an exponent below a million: ``2990``, ``1.38e+08``."""
    shown = f"{value:.{digits}g}"
    return f"{float(shown):.0f}" if "e+" in shown and abs(value) < 1e6 else shown


def value_words(value: float) -> str:
    """A value of data: a whole number, which may be a code such as -999999, with all its digits."""
    return f"{value:.0f}" if abs(value) < 1e9 and value == int(value) else number_words(value)


_VERDICTS = {
    "same": "with the same failure",
    "other": "with another failure",
    "passes": "without a failure",
    "invalid": "with an error of their own",
}


def verdict_words(counts: Mapping[str, int]) -> str:
    """The verdicts of checks: ``3 with the same failure, 2 without a failure``."""
    return ", ".join(f"{count:,} {_VERDICTS.get(name, name)}" for name, count in counts.items() if count)


def times_words(value: float, usual: float) -> str:
    """``, 1e+08 times its median of 12.3``."""
    ratio = value / usual if usual > 0 else math.inf
    if not 0 < ratio < math.inf:
        return f", its median {number_words(usual)}"
    return f", {number_words(ratio)} times its median of {number_words(usual)}"


def event_words(event: Mapping[str, Any]) -> str:
    """An event as plain data in a few words: ``the loss was 1.2e9, 1e+08 times its median of 12; rows 0-7 of `y` ``."""
    quantity, value, usual, rows = event["quantity"], event["value"], event.get("usual"), event.get("rows")
    named = f"`{event['source']}`" if event.get("source") else ""
    if quantity == "share of zeros":
        return f"the gradient of {named or 'a parameter'} is missing or zero from step {event['began_at']} on"
    words = f"the {quantity} was {number_words(value)}{times_words(value, usual) if usual is not None else ''}"
    samples = f" ({event['samples']})" if event.get("samples") else ""
    if rows:
        words += f"; {rows}{samples} of {named or 'the batch'}"
    elif samples:
        words += f"; {event['samples']} of the data set"
    elif named:
        words += f"; the first input that differs from step {event['reference_step']} is {named}"
    return f"{words}; {data}" if (data := data_words(event)) else words


def data_words(event: Mapping[str, Any]) -> str:
    """How the data of an event differs from that of a healthy step, in numbers; empty where it does not."""
    if event.get("largest") is None:
        return ""
    argument, _, call = str(event.get("argument") or "").partition(" of ")
    what = f"the {argument} of `{call}`" if call else f"`{argument or event['source']}`"
    usual = f"in step {event['reference_step']} up to {value_words(event['largest_usual'])}"
    return f"{what} is up to {value_words(event['largest'])} in magnitude, {usual}"


def difference_words(difference: Mapping[str, Any]) -> str:
    """A difference between ranks as plain data: ``rank 1 differs from rank 0 in `0.weight`, by up to 0.01, since step
    13: ...``."""
    ranks, equal_after, num_alike = difference["ranks"], difference["equal_after"], difference["num_alike"]
    subject = f"rank {ranks[0]} differs" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} differ"
    others = f" and {counted(num_alike - 1, 'other')}" if num_alike > 1 else ""
    num_more = difference["num_parameters"] - 1
    more = f" and {counted(num_more, 'more parameter')}" if num_more else ""
    size = f", by up to {difference['largest']:.3g}" if difference["largest"] is not None else ""
    before = f"one of the steps {equal_after + 1} to " if equal_after is not None else "some step up to "
    since = f"{'step ' if difference['is_exact'] else before}{difference['began_at']}"
    why = f": {difference['cause']}" if difference["cause"] else ""
    place = f"from rank {difference['reference']}{others} in `{difference['parameter']}`"
    return f"{subject} {place}{more}{size}, since {since}{why}"
