"""Transforms of `torch.func` as ordinary calls: `vmap` row by row, `grad` and `vjp` by autograd, `jvp` by two of them.

A program knows no user code and no transformed tensors. So the transformed function runs once more on plain tensors,
and its calls are recorded. The results must be those of the transform itself; where they are not, or where there would
be too many calls, the transform is one opaque call whose results are inputs of the program. So is every call of what
`torch.jit` has compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from reprokit.errors import pass_on
from reprokit.program.dataflow import is_accumulation, reachable
from reprokit.program.memory import is_bad, same_bits
from reprokit.torch_private import (
    HAS_TRANSFORMS,
    apis,
    batching,
    broadcast_to_and_flatten,
    eager_transforms,
    peek_transforms,
)

if TYPE_CHECKING:
    from reprokit.program.trace import Tracer

MOST_CALLS = 4096  # a batch of 256 rows with 16 calls each; more take minutes to write and to shrink
SCRIPTED = (torch.jit.ScriptFunction, torch.ScriptMethod)


class _TooManyCalls(Exception):
    """The calls of a transform are more than a program is to hold."""


class Transforms:
    """Performs transforms for a tracer while ``watching`` is entered.

    ``rounded`` names the transforms whose results differ by rounding from those of their calls.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.rounded: list[str] = []
        self._tracer = tracer
        self._is_written_out = False
        self._end = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Put our own functions in the place of torch's that run a transform."""
        if not HAS_TRANSFORMS:
            yield
            return
        pull = eager_transforms._vjp_with_argnums

        def vjp(*args: Any, **kwargs: Any) -> Any:
            return (_vjp if peek_transforms() is None else pull)(*args, **kwargs)

        plain: list[tuple[Any, str, Callable[..., Any]]] = [
            (apis, "vmap_impl", self._rows),
            (eager_transforms, "grad_impl", _gradients),
            (eager_transforms, "grad_and_value_impl", _gradients_and_value),
            (eager_transforms, "_jvp_with_argnums", _jvp),
        ]
        ours = [(owner, name, self._performing(getattr(owner, name), function)) for owner, name, function in plain]
        ours.append((eager_transforms, "_vjp_with_argnums", vjp))
        # torch functions in what `torch.jit` has compiled go past every function mode: its calls are opaque
        ours += [(owner, "__call__", self._opaque(owner.__call__)) for owner in SCRIPTED]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in ours]
        try:
            for owner, name, function in ours:
                setattr(owner, name, function)
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    def _performing(self, transform: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        def perform(function: Any, *args: Any, **kwargs: Any) -> Any:
            if peek_transforms() is not None:
                return transform(function, *args, **kwargs)
            if self._is_written_out:
                return plain(function, *args, **kwargs)
            name = name_of(function)
            described = {"name": f"{transform.__name__.removesuffix('_impl')}({name})", "is_transform": True}
            run, again = partial(transform, function), partial(plain, function)
            return self._perform(name, described, run, again, args, kwargs)

        return perform

    def _opaque(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(function: Any, *args: Any, **kwargs: Any) -> Any:
            if peek_transforms() is not None:
                return call(function, *args, **kwargs)
            is_method = isinstance(function, torch.ScriptMethod)
            name = f"{function.owner._type().name()}.{function.name}" if is_method else str(function.name)
            described = {"name": name, "is_scripted": True}
            return self._tracer.perform_opaque(described, name, partial(call, function), args, kwargs)

        return __call__

    def _perform(
        self,
        name: str,
        described: dict[str, Any],
        run: Callable[..., Any],
        plain: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """The results of ``run``, from calls of ``plain`` that are recorded if a gradient or a failure needs them."""
        tracer = self._tracer
        state, error, result, given = torch.get_rng_state(), None, None, _tensors((args, kwargs))
        versions = tracer.versions_of(given)
        try:
            result = run(*args, **kwargs)
        except Exception as raised:
            pass_on(raised)
            error = raised
        results = _tensors(result)
        written = [item for item, version in zip(given, versions, strict=True) if item._version != version]
        if written:  # a second run would write again
            if error is not None:
                raise error
            return tracer.adopt_opaque(described, name, given, result, written)
        if error is None and not any(item.requires_grad or is_bad(item) for item in results):
            return self._tracer.make_outcome(result, "batch")
        after, first = torch.get_rng_state(), len(tracer.calls)
        torch.set_rng_state(state)
        again, raised_again = self._write_out(plain, args, kwargs)
        torch.set_rng_state(after)
        if error is not None and type(raised_again) is type(error):
            raise raised_again
        if error is None and raised_again is None and self._are_alike(name, results, _tensors(again)):
            return again
        del tracer.calls[first:]
        if error is not None:
            raise error
        return tracer.adopt_opaque(described, name, given, result)

    def _write_out(self, plain: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Exception | None]:
        """What the function's own calls lead to, and what they raised."""
        self._end = len(self._tracer.calls) + MOST_CALLS
        self._is_written_out = True
        try:
            return plain(*args, **kwargs), None
        except Exception as error:
            pass_on(error)
            return None, error
        finally:
            self._is_written_out = False

    def _are_alike(self, name: str, results: list[torch.Tensor], written: list[torch.Tensor]) -> bool:
        """True if the calls gave the results of the transform, but for rounding."""
        with torch.DisableTorchFunction(), torch.no_grad():
            if len(results) != len(written) or not all(map(_is_near, results, written)):
                return False
            if not all(map(same_bits, results, written)):
                self.rounded.append(name)
        return True

    def _rows(
        self,
        function: Callable[..., Any],
        in_dims: Any,
        out_dims: Any,
        randomness: str,
        chunk_size: int | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """``vmap``: the function on one row after the other."""
        del randomness, chunk_size
        size, dims, flat, spec = batching._process_batched_inputs(in_dims, args, function)
        rows: list[list[Any]] = []
        for row in range(size):
            given = [x if dim is None else x.select(dim, row) for x, dim in zip(flat, dims, strict=True)]
            outputs, output_spec = tree_flatten(function(*tree_unflatten(given, spec), **kwargs))
            rows.append(outputs)
            if len(self._tracer.calls) > self._end:
                raise _TooManyCalls
        is_one = len(rows[0]) == 1 and isinstance(out_dims, tuple)
        places = list(out_dims) if is_one else broadcast_to_and_flatten(out_dims, output_spec) or []
        joined = [
            items[0] if place is None else torch.stack([torch.as_tensor(item) for item in items], place)
            for items, place in zip(zip(*rows, strict=True), places, strict=True)
        ]
        return tree_unflatten(joined, output_spec)


def name_of(function: Any) -> str:
    """What the user calls a function that is transformed."""
    name = getattr(function, "__name__", type(function).__name__)
    return "lambda" if name == "<lambda>" else str(name)


def _gradients(function: Any, argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
    """``grad``."""
    grads, value = _gradients_and_value(function, argnums, has_aux, args, kwargs)
    return (grads, value[1]) if has_aux else grads


def _gradients_and_value(function: Any, argnums: Any, has_aux: bool, args: Any, kwargs: Any) -> Any:
    """``grad_and_value``."""
    inputs = _Inputs(args, argnums)
    with torch.enable_grad():
        output = function(*inputs.args, **kwargs)
        value, aux = output if has_aux else (output, None)
        grads = inputs.gradients([value], None, create_graph=True)
    settled = inputs.settled((grads, value, aux))
    return (settled[0], (settled[1], settled[2])) if has_aux else settled[:2]


def _vjp(function: Any, *primals: Any, argnums: Any = None, has_aux: bool = False) -> Any:
    """``vjp``, and the first half of ``jacrev``."""
    inputs = _Inputs(primals, argnums)
    with torch.enable_grad():
        output = function(*inputs.args)
    output, aux = output if has_aux else (output, None)

    def pull(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        create_graph = torch.is_grad_enabled() if create_graph is None else create_graph
        return inputs.settled(inputs.gradients(tree_leaves(output), tree_leaves(cotangents), create_graph=create_graph))

    results = inputs.settled(output)
    return (results, pull, inputs.settled(aux)) if has_aux else (results, pull)


def _jvp(function: Any, primals: Any, tangents: Any, argnums: Any, *, strict: bool = False, has_aux: bool) -> Any:
    """``jvp``, by the derivative of a product of vector and Jacobian, which is linear in the vector."""
    del strict
    inputs = _Inputs(primals, argnums)
    with torch.enable_grad():
        output = function(*inputs.args)
        output, aux = output if has_aux else (output, None)
        flat, spec = tree_flatten(output)
        vectors = [torch.zeros_like(item).requires_grad_() for item in flat]
        pulled = tree_leaves(inputs.gradients(flat, vectors, create_graph=True))
        pairs = [(p, t) for p, t in zip(pulled, tree_leaves(tangents), strict=True) if p.requires_grad]
        slopes = _differentiated([p for p, _ in pairs], vectors, [t for _, t in pairs], create_graph=True)
    inputs.leaves += vectors
    settled = inputs.settled((output, tree_unflatten(slopes, spec), aux))
    return settled if has_aux else settled[:2]


class _Inputs:
    """Arguments of which those at ``argnums`` (all, if that is ``None``) are differentiated by.

    ``leaves`` are those that nothing outside depends on: results that depend on no other leaf need no gradient.
    """

    def __init__(self, args: tuple[Any, ...], argnums: Any) -> None:
        self.leaves: list[torch.Tensor] = []
        self._is_outside_tracked = torch.is_grad_enabled()
        numbers = range(len(args)) if argnums is None else [argnums] if isinstance(argnums, int) else argnums
        chosen = {number % len(args) for number in numbers}
        self.args = tuple(tree_map(self._fresh, x) if n in chosen else x for n, x in enumerate(args))
        given = self.args if argnums is None else eager_transforms._slice_argnums(self.args, argnums, as_tuple=False)
        self._flat, self._spec = tree_flatten(given)

    def _fresh(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.requires_grad and self._is_outside_tracked:
            return value.view_as(value)
        leaf = value.detach().requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def gradients(self, outputs: list[Any], vectors: list[Any] | None, *, create_graph: bool) -> Any:
        """The gradients of what is differentiated by, in its structure."""
        pairs = [(o, v) for o, v in zip(outputs, vectors or [None] * len(outputs), strict=True) if o.requires_grad]
        given = [v for _, v in pairs] if vectors is not None else None
        grads = _differentiated([o for o, _ in pairs], self._flat, given, create_graph=create_graph)
        return tree_unflatten(grads, self._spec)

    def settled(self, value: Any) -> Any:
        """``value`` without the graphs of the tensors that only depend on leaves of ours."""
        return tree_map(self._settle, value) if peek_transforms() is None else value

    def _settle(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        own = set(map(id, self.leaves))
        if self._is_outside_tracked and not all(id(leaf) in own for leaf in _leaves_behind(value)):
            return value
        return value.detach()


def _differentiated(outputs: list[Any], inputs: list[Any], vectors: list[Any] | None, *, create_graph: bool) -> Any:
    """Like ``torch.autograd.grad``, with zeros where nothing depends on an input."""
    if not outputs:
        return [torch.zeros_like(item) for item in inputs]
    options: dict[str, Any] = {"create_graph": create_graph, "retain_graph": True, "allow_unused": True}
    grads = torch.autograd.grad(outputs, inputs, vectors, **options)
    return [torch.zeros_like(item) if grad is None else grad for item, grad in zip(inputs, grads, strict=True)]


def _leaves_behind(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves that a tensor depends on."""
    if tensor.grad_fn is None:
        yield tensor
        return
    yield from (node.variable for node in reachable([tensor.grad_fn]) if is_accumulation(node))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(value) if isinstance(item, torch.Tensor)]


def _is_near(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two tensors are equal but for rounding, which sums make worse where their terms cancel."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.is_floating_point():
        return torch.equal(first, second)
    finite = first[first.isfinite()].abs()
    near = 1e-5 * float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(first, second, rtol=1e-3, atol=near, equal_nan=True)
