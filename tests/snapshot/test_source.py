"""The source is described with and without a repository, a git program, a branch, a commit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import git
import pytest

from reprokit.snapshot import source
from reprokit.snapshot.source import SourceState, describe_source


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[git.Repo]:
    repository = git.Repo.init(tmp_path / "project", initial_branch="trunk")
    with repository.config_writer() as config:
        config.set_value("user", "name", "Ada")
        config.set_value("user", "email", "ada@example.org")
    script = Path(repository.working_dir, "train.py")
    script.write_text("print(1)\n")
    repository.index.add(["train.py"])
    repository.index.commit("first")
    yield repository
    repository.close()


def script_of(repository: git.Repo) -> Path:
    return Path(repository.working_dir, "train.py")


def test_a_clean_repository(repository: git.Repo) -> None:
    repository.create_remote("origin", "https://me:secret-value@example.org/org/project.git")
    described = describe_source(script_of(repository), ["train.py", "--lr", "0.1"])
    assert described == SourceState(
        command=("train.py", "--lr", "0.1"),
        commit=repository.head.commit.hexsha,
        branch="trunk",
        remote="https://example.org/org/project.git",
        dirty=False,
        file="train.py",
    )


def test_uncommitted_changes(repository: git.Repo) -> None:
    script_of(repository).write_text("print(2)\napi_key = 'abcdef123456'\n")
    described = describe_source(script_of(repository), [])
    assert described.dirty
    assert "+print(2)" in described.diff
    assert "abcdef123456" not in described.diff
    assert not described.diff_truncated


def test_a_large_diff_is_cut(repository: git.Repo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_DIFF_CHARACTERS", 100)
    script_of(repository).write_text("print(2)\n" * 1000)
    described = describe_source(script_of(repository), [])
    assert len(described.diff) <= 100
    assert described.diff_truncated


def test_before_the_first_commit(tmp_path: Path) -> None:
    git.Repo.init(tmp_path, initial_branch="trunk").close()
    script = tmp_path / "train.py"
    script.write_text("")
    described = describe_source(script, [])
    assert described.commit is None
    assert described.branch == "trunk"
    assert described.remote is None


@pytest.mark.parametrize("path", [None, Path("-m"), Path("nowhere/train.py")])
def test_without_a_repository(path: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert describe_source(path, ["-m", "train"]) == SourceState(("-m", "train"))


def test_without_a_git_program(repository: git.Repo) -> None:
    code = "import sys; from pathlib import Path; from reprokit.snapshot.source import describe_source\n"
    code += "print(describe_source(Path(sys.argv[1]), ['train.py']))"
    root = Path(source.__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code, str(script_of(repository))],
        env={"PATH": "/nowhere", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("SourceState(command=('train.py',), commit=None, branch=None, remote=None")
    assert result.stderr == ""
