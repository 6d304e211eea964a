"""Comparing the ranks in every step that they play together: the first step after which their parameters differ.

Every rank plays its own steps. After each the ranks exchange hashes of their parameters through the store, so all find
the same step. Then they exchange those from before its update: if they were equal, the update made them differ.
"""

from __future__ import annotations

from types import FrameType

from reprokit.capture.record import kinds
from reprokit.capture.record.compact_steps import PastStep
from reprokit.capture.record.entry import Entry
from reprokit.capture.rewind.meeting import Meeting
from reprokit.capture.rewind.replicas import Replicas
from reprokit.locate.failure import RankDifference
from reprokit.program.ir import Site
from reprokit.program.sites import make_site


class RankMeter:
    """Is shown every entry that a rewind plays (see `Watcher`), and compares the ranks when a step is over.

    ``difference`` is the first one, ``number`` the position of its step, ``-1`` if the ranks differ before they have
    played any. ``is_by_update``: an optimizer has made it. ``site`` is where it has stepped, or where this
    rank has written parameters in that step. ``frame`` is where the loop stands.
    """

    def __init__(self, together: Meeting, replicas: Replicas, frame: FrameType | None) -> None:
        self.difference: RankDifference | None = None
        self.number = -1
        self.is_by_update = False
        self.site: Site | None = None
        self._together = together
        self._replicas = replicas
        self._frame = frame
        self._step: PastStep | None = None
        self._updated = ""  # the digest before the update
        self._update: Entry | None = None
        self._then = ""

    def before(self, step: PastStep, entry: Entry) -> None:
        """Note what an update begins with; a new step ends the one before."""
        if step is not self._step:
            self.end_step()
            if self.difference is None:
                self._step, self._updated, self.site = step, "", None
                self._update = None
                self.number += 1
        if self.difference is not None:
            return
        if entry.kind is kinds.OPTIMIZER:
            self._updated, self._update = self._replicas.digest(), entry
        elif entry.writes_state:
            self._then = self._replicas.digest()

    def after(self, entry: Entry) -> None:
        """Note the line that has written parameters."""
        if self.difference is None and entry.writes_state and self._replicas.digest() != self._then:
            self.site = _site(entry)

    def end_step(self) -> None:
        """Compare the ranks after the step that was played last, or before the first one; not after a difference."""
        if self.difference is not None:
            return
        self.difference = self._replicas.compare(self._together.tell, self._together.rank, self._frame)
        if self.difference is not None:
            found, updated = self.difference, self._together.tell(self._updated)
            self.is_by_update = updated[found.ranks[0]] == updated[found.reference] != ""
            if self.is_by_update and self._update is not None:
                self.site = _site(self._update)


def _site(entry: Entry) -> Site | None:
    return make_site(entry.code, entry.instruction, entry.library) if entry.code is not None else None
