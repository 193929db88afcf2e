"""``lanes ring``: the slot, the partition of the ring and the lane of a key."""

from __future__ import annotations

import re
from typing import Final

import typer
from rich.table import Table

from lanes.cli.kit import EXIT_USAGE, print_table, stop
from lanes.core.ring import lane, partition, slot

_DECIMAL_DIGITS: Final = 39
_DECIMAL: Final = re.compile(rf"-?[0-9]{{1,{_DECIMAL_DIGITS}}}")


def ring(
    keys: list[str] = typer.Argument(
        help="Keys; put `--` before a key that starts with a dash.", metavar="KEY", show_default=False
    ),
    partitions: int = typer.Option(64, help="Number of partitions of the ring.", metavar="NUMBER"),
    lanes: int = typer.Option(16, help="Number of lanes.", metavar="NUMBER"),
    as_int: bool = typer.Option(False, "--int", help="Read the keys as decimal numbers, 0 … 2**128-1."),
) -> None:
    """Show the slot, ring partition and lane of keys.

    A slot is a number below 65,536. Only lanes uses the hash of the ring, so no broker assigns messages to the ring's
    partitions. `lanes kafka partition` shows the partition of a Kafka topic. The partition of a JetStream cohort is a
    token of the stored subject, which `nats stream subjects STREAM` lists.
    """
    try:
        partition(b"", partitions), lane(b"", lanes)
    except ValueError as error:
        stop(f"--{error}", EXIT_USAGE)
    table = Table()
    table.add_column("key", overflow="fold")
    for heading in ("slot", f"ring partition of {partitions}", f"lane of {lanes}"):
        table.add_column(heading, justify="right", no_wrap=True)
    for text in keys:
        try:
            key = read_key(text, as_int=as_int)
            places = slot(key), partition(key, partitions), lane(key, lanes)
        except ValueError as error:
            stop(str(error), EXIT_USAGE)
        # A key is untrusted text. An escaped key can neither steer the terminal nor reorder a row.
        table.add_row(ascii(key if as_int else text), *(str(place) for place in places))
    print_table(table)


def read_key(text: str, *, as_int: bool) -> int | bytes:
    """Read a key of the command line. With ``as_int``, a text that is no decimal number ends the process."""
    if not as_int:
        return text.encode("utf-8", "surrogateescape")
    if _DECIMAL.fullmatch(text) is None:
        stop(f"KEY {text!a}: must be a decimal number of up to {_DECIMAL_DIGITS} digits with --int", EXIT_USAGE)
    return int(text)
