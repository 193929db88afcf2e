"""Defines the commands ``lanes spark …``. A command imports pyspark at the start of its session.

A command raises ``ConfigError`` for an invalid option, and ``Misuse`` for options that contradict each other. The
command line prints the error.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from lanes.cli.kit import Misuse, choice, command_group, one_line_errors, stop
from lanes.dead_letter import error_text, printable
from lanes.errors import ConfigError, HandlerHalted
from lanes.process import EXIT_AT_ONCE, EXIT_HALTED, SignalCounter
from lanes_spark.audits.audit import audit
from lanes_spark.cli import options
from lanes_spark.cli.doctor import java_check
from lanes_spark.cli.machine import worker_environment
from lanes_spark.cli.output import lacking, printable_lines, progress_bar, render, summary
from lanes_spark.driver.replay import replay
from lanes_spark.driver.stream import INTERVAL, Stream, stream
from lanes_spark.tables.journal_selection import JournalSelection, Of
from lanes_spark.tables.kafka_topic import KafkaTopic
from lanes_spark.tables.table import ParquetTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger("lanes")

_LOOK: Final = 0.2
"""Maximum time in seconds until a second signal takes effect."""


spark = command_group("Replay stored messages, or audit a journal, on Spark.")


@spark.command("replay")
def replay_command(
    topic: Annotated[str, typer.Option(help="Topic name.", metavar="NAME", show_default=False)],
    handler: options.Handler,
    reads: options.Reads,
    run: options.Run,
    on: options.Spark,
    aligned: bool | None = typer.Option(
        None, help="Read each partition by one task, without shuffle.", show_default="for Kafka"
    ),
    to: str = typer.Option("", help="End position, exclusive; written as --from.", metavar="AT"),
    only: str = typer.Option("", help="State in a journal: dead_lettered, abandoned or unfinished.", metavar="STATE"),
    from_journal: list[str] = typer.Option(
        [], help="Journal for --only; repeatable.", metavar="DIR", show_default=False
    ),
    journal_topic: str = typer.Option(
        "", help="Topic name in that journal.", metavar="NAME", show_default="as --topic"
    ),
    checkpoint: str = typer.Option("", help="Folder to continue from after a crash.", metavar="PATH"),
    explain: bool = typer.Option(False, "--explain", help="Print the plan with its reasons; run nothing."),
) -> None:
    """Run a handler over a table or a Kafka topic.

    Exit status: 0 = done, 3 = failed, 5 = halted by a message, 130 = interrupted by Ctrl-C. This process and local
    workers import modules from the current folder. For a cluster, send the handler's modules by --conf
    spark.submit.pyFiles=PATH.
    """
    # Python adds the current folder to its path for -m, but not for a console script.
    sys.path.insert(0, os.getcwd())
    source = source_of(topic, *reads.parsed(), aligned)
    check_tasks(run.tasks, aligned=source.aligned)
    arguments = run.arguments()
    arguments |= {"to": options.bound("--to", to), "checkpoint": checkpoint or None}
    arguments["only"] = only_of(only, from_journal, journal_topic)
    function = options.load("--handler", handler)
    output = _console()
    with _exit_statuses(), spark_session(on.master, options.pairs("--conf", on.conf)) as session:
        if explain:
            output.print(printable_lines(str(replay(session, source, function, **arguments, explain=True))))
            return
        with progress_bar() as show:
            report = replay(session, source, function, **arguments, progress=show)
    output.print(printable_lines(str(report.plan)))
    for line in lacking(report):
        output.print(printable(line))
    output.print(summary(report))


@spark.command("stream")
def stream_command(
    topic: Annotated[str, typer.Option(help="Kafka topic.", metavar="NAME", show_default=False)],
    servers: Annotated[str, typer.Option("--server", help="Kafka brokers.", metavar="HOST:PORT", show_default=False)],
    handler: options.Handler,
    checkpoint: Annotated[
        str, typer.Option(help="Folder to continue from after a crash.", metavar="PATH", show_default=False)
    ],
    run: options.Run,
    on: options.Spark,
    option: options.KafkaOptions = [],  # noqa: B006 (typer copies it)
    aligned: bool = typer.Option(True, help="Read each partition by one task, without shuffle."),
    interval: float = typer.Option(INTERVAL, help="Seconds between two checks of an idle topic.", metavar="SECONDS"),
) -> None:
    """Run a handler over a Kafka topic until a signal.

    Exit status: 0 = stopped, 3 = failed, 4 = stopped at once, 5 = halted by a message. SIGTERM or SIGINT stops the
    stream after the current batch. A second signal stops the stream at once.
    """
    sys.path.insert(0, os.getcwd())
    source = KafkaTopic(servers=servers, topic=topic, options=options.pairs("-X", option), aligned=aligned)
    check_tasks(run.tasks, aligned=aligned)
    arguments = run.arguments() | {"checkpoint": checkpoint, "interval": interval}
    function = options.load("--handler", handler)
    with (
        _exit_statuses(),
        spark_session(on.master, options.pairs("--conf", on.conf)) as session,
        Signals() as signals,
        progress_bar() as show,
    ):
        if signals.count:
            return
        running = stream(session, source, function, **arguments, progress=show)
        at_once = signals.wait(running)
        report = running.report
    _console().print(summary(report))
    if at_once:
        raise typer.Exit(EXIT_AT_ONCE)


@spark.command("audit")
def audit_command(
    journals: list[str] = typer.Argument(help="Folders of journals.", metavar="DIR", show_default=False),
    findings: str = typer.Option("", help="New folder for the violations as Parquet.", metavar="DIR"),
    topic: str = typer.Option("", help="Topic that had to be handled; needs --table or --server.", metavar="NAME"),
    reads: options.Reads = options.Reads(),  # noqa: B008
    on: options.Spark = options.Spark(),  # noqa: B008
) -> None:
    """Audit journals.

    Exit status: 0 = all promises held, 1 = violated, 2 = unproven, 3 = failed, 130 = interrupted by Ctrl-C.
    """
    source = source_of_audit(topic, *reads.parsed())
    with _exit_statuses(), spark_session(on.master, options.pairs("--conf", on.conf)) as session:
        found = audit(session, journals, source=source, findings_to=findings or None)
    render(found, Console(markup=False, emoji=False, highlight=False))
    raise typer.Exit(found.status)


def _console() -> Console:
    return Console(markup=False, emoji=False, highlight=False, soft_wrap=True)


@contextmanager
def _exit_statuses() -> Iterator[None]:
    """Convert an error of ``lanes``, or an interruption, to one line on stderr and an exit status."""
    with one_line_errors():
        try:
            yield
        except HandlerHalted as error:
            stop(printable(str(error)), EXIT_HALTED)


def source_of(
    topic: str,
    tables: Sequence[str],
    servers: str,
    options: dict[str, str],
    columns: dict[str, str],
    aligned: bool | None = None,
) -> KafkaTopic | ParquetTable:
    """Return the source that the options name.

    Args:
        topic: Topic name.
        tables: Paths of Parquet tables; empty for a Kafka topic.
        servers: Kafka brokers; "" for a table.
        options: Options of Spark's Kafka connector.
        columns: Names of a table's columns.
        aligned: Whether one task reads a whole partition. Default: True for Kafka, False for a table.

    Returns:
        The topic or the table.

    Raises:
        ConfigError: The value of an option is wrong.
        Misuse: The options name no source or two sources, or an option belongs to the other kind of source.
    """
    if bool(tables) == bool(servers):
        raise Misuse("needs either --table PATH or --server HOST:PORT")
    if tables and options:
        raise Misuse("takes no -X with --table, because -X is an option of the Kafka connector")
    if servers and columns:
        raise Misuse("takes no --column with --server, because --column names a column of a table")
    if servers:
        return KafkaTopic(servers=servers, topic=topic, options=options, aligned=aligned is not False)
    return ParquetTable(path=list(tables), topic=topic, columns=columns, aligned=bool(aligned))


def source_of_audit(
    topic: str, tables: Sequence[str], servers: str, options: dict[str, str], columns: dict[str, str]
) -> KafkaTopic | ParquetTable | None:
    """Return the source that the options name; None without options. Raises the errors of ``source_of``."""
    if tables or servers:
        return source_of(topic, tables, servers, options, columns)
    if topic or options or columns:
        raise Misuse("needs --table PATH or --server HOST:PORT with --topic, -X and --column")
    return None


def check_tasks(tasks: int | None, *, aligned: bool) -> None:
    """Raise ``Misuse`` for a number of shuffle tasks with an aligned source, whose plan has no shuffle."""
    if tasks is not None and aligned:
        raise Misuse("takes no --tasks without --no-aligned, because one task reads each partition, without shuffle")


def only_of(of: str, paths: Sequence[str], topic: str) -> JournalSelection | None:
    """Return the selection by a journal; None without options. Raises ``Misuse`` for a missing option."""
    if not of and not paths and not topic:
        return None
    if not of or not paths:
        raise Misuse("needs both --only STATE and --from-journal DIR, or neither of the two")
    return JournalSelection(path=list(paths), of=choice("--only", of, Of), topic=topic or None)


@contextmanager
def spark_session(master: str, conf: dict[str, str]) -> Iterator[SparkSession]:
    """Yield a session, and stop the session after the block. Local workers import modules from the current folder.

    Raises ``ConfigError`` if Spark does not start.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    os.environ.update(worker_environment(master or conf.get("spark.master", ""), os.environ, os.getcwd()))
    builder = SparkSession.builder.appName("lanes spark replay").config("spark.ui.showConsoleProgress", "false")
    if master:
        builder = builder.master(master)
    for name, value in conf.items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
    except PySparkException as error:
        java = java_check(os.environ)
        found = f"Java: {java.detail}; {java.remedy}" if java.ok is False else f"Java is {java.detail}"
        raise ConfigError(
            f"Spark does not start: {error_text(error)}; {found}; see the output of Spark above, and run "
            "`lanes doctor spark`"
        ) from error
    try:
        yield session
    finally:
        try:
            session.stop()
        except Exception as error:
            # The JVM has ended. The command's own error states the cause.
            log.debug("cannot stop the session of Spark: %s: %s", type(error).__name__, error)


class Signals:
    """A counter of SIGTERM and SIGINT during a block. Signals within one second of a signal count as the same signal.

    Enter the block in the main thread, after the start of Spark's session, which installs its own signal handler.
    """

    def __init__(self) -> None:
        self.count = 0
        self._counter = SignalCounter()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def wait(self, running: Stream) -> bool:
        """Wait for the end of the stream. The first signal stops the stream, and the second cancels the stream.

        Args:
            running: The stream to wait for.

        Returns:
            Whether a second signal cancelled the stream.

        Raises:
            LanesError: The stream failed, see ``Stream.join``.
        """
        stopped = False
        while not running.join(_LOOK):
            if self.count > 1:
                running.cancel()
                running.join()
                return True
            if self.count and not stopped:
                stopped = True
                running.stop()
        return False

    def _received(self, number: int, frame: FrameType | None) -> None:
        request = self._counter.received(time.monotonic())
        if not request:
            return
        self.count = request
        name = signal.Signals(number).name
        what = "stopping after the current batch; a second signal stops at once"
        os.write(2, f"lanes: {name}: {what if self.count == 1 else 'stopping at once'}\n".encode())
