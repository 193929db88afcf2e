"""The command ``lanes spark audit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lanes.cli.kit import EXIT_INTERRUPTED, EXIT_UNUSABLE, stop
from lanes.cli.views import printable
from lanes.errors import ConfigError, LanesError
from lanes_spark.audits.audit import Audit, audit
from lanes_spark.cli.options import KafkaInstead, KafkaOptions, Master, SparkConf, pairs, spark_session
from lanes_spark.tables.kafka_topic import KafkaTopic
from lanes_spark.tables.table import ParquetTable

__all__ = ["audit_journals", "render", "source_of_audit"]

_STYLES: Final = {"held": "green", "violated": "bold red", "unproven": "yellow"}


def audit_journals(
    journals: list[str] = typer.Argument(help="Folders of journals.", metavar="DIR", show_default=False),
    findings: str = typer.Option("", help="A folder for the violations as Parquet; it must not exist.", metavar="DIR"),
    topic: str = typer.Option("", help="With --table or --servers: what had to be handled.", metavar="NAME"),
    table: list[str] = typer.Option(
        [], help="A Parquet table of all that had to be handled; may be repeated.", metavar="PATH", show_default=False
    ),
    servers: KafkaInstead = "",
    option: KafkaOptions = [],  # noqa: B006 (typer copies it)
    column: list[str] = typer.Option(
        [], help="How a column of the table is called, as offset=number.", metavar="NAME=COLUMN", show_default=False
    ),
    master: Master = "",
    conf: SparkConf = [],  # noqa: B006 (typer copies it)
) -> None:
    """Audit journals. Exit 0 all promises held, 1 one was violated, 2 one is unproven, 3 not possible."""
    source = source_of_audit(topic, table, servers, pairs("-X", option), pairs("--column", column))
    try:
        with spark_session(master, pairs("--conf", conf)) as session:
            found = audit(session, journals, source=source, findings_to=findings or None)
    except LanesError as error:
        stop(printable(str(error)), EXIT_UNUSABLE)
    except KeyboardInterrupt:
        stop("interrupted", EXIT_INTERRUPTED)
    render(found, Console(markup=False, emoji=False, highlight=False))
    raise typer.Exit(found.status)


def source_of_audit(
    topic: str, tables: Sequence[str], servers: str, options: dict[str, str], columns: dict[str, str]
) -> KafkaTopic | ParquetTable | None:
    """The source that the options name, None for none. Raises ``ConfigError`` for two, and for what belongs to none."""
    if not tables and not servers:
        if topic or options or columns:
            raise ConfigError(
                "--topic, -X and --column are about --table PATH or --servers HOST:PORT: give one of them"
            )
        return None
    if tables and servers:
        raise ConfigError("`lanes spark audit` takes --table PATH or --servers HOST:PORT, not both")
    if tables and options:
        raise ConfigError("-X is an option of the Kafka connector: leave it out with --table")
    if servers and columns:
        raise ConfigError("--column is for the columns of a table: leave it out with --servers")
    if servers:
        return KafkaTopic(servers=servers, topic=topic, options=options)
    return ParquetTable(path=list(tables), topic=topic, columns=columns)


def render(found: Audit, console: Console) -> None:
    """Print the verdicts as a table, and below it what is to be looked at."""
    console.print(f"{found.rows:,} rows of {found.processes:,} processes", soft_wrap=True)
    came = ", ".join(f"{count:,} {cause}" for cause, count in found.duplicates.items() if count)
    console.print(f"came again: {came or 'nothing'}", soft_wrap=True)
    table = Table()
    for heading in ("promise", "verdict"):
        table.add_column(heading)
    for heading in ("checked", "violations"):
        table.add_column(heading, justify="right")
    for verdict in found.verdicts:
        table.add_row(
            verdict.name,
            Text(verdict.status, style=_STYLES[verdict.status]),
            f"{verdict.checked:,}",
            f"{verdict.violations:,}",
        )
    if found.unfinished:
        table.add_section()
        table.add_row("unfinished files", Text("not judged", style=_STYLES["unproven"]), f"{found.unfinished:,}", "")
    console.print(table)
    if found.unjudged:
        console.print(f"? {found.unjudged}", soft_wrap=True)
    for verdict in found.verdicts:
        for sign, lines in (("!", verdict.witnesses), ("?", verdict.reasons)):
            for line in lines:
                console.print(f"{sign} {verdict.name}: {printable(line)}", soft_wrap=True)
        if verdict.violations > len(verdict.witnesses):
            more = verdict.violations - len(verdict.witnesses)
            console.print(f"! {verdict.name}: and {more:,} more", soft_wrap=True)
