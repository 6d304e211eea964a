"""Hooks into the parts of torch that end or shape a step: optimizers, grad scalers, clipping, ``autograd.backward``.

Everything is put in place by `Hooks.install` and taken away by `Hooks.remove`; nothing is left on the user's objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import optimizer as optimizers


class Listener(Protocol):
    """Who is told."""

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """An optimizer's step begins; may return other arguments for it."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step ended."""

    def around(self, kind: str, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform ``target`` as one thing (``clip``, ``scale``, ``unscale``, ``scaler_step``,
        ``scaler_update``)."""

    def zero_grad(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform ``target``, which forgets gradients."""

    def differentiate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform ``torch.autograd.backward`` called by the loop itself."""


class Hooks:
    """Installs and removes all hooks of one capture."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Put the hooks in place."""
        listener = self._listener
        before = optimizers.register_optimizer_step_pre_hook(
            lambda optimizer, args, kwargs: listener.before_step(optimizer, args, kwargs)
        )
        after = optimizers.register_optimizer_step_post_hook(
            lambda optimizer, args, kwargs: listener.after_step(optimizer)
        )
        self._undo += [before.remove, after.remove]
        self._wrap_zero_grad(torch.optim.Optimizer)
        self._wrap_zero_grad(torch.nn.Module)
        self._wrap(torch.amp.GradScaler, "scale", "scale")
        self._wrap(torch.amp.GradScaler, "_unscale_grads_", "unscale")
        self._wrap(torch.amp.GradScaler, "step", "scaler_step")
        self._wrap(torch.amp.GradScaler, "update", "scaler_update")
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._wrap(torch.nn.utils, name, "clip")
        self._wrap_backward()

    def remove(self) -> None:
        """Take all hooks away."""
        while self._undo:
            self._undo.pop()()

    def _wrap_zero_grad(self, owner: Any) -> None:
        original, listener = owner.zero_grad, self._listener

        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            return listener.zero_grad(original, args, kwargs)

        _imitate(zero_grad, original)
        owner.zero_grad = zero_grad
        self._undo.append(lambda: setattr(owner, "zero_grad", original))

    def _wrap(self, owner: Any, name: str, kind: str) -> None:
        original = getattr(owner, name)
        listener = self._listener

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return listener.around(kind, original, args, kwargs)

        _imitate(wrapper, original)
        setattr(owner, name, wrapper)
        self._undo.append(lambda: setattr(owner, name, original))

    def _wrap_backward(self) -> None:
        original = torch.autograd.backward
        listener = self._listener

        def backward(*args: Any, **kwargs: Any) -> Any:
            return listener.differentiate(original, args, kwargs)

        _imitate(backward, original)
        torch.autograd.backward = backward
        self._undo.append(lambda: setattr(torch.autograd, "backward", original))


def _imitate(wrapper: Any, original: Any) -> None:
    wrapper.__name__ = original.__name__
    wrapper.__qualname__ = original.__qualname__
    wrapper.__doc__ = original.__doc__
    wrapper.__wrapped__ = original
