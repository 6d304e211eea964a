"""The path of a bad value: the calls that lead from the inputs of the step to the origin of the failure.

Going back from the origin, every call is left through the operand that is furthest from ordinary numbers. Of a bad
gradient there are two ways: that of the values up to the origin, and that of the gradient from the loss back to it.
A terminal shows the last of these calls (`steps`) and the lines around the origin (`source_lines`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from reprokit.locate.failure import EXCEPTION, label_of
from reprokit.locate.ranges import Range, range_text
from reprokit.program.ir import Call
from reprokit.render.call_code import call_text, labels
from reprokit.render.survey import Survey, survey, written_by
from reprokit.snapshot.format import Snapshot

MAX_BEFORE = 16
WORTH_LEAVING = 2  # so few take hardly more room than the line that says they are missing
MAX_CALL = 160


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop of a way: a call or an input, with the range of what it gave; ``None`` where the run did not get."""

    text: str
    range: Range | None
    module: str = ""
    place: str = ""
    code: str = ""
    is_origin: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """Stops in the order in which they happened; ``num_left_out`` are missing after the first one."""

    title: str
    about: str
    stops: tuple[Stop, ...]
    num_left_out: int = 0


def ways(found: Survey, names: Mapping[int, str]) -> list[Way]:
    """The ways to draw, most telling first; ``names`` is what values are called."""
    made = [_of_optimizer(found, names), _of_gradient(found, names), _of_values(found, names)]
    return [way for way in made if way is not None and any(stop.range is not None for stop in way.stops)]


def _of_values(found: Survey, names: Mapping[int, str]) -> Way | None:
    failure = found.failure
    readers = found.readers.get(failure.value, ()) if failure.value is not None else ()
    origin = failure.call_index if failure.call_index is not None else next(iter(readers), None)
    if origin is None or found.program.calls[origin].is_optimizer_step:
        return None
    start, path = _path_to(found, origin)
    is_input_bad = failure.call_index is None
    first = [Stop(names[start], found.inputs.get(start), is_origin=is_input_bad)] if start is not None else []
    stops = [_stop(found, index, names, is_origin=index == failure.call_index) for index in path]
    kept, left_out = _shortened([*first, *stops])
    about = "From the inputs of the step to the origin, going back from each call by its least ordinary operand."
    return Way("The values", about, tuple(kept), left_out)


def _of_gradient(found: Survey, names: Mapping[int, str]) -> Way | None:
    failure = found.failure
    if not failure.is_derivative or failure.call_index is None or failure.kind == EXCEPTION:
        return None
    path = _path_of_gradient(found, failure.call_index)
    stops = [
        _placed(Stop(f"gradient of {names[value]}", found.gradients[value]), found.program.calls[index])
        for index, value in reversed(path)
    ]
    if failure.value is not None:
        last = _stop(found, failure.call_index, names, is_origin=True)
        node = f"{failure.backward_node}: " if failure.backward_node else ""
        text = f"{node}gradient of {names.get(failure.value, 'its input')}"
        stops.append(replace(last, text=text, range=found.gradients.get(failure.value)))
    kept, left_out = _shortened(stops)
    about = "From the loss back to the call whose derivative is the origin."
    return Way("The gradient", about, tuple(kept), left_out)


def _of_optimizer(found: Survey, names: Mapping[int, str]) -> Way | None:
    failure = found.failure
    if not found.optimizer or failure.call_index is None or failure.value is None:
        return None
    name = names.get(failure.value, "parameter")
    words = {"parameter": f"{name} before the step", "gradient": f"gradient of {name}"}
    stops = [Stop(words.get(part, f"{part} of {name}"), known) for part, known in found.optimizer.items()]
    after = _stop(found, failure.call_index, names, is_origin=True)
    after = replace(after, text=f"{name} after the step", range=found.written.get((failure.call_index, failure.value)))
    about = "What the step was given for this parameter, and what it made of it."
    return Way("The optimizer step", about, (*stops, after))


def _path_to(found: Survey, origin: int) -> tuple[int | None, list[int]]:
    """The input that the way starts from, ``None`` without any, and the calls on it, the origin last."""
    if found.failure.call_index is None:
        return found.failure.value, [origin]
    path = [origin]
    while True:
        index = path[0]
        operands = [(value, found.range_of(value, index)) for value in found.program.calls[index].input_refs()]
        known = [(value, seen) for value, seen in operands if seen is not None]
        if not known:
            return None, path
        bad = [pair for pair in known if pair[1].is_bad]
        computed = [pair for pair in known if _is_computed(found, pair[0], index)]
        value, _ = max(bad or computed or known, key=lambda pair: _oddness(pair[1]))
        before = found.writer(value, index)
        if before is None:
            return value, path
        path.insert(0, before)


def _is_computed(found: Survey, value: int, before: int) -> bool:
    """True if a value was made from others, and not out of nothing, such as by ``torch.zeros``."""
    index = found.writer(value, before)
    return index is not None and bool(found.program.calls[index].input_refs())


