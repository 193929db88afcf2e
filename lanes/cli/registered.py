"""Commands that installed packages register as entry points of the group ``lanes.commands``.

The name of an entry point is the command: ``NAME``, ``doctor.NAME``, ``journal.NAME`` or ``ring.NAME``. The object is a
``typer.Typer`` or a command function. The extras of the entry point tell the user what to install. The command imports
the object when it runs, so the start of ``lanes`` loads no client of a broker.
"""

from __future__ import annotations

import ast
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from lanes.cli.kit import command_group, require, stop
from lanes.errors import ConfigError


class _Unparsed(TyperCommand):
    """A command that passes all words after its name to another command, unchanged."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = args
        return args


def register(group: typer.Typer, name: str, point: EntryPoint) -> None:
    """Add a command that imports its entry point when it runs."""

    @group.command(name, cls=_Unparsed, help=_help(point))
    def run(context: typer.Context) -> None:
        command = f"lanes {point.name.replace('.', ' ')}"
        require(f"`{command}`", *point.extras)
        found = point.load()
        if isinstance(found, typer.Typer):
            commands, alone = found, ["--help"]
        else:
            commands, alone = command_group(), []
            commands.command()(found)
        try:
            status = commands(args=context.args or alone, standalone_mode=False, prog_name=command)
        except ConfigError as error:
            stop(str(error))
        raise typer.Exit(status or 0)


def _help(point: EntryPoint) -> str:
    """Read the help text of an entry point from its source file.

    The import of a broker's client would take seconds, and would fail if the client is missing. The text is the
    docstring of a command function, or the first argument of the call that makes a group.
    """
    package, *rest = point.module.split(".")
    spec = find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or ()
    for path in (Path(folder, *rest).with_suffix(".py") for folder in folders):
        for node in ast.parse(path.read_bytes()).body if path.is_file() else ():
            match node:
                case ast.FunctionDef(name=point.attr):
                    return ast.get_docstring(node) or ""
                case ast.Assign(
                    targets=[ast.Name(id=point.attr)], value=ast.Call(args=[ast.Constant(value=str(text)), *_])
                ):
                    return text
    return ""
