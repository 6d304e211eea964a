"""The first call that a checkpoint, recomputing, makes in another way than in the forward pass.

Seen in a replay, in which checkpoints recompute as in training; a program that is recorded holds none.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from reprokit import torch_private
from reprokit.capture.operands import operands_at
from reprokit.capture.structure import tensors_in
from reprokit.program.functions import called_function, name_of, replacing
from reprokit.program.sites import find_frames, relative_path


class Recomputations(TorchFunctionMode):
    """Compares the calls of each recomputation with those of its forward pass; ``found`` is the first difference of the
    last one in words, with the operands of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""
        self._calls: dict[Any, list[str]] = {}  # in the forward pass, by the checkpoint's frame
        self._running: list[str] = []
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}  # by forward passes
        self._expected: list[str] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        func = called_function(func, sys._getframe(1))
        result = func(*args, **(kwargs or {}))
        results = list(result) if func is torch.Tensor.__iter__ else tensors_in(result)
        result = iter(results) if func is torch.Tensor.__iter__ else result
        if self._expected is None:
            self._made.update((id(one), weakref.ref(one)) for one in results)
        user = find_frames(sys._getframe(1))[0]
        if user is not None and results:
            name, file = (name_of(func) or "").removeprefix("torch."), relative_path(user.f_code.co_filename)
            made, place = f"`{name}` ({file}:{user.f_lineno}) gives {[*results[0].shape]}", len(self._running)
            self._running.append(made)
            other = self._expected[place : place + 1] if self._expected is not None else [made]
            if other != [made] and not self.found:
                old = (one for one in tensors_in(args) if id(one) in self._made and self._made[id(one)]() is one)
                notes = dict.fromkeys(map(id, old), "which the forward pass made and something has kept")
                self.found = f"when recomputed, {made} ({', '.join(operands_at(user, user.f_lasti, notes))})"
                self.found += "".join(f"; in its place {one} in the forward pass" for one in other)
        return result

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In this context checkpoints are watched."""
        mode, module = self, torch.utils.checkpoint

        def watched(hook: Any, is_again: bool) -> Any:
            class Watched(hook):  # type: ignore[misc]
                def __init__(self, frame: Any, *args: Any) -> None:
                    super().__init__(frame, *args)
                    self.frame = frame() if is_again else frame

                def __enter__(self) -> None:
                    mode.found, mode._running = "", []
                    mode._expected = mode._calls.get(self.frame) if is_again else None
                    mode._calls.setdefault(self.frame, mode._running)
                    super().__enter__()
                    mode.__enter__()  # type: ignore[no-untyped-call]  # a backward call leaves its caller's modes

                def __exit__(self, *error: Any) -> None:
                    mode.__exit__(*error)  # type: ignore[no-untyped-call]
                    super().__exit__(*error)

            return Watched

        names = torch_private.CHECKPOINT_HOOKS
        with replacing([(module, name, watched(getattr(module, name), name == names[1])) for name in names]):
            yield
