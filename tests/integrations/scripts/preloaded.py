"""Several captures with one start of the frameworks: ``python preloaded.py FOLDER:SCRIPT:MODE ...``.

Each is forked from here once the frameworks are imported, works in its own folder, and leaves its output and its exit
code there.
"""

import importlib
import os
import sys
from pathlib import Path

FRAMEWORKS = ("ignite.engine", "ignite.metrics", "lightning", "torch._dynamo")  # optimizers import the last, when used


def capture(folder, script, mode):
    """What ``reprokit capture SCRIPT MODE`` does, in this process."""
    os.chdir(folder)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), descriptor)

    from reprokit.cli import main

    sys.exit(main(["capture", script, mode]))


for name in FRAMEWORKS:
    importlib.import_module(name)
for words in sys.argv[1:]:
    folder, script, mode = words.split(":", 2)
    child = os.fork()
    if not child:
        capture(folder, script, mode)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    Path(folder, "code").write_text(str(code))
