"""Declares and parses the options that the commands of ``lanes spark`` share."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, NamedTuple

import typer

from lanes.cli.kit import choice
from lanes.config import Settings
from lanes.errors import ConfigError
from lanes_spark.driver.run import ROWS_PER_BATCH
from lanes_spark.driver.selection import Bound
from lanes_spark.plan import Effects

_NUMBER: Final = re.compile(r"[0-9]{1,19}")
_NUMBERS_LIMIT: Final = 65_536

Handler = Annotated[str, typer.Option(help="Handler to run, async or plain.", metavar="MODULE:FUNCTION")]
KafkaOptions = Annotated[
    list[str],
    typer.Option(
        "-X", help="Option of Spark's Kafka connector, visible to others.", metavar="NAME=VALUE", show_default=False
    ),
]
Effect = Annotated[
    str, typer.Option(help="Kind of effects that the handler has outside its process.", metavar="none|fenced|unfenced")
]


class Spark(NamedTuple):
    """The options that the command passes to Spark."""

    master: Annotated[
        str, typer.Option(help="Spark master.", metavar="URL", show_default="Spark's own setting, else local[*]")
    ] = ""
    conf: Annotated[
        list[str], typer.Option(help="Setting of Spark; repeatable.", metavar="NAME=VALUE", show_default=False)
    ] = []  # noqa: RUF012 (typer copies it)


class Reads(NamedTuple):
    """The options that name a table, or the topic of a broker."""

    table: Annotated[
        list[str],
        typer.Option("--table", help="Parquet table to read; repeatable.", metavar="PATH", show_default=False),
    ] = []  # noqa: RUF012 (typer copies it)
    servers: Annotated[
        str,
        typer.Option("--server", help="Kafka brokers, instead of --table.", metavar="HOST:PORT", show_default=False),
    ] = ""
    option: KafkaOptions = []  # noqa: RUF012
    column: Annotated[
        list[str],
        typer.Option(
            "--column",
            help="Column of the table, as key=customer; repeatable.",
            metavar="NAME=COLUMN",
            show_default=False,
        ),
    ] = []  # noqa: RUF012

    def parsed(self) -> tuple[list[str], str, dict[str, str], dict[str, str]]:
        """Return the tables, brokers, Kafka options and columns. Raises ``ConfigError`` for a wrong option."""
        return self.table, self.servers, pairs("-X", self.option), pairs("--column", self.column)


class Run(NamedTuple):
    """The options of both a replay and a stream."""

    keys: Annotated[list[str], typer.Option(help="Only this key; repeatable.", metavar="KEY", show_default=False)] = []  # noqa: RUF012 (typer copies it)
    slots: Annotated[str, typer.Option(help="Only these slots of 65,536, as 0-99,512.", metavar="NUMBERS")] = ""
    partitions: Annotated[str, typer.Option(help="Only these partitions, as 0-3,7.", metavar="NUMBERS")] = ""
    from_: Annotated[
        str, typer.Option("--from", help="First position: 7, 0=120,1=80 or a time with zone.", metavar="AT")
    ] = ""
    settings: Annotated[str, typer.Option(help="lanes.Settings of the handler.", metavar="MODULE:NAME")] = ""
    dead_letters: Annotated[str, typer.Option(help="Creates the dead letter store.", metavar="MODULE:FUNCTION")] = ""
    setup: Annotated[str, typer.Option(help="Called before the first message.", metavar="MODULE:FUNCTION")] = ""
    teardown: Annotated[str, typer.Option(help="Called after the last message.", metavar="MODULE:FUNCTION")] = ""
    effects: Effect = "unfenced"
    rows_per_batch: Annotated[
        int, typer.Option(help="Maximum number of rows of a batch; needs --checkpoint.", metavar="NUMBER")
    ] = ROWS_PER_BATCH
    journal: Annotated[str, typer.Option(help="Folder for the journals of all tasks.", metavar="DIR")] = ""
    tasks: Annotated[
        int | None, typer.Option(help="Number of shuffle tasks.", metavar="NUMBER", show_default="4 per core")
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Return the ``RunOptions``. Raises ``ConfigError`` for a wrong option."""
        return {
            "rows_per_batch": self.rows_per_batch,
            "tasks": self.tasks,
            "settings": settings_of(self.settings),
            "dead_letters": load("--dead-letters", self.dead_letters) if self.dead_letters else None,
            "setup": load("--setup", self.setup) if self.setup else None,
            "teardown": load("--teardown", self.teardown) if self.teardown else None,
            "keys": [_key_of(key) for key in self.keys] or None,
            "slots": numbers("--slots", self.slots),
            "partitions": numbers("--partitions", self.partitions),
            "from_": bound("--from", self.from_),
            "journal": self.journal or None,
            "effects": choice("--effects", self.effects, Effects),
        }


def load(option: str, text: str) -> Callable[..., Any]:
    """Import the function of MODULE:FUNCTION. Raises ``ConfigError`` if the import fails or finds no function."""
    found = _named(option, text)
    if not callable(found):
        raise ConfigError(f"{option} {text}: {text} is a {type(found).__name__}; name a function")
    return found  # type: ignore[no-any-return]


def settings_of(text: str) -> Settings | None:
    """Import the settings of MODULE:NAME; None for an empty text. Raises ``ConfigError`` for any other object."""
    if not text:
        return None
    found = _named("--settings", text)
    if not isinstance(found, Settings):
        raise ConfigError(f"--settings {text}: {text} is a {type(found).__name__}; name a lanes.Settings")
    return found


def _named(option: str, text: str) -> Any:
    module, _, name = text.partition(":")
    if not module or not name:
        raise ConfigError(f"{option} {text!a}: write MODULE:NAME, as shop.orders:charge")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        # A module of the user may raise any exception.
        raise ConfigError(
            f"{option} {text!a}: {module!a} cannot be imported ({type(error).__name__}: {error}): correct the "
            "module, or set PYTHONPATH"
        ) from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise ConfigError(f"{option} {text!a}: {module} has no {name!a}: correct the name")
    return found


def numbers(option: str, text: str) -> list[int] | None:
    """Parse numbers such as 0-99,512; None for an empty text. Raises ``ConfigError`` for any other text."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        if not _NUMBER.fullmatch(first) or (dash and not _NUMBER.fullmatch(last)):
            raise ConfigError(f"{option} {text!a}: write numbers and ranges, as 0-99,512")
        begin, end = int(first), int(last or first)
        if not begin <= end < begin + _NUMBERS_LIMIT:
            raise ConfigError(
                f"{option} {text!a}: {part} is no range of 1 to {_NUMBERS_LIMIT:,} numbers; correct {part}"
            )
        found += range(begin, end + 1)
    return found or None


def bound(option: str, text: str) -> Bound | None:
    """Parse a position, positions by partition or a time in ISO 8601; None for an empty text.

    Raises ``ConfigError`` for any other text.
    """
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
    """Parse words of the form NAME=VALUE.

    Raises ``ConfigError`` for any other word. The error text omits the values.
    """
    split = [text.partition("=") for text in texts]
    for name, sign, _ in split:
        if not name or not sign:
            raise ConfigError(f"{option} {name!a}: write NAME=VALUE")
    return {name: value for name, _, value in split}


def _key_of(text: str) -> bytes:
    """Return the bytes of a key from the command line. Raises ``ConfigError`` for a text without such bytes."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ConfigError(f"--keys {text!a}: {error.reason}; write the key as UTF-8") from None
