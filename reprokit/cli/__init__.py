"""The command line: modules for the commands, each of which parses its options into a plan.

Plans are executed outside click, so that a user's script is never run inside click's own error handling. Nothing
imported on the way to ``--help`` or a usage error imports torch.
"""

from __future__ import annotations

from reprokit.cli.app import main

__all__ = ["main"]
