"""The expected result instead of a failure, the owner of the code, and the template for an issue about it.

A NaN that a function is defined to return is no defect of the function: then the text says so, names the step that made
the operand, and does not send the reader upstream.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from reprokit.locate.failure import EXCEPTION, Failure, label_of
from reprokit.locate.spelling import VIEWS, constant_ways, short_name
from reprokit.program.dataflow import written_in_place
from reprokit.program.functions import GRAD_READ, display_name
from reprokit.program.ir import Call, Phase, Program
from reprokit.render import wording
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
    is_rule = found is not None and failure.kind in ("nan", "inf") and found.confidence != "possible"
    rule = next((rule for rule in RULES if found is not None and is_rule and rule.name == found.id), None)
    words, why = (found.title, found.mechanism) if found is not None and rule is not None else ("", "")
    is_of_torch = rule is not None and rule.is_of_torch
    owner = _owner(snapshot, failure, is_of_torch=is_of_torch)
    # A library's own line may hold values of the user's, such as a loss that it divides.
    either = f"`{owner}` or the code that calls it"
    whom = {OWN: "the training code rather than PyTorch", TORCH: "PyTorch"}.get(owner, either)
    if snapshot.failure.event is not None and snapshot.failure.cause is None:
        failure = snapshot.failure  # a smaller program has another loss
    index = snapshot.failure.call_index
    is_constant = index is not None and failure.way in constant_ways(snapshot.program.calls[index])
    observed, recorded = wording.observed(failure, is_constant=is_constant), wording.message(snapshot.failure)
    if recorded and recorded != wording.message(failure):
        observed = f"{observed.removesuffix('.')}. In training it was: {recorded}."
    if snapshot.failure.cause is not None:
        return _of_cause(snapshot, snapshot.failure.cause, observed, owner, whom)
    name, remark = wording.code_span(failure.call or wording.short_call(failure)), ""
    as_defined = f"For what it is given, {name} does what it is defined to do"
    if is_out_of_memory(failure):
        expected = "The call returns, which needs as much free memory as the message says."
        remark = f"Why it needs so much memory is a question about {whom}."
    elif is_refusal(failure):
        what = f"Arguments that {name} accepts" if failure.phase != Phase.BACKWARD else "The backward pass goes through"
        expected = f"{what}. {as_defined}: it refuses, and says what is wrong."
        remark = f"Why it is given these values is a question about {whom}."
    else:
        expected = "A finite number in its place." if is_constant else wording.expected(failure)
        if rule is not None and rule.expected and not is_constant:
            expected = f"{expected.removesuffix('.')}, which needs {rule.expected}. {as_defined}. {redact_text(why)}"
        elif rule is not None and not is_constant:
            expected = f"{expected} {redact_text(why)}"
        is_of_library = owner not in (OWN, TORCH) and failure.kind in ("nan", "inf")
        if not is_of_torch if rule is not None else is_of_library:
            remark = _remark(snapshot, reduction, whom)
    return Expectation(redact_text(words[:1].lower() + words[1:]), observed, expected, remark, owner)


def retry(snapshot: Snapshot, reduction: Reduction | None, mark: str = "") -> str:
    """How to try an edit of the user's code on the captured step; empty where the failing code is not the user's."""
    is_own = snapshot.before is not None and expect(snapshot, reduction).owner == OWN
    return retry_words(snapshot.command, mark) if is_own else ""


def _of_cause(snapshot: Snapshot, cause: Failure, observed: str, owner: str, whom: str) -> Expectation:
    """Of a call that raises because numbers from an earlier call are not finite."""
    kind, name = wording.kind_words(cause), wording.code_span(snapshot.failure.call or "")
    verb, line = "which is" if cause.call is None else "which returns", wording.line(cause)
    origin = f"{wording.origin(snapshot, cause)}{f' at {line}' if line else ''}, {verb} {kind}"
    return Expectation(
        f"because of {kind} from {wording.short_call(cause)}",
        observed,
        "The call returns, as it does with finite numbers in place of those that are not.",
        f"In the training step {name} is given numbers that are not finite, and returns with finite ones. "
        f"They come from {origin}. Why it does so is a question about {whom}.",
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
    index, operands = snapshot.failure.call_index, list[int]()
    if index is not None and reduction is not None:
        free = {item.input for item in reduction.explain if item.free}
        matter = {item.value for item in reduction.program.inputs if item.name not in free}
        operands = [value for value in dict.fromkeys(snapshot.program.calls[index].input_refs()) if value in matter]
    found = [_origin_of(snapshot.program, value, index or 0) for value in operands]
    origins = list(dict.fromkeys(filter(None, found)))
    if not origins:
        return f"Why it is given these values is a question about {whom}."
    several = len(operands) > 1
    is_input = not origins[0].startswith(("made by", "written by"))
    what = "parts of " if several and len(origins) == 1 and is_input else ""
    what = f"{'these operands are' if several else 'this operand is'} {what}{listed(origins)}"
    return (
        f"In the training step {what}. Why the call is given {'them' if several else 'it'} is a question about {whom}."
    )


def _origin_of(program: Program, value: int, before: int) -> str:
    """The call that computed or wrote a value, or the input that it is, behind what only passes it on."""
    for call in reversed(program.calls[:before]):
        is_written = value in written_in_place(call)
        if not is_written and value not in call.output_refs():
            continue
        operands = call.input_refs()
        is_passed_on = operands and (short_name(call) in VIEWS or call.name == "dropout") and call.target != GRAD_READ
        if is_written or not is_passed_on:
            verb = "written by" if is_written else "made by"
            return f"{verb} {wording.code_span(display_name(call.target))}{place(call)}"
        value = operands[0]
    roles = {"parameter": "the parameter", "buffer": "the buffer", "state": "the optimizer state"}
    item = next((item for item in program.inputs if item.value == value), None)
    if item is None:
        return ""
    return f"{roles.get(item.role, 'an input of the step,')} {wording.code_span(item.name)}"


def place(call: Call) -> str:
    """The place of a call: `` at `train.py:17` in `Net`: `x = a - b` ``, with a space in front."""
    site, module = call.site, label_of(call)
    words = f" at {wording.code_span(redact_text(site.place))}" if site is not None else ""
    if site is not None and site.library is not None:
        words = f" at {wording.code_span(redact_text(':'.join(map(str, site.library))))}, called from{words[3:]}"
    words += f" in {wording.code_span(module.strip('<>'))}" if module else ""
    return words + wording.code_of(site)


def _owner(snapshot: Snapshot, failure: Failure, *, is_of_torch: bool) -> str:
    origin = snapshot.failure.cause or snapshot.failure
    site = origin.site if origin.call is not None else None
    if site is None and origin.call_index is not None:
        site = snapshot.program.calls[origin.call_index].site
    file = site.library[0] if site is not None and site.library is not None else ""
    library = file.partition("/")[0].removesuffix(".py")
    if library not in ("", "torch") and not (failure.call or "").startswith("torch.optim."):
        return library
    is_internal = _INTERNAL.search(" ".join(failure.exception or ())) is not None
    is_upstream = is_internal if failure.kind == EXCEPTION else failure.kind == "mismatch" or is_of_torch
    return TORCH if is_upstream else OWN
