"""Help texts are short, name values by one word, and name an option alike in every command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any, Final

import typer
from typer.main import get_command

from lanes.cli.kit import command_group
from tests.site.commands import helps

MOST: Final = 60
FUNCTION: Final = "MODULE:FUNCTION"


def texts(name: str, command: Any) -> Iterator[tuple[str, str]]:
    """The summary of a command, the help of its options, and the same texts of its subcommands."""
    yield name, (command.help or "").partition("\n\n")[0].replace("\n", " ").partition(". ")[0].removesuffix(".")
    for option in command.params:
        yield f"{name} {option.name}", option.help or ""
    for each, inner in getattr(command, "commands", {}).items():
        yield from texts(f"{name} {each}", inner)


def commands() -> Iterator[tuple[str, Any]]:
    """The commands of all entry points."""
    for point in entry_points(group="lanes.commands"):
        found = point.load()
        if not isinstance(found, typer.Typer):
            group = command_group()
            group.command()(found)
            found = group
        yield point.name, get_command(found)


def test_every_help_text_is_short() -> None:
    long: dict[str, str] = {}
    for point, command in commands():
        long |= {name: text for name, text in texts(point, command) if len(text) > MOST}
    assert long == {}


def values(name: str, command: Any) -> Iterator[tuple[str, str | None]]:
    """The metavar of each option with a value, and of each argument."""
    for param in command.params:
        if not getattr(param, "is_flag", False):
            yield f"{name} {param.opts[0]}", param.metavar
    for each, inner in getattr(command, "commands", {}).items():
        yield from values(f"{name} {each}", inner)


def test_every_value_has_a_name_that_a_person_reads() -> None:
    found: dict[str, str | None] = {}
    for name, command in commands():
        found |= dict(values(name, command))
    assert {option for option, metavar in found.items() if not metavar} == set()
    for option, metavar in (("--stream", "NAME"), ("--group", "NAME"), ("--topic", "NAME"), ("--handler", FUNCTION)):
        assert {metavar} == {of for name, of in found.items() if name.endswith(f" {option}")}
    servers = {of for name, of in found.items() if name.endswith(" --server")}
    assert servers == {"HOST:PORT", "URL", "ADDRESS"}


def test_no_help_shows_a_type_of_python() -> None:
    for command, text in helps(100):
        assert re.findall(r"<[a-z]|[{}]", text) == [], command


def test_every_command_that_asks_a_server_names_it_alike() -> None:
    """``--server``, ``--stream`` and ``--group`` have no second spelling, and are never arguments."""
    for name, command in commands():
        for option in dict(values(name, command)):
            assert option.split()[-1] not in ("--servers", "--broker", "--url", "--streams", "--groups"), option
            assert option.split()[-1] not in ("server", "stream", "group"), option
