"""The commands ``lanes kafka …`` and ``lanes doctor kafka``.

The commands raise ``ConfigError`` and ``Misuse``, which the command line prints.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Final

import typer
from rich.table import Table

from lanes.cli.doctor import conclude
from lanes.cli.kit import EXIT_USAGE, Misuse, command_group, option_values, print_table, stop, waiting_line
from lanes.core.types import key_bytes
from lanes_kafka.cli.config_file import given_settings
from lanes_kafka.cli.doctor import examine
from lanes_kafka.config import ClientConfig, client_config, misspelt
from lanes_kafka.dead_letters.box import KafkaDeadLetterBox
from lanes_kafka.partitioners import crc32_partition, murmur2_partition

_DIGITS: Final = re.compile(r"[0-9]{1,39}")


kafka = command_group("Show where Kafka producers put a key.")


def dead_letter_box(topic: str, server: str, config: Path | None, settings: list[str]) -> KafkaDeadLetterBox:
    """Make the dead-letter box of ``lanes dead-letters --topic``.

    Args:
        topic: Name of the dead-letter topic.
        server: Address of a broker, which overrides the address in the file; "" = no address.
        config: File with the client's settings; None = no file.
        settings: Texts ``name=value``, which override the file and ``server``.

    Returns:
        The box, which is not open yet.

    Raises:
        ConfigError: The file, a setting or the topic name is invalid.
        Misuse: The file and the arguments name no address of a broker.
    """
    read = given_settings(config, settings, server=server)
    if "debug" in read:
        logging.basicConfig()
        logging.getLogger("lanes.kafka.client").setLevel(logging.DEBUG)
    return KafkaDeadLetterBox(read, topic)


@kafka.command()
def partition(
    keys: list[str] = typer.Argument(
        help="Show these keys; write `--` before a leading dash.", metavar="KEY", show_default=False
    ),
    partitions: int = typer.Option(..., help="Number of partitions of the topic.", metavar="NUMBER"),
    as_int: bool = typer.Option(False, "--int", help="Read keys as decimal numbers; hash each as 16 bytes."),
    as_hex: bool = typer.Option(False, "--hex", help="Read keys as bytes in hex, two digits each."),
) -> None:
    """Show the partition that producers choose for a key.

    Java clients and kafka-python use murmur2. librdkafka uses CRC-32 by default. lanes encodes a number as a key of
    16 bytes. A Java Long has 8 bytes, so give such a key with --hex. For example, the Long 42 is 000000000000002a.
    """
    if as_int and as_hex:
        raise Misuse("takes --int or --hex, not both")
    if partitions < 1:
        stop(f"--partitions {partitions}: must be 1 or more", EXIT_USAGE)
    table = Table()
    table.add_column("key", overflow="fold")
    for heading in ("murmur2", "CRC-32"):
        table.add_column(heading, justify="right")
    for text in keys:
        key = _int_key(text) if as_int else _hex_key(text) if as_hex else _text_key(text)
        shown = text if as_int or as_hex else ascii(text)
        table.add_row(shown, str(murmur2_partition(key, partitions)), str(crc32_partition(key, partitions)))
    print_table(table)


def doctor(
    server: str = typer.Option("", help="Kafka brokers, separated by commas.", metavar="HOST:PORT"),
    group: str = typer.Option("", help="Check the settings for this consumer group.", metavar="NAME"),
    config: Path | None = typer.Option(None, help="Read the client's settings from a file.", metavar="FILE"),
    settings: list[str] = typer.Option(
        [],
        "-X",
        help="Override a setting of the file; never a password.",
        metavar="NAME=VALUE",
        show_default=False,
    ),
    topics: list[str] = typer.Option(
        [], "--topic", help="Check this topic; repeatable.", metavar="NAME", show_default=False
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Check a client's settings with its broker.

    Exit status: 0 = usable, 3 = a check failed. The command joins no group and writes nothing. Each question
    takes at most 5 seconds. A file holds name=value lines, or it is a .json or .toml file. Other users can see the
    arguments of a process, so put passwords into the file.
    """
    for name in topics:
        if "," in name:
            raise Misuse(f"has --topic {name!a}, and a name has no comma; repeat the option: --topic NAME --topic NAME")
    with option_values():
        given = given_settings(config, settings, server=server, group=group)
        if not given.get("group.id"):
            raise Misuse(f"needs --group NAME, or group.id in --config FILE or by -X{misspelt('group.id', given)}")
        read = client_config(given)
    with waiting_line("the Kafka broker", server):
        checks = examine(read, topics)
    conclude(checks, as_json=as_json, facts=_facts(read), tables=[_chosen(read)])


def _facts(config: ClientConfig) -> dict[str, object]:
    return {
        "group": config.group,
        "protocol": config.protocol,
        "start": str(config.start),
        "out_of_range": config.out_of_range,
        "settings": [chosen._asdict() for chosen in config.chosen],
    }


def _chosen(config: ClientConfig) -> Table:
    chosen = Table(title="set by lanes", title_justify="left")
    for heading in ("setting", "value", "why"):
        chosen.add_column(heading, overflow="fold")
    for name, value, reason in config.chosen:
        chosen.add_row(name, str(value), reason)
    return chosen


def _text_key(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        stop(f"KEY {text!a}: {error.reason}; give its bytes with --hex", EXIT_USAGE)


def _int_key(text: str) -> bytes:
    if _DIGITS.fullmatch(text) is None:
        stop(f"KEY {text!a}: must be a decimal number of up to 39 digits with --int", EXIT_USAGE)
    try:
        return key_bytes(int(text))
    except ValueError as error:
        stop(f"KEY {text}: {error}", EXIT_USAGE)


def _hex_key(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        stop(f"KEY {text!a}: must be bytes in hex with --hex, two digits each", EXIT_USAGE)