def _oddness(found: Range) -> tuple[bool, bool, float]:
    """The distance of a range from ordinary numbers: not finite, of floats, and decades from 1.

    The smallest of many ordinary numbers is small: one of a thousand is three decades below the others, and more.
    """
    high = [abs(math.log10(found.high))] if found.high else []
    usual = 1 + math.log10(max(1, math.prod(found.shape)))
    least = [abs(math.log10(found.least)) - usual] if found.least else []
    zero = [100.0] if found.high == 0 else []
    return found.is_bad, found.is_float, max([*high, *least, *zero], default=0.0)


def _path_of_gradient(found: Survey, origin: int) -> list[tuple[int, int]]:
    path: list[tuple[int, int]] = []
    index: int | None = origin
    while index is not None:
        given = [value for value in found.program.calls[index].output_refs() if value in found.gradients]
        if not given:
            break
        value = max(given, key=lambda value: _oddness(found.gradients[value]))
        path.append((index, value))
        index = _next_reader(found, value, index)
    return path


def _next_reader(found: Survey, value: int, after: int) -> int | None:
    """The call that reads a value and has the least ordinary gradient."""
    readers = []
    for index in found.readers.get(value, ()):
        outputs = found.program.calls[index].output_refs()
        given = [_oddness(found.gradients[output]) for output in outputs if output in found.gradients]
        if index > after and value not in outputs and given:
            readers.append((index, max(given)))
    return max(readers, key=lambda pair: pair[1])[0] if readers else None


def _shortened(stops: list[Stop]) -> tuple[list[Stop], int]:
    """The first stop and those nearest to the origin, which is the last, and how many are left out between them."""
    if len(stops) <= MAX_BEFORE + WORTH_LEAVING:
        return stops, 0
    left_out = len(stops) - MAX_BEFORE
    return [stops[0], *stops[1 + left_out :]], left_out


def _stop(found: Survey, index: int, names: Mapping[int, str], *, is_origin: bool = False) -> Stop:
    call = found.program.calls[index]
    made = [seen for value in written_by(call, found.failure) if (seen := found.written.get((index, value)))]
    worst = max(made, key=_oddness, default=None)
    text = call_text(call, names)
    if len(text) > MAX_CALL:  # such as a call with hundreds of operands
        text = f"{text[: MAX_CALL * 3 // 4]} … {text[-MAX_CALL // 4 :]}"
    return _placed(Stop(text, worst, is_origin=is_origin), call)


def _placed(stop: Stop, call: Call) -> Stop:
    site = call.site
    place = site.place if site is not None else ""
    return replace(stop, module=label_of(call) or "", place=place, code=site.code.strip() if site is not None else "")


LINES_AROUND = 3
CALLS_BEFORE = 4


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's source that the snapshot holds."""

    number: int
    code: str
    is_origin: bool


@dataclass(frozen=True, slots=True)
class ShownCall:
    """A call with the range of what it returned, or an operand of the origin with its range."""

    text: str
    range: str
    is_origin: bool = False


def source_lines(snapshot: Snapshot) -> list[SourceLine]:
    """The origin's line among its neighbours, as far as calls of the same function tell them."""
    site = snapshot.failure.site
    if site is None:
        return []
    noted = {
        note.line + offset: code
        for note in snapshot.program.modules.values()
        if note.file == site.file
        for offset, code in enumerate(note.source.splitlines())
    }
    sites = (call.site for call in snapshot.program.calls if call.site is not None)
    called = {one.line: one.code for one in sites if (one.file, one.function) == (site.file, site.function)}
    known = {**noted, **called, site.line: site.code}
    near = range(site.line - LINES_AROUND, site.line + LINES_AROUND + 1)
    return [SourceLine(number, known[number], number == site.line) for number in near if known.get(number, "").strip()]


def steps(snapshot: Snapshot) -> list[ShownCall]:
    """The operands of the origin, the calls before it, and the origin itself, measured in one run of the program.

    Empty where there is no origin, or where the program cannot be run up to it here.
    """
    program, failure = snapshot.program, snapshot.failure
    if failure.call_index is None:
        return []
    shown = range(max(0, failure.call_index - CALLS_BEFORE), failure.call_index + 1)
    found, names = survey(snapshot, shown=shown), labels(program)
    if found.optimizer:
        return [ShownCall(stop.text, range_text(stop.range), stop.is_origin) for stop in ways(found, names)[0].stops]
    if not found.operands:
        return []
    written = {index: written_by(program.calls[index], failure) for index in shown}
    inside = {value for values in written.values() for value in values}
    rows = [ShownCall(names[value], range_text(seen)) for value, seen in found.operands.items() if value not in inside]
    for index, values in written.items():
        ranges = "; ".join(range_text(found.written.get((index, value))) for value in values)
        rows.append(ShownCall(call_text(program.calls[index], names), ranges, index == failure.call_index))
    if failure.is_derivative and failure.value in found.gradients:
        gradient = range_text(found.gradients[failure.value])
        rows.append(ShownCall(f"gradient of {names[failure.value]}", gradient, is_origin=True))
    return rows
