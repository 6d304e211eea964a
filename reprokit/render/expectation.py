"""The expected result instead of a failure, the owner of the code, and the template for an issue about it.

A NaN that a function is defined to return is no defect of the function: then the text says so, names the step that made
the operand, and does not send the reader upstream.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from reprokit.locate.calls import VIEWS, short_name
from reprokit.locate.failure import EXCEPTION, Failure, label_of
from reprokit.program.functions import GRAD_READ, display_name
from reprokit.program.ir import Call, Input, Program
from reprokit.render import facts, wording
from reprokit.render.defined import find_edge
from reprokit.render.definitions import Defect, Edge
from reprokit.shrink.checks.recorded import requested_bytes
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
    """The texts about a failure: decided on the smallest program, with the places of the snapshot."""
    recorded = find_edge(snapshot.program, snapshot.tensors, snapshot.failure)
    edge, failure = recorded, snapshot.failure
    if reduction is not None:
        edge, failure = find_edge(reduction.program, reduction.tensors, reduction.failure), reduction.failure
    operands, other = _operands(edge, recorded, reduction), _other_reason(recorded, edge)
    owner = _owner(snapshot, failure, edge)
    cause = snapshot.failure.cause
    if cause is not None:
        return _of_cause(snapshot, failure, cause, owner)
    if snapshot.failure.event is not None:
        failure = snapshot.failure  # a smaller program has another loss
    observed = wording.observed(failure, is_forward_finite=edge is None or edge.is_forward_finite)
    return Expectation(
        edge.words if edge is not None else "",
        _with_training(observed, snapshot.failure, failure),
        _expected(failure, edge),
        f"{other}{_remark(snapshot, failure, recorded if other else edge, operands, owner)}",
        owner,
    )


def _of_cause(snapshot: Snapshot, failure: Failure, cause: Failure, owner: str) -> Expectation:
    """The texts about an exception with a bad value behind it."""
    kind, observed = wording.kind_words(cause), _with_training(wording.observed(failure), snapshot.failure, failure)
    name = wording.code_span(snapshot.failure.call or "")
    expected = "The call returns, as it does with finite numbers in place of those that are not."
    found = f"In the training step {name} is given numbers that are not finite, and returns with finite ones"
    verb = "which is" if cause.call is None else "which returns"
    remark = f"{found}. They come from {facts.origin(snapshot, cause)}{_at(cause)}, {verb} {kind}. "
    remark += f"Why it does so is a question about {_whom(owner)}."
    return Expectation(f"because of {kind} from {wording.short_call(cause)}", observed, expected, remark, owner)


def _at(failure: Failure) -> str:
    place = facts.line(failure)
    return f" at {place}" if place else ""


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
    """The observation, with the message of the training step if the reduced one has another."""
    message = wording.message(recorded)
    if not message or message == wording.message(reduced):
        return observed
    return f"{observed.removesuffix('.')}. In training it was: {message}."


def _expected(failure: Failure, edge: Edge | None) -> str:
    if requested_bytes(failure) is not None:
        return "The call returns, which needs as much free memory as the message says."
    if is_refusal(failure):
        name = wording.code_span(failure.call or "")
        return (
            "The call returns, which needs arguments that it accepts. "
            f"For what it is given, {name} does what it is defined to do: it refuses, and says what is wrong."
        )
    if edge is None:
        return wording.expected(failure)
    about = "a finite gradient" if failure.is_derivative else "a finite result"
    about = "a finite parameter after the step" if failure.call and failure.call.startswith("torch.optim.") else about
    if edge.verdict is Defect.BETTER:
        return f"{about[0].upper()}{about[1:]}: {edge.fact}."
    name = wording.code_span(failure.call or wording.short_call(failure))
    needs = f"{about[0].upper()}{about[1:]}, which needs {edge.wanted}."
    if edge.verdict is Defect.OPEN:
        return f"{needs} No check shows a defect of {name}: {edge.fact}."
    return f"{needs} For what it is given, {name} does what it is defined to do: {edge.fact}."


def _other_reason(recorded: Edge | None, edge: Edge | None) -> str:
    """A sentence about the reason of the training step where the smallest program fails for another one."""
    edges = [found for found in (recorded, edge) if found is not None and found.verdict is Defect.DEFINED]
    if recorded is None or len(edges) < 2 or edges[0].wanted == edges[1].wanted:
        return ""
    return f"The training step failed for another reason, since {recorded.fact}: it needed {recorded.wanted}. "


def _operands(edge: Edge | None, recorded: Edge | None, reduction: Reduction | None) -> tuple[int, ...]:
    """The operands in question, as the captured step has them where it shows them, without those that were found to be
    free."""
    values = (recorded.values if recorded is not None else ()) or (edge.values if edge is not None else ())
    if reduction is None:
        return values
    free = {item.input for item in reduction.explain if item.free}
    named = {item.value for item in reduction.program.inputs if item.name in free}
    return tuple(value for value in values if value not in named)


def _remark(snapshot: Snapshot, failure: Failure, edge: Edge | None, operands: tuple[int, ...], owner: str) -> str:
    """The origin of the operands, and the owner of that question."""
    whom = _whom(owner)
    if requested_bytes(failure) is not None:
        return f"Why it needs so much memory is a question about {whom}."
    if is_refusal(failure):
        return f"Why it is given these arguments is a question about {whom}."
    if edge is None or edge.verdict is Defect.BETTER:
        return ""
    origins = list(dict.fromkeys(filter(None, (_origin_of(snapshot, value) for value in operands))))
    if not origins:
        these = "these values" if edge.subject == "values" else f"this {edge.subject}"
        return f"Why it is given {these} is a question about {whom}."
    several = len(operands) > 1
    parts = "parts of " if several and len(origins) == 1 and not origins[0].startswith("made by") else ""
    what = f"{'these operands are' if several else 'this operand is'} {parts}{wording.listed(origins)}"
    why = f"they have the {edge.subject} they have" if several else f"it has the {edge.subject} it has"
    return f"In the training step {what}. Why {why} is a question about {whom}."


def _origin_of(snapshot: Snapshot, value: int) -> str:
    """The origin of a value in the training step: an input of it, or a call."""
    failing = snapshot.failure.call_index
    made = _maker(snapshot.program, value, failing) if failing is not None else None
    if isinstance(made, Input):
        role = {"parameter": "the parameter", "buffer": "the buffer", "state": "the optimizer state"}.get(
            made.role, "an input of the step,"
        )
        return f"{role} {wording.code_span(made.name)}"
    return f"made by {wording.code_span(display_name(made.target))}{place(made)}" if made is not None else ""


def place(call: Call) -> str:
    """The place of a call: `` at `train.py:17` in `Net`: `x = a - b` ``, with a space in front."""
    site = call.site
    words = f" at {wording.code_span(redact_text(site.place))}" if site is not None else ""
    module = label_of(call)
    words += f" in {wording.code_span(module.strip('<>'))}" if module else ""
    return words + wording.code_of(site)


def _maker(program: Program, value: int, before: int) -> Call | Input | None:
    """The call that computed a value, or the input that it is, behind what only passes it on."""
    for call in reversed(program.calls[:before]):
        if value in call.output_refs():
            operands = call.input_refs()
            if not operands or (short_name(call) not in VIEWS and call.name != "dropout") or call.target == GRAD_READ:
                return call
            value = operands[0]
    return next((item for item in program.inputs if item.value == value), None)


def _owner(snapshot: Snapshot, failure: Failure, edge: Edge | None) -> str:
    library = _library(snapshot)
    if library is not None and not (failure.call or "").startswith("torch.optim."):
        return library
    if failure.kind == EXCEPTION:
        message = failure.exception[1] if failure.exception is not None else ""
        kind = failure.exception[0] if failure.exception is not None else ""
        return TORCH if any(word in f"{kind} {message}" for word in _INTERNAL) else OWN
    if failure.kind == "mismatch":
        return TORCH
    return TORCH if edge is not None and edge.verdict is Defect.BETTER else OWN


def _library(snapshot: Snapshot) -> str | None:
    """The package of the library whose line called the origin; a value that was bad before has no such line."""
    failure = snapshot.failure.cause or snapshot.failure
    site = failure.site if failure.call is not None else None
    if site is None and failure.call_index is not None:
        site = snapshot.program.calls[failure.call_index].site
    file = site.library[0] if site is not None and site.library is not None else ""
    top = file.partition("/")[0].removesuffix(".py")
    return top if top and top != "torch" else None
