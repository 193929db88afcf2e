"""The options that name a topic, subject or table of dead letters, and its box.

An adapter registers its box in the entry-point group ``lanes.dead_letter_boxes``. The commands call the box with these
arguments:

- ``kafka``: topic, server, configuration file, settings
- ``jetstream``: server, subject
- ``postgres``: connection string, name, and schema, where "" is the default schema
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from lanes.cli.brokers import Config, Server, Settings, is_nats, make_client
from lanes.cli.kit import Misuse
from lanes.dead_letter import printable
from lanes.dead_letters.box import DeadLetterBox


class Where(NamedTuple):
    """The options that name the dead letters, by topic, subject or PostgreSQL name, and their server."""

    topic: Annotated[str, typer.Option(help="Kafka topic of the dead letters.", metavar="NAME", show_default=False)] = (
        ""
    )
    config: Config = None
    settings: Settings = []  # noqa: RUF012 (typer copies it)
    subject: Annotated[
        str, typer.Option(help="JetStream subject of the dead letters.", metavar="NAME", show_default=False)
    ] = ""
    server: Server = ""
    name: Annotated[
        str, typer.Option(help="Name of the dead letters in PostgreSQL.", metavar="NAME", show_default=False)
    ] = ""
    dsn: Annotated[
        str,
        typer.Option(
            help="Connection string of PostgreSQL, without a password.",
            metavar="DSN",
            show_default="the PG… variables of the environment",
        ),
    ] = ""
    schema: Annotated[
        str, typer.Option(help="Schema of the PostgreSQL tables.", metavar="NAME", show_default="lanes")
    ] = ""

    def __str__(self) -> str:
        return printable(self.topic or self.subject or self.name)

    @property
    def broker(self) -> str:
        """Words for the server."""
        return "PostgreSQL server" if self.name else "NATS server" if self.subject else "Kafka broker"

    def box(self) -> DeadLetterBox:
        """Make the ``DeadLetterBox``.

        Raises ``ConfigError`` or ``Misuse``, or ends the process if an extra is missing.
        """
        given = [option for option in ("topic", "subject", "name") if getattr(self, option)]
        if not given:
            raise Misuse("needs one of --topic NAME (Kafka), --subject NAME (JetStream) and --name NAME (PostgreSQL)")
        if len(given) > 1:
            raise Misuse(
                f"has {' and '.join(f'--{option}' for option in given)}, but dead letters are in one place; keep "
                "--topic for Kafka, --subject for JetStream or --name for PostgreSQL"
            )
        for option in ("topic", "subject"):
            if "://" in getattr(self, option):
                # The value is not shown, because an address may have a password.
                raise Misuse(
                    f"has the address of a server as --{option}; pass the address by --server and a name by --{option}"
                )
        if self.name:
            if any(sign in self.name for sign in ("://", "host=", "password=")):
                # The name is not shown, because an address may have a password.
                raise Misuse("has the address of a server as --name; pass the address by --dsn and a name by --name")
            if self.server or self.config is not None or self.settings:
                raise Misuse("has --name with --server, --config or -X, which are for brokers; use --dsn")
            return _make_box("postgres", "--name", self.dsn, self.name, self.schema)
        if self.dsn or self.schema:
            raise Misuse("has --dsn or --schema, which are for dead letters in PostgreSQL; add --name NAME")
        if self.subject:
            if self.config is not None or self.settings:
                raise Misuse("has --subject with --config or -X, which are for Kafka; leave them out")
            if not self.server:
                raise Misuse("needs --server ADDRESS of a NATS server, such as nats://127.0.0.1:4222")
            return _make_box("jetstream", "--subject", self.server, self.subject)
        if is_nats(self.server):
            raise Misuse(
                "has --topic, which is for Kafka, but --server is the URL of a NATS server; use --subject NAME"
            )
        return _make_box("kafka", "--topic", self.topic, self.server, self.config, self.settings)


def _make_box(broker: str, option: str, *arguments: object) -> DeadLetterBox:
    box: DeadLetterBox = make_client("lanes.dead_letter_boxes", broker, f"lanes dead-letters {option}", *arguments)
    return box
