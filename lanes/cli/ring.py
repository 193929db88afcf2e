"""``lanes ring``: the slot, partition and lane of a key."""

from __future__ import annotations

import re
from typing import Final

import typer
from rich.console import Console
from rich.table import Table

from lanes.cli.kit import stop
from lanes.core.ring import lane, partition, slot

_DECIMAL_DIGITS: Final = 39
_DECIMAL: Final = re.compile(rf"-?[0-9]{{1,{_DECIMAL_DIGITS}}}")


def ring(
    keys: list[str] = typer.Argument(
        help="Keys; put `--` before a key that starts with a dash.", metavar="KEY", show_default=False
    ),
    partitions: int = typer.Option(64, help="Number of partitions.", metavar="NUMBER"),
    lanes: int = typer.Option(16, help="Number of lanes.", metavar="NUMBER"),
    as_int: bool = typer.Option(False, "--int", help="Read the keys as decimal numbers, 0 … 2**128-1."),
) -> None:
    """Show the slot, the partition and the lane of keys. There are 65,536 slots."""
    table = Table()
    table.add_column("key", overflow="fold")
    for heading in ("slot", f"partition of {partitions}", f"lane of {lanes}"):
        table.add_column(heading, justify="right")
    for text in keys:
        try:
            key = _int_key(text) if as_int else text.encode("utf-8", "surrogateescape")
            places = slot(key), partition(key, partitions), lane(key, lanes)
        except ValueError as error:
            stop(str(error))
        # A key is untrusted text. An escaped key can neither steer the terminal nor reorder a row.
        table.add_row(ascii(key if as_int else text), *(str(place) for place in places))
    Console(markup=False, emoji=False, highlight=False).print(table)


def _int_key(text: str) -> int:
    """Read a key in decimal; any other text ends the process."""
    if _DECIMAL.fullmatch(text) is None:
        stop(f"KEY {text!a}: must be a decimal number of up to {_DECIMAL_DIGITS} digits with --int")
    return int(text)
