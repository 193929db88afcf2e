"""The commands ``lanes spark …``, for ``lanes.cli``. pyspark is imported when a replay begins."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lanes.cli import EXIT_UNUSABLE, choice, stop
from lanes.config import Settings
from lanes.errors import ConfigError, HandlerHalted, LanesError
from lanes.letter_views import printable
from lanes_spark.kafka_topic import KafkaTopic
from lanes_spark.plan import Effects
from lanes_spark.replay import ROWS_PER_BATCH, ReplaySource, Report
from lanes_spark.replay import Progress as Reached
from lanes_spark.replay import replay as replay_source
from lanes_spark.selection import Bound
from lanes_spark.table import ParquetTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["bound", "load", "numbers", "settings_of", "spark"]

EXIT_HALTED: Final = 1
"""A message was given up under the poison policy ``exit``."""
EXIT_INTERRUPTED: Final = 130

_NUMBER: Final = re.compile(r"[0-9]{1,19}")
_NUMBERS_LIMIT: Final = 65_536


def spark() -> typer.Typer:
    """``lanes spark …``. A ``ConfigError`` of a command is for the caller to show."""
    commands = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"max_content_width": 110},
    )

    @commands.callback()
    def root() -> None:
        """Spark: a handler over all of history, in order within a key."""

    @commands.command()
    def replay(
        topic: str = typer.Option(..., help="What the messages are of.", metavar="NAME", show_default=False),
        handler: str = typer.Option(
            ..., help="A function, async or plain, of a module that can be imported here.", metavar="MODULE:FUNCTION"
        ),
        table: list[str] = typer.Option(
            [], help="A Parquet table of messages; may be repeated.", metavar="PATH", show_default=False
        ),
        servers: str = typer.Option("", help="Of Kafka, in the place of --table.", metavar="HOST:PORT"),
        option: list[str] = typer.Option(
            [],
            "-X",
            help="An option of Spark's Kafka connector, as kafka.security.protocol=SSL. Others see it.",
            metavar="NAME=VALUE",
            show_default=False,
        ),
        column: list[str] = typer.Option(
            [], help="How a column of the table is called, as key=customer.", metavar="NAME=COLUMN", show_default=False
        ),
        aligned: bool | None = typer.Option(
            None, help="One task reads a whole partition, without a shuffle.", show_default="only of Kafka"
        ),
        keys: list[str] = typer.Option([], help="Only this key; may be repeated.", metavar="KEY", show_default=False),
        slots: str = typer.Option("", help="Only these slots of 65,536, as 0-99,512.", metavar="NUMBERS"),
        partitions: str = typer.Option("", help="Only these partitions, as 0-3,7.", metavar="NUMBERS"),
        from_: str = typer.Option(
            "", "--from", help="The first position, or 0=120,1=80 by partition, or a time with its zone.", metavar="AT"
        ),
        to: str = typer.Option("", help="The same for the end, which is out.", metavar="AT"),
        settings: str = typer.Option("", help="The lanes.Settings for the handler.", metavar="MODULE:NAME"),
        dead_letters: str = typer.Option("", help="Makes the place of dead letters.", metavar="MODULE:FUNCTION"),
        setup: str = typer.Option("", help="Before the handler's first message.", metavar="MODULE:FUNCTION"),
        teardown: str = typer.Option("", help="Behind its last one.", metavar="MODULE:FUNCTION"),
        effects: str = typer.Option("unfenced", help="What the handler leaves behind: none, fenced or unfenced."),
        checkpoint: str = typer.Option("", help="A folder to go on from after a crash.", metavar="PATH"),
        rows_per_batch: int = typer.Option(ROWS_PER_BATCH, help="With --checkpoint: what a batch has at most."),
        tasks: int | None = typer.Option(None, help="Of a shuffle.", show_default="4 for each core"),
        master: str = typer.Option("", help="Of Spark.", show_default="what Spark is set to, else local[*]"),
        conf: list[str] = typer.Option([], help="A setting of Spark.", metavar="NAME=VALUE", show_default=False),
        explain: bool = typer.Option(False, "--explain", help="Run nothing; print the plan, and why."),
    ) -> None:
        """Run a handler over a table or a Kafka topic: exit 0 done, 1 halted by a message, 3 not possible.

        It imports from this folder; so do workers of this machine. On a cluster the handler's modules go along by
        --conf spark.submit.pyFiles=PATH.
        """
        # Python does so for a script and for -m, not for a console script.
        sys.path.insert(0, os.getcwd())
        source = source_of(topic, table, servers, pairs("-X", option), pairs("--column", column), aligned)
        arguments: dict[str, Any] = {
            "settings": settings_of(settings),
            "dead_letters": load("--dead-letters", dead_letters) if dead_letters else None,
            "setup": load("--setup", setup) if setup else None,
            "teardown": load("--teardown", teardown) if teardown else None,
            "keys": [_key(key) for key in keys] or None,
            "slots": numbers("--slots", slots),
            "partitions": numbers("--partitions", partitions),
            "from_": bound("--from", from_),
            "to": bound("--to", to),
            "checkpoint": checkpoint or None,
            "rows_per_batch": rows_per_batch,
            "tasks": tasks,
            "effects": choice("--effects", effects, Effects),
        }
        _run(source, load("--handler", handler), arguments, master, pairs("--conf", conf), explain)

    return commands


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


def load(option: str, text: str) -> Callable[..., Any]:
    """The function of MODULE:FUNCTION. Raises ``ConfigError`` when there is none."""
    found = _named(option, text)
    if not callable(found):
        raise ConfigError(f"{option} {text}: it is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def settings_of(text: str) -> Settings | None:
    """The settings of MODULE:NAME, None for none. Raises ``ConfigError`` for anything else."""
    if not text:
        return None
    found = _named("--settings", text)
    if not isinstance(found, Settings):
        raise ConfigError(f"--settings {text}: it is a {type(found).__name__}, not lanes.Settings")
    return found


def _named(option: str, text: str) -> Any:
    module, _, name = text.partition(":")
    if not module or not name:
        raise ConfigError(f"{option} {text!a}: write MODULE:NAME, as shop.orders:charge")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        # What a module of the user's raises is anything; it is about that module.
        raise ConfigError(f"{option} {text!a}: {module!a} was not imported: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise ConfigError(f"{option} {text!a}: {module} has no {name!a}")
    return found


def numbers(option: str, text: str) -> list[int] | None:
    """Numbers such as 0-99,512; None for none. Raises ``ConfigError`` for anything else."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        if not _NUMBER.fullmatch(first) or (dash and not _NUMBER.fullmatch(last)):
            raise ConfigError(f"{option} {text!a}: write numbers and ranges, as 0-99,512")
        begin, end = int(first), int(last or first)
        if not begin <= end < begin + _NUMBERS_LIMIT:
            raise ConfigError(f"{option} {text!a}: {part} is no range of 1 to {_NUMBERS_LIMIT:,} numbers")
        found += range(begin, end + 1)
    return found or None


