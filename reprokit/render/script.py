"""The repro script: a program in Python that says what it shows, runs, prints what it observed and asserts.

It needs torch and nothing of reprokit. It ends with exit code 1 while the bug is there and with 0 once it is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from reprokit.locate.failure import Failure
from reprokit.program.ir import Program
from reprokit.program.run import Tensors
from reprokit.render.check import find_subject, write_check
from reprokit.render.code import SIDE_FILE, write_program
from reprokit.render.environment import render_template
from reprokit.render.wording import headline, phase_words
from reprokit.snapshot.redact import redact_text

REPRO_FILE = "repro.py"


@dataclass(frozen=True, slots=True)
class Script:
    """The text of a repro, the tensors that its side file holds, and its variables by the names of the inputs."""

    text: str
    side: Mapping[str, torch.Tensor] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_lines(self) -> int:
        """Lines that are neither blank nor comment."""
        lines = (line.strip() for line in self.text.splitlines())
        return sum(bool(line) and not line.startswith("#") for line in lines)

    @property
    def files(self) -> list[str]:
        """The files that running it takes."""
        return [REPRO_FILE, SIDE_FILE] if self.side else [REPRO_FILE]

    def write(self, folder: Path) -> Path:
        """Write the script and its side file into ``folder``; the path of the script."""
        path = folder / REPRO_FILE
        path.write_text(self.text, encoding="utf-8")
        if self.side:
            torch.save(dict(self.side), folder / SIDE_FILE)
        else:
            (folder / SIDE_FILE).unlink(missing_ok=True)
        return path


def write_script(
    program: Program,
    tensors: Tensors,
    failure: Failure,
    *,
    num_calls_before: int | None = None,
    torch_version: str | None = None,
) -> Script:
    """The repro of a program that fails; raises `NotReproduced` when it does not."""
    subject = find_subject(program, tensors, failure)
    code = write_program(program, tensors, keep=[subject.value] if subject is not None else [])
    text = render_template(
        "repro.py.j2",
        header=list(_header(program, failure, num_calls_before, torch_version or torch.__version__)),
        imports=code.imports,
        inputs=code.inputs,
        body=code.body,
        check=write_check(subject, failure, code) if subject is not None else [],
    )
    names = {item.name: code.names[item.value] for item in program.inputs if item.value in code.names}
    return Script(text, code.side, names)


def _header(program: Program, failure: Failure, num_calls_before: int | None, version: str) -> list[str]:
    what = redact_text(headline(failure)).replace("\n", " ")
    lines = [f"{what} {phase_words(failure)} (torch {version})."]
    if num_calls_before is not None:
        was, now = num_calls_before, program.num_calls
        lines.append(f"Reduced mechanically by reprokit from {was} torch calls of a training step to {now}.")
    lines.append("Ends with exit code 1 while the bug is there, and with 0 once it is gone.")
    return lines
