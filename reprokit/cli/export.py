"""``reprokit export``: the state from before the failing step, as files that training can go on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from reprokit.cli.console import FilePath, Verbosity, common_options, make_folder, print_json, say
from reprokit.errors import SnapshotError, UsageError


@dataclass(frozen=True, slots=True)
class Export:
    """A snapshot whose state goes into a folder."""

    snapshot: Path
    output: Path
    overwrite: bool
    json: bool
    verbosity: Verbosity

    def execute(self) -> int:
        """Write ``model.pt``, ``optimizer.pt`` and ``rng.pt``, as far as the snapshot has them."""
        import torch

        from reprokit.grammar import plain_of
        from reprokit.snapshot.files import replaced
        from reprokit.snapshot.format import load

        snapshot = load(self.snapshot)
        before = snapshot.before
        if before is None:
            raise SnapshotError(
                f"`{self.snapshot}` holds no state from before the step", hint="capture it again with this version"
            )
        make_folder(self.output, overwrite=self.overwrite)
        files = {"model.pt": before.model(), "optimizer.pt": before.optimizer(), "rng.pt": plain_of(snapshot.rng)}
        written = {name: content for name, content in files.items() if content}
        for name, content in written.items():
            with replaced(self.output / name) as file:
                torch.save(content, file)
        if self.json:
            print_json({"schema": 1, "step": snapshot.step, "files": [str(self.output / name) for name in written]})
        say(f"the state before step {snapshot.step} -> {self.output} ({', '.join(written)})", self.verbosity)
        if not before.optimizers and not before.left_out:
            say("  no optimizer had stepped before", self.verbosity)
        for note in before.left_out:
            say(f"  left out {note}", self.verbosity)
        if snapshot.fidelity != "exact":
            say(f"  the replay was {snapshot.fidelity}: {snapshot.fidelity_note}", self.verbosity)
        return 0


@click.command("export", short_help="Write the state from before the failing step.")
@click.argument("snapshot", type=FilePath(), metavar="FILE")
@click.option("--before", is_flag=True, help="The state with which the failing step began.")
@click.option("-o", "--output", type=FilePath(), metavar="DIR", help="Where to write; the snapshot's name by default.")
@click.option("-f", "--force", is_flag=True, help="Write into DIR if it is not empty.")
@common_options
def command(snapshot: Path, before: bool, output: Path | None, force: bool, json: bool, verbosity: Verbosity) -> Export:
    """Write state dicts of model and optimizer, and the states of the generators, from a snapshot.

    `torch.load(..., weights_only=True)` reads the files.
    """
    if not before:
        raise UsageError("nothing to export was named", hint=f"reprokit export {snapshot} --before")
    folder = output or snapshot.with_name(f"{snapshot.name.removesuffix('.pt').removesuffix('.repro')}-before")
    return Export(snapshot, folder, force, json, verbosity)
