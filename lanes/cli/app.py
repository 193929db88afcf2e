"""``lanes …``: the command line. Needs the extra ``cli``; adapters and ``memsource`` are imported when used."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, get_args

from lanes.process import EXIT_INTERRUPTED, EXIT_UNUSABLE, EXIT_USAGE

if TYPE_CHECKING:
    import typer

__all__ = [
    "EXIT_INTERRUPTED",
    "EXIT_UNUSABLE",
    "EXIT_USAGE",
    "choice",
    "command_group",
    "main",
    "require",
    "seconds",
    "stop",
]


# All that follows belongs to an adapter, which parses it.
_PASSED_ON: Final = {"ignore_unknown_options": True, "allow_interspersed_args": False}

_SECONDS: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(us|ms|s|m)")
_DECIMAL_DIGITS: Final = 39
_DECIMAL: Final = re.compile(rf"-?[0-9]{{1,{_DECIMAL_DIGITS}}}")
_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


def main() -> NoReturn:
    """The console script. Raises ``SystemExit`` with the command's status."""
    require("the command line", "cli", "typer", "rich")
    try:
        status = app()(args=sys.argv[1:] or ["--help"], standalone_mode=False, prog_name="lanes")
    except Exception as error:
        # The parser's own errors, whatever its version calls them, know how to say what is wrong.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        stop(f"{message().rstrip('.')}; `lanes --help` shows what there is", EXIT_USAGE)
    sys.exit(status)


def app() -> typer.Typer:
    """The commands."""
    import typer

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
            require("`lanes demo --broker kafka`", "cli,kafka", "confluent_kafka")
        else:
            require("`lanes demo`", "cli,jetstream", "nats")
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

    @commands.command()
    def check(
        files: list[Path] = typer.Argument(
            help="Files of histories and journals, or folders of them.", metavar="FILE", show_default=False
        ),
    ) -> None:
        """Check the promises over histories. Exit 0 passed, 1 violated, 2 unproven, 3 unreadable."""
        from memsource import check_files

        checked = check_files(files)
        if checked.verdicts:
            print(checked.text, flush=True)
        else:
            stop(checked.text, checked.status)
        raise typer.Exit(checked.status)

    @commands.command()
    def ring(
        keys: list[str] = typer.Argument(
            help="Keys; one that starts with a dash goes behind `--`.", metavar="KEY", show_default=False
        ),
        partitions: int = typer.Option(64, help="Of how many partitions."),
        lanes: int = typer.Option(16, help="Of how many lanes."),
        as_int: bool = typer.Option(False, "--int", help="The keys are decimal numbers, 0 … 2**128-1."),
    ) -> None:
        """Show where keys go: slot of 65,536, partition and lane."""
        from rich.console import Console
        from rich.table import Table

        from lanes.core.ring import lane, partition, slot

        table = Table()
        table.add_column("key", overflow="fold")
        for heading in ("slot", f"partition of {partitions}", f"lane of {lanes}"):
            table.add_column(heading, justify="right")
        for text in keys:
            try:
                key = int_key(text) if as_int else text.encode("utf-8", "surrogateescape")
                places = slot(key), partition(key, partitions), lane(key, lanes)
            except ValueError as error:
                stop(str(error))
            # A key is anybody's text: escaped, it can neither steer the terminal nor reorder a row.
            table.add_row(ascii(key if as_int else text), *(str(place) for place in places))
        Console(markup=False, emoji=False, highlight=False).print(table)

    @commands.command(add_help_option=False, context_settings=_PASSED_ON)
    def kafka(arguments: list[str] = typer.Argument(default=None)) -> None:
        """Kafka: where producers put a key."""
        require("`lanes kafka`", "cli,kafka", "confluent_kafka")
        from lanes_kafka.cli.commands import kafka as inner

        raise typer.Exit(passed_on(inner(), "lanes kafka", arguments))

    @commands.command(add_help_option=False, context_settings=_PASSED_ON)
    def spark(arguments: list[str] = typer.Argument(default=None)) -> None:
        """Spark: a handler over all of history."""
        require("`lanes spark`", "cli,spark", "pyspark", "pyarrow")
        from lanes_spark.cli.commands import spark as inner

        raise typer.Exit(passed_on(inner(), "lanes spark", arguments))

    doctor = typer.Typer()
    commands.add_typer(doctor, name="doctor")

    @doctor.callback()
    def doctors() -> None:
        """Check a configuration, and what it is to work with. Exit 0 usable, 3 not."""

    @doctor.command("kafka", add_help_option=False, context_settings=_PASSED_ON)
    def doctor_kafka(arguments: list[str] = typer.Argument(default=None)) -> None:
        """Check the settings of a Kafka client."""
        require("`lanes doctor kafka`", "cli,kafka", "confluent_kafka")
        from lanes_kafka.cli.commands import doctor as inner

        raise typer.Exit(passed_on(inner(), "lanes doctor kafka", arguments))

    @doctor.command("spark", add_help_option=False, context_settings=_PASSED_ON)
    def doctor_spark(arguments: list[str] = typer.Argument(default=None)) -> None:
        """Check what Spark finds on this machine."""
        require("`lanes doctor spark`", "cli,spark", "pyspark", "pyarrow")
        from lanes_spark.cli.doctor_command import doctor as inner

        raise typer.Exit(passed_on(inner(), "lanes doctor spark", arguments, bare=[]))

    journal = typer.Typer()
    commands.add_typer(journal, name="journal")

    @journal.callback()
    def journals() -> None:
        """Journals: histories as Parquet files, for SQL and for Spark. `lanes check` reads them too."""

    @journal.command("convert")
    def convert(
        files: list[Path] = typer.Argument(help="History files.", metavar="FILE", show_default=False),
        to: Path = typer.Option(
            ..., help="The folder of the Parquet files, which is created.", metavar="DIR", show_default=False
        ),
    ) -> None:
        """Make a Parquet file of each history file, and print its name. Exit 0 done, 3 unreadable."""
        require("`lanes journal convert`", "cli,journal", "pyarrow")
        from memsource.history.journal import JournalError
        from memsource.history.journal import convert as converted

        try:
            made = converted(files, to)
        except JournalError as error:
            stop(str(error))
        for path in made:
            print(path)

    from lanes.cli.cohort import cohort
    from lanes.cli.dead_letters import dead_letters

    commands.add_typer(dead_letters(), name="dead-letters")
    commands.add_typer(cohort(), name="cohort")
    return commands


