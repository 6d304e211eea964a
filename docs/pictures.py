"""Draws the pictures of the README: `show.svg`, what `reprokit show` prints, and `report.png`, the top of a report.

python docs/pictures.py    # the report is that of examples/gallery; needs Chromium
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

HERE = Path(__file__).resolve().parent
SCRIPT = "where_gradient.py"
SNAPSHOT = "where_gradient-step7.repro.pt"
COLUMNS = 100


def main() -> int:
    """Capture the example, show it, draw what was shown."""
    with tempfile.TemporaryDirectory(prefix="pictures-") as folder:
        shutil.copy(HERE.parent / "examples" / SCRIPT, folder)
        reprokit(Path(folder), "capture", "-q", SCRIPT)
        shown = reprokit(Path(folder), "show", SNAPSHOT)
    text = Text.from_ansi(f"$ reprokit show {SNAPSHOT}\n{shown.rstrip()}\n")
    (HERE / "show.svg").write_text(drawn(text), encoding="utf-8")
    photograph(HERE.parent / "examples" / "gallery" / "backward" / "report.html", HERE / "report.png")
    return 0


def photograph(page: Path, picture: Path) -> None:
    """The top of a page, in its light theme."""
    with tempfile.TemporaryDirectory(prefix="pictures-") as profile:
        command = [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--blink-settings=preferredColorScheme=1", "--window-size=1000,1420"),
            *(f"--user-data-dir={profile}", f"--screenshot={picture}", page.as_uri()),
        ]
        subprocess.run(command, check=True, capture_output=True)


def reprokit(folder: Path, *words: str) -> str:
    """What a command says on a terminal of a fixed width."""
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    environment = {**os.environ, **terminal, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "reprokit", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stderr


def drawn(text: Text) -> str:
    """The text as SVG, without the fonts that rich would load from elsewhere."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(text)
    svg = console.export_svg(title="reprokit show", theme=MONOKAI, unique_id="show")
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())
