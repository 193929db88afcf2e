"""``lanes …``: the console script."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, NoReturn

from lanes.cli.kit import command_group, run_commands

if TYPE_CHECKING:
    import typer


def main() -> NoReturn:
    """The console script. Raises ``SystemExit`` with the command's status."""
    run_commands(app, "lanes", "the command line")


def app() -> typer.Typer:
    """Make the command line with the commands of all installed packages."""
    import typer

    from lanes.cli.group import RingGroup
    from lanes.cli.registered import register

    commands = command_group()

    @commands.callback(invoke_without_command=True)
    def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        """Ordered concurrency for Kafka, JetStream and PostgreSQL."""
        if version:
            from lanes import __version__

            print(f"lanes {__version__}")
            raise typer.Exit

    groups = {
        "": commands,
        "doctor": command_group("Check a configuration. Exits with 0 if it is usable, else 3."),
        "journal": command_group("Convert histories to Parquet files, for SQL and Spark."),
        "ring": command_group(
            "Show the slots of keys, assign ranges of slots.\n\n`lanes ring KEY…` is `lanes ring slot KEY…`.", RingGroup
        ),
    }
    for name in ("doctor", "journal", "ring"):
        commands.add_typer(groups[name], name=name)
    for point in sorted(entry_points(group="lanes.commands")):
        parent, _, name = point.name.rpartition(".")
        register(groups[parent], name, point)
    return commands
