"""``reprokit render``: one text out of a snapshot or a reduction: the repro, the issue, the report, the test.

An issue can also become a zip for attaching. Nothing is ever sent. ``reprokit verify`` runs a repro many times in clean
processes and compares what they do.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reprokit.capture.failure_text import shown_path
from reprokit.cli import console
from reprokit.errors import UsageError
from reprokit.render import TEXTS
from reprokit.snapshot.files import REPRO_FILE
from reprokit.words import retry_words

if TYPE_CHECKING:
    from reprokit.render.texts import PreparedIssue
    from reprokit.snapshot.source import Source


@click.command("render", short_help="Write the repro, issue, report or test of a file.")
@click.argument("file", type=console.PATH, metavar="(FILE | DIR)")
@click.option(
    "--as", "kind", type=click.Choice(TEXTS), help="What to write: the repro, unless an option below is about an issue."
)
@click.option(
    "--template",
    metavar="NAME",
    help="Of the issue: pytorch, transformers, lightning, generic, or the path of a Jinja file or folder. "
    "Default: the one of whose code the failure is about.",
)
@click.option("--zip", "as_zip", is_flag=True, help="Pack the repro, what lies beside it and the issue for attaching.")
@click.option("--snapshot", type=console.PATH, metavar="FILE", help="What DIR was made from, if not beside it.")
@console.source_option("all")
@console.no_data_option
@click.option("--with-data", is_flag=True, help="Pack recorded values even if there are many.")
@console.output_options("OUT", "Where to write; stdout without it.")
@console.max_time_option(console.SECONDS)
@console.planned
def command(
    file: Path,
    kind: str | None,
    template: str | None,
    as_zip: bool,
    snapshot: Path | None,
    source: Source,
    no_data: bool,
    with_data: bool,
    output: Path | None,
    force: bool,
    max_time: float,
    json: bool,
    verbosity: console.Verbosity,
) -> int:
    """Render a snapshot or a reduction as a text. Nothing is ever sent."""
    is_about_issue = template is not None or as_zip
    if is_about_issue and kind not in (None, "issue"):
        raise UsageError(f"an option is about an issue, but --as says `{kind}`", hint="leave out --as")
    if no_data and with_data:
        raise UsageError("--no-data and --with-data exclude each other", hint="give one of them")
    kind = kind or ("issue" if is_about_issue else "repro")
    if as_zip and output is None:
        output = Path(f"{file.resolve().name.removesuffix('.pt').removesuffix('.repro')}.zip")
    if output is not None:
        is_folder = kind == "repro" and os.path.isdir(output)
        for path in (output / REPRO_FILE, output / "repro_inputs.pt") if is_folder else (output,):
            console.check_file(path, overwrite=force)
    options: dict[str, Any] = {"snapshot": snapshot, "policy": source, "no_data": no_data}
    with console.deadline(max_time):
        from reprokit.render.texts import prepare_issue, render_one

        if kind != "issue":
            rendered = render_one(file, kind, output, on_warning=_warn, **options)
        else:
            made = prepare_issue(file, template, **options)
    if kind != "issue":
        _print_rendered(rendered, kind, {}, json, verbosity)
        if kind == "test":
            _tell_of_repro(file, output, verbosity)
        return 0
    _write_issue(made, output, as_zip, with_data)
    named = {"title": made.issue.title, "template": made.issue.template}
    _print_rendered(output or made.issue.text, "zip" if as_zip else kind, named, json, verbosity)
    if not json:
        place = f"https://github.com/{made.issue.repository}/issues/new" if made.issue.repository else "its project"
        console.say(f"nothing was sent; add your own words to the text, and post it at {place}", verbosity)
    return 0


def _warn(text: str) -> None:
    """Print a warning, also with `-q`, as an error is."""
    console.say(f"warning: {text}")


def _write_issue(made: PreparedIssue, output: Path | None, as_zip: bool, with_data: bool) -> None:
    from reprokit.render.texts import write_zip
    from reprokit.snapshot.files import write_text

    if output is None:
        return
    if as_zip:
        write_zip(output, made.script, made.issue, context=made.context, with_data=with_data)
    else:
        write_text(output, made.issue.text)


def _print_rendered(
    rendered: Path | str, kind: str, more: dict[str, str], json: bool, verbosity: console.Verbosity
) -> None:
    """Say where a text was written, or print it."""
    is_file = isinstance(rendered, Path)
    if isinstance(rendered, Path):
        console.say(f"wrote {shown_path(rendered)}", verbosity)
    if json:
        console.print_json({"schema": 1, "as": kind, "path" if is_file else "text": str(rendered), **more})
    elif isinstance(rendered, str):
        console.print_text(rendered if rendered.endswith("\n") else f"{rendered}\n")


def _tell_of_repro(source: Path, output: Path | None, verbosity: console.Verbosity) -> None:
    """Say that a test runs the repro beside it, where that does not lie there already."""
    folder = output.parent if output is not None else None
    if folder is None or not (folder / REPRO_FILE).is_file():
        place = "FOLDER" if folder is None else shown_path(folder)
        how = shlex.join(["reprokit", "render", str(source), "-o", place])
        console.say(f"the test runs the {REPRO_FILE} beside it; write it with: {how}", verbosity)


@click.command("verify", short_help="Run a repro in clean processes and compare.")
@click.argument("path", type=console.PATH, metavar="(FILE | DIR | repro.py)")
@click.option("--times", type=click.IntRange(min=1), default=20, show_default=True, help="How often to run it.")
@console.max_time_option(console.SECONDS)
@click.option("--expect-fixed", is_flag=True, help="Exit code 1 unless the failure is gone.")
@console.planned
def verify_command(
    path: Path, times: int, max_time: float, expect_fixed: bool, json: bool, verbosity: console.Verbosity
) -> int:
    """Run a repro in clean processes and compare what they do.

    Exit code 0 when all runs end in the same way.
    """
    from reprokit.render.verify import verify

    with console.deadline(max_time):
        result = verify(path, times)
    if json:
        console.print_json(result.summary())
    console.say(f"{result.agreed} of {result.times} runs agree: {result.signature}", verbosity)
    if expect_fixed and result.exit_code != 0:
        unclear = "this does not show whether the failure is gone"
        console.say("the failure is still there" if result.fails else unclear, verbosity)
        console.say(retry_words(), verbosity)
        return 1
    return 0 if result.is_unanimous else 5
