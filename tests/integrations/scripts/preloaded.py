"""Several commands with one start of torch and of frameworks: ``python preloaded.py FRAMEWORKS FOLDER:COMMAND ...``.

Each command of reprokit (``capture train.py``) is forked from here once the frameworks, separated by commas, are
imported, works in its own folder, and leaves its output and its exit code there.
"""

import importlib
import os
import sys
from pathlib import Path


def run(folder, command):
    """What ``reprokit COMMAND`` does, in this process."""
    os.chdir(folder)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)

    from reprokit.cli import main

    sys.exit(main(command.split()))


for name in sys.argv[1].split(","):
    importlib.import_module(name)
for words in sys.argv[2:]:
    folder, command = words.split(":", 1)
    child = os.fork()
    if not child:
        run(folder, command)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    Path(folder, "code").write_text(str(code))
