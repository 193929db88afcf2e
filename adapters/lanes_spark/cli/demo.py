"""The command ``lanes spark demo``. What it needs beside pyspark is imported when it runs."""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import typer

from lanes.cli.kit import require, seconds, stop

__all__ = ["demo"]


def demo(
    kafka: str = typer.Option("", help="HOST:PORT of a running Kafka broker.", metavar="ADDRESS"),
    postgres: str = typer.Option(
        "",
        help="Of a running PostgreSQL server; without it POSTGRES_URL of the environment, which others do not see.",
        metavar="URL",
    ),
    jars: str = typer.Option(
        "",
        help="Jars of Spark's Kafka connector, separated by commas; without them Spark has to find it.",
        metavar="PATHS",
    ),
    data: Path | None = typer.Option(None, help="A log to publish; without it one is generated.", metavar="FILE"),
    events: int | None = typer.Option(None, help="Only so many events of the log.", show_default="all"),
    latency: str = typer.Option("10ms", help="How long an approval takes, ± half of it."),
    concurrency: int = typer.Option(500, help="Handlers running at once in a task."),
    connections: int = typer.Option(12, help="To PostgreSQL, in a task."),
    cores: int = typer.Option(2, help="Tasks at once."),
    seed: int = typer.Option(1, help="Of the generated log."),
    name: str | None = typer.Option(None, help="Names topics and schema on the servers.", show_default="random"),
    patience: str = typer.Option("5m", help="How long nothing may happen before the run is given up."),
    keep: Path | None = typer.Option(None, help="Keep journal and log in this folder.", metavar="DIR"),
) -> None:
    """Replay a real log with fenced effects in PostgreSQL. A worker and the driver are killed; it is audited.

    Exit 0 when every promise was kept, 1 when one broke, 3 when it was not possible. The last line is the report as one
    JSON object. The topics and the schema that it makes are removed at the end.
    """
    what = "`lanes spark demo`"
    require(what, "cli", "kafka", "postgres", "spark")
    if find_spec("psycopg_pool") is None:
        # In no extra: whoever has a connection of their own needs no pool.
        stop(f"{what} needs psycopg_pool: pip install psycopg-pool")
    if not kafka:
        stop(f"{what} needs --kafka HOST:PORT of a Kafka broker, such as 127.0.0.1:9092")
    url = postgres or os.environ.get("POSTGRES_URL", "")
    if not url:
        stop(f"{what} needs --postgres URL of a server, such as postgresql://me@127.0.0.1:5432/test")
    from demo import DemoError
    from demo.spark import SparkConfig, run
    from demo.terminal import show

    try:
        config = SparkConfig(
            kafka=kafka,
            postgres=url,
            jars=[jar for jar in jars.split(",") if jar],
            data=data,
            events=events,
            seed=seed,
            latency=seconds("--latency", latency),
            concurrency=concurrency,
            connections=connections,
            cores=cores,
            name=name,
            stall_timeout=seconds("--patience", patience),
            keep=keep,
        )
    except DemoError as error:
        stop(str(error))
    raise typer.Exit(show(partial(run, config)))
