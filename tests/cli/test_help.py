"""Help texts are short: a summary or an option has at most 60 characters."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any, Final

import typer
from typer.main import get_command

from lanes.cli.kit import command_group

MOST: Final = 60


def texts(name: str, command: Any) -> Iterator[tuple[str, str]]:
    """The summary of a command, the help of its options, and those of its subcommands."""
    yield name, (command.help or "").partition("\n\n")[0].replace("\n", " ").partition(". ")[0].removesuffix(".")
    for option in command.params:
        yield f"{name} {option.name}", option.help or ""
    for each, inner in getattr(command, "commands", {}).items():
        yield from texts(f"{name} {each}", inner)


def test_every_help_text_is_short() -> None:
    long: dict[str, str] = {}
    for point in entry_points(group="lanes.commands"):
        found = point.load()
        if not isinstance(found, typer.Typer):
            group = command_group()
            group.command()(found)
            found = group
        long |= {name: text for name, text in texts(point.name, get_command(found)) if len(text) > MOST}
    assert long == {}