def command_group() -> typer.Typer:
    """A group of commands whose help and errors are plain text."""
    import typer

    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"max_content_width": 110},
    )


def passed_on(commands: typer.Typer, name: str, arguments: list[str] | None, bare: Sequence[str] = ("--help",)) -> int:
    """The status of an adapter's own commands; what they cannot use ends the process with one line.

    ``bare``: what they are called with when nothing is given.
    """
    from lanes.errors import ConfigError

    try:
        return int(commands(args=arguments or list(bare), standalone_mode=False, prog_name=name) or 0)
    except ConfigError as error:
        stop(str(error))


def seconds(option: str, text: str) -> float:
    """A duration such as ``10ms`` in seconds; anything else ends the process with one line."""
    found = _SECONDS.fullmatch(text)
    if found is None:
        stop(f"{option} {text!r}: must be a number with a unit, such as 10ms, 0.5s or 2m")
    return float(found[1]) * _UNITS[found[2]]


def fractions(option: str, text: str) -> tuple[float, ...]:
    """Numbers separated by commas, or none; anything else ends the process with one line."""
    try:
        return tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        stop(f"{option} {text!r}: must be fractions separated by commas, such as 0.2,0.8, or empty for none")


def choice(option: str, text: str, kinds: Any) -> Any:
    """One of the words of a ``Literal``; anything else ends the process with one line."""
    words = get_args(kinds)
    if text not in words:
        stop(f"{option} {text!r}: must be {' or '.join(words)}")
    return text


def int_key(text: str) -> int:
    """A key in decimal; anything else ends the process with one line."""
    if _DECIMAL.fullmatch(text) is None:
        stop(f"KEY {text!a}: must be a decimal number of up to {_DECIMAL_DIGITS} digits with --int")
    return int(text)


def require(what: str, extra: str, *modules: str) -> None:
    """End the process with one line unless these modules can be imported."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        stop(f"{what} needs {' and '.join(missing)}: pip install 'lanes-runtime[{extra}]'")


def stop(text: str, status: int = EXIT_UNUSABLE) -> NoReturn:
    """End the process with one line on stderr."""
    print(f"lanes: {text}", file=sys.stderr, flush=True)
    sys.exit(status)
