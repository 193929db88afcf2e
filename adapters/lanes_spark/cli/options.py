"""What the commands of ``lanes spark`` share: options, declared and read, and a session for as long as a command
lasts."""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from lanes.cli.kit import choice
from lanes.config import Settings
from lanes.dead_letter import error_text
from lanes.errors import ConfigError
from lanes_spark.cli.doctor import java_check
from lanes_spark.cli.machine import worker_environment
from lanes_spark.driver.selection import Bound
from lanes_spark.plan import Effects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "EffectsName",
    "FirstPosition",
    "Handler",
    "Journal",
    "KafkaInstead",
    "KafkaOptions",
    "Keys",
    "LetterMaker",
    "Master",
    "Partitions",
    "SettingsName",
    "Setup",
    "Slots",
    "SparkConf",
    "Tasks",
    "Teardown",
    "arguments_of",
    "bound",
    "load",
    "numbers",
    "pairs",
    "settings_of",
    "spark_session",
]

log = logging.getLogger("lanes")

_NUMBER: Final = re.compile(r"[0-9]{1,19}")
_NUMBERS_LIMIT: Final = 65_536

Handler = Annotated[
    str,
    typer.Option(help="A function, async or plain, of a module that can be imported here.", metavar="MODULE:FUNCTION"),
]
KafkaInstead = Annotated[str, typer.Option(help="Of Kafka, in the place of --table.", metavar="HOST:PORT")]
KafkaOptions = Annotated[
    list[str],
    typer.Option(
        "-X",
        help="An option of Spark's Kafka connector, as kafka.security.protocol=SSL. Others see it.",
        metavar="NAME=VALUE",
        show_default=False,
    ),
]
Keys = Annotated[list[str], typer.Option(help="Only this key; may be repeated.", metavar="KEY", show_default=False)]
Slots = Annotated[str, typer.Option(help="Only these slots of 65,536, as 0-99,512.", metavar="NUMBERS")]
Partitions = Annotated[str, typer.Option(help="Only these partitions, as 0-3,7.", metavar="NUMBERS")]
FirstPosition = Annotated[
    str,
    typer.Option(
        "--from", help="The first position, or 0=120,1=80 by partition, or a time with its zone.", metavar="AT"
    ),
]
SettingsName = Annotated[str, typer.Option(help="The lanes.Settings for the handler.", metavar="MODULE:NAME")]
LetterMaker = Annotated[str, typer.Option(help="Makes the place of dead letters.", metavar="MODULE:FUNCTION")]
Setup = Annotated[str, typer.Option(help="Before the handler's first message.", metavar="MODULE:FUNCTION")]
Teardown = Annotated[str, typer.Option(help="Behind its last one.", metavar="MODULE:FUNCTION")]
EffectsName = Annotated[str, typer.Option(help="What the handler leaves behind: none, fenced or unfenced.")]
Journal = Annotated[str, typer.Option(help="A folder, for the journals of all tasks.", metavar="DIR")]
Tasks = Annotated[int | None, typer.Option(help="Of a shuffle.", show_default="4 for each core")]
Master = Annotated[str, typer.Option(help="Of Spark.", show_default="what Spark is set to, else local[*]")]
SparkConf = Annotated[
    list[str], typer.Option(help="A setting of Spark; may be repeated.", metavar="NAME=VALUE", show_default=False)
]


def arguments_of(
    *,
    settings: str,
    dead_letters: str,
    setup: str,
    teardown: str,
    keys: Sequence[str],
    slots: str,
    partitions: str,
    from_: str,
    rows_per_batch: int,
    journal: str,
    tasks: int | None,
    effects: str,
) -> dict[str, Any]:
    """What a replay and a stream both take, from the options of these names. Raises ``ConfigError``."""
    return {
        "settings": settings_of(settings),
        "dead_letters": load("--dead-letters", dead_letters) if dead_letters else None,
        "setup": load("--setup", setup) if setup else None,
        "teardown": load("--teardown", teardown) if teardown else None,
        "keys": [_key_of(key) for key in keys] or None,
        "slots": numbers("--slots", slots),
        "partitions": numbers("--partitions", partitions),
        "from_": bound("--from", from_),
        "rows_per_batch": rows_per_batch,
        "journal": journal or None,
        "tasks": tasks,
        "effects": choice("--effects", effects, Effects),
    }


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
        raise ConfigError(
            f"{option} {text!a}: {module!a} cannot be imported ({type(error).__name__}: {error}): correct it, or set "
            "PYTHONPATH"
        ) from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise ConfigError(f"{option} {text!a}: {module} has no {name!a}: correct the name")
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


def _key_of(text: str) -> bytes:
    """The bytes of a key, also where they are no UTF-8. Raises ``ConfigError`` for what is no text of a shell."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ConfigError(f"--keys {text!a}: {error.reason}") from None


@contextmanager
def spark_session(master: str, conf: dict[str, str]) -> Iterator[SparkSession]:
    """A session, stopped at the end. Workers of this machine get its Python and folder. Raises ``ConfigError`` when it
    does not begin."""
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
        found = f"Java: {java.detail}; {java.remedy}" if java.ok is False else f"it began with {java.detail}"
        raise ConfigError(
            f"Spark does not start: {error_text(error)}; {found}; see what it printed, and `lanes doctor spark`"
        ) from error
    try:
        yield session
    finally:
        try:
            session.stop()
        except Exception as error:
            # Its JVM is gone. Whatever the command ended by says more.
            log.debug("the session of Spark was not stopped: %s: %s", type(error).__name__, error)
