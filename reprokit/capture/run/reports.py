"""The steps in which ranks have reported a bad value, in memory that the processes of one machine share.

Every rank looks once a step, which takes a microsecond here and a hundred at the store. Memory is as sure as the store:
a rank writes there before its last gradients are averaged, and the others read when theirs are.
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
    """One number for each rank, in a file that rank 0 makes and every rank maps that finds it; the store says where.

    The file is removed as soon as all ranks have it. They look only at what all of them share.
    """

    def __init__(self, store: Any, prefix: str, rank: int, size: int) -> None:
        self.are_shared = False
        self._store = store
        self._prefix = f"{prefix}/reports"
        self._rank = rank
        self._own = _NONE
        self._steps: memoryview | None = None
        self._keys = [f"{self._prefix}/{other}" for other in range(size)]
        self._attempts = _ATTEMPTS
        self._path = ""
        if rank == 0:
            with contextlib.suppress(OSError):
                self._make(size)

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

    def close(self) -> None:
        """Remove the file, if it is there still."""
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._path = ""

    def _make(self, size: int) -> None:
        boot = _BOOT.read_text()
        file, self._path = tempfile.mkstemp(prefix="reprokit-")
        with open(file, "wb") as opened:
            opened.write(array("q", [_NONE] * size).tobytes())
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
            self._steps = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._steps[self._rank] = self._own
        self._store.set(self._keys[self._rank], "yes")
