"""The results of the ranks' checks, good and bad, in memory that the processes of one machine share.

Every rank looks or writes once a step, which takes a microsecond here and a hundred at the store. Memory is as sure as
the store: a rank reports a bad value there before its last gradients are averaged, and the others read when theirs are.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from array import array
from pathlib import Path
from typing import Any

_NONE = -1
_ATTEMPTS = 20  # steps for all ranks to map the memory; later they ask the store
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # of the kernel, which processes in containers may share


class Reports:
    """Two numbers for each rank, in a file that rank 0 makes and every rank maps that finds it; the store says where.

    The file is removed as soon as all ranks have it. They look only at what all of them share. The numbers are the step
    in which a rank has found a bad value, and the last check of an update at which its gradients were good.
    """

    def __init__(self, store: Any, prefix: str, rank: int, size: int) -> None:
        self.are_shared = False
        self._store = store
        self._prefix = f"{prefix}/reports"
        self._rank = rank
        self._size = size
        self._own = self._last_good = _NONE
        self._steps: memoryview | None = None
        self._good: memoryview | None = None
        self._keys = [f"{self._prefix}/{other}" for other in range(size)]
        self._attempts = _ATTEMPTS
        self._path = ""
        if rank == 0:
            with contextlib.suppress(OSError):
                self._make()

    def set(self, step: int | None) -> None:
        """The step in which this rank has found a bad value, ``None`` for none."""
        self._own = _NONE if step is None else step
        if self._steps is not None:
            self._steps[self._rank] = self._own

    def hold(self, step: int) -> bool | None:
        """True if any rank has reported for this step; ``None`` if only the store knows."""
        if not self.are_shared and self._attempts:
            self._attempts -= 1
            self._share()
        return step in self._steps if self.are_shared and self._steps is not None else None

    def pass_check(self, number: int) -> None:
        """The gradients of this rank were good at its check with this number."""
        self._last_good = number
        if self._good is not None:
            self._good[self._rank] = number
        if not self.are_shared and self._attempts:
            self._attempts -= 1
            self._share()

    def ranks_past(self, number: int) -> frozenset[int] | None:
        """The ranks whose gradients were good at the check with this number, or a later one; ``None`` if not known."""
        if not self.are_shared and self._attempts:
            self._share()
        if not self.are_shared or self._good is None:
            return None
        return frozenset(rank for rank, passed in enumerate(self._good) if passed >= number)

    def close(self) -> None:
        """Remove the file, if it is there still."""
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._path = ""

    def _make(self) -> None:
        boot = _BOOT.read_text()
        file, self._path = tempfile.mkstemp(prefix="reprokit-")
        with open(file, "wb") as opened:
            opened.write(array("q", [_NONE] * (2 * self._size)).tobytes())
            status = os.fstat(file)
        self._store.set(self._prefix, f"{boot.strip()} {status.st_dev} {status.st_ino} {self._path}")

    def _share(self) -> None:
        if self._steps is None and self._store.check([self._prefix]):
            with contextlib.suppress(OSError):
                self._map(str(self._store.get(self._prefix), "utf-8"))
        self.are_shared = self._steps is not None and self._store.check(self._keys)
        if self.are_shared or not self._attempts:
            self.close()

    def _map(self, place: str) -> None:
        """Map the file, if it is the one that rank 0 has made; raises `OSError`."""
        boot, device, inode, path = place.split(" ", 3)
        with open(path, "r+b") as file:
            status = os.fstat(file.fileno())
            if boot != _BOOT.read_text().strip() or (device, inode) != (str(status.st_dev), str(status.st_ino)):
                raise FileNotFoundError(path)
            numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._steps, self._good = numbers[: self._size], numbers[self._size :]
        self._steps[self._rank], self._good[self._rank] = self._own, self._last_good
        self._store.set(self._keys[self._rank], "yes")
