"""Several processes: who is there, agreeing at an update, playing in lockstep, stopping together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reprokit.capture.judge import Outcome, Pending
    from reprokit.capture.loop import Loop
    from reprokit.capture.save import Describing, Made
    from reprokit.capture.tape import Op, Segment


class Parted(Exception):
    """A rank has not answered, as the text says; going back or copying at one step is over."""


class SavedElsewhere(Exception):
    """Going back has shown that ``rank`` made the bad value; that rank saves its step."""


class Together:
    """All ranks play the same steps."""


class Ranks:
    """The state of the other processes as seen from this one."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.is_parallel = self.is_sharded = self.is_apart = False
        self.goes_back = self.has_missed = False
        self.meeting: Any = None
        self.due_at = 2

    is_alone = True

    def meet(self) -> None: ...

    def meet_averaging(self, group: Any) -> None: ...

    def begin_update(self, optimizer: Any) -> None: ...

    def end_update(self) -> None: ...

    def withdraw(self, step: int) -> None: ...

    def hurry(self) -> None: ...

    def part(self) -> None: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...

    def compare(self) -> None: ...

    def tell_at_end(self) -> None: ...

    def check_at_end(self, *, has_failed: bool) -> None: ...

    def describe(self) -> dict[str, Any]:
        return {}

    def is_of_peer(self, error: BaseException) -> bool:
        return False

    def stops_replay(self, error: BaseException) -> bool:
        return False

    def before_parting(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return target(*args, **kwargs)
