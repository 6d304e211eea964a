"""A captured failure in words: what the last lines of a capture and ``reprokit show`` both say. Needs no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reprokit.series import StepNumbers, by_optimizer, titled
from reprokit.words import in_root

_STEPS = 6
_NUMBERS = (("loss", "loss"), ("gradient norm", "grad_norm"), ("learning rate", "lr"), ("scale", "scale"))
_FAST = 2.0  # how many times larger the last number is before it is worth a word


def what(result: Mapping[str, Any]) -> str:
    """The failure: ``nan from `torch.sqrt` ``, without the space at the end."""
    failure = result["failure"]
    name: str = failure["exception"]["type"] if failure["exception"] else failure["kind"]
    if failure["call"] is not None:
        return f"{name} from `{failure['call']}`"
    if failure["exception"]:
        site = failure["site"]
        return name + (f" raised at {site['file']}:{site['line']}" if site else "")
    return f"{name} that was already in `{failure['input']}`" if failure["input"] else f"{name} of unknown origin"


def cause_line(result: Mapping[str, Any]) -> str | None:
    """The origin of the bad value behind an exception: ``because of nan from `torch.sqrt`, train.py:12: ...``."""
    cause = result["failure"].get("cause")
    if not cause:
        return None
    origin = f"from `{cause['call']}`" if cause["call"] is not None else f"in {input_words(cause)}"
    return f"because of {cause['kind']} {', '.join(filter(None, (origin, place_line({'failure': cause}))))}"


def input_words(origin: Mapping[str, Any]) -> str:
    """An input that is nan or inf: ``the parameter `weight`, bad before the first step``, or its name alone."""
    name = f"`{origin['input']}`"
    return f"the parameter {name}, bad before the first step" if origin.get("is_initial") else name


def place_line(result: Mapping[str, Any]) -> str | None:
    """Module, line and code of the origin: ``in layers.1, train.py:31: p = F.softmax(s, -1)``."""
    failure = result["failure"]
    site = failure["site"]
    module = in_root(failure["module"], failure.get("root"))
    words = [f"in {module}"] if module else []
    if site is not None:
        code = site["code"].strip()
        words.append(f"{site['file']}:{site['line']}" + (f": {code}" if code else ""))
    return ", ".join(words) or None


def growth(timeline: Sequence[StepNumbers]) -> Iterator[tuple[str, str]]:
    """The numbers of the last training steps, by name; numbers that never changed are left out.

    Every name of an optimizer has the same steps, with a dash where there was no number.
    """
    for (name, key), (optimizer, rows) in itertools.product(_NUMBERS, by_optimizer(timeline).items()):
        values = [value for row in rows if (value := getattr(row, key)) is not None]
        if len(values) > 1 and (key == "loss" or len(set(values)) > 1):
            shown = (getattr(row, key) for row in rows[-_STEPS:])
            yield (
                titled(name, optimizer),
                "  ".join("-" if value is None else f"{value:.4g}" for value in shown) + _trend(values),
            )


def _trend(values: Sequence[float]) -> str:
    """How much the last finite number is above the typical one; empty for numbers below zero, or with few of them."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 3 or min(finite) < 0:
        return ""
    typical = sorted(finite[:-1])[len(finite[:-1]) // 2]
    if typical == 0 or finite[-1] < _FAST * typical:
        return ""
    return f"  (the last finite one is {finite[-1] / typical:.3g} times the median)"
