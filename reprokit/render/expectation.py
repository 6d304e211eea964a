"""The expected result instead of a failure, the owner of the code, and the template for an issue about it.

A NaN that a function is defined to return is no defect of the function: then the text says so, names the step that made
the operand, and does not send the reader upstream.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from reprokit.locate.failure import Failure, label_of
from reprokit.locate.spelling import VIEWS, constant_ways, short_name
from reprokit.program.dataflow import written_in_place
from reprokit.program.functions import GRAD_READ, display_name
from reprokit.program.ir import Call, Program
from reprokit.render import wording
from reprokit.render.kinds import words_of
from reprokit.render.wording import code_span
from reprokit.rules.diagnosis import Diagnosis
from reprokit.rules.rule import Rule
from reprokit.rules.table import RULES
from reprokit.shrink.checks.recorded import is_out_of_memory
from reprokit.shrink.reduction import Reduction
from reprokit.snapshot.format import Snapshot
from reprokit.snapshot.redact import redact_text
from reprokit.words import listed, retry_words

OWN, TORCH = "own", "torch"
_TEMPLATES = {"transformers": "transformers", "lightning": "lightning", "pytorch_lightning": "lightning"}
_TEMPLATES |= {"lightning_fabric": "lightning", TORCH: "pytorch"}
_INTERNAL = re.compile("INTERNAL ASSERT|internal error|Please report|file a bug|InductorError|BackendCompilerFailed")
_REFUSING = ("RuntimeError", "ValueError", "IndexError", "TypeError")
# How functions word what they want of their arguments. What a kernel or a device cannot do is another matter.
_WANTED = re.compile(
    r"\bsizes?\b|batch_size|shape|dimension|\bdims?\b|\bind(ex|ices)\b|\bexpect|\bmust\b|\bshould\b|mismatch|dtype"
    r"|\bha(s|ve) to be\b|range|out of bounds|cast|convert|ambiguous|requires? grad|second time|in-?place",
    re.IGNORECASE,
)
_UNABLE = re.compile(
    r"not (yet )?(implemented|supported)|unsupported|out of memory|CUDA (\w+ )?error|CUBLAS|CUDNN|NCCL|HIP error",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Expectation:
    """Sentences about what was to be expected."""

    words: str  # for the title
    observed: str
    expected: str
    remark: str
    owner: str  # of the code: ``torch``, the name of a library, or ``own`` for the model's

    @property
    def template(self) -> str:
        """The template that an issue for the owner begins with."""
        return _TEMPLATES.get(self.owner, "generic")


def expect(snapshot: Snapshot, reduction: Reduction | None = None) -> Expectation:
    """The texts about a failure: decided by the diagnosis of the reduction, with the places of the snapshot."""
    failure = reduction.failure if reduction is not None else snapshot.failure
    found = reduction.diagnosis if reduction is not None else None
    rule = _rule_of(found, failure)
    owner = _owner(snapshot, failure, is_of_torch=rule is not None and rule.is_of_torch)
    if snapshot.failure.event is not None and snapshot.failure.cause is None:
        # A smaller program has another loss.
        failure = snapshot.failure
    index = snapshot.failure.call_index
    is_constant = index is not None and failure.way in constant_ways(snapshot.program.calls[index])
    observed = _observed(snapshot, failure, is_constant=is_constant)
    if snapshot.failure.cause is not None:
        return _of_cause(snapshot, snapshot.failure.cause, observed, owner)
    name = code_span(failure.call or wording.short_call(failure))
    as_defined = f"For what it is given, {name} does what it is defined to do"
    title = why = remark = ""
    if found is not None and rule is not None:
        title, why = redact_text(found.title), redact_text(found.mechanism)
    if is_out_of_memory(failure):
        expected = "The call returns, which needs as much free memory as the message says."
        remark = f"Why it needs so much memory is a question about {_whom(owner)}."
    elif is_refusal(failure):
        what = "The backward pass goes through" if failure.in_backward else f"Arguments that {name} accepts"
        expected = f"{what}. {as_defined}: it refuses, and says what is wrong."
        remark = f"Why it is given these values is a question about {_whom(owner)}."
    else:
        expected = words_of(failure).expected
        if is_constant:
            expected = "A finite number in its place."
        elif rule is not None and rule.expected:
            expected = f"{expected.removesuffix('.')}, which needs {rule.expected}. {as_defined}. {why}"
        elif rule is not None:
            expected = f"{expected} {why}"
        if _has_remark(rule, failure, owner):
            remark = _remark(snapshot, reduction, _whom(owner))
    return Expectation(title[:1].lower() + title[1:], observed, expected, remark, owner)


def _rule_of(found: Diagnosis | None, failure: Failure) -> Rule | None:
    """The rule of a diagnosis of a bad value, if it is likely to be right."""
    if found is None or found.confidence == "possible" or not failure.kind.is_nonfinite:
        return None
    return next((rule for rule in RULES if rule.name == found.id), None)


def _observed(snapshot: Snapshot, failure: Failure, *, is_constant: bool) -> str:
    """What happened, with the message of training where that is another one."""
    observed, recorded = words_of(failure, is_constant=is_constant).observed, wording.message(snapshot.failure)
    if not recorded or recorded == wording.message(failure):
        return observed
    return f"{observed.removesuffix('.')}. In training it was: {recorded}."


def _has_remark(rule: Rule | None, failure: Failure, owner: str) -> bool:
    """True if the operands are the question: of a rule about them, or of a call in a library."""
    if rule is not None:
        return not rule.is_of_torch
    return failure.kind.is_nonfinite and owner not in (OWN, TORCH)


def _whom(owner: str) -> str:
    """Whose question it is. A library's own line may hold values of the user's, such as a loss that it divides."""
    either = f"`{owner}` or the code that calls it"
    return {OWN: "the training code rather than PyTorch", TORCH: "PyTorch"}.get(owner, either)


def retry(snapshot: Snapshot, reduction: Reduction | None, mark: str = "") -> str:
    """How to try an edit of the user's code on the captured step; empty where the failing code is not the user's."""
    is_own = snapshot.before is not None and expect(snapshot, reduction).owner == OWN
    return retry_words(snapshot.command, mark) if is_own else ""


def _of_cause(snapshot: Snapshot, cause: Failure, observed: str, owner: str) -> Expectation:
    """Of a call that raises because numbers from an earlier call are not finite."""
    kind, name, line = words_of(cause).short, code_span(snapshot.failure.call or ""), wording.line(cause)
    place = f" at {line}" if line else ""
    verb = "which is" if cause.call is None else "which returns"
    origin = f"{wording.origin(snapshot, cause)}{place}, {verb} {kind}"
    return Expectation(
        f"because of {kind} from {wording.short_call(cause)}",
        observed,
        "The call returns, as it does with finite numbers in place of those that are not.",
        f"In the training step {name} is given numbers that are not finite, and returns with finite ones. "
        f"They come from {origin}. Why it does so is a question about {_whom(owner)}.",
        owner,
    )


def is_refusal(failure: Failure) -> bool:
    """True if a function refuses what it is given, as its check of the arguments is there to do."""
    if failure.exception is None or failure.call is None:
        return False
    kind, message = failure.exception
    text = f"{kind}: {message}"
    is_defect = (_INTERNAL.search(text) or _UNABLE.search(text)) is not None
    return kind in _REFUSING and not is_defect and _WANTED.search(message) is not None


def _remark(snapshot: Snapshot, reduction: Reduction | None, whom: str) -> str:
    """Where the operands come from that the minimum still has, less those that were found free."""
    operands = _operands_left(snapshot, reduction)
    before = snapshot.failure.call_index or 0
    found = [_origin_of(snapshot.program, value, before) for value in operands]
    origins = list(dict.fromkeys(filter(None, found)))
    if not origins:
        return f"Why it is given these values is a question about {whom}."
    these, it = ("these operands are", "them") if len(operands) > 1 else ("this operand is", "it")
    is_input = not origins[0].startswith(("made by", "written by"))
    if len(operands) > 1 and len(origins) == 1 and is_input:
        these = f"{these} parts of"
    return f"In the training step {these} {listed(origins)}. Why the call is given {it} is a question about {whom}."


def _operands_left(snapshot: Snapshot, reduction: Reduction | None) -> list[int]:
    """The operands of the origin that the minimum still has, and that matter there."""
    index = snapshot.failure.call_index
    if index is None or reduction is None:
        return []
    free = {item.input for item in reduction.explain if item.free}
    matter = {item.value for item in reduction.program.inputs if item.name not in free}
    return [value for value in dict.fromkeys(snapshot.program.calls[index].input_refs()) if value in matter]


def _origin_of(program: Program, value: int, before: int) -> str:
    """The call that computed or wrote a value, or the input that it is, behind what only passes it on."""
    for call in reversed(program.calls[:before]):
        is_written = value in written_in_place(call)
        if not is_written and value not in call.output_refs():
            continue
        if not is_written and _passes_on(call):
            value = call.input_refs()[0]
            continue
        verb = "written by" if is_written else "made by"
        return f"{verb} {code_span(display_name(call.target))}{place(call)}"
    roles = {"parameter": "the parameter", "buffer": "the buffer", "state": "the optimizer state"}
    item = next((item for item in program.inputs if item.value == value), None)
    if item is None:
        return ""
    return f"{roles.get(item.role, 'an input of the step,')} {code_span(item.name)}"


def _passes_on(call: Call) -> bool:
    """True if a call returns the numbers that it is given."""
    if not call.input_refs() or call.target == GRAD_READ:
        return False
    return short_name(call) in VIEWS or call.name == "dropout"


def place(call: Call) -> str:
    """The place of a call: `` at `train.py:17` in `Net`: `x = a - b` ``, with a space in front."""
    site, module = call.site, label_of(call)
    words = f" at {code_span(redact_text(site.place))}" if site is not None else ""
    if site is not None and site.library is not None:
        file, number = site.library
        words = f" at {code_span(redact_text(f'{file}:{number}'))}, called from{words.removeprefix(' at')}"
    if module:
        words += f" in {code_span(module.strip('<>'))}"
    return words + wording.code_of(site)


def _owner(snapshot: Snapshot, failure: Failure, *, is_of_torch: bool) -> str:
    """Of the failing line; of a call of the user's torch, if it is at fault."""
    library = _library_of(snapshot)
    is_of_optimizer = (failure.call or "").startswith("torch.optim.")
    if library not in ("", "torch") and not is_of_optimizer:
        return library
    if failure.kind.raises:
        is_internal = _INTERNAL.search(" ".join(failure.exception or ())) is not None
        return TORCH if is_internal else OWN
    return TORCH if failure.kind.compares or is_of_torch else OWN


def _library_of(snapshot: Snapshot) -> str:
    """The package in whose code the failure begins; empty for the user's own."""
    origin = snapshot.failure.cause or snapshot.failure
    site = origin.site if origin.call is not None else None
    if site is None and origin.call_index is not None:
        site = snapshot.program.calls[origin.call_index].site
    if site is None or site.library is None:
        return ""
    return site.library[0].partition("/")[0].removesuffix(".py")
