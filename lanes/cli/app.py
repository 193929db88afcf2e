"""``lanes …``: the console script."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lanes.cli.kit import EXIT_USAGE, choice, command_group, fractions, require, seconds, stop

if TYPE_CHECKING:
    import typer

__all__ = ["app", "main"]


def main() -> NoReturn:
    """The console script. Raises ``SystemExit`` with the command's status."""
    require("the command line", "cli")
    try:
        status = app()(args=sys.argv[1:] or ["--help"], standalone_mode=False, prog_name="lanes")
    except Exception as error:
        # The class of a parser's error depends on the version of typer; all of them format their message.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        stop(f"{message().rstrip('.')}; run `lanes --help` for the commands", EXIT_USAGE)
    sys.exit(status)


def app() -> typer.Typer:
    """Make the command line of everything that is installed."""
    import typer

    from lanes.cli.registered import register

    commands = command_group()

    @commands.callback(invoke_without_command=True)
    def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        """Ordered concurrency for Kafka and JetStream consumers."""
        if version:
            from lanes import __version__

            print(f"lanes {__version__}")
            raise typer.Exit

    @commands.command()
    def demo(
        server: str = typer.Option(
            "", help="URL of a running NATS server with JetStream, or host:port of a Kafka broker.", metavar="ADDRESS"
        ),
        broker: str = typer.Option("jetstream", help="What runs there: jetstream or kafka."),
        members: int | None = typer.Option(
            None,
            help="Processes: a Kafka group, or, with 2 or more, a JetStream cohort.",
            show_default="Kafka 3, JetStream 1",
        ),
        protocol: str = typer.Option("classic", help="Kafka: classic, cooperative or consumer (KIP-848)."),
        data: Path | None = typer.Option(None, help="A log to publish; without it one is generated.", metavar="FILE"),
        events: int | None = typer.Option(None, help="Only so many events of the log.", show_default="all"),
        latency: str = typer.Option("10ms", help="How long an approval takes, ± half of it."),
        concurrency: int = typer.Option(500, help="Handlers running at once."),
        max_in_flight: int = typer.Option(2_000, help="Messages delivered and not yet settled, a hard bound."),
        kill_at: str = typer.Option(
            "0.5", help="JetStream: fractions at which the worker is killed with -9, as 0.2,0.8."
        ),
        sample: str = typer.Option("3.5s", help="How long one-at-a-time is measured; 0s = not."),
        seed: int = typer.Option(1, help="Of the generated log."),
        name: str | None = typer.Option(None, help="Names the streams or topics on the server.", show_default="random"),
        keep: Path | None = typer.Option(None, help="Keep ledger, history and log in this folder.", metavar="DIR"),
    ) -> None:
        """Run a real log through a real server, with crashes. Then check every promise.

        On Kafka in a group, and with two or more members on JetStream in a cohort: one of them is killed, one added,
        one frozen for so long that it loses what it had, one stopped.
        """
        if broker == "kafka":
            require("`lanes demo --broker kafka`", "cli", "kafka")
        else:
            require("`lanes demo`", "cli", "jetstream")
        if not server:
            stop(
                "`lanes demo` needs --server HOST:PORT of a Kafka broker, such as 127.0.0.1:9092"
                if broker == "kafka"
                else "`lanes demo` needs --server URL of a NATS server with JetStream, such as nats://127.0.0.1:4222; "
                "`nats-server -js` starts one there"
            )
        from demo import DemoConfig, DemoError
        from demo.broker import BrokerName
        from demo.config import Protocol
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
                protocol=choice("--protocol", protocol, Protocol),
            )
        except DemoError as error:
            stop(str(error))
        raise typer.Exit(show(config))

    groups = {
        "": commands,
        "doctor": command_group("Check a configuration and its environment. Exit 0 usable, 3 not."),
        "journal": command_group("Convert histories to Parquet files, for SQL and Spark."),
    }
    for name in ("doctor", "journal"):
        commands.add_typer(groups[name], name=name)
    for point in sorted(entry_points(group="lanes.commands")):
        parent, _, name = point.name.rpartition(".")
        register(groups[parent], name, point)
    return commands
