"""``pytest --reprokit``: saves the first failing step of a training test, and adds the snapshot to the test's report.

A test is watched while it runs and goes on after a capture, so its outcome is its own. The snapshot of a test that does
not fail is removed. Without the option, or where the test's module has not imported torch, nothing is done.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from reprokit.capture.failure_text import captured_lines

_SESSION = pytest.StashKey[Any]()  # of the `Session`, whose module imports torch


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("reprokit", "saving failing training steps")
    group.addoption("--reprokit", action="store_true", help="Save the first failing step of a training test.")
    group.addoption("--reprokit-dir", metavar="DIR", default=".", help="The folder for snapshots.")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    if not item.config.getoption("reprokit") or "torch" not in sys.modules:
        return (yield)
    from reprokit.capture.session import Session

    folder = Path(item.config.getoption("reprokit_dir"))
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "-", item.name).strip("-")[:80]
    item.stash[_SESSION] = session = Session(name=name, directory=folder, after="continue", quiet=True)
    with session:
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what was captured to the report of a test that failed."""
    report = yield
    session = item.stash.get(_SESSION, None) if call.when == "call" else None
    for path, result in zip(session.snapshots, session.results, strict=True) if session is not None else ():
        if report.failed:
            report.sections.append(("reprokit", "\n".join(captured_lines(path, result, None))))
            item.user_properties.append(("reprokit", str(path)))  # a JUnit file has those of the last report
        else:
            path.unlink(missing_ok=True)
    return report
