"""The error of a command that is used in a wrong way."""

from __future__ import annotations

from typing import Any


class Misuse(Exception):
    """A missing option, or options that contradict each other; the text continues the name of the command."""

    ctx: Any = None
    """The context of the command, which knows its name."""

    def format_message(self) -> str:
        return str(self)
