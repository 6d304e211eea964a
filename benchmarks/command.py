"""What the commands in this folder have in common: options, the cases of a corpus, and where the JSON goes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

JSON = dict[str, Any]


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option that all have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON here as well")
    return parser


def new_corpus_parser(description: str | None, jobs: int) -> argparse.ArgumentParser:
    """A parser for a command that runs the cases of a corpus, ``jobs`` at once unless told otherwise."""
    parser = new_parser(description)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--case", nargs="+", action="extend", metavar="NAME", help="only these cases")
    parser.add_argument("--jobs", type=int, default=jobs, help=f"cases at once (default {jobs})")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each process (default 300)")
    return parser


def find_cases(options: argparse.Namespace, file: str) -> list[Path]:
    """The folders of the corpus that hold ``file`` and were asked for; when there are none, says so."""
    folders = sorted(path.parent for path in options.corpus.glob(f"*/{file}"))
    if options.case:
        folders = [folder for folder in folders if folder.name in options.case]
    if not folders:
        print(f"no cases in `{options.corpus}`", file=sys.stderr)
    return folders


def print_json(result: JSON, file: Path | None) -> None:
    """Print a result, and write it to a file if there is one."""
    text = json.dumps(result, indent=1)
    print(text)
    if file is not None:
        file.write_text(text + "\n", encoding="utf-8")
