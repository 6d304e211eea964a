"""The environment is collected as plain data, within its time, and without raising."""

from __future__ import annotations

import json
import platform
import subprocess
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reprokit import native
from reprokit.grammar import plain_of, read
from reprokit.snapshot import environment
from reprokit.snapshot.environment import Environment, collect_environment, collect_switches


def test_versions_and_text_are_plain_data(tmp_path: Path) -> None:
    collected = collect_environment()
    assert collected.torch == torch.__version__
    assert collected.python == platform.python_version()
    assert "PyTorch version" in collected.collect_env
    json.dumps(plain_of(collected))
    torch.save(plain_of(collected), tmp_path / "environment.pt")
    assert read(Environment, torch.load(tmp_path / "environment.pt", weights_only=True)) == collected


def test_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(environment, "_collect_env_here", lambda found: is_over.wait(60) or found.append("too late"))
    assert collect_environment(timeout=0.05).collect_env == ""
    is_over.set()


def test_modules_beside_the_script_do_not_shadow_torch_and_no_device_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(native, "cuda_is_available", lambda: True)
    monkeypatch.setattr(environment, "_collect_env_here", None)
    assert "PyTorch version" in environment._collect_env_text(60)


def test_switches_tell_what_is_set() -> None:
    before = torch.get_num_threads()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    try:
        switches = collect_switches()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)
    assert switches["deterministic_algorithms"]
    assert switches["deterministic_warn_only"]
    assert switches["num_threads"] == 1


def test_switches_that_torch_refuses_to_tell(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    code = """
        import torch
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        from reprokit.snapshot.environment import collect_switches
        switches = collect_switches()
        assert switches["fp32_precision_cuda_matmul"] == "tf32"
        assert "num_threads" in switches
    """
    result = run_python("-c", textwrap.dedent(code))
    assert result.returncode == 0, result.stderr
