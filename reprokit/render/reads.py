"""Who reads what in a program: how often and last, and which call a result may be written into."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from reprokit.program.functions import all_written, hidden_writes
from reprokit.program.ir import BACKWARD, OPAQUE, ZERO_GRAD, Call, Program, Ref, iter_refs
from reprokit.render import calls


class Reads:
    """The readers of a program's values; those in ``keep`` are also read from outside, at the end.

    ``uses`` says how often each value is read, repeats within a call included.
    """

    def __init__(self, program: Program, keep: frozenset[int]) -> None:
        self._calls = program.calls
        self._keep = keep
        self._last = _last_uses(program)
        self.uses = Counter(ref.value for call in program.calls for ref in iter_refs((call.args, call.kwargs)))

    def is_unused(self, value: int) -> bool:
        """True if nobody asks for a value."""
        return not self.uses[value] and value not in self._keep

    def is_done(self, value: int, index: int) -> bool:
        """True if nobody asks for a value after call number ``index``."""
        return value not in self._keep and self._last.get(value, -1) <= index

    def only_reader(self, value: int, index: int) -> Call | None:
        """The one call that the expression of call number ``index`` can stand in: the next one, or a later one on the
        same line if all between go into it."""
        if value in self._keep or self.uses[value] != 1:
            return None
        made = self._calls[index]
        for call in self._calls[index + 1 :]:
            if value in call.input_refs():
                return call if _may_hold(call, value) else None
            is_whole_value = isinstance(call.outputs, Ref) and self.uses[call.outputs.value] == 1
            if not (is_one_line(made, call) and is_whole_value and _is_pure(made) and _is_pure(call)):
                return None
        return None


def _may_hold(reader: Call, value: int) -> bool:
    """True if the expression of a value can stand in the call that reads it."""
    if reader.is_differentiation:
        owner = calls.as_method(reader)
        return owner.target == BACKWARD and owner.args[0] == Ref(value)
    if reader.target in (OPAQUE, ZERO_GRAD) or reader.is_optimizer_step or reader.mode.rng is not None:
        return False
    written = iter_refs(all_written(reader.target, reader.args, reader.kwargs))
    return Ref(value) not in written and value not in reader.output_refs()


def _is_pure(call: Call) -> bool:
    """True if it makes no difference when the call runs."""
    is_special = call.target in (OPAQUE, ZERO_GRAD) or call.is_differentiation or call.is_optimizer_step
    if is_special or call.mode.rng is not None:
        return False
    written = chain.from_iterable(find(call.target, call.args, call.kwargs) for find in (all_written, hidden_writes))
    return next(iter_refs(list(written)), None) is None


def is_one_line(one: Call, other: Call) -> bool:
    """True if the user wrote both calls on one line of one function."""
    if one.site is None or other.site is None:
        return False
    lines = [(site.file, site.line, site.function) for site in (one.site, other.site)]
    return lines[0] == lines[1] and one.scope == other.scope


def _last_uses(program: Program) -> dict[int, int]:
    """The number of the last call that reads or returns each value; what the program returns is used at its end."""
    last: dict[int, int] = {}
    for index, call in enumerate(program.calls):
        last.update(dict.fromkeys((*call.input_refs(), *call.output_refs()), index))
    last.update({ref.value: len(program.calls) for ref in program.outputs})
    return last


def only_optimized(program: Program) -> frozenset[int]:
    """Values that optimizers step and that nothing differentiates: written as parameters."""
    stepped = {
        ref.value for call in program.calls if call.is_optimizer_step for ref in iter_refs(call.kwargs["params"])
    }
    others = [call for call in program.calls if not call.is_optimizer_step]
    return frozenset(stepped - {value for call in others for value in call.input_refs()})
