"""The reference of the command line: tables made from the help of every command."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Final
from unittest import mock

from lanes.cli.app import app

PLACE: Final = "> The help of every command is on the site only, which `make docs` builds in `.cache/site`."
"""The line of a page that the reference replaces. The page of a checkout tells its reader where the reference is."""

_COMMAND: Final = re.compile(r"^  ([a-z][a-z-]*)", re.MULTILINE)
_SECTION: Final = re.compile(r"^(Options|Arguments|Commands):$\n((?:^  .*$\n?)+)", re.MULTILINE)
_NOTE: Final = re.compile(r"\s*\[(?:default: (.*)|(required))\]$")
_COLUMNS: Final = 100


def helps(columns: int, command: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each command and its help, as printed on a terminal with ``columns`` columns. A command precedes its
    subcommands."""
    printed = io.StringIO()
    with redirect_stdout(printed), mock.patch.dict(os.environ, {"COLUMNS": str(columns)}):
        app()(args=[*command, "--help"], standalone_mode=False, prog_name="lanes")
    text = printed.getvalue().strip()
    yield command, text
    for name in _COMMAND.findall(text.partition("\nCommands:\n")[2]):
        yield from helps(columns, (*command, name))


def with_commands(markdown: str) -> str:
    """Return the page with the reference in place of its marker, or the unchanged page without a marker."""
    return markdown.replace(PLACE, command_reference()) if PLACE in markdown else markdown


def command_reference() -> str:
    """Return a section for each command, with its usage, its description, and a table for each part of its help."""
    return "\n".join(_section(command, text) for command, text in helps(_COLUMNS))


def _section(command: tuple[str, ...], text: str) -> str:
    usage, _, rest = text.partition("\n")
    description = _SECTION.sub("", rest).strip()
    paragraphs = "\n\n".join(" ".join(each.split()) for each in description.split("\n\n"))
    tables = "\n".join(_table(title, body) for title, body in _SECTION.findall(text) if _rows(body))
    return f"### {' '.join(['lanes', *command])}\n\n`{usage.removeprefix('Usage: ')}`\n\n{paragraphs}\n\n{tables}"


def _table(title: str, body: str) -> str:
    rows = _rows(body)
    noted = any(note for _, note, _ in rows)
    head = f"| {title} | default | meaning |\n|---|---|---|\n" if noted else f"| {title} | meaning |\n|---|---|\n"
    lines = [
        f"| `{name}` | {note} | {meaning} |" if noted else f"| `{name}` | {meaning} |" for name, note, meaning in rows
    ]
    return head + "\n".join(lines) + "\n"


def _rows(body: str) -> list[tuple[str, str, str]]:
    """Return the name, default and meaning of each entry. A further indented line continues an entry. ``--help`` is
    left out."""
    rows = []
    for entry in re.split(r"^  (?=\S)", body, flags=re.MULTILINE)[1:]:
        name, _, meaning = entry.strip().partition("  ")
        meaning = " ".join(meaning.split()).replace("|", "\\|")
        note = _NOTE.search(meaning)
        if name != "--help":
            rows.append((name.replace("|", "\\|"), "" if note is None else _said(note), _NOTE.sub("", meaning)))
    return rows


def _said(note: re.Match[str]) -> str:
    """Return the default of an entry as Markdown. A description in parentheses is shown as text, not as code."""
    value = note[1]
    return "required" if value is None else value[1:-1] if value.startswith("(") else f"`{value}`"
