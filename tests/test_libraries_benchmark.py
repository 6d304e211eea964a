"""The judge of other people's suites: what it reads from a run of pytest, and what it calls a difference."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import import_benchmark

LIBRARIES = import_benchmark("libraries")
Difference = LIBRARIES.Difference

SUITE = """\
import os, sys, warnings
import pytest

@pytest.fixture
def broken_end():
    yield
    raise OSError("the fixture")

def test_passes():
    print("reprokit: could not save the failing step (OSError: full); training goes on", file=sys.stderr)

def test_fails():
    warnings.warn("odd", UserWarning)
    assert os.environ.get("IS_WATCHED") != "1"

def test_ends_badly(broken_end):
    pass

@pytest.mark.skip
def test_skipped():
    pass

@pytest.mark.xfail
def test_expected():
    assert False

def test_last():
    pass
"""


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suites of these tests need none, and importing those of this environment takes a second each time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def suite_in(folder: Path, text: str = SUITE) -> object:
    """A suite of one file, which runs with this Python."""
    source = folder / "source"
    source.mkdir()
    (source / "test_some.py").write_text(text)
    library = LIBRARIES.Library("some", needs=(), tests=("test_some.py",), shape="")
    return LIBRARIES.Suite(library, Path(sys.executable), source, folder, limit=120.0)


def test_a_run_is_read_from_the_reporter(tmp_path: Path) -> None:
    suite = suite_in(tmp_path)
    run = suite.run("bare", LIBRARIES.BARE)
    assert run.outcomes == {
        "test_some.py::test_passes": "passed",
        "test_some.py::test_fails": "passed",
        "test_some.py::test_ends_badly": "error",
        "test_some.py::test_skipped": "skipped",
        "test_some.py::test_expected": "xfail skipped",
        "test_some.py::test_last": "passed",
    }
    assert run.code == 1
    key = ("test_some.py::test_fails", "builtins.UserWarning", f"{tmp_path / 'source' / 'test_some.py'}:13")
    assert run.warnings == {key: 1}
    assert run.texts == {key: "odd"}
    assert run.lines == ["reprokit: could not save the failing step (OSError: full); training goes on"]
    assert suite.kept("bare") == run


def test_a_test_that_ends_otherwise_every_time_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = suite_in(tmp_path)
    (tmp_path / "watching.py").write_text("import os\nos.environ['IS_WATCHED'] = '1'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    way = LIBRARIES.Way((), ("-p", "watching"))
    bare = suite.run("bare", LIBRARIES.BARE)
    found = LIBRARIES.differences(bare, suite.run("watched", way))
    expected = Difference("test", "test_some.py::test_fails", "passed -> failed")
    by_chance = Difference("test", "test_some.py::test_passes", "passed -> failed")
    assert found == {expected}
    assert LIBRARIES.confirmed(suite, way, {expected, by_chance}, list(bare.outcomes)) == {expected}
    again = suite.kept("watched-3")
    assert list(again.outcomes) == ["test_some.py::test_passes", "test_some.py::test_fails"]


def test_a_crash_leaves_what_came_before(tmp_path: Path) -> None:
    text = "import os\ndef test_one(): pass\ndef test_two(): os._exit(7)\n"
    run = suite_in(tmp_path, text).run("bare", LIBRARIES.BARE)
    assert run.code == 7
    assert run.outcomes == {"test_some.py::test_one": "passed", "test_some.py::test_two": "unfinished"}


def test_a_missing_test_and_other_warnings_are_differences() -> None:
    key = ("t.py::test_b", "builtins.UserWarning", "/a/recorder.py:3")
    event = {"test": key[0], "category": key[1], "file": "/a/recorder.py", "line": 3, "warning": "odd", "when": "call"}
    ends = [
        json.dumps({"test": f"t.py::test_{name}", "when": "call", "outcome": "passed", "lines": []}) for name in "ab"
    ]
    bare = LIBRARIES.read_run(ends, "", 0, 1.0)
    watched = LIBRARIES.read_run([ends[0], json.dumps(event)], "", 3, 1.0)
    assert LIBRARIES.differences(bare, watched) == {
        Difference("test", "t.py::test_b", "passed -> missing"),
        Difference("warning", "t.py::test_b", "builtins.UserWarning at /a/recorder.py:3: 0 -> 1"),
        Difference("exit code", "", "0 -> 3"),
    }
    assert LIBRARIES.differences(bare, bare) == set()


def test_the_last_test_that_is_needed() -> None:
    order = ["a", "b", "c"]
    of = LIBRARIES.last_of
    assert of([Difference("test", "b", ""), Difference("warning", "a", "")], order) == "b"
    assert of([Difference("test", "b", ""), Difference("exit code", "", "")], order) == "b"
    assert of([Difference("warning", "", "")], order) == ""
    assert of([Difference("exit code", "", "")], order) == ""


@pytest.mark.parametrize(
    ("line", "is_trouble"),
    [
        ("reprokit: could not save the failing step (OSError: disk is full); training goes on", True),
        ("reprokit: switched off after an error of its own (KeyError: 3); training goes on", True),
        ("reprokit: cannot watch this run (KeyError: 3); it goes on unwatched", True),
        ("reprokit: early warning is off after an error of its own (KeyError: 3); training goes on", True),
        ("reprokit: step 3: RuntimeError: could not open the file", False),
        ("reprokit: watching `pytest`; a failing step goes to `failing.pt`", False),
    ],
)
def test_lines_of_trouble(line: str, is_trouble: bool) -> None:
    run = LIBRARIES.read_run(
        [json.dumps({"test": "t", "when": "call", "outcome": "passed", "lines": [line]})], "", 0, 1.0
    )
    row = LIBRARIES.Row("some")
    LIBRARIES.fill(row, run, run)
    assert row.trouble == [line] * is_trouble
    assert row.is_harmless is not is_trouble


def test_a_warning_that_names_a_file_of_reprokit_is_harm() -> None:
    place = "/lib/site-packages/reprokit/capture/world.py"
    event = {
        "test": "t",
        "category": "builtins.UserWarning",
        "file": place,
        "line": 3,
        "warning": "odd",
        "when": "call",
    }
    end = json.dumps({"test": "t", "when": "call", "outcome": "passed", "lines": []})
    row = LIBRARIES.Row("some")
    LIBRARIES.fill(row, LIBRARIES.read_run([end], "", 0, 1.0), LIBRARIES.read_run([end, json.dumps(event)], "", 0, 1.0))
    assert row.ours == [f"{place}:3 builtins.UserWarning"]
    assert not row.is_harmless
    assert "| some  | 1 | 1 | 0 | 0, 1 | 1 | 0 | 1, 1 |" in LIBRARIES.table([row])


def test_archives_are_found_by_any_spelling(tmp_path: Path) -> None:
    for name in ("pyro_ppl-1.9.2.tar.gz", "pyro_ppl_extras-1.0.tar.gz"):
        (tmp_path / name).touch()
    assert LIBRARIES.find_archive("Pyro-PPL", tmp_path) == tmp_path / "pyro_ppl-1.9.2.tar.gz"
    assert LIBRARIES.find_archive("pyro", tmp_path) is None


def test_the_list_can_be_read() -> None:
    found = LIBRARIES.read_list(LIBRARIES.LIST)
    assert len(found) >= 10
    assert all(library.tests and library.shape for library in found)


def test_an_unknown_library_is_an_error(tmp_path: Path) -> None:
    assert LIBRARIES.main([str(tmp_path), "--library", "no-such"]) == 2
    assert list(tmp_path.iterdir()) == []
