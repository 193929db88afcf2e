"""The results of a ``lanes doctor …`` command, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from lanes.cli.kit import print_table
from lanes.process import EXIT_UNUSABLE

if TYPE_CHECKING:
    from rich.table import Table

_MARKS: Final = {True: "ok", None: "look", False: "FAILED"}


class Check(NamedTuple):
    """One result.

    ``ok`` False = the check failed, None = a limitation or an unknown value; ``remedy`` empty = no action is needed.
    """

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""


def conclude(
    checks: Sequence[Check], *, as_json: bool, facts: Mapping[str, object] | None = None, tables: Sequence[Table] = ()
) -> NoReturn:
    """Print the results and end the command: 0 = usable, 3 = a check failed.

    The JSON contains the ``facts`` too. The text output begins with the ``tables``. Needs the extra ``cli``.
    """
    import typer

    usable = all(check.ok is not False for check in checks)
    if as_json:
        document = {"usable": usable, **(facts or {}), "checks": [check._asdict() for check in checks]}
        typer.echo(json.dumps(document, indent=2))
    else:
        print_table(*tables, _found(checks, title="found" if tables else None))
    raise typer.Exit(0 if usable else EXIT_UNUSABLE)


def _found(checks: Sequence[Check], title: str | None) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in ("", "check", "found"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        detail = f"{check.detail}: {check.remedy}" if check.remedy else check.detail
        # Texts of other programs are untrusted and must not steer the terminal.
        table.add_row(_MARKS[check.ok], _shown(check.name), _shown(detail))
    return table


def _shown(text: str) -> str:
    return "".join(sign if sign.isprintable() else "·" for sign in text)
