"""What a ``lanes doctor …`` finds: one value for each thing it looked at, and how all of them are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Check", "found_table", "usable"]

_MARKS: Final = {True: "ok", None: "look", False: "FAILED"}


class Check(NamedTuple):
    """One thing that was looked at.

    ``ok``: None = it works with less than could be, or could not be told; ``remedy`` is empty where nothing is to do.
    """

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


def usable(checks: Sequence[Check]) -> bool:
    """Whether nothing was found that does not work."""
    return all(check.ok is not False for check in checks)


def found_table(checks: Sequence[Check]) -> Table:
    """The findings, for a terminal. Needs the extra ``cli``."""
    from rich.table import Table

    table = Table(title="found", title_justify="left")
    for heading in ("", "check", "found"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        detail = f"{check.detail}: {check.remedy}" if check.remedy else check.detail
        # Other programs' words are anybody's text: none of it may steer the terminal.
        table.add_row(_MARKS[check.ok], _shown(check.name), _shown(detail))
    return table


def _shown(text: str) -> str:
    return "".join(sign if sign.isprintable() else "·" for sign in text)
