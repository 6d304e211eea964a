"""The repro script: a program in Python that names its failure, runs, prints its observation and asserts.

It needs torch and nothing of reprokit. It ends with exit code 1 while the failure is there and with 0 once it is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from reprokit.errors import UsageError
from reprokit.locate.failure import Failure
from reprokit.program.interpreter import Tensors
from reprokit.program.ir import Program
from reprokit.render import source
from reprokit.render.gate import require_closed
from reprokit.render.kinds import parts_of, words_of
from reprokit.render.printer import SIDE_FILE
from reprokit.snapshot.files import REPRO_FILE, replaced, write_text
from reprokit.snapshot.redact import redact_text
from reprokit.words import counted, visible_line

NOT_VERIFIED = "Verification has not run yet."


@dataclass(frozen=True, slots=True)
class Script:
    """The text of a repro, and what belongs to it."""

    text: str
    side: Mapping[str, torch.Tensor] = field(default_factory=dict)  # the tensors that its side file holds
    names: Mapping[str, str] = field(default_factory=dict)  # its variables by the names of the inputs
    beside: str | None = None  # a file of the user's that it runs, for whoever knows where it is to put beside it
    reason: str = ""  # why there is no repro; then there is no text

    @property
    def num_lines(self) -> int:
        """Lines that are neither blank nor comment."""
        lines = (line.strip() for line in self.text.splitlines())
        return sum(bool(line) and not line.startswith("#") for line in lines)

    @property
    def files(self) -> list[str]:
        """The files that running it takes."""
        own = [REPRO_FILE, SIDE_FILE] if self.side else [REPRO_FILE]
        return [*own, self.beside] if self.beside is not None else own

    def write(self, folder: Path) -> Path:
        """Write the script and its side file into ``folder``; the path of the script."""
        path = folder / REPRO_FILE
        if self.side:
            with replaced(folder / SIDE_FILE) as file:
                torch.save(dict(self.side), file)
        else:
            (folder / SIDE_FILE).unlink(missing_ok=True)
        write_text(path, self.text)
        return path


def unverified(script: Script) -> Script:
    """The script with a line in its header for as long as no run has verified it."""
    lines = script.text.splitlines(keepends=True)
    end = next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return replace(script, text="".join([*lines[:end], f"# {NOT_VERIFIED}\n", *lines[end:]]))


def require_repro(script: Script) -> None:
    if script.reason:
        raise UsageError(f"there is no repro: {script.reason}", hint="render the issue or the report with --as")


def require_whole(script: Script) -> None:
    """Raise `UsageError` for a script that runs a file of the user's: that a .pt file names it is no reason to."""
    if script.beside is not None:
        raise UsageError(
            f"this repro runs the check in `{script.beside}`, which a reduction does not hold",
            hint="verify the repro.py that `reprokit shrink` wrote beside it",
        )


def write_script(
    program: Program,
    tensors: Tensors,
    failure: Failure,
    *,
    num_calls_before: int | None = None,
    torch_version: str = "",
    aside: Collection[int] = (),
) -> Script:
    """The repro of a program that fails; raises `NotReproduced` when it does not.

    Inputs in ``aside`` go to the side file.
    """
    header = _header(program, failure, num_calls_before, torch_version or torch.__version__)
    parts = parts_of(program, tensors, failure, aside)
    text = source.script(header, [*parts.code.inputs, *parts.body], parts.check)
    require_closed(text, check=failure.check if parts.beside is not None else None)
    names = {item.name: parts.code.names[item.value] for item in program.inputs if item.value in parts.code.names}
    return Script(text, parts.code.side, names, parts.beside)


def _header(program: Program, failure: Failure, num_calls_before: int | None, version: str) -> list[str]:
    words = words_of(failure, is_reduced=num_calls_before is not None)
    what = redact_text(words.headline)
    where = f" {words.phase}" if failure.event is None else ""  # an event is one of the whole step
    lines = [f"{what}{where} (torch {version})."]
    if num_calls_before is not None:
        was, now = counted(num_calls_before, "torch call"), program.num_calls
        lines.append(f"Reduced mechanically by reprokit from {was} of a training step to {now:,}.")
    lines.append("Ends with exit code 1 while the failure is there, and with 0 once it is gone.")
    return list(map(visible_line, lines))
