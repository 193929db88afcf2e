"""The commands ``lanes check`` and ``lanes journal convert``."""

from __future__ import annotations

from pathlib import Path

import typer

from lanes.cli.kit import stop
from memsource.checkers.report import check_files
from memsource.history import journal


def check(
    files: list[Path] = typer.Argument(
        help="Files or folders of histories and journals.", metavar="FILE", show_default=False
    ),
) -> None:
    """Check the promises over histories.

    The exit status is 0 if all promises passed, 1 if a promise was violated, and 2 if a promise is only unproven. The
    exit status is 3 if no history can be read.
    """
    checked = check_files(files)
    if checked.verdicts:
        typer.echo(checked.text)
    else:
        stop(checked.text, checked.status)
    raise typer.Exit(checked.status)


def convert(
    files: list[Path] = typer.Argument(help="History files.", metavar="FILE", show_default=False),
    to: Path = typer.Option(..., help="Folder to create for the Parquet files.", metavar="DIR", show_default=False),
) -> None:
    """Make a Parquet file of each history file, and print its name.

    The exit status is 3 if a history file cannot be converted.
    """
    try:
        made = journal.convert(files, to)
    except journal.JournalError as error:
        stop(str(error))
    for path in made:
        typer.echo(path)
