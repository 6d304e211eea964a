"""What tests of candidates in other processes share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprokit.shrink import apart as isolated
from tests.conftest import ROOT


@pytest.fixture
def importable_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find the checks by name."""
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def nothing_is_left_behind() -> Iterator[None]:
    """No process and no descriptor more than before."""
    isolated.can_fork()
    processes, descriptors = children(), num_descriptors()
    yield
    assert children() <= processes
    assert num_descriptors() <= descriptors


def children() -> set[str]:
    """The process ids of this process's children, those not waited for included."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {child for task in tasks for child in task.read_text().split()}


def num_descriptors() -> int:
    """How many files this process has open."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
