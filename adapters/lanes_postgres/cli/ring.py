"""The commands of ring ranges: ``lanes ring assign``, ``split``, ``status`` and ``history``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from psycopg import AsyncConnection
from rich.table import Table

from lanes.arguments import did_you_mean
from lanes.cli.kit import EXIT_USAGE, print_table, stop
from lanes.core.ring import SLOTS
from lanes.core.ring_map import Assignment, Range, RingMap
from lanes.dead_letter import printable
from lanes.errors import ConfigError
from lanes_postgres.cli.commands import AsJson, Dsn, Schema, run
from lanes_postgres.log.appending import Log
from lanes_postgres.log.sequencer import sequencing
from lanes_postgres.names import SCHEMA
from lanes_postgres.ring.owners import OwnerView, owners, used_names
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
    consumer owns the slots already, the command changes nothing. A note on stderr names a consumer that has never run.
    """
    ring, wanted = _map(log, group, schema), _range(lo, hi)
    _check(ring, consumer)

    async def work(connection: AsyncConnection[Any]) -> tuple[bool, list[str]]:
        changed = await ring.assign(connection, wanted.lo, wanted.hi, consumer)
        return changed, await _used_names(connection, ring)

    changed, used = run(dsn, schema, work)
    typer.echo(printable(f"{wanted}: {'assigned to' if changed else 'unchanged, owned by'} {consumer}"))
    _note_unused(ring, consumer, used)


def split(
    slot: Annotated[str, typer.Argument(help="First slot to give away.", metavar="SLOT")],
    consumer: Consumer,
    log: LogName,
    group: Group,
    dsn: Dsn = "",
    schema: Schema = SCHEMA,
) -> None:
    """Split a range, and give its upper part to a consumer.

    The part begins with SLOT, and ends with the last slot of the range. A note on stderr names a consumer that has
    never run.
    """
    ring, first = _map(log, group, schema), _slot("SLOT", slot)
    _check(ring, consumer)

    async def work(connection: AsyncConnection[Any]) -> tuple[bool, Assignment | None, list[str]]:
        changed = await ring.split(connection, first, consumer)
        found = RingMap(tuple(await ring.ranges(connection))).find(first)
        return changed, found, await _used_names(connection, ring)

    changed, found, used = run(dsn, schema, work)
    part = first if found is None else found.range
    typer.echo(printable(f"{part}: {'assigned to' if changed else 'unchanged, owned by'} {consumer}"))
    _note_unused(ring, consumer, used)


def status(log: LogName, group: Group, dsn: Dsn = "", schema: Schema = SCHEMA, as_json: AsJson = False) -> None:
    """Show the owner of each range, and the running consumers.

    A process counts as running until 10 s after its last heartbeat. The command first gives positions to committed
    messages.
    """
    ring = _map(log, group, schema)

    async def work(connection: AsyncConnection[Any]) -> tuple[Sequence[Assignment], int, list[OwnerView], list[str]]:
        facts = await perform_async(connection, ring.log.finding(), "ring status")
        while await perform_async(connection, sequencing(schema), "ring status"):
            pass
        owned = await ring.ranges(connection)
        backlog = await count_unowned(connection, schema, facts.id, group)
        found = await owners(connection, schema, facts.id, group)
        return owned, backlog, found, await _used_names(connection, ring)

    owned, backlog, found, used = run(dsn, schema, work)
    slots: dict[str, int] = {each.consumer: 0 for each in found}
    for assignment in owned:
        slots[assignment.consumer] = slots.get(assignment.consumer, 0) + len(assignment.range)
    views = {each.consumer: each for each in found}
    consumers = [views.get(name, OwnerView(name, 0, 0, more=False)) for name in sorted(slots)]
    rows: list[tuple[Range, str | None]] = [*owned, *((each, None) for each in RingMap(tuple(owned)).unowned())]
    rows.sort(key=lambda row: row[0])
    if as_json:
        ranges = [{"lo": each.lo, "hi": each.hi, "consumer": owner} for each, owner in rows]
        shown = [
            {
                "consumer": each.consumer,
                "processes": each.processes,
                "slots": slots[each.consumer],
                "waiting_messages": each.waiting,
            }
            for each in consumers
        ]
        typer.echo(json.dumps({"ranges": ranges, "consumers": shown, "unowned_messages": backlog}))
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
    if consumers:
        print_table("", _consumers(consumers, slots))
    for view in consumers:
        if slots[view.consumer] and not view.processes:
            typer.echo(_not_running(view, used))
    if backlog:
        typer.echo(f"{backlog:,} messages or more wait in slots without an owner")


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


async def _used_names(connection: AsyncConnection[Any], ring: RangeMap) -> list[str]:
    facts = await perform_async(connection, ring.log.finding(), "lanes ring")
    return await used_names(connection, ring.log.schema, facts.id, ring.group)


def _note_unused(ring: RangeMap, consumer: str, used: Sequence[str]) -> None:
    """Print a note about a consumer that has never run. The note is no error, because its process may start later."""
    if consumer not in used:
        text = (
            f"no process of the group {ring.group!a} has run as {consumer!a} yet{did_you_mean(consumer, used)}; the "
            "messages of its slots wait until one starts"
        )
        typer.echo(f"lanes: {text}", err=True)


def _not_running(owner: OwnerView, used: Sequence[str]) -> str:
    known = owner.consumer in used
    meant = "" if known else did_you_mean(owner.consumer, used)
    return (
        f"no process runs as {owner.consumer!a}{'' if known else ', and none has run before'}{meant}; start it, or "
        "assign its slots to another consumer"
    )


def _consumers(consumers: Sequence[OwnerView], slots: Mapping[str, int]) -> Table:
    table = _table()
    table.add_column("consumer")
    for heading in ("processes", "slots", "waiting messages"):
        table.add_column(heading, justify="right")
    for each in consumers:
        waiting = f"{each.waiting:,}{' or more' if each.more else ''}"
        table.add_row(printable(each.consumer), str(each.processes), str(slots[each.consumer]), waiting)
    return table


def _map(log: str, group: str, schema: str) -> RangeMap:
    try:
        return RangeMap(Log(log, schema=schema), group=group)
    except ConfigError as error:
        stop(printable(f"--{error}".replace("--name=", "--log=", 1)), EXIT_USAGE)


def _check(ring: RangeMap, consumer: str) -> None:
    """Refuse an invalid name of a consumer before the command connects."""
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