def bound(option: str, text: str) -> Bound | None:
    """A position, positions by partition or an aware time; None for none. Raises ``ConfigError`` for anything else."""
    if not text:
        return None
    if _NUMBER.fullmatch(text):
        return int(text)
    if "=" in text:
        split = [part.partition("=") for part in text.split(",")]
        if all(_NUMBER.fullmatch(number) and _NUMBER.fullmatch(position) for number, _, position in split):
            return {int(number): int(position) for number, _, position in split}
    else:
        try:
            return datetime.fromisoformat(text)
        except ValueError:
            pass
    raise ConfigError(f"{option} {text!a}: write a position, 0=120,1=80 by partition, or 2024-05-01T00:00:00+00:00")


def pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE words. Raises ``ConfigError`` for others, without the value."""
    split = [text.partition("=") for text in texts]
    for name, sign, _ in split:
        if not name or not sign:
            raise ConfigError(f"{option} {name!a}: write NAME=VALUE")
    return {name: value for name, _, value in split}


def _key(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ConfigError(f"--keys {text!a}: {error.reason}") from None


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
        with _session(master, conf) as session:
            if explain:
                output.print(printable_lines(str(replay_source(session, source, handler, **arguments, explain=True))))
                return
            with _bar() as show:
                report = replay_source(session, source, handler, **arguments, progress=show)
    except HandlerHalted as error:
        stop(printable(str(error)), EXIT_HALTED)
    except LanesError as error:
        stop(printable(str(error)), EXIT_UNUSABLE)
    except KeyboardInterrupt:
        stop("interrupted", EXIT_INTERRUPTED)
    output.print(printable_lines(str(report.plan)))
    output.print(summary(report))


def summary(report: Report) -> str:
    """A report in one line."""
    rate = report.delivered / report.seconds if report.seconds else 0.0
    return (
        f"{report.delivered:,} delivered, {report.finished:,} finished, {report.dead_lettered:,} of them "
        f"dead-lettered, {report.skipped:,} skipped; {report.batches} batches in {report.seconds:.1f} s, "
        f"{rate:,.0f} rows/s"
    )


def printable_lines(text: str) -> str:
    """Lines whose characters cannot steer a terminal."""
    return "\n".join(printable(line) for line in text.splitlines())


@contextmanager
def _session(master: str, conf: dict[str, str]) -> Iterator[SparkSession]:
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    if not master or master.startswith("local"):
        # The workers' Python would be any python3 of the path else, and they would not find the handler.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        paths = [os.getcwd(), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join([path for path in paths if path])
    builder = SparkSession.builder.appName("lanes spark replay").config("spark.ui.showConsoleProgress", "false")
    if master:
        builder = builder.master(master)
    for name, value in conf.items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
    except PySparkException as error:
        raise ConfigError(
            f"Spark does not start: {error}; it needs Java 17 or newer, on PATH or in JAVA_HOME"
        ) from error
    try:
        yield session
    finally:
        session.stop()


@contextmanager
def _bar() -> Iterator[Callable[[Reached], None]]:
    """Progress on stderr, where that is a terminal; what is to be called after each batch."""
    console = Console(stderr=True)
    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("positions"),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        shown = progress.add_task("reading", total=None)

        def show(reached: Reached) -> None:
            rate = reached.delivered / reached.seconds if reached.seconds else 0.0
            progress.update(
                shown,
                description=f"batch {reached.batches}: {reached.delivered:,} rows, {rate:,.0f} rows/s",
                total=reached.positions,
                completed=reached.positions - reached.left,
            )

        yield show
