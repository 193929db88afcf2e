"""The commands of ring ranges: ``lanes ring assign``, ``split``, ``status`` and ``history``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer
from psycopg import AsyncConnection
from rich.table import Table

from lanes.cli.kit import EXIT_USAGE, print_table, stop
from lanes.core.ring import SLOTS
from lanes.core.ring_map import Assignment, Range, RingMap
from lanes.dead_letter import printable
from lanes.errors import ConfigError
from lanes_postgres.cli.commands import AsJson, Dsn, Schema, run
from lanes_postgres.log.appending import Log
from lanes_postgres.names import SCHEMA
from lanes_postgres.ring.range_map import RangeEvent, RangeMap
from lanes_postgres.ring.unowned import count_unowned
from lanes_postgres.steps import perform_async

_SLOT: Final = re.compile(r"[0-9]{1,9}|0[xX][0-9a-fA-F]{1,8}", re.ASCII)

LogName = Annotated[str, typer.Option("--log", help="Name of the log.", metavar="NAME", show_default=False)]
Group = Annotated[str, typer.Option("--group", help="Name of the group.", metavar="NAME", show_default=False)]
Consumer = Annotated[str, typer.Argument(help="Name of the consumer.", metavar="CONSUMER", show_default=False)]


def assign(
    lo: Annotated[str, typer.Argument(help="First slot, 0 to 65535 or 0x0 to 0xffff.", metavar="LO")],
    hi: Annotated[str, typer.Argument(help="Last slot, which belongs to the range.", metavar="HI")],
    consumer: Consumer,
    log: LogName,
    group: Group,
    dsn: Dsn = "",
    schema: Schema = SCHEMA,
) -> None:
    """Give a range of slots to a consumer.

    All slots must have the same owner, or no slot may have an owner. A part of a range splits the range. If the
    consumer owns the slots already, the command changes nothing.
    """
    ring, wanted = _map(log, group, schema), _range(lo, hi)
    _check(ring, consumer)

    async def work(connection: AsyncConnection[Any]) -> bool:
        return await ring.assign(connection, wanted.lo, wanted.hi, consumer)

    changed = run(dsn, schema, work)
    typer.echo(printable(f"{wanted}: {'assigned to' if changed else 'unchanged, owned by'} {consumer}"))


def split(
    slot: Annotated[str, typer.Argument(help="First slot to give away.", metavar="SLOT")],
    consumer: Consumer,
    log: LogName,
    group: Group,
    dsn: Dsn = "",
    schema: Schema = SCHEMA,
) -> None:
    """Split a range, and give its upper part to a consumer.

    The part begins with SLOT, and ends with the last slot of the range.
    """
    ring, first = _map(log, group, schema), _slot("SLOT", slot)
    _check(ring, consumer)

    async def work(connection: AsyncConnection[Any]) -> tuple[bool, Assignment | None]:
        changed = await ring.split(connection, first, consumer)
        return changed, RingMap(tuple(await ring.ranges(connection))).find(first)

    changed, found = run(dsn, schema, work)
    part = first if found is None else found.range
    typer.echo(printable(f"{part}: {'assigned to' if changed else 'unchanged, owned by'} {consumer}"))


def status(log: LogName, group: Group, dsn: Dsn = "", schema: Schema = SCHEMA, as_json: AsJson = False) -> None:
    """Show the owner of each range, and the slots without an owner."""
    ring = _map(log, group, schema)

    async def work(connection: AsyncConnection[Any]) -> tuple[Sequence[Assignment], int]:
        owned = await ring.ranges(connection)
        facts = await perform_async(connection, ring.log.finding(), "ring status")
        return owned, await count_unowned(connection, schema, facts.id, group)

    owned, backlog = run(dsn, schema, work)
    rows: list[tuple[Range, str | None]] = [*owned, *((each, None) for each in RingMap(tuple(owned)).unowned())]
    rows.sort(key=lambda row: row[0])
    if as_json:
        ranges = [{"lo": each.lo, "hi": each.hi, "consumer": owner} for each, owner in rows]
        typer.echo(json.dumps({"ranges": ranges, "unowned_messages": backlog}))
        return
    table = _table("lo", "hi", "slots", "share")
    table.add_column("consumer")
    for each, owner in rows:
        share = f"{100 * len(each) / SLOTS:.2f} %"
        table.add_row(
            str(each.lo), str(each.hi), str(len(each)), share, "(nobody)" if owner is None else printable(owner)
        )
    print_table(table)
    if not owned:
        typer.echo(_without_ranges(log, group))
    if backlog:
        typer.echo(f"{backlog:,} messages or more wait in slots that nobody owns")


def history(log: LogName, group: Group, dsn: Dsn = "", schema: Schema = SCHEMA, as_json: AsJson = False) -> None:
    """Show all assignments, the oldest first."""
    ring = _map(log, group, schema)

    async def work(connection: AsyncConnection[Any]) -> Sequence[RangeEvent]:
        return await ring.history(connection)

    events = run(dsn, schema, work)
    if as_json:
        names = ("number", "lo", "hi", "consumer", "time", "login")
        found = [
            (each.number, each.range.lo, each.range.hi, each.consumer, each.time.isoformat(), each.login)
            for each in events
        ]
        typer.echo(json.dumps([dict(zip(names, row, strict=True)) for row in found]))
        return
    if not events:
        typer.echo(_without_ranges(log, group))
        return
    table = _table("number", "lo", "hi")
    for heading in ("consumer", "time", "login"):
        table.add_column(heading)
    for each in events:
        texts = (each.consumer, each.time.isoformat(timespec="seconds"), each.login)
        table.add_row(str(each.number), str(each.range.lo), str(each.range.hi), *map(printable, texts))
    print_table(table)


def _map(log: str, group: str, schema: str) -> RangeMap:
    try:
        return RangeMap(Log(log, schema=schema), group=group)
    except ConfigError as error:
        stop(printable(f"--{error}".replace("--name=", "--log=", 1)), EXIT_USAGE)


def _check(ring: RangeMap, consumer: str) -> None:
    """Refuse a wrong name of a consumer before the command connects."""
    try:
        ring.member(consumer)
    except ConfigError as error:
        stop(printable(str(error).replace("consumer=", "CONSUMER ", 1)), EXIT_USAGE)


def _slot(name: str, text: str) -> int:
    slot = SLOTS if _SLOT.fullmatch(text) is None else int(text, 16 if text[:2] in ("0x", "0X") else 10)
    if slot >= SLOTS:
        stop(f"{name} {text!a}: must be a slot, 0 to 65535 or 0x0 to 0xffff", EXIT_USAGE)
    return slot


def _range(lo: str, hi: str) -> Range:
    try:
        return Range(_slot("LO", lo), _slot("HI", hi))
    except ConfigError as error:
        stop(str(error), EXIT_USAGE)


def _without_ranges(log: str, group: str) -> str:
    return (
        f"the group {group!a} of the log {log!a} has no assignments; correct --group, or assign ranges by "
        "`lanes ring assign`"
    )


def _table(*numbers: str) -> Table:
    table = Table(box=None)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table
