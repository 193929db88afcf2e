"""The commands ``lanes doctor postgres`` and ``lanes postgres``, and the box of ``lanes dead-letters``."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import anyio
import psycopg
import typer
from psycopg import AsyncConnection
from rich.table import Table

from lanes.cli.doctor import conclude
from lanes.cli.kit import command_group, one_line_errors, option_values, print_table, waiting_line
from lanes.cli.misuse import Misuse
from lanes.dead_letter import printable
from lanes_postgres.advisory_locks import AdvisoryLocks
from lanes_postgres.cli.doctor import examine
from lanes_postgres.cli.retention import trim as trim_log
from lanes_postgres.cli.subscriptions import SubscriptionView, drop_subscription, list_subscriptions
from lanes_postgres.connecting import connect
from lanes_postgres.dead_letters import PostgresDeadLetters
from lanes_postgres.errors import lanes_error
from lanes_postgres.migrations import check_schema
from lanes_postgres.names import SCHEMA, check_schema_name

T = TypeVar("T")

Dsn = Annotated[
    str,
    typer.Option(
        help="Connection string of the database, without a password.",
        metavar="DSN",
        show_default="the PG… variables of the environment",
    ),
]
Schema = Annotated[str, typer.Option(help="Schema of the tables.", metavar="NAME")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def doctor(
    dsn: Dsn = "",
    schema: Schema = SCHEMA,
    log: Annotated[str, typer.Option(help="Check this log.", metavar="NAME", show_default=False)] = "",
    subscription: Annotated[
        str, typer.Option(help="Check this subscription of the log.", metavar="NAME", show_default=False)
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check a PostgreSQL server, its tables, logs and locks.

    Without --log the command lists the logs of the schema. Exit status: 0 = usable, 3 = a check failed. The command
    changes nothing at the server. Other users can see the arguments of a process, so put a password into PGPASSWORD or
    a password file.
    """
    if subscription and not log:
        raise Misuse("has --subscription and no --log; name the log of the subscription")
    _check(dsn, schema)
    with waiting_line("the PostgreSQL server"):
        checks = anyio.run(examine, dsn, schema, log, subscription, backend="asyncio")
    facts = {"schema": schema, "log": log or None, "subscription": subscription or None}
    conclude(checks, as_json=as_json, facts=facts)


postgres = command_group("Trim logs in PostgreSQL, list or drop subscriptions.")
subscriptions = command_group("List the subscriptions of logs, or drop one.")
postgres.add_typer(subscriptions, name="subscriptions")


@subscriptions.command("list")
def list_(dsn: Dsn = "", schema: Schema = SCHEMA, as_json: AsJson = False) -> None:
    """Show each subscription with its lag and its running members."""
    found = run(dsn, schema, lambda connection: list_subscriptions(connection, schema))
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found]))
    else:
        _show(found)


@subscriptions.command()
def drop(
    name: Annotated[str, typer.Argument(help="Name of the subscription.", metavar="NAME", show_default=False)],
    log: Annotated[str, typer.Option(help="Name of the log.", metavar="NAME", show_default=False)],
    dsn: Dsn = "",
    schema: Schema = SCHEMA,
    force: Annotated[bool, typer.Option("--force", help="Drop the subscription although members run.")] = False,
) -> None:
    """Delete a subscription and its positions.

    The next consumer of this name begins at its configured start. The command refuses a subscription with running
    members, so that a typing error stops no consumer.
    """

    async def work(connection: AsyncConnection[Any]) -> None:
        await drop_subscription(connection, schema, log, name, force=force)

    run(dsn, schema, work)
    typer.echo(printable(f"{name}: dropped from log {log}"))


@postgres.command()
def trim(
    log: Annotated[str, typer.Option(help="Name of the log.", metavar="NAME", show_default=False)],
    older_than: Annotated[float, typer.Option(help="Keep messages of the last hours.", metavar="HOURS", min=0.0)],
    dsn: Dsn = "",
    schema: Schema = SCHEMA,
    force: Annotated[bool, typer.Option("--force", help="Delete unfinished messages too.")] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(help="Do not wait for this subscription.", metavar="NAME", show_default=False),
    ] = None,
) -> None:
    """Delete messages that all subscriptions have finished.

    The last batch of each partition stays. With --force, a subscription that has not read a deleted message stops, or
    continues by its out_of_range. With --without, which may be repeated, only the named subscriptions may lose
    messages.
    """

    async def work(connection: AsyncConnection[Any]) -> int:
        return await trim_log(connection, schema, log, age=older_than * 3600, force=force, without=without or ())

    typer.echo(printable(f"{log}: {run(dsn, schema, work):,} messages deleted"))


def dead_letter_box(dsn: str, name: str, schema: str) -> PostgresDeadLetters:
    """Make the dead-letter box of ``lanes dead-letters --name``.

    Args:
        dsn: Connection string; "" = the PG… variables of the environment.
        name: Name of the dead letters.
        schema: Schema of the tables; "" = the default schema.

    Returns:
        The box, which is not open yet.

    Raises:
        ConfigError: The name is invalid.
        Misuse: Neither the connection string nor the environment names a database.
    """
    _check(dsn, schema or SCHEMA)
    with option_values("--"):
        return PostgresDeadLetters(dsn, name, schema=schema or SCHEMA)


def _check(dsn: str, schema: str) -> None:
    if not dsn and not any(name.startswith("PG") for name in os.environ):
        raise Misuse("needs --dsn DSN, or the PG… variables of the environment, such as PGHOST")
    with option_values("--"):
        check_schema_name(schema)
        AdvisoryLocks(dsn)


def run(dsn: str, schema: str, work: Callable[[AsyncConnection[Any]], Awaitable[T]]) -> T:
    """Run ``work`` on a connection whose schema is current. Report an error of ``lanes`` as one line."""

    async def job() -> T:
        with waiting_line("the PostgreSQL server"):
            connection = await connect(dsn, "connection")
        async with connection:
            await check_schema(connection, schema=schema)
            try:
                return await work(connection)
            except psycopg.Error as error:
                raise lanes_error(f"schema {schema!r}", error) from error

    _check(dsn, schema)
    with one_line_errors():
        result = anyio.run(job, backend="asyncio")
    return result  # noqa: RET504 (for mypy, the block may suppress an error)


def _show(found: list[SubscriptionView]) -> None:
    table = Table("log", "subscription", "start", box=None)
    for heading in ("partitions", "lag", "members"):
        table.add_column(heading, justify="right")
    for each in found:
        names = (printable(text) for text in (each.log, each.name, each.start))
        table.add_row(*names, str(each.partitions), "?" if each.lag is None else f"{each.lag:,}", str(each.members))
    print_table(table)
