"""Transforms of `torch.func` as ordinary calls: `vmap` row by row, `grad` and `vjp` by autograd, `jvp` by two of them.

A program knows no user code and no transformed tensors. So the transformed function runs once more on plain tensors,
and its calls are recorded. The results must be those of the transform itself; where they are not, or where there would
be too many calls, the transform is one opaque call whose results are inputs of the program. So is every call of what
`torch.jit` has compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from reprokit import native, torch_private
from reprokit.errors import pass_on
from reprokit.program.dataflow import is_accumulation, is_bad, node_of, reachable, same_bits
from reprokit.program.functions import replacing
from reprokit.program.ir import iter_leaves
from reprokit.torch_private import HAS_TRANSFORMS, JVP, VJP, apis, eager_transforms, peek_transforms

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

    def watching(self) -> AbstractContextManager[None]:
        """Put our own functions in the place of torch's that run a transform."""
        if not HAS_TRANSFORMS:
            return nullcontext()
        pull = getattr(eager_transforms, VJP)

        def vjp(*args: Any, **kwargs: Any) -> Any:
            return (_vjp if peek_transforms() is None else pull)(*args, **kwargs)

        plain: list[tuple[Any, str, Callable[..., Any]]] = [
            (apis, "vmap_impl", self._rows),
            (eager_transforms, "grad_impl", _gradients),
            (eager_transforms, "grad_and_value_impl", _gradients_and_value),
            (eager_transforms, JVP, _jvp),
        ]
        ours = [(owner, name, self._performing(getattr(owner, name), function)) for owner, name, function in plain]
        ours.append((eager_transforms, VJP, vjp))
        # torch functions in what `torch.jit` has compiled go past every function mode: its calls are opaque
        ours += [(owner, "__call__", self._opaque(owner.__call__)) for owner in SCRIPTED]
        return replacing(ours)

    def _performing(self, transform: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        def perform(function: Any, *args: Any, **kwargs: Any) -> Any:
            if peek_transforms() is not None:
                return transform(function, *args, **kwargs)
            if self._is_written_out:
                return plain(function, *args, **kwargs)
            return self._perform(transform, plain, function, args, kwargs)

        return perform

    def _opaque(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def perform(function: Any, *args: Any, **kwargs: Any) -> Any:
            if peek_transforms() is not None:
                return call(function, *args, **kwargs)
            is_method = isinstance(function, torch.ScriptMethod)
            owner = f"{function.owner.qualified_name.rpartition('.')[2]}." if is_method else ""
            described = {"name": f"{owner}{function.name}", "is_scripted": True}
            return self._tracer.perform_opaque(described, partial(call, function), args, kwargs)

        return perform

    def _perform(self, transform: Any, plain: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of a transform, from calls of ``plain`` that are recorded if a gradient or a failure needs
        them."""
        tracer, name = self._tracer, name_of(function)
        described = {"name": f"{transform.__name__.removesuffix('_impl')}({name})", "is_transform": True}
        state, error, result, given = native.get_rng_state(), None, None, _tensors((args, kwargs))
        versions = tracer.versions_of(given)
        try:
            result = transform(function, *args, **kwargs)
        except Exception as raised:
            pass_on(raised)
            error = raised
        results = _tensors(result)
        written = [
            item for item, version in zip(given, versions, strict=True) if torch_private.version(item) != version
        ]
        if error is None and (written or not any(item.requires_grad or is_bad(item) for item in results)):
            return tracer.adopt_opaque(described, given, result, written)
        if error is not None and written:  # a second run would write again
            raise error
        after, first = native.get_rng_state(), len(tracer.calls)
        native.set_rng_state(state)
        self._end, self._is_written_out = first + MOST_CALLS, True
        again, raised_again = None, None
        try:
            again = plain(function, *args, **kwargs)
        except Exception as raised:
            pass_on(raised)
            raised_again = raised
        finally:
            self._is_written_out = False
        native.set_rng_state(after)
        if error is not None and type(raised_again) is type(error):
            raise raised_again
        if error is None and raised_again is None and self._are_alike(name, results, _tensors(again)):
            return again
        del tracer.calls[first:]
        if error is not None:
            raise error
        return tracer.adopt_opaque(described, given, result)

    def _are_alike(self, name: str, results: list[torch.Tensor], written: list[torch.Tensor]) -> bool:
        """True if the calls gave the results of the transform, but for rounding."""
        with native.DisableTorchFunction(), native.no_grad():
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
        sizes: list[int] = []
        _along(args, in_dims, lambda tensor, dim: sizes.append(tensor.shape[dim]))

        def row(number: int) -> Any:
            return _along(args, in_dims, lambda tensor, dim: native.select(tensor, dim, number))

        rows: list[Any] = []
        for number in range(sizes[0]):
            rows.append(function(*row(number), **kwargs))
            if len(self._tracer.calls) > self._end:
                raise _TooManyCalls
        columns = dict(zip(map(id, _tensors(rows[0])), zip(*map(_tensors, rows), strict=True), strict=True))
        dims = out_dims[0] if isinstance(rows[0], torch.Tensor) and isinstance(out_dims, tuple) else out_dims
        return _along(rows[0], dims, lambda tensor, dim: native.stack(columns[id(tensor)], dim))


def _along(value: Any, dims: Any, change: Callable[[torch.Tensor, int], Any]) -> Any:
    """Nested tensors, those that have a dimension changed; ``dims`` is as nested, or one for all tensors of a part."""
    if isinstance(value, torch.Tensor):
        return value if dims is None else change(value, dims)
    if isinstance(value, Mapping):
        given = dims if isinstance(dims, Mapping) else dict.fromkeys(value, dims)
        return {key: _along(item, given[key], change) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        each = dims if isinstance(dims, (tuple, list)) else [dims] * len(value)
        items = [_along(item, dim, change) for item, dim in zip(value, each, strict=True)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return _along(value, 0, lambda tensor, _: change(tensor))


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
    value, pull, *aux = _vjp(partial(function, **kwargs), *args, argnums=argnums, has_aux=has_aux)
    return pull(None, create_graph=True), (value, *aux) if has_aux else value


def _vjp(function: Any, *primals: Any, argnums: Any = None, has_aux: bool = False) -> Any:
    """``vjp``, and the first half of ``jacrev``."""
    inputs = _Inputs(primals, argnums)
    with native.enable_grad():
        output = function(*inputs.args)
    output, aux = output if has_aux else (output, None)

    def pull(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        create_graph = native.is_grad_enabled() if create_graph is None else create_graph
        vectors = _tensors(cotangents) if cotangents is not None else None
        return inputs.settled(inputs.gradients(_tensors(output), vectors, create_graph=create_graph))

    results = inputs.settled(output)
    return (results, pull, inputs.settled(aux)) if has_aux else (results, pull)


def _jvp(function: Any, primals: Any, tangents: Any, argnums: Any, *, strict: bool = False, has_aux: bool) -> Any:
    """``jvp``, by the derivative of a product of vector and Jacobian, which is linear in the vector."""
    del strict
    inputs = _Inputs(primals, argnums)
    with native.enable_grad():
        output = function(*inputs.args)
        output, aux = output if has_aux else (output, None)
        flat = _tensors(output)
        vectors = [native.requires_grad_(native.zeros_like(item)) for item in flat]
        pulled = _tensors(inputs.gradients(flat, vectors, create_graph=True))
        pairs = [(p, t) for p, t in zip(pulled, _tensors(tangents), strict=True) if p.requires_grad]
        slopes = _differentiated([p for p, _ in pairs], vectors, [t for _, t in pairs], create_graph=True)
    inputs.leaves += vectors
    settled = inputs.settled((output, _replaced(output, slopes), aux))
    return settled if has_aux else settled[:2]


class _Inputs:
    """Arguments of which those at ``argnums`` (all, if that is ``None``) are differentiated by.

    ``leaves`` are those that nothing outside depends on: results that depend on no other leaf need no gradient.
    """

    def __init__(self, args: tuple[Any, ...], argnums: Any) -> None:
        self.leaves: list[torch.Tensor] = []
        self._is_outside_tracked = native.is_grad_enabled()
        numbers = range(len(args)) if argnums is None else [argnums] if isinstance(argnums, int) else argnums
        chosen = {number % len(args) for number in numbers}
        self.args = tuple(_mapped(x, self._fresh) if n in chosen else x for n, x in enumerate(args))
        self._by = self.args[argnums] if isinstance(argnums, int) else tuple(self.args[n] for n in numbers)

    def _fresh(self, value: torch.Tensor) -> torch.Tensor:
        if value.requires_grad and self._is_outside_tracked:
            return native.view_as(value, value)
        leaf = native.requires_grad_(native.detach(value))
        self.leaves.append(leaf)
        return leaf

    def gradients(self, outputs: list[Any], vectors: list[Any] | None, *, create_graph: bool) -> Any:
        """The gradients of what is differentiated by, in its structure."""
        pairs = [(o, v) for o, v in zip(outputs, vectors or [None] * len(outputs), strict=True) if o.requires_grad]
        given = [v for _, v in pairs] if vectors is not None else None
        by = _tensors(self._by)
        return _replaced(self._by, _differentiated([o for o, _ in pairs], by, given, create_graph=create_graph))

    def settled(self, value: Any) -> Any:
        """``value`` without the graphs of the tensors that only depend on leaves of ours."""
        return _mapped(value, self._settle) if peek_transforms() is None else value

    def _settle(self, value: torch.Tensor) -> torch.Tensor:
        if not value.requires_grad:
            return value
        own = set(map(id, self.leaves))
        node = node_of(value)
        behind = [value] if node is None else filter(is_accumulation, reachable([node]))
        if self._is_outside_tracked and not all(id(getattr(leaf, "variable", leaf)) in own for leaf in behind):
            return value
        return native.detach(value)


def _differentiated(outputs: list[Any], inputs: list[Any], vectors: list[Any] | None, *, create_graph: bool) -> Any:
    """Like ``torch.autograd.grad``, with zeros where nothing depends on an input."""
    if not outputs:
        return [native.zeros_like(item) for item in inputs]
    options: dict[str, Any] = {"create_graph": create_graph, "retain_graph": True, "allow_unused": True}
    grads = native.grad(outputs, inputs, vectors, **options)
    return [native.zeros_like(item) if grad is None else grad for item, grad in zip(inputs, grads, strict=True)]


def _tensors(value: Any) -> list[torch.Tensor]:
    return list(iter_leaves(value, torch.Tensor))


def _replaced(value: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """``value`` with other tensors in their order."""
    others = iter(tensors)
    return _mapped(value, lambda _: next(others))


def _is_near(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two tensors are equal but for rounding, which sums make worse where their terms cancel."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not native.is_floating_point(first):
        return native.equal(first, second)
    finite = native.abs(first[native.isfinite(first)])
    near = 1e-5 * float(native.max(finite)) if native.numel(finite) else 0.0
    return native.allclose(first, second, rtol=1e-3, atol=near, equal_nan=True)
