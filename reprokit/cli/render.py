"""``reprokit render``: one text out of a snapshot or a reduction: the repro, the issue, the report, the test.

An issue can also become a zip for attaching. Nothing is ever sent. ``reprokit verify`` runs a repro many times in clean
processes and compares what they do.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reprokit.capture.failure_text import shown_path
from reprokit.cli.console import (
    SECONDS,
    FilePath,
    Verbosity,
    check_file,
    common_options,
    deadline,
    max_time_option,
    print_json,
    print_text,
    remove_unfinished,
    say,
    shown_command,
    too_long,
)
from reprokit.errors import UsageError
from reprokit.render import KINDS
from reprokit.snapshot.files import REPRO_FILE, write_text
from reprokit.snapshot.source import SOURCES

if TYPE_CHECKING:
    from reprokit.render.issue import Issue
    from reprokit.snapshot.source import Source

REPRO_FILES = (REPRO_FILE, "repro_inputs.pt")


@dataclass(frozen=True)
class Render:
    """What to render, from which file or folder, in which form."""

    source: Path
    kind: str
    template: str | None
    as_zip: bool
    repository: str | None
    snapshot: Path | None
    policy: Source
    no_data: bool
    with_data: bool
    output: Path | None
    force: bool
    max_time: float
    json: bool
    verbosity: Verbosity

    def execute(self) -> int:
        """Write the text to the output, or to stdout when there is none; a repro may go into a folder."""
        if self.output is not None:
            is_folder = self.kind == "repro" and os.path.isdir(self.output)
            for file in (self.output / name for name in REPRO_FILES) if is_folder else (self.output,):
                check_file(file, overwrite=self.force)
                remove_unfinished(file)
        with deadline(self.max_time, too_long(self.max_time)):
            from reprokit.render.texts import render_one

            rendered = render_one(
                self.source, self.kind, self.output, snapshot=self.snapshot, policy=self.policy, no_data=self.no_data
            )
        if isinstance(rendered, Path):
            say(f"wrote {shown_path(rendered)}", self.verbosity)
        if self.kind == "test":
            self._tell_of_repro()
        if self.json:
            key = "path" if isinstance(rendered, Path) else "text"
            print_json({"schema": 1, "as": self.kind, key: str(rendered)})
        elif isinstance(rendered, str):
            print_text(rendered if rendered.endswith("\n") else f"{rendered}\n")
        return 0

    def _tell_of_repro(self) -> None:
        """Say that a test runs the repro beside it, where that does not lie there already."""
        folder = self.output.parent if self.output is not None else None
        if folder is not None and (folder / REPRO_FILE).is_file():
            return
        written = self.source / REPRO_FILE
        if written.is_file():
            how = f"copy {shown_path(written)} there"
        else:
            place = "FOLDER" if folder is None else shown_path(folder)
            how = f"write it with: {shown_command('reprokit', 'render', str(self.source), '-o', place)}"
        say(f"the test runs the {REPRO_FILE} beside it; {how}", self.verbosity)


class RenderIssue(Render):
    """An issue to render: as text, or as a zip with the repro."""

    def execute(self) -> int:
        """Write it, and say how a person may send it."""
        output = self._output()
        if output is not None:
            check_file(output, overwrite=self.force)
            remove_unfinished(output)
        from reprokit.render.texts import ISSUE_FILE, create_command, prepare_issue, write_zip

        with deadline(self.max_time, too_long(self.max_time)):
            prepared = prepare_issue(
                self.source, self.template, snapshot=self.snapshot, policy=self.policy, no_data=self.no_data
            )
        issue = prepared.issue
        if self.as_zip and output is not None:
            write_zip(output, prepared.script, issue, context=prepared.context, with_data=self.with_data)
        elif output is not None:
            write_text(output, issue.text)
        body = self._body(issue, output)
        command = create_command(issue, shown_path(body or Path(ISSUE_FILE)), self.repository)
        self._tell(issue, output, command, is_there=body is not None)
        return 0

    def _output(self) -> Path | None:
        if self.output is not None or not self.as_zip:
            return self.output
        name = self.source.resolve().name.removesuffix(".pt").removesuffix(".repro")
        return Path(f"{name}.zip")

    def _body(self, issue: Issue, output: Path | None) -> Path | None:
        """The file that holds the text: what was written, or the same text beside the reduction."""
        from reprokit.render.texts import ISSUE_FILE

        if output is not None and not self.as_zip:
            return output
        beside = (self.source if self.source.is_dir() else self.source.parent) / ISSUE_FILE
        is_same = beside.is_file() and beside.read_text(encoding="utf-8", errors="replace") == issue.text
        return beside if is_same else None

    def _tell(self, issue: Issue, output: Path | None, command: str, *, is_there: bool) -> None:
        if output is not None:
            say(f"wrote {shown_path(output)}", self.verbosity)
        if self.json:
            where = {"path": str(output)} if output is not None else {"text": issue.text}
            named = {"title": issue.title, "template": issue.template, "command": command}
            print_json({"schema": 1, "as": "zip" if self.as_zip else "issue", **where, **named})
            return
        if output is None:
            print_text(issue.text)
        first = "" if is_there else f"{'unpack' if self.as_zip else 'save the text as'} issue.md, "
        say(f"nothing was sent; {first}add your own words to the text, and then:", self.verbosity)
        if self.verbosity is not Verbosity.QUIET:
            click.echo(command, err=True)


@click.command("render", short_help="Write the repro, issue, report or test of a file.")
@click.argument("source", type=FilePath(), metavar="(FILE | DIR)")
@click.option(
    "--as",
    "kind",
    type=click.Choice(KINDS),
    help="What to write: the repro, unless an option below is about an issue.",
)
@click.option(
    "--template",
    metavar="NAME",
    help="Of the issue: pytorch, transformers, lightning, generic, or the path of a Jinja file or folder. "
    "Default: the one of whose code the failure is about.",
)
@click.option("--zip", "as_zip", is_flag=True, help="Pack the repro, what lies beside it and the issue for attaching.")
@click.option("--url", is_flag=True, hidden=True)
@click.option("--repo", "repository", metavar="OWNER/NAME", help="Where the issue belongs.")
@click.option("--snapshot", type=FilePath(), metavar="FILE", help="What DIR was made from, if not beside it.")
@click.option(
    "--source",
    "policy",
    type=click.Choice(SOURCES),
    default="all",
    help="How much of your code is shown: the lines that a traceback shows, none, or all that was captured.",
)
@click.option("--no-data", is_flag=True, help="Write nothing that holds recorded numbers.")
@click.option("--with-data", is_flag=True, help="Pack recorded values even if there are many.")
@click.option("-o", "--output", type=FilePath(), metavar="OUT", help="Where to write; stdout without it.")
@click.option("-f", "--force", is_flag=True, help="Overwrite OUT if it exists.")
@max_time_option(SECONDS)
@common_options
def command(kind: str | None, **options: Any) -> Render:
    """Render a snapshot or a reduction as a text. Nothing is ever sent."""
    if options.pop("url"):
        raise UsageError("--url is gone", hint="`reprokit render --as issue` prints a command that creates the issue")
    repository = options["repository"]
    is_about_issue = any(options[name] not in (None, False) for name in ("template", "as_zip", "repository"))
    if is_about_issue and kind not in (None, "issue"):
        raise UsageError(f"an option is about an issue, but --as says `{kind}`", hint="leave out --as")
    if options["no_data"] and options["with_data"]:
        raise UsageError("--no-data and --with-data exclude each other", hint="give one of them")
    if repository is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise UsageError(f"`{repository}` does not name a repository", hint="--repo OWNER/NAME, as in pytorch/pytorch")
    if kind == "issue" or is_about_issue:
        return RenderIssue(kind="issue", **options)
    return Render(kind=kind or "repro", **options)


@dataclass(frozen=True, slots=True)
class Verify:
    """A repro to run, and how often; ``expect_fixed`` says that the failure should be gone."""

    path: Path
    times: int
    expect_fixed: bool
    json: bool
    verbosity: Verbosity
    max_time: float

    def execute(self) -> int:
        """Run it; 0 when all runs agree, and end well where the failure should be gone."""
        from reprokit.render.verify import verify

        with deadline(self.max_time, too_long(self.max_time)):
            result = verify(self.path, self.times)
        if self.json:
            print_json(result.summary())
        say(f"{result.agreed} of {result.times} runs agree: {result.signature}", self.verbosity)
        if self.expect_fixed and result.exit_code != 0:
            gone_or_not = "this does not show whether the failure is gone"
            say("the failure is still there" if result.fails else gone_or_not, self.verbosity)
            return 1
        return 0 if result.is_unanimous else 5


@click.command("verify", short_help="Run a repro in clean processes and compare.")
@click.argument("path", type=FilePath(), metavar="(FILE | DIR | repro.py)")
@click.option("--times", type=click.IntRange(min=1), default=20, show_default=True, help="How often to run it.")
@max_time_option(SECONDS)
@click.option("--expect-fixed", is_flag=True, help="Exit code 1 unless the failure is gone.")
@common_options
def verify_command(**options: Any) -> Verify:
    """Run a repro in clean processes and compare what they do.

    Exit code 0 when all runs end in the same way.
    """
    return Verify(**options)
