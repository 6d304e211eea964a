"""The environment of a run: versions, devices, determinism switches, the environment variables that matter.

Collected once, after a failure: ``collect_env`` asks the system and may take seconds, so it has a time limit. Nothing
here raises; what cannot be found out is left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from reprokit import native
from reprokit.errors import attempt, ignored_errors
from reprokit.grammar import Line, Name, Scalar, Text
from reprokit.snapshot.redact import redact_text, select_variables

COLLECT_SECONDS = 30.0
_NEAR_TORCH = ("torch", "numpy", "triton", "optree", "onnx", "mypy", "flake8", "nvidia-", "cuda", "intel-", "mkl")
_LIBRARIES = ("accelerate", "deepspeed", "lightning", "numpy", "pytorch_lightning", "transformers", "triton")


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions, devices, switches of torch and environment variables; empty: unknown."""

    python: Line = ""
    torch: Line = ""
    platform: Line = ""
    machine: Line = ""
    libraries: Mapping[Name, Line] = field(default_factory=dict)
    cuda: Line | None = None
    cudnn: int | None = None
    devices: tuple[Line, ...] = ()
    switches: Mapping[Name, Scalar] = field(default_factory=dict)
    variables: Mapping[Name, Line] = field(default_factory=dict)
    collect_env: Text = ""


def collect_environment(timeout: float = COLLECT_SECONDS) -> Environment:
    """Everything about the environment; ``collect_env`` is empty when it takes over ``timeout`` s."""
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in _LIBRARIES}
    return Environment(
        python=platform.python_version(),
        torch=str(torch.__version__),
        platform=redact_text(platform.platform()),
        machine=platform.machine(),
        libraries={name: str(version) for name, version in versions.items() if version is not None},
        cuda=torch.version.cuda,
        cudnn=attempt(torch.backends.cudnn.version) if torch.version.cuda is not None else None,
        # The accelerators in use; a device that the program never started is not started for this.
        devices=(attempt(_device_names) if native.cuda_is_initialized() else None) or (),  # type: ignore[no-untyped-call]
        switches=collect_switches(),
        variables=select_variables(os.environ),
        collect_env=redact_text(_collect_env_text(timeout)),
    )


def collect_switches() -> dict[str, Any]:
    """The global settings of torch that change the bits of a result.

    Torch refuses to answer the older of two questions about the same switch once the newer has been used, so a
    question that raises is left out.
    """
    answers: dict[str, Any] = {}
    for name, question in _SWITCHES.items():
        with ignored_errors():
            answers[name] = question()
    return answers


def _device_names() -> tuple[str, ...]:
    return tuple(map(torch.cuda.get_device_name, range(native.cuda_device_count())))


def _flushes_denormals() -> bool:
    """True if subnormal numbers count as zero on the CPU; there is no getter, so a product tells."""
    with native.DisableTorchFunction():
        return bool(native.item(native.tensor(1e-30) * native.tensor(1e-10) == 0))


def _collect_env_text(timeout: float) -> str:
    """The text of ``torch.utils.collect_env``; empty when it fails or takes too long.

    It would start the accelerator if the program has not, so then it runs in a process of its own.
    """
    if native.cuda_is_available() and not native.cuda_is_initialized():  # type: ignore[no-untyped-call]
        command = [sys.executable, "-P", "-m", "torch.utils.collect_env"]
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=True)
            return done.stdout.decode(errors="replace").strip()
        return ""
    found: list[str] = []
    thread = threading.Thread(target=_collect_env_here, args=(found,), daemon=True, name="reprokit-collect-env")
    thread.start()
    thread.join(timeout)
    return found[0].strip() if found else ""


def _collect_env_here(found: list[str]) -> None:
    with ignored_errors():
        spec = importlib.util.find_spec("torch.utils.collect_env")
        assert spec is not None and spec.loader is not None, "torch has this module"
        module = importlib.util.module_from_spec(spec)  # a copy: only ours does not ask pip
        spec.loader.exec_module(module)
        module.get_pip_packages = _packages  # type: ignore[attr-defined]
        found.append(module.get_pretty_env_info())


def _packages(*_: object, **__: object) -> tuple[str, str]:
    """The installed packages near torch; pip takes half a second, and torch sets a variable of the environment for
    it."""
    found = {package.name: f"{package.name}=={package.version}" for package in metadata.distributions()}
    lines = (found[name] for name in sorted(found, key=str.lower))
    return "pip3", "\n".join(line for line in lines if any(part in line for part in _NEAR_TORCH))


_SWITCHES: dict[str, Callable[[], Any]] = {
    "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "cudnn_enabled": lambda: torch.backends.cudnn.enabled,
    "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn_deterministic": lambda: torch.backends.cudnn.deterministic,
    "cudnn_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "matmul_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "matmul_precision": torch.get_float32_matmul_precision,
    # Not every torch from 2.6 on has these.
    "fp32_precision": lambda: torch.backends.fp32_precision,  # type: ignore[attr-defined]
    "fp32_precision_cuda_matmul": lambda: torch.backends.cuda.matmul.fp32_precision,
    "fp32_precision_cudnn_conv": lambda: torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
    "fp32_precision_mkldnn_matmul": lambda: torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
    "num_threads": torch.get_num_threads,
    "default_dtype": lambda: str(native.get_default_dtype()),
    "flush_denormal": _flushes_denormals,
    "anomaly_mode": torch.is_anomaly_enabled,
}
