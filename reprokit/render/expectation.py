"""The expected result instead of a failure, the owner of the code, and the template for an issue about it.

A NaN that a function is defined to return is no defect of the function: then the text says so, names the step that made
the operand, and does not send the reader upstream.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reprokit.locate.failure import EXCEPTION, Failure, label_of
from reprokit.locate.spelling import VIEWS, constant_ways, short_name
from reprokit.program.dataflow import written_in_place
from reprokit.program.functions import GRAD_READ, display_name
from reprokit.program.ir import Call, Input, Program
from reprokit.render import wording
from reprokit.rules.rule import Rule
from reprokit.rules.table import RULES
from reprokit.shrink.checks.recorded import is_out_of_memory
from reprokit.shrink.reduction import Reduction
from reprokit.snapshot.format import Snapshot
from reprokit.snapshot.redact import redact_text

OWN, TORCH = "own", "torch"
_TEMPLATES = {"transformers": "transformers", "lightning": "lightning", "pytorch_lightning": "lightning"}
_TEMPLATES |= {"lightning_fabric": "lightning", TORCH: "pytorch"}
_INTERNAL = (
    "INTERNAL ASSERT",
    "internal error",
    "Please report",
    "file a bug",
    "InductorError",
    "BackendCompilerFailed",
)
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
    """``words`` are for the title, the rest are sentences; ``owner`` is whose code it belongs to.

    That is ``torch``, the name of a library, or ``own`` for the model's.
    """

    words: str
    observed: str
    expected: str
    remark: str
    owner: str

    @property
    def template(self) -> str:
        """The template that an issue for the owner begins with."""
        return _TEMPLATES.get(self.owner, "generic")


def expect(snapshot: Snapshot, reduction: Reduction | None = None) -> Expectation:
    """The texts about a failure: decided by the diagnosis of the reduction, with the places of the snapshot."""
    failure = reduction.failure if reduction is not None else snapshot.failure
    reason = _reason(failure, reduction)
    owner = _owner(snapshot, failure, reason)
    cause = snapshot.failure.cause
    if cause is not None:
        return _of_cause(snapshot, failure, cause, owner)
    if snapshot.failure.event is not None:
        failure = snapshot.failure  # a smaller program has another loss
    index = snapshot.failure.call_index
    is_constant = index is not None and failure.way in constant_ways(snapshot.program.calls[index])
    return Expectation(
        reason.title[:1].lower() + reason.title[1:] if reason is not None else "",
        _with_training(wording.observed(failure, is_constant=is_constant), snapshot.failure, failure),
        "A finite number in its place." if is_constant else _expected(failure, reason),
        _remark(snapshot, failure, reason, _operands(snapshot, reduction), owner),
        owner,
    )


@dataclass(frozen=True, slots=True)
class _Reason:
    """What the diagnosis says of a nan or an inf, and its rule."""

    title: str
    mechanism: str
    rule: Rule


def _reason(failure: Failure, reduction: Reduction | None) -> _Reason | None:
    found = reduction.diagnosis if reduction is not None else None
    if found is None or failure.kind not in ("nan", "inf") or found.confidence == "possible":
        return None
    rule = next((rule for rule in RULES if rule.name == found.id), None)
    return _Reason(redact_text(found.title), redact_text(found.mechanism), rule) if rule is not None else None


def _of_cause(snapshot: Snapshot, failure: Failure, cause: Failure, owner: str) -> Expectation:
    kind, observed = wording.kind_words(cause), _with_training(wording.observed(failure), snapshot.failure, failure)
    name = wording.code_span(snapshot.failure.call or "")
    expected = "The call returns, as it does with finite numbers in place of those that are not."
    found = f"In the training step {name} is given numbers that are not finite, and returns with finite ones"
    verb, line = "which is" if cause.call is None else "which returns", wording.line(cause)
    remark = (
        f"{found}. They come from {wording.origin(snapshot, cause)}{f' at {line}' if line else ''}, {verb} {kind}. "
    )
    remark += f"Why it does so is a question about {_whom(owner)}."
    return Expectation(f"because of {kind} from {wording.short_call(cause)}", observed, expected, remark, owner)


def _whom(owner: str) -> str:
    """Whom a question goes to. A library's own line may hold values of the user's, such as a loss that it divides."""
    either = f"`{owner}` or the code that calls it"
    return {OWN: "the training code rather than PyTorch", TORCH: "PyTorch"}.get(owner, either)


def is_refusal(failure: Failure) -> bool:
    """True if a function refuses what it is given, as its check of the arguments is there to do."""
    if failure.exception is None or failure.call is None:
        return False
    kind, message = failure.exception
    text = f"{kind}: {message}"
    is_defect = any(word in text for word in _INTERNAL) or _UNABLE.search(text) is not None
    return kind in _REFUSING and not is_defect and _WANTED.search(message) is not None


def _with_training(observed: str, recorded: Failure, reduced: Failure) -> str:
    message = wording.message(recorded)
    if not message or message == wording.message(reduced):
        return observed
    return f"{observed.removesuffix('.')}. In training it was: {message}."


def _expected(failure: Failure, reason: _Reason | None) -> str:
    if is_out_of_memory(failure):
        return "The call returns, which needs as much free memory as the message says."
    name = wording.code_span(failure.call or wording.short_call(failure))
    if is_refusal(failure):
        return (
            "The call returns, which needs arguments that it accepts. "
            f"For what it is given, {name} does what it is defined to do: it refuses, and says what is wrong."
        )
    expected = wording.expected(failure)
    if reason is None:
        return expected
    if not reason.rule.expected:
        return f"{expected} {reason.mechanism}"
    needs = f"{expected.removesuffix('.')}, which needs {reason.rule.expected}."
    return f"{needs} For what it is given, {name} does what it is defined to do. {reason.mechanism}"


def _operands(snapshot: Snapshot, reduction: Reduction | None) -> list[int]:
    """The operands of the origin in the captured step that the minimum still has, less those that were found free."""
    index = snapshot.failure.call_index
    if index is None or reduction is None:
        return []
    free = {item.input for item in reduction.explain if item.free}
    matter = {item.value for item in reduction.program.inputs if item.name not in free}
    return [value for value in dict.fromkeys(snapshot.program.calls[index].input_refs()) if value in matter]


def _remark(snapshot: Snapshot, failure: Failure, reason: _Reason | None, operands: Sequence[int], owner: str) -> str:
    whom = _whom(owner)
    if is_out_of_memory(failure):
        return f"Why it needs so much memory is a question about {whom}."
    if is_refusal(failure):
        return f"Why it is given these arguments is a question about {whom}."
    is_of_library = owner not in (OWN, TORCH) and failure.kind in ("nan", "inf")
    if reason.rule.is_of_torch if reason is not None else not is_of_library:
        return ""
    origins = list(dict.fromkeys(filter(None, (_origin_of(snapshot, value) for value in operands))))
    if not origins:
        return f"Why it is given these values is a question about {whom}."
    several = len(operands) > 1
    is_input = not origins[0].startswith(("made by", "written by"))
    parts = "parts of " if several and len(origins) == 1 and is_input else ""
    what = f"{'these operands are' if several else 'this operand is'} {parts}{wording.listed(origins)}"
    return (
        f"In the training step {what}. Why the call is given {'them' if several else 'it'} is a question about {whom}."
    )


def _origin_of(snapshot: Snapshot, value: int) -> str:
    failing = snapshot.failure.call_index
    made = _maker(snapshot.program, value, failing) if failing is not None else None
    if isinstance(made, Input):
        role = {"parameter": "the parameter", "buffer": "the buffer", "state": "the optimizer state"}.get(
            made.role, "an input of the step,"
        )
        return f"{role} {wording.code_span(made.name)}"
    if made is None:
        return ""
    verb = "written by" if value in written_in_place(made) else "made by"
    return f"{verb} {wording.code_span(display_name(made.target))}{place(made)}"


def place(call: Call) -> str:
    """The place of a call: `` at `train.py:17` in `Net`: `x = a - b` ``, with a space in front."""
    site = call.site
    words = f" at {wording.code_span(redact_text(site.place))}" if site is not None else ""
    if site is not None and site.library is not None:
        words = f" at {wording.code_span(redact_text(':'.join(map(str, site.library))))}, called from{words[3:]}"
    module = label_of(call)
    words += f" in {wording.code_span(module.strip('<>'))}" if module else ""
    return words + wording.code_of(site)


def _maker(program: Program, value: int, before: int) -> Call | Input | None:
    """The call that computed or wrote a value, or the input that it is, behind what only passes it on."""
    for call in reversed(program.calls[:before]):
        if value in written_in_place(call):
            return call
        if value in call.output_refs():
            operands = call.input_refs()
            if not operands or (short_name(call) not in VIEWS and call.name != "dropout") or call.target == GRAD_READ:
                return call
            value = operands[0]
    return next((item for item in program.inputs if item.value == value), None)


def _owner(snapshot: Snapshot, failure: Failure, reason: _Reason | None) -> str:
    library = _library(snapshot)
    if library is not None and not (failure.call or "").startswith("torch.optim."):
        return library
    if failure.kind == EXCEPTION:
        message = failure.exception[1] if failure.exception is not None else ""
        kind = failure.exception[0] if failure.exception is not None else ""
        return TORCH if any(word in f"{kind} {message}" for word in _INTERNAL) else OWN
    if failure.kind == "mismatch":
        return TORCH
    return TORCH if reason is not None and reason.rule.is_of_torch else OWN


def _library(snapshot: Snapshot) -> str | None:
    failure = snapshot.failure.cause or snapshot.failure
    site = failure.site if failure.call is not None else None
    if site is None and failure.call_index is not None:
        site = snapshot.program.calls[failure.call_index].site
    file = site.library[0] if site is not None and site.library is not None else ""
    top = file.partition("/")[0].removesuffix(".py")
    return top if top and top != "torch" else None
