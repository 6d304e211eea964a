"""``reprokit render``: one text out of a snapshot or a reduction: the repro, the issue, the report, the test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from reprokit.capture.block import shown_path
from reprokit.cli.console import Verbosity, common_options, print_json, say
from reprokit.cli.outputs import check_file


@dataclass(frozen=True, slots=True)
class Render:
    """What to render, from which file or folder, in which form."""

    source: Path
    kind: str
    template: str | None
    output: Path | None
    overwrite: bool
    json: bool
    verbosity: Verbosity

    def execute(self) -> int:
        """Write the text to the output, or to stdout when there is none."""
        if self.output is not None:
            check_file(self.output, overwrite=self.overwrite)
        from reprokit.render import render_one

        rendered = render_one(self.source, self.kind, self.template, self.output)
        if isinstance(rendered, Path):
            say(f"wrote {shown_path(rendered)}", self.verbosity)
        if self.json:
            key = "path" if isinstance(rendered, Path) else "text"
            print_json({"schema": 1, "as": self.kind, key: str(rendered)})
        elif isinstance(rendered, str):
            click.echo(rendered, nl=not rendered.endswith("\n"))
        return 0


@click.command("render", short_help="Write the repro, issue, report or test of a file.")
@click.argument("source", type=click.Path(path_type=Path), metavar="(FILE | DIR)")
@click.option(
    "--as",
    "kind",
    type=click.Choice(["repro", "issue", "report", "test"]),
    default="repro",
    show_default=True,
    help="What to write.",
)
@click.option("--template", metavar="NAME", help="pytorch, transformers, lightning, generic, or a template's path.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="OUT", help="Where to write; stdout without it."
)
@click.option("-f", "--force", is_flag=True, help="Overwrite OUT if it exists.")
@common_options
def command(
    source: Path, kind: str, template: str | None, output: Path | None, force: bool, verbosity: str | None, json: bool
) -> Render:
    """Render a snapshot or a reduction as a text."""
    return Render(source, kind, template, output, force, json, Verbosity(verbosity or "normal"))
