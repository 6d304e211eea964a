"""Custom `torch.autograd.Function`s as ordinary calls: what their forward did, and what the user's backward did.

A program knows no user code, so the graph is cut at every Function. Its results become leaves; after a backward call
the gradient that arrived there is read, the calls of the user's backward follow, and the backward pass goes on from the
Function's inputs. What a forward did outside of torch is an opaque call: its results are inputs of the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import BackwardCFunction

from reprokit import native, torch_private
from reprokit.program.dataflow import node_of
from reprokit.program.functions import GRAD_READ, replacing
from reprokit.program.ir import AUTOGRAD_BACKWARD, ZERO_GRAD, Call, Phase, Ref, iter_leaves
from reprokit.program.sites import source_of

if TYPE_CHECKING:
    from reprokit.program.trace import Tracer


@dataclass(slots=True)
class _Application:
    """One use of a Function: value numbers of the arguments that need gradients, and of its results as leaves."""

    node: Any
    arguments: list[int | None]
    leaves: list[int | None]


@dataclass(slots=True)
class _Passage:
    """The record of one Function's backward: gradients read from leaves, calls made, gradients handed on."""

    reads: list[tuple[int, int]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    handed_on: list[tuple[int, int]] = field(default_factory=list)


class CustomFunctions:
    """Watches Functions for a tracer while ``watching`` is entered.

    Invariant: ``_read`` holds the leaves whose ``.grad`` is left from an earlier backward call.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._applications: dict[int, _Application] = {}
        self._passages: list[_Passage] = []
        self._read: set[int] = set()
        self.depth = 0  # of the user's backwards that run; these see new objects for tensors that a forward had saved

    def watching(self) -> AbstractContextManager[None]:
        """Put our own functions in the place of torch's that run a forward and a backward."""
        apply = torch.autograd.Function.__dict__["apply"]
        run_backward = BackwardCFunction.apply

        @classmethod  # type: ignore[misc]
        def apply_and_watch(cls: type, *args: Any, **kwargs: Any) -> Any:
            return self._forward(apply.__get__(None, cls), cls, args, kwargs)

        def backward(node: Any, *grads: Any) -> Any:
            return self._backward(run_backward, node, grads)

        return replacing([(torch.autograd.Function, "apply", apply_and_watch), (BackwardCFunction, "apply", backward)])

    @contextlib.contextmanager
    def differentiation(self) -> Iterator[list[_Passage]]:
        """Collects what Functions do in one backward call; these may nest."""
        outer, self._passages = self._passages, []
        try:
            yield self._passages
        finally:
            self._passages = outer

    def written_out(self, call: Call, passages: list[_Passage]) -> list[Call]:
        """A backward call with what the Functions did in it, as calls."""
        left = [Ref(leaf) for passage in passages for leaf, _ in passage.reads if leaf in self._read]
        found = [Call(ZERO_GRAD, (left,), phase=Phase.BACKWARD)] if left else []
        found.append(_retaining(call) if any(passage.handed_on for passage in passages) else call)
        for passage in passages:
            for leaf, value in passage.reads:
                found.append(Call(GRAD_READ, (Ref(leaf),), outputs=Ref(value), phase=Phase.BACKWARD))
                self._read.add(leaf)
            found.extend(passage.calls)
            if passage.handed_on:
                starts, grads = zip(*((Ref(start), Ref(grad)) for start, grad in passage.handed_on), strict=True)
                options = {"retain_graph": True}
                found.append(Call(AUTOGRAD_BACKWARD, (list(starts), list(grads)), options, phase=Phase.BACKWARD))
        return found

    def _forward(self, apply: Any, cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        tracer = self._tracer
        if tracer.is_silent:
            return apply(*args, **kwargs)
        # torch puts it around modules with full backward hooks; it hands its input on
        if cls is torch_private.BackwardHookFunction:
            result = apply(*args, **kwargs)
            for given, got in zip(args, result, strict=True):
                if got is not given and _is_tensor(given):
                    tracer.alias(got, tracer.value(given))
            return result
        arguments = [tracer.value(item) if _is_tensor(item) and item.requires_grad else None for item in args]
        given = [item for item in args if _is_tensor(item)]
        for item in given:
            tracer.value(item)
        num_inputs = len(tracer.inputs)
        result = apply(*args, **kwargs)
        results = list(iter_leaves(result, torch.Tensor))
        is_opaque = self._adopt_opaque(cls, given, results, num_inputs)
        leaves = [self._leaf(item, is_opaque) for item in results]
        node = next((found for item in results if (found := _node_of(item)) is not None), None)
        if node is not None:
            self._applications[id(node)] = _Application(node, arguments, leaves)
        return result

    def _adopt_opaque(self, cls: type, given: list[torch.Tensor], results: list[torch.Tensor], num_inputs: int) -> bool:
        """True if the results do not come from torch calls; then they are inputs from now on."""
        tracer = self._tracer
        made_outside = {item.value for item in tracer.inputs[num_inputs:]}
        known = [tracer.value_of(item) for item in results]
        if all(value is not None and value not in made_outside for value in known):
            return False
        name = cls.__name__.removeprefix("GeneratedBackwardFor_")  # of an operator made by `torch.library.custom_op`
        described = {"name": cls.__qualname__, "source": source_of(cls)[0]}
        tracer.record_opaque(described, name, given, results)
        return True

    def _leaf(self, result: torch.Tensor, is_opaque: bool) -> int | None:
        """The value number of a result that gradients arrive at."""
        tracer = self._tracer
        if not result.requires_grad:
            return None
        value = tracer.value(result)
        if is_opaque and any(item.value == value and item.requires_grad for item in tracer.inputs):
            return value
        leaf = tracer.new_value()
        call = tracer.make_call("torch.Tensor.detach")
        tracer.record(replace(call, args=(Ref(value),), outputs=Ref(leaf)))
        tracer.record(replace(call, target="torch.Tensor.requires_grad_", args=(Ref(leaf),), outputs=Ref(leaf)))
        tracer.alias(result, leaf)
        return leaf

    def _backward(self, run_backward: Any, node: Any, grads: tuple[Any, ...]) -> Any:
        application = self._applications.get(id(node))
        if application is None:
            return run_backward(node, *grads)
        tracer, passage = self._tracer, _Passage()
        self._passages.append(passage)
        calls, tracer.calls = tracer.calls, passage.calls
        phase, tracer.phase = tracer.phase, Phase.BACKWARD
        self.depth += 1
        try:
            modes = map(torch_private.mode_at, range(torch_private.num_modes()))
            with contextlib.nullcontext() if tracer in modes else tracer:
                # New value numbers for the gradients that arrived. Among several, zeros may stand for none.
                reads = []
                with native.DisableTorchFunction():
                    for leaf, grad in zip(application.leaves, grads, strict=False):
                        if leaf is not None and _is_tensor(grad) and (len(grads) == 1 or bool(native.any(grad))):
                            value = tracer.new_value()
                            tracer.alias(grad, value)
                            reads.append((leaf, value))
                passage.reads = reads
                result = run_backward(node, *grads)
                passage.handed_on = self._handed_on(application, result)
        finally:
            self.depth -= 1
            tracer.calls, tracer.phase = calls, phase
        return result

    def _handed_on(self, application: _Application, result: Any) -> list[tuple[int, int]]:
        """The gradients for the Function's arguments, in the shape and dtype that these have."""
        pairs = []
        given = result if isinstance(result, tuple) else (result,)
        for argument, grad in zip(application.arguments, given, strict=False):
            if argument is not None and _is_tensor(grad):
                start = self._tracer.tensor_of(argument)
                fitted = (
                    native.sum_to_size(grad, start.shape) if start is not None and grad.shape != start.shape else grad
                )
                fitted = native.to(fitted, start.dtype) if start is not None and fitted.dtype != start.dtype else fitted
                pairs.append((argument, self._tracer.value(fitted)))
        return pairs


def _retaining(call: Call) -> Call:
    """The backward call with its graph kept, since the backward pass goes on from inside."""
    if len(call.args) > 2:
        return replace(call, args=(*call.args[:2], True, *call.args[3:]))
    return replace(call, kwargs={**call.kwargs, "retain_graph": True})


def _node_of(result: torch.Tensor) -> Any:
    """The node of a Function behind its result, which is one step further when the result is a view."""
    node = node_of(result)
    nodes = [node, *(following for following, _ in node.next_functions)] if node is not None else []
    return next((found for found in nodes if isinstance(found, BackwardCFunction)), None)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
