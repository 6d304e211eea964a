"""Text of unknown origin made visible: what would move the cursor, colour the screen, turn the reading direction or end
a comment is shown as its escape."""

from __future__ import annotations

import re
import sys

from reprokit.arrivals import ignored_errors

# Control characters but tab and line feed, separators of lines and paragraphs, and the marks that turn the direction of
# text around (https://trojansource.codes). Surrogates that stand alone cannot be written to any file.
_HIDDEN = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ufeff\\ufff9-\\ufffb\\ud800-\\udfff]"
)
_NOT_IN_A_LINE = re.compile(f"{_HIDDEN.pattern[:-1]}\\t\\n]")
_NOT_IN_A_NAME = re.compile(f"{_HIDDEN.pattern[:-1]}\\t\\n`]")


def print_line(text: str) -> None:
    """Print one line of the tool on stderr; the script that runs may have closed it or set it to ``None``."""
    if sys.stderr is not None:
        with ignored_errors():
            print(f"reprokit: {visible(text)}", file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """The text with escapes such as ``\\x1b`` for characters that hide or do something; line ends and tabs stay."""
    return _HIDDEN.sub(_escape, text)


def visible_line(text: str) -> str:
    """The same in one line."""
    return _NOT_IN_A_LINE.sub(_escape, text)


def visible_name(text: str) -> str:
    """The same without what would end inline code in Markdown."""
    return _NOT_IN_A_NAME.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    text = ascii(found[0])[1:-1]
    return text if text != found[0] else f"\\x{ord(text):02x}"
