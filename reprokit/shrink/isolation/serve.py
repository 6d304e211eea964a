"""The worker's side: a fresh interpreter that observes one candidate after another, and ends with its parent.

The first message is the task; each later one is a candidate, and is answered with its report. Tensors that the next
candidate uses again stay here, so that a large model is sent once.
"""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection

from reprokit.shrink.isolation.running import become_expendable
from reprokit.shrink.isolation.task import Report, Task
from reprokit.shrink.isolation.transport import Tensors, pack_report, unpack

READY = b"ready"


def serve(descriptor: int, parent: int) -> None:
    """Answer until the other side hangs up."""
    connection: Connection[bytes, bytes] = Connection(descriptor)
    try:
        task: Task = pickle.loads(connection.recv_bytes())
    except Exception as error:  # the task is code of somebody's, and may fail to load in any way
        connection.send_bytes(f"{type(error).__name__}: {error}".encode())
        return
    become_expendable(parent)
    connection.send_bytes(READY)
    held: Tensors = {}
    while True:
        try:
            packed = connection.recv_bytes()
        except EOFError:
            return
        report, held = _observe(task, packed, held)
        connection.send_bytes(pack_report(report))


def _observe(task: Task, packed: bytes, held: Tensors) -> tuple[Report, Tensors]:
    try:
        candidate, held = unpack(packed, held)
    except Exception as error:  # a candidate that cannot be loaded here cannot be run either
        return Report(error=error), held
    return task.report(candidate), held
