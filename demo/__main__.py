"""The demo on the command line: ``python -m demo run`` and ``python -m demo spark``."""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from demo.options import fractions, seconds
from lanes.cli.kit import choice, command_group, require, run_commands, stop

if TYPE_CHECKING:
    import typer

_ADDRESSES: Final = {
    "jetstream": "the demo needs --server URL of a NATS server with JetStream, such as nats://127.0.0.1:4222; "
    "`nats-server -js` starts such a server",
    "kafka": "the demo needs --server HOST:PORT of a Kafka broker, such as 127.0.0.1:9092",
    "postgres": "the demo needs --server URL of a PostgreSQL server, such as postgresql://me@127.0.0.1:5432/test",
}


def main() -> NoReturn:
    """Run a command and exit with its status."""
    run_commands(app, "python -m demo", "the demo")


def app() -> typer.Typer:
    """Return the commands of the demo."""
    import typer

    commands = command_group("Run an event log through real servers, with crashes, and check every promise.")

    @commands.command()
    def run(
        server: str = typer.Option("", help="NATS URL, HOST:PORT of Kafka, or PostgreSQL URL.", metavar="ADDRESS"),
        broker: str = typer.Option("jetstream", help="Kind of broker.", metavar="jetstream|kafka|postgres"),
        members: int | None = typer.Option(
            None,
            help="Number of member processes.",
            metavar="NUMBER",
            show_default="JetStream 1, otherwise 3",
        ),
        width: int = typer.Option(1, help="Number of physical queues that hold the events.", metavar="NUMBER"),
        protocol: str = typer.Option("classic", help="Kafka protocol.", metavar="classic|cooperative|consumer"),
        ranges: bool = typer.Option(False, "--ranges", help="PostgreSQL: members own ranges of keys, which move."),
        data: Path | None = typer.Option(None, help="Log to publish; the default generates one.", metavar="FILE"),
        events: int | None = typer.Option(
            None, help="Number of events to publish.", metavar="NUMBER", show_default="all"
        ),
        latency: str = typer.Option("10ms", help="Mean time of an approval.", metavar="TIME"),
        concurrency: int = typer.Option(500, help="Maximum number of running handlers.", metavar="NUMBER"),
        max_in_flight: int = typer.Option(2_000, help="Bound on delivered, unsettled messages.", metavar="NUMBER"),
        kill_at: str = typer.Option(
            "0.5", help="JetStream: kill the worker at these shares of events.", metavar="FRACTIONS"
        ),
        sample: str = typer.Option("3.5s", help="Length of the serial sample; 0s skips the sample.", metavar="TIME"),
        seed: int = typer.Option(1, help="Seed of the generated log.", metavar="NUMBER"),
        name: str | None = typer.Option(
            None, help="Name of the streams or topics.", metavar="NAME", show_default="random"
        ),
        keep: Path | None = typer.Option(None, help="Keep ledger, history and log in this folder.", metavar="DIR"),
    ) -> None:
        """Run the log under lanes on a real broker.

        In a Kafka group, a JetStream cohort or a subscription in PostgreSQL, the demo kills a member and adds a member.
        The demo also freezes a member until the member loses its partitions, and stops a member. With ``--ranges``,
        ranges of keys also move and split.
        """
        if broker in ("kafka", "postgres"):
            require(f"the demo with --broker {broker}", "cli", broker)
        else:
            require("the demo", "cli", "jetstream")
        if not server:
            stop(_ADDRESSES.get(broker, _ADDRESSES["jetstream"]))
        from demo import DemoConfig, DemoError
        from demo.config import BrokerName, Protocol
        from demo.terminal import main as show

        try:
            config = DemoConfig(
                server=server,
                data=data,
                events=events,
                seed=seed,
                latency=seconds("--latency", latency),
                concurrency=concurrency,
                max_in_flight=max_in_flight,
                kill_at=fractions("--kill-at", kill_at),
                serial_seconds=seconds("--sample", sample),
                name=name,
                keep=keep,
                broker=choice("--broker", broker, BrokerName),
                members=members,
                width=width,
                protocol=choice("--protocol", protocol, Protocol),
                ranges=ranges,
            )
        except DemoError as error:
            stop(str(error))
        raise typer.Exit(show(config))

    @commands.command()
    def spark(
        kafka: str = typer.Option("", help="HOST:PORT of a running Kafka broker.", metavar="ADDRESS"),
        postgres: str = typer.Option(
            "",
            help="PostgreSQL URL; the default is POSTGRES_URL.",
            metavar="URL",
        ),
        jars: str = typer.Option(
            "",
            help="Paths of the connector's jars, separated by commas.",
            metavar="PATHS",
        ),
        data: Path | None = typer.Option(None, help="Log to publish; the default generates one.", metavar="FILE"),
        events: int | None = typer.Option(
            None, help="Number of events to publish.", metavar="NUMBER", show_default="all"
        ),
        latency: str = typer.Option("10ms", help="Mean time of an approval.", metavar="TIME"),
        concurrency: int = typer.Option(500, help="Maximum number of running handlers in a task.", metavar="NUMBER"),
        connections: int = typer.Option(12, help="Number of PostgreSQL connections in a task.", metavar="NUMBER"),
        cores: int = typer.Option(2, help="Number of concurrent tasks.", metavar="NUMBER"),
        seed: int = typer.Option(1, help="Seed of the generated log.", metavar="NUMBER"),
        name: str | None = typer.Option(
            None, help="Name of the topics and the schema.", metavar="NAME", show_default="random"
        ),
        patience: str = typer.Option("5m", help="Time without progress that ends the run.", metavar="TIME"),
        keep: Path | None = typer.Option(None, help="Keep journal and log in this folder.", metavar="DIR"),
    ) -> None:
        """Replay the log on Spark into PostgreSQL, and audit it.

        The demo kills a worker and the driver. The exit status is 0 after a run without a broken promise, 1 after a
        broken promise, and 3 if the run was not possible.
        """
        what = "the demo on Spark"
        require(what, "cli", "kafka", "postgres", "spark")
        if find_spec("psycopg_pool") is None:
            # No extra installs psycopg_pool, because an application with its own connections needs no pool.
            stop(f"{what} needs psycopg_pool: pip install psycopg-pool")
        if not kafka:
            stop(f"{what} needs --kafka HOST:PORT of a Kafka broker, such as 127.0.0.1:9092")
        url = postgres or os.environ.get("POSTGRES_URL", "")
        if not url:
            stop(f"{what} needs --postgres URL of a server, such as postgresql://me@127.0.0.1:5432/test")
        from demo import DemoError
        from demo.spark import SparkConfig
        from demo.spark import run as replayed
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
        raise typer.Exit(show(partial(replayed, config)))

    return commands


if __name__ == "__main__":
    main()
