"""The first call that a checkpoint, recomputing, makes in another way than in the forward pass.

Seen in a replay, in which checkpoints recompute as in training; a program that is recorded holds none.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from reprokit import torch_private
from reprokit.capture.operands import operands_at
from reprokit.capture.structure import tensors_in
from reprokit.program.functions import name_of, replacing
from reprokit.program.sites import find_frames, line_of, relative_path

_Made = tuple[Any, ...]  # name, code and instruction of a call, and the shapes of its results


class Recomputations(TorchFunctionMode):
    """Compares the calls of each recomputation with those of its forward pass; ``found`` is the first difference of the
    last one in words, with the operands of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""
        self._calls: dict[Any, list[_Made]] = {}  # in the forward pass, by the checkpoint's frame
        self._running: list[_Made] | None = None
        self._expected: list[_Made] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        user = find_frames(sys._getframe(1))[0] if self._running is not None else None
        if user is not None and self._running is not None and (results := tensors_in(result)):
            name, shapes = (name_of(func) or "").removeprefix("torch."), [list(one.shape) for one in results]
            made = (name, user.f_code, user.f_lasti, shapes)
            number, expected = len(self._running), self._expected
            self._running.append(made)
            if expected is not None and not self.found and expected[number : number + 1] != [made]:
                self.found = f"when recomputed, {_words(made)} ({', '.join(operands_at(user, user.f_lasti, {}))})"
                if number < len(expected):
                    self.found += f"; in its place {_words(expected[number])} in the forward pass"
        return result

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In this context checkpoints are watched."""
        module, names = torch.utils.checkpoint, torch_private.CHECKPOINT_HOOKS
        changes = [(module, name, self._watched(getattr(module, name), name == names[1])) for name in names]
        with replacing(changes):
            yield

    def _watched(self, hook: Any, is_again: bool) -> Any:
        mode = self

        class Watched(hook):  # type: ignore[misc]
            def __init__(self, frame: Any, *args: Any) -> None:
                super().__init__(frame, *args)
                self.frame = frame() if is_again else frame

            def __enter__(self) -> None:
                mode._running, mode._expected = [], mode._calls.get(self.frame) if is_again else None
                mode.found = ""
                if not is_again:
                    mode._calls[self.frame] = mode._running
                super().__enter__()
                mode.__enter__()  # type: ignore[no-untyped-call]  # a backward call leaves the modes of its caller

            def __exit__(self, *error: Any) -> None:
                mode.__exit__(*error)  # type: ignore[no-untyped-call]
                mode._running = mode._expected = None
                super().__exit__(*error)

        return Watched


def _words(made: _Made) -> str:
    name, code, instruction, shapes = made
    return f"`{name}` ({relative_path(code.co_filename)}:{line_of(code, instruction)}) gives {shapes[0]}"
