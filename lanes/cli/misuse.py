"""The error of a command with missing or contradictory options."""

from __future__ import annotations

from typing import Any


class Misuse(Exception):
    """Error for a missing option or for options that contradict each other.

    The text follows the name of the command.
    """

    ctx: Any = None
    """The context of the command, which knows its name."""

    def format_message(self) -> str:
        return str(self)
