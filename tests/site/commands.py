"""The page of the command line: the help of every command, as the command itself prints it."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from unittest import mock

from lanes.cli.app import app

COMMAND = re.compile(r"^  ([a-z][a-z-]*)", re.MULTILINE)


def command_page(columns: int = 100) -> tuple[str, str]:
    """Path and text of the page; ``columns``: of the terminal that all is printed for."""
    described = _described((), columns)
    return "reference/cli.md", "".join(["# The command line\n\nNeeds the extra `cli`.\n", *described])


def _described(command: tuple[str, ...], columns: int) -> Iterator[str]:
    """What there is to say of a command, and of those below it."""
    printed = io.StringIO()
    with redirect_stdout(printed), mock.patch.dict(os.environ, {"COLUMNS": str(columns)}):
        app()(args=[*command, "--help"], standalone_mode=False, prog_name="lanes")
    text = printed.getvalue().strip()
    yield f"\n## {' '.join(['lanes', *command])}\n\n```text\n{text}\n```\n"
    for name in COMMAND.findall(text.partition("\nCommands:\n")[2]):
        yield from _described((*command, name), columns)
