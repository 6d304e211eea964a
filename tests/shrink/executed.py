"""Running a rendered repro, as a reader would: its text in a namespace of its own."""

from __future__ import annotations

import contextlib
import io
import warnings

from reprokit.render.script import write_script
from reprokit.shrink.reduction import Reduction


def ending_of(reduction: Reduction) -> str:
    """How the repro ends: the name of the exception it ends with, or ``passes``. It may need no side file."""
    script = write_script(reduction.program, reduction.tensors, reduction.failure)
    assert not script.side
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            exec(compile(script.text, "repro.py", "exec"), {"__name__": "__main__"})
        except (Exception, SystemExit) as error:
            return type(error).__name__
    return "passes"
