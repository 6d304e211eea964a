"""``python -m reprokit`` is the command ``reprokit``; under torchrun it is the form to use."""

from __future__ import annotations

import sys

from reprokit.cli import main

if __name__ == "__main__":
    sys.exit(main())
