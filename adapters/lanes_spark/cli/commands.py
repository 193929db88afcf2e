"""The commands ``lanes spark …``. pyspark is imported when a replay begins.

A ``ConfigError`` of a command is for the caller to show.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

from lanes.cli.kit import EXIT_INTERRUPTED, EXIT_UNUSABLE, choice, command_group, stop
from lanes.cli.views import printable
from lanes.errors import ConfigError, HandlerHalted, LanesError
from lanes.process import EXIT_HALTED
from lanes_spark.cli.audit import audit_journals
from lanes_spark.cli.options import (
    EffectsName,
    FirstPosition,
    Handler,
    Journal,
    KafkaInstead,
    KafkaOptions,
    Keys,
    LetterMaker,
    Master,
    Partitions,
    SettingsName,
    Setup,
    Slots,
    SparkConf,
    Tasks,
    Teardown,
    arguments_of,
    bound,
    load,
    pairs,
    spark_session,
)
from lanes_spark.cli.progress_bar import progress_bar, summary
from lanes_spark.cli.stream import stream
from lanes_spark.driver.replay import ROWS_PER_BATCH, ReplaySource, Report
from lanes_spark.driver.replay import replay as replay_source
from lanes_spark.tables.journal_selection import JournalSelection, Of
from lanes_spark.tables.kafka_topic import KafkaTopic
from lanes_spark.tables.table import ParquetTable

__all__ = ["only_of", "source_of", "spark"]


spark = command_group("Run a handler over all of history on Spark.")


@spark.command()
def replay(
    topic: Annotated[str, typer.Option(help="What the messages are of.", metavar="NAME", show_default=False)],
    handler: Handler,
    table: list[str] = typer.Option(
        [], help="A Parquet table of messages; may be repeated.", metavar="PATH", show_default=False
    ),
    servers: KafkaInstead = "",
    option: KafkaOptions = [],  # noqa: B006 (typer copies it)
    column: list[str] = typer.Option(
        [], help="How a column of the table is called, as key=customer.", metavar="NAME=COLUMN", show_default=False
    ),
    aligned: bool | None = typer.Option(
        None, help="One task reads a whole partition, without a shuffle.", show_default="only of Kafka"
    ),
    keys: Keys = [],  # noqa: B006 (typer copies it)
    slots: Slots = "",
    partitions: Partitions = "",
    from_: FirstPosition = "",
    to: str = typer.Option("", help="The same for the end, which is out.", metavar="AT"),
    only: str = typer.Option(
        "", help="Only what a journal names: dead_lettered, abandoned or unfinished.", metavar="WHAT"
    ),
    from_journal: list[str] = typer.Option(
        [], help="The journal for --only; may be repeated.", metavar="DIR", show_default=False
    ),
    journal_topic: str = typer.Option("", help="What the topic is called there.", show_default="as --topic"),
    settings: SettingsName = "",
    dead_letters: LetterMaker = "",
    setup: Setup = "",
    teardown: Teardown = "",
    effects: EffectsName = "unfenced",
    checkpoint: str = typer.Option("", help="A folder to go on from after a crash.", metavar="PATH"),
    rows_per_batch: int = typer.Option(ROWS_PER_BATCH, help="With --checkpoint: what a batch has at most."),
    journal: Journal = "",
    tasks: Tasks = None,
    master: Master = "",
    conf: SparkConf = [],  # noqa: B006 (typer copies it)
    explain: bool = typer.Option(False, "--explain", help="Run nothing; print the plan, and why."),
) -> None:
    """Run a handler over a table or a Kafka topic. Exit 0 done, 3 not possible, 5 halted by a message.

    It imports from this folder; so do workers of this machine. On a cluster the handler's modules go along by
    --conf spark.submit.pyFiles=PATH.
    """
    # Python does so for a script and for -m, not for a console script.
    sys.path.insert(0, os.getcwd())
    source = source_of(topic, table, servers, pairs("-X", option), pairs("--column", column), aligned)
    arguments = arguments_of(
        settings=settings,
        dead_letters=dead_letters,
        setup=setup,
        teardown=teardown,
        keys=keys,
        slots=slots,
        partitions=partitions,
        from_=from_,
        rows_per_batch=rows_per_batch,
        journal=journal,
        tasks=tasks,
        effects=effects,
    )
    arguments["to"] = bound("--to", to)
    arguments["only"] = only_of(only, from_journal, journal_topic)
    arguments["checkpoint"] = checkpoint or None
    _run(source, load("--handler", handler), arguments, master, pairs("--conf", conf), explain)


spark.command()(stream)
spark.command("audit")(audit_journals)


def source_of(
    topic: str,
    tables: Sequence[str],
    servers: str,
    options: dict[str, str],
    columns: dict[str, str],
    aligned: bool | None,
) -> ReplaySource:
    """The source that the options name. Raises ``ConfigError`` for none, for two, and for what belongs to the other."""
    if bool(tables) == bool(servers):
        raise ConfigError("`lanes spark replay` needs --table PATH or --servers HOST:PORT, one of them")
    if tables and options:
        raise ConfigError("-X is an option of the Kafka connector: leave it out with --table")
    if servers and columns:
        raise ConfigError("--column is for the columns of a table: leave it out with --servers")
    if servers:
        return KafkaTopic(servers=servers, topic=topic, options=options, aligned=aligned is not False)
    return ParquetTable(path=list(tables), topic=topic, columns=columns, aligned=bool(aligned))


def only_of(of: str, paths: Sequence[str], topic: str) -> JournalSelection | None:
    """What the options of a journal select, None for none. Raises ``ConfigError`` for one without the other."""
    if not of and not paths and not topic:
        return None
    if not of or not paths:
        raise ConfigError("--only WHAT needs --from-journal DIR, and the other way round")
    return JournalSelection(path=list(paths), of=choice("--only", of, Of), topic=topic or None)


def _run(
    source: ReplaySource,
    handler: Any,
    arguments: dict[str, Any],
    master: str,
    conf: dict[str, str],
    explain: bool,
) -> None:
    output = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)
    try:
        with spark_session(master, conf) as session:
            if explain:
                output.print(printable_lines(str(replay_source(session, source, handler, **arguments, explain=True))))
                return
            with progress_bar() as show:
                report = replay_source(session, source, handler, **arguments, progress=show)
    except HandlerHalted as error:
        stop(printable(str(error)), EXIT_HALTED)
    except LanesError as error:
        stop(printable(str(error)), EXIT_UNUSABLE)
    except KeyboardInterrupt:
        stop("interrupted", EXIT_INTERRUPTED)
    output.print(printable_lines(str(report.plan)))
    for line in lacking(report):
        output.print(printable(line))
    output.print(summary(report))


def lacking(report: Report) -> list[str]:
    """What a journal may not say, and what of it the source does not have, in lines."""
    lines = [
        f"the journal may not say everything: {doubt}" for doubt in (report.journal.doubts if report.journal else ())
    ]
    if report.missing:
        lines.append(f"the source lacks {report.missing:,} of the positions that the journal selects")
    return lines


def printable_lines(text: str) -> str:
    """Lines whose characters cannot steer a terminal."""
    return "\n".join(printable(line) for line in text.splitlines())
